//! The rails of gangs, against all assignments of devices to nodes.

use std::sync::Arc;

use gantry_gang::protocol::{Reservation, ShapeId, Sibling};
use gantry_gang::terms::Rails;
use gantry_topology::GpuSet;
use proptest::prelude::*;

use super::world::{World, gang, line, sibling, terms};
use super::*;
use crate::fixtures::{kind, railed, switched};
use crate::kind::Kinds;

fn with(rails: Rails, mut wanted: PlanRequest) -> PlanRequest {
    terms(&mut wanted, |terms| terms.rails = rails);
    wanted
}

/// Eight GPUs with a NIC each, on nodes in one rack.
fn eight(nodes: &[(&str, &str)]) -> World {
    let mut world = World::of(&railed(8, 8));
    for (name, free) in nodes {
        world.node("z1/r1", name, free);
    }
    world
}

#[test]
fn members_take_the_same_rails_on_every_node() {
    let mut world = eight(&[("a", "0,1,2"), ("b", "1,2,5")]);
    let two = world.shape(2);
    let two = gang(&[(2, two)]);
    let placement = world.plan(&with(Rails::Same, two.clone())).unwrap();
    assert_eq!(line(&placement), "rack r1: a[1,2] b[1,2]");
    assert_eq!(&*placement.rails, "NICs 1-2 on all 2 nodes");
    let any = world.plan(&with(Rails::Any, two)).unwrap();
    assert_eq!((line(&any).as_str(), &*any.rails), ("rack r1: a[0,1] b[1,2]", ""));
}

#[test]
fn nodes_with_the_same_rails_free_go_first() {
    let mut world = eight(&[("a", "0,1"), ("b", "2,3"), ("c", "0,1")]);
    let two = world.shape(2);
    let wanted = gang(&[(2, two)]);
    assert_eq!(world.line(&with(Rails::Any, wanted.clone())), "rack r1: a[0,1] b[2,3]");
    assert_eq!(world.line(&with(Rails::Same, wanted)), "rack r1: a[0,1] c[0,1]");
}

/// Node `b` has enough GPUs on some of the rails of `a` and `c`, but not all of their rails.
#[test]
fn nodes_with_a_part_of_the_rails_are_left_out() {
    let mut world = World::of(&railed(6, 3));
    world.node("z1/r1", "a", "0,2,3,4").node("z1/r1", "b", "2,3,4,5").node("z1/r1", "c", "0,2,3,4");
    let four = world.shape(4);
    assert_eq!(world.line(&gang(&[(2, four)])), "rack r1: a[0,2,3,4] c[0,2,3,4]");
}

/// A gang in one rack precedes one on the same rails, and more members precede both.
#[test]
fn narrower_scope_precedes_same_rails() {
    let mut world = eight(&[("a", "0,1"), ("b", "2,3")]);
    world.node("z1/r2", "c", "0,1");
    let two = world.shape(2);
    let placement = world.plan(&gang(&[(2, two)])).unwrap();
    assert_eq!(line(&placement), "rack r1: a[0,1] b[2,3]");
    assert_eq!(&*placement.rails, "NICs 0-1 on 1 node, NICs 2-3 on 1 node");
    let required = with(Rails::RequireSame, gang(&[(2, two)]));
    assert_eq!(world.line(&required), "2 racks of zone z1: a[0,1] c[0,1]");
}

#[test]
fn required_rails_that_are_not_free_are_waited_for() {
    let mut world = eight(&[("a", "0,1"), ("b", "2,3"), ("c", "0,5")]);
    let two = world.shape(2);
    let wanted = with(Rails::RequireSame, gang(&[(2, two)]));
    let refused = world.plan(&wanted).unwrap_err();
    insta::assert_snapshot!(refused.message(), @"needs 2 members of 2 GPUs with the same NIC indices on every node; on different ones they would fit; at best, GPUs next to NICs 0-1 are free on 1 node");
    assert!(!world.with(|input| fits(input, &wanted)));
    assert!(world.with(|input| fits(input, &with(Rails::Same, wanted.clone()))));
    // On one node there is nothing to align.
    let one = world.shape(1);
    assert_eq!(world.line(&with(Rails::RequireSame, gang(&[(2, one)]))), "node a: a[0 1]");
}

#[test]
fn nodes_without_known_nics_do_not_meet_required_rails() {
    let mut kinds = Kinds::default();
    let (known, unknown) = (kinds.of(&railed(8, 8)), kinds.of(&switched()));
    let mut world = World::of(&switched());
    for (name, kind) in [("a", &unknown), ("b", &unknown), ("c", &known), ("d", &known)] {
        world.node_of("z1/r1", name, |class| class.kind = Arc::clone(kind));
    }
    let eight = world.shape(8);
    let wanted = gang(&[(2, eight)]);
    let any = world.plan(&wanted).unwrap();
    assert_eq!((line(&any).as_str(), &*any.rails), ("rack r1: a[0,1,2,3,4,5,6,7] b[0,1,2,3,4,5,6,7]", ""));
    let required = world.line(&with(Rails::RequireSame, wanted));
    assert_eq!(required, "rack r1: c[0,1,2,3,4,5,6,7] d[0,1,2,3,4,5,6,7]");
}

/// Single GPUs of a gang count as a set: on every node together they are next to the same NICs.
#[test]
fn single_gpus_of_a_gang_share_rails_as_a_set() {
    let mut world = eight(&[("a", "0,1,2,3"), ("b", "2,3,4,5"), ("c", "0,1,2,3")]);
    let one = world.shape(1);
    let required = with(Rails::RequireSame, gang(&[(8, one)]));
    let placement = world.plan(&required).unwrap();
    assert_eq!(line(&placement), "rack r1: a[0 1 2 3] c[0 1 2 3]");
    let six = with(Rails::RequireSame, gang(&[(6, one)]));
    let rails = world.plan(&six).unwrap().rails;
    assert_eq!(&*rails, "NICs 0-2 on all 2 nodes");
}

/// Devices that share a NIC are interchangeable for rails.
#[test]
fn gpus_behind_one_nic_are_on_the_same_rail() {
    let mut world = World::of(&railed(8, 4));
    world.node("z1/r1", "a", "1,2").node("z1/r1", "b", "0,3,5");
    let two = world.shape(2);
    let placement = world.plan(&gang(&[(2, two)])).unwrap();
    assert_eq!(line(&placement), "rack r1: a[1,2] b[0,3]");
}

#[test]
fn later_members_take_the_rails_of_the_gang() {
    let mut world = eight(&[("a", ""), ("b", ALL)]);
    let two = world.shape(2);
    let mut wanted = gang(&[(1, two)]);
    let held = ["GPU-a-4", "GPU-a-5"].map(|id| id.into()).to_vec();
    wanted.placed = vec![Sibling { devices: vec![(crate::fixtures::GPU.into(), held)], ..sibling("a", 7) }];
    let placement = world.plan(&wanted).unwrap();
    assert_eq!(line(&placement), "rack r1: b[4,5]");
    assert_eq!(&*placement.rails, "NICs 4-5 on all 2 nodes");
}

/// By node: the GPUs of a plan.
fn used(places: &[Reservation]) -> Vec<(String, GpuSet)> {
    let mut used: Vec<(String, GpuSet)> = Vec::new();
    for place in places {
        let ids = place.devices.iter().flat_map(|(_, ids)| ids);
        let gpus: GpuSet =
            ids.map(|id| id.as_str().rsplit('-').next().unwrap().parse::<usize>().unwrap()).collect();
        match used.iter_mut().find(|(node, _)| node == place.node.as_str()) {
            Some((_, known)) => *known = *known | gpus,
            None => used.push((place.node.to_string(), gpus)),
        }
    }
    used
}

/// Whether `members` of `gpus` each can be on as many nodes, all on the same rails, one on a node.
fn can_agree(
    free: &[GpuSet],
    members: usize,
    gpus: usize,
    rails: &dyn Fn(GpuSet) -> gantry_topology::NicSet,
) -> bool {
    let sets = GpuSet::first(8).subsets(gpus);
    sets.map(rails).any(|wanted| {
        let nodes = free.iter().filter(|free| free.subsets(gpus).any(|set| rails(set) == wanted));
        nodes.count() >= members
    })
}

proptest! {
    /// Members of more than half a machine, so that each is on its own node: the rails are the same whenever any choice of
    /// nodes and devices has them the same.
    #[test]
    fn same_rails_are_found_whenever_they_are_free(
        free in prop::collection::vec(0u32..64, 2..5),
        members in 2u32..4,
        nics in prop::sample::select(vec![2usize, 3, 6]),
        required in any::<bool>(),
    ) {
        let machine = railed(6, nics);
        let mut world = World::of(&machine);
        let free: Vec<GpuSet> = free.into_iter().map(GpuSet::from_bits).collect();
        for (name, free) in ["a", "b", "c", "d"].iter().zip(&free) {
            world.node("z1/r1", name, &free.to_string());
        }
        let four = world.shape(4);
        let policy = if required { Rails::RequireSame } else { Rails::Same };
        let planned = world.plan(&with(policy, gang(&[(members, four)])));
        let fits = free.iter().filter(|free| free.len() >= 4).count() >= members as usize;
        let kind = kind(&machine);
        let rails = |set: GpuSet| kind.rails(set);
        let agrees = can_agree(&free, members as usize, 4, &rails);
        match planned {
            Err(_) => prop_assert!(!fits || required && !agrees),
            Ok(placement) => {
                let used = used(&placement.places);
                prop_assert_eq!(used.len(), members as usize);
                let same = used.iter().all(|(_, gpus)| rails(*gpus) == rails(used[0].1));
                prop_assert_eq!(same, agrees);
                prop_assert_eq!(placement.rails.split(", ").count() == 1, same);
            }
        }
    }

    /// With several members on a node: required rails are the same on every node, or the gang waits; and it only waits if
    /// no number of members on each node has them the same.
    #[test]
    fn required_rails_are_the_same_on_every_node(
        free in prop::collection::vec(0u32..64, 2..5),
        members in 2u32..5,
        size in 1u32..4,
    ) {
        let machine = railed(6, 6);
        let mut world = World::of(&machine);
        let free: Vec<GpuSet> = free.into_iter().map(GpuSet::from_bits).collect();
        for (name, free) in ["a", "b", "c", "d"].iter().zip(&free) {
            world.node("z1/r1", name, &free.to_string());
        }
        let shape: ShapeId = world.shape(size);
        let planned = world.plan(&with(Rails::RequireSame, gang(&[(members, shape)])));
        let kind = kind(&machine);
        let rails = |set: GpuSet| kind.rails(set);
        let (members, size) = (members as usize, size as usize);
        let on_one = free.iter().any(|free| free.len() >= members * size);
        let divided = (1..members).filter(|each| members % each == 0);
        let agrees = divided.clone().any(|each| can_agree(&free, members / each, each * size, &rails));
        match planned {
            Err(_) => prop_assert!(!on_one && !agrees),
            Ok(placement) => {
                let used = used(&placement.places);
                prop_assert!(used.iter().all(|(_, gpus)| rails(*gpus) == rails(used[0].1)));
            }
        }
    }
}
