//! Members that must lie evenly (`topologySpreadConstraints`): given these pods there, and held against trying everything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_gang::needs::{Operator, Requirement, Spread};
use gantry_gang::protocol::{Placement, PlanRequest, Refusal, ShapeId, SkewFailure, SkewLimit};
use gantry_gang::{Needs, Resources};
use proptest::prelude::*;

use super::world::{World, gang, level};
use super::{ALL, twelve};
use crate::input::{PlacementRules, Shape};
use crate::plan::plan;
use crate::snapshot::NodeIx;

const ZONE: &str = "example.com/zone";
const HOST: &str = "kubernetes.io/hostname";

/// A constraint on all pods with the label `app`.
fn spread(key: &str, max_skew: u32) -> Spread {
    Spread {
        selector: vec![Requirement { key: "app".into(), operator: Operator::Exists, values: Vec::new() }],
        topology_key: key.into(),
        max_skew,
        min_domains: 1,
        by_affinity: true,
        by_taints: false,
    }
}

fn needs(spread: Vec<Spread>) -> Needs {
    Needs {
        resources: Resources { pods: 1, ..Resources::default() },
        namespace: "ml".into(),
        labels: Arc::new([("app".into(), "x".into())].into()),
        spread,
        ..Needs::default()
    }
}

/// Where members go if so many pods that count are on these nodes: how many on each; or why nowhere.
fn nodes(world: &World, wanted: &PlanRequest, there: &[(&str, u32)]) -> String {
    let counted: BTreeMap<NodeIx, u32> =
        there.iter().map(|(node, pods)| (world.snapshot.find(node).unwrap(), *pods)).collect();
    let barred = |shape: &Shape| PlacementRules {
        counted: vec![counted.clone(); shape.needs.spread.len()],
        ..PlacementRules::default()
    };
    world.with_barred(&barred, |input| match plan(input, wanted) {
        Ok(placement) => placement.places.iter().map(|place| place.node.as_str()).collect(),
        Err(refused) => refused.reason().to_string(),
    })
}

/// The constraint without which a gang would fit, if no pod counts yet.
fn skew(world: &World, wanted: &PlanRequest) -> Option<SkewLimit> {
    let barred = |shape: &Shape| PlacementRules {
        counted: vec![BTreeMap::new(); shape.needs.spread.len()],
        ..PlacementRules::default()
    };
    match world.with_barred(&barred, |input| plan(input, wanted)) {
        Err(Refusal::DoesNotFit(shortage)) => shortage.skew,
        other => panic!("{other:?}"),
    }
}

#[test]
fn members_lie_evenly_over_zones_and_close_together_in_each() {
    let mut world = twelve();
    let four = world.shape_of(4, needs(vec![spread(ZONE, 1)]));
    assert_eq!(nodes(&world, &gang(&[(8, four)]), &[]), "aabbgghh");
    assert_eq!(nodes(&world, &gang(&[(3, four)]), &[]), "agg");
    // As far as that goes they may lie together.
    let loose = world.shape_of(4, needs(vec![spread(ZONE, 4)]));
    assert_eq!(nodes(&world, &gang(&[(4, loose)]), &[]), "aabb");
    assert_eq!(nodes(&world, &gang(&[(5, loose)]), &[]), "aabbg");
}

#[test]
fn pods_that_are_there_count() {
    let mut world = twelve();
    let eight = world.shape_of(8, needs(vec![spread(ZONE, 1)]));
    assert_eq!(nodes(&world, &gang(&[(3, eight)]), &[("a", 2), ("l", 1)]), "agh");
}

#[test]
fn members_lie_evenly_over_nodes() {
    let mut world = twelve();
    let one = world.shape_of(1, needs(vec![spread(HOST, 2)]));
    assert_eq!(nodes(&world, &gang(&[(6, one)]), &[]), "aabbcc");
    let both = world.shape_of(1, needs(vec![spread(HOST, 1), spread(ZONE, 1)]));
    assert_eq!(nodes(&world, &gang(&[(6, both)]), &[]), "abcghi");
}

#[test]
fn a_zone_that_takes_none_keeps_the_others_low_and_is_named() {
    let mut world = twelve();
    world.node("z3/r5", "m", "");
    let eight = world.shape_of(8, needs(vec![spread(ZONE, 1)]));
    assert_eq!(nodes(&world, &gang(&[(2, eight)]), &[]), "ag");
    assert_eq!(nodes(&world, &gang(&[(3, eight)]), &[]), "InsufficientResources");
    assert_eq!(
        skew(&world, &gang(&[(3, eight)])),
        Some(SkewLimit { key: ZONE.into(), fails: SkewFailure::MaxSkew(1) })
    );
    // A node that the pod may not go to anyway makes no domain.
    world.room("m", |facts, _| {
        facts.labels.insert("pool".into(), "cpu".into());
    });
    let mut selecting = needs(vec![spread(ZONE, 1)]);
    selecting.affinity = vec![gantry_gang::needs::NodeTerm {
        labels: vec![Requirement {
            key: "pool".into(),
            operator: Operator::DoesNotExist,
            values: Vec::new(),
        }],
        names: Vec::new(),
    }];
    let selecting = world.shape_of(8, selecting);
    assert_eq!(nodes(&world, &gang(&[(3, selecting)]), &[]), "agh");
}

#[test]
fn too_few_domains_count_as_an_empty_one() {
    let mut world = twelve();
    let mut three = spread(ZONE, 1);
    three.min_domains = 3;
    let eight = world.shape_of(8, needs(vec![three]));
    assert_eq!(nodes(&world, &gang(&[(2, eight)]), &[]), "ag");
    assert_eq!(
        skew(&world, &gang(&[(3, eight)])),
        Some(SkewLimit { key: ZONE.into(), fails: SkewFailure::MinDomains { wanted: 3, exist: 2 } })
    );
    // On a cluster in use, too.
    let mut busy = World::new();
    busy.node("z1/r1", "a", ALL);
    for (rack, node) in [("z1/r1", "b"), ("z1/r1", "c"), ("z2/r3", "d"), ("z2/r3", "e")] {
        busy.node(rack, node, "");
    }
    let mut three = spread(ZONE, 1);
    three.min_domains = 3;
    let eight = busy.shape_of(8, needs(vec![three]));
    assert_eq!(nodes(&busy, &gang(&[(3, eight)]), &[]), "CannotFit");
    assert_eq!(skew(&busy, &gang(&[(3, eight)])).map(|skew| skew.key), Some(ZONE.into()));
}

#[test]
fn label_that_no_node_has_is_named() {
    let mut world = twelve();
    let mut five = spread(HOST, 1);
    five.min_domains = 50;
    let labelless = spread("zone", 2);
    for constraints in [vec![labelless.clone()], vec![five.clone(), labelless.clone()], vec![labelless, five]]
    {
        let one = world.shape_of(1, needs(constraints));
        let named = SkewLimit { key: "zone".into(), fails: SkewFailure::NoDomain };
        assert_eq!(skew(&world, &gang(&[(2, one)])), Some(named));
    }
}

#[test]
fn a_constraint_that_contradicts_a_required_level_is_named() {
    let mut world = twelve();
    let eight = world.shape_of(8, needs(vec![spread(ZONE, 1)]));
    let mut wanted = gang(&[(2, eight)]);
    level(&mut wanted, "rack", true);
    assert_eq!(nodes(&world, &wanted, &[]), "CannotFit");
}

#[test]
fn a_node_without_the_label_takes_none() {
    let mut world = World::new();
    world.node("", "a", ALL).node("z/r", "b", ALL);
    let four = world.shape_of(4, needs(vec![spread(ZONE, 1)]));
    assert_eq!(nodes(&world, &gang(&[(2, four)]), &[]), "bb");
}

#[test]
fn shapes_that_count_together_lie_evenly_together() {
    let mut world = twelve();
    let leader = world.shape_of(1, needs(vec![spread(ZONE, 1)]));
    let worker = world.shape_of(8, needs(vec![spread(ZONE, 1)]));
    let placed = nodes(&world, &gang(&[(1, leader), (5, worker)]), &[]);
    let first = placed.chars().filter(|node| ('a'..='f').contains(node)).count();
    assert_eq!((placed.len(), first), (6, 3), "{placed}");
}

#[derive(Debug, Clone)]
struct Case {
    /// Zone, members it takes by devices, pods that count there.
    nodes: Vec<(u8, u32, u32)>,
    /// Constraints of each shape: by node or by zone, and how much.
    shapes: Vec<Vec<(bool, u32)>>,
    members: Vec<u32>,
    min_domains: u32,
}

prop_compose! {
    fn case()(
        nodes in prop::collection::vec((0u8..3, 0u32..4, 0u32..3), 1..5),
        shapes in prop::collection::vec(prop::collection::vec((any::<bool>(), 1u32..4), 0..3), 1..3),
        first in 1u32..6,
        second in 1u32..3,
        min_domains in 1u32..4,
    ) -> Case {
        let mut shapes = shapes;
        for shape in &mut shapes {
            shape.sort_unstable();
            shape.dedup_by_key(|(by_node, _)| *by_node);
        }
        let members = if shapes.len() == 1 { vec![first] } else { vec![first, second] };
        Case { nodes, shapes, members, min_domains }
    }
}

/// Members of each shape on each node.
type On = Vec<Vec<u32>>;

impl Case {
    fn world(&self) -> (World, Vec<ShapeId>, PlanRequest) {
        let mut world = World::new();
        for (index, (zone, takes, _)) in self.nodes.iter().enumerate() {
            let free: Vec<String> = (0..*takes * 2).map(|gpu| gpu.to_string()).collect();
            world.node(&format!("z{zone}/"), &format!("n{index}"), &free.join(","));
        }
        let shapes: Vec<ShapeId> = self
            .shapes
            .iter()
            .map(|constraints| {
                let spread = constraints.iter().map(|(by_node, skew)| Spread {
                    min_domains: self.min_domains,
                    ..spread(if *by_node { HOST } else { ZONE }, *skew)
                });
                world.shape_of(2, needs(spread.collect()))
            })
            .collect();
        let members: Vec<(u32, ShapeId)> = self.members.iter().copied().zip(shapes.clone()).collect();
        let wanted = gang(&members);
        (world, shapes, wanted)
    }

    fn plan(&self) -> Option<Placement> {
        let (world, _, wanted) = self.world();
        let there = (0u32..).map(NodeIx).zip(self.nodes.iter().map(|node| node.2));
        let there: BTreeMap<NodeIx, u32> = there.collect();
        let barred = |shape: &Shape| PlacementRules {
            counted: vec![there.clone(); shape.needs.spread.len()],
            ..PlacementRules::default()
        };
        world.with_barred(&barred, |input| plan(input, &wanted).ok())
    }

    fn domain(&self, node: usize, by_node: bool) -> usize {
        if by_node { node } else { usize::from(self.nodes[node].0) }
    }

    /// How many are in each domain, and in the one with the fewest as kube-scheduler counts.
    fn counts(&self, on: &On, by_node: bool) -> (BTreeMap<usize, u32>, u32) {
        let mut counts = BTreeMap::new();
        for node in 0..self.nodes.len() {
            *counts.entry(self.domain(node, by_node)).or_default() +=
                self.nodes[node].2 + on[node].iter().sum::<u32>();
        }
        let few = counts.len() < self.min_domains as usize;
        let least = if few { 0 } else { *counts.values().min().unwrap() };
        (counts, least)
    }

    /// Whether kube-scheduler lets one more member of a shape go to a node.
    fn admits(&self, on: &On, node: usize, shape: usize) -> bool {
        on[node].iter().sum::<u32>() < self.nodes[node].1
            && self.shapes[shape].iter().all(|(by_node, skew)| {
                let (counts, least) = self.counts(on, *by_node);
                counts[&self.domain(node, *by_node)] + 1 - least <= *skew
            })
    }

    fn holds_in_the_end(&self, on: &On) -> bool {
        (0..self.nodes.len()).all(|node| {
            self.shapes.iter().enumerate().all(|(shape, constraints)| {
                on[node][shape] == 0
                    || constraints.iter().all(|(by_node, skew)| {
                        let (counts, least) = self.counts(on, *by_node);
                        counts[&self.domain(node, *by_node)] <= least + skew
                    })
            })
        })
    }

    /// Whether any way to lay all members holds.
    fn fits(&self) -> bool {
        let mut ways: BTreeSet<On> = [vec![vec![0; self.shapes.len()]; self.nodes.len()]].into();
        for (shape, members) in self.members.iter().enumerate() {
            for _ in 0..*members {
                let mut next = BTreeSet::new();
                for on in &ways {
                    for node in 0..self.nodes.len() {
                        if on[node].iter().sum::<u32>() < self.nodes[node].1 {
                            let mut more = on.clone();
                            more[node][shape] += 1;
                            next.insert(more);
                        }
                    }
                }
                ways = next;
            }
        }
        ways.iter().any(|on| self.holds_in_the_end(on))
    }

    /// Whether kube-scheduler lets members in in some order so that they end as planned.
    fn comes_about(&self, planned: &On) -> bool {
        let mut ways: BTreeSet<On> = [vec![vec![0; self.shapes.len()]; self.nodes.len()]].into();
        while let Some(on) = ways.pop_first() {
            if on == *planned {
                return true;
            }
            for node in 0..self.nodes.len() {
                for shape in 0..self.shapes.len() {
                    if on[node][shape] < planned[node][shape] && self.admits(&on, node, shape) {
                        let mut more = on.clone();
                        more[node][shape] += 1;
                        ways.insert(more);
                    }
                }
            }
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn it_fits_exactly_when_trying_everything_finds_an_even_way(case in case()) {
        let Some(placement) = case.plan() else {
            prop_assert!(!case.fits(), "there is a way");
            return Ok(());
        };
        let mut on: On = vec![vec![0; case.shapes.len()]; case.nodes.len()];
        for place in &placement.places {
            let node: usize = place.node.as_str()[1..].parse().unwrap();
            on[node][place.shape.0 as usize] += 1;
        }
        prop_assert_eq!(placement.places.len(), case.members.iter().sum::<u32>() as usize);
        prop_assert!(case.holds_in_the_end(&on), "{on:?}");
        if case.shapes.iter().map(Vec::len).sum::<usize>() <= 1 {
            prop_assert!(case.comes_about(&on), "kube-scheduler never lets them in: {on:?}");
        }
    }
}
