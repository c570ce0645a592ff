//! What this node has and how it fares, as immutable snapshots. One owner (discovery and health) publishes [`Hardware`];
//! [`crate::offer`] makes the [`Inventory`] of it, of which kubelet's servers, CDI, the cluster publisher and the metrics are
//! views. None of them asks NVML.

mod diagnosis;
mod doubts;
mod hardware;
mod heartbeat;
mod merge;
mod owner;
mod session;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use gantry_api::{DeviceHealth, DeviceId, ResourceName};
use gantry_topology::{Machine, MachineParts};
use tokio::sync::watch;

use crate::discover::DiscoverError;
use gantry_config::{Config, SharedDevices};

pub use diagnosis::{Diagnoses, Diagnosis, Lift, LiftError, Marker, StoredFault};
#[cfg(test)]
pub(crate) use hardware::units;
pub use hardware::{Hardware, Unit};
pub use heartbeat::Heartbeat;
pub use owner::{Owner, Timing};

/// What discovery needs to know. The roots say where this process *reads* the trees, which in a container or a test is not
/// where the host has them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path or soname of NVML.
    pub nvml_library: PathBuf,
    /// What the plugin is told to do. Of it the container driver root counts, where this process sees the root of the driver: NVML is
    /// looked for below it first if only its name is given, by the root in effect whenever it is loaded.
    pub config: watch::Receiver<Arc<Config>>,
    /// Where `/proc` is read.
    pub proc_root: PathBuf,
    /// Where `/sys` is read.
    pub sys_root: PathBuf,
    /// Where `/dev` is read.
    pub dev_root: PathBuf,
}

/// Everything known of the node's devices at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Whether `machine` and `devices` can be believed.
    pub state: State,
    /// GPUs, NICs and links. Stays equal (the same `Arc`) while hardware does, so that it is cheap to compare.
    pub machine: Arc<Machine>,
    /// Every device that kubelet is told of, sick ones included: by resource, on it by GPU, on that by where a slice lies, on
    /// that by replica.
    pub devices: Vec<Device>,
    /// What holds for each resource's devices.
    pub resources: BTreeMap<ResourceName, Terms>,
    /// GPUs that are not served as the configuration would have it, in index order.
    pub left_out: Vec<LeftOut>,
    /// What the configuration asks for and this node has not, for people.
    pub problems: Vec<String>,
}

/// What holds for all devices of one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Terms {
    /// How several of its devices are laid on GPUs.
    pub sharing: SharedDevices,
    /// Whether any of its devices is a replica.
    pub replicated: bool,
    /// Whether a container may ask for one replica only.
    pub fail_requests_greater_than_one: bool,
    /// Whether its devices are MIG devices.
    pub slices: bool,
}

/// A GPU that is not served, wholly or in part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeftOut {
    /// Its index in the machine.
    pub gpu: u8,
    /// Why, and what a person can do.
    pub reason: String,
}

/// How far discovery has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing has been found out yet.
    Starting,
    /// Discovery succeeded at least once. A driver that goes away later makes devices unhealthy; it does not take them away.
    Ready,
    /// There is no NVML or no GPU; discovery goes on trying.
    Absent(Absence),
}

/// Why there is no GPU to show. The text says what is missing and what a person can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absence {
    /// NVML works, and finds none: the node may have none.
    NoGpu,
    /// NVML does not work, or contradicts itself: nothing is known of GPUs.
    Unknown(String),
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoGpu => DiscoverError::NoGpu.fmt(f),
            Self::Unknown(reason) => f.write_str(reason),
        }
    }
}

impl From<&DiscoverError> for Absence {
    fn from(error: &DiscoverError) -> Self {
        match error {
            DiscoverError::NoGpu => Self::NoGpu,
            error => Self::Unknown(error.to_string()),
        }
    }
}

impl From<&str> for Absence {
    fn from(reason: &str) -> Self {
        Self::Unknown(reason.to_owned())
    }
}

/// One device as kubelet counts it: a whole GPU, a MIG device, or a replica of either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Kubelet's device ID: the UUID, for a replica with `::` and its number behind.
    pub id: DeviceId,
    /// The resource it is advertised under.
    pub resource: ResourceName,
    /// Index of its physical GPU in the machine: its place, which stays while another GPU is lost.
    pub gpu: u8,
    /// What NVML, and with it the NVIDIA runtime, counts its physical GPU as now; `None` where NVML does not list it, or that is not
    /// certain.
    pub nvml_index: Option<u8>,
    /// What the NVIDIA runtime and CDI call it: the GPU's or the slice's UUID, without a replica's suffix.
    pub uuid: String,
    /// Whether it may be given out, and if not, why.
    pub health: DeviceHealth,
    /// Minor number of `/dev/nvidiaN` of its GPU; `None` where NVML does not say.
    pub minor: Option<u32>,
    /// NUMA node for kubelet's Topology Manager; `None` where unknown, which is not node 0.
    pub numa: Option<u32>,
    /// Which part of the GPU it is; `None` for the whole.
    pub slice: Option<Arc<Slice>>,
    /// Its number among the replicas of one device; `None` where the device is not shared.
    pub replica: Option<u16>,
}

/// A MIG device's place on its GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// NVML's index among the MIG devices of its GPU.
    pub index: u8,
    /// NVML's GPU instance ID.
    pub gpu_instance: u32,
    /// NVML's compute instance ID.
    pub compute_instance: u32,
    /// Profile, e.g. `3g.20gb` or `1c.3g.20gb`.
    pub profile: String,
    /// First memory unit of its GPU instance.
    pub start: u8,
    /// Memory units of its GPU instance.
    pub size: u8,
    /// Minor numbers of `/dev/nvidia-caps/nvidia-capN` of the GPU instance and the compute instance; `None` where the driver does
    /// not tell.
    pub caps: Option<[u32; 2]>,
}

impl Inventory {
    /// Nothing known yet.
    pub fn starting() -> Self {
        Self::without_devices(State::Starting)
    }

    /// No NVML or no GPU, for `reason`.
    pub fn absent(reason: impl Into<Absence>) -> Self {
        Self::without_devices(State::Absent(reason.into()))
    }

    /// Devices found. They are put in order here; what holds for their resources is what the devices show.
    pub fn ready(machine: Arc<Machine>, mut devices: Vec<Device>) -> Self {
        devices.sort_by(|a, b| a.place().cmp(&b.place()).then_with(|| a.id.cmp(&b.id)));
        let mut resources: BTreeMap<ResourceName, Terms> = BTreeMap::new();
        for device in &devices {
            let terms = resources.entry(device.resource.clone()).or_default();
            terms.replicated |= device.replica.is_some();
            terms.slices |= device.slice.is_some();
        }
        for terms in resources
            .values_mut()
            .filter(|terms| terms.slices && !terms.replicated)
        {
            terms.sharing = SharedDevices::Packed;
        }
        Self {
            state: State::Ready,
            machine,
            devices,
            resources,
            left_out: Vec::new(),
            problems: Vec::new(),
        }
    }

    /// The index in the machine of the GPU that each GPU or MIG device is on, by UUID, whatever it is offered as, and whether it is
    /// offered at all: whoever was given it before the configuration changed holds it still.
    pub fn whereabouts(&self) -> BTreeMap<&str, u8> {
        let gpus = self.machine.gpus().iter();
        let found = gpus.flat_map(|gpu| {
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
            let slices = instances.flat_map(|instance| &instance.compute);
            let slices = slices.map(|compute| (compute.uuid.as_str(), gpu.index));
            let whole = gpu.uuid.iter().map(|uuid| (uuid.as_str(), gpu.index));
            whole.chain(slices)
        });
        let offered = self.devices.iter();
        let offered = offered.map(|device| (device.uuid.as_str(), device.gpu));
        found.chain(offered).collect()
    }

    /// Whether it has the devices of `other`, and at most their health is another.
    pub fn has_the_devices_of(&self, other: &Self) -> bool {
        let same = |(one, other): (&Device, &Device)| {
            // Where health is equal too, as it is at nearly every look, nothing is copied.
            one == other
                || *one
                    == Device {
                        health: one.health.clone(),
                        ..other.clone()
                    }
        };
        self.state == other.state
            && self.machine == other.machine
            && self.devices.len() == other.devices.len()
            && self.devices.iter().zip(&other.devices).all(same)
    }

    /// A channel that holds [`Inventory::starting`]: what discovery publishes into.
    pub fn channel() -> (watch::Sender<Arc<Self>>, watch::Receiver<Arc<Self>>) {
        watch::channel(Arc::new(Self::starting()))
    }

    fn without_devices(state: State) -> Self {
        Self {
            state,
            machine: no_machine(),
            devices: Vec::new(),
            resources: BTreeMap::new(),
            left_out: Vec::new(),
            problems: Vec::new(),
        }
    }
}

impl Device {
    /// Where it stands among the devices of an inventory.
    fn place(&self) -> impl Ord + '_ {
        let slice = self
            .slice
            .as_ref()
            .map(|slice| (slice.start, slice.compute_instance));
        (&self.resource, self.gpu, slice, &self.uuid, self.replica)
    }
}

/// The machine of a node of which nothing is known.
fn no_machine() -> Arc<Machine> {
    // An empty machine has nothing to contradict.
    Arc::new(Machine::new(MachineParts::default()).unwrap_or_else(|_| unreachable!()))
}
