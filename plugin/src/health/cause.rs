//! What can be wrong with a GPU or with NVML as a whole, what proves that it is over, and how each is called. Values alone: the book
//! decides.

use std::fmt;

use gantry_topology::GpuUuid;

use super::{Class, Extent};

/// Why nothing can be known of any GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outage {
    /// What is the matter.
    pub reason: String,
    /// What is missing.
    pub kind: OutageKind,
}

/// What is missing where nothing can be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutageKind {
    /// The driver itself is gone; when it is back, the GPUs have been reset.
    DriverGone,
    /// NVML cannot be loaded, which tells nothing of the driver: a node without one, or one that is not installed yet.
    LibraryMissing,
    /// NVML fails though it is there.
    Failing,
}

/// Why a GPU cannot be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// What is the matter.
    pub reason: String,
    /// Whether the GPU is off the bus, so that it is reset when it answers again; otherwise questions to it fail.
    pub off_bus: bool,
}

/// What makes a GPU unhealthy, the least of it first. A closed set: labels of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It has counted uncorrected memory errors.
    Uncorrected,
    /// A repair of its memory waits for a reset.
    RepairPending,
    /// It cannot be reached.
    Lost,
    /// The driver asks for a reset or the like.
    RecoveryAction,
    /// A repair of its memory has failed.
    RepairFailed,
    /// An Xid of this class.
    Xid(Class),
    /// NVML fails.
    Nvml,
    /// The driver is gone.
    Driver,
}

/// What a GPU is called in what is told of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuName {
    /// Its UUID.
    Uuid(GpuUuid),
    /// Its place in NVML's count: it was out of reach from the start, and has told no UUID.
    Place(u8),
}

/// One thing that is wrong with a GPU or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The GPU.
    pub gpu: GpuName,
    /// How much of it.
    pub extent: Extent,
    /// What kind of thing.
    pub cause: Cause,
    /// In words a person can act on.
    pub reason: String,
}

/// What proves that a fault is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The driver went and came back.
    DriverReloaded,
    /// The GPU was off the bus and answers again.
    Answers,
    /// The kernel has bound the GPU to its driver anew.
    BoundAnew,
    /// The driver asked for a reset and asks for nothing now.
    WishGranted,
    /// A repair of memory waited for a reset and waits no more.
    Repaired,
    /// Volatile memory errors are counted from the start again.
    CountedAnew,
    /// The MIG instance is gone, or was made anew.
    InstanceGone,
    /// The NVLinks went down and are up again.
    LinksUp,
    /// The node was rebooted.
    Rebooted,
    /// A person says so.
    Lifted,
}

/// A fault that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The GPU.
    pub gpu: GpuUuid,
    /// What was wrong.
    pub reason: String,
    /// What proves that it is over.
    pub proof: Proof,
}

impl Outage {
    /// What makes each GPU unhealthy while it lasts.
    pub(super) fn cause(&self) -> Cause {
        match self.kind {
            OutageKind::DriverGone => Cause::Driver,
            OutageKind::LibraryMissing | OutageKind::Failing => Cause::Nvml,
        }
    }
}

impl GpuName {
    /// The UUID, if it is known.
    pub fn uuid(&self) -> Option<&GpuUuid> {
        match self {
            Self::Uuid(uuid) => Some(uuid),
            Self::Place(_) => None,
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
            Self::Place(index) => write!(f, "GPU {index}"),
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
            Self::Answers => "it was off the bus and answers again",
            Self::BoundAnew => "the kernel has bound it to its driver anew",
            Self::WishGranted => "the driver asked for a reset and asks for nothing now",
            Self::Repaired => "the repair of its memory that waited for a reset is done",
            Self::CountedAnew => {
                "its volatile memory errors are counted from the start again, as after a reset"
            }
            Self::InstanceGone => "the MIG instance is gone or was made anew",
            Self::LinksUp => "its NVLinks are up again",
            Self::Rebooted => "the node was rebooted",
            Self::Lifted => "its quarantine was lifted by hand",
        })
    }
}
