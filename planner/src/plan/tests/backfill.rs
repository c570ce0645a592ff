//! The nodes that are kept free for a gang that is next and does not fit yet.

use gantry_gang::protocol::PlanRequest;
use gantry_gang::{Needs, Resources};

use super::ALL;
use super::world::{World, gang, level};
use crate::plan::backfill_nodes;

/// The nodes that are kept, one after the other.
pub(super) fn marked(world: &World, wanted: &PlanRequest) -> String {
    let nodes = world.with(|input| backfill_nodes(input, wanted));
    let names = nodes.iter().map(|node| world.snapshot.names.name(*node).unwrap().as_str());
    names.collect()
}

#[test]
fn nodes_are_reserved_where_least_is_missing() {
    let mut world = World::new();
    world.node("z/r1", "a", "0,1").node("z/r1", "b", "0,1,2,3,4,5");
    world.node("z/r2", "c", ALL).node("z/r2", "d", "7").node("z/r2", "e", "0,1,2,3,4");
    world.node("z/r3", "f", ALL);
    let eight = world.shape(8);
    let mut two = gang(&[(2, eight)]);
    level(&mut two, "rack", true);
    assert_eq!(marked(&world, &two), "ce", "three GPUs are missing there, in the other rack eight");
    level(&mut two, "rack", false);
    assert_eq!(marked(&world, &two), "cf", "anywhere nothing is missing");
    assert_eq!(marked(&world, &gang(&[(7, eight)])), "", "it will never fit");
}

fn cpu(milli_cpu: i64) -> Needs {
    Needs { resources: Resources { milli_cpu, pods: 1, ..Resources::default() }, ..Needs::default() }
}

#[test]
fn nodes_are_kept_for_shapes_that_have_to_share_them() {
    let mut world = World::new();
    world.node("z/r1", "a", "0,1,2").node("z/r1", "b", "0");
    world.node("z/r2", "c", ALL);
    let (leader, worker) = (world.shape_of(4, cpu(1000)), world.shape_of(4, cpu(2000)));
    let mut wanted = gang(&[(1, leader), (3, worker)]);
    level(&mut wanted, "rack", true);
    assert!(!world.plan(&wanted).unwrap_err().is_hopeless());
    assert_eq!(marked(&world, &wanted), "ab", "all of the only rack that holds it");
    // Each shape by itself would fit, and both never do.
    let mut five = gang(&[(1, leader), (4, worker)]);
    level(&mut five, "rack", true);
    assert_eq!(marked(&world, &five), "");
}

#[test]
fn place_with_fewest_missing_devices_is_reserved() {
    let mut world = World::new();
    world.node("z/r1", "a", "0").node("z/r1", "b", "");
    world.node("z/r2", "c", "0,1").node("z/r2", "d", "0,1,2,3,4,5,6");
    let (leader, worker) = (world.shape_of(4, cpu(1000)), world.shape_of(4, cpu(2000)));
    let mut wanted = gang(&[(1, leader), (3, worker)]);
    level(&mut wanted, "rack", true);
    assert_eq!(marked(&world, &wanted), "cd");
    let mut pair = gang(&[(1, leader), (1, worker)]);
    level(&mut pair, "node", true);
    assert_eq!(marked(&world, &pair), "d");
}
