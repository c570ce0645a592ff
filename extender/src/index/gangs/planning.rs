//! The plan of one gang on free devices.

use std::sync::Arc;

use gantry_gang::protocol::{Placement, PlanRequest, Refusal};
use gantry_planner::plan;

use super::plan_input::PlanSource;

/// Plans a gang on free devices outside backfill reservations of others. Also returns whether it lacks only those.
pub(super) fn plan_beside_backfill(
    source: PlanSource<'_>,
    wanted: &PlanRequest,
) -> (Result<Placement, Refusal>, bool) {
    if wanted.completes {
        // A degraded gang may use a backfill reservation, but avoids it where it can.
        let beside = PlanRequest { completes: false, ..wanted.clone() };
        let spares = source.reservation_against(&beside).is_some();
        let found = spares.then(|| source.with_input(Some(&beside), |input| plan::plan(input, &beside)));
        if let Some(Ok(placement)) = found {
            return (Ok(placement), false);
        }
    }
    let result = source.with_input(Some(wanted), |input| plan::plan(input, wanted));
    let Some(kept) = source.reservation_against(wanted).filter(|_| result.is_err()) else {
        return (result, false);
    };
    if let Err(refused) = source.with_input(None, |input| plan::plan(input, wanted)) {
        return (Err(refused), false);
    }
    (Err(Refusal::NodesReserved { gang: Arc::clone(&kept.gang) }), true)
}
