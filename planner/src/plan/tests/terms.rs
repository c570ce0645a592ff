//! Members with terms for their devices, and nodes with a Topology Manager that aligns them.

use std::sync::Arc;

use gantry_api::{KubeletTopology, TopologyManagerPolicy};
use gantry_gang::protocol::Obstacle;

use super::world::{World, gang};
use crate::fixtures::bridged;
use crate::numa::Alignment;
use crate::placement::PlacementRequest;
use crate::snapshot::Standing;

fn aligned(world: &mut World) {
    let kubelet =
        KubeletTopology { policy: TopologyManagerPolicy::SingleNumaNode, ..KubeletTopology::default() };
    let numa: Vec<Option<u32>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    let alignment = Alignment::new(&kubelet, &numa).map(Arc::new);
    for class in Arc::make_mut(&mut world.snapshot.classes) {
        if let Standing::Ours(class) = Arc::make_mut(class) {
            class.pools[0].alignment.clone_from(&alignment);
        }
    }
}

/// Two nodes of eight GPUs hold five members of three, unless each has to be on one NUMA node of four.
#[test]
fn members_are_counted_as_kubelet_admits_them() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5,6,7").node("z1/r1", "b", "0,1,2,3,4,5,6,7");
    let three = world.shape(3);
    aligned(&mut world);
    assert_eq!(world.line(&gang(&[(4, three)])), "rack r1: a[0,1,2 4,5,6] b[0,1,2 4,5,6]");
    assert!(world.plan(&gang(&[(5, three)])).is_err());
}

#[test]
fn members_get_the_link_that_they_require() {
    let mut world = World::of(&bridged());
    world.node("z1/r1", "a", "0,2,4,6").node("z1/r1", "b", "0,1,2,4,6,7");
    let two = world.shape(2);
    let annotations = [("gantry.dev/required-link", "nvlink")].into_iter();
    let request = Arc::unwrap_or_clone(Arc::clone(&world.shapes[0].request));
    let request = request.placed_by(annotations, &PlacementRequest::default()).unwrap();
    world.shapes[0].request = Arc::new(request);
    assert_eq!(world.line(&gang(&[(2, two)])), "node b: b[0,1 6,7]");
    let obstacles = world.shortage(&gang(&[(3, two)])).obstacles.unwrap();
    assert_eq!((obstacles.nodes, obstacles.found), (None, vec![(Obstacle::PlacementTerms, 0)]));
}

/// Neither pod affinity nor host ports are the reason.
#[test]
fn topology_manager_is_named_as_the_obstacle() {
    let mut world = World::new();
    world.node("z1/r1", "a", "0,1,2,3,4,5,6,7").node("z1/r1", "b", "0,1,2,3,4,5,6,7");
    let five = world.shape(5);
    aligned(&mut world);
    let wanted = gang(&[(2, five)]);
    let obstacles = world.shortage(&wanted).obstacles.unwrap();
    assert_eq!((obstacles.nodes, obstacles.found), (Some(2), vec![(Obstacle::TopologyManager, 2)]));
    let tried = format!("{:?}", world.explain(&wanted));
    assert!(tried.contains("would refuse 5 devices: 4 + 4 are free by NUMA node"), "{tried}");
}
