//! Which refused gangs are worth an expensive search, and when.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_gang::GangKey;

/// Searches per growth.
const SEARCHES: u32 = 4;

/// Limits searches per growth of the supply. The first gangs of the queue search every time, and every other gang in turn: what the first
/// ones wait for may never come.
#[derive(Debug, Default)]
pub(in crate::index::gangs) struct SearchBudget {
    growth: u64,
    count: u32,
    /// A gang that never searched had no search in this growth.
    left_out: bool,
    /// Gangs that searched since every gang had its turn.
    had: BTreeSet<Arc<GangKey>>,
}

impl SearchBudget {
    /// Takes a search for a gang, if one is left. The last is for a gang that had none.
    pub(in crate::index::gangs) fn take(&mut self, growth: u64, gang: &Arc<GangKey>) -> bool {
        self.enter(growth);
        let again = self.had.contains(gang);
        let has = self.count + u32::from(again) < SEARCHES;
        if has {
            self.count += 1;
            self.had.insert(Arc::clone(gang));
        }
        self.left_out |= !has && !again;
        has
    }

    /// Every waiting gang was planned since this growth.
    pub(in crate::index::gangs) fn all_planned(&mut self, growth: u64) {
        self.enter(growth);
        if !self.left_out {
            self.had.clear();
        }
    }

    fn enter(&mut self, growth: u64) {
        if self.growth != growth {
            (self.growth, self.count, self.left_out) = (growth, 0, false);
        }
    }
}

/// Detects that more pods may be evicted for refused gangs than before. Reported with the next tick and not at once: a search costs many
/// plans, pods come all the time, and budgets change with every pod that becomes ready.
#[derive(Debug, Default)]
pub(super) struct VictimWatch {
    /// The growth in which gangs were refused last, and the highest priority among them.
    refused: Option<(u64, i32)>,
    /// The lowest priority of candidates that came since the last tick.
    came: Option<i32>,
    /// Disruption budgets allow more than at the last tick.
    grown: bool,
}

impl VictimWatch {
    /// A gang was refused.
    pub(super) fn refused(&mut self, growth: u64, priority: i32) {
        self.refused = match self.refused {
            Some((then, highest)) if then == growth => Some((growth, highest.max(priority))),
            _ => Some((growth, priority)),
        };
    }

    /// A candidate of a priority came.
    pub(super) fn came(&mut self, priority: i32) {
        self.came = Some(self.came.map_or(priority, |lowest| lowest.min(priority)));
    }

    /// Disruption budgets allow more.
    pub(super) fn budgets_grew(&mut self) {
        self.grown = true;
    }

    /// Whether refused gangs are worth another plan.
    pub(super) fn take(&mut self) -> bool {
        let came = self.came.take();
        let grown = std::mem::take(&mut self.grown);
        grown || matches!((came, self.refused), (Some(came), Some((_, refused))) if came < refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gantry_gang::Integration;

    #[test]
    fn first_gangs_search_every_time_and_others_in_turn() {
        let gangs: Vec<Arc<GangKey>> = (0..12)
            .map(|number| {
                Arc::new(GangKey {
                    namespace: "ns".into(),
                    name: format!("g{number:02}").into(),
                    integration: Integration::Annotation,
                    incarnation: "".into(),
                })
            })
            .collect();
        let mut budget = SearchBudget::default();
        let mut had = BTreeSet::new();
        for growth in 1..=18 {
            // The supply may grow again before all of them were planned.
            let planned = if growth % 2 == 0 { gangs.len() } else { 2 };
            let now: Vec<usize> =
                (0..planned).filter(|number| budget.take(growth, &gangs[*number])).collect();
            if planned == gangs.len() {
                budget.all_planned(growth);
                budget.all_planned(growth);
                assert!(now.starts_with(&[0, 1, 2]), "{now:?}");
            }
            assert!(now.len() <= SEARCHES as usize, "{now:?}");
            had.extend(now);
        }
        assert_eq!(had.len(), gangs.len());
        // Few have one each time.
        let mut budget = SearchBudget::default();
        for growth in 1..=9 {
            assert!(gangs[..4].iter().all(|gang| budget.take(growth, gang)));
            budget.all_planned(growth);
        }
    }
}
