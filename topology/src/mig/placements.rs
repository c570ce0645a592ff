//! The placements of MIG instances on a GPU, as masks of memory units. A choice among existing instances keeps the most
//! of them possible. [`super::MigLayout`] counts compute slices and engines, which also limit a layout.

use std::sync::LazyLock;

use super::{Catalogue, Product};
use crate::machine::{Gpu, MAX_MEMORY_UNITS};

/// The built-in table, read once for all machines of a cluster.
static KNOWN: LazyLock<Catalogue> = LazyLock::new(Catalogue::built_in);

/// The placements of every product of eight memory units so far, used for an unknown GPU.
pub(crate) const OF_EIGHT_UNITS: &[u16] = &[
    0x01, 0x02, 0x03, 0x03, 0x04, 0x08, 0x0c, 0x0c, 0x0f, 0x0f, 0x10, 0x20, 0x30, 0x30, 0x40, 0xc0, 0xf0,
    0xff,
];

/// The same for products of twelve units.
pub(crate) const OF_TWELVE_UNITS: &[u16] = &[0x007, 0x038, 0x03f, 0x1c0, 0xe00, 0xfc0, 0xfff];

/// The placements of a product, ascending: one for each place and number of compute slices, so that `3g` and
/// `4g` at unit 0 are two, and variants of one profile (`1g.5gb+me`) are one.
pub(crate) fn placements(product: &Product) -> Vec<u16> {
    let places = product.profiles.iter().flat_map(|profile| {
        let starts = profile.starts.iter();
        starts.map(|start| (mask(*start, profile.size), profile.compute))
    });
    let mut places: Vec<(u16, u8)> = places.collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|(units, _)| units).collect()
}

/// The placements of each GPU that supports MIG and is of a known product.
pub(crate) fn of_gpus(gpus: &[Gpu]) -> Vec<Option<Vec<u16>>> {
    let mut all: Vec<Option<Vec<u16>>> = Vec::with_capacity(gpus.len());
    for (index, gpu) in gpus.iter().enumerate() {
        let alike = gpus[..index].iter().position(|other| {
            (&other.model, other.memory_mib) == (&gpu.model, gpu.memory_mib)
                && other.mig.is_some() == gpu.mig.is_some()
        });
        all.push(match alike {
            Some(alike) => all[alike].clone(),
            None if gpu.mig.is_some() => KNOWN.of(gpu).map(placements),
            None => None,
        });
    }
    all
}

/// Units `start .. start + size` as a mask.
pub(crate) fn mask(start: u8, size: u8) -> u16 {
    let end = start.saturating_add(size).min(MAX_MEMORY_UNITS);
    (start..end).fold(0, |mask, unit| mask | 1 << unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_equal_units_have_equal_placements() {
        let mut seen = [0; 3];
        for product in KNOWN.products() {
            let places = placements(product);
            match product.memory_units() {
                4 => {
                    assert_eq!(places, [0x1, 0x2, 0x3, 0x4, 0x8, 0xc, 0xf], "{}", product.name);
                    seen[0] += 1;
                }
                8 => {
                    assert_eq!(places, OF_EIGHT_UNITS, "{}", product.name);
                    seen[1] += 1;
                }
                12 => {
                    assert_eq!(places, OF_TWELVE_UNITS, "{}", product.name);
                    seen[2] += 1;
                }
                units => panic!("{}: a rule for {units} units is missing", product.name),
            }
        }
        assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
    }
}
