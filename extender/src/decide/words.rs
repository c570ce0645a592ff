//! Refusals in words of GPUs, for `kubectl describe pod`. kube-scheduler groups equal texts and counts them, and tries a pod again
//! whenever its text changes: so no node names, times or counters here, and one text per class of nodes.

use std::fmt::Write;

use gantry_api::ResourceName;
use gantry_topology::GpuSet;

use crate::snapshot::{Class, Pool};

/// A node that is not in the cache.
pub(super) const UNKNOWN_NODE: &str = "node(s) not known to Gantry yet";
/// A node without an inventory, where that is not allowed.
pub(super) const FOREIGN_NODE: &str = "node(s) without a Gantry plugin";

/// Sick GPUs named in one text.
const NAMED: usize = 4;

/// A node that serves the resource but has too little of it free. Reads after kube-scheduler's count: "2 node(s) with 3 of 8 GPUs
/// free, 4 asked".
pub(super) fn refusal(class: &Class, pool: &Pool, asked: u32) -> String {
    format!("node(s) with {}", shortage(class, pool, asked))
}

/// A node whose plugin does not serve, in the word of its condition: it is one of a few.
pub(super) fn not_ready(reason: &str) -> String {
    format!("node(s) whose {}", plugin_not_ready(reason))
}

/// The same of one node.
pub fn plugin_not_ready(reason: &str) -> String {
    format!("GPU plugin is not ready: {reason}")
}

/// A node that does not serve the resource at all.
pub(super) fn not_served(resource: &ResourceName) -> String {
    format!("node(s) without {resource}")
}

/// An invented node that is too small.
pub(super) fn too_small(advertised: u32, asked: u32) -> String {
    format!("node(s) with {advertised} GPUs, {asked} asked")
}

/// What is free of a pool, and what keeps the rest where that is not simply other pods: `3 of 8 GPUs free, 4 asked, 1 unhealthy (GPU 3:
/// Xid 79)`.
pub fn shortage(class: &Class, pool: &Pool, asked: u32) -> String {
    let mut text = format!(
        "{} of {} GPUs free, {asked} asked",
        pool.free.len(),
        pool.gpus.len()
    );
    let sick: Vec<_> = class
        .sick
        .iter()
        .filter(|sick| pool.gpus.contains(usize::from(sick.gpu)))
        .collect();
    if !sick.is_empty() {
        let named: Vec<String> = sick
            .iter()
            .take(NAMED)
            .map(|sick| format!("GPU {}: {}", sick.gpu, sick.reason))
            .collect();
        let more = if sick.len() > NAMED { "; ..." } else { "" };
        // Writing into a String cannot fail.
        let _ = write!(text, ", {} unhealthy ({}{more})", sick.len(), named.join("; "));
    }
    let leaving = pool.leaving - sick.iter().map(|sick| usize::from(sick.gpu)).collect::<GpuSet>();
    if !leaving.is_empty() {
        let _ = write!(
            text,
            ", {} not yet given back by pods that are gone",
            leaving.len()
        );
    }
    text
}

/// A node of ours for the Event of a pod that kube-scheduler's own count refuses. Where we see enough free devices, kubelet must be
/// advertising fewer, or kube-scheduler count pods that have not come yet.
pub fn node_line(class: &Class, pool: &Pool, asked: u32) -> String {
    let mut text = shortage(class, pool, asked);
    if pool.free.len() >= asked as usize
        && let Some(advertised) = pool
            .advertised
            .filter(|advertised| *advertised as usize != pool.gpus.len())
    {
        let _ = write!(text, ", kubelet advertises {advertised}");
    }
    text
}
