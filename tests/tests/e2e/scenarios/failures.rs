//! What dies and comes back: pods by force, the plugin, kubelet, the extender, the API server. No device is in two
//! containers at once, and afterwards every device is free again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_ARRIVAL_ANNOTATION, GPU_RESOURCE};
use gantry_api::{GangPhase, GangStatus};
use gantry_e2e::gantry::{EXTENDER, PLUGIN};
use gantry_e2e::{podresources, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};

use super::churn::{deviations_are_accounted_for, nothing_is_left};
use super::modes::run_on;
use super::storm::copy;
use crate::bed::Bed;
use crate::gangs::{Crew, Scene};
use crate::views::{probe, reports};
use crate::{pods, records};

/// How long the API server is away: for longer than any lease lasts, and than kube-scheduler lives without its own.
const AWAY: Duration = Duration::from_secs(8);

pub(super) async fn force_deleted_pod_keeps_devices_until_exit(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-force").await?;
    let (node, size) = gpus
        .all()
        .into_iter()
        .map(|(node, devices)| (node, devices.len()))
        .next()
        .context("there are machines")?;
    let mut stubborn = records::stubborn(pods::sleeper("stubborn", size)?)?;
    if let Some(spec) = stubborn.spec.as_mut() {
        spec.termination_grace_period_seconds = Some(30);
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.clone())].into());
    }
    pods::run(&api, &stubborn).await?;
    until("its record", pods::RUN_LIMIT, async || {
        let stays = records::read(bed.cluster()).map_err(|error| error.to_string())?;
        stays.get("stubborn").map(|_| ()).ok_or_else(|| "none yet".to_owned())
    })
    .await?;
    api.delete("stubborn", &DeleteParams::default().grace_period(0)).await?;
    let mut next = records::recording(pods::sleeper("next", size)?, 0.5)?;
    if let Some(spec) = next.spec.as_mut() {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node)].into());
    }
    api.create(&PostParams::default(), &next).await?;
    let ended = pods::ended(&api, "next").await?;
    ensure!(ended == "Succeeded", "next: {ended}");
    let stays = records::read(bed.cluster())?;
    ensure!(stays.contains_key("stubborn") && stays.contains_key("next"), "not both wrote what they got");
    records::ensure_no_device_twice(&stays)?;
    nothing_is_left(bed).await
}

pub(super) async fn plugin_killed_during_admission(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-plugin").await?;
    let nodes = bed.cluster().nodes();
    let burst = burst(&api, "a", 8, 2).await?;
    for node in nodes {
        node.restart(PLUGIN).await?;
    }
    // kubelet itself fails a pod whose plugin dies during the allocation. The others must have run.
    for name in &burst {
        pods::ended(&api, name).await?;
    }
    bed.gpus().await?.wait_until_ready(bed.cluster()).await?;
    all_succeed(&api, &self::burst(&api, "b", 8, 2).await?).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

pub(super) async fn kubelet_restarted_under_running_pods(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-kubelet-gpus").await?;
    let before = pods::run(&api, &pods::sleeper("before", 2)?).await?;
    let seen = pods::seen(bed.cluster(), &before, "main").await?;
    let node = bed.cluster().node(pods::node(&before))?;
    node.restart("kubelet").await?;
    all_succeed(&api, &burst(&api, "after", 6, 2).await?).await?;
    let still = pods::running(&api, "before").await?;
    ensure!(pods::held(bed.cluster(), &still, "main").await? == seen, "kubelet forgot its devices");
    for stay in records::read(bed.cluster())?.values().filter(|stay| stay.node == node.name()) {
        ensure!(stay.devices.is_disjoint(&seen), "{} got devices of a running pod", stay.pod);
    }
    api.delete("before", &DeleteParams::default()).await?;
    nothing_is_left(bed).await
}

pub(super) async fn extender_killed_repeatedly(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-extender").await?;
    let mut names = Vec::new();
    // At once, and later in the burst: before bind, and between a Binding and its answer, as it comes.
    for (round, after) in [0, 3, 10, 30].into_iter().enumerate() {
        names.extend(burst(&api, &format!("r{round}-"), 6, 1).await?);
        tokio::time::sleep(Duration::from_millis(after)).await;
        bed.cluster().control().daemon(EXTENDER)?.kill().await?;
        bed.cluster().control().run_again(EXTENDER).await?;
    }
    all_succeed(&api, &names).await?;
    granted_is_got(bed, &api).await?;
    nothing_is_left(bed).await
}

/// kubelet's socket of pod resources is away: the plugin allocates by grants.
pub(super) async fn unreadable_pod_resources_stop_no_pod(bed: &Bed) -> Result<()> {
    const SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
    const AWAY: &str = "/var/lib/kubelet/pod-resources/away";
    bed.gpus().await?;
    let api = bed.namespace("e2e-pod-resources").await?;
    let node = &bed.cluster().nodes()[2];
    let (place, reachable) = (node.sandbox(), "gantry_plugin_reachable{peer=\"pod-resources\"}");
    node.exec(&["mv", SOCKET, AWAY]).await?;
    // Its open connection would last.
    node.restart(PLUGIN).await?;
    let outcome = async {
        probe(place, 9410, "/readyz", 200, "degraded: kubelet's pod resources cannot be read").await?;
        reports(place, 9410, &format!("{reachable} 0")).await?;
        let pod = run_on(&api, "unread", GPU_RESOURCE, 2, node.name()).await?;
        let seen = pods::seen(bed.cluster(), &pod, "main").await?;
        ensure!(seen == pods::granted(&pod)?, "it got {seen:?}");
        anyhow::Ok(())
    }
    .await;
    node.exec(&["mv", AWAY, SOCKET]).await?;
    outcome?;
    reports(place, 9410, &format!("{reachable} 1")).await?;
    let unread = pods::running(&api, "unread").await?;
    let held = pods::held(bed.cluster(), &unread, "main").await?;
    ensure!(held == pods::granted(&unread)?, "kubelet gave {held:?}");
    Ok(())
}

pub(super) async fn api_server_unavailable_for_a_while(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-away").await?;
    let mut names = burst(&api, "before", 8, 2).await?;
    bed.cluster().program("kube-apiserver")?.kill().await?;
    tokio::time::sleep(AWAY).await;
    let plugins = bed.cluster().nodes().iter().map(|node| node.program(PLUGIN));
    for daemon in plugins.chain([bed.cluster().program(EXTENDER)]) {
        daemon?.check().context("a daemon of ours must outlive the API server")?;
    }
    bed.cluster().start_again("kube-apiserver").await?;
    bed.revive().await?;
    names.extend(burst(&api, "after", 8, 2).await?);
    all_succeed(&api, &names).await?;
    // Right after its return kubelet may admit pods in another order than that of their Bindings, or before the plugin
    // observes them.
    deviations_are_accounted_for(bed, &api).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

/// etcd is put back to a backup, and all clients of the API server start again, as Kubernetes asks for: what was bound
/// since waits again or is gone, and kubelet ends its containers.
pub(super) async fn restored_etcd_takes_bindings_back(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-etcd").await?;
    let folder = bed.cluster().control().folder();
    let (data, backup) = (folder.join("etcd"), folder.join("etcd-before"));
    let before = pods::run(&scene.pods, &pods::sleeper("before", 2)?).await?;
    let seen = pods::seen(bed.cluster(), &before, "main").await?;
    let crew = Crew::new("crew", 2, 4).with(GANG_ARRIVAL_ANNOTATION, "300");
    scene.create_all([crew.pod(0)?, crew.pod_kept_out(1)?]).await?;
    scene.phase(&crew.name, GangPhase::Reserved).await?;
    exchange(bed, &data, &backup).await?;

    scene.let_in().await?;
    scene.runs(&crew).await?;
    let since = pods::run(&scene.pods, &pods::sleeper("since", 2)?).await?;
    let taken = pods::seen(bed.cluster(), &since, "main").await?;
    ensure!(taken.is_disjoint(&seen), "since has {taken:?}");
    exchange(bed, &backup, &data).await?;
    std::fs::remove_dir_all(&backup)?;
    // Watches that go on are of revisions that are no more, and show nothing of what was put back.
    bed.cluster().program(EXTENDER)?.kill().await?;
    bed.cluster().start_again(EXTENDER).await?;
    for node in bed.cluster().nodes() {
        node.restart("kubelet").await?;
        node.restart(PLUGIN).await?;
    }
    bed.cluster().wait_until_ready().await?;

    let still = pods::running(&scene.pods, "before").await?;
    ensure!(still.metadata.uid == before.metadata.uid, "before is another pod");
    ensure!(scene.pods.get_opt("since").await?.is_none(), "since is there");
    let unbound = |status: &GangStatus| status.phase != GangPhase::Bound && status.bound == 0;
    scene.status_where(&crew.name, "not bound", unbound).await?;
    scene.holds_nothing(&crew).await?;
    for node in bed.cluster().nodes() {
        until(format!("containers of that time ended on {}", node.name()), pods::RUN_LIMIT, async || {
            let held = podresources::held(node, GPU_RESOURCE).await.map_err(|error| error.to_string())?;
            let is_left = |(_, pod, _): &&podresources::ContainerName| *pod != "before";
            match held.keys().find(is_left) {
                Some(left) => Err(format!("{left:?}")),
                None => Ok(()),
            }
        })
        .await?;
    }
    bed.gpus().await?.wait_until_ready(bed.cluster()).await?;
    until("kubelet knows the pod from before", pods::RUN_LIMIT, async || {
        let now = pods::seen(bed.cluster(), &still, "main").await.map_err(|error| format!("{error:#}"))?;
        if now == seen { Ok(()) } else { Err(format!("{now:?}, not {seen:?}")) }
    })
    .await?;
    scene.let_in().await?;
    scene.runs(&crew).await?;
    scene.close().await?;
    scene.disband(&crew).await?;
    scene.delete("before").await?;
    nothing_is_left(bed).await
}

/// Copies the data of etcd from one folder to another while the control plane is away. Its clients in the control plane
/// start again, as etcd's documentation advises after a restore.
async fn exchange(bed: &Bed, from: &Path, to: &Path) -> Result<()> {
    for name in ["kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager"] {
        bed.cluster().program(name)?.kill().await?;
    }
    copy(from, to).await?;
    bed.revive_control().await?;
    bed.cluster().wait_until_ready().await?;
    Ok(())
}

/// Creates pods that record their devices and run for a second.
async fn burst(api: &Api<Pod>, prefix: &str, count: usize, size: usize) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for number in 0..count {
        let name = format!("{prefix}{number}");
        let pod = records::recording(pods::sleeper(&name, size)?, 1.0)?;
        api.create(&PostParams::default(), &pod).await?;
        names.push(name);
    }
    Ok(names)
}

async fn all_succeed(api: &Api<Pod>, names: &[String]) -> Result<()> {
    for name in names {
        let ended = pods::ended(api, name).await?;
        ensure!(ended == "Succeeded", "{name}: {}", pods::said(&api.get(name).await?));
    }
    Ok(())
}

/// Every pod's container got exactly the grant in its annotation, and no device was in two at once.
async fn granted_is_got(bed: &Bed, api: &Api<Pod>) -> Result<()> {
    let stays = records::read(bed.cluster())?;
    for pod in api.list(&ListParams::default()).await? {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let stay = stays.get(&name).with_context(|| format!("{name} left no record"))?;
        let granted = pods::granted(&pod)?;
        ensure!(stay.devices == granted, "{name} got {:?}, was granted {granted:?}", stay.devices);
    }
    records::ensure_no_device_twice(&stays)
}
