//! Whole GPUs and MIG devices with their health, as the NVML thread publishes them. Independent of kubelet,
//! resources and configuration.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{DeviceHealth, DeviceId};
use gantry_topology::{ComputeInstance, Gpu, GpuInstance, GpuUuid, Machine};
use tokio::sync::watch;

use super::{Absence, Slice, State, no_machine};
use crate::health::Part;

/// The state of the node's GPUs at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// Whether `machine` and `units` are valid.
    pub state: State,
    /// GPUs, NICs and links. The same `Arc` while the hardware is unchanged, so comparison is cheap.
    pub machine: Arc<Machine>,
    /// Allocatable units, ordered by GPU and, on a GPU, by placement of slices.
    pub units: Vec<Unit>,
    /// Machine indices of GPUs in MIG mode with unreadable MIG devices; they have no units, but may
    /// have devices.
    pub mig_unknown: BTreeSet<u8>,
}

/// A GPU without MIG, or one MIG device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// UUID of the GPU or the MIG device.
    pub id: DeviceId,
    /// Machine index of its physical GPU, stable while another GPU is lost.
    pub gpu: u8,
    /// Current NVML index of its physical GPU; `None` if NVML does not list it, or the index is uncertain.
    pub nvml_index: Option<u8>,
    /// The MIG slice; `None` for a whole GPU.
    pub slice: Option<Arc<Slice>>,
    /// Whether it may be allocated, and if not, why.
    pub health: DeviceHealth,
    /// Whether only one process at a time may compute on its GPU.
    pub exclusive: bool,
    /// Minor number of its GPU's `/dev/nvidiaN`; `None` if unknown.
    pub minor: Option<u32>,
    /// NUMA node of its GPU; `None` if unknown, which is not node 0.
    pub numa: Option<u32>,
}

impl Hardware {
    /// Before the first reading.
    pub fn starting() -> Self {
        Self::without_units(State::Starting)
    }

    /// Without NVML or GPU, for `reason`.
    pub fn absent(reason: impl Into<Absence>) -> Self {
        Self::without_units(State::Absent(reason.into()))
    }

    pub fn ready(machine: Arc<Machine>, units: Vec<Unit>) -> Self {
        Self { state: State::Ready, machine, units, mig_unknown: BTreeSet::new() }
    }

    /// The units of a machine, all healthy: for a one-time scan.
    pub fn of(machine: Arc<Machine>) -> Self {
        let well = |_: &GpuUuid, _| DeviceHealth { healthy: true, reason: None };
        let units = units(&machine, |gpu| Some(gpu.index), well, |_| false, |_, _, _| None);
        Self::ready(machine, units)
    }

    /// A channel that holds [`Hardware::starting`], for the NVML thread to publish to.
    pub fn channel() -> (watch::Sender<Arc<Self>>, watch::Receiver<Arc<Self>>) {
        watch::channel(Arc::new(Self::starting()))
    }

    fn without_units(state: State) -> Self {
        Self { state, machine: no_machine(), units: Vec::new(), mig_unknown: BTreeSet::new() }
    }
}

/// The units of a machine: a GPU with MIG off, or each MIG device of a GPU with MIG on. A GPU without a UUID
/// has none, because it cannot be allocated. `nvml_index` returns a GPU's current NVML index, `health` the
/// health of a part of a GPU, `exclusive` whether only one process may compute on it. `caps` returns the minor numbers of capability nodes by GPU minor, GPU instance
/// and compute instance.
pub(crate) fn units(
    machine: &Machine,
    nvml_index: impl Fn(&Gpu) -> Option<u8>,
    health: impl Fn(&GpuUuid, Part) -> DeviceHealth,
    exclusive: impl Fn(&GpuUuid) -> bool,
    caps: impl Fn(u32, u32, u32) -> Option<[u32; 2]>,
) -> Vec<Unit> {
    let mut units = Vec::new();
    for gpu in machine.gpus() {
        let Some(uuid) = &gpu.uuid else { continue };
        let unit = |id: &str, slice: Option<Slice>, health| Unit {
            id: id.into(),
            gpu: gpu.index,
            nvml_index: nvml_index(gpu),
            slice: slice.map(Arc::new),
            health,
            exclusive: exclusive(uuid),
            minor: gpu.minor,
            numa: gpu.numa.as_ref().and_then(|nodes| nodes.iter().next()),
        };
        let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) else {
            units.push(unit(uuid.as_str(), None, health(uuid, None)));
            continue;
        };
        for (instance, compute) in mig_devices(&mig.instances) {
            let caps = gpu.minor.and_then(|minor| caps(minor, instance.id, compute.id));
            let slice = Slice {
                index: index(gpu, instance, compute),
                gpu_instance: instance.id,
                compute_instance: compute.id,
                profile: compute.profile.clone(),
                start: instance.start,
                size: instance.size,
                caps,
            };
            let health = health(uuid, Some((instance.id, compute.id)));
            units.push(unit(compute.uuid.as_str(), Some(slice), health));
        }
    }
    units
}

fn mig_devices(instances: &[GpuInstance]) -> impl Iterator<Item = (&GpuInstance, &ComputeInstance)> {
    instances.iter().flat_map(|instance| instance.compute.iter().map(move |compute| (instance, compute)))
}

/// NVML's index of a MIG device: counted by GPU instance ID, then by compute instance ID.
fn index(gpu: &Gpu, instance: &GpuInstance, compute: &ComputeInstance) -> u8 {
    let instances = gpu.mig.as_ref().map_or(&[][..], |mig| &mig.instances);
    let before =
        mig_devices(instances).filter(|(of, other)| (of.id, other.id) < (instance.id, compute.id)).count();
    u8::try_from(before).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use gantry_topology::{MachineParts, Mig, PathClass, PathMatrix};

    use super::*;

    fn compute(id: u32, uuid: &str, profile: &str) -> ComputeInstance {
        ComputeInstance { id, uuid: uuid.parse().unwrap(), profile: profile.to_owned(), attributes: None }
    }

    fn instance(id: u32, profile: &str, start: u8, size: u8, compute: Vec<ComputeInstance>) -> GpuInstance {
        GpuInstance { id, profile: profile.to_owned(), start, size, compute }
    }

    fn machine(gpus: Vec<Gpu>) -> Machine {
        Machine::new(MachineParts {
            paths: PathMatrix::from_fn(gpus.len(), |_, _| PathClass::Sys),
            gpus,
            ..MachineParts::default()
        })
        .unwrap()
    }

    #[test]
    fn units_are_whole_gpus_or_mig_devices() {
        let cut = vec![
            instance(
                2,
                "3g.20gb",
                4,
                4,
                vec![compute(0, "MIG-20", "1c.3g.20gb"), compute(1, "MIG-21", "2c.3g.20gb")],
            ),
            instance(9, "1g.5gb", 0, 1, vec![compute(0, "MIG-90", "1g.5gb")]),
            instance(10, "1g.5gb", 1, 1, vec![]),
        ];
        let machine = machine(vec![
            Gpu {
                index: 0,
                uuid: Some("GPU-0".parse().unwrap()),
                minor: Some(7),
                mig: Some(Mig::default()),
                ..Gpu::default()
            },
            Gpu {
                index: 1,
                uuid: Some("GPU-1".parse().unwrap()),
                minor: Some(3),
                numa: Some("1".parse().unwrap()),
                mig: Some(Mig { enabled: true, instances: cut }),
                ..Gpu::default()
            },
            Gpu { index: 2, ..Gpu::default() },
        ]);
        let health = |uuid: &GpuUuid, part: Part| DeviceHealth {
            healthy: part.is_none_or(|(instance, _)| instance != 2),
            reason: part.map(|(instance, _)| format!("{uuid}/{instance}")),
        };
        let caps = |minor, gi, ci| Some([minor * 100 + gi, minor * 100 + gi + ci + 1]);
        let units = units(&machine, |_| None, health, |_| false, caps);
        let seen: Vec<_> = units
            .iter()
            .map(|unit| {
                let slice = unit.slice.as_ref();
                (
                    unit.id.as_str(),
                    unit.gpu,
                    slice.map(|slice| (slice.index, slice.profile.as_str(), slice.start, slice.size)),
                    slice.and_then(|slice| slice.caps),
                    unit.health.reason.as_deref(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("GPU-0", 0, None, None, None),
                ("MIG-90", 1, Some((2, "1g.5gb", 0, 1)), Some([309, 310]), Some("GPU-1/9")),
                ("MIG-20", 1, Some((0, "1c.3g.20gb", 4, 4)), Some([302, 303]), Some("GPU-1/2")),
                ("MIG-21", 1, Some((1, "2c.3g.20gb", 4, 4)), Some([302, 304]), Some("GPU-1/2")),
            ]
        );
        assert!(units.iter().skip(1).all(|unit| unit.minor == Some(3) && unit.numa == Some(1)));
    }
}
