//! What people read, at every stage.

use std::fmt::Write;
use std::sync::Arc;

use gantry_api::placement::ComparedFabric;
use gantry_api::{GangPhase, GangStatus, MAX_MESSAGE, Reason};

use super::world::{World, bound, in_pod_group, key, leaving, member, membership, place, uid, wants};
use crate::key::Integration;
use crate::membership::OwnerFacts;
use crate::protocol::GangEvent;
use crate::protocol::{Answer, BindEnd, MEMBERS_SLOW, Member, Placement, Stage};

/// One status as lines, but for the decision.
fn read(world: &mut World, what: &str, out: &mut String) {
    let text = world.text("a");
    let Some((_, status)) = world.gangs.take_statuses().into_iter().next() else {
        writeln!(out, "{what}\n  (nothing new)").unwrap();
        return;
    };
    writeln!(out, "{what}\n  pods: {text}").unwrap();
    writeln!(out, "  {:?}: {} | {}", status.phase, status.reason.unwrap(), status.message).unwrap();
    let waits = status.waiting_since.map(|time| time.0.as_second());
    writeln!(
        out,
        "  {} members, {} bound, {} completed, min {}, {} failed_attempts, in `{}`, waits since {waits:?}, decided {}",
        status.members,
        status.bound,
        status.completed,
        status.min,
        status.failed_attempts,
        status.domain,
        status.decision.is_some(),
    )
    .unwrap();
    let conditions = status.conditions.iter().map(|condition| {
        let since = condition.last_transition_time.0.as_second();
        format!("{}={} ({}, {since})", condition.type_, condition.status, condition.reason)
    });
    writeln!(out, "  {}", conditions.collect::<Vec<_>>().join(" ")).unwrap();
}

#[test]
fn every_stage_reads_well() {
    let mut world = World::new();
    let mut out = String::new();
    world.members("a", 2, 3);
    read(&mut world, "too few", &mut out);
    world.see(member("a2", membership("a", 3)));
    read(&mut world, "enough", &mut out);
    world.refuse();
    read(&mut world, "no room", &mut out);
    world.room += 1;
    world.plan();
    read(&mut world, "planned", &mut out);
    world.come("a0");
    read(&mut world, "one is there", &mut out);
    world.pass(60);
    read(&mut world, "the others did not come", &mut out);
    world.pass(2);
    world.plan();
    world.come_all("a", 3);
    read(&mut world, "being decided", &mut out);
    world.write();
    read(&mut world, "decided", &mut out);
    for pod in ["a0", "a1", "a2"] {
        world.bind(pod);
    }
    read(&mut world, "bound", &mut out);
    read(&mut world, "still", &mut out);
    world.see(leaving(bound(member("a0", membership("a", 3)), "n0")));
    read(&mut world, "one is lost", &mut out);
    world.gone("a0");
    world.pass(600);
    read(&mut world, "and not replaced", &mut out);
    for (pod, node) in [("a1", "n1"), ("a2", "n2")] {
        let mut ended = bound(member(pod, membership("a", 3)), node);
        ended.stage = Stage::Succeeded;
        world.see(ended);
    }
    read(&mut world, "the others have ended well", &mut out);
    world.gone("a1");
    world.gone("a2");
    read(&mut world, "all are gone", &mut out);
    insta::assert_snapshot!(out);
}

#[test]
fn the_text_of_a_parked_pod_changes_only_with_what_it_says() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.refuse();
    let before = world.answer("a0");
    assert!(matches!(before, Answer::Wait(_)));
    for _ in 0..5 {
        world.pass(100);
        world.room += 1;
        world.refuse();
        assert_eq!(world.answer("a0"), before);
        assert_eq!(world.answer("a1"), before);
    }
    world.gangs.take_statuses();
    world.pass(1000);
    world.room += 1;
    world.refuse();
    assert_eq!(world.gangs.take_statuses(), [], "nothing new to write");
}

#[test]
fn conditions_keep_the_time_since_when_they_are_as_they_are() {
    let mut world = World::new();
    world.bound_gang("a", 1, 1);
    let since = |world: &mut World| {
        let status = world.status("a");
        status.conditions[2].last_transition_time.0.as_second()
    };
    assert_eq!(since(&mut world), 1_000);
    world.pass(50);
    world.see(member("a1", membership("a", 1)));
    assert_eq!(since(&mut world), 1_000);
}

/// All members wait for the slowest: `gantry explain gang` and `gantry doctor` read it from the object.
#[test]
fn slow_members_are_a_condition_until_they_are_fast() {
    let mut world = World::new();
    world.bound_gang("a", 1, 1);
    let condition = |world: &mut World| {
        let conditions = world.status("a").conditions;
        let found = conditions.into_iter().find(|condition| condition.type_ == MEMBERS_SLOW);
        found.map(|condition| (condition.status, condition.reason, condition.message))
    };
    assert_eq!(condition(&mut world), None);
    let gang = key("a");
    let slow =
        |members: Option<&str>| GangEvent::MembersSlow { gang: &gang, members: members.map(Into::into) };
    let text = "a1: GPU 4 of n1 runs at 60 % of its highest clock, the other members at 90 %";
    world.handle(slow(Some(text)));
    let expected = ("True".to_owned(), "MemberSlow".to_owned(), text.to_owned());
    assert_eq!(condition(&mut world), Some(expected));
    world.handle(slow(None));
    assert_eq!(condition(&mut world), None);
}

#[test]
fn ignored_integrations_are_named_on_the_gang_and_to_its_pods() {
    let mut world = World::new();
    let mut both = membership("a", 2);
    both.also = vec![Integration::Coscheduling, Integration::Volcano];
    world.see(member("a0", both));
    let before = world.text("a");
    let contested = |world: &mut World| {
        let conditions = world.status("a").conditions;
        let found = conditions.into_iter().find(|condition| condition.type_ == "AmbiguousMembership");
        found.map(|condition| (condition.status, condition.reason))
    };
    assert_eq!(contested(&mut world), Some(("True".to_owned(), "SeveralIntegrations".to_owned())));
    world.see(member("a0", membership("a", 2)));
    assert_eq!(contested(&mut world), None);
    assert_eq!(world.waits("a0"), Reason::WaitingForMembers);
    assert_ne!(world.text("a"), before, "no other integration is named");
}

#[test]
fn why_a_replacement_gets_no_place_is_told() {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    let mut ended = bound(member("a1", membership("a", 3)), "n1");
    ended.stage = Stage::Succeeded;
    world.see(ended);
    world.gone("a0");
    world.pass(600);
    world.see(member("a3", membership("a", 3)));
    world.refuse();
    let before = world.answer("a3");
    let status = world.status("a");
    assert_eq!(status.reason, Some(Reason::MembersLost));
    assert_eq!((status.bound, status.completed), (1, 1));
    world.pass(100);
    world.room += 1;
    world.refuse();
    assert_eq!(world.answer("a3"), before);
    assert_eq!(world.gangs.take_statuses(), [], "nothing new to write");
}

#[test]
fn why_a_replacement_is_tried_later_is_told() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.gone("a0");
    world.pass(600);
    world.see(member("a2", membership("a", 2)));
    world.plan_from(5);
    // The node is not offered, until it is passed over; and there is no other.
    for _ in 0..3 {
        world.answer_within("a2", &["n9"]);
        world.pass(60);
    }
    world.refuse();
    let status = world.status("a");
    assert_eq!((status.reason, status.failed_attempts), (Some(Reason::MembersLost), 1));
}

#[test]
fn why_a_gang_that_is_being_bound_lacks_a_place_is_told() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.gone("a1");
    world.pass(600);
    world.see(member("a2", membership("a", 2)));
    world.refuse();
    assert_eq!(world.reason("a"), Reason::Binding);
    let status = world.status("a");
    assert_eq!(status.phase, GangPhase::Binding);
    assert_eq!((status.bound, status.min), (1, 2));
}

#[test]
fn decided_by_of_bound_gang_survives_a_contradicting_pod() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let said = world.status("a").decided_by;
    assert_eq!(said, "annotation gantry.dev/gang-min of its pods");
    world.see(member("a2", membership("a", 5)));
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.status("a").decided_by, said);
}

#[test]
fn a_view_shows_members_and_places() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    let view = world.gangs.view(&key("a")).unwrap();
    assert_eq!(view.phase(), GangPhase::Reserved);
    assert_eq!((view.min(), view.exist(), view.ready(), view.unplaced()), (2, 2, 1, 0));
    let members: Vec<_> = view
        .members()
        .map(|member| (member.name.to_owned(), member.arrived, member.node.map(ToString::to_string)))
        .collect();
    let expected = [("a0", true, "n0"), ("a1", false, "n1")];
    assert_eq!(
        members,
        expected.map(|(name, arrived, node)| (name.to_owned(), arrived, Some(node.to_owned())))
    );
    let slots: Vec<_> = view.slots().map(|slot| (slot.slot, slot.pod, slot.bound)).collect();
    assert_eq!(slots, [(0, Some(&uid("a0")), false), (1, Some(&uid("a1")), false)]);
    assert_eq!(view.surplus_members(), 0);
    world.come("a1");
    world.write();
    world.come("a0");
    world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::Failed });
    assert!(world.gangs.view(&key("a")).unwrap().is_decided());
    assert_eq!(world.gangs.views().count(), 1);
}

#[test]
fn long_reason_of_kube_scheduler_is_cut() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    let message = "no room ".repeat(10_000).into();
    world.handle(GangEvent::SchedulerMessage { pod: &uid("a0"), message: &message });
    world.pass(60);
    assert_eq!(world.reason("a"), Reason::Backoff);
    assert_eq!(world.text("a").len(), MAX_MESSAGE);
    assert_eq!(world.status("a").message.len(), MAX_MESSAGE);
}

/// A pending pod that asks for no devices.
fn light(uid: &str, min: u32) -> Member {
    Member { shape: None, asks: [].into(), ..member(uid, membership("a", min)) }
}

#[test]
fn members_without_devices_are_bound_once_they_have_nodes() {
    let mut world = World::new();
    world.see(light("a0", 2));
    world.see(light("a1", 2));
    let read = |world: &mut World| {
        let status = world.status("a");
        let bound = &status.conditions[2];
        assert_eq!(bound.type_, "Bound");
        let at = status.bound_at.map(|time| time.0.as_second());
        (status.phase, status.bound, at, bound.status.clone())
    };
    assert_eq!(read(&mut world), (GangPhase::Binding, 0, None, "False".into()));
    world.see(bound(light("a0", 2), "n0"));
    assert_eq!(read(&mut world), (GangPhase::Binding, 1, None, "False".into()));
    world.pass(5);
    world.see(bound(light("a1", 2), "n1"));
    assert_eq!(read(&mut world), (GangPhase::Bound, 2, Some(1_005), "True".into()));
}

#[test]
fn a_gang_lies_where_its_replacements_do_too() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    assert_eq!(world.status("a").domain, "rack r7");
    world.gone("a0");
    world.pass(600);
    world.see(member("a2", membership("a", 2)));
    let wanted = world.next().expect("a gang wants a plan");
    let placement = Placement {
        places: vec![place("n9", "g9")],
        domain: "2 racks of zone z1".into(),
        rails: "NICs 0-3 on all 2 nodes".into(),
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    let status = world.status("a");
    assert_eq!(
        (status.domain.as_str(), status.rails.as_str()),
        ("2 racks of zone z1", "NICs 0-3 on all 2 nodes")
    );
    let held: Vec<_> = wanted.placed.iter().map(|sibling| sibling.devices.clone()).collect();
    assert_eq!(held, [place("n1", "a-g1").devices], "the planner knows the devices of the other members");
}

/// Members that come later, and an extender that takes over, leave the comparison as it is.
#[test]
fn comparison_is_of_the_plan_of_the_whole_gang() {
    let compared = |members: u32| Some(Arc::new(ComparedFabric::new(members, Vec::new())));
    let mut world = World::new();
    world.members("a", 2, 2);
    let wanted = world.next().expect("a gang wants a plan");
    let placement = Placement {
        places: vec![place("n0", "g0"), place("n1", "g1")],
        compared: compared(2),
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    assert_eq!(world.status("a").compared, compared(2));
    world.come_all("a", 2);
    world.write();
    for pod in ["a0", "a1"] {
        world.bind(pod);
    }
    world.gone("a0");
    world.pass(600);
    world.see(member("a2", membership("a", 2)));
    let wanted = world.next().expect("a gang wants a plan");
    let more = Placement { places: vec![place("n9", "g9")], compared: compared(1), ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(more) });
    let status = world.status("a");
    assert_eq!(status.compared, compared(2));

    // The next process takes it from the object.
    let mut next = World::with(crate::protocol::Settings::default());
    next.show("a", status);
    for pod in ["a1", "a2"] {
        next.see(member(pod, membership("a", 2)));
    }
    next.handle(GangEvent::Synced);
    assert_eq!(next.status("a").compared, compared(2));
}

#[test]
fn bound_at_of_members_without_devices_survives_fail_over() {
    let mut world = World::new();
    for pod in ["a0", "a1"] {
        world.see(bound(light(pod, 2), "n0"));
    }
    let before = world.status("a");
    let mut next = World::with(crate::protocol::Settings::default());
    next.pass(50);
    for pod in ["a0", "a1"] {
        next.see(bound(light(pod, 2), "n0"));
    }
    next.show("a", before.clone());
    next.handle(GangEvent::Synced);
    assert_eq!(next.status("a").bound_at, before.bound_at);
}

#[test]
fn conditions_of_a_pod_group_are_shown_on_its_gang() {
    let mut world = World::new();
    world.see(member("a0", in_pod_group()));
    let shown = |status: &GangStatus, kind: &str| {
        let found = status.conditions.iter().find(|condition| condition.type_ == kind);
        found.map(|found| (found.status.clone(), found.reason.clone(), found.message.clone()))
    };
    let group = |why: Option<&str>| OwnerFacts { unscheduled: why.map(Into::into), ..wants(1) };
    world.group_says(group(Some("all pods should have the same priority")));
    let status = world.status("a");
    let (holds, reason, message) = shown(&status, "PodGroupScheduled").unwrap();
    assert_eq!((holds.as_str(), reason.as_str()), ("False", "GroupNotScheduled"));
    insta::assert_snapshot!(message, @"kube-scheduler reports of PodGroup a (scheduling.x-k8s.io): all pods should have the same priority");
    insta::assert_snapshot!(status.message, @"other gangs are planned first; kube-scheduler reports of PodGroup a (scheduling.x-k8s.io): all pods should have the same priority");
    world.group_says(group(None));
    assert_eq!(shown(&world.status("a"), "PodGroupScheduled"), None);
}
