//! Why a topology text is refused: one variant per thing that can be wrong, each with its place in the text, what stood there
//! and what is allowed. No parsing.

use crate::machine::{MachineError, PathClass};

/// A refused topology text: where in it, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct TopoError {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1, in characters of the text as it was given (escape codes count, a tab counts as one).
    pub column: usize,
    /// What is wrong there.
    pub problem: TopoProblem,
}

/// What is wrong with a topology text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopoProblem {
    /// The text is longer than any real one.
    #[error("the text has {bytes} bytes, at most {limit} are read")]
    TooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Nothing but blanks and comments.
    #[error("no matrix: the text ends before a header line such as \"GPU0 GPU1 CPU Affinity\"")]
    Empty,
    /// The first meaningful line is no header.
    #[error("{found:?} is no header line; the matrix begins with a line such as \"GPU0 GPU1 CPU Affinity\"")]
    NoHeader {
        /// First word of the line.
        found: String,
    },
    /// The output of another program, or of other options.
    #[error("{found:?} is printed by {tool}; give the output of `nvidia-smi topo -m`")]
    OtherOutput {
        /// First words of the line.
        found: String,
        /// What prints it.
        tool: &'static str,
    },
    /// What stands there instead of a matrix is why nvidia-smi made none.
    #[error("nvidia-smi failed and printed no topology; it says: {said}")]
    Failed {
        /// Its message.
        said: String,
    },
    /// A row stands where the header belongs.
    #[error(
        "row {row} without a header line; a line such as \"GPU0 GPU1 CPU Affinity\" must name the columns first"
    )]
    RowBeforeHeader {
        /// Label of the row.
        row: String,
    },
    /// A header cell that names no device and no known column.
    #[error(
        "{found:?} is no column; allowed are GPU0, GPU1 and so on, then NICs (NIC0, mlx5_0 ...), then CPU Affinity, \
         NUMA Affinity and GPU NUMA ID"
    )]
    UnknownColumn {
        /// The words found.
        found: String,
    },
    /// GPUs are not numbered 0, 1, 2 ... or stand after NICs.
    #[error("column {found} where {expected} is due; GPUs come first, numbered from 0 without gaps")]
    GpuOrder {
        /// The column found.
        found: String,
        /// The column due.
        expected: String,
    },
    /// A column stands twice.
    #[error("column {name} stands twice")]
    DuplicateColumn {
        /// Its name.
        name: String,
    },
    /// More devices than a machine may have.
    #[error("more than {limit} {kind}")]
    TooMany {
        /// `GPUs` or `NICs`.
        kind: &'static str,
        /// The bound.
        limit: usize,
    },
    /// The header has no rows beneath it.
    #[error("the header names {columns} devices, but no row follows; is the text cut?")]
    NoRows {
        /// Devices in the header.
        columns: usize,
    },
    /// Rows are missing: the text ends, or another row comes.
    #[error(
        "row {row} is missing; the header names {columns} devices and each needs its row; is the text cut?"
    )]
    MissingRow {
        /// The row due here.
        row: String,
        /// Devices in the header.
        columns: usize,
    },
    /// A row stands twice.
    #[error("row {row} stands twice")]
    DuplicateRow {
        /// Its label.
        row: String,
    },
    /// A row whose device has no column.
    #[error("row {row} has no column in the header")]
    RowWithoutColumn {
        /// Its label.
        row: String,
    },
    /// A row ends early.
    #[error("row {row} has {found} of {needed} link cells; is the text cut?")]
    CutRow {
        /// Its label.
        row: String,
        /// Cells found.
        found: usize,
        /// Cells needed.
        needed: usize,
    },
    /// A row has more cells than the header has columns.
    #[error("{found:?} is one cell too many in row {row}, which has {columns} columns")]
    TooManyCells {
        /// The row's label.
        row: String,
        /// The first cell too many.
        found: String,
        /// Columns in the header.
        columns: usize,
    },
    /// A cell is no link.
    #[error("{found:?} is no link; allowed are X, NV1 to NV36, {}", path_classes())]
    UnknownLink {
        /// The word found.
        found: String,
    },
    /// A word of `nvidia-smi topo -p2p`, another matrix altogether.
    #[error(
        "{found:?} belongs to `nvidia-smi topo -p2p`, which tells no links; give the output of `nvidia-smi topo -m`"
    )]
    PeerToPeerMatrix {
        /// The word found.
        found: String,
    },
    /// A word of another vendor's matrix.
    #[error("{found:?} is a link as {tool} prints it; give the output of `nvidia-smi topo -m`")]
    ForeignMatrix {
        /// The word found.
        found: String,
        /// What prints it.
        tool: &'static str,
    },
    /// `X` off the diagonal, or something else on it.
    #[error("{found} in row {row}, column {column}: X belongs where a device meets itself, and only there")]
    Diagonal {
        /// The cell found.
        found: String,
        /// Row label.
        row: String,
        /// Column label.
        column: String,
    },
    /// NVLink to a NIC.
    #[error(
        "{found} between {row} and {column}: only GPUs have NVLinks; allowed are {}",
        path_classes()
    )]
    NvLinkToNic {
        /// The cell found.
        found: String,
        /// Row label.
        row: String,
        /// Column label.
        column: String,
    },
    /// The two halves of the matrix disagree.
    #[error("{found} in row {row}, column {column}, but row {column}, column {row} says {mirrored}")]
    Asymmetric {
        /// The cell found.
        found: String,
        /// Row label.
        row: String,
        /// Column label.
        column: String,
        /// The cell on the other side.
        mirrored: String,
    },
    /// A GPU has more NVLinks than any has, and no switch explains them.
    #[error("{gpu} would need {links} NVLinks; without an even NVSwitch mesh at most {limit} are possible")]
    TooManyLinks {
        /// The GPU.
        gpu: String,
        /// Links over all its cells.
        links: u32,
        /// The bound.
        limit: u8,
    },
    /// A value behind the links is malformed.
    #[error("{found:?} is no value of {column}; write {allowed}, N/A or nothing")]
    BadValue {
        /// Title of the column.
        column: &'static str,
        /// The value found.
        found: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Blank cells leave open which column a value belongs to.
    #[error("{found:?} may belong to more than one of {columns}; write N/A into the blank cells")]
    AmbiguousValue {
        /// The first value.
        found: String,
        /// Titles of the columns.
        columns: String,
    },
    /// A row lacks values that other rows have, with nothing to say that they are blank on purpose.
    #[error(
        "row {row} ends before {column}, which other rows have; write N/A if it is unknown; is the text cut?"
    )]
    CutValues {
        /// Its label.
        row: String,
        /// First title missing.
        column: &'static str,
    },
    /// The text ends within a value.
    #[error("the text ends in {found:?}, the beginning of {longer:?} in another row; is the text cut?")]
    CutValue {
        /// What stands there.
        found: String,
        /// The same column's value in another row.
        longer: String,
    },
    /// The text ends within a value, as the form of the others shows.
    #[error(
        "the text ends in {found:?}, where another row has {like:?}; end the line if it is whole; is the text cut?"
    )]
    CutForm {
        /// What stands there.
        found: String,
        /// The same column's value in another row.
        like: String,
    },
    /// A wrapped row can be put together in more than one way.
    #[error("row {row} is broken over lines and can be read in more than one way; join its lines")]
    AmbiguousWrap {
        /// Its label.
        row: String,
    },
    /// Another header line beneath the matrix.
    #[error("another matrix begins here; give a single one")]
    SecondMatrix,
    /// A legend entry for a NIC that has no column.
    #[error("the NIC legend names {name}, which has no column")]
    LegendUnknown {
        /// The name.
        name: String,
    },
    /// A NIC is explained twice.
    #[error("the NIC legend names {name} twice")]
    LegendTwice {
        /// The name.
        name: String,
    },
    /// The NIC legend stops early.
    #[error("the NIC legend ends before {name}; is the text cut?")]
    LegendCut {
        /// The first NIC it does not name.
        name: String,
    },
    /// The text ends within the device of a NIC.
    #[error(
        "the text ends in {found:?}, the device of {name}, where {other} has {like:?}; end the line if it is whole; is the text cut?"
    )]
    LegendCutDevice {
        /// The last NIC named.
        name: String,
        /// What stands there as its device.
        found: String,
        /// Another NIC.
        other: String,
        /// The device of that.
        like: String,
    },
    /// The text ends within the device of the only NIC.
    #[error(
        "the text ends in {found:?}, the device of {name}, before a number; end the line if it is whole; is the text cut?"
    )]
    LegendCutWithin {
        /// The NIC.
        name: String,
        /// What stands there as its device.
        found: String,
    },
    /// The notice about hidden NICs contradicts the header.
    #[error("the notice speaks of {shown} NICs in the matrix, the header has {columns}")]
    NicCount {
        /// What the notice says.
        shown: usize,
        /// NICs in the header.
        columns: usize,
    },
    /// The matrix reads well, but describes no machine.
    #[error("the matrix describes no machine: {0}")]
    Machine(MachineError),
}

fn path_classes() -> String {
    PathClass::ALL.map(PathClass::as_str).join(", ")
}
