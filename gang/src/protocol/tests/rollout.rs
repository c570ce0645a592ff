//! Rollouts of Deployments whose pods are one gang by its name.

use gantry_api::{GangPhase, Reason};

use super::world::{World, bound, member, membership, place, refused};
use crate::membership::{Membership, Revision};
use crate::protocol::{Answer, GangEvent, Member, Placement};

/// A pod of a Deployment, of a revision of its template.
fn of(deployment: &str, hash: &str) -> Membership {
    let revision = Revision { of: format!("Deployment {deployment}").into(), hash: hash.into() };
    Membership { revision: Some(revision), ..membership("a", 2) }
}

/// Head and worker of the first revision run.
fn running() -> World {
    let mut world = World::new();
    world.see(member("a0", of("head", "h1")));
    world.see(member("a1", of("work", "w1")));
    world.plan();
    world.come_all("a", 2);
    world.write();
    world.bind("a0");
    world.bind("a1");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world.take_work();
    world
}

#[test]
fn next_revision_of_two_deployments_gets_devices_together() {
    let mut world = running();
    world.see(member("b0", of("head", "h2")));
    assert_eq!(world.next(), None, "the other Deployment changes a moment later");
    world.see(member("b1", of("work", "w2")));
    world.pass(2);
    let wanted = world.next().expect("a plan");
    assert_eq!((wanted.members.len(), wanted.must), (2, 2));
    // Room for one of the two.
    let half = Placement { places: vec![place("n5", "g5")], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(half) });
    assert!(matches!(world.answer("b0"), Answer::Wait(_)));
    assert!(world.reserved().is_empty());
    let status = world.status("a");
    let condition = status.conditions.iter().find(|condition| condition.type_ == "Rollout").unwrap();
    assert_eq!(condition.reason, Reason::RevisionWaits.as_str());
    insta::assert_snapshot!(condition.message, @"2 members of the next revision of a Deployment or StatefulSet wait, and get devices together; members that a rollout creates later are placed by themselves");
    // More room.
    world.room += 1;
    world.plan_from(5);
    assert_eq!([world.bind("b0"), world.bind("b1")], ["n5", "n6"]);
    assert!(world.status("a").conditions.iter().all(|condition| condition.type_ != "Rollout"));
}

#[test]
fn rollout_of_one_deployment_goes_by_itself() {
    let mut world = running();
    world.see(member("b0", of("head", "h2")));
    world.pass(2);
    let wanted = world.next().expect("a plan");
    assert_eq!((wanted.members.len(), wanted.must), (1, 1));
}

#[test]
fn further_members_of_the_same_revision_go_first() {
    let mut world = running();
    world.see(member("b0", of("head", "h2")));
    world.see(member("c0", of("work", "w1")));
    world.pass(2);
    let wanted = world.next().expect("a plan");
    assert_eq!(wanted.members.iter().map(|member| member.uid.as_str()).collect::<Vec<_>>(), ["c0"]);
    assert_eq!(wanted.must, 0);
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused()) });
}

#[test]
fn replacement_of_another_revision_takes_the_kept_slot() {
    // As with `maxSurge: 0`: the old pod goes first.
    let mut world = running();
    world.gone("a0");
    world.see(member("b0", of("head", "h2")));
    assert_eq!(world.node("b0"), "n0");
    world.bind("b0");
    let second: Member = bound(member("a1", of("work", "w1")), "n1");
    world.see(second);
    assert_eq!(world.phase("a"), GangPhase::Bound);
}
