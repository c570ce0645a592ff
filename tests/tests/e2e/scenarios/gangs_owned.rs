//! Gangs by what controllers leave on their pods that do not run here: KAI's PodGroup, RayCluster, MPIJob, TrainJob
//! (which is made of a JobSet), Volcano's Job, and the labels with which coscheduling began. The objects are made with
//! what of them matters, the pods with the labels and owners that their documentation names; a launcher and the pods of
//! a JobSet are made by real Jobs, as there.

use anyhow::{Context, Result, ensure};
use gantry_api::{GangPhase, Reason};
use gantry_e2e::until;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::gangs_integrations::{Expected, any_fields, apply, phase, stand};
use crate::bed::Bed;
use crate::gangs::{self, GANG_LIMIT, Scene, name_of};
use crate::{pods, records};

/// Each comes in two halves.
const EXPECTED: [Expected; 6] = [
    ("KAI", "kai", 2, "PodGroup"),
    ("Ray", "ray", 2, "RayCluster"),
    ("Kubeflow", "mpi", 2, "MPIJob"),
    ("JobSet", "tune", 2, "JobSet"),
    ("Volcano", "vc-", 2, "PodGroup"),
    ("Coscheduling", "old", 2, "min-available"),
];

pub(super) async fn pods_of_other_controllers_are_gangs(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-owned").await?;
    bed.cluster().install_controllers().await?;
    for (group, version, kind) in [
        ("scheduling.run.ai", "v2alpha2", "PodGroup"),
        ("ray.io", "v1", "RayCluster"),
        ("kubeflow.org", "v2beta1", "MPIJob"),
        ("batch.volcano.sh", "v1alpha1", "Job"),
        ("scheduling.volcano.sh", "v1beta1", "PodGroup"),
    ] {
        let definition = any_fields(group, version, kind).to_string();
        bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &definition).await?;
    }
    for object in [kai_group(), ray_cluster(), mpi_job(), job_set(), volcano_job()] {
        apply(bed, &scene, &object).await?;
    }
    let ray = owner(bed, &scene, "ray.io/v1", "RayCluster", "ray").await?;
    let mpi = owner(bed, &scene, "kubeflow.org/v2beta1", "MPIJob", "mpi").await?;
    let tune = owner(bed, &scene, "jobset.x-k8s.io/v1alpha2", "JobSet", "tune").await?;
    let volcano = owner(bed, &scene, "batch.volcano.sh/v1alpha1", "Job", "vc").await?;
    apply(bed, &scene, &volcano_group(&volcano)).await?;
    let halves = [
        [
            kai_pod(0)?,
            ray_pod("head", "headgroup", &ray)?,
            mpi_worker(&mpi)?,
            job_set_job("launcher", &tune)?,
            coscheduling_pod(0)?,
            volcano_pod("master", &volcano)?,
        ],
        [
            kai_pod(1)?,
            ray_pod("worker", "gpus", &ray)?,
            mpi_launcher(&mpi)?,
            job_set_job("node", &tune)?,
            coscheduling_pod(1)?,
            volcano_pod("worker", &volcano)?,
        ],
    ];
    let [first, second] = &halves;
    for object in first {
        apply(bed, &scene, object).await?;
    }
    stand(&scene, &EXPECTED, |gang| {
        gang.status.as_ref().is_some_and(|status| {
            status.reason == Some(Reason::WaitingForMembers) && (status.members, status.min) == (1, 2)
        })
    })
    .await?;
    for pod in scene.pods.list(&ListParams::default()).await? {
        ensure!(pods::node(&pod).is_empty(), "{} runs alone", name_of(&pod));
    }
    for object in second {
        apply(bed, &scene, object).await?;
    }
    stand(&scene, &EXPECTED, |gang| phase(gang) == GangPhase::Bound).await?;
    let all = scene.pods.list(&ListParams::default()).await?;
    let names: Vec<String> = all.iter().map(|pod| name_of(pod).to_owned()).collect();
    ensure!(names.len() == 12, "{names:?}");
    scene.run_on_grants(&names).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// A pod of one GPU.
fn pod(name: &str, labels: &Value, annotations: &Value, owner: Option<&Value>) -> Result<Value> {
    let mut pod = gangs::template(1, annotations)?;
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["labels"] = labels.clone();
    pod["metadata"]["ownerReferences"] = owner.into_iter().cloned().collect();
    Ok(pod)
}

/// A Job of one pod.
fn job(name: &str, words: &Value, owner: &Value) -> Result<Value> {
    let mut template = gangs::template(1, words)?;
    template["metadata"]["labels"] = words.clone();
    Ok(json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": name, "ownerReferences": [owner] },
        "spec": { "parallelism": 1, "completions": 1, "completionMode": "Indexed", "template": template },
    }))
}

/// An owner reference to an object. The object must exist, because the garbage collector checks it.
async fn owner(bed: &Bed, scene: &Scene<'_>, version: &str, kind: &str, name: &str) -> Result<Value> {
    let (group, _) = version.split_once('/').context("a group and a version")?;
    let resource = format!("{}s.{group}", kind.to_ascii_lowercase());
    let args = ["-n", &scene.namespace, "get", &resource, name, "-o", "jsonpath={.metadata.uid}"];
    let uid = until("the owner's UID", GANG_LIMIT, async || bed.cluster().kubectl(&args).await).await?;
    Ok(json!({ "apiVersion": version, "kind": kind, "name": name, "uid": uid.trim(), "controller": true }))
}

fn kai_group() -> Value {
    json!({
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": { "name": "kai" },
        "spec": { "minMember": 2, "queue": "team" },
    })
}

fn kai_pod(number: u32) -> Result<Value> {
    pod(&format!("kai-{number}"), &json!({}), &json!({ "pod-group-name": "kai" }), None)
}

fn ray_cluster() -> Value {
    json!({
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": { "name": "ray" },
        "spec": {
            "headGroupSpec": {},
            "workerGroupSpecs": [{ "groupName": "gpus", "replicas": 1, "minReplicas": 1, "maxReplicas": 4 }],
        },
    })
}

fn ray_pod(kind: &str, group: &str, owner: &Value) -> Result<Value> {
    let labels = json!({
        "ray.io/cluster": "ray",
        "ray.io/group": group,
        "ray.io/node-type": kind,
        "ray.io/is-ray-node": "yes",
    });
    pod(&format!("ray-{group}"), &labels, &json!({}), Some(owner))
}

fn mpi_job() -> Value {
    json!({
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": { "name": "mpi" },
        "spec": { "mpiReplicaSpecs": { "Launcher": { "replicas": 1 }, "Worker": { "replicas": 1 } } },
    })
}

fn mpi_labels(role: &str) -> Value {
    json!({
        "training.kubeflow.org/operator-name": "mpi-operator",
        "training.kubeflow.org/job-name": "mpi",
        "training.kubeflow.org/job-role": role,
    })
}

fn mpi_worker(owner: &Value) -> Result<Value> {
    let mut labels = mpi_labels("worker");
    labels["training.kubeflow.org/replica-index"] = json!("0");
    pod("mpi-worker-0", &labels, &json!({}), Some(owner))
}

fn mpi_launcher(owner: &Value) -> Result<Value> {
    job("mpi-launcher", &mpi_labels("launcher"), owner)
}

/// As TrainJob makes one: a job by which it begins and one of its nodes.
fn job_set() -> Value {
    let job = |name: &str| {
        let template = json!({
            "metadata": {},
            "spec": { "containers": [{ "name": "main", "image": "none" }], "restartPolicy": "Never" },
        });
        json!({
            "name": name,
            "replicas": 1,
            "template": { "spec": { "parallelism": 1, "completions": 1, "template": template } },
        })
    };
    json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": { "name": "tune", "labels": { "trainer.kubeflow.org/trainjob-name": "tune" } },
        "spec": { "replicatedJobs": [job("launcher"), job("node")] },
    })
}

fn job_set_job(role: &str, owner: &Value) -> Result<Value> {
    let words = json!({
        "jobset.sigs.k8s.io/jobset-name": "tune",
        "jobset.sigs.k8s.io/jobset-uid": owner["uid"],
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/replicatedjob-replicas": "1",
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "jobset.sigs.k8s.io/job-index": "0",
    });
    job(&format!("tune-{role}-0"), &words, owner)
}

fn coscheduling_pod(number: u32) -> Result<Value> {
    let labels = json!({
        "pod-group.scheduling.sigs.k8s.io/name": "old",
        "pod-group.scheduling.sigs.k8s.io/min-available": "2",
    });
    pod(&format!("old-{number}"), &labels, &json!({}), None)
}

/// A master and a worker.
fn volcano_job() -> Value {
    let task = |name: &str| json!({ "name": name, "replicas": 1, "template": {} });
    json!({
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": { "name": "vc" },
        "spec": { "minAvailable": 2, "queue": "default", "tasks": [task("master"), task("worker")] },
    })
}

/// What Volcano calls the PodGroup of a Job: after its name and its UID.
fn volcano_group_name(owner: &Value) -> String {
    format!("vc-{}", owner["uid"].as_str().unwrap_or_default())
}

fn volcano_group(owner: &Value) -> Value {
    json!({
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": { "name": volcano_group_name(owner), "ownerReferences": [owner] },
        "spec": { "minMember": 2, "minTaskMember": { "master": 1, "worker": 1 }, "queue": "default" },
        "status": { "phase": "Pending" },
    })
}

fn volcano_pod(task: &str, owner: &Value) -> Result<Value> {
    let labels = json!({
        "volcano.sh/job-name": "vc",
        "volcano.sh/job-namespace": "e2e-gangs-owned",
        "volcano.sh/queue-name": "default",
        "volcano.sh/task-spec": task,
        "volcano.sh/task-index": "0",
    });
    let annotations = json!({
        "scheduling.k8s.io/group-name": volcano_group_name(owner),
        "volcano.sh/job-name": "vc",
        "volcano.sh/job-version": "0",
        "volcano.sh/queue-name": "default",
        "volcano.sh/task-spec": task,
        "volcano.sh/task-index": "0",
        "volcano.sh/template-uid": format!("vc-{task}"),
    });
    pod(&format!("vc-{task}-0"), &labels, &annotations, Some(owner))
}
