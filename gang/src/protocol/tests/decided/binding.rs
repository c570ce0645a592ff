//! Members of a decided gang are bound: each at its place, the late ones too, and nothing is taken back.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, bound, key, member, membership, place, uid};
use super::committing;
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, BindEnd, Placement, Reservation};

#[test]
fn members_that_follow_bound_siblings_are_not_waited_for() {
    let mut world = World::new();
    world.members("a", 3, 3);
    let wanted = world.next().unwrap();
    let places = ["n0", "n1", "n2"].map(|node| Reservation { follows: node != "n0", ..place(node, node) });
    let placement = Placement { places: places.to_vec(), ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.phase("a"), GangPhase::Reserved, "not before one has come");
    assert_eq!(world.come("a0"), Arrival::Wait);
    let (_, decision) = world.commit();
    assert_eq!(decision.reservations.len(), 3, "their places are decided with the others'");
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    assert_eq!(world.bind("a0"), "n0");
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(world.bind("a1"), "n1");
    assert_eq!(world.bind("a2"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn late_members_pass_at_once_after_the_decision() {
    // Once the decision is written, no timeout and no withdrawal takes it back.
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.handle(GangEvent::Disconnected { pod: &uid("a0") });
    world.pass(100_000);
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert!(matches!(world.come("a2"), Arrival::Go(_)));
    assert!(matches!(world.come("a0"), Arrival::Go(_)));
}

#[test]
fn a_binding_that_fails_is_tried_again_at_the_same_place() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.come("a0");
    world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::Failed });
    assert_eq!(world.node("a0"), "n0");
    assert!(matches!(world.come("a0"), Arrival::Go(_)));
    world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::Unsure });
    let answer = world.answer_within("a1", &["n0"]);
    let is_not_offered = matches!(&answer, Answer::Wait(why) if why.reason == Reason::NodeNotOffered);
    assert!(is_not_offered, "no other has the reservation of a Binding that may exist: {answer:?}");
    world.see(bound(member("a0", membership("a", 2)), "n0"));
    assert_eq!(world.reserved(), ["a-g1"]);
}

#[test]
fn a_member_bound_elsewhere_past_us_gives_its_place_back() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.see(bound(member("a0", membership("a", 2)), "n9"));
    assert_eq!(world.reserved(), ["a-g1"]);
    world.bind("a1");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn minimum_changed_after_decision_only_sets_a_condition() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    for pod in ["a0", "a1"] {
        world.see(bound(member(pod, membership("a", 5)), "n0"));
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    let status = world.status("a");
    assert_eq!(status.min, 2);
    assert_eq!((&*status.conditions[0].status, &*status.conditions[0].reason), ("False", "MinimumChanged"));
}

#[test]
fn a_member_bound_by_an_old_binding_has_what_that_gave_it() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    let node = world.node("a0");
    let mut seen = bound(member("a0", membership("a", 2)), &node);
    seen.holds = vec![("nvidia.com/gpu".into(), vec!["before".into()])];
    world.see(seen);
    let slots = world.status("a").decision.unwrap().reservations;
    let own = slots.iter().find(|slot| slot.pod == Some(uid("a0"))).unwrap();
    assert_eq!(own.devices[0].ids, ["before".into()]);
}
