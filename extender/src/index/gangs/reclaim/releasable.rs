//! Reservations that other gangs can release for a gang: surplus ones, of members beyond a minimum that have not arrived, and orphaned ones,
//! of lost members without a replacement.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, GangEvent, Placement, PlanRequest, SlotView, View};
use gantry_planner::preempt::{CandidatePod, VictimCandidate, plan_without_fewest};
use gantry_planner::request::NumaDemand;

use super::asked_for;
use super::supply::{ReleasableDevices, least};
use crate::index::Index;
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
pub(super) struct Releasable {
    gang: Arc<GangKey>,
    slots: BTreeSet<u32>,
    source: Source,
    /// What comes free with them.
    pub(super) what: VictimCandidate,
}

impl Releasable {
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
}

/// The order in which gangs release: the lowest priority first, then the youngest.
fn by_loss<'a>(view: &View<'a>) -> (i32, Reverse<i64>, &'a Arc<GangKey>) {
    (view.priority(), Reverse(view.waiting_since()), view.key())
}

impl Index {
    /// The placement of a gang for which others have released as few reservations as suffice; `None` if it does not fit even so.
    pub(super) fn release_for(&mut self, wanted: &PlanRequest) -> Option<Placement> {
        let reclaim = &self.gangs.reclaim;
        // Never for surplus members of a decided gang, nor again for a gang that did not use it.
        if wanted.must == 0 && !wanted.completes
            || reclaim.unused.get(&wanted.gang) == Some(&asked_for(wanted))
        {
            return None;
        }
        self.gangs.core.may_give_back().next()?;
        let wanted = &self.whole_request(wanted)?;
        if !self.releasable_may_suffice(wanted) || !self.gangs.reclaim.may_search(&wanted.gang) {
            return None;
        }
        self.gangs.reclaim.note_survey();
        let mut units = match wanted.completes {
            true => Vec::new(),
            false => self.surplus_reservations(wanted.priority),
        };
        units.extend(self.orphaned_reservations(wanted.priority));
        let candidates: Vec<&VictimCandidate> = units.iter().map(|unit| &unit.what).collect();
        let (go, placement) =
            self.on_terrain(Some(wanted), |input| plan_without_fewest(input, wanted, &candidates))?;
        for unit in go.into_iter().filter_map(|at| units.get(at)) {
            self.release(unit, &wanted.gang);
        }
        Some(placement)
    }

    /// What a gang asks for when others release something: a degraded gang all that it lacks, or both would be degraded.
    fn whole_request(&self, wanted: &PlanRequest) -> Option<PlanRequest> {
        let wanted = wanted.clone();
        if !wanted.completes {
            return Some(wanted);
        }
        let view = self.gangs.core.view(&wanted.gang)?;
        Some(view.to_be_whole(wanted))
    }

    fn release(&mut self, unit: &Releasable, to: &GangKey) {
        let (gang, slots) = (&*unit.gang, &unit.slots);
        match unit.source {
            Source::Surplus => self.gangs.handle(self.now, GangEvent::ReleaseSurplus { gang, slots }),
            Source::Orphaned => {
                tracing::info!(gang = %unit.gang, %to, "the reservation of a lost member goes to a gang of higher priority");
                let to: Arc<str> = format!("gang {to}").into();
                let to = &to;
                self.gangs.handle(self.now, GangEvent::ReleaseOrphaned { gang, slots, to })
            }
        };
    }

    /// Other gangs released reservations for a gang. If it could not use them, none is released for it again while it asks for the same.
    pub(in crate::index::gangs) fn note_released(&mut self, wanted: &PlanRequest) {
        let view = self.gangs.core.view(&wanted.gang);
        if view.is_none_or(|view| view.slots().next().is_none()) {
            let asked = asked_for(wanted);
            self.gangs.reclaim.unused.insert(Arc::clone(&wanted.gang), asked);
        }
    }

    /// Gangs with some priorities that may have releasable reservations, in the order in which they release.
    fn stocked(&self, may: impl Fn(i32) -> bool) -> Vec<View<'_>> {
        let stocked = self.gangs.core.may_give_back();
        let mut stocked: Vec<View<'_>> = stocked.filter(|view| may(view.priority())).collect();
        stocked.sort_by_key(by_loss);
        stocked
    }

    /// Surplus reservations of gangs of this priority or less.
    fn surplus_reservations(&self, priority: i32) -> Vec<Releasable> {
        let mut units: Vec<Releasable> = Vec::new();
        // Such gangs have reservations, so none of them is the one that asks.
        for view in self.stocked(|other| other <= priority) {
            let mut slices: BTreeMap<u32, usize> = BTreeMap::new();
            for (slice, spare) in view.surplus() {
                let uid = spare.pod.cloned();
                let Some(pod) = uid.and_then(|uid| self.reservation_as_pod(&spare, uid)) else {
                    continue;
                };
                // A slice is released as a whole.
                let at = slice.map_or(units.len(), |slice| *slices.entry(slice).or_insert(units.len()));
                match units.get_mut(at) {
                    Some(unit) => {
                        unit.slots.insert(spare.slot);
                        unit.what.pods.push(pod);
                    }
                    None => units.push(Releasable::new(&view, spare.slot, Source::Surplus, pod)),
                }
            }
        }
        units
    }

    /// Orphaned reservations of gangs of lower priority.
    pub(super) fn orphaned_reservations(&self, priority: i32) -> Vec<Releasable> {
        let mut units = Vec::new();
        for view in self.stocked(|other| other < priority) {
            for slot in view.orphaned() {
                let pod = self.reservation_as_pod(&slot, PodUid::from(""));
                let Some(pod) = pod.filter(|pod| !pod.devices.is_empty()) else {
                    continue;
                };
                units.push(Releasable::new(&view, slot.slot, Source::Orphaned, pod));
            }
        }
        units
    }

    /// What a reservation's end returns, as if pod `uid` had it. Its devices may still be in use, or unhealthy.
    fn reservation_as_pod(&self, place: &SlotView<'_>, uid: PodUid) -> Option<CandidatePod> {
        let node = self.nodes.find(place.node.as_str())?;
        let shape = place.shape.and_then(|shape| self.gangs.shapes.get(shape));
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
    fn free_without(&self, node: NodeIx, devices: &Devices) -> Devices {
        let entry = self.nodes.get(node);
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

    /// Releases the orphaned reservations that a placement uses.
    pub(super) fn release_used(&mut self, gang: &GangKey, placement: &Placement, units: &[Releasable]) {
        let takes = |unit: &&Releasable| unit.what.pods.iter().any(|pod| self.uses(placement, pod));
        let taken: Vec<&Releasable> = units.iter().filter(takes).collect();
        for unit in taken {
            self.release(unit, gang);
        }
    }

    /// Whether a placement uses a reservation: its devices, or resources of its node that are not left otherwise.
    fn uses(&self, placement: &Placement, place: &CandidatePod) -> bool {
        let Some(name) = self.nodes.name(place.node) else {
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
        let Some(room) = self.resources.get(place.node) else {
            return false;
        };
        let mut needed = gantry_gang::Resources::default();
        for shape in here.iter().filter_map(|planned| self.gangs.shapes.get(planned.shape)) {
            needed.add(&shape.needs.resources);
        }
        !here.is_empty() && room.left.fits(&needed).is_err()
    }

    /// Devices of orphaned reservations that pods which are gone return soon. `soon` says so by the second since 1970 when a pod
    /// ended.
    pub(super) fn orphaned_ending(
        &self,
        priority: i32,
        mut soon: impl FnMut(i64) -> bool,
    ) -> Vec<CandidatePod> {
        let mut pods = Vec::new();
        for slot in self.stocked(|other| other < priority).iter().flat_map(View::orphaned) {
            let Some(node) = self.nodes.find(slot.node.as_str()) else {
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

    /// A reservation on a node is orphaned now: refused gangs are worth another plan.
    pub(in crate::index) fn reservation_orphaned(&mut self, node: NodeIx) {
        let Some(entry) = self.nodes.get(node) else {
            return;
        };
        let kept = entry.occupancy().gang_reservations().iter().filter(|place| place.pod.is_none());
        let priorities = kept.filter_map(|place| Some(self.gangs.core.view(&place.gang)?.priority()));
        let Some(lowest) = priorities.min() else {
            return;
        };
        self.gangs.reclaim.candidate_came(lowest);
    }

    /// Whether free and releasable devices are enough for a gang, by number.
    fn releasable_may_suffice(&mut self, wanted: &PlanRequest) -> bool {
        let Some(asked) = least(wanted, self.gangs.shapes.list()) else {
            return false;
        };
        self.count_releasable();
        let reclaim = &mut self.gangs.reclaim;
        let (free, releasable) = (reclaim.free.of(&self.published), &reclaim.releasable);
        releasable.has_any(wanted)
            && asked.iter().all(|(resource, least)| {
                let free = free.get(resource).copied().unwrap_or_default();
                *least <= free.saturating_add(releasable.of(wanted, resource))
            })
    }

    /// Counts releasable devices, if something changed since the last count.
    pub(super) fn count_releasable(&mut self) {
        let stocked = self.gangs.core.may_give_back();
        let gangs: Vec<_> = stocked.map(|view| (Arc::clone(view.key()), view.slots_version())).collect();
        let reclaim = &self.gangs.reclaim;
        let Some(mut counts) = ReleasableDevices::recount(reclaim.growth, gangs, &reclaim.releasable) else {
            return;
        };
        self.gangs.reclaim.note_survey();
        let surplus = self.surplus_reservations(i32::MAX).into_iter();
        for unit in surplus.chain(self.orphaned_reservations(i32::MAX)) {
            counts.add(unit.source, unit.what);
        }
        self.gangs.reclaim.releasable = counts;
    }
}
