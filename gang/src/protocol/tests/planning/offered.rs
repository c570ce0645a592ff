//! kube-scheduler does not offer the node that was planned: members change places, then the whole is planned without it.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, member, membership, uid, with_repair};
use crate::key::{GangKey, Integration};
use crate::membership::Membership;
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival};
use crate::terms::Repair;

#[test]
fn node_not_offered_is_swapped_with_a_member_not_arrived() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    assert_eq!(world.answer_within("a0", &["n1"]), Answer::Node("n1".into()));
    assert_eq!(world.node("a1"), "n0");
    assert_eq!(world.arrive("a0", "n1"), Arrival::Wait);
    assert_eq!(world.arrive("a1", "n0"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

/// Why a member waits to which only another node is offered.
fn why_not(world: &mut World) -> Reason {
    match world.answer_within("a0", &["n7"]) {
        Answer::Wait(why) => why.reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn after_some_misses_the_whole_is_planned_without_the_node() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.take_work();
    for _ in 0..2 {
        assert_eq!(why_not(&mut world), Reason::NodeNotOffered);
        world.pass(1);
        assert!(world.woken().contains(&"a0".to_owned()), "the next offer may be another");
    }
    assert_eq!(why_not(&mut world), Reason::WaitingForTurn);
    assert_eq!(world.reserved(), Vec::<String>::new());
    let wanted = world.next().unwrap();
    assert_eq!(wanted.without, ["n0".into()]);
}

#[test]
fn node_not_offered_yet_is_waited_for_while_others_arrive() {
    let mut world = World::new();
    world.members("a", 4, 4);
    world.plan();
    for other in ["a1", "a2", "a3"] {
        for _ in 0..2 {
            assert!(matches!(world.answer_within("a0", &["n7"]), Answer::Wait(_)));
        }
        world.come(other);
    }
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.node("a0"), "n0");
}

#[test]
fn a_gang_that_is_tried_again_says_what_kube_scheduler_says() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let said = "node(s) didn't match pod topology spread constraints";
    world.handle(GangEvent::SchedulerMessage { pod: &uid("a0"), message: &said.into() });
    for _ in 0..4 {
        world.plan();
        for _ in 0..3 {
            world.answer_within("a0", &["n7"]);
        }
    }
    assert_eq!(world.reason("a"), Reason::Backoff);
}

#[test]
fn after_some_such_plans_the_gang_waits() {
    let mut world = World::new();
    world.members("a", 1, 1);
    for _ in 0..4 {
        assert_eq!(world.phase("a"), GangPhase::Queued);
        world.plan();
        for _ in 0..3 {
            world.answer_within("a0", &["n7"]);
        }
    }
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.reason("a"), Reason::Backoff);
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new(), "with a clean slate");
}

#[test]
fn gang_that_fits_only_on_an_unoffered_node_retries_it() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.plan();
    for _ in 0..3 {
        world.answer_within("a0", &["n7"]);
    }
    let wanted = world.refuse();
    assert_eq!(wanted.without, ["n0".into()]);
    assert_eq!(world.reason("a"), Reason::Backoff);
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new());

    // A member that comes after the decision.
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(membership("a", 2), Repair::Hold));
    world.gone("a1");
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    world.see(member("a2", with_repair(membership("a", 2), Repair::Hold)));
    world.plan_from(5);
    for _ in 0..3 {
        world.answer_within("a2", &["n7"]);
    }
    assert_eq!(world.refuse().without, ["n5".into()]);
    assert_eq!(world.next(), None);
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new());
}

/// A PodGroup of so many members, all needed, with a reservation: member `a<i>` on node `n<i>`.
fn native_group(count: u32) -> World {
    let mut world = World::new();
    for number in 0..count {
        let key = GangKey { integration: Integration::PodGroup, ..membership("a", count).key };
        let membership = Membership { key, ..membership("a", count) };
        world.see(member(&format!("a{number}"), membership));
    }
    world.plan();
    world.take_work();
    world
}

/// The nodes of a rack that has none of the group's reservations.
const OTHER_RACK: [&str; 2] = ["n7", "n8"];

/// A PodGroup cycle calls filter for each placement in turn, and leaves a placement at the first member that does not fit. `at`: which of
/// `racks` placements has the reserved nodes, if any.
fn play_cycle(world: &mut World, count: usize, racks: usize, at: Option<usize>) {
    let planned: Vec<String> = (0..count).map(|number| format!("n{number}")).collect();
    let planned: Vec<&str> = planned.iter().map(String::as_str).collect();
    for rack in 0..racks {
        let nodes = if at == Some(rack) { &planned[..] } else { &OTHER_RACK };
        for number in 0..count {
            let answer = world.answer_within(&format!("a{number}"), nodes);
            if !matches!(answer, Answer::Node(_)) {
                break;
            }
        }
    }
}

/// Of many placements one has the reserved nodes, whatever its position.
#[test]
fn cycle_over_many_placements_keeps_the_reservation() {
    for at in 0..12 {
        let mut world = native_group(2);
        for _ in 0..8 {
            play_cycle(&mut world, 2, 12, Some(at));
            assert_eq!(world.reserved(), ["a-g0", "a-g1"], "placement {at}");
            world.pass(6);
        }
        for (uid, node) in [("a0", "n0"), ("a1", "n1")] {
            assert_eq!(world.arrive(uid, node), Arrival::Wait, "placement {at}");
        }
    }
}

/// A long cycle: filter takes its time for each placement.
#[test]
fn cycle_of_several_seconds_keeps_the_reservation() {
    let mut world = native_group(1);
    for _ in 0..8 {
        assert!(matches!(world.answer_within("a0", &OTHER_RACK), Answer::Wait(_)));
        world.pass(1);
    }
    assert_eq!(world.answer_within("a0", &["n0"]), Answer::Node("n0".into()));
    for _ in 0..8 {
        assert!(matches!(world.answer_within("a0", &OTHER_RACK), Answer::Wait(_)));
        world.pass(1);
    }
    assert_eq!(world.arrive("a0", "n0"), Arrival::Wait);
}

/// Cycles come again and again, and no placement has the reserved node.
#[test]
fn node_that_no_cycle_offers_leads_to_another_plan() {
    let mut world = native_group(2);
    for _ in 0..2 {
        play_cycle(&mut world, 2, 12, None);
        assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
        world.pass(6);
    }
    play_cycle(&mut world, 2, 12, None);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.next().unwrap().without, ["n0".into()]);
}
