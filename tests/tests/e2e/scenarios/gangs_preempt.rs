//! Preemption: a gang preempts other gangs as a whole and within disruption budgets; a single pod breaks no gang if
//! another victim suffices. Victims are evicted, and the preemptor gets the freed GPUs.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_api::GangPhase;
use gantry_api::names::GANG_MIN_ANNOTATION;
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief, name_of};
use crate::records::Stay;
use crate::views::Metrics;
use crate::{pods, records};

/// The priority class of the preemptors; all other pods have priority 0.
pub(super) const IMPORTANT: &str = "e2e-important";

pub(super) async fn gang_preempts_whole_gang_within_budgets(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-preempt").await?;
    make_class(bed).await?;
    let guarded = Crew::new("guarded", 2, 4).labelled("app", "guarded");
    let open = Crew::new("open", 3, 4);
    // The budget is there before the pods, and allows nothing from its first moment.
    protect(&scene, &guarded).await?;
    scene.create(&guarded).await?;
    scene.runs(&guarded).await?;
    scene.create(&open).await?;
    let before = scene.runs(&open).await?;
    let uids = uids_of(&scene, &guarded).await?;
    // The cluster is full. This pod has waited longer than the gang, and must not get the GPUs that the gang preempts.
    scene.create_all([pods::sleeper("vulture", 8)?]).await?;

    // Eight GPUs: the guarded gang would be the smaller loss.
    let urgent = Crew::new("urgent", 2, 4).of_class(IMPORTANT);
    scene.create(&urgent).await?;
    let stays = scene.runs(&urgent).await?;
    are_gone(&scene, &open).await?;
    ensure!(
        devices(&stays).is_subset(&devices(&before)),
        "{stays:?} is not the place that was freed: {before:?}"
    );
    ensure!(uids_of(&scene, &guarded).await? == uids, "a budget did not protect its pods");
    let vulture = scene.pods.get("vulture").await?;
    ensure!(pods::node(&vulture).is_empty(), "{vulture:?} got the place");

    // Four GPUs are free, and only the guarded gang could go for the rest: once the budget is no more, it does.
    let next = Crew::new("next", 3, 4).of_class(IMPORTANT);
    scene.create(&next).await?;
    scene.phase("next", GangPhase::Queued).await?;
    ensure!(uids_of(&scene, &guarded).await? == uids, "a budget did not protect its pods");
    scene.holds_nothing(&next).await?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(bed.client(), &scene.namespace);
    budgets.delete(&guarded.name, &DeleteParams::default()).await?;
    scene.runs(&next).await?;
    are_gone(&scene, &guarded).await?;
    // A container killed before its end would count as running for ever.
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.delete("vulture").await?;
    scene.disband(&urgent).await?;
    scene.disband(&next).await?;
    nothing_is_left(bed).await
}

pub(super) async fn single_pod_preempts_without_breaking_gangs(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-preempt-single").await?;
    make_class(bed).await?;
    let smallest = bed.cluster().nodes()[2].name();
    let mut single = records::recording(pods::sleeper("single", 4)?, 100_000.0)?;
    if let Some(spec) = single.spec.as_mut() {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), smallest.to_owned())].into());
    }
    scene.create_all([single]).await?;
    let single = scene.run_on_grants(&["single".to_owned()]).await?;
    // The gang came last, so kube-scheduler by itself would rather have one of its members go.
    let crew = Crew::new("crew", 2, 8);
    scene.create(&crew).await?;
    scene.runs(&crew).await?;
    scene.create_all([pods::sleeper("vulture", 4)?]).await?;
    scene.pod_is_refused("vulture").await?;

    let urgent = records::recording(pods::sleeper("urgent", 4)?, 100_000.0)?;
    scene.create_all([of_class(urgent, IMPORTANT)?]).await?;
    let urgent = scene.run_on_grants(&["urgent".to_owned()]).await?;
    ensure!(devices(&urgent) == devices(&single), "{urgent:?} is not where {single:?} was");
    is_gone(&scene, "single").await?;
    scene.runs(&crew).await?;
    let vulture = scene.pods.get("vulture").await?;
    ensure!(pods::node(&vulture).is_empty(), "{vulture:?} got the place");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.delete("vulture").await?;
    scene.delete("urgent").await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

pub(super) async fn surplus_member_goes_rather_than_its_gang(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-preempt-surplus").await?;
    make_class(bed).await?;
    let holders = ["holder-0", "holder-1"];
    for name in holders {
        scene
            .create_all([of_class(records::recording(pods::sleeper(name, 8)?, 100_000.0)?, IMPORTANT)?])
            .await?;
    }
    scene.run_on_grants(&holders.map(str::to_owned)).await?;
    // All of the smallest node, of which one member is needed.
    let elastic = Crew::new("elastic", 4, 1).with(GANG_MIN_ANNOTATION, "1");
    scene.create(&elastic).await?;
    scene.runs(&elastic).await?;
    let before = uids_of(&scene, &elastic).await?;
    let urgent = Crew::new("urgent", 1, 1).of_class(IMPORTANT);
    scene.create(&urgent).await?;
    scene.runs(&urgent).await?;
    let left = uids_left(&scene, &elastic).await?;
    ensure!(left.len() == 3 && left.is_subset(&before), "{left:?} are left of {before:?}");
    scene.phase("elastic", GangPhase::Bound).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    for name in holders {
        scene.delete(name).await?;
    }
    scene.disband(&urgent).await?;
    scene.disband(&elastic).await?;
    nothing_is_left(bed).await
}

/// How long victims may take in addition to their grace period.
const EVICTION: Duration = Duration::from_secs(120);

/// The runtime of a victim's container hangs, so that kubelet never ends the pod. The gang releases what it reserved, takes
/// no other victim, and runs once the pod has ended.
pub(super) async fn victim_that_never_ends_is_given_up(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-preempt-hangs").await?;
    make_class(bed).await?;
    let nodes = bed.cluster().nodes();
    for (pod, node) in [("victim", &nodes[0]), ("bystander", &nodes[1])] {
        scene.create_all([on_node(pods::sleeper(pod, 8)?, node.name())?]).await?;
    }
    let victim = pods::running(&scene.pods, "victim").await?;
    let bystander = pods::running(&scene.pods, "bystander").await?;
    let runtime = runtime_of(&victim)?;
    let urgent = Crew::new("urgent", 1, 8).of_class(IMPORTANT);
    kill_process(runtime, Signal::STOP)?;
    let outcome = async {
        scene.create_all([on_node(urgent.pod(0)?, nodes[0].name())?]).await?;
        scene.phase(&urgent.name, GangPhase::Preempting).await?;
        let start = Instant::now();
        let status = scene.phase(&urgent.name, GangPhase::Backoff).await?;
        let lasted = start.elapsed();
        ensure!(lasted >= EVICTION, "{} after {lasted:?}", brief(&status));
        ensure!(status.message.starts_with("the evicted pods were not gone in time"), "{}", status.message);
        Metrics::settled(bed, &[("gang_reservations", 0.0)]).await?;
        let late = scene.pods.get("victim").await?;
        ensure!(
            late.metadata.deletion_timestamp.is_some() && late.metadata.uid == victim.metadata.uid,
            "{late:?}"
        );
        let other = scene.pods.get("bystander").await?;
        let is_disturbed =
            other.metadata.deletion_timestamp.is_some() || other.metadata.uid != bystander.metadata.uid;
        ensure!(!is_disturbed, "{other:?}");
        scene.holds_nothing(&urgent).await
    }
    .await;
    kill_process(runtime, Signal::CONT)?;
    outcome?;
    is_gone(&scene, "victim").await?;
    scene.runs(&urgent).await?;
    scene.delete("bystander").await?;
    scene.disband(&urgent).await?;
    nothing_is_left(bed).await
}

/// The same pod, for a node.
pub(super) fn on_node(mut pod: Pod, node: &str) -> Result<Pod> {
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
    Ok(pod)
}

/// The process of containerd that starts and ends the containers of a pod.
fn runtime_of(pod: &Pod) -> Result<Pid> {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let container = containers.into_iter().find_map(|container| container.container_id.as_deref());
    let id = container.and_then(|id| id.strip_prefix("containerd://")).context("the pod has a container")?;
    let processes = fs::read_dir("/proc")?.flatten().map(|entry| entry.path());
    let is_in_it = |process: &std::path::PathBuf| {
        fs::read_to_string(process.join("cgroup")).is_ok_and(|groups| groups.contains(id))
    };
    for process in processes.filter(is_in_it) {
        // The parent is the last of the fields before which the name in parentheses is.
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        let Some(parent) = parent.and_then(|parent| parent.parse().ok()) else { continue };
        let name = fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
        if name.starts_with("containerd-shim") {
            return Pid::from_raw(parent).context("a process ID");
        }
    }
    anyhow::bail!("no process of container {id}")
}

pub(super) async fn make_class(bed: &Bed) -> Result<()> {
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": { "name": IMPORTANT },
        "value": 1000,
    });
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &class.to_string()).await?;
    Ok(())
}

pub(super) fn of_class(mut pod: Pod, class: &str) -> Result<Pod> {
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.priority_class_name = Some(class.to_owned());
    Ok(pod)
}

/// Allows no member of a gang to be disrupted.
pub(super) async fn protect(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    let budget: PodDisruptionBudget = serde_json::from_value(json!({
        "metadata": { "name": crew.name },
        "spec": {
            "minAvailable": crew.pod_names().len(),
            "selector": { "matchLabels": { "app": crew.name } },
        },
    }))?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(scene.bed.client(), &scene.namespace);
    budgets.create(&PostParams::default(), &budget).await?;
    Ok(())
}

/// Waits until no member of a gang is there.
pub(super) async fn are_gone(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    for name in crew.pod_names() {
        is_gone(scene, &name).await?;
    }
    Ok(())
}

pub(super) async fn is_gone(scene: &Scene<'_>, name: &str) -> Result<()> {
    let gone = until(format!("{name} gone"), GANG_LIMIT, async || match scene.pods.get_opt(name).await {
        Ok(None) => Ok(()),
        Ok(Some(pod)) => Err(format!("{}: {}", pods::phase(&pod), pods::said(&pod))),
        Err(error) => Err(error.to_string()),
    });
    Ok(gone.await?)
}

/// The UIDs of members that run undisturbed.
pub(super) async fn uids_of(scene: &Scene<'_>, crew: &Crew) -> Result<BTreeSet<String>> {
    let mut uids = BTreeSet::new();
    for name in crew.pod_names() {
        let pod = scene.pods.get(&name).await?;
        ensure!(
            pods::phase(&pod) == "Running" && pod.metadata.deletion_timestamp.is_none(),
            "{name}: {}",
            pods::said(&pod)
        );
        uids.extend(pod.metadata.uid);
    }
    Ok(uids)
}

/// The UIDs of the members that are not deleted.
async fn uids_left(scene: &Scene<'_>, crew: &Crew) -> Result<BTreeSet<String>> {
    let names = crew.pod_names();
    let pods = scene.pods.list(&ListParams::default()).await?;
    let is_left = |pod: &Pod| {
        pod.metadata.deletion_timestamp.is_none() && names.iter().any(|name| *name == name_of(pod))
    };
    Ok(pods.into_iter().filter(is_left).filter_map(|pod| pod.metadata.uid).collect())
}

fn devices(stays: &[Stay]) -> BTreeSet<(&str, &str)> {
    stays.iter().flat_map(|stay| stay.devices.iter().map(|device| (&*stay.node, &**device))).collect()
}
