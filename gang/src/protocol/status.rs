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
use super::types::{Hindrance, Refused};
use crate::dialect::value::cut;
use crate::key::Dialect;
use crate::terms::{Repair, Terms};

/// The condition of a gang whose pods several conventions name.
const CONTESTED: &str = "Contested";

/// The condition of a gang for which something may not be done.
pub const HINDERED: &str = "Hindered";

/// The reason of a gang whose members are being deleted for a restart. A process that takes over knows the restart by it.
pub(super) const RESTARTING: &str = "is being started anew";

/// Longest reason, text for parked pods and message, in bytes. kube-scheduler is told the text for every node.
const REASON: usize = 700;
const TEXT: usize = 1024;
const MESSAGE: usize = 4096;

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

/// Words for a gang's standing: in few, and at length.
struct Words {
    reason: String,
    message: String,
}

impl Words {
    fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason: short(reason.into(), REASON),
            message: short(message.into(), MESSAGE),
        }
    }

    /// With more to the reason.
    fn and(self, more: &str) -> Self {
        Self::new(self.reason + more, self.message)
    }
}

impl Gang {
    /// Brings the text for parked pods up to date.
    pub(super) fn retext(&mut self, env: &Env<'_>) {
        let words = self.words_now(env.now.at);
        let mut text = format!("gang {}{}{}", self.key, joint(&words.reason), words.reason);
        if let Some(passed) = self.passed_over() {
            text.push_str(&format!(" (it goes by {}; {passed})", self.key.dialect));
        }
        let text = short(text, TEXT);
        if *self.text != *text {
            self.text = text.into();
        }
    }

    fn words_now(&self, now: Instant) -> Words {
        let count = self.members.count();
        let min = self.min();
        if let Some(terms) = self.working_terms().filter(|_| self.goes_singly()) {
            return Words::new(
                "is no gang: each of its pods goes by itself",
                format!("as {} says", terms.decided_by),
            );
        }
        match self.phase(now) {
            GangPhase::Collecting => self.words_collecting(now).and(&self.words_elsewhere()),
            GangPhase::Invalid => self.words_invalid(),
            GangPhase::Queued if self.is_kept_gated() => Words::new(
                "waits until its scheduling gates can be removed",
                self.hindered.get(&Hindrance::Gates).map_or("", |why| why),
            ),
            GangPhase::Queued => match &self.tries.refused {
                None => Words::new("waits its turn", "it is planned as soon as those before it are"),
                Some(refused) => Words::new(no_room(refused), &*refused.message),
            },
            GangPhase::Backoff => {
                let why = self.tries.pause.as_ref().map_or("", |(_, why)| why);
                Words::new(
                    format!("is tried again soon: {why}"),
                    "the wait doubles with every try that fails",
                )
            }
            GangPhase::Preempting if self.waits_for_the_ending() => Words::new(
                "waits for pods that are ending",
                "all that have to go for it are on their way out, as slowly as their grace periods allow; their devices are kept for it",
            ),
            GangPhase::Preempting => Words::new(
                "waits for pods that have to go for it",
                "their devices are kept for it",
            ),
            GangPhase::Planned => {
                let coming = count.of(Class::Waiting) > 0;
                let message = format!(
                    "{} of {min} members are ready to be bound",
                    count.ready().min(min)
                );
                let reason = if coming { "has its places" } else { "is on its way" };
                Words::new(reason, message)
            }
            GangPhase::Committing => match self.commit_refused() {
                None => Words::new("is being decided", "the decision is being written"),
                Some(words) => Words::new(
                    format!("cannot be decided: {words}"),
                    "the decision is written again: an earlier write of it may have come through",
                ),
            },
            GangPhase::Binding => self.with_why(
                now,
                "is being bound".to_owned(),
                format!("{} of {min} bound{}", bound(count).min(min), ended_well(count)),
            ),
            GangPhase::Bound => self.words_bound(),
            GangPhase::Repairing => self.words_repairing(now),
            GangPhase::Done => {
                let message = match count.of(Class::Completed) {
                    0 => "it has no members any more".to_owned(),
                    ended => format!("{ended} of its members ended well"),
                };
                Words::new("has ended", message)
            }
        }
    }

    /// All that have to go for it are on their way out.
    fn waits_for_the_ending(&self) -> bool {
        matches!(&self.state, State::Planned(planned) if planned.all_gone_by().is_some())
    }

    fn words_collecting(&self, now: Instant) -> Words {
        let count = self.members.count();
        let exist = count.exist();
        let back = kept_back(count);
        let terms = match &self.agreed {
            Agreed::Terms(terms) => terms,
            Agreed::Unknown(why) => {
                return Words::new(why.to_string(), format!("{exist} members exist{back}"));
            }
            Agreed::Invalid(_) => return self.words_invalid(),
        };
        if self.enough(Count::exist) && self.waits_for_rest(now) {
            let total = terms.total.unwrap_or_default();
            return Words::new(
                format!("{exist} of {total} members exist"),
                format!("{} are enough; the rest may come any moment", terms.min),
            );
        }
        if exist >= terms.min {
            let short = terms.by_role.iter().find_map(|(role, min)| {
                let there = self.members.count_of(role).exist();
                (there < *min).then(|| format!("{there} of {min} members of role {role} exist"))
            });
            if let Some(reason) = short {
                return Words::new(reason, format!("as {} says{back}", terms.decided_by));
            }
        }
        let mut reason = format!("{exist} of {} members exist", terms.min);
        if let Some(owner) = &terms.unread {
            reason.push_str(&format!(
                "; {owner}, which may start some of its pods before the others, does not exist or may not be read"
            ));
        }
        Words::new(reason, format!("as {} says{back}", terms.decided_by))
    }

    /// That members are another scheduler's to place, if some are.
    fn words_elsewhere(&self) -> String {
        let by = self.members.elsewhere();
        by.map(|(by, count)| format!("; scheduled by {by}: {count}"))
            .collect()
    }

    fn words_invalid(&self) -> Words {
        let mut faults: Vec<String> = self.object_fault.iter().map(ToString::to_string).collect();
        if let Agreed::Invalid(of_terms) = &self.agreed {
            faults.extend(of_terms.iter().map(ToString::to_string));
        }
        let first = faults.first().cloned().unwrap_or_default();
        Words::new(format!("is not valid: {first}"), faults.join("; "))
    }

    fn words_bound(&self) -> Words {
        let count = self.members.count();
        let min = self.min();
        let settled = count.settled();
        if settled < min {
            let why = match &self.owner {
                Some(owner) if self.owner_over => format!("{owner} has ended or is gone"),
                _ => "repair: ignore".to_owned(),
            };
            return Words::new(
                format!("runs with {settled} of {min} members"),
                format!("lost members are not replaced ({why})"),
            );
        }
        let bound = format!("{} bound{}", bound(count), ended_well(count));
        let extras = self.members.unplaced().len();
        if extras == 0 {
            return Words::new("is bound", format!("{bound}, {min} needed"));
        }
        let why = match &self.tries.refused {
            _ if self.is_invalid() => {
                let words = self.words_invalid();
                return Words::new(
                    format!("is bound; for more members it {}", words.reason),
                    words.message,
                );
            }
            Some(refused) => format!("is bound; waits for room for more members: {}", refused.reason),
            None => "is bound; more members wait their turn".to_owned(),
        };
        Words::new(why, format!("{bound}, {min} needed, {extras} waiting"))
    }

    /// Words for a decided gang that lacks members, with why those that wait have no place.
    fn with_why(&self, now: Instant, mut reason: String, mut message: String) -> Words {
        let pause = self.tries.pause.as_ref().filter(|(until, _)| now < *until);
        if self.members.unplaced().is_empty() {
            // Whoever is missing does not wait for a place.
        } else if let Some((_, why)) = pause {
            reason.push_str(&format!("; is tried again soon: {why}"));
        } else if let Some(refused) = &self.tries.refused {
            reason.push_str(&format!("; {}", no_room(refused)));
            message.push_str(&format!("; {}", refused.message));
        }
        Words::new(reason, message)
    }

    fn words_repairing(&self, now: Instant) -> Words {
        if matches!(self.state, State::Restarting { .. }) {
            let old = self.members.old_present();
            let mut message = format!("members of before that are not gone yet: {old}");
            if let Some(why) = self.hindered.get(&Hindrance::Removal) {
                message.push_str(&format!("; {why}"));
            }
            return Words::new(RESTARTING, message);
        }
        let count = self.members.count();
        let min = self.min();
        let lacking = self.missing(Count::settled);
        let kept = self.slots.lost().count();
        let places = match (kept, self.repair()) {
            (0, _) => "no place is kept for them any more".to_owned(),
            (_, Repair::Restart) => "it is started anew".to_owned(),
            (1, _) => "1 place is kept for a replacement".to_owned(),
            (kept, _) => format!("{kept} places are kept for replacements"),
        };
        self.with_why(
            now,
            format!("lacks {lacking} of {min} members"),
            format!("{} bound{}; {places}", bound(count), ended_well(count)),
        )
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

    /// Holds what the object shows of the decision that stands against what was said last. That may be on its way yet; but once it was shown, whoever
    /// overwrites it, be it a write of a process before that comes late, sees it written again: members wait for what is not written down.
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
            slots: self.decided_slots(),
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
        let satisfied = self.min() > 0 && self.enough(Count::settled);
        let waits = !matches!(phase, GangPhase::Bound | GangPhase::Done);
        GangStatus {
            phase,
            dialect: self.key.dialect.as_str().to_owned(),
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
            strikes: self.tries.strikes,
            decision: None,
            conditions: self.conditions(&words, phase, satisfied, unix),
            reason: words.reason,
            message: words.message,
        }
    }

    fn conditions(&mut self, words: &Words, phase: GangPhase, bound: bool, unix: i64) -> Vec<Condition> {
        let (valid, valid_reason, valid_message) = self.validity();
        let placed = !self.slots.is_empty() || bound;
        let phase = format!("{phase:?}");
        let passed = self.passed_over();
        let contested = passed.map(|passed| {
            let message = format!("its pods go by {}; {passed}", self.key.dialect);
            (CONTESTED, true, "SeveralConventions".to_owned(), message)
        });
        let hindered = self.hindered.values().next();
        let hindered = hindered.map(|why| (HINDERED, true, "MissingRight".to_owned(), why.to_string()));
        let mut made = Vec::with_capacity(5);
        let all = [
            Some(("Valid", valid, valid_reason.to_owned(), valid_message)),
            Some(("Placed", placed, phase.clone(), words.reason.clone())),
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
        let also: Vec<&str> = self.words.also().map(Dialect::as_str).collect();
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
            Agreed::Terms(_) if self.members.count().of(Class::Faulty) > 0 => {
                let fault = self.members.first_fault();
                (false, "InvalidMember", fault.unwrap_or_default())
            }
            Agreed::Terms(terms) => (true, "Valid", format!("as {} says", terms.decided_by)),
            Agreed::Invalid(_) => (false, "Invalid", self.words_invalid().message),
        }
    }
}

fn short(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    cut(text.into(), most).to_string()
}

/// Between a gang's name and what is said of it.
fn joint(reason: &str) -> &'static str {
    let counts = reason.starts_with(|c: char| c.is_ascii_digit());
    let verb = ["waits", "cannot", "is", "has", "runs", "lacks"]
        .iter()
        .any(|verb| reason.split(' ').next() == Some(*verb));
    if verb && !counts { " " } else { ": " }
}

fn no_room(refused: &Refused) -> String {
    let how = if refused.hopeless {
        "cannot fit"
    } else {
        "waits for room"
    };
    format!("{how}: {}", refused.reason)
}

/// Members that are as good as bound, without those that have ended.
fn bound(count: &Count) -> u32 {
    count.settled() - count.of(Class::Completed)
}

fn ended_well(count: &Count) -> String {
    match count.of(Class::Completed) {
        0 => String::new(),
        ended => format!(", {ended} ended well"),
    }
}

fn kept_back(count: &Count) -> String {
    let mut more = String::new();
    let foreign = count.of(Class::Foreign);
    if foreign > 0 {
        more.push_str(&format!(
            "; kept back by scheduling gates that Gantry does not remove: {foreign}"
        ));
    }
    let faulty = count.of(Class::Faulty);
    if faulty > 0 {
        more.push_str(&format!("; not valid: {faulty}"));
    }
    more
}

fn time(unix: i64) -> Time {
    Time(Timestamp::from_second(unix).unwrap_or(Timestamp::UNIX_EPOCH))
}
