//! `gantry explain`: why a pod or a gang is on its node, or why it waits and which pods would have to end. Reads the
//! cluster once, as the extender does; writes nothing.

mod gangs;
mod text;

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::{Args, Subcommand};
use gantry_api::names;
use gantry_extender::args::{levels, required_levels, scheduler};
use gantry_extender::index::{Index, PodReport, Store, system_clock};
use gantry_extender::offline::{self, Seen, Terms};
use gantry_gang::{Ceilings, Levels};
use gantry_planner::decide::{ForeignNodes, Options, Policy};

use crate::cluster::ClusterArgs;
use crate::runtime::{BadInput, print};
use crate::visible::Visible;

/// Options of `gantry explain`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (--json) has the same facts with stable field names.

Examples:
  gantry explain pod trainer-0                 its node and GPUs and why, or what every node lacks
  gantry explain gang train -n research        what was tried, the gangs ahead, what would have to end
  gantry explain queue                         the waiting gangs, in the order of planning
  gantry explain pod trainer-0 -n research --json

Exit codes: 0 explained, 1 the cluster cannot be read, 2 no such pod or gang.")]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    what: What,

    #[command(flatten)]
    cluster: ClusterArgs,

    /// Namespace of the pod or gang
    #[arg(long, short, value_name = "NAMESPACE", default_value = "default", global = true)]
    namespace: String,

    /// Resources to read in addition to those of nvidia.com: the extender's --resource
    #[arg(
        long = "resource",
        env = "GANTRY_RESOURCES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = names::GPU_RESOURCE,
        global = true
    )]
    resources: Vec<String>,

    /// The profiles of kube-scheduler that call the extender: its --scheduler-name
    #[arg(
        long = "scheduler-name",
        env = "GANTRY_SCHEDULER_NAMES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = names::DEFAULT_SCHEDULER,
        value_parser = scheduler,
        global = true
    )]
    schedulers: Vec<String>,

    /// What the extender does with nodes without a Gantry plugin
    #[arg(long, env = "GANTRY_FOREIGN_NODES", value_enum, default_value_t, global = true)]
    foreign_nodes: ForeignNodes,

    /// Which of equally fast nodes the extender takes
    #[arg(long, env = "GANTRY_POLICY", value_enum, default_value_t, global = true)]
    policy: Policy,

    /// The levels of the fabric: the extender's --fabric
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", default_value = "", value_parser = levels, global = true)]
    fabric: Levels,

    /// Levels that a gang may require: the extender's --gang-required-levels
    #[arg(
        long,
        env = "GANTRY_GANG_REQUIRED_LEVELS",
        value_name = "LEVELS",
        default_value = "all",
        global = true
    )]
    gang_required_levels: String,

    /// The extender removes scheduling gates: its --gates
    #[arg(long, env = "GANTRY_GATES", global = true)]
    gates: bool,

    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Clone, Subcommand)]
enum What {
    /// A pod: its node, or what every node lacks
    Pod {
        /// Its name
        name: String,
    },
    /// A gang: what was tried at each level of the fabric, what is missing, the gangs ahead, what would have to end
    Gang {
        /// The gang's name on its pods, or the name of its Gang object
        name: String,
    },
    /// The waiting gangs of all namespaces, in the order of planning
    Queue,
}

/// The largest edit distance of a suggested name.
const NEAR: usize = 2;
/// Names listed if none is close.
const SHOWN: usize = 8;
/// Timeout for listing the cluster.
const LIMIT: Duration = Duration::from_secs(30);

/// Runs `gantry explain`.
///
/// # Errors
/// The cluster cannot be read, or there is no such pod.
pub(crate) async fn run(args: ExplainArgs) -> anyhow::Result<()> {
    let resources = args.resources.iter().map(|name| name.as_str().into()).collect();
    let options = Options { foreign: args.foreign_nodes, policy: args.policy, ..Options::default() };
    let kubeconfig = args.cluster.kubeconfig()?;
    let required_levels = required_levels(&args.gang_required_levels, &args.fabric).map_err(BadInput)?;
    let terms = Terms {
        resources,
        ceilings: Ceilings { required_levels, ..Ceilings::default() },
        options,
        fabric: args.fabric.clone(),
        gates: args.gates,
        schedulers: args.schedulers.iter().map(|name| name.as_str().into()).collect(),
    };
    let seen = offline::look(kubeconfig.as_deref(), terms, LIMIT).await?;
    let output = match &args.what {
        What::Pod { name } => {
            let mut report = pod(&seen.store, &args, name)?;
            if let Some(bound) = &mut report.bound {
                bound.placement = offline::placement(kubeconfig.as_deref(), &args.namespace, name).await?;
            }
            if args.json { json(&report)? } else { text::pod(&report) }
        }
        What::Gang { name } => gang(&seen, &args, name)?,
        What::Queue => queue(&seen, &args)?,
    };
    print(&Visible::new(&output))
}

fn pod(store: &Store, args: &ExplainArgs, name: &str) -> anyhow::Result<PodReport> {
    store.read(|index| {
        let pod = index.find_pod(&args.namespace, name).ok_or_else(|| {
            let hint = hint(index, args, name, Index::pod_names);
            BadInput(anyhow!(
                "no pod {name} in namespace {} that requests {} or another managed resource{hint}",
                args.namespace,
                args.resources.join(", ")
            ))
        })?;
        index.inspect(pod).map_err(|error| anyhow!("pod {}/{name}: {error}", args.namespace))
    })
}

fn gang(seen: &Seen, args: &ExplainArgs, name: &str) -> anyhow::Result<String> {
    seen.plan();
    let store = &seen.store;
    let report = store.read(|index| index.inspect_gang(&seen.queue, &args.namespace, name));
    let report = report.ok_or_else(|| {
        let hint = store.read(|index| hint(index, args, name, Index::gang_names));
        BadInput(anyhow!("no gang {name} in namespace {}{hint}", args.namespace))
    })?;
    if args.json {
        return json(&report);
    }
    Ok(gangs::gang(&report, now()))
}

/// Suggestions for an unknown name: the same name in another namespace, the nearest name, or the existing ones.
fn hint(index: &Index, args: &ExplainArgs, name: &str, names: fn(&Index, &str) -> Vec<String>) -> String {
    let spaces = index.namespaces();
    let elsewhere = spaces.iter().find(|space| names(index, space).iter().any(|known| known == name));
    if let Some(space) = elsewhere {
        return format!("; there is one in namespace {space}: add -n {space}");
    }
    let known = names(index, &args.namespace);
    let distance = |known: &&String| strsim::damerau_levenshtein(known, name);
    match known.iter().min_by_key(distance) {
        None => format!("; there is none at all in namespace {}", args.namespace),
        Some(near) if distance(&near) <= NEAR => format!("; did you mean {near}?"),
        Some(_) if known.len() > SHOWN => {
            format!("; there are {} and {} more", known[..SHOWN].join(", "), known.len() - SHOWN)
        }
        Some(_) => format!("; there are {}", known.join(", ")),
    }
}

fn queue(seen: &Seen, args: &ExplainArgs) -> anyhow::Result<String> {
    seen.plan();
    let waiting = seen.store.read(|index| index.waiting_gangs(&seen.queue));
    if args.json {
        return json(&waiting);
    }
    Ok(gangs::queue(&waiting, now()))
}

/// Seconds since 1970.
fn now() -> i64 {
    system_clock().unix
}

fn json(report: &impl serde::Serialize) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(report).context("writing JSON")?;
    text.push('\n');
    Ok(text)
}
