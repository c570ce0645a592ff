//! Places that are kept for lost members and that nobody has come to: whoever is of higher priority has them, before anybody is stopped for
//! it, and no more of them than it takes. To whom of several gangs that are decided they go is not decided here.

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, Placement, SlotView, View};
use gantry_planner::preempt::OccupantPod;

use super::extras::{Unit, Whose};
use crate::index::Index;
use crate::snapshot::NodeIx;

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
        let node = self.nodes.find(place.node.as_str())?;
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
        let Some(name) = self.nodes.name(place.node) else {
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
        let Some(room) = self.resources.get(place.node) else {
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
            let Some(node) = self.nodes.find(slot.node.as_str()) else {
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
        let Some(entry) = self.nodes.get(node) else {
            return Devices::default();
        };
        let mut ending = |id: &gantry_api::DeviceId| {
            let since = entry.lingers_since(id);
            since.is_some_and(|since| {
                let passed = self.now.at.saturating_duration_since(since).as_secs();
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
        let Some(entry) = self.nodes.get(node) else {
            return;
        };
        let kept = entry
            .occupancy()
            .gang_reservations()
            .iter()
            .filter(|place| place.pod.is_none());
        let priorities = kept.filter_map(|place| Some(self.gangs.core.view(&place.gang)?.priority()));
        let Some(lowest) = priorities.min() else {
            return;
        };
        self.gangs.victim_watch.came(lowest);
    }
}
