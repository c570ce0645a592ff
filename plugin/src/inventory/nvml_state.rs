//! State of the NVML thread between readings, and the snapshots published from it. Records readings and
//! failures; makes no NVML call.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use gantry_topology::{Gpu, GpuUuid, Machine};
use jiff::{SignedDuration, Timestamp};
use tokio::sync::{oneshot, watch};

use crate::discover::{self, DiscoverError, DiscoveredMachine, Fact, InstanceAt, NvmlOptions};
use crate::health::{
    Cause, ClockLog, EvidenceLog, Extent, GpuName, HealthChecks, HealthTracker, Loss, Outage, OutageKind,
    Part, Table, Trouble, Vitals, XidCounts,
};
use crate::inventory::diagnosis::{Command, DiagnosesEnd, Lift};
use crate::inventory::diagnosis::{Probe, ProbeFailures};
use crate::inventory::merge::merge;
use crate::inventory::nvml_thread::Heartbeat;
use crate::inventory::{Diagnosis, Hardware, Settings, StoredFault, hardware};
use crate::inventory::{LayoutOutcomes, LayoutRequest};
use crate::nvml::{CallTrace, NvmlError};
use gantry_config::Config;
use gantry_runtime::LogThrottle;

/// Intervals and time limits of the NVML thread.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Longest single wait for an event; an Xid ends it early. Bounds the time to stop.
    pub wait: Duration,
    /// Interval of checks: GPU count, driver, and one query per GPU.
    pub check: Duration,
    /// Interval of full readings of the machine.
    pub read: Duration,
    /// First pause after a failure; doubled by each further failure.
    pub retry_from: Duration,
    /// Longest pause.
    pub retry_to: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            wait: Duration::from_millis(500),
            check: Duration::from_secs(5),
            read: Duration::from_secs(60),
            retry_from: Duration::from_secs(1),
            retry_to: Duration::from_secs(30),
        }
    }
}

impl Timing {
    /// The pause after `failures` consecutive failures.
    pub(super) fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        (self.retry_from * (1 << doublings)).min(self.retry_to)
    }
}

/// Pauses that end when the thread is to stop.
pub(super) struct Pause(Receiver<()>);

impl Pause {
    /// Sleeps for `time`. True: continue; false: stop.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
    }
}

/// Connections of the NVML thread to the rest of the daemon.
pub(super) struct NvmlChannels {
    pub(super) hardware: watch::Sender<Arc<Hardware>>,
    pub(super) diagnoses: DiagnosesEnd,
    pub(super) heartbeat: Heartbeat,
    /// Closed to stop the thread.
    pub(super) stopped: Receiver<()>,
}

/// State of the NVML thread between readings.
pub(super) struct NvmlState {
    pub(super) options: NvmlOptions,
    pub(super) config: watch::Receiver<Arc<Config>>,
    pub(super) checks: HealthChecks,
    /// The mode of the fabric manager that the operator set.
    fabric_mode: Option<u8>,
    pub(super) timing: Timing,
    pub(super) table: Table,
    pub(super) xids: XidCounts,
    publish: watch::Sender<Arc<Hardware>>,
    pub(super) pause: Pause,
    pub(super) tracker: HealthTracker,
    pub(super) evidence: EvidenceLog,
    pub(super) clocks: ClockLog,
    /// When the clocks were last published.
    clocks_published: Instant,
    /// When the evidence was last published.
    evidence_published: Option<Instant>,
    known: Option<Arc<Machine>>,
    /// Current NVML index of each GPU, if it is certain: a lost GPU keeps its position in `known` and has no
    /// index here.
    indices: BTreeMap<GpuUuid, u8>,
    /// GPUs that were unreachable from the start, by machine index, each with cause and reason.
    nameless: BTreeMap<u8, (Cause, String)>,
    warned: Vec<String>,
    /// Capability nodes of the MIG devices that were found last.
    caps: BTreeMap<InstanceAt, [u32; 2]>,
    /// See [`Hardware::mig_unknown`].
    mig_unknown: BTreeSet<u8>,
    diagnoses: DiagnosesEnd,
    heartbeat: Heartbeat,
    diagnosis: Diagnosis,
    started: Instant,
    /// Whether the last wait for events succeeded. NVML counts as failing while waiting fails, even if queries
    /// succeed.
    events_work: bool,
    /// Throttles of failures that may repeat every few seconds: reading the machine and waiting for events.
    failure_log: LogThrottle,
    pub(super) wait_log: LogThrottle,
    /// Throttles of failed event registrations, by GPU index.
    pub(super) registration_logs: BTreeMap<u32, LogThrottle>,
    /// Probe failures of listed GPUs.
    probe_failures: ProbeFailures,
    /// The MIG layout that is requested and not looked at yet.
    pub(super) layout_request: Option<LayoutRequest>,
    /// Outcomes that are sent after the next reading: what is offered then is what the GPUs have.
    pub(super) layout_reply: Option<(oneshot::Sender<LayoutOutcomes>, LayoutOutcomes)>,
    /// Until when NVML stays closed, on request.
    closed_until: Option<Instant>,
    /// Whether NVML was ever to be opened.
    has_opened: bool,
    /// When NVML was opened after it had been closed on request. A quarantine that is lifted soon afterwards ends by a reset.
    opened_at: Option<Timestamp>,
    /// Remaining loads of NVML while it does not list all GPUs of the kernel.
    pub(super) reloads: u8,
    /// The kernel's boot id; empty if unknown.
    boot_id: String,
}

/// How long after the start faults of an earlier run are expected.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait while they are expected.
const SHORT_WAIT: Duration = Duration::from_millis(10);

/// How long after NVML was opened again a lifted quarantine confirms a reset.
const RESET_CONFIRMATION: SignedDuration = SignedDuration::from_mins(10);

/// The mode in which the fabric manager activates partitions on demand.
const SHARED_FABRIC: u8 = 1;

/// Consecutive failures of NVML, other than a missing driver, after which GPUs count as unhealthy: a single one
/// may be chance.
const MAX_FAILURES: u32 = 3;

impl NvmlState {
    pub(super) fn new(
        settings: &Settings,
        checks: HealthChecks,
        timing: Timing,
        xids: XidCounts,
        channels: NvmlChannels,
    ) -> Self {
        let fabric_mode = settings.fabric_mode;
        Self {
            boot_id: boot_id(&settings.proc_root),
            options: NvmlOptions {
                library: settings.nvml_library.clone(),
                proc_root: settings.proc_root.clone(),
                sys_root: settings.sys_root.clone(),
            },
            config: settings.config.clone(),
            checks: HealthChecks { shared_fabric: fabric_mode == Some(SHARED_FABRIC), ..checks },
            fabric_mode,
            timing,
            table: Table::built_in(),
            xids,
            publish: channels.hardware,
            pause: Pause(channels.stopped),
            tracker: HealthTracker::default(),
            evidence: EvidenceLog::default(),
            clocks: ClockLog::default(),
            clocks_published: Instant::now(),
            evidence_published: None,
            known: None,
            indices: BTreeMap::new(),
            nameless: BTreeMap::new(),
            warned: Vec::new(),
            caps: BTreeMap::new(),
            mig_unknown: BTreeSet::new(),
            diagnoses: channels.diagnoses,
            heartbeat: channels.heartbeat,
            diagnosis: Diagnosis::default(),
            started: Instant::now(),
            events_work: true,
            failure_log: LogThrottle::default(),
            wait_log: LogThrottle::default(),
            registration_logs: BTreeMap::new(),
            probe_failures: ProbeFailures::default(),
            layout_request: None,
            layout_reply: None,
            closed_until: None,
            has_opened: false,
            opened_at: None,
            reloads: 0,
        }
    }

    /// Records a reading, and publishes it.
    pub(super) fn record_reading(&mut self, found: DiscoveredMachine) -> Result<(), DiscoverError> {
        for warning in found.warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            tracing::warn!("{warning}");
        }
        self.warned.clone_from(&found.warnings);
        // A GPU with an unreadable MIG layout keeps its known nodes.
        if found.mig_unread.is_empty() {
            self.caps.clear();
        }
        self.caps.extend(&found.caps);
        let (vitals, mig_unread) = (found.vitals.clone(), found.mig_unread.clone());
        let links_unread: BTreeSet<u8> = found.are_unread(Fact::Links).collect();
        let indices: BTreeMap<GpuUuid, u8> =
            found.machine.gpus().iter().filter_map(|gpu| Some((gpu.uuid.clone()?, gpu.index))).collect();
        // An NVML that is already loaded still counts an unreachable GPU; one loaded now may not, and then
        // numbers the GPUs behind it differently.
        let first_lost = found.unreachable.iter().map(|(index, _)| *index).min();
        // One of these may be a GPU that is no longer listed; only `GpuIsLost` shows that it fell off the bus.
        let off_bus = found.unreachable.iter().all(|(_, error)| error.is_gpu_lost());
        // A missing GPU keeps its known links in the machine, but they count as down at both ends.
        let up = links_by_gpu(&found.machine);
        let peer_links = peer_links(&found);
        let reloaded = self.tracker.record_recovery(self.events_work);
        if reloaded {
            self.probe_failures.clear_all();
        }
        let unreachable = found.unreachable.clone();
        let merged = merge(self.known.as_deref(), found, reloaded)?;
        self.nameless = nameless(&merged.machine, &unreachable);
        self.mig_unknown.clear();
        for gpu in merged.machine.gpus() {
            let Some(uuid) = &gpu.uuid else { continue };
            if let Some(loss) = merged.missing.get(uuid) {
                self.tracker.record_loss(uuid, loss.clone());
                self.probe_failures.clear(uuid);
                continue;
            }
            self.tracker.record_response(uuid);
            // The reading reaches the GPU, but probe failures stand until a probe succeeds.
            if let Some(loss) = self.probe_failures.loss(uuid) {
                self.tracker.record_loss(uuid, loss);
            }
            let index = indices.get(uuid);
            if let Some(vitals) = index.and_then(|index| vitals.get(index)) {
                self.tracker.record_vitals(uuid, *vitals, &self.checks);
                if let Some(rows) = vitals.remapped {
                    self.evidence.record_rows(uuid, rows, Timestamp::now());
                }
            }
            if index.is_some_and(|index| !mig_unread.contains(index)) {
                self.tracker.record_mig_layout(uuid, gpu.mig.as_ref());
            } else if index.is_some() && gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
                self.mig_unknown.insert(gpu.index);
            }
            // A link that could not be read has not gone down.
            if index.is_none_or(|index| !links_unread.contains(index)) {
                self.tracker.record_peer_links(uuid, peer_links.get(uuid).copied());
                self.tracker.record_links(uuid, up.get(uuid).copied().unwrap_or(0));
            }
        }
        // Faulty GPUs that are not listed: if they are listed again later, they have been reset.
        let unlisted: Vec<GpuUuid> = self.tracker.faulty().cloned().collect();
        let listed = |uuid: &GpuUuid| merged.machine.gpus().iter().any(|gpu| gpu.uuid.as_ref() == Some(uuid));
        for uuid in unlisted.iter().filter(|uuid| !listed(uuid)) {
            let reason = "GPU lost: NVML no longer lists it".to_owned();
            self.tracker.record_loss(uuid, Loss { reason, off_bus });
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
        self.heartbeat.mark_read();
        self.diagnosis.nvml_closed = false;
        self.indices = indices;
        self.indices.retain(|_, index| first_lost.is_none_or(|lost| *index < lost));
        self.publish();
        if let Some((reply, outcomes)) = self.layout_reply.take() {
            // The task that asked may have ended.
            let _ = reply.send(outcomes);
        }
        Ok(())
    }

    /// How long to wait for an event: shortly at first, while faults of an earlier run may still arrive.
    pub(super) fn wait(&self) -> Duration {
        let expects = !self.diagnosis.adopted && self.started.elapsed() < ADOPTION_TIMEOUT;
        if expects { self.timing.wait.min(SHORT_WAIT) } else { self.timing.wait }
    }

    /// Records the result of a wait for events.
    pub(super) fn record_wait(&mut self, succeeded: bool) {
        if succeeded && !self.events_work {
            self.tracker.record_recovery(true);
            self.publish();
        }
        self.events_work = succeeded;
    }

    /// Records that a reading and a wait succeeded: the next failure is logged at once.
    pub(super) fn record_success(&mut self) {
        self.failure_log.reset();
        self.wait_log.reset();
    }

    /// Records the state of one GPU, read between two readings of the machine.
    pub(super) fn record_vitals(&mut self, gpu: &GpuUuid, vitals: Vitals) {
        if let Some(rows) = vitals.remapped {
            self.evidence.record_rows(gpu, rows, Timestamp::now());
        }
        self.tracker.record_vitals(gpu, vitals, &self.checks);
    }

    /// Records the result of a probe on a reachable GPU.
    pub(super) fn record_probe(&mut self, gpu: &GpuUuid, probe: Probe, failure: Option<String>) {
        let was_lost = self.probe_failures.loss(gpu).is_some();
        self.probe_failures.record(gpu, probe, failure);
        match self.probe_failures.loss(gpu) {
            Some(loss) if !was_lost => self.tracker.record_loss(gpu, loss),
            None if was_lost => self.tracker.record_response(gpu),
            _ => {}
        }
    }

    /// What records the NVML call under way.
    pub(super) fn trace(&self) -> CallTrace {
        self.heartbeat.trace()
    }

    /// Reads the mode of the fabric manager, unless the operator set it.
    pub(super) fn read_fabric_mode(&mut self) {
        if self.fabric_mode.is_none() {
            let root = self.config.borrow().container_driver_root.clone();
            self.checks.shared_fabric = discover::fabric_mode(&root) == Some(SHARED_FABRIC);
        }
    }

    /// A GPU of the last reading.
    pub(super) fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        let machine = self.known.as_ref()?;
        machine.gpus().iter().find(|gpu| gpu.uuid.as_ref() == Some(uuid))
    }

    /// Version of the driver in the last reading.
    pub(super) fn driver(&self) -> Option<String> {
        self.known.as_ref()?.host().driver.clone()
    }

    /// Applies the commands received since the last call.
    pub(super) fn apply_commands(&mut self) {
        if self.heartbeat.beat() {
            tracing::info!("NVML responds again");
            self.publish();
        }
        let (mut adopted, mut changed, mut lifts) = (false, false, 0);
        while let Ok(command) = self.diagnoses.commands.try_recv() {
            match command {
                Command::Adopt(faults, cordons, evidence) => {
                    self.evidence.adopt(evidence);
                    self.tracker.adopt(faults, &self.boot_id, &self.table, &self.checks);
                    self.tracker.set_cordons(cordons);
                    adopted = true;
                }
                Command::Cordon(cordons) => {
                    self.tracker.set_cordons(cordons);
                    changed = true;
                }
                Command::Close(gpus) => {
                    self.tracker.set_closed(gpus);
                    changed = true;
                }
                Command::Layout(request) => self.layout_request = Some(request),
                Command::KeepClosed(time) => self.closed_until = time.map(|time| Instant::now() + time),
                Command::Lift(lift) => {
                    self.lift(&lift);
                    lifts += 1;
                }
            }
        }
        if adopted || changed || lifts > 0 {
            // At the start a client that waits for the adoption must see whether NVML stays closed.
            self.diagnosis.nvml_closed |= !self.has_opened && self.is_to_close();
            self.publish();
            // Published after the hardware, so that a client that waits for it sees the current hardware.
            self.diagnosis.adopted |= adopted;
            self.diagnosis.lifts += lifts;
            self.publish_diagnosis();
        }
    }

    /// Ends a quarantine, as the operator requested. Soon after NVML was closed and opened, the operator confirms a reset.
    fn lift(&mut self, lift: &Lift) {
        let now = Timestamp::now();
        let opened = self.opened_at.take().filter(|at| now.duration_since(*at) < RESET_CONFIRMATION);
        let Some(opened) = opened else {
            self.tracker.lift(|gpu| lift.includes(gpu));
            return;
        };
        let before: Vec<GpuUuid> = self.tracker.faulty().filter(|gpu| lift.includes(gpu)).cloned().collect();
        self.tracker.lift_after_reset(opened, |gpu| lift.includes(gpu));
        let after: BTreeSet<&GpuUuid> = self.tracker.faulty().collect();
        for gpu in before.iter().filter(|gpu| !after.contains(gpu)) {
            self.evidence.record_reset(gpu, now);
        }
    }

    /// Waits at the start until the state of an earlier run was adopted, at most `time`: NVML may have to stay closed.
    /// True: continue; false: stop.
    pub(super) fn await_adoption(&mut self, time: Duration) -> bool {
        let start = Instant::now();
        loop {
            self.apply_commands();
            if self.diagnosis.adopted || start.elapsed() >= time {
                return true;
            }
            if !self.pause.sleep(self.wait()) {
                return false;
            }
        }
    }

    /// Whether NVML is to be closed.
    pub(super) fn is_to_close(&self) -> bool {
        self.closed_until.is_some_and(|until| Instant::now() < until)
    }

    /// Pauses while NVML is to be closed, which it is now. True: continue; false: stop.
    pub(super) fn stay_closed(&mut self) -> bool {
        if !self.is_to_close() {
            self.has_opened = true;
            return true;
        }
        tracing::info!("NVML is closed, so that a GPU can be reset");
        self.diagnosis.nvml_closed = true;
        self.publish_diagnosis();
        while self.is_to_close() {
            if !self.pause.sleep(self.timing.wait) {
                return false;
            }
            self.apply_commands();
        }
        tracing::info!("NVML is opened again");
        self.has_opened = true;
        self.opened_at = Some(Timestamp::now());
        true
    }

    /// Pauses while NVML is not available and applies commands meanwhile: the GpuNode status waits for the
    /// faults of an earlier run, and the operator for the end of a quarantine, with or without a driver. True:
    /// continue; false: stop.
    pub(super) fn rest(&mut self, time: Duration) -> bool {
        let start = Instant::now();
        loop {
            self.apply_commands();
            let left = time.saturating_sub(start.elapsed());
            if !self.pause.sleep(left.min(self.wait())) {
                return false;
            }
            if start.elapsed() >= time {
                return true;
            }
        }
    }

    /// Records that NVML failed.
    pub(super) fn record_failure(&mut self, failure: &DiscoverError, failures: u32) {
        if self.failure_log.should_log(&failure.to_string(), Instant::now()) {
            tracing::warn!(failures, "{failure}");
        }
        let kind = match () {
            () if failure.is_driver_gone() => OutageKind::DriverGone,
            () if failure.is_library_missing() => OutageKind::LibraryMissing,
            () => OutageKind::Failing,
        };
        if failure.is_gone() {
            self.tracker.record_outage(Outage { reason: format!("driver gone: {failure}"), kind });
        } else if failures >= MAX_FAILURES {
            self.tracker.record_outage(Outage { reason: format!("NVML fails: {failure}"), kind });
        }
        // Until then the GPUs were not read since NVML was closed.
        if self.tracker.outage().is_some() {
            self.diagnosis.nvml_closed = false;
        }
        if self.known.is_some() {
            self.publish();
        } else {
            self.publish_diagnosis();
            self.publish_hardware(Hardware::absent(failure));
        }
    }

    /// Publishes the hardware, if it changed.
    pub(super) fn publish(&mut self) {
        let Some(machine) = &self.known else {
            return;
        };
        let machine = Arc::clone(machine);
        let caps = |gpu_minor, gpu_instance, compute_instance| {
            let at = InstanceAt { gpu_minor, gpu_instance, compute_instance };
            self.caps.get(&at).copied()
        };
        let health = |gpu: &GpuUuid, part: Part| self.tracker.health(gpu, part);
        let index = |gpu: &Gpu| self.indices.get(gpu.uuid.as_ref()?).copied();
        let exclusive = |gpu: &GpuUuid| self.tracker.is_exclusive(gpu);
        let units = hardware::units(&machine, index, health, exclusive, caps);
        // The diagnosis is published first: a subscriber that acts on a unit's health can then read and store
        // the fault.
        self.publish_diagnosis();
        self.publish_hardware(Hardware {
            mig_unknown: self.mig_unknown.clone(),
            ..Hardware::ready(machine, units)
        });
    }

    /// Publishes the diagnosis, if it changed.
    fn publish_diagnosis(&mut self) {
        let mut reset = BTreeSet::new();
        for ended in self.tracker.take_ended() {
            // One reset may end several faults.
            if ended.proof.is_reset() && reset.insert(ended.gpu.clone()) {
                self.evidence.record_reset(&ended.gpu, Timestamp::now());
            }
            tracing::info!(gpu = %ended.gpu, "fault cleared: {}; {}", ended.reason, ended.proof);
            let number = self.diagnosis.ended.last().map_or(1, |(number, _)| number + 1);
            self.diagnosis.ended.push((number, ended));
        }
        let too_many = self.diagnosis.ended.len().saturating_sub(Diagnosis::MAX_ENDED);
        self.diagnosis.ended.drain(..too_many);
        let machine = self.known.as_deref();
        self.diagnosis.known = machine.is_some();
        let is_due = |published: Instant| published.elapsed() >= self.timing.read;
        if self.evidence.is_urgent() || self.evidence_published.is_none_or(is_due) {
            self.diagnosis.evidence = self.evidence.entries(machine);
            self.evidence_published = Some(Instant::now());
        }
        if is_due(self.clocks_published) {
            self.clocks.renew();
            self.diagnosis.clocks = self.clocks.entries();
            self.clocks_published = Instant::now();
        }
        self.diagnosis.outage = self.tracker.outage().cloned();
        let gpus = machine.map_or(&[][..], Machine::gpus);
        let uuids = gpus.iter().filter_map(|gpu| gpu.uuid.as_ref());
        // Faults also hold for GPUs that are not listed or have no readable UUID.
        let unlisted =
            self.tracker.faulty().filter(|uuid| !gpus.iter().any(|gpu| gpu.uuid.as_ref() == Some(*uuid)));
        self.diagnosis.troubles = self.tracker.troubles(uuids.chain(unlisted));
        let nameless = self.nameless.iter().map(|(index, (cause, reason))| Trouble {
            gpu: GpuName::Index(*index),
            extent: Extent::Gpu,
            cause: *cause,
            xid: None,
            reason: reason.clone(),
        });
        self.diagnosis.troubles.extend(nameless);
        self.diagnosis.notices = self.tracker.notices(gpus.iter().filter_map(|gpu| gpu.uuid.as_ref()));
        self.diagnosis.cordoned = self.tracker.cordoned(gpus.iter().filter_map(|gpu| gpu.uuid.as_ref()));
        self.diagnosis.faults = self.tracker.faults(&self.boot_id).into_iter().map(StoredFault).collect();
        self.diagnoses.diagnosis.send_if_modified(|current| {
            let changed = **current != self.diagnosis;
            if changed {
                *current = Arc::new(self.diagnosis.clone());
            }
            changed
        });
    }

    fn publish_hardware(&self, hardware: Hardware) {
        self.publish.send_if_modified(|current| {
            let changed = **current != hardware;
            if changed {
                *current = Arc::new(hardware);
            }
            changed
        });
    }
}

/// The GPUs of the machine without a UUID, each with the reason.
fn nameless(machine: &Machine, unreachable: &[(u8, NvmlError)]) -> BTreeMap<u8, (Cause, String)> {
    let gpus = machine.gpus().iter().filter(|gpu| gpu.uuid.is_none());
    gpus.map(|gpu| {
        let error = unreachable.iter().find(|(index, _)| *index == gpu.index);
        let unlisted = || (Cause::Lost, "GPU lost: NVML no longer lists it".to_owned());
        let of = |error: &NvmlError| {
            let cause = if error.is_gpu_lost() { Cause::Lost } else { Cause::QueryFailed };
            (cause, error.of_gpu())
        };
        (gpu.index, error.map_or_else(unlisted, |(_, error)| of(error)))
    })
    .collect()
}

/// Active NVLinks of each GPU.
fn links_by_gpu(machine: &Machine) -> BTreeMap<GpuUuid, u8> {
    let gpus = machine.gpus().iter().enumerate();
    gpus.filter_map(|(at, gpu)| {
        Some((gpu.uuid.clone()?, u8::try_from(machine.nvlinks_of(at)).unwrap_or(u8::MAX)))
    })
    .collect()
}

/// The NVLinks that each GPU should have up, whatever its own past is.
fn peer_links(found: &DiscoveredMachine) -> BTreeMap<GpuUuid, u8> {
    let gpus = found.machine.gpus();
    let expected = found.expected_links().into_iter();
    expected.filter_map(|(at, links)| Some((gpus.get(at)?.uuid.clone()?, links))).collect()
}

/// The kernel's boot id; empty if unknown.
fn boot_id(proc_root: &Path) -> String {
    let id = std::fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"));
    id.map(|id| id.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use gantry_api::FaultEvidence;

    use super::*;
    use crate::health::{Class, Fault};
    use crate::inventory::Diagnoses;

    /// State without NVML. Returns what keeps it from stopping, too.
    fn state() -> (NvmlState, Diagnoses, Sender<()>) {
        let settings = Settings {
            nvml_library: "/nowhere".into(),
            config: watch::channel(Arc::<Config>::default()).1,
            proc_root: "/nowhere".into(),
            sys_root: "/nowhere".into(),
            dev_root: "/nowhere".into(),
            fabric_mode: Some(0),
        };
        let (stop, stopped) = channel();
        let (diagnoses, end) = Diagnoses::pair();
        let channels = NvmlChannels {
            hardware: watch::channel(Arc::new(Hardware::absent("not read"))).0,
            diagnoses: end,
            heartbeat: Heartbeat::new(),
            stopped,
        };
        let timing = Timing { wait: Duration::from_millis(1), ..Timing::default() };
        let state =
            NvmlState::new(&settings, HealthChecks::default(), timing, XidCounts::default(), channels);
        (state, diagnoses, stop)
    }

    /// Has NVML closed on request and opened again.
    fn close(state: &mut NvmlState) {
        state.closed_until = Some(Instant::now() + Duration::from_millis(5));
        assert!(state.stay_closed());
    }

    fn fault(since: Timestamp) -> Fault {
        Fault {
            extent: Extent::Gpu,
            xid: 95,
            class: Class::Resettable,
            reason: "Xid 95".to_owned(),
            since,
            mig_device: None,
            driver: None,
            evidence: FaultEvidence::default(),
        }
    }

    /// Of two GPUs that were reset, one fails again. A second annotation is the operator's own decision.
    #[test]
    fn lift_after_reopened_nvml_confirms_a_reset_once() {
        let (mut state, diagnoses, _stop) = state();
        let gpus: Vec<GpuUuid> = ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap()).into();
        for gpu in &gpus {
            state.tracker.record_fault(gpu, fault(Timestamp::UNIX_EPOCH));
        }
        close(&mut state);
        state.tracker.record_fault(&gpus[1], fault(Timestamp::now()));
        for (faulty, resets) in [(1, 1), (0, 1)] {
            diagnoses.lift(Lift::All);
            state.apply_commands();
            let now = diagnoses.now();
            assert_eq!(now.faults.len(), faulty);
            let counted = now.evidence.iter().filter_map(|entry| Some(entry.resets.as_ref()?.count));
            assert_eq!(counted.sum::<u64>(), resets);
        }
    }

    /// A single failure after the reset says nothing about the GPUs: a client waits for a reading or an outage.
    #[test]
    fn nvml_stays_closed_until_read_or_failed_for_good() {
        let (mut state, diagnoses, _stop) = state();
        close(&mut state);
        let failure = DiscoverError::Nvml(NvmlError::Missing { call: "nvmlInit_v2" });
        for (failures, closed) in [(1, true), (2, true), (MAX_FAILURES, false)] {
            state.record_failure(&failure, failures);
            assert_eq!(diagnoses.now().nvml_closed, closed, "{failures}");
        }
    }
}
