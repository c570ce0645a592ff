mod parts;
mod world;

use std::time::Duration;

use crate::decide::{ForeignNodes, Options};
use crate::fixtures::{
    Cluster, bound, bridged, cut_node, gpu_node, holder, pod, pod_of, publish, quarantined, request,
    request_of, set, shared_node, target,
};
use crate::index::{BindError, Outcome, Parked, Reserved, Source};
use serde_json::json;

fn one_node() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    cluster
}

fn reserve(cluster: &Cluster, pod: &str) -> Result<Reserved, BindError> {
    cluster
        .store
        .update(|index| index.reserve(&target(pod, "n"), None))
}

fn finish(cluster: &Cluster, pod: &str, outcome: Outcome) {
    let now = cluster.now();
    cluster
        .store
        .update(|index| index.finish(now, &target(pod, "n"), outcome));
}

/// The GPUs of a reservation's grant.
fn granted(reserved: &Reserved) -> String {
    let Reserved::Grant { annotation, .. } = reserved else {
        panic!("{reserved:?}");
    };
    let grant: gantry_api::Grant = serde_json::from_str(annotation).unwrap();
    let held = grant.held("nvidia.com/gpu");
    let gpus: gantry_topology::GpuSet = held
        .iter()
        .map(|id| id.as_str().rsplit('-').next().unwrap().parse::<usize>().unwrap())
        .collect();
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
fn a_bind_that_failed_gives_its_devices_back_and_an_unsure_one_does_not() {
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
    assert_eq!(reserve(&cluster, "a").unwrap(), Reserved::AlreadyBound);
}

#[test]
fn a_repeated_bind_that_fails_takes_back_nothing_of_the_first_that_may_have_been_carried_out() {
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
            assert_eq!(
                cluster.free("n"),
                "2,3,4,5,6,7",
                "{first:?}, both at once: {both}"
            );
        }
    }
}

#[test]
fn a_grant_whose_devices_kubelet_gave_to_another_is_not_tried_again() {
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
    assert_eq!(
        error.to_string(),
        "node n: kubelet has given what the pod was granted to another"
    );
    // Once the first Binding cannot be carried out any more, it gets others.
    cluster.wait(70);
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "2,3");
}

#[test]
fn a_grant_whose_devices_the_processes_of_a_pod_that_is_gone_may_have_is_not_tried_again() {
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
fn a_bind_whose_pod_the_plugin_has_seen_before_the_watch_may_be_repeated() {
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
        let result = cluster
            .store
            .update(|index| index.reserve(&target(pod, node), None));
        result.map_err(|error| error.to_string())
    };
    assert_eq!(on("nobody", "n").unwrap_err(), "pod nobody is not known");
    assert_eq!(on("a", "nowhere").unwrap_err(), "node nowhere does not exist");
    assert_eq!(on("a", "unlisted").unwrap_err(), "node unlisted does not exist");
    assert_eq!(on("big", "n").unwrap_err(), "node n: 8 of 8 GPUs free, 9 asked");
    assert_eq!(on("a", "foreign"), Ok(Reserved::Plain));
    let mut renamed = target("a", "n");
    renamed.name = "b".to_owned();
    let error = cluster
        .store
        .update(|index| index.reserve(&renamed, None))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "pod UID a is that of default/a, not of default/b"
    );
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn bind_takes_what_was_held_for_the_pod() {
    let cluster = one_node();
    let now = cluster.now();
    cluster.pod(&pod("a", 2)).pod(&pod("b", 2));
    for pod in ["a", "b"] {
        cluster
            .store
            .update(|index| index.hold(now, &pod.into(), &request(2), "n"));
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
    cluster
        .store
        .update(|index| index.hold(now, &"a".into(), &request_of(MIG, 1), "n"));
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
    let Reserved::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
        panic!("nothing is granted");
    };
    let grant: gantry_api::Grant = serde_json::from_str(&annotation).unwrap();
    assert_eq!(grant.held(MIG), ["MIG-n-7-1".into()].into());
}

#[test]
fn what_a_vanished_pod_held_stays_taken_though_it_is_shared_now() {
    let cluster = one_node();
    let running = bound(pod("a", 1), "n", 1, Some("0"));
    cluster.pod(&running).gone(&running);
    assert_eq!(cluster.free("n"), "1,2,3,4,5,6,7");
    for resource in ["nvidia.com/gpu", "nvidia.com/gpu.shared"] {
        cluster.inventory(&shared_node("n", &bridged(), resource, 2));
        assert_eq!(
            cluster.free_of("n", resource),
            "2,3,4,5,6,7,8,9,10,11,12,13,14,15",
            "{resource}"
        );
    }
    cluster.wait(6);
    assert_eq!(
        cluster.free_of("n", "nvidia.com/gpu.shared"),
        "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15"
    );
}

#[test]
fn a_resource_of_others_that_counts_bytes_is_in_nobodys_way() {
    let cluster = one_node();
    let mut asking = pod("a", 2);
    asking["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "16Gi".into();
    cluster.pod(&asking);
    let Reserved::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
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
        cluster
            .store
            .update(|index| index.hold(now, &pod.into(), &request(2), "n"));
    }
    cluster.gone(&pod("a", 2));
    assert_eq!(cluster.open("n"), "0,1,4,5,6,7");
    cluster.wait(31);
    assert_eq!(cluster.open("n"), "0,1,2,3,4,5,6,7");
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
fn a_quarantine_goes_on_until_the_plugin_could_write_again_after_the_api_server_answered_nobody() {
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
fn a_pod_deleted_after_all_its_containers_ended_needs_no_quarantine() {
    let cluster = one_node();
    let mut running = bound(pod("a", 2), "n", 1, Some("0,1"));
    cluster.pod(&running);
    running["status"]["containerStatuses"] = json!([{"state": {"terminated": {}}}]);
    cluster.gone(&running);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_bound_pod_that_a_list_does_not_name_is_gone_and_quarantined() {
    let cluster = one_node();
    cluster
        .pod(&bound(pod("a", 2), "n", 1, Some("0,1")))
        .pod(&pod("b", 2));
    reserve(&cluster, "b").unwrap();
    finish(&cluster, "b", Outcome::Bound);
    cluster.wait(1).list(Source::Pods, |_| {});
    assert_eq!(cluster.free("n"), "4,5,6,7");
    cluster.wait(6);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[test]
fn a_bind_that_ended_while_a_list_was_read_is_not_taken_for_gone() {
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
fn a_bind_whose_pod_vanished_while_it_was_in_flight_does_not_keep_its_devices_for_ever() {
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
fn a_pod_parked_where_foreign_nodes_pass_is_woken_by_a_new_foreign_node() {
    for (foreign, woken) in [(ForeignNodes::Allow, 1), (ForeignNodes::Refuse, 0)] {
        let cluster = Cluster::new(Options {
            foreign,
            ..Options::default()
        });
        cluster.add("n", &bridged());
        cluster.pod(&bound(pod("holder", 8), "n", 1, Some("0-7")));
        let parked = Parked {
            namespace: "default".into(),
            name: "a".into(),
            request: request(2),
            generation: cluster.store.snapshot().generation,
        };
        cluster.store.update(|index| index.park("a".into(), parked));
        cluster.node("small", 1);
        let take = || cluster.store.update(|index| index.take_wakeable(10)).len();
        assert_eq!(take(), 0, "{foreign:?}");
        cluster.node("new", 8);
        assert_eq!(take(), woken, "{foreign:?}");
    }
}

#[test]
fn of_parked_pods_that_fit_those_of_the_highest_priority_are_woken_first() {
    let cluster = one_node();
    let holder = bound(pod("holder", 8), "n", 1, Some("0-7"));
    cluster.pod(&holder);
    for (name, priority) in [("low", 0), ("high", 10), ("higher", 10)] {
        let mut waits = pod(name, 4);
        waits["spec"]["priority"] = json!(priority);
        cluster.pod(&waits);
        let parked = Parked {
            namespace: "default".into(),
            name: name.into(),
            request: request(4),
            generation: cluster.store.snapshot().generation,
        };
        cluster.store.update(|index| index.park(name.into(), parked));
    }
    cluster.gone(&holder);
    cluster.wait(6);
    let woken = || {
        let woken = cluster.store.update(|index| index.take_wakeable(10));
        woken
            .into_iter()
            .map(|(uid, _)| uid.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(woken(), ["high", "higher"]);
    assert_eq!(woken(), ["low"]);
    assert_eq!(woken(), [""; 0]);
}

#[test]
fn a_parked_pod_is_woken_when_gpus_come_free_that_fit_it() {
    let cluster = one_node();
    let holder = bound(pod("a", 6), "n", 1, Some("0-5"));
    cluster.pod(&holder);
    let park = |name: &str, gpus| {
        let parked = Parked {
            namespace: "default".into(),
            name: name.into(),
            request: request(gpus),
            generation: cluster.store.snapshot().generation,
        };
        cluster.store.update(|index| index.park(name.into(), parked));
    };
    park("fits", 4);
    park("too big", 9);
    let woken = || {
        let woken = cluster.store.update(|index| index.take_wakeable(10));
        woken
            .into_iter()
            .map(|(uid, _)| uid.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(woken(), [""; 0]);
    cluster.gone(&holder);
    assert_eq!(woken(), [""; 0]);
    cluster.wait(6);
    assert_eq!(woken(), ["fits"]);
    assert_eq!(woken(), [""; 0]);
    // One refused after the gain was published has seen it.
    park("fits", 4);
    assert_eq!(woken(), [""; 0]);
}

/// The GpuNode of `n` with a `Ready` condition.
fn with_ready(status: &str, reason: &str) -> serde_json::Value {
    let mut node = gpu_node("n", &bridged());
    node["status"]["conditions"] = json!([{
        "type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    node
}

#[test]
fn a_node_whose_plugin_does_not_serve_has_nothing_free_and_wakes_who_waits_when_it_does() {
    let cluster = one_node();
    cluster.inventory(&with_ready("False", "Stopped"));
    assert_eq!(cluster.free("n"), "");
    cluster.pod(&pod("a", 2));
    assert_eq!(
        reserve(&cluster, "a").unwrap_err().to_string(),
        "node n: GPU plugin is not ready: Stopped"
    );
    let parked = Parked {
        namespace: "default".into(),
        name: "a".into(),
        request: request(2),
        generation: cluster.store.snapshot().generation,
    };
    cluster.store.update(|index| index.park("a".into(), parked));
    cluster.inventory(&with_ready("True", "Degraded"));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    assert_eq!(cluster.store.update(|index| index.take_wakeable(10)).len(), 1);
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "0,1");
}

#[test]
fn pods_keep_what_they_are_held_to_take_while_the_plugin_does_not_serve() {
    let cluster = one_node();
    cluster.pod(&bound(pod("a", 2), "n", 1, None));
    cluster.inventory(&with_ready("False", "NotRegistered"));
    assert_eq!(cluster.free("n"), "");
    assert_eq!(cluster.store.read(|index| index.totals().1.held), 2);
    // A repeated bind is refused, too.
    cluster
        .inventory(&with_ready("True", "Serving"))
        .pod(&pod("b", 2));
    reserve(&cluster, "b").unwrap();
    finish(&cluster, "b", Outcome::Unsure);
    cluster.inventory(&with_ready("False", "NotRegistered"));
    assert!(matches!(reserve(&cluster, "b"), Err(BindError::NotFree { .. })));
}

#[test]
fn a_pod_whose_wake_failed_waits_for_the_next_gain_or_its_own_next_try() {
    let cluster = one_node();
    let holder = bound(pod("holder", 8), "n", 1, Some("0-7"));
    cluster.pod(&holder);
    for name in ["a", "gone", "placed"] {
        let parked = Parked {
            namespace: "default".into(),
            name: name.into(),
            request: request(2),
            generation: cluster.store.snapshot().generation,
        };
        cluster.pod(&pod(name, 2));
        cluster.store.update(|index| index.park(name.into(), parked));
    }
    let mut ended = holder;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    let woken = cluster.store.update(|index| index.take_wakeable(10));
    assert_eq!(woken.len(), 3);
    cluster
        .gone(&pod("gone", 2))
        .pod(&bound(pod("placed", 2), "n", 2, Some("0,1")));
    let again: Vec<_> = woken
        .into_iter()
        .filter_map(|(uid, parked)| {
            let generation = cluster.store.update(|index| index.repark(uid.clone(), parked))?;
            Some((uid, generation))
        })
        .collect();
    assert_eq!(again.len(), 1);
    let (uid, generation) = &again[0];
    assert_eq!(uid.as_str(), "a");
    // It is no reason to look at every pod again at once.
    assert!(!cluster.store.read(|index| index.has_gains()));
    assert!(cluster.store.update(|index| index.take_wakeable(10)).is_empty());
    // kube-scheduler asks for it by itself meanwhile, and it is refused anew: that is as good as a wake.
    assert!(
        cluster
            .store
            .update(|index| index.retake(uid, generation - 1))
            .is_none()
    );
    assert!(
        cluster
            .store
            .update(|index| index.retake(uid, *generation))
            .is_some()
    );
    assert!(!cluster.store.read(|index| index.is_parked("a")));
}

#[test]
fn a_pod_that_asks_for_too_many_at_once_is_woken_when_the_terms_change_and_not_before() {
    let shared = "nvidia.com/gpu.shared";
    let node = |max: serde_json::Value| {
        let mut node = shared_node("n", &bridged(), shared, 2);
        node["status"]["resources"][0]["maxRequest"] = max;
        node
    };
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 16);
    let mut one_sick = node(1.into());
    one_sick["status"]["devices"][0]["healthy"] = false.into();
    cluster.inventory(&one_sick);
    let parked = Parked {
        namespace: "default".into(),
        name: "a".into(),
        request: request_of(shared, 2),
        generation: cluster.store.snapshot().generation,
    };
    cluster.store.update(|index| index.park("a".into(), parked));
    let woken = || cluster.store.update(|index| index.take_wakeable(10)).len();
    cluster.inventory(&node(1.into()));
    assert_eq!(woken(), 0);
    cluster.inventory(&node(json!(null)));
    assert_eq!(woken(), 1);
}

#[test]
fn a_pod_parked_on_an_outdated_snapshot_is_woken() {
    let cluster = one_node();
    let holder = bound(pod("a", 8), "n", 1, Some("0-7"));
    cluster.pod(&holder);
    let before = cluster.store.snapshot().generation;
    let mut ended = holder;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    let parked = Parked {
        namespace: "default".into(),
        name: "late".into(),
        request: request(4),
        generation: before,
    };
    cluster.store.update(|index| index.park("late".into(), parked));
    assert_eq!(cluster.store.update(|index| index.take_wakeable(10)).len(), 1);
}

#[test]
fn numbers_of_nodes_that_are_gone_are_used_again() {
    let cluster = one_node();
    let now = cluster.now();
    cluster
        .store
        .update(|index| index.hold(now, &"a".into(), &request(2), "n"));
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
    let Reserved::Grant { annotation, .. } = &reserved else {
        panic!("{reserved:?}");
    };
    let grant = gantry_api::Grant::parse(annotation, &"a".into(), &"n".into()).unwrap();
    let names: Vec<&str> = grant
        .containers
        .iter()
        .map(|container| container.name.as_str())
        .collect();
    assert_eq!(names, ["fetch", "log", "main"]);
    assert_eq!(set(&granted(&reserved)).len(), 3);
    cluster.pod(&bound(several, "n", 1, None));
    assert_eq!(set(&cluster.free("n")).len(), 5);
}

#[test]
fn a_pod_whose_containers_no_grant_can_tell_apart_is_bound_and_counted() {
    let cluster = one_node();
    let mut mixed = pod("a", 2);
    mixed["spec"]["initContainers"] =
        json!([{"name": "fetch", "resources": {"limits": {"nvidia.com/gpu": "3"}}}]);
    mixed["spec"]["containers"] = json!([
        {"name": "a", "resources": {"limits": {"nvidia.com/gpu": "2"}}},
        {"name": "b", "resources": {"limits": {"nvidia.com/gpu": "4"}}},
    ]);
    cluster.pod(&mixed);
    let Reserved::Grant { annotation, .. } = reserve(&cluster, "a").unwrap() else {
        panic!("no grant");
    };
    assert_eq!(set(&cluster.free("n")).len(), 2);
    mixed["metadata"]["annotations"] = json!({"gantry.dev/grant": &*annotation});
    cluster.pod(&bound(mixed, "n", 1, None));
    assert_eq!(set(&cluster.free("n")).len(), 2);
    assert!(cluster.store.read(|index| index.faults().is_empty()));
}
