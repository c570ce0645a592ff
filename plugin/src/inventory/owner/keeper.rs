//! What the thread that owns NVML keeps between one reading and the next, and what it publishes of that. Takes in what was read or has
//! failed; asks NVML nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_topology::{Gpu, GpuUuid, Machine};
use tokio::sync::watch;

use super::{Pause, Timing};
use crate::discover::{DiscoverError, Fact, Found, InstanceAt, NvmlOptions};
use crate::health::{
    Book, Cause, Extent, GpuName, HealthChecks, Loss, Outage, OutageKind, Part, Table, Trouble, Vitals,
    XidCounts,
};
use crate::inventory::diagnosis::{DiagnosesEnd, Order};
use crate::inventory::doubts::{Doubts, Duty};
use crate::inventory::heartbeat::Heartbeat;
use crate::inventory::merge::merge;
use crate::inventory::{Diagnosis, Hardware, State, StoredFault, hardware};
use crate::nvml::NvmlError;
use crate::recurring::Recurring;
use gantry_config::Config;

/// What the thread keeps between one reading and the next.
pub(in crate::inventory) struct Keeper {
    pub(in crate::inventory) options: NvmlOptions,
    pub(super) config: watch::Receiver<Arc<Config>>,
    pub(in crate::inventory) checks: HealthChecks,
    pub(in crate::inventory) timing: Timing,
    pub(in crate::inventory) table: Table,
    pub(in crate::inventory) xids: XidCounts,
    pub(super) publish: watch::Sender<Arc<Hardware>>,
    pub(in crate::inventory) pause: Pause,
    pub(in crate::inventory) book: Book,
    pub(super) known: Option<Arc<Machine>>,
    /// What any NVML counts each GPU as, as far as that is certain: a GPU that is lost keeps its place in `known` and has no index here.
    pub(super) indices: BTreeMap<GpuUuid, u8>,
    /// GPUs that were out of reach from the start, by their place in the machine, each with the reason.
    pub(super) nameless: BTreeMap<u8, String>,
    pub(super) warned: Vec<String>,
    /// Capability nodes of the MIG devices last found.
    pub(super) caps: BTreeMap<InstanceAt, [u32; 2]>,
    /// See [`Hardware::cut_unknown`].
    pub(super) cut_unknown: BTreeSet<u8>,
    pub(super) diagnoses: DiagnosesEnd,
    pub(super) heartbeat: Heartbeat,
    pub(super) diagnosis: Diagnosis,
    pub(super) started: Instant,
    /// Whether the last wait for events succeeded. An NVML that answers and cannot be waited for fails all the same.
    pub(super) hears: bool,
    /// That nothing can be asked, and that a wait for events failed: both may come again every few seconds for ever.
    pub(super) failing: Recurring,
    pub(in crate::inventory) unheard: Recurring,
    /// That a GPU cannot be listened to, by its index.
    pub(in crate::inventory) deaf: BTreeMap<u32, Recurring>,
    /// GPUs that are listed and may be of no use.
    pub(super) doubts: Doubts,
    /// How often NVML is to be loaded anew still, should it not count the GPUs that the kernel has.
    pub(in crate::inventory) reloads: u8,
    /// The kernel's name for this boot; empty if it does not tell.
    pub(super) boot_id: String,
}

/// How long after the start faults of an earlier run are expected.
const ADOPTION: Duration = Duration::from_secs(5);
/// How long the owner waits at a time while it expects them.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// Failures of NVML in a row, other than a driver gone, before GPUs count as unhealthy: one may be chance.
const PATIENCE: u32 = 3;

impl Keeper {
    /// Takes in what was read, and publishes it.
    pub(in crate::inventory) fn found(&mut self, found: Found) -> Result<(), DiscoverError> {
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
        let links_unread: BTreeSet<u8> = found.are_unread(Fact::Links).collect();
        let indices: BTreeMap<GpuUuid, u8> = found
            .machine
            .gpus()
            .iter()
            .filter_map(|gpu| Some((gpu.uuid.clone()?, gpu.index)))
            .collect();
        // One that does not answer is counted still by an NVML that is loaded already, and may not be by one that is loaded now, which
        // counts those behind it anew.
        let first_lost = found.unreachable.iter().map(|(index, _)| *index).min();
        // One of those may be a GPU that is listed no more, where nobody says that it fell off the bus.
        let off_bus = found.unreachable.iter().all(|(_, error)| error.is_gpu_lost());
        // Of a GPU that is gone the links that were known are kept; they are up at neither end.
        let up = links_by_gpu(&found.machine);
        let reloaded = self.book.works(self.hears);
        if reloaded {
            self.doubts.forget_all();
        }
        let unreachable = found.unreachable.clone();
        let merged = merge(self.known.as_deref(), found, reloaded)?;
        self.nameless = nameless(&merged.machine, &unreachable);
        self.cut_unknown.clear();
        for gpu in merged.machine.gpus() {
            let Some(uuid) = &gpu.uuid else { continue };
            if let Some(loss) = merged.missing.get(uuid) {
                self.book.lost(uuid, loss.clone());
                self.doubts.forget(uuid);
                continue;
            }
            self.book.answers(uuid);
            // A reading reaches it; what looks have shown stands until they show another thing.
            if let Some(loss) = self.doubts.loss(uuid) {
                self.book.lost(uuid, loss);
            }
            let index = indices.get(uuid);
            if let Some(vitals) = index.and_then(|index| vitals.get(index)) {
                self.book.vitals(uuid, *vitals, &self.checks);
            }
            if index.is_some_and(|index| !mig_unread.contains(index)) {
                self.book.cut(uuid, gpu.mig.as_ref());
            } else if index.is_some() && gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
                self.cut_unknown.insert(gpu.index);
            }
            // A link that could not be asked for has not gone down.
            if index.is_none_or(|index| !links_unread.contains(index)) {
                self.book.links(uuid, up.get(uuid).copied().unwrap_or(0));
            }
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
            self.book.lost(uuid, Loss { reason, off_bus });
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
    pub(in crate::inventory) fn wait(&self) -> Duration {
        let expects = !self.diagnosis.adopted && self.started.elapsed() < ADOPTION;
        if expects {
            self.timing.wait.min(SHORT_WAIT)
        } else {
            self.timing.wait
        }
    }

    /// Takes in how the last wait for events went.
    pub(in crate::inventory) fn heard(&mut self, well: bool) {
        if well && !self.hears {
            self.book.works(true);
            self.publish();
        }
        self.hears = well;
    }

    /// NVML was read and waited for, and neither failed: the next failure is news.
    pub(in crate::inventory) fn works(&mut self) {
        self.failing.over();
        self.unheard.over();
    }

    /// Takes in what one GPU says of its state, between two readings.
    pub(in crate::inventory) fn vitals(&mut self, gpu: &GpuUuid, vitals: Vitals) {
        self.book.vitals(gpu, vitals, &self.checks);
    }

    /// Takes in whether a GPU that can be reached does its duty at this look.
    pub(in crate::inventory) fn look(&mut self, gpu: &GpuUuid, duty: Duty, failure: Option<String>) {
        let was_lost = self.doubts.loss(gpu).is_some();
        self.doubts.look(gpu, duty, failure);
        match self.doubts.loss(gpu) {
            Some(loss) if !was_lost => self.book.lost(gpu, loss),
            None if was_lost => self.book.answers(gpu),
            _ => {}
        }
    }

    /// The GPU at this place of the machine last read.
    pub(in crate::inventory) fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        let machine = self.known.as_ref()?;
        machine.gpus().iter().find(|gpu| gpu.uuid.as_ref() == Some(uuid))
    }

    /// Version of the driver, as last read.
    pub(in crate::inventory) fn driver(&self) -> Option<String> {
        self.known.as_ref()?.host().driver.clone()
    }

    /// Does what others asked for since the last time.
    pub(in crate::inventory) fn obey(&mut self) {
        if self.heartbeat.beat() {
            tracing::info!("NVML answers again");
            self.publish();
        }
        let (mut adopted, mut lifts) = (false, 0);
        while let Ok(order) = self.diagnoses.orders.try_recv() {
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
    pub(super) fn rest(&mut self, time: Duration) -> bool {
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
    pub(in crate::inventory) fn failed(&mut self, failure: &DiscoverError, failures: u32) {
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
            self.tell();
            self.send(Hardware::absent(failure));
        }
    }

    /// Publishes what is known, if it differs from what was published last.
    pub(in crate::inventory) fn publish(&mut self) {
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
        // What an Xid said of a GPU still holds where it is no longer listed, or does not say who it is.
        let unlisted = self
            .book
            .faulty()
            .filter(|uuid| !gpus.iter().any(|gpu| gpu.uuid.as_ref() == Some(*uuid)));
        self.diagnosis.troubles = self.book.troubles(uuids.chain(unlisted));
        let nameless = self.nameless.iter().map(|(index, reason)| Trouble {
            gpu: GpuName::Place(*index),
            extent: Extent::Gpu,
            cause: Cause::Lost,
            reason: reason.clone(),
        });
        self.diagnosis.troubles.extend(nameless);
        self.diagnosis.faults = self
            .book
            .faults(&self.boot_id)
            .into_iter()
            .map(StoredFault)
            .collect();
        self.diagnoses.diagnosis.send_if_modified(|current| {
            let changed = **current != self.diagnosis;
            if changed {
                *current = Arc::new(self.diagnosis.clone());
            }
            changed
        });
    }

    fn send(&self, hardware: Hardware) {
        let mut before = None;
        let hardware = Arc::new(hardware);
        self.publish.send_if_modified(|current| {
            let changed = *current != hardware;
            if changed {
                before = Some(std::mem::replace(current, Arc::clone(&hardware)));
            }
            changed
        });
        // Kubelet is told first: each line is a call of the system's.
        if let Some(before) = before {
            log_changes(&before, &hardware);
        }
    }
}

/// The GPUs of the machine that have told no UUID, each with why.
fn nameless(machine: &Machine, unreachable: &[(u8, NvmlError)]) -> BTreeMap<u8, String> {
    let gpus = machine.gpus().iter().filter(|gpu| gpu.uuid.is_none());
    gpus.map(|gpu| {
        let error = unreachable.iter().find(|(index, _)| *index == gpu.index);
        let reason = error.map_or("NVML no longer lists it".to_owned(), |(_, error)| {
            error.to_string()
        });
        (gpu.index, format!("GPU lost: {reason}"))
    })
    .collect()
}

/// NVLinks of each GPU that are up.
fn links_by_gpu(machine: &Machine) -> BTreeMap<GpuUuid, u8> {
    let gpus = machine.gpus().iter().enumerate();
    gpus.filter_map(|(at, gpu)| Some((gpu.uuid.clone()?, links_up(machine, at))))
        .collect()
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
