//! One session with a loaded NVML: read, publish, wait for events, check, read again. Ends on shutdown or when
//! NVML fails as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gantry_api::FaultEvidence;
use gantry_topology::GpuUuid;
use jiff::Timestamp;

use super::diagnosis::Probe;
use super::layout;
use super::nvml_state::NvmlState;
use crate::discover::{self, DiscoverError, DiscoveredMachine, MigLayout};
use crate::health::{Class, Extent, Fault, Vitals};
use crate::nvml::{Code, Event, EventKind, EventSet, Nvml, NvmlError};

/// Why a session ended.
pub(super) enum SessionEnd {
    /// The thread is to stop.
    Stop,
    /// NVML must be loaded again: it misses GPUs that the kernel has, or is to be closed for a while.
    Reload,
    /// NVML fails as a whole.
    Failed(DiscoverError),
}

/// Why the wait for events ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchEnd {
    Stop,
    /// The interval is over, or links may have changed: read the machine again.
    Read,
    /// Reachability or MIG layout changed, or waiting failed as it does for a lost GPU: register again, and
    /// read again.
    Register,
    /// The kernel has other GPUs than NVML, or NVML is to be closed for a while: load NVML again.
    Reload,
}

/// Further loads of NVML after the set of GPUs in the kernel changed.
const MAX_RELOADS: u8 = 3;

/// Events handled between two checks.
const MAX_DRAINED: u32 = 512;

/// A loaded NVML in use.
pub(super) struct Session<'nvml> {
    pub(super) nvml: &'nvml Nvml,
}

/// The event registrations of GPUs.
#[derive(Default)]
struct Registrations<'nvml> {
    /// `None` if no Xid is watched, or no GPU supports events.
    events: Option<EventSet<'nvml>>,
    /// Indices that are registered or do not support events.
    settled: BTreeSet<u32>,
    /// Indices with a failed registration of a present GPU, with the error.
    failed: BTreeMap<u32, NvmlError>,
}

/// Data of the last reading, for cheap detection of changes.
struct LastReading {
    /// By index, which identifies a GPU while NVML stays loaded. Includes GPUs that became unreachable, because
    /// their events may still arrive.
    gpus: BTreeMap<u32, GpuUuid>,
    unreachable: BTreeSet<u32>,
    count: u32,
    driver: Option<String>,
    /// MIG layout of each GPU; `None` if it could not be read.
    mig_layouts: BTreeMap<u32, Option<MigLayout>>,
    /// Whether each NVLink is up, of GPUs with links.
    links: BTreeMap<u32, Vec<bool>>,
}

impl<'nvml> Session<'nvml> {
    /// Runs until the end of the session. Sets `failures` to 0 once a reading and a wait for events succeeded.
    pub(super) fn run(&self, state: &mut NvmlState, failures: &mut u32) -> SessionEnd {
        match self.run_until_end(state, failures) {
            Ok(end) => end,
            Err(error) => SessionEnd::Failed(error),
        }
    }

    fn run_until_end(&self, state: &mut NvmlState, failures: &mut u32) -> Result<SessionEnd, DiscoverError> {
        let bound = discover::bound(&state.options);
        // Registered before reading, here and below, so that an Xid in between is not missed.
        let mut registrations = self.register_all(state)?;
        // Faults of an earlier run that are already known are part of the first snapshot.
        state.apply_commands();
        let mut last = Self::read(self.nvml, state, None)?;
        let mut failed_waits = 0;
        let mut failed_reads = 0;
        loop {
            let pause = match failed_reads {
                0 => state.timing.read,
                failures => state.timing.pause(failures),
            };
            let watched = self.watch(state, &mut registrations, &last, &bound, &mut failed_waits, pause);
            if failed_waits == 0 {
                *failures = 0;
                if failed_reads == 0 && watched.is_ok() {
                    state.record_success();
                }
            }
            let watch_end = match watched? {
                WatchEnd::Stop => return Ok(SessionEnd::Stop),
                WatchEnd::Reload => {
                    // Events not handled yet would be lost with this NVML.
                    if let Some(events) = &registrations.events {
                        self.drain(state, &last, events);
                    }
                    return Ok(SessionEnd::Reload);
                }
                watch_end => watch_end,
            };
            // A failed reading is repeated; events are received meanwhile.
            match self.read_again(state, &mut registrations, &mut last, watch_end) {
                Ok(()) => failed_reads = 0,
                Err(error) if error.is_gone() => return Err(error),
                Err(error) => {
                    failed_reads += 1;
                    state.record_failure(&error, failed_reads);
                }
            }
        }
    }

    fn read_again(
        &self,
        state: &mut NvmlState,
        registrations: &mut Registrations<'nvml>,
        last: &mut LastReading,
        watch_end: WatchEnd,
    ) -> Result<(), DiscoverError> {
        if watch_end == WatchEnd::Register {
            let old = std::mem::replace(registrations, self.register_all(state)?);
            // Events that the old set received and that are not handled yet. An Xid received by both sets is
            // counted twice, which is harmless.
            if let Some(old) = old.events {
                self.drain(state, last, &old);
            }
        } else {
            self.register_new(state, registrations)?;
        }
        *last = Self::read(self.nvml, state, Some(last))?;
        Ok(())
    }

    /// Handles the events that are already available.
    fn drain(&self, state: &mut NvmlState, last: &LastReading, events: &EventSet<'_>) {
        for _ in 0..MAX_DRAINED {
            let Ok(Some(event)) = events.wait(Duration::ZERO) else {
                return;
            };
            self.handle_event(state, last, event);
            state.apply_commands();
        }
    }

    fn read(
        nvml: &Nvml,
        state: &mut NvmlState,
        before: Option<&LastReading>,
    ) -> Result<LastReading, DiscoverError> {
        // Read before the machine: a MIG layout that changes in between is detected at the next check.
        let mig_layouts = mig_layouts(nvml, nvml.device_count()?);
        state.read_fabric_mode();
        let found = discover::read(nvml, &state.options)?;
        let last = LastReading::of(&found, mig_layouts, before);
        state.record_reading(found)?;
        Ok(last)
    }

    fn register_all(&self, state: &mut NvmlState) -> Result<Registrations<'nvml>, NvmlError> {
        let mut registrations = Registrations::default();
        if !state.checks.is_off() {
            registrations.events = Some(self.nvml.event_set()?);
            self.register_new(state, &mut registrations)?;
        }
        Ok(registrations)
    }

    /// Registers every GPU that is not registered yet.
    fn register_new(
        &self,
        state: &mut NvmlState,
        registrations: &mut Registrations<'nvml>,
    ) -> Result<(), NvmlError> {
        registrations.failed.clear();
        let Some(events) = &mut registrations.events else {
            return Ok(());
        };
        for index in 0..self.nvml.device_count()? {
            if registrations.settled.contains(&index) {
                continue;
            }
            match self.nvml.device(index).and_then(|device| events.register(device)) {
                Ok(()) => {
                    registrations.settled.insert(index);
                    state.registration_logs.remove(&index);
                }
                Err(error) if error.is_driver_gone() => return Err(error),
                // Retried as well; the reading reports the loss.
                Err(error) if error.is_gpu_lost() => {
                    tracing::debug!(gpu = index, "cannot register for NVML events: {error}");
                }
                Err(error) if error.is_unsupported() => {
                    tracing::warn!(
                        gpu = index,
                        "this GPU does not support NVML events; its Xid errors will not be detected: {error}"
                    );
                    registrations.settled.insert(index);
                }
                // Retried at the next check.
                Err(error) => {
                    let log = state.registration_logs.entry(index).or_default();
                    if log.should_log(&error.to_string(), Instant::now()) {
                        tracing::warn!(
                            gpu = index,
                            "cannot register for NVML events; Xid errors of this GPU will not be detected: {error}"
                        );
                    }
                    registrations.failed.insert(index, error);
                }
            }
        }
        Ok(())
    }

    /// Waits for events and checks periodically until an action is needed, at most for `pause`. `failed_waits`:
    /// consecutive failures of waiting. The second failure is attributed to NVML, unless it is due to a lost
    /// GPU: each GPU may be lost just after its registration.
    fn watch(
        &self,
        state: &mut NvmlState,
        registrations: &mut Registrations<'nvml>,
        last: &LastReading,
        bound: &BTreeSet<String>,
        failed_waits: &mut u32,
        pause: Duration,
    ) -> Result<WatchEnd, NvmlError> {
        let start = Instant::now();
        let mut checked = start;
        loop {
            let waiting = Instant::now();
            let event = match &registrations.events {
                Some(events) if !events.is_empty() => {
                    let waited = events.wait(state.wait());
                    state.record_wait(waited.is_ok());
                    match waited {
                        Err(error)
                            if !error.is_driver_gone() && *failed_waits < max_failed_waits(&error, last) =>
                        {
                            if state.wait_log.should_log(&error.to_string(), Instant::now()) {
                                tracing::warn!("waiting for NVML events failed, registering again: {error}");
                            }
                            *failed_waits += 1;
                            return Ok(WatchEnd::Register);
                        }
                        event => event?,
                    }
                }
                _ => None,
            };
            *failed_waits = 0;
            state.apply_commands();
            if state.is_to_close() {
                return Ok(WatchEnd::Reload);
            }
            if self.change_layout(state) {
                return Ok(WatchEnd::Register);
            }
            let rest = match event {
                Some(event) if self.handle_event(state, last, event) => {
                    // One reading for all available events: link Xids arrive by the hundred and must not delay
                    // those of another GPU.
                    if let Some(events) = &registrations.events {
                        self.drain(state, last, events);
                    }
                    return Ok(WatchEnd::Read);
                }
                Some(_) => Duration::ZERO,
                // Sleeps the whole time without registrations, and avoids a busy loop if NVML returns early.
                None => state.wait().saturating_sub(waiting.elapsed()),
            };
            if !state.pause.sleep(rest) {
                return Ok(WatchEnd::Stop);
            }
            if start.elapsed() >= pause {
                return Ok(WatchEnd::Read);
            }
            if checked.elapsed() >= state.timing.check {
                checked = Instant::now();
                if self.misses_gpus(state, last, bound) {
                    return Ok(WatchEnd::Reload);
                }
                let registered = self.register_missing(state, registrations, last);
                match registered.and_then(|()| self.has_changed(state, last)) {
                    Ok(false) => {}
                    Ok(true) => return Ok(WatchEnd::Register),
                    Err(error) if error.is_driver_gone() => return Err(error),
                    // The reading will report the problem.
                    Err(_) => return Ok(WatchEnd::Read),
                }
            }
        }
    }

    /// Serves a requested MIG layout. True: some GPU was changed. Its minor number and its registration may have changed too.
    fn change_layout(&self, state: &mut NvmlState) -> bool {
        let Some(request) = state.layout_request.take() else {
            return false;
        };
        let (outcomes, is_changed) = layout::carry_out(self.nvml, &request);
        if is_changed {
            state.layout_reply = Some((request.reply, outcomes));
        } else {
            // The task that asked may have ended.
            let _ = request.reply.send(outcomes);
        }
        is_changed
    }

    /// Registers the GPUs that could not be registered before. A GPU that cannot be registered must not be
    /// allocated, because its Xids would be missed.
    fn register_missing(
        &self,
        state: &mut NvmlState,
        registrations: &mut Registrations<'nvml>,
        last: &LastReading,
    ) -> Result<(), NvmlError> {
        self.register_new(state, registrations)?;
        for (index, uuid) in &last.gpus {
            if !last.unreachable.contains(index) {
                let failed = registrations.failed.get(index);
                let failure = failed.map(|error| format!("cannot register for its Xid events: {error}"));
                state.record_probe(uuid, Probe::EventRegistration, failure);
            }
        }
        Ok(())
    }

    /// Whether the kernel has GPUs that NVML, which counts them at initialisation, does not list. A driver may
    /// need a moment to add a GPU, so a change is worth a few loads.
    fn misses_gpus(&self, state: &mut NvmlState, last: &LastReading, bound: &BTreeSet<String>) -> bool {
        let now = discover::bound(&state.options);
        if now != *bound {
            tracing::info!(
                before = bound.len(),
                now = now.len(),
                "the set of GPUs in the kernel changed, loading NVML again"
            );
            state.reloads = MAX_RELOADS;
            return true;
        }
        if now.len() <= last.count as usize {
            state.reloads = 0;
            return false;
        }
        let reload = state.reloads > 0;
        state.reloads = state.reloads.saturating_sub(1);
        reload
    }

    /// Whether GPUs, reachability, NVLinks, MIG layouts or the driver changed since the last reading. Also updates the
    /// state of each GPU.
    fn has_changed(&self, state: &mut NvmlState, last: &LastReading) -> Result<bool, NvmlError> {
        if self.nvml.device_count()? != last.count {
            return Ok(true);
        }
        match self.nvml.driver_version() {
            Err(error) if error.is_driver_gone() => return Err(error),
            Ok(driver) if last.driver.is_some() && last.driver.as_ref() != Some(&driver) => return Ok(true),
            _ => {}
        }
        for index in 0..last.count {
            if last.unreachable.contains(&index) {
                if !self.is_out_of_reach(state, index)? {
                    return Ok(true);
                }
                continue;
            }
            let failure = match self.nvml.device(index).and_then(|device| device.memory()) {
                Err(error) if error.is_driver_gone() => return Err(error),
                Err(error) if error.is_gpu_lost() => return Ok(true),
                answer => answer.err().filter(is_unresponsive),
            };
            if let Some(uuid) = last.gpus.get(&index) {
                let failure = failure.map(|error| error.of_gpu());
                state.record_probe(uuid, Probe::Query, failure);
                self.update_vitals(state, index, uuid)?;
                // A GPU without clocks, such as a virtual one, is not compared with others.
                if let Ok(sample) =
                    self.nvml.device(index).and_then(|device| device.telemetry().clock_sample())
                {
                    state.clocks.record(uuid, sample);
                }
            }
        }
        state.publish();
        // Links may go down without an Xid, and sets are chosen by them.
        let has_changed = |(index, states): (&u32, &Vec<bool>)| {
            let now = discover::link_states(self.nvml, *index, states.len());
            now.is_some_and(|now| now != *states)
        };
        if last.links.iter().any(has_changed) {
            return Ok(true);
        }
        let now = mig_layouts(self.nvml, last.count);
        // Compared only if readable: a failed call is not a change.
        Ok(now.iter().any(|(index, layout)| layout.is_some() && last.mig_layouts.get(index) != Some(layout)))
    }

    /// Whether a GPU that could not be read last time is still unreachable: another reading would give nothing
    /// new.
    fn is_out_of_reach(&self, state: &NvmlState, index: u32) -> Result<bool, NvmlError> {
        match discover::reach(self.nvml, &state.options, index) {
            Err(error) if error.is_driver_gone() => Err(error),
            answer => Ok(answer.is_err()),
        }
    }

    /// Updates the state of the GPU at NVML index `index`. A lost GPU is detected elsewhere.
    fn update_vitals(&self, state: &mut NvmlState, index: u32, uuid: &GpuUuid) -> Result<(), NvmlError> {
        if let Some(vitals) = self.vitals(state, index, uuid)? {
            state.record_vitals(uuid, vitals);
        }
        Ok(())
    }

    /// State of a GPU; `None` if it cannot be read.
    fn vitals(&self, state: &NvmlState, index: u32, uuid: &GpuUuid) -> Result<Option<Vitals>, NvmlError> {
        let Some(gpu) = state.gpu(uuid) else {
            return Ok(None);
        };
        match discover::vitals(self.nvml, &state.options, index, gpu) {
            Ok(vitals) => Ok(Some(vitals)),
            Err(error) if error.is_driver_gone() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Handles an event. True: the machine must be read again.
    fn handle_event(&self, state: &mut NvmlState, last: &LastReading, event: Event) -> bool {
        let EventKind::Xid(xid) = event.kind else {
            return true;
        };
        let known = event.gpu.and_then(|index| Some((index, last.gpus.get(&index)?)));
        let Some((index, uuid)) = known else {
            tracing::warn!(xid, "received an Xid of an unknown GPU");
            return true;
        };
        let class = state.table.class(xid);
        let judged = state.checks.judge(xid, class);
        let extent = extent(state, uuid, xid, event);
        let reason = match extent {
            Extent::Gpu => state.table.describe(xid),
            Extent::GpuInstance(gi) => format!("{} (GPU instance {gi})", state.table.describe(xid)),
            Extent::ComputeInstance(gi, ci) => {
                format!("{} (GPU instance {gi}, compute instance {ci})", state.table.describe(xid))
            }
        };
        let count = state.xids.count(uuid, xid);
        state.evidence.record_xid(uuid, (xid, judged), Timestamp::now());
        let fault = |class| {
            let mig = state.gpu(uuid).and_then(|gpu| gpu.mig.as_ref());
            Fault {
                extent,
                xid,
                class,
                reason: reason.clone(),
                since: Timestamp::now(),
                mig_device: extent.mig_device(mig),
                driver: state.driver(),
                evidence: FaultEvidence::default(),
            }
        };
        let mut fault = match judged {
            Some(Class::Link { reset: false }) => {
                let fault = fault(Class::Link { reset: true });
                // A driver that reports recovery actions will report one if a reset is needed; the links show
                // the rest.
                if state.tracker.reports_recovery_action(uuid) {
                    state.tracker.record_suspect(uuid, fault);
                    None
                } else {
                    Some(fault)
                }
            }
            judged => judged.filter(|class| class.is_unhealthy()).map(fault),
        };
        let mut is_new = false;
        if let Some(fault) = &fault {
            is_new = state.tracker.record_fault(uuid, fault.clone());
            state.publish();
        }
        // One broken application raises thousands of Xids: the first of each kind is logged, the others are
        // counted. Logged after publishing, so that kubelet does not wait for the log.
        if count == 1 {
            tracing::warn!(gpu = index, uuid = %uuid, %class, watched = judged.is_some(), "{reason}");
        }
        // Further calls are made after publishing, here and below, so that no Xid waits for them. A driver that
        // is gone is detected at the next wait.
        let recut =
            fault.as_mut().is_some_and(|fault| self.update_instance(state, last, (index, uuid), fault));
        if state.table.has_state(xid) || fault.is_some() {
            match self.vitals(state, index, uuid) {
                Err(_) => return false,
                Ok(None) => {}
                Ok(Some(vitals)) => {
                    if is_new {
                        state.tracker.set_initial_evidence(uuid, extent, &vitals);
                    }
                    state.record_vitals(uuid, vitals);
                }
            }
            // These vitals may prove a reset that ended an older equal fault, but not this one.
            if let Some(fault) = fault {
                state.tracker.record_fault(uuid, fault);
            }
            state.publish();
        }
        recut || judged.is_some_and(Class::touches_links)
    }

    /// Updates `fault` if its MIG instance was replaced since the last reading: it belongs to the current
    /// instance with that id, so the next reading does not clear it. True: the MIG layout changed.
    fn update_instance(
        &self,
        state: &mut NvmlState,
        last: &LastReading,
        (index, uuid): (u32, &GpuUuid),
        fault: &mut Fault,
    ) -> bool {
        let Some((gpu_instance, compute_instance)) = fault.extent.instance() else {
            return false;
        };
        let Some(layout) = discover::mig_layout(self.nvml, index) else {
            return false;
        };
        if last.mig_layouts.get(&index).and_then(Option::as_ref) == Some(&layout) {
            return false;
        }
        if let Some(device) = layout.device(gpu_instance, compute_instance) {
            fault.mig_device = Some(device.to_string());
            state.tracker.set_mig_device(uuid, fault.extent, device.as_str());
        }
        true
    }
}

/// Whether a GPU that fails like this may be unresponsive. "Unsupported" and "no permission" are answers: with
/// MIG on, reading the memory size needs permissions.
fn is_unresponsive(error: &NvmlError) -> bool {
    let refusals = [Code::NoPermission, Code::InvalidArgument];
    !error.is_unsupported() && !error.code().is_some_and(|code| refusals.contains(&code))
}

/// Consecutive failures of waiting after which GPUs are registered again.
fn max_failed_waits(error: &NvmlError, last: &LastReading) -> u32 {
    if error.is_gpu_lost() { last.count.max(1) } else { 1 }
}

/// The part of the GPU that an event affects: the named MIG instance, if this Xid is confined to it.
fn extent(state: &NvmlState, uuid: &GpuUuid, xid: u64, event: Event) -> Extent {
    let gpu = state.gpu(uuid);
    let has_mig = gpu.and_then(|gpu| gpu.mig.as_ref()).is_some_and(|mig| mig.enabled);
    match (event.gpu_instance, event.compute_instance) {
        (Some(gi), ci) if has_mig && state.table.is_contained(xid) => match ci {
            Some(ci) if !state.table.is_shared(xid) => Extent::ComputeInstance(gi, ci),
            _ => Extent::GpuInstance(gi),
        },
        _ => Extent::Gpu,
    }
}

/// The MIG layout of each GPU.
fn mig_layouts(nvml: &Nvml, count: u32) -> BTreeMap<u32, Option<MigLayout>> {
    (0..count).map(|index| (index, discover::mig_layout(nvml, index))).collect()
}

impl LastReading {
    fn of(
        found: &DiscoveredMachine,
        mig_layouts: BTreeMap<u32, Option<MigLayout>>,
        before: Option<&Self>,
    ) -> Self {
        let gpus = found.machine.gpus().iter();
        let mut gpus: BTreeMap<u32, GpuUuid> =
            gpus.filter_map(|gpu| Some((u32::from(gpu.index), gpu.uuid.clone()?))).collect();
        let unreachable: BTreeSet<u32> =
            found.unreachable.iter().map(|(index, _)| u32::from(*index)).collect();
        for index in &unreachable {
            if let Some(gpu) = before.and_then(|before| before.gpus.get(index)) {
                gpus.entry(*index).or_insert_with(|| gpu.clone());
            }
        }
        Self {
            gpus,
            unreachable,
            count: u32::try_from(found.machine.gpus().len()).unwrap_or(u32::MAX),
            driver: found.machine.host().driver.clone(),
            mig_layouts,
            links: found.links.iter().map(|(index, states)| (u32::from(*index), states.clone())).collect(),
        }
    }
}
