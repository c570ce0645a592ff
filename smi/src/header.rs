//! The header line: the names of GPUs and NICs, then the titles of the values in a GPU's row. Cells may be glued.

use gantry_topology::machine::{MAX_GPUS, MAX_NICS};

use crate::error::{TopoError, TopoProblem};
use crate::row::is_links;
use crate::scan::{Glyph, skip_blanks, word_at};

/// Characters of all names glued together, at most. A longer word is not scanned beyond.
const LONGEST_WORD: usize = (MAX_GPUS + MAX_NICS) * 64;

/// The columns that may follow the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Title {
    Cpus,
    Numa,
    MemoryNuma,
}

impl Title {
    pub(crate) const ALL: [Self; 3] = [Self::Cpus, Self::Numa, Self::MemoryNuma];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Cpus => "CPU Affinity",
            Self::Numa => "NUMA Affinity",
            Self::MemoryNuma => "GPU NUMA ID",
        }
    }
}

/// Titles as drivers print them, in capitals.
const TITLES: [(&str, Title); 6] = [
    ("CPU AFFINITY", Title::Cpus),
    ("CPU NUMA AFFINITY", Title::Numa),
    ("NUMA AFFINITY", Title::Numa),
    ("MEMORY AFFINITY", Title::Numa),
    ("GPU NUMA ID", Title::MemoryNuma),
    ("GPU NUMA AFFINITY", Title::MemoryNuma),
];

/// The column title that begins at `start`, with any number of blanks between its words, and its end.
fn title_at(glyphs: &[Glyph], start: usize) -> Option<(Title, usize)> {
    TITLES.iter().find_map(|(words, title)| {
        let mut at = start;
        for (count, word) in words.split(' ').enumerate() {
            if count > 0 {
                at = skip_blanks(glyphs, at);
            }
            let letters = glyphs.iter().skip(at).map(|glyph| glyph.ch.to_ascii_uppercase());
            if !word.chars().eq(letters.take(word.len())) {
                return None;
            }
            at += word.len();
        }
        Some((*title, at))
    })
}

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

/// The number of a `GPU#` or `NIC#` at the start of a word, and the length of the name.
pub(crate) fn numbered(word: &str, prefix: &str) -> Option<(usize, usize)> {
    let digits: String =
        word.strip_prefix(prefix)?.chars().take_while(char::is_ascii_digit).take(6).collect();
    let number = digits.parse().ok()?;
    let canonical = digits.len() == 1 || !digits.starts_with('0');
    canonical.then_some((number, prefix.len() + digits.len()))
}

/// The length of the first device name in a header word, which may be several names glued.
fn device_length(word: &str) -> usize {
    if let Some((_, length)) = numbered(word, "GPU").or_else(|| numbered(word, "NIC")) {
        return length;
    }
    mellanox_length(word)
        .filter(|length| word.get(*length..).is_some_and(|rest| mellanox_length(rest).is_some()))
        .unwrap_or(word.chars().count())
}

/// The length of `mlx5_7` and the like at the start of a word: such names come glued.
fn mellanox_length(word: &str) -> Option<usize> {
    let rest = word.strip_prefix("mlx4_").or_else(|| word.strip_prefix("mlx5_"))?;
    let digits = rest.chars().take_while(char::is_ascii_digit).count();
    (digits > 0).then_some("mlx5_".len() + digits)
}

/// Words of titles, which are no names of NICs.
const TITLE_WORDS: [&str; 5] = ["affinity", "cpu", "numa", "memory", "id"];

/// Whether a word can be the name of a NIC's column: a device name that is not also a link, a title, a GPU or a disk.
pub(crate) fn is_nic_name(name: &str) -> bool {
    let glyphs: Vec<Glyph> = name.chars().map(|ch| Glyph { ch, line: 1, column: 1, visual: 0 }).collect();
    let plain = name.starts_with(|ch: char| ch.is_ascii_alphabetic())
        && name.len() <= 64
        && name.chars().all(|ch| ch.is_ascii_alphanumeric() || "_-.@".contains(ch));
    plain
        && !name.starts_with("GPU")
        && numbered(name, "NVMe").is_none()
        && !TITLE_WORDS.contains(&name.to_ascii_lowercase().as_str())
        && device_length(name) == name.len()
        && !(0..glyphs.len()).any(|at| title_at(&glyphs, at).is_some())
        && !is_links(&glyphs, 0)
}
