//! Members that are lost: for whom their places are kept and how long, who is no loss, and when the gang begins as a whole again.

use gantry_api::{GangPhase, Reason};

use super::super::world::{
    World, bound, key, leaving, member, membership, place, uid, with_rank, with_repair,
};
use super::committing;
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, BindEnd, Member, Placement, ShapeId, Stage, Work};
use crate::terms::Repair;

#[test]
fn hold_keeps_the_place_of_a_lost_member_for_its_replacement() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(leaving(bound(member("a0", membership("a", 2)), "n0")));
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reserved(), ["a-g0"], "from the moment it begins to go");
    world.see(member("a2", membership("a", 2)));
    assert!(matches!(world.answer("a2"), Answer::Wait(_)), "the pod before still holds the devices");
    world.gone("a0");
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.bind("a2"), "n0", "without a barrier");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

fn gated(mut member: Member) -> Member {
    member.stage = Stage::Gated { by: None };
    member.refused = false;
    member
}

#[test]
fn replacement_gate_is_removed_while_others_are_missing() {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    // Whether those that are gone had ended well is not known: nobody may ever come in their place.
    world.gone("a0");
    world.gone("a1");
    world.take_work();
    world.see(gated(member("a3", membership("a", 3))));
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a3")])]);
    world.see(member("a3", membership("a", 3)));
    assert_eq!(world.bind("a3"), "n0");
}

#[test]
fn replacement_gate_without_reservation_stays_until_planned() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 3), Repair::Ignore);
    world.bound_gang_of("a", 3, &membership);
    world.gone("a0");
    world.gone("a1");
    world.take_work();
    world.see(gated(member("a3", membership)));
    assert_eq!(world.take_work(), [], "it could not go anywhere");
    world.plan_from(7);
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a3")])]);
}

#[test]
fn deleted_member_that_succeeds_has_not_completed() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let going = leaving(bound(member("a0", membership("a", 2)), "n0"));
    world.see(going.clone());
    for _ in 0..2 {
        world.see(Member { stage: Stage::Succeeded, ..going.clone() });
        assert_eq!(world.phase("a"), GangPhase::Degraded);
        assert_eq!(world.reserved(), ["a-g0"]);
    }
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    // One that had completed before it is cleared away stays so.
    let mut completed = bound(member("a1", membership("a", 2)), "n1");
    completed.stage = Stage::Succeeded;
    world.see(completed.clone());
    world.see(leaving(completed));
    assert_eq!(world.reserved(), ["a-g0"]);
}

#[test]
fn preempted_member_releases_its_reservation() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(Member { preempted: true, ..leaving(bound(member("a0", membership("a", 2)), "n0")) });
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert!(world.reserved().is_empty());
    world.gone("a0");
    world.see(member("a2", membership("a", 2)));
    assert!(world.reserved().is_empty(), "it has to be planned like any other");
}

#[test]
fn gangs_of_which_nothing_is_left_are_planned_as_a_whole_again() {
    let mut world = World::new();
    for gang in ["a", "b"] {
        world.bound_gang(gang, 2, 2);
        for (pod, node) in [(format!("{gang}0"), "n0"), (format!("{gang}1"), "n1")] {
            world.see(Member { preempted: true, ..leaving(bound(member(&pod, membership(gang, 2)), node)) });
            world.gone(&pod);
        }
    }
    world.take_work();
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.status("a").decision, None, "what it said is nobody's any more");
    world.see(member("a3", membership("a", 2)));
    world.see(member("b2", membership("b", 2)));
    world.see(member("b3", membership("b", 2)));
    world.pass(10);
    let wanted = world.plan();
    assert_eq!((&*wanted.gang.name, wanted.must, wanted.members.len()), ("a", 2, 2));
    // There is room for one of the two.
    assert_eq!(world.refuse().must, 2);
    assert!(matches!(world.answer("b2"), Answer::Wait(_)));
    assert_eq!(world.come("a2"), Arrival::Wait);
    assert_eq!(world.come("a3"), Arrival::Wait);
    world.write();
    assert_eq!(world.phase("a"), GangPhase::Binding);
}

#[test]
fn hold_keeps_a_place_of_a_rank_for_that_rank() {
    let mut world = World::new();
    for (pod, rank) in [("a0", 0), ("a1", 1)] {
        world.see(member(pod, with_rank(membership("a", 2), rank)));
    }
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.bind("a1");
    world.gone("a0");
    world.see(member("a2", with_rank(membership("a", 2), 7)));
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
    world.see(member("a3", with_rank(membership("a", 2), 0)));
    assert_eq!(world.node("a3"), "n0");
}

#[test]
fn hold_does_not_wait_for_ever() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.gone("a0");
    world.pass(599);
    assert_eq!(world.reserved(), ["a-g0"]);
    world.pass(1);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reason("a"), Reason::MembersLost);
    world.see(member("a2", membership("a", 2)));
    world.plan_from(5);
    assert_eq!(world.bind("a2"), "n5", "a replacement that comes late is planned by itself");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn gang_that_loses_members_again_and_again_holds_half_the_time() {
    // A pod is deleted and its replacement is bound just before the hold ends: its quota is free meanwhile.
    const HOURS: u64 = 12 * 3600;
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let (mut held, mut number, mut lost) = (0, 2, "a0".to_owned());
    while world.passed.as_secs() < HOURS {
        world.gone(&lost);
        for _ in 0..59 {
            world.pass(10);
            held += if world.reserved().is_empty() { 0 } else { 10 };
        }
        let next = format!("a{number}");
        world.see(member(&next, membership("a", 2)));
        if world.reserved().is_empty() {
            world.plan();
        }
        world.bind(&next);
        (lost, number) = (next, number + 1);
        world.take_changes();
    }
    assert!(held <= HOURS / 2 + 1200, "{held} s");
}

#[test]
fn a_failed_member_is_a_lost_one_and_a_completed_one_is_not() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let mut completed = bound(member("a0", membership("a", 2)), "n0");
    completed.stage = Stage::Succeeded;
    world.see(completed);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Bound, "it has done its part, though its pod is gone");
    let mut failed = bound(member("a1", membership("a", 2)), "n1");
    failed.stage = Stage::Failed;
    world.see(failed);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reserved(), ["a-g1"]);
}

#[test]
fn members_beyond_the_minimum_that_go_are_no_loss() {
    let mut world = World::new();
    world.bound_gang_of("a", 3, &with_repair(membership("a", 2), Repair::Restart));
    world.gone("a2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn ignore_gives_the_place_up() {
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(membership("a", 2), Repair::Ignore));
    world.gone("a0");
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reason("a"), Reason::BelowMinimum);
}

#[test]
fn a_member_lost_between_decision_and_binding_is_repaired_too() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.bind("a0");
    world.come("a1");
    world.handle(GangEvent::BindEnded { pod: &uid("a1"), outcome: BindEnd::Gone });
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reserved(), ["a-g1"]);
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.bind("a2"), "n1");
}

/// Three of gang `a`, which needs all of them, are bound. Kubelet gave `a0` another device than `a-g0`, and that went to `second`, who
/// waits.
fn given_to(second: &str, gang: &str, min: u32) -> World {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    world.see(member(second, membership(gang, min)));
    world.room += 1;
    let wanted = world.next().unwrap();
    let placement = Placement { places: vec![place("n0", "a-g0")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.reserved(), ["a-g0"]);
    world
}

#[test]
fn lost_member_reservation_excludes_devices_given_to_others() {
    for (second, gang, min, reserved) in [
        // Whom it has beyond its minimum makes good the loss of the first that goes, whose place is given up.
        ("a3", "a", 3, &["a-g0"][..]),
        ("b0", "b", 1, &["a-g0", "a-g1"]),
    ] {
        let mut world = given_to(second, gang, min);
        world.gone("a1");
        world.gone("a0");
        assert_eq!(world.reserved(), reserved, "a-g0 once, and it is {second}'s");
        assert_eq!(world.phase("a"), GangPhase::Degraded);
        world.see(member("a4", membership("a", 3)));
        world.see(member("a5", membership("a", 3)));
        assert_eq!(world.reserved(), reserved, "{second}");
        assert!(matches!(world.answer("a5"), Answer::Wait(_)), "{second}");
    }
}

#[test]
fn reservation_fits_the_planned_and_the_observed_shape() {
    // The shape of a member may change after planning. A replacement of either shape gets the reservation.
    for (shape, kept) in [(0, true), (7, true), (8, false)] {
        let mut world = World::new();
        world.bound_gang("a", 2, 2);
        let mut drifted = bound(member("a0", membership("a", 2)), "n0");
        drifted.shape = Some(ShapeId(7));
        world.see(drifted);
        world.gone("a0");
        let mut replacement = member("a2", membership("a", 2));
        replacement.shape = Some(ShapeId(shape));
        world.see(replacement);
        let there = world.answer("a2") == Answer::Node("n0".into());
        assert_eq!(there, kept, "{shape}");
    }
}
