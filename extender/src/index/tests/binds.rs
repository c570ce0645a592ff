//! Binds reserve devices, again and again, and end in every way.

use super::*;

#[test]
fn a_reservation_takes_its_devices_until_the_pod_shows_them() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2));
    let reserved = reserve(&cluster, "a").unwrap();
    assert_eq!(granted(&reserved), "0,1");
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    finish(&cluster, "a", Outcome::Bound);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    // An older state of the pod, still on its way, changes nothing.
    cluster.pod(&pod("a", 2));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("0,1")));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

#[test]
fn failed_bind_releases_devices_and_unsure_bind_does_not() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2)).pod(&pod("b", 2));
    reserve(&cluster, "a").unwrap();
    reserve(&cluster, "b").unwrap();
    finish(&cluster, "a", Outcome::Failed);
    finish(&cluster, "b", Outcome::Unsure);
    assert_eq!(cluster.free("n"), "0,1,4,5,6,7");
    cluster.wait(60);
    assert_eq!(cluster.free("n"), "0,1,4,5,6,7");
    cluster.wait(10);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_repeated_bind_gets_the_same_grant() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2));
    let first = reserve(&cluster, "a").unwrap();
    finish(&cluster, "a", Outcome::Unsure);
    assert_eq!(reserve(&cluster, "a").unwrap(), first);
    // Two at once: the first failure leaves the devices to the second.
    assert_eq!(reserve(&cluster, "a").unwrap(), first);
    finish(&cluster, "a", Outcome::Failed);
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    finish(&cluster, "a", Outcome::Bound);
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("0,1")));
    assert_eq!(reserve(&cluster, "a").unwrap(), BindGrant::AlreadyBound);
}

#[test]
fn failed_repetition_keeps_devices_of_an_unsure_bind() {
    for first in [Outcome::Unsure, Outcome::Bound] {
        // One after the other, and both at once.
        for both in [false, true] {
            let cluster = one_node();
            cluster.pod(&pod("a", 2));
            reserve(&cluster, "a").unwrap();
            if both {
                reserve(&cluster, "a").unwrap();
            }
            finish(&cluster, "a", first);
            if !both {
                reserve(&cluster, "a").unwrap();
            }
            finish(&cluster, "a", Outcome::Failed);
            assert_eq!(cluster.free("n"), "2,3,4,5,6,7", "{first:?}, both at once: {both}");
        }
    }
}

#[test]
fn grant_is_not_repeated_after_kubelet_gave_it_away() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2)).pod(&pod("b", 2));
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "0,1");
    // Nobody knows how it ended, and those of another fell sick just when kubelet let it in.
    finish(&cluster, "a", Outcome::Unsure);
    cluster.pod(&bound(pod("b", 2), "n", 1, Some("2,3")));
    let mut truth = gpu_node("n", &bridged());
    truth["status"]["holders"] = json!([holder("n", "b", Some("b"), "0,1")]);
    cluster.inventory(&truth);
    let error = reserve(&cluster, "a").unwrap_err();
    assert_eq!(error.to_string(), "node n: kubelet has given what the pod was granted to another");
    // Once the first Binding cannot be carried out any more, it gets others.
    cluster.wait(70);
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "2,3");
}

#[test]
fn grant_is_not_repeated_on_quarantined_devices() {
    for told in [false, true] {
        let cluster = one_node();
        cluster.pod(&pod("a", 2));
        reserve(&cluster, "a").unwrap();
        finish(&cluster, "a", Outcome::Unsure);
        let other = bound(pod("b", 2), "n", 1, Some("2,3"));
        cluster.pod(&other);
        let held = holder("n", "b", Some("b"), "0,1");
        let mut truth = gpu_node("n", &bridged());
        truth["status"]["holders"] = json!([held.clone()]);
        cluster.inventory(&truth).gone(&other);
        if told {
            // The quarantine is over, and the plugin says that a process is still there.
            truth["status"]["holders"] = json!([quarantined(held)]);
            cluster.inventory(&truth).wait(20);
        }
        assert!(
            matches!(reserve(&cluster, "a"), Err(BindError::NotFree { .. })),
            "told by the plugin: {told}"
        );
        let repeated = cluster.store.update(|index| index.may_repeat(&target("a", "n")));
        assert!(matches!(repeated, Err(BindError::NotFree { .. })));
        cluster.inventory(&gpu_node("n", &bridged())).wait(20);
        assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "0,1", "it is over");
        let repeated = cluster.store.update(|index| index.may_repeat(&target("a", "n")));
        assert_eq!(repeated, Ok(()));
    }
}

#[test]
fn grant_of_an_unlisted_device_is_not_repeated() {
    // The GpuNode does not list a device for a while. Which pod kubelet has given it to is not known either.
    let cluster = one_node();
    cluster.pod(&pod("a", 2));
    let first = reserve(&cluster, "a").unwrap();
    finish(&cluster, "a", Outcome::Unsure);
    let mut truth = gpu_node("n", &bridged());
    truth["status"]["devices"].as_array_mut().unwrap().remove(1);
    truth["status"]["holders"] = json!([holder("n", "b", Some("b"), "1")]);
    cluster.inventory(&truth);
    assert!(matches!(reserve(&cluster, "a"), Err(BindError::NotFree { .. })));
    let may_repeat = || cluster.store.update(|index| index.may_repeat(&target("a", "n")));
    assert!(matches!(may_repeat(), Err(BindError::NotFree { .. })));
    cluster.store.update(|index| index.inventory_deleted("n"));
    assert!(matches!(may_repeat(), Err(BindError::NotFree { .. })), "the GpuNode is gone");
    cluster.inventory(&gpu_node("n", &bridged()));
    assert_eq!(reserve(&cluster, "a").unwrap(), first);
    assert_eq!(may_repeat(), Ok(()));
}

#[test]
fn bind_is_repeatable_if_only_the_plugin_shows_the_pod() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2));
    let first = reserve(&cluster, "a").unwrap();
    finish(&cluster, "a", Outcome::Unsure);
    let mut truth = gpu_node("n", &bridged());
    truth["status"]["holders"] = json!([holder("n", "a", Some("a"), "0,1")]);
    cluster.inventory(&truth);
    assert_eq!(reserve(&cluster, "a").unwrap(), first);
}

#[test]
fn a_bind_that_makes_no_sense_is_refused_with_its_reason() {
    let cluster = one_node();
    cluster.pod(&pod("a", 2)).pod(&pod("big", 9)).node("foreign", 8);
    cluster.inventory(&gpu_node("unlisted", &bridged()));
    let on = |pod: &str, node: &str| {
        let result = cluster.store.update(|index| index.reserve(&target(pod, node), None));
        result.map_err(|error| error.to_string())
    };
    assert_eq!(on("nobody", "n").unwrap_err(), "pod nobody is not known");
    assert_eq!(on("a", "nowhere").unwrap_err(), "node nowhere does not exist");
    assert_eq!(on("a", "unlisted").unwrap_err(), "node unlisted does not exist");
    assert_eq!(on("big", "n").unwrap_err(), "node n: 8 of 8 GPUs free, 9 asked");
    assert_eq!(on("a", "foreign"), Ok(BindGrant::Plain));
    let mut renamed = target("a", "n");
    renamed.name = "b".to_owned();
    let error = cluster.store.update(|index| index.reserve(&renamed, None)).unwrap_err();
    assert_eq!(error.to_string(), "pod UID a is that of default/a, not of default/b");
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn bind_takes_what_was_held_for_the_pod() {
    let cluster = one_node();
    let now = cluster.now();
    cluster.pod(&pod("a", 2)).pod(&pod("b", 2));
    for pod in ["a", "b"] {
        cluster.store.update(|index| index.hold(now, &pod.into(), &request(2), "n"));
    }
    assert_eq!(cluster.open("n"), "4,5,6,7");
    // Binds arrive in any order: each gets its own.
    assert_eq!(granted(&reserve(&cluster, "b").unwrap()), "2,3");
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "0,1");
}

#[test]
fn what_was_held_among_other_resources_is_not_granted_unseen() {
    const MIG: &str = "nvidia.com/mig-1g.10gb";
    let cluster = one_node();
    let cut = cut_node("n", &bridged(), MIG, 1, &[(7, 0), (7, 1)]);
    cluster.inventory(&cut).pod(&pod_of("a", MIG, 1));
    let now = cluster.now();
    cluster.store.update(|index| index.hold(now, &"a".into(), &request_of(MIG, 1), "n"));
    // Another resource comes before it, and kubelet has given the device that was held to somebody else.
    let terms = json!({"name": "nvidia.com/gpu.shared", "kind": "Shared", "replicas": 2});
    let replicas =
        (0..2).map(|replica| json!({"id": format!("GPU-n-6::{replica}"), "gpu": 6, "replica": replica}));
    let mut shared = publish(cut, terms, replicas.collect());
    shared["status"]["holders"] = json!([{
        "namespace": "default", "pod": "b", "uid": "b", "resource": MIG, "devices": ["MIG-n-7-0"],
        "provenance": "PodResources", "state": "Live",
    }]);
    cluster.inventory(&shared);
    let BindGrant::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
        panic!("nothing is granted");
    };
    let grant: gantry_api::Grant = serde_json::from_str(&annotation).unwrap();
    assert_eq!(grant.held(MIG), ["MIG-n-7-1".into()].into());
}

#[test]
fn a_grant_for_several_containers_is_whole() {
    let cluster = one_node();
    let mut several = pod("a", 2);
    several["spec"]["initContainers"] = json!([
        {"name": "fetch", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        {"name": "log", "restartPolicy": "Always", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
    ]);
    cluster.pod(&several);
    let reserved = reserve(&cluster, "a").unwrap();
    let BindGrant::Grant { annotation, .. } = &reserved else {
        panic!("{reserved:?}");
    };
    let grant = gantry_api::Grant::parse(annotation, &"a".into(), &"n".into()).unwrap();
    let names: Vec<&str> = grant.containers.iter().map(|container| container.name.as_str()).collect();
    assert_eq!(names, ["fetch", "log", "main"]);
    assert_eq!(set(&granted(&reserved)).len(), 3);
    cluster.pod(&bound(several, "n", 1, None));
    assert_eq!(set(&cluster.free("n")).len(), 5);
}

#[test]
fn pod_with_ambiguous_containers_is_bound_and_counted() {
    let cluster = one_node();
    let mut mixed = pod("a", 2);
    mixed["spec"]["initContainers"] =
        json!([{"name": "fetch", "resources": {"limits": {"nvidia.com/gpu": "3"}}}]);
    mixed["spec"]["containers"] = json!([
        {"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}}},
        {"name": "b", "resources": {"limits": {"nvidia.com/gpu": "4"}}},
    ]);
    cluster.pod(&mixed);
    let BindGrant::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
        panic!("no grant");
    };
    assert_eq!(set(&cluster.free("n")).len(), 2);
    mixed["metadata"]["annotations"] = json!({"gantry.dev/grant": &*annotation});
    cluster.pod(&bound(mixed, "n", 1, None));
    assert_eq!(set(&cluster.free("n")).len(), 2);
    assert!(cluster.store.read(|index| index.faults().is_empty()));
}
