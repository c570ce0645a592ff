//! What may follow the matrix: the legend of the link names, which says nothing new, and the legend of the NICs, which names the
//! device behind each `NIC#` column; and what is of no interest here: the matrix of `nvidia-smi topo -p2p`, and words of people
//! and other programs. What may be a part of the matrix, or another one, is refused.

use super::around::is_frame;
use super::error::{TopoError, TopoProblem};
use super::glyphs::{Glyph, Line, skip_blanks};
use super::header::Header;
use super::parse::{begins_first_row, is_header, is_row_of_some, may_name_a_gpu};
use super::row;
use super::words::{is_disk, is_links, numbered};

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
    let lines = without_other_matrices(lines, header);
    for (at, line) in lines.iter().copied().enumerate() {
        let below = lines.get(at + 1..).unwrap_or_default();
        let text = line.text();
        let above = entry_end.take();
        if part == Some(Part::Nics)
            && let entries = nic_entries(&text)
            && entries
                .iter()
                .any(|(name, _)| names.contains(name) || !is_frame(&text) && are_lacking(&devices, name))
        {
            check_not_cut(line, &entries, names, &devices)?;
            for (name, device) in entries {
                match names
                    .iter()
                    .position(|known| *known == name)
                    .and_then(|at| devices.get_mut(at))
                {
                    Some(slot @ None) => *slot = Some(device),
                    Some(_) => return Err(line.refuse_at_start(TopoProblem::LegendTwice { name })),
                    None if more_nics => {}
                    None => return Err(line.refuse_at_start(TopoProblem::LegendUnknown { name })),
                }
            }
        } else if part == Some(Part::Links)
            && !text.is_empty()
            && above.is_some_and(|above| continues_entry(&above, &text))
        {
            // An entry broken by the terminal, maybe right before a #.
            entry_end = Some(last_piece(&text).to_owned());
        } else if is_frame(&text) || text.starts_with('#') {
            // Nothing of interest.
        } else if let Some(next) = heading(&text) {
            nics_explained |= next == Part::Nics;
            part = Some(next);
        } else if part != Some(Part::Nics) && is_link_entry(&text) {
            entry_end = Some(last_piece(&text).to_owned());
        } else if let Some(problem) = of_a_matrix(header, line, &text, below) {
            return Err(line.refuse_at_start(problem));
        } else {
            part = None;
        }
    }
    let mut unexplained = names
        .iter()
        .zip(&devices)
        .filter(|(name, device)| device.is_none() && !is_disk(name));
    match unexplained.next() {
        Some((name, _)) if nics_explained => Err(end.refuse(TopoProblem::LegendCut { name: name.clone() })),
        _ => Ok(devices),
    }
}

/// Whether a name that heads no column may be one of the legend all the same: NICs are lacking yet, or it is called like one.
fn are_lacking(devices: &[Option<String>], name: &str) -> bool {
    numbered(name, "NIC").is_some() || devices.iter().any(Option::is_none)
}

/// Refuses a device that may be the beginning of another, where the text ends in it with nothing to say that it is whole: one that
/// another NIC has, one that lacks the form of the others, or a lone one without a number.
fn check_not_cut(
    line: &Line,
    entries: &[(String, String)],
    names: &[String],
    devices: &[Option<String>],
) -> Result<(), TopoError> {
    let ends_in_blank = line.glyphs.last().is_none_or(|glyph| glyph.is_blank());
    let Some(((name, found), above)) = entries
        .split_last()
        .filter(|_| !line.terminated && !ends_in_blank)
    else {
        return Ok(());
    };
    let earlier = names.iter().zip(devices);
    let earlier = earlier.filter_map(|(name, device)| device.as_ref().map(|device| (name, device)));
    let others: Vec<(&String, &String)> = earlier
        .chain(above.iter().map(|(name, device)| (name, device)))
        .filter(|(other, _)| *other != name)
        .collect();
    let own = form(found);
    let is_formed = others.iter().any(|(_, device)| form(device) == own);
    let ends_in_digit = |device: &str| device.ends_with(|ch: char| ch.is_ascii_digit());
    let lacks_number = !ends_in_digit(found) && others.iter().all(|(_, device)| ends_in_digit(device));
    let may_go_on_like =
        |device: &str| device == found || !is_formed && (lacks_number || form(device).starts_with(&own));
    // Kernels number NICs; nothing else can be said of a device without another to hold it against.
    if others.is_empty() && !ends_in_digit(found) {
        let (name, found) = (name.clone(), found.clone());
        return Err(line.refuse_at_start(TopoProblem::LegendCutWithin { name, found }));
    }
    match others.into_iter().find(|(_, device)| may_go_on_like(device)) {
        Some((other, like)) => Err(line.refuse_at_start(TopoProblem::LegendCutDevice {
            name: name.clone(),
            found: found.clone(),
            other: other.clone(),
            like: like.clone(),
        })),
        None => Ok(()),
    }
}

/// A device's name, or a list, with a `#` for every number: `mlx5_10` and `mlx5_2` have one form.
pub(super) fn form(device: &str) -> String {
    let mut form = String::with_capacity(device.len());
    for ch in device.chars() {
        match ch {
            '0'..='9' if form.ends_with('#') => {}
            '0'..='9' => form.push('#'),
            ch => form.push(ch),
        }
    }
    form
}

/// The lines without the other matrices that nvidia-smi may have printed too: of peer-to-peer capabilities, of disks.
fn without_other_matrices<'l>(lines: &'l [Line], header: &Header) -> Vec<&'l Line> {
    let mut left = Vec::with_capacity(lines.len());
    let mut rest = lines;
    // Without NICs and values one GPU's matrix is the same as its peer-to-peer matrix.
    let told_apart = header.gpus > 1 || header.names.len() > 1 || !header.columns.is_empty();
    while let [line, below @ ..] = rest {
        let peers = peer_to_peer_lines(rest, header.gpus) * usize::from(told_apart);
        let others = peers.max(disk_lines(rest, header));
        rest = if others == 0 {
            left.push(line);
            below
        } else {
            rest.get(others..).unwrap_or_default()
        };
    }
    left
}

/// How many lines from here on are a matrix of disks, which `nvidia-smi topo -nvme` prints; 0 if none begins here.
fn disk_lines(lines: &[Line], header: &Header) -> usize {
    let names_disks = |line: &Line| line.text().split(' ').all(is_disk);
    let is_row = |line: &&Line| {
        let text = line.text();
        let label = text.split(' ').next().unwrap_or_default();
        is_disk(label) || header.names.iter().any(|name| name == label)
    };
    match lines {
        [titles, rows @ ..] if names_disks(titles) => 1 + rows.iter().take_while(is_row).count(),
        _ => 0,
    }
}

/// How many lines from here on are the peer-to-peer matrix of `gpus` GPUs; 0 if none begins here.
pub(super) fn peer_to_peer_lines(lines: &[Line], gpus: usize) -> usize {
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
        .filter(|lines| gpus > 0 && is_matrix(lines))
        .map_or(0, <[Line]>::len)
}

/// Why a line must not be passed over: it is a part of a matrix, this one or another.
fn of_a_matrix(header: &Header, line: &Line, text: &str, below: &[&Line]) -> Option<TopoProblem> {
    let row = text.split(' ').next().unwrap_or_default().to_owned();
    let mut below = below.iter().filter(|line| line.first().is_some());
    if is_header(line) && (!may_name_a_gpu(line) || below.next().is_some_and(|line| begins_first_row(line))) {
        return Some(TopoProblem::SecondMatrix);
    }
    let glyphs = &line.glyphs;
    let start = skip_blanks(glyphs, 0);
    let cells = skip_blanks(glyphs, start + row.chars().count());
    if header.names.contains(&row) && is_links(glyphs, cells) {
        return Some(TopoProblem::DuplicateRow { row });
    }
    is_row_of_some(line).then_some(TopoProblem::RowWithoutColumn { row })
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

/// `NIC0: mlx5_0`, perhaps with the next one behind it.
fn nic_entries(text: &str) -> Vec<(String, String)> {
    let mut entries: Vec<(String, String)> = Vec::new();
    for word in text.split(' ') {
        let name = word.strip_suffix(':').filter(|name| !name.contains(':'));
        match (name, entries.last_mut()) {
            (Some(name), last) if last.is_none() || numbered(name, "NIC").is_some() => {
                entries.push((name.to_owned(), String::new()));
            }
            (_, Some((_, device))) => {
                if !device.is_empty() {
                    device.push(' ');
                }
                device.push_str(word);
            }
            (_, None) => return Vec::new(),
        }
    }
    let whole = |(_, device): &(String, String)| !device.is_empty() && device.len() <= 128;
    if entries.iter().all(whole) {
        entries
    } else {
        Vec::new()
    }
}
