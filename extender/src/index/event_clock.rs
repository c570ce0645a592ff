//! The time of the index: it is an argument of events, and no clock is read here.

use std::time::Instant;

use gantry_gang::protocol::Now;

/// The current time by a monotonic and by a wall clock.
#[derive(Debug)]
pub(super) struct EventClock {
    now: Now,
    /// When both clocks were last set together.
    origin: Now,
    /// A moment of both clocks that stays the same while they advance equally: times in texts do not vary by a second.
    epoch: Now,
}

impl Default for EventClock {
    fn default() -> Self {
        let begin = Now { at: Instant::now(), unix: 0 };
        Self { now: begin, origin: begin, epoch: begin }
    }
}

impl EventClock {
    /// The current time.
    pub(super) fn now(&self) -> Now {
        self.now
    }

    /// A moment of both clocks that stays the same while they advance equally.
    pub(super) fn epoch(&self) -> Now {
        self.epoch
    }

    /// Sets both clocks. Time never goes back.
    pub(super) fn set(&mut self, now: Now) {
        // Before the first call neither clock is known.
        if now.at >= self.now.at || self.now.unix == 0 {
            self.now = now;
            self.origin = now;
            let passed = now.at.saturating_duration_since(self.epoch.at).as_secs();
            if self.epoch.unix.saturating_add_unsigned(passed).abs_diff(now.unix) > 1 {
                self.epoch = now;
            }
        }
    }

    /// Sets the monotonic clock: the other is assumed to have advanced equally.
    pub(super) fn advance(&mut self, now: Instant) {
        if now > self.now.at {
            let passed = now.saturating_duration_since(self.origin.at).as_secs();
            self.now = Now { at: now, unix: self.origin.unix.saturating_add_unsigned(passed) };
        }
    }
}
