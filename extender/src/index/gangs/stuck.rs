//! Decided gangs that are stuck, each short of what another holds, so that none of them would ever run: one goes as a whole if another is
//! whole without it, and what it leaves is kept for that one. Who is stuck is the state machine's word; decides nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_gang::GangKey;
use gantry_gang::protocol::{Hindrance, Placement, Stuck, View, Wanted};
use gantry_planner::preempt::{Budget, Occupant, make_way};

use super::occupants::OVERDUE;
use crate::index::Index;
use crate::index::node_table::Renumbering;
use crate::snapshot::KeptNodes;

/// What is kept for a gang for which others go.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) kept: Arc<KeptNodes>,
    /// Who goes.
    by: Vec<Arc<GangKey>>,
    /// Kept no longer than until then.
    until: Instant,
}

impl Way {
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        self.kept = Arc::new(self.kept.renumbered(renumbering));
    }
}

/// A gang that may go for another.
struct Yielding {
    gang: Arc<GangKey>,
    priority: i32,
    what: Occupant,
}

impl Index {
    /// A gang that is short has no place: if it is one of several that are stuck, one of them goes for another. One way is made at a time.
    pub(super) fn help_the_stuck(&mut self) {
        if self.gangs.way.is_some() || !self.knows_budgets() {
            return;
        }
        let stuck = self.gangs.core.stuck();
        if stuck.len() < 2 {
            return;
        }
        let helped: Vec<Wanted> = stuck
            .iter()
            .filter(|stuck| !stuck.hopeless)
            .map(|stuck| stuck.wanted.clone())
            .collect();
        let yielding = self.who_may_go(&stuck);
        for wanted in helped {
            if !self.gangs.helps.another(self.gangs.room, &wanted.gang) {
                continue;
            }
            let others = yielding
                .iter()
                .filter(|other| other.gang != wanted.gang && other.priority <= wanted.priority);
            let others: Vec<&Yielding> = others.collect();
            if let Some((go, placement)) = self.way_for(&wanted, &others) {
                self.make_way_for(&wanted, go, &placement);
                return;
            }
        }
    }

    /// Those of them that budgets allow to go, the one that would be completed last first.
    fn who_may_go(&self, stuck: &[Stuck<'_>]) -> Vec<Yielding> {
        let mut covers = self.budgets.coverage(&self.resources);
        let goes = |view: &View<'_>| !view.is_being_bound() && !view.is_hindered(Hindrance::Removal);
        let last_first = stuck.iter().rev().map(|stuck| stuck.gang).filter(goes);
        let yielding = last_first.map(|view| {
            let mut what = self.whole(&view);
            what.budgets = covers.need(&what);
            Yielding {
                gang: Arc::clone(view.key()),
                priority: view.priority(),
                what,
            }
        });
        let allowed = |budget: &Budget| budget.pods <= budget.allowed;
        yielding
            .filter(|yielding| !yielding.what.pods.is_empty() && yielding.what.budgets.iter().all(allowed))
            .collect()
    }

    /// Who goes so that a gang is whole, one alone if that is enough, and where it is whole then.
    fn way_for(&self, wanted: &Wanted, others: &[&Yielding]) -> Option<(Vec<Arc<GangKey>>, Placement)> {
        let among = |some: &[&Yielding]| {
            let units: Vec<&Occupant> = some.iter().map(|other| &other.what).collect();
            let (go, placement) = self.on_terrain(Some(wanted), |input| make_way(input, wanted, &units))?;
            let go: Vec<_> = go.into_iter().filter_map(|at| some.get(at)).collect();
            let go: Vec<_> = go.into_iter().map(|other| Arc::clone(&other.gang)).collect();
            // Nobody need go for one that fits as it is: it is planned in its turn.
            (!go.is_empty()).then_some((go, placement))
        };
        let mut alone = others.iter();
        alone
            .find_map(|other| among(&[*other]))
            .or_else(|| among(&within_budgets(others)))
    }

    fn make_way_for(&mut self, wanted: &Wanted, go: Vec<Arc<GangKey>>, placement: &Placement) {
        for gang in &go {
            tracing::warn!(
                %gang, to = %wanted.gang,
                "gives way: both are short of their minimum and each holds what the other lacks"
            );
            self.gangs.core.give_way(self.now, gang, &wanted.gang);
        }
        let nodes = placement.places.iter();
        let nodes = nodes.filter_map(|place| self.nodes.find(place.node.as_str()));
        let kept = KeptNodes::new(Arc::clone(&wanted.gang), wanted.priority, nodes);
        self.gangs.way = Some(Way {
            kept: Arc::new(kept),
            by: go,
            until: self.now.at + self.gangs.settings.hold,
        });
        self.changed = true;
    }

    /// What is kept for a gang is kept until that is whole, or those who went for it have been gone for a while.
    pub(super) fn follow_way(&mut self) {
        let Some(way) = &mut self.gangs.way else {
            return;
        };
        let core = &self.gangs.core;
        let leaving = |gang: &Arc<GangKey>| core.view(gang).is_some_and(|view| view.is_leaving());
        if !way.by.iter().any(leaving) {
            way.by.clear();
            way.until = way
                .until
                .min(self.now.at + Duration::from_secs(OVERDUE.unsigned_abs()));
        }
        let short = core.view(&way.kept.gang).is_some_and(|view| view.is_short());
        if !short || self.now.at >= way.until {
            self.close_way();
        }
    }

    /// Opens what is kept for it.
    pub(super) fn close_way(&mut self) {
        if let Some(way) = self.gangs.way.take() {
            self.open(&way.kept);
        }
    }
}

/// As many of them as budgets allow to go together.
fn within_budgets<'y>(others: &[&'y Yielding]) -> Vec<&'y Yielding> {
    let mut taken: BTreeMap<&str, u32> = BTreeMap::new();
    let fits = |other: &&&'y Yielding| {
        let budgets = &other.what.budgets;
        let fits = budgets.iter().all(|budget| {
            let taken = taken.get(&*budget.name).copied().unwrap_or_default();
            taken.saturating_add(budget.pods) <= budget.allowed
        });
        if fits {
            for budget in budgets {
                *taken.entry(&budget.name).or_default() += budget.pods;
            }
        }
        fits
    };
    others.iter().filter(fits).copied().collect()
}
