//! The table of settings with a flag: key in the file, flags, variables, default and meaning. The command line, the environment and the
//! reference are generated from it.

/// A setting with a flag, a variable and a key in the file, in this order of precedence.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Dotted path of its key in the file.
    pub key: &'static str,
    /// Its flags without dashes, the first one first in the help.
    pub flags: &'static [&'static str],
    /// Its short flag.
    pub short: Option<char>,
    /// Its variables; the first set one counts.
    pub env: &'static [&'static str],
    /// How its text is read.
    pub kind: Kind,
    /// Its default, as a user would write it.
    pub default: &'static str,
    /// Its meaning, in one sentence without a full stop.
    pub help: &'static str,
    /// Whether it belongs to the node labels.
    pub labels: bool,
}

/// Keys that gpu-feature-discovery shares with the plugin, in addition to those of the labels.
const SHARED: [&str; 4] = [
    "flags.migStrategy",
    "flags.failOnInitError",
    "flags.deviceDiscoveryStrategy",
    "flags.plugin.containerDriverRoot",
];

/// The program of a set of flags and variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// NVIDIA's k8s-device-plugin, and its gpu-feature-discovery in the same process.
    Plugin,
    /// NVIDIA's gpu-feature-discovery alone.
    Gfd,
}

impl Program {
    /// Its settings.
    pub fn settings(self) -> impl Iterator<Item = &'static Setting> {
        SETTINGS
            .iter()
            .filter(move |setting| self == Self::Plugin || setting.labels || SHARED.contains(&setting.key))
    }

    /// The variables of a setting; the first set one counts. Those of gpu-feature-discovery come first for that program.
    pub fn variables(self, setting: &Setting) -> Vec<&'static str> {
        let mut names = setting.env.to_vec();
        if self == Self::Gfd {
            names.sort_by_key(|name| !name.starts_with("GFD_"));
        }
        names
    }
}

/// The type of a flag or variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A boolean as in Go: 1, t, T, true, True, TRUE and the same for false; a flag alone is true, an empty variable false.
    Bool,
    /// Text; an empty variable counts as not set.
    Text,
    /// Text that may be empty.
    TextOrEmpty,
    /// Texts with commas, the flag also several times; an empty variable counts as not set.
    List,
    /// Numbers with commas.
    Numbers,
}

/// All settings in the order of the file.
pub const SETTINGS: &[Setting] = &[
    Setting {
        flags: &["mig-strategy"],
        env: &["MIG_STRATEGY", "GFD_MIG_STRATEGY"],
        default: "none",
        help: "How MIG devices are advertised: not at all, under the name of whole GPUs (all must be alike), or each profile under its own name",
        ..text("flags.migStrategy")
    },
    Setting {
        flags: &["fail-on-init-error"],
        env: &["FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"],
        kind: Kind::Bool,
        default: "true",
        help: "Whether gantry labels fails on a node without NVML or GPUs; if false, it writes the labels of a node without GPUs. The daemon always waits for them and is not ready until then",
        ..text("flags.failOnInitError")
    },
    Setting {
        flags: &["nvidia-driver-root", "driver-root"],
        env: &["NVIDIA_DRIVER_ROOT"],
        default: "/",
        help: "Host directory of the driver, under which a container's runtime finds its libraries",
        ..text("flags.nvidiaDriverRoot")
    },
    Setting {
        flags: &["nvidia-dev-root", "dev-root"],
        env: &["NVIDIA_DEV_ROOT"],
        default: "the driver root",
        help: "Host directory that contains dev/ with the device nodes for containers",
        ..text("flags.nvidiaDevRoot")
    },
    Setting {
        flags: &["gdrcopy-enabled"],
        env: &["GDRCOPY_ENABLED"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether containers get GPUDirect RDMA copy",
        ..text("flags.gdrcopyEnabled")
    },
    Setting {
        flags: &["gds-enabled"],
        env: &["GDS_ENABLED"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether containers get GPUDirect Storage",
        ..text("flags.gdsEnabled")
    },
    Setting {
        flags: &["mofed-enabled"],
        env: &["MOFED_ENABLED"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether containers get Mellanox OFED",
        ..text("flags.mofedEnabled")
    },
    Setting {
        flags: &["mps-root"],
        env: &["MPS_ROOT"],
        help: "Directory of the MPS daemon; accepted and not used, because MPS is not served",
        ..text("flags.mpsRoot")
    },
    Setting {
        flags: &["device-discovery-strategy"],
        env: &["DEVICE_DISCOVERY_STRATEGY"],
        default: "auto",
        help: "How devices are found; auto and nvml are the same, tegra and vfio are refused",
        ..text("flags.deviceDiscoveryStrategy")
    },
    Setting {
        flags: &["use-node-feature-api"],
        env: &["GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"],
        kind: Kind::Bool,
        default: "true",
        help: "Whether labels go into a NodeFeature object instead of the file, with --labels=gfd",
        ..label("flags.useNodeFeatureAPI")
    },
    Setting {
        flags: &["pass-device-specs"],
        env: &["PASS_DEVICE_SPECS"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether kubelet passes the device nodes itself as well",
        ..text("flags.plugin.passDeviceSpecs")
    },
    Setting {
        flags: &["device-list-strategy"],
        env: &["DEVICE_LIST_STRATEGY"],
        kind: Kind::List,
        default: "envvar",
        help: "How containers get their devices: one way, or several",
        ..text("flags.plugin.deviceListStrategy")
    },
    Setting {
        flags: &["device-id-strategy"],
        env: &["DEVICE_ID_STRATEGY"],
        default: "uuid",
        help: "IDs of devices for the runtime: by UUID or by index",
        ..text("flags.plugin.deviceIDStrategy")
    },
    Setting {
        flags: &["cdi-annotation-prefix"],
        env: &["CDI_ANNOTATION_PREFIX"],
        default: "cdi.k8s.io/",
        help: "Prefix of the annotation keys that carry CDI names",
        ..text("flags.plugin.cdiAnnotationPrefix")
    },
    Setting {
        flags: &["nvidia-cdi-hook-path", "nvidia-ctk-path"],
        env: &["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"],
        default: "/usr/bin/nvidia-ctk",
        help: "Program that CDI hooks run, on the host",
        ..text("flags.plugin.nvidiaCTKPath")
    },
    Setting {
        flags: &["driver-root-ctr-path", "container-driver-root"],
        env: &["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"],
        default: "/driver-root",
        help: "Where this process sees the driver root",
        ..text("flags.plugin.containerDriverRoot")
    },
    Setting {
        flags: &["shared-devices-allocation-policy"],
        env: &["SHARED_DEVICES_ALLOCATION_POLICY"],
        default: "distributed, for MIG devices packed",
        help: "How replicas and MIG devices are chosen: from the GPU with the fewest in use, or from the fullest",
        ..text("flags.plugin.sharedDevicesAllocationPolicy")
    },
    Setting {
        flags: &["cdi-feature-flags"],
        env: &["CDI_FEATURE_FLAGS"],
        kind: Kind::List,
        help: "Switches of the CDI writer",
        ..text("flags.plugin.cdiFeatureFlags")
    },
    Setting {
        flags: &["cdi-disable-hooks"],
        env: &["CDI_DISABLE_HOOKS"],
        kind: Kind::List,
        help: "CDI hooks to leave out; all means every hook",
        ..text("flags.plugin.cdiDisableHooks")
    },
    Setting {
        flags: &["pod-metrics"],
        env: &["POD_METRICS"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether /metrics names the pods that hold devices; otherwise their devices are counted by resource and GPU",
        ..text("flags.plugin.podMetrics")
    },
    Setting {
        flags: &["oneshot"],
        env: &["GFD_ONESHOT"],
        kind: Kind::Bool,
        default: "false",
        help: "No effect: the daemon goes on labelling and logs this; gantry labels always computes labels once",
        ..label("flags.gfd.oneshot")
    },
    Setting {
        flags: &["no-timestamp"],
        env: &["GFD_NO_TIMESTAMP"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether the label with the time is left out",
        ..label("flags.gfd.noTimestamp")
    },
    Setting {
        flags: &["sleep-interval"],
        env: &["GFD_SLEEP_INTERVAL"],
        default: "1m",
        help: "Interval between computations of the labels: 1s or longer, or infinite; a bare number is nanoseconds",
        ..label("flags.gfd.sleepInterval")
    },
    Setting {
        flags: &["output-file", "output"],
        short: Some('o'),
        env: &["GFD_OUTPUT_FILE"],
        kind: Kind::TextOrEmpty,
        default: "/etc/kubernetes/node-feature-discovery/features.d/gfd",
        help: "File that the labels are written to; empty for standard output",
        ..label("flags.gfd.outputFile")
    },
    Setting {
        flags: &["machine-type-file"],
        env: &["GFD_MACHINE_TYPE_FILE"],
        default: "/sys/class/dmi/id/product_name",
        help: "File that names the machine",
        ..label("flags.gfd.machineTypeFile")
    },
    Setting {
        flags: &["imex-channel-ids"],
        env: &["IMEX_CHANNEL_IDS"],
        kind: Kind::Numbers,
        help: "IMEX channels that containers get: none, or 0",
        ..text("imex.channelIDs")
    },
    Setting {
        flags: &["imex-required"],
        env: &["IMEX_REQUIRED"],
        kind: Kind::Bool,
        default: "false",
        help: "Whether a missing IMEX channel is an error, at the start and for a later configuration; otherwise it is left out",
        ..text("imex.required")
    },
];

const fn text(key: &'static str) -> Setting {
    Setting { key, flags: &[], short: None, env: &[], kind: Kind::Text, default: "", help: "", labels: false }
}

const fn label(key: &'static str) -> Setting {
    Setting { labels: true, ..text(key) }
}
