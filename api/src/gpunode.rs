//! `GpuNode`: what a node's plugin reports of its node. Cluster scope, one object per node, with the node's name.
//!
//! `spec` has the hardware; it changes when the hardware changes. `status` has health and the holders of devices.
//! The plugin of the node is the only writer. The extender and the operator read it.

use std::sync::LazyLock;

use gantry_topology::Machine;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::evidence::GpuEvidence;
use crate::ids::{DeviceId, NodeName, PodUid, ResourceName};
use crate::names::RESOURCE_DOMAIN;
use crate::schema::{bounded, known_formats, retain_known};

/// The GPUs of a node.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "gantry.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    singular = "gpunode",
    shortname = "gn",
    category = "gantry",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Model","type":"string","jsonPath":".status.summary.model"}"#,
    printcolumn = r#"{"name":"Links","type":"string","jsonPath":".status.summary.links"}"#,
    printcolumn = r#"{"name":"GPUs","type":"integer","jsonPath":".status.summary.gpus"}"#,
    printcolumn = r#"{"name":"Healthy","type":"integer","jsonPath":".status.summary.healthy"}"#,
    printcolumn = r#"{"name":"Held","type":"integer","jsonPath":".status.summary.held"}"#,
    printcolumn = r#"{"name":"Devices held","type":"string","jsonPath":".status.summary.devices"}"#,
    printcolumn = r#"{"name":"Deviations","type":"integer","jsonPath":".status.deviationsTotal","priority":1}"#,
    printcolumn = r#"{"name":"Plugin","type":"string","jsonPath":".status.pluginVersion","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats), transform = RecursiveTransform(bounded))]
pub struct GpuNodeSpec {
    /// GPUs, NICs and links: the machine file of this node.
    #[serde(deserialize_with = "machine")]
    pub machine: Machine,
    /// How the node's kubelet aligns devices and CPUs, if the plugin could find out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletTopology>,
}

/// Reads a machine. A machine file is read strictly, so that a typing error is found. A plugin of the next release may write fields that
/// are not known yet: these are left out.
fn machine<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Machine, D::Error> {
    static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
        let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
        settings.into_generator().into_root_schema_for::<Machine>()
    });
    let mut value = Value::deserialize(deserializer)?;
    let machine = Machine::deserialize(&value).or_else(|_| {
        retain_known(&mut value, SCHEMA.as_value());
        Machine::deserialize(&value)
    });
    machine.map_err(D::Error::custom)
}

/// The configuration of kubelet's Topology Manager.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeletTopology {
    /// Which pods kubelet refuses (`topologyManagerPolicy`).
    #[serde(default)]
    pub policy: TopologyManagerPolicy,
    /// What is aligned (`topologyManagerScope`).
    #[serde(default)]
    pub scope: TopologyManagerScope,
    /// Whether the closer of equally many NUMA nodes are taken (`prefer-closest-numa-nodes`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub prefer_closest_numa_nodes: bool,
    /// The most NUMA nodes with which kubelet starts the Topology Manager (`max-allowable-numa-nodes`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_allowable_numa_nodes: Option<u16>,
}

/// Kubelet's `topologyManagerPolicy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyManagerPolicy {
    /// Nothing is aligned.
    #[default]
    None,
    /// Aligned where possible; no pod is refused.
    BestEffort,
    /// A pod is refused if its devices lie on more NUMA nodes than they would on an empty node.
    Restricted,
    /// A pod is refused if its devices lie on more than one NUMA node.
    SingleNumaNode,
}

impl TopologyManagerPolicy {
    /// Whether kubelet fails pods that it cannot align.
    pub const fn refuses(self) -> bool {
        matches!(self, Self::Restricted | Self::SingleNumaNode)
    }

    /// The name in kubelet's configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        }
    }
}

/// Kubelet's `topologyManagerScope`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyManagerScope {
    /// Each container by itself.
    #[default]
    Container,
    /// The pod as a whole.
    Pod,
}

/// Health and holders of a node's devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats), transform = RecursiveTransform(bounded))]
pub struct GpuNodeStatus {
    /// What `kubectl get gpunodes` shows.
    #[serde(default)]
    pub summary: Summary,
    /// The resources that kubelet receives, with the kind and sharing of each, sorted by name. A resource without an
    /// entry is described by its devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    pub resources: Vec<ResourceStatus>,
    /// Every device that kubelet receives, sorted by resource and GPU.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// The pods that hold devices now, sorted.
    #[serde(default)]
    pub holders: Vec<Holder>,
    /// The CPUs of each NUMA node, sorted by its number. Only if kubelet refuses pods by them: its static CPU manager runs
    /// under a Topology Manager of the policy `restricted` or `single-numa-node`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = Self::MAX_NUMA_NODES))]
    pub cpus: Vec<NumaNodeCpus>,
    /// The memory of each NUMA node, sorted by its number. Only if kubelet refuses pods by it: its static memory manager
    /// runs under a Topology Manager of the policy `restricted` or `single-numa-node`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = Self::MAX_NUMA_NODES))]
    pub memory: Vec<NumaNodeMemory>,
    /// The last allocations that differ from the grant, newest first, at most [`GpuNodeStatus::MAX_DEVIATIONS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = Self::MAX_DEVIATIONS))]
    pub deviations: Vec<Deviation>,
    /// Deviations since the plugin started.
    #[serde(default)]
    pub deviations_total: u64,
    /// Faults of GPUs without proof of recovery, by GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub faults: Vec<GpuFault>,
    /// What else is wrong with GPUs now, by GPU and cause.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = Self::MAX_PROBLEMS))]
    pub problems: Vec<GpuProblem>,
    /// The clocks of the GPUs that pods hold and that compute, by GPU. Changes once a minute at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub clocks: Vec<GpuClock>,
    /// The GPUs that pods hold and that are to be drained for the MIG layout of the node. Only if the operator allows it
    /// by the Node's label `gantry.dev/mig-drain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_drain: Option<MigDrain>,
    /// Evidence for the replacement of boards, by GPU, also of GPUs that are no longer in the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = GpuEvidence::MAX_GPUS))]
    pub evidence: Vec<GpuEvidence>,
    /// Version of the plugin that wrote this.
    #[serde(default)]
    pub plugin_version: String,
    /// `Ready`: the plugin serves, and its information is complete. The reason names what is missing otherwise.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub conditions: Vec<Condition>,
}

impl GpuNodeStatus {
    /// Most deviations that are kept.
    pub const MAX_DEVIATIONS: usize = 16;
    /// Most problems that are reported.
    pub const MAX_PROBLEMS: usize = 512;
    /// Most NUMA nodes of a machine with reported CPUs and memory. On a machine with more, none are reported.
    pub const MAX_NUMA_NODES: usize = 12;
}

/// One line about a node's GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// GPU models with counts where they differ, e.g. `NVIDIA H100 80GB HBM3`.
    #[serde(default)]
    pub model: String,
    /// The best link between two of its GPUs, e.g. `NV18`.
    #[serde(default)]
    pub links: String,
    /// Physical GPUs.
    #[serde(default)]
    pub gpus: u32,
    /// Physical GPUs that are healthy.
    #[serde(default)]
    pub healthy: u32,
    /// Physical GPUs with at least one held device.
    #[serde(default)]
    pub held: u32,
    /// Devices held of all devices, by resource: [`ResourceStatus::line`].
    #[serde(default)]
    pub devices: String,
}

/// One device as kubelet counts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// Kubelet's device ID.
    pub id: DeviceId,
    /// The resource it is advertised under.
    pub resource: ResourceName,
    /// Index of its physical GPU in `spec.machine`.
    pub gpu: u8,
    /// The part of that GPU, for a MIG device or a replica of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<Slice>,
    /// Number of the replica, from 0, for a shared GPU or MIG device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<u16>,
    /// Whether the device may be allocated.
    #[serde(flatten)]
    pub health: DeviceHealth,
}

/// The part of a GPU that a MIG device is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Slice {
    /// Profile as `nvidia-smi` prints it, e.g. `1g.10gb`.
    pub profile: String,
    /// First memory unit of its GPU instance.
    pub start: u8,
    /// Memory units of its GPU instance.
    pub size: u8,
}

/// Whether a device may be allocated, and if not, why.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceHealth {
    /// True unless a fault is known.
    pub healthy: bool,
    /// What is wrong, and what to do about it, such as `Xid 79: GPU has fallen off the bus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A pod that holds devices of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod, if known. Kubelet's PodResources API has names only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<PodUid>,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// Source of this information.
    pub provenance: Provenance,
    /// Whether the pod still exists.
    #[serde(default)]
    pub state: HolderState,
}

/// The CPUs of a NUMA node under kubelet's static CPU manager.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NumaNodeCpus {
    /// The kernel's number of the NUMA node.
    pub node: u32,
    /// CPUs that it has.
    #[serde(default)]
    pub total: u32,
    /// CPUs that kubelet may give to one container alone: all but those that it reserves for the system.
    #[serde(default)]
    pub allocatable: u32,
    /// CPUs that a container has alone, by kubelet's list.
    #[serde(default)]
    pub held: u32,
    /// CPUs of a core, if kubelet's CPU manager gives whole cores only (`full-pcpus-only`). CPUs of cores that it has in
    /// part are then not allocatable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core: Option<u32>,
}

/// The memory of a NUMA node under kubelet's static memory manager. Huge pages are not reported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NumaNodeMemory {
    /// The kernel's number of the NUMA node.
    pub node: u32,
    /// Bytes that kubelet may give to containers: all but those that it reserves.
    #[serde(default)]
    pub allocatable_bytes: u64,
    /// Bytes that containers have, by kubelet's list. Of what they have of several NUMA nodes together, the first are
    /// counted on the node of the lowest number.
    #[serde(default)]
    pub held_bytes: u64,
    /// The NUMA nodes that each container with memory of this one has its memory of, this one included; none if there
    /// is no such container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub group: Vec<u32>,
}

/// The source of the information that a pod holds devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Provenance {
    /// Kubelet's PodResources API lists it.
    PodResources,
    /// The plugin served an Allocate call that PodResources does not show (yet), such as an init container's.
    Allocated,
    /// Only the grant: kubelet has not admitted the pod yet.
    Granted,
}

/// Whether a holder still exists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HolderState {
    /// The pod exists.
    #[default]
    Live,
    /// The pod is deleted from the API, and its processes may still run on the node. Kubelet counts the devices as
    /// free; Gantry does not.
    Quarantined,
}

/// An allocation that differs from the grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Deviation {
    /// Time of the Allocate call.
    pub time: Time,
    /// The resource.
    pub resource: ResourceName,
    /// The devices that kubelet allocated, sorted.
    pub allocated: Vec<DeviceId>,
    /// The devices of the pod's grant, sorted. Empty if no grant of that size was pending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub granted: Vec<DeviceId>,
    /// The pod, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodUid>,
    /// The node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
}

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

/// A fault of a GPU, or of one MIG instance of it, kept until recovery is proved. A restarted plugin continues from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuFault {
    /// UUID of the GPU.
    pub gpu: String,
    /// The GPU instance that the fault is confined to. Absent for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// The compute instance that the fault is confined to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
    /// UUID of a MIG device in that instance. A new instance under the same number has another UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_device: Option<String>,
    /// The Xid.
    pub xid: u64,
    /// Class of the Xid: `resettable`, `fatal`, `link` or `mig-instance`.
    pub class: String,
    /// What is wrong, and what to do about it.
    pub reason: String,
    /// When the Xid was raised.
    pub since: Time,
    /// The boot of the node in which the Xid was raised (`/proc/sys/kernel/random/boot_id`). A reboot ends the fault.
    #[serde(default)]
    pub boot_id: String,
    /// Version of the driver that raised it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// What was observed of the GPU since then. A reset is recognised by it.
    #[serde(default)]
    pub evidence: FaultEvidence,
}

/// A problem of a GPU that is not an Xid: it ends when NVML no longer reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuProblem {
    /// UUID of the GPU.
    pub gpu: String,
    /// One of [`PROBLEM_CAUSES`].
    pub cause: String,
    /// Whether devices of the GPU are unhealthy because of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unhealthy: bool,
    /// Since when, also over restarts of the plugin.
    pub since: Time,
}

/// GPUs that are to be drained for a MIG layout. New pods do not get them meanwhile.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigDrain {
    /// The layout, as the Node's label names it.
    pub layout: String,
    /// UUIDs of the GPUs, sorted.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub gpus: Vec<String>,
}

/// How fast a GPU ran in the last minute, rounded, so that it changes seldom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuClock {
    /// UUID of the GPU.
    pub gpu: String,
    /// Clock of the multiprocessors in percent of the highest one, in steps of 10.
    pub sm_percent: u8,
    /// Power draw in percent of the enforced limit, in steps of 10, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_percent: Option<u8>,
    /// What held the clock down for most of the time: of [`CLOCK_LIMITS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    pub limits: Vec<String>,
}

/// What holds the clock of a GPU down, other than load and settings: the power limit, the driver's protection from heat, and
/// slowdowns of the hardware.
pub const CLOCK_LIMITS: [&str; 5] = ["power-cap", "thermal", "hw-thermal", "hw-power-brake", "hw-slowdown"];

/// Every cause of a problem of a GPU. Those that begin with `xid-` are the classes of [`GpuFault`]s; `xid-application` is
/// the class of the Xids in the evidence that leave the GPU healthy.
pub const PROBLEM_CAUSES: [&str; 19] = [
    "xid-fatal",
    "xid-resettable",
    "xid-link",
    "xid-mig-instance",
    "xid-application",
    "ecc-uncorrected",
    "memory-repair-pending",
    "memory-repair-failed",
    "nvlinks-down",
    "fabric",
    "compute-mode",
    "query-failed",
    "lost",
    "recovery-action",
    "nvml",
    "driver",
    "throttled-thermal",
    "throttled-power-brake",
    "throttled-hardware",
];

/// What was observed of a GPU since its fault.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultEvidence {
    /// The kernel's number of the GPU's binding to its driver. Another number means that the driver was reloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binding: Option<u64>,
    /// The highest count of uncorrected memory errors. A lower one means that the GPU was reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected: Option<u64>,
    /// Whether a memory repair was pending a reset.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repair_pending: bool,
    /// Whether the driver requested a reset or reboot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset_asked: bool,
    /// NVLinks that were up before some went down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links_before: Option<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(text: &str) -> ResourceStatus {
        serde_json::from_str(text).unwrap()
    }

    /// Adds a field to every object within a value.
    fn add_unknown_fields(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.values_mut().for_each(add_unknown_fields);
                fields.insert("fieldOfTheNextRelease".to_owned(), serde_json::json!([{ "a": 1 }]));
            }
            Value::Array(items) => items.iter_mut().for_each(add_unknown_fields),
            _ => {}
        }
    }

    #[test]
    fn unknown_fields_of_machine_are_left_out() {
        let known = serde_json::json!({
            "host": {"driver": "570.124.06"},
            "gpus": [
                {"index": 0, "pcie": {"generation": 5, "width": 16}, "nvlink": {"version": 4}, "mig": {
                    "enabled": true,
                    "instances": [{"id": 1, "profile": "1g.5gb", "start": 0, "size": 1}],
                }},
                {"index": 1},
            ],
            "nics": [{"name": "mlx5_0"}],
            "nvlinks": [{"gpus": [0, 1], "links": 4}],
            "paths": ["X NODE SYS", "NODE X SYS", "SYS SYS X"],
        });
        let read = |machine: &Value| {
            serde_json::from_value::<GpuNodeSpec>(serde_json::json!({ "machine": machine }))
        };
        let mut newer = known.clone();
        add_unknown_fields(&mut newer);
        assert_ne!(newer, known);
        assert_eq!(read(&newer).unwrap(), read(&known).unwrap());
        // What is known is checked as before.
        newer["nvlinks"][0]["gpus"] = serde_json::json!([0, 2]);
        assert!(read(&newer).unwrap_err().to_string().contains("nvlinks"));
        newer["gpus"] = Value::from(vec![serde_json::json!({ "index": 0 }); 33]);
        assert!(read(&newer).is_err());
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
