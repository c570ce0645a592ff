//! Pods per second through the real kube-scheduler: without an extender, with one that answers at once (what the
//! protocol itself costs), and with `gantry extender`. The cases take turns, so that whatever else the machine does
//! meets all of them alike.
//!
//! With `gangs` instead: so many gangs, against as many pods without a gang. With `explain`: the time of `gantry explain`.
//!
//! `cargo xtask bench scheduler` builds and runs it; 500 nodes of 8 GPUs exist as objects only, nothing runs on them.
#![expect(clippy::print_stdout, reason = "a benchmark reports on the terminal")]

mod case;
mod explain;
mod floor;
mod gangs;
mod load;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use gantry_e2e::{Cluster, ClusterOptions};

use crate::case::Case;

/// Pods per second through the real kube-scheduler.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    role: Option<Role>,
    /// How often each case is run.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Nodes, of 8 GPUs each.
    #[arg(long, default_value_t = 500)]
    nodes: u32,
    /// Pods, of one GPU each.
    #[arg(long, default_value_t = 1000)]
    pods: u32,
    /// Passed by `cargo bench` after the user's arguments.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// The extender that answers at once; started by the benchmark itself.
    Floor(floor::Args),
    /// Gangs against the same pods without a gang.
    Gangs(gangs::Args),
    /// The time of `gantry explain` in a large cluster.
    Explain(explain::Args),
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Runtime::new()?;
    match args.role {
        Some(Role::Floor(ref floor)) => runtime.block_on(floor::serve(floor)),
        Some(Role::Gangs(_) | Role::Explain(_)) | None => runtime.block_on(measure(&args)),
    }
}

async fn measure(args: &Args) -> Result<()> {
    if let Err(unsupported) = gantry_e2e::supported() {
        println!("skipped: {unsupported}");
        return Ok(());
    }
    let folder = std::env::temp_dir().join("gantry-bench");
    let config = std::env::temp_dir().join("gantry-bench-scheduler.yaml");
    Case::Stock.write_config(&config)?;
    let mut options = ClusterOptions::new(program("gantry-cluster")?);
    options.folder = folder;
    options.port = 16445;
    options.nodes = Vec::new();
    options.scheduler_config = Some(config.clone());
    let cluster = Cluster::up(options).await?;
    let outcome = rounds(args, &cluster, &config).await;
    cluster.down().await?;
    outcome
}

async fn rounds(args: &Args, cluster: &Cluster, config: &Path) -> Result<()> {
    cluster.install(&load::root().join("manifests")).await?;
    load::default_account(cluster).await?;
    // Without it, nodes without a kubelet are not marked unreachable.
    cluster.program("kube-controller-manager")?.stop().await?;
    cluster.program("kube-scheduler")?.stop().await?;
    let gantry = program("gantry")?;
    match &args.role {
        Some(Role::Gangs(gangs)) => return gangs::rounds(gangs, cluster, config, &gantry).await,
        Some(Role::Explain(args)) => return explain::rounds(args, cluster, config, &gantry).await,
        Some(Role::Floor(_)) | None => {}
    }
    load::create_nodes(cluster, args.nodes).await?;
    let mut rates = vec![Vec::new(); Case::ALL.len()];
    for round in 1..=args.rounds {
        for (case, rates) in Case::ALL.into_iter().zip(&mut rates) {
            let rate = once(args, cluster, config, case, &gantry).await?;
            println!("round {round}: {case:<32} {rate:7.1} pods/s");
            rates.push(rate);
        }
    }
    report(args, &mut rates);
    Ok(())
}

/// One case once: pods first, then the scheduler is let go.
async fn once(args: &Args, cluster: &Cluster, config: &Path, case: Case, gantry: &Path) -> Result<f64> {
    case.write_config(config)?;
    let extender = case.start_extender(cluster, gantry, &[]).await?;
    load::create_pods(cluster, args.pods, None).await?;
    let scheduler = cluster.start_again("kube-scheduler").await?;
    let took = load::all_bound(cluster, args.pods).await;
    scheduler.stop().await?;
    if let Some(extender) = extender {
        extender.stop().await?;
    }
    load::delete_pods(cluster).await?;
    Ok(f64::from(args.pods - 1) / took?.as_secs_f64().max(Duration::from_millis(1).as_secs_f64()))
}

fn report(args: &Args, rates: &mut [Vec<f64>]) {
    println!("\n{} pods of 1 GPU on {} nodes of 8 GPUs, {} rounds", args.pods, args.nodes, args.rounds);
    let medians: Vec<f64> = rates
        .iter_mut()
        .map(|rates| {
            rates.sort_by(f64::total_cmp);
            rates.get(rates.len() / 2).copied().unwrap_or_default()
        })
        .collect();
    let floor = Case::ALL
        .iter()
        .position(|case| *case == Case::Floor)
        .and_then(|floor| medians.get(floor).copied())
        .unwrap_or_default();
    for ((case, rates), median) in Case::ALL.iter().zip(rates.iter()).zip(&medians) {
        let (low, high) = (rates.first().unwrap_or(&0.0), rates.last().unwrap_or(&0.0));
        println!(
            "{case:<32} median {median:7.1} pods/s ({low:.0} to {high:.0}), {:5.1} % of the floor",
            100.0 * median / floor
        );
    }
}

/// A program built next to this one.
fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    // target/release/deps/scheduler-... -> target/release/
    let folder = own.ancestors().nth(2).context("the benchmark lies in no folder")?;
    let path = folder.join(name);
    anyhow::ensure!(path.exists(), "{} is not built; run `cargo xtask bench scheduler`", path.display());
    Ok(path)
}
