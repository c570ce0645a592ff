//! Says of something that fails again and again when that is worth a line in the log: when the reason is another one, and then ever
//! more rarely. It reads no clock and writes nothing.

use std::time::{Duration, Instant};

/// The first pause between two lines of the same reason.
const FIRST: Duration = Duration::from_secs(60);
/// The longest one.
const LAST: Duration = Duration::from_secs(3600);

/// What was told last.
#[derive(Debug, Default)]
pub(crate) struct Recurring(Option<Told>);

#[derive(Debug)]
struct Told {
    reason: String,
    due: Instant,
    pause: Duration,
}

impl Recurring {
    /// Whether to tell of a failure for this `reason` at `now`. What is told counts as told.
    pub(crate) fn tells(&mut self, reason: &str, now: Instant) -> bool {
        let pause = match &self.0 {
            Some(told) if told.reason == reason => {
                if now < told.due {
                    return false;
                }
                (told.pause * 2).min(LAST)
            }
            _ => FIRST,
        };
        self.0 = Some(Told {
            reason: reason.to_owned(),
            due: now + pause,
            pause,
        });
        true
    }

    /// It has worked: the next failure is news.
    pub(crate) fn over(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
#[path = "../tests/support/log.rs"]
pub(crate) mod log;

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds, of those from 0 to `until`, at which a failure of every second is told of.
    fn told(until: u64, reason: impl Fn(u64) -> &'static str) -> Vec<u64> {
        let start = Instant::now();
        let mut recurring = Recurring::default();
        (0..=until)
            .filter(|second| recurring.tells(reason(*second), start + Duration::from_secs(*second)))
            .collect()
    }

    #[test]
    fn the_same_failure_is_told_of_at_once_and_then_ever_more_rarely() {
        let (minute, hour) = (60, 3600);
        let times = told(4 * hour, |_| "too many devices");
        assert_eq!(
            times,
            [
                0,
                minute,
                3 * minute,
                7 * minute,
                15 * minute,
                31 * minute,
                63 * minute,
                63 * minute + hour,
                63 * minute + 2 * hour
            ]
        );
    }

    #[test]
    fn another_reason_is_told_of_at_once() {
        let times = told(100, |second| if second < 70 { "a" } else { "b" });
        assert_eq!(times, [0, 60, 70]);
    }

    #[test]
    fn a_failure_after_a_success_is_news() {
        let now = Instant::now();
        let mut recurring = Recurring::default();
        assert!(recurring.tells("a", now));
        assert!(!recurring.tells("a", now));
        recurring.over();
        assert!(recurring.tells("a", now));
    }
}
