//! How long `gantry explain` takes in a large cluster, from the start of the program to its end: for a pod that runs, for
//! one that fits nowhere, and for the queue; asked of the extender, and read of the cluster. The first pods were bound by
//! the real kube-scheduler and the extender, the others were created on their nodes. Further pods, as large as the API
//! server admits, wait at a gate.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gantry_e2e::Cluster;

use crate::case::Case;
use crate::load;

/// What so many nodes and pods of one namespace need.
const OBJECT_MEMORY: &str = "--object-memory=1024";
/// Asks the extender, which nothing forwards a port to: its pod does not exist here.
const EXPLAIN_ADDRESS: &[&str] = &["--extender", "127.0.0.1:8013"];
const READ_CLUSTER: &[&str] = &["--read-cluster"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How often each question is asked.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Nodes, of 8 GPUs each.
    #[arg(long, default_value_t = 5000)]
    nodes: u32,
    /// Pods that run, of one GPU each.
    #[arg(long, default_value_t = 20_000)]
    pods: u32,
    /// How many of those kube-scheduler and the extender bind. The others are created on their nodes, without a grant.
    #[arg(long, default_value_t = 1000)]
    scheduled: u32,
    /// Pods of about 1 MB that wait at a gate.
    #[arg(long, default_value_t = 50)]
    fat: u32,
}

/// Fills the cluster and asks.
pub(crate) async fn rounds(args: &Args, cluster: &Cluster, config: &Path, gantry: &Path) -> Result<()> {
    load::create_nodes(cluster, args.nodes).await?;
    let scheduled = args.scheduled.min(args.pods);
    load::create_pods(cluster, scheduled, None).await?;
    Case::Gantry.write_config(config)?;
    let extender = Case::Gantry.start_extender(cluster, gantry, &[OBJECT_MEMORY.to_owned()]).await?;
    let scheduler = cluster.start_again("kube-scheduler").await?;
    load::all_bound(cluster, scheduled).await?;
    load::create_bound_pods(cluster, scheduled..args.pods, args.nodes).await?;
    load::create_fat_pods(cluster, args.fat).await?;
    let waiting = load::create_large_pod(cluster).await?;
    scheduler.stop().await?;
    println!("{} nodes, {} pods that run, {} of 1 MB at a gate", args.nodes, args.pods, args.fat);
    let (running, kubeconfig) = (load::pod_name(0), cluster.kubeconfig().display().to_string());
    let questions: [(&str, &[&str]); 3] = [
        ("a pod that runs", &["pod", &running]),
        ("a pod that fits nowhere", &["pod", &waiting]),
        ("the queue", &["queue"]),
    ];
    for (source, option) in [("the extender", EXPLAIN_ADDRESS), ("the cluster", READ_CLUSTER)] {
        for (name, question) in questions {
            let mut times = Vec::with_capacity(args.rounds);
            for _ in 0..args.rounds {
                let argv = [
                    &[&*gantry.to_string_lossy(), "explain"],
                    question,
                    &["--kubeconfig", &kubeconfig],
                    option,
                ];
                let start = Instant::now();
                cluster.control().exec(&argv.concat()).await?;
                times.push(start.elapsed());
            }
            times.sort_unstable();
            let (median, last) = (times.get(times.len() / 2), times.last());
            let (median, last) = median.zip(last).context("no rounds")?;
            let (median, last) = (millis(*median), millis(*last));
            println!("{source:<12} {name:<24} median {median:6.0} ms, at most {last:6.0} ms");
        }
    }
    if let Some(extender) = extender {
        extender.stop().await?;
    }
    Ok(())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
