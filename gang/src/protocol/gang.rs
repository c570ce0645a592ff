//! One gang: what is known of it and what it was given. Here its parts are kept in step: a member's slot and a slot's holder always
//! name one another. What follows from a change is decided in `standing`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangSpec, NodeName, PodUid};

use super::agreed::{Agreed, Words};
use super::gangs::Taken;
use super::members::{Count, Kept, Members};
use super::parked::{Kind, Parked};
use super::slots::{Holder, Slot, Slots};
use super::status::Told;
use super::stuck::Shortage;
use super::types::{Blocker, Now, Refusal, Settings, Work};
use super::written::Written;
use crate::key::GangKey;
use crate::membership::OwnerRef;
use crate::terms::{Authority, Fault, Repair, Terms};

/// Decisions that are over and may still be seen in the object; older ones are long overwritten.
const MAX_PAST: usize = 8;

/// A gang.
#[derive(Debug, Clone)]
pub(super) struct Gang {
    pub(super) key: Arc<GangKey>,
    pub(super) members: Members,
    pub(super) slots: Slots,
    pub(super) words: Words,
    pub(super) agreed: Agreed,
    /// The last terms that were valid: a decided gang goes on by them.
    pub(super) good: Option<Arc<Terms>>,
    pub(super) spec: Option<GangSpec>,
    /// What is wrong with its object: its spec, or that the object is another gang's.
    pub(super) object_fault: Option<Fault>,
    pub(super) state: State,
    pub(super) tries: Tries,
    /// Until then a gang that has its minimum waits for the rest.
    pub(super) settle_until: Instant,
    /// Since when it waits.
    pub(super) waiting_since: i64,
    /// When its minimum was bound.
    pub(super) bound_at: Option<i64>,
    /// The part of the fabric it was given.
    pub(super) domain: Arc<str>,
    /// When members that do not come are woken once more, and how long after that again.
    pub(super) nudge: Option<(Instant, Duration)>,
    /// Decisions that are over.
    pub(super) past: Vec<String>,
    /// Members that ended well before this process began, and whose pods are gone.
    pub(super) completed_before: u32,
    /// What its parked pods are told.
    pub(super) text: Arc<str>,
    /// Of what kind that is.
    pub(super) reason: Kind,
    pub(super) parked: Parked,
    pub(super) told: Told,
    /// When it is looked at again by itself.
    pub(super) timer: Option<Instant>,
    /// Devices of its slots, as counted for its namespace.
    pub(super) counted: u64,
    /// What was said of it has to be put together anew.
    pub(super) reagree: bool,
    /// All its members with devices have to go for another gang.
    pub(super) evicted_whole: bool,
    /// One of its members has gone for another gang.
    pub(super) evicted_lost: bool,
    /// The owner that it goes by.
    pub(super) owner: Option<OwnerRef>,
    /// That has ended, or is gone: nobody makes its members anew.
    pub(super) owner_over: bool,
    /// That is suspended: nobody makes its members anew before it goes on.
    pub(super) owner_suspended: bool,
    /// What has to be done to pods for it may not be done, and what would help.
    pub(super) hindered: BTreeMap<Blocker, Arc<str>>,
}

/// How far a gang is. What people see of it ([`gantry_api::GangPhase`]) follows from this and the members.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// It has no place.
    Open,
    /// It has a place that can still be taken away.
    Planned(Planned),
    /// The decision is being written.
    Committing(Committing),
    /// It is decided: only forward.
    Decided(Decided),
    /// Its members of the life before are being deleted.
    Restarting {
        /// When to say so again.
        again: Instant,
        /// The decision of that life: it stays in the object until they are gone, for it names them.
        of: Option<Arc<Decision>>,
        /// The gang that it gives way to, where both were stuck.
        to: Option<Arc<GangKey>>,
    },
    /// It has no members.
    Over {
        /// Until when it is remembered.
        until: Instant,
    },
}

#[derive(Debug, Clone)]
pub(super) struct Planned {
    /// Until when another member must have come, or the victims be gone.
    pub(super) until: Instant,
    /// Beyond this `until` is not put off for a member that hung up.
    pub(super) last: Instant,
    /// So many were ready at a time: with every one more `until` is put off.
    pub(super) most: u32,
    /// Beyond this it is not put off for anything.
    pub(super) end: Instant,
    /// Pods that must go first; of those that are on their way out, by when they are to be gone, in seconds since 1970.
    pub(super) victims: BTreeMap<PodUid, Option<i64>>,
}

impl Planned {
    /// By when the last of those that must go is to be gone, in seconds since 1970, if all of them are on their way out.
    pub(super) fn all_gone_by(&self) -> Option<i64> {
        let by: Option<Vec<i64>> = self.victims.values().copied().collect();
        by?.into_iter().max()
    }
}

#[derive(Debug, Clone)]
pub(super) struct Committing {
    pub(super) decision: Decision,
    pub(super) expects: Expects,
    /// A write of it may still come to be, though nobody answered.
    pub(super) doubt: bool,
    /// What the API server said when it refused it last.
    pub(super) refused: Option<Arc<str>>,
}

/// What a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expects {
    /// Its outcome.
    Outcome,
    /// The object as it is now.
    Object,
}

#[derive(Debug, Clone)]
pub(super) struct Decided {
    pub(super) id: String,
    pub(super) min: u32,
    /// The minimums of its roles; `None` for a decision of a process before, until its terms are known again.
    pub(super) by_role: Option<Vec<(Arc<str>, u32)>>,
    /// Its minimum was bound once.
    pub(super) was_bound: bool,
    /// What its pods said of repair; whoever may write one of them does not change it any more. `None` as for roles.
    pub(super) repair: Option<Repair>,
    /// It was bound, and lacks members now.
    pub(super) short: bool,
    /// Since when fewer members are left than it needs, where all of it is to be started anew for that.
    pub(super) lost_since: Option<Instant>,
    /// What it lacks of its minimum.
    pub(super) lack: Option<Shortage>,
    /// Who has the place of a member that it lost and lacks yet.
    pub(super) gave_to: Option<Arc<str>>,
    /// Who has which place by the object: nobody is bound to a place that is not written down as his.
    pub(super) written: Written,
}

/// How its tries to get a place went.
#[derive(Debug, Clone, Default)]
pub(super) struct Tries {
    /// The room it was last planned in; not again before it grows.
    pub(super) considered: Option<u64>,
    /// A plan is asked for, and nothing has changed since.
    pub(super) asked: bool,
    pub(super) refused: Option<Refusal>,
    /// It is not tried before this, and why.
    pub(super) pause: Option<(Instant, Arc<str>)>,
    pub(super) failed_attempts: u32,
    pub(super) replans: u32,
    /// Nodes it is planned without.
    pub(super) without: BTreeSet<NodeName>,
    /// How often a planned node was not offered.
    pub(super) misses: BTreeMap<NodeName, u32>,
    /// What kube-scheduler said last of nodes that it does not offer.
    pub(super) said: Option<Arc<str>>,
    /// Others were on their way out for it when the process before ended, which kept their devices for it.
    pub(super) resumes: bool,
}

/// What a step of a gang needs, and where it says what is to be done.
pub(super) struct Env<'a> {
    pub(super) now: Now,
    pub(super) settings: &'a Settings,
    pub(super) synced: bool,
    /// Which gangs have places with which devices.
    pub(super) taken: &'a Taken,
    /// Decisions made so far by this process.
    pub(super) decisions: &'a mut u64,
    pub(super) work: &'a mut Vec<Work>,
}

impl Gang {
    pub(super) fn new(key: Arc<GangKey>, now: Now) -> Self {
        Self {
            text: format!("gang {key} is new").into(),
            key,
            members: Members::default(),
            slots: Slots::default(),
            words: Words::default(),
            agreed: Agreed::Unknown("its size is said nowhere".into()),
            good: None,
            spec: None,
            object_fault: None,
            state: State::Open,
            tries: Tries::default(),
            settle_until: now.at,
            waiting_since: now.unix,
            bound_at: None,
            domain: "".into(),
            nudge: None,
            past: Vec::new(),
            completed_before: 0,
            reason: Kind::Phase(GangPhase::Pending),
            parked: Parked::default(),
            told: Told::default(),
            timer: None,
            counted: 0,
            reagree: true,
            evicted_whole: false,
            evicted_lost: false,
            owner: None,
            owner_over: false,
            owner_suspended: false,
            hindered: BTreeMap::new(),
        }
    }

    /// The terms, if they are known and nothing is wrong with them.
    pub(super) fn terms(&self) -> Option<&Arc<Terms>> {
        self.object_fault.is_none().then(|| self.agreed.terms()).flatten()
    }

    /// The terms it goes by, once it has begun: the last that were valid.
    pub(super) fn working_terms(&self) -> Option<&Arc<Terms>> {
        self.agreed.terms().or(self.good.as_ref())
    }

    /// Its pods are no gang: each goes by itself. One that was decided as a gang stays one.
    pub(super) fn goes_singly(&self) -> bool {
        let singles = self.working_terms().is_some_and(|terms| terms.singles);
        singles && matches!(self.state, State::Open) && !self.is_invalid()
    }

    /// A pod of it goes by itself: nothing is wrong with what it says of gangs either.
    pub(super) fn lets_go(&self, uid: &PodUid) -> bool {
        let says_well = |kept: &Kept| kept.member.membership.faults.is_empty();
        self.goes_singly() && self.members.get(uid).is_none_or(says_well)
    }

    pub(super) fn arrival(&self, settings: &Settings) -> Duration {
        self.working_terms()
            .map_or(settings.arrival, |terms| terms.arrival)
    }

    pub(super) fn repair(&self) -> Repair {
        let Some(terms) = self.working_terms() else {
            return Repair::default();
        };
        match (&self.state, terms.repair_by) {
            (State::Decided(decided), Authority::Pods) => decided.repair.unwrap_or(terms.repair),
            _ => terms.repair,
        }
    }

    /// The minimum that holds: after the decision the one it was decided for, or to which an object has lowered it since. 0 while it is not
    /// known.
    pub(super) fn min(&self) -> u32 {
        match &self.state {
            State::Decided(decided) => decided.min,
            State::Committing(committing) => committing.decision.min,
            _ => self.agreed.terms().map_or(0, |terms| terms.min),
        }
    }

    pub(super) fn by_role(&self) -> &[(Arc<str>, u32)] {
        match &self.state {
            State::Decided(decided) => decided.by_role.as_deref().unwrap_or_default(),
            _ => self.agreed.terms().map_or(&[], |terms| &terms.by_role),
        }
    }

    /// Whether what it goes by says of each role how many are needed.
    pub(super) fn knows_roles(&self) -> bool {
        match &self.state {
            State::Decided(decided) => decided.by_role.is_some(),
            _ => true,
        }
    }

    /// The minimum of a role; 0 where there is none.
    pub(super) fn role_min(&self, role: &str) -> u32 {
        let found = self.by_role().iter().find(|(of, _)| **of == *role);
        found.map_or(0, |(_, min)| *min)
    }

    /// How many of what `count` counts are missing: of the minimum, and of the minimums of roles.
    pub(super) fn missing(&self, count: impl Fn(&Count) -> u32) -> u32 {
        let total = self.min().saturating_sub(count(self.members.count()));
        let roles = self.missing_of_roles(count);
        total.max(roles.saturating_sub(self.completed_before))
    }

    /// How many are missing of the minimums of roles, all together.
    pub(super) fn missing_of_roles(&self, count: impl Fn(&Count) -> u32) -> u32 {
        let roles = self.by_role().iter().map(|(role, min)| {
            let there = count(&self.members.count_of(role));
            min.saturating_sub(there)
        });
        roles.fold(0, u32::saturating_add)
    }

    /// How many are missing of the minimum of a role.
    pub(super) fn missing_of(&self, role: &str, count: impl Fn(&Count) -> u32) -> u32 {
        self.role_min(role)
            .saturating_sub(count(&self.members.count_of(role)))
    }

    /// Whether there are as many of what `count` counts as are needed.
    pub(super) fn enough(&self, count: impl Fn(&Count) -> u32) -> bool {
        self.min() > 0 && self.missing(count) == 0
    }

    /// Gives a slot to a member that has none.
    pub(super) fn tie(&mut self, uid: &PodUid, id: u32, now: Instant) {
        let Some(kept) = self.members.get(uid) else { return };
        self.slots.fit(id, &kept.member);
        self.slots.set_holder(id, &Holder::Assigned(uid.clone()), now);
        let follows = self.slots.get(id).is_some_and(|slot| slot.follows);
        self.members.change(uid, |kept| {
            kept.slot = Some(id);
            kept.tied = Some(now);
            kept.follows = follows;
            kept.leave();
            kept.answered = false;
        });
    }

    /// Takes a slot away, from whoever has it.
    pub(super) fn drop_slot(&mut self, id: u32) {
        let Some(slot) = self.slots.remove(id) else { return };
        if let Some(uid) = slot.holder.pod() {
            self.members.change(uid, |kept| {
                kept.slot = None;
                kept.leave();
                kept.answered = false;
            });
        }
    }

    /// Takes its slot from a member; the slot stays.
    pub(super) fn untie(&mut self, uid: &PodUid, now: Instant) {
        let Some(id) = self.members.get(uid).and_then(|kept| kept.slot) else {
            return;
        };
        self.slots.set_holder(id, &Holder::Kept, now);
        self.members.change(uid, |kept| {
            kept.slot = None;
            kept.leave();
            kept.answered = false;
        });
    }

    pub(super) fn drop_all_slots(&mut self) {
        for id in self.slots.ids() {
            self.drop_slot(id);
        }
        self.nudge = None;
    }

    /// Remembers that a decision is over.
    pub(super) fn remember_past(&mut self, id: String) {
        if !self.past.contains(&id) {
            self.past.push(id);
        }
        if self.past.len() > MAX_PAST {
            self.past.remove(0);
        }
    }

    /// The decision that was made, as it stands now; or the one being written.
    pub(super) fn decision_id(&self) -> Option<&str> {
        match &self.state {
            State::Decided(decided) => Some(&decided.id),
            State::Committing(committing) => Some(&committing.decision.id),
            _ => None,
        }
    }

    /// Pods have to go before its members may come.
    pub(super) fn preempts(&self) -> bool {
        matches!(&self.state, State::Planned(planned) if !planned.victims.is_empty())
    }

    /// Some of its members have to go for another gang, or need not any more.
    pub(super) fn note_evicted(&mut self) {
        let life = self.members.life();
        let mut held = self
            .members
            .iter()
            .filter(|kept| kept.lives() && kept.life == life && kept.slot.is_some())
            .peekable();
        self.evicted_whole = held.peek().is_some() && held.all(|kept| kept.evicted);
    }

    /// A slot by the member that has it.
    pub(super) fn slot_of(&self, uid: &PodUid) -> Option<(u32, &Slot)> {
        let id = self.members.get(uid)?.slot?;
        Some((id, self.slots.get(id)?))
    }
}
