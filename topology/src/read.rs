//! Reads and writes machine files, in YAML or JSON. Errors name the place and the allowed values. No file is opened
//! here.

use serde::de::DeserializeOwned;

use crate::machine::{MAX_GPUS, MAX_LINKS_PER_GPU, MAX_MEMORY_UNITS, Machine, MachineError, MachineParts};

/// The longest text that is read, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// An error in a machine file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Longer than any real machine file.
    #[error("the text has {bytes} bytes, at most {limit} are read")]
    TooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Only blanks and comments.
    #[error("the text is empty; expected a machine file (YAML or JSON)")]
    Empty,
    /// Neither YAML nor JSON.
    #[error(
        "line {line}, column 1: {found:?} does not begin a machine file (YAML or JSON, such as \"gpus:\")"
    )]
    Unrecognised {
        /// Line of the first words.
        line: usize,
        /// The first words.
        found: String,
    },
    /// A field that machine files do not have.
    #[error("line {line}, column {column}: unknown field {field:?}{}; allowed are {}", did_you_mean(nearest.as_deref()), allowed.join(", "))]
    UnknownField {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The field.
        field: String,
        /// The allowed field with the nearest spelling, if any is close.
        nearest: Option<String>,
        /// Fields allowed there.
        allowed: Vec<String>,
    },
    /// Malformed YAML or JSON, or a value of the wrong kind.
    #[error("line {line}, column {column}: {problem}")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The defect.
        problem: String,
    },
    /// Well-formed, but no machine: fields contradict each other.
    #[error(transparent)]
    Contradictory(#[from] MachineError),
}

/// A machine could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the machine cannot be written as YAML: {0}")]
pub struct WriteError(String);

/// The machine file of a machine, in YAML. [`read`] returns the same machine.
///
/// # Errors
/// When the YAML writer fails.
pub fn to_yaml(machine: &Machine) -> Result<String, WriteError> {
    serde_saphyr::to_string(machine).map_err(|error| WriteError(error.to_string()))
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!(" (did you mean {name:?}?)"))
}

/// Reads a machine from a machine file.
///
/// # Errors
/// The text is malformed, contradicts itself or is no machine file: the place, the words found there, the allowed ones.
pub fn read(text: &str) -> Result<Machine, ReadError> {
    if text.len() > MAX_BYTES {
        return Err(ReadError::TooLong { bytes: text.len(), limit: MAX_BYTES });
    }
    let text = text.trim_start_matches('\u{feff}');
    let mut lines = text.split(if text.contains('\n') { '\n' } else { '\r' }).map(str::trim).enumerate();
    let Some((index, first)) = lines.find(|(_, line)| !line.is_empty() && !line.starts_with('#')) else {
        return Err(ReadError::Empty);
    };
    if first.starts_with('{') {
        machine(read_json(text)?)
    } else if first.starts_with("---") || first.starts_with('%') || is_key(first) {
        machine(read_yaml(text)?)
    } else {
        Err(ReadError::Unrecognised { line: index + 1, found: first.chars().take(40).collect() })
    }
}

/// Reads a value that contains a machine, such as a `GpuNode`, from YAML or JSON, with the errors of a machine file.
///
/// # Errors
/// The place, the words found there, the allowed ones.
pub fn read_object<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    if text.trim_start().starts_with('{') {
        // Flow YAML begins like JSON.
        return read_json(text).or_else(|error| read_yaml(text).map_err(|_| error));
    }
    read_yaml(text)
}

fn machine(parts: MachineParts) -> Result<Machine, ReadError> {
    if parts.gpus.is_empty() {
        return Err(ReadError::Contradictory(MachineError {
            field: "gpus".to_owned(),
            problem: format!("none is named; a machine has 1 to {MAX_GPUS}"),
        }));
    }
    Ok(Machine::new(parts)?)
}

/// Whether a line is `key:` or `key: value`.
fn is_key(line: &str) -> bool {
    line.split_once(':').is_some_and(|(key, value)| {
        let key = key.trim_matches(['"', '\'']);
        let word =
            !key.is_empty() && key.chars().all(|ch| ch.is_ascii_alphanumeric() || ch == '_' || ch == '-');
        word && (value.is_empty() || value.starts_with(char::is_whitespace))
    })
}

fn read_yaml<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    let mut options = serde_saphyr::Options::default();
    options.with_snippet = false;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let (line, column) = error.location().map_or((1, 1), |place| (place.line(), place.column()));
        let (line, column) = (whole(line), whole(column));
        match error.without_snippet() {
            serde_saphyr::Error::SerdeUnknownField { field, expected, .. } => {
                let allowed = expected.iter().map(|name| (*name).to_owned()).collect();
                unknown_field(line, column, field.clone(), allowed)
            }
            other => {
                let problem = without_place(&other.to_string());
                let number = line
                    .checked_sub(1)
                    .and_then(|index| split_at_char(text.lines().nth(index)?, column - 1))
                    .and_then(|(before, rest)| {
                        let found = rest.split([' ', ',', '}', ']', '\t', '#']).next()?;
                        match problem.strip_prefix("invalid ") {
                            Some(kind) => not_in_range(before, &format!("{found:?}"), kind),
                            None => not_of_shape(before, problem.strip_prefix("expected ")?),
                        }
                    });
                ReadError::Malformed { line, column, problem: number.unwrap_or(problem) }
            }
        }
    })
}

/// A line before and from the character at `at`.
fn split_at_char(line: &str, at: usize) -> Option<(&str, &str)> {
    let (at, _) = line.char_indices().nth(at)?;
    line.split_at_checked(at)
}

/// The key that ends a line before its value.
fn key_before(before: &str) -> Option<&str> {
    let (key, _) = before.rsplit_once(':')?;
    key.trim_end_matches(['"', ' '])
        .rsplit(|ch: char| !ch.is_ascii_alphanumeric())
        .next()
        .filter(|key| !key.is_empty())
}

/// The problem of a text, a list or a set of fields in the place of another of these. `wanted` is the YAML library's
/// word.
fn not_of_shape(before: &str, wanted: &str) -> Option<String> {
    let wanted = match wanted {
        "sequence start" => "a list",
        "mapping start" => "a set of fields",
        "string scalar" => "a text",
        _ => return None,
    };
    let field = key_before(before).unwrap_or("value");
    Some(format!("{field}: must be {wanted}"))
}

/// The problem of a number outside the range of its field: the field, the value found, the allowed range. The field
/// ends the line `before` the value. `kind` is the libraries' name of the field's type; `None` if it is no whole
/// number.
fn not_in_range(before: &str, found: &str, kind: &str) -> Option<String> {
    let field = key_before(before);
    let widest = match kind {
        "u8" => u64::from(u8::MAX),
        "u16" => u64::from(u16::MAX),
        "u32" => u64::from(u32::MAX),
        "u64" => u64::MAX,
        _ => return None,
    };
    let (least, most) = match field.unwrap_or_default() {
        "index" | "gpus" => (0, MAX_GPUS as u64 - 1),
        "links" => (1, u64::from(MAX_LINKS_PER_GPU)),
        "switchLinks" => (0, u64::from(MAX_LINKS_PER_GPU)),
        "version" => (1, 5),
        "generation" => (1, 7),
        "width" => (1, 32),
        "start" => (0, u64::from(MAX_MEMORY_UNITS) - 1),
        "size" => (1, u64::from(MAX_MEMORY_UNITS)),
        _ => (0, widest),
    };
    let field = field.unwrap_or("value");
    Some(format!("{field}: {found}, must be a whole number from {least} to {most}"))
}

fn read_json<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line().max(1), error.column().max(1));
        let problem = without_place(&error.to_string());
        match problem.strip_prefix("unknown field `") {
            Some(rest) => {
                let mut names = rest.split('`').step_by(2).map(str::to_owned);
                let field = names.next().unwrap_or_default();
                let allowed = names.filter(|name| !name.is_empty()).collect();
                unknown_field(line, column, field, allowed)
            }
            None => {
                let cause = problem
                    .strip_prefix("invalid value: ")
                    .or_else(|| problem.strip_prefix("invalid type: "));
                let number =
                    cause.and_then(|cause| cause.split_once(", expected ")).and_then(|(found, kind)| {
                        // The reported place is behind the value: its key is the last before it on the line.
                        let source = text.lines().nth(line - 1)?;
                        let before = split_at_char(source, column).map_or(source, |(before, _)| before);
                        not_in_range(before, &found.replace('`', ""), kind)
                    });
                ReadError::Malformed { line, column, problem: number.unwrap_or(problem) }
            }
        }
    })
}

fn whole(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX).max(1)
}

/// The message without the place that both libraries append. It is printed once, in front.
fn without_place(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    if first.starts_with("multiple YAML documents") {
        return "a second YAML document begins here; a machine file is a single one".to_owned();
    }
    let end = first.rfind(" at line ").unwrap_or(first.len());
    let problem = first.get(..end).unwrap_or(first);
    // The YAML library's advice is for programmers.
    problem.split(", set DuplicateKeyPolicy").next().unwrap_or(problem).to_owned()
}

fn unknown_field(line: usize, column: usize, field: String, allowed: Vec<String>) -> ReadError {
    let nearest = allowed
        .iter()
        .map(|name| (strsim::damerau_levenshtein(&field.to_lowercase(), &name.to_lowercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= 3.min(name.len() / 2))
        .map(|(_, name)| name.clone());
    ReadError::UnknownField { line, column, field, nearest, allowed }
}
