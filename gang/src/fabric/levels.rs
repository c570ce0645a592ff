//! The levels of the fabric as the operator writes them: presets and `name=label` items. Strict: what is not understood is refused.

use std::sync::Arc;

/// The levels of the fabric, from the largest domain to the smallest. The node itself is the last, and is not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Levels(pub Vec<Level>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// What people call it, such as `rack`.
    pub name: Arc<str>,
    /// The node label whose value is the domain.
    pub label: Arc<str>,
}

/// What a gang can be asked to be within.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// One domain of a level: an index into [`Levels`].
    Level(usize),
    Node,
}

/// What was written for `--fabric` is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LevelsError {
    /// Neither a preset nor `name=label`.
    #[error("{item:?} is neither a preset ({}) nor written name=label{}", presets(), meant(near))]
    Unknown {
        /// What was written.
        item: String,
        /// The nearest preset.
        near: Option<&'static str>,
    },
    /// A name that is none.
    #[error(
        "{name:?} in {item:?} is no name of a level: write lower-case letters, digits and dashes, and not \"node\" or \"cluster\", which every fabric has"
    )]
    Name {
        /// What was written.
        item: String,
        name: String,
    },
    /// A label that is none.
    #[error("{label:?} in {item:?} is no label of a node; write one such as topology.kubernetes.io/zone")]
    Label {
        /// What was written.
        item: String,
        label: String,
    },
    /// Twice the same name.
    #[error(
        "two levels are called {name}: {first} and {second}; name one of them otherwise, with name=label"
    )]
    SameName {
        name: Arc<str>,
        /// Label of the first.
        first: Arc<str>,
        /// Label of the second.
        second: Arc<str>,
    },
    /// Twice the same label.
    #[error("the label {label} makes two levels, {first} and {second}; leave one of them out")]
    SameLabel {
        label: Arc<str>,
        /// Name of the first.
        first: Arc<str>,
        /// Name of the second.
        second: Arc<str>,
    },
}

/// There is no such level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no level {wanted:?} of the fabric; {}{}", have(levels), meant(near))]
pub struct UnknownLevel {
    /// What was asked for.
    pub wanted: String,
    /// Names of the levels that there are, the node included.
    pub levels: Vec<Arc<str>>,
    /// The one that was perhaps meant.
    pub near: Option<Arc<str>>,
}

/// The presets, and the levels of each, largest first: name and label.
const PRESETS: [(&str, &[(&str, &str)]); 8] = [
    // NVIDIA Topograph: tier 0 is the switch next to the node; the accelerated domain is an NVLink one.
    (
        "topograph",
        &[
            ("tier-2", "fabric.topograph.run/tier-2"),
            ("tier-1", "fabric.topograph.run/tier-1"),
            ("tier-0", "fabric.topograph.run/tier-0"),
            ("domain", "accelerator.topograph.run/domain"),
            ("sub-domain", "accelerator.topograph.run/sub-domain"),
        ],
    ),
    // Topograph of former releases: a block is the switches next to the nodes, the accelerator their NVLink domain.
    (
        "topograph-old",
        &[
            ("datacenter", "network.topology.nvidia.com/datacenter"),
            ("spine", "network.topology.nvidia.com/spine"),
            ("block", "network.topology.nvidia.com/block"),
            ("accelerator", "network.topology.nvidia.com/accelerator"),
        ],
    ),
    // EC2: layer 1 is the spine, layer 3 the leaf.
    (
        "aws",
        &[
            ("layer-1", "topology.k8s.aws/network-node-layer-1"),
            ("layer-2", "topology.k8s.aws/network-node-layer-2"),
            ("layer-3", "topology.k8s.aws/network-node-layer-3"),
        ],
    ),
    (
        "gke",
        &[
            ("block", "cloud.google.com/gce-topology-block"),
            ("subblock", "cloud.google.com/gce-topology-subblock"),
            ("host", "cloud.google.com/gce-topology-host"),
        ],
    ),
    (
        "oci",
        &[
            ("network-block", "oci.oraclecloud.com/host.network_block_id"),
            ("rack", "oci.oraclecloud.com/host.rack_id"),
        ],
    ),
    // NVIDIA's plugin: cluster UUID and clique of a multi-node NVLink domain.
    ("nvlink", &[("clique", "nvidia.com/gpu.clique")]),
    ("zone", &[("zone", "topology.kubernetes.io/zone")]),
    ("zone-rack", &[("zone", "topology.kubernetes.io/zone"), ("rack", "topology.kubernetes.io/rack")]),
];

/// The label that makes of every node a domain.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Names that stand for what every fabric has.
pub const NODE: &str = "node";
const CLUSTER: &str = "cluster";

impl Levels {
    /// Reads the levels as the operator writes them: presets and `name=label` items, separated by commas, the largest domain first. Nothing
    /// means that there are none: the cluster is one domain.
    ///
    /// # Errors
    /// The first item that is not understood, or two levels of one name or label.
    pub fn parse(text: &str) -> Result<Self, LevelsError> {
        let mut levels = Self::default();
        if text.trim().is_empty() {
            return Ok(levels);
        }
        for item in text.split(',').map(str::trim) {
            if let Some((name, label)) = item.split_once('=') {
                levels.push(explicit(item, name.trim(), label.trim())?)?;
                continue;
            }
            let Some((_, preset)) = PRESETS.iter().find(|(name, _)| *name == item) else {
                let names = PRESETS.iter().map(|(name, _)| *name);
                return Err(LevelsError::Unknown { item: item.to_owned(), near: nearest(item, names) });
            };
            for (name, label) in *preset {
                levels.push(Level { name: (*name).into(), label: (*label).into() })?;
            }
        }
        Ok(levels)
    }

    /// What the operator writes to make a level of a node label: the smallest preset that has it, or `name=label`. `None` for what can be no
    /// label with a domain.
    pub fn item_for(label: &str) -> Option<String> {
        let has = |levels: &[(&str, &str)]| levels.iter().any(|(_, of)| *of == label);
        let presets = PRESETS.iter().filter(|(_, levels)| has(levels));
        if let Some((preset, _)) = presets.min_by_key(|(_, levels)| levels.len()) {
            return Some((*preset).to_owned());
        }
        let (_, name) = label.split_once('/').filter(|_| is_label(label))?;
        let name = name.to_ascii_lowercase().replace(['.', '_'], "-");
        let item = format!("{name}={label}");
        Some(if Self::parse(&item).is_ok() { item } else { format!("level={label}") })
    }

    /// The domains of a node for people, such as `zone a / rack r1`; empty without levels. `value` reads a label.
    pub fn path_of<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> String {
        let parts = self.0.iter().map(|level| {
            let value = value(&level.label).unwrap_or("(no label)");
            format!("{} {value}", level.name)
        });
        parts.collect::<Vec<_>>().join(" / ")
    }

    fn push(&mut self, level: Level) -> Result<(), LevelsError> {
        for known in &self.0 {
            if known.label == level.label {
                return Err(LevelsError::SameLabel {
                    label: level.label,
                    first: Arc::clone(&known.name),
                    second: level.name,
                });
            }
            if known.name == level.name {
                return Err(LevelsError::SameName {
                    name: level.name,
                    first: Arc::clone(&known.label),
                    second: level.label,
                });
            }
        }
        self.0.push(level);
        Ok(())
    }

    /// The requested level, by its name or its label. The node is one too, by the name `node` or its hostname label.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(&self, wanted: &str) -> Result<Scope, UnknownLevel> {
        let level = self.0.iter().position(|level| *level.name == *wanted || *level.label == *wanted);
        match level {
            Some(level) => Ok(Scope::Level(level)),
            None if wanted == NODE || wanted == HOSTNAME => Ok(Scope::Node),
            None => {
                let node: Arc<str> = NODE.into();
                let names = self.0.iter().map(|level| &level.name).chain([&node]);
                let all = self.0.iter().flat_map(|level| [&level.name, &level.label]);
                Err(UnknownLevel {
                    wanted: wanted.to_owned(),
                    near: nearest(wanted, all.chain([&node]).map(|name| &**name)).map(Arc::from),
                    levels: names.cloned().collect(),
                })
            }
        }
    }
}

fn explicit(item: &str, name: &str, label: &str) -> Result<Level, LevelsError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let named = !name.is_empty()
        && name.chars().all(|c| plain(c) || c == '-')
        && name.starts_with(plain)
        && name.ends_with(plain);
    if !named || name == NODE || name == CLUSTER {
        return Err(LevelsError::Name { item: item.to_owned(), name: name.to_owned() });
    }
    if !is_label(label) {
        return Err(LevelsError::Label { item: item.to_owned(), label: label.to_owned() });
    }
    Ok(Level { name: name.into(), label: label.into() })
}

/// Whether something may be the key of a label: an optional domain, and a name of at most 63 letters, digits, `-`, `_` and `.`.
fn is_label(key: &str) -> bool {
    let (domain, name) = key.split_once('/').map_or((None, key), |(domain, name)| (Some(domain), name));
    let ends = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    let domain = domain.is_none_or(|domain| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
        domain.len() <= 253 && ends(domain) && domain.chars().all(inner)
    });
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    domain && name.len() <= 63 && ends(name) && name.chars().all(inner)
}

fn nearest<'a>(written: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let lower = written.to_lowercase();
    let near = names.map(|name| (strsim::damerau_levenshtein(name, &lower), name)).min()?;
    (near.0 <= 2 || near.0 * 3 <= near.1.len()).then_some(near.1)
}

fn presets() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

fn have(levels: &[Arc<str>]) -> String {
    let names: Vec<&str> = levels.iter().map(|name| &**name).collect();
    format!("levels are {}", names.join(", "))
}

fn meant(near: &Option<impl AsRef<str>>) -> String {
    match near {
        Some(near) => format!("; did you mean {}?", near.as_ref()),
        None => String::new(),
    }
}
