//! The best set without a grant: maps device IDs to topology positions, runs the choice that both daemons share, and
//! maps back. Always returns a set of offered devices.

use std::collections::{BTreeMap, HashMap};

use gantry_api::{DeviceId, ResourceName};
use gantry_topology::choice::Table;
use gantry_topology::choice::devices::{Sharing, Spot, Units};

use super::Devices;
use crate::inventory::{Device, Inventory};
use gantry_config::SharedDevices;

/// The devices of one resource as input of the choice.
#[derive(Debug, Clone, Default)]
pub(super) struct Choosable {
    /// In inventory order.
    ids: Vec<DeviceId>,
    spots: Vec<Spot>,
    positions: HashMap<DeviceId, u16>,
    sharing: Sharing,
}

/// The devices of every resource of an inventory.
pub(super) fn choosable(inventory: &Inventory) -> BTreeMap<ResourceName, Choosable> {
    let mut resources: BTreeMap<ResourceName, Choosable> = BTreeMap::new();
    for device in &inventory.devices {
        let resource = resources.entry(device.resource.clone()).or_default();
        // Kubelet's messages hold fewer devices than u16.
        if let Ok(position) = u16::try_from(resource.ids.len()) {
            resource.positions.insert(device.id.clone(), position);
            resource.ids.push(device.id.clone());
            resource.spots.push(spot(device));
        }
    }
    for (name, resource) in &mut resources {
        let terms = inventory.resources.get(name).copied().unwrap_or_default();
        resource.sharing = match terms.sharing {
            SharedDevices::Distributed => Sharing::Distributed,
            SharedDevices::Packed => Sharing::Packed,
        };
    }
    resources
}

/// Position of every GPU and MIG device by UUID, independent of its resource.
pub(super) fn whereabouts(inventory: &Inventory) -> HashMap<String, Spot> {
    let devices = inventory.devices.iter();
    devices.map(|device| (device.uuid.clone(), spot(device))).collect()
}

fn spot(device: &Device) -> Spot {
    Spot {
        gpu: device.gpu,
        slice: device.slice.as_ref().map(|slice| Units { start: slice.start, size: slice.size }),
    }
}

impl Choosable {
    /// Whether `device` is one of the devices.
    pub(super) fn contains(&self, device: &DeviceId) -> bool {
        self.positions.contains_key(device)
    }

    /// The best `size` devices of `free` that include all of `must`; fewer if there are not enough. Devices outside
    /// `free` are in use, and so are those in `elsewhere`.
    pub(super) fn choose(
        &self,
        table: Option<&Table>,
        elsewhere: &[Spot],
        free: &Devices,
        must: &Devices,
        size: usize,
    ) -> Devices {
        // Devices that must be included are returned even if they are unknown.
        let unknown = must.iter().filter(|device| !self.contains(device));
        let mut chosen: Devices = unknown.take(size).cloned().collect();
        let chosen_of = |spots: &[Spot]| {
            gantry_topology::choice::devices::choose(
                table,
                spots,
                &self.positions(free),
                &self.positions(must),
                size - chosen.len(),
                self.sharing,
            )
        };
        let positions = if elsewhere.is_empty() {
            chosen_of(&self.spots)
        } else {
            chosen_of(&[self.spots.as_slice(), elsewhere].concat())
        };
        let ids = positions.iter().filter_map(|position| self.ids.get(usize::from(*position)));
        chosen.extend(ids.cloned());
        chosen
    }

    fn positions(&self, devices: &Devices) -> Vec<u16> {
        let mut positions: Vec<u16> =
            devices.iter().filter_map(|device| self.positions.get(device)).copied().collect();
        positions.sort_unstable();
        positions
    }
}
