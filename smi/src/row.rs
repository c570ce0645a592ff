//! One row of the matrix: a label, a link to every device, and for GPUs the values behind. Checked is what a row shows
//! by itself; the parser compares the rows. Cells may be glued: no link is the beginning of another, so glued links have
//! a single reading.

use gantry_topology::machine::MAX_LINKS_PER_GPU;
use gantry_topology::{Link, PathClass};

use crate::error::{TopoError, TopoProblem};
use crate::header::Header;
use crate::scan::{Glyph, Line, skip_blanks, word_at};
use crate::values::{self, Layout, Values};

/// A single switch on the GPUs' own board, in the output of old drivers; the same distance as `PIX`.
const SAME_BOARD: &str = "PSB";

/// The link cell that begins at `start`, and its end.
fn link_at(glyphs: &[Glyph], start: usize) -> Option<(Link, usize)> {
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

/// A parsed row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) links: Vec<Link>,
    /// The place of each link.
    pub(crate) places: Vec<Glyph>,
    pub(crate) values: Values,
    pub(crate) label: Glyph,
    /// The blank behind the row.
    pub(crate) end: Glyph,
    /// Whether a line end follows.
    pub(crate) terminated: bool,
}

/// The start of the cells if the label at `start` is `name`. A first cell may be glued to it.
pub(crate) fn after_label(glyphs: &[Glyph], start: usize, name: &str) -> Option<usize> {
    let length = name.chars().count();
    let label = glyphs.iter().skip(start).map(|glyph| glyph.ch).take(length);
    let end = start + length;
    let ends = || glyphs.get(end).is_none_or(|glyph| glyph.is_blank()) || is_links(glyphs, end);
    (name.chars().eq(label) && ends()).then_some(end)
}

/// Whether a line has the form of a row: a label, then links.
pub(crate) fn is_row(line: &Line) -> bool {
    let start = skip_blanks(&line.glyphs, 0);
    let label = word_at(&line.glyphs, start);
    is_links(&line.glyphs, skip_blanks(&line.glyphs, start + label.chars().count()))
}

impl Row {
    /// Reads the cells of device `device` from `start` on.
    pub(crate) fn read(header: &Header, device: usize, line: &Line, start: usize) -> Result<Self, TopoError> {
        let (glyphs, end) = (line.glyphs.as_slice(), line.end);
        let name = |index: usize| header.names.get(index).cloned().unwrap_or_default();
        let needed = header.names.len();
        let mut links = Vec::with_capacity(needed);
        let mut places = Vec::with_capacity(needed);
        let mut at = start;
        while links.len() < needed {
            let column = links.len();
            at = skip_blanks(glyphs, at);
            let Some(place) = glyphs.get(at).copied() else {
                return Err(end.refuse(cut(name(device), column, needed)));
            };
            let Some((link, after)) = link_at(glyphs, at) else {
                return Err(if place.ch.is_ascii_digit() {
                    place.refuse(cut(name(device), column, needed))
                } else {
                    unknown_link(glyphs, at, place)
                });
            };
            let found = link.to_string();
            if (link == Link::Itself) != (column == device) {
                let (row, column) = (name(device), name(column));
                return Err(place.refuse(TopoProblem::Diagonal { found, row, column }));
            }
            if matches!(link, Link::NvLink(_)) && column.max(device) >= header.gpus {
                let (row, column) = (name(device), name(column));
                return Err(place.refuse(TopoProblem::NvLinkToNic { found, row, column }));
            }
            links.push(link);
            places.push(place);
            at = after;
        }
        check_behind_links(header, device, glyphs, at, links.last().copied())?;
        let label = glyphs.get(skip_blanks(glyphs, 0)).copied().unwrap_or(end);
        let layout = Layout::of_links(label, &places, glyphs.get(..at).unwrap_or_default());
        Ok(Self {
            values: values::read(&header.titles, glyphs, at, &layout)?,
            links,
            places,
            label,
            end,
            terminated: line.terminated,
        })
    }
}

fn cut(row: String, found: usize, needed: usize) -> TopoProblem {
    TopoProblem::CutRow { row, found, needed }
}

/// Refuses links or values behind the last link, at `at`, for which the header has no column, and a link that goes on.
fn check_behind_links(
    header: &Header,
    device: usize,
    glyphs: &[Glyph],
    at: usize,
    last: Option<Link>,
) -> Result<(), TopoError> {
    let first = skip_blanks(glyphs, at);
    let Some(place) = glyphs.get(first).copied() else {
        return Ok(());
    };
    let surplus = if link_at(glyphs, first).is_some() || device >= header.gpus {
        Some((place, word_at(glyphs, first)))
    } else if first == at && (matches!(last, Some(Link::NvLink(_))) || !values::begins_value(glyphs, first)) {
        // "NV12" and "NV1" with a lost tab before "2" look alike. Behind a class name a digit begins a value.
        return Err(unknown_link(glyphs, first, place));
    } else {
        values::surplus(header.titles.len(), glyphs, at)
    };
    match surplus {
        None => Ok(()),
        Some((place, found)) => Err(place.refuse(TopoProblem::TooManyCells {
            row: header.names.get(device).cloned().unwrap_or_default(),
            found,
            columns: header.names.len() + header.titles.len(),
        })),
    }
}

/// Refuses a whole word, even if its beginning was read as a link.
fn unknown_link(glyphs: &[Glyph], at: usize, place: Glyph) -> TopoError {
    let before = glyphs.get(..at).unwrap_or_default();
    let blank = before.iter().rposition(|glyph| glyph.is_blank());
    let begin = blank.map_or(0, |blank| blank + 1);
    let found = word_at(glyphs, begin);
    let place = glyphs.get(begin).copied().unwrap_or(place);
    place.refuse(TopoProblem::UnknownLink { found })
}
