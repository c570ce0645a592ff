//! What a machine's GPUs and links lack at the moment: peer-to-peer access, PCIe lanes, NVLinks, clock rate.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{MachineError, MachineParts, PcieLink};

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
