//! A process takes over from another: nothing but pods and objects tell what was decided.

use std::sync::Arc;

use gantry_api::{GangPhase, GangStatus, Reason};

use super::world::{
    World, asks, bound, forget, in_role, key, leaving, member, membership, place, uid, wants_roles,
    with_repair,
};
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef, Size};
use crate::protocol::{Answer, Arrival, GangEvent, Member, Placement, Reservation, Settings, Stage, Work};
use crate::terms::Repair;

/// The process before: gang `a` of three, of which two are needed; `bind` of them were bound. What it left: the status, and its pods.
fn before(bind: u32, repair: Repair) -> (GangStatus, Vec<Member>) {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), repair);
    for pod in ["a0", "a1", "a2"] {
        world.see(member(pod, membership.clone()));
    }
    world.plan();
    world.come_all("a", 3);
    world.write();
    let mut pods: Vec<Member> = ["a0", "a1", "a2"].map(|pod| member(pod, membership.clone())).into();
    for (number, pod) in pods.iter_mut().enumerate().take(bind as usize) {
        let node = world.bind(&format!("a{number}"));
        *pod = bound(pod.clone(), &node);
        pod.holds = place(&node, &format!("a-g{number}")).devices;
    }
    (world.status("a"), pods)
}

fn after(status: &GangStatus, pods: &[Member]) -> World {
    let mut world = World::with(Settings { identity: "second".into(), ..Settings::default() });
    for pod in pods {
        world.see(pod.clone());
    }
    world.show("a", status.clone());
    world
}

#[test]
fn nothing_is_decided_before_all_is_known() {
    let mut world = World::with(Settings::default());
    world.members("a", 1, 1);
    assert_eq!(world.next(), None);
    assert_eq!(world.gangs.take_statuses(), []);
    world.handle(GangEvent::Synced);
    assert!(world.next().is_some());
}

#[test]
fn a_decided_gang_is_finished_by_the_next_process() {
    let (status, pods) = before(1, Repair::Hold);
    let mut world = after(&status, &pods);
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(world.reserved(), ["a-g1", "a-g2"], "what is bound holds its own");
    assert_eq!(world.woken(), ["a1", "a2"]);
    assert_eq!(world.bind("a1"), "n1");
    assert_eq!(world.bind("a2"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.next(), None);
}

#[test]
fn lost_role_reservation_is_kept_until_its_owner_is_read() {
    // After a fail-over it is unknown which roles are needed. Once the owner is read, only a needed
    // reservation is kept.
    let roles = wants_roles(&[("ps", 1), ("worker", 1)]);
    let owned = |pod: &str, role: &str| member(pod, in_role(role));
    let mut world = World::new();
    world.group_says(roles.clone());
    let mut pods = vec![owned("a0", "ps"), owned("a1", "worker"), owned("a2", "worker")];
    for pod in &pods {
        world.see(pod.clone());
    }
    world.plan();
    world.come_all("a", 3);
    world.write();
    for (number, pod) in pods.iter_mut().enumerate() {
        let node = world.bind(&format!("a{number}"));
        *pod = bound(pod.clone(), &node);
        pod.holds = place(&node, &format!("a-g{number}")).devices;
    }
    let status = world.status("a");

    // The next process finds two of two that are needed, and the ps gone; which roles are needed it does not know.
    let mut world = after(&status, &pods[1..]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.reserved(), ["a-g0"]);
    assert_eq!(world.next(), None);
    world.group_says(roles.clone());
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reserved(), ["a-g0"], "no ps, no gang");

    // What nobody needs is given back then.
    let mut world = after(&status, &pods[..2]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.reserved(), ["a-g2"]);
    world.group_says(roles);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn the_order_of_object_and_pods_makes_no_difference() {
    let (status, pods) = before(1, Repair::Hold);
    let mut world = World::with(Settings::default());
    world.show("a", status);
    for pod in pods.iter().rev() {
        world.see(pod.clone());
    }
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!((world.node("a1"), world.node("a2")), ("n1".into(), "n2".into()));
}

#[test]
fn a_bound_gang_is_bound_and_says_nothing_new() {
    let (_, pods) = before(3, Repair::Hold);
    let (mut status, _) = before(3, Repair::Hold);
    status.phase = GangPhase::Bound;
    let mut world = after(&status, &pods);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.take_work(), []);
}

#[test]
fn member_bound_after_the_last_status_is_found_by_its_devices() {
    let (mut status, mut pods) = before(1, Repair::Hold);
    // The object still says that the place is kept for somebody.
    let slots = &mut status.decision.as_mut().unwrap().reservations;
    slots[1].pod = None;
    pods[1].stage = Stage::Bound("n1".into());
    pods[1].holds = place("n1", "a-g1").devices;
    let mut world = after(&status, &pods);
    world.handle(GangEvent::Synced);
    assert_eq!(world.reserved(), ["a-g2"]);
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_member_lost_meanwhile_is_repaired() {
    let (status, pods) = before(2, Repair::Hold);
    let mut world = after(&status, &pods[1..2]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.reserved().len(), 1, "one of two is needed");
    world.see(member("a3", with_repair(membership("a", 2), Repair::Hold)));
    assert_eq!(world.come("a3"), Arrival::Wait, "its place is not written down yet");
    world.write_down();
    assert!(matches!(world.come("a3"), Arrival::Go(_)));

    let (status, pods) = before(2, Repair::Restart);
    let mut world = after(&status, &pods[1..2]);
    world.handle(GangEvent::Synced);
    assert!(matches!(&world.take_work()[..], [Work::Delete { pods, .. }] if *pods == [uid("a1")]));
}

#[test]
fn a_gang_of_which_only_work_that_is_done_is_left_goes_on() {
    let (mut status, mut pods) = before(3, Repair::Hold);
    // Two have ended well, one of them on the node that is gone now, and with it the third.
    pods[0].stage = Stage::Succeeded;
    status.completed = 2;
    let slots = &mut status.decision.as_mut().unwrap().reservations;
    slots.retain(|slot| slot.pod == Some(uid("a2")));
    let mut world = after(&status, &pods[..1]);
    let third = member("a3", pods[2].membership.as_ref().clone());
    world.see(third);
    world.handle(GangEvent::Synced);
    assert_eq!(world.bind("a3"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn the_place_of_a_member_on_its_way_out_waits_for_its_end() {
    let (status, mut pods) = before(2, Repair::Hold);
    pods[0] = leaving(pods[0].clone());
    pods.truncate(2);
    let mut world = after(&status, &pods);
    world.handle(GangEvent::Synced);
    let replacement = member("a3", with_repair(membership("a", 2), Repair::Hold));
    world.see(replacement);
    world.gone("a0");
    assert!(matches!(world.answer("a3"), Answer::Node(_)));
}

#[test]
fn a_replacement_fits_a_place_by_what_it_asks_for() {
    let (status, pods) = before(2, Repair::Hold);
    let mut world = after(&status, &pods[1..2]);
    let mut larger = member("a3", with_repair(membership("a", 2), Repair::Hold));
    larger.shape = Some(crate::protocol::ShapeId(1));
    larger.asks = [("nvidia.com/gpu".into(), 8)].into();
    world.see(larger);
    world.handle(GangEvent::Synced);
    assert!(matches!(world.answer("a3"), Answer::Wait(_)), "a place of one GPU is not for eight");
    assert_eq!(asks().len(), 1);
}

#[test]
fn a_decision_of_which_no_member_is_left_is_over() {
    let (status, _) = before(2, Repair::Hold);
    let created = status.bound_at.as_ref().unwrap().0.as_second() + 1;
    let others = ["b0", "b1"].map(|pod| Member { created, ..member(pod, membership("a", 2)) });
    let mut world = after(&status, &others);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Queued, "they wait for one another like any others");
    assert_eq!(world.status("a").decision, None, "and the object says so");
    world.show("a", status);
    assert_eq!(world.phase("a"), GangPhase::Queued, "the old word, seen once more, does not count");
}

#[test]
fn an_object_without_pods_is_forgotten_unless_a_person_wrote_it() {
    let (status, _) = before(2, Repair::Hold);
    let mut world = after(&status, &[]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.take_work(), [forget("a")]);
}

#[test]
fn a_decision_of_another_gang_of_that_name_is_not_taken_up() {
    let (mut status, pods) = before(1, Repair::Hold);
    status.incarnation = "before".to_owned();
    let mut world = after(&status, &pods);
    world.handle(GangEvent::Synced);
    assert_eq!(world.gangs.view(&key("a")).unwrap().decision_id(), None);
}

#[test]
fn completed_members_whose_pods_are_gone_still_count() {
    let (mut status, pods) = before(3, Repair::Hold);
    status.completed = 1;
    status.decision.as_mut().unwrap().reservations.remove(0);
    let mut world = after(&status, &pods[1..2]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn member_that_ends_between_processes_counts_beside_others() {
    let (mut status, mut pods) = before(3, Repair::Hold);
    status.completed = 1;
    status.decision.as_mut().unwrap().reservations.remove(0);
    // One that was counted still has its pod, or none has.
    for kept in [0, 1] {
        pods[0].stage = Stage::Succeeded;
        pods[1].stage = Stage::Succeeded;
        let mut world = after(&status, &pods[kept..]);
        world.handle(GangEvent::Synced);
        assert_eq!(world.gangs.view(&key("a")).unwrap().completed(), 2, "{kept}");
    }
}

#[test]
fn status_with_too_many_completed_members_is_capped() {
    let (mut status, pods) = before(3, Repair::Hold);
    status.completed = u32::MAX;
    let mut world = after(&status, &pods);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    let completed = world.gangs.view(&key("a")).unwrap().completed();
    assert_eq!(completed as usize, Settings::default().max_members);
}

#[test]
fn a_restart_under_way_is_finished() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    let decided = world.status("a");
    world.gone("a0");
    let mut status = world.status("a");
    assert_eq!(status.phase, GangPhase::Degraded);
    // The decision stays in the object until the old ones are gone.
    assert_eq!(
        status.decision.as_ref().map(|decision| &decision.id),
        decided.decision.map(|decision| decision.id).as_ref()
    );
    status.bound_at = decided.bound_at;

    let mut new = member("a2", membership.clone());
    new.created = 5_000;
    let mut world = after(&status, &[bound(member("a1", membership), "n1"), new]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert!(matches!(&world.take_work()[..], [Work::Delete { pods, .. }] if *pods == [uid("a1")]));
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn an_object_of_ours_that_is_nobodys_goes() {
    // Its gang was over before anything was written into it.
    let empty = || GangStatus::default();
    let mut world = after(&empty(), &[]);
    world.handle(GangEvent::Synced);
    assert_eq!(world.take_work(), [forget("a")]);
    world.pass(59);
    assert_eq!(world.take_work(), []);
    world.pass(1);
    assert_eq!(world.take_work(), [forget("a")], "the removal was lost");

    // One that comes late waits a moment for its gang.
    let mut world = World::new();
    world.show("a", empty());
    world.pass(9);
    assert_eq!(world.take_work(), []);
    world.pass(1);
    assert_eq!(world.take_work(), [forget("a")]);

    let mut world = World::new();
    world.show("a", empty());
    world.members("a", 1, 2);
    world.pass(60);
    assert_eq!(world.take_work(), [], "a gang has it");
}

/// The process that leads now has given a device of gang `a` to another gang.
fn with_device_of_a1_given_away() -> World {
    let mut world = World::new();
    world.see(member("b0", membership("b", 1)));
    let wanted = world.next().unwrap();
    let placement =
        Placement { places: vec![place("n1", "a-g1")], domain: "node n1".into(), ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    world
}

#[test]
fn late_decision_over_reservations_of_others_is_discarded() {
    // A former leader writes a decision after the new leader gave one of its devices to another gang.
    let (status, pods) = before(0, Repair::Hold);
    let mut world = with_device_of_a1_given_away();
    for pod in pods {
        world.see(pod);
    }
    world.show("a", status);
    assert_eq!(world.gangs.view(&key("a")).unwrap().decision_id(), None);
    assert_eq!(world.status("a").decision, None, "and the object says so");
    assert_eq!(world.plan_from(4).must, 2, "all of it is planned anew, not what is left of it");
}

/// It was carried out, so that it was not written late. The others may be lost, and their replacements come.
#[test]
fn decision_of_which_a_member_has_ended_stands() {
    let (status, pods) = before(0, Repair::Hold);
    let decided = status.decision.clone().unwrap();
    let mut world = with_device_of_a1_given_away();
    for pod in pods {
        let stage = if pod.uid == uid("a1") { Stage::Succeeded } else { pod.stage.clone() };
        world.see(Member { stage, ..pod });
    }
    world.show("a", status);
    assert_eq!(world.gangs.view(&key("a")).unwrap().decision_id(), Some(&*decided.id));
}

/// What the older one has given up, and could not say so any more.
#[test]
fn a_place_that_two_decisions_name_is_that_of_the_younger_one() {
    let (older, mut pods) = before(1, Repair::Hold);
    pods.truncate(1);
    let mut world = World::new();
    world.pass(1000);
    for pod in ["z0", "z1"] {
        world.see(member(pod, membership("z", 2)));
    }
    let wanted = world.next().unwrap();
    let placement =
        Placement { places: vec![place("n5", "z-g5"), place("n1", "a-g1")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    world.come_all("z", 2);
    world.write();
    world.bind("z0");
    let younger = world.status("z");
    let mut begun = bound(member("z0", membership("z", 2)), "n5");
    begun.holds = place("n5", "z-g5").devices;

    let mut world = after(&older, &pods);
    world.see(begun);
    world.see(member("z1", membership("z", 2)));
    world.show("z", younger);
    world.handle(GangEvent::Synced);
    assert_eq!(world.bind("z1"), "n1");
    assert_eq!(world.phase("z"), GangPhase::Bound);
}

#[test]
fn decision_stays_until_the_owner_is_read_that_parts_roles() {
    // Workers are a gang of their own, because the JobSet makes them when the driver is ready: that is known only from the JobSet.
    let owner =
        OwnerRef { kind: OwnerKind::JobSet, namespace: "default".into(), name: "js".into(), part: "".into() };
    let facts = OwnerFacts {
        min: Some(3),
        by_role: vec![("driver".into(), 1), ("workers".into(), 2)],
        apart: true,
        ..OwnerFacts::default()
    };
    let facts = Arc::new(facts);
    let worker = |pod: &str| {
        let (owner, role) = (Some(owner.clone()), "workers".into());
        member(
            pod,
            Membership { owner, role, size: Size::Undeclared, size_source: "", ..membership("js", 3) },
        )
    };
    let mut before = World::new();
    before.handle(GangEvent::OwnerSeen { owner: &owner, facts: Some(Arc::clone(&facts)) });
    ["w0", "w1"].iter().for_each(|pod| before.see(worker(pod)));
    before.handle(GangEvent::OwnerSeen { owner: &owner, facts: Some(Arc::clone(&facts)) });
    let wanted = before.next().unwrap();
    let places = vec![place("n1", "g1"), place("n2", "g2")];
    let places = places.into_iter().map(|place| Reservation { role: "workers".into(), ..place });
    let found = Placement { places: places.collect(), ..Placement::default() };
    before.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(found) });
    ["w0", "w1"].iter().for_each(|pod| drop(before.come(pod)));
    before.write();
    let node = before.bind("w0");
    let status = before.status("js/workers");
    let held = |node: &str| if node == "n1" { place("n1", "g1") } else { place("n2", "g2") }.devices;

    let mut world = World::with(Settings { identity: "second".into(), ..Settings::default() });
    world.see(Member { holds: held(&node), ..bound(worker("w0"), &node) });
    world.see(worker("w1"));
    world.show("js/workers", status);
    world.handle(GangEvent::Synced);
    world.pass(600);
    assert!(!world.take_work().contains(&forget(&key("js/workers").object_name())));
    world.handle(GangEvent::OwnerSeen { owner: &owner, facts: Some(facts) });
    assert_ne!(world.bind("w1"), node);
    assert_eq!(world.phase("js/workers"), GangPhase::Bound);
}

#[test]
fn waiting_since_survives_an_extender_restart() {
    let waited = |created: i64| {
        let mut before = World::new();
        before.members("a", 2, 2);
        before.refuse();
        let status = before.status("a");
        let mut world = World::with(Settings::default());
        world.pass(500);
        for pod in ["a0", "a1"] {
            let mut seen = member(pod, membership("a", 2));
            seen.created = created;
            world.see(seen);
        }
        world.show("a", status);
        world.handle(GangEvent::Synced);
        world.status("a").waiting_since.unwrap().0.as_second()
    };
    assert_eq!(waited(900), 1_000);
    assert_eq!(waited(1_400), 1_500, "those that are there now came later: it is another life");
}

#[test]
fn tries_that_failed_before_a_restart_count_on() {
    let mut before = World::new();
    before.members("a", 2, 2);
    for _ in 0..3 {
        before.plan();
        // Nobody comes.
        before.pass(120);
    }
    let status = before.status("a");
    assert_eq!(status.failed_attempts, 3);
    let mut world = World::with(Settings::default());
    world.members("a", 2, 2);
    world.show("a", status);
    world.handle(GangEvent::Synced);
    world.plan();
    world.pass(60);
    assert_eq!(world.status("a").failed_attempts, 4);
    world.pass(15);
    assert_eq!(world.next(), None, "it waits 16 s now");
    world.pass(1);
    assert!(world.next().is_some());
}
