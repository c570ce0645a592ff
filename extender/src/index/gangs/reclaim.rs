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
use gantry_gang::protocol::{Gangs, Placement, PlanRequest, Refusal};
use gantry_gang::{GangKey, Terms};
use gantry_planner::preempt::{self, VictimCandidate, plan_without_fewest};
use gantry_planner::snapshot::Snapshot;

use self::budget::VictimWatch;
use self::releasable::{ReleasableReservations, ReleasableSlots};
use self::supply::{FreeDevices, HeldDevices, ReleasableDevices, least};
use super::machine::Machine;
use super::plan_input::PlanSource;

pub(super) use self::budget::SearchBudget;
pub(super) use self::victims::{OVERDUE, VictimCandidates};

/// How long refusals may give outdated numbers of free devices. Then gangs that still do not fit are planned again for their text alone.
/// Each waiting gang adds [`REFRESH_OF_EACH`], so that a long queue costs little.
const REFRESH: Duration = Duration::from_secs(15);
const REFRESH_OF_EACH: Duration = Duration::from_millis(50);

/// What a gang asks for, as far as the text of its refusal depends on it.
type RequestKey = (Arc<Terms>, usize, u32);

/// What a gang was refused for.
#[derive(Debug)]
struct LastRefusal {
    asked: RequestKey,
    /// The free devices that the refusal states.
    free: Arc<BTreeMap<ResourceName, u64>>,
}

fn asked_for(wanted: &PlanRequest) -> RequestKey {
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
    refused: HashMap<Arc<GangKey>, LastRefusal>,
    /// When refusals were last replaced because they stated other free devices.
    refreshed: Option<Instant>,
    /// What gangs asked for that did not use what was released for them.
    unused: HashMap<Arc<GangKey>, RequestKey>,
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
            // A repeated refusal states the same as before.
            let free = Arc::clone(self.free.of(snapshot));
            let refused = || LastRefusal { asked: asked_for(wanted), free };
            self.refused.entry(Arc::clone(&wanted.gang)).or_insert_with(refused);
        } else {
            self.refused.remove(&wanted.gang);
        }
    }

    /// A gang was refused after every source was tried.
    pub(super) fn refused(&mut self, wanted: &PlanRequest) {
        self.victim_watch.refused(self.growth, wanted.priority);
    }

    /// Looks for devices for a gang that does not fit and is not hopeless.
    pub(super) fn find(
        &mut self,
        machine: &mut Machine,
        source: PlanSource<'_>,
        wanted: &PlanRequest,
    ) -> ReclaimOutcome {
        if let Some(placement) = self.release_for(machine, source, wanted) {
            return ReclaimOutcome::Released(placement);
        }
        if !self.may_look_for_victims(machine.gangs(), source, wanted) {
            return ReclaimOutcome::Nothing;
        }
        if self.waits_for_terminating(machine.gangs(), source, wanted) {
            let resumed = wanted.resumes.then(|| resume(machine.gangs(), source, wanted)).flatten();
            return resumed.map_or(ReclaimOutcome::Terminating, ReclaimOutcome::Preempted);
        }
        preempt_for(machine, source, wanted).map_or(ReclaimOutcome::Nothing, ReclaimOutcome::Preempted)
    }

    /// The last refusal of a gang that still asks for the same and for more devices than are free: on a full cluster most of a long queue
    /// needs no plan.
    pub(super) fn repeated_refusal(
        &mut self,
        gangs: &Gangs,
        source: PlanSource<'_>,
        wanted: &PlanRequest,
    ) -> Option<Refusal> {
        let repeated = self.refusal_that_stands(gangs, source, wanted);
        if repeated.is_none() {
            self.refused.remove(&wanted.gang);
        }
        repeated
    }

    fn refusal_that_stands(
        &mut self,
        gangs: &Gangs,
        source: PlanSource<'_>,
        wanted: &PlanRequest,
    ) -> Option<Refusal> {
        // Other groups of a tree may take fewer devices.
        let before = self.refused.get(&wanted.gang);
        let repeats = before.is_some_and(|before| before.asked == asked_for(wanted));
        if !repeats || !wanted.others.is_empty() {
            return None;
        }
        let refused = gangs.view(&wanted.gang)?.refusal()?.clone();
        if refused.is_hopeless() {
            // Hopelessness depends on more than devices.
            return None;
        }
        let asked = least(wanted, source.shapes().list())?;
        let free = self.free.of(&source.facts().published);
        let mut asked = asked.iter();
        let short = asked.any(|(resource, least)| *least > free.get(resource).copied().unwrap_or_default());
        short.then_some(refused)
    }

    /// The placement of a gang for which others have released as few reservations as suffice; `None` if it does not fit even so.
    fn release_for(
        &mut self,
        machine: &mut Machine,
        source: PlanSource<'_>,
        wanted: &PlanRequest,
    ) -> Option<Placement> {
        // Never for surplus members of a decided gang, nor again for a gang that did not use it.
        if wanted.must == 0 && !wanted.completes || self.unused.get(&wanted.gang) == Some(&asked_for(wanted))
        {
            return None;
        }
        machine.gangs().may_give_back().next()?;
        let wanted = &whole_request(machine.gangs(), wanted)?;
        if !self.releasable_may_suffice(machine.gangs(), source, wanted) || !self.may_search(&wanted.gang) {
            return None;
        }
        self.note_survey();
        let releasable = ReleasableReservations::new(machine.gangs(), source.facts(), source.shapes());
        let mut units = match wanted.completes {
            true => Vec::new(),
            false => releasable.surplus(wanted.priority),
        };
        units.extend(releasable.orphaned(wanted.priority));
        let candidates: Vec<&VictimCandidate> = units.iter().map(|unit| &unit.what).collect();
        let (go, placement) =
            source.with_input(Some(wanted), |input| plan_without_fewest(input, wanted, &candidates))?;
        for unit in go.into_iter().filter_map(|at| units.get(at)) {
            unit.release(machine, source.facts().clock.now(), &wanted.gang);
        }
        Some(placement)
    }

    /// Other gangs released reservations for a gang. If it could not use them, none is released for it again while it asks for the same.
    pub(super) fn note_released(&mut self, gangs: &Gangs, wanted: &PlanRequest) {
        let view = gangs.view(&wanted.gang);
        if view.is_none_or(|view| view.slots().next().is_none()) {
            self.unused.insert(Arc::clone(&wanted.gang), asked_for(wanted));
        }
    }

    /// Whether free and releasable devices are enough for a gang, by number.
    fn releasable_may_suffice(
        &mut self,
        gangs: &Gangs,
        source: PlanSource<'_>,
        wanted: &PlanRequest,
    ) -> bool {
        let Some(asked) = least(wanted, source.shapes().list()) else {
            return false;
        };
        self.count_releasable(gangs, source);
        let (free, releasable) = (self.free.of(&source.facts().published), &self.releasable);
        releasable.has_any(wanted)
            && asked.iter().all(|(resource, least)| {
                let free = free.get(resource).copied().unwrap_or_default();
                *least <= free.saturating_add(releasable.of(wanted, resource))
            })
    }

    /// Counts releasable devices, if something changed since the last count.
    fn count_releasable(&mut self, gangs: &Gangs, source: PlanSource<'_>) {
        let stocked = gangs.may_give_back();
        let stocked: Vec<_> = stocked.map(|view| (Arc::clone(view.key()), view.slots_version())).collect();
        let Some(mut counts) = ReleasableDevices::recount(self.growth, stocked, &self.releasable) else {
            return;
        };
        self.note_survey();
        let releasable = ReleasableReservations::new(gangs, source.facts(), source.shapes());
        let surplus = releasable.surplus(i32::MAX).into_iter();
        for unit in surplus.chain(releasable.orphaned(i32::MAX)) {
            counts.add(unit.source, unit.what);
        }
        self.releasable = counts;
    }

    /// Whether terminating pods and victims are considered: never for a decided gang, nor while nodes are reserved for a gang before it, nor
    /// if all pods of lower priority together have too few devices.
    fn may_look_for_victims(&mut self, gangs: &Gangs, source: PlanSource<'_>, wanted: &PlanRequest) -> bool {
        let may = wanted.must > 0
            && source.reservation_against(wanted).is_none()
            && VictimCandidates::new(gangs, source).may_preempt(wanted);
        may && self.victims_may_suffice(gangs, source, wanted) && self.may_search(&wanted.gang)
    }

    fn victims_may_suffice(&mut self, gangs: &Gangs, source: PlanSource<'_>, wanted: &PlanRequest) -> bool {
        let Some(asked) = least(wanted, source.shapes().list()) else {
            return false;
        };
        self.count_releasable(gangs, source);
        let facts = source.facts();
        self.held.count(facts.resources.moves(), &facts.pods);
        let free = self.free.of(&facts.published);
        let (held, releasable) = (&self.held, &self.releasable);
        let any = held.has_below(wanted.priority) || facts.resources.has_below(wanted.priority);
        any && asked.iter().all(|(resource, least)| {
            let free = free.get(resource).copied().unwrap_or_default();
            let held = held.below(wanted.priority, resource);
            let orphaned = releasable.orphaned(wanted, resource);
            *least <= free.saturating_add(held).saturating_add(orphaned)
        })
    }

    /// Whether a gang fits once terminating pods are gone. It is planned again when one of them is overdue. It waits no longer than for those
    /// that were terminating when it began to: where pods come and go all the time, others may take what they leave.
    fn waits_for_terminating(&mut self, gangs: &Gangs, source: PlanSource<'_>, wanted: &PlanRequest) -> bool {
        let facts = source.facts();
        let orphaned = ReleasableReservations::new(gangs, facts, source.shapes()).orphaned(wanted.priority);
        let orphaned: Vec<&VictimCandidate> = orphaned.iter().map(|unit| &unit.what).collect();
        let ending = VictimCandidates::new(gangs, source).ending(wanted.priority);
        let fits = ending.filter(|(ending, _)| {
            source.with_input(Some(wanted), |input| {
                preempt::with_released(input, &orphaned, |input| preempt::fits_without(input, wanted, ending))
            })
        });
        let Some((_, overdue)) = fits else {
            self.waits.remove(&wanted.gang);
            return false;
        };
        let until = self.waits.get(&wanted.gang).copied();
        let until = until.unwrap_or(overdue.end);
        self.waits.insert(Arc::clone(&wanted.gang), until);
        if facts.clock.now().unix >= until {
            return false;
        }
        let next = overdue.start.min(until);
        self.overdue = Some(self.overdue.unwrap_or(next).min(next));
        true
    }
}

/// What the ladder found for a gang.
#[derive(Debug)]
pub(super) enum ReclaimOutcome {
    /// Other gangs released reservations for it.
    Released(Placement),
    /// Victims are evicted for it, or were by an earlier process.
    Preempted(Placement),
    /// It fits once terminating pods are gone.
    Terminating,
    /// No source has enough.
    Nothing,
}

/// What a gang asks for when others release something: a degraded gang all that it lacks, or both would be degraded.
fn whole_request(gangs: &Gangs, wanted: &PlanRequest) -> Option<PlanRequest> {
    let wanted = wanted.clone();
    if !wanted.completes {
        return Some(wanted);
    }
    let view = gangs.view(&wanted.gang)?;
    Some(view.to_be_whole(wanted))
}

/// The placement of a gang for which an earlier process evicted pods, without as few of the terminating pods as possible. Which pods were
/// evicted for it is not recorded.
fn resume(gangs: &Gangs, source: PlanSource<'_>, wanted: &PlanRequest) -> Option<Placement> {
    let candidates = VictimCandidates::new(gangs, source);
    let units: Vec<VictimCandidate> = candidates.each_ending().collect();
    let mut placement = source.with_input(Some(wanted), |input| preempt::preempt(input, wanted, &units))?;
    let leaving = std::mem::take(&mut placement.victims).into_iter();
    let leaving = leaving.map(|uid| candidates.ends_by(&uid).map(|by| (uid, by)));
    placement.leaving = leaving.collect::<Option<_>>()?;
    Some(placement)
}

/// The placement of a gang once its victims are gone. Orphaned reservations that it uses are released now.
fn preempt_for(machine: &mut Machine, source: PlanSource<'_>, wanted: &PlanRequest) -> Option<Placement> {
    let releasable = ReleasableReservations::new(machine.gangs(), source.facts(), source.shapes());
    let units = releasable.orphaned(wanted.priority);
    let orphaned: Vec<&VictimCandidate> = units.iter().map(|unit| &unit.what).collect();
    let placement = VictimCandidates::new(machine.gangs(), source).least_loss(wanted, |candidates| {
        source.with_input(Some(wanted), |input| {
            preempt::with_released(input, &orphaned, |input| preempt::preempt(input, wanted, candidates))
        })
    })?;
    let takes = |unit: &&ReleasableSlots| unit.what.pods.iter().any(|pod| releasable.uses(&placement, pod));
    let taken: Vec<&ReleasableSlots> = units.iter().filter(takes).collect();
    for unit in taken {
        unit.release(machine, source.facts().clock.now(), &wanted.gang);
    }
    Some(placement)
}
