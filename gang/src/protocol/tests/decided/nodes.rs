//! Nodes and devices that are lost, or not offered, after the decision: who gets another place, and who keeps the one it has.

use gantry_api::GangPhase;

use super::super::world::key;
use super::committing;
use crate::protocol::Arrival;
use crate::protocol::GangEvent;

#[test]
fn node_lost_after_decision_replans_members_not_bound_there() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.bind("a0");
    world.handle(GangEvent::NodeLost { node: &"n0".into() });
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    assert_eq!(world.reserved(), Vec::<String>::new());
    let wanted = world.plan_from(4);
    assert_eq!((wanted.must, wanted.members.len()), (0, 1));
    let placed: Vec<&str> = wanted.placed.iter().map(|sibling| sibling.node.as_str()).collect();
    assert_eq!(placed, ["n0"]);
    assert_eq!(world.bind("a1"), "n4");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn node_lost_during_decision_write_is_excluded_afterwards() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    assert_eq!(world.phase("a"), GangPhase::Committing);
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
    assert!(matches!(world.arrive("a1", "n1"), Arrival::Refuse(_)));
    world.plan_from(4);
    assert_eq!(world.node("a1"), "n4");
}

#[test]
fn node_not_offered_after_decision_replans_only_that_member() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.bind("a0");
    for _ in 0..3 {
        world.answer_within("a1", &["n7"]);
    }
    let wanted = world.plan_from(7);
    assert_eq!((wanted.must, wanted.without), (0, vec!["n1".into()]));
    assert_eq!(world.bind("a1"), "n7");
}

#[test]
fn a_place_whose_device_is_lost_costs_no_other_its_place() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    // A Binding of a0 may be under way: its place stays whatever becomes of it.
    world.come("a0");
    world.take_changes();
    let slots: Vec<u32> = world.changes.iter().map(|change| change.slot).collect();
    world.handle(GangEvent::SlotsLost { gang: &key("a"), slots: &[slots[0]].into() });
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
    // Nobody is on the way to the other one.
    world.handle(GangEvent::SlotsLost { gang: &key("a"), slots: &[slots[1]].into() });
    assert_eq!(world.reserved(), ["a-g0"]);
}
