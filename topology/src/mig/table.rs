//! Reader of the table of profiles. Every row is checked; nothing is guessed but NVML's number of a profile, which
//! follows from its name.

use super::{Engines, Product, Profile};
use crate::machine::{MAX_MEMORY_UNITS, split_profile};

/// A row of the table that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, {column}: {problem}")]
pub struct TableError {
    /// The line, from 1.
    pub line: usize,
    /// The column's name.
    pub column: &'static str,
    /// The defect, and the allowed values.
    pub problem: String,
}

const COLUMNS: [&str; 18] = [
    "product",
    "device_ids",
    "models",
    "gpu_mib",
    "profile",
    "id",
    "compute",
    "memory",
    "memory_mib",
    "memory_basis",
    "sms",
    "ce",
    "dec",
    "enc",
    "jpeg",
    "ofa",
    "max_instances",
    "starts",
];

pub(super) fn parse(text: &str) -> Result<Vec<Product>, TableError> {
    let mut rows = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let header = COLUMNS.join(",");
    match rows.next() {
        Some((_, line)) if line == header => {}
        found => {
            return Err(TableError {
                line: found.map_or(1, |(number, _)| number + 1),
                column: "header",
                problem: format!("must be {header}"),
            });
        }
    }
    let mut products: Vec<Product> = Vec::new();
    for (number, line) in rows {
        read_row(&Row::new(number + 1, line)?, &mut products)?;
    }
    for product in &mut products {
        number_profiles(product);
    }
    Ok(products)
}

struct Row<'a> {
    line: usize,
    cells: Vec<&'a str>,
}

impl<'a> Row<'a> {
    fn new(line: usize, text: &'a str) -> Result<Self, TableError> {
        let cells: Vec<&str> = text.split(',').collect();
        if cells.len() == COLUMNS.len() {
            Ok(Self { line, cells })
        } else {
            Err(TableError {
                line,
                column: "row",
                problem: format!("has {} cells, must have {}", cells.len(), COLUMNS.len()),
            })
        }
    }

    fn wrong<T>(&self, column: &'static str, problem: impl Into<String>) -> Result<T, TableError> {
        Err(TableError { line: self.line, column, problem: problem.into() })
    }

    fn text(&self, column: &'static str) -> &'a str {
        let position = COLUMNS.iter().position(|name| *name == column);
        position.and_then(|position| self.cells.get(position)).copied().unwrap_or_default()
    }

    fn number<T: std::str::FromStr>(&self, column: &'static str) -> Result<T, TableError> {
        match self.text(column).parse() {
            Ok(number) => Ok(number),
            Err(_) => self.wrong(column, format!("{:?} is no number that fits", self.text(column))),
        }
    }

    fn starts(&self, size: u8) -> Result<Vec<u8>, TableError> {
        let mut starts: Vec<u8> = Vec::new();
        for text in self.text("starts").split(' ') {
            match text.parse() {
                Ok(start) if starts.last().is_none_or(|last| *last < start) => starts.push(start),
                _ => return self.wrong("starts", format!("{text:?}, units are wanted, ascending")),
            }
        }
        let beyond = |start: &u8| start.saturating_add(size) > MAX_MEMORY_UNITS;
        if size == 0 || starts.iter().any(beyond) {
            return self.wrong("starts", format!("an instance must end at unit {MAX_MEMORY_UNITS}"));
        }
        Ok(starts)
    }
}

fn read_row(row: &Row<'_>, products: &mut Vec<Product>) -> Result<(), TableError> {
    if !["printed", "measured", "estimated"].contains(&row.text("memory_basis")) {
        return row.wrong("memory_basis", "must be printed, measured or estimated");
    }
    let size = row.number("memory")?;
    let profile = Profile {
        name: row.text("profile").to_owned(),
        id: row.number("id")?,
        nvml: 0,
        compute: row.number("compute")?,
        size,
        memory_mib: row.number("memory_mib")?,
        multiprocessors: match row.text("sms") {
            "" => None,
            _ => Some(row.number("sms")?),
        },
        engines: Engines {
            copy: row.number("ce")?,
            decoders: row.number("dec")?,
            encoders: row.number("enc")?,
            jpeg: row.number("jpeg")?,
            ofa: row.number("ofa")?,
        },
        max_instances: row.number("max_instances")?,
        starts: row.starts(size)?,
    };
    if !profile.name.starts_with(&format!("{}g.", profile.compute)) {
        return row.wrong("profile", format!("must begin with {}g.", profile.compute));
    }
    let known = products.iter_mut().find(|product| product.name == row.text("product"));
    let Some(product) = known else {
        products.push(Product {
            name: row.text("product").to_owned(),
            device_ids: device_ids(row)?,
            models: row.text("models").split('|').map(words).collect(),
            memory_mib: row.number("gpu_mib")?,
            profiles: vec![profile],
        });
        return Ok(());
    };
    if product.profiles.iter().any(|other| other.name == profile.name || other.id == profile.id) {
        return row.wrong("profile", format!("{} or its id is there twice", profile.name));
    }
    product.profiles.push(profile);
    Ok(())
}

fn device_ids(row: &Row<'_>) -> Result<Vec<u16>, TableError> {
    let ids = row.text("device_ids").split(' ');
    let ids: Result<Vec<u16>, _> = ids.map(|id| u16::from_str_radix(id, 16)).collect();
    match ids {
        Ok(ids) => Ok(ids),
        Err(_) => row.wrong("device_ids", "must be numbers of four hexadecimal digits"),
    }
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Gives each profile NVML's number (`NVML_GPU_INSTANCE_PROFILE_*`): by compute slices and suffix; a 1g profile that
/// covers more memory than the plain one is revision 2.
fn number_profiles(product: &mut Product) {
    let smallest =
        product.profiles.iter().filter(|profile| profile.compute == 1).map(|profile| profile.size).min();
    for profile in &mut product.profiles {
        let (_, suffix) = split_profile(&profile.name);
        let numbered = NUMBERS.iter().find(|(_, compute, of)| (*compute, *of) == (profile.compute, suffix));
        profile.nvml = match numbered {
            Some((0, ..)) if Some(profile.size) > smallest => ONE_SLICE_WITH_MORE_MEMORY,
            Some((number, ..)) => *number,
            None => UNNUMBERED,
        };
    }
}

/// NVML's profiles (`NVML_GPU_INSTANCE_PROFILE_*` of nvml.h), each with its compute slices and what its name ends with.
const NUMBERS: [(u32, u8, &str); 14] = [
    (0, 1, ""),
    (1, 2, ""),
    (2, 3, ""),
    (3, 4, ""),
    (4, 7, ""),
    (7, 1, "+me"),
    (8, 2, "+me"),
    (10, 1, "+gfx"),
    (11, 2, "+gfx"),
    (12, 4, "+gfx"),
    (13, 1, "-me"),
    (14, 2, "-me"),
    (15, 1, "+me.all"),
    (16, 2, "+me.all"),
];

/// `NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2`: one compute slice with the memory of two, e.g. `1g.10gb` of an A100 with
/// 40 GB.
const ONE_SLICE_WITH_MORE_MEMORY: u32 = 9;

/// The suffix of the name of an NVML profile (`NVML_GPU_INSTANCE_PROFILE_*`): `+me` for 7; nothing for a plain
/// one, and for a number that is not known.
pub fn suffix_of(nvml: u32) -> &'static str {
    let known = NUMBERS.iter().find(|(number, ..)| *number == nvml);
    known.map_or("", |(_, _, suffix)| suffix)
}

/// A profile that NVML has no number for.
const UNNUMBERED: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::super::BUILT_IN;
    use super::*;

    #[test]
    fn built_in_table_has_unique_profile_ids() {
        let products = parse(BUILT_IN).unwrap();
        assert_eq!(products.len(), 19);
        for product in &products {
            let mut numbers: Vec<u32> = product.profiles.iter().map(|profile| profile.nvml).collect();
            assert!(!numbers.contains(&UNNUMBERED), "{}", product.name);
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), product.profiles.len(), "{}", product.name);
            for profile in &product.profiles {
                assert!(profile.name.ends_with(suffix_of(profile.nvml)), "{}", profile.name);
            }
        }
    }

    #[test]
    fn wrong_row_is_refused_with_line_and_column() {
        let row = "A30-24GB,20B7,A30,24576,1g.6gb,14,1,1,5836,measured,14,1,0,0,0,0,4,0 1 2 3";
        let table = |row: &str| format!("{}\n{row}\n", COLUMNS.join(","));
        assert!(parse(&table(row)).is_ok());
        let wrong = [
            (row.replace("1g.6gb", "2g.6gb"), "profile"),
            (row.replace("20B7", "xyz"), "device_ids"),
            (row.replace("24576", "24 GB"), "gpu_mib"),
            (row.replace("5836", "much"), "memory_mib"),
            (row.replace("measured", "guessed"), "memory_basis"),
            (row.replace("0 1 2 3", "0 2 1"), "starts"),
            (row.replace("0 1 2 3", "0 16"), "starts"),
            (row.replace(",14,1,0,", ",-1,1,0,"), "sms"),
            (format!("{row},more"), "row"),
            (format!("{row}\n{row}"), "profile"),
        ];
        for (row, column) in wrong {
            let error = parse(&table(&row)).unwrap_err();
            assert_eq!(error.column, column, "{row}");
            assert!(error.line >= 2);
        }
        assert_eq!(parse("").unwrap_err().column, "header");
    }
}
