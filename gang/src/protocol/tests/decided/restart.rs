//! Gangs that are started anew as a whole when they lose a member: who is deleted, and who counts among the new ones.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, bound, key, leaving, member, membership, with_repair};
use super::deleted;
use crate::protocol::GangEvent;
use crate::protocol::{Blocker, Stage, Work};
use crate::terms::Repair;

#[test]
fn a_restart_that_may_not_be_done_says_so_until_it_is() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    world.gangs.take_statuses();
    let why = "pods may not be deleted; manifests/extender-restart.yaml gives that right";
    world.handle(GangEvent::Blocked { gang: &key("a"), blocker: Blocker::Removal, why: Some(why.into()) });
    let (_, status) = world.gangs.take_statuses().pop().unwrap();
    assert_eq!(status.reason, Some(Reason::Restarting));
    let hindered = |status: &gantry_api::GangStatus| {
        let mut all = status.conditions.iter();
        all.find(|condition| condition.type_ == "Blocked")
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
fn restart_deletes_all_and_the_new_ones_do_not_mix_with_the_old() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    assert_eq!(world.phase("a"), GangPhase::Degraded);
    world.see(member("a2", membership.clone()));
    assert_eq!(world.reason("a"), Reason::Restarting);
    world.see(leaving(bound(member("a1", membership.clone()), "n1")));
    world.pass(5);
    assert_eq!(world.next(), None);
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Pending, "the old one does not count");
    assert_eq!(world.status("a").decision, None);
    world.see(member("a3", membership));
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
    let membership = with_repair(membership("a", 3), Repair::Restart);
    world.bound_gang_of("a", 3, &membership);
    let mut done = bound(member("a0", membership.clone()), "n0");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.gone("a1");
    assert_eq!(deleted(&mut world), ["a2"]);
    world.gone("a2");
    for uid in ["a3", "a4"] {
        world.see(member(uid, membership.clone()));
    }
    assert_eq!(world.plan().must, 2, "the third has done its part, and nobody makes it anew");
    for uid in ["a3", "a4"] {
        world.come(uid);
    }
    world.write();
    assert_eq!(world.bind("a3"), "n0");
}

#[test]
fn success_observed_after_restart_began_still_counts() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"], "it has ended, and the watch is late");
    let mut done = bound(member("a1", membership.clone()), "n1");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.see(member("a2", membership.clone()));
    assert_eq!(world.plan().must, 1, "nobody makes the other anew");
    world.come("a2");
    world.write();
    assert_eq!(world.bind("a2"), "n0");
}

#[test]
fn what_ends_well_because_it_was_asked_to_go_is_started_anew() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    let mut done = leaving(bound(member("a1", membership.clone()), "n1"));
    done.stage = Stage::Succeeded;
    world.see(done);
    world.see(member("a2", membership));
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn what_ended_well_and_is_removed_after_a_restart_is_made_anew() {
    let mut world = World::new();
    let membership = with_repair(membership("a", 2), Repair::Restart);
    world.bound_gang_of("a", 2, &membership);
    let mut done = bound(member("a0", membership.clone()), "n0");
    done.stage = Stage::Succeeded;
    world.see(done);
    world.gone("a1");
    world.see(member("a2", membership.clone()));
    world.gone("a0");
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.reason("a"), Reason::WaitingForMembers);
}

#[test]
fn a_restart_says_again_what_was_not_done() {
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(membership("a", 2), Repair::Restart));
    world.gone("a0");
    assert_eq!(deleted(&mut world), ["a1"]);
    world.pass(29);
    assert_eq!(deleted(&mut world), Vec::<String>::new());
    world.pass(1);
    assert_eq!(deleted(&mut world), ["a1"]);
}
