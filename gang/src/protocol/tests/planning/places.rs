//! What a plan gives: places by rank, no more than the maximum, no device twice. One that comes too late or falls short gives none, and
//! what a loss undoes is given back.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, member, membership, place, with_rank};
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, Placement};

#[test]
fn a_plan_for_a_gang_that_has_changed_meanwhile_is_dropped() {
    let mut world = World::new();
    world.members("a", 2, 2);
    let wanted = world.next().unwrap();
    world.gone("a1");
    let placement = Placement { places: vec![place("n0", "g0"), place("n1", "g1")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn a_device_that_is_kept_for_another_gang_is_not_given_twice() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.members("b", 1, 1);
    for gang in ["a", "b"] {
        let wanted = world.next().unwrap();
        assert_eq!(&*wanted.gang.name, gang);
        let placement = Placement { places: vec![place("n0", "g0")], ..Placement::default() };
        world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    }
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.reason("b"), Reason::WaitingForTurn);
    assert_eq!(world.reserved(), ["g0"]);
}

#[test]
fn too_few_places_are_none() {
    let mut world = World::new();
    world.members("a", 2, 2);
    let wanted = world.next().unwrap();
    let placement = Placement { places: vec![place("n0", "g0")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn members_get_the_places_of_their_ranks() {
    let mut world = World::new();
    for (pod, rank) in [("a0", 1), ("a1", 0)] {
        world.see(member(pod, with_rank(membership("a", 2), rank)));
    }
    let wanted = world.plan();
    let order: Vec<&str> = wanted.members.iter().map(|member| member.uid.as_str()).collect();
    assert_eq!(order, ["a1", "a0"]);
    assert_eq!((world.node("a0"), world.node("a1")), ("n1".into(), "n0".into()));
    assert_eq!(world.node("a0"), "n1", "asked again, the same");
}

#[test]
fn no_more_than_the_maximum_get_a_place() {
    let mut world = World::new();
    let mut said = membership("a", 1);
    said.options.max = Some(2);
    for pod in ["a0", "a1", "a2"] {
        world.see(member(pod, said.clone()));
    }
    assert_eq!(world.plan().members.len(), 2);
    world.come("a0");
    world.write();
    assert_eq!(world.next(), None);
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
}

#[test]
fn node_lost_before_decision_replans_the_whole_gang() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.handle(GangEvent::NodeLost { node: &"n7".into() });
    assert_eq!(world.phase("a"), GangPhase::Reserved, "no concern of it");
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)), "it stood at the barrier");
    world.plan_from(2);
    assert_eq!(world.node("a0"), "n2");
}

#[test]
fn below_the_minimum_before_the_decision_all_is_given_back() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.waits("a0"), Reason::WaitingForMembers);
}

#[test]
fn surplus_member_that_goes_leaves_other_reservations() {
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.reserved(), ["a-g0", "a-g2"]);
    world.come("a0");
    world.come("a2");
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn a_pod_made_anew_takes_the_place_of_the_one_before() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.see(member("a2", membership("a", 2)));
    let wanted = world.next().unwrap();
    let placement = Placement { places: vec![place("n0", "g0"), place("n1", "g1")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
    world.take_work();
    world.gone("a0");
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.node("a2"), "n0");
}
