//! Members that wait at their barrier as long as they may, and leave before their last sibling comes.

use std::collections::BTreeSet;

use gantry_api::{GangPhase, Reason};

use super::world::{World, in_pod_group, member, membership, uid, wants};
use crate::membership::OwnerFacts;
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, BindEnd, Settings, Work};

fn give_up(world: &mut World, pod: &str) {
    world.handle(GangEvent::BarrierTimeout { pod: &uid(pod) });
}

/// Members to be bound though nobody calls for them.
fn to_bind(world: &mut World) -> Vec<String> {
    let work = world.take_work().into_iter();
    let bound = work.filter_map(|work| match work {
        Work::Bind(pods) => Some(pods),
        _ => None,
    });
    bound.flatten().map(|uid| uid.to_string()).collect()
}

#[test]
fn a_member_that_has_come_and_left_is_bound_with_the_others() {
    let mut world = World::new();
    world.members("a", 3, 3);
    world.plan();
    world.come("a0");
    world.pass(20);
    give_up(&mut world, "a0");
    world.come("a1");
    world.pass(20);
    give_up(&mut world, "a1");
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    // Never were all of them there together.
    world.come("a2");
    let decision = world.write();
    let pods: Vec<&str> = decision.reservations.iter().map(|slot| slot.pod_name.as_str()).collect();
    assert_eq!(pods, ["a0", "a1", "a2"]);
    assert_eq!(to_bind(&mut world), ["a0", "a1"], "a2 is there");
    for pod in ["a0", "a1", "a2"] {
        world.bind(pod);
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(to_bind(&mut world), [] as [&str; 0], "said once");
}

#[test]
fn deferred_bind_keeps_its_reservation_above_the_minimum() {
    // The member left the barrier at its timeout and is bound by the extender. Its reservation stays,
    // although the minimum is met without it.
    let mut world = World::new();
    world.members("a", 1, 1);
    let mut light = member("light", membership("a", 1));
    (light.shape, light.asks) = (None, [].into());
    world.see(light);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    world.write();
    assert_eq!(to_bind(&mut world), ["a0"]);
    assert_eq!(world.reserved().len(), 1);
    world.bind("a0");
}

#[test]
fn who_has_come_is_not_brought_again_while_its_place_is_good() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    assert_eq!(world.waits("a0"), Reason::WaitingForArrival);
    assert_eq!(world.node("a1"), "n1", "nor is its place another's");
    assert_eq!(world.node("a1"), "n1");
    // kube-scheduler finds now that it could not go there: that it could is no longer shown.
    assert!(matches!(world.answer_within("a0", &["n7"]), Answer::Wait(_)));
    world.come("a1");
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.come("a0"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

/// A PodGroup cycle fails if one member has no node. That there are such cycles is seen by kube-scheduler's condition.
#[test]
fn timed_out_member_goes_along_in_the_cycle_of_its_pod_group() {
    let mut world = World::new();
    for pod in ["a0", "a1"] {
        world.see(member(pod, in_pod_group()));
    }
    let group = |scheduled_whole| OwnerFacts { scheduled_whole, ..wants(2) };
    world.group_says(group(false));
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    assert_eq!(world.waits("a0"), Reason::WaitingForArrival);
    world.group_says(group(true));
    assert_eq!(world.node("a0"), "n0");
    assert_eq!(world.node("a1"), "n1");
    assert_eq!(world.come("a0"), Arrival::Wait);
    world.come("a1");
    let decision = world.write();
    assert_eq!(decision.reservations.len(), 2);
    assert_eq!(to_bind(&mut world), [] as [&str; 0], "both are there");
    for pod in ["a0", "a1"] {
        world.bind(pod);
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn timed_out_member_whose_node_is_not_offered_swaps_nodes() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    assert_eq!(world.answer_within("a0", &["n1"]), Answer::Node("n1".into()));
    assert_eq!(world.node("a1"), "n0");
}

#[test]
fn timed_out_member_arrives_again_after_capacity_shrinks() {
    let mut world = World::new();
    world.members("a", 3, 3);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    world.come("a1");
    world.take_work();
    let view = world.gangs.view(&super::world::key("a")).unwrap();
    let slots: BTreeSet<u32> = view.slots().map(|slot| slot.slot).collect();
    world.handle(GangEvent::CapacityShrunk { gang: &super::world::key("a"), slots: &slots });
    assert_eq!(world.woken(), ["a0"], "a1 is there and holds what it needs; a2 was never there");
    world.come("a2");
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.come("a0");
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn a_place_is_kept_while_members_are_coming() {
    let mut world =
        World::with(Settings { arrival: std::time::Duration::from_secs(30), ..Settings::default() });
    world.handle(GangEvent::Synced);
    world.members("a", 4, 4);
    world.plan();
    for pod in ["a0", "a1", "a2"] {
        world.pass(25);
        world.come(pod);
        give_up(&mut world, pod);
    }
    // 75 s have passed, and only if no other comes within 30 s it is over.
    world.pass(29);
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.waits("a0"), Reason::Backoff);
}

#[test]
fn a_place_is_not_kept_for_ever_though_one_comes_now_and_then() {
    let mut world = World::new();
    world.members("a", 20, 20);
    world.plan();
    for member in 0..20 {
        world.pass(50);
        if world.phase("a") != GangPhase::Reserved {
            break;
        }
        world.come(&format!("a{member}"));
        give_up(&mut world, &format!("a{member}"));
    }
    assert_eq!(world.passed.as_secs(), 350, "beyond 5 times 60 s and 15 s");
}

#[test]
fn a_new_plan_needs_everybody_to_come_again() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    world.take_work();
    world.plan_from(4);
    assert_eq!(world.woken(), ["a0", "a1"]);
    world.come("a1");
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.come("a0");
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn one_that_left_while_the_decision_was_written_is_bound_too() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come_all("a", 2);
    let (gang, decision) = world.commit();
    give_up(&mut world, "a0");
    world.handle(GangEvent::Committed { gang: &gang, decision: &decision.id, result: Ok(()) });
    assert_eq!(to_bind(&mut world), ["a0"]);
}

#[test]
fn deferred_bind_failure_activates_the_pod() {
    // A bind that the extender starts after the barrier timeout ends like any other.
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    world.waits("a0");
    world.come("a1");
    world.write();
    assert_eq!(to_bind(&mut world), ["a0"]);
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
    world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::Failed });
    assert_eq!(world.woken(), ["a0"], "kube-scheduler had it parked");
    assert_eq!(world.bind("a0"), "n0");
}

/// The devices of its slot are not free yet, and its bind call waits for them. It asks again and again.
#[test]
fn member_with_a_waiting_bind_call_is_not_activated() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    give_up(&mut world, "a0");
    world.waits("a0");
    world.come("a1");
    world.write();
    assert_eq!(to_bind(&mut world), ["a0"]);
    for _ in 0..3 {
        assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
        world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::NotSent });
        assert_eq!(world.woken(), [] as [&str; 0], "kube-scheduler brings it, or its call goes on");
    }
    assert_eq!(world.bind("a0"), "n0");
}
