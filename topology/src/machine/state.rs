//! What a machine's GPUs and links lack at the moment: peer-to-peer access, PCIe lanes, NVLinks, clock rate.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Gpu, Machine, MachineError, MachineParts, PcieLink};

/// Two GPUs without peer-to-peer access. Data between them goes through the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PeerRefusal {
    /// Indices of the two GPUs, the lower first.
    pub gpus: [u8; 2],
    /// NVML's reason.
    pub status: PeerStatus,
}

/// NVML's reasons for a pair without peer-to-peer access, as `nvidia-smi topo -p2p r` abbreviates them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
pub enum PeerStatus {
    /// The chipset does not support it.
    #[serde(rename = "CNS")]
    Chipset,
    /// A GPU does not support it.
    #[serde(rename = "GNS")]
    Gpu,
    /// The path between the GPUs does not support it.
    #[serde(rename = "TNS")]
    Topology,
    /// The operator disabled it by a setting of the driver.
    #[serde(rename = "DR")]
    Disabled,
    /// It is not supported, without a reason.
    #[serde(rename = "NS")]
    NotSupported,
}

impl fmt::Display for PeerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Chipset => "the chipset does not support it",
            Self::Gpu => "a GPU does not support it",
            Self::Topology => "the path does not support it",
            Self::Disabled => "a driver setting disables it",
            Self::NotSupported => "not supported",
        })
    }
}

/// The cause of a GPU's reduced clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Throttle {
    /// The GPU is too hot.
    Thermal,
    /// An external power brake, such as that of a power supply that fails.
    PowerBrake,
    /// Another slowdown that the GPU's own protection requested.
    Hardware,
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thermal => "heat",
            Self::PowerBrake => "a power brake",
            Self::Hardware => "a slowdown by its own protection",
        })
    }
}

/// What one GPU lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Degradation {
    /// Its PCIe link is narrower or slower than GPU and slot allow.
    Pcie {
        /// The link as it is trained.
        trained: PcieLink,
        /// The best link of GPU and slot, if known.
        best: Option<PcieLink>,
    },
    /// It has fewer NVLinks up than others of its model.
    NvLinks {
        /// Links that are up.
        up: u32,
        /// The most links up of a GPU of its model.
        of: u32,
    },
    /// Its clocks are held down.
    Throttled(Throttle),
}

impl fmt::Display for Degradation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let link = |link: &PcieLink| format!("PCIe {} x{}", link.generation, link.width);
        match self {
            Self::Pcie { trained, best: Some(best) } => {
                write!(f, "link trained at {} instead of {}", link(trained), link(best))
            }
            Self::Pcie { trained, best: None } => write!(f, "link trained at {} only", link(trained)),
            Self::NvLinks { up, of } => write!(f, "{up} of {of} NVLinks up"),
            Self::Throttled(why) => write!(f, "clocks held down by {why}"),
        }
    }
}

impl Machine {
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
}

/// Sorts the pairs without peer-to-peer access, and checks them.
pub(super) fn normalise_refusals(parts: &mut MachineParts) -> Result<(), MachineError> {
    let gpus = parts.gpus.len();
    for (position, refusal) in parts.no_peer_access.iter_mut().enumerate() {
        refusal.gpus.sort_unstable();
        let [a, b] = refusal.gpus.map(usize::from);
        let field = format!("noPeerAccess[{position}].gpus");
        if b >= gpus {
            return Err(MachineError::new(field, format!("GPU {b} does not exist, there are {gpus}")));
        }
        if a == b {
            return Err(MachineError::new(field, format!("GPU {a} is paired with itself")));
        }
    }
    parts.no_peer_access.sort_unstable_by_key(|refusal| refusal.gpus);
    if let Some(pair) = parts.no_peer_access.windows(2).find(|pair| pair[0].gpus == pair[1].gpus) {
        return Err(MachineError::new("noPeerAccess", format!("GPUs {:?} are named twice", pair[0].gpus)));
    }
    Ok(())
}
