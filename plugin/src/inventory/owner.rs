//! The owner of inventory and health: one thread that holds NVML, reads the machine, waits for events and publishes snapshots.
//! Nobody else asks NVML, and it asks nothing on behalf of a request. It never gives up: what fails is tried again, later and
//! later.
//!
//! ```text
//! load NVML -> read the machine -> publish -> wait for events, look round every few seconds
//!     ^              ^                              | GPU lost or back, link Xid, a minute over: read again
//!     +--------------+------------------------------+ driver gone: all unhealthy, load anew with back-off
//! ```

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use gantry_topology::Machine;
use tokio::sync::watch;

use super::hardware;
use super::merge::merge;
use super::session::{End, Session};
use super::{Hardware, Settings, State};
use crate::discover::{DiscoverError, Found, NvmlOptions};
use crate::health::{Book, HealthChecks, Outage, Table, XidCounts};
use crate::nvml::Nvml;

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
        let keeper = Keeper {
            options: NvmlOptions {
                library: settings.nvml_library.clone(),
                proc_root: settings.proc_root.clone(),
                sys_root: settings.sys_root.clone(),
            },
            checks,
            timing,
            table: Table::built_in(),
            xids: xids.clone(),
            publish,
            pause: Pause(stopped),
            book: Book::default(),
            known: None,
            warned: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("nvml".to_owned())
            .spawn(move || run(keeper))?;
        Ok(Self {
            _stop: stop,
            thread,
            xids,
        })
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

/// What the thread keeps between one reading and the next.
pub(super) struct Keeper {
    pub(super) options: NvmlOptions,
    pub(super) checks: HealthChecks,
    pub(super) timing: Timing,
    pub(super) table: Table,
    pub(super) xids: XidCounts,
    publish: watch::Sender<Arc<Hardware>>,
    pub(super) pause: Pause,
    pub(super) book: Book,
    known: Option<Arc<Machine>>,
    warned: Vec<String>,
}

/// Failures of NVML in a row, other than a driver gone, before GPUs count as unhealthy: one may be chance.
const PATIENCE: u32 = 3;

fn run(mut keeper: Keeper) {
    let mut failures = 0u32;
    loop {
        let end = live_once(&mut keeper, &mut failures);
        let failure = match end {
            End::Stop => return,
            End::Failed(failure) => failure,
        };
        failures += 1;
        keeper.failed(&failure, failures);
        if !keeper.pause.go_on_after(keeper.timing.pause(failures)) {
            return;
        }
    }
}

/// One life of a loaded NVML.
fn live_once(keeper: &mut Keeper, failures: &mut u32) -> End {
    match Nvml::load(&keeper.options.library) {
        Ok(nvml) => Session { nvml: &nvml }.run(keeper, failures),
        Err(error) => End::Failed(error.into()),
    }
}

impl Keeper {
    /// Takes in what was read, and publishes it.
    pub(super) fn found(&mut self, found: Found) -> Result<(), DiscoverError> {
        for warning in found
            .warnings
            .iter()
            .filter(|warning| !self.warned.contains(warning))
        {
            tracing::warn!("{warning}");
        }
        self.warned.clone_from(&found.warnings);
        let merged = merge(self.known.as_deref(), found)?;
        self.book.works();
        for uuid in merged.machine.gpus().iter().filter_map(|gpu| gpu.uuid.as_ref()) {
            match merged.missing.get(uuid) {
                Some(reason) => self.book.lost(uuid, reason.clone()),
                None => self.book.answers(uuid),
            }
        }
        if self.known.as_deref() != Some(&merged.machine) {
            tracing::info!(
                gpus = merged.machine.gpus().len(),
                nics = merged.machine.nics().len(),
                driver = merged.machine.host().driver.as_deref(),
                "machine read"
            );
            self.known = Some(Arc::new(merged.machine));
        }
        self.publish();
        Ok(())
    }

    /// Takes in a failure: nothing can be asked now.
    pub(super) fn failed(&mut self, failure: &DiscoverError, failures: u32) {
        tracing::warn!(failures, "{failure}");
        if failure.is_gone() {
            self.book
                .outage(Outage::Driver(format!("driver gone: {failure}")));
        } else if failures >= PATIENCE {
            self.book.outage(Outage::Nvml(format!("NVML fails: {failure}")));
        }
        if self.known.is_some() {
            self.publish();
        } else {
            self.send(Hardware::absent(failure.to_string()));
        }
    }

    /// Publishes what is known, if it differs from what was published last.
    pub(super) fn publish(&self) {
        let Some(machine) = &self.known else {
            return;
        };
        let units = hardware::units(machine, |gpu, _| self.book.health(gpu), |_, _, _| None);
        self.send(Hardware::ready(Arc::clone(machine), units));
    }

    fn send(&self, hardware: Hardware) {
        log_changes(&self.publish.borrow(), &hardware);
        self.publish.send_if_modified(|current| {
            let changed = **current != hardware;
            if changed {
                *current = Arc::new(hardware);
            }
            changed
        });
    }
}

/// One line in the log for every unit whose health changes.
fn log_changes(before: &Hardware, after: &Hardware) {
    if after.state != State::Ready {
        return;
    }
    for unit in &after.units {
        let known = before.units.iter().find(|known| known.id == unit.id);
        if known.is_none_or(|known| known.health == unit.health) {
            continue;
        }
        match &unit.health.reason {
            Some(reason) => tracing::error!(device = %unit.id, gpu = unit.gpu, "unhealthy: {reason}"),
            None => tracing::info!(device = %unit.id, gpu = unit.gpu, "healthy again"),
        }
    }
}
