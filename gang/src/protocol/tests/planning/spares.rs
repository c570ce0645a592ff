//! Places of members beyond the minimum: which may be given back to others, and which never.

use std::collections::BTreeSet;

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, key, member, membership, with_rank};
use crate::fabric::{Level, Levels};
use crate::membership::Membership;
use crate::protocol::GangEvent;
use crate::protocol::Settings;
use crate::protocol::tests::world::released;
use crate::terms::TopologyRequest;

/// The places of a gang that it can do without.
fn spares(world: &World, gang: &str) -> BTreeSet<u32> {
    let view = world.gangs.view(&key(gang)).unwrap();
    view.surplus().map(|(_, spare)| spare.slot).collect()
}

#[test]
fn extras_come_and_go_without_the_gang() {
    let mut world = World::new();
    world.members("a", 4, 2);
    world.plan();
    world.come("a0");
    let extras = spares(&world, "a");
    assert_eq!(extras.len(), 2);
    assert_eq!(released(world.handle(GangEvent::ReleaseSurplus { gang: &key("a"), slots: &extras })), 2);
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.reserved().len(), 2);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
    assert_eq!(released(world.handle(GangEvent::ReleaseSurplus { gang: &key("a"), slots: &extras })), 0);
}

#[test]
fn surplus_reservations_release_the_last_ranks_first() {
    // A member that a role needs is never surplus.
    let mut world = World::new();
    for rank in 0..4 {
        let membership = with_rank(membership("a", 2), rank);
        // The UIDs run the other way.
        world.see(member(&format!("a{}", 3 - rank), membership));
    }
    world.plan();
    let view = world.gangs.view(&key("a")).unwrap();
    let pods: Vec<&str> = view.surplus().map(|(_, spare)| spare.pod.unwrap().as_str()).collect();
    assert_eq!(pods, ["a0", "a1"]);
    assert_eq!(world.gangs.may_give_back().count(), 1);
}

/// Whoever takes over goes by the decision: it would keep places that somebody else has by then.
#[test]
fn places_that_stand_in_the_decision_are_not_given_back() {
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    assert_eq!(spares(&world, "a").len(), 1);
    world.come("a0");
    world.come("a1");
    assert_eq!(world.phase("a"), GangPhase::Committing);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
    world.write();
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
}

/// A cluster of racks.
fn with_racks() -> World {
    let rack = Level { name: "rack".into(), label: "rack".into() };
    let mut world = World::with(Settings { levels: Levels(vec![rack]), ..Settings::default() });
    world.handle(GangEvent::Synced);
    world
}

/// It wants slices of two members, each in one rack.
fn in_slices(mut membership: Membership) -> Membership {
    membership.options.slice = Some(2);
    membership.options.level = Some(TopologyRequest { level: "rack".into(), required: true });
    membership
}

#[test]
fn a_slice_is_given_back_as_a_whole_or_not_at_all() {
    let mut world = with_racks();
    for rank in 0..4 {
        let membership = with_rank(in_slices(membership("a", 2)), rank);
        world.see(member(&format!("a{rank}"), membership));
    }
    world.plan();
    assert_eq!(spares(&world, "a").len(), 2);
    world.come("a3");
    assert_eq!(spares(&world, "a"), BTreeSet::new(), "of the second slice one is there");
}

#[test]
fn members_without_devices_are_in_no_slice() {
    let mut world = with_racks();
    let membership = in_slices(membership("a", 5));
    let mut launcher = member("launcher", membership.clone());
    (launcher.shape, launcher.asks) = (None, [].into());
    world.see(launcher);
    for rank in 0..4 {
        world.see(member(&format!("a{rank}"), with_rank(membership.clone(), rank)));
    }
    let wanted = world.next().unwrap();
    assert_eq!((wanted.must, wanted.members.len(), wanted.terms.slice), (4, 4, Some(2)));
    world.gone("launcher");
    assert_eq!(world.reason("a"), Reason::Invalid);
    world.see(member("launcher", membership));
    assert_eq!(world.reason("a"), Reason::Invalid);
}
