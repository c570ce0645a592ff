//! What is wrong with a configuration: every problem with its place, said so that a person can mend it without the source.

use std::fmt;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line of the file, from 1, where it is known.
    pub line: Option<u64>,
    /// Key (`sharing.timeSlicing.resources[0].replicas`), flag or environment variable; empty: the whole file.
    pub at: String,
    /// What is wrong.
    pub fault: Fault,
}

/// Kinds of problems.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Fault {
    /// It is neither YAML nor JSON.
    #[error("not well-formed: {0}")]
    Syntax(String),
    /// Nothing is called so.
    #[error("there is no such key; {}{}", suggestion(nearest.as_deref(), allowed), elsewhere(belongs))]
    UnknownKey {
        /// Where there is a key of this very name; empty where there is none.
        belongs: Vec<String>,
        /// The key that was meant, if one is near.
        nearest: Option<String>,
        /// The keys there are in this place.
        allowed: Vec<String>,
    },
    /// None of a few words.
    #[error("{found:?} is not allowed; {}", suggestion(nearest.as_deref(), allowed))]
    UnknownWord {
        /// The word.
        found: String,
        /// The word that was meant, if one is near.
        nearest: Option<String>,
        /// The words there are.
        allowed: Vec<String>,
    },
    /// A key that must be there.
    #[error("{0} is missing")]
    Missing(String),
    /// A value that is not allowed here, with what is.
    #[error("{0}")]
    Invalid(String),
    /// It contradicts another part of the configuration.
    #[error("{0}")]
    Contradiction(String),
    /// NVIDIA's plugin has it, this one does not, and this is what to use instead.
    #[error("{0}")]
    NotServed(String),
    /// There is more than is told of.
    #[error("there is more of this from here on, which is not listed")]
    More,
}

/// What there is, and which of it was perhaps meant.
fn suggestion(nearest: Option<&str>, allowed: &[String]) -> String {
    let near = nearest.map_or(String::new(), |name| format!("; did you mean {name:?}?"));
    match allowed {
        [] => "nothing is allowed here".to_owned(),
        allowed => format!("allowed: {}{near}", allowed.join(", ")),
    }
}

/// Where a key belongs that stands in the wrong place.
fn elsewhere(belongs: &[String]) -> String {
    match belongs {
        [] => String::new(),
        [only] => format!("; it belongs at {only}"),
        [first @ .., last] => format!("; it belongs at {} or {last}", first.join(", ")),
    }
}

impl Problem {
    /// Whether it stands at the key `at`, or below it.
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

/// Everything that is wrong with one configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// The file, the ConfigMap's key, the command line or the environment.
    pub source: String,
    /// Not empty, in the order of the file.
    pub list: Vec<Problem>,
}

impl Problems {
    /// One problem with the whole of `source`.
    pub(super) fn one(source: &str, what: &str) -> Self {
        Self {
            source: source.to_owned(),
            list: vec![Problem {
                line: None,
                at: String::new(),
                fault: Fault::Invalid(what.to_owned()),
            }],
        }
    }
}

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    /// In one line, for logs and Events.
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

/// The name in `allowed` that is nearest to `name`, if it is near enough to be a slip.
pub(super) fn nearest<'a>(name: &str, allowed: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let lower = name.to_lowercase();
    allowed
        .into_iter()
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()),
                candidate,
            )
        })
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
