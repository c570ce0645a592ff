//! The simulated GPUs of a node: our NVML library, a machine file beside it, and the `/proc`, `/sys` and `/dev` trees that go
//! with them, in the node's folder. Nothing of the node's own trees is touched; the daemon is told where these lie.

use std::path::{Path, PathBuf};

use gantry_nvml_sim::Installed;

use crate::cluster::Node;
use crate::{Error, Result};

/// A node's simulated GPUs, and the hand that breaks and mends them.
pub struct Hardware {
    folder: PathBuf,
    installed: Installed,
}

impl Hardware {
    /// Gives a node the GPUs of a machine file.
    ///
    /// # Errors
    /// The simulator's own.
    pub fn install(node: &Node, machine_file: &Path) -> Result<Self> {
        Self::install_in(node, machine_file, "hardware")
    }

    /// The same beside the GPUs that the node has, in a folder of that name.
    ///
    /// # Errors
    /// The simulator's own.
    pub fn install_in(node: &Node, machine_file: &Path, name: &str) -> Result<Self> {
        let folder = node.sandbox().folder().join(name);
        let installed =
            gantry_nvml_sim::install(machine_file, &folder).map_err(|source| Error::Hardware {
                node: node.name().to_owned(),
                source,
            })?;
        Ok(Self { folder, installed })
    }

    /// What the node daemon must be told to find the simulated trees.
    #[must_use]
    pub fn plugin_args(&self) -> Vec<String> {
        let root = self.folder.join("root");
        let tree = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        vec![
            tree("nvml-library", &self.installed.library),
            tree("proc-root", &root.join("proc")),
            tree("sys-root", &root.join("sys")),
            tree("container-dev-root", &root.join("dev")),
            tree("driver-root", &root),
        ]
    }

    /// The machine that the simulated driver has at the start.
    #[must_use]
    pub fn machine(&self) -> &gantry_topology::Machine {
        self.installed.facts.machine()
    }

    /// The simulated machine while it runs: raises an Xid, loses a GPU, makes a call fail.
    pub fn controller(&mut self) -> &mut gantry_nvml_sim::control::Controller {
        &mut self.installed.controller
    }
}
