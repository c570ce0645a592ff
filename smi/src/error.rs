//! Errors of a topology text: one variant per defect, with the words found and the allowed ones.

use gantry_topology::{MachineError, PathClass};

/// A refused topology text: place and defect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct TopoError {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1, in characters of the given text: escape codes count, a tab counts as one.
    pub column: usize,
    /// The defect at this place.
    pub problem: TopoProblem,
}

/// A defect of a topology text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopoProblem {
    /// Longer than any real text.
    #[error("the text has {bytes} bytes, at most {limit} are read")]
    TooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Only blanks and comments.
    #[error("no matrix: the text ends before a header line such as \"GPU0 GPU1 CPU Affinity\"")]
    Empty,
    /// The first meaningful line is no header.
    #[error("{found:?} is no header line; the matrix begins with a line such as \"GPU0 GPU1 CPU Affinity\"")]
    NoHeader {
        /// First word of the line.
        found: String,
    },
    /// nvidia-smi printed an error instead of a matrix.
    #[error("nvidia-smi failed and printed no topology: {message}")]
    Failed {
        /// Its message.
        message: String,
    },
    /// A row in the place of the header.
    #[error(
        "row {row} without a header line; a line such as \"GPU0 GPU1 CPU Affinity\" must name the columns first"
    )]
    RowBeforeHeader {
        /// Label of the row.
        row: String,
    },
    /// A header cell that is neither a device nor a known title.
    #[error(
        "{found:?} is no column; allowed are GPU0, GPU1 and so on, then NICs (NIC0, mlx5_0 ...), then CPU Affinity, \
         NUMA Affinity and GPU NUMA ID"
    )]
    UnknownColumn {
        /// The words found.
        found: String,
    },
    /// GPUs are not numbered 0, 1, 2 ... or follow NICs.
    #[error(
        "unexpected column {found}, expected {expected}: GPU columns must come first, numbered from 0 without gaps"
    )]
    GpuOrder {
        /// The column found.
        found: String,
        /// The column expected.
        expected: String,
    },
    /// A column, a row or a legend entry occurs twice.
    #[error("{kind} {name} occurs twice")]
    Duplicate {
        /// `column`, `row` or `NIC legend entry`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// More devices than a machine may have.
    #[error("more than {limit} {kind}")]
    TooMany {
        /// `GPUs` or `NICs`.
        kind: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A row is missing: the text ends, or another line follows.
    #[error(
        "row {row} is missing: the header names {columns} devices and each needs its row; is the text truncated?"
    )]
    MissingRow {
        /// The row expected here.
        row: String,
        /// Devices in the header.
        columns: usize,
    },
    /// A row of a device without a column.
    #[error("row {row} has no column in the header")]
    RowWithoutColumn {
        /// Its label.
        row: String,
    },
    /// A row ends early.
    #[error("row {row} has {found} of {needed} link cells; is the text truncated?")]
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
    /// `X` off the diagonal, or another link on it.
    #[error("{found} in row {row}, column {column}: X is required on the diagonal and allowed only there")]
    Diagonal {
        /// The cell found.
        found: String,
        /// Row label.
        row: String,
        /// Column label.
        column: String,
    },
    /// NVLink to a NIC.
    #[error("{found} between {row} and {column}: only GPUs have NVLinks; allowed are {}", path_classes())]
    NvLinkToNic {
        /// The cell found.
        found: String,
        /// Row label.
        row: String,
        /// Column label.
        column: String,
    },
    /// The two halves of the matrix disagree.
    #[error("{found} in row {row}, column {column}, but {mirrored} in row {column}, column {row}")]
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
    /// A GPU has more NVLinks than possible, and no switch explains them.
    #[error("{gpu} would need {links} NVLinks; without an even NVSwitch mesh at most {limit} are possible")]
    TooManyLinks {
        /// The GPU.
        gpu: String,
        /// Links over all its cells.
        links: u32,
        /// The limit.
        limit: u8,
    },
    /// A malformed value behind the links.
    #[error(
        "{found:?} is no value of {column}; write numbers up to 16383 and ranges with commas, such as 0-15,128-143, N/A or nothing"
    )]
    BadValue {
        /// Title of the column.
        column: &'static str,
        /// The value found.
        found: String,
    },
    /// Blank cells leave the column of a value open.
    #[error("{found:?} may belong to more than one of {columns}; write N/A into the blank cells")]
    AmbiguousValue {
        /// The first value.
        found: String,
        /// Titles of the columns.
        columns: String,
    },
    /// A row lacks values that other rows have, and no tabs mark them as blank.
    #[error(
        "row {row} ends before {column}, which other rows have; write N/A if it is unknown; is the text truncated?"
    )]
    CutValues {
        /// Its label.
        row: String,
        /// First title missing.
        column: &'static str,
    },
    /// The text ends within a value, as the same column of another row shows.
    #[error(
        "the text ends in {found:?}, but another row has {like:?}; end the line if the value is complete; is the text truncated?"
    )]
    CutValue {
        /// The last word.
        found: String,
        /// The same column's value in another row.
        like: String,
    },
    /// Another matrix beneath the first.
    #[error("another matrix begins here; give a single one")]
    SecondMatrix,
    /// A line behind the matrix that belongs to no legend.
    #[error(
        "{found:?} belongs neither to the matrix nor to a legend; give only the output of `nvidia-smi topo -m`"
    )]
    Trailing {
        /// The first words of the line.
        found: String,
    },
    /// A legend entry for a NIC without a column.
    #[error("the NIC legend names {name}, which has no column")]
    LegendUnknown {
        /// The name.
        name: String,
    },
    /// The NIC legend stops early.
    #[error("the NIC legend ends before {name}; is the text truncated?")]
    LegendCut {
        /// The first NIC without an entry.
        name: String,
    },
    /// The text ends within the device of a NIC.
    #[error(
        "the text ends in {found:?}, the device of {name}; end the line if it is complete; is the text truncated?"
    )]
    LegendCutDevice {
        /// The last NIC named.
        name: String,
        /// The beginning of its device.
        found: String,
    },
    /// The notice about hidden NICs contradicts the header.
    #[error("the notice announces {shown} NICs in the matrix, but the header has {columns}")]
    NicCount {
        /// The number in the notice.
        shown: usize,
        /// NICs in the header.
        columns: usize,
    },
    /// The matrix is well-formed, but describes no machine.
    #[error("the matrix describes no machine: {0}")]
    Machine(MachineError),
}

fn path_classes() -> String {
    PathClass::ALL.map(PathClass::as_str).join(", ")
}
