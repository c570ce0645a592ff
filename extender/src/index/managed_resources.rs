//! The resources that Gantry manages (the operator named them, or a plugin publishes them), and those that nodes offer
//! (a plugin publishes them, or kubelet advertises them). A resource that was published stays managed while a kubelet
//! advertises it or a pod asks for it: a plugin may be down for a moment, and a pod that asks for devices must not be
//! treated as one that asks for none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;

use crate::watched::WatchedResources;
use gantry_planner::inventory::Inventory;

/// The resources of all nodes.
#[derive(Debug)]
pub(super) struct ManagedResources {
    named: BTreeSet<ResourceName>,
    /// Those that are published, or were published and are not forgotten yet.
    learned: BTreeSet<ResourceName>,
    published: Counts,
    advertised: Counts,
    managed: Arc<BTreeSet<ResourceName>>,
    offered: Arc<BTreeSet<ResourceName>>,
}

/// How many nodes have each resource.
#[derive(Debug, Default)]
struct Counts(BTreeMap<ResourceName, usize>);

impl ManagedResources {
    pub(super) fn new(watched: &WatchedResources) -> Self {
        let named: BTreeSet<ResourceName> = watched.named().iter().cloned().collect();
        Self {
            managed: Arc::new(named.clone()),
            named,
            learned: BTreeSet::new(),
            published: Counts::default(),
            advertised: Counts::default(),
            offered: Arc::default(),
        }
    }

    /// The managed resources.
    pub(super) fn managed(&self) -> Arc<BTreeSet<ResourceName>> {
        Arc::clone(&self.managed)
    }

    /// The resources that some node has.
    pub(super) fn offered(&self) -> Arc<BTreeSet<ResourceName>> {
        Arc::clone(&self.offered)
    }

    /// The inventory of a node changed. True if the set of resources changed.
    pub(super) fn published(&mut self, before: Option<&Inventory>, after: Option<&Inventory>) -> bool {
        fn names(inventory: Option<&Inventory>) -> impl Iterator<Item = &ResourceName> {
            let pools = inventory.into_iter().flat_map(|inventory| &inventory.pools);
            pools.map(|pool| &pool.resource)
        }
        let changed = self.published.replace(names(before), names(after));
        if changed {
            self.learned.extend(self.published.0.keys().cloned());
            self.manage();
            self.offer();
        }
        changed
    }

    /// Whether a resource is managed that no node has any more.
    pub(super) fn is_outdated(&self) -> bool {
        self.learned.iter().any(|resource| !self.is_there(resource))
    }

    /// Forgets the resources that no node has and that are not `asked` for any more. True if there were any.
    pub(super) fn forget(&mut self, asked: impl Fn(&ResourceName) -> bool) -> bool {
        let over = |resource: &ResourceName| !self.is_there(resource) && !asked(resource);
        let over: Vec<ResourceName> = self.learned.iter().filter(|name| over(name)).cloned().collect();
        for resource in &over {
            self.learned.remove(resource);
        }
        if !over.is_empty() {
            self.manage();
        }
        !over.is_empty()
    }

    fn is_there(&self, resource: &ResourceName) -> bool {
        self.published.0.contains_key(resource) || self.advertised.0.contains_key(resource)
    }

    fn manage(&mut self) {
        let managed: BTreeSet<ResourceName> = self.named.union(&self.learned).cloned().collect();
        if *self.managed != managed {
            self.managed = Arc::new(managed);
            tracing::info!(resources = ?self.managed, "managed resources changed");
        }
    }

    /// What kubelet advertises of a node changed. True if the set of resources changed.
    pub(super) fn advertised(
        &mut self,
        before: &[(ResourceName, u32)],
        after: &[(ResourceName, u32)],
    ) -> bool {
        fn names(advertised: &[(ResourceName, u32)]) -> impl Iterator<Item = &ResourceName> {
            let some = advertised.iter().filter(|(_, count)| *count > 0);
            some.map(|(resource, _)| resource)
        }
        let changed = self.advertised.replace(names(before), names(after));
        if changed {
            self.offer();
        }
        changed
    }

    fn offer(&mut self) {
        let all = self.published.0.keys().chain(self.advertised.0.keys());
        self.offered = Arc::new(all.cloned().collect());
    }
}

impl Counts {
    /// One node has `after` instead of `before`. True if a resource was added or removed.
    fn replace<'a>(
        &mut self,
        before: impl Iterator<Item = &'a ResourceName>,
        after: impl Iterator<Item = &'a ResourceName>,
    ) -> bool {
        let known = self.0.len();
        let mut came = false;
        for resource in after {
            match self.0.get_mut(resource) {
                Some(nodes) => *nodes += 1,
                None => {
                    self.0.insert(resource.clone(), 1);
                    came = true;
                }
            }
        }
        let largest = if came { usize::MAX } else { known };
        for resource in before {
            if let Some(nodes) = self.0.get_mut(resource) {
                *nodes -= 1;
                if *nodes == 0 {
                    self.0.remove(resource);
                }
            }
        }
        self.0.len() != largest
    }
}
