//! The order in which waiting gangs are planned: by priority, then fairly among namespaces, then by age. A pure function of what waits and
//! what is held; it does not see capacity, so it never decides which gang fits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::key::GangKey;

/// A gang that waits for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting<'a> {
    /// The gang.
    pub key: &'a GangKey,
    /// The highest priority of its members.
    pub priority: i32,
    /// Since when it waits, in seconds since 1970.
    pub since: i64,
    /// Devices it asks for.
    pub devices: u64,
}

/// After so many seconds the oldest gang of a namespace goes before those of the same priority that have waited less, whatever its
/// namespace holds: a fair share delays, it does not starve.
pub const OVERDUE: i64 = 15 * 60;

/// The positions of `waiting` in the order in which they are to be planned, at `now` in seconds since 1970. `held` are the devices that the
/// gangs of each namespace hold.
///
/// 1. A higher priority goes first.
/// 2. Then the oldest gang of each namespace, if it has waited longer than [`OVERDUE`], by age. Only one per namespace: whoever
///    writes a thousand gangs at once does not push the others out by their age.
/// 3. Then always the oldest gang of the namespace that holds least, what was ordered before counted as held.
/// 4. Ties go by age, then by name.
pub fn order(waiting: &[Waiting<'_>], held: &BTreeMap<Arc<str>, u64>, now: i64) -> Vec<usize> {
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

    fn add(&mut self, gang: Waiting<'a>) {
        let ahead = self.ahead.entry(&gang.key.namespace).or_default();
        *ahead = ahead.saturating_add(gang.devices);
    }
}

/// Orders gangs of one priority; `level` is by age.
fn one_priority<'a>(
    waiting: &[Waiting<'a>],
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
