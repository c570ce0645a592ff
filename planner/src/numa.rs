//! Kubelet's Topology Manager for one pool of devices: which NUMA nodes it aligns a container's devices and CPUs with, and
//! which containers it refuses. Kubelet only offers the plugin the devices of those nodes.
//!
//! The rules are those of kubelet's device manager and static CPU manager (hints) and Topology Manager (merge):
//!
//! 1. A hint is a set of NUMA nodes that have enough available devices, and all devices that finished init containers
//!    left. It is preferred if no smaller set has enough devices of the node, held ones included.
//! 2. The same holds for the CPUs that a container of a Guaranteed pod has for itself alone. Whether a smaller set is
//!    enough is counted by all CPUs of the machine, reserved ones included.
//! 3. The best hint is preferred before others, then has the fewest nodes, then the lowest numbers. A hint of devices
//!    and CPUs is preferred if both prefer it. (With `prefer-closest-numa-nodes`, several nodes are compared by their
//!    distances first, which are not known here. That changes which devices kubelet takes, not whether it refuses.)
//! 4. `single-numa-node` only takes preferred hints of one node, `restricted` only preferred ones. CPUs are counted
//!    under these two policies only: the others refuse no pod.
//! 5. The scope `pod` aligns the devices and CPUs of all containers at once.

use std::cmp::Reverse;

use gantry_api::{GpuNodeStatus, KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};

use crate::devices::DeviceSet;
use crate::request::{Ask, ContainerAsk, ContainerCpus, ContainerKind};

/// NUMA nodes as a bit mask, by their order among the nodes that have devices or counted CPUs.
type Nodes = u16;

/// The most NUMA nodes that are distinguished. Kubelet itself starts with at most 8, unless configured.
const MAX_NODES: usize = GpuNodeStatus::MAX_NUMA_NODES;

/// The CPUs of a NUMA node under kubelet's static CPU manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NumaCpus {
    /// The kernel's number of the node.
    pub node: u32,
    /// CPUs that it has.
    pub total: u32,
    /// CPUs that kubelet may give to one container alone.
    pub allocatable: u32,
    /// Those that no container has alone.
    pub free: u32,
}

/// The NUMA nodes of a pool's devices under a Topology Manager that aligns them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alignment {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// By device: its node; `None` for a device without one, or that does not exist.
    node_of: Vec<Option<u8>>,
    /// The numbers of the nodes, ascending.
    nodes: Vec<u32>,
    /// The CPUs by node; empty if they are not counted.
    cpus: Vec<NumaCpus>,
}

/// What a container may be given.
#[derive(Debug, Clone, Copy)]
struct State<'a> {
    available: &'a DeviceSet,
    /// Devices that finished init containers of the pod left.
    reusable: &'a DeviceSet,
    cpus: &'a [CpuState],
}

/// The CPUs of a NUMA node that a container may be given.
#[derive(Debug, Clone, Copy)]
struct CpuState {
    free: u32,
    /// CPUs that finished init containers of the pod left.
    reusable: u32,
}

impl CpuState {
    fn available(self) -> u32 {
        self.free.saturating_add(self.reusable)
    }
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
            node_of: Vec::new(),
            nodes,
            cpus: Vec::new(),
        };
        alignment.node_of = numa.iter().map(|node| alignment.index_of((*node)?)).collect();
        Some(alignment)
    }

    /// The same with the CPUs of the machine's NUMA nodes, which the static CPU manager aligns.
    #[must_use]
    pub fn counting_cpus(mut self, cpus: &[NumaCpus]) -> Self {
        let mut nodes: Vec<u32> =
            self.nodes.iter().copied().chain(cpus.iter().map(|cpus| cpus.node)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        if !self.refuses() || cpus.is_empty() || nodes.len() > MAX_NODES {
            return self;
        }
        let before = std::mem::replace(&mut self.nodes, nodes);
        let number = |index: u8| before.get(usize::from(index)).copied();
        self.node_of = self.node_of.iter().map(|index| self.index_of(number((*index)?)?)).collect();
        let of_node = |node: &u32| {
            let known = cpus.iter().find(|cpus| cpus.node == *node).copied();
            known.unwrap_or(NumaCpus { node: *node, total: 0, allocatable: 0, free: 0 })
        };
        self.cpus = self.nodes.iter().map(of_node).collect();
        self
    }

    /// The same with so many free CPUs of each NUMA node.
    #[must_use]
    pub fn with_free_cpus(&self, free: impl Fn(&NumaCpus) -> u32) -> Self {
        let mut alignment = self.clone();
        alignment.cpus.iter_mut().for_each(|cpus| cpus.free = free(cpus));
        alignment
    }

    fn index_of(&self, node: u32) -> Option<u8> {
        u8::try_from(self.nodes.binary_search(&node).ok()?).ok()
    }

    /// Whether kubelet fails pods that it cannot align.
    pub fn refuses(&self) -> bool {
        self.policy.refuses()
    }

    /// Whether CPUs count in whether a pod is admitted.
    pub fn counts_cpus(&self) -> bool {
        !self.cpus.is_empty()
    }

    /// The devices of `free` from which kubelet lets a container of `size` devices have its own; `None` if it refuses
    /// the container.
    pub fn aligned(&self, free: &DeviceSet, size: usize) -> Option<DeviceSet> {
        let nodes =
            self.best_hint(State { available: free, reusable: &DeviceSet::EMPTY, cpus: &[] }, size, 0)?;
        Some(free.iter().filter(|device| self.is_in(*device, nodes)).collect())
    }

    /// Whether kubelet admits a pod with these devices of each block of `ask`, and can be steered to them.
    pub fn admits(&self, free: &DeviceSet, ask: &Ask, blocks: &[DeviceSet]) -> bool {
        self.admitted(free, ask, blocks).is_some()
    }

    /// The same once kubelet has admitted a pod; `None` if it does not, see [`Alignment::admits`].
    pub fn after(&self, free: &DeviceSet, ask: &Ask, blocks: &[DeviceSet]) -> Option<Self> {
        let left = self.admitted(free, ask, blocks)?.cpus;
        let mut after = self.clone();
        after.cpus.iter_mut().zip(left).for_each(|(cpus, left)| cpus.free = left.free);
        Some(after)
    }

    fn admitted<'a>(&'a self, free: &DeviceSet, ask: &'a Ask, blocks: &[DeviceSet]) -> Option<Admission<'a>> {
        let mut admission = Admission::new(self, free, ask)?;
        while let Some(container) = admission.container() {
            let devices = container.devices_of(blocks);
            let nodes = admission.nodes()?;
            if !devices.iter().all(|device| self.is_in(device, nodes)) || !admission.admit(&devices) {
                return None;
            }
        }
        Some(admission)
    }

    /// The nodes that kubelet aligns a container with; `None` if it refuses the container.
    fn best_hint(&self, state: State<'_>, size: usize, cpus: u32) -> Option<Nodes> {
        let all = self.count(0..self.node_of.len());
        let (available, reusable) = (self.count(state.available.iter()), self.count(state.reusable.iter()));
        // Without CPUs, NUMA nodes without devices make no hint better.
        let counting: Nodes = match cpus == 0 && size > 0 {
            true => {
                let each = all.iter().enumerate().filter(|(_, count)| **count > 0);
                each.fold(0, |nodes, (node, _)| nodes | 1 << node)
            }
            false => (1 << self.nodes.len()) - 1,
        };
        let masks = || subsets(counting);
        let least = masks().filter(|nodes| count_in(&all, *nodes) >= size).map(Nodes::count_ones).min();
        let least_of_cpus = self.least_nodes_of_cpus(cpus);
        let has_devices = |nodes: Nodes| {
            let reused = count_in(&reusable, nodes);
            reused == state.reusable.len() && reused + count_in(&available, nodes) >= size
        };
        let has_cpus = |nodes: Nodes| {
            let is_in = |node: usize| nodes & (1 << node) != 0;
            let states = || state.cpus.iter().enumerate();
            let inside = states().filter(|(node, _)| is_in(*node));
            inside.map(|(_, cpus)| u64::from(cpus.available())).sum::<u64>() >= u64::from(cpus)
                && states().all(|(node, cpus)| is_in(node) || cpus.reusable == 0)
        };
        // What a container does not request has no hints.
        let hints =
            masks().filter(|nodes| (size == 0 || has_devices(*nodes)) && (cpus == 0 || has_cpus(*nodes)));
        let is_preferred = |nodes: Nodes| {
            let count = nodes.count_ones();
            (size == 0 || Some(count) == least) && (cpus == 0 || count == least_of_cpus)
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

    /// The fewest NUMA nodes that have so many CPUs; all of them if they have fewer.
    fn least_nodes_of_cpus(&self, cpus: u32) -> u32 {
        let mut totals: Vec<u64> = self.cpus.iter().map(|cpus| u64::from(cpus.total)).collect();
        totals.sort_unstable_by_key(|total| Reverse(*total));
        let mut sum = 0;
        let least = totals.iter().position(|total| {
            sum += total;
            sum >= u64::from(cpus)
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
            self.policy.as_str(),
            self.by_node(free)
        )
    }

    /// The same where only CPUs are missing. Free CPUs differ on every node, so the text does not have their numbers: see
    /// [`Alignment::free_by_node`].
    pub fn refusal_by_cpus(&self, free: &DeviceSet, ask: &Ask) -> String {
        let state: Vec<CpuState> = self.cpus.iter().map(CpuState::of).collect();
        let is_refused = |(devices, cpus): &(u32, u32)| {
            let state = State { available: free, reusable: &DeviceSet::EMPTY, cpus: &state };
            *cpus > 0 && self.best_hint(state, *devices as usize, *cpus).is_none()
        };
        let devices = |cpus: &ContainerCpus| {
            let container = cpus.container.and_then(|index| ask.containers.get(index));
            container.map_or(0, |container| container.devices(&ask.blocks))
        };
        let mut containers = ask.cpus.iter().map(|cpus| (devices(cpus), cpus.cpus));
        let alone = match self.scope {
            TopologyManagerScope::Container => containers.find(is_refused),
            TopologyManagerScope::Pod => None,
        };
        let (devices, cpus) = alone.unwrap_or_else(|| (ask.devices, ask.cpus()));
        format!(
            "the Topology Manager ({}) would refuse {devices} devices with {cpus} exclusive CPUs",
            self.policy.as_str()
        )
    }

    /// How many devices and CPUs are free on each NUMA node.
    pub fn free_by_node(&self, free: &DeviceSet) -> String {
        let cpus: Vec<String> = self.cpus.iter().map(|cpus| cpus.free.to_string()).collect();
        format!("{} devices and {} CPUs are free by NUMA node", self.by_node(free), cpus.join(" + "))
    }

    fn by_node(&self, free: &DeviceSet) -> String {
        let count =
            |node: usize| free.iter().filter(|device| self.is_in(*device, 1 << node)).count().to_string();
        (0..self.nodes.len()).map(count).collect::<Vec<_>>().join(" + ")
    }
}

/// The subsets of a set of nodes but the empty one, ascending.
fn subsets(nodes: Nodes) -> impl Iterator<Item = Nodes> {
    let next = move |subset: Nodes| Some(subset.wrapping_sub(nodes) & nodes).filter(|next| *next != 0);
    std::iter::successors(next(0), move |subset| next(*subset))
}

/// How many devices some nodes have together.
fn count_in(counts: &[usize; MAX_NODES], nodes: Nodes) -> usize {
    let each = counts.iter().enumerate();
    each.filter(|(node, _)| nodes & (1 << *node) != 0).map(|(_, count)| count).sum()
}

impl CpuState {
    fn of(cpus: &NumaCpus) -> Self {
        Self { free: cpus.free, reusable: 0 }
    }
}

/// Kubelet's admission of a pod, one container after the other. Containers without devices count for their CPUs.
#[derive(Debug, Clone)]
pub struct Admission<'a> {
    alignment: &'a Alignment,
    ask: &'a Ask,
    /// The number of containers that are admitted, of those that kubelet aligns.
    admitted: usize,
    available: DeviceSet,
    /// Devices that finished init containers left.
    reusable: DeviceSet,
    /// By node; empty if CPUs are not counted.
    cpus: Vec<CpuState>,
    /// The nodes of all containers, in the scope `pod`.
    whole: Option<Nodes>,
}

impl<'a> Admission<'a> {
    /// The admission of a pod on a node with these free devices; `None` if kubelet refuses the pod before a container
    /// with devices.
    pub fn new(alignment: &'a Alignment, free: &DeviceSet, ask: &'a Ask) -> Option<Self> {
        let cpus: Vec<CpuState> = match ask.cpus.is_empty() {
            true => Vec::new(),
            false => alignment.cpus.iter().map(CpuState::of).collect(),
        };
        let (available, reusable) = (free.clone(), DeviceSet::EMPTY);
        let mut admission = Self { alignment, ask, admitted: 0, available, reusable, cpus, whole: None };
        if alignment.scope == TopologyManagerScope::Pod {
            admission.whole = Some(admission.best_hint(ask.devices, ask.cpus())?);
        }
        admission.pass_containers_without_devices().then_some(admission)
    }

    /// The next container with devices.
    pub fn container(&self) -> Option<&'a ContainerAsk> {
        self.ask.containers.get(self.next()?.container?)
    }

    /// The next container that kubelet aligns.
    fn next(&self) -> Option<ContainerCpus> {
        match self.cpus.is_empty() {
            true if self.admitted < self.ask.containers.len() => Some(ContainerCpus::none(self.admitted)),
            true => None,
            false => self.ask.cpus.get(self.admitted).copied(),
        }
    }

    /// The available devices of each NUMA node that the next container is aligned with; `None` if kubelet refuses it.
    pub fn offered(&self) -> Option<Vec<DeviceSet>> {
        let nodes = self.nodes()?;
        let each = (0..self.alignment.nodes.len()).map(|node| 1 << node).filter(|node| nodes & node != 0);
        let of_node = |node| self.available.iter().filter(move |device| self.alignment.is_in(*device, node));
        Some(each.map(|node| of_node(node).collect()).collect())
    }

    /// The NUMA nodes that the next container is aligned with; `None` if kubelet refuses it.
    fn nodes(&self) -> Option<Nodes> {
        let size = self.container().map_or(0, |container| container.devices(&self.ask.blocks));
        let cpus = self.next()?.cpus;
        self.whole.or_else(|| self.best_hint(size, cpus))
    }

    fn best_hint(&self, size: u32, cpus: u32) -> Option<Nodes> {
        let state = State { available: &self.available, reusable: &self.reusable, cpus: &self.cpus };
        self.alignment.best_hint(state, size as usize, if self.cpus.is_empty() { 0 } else { cpus })
    }

    /// Admits the next container with the devices of its blocks, and those without devices that follow it; whether
    /// kubelet does. Which of the devices left by init containers it has in addition is unknown.
    pub fn admit(&mut self, devices: &DeviceSet) -> bool {
        let Some((next, container)) = self.next().zip(self.container()) else {
            return true;
        };
        if !self.take_cpus(next) {
            return false;
        }
        self.available.remove(devices);
        // Only an init container returns its devices, to the containers after it.
        let after = next.container.map_or(0, |index| index + 1);
        let mut later = self.ask.containers.iter().skip(after);
        let is_left = later.any(|later| {
            later.any_of_held > 0 || container.blocks.iter().any(|block| later.blocks.contains(block))
        });
        if container.any_of_held == 0 {
            self.reusable = if is_left { devices.clone() } else { DeviceSet::EMPTY };
        }
        self.advance();
        self.pass_containers_without_devices()
    }

    fn advance(&mut self) {
        self.admitted += 1;
        // What init containers left goes to containers of the same pod.
        if self.next().is_some_and(|next| next.is_first) {
            self.cpus.iter_mut().for_each(|cpus| cpus.reusable = 0);
        }
    }

    fn pass_containers_without_devices(&mut self) -> bool {
        while let Some(next) = self.next().filter(|next| next.container.is_none()) {
            if !self.take_cpus(next) {
                return false;
            }
            self.advance();
        }
        true
    }

    /// Takes the CPUs of a container as kubelet does, as far as their NUMA nodes are concerned: whole nodes first, then of
    /// those with the fewest available. Those that init containers left are taken first.
    fn take_cpus(&mut self, container: ContainerCpus) -> bool {
        if container.cpus == 0 || self.cpus.is_empty() {
            return true;
        }
        let Some(nodes) = self.nodes() else {
            return false;
        };
        let mut by_available: Vec<usize> =
            (0..self.cpus.len()).filter(|node| nodes & (1 << node) != 0).collect();
        by_available.sort_by_key(|node| self.cpus.get(*node).map(|cpus| cpus.available()));
        let mut missing = container.cpus;
        let mut taken = vec![0; self.cpus.len()];
        for whole in [true, false] {
            for node in &by_available {
                let total = self.alignment.cpus.get(*node).map_or(0, |cpus| cpus.total);
                let (Some(cpus), Some(taken)) = (self.cpus.get(*node), taken.get_mut(*node)) else {
                    continue;
                };
                let left = cpus.available() - *taken;
                if whole && (left < total || missing < total) {
                    continue;
                }
                let more = missing.min(left);
                *taken += more;
                missing -= more;
            }
        }
        for (cpus, taken) in self.cpus.iter_mut().zip(taken) {
            let reused = taken.min(cpus.reusable);
            cpus.free -= taken - reused;
            match container.kind {
                ContainerKind::Init => cpus.reusable += taken - reused,
                ContainerKind::Sidecar | ContainerKind::App => cpus.reusable -= reused,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::request::ContainerKind::{App, Init, Sidecar};
    use crate::request::{Container, CpuAndMemory, Request};

    fn kubelet(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> KubeletTopology {
        KubeletTopology { policy, scope, ..KubeletTopology::default() }
    }

    /// Four devices on each of two NUMA nodes.
    fn halves(policy: TopologyManagerPolicy) -> Alignment {
        let numa: Vec<Option<u32>> = (0..8).map(|device| Some(device / 4)).collect();
        Alignment::new(&kubelet(policy, TopologyManagerScope::Container), &numa).unwrap()
    }

    fn set(text: &str) -> DeviceSet {
        DeviceSet::from(text.parse::<gantry_topology::GpuSet>().unwrap())
    }

    #[test]
    fn single_numa_node_refuses_what_spans_two() {
        let alignment = halves(TopologyManagerPolicy::SingleNumaNode);
        assert_eq!(alignment.aligned(&set("0-7"), 5), None);
        assert_eq!(alignment.aligned(&set("0-7"), 4), Some(set("0-3")));
        assert_eq!(alignment.aligned(&set("0,1,4-7"), 3), Some(set("4-7")));
        assert_eq!(alignment.aligned(&set("0,1,4,5"), 3), None);
        insta::assert_snapshot!(alignment.refusal(&set("0,1,4,5"), 3), @"the Topology Manager (single-numa-node) would refuse 3 devices: 2 + 2 are free by NUMA node");
    }

    #[test]
    fn restricted_refuses_more_nodes_than_an_empty_node_needs() {
        let alignment = halves(TopologyManagerPolicy::Restricted);
        assert_eq!(alignment.aligned(&set("0-7"), 5), Some(set("0-7")));
        assert_eq!(alignment.aligned(&set("0,1,4,5"), 3), None);
        let lenient = halves(TopologyManagerPolicy::BestEffort);
        assert_eq!(lenient.aligned(&set("0,1,4,5"), 3), Some(set("0,1,4,5")));
    }

    /// Four devices on each of two NUMA nodes, of which the first has 2 free CPUs and the second 6, of 8 each.
    fn with_cpus(policy: TopologyManagerPolicy) -> Alignment {
        let cpus = |node, free| NumaCpus { node, total: 8, allocatable: 8, free };
        halves(policy).counting_cpus(&[cpus(0, 2), cpus(1, 6)])
    }

    /// The GPUs of both nodes are free; the CPUs decide.
    #[test]
    fn devices_lie_where_the_cpus_are_free() {
        let alignment = with_cpus(TopologyManagerPolicy::SingleNumaNode);
        let admits = |containers: &[(ContainerKind, u32, u32)], devices: &str| {
            let ask = ask(containers);
            let mut devices = set(devices).iter().collect::<Vec<_>>().into_iter();
            let blocks: Vec<DeviceSet> =
                ask.blocks.iter().map(|size| devices.by_ref().take(*size as usize).collect()).collect();
            alignment.admits(&set("0-7"), &ask, &blocks)
        };
        assert!(admits(&[(App, 2, 2)], "0,1"));
        assert!(!admits(&[(App, 2, 3)], "0,1"));
        assert!(admits(&[(App, 2, 3)], "4,5"));
        assert!(!admits(&[(App, 2, 7)], "4,5"));
        // Part of a CPU is shared, and aligned by nothing.
        assert!(admits(&[(App, 2, 0), (App, 2, 0)], "0-3"));
        // The first container has the CPUs that the second one misses.
        assert!(!admits(&[(App, 0, 4), (App, 2, 3)], "4,5"));
        assert!(admits(&[(Init, 0, 4), (App, 2, 3)], "4,5"));
        assert!(!admits(&[(Sidecar, 0, 4), (App, 2, 3)], "4,5"));
    }

    #[test]
    fn restricted_wants_one_set_of_nodes_for_both() {
        let alignment = with_cpus(TopologyManagerPolicy::Restricted);
        let offered = |devices, cpus| {
            let ask = ask(&[(App, devices, cpus)]);
            Admission::new(&alignment, &set("0-7"), &ask)?.offered().map(|nodes| nodes.len())
        };
        // Eight devices lie on two nodes, of which eight CPUs need one only.
        assert_eq!(offered(8, 8), None);
        assert_eq!(offered(8, 9), None);
        assert_eq!(offered(4, 6), Some(1));
        let alignment = alignment.with_free_cpus(|cpus| cpus.allocatable);
        let ask = ask(&[(App, 8, 9)]);
        assert_eq!(Admission::new(&alignment, &set("0-7"), &ask).unwrap().offered().unwrap().len(), 2);
    }

    #[test]
    fn cpus_left_after_admission_are_counted() {
        let alignment = with_cpus(TopologyManagerPolicy::SingleNumaNode);
        let after = alignment.after(&set("0-7"), &ask(&[(App, 1, 4)]), &[set("4")]).unwrap();
        let free: Vec<u32> = after.cpus.iter().map(|cpus| cpus.free).collect();
        assert_eq!(free, [2, 2]);
        insta::assert_snapshot!(after.refusal_by_cpus(&set("0-3,5-7"), &ask(&[(App, 2, 3)])), @"the Topology Manager (single-numa-node) would refuse 2 devices with 3 exclusive CPUs");
        insta::assert_snapshot!(after.free_by_node(&set("0-3,5-7")), @"4 + 3 devices and 2 + 2 CPUs are free by NUMA node");
    }

    #[test]
    fn cpus_count_under_refusing_policies_only() {
        assert!(!with_cpus(TopologyManagerPolicy::BestEffort).counts_cpus());
        assert!(with_cpus(TopologyManagerPolicy::Restricted).counts_cpus());
    }

    /// The plugin publishes the CPUs of as many NUMA nodes as are counted.
    #[test]
    fn cpus_of_all_published_nodes_are_counted() {
        let most = u32::try_from(GpuNodeStatus::MAX_NUMA_NODES).unwrap();
        let count = |nodes: u32| {
            let cpus = (0..nodes).map(|node| NumaCpus { node, total: 4, allocatable: 4, free: 4 });
            halves(TopologyManagerPolicy::Restricted).counting_cpus(&cpus.collect::<Vec<_>>()).counts_cpus()
        };
        assert!(count(most));
        assert!(!count(most + 1));
    }

    #[test]
    fn devices_without_nodes_are_not_aligned() {
        let kubelet = kubelet(TopologyManagerPolicy::SingleNumaNode, TopologyManagerScope::Container);
        assert_eq!(Alignment::new(&kubelet, &[None, None]), None);
        assert_eq!(Alignment::new(&KubeletTopology::default(), &[Some(0)]), None);
    }

    /// A hint of kubelet: NUMA nodes and whether it is preferred.
    #[derive(Debug, Clone, PartialEq)]
    struct Hint {
        nodes: Vec<u32>,
        preferred: bool,
    }

    /// Kubelet's device manager: `generateDeviceTopologyHints`, over the NUMA nodes of the machine.
    fn hints(
        numa: &[u32],
        available: &[usize],
        reusable: &[usize],
        request: usize,
        machine: u32,
    ) -> Vec<Hint> {
        let mut hints: Vec<Hint> = Vec::new();
        let mut least = machine as usize;
        for mask in 1..1u32 << machine {
            let nodes: Vec<u32> = (0..machine).filter(|node| mask >> node & 1 == 1).collect();
            let inside = |device: &usize| nodes.contains(&numa[*device]);
            if (0..numa.len()).filter(inside).count() >= request {
                least = least.min(nodes.len());
            }
            if !reusable.iter().all(&inside) {
                continue;
            }
            let matching = reusable.len() + available.iter().filter(|device| inside(device)).count();
            if matching >= request {
                hints.push(Hint { nodes, preferred: false });
            }
        }
        for hint in &mut hints {
            hint.preferred = hint.nodes.len() == least;
        }
        hints
    }

    /// Kubelet's CPU manager: `generateCPUTopologyHints`. A CPU is its NUMA node.
    fn cpu_hints(all: &[u32], available: &[u32], reusable: &[u32], request: u32, machine: u32) -> Vec<Hint> {
        let ids: Vec<u32> = [all, available, reusable].concat();
        let range = |from: usize, count: usize| (from..from + count).collect::<Vec<usize>>();
        // As for devices, which are `all` only where the fewest nodes are counted.
        let mut hints: Vec<Hint> = hints(
            &ids,
            &range(all.len(), available.len()),
            &range(all.len() + available.len(), reusable.len()),
            request as usize,
            machine,
        );
        let inside = |nodes: &[u32]| all.iter().filter(|node| nodes.contains(node)).count();
        let sets =
            (1..1u32 << machine).map(|mask| (0..machine).filter(|node| mask >> node & 1 == 1).collect());
        let enough = sets.filter(|nodes: &Vec<u32>| inside(nodes) >= request as usize);
        let least = enough.map(|nodes| nodes.len()).min().unwrap_or(machine as usize);
        hints.iter_mut().for_each(|hint| hint.preferred = hint.nodes.len() == least);
        hints
    }

    /// `mergePermutation` over one hint of each provider. A provider without an interest in the container is `None`.
    fn permutations(providers: &[Option<Vec<Hint>>]) -> Vec<Hint> {
        let interested: Vec<&Vec<Hint>> = providers.iter().flatten().collect();
        let [first, rest @ ..] = &interested[..] else {
            return Vec::new();
        };
        let mut merged = (*first).clone();
        for provider in rest {
            let pairs = merged.iter().flat_map(|a| provider.iter().map(move |b| (a, b)));
            merged = pairs
                .map(|(a, b)| Hint {
                    nodes: a.nodes.iter().copied().filter(|node| b.nodes.contains(node)).collect(),
                    preferred: a.preferred && b.preferred && a.nodes == b.nodes,
                })
                .filter(|hint| !hint.nodes.is_empty())
                .collect();
        }
        merged
    }

    /// Kubelet's Topology Manager: the best hint, if the policy admits it.
    fn merged(policy: TopologyManagerPolicy, providers: &[Option<Vec<Hint>>]) -> Option<Vec<u32>> {
        let hints = permutations(providers);
        let single = policy == TopologyManagerPolicy::SingleNumaNode;
        let mut best: Option<Hint> = None;
        for hint in hints {
            if single && !(hint.preferred && hint.nodes.len() == 1) {
                continue;
            }
            let narrower = |than: &Hint| {
                hint.nodes.len() < than.nodes.len()
                    || (hint.nodes.len() == than.nodes.len()
                        && hint.nodes.iter().rev().lt(than.nodes.iter().rev()))
            };
            let better = match &best {
                None => true,
                Some(best) if best.preferred != hint.preferred => hint.preferred,
                Some(best) => narrower(best),
            };
            if better {
                best = Some(hint);
            }
        }
        let best = best?;
        (policy == TopologyManagerPolicy::BestEffort || best.preferred).then_some(best.nodes)
    }

    const POLICIES: [TopologyManagerPolicy; 3] = [
        TopologyManagerPolicy::BestEffort,
        TopologyManagerPolicy::Restricted,
        TopologyManagerPolicy::SingleNumaNode,
    ];

    proptest! {
        #[test]
        fn aligned_devices_match_kubelets_hint_merge(
            numa in proptest::collection::vec(0..3u32, 1..9),
            free in any::<u8>(),
            size in 1..9usize,
            policy in 0..3usize,
        ) {
            let policy = POLICIES[policy];
            let free: Vec<usize> = (0..numa.len()).filter(|device| free >> device & 1 == 1).collect();
            let known: Vec<Option<u32>> = numa.iter().copied().map(Some).collect();
            let kubelet = kubelet(policy, TopologyManagerScope::Container);
            let alignment = Alignment::new(&kubelet, &known).unwrap();
            let expected = merged(policy, &[Some(hints(&numa, &free, &[], size, 3))]);
            let expected: Option<DeviceSet> = expected
                .map(|nodes| free.iter().copied().filter(|device| nodes.contains(&numa[*device])).collect());
            prop_assert_eq!(alignment.aligned(&free.iter().copied().collect(), size), expected);
        }

        /// A container without exclusive CPUs, on a machine with NUMA nodes that have CPUs and no devices.
        #[test]
        fn nodes_without_devices_change_no_hint(
            numa in proptest::collection::vec(0..4u32, 1..9),
            free in any::<u8>(),
            size in 1..9usize,
            single in any::<bool>(),
        ) {
            let free: DeviceSet = (0..numa.len()).filter(|device| free >> device & 1 == 1).collect();
            let known: Vec<Option<u32>> = numa.iter().map(|node| Some(node * 2 + 1)).collect();
            let kubelet = kubelet(POLICIES[1 + usize::from(single)], TopologyManagerScope::Container);
            let alignment = Alignment::new(&kubelet, &known).unwrap();
            let cpus: Vec<NumaCpus> =
                (0..9).map(|node| NumaCpus { node, total: 4, allocatable: 4, free: 0 }).collect();
            let counting = alignment.clone().counting_cpus(&cpus);
            prop_assert!(counting.counts_cpus());
            prop_assert_eq!(counting.aligned(&free, size), alignment.aligned(&free, size));
        }

        /// One container of devices and CPUs, on a machine of three NUMA nodes.
        #[test]
        fn aligned_cpus_match_kubelets_hint_merge(
            numa in proptest::collection::vec(0..3u32, 1..7),
            free in any::<u8>(),
            size in 1..5usize,
            totals in proptest::array::uniform3(0..5u32),
            reserved in proptest::array::uniform3(0..3u32),
            held in proptest::array::uniform3(0..5u32),
            cpus in 0..9u32,
            single in any::<bool>(),
        ) {
            let policy = POLICIES[1 + usize::from(single)];
            let free: DeviceSet = (0..numa.len()).filter(|device| free >> device & 1 == 1).collect();
            let known: Vec<Option<u32>> = numa.iter().copied().map(Some).collect();
            let machine: Vec<NumaCpus> = machine(totals, reserved, held);
            let kubelet = kubelet(policy, TopologyManagerScope::Container);
            let alignment = Alignment::new(&kubelet, &known).unwrap().counting_cpus(&machine);
            let ask = ask(&[(App, u32::try_from(size).unwrap(), cpus)]);
            let available: Vec<usize> = free.iter().collect();
            let expected = merged(policy, &[
                Some(hints(&numa, &available, &[], size, 3)),
                (cpus > 0).then(|| cpu_hints(&by_node(&machine, |cpus| cpus.total), &by_node(&machine, |cpus| cpus.free), &[], cpus, 3)),
            ]);
            let offered = Admission::new(&alignment, &free, &ask).and_then(|admission| admission.offered());
            let offered: Option<DeviceSet> = offered.map(|nodes| nodes.iter().flat_map(|node| node.iter().collect::<Vec<_>>()).collect());
            let expected: Option<DeviceSet> =
                expected.map(|nodes| free.iter().filter(|device| nodes.contains(&numa[*device])).collect());
            prop_assert_eq!(offered, expected);
        }

        /// Kubelet runs the containers one after the other, takes the devices and CPUs of finished init containers first,
        /// and otherwise what the plugin prefers of the aligned devices, which is the grant.
        #[test]
        fn admitted_pods_are_never_refused_by_kubelet(
            numa in proptest::collection::vec(0..2u32, 1..9),
            containers in proptest::collection::vec((0..3usize, 0..4u32, 0..4u32), 1..4),
            totals in proptest::array::uniform3(0..7u32),
            reserved in proptest::array::uniform3(0..2u32),
            counted in any::<bool>(),
            policy in 0..3usize,
            pod_scope in any::<bool>(),
            order in any::<u64>(),
        ) {
            let policy = POLICIES[policy];
            let kinds = [Init, Sidecar, App];
            let mut counts: Vec<(ContainerKind, u32, u32)> =
                containers.into_iter().map(|(kind, count, cpus)| (kinds[kind], count, cpus)).collect();
            counts.sort_by_key(|(kind, ..)| *kind == App);
            let ask = ask(&counts);
            if ask.devices as usize > numa.len() || ask.containers.iter().any(|one| one.any_of_held > 0) {
                return Ok(());
            }
            // Any grant of free devices, by rotation.
            let from = usize::try_from(order % 8).unwrap() % numa.len();
            let mut next = (0..numa.len()).map(|at| (at + from) % numa.len());
            let blocks: Vec<DeviceSet> =
                ask.blocks.iter().map(|size| next.by_ref().take(*size as usize).collect()).collect();
            let scope = if pod_scope { TopologyManagerScope::Pod } else { TopologyManagerScope::Container };
            let known: Vec<Option<u32>> = numa.iter().copied().map(Some).collect();
            let machine = machine(totals, reserved, [0; 3]);
            let counted = counted && policy != TopologyManagerPolicy::BestEffort;
            let alignment = Alignment::new(&kubelet(policy, scope), &known).unwrap();
            let alignment = if counted { alignment.counting_cpus(&machine) } else { alignment };
            let free: DeviceSet = (0..numa.len()).collect();
            if ask.containers.is_empty() || !alignment.admits(&free, &ask, &blocks) {
                return Ok(());
            }
            let all_cpus = by_node(&machine, |cpus| cpus.total);
            let mut cpus = by_node(&machine, |cpus| cpus.free);
            let mut reusable_cpus: Vec<u32> = Vec::new();
            let mut available: Vec<usize> = (0..numa.len()).collect();
            let mut reusable: Vec<usize> = Vec::new();
            let of_cpus = |request: u32, free: &[u32], reusable: &[u32]| {
                (counted && request > 0).then(|| cpu_hints(&all_cpus, free, reusable, request, 3))
            };
            let of_devices = |request: usize, free: &[usize], reusable: &[usize]| {
                (request > 0).then(|| hints(&numa, free, reusable, request, 3))
            };
            let whole = pod_scope.then(|| {
                let devices = of_devices(ask.devices as usize, &available, &[]);
                merged(policy, &[devices, of_cpus(ask.cpus(), &cpus, &[])]).unwrap()
            });
            let mut asking = ask.containers.iter();
            for (kind, count, request) in &counts {
                if *count == 0 && (!counted || *request == 0) {
                    continue;
                }
                let nodes = match &whole {
                    Some(nodes) => Some(nodes.clone()),
                    None => merged(policy, &[
                        of_devices(*count as usize, &available, &reusable),
                        of_cpus(*request, &cpus, &reusable_cpus),
                    ]),
                };
                let Some(nodes) = nodes else {
                    return Err(TestCaseError::fail("refused"));
                };
                if counted {
                    let (taken, reused) = take(*request, &nodes, &all_cpus, &mut cpus, &mut reusable_cpus);
                    prop_assert_eq!(taken.len() + reused.len(), *request as usize, "too few CPUs");
                    if *kind == Init {
                        reusable_cpus.extend(taken.iter().chain(&reused));
                    }
                }
                if *count == 0 {
                    continue;
                }
                let container = asking.next().unwrap();
                let granted: Vec<usize> =
                    container.blocks.iter().flat_map(|block| blocks[*block].iter().collect::<Vec<_>>()).collect();
                prop_assert!(granted.iter().all(|device| nodes.contains(&numa[*device])), "steered elsewhere");
                available.retain(|device| !granted.contains(device));
                reusable = if *kind == Init { granted } else { Vec::new() };
            }
        }
    }

    /// The CPUs of three NUMA nodes, of which some are reserved and others held.
    fn machine(totals: [u32; 3], reserved: [u32; 3], held: [u32; 3]) -> Vec<NumaCpus> {
        let of_node = |node: u32| {
            let at = node as usize;
            let allocatable = totals[at].saturating_sub(reserved[at]);
            NumaCpus { node, total: totals[at], allocatable, free: allocatable.saturating_sub(held[at]) }
        };
        (0..3).map(of_node).collect()
    }

    /// The node of each CPU.
    fn by_node(machine: &[NumaCpus], count: impl Fn(&NumaCpus) -> u32) -> Vec<u32> {
        machine.iter().flat_map(|cpus| (0..count(cpus)).map(|_| cpus.node)).collect()
    }

    /// Containers with devices and exclusive CPUs.
    fn ask(containers: &[(ContainerKind, u32, u32)]) -> Ask {
        let names: Vec<String> = (0..containers.len()).map(|number| format!("c{number}")).collect();
        let devices: Vec<String> = containers.iter().map(|(_, devices, _)| devices.to_string()).collect();
        let cpus: Vec<String> = containers
            .iter()
            .map(|(.., cpus)| if *cpus == 0 { "500m".to_owned() } else { cpus.to_string() })
            .collect();
        let resources = ["nvidia.com/gpu".into()];
        let asking = |_| {
            let each = names.iter().zip(containers).zip(&devices);
            each.map(|((name, (kind, ..)), devices)| Container {
                name,
                kind: *kind,
                quantity: Some(devices.as_str()),
            })
        };
        let each = names.iter().zip(containers).zip(&cpus).map(|((name, (kind, ..)), cpus)| CpuAndMemory {
            name,
            kind: *kind,
            cpu: (Some(cpus.as_str()), Some(cpus.as_str())),
            memory: (Some("1Gi"), None),
        });
        let mut request = Request::read(&resources, asking).unwrap().with_cpus(&each);
        request.asks.pop().unwrap_or_else(|| Ask::of_containers("nvidia.com/gpu".into(), &[]))
    }

    /// Takes CPUs of these nodes as kubelet does: whole nodes, then of those with the fewest; those that are left by init
    /// containers first. Returns the new ones and the others.
    fn take(
        request: u32,
        nodes: &[u32],
        all: &[u32],
        free: &mut Vec<u32>,
        reusable: &mut Vec<u32>,
    ) -> (Vec<u32>, Vec<u32>) {
        let count = |cpus: &[u32], node: u32| cpus.iter().filter(|cpu| **cpu == node).count();
        let left = |free: &[u32], reusable: &[u32], node| count(free, node) + count(reusable, node);
        let mut order = nodes.to_vec();
        order.sort_by_key(|node| (left(free, reusable, *node), *node));
        let (mut new, mut reused) = (Vec::new(), Vec::new());
        for whole in [true, false] {
            for node in &order {
                let missing = request as usize - new.len() - reused.len();
                let is_whole =
                    left(free, reusable, *node) == count(all, *node) && missing >= count(all, *node);
                if whole && !is_whole {
                    continue;
                }
                for _ in 0..missing {
                    for (from, to) in [(&mut *reusable, &mut reused), (&mut *free, &mut new)] {
                        if let Some(at) = from.iter().position(|cpu| cpu == node) {
                            to.push(from.remove(at));
                            break;
                        }
                    }
                }
            }
        }
        (new, reused)
    }
}
