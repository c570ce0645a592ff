//! Gangs that their owner creates again as a whole: their devices stay reserved from one incarnation to the next.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GangPhase, GangStatus, Reason};

use super::world::{World, bound, leaving, member, membership, released, with_rank, with_repair};
use crate::key::{GangKey, Integration};
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef, Ranks, Size};
use crate::protocol::{Answer, Arrival, BindEnd, GangEvent, Member, Settings, ShapeId, Stage};
use crate::terms::Repair;

const UID: &str = "0f1e";

fn owner(kind: OwnerKind) -> OwnerRef {
    OwnerRef { kind, namespace: "default".into(), name: "a".into(), part: "".into() }
}

/// What a pod of JobSet `a` says in an attempt.
fn attempt(number: u32) -> Membership {
    Membership {
        key: GangKey {
            integration: Integration::JobSet,
            incarnation: format!("{UID}/{number}").into(),
            ..membership("a", 2).key
        },
        owner: Some(owner(OwnerKind::JobSet)),
        size: Size::Undeclared,
        size_source: "",
        ..membership("a", 2)
    }
}

/// What a pod of a PyTorchJob says, however often it is created.
fn training() -> Membership {
    Membership {
        key: GangKey {
            integration: Integration::Kubeflow,
            incarnation: UID.into(),
            ..membership("a", 2).key
        },
        owner: Some(owner(OwnerKind::PyTorchJob)),
        ..attempt(0)
    }
}

/// What a pod of group 1 of a LeaderWorkerSet says, of a revision of the template.
fn group(revision: &str) -> Membership {
    let key = membership("a-1", 2).key;
    Membership {
        key: GangKey { integration: Integration::LeaderWorkerSet, incarnation: revision.into(), ..key },
        owner: Some(owner(OwnerKind::LeaderWorkerSet)),
        size: Size::Stated { min: 2, total: Some(2) },
        ..attempt(0)
    }
}

fn wants(count: u32) -> OwnerFacts {
    OwnerFacts {
        min: Some(count),
        total: Some(count),
        wanted: Some(count),
        uid: UID.into(),
        source: "spec.replicatedJobs".into(),
        ..OwnerFacts::default()
    }
}

fn says(world: &mut World, kind: OwnerKind, facts: Option<OwnerFacts>) {
    world.handle(GangEvent::OwnerSeen { owner: &owner(kind), facts: facts.map(Arc::new) });
}

/// Two members `<name>0` and `<name>1` are created.
fn create(world: &mut World, name: &str, membership: &Membership) {
    for number in 0..2 {
        world.see(member(&format!("{name}{number}"), with_rank(membership.clone(), number)));
    }
}

fn bind_all(world: &mut World, name: &str) -> [String; 2] {
    for number in 0..2 {
        assert_eq!(world.come(&format!("{name}{number}")), Arrival::Wait);
    }
    let (gang, decision) = world.commit();
    world.handle(GangEvent::Committed { gang: &gang, decision: &decision.id, result: Ok(()) });
    [0, 1].map(|number| world.bind(&format!("{name}{number}")))
}

/// A running gang of two members with an owner of some kind.
fn running(kind: OwnerKind, membership: &Membership) -> World {
    let mut world = World::new();
    create(&mut world, "x", membership);
    says(&mut world, kind, Some(wants(2)));
    world.plan();
    assert_eq!(bind_all(&mut world, "x"), ["n0", "n1"]);
    world.take_work();
    world
}

/// All pods of it go.
fn end(world: &mut World, name: &str) {
    for number in 0..2 {
        world.gone(&format!("{name}{number}"));
    }
}

fn phase(world: &World, membership: &Membership) -> Option<GangPhase> {
    world.gangs.view(&membership.key).map(|view| view.phase())
}

/// The last statuses, by gang.
fn statuses(world: &mut World) -> Vec<(GangKey, GangStatus)> {
    let statuses = world.gangs.take_statuses().into_iter();
    statuses.map(|(key, status)| (GangKey::clone(&key), status)).collect()
}

fn status_of(world: &mut World, membership: &Membership) -> GangStatus {
    let found = statuses(world).into_iter().find(|(key, _)| *key == membership.key);
    found.expect("a status").1
}

#[test]
fn restarted_job_set_gets_the_devices_that_it_had() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    end(&mut world, "x");
    assert_eq!(world.reserved(), ["a-g0", "a-g1"], "no single pod takes them");
    let kept = status_of(&mut world, &attempt(0));
    assert_eq!((kept.phase, kept.reason), (GangPhase::Degraded, Some(Reason::OwnerRestarts)));
    assert_eq!(
        kept.message,
        "2 reservations are kept while JobSet a creates the members again; reserved until 00:18 UTC; 0 members exist"
    );
    let condition = kept.conditions.iter().find(|condition| condition.type_ == "ReservationKept").unwrap();
    assert_eq!((&*condition.status, &*condition.reason), ("True", "OwnerRestarts"));
    let until = world.gangs.reserved_until(&attempt(0).key, world.now());
    assert_eq!(
        until,
        kept.continuation.unwrap().until.map(|until| until.0.as_second()),
        "others state it too"
    );
    world.pass(20);
    create(&mut world, "y", &attempt(1));
    assert_eq!(phase(&world, &attempt(1)), Some(GangPhase::Reserved));
    assert_eq!(world.next(), None, "it is not planned again");
    assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"], "each rank where it was");
    assert_eq!(phase(&world, &attempt(1)), Some(GangPhase::Bound));
    assert!(world.reserved().is_empty());
    world.pass(60);
    assert_eq!(phase(&world, &attempt(0)), None);
}

#[test]
fn training_job_created_again_keeps_its_devices() {
    let mut world = running(OwnerKind::PyTorchJob, &training());
    end(&mut world, "x");
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
    // Half of it gets nothing, as when it came first.
    world.see(member("y0", with_rank(training(), 0)));
    assert_eq!(world.waits("y0"), Reason::OwnerRestarts);
    world.see(member("y1", with_rank(training(), 1)));
    assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"]);
    assert_eq!(phase(&world, &training()), Some(GangPhase::Bound));
}

#[test]
fn next_revision_of_a_group_takes_over_from_the_one_before() {
    // The new leader exists before the last pod of the old revision is gone.
    let mut world = running(OwnerKind::LeaderWorkerSet, &group("r1"));
    world.see(leaving(bound(member("x1", with_rank(group("r1"), 1)), "n1")));
    world.gone("x0");
    world.see(member("y0", with_rank(group("r2"), 0)));
    world.see(member("y1", with_rank(group("r2"), 1)));
    assert_eq!(world.reserved(), ["a-1-g0", "a-1-g1"]);
    world.refuse();
    world.gone("x1");
    assert_eq!(phase(&world, &group("r2")), Some(GangPhase::Reserved));
    assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"]);
}

#[test]
fn devices_are_kept_two_minutes_after_the_last_pod() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    for (uid, node) in [("x0", "n0"), ("x1", "n1")] {
        let rank = u32::from(uid == "x1");
        world.see(leaving(bound(member(uid, with_rank(attempt(0), rank)), node)));
    }
    world.pass(500);
    assert_eq!(status_of(&mut world, &attempt(0)).continuation.unwrap().until, None);
    // One says something of itself meanwhile.
    world.see(Member { refused: false, ..leaving(bound(member("x0", with_rank(attempt(0), 0)), "n0")) });
    end(&mut world, "x");
    world.pass(119);
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
    world.pass(1);
    assert!(world.reserved().is_empty());
    assert_eq!(world.gangs.continuations().0.expired, 1);
    create(&mut world, "y", &attempt(1));
    assert_eq!(world.plan().members.len(), 2, "late members are planned like any others");
}

#[test]
fn owner_that_creates_no_members_ends_the_reservation() {
    let over = OwnerFacts { over: true, ..wants(2) };
    let suspended = OwnerFacts { suspended: true, ..wants(2) };
    let nothing = OwnerFacts { wanted: Some(0), ..wants(2) };
    let another = OwnerFacts { uid: "another".into(), ..wants(2) };
    for facts in [Some(over), Some(suspended), Some(nothing), Some(another), None] {
        for before in [false, true] {
            let mut world = running(OwnerKind::JobSet, &attempt(0));
            if before && facts.as_ref().is_none_or(|facts| &*facts.uid == UID) {
                says(&mut world, OwnerKind::JobSet, facts.clone());
            }
            end(&mut world, "x");
            says(&mut world, OwnerKind::JobSet, facts.clone());
            assert!(world.reserved().is_empty(), "{facts:?}");
        }
    }
}

#[test]
fn group_that_the_set_does_not_want_is_not_waited_for() {
    let mut world = running(OwnerKind::LeaderWorkerSet, &group("r1"));
    end(&mut world, "x");
    says(&mut world, OwnerKind::LeaderWorkerSet, Some(OwnerFacts { groups: Some(2), ..wants(2) }));
    assert_eq!(world.reserved().len(), 2);
    says(&mut world, OwnerKind::LeaderWorkerSet, Some(OwnerFacts { groups: Some(1), ..wants(2) }));
    assert!(world.reserved().is_empty());
}

#[test]
fn smaller_job_keeps_as_many_reservations_as_it_wants() {
    let mut world = running(OwnerKind::PyTorchJob, &training());
    end(&mut world, "x");
    says(&mut world, OwnerKind::PyTorchJob, Some(wants(1)));
    assert_eq!(world.reserved(), ["a-g0"]);
    world.see(member("y0", with_rank(training(), 0)));
    world.pass(2);
    assert_eq!(phase(&world, &training()), Some(GangPhase::Reserved));
}

#[test]
fn hold_of_zero_or_an_ignored_loss_keeps_nothing() {
    let none = |mut membership: Membership| {
        membership.options.restart_hold = Some(Duration::ZERO);
        membership
    };
    for membership in [none(attempt(0)), with_repair(attempt(0), Repair::Ignore)] {
        let mut world = running(OwnerKind::JobSet, &membership);
        end(&mut world, "x");
        assert!(world.reserved().is_empty());
    }
}

#[test]
fn job_set_in_a_crash_loop_keeps_devices_half_of_the_time() {
    // It runs for a moment, and its members come late each time.
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    let mut idle = 0;
    let mut name = "x".to_owned();
    for number in 1..40 {
        end(&mut world, &name);
        for _ in 0..110 {
            idle += u32::from(!world.reserved().is_empty());
            world.pass(1);
        }
        name = format!("y{number}-");
        create(&mut world, &name, &attempt(number));
        says(&mut world, OwnerKind::JobSet, Some(wants(2)));
        if world.reserved().is_empty() {
            world.plan();
        }
        bind_all(&mut world, &name);
        world.take_work();
    }
    let (counts, _) = world.gangs.continuations();
    assert!(counts.continued > 5 && counts.expired > 5, "{counts:?}");
    assert!(idle <= 1200 + 110 + 39 * 110 / 2, "{idle} s of {} s", 39 * 110);
}

#[test]
fn changed_template_takes_over_if_it_asks_for_the_same_devices() {
    for (asks, taken) in [(1, true), (2, false)] {
        let mut world = running(OwnerKind::LeaderWorkerSet, &group("r1"));
        end(&mut world, "x");
        for number in 0..2 {
            let pod = member(&format!("y{number}"), with_rank(group("r2"), number));
            let asks = [("nvidia.com/gpu".into(), asks)].into();
            world.see(Member { shape: Some(ShapeId(7)), asks, ..pod });
        }
        assert_eq!(!world.reserved().is_empty(), taken);
        match taken {
            true => assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"]),
            false => assert_eq!(world.plan().members.len(), 2),
        }
    }
}

#[test]
fn next_process_keeps_the_reservation() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    end(&mut world, "x");
    let kept = status_of(&mut world, &attempt(0));
    assert!(kept.decision.as_ref().unwrap().reservations.iter().all(|slot| slot.pod.is_none()));
    let object = world.object(kept.clone());
    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    next.start = world.start;
    next.passed = world.passed + Duration::from_secs(30);
    let name = attempt(0).key.object_name();
    next.handle(GangEvent::ObjectSeen { namespace: "default", name: &name, object: Box::new(object) });
    next.handle(GangEvent::Synced);
    assert_eq!(next.reserved(), ["a-g0", "a-g1"]);
    assert_eq!(next.gangs.watched_owners().len(), 1, "it follows the owner");
    let shown = status_of(&mut next, &attempt(0)).continuation.unwrap();
    assert_eq!(shown.until, kept.continuation.as_ref().unwrap().until);
    says(&mut next, OwnerKind::JobSet, Some(wants(2)));
    create(&mut next, "y", &attempt(1));
    assert_eq!(bind_all(&mut next, "y"), ["n0", "n1"]);
    // Nor does it keep them for longer.
    let mut late = World::with(Settings { identity: "third".into(), ..Settings::default() });
    late.start = world.start;
    late.passed = world.passed + Duration::from_secs(130);
    let object = late.object(kept);
    late.handle(GangEvent::ObjectSeen { namespace: "default", name: &name, object: Box::new(object) });
    late.handle(GangEvent::Synced);
    assert!(late.reserved().is_empty());
    late.pass(200);
    late.gangs.assert_empty_but_objects();
}

#[test]
fn next_process_continues_while_members_arrive() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    end(&mut world, "x");
    create(&mut world, "y", &attempt(1));
    let reserved = status_of(&mut world, &attempt(1));
    assert_eq!(reserved.phase, GangPhase::Reserved);
    let mut next = World::with(Settings { identity: "second".into(), ..Settings::default() });
    create(&mut next, "y", &attempt(1));
    says(&mut next, OwnerKind::JobSet, Some(wants(2)));
    let object = next.object(reserved);
    let name = attempt(1).key.object_name();
    next.handle(GangEvent::ObjectSeen { namespace: "default", name: &name, object: Box::new(object) });
    next.handle(GangEvent::Synced);
    assert_eq!(next.reserved(), ["a-g0", "a-g1"]);
    next.pass(2);
    assert_eq!(bind_all(&mut next, "y"), ["n0", "n1"]);
}

#[test]
fn gang_of_higher_priority_takes_what_is_kept() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    end(&mut world, "x");
    let view = world.gangs.view(&attempt(0).key).unwrap();
    assert_eq!(view.priority(), 0);
    let slots = view.orphaned().map(|slot| slot.slot).collect();
    let to = "gang ns/b".into();
    let event = GangEvent::ReleaseOrphaned { gang: &attempt(0).key, slots: &slots, to: &to };
    assert_eq!(released(world.handle(event)), 2);
    assert!(world.reserved().is_empty());
    assert_eq!(world.gangs.continuations().0.lost, 1);
}

#[test]
fn evicted_gang_keeps_nothing() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    for (rank, uid) in [(0, "x0"), (1, "x1")] {
        let pod = bound(member(uid, with_rank(attempt(0), rank)), &format!("n{rank}"));
        world.see(Member { preempted: true, ..leaving(pod) });
    }
    end(&mut world, "x");
    assert!(world.reserved().is_empty());
}

#[test]
fn lost_node_makes_the_next_incarnation_planned_as_a_whole() {
    let mut world = running(OwnerKind::JobSet, &attempt(0));
    end(&mut world, "x");
    world.handle(GangEvent::NodeLost { node: &"n1".into() });
    assert_eq!(world.reserved(), ["a-g0"]);
    create(&mut world, "y", &attempt(1));
    assert!(world.reserved().is_empty());
    assert_eq!(world.plan().members.len(), 2);
}

#[test]
fn index_that_failed_for_good_holds_nothing() {
    // A Job with `backoffLimitPerIndex` creates no pod for it, and the rest runs on.
    let job = Membership { creator: Some(owner(OwnerKind::Job)), ..membership("a", 2) };
    let mut world = World::new();
    create(&mut world, "x", &job);
    world.plan();
    bind_all(&mut world, "x");
    says(&mut world, OwnerKind::Job, Some(wants(2)));
    let failed = Member { stage: Stage::Failed, ..member("x1", with_rank(job, 1)) };
    world.see(failed);
    assert_eq!(world.reserved(), ["a-g1"], "a replacement may come");
    let facts = OwnerFacts { failed_ranks: Ranks::read("1"), ..wants(2) };
    says(&mut world, OwnerKind::Job, Some(facts));
    assert!(world.reserved().is_empty());
}

#[test]
fn fewer_wanted_members_end_a_hold_under_a_stale_group() {
    let job = Membership { creator: Some(owner(OwnerKind::RayCluster)), ..membership("a", 2) };
    let mut world = World::new();
    create(&mut world, "x", &job);
    world.plan();
    bind_all(&mut world, "x");
    says(&mut world, OwnerKind::RayCluster, Some(wants(2)));
    world.gone("x1");
    assert_eq!(world.reserved(), ["a-g1"]);
    says(&mut world, OwnerKind::RayCluster, Some(OwnerFacts { wanted: Some(1), ..wants(2) }));
    assert!(world.reserved().is_empty());
}

#[test]
fn member_that_is_bound_while_others_are_kept_ends_well() {
    // The pod of the incarnation before reports its end late: it must not get its slot back.
    let mut world = running(OwnerKind::PyTorchJob, &training());
    world.see(leaving(bound(member("x0", with_rank(training(), 0)), "n0")));
    world.see(leaving(bound(member("x1", with_rank(training(), 1)), "n1")));
    create(&mut world, "y", &training());
    assert!(matches!(world.answer("y0"), Answer::Wait(_)));
    world.see(Member { stage: Stage::Failed, ..leaving(member("x0", with_rank(training(), 0))) });
    world.gone("x1");
    assert_eq!(world.node("y0"), "n0");
    assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"]);
    world.gone("x0");
    world.handle(GangEvent::BindEnded { pod: &"x0".into(), outcome: BindEnd::Gone });
    assert_eq!(phase(&world, &training()), Some(GangPhase::Bound));
}

#[test]
fn gang_that_is_restarted_as_a_whole_keeps_its_devices() {
    // Its repair policy deletes the rest once a member is lost.
    let membership = with_repair(training(), Repair::Restart);
    let mut world = running(OwnerKind::PyTorchJob, &membership);
    world.gone("x1");
    world.pass(2);
    assert_eq!(phase(&world, &membership), Some(GangPhase::Degraded));
    assert_eq!(world.reserved(), ["a-g1"], "the other has a pod that holds it");
    world.see(member("y1", with_rank(membership.clone(), 1)));
    assert_eq!(world.waits("y1"), Reason::Restarting);
    world.gone("x0");
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);
    world.see(member("y0", with_rank(membership.clone(), 0)));
    assert_eq!(bind_all(&mut world, "y"), ["n0", "n1"]);
    assert_eq!(phase(&world, &membership), Some(GangPhase::Bound));
}
