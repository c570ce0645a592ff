//! Places of members beyond a minimum that nobody has come to: given back where a gang of the same priority or more does not fit without them, and no
//! more of them than it takes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, Placement, SlotView, View, Wanted};

use super::planning::asked_for;
use super::supply;
use crate::gang::preempt::{Occupant, OccupantPod, make_way};
use crate::index::Index;
use crate::snapshot::NodeIx;

/// Places of one gang that are given back together.
struct Unit {
    gang: Arc<GangKey>,
    slots: BTreeSet<u32>,
    /// What comes free with them.
    what: Occupant,
}

impl Index {
    /// Where a gang goes once other gangs have given back what they can do without; they have then. `None` if it does not fit even so.
    pub(super) fn release_extras(&mut self, wanted: &Wanted) -> Option<Placement> {
        let in_vain = self.gangs.vain.get(&wanted.gang);
        // For a gang that is decided nobody gives anything back.
        if wanted.must == 0 || in_vain == Some(&asked_for(wanted)) {
            return None;
        }
        self.gangs.core.stocked().next()?;
        let units = self.spare_units(wanted);
        // It costs many plans: of those that wait, the first few after each growth of room.
        if units.is_empty()
            || !self.are_enough(wanted, &units)
            || !self.gangs.givings.another(self.gangs.room, &wanted.gang)
        {
            return None;
        }
        let spares: Vec<&Occupant> = units.iter().map(|unit| &unit.what).collect();
        let (go, placement) = self.on_terrain(Some(wanted), |terrain| make_way(terrain, wanted, &spares))?;
        for unit in go.into_iter().filter_map(|at| units.get(at)) {
            self.gangs.core.release_extras(self.now, &unit.gang, &unit.slots);
        }
        Some(placement)
    }

    /// What a gang was placed on was given back for it: if it could not take it, nothing is given back for it again while it asks for the same.
    pub(super) fn note_released(&mut self, wanted: &Wanted) {
        let view = self.gangs.core.view(&wanted.gang);
        if view.is_none_or(|view| view.slots().next().is_none()) {
            let asked = asked_for(wanted);
            self.gangs.vain.insert(Arc::clone(&wanted.gang), asked);
        }
    }

    /// What gangs of no higher priority can give back: the least important first, then the youngest.
    fn spare_units(&self, wanted: &Wanted) -> Vec<Unit> {
        let others = self.gangs.core.stocked();
        let mut others: Vec<View<'_>> = others
            .filter(|view| view.priority() <= wanted.priority && **view.key() != *wanted.gang)
            .collect();
        others.sort_by_key(|view| (view.priority(), Reverse(view.waiting_since()), view.key()));
        let mut units: Vec<Unit> = Vec::new();
        for view in others {
            let mut own: Vec<(Option<u32>, Unit)> = Vec::new();
            for (slice, spare) in view.spares() {
                let Some(pod) = self.spare_pod(&view, &spare) else {
                    continue;
                };
                let same = |(of, _): &&mut (Option<u32>, Unit)| slice.is_some() && *of == slice;
                match own.iter_mut().find(same) {
                    // A slice is not broken for it.
                    Some((_, unit)) => {
                        unit.slots.insert(spare.slot);
                        unit.what.pods.push(pod);
                    }
                    None => own.push((
                        slice,
                        Unit {
                            gang: Arc::clone(view.key()),
                            slots: [spare.slot].into(),
                            what: Occupant {
                                pods: vec![pod],
                                priority: view.priority(),
                                since: view.waiting_since(),
                                checkpointed: false,
                                budgets: Vec::new(),
                            },
                        },
                    )),
                }
            }
            let own = own.into_iter().map(|(_, unit)| unit);
            units.extend(own);
        }
        units
    }

    /// What comes free with a place. Its devices may be somebody else's still, or sick.
    fn spare_pod(&self, view: &View<'_>, spare: &SlotView<'_>) -> Option<OccupantPod> {
        let uid = spare.pod?;
        let node = self.names.get(spare.node.as_str())?;
        let shape = view.shape_of(uid);
        let shape = shape.and_then(|shape| self.gangs.shapes.get(shape));
        Some(OccupantPod {
            uid: uid.clone(),
            node,
            devices: self.free_without(node, spare.devices),
            resources: shape.map_or_else(Default::default, |shape| shape.needs.resources.clone()),
        })
    }

    /// Those of some devices that a place is kept on that are free when it is not.
    fn free_without(&self, node: NodeIx, devices: &Devices) -> Devices {
        let entry = self.entries.get(node.0 as usize);
        let known = entry.and_then(|entry| Some((entry, entry.inventory.as_ref()?)));
        let Some((entry, inventory)) = known.filter(|(_, inventory)| inventory.not_ready.is_none()) else {
            return Devices::new();
        };
        let pools = inventory.pools.iter().zip(&entry.account.pools);
        let free = pools.map(|(pool, balance)| {
            let own = devices.iter().filter(|(resource, _)| *resource == pool.resource);
            let mut free = crate::devices::DeviceSet::EMPTY;
            for (resource, ids) in own {
                free.add(&pool.taken(resource, ids));
            }
            free.remove(&balance.held);
            free.remove(&balance.leaving);
            for bound in &entry.reservations {
                for (resource, ids) in &bound.devices {
                    free.remove(&pool.taken(resource, ids));
                }
            }
            (pool.resource.clone(), pool.ids_of(&(&free & &pool.healthy)))
        });
        free.filter(|(_, ids)| !ids.is_empty()).collect()
    }

    /// Whether there would be devices enough, as far as numbers tell.
    fn are_enough(&mut self, wanted: &Wanted, units: &[Unit]) -> bool {
        let Some(asked) = supply::least(wanted, self.gangs.shapes.list()) else {
            return false;
        };
        let mut spare: BTreeMap<&ResourceName, u64> = BTreeMap::new();
        let pods = units.iter().flat_map(|unit| &unit.what.pods);
        for (resource, ids) in pods.flat_map(|pod| &pod.devices) {
            *spare.entry(resource).or_default() += ids.len() as u64;
        }
        let free = self.gangs.free.of(&self.published);
        asked.iter().all(|(resource, least)| {
            let free = free.get(resource).copied().unwrap_or_default();
            *least <= free.saturating_add(spare.get(resource).copied().unwrap_or_default())
        })
    }
}
