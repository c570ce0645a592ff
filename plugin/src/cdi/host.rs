//! What of the host goes into specifications: device nodes, the driver's files, whether the hook program is there. A snapshot;
//! taking it is the only thing here that looks at files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gantry_topology::Machine;

use super::driver::Driver;
use crate::allocate::Nodes;
use crate::config::{CdiFeature, Config};

/// The host at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Device nodes.
    pub nodes: Nodes,
    /// Names under `/dev` of the display nodes of each GPU, by its index; those that exist.
    pub displays: BTreeMap<u8, Vec<String>>,
    /// The driver's files.
    pub driver: Driver,
    /// Whether the program that hooks run was seen on the host.
    pub hooks: bool,
}

impl Host {
    /// Looks at the host. `dev` and `sys` are where this process sees `/dev` and `/sys`.
    pub fn look(config: &Config, machine: &Machine, dev: &Path, sys: &Path) -> Self {
        Self::look_besides(driver(config, machine), config, machine, dev, sys)
    }

    /// [`Host::look`] where the driver is known: its files are thousands, and change when it does.
    pub(super) fn look_besides(
        driver: Driver,
        config: &Config,
        machine: &Machine,
        dev: &Path,
        sys: &Path,
    ) -> Self {
        let nodes = nodes(config, dev);
        Self {
            displays: displays(machine, &nodes, sys),
            nodes,
            driver,
            hooks: seen_here(config)
                .iter()
                .any(|path| fs::symlink_metadata(path).is_ok()),
        }
    }
}

/// The files of the machine's driver.
pub(super) fn driver(config: &Config, machine: &Machine) -> Driver {
    let explicit = config
        .cdi_feature_flags
        .contains(&CdiFeature::EnableExplicitDriverLibraries);
    let version = machine.host().driver.as_deref();
    Driver::find(&config.container_driver_root, version, explicit)
}

/// The device nodes alone: what Allocate needs of the host.
pub(crate) fn nodes(config: &Config, dev: &Path) -> Nodes {
    Nodes::read(&[dev, &config.container_driver_root.join("dev")])
}

/// Where this process may see the hook program: below the driver's root if the host has it there, else under the host's path,
/// if that was mounted.
fn seen_here(config: &Config) -> Vec<PathBuf> {
    let below = config.cdi_hook_path.strip_prefix(&config.driver_root).ok();
    below
        .map(|below| config.container_driver_root.join(below))
        .into_iter()
        .chain([config.cdi_hook_path.clone()])
        .collect()
}

fn displays(machine: &Machine, nodes: &Nodes, sys: &Path) -> BTreeMap<u8, Vec<String>> {
    let of = |address: String| {
        let folder = sys.join("bus/pci/devices").join(address).join("drm");
        let mut names: Vec<String> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .map(|name| format!("dri/{name}"))
            .filter(|name| nodes.has(name))
            .collect();
        names.sort();
        names
    };
    machine
        .gpus()
        .iter()
        .filter_map(|gpu| Some((gpu.index, of(gpu.bus_id.as_ref()?.to_string()))))
        .filter(|(_, names)| !names.is_empty())
        .collect()
}
