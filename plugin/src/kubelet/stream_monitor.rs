//! Monitors whether kubelet reads the device list of a resource that it accepted, and when to register the
//! resource again. Kubelet connects to a plugin only when it registers. Once that stream ends, kubelet counts
//! the resource's devices as gone, even with both sockets in place. Reads no clock and registers nothing.

use std::time::{Duration, Instant};

use gantry_runtime::Backoff;

/// Pauses after the end of a stream. Kubelet removes a plugin by resource name after its stream ended,
/// and would remove a registration that arrived too early.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Shortest time that kubelet gets to open a stream; it needs milliseconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// A stream that was open for this long counts as a success: the next pause starts from the first again.
const STEADY: Duration = Duration::from_secs(60);

/// Stream state of one resource at one kubelet.
#[derive(Debug, Default)]
pub(super) struct StreamMonitor {
    state: StreamState,
    /// Registrations due to a missing stream since the last stream of [`STEADY`]. Each doubles the pause.
    attempts: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum StreamState {
    /// Kubelet has not accepted the resource, so no stream is expected.
    #[default]
    Unregistered,
    /// Accepted, but no stream was opened yet.
    Unopened(Instant),
    /// A stream is open.
    Open(Instant),
    /// The last stream has ended.
    Ended(Instant),
}

impl StreamMonitor {
    /// Records that kubelet accepted the resource, with `streams` open on its socket.
    pub(super) fn registered(&mut self, streams: usize, now: Instant) {
        self.state = match streams {
            0 => StreamState::Unopened(now),
            _ => StreamState::Open(now),
        };
    }

    /// Records the number of open streams.
    pub(super) fn set_streams(&mut self, streams: usize, now: Instant) {
        self.state = match (self.state, streams) {
            (StreamState::Open(since), 0) => {
                if now.saturating_duration_since(since) >= STEADY {
                    self.attempts = 0;
                }
                StreamState::Ended(now)
            }
            (StreamState::Unopened(_) | StreamState::Ended(_), 1..) => StreamState::Open(now),
            (state, _) => state,
        };
    }

    /// When to register again, unless a stream opens before.
    pub(super) fn due(&self) -> Option<Instant> {
        let pause = PAUSES.after(self.attempts.saturating_add(1));
        match self.state {
            StreamState::Unregistered | StreamState::Open(_) => None,
            StreamState::Unopened(since) => Some(since + pause.max(OPEN_TIMEOUT)),
            StreamState::Ended(since) => Some(since + pause),
        }
    }

    /// Records a registration due to a missing stream.
    pub(super) fn registered_again(&mut self, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        self.state = StreamState::Unopened(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// The pauses in seconds before `times` registrations, with a kubelet that accepts each and then does
    /// `does`.
    fn pauses(times: usize, mut does: impl FnMut(&mut StreamMonitor, &mut Instant)) -> Vec<u64> {
        let mut now = Instant::now();
        let mut monitor = StreamMonitor::default();
        monitor.registered(0, now);
        let mut pauses = Vec::new();
        for _ in 0..times {
            does(&mut monitor, &mut now);
            let due = monitor.due().unwrap();
            pauses.push((due - now).as_secs());
            now = due;
            monitor.registered_again(now);
            monitor.registered(0, now);
        }
        pauses
    }

    #[test]
    fn unopened_stream_grows_pauses() {
        assert_eq!(pauses(9, |_, _| {}), [5, 5, 5, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn short_streams_grow_pauses() {
        let ends = |monitor: &mut StreamMonitor, now: &mut Instant| {
            monitor.set_streams(1, *now);
            monitor.set_streams(0, *now);
        };
        assert_eq!(pauses(9, ends), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(pauses(100, ends)[99], 60, "no pause overflows");
    }

    #[test]
    fn long_stream_resets_pauses() {
        let held = |monitor: &mut StreamMonitor, now: &mut Instant| {
            monitor.set_streams(1, *now);
            *now += seconds(3600);
            monitor.set_streams(2, *now);
            monitor.set_streams(1, *now);
            monitor.set_streams(0, *now);
        };
        assert_eq!(pauses(3, held), [1, 1, 1]);
    }

    #[test]
    fn nothing_is_due_with_open_stream_or_unregistered() {
        let now = Instant::now();
        let mut monitor = StreamMonitor::default();
        assert_eq!(monitor.due(), None);
        monitor.set_streams(1, now);
        monitor.set_streams(0, now);
        assert_eq!(monitor.due(), None, "another caller than kubelet");
        // Kubelet may open the stream before it returns from Register.
        monitor.registered(1, now);
        assert_eq!(monitor.due(), None);
        monitor.set_streams(2, now);
        monitor.set_streams(1, now);
        assert_eq!(monitor.due(), None);
        monitor.set_streams(0, now);
        assert!(monitor.due().is_some());
        monitor.set_streams(1, now + seconds(1));
        assert_eq!(monitor.due(), None);
    }
}
