//! The picture for the terminal: NUMA nodes around PCIe switches around GPUs and NICs, and NVLinks beneath, as framed
//! blocks of text, without escape codes unless asked for.

use std::fmt;

use super::{Domain, domains, title};
use crate::bandwidth::{Rates, gbs};
use crate::graph::MachineGraph;
use crate::machine::{Link, Machine, Nic, PathClass};

/// A picture of a machine. `to_string` draws it.
#[derive(Debug, Clone)]
pub struct Picture<'a> {
    machine: &'a Machine,
    graph: MachineGraph,
    notes: Vec<String>,
    columns: usize,
    color: bool,
}

impl<'a> Picture<'a> {
    /// A picture without colors, for a terminal of 100 columns.
    pub fn of(machine: &'a Machine) -> Self {
        Self {
            machine,
            graph: MachineGraph::of(machine),
            notes: vec![String::new(); machine.gpus().len()],
            columns: 100,
            color: false,
        }
    }

    /// With terminal colors or without.
    #[must_use]
    pub fn color(mut self, color: bool) -> Self {
        self.color = color;
        self
    }

    /// For a terminal of so many columns. Boxes are beside each other as far as they fit.
    #[must_use]
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns.max(40);
        self
    }

    /// A note beside a GPU, such as the pod that uses it. Each GPU then has a line of its own.
    #[must_use]
    pub fn note(mut self, gpu: usize, note: &str) -> Self {
        if let Some(slot) = self.notes.get_mut(gpu) {
            *slot = note.replace(char::is_control, " ");
        }
        self
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let boxes: Vec<Block> =
            domains(self.machine, &self.graph).iter().map(|domain| self.domain(domain)).collect();
        let mut rows = vec![row_of(Style::Strong, title(self.machine))];
        rows.extend(beside(boxes, self.columns));
        rows.extend(self.nvlinks());
        for row in rows {
            write_row(f, &row, self.color)?;
        }
        Ok(())
    }
}

impl Picture<'_> {
    /// The box of a NUMA node.
    fn domain(&self, domain: &Domain) -> Block {
        let (switches, loose): (Vec<_>, Vec<_>) = domain.groups.iter().partition(|group| group.len() > 1);
        let loose: Vec<usize> = loose.into_iter().flatten().copied().collect();
        let mut blocks = Vec::new();
        if !loose.is_empty() {
            blocks.push(Block::new(self.devices(&loose)));
        }
        blocks.extend(switches.into_iter().map(|group| self.switch(group)));
        let inner = beside(blocks, self.columns - 4);
        let mut title = domain.label.clone();
        if let Some(between) = between(self.machine, domain) {
            title.push_str(&format!(" · {between} between"));
        }
        framed(&title, inner, Style::Numa)
    }

    /// The box of a PCIe switch, or of several in a cascade: a line for each.
    fn switch(&self, group: &[usize]) -> Block {
        let machine = self.machine;
        let class = widest(machine, group.iter().flat_map(|a| group.iter().map(move |b| (*a, *b))));
        let near = self.graph.pcie_groups(group, PathClass::Pix);
        let rows = if near.len() == group.len() {
            self.devices(group)
        } else {
            near.iter().flat_map(|island| self.devices(island)).collect()
        };
        framed(class.map_or("", PathClass::as_str), rows, Style::Switch)
    }

    /// Devices in lines: GPUs first, those that a bridge joins together; with notes a line for each.
    fn devices(&self, devices: &[usize]) -> Vec<Row> {
        let gpus = self.machine.gpus().len();
        let noted = self.notes.iter().any(|note| !note.is_empty());
        let mut rows: Vec<Row> = Vec::new();
        let mut line = Row::default();
        let mut done = Vec::new();
        for device in devices.iter().copied().filter(|device| *device < gpus) {
            if done.contains(&device) {
                continue;
            }
            let mut cell = self.gpu(device);
            if let Some(mate) = bridged(self.machine, device).filter(|mate| devices.contains(mate)) {
                let links = self.machine.nvlinks_between(device, mate);
                if noted {
                    rows.push(std::mem::take(&mut cell));
                    rows.push(row_of(Style::NvLink, format!("  ║ NV{links}")));
                } else {
                    cell.push(Style::NvLink, format!(" ═NV{links}═ "));
                }
                cell.append(self.gpu(mate));
                done.push(mate);
            }
            if noted {
                rows.push(cell);
            } else {
                add(&mut rows, &mut line, cell, self.columns - 12);
            }
        }
        if !line.is_empty() {
            rows.push(std::mem::take(&mut line));
        }
        for device in devices.iter().copied().filter(|device| *device >= gpus) {
            if let Some(nic) = self.machine.nics().get(device - gpus) {
                add(&mut rows, &mut line, row_of(Style::Nic, nic_name(nic)), self.columns - 12);
            }
        }
        if !line.is_empty() {
            rows.push(line);
        }
        rows
    }

    fn gpu(&self, gpu: usize) -> Row {
        let mut row = row_of(Style::Gpu, format!("GPU{gpu}"));
        if let Some(note) = self.notes.get(gpu).filter(|note| !note.is_empty()) {
            row.push(Style::Plain, format!(" {note}"));
        }
        row
    }

    /// A line for each kind of NVLink: through a switch, or of so many links.
    fn nvlinks(&self) -> Vec<Row> {
        let machine = self.machine;
        let rates = Rates::of(machine);
        let line = |links: u8, ends: String, (a, b): (usize, usize)| {
            let speed = gbs(rates.nvlink_of(a).min(rates.nvlink_of(b)).times(u32::from(links)).effective);
            let mut row = row_of(Style::NvLink, format!("NV{links:<3}"));
            row.push(Style::Plain, ends);
            row.push(Style::Faint, format!("  {speed} GB/s each way"));
            row
        };
        let mut rows = Vec::new();
        for island in self.graph.switch_islands() {
            if let [a, b, ..] = *island.as_slice() {
                let most = island.iter().map(|gpu| machine.switch_links(*gpu)).max().unwrap_or(0);
                let ends = format!("NVSwitch ══ {}", index_ranges(&island));
                rows.push(line(most, ends, (a, b)));
            }
        }
        let mut counts: Vec<u8> = machine.nvlinks().iter().map(|bundle| bundle.links).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts.dedup();
        for (rank, links) in counts.iter().copied().enumerate() {
            let bundles = machine.nvlinks().iter().filter(|bundle| bundle.links == links);
            let pairs: Vec<[usize; 2]> = bundles.map(|bundle| bundle.gpus.map(usize::from)).collect();
            let sign = if rank == 0 { '═' } else { '─' };
            let mut members: Vec<usize> = pairs.iter().flatten().copied().collect();
            members.sort_unstable();
            members.dedup();
            let ends = if members.len() > 2 && pairs.len() == members.len() * (members.len() - 1) / 2 {
                format!("each to each ══ {}", index_ranges(&members))
            } else {
                let ends: Vec<String> = pairs.iter().map(|[a, b]| format!("{a}{sign}{b}")).collect();
                ends.join("  ")
            };
            if let Some([a, b]) = pairs.first() {
                rows.push(line(links, ends, (*a, *b)));
            }
        }
        rows
    }
}

/// Adds a cell to a line, or begins a new line where it would be too long.
fn add(rows: &mut Vec<Row>, line: &mut Row, cell: Row, columns: usize) {
    if !line.is_empty() && line.width() + 2 + cell.width() > columns {
        rows.push(std::mem::take(line));
    }
    if !line.is_empty() {
        line.push(Style::Plain, "  ".to_owned());
    }
    line.append(cell);
}

/// `GPU0-3,6` for 0, 1, 2, 3, 6, which are in order.
fn index_ranges(indices: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for index in indices.iter().copied() {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == index => *last = index,
            _ => ranges.push((index, index)),
        }
    }
    let parts = ranges.into_iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    format!("GPU{}", parts.collect::<Vec<_>>().join(","))
}

/// A NIC by its column and its device.
fn nic_name(nic: &Nic) -> String {
    match &nic.device {
        Some(device) if *device != nic.name => format!("{} {device}", nic.name),
        _ => nic.name.clone(),
    }
}

/// The only GPU that `gpu` has NVLinks to, if it is the only one of that GPU too.
fn bridged(machine: &Machine, gpu: usize) -> Option<usize> {
    let only_peer = |gpu: usize| {
        let mut peers = (0..machine.gpus().len()).filter(|peer| machine.nvlinks_between(gpu, *peer) > 0);
        peers.next().filter(|_| peers.next().is_none())
    };
    only_peer(gpu).filter(|peer| only_peer(*peer) == Some(gpu))
}

/// The farthest class among pairs of different devices.
fn widest(machine: &Machine, pairs: impl Iterator<Item = (usize, usize)>) -> Option<PathClass> {
    pairs.filter(|(a, b)| a != b).map(|(a, b)| machine.paths().get(a, b)).max()
}

/// The classes between the groups of a NUMA node, nearest first; `None` if there is one group.
fn between(machine: &Machine, domain: &Domain) -> Option<String> {
    let mut classes: Vec<PathClass> = Vec::new();
    for (index, group) in domain.groups.iter().enumerate() {
        for other in domain.groups.iter().take(index) {
            let pairs = group.iter().flat_map(|a| other.iter().map(move |b| (*a, *b)));
            classes.extend(pairs.map(|(a, b)| machine.paths().get(a, b)));
        }
    }
    classes.sort_unstable();
    classes.dedup();
    let names: Vec<String> = classes.iter().map(|class| Link::Pcie(*class).to_string()).collect();
    (!names.is_empty()).then(|| names.join("/"))
}

/// The style of a run of characters on a terminal with colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Plain,
    Strong,
    Faint,
    Gpu,
    Nic,
    NvLink,
    Numa,
    Switch,
}

impl Style {
    /// Parameters of the terminal's SGR code; the 16 basic colors, which the user of the terminal chooses.
    const fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Strong => "1",
            Self::Faint | Self::Switch => "2",
            Self::Gpu => "1;32",
            Self::Nic => "36",
            Self::NvLink => "33",
            Self::Numa => "34",
        }
    }
}

/// A line of styled runs.
#[derive(Debug, Clone, Default)]
struct Row(Vec<(Style, String)>);

impl Row {
    fn push(&mut self, style: Style, text: String) {
        self.0.push((style, text));
    }

    fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Columns it takes.
    fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.chars().count()).sum()
    }

    fn pad(&mut self, width: usize) {
        let missing = width.saturating_sub(self.width());
        if missing > 0 {
            self.push(Style::Plain, " ".repeat(missing));
        }
    }
}

fn row_of(style: Style, text: String) -> Row {
    Row(vec![(style, text)])
}

/// A rectangle of rows.
#[derive(Debug, Clone)]
struct Block {
    rows: Vec<Row>,
    width: usize,
}

impl Block {
    fn new(rows: Vec<Row>) -> Self {
        let width = rows.iter().map(Row::width).max().unwrap_or(0);
        Self { rows, width }
    }
}

/// Rows in a frame with a title in its upper edge.
fn framed(title: &str, rows: Vec<Row>, style: Style) -> Block {
    let title = if title.is_empty() { String::new() } else { format!(" {title} ") };
    let title_width = title.chars().count();
    let inner = rows.iter().map(Row::width).max().unwrap_or(0).max(title_width);
    let mut framed = vec![row_of(style, format!("╭─{title}{}╮", "─".repeat(inner + 1 - title_width)))];
    for mut row in rows {
        row.pad(inner);
        let mut line = row_of(style, "│ ".to_owned());
        line.append(row);
        line.push(style, " │".to_owned());
        framed.push(line);
    }
    framed.push(row_of(style, format!("╰{}╯", "─".repeat(inner + 2))));
    Block::new(framed)
}

/// Blocks beside each other, going on beneath where `columns` are full.
fn beside(blocks: Vec<Block>, columns: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut shelf: Vec<Block> = Vec::new();
    let mut used = 0;
    for block in blocks {
        if !shelf.is_empty() && used + 1 + block.width > columns {
            rows.extend(one_shelf(std::mem::take(&mut shelf)));
            used = 0;
        }
        used += block.width + usize::from(!shelf.is_empty());
        shelf.push(block);
    }
    rows.extend(one_shelf(shelf));
    rows
}

fn one_shelf(blocks: Vec<Block>) -> Vec<Row> {
    let height = blocks.iter().map(|block| block.rows.len()).max().unwrap_or(0);
    let mut rows = vec![Row::default(); height];
    let mut from = 0;
    for block in blocks {
        let to = from + block.width;
        for (row, part) in rows.iter_mut().zip(block.rows) {
            row.pad(from);
            row.append(part);
        }
        from = to + 1;
    }
    rows
}

/// Writes a row and a line end, with colors or without.
fn write_row(f: &mut fmt::Formatter<'_>, row: &Row, color: bool) -> fmt::Result {
    for (style, text) in &row.0 {
        if color && *style != Style::Plain {
            write!(f, "\u{1b}[{}m{text}\u{1b}[0m", style.code())?;
        } else {
            f.write_str(text)?;
        }
    }
    f.write_str("\n")
}
