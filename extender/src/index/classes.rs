//! Classes of alike nodes, each kept once and numbered. Only bookkeeping; what makes nodes alike stands in the snapshot.

use std::collections::HashMap;
use std::sync::Arc;

use crate::snapshot::{ClassIx, Standing};

/// The classes in use, and some that were.
#[derive(Debug)]
pub(super) struct Classes {
    list: Arc<Vec<Arc<Standing>>>,
    numbers: HashMap<Arc<Standing>, ClassIx>,
}

impl Classes {
    /// The class of nodes that are gone.
    pub(super) const GONE: ClassIx = ClassIx(0);

    pub(super) fn new() -> Self {
        let mut classes = Self {
            list: Arc::default(),
            numbers: HashMap::new(),
        };
        classes.of(Standing::Gone);
        classes
    }

    /// The number of a class, a new one if it is new.
    pub(super) fn of(&mut self, standing: Standing) -> ClassIx {
        if let Some(known) = self.numbers.get(&standing) {
            return *known;
        }
        let number = ClassIx(u32::try_from(self.list.len()).unwrap_or(u32::MAX));
        let standing = Arc::new(standing);
        Arc::make_mut(&mut self.list).push(Arc::clone(&standing));
        self.numbers.insert(standing, number);
        number
    }

    /// Whether a class is that of nodes without an inventory.
    pub(super) fn is_foreign(&self, class: ClassIx) -> bool {
        let standing = self.list.get(class.0 as usize);
        standing.is_some_and(|standing| matches!(**standing, Standing::Foreign { .. }))
    }

    pub(super) fn shared(&self) -> Arc<Vec<Arc<Standing>>> {
        Arc::clone(&self.list)
    }

    /// Drops the classes nobody is in, once they are many.
    pub(super) fn compact(&mut self, slots: &mut [ClassIx]) {
        if self.list.len() <= 2 * slots.len() + 256 {
            return;
        }
        let old = std::mem::replace(self, Self::new());
        for slot in slots {
            let standing = old.list.get(slot.0 as usize);
            *slot = standing.map_or(Self::GONE, |standing| self.of((**standing).clone()));
        }
    }
}
