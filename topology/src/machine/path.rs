//! PCIe path classes and the symmetric matrix of them. Only what the classes mean and how they are written;
//! bandwidths are in [`crate::bandwidth`].

use std::fmt;
use std::str::FromStr;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// The distance of two devices on PCIe, nearest first. Names are nvidia-smi's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathClass {
    /// At most a single PCIe bridge.
    Pix,
    /// Several PCIe bridges, no host bridge.
    Pxb,
    /// Through a PCIe host bridge (the CPU's root complex).
    Phb,
    /// Between host bridges within a NUMA node.
    Node,
    /// Across the link between NUMA nodes.
    Sys,
    /// Across the link between sockets, as drivers before 375 named it; the same distance as `SYS`.
    Soc,
}

impl PathClass {
    /// Every class, nearest first.
    pub const ALL: [Self; 6] = [Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys, Self::Soc];

    /// The name nvidia-smi prints.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
            Self::Soc => "SOC",
        }
    }

    /// Whether traffic leaves the NUMA node: `SYS` or its old name `SOC`.
    pub const fn crosses_sockets(self) -> bool {
        matches!(self, Self::Sys | Self::Soc)
    }
}

impl fmt::Display for PathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that is no PCIe path class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no path class; allowed are PIX, PXB, PHB, NODE, SYS and the old SOC")]
pub struct PathClassError(pub String);

impl FromStr for PathClass {
    type Err = PathClassError;

    fn from_str(word: &str) -> Result<Self, PathClassError> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == word)
            .ok_or_else(|| PathClassError(word.to_owned()))
    }
}

/// The path class of every pair of devices: GPUs first, then NICs. Symmetric by construction; written as one line of words
/// per device, `X` on the diagonal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(try_from = "Vec<Row>", into = "Vec<String>")]
#[schemars(with = "Vec<String>")]
pub struct PathMatrix {
    size: usize,
    /// The strict lower triangle, row by row.
    below: Vec<PathClass>,
}

impl PathMatrix {
    /// A matrix of `size` devices, its classes given by `class(row, column)` for `row > column`.
    pub fn from_fn(size: usize, mut class: impl FnMut(usize, usize) -> PathClass) -> Self {
        let mut below = Vec::with_capacity(size * size.saturating_sub(1) / 2);
        for row in 0..size {
            for column in 0..row {
                below.push(class(row, column));
            }
        }
        Self { size, below }
    }

    /// The number of devices.
    pub fn len(&self) -> usize {
        self.size
    }

    /// Whether it describes none.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// The class of a pair. A device with itself, or one out of range, is `PIX` and `SYS` respectively: the harmless ends.
    pub fn get(&self, a: usize, b: usize) -> PathClass {
        let (low, high) = (a.min(b), a.max(b));
        if low == high {
            return PathClass::Pix;
        }
        self.below.get(high * (high - 1) / 2 + low).copied().unwrap_or(PathClass::Sys)
    }
}

/// An error in the `paths` of a machine file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathMatrixError {
    /// A row has too many or too few words.
    #[error("row {row}: {found} words, {expected} are needed")]
    Width {
        /// Row, from 0.
        row: usize,
        /// Words in it.
        found: usize,
        /// Rows there are.
        expected: usize,
    },
    /// A cell is no class.
    #[error("row {row}, column {column}: {source}")]
    Cell {
        /// Row, from 0.
        row: usize,
        /// Column, from 0.
        column: usize,
        /// The word.
        source: PathClassError,
    },
    /// Another word than `X` on the diagonal, or `X` off the diagonal.
    #[error("row {row}, column {column}: X belongs on the diagonal, and only there")]
    Diagonal {
        /// Row, from 0.
        row: usize,
        /// Column, from 0.
        column: usize,
    },
    /// The two halves disagree.
    #[error("row {row}, column {column}: {class}, but {mirrored} in row {column}, column {row}")]
    Asymmetric {
        /// Row, from 0.
        row: usize,
        /// Column, from 0.
        column: usize,
        /// The class found here.
        class: PathClass,
        /// The class on the other side.
        mirrored: PathClass,
    },
}

/// One line of the matrix as it is read: the words in one text, or a list of them.
struct Row(String);

impl<'de> Deserialize<'de> for Row {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RowVisitor)
    }
}

struct RowVisitor;

impl<'de> Visitor<'de> for RowVisitor {
    type Value = Row;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row of words such as \"X PIX SYS\"")
    }

    fn visit_str<E>(self, words: &str) -> Result<Row, E> {
        Ok(Row(words.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut words: A) -> Result<Row, A::Error> {
        let mut row = Vec::new();
        while let Some(word) = words.next_element::<String>()? {
            row.push(word);
        }
        Ok(Row(row.join(" ")))
    }
}

impl TryFrom<Vec<Row>> for PathMatrix {
    type Error = PathMatrixError;

    fn try_from(rows: Vec<Row>) -> Result<Self, PathMatrixError> {
        let rows: Vec<String> = rows.into_iter().map(|Row(words)| words).collect();
        Self::try_from(rows)
    }
}

impl TryFrom<Vec<String>> for PathMatrix {
    type Error = PathMatrixError;

    fn try_from(rows: Vec<String>) -> Result<Self, PathMatrixError> {
        let size = rows.len();
        let mut full = Vec::with_capacity(size);
        for (row, line) in rows.iter().enumerate() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if words.len() != size {
                return Err(PathMatrixError::Width { row, found: words.len(), expected: size });
            }
            let mut classes = Vec::with_capacity(size);
            for (column, word) in words.into_iter().enumerate() {
                if (word == "X") != (row == column) {
                    return Err(PathMatrixError::Diagonal { row, column });
                }
                let class = if row == column { Ok(PathClass::Pix) } else { word.parse() };
                classes.push(class.map_err(|source| PathMatrixError::Cell { row, column, source })?);
            }
            full.push(classes);
        }
        for (row, classes) in full.iter().enumerate() {
            for (column, class) in classes[..row].iter().enumerate() {
                let (class, mirrored) = (*class, full[column][row]);
                if class != mirrored {
                    return Err(PathMatrixError::Asymmetric { row, column, class, mirrored });
                }
            }
        }
        Ok(Self::from_fn(size, |row, column| full[row][column]))
    }
}

impl From<PathMatrix> for Vec<String> {
    fn from(matrix: PathMatrix) -> Self {
        (0..matrix.size)
            .map(|row| {
                let words: Vec<&str> = (0..matrix.size)
                    .map(|column| if row == column { "X" } else { matrix.get(row, column).as_str() })
                    .collect();
                words.join(" ")
            })
            .collect()
    }
}
