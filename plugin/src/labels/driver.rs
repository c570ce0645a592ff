//! Labels of the node as a whole: machine, driver, CUDA, capabilities of its GPUs, virtual GPUs.

use std::collections::BTreeSet;

use gantry_topology::{Gpu, Host as Software};

use super::host::{Host, PciClass};
use super::{Set, name};

/// Machine type.
pub(super) fn machine(set: &mut Set, host: &Host) {
    // Firmware may use characters that no label may have, or a dash alone.
    let name = host.machine_type.as_deref().unwrap_or_default();
    let machine = match name::value(name) {
        label if label.is_empty() => "unknown".to_owned(),
        label => label,
    };
    set.nvidia("gpu.machine", machine);
}

/// That GPUs are virtual, and the driver of their host.
pub(super) fn vgpu(set: &mut Set, host: &Host) {
    let Some(vgpu) = &host.vgpu else { return };
    set.nvidia("vgpu.present", true);
    if let Some(driver) = &vgpu.driver {
        set.nvidia("vgpu.host-driver-version", &driver.version);
        set.nvidia("vgpu.host-driver-branch", &driver.branch);
    }
}

/// Driver and CUDA version, each also under the older name. A version without two or three parts gets only the full label; NVIDIA's
/// program exits on one.
pub(super) fn versions(set: &mut Set, software: &Software) {
    if let Some(driver) = &software.driver {
        let parts: Vec<&str> = driver.split('.').collect();
        if let [major, minor, rest @ ..] = parts.as_slice()
            && rest.len() <= 1
        {
            let revision = rest.first().copied().unwrap_or_default();
            for (name, older, text) in
                [("major", "major", *major), ("minor", "minor", *minor), ("revision", "rev", revision)]
            {
                set.nvidia(&format!("cuda.driver-version.{name}"), text);
                set.nvidia(&format!("cuda.driver.{older}"), text);
            }
        }
        set.nvidia("cuda.driver-version.full", driver);
    }
    if let Some((cuda, (major, minor))) =
        software.cuda.as_ref().and_then(|cuda| Some((cuda, cuda.split_once('.')?)))
    {
        for (name, text) in [("major", major), ("minor", minor)] {
            set.nvidia(&format!("cuda.runtime-version.{name}"), text);
            set.nvidia(&format!("cuda.runtime.{name}"), text);
        }
        set.nvidia("cuda.runtime-version.full", cuda);
    }
}

/// The labels of all these GPUs together.
pub(super) fn gpus(set: &mut Set, gpus: &[&Gpu], host: &Host) {
    let capable = gpus.iter().any(|gpu| gpu.mig.is_some());
    set.nvidia("mig.capable", capable);
    // NVIDIA's MPS daemon selects its nodes by it; this plugin does not serve MPS.
    set.nvidia("mps.capable", false);
    set.nvidia("gpu.mode", mode(gpus, host));
    if let Some(clique) = clique(gpus) {
        set.nvidia("gpu.clique", clique);
    }
}

/// Compute or graphics, if it is the same for all GPUs.
fn mode(gpus: &[&Gpu], host: &Host) -> &'static str {
    let classes: BTreeSet<Option<PciClass>> =
        gpus.iter().map(|gpu| host.classes.get(gpu.bus_id.as_ref()?).copied()).collect();
    match classes.into_iter().collect::<Vec<_>>().as_slice() {
        [Some(PciClass::Display)] => "graphics",
        [Some(PciClass::Compute)] => "compute",
        _ => "unknown",
    }
}

/// The multi-node NVLink domain and clique that all GPUs in any agree on.
fn clique(gpus: &[&Gpu]) -> Option<String> {
    let fabrics: BTreeSet<(&str, u32)> = gpus
        .iter()
        .filter_map(|gpu| gpu.fabric.as_ref())
        .map(|fabric| (fabric.cluster_uuid.as_str(), fabric.clique))
        .collect();
    match fabrics.into_iter().collect::<Vec<_>>().as_slice() {
        [(domain, clique)] => Some(format!("{domain}.{clique}")),
        _ => None,
    }
}
