//! What can be changed while a simulated library runs: the content of `control.yaml`. Values only; [`super::Controller`] writes
//! them and the library reads them.

use std::collections::{BTreeMap, BTreeSet};

use gantry_topology::Mig;
use serde::{Deserialize, Serialize};

use super::mig::{AppliedLayout, MigChange, MigRefusal, apply};
use crate::facts::GpuFacts;

/// The most events kept; a listener that lags further behind loses the oldest, as with the real driver's ring.
pub const MAX_EVENTS: usize = 4096;

/// Everything that may change at run time. The default is a machine on which nothing has happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct State {
    /// The kernel driver.
    pub driver: Driver,
    /// What is out of the ordinary on a GPU, by index.
    pub gpus: BTreeMap<u8, GpuState>,
    /// Calls that fail or are slow, by function name.
    pub calls: BTreeMap<String, Rule>,
    /// Events raised, oldest first.
    pub events: Vec<Event>,
    /// Number of the next event: one more than any event ever raised.
    pub next_event: u64,
}

impl State {
    /// The MIG layout of `gpu`; `None` if it never had one.
    pub fn layout<'a>(&'a self, gpu: &'a GpuFacts) -> Option<&'a Mig> {
        let index = u8::try_from(gpu.index).ok()?;
        let changed = self.gpus.get(&index).and_then(|state| state.mig.as_ref());
        changed.or(gpu.mig.as_ref())
    }

    /// The layouts that differ from the machine file's, by GPU.
    pub(crate) fn layouts(&self) -> Vec<(u8, &Mig)> {
        let gpus = self.gpus.iter();
        gpus.filter_map(|(index, gpu)| Some((*index, gpu.mig.as_ref()?))).collect()
    }

    /// Adds an event to those raised.
    pub(crate) fn raise(&mut self, gpu: u8, kind: EventKind, data: u64, instance: Option<(u32, u32)>) {
        self.events.push(Event {
            number: self.next_event,
            gpu,
            kind,
            data,
            gpu_instance: instance.map(|(gpu_instance, _)| gpu_instance),
            compute_instance: instance.map(|(_, compute_instance)| compute_instance),
        });
        self.next_event += 1;
        let surplus = self.events.len().saturating_sub(MAX_EVENTS);
        self.events.drain(..surplus);
    }

    /// Changes the MIG layout of `gpu`, and raises the event for it.
    ///
    /// # Errors
    /// The GPU cannot be changed in this way.
    pub(crate) fn change_mig(
        &mut self,
        gpu: &GpuFacts,
        change: &MigChange,
    ) -> Result<AppliedLayout, MigRefusal> {
        let index = u8::try_from(gpu.index).unwrap_or(u8::MAX);
        let now = self.layout(gpu).is_some_and(|mig| mig.enabled);
        if let MigChange::Mode(wanted) = change
            && let Some(state) = self.gpus.get_mut(&index).filter(|state| state.mig_mode_needs_reset)
        {
            state.mig_mode_pending = (*wanted != now).then_some(*wanted);
            let mig = state.mig.clone().or_else(|| gpu.mig.clone()).unwrap_or_default();
            return Ok(AppliedLayout { mig, made: None });
        }
        let processes = self.gpus.get(&index).map_or(&[][..], |state| &state.processes);
        in_the_way(processes, change)?;
        let mut applied = apply(gpu, self.layout(gpu), change)?;
        let changed = self.gpus.entry(index).or_default();
        if *change == MigChange::Reset
            && let Some(mode) = changed.mig_mode_pending.take()
        {
            applied.mig.enabled = mode;
        }
        changed.mig = Some(applied.mig.clone());
        changed.processes.retain(|process| has_place(process, &applied.mig));
        self.raise(index, EventKind::MigConfig, 0, None);
        Ok(applied)
    }
}

/// Refuses a change that the driver does not make under running processes. A change of the layout by the controller
/// ignores them.
fn in_the_way(processes: &[Process], change: &MigChange) -> Result<(), MigRefusal> {
    match change {
        MigChange::Mode(_) if !processes.is_empty() => Err(MigRefusal::InUse("the GPU".to_owned())),
        MigChange::DestroyCompute { gpu_instance, id }
            if processes.iter().any(|process| process.is_in(*gpu_instance, *id)) =>
        {
            Err(MigRefusal::InUse(format!("compute instance {id}")))
        }
        _ => Ok(()),
    }
}

/// Whether the instance a process runs in is still there.
fn has_place(process: &Process, mig: &Mig) -> bool {
    let Some(gpu_instance) = process.gpu_instance else {
        return true;
    };
    let mut instances = mig.instances.iter();
    instances.any(|instance| {
        let mut compute = instance.compute.iter();
        instance.id == gpu_instance && compute.any(|compute| process.is_in(gpu_instance, compute.id))
    })
}

/// The kernel driver: there or gone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Driver {
    /// Whether the driver is gone: no call succeeds and none can initialise.
    pub gone: bool,
    /// How often it has gone. A client that initialised before stays cut off until it shuts down and initialises again.
    pub departures: u64,
    /// The number of GPUs that NVML reports, true or not; that of the machine if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// The driver's version that NVML reports; the machine file's if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// What is out of the ordinary on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct GpuState {
    /// Fallen off the bus: every call on it answers GPU_IS_LOST.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Removed from the machine: later sessions do not see it and have lower indices for the GPUs after it; for earlier
    /// sessions it is lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub removed: bool,
    /// What NVML recommends to do about the GPU.
    #[serde(skip_serializing_if = "is_default")]
    pub recovery: Recovery,
    /// The MIG layout; the machine file's if absent. Only ever written whole, by [`super::Controller::recut`] and
    /// by clients that make or destroy instances.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Whether a change of the MIG mode waits for a reset of the GPU, as on an Ampere board that another client uses.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mig_mode_needs_reset: bool,
    /// The MIG mode after the next reset, if it is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_mode_pending: Option<bool>,
    /// GPU temperature in degrees Celsius; 35 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<u32>,
    /// Share of time the GPU computes, in percent; 0 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// Clock of the multiprocessors in MHz; the product's highest if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_clock: Option<u32>,
    /// PCIe transfers that were repeated.
    #[serde(skip_serializing_if = "is_default")]
    pub pcie_replays: u32,
    /// What the whole GPU does in detail.
    #[serde(skip_serializing_if = "is_default")]
    pub activity: Activity,
    /// What its GPU instances do, by id.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub instance_activity: BTreeMap<u32, Activity>,
    /// NVLinks that are down, by number. A direct link is down for both of its ends.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub links_down: BTreeSet<u8>,
    /// Error counts of NVLinks, by number: each kind of counter shows this.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub link_errors: BTreeMap<u8, u64>,
    /// Compute processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// ECC error counts.
    #[serde(skip_serializing_if = "is_default")]
    pub ecc: Ecc,
    /// Rows remapped (Ampere and later).
    #[serde(skip_serializing_if = "is_default")]
    pub remapped: RowRemapping,
    /// Pages retired (before Ampere).
    #[serde(skip_serializing_if = "is_default")]
    pub retired: PageRetirement,
    /// Calls on this GPU that fail, hang or are slow, by function name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, Rule>,
    /// Registration with the NVLink fabric; what the machine file implies if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricState>,
    /// Which processes may compute on the GPU.
    #[serde(skip_serializing_if = "is_default")]
    pub compute_mode: ComputeMode,
    /// Facts that NVML reports instead of the machine file's.
    #[serde(skip_serializing_if = "is_default")]
    pub reported: ReportedFacts,
}

/// What a GPU or GPU instance does: shares in percent, traffic in MiB/s. What is absent follows from the utilization of the GPU,
/// and moves a little; without one it is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Activity {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_active: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_occupancy: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_active: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dram_active: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_sent: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_received: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_sent: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_received: Option<u32>,
    /// Load of the video encoder and decoder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder: Option<u32>,
}

/// Registration of a GPU with the NVLink fabric, as `nvmlGpuFabricInfo` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FabricState {
    pub state: FabricStep,
    /// The `nvmlReturn_t` of the registration, once completed.
    #[serde(default)]
    pub status: u32,
    /// NVML's health mask; without a fault if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_mask: Option<u32>,
    /// NVML's health summary; healthy if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<u8>,
}

/// A step of the registration (`NVML_GPU_FABRIC_STATE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FabricStep {
    NotSupported,
    NotStarted,
    InProgress,
    Completed,
}

/// Which processes may compute on a GPU (`nvmlComputeMode_t`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ComputeMode {
    /// Any number.
    #[default]
    Default,
    /// None.
    Prohibited,
    /// One.
    ExclusiveProcess,
}

/// Facts that NVML reports of a GPU instead of the machine file's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ReportedFacts {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Total memory in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

impl GpuState {
    /// Whether calls on the GPU answer that it is lost.
    pub(crate) fn unreachable(&self) -> bool {
        self.lost || self.removed
    }
}

/// What NVML recommends to do about a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Recovery {
    /// Nothing.
    #[default]
    None,
    GpuReset,
    NodeReboot,
    /// No more traffic between GPUs, then a reset.
    DrainP2p,
    /// No new work, then a reset once the present work is done.
    DrainAndReset,
}

/// One compute process on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// GPU memory it uses, in MiB.
    #[serde(default)]
    pub memory_mib: u64,
    /// Id of the GPU instance it runs in; on the whole GPU if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Id of the compute instance it runs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

impl Process {
    /// Whether it runs in this compute instance.
    pub(crate) fn is_in(&self, gpu_instance: u32, compute_instance: u32) -> bool {
        self.gpu_instance == Some(gpu_instance) && self.compute_instance == Some(compute_instance)
    }
}

/// ECC error counts. The volatile ones are since the driver's load, the aggregate ones since the board was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Ecc {
    /// Corrected since load.
    pub volatile_corrected: u64,
    /// Uncorrected since load.
    pub volatile_uncorrected: u64,
    /// Corrected ever.
    pub aggregate_corrected: u64,
    /// Uncorrected ever.
    pub aggregate_uncorrected: u64,
}

/// Row remapping.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct RowRemapping {
    /// Rows remapped for corrected errors.
    pub corrected: u32,
    /// Rows remapped for uncorrected errors.
    pub uncorrected: u32,
    /// A remapping waits for a reset.
    pub pending: bool,
    pub failed: bool,
}

/// Page retirement.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PageRetirement {
    /// Addresses retired for many single-bit errors.
    pub single_bit: Vec<u64>,
    /// Addresses retired for a double-bit error.
    pub double_bit: Vec<u64>,
    /// A retirement waits for a reboot.
    pub pending: bool,
}

/// What happens to calls of one function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Rule {
    /// Code to answer with (an `nvmlReturn_t`), instead of doing anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fail: Option<u32>,
    /// Time each call takes before it does or answers anything, in milliseconds.
    #[serde(skip_serializing_if = "is_default")]
    pub slow_ms: u64,
    /// Whether a call does not return until the rule is gone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hang: bool,
    /// First call it holds for, counted as [`super::Calls`] counts: from 0.
    #[serde(skip_serializing_if = "is_default")]
    pub from_call: u64,
    /// First call it no longer holds for; absent: it holds for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_call: Option<u64>,
}

impl Rule {
    /// Whether the rule holds for call number `call` of its function.
    pub fn holds_for(&self, call: u64) -> bool {
        call >= self.from_call && self.until_call.is_none_or(|until| call < until)
    }
}

/// What NVML reports through an event set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Event {
    /// Number of the event; [`super::Controller::raise`] gives it.
    pub number: u64,
    /// Index of the GPU it happens on.
    pub gpu: u8,
    pub kind: EventKind,
    /// What comes with it: the Xid of an Xid event, else usually 0.
    #[serde(default)]
    pub data: u64,
    /// GPU instance it is confined to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Compute instance it is confined to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

/// The events NVML knows (`nvmlEventType*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EventKind {
    /// A corrected ECC error.
    SingleBitEcc,
    /// An uncorrected ECC error.
    DoubleBitEcc,
    /// A change of performance state.
    PState,
    Xid,
    /// A change of clocks.
    Clock,
    /// A change of MIG configuration.
    MigConfig,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
