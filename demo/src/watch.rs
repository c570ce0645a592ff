//! `--watch`: shows the cluster as it changes, until Ctrl-C. A terminal gets one page that is redrawn, other outputs a
//! few lines per change. A node is one line: its GPUs in boxes, NVLinks between neighbours, NUMA nodes apart, a letter for
//! each pod.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use gantry_api::Gang;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::screen::{Screen, Style};
use crate::view::{ClusterView, GpuView, Hold, NodeView};

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

/// Explains the marks.
pub(crate) const LEGEND: [&str; 2] = [
    "[0 a] GPU 0 held by pod a   [1 ·] free   [2 x] unhealthy   [3!a] withheld: pod a is deleted, its processes still run",
    "═ several NVLinks to the neighbour   ─ one   │ another NUMA node",
];

/// Looks of pods, in turn.
const PODS: [Style; 6] =
    [Style("30;42"), Style("30;46"), Style("30;45"), Style("30;44"), Style("30;43"), Style("30;47")];

/// The letter of each pod, given in order of appearance and kept.
#[derive(Debug, Clone, Default)]
pub(crate) struct Letters(BTreeMap<String, usize>);

impl Letters {
    /// Gives a letter to every pod in view.
    pub(crate) fn learn(&mut self, view: &ClusterView) {
        for pod in view.nodes.iter().flat_map(|node| &node.gpus).filter_map(|gpu| gpu.pod.as_ref()) {
            let next = self.0.len();
            self.0.entry(pod.clone()).or_insert(next);
        }
    }

    fn of(&self, pod: &str) -> (char, Style) {
        let number = self.0.get(pod).copied().unwrap_or(0);
        let letter = ('a'..='z').nth(number % 26).unwrap_or('a');
        (letter, PODS.get(number % PODS.len()).copied().unwrap_or(Style::PLAIN))
    }
}

/// One line per node.
pub(crate) fn strips(view: &ClusterView, letters: &Letters, screen: Screen) -> Vec<String> {
    let width = view.nodes.iter().map(|node| node.name.chars().count()).max().unwrap_or(0);
    view.nodes
        .iter()
        .map(|node| format!("  {:width$}  {}", node.name, strip(node, letters, screen)))
        .collect()
}

fn strip(node: &NodeView, letters: &Letters, screen: Screen) -> String {
    let mut line = String::new();
    for (index, gpu) in node.gpus.iter().enumerate() {
        if index > 0 {
            line.push_str(tie(node, index));
        }
        line.push_str(&cell(index, gpu, letters, screen));
    }
    let mut pods: Vec<&String> = node.gpus.iter().filter_map(|gpu| gpu.pod.as_ref()).collect();
    pods.sort_by_key(|pod| letters.0.get(*pod));
    pods.dedup();
    let names: Vec<String> = pods.iter().map(|pod| format!("{} {pod}", letters.of(pod).0)).collect();
    if !names.is_empty() {
        line.push_str("  ");
        line.push_str(&screen.styled(Style::FAINT, names.join(", ")));
    }
    line
}

/// What stands between GPU `index` and the one before it.
fn tie(node: &NodeView, index: usize) -> &'static str {
    let numa = |index: usize| node.machine.gpus().get(index).and_then(|gpu| gpu.numa.clone());
    if numa(index) != numa(index - 1) {
        return " │ ";
    }
    match node.machine.nvlinks_between(index - 1, index) {
        0 => " ",
        1 => "─",
        _ => "═",
    }
}

fn cell(index: usize, gpu: &GpuView, letters: &Letters, screen: Screen) -> String {
    let (mark, letter, look) = match (&gpu.pod, gpu.hold, &gpu.unhealthy) {
        (Some(pod), Hold::Quarantined, _) => ('!', letters.of(pod).0, Style("30;41")),
        (Some(pod), Hold::Granted, _) => ('?', letters.of(pod).0, Style("7")),
        (Some(pod), _, Some(_)) => ('x', letters.of(pod).0, Style("30;41")),
        (Some(pod), _, None) => {
            let (letter, look) = letters.of(pod);
            (' ', letter, look)
        }
        (None, _, Some(_)) => (' ', 'x', Style::BAD),
        (None, _, None) => (' ', '·', Style::FAINT),
    };
    screen.styled(look, format!("[{index}{mark}{letter}]"))
}
#[cfg(test)]
mod tests {
    use gantry_topology::Machine;

    use super::*;

    fn node(name: &str, file: &str, holds: &[(usize, &str, Hold)], unhealthy: &[usize]) -> NodeView {
        let machine: Machine = serde_saphyr::from_str(file).unwrap();
        let mut gpus = vec![GpuView::default(); machine.gpus().len()];
        for (gpu, pod, hold) in holds {
            gpus[*gpu].pod = Some((*pod).to_owned());
            gpus[*gpu].hold = *hold;
        }
        for gpu in unhealthy {
            gpus[*gpu].unhealthy = Some("Xid 79".into());
        }
        NodeView { name: name.into(), machine, gpus }
    }

    #[test]
    fn strips_show_links_holders_and_unhealthy_gpus() {
        let view = ClusterView {
            nodes: vec![
                node(
                    "a40",
                    include_str!("../../simulator/machines/a40-8x-bridged.yaml"),
                    &[(0, "pair", Hold::Held), (1, "pair", Hold::Held), (4, "new", Hold::Granted)],
                    &[3],
                ),
                node(
                    "dgx1",
                    include_str!("../../simulator/machines/dgx1-v100.yaml"),
                    &[(0, "quad", Hold::Quarantined), (3, "quad", Hold::Held)],
                    &[3],
                ),
            ],
        };
        let mut letters = Letters::default();
        letters.learn(&view);
        let screen = Screen { terminal: false, columns: 100 };
        insta::assert_snapshot!(strips(&view, &letters, screen).join("\n"), @r"
          a40   [0 a]═[1 a] [2 ·]═[3 x] │ [4?b]═[5 ·] [6 ·]═[7 ·]  a pair, b new
          dgx1  [0!c]─[1 ·]═[2 ·]═[3xc] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]  c quad
        ");
        let colored = Screen { terminal: true, ..screen };
        let text = strips(&view, &letters, colored).join("\n");
        assert!(text.contains("\x1b[1;31m[3 x]\x1b[0m"), "{text:?}");
    }
}
