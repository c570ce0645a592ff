use proptest::prelude::*;

use super::*;
use crate::bandwidth::LinkRate;
use crate::machine::{Gpu, MachineParts, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix};

fn rates(gpus: usize, nvlink: u32, pcie: u32, socket: u32) -> Rates {
    let rate = |mbs: u32| LinkRate::new(mbs, mbs);
    Rates { nvlink: vec![rate(nvlink); gpus], pcie: vec![rate(pcie); gpus], socket: rate(socket) }
}

/// A machine of direct links `(a, b, links)`, with its GPUs on the sockets given.
fn machine(sockets: &[u8], links: &[(u8, u8, u8)], switch: &[u8]) -> Machine {
    let gpus = sockets.len();
    Machine::new(MachineParts {
        gpus: (0..u8::try_from(gpus).unwrap())
            .map(|index| Gpu {
                index,
                nvlink: switch.get(usize::from(index)).map(|links| NvLinkPorts {
                    version: None,
                    switch_links: *links,
                    ..NvLinkPorts::default()
                }),
                ..Gpu::default()
            })
            .collect(),
        nvlinks: links.iter().map(|&(a, b, links)| NvLinkBundle { gpus: [a, b], links }).collect(),
        paths: PathMatrix::from_fn(gpus, |a, b| {
            if sockets[a] == sockets[b] { PathClass::Node } else { PathClass::Sys }
        }),
        ..MachineParts::default()
    })
    .unwrap()
}

fn set(text: &str) -> GpuSet {
    text.parse().unwrap()
}

/// The cube mesh of 8 V100s.
fn cube_mesh() -> Machine {
    let links = [
        (0, 1, 1),
        (0, 2, 1),
        (0, 3, 2),
        (0, 4, 2),
        (1, 2, 2),
        (1, 3, 1),
        (1, 5, 2),
        (2, 3, 2),
        (2, 6, 1),
        (3, 7, 1),
        (4, 5, 1),
        (4, 6, 1),
        (4, 7, 2),
        (5, 6, 2),
        (5, 7, 1),
        (6, 7, 2),
    ];
    machine(&[0, 0, 0, 0, 1, 1, 1, 1], &links, &[])
}

#[test]
fn weakest_gpu_or_narrowest_cut_decides() {
    let machine = cube_mesh();
    let links = Collective::new(&machine, &rates(8, 20_000, 12_000, 10_000));
    // The set, its ring bandwidth and its cut bound, MB/s.
    for (gpus, ring, cut) in [
        ("0,2", 20_000, 20_000),
        ("0,4", 40_000, 40_000),
        ("0,2,3,6", 10_000, 20_000),
        ("2,3,6,7", 40_000, 60_000),
        ("0,1,2,3,6", 10_000, 20_000),
        ("1,2,3,6,7", 40_000, 53_333),
        ("0,1,2,3,4,5", 40_000, 60_000),
        ("0,1,2,4,5,6", 80_000, 80_000),
        ("0,1,2,3,4,5,6,7", 120_000, 120_000),
    ] {
        assert_eq!(links.ring(set(gpus)), ring, "{gpus}");
        assert_eq!(links.cut(set(gpus)), cut, "{gpus}");
    }
}

#[test]
fn switched_set_has_rate_of_least_linked_gpu() {
    let machine = machine(&[0; 4], &[], &[18, 18, 12, 0]);
    let links = Collective::new(&machine, &rates(4, 20_600, 48_000, 22_000));
    assert_eq!(links.ring(set("0,1")), 370_800);
    assert_eq!(links.cut(set("0,1,2")), 12 * 20_600);
    assert_eq!(links.ring(set("0,1,2")), 12 * 20_600);
    // GPU 3 lost its links: with it only PCIe is left.
    assert_eq!(links.ring(set("0,1,3")), 48_000);
}

#[test]
fn single_gpu_has_no_bandwidth() {
    let links = Collective::new(&cube_mesh(), &rates(8, 20_000, 12_000, 10_000));
    for set in [GpuSet::EMPTY, set("5")] {
        assert_eq!((links.ring(set), links.cut(set)), (0, 0));
    }
}

/// Edge-disjoint Hamiltonian cycles by trying every packing of every cycle.
fn cycles_naively(links: &[Vec<u8>]) -> u32 {
    fn permutations(rest: &[usize]) -> Vec<Vec<usize>> {
        if rest.is_empty() {
            return vec![Vec::new()];
        }
        let mut all = Vec::new();
        for (at, first) in rest.iter().enumerate() {
            let mut others = rest.to_vec();
            others.remove(at);
            for mut tail in permutations(&others) {
                tail.insert(0, *first);
                all.push(tail);
            }
        }
        all
    }
    fn pack(cycles: &[Vec<(usize, usize)>], links: &mut Vec<Vec<u8>>) -> u32 {
        let mut best = 0;
        for (at, cycle) in cycles.iter().enumerate() {
            if cycle.iter().any(|&(a, b)| links[a][b] == 0) {
                continue;
            }
            for &(a, b) in cycle {
                links[a][b] -= 1;
                links[b][a] -= 1;
            }
            best = best.max(1 + pack(&cycles[at..], links));
            for &(a, b) in cycle {
                links[a][b] += 1;
                links[b][a] += 1;
            }
        }
        best
    }
    let size = links.len();
    let others: Vec<usize> = (1..size).collect();
    let cycles: Vec<Vec<(usize, usize)>> = permutations(&others)
        .into_iter()
        .filter(|order| order.first() < order.last())
        .map(|order| {
            let around = std::iter::once(0).chain(order).chain(std::iter::once(0));
            let around: Vec<usize> = around.collect();
            around.windows(2).map(|pair| (pair[0], pair[1])).collect()
        })
        .collect();
    pack(&cycles, &mut links.to_vec())
}

/// The cut bound by its definition, NVLink and the PCIe tree of GPUs, sockets and the link between them.
fn cut_naively(machine: &Machine, rates: &Rates, set: GpuSet) -> f64 {
    let others = set.len() as f64 - 1.0;
    let parts = (1..set.bits()).map(GpuSet::from_bits);
    let parts: Vec<GpuSet> =
        parts.filter(|part| part.is_subset(set) && *part != set && !part.is_empty()).collect();
    let nvlink = |part: GpuSet| {
        let rest = set - part;
        let direct: u32 = part
            .iter()
            .flat_map(|a| rest.iter().map(move |b| (a, b)))
            .map(|(a, b)| u32::from(machine.direct_nvlinks(a, b)))
            .sum();
        let switch = |side: GpuSet, island: u8| -> u32 {
            let within = side.iter().filter(|gpu| machine.switch_island(*gpu) == island);
            within.map(|gpu| u32::from(machine.switch_links(gpu))).sum()
        };
        let switched = (0..3).map(|island| switch(part, island).min(switch(rest, island)));
        f64::from((direct + switched.sum::<u32>()) * rates.nvlink[0].effective)
    };
    let mut sockets: Vec<GpuSet> = Vec::new();
    for gpu in 0..machine.gpus().len() {
        let is_near =
            |socket: &GpuSet| socket.iter().any(|other| !machine.paths().get(gpu, other).crosses_sockets());
        let (near, far): (Vec<GpuSet>, Vec<GpuSet>) = sockets.into_iter().partition(is_near);
        let joined = near.into_iter().fold(GpuSet::single(gpu), |joined, socket| joined | socket);
        sockets = [far, vec![joined]].concat();
    }
    // The least capacity over all ways to put the sockets, and the middle that joins them, on either side.
    let pcie = |part: GpuSet| {
        let sides = 0..1u32 << (sockets.len() + 1);
        let capacity = |sides: u32| -> f64 {
            let middle = sides >> sockets.len() & 1 == 1;
            let of_socket = |(at, socket): (usize, &GpuSet)| -> f64 {
                let side = sides >> at & 1 == 1;
                let slots = (*socket & set).iter().filter(|gpu| part.contains(*gpu) != side).count();
                let link = if side == middle { 0 } else { rates.socket.effective };
                slots as f64 * f64::from(rates.pcie[0].effective) + f64::from(link)
            };
            sockets.iter().enumerate().map(of_socket).sum()
        };
        sides.map(capacity).fold(f64::INFINITY, f64::min)
    };
    let bound = |out: &dyn Fn(GpuSet) -> f64| {
        let ratios = parts.iter().map(|part| out(*part) / part.len() as f64);
        others * ratios.fold(f64::INFINITY, f64::min)
    };
    bound(&nvlink).max(bound(&pcie))
}

/// Machines of 2 to `most` GPUs on up to three sockets, with any number of links between any two.
fn any_machine(most: usize, switched: bool) -> impl Strategy<Value = Machine> {
    (2..=most).prop_flat_map(move |gpus| {
        let sockets = proptest::collection::vec(0..3u8, gpus);
        let links =
            proptest::collection::vec(prop_oneof![2 => Just(0u8), 3 => 1..4u8], gpus * (gpus - 1) / 2);
        let switch = proptest::collection::vec(if switched { 0..5u8 } else { 0..1u8 }, gpus);
        let islands = prop_oneof![Just(vec![0u8; gpus]), proptest::collection::vec(0..3u8, gpus)];
        (sockets, links, switch, islands).prop_map(|(sockets, links, switch, islands)| {
            let count = u8::try_from(sockets.len()).unwrap();
            let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
            let bundles: Vec<(u8, u8, u8)> = pairs
                .zip(links)
                .map(|((a, b), links)| (a, b, links))
                .filter(|(_, _, links)| *links > 0)
                .collect();
            let mut parts = machine(&sockets, &bundles, &switch).into_parts();
            for (gpu, island) in parts.gpus.iter_mut().zip(islands) {
                if let Some(ports) = &mut gpu.nvlink {
                    ports.island = island;
                }
            }
            Machine::new(parts).unwrap()
        })
    })
}

#[test]
fn unjoined_nvswitches_carry_no_common_ring() {
    let mut parts = machine(&[0; 4], &[], &[18; 4]).into_parts();
    for gpu in &mut parts.gpus[2..] {
        if let Some(ports) = &mut gpu.nvlink {
            ports.island = 1;
        }
    }
    let machine = Machine::new(parts).unwrap();
    let links = Collective::new(&machine, &rates(4, 20_000, 24_000, 16_000));
    let b = |gpus: &[usize]| {
        let set: GpuSet = gpus.iter().copied().collect();
        (links.ring(set), links.cut(set))
    };
    assert_eq!(b(&[0, 1]), (360_000, 360_000));
    assert_eq!(b(&[2, 3]), (360_000, 360_000));
    assert_eq!(b(&[0, 2]), (24_000, 24_000), "PCIe");
    assert_eq!(b(&[0, 1, 2, 3]), (24_000, 24_000));
    assert_eq!((links.pair(0, 1), links.pair(1, 2)), (360_000, 24_000));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn cycles_match_the_maximum(machine in any_machine(6, false)) {
        let gpus = machine.gpus().len();
        // PCIe so slow that only NVLink counts.
        let links = Collective::new(&machine, &rates(gpus, 1000, 0, 0));
        let mesh: Vec<Vec<u8>> = (0..gpus)
            .map(|a| (0..gpus).map(|b| machine.direct_nvlinks(a, b)).collect())
            .collect();
        if gpus >= 3 {
            prop_assert_eq!(links.ring(GpuSet::first(gpus)), 2000 * cycles_naively(&mesh));
        }
    }

    #[test]
    fn cut_bound_matches_its_definition(machine in any_machine(6, true)) {
        let gpus = machine.gpus().len();
        let rates = rates(gpus, 20_000, 24_000, 16_000);
        let links = Collective::new(&machine, &rates);
        for set in (0..1 << gpus).map(GpuSet::from_bits).filter(|set| set.len() > 1) {
            let naive = cut_naively(&machine, &rates, set);
            prop_assert!((f64::from(links.cut(set)) - naive).abs() <= 1.0, "{}: {} not {}", set, links.cut(set), naive);
        }
    }

    #[test]
    fn ring_is_within_cut_bound_and_tables_agree(machine in any_machine(9, true)) {
        let gpus = machine.gpus().len();
        let links = Collective::new(&machine, &rates(gpus, 20_000, 24_000, 16_000));
        let all = links.of_all_sets();
        for bits in 0..1u32 << gpus {
            let set = GpuSet::from_bits(bits);
            prop_assert!(links.ring(set) <= links.cut(set), "{}", set);
            prop_assert_eq!(all.ring[bits as usize], links.ring(set));
            prop_assert_eq!(all.cut[bits as usize], links.cut(set));
        }
    }
}
