//! Names and sharing of devices in the configuration.

use std::fmt;

use gantry_api::{ResourceName, names};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::value::{self, Replicas, Resource};

/// Most devices of a node. Kubelet accepts messages of at most 4 MiB, the default limit of gRPC, and drops a plugin that sends a longer
/// one. A device needs 80 bytes with the longest name of NVIDIA's so far.
pub const MOST_DEVICES: usize = 48 << 10;

/// A resource name for GPUs of a model or MIG devices of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourcePattern {
    /// Model, or profile as NVML, resources or labels spell it; * matches anything.
    pub pattern: String,
    /// Resource name; a missing nvidia.com/ is added.
    #[serde(deserialize_with = "value::resource")]
    #[schemars(with = "Resource")]
    pub name: ResourceName,
}

/// A MIG profile, or a pattern of profiles, as resource names spell it: `1g.5gb.me` for NVML's `1g.5gb+me`, for `MIG 1g.5gb+me` as
/// nvidia-smi prints it and for `nvidia.com/mig-1g.5gb.me`.
pub fn spelled(profile: &str) -> String {
    let name = profile
        .strip_prefix(names::RESOURCE_DOMAIN)
        .and_then(|name| name.strip_prefix('/'))
        .unwrap_or(profile);
    let is_marked = name.get(..3).is_some_and(|mark| mark.eq_ignore_ascii_case("mig"));
    let bare = name.get(3..).filter(|_| is_marked);
    let bare = bare.and_then(|bare| bare.strip_prefix(['-', ' '])).unwrap_or(name);
    bare.replace('+', ".")
}

/// The default resource of a MIG profile, if `name` is a profile in any spelling: `nvidia.com/mig-1g.5gb.me` for `1g.5gb+me`, `MIG 1g.5gb+me` and `mig-1g.5gb+me`.
pub(super) fn mig_resource(name: &str) -> Option<String> {
    let profile = spelled(name);
    let mut parts = profile.split('.').peekable();
    let counted = |part: &str, unit: &str| {
        let digits = part.strip_suffix(unit).unwrap_or_default();
        !digits.is_empty() && digits.chars().all(|ch| ch.is_ascii_digit())
    };
    parts.next_if(|part| counted(part, "c"));
    let slices = parts.next()?;
    let memory = parts.next()?;
    let memory = memory.split_once('-').map_or(memory, |(memory, _)| memory);
    let known = counted(slices, "g") && counted(memory, "gb");
    known.then(|| format!("{}/mig-{profile}", names::RESOURCE_DOMAIN))
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
    pub resources: Vec<Replicated>,
}

/// Devices of one resource that are shared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Replicated {
    /// The resource before sharing; a missing nvidia.com/ is added.
    #[serde(deserialize_with = "value::resource")]
    #[schemars(with = "Resource")]
    pub name: ResourceName,
    /// Its name after sharing.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "value::some_resource")]
    #[schemars(with = "Option<Resource>")]
    pub rename: Option<ResourceName>,
    /// Which of its devices: all (the default), a number of the first ones, or a list of indices, MIG indices and UUIDs.
    #[serde(default)]
    pub devices: SharedOf,
    /// Number of containers that may use a device at once: 2 or more.
    #[serde(deserialize_with = "value::replicas")]
    #[schemars(with = "Replicas")]
    pub replicas: u16,
}

/// Which devices of a resource are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "serde_json::Value")]
pub enum SharedOf {
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
