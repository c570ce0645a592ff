//! The parser of a whole topology text: preamble, header, rows, legends. Compares the rows and refuses a text that is
//! truncated or contradicts itself; infers nothing. Of the legends, that of the links adds nothing and that of the NICs
//! names the device of each `NIC#` column. Any other line beneath the matrix is refused: it may be part of a matrix.

use gantry_topology::machine::MAX_LINKS_PER_GPU;
use gantry_topology::{IdList, Link};

use crate::error::{TopoError, TopoProblem};
use crate::header::{Header, Title, numbered};
use crate::row::{Row, after_label, is_row};
use crate::scan::{Glyph, Line, lines, skip_blanks, word_at};
use crate::values::{self, TabUse, WrittenValue};
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
    let devices = read_legends(rest, reader.end(), &header, reader.nics_found.is_some())?;
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
    last: &WrittenValue,
    mut others: impl Iterator<Item = &'v WrittenValue>,
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

/// Reads the lines beneath the matrix and returns the device of each NIC. `partial`: a notice announces more NICs than
/// the matrix shows, so the legend may name others.
fn read_legends(
    lines: &[Line],
    end: Glyph,
    header: &Header,
    partial: bool,
) -> Result<Vec<Option<String>>, TopoError> {
    let names = header.names.get(header.gpus..).unwrap_or_default();
    let mut devices: Vec<Option<String>> = vec![None; names.len()];
    let mut has_nic_legend = false;
    for line in lines {
        let text = line.text();
        let lower = text.to_ascii_lowercase();
        if lower == "nic legend:" {
            has_nic_legend = true;
        } else if let Some((name, device)) = text.split_once(": ").filter(|_| has_nic_legend) {
            check_complete(line, name, device, &devices)?;
            let name = name.to_owned();
            let column = names.iter().position(|known| *known == name);
            match column.and_then(|column| devices.get_mut(column)) {
                Some(slot @ None) => *slot = Some(device.to_owned()),
                Some(_) => {
                    let kind = "NIC legend entry";
                    return Err(line.refuse_at_start(TopoProblem::Duplicate { kind, name }));
                }
                None if partial => {}
                None => return Err(line.refuse_at_start(TopoProblem::LegendUnknown { name })),
            }
        } else if !(text.is_empty() || text.starts_with('#') || lower == "legend:" || is_link_entry(&text)) {
            return Err(line.refuse_at_start(unexpected(header, line, &text)));
        }
    }
    let mut unnamed = names.iter().zip(&devices).filter(|(_, device)| device.is_none());
    match unnamed.next() {
        Some((name, _)) if has_nic_legend => Err(end.refuse(TopoProblem::LegendCut { name: name.clone() })),
        _ => Ok(devices),
    }
}

/// `SYS = Connection traversing ...`: a link of any driver, and its meaning.
fn is_link_entry(text: &str) -> bool {
    let is_link = |ch: char| ch.is_ascii_uppercase() || ch.is_ascii_digit() || ch == '#';
    let name = text.split_once('=').map(|(name, _)| name.trim());
    name.is_some_and(|name| (1..=5).contains(&name.len()) && name.chars().all(is_link))
}

/// Refuses a device that the text ends in, if it may be the beginning of another: it is one already, its form is the
/// beginning of another's form, or it has no number.
fn check_complete(line: &Line, name: &str, device: &str, others: &[Option<String>]) -> Result<(), TopoError> {
    if line.terminated || line.glyphs.last().is_none_or(|glyph| glyph.is_blank()) {
        return Ok(());
    }
    let others: Vec<&str> = others.iter().flatten().map(String::as_str).collect();
    let own = form(device);
    let has_form = others.iter().any(|other| form(other) == own);
    let ends_in_digit = |device: &str| device.ends_with(|ch: char| ch.is_ascii_digit());
    let lacks_number = !ends_in_digit(device) && others.iter().all(|other| ends_in_digit(other));
    let begins_another = others.iter().any(|other| form(other).starts_with(&own));
    if others.contains(&device) || !has_form && (lacks_number || begins_another) {
        return Err(line.refuse_at_start(TopoProblem::LegendCutDevice {
            name: name.to_owned(),
            found: device.to_owned(),
        }));
    }
    Ok(())
}

/// A device's name or a list with a `#` for every number: `mlx5_10` and `mlx5_2` have one form.
fn form(text: &str) -> String {
    let mut form = String::with_capacity(text.len());
    for ch in text.chars() {
        match ch {
            '0'..='9' if form.ends_with('#') => {}
            '0'..='9' => form.push('#'),
            ch => form.push(ch),
        }
    }
    form
}

/// The problem of a line that belongs to no legend.
fn unexpected(header: &Header, line: &Line, text: &str) -> TopoProblem {
    let row = text.split(' ').next().unwrap_or_default().to_owned();
    let is_device = numbered(&row, "GPU").or_else(|| numbered(&row, "NIC")).is_some();
    if !is_row(line) && Header::read(&line.glyphs).is_ok_and(|header| header.gpus > 0) {
        TopoProblem::SecondMatrix
    } else if is_row(line) && header.names.contains(&row) {
        TopoProblem::Duplicate { kind: "row", name: row }
    } else if is_row(line) || is_device {
        TopoProblem::RowWithoutColumn { row }
    } else {
        let found = text.chars().take(40).collect();
        TopoProblem::Trailing { found }
    }
}
