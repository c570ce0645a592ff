//! The reclaim ladder: where the devices for a gang come from that does not fit, cheapest source first. [`planning`](super::planning) has
//! tried free devices outside backfill reservations before.
//!
//! 1. **Surplus and orphaned reservations**: those of members beyond a minimum that have not arrived, for gangs of the same priority or
//!    more; those of lost members, for gangs of a higher one. As few as suffice.
//! 2. **Terminating pods**: the gang waits for them, at most until the last of those that it began to wait for is overdue.
//! 3. **Victims**: pods and whole gangs of lower priority, with orphaned reservations as free.
//!
//! A search costs many plans. Counts rule out most of a long queue, and one [`SearchBudget`] limits the rest.

mod budget;
mod releasable;
mod supply;
mod victims;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::ResourceName;
use gantry_gang::protocol::{Placement, PlanRequest, Refusal};
use gantry_gang::{GangKey, Terms};
use gantry_planner::preempt::{self, VictimCandidate};
use gantry_planner::snapshot::Snapshot;

use self::budget::VictimWatch;
use self::supply::{FreeDevices, HeldDevices, ReleasableDevices, least};
use crate::index::Index;

pub(super) use self::budget::SearchBudget;
pub(super) use self::victims::OVERDUE;

/// How long refusals may give outdated numbers of free devices. Then gangs that still do not fit are planned again for their text alone.
/// Each waiting gang adds [`REFRESH_OF_EACH`], so that a long queue costs little.
const REFRESH: Duration = Duration::from_secs(15);
const REFRESH_OF_EACH: Duration = Duration::from_millis(50);

/// What a gang asks for, as far as the text of its refusal depends on it.
type Asked = (Arc<Terms>, usize, u32);

/// What a gang was refused for.
#[derive(Debug)]
struct Refused {
    asked: Asked,
    /// The free devices that the refusal tells.
    free: Arc<BTreeMap<ResourceName, u64>>,
}

fn asked_for(wanted: &PlanRequest) -> Asked {
    (Arc::clone(&wanted.terms), wanted.members.len(), wanted.must)
}

/// What the ladder remembers between plans.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    /// Grows whenever a refused gang may fit.
    growth: u64,
    budget: SearchBudget,
    /// Whether the gang being planned may search, once it has asked for that.
    granted: Option<bool>,
    free: FreeDevices,
    held: HeldDevices,
    releasable: ReleasableDevices,
    /// The last refusals of gangs.
    refused: HashMap<Arc<GangKey>, Refused>,
    /// When refusals were last replaced because they told of other free devices.
    refreshed: Option<Instant>,
    /// What gangs asked for that did not use what was released for them.
    unused: HashMap<Arc<GangKey>, Asked>,
    /// Until when gangs wait for terminating pods, in seconds since 1970.
    waits: HashMap<Arc<GangKey>, i64>,
    /// When the first of those pods is overdue, in seconds since 1970.
    overdue: Option<i64>,
    victim_watch: VictimWatch,
    /// How often all releasable reservations were looked at.
    #[cfg(test)]
    surveys: u64,
}

impl Reclaim {
    /// Grows whenever a refused gang may fit.
    pub(super) fn growth(&self) -> u64 {
        self.growth
    }

    /// Devices came free, or nodes changed: refused gangs are planned again.
    pub(super) fn grow(&mut self) {
        self.growth += 1;
    }

    /// The totals, labels or taints of nodes changed: the texts of refusals may be wrong.
    pub(super) fn reshape(&mut self) {
        self.refused.clear();
        self.grow();
    }

    /// A pod is on its node, or a reservation became orphaned: gangs of higher priority are planned again with the next tick.
    pub(super) fn candidate_came(&mut self, priority: i32) {
        self.victim_watch.came(priority);
    }

    /// Disruption budgets allow more: refused gangs are planned again with the next tick.
    pub(super) fn budgets_grew(&mut self) {
        self.victim_watch.budgets_grew();
    }

    /// Time passes.
    pub(super) fn tick(&mut self, now: Instant, snapshot: &Snapshot) {
        if self.victim_watch.take() {
            self.grow();
        }
        let gangs = u32::try_from(self.refused.len()).unwrap_or(u32::MAX);
        let pause = REFRESH.saturating_add(REFRESH_OF_EACH.saturating_mul(gangs));
        let since = *self.refreshed.get_or_insert(now);
        if gangs > 0 && now.saturating_duration_since(since) >= pause {
            let free = self.free.of(snapshot);
            if self.refused.values().any(|refused| refused.free != *free) {
                self.refreshed = Some(now);
                self.reshape();
            }
        }
    }

    /// All releasable reservations are looked at, which must not happen for each gang of a long queue.
    fn note_survey(&mut self) {
        #[cfg(test)]
        {
            self.surveys += 1;
        }
    }

    /// How often all releasable reservations were looked at.
    #[cfg(test)]
    pub(super) fn surveys(&self) -> u64 {
        self.surveys
    }

    /// Whether a terminating pod has become overdue.
    pub(super) fn take_overdue(&mut self, unix: i64) -> bool {
        self.overdue.take_if(|at| *at <= unix).is_some()
    }

    /// Forgets gangs that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&GangKey) -> bool) {
        self.refused.retain(|gang, _| exists(gang));
        self.unused.retain(|gang, _| exists(gang));
        self.waits.retain(|gang, _| exists(gang));
    }

    /// Forgets all gangs.
    pub(super) fn restart(&mut self) {
        self.retain(|_| false);
        self.grow();
    }

    /// A gang is about to be planned.
    pub(super) fn begin(&mut self) {
        self.granted = None;
    }

    /// Every waiting gang was planned since the last growth.
    pub(super) fn all_planned(&mut self) {
        self.budget.all_planned(self.growth);
    }

    /// Whether a gang may search. Asked only when counts do not rule the search out.
    fn may_search(&mut self, gang: &Arc<GangKey>) -> bool {
        let (budget, growth) = (&mut self.budget, self.growth);
        *self.granted.get_or_insert_with(|| budget.take(growth, gang))
    }

    /// A plan for a gang is final. The text of its refusal can be repeated if it `is_stable`.
    pub(super) fn planned(
        &mut self,
        wanted: &PlanRequest,
        is_placed: bool,
        is_stable: bool,
        snapshot: &Snapshot,
    ) {
        if is_placed {
            self.waits.remove(&wanted.gang);
        }
        if is_stable && !is_placed {
            // A repeated refusal tells what it told before.
            let free = Arc::clone(self.free.of(snapshot));
            let refused = || Refused { asked: asked_for(wanted), free };
            self.refused.entry(Arc::clone(&wanted.gang)).or_insert_with(refused);
        } else {
            self.refused.remove(&wanted.gang);
        }
    }

    /// A gang was refused after every source was tried.
    pub(super) fn refused(&mut self, wanted: &PlanRequest) {
        self.victim_watch.refused(self.growth, wanted.priority);
    }
}

/// What the ladder found for a gang.
#[derive(Debug)]
pub(super) enum Reclaimed {
    /// Other gangs released reservations for it.
    Released(Placement),
    /// Victims are evicted for it, or were by an earlier process.
    Preempted(Placement),
    /// It fits once terminating pods are gone.
    Terminating,
    /// No source has enough.
    Nothing,
}

impl Index {
    /// Looks for devices for a gang that does not fit and is not hopeless.
    pub(super) fn reclaim(&mut self, wanted: &PlanRequest) -> Reclaimed {
        if let Some(placement) = self.release_for(wanted) {
            return Reclaimed::Released(placement);
        }
        if !self.may_look_for_victims(wanted) {
            return Reclaimed::Nothing;
        }
        if self.waits_for_terminating(wanted) {
            let resumed = wanted.resumes.then(|| self.resume(wanted)).flatten();
            return resumed.map_or(Reclaimed::Terminating, Reclaimed::Preempted);
        }
        self.preempt(wanted).map_or(Reclaimed::Nothing, Reclaimed::Preempted)
    }

    /// The last refusal of a gang that still asks for the same and for more devices than are free: on a full cluster most of a long queue
    /// needs no plan.
    pub(super) fn repeated_refusal(&mut self, wanted: &PlanRequest) -> Option<Refusal> {
        let repeated = self.refusal_that_stands(wanted);
        if repeated.is_none() {
            self.gangs.reclaim.refused.remove(&wanted.gang);
        }
        repeated
    }

    fn refusal_that_stands(&mut self, wanted: &PlanRequest) -> Option<Refusal> {
        // Other groups of a tree may take fewer devices.
        let before = self.gangs.reclaim.refused.get(&wanted.gang);
        let repeats = before.is_some_and(|before| before.asked == asked_for(wanted));
        if !repeats || !wanted.others.is_empty() {
            return None;
        }
        let refused = self.gangs.core.view(&wanted.gang)?.refusal()?.clone();
        if refused.is_hopeless() {
            // Hopelessness depends on more than devices.
            return None;
        }
        let asked = least(wanted, self.gangs.shapes.list())?;
        let free = self.gangs.reclaim.free.of(&self.published);
        let mut asked = asked.iter();
        let short = asked.any(|(resource, least)| *least > free.get(resource).copied().unwrap_or_default());
        short.then_some(refused)
    }

    /// Whether terminating pods and victims are considered: never for a decided gang, nor while nodes are reserved for a gang before it, nor
    /// if all pods of lower priority together have too few devices.
    fn may_look_for_victims(&mut self, wanted: &PlanRequest) -> bool {
        let may = wanted.must > 0 && self.kept_from(wanted).is_none() && self.may_preempt(wanted);
        may && self.victims_may_suffice(wanted) && self.gangs.reclaim.may_search(&wanted.gang)
    }

    fn victims_may_suffice(&mut self, wanted: &PlanRequest) -> bool {
        let Some(asked) = least(wanted, self.gangs.shapes.list()) else {
            return false;
        };
        self.count_releasable();
        let reclaim = &mut self.gangs.reclaim;
        reclaim.held.count(self.resources.moves(), &self.pods);
        let free = reclaim.free.of(&self.published);
        let (held, releasable) = (&reclaim.held, &reclaim.releasable);
        let any = held.has_below(wanted.priority) || self.resources.has_below(wanted.priority);
        any && asked.iter().all(|(resource, least)| {
            let free = free.get(resource).copied().unwrap_or_default();
            let held = held.below(wanted.priority, resource);
            let orphaned = releasable.orphaned(wanted, resource);
            *least <= free.saturating_add(held).saturating_add(orphaned)
        })
    }

    /// Whether a gang fits once terminating pods are gone. It is planned again when one of them is overdue. It waits no longer than for those
    /// that were terminating when it began to: where pods come and go all the time, others may take what they leave.
    fn waits_for_terminating(&mut self, wanted: &PlanRequest) -> bool {
        let orphaned = self.orphaned_reservations(wanted.priority);
        let orphaned: Vec<&VictimCandidate> = orphaned.iter().map(|unit| &unit.what).collect();
        let fits = self.ending(wanted.priority).filter(|(ending, _)| {
            self.on_terrain(Some(wanted), |input| {
                preempt::with_released(input, &orphaned, |input| preempt::fits_without(input, wanted, ending))
            })
        });
        let reclaim = &mut self.gangs.reclaim;
        let Some((_, overdue)) = fits else {
            reclaim.waits.remove(&wanted.gang);
            return false;
        };
        let until = reclaim.waits.get(&wanted.gang).copied();
        let until = until.unwrap_or(overdue.end);
        reclaim.waits.insert(Arc::clone(&wanted.gang), until);
        if self.now.unix >= until {
            return false;
        }
        let next = overdue.start.min(until);
        reclaim.overdue = Some(reclaim.overdue.unwrap_or(next).min(next));
        true
    }

    /// The placement of a gang for which an earlier process evicted pods, without as few of the terminating pods as possible. Which pods were
    /// evicted for it is not recorded.
    fn resume(&self, wanted: &PlanRequest) -> Option<Placement> {
        let units: Vec<VictimCandidate> = self.each_ending().collect();
        let mut placement = self.on_terrain(Some(wanted), |input| preempt::preempt(input, wanted, &units))?;
        let leaving = std::mem::take(&mut placement.victims).into_iter();
        let leaving = leaving.map(|uid| self.ends_by(&uid).map(|by| (uid, by)));
        placement.leaving = leaving.collect::<Option<_>>()?;
        Some(placement)
    }

    /// The placement of a gang once its victims are gone. Orphaned reservations that it uses are released now.
    fn preempt(&mut self, wanted: &PlanRequest) -> Option<Placement> {
        let units = self.orphaned_reservations(wanted.priority);
        let orphaned: Vec<&VictimCandidate> = units.iter().map(|unit| &unit.what).collect();
        let placement = self.among_candidates(wanted, |candidates| {
            self.on_terrain(Some(wanted), |input| {
                preempt::with_released(input, &orphaned, |input| preempt::preempt(input, wanted, candidates))
            })
        })?;
        self.release_used(&wanted.gang, &placement, &units);
        Some(placement)
    }
}
