//! When to take back a socket that another program replaced. The first time at once, because NVIDIA's plugin
//! replaces it once when it stops. Later with growing pauses, because a program that does the same would make
//! kubelet register both without end. Reads no clock and touches no file.

use std::time::{Duration, Instant};

use gantry_runtime::Backoff;

/// Pauses from the second time on.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// A socket that stayed in place for this long: the next loss counts as the first again.
const STABLE: Duration = Duration::from_secs(120);

/// Contention for one resource's socket.
#[derive(Debug, Default)]
pub(super) struct SocketContention {
    /// Number of times the socket was taken back without [`STABLE`] in between.
    times: u32,
    /// When our socket was last bound.
    bound: Option<Instant>,
    /// Since when another program's socket is known to be there.
    lost: Option<Instant>,
}

impl SocketContention {
    /// Records that our socket was bound; `from_other` if it replaced another program's.
    pub(super) fn bound(&mut self, from_other: bool, now: Instant) {
        let stable = self
            .bound
            .zip(self.lost.or(Some(now)))
            .is_none_or(|(bound, lost)| lost.saturating_duration_since(bound) >= STABLE);
        if stable {
            self.times = 0;
        }
        if from_other {
            self.times = self.times.saturating_add(1);
        }
        self.bound = Some(now);
        self.lost = None;
    }

    /// Records another program's socket. Returns when to take the socket back: `now`, or later.
    pub(super) fn lost(&mut self, now: Instant) -> Instant {
        let lost = *self.lost.get_or_insert(now);
        let stable = self.bound.is_none_or(|bound| lost.saturating_duration_since(bound) >= STABLE);
        match self.times {
            0 => lost,
            _ if stable => lost,
            times => lost + PAUSES.after(times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pauses in seconds before our socket is taken back from a program that replaces it after `stands`
    /// seconds.
    fn pauses(times: usize, stands: u64) -> Vec<u64> {
        let mut now = Instant::now();
        let mut contention = SocketContention::default();
        contention.bound(false, now);
        let mut pauses = Vec::new();
        for _ in 0..times {
            now += Duration::from_secs(stands);
            let due = contention.lost(now);
            assert_eq!(
                contention.lost(now + Duration::from_millis(500)),
                due,
                "looking again puts nothing off"
            );
            pauses.push((due - now).as_secs());
            now = due;
            contention.bound(true, now);
        }
        pauses
    }

    #[test]
    fn repeated_contention_grows_pauses() {
        assert_eq!(pauses(9, 0), [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses(100, 5)[99], 60, "no pause overflows");
    }

    #[test]
    fn stable_socket_is_taken_back_at_once() {
        assert_eq!(pauses(3, 3600), [0, 0, 0]);
    }

    #[test]
    fn removed_socket_is_no_contention() {
        let mut now = Instant::now();
        let mut contention = SocketContention::default();
        for _ in 0..9 {
            now += Duration::from_secs(1);
            contention.bound(false, now);
        }
        assert_eq!(contention.lost(now), now);
    }
}
