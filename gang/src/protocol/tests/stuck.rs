//! Decided gangs that are short of their minimum for long, each of which may hold what another lacks: who counts as stuck, and what becomes
//! of the one that gives way.

use gantry_api::{GangPhase, Reason};

use super::short::two_short_gangs;
use super::world::{World, hopeless, leaving, member, membership, place, refused, with_repair};
use crate::key::GangKey;
use crate::protocol::GangEvent;
use crate::protocol::{Placement, Settings, Work};
use crate::terms::Repair;

fn key(gang: &str) -> GangKey {
    GangKey { namespace: format!("team-{gang}").as_str().into(), ..super::world::key(gang) }
}

/// All that want a plan are refused, as long as any do.
fn refuse_all(world: &mut World) {
    while world.next().is_some_and(|wanted| {
        let refused = super::world::refused();
        world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused) });
        true
    }) {}
}

fn stuck(world: &World) -> Vec<(String, u32)> {
    let stuck = world.gangs.deadlocked().into_iter();
    stuck.map(|stuck| (stuck.gang.key().name.to_string(), stuck.wanted.must)).collect()
}

fn hold() -> u64 {
    Settings::default().hold.as_secs()
}

#[test]
fn gangs_short_for_the_hold_time_are_deadlocked_and_replanned() {
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.pass(hold() - 1);
    assert_eq!(stuck(&world), []);
    assert_eq!(world.next(), None, "it was refused in this room");
    world.pass(1);
    assert_eq!(world.next().map(|wanted| wanted.gang.name.to_string()), Some("a".into()));
    assert_eq!(stuck(&world), [("a".to_owned(), 2), ("b".to_owned(), 2)]);
    refuse_all(&mut world);
    world.pass(hold() * 3);
    assert_eq!(world.next(), None, "once is enough");
}

#[test]
fn who_gets_a_place_is_as_stuck_until_it_has_all() {
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.pass(hold());
    for (gpu, left) in [("one", 1), ("two", 0)] {
        world.room += 1;
        let wanted = world.next().unwrap();
        let placement = Placement { places: vec![place("n9", gpu)], ..Placement::default() };
        world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
        refuse_all(&mut world);
        let short = (left > 0).then_some(("a".to_owned(), left));
        let expected: Vec<(String, u32)> = short.into_iter().chain([("b".to_owned(), 2)]).collect();
        assert_eq!(stuck(&world), expected);
    }
}

#[test]
fn gang_without_members_or_need_for_them_is_not_deadlocked() {
    // A gang without enough pods to be complete is not deadlocked. A gang with `Ignore` continues without
    // them.
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.pass(hold());
    refuse_all(&mut world);
    world.gone("a5");
    assert_eq!(stuck(&world), [("b".to_owned(), 2)]);

    let mut world = World::new();
    world.bound_gang_of("a", 3, &with_repair(membership("a", 3), Repair::Ignore));
    world.gone("a2");
    world.see(member("a3", with_repair(membership("a", 3), Repair::Ignore)));
    refuse_all(&mut world);
    world.pass(hold());
    refuse_all(&mut world);
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(stuck(&world), []);
}

#[test]
fn yielding_gang_is_evicted_whole_names_preemptor_and_restarts() {
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.pass(hold());
    refuse_all(&mut world);
    world.take_work();
    world.handle(GangEvent::YieldTo { gang: &key("b"), to: &key("a") });
    let mut pods: Vec<String> = Vec::new();
    for work in world.take_work() {
        if let Work::EvictRest { pods: gone, of, to } = work {
            assert_eq!((&*of, to.as_deref()), (&key("b"), Some(&key("a"))));
            pods.extend(gone.iter().map(ToString::to_string));
        }
    }
    pods.sort();
    assert_eq!(pods, ["b0", "b1", "b4", "b5"], "those that wait too: they do not mix with the next");
    let statuses = world.gangs.take_statuses();
    let (_, status) = statuses.into_iter().find(|(of, _)| **of == key("b")).unwrap();
    assert_eq!(
        (status.phase, status.reason, status.restarting),
        (GangPhase::Degraded, Some(Reason::Restarting), true),
    );
    assert_eq!(stuck(&world), [("a".to_owned(), 2)]);
    for pod in ["b0", "b1", "b4", "b5"] {
        world.gone(pod);
    }
    let mut membership = membership("b", 4);
    membership.key = key("b");
    for number in 6..10 {
        world.see(member(&format!("b{number}"), membership.clone()));
    }
    world.pass(5);
    world.room += 1;
    assert_eq!(&*world.refuse().gang.name, "a", "short gangs go first");
    let wanted = world.refuse();
    assert_eq!((&*wanted.gang.name, wanted.must, wanted.completes), ("b", 4, false));
}

#[test]
fn nobody_gives_way_who_is_not_stuck() {
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.take_work();
    world.handle(GangEvent::YieldTo { gang: &key("b"), to: &key("a") });
    assert_eq!(world.take_work(), []);
    world.pass(hold());
    refuse_all(&mut world);
    let mut membership = membership("b", 4);
    membership.key = key("b");
    world.see(leaving(member("b5", membership)));
    world.take_work();
    world.handle(GangEvent::YieldTo { gang: &key("b"), to: &key("a") });
    assert_eq!(world.take_work(), [], "its replacement is going");
}

#[test]
fn a_gang_that_would_not_be_whole_on_an_empty_cluster_says_so() {
    let mut world = two_short_gangs();
    refuse_all(&mut world);
    world.pass(hold());
    while let Some(wanted) = world.next() {
        let refused = if *wanted.gang.name == *"a" { hopeless() } else { refused() };
        world.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused) });
    }
    let hopeless: Vec<bool> = world.gangs.deadlocked().iter().map(|stuck| stuck.hopeless).collect();
    assert_eq!(hopeless, [true, false]);
}
