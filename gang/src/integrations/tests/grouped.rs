//! Groups that people name on pods, for Kubernetes' own scheduling of gangs or another project's.

use std::time::Duration;

use serde_json::json;

use super::*;

#[test]
fn a_pod_group_of_kubernetes_is_named_in_the_spec() {
    let membership = claimed(&json!({
        "metadata": {"name": "a", "labels": {"scheduling.x-k8s.io/pod-group": "b"}},
        "spec": {"schedulingGroup": {"podGroupName": "train-workers-x2"}},
    }))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::PodGroup, "train-workers-x2", ""));
    assert_eq!(membership.owner, owner(OwnerKind::PodGroup, "train-workers-x2", ""));
    assert_eq!(membership.also, [Integration::Coscheduling]);
}

/// A pod as the Job controller of Kubernetes 1.37 makes it for a Job with `spec.scheduling`.
#[test]
fn pods_of_a_job_with_spec_scheduling_are_in_its_pod_group() {
    let of_job = |controller: bool| {
        claimed(&json!({
            "metadata": {
                "name": "train-0-x7k2p",
                "labels": {
                    "batch.kubernetes.io/job-name": "train",
                    "batch.kubernetes.io/controller-uid": "u1",
                    "batch.kubernetes.io/job-completion-index": "0",
                },
                "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
                "ownerReferences": [
                    {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup", "name": "train-5f9-group-8d4", "uid": "u2"},
                    {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u1", "controller": controller},
                ],
            },
            "spec": {"schedulingGroup": {"podGroupName": "train-5f9-group-8d4"}},
        }))
        .unwrap()
    };
    let member = of_job(true);
    assert_eq!(gang(&member), (Integration::PodGroup, "train-5f9-group-8d4", ""));
    assert_eq!(member.owner, owner(OwnerKind::PodGroup, "train-5f9-group-8d4", ""));
    assert_eq!(member.creator, owner(OwnerKind::Job, "train", ""), "the Job knows how many pods come");
    assert_eq!((member.rank, member.also.is_empty()), (Some(0), true));
    assert_eq!(of_job(false).creator, None);
}

#[test]
fn each_replica_of_a_group_of_a_workload_is_a_gang() {
    let pod = |replica: Option<&str>| {
        claimed(&json!({"metadata": {"name": "a"}, "spec": {"workloadRef": {
            "name": "train", "podGroup": "workers", "podGroupReplicaKey": replica,
        }}}))
        .unwrap()
    };
    assert_eq!(gang(&pod(Some("3"))), (Integration::Workload, "train/workers/3", ""));
    assert_eq!(gang(&pod(None)), (Integration::Workload, "train/workers", ""));
    assert_eq!(pod(Some("3")).owner, owner(OwnerKind::Workload, "train", "workers"));
}

#[test]
fn coscheduling_has_had_three_labels() {
    // The objects that they name are of two groups, and both may be installed.
    for (label, kind, group) in [
        ("scheduling.x-k8s.io/pod-group", OwnerKind::CoschedulingPodGroup, "scheduling.x-k8s.io"),
        ("pod-group.scheduling.sigs.k8s.io", OwnerKind::KoordinatorPodGroup, "scheduling.sigs.k8s.io"),
    ] {
        let membership = claimed(&json!({"metadata": {"labels": {label: "nginx"}}})).unwrap();
        assert_eq!(gang(&membership), (Integration::Coscheduling, "nginx", ""));
        assert_eq!(membership.owner, owner(kind, "nginx", ""));
        assert_eq!(crate::integrations::api(kind).versions, [(group, "v1alpha1")]);
    }
    let first = claimed(&json!({"metadata": {"labels": {
        "pod-group.scheduling.sigs.k8s.io/name": "nginx",
        "pod-group.scheduling.sigs.k8s.io/min-available": "3",
    }}}))
    .unwrap();
    assert_eq!((first.size, first.owner), (stated(3, None), None));
    assert_eq!(first.size_source, "label pod-group.scheduling.sigs.k8s.io/min-available");
    // RoleBasedGroup says the size in a PodGroup of that name, and not on its pods.
    let only_named = json!({"pod-group.scheduling.sigs.k8s.io/name": "nginx"});
    let named = claimed(&json!({"metadata": {"labels": only_named}})).unwrap();
    assert_eq!(gang(&named), (Integration::Coscheduling, "nginx", ""));
    assert_eq!(named.owner, owner(OwnerKind::CoschedulingPodGroup, "nginx", ""));
}

#[test]
fn a_job_of_volcano_names_its_pod_group_and_numbers_its_tasks() {
    let words = json!({
        "scheduling.k8s.io/group-name": "tf-4a3c6d1e",
        "volcano.sh/job-name": "tf", "volcano.sh/job-version": "0", "volcano.sh/task-spec": "ps",
        "volcano.sh/task-index": "1", "volcano.sh/template-uid": "tf-ps", "volcano.sh/queue-name": "default",
    });
    let membership = claimed(&json!({"metadata": {"name": "tf-ps-1", "annotations": words,
        "ownerReferences": [{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "name": "tf", "uid": "4a3c6d1e", "controller": true}],
    }}))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::Volcano, "tf-4a3c6d1e", ""));
    assert_eq!((&*membership.role, membership.rank, membership.size), ("ps", Some(1), Size::Undeclared));
    assert_eq!(membership.owner, owner(OwnerKind::VolcanoPodGroup, "tf-4a3c6d1e", ""));
    assert_eq!(membership.creator, owner(OwnerKind::VolcanoJob, "tf", ""), "it makes the pods again");
}

#[test]
fn koordinator_says_everything_in_annotations() {
    let membership = claimed(&json!({"metadata": {"annotations": {
        "gang.scheduling.koordinator.sh/name": "gang-example1",
        "gang.scheduling.koordinator.sh/min-available": "2",
        "gang.scheduling.koordinator.sh/total-number": "3",
        "gang.scheduling.koordinator.sh/mode": "NonStrict",
        "gang.scheduling.koordinator.sh/waiting-time": "1m30s",
    }}}))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::Koordinator, "gang-example1", ""));
    assert_eq!(membership.size, stated(2, Some(3)));
    assert_eq!(membership.options.arrival.map(|it| it.time), Some(Duration::from_secs(90)));
    let wrong = claimed(&json!({"metadata": {"annotations": {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "two",
        "gang.scheduling.koordinator.sh/waiting-time": "90",
    }}}))
    .unwrap();
    assert_eq!(
        faults(&wrong),
        [
            "annotation gang.scheduling.koordinator.sh/min-available: \"two\" is no whole number from 1 to 20000",
            "annotation gang.scheduling.koordinator.sh/waiting-time: \"90\" is no time such as 90s, 5m or 1h30m",
        ]
    );
}

#[test]
fn a_group_of_plain_pods_of_kueue_is_a_gang_of_all_of_them() {
    let pod = |more: &str| {
        claimed(&json!({"metadata": {
            "labels": {
                "kueue.x-k8s.io/pod-group-name": "sample", "kueue.x-k8s.io/queue-name": "gpu",
                "kueue.x-k8s.io/managed": "true", "kueue.x-k8s.io/pod-group-pod-index": "1",
            },
            "annotations": {"kueue.x-k8s.io/pod-group-total-count": "2", more: "true"},
        }}))
    };
    let membership = pod("other").unwrap();
    assert_eq!(gang(&membership), (Integration::Kueue, "sample", ""));
    assert_eq!((membership.size, membership.rank), (stated(2, Some(2)), Some(1)));
    for one_by_one in ["kueue.x-k8s.io/pod-group-serving", "kueue.x-k8s.io/pod-group-fast-admission"] {
        assert_eq!(pod(one_by_one), None, "a stateful set makes its pods one by one");
    }
}

#[test]
fn kueue_group_annotation_goes_before_the_label() {
    let name = "kueue.x-k8s.io/pod-group-name";
    let pod = |label: Option<&str>, annotation: &str, more: &str| {
        let mut pod = json!({"metadata": {
            "annotations": {name: annotation, "kueue.x-k8s.io/pod-group-total-count": "2", more: "true"},
        }});
        if let Some(label) = label {
            pod["metadata"]["labels"][name] = label.into();
        }
        claimed(&pod)
    };
    // No label has more than 63 characters.
    let long = "kp-".repeat(40) + "0";
    for group in ["kp", &long] {
        let membership = pod(None, group, "other").unwrap();
        assert_eq!(gang(&membership), (Integration::Kueue, group, ""));
        assert_eq!((membership.size, faults(&membership)), (stated(2, Some(2)), Vec::new()));
    }
    assert_eq!(&*pod(Some("by-label"), "kp", "other").unwrap().key.name, "kp");
    assert_eq!(&*pod(Some("by-label"), "", "other").unwrap().key.name, "by-label");
    assert_eq!(pod(None, "kp", "kueue.x-k8s.io/pod-group-serving"), None);
    let wrong = pod(None, "k p", "other").unwrap();
    insta::assert_snapshot!(faults(&wrong).join("\n"), @r#"annotation kueue.x-k8s.io/pod-group-name: "k p" is no name: at most 63 letters, digits, `-`, `_` and `.`, a letter or digit first and last; or at most 253 small letters, digits, `-` and `.`"#);
}

#[test]
fn where_kueue_has_put_a_pod_is_a_hint_whatever_made_it_a_gang() {
    let membership = claimed(&json!({"metadata": {
        "labels": {"jobset.sigs.k8s.io/jobset-name": "train"},
        "annotations": {
            "kueue.x-k8s.io/podset-required-topology": "cloud.com/block",
            "kueue.x-k8s.io/podset-slice-required-topology": "cloud.com/rack",
            "kueue.x-k8s.io/podset-slice-size": "4",
        },
    }}))
    .unwrap();
    let hint = membership.options.hint.unwrap();
    assert_eq!((&*hint.label, hint.slice), ("cloud.com/rack", Some(4)));
    assert_eq!(membership.options.level, None, "Kueue itself holds the pods to it");
}

#[test]
fn kai_names_a_pod_group_and_a_part_of_it() {
    let membership = claimed(&json!({"metadata": {
        "annotations": {"pod-group-name": "pg-train-0c1"},
        "labels": {"kai.scheduler/subgroup-name": "workers", "kai.scheduler/queue": "team"},
    }}))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::Kai, "pg-train-0c1", ""));
    assert_eq!(&*membership.role, "workers");
    assert_eq!(membership.owner, owner(OwnerKind::KaiPodGroup, "pg-train-0c1", ""));
}

/// As Grove's operator leaves pods of the base PodGang, and of one that a scaling group has added.
#[test]
fn grove_names_the_pod_gang_of_each_pod() {
    for name in ["llm-0", "llm-0-workers-1"] {
        let membership = claimed(&json!({"metadata": {"name": "a", "labels": {
            "grove.io/podgang": name,
            "grove.io/podclique": "llm-0-workers-0-prefill",
            "grove.io/podclique-pod-index": "3",
            "grove.io/podcliqueset-replica-index": "0",
        }}}))
        .unwrap();
        assert_eq!(gang(&membership), (Integration::Grove, name, ""));
        assert_eq!((&*membership.role, membership.rank), ("llm-0-workers-0-prefill", Some(3)));
        assert_eq!(membership.owner, owner(OwnerKind::PodGang, name, ""));
    }
}

/// Pods of KServe and llm-d on several nodes are those of a LeaderWorkerSet, with labels of their own in addition.
#[test]
fn serving_on_several_nodes_is_a_leader_worker_set() {
    let membership = claimed(&json!({"metadata": {
        "name": "llama-mn-0-1",
        "labels": {
            "app.kubernetes.io/part-of": "llminferenceservice",
            "serving.kserve.io/inferenceservice": "llama",
            "llm-d.ai/role": "decode",
            "leaderworkerset.sigs.k8s.io/name": "llama-mn",
            "leaderworkerset.sigs.k8s.io/group-index": "0",
            "leaderworkerset.sigs.k8s.io/worker-index": "1",
            "leaderworkerset.sigs.k8s.io/template-revision-hash": "r1",
        },
        "annotations": {"leaderworkerset.sigs.k8s.io/size": "2"},
    }}))
    .unwrap();
    assert_eq!(gang(&membership), (Integration::LeaderWorkerSet, "llama-mn-0", "r1"));
    assert_eq!(membership.size, stated(2, Some(2)));
}

/// A Deployment's pods carry the hash of their template, whatever names their gang.
#[test]
fn revision_of_a_deployment_or_stateful_set_is_read() {
    let pod = |kind: &str, name: &str, labels: serde_json::Value| {
        let controller =
            json!({"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "u", "controller": true});
        let annotations = json!({"gantry.dev/gang": "isvc", "gantry.dev/gang-min": "2"});
        let metadata = json!({"name": "a", "labels": labels, "annotations": annotations, "ownerReferences": [controller]});
        claimed(&json!({"metadata": metadata})).unwrap().revision
    };
    let of = |of: &str, hash: &str| Some(crate::membership::Revision { of: of.into(), hash: hash.into() });
    let hash = json!({"pod-template-hash": "7d9f"});
    assert_eq!(pod("ReplicaSet", "head-7d9f", hash.clone()), of("Deployment head", "7d9f"));
    assert_eq!(pod("ReplicaSet", "head-0000", hash.clone()), None, "not that ReplicaSet's label");
    assert_eq!(pod("Job", "head-7d9f", hash), None);
    let hash = json!({"rollouts-pod-template-hash": "7d9f"});
    assert_eq!(pod("ReplicaSet", "head-7d9f", hash), of("Rollout head", "7d9f"));
    let revision = json!({"controller-revision-hash": "head-5c4"});
    assert_eq!(pod("StatefulSet", "head", revision), of("StatefulSet head", "head-5c4"));
}
