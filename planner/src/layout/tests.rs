use std::sync::Arc;

use gantry_api::{ContainerShare, KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};
use gantry_topology::{GpuSet, Machine, Purpose};
use proptest::prelude::*;

use super::*;
use crate::fixtures::{GPU, bridged, cube_mesh, kind, plain, set, switched};
use crate::kind::{Kind, Sharing, Spot};
use crate::numa::Alignment;
use crate::request::{Container, ContainerKind, Request};
use crate::shape::{Parts, Shape};

fn ask(containers: &[(&'static str, ContainerKind, &'static str)]) -> Ask {
    let resources = [GPU.into()];
    let request = Request::read(&resources, |_| {
        containers.iter().map(|&(name, kind, quantity)| Container { name, kind, quantity: Some(quantity) })
    });
    request.unwrap().asks.remove(0)
}

/// The best layout on the whole GPUs of a machine.
fn best(machine: &Machine, free: GpuSet, ask: &Ask) -> Option<Layout> {
    best_of(&kind(machine), free, ask)
}

fn best_of(kind: &Kind, free: GpuSet, ask: &Ask) -> Option<Layout> {
    let shape = Shape::Whole;
    Layout::best(
        Site { kind, shape: &shape, cut: &[], purpose: Purpose::Local, models: &[], alignment: None },
        &free.into(),
        ask,
    )
}

/// The best layout on eight GPUs, four on each of two NUMA nodes, with a Topology Manager.
fn best_aligned(machine: &Machine, alignment: &Alignment, free: &DeviceSet, ask: &Ask) -> Option<Layout> {
    let (kind, shape) = (kind(machine), Shape::Whole);
    let alignment = Some(alignment);
    let site = Site { kind: &kind, shape: &shape, cut: &[], purpose: Purpose::Local, models: &[], alignment };
    Layout::best(site, free, ask)
}

fn halves(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> Alignment {
    let numa: Vec<Option<u32>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    Alignment::new(&KubeletTopology { policy, scope, ..KubeletTopology::default() }, &numa).unwrap()
}

/// Kubelet aligns the first container with the first NUMA node, so that the larger one has the second.
#[test]
fn aligned_containers_follow_order_of_admission() {
    let ask = ask(&[("a", ContainerKind::App, "1"), ("b", ContainerKind::App, "4")]);
    let alignment = halves(TopologyManagerPolicy::SingleNumaNode, TopologyManagerScope::Container);
    let layout = best_aligned(&bridged(), &alignment, &set("0-7").into(), &ask).unwrap();
    assert_eq!(laid(&layout, &ask), ["a: g0", "b: g4 g5 g6 g7"]);
}

fn ids() -> Vec<Option<DeviceId>> {
    (0..8).map(|gpu| Some(DeviceId::from(format!("g{gpu}")))).collect()
}

/// The layout as text: container by container.
fn laid(layout: &Layout, ask: &Ask) -> Vec<String> {
    let grants = layout.grants(ask, &ids()).unwrap();
    let text = |share: &ContainerShare| match share {
        ContainerShare::Devices(ids) => ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        ContainerShare::AnyOfHeld(count) => format!("any {count}"),
    };
    grants.iter().map(|grant| format!("{}: {}", grant.name, text(&grant.share))).collect()
}

#[test]
fn a_pair_is_given_where_a_pair_is_free() {
    let layout = best(&bridged(), set("1,2,4,5,6"), &Ask::single(GPU.into(), 2)).unwrap();
    assert_eq!(layout.devices.gpus(), set("4,5"));
    assert!(layout.gbs.unwrap() > 0.0);
}

#[test]
fn a_single_gpu_breaks_no_pair_while_a_loose_one_is_free() {
    let layout = best(&bridged(), set("0,1,3,4,5"), &Ask::single(GPU.into(), 1)).unwrap();
    assert_eq!(layout.devices.gpus(), set("3"));
    assert_eq!(layout.gbs, None);
}

#[test]
fn more_than_is_free_is_not_laid() {
    assert_eq!(best(&bridged(), set("0,1"), &Ask::single(GPU.into(), 3)), None);
}

#[test]
fn each_of_two_containers_gets_a_pair_of_its_own() {
    let ask = ask(&[("a", ContainerKind::App, "2"), ("b", ContainerKind::App, "2")]);
    let layout = best(&bridged(), set("0,1,2,4,5"), &ask).unwrap();
    assert_eq!(laid(&layout, &ask), ["a: g0 g1", "b: g4 g5"]);
}

#[test]
fn an_init_container_works_on_a_part_of_what_its_app_gets() {
    let ask = ask(&[("fetch", ContainerKind::Init, "2"), ("train", ContainerKind::App, "4")]);
    let layout = best(&bridged(), set("0-7"), &ask).unwrap();
    assert_eq!(laid(&layout, &ask), ["fetch: g0 g1", "train: g0 g1 g2 g3"]);
}

#[test]
fn larger_init_container_is_granted_the_whole_set() {
    let ask = ask(&[("fetch", ContainerKind::Init, "4"), ("train", ContainerKind::App, "2")]);
    let layout = best(&bridged(), set("0-7"), &ask).unwrap();
    assert_eq!(laid(&layout, &ask), ["fetch: g0 g1 g2 g3", "train: any 2"]);
}

#[test]
fn mix_of_leftover_and_new_devices_gets_no_grant() {
    let ask = ask(&[
        ("fetch", ContainerKind::Init, "3"),
        ("a", ContainerKind::App, "2"),
        ("b", ContainerKind::App, "2"),
    ]);
    let layout = best(&switched(), set("0-7"), &ask).unwrap();
    assert_eq!(layout.devices.len(), 4);
    assert_eq!(layout.grants(&ask, &ids()), Some(Vec::new()));
}

fn containers() -> impl Strategy<Value = Vec<(&'static str, ContainerKind, &'static str)>> {
    let size = prop::sample::select(vec!["1", "2", "3", "4"]);
    let init = (
        prop::sample::select(vec!["i", "j", "k"]),
        prop::sample::select(vec![ContainerKind::Init, ContainerKind::Sidecar]),
        size.clone(),
    );
    let app = (prop::sample::select(vec!["a", "b", "c"]), Just(ContainerKind::App), size);
    (prop::collection::vec(init, 0..3), prop::collection::vec(app, 1..3))
        .prop_map(|(inits, apps)| inits.into_iter().chain(apps).collect())
}

proptest! {
    /// Any pod, any free set: what is laid fits, every block has its size, no GPU is in two, and one container alone
    /// gets what the table says.
    #[test]
    fn what_is_laid_is_what_was_asked(free in 0u32..256, containers in containers(), which in 0usize..3) {
        let kind = kind(&[bridged(), switched(), plain(8)][which]);
        let free = GpuSet::from_bits(free);
        let ask = ask(&containers);
        let devices = ask.devices as usize;
        match best_of(&kind, free, &ask) {
            None => prop_assert!(devices > free.len()),
            Some(layout) => {
                prop_assert!(layout.devices.gpus().is_subset(free));
                prop_assert_eq!(layout.devices.len(), devices);
                let sizes: Vec<u32> = layout.blocks.iter().map(|block| u32::try_from(block.len()).unwrap()).collect();
                prop_assert_eq!(&sizes, &ask.blocks);
                prop_assert!(layout.grants(&ask, &ids()).is_some());
                if containers.len() == 1 {
                    prop_assert_eq!(Some(layout.devices.gpus()), kind.best(free, devices));
                }
            }
        }
    }

    /// A layout is found if kubelet admits any split of the blocks between the two NUMA nodes, and kubelet admits it.
    #[test]
    fn aligned_layout_exists_if_kubelet_admits_any(
        free in 0u32..256,
        containers in containers(),
        restricted in any::<bool>(),
        pod_scope in any::<bool>(),
    ) {
        let ask = ask(&containers);
        let policy = if restricted { TopologyManagerPolicy::Restricted } else { TopologyManagerPolicy::SingleNumaNode };
        let scope = if pod_scope { TopologyManagerScope::Pod } else { TopologyManagerScope::Container };
        let alignment = halves(policy, scope);
        let free = DeviceSet::from(GpuSet::from_bits(free));
        let splits = ask.blocks.iter().map(|size| *size as usize + 1).product::<usize>();
        let any_admitted = (0..splits).any(|mut split| {
            let mut nodes: [Vec<usize>; 2] = [vec![], vec![]];
            free.iter().for_each(|device| nodes[device / 4].push(device));
            let mut blocks = Vec::new();
            for size in &ask.blocks {
                let (size, first) = (*size as usize, split % (*size as usize + 1));
                split /= size + 1;
                if nodes[0].len() < first || nodes[1].len() < size - first {
                    return false;
                }
                let mut block: Vec<usize> = nodes[0].drain(..first).collect();
                block.extend(nodes[1].drain(..size - first));
                blocks.push(block.into_iter().collect::<DeviceSet>());
            }
            alignment.admits(&free, &ask, &blocks)
        });
        let layout = best_aligned(&bridged(), &alignment, &free, &ask);
        prop_assert_eq!(layout.is_some(), any_admitted, "{:?}", ask);
        if let Some(layout) = layout {
            prop_assert!(alignment.admits(&free, &ask, &layout.blocks));
        }
    }

    /// The worst-off container is never worse off than when the pod's set is chosen as a whole.
    #[test]
    fn splitting_never_serves_the_worst_off_worse(free in 0u32..256, a in 2usize..4, b in 2usize..4) {
        let kind = kind(&bridged());
        let free = GpuSet::from_bits(free);
        let sizes = ["", "1", "2", "3"];
        let ask = ask(&[("a", ContainerKind::App, sizes[a]), ("b", ContainerKind::App, sizes[b])]);
        if let Some(layout) = best_of(&kind, free, &ask) {
            let whole = kind.best(free, a + b).unwrap();
            let (first, second) = (a.max(b), a.min(b));
            let large = kind.best(whole, first).unwrap();
            let small = kind.best(whole - large, second).unwrap();
            let least = kind.bandwidth(large).min(kind.bandwidth(small));
            prop_assert!(layout.gbs.unwrap() >= least);
        }
    }
}

/// The worth of the best way to give sets of some sizes out of `free`, by trying everything: the bandwidth of the worst-off
/// set, then that of all together.
fn best_worth(kind: &Kind, free: GpuSet, sizes: &[usize], all: GpuSet, worst: u64) -> Option<(u64, u64)> {
    let Some((size, sizes)) = sizes.split_first() else {
        return Some((worst, megabytes(kind.bandwidth(all))));
    };
    let ways = free.subsets(*size).filter_map(|set| {
        let own = if set.len() > 1 { megabytes(kind.bandwidth(set)) } else { u64::MAX };
        best_worth(kind, free - set, sizes, all | set, worst.min(own))
    });
    ways.max()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Several containers, or members of a gang, on one node: no other way to give them their GPUs serves the worst-off
    /// better, nor all together.
    #[test]
    fn sets_of_one_node_are_the_best_jointly(
        free in 0u32..256,
        sizes in prop::collection::vec(1usize..4, 2..4),
        which in 0usize..3,
    ) {
        let kind = kind(&[bridged(), cube_mesh(), plain(8)][which]);
        let free = GpuSet::from_bits(free);
        const QUANTITIES: [&str; 4] = ["0", "1", "2", "3"];
        const NAMES: [&str; 3] = ["a", "b", "c"];
        let containers = sizes.iter().zip(NAMES).map(|(size, name)| (name, ContainerKind::App, QUANTITIES[*size]));
        let ask = ask(&containers.collect::<Vec<_>>());
        let laid = best_of(&kind, free, &ask);
        let worth = laid.map(|laid| {
            (laid.gbs.map_or(u64::MAX, megabytes), megabytes(kind.bandwidth(laid.devices.gpus())))
        });
        prop_assert_eq!(worth, best_worth(&kind, free, &sizes, GpuSet::EMPTY, u64::MAX));
    }
}

/// The GPU of each device of a set.
fn gpus_of(parts: &Parts, devices: &DeviceSet) -> Vec<u8> {
    devices.iter().map(|device| parts.spots()[device].gpu).collect()
}

/// How many distinct GPUs, and the most devices of one.
fn spread(gpus: &[u8]) -> (usize, usize) {
    let most = (0..8).map(|gpu| gpus.iter().filter(|known| **known == gpu).count());
    (gpus.iter().collect::<std::collections::BTreeSet<_>>().len(), most.max().unwrap_or(0))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Replicas, any pod, any free set: every container has what it asks for, no device is in two blocks, and against every set of that
    /// size a container alone never lies on fewer GPUs, nor closer on one.
    #[test]
    fn replicas_are_laid_on_as_many_gpus_as_there_are(
        bits in 0u32..4096,
        containers in containers(),
        devices in 1usize..5,
        packed in any::<bool>(),
    ) {
        let sharing = if packed { Sharing::Packed } else { Sharing::Distributed };
        let spots = (0..4).flat_map(|gpu| std::iter::repeat_n(Spot { gpu, slice: None }, 3));
        let shape = Shape::Parts(Arc::new(Parts::new(spots.collect(), sharing)));
        let Shape::Parts(parts) = &shape else { unreachable!() };
        let kind = kind(&bridged());
        let site = Site { kind: &kind, shape: &shape, cut: &[], purpose: Purpose::Local, models: &[], alignment: None };
        let free = DeviceSet::from(GpuSet::from_bits(bits));

        let ask = ask(&containers);
        match Layout::best(site, &free, &ask) {
            None => prop_assert!(ask.devices as usize > free.len()),
            Some(layout) => {
                prop_assert!(layout.devices.is_subset(&free));
                let sizes: Vec<u32> = layout.blocks.iter().map(|block| u32::try_from(block.len()).unwrap()).collect();
                prop_assert_eq!(&sizes, &ask.blocks);
                prop_assert_eq!(layout.devices.len(), ask.devices as usize);
            }
        }

        let alone = Ask::single(GPU.into(), u32::try_from(devices).unwrap());
        if let Some(layout) = Layout::best(site, &free, &alone) {
            let (distinct, most) = spread(&gpus_of(parts, &layout.devices));
            for other in GpuSet::from_bits(bits).subsets(devices) {
                let (known, closest) = spread(&gpus_of(parts, &other.into()));
                prop_assert!((distinct, std::cmp::Reverse(most)) >= (known, std::cmp::Reverse(closest)));
            }
        }
    }
}
