//! Pods end and vanish: when what they had is free again.

use super::*;

#[test]
fn what_a_vanished_pod_held_stays_taken_though_it_is_shared_now() {
    let cluster = one_node();
    let running = bound(pod("a", 1), "n", 1, Some("0"));
    cluster.pod(&running).gone(&running);
    assert_eq!(cluster.free("n"), "1,2,3,4,5,6,7");
    for resource in ["nvidia.com/gpu", "nvidia.com/gpu.shared"] {
        cluster.inventory(&shared_node("n", &bridged(), resource, 2));
        assert_eq!(cluster.free_of("n", resource), "2,3,4,5,6,7,8,9,10,11,12,13,14,15", "{resource}");
    }
    cluster.wait(6);
    assert_eq!(cluster.free_of("n", "nvidia.com/gpu.shared"), "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15");
}

#[test]
fn a_finished_pods_devices_are_free_once_the_plugin_agrees() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running);
    let mut node = gpu_node("n", &bridged());
    node["status"]["holders"] = json!([holder("n", "a", Some("a"), "0,1")]);
    cluster.inventory(&node);
    let mut ended = running;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.inventory(&gpu_node("n", &bridged()));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_finished_pod_the_plugin_never_listed_frees_at_once() {
    let cluster = one_node();
    let mut ended = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&ended);
    ended["status"]["phase"] = "Failed".into();
    cluster.pod(&ended);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_force_deleted_pods_devices_are_quarantined() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running).gone(&running);
    cluster.wait(4);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(1);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

/// The plugin reads fewer GPUs for a moment, and lists them again before it has seen that the pod is gone.
#[test]
fn device_that_was_not_listed_at_the_end_is_quarantined() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running);
    let mut node = gpu_node("n", &bridged());
    node["status"]["devices"].as_array_mut().unwrap().remove(1);
    cluster.inventory(&node);
    cluster.gone(&running);
    cluster.inventory(&gpu_node("n", &bridged()));
    // Until then the third was counted in place of the second.
    assert_eq!(cluster.free("n"), "3,4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

/// etcd is restored to a backup without the pod, while the GpuNode is deleted.
#[test]
fn pod_that_vanishes_without_a_gpunode_is_quarantined() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running);
    cluster.store.update(|index| index.inventory_deleted("n"));
    cluster.gone(&running);
    cluster.inventory(&gpu_node("n", &bridged()));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn the_quarantine_does_not_end_on_facts_from_before_its_end() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running).gone(&running);
    let (deleted, later) = (cluster.now(), cluster.now() + Duration::from_secs(60));
    cluster.store.update(|index| index.tick(later, deleted));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn quarantine_lasts_until_plugins_can_write_after_an_outage() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running).gone(&running);
    cluster.stall(20).wait(9);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(1);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_quarantine_goes_on_while_the_plugin_says_so() {
    let cluster = one_node();
    let running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running).gone(&running);
    let mut node = gpu_node("n", &bridged());
    node["status"]["holders"] = json!([quarantined(holder("n", "a", Some("a"), "0,1"))]);
    cluster.inventory(&node).wait(100);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn stopped_pod_needs_no_quarantine() {
    let cluster = one_node();
    let mut running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running);
    running["status"]["containerStatuses"] = json!([{"state": {"terminated": {}}}]);
    cluster.gone(&running);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn bound_pod_missing_from_list_is_quarantined() {
    let cluster = one_node();
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("0,1"))).pod(&pod("b", 2));
    reserve(&cluster, "b").unwrap();
    finish(&cluster, "b", Outcome::Bound);
    cluster.wait(1).list(Source::Pods, |_| {});
    assert_eq!(cluster.free("n"), "4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn bind_during_a_list_is_not_gone() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2)).wait(1);
    cluster.list(Source::Pods, |cluster| {
        reserve(cluster, "a").unwrap();
        cluster.wait(1);
        finish(cluster, "a", Outcome::Bound);
        cluster.pod(&pod("a", 2));
    });
    cluster.wait(100);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn bind_of_vanished_pod_releases_its_devices() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2)).wait(1);
    // The list does not name it, the bind ends after the list was begun, and no list comes any more.
    cluster.list(Source::Pods, |cluster| {
        reserve(cluster, "a").unwrap();
        cluster.wait(1);
    });
    finish(&cluster, "a", Outcome::Bound);
    cluster.wait(60);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    // The pod may have started: what it had is quarantined.
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn unbound_pod_after_etcd_restore_holds_no_devices() {
    // A restored etcd shows a pod without the Binding that it had. Its containers may run for a while.
    let cluster = one_node();
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("0,1")));
    cluster.pod(&pod("a", 2));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    assert!(reserve(&cluster, "a").is_ok(), "it is scheduled again");
}

#[test]
fn pod_listed_without_its_binding_holds_no_devices() {
    // The same, where the watch was behind and has never shown the Binding.
    let cluster = one_node();
    cluster.pod(&pod("a", 2));
    reserve(&cluster, "a").unwrap();
    finish(&cluster, "a", Outcome::Bound);
    cluster.wait(1).list(Source::Pods, |cluster| {
        cluster.pod(&pod("a", 2));
    });
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    assert!(reserve(&cluster, "a").is_ok(), "it is scheduled again");
}
