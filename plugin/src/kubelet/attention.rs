//! Whether kubelet reads the device list of a resource that it has accepted, and when to register that resource again if it does
//! not. Kubelet dials a plugin when it registers, and never again: once it has lost the stream of lists it counts the resource's
//! devices as gone, with both sockets in their places. It reads no clock and registers nothing.

use std::time::{Duration, Instant};

/// The first pause after a stream's end. Kubelet forgets a plugin by its resource's name, once its stream has ended: a registration
/// that came before it has done so would be what it forgets.
const ENDED: Duration = Duration::from_secs(1);
/// How long kubelet may take to open a stream, at least: it takes milliseconds.
const UNOPENED: Duration = Duration::from_secs(5);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);
/// A stream that was open for so long was a success: the next pause is the first again.
const STEADY: Duration = Duration::from_secs(60);

/// What is known of one resource at one kubelet.
#[derive(Debug, Default)]
pub(super) struct Attention {
    state: State,
    /// Registrations for want of a stream since one was [`STEADY`]. Each doubles the pause.
    tries: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Kubelet has not accepted the resource: it owes no stream.
    #[default]
    Unregistered,
    /// Accepted, and no stream opened yet.
    Unopened(Instant),
    /// A stream is open.
    Open(Instant),
    /// The last stream has ended.
    Ended(Instant),
}

impl Attention {
    /// Kubelet has accepted the resource; `streams` are open on its socket.
    pub(super) fn registered(&mut self, streams: usize, now: Instant) {
        self.state = match streams {
            0 => State::Unopened(now),
            _ => State::Open(now),
        };
    }

    /// So many streams are open now.
    pub(super) fn counted(&mut self, streams: usize, now: Instant) {
        self.state = match (self.state, streams) {
            (State::Open(since), 0) => {
                if now.saturating_duration_since(since) >= STEADY {
                    self.tries = 0;
                }
                State::Ended(now)
            }
            (State::Unopened(_) | State::Ended(_), 1..) => State::Open(now),
            (state, _) => state,
        };
    }

    /// When to register again, unless a stream opens before.
    pub(super) fn due(&self) -> Option<Instant> {
        let pause = ENDED
            .saturating_mul(1_u32.checked_shl(self.tries).unwrap_or(u32::MAX))
            .min(LONGEST);
        match self.state {
            State::Unregistered | State::Open(_) => None,
            State::Unopened(since) => Some(since + pause.max(UNOPENED)),
            State::Ended(since) => Some(since + pause),
        }
    }

    /// It is registered again, for want of a stream.
    pub(super) fn again(&mut self, now: Instant) {
        self.tries = self.tries.saturating_add(1);
        self.state = State::Unopened(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// After how many seconds each it is registered again, `times` times, by a kubelet that accepts and then does `does`.
    fn pauses(times: usize, mut does: impl FnMut(&mut Attention, &mut Instant)) -> Vec<u64> {
        let mut now = Instant::now();
        let mut attention = Attention::default();
        attention.registered(0, now);
        let mut pauses = Vec::new();
        for _ in 0..times {
            does(&mut attention, &mut now);
            let due = attention.due().unwrap();
            pauses.push((due - now).as_secs());
            now = due;
            attention.again(now);
            attention.registered(0, now);
        }
        pauses
    }

    #[test]
    fn a_kubelet_that_never_opens_a_stream_is_asked_ever_more_rarely() {
        assert_eq!(pauses(9, |_, _| {}), [5, 5, 5, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn a_kubelet_that_ends_each_stream_at_once_is_asked_ever_more_rarely() {
        let ends = |attention: &mut Attention, now: &mut Instant| {
            attention.counted(1, *now);
            attention.counted(0, *now);
        };
        assert_eq!(pauses(9, ends), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(pauses(100, ends)[99], 60, "no pause overflows");
    }

    #[test]
    fn a_stream_that_was_open_for_long_makes_its_end_the_first_again() {
        let held = |attention: &mut Attention, now: &mut Instant| {
            attention.counted(1, *now);
            *now += seconds(3600);
            attention.counted(2, *now);
            attention.counted(1, *now);
            attention.counted(0, *now);
        };
        assert_eq!(pauses(3, held), [1, 1, 1]);
    }

    #[test]
    fn nothing_is_due_while_a_stream_is_open_or_nothing_was_accepted() {
        let now = Instant::now();
        let mut attention = Attention::default();
        assert_eq!(attention.due(), None);
        attention.counted(1, now);
        attention.counted(0, now);
        assert_eq!(attention.due(), None, "a caller who is not kubelet");
        // Kubelet may open the stream before it has answered.
        attention.registered(1, now);
        assert_eq!(attention.due(), None);
        attention.counted(2, now);
        attention.counted(1, now);
        assert_eq!(attention.due(), None);
        attention.counted(0, now);
        assert!(attention.due().is_some());
        attention.counted(1, now + seconds(1));
        assert_eq!(attention.due(), None);
    }
}
