//! The recorded comparison of a plan, held against every domain counted by hand: a domain that lost holds fewer members,
//! or is worse by what the reason compares.

use std::collections::BTreeMap;

use gantry_api::placement::{ComparedFabric, ComparedLevel, CountedDevices, DomainLoss};
use gantry_gang::DomainIx;
use proptest::prelude::*;

use super::*;
use crate::snapshot::NodeState;

/// Racks of nodes, by free GPUs. Racks 0 and 1 are in zone `z0`, 2 and 3 in `z1`.
fn world_of(racks: &[Vec<usize>]) -> World {
    let mut world = World::new();
    for (rack, nodes) in racks.iter().enumerate() {
        for (node, free) in nodes.iter().enumerate() {
            let at = format!("z{}/r{rack}", rack / 2);
            world.node_with(&at, &format!("n{rack}{node}"), &DeviceSet::range(0, *free), 0);
        }
    }
    world
}

fn compared(world: &World, wanted: &PlanRequest) -> ComparedFabric {
    let placed = world.plan(wanted).unwrap();
    (**placed.compared.as_ref().unwrap()).clone()
}

/// The free GPUs of each node by domain, for the domains of a level.
fn by_domain(world: &World, level: &str) -> BTreeMap<String, Vec<usize>> {
    let fabric = world.fabric();
    let mut domains: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for number in 0..u32::try_from(world.rooms.len()).unwrap() {
        let NodeState::Ours(class) = world.snapshot.node_state(NodeIx(number)) else {
            panic!("a node of ours")
        };
        let free = class.pools[0].free.len();
        let name = world.snapshot.names.name(NodeIx(number)).unwrap().as_str().to_owned();
        let domain = match level {
            "node" => name,
            "cluster" => "cluster".to_owned(),
            _ => {
                let at = fabric.levels.0.iter().position(|of| &*of.name == level).unwrap();
                fabric.words(fabric.of_node_at(number, at).unwrap())
            }
        };
        domains.entry(domain).or_default().push(free);
    }
    domains
}

/// Members of so many GPUs that nodes take.
fn room(nodes: &[usize], each: usize) -> i64 {
    i64::try_from(nodes.iter().map(|free| free / each).sum::<usize>()).unwrap()
}

/// Free GPUs of nodes that take any member.
fn loose(nodes: &[usize], each: usize) -> i64 {
    i64::try_from(nodes.iter().filter(|free| **free >= each).sum::<usize>()).unwrap()
}

fn check_level(level: &ComparedLevel, domains: &BTreeMap<String, Vec<usize>>, each: usize, members: i64) {
    assert_eq!(level.domains as usize, domains.len(), "{level:?}");
    let holding = domains.values().filter(|nodes| room(nodes, each) >= members).count();
    assert_eq!(level.holding as usize, holding, "{level:?}");
    let rivals = domains.len() - usize::from(level.chosen.is_some());
    assert_eq!(level.others.len(), rivals.min(ComparedFabric::MAX_OTHERS), "{level:?}");
    let own = level.chosen.as_ref().map(|chosen| &domains[chosen]);
    assert_eq!(own.is_some(), holding > 0, "{level:?}");
    for other in &level.others {
        let there = &domains[&other.domain];
        let values = other.value.zip(other.chosen_value);
        let fits = room(there, each);
        match (other.reason, own) {
            (DomainLoss::Members, _) => {
                assert!(fits < members, "{level:?}");
                assert_eq!(values, Some((fits, members)));
            }
            (DomainLoss::LeftOver, Some(own)) => {
                assert_eq!(values, Some((fits - members, room(own, each) - members)));
                assert!(fits > room(own, each), "{level:?}");
            }
            (DomainLoss::FreeDevices, Some(own)) => {
                assert_eq!(values, Some((loose(there, each), loose(own, each))));
                assert!(loose(there, each) > loose(own, each), "{level:?}");
            }
            (
                DomainLoss::Parts
                | DomainLoss::Nodes
                | DomainLoss::Uneven
                | DomainLoss::Stranded
                | DomainLoss::Surroundings,
                Some(_),
            ) => {
                let (value, chosen) = values.unwrap();
                assert!(fits >= members && value > chosen, "{level:?}");
            }
            (DomainLoss::Name, Some(own)) => assert_eq!(fits, room(own, each), "{level:?}"),
            other => panic!("{other:?} in {level:?}"),
        }
    }
    // Those that hold the gang lost less than any that does not, and of these the largest are named.
    let small: Vec<bool> = level.others.iter().map(|other| other.reason == DomainLoss::Members).collect();
    assert!(small.is_sorted(), "{level:?}");
    if own.is_none() {
        let mut rooms: Vec<i64> = domains.values().map(|nodes| room(nodes, each)).collect();
        rooms.sort_unstable_by_key(|room| std::cmp::Reverse(*room));
        rooms.truncate(ComparedFabric::MAX_OTHERS);
        assert_eq!(level.others.iter().filter_map(|other| other.value).collect::<Vec<_>>(), rooms);
    }
}

proptest! {
    #[test]
    fn each_loser_holds_fewer_members_or_is_worse(
        racks in prop::collection::vec(prop::collection::vec(0usize..=8, 1..4), 1..5),
        each in 1u32..5,
        members in 1u32..9,
    ) {
        let mut world = world_of(&racks);
        let shape = world.shape(each);
        let wanted = gang(&[(members, shape)]);
        let Ok(placed) = world.plan(&wanted) else { return Ok(()) };
        let found = placed.compared.unwrap();
        prop_assert_eq!((found.members, found.counted), (members, CountedDevices::Free));
        let (last, narrower) = found.levels.split_last().unwrap();
        prop_assert!(last.chosen.is_some() && narrower.iter().all(|level| level.chosen.is_none()));
        let nodes: BTreeSet<&str> = placed.places.iter().map(|place| place.node.as_str()).collect();
        for level in &found.levels {
            check_level(level, &by_domain(&world, &level.level), each as usize, i64::from(members));
            if level.level == "node" {
                prop_assert_eq!(level.used as usize, nodes.len());
            }
        }
        prop_assert_eq!(last.used, 1);
    }

    /// Of several shapes each fits by itself: what a reason states is an upper bound.
    #[test]
    fn each_loser_of_mixed_members_is_worse_too(
        racks in prop::collection::vec(prop::collection::vec(0usize..=8, 1..3), 1..5),
        counts in (1u32..4, 1u32..4),
    ) {
        let mut world = world_of(&racks);
        let (four, one) = (world.shape(4), world.shape(1));
        let wanted = gang(&[(counts.0, four), (counts.1, one)]);
        let Ok(placed) = world.plan(&wanted) else { return Ok(()) };
        for level in &placed.compared.unwrap().levels {
            let domains = by_domain(&world, &level.level);
            for other in &level.others {
                let there = &domains[&other.domain];
                let (fours, ones) = (room(there, 4), room(there, 1));
                let (must, more) = (i64::from(counts.0), i64::from(counts.1));
                let over = |nodes: &[usize]| room(nodes, 4) - must + room(nodes, 1) - more;
                let values = other.value.zip(other.chosen_value);
                let own = level.chosen.as_ref().map(|chosen| &domains[chosen]);
                match (other.reason, own) {
                    (DomainLoss::Members, _) => {
                        prop_assert!(fours < must || ones < more);
                        prop_assert_eq!(values, Some((fours.min(must) + ones.min(more), must + more)));
                    }
                    (DomainLoss::Devices, _) => {
                        prop_assert!(loose(there, 1) < 4 * must + more);
                        prop_assert_eq!(values, Some((loose(there, 1), 4 * must + more)));
                    }
                    (DomainLoss::LeftOver, Some(own)) => {
                        prop_assert!(over(there) > over(own));
                        prop_assert_eq!(values, Some((over(there), over(own))));
                    }
                    (DomainLoss::Name, Some(own)) => prop_assert_eq!(over(there), over(own)),
                    // These numbers of members fit, the sizes of the gaps do not suit.
                    (DomainLoss::Rules, _) => prop_assert!(fours >= must && ones >= more),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn slower_domain_lost_by_its_bandwidth() {
    let mut world = World::of(&bridged());
    world.node("z/r1", "a", ALL).node("z/r2", "b", "0,2,4,6");
    let two = world.shape(2);
    let found = compared(&world, &gang(&[(2, two)]));
    assert_eq!(found.levels.len(), 1);
    let other = &found.levels[0].others[0];
    assert_eq!((other.domain.as_str(), other.reason), ("b", DomainLoss::Bandwidth));
    assert!(other.value.unwrap() < other.chosen_value.unwrap());
}

#[test]
fn zone_in_more_racks_lost_by_its_parts() {
    let mut world = uneven_zones();
    let eight = world.shape(8);
    let found = compared(&world, &gang(&[(5, eight)]));
    let texts: Vec<String> = found.levels.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "none of 13 nodes holds the gang, which uses 5",
            "none of 5 racks holds the gang, which uses 2",
            "the best of 2 zones that hold the gang"
        ]
    );
    assert_eq!(found.levels[1].others[0].to_string(), "rack r1: 4 of 5 members fit");
    assert_eq!(found.levels[2].others[0].to_string(), "zone y: needs 3 racks instead of 2");
}

#[test]
fn slices_are_counted_whole() {
    let mut world = World::new();
    for (rack, nodes) in [("x/r1", "abc"), ("x/r2", "def"), ("y/r3", "gh"), ("y/r4", "ij")] {
        for node in nodes.chars() {
            world.node(rack, &node.to_string(), ALL);
        }
    }
    let eight = world.shape(8);
    let mut wanted = gang(&[(4, eight)]);
    level(&mut wanted, "rack", true);
    terms(&mut wanted, |terms| terms.slice = Some(2));
    let found = compared(&world, &wanted);
    let last = found.levels.last().unwrap();
    assert_eq!((last.level.as_str(), last.holding, last.chosen.is_some()), ("zone", 2, true));
    let racks = &found.levels[1];
    assert_eq!((racks.level.as_str(), racks.holding, racks.chosen.is_none()), ("rack", 0, true));
    assert!(racks.others.iter().all(|other| other.reason == DomainLoss::Members));
}

#[test]
fn members_beside_others_record_no_comparison() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut wanted = gang(&[(1, eight)]);
    wanted.placed = vec![sibling("k", 0)];
    wanted.without = vec!["k".into()];
    terms(&mut wanted, |terms| terms.max = 8);
    assert_eq!(world.plan(&wanted).unwrap().compared, None);
}

/// The same domain has the same number in the fabric and in the comparison.
#[test]
fn required_level_bounds_what_is_compared() {
    let mut world = twelve();
    let eight = world.shape(8);
    let mut three = gang(&[(3, eight)]);
    level(&mut three, "rack", true);
    let found = compared(&world, &three);
    let levels: Vec<&str> = found.levels.iter().map(|level| level.level.as_str()).collect();
    assert_eq!(levels, ["node", "rack"]);
    assert_eq!(found.levels[1].chosen.as_deref(), Some(world.fabric().words(DomainIx(3)).as_str()));
    assert_eq!(
        found.to_string(),
        "The best of 4 racks that hold the gang; next rack r2: as good, later by name"
    );
}
