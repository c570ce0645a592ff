//! Which CDI names a runtime can resolve: those of the specifications on disk. What Allocate may name, and no more.

use std::collections::{BTreeMap, BTreeSet};

use super::kind::{Class, Kind, entry_name};
use super::spec::Spec;
use crate::config::DeviceIdStrategy;
use crate::inventory::Device;

/// The devices of every specification that was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entries {
    kind: Kind,
    names: BTreeMap<Class, BTreeSet<String>>,
}

impl Entries {
    /// The devices of these specifications.
    pub fn of(kind: &Kind, specs: &BTreeMap<Class, Spec>) -> Self {
        let names = |spec: &Spec| spec.names().map(str::to_owned).collect();
        Self {
            kind: kind.clone(),
            names: specs.iter().map(|(class, spec)| (*class, names(spec))).collect(),
        }
    }

    /// Whether a GPU or MIG device has one.
    pub fn have(&self, device: &Device, strategy: DeviceIdStrategy) -> bool {
        self.contains(Class::Gpu, &entry_name(device, strategy))
    }

    /// The whole name of a GPU or MIG device, if it has an entry.
    pub fn gpu(&self, device: &Device, strategy: DeviceIdStrategy) -> Option<String> {
        self.qualified(Class::Gpu, &entry_name(device, strategy))
    }

    /// The whole name of a device, if it has an entry.
    pub fn qualified(&self, class: Class, name: &str) -> Option<String> {
        self.contains(class, name)
            .then(|| self.kind.qualified(class, name))
    }

    fn contains(&self, class: Class, name: &str) -> bool {
        self.names.get(&class).is_some_and(|names| names.contains(name))
    }
}
