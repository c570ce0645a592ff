use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::choice::Purpose;
use crate::machine::{Gpu, Machine, MachineParts, Mig, NvLinkBundle, PathClass, PathMatrix};
use crate::mig::Catalogue;
use crate::set::GpuSet;

/// Six GPUs on two sockets: 0 and 1 bridged, 2 alone, 3 alone, 4 and 5 bridged.
static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let machine =
        Machine::new(MachineParts {
            gpus: (0..6).map(|index| Gpu { index, ..Gpu::default() }).collect(),
            nvlinks: [[0, 1], [4, 5]].map(|gpus| NvLinkBundle { gpus, links: 4 }).to_vec(),
            paths: PathMatrix::from_fn(6, |row, column| {
                if row / 3 == column / 3 { PathClass::Node } else { PathClass::Sys }
            }),
            ..MachineParts::default()
        });
    Table::build(&machine.unwrap())
});

/// Three GPUs that can be cut: of eight units, of four, and one whose product is not known.
static CUTTABLE: LazyLock<Table> = LazyLock::new(|| {
    let models = [Some(A100), Some(A30), None];
    let gpus = (0..).zip(models).map(|(index, model)| Gpu {
        index,
        model: model.map(str::to_owned),
        mig: Some(Mig::default()),
        ..Gpu::default()
    });
    let machine = Machine::new(MachineParts {
        gpus: gpus.collect(),
        paths: PathMatrix::from_fn(3, |_, _| PathClass::Node),
        ..MachineParts::default()
    });
    Table::build(&machine.unwrap())
});

const A100: &str = "NVIDIA A100-SXM4-40GB";
const A30: &str = "NVIDIA A30";

fn whole(gpu: u8) -> Spot {
    Spot { gpu, slice: None }
}

fn slice(gpu: u8, start: u8, size: u8) -> Spot {
    Spot { gpu, slice: Some(Units { start, size }) }
}

/// `replicas` of each of `gpus`.
fn replicas(gpus: &[u8], replicas: usize) -> Vec<Spot> {
    gpus.iter().flat_map(|gpu| std::iter::repeat_n(whole(*gpu), replicas)).collect()
}

fn all_but(spots: &[Spot], used: &[u16]) -> Vec<u16> {
    (0..spots.len() as u16).filter(|device| !used.contains(device)).collect()
}

fn gpus(spots: &[Spot], chosen: &[u16]) -> Vec<u8> {
    chosen.iter().map(|device| spots[usize::from(*device)].gpu).collect()
}

#[test]
fn whole_gpus_match_the_table() {
    let spots = replicas(&[0, 1, 2, 3, 4, 5], 1);
    let free = [1, 2, 4, 5];
    let chosen = choose(Some(&TABLE), &spots, &free, &[], 2, Sharing::Distributed);
    assert_eq!(chosen, [4, 5]);
    let chosen = choose(Some(&TABLE), &spots, &free, &[], 1, Sharing::Distributed);
    assert_eq!(chosen, [1], "no pair is broken");
}

#[test]
fn two_replicas_are_on_two_linked_gpus() {
    let spots = replicas(&[0, 2, 4, 5], 4);
    for sharing in [Sharing::Distributed, Sharing::Packed] {
        let chosen = choose(Some(&TABLE), &spots, &all_but(&spots, &[]), &[], 2, sharing);
        assert_eq!(gpus(&spots, &chosen), [4, 5]);
        assert_eq!(chosen, [8, 12], "the lowest of each");
    }
}

#[test]
fn sharing_policy_selects_least_or_most_used_gpu() {
    let spots = replicas(&[0, 1, 2], 4);
    let free = all_but(&spots, &[0, 4, 5, 8]);
    let one = |sharing| gpus(&spots, &choose(Some(&TABLE), &spots, &free, &[], 1, sharing));
    assert_eq!(one(Sharing::Packed), [1]);
    let two = |sharing| gpus(&spots, &choose(Some(&TABLE), &spots, &free, &[], 2, sharing));
    assert_eq!(two(Sharing::Distributed), [0, 2], "though 0 and 1 are bridged");
}

#[test]
fn more_replicas_than_gpus_are_spread_evenly() {
    let spots = replicas(&[0, 1, 2], 4);
    let free = all_but(&spots, &[0, 1, 8]);
    let chosen = choose(Some(&TABLE), &spots, &free, &[], 7, Sharing::Distributed);
    assert_eq!(gpus(&spots, &chosen), [0, 0, 1, 1, 1, 2, 2]);
}

#[test]
fn required_devices_count_as_chosen() {
    let spots = replicas(&[0, 1, 4, 5], 2);
    let chosen = choose(Some(&TABLE), &spots, &all_but(&spots, &[]), &[5], 2, Sharing::Distributed);
    assert_eq!(chosen, [5, 6], "the GPU bridged to that of device 5");
}

#[test]
fn whole_gpu_is_kept_if_another_slice_fits() {
    // Two GPUs cut alike; of the second, one slice is in use.
    let spots: Vec<Spot> =
        (0..2).flat_map(|gpu| [slice(gpu, 0, 2), slice(gpu, 2, 2), slice(gpu, 4, 2)]).collect();
    let chosen = choose(None, &spots, &all_but(&spots, &[3]), &[], 2, Sharing::Packed);
    assert_eq!(chosen, [4, 5]);
    let chosen = choose(None, &spots, &all_but(&spots, &[3]), &[], 3, Sharing::Packed);
    assert_eq!(chosen, [2, 4, 5], "only then the other, where 3g and 4g at 0 stay possible");
}

#[test]
fn seven_slices_keep_large_placements_longest() {
    for gpu in [0, 2] {
        let sevenths: Vec<Spot> = (0..7).map(|start| slice(gpu, start, 1)).collect();
        let mut used = Vec::new();
        while used.len() < 7 {
            let free = all_but(&sevenths, &used);
            used.extend(choose(Some(&CUTTABLE), &sevenths, &free, &[], 1, Sharing::Packed));
        }
        // 4g at 0 until the last three, 3g at 0 as well.
        assert_eq!(used, [6, 4, 5, 0, 1, 2, 3], "GPU {gpu}");
    }
    let quarters: Vec<Spot> = (0..4).map(|start| slice(1, start, 1)).collect();
    let one = |used: &[u16]| {
        let free = all_but(&quarters, used);
        choose(Some(&CUTTABLE), &quarters, &free, &[], 1, Sharing::Packed)[0]
    };
    assert_eq!((one(&[]), one(&[0]), one(&[2])), (0, 1, 3), "an A30 is even");
}

#[test]
fn slice_choice_leaves_the_largest_blocks() {
    let sevenths: Vec<Spot> = (0..7).map(|start| slice(0, start, 1)).collect();
    let one = |used: &[u16]| choose(None, &sevenths, &all_but(&sevenths, used), &[], 1, Sharing::Packed)[0];
    // 0 in use: 1 lies in the pair and the half that are lost already.
    assert_eq!(one(&[0]), 1);
    // 0 and 1: the rest of that half before the other.
    assert_eq!(one(&[0, 1]), 2);
    // One of each half: the pair of either.
    assert_eq!(one(&[2, 4]), 3);
}

#[test]
fn slices_of_one_request_use_one_whole_gpu() {
    // GPU 0 has room for one, GPU 1 for two; nothing is in use.
    let spots = [slice(0, 0, 4), slice(1, 0, 4), slice(1, 4, 4)];
    assert_eq!(choose(None, &spots, &[0, 1, 2], &[], 2, Sharing::Packed), [1, 2]);
    // For one alone either will do: at 4 fewer places are lost.
    assert_eq!(choose(None, &spots, &[0, 1, 2], &[], 1, Sharing::Packed), [2]);
}

#[test]
fn slices_are_spread_if_distributed() {
    // Two GPUs of two slices each; one of the first is in use.
    let spots = [slice(0, 0, 4), slice(0, 4, 4), slice(1, 0, 4), slice(1, 4, 4)];
    let free = all_but(&spots, &[0]);
    assert_eq!(choose(None, &spots, &free, &[], 1, Sharing::Packed), [1]);
    assert_eq!(choose(None, &spots, &free, &[], 1, Sharing::Distributed), [3]);
    assert_eq!(choose(None, &spots, &free, &[], 2, Sharing::Distributed), [1, 3]);
}

#[test]
fn slice_replicas_follow_sharing_policy() {
    // Two slices with three replicas each; the second has one in use.
    let spots: Vec<Spot> = [slice(0, 0, 4), slice(0, 4, 4)].into_iter().flat_map(|spot| [spot; 3]).collect();
    let free = all_but(&spots, &[3]);
    assert_eq!(choose(None, &spots, &free, &[], 1, Sharing::Distributed), [0]);
    assert_eq!(choose(None, &spots, &free, &[], 1, Sharing::Packed), [4]);
    assert_eq!(choose(None, &spots, &free, &[], 3, Sharing::Distributed), [0, 1, 4]);
}

#[test]
fn use_by_other_resources_counts_if_given() {
    let mut spots = vec![slice(0, 0, 1), slice(1, 0, 1)];
    assert_eq!(choose(None, &spots, &[0, 1], &[], 1, Sharing::Packed), [0]);
    spots.push(slice(1, 4, 4));
    assert_eq!(choose(None, &spots, &[0, 1], &[], 1, Sharing::Packed), [1]);
}

#[test]
fn invalid_requests_get_available_devices() {
    let spots = [whole(200), slice(3, 250, 250), slice(0, 15, 1)];
    assert_eq!(choose(None, &spots, &[0, 1, 2, 9], &[7, 9], 9, Sharing::Packed), [1, 2]);
    assert!(choose(Some(&TABLE), &[], &[0], &[], 1, Sharing::Packed).is_empty());
    assert!(choose(Some(&TABLE), &spots, &[], &[], 3, Sharing::Distributed).is_empty());
    let far = replicas(&[30, 31], 2);
    assert_eq!(choose(Some(&TABLE), &far, &[0, 1, 2], &[], 2, Sharing::Distributed), [0, 2]);
}

/// Devices, which of them are free, which of those must be included, how many are wanted.
#[derive(Debug, Clone)]
struct Case {
    spots: Vec<Spot>,
    free: Vec<u16>,
    must: Vec<u16>,
    size: usize,
    sharing: Sharing,
}

impl Case {
    fn choose(&self) -> Vec<u16> {
        let sliced = self.spots.iter().any(|spot| spot.slice.is_some());
        choose(
            Some(if sliced { &CUTTABLE } else { &TABLE }),
            &self.spots,
            &self.free,
            &self.must,
            self.size,
            self.sharing,
        )
    }

    fn used(&self, gpu: u8) -> usize {
        let on = |device: &u16| self.spots[usize::from(*device)].gpu == gpu;
        let all = 0..self.spots.len() as u16;
        all.filter(|device| on(device) && !self.free.contains(device)).count()
    }
}

fn case(spot: impl Strategy<Value = Spot>) -> impl Strategy<Value = Case> {
    let states = (spot, prop_oneof![3 => Just(0u8), 3 => Just(1), 1 => Just(2)]);
    let sharing = prop_oneof![Just(Sharing::Distributed), Just(Sharing::Packed)];
    (prop::collection::vec(states, 0..11), 0usize..6, sharing).prop_map(|(devices, size, sharing)| {
        let of = |least: u8| {
            (0u16..)
                .zip(&devices)
                .filter(|(_, (_, state))| *state >= least)
                .map(|(device, _)| device)
                .collect()
        };
        Case {
            free: of(1),
            must: of(2),
            size,
            sharing,
            spots: devices.iter().map(|(spot, _)| *spot).collect(),
        }
    })
}

fn counts(spots: &[Spot], devices: &[u16]) -> BTreeMap<u8, usize> {
    let mut counts = BTreeMap::new();
    for gpu in gpus(spots, devices) {
        *counts.entry(gpu).or_default() += 1;
    }
    counts
}

/// Every set of devices that may be the answer.
fn possible(case: &Case) -> Vec<Vec<u16>> {
    let size = case.size.min(case.free.len());
    (0u32..1 << case.free.len())
        .filter(|bits| bits.count_ones() as usize == size)
        .map(|bits| {
            let chosen = case.free.iter().enumerate();
            chosen.filter(|(at, _)| bits & 1 << at != 0).map(|(_, device)| *device).collect::<Vec<u16>>()
        })
        .filter(|set| case.must.iter().all(|device| set.contains(device)))
        .collect()
}

/// Evenness, then load: the smaller the better. The load of a GPU is what others have of it.
fn cost(case: &Case, set: &[u16]) -> (usize, i64) {
    let counts = counts(&case.spots, set);
    let load: usize = counts.iter().map(|(gpu, count)| count * case.used(*gpu)).sum();
    let load = load as i64;
    (
        counts.values().map(|count| count * count).sum(),
        match case.sharing {
            Sharing::Distributed => load,
            Sharing::Packed => -load,
        },
    )
}

fn set_of(case: &Case, devices: &[u16]) -> GpuSet {
    gpus(&case.spots, devices).into_iter().map(usize::from).collect()
}

proptest! {
    #[test]
    fn replicas_match_brute_force(case in case((0u8..6).prop_map(whole))) {
        let chosen = case.choose();
        let possible = possible(&case);
        if case.must.len() > case.size {
            prop_assert_eq!(&chosen, &case.must[..case.size]);
            return Ok(());
        }
        let best = possible.iter().map(|set| cost(&case, set)).min().unwrap();
        prop_assert_eq!(cost(&case, &chosen), best);
        prop_assert!(possible.contains(&chosen));
        // Among sets of that cost the table decides, and lowest devices.
        let equal: Vec<&Vec<u16>> = possible.iter().filter(|set| cost(&case, set) == best).collect();
        let sets: BTreeSet<GpuSet> = equal.iter().map(|set| set_of(&case, set)).collect();
        let union = sets.iter().fold(GpuSet::EMPTY, |all, set| all | *set);
        let common = sets.iter().fold(union, |all, set| all & *set);
        let own = set_of(&case, &chosen);
        let by_table = TABLE.best_with(union, common, own.len(), Purpose::Local).unwrap();
        prop_assert_eq!(own, by_table.gpus);
        let b = |set: &GpuSet| TABLE.rate(*set, union, Purpose::Local).bandwidth_gbs;
        prop_assert!(sets.iter().all(|set| b(set) <= b(&own)), "{:?}", sets);
        let with_that_set = equal.iter().filter(|set| set_of(&case, set) == own);
        let counted: Vec<_> = with_that_set.map(|set| (counts(&case.spots, set).into_iter().rev().collect::<Vec<_>>(), *set)).collect();
        prop_assert_eq!(&chosen, counted.iter().min().unwrap().1);
    }

    #[test]
    fn single_slice_matches_brute_force(case in case(any_slice())) {
        let case = Case { size: 1, must: Vec::new(), ..case };
        let chosen = case.choose();
        let best = case.free.iter().copied().min_by_key(|device| slice_cost(&case, *device));
        prop_assert_eq!(chosen, best.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn slices_avoid_whole_gpus_if_others_fit(case in case(any_slice())) {
        let case = Case { sharing: Sharing::Packed, ..case };
        let chosen = case.choose();
        prop_assert_eq!(chosen.len(), case.size.min(case.free.len()));
        let whole = |gpu: u8| {
            let must = gpus(&case.spots, &case.must);
            case.used(gpu) == 0 && !must.contains(&gpu)
        };
        let left = all_but(&case.spots, &chosen).into_iter().filter(|device| case.free.contains(device));
        let left_on_used = left.filter(|device| !whole(case.spots[usize::from(*device)].gpu)).count();
        if left_on_used > 0 && case.must.len() <= case.size {
            prop_assert!(gpus(&case.spots, &chosen).into_iter().all(|gpu| !whole(gpu)));
        }
    }

    #[test]
    fn choice_is_independent_of_device_order(
        case in prop_oneof![case(any_slice()), case((0u8..6).prop_map(whole))],
        seed in any::<u64>(),
    ) {
        let case = Case { must: Vec::new(), ..case };
        let mut order: Vec<u16> = (0..case.spots.len() as u16).collect();
        order.sort_by_key(|device| seed.rotate_left(u32::from(*device) * 7).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let place = |device: &u16| order.iter().position(|other| other == device).unwrap() as u16;
        let mut free: Vec<u16> = case.free.iter().map(place).collect();
        free.sort_unstable();
        let shuffled = Case {
            spots: order.iter().map(|device| case.spots[usize::from(*device)]).collect(),
            free,
            ..case.clone()
        };
        let spots = |case: &Case| {
            let mut spots: Vec<Spot> = case.choose().into_iter().map(|device| case.spots[usize::from(device)]).collect();
            spots.sort_unstable();
            spots
        };
        prop_assert_eq!(spots(&case), spots(&shuffled));
    }

    #[test]
    fn arbitrary_input_gets_offered_devices_only(
        spots in prop::collection::vec((any::<u8>(), prop::option::of((any::<u8>(), any::<u8>()))), 0..40),
        free in prop::collection::btree_set(0u16..50, 0..40),
        must in prop::collection::btree_set(0u16..50, 0..4),
        size in 0usize..60,
    ) {
        let spots: Vec<Spot> = spots
            .into_iter()
            .map(|(gpu, slice)| Spot { gpu: gpu % 40, slice: slice.map(|(start, size)| Units { start, size }) })
            .collect();
        let (free, must): (Vec<u16>, Vec<u16>) = (free.into_iter().collect(), must.into_iter().collect());
        let chosen = choose(Some(&TABLE), &spots, &free, &must, size, Sharing::Distributed);
        prop_assert!(chosen.len() <= size);
        prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
        prop_assert!(chosen.iter().all(|device| free.contains(device) || must.contains(device)));
    }
}

/// A slice that some product allows.
fn any_slice() -> impl Strategy<Value = Spot> {
    let size = prop_oneof![Just(1u8), Just(2), Just(4)];
    (0u8..3, size, 0u8..8).prop_map(|(gpu, size, at)| slice(gpu, at / size * size, size))
}

/// What taking a free slice costs, written out: less is better.
fn slice_cost(case: &Case, device: u16) -> impl Ord {
    let spot = case.spots[usize::from(device)];
    let units = |spot: Spot| {
        let slice = spot.slice.unwrap();
        (slice.start..slice.start + slice.size).collect::<BTreeSet<u8>>()
    };
    let others: Vec<Spot> = all_but(&case.spots, &case.free)
        .into_iter()
        .map(|device| case.spots[usize::from(device)])
        .filter(|other| other.gpu == spot.gpu)
        .collect();
    let used: BTreeSet<u8> = others.iter().flat_map(|other| units(*other)).collect();
    let at_its_place =
        others.iter().filter(|other| other.slice.unwrap().start == spot.slice.unwrap().start).count();
    let own = units(spot);
    // Of an unknown product: as of one of eight units.
    let catalogue = Catalogue::built_in();
    let model = if spot.gpu == 1 { A30 } else { A100 };
    let product = catalogue.by_model(model, None).unwrap();
    let possible = |used: &BTreeSet<u8>| {
        let mut places = BTreeSet::new();
        for profile in &product.profiles {
            for start in &profile.starts {
                let covered: BTreeSet<u8> = (*start..start + profile.size).collect();
                if covered.is_disjoint(used) {
                    places.insert((profile.compute, *start, profile.size));
                }
            }
        }
        places.len()
    };
    let lost = possible(&used) - possible(&used.union(&own).copied().collect());
    let place = |spot: &Spot| (spot.gpu, spot.slice.unwrap().start);
    let places: BTreeSet<(u8, u8)> = case.spots.iter().map(place).collect();
    let (spread, pack) = match case.sharing {
        Sharing::Distributed if places.len() < case.spots.len() => (at_its_place, 0),
        Sharing::Distributed => (others.len(), 0),
        Sharing::Packed => (0, at_its_place),
    };
    (spread, others.is_empty(), lost, std::cmp::Reverse(pack), spot.gpu, spot.slice, device)
}
