//! Lists: what a watch names when it begins, or begins again. What a complete list does not name is gone; before each
//! of them was complete once, nothing is decided.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// The watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// Pods.
    Pods,
    /// Nodes.
    Nodes,
    /// GpuNodes.
    GpuNodes,
    /// Gangs.
    Gangs,
}

impl Source {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Pods, Self::Nodes, Self::GpuNodes, Self::Gangs];

    /// Its name in metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Nodes => "nodes",
            Self::GpuNodes => "gpunodes",
            Self::Gangs => "gangs",
        }
    }
}

/// A list: when it began, and the names in it so far.
#[derive(Debug)]
pub(super) struct List {
    pub(super) since: Instant,
    pub(super) names: HashSet<Arc<str>>,
    /// Those of objects that could not be read.
    pub(super) unread: HashSet<Arc<str>>,
}

/// The lists in progress, and the sources that were listed completely.
#[derive(Debug, Default)]
pub(super) struct ListTracker {
    lists: HashMap<Source, List>,
    synced: HashSet<Source>,
    changed: bool,
}

impl ListTracker {
    /// Every source is to be listed again before anything is decided.
    pub(super) fn restart(&mut self) {
        self.changed |= !self.synced.is_empty();
        self.synced.clear();
        self.lists.clear();
    }

    /// A list begins.
    pub(super) fn begin(&mut self, now: Instant, source: Source) {
        let list = List { since: now, names: HashSet::new(), unread: HashSet::new() };
        self.lists.insert(source, list);
    }

    /// An object of a source was observed.
    pub(super) fn observe(&mut self, source: Source, name: &str) {
        if let Some(list) = self.lists.get_mut(&source) {
            list.names.insert(name.into());
        }
    }

    /// An object of a source was observed that cannot be read.
    pub(super) fn observe_unread(&mut self, source: Source, name: &str) {
        self.observe(source, name);
        if let Some(list) = self.lists.get_mut(&source) {
            list.unread.insert(name.into());
        }
    }

    /// The list of a source is complete.
    pub(super) fn end(&mut self, source: Source) -> Option<List> {
        self.lists.remove(&source)
    }

    /// What the list of a source shows was taken over.
    pub(super) fn set_synced(&mut self, source: Source) {
        self.changed |= self.synced.insert(source);
    }

    /// Whether a source is being listed.
    pub(super) fn is_listing(&self, source: Source) -> bool {
        self.lists.contains_key(&source)
    }

    /// Whether every source was listed completely.
    pub(super) fn is_synced(&self) -> bool {
        self.synced.len() == Source::ALL.len()
    }

    /// Whether the sources that were listed changed since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}
