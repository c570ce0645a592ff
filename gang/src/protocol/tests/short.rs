//! Decided gangs that lack members whose places are gone: which of them gets what comes free, and which member of it.

use gantry_api::Reason;

use super::world::{World, bound, in_role, leaving, member, membership, place, wants_roles};
use crate::membership::Membership;
use crate::protocol::GangEvent;
use crate::protocol::{Member, Placement, PlanRequest};

/// A gang of some members, all bound, each on a node of its own.
fn bound_all(world: &mut World, pods: &[&str], membership: &Membership) {
    for pod in pods {
        world.see(member(pod, membership.clone()));
    }
    world.plan();
    for pod in pods {
        world.come(pod);
    }
    world.write();
    for pod in pods {
        world.bind(pod);
    }
    world.take_work();
}

/// Kube-scheduler stops a bound member for another pod: its place is not kept.
pub(super) fn preempt(world: &mut World, pod: &str, membership: &Membership) {
    world.see(Member { preempted: true, ..leaving(bound(member(pod, membership.clone()), "n0")) });
    world.gone(pod);
}

/// The next gang gets one place.
fn place_one(world: &mut World, gpu: &str) -> PlanRequest {
    let wanted = world.next().expect("a gang wants a plan");
    let placement = Placement { places: vec![place("n9", gpu)], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    wanted
}

/// Gangs `a` and `b` of four members in namespaces of their own, each of which has lost two and has replacements for them.
pub(super) fn two_short_gangs() -> World {
    let mut world = World::new();
    let memberships = ["a", "b"].map(|gang| {
        let mut membership = membership(gang, 4);
        membership.key.namespace = format!("team-{gang}").as_str().into();
        (gang, membership)
    });
    for (gang, membership) in &memberships {
        let pods: Vec<String> = (0..4).map(|number| format!("{gang}{number}")).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        bound_all(&mut world, &pods, membership);
        world.pass(1);
    }
    for (gang, membership) in &memberships {
        for number in 2..4 {
            preempt(&mut world, &format!("{gang}{number}"), membership);
        }
    }
    for (gang, membership) in &memberships {
        for number in 4..6 {
            world.see(member(&format!("{gang}{number}"), membership.clone()));
        }
    }
    world
}

#[test]
fn short_gang_is_completed_before_another_gets_devices() {
    let mut world = two_short_gangs();
    assert_eq!(&*world.refuse().gang.name, "a");
    assert_eq!(&*world.refuse().gang.name, "b");
    world.room += 1;
    assert_eq!(&*place_one(&mut world, "first").gang.name, "a");
    // The rest of it goes before the other in the same room too.
    let rest = world.refuse();
    assert_eq!((&*rest.gang.name, rest.members.len()), ("a", 1));
    assert_eq!(&*world.refuse().gang.name, "b");
    world.room += 1;
    assert_eq!(&*place_one(&mut world, "second").gang.name, "a");
    assert_eq!(&*world.next().expect("b has its turn").gang.name, "b");
}

#[test]
fn short_gangs_are_ordered_by_priority_then_by_missing_members() {
    let mut world = two_short_gangs();
    let mut membership = membership("a", 4);
    membership.key.namespace = "team-a".into();
    world.gone("a5");
    assert_eq!(&*world.refuse().gang.name, "b", "whose replacements are all there");
    world.see(Member { priority: 5, ..member("a6", membership) });
    world.room += 1;
    assert_eq!(&*world.refuse().gang.name, "a");
}

#[test]
fn surplus_member_of_a_role_leaves_room_for_a_missing_role() {
    // Only the worker that the gang lacks is planned. The additional `ps` is beyond what its role needs.
    let roles = wants_roles(&[("ps", 2), ("worker", 2)]);
    let mut world = World::new();
    world.group_says(roles.clone());
    for (pod, role) in [("a0", "ps"), ("a1", "ps"), ("a2", "worker"), ("a3", "worker")] {
        world.see(member(pod, in_role(role)));
    }
    // The owner is known by its gang from then on.
    world.group_says(roles);
    world.plan();
    world.come_all("a", 4);
    world.write();
    for number in 0..4 {
        world.bind(&format!("a{number}"));
    }
    world.see(member("a4", in_role("ps")));
    world.refuse();
    preempt(&mut world, "a3", &in_role("worker"));
    world.see(Member { created: 1, ..member("a5", in_role("worker")) });
    let wanted = world.next().expect("it lacks a worker");
    assert!(wanted.completes);
    let members: Vec<&str> = wanted.members.iter().map(|member| member.uid.as_str()).collect();
    assert_eq!(members, ["a5"]);
}

#[test]
fn absent_surplus_members_do_not_delay_a_needed_member() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.see(member("a2", membership("a", 2)));
    world.plan_from(2);
    world.pass(60);
    assert_eq!(world.next(), None, "it is tried again later");
    preempt(&mut world, "a1", &membership("a", 2));
    let wanted = world.next().expect("what it lacks is planned at once");
    assert!(wanted.completes);
}

#[test]
fn surplus_member_without_room_gets_a_reason_once_gang_is_bound() {
    let mut world = World::new();
    for pod in ["a0", "a1", "a2"] {
        world.see(member(pod, membership("a", 2)));
    }
    let wanted = world.next().expect("a gang wants a plan");
    let placement = Placement { places: vec![place("n0", "g0"), place("n1", "g1")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    for pod in ["a0", "a1"] {
        world.come(pod);
    }
    world.write();
    for pod in ["a0", "a1"] {
        world.bind(pod);
    }
    let wanted = world.refuse();
    assert_eq!((wanted.must, wanted.members.len()), (0, 1));
    assert_eq!(world.reason("a"), Reason::WaitingForSurplus);
    assert_eq!(world.next(), None, "it is asked once");
}
