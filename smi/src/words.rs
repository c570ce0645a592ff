//! The words of a topology matrix: link cells, device names and column titles. Cells may be glued: no link is the
//! beginning of another, so glued links have a single reading.

use gantry_topology::machine::MAX_LINKS_PER_GPU;
use gantry_topology::{Link, PathClass};

use crate::scan::{Glyph, skip_blanks, word_at};

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
pub(crate) fn title_at(glyphs: &[Glyph], start: usize) -> Option<(Title, usize)> {
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

/// A single switch on the GPUs' own board, in the output of old drivers; the same distance as `PIX`.
const SAME_BOARD: &str = "PSB";

/// The link cell that begins at `start`, and its end.
pub(crate) fn link_at(glyphs: &[Glyph], start: usize) -> Option<(Link, usize)> {
    let begins =
        |word: &str| word.chars().eq(glyphs.iter().skip(start).map(|glyph| glyph.ch).take(word.len()));
    if begins("X") {
        return Some((Link::Itself, start + 1));
    }
    if begins("NV") {
        let digits: String = glyphs
            .iter()
            .skip(start + 2)
            .map(|glyph| glyph.ch)
            .take_while(char::is_ascii_digit)
            .take(4)
            .collect();
        let links = digits.parse::<u8>().ok()?;
        let allowed = (1..=MAX_LINKS_PER_GPU).contains(&links) && !digits.starts_with('0');
        return allowed.then_some((Link::NvLink(links), start + 2 + digits.len()));
    }
    if begins(SAME_BOARD) {
        return Some((Link::Pcie(PathClass::Pix), start + SAME_BOARD.len()));
    }
    PathClass::ALL
        .into_iter()
        .find(|class| begins(class.as_str()))
        .map(|class| (Link::Pcie(class), start + class.as_str().len()))
}

/// Whether the word at `start` consists of link cells only.
pub(crate) fn is_links(glyphs: &[Glyph], start: usize) -> bool {
    let end = start + word_at(glyphs, start).chars().count();
    let mut at = start;
    while at < end {
        match link_at(glyphs, at) {
            Some((_, after)) => at = after,
            None => return false,
        }
    }
    end > start
}

/// Beginnings of nvidia-smi's errors: no driver, a driver of another version, a lost GPU, no GPU.
const FAILURES: [&str; 4] = [
    "NVIDIA-SMI has failed",
    "Failed to initialize NVML",
    "Unable to determine the device handle",
    "No devices were found",
];

/// Whether a line is an error of nvidia-smi.
pub(crate) fn is_failure(line: &str) -> bool {
    FAILURES.iter().any(|failure| line.starts_with(failure))
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
pub(crate) fn device_length(word: &str) -> usize {
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
