//! Merges a reading into the known machine. An unreachable GPU keeps its position, identity and links, so that
//! its device is shown as unhealthy instead of disappearing. It is removed when a reloaded driver does not list
//! it, or when other GPUs took its place. Pure.

use std::collections::{BTreeMap, BTreeSet};

use gantry_topology::{
    Gpu, GpuInstance, GpuUuid, Machine, MachineError, Mig, MigUuid, NvLinkBundle, PathClass, PathMatrix,
    PeerRefusal,
};

use crate::discover::{DiscoveredMachine, Fact};
use crate::health::Loss;

/// A machine, including its unreachable GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MergedMachine {
    pub(super) machine: Machine,
    /// Known GPUs that were not found, each with the reason.
    pub(super) missing: BTreeMap<GpuUuid, Loss>,
}

/// Merges `found` into `known`. New GPUs mean other hardware, and so does a GPU that a reloaded driver
/// (`reloaded`) does not list: then `found` is used unchanged.
pub(super) fn merge(
    known: Option<&Machine>,
    mut found: DiscoveredMachine,
    reloaded: bool,
) -> Result<MergedMachine, MachineError> {
    if !found.mig_unread.is_empty() {
        found.machine = keep_mig_layout(known, found.machine, &found.mig_unread)?;
    }
    if let Some(known) = known.filter(|_| !found.unread.is_empty()) {
        found.machine = remember(known, &found.machine, &found.unread)?;
    }
    let as_found =
        |found: DiscoveredMachine| MergedMachine { machine: found.machine, missing: BTreeMap::new() };
    let Some(known) = known else {
        return Ok(as_found(found));
    };
    let position = |machine: &Machine, uuid: &GpuUuid| {
        let mut gpus = machine.gpus().iter();
        gpus.position(|gpu| gpu.uuid.as_ref() == Some(uuid))
    };
    if reloaded && found.unreachable.is_empty() {
        return Ok(as_found(found));
    }
    let is_known = |uuid: &GpuUuid| position(known, uuid).is_some();
    // A GPU that was unreachable from the start has an index but no UUID; it is matched by index.
    let nameless = |at: usize| {
        known.gpus().len() == found.machine.gpus().len()
            && known.gpus()[at].uuid.is_none()
            && !found.machine.gpus()[at].uuid.as_ref().is_some_and(is_known)
    };
    let mut gpus = found.machine.gpus().iter().enumerate();
    if !gpus.all(|(at, gpu)| gpu.uuid.as_ref().is_none_or(is_known) || nameless(at)) {
        return Ok(as_found(found));
    }
    // Position at which each known GPU was found.
    let places: Vec<Option<usize>> = known
        .gpus()
        .iter()
        .enumerate()
        .map(|(at, gpu)| match &gpu.uuid {
            Some(uuid) => position(&found.machine, uuid),
            None => nameless(at).then_some(at),
        })
        .collect();
    if places.iter().enumerate().all(|(at, place)| *place == Some(at))
        && known.gpus().len() == found.machine.gpus().len()
    {
        return Ok(as_found(found));
    }
    let missing = known
        .gpus()
        .iter()
        .zip(&places)
        .filter(|(_, place)| place.is_none())
        .filter_map(|(gpu, _)| {
            // Equal indices mean equal GPUs only while the count is unchanged.
            let same = known.gpus().len() == found.machine.gpus().len();
            let error = found.unreachable.iter().find(|(index, _)| same && *index == gpu.index);
            let loss = match error {
                Some((_, error)) => Loss { reason: error.of_gpu(), off_bus: error.is_gpu_lost() },
                None => Loss { reason: "GPU lost: NVML no longer lists it".to_owned(), off_bus: true },
            };
            Some((gpu.uuid.clone()?, loss))
        })
        .collect();
    Ok(MergedMachine { machine: overlay(known, found.machine, &places)?, missing })
}

/// The machine found, with the last known MIG layout for the GPUs in `unread`. Not
/// if MIG is now on and was off: no work runs on such a GPU as a whole. A GPU with a MIG mode that was never read
/// counts as in MIG mode with unknown devices, so that it is not allocated.
fn keep_mig_layout(
    known: Option<&Machine>,
    found: Machine,
    unread: &BTreeSet<u8>,
) -> Result<Machine, MachineError> {
    let mut parts = found.into_parts();
    let known = known.map_or(&[][..], Machine::gpus);
    for gpu in parts.gpus.iter_mut().filter(|gpu| unread.contains(&gpu.index)) {
        let Some(before) = known.iter().find(|before| before.uuid == gpu.uuid) else {
            gpu.mig.get_or_insert(Mig { enabled: true, instances: Vec::new() });
            continue;
        };
        let is_on = |mig: &Option<Mig>| mig.as_ref().is_some_and(|mig| mig.enabled);
        if !is_on(&gpu.mig) || is_on(&before.mig) {
            gpu.mig.clone_from(&before.mig);
        }
    }
    Machine::new(parts)
}

/// The machine found, with the last known values for facts that could not be read.
fn remember(
    known: &Machine,
    found: &Machine,
    unread: &BTreeMap<u8, BTreeSet<Fact>>,
) -> Result<Machine, MachineError> {
    let place = |gpu: &Gpu| {
        let mut gpus = known.gpus().iter();
        gpus.position(|before| gpu.uuid.is_some() && before.uuid == gpu.uuid)
    };
    let places: Vec<Option<usize>> = found.gpus().iter().map(place).collect();
    let is_unread = |gpu: &Gpu, fact| unread.get(&gpu.index).is_some_and(|facts| facts.contains(&fact));
    let is_dim: Vec<bool> = found.gpus().iter().map(|gpu| is_unread(gpu, Fact::Links)).collect();
    let mut parts = found.clone().into_parts();
    for (gpu, place) in parts.gpus.iter_mut().zip(&places) {
        let facts = unread.get(&gpu.index).into_iter().flatten();
        if let Some(before) = place.and_then(|place| known.gpus().get(place)) {
            facts.for_each(|fact| recall(gpu, before, *fact));
        }
    }
    let pairs = (0..places.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    parts.nvlinks = pairs
        .filter_map(|(a, b)| {
            let links = match (places[a], places[b]) {
                (Some(a_before), Some(b_before)) if is_dim[a] || is_dim[b] => {
                    known.direct_nvlinks(a_before, b_before)
                }
                _ => found.direct_nvlinks(a, b),
            };
            (links > 0).then_some(NvLinkBundle { gpus: [a as u8, b as u8], links })
        })
        .collect();
    Machine::new(parts)
}

/// Copies one fact of the known GPU `before` into `gpu`.
fn recall(gpu: &mut Gpu, before: &Gpu, fact: Fact) {
    match fact {
        Fact::Model => gpu.model.clone_from(&before.model),
        Fact::Memory => gpu.memory_mib = before.memory_mib,
        Fact::Minor => gpu.minor = before.minor,
        Fact::Serial => gpu.serial.clone_from(&before.serial),
        Fact::ComputeCapability => gpu.compute_capability.clone_from(&before.compute_capability),
        Fact::Numa => gpu.numa.clone_from(&before.numa),
        Fact::MemoryNuma => gpu.memory_numa = before.memory_numa,
        Fact::Cpus => gpu.cpus.clone_from(&before.cpus),
        Fact::Pcie => gpu.pcie = before.pcie,
        Fact::PcieTrained => gpu.pcie_trained = gpu.pcie_trained.or(before.pcie_trained),
        Fact::Throttle => gpu.throttle = before.throttle,
        Fact::Fabric => gpu.fabric.clone_from(&before.fabric),
        Fact::Links => gpu.nvlink = before.nvlink,
        Fact::Slices => recall_slices(gpu, before),
    }
}

/// Copies known MIG instances over those with the same devices. Not if some were unknown: derived placements
/// might overlap the others.
fn recall_slices(gpu: &mut Gpu, before: &Gpu) {
    let (Some(mig), Some(before)) = (&mut gpu.mig, &before.mig) else {
        return;
    };
    let devices = |instance: &GpuInstance| -> Vec<MigUuid> {
        let devices = instance.compute.iter();
        devices.map(|device| device.uuid.clone()).collect()
    };
    let same = |now: &GpuInstance| {
        let mut known = before.instances.iter();
        known.find(|known| known.id == now.id && devices(known) == devices(now))
    };
    let are_known = mig.instances.iter().all(|now| same(now).is_some());
    for now in &mut mig.instances {
        if let Some(known) = same(now) {
            let place = if are_known { known } else { &*now };
            let (start, size) = (place.start, place.size);
            *now = GpuInstance { start, size, ..known.clone() };
        }
    }
}

/// The known machine with everything replaced that was found. `places[i]`: position at which known GPU `i` was
/// found.
fn overlay(known: &Machine, found: Machine, places: &[Option<usize>]) -> Result<Machine, MachineError> {
    let mut parts = known.clone().into_parts();
    for (at, gpu) in parts.gpus.iter_mut().enumerate() {
        if let Some(place) = places[at] {
            *gpu = Gpu { index: gpu.index, ..found.gpus()[place].clone() };
        }
    }
    let pairs = (0..places.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    parts.nvlinks = pairs
        .filter_map(|(a, b)| {
            let links = match (places[a], places[b]) {
                (Some(a), Some(b)) => found.direct_nvlinks(a, b),
                _ => known.direct_nvlinks(a, b),
            };
            (links > 0).then_some(NvLinkBundle { gpus: [a as u8, b as u8], links })
        })
        .collect();
    let pairs = (0..places.len()).flat_map(|b| (0..b).map(move |a| [a, b]));
    parts.no_peer_access = pairs
        .filter_map(|[a, b]| {
            let (machine, pair) = match (places[a], places[b]) {
                (Some(a), Some(b)) => (&found, [a.min(b), a.max(b)]),
                _ => (known, [a, b]),
            };
            let mut refusals = machine.no_peer_access().iter();
            let refusal = refusals.find(|refusal| refusal.gpus.map(usize::from) == pair)?;
            Some(PeerRefusal { gpus: [a as u8, b as u8], ..*refusal })
        })
        .collect();
    let known_nic = |name: &str| known.nics().iter().position(|nic| nic.name == name);
    let gpus = places.len();
    let devices = gpus + found.nics().len();
    // Position of a device of the new matrix in the found and in the known machine.
    let in_found = |device: usize| match device.checked_sub(gpus) {
        None => places[device],
        Some(nic) => Some(found.gpus().len() + nic),
    };
    let in_known = |device: usize| match device.checked_sub(gpus) {
        None => Some(device),
        Some(nic) => Some(gpus + known_nic(&found.nics()[nic].name)?),
    };
    parts.paths = PathMatrix::from_fn(devices, |row, column| {
        match (in_found(row), in_found(column), in_known(row), in_known(column)) {
            (Some(row), Some(column), _, _) => found.paths().get(row, column),
            (_, _, Some(row), Some(column)) => known.paths().get(row, column),
            _ => PathClass::Sys,
        }
    });
    let found = found.into_parts();
    parts.nics = found.nics;
    parts.host = found.host;
    Machine::new(parts)
}

#[cfg(test)]
mod tests {
    use gantry_topology::MachineParts;

    use super::*;
    use crate::nvml::{Code, NvmlError};

    /// GPUs with these names, the first two connected by `links` NVLinks, all pairs of one class.
    fn machine(names: &[&str], links: u8, class: PathClass) -> Machine {
        let gpus: Vec<Gpu> = names
            .iter()
            .enumerate()
            .map(|(index, name)| Gpu {
                index: index as u8,
                uuid: (!name.is_empty()).then(|| uuid(name)),
                ..Gpu::default()
            })
            .collect();
        Machine::new(MachineParts {
            paths: PathMatrix::from_fn(gpus.len(), |_, _| class),
            gpus,
            nvlinks: (links > 0).then_some(NvLinkBundle { gpus: [0, 1], links }).into_iter().collect(),
            ..MachineParts::default()
        })
        .unwrap()
    }

    fn uuid(name: &str) -> GpuUuid {
        format!("GPU-{name}").parse().unwrap()
    }

    fn found(machine: Machine, unreachable: &[u8]) -> DiscoveredMachine {
        let error =
            NvmlError::Call { call: "nvmlDeviceGetHandleByIndex_v2", gpu: Some(1), code: Code::GpuIsLost };
        DiscoveredMachine {
            machine,
            unreachable: unreachable.iter().map(|index| (*index, error.clone())).collect(),
            mig_unread: BTreeSet::new(),
            unread: BTreeMap::new(),
            caps: BTreeMap::new(),
            vitals: BTreeMap::new(),
            links: BTreeMap::new(),
            has_nvswitch: false,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn complete_reading_replaces_known_machine() {
        let known = machine(&["a", "b"], 4, PathClass::Sys);
        let now = machine(&["a", "b"], 0, PathClass::Sys);
        let merged = merge(Some(&known), found(now.clone(), &[]), false).unwrap();
        assert_eq!(merged.machine, now);
        assert!(merged.missing.is_empty());
    }

    #[test]
    fn unreachable_gpu_keeps_identity_and_links() {
        let known = machine(&["a", "b", "c"], 4, PathClass::Phb);
        let now = machine(&["a", "", "c"], 0, PathClass::Sys);
        let merged = merge(Some(&known), found(now, &[1]), false).unwrap();
        assert_eq!(merged.machine.gpus(), known.gpus());
        assert_eq!(merged.machine.direct_nvlinks(0, 1), 4);
        assert_eq!(merged.machine.paths().get(0, 1), PathClass::Phb);
        assert_eq!(merged.machine.paths().get(0, 2), PathClass::Sys, "found again");
        let Loss { reason, off_bus } = &merged.missing[&uuid("b")];
        assert!(off_bus);
        insta::assert_snapshot!(reason, @"GPU lost: nvmlDeviceGetHandleByIndex_v2 on GPU 1 failed: the GPU has fallen off the bus; look for an Xid in dmesg, then reboot the node or check the board's power and seating");
    }

    #[test]
    fn gpu_lost_from_start_returns_while_another_is_lost() {
        let known = machine(&["a", "", "c"], 4, PathClass::Phb);
        let now = machine(&["", "b", "c"], 4, PathClass::Phb);
        let merged = merge(Some(&known), found(now, &[0]), false).unwrap();
        let names: Vec<_> = merged.machine.gpus().iter().map(|gpu| gpu.uuid.clone()).collect();
        assert_eq!(names, [Some(uuid("a")), Some(uuid("b")), Some(uuid("c"))]);
        assert_eq!(merged.missing.keys().collect::<Vec<_>>(), [&uuid("a")]);
    }

    #[test]
    fn unlisted_gpu_keeps_index_of_all() {
        let known = machine(&["a", "b", "c"], 4, PathClass::Phb);
        let now = machine(&["b", "c"], 2, PathClass::Sys);
        let merged = merge(Some(&known), found(now, &[]), false).unwrap();
        assert_eq!(merged.machine.gpus(), known.gpus());
        assert_eq!(merged.machine.direct_nvlinks(0, 1), 4);
        assert_eq!(merged.machine.direct_nvlinks(1, 2), 2);
        assert_eq!(merged.missing[&uuid("a")].reason, "GPU lost: NVML no longer lists it");
    }

    #[test]
    fn new_gpus_replace_known_machine() {
        let known = machine(&["a", "b"], 0, PathClass::Sys);
        let now = machine(&["a", "d"], 0, PathClass::Sys);
        let merged = merge(Some(&known), found(now.clone(), &[]), false).unwrap();
        assert_eq!((merged.machine, merged.missing.len()), (now, 0));
        let first = merge(None, found(known.clone(), &[]), false).unwrap();
        assert_eq!(first.machine, known);
    }

    #[test]
    fn gpu_unlisted_after_driver_reload_is_gone() {
        let known = machine(&["a", "b", "c"], 4, PathClass::Phb);
        let now = machine(&["b", "c"], 2, PathClass::Sys);
        let merged = merge(Some(&known), found(now.clone(), &[]), true).unwrap();
        assert_eq!((merged.machine, merged.missing.len()), (now, 0));
        // A GPU that it lists but cannot reach stays.
        let unhealthy = machine(&["a", "", "c"], 0, PathClass::Sys);
        let merged = merge(Some(&known), found(unhealthy, &[1]), true).unwrap();
        assert!(merged.missing.contains_key(&uuid("b")));
    }

    #[test]
    fn unread_mig_layout_keeps_known_layout() {
        let cut = |enabled| {
            let mut parts = machine(&["a", "b"], 0, PathClass::Sys).into_parts();
            parts.gpus[1].mig = Some(gantry_topology::Mig { enabled, instances: Vec::new() });
            Machine::new(parts).unwrap()
        };
        let silent = machine(&["a", "b"], 0, PathClass::Sys);
        let mut unread = found(silent, &[]);
        unread.mig_unread.insert(1);
        assert_eq!(merge(Some(&cut(true)), unread, false).unwrap().machine, cut(true));
        let reported = merge(Some(&cut(true)), found(cut(false), &[]), false).unwrap();
        assert_eq!(reported.machine, cut(false));
    }

    #[test]
    fn never_read_mig_mode_counts_as_enabled() {
        let mut unread = found(machine(&["a", "b"], 0, PathClass::Sys), &[]);
        unread.mig_unread.insert(1);
        let merged = merge(None, unread.clone(), false).unwrap().machine;
        let mig_mode =
            |machine: &Machine, gpu: usize| machine.gpus()[gpu].mig.as_ref().map(|mig| mig.enabled);
        assert_eq!((mig_mode(&merged, 0), mig_mode(&merged, 1)), (None, Some(true)));
        let reported = machine(&["a", "b"], 0, PathClass::Sys);
        let merged = merge(Some(&reported), unread, false).unwrap().machine;
        assert_eq!(mig_mode(&merged, 1), None, "it does not support MIG");
    }

    #[test]
    fn unread_facts_are_kept_at_any_index() {
        let mut parts = machine(&["c", "a", "b"], 0, PathClass::Sys).into_parts();
        parts.nvlinks = vec![NvLinkBundle { gpus: [1, 2], links: 4 }];
        parts.gpus[1].memory_mib = Some(1024);
        parts.gpus[1].minor = Some(1);
        let known = Machine::new(parts).unwrap();
        let mut now = found(machine(&["a", "b"], 1, PathClass::Sys), &[]);
        now.unread.insert(0, [Fact::Memory, Fact::Links].into());
        let merged = merge(Some(&known), now, false).unwrap().machine;
        let gpu = &merged.gpus()[1];
        assert_eq!((gpu.memory_mib, gpu.minor), (Some(1024), None), "the minor was answered");
        assert_eq!(merged.direct_nvlinks(1, 2), 4);
    }
}
