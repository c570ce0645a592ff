//! Whole GPUs and replicas of them: how many devices of each GPU.

use super::{Sharing, Spot, Use, each};
use crate::choice::{Purpose, Table};
use crate::machine::MAX_GPUS;
use crate::set::GpuSet;

/// The devices of one GPU.
#[derive(Debug, Clone, Copy, Default)]
struct OnGpu {
    /// Devices in use by others.
    used: u16,
    /// Devices chosen.
    taken: u16,
    /// Free devices that are not chosen.
    left: u16,
    /// How many of those are to be chosen.
    more: u16,
}

/// Adds devices of `free` to `chosen` until there are `size`.
pub(super) fn add(
    chosen: &mut Vec<u16>,
    table: Option<&Table>,
    spots: &[Spot],
    free: &[u16],
    size: usize,
    sharing: Sharing,
) {
    let mut gpus = [OnGpu::default(); MAX_GPUS];
    for (_, gpu, _, used) in each(spots, free, chosen) {
        match used {
            Use::Free => gpus[gpu].left += 1,
            Use::Chosen => gpus[gpu].taken += 1,
            Use::Others => gpus[gpu].used += 1,
        }
    }
    let mut wanted = size - chosen.len();
    while wanted > 0 {
        let open = || (0..MAX_GPUS).filter(|gpu| gpus[*gpu].left > 0);
        let Some(level) = open().map(|gpu| gpus[gpu].taken).min() else {
            break;
        };
        let round: GpuSet = open().filter(|gpu| gpus[*gpu].taken == level).collect();
        let round = if round.len() <= wanted {
            round
        } else {
            let among: GpuSet = (0..MAX_GPUS).filter(|gpu| gpus[*gpu].taken > 0).collect();
            // The table applies to the first device of each GPU only.
            let table = table.filter(|_| level == 0);
            pick(table, &gpus, round, among, wanted, sharing)
        };
        for gpu in round.iter() {
            gpus[gpu].taken += 1;
            gpus[gpu].left -= 1;
            gpus[gpu].more += 1;
        }
        wanted -= round.len();
    }
    let mut more = Vec::new();
    for (device, gpu, _, used) in each(spots, free, chosen) {
        if used == Use::Free && gpus[gpu].more > 0 {
            gpus[gpu].more -= 1;
            more.push(device);
        }
    }
    chosen.append(&mut more);
}

/// `wanted` GPUs of `round`, which has more: whole loads while they fit, then the table's choice among the next load.
/// `among`: GPUs that are in the set in any case.
fn pick(
    table: Option<&Table>,
    gpus: &[OnGpu; MAX_GPUS],
    round: GpuSet,
    among: GpuSet,
    wanted: usize,
    sharing: Sharing,
) -> GpuSet {
    let mut picked = GpuSet::EMPTY;
    loop {
        let rest = round - picked;
        let loads = rest.iter().map(|gpu| gpus[gpu].used);
        let load = match sharing {
            Sharing::Distributed => loads.min(),
            Sharing::Packed => loads.max(),
        };
        let alike: GpuSet = rest.iter().filter(|gpu| Some(gpus[*gpu].used) == load).collect();
        let more = wanted - picked.len();
        if alike.len() < more {
            picked = picked | alike;
            continue;
        }
        let must = among | picked;
        let best =
            table.and_then(|table| table.best_with(must | alike, must, must.len() + more, Purpose::Local));
        let last = match best {
            Some(choice) => choice.gpus - must,
            None => alike.iter().take(more).collect(),
        };
        return picked | last;
    }
}
