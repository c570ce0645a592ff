//! What may follow the matrix: the legend of the link names, which says nothing new, and the legend of the NICs, which names the
//! device behind each `NIC#` column; and the matrix of `nvidia-smi topo -p2p`, which is of no interest here. Anything else is refused.

use super::around::is_frame;
use super::error::{TopoError, TopoProblem};
use super::glyphs::{Glyph, Line};
use super::header::Header;
use super::parse::{is_header, is_row};
use super::row;

/// Which legend a line stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Links,
    Nics,
}

/// Whether a line is the heading of a legend.
pub(super) fn is_heading(text: &str) -> bool {
    heading(text).is_some()
}

fn heading(text: &str) -> Option<Part> {
    match text.to_ascii_lowercase().as_str() {
        "legend:" => Some(Part::Links),
        "nic legend:" => Some(Part::Nics),
        _ => None,
    }
}

/// Reads the lines behind the matrix and gives the device of each NIC. `more_nics`: a notice says that the matrix does not show
/// every NIC, so the legend may name others.
pub(super) fn read(
    lines: &[Line],
    end: Glyph,
    header: &Header,
    more_nics: bool,
) -> Result<Vec<Option<String>>, TopoError> {
    let names = header.names.get(header.gpus..).unwrap_or_default();
    let mut devices: Vec<Option<String>> = vec![None; names.len()];
    let mut part = None;
    let mut nics_explained = false;
    // What the line above ended in, if an entry of the links' legend stands there.
    let mut entry_end: Option<String> = None;
    let mut peer_to_peer = 0;
    for (at, line) in lines.iter().enumerate() {
        let text = line.text();
        if peer_to_peer == 0 {
            peer_to_peer = peer_to_peer_lines(lines.get(at..).unwrap_or_default(), header.gpus);
        }
        if peer_to_peer > 0 {
            peer_to_peer -= 1;
            part = Some(Part::Links);
            entry_end = None;
            continue;
        }
        let entry = nic_entry(&text).filter(|_| part == Some(Part::Nics));
        let known = entry.and_then(|(name, _)| names.iter().position(|known| known == name));
        if let (Some(index), Some((name, device))) = (known, entry) {
            match devices.get_mut(index) {
                Some(slot @ None) => *slot = Some(device.to_owned()),
                _ => {
                    let name = name.to_owned();
                    return Err(line.refuse_at_start(TopoProblem::LegendTwice { name }));
                }
            }
        } else if part == Some(Part::Links)
            && !text.is_empty()
            && entry_end
                .as_deref()
                .is_some_and(|above| continues_entry(above, &text))
        {
            // An entry broken by the terminal, maybe right before a #.
            entry_end = Some(last_piece(&text).to_owned());
        } else if is_frame(&text) || text.starts_with('#') || text.starts_with("WARNING: infoROM") {
            entry_end = None;
        } else if let Some(next) = heading(&text) {
            nics_explained |= next == Part::Nics;
            part = Some(next);
            entry_end = None;
        } else if part != Some(Part::Nics) && is_link_entry(&text) {
            entry_end = Some(last_piece(&text).to_owned());
        } else if let Some((name, _)) = entry {
            if !more_nics {
                let name = name.to_owned();
                return Err(line.refuse_at_start(TopoProblem::LegendUnknown { name }));
            }
        } else {
            return Err(line.refuse_at_start(not_expected(header, line, &text)));
        }
    }
    let unexplained = names.iter().zip(&devices).find(|(_, device)| device.is_none());
    match unexplained {
        Some((name, _)) if nics_explained => Err(end.refuse(TopoProblem::LegendCut { name: name.clone() })),
        _ => Ok(devices),
    }
}

/// How many lines from here on are the peer-to-peer matrix of `gpus` GPUs; 0 if none begins here.
fn peer_to_peer_lines(lines: &[Line], gpus: usize) -> usize {
    let is_matrix = |lines: &[Line]| {
        let [header, rows @ ..] = lines else { return false };
        let names = |line: &Line| line.text().split(' ').map(str::to_owned).collect::<Vec<_>>();
        let due: Vec<String> = (0..gpus).map(|gpu| format!("GPU{gpu}")).collect();
        names(header) == due
            && rows.iter().zip(&due).enumerate().all(|(gpu, (line, name))| {
                let words = names(line);
                let [label, cells @ ..] = words.as_slice() else {
                    return false;
                };
                let fits = |(peer, cell): (usize, &String)| match peer == gpu {
                    true => cell == "X",
                    false => row::PEER_TO_PEER.contains(&cell.as_str()),
                };
                label == name && cells.len() == gpus && cells.iter().enumerate().all(fits)
            })
    };
    lines
        .get(..=gpus)
        .filter(|lines| gpus > 1 && is_matrix(lines))
        .map_or(0, <[Line]>::len)
}

fn not_expected(header: &Header, line: &Line, text: &str) -> TopoProblem {
    let word = text.split_whitespace().next().unwrap_or_default().to_owned();
    if is_header(line) {
        return TopoProblem::SecondMatrix;
    }
    if header.names.contains(&word) && line.glyphs.iter().any(|glyph| glyph.is_blank()) {
        return TopoProblem::DuplicateRow { row: word };
    }
    if is_row(line) {
        return TopoProblem::RowWithoutColumn { row: word };
    }
    let found: String = text.chars().take(40).collect();
    TopoProblem::Unexpected { found }
}

/// `SYS = Connection traversing ...`: a name of a link, as any driver may know it, and a meaning.
fn is_link_entry(text: &str) -> bool {
    text.split_once('=').is_some_and(|(name, _)| {
        let name = name.trim();
        (1..=5).contains(&name.len())
            && name
                .chars()
                .all(|ch| ch.is_ascii_uppercase() || ch.is_ascii_digit() || ch == '#')
    })
}

/// Words of the legend: a line of nothing else goes on with the entry above it.
const VOCABULARY: &[&str] = &[
    "a",
    "an",
    "and",
    "as",
    "at",
    "between",
    "bonded",
    "bridge",
    "bridges",
    "bus",
    "connection",
    "cpu",
    "e.g",
    "eg",
    "host",
    "interconnect",
    "internal",
    "is",
    "level",
    "link",
    "most",
    "multiple",
    "node",
    "nodes",
    "numa",
    "nvlinks",
    "of",
    "path",
    "pcie",
    "qpi",
    "set",
    "single",
    "smp",
    "socket",
    "sockets",
    "switch",
    "switches",
    "the",
    "traverses",
    "traversing",
    "typically",
    "upi",
    "well",
    "within",
    "without",
];

/// Whether a line goes on with the entry above it, which ends in `above`. The break may lie within a word, at either end.
fn continues_entry(above: &str, text: &str) -> bool {
    let mut pieces = pieces(text).peekable();
    let mut first = true;
    while let Some(piece) = pieces.next() {
        let whole = is_vocabulary(piece);
        let ends_a_word = first && is_vocabulary(&format!("{above}{piece}"));
        let begins_a_word = pieces.peek().is_none() && begins_vocabulary(piece);
        if !(whole || ends_a_word || begins_a_word) {
            return false;
        }
        first = false;
    }
    true
}

/// A line cut at everything that is no part of a word; some pieces are empty.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    text.split(|ch: char| ch.is_whitespace() || "(),/#-:".contains(ch))
}

fn last_piece(text: &str) -> &str {
    pieces(text).last().unwrap_or_default()
}

fn is_vocabulary(word: &str) -> bool {
    let word = word.trim_matches('.').to_ascii_lowercase();
    word.is_empty() || VOCABULARY.contains(&word.as_str())
}

fn begins_vocabulary(word: &str) -> bool {
    let word = word.trim_matches('.').to_ascii_lowercase();
    VOCABULARY.iter().any(|known| known.starts_with(&word))
}

/// `NIC0: mlx5_0`.
fn nic_entry(text: &str) -> Option<(&str, &str)> {
    let (name, device) = text.split_once(':')?;
    let device = device.trim();
    (!device.is_empty() && device.len() <= 128 && !name.contains(' ')).then_some((name, device))
}
