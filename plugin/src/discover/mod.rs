//! Discovery: NVML and sysfs read into a [`Machine`]. What cannot be learnt stays unknown, with a warning; only a machine that
//! cannot be read at all is an error. Nothing is remembered from one reading to the next.
//!
//! ```text
//! NVML: identity, memory, MIG, affinity, NVLinks, GPU-GPU paths +
//! sysfs: NICs, NUMA nodes, the paths that NVML does not know --+-> Machine, warnings, GPUs out of reach
//! /proc: the CPU, capability nodes of MIG devices -------------+
//! ```

mod caps;
mod gpu;
mod host;
mod mig;
mod nvlink;
mod pcie;
mod sysfs;
mod vitals;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use gantry_topology::machine::{MAX_GPUS, MAX_NICS};
use gantry_topology::{Machine, MachineError, MachineParts, MigUuid, Nic, PathClass, PathMatrix};

use crate::health::{HealthChecks, Vitals};
use crate::nvml::{Code, Device, MigIds, MigMode, Nvml, NvmlError};
use caps::Caps;
use nvlink::Joints;
use pcie::Place;
use sysfs::Sysfs;

/// What discovery needs to know. The roots say where this process reads the trees.
#[derive(Debug, Clone)]
pub struct NvmlOptions {
    /// Path or soname of NVML.
    pub library: PathBuf,
    /// Where `/proc` is read.
    pub proc_root: PathBuf,
    /// Where `/sys` is read.
    pub sys_root: PathBuf,
}

impl Default for NvmlOptions {
    fn default() -> Self {
        Self {
            library: PathBuf::from("libnvidia-ml.so.1"),
            proc_root: PathBuf::from("/proc"),
            sys_root: PathBuf::from("/sys"),
        }
    }
}

/// A machine as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The machine. A GPU out of reach has its index and nothing else.
    pub machine: Machine,
    /// GPUs that NVML counts and cannot reach: index, and why.
    pub unreachable: Vec<(u8, NvmlError)>,
    /// GPUs whose MIG devices could not be asked for: the machine shows none of them, which says nothing.
    pub mig_unread: BTreeSet<u8>,
    /// What else could not be asked of each GPU that was read, by index: the machine shows nothing in its place, or a part, which says
    /// nothing.
    pub unread: BTreeMap<u8, BTreeSet<Fact>>,
    /// Minor numbers of the capability nodes of each MIG device's GPU instance and compute instance.
    pub caps: BTreeMap<InstanceAt, [u32; 2]>,
    /// What each GPU says of its state, by index.
    pub vitals: BTreeMap<u8, Vitals>,
    /// What could not be learnt, and what was assumed instead.
    pub warnings: Vec<String>,
}

impl Found {
    /// The GPUs of which this could not be asked.
    pub fn are_unread(&self, fact: Fact) -> impl Iterator<Item = u8> + '_ {
        let unread = self.unread.iter();
        unread
            .filter(move |(_, facts)| facts.contains(&fact))
            .map(|(index, _)| *index)
    }
}

/// Something to learn of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// Its name.
    Model,
    /// How much memory it has.
    Memory,
    /// The number of its device node.
    Minor,
    /// Its board's serial number.
    Serial,
    /// What CUDA may do with it.
    ComputeCapability,
    /// The NUMA nodes near it.
    Numa,
    /// The NUMA node of its own memory.
    MemoryNuma,
    /// The CPUs near it.
    Cpus,
    /// Its PCIe link.
    Pcie,
    /// Its place in an NVLink domain.
    Fabric,
    /// Profiles and places of its MIG devices, as far as they do not follow from others.
    Slices,
    /// Which of its NVLinks are up, and where they end.
    Links,
}

/// Where a MIG device is, as the driver counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InstanceAt {
    /// Minor number of its GPU.
    pub gpu_minor: u32,
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance.
    pub compute_instance: u32,
}

/// Why no machine could be read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiscoverError {
    /// NVML does not work at all.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// NVML works and has no GPU.
    #[error(
        "NVML works and finds no GPU; check lspci -d 10de: on the node, and that /dev/nvidia* are given to this container"
    )]
    NoGpu,
    /// More GPUs than a machine may have.
    #[error("NVML counts {count} GPUs, at most {MAX_GPUS} are served")]
    TooMany {
        /// How many there are.
        count: u32,
    },
    /// What was read contradicts itself.
    #[error("NVML's answers contradict each other: {0}")]
    Contradiction(#[from] MachineError),
}

impl DiscoverError {
    /// Whether the kernel's driver itself is gone: when it is back, the GPUs have been reset. A library that is missing or of another
    /// version says nothing of that.
    pub fn is_driver_gone(&self) -> bool {
        match self {
            Self::Nvml(error) => matches!(error.code(), Some(Code::Uninitialized | Code::DriverNotLoaded)),
            Self::NoGpu => true,
            Self::TooMany { .. } | Self::Contradiction(_) => false,
        }
    }

    /// Whether there is no library to ask.
    pub fn is_library_missing(&self) -> bool {
        matches!(self, Self::Nvml(NvmlError::Load { .. }))
    }

    /// Whether driver, library or all GPUs are gone, so that NVML must be loaded anew.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Nvml(error) => error.is_driver_gone() || self.is_library_missing(),
            Self::NoGpu => true,
            Self::TooMany { .. } | Self::Contradiction(_) => false,
        }
    }
}

/// A machine as somebody sees it who looks once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sight {
    /// The machine.
    pub machine: Machine,
    /// What GPUs say is wrong with them, by index. Xids of the past NVML does not tell.
    pub complaints: Vec<(u8, String)>,
}

/// Loads NVML, looks at the machine and unloads NVML. Warnings go to the log.
///
/// # Errors
/// When NVML cannot be loaded, finds no GPU, or contradicts itself.
pub fn look(options: &NvmlOptions) -> Result<Sight, DiscoverError> {
    let nvml = Nvml::load(&options.library)?;
    let found = read(&nvml, options)?;
    for warning in &found.warnings {
        tracing::warn!("{warning}");
    }
    let lost = found.unreachable.iter();
    let lost = lost.map(|(gpu, error)| (*gpu, format!("GPU lost: {error}")));
    let told = found.vitals.iter().flat_map(|(gpu, vitals)| {
        let complaints = vitals.complaints(&HealthChecks::default());
        complaints.into_iter().map(|(_, reason)| (*gpu, reason))
    });
    Ok(Sight {
        complaints: lost.chain(told).collect(),
        machine: found.machine,
    })
}

/// Reads the machine through an NVML that is loaded already.
///
/// # Errors
/// When NVML fails as a whole, finds no GPU, or contradicts itself. A single GPU that fails is reported in [`Found`].
pub fn read(nvml: &Nvml, options: &NvmlOptions) -> Result<Found, DiscoverError> {
    let mut warnings = Warnings::default();
    let count = match nvml.device_count()? {
        0 => return Err(DiscoverError::NoGpu),
        count if count as usize > MAX_GPUS => return Err(DiscoverError::TooMany { count }),
        count => count,
    };
    let sysfs = Sysfs::at(&options.sys_root);

    let mut devices: Vec<Option<Device<'_>>> = Vec::new();
    let mut gpus = Vec::new();
    let mut unreachable = Vec::new();
    let mut mig_unread = BTreeSet::new();
    let mut unread: BTreeMap<u8, BTreeSet<Fact>> = BTreeMap::new();
    let mut vitals = BTreeMap::new();
    for index in 0..count as u8 {
        match one(nvml, u32::from(index), &sysfs, &mut warnings) {
            Ok((device, read, state)) => {
                devices.push(Some(device));
                gpus.push(read.gpu);
                vitals.insert(index, state);
                if read.mig_unread {
                    mig_unread.insert(index);
                }
                if !read.unread.is_empty() {
                    unread.insert(index, read.unread);
                }
            }
            Err(error) if error.is_driver_gone() => return Err(error.into()),
            Err(error) => {
                warnings.add(error.to_string());
                devices.push(None);
                gpus.push(gantry_topology::Gpu {
                    index,
                    ..Default::default()
                });
                unreachable.push((index, error));
            }
        }
    }

    let are_hidden = unreachable.iter().any(|(_, error)| !error.is_gpu_lost());
    let joints = nvlink::read(&devices, &gpus, are_hidden, &sysfs, &mut warnings);
    for index in joints.unread() {
        unread.entry(index).or_default().insert(Fact::Links);
    }
    for (gpu, ports) in gpus.iter_mut().zip(joints.ports()) {
        gpu.nvlink = ports;
    }
    let nics = nics(&sysfs, &mut warnings);
    let paths = paths(&devices, &gpus, &nics, &sysfs, &mut warnings);
    let machine = Machine::new(MachineParts {
        name: None,
        host: host::read(nvml, &options.proc_root, &mut warnings),
        nvlinks: Joints::bundles(&joints),
        gpus,
        nics,
        paths,
    })?;
    Ok(Found {
        caps: caps(&machine, &Caps::at(&options.proc_root)),
        machine,
        unreachable,
        mig_unread,
        unread,
        vitals,
        warnings: warnings.0,
    })
}

/// Reads one GPU, all but its links and paths.
fn one<'nvml>(
    nvml: &'nvml Nvml,
    index: u32,
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> Result<(Device<'nvml>, gpu::Read, Vitals), NvmlError> {
    let device = nvml.device(index)?;
    let read = gpu::read(device, sysfs, warnings)?;
    let state = vitals::read(device, read.gpu.bus_id.as_ref(), sysfs)?;
    Ok((device, read, state))
}

/// Whether a reading would reach the GPU at `index`, through an NVML that is loaded already.
///
/// # Errors
/// Why not.
pub fn reach(nvml: &Nvml, options: &NvmlOptions, index: u32) -> Result<(), NvmlError> {
    let sysfs = Sysfs::at(&options.sys_root);
    one(nvml, index, &sysfs, &mut Warnings::default()).map(drop)
}

/// Reads the vitals of the GPU at `index` of NVML's count, through an NVML that is loaded already. `gpu` is what is known of it,
/// whose own index may be that of an earlier count.
///
/// # Errors
/// When GPU or driver is gone.
pub fn vitals(
    nvml: &Nvml,
    options: &NvmlOptions,
    index: u32,
    gpu: &gantry_topology::Gpu,
) -> Result<Vitals, NvmlError> {
    let device = nvml.device(index)?;
    vitals::read(device, gpu.bus_id.as_ref(), &Sysfs::at(&options.sys_root))
}

/// How a GPU is cut, as far as it takes to see that it was cut anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    mode: MigMode,
    devices: Vec<(MigIds, MigUuid)>,
}

impl Cut {
    /// The first MIG device of a GPU instance, or that of one of its compute instances.
    pub fn device(&self, gpu_instance: u32, compute_instance: Option<u32>) -> Option<&MigUuid> {
        let mut devices = self.devices.iter();
        let found = devices.find(|(ids, _)| {
            ids.gpu_instance == gpu_instance && compute_instance.is_none_or(|ci| ids.compute_instance == ci)
        });
        found.map(|(_, uuid)| uuid)
    }
}

/// Asks how the GPU at `index` is cut; `None` where that cannot be known.
pub fn cut(nvml: &Nvml, index: u32) -> Option<Cut> {
    let device = nvml.device(index).ok()?;
    let mode = device.mig_mode().ok()?;
    let devices = match mode.current {
        false => Vec::new(),
        true => {
            let devices = device.mig_devices().ok()?;
            let ids = devices.iter().map(|device| Ok((device.ids()?, device.uuid()?)));
            ids.collect::<Result<_, NvmlError>>().ok()?
        }
    };
    Some(Cut { mode, devices })
}

/// The PCI addresses that the kernel has bound to NVIDIA's driver. NVML counts GPUs once, when it is initialised: one that is added
/// or taken out later shows here first.
pub fn bound(options: &NvmlOptions) -> BTreeSet<String> {
    Sysfs::at(&options.sys_root).bound()
}

/// The capability nodes of every MIG device that has some.
fn caps(machine: &Machine, caps: &Caps) -> BTreeMap<InstanceAt, [u32; 2]> {
    let gpus = machine.gpus().iter();
    let devices = gpus.filter_map(|gpu| Some((gpu.minor?, gpu.mig.as_ref()?)));
    devices
        .flat_map(|(gpu_minor, mig)| {
            mig.instances.iter().flat_map(move |instance| {
                instance.compute.iter().map(move |compute| InstanceAt {
                    gpu_minor,
                    gpu_instance: instance.id,
                    compute_instance: compute.id,
                })
            })
        })
        .filter_map(|at| Some((at, caps.of(at)?)))
        .collect()
}

fn nics(sysfs: &Sysfs, warnings: &mut Warnings) -> Vec<Nic> {
    let mut nics = sysfs.rdma_devices(warnings);
    if nics.len() > MAX_NICS {
        warnings.add(format!(
            "{} RDMA devices found; the first {MAX_NICS} by name are kept",
            nics.len()
        ));
        nics.truncate(MAX_NICS);
    }
    nics
}

/// The class of every pair: GPU pairs as NVML says, everything else and what NVML cannot say from sysfs.
fn paths(
    devices: &[Option<Device<'_>>],
    gpus: &[gantry_topology::Gpu],
    nics: &[Nic],
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> PathMatrix {
    let gpu_addresses = gpus.iter().map(|gpu| gpu.bus_id.as_ref());
    let nic_addresses = nics.iter().map(|nic| nic.bus_id.as_ref());
    let places: Vec<Option<Place>> = gpu_addresses
        .chain(nic_addresses)
        .map(|address| sysfs.place(address?))
        .collect();
    for (position, place) in places.iter().enumerate().take(gpus.len()) {
        if place.is_none() && gpus[position].bus_id.is_some() && !nics.is_empty() {
            warnings.add(format!(
                "GPU {position} is not in sysfs; its paths to NICs count as SYS"
            ));
        }
    }
    let single_node = sysfs.numa_nodes() <= 1;
    let by_sysfs = |a: usize, b: usize| match (&places[a], &places[b]) {
        (Some(a), Some(b)) => Some(pcie::class(a, b, single_node)),
        _ => None,
    };
    PathMatrix::from_fn(places.len(), |row, column| {
        let ends = [row, column].map(|end| devices.get(end).copied().flatten());
        let [Some(a), Some(b)] = ends else {
            return by_sysfs(row, column).unwrap_or(PathClass::Sys);
        };
        let unknown = match b.common_ancestor(a) {
            Ok(Some(class)) => return class,
            Ok(None) => "a level this build does not know".to_owned(),
            Err(error) => error.to_string(),
        };
        let (class, source) = match by_sysfs(row, column) {
            Some(class) => (class, "sysfs says"),
            None => (PathClass::Sys, "neither does sysfs; assuming"),
        };
        warnings.add(format!(
            "NVML does not say how GPU {column} and GPU {row} are joined ({unknown}); {source} {class}"
        ));
        class
    })
}

/// Things worth telling a person, each once.
#[derive(Debug, Default)]
struct Warnings(Vec<String>);

impl Warnings {
    /// More than this are not kept: a machine on which everything fails says enough in its first ones.
    const MOST: usize = 64;

    fn add(&mut self, warning: String) {
        if self.0.len() < Self::MOST && !self.0.contains(&warning) {
            self.0.push(warning);
        }
    }

    /// The value, or `None` and a warning. What a device simply does not have is no warning.
    fn known<T>(&mut self, answer: Result<T, NvmlError>) -> Option<T> {
        match answer {
            Ok(value) => Some(value),
            Err(error) => {
                if !error.is_unsupported() {
                    self.add(error.to_string());
                }
                None
            }
        }
    }
}
