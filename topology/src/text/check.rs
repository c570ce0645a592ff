//! Holds the rows of a matrix against each other: symmetric, no more links than exist, all as long as each other. Refuses what contradicts
//! itself or was cut; changes nothing.

use super::error::{TopoError, TopoProblem};
use super::header::Header;
use super::legend::form;
use super::row::Row;
use super::switches;
use super::values::{self, Told, Written};
use super::words::Title;
use crate::machine::{IdList, Link, MAX_LINKS_PER_GPU};

/// The first thing that does not fit together.
pub(super) fn check(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    check_symmetry(header, rows)?;
    check_links(header, rows)?;
    check_values(header, rows)
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

/// No GPU has more links than exist, unless a switch shares them among its peers.
fn check_links(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    let counts: Vec<Vec<u8>> = rows
        .iter()
        .take(header.gpus)
        .map(|row| row.links.iter().take(header.gpus).map(nvlinks).collect())
        .collect();
    let switched = switches::switch_links(&counts, MAX_LINKS_PER_GPU);
    for (index, row) in rows.iter().take(header.gpus).enumerate() {
        let links: u32 = row.links.iter().map(|link| u32::from(nvlinks(link))).sum();
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
pub(super) fn nvlinks(link: &Link) -> u8 {
    match link {
        Link::NvLink(links) => *links,
        Link::Itself | Link::Pcie(_) => 0,
    }
}

/// A GPU's row must reach as far as the others, and the text must not end within a value.
fn check_values(header: &Header, rows: &[Row]) -> Result<(), TopoError> {
    let gpus = rows.get(..header.gpus).unwrap_or_default();
    let widest = gpus.iter().map(|row| row.values.width()).max().unwrap_or(0);
    // A single row has none to be held against: where the text ends in it, every column that the header names is due.
    let width = match gpus {
        [row] if !row.terminated => header.columns.len(),
        _ => widest,
    };
    check_tabs(header, gpus)?;
    for (index, row) in gpus.iter().enumerate() {
        let due = row.values.width();
        let blank_on_purpose =
            row.terminated && row.values.tabs_reach(&header.columns, width.saturating_sub(1));
        if due < width && !blank_on_purpose {
            return Err(row.end.refuse(TopoProblem::CutValues {
                row: header.names.get(index).cloned().unwrap_or_default(),
                column: header.columns.get(due).map_or("", |column| column.title.as_str()),
            }));
        }
        if let (false, Some(last)) = (row.terminated, row.values.written.last()) {
            let others = gpus.iter().enumerate().filter(|(other, _)| *other != index);
            let others = others.flat_map(|(_, other)| &other.values.written);
            check_last_value(header, last, others.filter(|other| other.column == last.column))?;
        }
    }
    Ok(())
}

/// Tabs that mean something else in a row which has every value cannot tell the columns of another.
fn check_tabs(header: &Header, gpus: &[Row]) -> Result<(), TopoError> {
    let told = |told: Told| gpus.iter().find(|row| row.values.told == told);
    let value = told(Told::Otherwise).and_then(|_| told(Told::Columns)?.values.written.first());
    match value {
        Some(first) => Err(first
            .place
            .refuse(values::ambiguous(&header.columns, &first.text))),
        None => Ok(()),
    }
}

/// Refuses a value that the text ends in, with nothing to say that it is whole, if those of the `other` rows let it go on.
fn check_last_value<'v>(
    header: &Header,
    last: &Written,
    others: impl Iterator<Item = &'v Written> + Clone,
) -> Result<(), TopoError> {
    let goes_on = |whole: &str, begun: &str| whole.len() > begun.len() && whole.starts_with(begun);
    if let Some(longer) = others.clone().find(|other| goes_on(&other.text, &last.text)) {
        return Err(last.place.refuse(TopoProblem::CutValue {
            found: last.text.clone(),
            longer: longer.text.clone(),
        }));
    }
    // `14` where others have `0-13`. The memory of two GPUs is never one node.
    let own = form(&last.text);
    let title = header.columns.get(last.column).map(|column| column.title);
    let of_memory = title == Some(Title::MemoryNuma) && last.text.parse::<IdList>().is_ok();
    let mut unlike =
        others.filter(|other| goes_on(&form(&other.text), &own) || of_memory && other.text == last.text);
    match unlike.next() {
        Some(like) => Err(last.place.refuse(TopoProblem::CutForm {
            found: last.text.clone(),
            like: like.text.clone(),
        })),
        None => Ok(()),
    }
}
