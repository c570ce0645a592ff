use serde_json::{Value, json};

use crate::fixtures::{
    Cluster, GPU, bound, bridged, cut_node, gpu_node, grant, holder, plain, pod, pod_of, quarantined, set,
    shared_node,
};
use crate::ledger::FaultKind;
use gantry_planner::decide::Options;

const MIG: &str = "nvidia.com/mig-3g.40gb";

/// One node of four bridged pairs, with what kubelet reports and what the API shows.
fn node(holders: &[Value], pods: &[Value]) -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let mut node = gpu_node("n", &bridged());
    node["status"]["holders"] = holders.into();
    cluster.inventory(&node);
    for pod in pods {
        cluster.pod(pod);
    }
    cluster
}

fn faults(cluster: &Cluster) -> Vec<FaultKind> {
    let mut kinds: Vec<_> = cluster.store.read(|index| index.faults().keys().copied().collect());
    kinds.sort_unstable();
    kinds
}

#[test]
fn a_grant_takes_its_devices_before_kubelet_says_anything() {
    let cluster = node(&[], &[bound(pod("a", 2), "n", 1, Some("4,5"))]);
    assert_eq!(cluster.free("n"), "0,1,2,3,6,7");
}

#[test]
fn a_holder_nobody_knows_takes_its_devices() {
    let cluster = node(&[holder("n", "static", None, "0,1")], &[]);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn quarantined_holder_keeps_devices_of_a_gone_pod() {
    let cluster = node(&[quarantined(holder("n", "a", Some("a"), "0,1"))], &[]);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn an_unhealthy_gpu_is_not_free() {
    let cluster = node(&[], &[]);
    let mut sick = gpu_node("n", &bridged());
    sick["status"]["devices"][3]["healthy"] = false.into();
    sick["status"]["devices"][3]["reason"] = "Xid 79".into();
    cluster.inventory(&sick);
    assert_eq!(cluster.free("n"), "0,1,2,4,5,6,7");
}

#[test]
fn two_pods_that_got_each_others_sets_are_swapped() {
    let a = bound(pod("a", 2), "n", 1, Some("0,1"));
    let b = bound(pod("b", 2), "n", 2, Some("2,3"));
    let swapped = [holder("n", "a", Some("a"), "2,3"), holder("n", "b", Some("b"), "0,1")];
    let cluster = node(&swapped, &[a.clone(), b]);
    assert_eq!(cluster.free("n"), "4,5,6,7");
    // A ends, and kubelet has nothing of it any more: what A really had is free, not what it was granted.
    let mut ended = a;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    let mut after = gpu_node("n", &bridged());
    after["status"]["holders"] = json!([swapped[1]]);
    cluster.inventory(&after);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    assert_eq!(faults(&cluster), []);
}

#[test]
fn a_grant_that_kubelet_did_not_follow_is_given_back() {
    let cluster = node(&[holder("n", "a", Some("a"), "6,7")], &[bound(pod("a", 2), "n", 1, Some("0,1"))]);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5");
}

#[test]
fn a_report_by_name_only_does_not_give_the_grant_back() {
    // The name may be that of a pod before this one.
    let cluster = node(&[holder("n", "a", None, "6,7")], &[bound(pod("a", 2), "n", 1, Some("0,1"))]);
    assert_eq!(cluster.free("n"), "2,3,4,5");
}

#[test]
fn the_pods_own_status_counts_as_truth_besides_the_grant() {
    let mut status = bound(pod("a", 2), "n", 1, Some("0,1"));
    status["status"]["containerStatuses"] = json!([{
        "name": "main", "state": {"running": {}},
        "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": [{"resourceID": "GPU-n-4"}, {"resourceID": "GPU-n-5"}]}],
    }]);
    assert_eq!(node(&[], &[status]).free("n"), "2,3,6,7");
}

#[test]
fn a_displaced_pod_is_held_to_take_as_many_others() {
    // B was granted 0,1; kubelet has given them to A, which was granted 2,3.
    let cluster = node(
        &[holder("n", "a", Some("a"), "0,1")],
        &[bound(pod("a", 2), "n", 1, Some("2,3")), bound(pod("b", 2), "n", 2, Some("0,1"))],
    );
    // A has 0,1; B will take a pair: the best that is free.
    assert_eq!(cluster.free("n"), "4,5,6,7");
    assert_eq!(faults(&cluster), [FaultKind::Displaced]);
}

#[test]
fn of_two_grants_for_one_device_the_older_bind_keeps_it() {
    let older = bound(pod("a", 2), "n", 1, Some("0,1"));
    let younger = bound(pod("b", 1), "n", 2, Some("1"));
    for order in [[&older, &younger], [&younger, &older]] {
        let cluster = node(&[], &order.map(Clone::clone));
        // B lacks one and is held to take the best single: a bridged pair less.
        assert_eq!(set(&cluster.free("n")).len(), 5);
        assert!(!set(&cluster.free("n")).contains(0) && !set(&cluster.free("n")).contains(1));
        assert_eq!(faults(&cluster), [FaultKind::Displaced]);
    }
}

#[test]
fn a_forged_grant_is_ignored_but_its_pod_still_counts() {
    let mut copied = bound(pod("b", 1), "n", 2, None);
    copied["metadata"]["annotations"] = json!({"gantry.dev/grant": grant(&"a".into(), "n", set("0-7"))});
    let cluster = node(&[], &[copied]);
    assert_eq!(set(&cluster.free("n")).len(), 7);
    assert_eq!(faults(&cluster), [FaultKind::Void]);

    let greedy = bound(pod("c", 1), "n", 2, Some("0-7"));
    let cluster = node(&[], &[greedy]);
    assert_eq!(set(&cluster.free("n")).len(), 7);
    assert_eq!(faults(&cluster), [FaultKind::Size]);
}

#[test]
fn grant_is_spent_once_kubelet_reports_the_pod() {
    let greedy = bound(pod("a", 1), "n", 1, Some("0-7"));
    let told = [holder("n", "a", Some("a"), "5")];
    let cluster = node(&told, std::slice::from_ref(&greedy));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,6,7");
    assert_eq!(faults(&cluster), []);
    // By name alone it may be what a pod before this one had.
    let cluster = node(&[holder("n", "a", None, "5")], &[greedy]);
    assert_eq!(faults(&cluster), [FaultKind::Size]);
}

#[test]
fn a_grant_of_devices_that_are_not_there_takes_others() {
    let mut elsewhere = bound(pod("a", 2), "n", 1, None);
    let foreign = grant(&"a".into(), "n", set("0,1")).replace("GPU-n-", "GPU-x-");
    elsewhere["metadata"]["annotations"] = json!({"gantry.dev/grant": foreign});
    let cluster = node(&[], &[elsewhere]);
    assert_eq!(set(&cluster.free("n")).len(), 6);
    assert_eq!(faults(&cluster), [FaultKind::UnknownDevices]);
}

#[test]
fn pod_without_scheduler_counts_at_once() {
    let bypass = bound(pod("a", 2), "n", 1, None);
    let cluster = node(&[], std::slice::from_ref(&bypass));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    let cluster = node(&[holder("n", "a", Some("a"), "4,6")], &[bypass]);
    assert_eq!(cluster.free("n"), "0,1,2,3,5,7");
}

#[test]
fn duplicate_device_blocks_its_resource() {
    let cluster = node(&[], &[]);
    let mut twice = gpu_node("n", &bridged());
    twice["status"]["devices"][1]["id"] = "GPU-n-0".into();
    cluster.inventory(&twice);
    assert_eq!(cluster.free("n"), "");
}

#[test]
fn a_replica_that_is_held_leaves_the_others_of_its_gpu_free() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 16);
    let mut shared = shared_node("n", &bridged(), GPU, 2);
    let mut held = holder("n", "a", Some("a"), "");
    held["devices"] = json!(["GPU-n-0::1", "GPU-n-3::0"]);
    shared["status"]["holders"] = json!([held]);
    cluster.inventory(&shared);
    // Of two replicas that nothing tells apart the first counts as the free one.
    assert_eq!(cluster.free("n"), "0,2,3,4,5,6,8,9,10,11,12,13,14,15");
}

#[test]
fn slices_and_whole_gpus_of_a_node_are_accounted_apart() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 6);
    let cut = cut_node("n", &bridged(), MIG, 4, &[(6, 0), (6, 4), (7, 0), (7, 4)]);
    cluster.inventory(&cut);
    let mut taken = bound(pod_of("a", MIG, 1), "n", 1, None);
    taken["metadata"]["annotations"] = json!({"gantry.dev/grant": json!({
        "version": 1, "plan": "p", "pod": "a", "node": "n",
        "containers": [{"name": "main", "resource": MIG, "devices": ["MIG-n-6-4"]}],
    }).to_string()});
    cluster.pod(&taken);
    assert_eq!(cluster.free_of("n", MIG), "0,2,3");
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5");
    assert_eq!(faults(&cluster), []);
}

#[test]
fn pod_without_grant_counts_for_its_likely_slice() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 6);
    cluster.inventory(&cut_node("n", &bridged(), MIG, 4, &[(6, 0), (6, 4), (7, 0), (7, 4)]));
    cluster.pod(&bound(pod_of("a", MIG, 1), "n", 1, None));
    assert_eq!(cluster.free_of("n", MIG), "0,2,3");
}

#[test]
fn slice_on_two_gpus_blocks_its_resource() {
    let mut machine = serde_json::to_value(bridged()).unwrap();
    machine["gpus"][6]["mig"] = json!({"enabled": true, "instances": [
        {"id": 1, "profile": "x", "start": 0, "size": 4, "compute": [{"id": 0, "uuid": "MIG-00000000-0000-0000-0000-000000000007", "profile": "x"}]},
    ]});
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 6);
    let mut cut = cut_node("n", &bridged(), MIG, 4, &[(7, 0)]);
    let devices = cut["status"]["devices"].as_array_mut().unwrap();
    devices.last_mut().unwrap()["id"] = "MIG-00000000-0000-0000-0000-000000000007".into();
    cut["spec"]["machine"] = machine;
    cluster.inventory(&cut);
    assert_eq!(cluster.free_of("n", MIG), "");
}

#[test]
fn a_gpu_node_that_contradicts_itself_gives_nothing_out() {
    let cluster = node(&[], &[]);
    let mut broken = gpu_node("n", &bridged());
    broken["spec"]["machine"]["gpus"][1]["index"] = 7.into();
    cluster.inventory(&broken);
    let snapshot = cluster.store.snapshot();
    let state = snapshot.node_state(snapshot.find("n").unwrap());
    assert!(matches!(state, gantry_planner::snapshot::NodeState::Ours(class) if class.pools.is_empty()));
}

#[test]
fn gpu_held_whole_is_not_shared_later() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 16);
    // Kubelet still lists the whole GPU, under the name it had then.
    for resource in [GPU, "nvidia.com/gpu.shared"] {
        let mut shared = shared_node("n", &plain(2), resource, 3);
        shared["status"]["holders"] = json!([holder("n", "a", Some("a"), "1")]);
        cluster.inventory(&shared);
        cluster.pod(&bound(pod("a", 1), "n", 1, Some("1")));
        assert_eq!(cluster.free_of("n", resource), "0,1,2", "{resource}");
    }
}

#[test]
fn gpu_is_whole_again_after_its_last_replica() {
    let cluster = node(&[], &[]);
    let mut whole = gpu_node("n", &bridged());
    let mut held = holder("n", "a", Some("a"), "");
    held["resource"] = "nvidia.com/gpu.shared".into();
    held["devices"] = json!(["GPU-n-2::1"]);
    whole["status"]["holders"] = json!([held]);
    cluster.inventory(&whole);
    assert_eq!(cluster.free("n"), "0,1,3,4,5,6,7");
}
