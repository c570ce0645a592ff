//! The text that `nvidia-smi topo -m` prints: read exactly, whatever a driver, a terminal or a web page made of it, and written
//! back. A text that is cut or contradicts itself is refused with line and column; nothing is guessed to complete one.

mod around;
mod check;
mod error;
mod foreign;
mod front;
mod glyphs;
mod header;
mod legend;
mod machine;
mod parse;
mod paths;
mod preamble;
mod print;
mod products;
mod row;
mod switches;
mod table;
mod values;
mod words;

pub(crate) use around::is_command;
pub use error::{TopoError, TopoProblem};
pub(crate) use foreign::printed_by;
pub(crate) use front::is_tagged;
pub(crate) use words::is_failure;

use crate::machine::{IdList, Link, Machine};

/// The longest text that is read, in bytes: the largest matrix allowed (32 GPUs, 128 NICs) has a tenth of it.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// What a topology text says, and no more: the matrix, and what each GPU's row adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopoText {
    description: Option<String>,
    nics_found: Option<usize>,
    gpus: Vec<GpuLine>,
    nics: Vec<NicLine>,
    links: Vec<Vec<Link>>,
}

/// What stands behind the links of a GPU; `None` where it is blank or `N/A`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuLine {
    /// CPUs the GPU is near (`CPU Affinity`).
    pub cpus: Option<IdList>,
    /// NUMA nodes the GPU is near (`NUMA Affinity`).
    pub numa: Option<IdList>,
    /// NUMA node of the GPU's own memory (`GPU NUMA ID`).
    pub memory_numa: Option<IdList>,
}

impl GpuLine {
    fn value(&self, title: words::Title) -> Option<&IdList> {
        match title {
            words::Title::Cpus => self.cpus.as_ref(),
            words::Title::Numa => self.numa.as_ref(),
            words::Title::MemoryNuma => self.memory_numa.as_ref(),
        }
    }
}

/// A NIC of the matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicLine {
    /// The name that heads its column: `mlx5_0`, or `NIC0`.
    pub name: String,
    /// The device behind a `NIC#`, if the text has a legend for it.
    pub device: Option<String>,
}

/// What is known of a machine besides its topology text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Model of the GPUs, such as `A100` or `NVIDIA H100 80GB HBM3`. Overrides a `# machine:` comment.
    pub model: Option<String>,
}

impl TopoText {
    /// What a leading `# machine: ...` comment says.
    pub fn description(&self) -> Option<&str> {
        self.description.as_deref()
    }

    /// How many NICs the machine has, where a notice says that the matrix does not show them all.
    pub fn nics_found(&self) -> Option<usize> {
        self.nics_found
    }

    /// The GPUs' rows.
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
}

/// Reads a topology text.
///
/// Allowed are tabs, blanks and both; glued cells where they come apart in one way; terminal escape codes; line ends of any system; a `#
/// machine: ...` comment, the notice about hidden NICs, the command itself and code fences around; missing columns behind the links and
/// blank cells in them; lines broken by a terminal; the legends before; a header cut within its last title; marks of a quotation before
/// every line, or what a tool puts there, such as the time or the host; a Markdown table. Words of people and output of other programs
/// before the header and behind the last row are passed over, the matrix of `-p2p` too.
///
/// # Errors
/// Where the text is cut, contradicts itself, or is something else: the place, what stands there, what is allowed.
pub fn parse(text: &str) -> Result<TopoText, TopoError> {
    parse::parse(text)
}

/// Whether a matrix with a header stands in a text, among whatever else. What it says may still be refused.
pub fn has_matrix(text: &str) -> bool {
    preamble::has_matrix(text)
}

/// Reads a topology text as a machine; see [`TopoText::into_machine`] for what is inferred.
///
/// # Errors
/// As [`parse`].
pub fn read_machine(text: &str) -> Result<Machine, TopoError> {
    read_machine_with(text, &Hints::default())
}

/// [`read_machine`] with hints.
///
/// # Errors
/// As [`parse`].
pub fn read_machine_with(text: &str, hints: &Hints) -> Result<Machine, TopoError> {
    parse(text)?.into_machine(hints).map_err(|problem| TopoError {
        line: 1,
        column: 1,
        problem: TopoProblem::Machine(problem),
    })
}
