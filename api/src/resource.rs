//! A resource of a node and its terms: what it is made of, how it is laid on GPUs, how much of it one container may ask for.
//! Plain data of `GpuNode.status`; nothing is decided here.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::ResourceName;
use crate::names::RESOURCE_DOMAIN;

/// One resource of a node: its terms and how much of it there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceStatus {
    /// Its name, e.g. `nvidia.com/gpu`, `nvidia.com/mig-1g.10gb`, `nvidia.com/gpu.shared`.
    pub name: ResourceName,
    /// What its devices are.
    pub kind: ResourceKind,
    /// How several devices are laid on GPUs.
    #[serde(default)]
    pub sharing: SharingPolicy,
    /// Devices that kubelet counts per GPU or MIG device; 1 where nothing is shared, the most where it differs.
    #[serde(default = "one")]
    pub replicas: u16,
    /// The most one container may ask for; more would fail at kubelet, for good. Absent: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_request: Option<u32>,
    /// Devices that kubelet counts.
    #[serde(default)]
    pub devices: u32,
    /// Those of them that are healthy.
    #[serde(default)]
    pub healthy: u32,
    /// Those of them that somebody holds.
    #[serde(default)]
    pub held: u32,
}

/// What the devices of a resource are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ResourceKind {
    /// Whole GPUs.
    Gpu,
    /// MIG devices.
    Mig,
    /// Replicas of GPUs or of MIG devices: their holders take turns (time slicing).
    Shared,
}

/// How devices are laid on GPUs where one GPU has several (`sharedDevicesAllocationPolicy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum SharingPolicy {
    /// The GPU with the fewest in use first.
    #[default]
    Distributed,
    /// The fullest GPU first, so that others stay free.
    Packed,
}

impl ResourceStatus {
    /// How much is held of what there is, by resource, for the column of `kubectl get gpunodes`: `gpu 3/4, mig-1g.10gb 5/28`. NVIDIA's domain is
    /// left out of the names.
    pub fn line(resources: &[Self]) -> String {
        let short = |name: &ResourceName| {
            let name = name.as_str();
            let short = name
                .strip_prefix(RESOURCE_DOMAIN)
                .and_then(|rest| rest.strip_prefix('/'));
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
    fn what_is_not_said_is_said_by_default() {
        let whole = resource(r#"{"name": "nvidia.com/gpu", "kind": "Gpu"}"#);
        assert_eq!(
            (whole.sharing, whole.replicas, whole.max_request),
            (SharingPolicy::Distributed, 1, None)
        );
    }

    #[test]
    fn the_line_says_what_is_held_of_what() {
        let resources = [
            resource(r#"{"name": "nvidia.com/gpu", "kind": "Gpu", "devices": 4, "held": 3}"#),
            resource(r#"{"name": "nvidia.com/mig-1g.10gb", "kind": "Mig", "devices": 28, "held": 5}"#),
            resource(r#"{"name": "example.com/a100", "kind": "Gpu", "devices": 8}"#),
        ];
        assert_eq!(
            ResourceStatus::line(&resources),
            "gpu 3/4, mig-1g.10gb 5/28, example.com/a100 0/8"
        );
        assert_eq!(ResourceStatus::line(&[]), "");
    }
}
