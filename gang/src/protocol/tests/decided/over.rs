//! Jobs that are over, suspended or gone: no place is kept for members that nobody makes anew; and a gang that is over is forgotten.

use std::sync::Arc;

use gantry_api::{GangPhase, GangStatus, Reason};

use super::super::world::{World, bound, forget, leaving, member, membership, with_repair};
use super::deleted;
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef};
use crate::protocol::GangEvent;
use crate::protocol::Stage;
use crate::terms::Repair;

fn mpi_job() -> OwnerRef {
    OwnerRef { kind: OwnerKind::MpiJob, namespace: "default".into(), name: "a".into(), part: "".into() }
}

/// What a member of gang `a` says, which belongs to an MPIJob of three pods.
fn of_mpi_job() -> Membership {
    Membership { owner: Some(mpi_job()), ..membership("a", 3) }
}

/// The MPIJob says that it is over, or not.
fn mpi_job_says(world: &mut World, over: bool) {
    let facts = OwnerFacts { min: Some(3), total: Some(3), over, ..OwnerFacts::default() };
    world.handle(GangEvent::OwnerSeen { owner: &mpi_job(), facts: Some(Arc::new(facts)) });
}

/// Gang `a` of three members that an MPIJob has made, all bound, of which the first has ended well; its pod is still there.
fn one_has_ended(membership: &Membership) -> World {
    let mut world = World::new();
    mpi_job_says(&mut world, false);
    for number in 0..3 {
        world.see(member(&format!("a{number}"), membership.clone()));
    }
    mpi_job_says(&mut world, false);
    world.bound_gang_of("a", 3, membership);
    let mut completed = bound(member("a0", membership.clone()), "n0");
    completed.stage = Stage::Succeeded;
    world.see(completed);
    world
}

#[test]
fn no_place_is_kept_for_members_whose_job_is_over() {
    for repair in [Repair::Hold, Repair::Restart, Repair::Ignore] {
        let membership = with_repair(of_mpi_job(), repair);
        let mut world = one_has_ended(&membership);
        mpi_job_says(&mut world, true);
        world.gone("a1");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(deleted(&mut world), Vec::<String>::new(), "{repair:?}");
        assert_eq!(world.phase("a"), GangPhase::Bound, "{repair:?}");
        assert_eq!(world.reason("a"), Reason::BelowMinimum);
        world.see(leaving(bound(member("a2", membership.clone()), "n2")));
        world.gone("a2");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(world.phase("a"), GangPhase::Finished, "{repair:?}");
    }
}

#[test]
fn reservations_are_released_when_job_ends_after_its_pods_left() {
    let mut world = one_has_ended(&of_mpi_job());
    world.gone("a1");
    world.gone("a2");
    assert_eq!(world.reserved(), ["a-g1", "a-g2"]);
    mpi_job_says(&mut world, true);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.phase("a"), GangPhase::Finished);
}

#[test]
fn a_job_that_is_gone_makes_no_replacements() {
    let mut world = one_has_ended(&of_mpi_job());
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
    world.handle(GangEvent::OwnerSeen { owner: &mpi_job(), facts: None });
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.reason("a"), Reason::BelowMinimum);
}

#[test]
fn a_job_that_goes_on_after_all_has_places_kept_again() {
    let mut world = one_has_ended(&of_mpi_job());
    world.handle(GangEvent::OwnerSeen { owner: &mpi_job(), facts: None });
    mpi_job_says(&mut world, false);
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
}

#[test]
fn suspended_job_keeps_no_reservation_and_resumes_as_a_whole() {
    for repair in [Repair::Hold, Repair::Restart] {
        let membership = with_repair(of_mpi_job(), repair);
        let mut world = one_has_ended(&membership);
        let suspended = OwnerFacts { min: Some(3), total: Some(3), suspended: true, ..OwnerFacts::default() };
        world.handle(GangEvent::OwnerSeen { owner: &mpi_job(), facts: Some(Arc::new(suspended)) });
        world.gone("a1");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        assert_eq!(deleted(&mut world), Vec::<String>::new(), "{repair:?}");
        assert_eq!(world.reason("a"), Reason::BelowMinimum);
        world.gone("a2");
        assert_eq!(world.reserved(), Vec::<String>::new(), "{repair:?}");
        mpi_job_says(&mut world, false);
        for pod in ["a3", "a4"] {
            world.see(member(pod, membership.clone()));
        }
        world.pass(10);
        let wanted = world.plan();
        assert_eq!((wanted.must, wanted.members.len()), (2, 2), "{repair:?}");
    }
}

#[test]
fn an_owner_that_could_never_be_read_is_not_taken_for_over() {
    let mut world = World::new();
    let membership = of_mpi_job();
    world.see(member("a0", membership.clone()));
    world.handle(GangEvent::OwnerSeen { owner: &mpi_job(), facts: None });
    world.bound_gang_of("a", 3, &membership);
    world.gone("a1");
    assert_eq!(world.reserved(), ["a-g1"]);
}

#[test]
fn finished_gang_is_forgotten_and_later_pods_start_a_new_one() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.status("a");
    world.gone("a0");
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Finished);
    assert_eq!(world.reserved(), Vec::<String>::new());
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Pending);
    world.gone("a2");
    world.pass(10);
    assert_eq!(world.take_work(), [forget("a")]);
    world.gangs.assert_empty();
}

#[test]
fn an_object_that_a_person_wrote_is_not_forgotten() {
    let mut world = World::new();
    let object = crate::protocol::Object { ours: false, ..world.object(GangStatus::default()) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    world.bound_gang("a", 1, 1);
    world.status("a");
    world.gone("a0");
    let status = world.status("a");
    assert_eq!((status.phase, status.decision), (GangPhase::Finished, None));
    world.pass(60);
    assert_eq!(world.take_work(), []);
}
