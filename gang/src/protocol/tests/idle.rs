//! Places of lost members that go to whoever is of higher priority.

use std::collections::BTreeSet;

use gantry_api::{GangPhase, GangStatus, Reason};

use super::world::{World, key, member, membership};
use crate::protocol::Answer;
use crate::protocol::GangEvent;
use crate::protocol::tests::world::released;

fn idle(world: &World, gang: &str) -> BTreeSet<u32> {
    let view = world.gangs.view(&key(gang)).unwrap();
    view.orphaned().map(|slot| slot.slot).collect()
}

/// The last status of a gang.
fn status(world: &mut World) -> GangStatus {
    world.gangs.take_statuses().pop().unwrap().1
}

#[test]
fn orphaned_reservation_can_be_released_until_it_is_claimed() {
    // A replacement claims the reservation of a lost member. From then on it cannot be released for another
    // gang.
    let mut world = World::new();
    world.bound_gang_of("a", 3, &membership("a", 3));
    assert!(idle(&world, "a").is_empty());
    assert_eq!(world.gangs.may_give_back().count(), 0);
    world.gone("a1");
    world.gone("a2");
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    let both = idle(&world, "a");
    assert_eq!(both.len(), 2);
    assert_eq!(world.gangs.may_give_back().count(), 1);
    assert_eq!(world.gangs.view(&key("a")).unwrap().missing(), 2);
    world.see(member("a1b", membership("a", 3)));
    let one = idle(&world, "a");
    assert_eq!(one.len(), 1);
    // What somebody has come for stays, whatever is asked for.
    let to = "gang ns/b".into();
    assert_eq!(
        released(world.handle(GangEvent::ReleaseOrphaned { gang: &key("a"), slots: &both, to: &to })),
        1
    );
    assert!(idle(&world, "a").is_empty());
    assert_eq!(world.gangs.may_give_back().count(), 0);
    assert!(matches!(world.answer("a1b"), Answer::Node(_)));
    assert_eq!(world.reserved().len(), 1);
}

#[test]
fn a_gang_says_who_has_the_place_until_it_lacks_none() {
    let mut world = World::new();
    world.bound_gang_of("a", 2, &membership("a", 2));
    world.gone("a1");
    let slots = idle(&world, "a");
    let to = "gang ns/b".into();
    assert_eq!(
        released(world.handle(GangEvent::ReleaseOrphaned { gang: &key("a"), slots: &slots, to: &to })),
        1
    );
    let lost = status(&mut world);
    assert_eq!(lost.reason, Some(Reason::MembersLost));
    // Asked once more, there is nothing to give.
    assert_eq!(
        released(world.handle(GangEvent::ReleaseOrphaned { gang: &key("a"), slots: &slots, to: &to })),
        0
    );
    world.see(member("a1b", membership("a", 2)));
    assert_eq!(status(&mut world).message, lost.message);
    world.plan();
    assert_ne!(status(&mut world).message, lost.message, "gang b has it no more");
}

#[test]
fn places_of_a_gang_that_is_not_decided_are_not_given_up_so() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    assert!(idle(&world, "a").is_empty());
    let all: BTreeSet<u32> = (0..10).collect();
    let to = "gang ns/b".into();
    assert_eq!(
        released(world.handle(GangEvent::ReleaseOrphaned { gang: &key("a"), slots: &all, to: &to })),
        0
    );
    assert_eq!(world.phase("a"), GangPhase::Reserved);
}
