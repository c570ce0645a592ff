//! Plans gangs, one at a time, on the snapshot just published: the next one by the state machine gets reservations as a whole, or a refusal.

use std::sync::Arc;

use gantry_gang::protocol::{GangEvent, Placement, PlanRequest, Refusal};
use gantry_planner::plan;

use super::reclaim::Reclaimed;
use crate::index::Index;

impl Index {
    /// Sets whether gangs are planned. A command that only looks may list the waiting gangs first.
    pub fn set_planning(&mut self, planning: bool) {
        self.gangs.planning = planning;
    }

    /// This process is a command that only looks.
    pub fn only_look(&mut self) {
        self.gangs.only_looks = true;
    }

    fn may_plan(&self) -> bool {
        self.gangs.planning && self.gangs.leading && self.is_synced()
    }

    /// Whether [`Index::plan_next`] has something to do.
    pub fn has_unplanned(&self) -> bool {
        self.may_plan() && self.gangs.core.has_next(self.gangs.reclaim.growth())
    }

    /// Plans the next gang; false if none is to be planned now.
    pub fn plan_next(&mut self) -> bool {
        if !self.may_plan() {
            return false;
        }
        let growth = self.gangs.reclaim.growth();
        let Some(wanted) = self.gangs.core.next(self.now, growth) else {
            self.gangs.reclaim.all_planned();
            self.gangs.deadlock.all_planned(growth);
            return false;
        };
        if wanted.without.is_empty() {
            self.gangs.offers.forget(&wanted.gang);
        }
        self.gangs.reclaim.begin();
        let (planned, fits_backfill) = match self.repeated_refusal(&wanted) {
            Some(refused) => (Err(refused), false),
            None => self.plan_beside_backfill(&wanted),
        };
        let reclaimed = match &planned {
            Err(refused) if !refused.is_hopeless() => self.reclaim(&wanted),
            _ => Reclaimed::Nothing,
        };
        let planned = planned.map_err(|refused| self.with_holders(refused, &wanted));
        let is_released = matches!(reclaimed, Reclaimed::Released(_));
        let waits = matches!(reclaimed, Reclaimed::Terminating);
        let result = match (planned, reclaimed) {
            (Err(_), Reclaimed::Released(placement) | Reclaimed::Preempted(placement)) => Ok(placement),
            (Err(_), Reclaimed::Terminating) => Err(Refusal::PodsTerminating),
            (planned, _) => planned,
        };
        if let Err(refused) = &result
            && !refused.is_hopeless()
        {
            self.gangs.reclaim.refused(&wanted);
            self.refused(&wanted);
        }
        // A refusal because of terminating pods or a backfill reservation does not stay true for long.
        let is_stable = !waits && !fits_backfill;
        self.gangs.reclaim.planned(&wanted, result.is_ok(), is_stable, &self.published);
        let still_degraded = wanted.completes && result.is_err();
        self.gangs.handle(self.now, GangEvent::Planned { gang: &wanted.gang, result });
        if is_released {
            self.note_released(&wanted);
        }
        if still_degraded {
            self.resolve_deadlock();
        }
        true
    }

    /// Plans a gang on free devices outside backfill reservations of others. Also returns whether it lacks only those.
    fn plan_beside_backfill(&self, wanted: &PlanRequest) -> (Result<Placement, Refusal>, bool) {
        if wanted.completes {
            // A degraded gang may use a backfill reservation, but avoids it where it can.
            let beside = PlanRequest { completes: false, ..wanted.clone() };
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
        (Err(Refusal::NodesReserved { gang: Arc::clone(&kept.gang) }), true)
    }
}
