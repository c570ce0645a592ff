//! What dies and comes back: pods by force, the plugin, kubelet, the extender, the API server. No device is in two
//! containers at once, and afterwards every device is free again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry::{EXTENDER, PLUGIN};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};

use super::churn::{deviations_are_accounted_for, nothing_is_left};
use crate::bed::Bed;
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
