use gantry_gang::protocol::Settings;
use gantry_gang::{Levels, NodeFacts, Taint, TaintEffect};
use gantry_planner::decide::Options;

use super::*;
use crate::fixtures::{Cluster, bridged, member};
use crate::index::Index;

const GPU: &str = "nvidia.com/gpu";
/// Each node with its rack.
const RACKS: [(&str, &str); 6] =
    [("a", "r1"), ("b", "r1"), ("c", "r2"), ("d", "r2"), ("e", "r2"), ("f", "r2")];

fn describe(cluster: &Cluster, name: &str, change: impl FnOnce(&mut NodeFacts)) {
    let rack = RACKS.iter().find(|(known, _)| *known == name).unwrap().1;
    let labels = BTreeMap::from([("example.com/rack".into(), rack.into())]);
    let mut facts = NodeFacts { name: name.into(), labels, ..NodeFacts::default() };
    change(&mut facts);
    cluster.store.update(|index| index.node_described(Arc::new(facts)));
    cluster.wait(1);
}

fn mark(cluster: &Cluster, name: &str, mark: Option<&str>) {
    cluster.store.update(|index| index.node_marked(&name.into(), mark.map(Into::into)));
    cluster.wait(1);
}

/// Members of 8 GPUs of the largest gang: anywhere, and within a rack.
fn largest(cluster: &Cluster) -> (usize, usize) {
    let totals = cluster.store.read(Index::idle_totals);
    let of = |level: &str| totals.largest_gangs[&(GPU.into(), level.into())];
    assert_eq!(of("cluster"), totals.free_sets[GPU]);
    let size = SET_SIZES.iter().position(|size| *size == 8).unwrap();
    (of("cluster")[size], of("rack")[size])
}

/// Free devices of a node that is cordoned or tainted, or that another program marks, are no room for a gang.
#[test]
fn largest_gang_counts_nodes_that_take_pods() {
    let cluster = Cluster::new(Options::default());
    cluster.store.update(|index| {
        index.set_gangs(Settings::default());
        index.set_fabric(Levels::parse("rack=example.com/rack").unwrap());
    });
    for (name, _) in RACKS {
        cluster.add(name, &bridged());
        describe(&cluster, name, |_| {});
    }
    let taint = |key: &str| Taint { key: key.into(), value: "".into(), effect: TaintEffect::NoSchedule };
    assert_eq!(largest(&cluster), (6, 4));
    describe(&cluster, "c", |facts| facts.unschedulable = true);
    assert_eq!(largest(&cluster), (5, 3));
    describe(&cluster, "d", |facts| facts.taints = vec![taint("example.com/team")]);
    assert_eq!(largest(&cluster), (4, 2));
    mark(&cluster, "f", Some("the driver is upgraded"));
    assert_eq!(largest(&cluster), (3, 2));
    // Pods that ask for GPUs tolerate it.
    describe(&cluster, "e", |facts| facts.taints = vec![taint(GPU)]);
    assert_eq!(largest(&cluster), (3, 2));
    mark(&cluster, "f", None);
    describe(&cluster, "c", |_| {});
    assert_eq!(largest(&cluster), (5, 3));
    // A gang of the team for which the node is.
    let mut tolerant = member("team-0", 1, "team", 2);
    tolerant["spec"]["tolerations"] = serde_json::json!([{"key": "example.com/team", "operator": "Exists"}]);
    cluster.pod(&tolerant);
    cluster.wait(1);
    assert_eq!(largest(&cluster), (6, 4));
}
