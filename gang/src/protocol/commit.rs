//! The decision: written into the gang's object before the first member is bound, so that whoever takes over finishes it. A write of which
//! nobody knows whether it happened is never taken for one that did not.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DecidedReservation, Decision, PodUid, ReservedDevices};

use super::gang::{Committing, Decided, Env, Expects, Gang, Planned, State};
use super::members::{Class, Count};
use super::slots::{Holder, Slot};
use super::standing::after;
use super::types::{CommitFailure, Work};
use super::written::Written;

/// When a decision was made, by its name: in seconds since 1970, and which of its process it was. `None` of a name that is not ours.
pub(super) fn made_at(decision: &Decision) -> Option<(i64, u64)> {
    let mut parts = decision.id.rsplit('-');
    let number = parts.next()?.parse().ok()?;
    let at = parts.next()?.parse().ok()?;
    Some((at, number))
}

impl Gang {
    /// Asks for the decision to be written.
    pub(super) fn begin_commit(&mut self, env: &mut Env<'_>) {
        *env.decisions += 1;
        let decision = Decision {
            id: format!("{}-{}-{}", env.settings.identity, env.now.unix, env.decisions),
            revision: 0,
            min: self.min(),
            domain: self.domain.to_string(),
            reservations: self.decided_slots(),
        };
        env.work.push(Work::Commit {
            gang: self.key.clone(),
            decision: decision.clone(),
        });
        self.state = State::Committing(Committing {
            decision,
            expects: Expects::Outcome,
            doubt: false,
            refused: None,
        });
    }

    /// The slots as they are written down.
    pub(super) fn decided_slots(&self) -> Vec<DecidedReservation> {
        self.slots
            .iter()
            .map(|(_, slot)| self.decided_slot(slot))
            .collect()
    }

    /// Whether the object says of a member that it has the place that it has.
    pub(super) fn is_written_down(&self, uid: &PodUid) -> bool {
        let State::Decided(decided) = &self.state else {
            return false;
        };
        let slot = self.slot_of(uid).map(|(_, slot)| self.decided_slot(slot));
        slot.is_some_and(|slot| decided.written.has(uid, &slot))
    }

    pub(super) fn decided_slot(&self, slot: &Slot) -> DecidedReservation {
        let pod = match &slot.holder {
            Holder::Kept | Holder::Leaving(_) => None,
            Holder::Assigned(uid) | Holder::Bound(uid) => Some(uid.clone()),
        };
        let name = pod.as_ref().and_then(|uid| self.members.get(uid));
        let sliced = self.working_terms().is_some_and(|terms| terms.slice.is_some());
        DecidedReservation {
            node: slot.node.clone(),
            devices: slot
                .devices
                .iter()
                .map(|(resource, ids)| {
                    let mut ids = ids.clone();
                    ids.sort_unstable();
                    ReservedDevices {
                        resource: resource.clone(),
                        ids,
                    }
                })
                .collect(),
            rank: slot.rank,
            role: slot.role.to_string(),
            // Where slices are counted by it and nothing else says it.
            ordinal: slot
                .ordinal
                .filter(|ordinal| sliced && slot.rank != Some(*ordinal)),
            pod_name: name.map(|kept| kept.member.name.to_string()).unwrap_or_default(),
            pod,
        }
    }

    /// The write has ended.
    pub(super) fn committed(&mut self, env: &mut Env<'_>, id: &str, result: Result<(), CommitFailure>) {
        if self.decision_id() != Some(id) {
            // What was said since then was to be written after it, and is dropped for being older than it.
            self.told.forget();
        }
        let State::Committing(committing) = &mut self.state else {
            return;
        };
        if committing.decision.id != id {
            return;
        }
        match result {
            Ok(()) => self.decide(),
            // Nothing of it stands, and nothing of it is on its way: its places are of use to others until it is tried again.
            Err(CommitFailure::Refused(words)) if !committing.doubt => {
                self.strike(env, format!("its decision cannot be written: {words}").into());
            }
            // A write before this one may still come to be, so this one has to: nobody else brings the end about.
            Err(CommitFailure::Refused(words)) => {
                committing.refused = Some(words);
                self.commit_again(env);
            }
            Err(failure) => {
                committing.expects = Expects::Object;
                committing.doubt |= failure == CommitFailure::Unknown;
                committing.refused = None;
            }
        }
    }

    /// Asks for the same decision to be written once more.
    fn commit_again(&mut self, env: &mut Env<'_>) {
        if let State::Committing(committing) = &mut self.state {
            committing.expects = Expects::Outcome;
            env.work.push(Work::Commit {
                gang: self.key.clone(),
                decision: committing.decision.clone(),
            });
        }
    }

    /// What the API server says that refuses the decision, though it may stand already.
    pub(super) fn commit_refused(&self) -> Option<&Arc<str>> {
        match &self.state {
            State::Committing(committing) => committing.refused.as_ref(),
            _ => None,
        }
    }

    /// The decision stands.
    pub(super) fn decide(&mut self) {
        let State::Committing(committing) = &self.state else {
            return;
        };
        let by_role = self.working_terms().map(|terms| terms.by_role.clone());
        self.state = State::Decided(Decided {
            id: committing.decision.id.clone(),
            min: committing.decision.min,
            by_role: Some(by_role.unwrap_or_default()),
            repair: self.working_terms().map(|terms| terms.repair),
            was_bound: false,
            short: false,
            lost_since: None,
            lack: None,
            gave_to: None,
            written: Written::new(&committing.decision),
        });
        self.tries.pause = None;
        let stale: Vec<(u32, Holder)> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.stale)
            .map(|(id, slot)| (id, slot.holder.clone()))
            .collect();
        for (id, holder) in stale {
            self.give_up_place(id, &holder);
        }
    }

    /// The object was read after a write that failed or of which nobody knows; it shows no decision.
    pub(super) fn not_committed(&mut self, env: &mut Env<'_>) {
        let arrived = self.members.count().of(Class::Arrived) > 0;
        let complete = arrived && self.terms().is_some() && self.enough(Count::ready);
        let State::Committing(committing) = &self.state else {
            return;
        };
        if complete || committing.doubt {
            // The first write may still happen: so the same is written again, never another.
            self.commit_again(env);
        } else {
            // It certainly does not stand, and members have withdrawn meanwhile.
            let until = after(env.now.at, env.settings.grace);
            self.state = State::Planned(Planned {
                until,
                last: until,
                most: u32::MAX,
                end: until,
                victims: BTreeMap::new(),
            });
        }
    }
}
