//! MIG devices: idle GPUs stay whole, and on the others the most MIG placements stay possible. One device
//! is taken after the other; of the free ones, most important first:
//!
//! 1. with [`Sharing::Distributed`]: if several devices share a place (replicas of a slice), one at the place with the
//!    fewest in use. Otherwise one on the GPU with the fewest in use;
//! 2. one on a GPU with another slice in use;
//! 3. one on a GPU with enough free devices for the rest of the request;
//! 4. the one that makes the fewest free placements of the GPU's product impossible. So a `1g` on an A100 takes unit 6,
//!    which few placements use, and leaves `4g` at 0;
//! 5. with [`Sharing::Packed`], the fullest place;
//! 6. the lowest GPU, unit, device.

use std::cmp::Reverse;

use super::{DeviceUse, Request, Sharing, Spot, Units};
use crate::machine::{MAX_GPUS, MAX_MEMORY_UNITS, unit_mask};
use crate::mig::{OF_EIGHT_UNITS, OF_TWELVE_UNITS};

/// The use of a GPU.
#[derive(Debug, Clone, Copy, Default)]
struct GpuUse {
    /// Units in use, a bit each.
    units: u16,
    /// Whether anything of it is in use or chosen.
    broken: bool,
    /// Free devices that are not chosen.
    left: u16,
    /// Devices in use or chosen, by their start.
    load: [u16; MAX_MEMORY_UNITS as usize],
    /// Places of devices, a bit each.
    places: u16,
    /// Whether all slices are multiples of three units, as on GPUs of twelve.
    in_threes: bool,
}

/// Adds devices to `chosen` until there are enough.
pub(super) fn add(request: &Request<'_>, chosen: &mut Vec<u16>) {
    let mut gpus = [GpuUse { in_threes: true, ..GpuUse::default() }; MAX_GPUS];
    let mut replicated = false;
    for (_, gpu, spot, used) in request.each(chosen) {
        let slice = units(spot);
        let here = 1 << place(slice);
        replicated |= gpus[gpu].places & here != 0;
        gpus[gpu].places |= here;
        gpus[gpu].in_threes &= slice.size.is_multiple_of(3);
        if used == DeviceUse::Free {
            gpus[gpu].left += 1;
        } else {
            gpus[gpu].take(slice);
        }
    }
    let placements = |gpu: usize, in_threes: bool| match request.table.and_then(|table| table.placements(gpu))
    {
        Some(known) => known,
        None if in_threes => OF_TWELVE_UNITS,
        None => OF_EIGHT_UNITS,
    };
    while chosen.len() < request.size {
        let rest = request.size - chosen.len();
        let best = request.each(chosen).filter(|(_, _, _, used)| *used == DeviceUse::Free).min_by_key(
            |(device, gpu, spot, _)| {
                let slice = units(*spot);
                let on = &gpus[*gpu];
                let lost = on.loss(slice, placements(*gpu, on.in_threes));
                let load = on.load[place(slice)];
                let (spread, pack) = match request.sharing {
                    Sharing::Distributed if replicated => (load, 0),
                    Sharing::Distributed => (on.load.iter().sum(), 0),
                    Sharing::Packed => (0, load),
                };
                (
                    (spread, !on.broken, usize::from(on.left) < rest, lost),
                    (Reverse(pack), *gpu, slice, *device),
                )
            },
        );
        let Some((device, gpu, spot, _)) = best else {
            break;
        };
        gpus[gpu].left -= 1;
        gpus[gpu].take(units(spot));
        chosen.push(device);
    }
}

impl GpuUse {
    fn take(&mut self, slice: Units) {
        self.units |= unit_mask(slice.start, slice.size);
        self.broken = true;
        self.load[place(slice)] += 1;
    }

    /// The number of `placements` that `slice` makes impossible.
    fn loss(&self, slice: Units, placements: &[u16]) -> usize {
        let slice = unit_mask(slice.start, slice.size);
        let lost = placements.iter().filter(|place| **place & slice != 0 && **place & self.units == 0);
        lost.count()
    }
}

/// The units of a device; all for a whole GPU.
fn units(spot: Spot) -> Units {
    spot.slice.unwrap_or(Units { start: 0, size: MAX_MEMORY_UNITS })
}

/// The place at which the load of a slice is counted.
fn place(slice: Units) -> usize {
    usize::from(slice.start.min(MAX_MEMORY_UNITS - 1))
}
