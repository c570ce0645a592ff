//! Gangs made by existing workloads. JobSet, LeaderWorkerSet and PyTorchJob run with their own controllers, whose Go
//! modules build here (see `tests/components/controllers`); a batch Job with kube-controller-manager. Volcano's
//! controller does not build with the others and needs a phase that only Volcano's scheduler sets. Volcano,
//! coscheduling, Koordinator and Kueue's plain groups are therefore pods with the labels, annotations and PodGroups of
//! their documentation. `gangs_owned` covers other controllers, `gangs_native` Kubernetes' own groups.

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use gantry_api::{Gang, GangPhase, GangStatus, Reason};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{self, GANG_LIMIT, Scene, brief, name_of};
use crate::{pods, records};

/// Expectations of one gang: integration, name prefix, members, a word of the source of its size.
pub(super) type Expected = (&'static str, &'static str, u32, &'static str);

pub(super) async fn unmodified_controllers_make_gangs(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-jobs").await?;
    bed.cluster().install_controllers().await?;
    bed.cluster().start_controllers(&scene.namespace).await?;
    // One GPU is free: room for a member of each, and for none of the gangs.
    for (number, size) in [8, 8, 3].into_iter().enumerate() {
        let pod = pods::sleeper(&format!("holder-{number}"), size)?;
        pods::run(&scene.pods, &pod).await?;
    }
    let template = gangs::template(1, &json!({}))?;
    for object in [job_set(&template), leader_worker_set(&template), pytorch_job(&template)] {
        apply(bed, &scene, &object).await?;
    }
    let expected: [Expected; 4] = [
        ("JobSet", "crawl", 5, "JobSet"),
        ("LeaderWorkerSet", "serve", 2, "leaderworkerset"),
        ("LeaderWorkerSet", "serve", 2, "leaderworkerset"),
        ("Kubeflow", "train", 3, "PyTorchJob"),
    ];
    stand(&scene, &expected, |gang| phase(gang) == GangPhase::Queued).await?;
    for pod in scene.pods.list(&ListParams::default()).await? {
        let name = name_of(&pod);
        ensure!(
            name.starts_with("holder") || pods::node(&pod).is_empty(),
            "{name} runs without the rest of its gang"
        );
    }
    for number in 0..3 {
        scene.delete(&format!("holder-{number}")).await?;
    }
    stand(&scene, &expected, |gang| phase(gang) == GangPhase::Bound).await?;
    let members: Vec<String> =
        scene.pods.list(&ListParams::default()).await?.iter().map(|pod| name_of(pod).to_owned()).collect();
    ensure!(members.len() == 12, "{members:?}");
    scene.run_on_grants(&members).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    for kind in ["jobset", "leaderworkerset", "pytorchjob"] {
        let args = ["-n", &scene.namespace, "delete", kind, "--all", "--wait=false"];
        bed.cluster().kubectl(&args).await?;
    }
    until("pods of controllers gone", GANG_LIMIT, async || {
        let left = scene.pods.list(&ListParams::default()).await;
        match left.map_err(|error| error.to_string())?.items.len() {
            0 => Ok(()),
            some => Err(format!("{some} are left")),
        }
    })
    .await?;
    bed.cluster().stop_controllers().await?;
    nothing_is_left(bed).await
}

pub(super) async fn marks_of_other_schedulers_make_gangs(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-marks").await?;
    bed.cluster().install_controllers().await?;
    let volcano = any_fields("scheduling.volcano.sh", "v1beta1", "PodGroup");
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &volcano.to_string()).await?;
    until("PodGroups of Volcano", GANG_LIMIT, async || {
        bed.cluster().kubectl(&["get", "podgroups.scheduling.volcano.sh", "-A"]).await
    })
    .await?;
    for (version, name) in
        [("scheduling.x-k8s.io/v1alpha1", "cosched"), ("scheduling.volcano.sh/v1beta1", "volcano")]
    {
        let group = json!({
            "apiVersion": version,
            "kind": "PodGroup",
            "metadata": { "name": name },
            "spec": { "minMember": 2 },
        });
        apply(bed, &scene, &group).await?;
    }
    let marks = [
        ("cosched", json!({ "scheduling.x-k8s.io/pod-group": "cosched" }), json!({})),
        (
            "volcano",
            json!({ "volcano.sh/job-name": "volcano" }),
            json!({ "scheduling.k8s.io/group-name": "volcano", "volcano.sh/task-spec": "worker" }),
        ),
        (
            "koord",
            json!({}),
            json!({
                "gang.scheduling.koordinator.sh/name": "koord",
                "gang.scheduling.koordinator.sh/min-available": "2",
            }),
        ),
        (
            "kueue",
            json!({ "kueue.x-k8s.io/pod-group-name": "kueue" }),
            json!({ "kueue.x-k8s.io/pod-group-total-count": "2" }),
        ),
    ];
    let member = |number: usize, (name, labels, annotations): &(&str, Value, Value)| -> Result<Pod> {
        let mut pod = records::recording(pods::sleeper(&format!("{name}-{number}"), 1)?, 100_000.0)?;
        pod.metadata.labels = serde_json::from_value(labels.clone())?;
        pod.metadata.annotations = serde_json::from_value(annotations.clone())?;
        Ok(pod)
    };
    for mark in &marks {
        scene.create_all([member(0, mark)?]).await?;
    }
    let expected: [Expected; 4] = [
        ("Coscheduling", "cosched", 2, "PodGroup"),
        ("Volcano", "volcano", 2, "PodGroup"),
        ("Koordinator", "koord", 2, "annotation"),
        ("Kueue", "kueue", 2, "annotation"),
    ];
    stand(&scene, &expected, |gang| {
        gang.status.as_ref().is_some_and(|status| {
            status.reason == Some(Reason::WaitingForMembers) && (status.members, status.min) == (1, 2)
        })
    })
    .await?;
    for (name, ..) in &marks {
        let pod = scene.pods.get(&format!("{name}-0")).await?;
        ensure!(pods::node(&pod).is_empty(), "{name}-0 runs alone");
    }
    for mark in &marks {
        scene.create_all([member(1, mark)?]).await?;
    }
    stand(&scene, &expected, |gang| phase(gang) == GangPhase::Bound).await?;
    let names: Vec<String> =
        marks.iter().flat_map(|(name, ..)| [format!("{name}-0"), format!("{name}-1")]).collect();
    scene.run_on_grants(&names).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)
}

/// Waits until the namespace has exactly these gangs, and each is as it should be.
pub(super) async fn stand(
    scene: &Scene<'_>,
    expected: &[Expected],
    is_so: impl Fn(&Gang) -> bool,
) -> Result<()> {
    let found = until("the gangs expected", GANG_LIMIT, async || {
        let all = scene.gangs.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
        let seen = || {
            let lines = all.iter().map(|gang| {
                let status = gang.status.as_ref().map(brief).unwrap_or_default();
                format!("{}: {status}", gang.metadata.name.as_deref().unwrap_or_default())
            });
            lines.collect::<Vec<_>>().join(" | ")
        };
        if all.len() != expected.len() {
            return Err(seen());
        }
        let mut left = all.clone();
        for (integration, name, min, decided_by) in expected {
            let place = left.iter().position(|gang| {
                let status = gang.status.clone().unwrap_or_default();
                status.integration == *integration
                    && status.name.starts_with(name)
                    && status.min == *min
                    && status.decided_by.contains(decided_by)
                    && is_so(gang)
            });
            left.swap_remove(place.ok_or_else(|| format!("no {integration} {name} in {}", seen()))?);
        }
        Ok(())
    });
    found.await.with_context(|| format!("in namespace {}", scene.namespace))
}

pub(super) fn phase(gang: &Gang) -> GangPhase {
    gang.status.as_ref().map(|status| status.phase).unwrap_or_default()
}

pub(super) async fn parallel_stateful_set_is_a_gang(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-sets").await?;
    for (name, policy) in [("together", "Parallel"), ("in-turn", "OrderedReady")] {
        apply(bed, &scene, &stateful_set(name, policy)?).await?;
    }
    let names = ["together-0", "together-1", "together-2"].map(str::to_owned);
    let is_bound = |status: &GangStatus| status.phase == GangPhase::Bound && status.bound == 3;
    let status = scene.status_where("together", "bound", is_bound).await?;
    let stays = scene.run_on_grants(&names).await?;
    for slot in status.decision.context("it is decided")?.reservations {
        let ordinal = names.iter().position(|name| *name == slot.pod_name);
        ensure!(
            ordinal.is_some() && slot.rank.map(|rank| rank as usize) == ordinal,
            "{slot:?} is out of turn"
        );
    }
    // The pod that is recreated under its name gets its reservation.
    let [_, lost, _] = &stays[..] else {
        anyhow::bail!("three have run: {stays:?}");
    };
    records::forget(bed.cluster(), lost);
    let uid = scene.pods.get(&lost.pod).await?.metadata.uid;
    scene.pods.delete(&lost.pod, &DeleteParams::default()).await?;
    until(format!("another {}", lost.pod), GANG_LIMIT, async || {
        let pod = scene.pods.get_opt(&lost.pod).await.map_err(|error| error.to_string())?;
        match pod.and_then(|pod| pod.metadata.uid) {
            other if other.is_some() && other != uid => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    scene.status_where("together", "bound again", is_bound).await?;
    let again = scene.run_on_grants(std::slice::from_ref(&lost.pod)).await?;
    ensure!(
        again.iter().all(|stay| stay.node == lost.node && stay.devices == lost.devices),
        "{again:?} instead of {lost:?}"
    );
    // The next is made when the one before is ready, which it is never alone.
    scene
        .status_where("in-turn", "one short", |status| {
            status.reason == Some(Reason::WaitingForMembers) && (status.members, status.min) == (1, 3)
        })
        .await?;
    ensure!(scene.bound("in-turn").await? == 0, "it runs alone");
    Ok(())
}

/// A StatefulSet of three pods of four GPUs that name a gang.
fn stateful_set(name: &str, policy: &str) -> Result<Value> {
    let words = json!({ GANG_ANNOTATION: name, GANG_MIN_ANNOTATION: "3" });
    let mut template = gangs::template(4, &words)?;
    template["metadata"]["labels"] = json!({ "app": name });
    template["spec"]["restartPolicy"] = json!("Always");
    Ok(json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": { "name": name },
        "spec": {
            "serviceName": name,
            "replicas": 3,
            "podManagementPolicy": policy,
            "selector": { "matchLabels": { "app": name } },
            "template": template,
        },
    }))
}

pub(super) async fn apply(bed: &Bed, scene: &Scene<'_>, object: &Value) -> Result<()> {
    let args = ["-n", &scene.namespace, "create", "-f", "-"];
    // A resource that was defined a moment ago may not be served yet.
    until("object made", GANG_LIMIT, async || {
        bed.cluster().kubectl_with_input(&args, &object.to_string()).await
    })
    .await?;
    Ok(())
}

/// One leader and two jobs of two workers.
fn job_set(template: &Value) -> Value {
    let job = |name: &str, replicas: u32, pods: u32| {
        json!({
            "name": name,
            "replicas": replicas,
            "template": { "spec": { "parallelism": pods, "completions": pods, "template": template } },
        })
    };
    json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": { "name": "crawl" },
        "spec": { "replicatedJobs": [job("leader", 1, 1), job("worker", 2, 2)] },
    })
}

/// Two groups of a leader and a worker.
fn leader_worker_set(template: &Value) -> Value {
    let mut template = template.clone();
    template["spec"]["restartPolicy"] = json!("Always");
    json!({
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": { "name": "serve" },
        "spec": {
            "replicas": 2,
            "leaderWorkerTemplate": { "size": 2, "workerTemplate": template },
        },
    })
}

/// A master and two workers. Their container must be called so.
fn pytorch_job(template: &Value) -> Value {
    let mut template = template.clone();
    template["spec"]["containers"][0]["name"] = json!("pytorch");
    let replicas = |count: u32| json!({ "replicas": count, "restartPolicy": "Never", "template": template });
    json!({
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": { "name": "train" },
        "spec": { "pytorchReplicaSpecs": { "Master": replicas(1), "Worker": replicas(2) } },
    })
}

/// A kind with arbitrary fields: the test uses only the pods and the object.
pub(super) fn any_fields(group: &str, version: &str, kind: &str) -> Value {
    let singular = kind.to_ascii_lowercase();
    let plural = format!("{singular}s");
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural, "singular": singular },
            "versions": [{
                "name": version,
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": {
                    "type": "object",
                    "x-kubernetes-preserve-unknown-fields": true,
                } },
            }],
        },
    })
}
