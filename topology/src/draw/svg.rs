//! A machine as an SVG picture. GPUs and NICs are in one row, in boxes of their NUMA nodes; NVLinks are arcs and
//! NVSwitches bars above the row, PCIe paths are brackets beneath it. Every link has a label of class and GB/s.

use std::fmt::Write as _;

use super::{Domain, domains, link_label, title};
use crate::bandwidth::LinkRate;
use crate::graph::{Connection, Device, MachineGraph};
use crate::machine::{Link, Machine, PathClass};

/// Width of a device with the gap beside it.
const COLUMN: usize = 112;
const DEVICE_WIDTH: usize = 88;
const DEVICE_HEIGHT: usize = 40;
const MARGIN: usize = 24;
/// Height of a step of arcs, bars and brackets, with room for a label.
const STEP: usize = 28;
/// Fill colours of NVLink islands.
const ISLANDS: [&str; 6] = ["#d9ead3", "#cfe2f3", "#fff2cc", "#ead1dc", "#d0e0e3", "#fce5cd"];
const NO_ISLAND: &str = "#f3f3f3";
/// Levels of the brackets, nearest first. `SOC` is the old name of `SYS`.
const LEVELS: [PathClass; 5] =
    [PathClass::Pix, PathClass::Pxb, PathClass::Phb, PathClass::Node, PathClass::Soc];

/// The machine as an SVG document.
pub fn svg(machine: &Machine) -> String {
    let graph = MachineGraph::of(machine);
    let domains = domains(machine, &graph);
    let layout = Layout::new(machine, &graph, &domains);
    let mut canvas = Canvas::default();
    layout.draw_domains(&mut canvas, &domains);
    let below = layout.draw_paths(&mut canvas);
    layout.draw_nvlinks(&mut canvas);
    layout.draw_devices(&mut canvas);
    let title = title(machine);
    let width = layout.width.max(2 * MARGIN + 8 * title.chars().count());
    canvas.document(width, below + MARGIN, &title)
}

/// Places of all devices.
struct Layout<'a> {
    machine: &'a Machine,
    graph: &'a MachineGraph,
    /// The centre of each device, by number.
    centers: Vec<usize>,
    /// Upper edge of the devices.
    top: usize,
    /// Brackets of PCIe paths, by level.
    brackets: Vec<(PathClass, Vec<Bracket>)>,
    width: usize,
}

/// Groups of devices that paths of one class connect.
struct Bracket {
    parts: Vec<Vec<usize>>,
}

impl<'a> Layout<'a> {
    fn new(machine: &'a Machine, graph: &'a MachineGraph, domains: &[Domain]) -> Self {
        let size = machine.gpus().len() + machine.nics().len();
        let all: Vec<usize> = (0..size).collect();
        let levels: Vec<Vec<Vec<usize>>> = LEVELS.map(|class| graph.pcie_groups(&all, class)).into();
        let mut centers = vec![0; size];
        let mut x = MARGIN;
        for domain in domains {
            // Devices of one group beside each other, at every level.
            let first_of = |device: usize, level: &Vec<Vec<usize>>| {
                let group = level.iter().find(|group| group.contains(&device));
                group.and_then(|group| group.first().copied())
            };
            let mut devices: Vec<usize> = domain.groups.iter().flatten().copied().collect();
            devices.sort_by_key(|device| {
                let firsts = levels.iter().rev().map(|level| first_of(*device, level));
                (firsts.collect::<Vec<_>>(), *device)
            });
            for device in devices {
                if let Some(center) = centers.get_mut(device) {
                    *center = x + COLUMN / 2;
                }
                x += COLUMN;
            }
            x += MARGIN;
        }
        let mut parts: Vec<Vec<usize>> = all.iter().map(|device| vec![*device]).collect();
        let mut brackets = Vec::new();
        for (class, groups) in LEVELS.into_iter().zip(levels) {
            let merged = groups.iter().filter(|group| !parts.contains(group));
            let parts_of = |group: &Vec<usize>| {
                let inside = |part: &&Vec<usize>| part.iter().all(|device| group.contains(device));
                parts.iter().filter(inside).cloned().collect()
            };
            let merged: Vec<Bracket> = merged.map(|group| Bracket { parts: parts_of(group) }).collect();
            if !merged.is_empty() {
                brackets.push((class, merged));
            }
            parts = groups;
        }
        let gpus = machine.gpus().len();
        let farthest = machine.nvlinks().iter().map(|bundle| bundle.gpus[0].abs_diff(bundle.gpus[1])).max();
        let arcs = usize::from(farthest.unwrap_or(0)).min(gpus);
        Self {
            machine,
            graph,
            centers,
            top: 2 * MARGIN + STEP * (arcs + 2 * graph.switch_islands().len() + 1),
            brackets,
            width: x + MARGIN,
        }
    }

    fn center(&self, device: usize) -> usize {
        self.centers.get(device).copied().unwrap_or(0)
    }

    fn bottom(&self) -> usize {
        self.top + DEVICE_HEIGHT
    }

    /// The level of a bracket line beneath the devices.
    fn level(&self, level: usize) -> usize {
        self.bottom() + STEP * (level + 1)
    }

    /// The number of bracket levels inside the NUMA nodes.
    fn inner_levels(&self) -> usize {
        let inner = self.brackets.iter().filter(|(class, _)| !class.crosses_sockets());
        inner.count()
    }

    /// Boxes of the NUMA nodes, with their labels at the lower edge.
    fn draw_domains(&self, canvas: &mut Canvas, domains: &[Domain]) {
        for domain in domains {
            let centers = || domain.groups.iter().flatten().map(|device| self.center(*device));
            let (Some(from), Some(to)) = (centers().min(), centers().max()) else {
                continue;
            };
            let (left, width) = (from - COLUMN / 2, to - from + COLUMN);
            let (top, bottom) = (self.top - 10, self.level(self.inner_levels()) + 24);
            canvas.rect((left, top), (width, bottom - top), "#ffffff", "#3d85c6", &domain.label);
            for (line, text) in domain.label.split(" · ").enumerate() {
                let shown = shortened(text, width / 7);
                canvas.text((left + 8, bottom - 20 + 14 * line), "domain", &shown);
            }
        }
    }

    /// Brackets of the PCIe paths. Returns the lower edge of the picture.
    fn draw_paths(&self, canvas: &mut Canvas) -> usize {
        // The start of the line downwards from each device or its bracket.
        let mut anchors: Vec<(usize, usize)> = self.centers.iter().map(|x| (*x, self.bottom())).collect();
        let mut lowest = self.level(self.inner_levels()) + 24;
        for (level, (class, brackets)) in self.brackets.iter().enumerate() {
            let outside = if class.crosses_sockets() { STEP + 12 } else { 0 };
            let y = self.level(level) + outside;
            for bracket in brackets {
                let firsts = bracket.parts.iter().filter_map(|part| anchors.get(*part.first()?).copied());
                let firsts: Vec<(usize, usize)> = firsts.collect();
                let xs = || firsts.iter().map(|(x, _)| *x);
                let (Some(from), Some(to)) = (xs().min(), xs().max()) else {
                    continue;
                };
                for (x, top) in &firsts {
                    canvas.line((*x, *top), (*x, y), "path");
                }
                canvas.line((from, y), (to, y), "path");
                let center = from + (to - from) / 2;
                let connection = self.connection(bracket, *class);
                canvas.text((center, y + 12), "path-label", &link_label(&connection));
                for device in bracket.parts.iter().flatten() {
                    if let Some(anchor) = anchors.get_mut(*device) {
                        *anchor = (center, y);
                    }
                }
                lowest = lowest.max(y + 14);
            }
        }
        lowest
    }

    /// The slowest path of class `class` between two parts of a bracket, with its rate if one end is a GPU.
    fn connection(&self, bracket: &Bracket, class: PathClass) -> Connection {
        let part_of = |device: usize| bracket.parts.iter().position(|part| part.contains(&device));
        let graph = self.graph.as_petgraph();
        let between = graph.edge_indices().filter_map(|edge| {
            let (a, b) = graph.edge_endpoints(edge)?;
            let (a, b) = (part_of(a.index())?, part_of(b.index())?);
            graph.edge_weight(edge).copied().filter(|_| a != b)
        });
        let is_path = |connection: &Connection| match connection.link {
            Link::Pcie(found) => found == class || found.crosses_sockets() && class.crosses_sockets(),
            Link::NvLink(_) | Link::Itself => false,
        };
        let rate = |connection: &Connection| connection.rate.map_or(LinkRate::new(u32::MAX, 0), |rate| rate);
        let slowest = between.filter(is_path).min_by_key(rate);
        slowest.unwrap_or(Connection { link: Link::Pcie(class), rate: None })
    }

    /// Arcs of direct NVLinks; bars of NVSwitches with a line to each GPU.
    fn draw_nvlinks(&self, canvas: &mut Canvas) {
        let graph = self.graph.as_petgraph();
        let mut islands = self.graph.switch_islands();
        islands.reverse();
        for edge in graph.edge_indices() {
            let (Some((a, b)), Some(connection)) = (graph.edge_endpoints(edge), graph.edge_weight(edge))
            else {
                continue;
            };
            let label = link_label(connection);
            match (graph.node_weight(a), graph.node_weight(b), connection.link) {
                (Some(Device::Gpu(a)), Some(Device::Gpu(b)), Link::NvLink(_)) => {
                    let (from, to) = (self.center(*a), self.center(*b));
                    let height = STEP * a.abs_diff(*b);
                    canvas.arc(from, to, self.top, height, &label);
                }
                (Some(Device::Gpu(gpu)), Some(Device::NvSwitch(_)), _) => {
                    let rank = islands.iter().position(|island| island.contains(gpu)).unwrap_or(0);
                    let (x, bar) = (self.center(*gpu), self.bar(rank));
                    canvas.line((x, bar), (x, self.top), "nvlink");
                    canvas.text((x, bar + 26), "nvlink-label", &label);
                }
                _ => {}
            }
        }
        for (rank, island) in islands.iter().enumerate() {
            let centers = || island.iter().map(|gpu| self.center(*gpu));
            if let (Some(from), Some(to)) = (centers().min(), centers().max()) {
                let (left, width) = (from - DEVICE_WIDTH / 2, to - from + DEVICE_WIDTH);
                let y = self.bar(rank);
                canvas.rect((left, y - 10), (width, 20), "#d9d2e9", "#674ea7", "NVSwitch");
                canvas.text((from + (to - from) / 2, y + 4), "device", "NVSwitch");
            }
        }
    }

    /// The height of the bar of an NVSwitch island.
    fn bar(&self, rank: usize) -> usize {
        2 * MARGIN + 10 + 2 * STEP * rank
    }

    fn draw_devices(&self, canvas: &mut Canvas) {
        let islands = self.graph.nvlink_islands();
        let mut colors = ISLANDS.iter().cycle();
        let mut fills = vec![NO_ISLAND; self.machine.gpus().len()];
        for island in islands.iter().filter(|island| island.len() > 1) {
            let color = colors.next().copied().unwrap_or(NO_ISLAND);
            for gpu in island {
                if let Some(fill) = fills.get_mut(*gpu) {
                    *fill = color;
                }
            }
        }
        let place = |device: usize| (self.center(device) - DEVICE_WIDTH / 2, self.top);
        for (index, gpu) in self.machine.gpus().iter().enumerate() {
            let model = gpu.model.as_deref().unwrap_or("unknown model");
            let fill = fills.get(index).copied().unwrap_or(NO_ISLAND);
            canvas.rect(place(index), (DEVICE_WIDTH, DEVICE_HEIGHT), fill, "#38761d", model);
            let center = (self.center(index), self.top + DEVICE_HEIGHT / 2 + 4);
            canvas.text(center, "device", &format!("GPU{index}"));
        }
        for (index, nic) in self.machine.nics().iter().enumerate() {
            let device = self.machine.gpus().len() + index;
            let name = nic.device.as_deref().unwrap_or(&nic.name);
            canvas.rect(place(device), (DEVICE_WIDTH, DEVICE_HEIGHT), "#ffffff", "#0b5394", name);
            let center = (self.center(device), self.top + DEVICE_HEIGHT / 2 + 4);
            canvas.text(center, "nic", &shortened(&nic.name, 12));
        }
    }
}

/// Elements of a document, labels above all lines. Writing to a string cannot fail.
#[derive(Default)]
struct Canvas {
    shapes: String,
    labels: String,
}

impl Canvas {
    /// A rectangle with a tooltip.
    fn rect(&mut self, at: (usize, usize), size: (usize, usize), fill: &str, stroke: &str, tooltip: &str) {
        let ((x, y), (width, height)) = (at, size);
        let _ = writeln!(
            self.shapes,
            "  <rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"{fill}\" stroke=\"{stroke}\">\
             <title>{}</title></rect>",
            escaped(tooltip)
        );
    }

    fn line(&mut self, from: (usize, usize), to: (usize, usize), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = writeln!(
            self.shapes,
            "  <line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"
        );
    }

    /// An arc of an NVLink over `height`, with its label at the top.
    fn arc(&mut self, from: usize, to: usize, base: usize, height: usize, label: &str) {
        let (left, right) = (from.min(to), from.max(to));
        let middle = left + (right - left) / 2;
        // The curve reaches three quarters of the height of its control points.
        let control = base.saturating_sub(height * 4 / 3);
        let _ = writeln!(
            self.shapes,
            "  <path class=\"nvlink\" d=\"M {left} {base} C {left} {control} {right} {control} {right} {base}\"/>"
        );
        self.text((middle, base.saturating_sub(height) + 4), "nvlink-label", label);
    }

    fn text(&mut self, at: (usize, usize), class: &str, text: &str) {
        let _ = writeln!(
            self.labels,
            "  <text class=\"{class}\" x=\"{}\" y=\"{}\">{}</text>",
            at.0,
            at.1,
            escaped(text)
        );
    }

    fn document(self, width: usize, height: usize, title: &str) -> String {
        let title = escaped(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\n  \
             <title>{title}</title>\n  <style>{STYLE}</style>\n  \
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n  \
             <text class=\"title\" x=\"{MARGIN}\" y=\"{MARGIN}\">{title}</text>\n{}{}</svg>\n",
            self.shapes, self.labels
        )
    }
}

/// Labels have a white outline, so that lines behind them do not hide them.
const STYLE: &str = "
    text { font: 11px sans-serif; text-anchor: middle; paint-order: stroke; stroke: #ffffff; stroke-width: 5px }
    .title { font: bold 15px sans-serif; text-anchor: start }
    .device { font: bold 13px sans-serif; stroke: none }
    .nic { stroke: none; fill: #0b5394 }
    .domain { fill: #3d85c6; text-anchor: start }
    .nvlink { fill: none; stroke: #38761d; stroke-width: 1.5px }
    .nvlink-label { fill: #274e13 }
    .path { stroke: #888888 }
    .path-label { fill: #444444 }
  ";

/// At most `most` characters.
fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let head: String = text.chars().take(most.saturating_sub(1)).collect();
    format!("{head}…")
}

/// `text` as character data or an attribute's value of an XML document. Control characters are replaced: XML has no form
/// for them.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for ch in text.chars() {
        match ch {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            ch if ch.is_control() => escaped.push('\u{fffd}'),
            ch => escaped.push(ch),
        }
    }
    escaped
}
