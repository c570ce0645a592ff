//! A snapshot of the host for specifications: device nodes, the driver's files, whether the hook program exists. Only taking it reads
//! files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gantry_topology::Machine;

use super::driver::{Driver, Kernel};
use crate::allocate::Nodes;
use gantry_config::{CdiFeature, Config};

/// The host at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    pub nodes: Nodes,
    /// Names under `/dev` of the display nodes of each GPU, by its index; those that exist.
    pub displays: BTreeMap<u8, Vec<String>>,
    /// The driver's files.
    pub driver: Driver,
    /// Whether hooks may run their program: it is visible on the host, or was named and its folder is not visible.
    pub hooks: bool,
}

impl Host {
    /// Reads the host. `dev` and `sys` are where this process sees `/dev` and `/sys`.
    pub fn read(config: &Config, machine: &Machine, dev: &Path, sys: &Path) -> Self {
        Self::read_with_driver(driver(config, machine, sys), config, machine, dev, sys)
    }

    /// [`Host::read`] with a known driver, which has thousands of files that change only with it.
    pub(super) fn read_with_driver(
        driver: Driver,
        config: &Config,
        machine: &Machine,
        dev: &Path,
        sys: &Path,
    ) -> Self {
        let nodes = nodes(config, dev);
        Self { displays: displays(machine, &nodes, sys), nodes, driver, hooks: may_run_hooks(config) }
    }
}

/// The files of the machine's driver.
pub(super) fn driver(config: &Config, machine: &Machine, sys: &Path) -> Driver {
    let explicit = config.cdi_feature_flags.contains(&CdiFeature::EnableExplicitDriverLibraries);
    let version = machine.host().driver.as_deref();
    Driver::find(&config.container_driver_root, version, explicit, &Kernel::read(sys))
}

/// The device nodes, which Allocate needs. Those below the driver's root count only if containers get theirs from it: the nodes of a
/// driver container are not the host's.
pub(crate) fn nodes(config: &Config, dev: &Path) -> Nodes {
    let of_driver = config.container_driver_root.join("dev");
    if config.dev_root == config.driver_root { Nodes::read(&[dev, &of_driver]) } else { Nodes::read(&[dev]) }
}

/// Whether specifications may name the hook program. This process sees it below the driver's root, or under the host's path if that is
/// mounted. If neither folder is visible, as with the toolkit of the GPU operator, a configured path is trusted, because without hooks
/// some images find no library. The default path is trusted only if the program is visible, because a missing hook keeps every
/// container from starting.
fn may_run_hooks(config: &Config) -> bool {
    let is_there = |path: &Path| fs::symlink_metadata(path).is_ok();
    let below = config.cdi_hook_path.strip_prefix(&config.driver_root).ok();
    let below = below.map(|below| config.container_driver_root.join(below));
    let sees_folder = below.as_deref().and_then(Path::parent).is_some_and(is_there);
    let is_named = config.cdi_hook_path != Config::default().cdi_hook_path;
    below.as_deref().is_some_and(is_there) || is_there(&config.cdi_hook_path) || (is_named && !sees_folder)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_root_nodes_count_if_dev_root_is_driver_root() {
        let (own, driver) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(driver.path().join("dev")).unwrap();
        fs::write(own.path().join("nvidiactl"), "").unwrap();
        fs::write(driver.path().join("dev/nvidia-modeset"), "").unwrap();
        let has = |dev_root: &str| {
            let config = Config {
                driver_root: "/run/nvidia/driver".into(),
                dev_root: dev_root.into(),
                container_driver_root: driver.path().into(),
                ..Config::default()
            };
            let nodes = nodes(&config, own.path());
            ["nvidiactl", "nvidia-modeset"].map(|name| nodes.has(name))
        };
        assert_eq!(has("/run/nvidia/driver"), [true, true]);
        assert_eq!(has("/"), [true, false]);
    }

    #[test]
    fn named_hook_program_is_trusted_if_not_visible() {
        let root = tempfile::tempdir().unwrap();
        let with = |hook: &str, driver_root: &str| Config {
            cdi_hook_path: hook.into(),
            driver_root: driver_root.into(),
            container_driver_root: root.path().into(),
            ..Config::default()
        };
        let default = Config::default().cdi_hook_path;
        let default = default.to_str().unwrap();
        let operator = "/nowhere/toolkit/nvidia-cdi-hook";
        assert!(!may_run_hooks(&with(default, "/run/nvidia/driver")), "not configured");
        assert!(may_run_hooks(&with(operator, "/run/nvidia/driver")), "outside the driver's root");
        assert!(may_run_hooks(&with(operator, "/")), "the folder is not visible");
        let folder = root.path().join("nowhere/toolkit");
        fs::create_dir_all(&folder).unwrap();
        assert!(!may_run_hooks(&with(operator, "/")), "the folder exists without the program");
        fs::write(folder.join("nvidia-cdi-hook"), "").unwrap();
        assert!(may_run_hooks(&with(operator, "/")));
    }
}
