//! Which gang is planned next. One that was refused is not planned again before room has grown or the gang has changed. What is asked of
//! the planner is not decided here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Gangs;
use super::gang::{Gang, State};
use super::members::Count;
use super::types::{Now, PlanRequest};
use crate::key::GangKey;
use crate::queue::{self, Waiting};

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
    lacks: Shortfall,
}

/// What a decided gang lacks of its minimum: the one that can be whole soonest comes first. Whoever gets a place lacks less and stays
/// first, so that two do not share what comes free and both stay short of what would have made one of them whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Shortfall {
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
    fn lacks(&self) -> Shortfall {
        if self.urgency() != Urgency::Incomplete {
            return Shortfall::default();
        }
        let missing = u64::from(self.missing(Count::placed));
        let there = self.members.unplaced().len() as u64;
        let devices = self.members.unplaced_devices();
        Shortfall {
            members: there < missing,
            devices: devices
                .saturating_mul(missing.min(there))
                .checked_div(there)
                .unwrap_or_default(),
        }
    }

    pub(super) fn urgency(&self) -> Urgency {
        match &self.state {
            State::Decided(_) if self.is_short() => Urgency::Incomplete,
            State::Decided(_) => Urgency::Extra,
            _ => Urgency::Open,
        }
    }
}

impl Gangs {
    /// Whether [`Gangs::next`] would look at any gang now.
    pub fn has_next(&self, room: u64) -> bool {
        self.synced && (!self.untried.is_empty() || room > self.room && !self.ready.is_empty())
    }

    /// The next gang to plan, if there is one: it was not planned since `room` grew, or it has changed. `room` is a number that grows when
    /// devices or room on nodes came free, or nodes changed. The caller plans it and says the result by [`Gangs::placed`].
    pub fn next(&mut self, now: Now, room: u64) -> Option<PlanRequest> {
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

/// The most urgent of those that are to be tried, the first last. All that are as urgent have their place in the order, tried or not: what
/// is ordered before counts as held. Among gangs that are short of their minimum nobody has a share: who can be whole soonest goes first.
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
