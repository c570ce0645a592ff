//! The legends beneath the matrix. The legend of the links adds nothing; the NIC legend names the device of each `NIC#`
//! column. Any other line is refused: it may be part of a matrix.

use crate::error::{TopoError, TopoProblem};
use crate::header::Header;
use crate::row::is_row;
use crate::scan::{Glyph, Line};
use crate::words::numbered;

/// Reads the lines beneath the matrix and returns the device of each NIC. `partial`: a notice announces more NICs than
/// the matrix shows, so the legend may name others.
pub(crate) fn read(
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
pub(crate) fn form(text: &str) -> String {
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
