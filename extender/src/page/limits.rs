//! How often clients may call, all of them together.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A bucket of permits that fills again with time.
#[derive(Debug)]
pub(super) struct Rate {
    per_second: f64,
    most: f64,
    left: Mutex<(Instant, f64)>,
}

impl Rate {
    /// So many a second, and so many at once.
    pub(super) fn new((per_second, most): (f64, f64)) -> Self {
        Self { per_second, most, left: Mutex::new((Instant::now(), most)) }
    }

    /// Takes a permit; false if there is none.
    pub(super) fn take(&self) -> bool {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, permits) = *left;
        let passed = now.saturating_duration_since(since).as_secs_f64();
        let permits = (permits + passed * self.per_second).min(self.most);
        let is_taken = permits >= 1.0;
        *left = (now, if is_taken { permits - 1.0 } else { permits });
        is_taken
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn permits_come_back_with_time_up_to_the_most() {
        let rate = Rate::new((2.0, 3.0));
        let begin = Instant::now();
        let taken = |at: Duration| (0..10).filter(|_| rate.take_at(begin + at)).count();
        assert_eq!(taken(Duration::ZERO), 3);
        assert_eq!(taken(Duration::from_millis(1600)), 3, "2 a second, and one that came before");
        assert_eq!(taken(Duration::from_secs(600)), 3);
    }
}
