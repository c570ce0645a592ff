//! Kubelet's Topology Manager: which NUMA nodes it aligns a container's devices, CPUs and memory with, and which containers
//! it refuses. Kubelet only offers the plugin the devices of those nodes. An [`Alignment`] is that of one pool of devices, a
//! [`PodAlignment`] that of all resources of a pod.
//!
//! The rules are those of kubelet's device manager, static CPU manager and static memory manager (hints), and Topology
//! Manager (merge):
//!
//! 1. A hint is a set of NUMA nodes that have enough available devices, and all devices that finished init containers
//!    left. It is preferred if no smaller set has enough devices of the node, held ones included.
//! 2. The same holds for the CPUs that a container of a Guaranteed pod has for itself alone. Whether a smaller set is
//!    enough is counted by all CPUs of the machine, reserved ones included.
//! 3. The same holds for the memory of each container of a Guaranteed pod. The nodes of a container that has memory of
//!    several are a group from then on: a container has memory of all nodes of a group or of none.
//! 4. The best hint is preferred before others, then has the fewest nodes, then the lowest numbers. A hint is preferred if
//!    the devices of each resource, CPUs and memory prefer it: these are on the same nodes, or the hint is not preferred.
//!    (With `prefer-closest-numa-nodes`, several nodes are compared by their distances first, which are not known here.
//!    That changes which devices kubelet takes, not whether it refuses.)
//! 5. `single-numa-node` only takes preferred hints of one node, `restricted` only preferred ones. CPUs and memory are
//!    counted under these two policies only.
//! 6. The scope `pod` aligns what all containers need at once.

mod admission;
mod pod;
mod state;
mod supply;

use std::borrow::Cow;
use std::cmp::Reverse;

use gantry_api::{GpuNodeStatus, KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};

use crate::devices::DeviceSet;
use crate::request::{Ask, NumaDemand, NumaNeeds};

pub use admission::Admission;
pub use pod::PodAlignment;
use state::NumaState;
pub use supply::{NodeNumbers, NumaCpus, NumaMemory, NumaNode};

/// NUMA nodes as a bit mask, by their order among the nodes that have devices, or CPUs or memory that are counted.
type Nodes = u16;

/// The most NUMA nodes that are distinguished. Kubelet itself starts with at most 8, unless configured.
const MAX_NODES: usize = GpuNodeStatus::MAX_NUMA_NODES;

static NO_DEVICES: DeviceSet = DeviceSet::EMPTY;

/// The NUMA nodes of a pool's devices under a Topology Manager that aligns them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alignment {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// Kubelet's configuration is not known.
    is_assumed: bool,
    /// By device: its node; `None` for a device without one, or that does not exist.
    node_of: Vec<Option<u8>>,
    /// The numbers of the nodes, ascending.
    nodes: Vec<u32>,
    /// The CPUs and the memory by node; empty if neither is counted.
    numa: Vec<NumaNode>,
}

/// What a container may be given of one resource, and how much of it it asks for.
#[derive(Debug, Clone, Copy)]
struct ContainerDemand<'a> {
    alignment: &'a Alignment,
    available: &'a DeviceSet,
    /// Devices that finished init containers of the pod left.
    reusable: &'a DeviceSet,
    size: usize,
}

impl Alignment {
    /// The alignment of devices with these NUMA nodes, by device; `None` if kubelet does not align them.
    pub fn new(kubelet: &KubeletTopology, numa: &[Option<u32>]) -> Option<Self> {
        let mut nodes: Vec<u32> = numa.iter().copied().flatten().collect();
        nodes.sort_unstable();
        nodes.dedup();
        // Without any node kubelet has no hints, and takes any device.
        if kubelet.policy == TopologyManagerPolicy::None || nodes.is_empty() || nodes.len() > MAX_NODES {
            return None;
        }
        let mut alignment = Self {
            policy: kubelet.policy,
            scope: kubelet.scope,
            is_assumed: false,
            node_of: Vec::new(),
            nodes,
            numa: Vec::new(),
        };
        alignment.node_of = numa.iter().map(|node| alignment.index_of((*node)?)).collect();
        Some(alignment)
    }

    /// The strictest alignment, for a kubelet that refused a pod and has an unknown configuration; `None` if no NUMA node is
    /// known.
    pub fn assumed(numa: &[Option<u32>]) -> Option<Self> {
        let kubelet = KubeletTopology {
            policy: TopologyManagerPolicy::SingleNumaNode,
            scope: TopologyManagerScope::Pod,
            ..KubeletTopology::default()
        };
        Some(Self { is_assumed: true, ..Self::new(&kubelet, numa)? })
    }

    /// The policy, as refusals name it.
    fn policy(&self) -> String {
        let assumed = if self.is_assumed { ", assumed after a TopologyAffinityError" } else { "" };
        format!("{}{assumed}", self.policy.as_str())
    }

    /// The same with the CPUs and the memory of the machine's NUMA nodes, which the static managers align.
    #[must_use]
    pub fn counting(mut self, numa: &[NumaNode]) -> Self {
        let mut nodes: Vec<u32> =
            self.nodes.iter().copied().chain(numa.iter().map(|node| node.node)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        if !self.refuses() || numa.is_empty() || nodes.len() > MAX_NODES {
            return self;
        }
        self.number(nodes);
        let of_node = |node: &u32| {
            let known = numa.iter().find(|known| known.node == *node).copied();
            known.unwrap_or(NumaNode { node: *node, ..NumaNode::default() })
        };
        self.numa = self.nodes.iter().map(of_node).collect();
        self
    }

    /// Numbers the nodes by their order among `nodes`, which have all of its own.
    fn number(&mut self, nodes: Vec<u32>) {
        let before = std::mem::replace(&mut self.nodes, nodes);
        let number = |index: u8| before.get(usize::from(index)).copied();
        self.node_of = self.node_of.iter().map(|index| self.index_of(number((*index)?)?)).collect();
    }

    /// The same with its nodes numbered by their order among `nodes`, which have all of its own.
    fn numbered(&self, nodes: &[u32]) -> Cow<'_, Self> {
        if self.nodes == nodes {
            return Cow::Borrowed(self);
        }
        let mut alignment = self.clone();
        alignment.number(nodes.to_vec());
        if self.counts_numa() {
            let of_node = |node: &u32| {
                let known = self.numa.iter().find(|known| known.node == *node).copied();
                known.unwrap_or(NumaNode { node: *node, ..NumaNode::default() })
            };
            alignment.numa = nodes.iter().map(of_node).collect();
        }
        Cow::Owned(alignment)
    }

    /// The same where each NUMA node has left what `free` makes of it.
    #[must_use]
    pub fn with_free(&self, free: impl Fn(NumaNode) -> NumaNode) -> Self {
        let mut alignment = self.clone();
        alignment.numa.iter_mut().for_each(|node| *node = free(*node));
        alignment
    }

    /// What counts of the needs of a container: nothing that a manager would give that does not run.
    fn counted_needs(&self) -> impl Fn(&NumaDemand) -> NumaNeeds + use<> {
        let cpus = self.numa.iter().any(|node| node.cpus.total > 0);
        let memory = self.numa.iter().any(|node| node.memory.allocatable > 0);
        move |demand| NumaNeeds {
            cpus: if cpus { demand.needs.cpus } else { 0 },
            memory: if memory { demand.needs.memory } else { 0 },
        }
    }

    /// Whether any of these demands counts here.
    pub fn counts(&self, demands: &[NumaDemand]) -> bool {
        let needs = self.counted_needs();
        demands.iter().any(|demand| !needs(demand).is_none())
    }

    /// Those of these demands that count here.
    pub fn counted(&self, demands: &[NumaDemand]) -> Vec<NumaDemand> {
        if !self.counts(demands) {
            return Vec::new();
        }
        let needs_of = self.counted_needs();
        let mut counted: Vec<NumaDemand> = Vec::new();
        let mut is_first = false;
        for demand in demands {
            let needs = needs_of(demand);
            is_first |= demand.is_first;
            if demand.has_devices || !needs.is_none() {
                counted.push(NumaDemand { needs, is_first: std::mem::take(&mut is_first), ..*demand });
            }
        }
        counted
    }

    fn index_of(&self, node: u32) -> Option<u8> {
        u8::try_from(self.nodes.binary_search(&node).ok()?).ok()
    }

    /// Why kubelet would refuse a pod by the number of its CPUs, whatever is free.
    pub fn refusal_by_cores(&self, ask: &Ask) -> Option<String> {
        let demands = self.counted(&ask.numa);
        let demand = demands.iter().find(|demand| self.splits_core(demand.needs.cpus))?;
        Some(format!(
            "the CPU manager (full-pcpus-only) would refuse {} exclusive CPUs: it gives whole cores, of {} CPUs each",
            demand.needs.cpus,
            self.core()
        ))
    }

    fn core(&self) -> u32 {
        self.numa.iter().map(|node| node.cpus.core).max().unwrap_or(0)
    }

    /// Whether so many CPUs are no whole cores where kubelet gives whole ones.
    fn splits_core(&self, cpus: u32) -> bool {
        let core = self.core();
        core > 1 && !cpus.is_multiple_of(core)
    }

    /// Whether kubelet aligns all containers of a pod together.
    pub fn is_of_pods(&self) -> bool {
        self.scope == TopologyManagerScope::Pod
    }

    /// Whether kubelet fails pods that it cannot align.
    pub fn refuses(&self) -> bool {
        self.policy.refuses()
    }

    /// Whether CPUs or memory count in whether a pod is admitted.
    pub fn counts_numa(&self) -> bool {
        !self.numa.is_empty()
    }

    /// The devices of `free` from which kubelet lets a container of `size` devices have its own; `None` if it refuses
    /// the container.
    pub fn aligned(&self, free: &DeviceSet, size: usize) -> Option<DeviceSet> {
        let nodes =
            self.best_hint(&[self.of_free(free, size)], &NumaState::default(), NumaNeeds::default())?;
        Some(free.iter().filter(|device| self.is_in(*device, nodes)).collect())
    }

    /// What a container may be given of free devices.
    fn of_free<'a>(&'a self, free: &'a DeviceSet, size: usize) -> ContainerDemand<'a> {
        ContainerDemand { alignment: self, available: free, reusable: &NO_DEVICES, size }
    }

    /// Whether kubelet admits a pod with these devices of each block of `ask`, and can be steered to them.
    pub fn admits(&self, free: &DeviceSet, ask: &Ask, blocks: &[DeviceSet]) -> bool {
        PodAlignment::single(self, ask).admits(&[free], &[blocks])
    }

    /// The same with the CPUs and the memory that are left of some NUMA nodes.
    #[must_use]
    pub fn with_left(&self, left: &[NumaNode]) -> Self {
        self.with_free(|node| left.iter().find(|left| left.node == node.node).copied().unwrap_or(node))
    }

    /// The nodes that kubelet aligns a container with; `None` if it refuses the container. The nodes of all resources
    /// have the same numbers.
    fn best_hint(&self, wanted: &[ContainerDemand<'_>], numa: &NumaState, needs: NumaNeeds) -> Option<Nodes> {
        let NumaNeeds { cpus, memory } = needs;
        // What a container does not request has no hints.
        let wanted: Vec<Counts> = wanted.iter().filter(|wanted| wanted.size > 0).map(Counts::of).collect();
        // With devices of one resource only, NUMA nodes without devices make no hint better.
        let counting: Nodes = match &wanted[..] {
            [only] if needs.is_none() => {
                let each = only.all.iter().enumerate().filter(|(_, count)| **count > 0);
                each.fold(0, |nodes, (node, _)| nodes | 1 << node)
            }
            _ => (1 << self.nodes.len()) - 1,
        };
        let masks = || subsets(counting);
        let fewest: Vec<Option<u32>> = wanted.iter().map(|of| fewest_nodes(&of.all, of.size)).collect();
        let least_of_cpus = self.least_nodes(u64::from(cpus), |node| u64::from(node.cpus.total));
        let least_of_memory = self.least_nodes(memory, |node| node.memory.allocatable);
        let hints = masks().filter(|nodes| {
            wanted.iter().all(|counts| counts.are_enough(*nodes))
                && (cpus == 0 || numa.has_cpus(*nodes, cpus))
                && (memory == 0 || numa.has_memory(*nodes, memory))
        });
        let is_preferred = |nodes: Nodes| {
            let count = nodes.count_ones();
            fewest.iter().all(|fewest| *fewest == Some(count))
                && (cpus == 0 || count == least_of_cpus)
                && (memory == 0 || count == least_of_memory)
        };
        let best = hints.max_by_key(|nodes| (is_preferred(*nodes), Reverse((nodes.count_ones(), *nodes))))?;
        let admitted = match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => true,
            TopologyManagerPolicy::Restricted => is_preferred(best),
            TopologyManagerPolicy::SingleNumaNode => is_preferred(best) && best.count_ones() == 1,
        };
        admitted.then_some(best)
    }

    /// How many of some devices each NUMA node has.
    fn count(&self, devices: impl Iterator<Item = usize>) -> [usize; MAX_NODES] {
        let mut counts = [0; MAX_NODES];
        for node in devices.filter_map(|device| self.node_of.get(device).copied().flatten()) {
            if let Some(count) = counts.get_mut(usize::from(node)) {
                *count += 1;
            }
        }
        counts
    }

    /// The fewest NUMA nodes that have so many devices, free or not; `None` if all have fewer.
    fn fewest_nodes(&self, size: usize) -> Option<u32> {
        fewest_nodes(&self.count(0..self.node_of.len()), size)
    }

    /// The fewest NUMA nodes that have so much; all of them if they have less.
    fn least_nodes(&self, needed: u64, has: impl Fn(&NumaNode) -> u64) -> u32 {
        let mut totals: Vec<u64> = self.numa.iter().map(has).collect();
        totals.sort_unstable_by_key(|total| Reverse(*total));
        let mut sum = 0u64;
        let least = totals.iter().position(|total| {
            sum = sum.saturating_add(*total);
            sum >= needed
        });
        u32::try_from(least.map_or(totals.len(), |last| last + 1)).unwrap_or(u32::MAX)
    }

    fn is_in(&self, device: usize, nodes: Nodes) -> bool {
        let node = self.node_of.get(device).copied().flatten();
        node.is_some_and(|node| nodes & (1 << node) != 0)
    }

    /// The NUMA nodes of devices, by number.
    pub fn nodes_of<'a>(&'a self, devices: &'a DeviceSet) -> impl Iterator<Item = u32> + 'a {
        let nodes = self.nodes.iter().enumerate();
        let has_one = move |index: usize| devices.iter().any(|device| self.is_in(device, 1 << index));
        nodes.filter(move |(index, _)| has_one(*index)).map(|(_, node)| *node)
    }

    /// Why kubelet would refuse a container of `size` of the `free` devices, for `kubectl describe pod`.
    pub fn refusal(&self, free: &DeviceSet, size: usize) -> String {
        format!(
            "the Topology Manager ({}) would refuse {size} devices: {} are free by NUMA node",
            self.policy(),
            self.by_node(free)
        )
    }

    /// The same where only CPUs or memory are missing. What is free of them differs on every node, so the text does not have
    /// their numbers: see [`Alignment::free_by_node`].
    pub fn refusal_by_numa(&self, free: &DeviceSet, ask: &Ask) -> String {
        let state = NumaState::of(self);
        let demands = self.counted(&ask.numa);
        let is_refused = |(devices, needs): &(u32, NumaNeeds)| {
            let wanted = self.of_free(free, *devices as usize);
            !needs.is_none() && self.best_hint(&[wanted], &state, *needs).is_none()
        };
        let devices = |demand: &NumaDemand| {
            let container = demand.container.and_then(|index| ask.containers.get(index));
            container.map_or(0, |container| container.devices(&ask.blocks))
        };
        let mut containers = demands.iter().map(|demand| (devices(demand), demand.needs));
        let alone = match self.scope {
            TopologyManagerScope::Container => containers.find(is_refused),
            TopologyManagerScope::Pod => None,
        };
        let (devices, needs) = alone.unwrap_or_else(|| (ask.devices, NumaDemand::of_pod(&demands)));
        format!(
            "the Topology Manager ({}) would refuse {devices} devices with {}",
            self.policy(),
            named(needs).join(" and ")
        )
    }

    /// How many devices, CPUs and MiB of memory are free on each NUMA node.
    pub fn free_by_node(&self, free: &DeviceSet) -> String {
        self.with_free_numa(vec![format!("{} devices", self.by_node(free))])
    }

    /// The same with these texts for the devices.
    fn with_free_numa(&self, mut parts: Vec<String>) -> String {
        let each =
            |of: &dyn Fn(&NumaNode) -> String| self.numa.iter().map(of).collect::<Vec<_>>().join(" + ");
        if self.numa.iter().any(|node| node.cpus.total > 0) {
            parts.push(format!("{} CPUs", each(&|node| node.cpus.free.to_string())));
        }
        if self.numa.iter().any(|node| node.memory.allocatable > 0) {
            parts.push(format!("{} MiB of memory", each(&|node| (node.memory.free / MIB).to_string())));
        }
        let last = parts.pop().unwrap_or_default();
        format!("{} and {last} are free by NUMA node", parts.join(", "))
    }

    fn by_node(&self, free: &DeviceSet) -> String {
        let count =
            |node: usize| free.iter().filter(|device| self.is_in(*device, 1 << node)).count().to_string();
        (0..self.nodes.len()).map(count).collect::<Vec<_>>().join(" + ")
    }
}

/// How many devices of one resource each NUMA node has, and how many a container asks for.
struct Counts {
    all: [usize; MAX_NODES],
    available: [usize; MAX_NODES],
    reusable: [usize; MAX_NODES],
    all_reusable: usize,
    size: usize,
}

impl Counts {
    fn of(wanted: &ContainerDemand<'_>) -> Self {
        let alignment = wanted.alignment;
        Self {
            all: alignment.count(0..alignment.node_of.len()),
            available: alignment.count(wanted.available.iter()),
            reusable: alignment.count(wanted.reusable.iter()),
            all_reusable: wanted.reusable.len(),
            size: wanted.size,
        }
    }

    fn are_enough(&self, nodes: Nodes) -> bool {
        let reused = count_in(&self.reusable, nodes);
        reused == self.all_reusable && reused + count_in(&self.available, nodes) >= self.size
    }
}

/// Needs as texts.
fn named(needs: NumaNeeds) -> Vec<String> {
    let cpus = (needs.cpus > 0).then(|| format!("{} exclusive CPUs", needs.cpus));
    let memory = (needs.memory > 0).then(|| format!("{} MiB of memory", needs.memory.div_ceil(MIB)));
    cpus.into_iter().chain(memory).collect()
}

/// The subsets of a set of nodes but the empty one, ascending.
fn subsets(nodes: Nodes) -> impl Iterator<Item = Nodes> {
    let next = move |subset: Nodes| Some(subset.wrapping_sub(nodes) & nodes).filter(|next| *next != 0);
    std::iter::successors(next(0), move |subset| next(*subset))
}

/// The fewest nodes that have so many devices together; `None` if all have fewer.
fn fewest_nodes(counts: &[usize; MAX_NODES], size: usize) -> Option<u32> {
    let mut counts = *counts;
    counts.sort_unstable_by_key(|count| Reverse(*count));
    let mut sum = 0;
    let last = counts.iter().position(|count| {
        sum += count;
        sum >= size
    })?;
    u32::try_from(last + 1).ok()
}

/// How many devices some nodes have together.
fn count_in(counts: &[usize; MAX_NODES], nodes: Nodes) -> usize {
    let each = counts.iter().enumerate();
    each.filter(|(node, _)| nodes & (1 << *node) != 0).map(|(_, count)| count).sum()
}

const MIB: u64 = 1 << 20;

#[cfg(test)]
mod tests;
