//! The CPUs of each NUMA node, as kubelet's static CPU manager counts them. Pure but for sysfs.

use std::fs;
use std::path::Path;

use gantry_api::{GpuNodeStatus, NumaNodeCpus};
use gantry_topology::IdList;

use crate::handover::CpuListing;

/// The CPUs of each NUMA node, sorted by its number. Empty without the static CPU manager, without NUMA in sysfs, and on a
/// machine with more NUMA nodes than are reported.
pub(super) fn by_numa_node(listing: &CpuListing, sys_root: &Path) -> Vec<NumaNodeCpus> {
    if listing.allocatable.is_empty() {
        return Vec::new();
    }
    let entries = fs::read_dir(sys_root.join("devices/system/node")).into_iter().flatten().flatten();
    let mut nodes: Vec<NumaNodeCpus> = entries
        .filter_map(|entry| {
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus: IdList = fs::read_to_string(entry.path().join("cpulist")).ok()?.trim().parse().ok()?;
            let count = |is_counted: &dyn Fn(u32) -> bool| {
                u32::try_from(cpus.iter().filter(|cpu| is_counted(*cpu)).count()).unwrap_or(u32::MAX)
            };
            Some(NumaNodeCpus {
                node,
                total: count(&|_| true),
                allocatable: count(&|cpu| listing.allocatable.contains(&cpu)),
                held: count(&|cpu| listing.held.contains(&cpu)),
            })
        })
        // Those of GPUs have memory only.
        .filter(|cpus| cpus.total > 0)
        .collect();
    nodes.sort_unstable_by_key(|cpus| cpus.node);
    if nodes.len() > GpuNodeStatus::MAX_NUMA_NODES { Vec::new() } else { nodes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two NUMA nodes of four CPUs, numbered in turns as on a machine with two sockets, and one of memory.
    fn sysfs() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (node, cpus) in [(0, "0,2,4,6\n"), (1, "1,3,5,7\n")] {
            let node = root.path().join(format!("devices/system/node/node{node}"));
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("cpulist"), cpus).unwrap();
        }
        let memory = root.path().join("devices/system/node/node2");
        fs::create_dir_all(&memory).unwrap();
        fs::write(memory.join("cpulist"), "\n").unwrap();
        fs::write(root.path().join("devices/system/node/possible"), "0-2").unwrap();
        root
    }

    #[test]
    fn cpus_are_counted_by_numa_node() {
        let root = sysfs();
        let listing = CpuListing { allocatable: [1, 2, 3, 4, 5, 6, 7].into(), held: [1, 3, 4].into() };
        let cpus = |node, allocatable, held| NumaNodeCpus { node, total: 4, allocatable, held };
        assert_eq!(by_numa_node(&listing, root.path()), [cpus(0, 3, 1), cpus(1, 4, 2)]);
    }

    /// Kubelet lists no allocatable CPU without the static CPU manager.
    #[test]
    fn nothing_is_reported_without_static_cpu_manager() {
        let listing = CpuListing { allocatable: [].into(), held: [1].into() };
        assert_eq!(by_numa_node(&listing, sysfs().path()), []);
        let listing = CpuListing { allocatable: [1].into(), held: [].into() };
        assert_eq!(by_numa_node(&listing, Path::new("/nonexistent")), []);
    }
}
