//! Reads a machine from either of its forms, told apart by content: a machine file (YAML or JSON) or the text of
//! `nvidia-smi topo -m`. Errors name the place and what is allowed there. Also writes machine files; no files are opened here.

use serde::de::DeserializeOwned;

use crate::machine::{MAX_GPUS, MAX_LINKS_PER_GPU, MAX_MEMORY_UNITS, Machine, MachineError, MachineParts};
use crate::text::{self, Hints, TopoError};

/// The longest text that is read, in bytes.
pub const MAX_BYTES: usize = text::MAX_TEXT_BYTES;

/// Why a text is no machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Longer than any real one.
    #[error("the text has {bytes} bytes, at most {limit} are read")]
    TooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Nothing but blanks and comments.
    #[error(
        "the text is empty; expected a machine file (YAML or JSON) or the output of `nvidia-smi topo -m`"
    )]
    Empty,
    /// Neither form.
    #[error(
        "line {line}, column 1: {found:?} begins neither a machine file (YAML or JSON, such as \"gpus:\") nor the output of \
         `nvidia-smi topo -m` (such as \"GPU0 GPU1 CPU Affinity\")"
    )]
    Unrecognised {
        /// Line of the first words.
        line: usize,
        /// The first words.
        found: String,
    },
    /// A topology text that is cut or contradicts itself.
    #[error(transparent)]
    Topology(#[from] TopoError),
    /// A field that machine files do not have.
    #[error("line {line}, column {column}: unknown field {field:?}{}; allowed are {}", did_you_mean(nearest.as_deref()), allowed.join(", "))]
    UnknownField {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The field.
        field: String,
        /// The allowed field spelt most like it, if any is close.
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
        /// What is wrong there.
        problem: String,
    },
    /// A hint of the GPUs' model with a machine that says it itself.
    #[error(
        "a model is said of it ({model:?}), but only the output of `nvidia-smi topo -m` leaves that open"
    )]
    ModelIsSaid {
        /// The hint.
        model: String,
    },
    /// Well-formed, but no machine: fields contradict each other.
    #[error(transparent)]
    Contradictory(#[from] MachineError),
}

/// A machine could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the machine cannot be written as YAML: {0}")]
pub struct WriteError(String);

/// A machine as a machine file in YAML, which [`read`] reads back as the same machine.
///
/// # Errors
/// When the YAML writer fails.
pub fn to_yaml(machine: &Machine) -> Result<String, WriteError> {
    serde_saphyr::to_string(machine).map_err(|error| WriteError(error.to_string()))
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!(" (did you mean {name:?}?)"))
}

/// Reads a machine from a machine file or a topology text.
///
/// # Errors
/// Where the text is malformed, contradicts itself or is neither: the place, what stands there, what is allowed.
pub fn read(text: &str) -> Result<Machine, ReadError> {
    read_with(text, &Hints::default())
}

/// [`read`] with hints for what a topology text does not say. A machine file says all itself.
///
/// # Errors
/// As [`read`]; or a hint comes with a machine file.
pub fn read_with(text: &str, hints: &Hints) -> Result<Machine, ReadError> {
    if text.len() > MAX_BYTES {
        return Err(ReadError::TooLong {
            bytes: text.len(),
            limit: MAX_BYTES,
        });
    }
    let text = text.trim_start_matches('\u{feff}');
    let said = lines(text).map(str::trim).enumerate();
    if text::is_tagged(text) {
        return Ok(text::read_machine_with(text, hints)?);
    }
    let Some((index, first)) = said
        .clone()
        .find(|(_, line)| !line.is_empty() && !line.starts_with('#'))
    else {
        return Err(ReadError::Empty);
    };
    // Issue trackers begin a block of text with `{noformat}`.
    let is_json = first.starts_with('{') && !text::has_matrix(text);
    if !is_json && (text::is_command(first) || looks_like_topology(text)) {
        return Ok(text::read_machine_with(text, hints)?);
    }
    let is_yaml = first.starts_with("---") || first.starts_with('%') || is_key(first);
    match &hints.model {
        Some(model) if is_json || is_yaml => Err(ReadError::ModelIsSaid { model: model.clone() }),
        _ if is_json => machine(read_json(text)?),
        _ if is_yaml => machine(read_yaml(text)?),
        _ if lines(text).any(|line| text::printed_by(line).is_some()) => {
            Ok(text::read_machine_with(text, hints)?)
        }
        _ => Err(ReadError::Unrecognised {
            line: index + 1,
            found: first.chars().take(40).collect(),
        }),
    }
}

/// Reads something that holds a machine, such as an object of a cluster, from YAML or JSON, with the errors of a machine file.
///
/// # Errors
/// The place, what stands there, what is allowed.
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

/// The lines of a text, whatever ends them.
fn lines(text: &str) -> std::str::Split<'_, char> {
    text.split(if text.contains('\n') { '\n' } else { '\r' })
}

/// Whether some line has a device name where a matrix has one, or the notice stands there that comes before a matrix, or what
/// nvidia-smi says where it makes none.
fn looks_like_topology(text: &str) -> bool {
    let named = |line: &str| {
        let at = line.find("GPU0").or_else(|| line.find("GPU1"));
        at.and_then(|at| line.get(..at))
            .is_some_and(|before| !before.contains(|ch: char| ch.is_alphanumeric() && !"0149m".contains(ch)))
    };
    has_host_in_front(text)
        || lines(text)
            .filter(|line| !line.trim_start().starts_with('#'))
            .any(|line| {
                named(line) || line.contains("found in the topology") || text::is_failure(line.trim())
            })
}

/// Whether lines of a matrix have a host's name in front, `node1: GPU0 X`, as tools print it that run a command on several hosts.
/// No mapping has one key twice.
fn has_host_in_front(text: &str) -> bool {
    let host = |line: &str| {
        let (host, rest) = line.trim().split_once(':')?;
        let numbered = rest.trim_start().strip_prefix("GPU")?;
        let is_row =
            !host.contains(char::is_whitespace) && numbered.starts_with(|ch: char| ch.is_ascii_digit());
        is_row.then(|| host.to_owned())
    };
    let mut hosts = lines(text).filter_map(host);
    let first = hosts.next();
    first.is_some() && first == hosts.next()
}

/// Whether a line is `key:` or `key: value`.
fn is_key(line: &str) -> bool {
    line.split_once(':').is_some_and(|(key, value)| {
        let key = key.trim_matches(['"', '\'']);
        let word = !key.is_empty()
            && key
                .chars()
                .all(|ch| ch.is_ascii_alphanumeric() || ch == '_' || ch == '-');
        word && (value.is_empty() || value.starts_with(char::is_whitespace))
    })
}

fn read_yaml<T: DeserializeOwned>(text: &str) -> Result<T, ReadError> {
    let mut options = serde_saphyr::Options::default();
    options.with_snippet = false;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let (line, column) = error
            .location()
            .map_or((1, 1), |place| (place.line(), place.column()));
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
                ReadError::Malformed {
                    line,
                    column,
                    problem: number.unwrap_or(problem),
                }
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

/// What is said of a value that is a text, a list or a set of fields where its field is another of these. `wanted`: the YAML library's
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

/// What is said of a number that its field cannot hold: the field, which ends the line `before` the value, what was found there, and
/// what is allowed. `kind` is the libraries' name of the field's type; `None` where it is no whole number.
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
    Some(format!(
        "{field}: {found}, must be a whole number from {least} to {most}"
    ))
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
                let said = problem
                    .strip_prefix("invalid value: ")
                    .or_else(|| problem.strip_prefix("invalid type: "));
                let number =
                    said.and_then(|said| said.split_once(", expected "))
                        .and_then(|(found, kind)| {
                            // The place is behind the value: its key is the last before it on the line.
                            let source = text.lines().nth(line - 1)?;
                            let before = split_at_char(source, column).map_or(source, |(before, _)| before);
                            not_in_range(before, &found.replace('`', ""), kind)
                        });
                ReadError::Malformed {
                    line,
                    column,
                    problem: number.unwrap_or(problem),
                }
            }
        }
    })
}

fn whole(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX).max(1)
}

/// The message without the place that both libraries append: it is said once, in front.
fn without_place(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    let said = first
        .rfind(" at line ")
        .and_then(|at| first.get(..at))
        .unwrap_or(first);
    if first.starts_with("multiple YAML documents") {
        return "a second YAML document begins here; a machine file is a single one".to_owned();
    }
    // The YAML library's advice to its callers is none to people.
    said.split(", set DuplicateKeyPolicy")
        .next()
        .unwrap_or(said)
        .to_owned()
}

fn unknown_field(line: usize, column: usize, field: String, allowed: Vec<String>) -> ReadError {
    let nearest = allowed
        .iter()
        .map(|name| {
            (
                strsim::damerau_levenshtein(&field.to_lowercase(), &name.to_lowercase()),
                name,
            )
        })
        .min()
        .filter(|(distance, name)| *distance <= 3.min(name.len() / 2))
        .map(|(_, name)| name.clone());
    ReadError::UnknownField {
        line,
        column,
        field,
        nearest,
        allowed,
    }
}
