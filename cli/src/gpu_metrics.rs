//! `gantry gpu-metrics`: one reading of this node's GPUs, as the plugin serves it at /metrics/dcgm. Needs neither kubelet nor a
//! cluster.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use gantry_plugin::discover::NvmlOptions;
use gantry_plugin::telemetry::read_once;

use crate::runtime::print;
use crate::visible::Visible;

/// Options of `gantry gpu-metrics`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
The GPUs are read twice, because rates and profiling metrics (DCGM_FI_PROF_*, Hopper and later) lie between two
readings. A value that a GPU does not have is missing. What cannot be read goes to standard error.

Examples:
  gantry gpu-metrics                           this node
  gantry gpu-metrics --seconds 10 | grep PROF  averages over 10 s
  gantry gpu-metrics > /var/lib/node_exporter/textfile/gpu.prom")]
pub(crate) struct GpuMetricsArgs {
    /// Seconds between the two readings
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,

    /// Name of the node in the labels [default: this host's]
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,

    /// Path or name of NVIDIA's management library
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1")]
    nvml_library: PathBuf,

    /// Where /proc is read
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,

    /// Where /sys is read
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sys_root: PathBuf,
}

/// Runs `gantry gpu-metrics`.
///
/// # Errors
/// NVML cannot be loaded, or the node has no GPU.
pub(crate) fn run(args: &GpuMetricsArgs) -> anyhow::Result<()> {
    let options = NvmlOptions {
        library: args.nvml_library.clone(),
        proc_root: args.proc_root.clone(),
        sys_root: args.sys_root.clone(),
    };
    let own = || std::fs::read_to_string(args.proc_root.join("sys/kernel/hostname")).unwrap_or_default();
    let host = args.node_name.clone().unwrap_or_else(|| own().trim().to_owned());
    let (text, problems) = read_once(&options, &host, Duration::from_secs(args.seconds))
        .context("cannot read the GPUs of this node")?;
    for problem in problems {
        tracing::warn!("{problem}");
    }
    print(&Visible::new(&text))
}
