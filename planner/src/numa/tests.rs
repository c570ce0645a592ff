mod pods;

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::request::ContainerKind;
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

/// The devices of each NUMA node that the first container is aligned with.
fn offered(alignment: &Alignment, free: &DeviceSet, ask: &Ask) -> Option<Vec<DeviceSet>> {
    PodAlignment::single(alignment, ask).admission(&[free])?.offered(0)
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

/// Of eight CPUs so many are free.
fn cpus(node: u32, free: u32) -> NumaNode {
    let cpus = NumaCpus { total: 8, allocatable: 8, free, ..NumaCpus::default() };
    NumaNode { node, cpus, ..NumaNode::default() }
}

/// Four devices on each of two NUMA nodes, of which the first has 2 free CPUs and the second 6, of 8 each.
fn with_cpus(policy: TopologyManagerPolicy) -> Alignment {
    halves(policy).counting(&[cpus(0, 2), cpus(1, 6)])
}

/// Of 8 GiB of memory so many are free.
fn memory(node: u32, free: u64) -> NumaNode {
    let memory = NumaMemory { allocatable: 8 << 30, free: free << 30, ..NumaMemory::default() };
    NumaNode { node, memory, ..NumaNode::default() }
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
    let nodes = |devices, cpus| {
        let ask = ask(&[(App, devices, cpus)]);
        Some(offered(&alignment, &set("0-7"), &ask)?.len())
    };
    // Eight devices lie on two nodes, of which eight CPUs need one only.
    assert_eq!(nodes(8, 8), None);
    assert_eq!(nodes(8, 9), None);
    assert_eq!(nodes(4, 6), Some(1));
    let alignment = alignment.with_free(NumaNode::unoccupied);
    let ask = ask(&[(App, 8, 9)]);
    assert_eq!(offered(&alignment, &set("0-7"), &ask).unwrap().len(), 2);
}

/// A Guaranteed pod always needs memory, which counts where kubelet's memory manager is static.
#[test]
fn demands_count_where_their_manager_runs() {
    let policy = TopologyManagerPolicy::SingleNumaNode;
    let of_memory = halves(policy).counting(&[memory(0, 8), memory(1, 8)]);
    let [shared, exclusive] = [0, 2].map(|cpus| ask(&[(App, 2, cpus)]).numa);
    assert!(!with_cpus(policy).counts(&shared) && with_cpus(policy).counted(&shared).is_empty());
    assert!(with_cpus(policy).counts(&exclusive));
    assert!(of_memory.counts(&shared) && !halves(policy).counts(&exclusive));
}

#[test]
fn whole_cores_are_asked_for_where_kubelet_gives_no_others() {
    let of_cores = |node: NumaNode| NumaNode { cpus: NumaCpus { core: 2, ..node.cpus }, ..node };
    let alignment = with_cpus(TopologyManagerPolicy::SingleNumaNode).with_free(of_cores);
    let [even, odd] = [2, 3].map(|cpus| ask(&[(App, 2, cpus)]));
    assert!(alignment.admits(&set("0-7"), &even, &[set("0,1")]));
    assert!(!alignment.admits(&set("0-7"), &odd, &[set("4,5")]));
    assert_eq!(alignment.refusal_by_cores(&even), None);
    insta::assert_snapshot!(alignment.refusal_by_cores(&odd).unwrap(), @"the CPU manager (full-pcpus-only) would refuse 3 exclusive CPUs: it gives whole cores, of 2 CPUs each");
}

#[test]
fn cpus_left_after_admission_are_counted() {
    let alignment = with_cpus(TopologyManagerPolicy::SingleNumaNode);
    let one = ask(&[(App, 1, 4)]);
    let left = PodAlignment::single(&alignment, &one).left(&[&set("0-7")], &[&[set("4")]]).unwrap();
    let after = alignment.with_left(&left);
    let free: Vec<u32> = after.numa.iter().map(|node| node.cpus.free).collect();
    assert_eq!(free, [2, 2]);
    insta::assert_snapshot!(after.refusal_by_numa(&set("0-3,5-7"), &ask(&[(App, 2, 3)])), @"the Topology Manager (single-numa-node) would refuse 2 devices with 3 exclusive CPUs");
    insta::assert_snapshot!(after.free_by_node(&set("0-3,5-7")), @"4 + 3 devices and 2 + 2 CPUs are free by NUMA node");
}

#[test]
fn cpus_count_under_refusing_policies_only() {
    assert!(!with_cpus(TopologyManagerPolicy::BestEffort).counts_numa());
    assert!(with_cpus(TopologyManagerPolicy::Restricted).counts_numa());
}

/// Of the second node's memory others have a part, and a container has that of both nodes of the other machine.
#[test]
fn devices_lie_where_the_memory_is_free() {
    let single = halves(TopologyManagerPolicy::SingleNumaNode).counting(&[memory(0, 2), memory(1, 6)]);
    let admits = |alignment: &Alignment, gib: u64, devices: &str| {
        let ask = ask_with_memory(&[(App, 2, 0, gib)]);
        alignment.admits(&set("0-7"), &ask, &[set(devices)])
    };
    assert!(admits(&single, 2, "0,1"));
    assert!(!admits(&single, 3, "0,1"));
    assert!(admits(&single, 3, "4,5"));
    assert!(!admits(&single, 7, "4,5"));
    let ask = ask_with_memory(&[(App, 2, 0, 7)]);
    insta::assert_snapshot!(single.refusal_by_numa(&set("0-7"), &ask), @"the Topology Manager (single-numa-node) would refuse 2 devices with 7168 MiB of memory");
    insta::assert_snapshot!(single.free_by_node(&set("0-7")), @"4 + 4 devices and 2048 + 6144 MiB of memory are free by NUMA node");
    let both = |node: NumaNode| {
        let group = [0, 1].into_iter().collect();
        NumaNode { memory: NumaMemory { group, ..node.memory }, ..node }
    };
    let grouped =
        halves(TopologyManagerPolicy::Restricted).counting(&[both(memory(0, 2)), both(memory(1, 6))]);
    assert!(!admits(&grouped, 1, "0,1"));
    let ask = ask_with_memory(&[(App, 8, 0, 9)]);
    assert!(!grouped.admits(&set("0-7"), &ask, &[set("0-7")]));
    let empty = grouped.with_free(NumaNode::unoccupied);
    assert!(empty.admits(&set("0-7"), &ask, &[set("0-7")]));
}

/// The plugin publishes the CPUs of as many NUMA nodes as are counted.
#[test]
fn cpus_of_all_published_nodes_are_counted() {
    let most = u32::try_from(GpuNodeStatus::MAX_NUMA_NODES).unwrap();
    let count = |nodes: u32| {
        let nodes = (0..nodes).map(|node| cpus(node, 4));
        halves(TopologyManagerPolicy::Restricted).counting(&nodes.collect::<Vec<_>>()).counts_numa()
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
fn hints(numa: &[u32], available: &[usize], reusable: &[usize], request: usize, machine: u32) -> Vec<Hint> {
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
    let sets = (1..1u32 << machine).map(|mask| (0..machine).filter(|node| mask >> node & 1 == 1).collect());
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
        let nodes: Vec<NumaNode> = (0..9).map(|node| cpus(node, 0)).collect();
        let counting = alignment.clone().counting(&nodes);
        prop_assert!(counting.counts_numa());
        prop_assert_eq!(counting.aligned(&free, size), alignment.aligned(&free, size));
    }

    /// One container of devices, CPUs and memory, on a machine of three NUMA nodes.
    #[test]
    fn aligned_cpus_and_memory_match_kubelets_hint_merge(
        numa in proptest::collection::vec(0..3u32, 1..7),
        free in any::<u8>(),
        size in 1..5usize,
        totals in proptest::array::uniform3(0..5u32),
        reserved in proptest::array::uniform3(0..3u32),
        held in proptest::array::uniform3(0..5u32),
        cpus in 0..9u32,
        memory in proptest::option::of(proptest::array::uniform3(0..6u64)),
        others in proptest::collection::vec((any::<u8>(), 1..8u64), 0..4),
        needed in 1..9u64,
        single in any::<bool>(),
    ) {
        let policy = POLICIES[1 + usize::from(single)];
        let free: DeviceSet = (0..numa.len()).filter(|device| free >> device & 1 == 1).collect();
        let known: Vec<Option<u32>> = numa.iter().copied().map(Some).collect();
        let memory = memory.filter(|memory| memory.iter().any(|node| *node > 0));
        let memory = memory.map(|allocatable| KubeletMemory::with(allocatable, &others));
        let cpus_known: Vec<NumaNode> = machine(totals, reserved, held);
        let machine = memory.as_ref().map_or(cpus_known.clone(), |memory| memory.published(&cpus_known));
        let cpus = if totals.iter().sum::<u32>() == 0 { 0 } else { cpus };
        let kubelet = kubelet(policy, TopologyManagerScope::Container);
        let alignment = Alignment::new(&kubelet, &known).unwrap().counting(&machine);
        let ask = ask_with_memory(&[(App, u32::try_from(size).unwrap(), cpus, needed)]);
        let available: Vec<usize> = free.iter().collect();
        let expected = merged(policy, &[
            Some(hints(&numa, &available, &[], size, 3)),
            (cpus > 0).then(|| cpu_hints(&by_node(&machine, |cpus| cpus.total), &by_node(&machine, |cpus| cpus.free), &[], cpus, 3)),
            memory.map(|memory| memory.hints(needed)),
        ]);
        let offered = offered(&alignment, &free, &ask);
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
        containers in proptest::collection::vec((0..3usize, 0..4u32, 0..4u32, 1..4u64), 1..4),
        totals in proptest::array::uniform3(0..7u32),
        reserved in proptest::array::uniform3(0..2u32),
        counted in any::<bool>(),
        memory in proptest::option::of(proptest::array::uniform3(1..6u64)),
        others in proptest::collection::vec((any::<u8>(), 1..8u64), 0..3),
        policy in 0..3usize,
        pod_scope in any::<bool>(),
        order in any::<u64>(),
    ) {
        let policy = POLICIES[policy];
        let kinds = [Init, Sidecar, App];
        let mut counts: Vec<(ContainerKind, u32, u32, u64)> = containers
            .into_iter()
            .map(|(kind, count, cpus, memory)| (kinds[kind], count, cpus, memory))
            .collect();
        counts.sort_by_key(|(kind, ..)| *kind == App);
        let ask = ask_with_memory(&counts);
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
        let refuses = policy != TopologyManagerPolicy::BestEffort;
        let counted = counted && refuses && totals.iter().sum::<u32>() > 0;
        let machine = if counted { machine(totals, reserved, [0; 3]) } else { machine([0; 3], [0; 3], [0; 3]) };
        let mut memory =
            memory.filter(|_| refuses).map(|allocatable| KubeletMemory::with(allocatable, &others));
        let published = memory.as_ref().map_or(machine.clone(), |memory| memory.published(&machine));
        let alignment = Alignment::new(&kubelet(policy, scope), &known).unwrap();
        let counts_any = counted || memory.is_some();
        let alignment = if counts_any { alignment.counting(&published) } else { alignment };
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
            let needs = NumaDemand::of_pod(&ask.numa);
            let of_memory = memory.as_ref().map(|memory| memory.hints(needs.memory >> 30));
            merged(policy, &[devices, of_cpus(needs.cpus, &cpus, &[]), of_memory]).unwrap()
        });
        let mut asking = ask.containers.iter();
        for (kind, count, request, bytes) in &counts {
            if *count == 0 && (!counted || *request == 0) && memory.is_none() {
                continue;
            }
            let nodes = match &whole {
                Some(nodes) => Some(nodes.clone()),
                None => merged(policy, &[
                    of_devices(*count as usize, &available, &reusable),
                    of_cpus(*request, &cpus, &reusable_cpus),
                    memory.as_ref().map(|memory| memory.hints(*bytes)),
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
            if let Some(memory) = &mut memory {
                prop_assert!(memory.allocate(&nodes, *kind, *bytes), "no memory");
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
fn machine(totals: [u32; 3], reserved: [u32; 3], held: [u32; 3]) -> Vec<NumaNode> {
    let of_node = |node: u32| {
        let at = node as usize;
        let allocatable = totals[at].saturating_sub(reserved[at]);
        let free = allocatable.saturating_sub(held[at]);
        let cpus = NumaCpus { total: totals[at], allocatable, free, ..NumaCpus::default() };
        NumaNode { node, cpus, ..NumaNode::default() }
    };
    (0..3).map(of_node).collect()
}

/// The node of each CPU.
fn by_node(machine: &[NumaNode], count: impl Fn(&NumaCpus) -> u32) -> Vec<u32> {
    machine.iter().flat_map(|node| (0..count(&node.cpus)).map(|_| node.node)).collect()
}

/// Kubelet's static memory manager, on three NUMA nodes; in GiB.
#[derive(Debug, Clone)]
struct KubeletMemory {
    allocatable: [u64; 3],
    free: [u64; 3],
    /// Containers with memory of a node.
    assignments: [u32; 3],
    /// The nodes that such a container has its memory of.
    cells: [Vec<u32>; 3],
    /// What init containers of the pod left, by nodes.
    reusable: HashMap<Vec<u32>, u64>,
}

impl KubeletMemory {
    /// A machine on which containers with so much memory run, each where the manager would have put it.
    fn with(allocatable: [u64; 3], containers: &[(u8, u64)]) -> Self {
        let mut memory = Self {
            allocatable,
            free: allocatable,
            assignments: [0; 3],
            cells: [0, 1, 2].map(|node| vec![node]),
            reusable: HashMap::new(),
        };
        for (choice, request) in containers {
            let hints = memory.hints(*request);
            let preferred: Vec<&Hint> = hints.iter().filter(|hint| hint.preferred).collect();
            if !preferred.is_empty() {
                let nodes = preferred[usize::from(*choice) % preferred.len()].nodes.clone();
                memory.allocate(&nodes, App, *request);
            }
        }
        memory
    }

    /// `calculateHints`.
    fn hints(&self, request: u64) -> Vec<Hint> {
        let mut hints = Vec::new();
        let mut least = 3;
        for mask in 1..8u32 {
            let nodes: Vec<u32> = (0..3).filter(|node| mask >> node & 1 == 1).collect();
            let sum = |of: &[u64; 3]| nodes.iter().map(|node| of[*node as usize]).sum::<u64>();
            if sum(&self.allocatable) < request {
                continue;
            }
            least = least.min(nodes.len());
            let is_single = nodes.len() == 1;
            if is_single && self.cells[nodes[0] as usize].len() > 1 {
                continue;
            }
            let is_taken = |node: &u32| {
                let node = *node as usize;
                self.assignments[node] > 0 && (self.cells[node].len() == 1 || self.cells[node] != nodes)
            };
            if !is_single && nodes.iter().any(is_taken) {
                continue;
            }
            if sum(&self.free) + self.reusable.get(&nodes).copied().unwrap_or(0) >= request {
                hints.push(Hint { nodes, preferred: false });
            }
        }
        hints.iter_mut().for_each(|hint| hint.preferred = hint.nodes.len() == least);
        hints
    }

    /// `Allocate` with the nodes of the Topology Manager; whether the container is admitted.
    fn allocate(&mut self, nodes: &[u32], kind: ContainerKind, request: u64) -> bool {
        if !self.hints(request).iter().any(|hint| hint.nodes == nodes) {
            return false;
        }
        let reusable = self.reusable.entry(nodes.to_vec()).or_default();
        let mut missing = request.saturating_sub(*reusable);
        *reusable = match kind {
            Init => (*reusable).max(request),
            Sidecar | App => reusable.saturating_sub(request),
        };
        for node in nodes.iter().map(|node| *node as usize) {
            self.assignments[node] += 1;
            self.cells[node] = nodes.to_vec();
            let taken = missing.min(self.free[node]);
            self.free[node] -= taken;
            missing -= taken;
        }
        true
    }

    /// As the plugin publishes it, beside these CPUs.
    fn published(&self, cpus: &[NumaNode]) -> Vec<NumaNode> {
        let of_node = |known: &NumaNode| {
            let node = known.node as usize;
            let users = (self.assignments[node] > 0).then(|| self.cells[node].iter().copied());
            let memory = NumaMemory {
                allocatable: self.allocatable[node] << 30,
                free: self.free[node] << 30,
                group: users.into_iter().flatten().collect(),
            };
            NumaNode { memory, ..*known }
        };
        cpus.iter().map(of_node).collect()
    }
}

/// Containers with devices and exclusive CPUs.
fn ask(containers: &[(ContainerKind, u32, u32)]) -> Ask {
    let with_memory = containers.iter().map(|(kind, devices, cpus)| (*kind, *devices, *cpus, 1));
    ask_with_memory(&with_memory.collect::<Vec<_>>())
}

/// Containers with devices, exclusive CPUs and GiB of memory.
fn ask_with_memory(containers: &[(ContainerKind, u32, u32, u64)]) -> Ask {
    let names: Vec<String> = (0..containers.len()).map(|number| format!("c{number}")).collect();
    let devices: Vec<String> = containers.iter().map(|(_, devices, ..)| devices.to_string()).collect();
    let cpus: Vec<String> = containers
        .iter()
        .map(|(.., cpus, _)| if *cpus == 0 { "500m".to_owned() } else { cpus.to_string() })
        .collect();
    let memory: Vec<String> = containers.iter().map(|(.., memory)| format!("{memory}Gi")).collect();
    let resources = ["nvidia.com/gpu".into()];
    let asking = |_| {
        let each = names.iter().zip(containers).zip(&devices);
        each.map(|((name, (kind, ..)), devices)| Container {
            name,
            kind: *kind,
            quantity: Some(devices.as_str()),
        })
    };
    let each = names.iter().zip(containers).zip(cpus.iter().zip(&memory)).map(
        |((name, (kind, ..)), (cpus, memory))| CpuAndMemory {
            name,
            kind: *kind,
            cpu: (Some(cpus.as_str()), Some(cpus.as_str())),
            memory: (Some(memory.as_str()), None),
        },
    );
    let mut request = Request::read(&resources, asking).unwrap().with_numa(&each);
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
            let is_whole = left(free, reusable, *node) == count(all, *node) && missing >= count(all, *node);
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
