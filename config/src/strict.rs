//! Reads a file whose every key is known: a problem names its line, key, value, what is allowed and the nearest valid
//! name. For files with a form of their own; the plugin's configuration is read by [`crate::load`].

use std::collections::BTreeMap;

use serde_json::Value;

use crate::problem::{Fault, Problem, Problems, nearest};
use crate::read::{Strictness, at_most, first_document, tree};
use crate::tree::{Branch, Node};

/// Collects the problems of a file.
#[derive(Default)]
pub(super) struct StrictReader {
    problems: Vec<Problem>,
}

impl StrictReader {
    /// Reads a text of one YAML or JSON document by `file`; `source` names it in problems.
    ///
    /// # Errors
    /// All problems of the file.
    pub(super) fn read<T>(
        source: &str,
        text: &str,
        file: impl FnOnce(&mut Self, &Node) -> T,
    ) -> Result<T, Problems> {
        let mut reader = Self::default();
        let (document, second) = first_document(text);
        let found = match tree(document, Strictness::Strict) {
            Ok(root) => Some(file(&mut reader, &root)),
            Err(problem) => {
                reader.problems.push(problem);
                None
            }
        };
        if second.is_some() {
            let fault =
                Fault::Invalid("another YAML document begins here; the file is one document".to_owned());
            reader.problems.push(Problem { line: second, at: String::new(), fault });
        }
        let mut list = reader.problems;
        match found {
            Some(found) if list.is_empty() => Ok(found),
            _ => {
                list.sort();
                list.dedup();
                at_most(&mut list);
                Err(Problems { source: source.to_owned(), list })
            }
        }
    }

    pub(super) fn report(&mut self, node: &Node, fault: Fault) {
        self.problems.push(Problem { line: node.line, at: node.at.clone(), fault });
    }

    pub(super) fn invalid(&mut self, node: &Node, text: impl Into<String>) {
        self.report(node, Fault::Invalid(text.into()));
    }

    /// The entries of a map. Keys that are not in `allowed` are reported, and so are missing ones of `required`.
    pub(super) fn keys<'n>(
        &mut self,
        node: &'n Node,
        allowed: &[&str],
        required: &[&str],
    ) -> Option<BTreeMap<&'n str, &'n Node>> {
        let Branch::Map(entries) = &node.branch else {
            self.invalid(node, format!("is {}, and must be a map with {}", kind(node), allowed.join(", ")));
            return None;
        };
        for (name, child) in entries.iter().filter(|(name, _)| !allowed.contains(&name.as_str())) {
            let nearest = nearest(name, allowed.iter().copied());
            let allowed = allowed.iter().map(|name| (*name).to_owned()).collect();
            self.report(child, Fault::UnknownKey { belongs: Vec::new(), nearest, allowed });
        }
        let found: BTreeMap<&str, &Node> =
            entries.iter().map(|(name, child)| (name.as_str(), child)).collect();
        for name in required.iter().filter(|name| !found.contains_key(**name)) {
            self.report(node, Fault::Missing((*name).to_owned()));
        }
        Some(found)
    }

    /// A word of a list of allowed ones.
    pub(super) fn word(&mut self, node: &Node, allowed: &[&'static str]) -> Option<&'static str> {
        let Branch::Leaf(Value::String(text)) = &node.branch else {
            self.invalid(node, format!("is {}, allowed: {}", kind(node), allowed.join(", ")));
            return None;
        };
        let found = allowed.iter().find(|word| **word == text.as_str()).copied();
        if found.is_none() {
            let nearest = nearest(text, allowed.iter().copied());
            let allowed = allowed.iter().map(|word| (*word).to_owned()).collect();
            self.report(node, Fault::UnknownWord { found: text.clone(), nearest, allowed });
        }
        found
    }

    /// A whole number within bounds.
    pub(super) fn number(&mut self, node: &Node, least: u64, most: u64) -> Option<u64> {
        let number = match &node.branch {
            Branch::Leaf(value) => value.as_u64(),
            _ => None,
        };
        let number = number.filter(|number| (least..=most).contains(number));
        if number.is_none() {
            self.invalid(
                node,
                format!("is {}, allowed are whole numbers from {least} to {most}", kind(node)),
            );
        }
        number
    }

    /// `true` or `false`.
    pub(super) fn switch(&mut self, node: &Node) -> Option<bool> {
        match &node.branch {
            Branch::Leaf(Value::Bool(on)) => Some(*on),
            _ => {
                self.invalid(node, format!("is {}, allowed is true or false", kind(node)));
                None
            }
        }
    }

    /// The items of a list that is not empty.
    pub(super) fn list<'n>(&mut self, node: &'n Node) -> &'n [Node] {
        match &node.branch {
            Branch::List(list) if !list.is_empty() => list,
            _ => {
                self.invalid(node, format!("is {}, and must be a list with at least one item", kind(node)));
                &[]
            }
        }
    }
}

/// What stands at a node, in a few words.
pub(super) fn kind(node: &Node) -> String {
    match &node.branch {
        Branch::Leaf(Value::Null) => "empty".to_owned(),
        Branch::Leaf(value) => value.to_string(),
        Branch::List(list) if list.is_empty() => "an empty list".to_owned(),
        Branch::List(_) => "a list".to_owned(),
        Branch::Map(_) => "a map".to_owned(),
    }
}

/// Kubernetes' rule for the value of a label; not empty.
pub(super) fn is_label_value(text: &str) -> bool {
    let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= 63
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
        && is_end(bytes.first())
        && is_end(bytes.last())
}
