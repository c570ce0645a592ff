//! One node's GPUs, NICs and the links among them, and their one serialised form, the *machine file*. A [`Machine`] is valid by construction. It
//! contains the hardware, neither allocations nor health.

mod ids;
mod mig;
mod path;
mod state;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::set::GpuSet;

pub use ids::{GpuUuid, IdError, IdList, MigUuid, PcieAddress};
pub(crate) use mig::unit_mask;
pub use mig::{ComputeInstance, GpuInstance, MAX_MEMORY_UNITS, Mig, MigAttributes, split_profile};
pub use path::{PathClass, PathMatrix};
pub use state::{Degradation, PeerRefusal, PeerStatus, Throttle};

/// The most GPUs one machine may have. Choice tables go to 16; larger machines are chosen on by search.
pub const MAX_GPUS: usize = 32;
/// The most NICs one machine may have (the largest printed matrix seen shows 56 of 76).
pub const MAX_NICS: usize = 128;
/// The most NVLinks one GPU may have (NVML's own array bound, `NVML_NVLINK_MAX_LINKS`, is 18 up to Blackwell).
pub const MAX_LINKS_PER_GPU: u8 = 36;

/// One node's devices and links, checked: indices are positions, the path matrix is square and symmetric, bundles name
/// existing GPUs once, identifiers are unique.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(try_from = "MachineParts", into = "MachineParts")]
#[schemars(with = "MachineParts")]
pub struct Machine(MachineParts);

/// The fields of a machine file, in the order they are written. Unchecked: [`Machine::new`] checks them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineParts {
    /// The common name of this kind of machine, e.g. `dgx-a100`. Free text for messages, and a fallback for the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Driver and host facts that bandwidths depend on.
    #[serde(default, skip_serializing_if = "Host::is_empty")]
    pub host: Host,
    /// The GPUs; `gpus[i].index == i`, the order nvidia-smi and NVML enumerate them in.
    #[schemars(length(max = MAX_GPUS))]
    pub gpus: Vec<Gpu>,
    /// The network adapters, in the order `nvidia-smi topo -m` prints them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_NICS))]
    pub nics: Vec<Nic>,
    /// NVLinks that join two GPUs directly. Links into an NVSwitch are counted in [`Gpu::nvlink`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_GPUS * (MAX_GPUS - 1) / 2))]
    pub nvlinks: Vec<NvLinkBundle>,
    /// The pairs of GPUs without peer-to-peer access, as NVML reports it. For every other pair it works or is unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_GPUS * (MAX_GPUS - 1) / 2))]
    pub no_peer_access: Vec<PeerRefusal>,
    /// The PCIe path class of every pair, GPUs first, then NICs, also where an NVLink joins the pair.
    #[schemars(length(max = MAX_GPUS + MAX_NICS))]
    pub paths: PathMatrix,
}

/// The host of the GPUs: driver, CUDA version, and the CPU. The link between its sockets carries SYS traffic.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Host {
    /// Driver version as NVML prints it, e.g. `570.124.06`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Newest CUDA version the driver serves, e.g. `12.8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// CPU model as `/proc/cpuinfo` names it, e.g. `AMD EPYC 7742 64-Core Processor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
}

impl Host {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One physical GPU. Facts that `nvidia-smi topo -m` does not print are `None` in a machine read from its output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// Position in the machine, NVML's index.
    pub index: u8,
    /// NVML's UUID, `GPU-xxxxxxxx-...`: the device ID that kubelet counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<GpuUuid>,
    /// PCIe address in sysfs form, `0000:07:00.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_id: Option<PcieAddress>,
    /// Product name, e.g. `NVIDIA A100-SXM4-80GB`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Total memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Minor number of `/dev/nvidiaN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Board serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// CUDA compute capability, `major.minor`, e.g. `8.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    /// NUMA nodes the GPU is near, usually one; `None` where unknown (blank or `N/A`), which is not node 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<IdList>,
    /// NUMA node of the GPU's own memory (`GPU NUMA ID`, coherent platforms such as GH200).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_numa: Option<u16>,
    /// CPUs the GPU is near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<IdList>,
    /// Widest PCIe link the GPU can run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The PCIe link as it is trained, where it is narrower or slower than `pcie`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie_trained: Option<PcieLink>,
    /// Why the GPU's clocks are held down, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<Throttle>,
    /// NVLink ports, if the GPU has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvLinkPorts>,
    /// Membership of a multi-node NVLink domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// The MIG layout, if the GPU supports MIG. The one part that changes at run time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
}

/// Generation and width of a PCIe link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PcieLink {
    /// PCIe generation, 1 to 7.
    pub generation: u8,
    /// Lanes, 1 to 32.
    pub width: u8,
}

impl PcieLink {
    /// Whether there are such links.
    fn exists(self) -> bool {
        (1..=7).contains(&self.generation) && (1..=32).contains(&self.width)
    }
}

/// The NVLink side of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvLinkPorts {
    /// NVLink version as NVML reports it (1 to 5), if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u8>,
    /// Active links that end in an NVSwitch. Two GPUs of one island with such links reach each other at the lesser of the two counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub switch_links: u8,
    /// The group of joined NVSwitches that the links end in: GPUs reach each other only within one. 0 if all are joined.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub island: u8,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_zero(value: &u8) -> bool {
    *value == 0
}

/// The multi-node NVLink domain of a GPU (NVML's GPU fabric info).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fabric {
    /// UUID of the NVLink domain.
    pub cluster_uuid: String,
    /// Clique within the domain; GPUs of one clique reach each other.
    pub clique: u32,
}

/// One network adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Nic {
    /// RDMA device name (`mlx5_0`) or what the matrix header calls it (`NIC0`).
    pub name: String,
    /// Device behind a `NICn` header, from the legend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// PCIe address in sysfs form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus_id: Option<PcieAddress>,
    /// NUMA node, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u16>,
}

/// Models of GPUs as one line, with counts if there are several. The model of a GPU without one is `unknown`.
pub fn models<'a>(models: impl Iterator<Item = &'a str>) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for model in models {
        *counts.entry(if model.is_empty() { "unknown" } else { model }).or_default() += 1;
    }
    match counts.len() {
        0 => String::new(),
        1 => counts.into_keys().collect(),
        _ => {
            let counted = counts.into_iter().map(|(model, count)| format!("{count}x {model}"));
            counted.collect::<Vec<_>>().join(", ")
        }
    }
}

/// NVLinks that join two GPUs without a switch between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvLinkBundle {
    /// Indices of the two GPUs, the lower first.
    pub gpus: [u8; 2],
    /// The number of active links between them.
    pub links: u8,
}

impl Machine {
    /// Checks `parts` and makes a machine of them. Bundles are put in order, lower index first.
    ///
    /// # Errors
    /// The first contradiction found, with the path of its field.
    pub fn new(mut parts: MachineParts) -> Result<Self, MachineError> {
        check_sizes(&parts)?;
        check_gpus(&mut parts.gpus)?;
        check_nics(&parts.nics, &parts.gpus)?;
        normalise_bundles(&mut parts)?;
        state::normalise_refusals(&mut parts)?;
        Ok(Self(parts))
    }

    /// The name of the machine, `machine` if it has none.
    pub fn name(&self) -> &str {
        self.0.name.as_deref().unwrap_or("machine")
    }

    /// Driver and CPU.
    pub fn host(&self) -> &Host {
        &self.0.host
    }

    /// The GPUs, by index.
    pub fn gpus(&self) -> &[Gpu] {
        &self.0.gpus
    }

    /// The NICs, in matrix order.
    pub fn nics(&self) -> &[Nic] {
        &self.0.nics
    }

    /// Direct NVLink bundles, sorted by their GPUs.
    pub fn nvlinks(&self) -> &[NvLinkBundle] {
        &self.0.nvlinks
    }

    /// PCIe path classes of all pairs: GPUs first, then NICs.
    pub fn paths(&self) -> &PathMatrix {
        &self.0.paths
    }

    /// Direct NVLinks between GPUs `a` and `b`; 0 if none or if an index is out of range.
    pub fn direct_nvlinks(&self, a: usize, b: usize) -> u8 {
        let (low, high) = (a.min(b), a.max(b));
        self.0
            .nvlinks
            .iter()
            .find(|bundle| usize::from(bundle.gpus[0]) == low && usize::from(bundle.gpus[1]) == high)
            .map_or(0, |bundle| bundle.links)
    }

    /// Links GPU `a` has into the NVSwitch fabric; 0 if none or if the index is out of range.
    pub fn switch_links(&self, a: usize) -> u8 {
        self.0.gpus.get(a).and_then(|gpu| gpu.nvlink).map_or(0, |ports| ports.switch_links)
    }

    /// The GPUs with fewer NVLinks up than they should have by [`Machine::expected_nvlinks`], by index, with the lack in words.
    pub fn links_down(&self) -> Vec<(u8, String)> {
        let down = |(at, gpu): (usize, &Gpu)| {
            let most = self.expected_nvlinks(at);
            let down = most.checked_sub(self.nvlinks_of(at)).filter(|down| *down > 0)?;
            Some((gpu.index, format!("{down} of {most} NVLinks down")))
        };
        self.gpus().iter().enumerate().filter_map(down).collect()
    }

    /// The group of joined NVSwitches that GPU `a` has its links into; 0 also if it has none.
    pub fn switch_island(&self, a: usize) -> u8 {
        self.0.gpus.get(a).and_then(|gpu| gpu.nvlink).map_or(0, |ports| ports.island)
    }

    /// Links by which `a` reaches `b` through NVSwitches; 0 if they have none, or into switches that are not joined.
    pub fn switch_links_between(&self, a: usize, b: usize) -> u8 {
        if a == b || self.switch_island(a) != self.switch_island(b) {
            return 0;
        }
        self.switch_links(a).min(self.switch_links(b))
    }

    /// NVLinks by which `a` reaches `b`, directly or through NVSwitches: the number nvidia-smi prints after `NV`.
    pub fn nvlinks_between(&self, a: usize, b: usize) -> u8 {
        if a == b {
            return 0;
        }
        self.direct_nvlinks(a, b).saturating_add(self.switch_links_between(a, b))
    }

    /// The link of a pair as `nvidia-smi topo -m` prints it. Devices count GPUs first, then NICs.
    pub fn link(&self, a: usize, b: usize) -> Link {
        if a == b {
            return Link::Itself;
        }
        match self.nvlinks_between(a, b) {
            0 => Link::Pcie(self.0.paths.get(a, b)),
            links => Link::NvLink(links),
        }
    }

    /// The best link between two GPUs: most NVLinks, else the nearest PCIe path. Empty with fewer than two GPUs.
    pub fn best_link(&self) -> String {
        let gpus = self.gpus().len();
        let links = (0..gpus).flat_map(|a| (0..a).map(move |b| self.link(a, b)));
        links
            .max_by_key(|link| match link {
                Link::NvLink(count) => (1, i32::from(*count)),
                Link::Pcie(class) => (0, -(*class as i32)),
                Link::Itself => (-1, 0),
            })
            .map(|link| link.to_string())
            .unwrap_or_default()
    }

    /// The GPUs by the NUMA nodes that they name, in the order of their first GPU; `None` for GPUs of unknown nodes.
    pub fn numa_nodes(&self) -> Vec<(Option<&IdList>, GpuSet)> {
        let mut nodes: Vec<(Option<&IdList>, GpuSet)> = Vec::new();
        for (index, gpu) in self.gpus().iter().enumerate() {
            let named = gpu.numa.as_ref();
            match nodes.iter_mut().find(|(known, _)| *known == named) {
                Some((_, gpus)) => *gpus = gpus.with(index),
                None => nodes.push((named, GpuSet::single(index))),
            }
        }
        nodes
    }

    /// The pairs without peer-to-peer access, sorted by their GPUs.
    pub fn no_peer_access(&self) -> &[PeerRefusal] {
        &self.0.no_peer_access
    }

    /// What GPU `index` lacks; nothing if there is no such GPU.
    pub fn degradations(&self, index: usize) -> Vec<Degradation> {
        let Some(gpu) = self.gpus().get(index) else {
            return Vec::new();
        };
        let pcie = gpu.pcie_trained.map(|trained| Degradation::Pcie { trained, best: gpu.pcie });
        let up = self.nvlinks_of(index);
        // GPUs with direct links may differ by design; what a GPU with fewer links lacks is shown all the same.
        let alike = (0..self.gpus().len()).filter(|other| self.gpus()[*other].model == gpu.model);
        let most_alike = alike.filter(|_| up > 0).map(|other| self.nvlinks_of(other)).max().unwrap_or(0);
        let of = most_alike.max(self.expected_nvlinks(index));
        let links = (up < of).then_some(Degradation::NvLinks { up, of });
        let throttled = gpu.throttle.map(Degradation::Throttled);
        pcie.into_iter().chain(links).chain(throttled).collect()
    }

    /// Whether GPU `index` is worth less than an equal one: it is throttled, its PCIe link is trained below its best, or it
    /// has fewer NVLinks up than equal GPUs have by design.
    pub fn is_degraded(&self, index: usize) -> bool {
        let is_slower = |gpu: &Gpu| gpu.throttle.is_some() || gpu.pcie_trained.is_some();
        self.gpus().get(index).is_some_and(is_slower) || self.nvlinks_of(index) < self.expected_nvlinks(index)
    }

    /// The NVLinks that GPU `index` should have up by comparison with equal GPUs of the machine; 0 if the comparison shows nothing.
    /// Behind NVSwitches equal GPUs have equally many. Direct links differ by design, but on a board that links every GPU
    /// to several, none has no link. A bridge joins only some GPUs of a machine. In MIG mode links are not used.
    pub fn expected_nvlinks(&self, index: usize) -> u32 {
        let is_compared = |gpu: &Gpu| gpu.nvlink.is_some() && gpu.mig.as_ref().is_none_or(|mig| !mig.enabled);
        let Some(gpu) = self.gpus().get(index).filter(|gpu| is_compared(gpu)) else {
            return 0;
        };
        let equals = self.gpus().iter().enumerate();
        let equals = equals.filter(|(_, other)| is_compared(other) && other.model == gpu.model);
        let equals: Vec<usize> = equals.map(|(at, _)| at).collect();
        let switched = equals.iter().map(|at| u32::from(self.switch_links(*at))).max().unwrap_or(0);
        if switched > 0 {
            return switched;
        }
        let is_board = gpu.model.as_ref().is_some_and(|model| model.contains("SXM"))
            || equals.iter().any(|at| self.direct_peers(*at) > 1);
        if self.nvlinks_of(index) > 0 || !is_board {
            return 0;
        }
        equals.into_iter().map(|at| self.nvlinks_of(at)).max().unwrap_or(0)
    }

    /// GPUs to which a GPU has direct NVLinks.
    fn direct_peers(&self, index: usize) -> usize {
        self.nvlinks().iter().filter(|bundle| bundle.gpus.map(usize::from).contains(&index)).count()
    }

    /// NVLinks of a GPU that are up, to GPUs and to switches.
    pub fn nvlinks_of(&self, index: usize) -> u32 {
        let bundles = self.nvlinks().iter();
        let direct = bundles.filter(|bundle| bundle.gpus.map(usize::from).contains(&index));
        direct.map(|bundle| u32::from(bundle.links)).sum::<u32>() + u32::from(self.switch_links(index))
    }

    /// The unchecked parts, to change and check again.
    pub fn into_parts(self) -> MachineParts {
        self.0
    }
}

/// An error in a machine file. `field` is the place in the file, e.g. `nvlinks[3].gpus`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct MachineError {
    /// Path of the offending field.
    pub field: String,
    /// The defect, and the allowed values.
    pub problem: String,
}

impl MachineError {
    pub(super) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

impl TryFrom<MachineParts> for Machine {
    type Error = MachineError;

    fn try_from(parts: MachineParts) -> Result<Self, MachineError> {
        Self::new(parts)
    }
}

impl From<Machine> for MachineParts {
    fn from(machine: Machine) -> Self {
        machine.0
    }
}

/// The link between two devices, as the matrix of `nvidia-smi topo -m` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// The device itself, `X`.
    Itself,
    /// A bonded set of so many NVLinks, `NV#`, direct or through NVSwitches.
    NvLink(u8),
    /// A PCIe path.
    Pcie(PathClass),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Itself => f.pad("X"),
            Self::NvLink(links) => f.pad(&format!("NV{links}")),
            Self::Pcie(class) => f.pad(class.as_str()),
        }
    }
}

fn check_sizes(parts: &MachineParts) -> Result<(), MachineError> {
    if parts.gpus.len() > MAX_GPUS {
        return Err(MachineError::new(
            "gpus",
            format!("{} GPUs, at most {MAX_GPUS} are allowed", parts.gpus.len()),
        ));
    }
    if parts.nics.len() > MAX_NICS {
        return Err(MachineError::new(
            "nics",
            format!("{} NICs, at most {MAX_NICS} are allowed", parts.nics.len()),
        ));
    }
    let devices = parts.gpus.len() + parts.nics.len();
    if parts.paths.len() != devices {
        return Err(MachineError::new(
            "paths",
            format!(
                "{} rows for {} GPUs and {} NICs, {devices} are needed",
                parts.paths.len(),
                parts.gpus.len(),
                parts.nics.len()
            ),
        ));
    }
    Ok(())
}

fn check_gpus(gpus: &mut [Gpu]) -> Result<(), MachineError> {
    for (position, gpu) in gpus.iter_mut().enumerate() {
        if let Some(mig) = &mut gpu.mig {
            mig::check(mig, &format!("gpus[{position}]"))?;
        }
    }
    check_mig_uuids(gpus)?;
    for (position, gpu) in gpus.iter().enumerate() {
        let field = |name: &str| format!("gpus[{position}].{name}");
        if usize::from(gpu.index) != position {
            return Err(MachineError::new(field("index"), format!("is {}, must be {position}", gpu.index)));
        }
        for (name, link) in [("pcie", gpu.pcie), ("pcieTrained", gpu.pcie_trained)] {
            if link.is_some_and(|link| !link.exists()) {
                return Err(MachineError::new(field(name), "generation must be 1 to 7 and width 1 to 32"));
            }
        }
        if let Some(ports) = gpu.nvlink
            && ports.switch_links > MAX_LINKS_PER_GPU
        {
            return Err(MachineError::new(
                field("nvlink.switchLinks"),
                format!("is {}, at most {MAX_LINKS_PER_GPU} are allowed", ports.switch_links),
            ));
        }
        if let Some(version) = gpu.nvlink.and_then(|ports| ports.version)
            && !(1..=5).contains(&version)
        {
            return Err(MachineError::new(field("nvlink.version"), format!("is {version}, must be 1 to 5")));
        }
        for (other, earlier) in gpus[..position].iter().enumerate() {
            if let (Some(uuid), Some(known)) = (&gpu.uuid, &earlier.uuid)
                && uuid.as_str().eq_ignore_ascii_case(known.as_str())
            {
                return Err(MachineError::new(field("uuid"), format!("the same as gpus[{other}].uuid")));
            }
            if gpu.bus_id.is_some() && gpu.bus_id == earlier.bus_id {
                return Err(MachineError::new(field("busId"), format!("the same as gpus[{other}].busId")));
            }
            if let Some(minor) = gpu.minor.filter(|_| gpu.minor == earlier.minor) {
                let problem =
                    format!("is {minor}, the same as gpus[{other}].minor; each GPU has its own /dev/nvidiaN");
                return Err(MachineError::new(field("minor"), problem));
            }
        }
    }
    Ok(())
}

fn check_mig_uuids(gpus: &[Gpu]) -> Result<(), MachineError> {
    let mut seen = BTreeMap::new();
    for (position, gpu) in gpus.iter().enumerate() {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        for compute in instances.flat_map(|instance| &instance.compute) {
            if let Some(other) = seen.insert(compute.uuid.as_str().to_ascii_lowercase(), position) {
                return Err(MachineError::new(
                    format!("gpus[{position}].mig"),
                    format!("{} is the UUID of another MIG device too, in gpus[{other}].mig", compute.uuid),
                ));
            }
        }
    }
    Ok(())
}

fn check_nics(nics: &[Nic], gpus: &[Gpu]) -> Result<(), MachineError> {
    for (position, nic) in nics.iter().enumerate() {
        if let Some(bus_id) = &nic.bus_id {
            let is_same = |other: Option<&PcieAddress>| other == Some(bus_id);
            let of_nic = nics[..position].iter().position(|earlier| is_same(earlier.bus_id.as_ref()));
            let of_nic = of_nic.map(|other| format!("nics[{other}]"));
            let of_gpu = gpus.iter().position(|gpu| is_same(gpu.bus_id.as_ref()));
            if let Some(other) = of_nic.or_else(|| of_gpu.map(|other| format!("gpus[{other}]"))) {
                let problem =
                    format!("is {bus_id}, the same as {other}.busId; each device has its own address");
                return Err(MachineError::new(format!("nics[{position}].busId"), problem));
            }
        }
        let field = format!("nics[{position}].name");
        if nic.name.is_empty() {
            return Err(MachineError::new(field, "must not be empty"));
        }
        if let Some(other) = nics[..position].iter().position(|earlier| earlier.name == nic.name) {
            return Err(MachineError::new(field, format!("{:?} is the name of nics[{other}] too", nic.name)));
        }
    }
    Ok(())
}

fn normalise_bundles(parts: &mut MachineParts) -> Result<(), MachineError> {
    let gpus = parts.gpus.len();
    let mut total = vec![0u32; gpus];
    for (position, bundle) in parts.nvlinks.iter_mut().enumerate() {
        bundle.gpus.sort_unstable();
        let [a, b] = bundle.gpus.map(usize::from);
        let field = format!("nvlinks[{position}]");
        if b >= gpus {
            return Err(MachineError::new(
                format!("{field}.gpus"),
                format!("GPU {b} does not exist, there are {gpus}"),
            ));
        }
        if a == b {
            return Err(MachineError::new(format!("{field}.gpus"), format!("GPU {a} is linked to itself")));
        }
        if bundle.links == 0 || bundle.links > MAX_LINKS_PER_GPU {
            return Err(MachineError::new(
                format!("{field}.links"),
                format!("is {}, must be 1 to {MAX_LINKS_PER_GPU}", bundle.links),
            ));
        }
        total[a] += u32::from(bundle.links);
        total[b] += u32::from(bundle.links);
    }
    parts.nvlinks.sort_unstable_by_key(|bundle| bundle.gpus);
    if let Some(pair) = parts.nvlinks.windows(2).find(|pair| pair[0].gpus == pair[1].gpus) {
        return Err(MachineError::new("nvlinks", format!("GPUs {:?} are named twice", pair[0].gpus)));
    }
    for (index, gpu) in parts.gpus.iter().enumerate() {
        let links = total[index] + u32::from(gpu.nvlink.map_or(0, |ports| ports.switch_links));
        if links > u32::from(MAX_LINKS_PER_GPU) {
            return Err(MachineError::new(
                format!("gpus[{index}]"),
                format!("has {links} NVLinks, at most {MAX_LINKS_PER_GPU} are allowed"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
