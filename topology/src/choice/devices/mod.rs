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

mod replicas;
mod slices;

use super::Table;
use crate::machine::MAX_GPUS;

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
    let exists = |device: &&u16| spots.get(usize::from(**device)).is_some_and(|spot| at(*spot).is_some());
    let mut chosen: Vec<u16> = Vec::with_capacity(size.min(spots.len()));
    chosen.extend(must.iter().filter(exists).take(size));
    if chosen.len() < size {
        let sliced = |devices: &[u16]| {
            let mut spots = devices.iter().filter_map(|device| spots.get(usize::from(*device)));
            spots.any(|spot| spot.slice.is_some())
        };
        if sliced(free) || sliced(must) {
            slices::add(&mut chosen, table, spots, free, size, sharing);
        } else {
            replicas::add(&mut chosen, table, spots, free, size, sharing);
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
enum Use {
    Free,
    Chosen,
    /// Allocated.
    Others,
}

/// Every device with its GPU, its spot and its use, by ascending index.
fn each<'a>(
    spots: &'a [Spot],
    free: &'a [u16],
    chosen: &'a [u16],
) -> impl Iterator<Item = (u16, usize, Spot, Use)> + 'a {
    let mut free = free.iter().peekable();
    (0..=u16::MAX).zip(spots).filter_map(move |(device, spot)| {
        while free.next_if(|next| **next < device).is_some() {}
        let used = if chosen.contains(&device) {
            Use::Chosen
        } else if free.peek() == Some(&&device) {
            Use::Free
        } else {
            Use::Others
        };
        Some((device, at(*spot)?, *spot, used))
    })
}

#[cfg(test)]
mod tests;
