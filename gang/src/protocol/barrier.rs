//! How long a gang keeps a reservation that is not decided: until its members arrive, or its victims are gone.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gantry_api::PodUid;

use super::after;
use super::types::{Moment, Placement, Settings};

/// While members arrive, a reservation is kept for so many times as a member may take to arrive.
const MAX_ARRIVALS: u32 = 5;

/// The time limits of a reservation, and the victims it waits for.
#[derive(Debug, Clone)]
pub(super) struct Barrier {
    /// Until when another member must have arrived, or the victims be gone.
    until: Instant,
    /// `until` is not put off beyond this for a member whose call was disconnected.
    last: Instant,
    /// The most members that were ready at a time: `until` is put off with each more.
    most_ready: u32,
    /// `until` is not put off beyond this for anything.
    end: Instant,
    /// Pods that must go first; of those that are terminating, by when they are to be gone, in seconds since 1970.
    victims: BTreeMap<PodUid, Option<i64>>,
}

impl Barrier {
    /// The barrier of a new reservation, with `ready` members; each may take `arrival` to arrive.
    pub(super) fn new(
        now: Instant,
        placement: &Placement,
        ready: u32,
        arrival: Duration,
        settings: &Settings,
    ) -> Self {
        let victims = placement.victims.iter().map(|uid| (uid.clone(), None));
        let leaving = placement.leaving.iter().map(|(uid, by)| (uid.clone(), Some(*by)));
        let (limit, end) = if placement.waits() {
            let end = settings.evict.saturating_add(settings.ending);
            (settings.evict, after(now, end))
        } else {
            (arrival, last_arrival(now, arrival, settings))
        };
        Self {
            until: after(now, limit),
            last: after(now, limit.saturating_add(settings.grace)),
            most_ready: ready,
            end,
            victims: victims.chain(leaving).collect(),
        }
    }

    /// The barrier of a gang whose decision was not written: members have left meanwhile, and have to come soon.
    pub(super) fn after_commit(until: Instant) -> Self {
        Self { until, last: until, most_ready: u32::MAX, end: until, victims: BTreeMap::new() }
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }

    pub(super) fn victims(&self) -> impl Iterator<Item = &PodUid> + use<'_> {
        self.victims.keys()
    }

    pub(super) fn has_victims(&self) -> bool {
        !self.victims.is_empty()
    }

    pub(super) fn are_victims_terminating(&self) -> bool {
        self.all_gone_by().is_some()
    }

    /// By when the last victim is to be gone, in seconds since 1970, if all of them are terminating.
    fn all_gone_by(&self) -> Option<i64> {
        let by: Option<Vec<i64>> = self.victims.values().copied().collect();
        by?.into_iter().max()
    }

    /// So many members are ready: with each more the others get time again.
    pub(super) fn progress(&mut self, now: Instant, ready: u32, arrival: Duration, settings: &Settings) {
        if !self.has_victims() && ready > self.most_ready {
            self.most_ready = ready;
            self.until = self.until.max(after(now, arrival).min(self.end));
            self.last = after(self.until, settings.grace).min(self.end);
        }
    }

    /// Whether its time is over. Victims that are all terminating are waited for as long as they take by their own word, and some longer.
    pub(super) fn is_over(&mut self, now: Moment, settings: &Settings) -> bool {
        if now.at >= self.until && self.has_victims() {
            self.until = self.until.max(self.victims_end(now, settings));
        }
        now.at >= self.until
    }

    fn victims_end(&self, now: Moment, settings: &Settings) -> Instant {
        let Some(by) = self.all_gone_by() else {
            return now.at;
        };
        let left = by.saturating_sub(now.unix);
        // Victims whose time is over are late by as much.
        let late = Duration::from_secs(left.unsigned_abs());
        let left = match left {
            ..=0 => settings.evict.saturating_sub(late),
            _ => settings.evict.saturating_add(late),
        };
        after(now.at, left).min(self.end)
    }

    /// The call of a member was disconnected: the reservation is kept a while for its next attempt.
    pub(super) fn put_off(&mut self, now: Instant, settings: &Settings) {
        let grace = after(now, settings.grace).min(self.last);
        self.until = self.until.max(grace);
    }

    /// A victim is terminating, and is to be gone by then. Whether that is new.
    pub(super) fn victim_terminates(&mut self, pod: &PodUid, by: i64) -> bool {
        let known = self.victims.get_mut(pod);
        known.is_some_and(|known| known.replace(by) != Some(by))
    }

    /// A victim is gone. Whether it was the last, so that members may come now.
    pub(super) fn victim_gone(
        &mut self,
        now: Instant,
        pod: &PodUid,
        arrival: Duration,
        settings: &Settings,
    ) -> bool {
        if self.victims.remove(pod).is_none() || self.has_victims() {
            return false;
        }
        self.until = after(now, arrival);
        self.last = after(self.until, settings.grace);
        self.end = last_arrival(now, arrival, settings);
        true
    }
}

/// Until when members may arrive at the latest, if one more of them arrives within every `arrival`.
fn last_arrival(now: Instant, arrival: Duration, settings: &Settings) -> Instant {
    let all = arrival.saturating_mul(MAX_ARRIVALS);
    after(now, all.saturating_add(settings.grace))
}
