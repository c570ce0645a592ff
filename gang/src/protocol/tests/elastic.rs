//! Gangs far larger than their minimum.

use gantry_api::GangPhase;

use super::world::World;
use crate::terms::work;

/// A bound gang of which one member is needed, with so many more on their way.
fn with_extras(count: u32) -> World {
    let mut world = World::new();
    world.members("a", 1 + count, 1);
    world.pass(2);
    world.plan();
    world.come("a0");
    world.write();
    world.bind("a0");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world
}

/// Things looked at for each member that comes to its place, of so many beyond the minimum.
fn looked_at(count: u32) -> u64 {
    let mut world = with_extras(count);
    work::take();
    for number in 1..=50 {
        world.come(&format!("a{number}"));
    }
    work::take() / 50
}

#[test]
fn arriving_member_costs_the_same_in_large_gangs() {
    let (few, many) = (looked_at(100), looked_at(2_000));
    assert!(many <= few.max(2), "{few} with 100, {many} with 2,000");
}

#[test]
fn surplus_member_absent_at_timeout_releases_reservation() {
    // Surplus members that have arrived, or are being bound, keep their reservations.
    let mut world = with_extras(4);
    world.pass(30);
    world.come("a1");
    world.pass(20);
    world.write_down();
    world.bind("a2");
    assert_eq!(world.reserved().len(), 3, "a1, a3 and a4");
    world.pass(20);
    let left: Vec<String> = world.reserved();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(world.node("a1"), "n1");
    world.waits("a3");
}
