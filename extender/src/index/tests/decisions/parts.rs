//! Decisions about devices of which several lie on one GPU: MIG devices and replicas.

use serde_json::json;

use super::{filtered, named, winner};
use crate::fixtures::{
    Cluster, bridged, cut_node, gpu_node, holder, plain, pod_of, request, request_of, shared_node,
};
use gantry_planner::decide::*;

const SHARED: &str = "nvidia.com/gpu.shared";
const MIG: &str = "nvidia.com/mig-1g.10gb";

#[test]
fn container_above_the_kubelet_limit_is_refused() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let mut node = shared_node("n", &bridged(), SHARED, 4);
    node["status"]["resources"][0]["maxRequest"] = 1.into();
    cluster.inventory(&node);
    let refused = |devices| filtered(&cluster, Options::default(), &request_of(SHARED, devices), &["n"]).1;
    assert_eq!(refused(1), [""; 0]);
    assert_eq!(
        refused(2),
        ["n: node(s) where nvidia.com/gpu.shared gives a container 1 at most, container main asks for 2"]
    );
    cluster.pod(&pod_of("a", SHARED, 2));
    let bind = cluster.store.update(|index| index.reserve(&crate::fixtures::target("a", "n"), None));
    assert_eq!(
        bind.unwrap_err().to_string(),
        "node n: nvidia.com/gpu.shared gives a container 1 at most, container main asks for 2"
    );
}

/// What a pod that asks for `devices` of a resource would be granted on a node, by ID.
fn granted(cluster: &Cluster, node: &str, resource: &str, devices: u32) -> Vec<String> {
    cluster.pod(&pod_of("probe", resource, devices));
    let target = crate::fixtures::target("probe", node);
    let reserved = cluster.store.update(|index| index.reserve(&target, None)).unwrap();
    let now = cluster.now();
    cluster.store.update(|index| index.finish(now, &target, crate::index::Outcome::Failed));
    let crate::index::BindGrant::Grant { annotation, .. } = reserved else {
        panic!("{reserved:?}");
    };
    let grant: gantry_api::Grant = serde_json::from_str(&annotation).unwrap();
    grant.held(resource).iter().map(ToString::to_string).collect()
}

/// Nodes of which two GPUs are cut in four each, with some of the slices held.
fn cut(nodes: &[(&str, &[&str])]) -> Cluster {
    let cluster = Cluster::new(Options::default());
    for (name, held) in nodes {
        cluster.node(name, 6);
        let slices: Vec<(u8, u8)> = (6..8).flat_map(|gpu| (0..4).map(move |start| (gpu, start))).collect();
        let mut node = cut_node(name, &bridged(), MIG, 1, &slices);
        let mut holder = holder(name, "other", None, "");
        holder["resource"] = MIG.into();
        holder["devices"] = held.iter().map(|slice| format!("MIG-{name}-{slice}")).collect();
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
    }
    cluster
}

#[test]
fn a_slice_is_taken_where_the_gpu_is_in_use_anyway() {
    let cluster = cut(&[("a", &[]), ("b", &["7-0"]), ("c", &[])]);
    let best =
        |devices| winner(&cluster, Options::default(), "new", &request_of(MIG, devices), &["a", "b", "c"]);
    assert_eq!(best(1).as_deref(), Some("b"));
    let given = granted(&cluster, "b", MIG, 1);
    assert!(given[0].starts_with("MIG-b-7-"), "{given:?}");
    // Whole GPUs are another matter.
    let whole = winner(&cluster, Options::default(), "new", &request(2), &["a", "b", "c"]);
    assert_eq!(whole.as_deref(), Some("a"));
}

#[test]
fn a_gpu_that_is_cut_by_another_resource_counts_as_cut() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let half = "nvidia.com/mig-3g.40gb";
    let mut node = cut_node("n", &bridged(), MIG, 1, &[(6, 0), (7, 0)]);
    let halves = [6, 7].map(|gpu| {
        json!({"id": format!("HALF-{gpu}"), "gpu": gpu, "slice": {"profile": "x", "start": 4, "size": 4}})
    });
    node = crate::fixtures::publish(
        node,
        json!({"name": half, "kind": "Mig", "sharing": "Packed"}),
        halves.to_vec(),
    );
    assert_eq!(
        {
            cluster.inventory(&node);
            granted(&cluster, "n", MIG, 1)
        },
        ["MIG-n-6-0"]
    );
    let mut holder = holder("n", "other", None, "");
    holder["resource"] = half.into();
    holder["devices"] = json!(["HALF-7"]);
    node["status"]["holders"] = json!([holder]);
    cluster.inventory(&node);
    assert_eq!(granted(&cluster, "n", MIG, 1), ["MIG-n-7-0"]);
}

#[test]
fn replicas_are_laid_as_the_resource_says() {
    for (policy, expected) in [("Distributed", "GPU-n-1::0"), ("Packed", "GPU-n-0::1")] {
        let cluster = Cluster::new(Options::default());
        cluster.node("n", 0);
        let mut node = shared_node("n", &bridged(), SHARED, 2);
        node["status"]["resources"][0]["sharing"] = policy.into();
        let mut holder = holder("n", "other", None, "");
        holder["resource"] = SHARED.into();
        holder["devices"] = json!(["GPU-n-0::0"]);
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
        assert_eq!(granted(&cluster, "n", SHARED, 1), [expected]);
    }
}

#[test]
fn nodes_that_differ_in_which_replicas_are_held_are_alike() {
    let cluster = Cluster::new(Options::default());
    for (name, replica) in [("a", 0), ("b", 2)] {
        cluster.node(name, 0);
        let mut node = shared_node(name, &bridged(), SHARED, 3);
        let mut holder = holder(name, "other", None, "");
        holder["resource"] = SHARED.into();
        holder["devices"] = json!([format!("GPU-{name}-5::{replica}")]);
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
    }
    let snapshot = cluster.store.snapshot();
    let class = |name| snapshot.class(snapshot.find(name).unwrap());
    assert_eq!(class("a"), class("b"));
}

#[test]
fn held_replica_does_not_count_against_its_own_pod() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let mut node = shared_node("n", &plain(1), SHARED, 3);
    let mut holder = holder("n", "other", None, "");
    holder["resource"] = SHARED.into();
    holder["devices"] = json!(["GPU-n-0::0"]);
    node["status"]["holders"] = json!([holder]);
    cluster.inventory(&node);
    let (now, request) = (cluster.now(), request_of(SHARED, 2));
    cluster.store.update(|index| index.hold(now, &"first".into(), &request, "n"));
    let snapshot = cluster.store.snapshot();
    let scored = |uid: &str| {
        let candidates = named(&["n"]);
        let nodes = locate(&snapshot, &candidates);
        prioritize(&snapshot, Options::default(), uid, &request, &candidates, &nodes)
            .map(|winner| winner.score)
    };
    // The same GPU, but another's claim on it.
    assert!(scored("first") > scored("second"));
    assert!(scored("second").is_some());
}

#[test]
fn resource_is_managed_while_a_node_publishes_it() {
    let cluster = Cluster::new(Options::default());
    let managed = |cluster: &Cluster| cluster.store.snapshot().managed.contains(SHARED);
    assert!(!managed(&cluster));
    cluster.node("n", 0);
    cluster.inventory(&shared_node("n", &bridged(), SHARED, 2));
    assert!(managed(&cluster));
    cluster.inventory(&gpu_node("n", &bridged()));
    assert!(!managed(&cluster));
    assert!(cluster.store.snapshot().managed.contains(crate::fixtures::GPU));
}
