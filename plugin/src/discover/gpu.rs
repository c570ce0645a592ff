//! Reads the facts and the state of one GPU. A GPU without UUID or bus id cannot be allocated, so a failure of these two is
//! an error. Every other fact may stay unknown.

use std::collections::BTreeSet;

use gantry_topology::{Fabric, Gpu, IdList, PcieAddress, PcieLink};

use super::sysfs::Sysfs;
use super::{Fact, Warnings, mig};
use crate::health::{FailedCalls, Vitals};
use crate::nvml::{Code, Device, FabricInfo, NvmlError};

const MIB: u64 = 1 << 20;

/// One GPU, and how complete its reading is.
pub(super) struct Read {
    pub(super) gpu: Gpu,
    /// The GPU supports MIG, but its MIG devices could not be read.
    pub(super) mig_unread: bool,
    /// Other facts with failed NVML calls.
    pub(super) unread: BTreeSet<Fact>,
}

/// Runs calls on one GPU and records the facts with failed calls.
struct Questions<'a> {
    warnings: &'a mut Warnings,
    failed: BTreeSet<Fact>,
}

impl Questions<'_> {
    /// As [`Warnings::known`]. An unsupported call counts as answered.
    fn known<T>(&mut self, fact: Fact, answer: Result<T, NvmlError>) -> Option<T> {
        if answer.as_ref().is_err_and(|error| !error.is_unsupported()) {
            self.failed.insert(fact);
        }
        self.warnings.known(answer)
    }
}

/// Reads one GPU. NVLinks are read later, when all GPUs are known.
pub(super) fn read(device: Device<'_>, sysfs: &Sysfs, warnings: &mut Warnings) -> Result<Read, NvmlError> {
    let uuid = device.uuid()?;
    let bus_id = device.bus_id()?;
    let mut ask = Questions { warnings, failed: BTreeSet::new() };
    // The driver queries the GPU for its memory, so a GPU that fell off the bus fails here, at the start.
    let memory_mib = match device.memory() {
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
        answer => ask.known(Fact::Memory, answer).map(|bytes| bytes / MIB),
    };
    let model = ask.known(Fact::Model, device.name()).filter(|name| !name.is_empty());
    let parent = mig::Parent { model: model.as_deref(), memory_mib };
    let layout = mig::read(device, parent, ask.warnings);
    if let Some(error) = &layout.error {
        if error.is_gpu_lost() || error.is_driver_gone() {
            return Err(error.clone());
        }
        ask.warnings.add(format!("cannot read the MIG layout of GPU {}: {error}", device.index()));
    }
    if layout.is_guessed {
        ask.failed.insert(Fact::Slices);
    }
    let pcie = pcie(device, &mut ask);
    let gpu = Gpu {
        index: u8::try_from(device.index()).unwrap_or(u8::MAX),
        uuid: Some(uuid),
        model,
        memory_mib,
        minor: ask.known(Fact::Minor, device.minor()),
        serial: ask.known(Fact::Serial, device.serial()).filter(|serial| !serial.is_empty()),
        compute_capability: ask
            .known(Fact::ComputeCapability, device.compute_capability())
            .map(|(major, minor)| format!("{major}.{minor}")),
        numa: numa(device, &bus_id, sysfs, &mut ask),
        memory_numa: ask.known(Fact::MemoryNuma, device.memory_numa()).flatten(),
        cpus: ask
            .known(Fact::Cpus, device.cpu_affinity())
            .and_then(|cpus| id_list(&cpus))
            .or_else(|| sysfs.local_cpus(&bus_id)),
        pcie,
        pcie_trained: pcie.and_then(|best| pcie_trained(device, best, &mut ask)),
        throttle: ask.known(Fact::Throttle, device.telemetry().throttle()).flatten(),
        nvlink: None,
        fabric: ask.known(Fact::Fabric, device.fabric()).and_then(|status| status.info).and_then(fabric),
        bus_id: Some(bus_id),
        mig: layout.mig,
    };
    Ok(Read { gpu, mig_unread: layout.error.is_some(), unread: ask.failed })
}

/// NUMA nodes near the GPU. The kernel's node comes first, because kubelet's Topology Manager counts the
/// kernel's nodes; NVML adds further near nodes. If the kernel has none (-1), as in most virtual machines, it is
/// the only node of the machine, or unknown: NVML then reports all CPUs as near.
fn numa(device: Device<'_>, bus_id: &PcieAddress, sysfs: &Sysfs, ask: &mut Questions<'_>) -> Option<IdList> {
    let kernel = sysfs.numa_node(bus_id);
    if kernel.is_none() && sysfs.has_numa(bus_id) {
        match sysfs.numa_nodes()[..] {
            [] => {}
            [only] => return id_list(&[only]),
            _ => ask.warnings.add(format!(
                "the kernel has no NUMA node for the GPU at {bus_id}: kubelet gets none, and its Topology Manager does not align \
                 this GPU"
            )),
        }
        return None;
    }
    let nvml = ask.known(Fact::Numa, device.memory_affinity()).unwrap_or_default();
    near_nodes(kernel, &nvml)
}

/// The kernel's node, then the others that NVML reports if that is among them: NVML may report a lower node that is farther
/// away. NVML's nodes alone where the kernel has none.
fn near_nodes(kernel: Option<u32>, nvml: &[u32]) -> Option<IdList> {
    match kernel {
        None => id_list(nvml),
        Some(node) if !nvml.contains(&node) => id_list(&[node]),
        Some(node) if nvml.iter().all(|other| *other >= node) => id_list(nvml),
        Some(node) => {
            let others: Vec<u32> = nvml.iter().copied().filter(|other| *other != node).collect();
            format!("{node},{}", id_list(&others)?).parse().ok()
        }
    }
}

fn pcie(device: Device<'_>, ask: &mut Questions<'_>) -> Option<PcieLink> {
    let generation = ask.known(Fact::Pcie, device.max_pcie_generation())?;
    let width = ask.known(Fact::Pcie, device.max_pcie_width())?;
    // Virtual GPUs report 0.
    let link = PcieLink { generation: u8::try_from(generation).ok()?, width: u8::try_from(width).ok()? };
    ((1..=7).contains(&link.generation) && (1..=32).contains(&link.width)).then_some(link)
}

/// The PCIe link, if it is trained below `best`. Saving power lowers the generation, so that of an idle GPU stays as it was
/// known.
fn pcie_trained(device: Device<'_>, best: PcieLink, ask: &mut Questions<'_>) -> Option<PcieLink> {
    let now = ask.known(Fact::PcieTrained, device.telemetry().current_pcie()).flatten()?;
    let is_slow = now.generation < best.generation;
    if is_slow && ask.known(Fact::PcieTrained, device.telemetry().is_at_full_performance()) != Some(true) {
        ask.failed.insert(Fact::PcieTrained);
        return (now.width < best.width).then_some(PcieLink { generation: best.generation, ..now });
    }
    (is_slow || now.width < best.width).then_some(now)
}

/// A domain of all zeros is confined to the machine and needs no name.
fn fabric(info: FabricInfo) -> Option<Fabric> {
    if info.cluster == [0; 16] {
        return None;
    }
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let uuid = [0..4, 4..6, 6..8, 8..10, 10..16].map(|part| hex(&info.cluster[part]));
    Some(Fabric { cluster_uuid: uuid.join("-"), clique: info.clique })
}

/// Ascending numbers in Linux notation: `0-15,128-143`. `None` if there are none.
fn id_list(numbers: &[u32]) -> Option<IdList> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => ranges.push((number, number)),
        }
    }
    let words: Vec<String> = ranges
        .into_iter()
        .map(|(start, end)| match start == end {
            true => start.to_string(),
            false => format!("{start}-{end}"),
        })
        .collect();
    words.join(",").parse().ok()
}

/// Reads the state of one GPU as the GPU and the kernel report it, with a few cheap calls.
///
/// # Errors
/// When the GPU or the driver is gone. Any other failure leaves the fact unknown.
pub(super) fn read_vitals(
    device: Device<'_>,
    bus_id: Option<&PcieAddress>,
    sysfs: &Sysfs,
) -> Result<Vitals, NvmlError> {
    let (uncorrected, uncorrected_failed) = value_and_failure(device.uncorrected_errors())?;
    let (rows, rows_failed) = value_and_failure(device.remapped_rows())?;
    let (repair_pending, pending_failed) = match rows {
        Some(rows) => (Some(rows.pending), false),
        // A GPU has rows or pages: the unsupported one of the two is not a failure.
        None if rows_failed => (None, true),
        None => value_and_failure(device.retirement_pending())?,
    };
    let (action, action_failed) = value_and_failure(device.recovery_action())?;
    let (fabric, fabric_failed) = value_and_failure(device.fabric())?;
    let (compute_mode, compute_mode_failed) = value_and_failure(device.compute_mode())?;
    Ok(Vitals {
        uncorrected,
        remaps_rows: rows.is_some(),
        repair_pending,
        repair_failed: rows.map(|rows| rows.failed),
        remapped: rows,
        action,
        binding: bus_id.and_then(|address| sysfs.binding(address)),
        fabric: fabric.map(|status| (status.step, status.health)),
        compute_mode,
        failed: FailedCalls {
            uncorrected: uncorrected_failed,
            repair: pending_failed,
            action: action_failed,
            fabric: fabric_failed,
            compute_mode: compute_mode_failed,
        },
    })
}

/// The value, and whether the call failed. "Unsupported" is not a failure.
fn value_and_failure<T>(answer: Result<T, NvmlError>) -> Result<(Option<T>, bool), NvmlError> {
    match answer {
        Ok(value) => Ok((Some(value), false)),
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => Err(error),
        Err(error) => {
            let is_unknown = error.is_unsupported() || error.code() == Some(Code::InvalidArgument);
            Ok((None, !is_unknown))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_list_uses_ranges() {
        let list = |numbers: &[u32]| id_list(numbers).map(|list| list.to_string());
        assert_eq!(list(&[0, 1, 2, 8, 128, 129]).as_deref(), Some("0-2,8,128-129"));
        assert_eq!(list(&[5]).as_deref(), Some("5"));
        assert_eq!(list(&[]), None);
    }

    /// Kubelet gets the first of them.
    #[test]
    fn node_of_the_kernel_comes_first() {
        let near = |kernel, nvml: &[u32]| near_nodes(kernel, nvml).map(|nodes| nodes.to_string());
        assert_eq!(near(Some(1), &[0, 1, 2, 3]).as_deref(), Some("1,0,2-3"));
        assert_eq!(near(Some(0), &[0, 1]).as_deref(), Some("0-1"));
        assert_eq!(near(Some(3), &[0, 1]).as_deref(), Some("3"));
        assert_eq!(near(None, &[0, 1]).as_deref(), Some("0-1"));
        assert_eq!(near(None, &[]), None);
    }

    #[test]
    fn fabric_confined_to_machine_has_no_name() {
        let mut cluster = [0; 16];
        assert_eq!(fabric(FabricInfo { cluster, clique: 1 }), None);
        cluster[0] = 0xab;
        cluster[15] = 1;
        let fabric = fabric(FabricInfo { cluster, clique: 7 }).unwrap();
        assert_eq!(fabric.cluster_uuid, "ab000000-0000-0000-0000-000000000001");
        assert_eq!(fabric.clique, 7);
    }
}
