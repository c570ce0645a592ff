//! Deadlock of decided gangs, each below its minimum and holding what another lacks: one gang is requeued as a whole if another can be
//! completed without it, and the devices that it leaves are kept for that one. The state machine reports the gangs in question.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_gang::GangKey;
use gantry_gang::protocol::{
    Blocker, DeadlockedGang, GangEvent, Gangs, Moment, Placement, PlanRequest, View,
};
use gantry_planner::preempt::{Budget, VictimCandidate, plan_without_fewest};

use super::machine::Machine;
use super::plan_input::PlanSource;
use super::reclaim::{OVERDUE, SearchBudget, VictimCandidates};
use crate::index::disruption_budgets::DisruptionBudgets;
use crate::index::node_resources_table::NodeResourcesTable;
use crate::index::node_table::Renumbering;
use gantry_planner::snapshot::BackfillReservation;

/// The resolution of deadlocks, one at a time.
#[derive(Debug, Default)]
pub(super) struct Deadlock {
    budget: SearchBudget,
    resolution: Option<Resolution>,
}

/// Nodes kept for a gang that others yield to.
#[derive(Debug)]
struct Resolution {
    kept: Arc<BackfillReservation>,
    /// The gangs that yield.
    by: Vec<Arc<GangKey>>,
    /// The end of the reservation.
    until: Instant,
}

impl Deadlock {
    /// Nodes kept for the gang that others yield to.
    pub(super) fn reservation(&self) -> Option<&Arc<BackfillReservation>> {
        self.resolution.as_ref().map(|resolution| &resolution.kept)
    }

    /// Every waiting gang was planned since this growth.
    pub(super) fn all_planned(&mut self, growth: u64) {
        self.budget.all_planned(growth);
    }

    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        if let Some(resolution) = &mut self.resolution {
            resolution.kept = Arc::new(resolution.kept.renumbered(renumbering));
        }
    }

    /// A degraded gang was refused. If several are in a deadlock, one yields to another. True if nodes are kept for it now. `source` is
    /// without a reservation of a deadlock.
    pub(super) fn resolve(&mut self, machine: &mut Machine, source: PlanSource<'_>, growth: u64) -> bool {
        let facts = source.facts();
        if self.resolution.is_some() || !facts.budgets.are_known() {
            return false;
        }
        let stuck = machine.gangs().deadlocked();
        if stuck.len() < 2 {
            return false;
        }
        let helped: Vec<PlanRequest> =
            stuck.iter().filter(|stuck| !stuck.hopeless).map(|stuck| stuck.wanted.clone()).collect();
        let candidates = VictimCandidates::new(machine.gangs(), source);
        let yielding = yielding_gangs(candidates, &facts.budgets, &facts.resources, &stuck);
        for wanted in helped {
            if !self.budget.take(growth, &wanted.gang) {
                continue;
            }
            let others = yielding
                .iter()
                .filter(|other| other.gang != wanted.gang && other.priority <= wanted.priority);
            let others: Vec<&YieldCandidate> = others.collect();
            if let Some((by, placement)) = resolution_for(source, &wanted, &others) {
                let now = facts.clock.now();
                yield_to(machine, now, &wanted, &by);
                let nodes = placement.places.iter();
                let nodes = nodes.filter_map(|place| facts.nodes.find(place.node.as_str()));
                let kept = BackfillReservation::new(Arc::clone(&wanted.gang), wanted.priority, nodes);
                let until = now.at + machine.settings().hold;
                self.resolution = Some(Resolution { kept: Arc::new(kept), by, until });
                return true;
            }
        }
        false
    }

    /// Ends the resolution once the gang is complete, or the gangs that yielded have been gone for a while. Returns its reservation then.
    pub(super) fn follow(&mut self, now: Instant, gangs: &Gangs) -> Option<Arc<BackfillReservation>> {
        let resolution = self.resolution.as_mut()?;
        let leaving = |gang: &Arc<GangKey>| gangs.view(gang).is_some_and(|view| view.is_leaving());
        if !resolution.by.iter().any(leaving) {
            resolution.by.clear();
            resolution.until = resolution.until.min(now + Duration::from_secs(OVERDUE.unsigned_abs()));
        }
        let short = gangs.view(&resolution.kept.gang).is_some_and(|view| view.is_short());
        if !short || now >= resolution.until { self.end() } else { None }
    }

    /// Ends the resolution. Returns its reservation.
    pub(super) fn end(&mut self) -> Option<Arc<BackfillReservation>> {
        self.resolution.take().map(|resolution| resolution.kept)
    }
}

/// A gang that may yield to another.
struct YieldCandidate {
    gang: Arc<GangKey>,
    priority: i32,
    what: VictimCandidate,
}

/// The gangs that disruption budgets allow to yield, the one that would be completed last first.
fn yielding_gangs(
    candidates: VictimCandidates<'_>,
    budgets: &DisruptionBudgets,
    profiles: &NodeResourcesTable,
    stuck: &[DeadlockedGang<'_>],
) -> Vec<YieldCandidate> {
    let mut covers = budgets.coverage(profiles);
    let goes = |view: &View<'_>| !view.is_being_bound() && !view.is_blocked(Blocker::Removal);
    let last_first = stuck.iter().rev().map(|stuck| stuck.gang).filter(goes);
    let yielding = last_first.map(|view| {
        let mut what = candidates.whole(&view);
        what.budgets = covers.need(&what);
        YieldCandidate { gang: Arc::clone(view.key()), priority: view.priority(), what }
    });
    yielding
        .filter(|yielding| {
            !yielding.what.pods.is_empty() && yielding.what.budgets.iter().all(Budget::allows_whole)
        })
        .collect()
}

/// The gangs that yield so that a gang is complete, a single one if possible, and the placement of that gang.
fn resolution_for(
    source: PlanSource<'_>,
    wanted: &PlanRequest,
    others: &[&YieldCandidate],
) -> Option<(Vec<Arc<GangKey>>, Placement)> {
    let among = |some: &[&YieldCandidate]| {
        let units: Vec<&VictimCandidate> = some.iter().map(|other| &other.what).collect();
        let (go, placement) =
            source.with_input(Some(wanted), |input| plan_without_fewest(input, wanted, &units))?;
        let go: Vec<_> = go.into_iter().filter_map(|at| some.get(at)).collect();
        let go: Vec<_> = go.into_iter().map(|other| Arc::clone(&other.gang)).collect();
        // A gang that fits as it is gets planned in its turn.
        (!go.is_empty()).then_some((go, placement))
    };
    let mut alone = others.iter();
    alone.find_map(|other| among(&[*other])).or_else(|| among(&within_budgets(others)))
}

fn yield_to(machine: &mut Machine, now: Moment, wanted: &PlanRequest, by: &[Arc<GangKey>]) {
    for gang in by {
        tracing::warn!(
            %gang, to = %wanted.gang,
            "yields: both are below their minimum and each holds what the other lacks"
        );
        machine.handle(now, GangEvent::YieldTo { gang, to: &wanted.gang });
    }
}

/// As many as disruption budgets allow together.
fn within_budgets<'y>(others: &[&'y YieldCandidate]) -> Vec<&'y YieldCandidate> {
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    let fits = |other: &&&'y YieldCandidate| {
        let budgets = &other.what.budgets;
        let fits = budgets.iter().all(|budget| {
            let taken = taken.get(&*budget.name).copied().unwrap_or_default();
            taken + budget.pods.len() <= budget.allowed as usize
        });
        if fits {
            for budget in budgets {
                *taken.entry(&budget.name).or_default() += budget.pods.len();
            }
        }
        fits
    };
    others.iter().filter(fits).copied().collect()
}
