//! The time of the index: it is an argument of events, and no clock is read here.

use std::time::{Duration, Instant};

use gantry_gang::protocol::Moment;

/// The current time by a monotonic and by a wall clock.
#[derive(Debug)]
pub(super) struct EventClock {
    now: Moment,
    /// When both clocks were last set together.
    origin: Moment,
    /// A moment of both clocks that stays the same while they advance equally: times in texts do not vary by a second.
    epoch: Moment,
}

impl Default for EventClock {
    fn default() -> Self {
        let begin = Moment { at: Instant::now(), unix: 0 };
        Self { now: begin, origin: begin, epoch: begin }
    }
}

impl EventClock {
    /// The current time.
    pub(super) fn now(&self) -> Moment {
        self.now
    }

    /// A moment of both clocks that stays the same while they advance equally.
    pub(super) fn epoch(&self) -> Moment {
        self.epoch
    }

    /// Sets both clocks. Time never goes back.
    pub(super) fn set(&mut self, now: Moment) {
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
            self.now = Moment { at: now, unix: self.origin.unix.saturating_add_unsigned(passed) };
        }
    }
}

/// The API server is asked every second; a longer pause means that plugins may not have been able to write.
const GAP: Duration = Duration::from_secs(3);

/// When the API server last answered, and since when without a gap.
#[derive(Debug, Default)]
pub(super) struct ApiContact(Option<(Instant, Instant)>);

impl ApiContact {
    /// The API server answered. Returns since when it has answered without a gap.
    pub(super) fn note(&mut self, contact: Instant) -> Instant {
        let steady = match self.0 {
            Some((last, since)) if contact.saturating_duration_since(last) <= GAP => since,
            _ => contact,
        };
        self.0 = Some((contact, steady));
        steady
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(begin: Instant, second: u64) -> Instant {
        begin + Duration::from_secs(second)
    }

    #[test]
    fn time_never_goes_back_and_both_clocks_advance_equally() {
        let begin = Instant::now() + Duration::from_secs(60);
        let at = |passed: u64, unix: i64| Moment { at: second(begin, passed), unix };
        let mut clock = EventClock::default();
        clock.set(at(10, 1010));
        clock.advance(second(begin, 15));
        assert_eq!(clock.now(), at(15, 1015));
        clock.advance(second(begin, 12));
        clock.set(at(12, 1012));
        assert_eq!(clock.now(), at(15, 1015));
    }

    #[test]
    fn epoch_moves_only_with_a_jump_of_the_wall_clock() {
        let begin = Instant::now() + Duration::from_secs(60);
        let at = |passed: u64, unix: i64| Moment { at: second(begin, passed), unix };
        let mut clock = EventClock::default();
        clock.set(at(0, 1000));
        clock.set(at(30, 1031));
        assert_eq!(clock.epoch(), at(0, 1000));
        clock.set(at(40, 2000));
        assert_eq!(clock.epoch(), at(40, 2000));
    }

    #[test]
    fn gap_of_the_api_server_starts_its_steady_time_again() {
        let begin = Instant::now();
        let mut contact = ApiContact::default();
        assert_eq!(contact.note(begin), begin);
        assert_eq!(contact.note(second(begin, 3)), begin);
        assert_eq!(contact.note(second(begin, 7)), second(begin, 7));
        assert_eq!(contact.note(second(begin, 8)), second(begin, 7));
    }
}
