//! A completed machine file: every fact that NVML reports and the file lacks is filled in, always with the same value
//! for the same file. Values only: [`crate::control`] has what changes at run time.

mod address;
mod mig;
mod product;

use std::path::{Path, PathBuf};

use gantry_topology::mig::{self as profiles, Catalogue};
use gantry_topology::{Fabric, IdList, Machine, MachineError, Mig, PathClass, PcieLink, Throttle};

pub use address::Address;
use address::{FreeBuses, given};
pub use mig::{attributes, mig_uuid};
pub use product::Product;

/// PCI ids of NVIDIA's devices that are no GPUs.
pub(crate) mod pci_ids {
    /// The vendor.
    pub(crate) const NVIDIA: u16 = 0x10de;
    /// The NVSwitch of the A100 boards; the others are given it too.
    pub(crate) const NVSWITCH: u16 = 0x1af1;
}

/// Driver version of a machine file that names none.
pub const DEFAULT_DRIVER: &str = "570.124.06";
/// CUDA version of a machine file that names none.
pub const DEFAULT_CUDA: &str = "12.8";

/// Why a machine file is no machine.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// The file cannot be read.
    #[error("cannot read the machine file {path}: {source}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The file is wrong.
    #[error("{path}: {problem}")]
    Machine { path: PathBuf, problem: String },
}

/// A machine with nothing left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    machine: Machine,
    /// The GPUs, by index.
    pub gpus: Vec<GpuFacts>,
    /// The NICs, in the machine's order.
    pub nics: Vec<NicFacts>,
    /// The NVSwitches' PCIe addresses.
    pub switches: Vec<Address>,
    /// Driver version, e.g. `570.124.06`.
    pub driver: String,
    /// CUDA version as NVML counts it: 12.8 is 12080.
    pub cuda: i32,
}

/// One GPU with nothing left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// NVML's index.
    pub index: usize,
    /// `GPU-xxxxxxxx-...`.
    pub uuid: String,
    /// PCIe address.
    pub address: Address,
    /// Product name.
    pub model: String,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// Minor number of `/dev/nvidiaN`.
    pub minor: u32,
    /// Board serial number.
    pub serial: String,
    /// CUDA compute capability.
    pub compute_capability: (u8, u8),
    /// Nearest NUMA node; `None` if the machine file has none.
    pub numa: Option<u32>,
    /// NUMA nodes near the GPU.
    pub numa_nodes: Vec<u32>,
    /// NUMA node of the GPU's own memory, on coherent platforms.
    pub memory_numa: Option<u16>,
    /// CPUs near the GPU.
    pub cpus: Vec<u32>,
    /// PCIe link at its widest.
    pub pcie: PcieLink,
    /// PCIe link as it is trained.
    pub pcie_trained: PcieLink,
    /// Why the clocks are held down, if they are.
    pub throttle: Option<Throttle>,
    /// NVLink version; `None` without NVLink.
    pub nvlink_version: Option<u8>,
    /// Links in the hardware, joined or not.
    pub nvlink_count: u8,
    /// Joined links, by number.
    pub links: Vec<Remote>,
    /// Multi-node NVLink domain.
    pub fabric: Option<Fabric>,
    /// What the product's data sheet states.
    pub product: Product,
    /// The MIG profiles; `None` without MIG support.
    pub profiles: Option<profiles::Product>,
    /// The MIG layout of the machine file, nothing left out.
    pub mig: Option<Mig>,
}

/// The far end of one NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    /// Another GPU, and the number of this link there.
    Gpu {
        /// Index of the peer.
        index: usize,
        /// Link number at the peer.
        link: u8,
    },
    /// An NVSwitch.
    Switch {
        /// Which NVSwitch of the machine.
        index: usize,
    },
}

/// One NIC with nothing left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicFacts {
    /// RDMA device name, e.g. `mlx5_0`.
    pub device: String,
    /// PCIe address.
    pub address: Address,
    /// NUMA node, from the machine file or a near GPU.
    pub numa: Option<u32>,
}

impl Facts {
    /// Reads and completes the machine of a file.
    ///
    /// # Errors
    /// When the file cannot be read or is wrong.
    pub fn read(path: &Path) -> Result<Self, FactsError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| FactsError::Read { path: path.to_owned(), source })?;
        let wrong = |problem: String| FactsError::Machine { path: path.to_owned(), problem };
        let machine: Machine = serde_saphyr::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        Self::of(&machine).map_err(|error| wrong(error.to_string()))
    }

    /// Completes `machine`.
    ///
    /// # Errors
    /// When a filled-in value contradicts one given, which a valid machine file does not cause.
    pub fn of(machine: &Machine) -> Result<Self, MachineError> {
        let mut free = FreeBuses::beside(machine);
        let addresses: Vec<Address> = machine
            .gpus()
            .iter()
            .map(|gpu| given(gpu.bus_id.as_ref()).unwrap_or_else(|| free.take()))
            .collect();
        let ports = ports(machine);
        let catalogue = Catalogue::built_in();
        let gpus = machine
            .gpus()
            .iter()
            .zip(addresses)
            .zip(ports)
            .map(|((gpu, address), links)| complete_gpu(machine, gpu, address, links, &catalogue))
            .collect::<Result<Vec<GpuFacts>, MachineError>>()?;
        let nics: Vec<NicFacts> = machine
            .nics()
            .iter()
            .enumerate()
            .map(|(position, nic)| NicFacts {
                device: nic.device.clone().unwrap_or_else(|| nic.name.clone()),
                address: given(nic.bus_id.as_ref()).unwrap_or_else(|| free.take()),
                numa: nic.numa.map(u32::from).or_else(|| numa_of_near_gpu(machine, &gpus, position)),
            })
            .collect();
        let switches = (0..switches(machine)).map(|_| free.take()).collect();
        let host = machine.host();
        let facts = Self {
            machine: completed(machine, &gpus, &nics)?,
            gpus,
            nics,
            switches,
            driver: host.driver.clone().unwrap_or_else(|| DEFAULT_DRIVER.to_owned()),
            cuda: cuda_number(host.cuda.as_deref().unwrap_or(DEFAULT_CUDA)),
        };
        Ok(facts)
    }

    /// The machine, every identity field of its GPUs present.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }
}

fn complete_gpu(
    machine: &Machine,
    gpu: &gantry_topology::Gpu,
    address: Address,
    links: Vec<Remote>,
    catalogue: &Catalogue,
) -> Result<GpuFacts, MachineError> {
    let index = usize::from(gpu.index);
    let capability = gpu.compute_capability.as_deref().and_then(parse_capability);
    let product = Product::find(gpu.model.as_deref(), capability);
    let given_version = gpu.nvlink.and_then(|ports| ports.version);
    let (default_version, default_count) = product.nvlink;
    // A file may join links that the product's sheet does not know of: the file wins.
    let joined = u8::try_from(links.len()).unwrap_or(u8::MAX);
    let version =
        given_version.or((default_version > 0).then_some(default_version)).or((joined > 0).then_some(3));
    let uuid =
        gpu.uuid.as_ref().map_or_else(|| uuid_of(machine.name(), index), |uuid| uuid.as_str().to_owned());
    // By the name that the file gives; a board that is known by its product only has that product's profiles.
    let named = gpu.model.as_deref();
    let profiles = named
        .and_then(|model| catalogue.by_model(model, gpu.memory_mib))
        .or_else(|| catalogue.by_device_id(product.device_id))
        .cloned();
    let mig = mig::complete(gpu, &uuid, profiles.as_ref(), &product)?;
    let pcie = gpu.pcie.unwrap_or(PcieLink { generation: product.pcie.0, width: product.pcie.1 });
    Ok(GpuFacts {
        index,
        uuid,
        address,
        model: gpu.model.clone().unwrap_or_else(|| product.name.to_owned()),
        memory_mib: gpu.memory_mib.unwrap_or(product.memory_mib),
        minor: gpu.minor.unwrap_or(u32::from(gpu.index)),
        serial: gpu
            .serial
            .clone()
            .unwrap_or_else(|| format!("13{:011}", fnv(machine.name(), index as u64) % 100_000_000_000)),
        compute_capability: capability.unwrap_or(product.compute_capability),
        numa: gpu.numa.as_ref().and_then(|list| list.iter().next()),
        numa_nodes: numbers(gpu.numa.as_ref()),
        memory_numa: gpu.memory_numa,
        cpus: numbers(gpu.cpus.as_ref()),
        pcie,
        pcie_trained: gpu.pcie_trained.unwrap_or(pcie),
        throttle: gpu.throttle,
        nvlink_version: version,
        nvlink_count: if version.is_some() { joined.max(default_count) } else { 0 },
        links,
        fabric: gpu.fabric.clone(),
        product,
        profiles,
        mig,
    })
}

/// The machine with the identity fields of its devices written into it.
fn completed(machine: &Machine, gpus: &[GpuFacts], nics: &[NicFacts]) -> Result<Machine, MachineError> {
    let mut parts = machine.clone().into_parts();
    let refused = |field: String| {
        move |problem: gantry_topology::machine::IdError| MachineError { field, problem: problem.to_string() }
    };
    for (gpu, facts) in parts.gpus.iter_mut().zip(gpus) {
        let field = |name: &str| format!("gpus[{}].{name}", facts.index);
        gpu.uuid = Some(facts.uuid.parse().map_err(refused(field("uuid")))?);
        gpu.bus_id = Some(facts.address.to_string().parse().map_err(refused(field("busId")))?);
        gpu.model = Some(facts.model.clone());
        gpu.memory_mib = Some(facts.memory_mib);
        gpu.minor = Some(facts.minor);
        gpu.serial = Some(facts.serial.clone());
        let (major, minor) = facts.compute_capability;
        gpu.compute_capability = Some(format!("{major}.{minor}"));
        gpu.pcie = Some(facts.pcie);
        gpu.mig.clone_from(&facts.mig);
    }
    for (position, (nic, facts)) in parts.nics.iter_mut().zip(nics).enumerate() {
        let address = facts.address.to_string().parse();
        nic.bus_id = Some(address.map_err(refused(format!("nics[{position}].busId")))?);
    }
    Machine::new(parts)
}

fn numbers(list: Option<&IdList>) -> Vec<u32> {
    list.map(|list| list.iter().collect()).unwrap_or_default()
}

/// The NUMA node of a GPU that shares a root complex or NUMA node with NIC `position`.
fn numa_of_near_gpu(machine: &Machine, gpus: &[GpuFacts], position: usize) -> Option<u32> {
    gpus.iter()
        .find(|gpu| machine.paths().get(gpu.index, gpus.len() + position) <= PathClass::Node)
        .and_then(|gpu| gpu.numa)
}

/// For each GPU its links, by link number; every one is active until the control file states otherwise. Direct bundles take
/// the lowest numbers, in the order of the peers; links into NVSwitches follow, spread as evenly as on the real boards.
fn ports(machine: &Machine) -> Vec<Vec<Remote>> {
    let mut ports: Vec<Vec<Remote>> = vec![Vec::new(); machine.gpus().len()];
    for bundle in machine.nvlinks() {
        let [a, b] = bundle.gpus.map(usize::from);
        for _ in 0..bundle.links {
            let (at_a, at_b) = (next_link(&ports, a), next_link(&ports, b));
            push(&mut ports, a, Remote::Gpu { index: b, link: at_b });
            push(&mut ports, b, Remote::Gpu { index: a, link: at_a });
        }
    }
    let switches = switches(machine);
    for (gpu, links) in ports.iter_mut().enumerate() {
        let count = usize::from(machine.switch_links(gpu));
        links.extend((0..count).map(|link| Remote::Switch { index: link * switches / count }));
    }
    ports
}

/// How many NVSwitches the machine's GPUs are joined to: 6 on the V100 and A100 boards, 4 on Hopper's, 2 on Blackwell's.
fn switches(machine: &Machine) -> usize {
    let widest = (0..machine.gpus().len()).map(|gpu| machine.switch_links(gpu)).max().unwrap_or(0);
    let version = machine.gpus().iter().filter_map(|gpu| gpu.nvlink.and_then(|ports| ports.version)).max();
    match (widest, version) {
        (0, _) => 0,
        (_, Some(5..)) => 2,
        (_, Some(4)) => 4,
        (13.., _) => 4,
        _ => 6,
    }
}

fn next_link(ports: &[Vec<Remote>], gpu: usize) -> u8 {
    // A machine allows far fewer links per GPU than a byte counts.
    ports.get(gpu).and_then(|links| u8::try_from(links.len()).ok()).unwrap_or(u8::MAX)
}

fn push(ports: &mut [Vec<Remote>], gpu: usize, remote: Remote) {
    if let Some(links) = ports.get_mut(gpu) {
        links.push(remote);
    }
}

fn parse_capability(text: &str) -> Option<(u8, u8)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// `12.8` as 12080.
fn cuda_number(text: &str) -> i32 {
    let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
    major.parse().unwrap_or(0) * 1000 + minor.parse().unwrap_or(0) * 10
}

/// A random-looking version 4 UUID that depends on the machine's name and the index alone.
fn uuid_of(machine: &str, index: usize) -> String {
    format!("GPU-{}", uuid_text(machine, index as u64, 4))
}

/// A UUID of the given version that depends on the text and the salt alone.
fn uuid_text(text: &str, salt: u64, version: u8) -> String {
    let high = fnv(text, salt.wrapping_mul(2));
    let low = fnv(text, salt.wrapping_mul(2).wrapping_add(1));
    format!(
        "{:08x}-{:04x}-{version}{:03x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        0x8000 | ((low >> 48) & 0x3fff),
        low & 0xffff_ffff_ffff
    )
}

/// FNV-1a over the name and the salt, stirred so that neighbouring salts differ in every digit.
pub(crate) fn fnv(text: &str, salt: u64) -> u64 {
    let hash = text.bytes().chain(salt.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ (hash >> 29)
}

#[cfg(test)]
mod tests;
