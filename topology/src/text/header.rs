//! The line that names the columns: GPUs, NICs, then the titles of what a GPU's row ends with. Cells may be glued, titles may be
//! spelt in several ways; nothing else may stand there.

use super::error::{TopoError, TopoProblem};
use super::glyphs::{Glyph, skip_blanks, word_at};
use super::values::Column;
use super::words::{Title, cut_title_at, device_length, is_nic_name, numbered, title_at};
use crate::machine::{MAX_GPUS, MAX_NICS};

/// As many characters as all names glued together can have; the rest of a longer word is read when they are.
const LONGEST_WORD: usize = (MAX_GPUS + MAX_NICS) * 64;

/// The columns of a matrix.
#[derive(Debug, Clone)]
pub(super) struct Header {
    /// Names of the devices, GPUs first.
    pub(super) names: Vec<String>,
    /// Where each name stands on the screen.
    pub(super) places: Vec<usize>,
    /// How many of them are GPUs.
    pub(super) gpus: usize,
    /// The columns behind the devices.
    pub(super) columns: Vec<Column>,
    /// Where the line ends, if it was cut within its last title.
    pub(super) cut: Option<Glyph>,
}

impl Header {
    /// Reads a header line.
    pub(super) fn read(glyphs: &[Glyph]) -> Result<Self, TopoError> {
        Self::read_to(glyphs, None)
    }

    /// Reads a header line that ends in the beginning of a title. `end` is the blank behind it.
    pub(super) fn read_cut(glyphs: &[Glyph], end: Glyph) -> Result<Self, TopoError> {
        Self::read_to(glyphs, Some(end))
    }

    fn read_to(glyphs: &[Glyph], cut: Option<Glyph>) -> Result<Self, TopoError> {
        let mut header = Self {
            cut: None,
            names: Vec::new(),
            places: Vec::new(),
            gpus: 0,
            columns: Vec::new(),
        };
        let mut at = skip_blanks(glyphs, 0);
        while let Some(place) = glyphs.get(at).copied() {
            let title = title_at(glyphs, at).or_else(|| {
                let known: Vec<Title> = header.columns.iter().map(|column| column.title).collect();
                let title = cut.and_then(|_| cut_title_at(glyphs, at, &known))?;
                header.cut = cut;
                Some((title, glyphs.len()))
            });
            at = match title {
                Some((title, end)) => {
                    if header.columns.iter().any(|column| column.title == title) {
                        let name = title.as_str().to_owned();
                        return Err(place.refuse(TopoProblem::DuplicateColumn { name }));
                    }
                    header.columns.push(Column {
                        title,
                        from: place.visual,
                    });
                    end
                }
                None => header.read_device(glyphs, at, place)?,
            };
            at = skip_blanks(glyphs, at);
        }
        Ok(header)
    }

    /// Reads the device name at `at` and tells where it ends.
    fn read_device(&mut self, glyphs: &[Glyph], at: usize, place: Glyph) -> Result<usize, TopoError> {
        let near = glyphs.len().min(at + LONGEST_WORD);
        let mut word = word_at(glyphs.get(..near).unwrap_or_default(), at);
        let title = (1..word.chars().count()).find(|offset| title_at(glyphs, at + offset).is_some());
        if let Some(title) = title {
            word = word.chars().take(title).collect();
        }
        let name: String = word.chars().take(device_length(&word)).collect();
        let gpu = numbered(&name, "GPU").filter(|(_, length)| *length == name.len());
        if self.columns.is_empty() && gpu.is_some() {
            let expected = if self.names.len() > self.gpus {
                "a NIC".to_owned()
            } else {
                format!("GPU{}", self.gpus)
            };
            if self.names.contains(&name) {
                return Err(place.refuse(TopoProblem::DuplicateColumn { name }));
            }
            if name != expected {
                return Err(place.refuse(TopoProblem::GpuOrder {
                    found: name,
                    expected,
                }));
            }
            self.gpus += 1;
        } else if !self.columns.is_empty() || !is_nic_name(&name) {
            return Err(place.refuse(TopoProblem::UnknownColumn { found: word }));
        } else if self.names.contains(&name) {
            return Err(place.refuse(TopoProblem::DuplicateColumn { name }));
        } else if self.gpus == 0 {
            let expected = "GPU0".to_owned();
            return Err(place.refuse(TopoProblem::GpuOrder {
                found: name,
                expected,
            }));
        }
        let end = at + name.chars().count();
        self.names.push(name);
        self.places.push(place.visual);
        self.check_size(place)?;
        Ok(end)
    }

    fn check_size(&self, place: Glyph) -> Result<(), TopoError> {
        let nics = self.names.len() - self.gpus;
        let (kind, limit) = if self.gpus > MAX_GPUS {
            ("GPUs", MAX_GPUS)
        } else if nics > MAX_NICS {
            ("NICs", MAX_NICS)
        } else {
            return Ok(());
        };
        Err(place.refuse(TopoProblem::TooMany { kind, limit }))
    }
}
