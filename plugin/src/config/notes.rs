//! What a person may want to know of a configuration that can be served: what it means here and not with NVIDIA's plugin, and what is a
//! slip more often than a choice. A pure function of the configuration; each note has the place of the key that it is about.

use gantry_api::{ResourceName, names};

use super::problem::nearest;
use super::sharing::{mig_resource, spelled};
use super::tree::Step;
use super::{Config, MOST_DEVICES, MigStrategy, Replicated, ResourcePattern, SharedOf, TimeSlicing};

/// How MIG devices are called that no pattern names.
const MIG_RESOURCES: &str = "nvidia.com/mig-<profile>";

/// A note for people, and the key that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) path: Vec<Step>,
    pub(super) text: String,
}

/// Everything there is to tell about `config`, at most one note of a kind for each key.
/// `gpu_resource` is what whole GPUs are called besides, whatever the file says.
pub(super) fn notes(config: &Config, gpu_resource: Option<&ResourceName>) -> Vec<Note> {
    let mut notes = Vec::new();
    patterns(config, &mut notes);
    names_of_gpus(config, &mut notes);
    if let Some(sharing) = &config.time_slicing {
        for (index, entry) in sharing.resources.iter().enumerate() {
            absent_mig(config, index, entry, &mut notes);
            absent_name(config, gpu_resource, index, entry, &mut notes);
            renamed(config, sharing, index, entry, &mut notes);
            replicas(index, entry, &mut notes);
            rename(sharing, index, entry, &mut notes);
            devices(sharing, index, entry, &mut notes);
        }
    }
    notes
}

/// NVIDIA's plugin drops the section `resources`: whoever comes from it with such a file asks for names that are served no longer.
fn patterns(config: &Config, notes: &mut Vec<Note>) {
    let sections = [("gpus", &config.gpu_patterns), ("mig", &config.mig_patterns)];
    for (section, patterns) in sections {
        for (index, entry) in patterns.iter().enumerate() {
            let Some(theirs) = nvidias(config.mig_strategy, section == "mig", entry) else {
                continue;
            };
            if theirs == entry.name {
                continue;
            }
            let left = if section == "gpus" && entry.pattern == "*" && !is_served(config, &theirs) {
                format!(", and nothing is called {theirs}")
            } else {
                String::new()
            };
            notes.push(Note {
                path: [key("resources"), key(section), Step::Index(index)].into(),
                text: format!(
                    "NVIDIA's plugin ignores this and serves {theirs}; here pods must ask for {} to get devices that match {:?}{left}",
                    entry.name, entry.pattern
                ),
            });
        }
    }
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
fn names_of_gpus(config: &Config, notes: &mut Vec<Note>) {
    if config.mig_strategy != MigStrategy::Mixed {
        return;
    }
    let gpus = &config.gpu_patterns;
    let is_gpus = |name: &ResourceName| {
        let by_default =
            name.as_str() == names::GPU_RESOURCE && gpus.iter().all(|entry| entry.pattern != "*");
        by_default || gpus.iter().any(|entry| entry.name == *name)
    };
    let patterns = config.mig_patterns.iter().enumerate().map(|(index, entry)| {
        let path = [key("resources"), key("mig"), Step::Index(index), key("name")];
        (path.to_vec(), &entry.name)
    });
    let entries = config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
    let renames = entries.enumerate().filter_map(|(index, entry)| {
        let rename = entry.rename.as_ref().filter(|_| is_mig(config, &entry.name))?;
        Some((entry_key(index, "rename").to_vec(), rename))
    });
    for (path, name) in patterns.chain(renames).filter(|(_, name)| is_gpus(name)) {
        notes.push(Note {
            path,
            text: format!(
                "whole GPUs are called {name} too: a pod cannot tell whether it gets a GPU or a MIG device; give these another name"
            ),
        });
    }
}

/// Whether a resource is of MIG devices, as far as its name tells.
fn is_mig(config: &Config, name: &ResourceName) -> bool {
    config.mig_patterns.iter().any(|named| named.name == *name) || name.as_str().contains("/mig-")
}

/// Sharing of what cannot be there is a slip more often than a choice; NVIDIA's plugin says nothing.
fn absent_mig(config: &Config, index: usize, entry: &Replicated, notes: &mut Vec<Note>) {
    let is_named = config.mig_patterns.iter().any(|named| named.name == entry.name);
    let is_served = match config.mig_strategy {
        MigStrategy::Mixed => true,
        // By the names of resources.mig, and by those of whole GPUs.
        MigStrategy::Single => is_named,
        MigStrategy::None => false,
    };
    if is_mig(config, &entry.name) && !is_served {
        notes.push(Note {
            path: entry_key(index, "name").into(),
            text: format!(
                "{} is advertised only where migStrategy is mixed: this entry has no effect",
                entry.name
            ),
        });
    }
}

/// A name that nothing gives to any device, on whatever node; NVIDIA's plugin says nothing.
fn absent_name(
    config: &Config,
    gpu_resource: Option<&ResourceName>,
    index: usize,
    entry: &Replicated,
    notes: &mut Vec<Note>,
) {
    let patterns = config.gpu_patterns.iter().chain(&config.mig_patterns);
    // What a pattern names that every GPU matches is called so; by `single` MIG devices are called as their GPUs are.
    let renamed = config.gpu_patterns.iter().find(|entry| entry.pattern == "*");
    let mut there: Vec<&str> = Vec::new();
    if renamed.is_none() && gpu_resource.is_none() {
        there.push(names::GPU_RESOURCE);
    }
    for name in patterns.map(|entry| &entry.name).chain(gpu_resource) {
        if !there.contains(&name.as_str()) {
            there.push(name.as_str());
        }
    }
    let name = entry.name.as_str();
    if is_mig(config, &entry.name) || there.contains(&name) {
        return;
    }
    // Who asks for the name after sharing means the one before.
    let unshared = name.strip_suffix(".shared").unwrap_or(name);
    let near = mig_resource(unshared).or_else(|| nearest(unshared, there.iter().copied()));
    let renamed = renamed.map(|entry| &entry.name).or(gpu_resource);
    let renamed = renamed.filter(|_| unshared == names::GPU_RESOURCE);
    let near = renamed.map(ToString::to_string).or(near);
    let near = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
    there.insert(1.min(there.len()), MIG_RESOURCES);
    notes.push(Note {
        path: entry_key(index, "name").into(),
        text: format!(
            "no device is called {name} before it is shared, so that this entry has no effect; allowed: {}{near}",
            there.join(", ")
        ),
    });
}

/// Sharing of devices by the name that they had without a pattern of `resources`: it shares none of those.
fn renamed(config: &Config, sharing: &TimeSlicing, index: usize, entry: &Replicated, notes: &mut Vec<Note>) {
    let is_shared = |name: &ResourceName| sharing.resources.iter().any(|other| other.name == *name);
    let sections = [("gpus", &config.gpu_patterns), ("mig", &config.mig_patterns)];
    let patterns = sections.into_iter().flat_map(|(section, patterns)| {
        let of_section = patterns.iter().enumerate();
        of_section.map(move |(position, pattern)| (section, position, pattern))
    });
    let taken = patterns.filter(|(section, _, pattern)| {
        // Of GPUs by `*` nothing keeps its name, which is told of as a name that nothing has.
        let is_all = *section == "gpus" && pattern.pattern == "*";
        let base = nvidias(config.mig_strategy, *section == "mig", pattern);
        !is_all && base.as_ref() == Some(&entry.name) && !is_shared(&pattern.name)
    });
    for (section, position, pattern) in taken.take(1) {
        let name = &pattern.name;
        notes.push(Note {
            path: entry_key(index, "name").into(),
            text: format!(
                "resources.{section}[{position}] calls some of these devices {name} before they are shared, and this entry shares none of them; write an entry with name: {name} too to share them"
            ),
        });
    }
}

/// NVIDIA's plugin drops a `rename`, but for the one that `renameByDefault` would give.
fn rename(sharing: &TimeSlicing, index: usize, entry: &Replicated, notes: &mut Vec<Note>) {
    let theirs = match sharing.rename_by_default {
        true => ResourceName::from(format!("{}.shared", entry.name)),
        false => entry.name.clone(),
    };
    if let Some(ours) = entry.rename.as_ref().filter(|ours| **ours != theirs) {
        notes.push(Note {
            path: entry_key(index, "rename").into(),
            text: format!("NVIDIA's plugin ignores this and serves {theirs}; here pods must ask for {ours}"),
        });
    }
}

/// As many replicas are not offered even where a node has one device alone.
fn replicas(index: usize, entry: &Replicated, notes: &mut Vec<Note>) {
    if usize::from(entry.replicas) > MOST_DEVICES {
        notes.push(Note {
            path: entry_key(index, "replicas").into(),
            text: format!(
                "{} replicas are more than the {MOST_DEVICES} devices that one message to kubelet holds; at most {MOST_DEVICES} are offered, and fewer of each where a node has several devices",
                entry.replicas
            ),
        });
    }
}

/// NVIDIA's plugin shares all devices, whatever `devices` says.
fn devices(sharing: &TimeSlicing, index: usize, entry: &Replicated, notes: &mut Vec<Note>) {
    if entry.devices == SharedOf::All {
        return;
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
    notes.push(Note {
        path: entry_key(index, "devices").into(),
        text,
    });
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
