//! The words of a topology matrix: link cells, device names and column titles, read where they stand, also when cells are glued.
//! No word of a link begins another, so glued cells come apart in one way only.

use super::glyphs::{Glyph, word_at};
use crate::machine::{Link, MAX_LINKS_PER_GPU, PathClass};

/// The columns that may follow the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Title {
    Cpus,
    Numa,
    MemoryNuma,
}

impl Title {
    pub(super) const ALL: [Self; 3] = [Self::Cpus, Self::Numa, Self::MemoryNuma];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Cpus => "CPU Affinity",
            Self::Numa => "NUMA Affinity",
            Self::MemoryNuma => "GPU NUMA ID",
        }
    }
}

/// Titles as drivers and copies write them, in capitals, a blank where there may be blanks, or none.
const TITLES: [(&str, Title); 6] = [
    ("CPU AFFINITY", Title::Cpus),
    ("CPU NUMA AFFINITY", Title::Numa),
    ("NUMA AFFINITY", Title::Numa),
    ("MEMORY AFFINITY", Title::Numa),
    ("GPU NUMA ID", Title::MemoryNuma),
    ("GPU NUMA AFFINITY", Title::MemoryNuma),
];

/// What may stand between the words of a title.
fn is_gap(glyph: &Glyph) -> bool {
    glyph.is_blank() || "_-".contains(glyph.ch)
}

/// The column title that begins at `start`, whatever blanks, `_` or `-` stand between its words, and where it ends. A word of it that
/// has blanks within was torn apart, and so may values be.
pub(super) fn title_at(glyphs: &[Glyph], start: usize) -> Option<(Title, usize)> {
    TITLES.iter().find_map(|(words, title)| {
        let mut at = start;
        for (count, word) in words.split(' ').enumerate() {
            if count > 0 {
                at += glyphs.iter().skip(at).take_while(|glyph| is_gap(glyph)).count();
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

/// The title that the rest of the line from `start` on is the beginning of, where the line was cut, and which is not among `known`.
/// nvidia-smi prints them in the order of [`Title::ALL`], so that `CPU` is the CPUs unless these are there already.
pub(super) fn cut_title_at(glyphs: &[Glyph], start: usize, known: &[Title]) -> Option<Title> {
    let end = glyphs
        .iter()
        .rposition(|glyph| !is_gap(glyph))
        .map_or(0, |last| last + 1);
    let rest = glyphs.get(start..end).unwrap_or_default();
    let begins = TITLES
        .iter()
        .filter(|(words, title)| begins_title(rest, words) && !known.contains(title));
    // No text says GPU NUMA ID alone, and GPU may be a device's name that was cut.
    begins
        .map(|(_, title)| *title)
        .find(|title| *title != Title::MemoryNuma || !known.is_empty())
        .filter(|_| !rest.is_empty())
}

/// Whether all of `glyphs` is the beginning of a title's words.
fn begins_title(glyphs: &[Glyph], words: &str) -> bool {
    let mut rest = glyphs;
    for (count, word) in words.split(' ').enumerate() {
        let gap = rest.iter().take_while(|glyph| is_gap(glyph)).count();
        rest = rest.get(gap * usize::from(count > 0)..).unwrap_or_default();
        let mut letters = rest.iter().zip(word.chars());
        if !letters.all(|(glyph, letter)| glyph.ch.to_ascii_uppercase() == letter) {
            return false;
        }
        rest = rest.get(word.len()..).unwrap_or_default();
    }
    rest.is_empty()
}

/// A single switch on the GPUs' own board, as old drivers name it; as near as `PIX`.
const SAME_BOARD: &str = "PSB";

/// The link cell that begins at `start`, and where it ends.
pub(super) fn link_at(glyphs: &[Glyph], start: usize) -> Option<(Link, usize)> {
    let begins = |word: &str| {
        word.chars()
            .eq(glyphs.iter().skip(start).map(|glyph| glyph.ch).take(word.len()))
    };
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

/// Whether the word at `start` is made of link cells and nothing else.
pub(super) fn is_links(glyphs: &[Glyph], start: usize) -> bool {
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

/// Whether the word at `start` is what a break within or between link cells leaves: the end of a link, links, or both.
pub(super) fn goes_on_with_links(glyphs: &[Glyph], start: usize) -> bool {
    let word = word_at(glyphs, start);
    let ends_a_link = |head: &str| {
        let count = head.strip_prefix('V').unwrap_or(head);
        let ends_a_count =
            !head.is_empty() && count.len() <= 2 && count.chars().all(|ch| ch.is_ascii_digit());
        let mut classes = PathClass::ALL.iter().map(|class| class.as_str());
        let ends_a_class = SAME_BOARD.ends_with(head) || classes.any(|class| class.ends_with(head));
        ends_a_count || ends_a_class
    };
    let ends = word.char_indices().map(|(at, _)| at).chain([word.len()]);
    ends.enumerate()
        .filter_map(|(count, at)| word.get(..at).map(|head| (count, head)))
        .take_while(|(_, head)| head.len() <= "NODE".len())
        .any(|(count, head)| ends_a_link(head) && (head == word || is_links(glyphs, start + count)))
        && !word.is_empty()
}

/// How nvidia-smi's messages begin where it prints no matrix: the driver does not answer, is not the library's, or has no GPU.
const FAILURES: [&str; 4] = [
    "NVIDIA-SMI has failed",
    "Failed to initialize NVML",
    "Unable to determine the device handle",
    "No devices were found",
];

/// What shells and container runtimes say of a program that is not there.
const NOT_THERE: [&str; 4] = [
    "command not found",
    ": not found",
    "executable file not found",
    "is not recognized",
];

/// Whether a line is what is said where nvidia-smi fails, or is not there.
pub(crate) fn is_failure(line: &str) -> bool {
    let not_there = line.contains("nvidia-smi") && NOT_THERE.iter().any(|said| line.contains(said));
    not_there || FAILURES.iter().any(|failure| line.starts_with(failure))
}

/// The number of a `GPU#` or `NIC#` at the start of a word, and the length of the whole.
pub(super) fn numbered(word: &str, prefix: &str) -> Option<(usize, usize)> {
    let digits: String = word
        .strip_prefix(prefix)?
        .chars()
        .take_while(char::is_ascii_digit)
        .take(6)
        .collect();
    let number = digits.parse().ok()?;
    let canonical = digits.len() == 1 || !digits.starts_with('0');
    canonical.then_some((number, prefix.len() + digits.len()))
}

/// Whether a name is that of an NVMe disk, which `nvidia-smi topo -nvme` adds to the matrix: `NVMe0`.
pub(super) fn is_disk(name: &str) -> bool {
    numbered(name, "NVMe").is_some_and(|(_, length)| length == name.len())
}

/// How many characters of a header word, which may be several names glued, belong to its first device name.
pub(super) fn device_length(word: &str) -> usize {
    if let Some((_, length)) = numbered(word, "GPU").or_else(|| numbered(word, "NIC")) {
        return length;
    }
    mellanox_length(word)
        .filter(|length| {
            word.get(*length..)
                .is_some_and(|rest| mellanox_length(rest).is_some())
        })
        .unwrap_or(word.chars().count())
}

/// The length of `mlx5_7` and the like at the start of a word: names that are known to come glued.
fn mellanox_length(word: &str) -> Option<usize> {
    let rest = word
        .strip_prefix("mlx4_")
        .or_else(|| word.strip_prefix("mlx5_"))?;
    let digits = rest.chars().take_while(char::is_ascii_digit).count();
    (digits > 0).then_some("mlx5_".len() + digits)
}

/// Words of titles, which head no NIC's column.
const TITLE_WORDS: [&str; 5] = ["affinity", "cpu", "numa", "memory", "id"];

/// Whether a word can head a NIC's column: a device name, and nothing that a reader would take for something else.
pub(super) fn is_nic_name(name: &str) -> bool {
    let glyphs: Vec<Glyph> = name
        .chars()
        .map(|ch| Glyph {
            ch,
            line: 1,
            column: 1,
            visual: 0,
        })
        .collect();
    let plain = name.starts_with(|ch: char| ch.is_ascii_alphabetic())
        && name.len() <= 64
        && name
            .chars()
            .all(|ch| ch.is_ascii_alphanumeric() || "_-.@".contains(ch));
    plain
        && !name.starts_with("GPU")
        && !TITLE_WORDS.contains(&name.to_ascii_lowercase().as_str())
        && device_length(name) == name.len()
        && !(0..glyphs.len()).any(|at| title_at(&glyphs, at).is_some())
        && !is_links(&glyphs, 0)
}
