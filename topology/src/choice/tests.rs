use proptest::prelude::*;

use super::*;
use crate::bandwidth::LinkRate;
use crate::machine::{
    Gpu, MAX_LINKS_PER_GPU, MachineParts, Nic, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix, PcieLink,
    PeerRefusal, PeerStatus, Throttle,
};

fn set(text: &str) -> GpuSet {
    text.parse().unwrap()
}

/// Two sockets of two bridged pairs each, and `nics` behind the switch of GPU 0.
fn bridged_pairs(nics: usize) -> Machine {
    let near = |row: usize, column: usize| {
        let (a, b) = (if row < 8 { row } else { 0 }, if column < 8 { column } else { 0 });
        match (a / 4 == b / 4, row >= 8 && column == 0) {
            (_, true) => PathClass::Pix,
            (true, _) => PathClass::Node,
            (false, _) => PathClass::Sys,
        }
    };
    Machine::new(MachineParts {
        gpus: (0..8).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        nics: (0..nics).map(|nic| Nic { name: format!("mlx5_{nic}"), ..Nic::default() }).collect(),
        nvlinks: (0..4).map(|pair| NvLinkBundle { gpus: [2 * pair, 2 * pair + 1], links: 4 }).collect(),
        paths: PathMatrix::from_fn(8 + nics, near),
        ..MachineParts::default()
    })
    .unwrap()
}

/// Eight GPUs on switches, NICs next to the first four alone.
fn lopsided() -> Machine {
    let near = |row: usize, column: usize| match (row < 8, column < 8) {
        (true, true) if row / 4 == column / 4 => PathClass::Node,
        (false, true) if row - 8 == column => PathClass::Pxb,
        (false, true) if column < 4 => PathClass::Node,
        _ => PathClass::Sys,
    };
    Machine::new(MachineParts {
        gpus: (0..8)
            .map(|index| Gpu {
                index,
                nvlink: Some(NvLinkPorts { version: Some(3), switch_links: 12, ..NvLinkPorts::default() }),
                ..Gpu::default()
            })
            .collect(),
        nics: (0..4).map(|nic| Nic { name: format!("mlx5_{nic}"), ..Nic::default() }).collect(),
        paths: PathMatrix::from_fn(12, near),
        ..MachineParts::default()
    })
    .unwrap()
}

fn best(table: &Table, free: &str, size: usize) -> String {
    table.best(set(free), size, Purpose::Local).unwrap().gpus.to_string()
}

#[test]
fn unpaired_gpu_is_chosen_before_a_pair_is_split() {
    let table = Table::build(&bridged_pairs(0));
    assert_eq!(best(&table, "0,1,3,4,5,6,7", 1), "3");
    assert_eq!(best(&table, "0,1,2,3,6", 1), "6");
    // Also where the pair's half would be of use to three GPUs of the other socket.
    assert_eq!(best(&table, "0,1,3,6,7", 1), "3");
    // Two single GPUs come out of one pair, not two.
    assert_eq!(best(&table, "0,1,2,3,4,5,6,7", 1), "0");
    assert_eq!(best(&table, "1,2,3,4,5,6,7", 1), "1");
}

#[test]
fn socket_precedes_pair_kept_for_later() {
    let table = Table::build(&bridged_pairs(0));
    let choice = table.best(set("0,1,2,3,4"), 3, Purpose::Local).unwrap();
    assert!(choice.gpus.is_subset(set("0,1,2,3")), "{}", choice.gpus);
    assert_eq!(choice.bandwidth_gbs, 24.0);
}

#[test]
fn local_jobs_avoid_nics_and_gang_members_use_them() {
    let table = Table::build(&lopsided());
    let all = table.all();
    assert_eq!(table.best(all, 4, Purpose::Local).unwrap().gpus, set("4,5,6,7"));
    assert_eq!(table.best(all, 4, Purpose::GangMember).unwrap().gpus, set("0,1,2,3"));
    assert_eq!(table.best(all, 1, Purpose::Local).unwrap().gpus, set("4"));
    assert_eq!(table.best(all, 1, Purpose::GangMember).unwrap().gpus, set("0"));
    assert_eq!(table.near_nics(set("0,2,5")), [0, 2]);
}

/// All sets have equal links behind the switches. A socket's four would stay whole where the fifth is taken with one of
/// them, but the job's two GPUs would have no memory near both.
#[test]
fn numa_node_precedes_whole_socket() {
    let mut parts = lopsided().into_parts();
    for gpu in &mut parts.gpus {
        gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
    }
    let table = Table::build(&Machine::new(parts).unwrap());
    for (free, size, chosen) in [("0-4", 2, "0-1"), ("0,4-7", 3, "4-6"), ("0-5", 2, "4-5")] {
        assert_eq!(best(&table, free, size), set(chosen).to_string(), "{free}");
    }
}

/// Six GPUs in pairs below a switch each, alike by wire.
fn switch_pairs(change: impl FnOnce(&mut MachineParts)) -> Machine {
    let mut parts = MachineParts {
        gpus: (0..6).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        paths: PathMatrix::from_fn(6, |a, b| if a / 2 == b / 2 { PathClass::Pix } else { PathClass::Node }),
        ..MachineParts::default()
    };
    change(&mut parts);
    Machine::new(parts).unwrap()
}

#[test]
fn switch_precedes_host_bridge_of_equal_wire() {
    let table = Table::build(&switch_pairs(|_| ()));
    assert_eq!(best(&table, "1,2,4,5", 2), "4,5");
    // A link between sockets as fast as the slots changes nothing.
    let machine = switch_pairs(|parts| {
        parts.paths = PathMatrix::from_fn(6, |a, b| match (a / 2 == b / 2, a / 3 == b / 3) {
            (true, _) => PathClass::Pxb,
            (_, true) => PathClass::Node,
            _ => PathClass::Sys,
        });
    });
    let rate = LinkRate::new(24_000, 24_000);
    let rates = Rates { nvlink: vec![rate; 6], pcie: vec![rate; 6], socket: rate };
    let table = Table::with_rates(&machine, &rates);
    assert_eq!(best(&table, "1,2,4,5", 2), "4,5");
    assert_eq!(best(&table, "0,2,3", 2), "2,3");
    assert_eq!(best(&table, "0,2,5", 2), "0,2");
}

#[test]
fn peer_to_peer_status_precedes_path_class() {
    let table = Table::build(&switch_pairs(|parts| {
        parts.no_peer_access = vec![PeerRefusal { gpus: [4, 5], status: PeerStatus::Chipset }];
    }));
    assert_eq!(best(&table, "1,2,4,5", 2), "1,2");
    assert_eq!(best(&table, "2,3,4,5", 2), "2,3");
    let choice = table.best(set("4,5"), 2, Purpose::Local).unwrap();
    // Data pass through host memory.
    assert_eq!(table.class(choice.gpus), LinkClass::Numa);
    insta::assert_snapshot!(choice.reason(&table), @"GPUs 4,5: over PCIe within one PCIe switch without peer-to-peer, 24 GB/s, the most that 2 GPUs of this machine reach; leaves none free");
}

#[test]
fn refused_peers_have_no_nvlink() {
    let mut parts = bridged_pairs(0).into_parts();
    parts.no_peer_access = vec![PeerRefusal { gpus: [0, 1], status: PeerStatus::Disabled }];
    let table = Table::build(&Machine::new(parts).unwrap());
    assert_eq!(best(&table, "0,1,2,3", 2), "2,3");
    assert_eq!(table.best(set("0,1"), 2, Purpose::Local).unwrap().bandwidth_gbs, 24.0);
    let mut parts = lopsided().into_parts();
    parts.no_peer_access = vec![PeerRefusal { gpus: [4, 5], status: PeerStatus::Disabled }];
    let table = Table::build(&Machine::new(parts).unwrap());
    assert_eq!(best(&table, "4,5,6", 2), "4,6");
}

/// A slot trained at half its lanes, a switch link that is down, a hot GPU: each is chosen last, and the reason names it.
#[test]
fn degraded_gpus_are_chosen_last_and_named() {
    let full = PcieLink { generation: 4, width: 16 };
    let table = Table::build(&switch_pairs(|parts| {
        parts.gpus[0].pcie = Some(full);
        parts.gpus[0].pcie_trained = Some(PcieLink { width: 8, ..full });
        parts.gpus[4].throttle = Some(Throttle::Thermal);
    }));
    assert_eq!(best(&table, "0,1,2,3", 2), "2,3");
    assert_eq!(best(&table, "0,1,4,5", 2), "4,5");
    assert_eq!(best(&table, "2,3,4,5", 2), "2,3");
    assert_eq!(best(&table, "4,5", 1), "5");
    assert_eq!(best(&table, "0,1", 1), "1");
    let reason = |free: &str| table.best(set(free), 2, Purpose::Local).unwrap().reason(&table);
    insta::assert_snapshot!(reason("0,1"), @"GPUs 0,1: over PCIe within one PCIe switch, 12 GB/s, all that is free (24 GB/s on the empty machine); leaves none free; GPU 0: link trained at PCIe 4 x8 instead of PCIe 4 x16");
    insta::assert_snapshot!(reason("4,5"), @"GPUs 4,5: over PCIe within one PCIe switch, 24 GB/s, the most that 2 GPUs of this machine reach; leaves none free; GPU 4: clocks held down by heat");
    let single = table.best(set("0,1"), 1, Purpose::Local).unwrap();
    insta::assert_snapshot!(single.reason(&table), @"GPU 1: better than GPU 0, free but degraded; leaves GPU 0 free; splits PCIe switch 0,1");
    assert_eq!(table.best(set("0,4"), 1, Purpose::Local).unwrap().gpus, set("0"));
    let mut parts = lopsided().into_parts();
    if let Some(ports) = &mut parts.gpus[5].nvlink {
        ports.switch_links = 11;
    }
    let table = Table::build(&Machine::new(parts).unwrap());
    assert_eq!(best(&table, "4,5,6", 2), "4,6");
    assert_eq!(best(&table, "5,6", 1), "6");
    assert_eq!(best(&table, "0-7", 7), "0,1,2,3,4,6,7");
    let reason = table.best(set("4,5"), 2, Purpose::Local).unwrap().reason(&table);
    insta::assert_snapshot!(reason, @"GPUs 4,5: over NVSwitch, 220 GB/s, all that is free (240 GB/s on the empty machine); leaves none free; GPU 5: 11 of 12 NVLinks up");
}

/// Two rings of four GPUs with as many cycles; GPUs 5 and 7 have a link across in addition.
#[test]
fn more_links_win_before_lowest_index() {
    let links = [(0, 1), (1, 2), (2, 3), (0, 3), (4, 5), (5, 6), (6, 7), (4, 7), (5, 7)];
    let mut parts = bridged_pairs(0).into_parts();
    parts.nvlinks = links.map(|(a, b)| NvLinkBundle { gpus: [a, b], links: 2 }).to_vec();
    let table = Table::build(&Machine::new(parts).unwrap());
    assert_eq!(best(&table, "0-7", 4), "4,5,6,7");
}

#[test]
fn choice_has_quality_and_stranded() {
    let table = Table::build(&bridged_pairs(0));
    let whole = table.best(table.all(), 2, Purpose::Local).unwrap();
    assert_eq!((whole.gpus, whole.bandwidth_gbs, whole.quality(&table)), (set("0,1"), 48.0, 1.0));
    let poor = table.best(set("1,4"), 2, Purpose::Local).unwrap();
    assert_eq!(poor.bandwidth_gbs, 16.0);
    assert!((poor.quality(&table) - 16.0 / 48.0).abs() < 1e-12);
    assert_eq!(poor.remainder, 0.0);
    assert_eq!(table.remainder(table.all()), 1.0);
    assert!((whole.stranded(&table) - (1.0 - whole.remainder)).abs() < 1e-12);
}

#[test]
fn impossible_requests_return_none() {
    let table = Table::build(&bridged_pairs(0));
    assert!(table.best(set("0,1"), 3, Purpose::Local).is_none());
    assert!(table.best(set("0,30,31"), 2, Purpose::Local).is_none());
    assert_eq!(table.best(GpuSet::EMPTY, 0, Purpose::Local).unwrap().gpus, GpuSet::EMPTY);
    // Required but not offered, more required than asked, more asked than offered.
    for (free, must, size) in [("0,1", "2", 1), ("0,1,2", "0,1", 1), ("0,1", "0", 3), ("0,1", "0", 0)] {
        assert!(table.best_with(set(free), set(must), size, Purpose::Local).is_none());
    }
    let empty = Table::build(&Machine::new(MachineParts::default()).unwrap());
    assert!(empty.best(GpuSet::first(3), 1, Purpose::Local).is_none());
    assert_eq!(empty.remainder(GpuSet::EMPTY), 0.0);
}

#[test]
fn reason_names_links_and_remaining_gpus() {
    let table = Table::build(&bridged_pairs(0));
    let reason = |free: &str, size| {
        let choice = table.best(set(free), size, Purpose::Local).unwrap();
        choice.reason(&table)
    };
    insta::assert_snapshot!(reason("0-7", 1), @"GPU 0: no GPU outside whole groups is free; leaves GPUs 1,2,3,4,5,6,7 free; splits NVLink pair 0,1");
    insta::assert_snapshot!(reason("0-7", 2), @"GPUs 0,1: over NVLink, 48 GB/s, the most that 2 GPUs of this machine reach; leaves GPUs 2,3,4,5,6,7 free; splits socket 0,1,2,3");
    insta::assert_snapshot!(reason("0,1,2,3,4", 3), @"GPUs 0,1,2: over PCIe within one socket, 24 GB/s, the most that 3 GPUs of this machine reach; leaves GPUs 3,4 free; splits NVLink pair 2,3");
    insta::assert_snapshot!(reason("0,1,2,4,6,7", 3), @"GPUs 0,1,2: over PCIe within one socket, 24 GB/s, the most that 3 GPUs of this machine reach; leaves GPUs 4,6,7 free");
    insta::assert_snapshot!(reason("1,4", 2), @"GPUs 1,4: over PCIe across sockets, 16 GB/s, all that is free (48 GB/s on the empty machine); leaves none free");
    insta::assert_snapshot!(reason("1,2,3", 1), @"GPU 1: splits no group that is whole; leaves GPUs 2,3 free");
    let switched = Table::build(&lopsided());
    let choice = switched.best(switched.all(), 4, Purpose::GangMember).unwrap();
    insta::assert_snapshot!(choice.reason(&switched), @"GPUs 0,1,2,3: over NVSwitch, 240 GB/s, the most that 4 GPUs of this machine reach, 4 NICs on the same PCIe switches; leaves GPUs 4,5,6,7 free");
}

/// What is searched for on the empty machine may fall short of what is found in a part of it.
#[test]
fn large_machine_choice_is_never_called_best_possible() {
    let mut random = 1u32;
    let mut below = |limit: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) % limit
    };
    let mut reasons = Vec::new();
    for _ in 0..8 {
        let mut nvlinks = Vec::new();
        for (a, b) in (0..24u8).flat_map(|a| (0..a).map(move |b| (a, b))) {
            if below(5) == 0 {
                let links = u8::try_from(1 + below(6)).unwrap();
                nvlinks.push(NvLinkBundle { gpus: [b, a], links });
            }
        }
        let machine = Machine::new(MachineParts {
            gpus: (0..24).map(|index| Gpu { index, ..Gpu::default() }).collect(),
            nvlinks,
            paths: PathMatrix::from_fn(24, |_, _| PathClass::Node),
            ..MachineParts::default()
        });
        // Some would have more links than a GPU can have.
        let Ok(machine) = machine else { continue };
        let table = Table::build(&machine);
        assert!(!table.is_exhaustive());
        for size in 2..24 {
            let choice = table.best(table.all(), size, Purpose::Local).unwrap();
            assert!(choice.quality(&table) <= 1.0, "{size}");
            reasons.push(choice.reason(&table));
        }
    }
    insta::assert_snapshot!(reasons[0], @"GPUs 2,4: over NVLink, 123.6 GB/s, the most found for 2 GPUs of this machine; leaves GPUs 0,1,3,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23 free; GPU 2: 17 of 29 NVLinks up; GPU 4: 18 of 29 NVLinks up");
}

#[test]
fn machines_of_one_kind_share_a_table() {
    let mut tables = Tables::default();
    let first = tables.of(&bridged_pairs(0));
    let mut renamed = bridged_pairs(0).into_parts();
    renamed.name = Some("another".to_owned());
    renamed.gpus[3].uuid = Some("GPU-0".parse().unwrap());
    let second = tables.of(&Machine::new(renamed).unwrap());
    assert!(std::sync::Arc::ptr_eq(&first, &second));
    let other = tables.of(&bridged_pairs(2));
    assert_eq!(tables.len(), 2);
    drop(other);
    tables.forget_unused();
    assert_eq!(tables.len(), 1);
}

#[test]
fn table_of_16_gpus_is_below_3_mb() {
    let mut parts = lopsided().into_parts();
    parts.gpus = (0..16).map(|index| Gpu { index, ..parts.gpus[0].clone() }).collect();
    parts.paths = PathMatrix::from_fn(20, |_, _| PathClass::Sys);
    let table = Table::build(&Machine::new(parts).unwrap());
    assert!(table.bytes() <= 3_000_000, "{}", table.bytes());
}

/// R after churn by its definition: over all sets that may follow, each held GPU free with probability 1/16.
fn churned_naively(table: &Table, links: &Collective, set: GpuSet) -> f64 {
    let all = table.all();
    let best = |of: GpuSet, size: usize| of.subsets(size).map(|set| links.ring(set)).max();
    let plain = |of: GpuSet| -> f64 {
        let worth = |size: usize| match (best(of, size), best(all, size)) {
            (None, _) => 0.0,
            (Some(_), Some(0) | None) => 1.0,
            (Some(found), Some(whole)) => f64::from(found) / f64::from(whole),
        };
        (1..=all.len()).map(worth).sum::<f64>() / all.len() as f64
    };
    let held = all - set;
    let followers = (0..=all.bits()).map(GpuSet::from_bits).filter(|freed| freed.is_subset(held));
    followers
        .map(|freed| {
            let stay = i32::try_from(held.len() - freed.len()).unwrap();
            let come = i32::try_from(freed.len()).unwrap();
            plain(set | freed) * (15f64 / 16.0).powi(stay) * (1f64 / 16.0).powi(come)
        })
        .sum()
}

fn refused(machine: &Machine, pair: [usize; 2]) -> bool {
    machine.no_peer_access().iter().any(|refusal| refusal.gpus.map(usize::from) == pair)
}

/// The best set by trying all and comparing their terms one after the other, as the module's head lists them.
fn brute_force(
    machine: &Machine,
    table: &Table,
    links: &Collective,
    free: GpuSet,
    must: GpuSet,
    size: usize,
    purpose: Purpose,
) -> GpuSet {
    let around = &table.surroundings;
    let churned = |set: GpuSet| table.sets.as_ref().unwrap().churned[set.bits() as usize];
    let terms = |set: GpuSet| {
        let rest = free - set;
        let nics = around.nics(set, purpose);
        let numa = std::cmp::Reverse(around.numa_nodes(set));
        let gang = purpose == Purpose::GangMember && size > 1 && around.has_nics();
        let nvlink_cut = if links.ring(set) > links.pcie_ring(set) { links.cut(set) } else { 0 };
        let pairs = || set.iter().flat_map(|a| set.iter().filter(move |b| *b > a).map(move |b| [a, b]));
        let refused = pairs().any(|pair| refused(machine, pair));
        let class = |[a, b]: [usize; 2]| match machine.paths().get(a, b) {
            PathClass::Pix | PathClass::Pxb => 2,
            PathClass::Phb | PathClass::Node => 1,
            PathClass::Sys | PathClass::Soc => 0,
        };
        let worst = if nvlink_cut > 0 { 3 } else { pairs().map(class).min().unwrap_or(3) };
        let degraded = set.iter().filter(|gpu| machine.is_degraded(*gpu)).count();
        let joined = !refused
            && set
                .iter()
                .all(|gpu| machine.switch_island(gpu) == machine.switch_island(set.lowest().unwrap()));
        let direct = pairs().filter(|pair| !self::refused(machine, *pair));
        let direct: u32 = direct.map(|[a, b]| u32::from(machine.direct_nvlinks(a, b))).sum();
        let least = set.iter().map(|gpu| u32::from(machine.switch_links(gpu))).min().unwrap_or(0);
        let switched = if joined && size > 1 { least * u32::try_from(size).unwrap() } else { 0 };
        (
            (links.ring(set), !refused, worst, std::cmp::Reverse(degraded), direct + switched),
            gang.then_some((nics, numa)),
            around.islands(set) + around.islands(rest),
            churned(rest),
            nvlink_cut,
            (!gang && size > 1).then_some(numa),
            around.together(set) + around.together(rest),
            (!gang).then_some((nics, numa)),
            std::cmp::Reverse(set.bits()),
        )
    };
    let candidates = free.subsets(size).filter(|set| must.is_subset(*set));
    candidates.max_by_key(|set| terms(*set)).unwrap()
}

/// Any machine: links asymmetric in number, disconnected or none, switches, sockets in any arrangement, NICs anywhere.
fn any_machine(gpus: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = (Machine, Rates)> {
    gpus.prop_flat_map(|gpus| {
        let pairs = gpus * gpus.saturating_sub(1) / 2;
        let nics = 0..4usize;
        let links = proptest::collection::vec(prop_oneof![3 => Just(0u8), 2 => 1..3u8], pairs);
        let switch = prop_oneof![Just(vec![0u8; gpus]), proptest::collection::vec(0..3u8, gpus)];
        let classes = proptest::collection::vec(0..6usize, (gpus + 4) * (gpus + 4));
        let numa = proptest::collection::vec(proptest::option::of(0..3u8), gpus);
        let rates = proptest::collection::vec((1..4u32, 1..4u32), gpus);
        let throttled = prop_oneof![Just(0u32), any::<u32>()];
        let refused = prop_oneof![Just(0u64), any::<u64>()];
        (nics, links, switch, classes, numa, rates, 0..3u32, (throttled, refused)).prop_map(
            |(nics, links, switch, classes, numa, rates, socket, (throttled, refused))| {
                let gpus = switch.len();
                let count = u8::try_from(gpus).unwrap();
                let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| [a, b]));
                let no_peer_access = pairs.clone().enumerate();
                let no_peer_access = no_peer_access
                    .filter(|(pair, _)| refused >> (pair % 64) & 1 == 1)
                    .map(|(_, gpus)| PeerRefusal { gpus, status: PeerStatus::Chipset })
                    .collect();
                let mut left: Vec<u8> = switch.iter().map(|links| MAX_LINKS_PER_GPU - links).collect();
                let mut fits = |pair: [u8; 2], links: u8| {
                    let fits = pair.iter().all(|gpu| left[usize::from(*gpu)] >= links);
                    pair.iter().filter(|_| fits).for_each(|gpu| left[usize::from(*gpu)] -= links);
                    fits
                };
                let machine = Machine::new(MachineParts {
                    gpus: (0..count)
                        .zip(switch.iter().zip(&numa))
                        .map(|(index, (links, numa))| Gpu {
                            index,
                            numa: numa.map(|node| node.to_string().parse().unwrap()),
                            throttle: (throttled >> index & 1 == 1).then_some(Throttle::Thermal),
                            nvlink: Some(NvLinkPorts {
                                version: None,
                                switch_links: *links,
                                ..NvLinkPorts::default()
                            }),
                            ..Gpu::default()
                        })
                        .collect(),
                    nics: (0..nics)
                        .map(|nic| Nic { name: format!("mlx5_{nic}"), ..Nic::default() })
                        .collect(),
                    nvlinks: pairs
                        .zip(links)
                        .filter(|(pair, links)| *links > 0 && fits(*pair, *links))
                        .map(|(gpus, links)| NvLinkBundle { gpus, links })
                        .collect(),
                    no_peer_access,
                    paths: PathMatrix::from_fn(gpus + nics, |a, b| {
                        PathClass::ALL[classes[a * (gpus + 4) + b]]
                    }),
                    ..MachineParts::default()
                })
                .unwrap();
                let rate = |step: u32| LinkRate::new(step * 6000, step * 6000);
                let rates = Rates {
                    nvlink: rates.iter().map(|(nvlink, _)| rate(*nvlink)).collect(),
                    pcie: rates.iter().map(|(_, pcie)| rate(*pcie)).collect(),
                    socket: rate(socket),
                };
                (machine, rates)
            },
        )
    })
}

const PURPOSES: [Purpose; 2] = [Purpose::Local, Purpose::GangMember];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn small_machine_choices_match_brute_force((machine, rates) in any_machine(0..=7)) {
        let table = Table::with_rates(&machine, &rates);
        let links = Collective::new(&machine, &rates);
        for free in (0..=table.all().bits()).map(GpuSet::from_bits) {
            for (size, purpose) in (0..=free.len()).flat_map(|size| PURPOSES.map(|purpose| (size, purpose))) {
                let chosen = table.best(free, size, purpose).unwrap();
                let best = brute_force(&machine, &table, &links, free, GpuSet::EMPTY, size, purpose);
                prop_assert_eq!(chosen.gpus, best, "{} of {:?}, {:?}", size, free, purpose);
                prop_assert_eq!((chosen.bandwidth_gbs * 1000.0).round(), f64::from(links.ring(best)));
            }
            prop_assert!(table.best(free, free.len() + 1, Purpose::Local).is_none());
        }
    }

    #[test]
    fn churn_matches_its_expectation((machine, rates) in any_machine(1..=5)) {
        let table = Table::with_rates(&machine, &rates);
        let links = Collective::new(&machine, &rates);
        for set in (0..=table.all().bits()).map(GpuSet::from_bits) {
            let kept = f64::from(table.churned(set)) / f64::from(1 << 20);
            prop_assert!((kept - churned_naively(&table, &links, set)).abs() < 2e-6, "{}", set);
        }
    }

    #[test]
    fn required_gpus_get_the_best_set_with_them(
        (machine, rates) in any_machine(1..=8),
        free in any::<u32>(),
        must in any::<u32>(),
        size in 0..9usize,
    ) {
        let table = Table::with_rates(&machine, &rates);
        let links = Collective::new(&machine, &rates);
        let free = GpuSet::from_bits(free) & table.all();
        let must = GpuSet::from_bits(must) & free;
        for purpose in PURPOSES {
            let chosen = table.best_with(free, must, size, purpose);
            if must.len() <= size && size <= free.len() {
                let best = brute_force(&machine, &table, &links, free, must, size, purpose);
                prop_assert_eq!(chosen.unwrap().gpus, best);
            } else {
                prop_assert!(chosen.is_none());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn sampled_choices_of_16_gpus_match_brute_force(
        (machine, rates) in any_machine(16..=16),
        states in proptest::collection::vec((any::<u16>(), 0..17usize), 24),
    ) {
        let table = Table::with_rates(&machine, &rates);
        let links = Collective::new(&machine, &rates);
        for (free, size) in states {
            let free = GpuSet::from_bits(u32::from(free));
            if size > free.len() {
                continue;
            }
            for purpose in PURPOSES {
                let best = brute_force(&machine, &table, &links, free, GpuSet::EMPTY, size, purpose);
                prop_assert_eq!(table.best(free, size, purpose).unwrap().gpus, best);
            }
        }
    }

    #[test]
    fn large_machine_choices_are_valid(
        (machine, rates) in any_machine(17..=32),
        states in proptest::collection::vec((any::<u32>(), any::<u32>(), 0..33usize), 4),
    ) {
        let table = Table::with_rates(&machine, &rates);
        for (free, must, size) in states {
            let free = GpuSet::from_bits(free) & table.all();
            let must = GpuSet::from_bits(must & must.rotate_left(7)) & free;
            for purpose in PURPOSES {
                let chosen = table.best_with(free, must, size, purpose);
                prop_assert_eq!(chosen.is_some(), must.len() <= size && size <= free.len());
                if let Some(chosen) = chosen {
                    prop_assert!(chosen.gpus.is_subset(free) && must.is_subset(chosen.gpus));
                    prop_assert_eq!(chosen.gpus.len(), size);
                    prop_assert!((0.0..=1.0).contains(&chosen.remainder));
                    prop_assert_eq!(table.best_with(free, must, size, purpose), Some(chosen));
                }
            }
        }
    }
}
