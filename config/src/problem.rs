//! Problems of a configuration: each with its place, what is allowed there, and the nearest valid name.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line of the file, from 1, if known.
    pub line: Option<u64>,
    /// Key (`sharing.timeSlicing.resources[0].replicas`), flag or environment variable; empty: the whole file.
    pub at: String,
    /// The kind of the problem.
    pub fault: Fault,
}

/// Kinds of problems.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Fault {
    /// It is neither YAML nor JSON.
    #[error("not well-formed: {0}")]
    Syntax(String),
    /// A key that does not exist.
    #[error("there is no such key; {}{}", suggestion(nearest.as_deref(), allowed), elsewhere(belongs))]
    UnknownKey { belongs: Vec<String>, nearest: Option<String>, allowed: Vec<String> },
    /// A word that is not in the list of allowed ones.
    #[error("{found:?} is not allowed; {}", suggestion(nearest.as_deref(), allowed))]
    UnknownWord { found: String, nearest: Option<String>, allowed: Vec<String> },
    /// A required key is missing.
    #[error("{0} is missing")]
    Missing(String),
    /// A value that is not allowed, with the allowed ones.
    #[error("{0}")]
    Invalid(String),
    /// It contradicts another part of the configuration.
    #[error("{0}")]
    Contradiction(String),
    /// A setting of NVIDIA's plugin that this one does not serve, with what to use instead.
    #[error("{0}")]
    NotServed(String),
    /// More problems follow.
    #[error("more problems follow from here on, which are not listed")]
    More,
}

/// The allowed names, and the most similar one.
fn suggestion(nearest: Option<&str>, allowed: &[String]) -> String {
    let near = nearest.map_or(String::new(), |name| format!("; did you mean {name:?}?"));
    match allowed {
        [] => "nothing is allowed here".to_owned(),
        allowed => format!("allowed: {}{near}", allowed.join(", ")),
    }
}

/// The right places of a misplaced key.
fn elsewhere(belongs: &[String]) -> String {
    match belongs {
        [] => String::new(),
        [only] => format!("; it belongs at {only}"),
        [first @ .., last] => format!("; it belongs at {} or {last}", first.join(", ")),
    }
}

impl Problem {
    /// Whether it is at the key `at` or below it.
    pub(super) fn is_within(&self, at: &str) -> bool {
        self.at
            .strip_prefix(at)
            .is_some_and(|rest| rest.is_empty() || at.is_empty() || rest.starts_with(['.', '[']))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.at.is_empty() {
            write!(f, "{}: ", self.at)?;
        }
        self.fault.fmt(f)
    }
}

/// All problems of one configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// The file, the ConfigMap's key, the command line or the environment.
    pub source: String,
    /// The problems in the order of the file; not empty.
    pub list: Vec<Problem>,
}

impl Problems {
    /// One problem with the whole of `source`.
    #[cfg(target_os = "linux")]
    pub(super) fn one(source: &str, what: &str) -> Self {
        Self {
            source: source.to_owned(),
            list: vec![Problem { line: None, at: String::new(), fault: Fault::Invalid(what.to_owned()) }],
        }
    }
}

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    /// One line, for logs and Events.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source)?;
        if self.list.len() > 1 {
            write!(f, ": {} problems", self.list.len())?;
        }
        for (index, problem) in self.list.iter().enumerate() {
            write!(f, "{} {problem}", if index == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

/// The most similar name in `allowed`, if it is similar enough for a typing error.
pub(super) fn nearest<'a>(name: &str, allowed: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let lower = name.to_lowercase();
    allowed
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| {
            let shorter = candidate.chars().count().min(lower.chars().count());
            *distance <= 3 && 2 * distance < shorter
        })
        .min()
        .map(|(_, candidate)| candidate.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_a_misspelled_name_only() {
        let allowed = ["migStrategy", "mpsRoot", "gdsEnabled"];
        assert_eq!(nearest("migStratgy", allowed), Some("migStrategy".to_owned()));
        assert_eq!(nearest("MIGSTRATEGY", allowed), Some("migStrategy".to_owned()));
        assert_eq!(nearest("replicas", allowed), None);
        assert_eq!(nearest("", allowed), None);
    }
}
