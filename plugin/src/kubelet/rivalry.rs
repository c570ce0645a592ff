//! When to take a socket's place back that another program has put its own in: at once the first time, for NVIDIA's plugin on its way out
//! does so once, and ever more rarely if it comes again, for a program that takes it back likewise would have kubelet register both
//! without end. It reads no clock and touches no file.

use std::time::{Duration, Instant};

/// The pause before the second time.
const FIRST: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);
/// A socket that stood for so long was left in peace: the next loss is the first again.
const PEACE: Duration = Duration::from_secs(120);

/// What is known of one resource's socket.
#[derive(Debug, Default)]
pub(super) struct Rivalry {
    /// Times the place was taken back without [`PEACE`] between.
    times: u32,
    /// When the own socket was put there last.
    placed: Option<Instant>,
    /// Since when another's is known to be there.
    lost: Option<Instant>,
}

impl Rivalry {
    /// The own socket is in its place from now on; `from_rival` if another's was there.
    pub(super) fn placed(&mut self, from_rival: bool, now: Instant) {
        let peace = self
            .placed
            .zip(self.lost.or(Some(now)))
            .is_none_or(|(placed, lost)| lost.saturating_duration_since(placed) >= PEACE);
        if peace {
            self.times = 0;
        }
        if from_rival {
            self.times = self.times.saturating_add(1);
        }
        self.placed = Some(now);
        self.lost = None;
    }

    /// Another's socket is there now. When to take the place back: at `now`, or later.
    pub(super) fn lost(&mut self, now: Instant) -> Instant {
        let lost = *self.lost.get_or_insert(now);
        let peace = self
            .placed
            .is_none_or(|placed| lost.saturating_duration_since(placed) >= PEACE);
        match self.times {
            0 => lost,
            _ if peace => lost,
            times => {
                lost + FIRST
                    .saturating_mul(1_u32.checked_shl(times - 1).unwrap_or(u32::MAX))
                    .min(LONGEST)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many seconds each the place is taken back from a program that takes it `stands` seconds after.
    fn pauses(times: usize, stands: u64) -> Vec<u64> {
        let mut now = Instant::now();
        let mut rivalry = Rivalry::default();
        rivalry.placed(false, now);
        let mut pauses = Vec::new();
        for _ in 0..times {
            now += Duration::from_secs(stands);
            let due = rivalry.lost(now);
            assert_eq!(
                rivalry.lost(now + Duration::from_millis(500)),
                due,
                "looking again puts nothing off"
            );
            pauses.push((due - now).as_secs());
            now = due;
            rivalry.placed(true, now);
        }
        pauses
    }

    #[test]
    fn a_program_that_takes_the_place_again_and_again_gets_it_for_ever_longer() {
        assert_eq!(pauses(9, 0), [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses(100, 5)[99], 60, "no pause overflows");
    }

    #[test]
    fn a_socket_that_stood_for_long_is_put_back_at_once() {
        assert_eq!(pauses(3, 3600), [0, 0, 0]);
    }

    #[test]
    fn a_socket_that_was_wiped_is_nobodys_doing() {
        let mut now = Instant::now();
        let mut rivalry = Rivalry::default();
        for _ in 0..9 {
            now += Duration::from_secs(1);
            rivalry.placed(false, now);
        }
        assert_eq!(rivalry.lost(now), now);
    }
}
