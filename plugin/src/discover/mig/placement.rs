//! Derives the placements of GPU instances that NVML does not return: from the driver's instance ids, otherwise
//! from sizes. Pure.

use std::collections::BTreeMap;

use gantry_topology::ComputeInstance;
use gantry_topology::machine::MAX_MEMORY_UNITS;
use gantry_topology::mig::Product;

use super::whole;
use crate::nvml::Placement;

/// Placements derived from the driver's instance ids, on a product with known profiles; `None` if they are
/// inconsistent.
pub(super) fn by_numbers(
    product: Option<&Product>,
    instances: &BTreeMap<u32, Vec<ComputeInstance>>,
) -> Option<BTreeMap<u32, Placement>> {
    let product = product?;
    let place = |id: u32, compute: &[ComputeInstance]| {
        let profile = product.profile(whole(&compute.first()?.profile))?;
        let mut starts = profile.starts.iter();
        let start = starts.find(|start| product.instance_id(profile, **start) == id)?;
        Some(Placement {
            start: u32::from(*start),
            size: u32::from(profile.size),
        })
    };
    let places: BTreeMap<u32, Placement> = instances
        .iter()
        .map(|(id, compute)| Some((*id, place(*id, compute)?)))
        .collect::<Option<_>>()?;
    fits(places.values()).then_some(places)
}

/// Whether all placements are on the GPU and do not overlap.
pub(super) fn fits<'a>(places: impl Iterator<Item = &'a Placement>) -> bool {
    let mut taken = [false; MAX_MEMORY_UNITS as usize];
    for place in places {
        let range = place.start as usize..place.start.saturating_add(place.size) as usize;
        match taken.get_mut(range) {
            Some(units) if !units.is_empty() && units.iter().all(|unit| !unit) => units.fill(true),
            _ => return false,
        }
    }
    true
}

/// Memory units of most GPUs with MIG. On GPUs with fewer (4 on an A30) a guess in eighths keeps the
/// proportions.
pub(super) const EIGHTHS: u64 = 8;

/// Memory of an instance in eighths of the GPU's, rounded up, because the driver reserves a little of each.
pub(super) fn units(instance_mib: Option<u64>, gpu_mib: Option<u64>) -> u32 {
    match (instance_mib, gpu_mib) {
        (Some(instance), Some(gpu)) if gpu > 0 => {
            u32::try_from((instance * EIGHTHS).div_ceil(gpu).clamp(1, EIGHTHS)).unwrap_or(1)
        }
        _ => 1,
    }
}

/// Places instances side by side, the largest first and each at a multiple of its size, like the driver. An
/// instance that does not fit gets no placement.
pub(super) fn lay_out(sizes: impl Iterator<Item = (u32, u32)>) -> BTreeMap<u32, Placement> {
    let mut sizes: Vec<(u32, u32)> = sizes.collect();
    sizes.sort_by_key(|(id, size)| (std::cmp::Reverse(*size), *id));
    let mut places: BTreeMap<u32, Placement> = BTreeMap::new();
    for (id, size) in sizes {
        let starts = (0..u32::from(MAX_MEMORY_UNITS)).step_by(size.max(1) as usize);
        let place = starts
            .map(|start| Placement { start, size })
            .find(|place| fits(places.values().chain([place])));
        if let Some(place) = place {
            places.insert(id, place);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_placements_are_side_by_side() {
        // 3g, 2g and two 1g of an A100, placed as the driver does.
        let places = lay_out([(1, 4), (5, 2), (9, 1), (10, 1)].into_iter());
        let starts: Vec<(u32, u32)> = places.iter().map(|(id, place)| (*id, place.start)).collect();
        assert_eq!(starts, [(1, 0), (5, 4), (9, 6), (10, 7)]);
        assert!(fits(places.values()));
        let many = lay_out((0..20).map(|id| (id, 1)));
        assert_eq!(many.len(), 16, "no more than there is room for");
    }

    #[test]
    fn instance_ids_give_placements() {
        // From nvidia-smi mig -lgi on an A100 40 GB: a 3g at the end, a 2g at the start, a 1g between them.
        let instance = |id: u32, profile: &str| {
            let compute = ComputeInstance {
                id: 0,
                uuid: format!("MIG-{id}").parse().unwrap(),
                profile: profile.to_owned(),
                attributes: None,
            };
            (id, vec![compute])
        };
        let layout = BTreeMap::from([
            instance(2, "1c.3g.20gb"),
            instance(3, "2g.10gb"),
            instance(9, "1g.5gb"),
        ]);
        let a100 = super::super::Parent {
            model: Some("NVIDIA A100-SXM4-40GB"),
            memory_mib: Some(40_960),
        };
        let places = by_numbers(a100.product().as_ref(), &layout).unwrap();
        let places: Vec<_> = places.values().map(|place| (place.start, place.size)).collect();
        assert_eq!(places, [(4, 4), (0, 2), (2, 1)]);
        let odd = BTreeMap::from([instance(40, "1g.5gb")]);
        assert_eq!(by_numbers(a100.product().as_ref(), &odd), None);
        assert_eq!(by_numbers(None, &layout), None);
    }

    #[test]
    fn overlapping_or_outside_placements_do_not_fit() {
        let place = |start, size| Placement { start, size };
        assert!(fits([place(0, 4), place(4, 4)].iter()));
        for wrong in [
            [place(0, 4), place(3, 1)],
            [place(0, 4), place(15, 2)],
            [place(0, 4), place(4, 0)],
        ] {
            assert!(!fits(wrong.iter()), "{wrong:?}");
        }
    }
}
