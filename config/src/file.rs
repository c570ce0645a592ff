//! The config file, version v1, key by key. The JSON schema and the reference are generated from these types, with the texts of the
//! table of settings; rules over several values are in `resolve`.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::value::{ChannelIds, SleepInterval, Strategies};
use super::{
    Config, DeviceIdStrategy, Gfd, MigStrategy, ResourcePattern, Selector, SharedDevices, TimeSlicing,
};

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
    /// Settings that have flags as well.
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

/// Settings that have flags as well.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Flags {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_strategy: Option<MigStrategy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fail_on_init_error: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_driver_root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_dev_root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gdrcopy_enabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gds_enabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mofed_enabled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps_root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_discovery_strategy: Option<Discovery>,
    #[serde(rename = "useNodeFeatureAPI", skip_serializing_if = "Option::is_none")]
    pub use_node_feature_api: Option<bool>,
    /// Settings of the device plugin alone.
    pub plugin: PluginFlags,
    /// Settings of the node labels alone.
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

/// Settings of the device plugin alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PluginFlags {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass_device_specs: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_list_strategy: Option<Strategies>,
    #[serde(rename = "deviceIDStrategy", skip_serializing_if = "Option::is_none")]
    pub device_id_strategy: Option<DeviceIdStrategy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_annotation_prefix: Option<String>,
    #[serde(rename = "nvidiaCTKPath", skip_serializing_if = "Option::is_none")]
    pub nvidia_ctk_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container_driver_root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_devices_allocation_policy: Option<SharedDevices>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_feature_flags: Option<Vec<super::CdiFeature>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_disable_hooks: Option<Vec<super::CdiHook>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_metrics: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nccl_topology: Option<bool>,
}

/// Settings of the node labels alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct GfdFlags {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oneshot: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_timestamp: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_interval: Option<SleepInterval>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_file: Option<String>,
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
    /// By MIG profile; the first pattern that matches counts, and what matches none keeps `nvidia.com/mig-<profile>`.
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
    #[serde(rename = "channelIDs", skip_serializing_if = "Option::is_none")]
    pub channel_ids: Option<ChannelIds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required: Option<bool>,
}

/// Which GPUs are served.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Devices {
    /// GPUs that may be served, by index, UUID, PCIe address or model (in any case; * matches anything); empty: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Selector>,
    /// GPUs that are not served, even if allow matches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<Selector>,
}

impl Config {
    /// The complete config file, including defaults.
    pub fn to_file(&self) -> File {
        File {
            version: Some(Version::V1),
            flags: Flags {
                mig_strategy: Some(self.mig_strategy),
                fail_on_init_error: Some(self.fail_on_init_error),
                nvidia_driver_root: text(&self.driver_root),
                nvidia_dev_root: text(&self.dev_root),
                gdrcopy_enabled: Some(self.gdrcopy),
                gds_enabled: Some(self.gds),
                mofed_enabled: Some(self.mofed),
                mps_root: None,
                device_discovery_strategy: None,
                use_node_feature_api: Some(self.gfd.use_node_feature_api),
                plugin: PluginFlags {
                    pass_device_specs: Some(self.pass_device_specs),
                    device_list_strategy: Some(Strategies(self.device_list_strategy.clone())),
                    device_id_strategy: Some(self.device_id_strategy),
                    cdi_annotation_prefix: Some(self.cdi_annotation_prefix.clone()),
                    nvidia_ctk_path: text(&self.cdi_hook_path),
                    container_driver_root: text(&self.container_driver_root),
                    shared_devices_allocation_policy: self.shared_devices,
                    cdi_feature_flags: Some(self.cdi_feature_flags.clone()),
                    cdi_disable_hooks: Some(self.cdi_disabled_hooks.clone()),
                    pod_metrics: Some(self.pod_metrics),
                    nccl_topology: Some(self.nccl_topology),
                },
                gfd: gfd(&self.gfd),
            },
            resources: Resources { gpus: self.gpu_patterns.clone(), mig: self.mig_patterns.clone() },
            sharing: Sharing { time_slicing: self.time_slicing.clone(), mps: None },
            imex: ImexFile {
                channel_ids: Some(ChannelIds(self.imex.channel)),
                required: Some(self.imex.required),
            },
            devices: Devices { allow: self.allow.clone(), deny: self.deny.clone() },
        }
    }

    /// The configuration as one line of JSON. Equal configurations give equal lines.
    pub fn to_json(&self) -> String {
        // Cannot fail: every key is text and every number is finite.
        serde_json::to_string(&self.to_file()).unwrap_or_default()
    }

    /// The configuration as a config file in YAML.
    ///
    /// # Errors
    /// When the YAML writer fails.
    pub fn to_yaml(&self) -> Result<String, serde_saphyr::ser::Error> {
        serde_saphyr::to_string(&self.to_file())
    }
}

fn gfd(gfd: &Gfd) -> GfdFlags {
    GfdFlags {
        oneshot: Some(gfd.oneshot),
        no_timestamp: Some(gfd.no_timestamp),
        sleep_interval: Some(SleepInterval(gfd.sleep_interval)),
        output_file: gfd.output_file.as_deref().map_or(Some(String::new()), text),
        machine_type_file: text(&gfd.machine_type_file),
    }
}

fn text(path: &Path) -> Option<String> {
    Some(path.display().to_string())
}
