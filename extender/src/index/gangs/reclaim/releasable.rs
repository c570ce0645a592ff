//! Reservations that other gangs can release for a gang: surplus ones, of members beyond a minimum that have not arrived, and orphaned ones,
//! of lost members without a replacement.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, GangEvent, Gangs, Moment, Placement, SlotView, View};
use gantry_planner::preempt::{CandidatePod, VictimCandidate};
use gantry_planner::request::NumaDemand;

use crate::index::facts::Facts;
use crate::index::gangs::machine::Machine;
use crate::index::gangs::shapes::Shapes;
use gantry_planner::snapshot::NodeIx;

/// Why reservations are releasable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Their members are beyond the minimum and have not arrived.
    Surplus,
    /// Their members are lost and have no replacement.
    Orphaned,
}

/// Reservations of one gang that are released together.
pub(super) struct ReleasableSlots {
    gang: Arc<GangKey>,
    slots: BTreeSet<u32>,
    pub(super) source: Source,
    /// What comes free with them.
    pub(super) what: VictimCandidate,
}

impl ReleasableSlots {
    fn new(view: &View<'_>, slot: u32, source: Source, pod: CandidatePod) -> Self {
        Self {
            gang: Arc::clone(view.key()),
            slots: [slot].into(),
            source,
            what: VictimCandidate {
                pods: vec![pod],
                priority: view.priority(),
                since: view.waiting_since(),
                ..VictimCandidate::default()
            },
        }
    }

    /// Has the gang release them for another one.
    pub(super) fn release(&self, machine: &mut Machine, now: Moment, to: &GangKey) {
        let (gang, slots) = (&*self.gang, &self.slots);
        match self.source {
            Source::Surplus => machine.handle(now, GangEvent::ReleaseSurplus { gang, slots }),
            Source::Orphaned => {
                tracing::info!(%gang, %to, "the reservation of a lost member goes to a gang of higher priority");
                let to: Arc<str> = format!("gang {to}").into();
                let to = &to;
                machine.handle(now, GangEvent::ReleaseOrphaned { gang, slots, to })
            }
        };
    }
}

/// The order in which gangs release: the lowest priority first, then the youngest.
fn by_loss<'a>(view: &View<'a>) -> (i32, Reverse<i64>, &'a Arc<GangKey>) {
    (view.priority(), Reverse(view.waiting_since()), view.key())
}

/// Finds the reservations that gangs can release.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReleasableReservations<'a> {
    gangs: &'a Gangs,
    facts: &'a Facts,
    shapes: &'a Shapes,
}

impl<'a> ReleasableReservations<'a> {
    pub(super) fn new(gangs: &'a Gangs, facts: &'a Facts, shapes: &'a Shapes) -> Self {
        Self { gangs, facts, shapes }
    }

    /// Gangs with some priorities that may have releasable reservations, in the order in which they release.
    fn stocked(self, may: impl Fn(i32) -> bool) -> Vec<View<'a>> {
        let stocked = self.gangs.may_give_back();
        let mut stocked: Vec<View<'a>> = stocked.filter(|view| may(view.priority())).collect();
        stocked.sort_by_key(by_loss);
        stocked
    }

    /// Surplus reservations of gangs of this priority or less.
    pub(super) fn surplus(self, priority: i32) -> Vec<ReleasableSlots> {
        let mut units: Vec<ReleasableSlots> = Vec::new();
        // Such gangs have reservations, so none of them is the one that asks.
        for view in self.stocked(|other| other <= priority) {
            let mut slices: BTreeMap<u32, usize> = BTreeMap::new();
            for (slice, spare) in view.surplus() {
                let uid = spare.pod.cloned();
                let Some(pod) = uid.and_then(|uid| self.as_pod(&spare, uid)) else {
                    continue;
                };
                // A slice is released as a whole.
                let at = slice.map_or(units.len(), |slice| *slices.entry(slice).or_insert(units.len()));
                match units.get_mut(at) {
                    Some(unit) => {
                        unit.slots.insert(spare.slot);
                        unit.what.pods.push(pod);
                    }
                    None => units.push(ReleasableSlots::new(&view, spare.slot, Source::Surplus, pod)),
                }
            }
        }
        units
    }

    /// Orphaned reservations of gangs of lower priority.
    pub(super) fn orphaned(self, priority: i32) -> Vec<ReleasableSlots> {
        let mut units = Vec::new();
        for view in self.stocked(|other| other < priority) {
            for slot in view.orphaned() {
                let pod = self.as_pod(&slot, PodUid::from(""));
                let Some(pod) = pod.filter(|pod| !pod.devices.is_empty()) else {
                    continue;
                };
                units.push(ReleasableSlots::new(&view, slot.slot, Source::Orphaned, pod));
            }
        }
        units
    }

    /// What a reservation's end returns, as if pod `uid` had it. Its devices may still be in use, or unhealthy.
    fn as_pod(self, place: &SlotView<'_>, uid: PodUid) -> Option<CandidatePod> {
        let node = self.facts.nodes.find(place.node.as_str())?;
        let shape = place.shape.and_then(|shape| self.shapes.get(shape));
        Some(CandidatePod {
            uid,
            node,
            devices: self.free_without(node, place.devices),
            // Counted only from when a pod is assigned to the reservation.
            numa: place.pod.and(shape).map_or_else(Vec::new, |shape| shape.request.numa().to_vec()),
            resources: shape.map_or_else(Default::default, |shape| shape.needs.resources.clone()),
            role: 0,
        })
    }

    /// The devices of a reservation that are free without it.
    fn free_without(self, node: NodeIx, devices: &Devices) -> Devices {
        let entry = self.facts.nodes.get(node);
        let Some(entry) = entry.filter(|entry| entry.withheld().is_none()) else {
            return Devices::new();
        };
        let free = entry.pools().map(|(pool, ledger)| {
            let own = devices.iter().filter(|(resource, _)| *resource == pool.resource);
            let mut free = gantry_planner::devices::DeviceSet::EMPTY;
            for (resource, ids) in own {
                free.add(&pool.taken(resource, ids));
            }
            free.remove(&ledger.held);
            free.remove(&ledger.leaving);
            for (resource, ids) in entry.occupancy().devices_in_binds(None).flatten() {
                free.remove(&pool.taken(resource, ids));
            }
            (pool.resource.clone(), pool.ids_of(&(&free & &pool.healthy)))
        });
        free.filter(|(_, ids)| !ids.is_empty()).collect()
    }

    /// Whether a placement uses a reservation: its devices, or resources of its node that are not left otherwise.
    pub(super) fn uses(self, placement: &Placement, place: &CandidatePod) -> bool {
        let Some(name) = self.facts.nodes.name(place.node) else {
            return false;
        };
        let here: Vec<_> = placement.places.iter().filter(|planned| planned.node == *name).collect();
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
        let Some(room) = self.facts.resources.get(place.node) else {
            return false;
        };
        let mut needed = gantry_gang::Resources::default();
        for shape in here.iter().filter_map(|planned| self.shapes.get(planned.shape)) {
            needed.add(&shape.needs.resources);
        }
        !here.is_empty() && room.left.fits(&needed).is_err()
    }

    /// Devices of orphaned reservations that pods which are gone return soon: `soon` decides it by the second since 1970 when a pod
    /// ended.
    pub(super) fn ending(self, priority: i32, mut soon: impl FnMut(i64) -> bool) -> Vec<CandidatePod> {
        let mut pods = Vec::new();
        for slot in self.stocked(|other| other < priority).iter().flat_map(View::orphaned) {
            let Some(node) = self.facts.nodes.find(slot.node.as_str()) else {
                continue;
            };
            let devices = self.ending_of(node, &slot, &mut soon);
            if !devices.is_empty() {
                pods.push(CandidatePod {
                    uid: "".into(),
                    node,
                    devices,
                    numa: NumaDemand::UNKNOWN.into(),
                    resources: gantry_gang::Resources::default(),
                    role: 0,
                });
            }
        }
        pods
    }

    /// The same for one reservation.
    fn ending_of(self, node: NodeIx, slot: &SlotView<'_>, mut soon: impl FnMut(i64) -> bool) -> Devices {
        let Some(entry) = self.facts.nodes.get(node) else {
            return Devices::default();
        };
        let mut ending = |id: &gantry_api::DeviceId| {
            let since = entry.lingers_since(id);
            since.is_some_and(|since| {
                let passed = self.facts.clock.now().at.saturating_duration_since(since).as_secs();
                soon(self.facts.clock.now().unix.saturating_sub_unsigned(passed))
            })
        };
        let devices = slot.devices.iter().map(|(resource, ids)| {
            let ids = ids.iter().filter(|id| ending(id)).cloned();
            (resource.clone(), ids.collect::<Vec<_>>())
        });
        devices.filter(|(_, ids)| !ids.is_empty()).collect()
    }
}
