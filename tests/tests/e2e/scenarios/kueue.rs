//! The real Kueue in front: it admits by quota, Gantry places.

use anyhow::{Context, Result, ensure};
use gantry_api::names::GANG_MIN_ANNOTATION;
use gantry_api::{Gang, GangPhase};
use gantry_e2e::until;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{self, GANG_LIMIT, Scene, brief, name_of};
use crate::{pods, records};

const QUEUE: &str = "team";
const KUEUE: &str = "kueue.x-k8s.io/v1beta2";
/// The quota of the queue, in GPUs.
const QUOTA: usize = 8;

/// A Job beyond the quota has no pods and no gang. One of higher priority preempts the running one: the reservations of that
/// are released at once, because its Job is suspended, and it runs again when the other has ended. Of a Job that accepts fewer
/// pods, as many as the quota admits are a whole gang.
pub(super) async fn quota_admits_and_gantry_places(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-kueue").await?;
    bed.cluster().start_kueue(&scene.namespace).await?;
    // As many GPUs are free as the quota admits: all of one node.
    for (number, size) in [8, 4].into_iter().enumerate() {
        pods::run(&scene.pods, &pods::sleeper(&format!("holder-{number}"), size)?).await?;
    }
    for object in queue(&scene.namespace) {
        apply_to_kueue(bed, &object).await?;
    }
    let jobs: Api<Job> = Api::namespaced(bed.client(), &scene.namespace);
    let create = async |job: Value| -> Result<()> {
        jobs.create(&PostParams::default(), &serde_json::from_value(job)?).await?;
        Ok(())
    };

    create(job("first", "low", 2)?).await?;
    let before = runs(&scene, "first", 2).await?;

    create(job("second", "low", 2)?).await?;
    reports(bed, &scene, "second", "QuotaReserved", "insufficient unused quota").await?;
    ensure!(members(&scene, "second").await?.is_empty(), "a Job that was not admitted has pods");
    ensure!(gang(&scene, "second").await?.is_none(), "a Job that was not admitted has a gang");

    create(job("urgent", "high", 2)?).await?;
    // Long before reservations for a Job that is restarted would end.
    let during = runs(&scene, "urgent", 2).await?;
    ensure!(devices(&before) == devices(&during), "{before:?} and then {during:?}");
    let first = jobs.get("first").await?;
    ensure!(
        first.spec.and_then(|spec| spec.suspend) == Some(true),
        "the Job that was preempted is not suspended"
    );
    ensure!(members(&scene, "first").await?.is_empty(), "a Job that was preempted has pods");
    if let Some(left) = gang(&scene, "first").await?.and_then(|gang| gang.status) {
        ensure!(left.decision.is_none(), "a Job that was preempted keeps its reservations: {}", brief(&left));
    }

    let background = DeleteParams::background();
    for name in ["second", "urgent"] {
        jobs.delete(name, &background).await?;
    }
    runs(&scene, "first", 2).await?;
    jobs.delete("first", &background).await?;

    let mut fewer = job("fewer", "low", 4)?;
    fewer["metadata"]["annotations"] = json!({
        "kueue.x-k8s.io/job-min-parallelism": "1",
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    });
    create(fewer).await?;
    runs(&scene, "fewer", 2).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;

    jobs.delete("fewer", &background).await?;
    until("no pods of Jobs", GANG_LIMIT, async || {
        let left = members(&scene, "fewer").await.map_err(|error| error.to_string())?;
        if left.is_empty() { Ok(()) } else { Err(format!("{} are left", left.len())) }
    })
    .await?;
    bed.cluster().stop_kueue().await?;
    for number in 0..2 {
        scene.delete(&format!("holder-{number}")).await?;
    }
    nothing_is_left(bed).await
}

/// A queue of [`QUOTA`] GPUs in which the more important preempt the less important, and two priorities.
fn queue(namespace: &str) -> Vec<Value> {
    let class = |name: &str, value: i32| {
        json!({
            "apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "metadata": { "name": name }, "value": value,
        })
    };
    vec![
        class("low", 10),
        class("high", 1000),
        json!({ "apiVersion": KUEUE, "kind": "ResourceFlavor", "metadata": { "name": "any" } }),
        json!({
            "apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": { "name": QUEUE },
            "spec": {
                "namespaceSelector": {},
                "preemption": { "withinClusterQueue": "LowerPriority" },
                "resourceGroups": [{
                    "coveredResources": ["nvidia.com/gpu"],
                    "flavors": [{
                        "name": "any",
                        "resources": [{ "name": "nvidia.com/gpu", "nominalQuota": QUOTA }],
                    }],
                }],
            },
        }),
        json!({
            "apiVersion": KUEUE, "kind": "LocalQueue",
            "metadata": { "name": QUEUE, "namespace": namespace },
            "spec": { "clusterQueue": QUEUE },
        }),
    ]
}

/// A Job of so many pods of 4 GPUs, all of which are needed.
fn job(name: &str, class: &str, members: usize) -> Result<Value> {
    let mut template = gangs::template(4, &json!({ GANG_MIN_ANNOTATION: "all" }))?;
    template["spec"]["restartPolicy"] = json!("Never");
    Ok(json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": { "kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": class },
        },
        "spec": {
            "parallelism": members,
            "completions": members,
            "completionMode": "Indexed",
            "suspend": true,
            "template": template,
        },
    }))
}

/// Kueue's webhook answers a moment after its probe does.
async fn apply_to_kueue(bed: &Bed, object: &Value) -> Result<()> {
    let text = object.to_string();
    until(format!("{} applied", object["kind"]), GANG_LIMIT, async || {
        let applied = bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &text).await;
        applied.map_err(|error| error.to_string())
    })
    .await?;
    Ok(())
}

/// The pods of a Job that have not ended.
async fn members(scene: &Scene<'_>, job: &str) -> Result<Vec<Pod>> {
    let all = scene.pods.list(&ListParams::default().labels(&format!("job-name={job}"))).await?;
    let live = |pod: &Pod| !matches!(pods::phase(pod), "Succeeded" | "Failed");
    Ok(all.items.into_iter().filter(live).collect())
}

/// The Gang of a Job.
async fn gang(scene: &Scene<'_>, job: &str) -> Result<Option<Gang>> {
    let all = scene.gangs.list(&ListParams::default()).await?;
    let named = |gang: &Gang| gang.status.as_ref().is_some_and(|status| status.name.starts_with(job));
    Ok(all.items.into_iter().find(named))
}

/// Waits until a Job's gang is bound with so many members, and each has what it was granted. Returns the members.
async fn runs(scene: &Scene<'_>, job: &str, count: usize) -> Result<Vec<Pod>> {
    until(format!("gang of {job} bound"), GANG_LIMIT, async || {
        let gang = gang(scene, job).await.map_err(|error| error.to_string())?;
        let status = gang.and_then(|gang| gang.status).ok_or("no gang")?;
        let is_whole = status.phase == GangPhase::Bound && status.min as usize == count;
        if is_whole { Ok(()) } else { Err(brief(&status)) }
    })
    .await?;
    let members = members(scene, job).await?;
    ensure!(members.len() == count, "{} pods of {job}, expected {count}", members.len());
    let names: Vec<String> = members.iter().map(|pod| name_of(pod).to_owned()).collect();
    scene.run_on_grants(&names).await?;
    Ok(members)
}

/// Node and devices of pods, as one set.
fn devices(members: &[Pod]) -> std::collections::BTreeSet<String> {
    members.iter().filter_map(|pod| pods::granted(pod).ok()).flatten().collect()
}

/// Waits until a condition of a Job's Workload has this text.
async fn reports(bed: &Bed, scene: &Scene<'_>, job: &str, condition: &str, text: &str) -> Result<()> {
    until(format!("{condition} of {job}"), GANG_LIMIT, async || {
        let args = ["-n", &scene.namespace, "get", "workloads.kueue.x-k8s.io", "-o", "json"];
        let list = bed.cluster().kubectl(&args).await.map_err(|error| error.to_string())?;
        let list: Value = serde_json::from_str(&list).map_err(|error| error.to_string())?;
        let items = list["items"].as_array().into_iter().flatten();
        let mut owned = items.filter(|item| item["metadata"]["ownerReferences"][0]["name"] == job);
        let workload = owned.next().ok_or("no Workload")?;
        let conditions = workload["status"]["conditions"].as_array().into_iter().flatten();
        let mut messages = conditions
            .filter(|found| found["type"] == condition)
            .filter_map(|found| found["message"].as_str());
        if messages.any(|message| message.contains(text)) {
            Ok(())
        } else {
            Err(workload["status"].to_string())
        }
    })
    .await
    .context("Kueue's Workload")?;
    Ok(())
}
