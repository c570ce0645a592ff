//! Classes of equal nodes, each kept once and numbered. What makes nodes equal is in the snapshot.

use std::collections::HashMap;
use std::sync::Arc;

use gantry_planner::snapshot::{ClassIx, NodeState};

/// The classes in use, and some that were in use.
#[derive(Debug)]
pub(super) struct NodeClasses {
    list: Arc<Vec<Arc<NodeState>>>,
    numbers: HashMap<Arc<NodeState>, ClassIx>,
}

impl NodeClasses {
    /// The class of deleted nodes.
    pub(super) const GONE: ClassIx = ClassIx(0);

    pub(super) fn new() -> Self {
        let mut classes = Self { list: Arc::default(), numbers: HashMap::new() };
        classes.of(NodeState::Gone);
        classes
    }

    /// The number of a class, a new one if it is new.
    pub(super) fn of(&mut self, state: NodeState) -> ClassIx {
        if let Some(known) = self.numbers.get(&state) {
            return *known;
        }
        let number = ClassIx(u32::try_from(self.list.len()).unwrap_or(u32::MAX));
        let state = Arc::new(state);
        Arc::make_mut(&mut self.list).push(Arc::clone(&state));
        self.numbers.insert(state, number);
        number
    }

    /// Whether the nodes of a class have no inventory.
    pub(super) fn is_foreign(&self, class: ClassIx) -> bool {
        let state = self.list.get(class.0 as usize);
        state.is_some_and(|state| matches!(**state, NodeState::Foreign { .. }))
    }

    pub(super) fn shared(&self) -> Arc<Vec<Arc<NodeState>>> {
        Arc::clone(&self.list)
    }

    /// Drops the classes without nodes once they are many.
    pub(super) fn compact(&mut self, slots: &mut [ClassIx]) {
        if self.list.len() <= 2 * slots.len() + 256 {
            return;
        }
        let old = std::mem::replace(self, Self::new());
        for slot in slots {
            let state = old.list.get(slot.0 as usize);
            *slot = state.map_or(Self::GONE, |state| self.of((**state).clone()));
        }
    }
}
