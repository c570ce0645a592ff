//! The effective configuration as a complete config file, for the log and for `--check-config`. Reading it again gives the same
//! configuration.

use std::path::Path;

use super::file::{Devices, File, Flags, GfdFlags, ImexFile, PluginFlags, Resources, Sharing, Version};
use super::value::{ChannelIds, SleepInterval, Strategies};
use super::{Config, Gfd};

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
                },
                gfd: gfd(&self.gfd),
            },
            resources: Resources {
                gpus: self.gpu_patterns.clone(),
                mig: self.mig_patterns.clone(),
            },
            sharing: Sharing {
                time_slicing: self.time_slicing.clone(),
                mps: None,
            },
            imex: ImexFile {
                channel_ids: Some(ChannelIds(self.imex.channel)),
                required: Some(self.imex.required),
            },
            devices: Devices {
                allow: self.allow.clone(),
                deny: self.deny.clone(),
            },
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
