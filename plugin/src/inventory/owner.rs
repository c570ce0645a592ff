//! The owner of inventory and health: one thread that holds NVML, reads the machine, waits for events and publishes snapshots.
//! Nobody else asks NVML, and it asks nothing on behalf of a request. It never gives up: what fails is tried again, later and
//! later.
//!
//! ```text
//! load NVML -> read the machine -> publish -> wait for events, look round every few seconds
//!     ^              ^                              | GPU lost, back or cut anew, link Xid, a minute over: read again
//!     +--------------+------------------------------+ driver gone: all unhealthy, load anew with back-off
//!                                                     GPU added or taken out: load anew
//! ```

mod keeper;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

pub(super) use keeper::Keeper;

use super::doubts::Doubts;
use super::heartbeat::Heartbeat;
use super::session::{End, Session};
use super::{Diagnoses, Diagnosis, Hardware, Marker, Settings};
use crate::discover::NvmlOptions;
use crate::health::{Book, HealthChecks, Table, XidCounts};
use crate::nvml::{self, Nvml};
use crate::recurring::Recurring;

/// How long the owner waits for what.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Longest single wait for an event; an Xid ends it at once. Bounds how fast the owner stops.
    pub wait: Duration,
    /// Between two looks round: GPU count, driver, and one question to each GPU.
    pub look: Duration,
    /// Between two full readings of the machine.
    pub read: Duration,
    /// First pause after a failure; doubles with each further one.
    pub retry_from: Duration,
    /// Longest pause.
    pub retry_to: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            wait: Duration::from_millis(500),
            look: Duration::from_secs(5),
            read: Duration::from_secs(60),
            retry_from: Duration::from_secs(1),
            retry_to: Duration::from_secs(30),
        }
    }
}

impl Timing {
    /// The pause after so many failures in a row.
    pub(super) fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        (self.retry_from * (1 << doublings)).min(self.retry_to)
    }
}

/// A running owner. Dropping it tells the thread to stop, without waiting for it.
#[derive(Debug)]
pub struct Owner {
    _stop: Sender<()>,
    thread: JoinHandle<()>,
    xids: XidCounts,
    diagnoses: Diagnoses,
    marker: Marker,
    heartbeat: Heartbeat,
}

impl Owner {
    /// Starts the thread. Snapshots appear in `publish`: first a machine or a reason why there is none, then every change.
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
        let last_word = heartbeat.last_word();
        let keeper = Keeper {
            boot_id: boot_id(&settings.proc_root),
            options: NvmlOptions {
                library: settings.nvml_library.clone(),
                proc_root: settings.proc_root.clone(),
                sys_root: settings.sys_root.clone(),
            },
            config: settings.config.clone(),
            checks,
            timing,
            table: Table::built_in(),
            xids: xids.clone(),
            publish,
            pause: Pause(stopped),
            book: Book::default(),
            known: None,
            indices: BTreeMap::new(),
            nameless: BTreeMap::new(),
            warned: Vec::new(),
            caps: BTreeMap::new(),
            cut_unknown: BTreeSet::new(),
            diagnoses: diagnoses_end,
            heartbeat: heartbeat.clone(),
            diagnosis: Diagnosis::default(),
            started: Instant::now(),
            hears: true,
            failing: Recurring::default(),
            unheard: Recurring::default(),
            deaf: BTreeMap::new(),
            doubts: Doubts::default(),
            reloads: 0,
        };
        let thread = std::thread::Builder::new()
            .name("nvml".to_owned())
            .spawn(move || {
                let _last_word = last_word;
                run(keeper);
            })?;
        Ok(Self {
            _stop: stop,
            thread,
            xids,
            diagnoses,
            marker,
            heartbeat,
        })
    }

    /// What is wrong with the GPUs, and where to tell about it.
    pub fn diagnoses(&self) -> Diagnoses {
        self.diagnoses.clone()
    }

    /// What is wrong where the thread does not say it.
    pub fn marker(&self) -> Marker {
        self.marker.clone()
    }

    /// Whether the thread goes on.
    pub fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    /// How often each Xid was raised, for metrics.
    pub fn xids(&self) -> XidCounts {
        self.xids.clone()
    }

    /// Stops the thread and waits for it: NVML is shut down when this returns. Blocks for [`Timing::wait`] at most, unless NVML
    /// itself hangs.
    pub fn stop(self) {
        let Self { _stop, thread, .. } = self;
        drop(_stop);
        if thread.join().is_err() {
            tracing::error!("the NVML thread had panicked");
        }
    }
}

/// Pauses that end when the owner is told to stop.
pub(super) struct Pause(Receiver<()>);

impl Pause {
    /// Sleeps. True: go on; false: stop.
    pub(super) fn go_on_after(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
    }
}

fn run(mut keeper: Keeper) {
    let mut failures = 0u32;
    loop {
        let end = live_once(&mut keeper, &mut failures);
        let failure = match end {
            End::Stop => return,
            End::Failed(failure) => failure,
            End::Reload => continue,
        };
        failures += 1;
        keeper.failed(&failure, failures);
        if !keeper.rest(keeper.timing.pause(failures)) {
            return;
        }
    }
}

/// One life of a loaded NVML.
fn live_once(keeper: &mut Keeper, failures: &mut u32) -> End {
    // Each time anew: the driver may have been installed meanwhile, or its root corrected.
    let root = keeper.config.borrow().container_driver_root.clone();
    let library = nvml::find(&keeper.options.library, &root);
    match Nvml::load(&library) {
        Ok(nvml) => Session { nvml: &nvml }.run(keeper, failures),
        Err(error) => End::Failed(error.into()),
    }
}

/// The kernel's name for this boot; empty where it tells none.
fn boot_id(proc_root: &Path) -> String {
    let id = std::fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"));
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}
