//! Pauses between attempts, for every retry of both daemons.

use std::time::Duration;

/// Doublings after which a pause grows no more, whatever its bound.
const MAX_DOUBLINGS: u32 = 16;

/// How long a retry waits: `first` after the first failure, twice as long after each further one, `longest` at most.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    jitter: bool,
    failures: u32,
}

impl Backoff {
    /// Exact pauses, for a client that is alone or of few.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, jitter: false, failures: 0 }
    }

    /// Lengthens each pause by a random part of up to a half: the daemons of a thousand nodes do not return to a restarted API server in step.
    pub const fn with_jitter(self) -> Self {
        Self { jitter: true, ..self }
    }

    /// The pause after so many failures in a row, counted from 1, without jitter.
    pub fn after(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(MAX_DOUBLINGS);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }

    /// Counts a failure and returns the pause after it.
    pub fn fail(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let pause = self.after(self.failures);
        match self.jitter {
            true => pause.mul_f32(1.0 + fastrand::f32() / 2.0),
            false => pause,
        }
    }

    /// Failures since the last success.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Records a success: the next pause is the first one again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(2);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(FIRST, LONGEST);
        let pauses: Vec<u128> = (0..7).map(|_| backoff.fail().as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(backoff.failures(), 7);
        backoff.reset();
        assert_eq!(backoff.fail(), FIRST);
    }

    #[test]
    fn any_number_of_failures_stays_in_bounds() {
        let backoff = Backoff::new(FIRST, Duration::MAX);
        assert_eq!(backoff.after(0), FIRST);
        assert_eq!(backoff.after(u32::MAX), FIRST * (1 << MAX_DOUBLINGS));
    }

    #[test]
    fn jitter_lengthens_by_a_half_at_most() {
        let exact = Backoff::new(FIRST, LONGEST);
        let mut backoff = exact.with_jitter();
        let mut lengthened = 0;
        for failures in 1..200 {
            let (pause, shortest) = (backoff.fail(), exact.after(failures));
            assert!(pause >= shortest && pause <= shortest.mul_f32(1.5), "{pause:?}");
            lengthened += u32::from(pause > shortest);
        }
        assert!(lengthened > 100, "{lengthened} of 199");
    }
}
