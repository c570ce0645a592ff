//! Pictures of a machine: [`Picture`] for the terminal, [`svg`] for a browser, [`dot`] for Graphviz. All show the graph
//! of the machine ([`MachineGraph`]) by NUMA domain. Devices count GPUs first, then NICs.

mod svg;
mod terminal;

pub use svg::{escaped as xml_escaped, svg};
pub use terminal::Picture;

use std::fmt::Write as _;

use petgraph::dot::{Config, Dot};
use petgraph::graph::EdgeReference;

use crate::bandwidth::gbs;
use crate::graph::{Connection, Device, MachineGraph};
use crate::machine::{Link, Machine, PathClass};

/// The devices of one NUMA node.
#[derive(Debug, Clone)]
struct Domain {
    label: String,
    /// Devices joined by PCIe switches. A device by itself is a group of one.
    groups: Vec<Vec<usize>>,
}

/// The NUMA nodes of a machine in the order of their first device. A NIC of unknown node belongs to the node of the
/// nearest device, unless the path to it crosses sockets.
fn domains(machine: &Machine, graph: &MachineGraph) -> Vec<Domain> {
    let size = machine.gpus().len() + machine.nics().len();
    let known: Vec<Option<String>> = (0..size).map(|device| label(machine, device)).collect();
    let has_label = |device: usize| known.get(device).is_some_and(Option::is_some);
    let of_nearest = |device: usize| {
        let labelled = (0..size).filter(|other| *other != device && has_label(*other));
        let nearest = labelled.min_by_key(|other| machine.paths().get(device, *other))?;
        let is_near = !machine.paths().get(device, nearest).crosses_sockets();
        known.get(nearest).cloned().flatten().filter(|_| is_near)
    };
    let labels = known.iter().enumerate();
    let labels = labels.map(|(device, label)| label.clone().or_else(|| of_nearest(device)));
    let mut domains: Vec<(String, Vec<usize>)> = Vec::new();
    let mut unlabelled = Vec::new();
    for (device, label) in labels.enumerate() {
        let Some(label) = label else {
            unlabelled.push(device);
            continue;
        };
        match domains.iter_mut().find(|(known, _)| *known == label) {
            Some((_, devices)) => devices.push(device),
            None => domains.push((label, vec![device])),
        }
    }
    for devices in graph.pcie_groups(&unlabelled, PathClass::Node) {
        domains.push((unknown_node(machine, &devices), devices));
    }
    domains.sort_by(|(_, a), (_, b)| a.cmp(b));
    let domains = domains
        .into_iter()
        .map(|(label, devices)| Domain { label, groups: graph.pcie_groups(&devices, PathClass::Pxb) });
    domains.collect()
}

/// The label of a node of unknown number: its CPUs if they are known.
fn unknown_node(machine: &Machine, devices: &[usize]) -> String {
    let mut cpus = devices.iter().filter_map(|device| machine.gpus().get(*device)).map(|gpu| &gpu.cpus);
    match cpus.next() {
        Some(Some(first)) if cpus.all(|other| other.as_ref() == Some(first)) => format!("CPUs {first}"),
        _ => "NUMA node unknown".to_owned(),
    }
}

/// The NUMA node in the facts of a device.
fn label(machine: &Machine, device: usize) -> Option<String> {
    let gpus = machine.gpus();
    if let Some(gpu) = gpus.get(device) {
        let numa = gpu.numa.as_ref()?;
        let cpus = gpu.cpus.as_ref().map_or(String::new(), |cpus| format!(" · CPUs {cpus}"));
        // CPU lists of one node may differ in a container. Then they are not those of the node.
        let same = gpus.iter().filter(|other| other.numa == gpu.numa).all(|other| other.cpus == gpu.cpus);
        return Some(format!("NUMA {numa}{}", if same { cpus } else { String::new() }));
    }
    let nic = machine.nics().get(device - gpus.len())?;
    let numa = nic.numa?.to_string();
    let gpu = gpus.iter().position(|gpu| gpu.numa.as_ref().is_some_and(|list| list.as_str() == numa));
    gpu.map_or_else(|| Some(format!("NUMA {numa}")), |gpu| label(machine, gpu))
}

/// `8 x NVIDIA A100-SXM4-40GB, 10 NICs`.
fn title(machine: &Machine) -> String {
    let gpus = machine.gpus();
    let mut models: Vec<&str> = gpus.iter().filter_map(|gpu| gpu.model.as_deref()).collect();
    models.dedup();
    let gpus = match models.as_slice() {
        [model] => format!("{} x {model}", gpus.len()),
        _ => count(gpus.len(), "GPU"),
    };
    match machine.nics().len() {
        0 => gpus,
        nics => format!("{gpus}, {}", count(nics, "NIC")),
    }
}

/// `NV12 240 GB/s`.
fn link_label(connection: &Connection) -> String {
    let rate = connection.rate.map(|rate| format!(" {} GB/s", gbs(rate.effective)));
    format!("{}{}", connection.link, rate.unwrap_or_default())
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The machine in Graphviz's language: every NVLink, and of the PCIe paths a spanning tree of the nearest ones
/// ([`MachineGraph::outline`]).
pub fn dot(machine: &Machine) -> String {
    let graph = MachineGraph::of(machine);
    let outline = graph.outline();
    let node = |_, (_, device): (_, &Device)| match device {
        Device::Gpu(gpu) => {
            let model = machine.gpus().get(*gpu).and_then(|gpu| gpu.model.as_deref());
            let model = model.map_or(String::new(), |model| format!("\\n{}", escaped(model)));
            format!("label=\"GPU{gpu}{model}\" shape=box style=filled fillcolor=\"#d9ead3\"")
        }
        Device::Nic(nic) => {
            let name = machine.nics().get(*nic).map_or("", |nic| nic.name.as_str());
            format!("label=\"{}\" shape=ellipse", escaped(name))
        }
        Device::NvSwitch(island) => format!("label=\"NVSwitch {island}\" shape=hexagon"),
    };
    let edge = |_, edge: EdgeReference<'_, Connection>| {
        let connection = edge.weight();
        let style = match connection.link {
            Link::NvLink(_) => "color=\"#38761d\" penwidth=2",
            Link::Pcie(_) | Link::Itself => "color=\"#666666\"",
        };
        format!("label=\"{}\" {style}", link_label(connection))
    };
    let own_labels = [Config::GraphContentOnly, Config::NodeNoLabel, Config::EdgeNoLabel];
    let content = Dot::with_attr_getters(&outline, &own_labels, &edge, &node);
    let mut text = format!("graph \"{}\" {{\n", escaped(machine.name()));
    for (index, domain) in domains(machine, &graph).iter().enumerate() {
        let devices: Vec<String> = domain.groups.iter().flatten().map(usize::to_string).collect();
        let (label, devices) = (escaped(&domain.label), devices.join("; "));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    subgraph cluster_{index} {{ label=\"{label}\"; {devices} }}");
    }
    let _ = writeln!(text, "{content:?}}}");
    text
}

/// A text between quotation marks.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for ch in text.chars() {
        match ch {
            '"' | '\\' => escaped.extend(['\\', ch]),
            ch if ch.is_control() => escaped.push(' '),
            ch => escaped.push(ch),
        }
    }
    escaped
}
