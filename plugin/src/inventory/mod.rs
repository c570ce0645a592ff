//! The node's devices and their health, as immutable snapshots. The NVML thread (discovery and health)
//! publishes [`Hardware`]; [`crate::offer`] turns it into the [`Inventory`]. Kubelet's servers, CDI, the
//! cluster publisher and the metrics are views of the inventory. Only the NVML thread calls NVML.

mod diagnosis;
mod hardware;
mod layout;
mod merge;
mod nvml_state;
mod nvml_thread;
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
pub use layout::{LayoutOutcome, LayoutOutcomes, LayoutRequest};
pub use nvml_state::Timing;
pub use nvml_thread::Heartbeat;
pub use nvml_thread::NvmlThread;

/// Input of discovery. The roots are the paths at which this process reads the trees; in a container or test
/// they differ from the host's paths.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path or soname of NVML.
    pub nvml_library: PathBuf,
    /// The configuration. Its container driver root (as seen by this process) is searched first if
    /// `nvml_library` is only a name; the current root applies to every load.
    pub config: watch::Receiver<Arc<Config>>,
    pub proc_root: PathBuf,
    pub sys_root: PathBuf,
    pub dev_root: PathBuf,
    /// Mode of the fabric manager; `None` to read it from its file.
    pub fabric_mode: Option<u8>,
}

/// The node's devices at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Whether `machine` and `devices` are valid.
    pub state: State,
    /// GPUs, NICs and links. The same `Arc` while the hardware is unchanged, so comparison is cheap.
    pub machine: Arc<Machine>,
    /// All devices offered to kubelet, unhealthy ones included, ordered by resource, GPU, slice placement and
    /// replica.
    pub devices: Vec<Device>,
    /// The terms of each resource.
    pub resources: BTreeMap<ResourceName, Terms>,
    /// GPUs that are not offered as configured, in index order.
    pub excluded: Vec<ExcludedGpu>,
    /// Configured items that this node does not have, for the operator.
    pub problems: Vec<String>,
}

/// Properties shared by all devices of one resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Terms {
    /// How several devices are spread over GPUs.
    pub sharing: SharedDevices,
    /// Whether some of the devices are replicas.
    pub replicated: bool,
    /// Whether a container may request only one replica.
    pub fail_requests_greater_than_one: bool,
    /// Whether the devices are MIG devices.
    pub slices: bool,
}

/// A GPU that is not offered, or only in part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExcludedGpu {
    /// Its machine index.
    pub gpu: u8,
    /// Why, and what the operator can do.
    pub reason: String,
}

/// Progress of discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Nothing is known yet.
    Starting,
    /// Discovery succeeded at least once. If the driver goes away later, devices become unhealthy but stay
    /// listed.
    Ready,
    /// No NVML or no GPU; discovery keeps trying.
    Absent(Absence),
}

/// Why there is no GPU. The text names what is missing and what the operator can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absence {
    /// NVML works but finds no GPU; the node may have none.
    NoGpu,
    /// NVML fails or returns contradictory data: nothing is known about GPUs.
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
    /// Kubelet's device ID: the UUID; for a replica followed by `::` and its number.
    pub id: DeviceId,
    /// The resource that offers it.
    pub resource: ResourceName,
    /// Machine index of its physical GPU, stable while another GPU is lost.
    pub gpu: u8,
    /// Current index of its physical GPU for NVML and the NVIDIA runtime; `None` if NVML does not list it, or
    /// the index is uncertain.
    pub nvml_index: Option<u8>,
    /// Its name for the NVIDIA runtime and CDI: the UUID of the GPU or slice, without a replica's suffix.
    pub uuid: String,
    /// Whether it may be allocated, and if not, why.
    pub health: DeviceHealth,
    /// Minor number of its GPU's `/dev/nvidiaN`; `None` if unknown.
    pub minor: Option<u32>,
    /// NUMA node for kubelet's Topology Manager; `None` if unknown, which is not node 0.
    pub numa: Option<u32>,
    /// The MIG slice; `None` for a whole GPU.
    pub slice: Option<Arc<Slice>>,
    /// Its replica number; `None` if the device is not shared.
    pub replica: Option<u16>,
}

/// A MIG device's location on its GPU.
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
    /// Minor numbers of `/dev/nvidia-caps/nvidia-capN` of the GPU instance and the compute instance; `None` if
    /// unknown.
    pub caps: Option<[u32; 2]>,
}

impl Inventory {
    /// Before the first reading.
    pub fn starting() -> Self {
        Self::without_devices(State::Starting)
    }

    /// Without NVML or GPU, for `reason`.
    pub fn absent(reason: impl Into<Absence>) -> Self {
        Self::without_devices(State::Absent(reason.into()))
    }

    /// With devices. They are sorted here; the terms of their resources are derived from them.
    pub fn ready(machine: Arc<Machine>, mut devices: Vec<Device>) -> Self {
        devices.sort_by(|a, b| a.place().cmp(&b.place()).then_with(|| a.id.cmp(&b.id)));
        let mut resources: BTreeMap<ResourceName, Terms> = BTreeMap::new();
        for device in &devices {
            let terms = resources.entry(device.resource.clone()).or_default();
            terms.replicated |= device.replica.is_some();
            terms.slices |= device.slice.is_some();
        }
        for terms in resources.values_mut().filter(|terms| terms.slices && !terms.replicated) {
            terms.sharing = SharedDevices::Packed;
        }
        Self { state: State::Ready, machine, devices, resources, excluded: Vec::new(), problems: Vec::new() }
    }

    /// Machine index of the GPU of every known GPU and MIG device, by UUID, whether or not and however it is
    /// offered. A pod that was given a device before a configuration change still holds it.
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

    /// Whether both have the same devices, ignoring health.
    pub fn has_the_devices_of(&self, other: &Self) -> bool {
        let same = |(one, other): (&Device, &Device)| {
            // Nothing is copied if health is equal too, as it is at nearly every check.
            one == other || *one == Device { health: one.health.clone(), ..other.clone() }
        };
        self.state == other.state
            && self.machine == other.machine
            && self.devices.len() == other.devices.len()
            && self.devices.iter().zip(&other.devices).all(same)
    }

    /// A channel that holds [`Inventory::starting`], for discovery to publish to.
    pub fn channel() -> (watch::Sender<Arc<Self>>, watch::Receiver<Arc<Self>>) {
        watch::channel(Arc::new(Self::starting()))
    }

    fn without_devices(state: State) -> Self {
        Self {
            state,
            machine: no_machine(),
            devices: Vec::new(),
            resources: BTreeMap::new(),
            excluded: Vec::new(),
            problems: Vec::new(),
        }
    }
}

impl Device {
    /// Sort key in an inventory.
    fn place(&self) -> impl Ord + '_ {
        let slice = self.slice.as_ref().map(|slice| (slice.start, slice.compute_instance));
        (&self.resource, self.gpu, slice, &self.uuid, self.replica)
    }
}

/// The machine of a node about which nothing is known.
fn no_machine() -> Arc<Machine> {
    // An empty machine cannot be inconsistent.
    Arc::new(Machine::new(MachineParts::default()).unwrap_or_else(|_| unreachable!()))
}
