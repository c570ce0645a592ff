//! The parser of a whole topology text: preamble, header, rows, legends. Compares the rows and refuses a text that is
//! truncated or contradicts itself; infers nothing.

use gantry_topology::machine::MAX_LINKS_PER_GPU;
use gantry_topology::{IdList, Link};

use crate::error::{TopoError, TopoProblem};
use crate::header::Header;
use crate::legend::{self, form};
use crate::row::{Row, after_label, is_row};
use crate::scan::{Glyph, Line, lines, skip_blanks, word_at};
use crate::values::{self, TabUse, Written};
use crate::words::{Title, is_failure, numbered};
use crate::{GpuLine, MAX_TEXT_BYTES, NicLine, TopoText, switches};

/// Reads a topology text.
pub(crate) fn parse(text: &str) -> Result<TopoText, TopoError> {
    if text.len() > MAX_TEXT_BYTES {
        let (bytes, limit) = (text.len(), MAX_TEXT_BYTES);
        return Err(TopoError { line: 1, column: 1, problem: TopoProblem::TooLong { bytes, limit } });
    }
    let lines = lines(text);
    let mut reader = Reader { lines: &lines, at: 0, description: None, nics_found: None };
    let header = reader.read_header()?;
    let rows = reader.read_rows(&header)?;
    check_symmetry(&header, &rows)?;
    check_links(&header, &rows)?;
    check_values(&header, &rows)?;
    let rest = reader.lines.get(reader.at..).unwrap_or_default();
    let devices = legend::read(rest, reader.end(), &header, reader.nics_found.is_some())?;
    let gpu_line = |row: &Row| {
        Ok(GpuLine {
            cpus: row.values.get(&header.titles, Title::Cpus)?,
            numa: row.values.get(&header.titles, Title::Numa)?,
            memory_numa: row.values.get(&header.titles, Title::MemoryNuma)?,
        })
    };
    let gpus = rows.iter().take(header.gpus).map(gpu_line);
    let gpus = gpus.collect::<Result<_, TopoError>>()?;
    let nics = header.names.into_iter().skip(header.gpus).zip(devices);
    Ok(TopoText {
        description: reader.description,
        nics_found: reader.nics_found,
        gpus,
        nics: nics.map(|(name, device)| NicLine { name, device }).collect(),
        links: rows.into_iter().map(|row| row.links).collect(),
    })
}

struct Reader<'a> {
    lines: &'a [Line],
    at: usize,
    description: Option<String>,
    nics_found: Option<usize>,
}

impl<'a> Reader<'a> {
    /// The next line that is neither blank nor a comment.
    fn next_line(&mut self) -> Option<&'a Line> {
        loop {
            let line = self.lines.get(self.at)?;
            let text = line.text();
            let comment = text.strip_prefix('#');
            if comment.is_none() && !text.is_empty() {
                return Some(line);
            }
            let description = comment.and_then(|comment| comment.trim().strip_prefix("machine:"));
            if let Some(description) = description.filter(|_| self.description.is_none()) {
                let first = description.split(" | ").next().unwrap_or_default().trim();
                self.description = Some(first.to_owned()).filter(|first| !first.is_empty());
            }
            self.at += 1;
        }
    }

    /// The end of the text.
    fn end(&self) -> Glyph {
        let start = Glyph { ch: ' ', line: self.lines.len() + 1, column: 1, visual: 0 };
        let last = self.lines.last().filter(|last| !last.terminated);
        last.map_or(start, |last| last.end)
    }

    fn read_header(&mut self) -> Result<Header, TopoError> {
        let mut notice = None;
        loop {
            let Some(line) = self.next_line() else {
                return Err(self.end().refuse(TopoProblem::Empty));
            };
            self.at += 1;
            let text = line.text();
            if let Some((found, shown)) = hidden_nics(&text) {
                self.nics_found = Some(found);
                notice = Some((shown, line));
                continue;
            }
            let found = text.split(' ').next().unwrap_or_default().to_owned();
            if is_row(line) {
                return Err(line.refuse_at_start(TopoProblem::RowBeforeHeader { row: found }));
            }
            if is_failure(&text) {
                return Err(line.refuse_at_start(TopoProblem::Failed { message: text }));
            }
            if numbered(&found, "GPU").or_else(|| numbered(&found, "NIC")).is_none() {
                return Err(line.refuse_at_start(TopoProblem::NoHeader { found }));
            }
            let header = Header::read(&line.glyphs)?;
            let columns = header.names.len() - header.gpus;
            return match notice {
                Some((shown, line)) if shown != columns => {
                    Err(line.refuse_at_start(TopoProblem::NicCount { shown, columns }))
                }
                _ => Ok(header),
            };
        }
    }

    fn read_rows(&mut self, header: &Header) -> Result<Vec<Row>, TopoError> {
        let mut rows = Vec::with_capacity(header.names.len());
        for (device, name) in header.names.iter().enumerate() {
            let Some(line) = self.next_line() else {
                return Err(self.end().refuse(missing(header, device)));
            };
            let start = skip_blanks(&line.glyphs, 0);
            let Some(cells) = after_label(&line.glyphs, start, name) else {
                return Err(line.refuse_at_start(not_the_row(header, device, line)));
            };
            rows.push(Row::read(header, device, line, cells)?);
            self.at += 1;
        }
        Ok(rows)
    }
}

/// The numbers of NICs found and shown, from the notice above a matrix that does not show them all.
fn hidden_nics(text: &str) -> Option<(usize, usize)> {
    if !text.contains("found in the topology") {
        return None;
    }
    let mut numbers = text.split_whitespace().filter_map(|word| word.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

fn missing(header: &Header, device: usize) -> TopoProblem {
    TopoProblem::MissingRow {
        row: header.names.get(device).cloned().unwrap_or_default(),
        columns: header.names.len(),
    }
}

/// The problem of a line in the place of the row of `device`.
fn not_the_row(header: &Header, device: usize, line: &Line) -> TopoProblem {
    let start = skip_blanks(&line.glyphs, 0);
    let mut names = header.names.iter();
    let other = names.position(|name| after_label(&line.glyphs, start, name).is_some());
    let label = word_at(&line.glyphs, start);
    match other {
        Some(earlier) if earlier < device => TopoProblem::Duplicate { kind: "row", name: label },
        None if is_row(line) => TopoProblem::RowWithoutColumn { row: label },
        _ => missing(header, device),
    }
}

fn check_symmetry(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    let name = |index: usize| header.names.get(index).cloned().unwrap_or_default();
    for (index, row) in rows.iter().enumerate() {
        for (other, mirror) in rows.iter().take(index).enumerate() {
            let cell = row.links.get(other).zip(mirror.links.get(index));
            if let (Some((found, mirrored)), Some(place)) = (cell, row.places.get(other))
                && found != mirrored
            {
                return Err(place.refuse(TopoProblem::Asymmetric {
                    found: found.to_string(),
                    row: name(index),
                    column: name(other),
                    mirrored: mirrored.to_string(),
                }));
            }
        }
    }
    Ok(())
}

/// No GPU may have more links than possible, unless a switch shares them among its peers.
fn check_links(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    let gpus = rows.get(..header.gpus).unwrap_or_default();
    let counts = gpus.iter().map(|row| row.links.iter().take(header.gpus).map(nvlinks).collect());
    let counts: Vec<Vec<u8>> = counts.collect();
    let switched = switches::switch_links(&counts, MAX_LINKS_PER_GPU);
    for (index, (row, counts)) in gpus.iter().zip(&counts).enumerate() {
        let links: u32 = counts.iter().copied().map(u32::from).sum();
        if links > u32::from(MAX_LINKS_PER_GPU) && switched.get(index).is_none_or(Option::is_none) {
            return Err(row.label.refuse(TopoProblem::TooManyLinks {
                gpu: header.names.get(index).cloned().unwrap_or_default(),
                links,
                limit: MAX_LINKS_PER_GPU,
            }));
        }
    }
    Ok(())
}

/// The count of an `NV#`, else 0.
pub(crate) fn nvlinks(link: &Link) -> u8 {
    match link {
        Link::NvLink(links) => *links,
        Link::Itself | Link::Pcie(_) => 0,
    }
}

/// A GPU's row must have as many values as the others, and the text must not end within a value.
fn check_values(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    let gpus = rows.get(..header.gpus).unwrap_or_default();
    let widest = gpus.iter().map(|row| row.values.width()).max().unwrap_or(0);
    // A single row has no other to compare with: if the text ends in it, every column of the header is required.
    let width = match gpus {
        [row] if !row.terminated => header.titles.len(),
        _ => widest,
    };
    check_tabs(header, gpus)?;
    for (index, row) in gpus.iter().enumerate() {
        let own = row.values.width();
        let is_marked_blank =
            row.terminated && row.values.tabs_reach(&header.titles, width.saturating_sub(1));
        if own < width && !is_marked_blank {
            return Err(row.end.refuse(TopoProblem::CutValues {
                row: header.names.get(index).cloned().unwrap_or_default(),
                column: header.titles.get(own).map_or("", |title| title.as_str()),
            }));
        }
        if let Some(last) = row.values.written.last().filter(|_| !row.terminated) {
            let others = gpus.iter().enumerate().filter(|(other, _)| *other != index);
            let others = others.flat_map(|(_, other)| &other.values.written);
            check_last_value(header, last, others.filter(|other| other.column == last.column))?;
        }
    }
    Ok(())
}

/// Tabs that do not separate columns in one row cannot show the columns of another.
fn check_tabs(header: &Header, gpus: &[Row]) -> Result<(), TopoError> {
    let with = |tab_use: TabUse| gpus.iter().find(|row| row.values.tab_use == tab_use);
    let value = with(TabUse::Irregular).and_then(|_| with(TabUse::Columns)?.values.written.first());
    match value {
        Some(first) => Err(first.place.refuse(values::ambiguous(&header.titles, &first.text))),
        None => Ok(()),
    }
}

/// Refuses the value that an unterminated text ends in, if the `other` rows show that it may go on: it or its form is
/// the beginning of another, such as `14` beside `0-13`. The memory of two GPUs is never one NUMA node.
fn check_last_value<'v>(
    header: &Header,
    last: &Written,
    mut others: impl Iterator<Item = &'v Written>,
) -> Result<(), TopoError> {
    let goes_on = |whole: &str, begun: &str| whole.len() > begun.len() && whole.starts_with(begun);
    let own = form(&last.text);
    let is_memory = header.titles.get(last.column) == Some(&Title::MemoryNuma);
    let is_node = is_memory && last.text.parse::<IdList>().is_ok();
    let longer = others.find(|other| {
        goes_on(&other.text, &last.text)
            || goes_on(&form(&other.text), &own)
            || is_node && other.text == last.text
    });
    match longer {
        Some(other) => Err(last
            .place
            .refuse(TopoProblem::CutValue { found: last.text.clone(), like: other.text.clone() })),
        None => Ok(()),
    }
}
