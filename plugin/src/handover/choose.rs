//! The best set where no grant says it: from device IDs to physical GPUs, through the choice table, and back. Always answers,
//! from what was offered and nothing else.

use std::collections::BTreeMap;

use gantry_api::DeviceId;
use gantry_topology::choice::{Purpose, Table};
use gantry_topology::set::GpuSet;

use super::Devices;

/// The best `size` devices of `free` with all of `must` in them; fewer if there are fewer. `gpus` tells each device's GPU. Several
/// devices of one GPU are used only when distinct GPUs run out.
pub(super) fn choose(
    gpus: &BTreeMap<DeviceId, u8>,
    table: Option<&Table>,
    free: &Devices,
    must: &Devices,
    size: usize,
) -> Devices {
    let mut chosen: Devices = must.iter().take(size).cloned().collect();
    let mut by_gpu: BTreeMap<usize, Vec<&DeviceId>> = BTreeMap::new();
    for device in free.iter().filter(|device| !must.contains(*device)) {
        if let Some(gpu) = gpus.get(device) {
            by_gpu.entry(usize::from(*gpu)).or_default().push(device);
        }
    }
    for devices in by_gpu.values_mut() {
        // Taken from the end, lowest first.
        devices.reverse();
    }
    let taken = gpu_set(
        chosen
            .iter()
            .filter_map(|device| gpus.get(device))
            .copied()
            .map(usize::from),
    );
    let distinct = gpu_set(by_gpu.keys().copied()) | taken;
    let wanted = (taken.len() + size - chosen.len()).min(distinct.len());
    for gpu in best(table, distinct, taken, wanted).iter() {
        let fits = chosen.len() < size && !taken.contains(gpu);
        if let Some(device) = by_gpu.get_mut(&gpu).filter(|_| fits).and_then(Vec::pop) {
            chosen.insert(device.clone());
        }
    }
    while chosen.len() < size {
        let before = chosen.len();
        for devices in by_gpu.values_mut() {
            if let Some(device) = devices.pop().filter(|_| chosen.len() < size) {
                chosen.insert(device.clone());
            }
        }
        if chosen.len() == before {
            break;
        }
    }
    chosen
}

/// The table's choice, or the lowest GPUs while there is no table of this machine.
fn best(table: Option<&Table>, free: GpuSet, must: GpuSet, size: usize) -> GpuSet {
    table
        .and_then(|table| table.best_with(free, must, size, Purpose::Local))
        .map_or_else(
            || {
                let more = size.saturating_sub(must.len());
                (free - must)
                    .iter()
                    .take(more)
                    .fold(must, |set, gpu| set.with(gpu))
            },
            |choice| choice.gpus,
        )
}

fn gpu_set(gpus: impl IntoIterator<Item = usize>) -> GpuSet {
    gpus.into_iter().fold(GpuSet::EMPTY, GpuSet::with)
}
