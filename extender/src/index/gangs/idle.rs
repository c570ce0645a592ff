//! Places that are kept for lost members and that nobody has come to: whoever is of higher priority has them, before anybody is stopped for
//! it, and no more of them than it takes. To whom of several gangs that are decided they go is not decided here.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, Placement, SlotView, View};
use gantry_planner::preempt::OccupantPod;

use super::extras::{Unit, Whose, by_loss};
use crate::devices::DeviceSet;
use crate::index::Index;
use crate::index::victims::fits_without;
use crate::request::Request;
use crate::snapshot::{Class, NodeIx};

/// One such place on a node.
struct Idle {
    gang: Arc<GangKey>,
    slot: u32,
    priority: i32,
    /// What comes free with it, by pool of the node.
    back: Vec<DeviceSet>,
}

impl Index {
    /// Gangs of lower priority that have such places: the least important first, then the youngest.
    fn idling_below(&self, priority: i32) -> Vec<View<'_>> {
        self.stocked(|other| other < priority)
    }

    /// What gangs of lower priority can give back so.
    pub(super) fn idle_units(&self, priority: i32) -> Vec<Unit> {
        let mut units = Vec::new();
        for view in self.idling_below(priority) {
            for slot in view.idle() {
                let pod = self.place_as_pod(&slot, PodUid::from(""));
                let Some(pod) = pod.filter(|pod| !pod.devices.is_empty()) else {
                    continue;
                };
                units.push(Unit::new(&view, slot.slot, Whose::Lost, pod));
            }
        }
        units
    }

    /// What comes free with a place, as if `uid` had it. Its devices may be somebody else's still, or sick.
    pub(super) fn place_as_pod(&self, place: &SlotView<'_>, uid: PodUid) -> Option<OccupantPod> {
        let node = self.names.get(place.node.as_str())?;
        let shape = place.shape.and_then(|shape| self.gangs.shapes.get(shape));
        Some(OccupantPod {
            uid,
            node,
            devices: self.free_without(node, place.devices),
            resources: shape.map_or_else(Default::default, |shape| shape.needs.resources.clone()),
        })
    }

    /// Gives back what a gang goes to of what it was planned with as free.
    pub(super) fn give_back_for(&mut self, gang: &GangKey, placement: &Placement, units: &[Unit]) {
        let takes = |unit: &&Unit| unit.what.pods.iter().any(|pod| self.takes(placement, pod));
        let taken: Vec<&Unit> = units.iter().filter(takes).collect();
        for unit in taken {
            self.give_back(unit, gang);
        }
    }

    /// Whether a plan wants what a place has: its devices, or on its node what is not left there besides.
    fn takes(&self, placement: &Placement, place: &OccupantPod) -> bool {
        let Some(name) = self.names.name(place.node) else {
            return false;
        };
        let here: Vec<_> = placement
            .places
            .iter()
            .filter(|planned| planned.node == *name)
            .collect();
        let has = |devices: &Devices| {
            let mut all = devices.iter().flat_map(|(resource, ids)| {
                let own = place.devices.iter().filter(move |(own, _)| own == resource);
                own.flat_map(|(_, own)| own).filter(move |id| ids.contains(id))
            });
            all.next().is_some()
        };
        if here.iter().any(|planned| has(&planned.devices)) {
            return true;
        }
        let Some(room) = self.rooms().get(place.node.0 as usize) else {
            return false;
        };
        let mut needed = gantry_gang::Resources::default();
        for shape in here
            .iter()
            .filter_map(|planned| self.gangs.shapes.get(planned.shape))
        {
            needed.add(&shape.needs.resources);
        }
        !here.is_empty() && room.left.fits(&needed).is_err()
    }

    /// Devices of such places that are given back any moment, by those whose pods are gone.
    pub(super) fn idle_ending(&self, priority: i32, mut soon: impl FnMut(i64) -> bool) -> Vec<OccupantPod> {
        let mut pods = Vec::new();
        for slot in self.idling_below(priority).iter().flat_map(View::idle) {
            let Some(node) = self.names.get(slot.node.as_str()) else {
                continue;
            };
            let devices = self.ending_of(node, &slot, &mut soon);
            if !devices.is_empty() {
                pods.push(OccupantPod {
                    uid: "".into(),
                    node,
                    devices,
                    resources: gantry_gang::Resources::default(),
                });
            }
        }
        pods
    }

    /// The same of one place on a node. `soon` says of a second since 1970 whether who has ended then gives back any moment.
    fn ending_of(&self, node: NodeIx, slot: &SlotView<'_>, mut soon: impl FnMut(i64) -> bool) -> Devices {
        let Some(entry) = self.entries.get(node.0 as usize) else {
            return Devices::default();
        };
        let mut ending = |id: &gantry_api::DeviceId| {
            let since = entry.lingering.get(id);
            since.is_some_and(|since| {
                let passed = self.now.at.saturating_duration_since(*since).as_secs();
                soon(self.now.unix.saturating_sub_unsigned(passed))
            })
        };
        let devices = slot.devices.iter().map(|(resource, ids)| {
            let ids = ids.iter().filter(|id| ending(id)).cloned();
            (resource.clone(), ids.collect::<Vec<_>>())
        });
        devices.filter(|(_, ids)| !ids.is_empty()).collect()
    }

    /// A place on a node, or what it has, is idle now: whoever was refused before is worth another look.
    pub(in crate::index) fn idles(&mut self, node: NodeIx) {
        let Some(entry) = self.entries.get(node.0 as usize) else {
            return;
        };
        let kept = entry.places.iter().filter(|place| place.pod.is_none());
        let priorities = kept.filter_map(|place| Some(self.gangs.core.view(&place.gang)?.priority()));
        let Some(lowest) = priorities.min() else {
            return;
        };
        self.gangs.victim_watch.came(lowest);
        self.waiting.gained(node);
        self.changed = true;
    }

    /// Such places on a node: the least important first, then the youngest. Only those of the node are looked at, of however many there
    /// are.
    fn idle_places_on(&self, node: NodeIx, priority: i32) -> Vec<(View<'_>, SlotView<'_>)> {
        let Some(entry) = self.entries.get(node.0 as usize) else {
            return Vec::new();
        };
        let kept = entry.places.iter().filter(|place| place.pod.is_none());
        let idle = kept.filter_map(|place| {
            let view = self.gangs.core.view(&place.gang)?;
            let slot = view.idle_place(place.slot)?;
            (view.priority() < priority).then_some((view, slot))
        });
        let mut idle: Vec<_> = idle.collect();
        idle.sort_by_key(|(view, slot)| (by_loss(view), slot.slot));
        idle
    }

    /// Such places on a node that a pod by itself may have, in the same order.
    fn idle_on(&self, node: NodeIx, priority: i32) -> Vec<Idle> {
        let entry = self.entries.get(node.0 as usize);
        let Some(inventory) = entry.and_then(|entry| entry.inventory.as_ref()) else {
            return Vec::new();
        };
        let by_pool = |devices: &Devices| {
            let pools = inventory.pools.iter().map(|pool| {
                let own = devices.iter().find(|(resource, _)| *resource == pool.resource);
                own.map(|(_, ids)| pool.find(ids).0).unwrap_or_default()
            });
            pools.collect()
        };
        let idle = self.idle_places_on(node, priority).into_iter();
        let idle = idle.map(|(view, slot)| Idle {
            gang: Arc::clone(view.key()),
            slot: slot.slot,
            priority: view.priority(),
            back: by_pool(&self.free_without(node, slot.devices)),
        });
        idle.collect()
    }

    /// A node as a pod by itself finds it, with such places as it may have; `None` without an inventory.
    pub(in crate::index) fn class_for(&self, node: NodeIx, priority: i32) -> Option<Class> {
        let mut class = self.entries.get(node.0 as usize)?.exact(&[])?;
        for idle in self.idle_on(node, priority) {
            for (pool, set) in class.pools.iter_mut().zip(&idle.back) {
                pool.free.add(set);
                pool.open.add(set);
            }
        }
        Some(class)
    }

    /// What such places on a node get any moment from pods that are gone, by pool.
    pub(in crate::index) fn idle_leaving(&self, node: NodeIx, priority: i32) -> Vec<DeviceSet> {
        let entry = self.entries.get(node.0 as usize);
        let Some(inventory) = entry.and_then(|entry| entry.inventory.as_ref()) else {
            return Vec::new();
        };
        let awaited = i64::try_from(crate::index::waiting::AWAITED.as_secs()).unwrap_or(i64::MAX);
        let soon = |since: i64| self.now.unix.saturating_sub(since) < awaited;
        let here = self.idle_places_on(node, priority);
        let devices: Vec<_> = here
            .iter()
            .flat_map(|(_, slot)| self.ending_of(node, slot, soon))
            .collect();
        let pools = inventory.pools.iter().map(|pool| {
            let mut set = DeviceSet::EMPTY;
            for (_, ids) in devices.iter().filter(|(resource, _)| *resource == pool.resource) {
                set.add(&pool.find(ids).0);
            }
            &set & &pool.healthy
        });
        pools.collect()
    }

    /// Which places on a node have to be given back so that a pod by itself fits; `None` if it does not fit even so.
    fn idle_for(&self, node: NodeIx, priority: i32, request: &Request) -> Option<Vec<Idle>> {
        let mut idle = self.idle_on(node, priority);
        if idle.is_empty() {
            return None;
        }
        let class = self.entries.get(node.0 as usize)?.exact(&[])?;
        let fits = |idle: &[Idle]| {
            let sets: Vec<&[DeviceSet]> = idle.iter().map(|idle| idle.back.as_slice()).collect();
            fits_without(&class, request, &sets, self.options.policy)
        };
        if !fits(&idle) {
            return None;
        }
        // Whom it does not take is let off, the most important first.
        for at in (0..idle.len()).rev() {
            let spared = idle.remove(at);
            if !fits(&idle) {
                idle.insert(at, spared);
            }
        }
        Some(idle)
    }

    /// The node where a pod by itself fits once gangs of lower priority have given such places back, with the least loss, among those of
    /// which `offered` says so. Nothing is given back before the pod comes there.
    pub fn idle_node(
        &self,
        uid: &PodUid,
        priority: i32,
        request: &Request,
        offered: &dyn Fn(&NodeName) -> bool,
    ) -> Option<NodeName> {
        if self.goes_with(uid).is_some() {
            return None;
        }
        let idling = self.idling_below(priority);
        let nodes: BTreeSet<&NodeName> = idling.iter().flat_map(View::idle).map(|slot| slot.node).collect();
        let nodes = nodes.into_iter().filter(|node| offered(node));
        let found = nodes.filter_map(|name| {
            let node = self.names.get(name.as_str())?;
            let idle = self.idle_for(node, priority, request)?;
            let highest = idle.iter().map(|idle| idle.priority).max();
            let open = !self.is_kept_from(node, priority) && self.leaves_promised(node, priority, request);
            open.then_some((highest, idle.len(), name))
        });
        found.min().map(|(_, _, name)| name.clone())
    }

    /// Whether a pod by itself may be told to try a node for what is idle there.
    pub(in crate::index) fn may_have_idle(&self, uid: &PodUid, node: NodeIx, request: &Request) -> bool {
        let entry = self.entries.get(node.0 as usize).filter(|entry| entry.has_idle());
        let priority = self.pods.get(uid).map(|pod| pod.priority);
        let (Some(entry), Some(priority)) = (entry, priority) else {
            return false;
        };
        self.idle_node(uid, priority, request, &|name| *name == entry.name)
            .is_some()
    }

    fn leaves_promised(&self, node: NodeIx, priority: i32, request: &Request) -> bool {
        let Some(promised) = &self.published.promised else {
            return true;
        };
        let class = self.class_for(node, priority);
        class.is_some_and(|class| promised.leaves(node, &class, priority, request))
    }

    /// A pod by itself has come to a node where it does not fit as it is: what it may have there is given back for it. Whether it fits
    /// then.
    pub(in crate::index) fn take_idle(&mut self, node: NodeIx, uid: &PodUid, request: &Request) -> bool {
        if self.goes_with(uid).is_some() {
            return false;
        }
        let Some(pod) = self.pods.get(uid).cloned() else {
            return false;
        };
        let Some(idle) = self.idle_for(node, pod.priority, request) else {
            return false;
        };
        let to: Arc<str> = format!("pod {}/{}", pod.namespace, pod.name).into();
        for Idle { gang, slot, .. } in idle {
            tracing::info!(%gang, %to, "a place kept for a lost member goes to whoever is of higher priority");
            let slots = BTreeSet::from([slot]);
            self.gangs.core.give_up_idle(self.now, &gang, &slots, &to);
        }
        self.take_slots();
        self.refresh(node);
        true
    }
}
