//! A fault of a GPU that stands until its end is proved, as `GpuNode.status` keeps it: what a restarted plugin needs to go on from
//! where the last one was. Written and read by the plugin; anyone may look.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A fault of a GPU, or of one MIG instance of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuFault {
    /// UUID of the GPU.
    pub gpu: String,
    /// GPU instance that it is confined to; absent: the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Compute instance that it is confined to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
    /// UUID of a MIG device in that instance, by which an instance made anew under the same number is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_device: Option<String>,
    /// The Xid.
    pub xid: u64,
    /// What the Xid asks for: `resettable`, `fatal`, `link` or `mig-instance`.
    pub class: String,
    /// What is wrong, in words a person can act on.
    pub reason: String,
    /// When the Xid was raised.
    pub since: Time,
    /// The node's boot in which it was raised (`/proc/sys/kernel/random/boot_id`): a reboot ends it.
    #[serde(default)]
    pub boot_id: String,
    /// Version of the driver that raised it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// What was seen of the GPU since, by which a reset is recognised.
    #[serde(default)]
    pub evidence: FaultEvidence,
}

/// What was seen of a GPU since a fault of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultEvidence {
    /// The kernel's number of the GPU's binding to its driver; another one means that the driver was loaded anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binding: Option<u64>,
    /// Most uncorrected memory errors that NVML counted; fewer mean that counting began anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected: Option<u64>,
    /// Whether a repair of memory was waiting for a reset.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repair_pending: bool,
    /// Whether the driver asked for a reset or reboot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset_asked: bool,
    /// NVLinks that were up before, once fewer were seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links_before: Option<u8>,
}
