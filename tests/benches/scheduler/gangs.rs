//! Gangs against the same pods without a gang, through the same kube-scheduler in the same run: how long until all are
//! bound, and how long a gang is bound in part, as the API shows it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use gantry_e2e::Cluster;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};

use crate::case::Case;
use crate::load;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How often each kind is run.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Nodes, of 8 GPUs each.
    #[arg(long, default_value_t = 500)]
    nodes: u32,
    /// Gangs.
    #[arg(long, default_value_t = 100)]
    gangs: u32,
    /// Members of each, of one GPU each.
    #[arg(long, default_value_t = 32)]
    members: u32,
    /// Arguments of the extender for another variant, such as one that nominates the node of each member.
    #[arg(long, allow_hyphen_values = true)]
    with: Vec<String>,
}

/// What is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Singles,
    Gangs,
    GangsWith,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Singles => "pods without a gang",
            Self::Gangs => "gangs",
            Self::GangsWith => "gangs, extender with other arguments",
        }
    }
}

/// What was seen of one run.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// From the scheduler's start, when every gang had its quorum, to the last Binding.
    all: Duration,
    /// From the first Binding to the last.
    binding: Duration,
    /// From a gang's first Binding to its last: the middle one, and the longest.
    spread: (Duration, Duration),
}

/// Nodes as objects; each kind takes its turn, so that whatever else the machine does meets all of them alike.
pub(crate) async fn rounds(args: &Args, cluster: &Cluster, config: &Path, gantry: &Path) -> Result<()> {
    load::create_nodes(cluster, args.nodes).await?;
    let mut kinds = vec![Kind::Singles, Kind::Gangs];
    if !args.with.is_empty() {
        kinds.push(Kind::GangsWith);
    }
    let mut all: BTreeMap<Kind, Vec<Seen>> = BTreeMap::new();
    for round in 1..=args.rounds {
        for kind in &kinds {
            let seen = once(args, cluster, config, *kind, gantry).await?;
            println!(
                "round {round}: {:<37} {:6.2} s to the last Binding, {:6.2} s from the first; one gang {:.0} ms, at most {:.0} ms",
                kind.name(),
                seen.all.as_secs_f64(),
                seen.binding.as_secs_f64(),
                seen.spread.0.as_secs_f64() * 1e3,
                seen.spread.1.as_secs_f64() * 1e3,
            );
            all.entry(*kind).or_default().push(seen);
        }
    }
    let pods = args.gangs * args.members;
    println!(
        "\n{} gangs of {} on {} nodes of 8 GPUs, {} rounds, medians",
        args.gangs, args.members, args.nodes, args.rounds
    );
    for (kind, seen) in &mut all {
        seen.sort_by_key(|seen| seen.all);
        let Some(middle) = seen.get(seen.len() / 2) else {
            continue;
        };
        println!(
            "{:<37} {:6.2} s, {:6.1} pods/s",
            kind.name(),
            middle.all.as_secs_f64(),
            f64::from(pods) / middle.all.as_secs_f64()
        );
    }
    Ok(())
}

/// Pods first, then the extender sees all of them, then the scheduler is let go.
async fn once(args: &Args, cluster: &Cluster, config: &Path, kind: Kind, gantry: &Path) -> Result<Seen> {
    Case::Gantry.write_config(config)?;
    let extra: &[String] = if kind == Kind::GangsWith { &args.with } else { &[] };
    let extender = Case::Gantry.start_extender(cluster, gantry, extra).await?;
    let members = (kind != Kind::Singles).then_some(args.members);
    load::create_pods(cluster, args.gangs * args.members, members).await?;
    let start = Instant::now();
    let scheduler = cluster.start_again("kube-scheduler").await?;
    let seen = watch(cluster, args, start).await;
    scheduler.stop().await?;
    if let Some(extender) = extender {
        extender.stop().await?;
    }
    load::delete_pods(cluster).await?;
    seen
}

async fn watch(cluster: &Cluster, args: &Args, start: Instant) -> Result<Seen> {
    let pods: Api<PartialObjectMeta<Pod>> = Api::namespaced(cluster.client(), "default");
    let bound = watcher::Config::default().fields("spec.nodeName!=");
    let mut events = watcher(pods, bound).applied_objects().boxed();
    let mut seen: BTreeMap<u32, Instant> = BTreeMap::new();
    let counting = async {
        while let Some(pod) = events.try_next().await? {
            let name = pod.metadata.name.unwrap_or_default();
            let number = name.rsplit('-').next().and_then(|number| number.parse().ok());
            seen.entry(number.context("a pod of the benchmark")?).or_insert_with(Instant::now);
            if seen.len() >= (args.gangs * args.members) as usize {
                return Ok(());
            }
        }
        anyhow::bail!("the watch ended")
    };
    let outcome = tokio::time::timeout(load::LIMIT * 3, counting).await;
    let Ok(outcome) = outcome else {
        anyhow::bail!("{} of {} pods were bound in time", seen.len(), args.gangs * args.members);
    };
    outcome?;
    let first = seen.values().min().copied().unwrap_or(start);
    let last = seen.values().max().copied().unwrap_or(start);
    let mut ends: BTreeMap<u32, (Instant, Instant)> = BTreeMap::new();
    for (number, at) in seen {
        let ends = ends.entry(number / args.members).or_insert((at, at));
        *ends = (ends.0.min(at), ends.1.max(at));
    }
    let mut spreads: Vec<Duration> = ends.values().map(|(first, last)| *last - *first).collect();
    spreads.sort_unstable();
    let middle = spreads.get(spreads.len() / 2).copied().unwrap_or_default();
    Ok(Seen {
        all: last - start,
        binding: last - first,
        spread: (middle, spreads.last().copied().unwrap_or_default()),
    })
}
