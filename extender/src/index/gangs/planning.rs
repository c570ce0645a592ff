//! Plans gangs, one at a time, on the snapshot just published: whoever is next by the state machine's word gets a place as a whole, or a
//! reason.

use std::cell::Cell;
use std::sync::Arc;

use gantry_api::{PodUid, ResourceName};
use gantry_gang::Terms;
use gantry_gang::protocol::{Placement, Refused, Wanted};
use gantry_planner::input::{EFFORT, Exact, PlanInput, Shape};
use gantry_planner::preempt::Occupant;
use gantry_planner::{plan, preempt};

use super::supply;
use crate::index::Index;
use crate::snapshot::NodeIx;

/// What a gang asks for, as far as the words of a refusal go by it.
pub(super) type Asked = (Arc<Terms>, usize, u32);

pub(super) fn asked_for(wanted: &Wanted) -> Asked {
    (Arc::clone(&wanted.terms), wanted.members.len(), wanted.must)
}

/// What a gang is told that will fit once pods are gone that are being deleted.
fn until_gone(refused: &Refused) -> Refused {
    Refused {
        reason: format!("{} until pods that are being deleted are gone", refused.reason).into(),
        message: format!(
            "fits once pods are gone that are being deleted; now: {}",
            refused.message
        )
        .into(),
        hopeless: false,
    }
}

impl Index {
    /// Whether gangs are planned at all from now on: somebody who only looks may want to see first who waits.
    pub fn set_planning(&mut self, planning: bool) {
        self.gangs.planning = planning;
    }

    fn may_plan(&self) -> bool {
        self.gangs.planning && self.gangs.leading && self.is_synced()
    }

    /// Whether [`Index::plan_next`] has something to do.
    pub fn has_unplanned(&self) -> bool {
        self.may_plan() && self.gangs.core.has_next(self.gangs.room)
    }

    /// Plans the gang that is next; false if none is to be planned now.
    pub fn plan_next(&mut self) -> bool {
        if !self.may_plan() {
            return false;
        }
        let room = self.gangs.room;
        let Some(wanted) = self.gangs.core.next(self.now, room) else {
            self.gangs.tries.through(room);
            self.gangs.givings.through(room);
            self.gangs.helps.through(room);
            return false;
        };
        if wanted.without.is_empty() {
            // With a clean slate.
            self.gangs.offers.forget(&wanted.gang);
        }
        let (mut result, for_kept) = match self.too_little(&wanted) {
            Some(refused) => (Err(refused), false),
            None => self.plan_beside_kept(&wanted),
        };
        let mut awaits = false;
        let hopeless = matches!(&result, Err(refused) if refused.hopeless);
        let released = (result.is_err() && !hopeless).then(|| self.release_extras(&wanted));
        let released = released.flatten();
        let given_back = released.is_some();
        result = released.map_or(result, Ok);
        if let Err(refused) = &mut result {
            let searched = self.may_search(&wanted, hopeless);
            awaits = searched && self.awaits_ending(&wanted);
            let found = match awaits {
                true => wanted.resumes.then(|| self.resume(&wanted)).flatten(),
                false => searched.then(|| self.preempt(&wanted)).flatten(),
            };
            if awaits {
                *refused = until_gone(refused);
            }
            match found {
                Some(placement) => result = Ok(placement),
                None => {
                    if !hopeless {
                        self.gangs.victim_watch.refused(self.gangs.room, wanted.priority);
                    }
                    self.refused(&wanted, hopeless);
                }
            }
        }
        if result.is_ok() {
            self.gangs.awaits.remove(&wanted.gang);
        }
        match &result {
            // What it is told while it awaits somebody's end is not true for long, nor while nodes are kept that it would fit on.
            Err(_) if !awaits && !for_kept => self
                .gangs
                .asked
                .insert(Arc::clone(&wanted.gang), asked_for(&wanted)),
            _ => self.gangs.asked.remove(&wanted.gang),
        };
        let lacks_yet = wanted.completes && result.is_err();
        self.gangs.core.placed(self.now, &wanted.gang, result);
        if given_back {
            self.note_released(&wanted);
        }
        if lacks_yet {
            self.help_the_stuck();
        }
        true
    }

    /// The words of its last refusal, for a gang that was refused before and asks for more devices than are free at all: on a full cluster
    /// most of a long queue needs no plan to be told so again.
    fn too_little(&mut self, wanted: &Wanted) -> Option<Refused> {
        // Only for what it was refused for: the words say that.
        if self.gangs.asked.get(&wanted.gang) != Some(&asked_for(wanted)) {
            return None;
        }
        let refused = self.gangs.core.view(&wanted.gang)?.refused()?.clone();
        if refused.hopeless {
            // That goes by more than devices; and nobody is stopped for one whom nothing would help.
            return None;
        }
        let asked = supply::least(wanted, self.gangs.shapes.list())?;
        let free = self.gangs.free.of(&self.published);
        let mut asked = asked.iter();
        let short = asked.any(|(resource, least)| *least > free.get(resource).copied().unwrap_or_default());
        short.then_some(refused)
    }

    /// Whether anybody who may be stopped for a gang has enough of what it asks for, as far as numbers tell.
    fn may_come_free(&mut self, wanted: &Wanted) -> bool {
        let gangs = &mut self.gangs;
        gangs.held.count(self.resources.moves(), &self.pods);
        let Some(asked) = supply::least(wanted, gangs.shapes.list()) else {
            return false;
        };
        let idle: Vec<u64> = asked
            .keys()
            .map(|resource| self.idle_devices(wanted, resource))
            .collect();
        let gangs = &mut self.gangs;
        let free = gangs.free.of(&self.published);
        let enough = |((resource, least), idle): ((&ResourceName, &u64), u64)| {
            let free = free.get(resource).copied().unwrap_or_default();
            let held = gangs.held.below(wanted.priority, resource);
            *least <= free.saturating_add(held).saturating_add(idle)
        };
        let anybody = gangs.held.has_below(wanted.priority) || self.resources.has_below(wanted.priority);
        anybody && asked.iter().zip(idle).all(enough)
    }

    /// Where a gang goes without the nodes that are kept for another. If those are all it lacks, it is told so, and this is true.
    fn plan_beside_kept(&self, wanted: &Wanted) -> (Result<Placement, Refused>, bool) {
        if wanted.completes {
            // It goes before the gang that they are kept for, and spares it where it can.
            let beside = Wanted {
                completes: false,
                ..wanted.clone()
            };
            let spares = self.kept_from(&beside).is_some();
            let found = spares.then(|| self.on_terrain(Some(&beside), |input| plan::plan(input, &beside)));
            if let Some(Ok(placement)) = found {
                return (Ok(placement), false);
            }
        }
        let result = self.on_terrain(Some(wanted), |input| plan::plan(input, wanted));
        let Some(kept) = self.kept_from(wanted).filter(|_| result.is_err()) else {
            return (result, false);
        };
        if let Err(refused) = self.on_terrain(None, |input| plan::plan(input, wanted)) {
            return (Err(refused), false);
        }
        let reason: Arc<str> = format!(
            "does not fit beside the nodes kept for gang {}, which waits",
            kept.gang
        )
        .into();
        let refused = Refused {
            message: Arc::clone(&reason),
            reason,
            hopeless: false,
        };
        (Err(refused), true)
    }

    /// Whether victims are looked for. Not while nodes are kept for a gang before it.
    fn may_search(&mut self, wanted: &Wanted, hopeless: bool) -> bool {
        // For a gang that is decided nobody is stopped.
        let may =
            !hopeless && wanted.must > 0 && self.kept_from(wanted).is_none() && self.may_preempt(wanted);
        // Who would have nobody stopped in any case leaves the tries to others.
        may && self.may_come_free(wanted) && self.gangs.tries.another(self.gangs.room, &wanted.gang)
    }

    /// Whether a gang fits once those are gone who are on their way out anyway. It is planned again when one of them is overdue. It waits
    /// no longer than for those who were on their way when it began to: where pods come and go all the time there may always be some, and
    /// others get what they leave.
    fn awaits_ending(&mut self, wanted: &Wanted) -> bool {
        let idle = self.idle_units(wanted.priority);
        let idle: Vec<&Occupant> = idle.iter().map(|unit| &unit.what).collect();
        let would_fit = self.ending(wanted.priority).filter(|(ending, _)| {
            self.on_terrain(Some(wanted), |input| {
                preempt::beside(input, &idle, |input| preempt::fits_without(input, wanted, ending))
            })
        });
        let Some((_, overdue)) = would_fit else {
            // The next time it waits anew.
            self.gangs.awaits.remove(&wanted.gang);
            return false;
        };
        let until = self.gangs.awaits.get(&wanted.gang).copied();
        let until = until.unwrap_or(overdue.end);
        self.gangs.awaits.insert(Arc::clone(&wanted.gang), until);
        if self.now.unix >= until {
            return false;
        }
        let next = overdue.start.min(until);
        let known = self.gangs.overdue.unwrap_or(next);
        self.gangs.overdue = Some(known.min(next));
        true
    }

    /// Where a gang goes for which others were stopped by the process before, once as many of those are gone who are on their way out as it
    /// takes. Who it was that was stopped is not written anywhere.
    fn resume(&self, wanted: &Wanted) -> Option<Placement> {
        let units: Vec<Occupant> = self.each_ending().collect();
        let mut placement = self.on_terrain(Some(wanted), |input| preempt::preempt(input, wanted, &units))?;
        let leaving = std::mem::take(&mut placement.victims).into_iter();
        let leaving = leaving.map(|uid| self.ends_by(&uid).map(|by| (uid, by)));
        placement.leaving = leaving.collect::<Option<_>>()?;
        Some(placement)
    }

    /// Where a gang goes once others were stopped for it. Places of lost members that nobody has come to go before anybody; they are given
    /// back then.
    fn preempt(&mut self, wanted: &Wanted) -> Option<Placement> {
        let units = self.idle_units(wanted.priority);
        let idle: Vec<&Occupant> = units.iter().map(|unit| &unit.what).collect();
        let placement = self.among_occupants(wanted, |occupants| {
            self.on_terrain(Some(wanted), |input| {
                preempt::beside(input, &idle, |input| preempt::preempt(input, wanted, &occupants))
            })
        })?;
        self.give_back_for(&wanted.gang, &placement, &units);
        Some(placement)
    }

    /// What a plan is made from, for `gang`: nodes kept for another are barred for it, and to a shape whose planned nodes were not offered
    /// all that were not; what kube-scheduler makes free for pods that are no less important is not free.
    pub(super) fn on_terrain<R>(&self, gang: Option<&Wanted>, make: impl FnOnce(&PlanInput<'_>) -> R) -> R {
        let kept = gang.and_then(|gang| self.kept_from(gang));
        let barred = |shape: &Shape, gone: &[&PodUid]| {
            let mut barred = self.resources.barred(&shape.needs, gone);
            if let Some(gang) = gang {
                self.gangs.offers.narrow(&gang.gang, shape, &mut barred);
            }
            if let Some(kept) = kept {
                barred.nodes.extend(kept.nodes());
                barred.nodes.sort_unstable();
                barred.nodes.dedup();
            }
            barred
        };
        let nominated = gang
            .map(|gang| self.beside_nominated(gang.priority))
            .unwrap_or_default();
        let classes = nominated.iter().map(|(node, exact)| (*node, &exact.class));
        let beside = (!nominated.is_empty()).then(|| self.published.with(classes));
        let exact = |node: NodeIx| nominated.get(&node).cloned().or_else(|| self.exact(node));
        make(&PlanInput {
            snapshot: beside.as_ref().unwrap_or(&self.published),
            rooms: self.resources.nodes(),
            fabric: self.fabric(),
            shapes: self.gangs.shapes.list(),
            barred: &barred,
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }

    pub(super) fn exact(&self, node: NodeIx) -> Option<Exact<'_>> {
        let entry = self.nodes.get(node)?;
        let inventory = entry.inventory()?;
        Some(Exact {
            class: entry.exact(&self.reservations.holds().on(node))?,
            ids: inventory.pools.iter().map(crate::inventory::Pool::ids).collect(),
        })
    }
}
