//! Chooses a node's configuration among several, in the order of NVIDIA's config-manager. A pure function.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::problem::nearest;

/// The choice for a node without the label.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// The configuration of nodes without the label.
    pub default: Option<String>,
    /// The fallbacks without a default, in this order.
    pub fallbacks: Vec<Fallback>,
}

/// A fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// The configuration called `default`.
    Named,
    /// The only configuration, if there is exactly one.
    Single,
    /// None: defaults, environment and flags.
    Empty,
}

impl FromStr for Fallback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "named" => Ok(Self::Named),
            "single" => Ok(Self::Single),
            "empty" => Ok(Self::Empty),
            other => Err(format!("{other:?} is no fallback; write named, single or empty")),
        }
    }
}

/// Why no configuration can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// The named configuration does not exist.
    #[error("{by} names the configuration {name:?}, which is not there; {}", there_is(nearest.as_deref(), there))]
    Absent {
        /// The origin of the name.
        by: &'static str,
        /// The name.
        name: String,
        /// The most similar name, if one is similar enough.
        nearest: Option<String>,
        /// The existing ones.
        there: Vec<String>,
    },
    /// No name is given and no fallback applies.
    #[error("nothing names a configuration and no fallback finds one; {}", there_is(None, there))]
    None {
        /// The existing ones.
        there: Vec<String>,
    },
}

fn there_is(nearest: Option<&str>, there: &[String]) -> String {
    let near = nearest.map_or(String::new(), |name| format!("; did you mean {name:?}?"));
    match there {
        [] => "there are none".to_owned(),
        there => format!("there are: {}{near}", there.join(", ")),
    }
}

impl Choice {
    /// The name of the configuration among `configs` for a node with this label; `None` is the empty one.
    ///
    /// # Errors
    /// When the named configuration does not exist, or no name is given and no fallback applies.
    pub fn choose<T>(
        &self,
        label: Option<&str>,
        configs: &BTreeMap<String, T>,
    ) -> Result<Option<String>, ChoiceError> {
        let label = label.filter(|name| !name.is_empty()).map(|name| ("the node's label", name));
        let default = self.default.as_deref().filter(|name| !name.is_empty());
        if let Some((by, name)) = label.or(default.map(|name| ("the default", name))) {
            if configs.contains_key(name) {
                return Ok(Some(name.to_owned()));
            }
            return Err(ChoiceError::Absent {
                by,
                name: name.to_owned(),
                nearest: nearest(name, configs.keys().map(String::as_str)),
                there: configs.keys().cloned().collect(),
            });
        }
        for fallback in &self.fallbacks {
            match fallback {
                Fallback::Named if configs.contains_key("default") => return Ok(Some("default".to_owned())),
                Fallback::Single if configs.len() == 1 => return Ok(configs.keys().next().cloned()),
                Fallback::Empty => return Ok(None),
                Fallback::Named | Fallback::Single => {}
            }
        }
        Err(ChoiceError::None { there: configs.keys().cloned().collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configs(names: &[&str]) -> BTreeMap<String, String> {
        names.iter().map(|name| ((*name).to_owned(), String::new())).collect()
    }

    #[test]
    fn choice_order_is_label_default_fallbacks() {
        use Fallback::{Empty, Named, Single};
        type Case =
            (Option<&'static str>, Option<&'static str>, &'static [Fallback], &'static [&'static str]);
        let cases: [(Case, Result<Option<&str>, &str>); 13] = [
            ((Some("a"), Some("b"), &[Named], &["a", "b", "default"]), Ok(Some("a"))),
            ((None, Some("b"), &[Named], &["a", "b", "default"]), Ok(Some("b"))),
            ((Some(""), Some("b"), &[], &["a", "b"]), Ok(Some("b"))),
            ((None, None, &[Named, Single], &["a", "default"]), Ok(Some("default"))),
            ((None, None, &[Named, Single], &["a"]), Ok(Some("a"))),
            ((None, None, &[Named, Single, Empty], &["a", "b"]), Ok(None)),
            ((None, None, &[Empty, Named], &["default"]), Ok(None)),
            ((None, Some(""), &[Empty], &[]), Ok(None)),
            ((None, None, &[Named, Single], &["a", "b"]), Err("there are: a, b")),
            ((None, None, &[], &["a"]), Err("nothing names a configuration")),
            ((Some("x1"), Some("b"), &[Empty], &["a100", "b"]), Err("there are: a100, b")),
            ((Some("a10"), None, &[], &["a100", "b"]), Err("there are: a100, b; did you mean \"a100\"?")),
            ((None, Some("gone"), &[Empty], &[]), Err("the default names the configuration \"gone\"")),
        ];
        for ((label, default, fallbacks, names), expected) in cases {
            let choice = Choice { default: default.map(str::to_owned), fallbacks: fallbacks.to_vec() };
            let chosen = choice.choose(label, &configs(names));
            match expected {
                Ok(name) => assert_eq!(chosen, Ok(name.map(str::to_owned)), "{label:?} {choice:?} {names:?}"),
                Err(part) => {
                    let error = chosen.unwrap_err().to_string();
                    assert!(error.contains(part), "{error}");
                }
            }
        }
    }
}
