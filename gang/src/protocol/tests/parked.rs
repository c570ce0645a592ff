//! When parked pods are asked to come again because they were told another reason than the one that holds now: kube-scheduler would show
//! the old one for minutes.

use gantry_api::Reason;

use super::world::{World, in_pod_group, leaving, member, membership, wants};
use crate::membership::OwnerFacts;
use crate::protocol::Answer;

#[test]
fn pod_refused_for_unread_owner_is_activated_once_it_is_read() {
    let mut world = World::new();
    world.see(member("a0", in_pod_group()));
    world.see(member("a1", in_pod_group()));
    assert_eq!(world.waits("a0"), Reason::UnknownSize);
    world.group_says(wants(3));
    assert!(world.woken().is_empty(), "the next change may follow at once");
    world.pass(1);
    assert_eq!(world.woken(), ["a0"], "a1 was told nothing");
    assert_eq!(world.waits("a0"), Reason::WaitingForMembers);
    world.pass(100);
    assert!(world.woken().is_empty());
}

#[test]
fn member_that_shows_an_old_count_is_activated() {
    // Siblings show the same current count, but members that come one by one wake the others seldom.
    let mut world = World::new();
    world.members("a", 1, 9);
    world.waits("a0");
    let mut woken = 0;
    for number in 1..8 {
        world.see(member(&format!("a{number}"), membership("a", 9)));
        world.pass(1);
        woken += world.woken().len();
        world.waits("a0");
    }
    assert!((1..4).contains(&woken), "{woken}");
}

#[test]
fn reason_that_returns_soon_rarely_activates_pods() {
    // A reason that returns before a pod is activated activates none. One that alternates activates pods at a
    // limited rate.
    let mut world = World::new();
    world.members("a", 2, 2);
    world.refuse();
    world.waits("a0");
    world.gone("a1");
    world.members("a", 2, 2);
    world.refuse();
    world.pass(60);
    assert!(world.woken().is_empty());
    let mut woken = 0;
    for _ in 0..20 {
        world.gone("a1");
        world.pass(1);
        woken += world.woken().len();
        world.waits("a0");
        world.members("a", 2, 2);
        world.refuse();
        world.pass(1);
        woken += world.woken().len();
        world.waits("a0");
    }
    assert!((1..=8).contains(&woken), "{woken} in 40 s");
}

#[test]
fn members_waiting_for_others_are_activated_for_lack_of_room() {
    // The reason changes from missing members to missing devices. A reason that differs only in its counts
    // activates no pod.
    let mut world = World::new();
    world.members("a", 1, 2);
    world.waits("a0");
    world.members("a", 2, 2);
    world.refuse();
    world.pass(1);
    assert_eq!(world.woken(), ["a0"]);
    world.waits("a0");
    world.room += 1;
    world.refuse();
    world.pass(60);
    assert!(world.woken().is_empty(), "only the count is another");
}

/// A PodGroup that makes no gang.
fn basic() -> OwnerFacts {
    OwnerFacts { singles: true, ..wants(1) }
}

#[test]
fn refused_pods_of_no_gang_are_all_activated_at_once() {
    let mut world = World::new();
    for number in 0..500 {
        let mut pod = member(&format!("a{number}"), in_pod_group());
        // Some were told so by another process, some by this one, and some are in kube-scheduler's queue.
        pod.refused = number < 200;
        world.see(pod);
        if (200..400).contains(&number) {
            world.waits(&format!("a{number}"));
        }
    }
    world.pass(3);
    world.group_says(basic());
    assert_eq!(world.woken().len(), 400, "the others were not refused");
    world.pass(60);
    assert!(world.woken().is_empty(), "each of them once");
    assert_eq!(world.answer("a0"), Answer::Single);
}

#[test]
fn pod_refused_during_activation_is_activated_again() {
    // kube-scheduler may mark the pod unschedulable after the first activation, which is then lost. So a
    // second one follows.
    let mut world = World::new();
    world.see(member("a0", in_pod_group()));
    world.waits("a0");
    world.group_says(basic());
    assert_eq!(world.woken(), ["a0"]);
    world.pass(2);
    assert_eq!(world.woken(), ["a0"], "it may have been parked after that");
    world.pass(60);
    assert!(world.woken().is_empty());
}

#[test]
fn who_is_leaving_is_not_woken() {
    let mut world = World::new();
    world.members("a", 3, 4);
    world.waits("a0");
    world.see(leaving(member("a0", membership("a", 4))));
    world.waits("a1");
    for uid in ["a3", "a4"] {
        world.see(member(uid, membership("a", 4)));
    }
    world.refuse();
    world.pass(10);
    let woken = world.woken();
    assert_eq!(woken, ["a1"]);
}

#[test]
fn a_thousand_members_are_not_woken_all_at_once() {
    let mut world = World::new();
    for number in 0..999 {
        world.see(member(&format!("a{number}"), membership("a", 1000)));
        world.waits(&format!("a{number}"));
    }
    world.see(member("last", membership("a", 1000)));
    world.refuse();
    world.pass(1);
    let first = world.woken().len();
    assert!((1..=100).contains(&first), "{first}");
    world.pass(3600);
    assert_eq!(first + world.woken().len(), 999, "each of them once");
}
