//! Whether the thread that owns NVML goes on: a call into a driver may hang for ever. Counts beats; what follows from their
//! absence is the watchdog's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Beats of a thread, for those who look after it. Clones are alike.
#[derive(Debug, Clone)]
pub struct Heartbeat(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    start: Instant,
    /// Milliseconds from `start` to the last beat.
    last: AtomicU64,
    given_up: AtomicBool,
    panicked: AtomicBool,
}

/// Tells if the thread that holds it panics.
#[derive(Debug)]
pub(super) struct PanicNotice(Heartbeat);

impl Heartbeat {
    /// One that beats now.
    pub fn new() -> Self {
        Self(Arc::new(Beats {
            start: Instant::now(),
            last: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        }))
    }

    /// Beats. True: it had been given up, and others were told so.
    pub fn beat(&self) -> bool {
        let millis = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(millis, Ordering::Relaxed);
        self.0.given_up.swap(false, Ordering::AcqRel)
    }

    /// Time since the last beat.
    pub fn silence(&self) -> Duration {
        let last = Duration::from_millis(self.0.last.load(Ordering::Relaxed));
        self.0.start.elapsed().saturating_sub(last)
    }

    /// Whether there will be no beat any more, for the thread has ended by a panic.
    pub fn has_panicked(&self) -> bool {
        self.0.panicked.load(Ordering::Acquire)
    }

    /// Others have been told that it is silent: the next beat has to set that right.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
    }

    /// As if its thread had panicked.
    #[cfg(test)]
    pub(crate) fn panics(&self) {
        self.0.panicked.store(true, Ordering::Release);
    }

    pub(super) fn last_word(&self) -> PanicNotice {
        PanicNotice(self.clone())
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for PanicNotice {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.0.panicked.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_given_up_hears_of_it_once_at_the_next_beat() {
        let heartbeat = Heartbeat::new();
        assert!(!heartbeat.beat());
        heartbeat.give_up();
        assert!(heartbeat.beat());
        assert!(!heartbeat.beat());
    }

    #[test]
    fn a_panic_is_the_last_word_and_an_end_is_none() {
        let heartbeat = Heartbeat::new();
        let word = heartbeat.last_word();
        std::thread::spawn(move || drop(word)).join().unwrap();
        assert!(!heartbeat.has_panicked());
        let word = heartbeat.last_word();
        let thread = std::thread::spawn(move || {
            let _word = word;
            panic!("on purpose");
        });
        assert!(thread.join().is_err());
        assert!(heartbeat.has_panicked());
    }
}
