//! A machine with what is wrong with its GPUs, as far as the source tells. Values; where they come from is the source's.

use std::collections::BTreeSet;

use gantry_api::{DeviceStatus, GpuNode};
use gantry_topology::Machine;
use gantry_topology::bandwidth::guessed;
use gantry_topology::mig::{Catalogue, check_machine};
use serde::Serialize;

/// What a source shows.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) machine: Machine,
    /// What is wrong, by GPU; `None` where the source says nothing of it.
    pub(super) complaints: Option<BTreeSet<Complaint>>,
}

/// Something that is wrong with a GPU or a MIG device of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Complaint {
    /// Index of the GPU.
    pub(super) gpu: u8,
    /// Profile of the MIG device that it is about; `None`: the whole GPU.
    pub(super) profile: Option<String>,
    /// In words.
    pub(super) reason: String,
    /// Since when, if that is known.
    pub(super) since: Option<String>,
}

/// What a machine says that cannot be (MIG instances that the GPU's product does not allow there), and what of the report is a guess.
pub(super) fn warnings(machine: &Machine) -> Vec<String> {
    let checked = check_machine(&Catalogue::built_in(), machine);
    let cannot_be = checked.err().map(|error| error.to_string());
    cannot_be.into_iter().chain(guess(machine)).collect()
}

/// That bandwidths are a guess, where nothing tells what the GPUs are.
fn guess(machine: &Machine) -> Option<String> {
    let guessed = guessed(machine);
    let unknown = guessed
        .iter()
        .map(|index| machine.gpus().get(usize::from(*index)));
    let models: BTreeSet<&str> = unknown.flatten().filter_map(|gpu| gpu.model.as_deref()).collect();
    let models: Vec<&str> = models.into_iter().collect();
    if guessed.is_empty() || machine.gpus().len() < 2 {
        return None;
    }
    let why = match models.as_slice() {
        [] => "no GPU model is told; --model names that of a text, `model` that of a GPU in a machine file"
            .to_owned(),
        models => format!("the rates of {} are not known", models.join(", ")),
    };
    Some(format!("bandwidths are a guess from the number of links: {why}"))
}

impl From<Machine> for Seen {
    fn from(machine: Machine) -> Self {
        Self {
            machine,
            complaints: None,
        }
    }
}

/// What a node's plugin says, quarantines of earlier runs included.
impl From<GpuNode> for Seen {
    fn from(node: GpuNode) -> Self {
        let status = node.status.unwrap_or_default();
        let machine = node.spec.machine;
        let since = |device: &DeviceStatus, reason: &str| {
            let uuid = machine
                .gpus()
                .iter()
                .find(|gpu| gpu.index == device.gpu)?
                .uuid
                .as_ref()?;
            // Of a link, how many are down stands behind the reason that is stored.
            let is_told = |stored: &str| {
                let rest = reason.strip_prefix(stored);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("; "))
            };
            let of_gpu = |fault: &&gantry_api::GpuFault| fault.gpu == uuid.as_str() && is_told(&fault.reason);
            Some(status.faults.iter().find(of_gpu)?.since.0.to_string())
        };
        let complaint = |device: &DeviceStatus| {
            let reason = device.health.reason.clone();
            let reason = reason.unwrap_or_else(|| "unhealthy, for a reason that is not told".to_owned());
            Complaint {
                gpu: device.gpu,
                profile: device.slice.as_ref().map(|slice| slice.profile.clone()),
                since: since(device, &reason),
                reason,
            }
        };
        let sick = status.devices.iter().filter(|device| !device.health.healthy);
        let complaints = sick.map(complaint).collect();
        Self {
            machine,
            complaints: Some(complaints),
        }
    }
}

/// What NVML shows now.
impl From<gantry_plugin::discover::Scan> for Seen {
    fn from(sight: gantry_plugin::discover::Scan) -> Self {
        let complaint = |(gpu, reason)| Complaint {
            gpu,
            profile: None,
            reason,
            since: None,
        };
        Self {
            machine: sight.machine,
            complaints: Some(sight.complaints.into_iter().map(complaint).collect()),
        }
    }
}
