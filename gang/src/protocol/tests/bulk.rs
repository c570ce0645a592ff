//! A decision is one object, and there is a limit to that.

use gantry_api::{DecidedReservation, GangPhase, Reason};
use serde_json::json;

use super::world::{World, member, membership, place};
use crate::protocol::GangEvent;
use crate::protocol::slot_list::MAX_DECISION_BYTES as MOST;
use crate::protocol::{Placement, PlanRequest, Reservation, ShapeId, Work};

/// A place of so many GPUs, by what NVIDIA's driver calls them.
fn places(wanted: &PlanRequest, gpus: usize) -> Vec<Reservation> {
    let places = wanted.members.iter().enumerate().map(|(at, _)| Reservation {
        shape: ShapeId(0),
        devices: vec![(
            "nvidia.com/gpu".into(),
            (0..gpus).map(|gpu| format!("GPU-{at:08x}-0000-4000-8000-{gpu:012x}").as_str().into()).collect(),
        )],
        ..place(&format!("gpu-node-{at:05}"), "")
    });
    places.collect()
}

/// Members of gang `a`, of which `min` are needed, with eight GPUs each.
fn of_eight(count: u32, min: u32) -> World {
    let mut world = World::new();
    for number in 0..count {
        let uid = format!("01234567-89ab-4cde-8f01-{number:012x}");
        let mut member = member(&uid, membership("a", min));
        member.name = format!("train-worker-{number}").into();
        world.see(member);
    }
    world
}

fn plan(world: &mut World) {
    let wanted = world.next().expect("a gang wants a plan");
    let placement = Placement { places: places(&wanted, 8), ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
}

#[test]
fn gang_too_large_to_write_reserves_nothing_and_names_the_limit() {
    // The decision would exceed the largest object that etcd takes. The message says how many members could
    // be written.
    let mut world = of_eight(3_000, 3_000);
    plan(&mut world);
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.take_work(), []);
    assert_eq!(world.reason("a"), Reason::CannotFit);
    world.room += 1;
    assert!(world.next().is_some(), "like any other that has no room");
}

#[test]
fn surplus_members_are_placed_up_to_the_object_size_limit() {
    let mut world = of_eight(3_000, 1_000);
    plan(&mut world);
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    let placed = world.reserved().len();
    assert!((2_500..3_000).contains(&placed), "{placed}");
    for number in 0..3_000 {
        let uid = format!("01234567-89ab-4cde-8f01-{number:012x}");
        if world.gangs.view(&super::world::key("a")).unwrap().node_of(&uid.as_str().into()).is_some() {
            world.come(&uid);
        }
    }
    let work = world.take_work();
    let decision = work.into_iter().find_map(|work| match work {
        Work::Commit { decision, .. } => Some(decision),
        _ => None,
    });
    let written = serde_json::to_string(&decision.unwrap().reservations).unwrap();
    assert!((MOST - 1_000..MOST + 10).contains(&written.len()), "{}", written.len());
}

#[test]
fn the_limits_that_are_documented_are_those_that_hold() {
    let page = include_str!("../../../../docs/gangs.md");
    assert!(page.contains("2,500 members with eight each (20,000 GPUs), 5,500 with one"));
    for (gpus, members) in [(8, 2_500), (1, 5_500)] {
        let ids: Vec<String> =
            (0..gpus).map(|gpu| format!("GPU-00000000-0000-4000-8000-{gpu:012x}")).collect();
        let slot: DecidedReservation = serde_json::from_value(json!({
            "node": "gke-a3-pool-1a2b3c4d-x9z8", "devices": [{"resource": "nvidia.com/gpu", "ids": ids}], "rank": 1234,
            "pod": "01234567-89ab-4cde-8f01-23456789abcd", "podName": "llama-pretrain-worker-1234-x7k2p",
        }))
        .unwrap();
        let each = serde_json::to_string(&slot).unwrap().len() + 1;
        assert!(each * members <= MOST, "{each} bytes with {gpus} GPUs");
    }
}
