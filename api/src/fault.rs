//! A fault of a GPU, as `GpuNode.status` keeps it until recovery is proved. A restarted plugin continues from it.
//! Only the plugin writes it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A fault of a GPU, or of one MIG instance of it.
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
