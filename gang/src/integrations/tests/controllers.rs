//! Gangs that controllers make without being told that they do.

use serde_json::{Value, json};

use super::*;

fn job_set_pod() -> Value {
    let words = json!({
        "jobset.sigs.k8s.io/jobset-name": "train",
        "jobset.sigs.k8s.io/jobset-uid": "8d1f",
        "jobset.sigs.k8s.io/replicatedjob-name": "workers",
        "jobset.sigs.k8s.io/replicatedjob-replicas": "4",
        "jobset.sigs.k8s.io/global-replicas": "5",
        "jobset.sigs.k8s.io/restart-attempt": "2",
        "jobset.sigs.k8s.io/job-index": "1",
        "jobset.sigs.k8s.io/job-global-index": "2",
        "jobset.sigs.k8s.io/job-key": "aa",
        "batch.kubernetes.io/job-completion-index": "3",
        "batch.kubernetes.io/job-name": "train-workers-1",
        "batch.kubernetes.io/controller-uid": "5e5e",
    });
    json!({"metadata": {
        "namespace": "ml", "name": "train-workers-1-3-x7x2q", "uid": "p",
        "labels": words, "annotations": words,
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train-workers-1", "uid": "5e5e", "controller": true}],
    }})
}

#[test]
fn job_set_is_one_gang_per_restart_attempt() {
    let membership = claimed(&job_set_pod()).unwrap();
    assert_eq!(gang(&membership), (Integration::JobSet, "train", "8d1f/2"));
    assert_eq!((membership.size, &*membership.role), (Size::Undeclared, "workers"));
    assert_eq!(membership.owner, owner(OwnerKind::JobSet, "train", ""));
    assert_eq!(membership.rank, Some(200_003), "by job, then in the job");
    assert_eq!(membership.also, []);
}

#[test]
fn controller_rank_holds_under_every_integration() {
    let named = |mut pod: Value, how: &str| {
        match how {
            "a PodGroup of Kubernetes" => pod["spec"]["schedulingGroup"]["podGroupName"] = "pg".into(),
            "coscheduling" => pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] = "pg".into(),
            "our annotation" => pod["metadata"]["annotations"]["gantry.dev/gang"] = "pg".into(),
            _ => pod["metadata"]["annotations"]["pod-group-name"] = "pg".into(),
        }
        claimed(&pod).unwrap()
    };
    for how in ["a PodGroup of Kubernetes", "coscheduling", "our annotation", "KAI"] {
        let job_set = named(job_set_pod(), how);
        assert_eq!((&*job_set.key.name, job_set.rank), ("pg", Some(200_003)), "{how}");
        let torch = |role: &str, index: &str| named(training_pod("PyTorchJob", role, index), how).rank;
        assert_eq!((torch("master", "0"), torch("worker", "2")), (Some(0), Some(3)), "{how}");
        // There the groups of a set may be one gang. The leader's name ends in the number of its group.
        let of_set = |name: &str, worker: &str| named(group_pod(name, worker, "llama"), how).rank;
        let ranks = (of_set("llama-1", "0"), of_set("llama-1-3", "3"));
        assert_eq!(ranks, (Some(100_000), Some(100_003)), "{how}");
    }
    let mut said = job_set_pod();
    said["metadata"]["annotations"]["gantry.dev/gang-rank"] = "5".into();
    assert_eq!(named(said, "our annotation").rank, Some(5), "a person's word goes first");
}

#[test]
fn job_set_exclusive_placement_starts_leaders_before_followers() {
    let exclusive = |index: &str, by_selector: bool| {
        let mut pod = job_set_pod();
        for words in ["labels", "annotations"] {
            pod["metadata"][words]["batch.kubernetes.io/job-completion-index"] = index.into();
        }
        let annotations = &mut pod["metadata"]["annotations"];
        annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "rack".into();
        if by_selector {
            annotations["alpha.jobset.sigs.k8s.io/node-selector"] = "true".into();
        }
        claimed(&pod).unwrap()
    };
    let leader = exclusive("0", false);
    assert_eq!(&*leader.key.name, "train/workers/leaders");
    assert_eq!((leader.size, leader.owner.is_none()), (stated(4, Some(4)), true));
    let follower = exclusive("3", false);
    assert_eq!(&*follower.key.name, "train/workers/followers");
    assert_eq!(follower.owner, owner(OwnerKind::JobSet, "train", "workers/followers"));
    let at_once = exclusive("3", true);
    assert_eq!(&*at_once.key.name, "train");
    assert_eq!(&*at_once.options.hint.unwrap().label, "rack");
}

/// A pod of the second group, made by the stateful set of this name.
fn group_pod(name: &str, worker: &str, made_by: &str) -> Value {
    json!({"metadata": {
        "namespace": "ml", "name": name, "uid": name,
        "labels": {
            "leaderworkerset.sigs.k8s.io/name": "llama",
            "leaderworkerset.sigs.k8s.io/group-index": "1",
            "leaderworkerset.sigs.k8s.io/group-key": "689f",
            "leaderworkerset.sigs.k8s.io/worker-index": worker,
            "leaderworkerset.sigs.k8s.io/template-revision-hash": "7c9d",
            "apps.kubernetes.io/pod-index": "1",
            "statefulset.kubernetes.io/pod-name": name,
        },
        "annotations": {"leaderworkerset.sigs.k8s.io/size": "4"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": made_by, "uid": made_by, "controller": true}],
    }})
}

#[test]
fn each_group_of_a_leader_worker_set_is_a_gang() {
    let leader = claimed(&group_pod("llama-1", "0", "llama")).unwrap();
    let worker = claimed(&group_pod("llama-1-3", "3", "llama-1")).unwrap();
    assert_eq!(leader.key, worker.key, "though different stateful sets made them");
    assert_eq!(gang(&leader), (Integration::LeaderWorkerSet, "llama-1", "7c9d"));
    assert_eq!((leader.rank, &*leader.role), (Some(0), "leader"));
    assert_eq!((worker.rank, &*worker.role), (Some(3), "worker"));
    assert_eq!(worker.size, stated(4, Some(4)));
    assert_eq!(worker.owner, owner(OwnerKind::LeaderWorkerSet, "llama", ""));
}

#[test]
fn leader_worker_set_exclusive_placement_makes_two_gangs() {
    // The controller creates the workers only when the leader has a node. So the leader is a gang of its own.
    let pod = |worker: &str| {
        json!({"metadata": {
            "labels": {
                "leaderworkerset.sigs.k8s.io/name": "llama",
                "leaderworkerset.sigs.k8s.io/group-index": "0",
                "leaderworkerset.sigs.k8s.io/worker-index": worker,
            },
            "annotations": {
                "leaderworkerset.sigs.k8s.io/size": "4",
                "leaderworkerset.sigs.k8s.io/exclusive-topology": "rack",
            },
        }})
    };
    let (leader, worker) = (claimed(&pod("0")).unwrap(), claimed(&pod("2")).unwrap());
    assert_eq!((&*leader.key.name, leader.size), ("llama-0/leader", stated(1, Some(1))));
    assert_eq!((&*worker.key.name, worker.size), ("llama-0/worker", stated(3, Some(3))));
}

#[test]
fn leader_worker_set_slices_ignore_where_the_leader_counts() {
    let hint = |size: &str, sub: &str| {
        let mut pod = group_pod("llama-1-3", "3", "llama-1");
        let annotations = &mut pod["metadata"]["annotations"];
        annotations["leaderworkerset.sigs.k8s.io/size"] = size.into();
        annotations["leaderworkerset.sigs.k8s.io/subgroup-size"] = sub.into();
        annotations["leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology"] = "rack".into();
        claimed(&pod).unwrap().options.hint.unwrap().slice
    };
    assert_eq!(hint("4", "2"), Some(2));
    // The leader is one more, and may ask for no devices: then it is in no slice anyway.
    assert_eq!(hint("5", "2"), Some(2));
    assert_eq!((hint("4", "0"), hint("4", "x")), (None, None));
}

fn training_pod(kind: &str, role: &str, index: &str) -> Value {
    json!({"metadata": {
        "namespace": "ml", "name": format!("bert-{role}-{index}"), "uid": "p",
        "labels": {
            "training.kubeflow.org/job-name": "bert",
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-type": role,
            "training.kubeflow.org/replica-index": index,
        },
        "ownerReferences": [{"apiVersion": "kubeflow.org/v1", "kind": kind, "name": "bert", "uid": "77", "controller": true}],
    }})
}

#[test]
fn a_training_job_of_kubeflow_is_a_gang_whose_master_is_first() {
    let master = claimed(&training_pod("PyTorchJob", "master", "0")).unwrap();
    let worker = claimed(&training_pod("PyTorchJob", "worker", "2")).unwrap();
    assert_eq!(gang(&worker), (Integration::Kubeflow, "bert", "77"));
    assert_eq!(worker.owner, owner(OwnerKind::PyTorchJob, "bert", ""));
    assert_eq!((master.rank, worker.rank), (Some(0), Some(3)));
    let server = claimed(&training_pod("TFJob", "ps", "1")).unwrap();
    assert_eq!((server.rank, &*server.role), (None, "ps"), "parameter servers have no place in the ring");
    assert_eq!(claimed(&training_pod("MXJob", "worker", "0")), None, "a kind that is not known");
}

#[test]
fn a_training_job_that_asks_for_coscheduling_is_a_gang_by_that() {
    let mut pod = training_pod("PyTorchJob", "worker", "0");
    pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] = "bert".into();
    let membership = claimed(&pod).unwrap();
    assert_eq!(gang(&membership), (Integration::Coscheduling, "bert", ""));
    assert_eq!(membership.also, [Integration::Kubeflow]);
}

#[test]
fn the_launcher_of_an_mpi_job_is_of_its_workers_gang() {
    let labels = |role: &str| {
        json!({
            "training.kubeflow.org/operator-name": "mpi-operator",
            "training.kubeflow.org/job-name": "pi",
            "training.kubeflow.org/job-role": role,
        })
    };
    let mut worker = labels("worker");
    worker["training.kubeflow.org/replica-index"] = "1".into();
    let worker = claimed(&json!({"metadata": {
        "name": "pi-worker-1", "labels": worker,
        "ownerReferences": [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "name": "pi", "uid": "m", "controller": true}],
    }}))
    .unwrap();
    let launcher = json!({"metadata": {
        "name": "pi-launcher-8xk2p", "labels": labels("launcher"),
        "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "pi-launcher", "uid": "j", "controller": true}],
    }});
    // With runLauncherAsWorker it is the first of the workers, and says so.
    let mut works = launcher.clone();
    works["metadata"]["labels"]["training.kubeflow.org/replica-index"] = "0".into();
    assert_eq!(claimed(&works).unwrap().rank, Some(0));
    let launcher = claimed(&launcher).unwrap();
    assert_eq!(worker.key, launcher.key);
    assert_eq!((worker.rank, launcher.rank), (Some(1), None));
    assert_eq!(launcher.owner, owner(OwnerKind::MpiJob, "pi", ""));
}

#[test]
fn a_ray_cluster_is_a_gang_of_its_head_and_workers() {
    let pod = |group: &str, kind: &str| {
        json!({"metadata": {
            "name": format!("ray-{group}-k7d"),
            "labels": {
                "ray.io/cluster": "ray", "ray.io/group": group, "ray.io/is-ray-node": "yes", "ray.io/node-type": kind,
                "ray.io/identifier": "ray-head", "app.kubernetes.io/name": "kuberay",
            },
            "ownerReferences": [{"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "ray", "uid": "r", "controller": true}],
        }})
    };
    let head = claimed(&pod("headgroup", "head")).unwrap();
    assert_eq!((gang(&head), &*head.role), ((Integration::Ray, "ray", "r"), "head"));
    let worker = claimed(&pod("h100", "worker")).unwrap();
    assert_eq!((&worker.key, &*worker.role, worker.rank), (&head.key, "h100", None));
    let mut of_hosts = pod("h100", "worker");
    of_hosts["metadata"]["labels"]["ray.io/worker-group-replica-index"] = "1".into();
    let of_one_host = claimed(&of_hosts).unwrap().rank;
    assert_eq!(of_one_host, None, "it would come between the hosts of another group's replica");
    of_hosts["metadata"]["labels"]["ray.io/worker-group-replica-name"] = "h100-xh3hf".into();
    of_hosts["metadata"]["labels"]["ray.io/replica-host-index"] = "3".into();
    assert_eq!(claimed(&of_hosts).unwrap().rank, Some(100_003));
}

#[test]
fn what_did_not_ask_to_be_a_gang_is_none() {
    let made_by = |kind: &str, version: &str| {
        json!({"metadata": {
            "name": "x-0", "labels": {"batch.kubernetes.io/job-name": "x", "batch.kubernetes.io/job-completion-index": "0", "app": "x"},
            "annotations": {"batch.kubernetes.io/job-completion-index": "0", "gantry.dev/checkpointed": "true"},
            "ownerReferences": [{"apiVersion": version, "kind": kind, "name": "x", "uid": "u", "controller": true}],
        }})
    };
    for (kind, version) in [("Job", "batch/v1"), ("StatefulSet", "apps/v1"), ("ReplicaSet", "apps/v1")] {
        assert_eq!(claimed(&made_by(kind, version)), None, "{kind}");
    }
    assert_eq!(claimed(&json!({"metadata": {"name": "x"}})), None);
}

#[test]
fn a_job_is_a_gang_when_its_pods_say_a_minimum() {
    let pod = |min: &str| {
        json!({"metadata": {
            "name": "x-3-abcde",
            "labels": {"batch.kubernetes.io/job-completion-index": "3"},
            "annotations": {"gantry.dev/gang-min": min},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "u", "controller": true}],
        }})
    };
    let membership = claimed(&pod("all")).unwrap();
    assert_eq!(gang(&membership), (Integration::Job, "x", "u"));
    assert_eq!((membership.size, membership.rank), (Size::All, Some(3)));
    assert_eq!(membership.owner, owner(OwnerKind::Job, "x", ""));
    assert_eq!(claimed(&pod("6")).unwrap().size, stated(6, None));
}
