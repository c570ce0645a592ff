//! The config file, version v1, key by key. The JSON schema and the reference are generated from these types; rules over several values
//! are in `resolve`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::value::{ChannelIds, SleepInterval, Strategies};
use super::{DeviceIdStrategy, MigStrategy, ResourcePattern, Selector, SharedDevices, TimeSlicing};

/// Keys with a second place: the second place, and the right one.
pub(super) const MOVED: [(&str, &str); 1] = [("flags.gfd.useNodeFeatureAPI", "flags.useNodeFeatureAPI")];

/// Keys that require a value, as with NVIDIA's plugin: a template that renders nothing would share all GPUs, or none.
pub(super) const VALUED: [&str; 3] = [
    "sharing.timeSlicing",
    "sharing.timeSlicing.resources[].devices",
    "sharing.timeSlicing.resources[].rename",
];

/// A config file of NVIDIA's k8s-device-plugin, version v1, with this plugin's own section `devices`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct File {
    /// Version of this form; v1 is the only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// What can be said by flags as well.
    pub flags: Flags,
    /// Names for GPUs and MIG devices by model and profile.
    pub resources: Resources,
    /// Devices that several containers may use at once.
    pub sharing: Sharing,
    /// Import/export memory channels of multi-node NVLink.
    pub imex: ImexFile,
    /// Which GPUs are served; this plugin's own section.
    pub devices: Devices,
}

/// Version of the form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Version {
    /// The only one; an empty text means it too.
    #[serde(rename = "v1", alias = "")]
    V1,
}

/// What can be said by flags as well.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Flags {
    /// How MIG devices are advertised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_strategy: Option<MigStrategy>,
    /// Whether a node without NVML or GPUs ends the program that labels once; the daemon waits for them whatever this says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fail_on_init_error: Option<bool>,
    /// Host directory of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_driver_root: Option<String>,
    /// Host directory whose `dev/` holds the device nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_dev_root: Option<String>,
    /// Whether containers get GPUDirect RDMA copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gdrcopy_enabled: Option<bool>,
    /// Whether containers get GPUDirect Storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gds_enabled: Option<bool>,
    /// Whether containers get Mellanox OFED.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mofed_enabled: Option<bool>,
    /// Directory of the MPS daemon; read and not used, for MPS is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps_root: Option<String>,
    /// How devices are found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_discovery_strategy: Option<Discovery>,
    /// Whether labels whose place is gfd go into a `NodeFeature` object instead of the file.
    #[serde(rename = "useNodeFeatureAPI", skip_serializing_if = "Option::is_none")]
    pub use_node_feature_api: Option<bool>,
    /// What concerns the device plugin alone.
    pub plugin: PluginFlags,
    /// What concerns the node labels alone.
    pub gfd: GfdFlags,
}

/// How devices are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Discovery {
    /// By NVML.
    Auto,
    /// By NVML.
    Nvml,
    /// Integrated GPUs; not served.
    Tegra,
    /// GPUs given to virtual machines; not served.
    Vfio,
}

/// What concerns the device plugin alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PluginFlags {
    /// Whether kubelet passes the device nodes itself as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass_device_specs: Option<bool>,
    /// How containers get their devices: one way, or a list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_list_strategy: Option<Strategies>,
    /// What devices are called towards the runtime.
    #[serde(rename = "deviceIDStrategy", skip_serializing_if = "Option::is_none")]
    pub device_id_strategy: Option<DeviceIdStrategy>,
    /// Prefix of the annotation keys that carry CDI names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_annotation_prefix: Option<String>,
    /// Program that CDI hooks run, on the host.
    #[serde(rename = "nvidiaCTKPath", skip_serializing_if = "Option::is_none")]
    pub nvidia_ctk_path: Option<String>,
    /// Where this process sees the driver root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_driver_root: Option<String>,
    /// How replicas and MIG devices are laid on GPUs; not said: replicas distributed, MIG devices packed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_devices_allocation_policy: Option<SharedDevices>,
    /// Switches of the CDI writer; this plugin's own key, NVIDIA's has the flag only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_feature_flags: Option<Vec<super::CdiFeature>>,
    /// CDI hooks left out; this plugin's own key, NVIDIA's has the flag only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_disable_hooks: Option<Vec<super::CdiHook>>,
}

/// What concerns the node labels alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct GfdFlags {
    /// Whether labels are worked out once only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oneshot: Option<bool>,
    /// Whether the label with the time is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_timestamp: Option<bool>,
    /// How often labels are worked out again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_interval: Option<SleepInterval>,
    /// File the labels are written to; empty: standard output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_file: Option<String>,
    /// File that names the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_type_file: Option<String>,
}

/// Names for GPUs and MIG devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Resources {
    /// By model; the first pattern that matches counts, and what matches none keeps nvidia.com/gpu.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ResourcePattern>,
    /// By MIG profile; the first pattern that matches counts, and what matches none keeps nvidia.com/mig-<profile>.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<ResourcePattern>,
}

/// Devices that several containers may use at once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Sharing {
    /// Containers take turns on a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
    /// Several processes on a device at once, by NVIDIA's Multi-Process Service; read, and refused at start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps: Option<TimeSlicing>,
}

/// Import/export memory channels.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ImexFile {
    /// Channels that containers get: none or channel 0.
    #[serde(rename = "channelIDs", skip_serializing_if = "Option::is_none")]
    pub channel_ids: Option<ChannelIds>,
    /// Whether a missing channel ends the program at the start, and refuses a configuration that comes later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required: Option<bool>,
}

/// Which GPUs are served.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Devices {
    /// GPUs that may be served, by index, UUID, PCIe address or model (in any case; * stands for anything); empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Selector>,
    /// GPUs that are not served, whatever allow says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<Selector>,
}
