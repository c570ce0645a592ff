//! `gantry demo`: runs the real daemons against simulated machines and an embedded cluster, in a few scenes that check
//! themselves. It uses one temporary folder and loopback addresses, and removes everything at the end.

mod cluster;
mod daemon;
mod scene;
mod scenes;
mod screen;
mod view;
mod watch;

use std::time::Instant;

use anyhow::Context;
use gantry_topology::draw::Picture;
use tokio_util::sync::CancellationToken;

use cluster::Cluster;
use gantry_map::Letters;
use scene::{Checks, RunningPod, Scene};
use screen::{Screen, Style};

/// Options of `gantry demo`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "\
Needs no GPU, no cluster and no root. Takes about ten seconds; exits with 0 only if every check passed.
Set NO_COLOR for plain text.")]
pub struct Args {
    /// Stay up afterwards and show the cluster as it changes, until Ctrl-C
    #[arg(long)]
    watch: bool,

    /// Keep the temporary folder, with the daemons' logs in it
    #[arg(long)]
    keep: bool,
}

/// Runs the demo.
///
/// # Errors
/// A check or a part of the cluster failed, or `shutdown` came before the end.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    let screen = Screen::of_stdout();
    let start = Instant::now();
    let cluster = tokio::select! {
        cluster = Cluster::build(screen) => cluster?,
        () = shutdown.cancelled() => anyhow::bail!("stopped"),
    };
    screen.line(format!("Ready after {:.1} s.", start.elapsed().as_secs_f64()));
    let played = perform(&cluster, screen, &args, start, &shutdown).await;
    let taken_down = cluster.take_down(args.keep).await.context("ending the demo");
    played.and(taken_down)
}

async fn perform(
    cluster: &Cluster,
    screen: Screen,
    args: &Args,
    start: Instant,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    introduce(cluster, screen);
    let mut scene =
        Scene { cluster, screen, letters: Letters::default(), checks: Checks::default(), placed: Vec::new() };
    tokio::select! {
        played = scenes::all(&mut scene) => played?,
        () = shutdown.cancelled() => anyhow::bail!("stopped before the end"),
    }
    let seconds = start.elapsed().as_secs_f64();
    let Scene { checks, placed, letters, .. } = scene;
    screen.heading("Summary");
    for RunningPod { name, node, gpus, .. } in &placed {
        let what = if gpus.len() == 1 { "GPU " } else { "GPUs" };
        screen.line(format!("  {name:<8} {node:<5} {what} {gpus}"));
    }
    let total = checks.passed + checks.failed.len();
    if checks.failed.is_empty() {
        let verdict = format!("All {total} checks passed in {seconds:.1} s.");
        screen.line(screen.styled(Style::GOOD, verdict));
    } else {
        for failure in &checks.failed {
            screen.line(format!("  {} {failure}", screen.styled(Style::BAD, "✗")));
        }
    }
    go_on(cluster, screen, args.watch);
    if args.watch {
        watch::run(cluster, screen, letters, shutdown).await?;
    }
    anyhow::ensure!(checks.failed.is_empty(), "{} of {total} checks failed", checks.failed.len());
    Ok(())
}

fn introduce(cluster: &Cluster, screen: Screen) {
    screen.heading("The machines");
    for (name, node) in &cluster.nodes {
        screen.line("");
        screen.line(screen.styled(Style::STRONG, name));
        let picture = Picture::of(&node.machine).color(screen.terminal).columns(screen.columns).to_string();
        screen.line(picture.trim_end());
    }
    screen.line("");
    for line in gantry_map::LEGEND {
        screen.line(screen.styled(Style::FAINT, line));
    }
}

fn go_on(cluster: &Cluster, screen: Screen, watch: bool) {
    screen.heading("How to go on");
    if watch {
        let kubeconfig = cluster.kubeconfig.display();
        for line in [
            format!("export KUBECONFIG={kubeconfig}"),
            "kubectl get gpunodes,gangs,pods -o wide".into(),
            "kubectl get gpunode hgx -o yaml            # machine, health, holders".into(),
            "kubectl create -f manifests/samples/two-gpus.yaml".into(),
            "kubectl create -f manifests/samples/gang-pods.yaml   # two pods, both or none".into(),
            "cargo run -- explain queue                  # also: explain gang, explain pod".into(),
            format!("curl -s {}/apis/gantry.dev/v1alpha1/gpunodes   # without kubectl", cluster.url),
        ] {
            screen.line(format!("  {line}"));
        }
    } else {
        for line in [
            "cargo run -- demo --watch                               stay up and play with kubectl",
            "cargo run -- topo --from simulator/machines/hgx-h100.yaml",
            "cargo run -- choose --from simulator/machines/dgx1-v100.yaml --size 3",
            "nvidia-smi topo -m | cargo run -- topo --from -         look at a machine of yours",
            "cargo run -- plugin --help; cargo run -- extender --help",
        ] {
            screen.line(format!("  {line}"));
        }
        screen.line("  README.md describes the installation on a cluster.");
    }
}
