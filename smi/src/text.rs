//! The content of a topology text, and its conversion to a machine and back. Missing facts stay unknown, except two that every choice of GPUs
//! needs and that are inferred: the PCIe path behind an NVLink, and whether NVLinks go through a switch.

use gantry_topology::bandwidth::Product;
use gantry_topology::{
    Gpu, IdList, Link, Machine, MachineError, MachineParts, Nic, NvLinkBundle, NvLinkPorts,
};

use crate::header::{Title, is_nic_name};
use crate::parse::nvlinks;
use crate::{Hints, TopoError, parse, paths, switches};

/// The most NVLinks of one GPU of any model so far.
const MOST_LINKS: u8 = 18;

/// The content of a topology text: the matrix and the values behind each GPU's row. Nothing is inferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopoText {
    pub(crate) description: Option<String>,
    pub(crate) nics_found: Option<usize>,
    pub(crate) gpus: Vec<GpuLine>,
    pub(crate) nics: Vec<NicLine>,
    pub(crate) links: Vec<Vec<Link>>,
}

/// The values behind the links of a GPU; `None` for a blank cell or `N/A`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuLine {
    /// CPUs near the GPU (`CPU Affinity`).
    pub cpus: Option<IdList>,
    /// NUMA nodes near the GPU (`NUMA Affinity`).
    pub numa: Option<IdList>,
    /// NUMA node of the GPU's own memory (`GPU NUMA ID`).
    pub memory_numa: Option<IdList>,
}

impl GpuLine {
    fn value(&self, title: Title) -> Option<&IdList> {
        match title {
            Title::Cpus => self.cpus.as_ref(),
            Title::Numa => self.numa.as_ref(),
            Title::MemoryNuma => self.memory_numa.as_ref(),
        }
    }
}

/// A NIC of the matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicLine {
    /// The name at the head of its column: `mlx5_0`, or `NIC0`.
    pub name: String,
    /// The device behind a `NIC#`, if the text has a NIC legend.
    pub device: Option<String>,
}

impl TopoText {
    /// Reads a topology text. Blank lines and lines that begin with `#` are skipped; the first `# machine: ...` comment
    /// is the description.
    ///
    /// # Errors
    /// The text is truncated, contradicts itself, or is something else: the place, the words found there, the allowed
    /// ones.
    pub fn parse(text: &str) -> Result<Self, TopoError> {
        parse::parse(text)
    }

    /// The description in a leading `# machine: ...` comment.
    pub fn description(&self) -> Option<&str> {
        self.description.as_deref()
    }

    /// The number of NICs in the machine, from the notice above a matrix that does not show them all.
    pub fn nics_found(&self) -> Option<usize> {
        self.nics_found
    }

    /// The GPUs' values, by index.
    pub fn gpus(&self) -> &[GpuLine] {
        &self.gpus
    }

    /// The NICs, in the order of their columns.
    pub fn nics(&self) -> &[NicLine] {
        &self.nics
    }

    /// The matrix: a row per device, GPUs first, then NICs. Symmetric, `X` on the diagonal.
    pub fn links(&self) -> &[Vec<Link>] {
        &self.links
    }

    /// The matrix for a terminal: aligned columns, no legend, no column without a value.
    pub fn aligned(&self) -> String {
        let has_values = |title: &Title| self.gpus.iter().any(|gpu| gpu.value(*title).is_some());
        let titles: Vec<Title> = Title::ALL.into_iter().filter(has_values).collect();
        let gpu_names = (0..self.gpus.len()).map(|gpu| format!("GPU{gpu}"));
        let names: Vec<String> = gpu_names.chain(self.nics.iter().map(|nic| nic.name.clone())).collect();
        let mut header = vec![String::new()];
        header.extend(names.iter().cloned());
        header.extend(titles.iter().map(|title| title.as_str().to_owned()));
        let mut table = vec![header];
        for (device, (name, links)) in names.iter().zip(&self.links).enumerate() {
            let mut cells = vec![name.clone()];
            cells.extend(links.iter().map(Link::to_string));
            if let Some(gpu) = self.gpus.get(device) {
                let values = titles.iter().map(|title| gpu.value(*title));
                cells.extend(values.map(|value| value.map_or("N/A", IdList::as_str).to_owned()));
            }
            table.push(cells);
        }
        let mut widths: Vec<usize> = Vec::new();
        for row in &table {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.len().max(*width);
            }
        }
        let mut text = String::new();
        for row in &table {
            let cells = row.iter().zip(&widths);
            let cells: Vec<String> = cells.map(|(cell, width)| format!("{cell:<width$}")).collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    /// The machine of this text. PCIe classes behind `NV#` cells are inferred. NVLinks are assumed to go through an
    /// NVSwitch if a row has more of them than one GPU can have. `hints`, or a `# machine:` comment, may name the GPU
    /// model.
    ///
    /// # Errors
    /// The NVLinks of the matrix have no explanation by NVSwitches and direct links.
    pub fn into_machine(self, hints: &Hints) -> Result<Machine, MachineError> {
        let described =
            self.description.as_deref().and_then(|text| Product::described(text, self.gpus.len()));
        let product = match &hints.model {
            Some(model) => Product::by_name(model),
            None => described,
        };
        let model = hints.model.clone().or_else(|| described.map(|product| product.name().to_owned()));
        let nvlink = product.and_then(Product::nvlink);
        let limit = nvlink.map_or(MOST_LINKS, |(_, links)| links);
        let counts = self.nvlink_counts();
        let switched = switches::switch_links(&counts, limit);
        let paths = paths::infer(&self);
        let version = nvlink.map(|(version, _)| version);
        let mut gpus = Vec::with_capacity(self.gpus.len());
        let mut nvlinks = Vec::new();
        for (index, line) in self.gpus.into_iter().enumerate() {
            let row = counts.get(index).map(Vec::as_slice).unwrap_or_default();
            let into_switch = switched.get(index).copied().flatten();
            if into_switch.is_none() {
                nvlinks.extend(row.iter().enumerate().take(index).filter(|(_, links)| **links > 0).map(
                    |(other, links)| NvLinkBundle { gpus: [narrow(other), narrow(index)], links: *links },
                ));
            }
            let linked = row.iter().any(|links| *links > 0);
            gpus.push(Gpu {
                index: narrow(index),
                model: model.clone(),
                numa: line.numa,
                memory_numa: line
                    .memory_numa
                    .and_then(|nodes| nodes.iter().next())
                    .and_then(|node| u16::try_from(node).ok()),
                cpus: line.cpus,
                nvlink: (linked && (version.is_some() || into_switch.is_some())).then_some(NvLinkPorts {
                    version,
                    switch_links: into_switch.map_or(0, |into| into.links),
                    island: into_switch.map_or(0, |into| into.island),
                }),
                ..Gpu::default()
            });
        }
        let nics =
            self.nics.into_iter().map(|nic| Nic { name: nic.name, device: nic.device, ..Nic::default() });
        let machine = Machine::new(MachineParts {
            name: self.description,
            gpus,
            nics: nics.collect(),
            nvlinks,
            paths,
            ..MachineParts::default()
        })?;
        check_links(&machine, &self.links)?;
        Ok(machine)
    }

    fn nvlink_counts(&self) -> Vec<Vec<u8>> {
        let gpus = self.gpus.len();
        let rows = self.links.iter().take(gpus);
        rows.map(|row| row.iter().take(gpus).map(nvlinks).collect()).collect()
    }
}

/// Refuses a machine with other links than its text: GPUs would be chosen by links that do not exist.
fn check_links(machine: &Machine, links: &[Vec<Link>]) -> Result<(), MachineError> {
    for (a, row) in links.iter().enumerate() {
        for (b, written) in row.iter().enumerate().take(a) {
            let inferred = machine.link(a, b);
            if inferred != *written {
                return Err(MachineError {
                    field: format!("devices {b} and {a}"),
                    problem: format!(
                        "the matrix has {written}, but the NVSwitches and NVLinks that would explain it give {inferred}"
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Device numbers are below [`gantry_topology::machine::MAX_GPUS`].
fn narrow(index: usize) -> u8 {
    u8::try_from(index).unwrap_or(u8::MAX)
}

impl From<&Machine> for TopoText {
    /// The text that `nvidia-smi topo -m` would print on the machine. If a NIC's name cannot head a column, the NICs
    /// become `NIC#` with their names in the legend.
    fn from(machine: &Machine) -> Self {
        let size = machine.gpus().len() + machine.nics().len();
        let gpus = machine.gpus().iter().map(|gpu| GpuLine {
            cpus: gpu.cpus.clone(),
            numa: gpu.numa.clone(),
            memory_numa: gpu.memory_numa.and_then(|node| node.to_string().parse().ok()),
        });
        Self {
            description: None,
            nics_found: None,
            gpus: gpus.collect(),
            nics: nic_lines(machine.nics()),
            links: (0..size).map(|row| (0..size).map(|column| machine.link(row, column)).collect()).collect(),
        }
    }
}

fn nic_lines(nics: &[Nic]) -> Vec<NicLine> {
    let printable = nics.iter().all(|nic| is_nic_name(&nic.name));
    let explained = !printable || nics.iter().any(|nic| nic.device.is_some());
    let line = |(index, nic): (usize, &Nic)| NicLine {
        name: if printable { nic.name.clone() } else { format!("NIC{index}") },
        device: explained.then(|| one_line(nic.device.as_deref().unwrap_or(&nic.name))),
    };
    nics.iter().enumerate().map(line).collect()
}

/// A device name as one line of the legend can hold it. A colon behind a word would begin another entry.
fn one_line(name: &str) -> String {
    let visible = |ch: char| if ch.is_ascii_graphic() { ch } else { ' ' };
    let visible: String = name.chars().map(visible).collect();
    let words = visible.split_whitespace().map(|word| word.trim_end_matches(':'));
    let words = words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
    let short: String = words.chars().take(100).collect();
    let short = short.trim();
    if short.is_empty() { "unknown" } else { short }.to_owned()
}
