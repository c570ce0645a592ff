//! The cluster itself: plain pods run on every node, and its parts can be stopped and started.

use anyhow::{Result, ensure};

use crate::bed::Bed;
use crate::pods;

pub(super) async fn a_plain_pod_runs_on_each_node(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-plain").await?;
    for node in bed.cluster().nodes() {
        let name = format!("on-{}", node.name());
        let pod = pods::run(&api, &pods::pinned(&name, 0, node.name())?).await?;
        ensure!(pods::node(&pod) == node.name());
        let said = bed
            .cluster()
            .kubectl(&["-n", "e2e-plain", "exec", &name, "--", "echo", "here"])
            .await?;
        ensure!(said.trim() == "here", "exec said {said:?}");
    }
    let nodes = bed.cluster().kubectl(&["get", "nodes", "--no-headers"]).await?;
    ensure!(
        nodes.lines().filter(|line| line.contains(" Ready ")).count() == 3,
        "{nodes}"
    );
    Ok(())
}

pub(super) async fn a_restarted_kubelet_keeps_its_pods(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-kubelet").await?;
    let node = &bed.cluster().nodes()[0];
    let before = pods::run(&api, &pods::pinned("before", 0, node.name())?).await?;
    node.restart("kubelet").await?;
    pods::run(&api, &pods::pinned("after", 0, node.name())?).await?;
    let still = api.get("before").await?;
    ensure!(pods::phase(&still) == "Running" && still.metadata.uid == before.metadata.uid);
    let restarts = still
        .status
        .and_then(|status| status.container_statuses)
        .unwrap_or_default();
    ensure!(
        restarts.iter().all(|container| container.restart_count == 0),
        "its container was restarted"
    );
    Ok(())
}

pub(super) async fn a_killed_api_server_loses_nothing(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-api").await?;
    pods::run(&api, &pods::sleeper("before", 0)?).await?;
    bed.cluster().program("kube-apiserver")?.kill().await?;
    ensure!(api.get("before").await.is_err(), "a dead API server answered");
    bed.cluster().start_again("kube-apiserver").await?;
    pods::running(&api, "before").await?;
    pods::run(&api, &pods::sleeper("after", 0)?).await?;
    Ok(())
}
