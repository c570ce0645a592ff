//! The configuration of the plugin: one immutable value, made from flags, environment and the v1 config file of NVIDIA's
//! k8s-device-plugin. Precedence, highest first: flag, environment variable, config file, default.
//!
//! ```text
//! text -> tree (lines) -> file (types) -> resolve (rules over several values) -> Config
//! flags, variables -> settings (layers over the tree)
//! ```
#![allow(missing_docs, reason = "a comment says what a name does not")]

#[cfg(target_os = "linux")]
mod args;
pub mod file;
pub mod mig_layouts;
mod problem;
mod read;
pub mod reference;
pub mod remediation;
mod resolve;
mod schema;
pub mod settings;
#[cfg(target_os = "linux")]
pub mod source;
mod strict;
mod tree;
pub mod value;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use gantry_api::ResourceName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
pub use args::{ApiRate, ConfigArgs, Leniency};
pub use mig_layouts::{MigLayouts, NamedLayout};
pub use problem::{Fault, Problem, Problems};
pub use read::{Layer, LoadedConfig, MIG_MANAGERS, Strictness, line_of, load};
pub use remediation::{RemediationAction, RemediationLimits, RemediationRule, RemediationRules, Share};
pub use schema::json_schema;
pub use settings::{GfdOverrides, Overrides};
pub use value::spelled;

/// Most devices of a node. etcd stores 1.5 MiB of an object by default: the GpuNode's status needs up to 550 bytes for each device that is a
/// MIG device's replica, held and unhealthy. Kubelet's limit of 4 MiB in a message is reached much later.
pub const MOST_DEVICES: usize = 5 << 9;

/// The settings of NVIDIA's plugin, and ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// How MIG devices are advertised.
    pub mig_strategy: MigStrategy,
    /// Whether a program that labels once fails on a node without NVML or GPUs. The daemon always waits for them.
    pub fail_on_init_error: bool,
    /// Host directory of the driver, under which a container's runtime finds its libraries.
    pub driver_root: PathBuf,
    /// Host directory that contains `dev/` with the device nodes.
    pub dev_root: PathBuf,
    /// Where this process sees `driver_root`.
    pub container_driver_root: PathBuf,
    /// How containers get their devices; sorted and not empty.
    pub device_list_strategy: Vec<Strategy>,
    /// Whether device nodes are passed by kubelet itself as well.
    pub pass_device_specs: bool,
    /// The IDs of devices for the runtime.
    pub device_id_strategy: DeviceIdStrategy,
    /// Prefix of the annotation keys that carry CDI names.
    pub cdi_annotation_prefix: String,
    /// Program that CDI hooks run, on the host.
    pub cdi_hook_path: PathBuf,
    /// Switches of the CDI writer; sorted.
    pub cdi_feature_flags: Vec<CdiFeature>,
    /// CDI hooks to leave out; sorted.
    pub cdi_disabled_hooks: Vec<CdiHook>,
    /// Whether /metrics names the pods that hold devices.
    pub pod_metrics: bool,
    /// Whether containers get an NCCL topology file and the order of their rails.
    pub nccl_topology: bool,
    /// Whether containers get GPUDirect RDMA copy.
    pub gdrcopy: bool,
    /// Whether containers get GPUDirect Storage.
    pub gds: bool,
    /// Whether containers get Mellanox OFED.
    pub mofed: bool,
    /// Import/export memory channels.
    pub imex: Imex,
    /// How replicas and MIG devices are chosen; `None`: replicas distributed, MIG devices packed.
    pub shared_devices: Option<SharedDevices>,
    /// Resource names of GPUs by pattern; empty: the default.
    pub gpu_patterns: Vec<ResourcePattern>,
    /// Resource names of MIG devices by pattern; empty: the defaults.
    pub mig_patterns: Vec<ResourcePattern>,
    /// Time slicing, if configured.
    pub time_slicing: Option<TimeSlicing>,
    /// GPUs that may be served; empty: all.
    pub allow: Vec<Selector>,
    /// GPUs that are not served, even if `allow` matches.
    pub deny: Vec<Selector>,
    /// The node labels.
    pub gfd: Gfd,
}

/// How MIG devices are advertised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MigStrategy {
    /// Not at all: GPUs are served whole, and a GPU with MIG on is left out.
    #[default]
    None,
    /// Under the name of whole GPUs; all must be of one kind.
    Single,
    /// Each profile under its own name, beside whole GPUs.
    Mixed,
}

/// A way to give a container its devices (the device list strategy).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// `NVIDIA_VISIBLE_DEVICES`, for the NVIDIA container runtime.
    Envvar,
    /// Mounts under `/var/run/nvidia-container-devices`, which an unprivileged container cannot forge.
    VolumeMounts,
    /// CDI names in a container annotation, for runtimes before CDI was in the CRI.
    CdiAnnotations,
    /// CDI names in the CRI, for containerd 1.7 and later.
    CdiCri,
}

impl Strategy {
    /// Whether it needs a CDI specification on disk.
    pub const fn is_cdi(self) -> bool {
        matches!(self, Self::CdiAnnotations | Self::CdiCri)
    }

    /// All strategies.
    pub const ALL: [Self; 4] = [Self::Envvar, Self::VolumeMounts, Self::CdiAnnotations, Self::CdiCri];

    /// Its name in flags and files.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::VolumeMounts => "volume-mounts",
            Self::CdiAnnotations => "cdi-annotations",
            Self::CdiCri => "cdi-cri",
        }
    }
}

/// The IDs of devices for the runtime.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceIdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By NVML's index; a MIG device is `gpu:index`.
    Index,
}

/// A switch of the CDI writer (`--cdi-feature-flags`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CdiFeature {
    /// Libraries of the driver without its version in their names are mounted too.
    EnableExplicitDriverLibraries,
    /// The sandbox utility library is not used.
    DisableNvsandboxutils,
    /// Devices with coherent memory are annotated.
    EnableCoherentAnnotations,
    /// One CSV file per device only (Tegra).
    DisableMultipleCsvDevices,
    /// Device nodes do not add their group to the container's user.
    NoAdditionalGidsForDeviceNodes,
    /// The sockets of persistenced, fabricmanager and MPS are left out.
    DisableIpcDiscoverer,
}

/// A CDI hook that can be left out (`--cdi-disable-hooks`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CdiHook {
    /// No hook at all.
    All,
    /// Sets permissions of device folders.
    Chmod,
    /// Creates links that the driver's libraries need.
    CreateSymlinks,
    /// Selects the newer of the driver's and the image's CUDA.
    EnableCudaCompat,
    /// Updates the loader's cache.
    UpdateLdcache,
    /// Keeps the driver from creating device nodes in the container.
    DisableDeviceNodeModification,
    /// Application profiles.
    UpdateApplicationProfile,
}

/// Import/export memory channels of multi-node NVLink.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Imex {
    /// Whether containers get channel 0; NVIDIA's plugin allows no other.
    pub channel: bool,
    /// Whether a missing channel is an error, at the start and for a later configuration; otherwise it is left out with a warning.
    pub required: bool,
}

/// An entry of an allow or deny list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "serde_json::Value")]
pub enum Selector {
    /// NVML's index.
    Index(u8),
    /// A GPU's or a MIG device's UUID.
    Uuid(String),
    BusId(gantry_topology::PcieAddress),
    /// Product name in any case; `*` matches anything.
    Model(String),
}

/// A resource name for GPUs of a model or MIG devices of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourcePattern {
    /// Model, or profile as NVML, resources or labels spell it; * matches anything.
    pub pattern: String,
    /// Resource name; a missing nvidia.com/ is added.
    #[serde(deserialize_with = "value::resource")]
    #[schemars(with = "value::Resource")]
    pub name: ResourceName,
}

/// Time slicing: several containers take turns on one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TimeSlicing {
    /// Whether shared resources without a rename get the suffix .shared.
    #[serde(default)]
    pub rename_by_default: bool,
    /// Whether a container may request one replica only.
    #[serde(default)]
    pub fail_requests_greater_than_one: bool,
    /// The shared resources; at least one entry.
    #[schemars(length(min = 1))]
    pub resources: Vec<ReplicatedResource>,
}

/// Devices of one resource that are shared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicatedResource {
    /// The resource before sharing; a missing nvidia.com/ is added.
    #[serde(deserialize_with = "value::resource")]
    #[schemars(with = "value::Resource")]
    pub name: ResourceName,
    /// Its name after sharing.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "value::some_resource")]
    #[schemars(with = "Option<value::Resource>")]
    pub rename: Option<ResourceName>,
    /// Which of its devices: all (the default), a number of the first ones, or a list of indices, MIG indices and UUIDs.
    #[serde(default)]
    pub devices: ReplicatedDevices,
    /// Number of containers that may use a device at once: 2 or more.
    #[serde(deserialize_with = "value::replicas")]
    #[schemars(with = "value::Replicas")]
    pub replicas: u16,
}

/// Which devices of a resource are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "serde_json::Value")]
pub enum ReplicatedDevices {
    /// All of them.
    #[default]
    All,
    /// The first devices in inventory order, up to this number.
    Count(u16),
    /// Devices by index (`3`, or `3:1` for the second MIG device of GPU 3) or UUID.
    Listed(Vec<DeviceRef>),
}

/// A device in a config file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DeviceRef {
    /// NVML's index of a GPU.
    Gpu(u8),
    /// Index of a GPU and of one of its MIG devices.
    Mig(u8, u8),
    /// UUID of a GPU or a MIG device.
    Uuid(String),
}

impl fmt::Display for DeviceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(f, "{gpu}"),
            Self::Mig(gpu, mig) => write!(f, "{gpu}:{mig}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

/// How replicas and MIG devices are chosen (`sharedDevicesAllocationPolicy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SharedDevices {
    /// The device with the fewest replicas in use first.
    #[default]
    Distributed,
    /// The fullest device first, so that others stay free.
    Packed,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mig_strategy: MigStrategy::None,
            fail_on_init_error: true,
            driver_root: "/".into(),
            dev_root: "/".into(),
            container_driver_root: "/driver-root".into(),
            device_list_strategy: vec![Strategy::Envvar],
            pass_device_specs: false,
            device_id_strategy: DeviceIdStrategy::Uuid,
            cdi_annotation_prefix: "cdi.k8s.io/".to_owned(),
            cdi_hook_path: "/usr/bin/nvidia-ctk".into(),
            cdi_feature_flags: Vec::new(),
            cdi_disabled_hooks: Vec::new(),
            pod_metrics: false,
            nccl_topology: false,
            gdrcopy: false,
            gds: false,
            mofed: false,
            imex: Imex::default(),
            shared_devices: None,
            gpu_patterns: Vec::new(),
            mig_patterns: Vec::new(),
            time_slicing: None,
            allow: Vec::new(),
            deny: Vec::new(),
            gfd: Gfd::default(),
        }
    }
}

/// The settings of the node labels, those of NVIDIA's GPU feature discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gfd {
    /// Whether labels are computed only once. The daemon ignores it; it is kept for the effective configuration.
    pub oneshot: bool,
    /// Whether the label with the time is left out.
    pub no_timestamp: bool,
    /// Interval between two computations of the labels, 1 s or more; `None`: never again.
    pub sleep_interval: Option<Duration>,
    /// File that the labels are written to; `None`: standard output.
    pub output_file: Option<PathBuf>,
    /// File that names the machine.
    pub machine_type_file: PathBuf,
    /// Whether the labels go into a `NodeFeature` object instead of the file.
    pub use_node_feature_api: bool,
}

impl Gfd {
    /// Shortest interval in use: NVIDIA reads a bare `60` as 60 ns, which would keep a core busy.
    pub const SHORTEST: Duration = Duration::from_secs(1);
}

impl Default for Gfd {
    fn default() -> Self {
        Self {
            oneshot: false,
            no_timestamp: false,
            sleep_interval: Some(Duration::from_secs(60)),
            output_file: Some("/etc/kubernetes/node-feature-discovery/features.d/gfd".into()),
            machine_type_file: "/sys/class/dmi/id/product_name".into(),
            use_node_feature_api: true,
        }
    }
}
