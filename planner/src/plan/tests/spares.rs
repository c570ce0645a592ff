//! Spare reservations: in the members' domain, never at their expense, on devices of their own.

use std::collections::BTreeSet;

use gantry_gang::protocol::{MemberRequest, Placement};
use proptest::prelude::*;

use super::*;

fn with_spares(mut wanted: PlanRequest, count: usize) -> PlanRequest {
    let shape = wanted.members.iter().map(|member| member.shape).max().unwrap();
    let spare = MemberRequest { uid: "".into(), shape, rank: None, role: "".into() };
    wanted.spares = vec![spare; count];
    wanted
}

fn at(placement: &Placement) -> (String, String) {
    let nodes = |places: &[gantry_gang::protocol::Reservation]| {
        let nodes: BTreeSet<&str> = places.iter().map(|place| place.node.as_str()).collect();
        nodes.into_iter().collect::<Vec<_>>().join("")
    };
    (nodes(&placement.places), nodes(&placement.spares))
}

/// Two racks: the first holds two members, the second three.
fn racks() -> World {
    let mut world = World::new();
    for (rack, name) in [("z/r1", "a"), ("z/r1", "b"), ("z/r2", "c"), ("z/r2", "d"), ("z/r2", "e")] {
        world.node(rack, name, "0,1,2,3,4,5,6,7");
    }
    world
}

#[test]
fn gang_goes_to_the_rack_that_holds_its_spares_too() {
    let mut world = racks();
    let eight = world.shape(8);
    assert_eq!(world.nodes(&gang(&[(2, eight)])), "ab", "the rack with the least left over");
    let found = world.plan(&with_spares(gang(&[(2, eight)]), 1)).unwrap();
    assert_eq!(at(&found), ("cd".into(), "e".into()));
    assert_eq!(&*found.domain, "rack r2");
}

#[test]
fn members_do_not_wait_for_spares() {
    let mut world = racks();
    let eight = world.shape(8);
    let found = world.plan(&with_spares(gang(&[(5, eight)]), 1)).unwrap();
    assert_eq!(at(&found), ("abcde".into(), String::new()));
    // Neither do they go apart for spare ones, which the level that holds the members would not hold.
    let mut wanted = with_spares(gang(&[(3, eight)]), 1);
    level(&mut wanted, "rack", false);
    assert_eq!(at(&world.plan(&wanted).unwrap()), ("cde".into(), String::new()));
    // Its level does not matter to a gang that names none.
    let found = world.plan(&with_spares(gang(&[(3, eight)]), 1)).unwrap();
    assert_eq!(found.places.len(), 3);
    assert_eq!(at(&found).0, "cde");
}

#[test]
fn spares_of_a_placed_gang_go_to_its_domain() {
    let mut world = racks();
    let eight = world.shape(8);
    for required in [false, true] {
        let mut wanted = with_spares(gang(&[(1, eight)]), 2);
        wanted.members.clear();
        wanted.must = 0;
        level(&mut wanted, "rack", required);
        wanted.placed = vec![sibling("c", 0), sibling("d", 1)];
        wanted.without = ["c", "d"].map(Into::into).into();
        // One fits, and is taken.
        assert_eq!(at(&world.plan(&wanted).unwrap()), (String::new(), "e".into()));
        wanted.without.push("e".into());
        assert!(world.plan(&wanted).is_err(), "the other rack is not theirs");
    }
}

#[test]
fn spares_of_slices_go_to_the_racks_of_the_slices() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = with_spares(gang(&[(4, eight)]), 2);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    let found = world.plan(&wanted).unwrap();
    assert!(found.spares.is_empty(), "after its members");
    assert_eq!(at(&found).0, "abde");
    wanted.members.clear();
    wanted.must = 0;
    wanted.placed = vec![sibling("a", 0), sibling("b", 1), sibling("d", 2), sibling("e", 3)];
    wanted.without = ["a", "b", "d", "e"].map(Into::into).into();
    assert_eq!(at(&world.plan(&wanted).unwrap()).1, "cf", "one for each slice");
    // Where one of the racks is full, the other has both, if it can.
    wanted.without.push("c".into());
    assert_eq!(at(&world.plan(&wanted).unwrap()).1, "f");
}

/// Free GPUs of nodes in two racks, members and their sizes, spare ones, and whether the rack is required, preferred or not named.
fn case() -> impl Strategy<Value = (Vec<(bool, u8)>, usize, u32, usize, Option<bool>)> {
    let nodes = prop::collection::vec(
        (any::<bool>(), prop::sample::select(vec![0xff_u8, 0x0f, 0xf0, 0x3c, 0])),
        1..6,
    );
    let gpus = prop::sample::select(vec![2_usize, 4, 8]);
    let level = prop_oneof![Just(None), Just(Some(false)), Just(Some(true))];
    (nodes, gpus, 1..4_u32, 1..4_usize, level)
}

proptest! {
    /// Members fit with spare ones exactly where they fit without, and no worse; no device is in two reservations; where one rack holds the
    /// members and the level is named, it holds the spare ones.
    #[test]
    fn spares_cost_members_nothing((nodes, gpus, members, spares, rack) in case()) {
        let mut world = World::new();
        for (number, (second, free)) in nodes.iter().enumerate() {
            let free: Vec<String> =
                (0..8).filter(|gpu| free & (1 << gpu) != 0).map(|gpu: u8| gpu.to_string()).collect();
            let rack = if *second { "z/r2" } else { "z/r1" };
            world.node(rack, &format!("n{number}"), &free.join(","));
        }
        let shape = world.shape(gpus.try_into().unwrap());
        let mut alone = gang(&[(members, shape)]);
        if let Some(required) = rack {
            level(&mut alone, "rack", required);
        }
        let own = world.plan(&alone);
        let found = world.plan(&with_spares(alone, spares));
        prop_assert_eq!(own.is_ok(), found.is_ok());
        let (Ok(own), Ok(found)) = (own, found) else { return Ok(()) };
        prop_assert_eq!(found.places.len(), own.places.len());
        prop_assert!(found.spares.len() <= spares);
        let nodes_of = |placement: &Placement| at(placement).0.len();
        prop_assert!(nodes_of(&found) <= nodes_of(&own), "{:?} for {:?}", at(&found), at(&own));
        let mut devices = BTreeSet::new();
        for place in found.places.iter().chain(&found.spares) {
            prop_assert_eq!(place.devices[0].1.len(), gpus);
            for device in &place.devices[0].1 {
                prop_assert!(devices.insert((place.node.clone(), device.clone())), "{} twice", device);
            }
        }
        let rack_of = |node: &str| nodes[node[1..].parse::<usize>().unwrap()].0;
        let racks = |places: &[gantry_gang::protocol::Reservation]| {
            places.iter().map(|place| rack_of(place.node.as_str())).collect::<BTreeSet<bool>>()
        };
        let own_racks = racks(&found.places);
        prop_assert!(own_racks.len() <= racks(&own.places).len());
        if rack.is_some() && own_racks.len() == 1 {
            prop_assert!(racks(&found.spares).is_subset(&own_racks));
        }
    }
}
