//! What keeps something from being done to the pods of a gang, and what would help.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::types::Blocker;

/// What may not be done to the pods of a gang, each with the reason.
#[derive(Debug, Clone, Default)]
pub(super) struct Blockers(BTreeMap<Blocker, Arc<str>>);

impl Blockers {
    /// It may not be done; `None`: it was done after all. The first reason stays until then: every pod reports its own.
    pub(super) fn set(&mut self, blocker: Blocker, why: Option<Arc<str>>) {
        match why {
            Some(why) => {
                self.0.entry(blocker).or_insert(why);
            }
            None => {
                self.0.remove(&blocker);
            }
        }
    }

    /// The victims of the gang have gone, or none has to go any more.
    pub(super) fn evicted(&mut self) {
        self.0.remove(&Blocker::Budget);
    }

    /// The pods that had to go have gone, however they were removed.
    pub(super) fn removed(&mut self) {
        self.0.remove(&Blocker::Removal);
        self.evicted();
    }

    /// Why something may not be done, if it may not.
    pub(super) fn why(&self, blocker: Blocker) -> Option<&Arc<str>> {
        self.0.get(&blocker)
    }

    /// The first of them, with the reason.
    pub(super) fn first(&self) -> Option<(Blocker, &Arc<str>)> {
        self.0.first_key_value().map(|(blocker, why)| (*blocker, why))
    }

    /// Why pods that have to go are not removed.
    pub(super) fn of_removal(&self) -> Vec<Arc<str>> {
        [Blocker::Removal, Blocker::Budget].into_iter().filter_map(|it| self.why(it).cloned()).collect()
    }

    /// Scheduling gates may not be removed.
    pub(super) fn keep_gates(&self) -> bool {
        self.why(Blocker::Gates).is_some()
    }
}
