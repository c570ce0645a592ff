mod placement;

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::{bridged, class_of, kind, pool_of, request_of, slices};
use crate::kind::{Sharing, Spot};
use crate::shape::{Parts, Shape};
use crate::snapshot::Pool;

const MIG: &str = "nvidia.com/mig-1g.10gb";

/// A pool that is all of a machine's parts, with some of them free.
fn parts_of(shape: Shape, free: DeviceSet) -> Pool {
    pool_of(MIG, shape, free.len(), free)
}

/// The GPUs of which something is in use.
fn in_use(spots: &[Spot], free: &DeviceSet) -> Vec<u8> {
    let used = spots.iter().enumerate().filter(|(device, _)| !free.contains(*device));
    used.map(|(_, spot)| spot.gpu).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// What is left out of a class, which of several replicas are free, changes no score; and what is chosen exists.
    #[test]
    fn alike_replicas_make_no_difference(
        gpus in 1u8..5,
        of_each in 1usize..5,
        bits in any::<u32>(),
        devices in 1u32..5,
        packed in any::<bool>(),
    ) {
        let spots: Vec<Spot> = (0..gpus)
            .flat_map(|gpu| std::iter::repeat_n(Spot { gpu, slice: None }, of_each))
            .collect();
        let sharing = if packed { Sharing::Packed } else { Sharing::Distributed };
        let shape = Shape::Parts(Arc::new(Parts::new(spots.clone(), sharing)));
        let free: DeviceSet = (0..spots.len()).filter(|device| bits & (1 << device) != 0).collect();
        let kind = kind(&bridged());
        let scored = |free: DeviceSet| {
            let class = class_of(&kind, parts_of(shape.clone(), free));
            score(&class, &request_of(MIG, devices), &[], Policy::Pack)
        };
        let (exact, alike) = (scored(free.clone()), scored(shape.canonical(&free)));
        prop_assert_eq!(exact.is_some(), free.len() >= devices as usize);
        prop_assert_eq!(exact.as_ref().map(|(score, _)| *score), alike.map(|(score, _)| score));
        if let Some((_, layouts)) = exact {
            prop_assert_eq!(layouts[0].devices.len(), devices as usize);
            prop_assert!(layouts[0].devices.is_subset(&free));
        }
    }

    /// Over all nodes and all their free slices: while a slice is free on a GPU that is cut by use, none is taken from a whole one.
    #[test]
    fn no_whole_gpu_is_cut_while_a_cut_one_serves(nodes in prop::collection::vec(0u32..4096, 1..5)) {
        let cut: Vec<(u8, u8, u8)> = (0..3).flat_map(|gpu| (0..4).map(move |start| (gpu, start, 1))).collect();
        let shape = slices(&cut);
        let Shape::Parts(parts) = &shape else { unreachable!() };
        let kind = kind(&bridged());
        let mut best: Option<(Score, bool)> = None;
        let (mut any, mut possible) = (false, false);
        for bits in nodes {
            let free: DeviceSet = (0..12).filter(|device| bits & (1 << device) != 0).collect();
            let used = in_use(parts.spots(), &free);
            let cut_by_use = |device: usize| used.contains(&parts.spots()[device].gpu);
            possible |= free.iter().any(cut_by_use);
            any |= !free.is_empty();
            let class = class_of(&kind, parts_of(shape.clone(), free.clone()));
            if let Some((score, layouts)) = score(&class, &request_of(MIG, 1), &[], Policy::Pack) {
                let device = layouts[0].devices.iter().next().unwrap();
                if best.as_ref().is_none_or(|(known, _)| score > *known) {
                    best = Some((score, cut_by_use(device)));
                }
            }
        }
        prop_assert_eq!(best.is_some(), any);
        if let Some((_, cut_by_use)) = best {
            prop_assert_eq!(cut_by_use, possible);
        }
    }
}
