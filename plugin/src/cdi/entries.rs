//! The CDI names that a runtime can resolve, and Allocate may use: those of the specifications on disk.

use std::collections::{BTreeMap, BTreeSet};

use super::kind::{Class, Kind};
use super::names::Names;
use super::spec::Spec;
use crate::inventory::Device;
use gantry_config::DeviceIdStrategy;

/// The devices of every written specification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entries {
    kind: Kind,
    names: BTreeMap<Class, BTreeSet<String>>,
    /// The names of GPUs and MIG devices, by UUID.
    gpus: BTreeMap<String, String>,
}

impl Entries {
    /// The devices of these specifications, with the names of GPUs and MIG devices under this strategy.
    pub fn of(kind: &Kind, specs: &BTreeMap<Class, Spec>, names: &Names, strategy: DeviceIdStrategy) -> Self {
        let of_spec = |spec: &Spec| spec.names().map(str::to_owned).collect();
        let mut entries = Self {
            kind: kind.clone(),
            names: specs
                .iter()
                .map(|(class, spec)| (*class, of_spec(spec)))
                .collect(),
            gpus: BTreeMap::new(),
        };
        entries.gpus = names
            .under(strategy)
            .filter(|(_, name)| entries.contains(Class::Gpu, name))
            .map(|(uuid, name)| (uuid.to_owned(), name.to_owned()))
            .collect();
        entries
    }

    /// Whether a GPU or MIG device has an entry.
    pub fn have(&self, device: &Device) -> bool {
        self.gpus.contains_key(&device.uuid)
    }

    /// The qualified name of a GPU or MIG device, if it has an entry.
    pub fn gpu(&self, device: &Device) -> Option<String> {
        let name = self.gpus.get(&device.uuid)?;
        Some(self.kind.qualified(Class::Gpu, name))
    }

    /// The qualified name of a device, if it has an entry.
    pub fn qualified(&self, class: Class, name: &str) -> Option<String> {
        self.contains(class, name)
            .then(|| self.kind.qualified(class, name))
    }

    fn contains(&self, class: Class, name: &str) -> bool {
        self.names.get(&class).is_some_and(|names| names.contains(name))
    }
}
