//! What a person may want to know of a configuration that can be served: what it means here and not with NVIDIA's plugin, and what is a
//! slip more often than a choice. A pure function of the configuration; each note has the place of the key that it is about.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use gantry_api::{ResourceName, names};

use super::problem::nearest;
use super::sharing::{mig_resource, spelled};
use super::tree::Step;
use super::{Config, MOST_DEVICES, MigStrategy, Replicated, ResourcePattern, SharedOf, TimeSlicing};

/// How MIG devices are called that no pattern names.
const MIG_RESOURCES: &str = "nvidia.com/mig-<profile>";
/// How many names a note lists at most.
const MOST_LISTED: usize = 32;

/// A note for people, and the key that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) path: Vec<Step>,
    pub(super) text: String,
}

/// What there is to tell about `config`, the entries one after the other, at most one note of a kind for each key.
/// `gpu_resource` is what whole GPUs are called besides, whatever the file says. Looks at each name once, for a ConfigMap has room for tens
/// of thousands of them; a note is made when it is asked for.
pub(super) fn notes<'a>(
    config: &'a Config,
    gpu_resource: Option<&'a ResourceName>,
) -> impl Iterator<Item = Note> + 'a {
    let given = Rc::new(Given::new(config, gpu_resource));
    let of_entries = config.time_slicing.iter().flat_map({
        let given = Rc::clone(&given);
        move |sharing| {
            let given = Rc::clone(&given);
            let entries = sharing.resources.iter().enumerate();
            entries.flat_map(move |(index, entry)| {
                let notes = [
                    absent_mig(config, &given, index, entry),
                    absent_name(&given, index, entry),
                    renamed(&given, index, entry),
                    replicas(index, entry),
                    rename(sharing, index, entry),
                    devices(sharing, index, entry),
                ];
                notes.into_iter().flatten()
            })
        }
    });
    patterns(config)
        .chain(names_of_gpus(config, given))
        .chain(of_entries)
}

/// The names that a configuration gives to devices, to be looked up.
struct Given<'a> {
    /// What whole GPUs are called that a flag or the pattern `*` renames.
    gpus: Option<&'a ResourceName>,
    /// Names by the patterns of GPUs, and of MIG devices.
    of_gpus: HashSet<&'a str>,
    /// See [`Given::of_gpus`].
    of_mig: HashSet<&'a str>,
    /// Every name that devices have before they are shared, but for those of MIG devices that no pattern names: the first ones, to be
    /// listed, and all.
    listed: Vec<&'a str>,
    all: HashSet<&'a str>,
    /// By a name that devices would have without `resources`: the first pattern that takes some of them away, its section and position,
    /// of those whose own name no entry shares.
    taken: HashMap<ResourceName, (&'static str, usize, &'a ResourceName)>,
}

impl<'a> Given<'a> {
    fn new(config: &'a Config, gpu_resource: Option<&'a ResourceName>) -> Self {
        let matches_all = config.gpu_patterns.iter().find(|entry| entry.pattern == "*");
        let names = |patterns: &'a [ResourcePattern]| -> HashSet<&'a str> {
            patterns.iter().map(|entry| entry.name.as_str()).collect()
        };
        // What a pattern names that every GPU matches is called so; by `single` MIG devices are called as their GPUs are.
        let is_default = matches_all.is_none() && gpu_resource.is_none();
        let patterns = config.gpu_patterns.iter().chain(&config.mig_patterns);
        let by_default = is_default.then_some(names::GPU_RESOURCE);
        let names_there = by_default
            .into_iter()
            .chain(patterns.map(|entry| entry.name.as_str()))
            .chain(gpu_resource.map(ResourceName::as_str));
        let mut all = HashSet::new();
        let mut listed: Vec<&str> = names_there.filter(|name| all.insert(*name)).collect();
        listed.truncate(MOST_LISTED);
        Self {
            gpus: matches_all.map(|entry| &entry.name).or(gpu_resource),
            of_gpus: names(&config.gpu_patterns),
            of_mig: names(&config.mig_patterns),
            listed,
            all,
            taken: taken(config),
        }
    }

    /// Whether a resource is of MIG devices, as far as its name tells.
    fn is_mig(&self, name: &ResourceName) -> bool {
        self.of_mig.contains(name.as_str()) || name.as_str().contains("/mig-")
    }
}

/// See [`Given::taken`].
fn taken(config: &Config) -> HashMap<ResourceName, (&'static str, usize, &ResourceName)> {
    let entries = config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
    let shared: HashSet<&ResourceName> = entries.map(|entry| &entry.name).collect();
    let mut taken = HashMap::new();
    for (section, patterns) in [("gpus", &config.gpu_patterns), ("mig", &config.mig_patterns)] {
        for (position, pattern) in patterns.iter().enumerate() {
            // Of GPUs by `*` nothing keeps its name, which is told of as a name that nothing has.
            let is_all = section == "gpus" && pattern.pattern == "*";
            let base = nvidias(config.mig_strategy, section == "mig", pattern);
            if let Some(base) = base.filter(|_| !is_all && !shared.contains(&pattern.name)) {
                taken.entry(base).or_insert((section, position, &pattern.name));
            }
        }
    }
    taken
}

/// NVIDIA's plugin drops the section `resources`: whoever comes from it with such a file asks for names that are served no longer.
fn patterns(config: &Config) -> impl Iterator<Item = Note> {
    let sections = [("gpus", &config.gpu_patterns), ("mig", &config.mig_patterns)];
    let entries = sections
        .into_iter()
        .flat_map(|(section, patterns)| patterns.iter().enumerate().map(move |entry| (section, entry)));
    entries.filter_map(|(section, (index, entry))| {
        let theirs = nvidias(config.mig_strategy, section == "mig", entry)?;
        if theirs == entry.name {
            return None;
        }
        let left = if section == "gpus" && entry.pattern == "*" && !is_served(config, &theirs) {
            format!(", and nothing is called {theirs}")
        } else {
            String::new()
        };
        Some(Note {
            path: [key("resources"), key(section), Step::Index(index)].into(),
            text: format!(
                "NVIDIA's plugin ignores this and serves {theirs}; here pods must ask for {} to get devices that match {:?}{left}",
                entry.name, entry.pattern
            ),
        })
    })
}

/// What NVIDIA's plugin calls what an entry of `resources` matches; `None` where it serves nothing of the kind.
fn nvidias(strategy: MigStrategy, is_mig: bool, entry: &ResourcePattern) -> Option<ResourceName> {
    match (is_mig, strategy) {
        (true, MigStrategy::None) => None,
        (true, MigStrategy::Mixed) => {
            Some(format!("{}/mig-{}", names::RESOURCE_DOMAIN, spelled(&entry.pattern)).into())
        }
        (false, _) | (true, MigStrategy::Single) => Some(names::GPU_RESOURCE.into()),
    }
}

/// Whether something else than the patterns `*` of GPUs is given this name.
fn is_served(config: &Config, name: &ResourceName) -> bool {
    let patterns = config.gpu_patterns.iter().chain(&config.mig_patterns);
    let entries = config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
    let mut given = patterns
        .map(|entry| &entry.name)
        .chain(entries.filter_map(|entry| entry.rename.as_ref()));
    given.any(|given| given == name)
}

/// Under `mixed` GPUs and MIG devices are served side by side: with one name for both, a pod cannot tell which it gets.
fn names_of_gpus<'a>(config: &'a Config, given: Rc<Given<'a>>) -> impl Iterator<Item = Note> + 'a {
    let by_default = config.gpu_patterns.iter().all(|entry| entry.pattern != "*");
    let patterns = config.mig_patterns.iter().enumerate().map(|(index, entry)| {
        let path = [key("resources"), key("mig"), Step::Index(index), key("name")];
        (path.to_vec(), &entry.name)
    });
    let entries = config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
    let renames = entries.enumerate().filter_map({
        let given = Rc::clone(&given);
        move |(index, entry)| {
            let rename = entry.rename.as_ref().filter(|_| given.is_mig(&entry.name))?;
            Some((entry_key(index, "rename").to_vec(), rename))
        }
    });
    let is_gpus = move |name: &ResourceName| {
        (by_default && name.as_str() == names::GPU_RESOURCE) || given.of_gpus.contains(name.as_str())
    };
    patterns
        .chain(renames)
        .filter(move |(_, name)| config.mig_strategy == MigStrategy::Mixed && is_gpus(name))
        .map(|(path, name)| Note {
            path,
            text: format!(
                "whole GPUs are called {name} too: a pod cannot tell whether it gets a GPU or a MIG device; give these another name"
            ),
        })
}

/// Sharing of what cannot be there is a slip more often than a choice; NVIDIA's plugin says nothing.
fn absent_mig(config: &Config, given: &Given<'_>, index: usize, entry: &Replicated) -> Option<Note> {
    let is_served = match config.mig_strategy {
        MigStrategy::Mixed => true,
        // By the names of resources.mig, and by those of whole GPUs.
        MigStrategy::Single => given.of_mig.contains(entry.name.as_str()),
        MigStrategy::None => false,
    };
    (given.is_mig(&entry.name) && !is_served).then(|| Note {
        path: entry_key(index, "name").into(),
        text: format!(
            "{} is advertised only where migStrategy is mixed: this entry has no effect",
            entry.name
        ),
    })
}

/// A name that nothing gives to any device, on whatever node; NVIDIA's plugin says nothing.
fn absent_name(given: &Given<'_>, index: usize, entry: &Replicated) -> Option<Note> {
    let name = entry.name.as_str();
    if given.is_mig(&entry.name) || given.all.contains(name) {
        return None;
    }
    // Who asks for the name after sharing means the one before.
    let unshared = name.strip_suffix(".shared").unwrap_or(name);
    let near = match given.gpus {
        Some(renamed) if unshared == names::GPU_RESOURCE => Some(renamed.to_string()),
        _ => mig_resource(unshared).or_else(|| nearest(unshared, given.listed.iter().copied())),
    };
    let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
    let mut there = given.listed.clone();
    there.insert(1.min(there.len()), MIG_RESOURCES);
    let more = match given.all.len() - given.listed.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(Note {
        path: entry_key(index, "name").into(),
        text: format!(
            "no device is called {name} before it is shared, so that this entry has no effect; allowed: {}{more}{near}",
            there.join(", ")
        ),
    })
}

/// Sharing of devices by the name that they had without a pattern of `resources`: it shares none of those.
fn renamed(given: &Given<'_>, index: usize, entry: &Replicated) -> Option<Note> {
    let (section, position, name) = given.taken.get(&entry.name)?;
    Some(Note {
        path: entry_key(index, "name").into(),
        text: format!(
            "resources.{section}[{position}] calls some of these devices {name} before they are shared, and this entry shares none of them; write an entry with name: {name} too to share them"
        ),
    })
}

/// NVIDIA's plugin drops a `rename`, but for the one that `renameByDefault` would give.
fn rename(sharing: &TimeSlicing, index: usize, entry: &Replicated) -> Option<Note> {
    let theirs = match sharing.rename_by_default {
        true => ResourceName::from(format!("{}.shared", entry.name)),
        false => entry.name.clone(),
    };
    let ours = entry.rename.as_ref().filter(|ours| **ours != theirs)?;
    Some(Note {
        path: entry_key(index, "rename").into(),
        text: format!("NVIDIA's plugin ignores this and serves {theirs}; here pods must ask for {ours}"),
    })
}

/// As many replicas are not offered even where a node has one device alone.
fn replicas(index: usize, entry: &Replicated) -> Option<Note> {
    (usize::from(entry.replicas) > MOST_DEVICES).then(|| Note {
        path: entry_key(index, "replicas").into(),
        text: format!(
            "{} replicas are more than the {MOST_DEVICES} devices that one message to kubelet holds; at most {MOST_DEVICES} are offered, and fewer of each where a node has several devices",
            entry.replicas
        ),
    })
}

/// NVIDIA's plugin shares all devices, whatever `devices` says.
fn devices(sharing: &TimeSlicing, index: usize, entry: &Replicated) -> Option<Note> {
    if entry.devices == SharedOf::All {
        return None;
    }
    let is_renamed = match &entry.rename {
        Some(rename) => *rename != entry.name,
        None => sharing.rename_by_default,
    };
    let name = &entry.name;
    let mut text =
        format!("NVIDIA's plugin ignores this and shares every {name}; here the others stay unshared");
    if is_renamed {
        text.push_str(&format!(", and pods must ask for {name} to get one"));
    } else {
        text.push_str(&format!(
            ". If {name} has other devices too, a pod cannot tell whether it gets a shared one or not; give these a rename"
        ));
    }
    Some(Note {
        path: entry_key(index, "devices").into(),
        text,
    })
}

pub(super) fn key(name: &str) -> Step {
    Step::Key(name.to_owned())
}

/// The place of a key of an entry of `sharing.timeSlicing.resources`.
pub(super) fn entry_key(index: usize, name: &str) -> [Step; 5] {
    [
        key("sharing"),
        key("timeSlicing"),
        key("resources"),
        Step::Index(index),
        key(name),
    ]
}
