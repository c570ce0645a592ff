//! The CPUs and the memory of each NUMA node, as kubelet's static managers count them. Pure but for sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use gantry_api::{GpuNodeStatus, NumaNodeCpus, NumaNodeMemory};
use gantry_topology::IdList;

use crate::handover::NumaListing;
use crate::kubelet_config::KubeletConfig;

/// The CPUs of each NUMA node, sorted by its number. Empty without the static CPU manager, without NUMA in sysfs, and on a
/// machine with more NUMA nodes than are reported.
pub(super) fn cpus(listing: &NumaListing, sys_root: &Path, kubelet: &KubeletConfig) -> Vec<NumaNodeCpus> {
    let allocatable = &listing.allocatable.cpus;
    if allocatable.is_empty() {
        return Vec::new();
    }
    let cores = kubelet.gives_whole_cores.then(|| Cores::read(allocatable, sys_root));
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
                allocatable: count(&|cpu| match &cores {
                    Some(cores) => cores.whole.contains(&cpu),
                    None => allocatable.contains(&cpu),
                }),
                held: count(&|cpu| listing.held_cpus.contains(&cpu)),
                core: cores.as_ref().map(|cores| cores.size),
            })
        })
        // Those of GPUs have memory only.
        .filter(|cpus| cpus.total > 0)
        .collect();
    nodes.sort_unstable_by_key(|cpus| cpus.node);
    if nodes.len() > GpuNodeStatus::MAX_NUMA_NODES { Vec::new() } else { nodes }
}

/// The cores of the machine, for a CPU manager that gives whole ones.
#[derive(Debug)]
struct Cores {
    /// CPUs of a core.
    size: u32,
    /// The CPUs of cores of which all are allocatable.
    whole: BTreeSet<u32>,
}

impl Cores {
    fn read(allocatable: &BTreeSet<u32>, sys_root: &Path) -> Self {
        let siblings = |cpu: &u32| {
            let file = sys_root.join(format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
            fs::read_to_string(file).ok()?.trim().parse::<IdList>().ok()
        };
        let (mut size, mut whole) = (1, BTreeSet::new());
        for cpu in allocatable {
            let core: BTreeSet<u32> =
                siblings(cpu).map_or_else(|| [*cpu].into(), |siblings| siblings.iter().collect());
            size = size.max(u32::try_from(core.len()).unwrap_or(u32::MAX));
            if core.is_subset(allocatable) {
                whole.insert(*cpu);
            }
        }
        Self { size, whole }
    }
}

/// The memory of each NUMA node, sorted by its number. Empty without the static memory manager, and on a machine with more
/// NUMA nodes than are reported.
pub(super) fn memory(listing: &NumaListing) -> Vec<NumaNodeMemory> {
    let allocatable = &listing.allocatable.memory;
    if allocatable.len() > GpuNodeStatus::MAX_NUMA_NODES {
        return Vec::new();
    }
    let of_node = |(node, bytes): (&u32, &u64)| NumaNodeMemory {
        node: *node,
        allocatable_bytes: *bytes,
        ..NumaNodeMemory::default()
    };
    let mut nodes: BTreeMap<u32, NumaNodeMemory> =
        allocatable.iter().map(|entry| (*entry.0, of_node(entry))).collect();
    for (group, size) in &listing.held_memory {
        let mut left = *size;
        for node in group {
            let Some(known) = nodes.get_mut(node) else {
                continue;
            };
            let taken = left.min(known.allocatable_bytes.saturating_sub(known.held_bytes));
            known.held_bytes += taken;
            left -= taken;
            let both: BTreeSet<u32> = known.group.iter().chain(group).copied().collect();
            known.group = both.into_iter().collect();
        }
    }
    nodes.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::Allocatable;

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
        let listing = listing(&[1, 2, 3, 4, 5, 6, 7], &[1, 3, 4]);
        let of_node =
            |node, allocatable, held, core| NumaNodeCpus { node, total: 4, allocatable, held, core };
        let kubelet = KubeletConfig::default();
        let expected = [of_node(0, 3, 1, None), of_node(1, 4, 2, None)];
        assert_eq!(cpus(&listing, root.path(), &kubelet), expected);
        // CPUs 0 and 2 are a core, and so on. The first core is allocatable in part.
        for cpu in 0..8 {
            let topology = root.path().join(format!("devices/system/cpu/cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            let first = cpu / 4 * 4 + cpu % 2;
            fs::write(topology.join("thread_siblings_list"), format!("{first},{}\n", first + 2)).unwrap();
        }
        let kubelet = KubeletConfig { gives_whole_cores: true, ..kubelet };
        let expected = [of_node(0, 2, 1, Some(2)), of_node(1, 4, 2, Some(2))];
        assert_eq!(cpus(&listing, root.path(), &kubelet), expected);
    }

    fn listing(allocatable: &[u32], held: &[u32]) -> NumaListing {
        NumaListing {
            allocatable: Allocatable {
                cpus: allocatable.iter().copied().collect(),
                ..Allocatable::default()
            },
            held_cpus: held.iter().copied().collect(),
            ..NumaListing::default()
        }
    }

    /// The container with memory of both nodes has the first node's before the second node's.
    #[test]
    fn memory_is_counted_by_numa_node() {
        let both = || [0, 1].into();
        let listing = NumaListing {
            allocatable: Allocatable { memory: [(0, 10), (1, 10), (2, 10)].into(), ..Allocatable::default() },
            held_memory: vec![(both(), 6), (both(), 8), ([2].into(), 3)],
            ..NumaListing::default()
        };
        let of_node = |node, held_bytes, group: &[u32]| NumaNodeMemory {
            node,
            allocatable_bytes: 10,
            held_bytes,
            group: group.to_vec(),
        };
        let expected = [of_node(0, 10, &[0, 1]), of_node(1, 4, &[0, 1]), of_node(2, 3, &[2])];
        assert_eq!(memory(&listing), expected);
    }

    /// Kubelet lists no allocatable CPU without the static CPU manager.
    #[test]
    fn nothing_is_reported_without_static_cpu_manager() {
        let kubelet = KubeletConfig::default();
        assert_eq!(cpus(&listing(&[], &[1]), sysfs().path(), &kubelet), []);
        assert_eq!(cpus(&listing(&[1], &[]), Path::new("/nonexistent"), &kubelet), []);
        assert_eq!(memory(&listing(&[1], &[])), []);
    }
}
