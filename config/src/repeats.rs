//! What an earlier entry of a list says already: patterns that are never reached, devices that are shared twice. Looks at each entry once,
//! for a ConfigMap has room for tens of thousands of them. Pure; what to say of it, and where, is the caller's.

use std::collections::{HashMap, HashSet};

use gantry_api::ResourceName;

use super::file::SharedResource;
use super::{DeviceRef, SharedOf};

/// By pattern: the first one before it that matches all that it matches, by position. Patterns count as far as they are the same or `*`;
/// an empty one matches nothing, and hides nothing.
pub(super) fn hidden(patterns: &[String]) -> Vec<Option<usize>> {
    let mut first: HashMap<&str, usize> = HashMap::new();
    let mut hidden = Vec::with_capacity(patterns.len());
    for (index, pattern) in patterns.iter().enumerate() {
        let earlier = [pattern.as_str(), "*"].map(|text| first.get(text).copied());
        let by = earlier.into_iter().flatten().min();
        hidden.push(by.filter(|_| !pattern.is_empty()));
        if !pattern.is_empty() {
            first.entry(pattern).or_insert(index);
        }
    }
    hidden
}

/// How an entry of shared devices repeats what is shared already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Repeat<'a> {
    /// It names a device twice.
    InItself(&'a DeviceRef),
    /// A device that the entry at this position names too.
    Device(&'a DeviceRef, usize),
    /// A resource of which the entry at this position shares some, where one of both does not say which.
    Resource(usize),
}

/// By entry: the first thing that it repeats.
pub(super) fn shared_twice(entries: &[SharedResource]) -> Vec<Option<Repeat<'_>>> {
    let mut resources: HashMap<&ResourceName, Sharers<'_>> = HashMap::new();
    let mut repeats = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        let sharers = resources.entry(&entry.name.0).or_default();
        repeats.push(match &entry.devices {
            Some(SharedOf::Listed(list)) => sharers.list(list, index),
            _ => sharers.take_any(index),
        });
    }
    repeats
}

/// The entries so far that share one resource.
#[derive(Default)]
struct Sharers<'a> {
    /// The first of all.
    first: Option<usize>,
    /// The first that does not say which devices.
    any: Option<usize>,
    /// By device, the first that names it.
    named: HashMap<&'a DeviceRef, usize>,
}

impl<'a> Sharers<'a> {
    /// An entry that names its devices.
    fn list(&mut self, list: &'a [DeviceRef], index: usize) -> Option<Repeat<'a>> {
        self.first.get_or_insert(index);
        let mut own = HashSet::with_capacity(list.len());
        if let Some(device) = list.iter().find(|device| !own.insert(*device)) {
            return Some(Repeat::InItself(device));
        }
        let mut earliest = self.any.map(|entry| (entry, Repeat::Resource(entry)));
        for device in list {
            let holder = *self.named.entry(device).or_insert(index);
            if holder != index && earliest.as_ref().is_none_or(|(entry, _)| holder < *entry) {
                earliest = Some((holder, Repeat::Device(device, holder)));
            }
        }
        earliest.map(|(_, repeat)| repeat)
    }

    /// An entry that takes all devices, or so many whichever they are.
    fn take_any(&mut self, index: usize) -> Option<Repeat<'a>> {
        self.any.get_or_insert(index);
        let before = *self.first.get_or_insert(index);
        (before != index).then_some(Repeat::Resource(before))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::value::{Replicas, Resource};
    use super::*;

    fn entry(name: &str, devices: Option<SharedOf>) -> SharedResource {
        SharedResource {
            name: Resource::try_from(name.to_owned()).unwrap(),
            rename: None,
            devices,
            replicas: Replicas(2),
        }
    }

    fn listed(gpus: &[u8]) -> Option<SharedOf> {
        Some(SharedOf::Listed(
            gpus.iter().copied().map(DeviceRef::Gpu).collect(),
        ))
    }

    #[test]
    fn a_pattern_is_hidden_by_the_same_one_and_by_the_star() {
        let patterns = ["a", "", "b", "a", "", "*", "c", "a"].map(str::to_owned);
        let by = hidden(&patterns);
        assert_eq!(by, [None, None, None, Some(0), None, None, Some(5), Some(0)]);
    }

    #[test]
    fn an_entry_repeats_the_first_that_shares_its_device_or_does_not_say_which() {
        let entries = [
            entry("gpu", listed(&[0, 1])),
            entry("gpu", listed(&[2, 1])),
            entry("gpu", listed(&[3, 3])),
            entry("gpu", None),
            entry("gpu", listed(&[4])),
            entry("mig", Some(SharedOf::Count(2))),
            entry("mig", Some(SharedOf::All)),
        ];
        let expected = [
            None,
            Some(Repeat::Device(&DeviceRef::Gpu(1), 0)),
            Some(Repeat::InItself(&DeviceRef::Gpu(3))),
            Some(Repeat::Resource(0)),
            Some(Repeat::Resource(3)),
            None,
            Some(Repeat::Resource(5)),
        ];
        assert_eq!(shared_twice(&entries), expected);
    }

    /// Of which entry before it an entry repeats something, by looking at each pair.
    fn by_pairs(entries: &[SharedResource], index: usize) -> Option<usize> {
        let own = &entries[index];
        entries[..index].iter().position(|other| {
            let both = (&own.devices, &other.devices);
            other.name == own.name
                && match both {
                    (Some(SharedOf::Listed(own)), Some(SharedOf::Listed(other))) => {
                        own.iter().any(|device| other.contains(device))
                    }
                    _ => true,
                }
        })
    }

    proptest! {
        #[test]
        fn one_look_finds_what_all_pairs_show(
            entries in prop::collection::vec(
                (prop::bool::ANY, prop::option::of(prop::collection::hash_set(0..6u8, 1..4))), 0..8)
        ) {
            let entries: Vec<SharedResource> = entries
                .into_iter()
                .map(|(mig, gpus)| {
                    let list: Option<Vec<u8>> = gpus.map(|gpus| gpus.into_iter().collect());
                    entry(if mig { "mig" } else { "gpu" }, list.and_then(|list| listed(&list)))
                })
                .collect();
            for (index, repeat) in shared_twice(&entries).into_iter().enumerate() {
                let of = repeat.map(|repeat| match repeat {
                    Repeat::InItself(_) => index,
                    Repeat::Device(_, entry) | Repeat::Resource(entry) => entry,
                });
                prop_assert_eq!(of, by_pairs(&entries, index));
            }
        }
    }
}
