//! Device nodes: which ones a container of these GPUs needs, and under which path the host has them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use gantry_proto::deviceplugin::DeviceSpec;

use crate::inventory::Device;

/// Nodes that every GPU container needs, where the driver made them: the control device, unified memory, mode setting.
const CONTROL: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// The control nodes that exist, by name. Looked up each time: the unified memory module may be loaded late.
pub(crate) fn control_nodes(dev_root: &Path) -> impl Iterator<Item = &'static str> + '_ {
    CONTROL.into_iter().filter(|name| dev_root.join(name).exists())
}

/// Name of a GPU's own node.
pub(crate) fn gpu_node(minor: u32) -> String {
    format!("nvidia{minor}")
}

/// Where the host has the device node of this name.
pub(crate) fn host_path(driver_root: &Path, name: &str) -> PathBuf {
    driver_root.join("dev").join(name)
}

/// The nodes of `devices` and the control nodes, each once.
pub(super) fn specs(devices: &[&Device], dev_root: &Path, driver_root: &Path) -> Vec<DeviceSpec> {
    let gpus: BTreeSet<u32> = devices.iter().filter_map(|device| device.minor).collect();
    control_nodes(dev_root)
        .map(str::to_owned)
        .chain(gpus.into_iter().map(gpu_node))
        .map(|name| DeviceSpec {
            container_path: format!("/dev/{name}"),
            host_path: host_path(driver_root, &name).display().to_string(),
            permissions: "rw".to_owned(),
        })
        .collect()
}
