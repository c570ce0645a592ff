//! Reads a config file's text, overlays flags and environment, and returns a `Config` or all problems. No I/O.

use gantry_api::ResourceName;
use serde_json::Value;
use serde_saphyr::DuplicateKeyPolicy;

use super::file::{File, MOVED, VALUED};
use super::problem::nearest;
use super::tree::{Branch, MAX_DEPTH, MAX_NODES, Node, Step, below, steps};
use super::{Config, Fault, Problem, Problems, resolve, schema};

/// Longest text that is read, which is the limit of a ConfigMap.
pub(super) const MAX_BYTES: usize = 1 << 20;
/// The key of a configuration of NVIDIA's MIG manager, which has a ConfigMap like the plugin's.
pub const MIG_MANAGERS: &str = "mig-configs";
/// Most problems that are reported at once.
pub(super) const MAX_PROBLEMS: usize = 32;

/// How unknown keys are treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strictness {
    /// As errors.
    #[default]
    Strict,
    /// As warnings. As with NVIDIA's plugin, keys may also be given twice, and in any case where that plugin accepts it.
    Lenient,
}

/// A value that overrides the file's.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Dotted path of its key.
    pub key: &'static str,
    /// The flag or variable of the value.
    pub origin: String,
    pub value: Value,
}

/// A configuration that can be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedConfig {
    /// The configuration.
    pub config: Config,
    /// Warnings for the operator.
    pub warnings: Vec<Problem>,
}

/// Reads `text`, YAML or JSON, called `source` in problems, and overlays `layers`, the last one topmost. Only the first YAML document
/// counts; another one with content is an error, or a warning with `Strictness::Lenient`.
///
/// # Errors
/// All problems of the file and the layers.
pub fn load(
    source: &str,
    text: &str,
    layers: &[Layer],
    strictness: Strictness,
) -> Result<LoadedConfig, Problems> {
    load_naming(source, text, layers, strictness, None)
}

/// [`load`] with a flag that names whole GPUs `gpu_resource`.
pub(super) fn load_naming(
    source: &str,
    text: &str,
    layers: &[Layer],
    strictness: Strictness,
    gpu_resource: Option<&ResourceName>,
) -> Result<LoadedConfig, Problems> {
    let mut problems = Vec::new();
    let mut warnings = Vec::new();
    let (document, second) = first_document(text);
    let mut tree = match tree(document, strictness) {
        Ok(tree) => tree,
        Err(problem) => {
            problems.push(problem);
            Node::empty()
        }
    };
    for (from, to) in MOVED {
        tree.move_key(from, to);
    }
    without_value(&tree, "", &mut problems);
    let known = schema::known();
    let unknown = match strictness {
        Strictness::Strict => &mut problems,
        Strictness::Lenient => &mut warnings,
    };
    prune(&mut tree, known, strictness, unknown);
    if second.is_some() {
        let text = "another YAML document begins here (after --- or ...), and only the first one counts; a config file is one document";
        unknown.push(Problem { line: second, at: String::new(), fault: Fault::Invalid(text.to_owned()) });
    }
    let (mut file, mut wrong) = typed(tree.clone(), known);
    if !layers.is_empty() {
        for layer in layers {
            tree.overlay(layer.key, &layer.origin, layer.value.clone());
        }
        let more;
        (file, more) = typed(tree.clone(), known);
        wrong.extend(more);
    }
    if !wrong.is_empty() {
        // The rest is checked nevertheless, so that all problems are reported at once.
        tree = tree.without(&wrong.iter().map(|problem| problem.at.as_str()).collect());
        (file, _) = typed(tree.clone(), known);
    }
    let (config, notes, contradictions) = resolve::resolve(file, &tree, gpu_resource);
    warnings.extend(notes);
    problems.extend(contradictions.into_iter().filter(|problem| {
        // A list may be empty only because its entries are wrong.
        matches!(problem.fault, Fault::NotServed(_))
            || !wrong.iter().any(|wrong| wrong.is_within(&problem.at))
    }));
    problems.append(&mut wrong);
    if problems.is_empty() {
        at_most(&mut warnings);
        return Ok(LoadedConfig { config, warnings });
    }
    problems.sort();
    problems.dedup();
    at_most(&mut problems);
    Err(Problems { source: source.to_owned(), list: problems })
}

/// Keeps the first problems, and adds that more follow.
pub(super) fn at_most(list: &mut Vec<Problem>) {
    if let Some(next) = list.get(MAX_PROBLEMS) {
        let more = Problem { line: next.line, at: String::new(), fault: Fault::More };
        list.truncate(MAX_PROBLEMS);
        list.push(more);
    }
}

/// The first YAML document of `text`, and the line of the first content after it. `---` and `...` at the beginning of a line end a
/// document, even inside a text of several lines.
pub(super) fn first_document(text: &str) -> (&str, Option<u64>) {
    let (mut at, mut begun, mut end) = (0, false, None);
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        let bare = line.trim_start_matches('\u{feff}');
        let marked = ["---", "..."].into_iter().find_map(|mark| bare.strip_prefix(mark));
        let marked = marked.filter(|rest| rest.chars().next().is_none_or(char::is_whitespace));
        let content = marked.unwrap_or(bare).trim();
        // A directive (%YAML 1.1) stands only before a document.
        let is_directive = content.starts_with('%') && (!begun || end.is_some());
        let is_empty = content.is_empty() || content.starts_with('#') || is_directive;
        if end.is_none() && begun && marked.is_some() {
            end = Some(at);
        }
        match end {
            Some(end) if !is_empty => return (&text[..end], Some(number)),
            Some(_) => {}
            None => begun |= !is_empty || (marked.is_some() && bare.starts_with('-')),
        }
        at += line.len();
    }
    (end.map_or(text, |end| &text[..end]), None)
}

/// The line, from 1, at which the YAML reader failed, if it reports one.
pub fn line_of(error: &serde_saphyr::Error) -> Option<u64> {
    error.location().map(|place| place.line()).filter(|line| *line > 0)
}

pub(super) fn tree(text: &str, strictness: Strictness) -> Result<Node, Problem> {
    let wrong = |line, text: String| Problem { line, at: String::new(), fault: Fault::Syntax(text) };
    if text.len() > MAX_BYTES {
        return Err(wrong(None, format!("{} bytes; {MAX_BYTES} are read", text.len())));
    }
    let repeated = match strictness {
        Strictness::Strict => DuplicateKeyPolicy::Error,
        Strictness::Lenient => DuplicateKeyPolicy::LastWins,
    };
    Node::read(text, repeated).map_err(|error| {
        let line = line_of(&error);
        let message = error.without_snippet().to_string();
        let message = message.lines().next().unwrap_or_default();
        // The line is printed in front.
        let message = message.split(" at line ").next().unwrap_or_default();
        let message = match message.strip_prefix("duplicate mapping key: ") {
            Some(rest) => {
                format!("the key {} is given twice", rest.split(", set ").next().unwrap_or_default())
            }
            None => limit(message).unwrap_or_else(|| message.to_owned()),
        };
        wrong(line, message)
    })
}

/// The message for an exceeded limit of the YAML reader.
fn limit(message: &str) -> Option<String> {
    let which = match message {
        "recursion limit exceeded" => "Depth",
        message => message.strip_prefix("budget breached: ")?,
    };
    let which = which.split([' ', '{', '(']).next().unwrap_or_default();
    Some(match which {
        "Depth" => format!("it is nested more than {MAX_DEPTH} levels deep"),
        "Nodes" => format!("it has more than {MAX_NODES} keys and values, all aliases (*name) written out"),
        "Aliases" | "AliasAnchorRatio" | "Events" | "ScalarBytes" | "MergeKeys" => {
            "it becomes too large when all aliases (*name) are written out; write the values instead"
                .to_owned()
        }
        _ => "it is too large".to_owned(),
    })
}

/// Reports keys that require a value and have none. `form` is the path of `node` with `[]` for every index.
fn without_value(node: &Node, form: &str, problems: &mut Vec<Problem>) {
    match &node.branch {
        Branch::Leaf(Value::Null) if VALUED.iter().any(|valued| valued.eq_ignore_ascii_case(form)) => {
            problems.push(Problem {
                line: node.line,
                at: node.at.clone(),
                fault: Fault::Invalid("the key has no value; write one, or leave the key out".to_owned()),
            });
        }
        Branch::Leaf(_) => {}
        Branch::List(list) => {
            let form = format!("{form}[]");
            for node in list {
                without_value(node, &form, problems);
            }
        }
        Branch::Map(entries) => {
            for (key, node) in entries {
                without_value(node, &below(form, key), problems);
            }
        }
    }
}

/// Removes keys that the schema does not have, and keys without a value, which mean nothing in Go either (except [`VALUED`]).
fn prune(node: &mut Node, known: &Value, strictness: Strictness, unknown: &mut Vec<Problem>) {
    let is_root = node.at.is_empty();
    if is_root && node.branch == Branch::Leaf(Value::Null) {
        node.branch = Branch::Map(Vec::new());
    }
    match &mut node.branch {
        Branch::Leaf(_) => {}
        Branch::List(list) => {
            if let Some(items) = schema::items(known) {
                for node in list {
                    prune(node, items, strictness, unknown);
                }
            }
        }
        Branch::Map(entries) => {
            entries.retain(|(_, node)| node.branch != Branch::Leaf(Value::Null));
            let Some(properties) = schema::properties(known) else {
                return;
            };
            let any_case = strictness == Strictness::Lenient && !takes_exact_keys(&node.at);
            entries.retain_mut(|(key, node)| {
                if any_case && let Some(name) = properties.keys().find(|name| name.eq_ignore_ascii_case(key))
                {
                    key.clone_from(name);
                }
                match properties.get(key) {
                    Some(known) => {
                        prune(node, known, strictness, unknown);
                        true
                    }
                    None if is_root && key == MIG_MANAGERS => {
                        unknown.push(Problem {
                            line: node.line,
                            at: node.at.clone(),
                            fault: Fault::NotServed(
                                "this is a configuration of NVIDIA's MIG manager (mig-parted), not of a device plugin"
                                    .to_owned(),
                            ),
                        });
                        false
                    }
                    None => {
                        let belongs = schema::places(key);
                        let neighbours = properties.keys().map(String::as_str);
                        unknown.push(Problem {
                            line: node.line,
                            at: node.at.clone(),
                            fault: Fault::UnknownKey {
                                // A key that exists elsewhere is no typing error.
                                nearest: nearest(key, neighbours).filter(|_| belongs.is_empty()),
                                belongs,
                                allowed: properties.keys().cloned().collect(),
                            },
                        });
                        false
                    }
                }
            });
        }
    }
}

/// Whether keys at the place `at` are case-sensitive in NVIDIA's plugin. It reads shared resources key by key, and all else by Go's
/// reader of structures, which ignores case.
fn takes_exact_keys(at: &str) -> bool {
    let at = at.to_ascii_lowercase();
    ["sharing.timeslicing", "sharing.mps"].into_iter().any(|shared| {
        let rest = at.strip_prefix(shared);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    })
}

/// The tree as typed values. A wrong value is reported and removed, and the rest is read again.
fn typed(mut tree: Node, known: &Value) -> (File, Vec<Problem>) {
    let mut problems: Vec<Problem> = Vec::new();
    loop {
        let misplaced = first_without_keys(&tree, known, &mut Vec::new());
        let (mut path, fault) = match misplaced {
            Some(misplaced) => misplaced,
            None => match serde_path_to_error::deserialize(tree.value()) {
                Ok(file) => return (file, problems),
                Err(error) => {
                    let error: serde_path_to_error::Error<serde_json::Error> = error;
                    let path = steps(error.path());
                    let fault = fault(&error.inner().to_string(), known, &path);
                    (path, fault)
                }
            },
        };
        let node = tree.nearest(&path);
        // A key whose wrong value was removed was reported already.
        let reported = matches!(&fault, Fault::Missing(name)
            if problems.iter().any(|problem| problem.at == below(&node.at, name)));
        if !reported {
            problems.push(Problem { line: node.line, at: node.at.clone(), fault });
        }
        if problems.len() == MAX_PROBLEMS {
            return (File::default(), problems);
        }
        // A list of a flag is one value: it is removed as a whole.
        while tree.take(&path).is_none() {
            if path.pop().is_none() {
                return (File::default(), problems);
            }
        }
    }
}

/// The first place with a value or a list instead of keys; serde would read a list as a section's fields in order.
fn first_without_keys(node: &Node, known: &Value, path: &mut Vec<Step>) -> Option<(Vec<Step>, Fault)> {
    match (&node.branch, schema::properties(known)) {
        (Branch::Map(entries), Some(properties)) => entries.iter().find_map(|(key, node)| {
            path.push(Step::Key(key.clone()));
            let found = first_without_keys(node, properties.get(key)?, path);
            path.pop();
            found
        }),
        (_, Some(properties)) => {
            let keys: Vec<&str> = properties.keys().map(String::as_str).collect();
            let fault = Fault::Invalid(format!("keys belong here, such as {}", keys.join(", ")));
            Some((path.clone(), fault))
        }
        (Branch::List(list), None) => {
            let items = schema::items(known)?;
            list.iter().enumerate().find_map(|(index, node)| {
                path.push(Step::Index(index));
                let found = first_without_keys(node, items, path);
                path.pop();
                found
            })
        }
        _ => None,
    }
}

/// The problem for serde's message about the place `path`.
fn fault(message: &str, known: &Value, path: &[Step]) -> Fault {
    if let Some(field) = message.strip_prefix("missing field `") {
        return Fault::Missing(field.trim_end_matches('`').to_owned());
    }
    let variant = message
        .strip_prefix("unknown variant `")
        .and_then(|rest| rest.split_once("`, expected "))
        .map(|(found, _)| found);
    let other = message
        .strip_prefix("invalid type: ")
        .or_else(|| message.strip_prefix("invalid value: "))
        .and_then(|rest| rest.split_once(", expected "));
    let found = match (variant, other) {
        (Some(found), _) => found.to_owned(),
        (None, Some((found, _))) => found.replace('`', ""),
        (None, None) => return Fault::Invalid(message.to_owned()),
    };
    let allowed = schema::words(known, path);
    if !allowed.is_empty() {
        return match variant {
            Some(_) => Fault::UnknownWord {
                nearest: nearest(&found, allowed.iter().map(String::as_str)),
                found,
                allowed,
            },
            None => {
                let allowed = allowed.join(", ");
                Fault::Invalid(format!("{} is no text; allowed: {allowed}", in_words(&found)))
            }
        };
    }
    let expected = match other {
        Some((_, "a boolean")) => "true or false".to_owned(),
        Some((_, "a sequence")) => {
            let entry = match schema::first_key(known, path) {
                Some(key) => format!("{key}: ..."),
                None => scalar(&found).unwrap_or("...").to_owned(),
            };
            format!("a list, each entry behind a dash: - {entry}")
        }
        Some((_, expected)) => expected.to_owned(),
        None => "something else".to_owned(),
    };
    Fault::Invalid(format!("{} is not allowed; write {expected}", in_words(&found)))
}

/// The name of a type that serde found.
fn in_words(found: &str) -> &str {
    match found {
        "sequence" => "a list",
        "map" => "a section of keys",
        other => other,
    }
}

/// The value that serde found, if it is a scalar.
fn scalar(found: &str) -> Option<&str> {
    let value = ["string ", "integer ", "boolean ", "floating point "]
        .iter()
        .find_map(|kind| found.strip_prefix(kind))?;
    Some(value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_where_its_first_document_ends() {
        for whole in [
            "",
            "a: 1\n",
            "---\na: 1",
            "--- {a: 1}\n",
            "# c\n\n%YAML 1.1\n---\na: 1\n",
            "\u{feff}---\na: 1\n",
            "a: |\n  ---\n  b\n",
            "---a: 1\n",
            "...\na: 1\n",
        ] {
            assert_eq!(first_document(whole), (whole, None), "{whole:?}");
        }
        for empty in ["---", "---\n", "---\n---\n", "...\n", "--- # c\n...\n---\n", "...\n\n# c\n", "---\r\n"]
        {
            let text = format!("a: 1\n{empty}");
            assert_eq!(first_document(&text), ("a: 1\n", None), "{text:?}");
        }
        assert_eq!(first_document("a: 1\n---\nb: 2\n"), ("a: 1\n", Some(3)));
        assert_eq!(first_document("a: 1\n--- b\n"), ("a: 1\n", Some(2)));
        assert_eq!(first_document("---\n---\nb: 2\n"), ("---\n", Some(3)));
        let directive = "--- a\n...\n# c\n%YAML 1.1\n---\n\nb: 2\n---\n";
        assert_eq!(first_document(directive), ("--- a\n", Some(7)));
    }
}
