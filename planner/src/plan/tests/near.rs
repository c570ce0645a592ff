//! Members that must be near others (required pod affinity): leaders and workers, anchors in several domains, pods outside the gang, and
//! held against trying everything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_gang::needs::{Operator, PodTerm, Requirement};
use gantry_gang::protocol::{MemberRule, Placement, PlanRequest, Refusal, ShapeId, Sibling};
use gantry_gang::{Needs, Resources};
use proptest::prelude::*;

use super::backfill::marked;
use super::world::{World, gang, sibling};
use super::{ALL, twelve};
use crate::input::{PlacementRules, Shape};
use crate::plan::plan;
use crate::snapshot::NodeIx;

const ZONE: &str = "example.com/zone";
const RACK: &str = "example.com/rack";
const HOST: &str = "kubernetes.io/hostname";

/// Near a pod of one of these roles.
fn near(roles: &[&str], key: &str) -> PodTerm {
    PodTerm {
        selector: vec![Requirement {
            key: "role".into(),
            operator: Operator::In,
            values: roles.iter().map(|role| (*role).into()).collect(),
        }],
        namespaces: Some(Vec::new()),
        topology_key: key.into(),
    }
}

fn needs(role: &str, together_with: Vec<PodTerm>) -> Needs {
    Needs {
        resources: Resources { pods: 1, ..Resources::default() },
        namespace: "ml".into(),
        labels: Arc::new([("role".into(), role.into())].into()),
        together_with,
        ..Needs::default()
    }
}

/// Where members go beside pods of these roles: `leaders/workers` and so on by shape; or why nowhere.
fn nodes(world: &World, wanted: &PlanRequest, there: &[(&str, &str)]) -> String {
    let barred = |shape: &Shape| barred(world, &shape.needs, there);
    world.with_barred(&barred, |input| match plan(input, wanted) {
        Ok(placement) => {
            let mut by_shape: BTreeMap<ShapeId, Vec<&str>> = BTreeMap::new();
            for place in &placement.places {
                by_shape.entry(place.shape).or_default().push(place.node.as_str());
            }
            by_shape.into_values().map(|nodes| nodes.concat()).collect::<Vec<_>>().join("/")
        }
        Err(refused) => refused.reason().to_string(),
    })
}

/// What pods of some roles on some nodes mean for a new one.
fn barred(world: &World, needs: &Needs, there: &[(&str, &str)]) -> PlacementRules {
    let label = |node: NodeIx, key: &str| {
        let facts = world.rooms[node.0 as usize].facts.as_ref()?;
        facts.labels.get(key).cloned()
    };
    let drawn = there
        .iter()
        .filter(|(_, role)| needs.is_drawn_to("ml", &[(Arc::from("role"), Arc::from(*role))].into()));
    let drawn: Vec<NodeIx> = drawn.map(|(node, _)| world.snapshot.find(node).unwrap()).collect();
    let of_term = |term: &PodTerm| {
        let shares = |node: &NodeIx| {
            let value = label(*node, &term.topology_key);
            value.is_some() && drawn.iter().any(|other| label(*other, &term.topology_key) == value)
        };
        (0u32..).take(world.rooms.len()).map(NodeIx).filter(shares).collect()
    };
    PlacementRules { near: needs.together_with.iter().map(of_term).collect(), ..PlacementRules::default() }
}

#[test]
fn workers_lie_where_their_leader_does() {
    let mut world = twelve();
    let leader = world.shape_of(4, needs("leader", Vec::new()));
    let by_host = world.shape_of(2, needs("worker", vec![near(&["leader"], HOST)]));
    let by_rack = world.shape_of(8, needs("worker", vec![near(&["leader"], RACK)]));
    assert_eq!(nodes(&world, &gang(&[(1, leader), (2, by_host)]), &[]), "a/aa");
    assert_eq!(nodes(&world, &gang(&[(1, leader), (3, by_host)]), &[]), "CannotFit");
    assert_eq!(nodes(&world, &gang(&[(1, leader), (2, by_rack)]), &[]), "a/bc");
    // Several leaders have workers each.
    assert_eq!(nodes(&world, &gang(&[(3, leader), (4, by_host)]), &[]), "abc/aabb");
    // The workers of one rack have a leader elsewhere too.
    assert_eq!(nodes(&world, &gang(&[(2, leader), (4, by_rack)]), &[]), "ad/bcef");
}

#[test]
fn affinity_among_members_is_named_where_it_fails() {
    let mut world = twelve();
    let alike = world.shape_of(4, needs("alike", vec![near(&["alike"], HOST)]));
    let rule = |wanted: &PlanRequest| {
        let barred = |shape: &Shape| barred(&world, &shape.needs, &[]);
        match world.with_barred(&barred, |input| plan(input, wanted)) {
            Err(Refusal::DoesNotFit(shortage)) => shortage.rule,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(rule(&gang(&[(3, alike)])), Some(MemberRule::Together(HOST.into())));
    assert_eq!(rule(&gang(&[(30, alike)])), None, "it would not fit without either");
}

#[test]
fn who_is_let_in_after_siblings_is_marked() {
    let mut world = twelve();
    let leader = world.shape_of(4, needs("leader", Vec::new()));
    let worker = world.shape_of(2, needs("worker", vec![near(&["leader"], RACK)]));
    let alike = world.shape_of(2, needs("alike", vec![near(&["alike"], RACK)]));
    let either = world.shape_of(2, needs("either", vec![near(&["either", "leader"], RACK)]));
    let follow = |members: &[(u32, ShapeId)], there: &[(&str, &str)]| -> Vec<bool> {
        let barred = |shape: &Shape| barred(&world, &shape.needs, there);
        let placement = world.with_barred(&barred, |input| plan(input, &gang(members)));
        let mut places = placement.unwrap().places;
        places.sort_by_key(|place| place.rank);
        places.iter().map(|place| place.follows).collect()
    };
    assert_eq!(follow(&[(1, leader), (1, worker)], &[]), [false, true]);
    assert_eq!(follow(&[(1, leader), (1, worker)], &[("a", "leader")]), [false, false]);
    assert_eq!(follow(&[(2, alike)], &[]), [false, false], "the first begins, and holds the others' place");
    assert_eq!(follow(&[(2, either)], &[]), [false, false]);
    assert_eq!(follow(&[(1, leader), (1, either)], &[]), [false, true]);
}

#[test]
fn workers_without_a_leader_are_not_placed() {
    let mut world = twelve();
    let other = world.shape_of(1, needs("other", Vec::new()));
    let worker = world.shape_of(1, needs("worker", vec![near(&["leader"], RACK)]));
    let wanted = gang(&[(1, other), (1, worker)]);
    assert_eq!(nodes(&world, &wanted, &[]), "InsufficientResources");
    // A leader of another gang serves as well.
    assert_eq!(nodes(&world, &wanted, &[("k", "leader")]), "j/j");
    // Shapes that wait for each other are never let in.
    let egg = world.shape_of(1, needs("egg", vec![near(&["hen"], RACK)]));
    let hen = world.shape_of(1, needs("hen", vec![near(&["egg"], RACK)]));
    assert_eq!(nodes(&world, &gang(&[(1, egg), (1, hen)]), &[]), "CannotFit");
    assert_eq!(nodes(&world, &gang(&[(1, egg), (1, hen)]), &[("d", "hen")]), "d/d");
}

#[test]
fn affinity_may_be_met_in_several_domains() {
    let mut world = World::new();
    world.node("z/r", "a", ALL).node("z/r", "b", ALL);
    let six = world.shape_of(6, needs("t", Vec::new()));
    let one = world.shape_of(1, needs("t", vec![near(&["t"], HOST)]));
    let five = world.shape_of(5, needs("other", Vec::new()));
    assert!(nodes(&world, &gang(&[(2, six), (2, one)]), &[]).starts_with("ab/"));
    assert!(nodes(&world, &gang(&[(2, six), (3, one)]), &[]).starts_with("ab/"));
    // One of two that need not be near anybody lies elsewhere.
    assert_eq!(nodes(&world, &gang(&[(2, five), (3, one)]), &[]), "aaa/ab");
    // The first goes anywhere, all others to it.
    assert_eq!(nodes(&world, &gang(&[(8, one)]), &[]), "aaaaaaaa");
    assert_eq!(nodes(&world, &gang(&[(9, one)]), &[]), "CannotFit");
}

#[test]
fn members_join_existing_pods_and_reserved_members() {
    let mut world = twelve();
    let eight = world.shape_of(8, needs("t", vec![near(&["t"], RACK)]));
    assert_eq!(nodes(&world, &gang(&[(2, eight)]), &[("l", "t")]), "jk");
    assert_eq!(nodes(&world, &gang(&[(5, eight)]), &[("l", "t"), ("a", "t")]), "abcjk");
    assert_eq!(nodes(&world, &gang(&[(4, eight)]), &[("l", "t")]), "InsufficientResources");
    let mut wanted = gang(&[(1, eight)]);
    wanted.placed = vec![Sibling { shape: Some(eight), ..sibling("h", 7) }];
    wanted.without = vec!["h".into()];
    assert_eq!(nodes(&world, &wanted, &[]), "g");
}

#[test]
fn gang_that_never_fits_gets_no_backfill_reservation() {
    let mut world = World::new();
    world.node("z/r", "a", "0,1").node("z/r", "b", "0");
    let leader = world.shape_of(8, needs("leader", Vec::new()));
    let worker = world.shape_of(1, needs("worker", vec![near(&["leader"], HOST)]));
    let wanted = gang(&[(1, leader), (1, worker)]);
    let refused = world.plan(&wanted).unwrap_err();
    assert!(refused.is_hopeless());
    assert!(world.explain(&wanted).hopeless);
    assert_eq!(marked(&world, &wanted), "");
    // Beside a leader of another gang it would.
    let barred = |shape: &Shape| barred(&world, &shape.needs, &[("b", "leader")]);
    let refused = world.with_barred(&barred, |input| plan(input, &wanted));
    assert!(!refused.unwrap_err().is_hopeless());
}

#[test]
fn backfill_reservation_holds_members_with_affinity() {
    let mut world = World::new();
    world.node("z/r1", "a", "0,1,2,3,4,5,6").node("z/r1", "b", "0");
    world.node("z/r2", "c", "0,1,2,3,4,5").node("z/r2", "d", "0,1");
    let leader = world.shape_of(8, needs("leader", Vec::new()));
    let worker = world.shape_of(8, needs("worker", vec![near(&["leader"], RACK)]));
    let free = world.shape_of(8, needs("worker", Vec::new()));
    assert_eq!(marked(&world, &gang(&[(1, leader), (1, free)])), "ac", "those with most free");
    assert_eq!(marked(&world, &gang(&[(1, leader), (1, worker)])), "ab", "of one rack");
    assert_eq!(marked(&world, &gang(&[(1, leader), (2, worker)])), "");
}

/// By node or by zone, near which roles.
type Near = (bool, Vec<usize>);

#[derive(Debug, Clone)]
struct Case {
    /// Zone, GPUs free, role of a pod that is there.
    nodes: Vec<(u8, u32, Option<usize>)>,
    /// GPUs of each shape, and its terms. The role of a shape is its number.
    shapes: Vec<(u32, Vec<Near>)>,
    members: Vec<u32>,
}

prop_compose! {
    fn case()(
        nodes in prop::collection::vec((0u8..3, 0u32..5, prop::option::weighted(0.15, 0usize..3)), 1..5),
        shapes in prop::collection::vec(
            (1u32..4, prop::collection::vec((any::<bool>(), prop::collection::vec(0usize..3, 1..3)), 0..3)),
            1..4,
        ),
        members in prop::collection::vec(1u32..4, 3),
    ) -> Case {
        let members = members[..shapes.len()].to_vec();
        Case { nodes, shapes, members }
    }
}

/// Members of each shape on each node.
type On = Vec<Vec<u32>>;

const ROLES: [&str; 3] = ["r0", "r1", "r2"];

impl Case {
    fn plan(&self) -> Option<Placement> {
        let mut world = World::new();
        for (index, (zone, free, _)) in self.nodes.iter().enumerate() {
            let free: Vec<String> = (0..*free).map(|gpu| gpu.to_string()).collect();
            world.node(&format!("z{zone}/"), &format!("n{index}"), &free.join(","));
        }
        let mut members = Vec::new();
        for (shape, (gpus, terms)) in self.shapes.iter().enumerate() {
            let terms = terms.iter().map(|(by_node, roles)| {
                let roles: Vec<&str> = roles.iter().map(|role| ROLES[*role]).collect();
                near(&roles, if *by_node { HOST } else { ZONE })
            });
            let shape_id = world.shape_of(*gpus, needs(ROLES[shape], terms.collect()));
            members.push((self.members[shape], shape_id));
        }
        let names: Vec<String> = (0..self.nodes.len()).map(|index| format!("n{index}")).collect();
        let there: Vec<(&str, &str)> = names
            .iter()
            .zip(&self.nodes)
            .filter_map(|(name, node)| Some((name.as_str(), ROLES[node.2?])))
            .collect();
        let barred = |shape: &Shape| barred(&world, &shape.needs, &there);
        world.with_barred(&barred, |input| plan(input, &gang(&members)).ok())
    }

    fn share(&self, one: usize, other: usize, by_node: bool) -> bool {
        if by_node { one == other } else { self.nodes[one].0 == self.nodes[other].0 }
    }

    /// Whether kube-scheduler lets one more member of a shape go to a node.
    fn admits(&self, on: &On, node: usize, shape: usize) -> bool {
        let terms = &self.shapes[shape].1;
        let counts = |role: usize| terms.iter().all(|(_, roles)| roles.contains(&role));
        let there: Vec<usize> = (0..self.nodes.len())
            .filter(|other| {
                self.nodes[*other].2.is_some_and(counts)
                    || (0..self.shapes.len()).any(|shape| on[*other][shape] > 0 && counts(shape))
            })
            .collect();
        let near = |by_node: bool| there.iter().any(|other| self.share(*other, node, by_node));
        terms.iter().all(|(by_node, _)| near(*by_node)) || there.is_empty() && counts(shape)
    }

    fn has_room(&self, on: &On, node: usize, shape: usize) -> bool {
        let used: u32 = on[node].iter().zip(&self.shapes).map(|(on, shape)| on * shape.0).sum();
        used + self.shapes[shape].0 <= self.nodes[node].1
    }

    fn nowhere(&self) -> On {
        vec![vec![0; self.shapes.len()]; self.nodes.len()]
    }

    /// Every way in which kube-scheduler lets members in one by one, up to `most` of each shape on each node; whether one leads to `end`.
    fn reaches(&self, most: impl Fn(&On, usize, usize) -> bool, end: impl Fn(&On) -> bool) -> bool {
        let mut open: BTreeSet<On> = [self.nowhere()].into();
        let mut seen = open.clone();
        while let Some(on) = open.pop_first() {
            if end(&on) {
                return true;
            }
            for node in 0..self.nodes.len() {
                for shape in 0..self.shapes.len() {
                    if most(&on, node, shape) && self.admits(&on, node, shape) {
                        let mut more = on.clone();
                        more[node][shape] += 1;
                        if seen.insert(more.clone()) {
                            open.insert(more);
                        }
                    }
                }
            }
        }
        false
    }

    fn total(&self, on: &On, shape: usize) -> u32 {
        on.iter().map(|on| on[shape]).sum()
    }

    fn fits(&self) -> bool {
        self.reaches(
            |on, node, shape| self.total(on, shape) < self.members[shape] && self.has_room(on, node, shape),
            |on| (0..self.shapes.len()).all(|shape| self.total(on, shape) == self.members[shape]),
        )
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn gang_fits_if_and_only_if_some_order_admits_all(case in case()) {
        let Some(placement) = case.plan() else {
            prop_assert!(!case.fits(), "there is a way");
            return Ok(());
        };
        let mut on = case.nowhere();
        for place in &placement.places {
            let node: usize = place.node.as_str()[1..].parse().unwrap();
            on[node][place.shape.0 as usize] += 1;
        }
        prop_assert_eq!(placement.places.len(), case.members.iter().sum::<u32>() as usize);
        let comes_about = case.reaches(|now, node, shape| now[node][shape] < on[node][shape], |now| *now == on);
        prop_assert!(comes_about, "kube-scheduler never lets them in: {on:?}");
    }
}
