//! The cluster itself: plain pods run on every node, and its parts can be stopped and started.

use std::time::Duration;

use anyhow::{Result, ensure};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{gantry, podresources, until};
use kube::api::PostParams;

use crate::bed::Bed;
use crate::{pods, records};

pub(super) async fn plain_pod_runs_on_each_node(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-plain").await?;
    for node in bed.cluster().nodes() {
        let name = format!("on-{}", node.name());
        let pod = pods::run(&api, &pods::pinned(&name, 0, node.name())?).await?;
        ensure!(pods::node(&pod) == node.name());
        let said = bed.cluster().kubectl(&["-n", "e2e-plain", "exec", &name, "--", "echo", "here"]).await?;
        ensure!(said.trim() == "here", "exec said {said:?}");
    }
    let nodes = bed.cluster().kubectl(&["get", "nodes", "--no-headers"]).await?;
    ensure!(nodes.lines().filter(|line| line.contains(" Ready ")).count() == 3, "{nodes}");
    Ok(())
}

pub(super) async fn kubelet_restart_keeps_pods(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-kubelet").await?;
    let node = &bed.cluster().nodes()[0];
    let before = pods::run(&api, &pods::pinned("before", 0, node.name())?).await?;
    node.restart("kubelet").await?;
    pods::run(&api, &pods::pinned("after", 0, node.name())?).await?;
    let still = api.get("before").await?;
    ensure!(pods::phase(&still) == "Running" && still.metadata.uid == before.metadata.uid);
    let restarts = still.status.and_then(|status| status.container_statuses).unwrap_or_default();
    ensure!(restarts.iter().all(|container| container.restart_count == 0), "its container was restarted");
    Ok(())
}

pub(super) async fn api_server_kill_loses_nothing(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-api").await?;
    pods::run(&api, &pods::sleeper("before", 0)?).await?;
    bed.cluster().program("kube-apiserver")?.kill().await?;
    ensure!(api.get("before").await.is_err(), "a dead API server answered");
    bed.cluster().start_again("kube-apiserver").await?;
    pods::running(&api, "before").await?;
    let after = pods::sleeper("after", 0)?;
    let mut runs = std::pin::pin!(pods::run(&api, &after));
    loop {
        tokio::select! {
            pod = &mut runs => return pod.map(drop),
            // kube-scheduler ends if the API server was away for longer than its lease lasts.
            () = tokio::time::sleep(Duration::from_secs(1)) => bed.revive_control().await?,
        }
    }
}

pub(super) async fn container_logs_and_kubelet_api_are_readable(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-records").await?;
    let short = records::recording(pods::sleeper("short", 0)?, 0.3)?;
    let stubborn = records::stubborn(pods::sleeper("stubborn", 0)?)?;
    for pod in [short, stubborn] {
        api.create(&PostParams::default(), &pod).await?;
    }
    let ended = pods::ended(&api, "short").await?;
    ensure!(ended == "Succeeded", "short: {ended}");
    pods::running(&api, "stubborn").await?;
    let stays = until("both records", pods::RUN_LIMIT, async || {
        let stays = records::read(bed.cluster()).map_err(|error| error.to_string())?;
        let ended = stays.values().filter(|stay| stay.to.is_some()).count();
        if ended == 2 { Ok(stays) } else { Err(format!("{stays:?}")) }
    })
    .await?;
    for stay in stays.values() {
        ensure!(stay.devices.is_empty() && stay.to >= Some(stay.from), "{stay:?}");
    }
    for node in bed.cluster().nodes() {
        let held = podresources::held(node, "nvidia.com/gpu").await?;
        ensure!(held.is_empty(), "{held:?}");
    }
    Ok(())
}

pub(super) async fn simulated_gpus_are_on_their_nodes(bed: &Bed) -> Result<()> {
    for (node, machine) in bed.cluster().nodes().iter().zip(gantry::unlike_machines()) {
        let hardware = Hardware::install(node, &machine)?;
        let args = hardware.plugin_args();
        let dev = args.iter().find_map(|arg| arg.strip_prefix("--container-dev-root=")).unwrap_or_default();
        let first = node.exec(&["stat", "-c", "%F", &format!("{dev}/nvidia0")]).await?;
        ensure!(first.trim() == "character special file", "{first}");
    }
    Ok(())
}
