//! Which gang is planned next, and what is asked of the planner. A gang that was refused is not planned again before room has grown or the
//! gang has changed.

use std::cmp::Reverse;
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
use super::types::{
    Now, Place, Placement, Refused, Settings, ShapeId, Sibling, Stage, Wanted, WantedMember, Work,
};
use crate::key::GangKey;
use crate::queue::{self, Waiting};

/// A place is kept for so many times as members may take to come, while they are coming.
const ARRIVALS: u32 = 5;

/// Which gangs go first: those that are decided and lack a place for one of their minimum, then those that have none, then members
/// beyond a minimum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    Incomplete,
    Open,
    Extra,
}

/// What the order of a gang among those that want a plan goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    urgency: Urgency,
    priority: i32,
    since: i64,
    devices: u64,
    lacks: Lacks,
}

/// What a decided gang lacks of its minimum: the one that can be whole soonest comes first. Whoever gets a place lacks less and stays first, so that two
/// do not share what comes free and both stay short of what would have made one of them whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Lacks {
    /// Not all that it lacks are there, so that no place makes it whole yet.
    members: bool,
    /// Devices of those that are there, as many as it lacks.
    devices: u64,
}

impl Turn {
    /// It is decided, and short of its minimum.
    pub(super) fn is_short(&self) -> bool {
        self.urgency == Urgency::Incomplete
    }

    /// Among gangs that are short of their minimum: the least goes first.
    pub(super) fn in_need(&self) -> impl Ord + use<> {
        (Reverse(self.priority), self.lacks, self.since)
    }

    fn waiting<'a>(&self, key: &'a GangKey) -> Waiting<'a> {
        Waiting {
            key,
            priority: self.priority,
            since: self.since,
            devices: self.devices,
        }
    }
}

impl Gang {
    pub(super) fn turn(&self) -> Turn {
        Turn {
            urgency: self.urgency(),
            priority: self.members.priority(),
            since: self.waiting_since,
            devices: self.members.unplaced_devices(),
            lacks: self.lacks(),
        }
    }

    /// With members of several sizes, of which it does not lack all, the average counts.
    fn lacks(&self) -> Lacks {
        if self.urgency() != Urgency::Incomplete {
            return Lacks::default();
        }
        let missing = u64::from(self.missing(Count::placed));
        let there = self.members.unplaced().len() as u64;
        let devices = self.members.unplaced_devices();
        Lacks {
            members: there < missing,
            devices: devices
                .saturating_mul(missing.min(there))
                .checked_div(there)
                .unwrap_or_default(),
        }
    }

    fn urgency(&self) -> Urgency {
        match &self.state {
            State::Decided(_) if self.is_short() => Urgency::Incomplete,
            State::Decided(_) => Urgency::Extra,
            _ => Urgency::Open,
        }
    }

    /// What is asked of the planner.
    pub(super) fn wanted(&self) -> Option<Wanted> {
        let terms = self.working_terms()?.clone();
        let mut members: Vec<(Option<u32>, i64, WantedMember)> = Vec::new();
        for uid in self.members.unplaced() {
            let Some(kept) = self.members.get(uid) else {
                continue;
            };
            let Some(shape) = kept.member.shape.filter(|_| self.may_come(kept)) else {
                continue;
            };
            let wanted = WantedMember {
                uid: uid.clone(),
                shape,
                rank: kept.member.claim.rank,
                role: kept.member.claim.role.clone(),
            };
            members.push((wanted.rank, kept.member.created, wanted));
        }
        members.sort_by(|(a_rank, a_created, a), (b_rank, b_created, b)| {
            let a_rank = a_rank.map_or(u64::MAX, u64::from);
            let b_rank = b_rank.map_or(u64::MAX, u64::from);
            (a_rank, a_created, &a.uid).cmp(&(b_rank, b_created, &b.uid))
        });
        let mut members: Vec<WantedMember> = members.into_iter().map(|(_, _, member)| member).collect();
        self.cut_to_max(&mut members);
        let completes = self.urgency() == Urgency::Incomplete;
        if completes {
            self.cut_to_missing(&mut members);
        }
        let must = match &self.state {
            State::Decided(_) => 0,
            _ => self.missing(Count::settled),
        };
        let mut placed: Vec<_> = self
            .slots
            .iter()
            .map(|(_, slot)| Sibling {
                node: slot.node.clone(),
                shape: slot.shape,
                rank: slot.rank,
                ordinal: slot.ordinal,
            })
            .collect();
        if placed.is_empty() {
            placed = self.bound_places();
        }
        Some(Wanted {
            gang: self.key.clone(),
            terms,
            members,
            must,
            completes,
            placed,
            without: self.tries.without.iter().cloned().collect(),
            priority: self.members.priority(),
            resumes: self.tries.resumes,
        })
    }

    /// Members that are bound without a slot of ours.
    fn bound_places(&self) -> Vec<Sibling> {
        let life = self.members.life();
        self.members
            .iter()
            .filter(|kept| kept.life == life && kept.member.shape.is_some() && kept.lives())
            .filter_map(|kept| match &kept.member.stage {
                Stage::Bound(node) => Some(Sibling {
                    node: node.clone(),
                    shape: kept.member.shape,
                    rank: kept.member.claim.rank,
                    ordinal: None,
                }),
                _ => None,
            })
            .collect()
    }

    /// Leaves out members beyond the maximum, the last ones first, but none that the minimum of a role needs.
    fn cut_to_max(&self, members: &mut Vec<WantedMember>) {
        let room = self.may_grow() as usize;
        if members.len() <= room {
            return;
        }
        let mut short: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        for member in members.iter() {
            short
                .entry(member.role.clone())
                .or_insert_with(|| self.missing_of(&member.role, Count::placed));
        }
        let needed: usize = short.values().map(|count| *count as usize).sum();
        let mut spare = room.saturating_sub(needed);
        members.retain(|member| {
            let short = short.entry(member.role.clone()).or_default();
            if *short > 0 {
                *short -= 1;
                true
            } else if spare > 0 {
                spare -= 1;
                true
            } else {
                false
            }
        });
    }

    /// Leaves out of each kind more members than the gang lacks of its role, or of any: what it lacks goes before others that wait, and the rest after
    /// them. Those that a role lacks come first.
    fn cut_to_missing(&self, members: &mut Vec<WantedMember>) {
        let of_roles = self.missing_of_roles(Count::placed);
        let of_any = self.missing(Count::placed).saturating_sub(of_roles);
        let mut kinds: BTreeMap<(Arc<str>, ShapeId), u32> = BTreeMap::new();
        let mut others = Vec::new();
        for member in std::mem::take(members) {
            let count = kinds.entry((member.role.clone(), member.shape)).or_default();
            *count += 1;
            let of_role = self.missing_of(&member.role, Count::placed);
            if *count <= of_role {
                members.push(member);
            } else if *count - of_role <= of_any {
                others.push(member);
            }
        }
        members.append(&mut others);
    }

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
            self.refuse(Refused {
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
            self.refuse(Refused {
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
        if decided {
            // Those that were left out have their turn now.
            self.tries.considered = None;
            self.wake(env, woken);
            return;
        }
        self.domain = placement.domain.clone();
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
    fn pair<'a>(&self, places: &'a [Place]) -> Vec<(PodUid, &'a Place)> {
        let Some(wanted) = self.wanted() else {
            return Vec::new();
        };
        let mut left: Vec<Option<&Place>> = places.iter().map(Some).collect();
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
        let mut others: BTreeMap<_, Vec<&Place>> = BTreeMap::new();
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

    /// There is no place for it. If nodes were left out because kube-scheduler does not offer them, it is tried with them again: they are the place
    /// that it has, and are offered another time.
    pub(super) fn refused(&mut self, env: &Env<'_>, refused: Refused) {
        if self.tries.without.is_empty() {
            self.refuse(refused);
        } else if matches!(self.state, State::Decided(_)) {
            self.pause(env, self.as_said(NOT_OFFERED));
        } else {
            self.strike(env, self.as_said(NOT_OFFERED));
        }
    }

    fn refuse(&mut self, refused: Refused) {
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
        planned.until = after(env.now.at, arrival);
        planned.last = after(planned.until, env.settings.grace);
        planned.end = end(env.now.at, arrival, env.settings);
        let members = self.members.on_the_way().iter().cloned().collect();
        self.wake(env, members);
    }
}

impl Gangs {
    /// The next gang to plan, if there is one: it was not planned since `room` grew, or it has changed. `room` is a number that grows when
    /// devices or room on nodes came free, or nodes changed. The caller plans it and says the result by [`Gangs::placed`].
    pub fn next(&mut self, now: Now, room: u64) -> Option<Wanted> {
        if !self.synced {
            return None;
        }
        if room > self.room {
            self.room = room;
            self.untried = self.ready.keys().cloned().collect();
            self.line = None;
        }
        loop {
            // In the common case nobody is left to be tried, and this is all.
            if self.untried.is_empty() {
                return None;
            }
            let line = match self.line.as_mut().filter(|line| !line.is_empty()) {
                Some(line) => line,
                None => self
                    .line
                    .insert(line_up(&self.ready, &self.untried, &self.held, now)),
            };
            let key = line.pop()?;
            self.untried.remove(&key);
            let Some(gang) = self.gangs.get_mut(&key) else {
                continue;
            };
            if gang.wants_plan(now.at) {
                gang.tries.considered = Some(room);
                gang.tries.asked = true;
                return gang.wanted();
            }
        }
    }

    /// The gang that is first in the queue and waits for room, with the time since when it waits, in seconds since 1970. What is put
    /// aside for the head so that others do not delay it is put aside for this one.
    pub fn head(&self, now: Now) -> Option<(Arc<GangKey>, i64)> {
        let queued: Vec<(&Arc<GangKey>, &Gang)> = self
            .planable
            .iter()
            .filter_map(|key| self.gangs.get_key_value(key))
            .filter(|(_, gang)| gang.wants_plan(now.at) && gang.urgency() == Urgency::Open)
            .filter(|(_, gang)| {
                !gang
                    .tries
                    .refused
                    .as_ref()
                    .is_some_and(|refused| refused.hopeless)
            })
            .collect();
        let waiting: Vec<Waiting<'_>> = queued.iter().map(|(key, gang)| waiting(key, gang)).collect();
        let first = queue::order(&waiting, &self.held, now.unix).into_iter().next()?;
        queued
            .get(first)
            .map(|(key, gang)| (Arc::clone(key), gang.waiting_since))
    }

    /// What the planner would be asked for a gang now; `None` if its terms are not known.
    pub fn wanted(&self, key: &GangKey) -> Option<Wanted> {
        self.gangs.get(key)?.wanted()
    }

    /// The gangs that are complete and wait for a place, in the order in which they are planned.
    pub fn queue(&self, now: Now) -> Vec<Arc<GangKey>> {
        let queued: Vec<(&Arc<GangKey>, &Gang)> = self
            .planable
            .iter()
            .filter_map(|key| self.gangs.get_key_value(key))
            .filter(|(_, gang)| gang.urgency() == Urgency::Open && gang.enough(Count::exist))
            .collect();
        let waiting: Vec<Waiting<'_>> = queued.iter().map(|(key, gang)| waiting(key, gang)).collect();
        queue::order(&waiting, &self.held, now.unix)
            .into_iter()
            .filter_map(|at| queued.get(at))
            .map(|(key, _)| Arc::clone(key))
            .collect()
    }
}

/// Until when members may come at the latest, if one more of them comes within every `arrival`.
fn end(now: Instant, arrival: Duration, settings: &Settings) -> Instant {
    after(
        now,
        arrival.saturating_mul(ARRIVALS).saturating_add(settings.grace),
    )
}

/// The most urgent of those that are to be tried, the first last. All that are as urgent have their place in the order, tried or not: what is
/// ordered before counts as held. Among gangs that are short of their minimum nobody has a share: who can be whole soonest goes first.
fn line_up(
    ready: &BTreeMap<Arc<GangKey>, Turn>,
    untried: &BTreeSet<Arc<GangKey>>,
    held: &BTreeMap<Arc<str>, u64>,
    now: Now,
) -> Vec<Arc<GangKey>> {
    let all = untried.len() == ready.len();
    let open = |key: &Arc<GangKey>| all || untried.contains(key);
    let best = ready
        .iter()
        .filter(|(key, _)| open(key))
        .map(|(_, turn)| turn.urgency)
        .min();
    let level: Vec<(&Arc<GangKey>, &Turn)> = ready
        .iter()
        .filter(|(_, turn)| Some(turn.urgency) == best)
        .collect();
    if best == Some(Urgency::Incomplete) {
        let mut short: Vec<(&Arc<GangKey>, &Turn)> = level.into_iter().filter(|(key, _)| open(key)).collect();
        short.sort_by_key(|(key, turn)| Reverse((turn.in_need(), *key)));
        return short.into_iter().map(|(key, _)| Arc::clone(key)).collect();
    }
    let waiting: Vec<Waiting<'_>> = level.iter().map(|(key, turn)| turn.waiting(key)).collect();
    let order = queue::order(&waiting, held, now.unix).into_iter().rev();
    order
        .filter_map(|at| level.get(at))
        .filter(|(key, _)| open(key))
        .map(|(key, _)| Arc::clone(key))
        .collect()
}

fn waiting<'a>(key: &'a GangKey, gang: &Gang) -> Waiting<'a> {
    Waiting {
        key,
        priority: gang.members.priority(),
        since: gang.waiting_since,
        devices: gang.members.unplaced_devices(),
    }
}
