//! Texts of refusals, in GPUs, for `kubectl describe pod`. kube-scheduler groups and counts equal texts and retries a
//! pod whenever its text changes. So a text has no node names, times or counters, and is the same for alike nodes.

use std::fmt::Write;

use gantry_api::{ResourceName, names};

use crate::shape::Shape;
use crate::snapshot::Pool;

/// A node that the snapshot does not have.
pub(super) const UNKNOWN_NODE: &str = "node(s) not known to Gantry yet";
/// A node without an inventory, where policy forbids those.
pub(super) const FOREIGN_NODE: &str = "node(s) without a Gantry plugin";

/// Unhealthy GPUs named in one text.
const NAMED: usize = 4;

/// Why a node with an inventory does not fit a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeRefusal {
    /// Its plugin does not serve: the reason of its condition.
    NotReady(String),
    /// It does not serve the resource at all.
    NotServed(ResourceName),
    /// A container asks for more than kubelet gives to one.
    TooMany {
        /// The resource.
        resource: ResourceName,
        /// The most a container may have.
        max: u32,
        /// The container.
        container: String,
        /// What it asks for.
        asked: u32,
    },
    /// Too few devices are free: the counts as text.
    Short(String),
}

impl NodeRefusal {
    /// A text that follows kube-scheduler's count: "2 node(s) with 3 of 8 GPUs free, 4 asked".
    pub(super) fn of_nodes(&self) -> String {
        match self {
            Self::NotReady(reason) => format!("node(s) whose {}", plugin_not_ready(reason)),
            Self::NotServed(resource) => format!("node(s) without {resource}"),
            Self::TooMany { .. } => format!("node(s) where {}", self.of_one_node()),
            Self::Short(words) => format!("node(s) with {words}"),
        }
    }

    /// A text that follows the name of one node.
    pub fn of_one_node(&self) -> String {
        match self {
            Self::NotReady(reason) => plugin_not_ready(reason),
            Self::NotServed(resource) => format!("does not serve {resource}"),
            Self::TooMany { resource, max, container, asked } => {
                format!("{resource} gives a container {max} at most, container {container} asks for {asked}")
            }
            Self::Short(words) => words.clone(),
        }
    }
}

/// The text for a plugin that does not serve.
pub fn plugin_not_ready(reason: &str) -> String {
    format!("GPU plugin is not ready: {reason}")
}

/// The text for a simulated node that is too small.
pub(super) fn too_small(resource: &ResourceName, advertised: u32, asked: u32) -> String {
    let unit = if resource.as_str() == names::GPU_RESOURCE { "GPUs" } else { resource.as_str() };
    format!("node(s) with {advertised} {unit}, {asked} asked")
}

/// Counts of a pool, and what other than pods takes the rest: `3 of 8 GPUs free, 4 asked, 1 unhealthy (GPU 3: Xid 79)`.
/// Devices that are not whole GPUs have the name of their resource: `2 of 56 nvidia.com/mig-1g.10gb free, 4 asked`.
pub(super) fn shortage(pool: &Pool, asked: u32) -> String {
    let unit = match pool.shape {
        Shape::Whole if pool.resource.as_str() == names::GPU_RESOURCE => "GPUs",
        _ => pool.resource.as_str(),
    };
    let mut text = format!("{} of {} {unit} free, {asked} asked", pool.free.len(), pool.devices);
    if pool.unhealthy > 0 {
        let named: Vec<String> = pool
            .faults
            .iter()
            .take(NAMED)
            .map(|fault| format!("GPU {}: {}", fault.gpu, fault.reason))
            .collect();
        let more = if pool.faults.len() > NAMED { "; ..." } else { "" };
        let reasons = match named.is_empty() {
            true => "what the plugin publishes contradicts itself".to_owned(),
            false => named.join("; "),
        };
        // Writing into a String cannot fail.
        let _ = write!(text, ", {} unhealthy ({reasons}{more})", pool.unhealthy);
    }
    if pool.leaving > 0 {
        let _ = write!(text, ", {} not yet given back by pods that are gone", pool.leaving);
    }
    text
}

/// The text about a node in the Event of a pod that kube-scheduler's own count refuses. If enough devices are free
/// here, kubelet advertises fewer, or kube-scheduler counts pods that the index has not seen.
pub fn node_line(pool: &Pool, asked: u32) -> String {
    let mut text = shortage(pool, asked);
    if pool.free.len() >= asked as usize
        && let Some(advertised) = pool.advertised.filter(|advertised| *advertised as usize != pool.devices)
    {
        let _ = write!(text, ", kubelet advertises {advertised}");
    }
    text
}
