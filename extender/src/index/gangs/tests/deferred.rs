//! Members that had to leave bind before the last of their siblings came.

use std::sync::Arc;

use gantry_gang::NodeFacts;

use super::*;
use crate::index::Index;

fn give_up(cluster: &Cluster, pod: &str) {
    cluster.store.update(|index| index.gave_up(&pod.into()));
}

fn with_cpu(mut pod: Value, cpu: &str) -> Value {
    pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": cpu});
    pod
}

/// A gang of two on two nodes of 64 CPUs, each of which takes 40; the first has come and left.
fn first_has_left() -> (Cluster, [String; 2]) {
    let cluster = two_nodes();
    let pods: Vec<Value> = members("a", 2, 4).into_iter().map(|pod| with_cpu(pod, "40")).collect();
    create(&cluster, &pods);
    let nodes = [node(&cluster, "a-0"), node(&cluster, "a-1")];
    assert_ne!(nodes[0], nodes[1]);
    admit(&cluster, "a-0", &nodes[0]).unwrap();
    give_up(&cluster, "a-0");
    (cluster, nodes)
}

#[test]
fn they_are_given_out_to_be_bound_where_they_were() {
    let (cluster, nodes) = first_has_left();
    admit(&cluster, "a-1", &nodes[1]).unwrap();
    assert!(!cluster.store.read(Index::has_deferred), "not before it is decided");
    commit(&cluster);
    let deferred = cluster.store.update(Index::take_deferred);
    assert_eq!(deferred, [target("a-0", &nodes[0])]);
    assert!(matches!(admit(&cluster, "a-0", &nodes[0]), Ok(BindStep::Member(BindGrant::Grant { .. }))));
    assert_eq!(cluster.store.update(Index::take_deferred), []);
}

#[test]
fn one_whose_node_has_no_room_any_more_has_to_come_again() {
    let (cluster, nodes) = first_has_left();
    let other = with_cpu(pod("other", 1), "30");
    cluster.pod(&bound(other.clone(), &nodes[0], 1, None));
    admit(&cluster, "a-1", &nodes[1]).unwrap();
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    cluster.gone(&other);
    admit(&cluster, "a-0", &nodes[0]).unwrap();
    assert_eq!(phase(&cluster, "a"), GangPhase::Committing);
}

#[test]
fn pod_that_leaves_enough_resources_is_ignored() {
    let (cluster, nodes) = first_has_left();
    cluster.pod(&bound(with_cpu(pod("small", 1), "20"), &nodes[0], 1, None));
    cluster.pod(&bound(with_cpu(pod("large", 1), "30"), &nodes[1], 1, None));
    admit(&cluster, "a-1", &nodes[1]).unwrap();
    assert_eq!(phase(&cluster, "a"), GangPhase::Committing);
}

#[test]
fn member_must_return_after_its_node_changed() {
    let (cluster, nodes) = first_has_left();
    cluster.store.update(|index| {
        let mut facts = NodeFacts::clone(index.facts.resources.nodes()[0].facts.as_ref().unwrap());
        if *facts.name != *nodes[0] {
            facts = NodeFacts::clone(index.facts.resources.nodes()[1].facts.as_ref().unwrap());
        }
        facts.unschedulable = true;
        index.node_described(Arc::new(facts));
    });
    admit(&cluster, "a-1", &nodes[1]).unwrap();
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}
