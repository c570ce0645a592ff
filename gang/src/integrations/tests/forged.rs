//! What may stand where a name is expected: annotations and owner references can hold anything, and their text goes into paths of the API
//! server, into logs, and into an answer for every node.

use serde_json::{Value, json};

use super::*;

/// Every way to name a gang, with the place that a fault names.
fn pods(name: &str) -> Vec<(&'static str, Value)> {
    let annotated = |annotation: &str| json!({"metadata": {"annotations": {annotation: name}}});
    let labelled = |label: &str| json!({"metadata": {"labels": {label: name}}});
    let made = |version: &str, kind: &str, name: &str| json!([{"apiVersion": version, "kind": kind, "name": name, "uid": "u", "controller": true}]);
    let mut job = annotated("-");
    job["metadata"]["annotations"] = json!({"gantry.dev/gang-min": "2"});
    job["metadata"]["ownerReferences"] = made("batch/v1", "Job", name);
    let mut training = labelled("training.kubeflow.org/job-name");
    training["metadata"]["ownerReferences"] = made("kubeflow.org/v1", "PyTorchJob", "a");
    let mut ray = labelled("ray.io/cluster");
    ray["metadata"]["ownerReferences"] = made("ray.io/v1", "RayCluster", "a");
    let mut set = labelled("leaderworkerset.sigs.k8s.io/name");
    set["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] = json!("0");
    vec![
        ("spec.schedulingGroup.podGroupName", json!({"spec": {"schedulingGroup": {"podGroupName": name}}})),
        ("spec.workloadRef.name", json!({"spec": {"workloadRef": {"name": name, "podGroup": "g"}}})),
        ("annotation gantry.dev/gang", annotated("gantry.dev/gang")),
        ("label scheduling.x-k8s.io/pod-group", labelled("scheduling.x-k8s.io/pod-group")),
        ("label pod-group.scheduling.sigs.k8s.io", labelled("pod-group.scheduling.sigs.k8s.io")),
        ("label pod-group.scheduling.sigs.k8s.io/name", labelled("pod-group.scheduling.sigs.k8s.io/name")),
        ("annotation scheduling.volcano.sh/group-name", annotated("scheduling.volcano.sh/group-name")),
        ("annotation scheduling.k8s.io/group-name", annotated("scheduling.k8s.io/group-name")),
        ("annotation gang.scheduling.koordinator.sh/name", annotated("gang.scheduling.koordinator.sh/name")),
        ("label kueue.x-k8s.io/pod-group-name", labelled("kueue.x-k8s.io/pod-group-name")),
        ("annotation pod-group-name", annotated("pod-group-name")),
        ("label leaderworkerset.sigs.k8s.io/name", set),
        ("label jobset.sigs.k8s.io/jobset-name", labelled("jobset.sigs.k8s.io/jobset-name")),
        ("annotation jobset.sigs.k8s.io/jobset-name", annotated("jobset.sigs.k8s.io/jobset-name")),
        ("label training.kubeflow.org/job-name", training),
        ("label ray.io/cluster", ray),
        ("metadata.ownerReferences", job),
    ]
}

#[test]
fn invalid_owner_name_is_reported_shortened_and_never_read() {
    let endless = "x".repeat(200_000);
    let wrong = [
        &*endless,
        "?watch=true&x=1",
        "../../../../../../api/v1/namespaces/kube-system/secrets/x",
        "a b",
        "a/b",
        "a%2fb",
        "a\nb",
        "-a",
        "a-",
        "ä",
    ];
    for name in wrong {
        for (place, pod) in pods(name) {
            let membership = claimed(&pod).unwrap();
            assert_eq!(membership.owner, None, "{place} {name:.60}");
            let told = faults(&membership).join("\n");
            assert!(told.starts_with(&format!("{place}: \"")), "{told}");
            assert!(told.len() < 700, "{told:.800}");
            let key = membership.key.to_string();
            assert!(key.len() < 200 && !key.contains('\n'), "{place}: {key:.300}");
        }
    }
}

#[test]
fn what_stands_in_for_a_name_is_no_other_gangs_name() {
    let of = |name: &str| {
        let annotations = json!({"scheduling.volcano.sh/group-name": name});
        let membership = claimed(&json!({"metadata": {"annotations": annotations}})).unwrap();
        (membership.key.name.to_string(), membership.faults.is_empty())
    };
    let long = format!("{}-", "x".repeat(252));
    for wrong in [&*long, "train ", "train\n", "Train"] {
        let (name, legal) = of(wrong);
        assert!(!legal, "{wrong}");
        assert!(!of(&name).1, "{name} is somebody's name");
    }
    assert_eq!(of("train"), ("train".to_owned(), true));
}

#[test]
fn words_beside_the_name_are_held_to_a_form_too() {
    let long = "x".repeat(100_000);
    let volcano = claimed(&json!({"metadata": {"annotations": {
        "scheduling.volcano.sh/group-name": "train", "volcano.sh/task-spec": long,
    }}}))
    .unwrap();
    assert_eq!((&*volcano.role, volcano.faults.len()), ("", 1));
    let set = claimed(&json!({"metadata": {"annotations": {
        "jobset.sigs.k8s.io/jobset-name": "train", "jobset.sigs.k8s.io/jobset-uid": long,
        "jobset.sigs.k8s.io/restart-attempt": long, "jobset.sigs.k8s.io/replicatedjob-name": long,
        "alpha.jobset.sigs.k8s.io/exclusive-topology": long,
    }}}))
    .unwrap();
    let key = &set.key;
    assert!(key.name.len() + key.incarnation.len() + set.role.len() < 200, "{key}");
    assert_eq!((set.faults.len(), set.options.hint), (3, None));
    let maker =
        claimed(&json!({"metadata": {"annotations": {"gantry.dev/gang": "train"}, "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": long, "uid": long, "controller": true},
        ]}}))
        .unwrap()
        .maker
        .unwrap();
    assert!(maker.name.len() + maker.uid.len() < 600);
}

#[test]
fn unknown_annotations_in_any_number_cause_no_fault() {
    let mut annotations = json!({"gantry.dev/gang": "train"});
    for number in 0..5_000 {
        annotations[format!("gantry.dev/gang-x{number}")] = json!("");
    }
    let membership = claimed(&json!({"metadata": {"annotations": annotations}})).unwrap();
    assert_eq!(membership.faults.len(), 0);
}
