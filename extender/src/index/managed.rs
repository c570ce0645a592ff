//! Which resources there are: those managed (the operator named them, or some node's plugin publishes them), and those offered (a plugin
//! publishes them, or some kubelet advertises them). Counts the nodes. A resource that was published is managed on while some kubelet
//! advertises it or some pod asks for it: a plugin may be away for a moment, and a pod that asks for devices must not be taken meanwhile
//! for one that asks for none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;

use crate::inventory::Inventory;
use crate::watched::Watched;

/// The resources there are.
#[derive(Debug)]
pub(super) struct Managed {
    named: BTreeSet<ResourceName>,
    /// Those that are published, or were and are not forgotten yet.
    learned: BTreeSet<ResourceName>,
    published: Counts,
    advertised: Counts,
    managed: Arc<BTreeSet<ResourceName>>,
    offered: Arc<BTreeSet<ResourceName>>,
}

/// By resource, how many nodes have it.
#[derive(Debug, Default)]
struct Counts(BTreeMap<ResourceName, usize>);

impl Managed {
    pub(super) fn new(watched: &Watched) -> Self {
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

    /// The resources of which some node has, or had, a device.
    pub(super) fn offered(&self) -> Arc<BTreeSet<ResourceName>> {
        Arc::clone(&self.offered)
    }

    /// A node's inventory is another now. True if there are other resources than before.
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

    /// Whether a resource is managed that nobody publishes or advertises any more.
    pub(super) fn is_outdated(&self) -> bool {
        self.learned.iter().any(|resource| !self.is_there(resource))
    }

    /// Forgets the resources that nobody publishes, advertises or asks for any more. True if there were any.
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
            tracing::info!(resources = ?self.managed, "resources managed now");
        }
    }

    /// What kubelet advertises of a node is another now. True if there are other resources than before.
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
    /// One node has `after` in place of `before`. True if a resource came or went.
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
