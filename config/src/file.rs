//! The config file, version v1, key by key. The JSON schema and the reference are generated from these types; rules over several values
//! are in `resolve`.

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
    /// How MIG devices are advertised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_strategy: Option<MigStrategy>,
    /// Whether a program that labels once fails on a node without NVML or GPUs; the daemon always waits for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fail_on_init_error: Option<bool>,
    /// Host directory of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvidia_driver_root: Option<String>,
    /// Host directory that contains `dev/` with the device nodes.
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
    /// Directory of the MPS daemon; accepted and not used, because MPS is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps_root: Option<String>,
    /// How devices are found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_discovery_strategy: Option<Discovery>,
    /// Whether labels go into a `NodeFeature` object instead of the file, with `--labels=gfd`.
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
    /// Whether kubelet passes the device nodes itself as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass_device_specs: Option<bool>,
    /// How containers get their devices: one way, or a list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_list_strategy: Option<Strategies>,
    /// IDs of devices for the runtime: by UUID or by index.
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
    /// How replicas and MIG devices are chosen; by default replicas are distributed and MIG devices packed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_devices_allocation_policy: Option<SharedDevices>,
    /// Switches of the CDI writer; this plugin's own key, NVIDIA's has the flag only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_feature_flags: Option<Vec<super::CdiFeature>>,
    /// CDI hooks to leave out; this plugin's own key, NVIDIA's has the flag only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi_disable_hooks: Option<Vec<super::CdiHook>>,
    /// Whether /metrics names the pods that hold devices; this plugin's own key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_metrics: Option<bool>,
}

/// Settings of the node labels alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct GfdFlags {
    /// Whether labels are computed only once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oneshot: Option<bool>,
    /// Whether the label with the time is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_timestamp: Option<bool>,
    /// Interval between computations of the labels.
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
    /// Whether a missing channel is an error, at the start and for a later configuration.
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
