//! The MIG layouts of NVIDIA's mig-parted, by name: which GPUs of a node are divided, and into what. The file is read
//! strictly. Whether a GPU has a profile is a question to its driver, not to the file.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use gantry_topology::machine::{MAX_GPUS, split_profile};
use serde_json::Value;

use crate::problem::{Fault, Problems, nearest};
use crate::read::{MAX_PROBLEMS, MIG_MANAGERS};
use crate::strict::{StrictReader, is_label_value, kind};
use crate::tree::{Branch, Node};

/// The version of the file.
const VERSION: &str = "v1";
/// Most MIG devices of one profile. No GPU holds as many.
const MAX_COUNT: u8 = 64;

/// The layouts of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigLayouts(BTreeMap<String, NamedLayout>);

/// A layout: what each GPU of a node is to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedLayout(Vec<LayoutEntry>);

/// What some GPUs are to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutEntry {
    /// PCI ids of the products that are meant; empty: every product.
    pub products: BTreeSet<PciId>,
    /// NVML's indices of the GPUs that are meant; `None`: all.
    pub gpus: Option<BTreeSet<u8>>,
    /// Number of MIG devices by profile; `None`: MIG mode is off.
    pub devices: Option<BTreeMap<String, u8>>,
}

/// A PCI device id with that of the vendor, as NVML and mig-parted write them: `0x20B010DE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciId(pub u32);

/// A name that no layout has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no layout {name:?}{}; there are: {}", near(nearest.as_deref()), there.join(", "))]
pub struct UnknownLayout {
    name: String,
    nearest: Option<String>,
    there: Vec<String>,
}

fn near(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!(", did you mean {name:?}?"))
}

impl FromStr for PciId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
        let id =
            digits.filter(|digits| digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        id.and_then(|digits| u32::from_str_radix(digits, 16).ok()).map(Self).ok_or_else(|| {
            format!("{text:?} is no PCI id of a product; write 0x, four digits for the device and 10DE, such as 0x20B010DE")
        })
    }
}

impl MigLayouts {
    /// Reads the text of a file, YAML or JSON, called `source` in problems.
    ///
    /// # Errors
    /// All problems of the file.
    pub fn read(source: &str, text: &str) -> Result<Self, Problems> {
        StrictReader::read(source, text, |reader, root| Self(Reader(reader).file(root)))
    }

    /// The layout of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<&NamedLayout, UnknownLayout> {
        self.0.get(name).ok_or_else(|| UnknownLayout {
            name: name.to_owned(),
            nearest: nearest(name, self.0.keys().map(String::as_str)),
            there: self.0.keys().take(MAX_PROBLEMS).cloned().collect(),
        })
    }

    /// All layouts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &NamedLayout)> {
        self.0.iter().map(|(name, layout)| (name.as_str(), layout))
    }
}

impl NamedLayout {
    /// The entry for the GPU at NVML's index `index`; `None` if the layout does not mention it. Entries that select the
    /// same GPU are equal.
    pub fn entry(&self, index: u8, product: PciId) -> Option<&LayoutEntry> {
        self.0.iter().find(|entry| {
            (entry.products.is_empty() || entry.products.contains(&product))
                && entry.gpus.as_ref().is_none_or(|gpus| gpus.contains(&index))
        })
    }

    /// The indices that entries list.
    pub fn listed(&self) -> BTreeSet<u8> {
        self.0.iter().filter_map(|entry| entry.gpus.as_ref()).flatten().copied().collect()
    }
}

impl LayoutEntry {
    /// Whether some GPU may be selected by both.
    fn meets(&self, other: &Self) -> bool {
        let products = self.products.is_empty()
            || other.products.is_empty()
            || !self.products.is_disjoint(&other.products);
        let gpus = match (&self.gpus, &other.gpus) {
            (Some(these), Some(those)) => !these.is_disjoint(those),
            (None, Some(some)) | (Some(some), None) => !some.is_empty(),
            (None, None) => true,
        };
        products && gpus
    }
}

/// Reads the layouts of a file.
struct Reader<'r>(&'r mut StrictReader);

impl Reader<'_> {
    fn file(&mut self, root: &Node) -> BTreeMap<String, NamedLayout> {
        let keys = ["version", MIG_MANAGERS];
        let Some(found) = self.0.keys(root, &keys, &keys) else {
            return BTreeMap::new();
        };
        if let Some(version) = found.get("version")
            && version.value() != VERSION
        {
            self.0.invalid(
                version,
                format!("{} is not a version that is read; write {VERSION}", version.value()),
            );
        }
        let Some(configs) = found.get(MIG_MANAGERS) else {
            return BTreeMap::new();
        };
        let Branch::Map(layouts) = &configs.branch else {
            self.0.invalid(configs, format!("is {}, and must be a map of layouts by name", kind(configs)));
            return BTreeMap::new();
        };
        if layouts.is_empty() {
            self.0.invalid(configs, "is empty; name at least one layout");
        }
        layouts.iter().map(|(name, node)| (name.clone(), NamedLayout(self.layout(name, node)))).collect()
    }

    fn layout(&mut self, name: &str, node: &Node) -> Vec<LayoutEntry> {
        if !is_label_value(name) {
            let text = "is no value of a label, by which a node chooses it: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends";
            self.0.invalid(node, text);
        }
        let Branch::List(list) = &node.branch else {
            self.0.invalid(
                node,
                format!("is {}, and must be a list of entries with devices and mig-enabled", kind(node)),
            );
            return Vec::new();
        };
        if list.is_empty() {
            self.0.invalid(node, "is empty; a layout has at least one entry");
        }
        let entries: Vec<(&Node, LayoutEntry)> =
            list.iter().filter_map(|node| Some((node, self.entry(node)?))).collect();
        for (at, (node, entry)) in entries.iter().enumerate() {
            let earlier = entries.iter().take(at);
            let other = earlier
                .filter(|(_, other)| other.devices != entry.devices)
                .find(|(_, other)| other.meets(entry));
            if let Some((other, _)) = other {
                let text = format!("selects GPUs that {} selects too, for another layout", other.at);
                self.0.report(node, Fault::Contradiction(text));
            }
        }
        entries.into_iter().map(|(_, entry)| entry).collect()
    }

    fn entry(&mut self, node: &Node) -> Option<LayoutEntry> {
        let keys = ["device-filter", "devices", "mig-enabled", "mig-devices"];
        let found = self.0.keys(node, &keys, &["devices", "mig-enabled"])?;
        let products = found.get("device-filter").map_or_else(BTreeSet::new, |node| self.products(node));
        let gpus = found.get("devices").and_then(|node| self.gpus(node));
        let enabled = found.get("mig-enabled")?;
        let devices = found.get("mig-devices").map(|node| (node, self.devices(node)));
        let devices = match (&enabled.branch, devices) {
            (Branch::Leaf(Value::Bool(true)), Some((_, devices))) => Some(devices),
            (Branch::Leaf(Value::Bool(true)), None) => {
                self.0.report(node, Fault::Missing("mig-devices".to_owned()));
                None
            }
            (Branch::Leaf(Value::Bool(false)), Some((devices, wanted))) if !wanted.is_empty() => {
                let text = "names MIG devices, and mig-enabled is false; leave it out, or enable MIG";
                self.0.report(devices, Fault::Contradiction(text.to_owned()));
                None
            }
            (Branch::Leaf(Value::Bool(false)), _) => None,
            _ => {
                self.0.invalid(enabled, format!("is {}, allowed is true or false", enabled.value()));
                None
            }
        };
        Some(LayoutEntry { products, gpus, devices })
    }

    /// PCI ids: one, or a list.
    fn products(&mut self, node: &Node) -> BTreeSet<PciId> {
        let nodes = match &node.branch {
            Branch::List(list) => list.iter().collect(),
            _ => vec![node],
        };
        if nodes.is_empty() {
            self.0.invalid(
                node,
                "is an empty list, which selects no GPU; leave it out to select every product",
            );
        }
        let mut ids = BTreeSet::new();
        for node in nodes {
            match &node.branch {
                Branch::Leaf(Value::String(text)) => match text.parse() {
                    Ok(id) => _ = ids.insert(id),
                    Err(problem) => self.0.invalid(node, problem),
                },
                _ => self.0.invalid(
                    node,
                    format!("is {}, and must be a PCI id in quotes, such as \"0x20B010DE\"", kind(node)),
                ),
            }
        }
        ids
    }

    /// `all`, or a list of indices.
    fn gpus(&mut self, node: &Node) -> Option<BTreeSet<u8>> {
        match &node.branch {
            Branch::Leaf(Value::String(word)) if word == "all" => None,
            Branch::List(list) => {
                let mut indices = BTreeSet::new();
                for node in list {
                    let index = match &node.branch {
                        Branch::Leaf(value) => value.as_u64().and_then(|index| u8::try_from(index).ok()),
                        _ => None,
                    };
                    match index.filter(|index| usize::from(*index) < MAX_GPUS) {
                        Some(index) => _ = indices.insert(index),
                        None => self.0.invalid(
                            node,
                            format!(
                                "is {}, allowed are indices of GPUs from 0 to {}",
                                node.value(),
                                MAX_GPUS - 1
                            ),
                        ),
                    }
                }
                Some(indices)
            }
            _ => {
                self.0.invalid(node, format!("is {}, allowed is all or a list of GPU indices", node.value()));
                None
            }
        }
    }

    /// Counts of MIG devices by profile.
    fn devices(&mut self, node: &Node) -> BTreeMap<String, u8> {
        let Branch::Map(entries) = &node.branch else {
            self.0.invalid(
                node,
                format!(
                    "is {}, and must be a map of counts by profile, such as {{\"1g.5gb\": 7}}",
                    kind(node)
                ),
            );
            return BTreeMap::new();
        };
        let mut devices = BTreeMap::new();
        for (profile, node) in entries {
            if !is_profile(profile) {
                self.0.invalid(node, format!("{profile:?} is no MIG profile; write one as nvidia-smi mig -lgip prints it, such as 1g.5gb, 1g.5gb+me or 1c.3g.20gb"));
            }
            let count = match &node.branch {
                Branch::Leaf(value) => value.as_u64().and_then(|count| u8::try_from(count).ok()),
                _ => None,
            };
            match count.filter(|count| *count <= MAX_COUNT) {
                Some(0) => {}
                Some(count) => _ = devices.insert(profile.clone(), count),
                None => self.0.invalid(
                    node,
                    format!("is {}, allowed are whole numbers from 0 to {MAX_COUNT}", node.value()),
                ),
            }
        }
        devices
    }
}

/// Whether the text has the form of a profile: `1g.5gb`, `1c.3g.20gb`, `1g.5gb+me`, `1g.24gb-me`.
fn is_profile(text: &str) -> bool {
    let (plain, suffix) = split_profile(text);
    let number = |text: &str| (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let instance = match plain.split_once("c.") {
        Some((compute, instance)) if number(compute) => instance,
        Some(_) => return false,
        None => plain,
    };
    let attributes = suffix.get(1..).unwrap_or_default();
    let is_attribute = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.' || byte == b',';
    let suffixed = suffix.is_empty() || !attributes.is_empty() && attributes.bytes().all(is_attribute);
    instance
        .strip_suffix("gb")
        .and_then(|rest| rest.split_once("g."))
        .is_some_and(|(slices, memory)| number(slices) && number(memory))
        && suffixed
}

#[cfg(test)]
mod tests;
