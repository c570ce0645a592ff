//! UnschedulablePod pods are woken when they may go, and not before.

use super::*;

/// Whose turn it is now, by name.
fn woken(cluster: &Cluster) -> Vec<String> {
    let woken = cluster.store.update(|index| index.take_activatable(10));
    woken.into_iter().map(|(uid, _)| uid.to_string()).collect()
}

#[test]
fn new_foreign_node_activates_unschedulable_pod() {
    for (foreign, woken) in [(ForeignNodes::Allow, 1), (ForeignNodes::Refuse, 0)] {
        let cluster = Cluster::new(Options { foreign, ..Options::default() });
        cluster.add("n", &bridged());
        cluster.pod(&bound(pod("holder", 8), "n", 1, Some("0-7")));
        cluster.park("a", request(2));
        cluster.node("small", 1);
        let take = || cluster.store.update(|index| index.take_activatable(10)).len();
        assert_eq!(take(), 0, "{foreign:?}");
        cluster.node("new", 8);
        assert_eq!(take(), woken, "{foreign:?}");
    }
}

#[test]
fn highest_priority_is_activated_first() {
    let cluster = one_node();
    let holder = bound(pod("holder", 8), "n", 1, Some("0-7"));
    cluster.pod(&holder);
    for (name, priority) in [("low", 0), ("high", 10), ("higher", 10)] {
        let mut waits = pod(name, 4);
        waits["spec"]["priority"] = json!(priority);
        cluster.pod(&waits);
        cluster.park(name, request(4));
    }
    cluster.gone(&holder);
    cluster.wait(6);
    let woken = || woken(&cluster);
    assert_eq!(woken(), ["high", "higher"]);
    assert_eq!(woken(), ["low"]);
    assert_eq!(woken(), [""; 0]);
}

#[test]
fn a_parked_pod_is_woken_when_gpus_come_free_that_fit_it() {
    let cluster = one_node();
    let holder = bound(pod("a", 6), "n", 1, Some("0-5"));
    cluster.pod(&holder);
    cluster.park("fits", request(4));
    cluster.park("too big", request(9));
    let woken = || woken(&cluster);
    assert_eq!(woken(), [""; 0]);
    cluster.gone(&holder);
    assert_eq!(woken(), [""; 0]);
    cluster.wait(6);
    assert_eq!(woken(), ["fits"]);
    assert_eq!(woken(), [""; 0]);
    // One refused after the gain was published has seen it.
    cluster.park("fits", request(4));
    assert_eq!(woken(), [""; 0]);
}

#[test]
fn refusal_on_outdated_snapshot_is_activated_by_any_gain() {
    let cluster = one_node();
    cluster.add("m", &bridged());
    let [holder, other] = ["n", "m"].map(|node| bound(pod(&format!("on {node}"), 8), node, 1, Some("0-7")));
    cluster.pod(&holder).pod(&other);
    let generation = cluster.store.snapshot().generation;
    // Nobody is parked yet, so that nobody remembers where.
    cluster.gone(&other).wait(6);
    for (name, devices) in [("small", 2), ("alike", 2), ("large", 9)] {
        let parked = UnschedulablePod {
            namespace: "default".into(),
            name: name.into(),
            request: request(devices),
            generation,
        };
        cluster.store.update(|index| index.add_unschedulable(name.into(), parked));
    }
    assert_eq!(woken(&cluster), ["alike", "small"]);
    assert_eq!(woken(&cluster), [""; 0]);
    // What is remembered of one node is forgotten with its turn.
    cluster.park("again", request(2));
    cluster.gone(&holder).wait(6);
    assert_eq!(woken(&cluster), ["again"]);
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
fn node_becoming_ready_activates_unschedulable_pods() {
    let cluster = one_node();
    cluster.inventory(&with_ready("False", "Stopped"));
    assert_eq!(cluster.free("n"), "");
    cluster.pod(&pod("a", 2));
    assert_eq!(reserve(&cluster, "a").unwrap_err().to_string(), "node n: GPU plugin is not ready: Stopped");
    cluster.park("a", request(2));
    cluster.inventory(&with_ready("True", "Degraded"));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    assert_eq!(cluster.store.update(|index| index.take_activatable(10)).len(), 1);
    assert_eq!(granted(&reserve(&cluster, "a").unwrap()), "0,1");
}

#[test]
fn pods_keep_their_devices_while_the_plugin_is_down() {
    let cluster = one_node();
    cluster.pod(&bound(pod("a", 2), "n", 1, None));
    cluster.inventory(&with_ready("False", "NotRegistered"));
    assert_eq!(cluster.free("n"), "");
    assert_eq!(cluster.store.read(|index| index.totals().1.held), 2);
    // A repeated bind is refused, too.
    cluster.inventory(&with_ready("True", "Serving")).pod(&pod("b", 2));
    reserve(&cluster, "b").unwrap();
    finish(&cluster, "b", Outcome::Unsure);
    cluster.inventory(&with_ready("False", "NotRegistered"));
    assert!(matches!(reserve(&cluster, "b"), Err(BindError::NotFree { .. })));
}

#[test]
fn failed_activation_waits_for_a_gain_or_its_retry() {
    let cluster = one_node();
    let holder = bound(pod("holder", 8), "n", 1, Some("0-7"));
    cluster.pod(&holder);
    for name in ["a", "gone", "placed"] {
        cluster.pod(&pod(name, 2));
        cluster.park(name, request(2));
    }
    let mut ended = holder;
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    let woken = cluster.store.update(|index| index.take_activatable(10));
    assert_eq!(woken.len(), 3);
    cluster.gone(&pod("gone", 2)).pod(&bound(pod("placed", 2), "n", 2, Some("0,1")));
    let again: Vec<_> = woken
        .into_iter()
        .filter_map(|(uid, parked)| {
            let generation = cluster.store.update(|index| index.requeue(uid.clone(), parked))?;
            Some((uid, generation))
        })
        .collect();
    assert_eq!(again.len(), 1);
    let (uid, generation) = &again[0];
    assert_eq!(uid.as_str(), "a");
    // It is no reason to look at every pod again at once.
    assert!(!cluster.store.read(|index| index.has_gains()));
    assert!(cluster.store.update(|index| index.take_activatable(10)).is_empty());
    // kube-scheduler asks for it by itself meanwhile, and it is refused anew: that is as good as a wake.
    assert!(cluster.store.update(|index| index.take_requeued(uid, generation - 1)).is_none());
    assert!(cluster.store.update(|index| index.take_requeued(uid, *generation)).is_some());
    assert!(!cluster.store.read(|index| index.is_unschedulable("a")));
}

#[test]
fn changed_max_request_activates_refused_pod() {
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
    cluster.park("a", request_of(shared, 2));
    let woken = || cluster.store.update(|index| index.take_activatable(10)).len();
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
    let parked = UnschedulablePod {
        namespace: "default".into(),
        name: "late".into(),
        request: request(4),
        generation: before,
    };
    cluster.store.update(|index| index.add_unschedulable("late".into(), parked));
    assert_eq!(cluster.store.update(|index| index.take_activatable(10)).len(), 1);
}
