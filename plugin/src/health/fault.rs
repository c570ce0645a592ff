//! One fault: where it lies, what it is, what has been seen of the GPU since. Values, and their form in the API.

use gantry_api::{FaultEvidence, GpuFault};
use gantry_topology::{GpuUuid, Mig};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Class;

/// How much of a GPU a fault touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// All of it, every MIG device included.
    Gpu,
    /// One GPU instance with all its compute instances.
    GpuInstance(u32),
    /// One compute instance of a GPU instance.
    ComputeInstance(u32, u32),
}

/// A part of a GPU that can be given out: the whole, or a MIG device by GPU instance and compute instance.
pub type Part = Option<(u32, u32)>;

impl Extent {
    /// The GPU instance, and its compute instance if it is that alone; `None` for the whole GPU.
    pub fn instance(self) -> Option<(u32, Option<u32>)> {
        match self {
            Self::Gpu => None,
            Self::GpuInstance(gi) => Some((gi, None)),
            Self::ComputeInstance(gi, ci) => Some((gi, Some(ci))),
        }
    }

    /// Whether a part of the GPU is touched. The whole is touched by whatever touches a part of it.
    pub fn touches(self, part: Part) -> bool {
        match (self, part) {
            (Self::Gpu, _) | (_, None) => true,
            (Self::GpuInstance(gi), Some((of, _))) => gi == of,
            (Self::ComputeInstance(gi, ci), Some(of)) => (gi, ci) == of,
        }
    }

    /// Whether the MIG instance is still there, and the one in which `mig_device` was seen. The whole GPU always is.
    pub fn is_there(self, mig: Option<&Mig>, mig_device: Option<&str>) -> bool {
        let Some((gi, ci)) = self.instance() else {
            return true;
        };
        let Some(instance) = mig.and_then(|mig| mig.instances.iter().find(|instance| instance.id == gi))
        else {
            return false;
        };
        let mut compute = instance
            .compute
            .iter()
            .filter(|compute| ci.is_none_or(|ci| compute.id == ci))
            .peekable();
        match (compute.peek(), mig_device) {
            // A GPU instance whose compute instances are all gone is still the same.
            (None, _) => ci.is_none(),
            (Some(_), None) => true,
            (Some(_), Some(uuid)) => compute.any(|compute| compute.uuid.as_str() == uuid),
        }
    }

    /// The UUID of a MIG device in it, by which it is known again.
    pub fn mig_device(self, mig: Option<&Mig>) -> Option<String> {
        let (gi, ci) = self.instance()?;
        let instance = mig?.instances.iter().find(|instance| instance.id == gi)?;
        let mut compute = instance.compute.iter();
        let found = compute.find(|compute| ci.is_none_or(|ci| compute.id == ci));
        found.map(|compute| compute.uuid.to_string())
    }
}

/// An Xid that makes a GPU, or a part of it, unhealthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// How much of the GPU it touches.
    pub extent: Extent,
    /// The Xid.
    pub xid: u64,
    /// What it asks for; the worst one gives the reason.
    pub class: Class,
    /// The reason, in words a person can act on.
    pub reason: String,
    /// When it was raised.
    pub since: Timestamp,
    /// UUID of a MIG device in the instance that it touches.
    pub mig_device: Option<String>,
    /// Version of the driver that raised it.
    pub driver: Option<String>,
    /// What was seen of the GPU since.
    pub evidence: FaultEvidence,
}

impl Fault {
    /// Its form in the API, on GPU `gpu` in boot `boot_id`.
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

    /// Reads the form in the API. A class that this version does not know is taken for resettable; a GPU whose UUID makes no sense
    /// is nobody's.
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
    fn a_fault_touches_its_instance_and_the_whole_that_holds_it() {
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
    fn an_instance_made_anew_is_another_though_its_number_is_the_same() {
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
        assert!(
            extent.is_there(Some(&cut_anew), None),
            "nothing tells the two apart"
        );
        assert!(extent.is_there(Some(&mig(&[(1, &[])])), device.as_deref()));
        let one = Extent::ComputeInstance(1, 1);
        assert_eq!(one.mig_device(Some(&before)).as_deref(), Some("MIG-b"));
        assert!(!one.is_there(Some(&mig(&[(1, &[])])), Some("MIG-b")));
        assert!(Extent::Gpu.is_there(None, None));
    }

    #[test]
    fn a_stored_fault_is_read_as_it_was() {
        let gpu: GpuUuid = "GPU-0badcafe".parse().unwrap();
        let fault = Fault {
            extent: Extent::ComputeInstance(1, 0),
            xid: 48,
            class: Class::MigInstance,
            reason: "Xid 48: Double Bit ECC Error".to_owned(),
            since: Timestamp::from_second(1_700_000_000).unwrap(),
            mig_device: Some("MIG-a".to_owned()),
            driver: None,
            evidence: FaultEvidence {
                binding: Some(42),
                ..FaultEvidence::default()
            },
        };
        let stored = fault.stored(&gpu, "boot");
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(
            Fault::read(serde_json::from_str(&text).unwrap()),
            Some((gpu, fault))
        );
        let newer = GpuFault {
            class: "haunted".to_owned(),
            ..stored
        };
        assert_eq!(Fault::read(newer).unwrap().1.class, Class::Resettable);
    }
}
