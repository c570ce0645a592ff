//! `--watch`: shows the cluster as it changes, until Ctrl-C. A terminal gets one page that is redrawn, other outputs a
//! few lines per change. A node is one line: its GPUs in boxes, NVLinks between neighbours, NUMA nodes apart, a letter for
//! each pod.

use std::time::Duration;

use anyhow::Context;
use gantry_api::Gang;
use gantry_map::{ClusterMap, LEGEND, Letters, names, strip};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::screen::{Screen, Style};

/// Interval between two looks at the cluster.
const EVERY: Duration = Duration::from_millis(300);

/// Shows the cluster until `shutdown`.
///
/// # Errors
/// The cluster can no longer be read.
pub(crate) async fn run(
    cluster: &Cluster,
    screen: Screen,
    mut letters: Letters,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    screen.line("");
    screen.line("Watching; Ctrl-C ends it and removes everything.");
    if screen.terminal {
        // Time to read what stands above, which the first page will replace.
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(Duration::from_secs(8)) => {}
        }
    }
    let mut shown = String::new();
    loop {
        let page = page(cluster, screen, &mut letters).await?;
        if page != shown {
            screen.page(&page);
            shown = page;
        }
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

async fn page(cluster: &Cluster, screen: Screen, letters: &mut Letters) -> anyhow::Result<String> {
    let view = cluster.view().await?;
    letters.learn(&view);
    let mut lines = strips(&view, letters, screen);
    for node in &view.nodes {
        let unhealthy =
            node.gpus.iter().enumerate().filter_map(|(index, gpu)| Some((index, gpu.unhealthy.as_ref()?)));
        lines.extend(unhealthy.map(|(index, reason)| format!("  {} GPU {index}: {reason}", node.name)));
    }
    lines.push(String::new());
    let pods = cluster.pods().list(&ListParams::default()).await.context("listing pods")?;
    lines.extend(pods.items.iter().map(describe));
    lines.push(String::new());
    let gangs: Api<Gang> = Api::namespaced(cluster.client.clone(), "default");
    let gangs = gangs.list(&ListParams::default()).await.context("listing Gangs")?;
    lines.extend(gangs.items.iter().map(describe_gang));
    lines.push(String::new());
    if screen.terminal {
        lines.extend(LEGEND.map(str::to_owned));
        lines.push(format!("KUBECONFIG={}   Ctrl-C ends", cluster.kubeconfig.display()));
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

fn describe_gang(gang: &Gang) -> String {
    let status = gang.status.clone().unwrap_or_default();
    format!(
        "  gang {:<10} {:?}, {} of {} bound: {}",
        gang.name_any(),
        status.phase,
        status.bound,
        status.min,
        status.message
    )
}

fn describe(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("-");
    let waiting = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
        .and_then(|condition| condition.message.clone());
    let why = waiting.or(status.message).unwrap_or_default();
    format!("  {:<10} {:<10} {node:<6} {why}", pod.name_any(), status.phase.unwrap_or_default())
}

/// One line per node.
pub(crate) fn strips(view: &ClusterMap, letters: &Letters, screen: Screen) -> Vec<String> {
    let width = view.nodes.iter().map(|node| node.name.chars().count()).max().unwrap_or(0);
    view.nodes
        .iter()
        .map(|node| {
            let strip = strip(node, letters, screen.terminal);
            let names = screen.styled(Style::FAINT, names(node, letters));
            format!("  {:width$}  {strip}  {names}", node.name).trim_end().to_owned()
        })
        .collect()
}
