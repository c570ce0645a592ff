//! The NVML thread: it alone calls NVML. It reads the machine, waits for events and publishes snapshots; it
//! makes no call on behalf of a request. It never ends by itself: what fails is retried with growing pauses.
//!
//! ```text
//! load NVML -> read the machine -> publish -> wait for events, check every few seconds
//!     ^              ^                              | GPU lost or back, MIG layout changed, link Xid, a minute over: read again
//!     +--------------+------------------------------+ driver gone: all unhealthy, load again with back-off
//!                                                     GPU added or removed: load again
//! ```

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::nvml_state::{NvmlChannels, NvmlState, Timing};
use super::session::{Session, SessionEnd};
use super::{Diagnoses, Hardware, Marker, Settings};
use crate::discover::{self, DiscoverError};
use crate::health::{HealthChecks, XidCounts};
use crate::nvml::{CallTrace, Code, Nvml, TracedCall};
use crate::root;

/// A running NVML thread. Dropping it stops the thread without waiting.
#[derive(Debug)]
pub struct NvmlThread {
    _stop: Sender<()>,
    thread: JoinHandle<()>,
    xids: XidCounts,
    diagnoses: Diagnoses,
    marker: Marker,
    heartbeat: Heartbeat,
}

impl NvmlThread {
    /// Starts the thread. Snapshots appear in `publish`: first a machine or the reason for none, then every
    /// change.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start(
        settings: &Settings,
        checks: HealthChecks,
        timing: Timing,
        publish: watch::Sender<Arc<Hardware>>,
    ) -> io::Result<Self> {
        Self::start_after_adoption(settings, checks, timing, publish, Duration::ZERO)
    }

    /// As [`NvmlThread::start`]. NVML is opened once the state of an earlier run was adopted, or after `limit`: a GPU may be
    /// in the middle of a reset, for which NVML stays closed.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start_after_adoption(
        settings: &Settings,
        checks: HealthChecks,
        timing: Timing,
        publish: watch::Sender<Arc<Hardware>>,
        limit: Duration,
    ) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let xids = XidCounts::default();
        let (diagnoses, diagnoses_end) = Diagnoses::pair();
        let marker = diagnoses_end.marker();
        let heartbeat = Heartbeat::new();
        let panic_notice = heartbeat.panic_notice();
        let state = NvmlState::new(
            settings,
            checks,
            timing,
            xids.clone(),
            NvmlChannels {
                hardware: publish,
                diagnoses: diagnoses_end,
                heartbeat: heartbeat.clone(),
                stopped,
            },
        );
        let thread = std::thread::Builder::new().name("nvml".to_owned()).spawn(move || {
            let _last_word = panic_notice;
            run(state, limit);
        })?;
        Ok(Self { _stop: stop, thread, xids, diagnoses, marker, heartbeat })
    }

    /// Problems of the GPUs, and commands to the thread.
    pub fn diagnoses(&self) -> Diagnoses {
        self.diagnoses.clone()
    }

    /// Overrides the problems while the thread is silent.
    pub fn marker(&self) -> Marker {
        self.marker.clone()
    }

    /// Heartbeat of the thread.
    pub fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    /// Xid counts, for metrics.
    pub fn xids(&self) -> XidCounts {
        self.xids.clone()
    }

    /// Stops the thread and waits for it: NVML is shut down when this returns. Blocks at most [`Timing::wait`],
    /// unless NVML itself hangs.
    pub fn stop(self) {
        let Self { _stop, thread, .. } = self;
        drop(_stop);
        if thread.join().is_err() {
            tracing::error!("the NVML thread ended with a panic");
        }
    }
}

fn run(mut state: NvmlState, adoption_limit: Duration) {
    if !state.await_adoption(adoption_limit) {
        return;
    }
    let mut failures = 0u32;
    loop {
        if !state.stay_closed() {
            return;
        }
        let end = run_session(&mut state, &mut failures);
        let failure = match end {
            SessionEnd::Stop => return,
            SessionEnd::Failed(failure) => failure,
            SessionEnd::Reload => continue,
        };
        failures += 1;
        state.record_failure(&failure, failures);
        if !state.rest(state.timing.pause(failures)) {
            return;
        }
    }
}

/// Loads NVML and works with it until it must be loaded again.
fn run_session(state: &mut NvmlState, failures: &mut u32) -> SessionEnd {
    // Searched before each load: the driver may have been installed meanwhile, or its root corrected.
    let folder = state.config.borrow().container_driver_root.clone();
    let library = root::find_library(&state.options.library, &folder);
    match Nvml::load_traced(&library, &state.trace()) {
        Ok(nvml) => Session { nvml: &nvml }.run(state, failures),
        Err(error) if error.code() == Some(Code::LibRmVersionMismatch) => {
            SessionEnd::Failed(DiscoverError::VersionMismatch {
                error,
                library: root::version_of(&library),
                kernel: discover::kernel_driver(&state.options),
            })
        }
        Err(error) => SessionEnd::Failed(error.into()),
    }
}

/// The heartbeat of a thread. Clones share it.
#[derive(Debug, Clone)]
pub struct Heartbeat(Arc<Heartbeats>);

#[derive(Debug)]
struct Heartbeats {
    start: Instant,
    /// Milliseconds from `start` to the last beat.
    last: AtomicU64,
    reported_silent: AtomicBool,
    panicked: AtomicBool,
    /// The NVML call under way.
    trace: CallTrace,
    /// Whether NVML was read at least once.
    has_read: AtomicBool,
}

/// Records a panic of the thread that holds it.
#[derive(Debug)]
pub(super) struct PanicNotice(Heartbeat);

impl Heartbeat {
    /// A heartbeat with its first beat now.
    pub fn new() -> Self {
        Self(Arc::new(Heartbeats {
            start: Instant::now(),
            last: AtomicU64::new(0),
            reported_silent: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            trace: CallTrace::default(),
            has_read: AtomicBool::new(false),
        }))
    }

    /// Beats. True if the thread had been reported as silent.
    pub fn beat(&self) -> bool {
        let millis = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.last.store(millis, Ordering::Relaxed);
        self.0.reported_silent.swap(false, Ordering::AcqRel)
    }

    /// Time since the last beat, or since the call under way began: a thread that makes calls does not hang.
    pub fn silence(&self) -> Duration {
        let last = Duration::from_millis(self.0.last.load(Ordering::Relaxed));
        let silence = self.0.start.elapsed().saturating_sub(last);
        self.call().map_or(silence, |call| silence.min(call.since.elapsed()))
    }

    /// The NVML call under way.
    pub fn call(&self) -> Option<TracedCall> {
        self.0.trace.now()
    }

    /// What records the calls.
    pub fn trace(&self) -> CallTrace {
        self.0.trace.clone()
    }

    /// Records that NVML was read.
    pub fn mark_read(&self) {
        self.0.has_read.store(true, Ordering::Release);
    }

    /// Whether NVML was read at least once.
    pub fn has_read(&self) -> bool {
        self.0.has_read.load(Ordering::Acquire)
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
