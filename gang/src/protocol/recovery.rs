//! Taking up what another process decided. Nothing but the gang's object and the pods tell: a decision there stands, as long as one of the
//! members it names does.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DecidedReservation, Decision, DeviceId, GangPhase, GangStatus, NodeName, PodUid};

use super::commit::made_at;
use super::gang::{Committing, Decided, Env, Expects, Gang, State};
use super::members::{Class, Kept};
use super::slots::{Holder, Slot};
use super::types::{Object, Stage};
use super::written::Written;
use crate::key::GangKey;
use crate::terms::Fault;

/// What is kept of an object.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) ours: bool,
    spec: Result<gantry_api::GangSpec, Fault>,
    /// The gang that its status speaks of; `None` if it has none yet.
    pub(super) of: Option<GangKey>,
    decision: Option<Arc<Decision>>,
    pub(super) phase: GangPhase,
    restarting: bool,
    pub(super) completed: u32,
    /// Members that were alive or had ended well.
    pub(super) members: u32,
    failed_attempts: u32,
    domain: Arc<str>,
    waiting_since: Option<i64>,
    bound_at: Option<i64>,
}

impl Known {
    pub(super) fn new(namespace: &Arc<str>, object: Object) -> Self {
        let status = object.status;
        let of = GangKey::of_status(namespace, &status);
        Self {
            ours: object.ours,
            spec: object.spec,
            of,
            decision: status.decision.map(Arc::new),
            phase: status.phase,
            restarting: status.restarting,
            completed: status.completed,
            members: status.members,
            failed_attempts: status.failed_attempts,
            domain: status.domain.into(),
            waiting_since: status.waiting_since.map(|time| time.0.as_second()),
            bound_at: status.bound_at.map(|time| time.0.as_second()),
        }
    }

    /// Whether its status is about this gang.
    pub(super) fn is_about(&self, key: &GangKey) -> bool {
        self.of.as_ref() == Some(key)
    }

    /// Whether it says what whoever takes over goes by, but for the decision, as `status` does.
    pub(super) fn says(&self, status: &GangStatus) -> bool {
        let bound_at = status.bound_at.as_ref().map(|time| time.0.as_second());
        let said = (status.phase, status.restarting, status.completed, bound_at);
        (self.phase, self.restarting, self.completed, self.bound_at) == said
    }

    /// When the decision that it shows was made.
    pub(super) fn made_at(&self) -> Option<(i64, u64)> {
        self.decision.as_deref().and_then(made_at)
    }

    /// Whether it shows a decision for this gang.
    pub(super) fn has_decided(&self, key: &GangKey) -> bool {
        self.is_about(key) && self.decision.is_some()
    }
}

impl Gang {
    /// The object says what a person wants.
    pub(super) fn follow_spec(&mut self, known: Option<&Known>) {
        self.object_fault = known.and_then(|known| known.spec.as_ref().err().cloned());
        self.spec = known.and_then(|known| known.spec.as_ref().ok().cloned());
    }

    /// The object shows a decision, or none. `free` says whether devices are nobody else's place.
    pub(super) fn follow_decision(
        &mut self,
        env: &mut Env<'_>,
        known: &Known,
        free: &dyn Fn(&NodeName, &DeviceId) -> bool,
    ) {
        if !env.synced {
            return;
        }
        let decision = known
            .decision
            .as_ref()
            .filter(|decision| known.is_about(&self.key) && !self.past.contains(&decision.id));
        match (&self.state, decision) {
            (State::Committing(Committing { decision: ours, .. }), Some(decision)) if *ours == **decision => {
                self.decide();
            }
            (State::Committing(_), None) => {
                if self.expects() == Some(Expects::Object) {
                    self.not_committed(env);
                }
            }
            (State::Decided(decided), shown) => match shown.filter(|shown| shown.id == decided.id) {
                Some(shown) => {
                    let shown = Arc::clone(shown);
                    if let State::Decided(decided) = &mut self.state
                        && !decided.written.show(&shown)
                    {
                        self.told.forget_places();
                    }
                    self.follow_told(known, &shown);
                }
                // Ours stands; whoever overwrote it sees it written again.
                None => self.told.forget(),
            },
            (_, Some(decision)) => self.adopt(env, known, &Arc::clone(decision), free),
            (State::Open, None) => {
                if known.is_about(&self.key) {
                    self.leave_behind(env, known, None);
                }
                self.follow_age(known);
                if known.is_about(&self.key) && self.is_bound_without_places() {
                    self.bound_at = self.bound_at.or(known.bound_at);
                }
            }
            (_, None) => {}
        }
    }

    /// A gang that waited when the process before ended goes on waiting, and does not begin anew: its age counts in the queue, its failed
    /// tries in how long it waits after the next one, and what those leave who were stopped for it is its own.
    fn follow_age(&mut self, known: &Known) {
        let Some(since) = known.waiting_since.filter(|_| known.is_about(&self.key)) else {
            return;
        };
        let of_then = self.members.iter().any(|kept| kept.member.created <= since);
        if !self.told.anything() && of_then {
            self.waiting_since = self.waiting_since.min(since);
            self.tries.failed_attempts = self.tries.failed_attempts.max(known.failed_attempts);
            self.tries.resumes = known.phase == GangPhase::Preempting;
        }
    }

    /// Takes a decision up that this process has not made.
    fn adopt(
        &mut self,
        env: &mut Env<'_>,
        known: &Known,
        decision: &Decision,
        free: &dyn Fn(&NodeName, &DeviceId) -> bool,
    ) {
        self.leave_behind(env, known, Some(decision));
        let named = decision.reservations.iter().filter_map(|slot| slot.pod.as_ref());
        let stands = named.clone().any(|uid| {
            self.members
                .get(uid)
                .is_some_and(|kept| kept.life == self.members.life())
        });
        // Those that have ended well have no place in it any more, and are of it all the same.
        let has_worked = self.members.iter().any(|kept| {
            kept.class(self.members.life()) == Class::Completed
                && known.bound_at.is_some_and(|bound| kept.member.created <= bound)
        });
        if !stands && !has_worked {
            // None of those it was about is left: those that are there now are another life's.
            self.remember_past(decision.id.clone());
            self.told.forget();
            return;
        }
        let begun = self.members.iter().any(Kept::pinned);
        if !begun && self.cannot_have_all(decision, free) {
            // The write came late, and what it speaks of has gone to others meanwhile: nobody is bound by it, so nobody is to be.
            self.remember_past(decision.id.clone());
            self.told.forget();
            return;
        }
        if known.restarting {
            self.resume_restart(env, known, decision);
            return;
        }
        self.drop_all_slots();
        // What is forged must not be counted for hours.
        let most = u32::try_from(env.settings.max_members).unwrap_or(u32::MAX);
        self.completed_before = known
            .completed
            .min(most)
            .saturating_sub(self.members.count().of(Class::Completed));
        for _ in 0..self.completed_before {
            self.members.complete(&"".into());
        }
        let min = self.lowered(decision.min);
        self.members.were(known.members.min(most));
        self.state = State::Decided(Decided {
            id: decision.id.clone(),
            min,
            by_role: self.roles_of(min),
            repair: self.agreed.terms().map(|terms| terms.repair),
            was_bound: known.bound_at.is_some(),
            short: known.phase == GangPhase::Degraded,
            lost_since: None,
            lack: None,
            gave_to: None,
            written: Written::new(decision),
        });
        self.tries.pause = None;
        self.tries.failed_attempts = known.failed_attempts;
        self.domain = known.domain.clone();
        self.bound_at = known.bound_at;
        self.waiting_since = known.waiting_since.unwrap_or(self.waiting_since);
        for decided in &decision.reservations {
            self.adopt_slot(decided, free, env.now.at);
        }
        let bound: Vec<PodUid> = self
            .members
            .iter()
            .filter(|kept| kept.slot.is_none() && matches!(kept.member.stage, Stage::Bound(_)))
            .map(|kept| kept.member.uid.clone())
            .collect();
        for uid in bound {
            self.follow(&uid, env.now.at);
        }
        for id in self.slots.kept().clone() {
            self.slots.doubt(id);
        }
        let coming: Vec<PodUid> = self.members.on_the_way().iter().cloned().collect();
        self.wake(env, coming);
        self.came_after_all(env, known);
    }

    /// The minimums of roles by which a gang was decided for so many; `None` while its terms are not known. Those of other terms are
    /// others.
    pub(super) fn roles_of(&self, min: u32) -> Option<Vec<(Arc<str>, u32)>> {
        let terms = self.agreed.terms()?;
        Some(if terms.min == min {
            terms.by_role.clone()
        } else {
            Vec::new()
        })
    }

    /// Whether a place of a decision is somebody else's.
    fn cannot_have_all(&self, decision: &Decision, free: &dyn Fn(&NodeName, &DeviceId) -> bool) -> bool {
        decision.reservations.iter().any(|slot| {
            let mut ids = slot.devices.iter().flat_map(|devices| &devices.ids);
            ids.any(|id| !free(&slot.node, id))
        })
    }

    fn adopt_slot(
        &mut self,
        decided: &DecidedReservation,
        free: &dyn Fn(&NodeName, &DeviceId) -> bool,
        now: Instant,
    ) {
        let member = decided.pod.as_ref().and_then(|uid| self.members.get(uid));
        let class = member.map(|kept| kept.class(self.members.life()));
        let bound_here = member.is_some_and(|kept| {
            let here = matches!(&kept.member.stage, Stage::Bound(node) if *node == decided.node);
            here && kept.lives()
        });
        if class == Some(Class::Completed) {
            return;
        }
        let taken = decided
            .devices
            .iter()
            .flat_map(|devices| &devices.ids)
            .any(|id| !free(&decided.node, id));
        if taken && !bound_here {
            return;
        }
        let slot = Slot {
            node: decided.node.clone(),
            devices: decided
                .devices
                .iter()
                .map(|devices| (devices.resource.clone(), devices.ids.clone()))
                .collect(),
            shape: None,
            came_to: None,
            rank: decided.rank,
            role: decided.role.as_str().into(),
            ordinal: decided.ordinal,
            // It is decided: nobody is waited for any more.
            follows: false,
            holder: Holder::Kept,
            since: now,
            stale: false,
        };
        let member = member.map(|kept| kept.member.uid.clone());
        let id = self.slots.insert(slot);
        let holds = matches!(
            class,
            Some(
                Class::Waiting
                    | Class::Bound
                    | Class::Coming
                    | Class::Following
                    | Class::Arrived
                    | Class::Lost
            )
        );
        if let Some(uid) = member.filter(|_| holds)
            && self.members.get(&uid).is_some_and(|kept| kept.slot.is_none())
        {
            self.tie(&uid, id, now);
            if bound_here {
                self.slots.set_holder(id, &Holder::Bound(uid.clone()), now);
            }
            self.follow(&uid, now);
        }
    }

    /// The process before had begun to delete all members: those that were there then still have to go.
    fn resume_restart(&mut self, env: &Env<'_>, known: &Known, decision: &Decision) {
        let new: Vec<PodUid> = self
            .members
            .iter()
            .filter(|kept| {
                let named = decision
                    .reservations
                    .iter()
                    .any(|slot| slot.pod.as_ref() == Some(&kept.member.uid));
                let before = known.bound_at.is_some_and(|bound| kept.member.created <= bound);
                !named && !before
            })
            .map(|kept| kept.member.uid.clone())
            .collect();
        self.begin_life_with(&new, true, env.now.at);
        self.remember_past(decision.id.clone());
        self.state = State::Restarting {
            again: env.now.at,
            of: Some(Arc::new(decision.clone())),
            to: None,
        };
    }
}
