//! The surroundings of a machine's GPUs: NICs, NUMA nodes, and the groups worth keeping whole. These are the terms of a
//! choice's key other than bandwidth. Every term is larger for the better set.

use super::Purpose;
use crate::graph::MachineGraph;
use crate::machine::{MAX_GPUS, MAX_NICS, Machine, PathClass};
use crate::nics::NicSet;
use crate::set::GpuSet;

/// The [`class_rank`] of a machine without NICs.
const NO_NIC: u8 = 5;

/// NICs, NUMA nodes and groups of one machine.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    /// By GPU: the NICs behind the same PCIe switches (`PIX`, `PXB`), which GPUDirect RDMA reaches at full rate.
    /// One bit for each NIC.
    rails: [u128; MAX_GPUS],
    /// By GPU: its nearest NICs, unless they are across the link between sockets.
    nearest_nics: [NicSet; MAX_GPUS],
    /// By GPU: the rank of the nearest NIC's path class.
    nearest: [u8; MAX_GPUS],
    nics: usize,
    /// The GPUs of each NUMA node. GPUs whose node is unknown are in none.
    numa: Vec<GpuSet>,
    /// GPUs that belong together, several levels of them; see [`Surroundings::together`].
    groups: Vec<Group>,
    /// Degraded GPUs, see [`Machine::is_degraded`].
    degraded: GpuSet,
}

/// GPUs that belong together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    /// What they share, such as `NVLink pair`.
    pub(super) what: &'static str,
    pub(super) gpus: GpuSet,
    /// Whether NVLinks join them.
    pub(super) island: bool,
}

impl Surroundings {
    pub(super) fn new(machine: &Machine, graph: &MachineGraph) -> Self {
        let gpus = machine.gpus().len().min(MAX_GPUS);
        let nics = machine.nics().len();
        let to_nic = |gpu: usize, nic: usize| machine.paths().get(gpu, machine.gpus().len() + nic);
        let mut nearest = [NO_NIC; MAX_GPUS];
        for (gpu, nearest) in nearest.iter_mut().enumerate().take(gpus) {
            *nearest = (0..nics).map(|nic| class_rank(to_nic(gpu, nic))).min().unwrap_or(NO_NIC);
        }
        let mut rails = [0; MAX_GPUS];
        for (gpu, rails) in rails.iter_mut().enumerate().take(gpus) {
            let near = (0..nics.min(MAX_NICS)).filter(|nic| class_rank(to_nic(gpu, *nic)) <= 1);
            *rails = near.fold(0, |rails, nic| rails | 1 << nic);
        }
        let mut nearest_nics = [NicSet::default(); MAX_GPUS];
        for (gpu, own) in nearest_nics.iter_mut().enumerate().take(gpus) {
            *own = NicSet::nearest(machine, gpu);
        }
        let numa = known_numa_nodes(machine);
        let degraded = (0..gpus).filter(|gpu| machine.is_degraded(*gpu)).collect();
        let groups = groups(graph, GpuSet::all(machine), &numa);
        Self { rails, nearest_nics, nearest, nics, groups, numa, degraded }
    }

    /// Whether any NIC is known. Without one, gang members and local jobs have the same preferences.
    pub(super) fn has_nics(&self) -> bool {
        self.nics > 0
    }

    /// The groups of GPUs worth keeping whole.
    pub(super) fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The rating of the NICs around a set for its purpose.
    ///
    /// - A gang member wants as many NICs of its own as it has GPUs (the largest matching of GPUs to NICs behind the
    ///   same PCIe switch), then the worst-placed GPU as near to a NIC as can be.
    /// - A local job prefers GPUs near the fewest NICs, then far from the nearest: it leaves the NICs to jobs that need
    ///   them.
    pub(super) fn nics(&self, set: GpuSet, purpose: Purpose) -> u32 {
        let classes = set.iter().map(|gpu| self.nearest[gpu]);
        match purpose {
            Purpose::GangMember => {
                let rails = u32::try_from(self.own_rails(set)).unwrap_or(0);
                rails * 8 + u32::from(NO_NIC - classes.max().unwrap_or(NO_NIC))
            }
            Purpose::Local => {
                let nics = u32::try_from(self.nics).unwrap_or(u32::MAX);
                let spared = nics.saturating_sub(self.near(set).count_ones());
                spared * 8 + u32::from(classes.min().unwrap_or(NO_NIC))
            }
        }
    }

    /// NICs behind the PCIe switches of a set's GPUs, ascending.
    pub(super) fn near_nics(&self, set: GpuSet) -> Vec<usize> {
        let near = self.near(set);
        (0..self.nics.min(MAX_NICS)).filter(|nic| near & (1 << nic) != 0).collect()
    }

    /// The nearest NICs of a set's GPUs.
    pub(super) fn nearest_nics(&self, set: GpuSet) -> NicSet {
        set.iter().fold(NicSet::default(), |nics, gpu| nics | self.nearest_nics[gpu])
    }

    fn near(&self, set: GpuSet) -> u128 {
        set.iter().fold(0, |near, gpu| near | self.rails[gpu])
    }

    /// The number of the set's degraded GPUs.
    pub(super) fn degraded(&self, set: GpuSet) -> u32 {
        u32::try_from(self.degraded_of(set).len()).unwrap_or(u32::MAX)
    }

    /// The set's degraded GPUs.
    pub(super) fn degraded_of(&self, set: GpuSet) -> GpuSet {
        self.degraded & set
    }

    /// The number of known NUMA nodes of the set's GPUs.
    pub(super) fn numa_nodes(&self, set: GpuSet) -> u32 {
        let spanned = self.numa.iter().filter(|node| !(**node & set).is_empty()).count();
        u32::try_from(spanned).unwrap_or(u32::MAX)
    }

    /// The rating of the groups kept together in a set: over the NVLink islands, PCIe switches, host bridges, sockets
    /// and NUMA nodes, the squares of the number of their GPUs in it. Taken over a choice and its remainder, it is
    /// larger the fewer groups are broken, and the more unevenly those that must be.
    pub(super) fn together(&self, set: GpuSet) -> u32 {
        let squares = self.groups.iter().map(|group| (group.gpus & set).len().pow(2));
        u32::try_from(squares.sum::<usize>()).unwrap_or(u32::MAX)
    }

    /// The number of NVLink islands that are whole in a set: bridged pairs, or the parts that a dead link leaves. None
    /// on a machine that is a single island.
    pub(super) fn islands(&self, set: GpuSet) -> u32 {
        let whole = self.groups.iter().filter(|group| group.island && group.gpus.is_subset(set));
        u32::try_from(whole.count()).unwrap_or(u32::MAX)
    }

    /// The largest matching of the set's GPUs to NICs behind their own PCIe switches.
    fn own_rails(&self, set: GpuSet) -> usize {
        let mut holder = [None; MAX_NICS];
        set.iter().filter(|gpu| self.give_rail(*gpu, &mut holder, &mut 0)).count()
    }

    /// Gives `gpu` a NIC, moving the present holders on where they have another.
    fn give_rail(&self, gpu: usize, holder: &mut [Option<u8>; MAX_NICS], seen: &mut u128) -> bool {
        loop {
            let fresh = self.rails[gpu] & !*seen;
            let nic = fresh.trailing_zeros() as usize;
            let Some(present) = holder.get(nic).copied() else {
                return false;
            };
            *seen |= 1 << nic;
            if present.is_none_or(|other| self.give_rail(usize::from(other), holder, seen)) {
                holder[nic] = u8::try_from(gpu).ok();
                return true;
            }
        }
    }
}

/// Path classes as far as NICs and groups differ: `SYS` and `SOC` are one.
fn class_rank(class: PathClass) -> u8 {
    match class {
        PathClass::Pix => 0,
        PathClass::Pxb => 1,
        PathClass::Phb => 2,
        PathClass::Node => 3,
        PathClass::Sys | PathClass::Soc => 4,
    }
}

/// The GPUs of each known NUMA node.
pub(super) fn known_numa_nodes(machine: &Machine) -> Vec<GpuSet> {
    let nodes = machine.numa_nodes().into_iter();
    nodes.filter_map(|(node, gpus)| node.map(|_| gpus)).collect()
}

const NVLINK: &str = "NVLink island";

/// NVLink islands, then what shares a PCIe switch, host bridge or socket, then NUMA nodes; each set of GPUs once,
/// single GPUs and the whole machine left out.
fn groups(graph: &MachineGraph, all: GpuSet, numa: &[GpuSet]) -> Vec<Group> {
    let islands = graph.nvlink_islands();
    let levels = [
        (NVLINK, islands.into_iter().map(GpuSet::from_iter).collect()),
        ("PCIe switch", graph.gpu_groups(PathClass::Pix)),
        ("PCIe switch", graph.gpu_groups(PathClass::Pxb)),
        ("PCIe host bridge", graph.gpu_groups(PathClass::Phb)),
        ("socket", graph.gpu_groups(PathClass::Node)),
        ("NUMA node", numa.to_vec()),
    ];
    let mut groups: Vec<Group> = Vec::new();
    for (what, gpus) in
        levels.into_iter().flat_map(|(what, level)| level.into_iter().map(move |gpus| (what, gpus)))
    {
        if gpus.len() > 1 && gpus != all && !groups.iter().any(|group| group.gpus == gpus) {
            let island = what == NVLINK;
            groups.push(Group {
                what: if island && gpus.len() == 2 { "NVLink pair" } else { what },
                gpus,
                island,
            });
        }
    }
    groups
}
