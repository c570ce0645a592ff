//! A simulated machine for a test, installed in its own folder, so that several machines exist in one process.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};

use gantry_nvml_sim::{InstalledMachine, install, install_text};
use gantry_plugin::Args;
use gantry_plugin::discover::NvmlOptions;
use gantry_topology::Machine;

/// An installed machine; its folder is removed with it.
pub(crate) struct Sim {
    pub(crate) installed: InstalledMachine,
    _folder: tempfile::TempDir,
}

impl Sim {
    /// The machine file `simulator/machines/<name>.yaml`.
    pub(crate) fn of(name: &str) -> Self {
        Self::of_file(&machines().join(format!("{name}.yaml")))
    }

    pub(crate) fn of_file(file: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installed = install(file, folder.path()).unwrap_or_else(|error| panic!("{error}"));
        Self { installed, _folder: folder }
    }

    pub(crate) fn of_machine(machine: &Machine, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // JSON is YAML.
        let text = serde_json::to_string(machine).unwrap();
        let installed =
            install_text(&text, Path::new(name), folder.path()).unwrap_or_else(|error| panic!("{error}"));
        Self { installed, _folder: folder }
    }

    /// Input of discovery.
    pub(crate) fn options(&self) -> NvmlOptions {
        NvmlOptions {
            library: self.installed.library.clone(),
            proc_root: self.installed.layout.proc.clone(),
            sys_root: self.installed.layout.sys.clone(),
        }
    }

    /// Makes the plugin use this machine.
    pub(crate) fn use_in(&self, args: &mut Args) {
        let layout = self.installed.layout.clone();
        args.nvml_library = self.installed.library.clone();
        args.proc_root = layout.proc;
        args.sys_root = layout.sys;
        args.dev_root = layout.dev;
    }

    /// The UUID of a GPU.
    pub(crate) fn uuid(&self, gpu: usize) -> &str {
        &self.installed.facts.gpus[gpu].uuid
    }
}

/// The folder of machine files.
pub(crate) fn machines() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../simulator/machines")
}
