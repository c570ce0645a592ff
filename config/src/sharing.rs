//! The part of the config that says how devices are named and shared.

use std::fmt;

use gantry_api::{ResourceName, names};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most devices of a node. Kubelet takes messages of 4 MiB and no more, which is gRPC's limit where nobody sets another, and ends with a
/// plugin that sends a longer one; a device takes 80 bytes of it with the longest name that NVIDIA has had.
pub const MOST_DEVICES: usize = 48 << 10;

/// GPUs or MIG devices whose model or profile matches are advertised under a name of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourcePattern {
    /// Model, or profile as NVML, resources or labels spell it; `*` stands for anything. The first pattern that matches the whole name counts.
    pub pattern: String,
    /// The resource.
    pub name: ResourceName,
}

/// A MIG profile, or a pattern of some, as names of resources spell it: `1g.5gb.me` for NVML's `1g.5gb+me`, for `MIG 1g.5gb+me` as
/// nvidia-smi prints it and for `nvidia.com/mig-1g.5gb.me`.
pub fn spelled(profile: &str) -> String {
    let name = profile
        .strip_prefix(names::RESOURCE_DOMAIN)
        .and_then(|name| name.strip_prefix('/'))
        .unwrap_or(profile);
    let is_marked = name.get(..3).is_some_and(|mark| mark.eq_ignore_ascii_case("mig"));
    let bare = name.get(3..).filter(|_| is_marked);
    let bare = bare
        .and_then(|bare| bare.strip_prefix(['-', ' ']))
        .unwrap_or(name);
    bare.replace('+', ".")
}

/// What devices of a MIG profile are called before anything renames them, if `name` is a profile in any spelling: `nvidia.com/mig-1g.5gb.me`
/// for `1g.5gb+me`, `MIG 1g.5gb+me` and `mig-1g.5gb+me`.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeSlicing {
    /// Whether shared resources get `.shared` at the end of their name, where no name is given.
    pub rename_by_default: bool,
    /// Whether a container may ask for one replica only.
    pub fail_requests_greater_than_one: bool,
    /// What is shared, one entry per resource and set of devices.
    pub resources: Vec<Replicated>,
}

/// Devices of one resource that are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replicated {
    /// The resource before sharing.
    pub name: ResourceName,
    /// Its name after sharing; `None`: by [`TimeSlicing::rename_by_default`].
    pub rename: Option<ResourceName>,
    /// Which of its devices.
    pub devices: SharedOf,
    /// Replicas of each, 2 or more.
    pub replicas: u16,
}

/// Which devices of a resource are shared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "serde_json::Value")]
pub enum SharedOf {
    /// All of them.
    All,
    /// The first so many, in inventory order.
    Count(u16),
    /// Those named by index (`3`, or `3:1` for the second MIG device of GPU 3) or UUID.
    Listed(Vec<DeviceRef>),
}

/// A device as a config file names it.
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

/// How replicas and MIG devices are laid on GPUs (`sharedDevicesAllocationPolicy`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SharedDevices {
    /// The device with the fewest replicas in use first.
    #[default]
    Distributed,
    /// The fullest device first, so that others stay free.
    Packed,
}
