//! From the decision on: how it is written, that there is only forward, and what becomes of lost members.

use gantry_api::{DecidedSlot, Decision, GangPhase, GangStatus};

use std::sync::Arc;

use super::world::{
    World, bound, claim, forget, key, leaving, member, place, refused, uid, with_rank, with_repair,
};
use crate::claim::{Claim, OwnerFacts, OwnerKind, OwnerRef};
use crate::protocol::{
    Answer, Arrival, BindEnd, CommitFailure, Hindrance, Member, Place, Placement, Stage, Work,
};
use crate::terms::Repair;

/// Gang `a` of two members, of which two are needed, whose decision is being written.
fn committing() -> (World, Decision) {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come_all("a", 2);
    let (_, decision) = world.commit();
    (world, decision)
}

fn shows(decision: &Decision) -> GangStatus {
    GangStatus {
        name: "a".to_owned(),
        dialect: "Annotation".to_owned(),
        decision: Some(decision.clone()),
        ..GangStatus::default()
    }
}

fn shows_none() -> GangStatus {
    GangStatus {
        name: "a".to_owned(),
        dialect: "Annotation".to_owned(),
        ..GangStatus::default()
    }
}

fn deleted(world: &mut World) -> Vec<String> {
    let deleted = world.take_work().into_iter().filter_map(|work| match work {
        Work::Delete { pods, .. } => Some(pods),
        _ => None,
    });
    deleted.flatten().map(|uid| uid.to_string()).collect()
}

#[test]
fn members_that_come_after_siblings_are_bound_are_not_waited_for() {
    let mut world = World::new();
    world.members("a", 3, 3);
    let wanted = world.next().unwrap();
    let places = ["n0", "n1", "n2"].map(|node| Place {
        follows: node != "n0",
        ..place(node, node)
    });
    let placement = Placement {
        places: places.to_vec(),
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert_eq!(world.phase("a"), GangPhase::Planned, "not before one has come");
    assert_eq!(world.come("a0"), Arrival::Wait);
    let (_, decision) = world.commit();
    assert_eq!(
        decision.slots.len(),
        3,
        "their places are decided with the others'"
    );
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    assert_eq!(world.bind("a0"), "n0");
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(world.bind("a1"), "n1");
    assert_eq!(world.bind("a2"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_restart_that_may_not_be_done_says_so_until_it_is() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &claim);
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    world.gangs.take_statuses();
    let why = "pods may not be deleted; manifests/extender-restart.yaml gives that right";
    world
        .gangs
        .hindered(world.now(), &key("a"), Hindrance::Removal, Some(why.into()));
    let (_, status) = world.gangs.take_statuses().pop().unwrap();
    assert_eq!(
        status.message,
        format!("members of before that are not gone yet: 1; {why}")
    );
    let hindered = |status: &gantry_api::GangStatus| {
        let mut all = status.conditions.iter();
        all.find(|condition| condition.type_ == "Hindered")
            .map(|condition| (condition.status.clone(), condition.message.clone()))
    };
    assert_eq!(hindered(&status), Some(("True".to_owned(), why.to_owned())));
    // It is asked for again and again meanwhile, so that it goes on once it may.
    world.take_work();
    world.pass(60);
    assert!(matches!(&world.take_work()[..], [Work::Delete { .. }, ..]));
    world.gone("a0");
    let (_, status) = world.gangs.take_statuses().pop().unwrap();
    assert_eq!(hindered(&status), None);
}

#[test]
fn after_a_conflict_the_object_tells_whether_the_decision_stands() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(CommitFailure::Conflict));
    assert_eq!(world.arrive("a0", "n0"), Arrival::Wait);
    assert_eq!(world.take_work(), []);
    world.show("a", shows(&decision));
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
}

#[test]
fn a_decision_that_certainly_was_not_written_is_written_again() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(CommitFailure::Conflict));
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision);
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    assert_eq!(world.phase("a"), GangPhase::Binding);
}

#[test]
fn a_decision_that_certainly_was_not_written_is_dropped_when_members_have_withdrawn() {
    let (mut world, decision) = committing();
    world.gangs.withdraw(world.now(), &uid("a0"));
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(CommitFailure::Conflict));
    world.show("a", shows_none());
    assert_eq!(world.take_work(), []);
    assert_eq!(world.phase("a"), GangPhase::Planned);
    world.come("a0");
    assert_ne!(world.commit().1.id, decision.id);
}

#[test]
fn a_decision_that_is_refused_gives_its_places_back_and_is_tried_again_later() {
    let (mut world, decision) = committing();
    world.reserved();
    let why = CommitFailure::Refused("Gang \"a..b\" is invalid".into());
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(why));
    assert_eq!(world.reserved(), [""; 0], "others may have its devices");
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    let said = "gang default/a is tried again soon: its decision cannot be written: Gang \"a..b\" is invalid";
    assert_eq!(world.text("a"), said);
    assert_eq!(world.arrive("a0", "n0"), Arrival::Refuse(said.into()));
    assert_eq!(world.status("a").strikes, 1);
    world.pass(3);
    world.plan();
    world.come_all("a", 2);
    assert_ne!(world.write().id, decision.id);
    assert_eq!(world.phase("a"), GangPhase::Binding);
}

#[test]
fn what_was_said_before_a_late_answer_to_a_write_that_is_over_is_said_again() {
    let (mut world, decision) = committing();
    // The watch is quicker than the answer.
    world.show("a", shows(&decision));
    for uid in ["a0", "a1"] {
        world.bind(uid);
    }
    for uid in ["a0", "a1"] {
        world.gone(uid);
    }
    let last = |world: &mut World| world.gangs.take_statuses().pop();
    let (_, said) = last(&mut world).unwrap();
    assert_eq!((said.phase, said.decision.as_ref()), (GangPhase::Done, None));
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    let again = last(&mut world).map(|(_, status)| status);
    assert_eq!(
        again,
        Some(said),
        "whoever writes drops what is older than the answer"
    );
}

#[test]
fn a_decision_that_may_stand_is_not_given_up_for_a_refusal() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(CommitFailure::Unknown));
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision);
    let why = CommitFailure::Refused("gangs is forbidden".into());
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(why));
    assert_eq!(world.phase("a"), GangPhase::Committing);
    assert_eq!(
        world.text("a"),
        "gang default/a cannot be decided: gangs is forbidden"
    );
    assert_eq!(world.commit().1, decision, "nobody would show it otherwise");
    world.show("a", shows(&decision));
    assert_eq!(
        world.phase("a"),
        GangPhase::Binding,
        "the first write has come through"
    );
}

#[test]
fn a_decision_of_which_nobody_knows_is_written_again_whatever_happens() {
    let (mut world, decision) = committing();
    world.gangs.withdraw(world.now(), &uid("a0"));
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Err(CommitFailure::Unknown));
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision, "the first write may still come");
    world.pass(1000);
    assert_eq!(
        world.phase("a"),
        GangPhase::Committing,
        "its places are not given up"
    );
    world.show("a", shows(&decision));
    assert_eq!(world.phase("a"), GangPhase::Binding, "it has come");
}

#[test]
fn a_decision_of_another_process_is_taken_up_instead() {
    let (mut world, ours) = committing();
    let theirs = Decision {
        id: "theirs".to_owned(),
        slots: ours
            .slots
            .iter()
            .zip(["m0", "m1"])
            .map(|(slot, node)| DecidedSlot {
                node: node.into(),
                ..slot.clone()
            })
            .collect(),
        ..ours.clone()
    };
    world
        .gangs
        .committed(world.now(), &key("a"), &ours.id, Err(CommitFailure::Conflict));
    world.show("a", shows(&theirs));
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(world.gangs.view(&key("a")).unwrap().decision_id(), Some("theirs"));
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)));
    assert!(matches!(world.come("a0"), Arrival::Go(placed) if placed.node.as_str() == "m0"));
}

#[test]
fn no_status_overtakes_the_decision() {
    let (mut world, decision) = committing();
    assert_eq!(world.gangs.take_statuses(), []);
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    assert_eq!(world.status("a").decision, Some(decision));
}

#[test]
fn a_decision_that_is_overwritten_or_deleted_is_written_again() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.status("a");
    assert_eq!(world.gangs.take_statuses(), []);
    world.show("a", shows_none());
    assert_eq!(world.status("a").decision, Some(decision.clone()));
    world.gangs.object_gone(world.now(), "default", "a");
    assert_eq!(world.status("a").decision, Some(decision));
}

#[test]
fn a_place_that_was_written_down_and_is_overwritten_is_written_down_again() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.write_down();
    world.gone("a0");
    let before = world.status("a");
    world.show("a", before.clone());
    world.see(member("a2", claim("a", 2)));
    assert_eq!(world.come("a2"), Arrival::Wait, "it is not written down yet");
    let status = world.status("a");
    // What was said before is shown late: what is said now is on its way.
    world.show("a", before.clone());
    assert_eq!(world.gangs.take_statuses(), []);
    world.show("a", status);
    world.show("a", before);
    assert_eq!(world.come("a2"), Arrival::Wait, "somebody has overwritten it");
    world.write_down();
    assert!(matches!(world.come("a2"), Arrival::Go(_)));
}

#[test]
fn after_the_decision_the_late_pass_at_once_and_nothing_is_taken_back() {
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.gangs.withdraw(world.now(), &uid("a0"));
    world.pass(100_000);
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert!(matches!(world.come("a2"), Arrival::Go(_)));
    assert!(matches!(world.come("a0"), Arrival::Go(_)));
}

#[test]
fn a_binding_that_fails_is_tried_again_at_the_same_place() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.come("a0");
    world.gangs.bind_ended(world.now(), &uid("a0"), BindEnd::Failed);
    assert_eq!(world.node("a0"), "n0");
    assert!(matches!(world.come("a0"), Arrival::Go(_)));
    world.gangs.bind_ended(world.now(), &uid("a0"), BindEnd::Unsure);
    assert_eq!(
        world.answer_within("a1", &["n0"]),
        Answer::Wait("gang default/a: node n1, where it is to go, is not offered".into()),
        "the place of a binding that may exist is nobody else's"
    );
    world.see(bound(member("a0", claim("a", 2)), "n0"));
    assert_eq!(world.reserved(), ["a-g1"]);
}

#[test]
fn a_member_bound_elsewhere_past_us_gives_its_place_back() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.see(bound(member("a0", claim("a", 2)), "n9"));
    assert_eq!(world.reserved(), ["a-g1"]);
    world.bind("a1");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn hold_keeps_the_place_of_a_lost_member_for_its_replacement() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(leaving(bound(member("a0", claim("a", 2)), "n0")));
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    assert_eq!(world.reserved(), ["a-g0"], "from the moment it begins to go");
    world.see(member("a2", claim("a", 2)));
    assert!(
        matches!(world.answer("a2"), Answer::Wait(_)),
        "the pod before still holds the devices"
    );
    world.gone("a0");
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.bind("a2"), "n0", "without a barrier");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

fn gated(mut member: Member) -> Member {
    member.stage = Stage::Gated { by_us_alone: true };
    member.refused = false;
    member
}

#[test]
fn the_gate_of_a_replacement_goes_though_others_of_the_decided_gang_are_missing() {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    // Whether those that are gone had ended well is not known: nobody may ever come in their place.
    world.gone("a0");
    world.gone("a1");
    world.take_work();
    world.see(gated(member("a3", claim("a", 3))));
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a3")])]);
    world.see(member("a3", claim("a", 3)));
    assert_eq!(world.bind("a3"), "n0");
}

#[test]
fn the_gate_of_a_replacement_for_which_no_place_is_kept_goes_once_it_has_one() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 3), Repair::Ignore);
    world.bound_gang_of("a", 3, &claim);
    world.gone("a0");
    world.gone("a1");
    world.take_work();
    world.see(gated(member("a3", claim)));
    assert_eq!(world.take_work(), [], "it could not go anywhere");
    world.plan_from(7);
    assert_eq!(world.take_work(), [Work::Ungate(vec![uid("a3")])]);
}

#[test]
fn a_member_that_is_deleted_and_ends_well_for_it_has_not_completed() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let going = leaving(bound(member("a0", claim("a", 2)), "n0"));
    world.see(going.clone());
    for _ in 0..2 {
        world.see(Member {
            stage: Stage::Succeeded,
            ..going.clone()
        });
        assert_eq!(world.phase("a"), GangPhase::Repairing);
        assert_eq!(world.reserved(), ["a-g0"]);
    }
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    // One that had completed before it is cleared away stays so.
    let mut completed = bound(member("a1", claim("a", 2)), "n1");
    completed.stage = Stage::Succeeded;
    world.see(completed.clone());
    world.see(leaving(completed));
    assert_eq!(world.reserved(), ["a-g0"]);
}

#[test]
fn the_place_of_a_member_that_is_stopped_for_another_pod_is_not_kept_from_that() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(Member {
        preempted: true,
        ..leaving(bound(member("a0", claim("a", 2)), "n0"))
    });
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    assert!(world.reserved().is_empty());
    world.gone("a0");
    world.see(member("a2", claim("a", 2)));
    assert!(world.reserved().is_empty(), "it has to be planned like any other");
}

#[test]
fn gangs_of_which_nothing_is_left_are_planned_as_a_whole_again() {
    let mut world = World::new();
    for gang in ["a", "b"] {
        world.bound_gang(gang, 2, 2);
        for (pod, node) in [(format!("{gang}0"), "n0"), (format!("{gang}1"), "n1")] {
            world.see(Member {
                preempted: true,
                ..leaving(bound(member(&pod, claim(gang, 2)), node))
            });
            world.gone(&pod);
        }
    }
    world.take_work();
    world.see(member("a2", claim("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Collecting);
    assert_eq!(
        world.status("a").decision,
        None,
        "what it said is nobody's any more"
    );
    world.see(member("a3", claim("a", 2)));
    world.see(member("b2", claim("b", 2)));
    world.see(member("b3", claim("b", 2)));
    world.pass(10);
    let wanted = world.plan();
    assert_eq!(
        (&*wanted.gang.name, wanted.must, wanted.members.len()),
        ("a", 2, 2)
    );
    // There is room for one of the two.
    assert_eq!(world.refuse("no room").must, 2);
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
        world.see(member(pod, with_rank(claim("a", 2), rank)));
    }
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.bind("a1");
    world.gone("a0");
    world.see(member("a2", with_rank(claim("a", 2), 7)));
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
    world.see(member("a3", with_rank(claim("a", 2), 0)));
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
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    assert_eq!(world.text("a"), "gang default/a lacks 1 of 2 members");
    world.see(member("a2", claim("a", 2)));
    world.plan_from(5);
    assert_eq!(
        world.bind("a2"),
        "n5",
        "a replacement that comes late is planned by itself"
    );
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_failed_member_is_a_lost_one_and_a_completed_one_is_not() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    let mut completed = bound(member("a0", claim("a", 2)), "n0");
    completed.stage = Stage::Succeeded;
    world.see(completed);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.gone("a0");
    assert_eq!(
        world.phase("a"),
        GangPhase::Bound,
        "it has done its part, though its pod is gone"
    );
    let mut failed = bound(member("a1", claim("a", 2)), "n1");
    failed.stage = Stage::Failed;
    world.see(failed);
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    assert_eq!(world.reserved(), ["a-g1"]);
}

fn mpi_job() -> OwnerRef {
    OwnerRef {
        kind: OwnerKind::MpiJob,
        namespace: "default".into(),
        name: "a".into(),
        part: "".into(),
    }
}

/// What a member of gang `a` says, which belongs to an MPIJob of three pods.
fn of_mpi_job() -> Claim {
    Claim {
        owner: Some(mpi_job()),
        ..claim("a", 3)
    }
}

/// The MPIJob says that it is over, or not.
fn mpi_job_says(world: &mut World, over: bool) {
    let facts = OwnerFacts {
        min: Some(3),
        total: Some(3),
        over,
        ..OwnerFacts::default()
    };
    let now = world.now();
    world.gangs.owner_seen(now, &mpi_job(), Some(Arc::new(facts)));
}

/// Gang `a` of three members that an MPIJob has made, all bound, of which the first has ended well; its pod is still there.
fn one_has_ended(claim: &Claim) -> World {
    let mut world = World::new();
    mpi_job_says(&mut world, false);
    for number in 0..3 {
        world.see(member(&format!("a{number}"), claim.clone()));
    }
    mpi_job_says(&mut world, false);
    world.bound_gang_of("a", 3, claim);
    let mut completed = bound(member("a0", claim.clone()), "n0");
    completed.stage = Stage::Succeeded;
    world.see(completed);
    world
}

#[test]
fn no_place_is_kept_for_members_whose_job_is_over() {
    for repair in [Repair::Hold, Repair::Restart, Repair::Ignore] {
        let claim = with_repair(of_mpi_job(), repair);
        let mut world = one_has_ended(&claim);
        mpi_job_says(&mut world, true);
        world.gone("a1");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(deleted(&mut world), Vec::<String>::new(), "{repair:?}");
        assert_eq!(world.phase("a"), GangPhase::Bound, "{repair:?}");
        assert_eq!(world.text("a"), "gang default/a runs with 2 of 3 members");
        world.see(leaving(bound(member("a2", claim.clone()), "n2")));
        world.gone("a2");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(world.phase("a"), GangPhase::Done, "{repair:?}");
    }
}

#[test]
fn places_are_given_up_when_a_job_says_only_after_its_pods_are_gone_that_it_is_over() {
    let mut world = one_has_ended(&of_mpi_job());
    world.gone("a1");
    world.gone("a2");
    assert_eq!(world.reserved(), ["a-g1", "a-g2"]);
    mpi_job_says(&mut world, true);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Done);
}

#[test]
fn a_job_that_is_gone_makes_no_replacements() {
    let mut world = one_has_ended(&of_mpi_job());
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
    world.gangs.owner_seen(world.now(), &mpi_job(), None);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(
        world.status("a").message,
        "lost members are not replaced (MPIJob a has ended or is gone)"
    );
}

#[test]
fn a_job_that_goes_on_after_all_has_places_kept_again() {
    let mut world = one_has_ended(&of_mpi_job());
    world.gangs.owner_seen(world.now(), &mpi_job(), None);
    mpi_job_says(&mut world, false);
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
    assert_eq!(world.phase("a"), GangPhase::Repairing);
}

#[test]
fn no_place_is_kept_while_a_job_is_suspended_and_it_goes_on_as_a_whole() {
    for repair in [Repair::Hold, Repair::Restart] {
        let claim = with_repair(of_mpi_job(), repair);
        let mut world = one_has_ended(&claim);
        let suspended = OwnerFacts {
            min: Some(3),
            total: Some(3),
            suspended: true,
            ..OwnerFacts::default()
        };
        let now = world.now();
        world.gangs.owner_seen(now, &mpi_job(), Some(Arc::new(suspended)));
        world.gone("a1");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(deleted(&mut world), Vec::<String>::new(), "{repair:?}");
        assert_eq!(
            world.status("a").message,
            "lost members are not replaced (MPIJob a is suspended)"
        );
        world.gone("a2");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        mpi_job_says(&mut world, false);
        for pod in ["a3", "a4"] {
            world.see(member(pod, claim.clone()));
        }
        world.pass(10);
        let wanted = world.plan();
        assert_eq!((wanted.must, wanted.members.len()), (2, 2), "{repair:?}");
    }
}

#[test]
fn an_owner_that_could_never_be_read_is_not_taken_for_over() {
    let mut world = World::new();
    let claim = of_mpi_job();
    world.see(member("a0", claim.clone()));
    world.gangs.owner_seen(world.now(), &mpi_job(), None);
    world.bound_gang_of("a", 3, &claim);
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
}

#[test]
fn members_beyond_the_minimum_that_go_are_no_loss() {
    let mut world = World::new();
    world.bound_gang_of("a", 3, &with_repair(claim("a", 2), Repair::Restart));
    world.gone("a2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn ignore_gives_the_place_up() {
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(claim("a", 2), Repair::Ignore));
    world.gone("a0");
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.text("a"), "gang default/a runs with 1 of 2 members");
}

#[test]
fn restart_deletes_all_and_the_new_ones_do_not_mix_with_the_old() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &claim);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    world.see(member("a2", claim.clone()));
    assert_eq!(world.text("a"), "gang default/a is being started anew");
    world.see(leaving(bound(member("a1", claim.clone()), "n1")));
    world.pass(5);
    assert_eq!(world.next(), None);
    world.gone("a1");
    assert_eq!(
        world.phase("a"),
        GangPhase::Collecting,
        "the old one does not count"
    );
    assert_eq!(world.status("a").decision, None);
    world.see(member("a3", claim));
    let wanted = world.plan();
    assert_eq!(wanted.must, 2);
    world.come("a2");
    world.come("a3");
    world.write();
    assert_eq!(world.bind("a2"), "n0");
}

#[test]
fn what_has_ended_well_counts_after_a_restart_too() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 3), Repair::Restart);
    world.bound_gang_of("a", 3, &claim);
    let mut done = bound(member("a0", claim.clone()), "n0");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.gone("a1");
    assert_eq!(deleted(&mut world), ["a2"]);
    world.gone("a2");
    for uid in ["a3", "a4"] {
        world.see(member(uid, claim.clone()));
    }
    assert_eq!(
        world.plan().must,
        2,
        "the third has done its part, and nobody makes it anew"
    );
    for uid in ["a3", "a4"] {
        world.come(uid);
    }
    world.write();
    assert_eq!(world.bind("a3"), "n0");
}

#[test]
fn what_had_ended_well_counts_also_if_that_is_known_only_after_the_restart_began() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &claim);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"], "it has ended, and the watch is late");
    let mut done = bound(member("a1", claim.clone()), "n1");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.see(member("a2", claim.clone()));
    assert_eq!(world.plan().must, 1, "nobody makes the other anew");
    world.come("a2");
    world.write();
    assert_eq!(world.bind("a2"), "n0");
}

#[test]
fn what_ends_well_because_it_was_asked_to_go_is_started_anew() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &claim);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    let mut done = leaving(bound(member("a1", claim.clone()), "n1"));
    done.stage = Stage::Succeeded;
    world.see(done);
    world.see(member("a2", claim));
    assert_eq!(world.text("a"), "gang default/a: 1 of 2 members exist");
}

#[test]
fn what_ended_well_and_is_removed_after_a_restart_is_made_anew() {
    let mut world = World::new();
    let claim = with_repair(claim("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &claim);
    let mut done = bound(member("a0", claim.clone()), "n0");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.gone("a1");
    world.see(member("a2", claim.clone()));
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Collecting);
    assert_eq!(world.text("a"), "gang default/a: 1 of 2 members exist");
}

#[test]
fn a_restart_says_again_what_was_not_done() {
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(claim("a", 2), Repair::Restart));
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    world.pass(29);
    assert_eq!(deleted(&mut world), Vec::<String>::new());
    world.pass(1);
    assert_eq!(deleted(&mut world), ["a1"]);
}

#[test]
fn a_member_lost_between_decision_and_binding_is_repaired_too() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.bind("a0");
    world.come("a1");
    world.gangs.bind_ended(world.now(), &uid("a1"), BindEnd::Gone);
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Repairing);
    assert_eq!(world.reserved(), ["a-g1"]);
    world.see(member("a2", claim("a", 2)));
    assert_eq!(world.bind("a2"), "n1");
}

#[test]
fn a_node_lost_after_the_decision_means_new_places_for_those_not_bound_there() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.bind("a0");
    world.gangs.unfit(world.now(), &"n0".into(), "gone");
    world.gangs.unfit(world.now(), &"n1".into(), "gone");
    assert_eq!(world.reserved(), Vec::<String>::new());
    let wanted = world.plan_from(4);
    assert_eq!((wanted.must, wanted.members.len()), (0, 1));
    let placed: Vec<&str> = wanted
        .placed
        .iter()
        .map(|sibling| sibling.node.as_str())
        .collect();
    assert_eq!(placed, ["n0"]);
    assert_eq!(world.bind("a1"), "n4");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_node_lost_while_the_decision_is_written_is_left_out_after_it() {
    let (mut world, decision) = committing();
    world.gangs.unfit(world.now(), &"n1".into(), "gone");
    assert_eq!(world.phase("a"), GangPhase::Committing);
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
    assert!(matches!(world.arrive("a1", "n1"), Arrival::Refuse(_)));
    world.plan_from(4);
    assert_eq!(world.node("a1"), "n4");
}

#[test]
fn a_place_that_is_not_offered_after_the_decision_is_planned_anew_by_itself() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    world.bind("a0");
    for _ in 0..3 {
        world.answer_within("a1", &["n7"]);
    }
    let wanted = world.plan_from(7);
    assert_eq!((wanted.must, wanted.without), (0, vec!["n1".into()]));
    assert_eq!(world.bind("a1"), "n7");
}

#[test]
fn a_bound_gang_grows_when_there_is_room_and_goes_after_those_that_have_nothing() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(member("a2", claim("a", 2)));
    world.members("b", 1, 1);
    assert_eq!(&*world.refuse("no room").gang.name, "b");
    let wanted = world.next().unwrap();
    assert_eq!((&*wanted.gang.name, wanted.must), ("a", 0));
    world
        .gangs
        .placed(world.now(), &wanted.gang, Err(refused("no room")));
    assert_eq!(
        world.waits("a2"),
        "gang default/a is bound; waits for room for more members: no room"
    );
    world.room += 1;
    world.refuse("no room");
    world.plan_from(2);
    assert_eq!(world.bind("a2"), "n2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_member_beyond_the_minimum_that_does_not_come_gives_its_place_back() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(member("a2", claim("a", 2)));
    world.plan_from(2);
    world.pass(60);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn nobody_is_stopped_for_members_beyond_the_minimum() {
    let mut world = World::new();
    world.bound_gang("a", 1, 1);
    world.see(member("a1", claim("a", 1)));
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n1", "g1")],
        victims: vec![uid("other")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn a_minimum_that_changes_once_it_is_decided_changes_nothing_but_a_condition() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    for pod in ["a0", "a1"] {
        world.see(bound(member(pod, claim("a", 5)), "n0"));
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    let status = world.status("a");
    assert_eq!(status.min, 2);
    assert_eq!(
        (&*status.conditions[0].status, &*status.conditions[0].reason),
        ("False", "MinimumChanged")
    );
}

#[test]
fn a_gang_that_is_over_is_forgotten_and_pods_that_come_again_begin_anew() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.status("a");
    world.gone("a0");
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Done);
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.see(member("a2", claim("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Collecting);
    world.gone("a2");
    world.pass(10);
    assert_eq!(world.take_work(), [forget("a")]);
    world.gangs.assert_empty();
}

#[test]
fn an_object_that_a_person_wrote_is_not_forgotten() {
    let mut world = World::new();
    let object = crate::protocol::Object {
        ours: false,
        ..world.object(GangStatus::default())
    };
    world.gangs.object_seen(world.now(), "default", "a", object);
    world.bound_gang("a", 1, 1);
    world.status("a");
    world.gone("a0");
    let status = world.status("a");
    assert_eq!((status.phase, status.decision), (GangPhase::Done, None));
    world.pass(60);
    assert_eq!(world.take_work(), []);
}

#[test]
fn a_member_bound_by_an_old_binding_has_what_that_gave_it() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    let node = world.node("a0");
    let mut seen = bound(member("a0", claim("a", 2)), &node);
    seen.holds = vec![("nvidia.com/gpu".into(), vec!["before".into()])];
    world.see(seen);
    let slots = world.status("a").decision.unwrap().slots;
    let own = slots.iter().find(|slot| slot.pod == Some(uid("a0"))).unwrap();
    assert_eq!(own.devices[0].ids, ["before".into()]);
}

#[test]
fn a_place_whose_device_is_lost_costs_no_other_its_place() {
    let (mut world, decision) = committing();
    world
        .gangs
        .committed(world.now(), &key("a"), &decision.id, Ok(()));
    // A Binding of a0 may be under way: its place stays whatever becomes of it.
    world.come("a0");
    world.take_changes();
    let slots: Vec<u32> = world.changes.iter().map(|change| change.slot).collect();
    world
        .gangs
        .unfit_slots(world.now(), &key("a"), &[slots[0]].into());
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
    // Nobody is on the way to the other one.
    world
        .gangs
        .unfit_slots(world.now(), &key("a"), &[slots[1]].into());
    assert_eq!(world.reserved(), ["a-g0"]);
}
