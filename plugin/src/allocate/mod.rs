//! What a container needs to use the devices kubelet has chosen: environment, device nodes, CDI names. A pure function of the
//! devices and the options, but for a look which control nodes exist; it never changes the set.

mod nodes;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use gantry_proto::deviceplugin::{CdiDevice, ContainerAllocateResponse};

use crate::args::Strategy;
use crate::inventory::Device;

pub(crate) use nodes::{control_nodes, gpu_node, host_path};

/// Read by the NVIDIA container runtime: the GPUs a container sees.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Prefix of the annotations that a runtime reads CDI names from.
const CDI_ANNOTATION: &str = "cdi.k8s.io/gantry_";

/// Words the answers to Allocate.
#[derive(Debug)]
pub struct Responder {
    strategies: Vec<Strategy>,
    cdi_kind: String,
    dev_root: PathBuf,
    driver_root: PathBuf,
    /// Tells the annotations of a pod's containers apart.
    sequence: AtomicU64,
}

impl Responder {
    /// A responder of these strategies. `dev_root` is where this process sees `/dev`, `driver_root` the host directory whose
    /// `dev` the containers' nodes come from.
    pub fn new(
        mut strategies: Vec<Strategy>,
        cdi_kind: String,
        dev_root: PathBuf,
        driver_root: PathBuf,
    ) -> Self {
        strategies.sort_unstable();
        strategies.dedup();
        Self {
            strategies,
            cdi_kind,
            dev_root,
            driver_root,
            sequence: AtomicU64::new(0),
        }
    }

    /// What one container needs to use exactly `devices`.
    pub fn respond(&self, devices: &[&Device]) -> ContainerAllocateResponse {
        let mut response = ContainerAllocateResponse::default();
        // Replicas of one GPU are one device to the container.
        let mut uuids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
        let mut seen = std::collections::BTreeSet::new();
        uuids.retain(|uuid| seen.insert(*uuid));
        let qualified = || uuids.iter().map(|uuid| format!("{}={uuid}", self.cdi_kind));
        for strategy in &self.strategies {
            match strategy {
                Strategy::Envvar => {
                    response.envs.insert(VISIBLE_DEVICES.to_owned(), uuids.join(","));
                }
                Strategy::DeviceNodes => {
                    response.devices = nodes::specs(devices, &self.dev_root, &self.driver_root);
                }
                Strategy::CdiAnnotations => {
                    let number = self.sequence.fetch_add(1, Ordering::Relaxed);
                    let names: Vec<String> = qualified().collect();
                    response
                        .annotations
                        .insert(format!("{CDI_ANNOTATION}{number}"), names.join(","));
                }
                Strategy::CdiCri => {
                    response.cdi_devices = qualified().map(|name| CdiDevice { name }).collect();
                }
            }
        }
        response
    }
}

#[cfg(test)]
mod tests;
