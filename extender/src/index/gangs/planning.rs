//! Plans gangs, one at a time, on the snapshot just published: whoever is next by the state machine's word gets a place as a whole, or a reason.

use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::protocol::{Placement, Refused, Wanted};

use crate::gang::terrain::{Exact, Terrain};
use crate::gang::{plan, preempt};
use crate::index::Index;
use crate::snapshot::NodeIx;

impl Index {
    /// Plans the gang that is next; false if none is to be planned now.
    pub fn plan_next(&mut self) -> bool {
        if !self.gangs.leading || !self.is_synced() {
            return false;
        }
        let Some(wanted) = self.gangs.core.next(self.now, self.gangs.room) else {
            return false;
        };
        let mut result = self.plan_beside_kept(&wanted);
        if let Err(refused) = &result {
            match self.preempt(&wanted, refused.hopeless) {
                Some(placement) => result = Ok(placement),
                None => self.refused(&wanted, refused.hopeless),
            }
        }
        self.gangs.core.placed(self.now, &wanted.gang, result);
        true
    }

    /// Where a gang goes without the nodes that are kept for another. If those are all it lacks, it is told so.
    fn plan_beside_kept(&self, wanted: &Wanted) -> Result<Placement, Refused> {
        let result = self.on_terrain(Some(wanted), |terrain| plan::plan(terrain, wanted));
        let Some(kept) = self.kept_from(wanted).filter(|_| result.is_err()) else {
            return result;
        };
        self.on_terrain(None, |terrain| plan::plan(terrain, wanted))?;
        let reason: Arc<str> = format!(
            "does not fit beside the nodes kept for gang {}, which waits",
            kept.gang
        )
        .into();
        Err(Refused {
            message: Arc::clone(&reason),
            reason,
            hopeless: false,
        })
    }

    /// Where a gang goes once others were stopped for it. Not while nodes are kept for one before it.
    fn preempt(&self, wanted: &Wanted, hopeless: bool) -> Option<Placement> {
        if hopeless || self.kept_from(wanted).is_some() || !self.may_preempt(wanted) {
            return None;
        }
        let occupants = self.occupants();
        self.on_terrain(Some(wanted), |terrain| {
            preempt::preempt(terrain, wanted, &occupants)
        })
    }

    /// What a plan is made from, for `gang`: nodes kept for another are barred for it.
    pub(super) fn on_terrain<R>(&self, gang: Option<&Wanted>, make: impl FnOnce(&Terrain<'_>) -> R) -> R {
        let kept = gang.and_then(|gang| self.kept_from(gang));
        let barred = |needs: &Needs| {
            let mut barred = self.barred(needs);
            if let Some(kept) = kept {
                barred.nodes.extend(kept.nodes());
                barred.nodes.sort_unstable();
                barred.nodes.dedup();
            }
            barred
        };
        let exact = |node: NodeIx| self.exact(node);
        make(&Terrain {
            snapshot: &self.published,
            rooms: self.rooms(),
            fabric: self.fabric(),
            shapes: self.gangs.shapes.list(),
            barred: &barred,
            exact: &exact,
        })
    }

    fn exact(&self, node: NodeIx) -> Option<Exact<'_>> {
        let entry = self.entries.get(node.0 as usize)?;
        let inventory = entry.inventory.as_ref()?;
        Some(Exact {
            class: entry.exact(&self.binds.held_on(node))?,
            ids: inventory.pools.iter().map(crate::inventory::Pool::ids).collect(),
        })
    }
}
