//! How long a gang has kept devices idle lately. The time grows while the gang keeps a reservation that no pod uses, and
//! shrinks as fast while it keeps none: a limit on it lets a gang keep devices idle for half of the time at most.

use std::time::{Duration, Instant};

use super::after;
use super::types::Settings;

/// So many times the default time to arrive a gang may keep devices idle before it waits as long between attempts.
const UNUSED_ARRIVALS: u32 = 3;
/// So many times the hold a gang may keep reservations of lost members idle before it keeps them for half of the time.
const UNUSED_HOLDS: u32 = 2;

/// For how long a gang has kept devices idle, and for what.
#[derive(Debug, Clone, Default)]
pub(super) struct IdleDevices {
    /// For members on their way to their reservations.
    arriving: IdleTime,
    /// For replacements of lost members.
    kept: IdleTime,
}

impl IdleDevices {
    /// Reservations wait for members on their way from now on, or no longer. Whether they did until now.
    pub(super) fn follow_arriving(&mut self, now: Instant, waits: bool) -> bool {
        self.arriving.follow(now, waits)
    }

    /// Reservations are kept for replacements from now on, or no longer.
    pub(super) fn follow_kept(&mut self, now: Instant, keeps: bool) {
        self.kept.follow(now, keeps);
    }

    /// Until when the gang has to wait if reservations waited in vain for its members: as long as they did, if that was long.
    pub(super) fn pause_after_arriving(&self, now: Instant, settings: &Settings) -> Option<Instant> {
        let spent = self.arriving.spent(now);
        (spent > settings.arrival.saturating_mul(UNUSED_ARRIVALS)).then(|| after(now, spent))
    }

    /// Until when a reservation is kept for a replacement that may be kept until `end`.
    pub(super) fn kept_until(&self, end: Instant, settings: &Settings) -> Instant {
        let all = self.kept.reaches(settings.hold.saturating_mul(UNUSED_HOLDS));
        all.map_or(end, |all| all.min(end))
    }

    /// Whether reservations were kept for replacements lately.
    pub(super) fn has_kept(&self, now: Instant) -> bool {
        !self.kept.spent(now).is_zero()
    }

    /// How long they were, which counts against the gang that continues this one.
    pub(super) fn take_kept(&mut self) -> IdleTime {
        std::mem::take(&mut self.kept)
    }

    /// How long an earlier incarnation kept them.
    pub(super) fn set_kept(&mut self, kept: IdleTime) {
        self.kept = kept;
    }
}

/// A time that grows and shrinks.
#[derive(Debug, Clone, Default)]
pub(super) struct IdleTime {
    /// The time at `at`.
    spent: Duration,
    at: Option<Instant>,
    /// Whether it grows since then.
    grows: bool,
}

impl IdleTime {
    /// Devices are idle from now on, or no longer. Whether they were until now.
    pub(super) fn follow(&mut self, now: Instant, idle: bool) -> bool {
        if self.grows != idle {
            (self.spent, self.at) = (self.spent(now), Some(now));
        }
        std::mem::replace(&mut self.grows, idle)
    }

    pub(super) fn spent(&self, now: Instant) -> Duration {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        match self.grows {
            true => self.spent.saturating_add(passed),
            false => self.spent.saturating_sub(passed),
        }
    }

    /// When `limit` is reached, if devices stay idle until then; `None` while none are.
    pub(super) fn reaches(&self, limit: Duration) -> Option<Instant> {
        self.at.filter(|_| self.grows).map(|at| after(at, limit.saturating_sub(self.spent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_grows_and_shrinks_as_fast() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut idle = IdleTime::default();
        assert!(!idle.follow(at(0), false));
        assert_eq!((idle.spent(at(9)), idle.reaches(Duration::from_secs(50))), (Duration::ZERO, None));
        assert!(!idle.follow(at(10), true));
        assert!(idle.follow(at(20), true), "followed again and again");
        assert_eq!(idle.spent(at(40)), Duration::from_secs(30));
        assert_eq!(idle.reaches(Duration::from_secs(50)), Some(at(60)));
        assert!(idle.follow(at(40), false));
        assert_eq!(idle.spent(at(50)), Duration::from_secs(20));
        assert!(!idle.follow(at(50), true));
        assert_eq!(idle.reaches(Duration::from_secs(50)), Some(at(80)));
        assert!(idle.follow(at(60), false));
        assert_eq!(idle.spent(at(100)), Duration::ZERO);
    }
}
