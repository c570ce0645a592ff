//! `gantry cordon gpu`, `gantry uncordon gpu`, `gantry drain gpu`, `gantry reset gpu` and `gantry evidence gpu`:
//! one GPU at a time.

mod cordon;
mod drain;
mod evidence;
mod request;
mod reset;
#[cfg(target_os = "linux")]
mod reset_device;
mod target;

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

pub(crate) use cordon::{cordon, uncordon};
pub(crate) use drain::drain;
pub(crate) use evidence::evidence;
pub(crate) use reset::reset;
#[cfg(target_os = "linux")]
pub(crate) use reset_device::{ResetDeviceArgs, reset_device};

use crate::cluster::{ClusterArgs, SystemArgs};

/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Options of `gantry cordon`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
A cordoned GPU is unhealthy to kubelet, and the extender does not choose it. Pods that hold it go on. The cordon is an
annotation of the GpuNode and survives restarts; kubectl sets it too:
  kubectl annotate gpunode NODE gantry.dev/cordon-GPU-5ab8...='the fan fails'

Examples:
  gantry cordon gpu node-1/3 --reason 'Xid 79 twice'
  gantry cordon gpu GPU-5ab8c0de               by UUID, or its beginning
  gantry cordon gpu node-1/0 node-1/1          several; nothing is done if one of them is wrong

Exit codes: 0 cordoned, also if it was before; 1 the cluster cannot be read or written; 2 no such GPU.")]
pub(crate) struct CordonArgs {
    #[command(subcommand)]
    what: CordonCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum CordonCommand {
    /// Withhold GPUs from new pods
    Gpu {
        #[command(flatten)]
        targets: Targets,

        /// Why; shown by kubelet, `gantry map` and Events
        #[arg(long, value_name = "TEXT", default_value = "")]
        reason: String,
    },
}

/// Options of `gantry uncordon`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  gantry uncordon gpu node-1/3

Exit codes: 0 uncordoned, also if it was not cordoned; 1 the cluster cannot be read or written; 2 no such GPU.")]
pub(crate) struct UncordonArgs {
    #[command(subcommand)]
    what: UncordonCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum UncordonCommand {
    /// Give GPUs to new pods again
    Gpu(Targets),
}

/// Options of `gantry drain`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Cordons the GPU, then evicts the pods that hold it through the Eviction API, until none does. A member of a gang means the
whole gang. PodDisruptionBudgets hold evictions back; every pod has its own grace period. Nothing else is evicted. The GPU
stays cordoned: `gantry uncordon gpu` returns it.

Examples:
  gantry drain gpu node-1/3 --reason 'Xid 79 twice'
  gantry drain gpu node-1/3 --dry-run          what would be evicted, and whether budgets allow it now
  gantry drain gpu node-1/3 --timeout 3600

Exit codes: 0 drained; 1 not drained, for a budget, the time limit or a failure, with what was evicted; 2 no such GPU.")]
pub(crate) struct DrainArgs {
    #[command(subcommand)]
    what: DrainCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum DrainCommand {
    /// Cordon a GPU and evict the pods that hold it
    Gpu(DrainOptions),
}

#[derive(Debug, Clone, Args)]
struct DrainOptions {
    #[command(flatten)]
    one: OneGpu,

    /// Why, if it is not cordoned yet
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,

    /// Seconds after which a GPU that is not empty is a failure
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u32,

    /// Print what would be evicted; change nothing
    #[arg(long)]
    dry_run: bool,

    /// Evict pods without a controller too: nothing replaces them
    #[arg(long)]
    force: bool,
}

/// Options of `gantry reset`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Resets a GPU that is cordoned and held by no pod: a privileged pod on its node runs the driver's nvidia-smi --gpu-reset, while
the plugin keeps NVML closed. Before Ampere the driver resets all GPUs that NVLinks join; all of them must be drained. No
other program may have a GPU open, such as DCGM or nvidia-persistenced; nvidia-smi refuses then. The GPU counts as reset once
the plugin reads it again as healthy. It stays cordoned unless --uncordon is given.

The pod is made in the namespace of the plugin, with the image of the plugin. docs/operate.md has the rights.

Examples:
  gantry drain gpu node-1/3 && gantry reset gpu node-1/3 --uncordon
  gantry reset gpu node-1/3 --dry-run          which GPUs would be reset, and what is in the way

Exit codes: 0 reset and healthy; 1 failed; 2 no such GPU; 3 not drained, nothing was done; 4 the driver did not reset it;
5 reset, and not healthy afterwards. The reason is on standard error.")]
pub(crate) struct ResetArgs {
    #[command(subcommand)]
    what: ResetCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum ResetCommand {
    /// Reset a drained GPU
    Gpu(ResetOptions),
}

#[derive(Debug, Clone, Args)]
struct ResetOptions {
    #[command(flatten)]
    one: OneGpu,

    /// Seconds that the pod may take
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = clap::value_parser!(u32).range(1..=600))]
    timeout: u32,

    /// Check everything, and print which GPUs would be reset; change nothing
    #[arg(long)]
    dry_run: bool,

    /// Give the GPU to new pods again if it is healthy afterwards; GPUs that are reset with it stay cordoned
    #[arg(long)]
    uncordon: bool,

    /// As --uncordon, if this rule of remediation set the cordon; another cordon stays
    #[arg(long, value_name = "RULE", conflicts_with = "uncordon")]
    uncordon_of_rule: Option<String>,
}

/// Options of `gantry evidence`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
The plugin counts the Xids of each GPU and the resets after a fault, and keeps them with the remapped rows in the status of
the GpuNode, over its own restarts and those of the node, until the Node is deleted. The evidence of a board that was taken
out stays with its old node.

JSON (-o json), stable fields: a list of node, gpu, index, model, serial and evidence (gpu, serial, since, xids[] of xid,
count, last; remappedRows of correctable, uncorrectable, failed, since; resets of count, last). A GPU that is no longer in
the node has no index. A GPU of which nothing was seen has no evidence.

Examples:
  gantry evidence gpu                          every GPU with an Xid, remapped memory or a reset
  gantry evidence gpu node-1/3
  gantry evidence gpu 1653923001234            by the serial number of the board
  gantry evidence gpu node-1/3 -o json

Exit codes: 0 shown, 1 the cluster cannot be read, 2 no such GPU.")]
pub(crate) struct EvidenceArgs {
    #[command(subcommand)]
    what: EvidenceCommand,
}

#[derive(Debug, Clone, Subcommand)]
enum EvidenceCommand {
    /// Show the Xids, the remapped memory and the resets of GPUs
    Gpu(EvidenceOptions),
}

#[derive(Debug, Clone, Args)]
struct EvidenceOptions {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// The GPU: node and index or UUID, the UUID alone, or the serial number of the board [default: all with evidence]
    #[arg(value_name = "NODE/INDEX|UUID|SERIAL")]
    gpus: Vec<String>,

    /// Output format
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value_t)]
    output: EvidenceForm,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum EvidenceForm {
    /// Lines for a terminal
    #[default]
    Text,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// The GPU of a command that also reads Gantry's own namespace.
#[derive(Debug, Clone, Args)]
struct OneGpu {
    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    system: SystemArgs,

    /// The GPU: node and index or UUID, or the UUID alone; the beginning of a UUID is enough where one GPU has it
    #[arg(value_name = "NODE/INDEX|UUID")]
    gpu: String,
}

/// The GPUs of a command.
#[derive(Debug, Clone, Args)]
struct Targets {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// The GPU: node and index or UUID, or the UUID alone; the beginning of a UUID is enough where one GPU has it
    #[arg(value_name = "NODE/INDEX|UUID", required = true)]
    gpus: Vec<String>,
}
