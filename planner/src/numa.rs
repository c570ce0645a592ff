//! Kubelet's Topology Manager for one pool of devices: which NUMA nodes it aligns a container's devices with, and which
//! containers it refuses. Kubelet only offers the plugin the devices of those nodes.
//!
//! The rules are those of kubelet's device manager (hints) and Topology Manager (merge):
//!
//! 1. A hint is a set of NUMA nodes that have enough available devices, and all devices that finished init containers
//!    left. It is preferred if no smaller set has enough devices of the node, held ones included.
//! 2. The best hint is preferred before others, then has the fewest nodes, then the lowest numbers. (With
//!    `prefer-closest-numa-nodes`, several nodes are compared by their distances first, which are not known here. That
//!    changes which devices kubelet takes, not whether it refuses.)
//! 3. `single-numa-node` only takes preferred hints of one node, `restricted` only preferred ones.
//! 4. The scope `pod` aligns the devices of all containers at once.

use std::cmp::Reverse;

use gantry_api::{KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};

use crate::devices::DeviceSet;
use crate::request::{Ask, ContainerAsk};

/// NUMA nodes as a bit mask, by their order among the nodes that have devices.
type Nodes = u16;

/// The most NUMA nodes with devices that are distinguished. Kubelet itself starts with at most 8, unless configured.
const MAX_NODES: usize = 12;

/// The NUMA nodes of a pool's devices under a Topology Manager that aligns them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alignment {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// By device: its node; `None` for a device without one, or that does not exist.
    node_of: Vec<Option<u8>>,
    nodes: u8,
}

/// The devices that a container may be given.
#[derive(Debug, Clone, Copy)]
struct State<'a> {
    available: &'a DeviceSet,
    /// Devices that finished init containers of the pod left.
    reusable: &'a DeviceSet,
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
        let place = |node: u32| u8::try_from(nodes.partition_point(|known| *known < node)).ok();
        Some(Self {
            policy: kubelet.policy,
            scope: kubelet.scope,
            node_of: numa.iter().map(|node| node.and_then(place)).collect(),
            nodes: u8::try_from(nodes.len()).unwrap_or(u8::MAX),
        })
    }

    /// Whether kubelet fails pods that it cannot align.
    pub fn refuses(&self) -> bool {
        matches!(self.policy, TopologyManagerPolicy::Restricted | TopologyManagerPolicy::SingleNumaNode)
    }

    /// The devices of `free` from which kubelet lets a container of `size` devices have its own; `None` if it refuses
    /// the container.
    pub fn aligned(&self, free: &DeviceSet, size: usize) -> Option<DeviceSet> {
        let nodes = self.best_hint(State { available: free, reusable: &DeviceSet::EMPTY }, size)?;
        Some(free.iter().filter(|device| self.is_in(*device, nodes)).collect())
    }

    /// Whether kubelet admits a pod with these devices of each block of `ask`, and can be steered to them.
    pub fn admits(&self, free: &DeviceSet, ask: &Ask, blocks: &[DeviceSet]) -> bool {
        let Some(mut admission) = Admission::new(self, free, ask) else {
            return false;
        };
        while let Some(container) = admission.container() {
            let devices = container.devices_of(blocks);
            let Some(nodes) = admission.nodes() else {
                return false;
            };
            if !devices.iter().all(|device| self.is_in(device, nodes)) {
                return false;
            }
            admission.admit(&devices);
        }
        true
    }

    /// The nodes that kubelet aligns a container with; `None` if it refuses the container.
    fn best_hint(&self, state: State<'_>, size: usize) -> Option<Nodes> {
        let in_all =
            |nodes: Nodes| (0..self.node_of.len()).filter(|device| self.is_in(*device, nodes)).count();
        let masks = || 1..1 << self.nodes;
        let least = masks().filter(|nodes| in_all(*nodes) >= size).map(Nodes::count_ones).min();
        let hints = masks().filter(|nodes| {
            let count = |set: &DeviceSet| set.iter().filter(|device| self.is_in(*device, *nodes)).count();
            let reused = count(state.reusable);
            reused == state.reusable.len() && reused + count(state.available) >= size
        });
        let is_preferred = |nodes: Nodes| Some(nodes.count_ones()) == least;
        let best = hints.max_by_key(|nodes| (is_preferred(*nodes), Reverse((nodes.count_ones(), *nodes))))?;
        let admitted = match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => true,
            TopologyManagerPolicy::Restricted => is_preferred(best),
            TopologyManagerPolicy::SingleNumaNode => is_preferred(best) && best.count_ones() == 1,
        };
        admitted.then_some(best)
    }

    fn is_in(&self, device: usize, nodes: Nodes) -> bool {
        let node = self.node_of.get(device).copied().flatten();
        node.is_some_and(|node| nodes & (1 << node) != 0)
    }

    /// Why kubelet would refuse a container of `size` of the `free` devices, for `kubectl describe pod`.
    pub fn refusal(&self, free: &DeviceSet, size: usize) -> String {
        let by_node: Vec<String> = (0..self.nodes)
            .map(|node| free.iter().filter(|device| self.is_in(*device, 1 << node)).count().to_string())
            .collect();
        format!(
            "the Topology Manager ({}) would refuse {size} devices: {} are free by NUMA node",
            self.policy.as_str(),
            by_node.join(" + ")
        )
    }
}

/// Kubelet's admission of a pod, one container after the other.
#[derive(Debug, Clone)]
pub struct Admission<'a> {
    alignment: &'a Alignment,
    ask: &'a Ask,
    /// The number of containers that are admitted.
    admitted: usize,
    available: DeviceSet,
    /// Devices that finished init containers left.
    reusable: DeviceSet,
    /// The nodes of all containers, in the scope `pod`.
    whole: Option<Nodes>,
}

impl<'a> Admission<'a> {
    /// The admission of a pod on a node with these free devices; `None` if kubelet refuses the pod as a whole.
    pub fn new(alignment: &'a Alignment, free: &DeviceSet, ask: &'a Ask) -> Option<Self> {
        let whole = match alignment.scope {
            TopologyManagerScope::Container => None,
            TopologyManagerScope::Pod => {
                let state = State { available: free, reusable: &DeviceSet::EMPTY };
                Some(alignment.best_hint(state, ask.devices as usize)?)
            }
        };
        let (available, reusable) = (free.clone(), DeviceSet::EMPTY);
        Some(Self { alignment, ask, admitted: 0, available, reusable, whole })
    }

    /// The next container.
    pub fn container(&self) -> Option<&'a ContainerAsk> {
        self.ask.containers.get(self.admitted)
    }

    /// The available devices of each NUMA node that the next container is aligned with; `None` if kubelet refuses it.
    pub fn offered(&self) -> Option<Vec<DeviceSet>> {
        let nodes = self.nodes()?;
        let each = (0..self.alignment.nodes).map(|node| 1 << node).filter(|node| nodes & node != 0);
        let of_node = |node| self.available.iter().filter(move |device| self.alignment.is_in(*device, node));
        Some(each.map(|node| of_node(node).collect()).collect())
    }

    /// The NUMA nodes that the next container is aligned with; `None` if kubelet refuses it.
    fn nodes(&self) -> Option<Nodes> {
        let size = self.container()?.devices(&self.ask.blocks) as usize;
        let state = State { available: &self.available, reusable: &self.reusable };
        self.whole.or_else(|| self.alignment.best_hint(state, size))
    }

    /// Admits the next container with the devices of its blocks. Which of the devices left by init containers it has
    /// in addition is unknown.
    pub fn admit(&mut self, devices: &DeviceSet) {
        let Some(container) = self.container() else {
            return;
        };
        self.admitted += 1;
        self.available.remove(devices);
        // Only an init container returns its devices, to the containers after it.
        let mut later = self.ask.containers.iter().skip(self.admitted);
        let is_left = later.any(|later| {
            later.any_of_held > 0 || container.blocks.iter().any(|block| later.blocks.contains(block))
        });
        if container.any_of_held == 0 {
            self.reusable = if is_left { devices.clone() } else { DeviceSet::EMPTY };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::request::ContainerKind::{self, App, Init, Sidecar};

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

    /// Kubelet's Topology Manager: the best hint, if the policy admits it.
    fn merged(policy: TopologyManagerPolicy, hints: Vec<Hint>) -> Option<Vec<u32>> {
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
            let expected = merged(policy, hints(&numa, &free, &[], size, 3));
            let expected: Option<DeviceSet> = expected
                .map(|nodes| free.iter().copied().filter(|device| nodes.contains(&numa[*device])).collect());
            prop_assert_eq!(alignment.aligned(&free.iter().copied().collect(), size), expected);
        }

        /// Kubelet runs the containers one after the other, takes the devices of finished init containers first, and
        /// otherwise what the plugin prefers of the aligned devices, which is the grant.
        #[test]
        fn admitted_pods_are_never_refused_by_kubelet(
            numa in proptest::collection::vec(0..2u32, 1..9),
            containers in proptest::collection::vec((0..3usize, 1..4u32), 1..4),
            policy in 0..3usize,
            pod_scope in any::<bool>(),
            order in any::<u64>(),
        ) {
            let policy = POLICIES[policy];
            let kinds = [Init, Sidecar, App];
            let mut counts: Vec<(ContainerKind, u32)> =
                containers.into_iter().map(|(kind, count)| (kinds[kind], count)).collect();
            counts.sort_by_key(|(kind, _)| *kind == App);
            let ask = Ask::of_containers("nvidia.com/gpu".into(), &counts);
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
            let alignment = Alignment::new(&kubelet(policy, scope), &known).unwrap();
            let free: DeviceSet = (0..numa.len()).collect();
            if !alignment.admits(&free, &ask, &blocks) {
                return Ok(());
            }
            let mut available: Vec<usize> = (0..numa.len()).collect();
            let mut reusable: Vec<usize> = Vec::new();
            let whole = pod_scope
                .then(|| merged(policy, hints(&numa, &available, &[], ask.devices as usize, 2)).unwrap());
            for ((kind, count), container) in counts.iter().zip(&ask.containers) {
                let nodes = match &whole {
                    Some(nodes) => Some(nodes.clone()),
                    None => merged(policy, hints(&numa, &available, &reusable, *count as usize, 2)),
                };
                let Some(nodes) = nodes else {
                    return Err(TestCaseError::fail("refused"));
                };
                let granted: Vec<usize> =
                    container.blocks.iter().flat_map(|block| blocks[*block].iter().collect::<Vec<_>>()).collect();
                prop_assert!(granted.iter().all(|device| nodes.contains(&numa[*device])), "steered elsewhere");
                available.retain(|device| !granted.contains(device));
                reusable = if *kind == Init { granted } else { Vec::new() };
            }
        }
    }
}
