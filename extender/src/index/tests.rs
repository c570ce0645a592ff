mod binds;
mod decisions;
mod ended;
mod numa;
mod parts;
mod unschedulable;
mod world;

use std::time::Duration;

use crate::fixtures::{
    Cluster, bound, bridged, cut_node, gpu_node, holder, pod, pod_of, publish, quarantined, request,
    request_of, set, shared_node, target,
};
use crate::index::{BindError, BindGrant, Outcome, Source, UnschedulablePod};
use gantry_planner::decide::{ForeignNodes, Options};
use serde_json::json;

fn one_node() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    cluster
}

fn reserve(cluster: &Cluster, pod: &str) -> Result<BindGrant, BindError> {
    cluster.store.update(|index| index.reserve(&target(pod, "n"), None))
}

fn finish(cluster: &Cluster, pod: &str, outcome: Outcome) {
    let now = cluster.now();
    cluster.store.update(|index| index.finish(now, &target(pod, "n"), outcome));
}

/// The GPUs of a reservation's grant.
fn granted(reserved: &BindGrant) -> String {
    let BindGrant::Grant { annotation, .. } = reserved else {
        panic!("{reserved:?}");
    };
    let grant: gantry_api::Grant = serde_json::from_str(annotation).unwrap();
    let held = grant.held("nvidia.com/gpu");
    let gpus: gantry_topology::GpuSet =
        held.iter().map(|id| id.as_str().rsplit('-').next().unwrap().parse::<usize>().unwrap()).collect();
    gpus.to_string()
}

#[test]
fn nothing_is_decided_before_all_lists_are_read() {
    let cluster = Cluster::cold(Options::default());
    for source in Source::ALL {
        assert!(!cluster.store.snapshot().synced);
        cluster.list(source, |_| {});
    }
    assert!(cluster.store.snapshot().synced);
}

#[test]
fn a_resource_of_others_that_counts_bytes_is_in_nobodys_way() {
    let cluster = one_node();
    let mut asking = pod("a", 2);
    asking["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "16Gi".into();
    cluster.pod(&asking);
    let BindGrant::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
        panic!("nothing is granted");
    };
    finish(&cluster, "a", Outcome::Bound);
    let mut running = bound(asking, "n", 1, None);
    running["metadata"]["annotations"] = json!({"gantry.dev/grant": &*annotation});
    cluster.pod(&running);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn a_hold_ends_by_itself_and_with_its_pod() {
    let cluster = one_node();
    let now = cluster.now();
    for pod in ["a", "b"] {
        cluster.store.update(|index| index.hold(now, &pod.into(), &request(2), "n"));
    }
    cluster.gone(&pod("a", 2));
    assert_eq!(cluster.open("n"), "0,1,4,5,6,7");
    cluster.wait(31);
    assert_eq!(cluster.open("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn numbers_of_nodes_that_are_gone_are_used_again() {
    let cluster = one_node();
    let now = cluster.now();
    cluster.store.update(|index| index.hold(now, &"a".into(), &request(2), "n"));
    for number in 0..2000 {
        let name = format!("short-lived-{number}");
        cluster.add(&name, &bridged());
        cluster.store.update(|index| {
            index.node_deleted(&name);
            index.inventory_deleted(&name);
        });
    }
    let snapshot = cluster.store.snapshot();
    assert!(snapshot.names.len() < 1000, "{}", snapshot.names.len());
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    assert_eq!(cluster.open("n"), "2,3,4,5,6,7");
    assert!(snapshot.find("short-lived-0").is_none());
}
