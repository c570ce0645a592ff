//! Limits the log lines of a failure that repeats: a new reason is logged at once, the same reason with growing
//! pauses. Reads no clock and writes nothing.

use std::time::{Duration, Instant};

/// The first pause between two lines of the same reason.
const MIN_PAUSE: Duration = Duration::from_secs(60);
/// The longest pause.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

/// The failure that was logged last.
#[derive(Debug, Default)]
pub struct LogThrottle(Option<LastLogged>);

#[derive(Debug)]
struct LastLogged {
    reason: String,
    due: Instant,
    pause: Duration,
}

impl LogThrottle {
    /// Whether to log a failure with this `reason` at `now`. If true, the caller must log it.
    pub fn should_log(&mut self, reason: &str, now: Instant) -> bool {
        let pause = match &self.0 {
            Some(last) if last.reason == reason => {
                if now < last.due {
                    return false;
                }
                (last.pause * 2).min(MAX_PAUSE)
            }
            _ => MIN_PAUSE,
        };
        self.0 = Some(LastLogged { reason: reason.to_owned(), due: now + pause, pause });
        true
    }

    /// Resets after a success: the next failure is logged at once.
    pub fn reset(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds from 0 to `until` at which a failure of every second is logged.
    fn logged(until: u64, reason: impl Fn(u64) -> &'static str) -> Vec<u64> {
        let start = Instant::now();
        let mut throttle = LogThrottle::default();
        (0..=until)
            .filter(|second| throttle.should_log(reason(*second), start + Duration::from_secs(*second)))
            .collect()
    }

    #[test]
    fn repeated_failure_is_logged_at_growing_intervals() {
        let (minute, hour) = (60, 3600);
        let times = logged(4 * hour, |_| "too many devices");
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
    fn new_reason_is_logged_at_once() {
        let times = logged(100, |second| if second < 70 { "a" } else { "b" });
        assert_eq!(times, [0, 60, 70]);
    }

    #[test]
    fn failure_after_success_is_logged_at_once() {
        let now = Instant::now();
        let mut throttle = LogThrottle::default();
        assert!(throttle.should_log("a", now));
        assert!(!throttle.should_log("a", now));
        throttle.reset();
        assert!(throttle.should_log("a", now));
    }
}
