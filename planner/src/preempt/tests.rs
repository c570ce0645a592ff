use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::GPU;
use crate::input::PlacementRules;
use crate::numa::{Alignment, NumaCpus, NumaMemory, NumaNode};
use crate::plan::tests::world::{World, gang, level, line};
use crate::request::NumaNeeds;

/// Who is on some GPUs of some nodes.
fn unit(name: &str, priority: i32, on: &[(u32, &str)], world: &World) -> VictimCandidate {
    let pod = |(number, (node, gpus)): (usize, &(u32, &str))| {
        let at = world.snapshot.names.name(NodeIx(*node)).unwrap();
        let ids = gpus.split(',').map(|gpu| format!("GPU-{at}-{gpu}").as_str().into());
        CandidatePod {
            uid: format!("{name}-{number}").as_str().into(),
            node: NodeIx(*node),
            devices: vec![(GPU.into(), ids.collect())],
            numa: Vec::new(),
            resources: Resources { pods: 1, ..Resources::default() },
            role: 0,
        }
    };
    VictimCandidate {
        pods: on.iter().enumerate().map(pod).collect(),
        priority,
        is_gang: on.len() > 1,
        ..VictimCandidate::default()
    }
}

fn victims(world: &World, wanted: &PlanRequest, candidates: &[VictimCandidate]) -> Option<Vec<String>> {
    let placement = world.with(|input| preempt(input, wanted, candidates))?;
    Some(placement.victims.iter().map(|uid| uid.as_str().to_owned()).collect())
}

/// One rack of nodes without a free GPU, and a gang of priority 10 of so many members of eight GPUs.
fn full(nodes: &str, members: u32) -> (World, PlanRequest) {
    let mut world = World::new();
    for node in nodes.chars() {
        world.node("z/r", &node.to_string(), "");
    }
    let eight = world.shape(8);
    let mut wanted = gang(&[(members, eight)]);
    wanted.priority = 10;
    (world, wanted)
}

/// Two NUMA nodes with four GPUs, eight allocatable CPUs and 8 bytes of memory each.
#[test]
fn end_of_a_pod_returns_its_cpus_and_memory() {
    let (world, _) = full("a", 1);
    let numa: Vec<Option<u32>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    let kubelet = gantry_api::KubeletTopology {
        policy: gantry_api::TopologyManagerPolicy::SingleNumaNode,
        ..gantry_api::KubeletTopology::default()
    };
    let node = |node, free| NumaNode {
        node,
        cpus: NumaCpus { total: 8, allocatable: 8, free, ..NumaCpus::default() },
        memory: NumaMemory { allocatable: 8, free: u64::from(free), ..NumaMemory::default() },
    };
    let alignment = Alignment::new(&kubelet, &numa).unwrap().counting(&[node(0, 1), node(1, 6)]);
    let free_after = |gpus: &str, containers: &[NumaDemand]| {
        let mut exact = world.with(|input| (input.exact)(NodeIx(0)).unwrap().class);
        let pod =
            CandidatePod { numa: containers.to_vec(), ..unit("pod", 1, &[(0, gpus)], &world).pods.remove(0) };
        exact.pools[0].alignment = Some(Arc::new(alignment.clone()));
        let ids: Vec<Option<gantry_api::DeviceId>> =
            (0..8).map(|gpu| Some(format!("GPU-a-{gpu}").as_str().into())).collect();
        let mut exact = ExactNode { class: exact, ids: vec![ids.as_slice()] };
        give_back(&mut exact, &pod);
        exact.class.pools[0].alignment.clone().unwrap()
    };
    let with =
        |free: [u32; 2]| Arc::new(alignment.with_free(|known| node(known.node, free[known.node as usize])));
    let four = |container| {
        let needs = NumaNeeds { cpus: 4, memory: 4 };
        NumaDemand { container, has_devices: container.is_some(), needs, ..NumaDemand::none(0) }
    };
    assert_eq!(free_after("0,1", &[four(Some(0))]), with([5, 6]));
    assert_eq!(free_after("4", &[four(Some(0))]), with([1, 8]));
    assert_eq!(free_after("0", &[four(Some(0)), four(None)]), with([8, 8]));
    assert_eq!(free_after("0", &NumaDemand::UNKNOWN), with([8, 6]));
    assert_eq!(free_after("0", &[]), with([1, 6]));
}

const ALL: &str = "0,1,2,3,4,5,6,7";

#[test]
fn the_lowest_priority_goes_and_nobody_of_equal_priority() {
    let (world, wanted) = full("abc", 1);
    let candidates = [
        unit("high", 5, &[(0, ALL)], &world),
        unit("low", 1, &[(1, ALL)], &world),
        unit("equal", 10, &[(2, ALL)], &world),
    ];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["low-0"]);
    assert_eq!(victims(&world, &wanted, &candidates[2..]), None);
}

#[test]
fn victim_gang_ends_as_a_whole_and_its_devices_are_used() {
    let (world, wanted) = full("abc", 2);
    let candidates = [
        unit("gang", 1, &[(0, ALL), (1, ALL), (2, "0")], &world),
        unit("pod", 5, &[(2, "1,2,3,4,5,6,7")], &world),
    ];
    let placement = world.with(|input| preempt(input, &wanted, &candidates)).unwrap();
    assert_eq!(
        placement.victims.iter().map(PodUid::as_str).collect::<Vec<_>>(),
        ["gang-0", "gang-1", "gang-2"]
    );
    assert_eq!(line(&placement), "rack r: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7]");
}

#[test]
fn one_gang_goes_rather_than_many_pods() {
    let (world, wanted) = full("ab", 1);
    let mut candidates: Vec<VictimCandidate> =
        (0..8).map(|gpu| unit(&format!("pod{gpu}"), 1, &[(0, &gpu.to_string())], &world)).collect();
    candidates.push(unit("large", 1, &[(1, ALL)], &world));
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["large-0"]);
}

#[test]
fn of_equals_the_checkpointed_goes_then_the_youngest() {
    let (world, wanted) = full("abc", 1);
    let mut candidates: Vec<VictimCandidate> =
        ["a", "b", "c"].iter().zip(0..).map(|(name, node)| unit(name, 1, &[(node, ALL)], &world)).collect();
    candidates[2].since = 100;
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["c-0"]);
    candidates[1].checkpointed = true;
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["b-0"]);
}

#[test]
fn a_small_pod_goes_rather_than_a_younger_gang_that_is_large() {
    let (mut world, mut wanted) = full("ab", 1);
    let two = world.shape(2);
    wanted.members = gang(&[(1, two)]).members;
    let large = VictimCandidate { since: 100, ..unit("large", 1, &[(1, ALL)], &world) };
    let candidates = [
        unit("important", 20, &[(0, "0,1,2,3,4,5")], &world),
        unit("small", 1, &[(0, "6,7")], &world),
        large,
    ];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["small-0"]);
}

#[test]
fn budgets_are_kept() {
    let (world, wanted) = full("abc", 2);
    let budget = |allowed| vec![Budget { name: "ml/pdb".into(), allowed, pods: vec![0] }];
    let mut candidates: Vec<VictimCandidate> =
        ["a", "b", "c"].iter().zip(0..).map(|(name, node)| unit(name, 1, &[(node, ALL)], &world)).collect();
    candidates[0].budgets = budget(1);
    candidates[1].budgets = budget(1);
    let gone = victims(&world, &wanted, &candidates).unwrap();
    assert_eq!(gone.len(), 2);
    assert!(gone.contains(&"c-0".to_owned()));
    candidates[2].budgets = budget(1);
    assert_eq!(victims(&world, &wanted, &candidates), None);
}

#[test]
fn a_budget_is_kept_for_whoever_makes_room() {
    let (mut world, wanted) = full("a", 1);
    world.node("z/r", "b", "1,2,3,4,5,6,7");
    let one = |name: &str, on: &[(u32, &str)], since: i64| VictimCandidate {
        since,
        budgets: replica(),
        ..unit(name, 1, on, &world)
    };
    let candidates = [
        one("beside-others", &[(0, "0")], 100),
        unit("important", 20, &[(0, "1,2,3,4,5,6,7")], &world),
        one("alone", &[(1, "0")], 0),
    ];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["alone-0"]);
}

/// A pod that counts against a budget that allows one to go.
fn replica() -> Vec<Budget> {
    vec![Budget { name: "ml/replicas".into(), allowed: 1, pods: vec![0] }]
}

#[test]
fn node_within_the_budget_is_found_among_many() {
    let nodes: String = ('a'..='z').collect();
    let (world, wanted) = full(&nodes, 1);
    // Two on each node, but one on the last.
    let candidates: Vec<VictimCandidate> = (0..26)
        .flat_map(|node| [(node, "0,1,2,3"), (node, "4,5,6,7")])
        .map(|(node, gpus)| {
            let plain = node == 25 && gpus.starts_with('4');
            VictimCandidate {
                since: i64::from(26 - node),
                budgets: if plain { Vec::new() } else { replica() },
                ..unit(&format!("n{node}-{gpus}"), 1, &[(node, gpus)], &world)
            }
        })
        .collect();
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["n25-0,1,2,3-0", "n25-4,5,6,7-0"]);
}

#[test]
fn sick_gpus_do_not_come_back() {
    let (mut world, wanted) = full("a", 1);
    let classes = Arc::make_mut(&mut world.snapshot.classes);
    if let crate::snapshot::NodeState::Ours(class) = Arc::make_mut(&mut classes[0]) {
        class.pools[0].unhealthy = 1;
        class.pools[0].faults = vec![crate::inventory::GpuFault { gpu: 3, reason: "Xid 79".into() }];
    }
    let candidates = [unit("pod", 1, &[(0, ALL)], &world)];
    assert_eq!(victims(&world, &wanted, &candidates), None);
}

#[test]
fn nobody_goes_where_there_is_room() {
    let (mut world, wanted) = full("a", 1);
    world.node("z/r", "b", ALL);
    let candidates = [unit("pod", 1, &[(0, ALL)], &world)];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), Vec::<String>::new());
}

/// An elastic gang on single GPUs of a node, of which some pods may go.
fn elastic(name: &str, gpus: &[&str], surplus: u32, world: &World) -> VictimCandidate {
    let on: Vec<(u32, &str)> = gpus.iter().map(|gpu| (0, *gpu)).collect();
    VictimCandidate {
        surplus: Surplus { pods: surplus, by_role: Vec::new() },
        is_gang: true,
        ..unit(name, 1, &on, world)
    }
}

#[test]
fn members_beyond_the_minimum_go_first() {
    let (mut world, mut wanted) = full("a", 1);
    let one = world.shape(1);
    wanted.members = gang(&[(1, one)]).members;
    let important = unit("important", 20, &[(0, "4,5,6,7")], &world);
    let candidates = [elastic("el", &["0", "1", "2", "3"], 3, &world), important.clone()];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["el-0"]);
    // A member that is needed goes only with all of its gang.
    let two = world.shape(2);
    wanted.members = gang(&[(1, two)]).members;
    let candidates = [elastic("el", &["0", "1", "2", "3"], 1, &world), important.clone()];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["el-0", "el-1", "el-2", "el-3"]);
    // A single pod goes rather than a whole gang, and a member beyond the minimum rather than a single pod.
    let candidates =
        [elastic("el", &["0", "1", "2"], 0, &world), unit("pod", 1, &[(0, "3")], &world), important];
    wanted.members = gang(&[(1, one)]).members;
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["pod-0"]);
    let candidates = [elastic("el", &["0", "1", "2"], 1, &world), unit("pod", 1, &[(0, "3")], &world)];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["el-0"]);
}

#[test]
fn member_of_a_role_at_its_minimum_stays() {
    let (mut world, mut wanted) = full("a", 1);
    let one = world.shape(1);
    wanted.members = gang(&[(1, one)]).members;
    let mut el = elastic("el", &["0", "1", "2", "3,4,5,6,7"], 2, &world);
    el.surplus.by_role = vec![0, 2];
    for pod in &mut el.pods[1..] {
        pod.role = 1;
    }
    assert_eq!(victims(&world, &wanted, &[el]).unwrap(), ["el-1"]);
}

#[test]
fn higher_priority_is_not_taken_to_spare_devices() {
    let (mut world, mut wanted) = full("ab", 1);
    let one = world.shape(1);
    wanted.members = gang(&[(1, one)]).members;
    let candidates = [unit("high", 5, &[(0, "0")], &world), unit("low", 1, &[(1, ALL)], &world)];
    assert_eq!(victims(&world, &wanted, &candidates).unwrap(), ["low-0"]);
}

#[test]
fn cluster_of_many_nodes_loses_the_least() {
    let mut world = World::new();
    let nodes: Vec<String> = (0..200).map(|node| format!("n{node:03}")).collect();
    for node in &nodes {
        world.node("z/r", node, "");
    }
    let four = world.shape(4);
    let mut wanted = gang(&[(8, four)]);
    wanted.priority = 10;
    // Two members fit where three pods end; only on the last eight nodes one fits where one does.
    let candidates: Vec<VictimCandidate> = (0..200)
        .flat_map(|node| {
            let gpus: &[&str] = if node < 192 { &["0,1,2", "3,4,5", "6,7"] } else { &["0,1,2,3", "4,5,6,7"] };
            gpus.iter().enumerate().map(move |(number, gpus)| (node, number, *gpus))
        })
        .map(|(node, number, gpus)| unit(&format!("p{node:03}-{number}"), 1, &[(node, gpus)], &world))
        .collect();
    let victims = victims(&world, &wanted, &candidates).unwrap();
    assert_eq!(victims.len(), 8);
    assert!(victims.iter().all(|victim| victim.as_str() >= "p192"), "{victims:?}");
}

#[derive(Debug, Clone)]
struct PodCase {
    node: usize,
    first_gpu: usize,
    gpus: usize,
    cpus: i64,
    unit: usize,
    role: usize,
    /// It keeps members off its node, as by a host port.
    bars: bool,
}

#[derive(Debug, Clone)]
struct Case {
    racks: Vec<u8>,
    pods: Vec<PodCase>,
    /// GPUs and CPUs of members of two shapes, and how many there are of each.
    shapes: [(u32, i64, u32); 2],
    /// How many members may be missing.
    optional: u32,
    required: bool,
    /// What two budgets allow.
    allowed: (u32, u32),
    units: Vec<UnitCase>,
}

#[derive(Debug, Clone)]
struct UnitCase {
    priority: i32,
    surplus: u32,
    by_role: Option<(u32, u32)>,
    checkpointed: bool,
    /// Whether each budget covers it.
    covered: (bool, bool),
}

prop_compose! {
    fn unit_case()(
        priority in 0i32..4,
        surplus in prop_oneof![Just(0u32), 0u32..4],
        by_role in prop::option::weighted(0.3, (0u32..3, 0u32..3)),
        checkpointed in any::<bool>(),
        covered in (prop::bool::weighted(0.3), prop::bool::weighted(0.2)),
    ) -> UnitCase {
        UnitCase { priority, surplus, by_role, checkpointed, covered }
    }
}

prop_compose! {
    fn pod_case()(
        node in 0usize..4,
        first_gpu in 0usize..8,
        gpus in 0usize..6,
        cpus in 0i64..5,
        unit in 0usize..6,
        role in 0usize..2,
        bars in prop::bool::weighted(0.1),
    ) -> PodCase {
        PodCase { node, first_gpu, gpus, cpus, unit, role, bars }
    }
}

prop_compose! {
    fn case()(
        racks in prop::collection::vec(0u8..2, 1..5),
        first in (1u32..6, 0i64..5, 1u32..5),
        second in (1u32..4, 0i64..3, 0u32..3),
        optional in prop_oneof![3 => Just(0u32), 1 => 0u32..3],
        required in any::<bool>(),
        pods in prop::collection::vec(pod_case(), 0..10),
        allowed in (0u32..3, 0u32..3),
        units in prop::collection::vec(unit_case(), 6),
    ) -> Case {
        Case { racks, pods, shapes: [first, second], optional, required, allowed, units }
    }
}

/// CPUs of a node.
const CPUS: i64 = 12;

/// A cluster with pods that keep members off their nodes.
struct Setting {
    world: World,
    wanted: PlanRequest,
    candidates: Vec<VictimCandidate>,
    bars: Vec<(PodUid, NodeIx)>,
}

impl Setting {
    fn with<T>(&self, then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let rules = |_: &crate::input::Shape, gone: &[&PodUid]| {
            let there = self.bars.iter().filter(|(uid, _)| !gone.contains(&uid));
            let nodes: BTreeSet<NodeIx> = there.map(|(_, node)| *node).collect();
            PlacementRules { nodes: nodes.into_iter().collect(), ..PlacementRules::default() }
        };
        self.world.with_rules(&rules, then)
    }

    /// Whether the gang fits without some pods.
    fn fits_without(&self, gone: &BTreeSet<&PodUid>) -> bool {
        let units: Vec<&VictimCandidate> = self.candidates.iter().collect();
        let pods = pods_of(&units).into_iter().filter(|pod| gone.contains(&pod.uid));
        let pods: Vec<&CandidatePod> = pods.collect();
        self.with(|input| ExactInput::new(input, &units).without(&pods, |input| fits(input, &self.wanted)))
    }

    /// The least cost over all sets of pods.
    fn least_cost(&self) -> Option<Cost> {
        let pods = self.candidates.iter().flat_map(|unit| &unit.pods);
        let pods: Vec<&PodUid> = pods.map(|pod| &pod.uid).collect();
        let sets = (0u32..1 << pods.len()).map(|set| {
            let gone = pods.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1);
            gone.map(|(_, uid)| *uid).collect::<BTreeSet<&PodUid>>()
        });
        let mut sets: Vec<(Cost, BTreeSet<&PodUid>)> =
            sets.filter_map(|gone| Some((cost(&self.candidates, &self.wanted, &gone)?, gone))).collect();
        sets.sort();
        sets.into_iter().find(|(_, gone)| self.fits_without(gone)).map(|(cost, _)| cost)
    }
}

impl Case {
    fn build(&self) -> Setting {
        let mut world = World::new();
        let mut taken = vec![DeviceSet::EMPTY; self.racks.len()];
        let mut used = vec![0; self.racks.len()];
        let mut units: BTreeMap<usize, Vec<CandidatePod>> = BTreeMap::new();
        let mut bars = Vec::new();
        for (number, pod) in self.pods.iter().enumerate() {
            let node = pod.node % self.racks.len();
            let devices: DeviceSet = (pod.first_gpu..(pod.first_gpu + pod.gpus).min(8)).collect();
            let devices = &devices - &taken[node];
            let cpus = pod.cpus.min(CPUS - used[node]);
            if devices.is_empty() && cpus == 0 {
                continue;
            }
            taken[node].add(&devices);
            used[node] += cpus;
            let ids = devices.iter().map(|gpu| format!("GPU-n{node}-{gpu}").as_str().into()).collect();
            let uid = PodUid::from(format!("u{}-{number}", pod.unit).as_str());
            let at = NodeIx(u32::try_from(node).unwrap());
            bars.extend(pod.bars.then(|| (uid.clone(), at)));
            units.entry(pod.unit).or_default().push(CandidatePod {
                uid,
                node: at,
                devices: if devices.is_empty() { Vec::new() } else { vec![(GPU.into(), ids)] },
                numa: Vec::new(),
                resources: Resources { pods: 1, milli_cpu: cpus * 1_000, ..Resources::default() },
                role: pod.role,
            });
        }
        for (index, rack) in self.racks.iter().enumerate() {
            let free = &DeviceSet::first(8) - &taken[index];
            world.node_with(&format!("z/r{rack}"), &format!("n{index}"), &free, 0);
            world.room(&format!("n{index}"), |_, left| left.milli_cpu = (CPUS - used[index]) * 1_000);
        }
        let [one, other] = self.shapes.map(|(gpus, cpus, count)| {
            let resources = Resources { pods: 1, milli_cpu: cpus * 1_000, ..Resources::default() };
            let needs =
                gantry_gang::Needs { resources, namespace: "ml".into(), ..gantry_gang::Needs::default() };
            (count, world.shape_of(gpus, needs))
        });
        let mut wanted = gang(&[one, other]);
        wanted.priority = 3;
        wanted.must = (wanted.must - self.optional.min(wanted.must - 1)).max(1);
        if self.required {
            level(&mut wanted, "rack", true);
        }
        let candidates =
            units.into_iter().map(|(number, pods)| self.candidate(&self.units[number], pods)).collect();
        Setting { world, wanted, candidates, bars }
    }

    fn candidate(&self, of: &UnitCase, pods: Vec<CandidatePod>) -> VictimCandidate {
        let count = u32::try_from(pods.len()).unwrap();
        let (one, two) = of.covered;
        let budgets = [(one, "ml/one", self.allowed.0), (two, "ml/two", self.allowed.1)].into_iter();
        let budgets = budgets.filter(|(covered, ..)| *covered);
        VictimCandidate {
            priority: of.priority,
            checkpointed: of.checkpointed,
            is_gang: count > 1,
            surplus: Surplus {
                pods: of.surplus.min(count - 1),
                by_role: of.by_role.map_or(Vec::new(), |(one, two)| vec![one, two]),
            },
            budgets: budgets
                .map(|(_, name, allowed)| Budget { name: name.into(), allowed, pods: (0..count).collect() })
                .collect(),
            pods,
            ..VictimCandidate::default()
        }
    }
}

/// What a set of pods costs: the highest priority, devices, pods, whole gangs, pods that are not beyond a minimum, pods
/// without a checkpoint. `None` if they must not go together.
fn cost(candidates: &[VictimCandidate], wanted: &PlanRequest, gone: &BTreeSet<&PodUid>) -> Option<Cost> {
    let mut cost = (None, 0, 0, 0, 0, 0);
    let mut used: BTreeMap<&str, u32> = BTreeMap::new();
    for candidate in candidates {
        let going: Vec<(usize, &CandidatePod)> =
            candidate.pods.iter().enumerate().filter(|(_, pod)| gone.contains(&pod.uid)).collect();
        if going.is_empty() {
            continue;
        }
        let whole = going.len() == candidate.pods.len();
        let of_role = |role: usize| going.iter().filter(|(_, pod)| pod.role == role).count();
        let mut roles = candidate.surplus.by_role.iter().enumerate();
        let stays = going.len() <= candidate.surplus.pods as usize
            && roles.all(|(role, most)| of_role(role) <= *most as usize);
        if candidate.priority >= wanted.priority || !whole && !stays {
            return None;
        }
        for budget in &candidate.budgets {
            let used = used.entry(&budget.name).or_default();
            *used += u32::try_from(
                budget.pods.iter().filter(|pod| going.iter().any(|(at, _)| *at == **pod as usize)).count(),
            )
            .unwrap();
            if *used > budget.allowed {
                return None;
            }
        }
        cost.0 = cost.0.max(Some(candidate.priority));
        cost.1 += going.iter().flat_map(|(_, pod)| &pod.devices).map(|(_, ids)| ids.len()).sum::<usize>();
        cost.2 += going.len();
        cost.3 += usize::from(whole && candidate.is_gang);
        cost.4 += if whole { going.len() } else { 0 };
        cost.5 += if candidate.checkpointed { 0 } else { going.len() };
    }
    Some(cost)
}

type Cost = (Option<i32>, usize, usize, usize, usize, usize);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Every set of pods is the oracle.
    #[test]
    fn victims_cost_the_least_of_all_sets(case in case()) {
        let setting = case.build();
        let Setting { wanted, candidates, .. } = &setting;
        let least = setting.least_cost();
        let found = setting.with(|input| preempt(input, wanted, candidates));
        let gone: Option<BTreeSet<&PodUid>> = found.as_ref().map(|found| found.victims.iter().collect());
        if let Some(gone) = &gone {
            prop_assert!(setting.fits_without(gone), "the gang does not fit");
        }
        let found_cost = gone.as_ref().map(|gone| cost(candidates, wanted, gone).expect("a set that must not go"));
        prop_assert_eq!(found_cost, least);
        let Some((placement, gone)) = found.as_ref().zip(gone) else { return Ok(()) };
        // The devices are free or the victims', and no two members'.
        let mut seen = BTreeSet::new();
        let others = candidates.iter().flat_map(|unit| &unit.pods).filter(|pod| !gone.contains(&pod.uid));
        let held: BTreeSet<_> = others.flat_map(|pod| &pod.devices).flat_map(|(_, ids)| ids).collect();
        for id in placement.places.iter().flat_map(|place| &place.devices[0].1) {
            prop_assert!(seen.insert(id) && !held.contains(id));
        }
    }

    /// Where the exact search has no steps, the choice still makes room within the budgets.
    #[test]
    fn greedy_victims_make_room_within_budgets(case in case()) {
        let setting = case.build();
        let Setting { wanted, candidates, .. } = &setting;
        let units: Vec<&VictimCandidate> = candidates.iter().filter(|unit| unit.priority < wanted.priority).collect();
        let parts = Parts::of(&units);
        let gone: Option<Vec<PodUid>> = setting.with(|input| {
            let cluster = ExactInput::new(input, &units);
            let chosen = GreedySearch::new(&cluster, wanted, &parts).choose(None)?;
            Some(chosen.pods(&parts).iter().map(|pod| pod.uid.clone()).collect())
        });
        let Some(gone) = gone else { return Ok(()) };
        let gone: BTreeSet<&PodUid> = gone.iter().collect();
        prop_assert!(setting.fits_without(&gone));
        prop_assert!(cost(candidates, wanted, &gone).is_some(), "a set that must not go");
    }
}
