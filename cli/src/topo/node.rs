//! This node as the source of a machine: NVML, `/proc` and `/sys`. On Linux only.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use gantry_plugin::discover::{self, NvmlOptions, Scan};

use super::source::{Complaint, SourceData};

/// Options for reading this node.
#[derive(Debug, Clone, Args)]
pub(super) struct NodeArgs {
    /// Read this node's machine through NVML (the default)
    #[arg(long, conflicts_with = "from")]
    nvml: bool,

    /// Path or name of NVIDIA's management library
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1", conflicts_with = "from")]
    nvml_library: PathBuf,

    /// Where /proc is read
    #[arg(long, value_name = "DIR", default_value = "/proc", conflicts_with = "from")]
    proc_root: PathBuf,

    /// Where /sys is read
    #[arg(long, value_name = "DIR", default_value = "/sys", conflicts_with = "from")]
    sys_root: PathBuf,
}

impl NodeArgs {
    /// Reads the machine, and the faults of its GPUs.
    ///
    /// # Errors
    /// NVML's error.
    pub(super) fn seen(&self) -> anyhow::Result<SourceData> {
        let options = NvmlOptions {
            library: self.nvml_library.clone(),
            proc_root: self.proc_root.clone(),
            sys_root: self.sys_root.clone(),
        };
        discover::scan(&options).map(SourceData::from).context(
            "cannot read this node's machine; --from FILE reads a machine file or the output of nvidia-smi topo -m",
        )
    }

    /// Where `/sys` is read.
    pub(super) fn sys_root(&self) -> &Path {
        &self.sys_root
    }
}

/// The health that NVML reports now.
impl From<Scan> for SourceData {
    fn from(scan: Scan) -> Self {
        let complaint = |(gpu, reason)| Complaint { gpu, profile: None, reason, since: None };
        Self {
            machine: scan.machine,
            complaints: Some(scan.complaints.into_iter().map(complaint).collect()),
            withheld: scan.unhealthy,
        }
    }
}
