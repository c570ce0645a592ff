//! The names of GPUs and MIG devices in our specifications, and which entries stay. A container of a running pod restarts with the name
//! that it was given, so a name never moves to another device during a run.

use std::collections::{BTreeMap, BTreeSet};

use super::kind::{ALL, Class, Kind, device_name, entry_name};
use super::spec::Spec;
use crate::inventory::{Device, Inventory};
use gantry_config::DeviceIdStrategy;

/// The names of this run. Those of an earlier run are unknown: its specification does not record their devices.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// The UUID of each name's device, also of devices that are gone.
    owners: BTreeMap<String, String>,
    /// Every device with a name, by UUID.
    known: BTreeMap<String, NamedDevice>,
}

#[derive(Debug, Clone)]
struct NamedDevice {
    /// As last offered.
    device: Device,
    by_uuid: Option<String>,
    by_index: Option<String>,
}

/// A device of a specification.
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    /// Its current properties.
    pub(super) device: Device,
    /// Whether new containers can get it; otherwise it stays for those that have it.
    pub(super) offered: bool,
}

impl Names {
    /// Names the offered devices that have no name under this strategy: as NVIDIA's plugin does, or by UUID if that name is or was
    /// another device's.
    pub fn learn(&mut self, inventory: &Inventory, strategy: DeviceIdStrategy) {
        for device in inventory.devices.iter().filter(|device| can_have_entry(device)) {
            let known = self
                .known
                .entry(device.uuid.clone())
                .and_modify(|known| known.device = device.clone())
                .or_insert_with(|| NamedDevice { device: device.clone(), by_uuid: None, by_index: None });
            let name = known.under(strategy);
            if name.is_none() {
                *name = [entry_name(device, strategy), device_name(&device.uuid)]
                    .into_iter()
                    .find(|name| claim(&mut self.owners, name, &device.uuid));
            }
        }
    }

    /// The names under this strategy, by UUID.
    pub(super) fn under(&self, strategy: DeviceIdStrategy) -> impl Iterator<Item = (&str, &str)> {
        let named = self.known.iter();
        named.filter_map(move |(uuid, known)| Some((uuid.as_str(), known.name(strategy)?)))
    }

    /// The entries of the specification: the offered devices in their order, then the other entries of this run for devices that the
    /// machine still has. Those may be denied now, or have had another name.
    pub(super) fn entries(&self, inventory: &Inventory, strategy: DeviceIdStrategy) -> Vec<Entry<'_>> {
        let places = inventory.whereabouts();
        let devices = inventory.devices.iter();
        let offered: BTreeSet<&str> = devices
            .clone()
            .filter(|device| can_have_entry(device))
            .map(|device| device.uuid.as_str())
            .collect();
        let first = devices.filter_map(|device| {
            let known = self.known.get(&device.uuid)?;
            Some((known.name(strategy)?, known))
        });
        let rest = self.known.values().flat_map(|known| {
            let names = [&known.by_uuid, &known.by_index].into_iter().flatten();
            names.map(move |name| (name.as_str(), known))
        });
        let mut seen = BTreeSet::new();
        first
            .chain(rest)
            .filter(|(name, _)| seen.insert(*name))
            .filter_map(|(name, known)| {
                let place = *places.get(known.device.uuid.as_str())?;
                let offered = offered.contains(known.device.uuid.as_str());
                let device = if offered { known.device.clone() } else { known.moved(place, inventory)? };
                Some(Entry { name, device, offered })
            })
            .collect()
    }
}

impl NamedDevice {
    fn name(&self, strategy: DeviceIdStrategy) -> Option<&str> {
        match strategy {
            DeviceIdStrategy::Uuid => self.by_uuid.as_deref(),
            DeviceIdStrategy::Index => self.by_index.as_deref(),
        }
    }

    fn under(&mut self, strategy: DeviceIdStrategy) -> &mut Option<String> {
        match strategy {
            DeviceIdStrategy::Uuid => &mut self.by_uuid,
            DeviceIdStrategy::Index => &mut self.by_index,
        }
    }

    /// The device, which is no longer offered, on the GPU that is now at `place`.
    fn moved(&self, place: u8, inventory: &Inventory) -> Option<Device> {
        let gpu = inventory.machine.gpus().get(usize::from(place));
        let minor = gpu.and_then(|gpu| gpu.minor).or(self.device.minor);
        // The capability nodes of a MIG device go with its GPU; after the driver was loaded again they are unknown.
        let lost = self.device.slice.is_some() && minor != self.device.minor;
        (!lost).then(|| Device { gpu: place, minor, ..self.device.clone() })
    }
}

/// The CDI names that a runtime can resolve, and Allocate may use: those of the written specifications.
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
            names: specs.iter().map(|(class, spec)| (*class, of_spec(spec))).collect(),
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
        self.contains(class, name).then(|| self.kind.qualified(class, name))
    }

    fn contains(&self, class: Class, name: &str) -> bool {
        self.names.get(&class).is_some_and(|names| names.contains(name))
    }
}

/// Without its GPU's node no other node is useful.
fn can_have_entry(device: &Device) -> bool {
    device.minor.is_some()
}

/// Whether a name belongs to this device; a free name does from now on.
fn claim(owners: &mut BTreeMap<String, String>, name: &str, uuid: &str) -> bool {
    name != ALL && owners.entry(name.to_owned()).or_insert_with(|| uuid.to_owned()) == uuid
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gantry_api::DeviceHealth;
    use gantry_topology::{Machine, MachineParts};
    use proptest::prelude::*;

    use super::*;

    /// GPU `which`, at this place among the offered ones.
    fn device(which: u8, place: usize) -> Device {
        let place = u8::try_from(place).unwrap();
        Device {
            id: format!("GPU-{which}").into(),
            resource: "nvidia.com/gpu".into(),
            gpu: place,
            nvml_index: Some(place),
            uuid: format!("GPU-{which}"),
            health: DeviceHealth { healthy: true, reason: None },
            minor: Some(which.into()),
            numa: None,
            slice: None,
            replica: None,
        }
    }

    proptest! {
        #[test]
        fn name_never_belongs_to_two_devices(
            steps in prop::collection::vec((prop::sample::subsequence(vec![0, 1, 2, 3, 4, 5], 0..=6).prop_shuffle(), any::<bool>()), 1..8),
        ) {
            let mut names = Names::default();
            let mut owners: BTreeMap<String, String> = BTreeMap::new();
            for (offered, by_index) in steps {
                let strategy = if by_index { DeviceIdStrategy::Index } else { DeviceIdStrategy::Uuid };
                let devices: Vec<Device> = offered.iter().enumerate().map(|(place, which)| device(*which, place)).collect();
                let fresh = owners.is_empty();
                let machine = Arc::new(Machine::new(MachineParts::default()).unwrap());
                let inventory = Inventory::ready(machine, devices);
                names.learn(&inventory, strategy);
                for entry in names.entries(&inventory, strategy) {
                    let owner = owners.entry(entry.name.to_owned()).or_insert_with(|| entry.device.uuid.clone());
                    prop_assert_eq!(&*owner, &entry.device.uuid, "{} moved", entry.name);
                }
                let called: BTreeMap<&str, &str> = names.under(strategy).collect();
                for device in &inventory.devices {
                    let name = called.get(device.uuid.as_str());
                    prop_assert_eq!(owners.get(*name.unwrap()), Some(&device.uuid));
                    prop_assert!(!fresh || *name.unwrap() == entry_name(device, strategy));
                }
            }
        }
    }
}
