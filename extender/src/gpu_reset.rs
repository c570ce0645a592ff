//! Which GPUs the driver resets together, and what is in the way of a reset. For `gantry reset gpu` and for the rules of
//! remediation. Pure.

use std::collections::BTreeSet;

use gantry_api::{Cordons, GpuNode};
use gantry_topology::{Gpu, GpuUuid, Machine};

use crate::eviction::reported_holders;

/// The first major version of the compute capability (Ampere) with which the driver resets GPUs with NVLinks one by one.
const ALONE_SINCE: u32 = 8;

/// Why a GPU may not be reset now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// New pods may get it.
    NotCordoned,
    /// A pod holds it: `namespace/name`.
    Held(String),
}

/// The end of a sentence that begins with the GPU.
impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotCordoned => f.write_str("is not cordoned"),
            Self::Held(pod) => write!(f, "is held by {pod}"),
        }
    }
}

/// The obstacle of one GPU, if there is one.
pub fn obstacle(node: &GpuNode, uuid: &GpuUuid) -> Option<Obstacle> {
    if Cordons::of(node.metadata.annotations.as_ref()).get(uuid).is_none() {
        return Some(Obstacle::NotCordoned);
    }
    let (namespace, pod) = reported_holders(node, uuid).into_iter().next()?;
    Some(Obstacle::Held(format!("{namespace}/{pod}")))
}

/// The GPU at `index`, with those that the driver resets together with it. From Ampere on it resets every GPU alone. An
/// older GPU, and one of unknown architecture, is reset with all GPUs that NVLinks join to it.
pub fn group(machine: &Machine, index: u8) -> Vec<&Gpu> {
    let gpus = machine.gpus();
    let resets_alone = |at: usize| {
        let capability = gpus.get(at).and_then(|gpu| gpu.compute_capability.as_deref());
        let major = capability.and_then(|capability| capability.split('.').next()?.parse::<u32>().ok());
        major.is_some_and(|major| major >= ALONE_SINCE)
    };
    let joined = |a: usize, b: usize| {
        let ends = [a.min(b), a.max(b)];
        let direct = machine.nvlinks().iter().any(|bundle| bundle.gpus.map(usize::from) == ends);
        direct || machine.switch_links(a) > 0 && machine.switch_links(b) > 0
    };
    let Some(first) = gpus.iter().position(|gpu| gpu.index == index) else {
        return Vec::new();
    };
    let mut members = BTreeSet::from([first]);
    let mut open = if resets_alone(first) { Vec::new() } else { vec![first] };
    while let Some(at) = open.pop() {
        for other in 0..gpus.len() {
            if joined(at, other) && members.insert(other) {
                open.push(other);
            }
        }
    }
    members.into_iter().filter_map(|at| gpus.get(at)).collect()
}
