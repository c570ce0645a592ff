//! Limits: the most gangs, and the most members of one gang.

use std::sync::Arc;

use gantry_api::GangPhase;

use super::world::{World, bound, key, member, membership, uid};
use crate::protocol::{Arrival, GangEvent, Settings, WaitReason};

fn world(max_gangs: usize, max_members: usize) -> World {
    let mut world = World::with(Settings { max_gangs, max_members, ..Settings::default() });
    world.handle(GangEvent::Synced);
    world
}

#[test]
fn gang_over_the_limit_is_invalid_until_another_ends() {
    let mut world = world(1, 20);
    world.members("a", 2, 1);
    world.members("b", 2, 2);
    world.members("c", 1, 1);
    assert_eq!(world.phase("b"), GangPhase::Invalid);
    let reason = world.gangs.wait_reason(&uid("b0"));
    assert!(reason.as_ref().is_some_and(WaitReason::is_invalid), "{reason:?}");
    world.waits("b0");
    assert!(matches!(world.arrive("b0", "n0"), Arrival::Refuse(_)));
    assert_eq!(&*world.plan().gang.name, "a", "the others are not planned");
    assert_eq!(world.next(), None);
    world.gone("a0");
    world.gone("a1");
    world.pass(60);
    assert_eq!(world.phase("b"), GangPhase::Queued);
    assert_eq!(world.phase("c"), GangPhase::Invalid, "its turn comes later");
    assert!(world.woken().contains(&"b0".to_owned()), "the reason that it shows no longer holds");
}

#[test]
fn namespace_at_its_limit_leaves_room_for_others() {
    let mut world = World::with(Settings { max_gangs: 3, max_gangs_of_namespace: 2, ..Settings::default() });
    world.handle(GangEvent::Synced);
    for gang in ["a", "b", "c"] {
        world.members(gang, 1, 1);
    }
    assert_eq!(world.phase("c"), GangPhase::Invalid);
    let mut other = member("x", membership("x", 1));
    Arc::make_mut(&mut other.membership).key.namespace = "other".into();
    let key = other.membership.key.clone();
    world.see(other);
    assert_ne!(world.gangs.view(&key).unwrap().phase(), GangPhase::Invalid);
    world.gone("a0");
    world.pass(60);
    assert_ne!(world.phase("c"), GangPhase::Invalid, "its namespace has room again");
    for pod in ["b0", "c0", "x"] {
        world.gone(pod);
    }
    world.pass(60);
    world.gangs.assert_empty();
}

#[test]
fn gang_with_too_many_members_is_invalid_until_one_goes() {
    let mut world = world(10, 2);
    world.members("a", 3, 2);
    assert_eq!(world.phase("a"), GangPhase::Invalid);
    assert_eq!(world.next(), None);
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.plan().members.len(), 2);
}

#[test]
fn bound_gang_with_too_many_members_runs_on_and_does_not_grow() {
    let mut world = world(10, 2);
    world.bound_gang("a", 2, 2);
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.next(), None);
    assert!(world.gangs.wait_reason(&uid("a2")).is_some_and(|why| why.is_invalid()));
}

#[test]
fn pods_of_gangs_over_the_limit_leave_nothing_behind() {
    let mut world = world(1, 1);
    world.members("a", 2, 1);
    world.members("b", 2, 1);
    world.see(bound(member("b1", membership("b", 1)), "n0"));
    for pod in ["b0", "b1", "a0", "a1"] {
        world.gone(pod);
    }
    world.pass(60);
    world.gangs.assert_empty();
}

/// A decision is brought to its end however many gangs exist.
#[test]
fn decided_gang_is_adopted_over_the_limit() {
    let mut before = World::new();
    before.members("b", 2, 2);
    before.plan();
    before.come_all("b", 2);
    before.write();
    let status = before.status("b");
    let mut world = World::with(Settings { max_gangs: 1, identity: "second".into(), ..Settings::default() });
    world.members("a", 1, 1);
    world.members("b", 2, 2);
    assert_eq!(world.gangs.view(&key("b")).unwrap().phase(), GangPhase::Invalid);
    world.show("b", status);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("b"), GangPhase::Binding);
    assert_eq!(world.reserved(), ["b-g0", "b-g1"]);
    assert_eq!(world.bind("b1"), "n1");
}
