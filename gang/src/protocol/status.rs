//! What people read of a gang: the status of its object, and the text its parked pods are told. A text changes only when what it says
//! does: kube-scheduler tries a pod again whenever its text changes.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{Decision, GangPhase, GangStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::agreed::Agreed;
use super::gang::{Env, Gang, State};
use super::members::{Class, Count};
use super::recovery::Known;
use super::types::Blocker;
use super::words::{Words, short};
use crate::key::Integration;
use crate::terms::Terms;

/// The condition of a gang whose pods several conventions name.
const AMBIGUOUS_MEMBERSHIP: &str = "AmbiguousMembership";

/// The condition of a gang for which something may not be done.
pub const BLOCKED: &str = "Blocked";

/// Longest text for parked pods, in bytes: kube-scheduler is told it for every node.
const TEXT: usize = 1024;

/// What was last said of a gang, so that it is said again only when it has changed.
#[derive(Debug, Clone, Default)]
pub(super) struct Told {
    status: Option<GangStatus>,
    /// The decision and the version of the slots it was made from.
    decision: Option<(Option<String>, u64)>,
    /// The object has shown it.
    shown: bool,
    /// Since when each condition is as it is.
    since: [Option<(bool, i64)>; 5],
}

impl Told {
    /// Whatever was said is not there any more: it has to be said again.
    pub(super) fn forget(&mut self) {
        self.status = None;
    }

    /// Somebody has written other places over those that were said.
    pub(super) fn forget_places(&mut self) {
        self.decision = None;
    }

    pub(super) fn anything(&self) -> bool {
        self.status.is_some()
    }
}

impl Gang {
    /// Brings the text for parked pods up to date.
    pub(super) fn retext(&mut self, env: &Env<'_>) {
        let words = self.words_now(env.now.at);
        let mut text = format!("gang {}{}{}", self.key, joint(&words.reason), words.reason);
        if let Some(passed) = self.passed_over() {
            text.push_str(&format!(" (it goes by {}; {passed})", self.key.integration));
        }
        let text = short(text, TEXT);
        if *self.text != *text {
            self.text = text.into();
        }
    }

    /// Whether its status may be written now: not while the decision is, for the two would overtake one another.
    pub(super) fn may_tell(&self) -> bool {
        !matches!(self.state, State::Committing(_))
    }

    /// Its status, if it is another than was last said.
    pub(super) fn take_status(&mut self, now: Instant, unix: i64) -> Option<GangStatus> {
        let mut status = self.status(now, unix);
        let decision = match &self.state {
            State::Decided(decided) => Some(decided.id.clone()),
            State::Restarting { of, .. } => of.as_ref().map(|of| of.id.clone()),
            _ => None,
        };
        let version = (decision, self.slots.version());
        let same_decision = self.told.decision.as_ref() == Some(&version);
        if same_decision && self.told.status.as_ref() == Some(&status) {
            return None;
        }
        self.told.status = Some(status.clone());
        self.told.decision = Some(version);
        self.told.shown = false;
        status.decision = self.decision();
        if let (State::Decided(decided), Some(decision), false) =
            (&mut self.state, &mut status.decision, same_decision)
        {
            decided.written.say(decision);
        }
        Some(status)
    }

    /// Holds what the object shows of the decision that stands against what was said last. That may be on its way yet; but once it was
    /// shown, whoever overwrites it, be it a write of a process before that comes late, sees it written again: members wait for what is not
    /// written down.
    pub(super) fn follow_told(&mut self, known: &Known, shown: &Decision) {
        let version = (self.decision_id().map(str::to_owned), self.slots.version());
        if self.told.decision.as_ref() != Some(&version) {
            // More is said in any case.
            return;
        }
        let Some(told) = &self.told.status else { return };
        if known.says(told) && self.decision().as_ref() == Some(shown) {
            self.told.shown = true;
        } else if self.told.shown {
            self.told.forget();
        }
    }

    /// The decision that stands, or that members still have to go of.
    pub(super) fn decision(&self) -> Option<Decision> {
        let decided = match &self.state {
            State::Decided(decided) => decided,
            State::Restarting { of, .. } => return of.as_deref().cloned(),
            _ => return None,
        };
        Some(Decision {
            id: decided.id.clone(),
            revision: decided.written.revision(),
            min: decided.min,
            domain: self.domain.to_string(),
            reservations: self.decided_slots(),
        })
    }

    /// Whose terms are shown: those that hold. A pod that contradicts a gang which is decided changes nothing of it.
    fn terms_shown(&self) -> Option<&Arc<Terms>> {
        match &self.state {
            State::Decided(_) => self.working_terms(),
            _ => self.agreed.terms(),
        }
    }

    /// Its status but for the decision.
    pub(super) fn status(&mut self, now: Instant, unix: i64) -> GangStatus {
        let count = *self.members.count();
        let words = self.words_now(now);
        let phase = self.phase(now);
        let satisfied = match self.state {
            State::Open => self.enough(Count::began),
            _ => self.enough(Count::settled),
        };
        let waits = !matches!(phase, GangPhase::Bound | GangPhase::Finished);
        GangStatus {
            phase,
            integration: self.key.integration.as_str().to_owned(),
            incarnation: self.key.incarnation.to_string(),
            name: self.key.name.to_string(),
            decided_by: self
                .terms_shown()
                .map(|terms| terms.decided_by.to_string())
                .unwrap_or_default(),
            min: self.min(),
            members: count.alive() + count.of(Class::Completed),
            bound: count.bound(),
            completed: count.of(Class::Completed),
            domain: self.domain.to_string(),
            waiting_since: waits.then(|| time(self.waiting_since)),
            bound_at: self.bound_at.map(time),
            restarting: matches!(self.state, State::Restarting { .. }),
            failed_attempts: self.tries.failed_attempts,
            decision: None,
            conditions: self.conditions(&words, phase, satisfied, unix),
            reason: words.reason,
            message: words.message,
        }
    }

    fn conditions(&mut self, words: &Words, phase: GangPhase, bound: bool, unix: i64) -> Vec<Condition> {
        let (valid, valid_reason, valid_message) = self.validity();
        let placed = !self.slots.is_empty() || self.enough(Count::settled);
        let phase = format!("{phase:?}");
        let passed = self.passed_over();
        let contested = passed.map(|passed| {
            let message = format!("its pods go by {}; {passed}", self.key.integration);
            (
                AMBIGUOUS_MEMBERSHIP,
                true,
                "SeveralIntegrations".to_owned(),
                message,
            )
        });
        let hindered = self.hindered.iter().next().map(|(what, why)| {
            let reason = match what {
                Blocker::Gates | Blocker::Removal => "MissingPermission",
                Blocker::Budget => "DisruptionBudget",
            };
            (BLOCKED, true, reason.to_owned(), why.to_string())
        });
        let mut made = Vec::with_capacity(5);
        let all = [
            Some(("Valid", valid, valid_reason.to_owned(), valid_message)),
            Some(("SlotReservation", placed, phase.clone(), words.reason.clone())),
            Some(("Bound", bound, phase, words.reason.clone())),
            contested,
            hindered,
        ];
        for (at, condition) in all.into_iter().enumerate() {
            let Some(since) = self.told.since.get_mut(at) else {
                continue;
            };
            let Some((kind, holds, reason, message)) = condition else {
                *since = None;
                continue;
            };
            let unchanged = since.filter(|(before, _)| *before == holds);
            let (_, changed) = *since.insert(unchanged.unwrap_or((holds, unix)));
            made.push(Condition {
                last_transition_time: time(changed),
                message,
                observed_generation: None,
                reason,
                status: if holds { "True" } else { "False" }.to_owned(),
                type_: kind.to_owned(),
            });
        }
        made
    }

    /// That other conventions name its pods too, if they do.
    fn passed_over(&self) -> Option<String> {
        let also: Vec<&str> = self.words.also().map(Integration::as_str).collect();
        let last = also.last()?;
        Some(match &also[..also.len() - 1] {
            [] => format!("{last} names them too and is passed over"),
            most => format!("{} and {last} name them too and are passed over", most.join(", ")),
        })
    }

    fn validity(&self) -> (bool, &'static str, String) {
        if self.is_invalid() {
            return (false, "Invalid", self.words_invalid().message);
        }
        let decided = self.min();
        match &self.agreed {
            Agreed::Unknown(why) => (false, "Unknown", why.to_string()),
            Agreed::Terms(terms) if terms.min != decided => {
                let message = format!(
                    "the minimum is {} now and was {decided} when it was decided; the new one holds when it is started anew",
                    terms.min
                );
                (false, "MinimumChanged", message)
            }
            Agreed::Terms(terms) if terms.repair != self.repair() => {
                let message = format!(
                    "repair is {} now and was {} when it was decided; the new one holds when it is started anew",
                    terms.repair.as_str(),
                    self.repair().as_str()
                );
                (false, "RepairChanged", message)
            }
            Agreed::Terms(_) if self.members.count().of(Class::Faulty) > 0 => {
                let fault = self.members.first_fault();
                (false, "InvalidMember", fault.unwrap_or_default())
            }
            Agreed::Terms(terms) => (true, "Valid", format!("as {} says", terms.decided_by)),
            Agreed::Invalid(_) => (false, "Invalid", self.words_invalid().message),
        }
    }
}

/// Between a gang's name and what is said of it.
fn joint(reason: &str) -> &'static str {
    let counts = reason.starts_with(|c: char| c.is_ascii_digit());
    let verb = ["waits", "cannot", "is", "has", "runs", "lacks"]
        .iter()
        .any(|verb| reason.split(' ').next() == Some(*verb));
    if verb && !counts { " " } else { ": " }
}

fn time(unix: i64) -> Time {
    Time(Timestamp::from_second(unix).unwrap_or(Timestamp::UNIX_EPOCH))
}
