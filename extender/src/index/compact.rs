//! Numbers of nodes and classes that are given up, so that a cluster whose nodes come and go does not grow without end.

use std::collections::HashMap;
use std::sync::Arc;

use super::Index;
use crate::snapshot::{Names, NodeIx};

impl Index {
    /// Numbers of nodes that are gone are given up once they are the larger half; classes that nobody is in, likewise.
    pub(super) fn compact(&mut self) {
        let gone = (0..)
            .zip(&self.entries)
            .filter(|(number, entry)| entry.is_gone() && !self.rooms.is_used(NodeIx(*number)));
        let gone = gone.count();
        if gone > 256 && gone * 2 > self.entries.len() {
            let mut names = Names::default();
            let mut renumbered = HashMap::new();
            let (old_entries, old_slots) =
                (std::mem::take(&mut self.entries), std::mem::take(&mut self.slots));
            for ((number, entry), slot) in (0..).zip(old_entries).zip(old_slots) {
                if !entry.is_gone() || self.rooms.is_used(NodeIx(number)) {
                    renumbered.insert(NodeIx(number), names.number(&entry.name));
                    self.entries.push(entry);
                    self.slots.push(slot);
                }
            }
            self.names = Arc::new(names);
            self.binds.renumber(&renumbered);
            self.waiting.renumber(&renumbered);
            self.rooms.renumber(&renumbered, self.entries.len());
            self.gangs.renumber(&renumbered);
        }
        self.classes.compact(&mut self.slots);
    }
}
