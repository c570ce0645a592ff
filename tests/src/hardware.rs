//! The simulated GPUs of a node: the simulated NVML library, its machine file, and the `/proc`, `/sys` and `/dev`
//! trees, in the node's folder. The node's own trees are not changed; the daemon gets the paths as arguments.

use std::path::{Path, PathBuf};

use gantry_nvml_sim::InstalledMachine;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;

use crate::cluster::Node;
use crate::error::file;
use crate::{Error, Result};

/// The numbers of `/dev/null`.
const NULL: (u32, u32) = (1, 3);

/// Name of the folder of a node's GPUs.
pub const FOLDER: &str = "hardware";

/// A node's simulated GPUs, and the hand that breaks and mends them.
pub struct Hardware {
    folder: PathBuf,
    installed: InstalledMachine,
}

impl Hardware {
    /// Gives a node the GPUs of a machine file.
    ///
    /// # Errors
    /// The simulator's own.
    pub fn install(node: &Node, machine_file: &Path) -> Result<Self> {
        Self::install_in(node, machine_file, FOLDER)
    }

    /// The same in addition to the node's GPUs, in a folder of that name.
    ///
    /// # Errors
    /// The simulator's own.
    pub fn install_in(node: &Node, machine_file: &Path, name: &str) -> Result<Self> {
        let folder = node.sandbox().folder().join(name);
        let installed = gantry_nvml_sim::install(machine_file, &folder)
            .map_err(|source| Error::Hardware { node: node.name().to_owned(), source })?;
        Ok(Self { folder, installed })
    }

    /// The folder with the library and the machine.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Adds a device node of a companion driver, such as `gdrdrv`, until the GPUs are installed again. No driver is
    /// behind it.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn add_device(&self, name: &str) -> Result<()> {
        let path = self.folder.join("root/dev").join(name);
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.map_err(file("make the folder of", &path))?;
        let mode = Mode::from_raw_mode(0o666);
        match mknodat(CWD, &path, FileType::CharacterDevice, mode, makedev(NULL.0, NULL.1)) {
            // A node of an earlier run, which the simulator does not manage.
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(file("make", &path)(error.into())),
        }
    }

    /// The node daemon's arguments for the simulated trees.
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
