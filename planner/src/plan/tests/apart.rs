//! Replacements beside siblings that have a place: kept off those that they mind or that mind them, and off no others.

use std::sync::Arc;

use gantry_gang::needs::{Operator, PodTerm, Requirement};
use gantry_gang::protocol::{PlanRequest, ShapeId, Sibling};
use gantry_gang::{Needs, Resources};

use super::ALL;
use super::world::{World, gang, sibling, terms};

const RACK: &str = "example.com/rack";
const HOST: &str = "kubernetes.io/hostname";

/// A member of a role that shares no domain of a label with members of another.
fn apart(role: &str, from: Option<(&str, &str)>) -> Needs {
    let term = |(other, key): (&str, &str)| PodTerm {
        selector: vec![Requirement {
            key: "role".into(),
            operator: Operator::In,
            values: vec![other.into()],
        }],
        namespaces: Some(Vec::new()),
        topology_key: key.into(),
    };
    Needs {
        resources: Resources { pods: 1, ..Resources::default() },
        namespace: "ml".into(),
        labels: Arc::new([("role".into(), role.into())].into()),
        apart_from: from.map(term).into_iter().collect(),
        ..Needs::default()
    }
}

/// Two racks of one node: `a` and `b`, all free.
fn two_racks() -> World {
    let mut world = World::new();
    world.node("z/r1", "a", ALL).node("z/r2", "b", ALL);
    world
}

/// A replacement, where siblings of some shapes have places.
fn replacement(shape: ShapeId, placed: &[(&str, Option<ShapeId>)]) -> PlanRequest {
    let mut wanted = gang(&[(1, shape)]);
    let sibling = |(node, shape): &(&str, Option<ShapeId>)| Sibling { shape: *shape, ..sibling(node, 7) };
    wanted.placed = placed.iter().map(sibling).collect();
    terms(&mut wanted, |terms| terms.max = 8);
    wanted
}

/// The node that it goes to.
fn node(world: &World, wanted: &PlanRequest) -> Option<String> {
    let placement = world.plan(wanted).ok()?;
    Some(placement.places[0].node.to_string())
}

#[test]
fn replacement_shares_a_node_where_no_rule_forbids_it() {
    for key in [HOST, RACK] {
        let mut world = two_racks();
        let launcher = world.shape_of(1, apart("launcher", None));
        let worker = world.shape_of(4, apart("worker", Some(("worker", key))));
        let beside = |placed: &[(&str, Option<ShapeId>)]| node(&world, &replacement(worker, placed));
        let (launcher, worker) = (Some(launcher), Some(worker));
        assert_eq!(beside(&[("a", launcher), ("b", worker)]).as_deref(), Some("a"), "{key}");
        assert_eq!(beside(&[("a", worker), ("b", worker)]), None, "{key}");
    }
}

#[test]
fn replacement_avoids_unbound_members_with_anti_affinity() {
    for key in [HOST, RACK] {
        let mut world = two_racks();
        let launcher = world.shape_of(1, apart("launcher", Some(("worker", key))));
        let worker = world.shape_of(4, apart("worker", None));
        let beside = |placed: &[(&str, Option<ShapeId>)]| node(&world, &replacement(worker, placed));
        let (launcher, worker) = (Some(launcher), Some(worker));
        assert_eq!(beside(&[("a", launcher)]).as_deref(), Some("b"), "though the gang is on a: {key}");
        assert_eq!(beside(&[("a", launcher), ("b", launcher)]), None, "{key}");
        assert_eq!(beside(&[("a", worker)]).as_deref(), Some("a"), "{key}");
    }
}

#[test]
fn a_sibling_of_which_nothing_is_known_is_taken_to_be_alike() {
    let mut world = two_racks();
    let worker = world.shape_of(4, apart("worker", Some(("worker", HOST))));
    assert_eq!(node(&world, &replacement(worker, &[("a", None)])).as_deref(), Some("b"));
}
