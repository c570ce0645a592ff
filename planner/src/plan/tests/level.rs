//! Gangs over several racks: as many members in one as in another.

use std::collections::BTreeMap;

use gantry_gang::protocol::PlanRequest;

use super::ALL;
use super::world::{World, gang, level, terms};

/// Racks of so many nodes of eight GPUs.
fn racks(nodes: &[usize]) -> World {
    let mut world = World::new();
    for (rack, nodes) in nodes.iter().enumerate() {
        for node in 0..*nodes {
            world.node(&format!("z/r{rack:02}"), &format!("r{rack:02}n{node:02}"), ALL);
        }
    }
    world
}

/// How many members are in each rack, and on how many nodes they are.
fn by_rack(world: &World, wanted: &PlanRequest) -> (Vec<u32>, usize) {
    let places = world.plan(wanted).unwrap().places;
    let mut racks: BTreeMap<&str, u32> = BTreeMap::new();
    let mut nodes: BTreeMap<&str, u32> = BTreeMap::new();
    for place in &places {
        let node = place.node.as_str();
        *racks.entry(&node[..3]).or_default() += 1;
        *nodes.entry(node).or_default() += 1;
    }
    (racks.into_values().collect(), nodes.len())
}

/// In slices of so many within a rack each.
fn sliced(mut wanted: PlanRequest, size: u32) -> PlanRequest {
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(size));
    wanted
}

#[test]
fn no_rack_gets_the_rest_alone() {
    let mut world = racks(&[18; 9]);
    let eight = world.shape(8);
    assert_eq!(by_rack(&world, &gang(&[(128, eight)])), (vec![16; 8], 128));
    // It runs along the tree still.
    let placement = world.plan(&gang(&[(128, eight)])).unwrap();
    let nodes: Vec<&str> = placement.places.iter().map(|place| place.node.as_str()).collect();
    assert!(nodes.is_sorted());
    assert_eq!(&*placement.domain, "8 racks of zone z");
}

#[test]
fn smaller_rack_is_filled_and_the_others_share_the_rest() {
    let mut world = racks(&[18, 18, 7, 18]);
    let eight = world.shape(8);
    assert_eq!(by_rack(&world, &gang(&[(59, eight)])).0, [18, 17, 7, 17]);
}

#[test]
fn slices_are_shared_out_as_wholes() {
    let mut world = racks(&[18; 9]);
    let eight = world.shape(8);
    let wanted = sliced(gang(&[(120, eight)]), 4);
    let (racks, _) = by_rack(&world, &wanted);
    assert_eq!(racks, [16, 16, 16, 16, 16, 16, 12, 12]);
}

#[test]
fn no_more_nodes_are_broken_for_it() {
    let mut world = racks(&[18; 3]);
    let one = world.shape(1);
    // 25 nodes of eight.
    assert_eq!(by_rack(&world, &gang(&[(200, one)])), (vec![104, 96], 25));
    let three = world.shape(3);
    // Two to a node.
    assert_eq!(by_rack(&world, &gang(&[(50, three)])), (vec![26, 24], 25));
}

#[test]
fn a_leader_and_workers_are_shared_out_too() {
    let mut world = racks(&[18; 9]);
    let (seven, eight) = (world.shape(7), world.shape(8));
    assert_eq!(by_rack(&world, &gang(&[(1, seven), (127, eight)])).0, vec![16; 8]);
    let wanted = sliced(gang(&[(1, seven), (119, eight)]), 4);
    assert_eq!(by_rack(&world, &wanted).0, [16, 16, 16, 16, 16, 16, 12, 12]);
}

#[test]
fn as_many_workers_as_fit_come_with_their_leader() {
    let mut world = racks(&[18; 4]);
    let (seven, eight) = (world.shape(7), world.shape(8));
    let mut wanted = gang(&[(1, seven), (100, eight)]);
    wanted.must = 50;
    terms(&mut wanted, |terms| terms.min = 50);
    assert_eq!(by_rack(&world, &wanted), (vec![18; 4], 72));
}
