//! Members with terms for their devices, and nodes with a Topology Manager that aligns them.

use std::sync::Arc;

use gantry_api::placement::DomainLoss;
use gantry_api::{KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};
use gantry_gang::protocol::{Obstacle, ShapeId};
use proptest::prelude::*;

use super::world::{World, gang};
use crate::devices::DeviceSet;
use crate::fixtures::{GPU, bridged, plain, request_of_two, set};
use crate::kind::Kinds;
use crate::numa::Alignment;
use crate::placement::PlacementRequest;
use crate::snapshot::{NodeState, Pool};

fn aligned(world: &mut World) {
    aligned_in(world, TopologyManagerScope::Container);
}

/// The GPUs of each pool are on two NUMA nodes, four and four.
fn aligned_in(world: &mut World, scope: TopologyManagerScope) {
    let policy = TopologyManagerPolicy::SingleNumaNode;
    let kubelet = KubeletTopology { policy, scope, ..KubeletTopology::default() };
    let numa: Vec<Option<u32>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    let alignment = Alignment::new(&kubelet, &numa).map(Arc::new);
    for class in Arc::make_mut(&mut world.snapshot.classes) {
        if let NodeState::Ours(class) = Arc::make_mut(class) {
            class.pools.iter_mut().for_each(|pool| pool.alignment.clone_from(&alignment));
        }
    }
}

/// Members of so many GPUs with an annotation.
fn asking(world: &mut World, gpus: u32, name: &str, value: &str) -> ShapeId {
    let shape = world.shape(gpus);
    let name = format!("gantry.dev/{name}");
    let own = &mut world.shapes[shape.0 as usize];
    let request = Arc::unwrap_or_clone(Arc::clone(&own.request));
    let annotations = [(&*name, value)].into_iter();
    own.request = Arc::new(request.placed_by(annotations, &PlacementRequest::default()).unwrap());
    shape
}

/// Nodes `a` and `b` in a rack, `c` and `d` in racks of their own.
fn pair_and_two(change: impl Fn(&mut crate::snapshot::Class, bool)) -> World {
    let mut world = World::new();
    for (at, name) in [("z1/r1", "a"), ("z1/r1", "b"), ("z1/r2", "c"), ("z1/r3", "d")] {
        world.node_of(at, name, |class| change(class, at == "z1/r1"));
    }
    world
}

/// Why `domain` lost, at any level.
fn loss(world: &World, members: &[(u32, ShapeId)], domain: &str) -> DomainLoss {
    let compared = world.plan(&gang(members)).unwrap().compared.unwrap();
    let mut others = compared.levels.iter().flat_map(|level| &level.others);
    others.find(|other| other.domain == domain).unwrap_or_else(|| panic!("{compared:?}")).reason
}

#[test]
fn economy_takes_cheap_nodes_before_a_narrow_scope() {
    let mut world = pair_and_two(|class, is_pair| class.cost = if is_pair { 20 } else { 10 });
    let fast = world.shape(8);
    let economical = asking(&mut world, 8, "economy", "true");
    assert_eq!(world.nodes(&gang(&[(2, fast)])), "ab");
    assert_eq!(world.nodes(&gang(&[(2, economical)])), "cd");
    assert_eq!(world.nodes(&gang(&[(4, economical)])), "abcd");
    assert_eq!(loss(&world, &[(2, economical)], "rack r1"), DomainLoss::Cost);
    // One that fits on a node goes to a cheap node.
    let small = asking(&mut world, 2, "economy", "true");
    assert_eq!(world.nodes(&gang(&[(2, small)])), "cc");
    assert_eq!(loss(&world, &[(2, small)], "a"), DomainLoss::Cost);
}

#[test]
fn models_are_taken_in_the_order_of_the_list() {
    let model = |is_pair| if is_pair { "NVIDIA A100-SXM4-80GB" } else { "NVIDIA H100 80GB HBM3" };
    let mut world = pair_and_two(|class, is_pair| class.models = vec![model(is_pair).into(); 8].into());
    let any = world.shape(8);
    let listed = asking(&mut world, 8, "gpu-models", "H100, A100");
    assert_eq!(world.nodes(&gang(&[(2, any)])), "ab");
    assert_eq!(world.nodes(&gang(&[(2, listed)])), "cd");
    assert_eq!(world.nodes(&gang(&[(3, listed)])), "abc");
    assert_eq!(loss(&world, &[(2, listed)], "rack r1"), DomainLoss::Model);
    let other = asking(&mut world, 8, "gpu-models", "A100, H100");
    assert_eq!(world.nodes(&gang(&[(2, other)])), "ab");
}

#[test]
fn preferred_link_decides_before_the_scope() {
    let mut kinds = Kinds::default();
    let (unlinked, linked) = (kinds.of(&plain(8)), kinds.of(&bridged()));
    let mut world = pair_and_two(|class, is_pair| {
        class.kind = Arc::clone(if is_pair { &unlinked } else { &linked });
        let pool = &mut class.pools[0];
        (pool.free, pool.open) = (DeviceSet::range(0, 2), DeviceSet::range(0, 2));
    });
    let any = world.shape(2);
    let linked = asking(&mut world, 2, "preferred-link", "nvlink");
    assert_eq!(world.nodes(&gang(&[(2, any)])), "ab");
    assert_eq!(world.nodes(&gang(&[(2, linked)])), "cd");
    assert_eq!(loss(&world, &[(2, linked)], "rack r1"), DomainLoss::Preference);
    let three = world.nodes(&gang(&[(3, linked)]));
    assert_eq!(three.len(), 3, "a preference is no requirement: {three}");
}

/// The shapes of one gang are compared together: the member that prefers nothing does not keep the other from what it
/// prefers.
#[test]
fn one_shape_of_two_may_have_preferences() {
    let mut world = pair_and_two(|class, is_pair| class.cost = if is_pair { 20 } else { 10 });
    let economical = asking(&mut world, 8, "economy", "true");
    let any = world.shape(4);
    let nodes = world.nodes(&gang(&[(2, economical), (1, any)]));
    assert!(nodes.starts_with("cd"), "{nodes}");
}

proptest! {
    /// The dearest node of an economical gang is the cheapest that any placement can have as its dearest, against trying
    /// every limit.
    #[test]
    fn no_cheaper_nodes_hold_the_gang(
        nodes in prop::collection::vec((0u8..4, 0u64..5, 0usize..=8), 1..8),
        (members, gpus) in (1u32..8, 1u32..5),
    ) {
        let mut world = World::new();
        for (number, (rack, cost, free)) in nodes.iter().enumerate() {
            world.node_of(&format!("z/r{rack}"), &format!("n{number}"), |class| {
                class.cost = *cost;
                let pool = &mut class.pools[0];
                (pool.free, pool.open) = (DeviceSet::range(0, *free), DeviceSet::range(0, *free));
            });
        }
        let shape = asking(&mut world, gpus, "economy", "true");
        let room = |limit: u64| -> usize {
            let cheap = nodes.iter().filter(|(_, cost, _)| *cost <= limit);
            cheap.map(|(.., free)| free / gpus as usize).sum()
        };
        let best = (0..5).find(|limit| room(*limit) >= members as usize);
        let placed = world.plan(&gang(&[(members, shape)]));
        let cost = |node: &str| nodes[node[1..].parse::<usize>().unwrap()].1;
        let dearest = placed.ok().and_then(|placed| {
            placed.places.iter().map(|place| cost(place.node.as_str())).max()
        });
        prop_assert_eq!(dearest, best);
    }
}

/// Two nodes of eight GPUs hold five members of three, unless each has to be on one NUMA node of four.
#[test]
fn members_are_counted_as_kubelet_admits_them() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5,6,7").node("z1/r1", "b", "0,1,2,3,4,5,6,7");
    let three = world.shape(3);
    aligned(&mut world);
    assert_eq!(world.line(&gang(&[(4, three)])), "rack r1: a[0,1,2 4,5,6] b[0,1,2 4,5,6]");
    assert!(world.plan(&gang(&[(5, three)])).is_err());
}

/// Kubelet aligns each member by itself, not all members of a node together.
#[test]
fn members_are_aligned_one_by_one_in_scope_pod() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5,6,7");
    let four = world.shape(4);
    aligned_in(&mut world, TopologyManagerScope::Pod);
    assert_eq!(world.line(&gang(&[(2, four)])), "node a: a[0,1,2,3 4,5,6,7]");
}

/// The GPUs of another resource that are free are on the second NUMA node of `a`, and on both of `b`.
#[test]
fn members_with_two_resources_are_aligned_together() {
    let mut world = World::new();
    for (name, free) in [("a", set("4,5")), ("b", set("0,4"))] {
        world.node_of("z1/r1", name, |class| {
            let free = DeviceSet::from(free);
            let other =
                Pool { resource: OTHER.into(), free: free.clone(), open: free, ..class.pools[0].clone() };
            class.pools.push(other);
        });
    }
    let both = world.asking(request_of_two([GPU, OTHER], &[[1, 1]]));
    let three = world.asking(request_of_two([GPU, OTHER], &[[3, 1]]));
    let two = world.asking(request_of_two([GPU, OTHER], &[[1, 2]]));
    for scope in [TopologyManagerScope::Container, TopologyManagerScope::Pod] {
        aligned_in(&mut world, scope);
        assert_eq!(world.line(&gang(&[(2, both)])), "node a: a[4 5]", "{scope:?}");
        assert_eq!(world.line(&gang(&[(2, three)])), "node b: b[0,1,2 4,5,6]");
        assert_eq!(world.line(&gang(&[(3, three)])), "rack r1: a[4,5,6] b[0,1,2 4,5,6]");
        assert_eq!(world.line(&gang(&[(1, two)])), "node a: a[4]");
        assert!(world.plan(&gang(&[(2, two)])).is_err());
    }
}

const OTHER: &str = "example.com/gpu";

#[test]
fn members_get_the_link_that_they_require() {
    let mut world = World::of(&bridged());
    world.node("z1/r1", "a", "0,2,4,6").node("z1/r1", "b", "0,1,2,4,6,7");
    let two = asking(&mut world, 2, "required-link", "nvlink");
    assert_eq!(world.line(&gang(&[(2, two)])), "node b: b[0,1 6,7]");
    let obstacles = world.shortage(&gang(&[(3, two)])).obstacles.unwrap();
    assert_eq!((obstacles.nodes, obstacles.found), (None, vec![(Obstacle::PlacementTerms, 0)]));
}

/// Neither pod affinity nor host ports are the reason.
#[test]
fn topology_manager_is_named_as_the_obstacle() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5,6,7").node("z1/r1", "b", "0,1,2,3,4,5,6,7");
    let five = world.shape(5);
    aligned(&mut world);
    let wanted = gang(&[(2, five)]);
    let obstacles = world.shortage(&wanted).obstacles.unwrap();
    assert_eq!((obstacles.nodes, obstacles.found), (Some(2), vec![(Obstacle::TopologyManager, 2)]));
    let levels = world.explain(&wanted).levels;
    let mut reasons: Vec<String> =
        levels.into_iter().flat_map(|level| level.reasons).map(|(reason, _)| reason).collect();
    reasons.dedup();
    insta::assert_snapshot!(reasons.join("\n"), @"the Topology Manager (single-numa-node) would refuse 5 devices: 4 + 4 are free by NUMA node");
}
