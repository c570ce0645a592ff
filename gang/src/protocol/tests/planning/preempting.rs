//! Pods that have to go for a gang: their devices wait for it, and how long they are waited for.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, bound, key, leaving, member, membership, place, uid, with_repair};
use crate::protocol::GangEvent;
use crate::protocol::{Arrival, Blocker, Placement, PlanRequest, Work};
use crate::terms::Repair;

/// Gang `a` is planned where `v0` was, for which `v0` and `v1` have to go.
fn preempts_both(world: &mut World) -> PlanRequest {
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "v-g0")],
        victims: vec![uid("v0"), uid("v1")],
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    wanted
}

#[test]
fn victims_are_evicted_and_their_devices_reserved_for_the_gang() {
    let mut world = World::new();
    world.bound_gang("v", 2, 2);
    let wanted = preempts_both(&mut world);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    let by = wanted.gang;
    let pods = vec![uid("v0"), uid("v1")];
    assert_eq!(world.take_work(), [Work::Evict { pods, by }]);
    assert_eq!(world.reserved(), ["v-g0"]);
    assert_eq!(world.waits("a0"), Reason::WaitingForVictims);
    for pod in ["v0", "v1"] {
        world.see(leaving(bound(member(pod, membership("v", 2)), "n0")));
        world.gone(pod);
        assert_eq!(world.phase("a"), GangPhase::Preempting, "its devices may not be free yet");
        world.handle(GangEvent::VictimGone { pod: &uid(pod) });
    }
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.reserved(), ["v-g0"], "the gang that had to go keeps nothing");
    assert_eq!(world.woken(), ["a0"]);
    assert_eq!(world.come("a0"), Arrival::Wait);
}

#[test]
fn preempting_gang_ignores_the_end_of_other_pods() {
    let mut world = World::new();
    world.bound_gang("v", 2, 2);
    preempts_both(&mut world);
    world.gangs.take_statuses();
    world.handle(GangEvent::VictimGone { pod: &uid("somebody") });
    assert!(!world.gangs.has_changed());
    world.handle(GangEvent::VictimGone { pod: &uid("v0") });
    assert!(world.gangs.has_changed());
}

#[test]
fn a_gang_that_went_for_another_begins_anew_as_a_whole() {
    let mut world = World::new();
    world.bound_gang("v", 2, 2);
    preempts_both(&mut world);
    world.gone("v0");
    world.see(member("v2", membership("v", 2)));
    world.room += 1;
    assert_eq!(world.next(), None, "its replacements do not join one by one");
    world.gone("v1");
    assert_eq!(world.phase("v"), GangPhase::Pending);
    world.see(member("v3", membership("v", 2)));
    assert_eq!(world.next().unwrap().must, 2);
}

#[test]
fn rest_of_preempted_gang_is_deleted_only_for_repair_restart() {
    // With `Hold` and `Ignore` the remaining members are evicted, which respects disruption budgets. With
    // `Restart` they are deleted.
    for (repair, evicted) in [(Repair::Hold, true), (Repair::Ignore, true), (Repair::Restart, false)] {
        let mut world = World::new();
        world.bound_gang_of("v", 2, &with_repair(membership("v", 2), repair));
        preempts_both(&mut world);
        world.gone("v0");
        world.take_work();
        // A budget does not let the other go.
        world.pass(600);
        let pods = vec![uid("v1")];
        let rest = world.take_work().into_iter().find_map(|work| match work {
            Work::EvictRest { pods, of, .. } if *of == key("v") => Some((pods, true)),
            Work::Delete { pods, .. } => Some((pods, false)),
            _ => None,
        });
        assert_eq!(rest, Some((pods, evicted)), "{repair:?}");
    }
}

#[test]
fn evictions_in_vain_are_repeated_after_longer_and_longer() {
    // Pods that no scheduler brings take each freed device before the gang is bound. Evicted at once, they would come again and again.
    let mut world = World::new();
    world.members("a", 1, 1);
    let mut texts = Vec::new();
    for failed in 1..=8_u32 {
        let wanted = world.next().unwrap();
        let placement =
            Placement { places: vec![place("n0", "g0")], victims: vec![uid("v")], ..Placement::default() };
        world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
        world.handle(GangEvent::VictimGone { pod: &uid("v") });
        assert_eq!(world.phase("a"), GangPhase::Reserved);
        let slots = world.gangs.view(&key("a")).unwrap().slots().map(|slot| slot.slot).collect();
        world.handle(GangEvent::SlotsLost { gang: &key("a"), slots: &slots });
        assert_eq!((world.phase("a"), world.reason("a")), (GangPhase::Backoff, Reason::Backoff));
        texts.push(world.text("a"));
        let wait = (1 << failed).min(120);
        world.room += 1;
        world.pass(wait - 1);
        assert_eq!(world.next(), None, "after {failed} failures");
        world.pass(1);
    }
    texts.dedup();
    insta::assert_snapshot!(texts.join("\n"), @"gang default/a: Backoff: pods were evicted for it, but devices that they left are in use again or have failed");
    // Devices that were free all along cost nobody anything: they are planned again at once.
    world.plan();
    let slots = world.gangs.view(&key("a")).unwrap().slots().map(|slot| slot.slot).collect();
    world.handle(GangEvent::SlotsLost { gang: &key("a"), slots: &slots });
    assert_eq!(world.phase("a"), GangPhase::Queued);
}

#[test]
fn decision_lost_to_others_counts_as_evictions_in_vain() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement =
        Placement { places: vec![place("n0", "g0")], victims: vec![uid("v")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    world.handle(GangEvent::VictimGone { pod: &uid("v") });
    world.come("a0");
    world.write();
    let slots = world.gangs.view(&key("a")).unwrap().slots().map(|slot| slot.slot).collect();
    world.handle(GangEvent::SlotsLost { gang: &key("a"), slots: &slots });
    assert_eq!((world.phase("a"), world.status("a").failed_attempts), (GangPhase::Backoff, 1));
    // Once it is bound, all of that is over.
    world.pass(2);
    world.plan();
    world.come("a0");
    world.write();
    world.bind("a0");
    assert_eq!((world.phase("a"), world.status("a").failed_attempts), (GangPhase::Bound, 0));
}

#[test]
fn pods_that_do_not_go_in_time_are_let_be() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement =
        Placement { places: vec![place("n0", "g0")], victims: vec![uid("other")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    world.pass(120);
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.reason("a"), Reason::Backoff);
}

#[test]
fn blocking_budget_is_reported_by_preemptor_and_partial_victim() {
    // The preempting gang reports the budget, and so does a victim gang that is only partly gone.
    let why = "pod v1: it cannot be evicted yet: budget web";
    let budget = |world: &mut World, gang: &str| {
        world.handle(GangEvent::Blocked {
            gang: &key(gang),
            blocker: Blocker::Budget,
            why: Some(why.into()),
        });
    };
    let told = |world: &mut World, gang: &str| {
        let statuses = world.gangs.take_statuses();
        let (_, status) = statuses.into_iter().rev().find(|(of, _)| **of == key(gang)).unwrap();
        let hindered = status.conditions.iter().find(|condition| condition.type_ == "Blocked");
        (status.reason.unwrap(), hindered.map(|condition| condition.reason.clone()))
    };
    let in_the_way = Some("DisruptionBudget".to_owned());

    let mut world = preempting();
    budget(&mut world, "a");
    assert_eq!(told(&mut world, "a"), (Reason::WaitingForVictims, in_the_way.clone()));
    world.pass(120);
    assert_eq!(world.reason("a"), Reason::Backoff);
    assert_eq!(told(&mut world, "a").1, None, "nobody has to go any more");

    let mut world = preempting();
    budget(&mut world, "a");
    world.handle(GangEvent::VictimGone { pod: &uid("slow") });
    assert_eq!(told(&mut world, "a").1, in_the_way, "one has to go yet");
    world.handle(GangEvent::VictimGone { pod: &uid("quick") });
    assert_eq!(told(&mut world, "a").1, None, "all are gone");

    let mut world = World::new();
    world.bound_gang_of("v", 2, &membership("v", 2));
    preempts_both(&mut world);
    world.gone("v0");
    budget(&mut world, "v");
    assert_eq!(told(&mut world, "v"), (Reason::Restarting, in_the_way));
    world.gone("v1");
    assert_eq!(told(&mut world, "v").1, None);
}

/// Gang `a` waits for two pods to go.
fn preempting() -> World {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        victims: vec![uid("slow"), uid("quick")],
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    world.take_work();
    world
}

/// A pod is on its way out, with so many seconds left.
fn ends(world: &mut World, pod: &str, left: i64) {
    let by = world.now().unix + left;
    world.handle(GangEvent::VictimTerminating { pod: &uid(pod), by });
}

#[test]
fn terminating_victims_are_awaited_without_further_evictions() {
    let mut world = preempting();
    ends(&mut world, "slow", 600);
    assert_eq!(world.reason("a"), Reason::WaitingForVictims);
    ends(&mut world, "quick", 30);
    assert_eq!(world.reason("a"), Reason::VictimsTerminating);
    world.pass(30);
    world.handle(GangEvent::VictimGone { pod: &uid("quick") });
    world.pass(570 + 119);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    assert_eq!(world.reserved(), ["g0"]);
    assert_eq!(world.take_work(), []);
    world.handle(GangEvent::VictimGone { pod: &uid("slow") });
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.come("a0"), Arrival::Wait);
}

#[test]
fn devices_of_terminating_pods_are_reserved_without_eviction() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        leaving: [(uid("slow"), world.now().unix + 600)].into(),
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reason("a"), Reason::VictimsTerminating);
    world.pass(719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    assert_eq!(world.reserved(), ["g0"]);
    world.handle(GangEvent::VictimGone { pod: &uid("slow") });
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.woken(), ["a0"]);
}

#[test]
fn pods_that_are_late_by_their_own_word_are_let_be() {
    let mut world = preempting();
    world.handle(GangEvent::VictimGone { pod: &uid("quick") });
    ends(&mut world, "slow", 600);
    world.pass(719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Backoff, "its node may be lost");
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn nobody_is_waited_for_longer_than_an_hour_whatever_he_says() {
    let mut world = preempting();
    for pod in ["slow", "quick"] {
        world.handle(GangEvent::VictimTerminating { pod: &uid(pod), by: i64::MAX });
    }
    world.pass(3719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Backoff);
}

#[test]
fn victim_not_terminating_in_time_ends_the_preemption() {
    // The preemption is given up even if the other victims are terminating or gone.
    for left in [600, -1_000] {
        let mut world = preempting();
        ends(&mut world, "slow", left);
        if left < 0 {
            ends(&mut world, "quick", left);
        }
        world.pass(120);
        assert_eq!(world.phase("a"), GangPhase::Backoff);
    }
}
