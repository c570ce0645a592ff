//! Which gang is planned next. A gang that was refused is not planned again before capacity has grown or the gang has changed. The order
//! among gangs that wait for a reservation is that of [`order`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::types::Moment;
use crate::key::GangKey;

/// Which gangs go first: decided gangs that lack a slot for a member of their minimum, then gangs without a reservation, then members
/// beyond a minimum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    Incomplete,
    Open,
    Surplus,
}

/// What the order of a gang among those that want a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    urgency: Urgency,
    priority: i32,
    since: i64,
    devices: u64,
    shortfall: Shortfall,
}

/// What a decided gang lacks of its minimum: the gang that can be whole soonest comes first. A gang that gets a slot lacks less and stays
/// first, so that two gangs do not share what comes free and both stay short of what would have made one of them whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shortfall {
    /// Not all members that it lacks exist, so that no slot makes it whole yet.
    members: bool,
    /// Devices of as many existing members as it lacks.
    devices: u64,
}

impl Shortfall {
    /// Of a gang that lacks `missing` members, of which `exist` wait and ask for `devices` together. With members of several sizes the
    /// average counts.
    pub(super) fn new(missing: u32, exist: usize, devices: u64) -> Self {
        let (missing, exist) = (u64::from(missing), exist as u64);
        Self {
            members: exist < missing,
            devices: devices.saturating_mul(missing.min(exist)).checked_div(exist).unwrap_or_default(),
        }
    }
}

impl Turn {
    pub(super) fn new(
        urgency: Urgency,
        priority: i32,
        since: i64,
        devices: u64,
        shortfall: Shortfall,
    ) -> Self {
        Self { urgency, priority, since, devices, shortfall }
    }

    /// The order among gangs that are short of their minimum: the least goes first.
    pub(super) fn in_need(&self) -> impl Ord + use<> {
        (Reverse(self.priority), self.shortfall, self.since)
    }

    fn waiting<'a>(&self, key: &'a GangKey) -> WaitingGang<'a> {
        WaitingGang { key, priority: self.priority, since: self.since, devices: self.devices }
    }
}

/// The gangs that want a plan.
#[derive(Debug, Clone, Default)]
pub(super) struct PlanQueue {
    /// Gangs that want a plan, now or at some time.
    planable: BTreeSet<Arc<GangKey>>,
    /// Those of them that could be planned now.
    ready: BTreeMap<Arc<GangKey>, Turn>,
    /// Those of them that were not planned since capacity last grew: only these are looked at.
    untried: BTreeSet<Arc<GangKey>>,
    /// The order in which those are planned, the first last, until anything changes that it depends on: to order ten thousand gangs again
    /// for each would take longer than to plan them.
    order: Option<Vec<Arc<GangKey>>>,
    /// The capacity in which gangs were last planned.
    capacity: u64,
    /// Devices that the gangs of each namespace hold.
    held: BTreeMap<Arc<str>, u64>,
}

impl PlanQueue {
    /// Gangs that want a plan, now or at some time, by name.
    pub(super) fn planable(&self) -> impl Iterator<Item = &Arc<GangKey>> {
        self.planable.iter()
    }

    pub(super) fn turn(&self, key: &GangKey) -> Option<Turn> {
        self.ready.get(key).copied()
    }

    /// Whether [`Self::next`] would return any gang in this capacity.
    pub(super) fn has_next(&self, capacity: u64) -> bool {
        !self.untried.is_empty() || capacity > self.capacity && !self.ready.is_empty()
    }

    /// A gang has changed. `turn`: it could be planned now; `considered`: the capacity in which it was last planned.
    pub(super) fn update(
        &mut self,
        key: &Arc<GangKey>,
        wants_plan: bool,
        turn: Option<Turn>,
        considered: Option<u64>,
    ) {
        if wants_plan {
            self.planable.insert(key.clone());
        } else {
            self.planable.remove(key);
        }
        if self.ready.get(key) != turn.as_ref() {
            match turn {
                Some(turn) => self.ready.insert(key.clone(), turn),
                None => self.ready.remove(key),
            };
            self.order = None;
        }
        if turn.is_some() && considered.is_none_or(|considered| considered < self.capacity) {
            if self.untried.insert(key.clone()) {
                self.order = None;
            }
        } else {
            self.untried.remove(key);
        }
    }

    /// A gang holds other devices than before.
    pub(super) fn update_held(&mut self, key: &GangKey, before: u64, now: u64) {
        if before == now {
            return;
        }
        let held = self.held.entry(key.namespace.clone()).or_default();
        *held = held.saturating_sub(before).saturating_add(now);
        if *held == 0 {
            self.held.remove(&key.namespace);
        }
        self.order = None;
    }

    pub(super) fn remove(&mut self, key: &GangKey) {
        self.planable.remove(key);
        self.untried.remove(key);
        self.ready.remove(key);
    }

    /// The next gang that was not tried in this capacity.
    pub(super) fn next(&mut self, now: Moment, capacity: u64) -> Option<Arc<GangKey>> {
        if capacity > self.capacity {
            self.capacity = capacity;
            self.untried = self.ready.keys().cloned().collect();
            self.order = None;
        }
        // In the common case none is left to be tried, and this is all.
        if self.untried.is_empty() {
            return None;
        }
        let order = match self.order.as_mut().filter(|order| !order.is_empty()) {
            Some(order) => order,
            None => self.order.insert(order_untried(&self.ready, &self.untried, &self.held, now)),
        };
        let key = order.pop()?;
        self.untried.remove(&key);
        Some(key)
    }

    /// Takes the order out before a gang is updated with the result of its plan.
    pub(super) fn take_order(&mut self) -> Option<Vec<Arc<GangKey>>> {
        self.order.take()
    }

    /// Puts the order back that held before a gang was updated with the result of its plan. What the gang has got was counted for those
    /// behind it when the order was made, and what it has not got is still counted. But what a gang that is short of its minimum still
    /// lacks goes before those behind it.
    pub(super) fn restore_order(
        &mut self,
        order: Option<Vec<Arc<GangKey>>>,
        key: &GangKey,
        before: Option<Turn>,
        has_slots: bool,
    ) {
        let was_short = before.is_some_and(|turn| turn.urgency == Urgency::Incomplete);
        if has_slots && !was_short || self.turn(key) == before {
            self.order = order;
        }
    }

    /// The order of some gangs that wait for a reservation.
    pub(super) fn order(&self, waiting: &[(&Arc<GangKey>, Turn)], now: Moment) -> Vec<Arc<GangKey>> {
        let each: Vec<WaitingGang<'_>> = waiting.iter().map(|(key, turn)| turn.waiting(key)).collect();
        let order = order(&each, &self.held, now.unix).into_iter();
        order.filter_map(|at| waiting.get(at)).map(|(key, _)| Arc::clone(key)).collect()
    }

    /// Gangs that were not planned since capacity last grew.
    #[cfg(test)]
    pub(super) fn untried(&self) -> &BTreeSet<Arc<GangKey>> {
        &self.untried
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.planable.is_empty() && self.ready.is_empty() && self.untried.is_empty() && self.held.is_empty()
    }
}

/// The most urgent of those that are to be tried, the first last. All gangs of the same urgency have their place in the order, tried or
/// not: what is ordered before counts as held. Among gangs that are short of their minimum shares do not count: the gang that can be whole
/// soonest goes first.
fn order_untried(
    ready: &BTreeMap<Arc<GangKey>, Turn>,
    untried: &BTreeSet<Arc<GangKey>>,
    held: &BTreeMap<Arc<str>, u64>,
    now: Moment,
) -> Vec<Arc<GangKey>> {
    let all = untried.len() == ready.len();
    let open = |key: &Arc<GangKey>| all || untried.contains(key);
    let open_turns = ready.iter().filter(|(key, _)| open(key));
    let best = open_turns.map(|(_, turn)| turn.urgency).min();
    let level = ready.iter().filter(|(_, turn)| Some(turn.urgency) == best);
    let level: Vec<(&Arc<GangKey>, &Turn)> = level.collect();
    if best == Some(Urgency::Incomplete) {
        let mut short: Vec<(&Arc<GangKey>, &Turn)> = level.into_iter().filter(|(key, _)| open(key)).collect();
        short.sort_by_key(|(key, turn)| Reverse((turn.in_need(), *key)));
        return short.into_iter().map(|(key, _)| Arc::clone(key)).collect();
    }
    let waiting: Vec<WaitingGang<'_>> = level.iter().map(|(key, turn)| turn.waiting(key)).collect();
    let order = order(&waiting, held, now.unix).into_iter().rev();
    order
        .filter_map(|at| level.get(at))
        .filter(|(key, _)| open(key))
        .map(|(key, _)| Arc::clone(key))
        .collect()
}

// The order in which waiting gangs are planned: by priority, then fairly among namespaces, then by age. A pure function of what waits and
// what is held; it does not see capacity, so it never decides which gang fits.

/// A gang that waits for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaitingGang<'a> {
    pub key: &'a GangKey,
    /// The highest priority of its members that take devices.
    pub priority: i32,
    /// Since when it waits, in seconds since 1970.
    pub since: i64,
    /// Devices it asks for.
    pub devices: u64,
}

/// After so many seconds the oldest gang of a namespace goes before those of the same priority that have waited less, whatever its
/// namespace holds: a fair share delays, it does not starve.
pub(super) const OVERDUE: i64 = 15 * 60;

/// The positions of `waiting` in the order in which they are to be planned, at `now` in seconds since 1970. `held` are the devices that the
/// gangs of each namespace hold.
///
/// 1. A higher priority goes first.
/// 2. Then the oldest gang of each namespace, if it has waited longer than [`OVERDUE`], by age. Only one per namespace: whoever
///    writes a thousand gangs at once does not push the others out by their age.
/// 3. Then always the oldest gang of the namespace that holds least, what was ordered before counted as held.
/// 4. Ties go by age, then by name.
pub(super) fn order(waiting: &[WaitingGang<'_>], held: &BTreeMap<Arc<str>, u64>, now: i64) -> Vec<usize> {
    let mut ordered = Vec::with_capacity(waiting.len());
    let mut by_age: Vec<usize> = (0..waiting.len()).collect();
    by_age.sort_by_key(|&at| {
        let gang = &waiting[at];
        (std::cmp::Reverse(gang.priority), gang.since, gang.key)
    });
    // What a higher priority is about to get counts for the lower ones too.
    let mut shares = Shares { held, ahead: BTreeMap::new() };
    for level in by_age.chunk_by(|&a, &b| waiting[a].priority == waiting[b].priority) {
        one_priority(waiting, level, now, &mut shares, &mut ordered);
    }
    ordered
}

/// What each namespace holds, and what it gets by gangs that are ordered already.
struct Shares<'a> {
    held: &'a BTreeMap<Arc<str>, u64>,
    ahead: BTreeMap<&'a str, u64>,
}

impl<'a> Shares<'a> {
    fn of(&self, namespace: &str) -> u64 {
        let held = self.held.get(namespace).copied().unwrap_or_default();
        held.saturating_add(self.ahead.get(namespace).copied().unwrap_or_default())
    }

    fn add(&mut self, gang: WaitingGang<'a>) {
        let ahead = self.ahead.entry(&gang.key.namespace).or_default();
        *ahead = ahead.saturating_add(gang.devices);
    }
}

/// Orders gangs of one priority; `level` is by age.
fn one_priority<'a>(
    waiting: &[WaitingGang<'a>],
    level: &[usize],
    now: i64,
    shares: &mut Shares<'a>,
    ordered: &mut Vec<usize>,
) {
    let mut queues: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
    for &at in level {
        queues.entry(&waiting[at].key.namespace).or_default().push_back(at);
    }
    let mut overdue: Vec<usize> = queues
        .values()
        .filter_map(|queue| queue.front().copied())
        .filter(|&at| now.saturating_sub(waiting[at].since) > OVERDUE)
        .collect();
    overdue.sort_by_key(|&at| (waiting[at].since, waiting[at].key));
    for at in overdue {
        shares.add(waiting[at]);
        ordered.push(at);
        if let Some(queue) = queues.get_mut(&*waiting[at].key.namespace) {
            queue.pop_front();
        }
    }
    let turn = |shares: &Shares<'_>, at: usize| {
        let gang = &waiting[at];
        (shares.of(&gang.key.namespace), gang.since, gang.key, at)
    };
    let fronts = queues.values().filter_map(|queue| queue.front());
    let mut turns: BTreeSet<_> = fronts.map(|&at| turn(shares, at)).collect();
    while let Some((_, _, key, at)) = turns.pop_first() {
        shares.add(waiting[at]);
        ordered.push(at);
        if let Some(queue) = queues.get_mut(&*key.namespace) {
            queue.pop_front();
            turns.extend(queue.front().map(|&at| turn(shares, at)));
        }
    }
}

#[cfg(test)]
mod tests;
