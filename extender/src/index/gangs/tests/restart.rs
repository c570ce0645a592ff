//! What lasts when a process ends or stands down, and what does not.

use std::sync::Arc;

use gantry_api::GangStatus;

use super::*;
use crate::answers;
use crate::index::Index;

#[test]
fn who_stands_down_keeps_no_places_and_plans_anew_when_it_leads() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    cluster.store.update(|index| index.stand_down());
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    cluster.store.update(|index| index.lead());
    assert_eq!((cluster.free("m"), cluster.free("n")), (String::new(), String::new()));
}

#[test]
fn what_was_decided_before_a_restart_is_kept_and_finished() {
    let pods = members("a", 2, 8);
    let (nodes, object_name, status) = decided(&pods);
    assert!(status.decision.is_some());

    let after = restarted(&object_name, &status, &pods);
    assert_eq!((after.free("m"), after.free("n")), (String::new(), String::new()));
    for (uid, planned) in ["a-0", "a-1"].iter().zip(&nodes) {
        assert_eq!(node(&after, uid), *planned);
        assert_eq!(granted(&admit(&after, uid, planned).unwrap()).len(), 8);
    }
}

/// Decides a gang of two members: their nodes, the name of its Gang and the status that is written.
fn decided(pods: &[Value]) -> ([String; 2], String, GangStatus) {
    let cluster = two_nodes();
    create(&cluster, pods);
    let nodes = [node(&cluster, "a-0"), node(&cluster, "a-1")];
    for (uid, node) in ["a-0", "a-1"].iter().zip(&nodes) {
        admit(&cluster, uid, node).unwrap();
    }
    commit(&cluster);
    let statuses = cluster.store.update(|index| index.take_statuses());
    let (key, status) = statuses.into_iter().next_back().unwrap();
    (nodes, key.object_name(), status)
}

/// Another process, which finds nodes `m` and `n`, the status of a gang and its pods.
fn restarted(object_name: &str, status: &GangStatus, pods: &[Value]) -> Cluster {
    let after = Cluster::cold(Options::default());
    after.list(Source::Gangs, |cluster| {
        let object = Object {
            uid: "g".into(),
            resource_version: "1".into(),
            ours: true,
            spec: Ok(GangSpec::default()),
            status: status.clone(),
        };
        cluster.store.update(|index| index.gang_object_seen("default", object_name, object));
    });
    after.list(Source::Nodes, |cluster| {
        cluster.node("m", 8).node("n", 8);
    });
    after.list(Source::GpuNodes, |cluster| {
        cluster.inventory(&gpu_node("m", &bridged())).inventory(&gpu_node("n", &bridged()));
    });
    after.list(Source::Pods, |cluster| {
        for pod in pods {
            cluster.pod(pod);
        }
    });
    after
}

/// Why a gang is where it is: known to the next process by the Gang object, and to each member's annotation in short.
#[test]
fn comparison_of_a_gang_outlives_a_restart() {
    let pods = members("a", 2, 8);
    let (nodes, object_name, status) = decided(&pods);
    // As the object is written and read.
    let status: GangStatus = serde_json::from_str(&serde_json::to_string(&status).unwrap()).unwrap();
    let compared = status.compared.clone().unwrap();
    assert_eq!(
        compared.to_string(),
        "None of 2 nodes holds the gang, which uses 2; next m: 1 of 2 members fit"
    );

    let after = restarted(&object_name, &status, &pods);
    let view = after.store.read(|index| index.gang_view("default", "a")).unwrap();
    assert_eq!(view.compared.as_ref(), Some(&compared));
    let BindStep::Member(BindGrant::Grant { placement, .. }) = admit(&after, "a-0", &nodes[0]).unwrap()
    else {
        panic!("no grant");
    };
    let gang = placement.gang.as_ref().unwrap();
    assert_eq!(gang.level.as_ref().and_then(|level| level.chosen.as_deref()), Some("cluster"));
    let report = answers::gang(&after.store, &[], "default", "a").unwrap();
    assert_eq!(report.gang.status.unwrap().compared.as_ref(), Some(&compared));
    after.pod(&bound(pods[0].clone(), &nodes[0], 1, Some("0-7")));
    let report = answers::pod(&after.store, &["nvidia.com/gpu"], "default", "a-0").unwrap();
    assert_eq!(report.gang_compared.as_ref(), Some(&compared));
}

#[test]
fn member_with_a_pending_bind_keeps_its_reservation() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    let nodes = [node(&cluster, "a-0"), node(&cluster, "a-1")];
    for (uid, node) in ["a-0", "a-1"].iter().zip(&nodes) {
        admit(&cluster, uid, node).unwrap();
    }
    commit(&cluster);
    write_down(&cluster);
    let first = granted(&admit(&cluster, "a-0", &nodes[0]).unwrap());
    let (now, sent) = (cluster.now(), target("a-0", &nodes[0]));
    cluster.store.update(|index| {
        index.bind_ended(&"a-0".into(), BindEnd::Unsure);
        index.finish(now, &sent, Outcome::Unsure);
    });
    cluster.store.update(|index| index.stand_down());
    cluster.store.update(|index| index.lead());
    // kube-scheduler offers it only where the other is to go.
    let other = cluster.store.update(|index| {
        let node = NodeName::from(nodes[1].as_str());
        index.answer(&"a-0".into(), &|offered| *offered == node)
    });
    assert!(matches!(other, Answer::Wait(_)), "{other:?}");
    assert_eq!(granted(&admit(&cluster, "a-0", &nodes[0]).unwrap()), first);
}

/// A pod of JobSet `js`, of an attempt, with its completion index.
fn of_attempt(attempt: u32, index: u32) -> Value {
    let mut pod = pod(&format!("js-{attempt}-{index}"), 8);
    pod["metadata"]["labels"] = json!({
        "jobset.sigs.k8s.io/jobset-name": "js",
        "jobset.sigs.k8s.io/jobset-uid": "u",
        "jobset.sigs.k8s.io/restart-attempt": attempt.to_string(),
        "jobset.sigs.k8s.io/replicatedjob-name": "w",
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": index.to_string(),
    });
    pod
}

/// A JobSet restarts while a single pod waits for one GPU: it gets none of the JobSet's, and the next attempt gets all.
#[test]
fn restarted_job_set_keeps_its_devices_from_a_single_pod() {
    let cluster = two_nodes();
    let object = json!({"metadata": {"name": "js", "uid": "u"}, "spec": {"replicatedJobs": [
        {"name": "w", "replicas": 1, "template": {"spec": {"parallelism": 2, "completions": 2}}},
    ]}});
    let owner =
        OwnerRef { kind: OwnerKind::JobSet, namespace: "default".into(), name: "js".into(), part: "".into() };
    let read = || Some(Arc::new(integrations::read(OwnerKind::JobSet, "", &object)));
    let attempts = [0, 1].map(|attempt| [0, 1].map(|index| of_attempt(attempt, index)));
    for pod in &attempts[0] {
        cluster.pod(pod);
    }
    cluster.store.update(|index| index.owner_seen(&owner, read()));
    cluster.wait(2);
    let before = bind_all(&cluster, &attempts[0]);
    write_down(&cluster);
    for (pod, node) in attempts[0].iter().zip(&before) {
        cluster.gone(&bound(pod.clone(), node, 1, None));
    }
    cluster.wait(10);
    cluster.pod(&pod("single", 1));
    for node in ["m", "n"] {
        assert!(admit(&cluster, "single", node).is_err(), "{node}");
    }
    let totals = cluster.store.read(Index::gang_totals);
    assert_eq!((totals.awaiting_restart, totals.devices, totals.continuations.kept), (1, 16, 1));
    for pod in &attempts[1] {
        cluster.pod(pod);
    }
    assert_eq!(bind_all(&cluster, &attempts[1]), before);
    let totals = cluster.store.read(Index::gang_totals);
    assert_eq!((totals.awaiting_restart, totals.continuations.continued), (0, 1));
    assert!(admit(&cluster, "single", "m").is_err());
}
