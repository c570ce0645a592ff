//! Reads the output of `nvidia-smi topo -m` as a machine.
//!
//! Accepted is what the tool prints, on any driver: tabs or blanks, glued cells, terminal escape codes, `SOC` for
//! `SYS`, missing columns, lists and `N/A`. A text that is truncated or contradicts itself is refused with line and
//! column; nothing is guessed to complete one. Pure: no files are opened here.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a comment says what a name does not")]

mod error;
mod header;
mod parse;
mod paths;
mod row;
mod scan;
mod switches;
mod text;
mod values;

pub use error::{TopoError, TopoProblem};
pub use text::{GpuLine, NicLine, TopoText};

use gantry_topology::{Machine, read as file};

use header::numbered;
use parse::is_failure;

/// The longest text that is read, in bytes. The largest matrix allowed (32 GPUs, 128 NICs) has a tenth of it.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// Facts about a machine that its topology text does not contain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Model of the GPUs, such as `A100` or `NVIDIA H100 80GB HBM3`. Overrides a `# machine:` comment.
    pub model: Option<String>,
}

/// Reads a topology text as a machine; see [`TopoText::into_machine`] for what is inferred.
pub fn read_machine(text: &str) -> Result<Machine, TopoError> {
    read_machine_with(text, &Hints::default())
}

pub fn read_machine_with(text: &str, hints: &Hints) -> Result<Machine, TopoError> {
    let machine = TopoText::parse(text)?.into_machine(hints);
    machine.map_err(|problem| TopoError { line: 1, column: 1, problem: TopoProblem::Machine(problem) })
}

/// Why a text is no machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Only blanks and comments.
    #[error(
        "the text is empty; expected a machine file (YAML or JSON) or the output of `nvidia-smi topo -m`"
    )]
    Empty,
    /// Neither form.
    #[error(
        "line {line}, column 1: {found:?} begins neither a machine file (YAML or JSON, such as \"gpus:\") nor the output of \
         `nvidia-smi topo -m` (such as \"GPU0 GPU1 CPU Affinity\")"
    )]
    Unrecognised { line: usize, found: String },
    /// A topology text that is truncated or contradicts itself.
    #[error(transparent)]
    Topology(#[from] TopoError),
    /// A machine file with an error.
    #[error(transparent)]
    File(file::ReadError),
    /// A hint of the GPUs' model with a machine file, which contains the models.
    #[error("model {model:?} is given, but only the output of `nvidia-smi topo -m` needs one; omit it")]
    NeedlessModel { model: String },
}

impl From<file::ReadError> for ReadError {
    fn from(error: file::ReadError) -> Self {
        match error {
            file::ReadError::Empty => Self::Empty,
            file::ReadError::Unrecognised { line, found } => Self::Unrecognised { line, found },
            error => Self::File(error),
        }
    }
}

/// Reads a machine from a machine file or a topology text.
///
/// # Errors
/// The text is malformed, contradicts itself or is neither form; or a hint is given with a machine file.
pub fn read(text: &str, hints: &Hints) -> Result<Machine, ReadError> {
    let text = text.trim_start_matches('\u{feff}');
    if is_topology(text) {
        return Ok(read_machine_with(text, hints)?);
    }
    let machine = file::read(text)?;
    match &hints.model {
        Some(model) => Err(ReadError::NeedlessModel { model: model.clone() }),
        None => Ok(machine),
    }
}

/// Whether the first line that is neither blank nor a comment begins a topology text: a device's name, the notice about
/// hidden NICs, or a failure of nvidia-smi.
fn is_topology(text: &str) -> bool {
    let lines = text.split(['\n', '\r']).map(str::trim);
    let mut lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.next().is_some_and(|line| {
        let name = line
            .trim_start_matches(|ch: char| ch == '\u{1b}' || ch == '[' || ch == 'm' || ch.is_ascii_digit());
        let is_device = numbered(name, "GPU").or_else(|| numbered(name, "NIC")).is_some();
        is_device || line.contains("found in the topology") || is_failure(line)
    })
}
