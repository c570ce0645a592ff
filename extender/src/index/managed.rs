//! Which resources there are: those managed (the operator named them, or some node's plugin publishes them), and those offered (a plugin
//! publishes them, or some kubelet advertises them). Counts the nodes, so that a resource is unlearned with its last one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;

use crate::inventory::Inventory;
use crate::watched::Watched;

/// The resources there are.
#[derive(Debug)]
pub(super) struct Managed {
    named: BTreeSet<ResourceName>,
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
            let published = self.published.0.keys();
            self.managed = Arc::new(self.named.iter().chain(published).cloned().collect());
            self.offer();
            tracing::info!(resources = ?self.managed, "resources managed now");
        }
        changed
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
