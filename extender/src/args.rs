//! Options of `gantry extender`. The defaults are those of the manifests.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use gantry_api::names;
use gantry_gang::fabric::NODE;
use gantry_gang::{Ceilings, Levels, Scope};

use crate::object_memory;
use gantry_planner::decide::{ForeignNodes, Policy};

/// The scheduler extender: filters and scores the nodes for pods that request GPUs, chooses the exact GPUs, and binds
/// the pod with them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Kubeconfig file. Default: the service account of the pod.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Address to serve kube-scheduler, probes and metrics on: POST /filter, /prioritize, /bind, /preempt; GET
    /// /healthz, /readyz, /standbyz, /metrics. The leader is ready. A replica that can take over at once answers
    /// /standbyz.
    ///
    /// Without --tls-cert there is no authentication: allow only kube-scheduler to reach the address, for example on
    /// 127.0.0.1. A port alone, such as :8010, means every address, IPv6 included.
    #[arg(
        long,
        env = "GANTRY_LISTEN",
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:8010",
        value_parser = gantry_runtime::listen::address
    )]
    pub listen: SocketAddr,

    /// Second address for metrics and probes, in plain HTTP, for collectors that cannot reach --listen. Default: they
    /// are served on --listen only.
    #[arg(
        long,
        env = "GANTRY_METRICS_LISTEN",
        value_name = "ADDRESS:PORT",
        value_parser = gantry_runtime::listen::address
    )]
    pub metrics_listen: Option<SocketAddr>,

    /// Address to serve the web page on, in plain HTTP: the map of the cluster, nodes, gangs and decisions, read-only.
    /// There is no authentication: on 127.0.0.1 `kubectl port-forward` reaches it. Default: no page.
    #[arg(
        long,
        env = "GANTRY_PAGE_LISTEN",
        value_name = "ADDRESS:PORT",
        value_parser = gantry_runtime::listen::address
    )]
    pub page_listen: Option<SocketAddr>,

    /// Names by which browsers may call the page, in addition to addresses and localhost: the host of a proxy that
    /// authenticates users. Other names are refused, so that no other site reads the page through a browser.
    #[arg(long = "page-host", env = "GANTRY_PAGE_HOSTS", value_name = "NAME", value_delimiter = ',', value_parser = object_name, requires = "page_listen")]
    pub page_hosts: Vec<String>,

    /// Address of loopback to answer `gantry explain` on, in plain HTTP. There is no authentication: users with the right
    /// to forward ports to this pod may ask. Default: the command reads the cluster itself.
    #[arg(long, env = "GANTRY_EXPLAIN_LISTEN", value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub explain_listen: Option<SocketAddr>,

    /// Name of this pod, to which `gantry explain` forwards a port.
    #[arg(long, env = "GANTRY_POD_NAME", value_name = "NAME", value_parser = object_name)]
    pub pod_name: Option<String>,

    /// File with rules of remediation: what is done about faults of GPUs (docs/how-to/remediation.md). It is read
    /// again when it changes. Default: nothing is done.
    #[arg(long, env = "GANTRY_REMEDIATION_RULES", value_name = "FILE")]
    pub remediation_rules: Option<PathBuf>,

    /// Resources to manage, in addition to every resource of nvidia.com that a node's plugin publishes.
    /// kube-scheduler's configuration must list all of them under `managedResources`.
    #[arg(
        long = "resource",
        env = "GANTRY_RESOURCES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = gantry_api::names::GPU_RESOURCE
    )]
    pub resources: Vec<String>,

    /// Names of kube-scheduler's profiles that call this extender (`schedulerName` of their pods). Pods of another
    /// scheduler are not planned; they count for what they hold once they are bound. A scheduler that calls the
    /// extender is added to this list.
    #[arg(
        long = "scheduler-name",
        env = "GANTRY_SCHEDULER_NAMES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = names::DEFAULT_SCHEDULER,
        value_parser = scheduler
    )]
    pub schedulers: Vec<String>,

    /// How to treat nodes whose devices another plugin or DRA serves.
    #[arg(long, env = "GANTRY_FOREIGN_NODES", value_enum, default_value_t)]
    pub foreign_nodes: ForeignNodes,

    /// How to choose among equally fast nodes.
    #[arg(long, env = "GANTRY_POLICY", value_enum, default_value_t)]
    pub policy: Policy,

    /// What pods ask for where their annotations do not say: NAME=VALUE for the cluster, or NAMESPACE/NAME=VALUE, where
    /// gantry.dev/NAME is one of the annotations in docs/requests.md, such as "preferred-link=nvlink". May be repeated;
    /// in the variable, items are separated by semicolons.
    #[arg(
        long = "request-default",
        env = "GANTRY_REQUEST_DEFAULTS",
        value_name = "ITEM",
        value_delimiter = ';'
    )]
    pub request_defaults: Vec<String>,

    /// GPU models in the order of their cost, the cheapest first, such as "L4,A100,H100", for pods that ask for economy.
    /// Nodes with other models count as dearer. Nodes that are equal by it count by their total bandwidth.
    #[arg(long, env = "GANTRY_MODEL_COST_ORDER", value_name = "MODELS", value_delimiter = ',')]
    pub model_cost_order: Vec<String>,

    /// Time limit of one bind in seconds, with the calls to the API server. A member of a gang waits at most two thirds
    /// of it for the other members. Must be below `httpTimeout` of kube-scheduler's configuration, so that
    /// kube-scheduler receives the result.
    #[arg(long, env = "GANTRY_BIND_TIMEOUT", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    pub bind_timeout: Duration,

    /// Largest request body in MiB. Names of 5,000 nodes take about 0.2 MiB, 5,000 whole nodes about 75 MiB.
    #[arg(long, env = "GANTRY_BODY_LIMIT", value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub body_limit: u32,

    /// MiB that the pods, nodes and other objects may take that are kept. One namespace gets at most 15 % of it. What is
    /// beyond is refused with an Event on the object. The memory limit of the container should be three times as much.
    #[arg(long, env = "GANTRY_OBJECT_MEMORY", value_name = "MIB", default_value_t = object_memory::DEFAULT_MIB, value_parser = clap::value_parser!(u32).range(16..=65536))]
    pub object_memory: u32,

    /// Seconds without a response of the API server, or without a working watch of pods, nodes or GpuNodes, after which
    /// the extender is not ready. It still answers kube-scheduler from its cache: a stale cache frees devices too late,
    /// never too early.
    #[arg(long, env = "GANTRY_STALE_AFTER", value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    pub stale_after: Duration,

    /// TLS.
    #[command(flatten)]
    pub tls: TlsArgs,

    /// The webhook.
    #[command(flatten)]
    pub webhook: WebhookArgs,

    /// Gangs.
    #[command(flatten)]
    pub gangs: GangArgs,

    /// Leader election.
    #[command(flatten)]
    pub lease: LeaseArgs,
}

/// Options of TLS. Changed files are reloaded.
#[derive(Debug, Clone, clap::Args)]
pub struct TlsArgs {
    /// Certificate chain in PEM, the server's certificate first. With it the extender serves HTTPS and HTTP/2.
    #[arg(long, env = "GANTRY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// The private key of that certificate in PEM.
    #[arg(long, env = "GANTRY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Certificate authorities in PEM. Only clients with a certificate of one of them may call the verbs. Probes and
    /// metrics need none.
    #[arg(long, env = "GANTRY_CLIENT_CA", value_name = "FILE", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,

    /// Common name of kube-scheduler's certificate. Other certificates of --client-ca may not call the verbs.
    #[arg(long, env = "GANTRY_CLIENT_NAME", value_name = "NAME", default_value = "system:kube-scheduler")]
    pub client_name: String,
}

/// Options of the mutating admission webhook. Changed files are reloaded.
#[derive(Debug, Clone, clap::Args)]
pub struct WebhookArgs {
    /// Address to serve the mutating admission webhook on, over TLS: POST /mutate. It sets `schedulerName` of new pods that
    /// ask for managed resources to the first name of --scheduler-name that is not default-scheduler, for clusters without
    /// MutatingAdmissionPolicy. Default: no webhook.
    #[arg(
        long,
        env = "GANTRY_WEBHOOK_LISTEN",
        value_name = "ADDRESS:PORT",
        value_parser = gantry_runtime::listen::address,
        requires_all = ["webhook_cert", "webhook_key"]
    )]
    pub webhook_listen: Option<SocketAddr>,

    /// Certificate chain of the webhook in PEM, its own certificate first. `caBundle` of the MutatingWebhookConfiguration
    /// has its authority.
    #[arg(long, env = "GANTRY_WEBHOOK_CERT", value_name = "FILE", requires = "webhook_listen")]
    pub webhook_cert: Option<PathBuf>,

    /// The private key of that certificate in PEM.
    #[arg(long, env = "GANTRY_WEBHOOK_KEY", value_name = "FILE", requires = "webhook_listen")]
    pub webhook_key: Option<PathBuf>,
}

/// Options of gangs.
#[derive(Debug, Clone, clap::Args)]
pub struct GangArgs {
    /// The fabric above the node, from the largest domain to the smallest: presets and NAME=LABEL items with commas,
    /// such as "zone,rack=example.com/rack,nvlink". A gang is placed in the smallest domain that holds it. Empty: the
    /// cluster is one domain.
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", default_value = "", value_parser = levels)]
    pub fabric: Levels,

    /// Seconds that the first gang of the queue waits before it gets a backfill reservation. Until then smaller pods
    /// may overtake it.
    #[arg(long, env = "GANTRY_GANG_PATIENCE", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub gang_patience: Duration,

    /// Seconds that a backfill reservation lasts. Its nodes are then open to other pods for the same time.
    #[arg(long, env = "GANTRY_GANG_DRAIN", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub gang_drain: Duration,

    /// Seconds that the GPUs of a member must run slower than those of the rest of its gang before an Event names it. 0:
    /// members are not compared.
    #[arg(long, env = "GANTRY_SLOW_MEMBER_AFTER", value_name = "SECONDS", default_value = "120", value_parser = seconds_or_none)]
    pub slow_member_after: Duration,

    /// Seconds that a gang's members may take to arrive once devices are reserved for them. The gang's own setting
    /// takes precedence.
    #[arg(long, env = "GANTRY_GANG_ARRIVAL", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub gang_arrival: Duration,

    /// Longest time in seconds that a gang may set for its members to arrive, by an annotation, its owner or its Gang. A
    /// longer time is lowered to this one. Default: 300, or --gang-arrival if that is longer.
    #[arg(long, env = "GANTRY_GANG_ARRIVAL_MAX", value_name = "SECONDS", value_parser = seconds)]
    pub gang_arrival_max: Option<Duration>,

    /// Levels of --fabric that a gang may require, and node, with commas; all or none. A gang that requires another
    /// level prefers it.
    #[arg(long, env = "GANTRY_GANG_REQUIRED_LEVELS", value_name = "LEVELS", default_value = "all")]
    pub gang_required_levels: String,

    /// Seconds that the reservation of a lost member is kept for its replacement. Also the time after which a deadlock
    /// of two gangs, each of which holds what the other lacks, is resolved.
    #[arg(long, env = "GANTRY_GANG_HOLD", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub gang_hold: Duration,

    /// Seconds that the reservations of a gang are kept while its owner creates all members again. 0: they are not kept.
    /// The gang's own setting takes precedence.
    #[arg(long, env = "GANTRY_GANG_RESTART_HOLD", value_name = "SECONDS", default_value = "120", value_parser = seconds_or_none)]
    pub gang_restart_hold: Duration,

    /// Longest time in seconds that a gang may set for that, by an annotation or its Gang. A longer time is lowered to
    /// this one. Default: 600, or --gang-restart-hold if that is longer.
    #[arg(long, env = "GANTRY_GANG_RESTART_HOLD_MAX", value_name = "SECONDS", value_parser = seconds_or_none)]
    pub gang_restart_hold_max: Option<Duration>,

    /// Most spare reservations that a gang may ask for, of each role, by an annotation or its Gang. A larger number is
    /// lowered to this one. 0: none.
    #[arg(long, env = "GANTRY_GANG_SPARES_MAX", value_name = "COUNT", default_value = "8", value_parser = clap::value_parser!(u32).range(..=64))]
    pub gang_spares_max: u32,

    /// Write the node of each member of a gang into status.nominatedNodeName, so that kube-scheduler tries it first.
    /// For clusters where kube-scheduler samples the nodes.
    #[arg(long, env = "GANTRY_NOMINATE")]
    pub nominate: bool,

    /// Remove the scheduling gate gantry.dev/gang from pods once their gang is complete. Needs the permissions of
    /// manifests/gates.yaml.
    #[arg(long, env = "GANTRY_GATES")]
    pub gates: bool,
}

impl GangArgs {
    /// The most that a gang may ask of others.
    ///
    /// # Errors
    /// A ceiling is below the default, or names a level that the fabric lacks.
    pub fn ceilings(&self) -> anyhow::Result<Ceilings> {
        let arrival = self.gang_arrival_max.unwrap_or(self.gang_arrival.max(Ceilings::default().arrival));
        anyhow::ensure!(
            arrival >= self.gang_arrival,
            "--gang-arrival-max {} must not be less than --gang-arrival {}",
            arrival.as_secs(),
            self.gang_arrival.as_secs()
        );
        let most = self.gang_restart_hold.max(Ceilings::default().restart_hold);
        let restart_hold = self.gang_restart_hold_max.unwrap_or(most);
        anyhow::ensure!(
            restart_hold >= self.gang_restart_hold,
            "--gang-restart-hold-max {} must not be less than --gang-restart-hold {}",
            restart_hold.as_secs(),
            self.gang_restart_hold.as_secs()
        );
        let required_levels = required_levels(&self.gang_required_levels, &self.fabric)?;
        Ok(Ceilings { arrival, restart_hold, spares: self.gang_spares_max, required_levels })
    }
}

/// The levels that a gang may require, as written for --gang-required-levels; `None`: all.
///
/// # Errors
/// The fabric lacks one of them.
pub fn required_levels(text: &str, fabric: &Levels) -> anyhow::Result<Option<Vec<Arc<str>>>> {
    let name = |text: &str| -> anyhow::Result<Arc<str>> {
        Ok(match fabric.find(text).with_context(|| format!("--gang-required-levels {text:?}"))? {
            Scope::Level(level) => fabric.0.get(level).map_or_else(|| text.into(), |it| Arc::clone(&it.name)),
            Scope::Node => NODE.into(),
        })
    };
    match text.trim() {
        "all" | "" => Ok(None),
        "none" => Ok(Some(Vec::new())),
        names => names.split(',').map(|text| name(text.trim())).collect::<Result<_, _>>().map(Some),
    }
}

/// Options of the leader election.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaseArgs {
    /// Decide only while holding the Lease, so that one of several replicas decides. Without it there must be one
    /// replica only.
    #[arg(long, env = "GANTRY_LEADER_ELECT")]
    pub leader_elect: bool,

    /// Name of the Lease.
    #[arg(long, env = "GANTRY_LEASE_NAME", value_name = "NAME", default_value = names::EXTENDER, value_parser = object_name)]
    pub lease_name: String,

    /// Namespace of the Lease.
    #[arg(
        long,
        env = "GANTRY_LEASE_NAMESPACE",
        value_name = "NAMESPACE",
        default_value = "gantry-system",
        value_parser = label
    )]
    pub lease_namespace: String,

    /// Seconds after the leader's last renewal before another replica may take the Lease.
    #[arg(long, env = "GANTRY_LEASE_DURATION", value_name = "SECONDS", default_value = "6", value_parser = seconds)]
    pub lease_duration: Duration,

    /// Seconds after its last renewal when a leader that cannot renew stops deciding. Must be less than
    /// --lease-duration: its last requests must have arrived before another replica leads.
    #[arg(long, env = "GANTRY_LEASE_RENEW_DEADLINE", value_name = "SECONDS", default_value = "4", value_parser = seconds)]
    pub lease_renew_deadline: Duration,

    /// Service without a selector, in the namespace of the Lease. The leader writes its EndpointSlice, so that only the
    /// leader receives requests.
    #[arg(long, env = "GANTRY_LEADER_SERVICE", value_name = "NAME", requires_all = ["leader_elect", "leader_address"], value_parser = label)]
    pub leader_service: Option<String>,

    /// Address of this replica for that Service: the address of its pod.
    #[arg(long, env = "GANTRY_LEADER_ADDRESS", value_name = "IP", requires = "leader_service")]
    pub leader_address: Option<IpAddr>,
}

/// The levels of the fabric.
///
/// # Errors
/// The text is not a list of levels.
pub fn levels(text: &str) -> Result<Levels, String> {
    Levels::parse(text).map_err(|error| error.to_string())
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address = gantry_runtime::listen::address(text)?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => {
            Err("write an address of loopback, such as 127.0.0.1:8013: there is no authentication".to_owned())
        }
    }
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    match text {
        "0" => Ok(Duration::ZERO),
        _ => seconds(text).map_err(|_| "write whole seconds, 0 to 3600".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(seconds)),
        _ => Err("write whole seconds, 1 to 3600".to_owned()),
    }
}

/// The name of a profile of kube-scheduler, without surrounding blanks.
///
/// # Errors
/// The text is blank.
pub fn scheduler(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("write the schedulerName of a profile, such as default-scheduler".to_owned()),
        name => Ok(name.to_owned()),
    }
}

/// The name of an object: an RFC 1123 subdomain.
fn object_name(text: &str) -> Result<String, String> {
    if names::is_subdomain(text) {
        return Ok(text.to_owned());
    }
    Err("write lower-case letters, digits, - and ., at most 253, beginning and ending with a letter or digit"
        .to_owned())
}

/// The name of a namespace or a Service: an RFC 1123 label.
fn label(text: &str) -> Result<String, String> {
    if names::is_label(text) {
        return Ok(text.to_owned());
    }
    Err("write lower-case letters, digits and -, at most 63, beginning and ending with a letter or digit"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Args as _;

    use super::*;

    /// Every example in quotes that the help of an option gives.
    fn examples(option: &str) -> Vec<String> {
        let command = Args::augment_args(clap::Command::new("extender"));
        let argument = command.get_arguments().find(|argument| argument.get_id() == option).unwrap();
        let help = argument.get_long_help().or(argument.get_help()).unwrap().to_string();
        let quoted = help.split('"').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    }

    #[test]
    fn invalid_object_names_are_refused() {
        let parse = |words: &[&str]| {
            let command = Args::augment_args(clap::Command::new("extender").no_binary_name(true));
            command.try_get_matches_from(words).map(|_| ())
        };
        parse(&["--lease-name=a.b", "--lease-namespace=a-b"]).unwrap();
        let refused = |words| parse(&[words]).unwrap_err().to_string().lines().next().unwrap().to_owned();
        let words = ["--lease-name=A_B", "--lease-name=", "--lease-namespace=", "--lease-namespace=a.b"];
        insta::assert_snapshot!(words.map(refused).join("\n"), @r"
        error: invalid value 'A_B' for '--lease-name <NAME>': write lower-case letters, digits, - and ., at most 253, beginning and ending with a letter or digit
        error: invalid value '' for '--lease-name <NAME>': write lower-case letters, digits, - and ., at most 253, beginning and ending with a letter or digit
        error: invalid value '' for '--lease-namespace <NAMESPACE>': write lower-case letters, digits and -, at most 63, beginning and ending with a letter or digit
        error: invalid value 'a.b' for '--lease-namespace <NAMESPACE>': write lower-case letters, digits and -, at most 63, beginning and ending with a letter or digit
        ");
    }

    fn gangs(words: &[&str]) -> GangArgs {
        let command = GangArgs::augment_args(clap::Command::new("extender").no_binary_name(true));
        let matches = command.try_get_matches_from(words).unwrap();
        clap::FromArgMatches::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn webhook_options_need_one_another() {
        let parse = |words: &[&str]| {
            let command = Args::augment_args(clap::Command::new("extender").no_binary_name(true));
            command.try_get_matches_from(words).map(|_| ())
        };
        let (listen, cert, key) = ("--webhook-listen=:9443", "--webhook-cert=c", "--webhook-key=k");
        parse(&[listen, cert, key]).unwrap();
        for words in [&[listen][..], &[listen, cert], &[listen, key], &[cert, key], &[cert], &[key]] {
            let refused = parse(words).unwrap_err().to_string();
            assert!(refused.contains("--webhook-"), "{words:?}: {refused}");
        }
    }

    #[test]
    fn ceilings_follow_defaults_and_refuse_contradictions() {
        let seconds = |words: &[&str]| gangs(words).ceilings().unwrap().arrival.as_secs();
        assert_eq!(seconds(&[]), 300);
        assert_eq!(seconds(&["--gang-arrival=900"]), 900, "as before there was a ceiling");
        assert_eq!(seconds(&["--gang-arrival-max=120"]), 120);
        let refused = |words: &[&str]| format!("{:#}", gangs(words).ceilings().unwrap_err());
        assert_eq!(
            refused(&["--gang-arrival=120", "--gang-arrival-max=60"]),
            "--gang-arrival-max 60 must not be less than --gang-arrival 120"
        );
        let levels = |value: &str| {
            let words =
                [format!("--gang-required-levels={value}"), "--fabric=zone,rack=example.com/rack".to_owned()];
            gangs(&words.each_ref().map(String::as_str)).ceilings().map(|ceilings| ceilings.required_levels)
        };
        assert_eq!(levels("all").unwrap(), None);
        assert_eq!(levels("none").unwrap(), Some(Vec::new()));
        assert_eq!(levels("example.com/rack, node").unwrap(), Some(vec!["rack".into(), "node".into()]));
        let error = format!("{:#}", levels("zone,rakc").unwrap_err());
        insta::assert_snapshot!(error, @r#"--gang-required-levels "rakc": there is no level "rakc" of the fabric; levels are zone, rack, node; did you mean rack?"#);
    }

    #[test]
    fn scheduler_name_is_trimmed_and_not_empty() {
        assert_eq!(scheduler(" gpu ").as_deref(), Ok("gpu"));
        insta::assert_snapshot!(["", " "].map(|text| scheduler(text).unwrap_err()).join("\n"), @r"
        write the schedulerName of a profile, such as default-scheduler
        write the schedulerName of a profile, such as default-scheduler
        ");
    }

    #[test]
    fn fabric_example_of_the_help_is_valid() {
        let examples = examples("fabric");
        assert_eq!(examples.len(), 1);
        let names: Vec<_> = levels(&examples[0]).unwrap().0.into_iter().map(|level| level.name).collect();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        assert_eq!(names, ["zone", "rack", "clique"]);
    }
}
