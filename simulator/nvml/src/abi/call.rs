//! The common part of every NVML call: it is counted, obeys the control state, and needs a session with a loaded
//! driver.

use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper_sys::bindings::{nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t};

use gantry_topology::{ComputeInstance, GpuInstance, Mig};

use super::args::Status;
use super::handle::{Device, HandleTarget, InstanceHandle};
use crate::control::{AppliedLayout, ControlError, GpuState, MigChange, Process, ReportedFacts, Rule, State};
use crate::facts::{Facts, GpuFacts, Remote};
use crate::library::{Library, Session};

/// One call within a session.
pub(crate) struct Call {
    /// The slot of its function.
    slot: usize,
    pub(crate) library: &'static Library,
    pub(crate) session: Arc<Session>,
    pub(crate) state: Arc<State>,
}

/// One GPU that a call is about: not lost.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) facts: &'a GpuFacts,
    state: Option<&'a GpuState>,
    mig: Option<&'a Mig>,
}

/// What a device handle of a call stands for.
#[derive(Clone, Copy)]
pub(crate) enum Subject<'a> {
    /// A whole GPU.
    Gpu(Target<'a>),
    /// A MIG device.
    Mig(MigTarget<'a>),
}

/// A MIG device that a call is about: it exists, and its GPU is not lost.
#[derive(Clone, Copy)]
pub(crate) struct MigTarget<'a> {
    pub(crate) gpu: Target<'a>,
    pub(crate) instance: &'a GpuInstance,
    pub(crate) compute: &'a ComputeInstance,
}

pub(crate) fn run(slot: usize, body: impl FnOnce(&Call) -> Result<(), Status>) -> nvmlReturn_t {
    code(admit(slot).and_then(|(library, state)| {
        let session = library.session().ok_or(Status::UNINITIALIZED)?;
        if session.cut_off(&state) {
            return Err(Status::DRIVER_NOT_LOADED);
        }
        body(&Call { slot, library, session, state })
    }))
}

/// Runs `body` as a call that needs no session.
pub(crate) fn run_outside(
    slot: usize,
    body: impl FnOnce(&'static Library, &State) -> Result<(), Status>,
) -> nvmlReturn_t {
    code(admit(slot).and_then(|(library, state)| body(library, &state)))
}

/// The whole of a function that is not simulated.
pub(crate) fn not_simulated(slot: usize) -> nvmlReturn_t {
    run(slot, |_| Err(Status::NOT_SUPPORTED))
}

/// Counts the call and applies the rule for its function, if one holds.
fn admit(slot: usize) -> Result<(&'static Library, Arc<State>), Status> {
    let library = Library::this();
    let earlier = library.block.count_call(slot);
    let state = library.state();
    let name = name_of(slot);
    if let Some(rule) = state.calls.get(name).filter(|rule| rule.holds_for(earlier)) {
        apply(rule)?;
        if rule.hang {
            hang(library, |state| state.calls.get(name));
            return Ok((library, library.state()));
        }
    }
    Ok((library, state))
}

fn name_of(slot: usize) -> &'static str {
    crate::names::NAMES.get(slot).copied().unwrap_or_default()
}

/// Applies a rule, except for a hang.
fn apply(rule: &Rule) -> Result<(), Status> {
    if rule.slow_ms > 0 {
        std::thread::sleep(Duration::from_millis(rule.slow_ms));
    }
    rule.fail.map_or(Ok(()), |code| Err(Status(code)))
}

/// Returns once the rule no longer asks for a hang.
fn hang<'a>(library: &Library, rule: impl Fn(&State) -> Option<&Rule> + 'a) {
    loop {
        // Read before looking, so that a change between the look and the sleep ends the sleep at once.
        let seen = library.block.changes();
        if !rule(&library.state()).is_some_and(|rule| rule.hang) {
            return;
        }
        library.block.wait_for_change(seen, Duration::from_secs(1));
    }
}

fn code(result: Result<(), Status>) -> nvmlReturn_t {
    match result {
        Ok(()) => SUCCESS,
        Err(Status(code)) => code,
    }
}

impl Call {
    pub(crate) fn facts(&self) -> &Facts {
        &self.session.facts
    }

    /// The whole GPU behind a handle. A MIG device is not supported where only a GPU has what is asked for.
    pub(crate) fn gpu(&self, device: Device) -> Result<Target<'_>, Status> {
        match self.subject(device)? {
            Subject::Gpu(gpu) => Ok(gpu),
            Subject::Mig(_) => Err(Status::NOT_SUPPORTED),
        }
    }

    /// The MIG device behind a handle. A whole GPU is an invalid argument.
    pub(crate) fn mig(&self, device: Device) -> Result<MigTarget<'_>, Status> {
        match self.subject(device)? {
            Subject::Gpu(_) => Err(Status::INVALID_ARGUMENT),
            Subject::Mig(mig) => Ok(mig),
        }
    }

    /// Applies the rule for this function on one GPU, if there is one.
    pub(crate) fn obey(&self, index: usize) -> Result<(), Status> {
        let (name, key) = (name_of(self.slot), u8::try_from(index).unwrap_or(u8::MAX));
        let Some(rule) = self.state.gpus.get(&key).and_then(|gpu| gpu.calls.get(name)) else {
            return Ok(());
        };
        if rule.hang {
            hang(self.library, |state| state.gpus.get(&key)?.calls.get(name));
        }
        apply(rule)
    }

    /// The GPU or MIG device behind a handle.
    pub(crate) fn subject(&self, device: Device) -> Result<Subject<'_>, Status> {
        let here = |index| {
            self.obey(index)?;
            self.gpu_at(index).ok_or(Status::INVALID_ARGUMENT)?
        };
        match device.named().ok_or(Status::INVALID_ARGUMENT)? {
            HandleTarget::Whole(index) => here(index).map(Subject::Gpu),
            HandleTarget::Mig(place) => here(place.gpu)?
                .mig_devices()
                .find(|mig| mig.place() == place)
                .map(Subject::Mig)
                .ok_or(Status::INVALID_ARGUMENT),
        }
    }

    /// Changes the MIG layout of a GPU; every process sees it from its next call on.
    pub(crate) fn change_mig(&self, gpu: Target<'_>, change: &MigChange) -> Result<AppliedLayout, Status> {
        let changed = self.library.update(|state| {
            let changed = state.change_mig(gpu.facts, change);
            changed.map_err(|source| ControlError::Mig { gpu: gpu.key(), source })
        });
        changed.map_err(|error| match error {
            ControlError::Mig { source, .. } => Status::of_refusal(&source),
            // The folder cannot be written: only its owner may change the machine.
            ControlError::Open { .. } | ControlError::Write { .. } => Status::NO_PERMISSION,
            _ => Status::UNKNOWN,
        })
    }

    /// The GPU of an index of the machine file: `None` if there is none, an error if it is lost.
    pub(crate) fn gpu_at(&self, index: usize) -> Option<Result<Target<'_>, Status>> {
        let facts = self.facts().gpus.get(index)?;
        let state = u8::try_from(index).ok().and_then(|index| self.state.gpus.get(&index));
        if !self.session.present.contains(&index) {
            return None;
        }
        if state.is_some_and(GpuState::unreachable) {
            return Some(Err(Status::GPU_IS_LOST));
        }
        Some(Ok(Target { facts, state, mig: self.state.layout(facts) }))
    }

    /// Whether an NVLink is up: joined, not taken down at either end, the peer on the bus.
    pub(crate) fn link_up(&self, gpu: usize, link: u8) -> bool {
        let down = |gpu: usize, link: u8| {
            u8::try_from(gpu)
                .ok()
                .and_then(|gpu| self.state.gpus.get(&gpu))
                .is_some_and(|state| state.links_down.contains(&link) || state.unreachable())
        };
        let remote = self.facts().gpus.get(gpu).and_then(|gpu| gpu.links.get(usize::from(link)));
        match remote {
            None => false,
            Some(Remote::Switch { .. }) => !down(gpu, link),
            Some(Remote::Gpu { index, link: back }) => !down(gpu, link) && !down(*index, *back),
        }
    }
}

impl<'a> Target<'a> {
    /// What is out of the ordinary on the GPU, if anything.
    pub(crate) fn unusual(self) -> Option<&'a GpuState> {
        self.state
    }

    /// A fact that the control state sets in place of the machine file's.
    pub(crate) fn reported<T>(self, fact: impl FnOnce(&'a ReportedFacts) -> Option<T>) -> Option<T> {
        self.state.and_then(|state| fact(&state.reported))
    }

    /// The MIG layout of the GPU; `None` if it never had one.
    pub(crate) fn layout(self) -> Option<&'a Mig> {
        self.mig
    }

    /// Whether MIG mode is on.
    pub(crate) fn mig_enabled(self) -> bool {
        self.mig.is_some_and(|mig| mig.enabled)
    }

    /// Whether MIG mode is on after the next reset.
    pub(crate) fn mig_enabled_after_reset(self) -> bool {
        self.state.and_then(|state| state.mig_mode_pending).unwrap_or_else(|| self.mig_enabled())
    }

    /// The GPU instances, by id.
    pub(crate) fn gpu_instances(self) -> Vec<&'a GpuInstance> {
        let mut instances: Vec<&GpuInstance> =
            self.mig.filter(|mig| mig.enabled).map_or(&[][..], |mig| &mig.instances).iter().collect();
        instances.sort_by_key(|instance| instance.id);
        instances
    }

    /// The MIG devices, in the order of their indices: by GPU instance, then compute instance.
    pub(crate) fn mig_devices(self) -> impl Iterator<Item = MigTarget<'a>> {
        let instances = self.gpu_instances().into_iter();
        instances.flat_map(move |instance| {
            instance.compute.iter().map(move |compute| MigTarget { gpu: self, instance, compute })
        })
    }

    /// The index as the control state counts it.
    pub(crate) fn key(self) -> u8 {
        u8::try_from(self.facts.index).unwrap_or(u8::MAX)
    }
}

impl<'a> Subject<'a> {
    /// The compute processes on the GPU, whatever instance they are in, or those in the MIG device.
    pub(crate) fn processes(self) -> impl Iterator<Item = &'a Process> {
        let (gpu, within) = match self {
            Self::Gpu(gpu) => (gpu, None),
            Self::Mig(mig) => (mig.gpu, Some((mig.instance.id, mig.compute.id))),
        };
        let all = gpu.state.map_or(&[][..], |state| &state.processes).iter();
        all.filter(move |process| within.is_none_or(|(instance, compute)| process.is_in(instance, compute)))
    }
}

impl MigTarget<'_> {
    /// What handles of the device and of its compute instance hold.
    pub(crate) fn place(self) -> InstanceHandle {
        InstanceHandle {
            gpu: self.gpu.facts.index,
            gpu_instance: self.instance.id,
            compute_instance: self.compute.id,
            digest: digest(self.compute.uuid.as_str()),
        }
    }
}

/// Distinguishes one content of a slot from another.
pub(crate) fn digest(text: &str) -> u32 {
    let bits = crate::facts::fnv(text, 0) & ((1 << super::handle::DIGEST_BITS) - 1);
    u32::try_from(bits).unwrap_or(0)
}
