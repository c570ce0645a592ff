//! Which members count, when a gang is complete enough, and what it is told until then.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GangPhase, GangSpec, Reason};

use super::world::{
    World, bound, in_pod_group, in_role, key, leaving, member, membership, pod_group, uid, wants, wants_roles,
};
use crate::integrations::value::arrival;
use crate::membership::{JobRef, Membership, OwnerKind, OwnerRef, Size};
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, Blocker, Member, Object, Settings, Stage, WatchedOwner, Work};
use crate::terms::{Fault, work};

fn gated(mut member: Member, by_us_alone: bool) -> Member {
    member.stage = Stage::Gated { by: (!by_us_alone).then(|| "example.com/quota".into()) };
    member
}

fn light(mut member: Member) -> Member {
    member.shape = None;
    member.asks = [].into();
    member
}

#[test]
fn members_with_gates_of_others_exist_and_do_not_arrive() {
    let mut world = World::new();
    world.see(member("a0", membership("a", 2)));
    world.see(gated(member("a1", membership("a", 2)), false));
    assert_eq!(world.reason("a"), Reason::MembersGated);
    assert_eq!(world.take_work(), []);
}

#[test]
fn our_own_gates_keep_members_back_where_nobody_removes_them() {
    let mut world = World::with(Settings { gates: false, ..Settings::default() });
    world.handle(GangEvent::Synced);
    for name in ["a0", "a1"] {
        world.see(gated(member(name, membership("a", 2)), true));
    }
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.take_work(), []);
    assert_eq!((world.reason("a"), world.status("a").members), (Reason::MembersGated, 2));
}

#[test]
fn our_gates_go_when_the_quorum_exists_and_not_before() {
    let mut world = World::new();
    world.see(gated(member("a0", membership("a", 2)), true));
    assert_eq!(world.take_work(), []);
    world.see(gated(member("a1", membership("a", 2)), true));
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a0"), uid("a1")])]);
    world.see(member("a0", membership("a", 2)));
    assert_eq!(world.take_work(), []);
    world.pass(10);
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a1")])], "once more, as it had no effect");
}

#[test]
fn gang_with_unremovable_gates_reserves_nothing_until_allowed() {
    let mut world = World::new();
    for name in ["a0", "a1"] {
        world.see(gated(member(name, membership("a", 2)), true));
    }
    let ungate = Work::Ungate(vec![uid("a0"), uid("a1")]);
    assert_eq!(world.take_work(), std::slice::from_ref(&ungate));
    world.plan();
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);

    let why = "pod a0: its scheduling gate cannot be removed: no; manifests/gates.yaml gives that right";
    world.handle(GangEvent::Blocked { gang: &key("a"), blocker: Blocker::Gates, why: Some(why.into()) });
    assert_eq!(world.reserved(), Vec::<String>::new(), "nobody can come to them");
    assert_eq!(world.reason("a"), Reason::MissingPermission);
    let status = world.status("a");
    assert_eq!((status.phase, status.failed_attempts), (GangPhase::Queued, 0));
    world.room += 1;
    assert_eq!(world.next(), None);
    assert_eq!(world.gangs.head(world.now()), None, "no nodes are kept for it either");

    // It is asked for again and again meanwhile, so that it goes on once it may.
    world.take_work();
    world.pass(10);
    assert_eq!(world.take_work(), [ungate]);
    assert_eq!(world.next(), None);
    world.handle(GangEvent::Blocked { gang: &key("a"), blocker: Blocker::Gates, why: None });
    for name in ["a0", "a1"] {
        world.see(member(name, membership("a", 2)));
    }
    world.plan();
    assert_eq!(world.phase("a"), GangPhase::Reserved);
}

#[test]
fn gang_without_eviction_right_keeps_reservations_while_gated() {
    let mut world = World::new();
    world.see(gated(member("a0", membership("a", 2)), true));
    world.see(gated(member("a1", membership("a", 2)), true));
    world.plan();
    world.handle(GangEvent::Blocked {
        gang: &key("a"),
        blocker: Blocker::Removal,
        why: Some("no right".into()),
    });
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.reserved().len(), 2);
}

#[test]
fn gang_is_planned_without_gated_members_if_the_rest_suffice() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.see(gated(member("a2", membership("a", 2)), true));
    world.handle(GangEvent::Blocked {
        gang: &key("a"),
        blocker: Blocker::Gates,
        why: Some("no right".into()),
    });
    let wanted = world.plan();
    assert_eq!((wanted.must, wanted.members.len()), (2, 2));
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.bind("a1");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world.room += 1;
    assert_eq!(world.next(), None, "a2 could not come to a place");
}

#[test]
fn members_without_devices_count_as_arrived_once_they_exist() {
    let mut world = World::new();
    world.see(light(member("launcher", membership("a", 2))));
    assert_eq!(world.answer("launcher"), Answer::Single);
    assert_eq!(world.arrive("launcher", "n9"), Arrival::Single);
    world.see(member("worker", membership("a", 2)));
    let wanted = world.plan();
    assert_eq!((wanted.must, wanted.members.len()), (1, 1));
    world.come("worker");
    world.write();
    world.bind("worker");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn member_count_includes_completed_but_not_failed_or_leaving() {
    let mut world = World::new();
    let mut failed = member("a0", membership("a", 3));
    world.see(failed.clone());
    failed.stage = Stage::Failed;
    world.see(failed);
    world.see(leaving(bound(member("a1", membership("a", 3)), "n1")));
    let mut completed = bound(member("a2", membership("a", 3)), "n2");
    completed.stage = Stage::Succeeded;
    world.see(completed);
    world.see(member("a3", membership("a", 3)));
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
    world.see(member("a4", membership("a", 3)));
    let wanted = world.plan();
    assert_eq!((wanted.must, wanted.members.len()), (2, 2));
}

#[test]
fn announced_total_is_waited_for_a_short_time() {
    let mut world = World::new();
    let mut said = membership("a", 2);
    said.size = Size::Stated { min: 2, total: Some(3) };
    world.see(member("a0", said.clone()));
    world.see(member("a1", said.clone()));
    assert_eq!(world.next(), None);
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.reason("a"), Reason::WaitingForMoreMembers);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.next().unwrap().members.len(), 2);
    world.see(member("a2", said));
    assert_eq!(world.next().unwrap().members.len(), 3, "complete: at once");
}

#[test]
fn every_role_needs_its_minimum() {
    let mut world = World::new();
    world.group_says(wants_roles(&[("ps", 1), ("worker", 2)]));
    let role = |uid: &str, role: &str| member(uid, in_role(role));
    for pod in ["a0", "a1", "a2"] {
        world.see(role(pod, "worker"));
    }
    assert_eq!(world.reason("a"), Reason::WaitingForRole);
    world.see(role("a3", "ps"));
    world.plan();
    for pod in ["a0", "a1", "a2"] {
        assert_eq!(world.come(pod), Arrival::Wait);
    }
    assert_eq!(world.phase("a"), GangPhase::Reserved, "three, but none of them is the ps");
    world.come("a3");
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn a_size_that_the_owner_knows_is_asked_of_the_pod_group() {
    let mut world = World::new();
    world.see(member("a0", in_pod_group()));
    let wanted = |unread| {
        let owner = pod_group();
        [WatchedOwner { owner, unread }]
    };
    assert_eq!(world.gangs.watched_owners(), wanted(true));
    assert_eq!(world.reason("a"), Reason::UnknownSize);
    world.handle(GangEvent::OwnerSeen { owner: &pod_group(), facts: None });
    assert_eq!(world.gangs.watched_owners(), wanted(false));
    assert_eq!(world.reason("a"), Reason::UnknownSize);
    world.group_says(wants(1));
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.status("a").decided_by, "minMember of PodGroup a (scheduling.x-k8s.io)");
    world.gone("a0");
    world.pass(60);
    assert_eq!(world.gangs.watched_owners(), []);
}

#[test]
fn gang_status_reports_that_a_staged_owner_is_unreadable() {
    // An owner that starts some pods before others decides which pods form a gang. If it cannot be read, the
    // status says so.
    let of = |kind: OwnerKind| {
        let owner = OwnerRef { kind, ..pod_group() };
        let membership = Membership { owner: Some(owner.clone()), ..membership("a", 4) };
        let mut world = World::new();
        world.see(member("a0", membership));
        assert_eq!(world.reason("a"), Reason::UnknownSize);
        world.handle(GangEvent::OwnerSeen { owner: &owner, facts: None });
        assert_eq!(world.reason("a"), Reason::WaitingForMembers);
        let terms = world.gangs.view(&key("a")).unwrap().terms().cloned().expect("terms");
        terms.unread.clone()
    };
    for kind in [OwnerKind::LeaderWorkerSet, OwnerKind::JobSet, OwnerKind::MpiJob] {
        assert_eq!(of(kind).map(|owner| owner.kind), Some(kind));
    }
    assert_eq!(of(OwnerKind::CoschedulingPodGroup), None, "the pods declare enough");
}

/// Between two gangs that go by it nobody tells what becomes of an owner.
#[test]
fn a_gang_made_again_does_not_go_by_what_its_owner_said_before() {
    let mut world = World::new();
    world.see(member("a0", in_pod_group()));
    world.group_says(wants(1));
    assert_eq!(world.phase("a"), GangPhase::Queued);
    world.gone("a0");
    world.pass(60);
    world.see(member("a1", in_pod_group()));
    assert_eq!(world.reason("a"), Reason::UnknownSize);
    world.group_says(wants(2));
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn what_is_told_of_an_owner_that_no_gang_goes_by_is_not_kept() {
    let mut world = World::new();
    world.handle(GangEvent::OwnerSeen { owner: &pod_group(), facts: None });
    world.pass(1);
    world.see(member("a0", in_pod_group()));
    assert_eq!(world.reason("a"), Reason::UnknownSize);
}

#[test]
fn contradicting_members_make_the_gang_invalid() {
    let mut world = World::new();
    world.see(member("a0", membership("a", 1)));
    world.plan();
    world.see(member("a1", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Invalid);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.waits("a0"), Reason::Invalid);
    let status = world.status("a");
    assert_eq!((&*status.conditions[0].type_, &*status.conditions[0].status), ("Valid", "False"));
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Queued, "mended");
}

/// A pod of a Job whose template names a gang.
fn of_job(job: &str, uid: &str, min: u32) -> Member {
    let maker = JobRef { kind: "Job".into(), name: job.into(), uid: format!("uid of {job}").into() };
    let membership = Membership { maker: Some(maker), ..membership("a", min) };
    member(uid, membership)
}

/// Things looked at for each pod while so many come, each of which says something else of everything, are asked about, and go.
fn looked_at(pods: u32) -> u64 {
    let mut world = World::new();
    work::take();
    for number in 0..pods {
        let mut membership = membership("a", number + 1);
        membership.role = format!("role-{number}").into();
        membership.options.max = Some(number + 1);
        membership.options.arrival = arrival(Duration::from_secs(u64::from(number) + 1), "annotation");
        let pod = of_job(&format!("job-{number}"), &format!("a{number}"), number + 1);
        membership.maker = pod.membership.maker.clone();
        world.see(member(&format!("a{number}"), membership));
    }
    assert_eq!(world.phase("a"), GangPhase::Invalid);
    for number in 0..pods {
        world.waits(&format!("a{number}"));
        world.gone(&format!("a{number}"));
    }
    work::take() / u64::from(pods)
}

#[test]
fn contradicting_pod_costs_the_same_in_large_gangs() {
    let (few, many) = (looked_at(100), looked_at(2_000));
    assert!(many <= few + 1 && many > 0, "{few} and {many} things for each pod");
}

#[test]
fn two_jobs_with_one_gang_name_make_it_invalid() {
    // If both jobs exceed the total together, neither of them is bound in part.
    let mut world = World::new();
    for pod in ["a0", "a1"] {
        world.see(of_job("left", pod, 3));
    }
    world.see(of_job("right", "a2", 3));
    assert_eq!(world.reason("a"), Reason::WaitingForMoreMembers, "more may come");
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Queued, "a gang may be of two jobs");
    world.plan();
    world.see(of_job("right", "a3", 3));
    assert_eq!(world.phase("a"), GangPhase::Invalid, "they are more than it takes");
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.waits("a0"), Reason::Invalid);
    world.gone("a1");
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Queued, "mended");
}

#[test]
fn second_job_with_the_name_of_a_bound_gang_gets_no_reservation() {
    let mut world = World::new();
    for pod in ["a0", "a1"] {
        world.see(of_job("left", pod, 2));
    }
    world.plan();
    for pod in ["a0", "a1"] {
        world.come(pod);
    }
    world.write();
    for pod in ["a0", "a1"] {
        world.bind(pod);
    }
    world.see(of_job("right", "a2", 2));
    assert_eq!(world.phase("a"), GangPhase::Bound, "it goes on");
    assert_eq!(world.next(), None);
    let valid = world.status("a").conditions.swap_remove(0);
    assert_eq!((&*valid.type_, &*valid.status), ("Valid", "False"));
    insta::assert_snapshot!(valid.message, @"pods: Job left, Job right give their gangs one name, and have more than the 2 members that it takes: give each a name of its own; or, if they belong together, say how many members there may be (gantry.dev/gang-max), or minMember in the Gang");
    assert_eq!(world.waits("a2"), Reason::Invalid);
}

#[test]
fn jobs_that_belong_together_say_how_many_members_there_may_be() {
    let mut world = World::new();
    for (job, pod) in [("driver", "a0"), ("workers", "a1"), ("workers", "a2")] {
        let mut member = of_job(job, pod, 2);
        let mut membership = Membership::clone(&member.membership);
        membership.options.max = Some(3);
        member.membership = Arc::new(membership);
        world.see(member);
    }
    assert_eq!(world.phase("a"), GangPhase::Queued);
}

#[test]
fn a_pod_with_a_fault_is_told_its_own() {
    let mut world = World::new();
    let mut faulty = membership("a", 1);
    faulty
        .faults
        .push(Fault { place: "annotation gantry.dev/gang-rank".into(), words: "`x` is not a number".into() });
    world.see(member("a0", faulty));
    assert_eq!(world.waits("a0"), Reason::InvalidMember);
    assert_eq!(world.phase("a"), GangPhase::Invalid);
    assert_eq!(world.next(), None);
}

#[test]
fn a_person_s_word_in_the_object_goes_first() {
    let mut world = World::new();
    let spec = GangSpec { min_member: Some(1), ..GangSpec::default() };
    let object = Object { ours: false, spec: Ok(spec), ..world.object(gantry_api::GangStatus::default()) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    world.see(member("a0", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Queued);
    world.handle(GangEvent::ObjectGone { namespace: "default", name: "a" });
    assert_eq!(world.phase("a"), GangPhase::Pending);
    let object = Object {
        spec: Err(Fault {
            place: "spec".into(),
            words: "unknown field `minMembers`, perhaps `minMember`?".into(),
        }),
        ..world.object(gantry_api::GangStatus::default())
    };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    assert_eq!(world.reason("a"), Reason::Invalid);
}

#[test]
fn of_two_gangs_of_one_object_name_the_second_is_told_so() {
    let mut world = World::new();
    // The name of gang `x` of another convention, taken by a gang of ours.
    let mut other = membership("x", 1);
    other.key.integration = crate::key::Integration::Kueue;
    let name = other.key.object_name();
    world.see(member("x0", other));
    world.see(member("a0", membership(&name, 1)));
    assert_eq!(world.phase(&name), GangPhase::Invalid);
    assert!(world.waits("a0") == Reason::Invalid, "{}", world.text(&name));
    world.gone("x0");
    world.pass(60);
    assert_eq!(world.phase(&name), GangPhase::Queued, "the name is free");
}

#[test]
fn pod_that_names_another_gang_moves_unless_reserved() {
    let mut world = World::new();
    world.see(member("p", membership("a", 2)));
    world.see(member("p", membership("b", 1)));
    assert_eq!(world.gangs.gang_of(&uid("p")).map(|gang| gang.name.to_string()), Some("b".to_owned()));
    assert!(world.gangs.view(&key("a")).is_none(), "nobody was ever of it");
    world.plan();
    world.see(member("p", membership("a", 2)));
    assert_eq!(world.gangs.gang_of(&uid("p")).map(|gang| gang.name.to_string()), Some("b".to_owned()));
}
