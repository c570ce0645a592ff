//! Places of members beyond a minimum that nobody has come to: given back where a gang of the same priority or more does not fit without
//! them, and no more of them than it takes. With them those that are kept for lost members of gangs of lower priority (`idle`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Devices, Placement, View, Wanted};
use gantry_planner::preempt::{Occupant, OccupantPod, make_way};

use super::planning::asked_for;
use super::supply;
use crate::index::Index;
use crate::snapshot::NodeIx;

/// Places of one gang that are given back together.
pub(super) struct Unit {
    pub(super) gang: Arc<GangKey>,
    pub(super) slots: BTreeSet<u32>,
    pub(super) whose: Whose,
    /// What comes free with them.
    pub(super) what: Occupant,
}

impl Unit {
    /// One place, with what comes free with it.
    pub(super) fn new(view: &View<'_>, slot: u32, whose: Whose, pod: OccupantPod) -> Self {
        Self {
            gang: Arc::clone(view.key()),
            slots: [slot].into(),
            whose,
            what: Occupant {
                pods: vec![pod],
                priority: view.priority(),
                since: view.waiting_since(),
                checkpointed: false,
                budgets: Vec::new(),
            },
        }
    }
}

/// In which order gangs give back: the least important first, then the youngest.
fn by_loss<'a>(view: &View<'a>) -> (i32, Reverse<i64>, &'a Arc<GangKey>) {
    (view.priority(), Reverse(view.waiting_since()), view.key())
}

/// For whom places are kept that can be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// Members beyond the minimum that have not come.
    Beyond,
    /// Members that are lost, and for whom nobody has come.
    Lost,
}

/// How many devices can be given back, as of when that was last worked out. It takes a look at every place of gangs that may have some to
/// give, and those that want to know are as many as wait.
#[derive(Debug, Default)]
pub(super) struct Spare {
    room: u64,
    /// Of whom, and which standing of their places.
    of: Vec<(Arc<GangKey>, u64)>,
    /// By the priority of who gives them back.
    beyond: Amounts,
    lost: Amounts,
}

/// Devices of each resource by priority.
type Amounts = BTreeMap<i32, BTreeMap<ResourceName, u64>>;

impl Spare {
    /// Whether there is anything for a gang.
    fn has_any(&self, wanted: &Wanted) -> bool {
        let beyond = self.beyond.range(..=wanted.priority).next().is_some();
        beyond && !wanted.completes || self.lost.range(..wanted.priority).next().is_some()
    }

    /// Devices of a resource that can be given back for a gang.
    fn of(&self, wanted: &Wanted, resource: &ResourceName) -> u64 {
        let beyond = self.beyond.range(..=wanted.priority);
        let beyond = beyond.filter(|_| !wanted.completes);
        let all = beyond.chain(self.lost.range(..wanted.priority));
        all.filter_map(|(_, devices)| devices.get(resource)).sum()
    }
}

impl Index {
    /// Where a gang goes once other gangs have given back what they can do without; they have then. `None` if it does not fit even so.
    pub(super) fn release_extras(&mut self, wanted: &Wanted) -> Option<Placement> {
        let in_vain = self.gangs.vain.get(&wanted.gang);
        // For members beyond the minimum of a gang that is decided nobody gives anything back.
        if wanted.must == 0 && !wanted.completes || in_vain == Some(&asked_for(wanted)) {
            return None;
        }
        self.gangs.core.stocked().next()?;
        let wanted = &self.as_asked_of_others(wanted)?;
        // It costs many plans: of those that wait, the first few after each growth of room.
        if !self.are_enough(wanted) || !self.gangs.givings.another(self.gangs.room, &wanted.gang) {
            return None;
        }
        let mut units = match wanted.completes {
            true => Vec::new(),
            false => self.spare_units(wanted.priority),
        };
        units.extend(self.idle_units(wanted.priority));
        let spares: Vec<&Occupant> = units.iter().map(|unit| &unit.what).collect();
        let (go, placement) = self.on_terrain(Some(wanted), |input| make_way(input, wanted, &spares))?;
        for unit in go.into_iter().filter_map(|at| units.get(at)) {
            self.give_back(unit, &wanted.gang);
        }
        Some(placement)
    }

    /// What a gang asks for so that others give something back: one that is decided all that it lacks, or both would be short.
    fn as_asked_of_others(&self, wanted: &Wanted) -> Option<Wanted> {
        let wanted = wanted.clone();
        if !wanted.completes {
            return Some(wanted);
        }
        let view = self.gangs.core.view(&wanted.gang)?;
        Some(view.to_be_whole(wanted))
    }

    /// Places are given back for a gang.
    pub(super) fn give_back(&mut self, unit: &Unit, to: &GangKey) {
        let core = &mut self.gangs.core;
        match unit.whose {
            Whose::Beyond => core.release_extras(self.now, &unit.gang, &unit.slots),
            Whose::Lost => {
                tracing::info!(gang = %unit.gang, %to, "a place kept for a lost member goes to a gang of higher priority");
                let to: Arc<str> = format!("gang {to}").into();
                core.give_up_idle(self.now, &unit.gang, &unit.slots, &to)
            }
        };
    }

    /// What a gang was placed on was given back for it: if it could not take it, nothing is given back for it again while it asks for the
    /// same.
    pub(super) fn note_released(&mut self, wanted: &Wanted) {
        let view = self.gangs.core.view(&wanted.gang);
        if view.is_none_or(|view| view.slots().next().is_none()) {
            let asked = asked_for(wanted);
            self.gangs.vain.insert(Arc::clone(&wanted.gang), asked);
        }
    }

    /// Gangs of such a priority that may have places to give back, in that order.
    pub(super) fn stocked(&self, may: impl Fn(i32) -> bool) -> Vec<View<'_>> {
        let stocked = self.gangs.core.stocked();
        let mut stocked: Vec<View<'_>> = stocked.filter(|view| may(view.priority())).collect();
        stocked.sort_by_key(by_loss);
        stocked
    }

    /// What gangs of this priority or less can give back, in that order.
    fn spare_units(&self, priority: i32) -> Vec<Unit> {
        work::note();
        let mut units: Vec<Unit> = Vec::new();
        // Who has any is decided or planned, and so is not who asks for them.
        for view in self.stocked(|other| other <= priority) {
            let mut slices: BTreeMap<u32, usize> = BTreeMap::new();
            for (slice, spare) in view.spares() {
                let uid = spare.pod.cloned();
                let Some(pod) = uid.and_then(|uid| self.place_as_pod(&spare, uid)) else {
                    continue;
                };
                // A slice is not broken for it.
                let at = slice.map_or(units.len(), |slice| *slices.entry(slice).or_insert(units.len()));
                match units.get_mut(at) {
                    Some(unit) => {
                        unit.slots.insert(spare.slot);
                        unit.what.pods.push(pod);
                    }
                    None => units.push(Unit::new(&view, spare.slot, Whose::Beyond, pod)),
                }
            }
        }
        units
    }

    /// Those of some devices that a place is kept on that are free when it is not.
    pub(super) fn free_without(&self, node: NodeIx, devices: &Devices) -> Devices {
        let entry = self.nodes.get(node);
        let Some(entry) = entry.filter(|entry| entry.not_ready().is_none()) else {
            return Devices::new();
        };
        let free = entry.pools().map(|(pool, ledger)| {
            let own = devices.iter().filter(|(resource, _)| *resource == pool.resource);
            let mut free = crate::devices::DeviceSet::EMPTY;
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

    /// Whether there would be devices enough, as far as numbers tell.
    fn are_enough(&mut self, wanted: &Wanted) -> bool {
        let Some(asked) = supply::least(wanted, self.gangs.shapes.list()) else {
            return false;
        };
        self.count_spare();
        let (free, spare) = (self.gangs.free.of(&self.published), &self.gangs.spare);
        spare.has_any(wanted)
            && asked.iter().all(|(resource, least)| {
                let free = free.get(resource).copied().unwrap_or_default();
                *least <= free.saturating_add(spare.of(wanted, resource))
            })
    }

    /// Devices of a resource that are given back for a gang for whose sake others may be stopped besides.
    pub(super) fn idle_devices(&mut self, wanted: &Wanted, resource: &ResourceName) -> u64 {
        self.count_spare();
        let lower = self.gangs.spare.lost.range(..wanted.priority);
        lower.filter_map(|(_, devices)| devices.get(resource)).sum()
    }

    /// Counts what can be given back, if room has grown or places have changed since it was counted last.
    fn count_spare(&mut self) {
        let stocked = self.gangs.core.stocked();
        let of: Vec<_> = stocked
            .map(|view| (Arc::clone(view.key()), view.places_version()))
            .collect();
        let room = self.gangs.room;
        if self.gangs.spare.room == room && self.gangs.spare.of == of {
            return;
        }
        let mut spare = Spare {
            room,
            of,
            ..Spare::default()
        };
        let units = self.spare_units(i32::MAX).into_iter();
        for unit in units.chain(self.idle_units(i32::MAX)) {
            let devices = match unit.whose {
                Whose::Beyond => &mut spare.beyond,
                Whose::Lost => &mut spare.lost,
            };
            let devices = devices.entry(unit.what.priority).or_default();
            for (resource, ids) in unit.what.pods.into_iter().flat_map(|pod| pod.devices) {
                *devices.entry(resource).or_default() += ids.len() as u64;
            }
        }
        self.gangs.spare = spare;
    }
}

/// How often all places that can be given back were looked at: what a test holds against the number of gangs that wait.
pub(super) mod work {
    #[cfg(test)]
    thread_local! {
        static TIMES: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    pub(super) fn note() {
        #[cfg(test)]
        TIMES.with(|times| times.set(times.get() + 1));
    }

    /// How often since the last time, by this thread.
    #[cfg(test)]
    pub(in crate::index::gangs) fn take() -> u64 {
        TIMES.with(|times| times.replace(0))
    }
}
