//! Faults of GPUs: extent, cause, Xid, the evidence since and the proof of recovery, and their form in the API. Values
//! only; the health tracker decides.

use std::fmt;

use gantry_api::{FaultEvidence, GpuFault};
use gantry_topology::{GpuUuid, Mig};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Class;

/// The part of a GPU that a fault affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// The whole GPU with every MIG device.
    Gpu,
    /// One GPU instance with all its compute instances.
    GpuInstance(u32),
    /// One compute instance of a GPU instance.
    ComputeInstance(u32, u32),
}

/// An allocatable part of a GPU: the whole, or a MIG device by GPU instance and compute instance.
pub type Part = Option<(u32, u32)>;

impl Extent {
    /// The GPU instance, with the compute instance if only that is affected; `None` for the whole GPU.
    pub fn instance(self) -> Option<(u32, Option<u32>)> {
        match self {
            Self::Gpu => None,
            Self::GpuInstance(gi) => Some((gi, None)),
            Self::ComputeInstance(gi, ci) => Some((gi, Some(ci))),
        }
    }

    /// Whether a part of the GPU is affected. The whole GPU is affected by every fault.
    pub fn touches(self, part: Part) -> bool {
        match (self, part) {
            (Self::Gpu, _) | (_, None) => true,
            (Self::GpuInstance(gi), Some((of, _))) => gi == of,
            (Self::ComputeInstance(gi, ci), Some(of)) => (gi, ci) == of,
        }
    }

    /// Whether the MIG instance that contained `mig_device` still exists. The whole GPU always does.
    pub fn is_there(self, mig: Option<&Mig>, mig_device: Option<&str>) -> bool {
        let Some((gi, ci)) = self.instance() else {
            return true;
        };
        let Some(instance) = mig.and_then(|mig| mig.instances.iter().find(|instance| instance.id == gi))
        else {
            return false;
        };
        let mut compute =
            instance.compute.iter().filter(|compute| ci.is_none_or(|ci| compute.id == ci)).peekable();
        match (compute.peek(), mig_device) {
            // A GPU instance without its former compute instances is still the same.
            (None, _) => ci.is_none(),
            (Some(_), None) => true,
            (Some(_), Some(uuid)) => compute.any(|compute| compute.uuid.as_str() == uuid),
        }
    }

    /// The UUID of a MIG device in it, which identifies the instance.
    pub fn mig_device(self, mig: Option<&Mig>) -> Option<String> {
        let (gi, ci) = self.instance()?;
        let instance = mig?.instances.iter().find(|instance| instance.id == gi)?;
        let mut compute = instance.compute.iter();
        let found = compute.find(|compute| ci.is_none_or(|ci| compute.id == ci));
        found.map(|compute| compute.uuid.to_string())
    }
}

/// An Xid that makes a GPU or a part of it unhealthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub extent: Extent,
    pub xid: u64,
    /// Its class; the worst class gives the reason.
    pub class: Class,
    /// Description with the action to take.
    pub reason: String,
    /// Time of the Xid.
    pub since: Timestamp,
    /// UUID of a MIG device in the affected instance.
    pub mig_device: Option<String>,
    /// Version of the driver that raised it.
    pub driver: Option<String>,
    /// Vitals seen since the fault.
    pub evidence: FaultEvidence,
}

impl Fault {
    /// The stored form, for GPU `gpu` in boot `boot_id`.
    pub fn stored(&self, gpu: &GpuUuid, boot_id: &str) -> GpuFault {
        let (gpu_instance, compute_instance) = match self.extent.instance() {
            None => (None, None),
            Some((gi, ci)) => (Some(gi), ci),
        };
        GpuFault {
            gpu: gpu.to_string(),
            gpu_instance,
            compute_instance,
            mig_device: self.mig_device.clone(),
            xid: self.xid,
            class: self.class.to_string(),
            reason: self.reason.clone(),
            since: Time(self.since),
            boot_id: boot_id.to_owned(),
            driver: self.driver.clone(),
            evidence: self.evidence,
        }
    }

    /// Parses the stored form. An unknown class counts as resettable; `None` for an invalid GPU UUID.
    pub fn read(stored: GpuFault) -> Option<(GpuUuid, Self)> {
        let extent = match (stored.gpu_instance, stored.compute_instance) {
            (Some(gi), Some(ci)) => Extent::ComputeInstance(gi, ci),
            (Some(gi), None) => Extent::GpuInstance(gi),
            (None, _) => Extent::Gpu,
        };
        let fault = Self {
            extent,
            xid: stored.xid,
            class: Class::named(&stored.class).unwrap_or(Class::Resettable),
            reason: stored.reason,
            since: stored.since.0,
            mig_device: stored.mig_device,
            driver: stored.driver,
            evidence: stored.evidence,
        };
        Some((stored.gpu.parse().ok()?, fault))
    }
}

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
    /// NVML cannot be loaded, which shows nothing about the driver: the node has none, or it is not installed
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
    /// NVLinks are down.
    LinksDown,
    /// The NVLink fabric does not serve the GPU, or only in part.
    Fabric,
    /// No process may compute on the GPU.
    ComputeMode,
    /// The GPU is there, and queries of it fail.
    QueryFailed,
    /// The GPU cannot be reached.
    Lost,
    /// The driver requests a recovery action.
    RecoveryAction,
    /// A memory repair failed.
    RepairFailed,
    /// An Xid of this class.
    Xid(Class),
    Nvml,
    /// The driver is gone.
    Driver,
}

/// Identification of a GPU in messages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuName {
    Uuid(GpuUuid),
    /// NVML index: the GPU was unreachable from the start, so its UUID is unknown.
    Index(u8),
}

/// One problem of a GPU or a part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    pub gpu: GpuName,
    pub extent: Extent,
    /// The kind of problem.
    pub cause: Cause,
    /// The Xid, if it is the fault of one.
    pub xid: Option<u64>,
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

impl Proof {
    /// Whether it proves that the GPU was reset. `nvidia-smi -p 0` restarts error counts without a reset.
    pub fn is_reset(self) -> bool {
        match self {
            Self::DriverReloaded
            | Self::Responds
            | Self::Rebound
            | Self::ActionCleared
            | Self::Repaired
            | Self::Rebooted => true,
            Self::CountersReset | Self::InstanceGone | Self::LinksUp | Self::Lifted => false,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClearedFault {
    pub gpu: GpuUuid,
    /// Reason of the fault.
    pub reason: String,
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
            Self::LinksDown => f.write_str("nvlinks-down"),
            Self::Fabric => f.write_str("fabric"),
            Self::ComputeMode => f.write_str("compute-mode"),
            Self::QueryFailed => f.write_str("query-failed"),
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

#[cfg(test)]
mod tests {
    use gantry_topology::{ComputeInstance, GpuInstance};

    use super::*;

    fn mig(instances: &[(u32, &[(u32, &str)])]) -> Mig {
        let compute = |(id, uuid): &(u32, &str)| ComputeInstance {
            id: *id,
            uuid: uuid.parse().unwrap(),
            profile: "1g.5gb".to_owned(),
            attributes: None,
        };
        Mig {
            enabled: true,
            instances: instances
                .iter()
                .map(|(id, devices)| GpuInstance {
                    id: *id,
                    profile: "1g.5gb".to_owned(),
                    start: 0,
                    size: 1,
                    compute: devices.iter().map(compute).collect(),
                })
                .collect(),
        }
    }

    #[test]
    fn fault_affects_its_instance_and_the_whole_gpu() {
        let parts = [None, Some((1, 0)), Some((1, 1)), Some((2, 0))];
        for (extent, touched) in [
            (Extent::Gpu, [true, true, true, true]),
            (Extent::GpuInstance(1), [true, true, true, false]),
            (Extent::ComputeInstance(1, 1), [true, false, true, false]),
        ] {
            assert_eq!(parts.map(|part| extent.touches(part)), touched, "{extent:?}");
        }
    }

    #[test]
    fn replaced_instance_with_same_id_differs() {
        let before = mig(&[(1, &[(0, "MIG-a"), (1, "MIG-b")])]);
        let cut_anew = mig(&[(1, &[(0, "MIG-c")])]);
        let other = mig(&[(2, &[(0, "MIG-d")])]);
        let extent = Extent::GpuInstance(1);
        let device = extent.mig_device(Some(&before));
        assert_eq!(device.as_deref(), Some("MIG-a"));
        assert!(extent.is_there(Some(&before), device.as_deref()));
        for gone in [Some(&cut_anew), Some(&other), None] {
            assert!(!extent.is_there(gone, device.as_deref()));
        }
        assert!(extent.is_there(Some(&cut_anew), None), "nothing distinguishes the two");
        assert!(extent.is_there(Some(&mig(&[(1, &[])])), device.as_deref()));
        let one = Extent::ComputeInstance(1, 1);
        assert_eq!(one.mig_device(Some(&before)).as_deref(), Some("MIG-b"));
        assert!(!one.is_there(Some(&mig(&[(1, &[])])), Some("MIG-b")));
        assert!(Extent::Gpu.is_there(None, None));
    }

    #[test]
    fn cleared_error_count_is_not_counted_as_reset() {
        assert!(Proof::Repaired.is_reset() && !Proof::CountersReset.is_reset());
    }

    #[test]
    fn stored_fault_round_trips() {
        let gpu: GpuUuid = "GPU-0badcafe".parse().unwrap();
        let fault = Fault {
            extent: Extent::ComputeInstance(1, 0),
            xid: 48,
            class: Class::MigInstance,
            reason: "Xid 48: Double Bit ECC Error".to_owned(),
            since: Timestamp::from_second(1_700_000_000).unwrap(),
            mig_device: Some("MIG-a".to_owned()),
            driver: None,
            evidence: FaultEvidence { binding: Some(42), ..FaultEvidence::default() },
        };
        let stored = fault.stored(&gpu, "boot");
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(Fault::read(serde_json::from_str(&text).unwrap()), Some((gpu, fault)));
        let newer = GpuFault { class: "haunted".to_owned(), ..stored };
        assert_eq!(Fault::read(newer).unwrap().1.class, Class::Resettable);
    }
}
