//! Options of `gantry extender`. Documentation of each stands here; defaults are those the manifests use.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::decide::{ForeignNodes, Policy};

/// The scheduler extender: tells kube-scheduler which nodes can take a pod that asks for GPUs and which is best, and binds it with the
/// exact GPUs chosen.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Kubeconfig file. Without it: the service account of the pod this runs in.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Address to serve kube-scheduler, probes and metrics on: POST /filter, /prioritize, /bind, /preempt; GET /healthz, /readyz, /metrics.
    ///
    /// There is no authentication: let only kube-scheduler reach it.
    #[arg(
        long,
        env = "GANTRY_LISTEN",
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:8010"
    )]
    pub listen: SocketAddr,

    /// Resources to account and choose devices for, besides every resource of nvidia.com that a node's plugin publishes. All their names must
    /// stand in kube-scheduler's configuration under `managedResources`.
    #[arg(
        long = "resource",
        env = "GANTRY_RESOURCES",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = gantry_api::names::GPU_RESOURCE
    )]
    pub resources: Vec<String>,

    /// What to do with nodes whose devices Gantry does not know, because another plugin or DRA serves them.
    #[arg(long, env = "GANTRY_FOREIGN_NODES", value_enum, default_value_t)]
    pub foreign_nodes: ForeignNodes,

    /// Which of equally fast nodes to take.
    #[arg(long, env = "GANTRY_POLICY", value_enum, default_value_t)]
    pub policy: Policy,

    /// Time limit in seconds of one bind, the API server's part included. Must be below `httpTimeout` in kube-scheduler's
    /// configuration: kube-scheduler must hear the outcome.
    #[arg(long, env = "GANTRY_BIND_TIMEOUT", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    pub bind_timeout: Duration,

    /// Largest request body in MiB. Names of 5,000 nodes take about 0.2 MiB, 5,000 whole nodes about 75 MiB.
    #[arg(long, env = "GANTRY_BODY_LIMIT", value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub body_limit: u32,

    /// Seconds for which the API server has not answered, or a watch of pods, nodes or GpuNodes has brought nothing and cannot be begun anew,
    /// after which the extender says that it is not ready. It goes on answering from what it knows: a stale cache makes devices free
    /// too late, never too early.
    #[arg(long, env = "GANTRY_STALE_AFTER", value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    pub stale_after: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(seconds)),
        _ => Err("write whole seconds, 1 to 3600".to_owned()),
    }
}
