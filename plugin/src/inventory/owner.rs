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

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gantry_topology::{Gpu, GpuUuid, Machine};
use tokio::sync::watch;

use super::diagnosis::{Order, SickbayEnd};
use super::hardware;
use super::merge::merge;
use super::pulse::Pulse;
use super::session::{End, Session};
use super::{Diagnosis, Hardware, Settings, Sickbay, State, StoredFault};
use crate::config::Config;
use crate::discover::{DiscoverError, Found, InstanceAt, NvmlOptions};
use crate::health::{Book, HealthChecks, Loss, Outage, OutageKind, Part, Table, Vitals, XidCounts};
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
    sickbay: Sickbay,
    pulse: Pulse,
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
        let (sickbay, sickbay_end) = Sickbay::pair();
        let pulse = Pulse::new();
        let last_word = pulse.last_word();
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
            warned: Vec::new(),
            caps: BTreeMap::new(),
            cut_unknown: BTreeSet::new(),
            sickbay: sickbay_end,
            pulse: pulse.clone(),
            diagnosis: Diagnosis::default(),
            started: Instant::now(),
            hears: true,
            failing: Recurring::default(),
            unheard: Recurring::default(),
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
            sickbay,
            pulse,
        })
    }

    /// What is wrong with the GPUs, and where to tell about it.
    pub fn sickbay(&self) -> Sickbay {
        self.sickbay.clone()
    }

    /// Whether the thread goes on.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
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
    config: watch::Receiver<Arc<Config>>,
    pub(super) checks: HealthChecks,
    pub(super) timing: Timing,
    pub(super) table: Table,
    pub(super) xids: XidCounts,
    publish: watch::Sender<Arc<Hardware>>,
    pub(super) pause: Pause,
    pub(super) book: Book,
    known: Option<Arc<Machine>>,
    /// What any NVML counts each GPU as, as far as that is certain: a GPU that is lost keeps its place in `known` and has no index here.
    indices: BTreeMap<GpuUuid, u8>,
    warned: Vec<String>,
    /// Capability nodes of the MIG devices last found.
    caps: BTreeMap<InstanceAt, [u32; 2]>,
    /// See [`Hardware::cut_unknown`].
    cut_unknown: BTreeSet<u8>,
    sickbay: SickbayEnd,
    pulse: Pulse,
    diagnosis: Diagnosis,
    started: Instant,
    /// Whether the last wait for events succeeded. An NVML that answers and cannot be waited for fails all the same.
    hears: bool,
    /// That nothing can be asked, and that a wait for events failed: both may come again every few seconds for ever.
    failing: Recurring,
    pub(super) unheard: Recurring,
    /// How often NVML is to be loaded anew still, should it not count the GPUs that the kernel has.
    pub(super) reloads: u8,
    /// The kernel's name for this boot; empty if it does not tell.
    boot_id: String,
}

/// How long after the start faults of an earlier run are expected.
const ADOPTION: Duration = Duration::from_secs(5);
/// How long the owner waits at a time while it expects them.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// Failures of NVML in a row, other than a driver gone, before GPUs count as unhealthy: one may be chance.
const PATIENCE: u32 = 3;

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
        // Of a GPU that could not be asked how it is cut, the nodes are those known before.
        if found.mig_unread.is_empty() {
            self.caps.clear();
        }
        self.caps.extend(&found.caps);
        let (vitals, mig_unread) = (found.vitals.clone(), found.mig_unread.clone());
        let indices: BTreeMap<GpuUuid, u8> = found
            .machine
            .gpus()
            .iter()
            .filter_map(|gpu| Some((gpu.uuid.clone()?, gpu.index)))
            .collect();
        // One that does not answer is counted still by an NVML that is loaded already, and may not be by one that is loaded now, which
        // counts those behind it anew.
        let first_lost = found.unreachable.iter().map(|(index, _)| *index).min();
        let reloaded = self.book.works(self.hears);
        let merged = merge(self.known.as_deref(), found, reloaded)?;
        self.cut_unknown.clear();
        for (at, gpu) in merged.machine.gpus().iter().enumerate() {
            let Some(uuid) = &gpu.uuid else { continue };
            if let Some(loss) = merged.missing.get(uuid) {
                self.book.lost(uuid, loss.clone());
                continue;
            }
            self.book.answers(uuid);
            let index = indices.get(uuid);
            if let Some(vitals) = index.and_then(|index| vitals.get(index)) {
                self.book.vitals(uuid, *vitals, &self.checks);
            }
            if index.is_some_and(|index| !mig_unread.contains(index)) {
                self.book.cut(uuid, gpu.mig.as_ref());
            } else if index.is_some() && gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
                self.cut_unknown.insert(gpu.index);
            }
            self.book.links(uuid, links_up(&merged.machine, at));
        }
        // GPUs with faults that are no longer listed: when they are again, they have been reset.
        let unlisted: Vec<GpuUuid> = self.book.faulty().cloned().collect();
        let listed = |uuid: &GpuUuid| {
            merged
                .machine
                .gpus()
                .iter()
                .any(|gpu| gpu.uuid.as_ref() == Some(uuid))
        };
        for uuid in unlisted.iter().filter(|uuid| !listed(uuid)) {
            let reason = "GPU lost: NVML no longer lists it".to_owned();
            self.book.lost(
                uuid,
                Loss {
                    reason,
                    off_bus: true,
                },
            );
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
        self.indices = indices;
        self.indices
            .retain(|_, index| first_lost.is_none_or(|lost| *index < lost));
        self.publish();
        Ok(())
    }

    /// How long to wait for an event: shortly at first, while faults of an earlier run may still be on their way.
    pub(super) fn wait(&self) -> Duration {
        let expects = !self.diagnosis.adopted && self.started.elapsed() < ADOPTION;
        if expects {
            self.timing.wait.min(SHORT_WAIT)
        } else {
            self.timing.wait
        }
    }

    /// Takes in how the last wait for events went.
    pub(super) fn heard(&mut self, well: bool) {
        if well && !self.hears {
            self.book.works(true);
            self.publish();
        }
        self.hears = well;
    }

    /// NVML was read and waited for, and neither failed: the next failure is news.
    pub(super) fn works(&mut self) {
        self.failing.over();
        self.unheard.over();
    }

    /// Takes in what one GPU says of its state, between two readings.
    pub(super) fn vitals(&mut self, gpu: &GpuUuid, vitals: Vitals) {
        self.book.vitals(gpu, vitals, &self.checks);
    }

    /// The GPU at this place of the machine last read.
    pub(super) fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        let machine = self.known.as_ref()?;
        machine.gpus().iter().find(|gpu| gpu.uuid.as_ref() == Some(uuid))
    }

    /// Version of the driver, as last read.
    pub(super) fn driver(&self) -> Option<String> {
        self.known.as_ref()?.host().driver.clone()
    }

    /// Does what others asked for since the last time.
    pub(super) fn obey(&mut self) {
        if self.pulse.beat() {
            tracing::info!("NVML answers again");
            self.publish();
        }
        let (mut adopted, mut lifts) = (false, 0);
        while let Ok(order) = self.sickbay.orders.try_recv() {
            match order {
                Order::Adopt(faults) => {
                    self.book.adopt(faults, &self.boot_id, &self.table, &self.checks);
                    adopted = true;
                }
                Order::Lift(lift) => {
                    self.book.lift(|gpu| lift.means(gpu));
                    lifts += 1;
                }
            }
        }
        if adopted || lifts > 0 {
            self.publish();
            // Who waits for it finds the hardware as it is now.
            self.diagnosis.adopted |= adopted;
            self.diagnosis.lifts += lifts;
            self.tell();
        }
    }

    /// Pauses while there is no NVML, and does what others ask for meanwhile: the node's account waits for the faults of an earlier run,
    /// and a person for a quarantine's end, whether there is a driver or not. True: go on; false: stop.
    fn rest(&mut self, time: Duration) -> bool {
        let start = Instant::now();
        loop {
            self.obey();
            let left = time.saturating_sub(start.elapsed());
            if !self.pause.go_on_after(left.min(self.wait())) {
                return false;
            }
            if start.elapsed() >= time {
                return true;
            }
        }
    }

    /// Takes in a failure: nothing can be asked now.
    pub(super) fn failed(&mut self, failure: &DiscoverError, failures: u32) {
        if self.failing.tells(&failure.to_string(), Instant::now()) {
            tracing::warn!(failures, "{failure}");
        }
        let kind = match () {
            () if failure.is_driver_gone() => OutageKind::DriverGone,
            () if failure.is_library_missing() => OutageKind::LibraryMissing,
            () => OutageKind::Failing,
        };
        if failure.is_gone() {
            self.book.outage(Outage {
                reason: format!("driver gone: {failure}"),
                kind,
            });
        } else if failures >= PATIENCE {
            self.book.outage(Outage {
                reason: format!("NVML fails: {failure}"),
                kind,
            });
        }
        if self.known.is_some() {
            self.publish();
        } else {
            self.send(Hardware::absent(failure.to_string()));
        }
    }

    /// Publishes what is known, if it differs from what was published last.
    pub(super) fn publish(&mut self) {
        let Some(machine) = &self.known else {
            return;
        };
        let machine = Arc::clone(machine);
        let caps = |gpu_minor, gpu_instance, compute_instance| {
            let at = InstanceAt {
                gpu_minor,
                gpu_instance,
                compute_instance,
            };
            self.caps.get(&at).copied()
        };
        let health = |gpu: &GpuUuid, part: Part| self.book.health(gpu, part);
        let index = |gpu: &Gpu| self.indices.get(gpu.uuid.as_ref()?).copied();
        let units = hardware::units(&machine, index, health, caps);
        // What is wrong comes first: who acts on a unit's health then knows the fault, and can store it.
        self.tell();
        self.send(Hardware {
            cut_unknown: self.cut_unknown.clone(),
            ..Hardware::ready(machine, units)
        });
    }

    /// Publishes what is wrong, if it differs from what was published last.
    fn tell(&mut self) {
        for ended in self.book.ended() {
            tracing::info!(gpu = %ended.gpu, "no longer: {}; {}", ended.reason, ended.proof);
            let number = self.diagnosis.ended.last().map_or(1, |(number, _)| number + 1);
            self.diagnosis.ended.push((number, ended));
        }
        let too_many = self.diagnosis.ended.len().saturating_sub(Diagnosis::MOST_ENDED);
        self.diagnosis.ended.drain(..too_many);
        let machine = self.known.as_deref();
        self.diagnosis.known = machine.is_some();
        self.diagnosis.outage = self.book.outage_now().cloned();
        let gpus = machine.map_or(&[][..], Machine::gpus);
        let uuids = gpus.iter().filter_map(|gpu| gpu.uuid.as_ref());
        self.diagnosis.troubles = self.book.troubles(uuids);
        self.diagnosis.faults = self
            .book
            .faults(&self.boot_id)
            .into_iter()
            .map(StoredFault)
            .collect();
        self.sickbay.diagnosis.send_if_modified(|current| {
            let changed = **current != self.diagnosis;
            if changed {
                *current = Arc::new(self.diagnosis.clone());
            }
            changed
        });
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

/// NVLinks of the GPU at place `at` that are up.
fn links_up(machine: &Machine, at: usize) -> u8 {
    let direct = machine
        .nvlinks()
        .iter()
        .filter(|bundle| bundle.gpus.iter().any(|end| usize::from(*end) == at))
        .map(|bundle| bundle.links);
    let switched = machine.gpus().get(at).and_then(|gpu| gpu.nvlink);
    direct.fold(switched.map_or(0, |ports| ports.switch_links), u8::saturating_add)
}

/// The kernel's name for this boot; empty where it tells none.
fn boot_id(proc_root: &Path) -> String {
    let id = std::fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"));
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
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
