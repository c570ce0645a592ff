//! Members that join a bound gang: they get a place where there is room, and nobody is stopped or waits for them.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, member, membership, place, refused, uid};
use crate::protocol::GangEvent;
use crate::protocol::Placement;

#[test]
fn bound_gang_grows_after_gangs_that_have_nothing() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(member("a2", membership("a", 2)));
    world.members("b", 1, 1);
    assert_eq!(&*world.refuse().gang.name, "b");
    let wanted = world.next().unwrap();
    assert_eq!((&*wanted.gang.name, wanted.must), ("a", 0));
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused()) });
    assert_eq!(world.waits("a2"), Reason::WaitingForSurplus);
    world.room += 1;
    world.refuse();
    world.plan_from(2);
    assert_eq!(world.bind("a2"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn surplus_member_that_does_not_arrive_releases_reservation() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(member("a2", membership("a", 2)));
    world.plan_from(2);
    world.pass(60);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn nobody_is_stopped_for_members_beyond_the_minimum() {
    let mut world = World::new();
    world.bound_gang("a", 1, 1);
    world.see(member("a1", membership("a", 1)));
    let wanted = world.next().unwrap();
    let placement =
        Placement { places: vec![place("n1", "g1")], victims: vec![uid("other")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reserved(), Vec::<String>::new());
}
