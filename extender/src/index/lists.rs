//! Lists: what a watch names when it begins, or begins anew. What a complete list does not name is gone; before each of them was complete
//! once, nothing is decided.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{NodeName, PodUid};

use super::Index;

/// Which of the watches something came from.
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

/// A list in progress: what it has named so far, and when it was begun.
#[derive(Debug)]
pub(super) struct Relist {
    since: Instant,
    seen: HashSet<Arc<str>>,
}

impl Index {
    /// What is known may be old: nothing is decided before every list was complete once more.
    pub fn relist(&mut self) {
        self.changed |= !self.synced.is_empty();
        self.synced.clear();
        self.relists.clear();
        self.unsync_gangs();
    }

    /// A list begins: what it does not name is gone.
    pub fn list_begins(&mut self, now: Instant, source: Source) {
        let relist = Relist {
            since: now,
            seen: HashSet::new(),
        };
        self.relists.insert(source, relist);
    }

    /// A list is complete.
    pub fn list_ends(&mut self, now: Instant, source: Source) {
        self.moment(now);
        let Some(Relist { since, seen }) = self.relists.remove(&source) else {
            return;
        };
        match source {
            Source::Pods => {
                let mut gone: Vec<PodUid> = self
                    .pods
                    .keys()
                    .filter(|uid| !seen.contains(uid.as_str()))
                    .cloned()
                    .collect();
                // In an order of its own: equal facts give equal decisions.
                gone.sort_unstable();
                for uid in gone {
                    self.pod_deleted(now, &uid, None);
                }
                self.other_pods_listed(&seen);
                self.members_listed(&seen);
                self.binds
                    .listed(now, since, &seen, &mut self.entries, &mut self.dirty);
            }
            Source::Nodes | Source::GpuNodes => {
                let gone: Vec<NodeName> = self
                    .entries
                    .iter()
                    .map(|entry| entry.name.clone())
                    .filter(|name| !seen.contains(name.as_str()))
                    .collect();
                for name in gone {
                    match source {
                        Source::Nodes => self.node_deleted(name.as_str()),
                        _ => self.inventory_deleted(name.as_str()),
                    }
                }
            }
            Source::Gangs => self.gangs_listed(&seen),
        }
        self.changed |= self.synced.insert(source);
    }

    pub(super) fn seen(&mut self, source: Source, name: &str) {
        if let Some(relist) = self.relists.get_mut(&source) {
            relist.seen.insert(name.into());
        }
    }
}
