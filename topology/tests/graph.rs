//! The graph of recorded machines: islands, groups, and the outline that pictures show.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::VecDeque;

use gantry_topology::graph::{Connection, Device, MachineGraph};
use gantry_topology::{Link, Machine, PathClass};
use petgraph::graph::{NodeIndex, UnGraph};
use petgraph::visit::EdgeRef;

fn machine(name: &str) -> Machine {
    let path = format!("{}/fixtures/topologies/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    gantry_smi::read_machine(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn bridged_pairs_are_islands() {
    let graph = MachineGraph::of(&machine("a40-8gpu-4bridgepairs-2nic"));
    assert_eq!(graph.nvlink_islands(), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert!(graph.switch_islands().is_empty());
}

#[test]
fn nvswitch_joins_all_gpus_in_one_island() {
    let graph = MachineGraph::of(&machine("dgx-h200-8gpu-12nic"));
    let all: Vec<usize> = (0..8).collect();
    assert_eq!(graph.nvlink_islands(), std::slice::from_ref(&all));
    assert_eq!(graph.switch_islands(), [all]);
}

#[test]
fn gpus_without_nvlink_are_islands_of_one() {
    let graph = MachineGraph::of(&machine("pcie-6gpu-pix-node-sys"));
    assert_eq!(graph.nvlink_islands(), [[0], [1], [2], [3], [4], [5]]);
}

#[test]
fn pcie_groups_grow_with_the_class() {
    let graph = MachineGraph::of(&machine("rtxpro6000-8gpu-microchip-3level"));
    let gpus: Vec<usize> = (0..8).collect();
    let mut before = gpus.len() + 1;
    for class in [PathClass::Pix, PathClass::Pxb, PathClass::Phb, PathClass::Node, PathClass::Sys] {
        let groups = graph.pcie_groups(&gpus, class);
        assert!(groups.len() <= before, "{class}: {groups:?}");
        let mut members = groups.concat();
        members.sort_unstable();
        assert_eq!(members, gpus, "{class}");
        before = groups.len();
    }
    assert_eq!(before, 1);
}

#[test]
fn edges_have_class_and_bandwidth() {
    let graph = MachineGraph::of(&machine("v100-sxm2-8gpu-cubemesh-1mlx5"));
    let graph = graph.as_petgraph();
    let of = |a: usize, b: usize| -> Vec<String> {
        let edges = graph.edges_connecting(NodeIndex::new(a), NodeIndex::new(b));
        let label = |edge: &Connection| match edge.rate {
            Some(rate) => format!("{} {}", edge.link, rate.effective),
            None => edge.link.to_string(),
        };
        let mut labels: Vec<String> = edges.map(|edge| label(edge.weight())).collect();
        labels.sort();
        labels
    };
    assert_eq!(of(0, 3), ["NODE 12000", "NV2 40000"].map(str::to_owned).as_slice());
    assert_eq!(graph.node_weight(NodeIndex::new(8)), Some(&Device::Nic(0)));
}

/// The farthest class on the way between two devices over the PCIe edges of an outline.
fn farthest(outline: &UnGraph<Device, Connection>, from: usize, to: usize) -> Option<PathClass> {
    let mut queue = VecDeque::from([(NodeIndex::new(from), NodeIndex::new(from), None)]);
    while let Some((node, before, class)) = queue.pop_front() {
        if node.index() == to {
            return class;
        }
        for edge in outline.edges(node).filter(|edge| edge.target() != before) {
            if let Link::Pcie(step) = edge.weight().link {
                queue.push_back((edge.target(), node, class.max(Some(step))));
            }
        }
    }
    None
}

#[test]
fn outline_has_the_class_of_every_path_in_a_tree() {
    for name in ["rtxpro6000-8gpu-microchip-3level", "dgx-a100-8gpu-10nic", "p40-8gpu-pix-pxb-1mlx5-soc"] {
        let machine = machine(name);
        let outline = MachineGraph::of(&machine).outline();
        let devices = machine.gpus().len() + machine.nics().len();
        for (a, b) in (0..devices).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let class = machine.paths().get(a, b);
            assert_eq!(farthest(&outline, a, b), Some(class), "{name}: {a} and {b}");
        }
    }
}
