//! A config file as a tree with the place of every value. Flags and environment are overlaid here, before values have types, so that the
//! same rules hold for all of them and every problem names its origin.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use serde_saphyr::Spanned;

/// Deepest nesting that is read.
pub(super) const MAX_DEPTH: usize = 32;
/// Most keys and values of a file with aliases written out. Each needs some 450 bytes while the file is read, and the pod has 64 MiB.
pub(super) const MAX_NODES: usize = 50_000;

/// A value and its origin.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    /// Key path in the file, or the flag or variable.
    pub(super) at: String,
    /// Line of the file.
    pub(super) line: Option<u64>,
    pub(super) branch: Branch,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Branch {
    Leaf(Value),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    /// An empty file.
    pub(super) fn empty() -> Self {
        Self { at: String::new(), line: None, branch: Branch::Map(Vec::new()) }
    }

    /// Reads YAML or JSON; `repeated` is the policy for a key that is given twice.
    pub(super) fn read(
        text: &str,
        repeated: serde_saphyr::DuplicateKeyPolicy,
    ) -> Result<Self, serde_saphyr::Error> {
        let mut options = serde_saphyr::Options::default();
        options.with_snippet = false;
        // NVIDIA's plugin reads YAML 1.1, in which 010 is 8.
        options.legacy_octal_numbers = true;
        // Config files are seven levels deep. A hostile file could exhaust the stack.
        let mut budget = serde_saphyr::Budget::default();
        budget.max_depth = MAX_DEPTH;
        budget.flow_nesting_limit = MAX_DEPTH;
        budget.max_nodes = MAX_NODES;
        options.budget = Some(budget);
        options.duplicate_keys = repeated;
        let raw: Option<Spanned<Raw>> = serde_saphyr::from_str_with_options(text, options)?;
        Ok(match raw {
            None => Self::empty(),
            Some(raw) => Self::place(raw, String::new()),
        })
    }

    fn place(raw: Spanned<Raw>, at: String) -> Self {
        let line = Some(raw.referenced.line()).filter(|line| *line > 0);
        let branch = match raw.value {
            Raw::Leaf(value) => Branch::Leaf(value),
            Raw::List(list) => Branch::List(
                list.into_iter()
                    .enumerate()
                    .map(|(index, raw)| Self::place(raw, format!("{at}[{index}]")))
                    .collect(),
            ),
            Raw::Map(raw) => {
                // If a key may be given twice, the last one counts.
                let mut entries = BTreeMap::new();
                for (key, raw) in raw {
                    let mut node = Self::place(raw, below(&at, &key.value));
                    // The line of the key, even if its value begins below.
                    node.line = Some(key.referenced.line()).filter(|line| *line > 0);
                    entries.insert(key.value, node);
                }
                Branch::Map(entries.into_iter().collect())
            }
        };
        Self { at, line, branch }
    }

    /// Sets the dotted `key` to `value` of the flag or variable `origin`.
    pub(super) fn overlay(&mut self, key: &str, origin: &str, value: Value) {
        let node = Self { at: origin.to_owned(), line: None, branch: Branch::Leaf(value) };
        self.put(key, node);
    }

    /// Moves the value of the dotted key `from` to `to`, unless `to` has one. Problems still name the original place.
    pub(super) fn move_key(&mut self, from: &str, to: &str) {
        let path =
            |key: &str| -> Vec<Step> { key.split('.').map(|name| Step::Key(name.to_owned())).collect() };
        if self.nearest(&path(to)).at != to
            && let Some(node) = self.take(&path(from))
        {
            self.put(to, node);
        }
    }

    fn put(&mut self, key: &str, put: Self) {
        let (first, rest) = match key.split_once('.') {
            Some((first, rest)) => (first, Some(rest)),
            None => (key, None),
        };
        if !matches!(self.branch, Branch::Map(_)) {
            self.branch = Branch::Map(Vec::new());
        }
        let at = below(&self.at, first);
        let Branch::Map(entries) = &mut self.branch else {
            return;
        };
        let index = entries.iter().position(|(name, _)| name == first).unwrap_or_else(|| {
            entries.push((first.to_owned(), Self { at, ..Self::empty() }));
            entries.len() - 1
        });
        let Some((_, node)) = entries.get_mut(index) else {
            return;
        };
        match rest {
            Some(rest) => node.put(rest, put),
            None => *node = put,
        }
    }

    /// The node at a path of keys and indices, or the nearest one above it.
    pub(super) fn nearest(&self, path: &[Step]) -> &Self {
        let Some((step, rest)) = path.split_first() else {
            return self;
        };
        let child = match (&self.branch, step) {
            (Branch::Map(entries), Step::Key(key)) => {
                entries.iter().find_map(|(name, node)| (name == key).then_some(node))
            }
            (Branch::List(list), Step::Index(index)) => list.get(*index),
            _ => None,
        };
        child.map_or(self, |child| child.nearest(rest))
    }

    /// Removes the node at `path`; `None` if there is none, or if it is the root.
    pub(super) fn take(&mut self, path: &[Step]) -> Option<Self> {
        let (step, rest) = path.split_first()?;
        match (&mut self.branch, step) {
            (Branch::Map(entries), Step::Key(key)) => {
                let index = entries.iter().position(|(name, _)| name == key)?;
                match rest {
                    [] => Some(entries.remove(index).1),
                    rest => entries.get_mut(index)?.1.take(rest),
                }
            }
            (Branch::List(list), Step::Index(index)) => match rest {
                [] => (*index < list.len()).then(|| list.remove(*index)),
                rest => list.get_mut(*index)?.take(rest),
            },
            _ => None,
        }
    }

    /// The tree without the values at `places`, and without list entries that contain one: the remaining entries are complete.
    pub(super) fn without(mut self, places: &BTreeSet<&str>) -> Self {
        if self.at.is_empty() && places.contains("") {
            return Self::empty();
        }
        self.leave_out(places);
        self
    }

    fn leave_out(&mut self, places: &BTreeSet<&str>) {
        match &mut self.branch {
            Branch::Leaf(_) => {}
            Branch::List(list) => list.retain(|node| !node.has(places)),
            Branch::Map(entries) => {
                entries.retain(|(_, node)| !places.contains(node.at.as_str()));
                for (_, node) in entries {
                    node.leave_out(places);
                }
            }
        }
    }

    fn has(&self, places: &BTreeSet<&str>) -> bool {
        places.contains(self.at.as_str())
            || match &self.branch {
                Branch::Leaf(_) => false,
                Branch::List(list) => list.iter().any(|node| node.has(places)),
                Branch::Map(entries) => entries.iter().any(|(_, node)| node.has(places)),
            }
    }

    /// The tree without its places.
    pub(super) fn value(&self) -> Value {
        match &self.branch {
            Branch::Leaf(value) => value.clone(),
            Branch::List(list) => list.iter().map(Self::value).collect(),
            Branch::Map(entries) => Value::Object(
                entries.iter().map(|(key, node)| (key.clone(), node.value())).collect::<Map<_, _>>(),
            ),
        }
    }
}

/// One step down a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// The steps of an error's path, up to the first that is neither a key nor an index.
pub(super) fn steps(path: &serde_path_to_error::Path) -> Vec<Step> {
    path.iter()
        .map_while(|segment| match segment {
            Segment::Seq { index } => Some(Step::Index(*index)),
            Segment::Map { key } => Some(Step::Key(key.clone())),
            Segment::Enum { .. } | Segment::Unknown => None,
        })
        .collect()
}

/// The dotted path of `key` below `at`.
pub(super) fn below(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

/// A tree of the YAML reader.
enum Raw {
    Leaf(Value),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<String>, Spanned<Raw>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Leaf(value.into()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Leaf(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Leaf(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Leaf(value.into()))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Leaf(value.into()))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Raw, E> {
        Ok(Raw::Leaf(Value::Null))
    }

    fn visit_none<E: de::Error>(self) -> Result<Raw, E> {
        Ok(Raw::Leaf(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = access.next_element()? {
            list.push(value);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}
