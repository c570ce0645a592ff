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
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use tokio::sync::watch;

use super::heartbeat::Heartbeat;
use super::nvml_state::{NvmlChannels, NvmlState, Timing};
use super::session::{Session, SessionEnd};
use super::{Diagnoses, Hardware, Marker, Settings};
use crate::health::{HealthChecks, XidCounts};
use crate::nvml::{self, Nvml};

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
            run(state);
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

fn run(mut state: NvmlState) {
    let mut failures = 0u32;
    loop {
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
    let root = state.config.borrow().container_driver_root.clone();
    let library = nvml::find(&state.options.library, &root);
    match Nvml::load(&library) {
        Ok(nvml) => Session { nvml: &nvml }.run(state, failures),
        Err(error) => SessionEnd::Failed(error.into()),
    }
}
