//! Which gang has a reservation with each device.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::{DeviceId, NodeName};

use super::reasons::Refusal;
use super::types::{Placement, SlotReservation};
use crate::key::GangKey;

/// The devices of all reservations.
#[derive(Debug, Clone, Default)]
pub(super) struct ReservedDevices {
    by_node: HashMap<NodeName, HashMap<DeviceId, Arc<GangKey>>>,
    /// By slot, to find the devices again when it is released.
    by_slot: HashMap<(Arc<GangKey>, u32), (NodeName, Vec<DeviceId>)>,
}

impl ReservedDevices {
    /// The gang that has a reservation with a device.
    pub(super) fn holder(&self, node: &NodeName, device: &DeviceId) -> Option<&Arc<GangKey>> {
        self.by_node.get(node)?.get(device)
    }

    /// The gangs that have reservations on a node.
    pub(super) fn gangs_on(&self, node: &NodeName) -> BTreeSet<Arc<GangKey>> {
        let devices = self.by_node.get(node).into_iter();
        devices.flat_map(|devices| devices.values().cloned()).collect()
    }

    /// A slot keeps these devices from now on, or none.
    pub(super) fn set(&mut self, gang: &Arc<GangKey>, slot: u32, reserved: Option<&SlotReservation>) {
        let slot = (gang.clone(), slot);
        if let Some((node, ids)) = self.by_slot.remove(&slot)
            && let Some(devices) = self.by_node.get_mut(&node)
        {
            for id in ids {
                if devices.get(&id) == Some(gang) {
                    devices.remove(&id);
                }
            }
            if devices.is_empty() {
                self.by_node.remove(&node);
            }
        }
        let Some(reserved) = reserved else { return };
        let ids = reserved.devices.iter().flat_map(|(_, ids)| ids.clone());
        let ids: Vec<DeviceId> = ids.collect();
        let devices = self.by_node.entry(reserved.node.clone()).or_default();
        devices.extend(ids.iter().map(|id| (id.clone(), gang.clone())));
        self.by_slot.insert(slot, (reserved.node.clone(), ids));
    }

    /// Refuses a placement with a device that two reservations would have.
    pub(super) fn overlap(&self, placement: &Placement) -> Option<Refusal> {
        let mut seen = BTreeSet::new();
        placement.places.iter().find_map(|place| {
            place.devices.iter().flat_map(|(_, ids)| ids).find_map(|id| {
                let by = self.holder(&place.node, id).cloned();
                let overlaps = !seen.insert((&place.node, id)) || by.is_some();
                overlaps.then(|| Refusal::Overtaken { device: id.clone(), node: place.node.clone(), by })
            })
        })
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_node.is_empty() && self.by_slot.is_empty()
    }
}
