//! A machine as input for Graphviz: devices in their NUMA nodes, links with class and bandwidth.

use std::fmt::Write as _;

use petgraph::dot::{Config, Dot};
use petgraph::graph::EdgeReference;

use super::{domains, link_label};
use crate::graph::{Connection, Device};
use crate::machine::{Link, Machine};

/// The machine in Graphviz's language: every NVLink, and of the PCIe paths a spanning tree of the nearest ones
/// ([`crate::graph::MachineGraph::outline`]).
pub fn dot(machine: &Machine) -> String {
    let graph = machine.graph();
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
