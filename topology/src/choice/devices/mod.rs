//! The choice among devices that may share a GPU: MIG devices and replicas. The choice table selects the GPUs, this
//! module their devices. It returns fewer devices if there are not enough.
//!
//! # The order
//!
//! For devices other than slices, most important first:
//!
//! 1. distinct GPUs: several devices of one GPU only when GPUs run out, and then evenly;
//! 2. load: [`Sharing::Distributed`] takes GPUs with the fewest devices in use, [`Sharing::Packed`] those with the
//!    most. Before B, because a GPU shared by k containers gives each a k-th of its time, which no link compensates;
//! 3. the table's key ([`super`]) among GPUs of one load;
//! 4. the lowest GPU, the lowest device.
//!
//! B does not apply to slices, because MIG devices do not communicate with each other. Slices are chosen so that the
//! most MIG placements stay possible, see [`slices`].

mod slices;

use super::{Purpose, Table};
use crate::machine::MAX_GPUS;
use crate::set::GpuSet;

/// The place of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot {
    /// Index of its GPU.
    pub gpu: u8,
    /// The units of a MIG device; `None` for the whole GPU or a replica of it.
    pub slice: Option<Units>,
}

/// Memory units of a GPU: `start .. start + size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Units {
    /// The first.
    pub start: u8,
    /// The number of units.
    pub size: u8,
}

/// The distribution of several devices over GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// The GPU with the fewest devices in use first.
    #[default]
    Distributed,
    /// The fullest GPU first, so that others stay free.
    Packed,
}

/// The best `size` devices of `free` with all of `must` among them; fewer where there are fewer.
///
/// `spots[i]` is the place of device `i` of the resource. `free` and `must` are indices, ascending; devices in neither
/// are in use. `spots` may also contain devices of other resources that are in use on the same GPUs, so that their use
/// counts. Indices beyond `spots` and GPUs beyond [`MAX_GPUS`] are ignored. Returns indices, ascending.
///
/// Without a table, the lowest GPUs are taken instead of the table's choice. Slices are then chosen as on a product of
/// eight units, or of twelve if all are multiples of three.
pub fn choose(
    table: Option<&Table>,
    spots: &[Spot],
    free: &[u16],
    must: &[u16],
    size: usize,
    sharing: Sharing,
) -> Vec<u16> {
    let request = Request { table, spots, free, size, sharing };
    let exists = |device: &&u16| spots.get(usize::from(**device)).is_some_and(|spot| at(*spot).is_some());
    let mut chosen: Vec<u16> = Vec::with_capacity(size.min(spots.len()));
    chosen.extend(must.iter().filter(exists).take(size));
    if chosen.len() < size {
        let sliced = |devices: &[u16]| {
            let mut spots = devices.iter().filter_map(|device| spots.get(usize::from(*device)));
            spots.any(|spot| spot.slice.is_some())
        };
        if sliced(free) || sliced(must) {
            slices::add(&request, &mut chosen);
        } else {
            request.add_replicas(&mut chosen);
        }
    }
    chosen.sort_unstable();
    chosen
}

/// The GPU of a spot, if a machine can have it.
fn at(spot: Spot) -> Option<usize> {
    let gpu = usize::from(spot.gpu);
    (gpu < MAX_GPUS).then_some(gpu)
}

/// The use of a device when a choice begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceUse {
    Free,
    Chosen,
    /// Allocated.
    Others,
}

/// What is to be chosen, see [`choose`].
struct Request<'a> {
    table: Option<&'a Table>,
    spots: &'a [Spot],
    free: &'a [u16],
    size: usize,
    sharing: Sharing,
}

/// The devices of one GPU.
#[derive(Debug, Clone, Copy, Default)]
struct GpuUse {
    /// Devices in use by others.
    used: u16,
    /// Devices chosen.
    taken: u16,
    /// Free devices that are not chosen.
    left: u16,
    /// How many of those are to be chosen.
    more: u16,
}

impl Request<'_> {
    /// Every device with its GPU, its spot and its use, by ascending index.
    fn each<'a>(&'a self, chosen: &'a [u16]) -> impl Iterator<Item = (u16, usize, Spot, DeviceUse)> + 'a {
        let mut free = self.free.iter().peekable();
        (0..=u16::MAX).zip(self.spots).filter_map(move |(device, spot)| {
            while free.next_if(|next| **next < device).is_some() {}
            let used = if chosen.contains(&device) {
                DeviceUse::Chosen
            } else if free.peek() == Some(&&device) {
                DeviceUse::Free
            } else {
                DeviceUse::Others
            };
            Some((device, at(*spot)?, *spot, used))
        })
    }

    /// Adds whole GPUs or replicas of them to `chosen` until there are enough.
    fn add_replicas(&self, chosen: &mut Vec<u16>) {
        let mut gpus = [GpuUse::default(); MAX_GPUS];
        for (_, gpu, _, used) in self.each(chosen) {
            match used {
                DeviceUse::Free => gpus[gpu].left += 1,
                DeviceUse::Chosen => gpus[gpu].taken += 1,
                DeviceUse::Others => gpus[gpu].used += 1,
            }
        }
        let mut wanted = self.size - chosen.len();
        while wanted > 0 {
            let open = || (0..MAX_GPUS).filter(|gpu| gpus[*gpu].left > 0);
            let Some(level) = open().map(|gpu| gpus[gpu].taken).min() else {
                break;
            };
            let round: GpuSet = open().filter(|gpu| gpus[*gpu].taken == level).collect();
            let round = if round.len() <= wanted { round } else { self.pick(&gpus, round, level, wanted) };
            for gpu in round.iter() {
                gpus[gpu].taken += 1;
                gpus[gpu].left -= 1;
                gpus[gpu].more += 1;
            }
            wanted -= round.len();
        }
        let mut more = Vec::new();
        for (device, gpu, _, used) in self.each(chosen) {
            if used == DeviceUse::Free && gpus[gpu].more > 0 {
                gpus[gpu].more -= 1;
                more.push(device);
            }
        }
        chosen.append(&mut more);
    }

    /// `wanted` GPUs of `round`, which has more: whole loads while they fit, then the table's choice among the next
    /// load. Each GPU of the round has `level` devices chosen.
    fn pick(&self, gpus: &[GpuUse; MAX_GPUS], round: GpuSet, level: u16, wanted: usize) -> GpuSet {
        let among: GpuSet = (0..MAX_GPUS).filter(|gpu| gpus[*gpu].taken > 0).collect();
        // The table applies to the first device of each GPU only.
        let table = self.table.filter(|_| level == 0);
        let mut picked = GpuSet::EMPTY;
        loop {
            let rest = round - picked;
            let loads = rest.iter().map(|gpu| gpus[gpu].used);
            let load = match self.sharing {
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
            let best = table
                .and_then(|table| table.best_with(must | alike, must, must.len() + more, Purpose::Local));
            let last = match best {
                Some(choice) => choice.gpus - must,
                None => alike.iter().take(more).collect(),
            };
            return picked | last;
        }
    }
}

#[cfg(test)]
mod tests;
