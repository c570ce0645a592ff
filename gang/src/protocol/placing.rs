//! A gang is given its place or refused one: which member gets which slot, how long the place is kept, and whose end it waits for. Plans
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;

use super::Gangs;
use super::bulk;
use super::gang::{Env, Gang, Planned, State};
use super::members::Count;
use super::slots::Slot;
use super::standing::{NOT_OFFERED, after};
use super::types::{Blocker, Now, Placement, Refusal, Reservation, Settings, Work};
use crate::key::GangKey;

/// A place is kept for so many times as members may take to come, while they are coming.
const ARRIVALS: u32 = 5;

impl Gangs {
    /// How the planning of a gang that [`Gangs::next`] named has ended. A plan for a gang that has changed since is dropped.
    pub fn placed(&mut self, now: Now, gang: &GangKey, result: Result<Placement, Refusal>) {
        self.clock = Some(now);
        let Some((key, found)) = self.gangs.get_key_value(gang) else {
            return;
        };
        let key = key.clone();
        let wanted = match &found.state {
            State::Open => found.terms().is_some() && found.enough(Count::exist),
            State::Decided(_) => true,
            _ => false,
        };
        if !found.tries.asked || !wanted {
            return;
        }
        let result = result.and_then(|placement| match self.overlap(&placement) {
            Some(words) => Err(Refusal {
                reason: "the plan was overtaken".into(),
                message: words,
                hopeless: false,
            }),
            None => Ok(placement),
        });
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.tries.asked = false;
        }
        let (line, turn) = (self.line.take(), self.ready.get(&key).copied());
        self.with(now, &key, |gang, env| match &result {
            Ok(placement) => gang.place(env, placement),
            Err(refused) => gang.refused(env, refused.clone()),
        });
        // What it has got now counted for those behind it when the line was made, and what it has not counts on. What a gang that is short
        // of its minimum lacks yet goes before those behind it.
        let is_first = turn.is_some_and(|turn| turn.is_short());
        let placed = self.gangs.get(&key).is_some_and(|gang| !gang.slots.is_empty());
        if placed && !is_first || self.ready.get(&key).copied() == turn {
            self.line = line;
        }
        if let Ok(placement) = result {
            let victims = placement.victims.into_iter();
            self.mark_victims(&key, victims.chain(placement.leaving.into_keys()).collect());
        }
    }

    /// A device that two places would have.
    fn overlap(&self, placement: &Placement) -> Option<Arc<str>> {
        let mut seen = BTreeSet::new();
        for place in &placement.places {
            for id in place.devices.iter().flat_map(|(_, ids)| ids) {
                let other = self.taken.get(&place.node).and_then(|devices| devices.get(id));
                if let Some(other) = other {
                    let words = format!("device {id} of node {} is kept for gang {other}", place.node);
                    return Some(words.into());
                }
                if !seen.insert((&place.node, id)) {
                    let words = format!("device {id} of node {} is in two places of the plan", place.node);
                    return Some(words.into());
                }
            }
        }
        None
    }
}

impl Gang {
    /// Takes a place: gives its slots to members.
    pub(super) fn place(&mut self, env: &mut Env<'_>, placement: &Placement) {
        let decided = matches!(self.state, State::Decided(_));
        let must = if decided {
            1
        } else {
            self.missing(Count::settled).max(1)
        };
        let pairs = self.pair(&placement.places);
        let overdone = decided && placement.waits();
        if pairs.len() < must as usize || overdone {
            let reason = if overdone {
                "nobody is stopped for members of a gang that is decided"
            } else {
                "the plan has too few places"
            };
            self.refuse(Refusal {
                reason: reason.into(),
                message: reason.into(),
                hopeless: false,
            });
            return;
        }
        let mut woken = Vec::with_capacity(pairs.len());
        let mut bytes = self.bytes();
        let mut too_large = None;
        for (uid, place) in pairs {
            let id = self.slots.insert(Slot::new(place, env.now.at));
            self.tie(&uid, id, env.now.at);
            bytes += self.slots.get(id).map_or(0, |slot| self.bytes_of(slot));
            if bytes > bulk::MOST {
                too_large = Some(self.too_large(self.slots.len(), bytes));
                self.drop_slot(id);
                break;
            }
            woken.push(uid);
        }
        if let Some(refused) =
            too_large.filter(|_| woken.is_empty() || !decided && !self.enough(Count::placed))
        {
            if !decided {
                self.drop_all_slots();
            }
            self.refuse(refused);
            return;
        }
        if !decided && !self.enough(Count::placed) {
            // Enough of them, but not of every role.
            self.drop_all_slots();
            let reason = "the plan has too few places of a role";
            self.refuse(Refusal {
                reason: reason.into(),
                message: reason.into(),
                hopeless: false,
            });
            return;
        }
        self.tries.refused = None;
        self.tries.pause = None;
        self.tries.misses.clear();
        self.tries.resumes = false;
        // That of all its members that have a place, also of those that had one before.
        self.domain = placement.domain.clone();
        if decided {
            // Those that were left out have their turn now.
            self.tries.considered = None;
            self.wake(env, woken);
            return;
        }
        let arrival = self.arrival(env.settings);
        let (limit, end) = if placement.waits() {
            let evict = env.settings.evict;
            (
                evict,
                after(env.now.at, evict.saturating_add(env.settings.ending)),
            )
        } else {
            (arrival, end(env.now.at, arrival, env.settings))
        };
        let victims = placement.victims.iter().map(|uid| (uid.clone(), None));
        let leaving = placement.leaving.iter().map(|(uid, by)| (uid.clone(), Some(*by)));
        self.state = State::Planned(Planned {
            until: after(env.now.at, limit),
            last: after(env.now.at, limit.saturating_add(env.settings.grace)),
            most: self.members.count().ready(),
            end,
            victims: victims.chain(leaving).collect(),
        });
        if !placement.waits() {
            self.wake(env, woken);
        } else if !placement.victims.is_empty() {
            env.work.push(Work::Evict {
                pods: placement.victims.clone(),
                by: self.key.clone(),
            });
        }
    }

    /// Which member gets which place: by rank where both have one, else in their order.
    fn pair<'a>(&self, places: &'a [Reservation]) -> Vec<(PodUid, &'a Reservation)> {
        let Some(wanted) = self.wanted() else {
            return Vec::new();
        };
        let mut left: Vec<Option<&Reservation>> = places.iter().map(Some).collect();
        let mut by_rank = BTreeMap::new();
        for (at, place) in places.iter().enumerate() {
            if let Some(rank) = place.rank {
                by_rank
                    .entry((place.shape, place.role.clone(), rank))
                    .or_insert(at);
            }
        }
        let mut pairs = Vec::new();
        let mut rest = Vec::new();
        for member in wanted.members {
            let role = member.role.clone();
            let at = member
                .rank
                .and_then(|rank| by_rank.remove(&(member.shape, role, rank)));
            match at.and_then(|at| left.get_mut(at)?.take()) {
                Some(place) => pairs.push((member.uid, place)),
                None => rest.push(member),
            }
        }
        let mut others: BTreeMap<_, Vec<&Reservation>> = BTreeMap::new();
        for place in left.into_iter().flatten().rev() {
            others
                .entry((place.shape, place.role.clone()))
                .or_default()
                .push(place);
        }
        for member in rest {
            let place = others
                .get_mut(&(member.shape, member.role.clone()))
                .and_then(Vec::pop);
            if let Some(place) = place {
                pairs.push((member.uid, place));
            }
        }
        pairs
    }

    /// There is no place for it. If nodes were left out because kube-scheduler does not offer them, it is tried with them again: they are
    /// the place that it has, and are offered another time.
    pub(super) fn refused(&mut self, env: &Env<'_>, refused: Refusal) {
        if self.tries.without.is_empty() {
            self.refuse(refused);
        } else if matches!(self.state, State::Decided(_)) {
            self.pause(env, self.as_said(NOT_OFFERED));
        } else {
            self.strike(env, self.as_said(NOT_OFFERED));
        }
    }

    fn refuse(&mut self, refused: Refusal) {
        self.tries.refused = Some(refused);
    }

    /// A pod that has to go for it is on its way out, and is to be gone by then. Whether that is news.
    pub(super) fn victim_ends(&mut self, pod: &PodUid, by: i64) -> bool {
        let State::Planned(planned) = &mut self.state else {
            return false;
        };
        let Some(known) = planned.victims.get_mut(pod) else {
            return false;
        };
        known.replace(by) != Some(by)
    }

    /// A pod that had to go for it is gone, and what it held is free.
    pub(super) fn victim_gone(&mut self, env: &mut Env<'_>, pod: &PodUid) {
        let arrival = self.arrival(env.settings);
        let State::Planned(planned) = &mut self.state else {
            return;
        };
        if planned.victims.remove(pod).is_none() || !planned.victims.is_empty() {
            return;
        }
        self.hindered.remove(&Blocker::Budget);
        planned.until = after(env.now.at, arrival);
        planned.last = after(planned.until, env.settings.grace);
        planned.end = end(env.now.at, arrival, env.settings);
        let members = self.members.on_the_way().iter().cloned().collect();
        self.wake(env, members);
    }
}

/// Until when members may come at the latest, if one more of them comes within every `arrival`.
fn end(now: Instant, arrival: Duration, settings: &Settings) -> Instant {
    after(
        now,
        arrival.saturating_mul(ARRIVALS).saturating_add(settings.grace),
    )
}
