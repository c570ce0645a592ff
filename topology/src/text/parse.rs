//! The reader of a whole topology text: what stands before the matrix, header, rows, what stands behind. It holds the rows
//! against each other and refuses what is cut or contradicts itself; it infers nothing.

use super::around::{drop_closing_marks, drop_prompt, is_boundary};
use super::check::check;
use super::error::{TopoError, TopoProblem};
use super::foreign::printed_by;
use super::glyphs::{Glyph, Line, lines, skip_blanks, word_at};
use super::header::Header;
use super::legend;
use super::preamble;
use super::row::{self, Row, after_label};
use super::table;
use super::words::{Title, goes_on_with_links, is_disk, is_failure, is_links, numbered};
use super::{GpuLine, MAX_TEXT_BYTES, NicLine, TopoText, values};
use crate::machine::Link;

/// Reads a topology text.
pub(super) fn parse(text: &str) -> Result<TopoText, TopoError> {
    if text.len() > MAX_TEXT_BYTES {
        let (bytes, limit) = (text.len(), MAX_TEXT_BYTES);
        return Err(TopoError {
            line: 1,
            column: 1,
            problem: TopoProblem::TooLong { bytes, limit },
        });
    }
    let mut lines = table::lay_out(lines(text));
    drop_closing_marks(&mut lines);
    drop_prompt(&mut lines);
    let (preamble, at) = preamble::read(&lines);
    let mut reader = Reader { lines: &lines, at };
    let header = reader.read_header()?;
    let nics = header
        .names
        .iter()
        .skip(header.gpus)
        .filter(|name| !is_disk(name))
        .count();
    if let Some((_, shown, place)) = preamble.nics_found
        && shown != nics
    {
        let problem = TopoProblem::NicCount { shown, columns: nics };
        return Err(place.refuse(problem));
    }
    let mut rows = reader.read_rows(&header)?;
    if let Some(next) = reader.rest().first() {
        refuse_next_row(&header, next)?;
    }
    if let (Some(next), Some(last)) = (reader.rest().first(), rows.last_mut()) {
        // Words right behind the last row, such as a prompt with a command, may have come in the place of its end.
        last.terminated &= is_boundary(next);
    }
    check(&header, &rows)?;
    if let Some(cut) = header.cut {
        rows.iter_mut().for_each(|row| forget_cut_value(row, cut));
    }
    let legend = [preamble.legend.as_slice(), reader.rest()].concat();
    let devices = legend::read(&legend, reader.end(), &header, preamble.nics_found.is_some())?;
    let gpus = rows
        .iter()
        .take(header.gpus)
        .map(|row| {
            let value = |title| row.values.get(&header.columns, title);
            Ok(GpuLine {
                cpus: value(Title::Cpus)?,
                numa: value(Title::Numa)?,
                memory_numa: value(Title::MemoryNuma)?,
            })
        })
        .collect::<Result<_, TopoError>>()?;
    // Disks are no business of ours.
    let is_ours: Vec<bool> = header.names.iter().map(|name| !is_disk(name)).collect();
    let ours = |links: Vec<Link>| links.into_iter().zip(&is_ours).filter(|(_, ours)| **ours);
    let links = rows.into_iter().zip(&is_ours).filter(|(_, ours)| **ours);
    let links = links.map(|(row, _)| ours(row.links).map(|(link, _)| link).collect());
    let links = links.collect();
    let nics = header.names.into_iter().skip(header.gpus).zip(devices);
    let nics = nics.filter(|(name, _)| !is_disk(name));
    Ok(TopoText {
        description: preamble.description,
        nics_found: preamble.nics_found.map(|(found, _, _)| found),
        gpus,
        nics: nics.map(|(name, device)| NicLine { name, device }).collect(),
        links,
    })
}

/// Refuses the line right behind the last row if it begins with the device that would be the next: its column, and the end of this row,
/// were clipped.
fn refuse_next_row(header: &Header, next: &Line) -> Result<(), TopoError> {
    let row = word_at(&next.glyphs, skip_blanks(&next.glyphs, 0));
    let due = match header.names.len() - header.gpus {
        0 => [format!("GPU{}", header.gpus), "NIC0".to_owned()],
        nics => [format!("NIC{nics}"), String::new()],
    };
    if !row.is_empty() && due.contains(&row) {
        return Err(next.refuse_at_start(TopoProblem::RowWithoutColumn { row }));
    }
    Ok(())
}

/// The most lines that a terminal breaks a row into: the longest row has some 13,000 characters.
const MOST_LINES_OF_A_ROW: usize = 1024;

struct Reader<'a> {
    lines: &'a [Line],
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a [Line] {
        self.lines.get(self.at..).unwrap_or_default()
    }

    /// Where the text ends.
    fn end(&self) -> Glyph {
        let start = Glyph {
            ch: ' ',
            line: self.lines.len() + 1,
            column: 1,
            visual: 0,
        };
        match self.lines.last() {
            Some(last) if !last.terminated => last.end,
            _ => start,
        }
    }

    fn read_header(&mut self) -> Result<Header, TopoError> {
        let Some(line) = self.lines.get(self.at) else {
            return Err(self.end().refuse(TopoProblem::Empty));
        };
        let start = skip_blanks(&line.glyphs, 0);
        let found = word_at(&line.glyphs, start);
        if is_row(line) {
            return Err(line.refuse_at_start(TopoProblem::RowBeforeHeader { row: found }));
        }
        if is_failure(&line.text()) {
            let said = line.text();
            return Err(line.refuse_at_start(TopoProblem::Failed { said }));
        }
        if numbered(&found, "GPU").or(numbered(&found, "NIC")).is_none() {
            return Err(line.refuse_at_start(self.no_header(line, found)));
        }
        let mut parts = vec![line];
        for next in self.rest().iter().skip(1) {
            let is_first_row = after_label(&next.glyphs, skip_blanks(&next.glyphs, 0), "GPU0").is_some();
            if is_row(next) || is_first_row || is_boundary(next) {
                break;
            }
            parts.push(next);
        }
        let header = header_of(&parts)?;
        self.at += parts.len();
        Ok(header)
    }

    /// Why a line is no header that begins with `found`, and no matrix stands behind it.
    fn no_header(&self, line: &Line, found: String) -> TopoProblem {
        match self.rest().iter().find_map(|line| printed_by(&line.text())) {
            Some(tool) => {
                let found = line.text().chars().take(40).collect();
                TopoProblem::OtherOutput { found, tool }
            }
            None => TopoProblem::NoHeader { found },
        }
    }

    fn read_rows(&mut self, header: &Header) -> Result<Vec<Row>, TopoError> {
        let mut rows = Vec::with_capacity(header.names.len());
        for (device, name) in header.names.iter().enumerate() {
            while self.lines.get(self.at).is_some_and(|line| {
                let text = line.text();
                text.is_empty() || text.starts_with('#')
            }) {
                self.at += 1;
            }
            let Some(line) = self.lines.get(self.at) else {
                return Err(self.end().refuse(missing(header, device)));
            };
            let start = skip_blanks(&line.glyphs, 0);
            let Some(cells) = after_label(&line.glyphs, start, name) else {
                return Err(line.refuse_at_start(not_the_row(header, device, line)));
            };
            rows.push(self.read_row(header, device, line, cells)?);
        }
        Ok(rows)
    }

    /// Reads the row that begins with `line`, which a terminal may have broken over several lines.
    fn read_row(
        &mut self,
        header: &Header,
        device: usize,
        line: &Line,
        cells: usize,
    ) -> Result<Row, TopoError> {
        let mut parts = vec![line];
        for next in self.rest().iter().take(MOST_LINES_OF_A_ROW).skip(1) {
            let start = skip_blanks(&next.glyphs, 0);
            let labelled = header
                .names
                .iter()
                .any(|name| after_label(&next.glyphs, start, name).is_some());
            if labelled || is_row(next) || is_boundary(next) || !may_be_cells(&next.glyphs, start) {
                break;
            }
            parts.push(next);
        }
        let alone = row::read(header, device, &line.glyphs, cells, line.end).map(|row| Row {
            terminated: line.terminated,
            ..row
        });
        let last = match parts.as_slice() {
            [] | [_] => line,
            [.., last] => last,
        };
        if parts.len() == 1 {
            self.at += 1;
            return alone;
        }
        let joined = |spaced| {
            row::read(header, device, &join(&parts, spaced), cells, last.end).and_then(|row| {
                // A value that stands on its own line must leave no cell blank: the break has taken the blanks away.
                let values = row.values.written.len();
                if values == 0 || values == header.columns.len() {
                    Ok(Row {
                        terminated: last.terminated,
                        ..row
                    })
                } else {
                    let row = header.names.get(device).cloned().unwrap_or_default();
                    Err(line.refuse_at_start(TopoProblem::AmbiguousWrap { row }))
                }
            })
        };
        match (joined(false), joined(true)) {
            (Ok(glued), Ok(spaced)) if !same(&glued, &spaced) => {
                let row = header.names.get(device).cloned().unwrap_or_default();
                Err(line.refuse_at_start(TopoProblem::AmbiguousWrap { row }))
            }
            // Read whole it leaves a cell blank, read in two it leaves none: which it was cannot be told.
            (Err(refused), Ok(_)) if is_unclear(&refused) && splits_value(&parts) => Err(refused),
            (Ok(row), _) | (_, Ok(row)) => {
                self.at += parts.len();
                Ok(row)
            }
            (Err(refused), _) => {
                // Whatever follows is none of the row if the row is whole without it.
                self.at += 1;
                alone.map_err(|reason| match reason.problem {
                    TopoProblem::CutRow { .. } => closer(reason, refused),
                    _ => reason,
                })
            }
        }
    }
}

/// A row cut short with more text behind: the reason why that text does not complete it, unless it is no row's text at all.
fn closer(cut: TopoError, joined: TopoError) -> TopoError {
    match joined.problem {
        TopoProblem::CutRow { .. } | TopoProblem::AmbiguousWrap { .. } => joined,
        _ => cut,
    }
}

fn is_unclear(refused: &TopoError) -> bool {
    matches!(
        refused.problem,
        TopoProblem::AmbiguousWrap { .. } | TopoProblem::AmbiguousValue { .. }
    )
}

/// Whether the characters right before a break and right behind it make a single value together.
fn splits_value(parts: &[&Line]) -> bool {
    parts.windows(2).any(|pair| {
        let [above, below] = pair else { return false };
        let start = above
            .glyphs
            .iter()
            .rposition(|glyph| glyph.is_blank())
            .map_or(0, |blank| blank + 1);
        let (head, tail) = (word_at(&above.glyphs, start), word_at(&below.glyphs, 0));
        !head.is_empty() && !tail.is_empty() && values::is_value(&format!("{head}{tail}"))
    })
}

fn same(a: &Row, b: &Row) -> bool {
    let texts = |row: &Row| -> Vec<String> {
        row.values
            .written
            .iter()
            .map(|value| value.text.clone())
            .collect()
    };
    a.links == b.links && texts(a) == texts(b)
}

/// Puts broken lines together again, with a blank at each break or without.
fn join(parts: &[&Line], spaced: bool) -> Vec<Glyph> {
    let mut joined: Vec<Glyph> = Vec::new();
    for line in parts {
        let offset = joined.last().map_or(0, |glyph| glyph.visual + 1);
        if spaced && let Some(last) = joined.last().copied() {
            joined.push(Glyph { ch: ' ', ..last });
        }
        joined.extend(line.glyphs.iter().map(|glyph| Glyph {
            visual: glyph.visual + offset,
            ..*glyph
        }));
    }
    joined
}

/// Whether a line looks like a row: a label, then links. A line of links alone, of which the first may have lost its beginning, goes
/// on with the row above.
pub(super) fn is_row(line: &Line) -> bool {
    let start = skip_blanks(&line.glyphs, 0);
    let word = word_at(&line.glyphs, start);
    let second = skip_blanks(&line.glyphs, start + word.chars().count());
    is_links(&line.glyphs, second) && !goes_on_with_links(&line.glyphs, start)
}

/// Reads the header that a terminal may have broken over several lines.
pub(super) fn header_of(parts: &[&Line]) -> Result<Header, TopoError> {
    match parts {
        [only] => Header::read(&only.glyphs)
            .or_else(|refused| Header::read_cut(&only.glyphs, only.end).map_err(|_| refused)),
        _ => Header::read(&join(parts, false)).or_else(|refused| {
            // Blanks at the place of the break may have been lost.
            Header::read(&join(parts, true)).map_err(|_| refused)
        }),
    }
}

/// Whether a line names the columns of a matrix.
pub(super) fn is_header(line: &Line) -> bool {
    !is_row(line) && Header::read(&line.glyphs).is_ok_and(|header| header.gpus > 0)
}

/// Whether a line that begins with a GPU may say something of that GPU, such as its product, and name no columns: it names no second
/// device and no title.
pub(super) fn may_name_a_gpu(line: &Line) -> bool {
    let text = line.text();
    let is_named = |name: &str| {
        let length = numbered(name, "GPU").or_else(|| numbered(name, "NIC"));
        length.is_some_and(|(_, length)| length == name.len())
    };
    match Header::read(&line.glyphs) {
        Ok(header) => {
            let devices = header.names.iter().filter(|name| is_named(name)).count();
            devices == 1 && header.columns.is_empty()
        }
        Err(_) => is_named(text.trim_end_matches(':')),
    }
}

/// Whether a line begins as the first row of a matrix does, whole or not.
pub(super) fn begins_first_row(line: &Line) -> bool {
    let start = skip_blanks(&line.glyphs, 0);
    let cells = after_label(&line.glyphs, start, "GPU0").map(|end| skip_blanks(&line.glyphs, end));
    cells.is_some_and(|cells| is_links(&line.glyphs, cells))
}

/// Whether a line looks like a row of any matrix: a device with a link, or anything with two. Prose may have one: `the PIX link`.
pub(super) fn is_row_of_some(line: &Line) -> bool {
    let glyphs = &line.glyphs;
    let start = skip_blanks(glyphs, 0);
    let label = word_at(glyphs, start);
    let is_device = numbered(&label, "GPU").or(numbered(&label, "NIC")).is_some();
    let first = skip_blanks(glyphs, start + label.chars().count());
    let second = skip_blanks(glyphs, first + word_at(glyphs, first).chars().count());
    is_row(line) && (is_device || is_links(glyphs, second))
}

/// A row that ends where the header was cut may have been cut there too: what its last value goes on with is not known.
fn forget_cut_value(row: &mut Row, cut: Glyph) {
    let ends_there = row.end.visual == cut.visual || row.end.column == cut.column;
    let reaches_it = row
        .values
        .written
        .last()
        .is_some_and(|value| value.place.column + value.text.chars().count() == row.end.column);
    if ends_there && reaches_it {
        row.values.written.pop();
    }
}

/// Whether the word at `start` may be cells or the rest of one: nothing but characters of links and values.
fn may_be_cells(glyphs: &[Glyph], start: usize) -> bool {
    word_at(glyphs, start)
        .chars()
        .all(|ch| ch.is_ascii_digit() || "PIXBHNODESYCVA,-/".contains(ch))
}

fn missing(header: &Header, device: usize) -> TopoProblem {
    let columns = header.names.len();
    match header.names.get(device) {
        Some(row) if device > 0 => TopoProblem::MissingRow {
            row: row.clone(),
            columns,
        },
        _ => TopoProblem::NoRows { columns },
    }
}

/// Why a line is not the row that is due.
fn not_the_row(header: &Header, device: usize, line: &Line) -> TopoProblem {
    let start = skip_blanks(&line.glyphs, 0);
    let other = header
        .names
        .iter()
        .position(|name| after_label(&line.glyphs, start, name).is_some());
    let word = word_at(&line.glyphs, start);
    let columns = header.names.len();
    let due = header.names.get(device).cloned().unwrap_or_default();
    match other {
        Some(earlier) if earlier < device => TopoProblem::DuplicateRow { row: word },
        Some(_) => TopoProblem::MissingRow { row: due, columns },
        None if is_row(line) => TopoProblem::RowWithoutColumn { row: word },
        None => missing(header, device),
    }
}
