//! One row of the matrix: a label, a link to every device, and for GPUs the values behind. Checks what a row can be checked for
//! by itself; whether rows agree with each other is the parser's business.

use super::error::{TopoError, TopoProblem};
use super::foreign;
use super::glyphs::{Glyph, skip_blanks, word_at};
use super::header::Header;
use super::values::{self, Layout, Values};
use super::words::{is_links, link_at};
use crate::machine::Link;

/// A row that was read.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) links: Vec<Link>,
    /// Where each link stands.
    pub(super) places: Vec<Glyph>,
    pub(super) values: Values,
    /// Where the label stands.
    pub(super) label: Glyph,
    /// The blank behind the row.
    pub(super) end: Glyph,
    /// Whether a line end follows.
    pub(super) terminated: bool,
}

/// Where the cells begin if the label at `start` is `name`; a first cell may be glued to it.
pub(super) fn after_label(glyphs: &[Glyph], start: usize, name: &str) -> Option<usize> {
    let length = name.chars().count();
    let labelled = name
        .chars()
        .eq(glyphs.iter().skip(start).map(|glyph| glyph.ch).take(length));
    let end = start + length;
    let free = glyphs.get(end).is_none_or(|glyph| glyph.is_blank());
    (labelled && (free || is_links(glyphs, end))).then_some(end)
}

/// Reads the cells of device `device` from `start` on. `end` is the blank behind the last of `glyphs`.
pub(super) fn read(
    header: &Header,
    device: usize,
    glyphs: &[Glyph],
    start: usize,
    end: Glyph,
) -> Result<Row, TopoError> {
    let name = |index: usize| header.names.get(index).cloned().unwrap_or_default();
    let needed = header.names.len();
    let mut links = Vec::with_capacity(needed);
    let mut places = Vec::with_capacity(needed);
    let mut at = start;
    while links.len() < needed {
        let column = links.len();
        at = skip_blanks(glyphs, at);
        let place = glyphs.get(at).copied().unwrap_or(end);
        let Some((link, after)) = link_at(glyphs, at) else {
            if let Some(refused) = of_another_vendor(glyphs, at) {
                return Err(refused);
            }
            let is_value = values::begins_value(glyphs, at) && !stands_for_link(header, glyphs, at);
            if at >= glyphs.len() || is_value {
                let (row, found) = (name(device), column);
                return Err(place.refuse(TopoProblem::CutRow { row, found, needed }));
            }
            return Err(unknown_link(glyphs, at, place));
        };
        if (link == Link::Itself) != (column == device) {
            return Err(place.refuse(TopoProblem::Diagonal {
                found: link.to_string(),
                row: name(device),
                column: name(column),
            }));
        }
        if matches!(link, Link::NvLink(_)) && column.max(device) >= header.gpus {
            return Err(place.refuse(TopoProblem::NvLinkToNic {
                found: link.to_string(),
                row: name(device),
                column: name(column),
            }));
        }
        links.push(link);
        places.push(place);
        at = after;
    }
    let label = glyphs.get(skip_blanks(glyphs, 0)).copied().unwrap_or(end);
    let single_tabs = glyphs.get(..at).is_some_and(has_single_tabs);
    let layout = layout(header, label, &places, single_tabs);
    let values = read_values(header, device, glyphs, at, links.last().copied(), &layout)?;
    Ok(Row {
        links,
        places,
        values,
        label,
        end,
        terminated: true,
    })
}

/// How a row is laid out, by where its links stand. nvidia-smi ends every cell with a tab; a whole text may be indented after its
/// tabs became blanks. ` X ` begins with a blank.
fn layout(header: &Header, label: Glyph, places: &[Glyph], single_tabs: bool) -> Layout {
    let stands_at = |place: &Glyph, from: usize| place.visual == from || place.visual == from + 1;
    let on_tab_stops = |indent: &usize| {
        let stops = (1..).map(|cell: usize| indent + 8 * cell);
        places
            .iter()
            .zip(stops)
            .all(|(place, stop)| stands_at(place, stop))
    };
    let mut indents = vec![0, label.visual];
    indents.dedup();
    indents.retain(on_tab_stops);
    Layout {
        indents,
        below_titles: places
            .iter()
            .zip(&header.places)
            .all(|(place, from)| stands_at(place, *from)),
        single_tabs,
    }
}

/// Whether no two tabs stand between two of the words. Those before the first indent the line.
fn has_single_tabs(glyphs: &[Glyph]) -> bool {
    let gaps = glyphs.split(|glyph| !glyph.is_blank()).skip(1);
    let tabs = |gap: &[Glyph]| gap.iter().filter(|glyph| glyph.ch == '\t').count();
    gaps.map(tabs).all(|tabs| tabs < 2)
}

fn read_values(
    header: &Header,
    device: usize,
    glyphs: &[Glyph],
    at: usize,
    last: Option<Link>,
    layout: &Layout,
) -> Result<Values, TopoError> {
    let too_many = |place: Glyph, found: String| {
        place.refuse(TopoProblem::TooManyCells {
            row: header.names.get(device).cloned().unwrap_or_default(),
            found,
            columns: header.names.len() + header.columns.len(),
        })
    };
    let first = skip_blanks(glyphs, at);
    if let Some(place) = glyphs.get(first).copied() {
        let glued = first == at;
        // "NV12" behind "NV1" and a lost tab cannot be told apart; behind a class name a digit begins a value.
        let unclear =
            glued && (matches!(last, Some(Link::NvLink(_))) || !values::begins_value(glyphs, first));
        if link_at(glyphs, first).is_some() || device >= header.gpus {
            return Err(too_many(place, word_at(glyphs, first)));
        }
        if unclear {
            return Err(unknown_link(glyphs, first, place));
        }
    }
    let links_end = at.checked_sub(1).and_then(|index| glyphs.get(index));
    let links_end = links_end.map_or(0, |glyph| glyph.visual + 1);
    if let Some((place, found)) = values::surplus(&header.columns, glyphs, at) {
        return Err(too_many(place, found));
    }
    values::read(&header.columns, glyphs, at, links_end, layout)
}

/// Whether the `N/A` at `at` stands where a link belongs: a link follows, or more words than there are columns for values.
fn stands_for_link(header: &Header, glyphs: &[Glyph], at: usize) -> bool {
    let mut words = 0;
    let mut only_unknown = true;
    let mut at = at;
    while at < glyphs.len() {
        let word = word_at(glyphs, at);
        only_unknown &= word.eq_ignore_ascii_case("N/A");
        if !only_unknown && (words == 0 || link_at(glyphs, at).is_some()) {
            return words > 0;
        }
        words += 1;
        at = skip_blanks(glyphs, at + word.chars().count());
    }
    words > header.columns.len()
}

/// Words of the peer-to-peer matrix, which looks much like this one.
pub(super) const PEER_TO_PEER: [&str; 8] = ["OK", "NS", "CNS", "GNS", "TNS", "DR", "U", "PCI_NS"];

/// Why a row is refused in which another vendor's link stands from `start` on.
fn of_another_vendor(glyphs: &[Glyph], start: usize) -> Option<TopoError> {
    let mut at = skip_blanks(glyphs, start);
    while let Some(place) = glyphs.get(at) {
        let found = word_at(glyphs, at);
        if let Some(tool) = foreign::link(&found) {
            return Some(place.refuse(TopoProblem::ForeignMatrix { found, tool }));
        }
        at = skip_blanks(glyphs, at + found.chars().count());
    }
    None
}

/// Refuses a word, whole also where its beginning was read as a link.
fn unknown_link(glyphs: &[Glyph], at: usize, place: Glyph) -> TopoError {
    let begin = (0..at)
        .rev()
        .find(|index| glyphs.get(*index).is_some_and(|glyph| glyph.is_blank()))
        .map_or(0, |blank| blank + 1);
    let found = word_at(glyphs, begin);
    let place = glyphs.get(begin).copied().unwrap_or(place);
    if PEER_TO_PEER.contains(&found.as_str()) {
        return place.refuse(TopoProblem::PeerToPeerMatrix { found });
    }
    place.refuse(TopoProblem::UnknownLink { found })
}
