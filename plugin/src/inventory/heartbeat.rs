//! Heartbeat of the NVML thread, because a driver call may hang for ever. The watchdog acts on missing beats.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The heartbeat of a thread. Clones share it.
#[derive(Debug, Clone)]
pub struct Heartbeat(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    start: Instant,
    /// Milliseconds from `start` to the last beat.
    last: AtomicU64,
    reported_silent: AtomicBool,
    panicked: AtomicBool,
}

/// Records a panic of the thread that holds it.
#[derive(Debug)]
pub(super) struct PanicNotice(Heartbeat);

impl Heartbeat {
    /// A heartbeat with its first beat now.
    pub fn new() -> Self {
        Self(Arc::new(Beats {
            start: Instant::now(),
            last: AtomicU64::new(0),
            reported_silent: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        }))
    }

    /// Beats. True if the thread had been reported as silent.
    pub fn beat(&self) -> bool {
        let millis = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(millis, Ordering::Relaxed);
        self.0.reported_silent.swap(false, Ordering::AcqRel)
    }

    /// Time since the last beat.
    pub fn silence(&self) -> Duration {
        let last = Duration::from_millis(self.0.last.load(Ordering::Relaxed));
        self.0.start.elapsed().saturating_sub(last)
    }

    /// Whether the thread ended with a panic.
    pub fn has_panicked(&self) -> bool {
        self.0.panicked.load(Ordering::Acquire)
    }

    /// Records that the thread was reported as silent: the next [`Heartbeat::beat`] returns true.
    pub fn mark_silent(&self) {
        self.0.reported_silent.store(true, Ordering::Release);
    }

    /// Simulates a panic of the thread.
    #[cfg(test)]
    pub(crate) fn panics(&self) {
        self.0.panicked.store(true, Ordering::Release);
    }

    pub(super) fn panic_notice(&self) -> PanicNotice {
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
    fn next_beat_reports_silence_once() {
        let heartbeat = Heartbeat::new();
        assert!(!heartbeat.beat());
        heartbeat.mark_silent();
        assert!(heartbeat.beat());
        assert!(!heartbeat.beat());
    }

    #[test]
    fn panic_is_recorded_normal_end_is_not() {
        let heartbeat = Heartbeat::new();
        let word = heartbeat.panic_notice();
        std::thread::spawn(move || drop(word)).join().unwrap();
        assert!(!heartbeat.has_panicked());
        let word = heartbeat.panic_notice();
        let thread = std::thread::spawn(move || {
            let _word = word;
            panic!("on purpose");
        });
        assert!(thread.join().is_err());
        assert!(heartbeat.has_panicked());
    }
}
