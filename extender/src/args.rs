//! Options of `gantry extender`. Documentation of each stands here; defaults are those the manifests use.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use gantry_api::names;
use gantry_gang::Levels;

use crate::decide::{ForeignNodes, Policy};

/// The scheduler extender: tells kube-scheduler which nodes can take a pod that asks for GPUs and which is best, and binds it with the
/// exact GPUs chosen.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Kubeconfig file. Without it: the service account of the pod this runs in.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Address to serve kube-scheduler, probes and metrics on: POST /filter, /prioritize, /bind, /preempt; GET /healthz, /readyz,
    /// /standbyz, /metrics. Ready is the one that leads; one that could lead at once stands by.
    ///
    /// Without --tls-cert there is no authentication: let only kube-scheduler reach it, best on 127.0.0.1. A port alone, such as :8010, is
    /// that of all addresses, of IPv6 too where there is any.
    #[arg(
        long,
        env = "GANTRY_LISTEN",
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:8010",
        value_parser = gantry_runtime::listen::address
    )]
    pub listen: SocketAddr,

    /// Second address for metrics and probes alone, in plain HTTP, for collectors that cannot or must not reach --listen. Unset: they are
    /// served on --listen only.
    #[arg(
        long,
        env = "GANTRY_METRICS_LISTEN",
        value_name = "ADDRESS:PORT",
        value_parser = gantry_runtime::listen::address
    )]
    pub metrics_listen: Option<SocketAddr>,

    /// Resources to account and choose devices for, besides every resource of nvidia.com that a node's plugin publishes. All their names
    /// must stand in kube-scheduler's configuration under `managedResources`.
    #[arg(
        long = "resource",
        env = "GANTRY_RESOURCES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = gantry_api::names::GPU_RESOURCE
    )]
    pub resources: Vec<String>,

    /// Names of kube-scheduler's profiles that have this extender (`schedulerName` of their pods). Pods of any other scheduler count
    /// from their binding on, for what they hold; before it they are not planned for. A scheduler that calls without being named here is
    /// treated as named.
    #[arg(
        long = "scheduler-name",
        env = "GANTRY_SCHEDULER_NAMES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = names::DEFAULT_SCHEDULER,
        value_parser = scheduler
    )]
    pub schedulers: Vec<String>,

    /// What to do with nodes whose devices Gantry does not know, because another plugin or DRA serves them.
    #[arg(long, env = "GANTRY_FOREIGN_NODES", value_enum, default_value_t)]
    pub foreign_nodes: ForeignNodes,

    /// Which of equally fast nodes to take.
    #[arg(long, env = "GANTRY_POLICY", value_enum, default_value_t)]
    pub policy: Policy,

    /// Time limit in seconds of one bind, the API server's part included: a member of a gang waits two thirds of it for the others at most.
    /// Must be below `httpTimeout` in kube-scheduler's configuration: kube-scheduler must hear the outcome.
    #[arg(long, env = "GANTRY_BIND_TIMEOUT", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    pub bind_timeout: Duration,

    /// Largest request body in MiB. Names of 5,000 nodes take about 0.2 MiB, 5,000 whole nodes about 75 MiB.
    #[arg(long, env = "GANTRY_BODY_LIMIT", value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub body_limit: u32,

    /// Seconds for which the API server has not answered, or a watch of pods, nodes or GpuNodes has brought nothing and cannot be begun
    /// anew, after which the extender says that it is not ready. It goes on answering from what it knows: a stale cache makes devices free
    /// too late, never too early.
    #[arg(long, env = "GANTRY_STALE_AFTER", value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    pub stale_after: Duration,

    /// What of TLS is used.
    #[command(flatten)]
    pub tls: TlsArgs,

    /// How gangs are treated.
    #[command(flatten)]
    pub gangs: GangArgs,

    /// Which of several extenders leads.
    #[command(flatten)]
    pub lease: LeaseArgs,
}

/// Options of TLS. The files are read again when they change.
#[derive(Debug, Clone, clap::Args)]
pub struct TlsArgs {
    /// Certificate chain in PEM, this server's first. With it the extender serves HTTPS, and HTTP/2.
    #[arg(long, env = "GANTRY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// The private key of that certificate in PEM.
    #[arg(long, env = "GANTRY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Authorities in PEM: only clients with a certificate of theirs are given decisions. Probes and metrics need none.
    #[arg(long, env = "GANTRY_CLIENT_CA", value_name = "FILE", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,
}

/// Options of gangs.
#[derive(Debug, Clone, clap::Args)]
pub struct GangArgs {
    /// The fabric above the node, from the largest domain to the smallest: presets and NAME=LABEL items with commas, such as
    /// "zone,rack=example.com/rack,nvlink". Gangs are laid into the smallest domain that holds them. Nothing: the cluster is one domain.
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", default_value = "", value_parser = levels)]
    pub fabric: Levels,

    /// Seconds that the gang which is next waits before nodes are kept for it; until then others may go past it.
    #[arg(long, env = "GANTRY_GANG_PATIENCE", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub gang_patience: Duration,

    /// Seconds for which nodes are kept for it at a stretch; then they are open to others for as long.
    #[arg(long, env = "GANTRY_GANG_DRAIN", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub gang_drain: Duration,

    /// Seconds that a gang's members may take to arrive once it has a place, where the gang itself does not say.
    #[arg(long, env = "GANTRY_GANG_ARRIVAL", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub gang_arrival: Duration,

    /// Seconds for which the place of a lost member is kept for its replacement; also for how long two gangs of which each holds what the
    /// other lacks wait until one of them gives way.
    #[arg(long, env = "GANTRY_GANG_HOLD", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub gang_hold: Duration,

    /// Tell kube-scheduler the node of each member of a gang (status.nominatedNodeName), which it tries first: for clusters where
    /// it looks at a sample of the nodes only.
    #[arg(long, env = "GANTRY_NOMINATE")]
    pub nominate: bool,

    /// Remove the scheduling gate gantry.dev/gang from pods once their gang is complete. Needs the rights in manifests/gates.yaml.
    #[arg(long, env = "GANTRY_GATES")]
    pub gates: bool,
}

/// Options of the election.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaseArgs {
    /// Decide only while holding the Lease, so that of several extenders one does. Without it this must be the only one.
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

    /// Seconds for which the others wait when nothing is heard of the leader.
    #[arg(long, env = "GANTRY_LEASE_DURATION", value_name = "SECONDS", default_value = "6", value_parser = seconds)]
    pub lease_duration: Duration,

    /// Seconds after its last renewal when a leader that cannot renew stops deciding. Must be less than --lease-duration: what it has sent
    /// off by then must have arrived before another leads.
    #[arg(long, env = "GANTRY_LEASE_RENEW_DEADLINE", value_name = "SECONDS", default_value = "4", value_parser = seconds)]
    pub lease_renew_deadline: Duration,

    /// Service without a selector, in the namespace of the Lease: who leads keeps it pointing to itself (by an EndpointSlice), so that
    /// nobody else is asked.
    #[arg(long, env = "GANTRY_LEADER_SERVICE", value_name = "NAME", requires_all = ["leader_elect", "leader_address"], value_parser = label)]
    pub leader_service: Option<String>,

    /// The address at which that Service's clients reach this process: its pod's.
    #[arg(
        long,
        env = "GANTRY_LEADER_ADDRESS",
        value_name = "IP",
        requires = "leader_service"
    )]
    pub leader_address: Option<IpAddr>,
}

/// The levels of the fabric.
///
/// # Errors
/// What is written is not such levels.
pub fn levels(text: &str) -> Result<Levels, String> {
    Levels::parse(text).map_err(|error| error.to_string())
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(seconds)),
        _ => Err("write whole seconds, 1 to 3600".to_owned()),
    }
}

/// The name of a profile of kube-scheduler, without blanks around it.
///
/// # Errors
/// There is nothing but blanks.
pub fn scheduler(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("write the schedulerName of a profile, such as default-scheduler".to_owned()),
        name => Ok(name.to_owned()),
    }
}

/// The name of an object in the cluster, which the API server would refuse otherwise: an RFC 1123 subdomain.
fn object_name(text: &str) -> Result<String, String> {
    if names::is_subdomain(text) {
        return Ok(text.to_owned());
    }
    Err(
        "write lower-case letters, digits, - and ., at most 253, beginning and ending with a letter or digit"
            .to_owned(),
    )
}

/// The name of a namespace or a Service: an RFC 1123 label.
fn label(text: &str) -> Result<String, String> {
    if names::is_label(text) {
        return Ok(text.to_owned());
    }
    Err(
        "write lower-case letters, digits and -, at most 63, beginning and ending with a letter or digit"
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use clap::Args as _;

    use super::*;

    /// Every example in quotes that the help of an option gives.
    fn examples(option: &str) -> Vec<String> {
        let command = Args::augment_args(clap::Command::new("extender"));
        let argument = command
            .get_arguments()
            .find(|argument| argument.get_id() == option)
            .unwrap();
        let help = argument
            .get_long_help()
            .or(argument.get_help())
            .unwrap()
            .to_string();
        let quoted = help.split('"').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    }

    #[test]
    fn names_that_the_api_server_would_refuse_are_refused_at_once() {
        let parse = |words: &[&str]| {
            let command = Args::augment_args(clap::Command::new("extender").no_binary_name(true));
            command.try_get_matches_from(words).map(|_| ())
        };
        parse(&["--lease-name=a.b", "--lease-namespace=a-b"]).unwrap();
        for words in [
            "--lease-name=A_B",
            "--lease-name=",
            "--lease-namespace=",
            "--lease-namespace=a.b",
        ] {
            let refused = parse(&[words]).unwrap_err().to_string();
            assert!(refused.contains("write lower-case letters"), "{refused}");
        }
    }

    #[test]
    fn profiles_are_named_without_blanks_and_none_is_without_a_name() {
        assert_eq!(scheduler(" gpu ").as_deref(), Ok("gpu"));
        for text in ["", " "] {
            assert!(scheduler(text).unwrap_err().contains("default-scheduler"));
        }
    }

    #[test]
    fn the_fabric_that_the_help_gives_as_an_example_is_understood() {
        let examples = examples("fabric");
        assert_eq!(examples.len(), 1);
        let names: Vec<_> = levels(&examples[0])
            .unwrap()
            .0
            .into_iter()
            .map(|level| level.name)
            .collect();
        let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        assert_eq!(names, ["zone", "rack", "clique"]);
    }
}
