//! Which devices stand together in the picture: by NUMA node, and within one by PCIe switch. Devices count GPUs first, then NICs.

use crate::machine::{Machine, PathClass};

/// The devices of one NUMA node.
#[derive(Debug, Clone)]
pub(super) struct Domain {
    pub(super) label: String,
    /// Devices joined by PCIe switches; a device by itself is a group of one.
    pub(super) groups: Vec<Vec<usize>>,
}

/// The NUMA nodes of a machine in the order of their first device. A NIC belongs to the node of the GPU nearest to it; what is
/// near to nothing stands apart.
pub(super) fn domains(machine: &Machine) -> Vec<Domain> {
    let gpus = machine.gpus().len();
    let size = gpus + machine.nics().len();
    let mut labels: Vec<Option<String>> = (0..size).map(|device| label(machine, device)).collect();
    for device in 0..size {
        if labels.get(device).is_some_and(Option::is_none) {
            let near = (0..size)
                .filter(|other| *other != device && label(machine, *other).is_some())
                .min_by_key(|other| machine.paths().get(device, *other))
                .filter(|other| !machine.paths().get(device, *other).crosses_sockets());
            let found = near.and_then(|other| label(machine, other));
            if let Some(slot) = labels.get_mut(device) {
                *slot = found;
            }
        }
    }
    let all: Vec<usize> = (0..size).collect();
    let of = |device: usize| labels.get(device).cloned().flatten();
    let together = |a: usize, b: usize| match (of(a), of(b)) {
        (Some(a), Some(b)) => a == b,
        (None, None) => !machine.paths().get(a, b).crosses_sockets(),
        _ => false,
    };
    let domains = islands(&all, together).into_iter().map(|devices| {
        let first = devices.first().copied().unwrap_or(0);
        Domain {
            label: of(first).unwrap_or_else(|| unknown_node(machine, &devices)),
            groups: islands(&devices, |a, b| machine.paths().get(a, b) <= PathClass::Pxb),
        }
    });
    domains.collect()
}

/// A node of unknown number, by its CPUs if they are known.
fn unknown_node(machine: &Machine, devices: &[usize]) -> String {
    let mut cpus = devices
        .iter()
        .filter_map(|device| machine.gpus().get(*device))
        .map(|gpu| &gpu.cpus);
    match cpus.next() {
        Some(Some(first)) if cpus.all(|other| other.as_ref() == Some(first)) => format!("CPUs {first}"),
        _ => "NUMA node unknown".to_owned(),
    }
}

/// What a device says itself about its NUMA node.
fn label(machine: &Machine, device: usize) -> Option<String> {
    let gpus = machine.gpus();
    if let Some(gpu) = gpus.get(device) {
        let numa = gpu.numa.as_ref()?;
        let cpus = gpu
            .cpus
            .as_ref()
            .map_or(String::new(), |cpus| format!(" · CPUs {cpus}"));
        // CPU lists of one node may differ in a container; then they are not the node's.
        let same = gpus
            .iter()
            .filter(|other| other.numa == gpu.numa)
            .all(|other| other.cpus == gpu.cpus);
        return Some(format!("NUMA {numa}{}", if same { cpus } else { String::new() }));
    }
    let nic = machine.nics().get(device - gpus.len())?;
    let numa = nic.numa?.to_string();
    let gpu = gpus
        .iter()
        .position(|gpu| gpu.numa.as_ref().is_some_and(|list| list.as_str() == numa));
    gpu.map_or_else(|| Some(format!("NUMA {numa}")), |gpu| label(machine, gpu))
}

/// The connected parts of `devices` under a relation, each in order, ordered by their first device.
pub(super) fn islands(devices: &[usize], joined: impl Fn(usize, usize) -> bool) -> Vec<Vec<usize>> {
    let mut islands: Vec<Vec<usize>> = Vec::new();
    for device in devices.iter().copied() {
        let (near, mut apart): (Vec<Vec<usize>>, Vec<Vec<usize>>) = islands
            .into_iter()
            .partition(|island| island.iter().any(|member| joined(*member, device)));
        let mut island: Vec<usize> = near.into_iter().flatten().collect();
        island.push(device);
        island.sort_unstable();
        apart.push(island);
        islands = apart;
    }
    islands.sort_unstable();
    islands
}

/// `GPU0-3,6` for 0, 1, 2, 3, 6, which are in order.
pub(super) fn index_ranges(indices: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for index in indices.iter().copied() {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => ranges.push((index, index)),
        }
    }
    let parts: Vec<String> = ranges
        .into_iter()
        .map(|(first, last)| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        })
        .collect();
    format!("GPU{}", parts.join(","))
}
