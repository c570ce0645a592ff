//! The minimum of a gang that is decided is lowered, or raised.

use std::sync::Arc;

use gantry_api::{GangPhase, GangRepair, GangSpec, GangStatus};

use super::world::{World, bound, key, leaving, member, membership, place, with_repair};
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef, Size};
use crate::protocol::GangEvent;
use crate::protocol::{Member, Object, Settings, Work};
use crate::terms::Repair;

fn cluster() -> OwnerRef {
    OwnerRef { kind: OwnerKind::RayCluster, namespace: "default".into(), name: "a".into(), part: "".into() }
}

fn owned(role: &str, repair: Repair) -> Membership {
    let membership = Membership {
        size: Size::Undeclared,
        size_source: "",
        owner: Some(cluster()),
        role: role.into(),
        ..membership("a", 1)
    };
    with_repair(membership, repair)
}

/// A head, and so many workers.
fn says(world: &mut World, workers: u32) {
    let facts = OwnerFacts {
        min: Some(workers + 1),
        total: Some(workers + 1),
        by_role: vec![("head".into(), 1), ("worker".into(), workers)],
        source: "the sum of all replicas".into(),
        ..OwnerFacts::default()
    };
    world.handle(GangEvent::OwnerSeen { owner: &cluster(), facts: Some(Arc::new(facts)) });
}

fn role(number: u32) -> &'static str {
    if number == 0 { "head" } else { "worker" }
}

/// A head and four workers, all bound.
fn of_five(repair: Repair) -> World {
    let mut world = World::new();
    says(&mut world, 4);
    for number in 0..5 {
        world.see(member(&format!("a{number}"), owned(role(number), repair)));
    }
    world.plan();
    world.come_all("a", 5);
    world.write();
    for number in 0..5 {
        world.bind(&format!("a{number}"));
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world.take_work();
    world
}

fn go(world: &mut World, numbers: [u32; 2], repair: Repair) {
    for number in numbers {
        let pod = member(&format!("a{number}"), owned(role(number), repair));
        world.see(leaving(bound(pod, &format!("n{number}"))));
        world.gone(&format!("a{number}"));
    }
}

#[test]
fn a_job_that_is_made_smaller_is_complete_as_it_is() {
    for repair in [Repair::Hold, Repair::Restart] {
        let mut world = of_five(repair);
        says(&mut world, 2);
        let status = world.status("a");
        assert_eq!((status.min, status.decision.unwrap().min), (3, 3));
        assert_eq!(&*status.conditions[0].reason, "Valid");
        go(&mut world, [3, 4], repair);
        world.pass(60);
        assert_eq!(world.phase("a"), GangPhase::Bound);
        assert_eq!(world.reserved(), Vec::<String>::new());
        assert_eq!(world.take_work(), []);
        // Of those that are left none can be spared.
        world.gone("a0");
        assert_eq!(world.phase("a"), GangPhase::Degraded, "there is no head");
    }
}

#[test]
fn pods_removed_before_owner_shrinks_do_not_restart_the_gang() {
    // When an owner is scaled down, its pods may go before its new size is observed. The gang waits a moment
    // before it restarts.
    let mut world = of_five(Repair::Restart);
    go(&mut world, [3, 4], Repair::Restart);
    assert_eq!(world.take_work(), []);
    says(&mut world, 2);
    world.pass(60);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.take_work(), []);

    let mut world = of_five(Repair::Restart);
    go(&mut world, [3, 4], Repair::Restart);
    world.pass(1);
    assert!(matches!(&world.take_work()[..], [Work::Delete { pods, .. }] if pods.len() == 3));
}

#[test]
fn immediate_replacement_does_not_prevent_a_restart() {
    let mut world = of_five(Repair::Restart);
    go(&mut world, [3, 4], Repair::Restart);
    for number in [3, 4] {
        world.see(member(&format!("new{number}"), owned("worker", Repair::Restart)));
    }
    assert!(!world.take_work().iter().any(|work| matches!(work, Work::Delete { .. })));
    world.pass(1);
    let work = world.take_work();
    let deleted = work.iter().find_map(|work| match work {
        Work::Delete { pods, .. } => Some(pods.len()),
        _ => None,
    });
    assert_eq!(deleted, Some(5), "{work:?}");
}

#[test]
fn a_minimum_that_is_raised_holds_from_the_next_start_on() {
    let mut world = of_five(Repair::Hold);
    says(&mut world, 9);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    let status = world.status("a");
    assert_eq!(status.min, 5);
    // A job that is scaled up is not invalid.
    assert_eq!((&*status.conditions[0].status, &*status.conditions[0].reason), ("True", "MinimumChanged"));
    says(&mut world, 1);
    assert_eq!(world.status("a").min, 2);
    says(&mut world, 4);
    assert_eq!(world.status("a").min, 2, "up again at the next start");
}

#[test]
fn what_the_object_says_lowers_too_and_what_pods_say_does_not() {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    for number in 0..3 {
        let pod = member(&format!("a{number}"), membership("a", 1));
        world.see(bound(pod, &format!("n{number}")));
    }
    let status = world.status("a");
    assert_eq!((status.min, &*status.conditions[0].reason), (3, "MinimumChanged"));
    let spec = GangSpec { min_member: Some(2), ..GangSpec::default() };
    let object = Object { ours: false, spec: Ok(spec), ..world.object(status) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    assert_eq!(world.status("a").min, 2);
    world.gone("a2");
    assert_eq!(world.phase("a"), GangPhase::Bound);
}

#[test]
fn a_forged_pod_does_not_lower_what_its_owner_says() {
    let mut world = of_five(Repair::Hold);
    let forged = Membership {
        size: Size::Stated { min: 1, total: None },
        size_source: "annotation gantry.dev/gang-min",
        ..owned("worker", Repair::Hold)
    };
    world.see(member("forged", forged));
    assert_eq!(world.status("a").min, 5);
    go(&mut world, [3, 4], Repair::Hold);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
}

#[test]
fn minimum_lowered_during_decision_write_holds_afterwards() {
    let mut world = World::new();
    says(&mut world, 4);
    for number in 0..5 {
        world.see(member(&format!("a{number}"), owned(role(number), Repair::Hold)));
    }
    world.plan();
    world.come_all("a", 5);
    says(&mut world, 2);
    assert_eq!(world.write().min, 5);
    assert_eq!(world.status("a").decision.unwrap().min, 3);
}

#[test]
fn whoever_takes_over_goes_by_the_lowered_minimum() {
    let pods: Vec<Member> = (0..3)
        .map(|number| {
            let node = format!("n{number}");
            let pod = member(&format!("a{number}"), owned(role(number), Repair::Restart));
            let mut pod = bound(pod, &node);
            pod.holds = place(&node, &format!("a-g{number}")).devices;
            pod
        })
        .collect();
    let after = |status: GangStatus, workers: Option<u32>| {
        let mut world = World::with(Settings::default());
        if let Some(workers) = workers {
            says(&mut world, workers);
        }
        for pod in &pods {
            world.see(pod.clone());
        }
        world.show("a", status);
        world.handle(GangEvent::Synced);
        world.pass(60);
        assert_eq!(world.take_work(), []);
        world.gangs.view(&key("a")).unwrap().min()
    };
    // It was lowered before, and what the owner says is not known yet.
    let mut world = of_five(Repair::Restart);
    says(&mut world, 2);
    assert_eq!(after(world.status("a"), None), 3);
    // It was lowered while nobody led.
    let mut world = of_five(Repair::Restart);
    assert_eq!(after(world.status("a"), Some(2)), 3);
}

#[test]
fn a_forged_pod_does_not_have_a_bound_gang_started_anew() {
    let mut world = World::new();
    world.bound_gang("a", 3, 3);
    let forged = with_repair(membership("a", 3), Repair::Restart);
    world.see(bound(member("a0", forged), "n0"));
    let status = world.status("a");
    assert_eq!(&*status.conditions[0].reason, "RepairChanged");
    world.gone("a2");
    world.pass(5);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    assert_eq!(world.take_work(), []);
    // A person may say so in the object at any time.
    let spec = GangSpec { repair: Some(GangRepair::Restart), ..GangSpec::default() };
    let object = Object { ours: false, spec: Ok(spec), ..world.object(status) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    world.pass(5);
    assert!(matches!(&world.take_work()[..], [Work::Delete { pods, .. }] if pods.len() == 2));
}
