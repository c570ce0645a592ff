use std::collections::BTreeSet;

use gantry_gang::protocol::ShapeId;
use proptest::prelude::*;

use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::GPU;
use crate::plan::tests::world::{World, gang, level, line};

/// Who is on some GPUs of some nodes.
fn unit(name: &str, priority: i32, on: &[(u32, &str)], world: &World) -> VictimCandidate {
    let pod = |(number, (node, gpus)): (usize, &(u32, &str))| {
        let at = world.snapshot.names.name(NodeIx(*node)).unwrap();
        let ids = gpus.split(',').map(|gpu| format!("GPU-{at}-{gpu}").as_str().into());
        CandidatePod {
            uid: format!("{name}-{number}").as_str().into(),
            node: NodeIx(*node),
            devices: vec![(GPU.into(), ids.collect())],
            resources: Resources { pods: 1, ..Resources::default() },
        }
    };
    VictimCandidate {
        pods: on.iter().enumerate().map(pod).collect(),
        priority,
        since: 0,
        checkpointed: false,
        budgets: Vec::new(),
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
    let budget = |allowed| vec![Budget { name: "ml/pdb".into(), allowed, pods: 1 }];
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
    vec![Budget { name: "ml/replicas".into(), allowed: 1, pods: 1 }]
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
fn so_many_tries_are_made_to_spare_somebody_and_no_more() {
    let (world, _) = full("ab", 1);
    let units: Vec<VictimCandidate> =
        (0..100).map(|number| unit(&format!("u{number}"), 0, &[(0, "0")], &world)).collect();
    let units: Vec<&VictimCandidate> = units.iter().collect();
    for (tries, looks) in [(1000, 106), (40, 40)] {
        let looked = Cell::new(0);
        let needed = |victims: &[&VictimCandidate]| {
            looked.set(looked.get() + 1);
            victims.len() == units.len()
        };
        assert_eq!(spare(&units, &needed, &SpareBudget::new(tries)).len(), 100);
        assert_eq!(looked.get(), looks);
    }
}

#[test]
fn sick_gpus_do_not_come_back() {
    let (mut world, wanted) = full("a", 1);
    let classes = Arc::make_mut(&mut world.snapshot.classes);
    if let crate::snapshot::Standing::Ours(class) = Arc::make_mut(&mut classes[0]) {
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

#[derive(Debug, Clone)]
struct Case {
    racks: Vec<u8>,
    /// Node, first GPU, how many, priority, unit.
    pods: Vec<(usize, usize, usize, i32, usize)>,
    gpus: u32,
    members: u32,
    required: bool,
    /// What two budgets allow, and by unit whether each covers it.
    allowed: (u32, u32),
    covered: Vec<(bool, bool)>,
}

prop_compose! {
    fn case()(
        racks in prop::collection::vec(0u8..2, 1..4),
        gpus in 1u32..6,
        members in 1u32..5,
        required in any::<bool>(),
        pods in prop::collection::vec((0usize..4, 0usize..8, 1usize..6, 0i32..4, 0usize..6), 0..8),
        allowed in (0u32..3, 0u32..3),
        covered in prop::collection::vec((any::<bool>(), prop::bool::weighted(0.3)), 6),
    ) -> Case {
        Case { racks, pods, gpus, members, required, allowed, covered }
    }
}

impl Case {
    fn build(&self) -> (World, PlanRequest, Vec<VictimCandidate>) {
        let mut world = World::new();
        let mut taken = vec![DeviceSet::EMPTY; self.racks.len()];
        let mut units: std::collections::BTreeMap<usize, (i32, Vec<(u32, String)>)> =
            std::collections::BTreeMap::new();
        for (node, from, count, priority, unit) in &self.pods {
            let node = node % self.racks.len();
            let devices: DeviceSet = (*from..(from + count).min(8)).collect();
            let devices = &devices - &taken[node];
            if devices.is_empty() {
                continue;
            }
            taken[node].add(&devices);
            let unit = units.entry(*unit).or_insert((*priority, Vec::new()));
            unit.1.push((u32::try_from(node).unwrap(), devices.to_string()));
        }
        for (index, rack) in self.racks.iter().enumerate() {
            let free = &DeviceSet::first(8) - &taken[index];
            world.node_with(&format!("z/r{rack}"), &format!("n{index}"), &free, 0);
        }
        let shape: ShapeId = world.shape(self.gpus);
        let mut wanted = gang(&[(self.members, shape)]);
        wanted.priority = 3;
        if self.required {
            level(&mut wanted, "rack", true);
        }
        let candidates = units
            .iter()
            .map(|(number, (priority, on))| {
                let on: Vec<(u32, &str)> = on.iter().map(|(node, gpus)| (*node, gpus.as_str())).collect();
                let (one, other) = self.covered[*number];
                let budgets = [(one, "ml/one", self.allowed.0), (other, "ml/other", self.allowed.1)];
                let covering = budgets.into_iter().filter(|(covered, ..)| *covered);
                VictimCandidate {
                    budgets: covering
                        .map(|(_, name, allowed)| Budget {
                            name: name.into(),
                            allowed,
                            pods: u32::try_from(on.len()).unwrap(),
                        })
                        .collect(),
                    ..unit(&format!("u{number}"), *priority, &on, &world)
                }
            })
            .collect();
        (world, wanted, candidates)
    }
}

/// Whether the gang fits without some of the units.
fn without(world: &World, wanted: &PlanRequest, victims: &[&VictimCandidate]) -> bool {
    world.with(|input| WhatIf::new(input, victims).without(victims, |input| fits(input, wanted)))
}

/// Whether the budgets allow that all of them are stopped.
fn is_allowed(victims: &[&VictimCandidate]) -> bool {
    let budgets = || victims.iter().flat_map(|unit| &unit.budgets);
    budgets().all(|budget| {
        let same = budgets().filter(|other| other.name == budget.name);
        same.map(|other| other.pods).sum::<u32>() <= budget.allowed
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Every set of units is the oracle.
    #[test]
    fn victims_exist_if_and_only_if_they_help_and_none_is_spare(case in case()) {
        let (world, wanted, candidates) = case.build();
        let lower: Vec<&VictimCandidate> = candidates.iter().filter(|unit| unit.priority < wanted.priority).collect();
        let ways: Vec<Vec<&VictimCandidate>> = (0u32..1 << lower.len())
            .map(|set| (0..lower.len()).filter(|at| set >> at & 1 == 1).map(|at| lower[at]).collect())
            .filter(|victims: &Vec<&VictimCandidate>| is_allowed(victims) && without(&world, &wanted, victims))
            .collect();
        let found = world.with(|input| preempt(input, &wanted, &candidates));
        prop_assert_eq!(found.is_some(), !ways.is_empty());
        let Some(placement) = found else { return Ok(()) };
        let gone: BTreeSet<&str> = placement.victims.iter().map(PodUid::as_str).collect();
        let victims: Vec<&VictimCandidate> = candidates.iter().filter(|unit| unit.pods.iter().any(|pod| gone.contains(pod.uid.as_str()))).collect();
        prop_assert_eq!(victims.iter().map(|victim| victim.pods.len()).sum::<usize>(), gone.len(), "whole units");
        prop_assert!(is_allowed(&victims), "within the budgets");
        for spared in &victims {
            let fewer: Vec<&VictimCandidate> = victims.iter().copied().filter(|victim| victim != spared).collect();
            prop_assert!(!without(&world, &wanted, &fewer), "one could be left out");
        }
        let worst = |victims: &[&VictimCandidate]| victims.iter().map(|victim| victim.priority).max();
        prop_assert_eq!(worst(&victims), ways.iter().map(|way| worst(way)).min().flatten(), "the lowest priority that will do");
        // The devices are free or the victims', and nobody's twice.
        let mut seen = BTreeSet::new();
        let others = candidates.iter().filter(|unit| !victims.contains(unit));
        let held: BTreeSet<_> = others.flat_map(|unit| &unit.pods).flat_map(|pod| &pod.devices[0].1).collect();
        for id in placement.places.iter().flat_map(|place| &place.devices[0].1) {
            prop_assert!(seen.insert(id) && !held.contains(id));
        }
    }
}
