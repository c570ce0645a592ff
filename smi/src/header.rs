//! The header line: the names of GPUs and NICs, then the titles of the values in a GPU's row. Cells may be glued.

use gantry_topology::machine::{MAX_GPUS, MAX_NICS};

use crate::error::{TopoError, TopoProblem};
use crate::scan::{Glyph, skip_blanks, word_at};
use crate::words::{Title, device_length, is_nic_name, numbered, title_at};

/// Characters of all names glued together, at most. A longer word is not scanned beyond.
const LONGEST_WORD: usize = (MAX_GPUS + MAX_NICS) * 64;

/// The columns of a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    /// Names of the devices, GPUs first.
    pub(crate) names: Vec<String>,
    /// How many of them are GPUs.
    pub(crate) gpus: usize,
    /// The columns behind the devices.
    pub(crate) titles: Vec<Title>,
}

impl Header {
    /// Reads a header line.
    pub(crate) fn read(glyphs: &[Glyph]) -> Result<Self, TopoError> {
        let mut header = Self { names: Vec::new(), gpus: 0, titles: Vec::new() };
        let mut at = skip_blanks(glyphs, 0);
        while let Some(place) = glyphs.get(at).copied() {
            let end = match title_at(glyphs, at) {
                Some((title, _)) if header.titles.contains(&title) => {
                    return Err(place.refuse(twice(title.as_str().to_owned())));
                }
                Some((title, end)) => {
                    header.titles.push(title);
                    end
                }
                None => header.read_device(glyphs, at, place)?,
            };
            at = skip_blanks(glyphs, end);
        }
        Ok(header)
    }

    /// Reads the device name at `at` and returns its end.
    fn read_device(&mut self, glyphs: &[Glyph], at: usize, place: Glyph) -> Result<usize, TopoError> {
        let near = glyphs.len().min(at + LONGEST_WORD);
        let mut word = word_at(glyphs.get(..near).unwrap_or_default(), at);
        let title = (1..word.chars().count()).find(|offset| title_at(glyphs, at + offset).is_some());
        if let Some(title) = title {
            word = word.chars().take(title).collect();
        }
        let name: String = word.chars().take(device_length(&word)).collect();
        let gpu = numbered(&name, "GPU").filter(|(_, length)| *length == name.len());
        if self.titles.is_empty() && gpu.is_some() {
            let expected =
                if self.names.len() > self.gpus { "a NIC".to_owned() } else { format!("GPU{}", self.gpus) };
            if self.names.contains(&name) {
                return Err(place.refuse(twice(name)));
            }
            if name != expected {
                return Err(place.refuse(TopoProblem::GpuOrder { found: name, expected }));
            }
            self.gpus += 1;
        } else if !self.titles.is_empty() || !is_nic_name(&name) {
            return Err(place.refuse(TopoProblem::UnknownColumn { found: word }));
        } else if self.names.contains(&name) {
            return Err(place.refuse(twice(name)));
        } else if self.gpus == 0 {
            let expected = "GPU0".to_owned();
            return Err(place.refuse(TopoProblem::GpuOrder { found: name, expected }));
        }
        let end = at + name.chars().count();
        self.names.push(name);
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

fn twice(name: String) -> TopoProblem {
    TopoProblem::Duplicate { kind: "column", name }
}
