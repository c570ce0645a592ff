use serde_json::json;

use super::*;
use crate::fixtures::{bound, facts, pod, watched};

#[test]
fn a_pod_that_asks_for_nothing_of_ours_is_not_kept() {
    let other = json!({"metadata": {"name": "web", "uid": "u"}, "spec": {"containers": [{"name": "web", "resources": {"limits": {"cpu": "2"}}}]}});
    assert_eq!(PodFacts::read(&watched(), serde_json::from_value(other).unwrap()), None);
}

#[test]
fn kube_schedulers_own_count_is_noticed() {
    let mut short = pod("a", 4);
    short["status"]["conditions"] = json!([{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }]);
    assert_eq!(facts(&short).insufficient, ["nvidia.com/gpu".into()]);
    short["status"]["conditions"][0]["message"] =
        "0/3 nodes are available: 3 node(s) with 1 of 8 GPUs free, 4 asked.".into();
    assert!(facts(&short).insufficient.is_empty());
}

#[test]
fn shortage_of_similarly_named_resource_is_not_a_gpu_shortage() {
    let mut short = pod("a", 4);
    for (message, ours) in [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.shared.", false),
        ("3 Insufficient nvidia.com/gpu-small, 1 Insufficient cpu.", false),
        ("3 Insufficient nvidia.com/gpu.shared, 1 Insufficient nvidia.com/gpu.", true),
        ("3 Insufficient nvidia.com/gpu, 1 Insufficient cpu.", true),
        ("3 Insufficient nvidia.com/gpu. preemption: none.", true),
        ("3 Insufficient nvidia.com/gpu", true),
    ] {
        short["status"]["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
        }]);
        assert_eq!(!facts(&short).insufficient.is_empty(), ours, "{message}");
    }
}

#[test]
fn pod_is_stopped_once_containers_ended_and_no_sidecar_runs() {
    let mut ended = pod("a", 1);
    ended["status"]["containerStatuses"] = json!([{"state": {"terminated": {"exitCode": 0}}}]);
    assert!(facts(&ended).stopped);
    ended["status"]["initContainerStatuses"] = json!([{"state": {"running": {}}}]);
    assert!(!facts(&ended).stopped);
    assert!(!facts(&pod("b", 1)).stopped);
}

#[test]
fn a_huge_grant_is_not_kept_whole() {
    let mut huge = bound(pod("a", 1), "n", 1, None);
    huge["metadata"]["annotations"] = json!({"gantry.dev/grant": "ä".repeat(Grant::MAX_BYTES)});
    let kept = facts(&huge).grant.unwrap();
    assert!(kept.len() <= Grant::MAX_BYTES + 1 && kept.len() >= Grant::MAX_BYTES);
}

#[test]
fn pods_are_ordered_by_bind_then_creation_then_uid() {
    let first = facts(&bound(pod("b", 1), "n", 1, None));
    let second = facts(&bound(pod("a", 1), "n", 2, None));
    let unbound = facts(&pod("c", 1));
    assert_eq!(first.order(&second), Ordering::Less);
    assert_eq!(second.order(&unbound), Ordering::Less);
    assert_eq!(first.order(&facts(&bound(pod("a", 1), "n", 1, None))), Ordering::Greater);
}

/// kube-scheduler sends the pod that the watch shows. What it asks must be equal, or a hold would not be found.
#[test]
fn numa_needs_are_read_alike_from_watch_and_call() {
    let read = |pod: &serde_json::Value| {
        let text = pod.to_string();
        let called: crate::wire::Pod<'_> = serde_json::from_str(&text).unwrap();
        let spec = called.spec.as_ref().unwrap();
        let resources = ["nvidia.com/gpu".into()];
        let request = Request::read(&resources, |resource| spec.containers_asking(resource)).unwrap();
        let request = request.with_numa(&spec.cpu_and_memory());
        assert_eq!(*facts(pod).request.unwrap(), request, "{text}");
        request
            .numa()
            .iter()
            .map(|one| (one.container, one.needs.cpus, one.needs.memory >> 30))
            .collect::<Vec<_>>()
    };
    let resources = json!({"cpu": "2", "memory": "1Gi"});
    let mut exclusive = pod("a", 1);
    exclusive["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "4".into();
    exclusive["spec"]["containers"][0]["resources"]["limits"]["memory"] = "1Gi".into();
    exclusive["spec"]["initContainers"] = json!([
        {"name": "fetch", "resources": {"limits": resources, "requests": resources}},
        {"name": "monitor", "restartPolicy": "Always", "resources": {"limits": {"cpu": "100m", "memory": "1Gi"}}},
    ]);
    assert_eq!(read(&exclusive), [(None, 2, 1), (None, 0, 1), (Some(0), 4, 1)]);
    let mut burstable = exclusive.clone();
    burstable["spec"]["initContainers"][0]["resources"]["requests"]["cpu"] = "1".into();
    assert_eq!(read(&burstable), []);
    let mut as_a_whole = exclusive.clone();
    as_a_whole["spec"]["resources"] = json!({"limits": {"cpu": "6", "memory": "2Gi"}});
    assert_eq!(read(&as_a_whole), []);
}
