//! Discovery: reads NVML, sysfs and /proc into a [`Machine`]. A fact that cannot be read stays unknown, with a
//! warning; only a machine that cannot be read at all is an error. Readings are independent of each other.
//!
//! ```text
//! NVML: identity, memory, MIG, affinity, NVLinks, GPU-GPU paths +
//! sysfs: NICs, NUMA nodes, the paths that NVML lacks ---------+-> Machine, warnings, GPUs out of reach
//! /proc: the CPU, capability nodes of MIG devices -------------+
//! ```

mod gpu;
mod mig;
mod nvlink;
mod sysfs;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use gantry_topology::machine::MAX_NICS;
use gantry_topology::{
    Gpu, Host, Machine, MachineError, MachineParts, MigUuid, Nic, PathClass, PathMatrix, PcieAddress,
    PeerRefusal,
};

use crate::health::{HealthChecks, Vitals};
use crate::nvml::{Code, Device, MigIds, MigMode, Nvml, NvmlError};
use mig::Caps;
use nvlink::ActiveLinks;
use sysfs::{PciePosition, Sysfs};

/// Input of discovery. The roots are the paths at which this process sees the trees.
#[derive(Debug, Clone)]
pub struct NvmlOptions {
    /// Path or soname of NVML.
    pub library: PathBuf,
    pub proc_root: PathBuf,
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

/// The result of one reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredMachine {
    /// The machine. An unreachable GPU has only its index.
    pub machine: Machine,
    /// GPUs that NVML counts but cannot reach: index and error.
    pub unreachable: Vec<(u8, NvmlError)>,
    /// GPUs with unreadable MIG devices; the machine shows none for them.
    pub mig_unread: BTreeSet<u8>,
    /// Other facts that could not be read, by GPU index; the machine lacks them, wholly or in part.
    pub unread: BTreeMap<u8, BTreeSet<Fact>>,
    /// Minor numbers of the capability nodes of each MIG device's GPU instance and compute instance.
    pub caps: BTreeMap<InstanceAt, [u32; 2]>,
    /// State of each GPU, by index.
    pub vitals: BTreeMap<u8, Vitals>,
    /// Whether each NVLink of each GPU is up, by index; a GPU with a link that could not be read has none.
    pub links: BTreeMap<u8, Vec<bool>>,
    /// Whether an NVSwitch is on the bus; looked for only if all NVLinks of a GPU are down.
    pub has_nvswitch: bool,
    /// What could not be read, and what was assumed instead.
    pub warnings: Vec<String>,
}

impl DiscoveredMachine {
    /// The GPUs for which this fact could not be read.
    pub fn are_unread(&self, fact: Fact) -> impl Iterator<Item = u8> + '_ {
        let unread = self.unread.iter();
        unread.filter(move |(_, facts)| facts.contains(&fact)).map(|(index, _)| *index)
    }

    /// The NVLinks that each GPU should have up, by position: those of equal GPUs, and all on a machine with NVSwitches if all are
    /// down. GPUs whose links are not compared are left out.
    pub fn expected_links(&self) -> BTreeMap<usize, u8> {
        let compared = self
            .machine
            .gpus()
            .iter()
            .enumerate()
            .filter(|(_, gpu)| gpu.nvlink.is_some() && gpu.mig.as_ref().is_none_or(|mig| !mig.enabled));
        let expected = |(at, gpu): (usize, &Gpu)| {
            let by_equals = u8::try_from(self.machine.expected_nvlinks(at)).unwrap_or(u8::MAX);
            let states = self.links.get(&gpu.index).filter(|states| self.has_nvswitch && are_down(states));
            let all = states.map_or(0, |states| u8::try_from(states.len()).unwrap_or(u8::MAX));
            (at, by_equals.max(all))
        };
        compared.map(expected).collect()
    }
}

/// Whether a GPU has NVLinks, and none is up.
fn are_down(states: &[bool]) -> bool {
    !states.is_empty() && states.iter().all(|up| !up)
}

/// A fact about a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    Model,
    Memory,
    /// Minor number of the device node.
    Minor,
    /// Serial number of the board.
    Serial,
    /// CUDA compute capability.
    ComputeCapability,
    /// Near NUMA nodes.
    Numa,
    /// NUMA node of the GPU's own memory.
    MemoryNuma,
    /// Near CPUs.
    Cpus,
    Pcie,
    /// The PCIe link as it is trained.
    PcieTrained,
    /// Why the clocks are held down.
    Throttle,
    /// Position in an NVLink domain.
    Fabric,
    /// Profiles and placements of MIG devices, unless they follow from other facts.
    Slices,
    /// Active NVLinks and their far ends.
    Links,
}

/// Location of a MIG device, in the driver's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct InstanceAt {
    /// Minor number of its GPU.
    pub gpu_minor: u32,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

/// Why no machine could be read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DiscoverError {
    /// NVML does not work at all.
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    /// NVML works but finds no GPU.
    #[error("NVML finds no GPU: check lspci -d 10de: on the node, and that this container has /dev/nvidia*")]
    NoGpu,
    /// The driver's files were replaced, and the kernel still runs the old module.
    #[error(
        "{error} (library {}, kernel module {})",
        library.as_deref().unwrap_or("of unknown version"),
        kernel.as_deref().unwrap_or("of unknown version")
    )]
    VersionMismatch {
        error: NvmlError,
        /// Version of the NVML library.
        library: Option<String>,
        /// Version of the loaded kernel module.
        kernel: Option<String>,
    },
    /// The readings contradict each other.
    #[error("NVML returned contradictory data: {0}")]
    Contradiction(#[from] MachineError),
}

impl DiscoverError {
    /// Whether the kernel driver itself is gone; once it is back, the GPUs have been reset. A missing or
    /// mismatched library does not show that.
    pub fn is_driver_gone(&self) -> bool {
        match self {
            Self::Nvml(error) => matches!(error.code(), Some(Code::Uninitialized | Code::DriverNotLoaded)),
            Self::NoGpu => true,
            Self::VersionMismatch { .. } | Self::Contradiction(_) => false,
        }
    }

    /// Whether the NVML library is missing.
    pub fn is_library_missing(&self) -> bool {
        matches!(self, Self::Nvml(NvmlError::Load { .. }))
    }

    /// Whether driver, library or all GPUs are gone, so that NVML must be loaded again.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Nvml(error) => error.is_driver_gone() || self.is_library_missing(),
            Self::NoGpu | Self::VersionMismatch { .. } => true,
            Self::Contradiction(_) => false,
        }
    }
}

/// Result of a one-time scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    pub machine: Machine,
    /// Problems that GPUs report, by index. NVML does not report past Xids.
    pub complaints: Vec<(u8, String)>,
    /// The GPUs that are unhealthy, each with the first reason. A complaint alone does not make a GPU unhealthy.
    pub unhealthy: BTreeMap<u8, String>,
}

/// Loads NVML, reads the machine and unloads NVML. Warnings are logged.
///
/// # Errors
/// When NVML cannot be loaded, finds no GPU, or returns contradictory data.
pub fn scan(options: &NvmlOptions) -> Result<Scan, DiscoverError> {
    let nvml = Nvml::load(&options.library)?;
    let found = read(&nvml, options)?;
    for warning in &found.warnings {
        tracing::warn!("{warning}");
    }
    let checks = HealthChecks::default();
    let lost = found.unreachable.iter();
    let mut complaints: Vec<(u8, String)> = lost.map(|(gpu, error)| (*gpu, error.of_gpu())).collect();
    for (gpu, vitals) in &found.vitals {
        complaints.extend(vitals.complaints(&checks).into_iter().map(|(_, reason)| (*gpu, reason)));
    }
    // Of several reasons the first one counts.
    let unhealthy = complaints.iter().rev().cloned().collect();
    for (gpu, vitals) in &found.vitals {
        complaints.extend(vitals.notices(&checks).into_iter().map(|(_, reason)| (*gpu, reason)));
    }
    complaints.extend(found.expected_links().into_iter().filter_map(|(at, most)| {
        let down = u32::from(most).checked_sub(found.machine.nvlinks_of(at)).filter(|down| *down > 0)?;
        Some((found.machine.gpus().get(at)?.index, format!("{down} of {most} NVLinks down")))
    }));
    Ok(Scan { complaints, unhealthy, machine: found.machine })
}

/// Reads the machine through a loaded NVML.
///
/// # Errors
/// When NVML fails as a whole, finds no GPU, or returns contradictory data. Failures of a single GPU are
/// reported in [`DiscoveredMachine`].
pub fn read(nvml: &Nvml, options: &NvmlOptions) -> Result<DiscoveredMachine, DiscoverError> {
    let mut warnings = Warnings::default();
    let count = match nvml.device_count()? {
        0 => return Err(DiscoverError::NoGpu),
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
                gpus.push(Gpu { index, ..Default::default() });
                unreachable.push((index, error));
            }
        }
    }

    forget_shared_minors(&mut gpus, &mut warnings);
    let are_hidden = unreachable.iter().any(|(_, error)| !error.is_gpu_lost());
    let joints = nvlink::read(&devices, &gpus, are_hidden, &sysfs, &mut warnings);
    for index in joints.unread() {
        unread.entry(index).or_default().insert(Fact::Links);
    }
    for (gpu, ports) in gpus.iter_mut().zip(joints.ports()) {
        gpu.nvlink = ports;
    }
    let links = (0..).zip(joints.states()).filter(|(_, states)| !states.is_empty());
    let links: BTreeMap<u8, Vec<bool>> = links.map(|(index, states)| (index, states.to_vec())).collect();
    let has_nvswitch = links.values().any(|states| are_down(states)) && sysfs.has_nvswitch();
    let mut nics = nics(&sysfs, &mut warnings);
    let paths = paths(&devices, &gpus, &nics, &sysfs, &mut warnings);
    forget_shared_addresses(&mut nics, &gpus);
    let machine = Machine::new(MachineParts {
        name: None,
        host: read_host(nvml, &options.proc_root, &mut warnings),
        nvlinks: ActiveLinks::bundles(&joints),
        no_peer_access: no_peer_access(&devices, &mut warnings),
        gpus,
        nics,
        paths,
    })?;
    Ok(DiscoveredMachine {
        caps: caps(&machine, &Caps::at(&options.proc_root)),
        machine,
        unreachable,
        mig_unread,
        unread,
        vitals,
        links,
        has_nvswitch,
        warnings: warnings.0,
    })
}

/// Forgets minor numbers that NVML reports for several GPUs: a container must not be given another GPU's node.
fn forget_shared_minors(gpus: &mut [Gpu], warnings: &mut Warnings) {
    let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
    for minor in gpus.iter().filter_map(|gpu| gpu.minor) {
        *counts.entry(minor).or_default() += 1;
    }
    for gpu in gpus {
        if let Some(minor) = gpu.minor.filter(|minor| counts.get(minor).is_some_and(|count| *count > 1)) {
            warnings.add(format!(
                "NVML reports minor number {minor} for several GPUs; their device nodes are unknown"
            ));
            gpu.minor = None;
        }
    }
}

/// Forgets the address of an RDMA device that another device has too: a function of the bus may have several RDMA devices.
fn forget_shared_addresses(nics: &mut [Nic], gpus: &[Gpu]) {
    let mut known: BTreeSet<PcieAddress> = gpus.iter().filter_map(|gpu| gpu.bus_id.clone()).collect();
    for nic in nics {
        nic.bus_id = nic.bus_id.take().filter(|address| known.insert(address.clone()));
    }
}

/// Whether the first `count` NVLinks of the GPU at `index` are up; `None` if one cannot be read.
pub fn link_states(nvml: &Nvml, index: u32, count: usize) -> Option<Vec<bool>> {
    let device = nvml.device(index).ok()?;
    let links = 0..u8::try_from(count).ok()?;
    links.map(|link| device.nvlink_active(link).ok()).collect()
}

/// Reads one GPU, except its links and paths.
fn one<'nvml>(
    nvml: &'nvml Nvml,
    index: u32,
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> Result<(Device<'nvml>, gpu::Read, Vitals), NvmlError> {
    let device = nvml.device(index)?;
    let read = gpu::read(device, sysfs, warnings)?;
    let state = gpu::read_vitals(device, read.gpu.bus_id.as_ref(), sysfs)?;
    Ok((device, read, state))
}

/// Checks whether the GPU at `index` can be reached through a loaded NVML.
///
/// # Errors
/// The error of the first call that failed.
pub fn reach(nvml: &Nvml, options: &NvmlOptions, index: u32) -> Result<(), NvmlError> {
    let sysfs = Sysfs::at(&options.sys_root);
    one(nvml, index, &sysfs, &mut Warnings::default()).map(drop)
}

/// Reads the vitals of the GPU at NVML index `index` through a loaded NVML. `gpu` is the last known data; its
/// own index may be outdated.
///
/// # Errors
/// When the GPU or the driver is gone.
pub fn vitals(nvml: &Nvml, options: &NvmlOptions, index: u32, gpu: &Gpu) -> Result<Vitals, NvmlError> {
    let device = nvml.device(index)?;
    gpu::read_vitals(device, gpu.bus_id.as_ref(), &Sysfs::at(&options.sys_root))
}

/// MIG layout of a GPU, reduced to what detects a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigLayout {
    mode: MigMode,
    devices: Vec<(MigIds, MigUuid)>,
}

impl MigLayout {
    /// The first MIG device of a GPU instance, or the one of a compute instance.
    pub fn device(&self, gpu_instance: u32, compute_instance: Option<u32>) -> Option<&MigUuid> {
        let mut devices = self.devices.iter();
        let found = devices.find(|(ids, _)| {
            ids.gpu_instance == gpu_instance && compute_instance.is_none_or(|ci| ids.compute_instance == ci)
        });
        found.map(|(_, uuid)| uuid)
    }
}

/// Reads the MIG layout of the GPU at `index`; `None` if it cannot be read.
pub fn mig_layout(nvml: &Nvml, index: u32) -> Option<MigLayout> {
    let device = nvml.device(index).ok()?;
    let mode = device.mig().mode().ok()?;
    let devices = match mode.current {
        false => Vec::new(),
        true => {
            let devices = device.mig().devices().ok()?;
            let ids = devices.iter().map(|device| Ok((device.ids()?, device.uuid()?)));
            ids.collect::<Result<_, NvmlError>>().ok()?
        }
    };
    Some(MigLayout { mode, devices })
}

/// Version of the loaded kernel module: `/sys/module/nvidia/version`, else `/proc/driver/nvidia/version`.
pub fn kernel_driver(options: &NvmlOptions) -> Option<String> {
    let module = fs::read_to_string(options.sys_root.join("module/nvidia/version"));
    let module = module.ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    let text = || fs::read_to_string(options.proc_root.join("driver/nvidia/version")).ok();
    module.or_else(|| module_version(&text()?))
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon ...`.
fn module_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit());
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Longest settings file of the fabric manager that is read.
const MAX_SETTINGS: u64 = 64 << 10;

/// The mode of the fabric manager by its settings below `root`, the driver's root as this process sees it.
pub fn fabric_mode(root: &Path) -> Option<u8> {
    let path = crate::root::resolve(root, Path::new("usr/share/nvidia/nvswitch/fabricmanager.cfg"))?;
    let file =
        fs::File::open(root.join(path)).ok().filter(|file| file.metadata().is_ok_and(|of| of.is_file()))?;
    let mut text = String::new();
    file.take(MAX_SETTINGS).read_to_string(&mut text).ok()?;
    text.lines()
        .filter_map(|line| line.trim().split_once('='))
        .find(|(key, _)| key.trim() == "FABRIC_MODE")
        .and_then(|(_, mode)| mode.trim().parse().ok())
}

/// PCI addresses bound to NVIDIA's driver in the kernel. NVML counts GPUs only when it is initialised, so a GPU
/// that is added or removed later shows here first.
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
        warnings
            .add(format!("found {} RDMA devices; only the first {MAX_NICS} by name are used", nics.len()));
        nics.truncate(MAX_NICS);
    }
    nics
}

/// The path class of every pair: GPU pairs from NVML, everything else from sysfs.
fn paths(
    devices: &[Option<Device<'_>>],
    gpus: &[Gpu],
    nics: &[Nic],
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> PathMatrix {
    let gpu_addresses = gpus.iter().map(|gpu| gpu.bus_id.as_ref());
    let nic_addresses = nics.iter().map(|nic| nic.bus_id.as_ref());
    let places: Vec<Option<PciePosition>> =
        gpu_addresses.chain(nic_addresses).map(|address| sysfs.position(address?)).collect();
    for (position, place) in places.iter().enumerate().take(gpus.len()) {
        if place.is_none() && gpus[position].bus_id.is_some() && !nics.is_empty() {
            warnings.add(format!("GPU {position} is not in sysfs; its paths to NICs count as SYS"));
        }
    }
    let single_node = sysfs.numa_nodes().len() <= 1;
    let by_sysfs = |a: usize, b: usize| match (&places[a], &places[b]) {
        (Some(a), Some(b)) => Some(sysfs::class(a, b, single_node)),
        _ => None,
    };
    PathMatrix::from_fn(places.len(), |row, column| {
        let ends = [row, column].map(|end| devices.get(end).copied().flatten());
        let [Some(a), Some(b)] = ends else {
            return by_sysfs(row, column).unwrap_or(PathClass::Sys);
        };
        let unknown = match b.common_ancestor(a) {
            Ok(Some(class)) => return class,
            Ok(None) => "unknown path level".to_owned(),
            Err(error) => error.to_string(),
        };
        let (class, source) = match by_sysfs(row, column) {
            Some(class) => (class, "using sysfs:"),
            None => (PathClass::Sys, "sysfs has none either; assuming"),
        };
        warnings.add(format!(
            "NVML has no path between GPU {column} and GPU {row} ({unknown}); {source} {class}"
        ));
        class
    })
}

/// The pairs of GPUs that NVML reports to have no peer-to-peer access.
fn no_peer_access(devices: &[Option<Device<'_>>], warnings: &mut Warnings) -> Vec<PeerRefusal> {
    let reached = (0u8..).zip(devices).filter_map(|(index, device)| Some((index, (*device)?)));
    let reached: Vec<(u8, Device<'_>)> = reached.collect();
    let pairs = reached
        .iter()
        .enumerate()
        .flat_map(|(at, first)| reached.iter().skip(at + 1).map(move |second| (first, second)));
    pairs
        .filter_map(|((a, first), (b, second))| {
            let status = warnings.known(first.peer_refusal(*second)).flatten()?;
            Some(PeerRefusal { gpus: [*a, *b], status })
        })
        .collect()
}

/// Warnings for the operator, without duplicates.
#[derive(Debug, Default)]
struct Warnings(Vec<String>);

impl Warnings {
    /// Limit: on a machine where everything fails the first warnings suffice.
    const MOST: usize = 64;

    fn add(&mut self, warning: String) {
        if self.0.len() < Self::MOST && !self.0.contains(&warning) {
            self.0.push(warning);
        }
    }

    /// The value, or `None` and a warning. An unsupported fact gives no warning.
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

/// Driver and CUDA versions, and the CPU model, which determines the bandwidth between sockets.
fn read_host(nvml: &Nvml, proc_root: &Path, warnings: &mut Warnings) -> Host {
    let cpuinfo = fs::read_to_string(proc_root.join("cpuinfo"));
    Host {
        driver: warnings.known(nvml.driver_version()),
        cuda: warnings.known(nvml.cuda_version()).map(|(major, minor)| format!("{major}.{minor}")),
        cpu: cpuinfo.ok().and_then(|text| cpu_model(&text)),
    }
}

/// The model of the first CPU. x86 has `model name`, POWER `cpu`, 64-bit Arm only numbers: `CPU implementer`
/// and `CPU part`.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        cpuinfo
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    };
    let arm = || {
        let implementer = value("CPU implementer")?;
        let part = value("CPU part")?;
        Some(match (implementer.as_str(), part.as_str()) {
            ("0x41", "0xd4f") => "Arm Neoverse-V2".to_owned(),
            ("0x41", "0xd40") => "Arm Neoverse-V1".to_owned(),
            ("0x41", "0xd0c") => "Arm Neoverse-N1".to_owned(),
            ("0x41", "0xd49") => "Arm Neoverse-N2".to_owned(),
            _ => format!("Arm CPU implementer {implementer} part {part}"),
        })
    };
    value("model name").or_else(|| value("cpu")).or_else(arm)
}

#[cfg(test)]
mod tests {
    use super::{cpu_model, fabric_mode, module_version};

    #[test]
    fn kernel_module_version_is_read_from_proc() {
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.144.03  Mon Dec 30 17:44:08 UTC 2024\nGCC version: gcc 12.3.0\n",
                Some("550.144.03"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
                Some("570.86.15"),
            ),
            ("NVRM version: \n", None),
            ("", None),
        ] {
            assert_eq!(module_version(text).as_deref(), version, "{text}");
        }
    }

    #[test]
    fn fabric_mode_is_read_from_the_fabric_managers_settings() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(fabric_mode(root.path()), None);
        let folder = root.path().join("usr/share/nvidia/nvswitch");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("fabricmanager.cfg"), "# FABRIC_MODE=2\nLOG_LEVEL=4\nFABRIC_MODE = 1\n")
            .unwrap();
        assert_eq!(fabric_mode(root.path()), Some(1));
    }

    #[test]
    fn cpu_model_is_read_on_each_architecture() {
        let x86 = "processor\t: 0\nmodel\t\t: 49\nmodel name\t: AMD EPYC 7742 64-Core Processor\n\nprocessor\t: 1\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("AMD EPYC 7742 64-Core Processor"));
        let power = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n";
        assert_eq!(cpu_model(power).as_deref(), Some("POWER9, altivec supported"));
        let grace = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(cpu_model(grace).as_deref(), Some("Arm Neoverse-V2"));
        assert_eq!(cpu_model("processor : 0\n"), None);
    }
}
