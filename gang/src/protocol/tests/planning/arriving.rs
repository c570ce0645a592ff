//! Members come to the places that were planned: time limits, back-off, those that are woken and those that withdraw.

use std::time::Duration;

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, key, member, membership, uid};
use crate::integrations::value::arrival;
use crate::protocol::Arrival;
use crate::protocol::GangEvent;

#[test]
fn gang_arrival_timeout_releases_all_and_backs_off_longer() {
    let mut world = World::new();
    world.members("a", 2, 2);
    for (seconds, failed_attempts) in [(2, 1), (4, 2), (8, 3)] {
        world.plan();
        world.come("a0");
        world.pass(59);
        assert_eq!(world.phase("a"), GangPhase::Reserved);
        world.pass(1);
        assert_eq!(world.phase("a"), GangPhase::Backoff);
        assert_eq!(world.reserved(), Vec::<String>::new());
        assert_eq!(world.waits("a0"), Reason::Backoff);
        assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)));
        assert_eq!(world.status("a").failed_attempts, failed_attempts);
        world.pass(seconds - 1);
        assert_eq!(world.next(), None);
        world.pass(1);
    }
}

/// Plans gang a each time that it wants a plan, for `seconds` in steps of five. Returns for how many of them devices were reserved.
fn reserved_of(world: &mut World, seconds: u64, mut each: impl FnMut(&mut World, u64)) -> u64 {
    let mut reserved = 0;
    for second in (0..seconds).step_by(5) {
        if world.phase("a") == GangPhase::Queued {
            world.plan();
        }
        each(world, second);
        world.pass(5);
        reserved += if world.gangs.view(&key("a")).unwrap().slots().next().is_some() { 5 } else { 0 };
    }
    reserved
}

#[test]
fn gang_that_never_arrives_idles_devices_at_most_half_the_time() {
    const HOURS: u64 = 12 * 3600;
    for seconds in [60, 300, 3600] {
        let mut world = World::new();
        let mut declared = membership("a", 2);
        declared.options.arrival = arrival(Duration::from_secs(seconds), "annotation");
        for name in ["a0", "a1"] {
            world.see(member(name, declared.clone()));
        }
        let reserved = reserved_of(&mut world, HOURS, |_, _| {});
        assert!(reserved <= HOURS / 2 + 360, "{seconds}: {reserved} s");
    }
}

#[test]
fn gang_that_changes_its_terms_idles_devices_half_the_time() {
    // Each change releases the reservation, and the gang was planned again at once.
    const HOURS: u64 = 8 * 3600;
    let mut world = World::new();
    world.members("a", 2, 2);
    let reserved = reserved_of(&mut world, HOURS, |world, second| {
        if second % 50 == 45 {
            let mut declared = membership("a", 2);
            declared.options.max = Some(3 + u32::try_from(second / 50 % 3).unwrap());
            for name in ["a0", "a1"] {
                world.see(member(name, declared.clone()));
            }
        }
    });
    assert!(reserved <= HOURS / 2 + 360, "{reserved} s");
}

#[test]
fn members_that_do_not_come_are_woken_once_more() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    assert_eq!(world.woken(), ["a0", "a1"]);
    world.come("a0");
    for wait in [10, 20] {
        world.pass(wait - 1);
        assert_eq!(world.woken(), Vec::<String>::new());
        world.pass(1);
        assert_eq!(world.woken(), ["a1"]);
    }
}

#[test]
fn member_refused_during_activation_is_activated_once_more() {
    let mut world = World::new();
    world.members("a", 2, 3);
    world.waits("a0");
    world.pass(60);
    world.waits("a1");
    // The last one comes in the same moment.
    world.see(member("a2", membership("a", 3)));
    world.plan();
    assert_eq!(world.woken(), ["a0", "a1", "a2"]);
    world.pass(1);
    assert_eq!(world.woken(), Vec::<String>::new());
    world.pass(1);
    assert_eq!(world.woken(), ["a1"]);
    world.pass(9);
    assert_eq!(world.woken(), Vec::<String>::new());
}

#[test]
fn a_member_that_was_never_tried_is_in_the_queue_and_left_alone() {
    let mut world = World::new();
    world.members("a", 1, 2);
    let mut never_tried = member("a1", membership("a", 2));
    never_tried.refused = false;
    world.see(never_tried);
    world.plan();
    assert_eq!(world.woken(), ["a0"]);
    world.pass(10);
    assert_eq!(world.woken(), ["a0"], "the wake may have been lost");
}

#[test]
fn withdrawn_member_does_not_count_and_keeps_its_reservation() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.pass(55);
    world.handle(GangEvent::Disconnected { pod: &uid("a0") });
    assert_eq!(world.come("a1"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.pass(14);
    assert_eq!(world.phase("a"), GangPhase::Reserved, "a while longer, for its next try");
    assert_eq!(world.come("a0"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn withdrawing_again_and_again_does_not_keep_a_place_for_ever() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    for _ in 0..20 {
        world.come("a0");
        world.handle(GangEvent::Disconnected { pod: &uid("a0") });
        world.pass(4);
        if world.phase("a") == GangPhase::Backoff {
            break;
        }
    }
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.passed.as_secs(), 76, "60 s, and 15 s of grace");
}
