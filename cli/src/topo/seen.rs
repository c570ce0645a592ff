//! A machine with the faults of its GPUs, as far as the source reports them.

use std::collections::BTreeSet;

use gantry_api::{DeviceStatus, GpuNode};
use gantry_topology::Machine;
use gantry_topology::bandwidth::guessed;
use gantry_topology::mig::{Catalogue, check_machine};
use serde::Serialize;

/// The data of a source.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) machine: Machine,
    /// Faults, by GPU; `None` if the source does not report health.
    pub(super) complaints: Option<BTreeSet<Complaint>>,
}

/// A fault of a GPU or of a MIG device on it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Complaint {
    /// Index of the GPU.
    pub(super) gpu: u8,
    /// Profile of the MIG device; `None` for the whole GPU.
    pub(super) profile: Option<String>,
    /// The fault, for people.
    pub(super) reason: String,
    /// Start of the fault, if known.
    pub(super) since: Option<String>,
}

/// Contradictions in a machine (MIG instances that the GPU's product does not allow), and guesses in the report.
pub(super) fn warnings(machine: &Machine) -> Vec<String> {
    let checked = check_machine(&Catalogue::built_in(), machine);
    let cannot_be = checked.err().map(|error| error.to_string());
    cannot_be.into_iter().chain(guess(machine)).collect()
}

/// A warning that bandwidths are guesses, if the model of a GPU is unknown.
fn guess(machine: &Machine) -> Option<String> {
    let guessed = guessed(machine);
    let unknown = guessed.iter().map(|index| machine.gpus().get(usize::from(*index)));
    let models: BTreeSet<&str> = unknown.flatten().filter_map(|gpu| gpu.model.as_deref()).collect();
    let models: Vec<&str> = models.into_iter().collect();
    if guessed.is_empty() || machine.gpus().len() < 2 {
        return None;
    }
    let why = match models.as_slice() {
        [] => {
            "the GPU model is unknown; set --model for a topology text, or `model` of a GPU in a machine file"
                .to_owned()
        }
        models => format!("the rates of {} are unknown", models.join(", ")),
    };
    Some(format!("bandwidths are a guess from the number of links: {why}"))
}

impl From<Machine> for Seen {
    fn from(machine: Machine) -> Self {
        Self { machine, complaints: None }
    }
}

/// The health that a node's plugin reports, quarantines of earlier runs included.
impl From<GpuNode> for Seen {
    fn from(node: GpuNode) -> Self {
        let status = node.status.unwrap_or_default();
        let machine = node.spec.machine;
        let since = |device: &DeviceStatus, reason: &str| {
            let uuid = machine.gpus().iter().find(|gpu| gpu.index == device.gpu)?.uuid.as_ref()?;
            // The reason of a link fault ends in the number of links down, which the stored reason does not contain.
            let is_stored = |stored: &str| {
                let rest = reason.strip_prefix(stored);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("; "))
            };
            let of_gpu =
                |fault: &&gantry_api::GpuFault| fault.gpu == uuid.as_str() && is_stored(&fault.reason);
            Some(status.faults.iter().find(of_gpu)?.since.0.to_string())
        };
        let complaint = |device: &DeviceStatus| {
            let reason = device.health.reason.clone();
            let reason = reason.unwrap_or_else(|| "unhealthy, for an unknown reason".to_owned());
            Complaint {
                gpu: device.gpu,
                profile: device.slice.as_ref().map(|slice| slice.profile.clone()),
                since: since(device, &reason),
                reason,
            }
        };
        let unhealthy = status.devices.iter().filter(|device| !device.health.healthy);
        let complaints = unhealthy.map(complaint).collect();
        Self { machine, complaints: Some(complaints) }
    }
}

/// The health that NVML reports now.
impl From<gantry_plugin::discover::Scan> for Seen {
    fn from(scan: gantry_plugin::discover::Scan) -> Self {
        let complaint = |(gpu, reason)| Complaint { gpu, profile: None, reason, since: None };
        Self { machine: scan.machine, complaints: Some(scan.complaints.into_iter().map(complaint).collect()) }
    }
}
