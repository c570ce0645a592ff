//! A resource of a node: kind of its devices, sharing policy, and the limit per container. Plain data of
//! `GpuNode.status`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::ResourceName;
use crate::names::RESOURCE_DOMAIN;

/// One resource of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceStatus {
    /// Name, such as `nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`, `nvidia.com/gpu.shared`.
    pub name: ResourceName,
    /// Kind of its devices.
    pub kind: ResourceKind,
    /// How devices are distributed over GPUs.
    #[serde(default)]
    pub sharing: SharingPolicy,
    /// Devices that kubelet counts per GPU or MIG device. 1 without sharing; the highest number where it differs.
    #[serde(default = "one")]
    pub replicas: u16,
    /// The most devices that one container may request. Kubelet fails a pod that requests more. Absent: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_request: Option<u32>,
    /// Devices that kubelet counts.
    #[serde(default)]
    pub devices: u32,
    /// Healthy devices.
    #[serde(default)]
    pub healthy: u32,
    /// Devices held by pods.
    #[serde(default)]
    pub held: u32,
}

/// Kind of the devices of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ResourceKind {
    /// Whole GPUs.
    Gpu,
    /// MIG devices.
    Mig,
    /// Replicas of GPUs or of MIG devices (time slicing).
    Shared,
}

/// How replicas are distributed over GPUs (`sharedDevicesAllocationPolicy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum SharingPolicy {
    /// The GPU with the fewest replicas in use first.
    #[default]
    Distributed,
    /// The GPU with the most replicas in use first, so that other GPUs stay free.
    Packed,
}

impl ResourceStatus {
    /// Held and existing devices by resource, for the column of `kubectl get gpunodes`: `gpu 3/4, mig-1g.10gb 5/28`.
    /// Names have no domain if it is NVIDIA's.
    pub fn line(resources: &[Self]) -> String {
        let short = |name: &ResourceName| {
            let name = name.as_str();
            let short = name.strip_prefix(RESOURCE_DOMAIN).and_then(|rest| rest.strip_prefix('/'));
            short.unwrap_or(name).to_owned()
        };
        resources
            .iter()
            .map(|resource| format!("{} {}/{}", short(&resource.name), resource.held, resource.devices))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn one() -> u16 {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(text: &str) -> ResourceStatus {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn absent_fields_have_defaults() {
        let whole = resource(r#"{"name": "nvidia.com/gpu", "kind": "Gpu"}"#);
        assert_eq!((whole.sharing, whole.replicas, whole.max_request), (SharingPolicy::Distributed, 1, None));
    }

    #[test]
    fn line_shows_held_of_all_devices() {
        let resources = [
            resource(r#"{"name": "nvidia.com/gpu", "kind": "Gpu", "devices": 4, "held": 3}"#),
            resource(r#"{"name": "nvidia.com/mig-1g.10gb", "kind": "Mig", "devices": 28, "held": 5}"#),
            resource(r#"{"name": "example.com/a100", "kind": "Gpu", "devices": 8}"#),
        ];
        assert_eq!(ResourceStatus::line(&resources), "gpu 3/4, mig-1g.10gb 5/28, example.com/a100 0/8");
        assert_eq!(ResourceStatus::line(&[]), "");
    }
}
