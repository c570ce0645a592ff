//! `gantry explain`: why a pod or a gang is on its node, or why it waits and which pods would have to end. Asks the
//! extender; where that cannot be asked, reads the cluster once, as the extender does. Writes nothing.

mod ask;
mod gangs;
mod text;

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use clap_complete::ArgValueCompleter;
use gantry_extender::PublishedSettings;
use gantry_extender::answers::{self, ReportError, http};
use gantry_extender::args::{levels, scheduler};
use gantry_extender::index::{GangReport, GangState, PodReport, Store, system_clock};
use gantry_extender::offline::{self, OfflineCluster, Terms};
use gantry_extender::watch::{self, Extent};
use gantry_planner::decide::{ForeignNodes, Policy};
use gantry_runtime::chain;
use kube::Client;
use serde::de::DeserializeOwned;

use self::ask::{Extender, Failure};
use crate::cluster::{ClusterArgs, SystemArgs};
use crate::complete;
use crate::output::{Format, Screenful, json, wrapped, yaml};
use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

/// Options of `gantry explain`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON and YAML (-o json, -o yaml) have the same facts with stable field names.

The extender answers, over a port that is forwarded to its pod. If that is not
possible, the whole cluster is read, which takes longer.

The settings of the extender are those that it publishes on its Lease. An option
here precedes them, and the cluster is read.

Examples:
  gantry explain pod trainer-0                 its node and GPUs and why, or what every node lacks
  gantry explain gang train -n research        what was tried, the gangs ahead, what would have to end
  gantry explain queue                         the waiting gangs, in the order of planning
  gantry explain pod trainer-0 -w              again whenever the answer changes
  gantry explain pod trainer-0 -o json

Exit codes: 0 explained, 1 the cluster cannot be read, 2 no such pod or gang.")]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    what: What,

    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    system: SystemArgs,

    /// Namespace of the pod or gang; of the queue, only its gangs are listed [default: that of the context]
    #[arg(
        long,
        short,
        value_name = "NAMESPACE",
        global = true,
        add = ArgValueCompleter::new(complete::namespaces)
    )]
    namespace: Option<String>,

    /// Output format
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value_t, global = true)]
    output: Format,

    /// The same as -o json
    #[arg(long, global = true, hide = true)]
    json: bool,

    /// Ask the extender at this address of --explain-listen, such as that of your own kubectl port-forward
    #[arg(long, env = "GANTRY_EXTENDER", value_name = "ADDRESS:PORT", value_parser = gantry_runtime::listen::address, global = true)]
    extender: Option<SocketAddr>,

    /// Read the cluster, and do not ask the extender
    #[arg(long, conflicts_with = "extender", global = true)]
    read_cluster: bool,

    /// Ask again every five seconds, and print the answer again when it changes
    #[arg(long, short, global = true)]
    watch: bool,

    /// The settings of the extender, where they differ from the published ones.
    #[command(flatten)]
    settings: SettingsArgs,
}

/// Options that replace published settings.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Settings of the extender [default: those that it publishes]")]
struct SettingsArgs {
    /// Resources to read in addition to those of nvidia.com
    #[arg(
        long = "resource",
        env = "GANTRY_RESOURCES",
        value_name = "NAME",
        value_delimiter = ',',
        global = true
    )]
    resources: Vec<String>,

    /// The profiles of kube-scheduler that call the extender
    #[arg(
        long = "scheduler-name",
        env = "GANTRY_SCHEDULER_NAMES",
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = scheduler,
        global = true
    )]
    schedulers: Vec<String>,

    /// What the extender does with nodes without a Gantry plugin
    #[arg(long, env = "GANTRY_FOREIGN_NODES", value_enum, global = true)]
    foreign_nodes: Option<ForeignNodes>,

    /// Which of equally fast nodes the extender takes
    #[arg(long, env = "GANTRY_POLICY", value_enum, global = true)]
    policy: Option<Policy>,

    /// The levels of the fabric
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", value_parser = fabric, global = true)]
    fabric: Option<String>,

    /// Levels that a gang may require
    #[arg(long, env = "GANTRY_GANG_REQUIRED_LEVELS", value_name = "LEVELS", global = true)]
    gang_required_levels: Option<String>,

    /// The extender removes scheduling gates
    #[arg(long, env = "GANTRY_GATES", global = true)]
    gates: bool,
}

impl SettingsArgs {
    /// The published settings with these in place of them.
    fn over(&self, mut published: PublishedSettings) -> PublishedSettings {
        if !self.resources.is_empty() {
            published.resources.clone_from(&self.resources);
        }
        if !self.schedulers.is_empty() {
            published.scheduler_names.clone_from(&self.schedulers);
        }
        if let Some(foreign) = self.foreign_nodes {
            published.set_foreign_nodes(foreign);
        }
        if let Some(policy) = self.policy {
            published.set_policy(policy);
        }
        if let Some(fabric) = &self.fabric {
            published.fabric.clone_from(fabric);
        }
        if let Some(levels) = &self.gang_required_levels {
            published.gang_required_levels.clone_from(levels);
        }
        published.gates |= self.gates;
        published
    }
}

/// The levels of a fabric, as they are written.
fn fabric(text: &str) -> Result<String, String> {
    levels(text).map(|_| text.to_owned())
}

#[derive(Debug, Clone, Subcommand)]
enum What {
    /// A pod: its node, or what every node lacks
    Pod {
        /// Its name
        #[arg(add = ArgValueCompleter::new(complete::pods))]
        name: String,
    },
    /// A gang: what was tried at each level of the fabric, what is missing, the gangs ahead, what would have to end
    Gang {
        /// The gang's name on its pods, or the name of its Gang object
        #[arg(add = ArgValueCompleter::new(complete::gangs))]
        name: String,
    },
    /// The waiting gangs, in the order of planning
    Queue {
        /// Of all namespaces, as without --namespace
        #[arg(long, short = 'A', conflicts_with = "namespace")]
        all_namespaces: bool,
    },
}

/// Timeout for listing the cluster.
const LIMIT: Duration = Duration::from_secs(30);

/// Pause between two reads.
const PAUSE: Duration = Duration::from_secs(5);

/// Runs `gantry explain`.
///
/// # Errors
/// The cluster cannot be read, or there is no such pod.
pub(crate) async fn run(args: ExplainArgs) -> anyhow::Result<()> {
    let client = args.cluster.connect_for(watch::SILENCE).await?;
    if !args.watch {
        let question = Question::new(&args, &client).await?;
        return print(&Visible::new(&question.answer().await?));
    }
    let mut screen = Screenful::default();
    loop {
        // Another extender may lead by now, with other settings.
        let question = Question::new(&args, &client).await?;
        screen.show(Visible::new(&question.answer().await?))?;
        tokio::time::sleep(PAUSE).await;
    }
}

/// What is to be explained, and how.
struct Question<'a> {
    args: &'a ExplainArgs,
    client: &'a Client,
    namespace: &'a str,
    /// `None`: the cluster is read.
    extender: Option<Extender>,
    resources: Vec<String>,
    terms: Terms,
}

impl<'a> Question<'a> {
    async fn new(args: &'a ExplainArgs, client: &'a Client) -> anyhow::Result<Self> {
        let published = args.system.settings(client.clone()).await;
        let settings = args.settings.over(published.clone());
        let in_pod = published.explain.clone().filter(|_| !args.read_cluster && settings == published);
        let extender = match (args.extender, in_pod) {
            (Some(address), _) => Some(Extender::Address(address)),
            (None, Some(at)) => Some(Extender::in_pod(client.clone(), &args.system.system_namespace, at)),
            (None, None) => None,
        };
        Ok(Self {
            args,
            client,
            namespace: args.namespace.as_deref().unwrap_or_else(|| client.default_namespace()),
            extender,
            terms: settings.terms().map_err(BadInput)?,
            resources: settings.resources,
        })
    }

    /// Gets the report and writes the answer.
    async fn answer(&self) -> anyhow::Result<String> {
        let wide = self.format() == Format::Wide;
        match &self.args.what {
            What::Pod { name } => {
                let mut report = match self.ask(name, http::pod_path).await? {
                    Some(report) => report,
                    None => self.read_pod(name).await?,
                };
                if let Some(bound) = &mut report.bound {
                    bound.placement = offline::placement(self.client.clone(), self.namespace, name).await?;
                }
                self.document(&report, &[format!("pod/{}", report.name)], |pod| text::pod(pod, wide))
            }
            What::Gang { name } => {
                let report = match self.ask(name, http::gang_path).await? {
                    Some(report) => report,
                    None => self.read_gang(name).await?,
                };
                let names = [gang_name(&report.gang.object)];
                self.document(&report, &names, |gang| gangs::gang(gang, now(), wide))
            }
            What::Queue { .. } => {
                let waiting: Option<Vec<GangState>> = self.ask_at(http::QUEUE_PATH).await?;
                let mut waiting = match waiting {
                    Some(waiting) => waiting,
                    None => self.read_queue().await?,
                };
                if let Some(namespace) = &self.args.namespace {
                    waiting.retain(|gang| *gang.namespace == **namespace);
                }
                let names: Vec<String> = waiting.iter().map(|gang| gang_name(&gang.object)).collect();
                self.document(&waiting, &names, |waiting| gangs::queue(waiting, now()))
            }
        }
    }

    /// The extender's report on a name; `None` if the cluster is to be read.
    async fn ask<T: DeserializeOwned>(
        &self,
        name: &str,
        path: fn(&str, &str) -> String,
    ) -> anyhow::Result<Option<T>> {
        // Other text would lead to another path.
        let is_plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        match is_plain(self.namespace) && is_plain(name) {
            true => self.ask_at(&path(self.namespace, name)).await,
            false => Ok(None),
        }
    }

    async fn ask_at<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Option<T>> {
        let Some(extender) = &self.extender else {
            return Ok(None);
        };
        match extender.ask(path).await {
            Ok(report) => Ok(Some(report)),
            Err(Failure::Question(error)) => Err(error),
            Err(Failure::NotReachable) => Ok(None),
            Err(Failure::Extender(error)) if self.args.extender.is_some() => {
                Err(error.context("the extender does not answer"))
            }
            Err(Failure::Extender(error)) => {
                let error = chain(error.as_ref());
                let text = format!("gantry: the extender does not answer, the cluster is read: {error}");
                // There is no other place to report a closed standard error.
                let _ = writeln!(std::io::stderr(), "{}", Visible::new(&text));
                Ok(None)
            }
        }
    }

    async fn look(&self, extent: Extent) -> anyhow::Result<OfflineCluster> {
        offline::look(self.client.clone(), self.terms.clone(), extent, LIMIT).await
    }

    async fn read_pod(&self, name: &str) -> anyhow::Result<PodReport> {
        if let Some(report) = self.single_bound_pod(name).await? {
            return Ok(report);
        }
        let seen = self.look(Extent::AtOnce).await?;
        self.pod(&seen.store, name).map_err(unanswered)
    }

    async fn read_gang(&self, name: &str) -> anyhow::Result<GangReport> {
        let seen = self.look(Extent::AtOnce).await?;
        seen.plan();
        answers::gang(&seen.store, &seen.queue, self.namespace, name).map_err(unanswered)
    }

    async fn read_queue(&self) -> anyhow::Result<Vec<GangState>> {
        let seen = self.look(Extent::AtOnce).await?;
        seen.plan();
        Ok(answers::queue(&seen.store, &seen.queue))
    }

    /// The report about a bound pod that is no member of a gang, for which only its node is read. `None` for other pods.
    async fn single_bound_pod(&self, name: &str) -> anyhow::Result<Option<PodReport>> {
        let Some(node) = offline::node_of(self.client, self.namespace, name).await? else {
            return Ok(None);
        };
        let seen = self.look(Extent::OfNode(node)).await?;
        // For one that was deleted meanwhile, or asks for nothing that is managed there, the whole cluster shows more.
        let report = self.pod(&seen.store, name).ok();
        Ok(report.filter(|report| report.bound.is_some() && report.gang.is_none()))
    }

    fn format(&self) -> Format {
        if self.args.json { Format::Json } else { self.args.output }
    }

    /// A report in the format that was asked for.
    fn document<T: serde::Serialize>(
        &self,
        report: &T,
        names: &[String],
        text: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<String> {
        Ok(match self.format() {
            Format::Text => wrapped(&text(report), Screen::line()),
            Format::Wide => text(report),
            Format::Json => json(report)?,
            Format::Yaml => yaml(report)?,
            Format::Name => names.iter().map(|name| format!("{name}\n")).collect(),
        })
    }

    fn pod(&self, store: &Store, name: &str) -> Result<PodReport, ReportError> {
        answers::pod(store, &self.resources, self.namespace, name)
    }
}

fn unanswered(error: ReportError) -> anyhow::Error {
    match error {
        ReportError::Unknown(text) => BadInput(anyhow!(text)).into(),
        ReportError::Unreadable(text) => anyhow!(text),
    }
}

/// A Gang object as kubectl names it.
fn gang_name(object: &str) -> String {
    format!("gang.gantry.dev/{object}")
}

/// Seconds since 1970.
fn now() -> i64 {
    system_clock().unix
}
