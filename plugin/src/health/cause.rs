//! Causes of unhealthy GPUs, proofs of recovery, and their names. Values only; the health tracker decides.

use std::fmt;

use gantry_topology::GpuUuid;

use super::{Class, Extent};

/// Why no GPU can be queried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outage {
    /// Description of the problem.
    pub reason: String,
    /// What is missing.
    pub kind: OutageKind,
}

/// The cause of an outage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutageKind {
    /// The driver is gone; when it is back, the GPUs have been reset.
    DriverGone,
    /// NVML cannot be loaded, which says nothing about the driver: the node has none, or it is not installed
    /// yet.
    LibraryMissing,
    /// NVML is present but fails.
    Failing,
}

/// Why a GPU cannot be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// Description of the problem.
    pub reason: String,
    /// Whether the GPU is off the bus, so that it has been reset when it responds again; otherwise queries
    /// fail.
    pub off_bus: bool,
}

/// What makes a GPU unhealthy, in ascending severity. A closed set: labels of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Uncorrected memory errors were counted.
    Uncorrected,
    /// A memory repair waits for a reset.
    RepairPending,
    /// The GPU cannot be reached.
    Lost,
    /// The driver requests a recovery action.
    RecoveryAction,
    /// A memory repair failed.
    RepairFailed,
    /// An Xid of this class.
    Xid(Class),
    /// NVML fails.
    Nvml,
    /// The driver is gone.
    Driver,
}

/// Identification of a GPU in messages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuName {
    /// Its UUID.
    Uuid(GpuUuid),
    /// NVML index: the GPU was unreachable from the start, so its UUID is unknown.
    Index(u8),
}

/// One problem of a GPU or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The GPU.
    pub gpu: GpuName,
    /// The affected part.
    pub extent: Extent,
    /// The kind of problem.
    pub cause: Cause,
    /// Description with the action to take.
    pub reason: String,
}

/// Evidence that a fault is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The driver was unloaded and loaded again.
    DriverReloaded,
    /// The GPU was off the bus and responds again.
    Responds,
    /// The kernel bound the GPU to its driver again.
    Rebound,
    /// The driver requested a reset and requests nothing now.
    ActionCleared,
    /// A memory repair waited for a reset and is done.
    Repaired,
    /// The volatile memory error count restarted.
    CountersReset,
    /// The MIG instance is gone or was replaced.
    InstanceGone,
    /// The NVLinks went down and are up again.
    LinksUp,
    /// The node was rebooted.
    Rebooted,
    /// The operator lifted the quarantine.
    Lifted,
}

/// A cleared fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Reason of the fault.
    pub reason: String,
    /// The evidence.
    pub proof: Proof,
}

impl Outage {
    /// The cause of each GPU's problem during the outage.
    pub(super) fn cause(&self) -> Cause {
        match self.kind {
            OutageKind::DriverGone => Cause::Driver,
            OutageKind::LibraryMissing | OutageKind::Failing => Cause::Nvml,
        }
    }
}

impl GpuName {
    /// The UUID, if known.
    pub fn uuid(&self) -> Option<&GpuUuid> {
        match self {
            Self::Uuid(uuid) => Some(uuid),
            Self::Index(_) => None,
        }
    }
}

impl From<GpuUuid> for GpuName {
    fn from(uuid: GpuUuid) -> Self {
        Self::Uuid(uuid)
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(uuid) => write!(f, "{uuid}"),
            Self::Index(index) => write!(f, "GPU {index}"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncorrected => f.write_str("ecc-uncorrected"),
            Self::RepairPending => f.write_str("memory-repair-pending"),
            Self::Lost => f.write_str("lost"),
            Self::RecoveryAction => f.write_str("recovery-action"),
            Self::RepairFailed => f.write_str("memory-repair-failed"),
            Self::Xid(class) => write!(f, "xid-{class}"),
            Self::Nvml => f.write_str("nvml"),
            Self::Driver => f.write_str("driver"),
        }
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DriverReloaded => "the driver was reloaded",
            Self::Responds => "it was off the bus and responds again",
            Self::Rebound => "the kernel bound it to its driver again",
            Self::ActionCleared => "the driver requested a reset and requests nothing now",
            Self::Repaired => "its memory repair that waited for a reset is done",
            Self::CountersReset => "its volatile memory error count restarted, as after a reset",
            Self::InstanceGone => "the MIG instance is gone or was replaced",
            Self::LinksUp => "its NVLinks are up again",
            Self::Rebooted => "the node was rebooted",
            Self::Lifted => "its quarantine was lifted by the operator",
        })
    }
}
