//! Pods with terms for their devices, and nodes with a Topology Manager that aligns them.

use std::sync::Arc;

use gantry_api::{KubeletTopology, TopologyManagerPolicy, TopologyManagerScope};
use gantry_topology::{LinkClass, Machine, MachineParts, PathClass, PathMatrix};
use proptest::prelude::*;

use crate::decide::{Policy, judge, score};
use crate::devices::DeviceSet;
use crate::fixtures::{
    GPU, bridged, class_of, kind, plain, pool_of, request, request_of_two, set, slices, switched,
};
use crate::layout::Layout;
use crate::numa::Alignment;
use crate::placement::{PlacementRequest, SetTerms};
use crate::request::Request;
use crate::shape::Shape;
use crate::snapshot::{Class, Pool};

fn class(machine: &Machine, model: &str, free: &str) -> Class {
    let kind = kind(machine);
    let pool = pool_of(GPU, Shape::Whole, kind.gpus(), set(free).into());
    let models = vec![model.into(); kind.gpus()].into();
    Class { models, cost: kind.total_megabytes(), ..class_of(&kind, pool) }
}

/// Eight GPUs in pairs below a switch, four to a socket.
fn switch_pairs() -> Machine {
    let mut parts = plain(8).into_parts();
    parts.paths = PathMatrix::from_fn(8, |a, b| match (a / 2 == b / 2, a / 4 == b / 4) {
        (true, _) => PathClass::Pix,
        (_, true) => PathClass::Node,
        _ => PathClass::Sys,
    });
    Machine::new(parts).unwrap()
}

fn aligned(mut class: Class, policy: TopologyManagerPolicy) -> Class {
    let kubelet = KubeletTopology { policy, ..KubeletTopology::default() };
    let numa: Vec<Option<u32>> = (0..class.kind.gpus()).map(|gpu| u32::try_from(gpu / 4).ok()).collect();
    class.pools[0].alignment = Alignment::new(&kubelet, &numa).map(Arc::new);
    class
}

fn asking(gpus: u32, annotations: &[(&str, &str)]) -> Request {
    let named: Vec<(String, &str)> =
        annotations.iter().map(|(name, text)| (format!("gantry.dev/{name}"), *text)).collect();
    let named = named.iter().map(|(name, text)| (name.as_str(), *text));
    let request = Arc::unwrap_or_clone(request(gpus));
    request.placed_by(named, &PlacementRequest::default()).unwrap()
}

fn refusal(class: &Class, request: &Request) -> String {
    judge(class, request).unwrap_err().of_one_node()
}

#[test]
fn unmet_terms_name_what_is_free_instead() {
    let class = |free| class(&switch_pairs(), "NVIDIA L40S", free);
    let refused = |free, gpus, annotations: &[_]| refusal(&class(free), &asking(gpus, annotations));
    insta::assert_snapshot!(refused("0-7", 2, &[("required-link", "nvlink")]), @"no 2 free GPUs share NVLink; the best free pair is PIX, 24 GB/s");
    insta::assert_snapshot!(refused("0,2,4,6", 2, &[("required-link", "pcie-switch")]), @"no 2 free GPUs are below one PCIe host bridge; the best free pair is NODE, 24 GB/s");
    insta::assert_snapshot!(refused("0-7", 5, &[("required-link", "numa")]), @"no 5 free GPUs are on one NUMA node; the best free 5 is SYS, 16 GB/s");
    insta::assert_snapshot!(refused("0-7", 2, &[("required-bandwidth", "40")]), @"no 2 free GPUs reach 40 GB/s; the best free pair is PIX, 24 GB/s");
    insta::assert_snapshot!(refused("0-7", 2, &[("gpu-models", "H100,A100")]), @"0 of 2 GPUs free of H100, A100 (the GPUs are NVIDIA L40S)");
    assert!(
        judge(&class("0-7"), &asking(2, &[("required-link", "pcie-switch"), ("gpu-models", "L40S")])).is_ok()
    );
    assert!(judge(&class("0-7"), &asking(1, &[("required-link", "nvlink")])).is_ok());
}

#[test]
fn topology_manager_refusal_is_named() {
    let class = aligned(class(&switched(), "", "0-7"), TopologyManagerPolicy::SingleNumaNode);
    insta::assert_snapshot!(refusal(&class, &request(5)), @"the Topology Manager (single-numa-node) would refuse 5 devices: 4 + 4 are free by NUMA node");
    assert!(judge(&class, &request(4)).is_ok());
    assert!(judge(&aligned(class, TopologyManagerPolicy::Restricted), &request(5)).is_ok());
}

/// A node with GPU 7, on the second NUMA node, partitioned into two MIG devices. Of its other GPUs `free` are free.
fn partitioned(free: &str, policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> Class {
    let mut class = class(&switched(), "", free);
    let both = DeviceSet::range(0, 2);
    let slices = slices(&[(7, 0, 4), (7, 4, 4)]);
    let mig = Pool {
        resource: MIG.into(),
        shape: slices,
        free: both.clone(),
        open: both,
        ..class.pools[0].clone()
    };
    class.pools.push(mig);
    let kubelet = KubeletTopology { policy, scope, ..KubeletTopology::default() };
    let of_gpus: Vec<Option<u32>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    for (pool, numa) in class.pools.iter_mut().zip([&of_gpus[..], &[Some(1), Some(1)]]) {
        pool.alignment = Alignment::new(&kubelet, numa).map(Arc::new);
    }
    class
}

const MIG: &str = "nvidia.com/mig-3g.40gb";

#[test]
fn devices_of_two_resources_share_a_numa_node() {
    let (single, restricted) = (TopologyManagerPolicy::SingleNumaNode, TopologyManagerPolicy::Restricted);
    let (container, pod) = (TopologyManagerScope::Container, TopologyManagerScope::Pod);
    let together = request_of_two([GPU, MIG], &[[1, 1]]);
    let layouts = |class: &Class| score(class, &together, &[], Policy::Pack).map(|(_, layouts)| layouts);
    for (policy, scope) in [(single, container), (single, pod), (restricted, container), (restricted, pod)] {
        let layouts = layouts(&partitioned("0-4", policy, scope)).unwrap();
        assert_eq!(layouts[0].devices, DeviceSet::from(set("4")));
    }
    let lower = partitioned("0-3", single, container);
    assert_eq!(layouts(&lower), None);
    insta::assert_snapshot!(refusal(&lower, &together), @"the Topology Manager (single-numa-node) would refuse 1 nvidia.com/gpu and 1 nvidia.com/mig-3g.40gb together: 4 + 0 and 0 + 2 are free by NUMA node");
    let apart = request_of_two([GPU, MIG], &[[1, 0], [0, 1]]);
    assert!(judge(&lower, &apart).is_ok());
    insta::assert_snapshot!(refusal(&partitioned("0-3", single, pod), &apart), @"the Topology Manager (single-numa-node) would refuse 1 nvidia.com/gpu and 1 nvidia.com/mig-3g.40gb together: 4 + 0 and 0 + 2 are free by NUMA node");
    let both = request_of_two([GPU, MIG], &[[5, 1]]);
    insta::assert_snapshot!(refusal(&partitioned("0-6", restricted, container), &both), @"the Topology Manager (restricted) would refuse 5 nvidia.com/gpu and 1 nvidia.com/mig-3g.40gb together: they need 2 and 1 NUMA nodes, not the same ones");
    assert!(judge(&partitioned("0-6", TopologyManagerPolicy::BestEffort, container), &both).is_ok());
    // Of the GPUs alone there is another reason.
    let two = request_of_two([GPU, MIG], &[[5, 1]]);
    insta::assert_snapshot!(refusal(&partitioned("0-6", single, container), &two), @"the Topology Manager (single-numa-node) would refuse 5 devices: 4 + 3 are free by NUMA node");
}

#[test]
fn economy_takes_the_cheapest_class_that_meets_it() {
    let (dear, cheap) = (class(&switched(), "H100", "0-7"), class(&bridged(), "A40", "0-7"));
    let better = |annotations: &[_]| {
        let request = asking(2, annotations);
        let scored = |class| score(class, &request, &[], Policy::Pack).map(|(score, _)| score);
        scored(&cheap) > scored(&dear)
    };
    assert!(!better(&[]));
    assert!(better(&[("economy", "true")]));
    assert!(better(&[("economy", "true"), ("required-bandwidth", "40")]));
    assert!(!better(&[("economy", "true"), ("required-bandwidth", "100")]), "the A40s reach 48 GB/s");
    assert!(
        !better(&[("economy", "true"), ("preferred-bandwidth", "100")]),
        "a preference precedes the cost"
    );
}

#[test]
fn models_are_taken_in_their_order() {
    let (fast, slow) = (class(&switched(), "NVIDIA H100", "0-7"), class(&bridged(), "NVIDIA A40", "0-7"));
    let request = asking(2, &[("gpu-models", "A40, H100")]);
    let scored = |class| score(class, &request, &[], Policy::Pack).map(|(score, _)| score);
    assert!(scored(&slow) > scored(&fast) && scored(&fast).is_some());
    assert!(score(&fast, &asking(2, &[("gpu-models", "A40")]), &[], Policy::Pack).is_none());
}

/// Two GPUs each, below one PCIe switch, below two of one host bridge, and on two sockets.
#[test]
fn of_equally_fast_nodes_the_closer_link_is_better() {
    let of = |path| {
        let parts = plain(2).into_parts();
        let machine = Machine::new(MachineParts { paths: PathMatrix::from_fn(2, |_, _| path), ..parts });
        class(&machine.unwrap(), "NVIDIA A40", "0,1")
    };
    let scored = |path| score(&of(path), &asking(2, &[]), &[], Policy::Pack).unwrap().0;
    let (switch, bridge) = (scored(PathClass::Pix), scored(PathClass::Phb));
    assert_eq!(switch.megabytes_per_second(), bridge.megabytes_per_second());
    assert!(switch > bridge && bridge > scored(PathClass::Sys));
}

#[test]
fn pod_chooses_pack_or_spread_itself() {
    let (full, empty) = (class(&switched(), "", "0,1"), class(&switched(), "", "0-7"));
    for (own, operator) in [("pack", Policy::Spread), ("spread", Policy::Pack)] {
        let request = asking(1, &[("node-policy", own)]);
        let scored = |class| score(class, &request, &[], operator).map(|(score, _)| score);
        assert_eq!(scored(&full) > scored(&empty), own == "pack");
    }
}

proptest! {
    /// The set is the brute-force best of those that meet the terms, and there is one if any set meets them.
    #[test]
    fn chosen_set_meets_the_terms_if_any_does(
        free in 0u32..256,
        gpus in 2u32..6,
        link in 0usize..4,
        gbs in proptest::option::of(1u32..60),
        machine in 0usize..3,
        single in any::<bool>(),
    ) {
        let machine = [switch_pairs(), bridged(), switched()][machine].clone();
        let free = gantry_topology::GpuSet::from_bits(free);
        let terms = SetTerms { link: Some(LinkClass::ALL[link]), gbs, models: Arc::default() };
        let placement = PlacementRequest { required: terms.clone(), ..PlacementRequest::default() };
        let request = Arc::unwrap_or_clone(request(gpus)).placed(placement);
        let mut class = class(&machine, "", &free.to_string());
        if single {
            class = aligned(class, TopologyManagerPolicy::SingleNumaNode);
        }
        let lowest = [0u32, 1].into_iter().find(|node| {
            let near = gantry_topology::GpuSet::from_bits(0xf << (4 * node));
            (free & near).len() >= gpus as usize
        });
        let is_met = |set: &gantry_topology::GpuSet| {
            let near = |node: u32| set.is_subset(gantry_topology::GpuSet::from_bits(0xf << (4 * node)));
            terms.are_met(class.kind.class(*set), class.kind.bandwidth(*set))
                && (!single || lowest.is_some_and(near))
        };
        let best = free.subsets(gpus as usize).filter(is_met).map(|set| megabytes(&class, set)).max();
        let site = class.site(&class.pools[0], &[]);
        let layout = Layout::best(site, &class.pools[0].free, &request.asks[0]);
        prop_assert_eq!(layout.as_ref().map(|layout| megabytes(&class, layout.devices.gpus())), best);
        if let Some(layout) = &layout {
            prop_assert!(is_met(&layout.devices.gpus()));
        }
        prop_assert_eq!(judge(&class, &request).is_ok(), layout.is_some());
    }
}

fn megabytes(class: &Class, set: gantry_topology::GpuSet) -> u64 {
    crate::decide::megabytes(class.kind.bandwidth(set))
}
