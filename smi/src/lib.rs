//! Reads the output of `nvidia-smi topo -m` as a machine.
//!
//! Accepted is what the tool prints, on any driver: tabs or blanks, glued cells, terminal escape codes, `SOC` for
//! `SYS`, missing columns, lists and `N/A`. A text that is truncated or contradicts itself is refused with line and
//! column; nothing is guessed to complete one. Pure: no files are opened here.
#![forbid(unsafe_code)]

mod error;
mod header;
mod legend;
mod machine;
mod parse;
mod paths;
mod products;
mod read;
mod row;
mod scan;
mod switches;
mod values;
mod words;

pub use error::{TopoError, TopoProblem};
pub use read::{ReadError, read};

use gantry_topology::{IdList, Link, Machine};

use words::Title;

/// The longest text that is read, in bytes. The largest matrix allowed (32 GPUs, 128 NICs) has a tenth of it.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// The content of a topology text: the matrix and the values behind each GPU's row. Nothing is inferred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopoText {
    description: Option<String>,
    nics_found: Option<usize>,
    gpus: Vec<GpuLine>,
    nics: Vec<NicLine>,
    links: Vec<Vec<Link>>,
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

/// Facts about a machine that its topology text does not contain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Model of the GPUs, such as `A100` or `NVIDIA H100 80GB HBM3`. Overrides a `# machine:` comment.
    pub model: Option<String>,
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
}

/// Reads a topology text as a machine; see [`TopoText::into_machine`] for what is inferred.
///
/// # Errors
/// As [`TopoText::parse`].
pub fn read_machine(text: &str) -> Result<Machine, TopoError> {
    read_machine_with(text, &Hints::default())
}

/// [`read_machine`] with hints.
///
/// # Errors
/// As [`TopoText::parse`].
pub fn read_machine_with(text: &str, hints: &Hints) -> Result<Machine, TopoError> {
    let machine = TopoText::parse(text)?.into_machine(hints);
    machine.map_err(|problem| TopoError { line: 1, column: 1, problem: TopoProblem::Machine(problem) })
}
