//! `GpuNode`: what a node's plugin says about its node. Cluster scope, one per node, named like it.
//!
//! `spec` is what is built in (it changes when hardware does), `status` is health and the truth about who holds what.
//! The plugin of the node is its only writer; the extender and people read it.

use gantry_topology::Machine;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use serde::{Deserialize, Serialize};

use crate::fault::GpuFault;
use crate::ids::{DeviceId, NodeName, PodUid, ResourceName};
use crate::resource::ResourceStatus;
use crate::schema::known_formats;

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
#[schemars(transform = RecursiveTransform(known_formats))]
pub struct GpuNodeSpec {
    /// GPUs, NICs and links: the machine file of this node.
    pub machine: Machine,
}

/// Health and holders of a node's devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = RecursiveTransform(known_formats))]
pub struct GpuNodeStatus {
    /// What `kubectl get gpunodes` shows.
    #[serde(default)]
    pub summary: Summary,
    /// The resources that kubelet is told of and the terms of each, sorted by name. Without an entry here, the terms of a resource are
    /// those that its devices show.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<ResourceStatus>,
    /// Every device that kubelet is told of, sorted by resource and GPU.
    #[serde(default)]
    pub devices: Vec<DeviceStatus>,
    /// Who holds devices now, sorted by pod.
    #[serde(default)]
    pub holders: Vec<Holder>,
    /// The last sets that kubelet chose otherwise than granted, newest first, at most [`GpuNodeStatus::MAX_DEVIATIONS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deviations: Vec<Deviation>,
    /// How many deviations there were since the plugin started.
    #[serde(default)]
    pub deviations_total: u64,
    /// Faults of GPUs whose end is not proved yet, by GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<GpuFault>,
    /// Version of the plugin that wrote this.
    #[serde(default)]
    pub plugin_version: String,
    /// `Ready`: the plugin serves and knows the truth; its reason says what is missing otherwise.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

impl GpuNodeStatus {
    /// How many deviations are kept.
    pub const MAX_DEVIATIONS: usize = 16;
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
    /// Physical GPUs of which something is held.
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
    /// Which part of that GPU it is, if it is a MIG device or a replica of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<Slice>,
    /// Which replica it is of its GPU or MIG device, from 0, if that is shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<u16>,
    /// Whether it may be given out.
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

/// Whether a device may be given out, and if not, why.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceHealth {
    /// True unless something is known to be wrong.
    pub healthy: bool,
    /// What is wrong, in words a person can act on, e.g. `Xid 79: GPU has fallen off the bus`.
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
    /// UID of the pod, if the plugin could learn it (kubelet's pod resources carry names only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<PodUid>,
    /// The resource.
    pub resource: ResourceName,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// How this is known.
    pub provenance: Provenance,
    /// Whether the pod lives.
    #[serde(default)]
    pub state: HolderState,
}

/// How the plugin knows that a pod holds devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Provenance {
    /// Kubelet's pod resources API lists it.
    PodResources,
    /// The plugin served an Allocate for it that pod resources do not (or not yet) show, such as an init container's.
    Allocated,
    /// Only its grant says so: kubelet has not admitted it yet.
    Granted,
}

/// Whether a holder lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HolderState {
    /// The pod is there.
    #[default]
    Live,
    /// The pod is gone from the API, its processes are not (or not surely) gone from the node. Kubelet thinks the devices free; they
    /// are not.
    Quarantined,
}

/// A set that kubelet chose otherwise than granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Deviation {
    /// When it was seen.
    pub time: Time,
    /// The resource.
    pub resource: ResourceName,
    /// What kubelet asked Allocate for, sorted.
    pub allocated: Vec<DeviceId>,
    /// What had been granted to the pod it was taken for, sorted; empty if no grant of that size was live.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub granted: Vec<DeviceId>,
    /// The pod, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodUid>,
    /// The node, for readers of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
}
