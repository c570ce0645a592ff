//! Errors of a topology text: one variant per defect, with the words found and the allowed ones.

use gantry_topology::{MachineError, PathClass};

/// A refused topology text: place and defect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct TopoError {
    pub line: usize,
    pub column: usize,
    pub problem: TopoProblem,
}

/// A defect of a topology text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopoProblem {
    /// Longer than any real text.
    #[error("the text has {bytes} bytes, at most {limit} are read")]
    TooLong { bytes: usize, limit: usize },
    /// Only blanks and comments.
    #[error("no matrix: the text ends before a header line such as \"GPU0 GPU1 CPU Affinity\"")]
    Empty,
    /// The first meaningful line is no header.
    #[error("{found:?} is no header line; the matrix begins with a line such as \"GPU0 GPU1 CPU Affinity\"")]
    NoHeader { found: String },
    /// nvidia-smi printed an error instead of a matrix.
    #[error("nvidia-smi failed and printed no topology: {message}")]
    Failed { message: String },
    /// A row in the place of the header.
    #[error(
        "row {row} without a header line; a line such as \"GPU0 GPU1 CPU Affinity\" must name the columns first"
    )]
    RowBeforeHeader { row: String },
    /// A header cell that is neither a device nor a known title.
    #[error(
        "{found:?} is no column; allowed are GPU0, GPU1 and so on, then NICs (NIC0, mlx5_0 ...), then CPU Affinity, \
         NUMA Affinity and GPU NUMA ID"
    )]
    UnknownColumn { found: String },
    /// GPUs are not numbered 0, 1, 2 ... or follow NICs.
    #[error(
        "unexpected column {found}, expected {expected}: GPU columns must come first, numbered from 0 without gaps"
    )]
    GpuOrder { found: String, expected: String },
    /// A column, a row or a legend entry occurs twice.
    #[error("{kind} {name} occurs twice")]
    Duplicate { kind: &'static str, name: String },
    /// More devices than a machine may have.
    #[error("more than {limit} {kind}")]
    TooMany { kind: &'static str, limit: usize },
    /// A row is missing: the text ends, or another line follows.
    #[error(
        "row {row} is missing: the header names {columns} devices and each needs its row; is the text truncated?"
    )]
    MissingRow { row: String, columns: usize },
    /// A row of a device without a column.
    #[error("row {row} has no column in the header")]
    RowWithoutColumn { row: String },
    /// A row ends early.
    #[error("row {row} has {found} of {needed} link cells; is the text truncated?")]
    CutRow { row: String, found: usize, needed: usize },
    /// A row has more cells than the header has columns.
    #[error("{found:?} is one cell too many in row {row}, which has {columns} columns")]
    TooManyCells { row: String, found: String, columns: usize },
    /// A cell is no link.
    #[error("{found:?} is no link; allowed are X, NV1 to NV36, {}", path_classes())]
    UnknownLink { found: String },
    /// `X` off the diagonal, or another link on it.
    #[error("{found} in row {row}, column {column}: X is required on the diagonal and allowed only there")]
    Diagonal { found: String, row: String, column: String },
    /// NVLink to a NIC.
    #[error("{found} between {row} and {column}: only GPUs have NVLinks; allowed are {}", path_classes())]
    NvLinkToNic { found: String, row: String, column: String },
    /// The two halves of the matrix disagree.
    #[error("{found} in row {row}, column {column}, but {mirrored} in row {column}, column {row}")]
    Asymmetric { found: String, row: String, column: String, mirrored: String },
    /// A GPU has more NVLinks than possible, and no switch explains them.
    #[error("{gpu} would need {links} NVLinks; without an even NVSwitch mesh at most {limit} are possible")]
    TooManyLinks { gpu: String, links: u32, limit: u8 },
    /// A malformed value behind the links.
    #[error(
        "{found:?} is no value of {column}; write numbers up to 16383 and ranges with commas, such as 0-15,128-143, N/A or nothing"
    )]
    BadValue { column: &'static str, found: String },
    /// Blank cells leave the column of a value open.
    #[error("{found:?} may belong to more than one of {columns}; write N/A into the blank cells")]
    AmbiguousValue { found: String, columns: String },
    /// A row lacks values that other rows have, and no tabs mark them as blank.
    #[error(
        "row {row} ends before {column}, which other rows have; write N/A if it is unknown; is the text truncated?"
    )]
    CutValues { row: String, column: &'static str },
    /// The text ends within a value, as the same column of another row shows.
    #[error(
        "the text ends in {found:?}, but another row has {like:?}; end the line if the value is complete; is the text truncated?"
    )]
    CutValue { found: String, like: String },
    /// Another matrix beneath the first.
    #[error("another matrix begins here; give a single one")]
    SecondMatrix,
    /// A line behind the matrix that belongs to no legend.
    #[error(
        "{found:?} belongs neither to the matrix nor to a legend; give only the output of `nvidia-smi topo -m`"
    )]
    Trailing { found: String },
    /// A legend entry for a NIC without a column.
    #[error("the NIC legend names {name}, which has no column")]
    LegendUnknown { name: String },
    /// The NIC legend stops early.
    #[error("the NIC legend ends before {name}; is the text truncated?")]
    LegendCut { name: String },
    /// The text ends within the device of a NIC.
    #[error(
        "the text ends in {found:?}, the device of {name}; end the line if it is complete; is the text truncated?"
    )]
    LegendCutDevice { name: String, found: String },
    /// The notice about hidden NICs contradicts the header.
    #[error("the notice announces {shown} NICs in the matrix, but the header has {columns}")]
    NicCount { shown: usize, columns: usize },
    /// The matrix is well-formed, but describes no machine.
    #[error("the matrix describes no machine: {0}")]
    Machine(MachineError),
}

fn path_classes() -> String {
    PathClass::ALL.map(PathClass::as_str).join(", ")
}
