//! The queue: which gang is planned next, and which is not looked at.

use gantry_api::Reason;

use proptest::prelude::*;

use super::super::world::{World, hopeless, key, member, membership, place, refused};
use crate::protocol::GangEvent;
use crate::protocol::Placement;

#[test]
fn refused_gang_is_planned_again_when_room_or_gang_changes() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.refuse();
    assert_eq!(world.waits("a0"), Reason::InsufficientResources);
    assert_eq!(world.next(), None);
    world.pass(1000);
    assert_eq!(world.next(), None, "time alone makes no room");
    world.room += 1;
    world.refuse();
    assert_eq!(world.next(), None);
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.next().unwrap().members.len(), 3);
}

#[test]
fn higher_priority_is_planned_first_and_others_backfill() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let mut high = member("b0", membership("b", 1));
    high.priority = 10;
    world.see(high);
    assert_eq!(&*world.refuse().gang.name, "b");
    assert_eq!(world.gangs.head(world.now()).unwrap().0.name.to_string(), "b");
    assert_eq!(&*world.plan().gang.name, "a", "behind the head");
    assert_eq!(world.next(), None);
}

#[test]
fn a_gang_that_can_never_fit_is_told_so_and_is_not_the_head() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.members("b", 1, 1);
    let wanted = world.next().unwrap();
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(hopeless()) });
    assert_eq!(world.waits("a0"), Reason::CannotFit);
    assert_eq!(world.gangs.head(world.now()).unwrap().0.name.to_string(), "b");
}

#[test]
fn the_namespace_that_holds_least_goes_first() {
    let mut world = World::new();
    world.members("a", 4, 1);
    world.plan();
    let mut early = member("b0", membership("b", 1));
    early.created = 1;
    world.see(early);
    world.pass(5);
    let mut other = membership("c", 1);
    other.key.namespace = "team".into();
    world.see(member("c0", other));
    let order: Vec<String> = world.gangs.queue(world.now()).iter().map(ToString::to_string).collect();
    assert_eq!(order, ["team/c", "default/b"]);
}

#[test]
fn gangs_not_ready_to_plan_are_skipped_at_each_event() {
    let mut world = World::new();
    for number in 0..50 {
        world.members(&format!("g{number}-"), 1, 2);
    }
    world.room += 1;
    assert_eq!(world.next(), None);
    assert_eq!(world.gangs.untried().len(), 0);
    world.see(member("second", membership("g7-", 2)));
    assert_eq!(world.gangs.untried().len(), 1);
    assert_eq!(*world.plan().gang, key("g7-"));
}

proptest! {
    #[test]
    fn whoever_is_first_in_the_queue_and_was_not_tried_is_next(
        gangs in prop::collection::vec((0..3_u8, 0..2_i32, 0..4_u64, 1..4_u32), 1..12),
        fits in prop::collection::vec(any::<bool>(), 40),
        grows in prop::collection::vec(prop::bool::weighted(0.2), 40),
    ) {
        let mut world = World::new();
        let mut at = 0;
        for (number, (space, priority, after, members)) in gangs.iter().enumerate() {
            world.pass(*after);
            for _ in 0..*members {
                let mut membership = membership(&format!("g{number}"), *members);
                membership.key.namespace = format!("ns{space}").into();
                let mut pod = member(&format!("p{at}"), membership);
                pod.priority = *priority;
                world.see(pod);
                at += 1;
            }
        }
        for (fits, grows) in fits.into_iter().zip(grows) {
            world.room += u64::from(grows);
            let queue = world.gangs.queue(world.now());
            // Once capacity has grown, all are tried again.
            let untried = match grows {
                true => queue.iter().cloned().collect(),
                false => world.gangs.untried().clone(),
            };
            let first = queue.into_iter().find(|gang| untried.contains(gang));
            let next = world.next();
            prop_assert_eq!(next.as_ref().map(|wanted| &wanted.gang), first.as_ref());
            let Some(wanted) = next else { continue };
            let result = if fits {
                let places = wanted.members.iter();
                let places = places.map(|member| place("n0", member.uid.as_str()));
                Ok(Placement {
                    places: places.collect(),
                    ..Placement::default()
                })
            } else {
                Err(refused())
            };
            world.handle(GangEvent::Planned { gang: &wanted.gang, result });
        }
    }
}

#[test]
fn member_without_devices_does_not_raise_the_priority() {
    // A user adds a pod of a high priority that takes no device: the gang must not overtake or preempt by it.
    let mut world = World::new();
    let mut launcher = member("a0", membership("a", 2));
    (launcher.shape, launcher.asks, launcher.priority) = (None, [].into(), 1_000);
    world.see(launcher);
    let mut worker = member("a1", membership("a", 2));
    worker.priority = 5;
    world.see(worker.clone());
    assert_eq!(world.gangs.view(&key("a")).unwrap().priority(), 5);
    assert_eq!(world.next().map(|wanted| wanted.priority), Some(5));
    worker.priority = 7;
    world.see(worker);
    assert_eq!(world.gangs.view(&key("a")).unwrap().priority(), 7);
}
