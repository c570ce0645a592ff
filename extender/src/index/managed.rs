//! Which resources are managed now: those the operator named, and those that some node's plugin publishes. Counts the publishers, so
//! that a resource is unlearned with its last one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;

use crate::inventory::Inventory;
use crate::watched::Watched;

/// The managed resources.
#[derive(Debug)]
pub(super) struct Managed {
    named: BTreeSet<ResourceName>,
    /// How many nodes publish each.
    published: BTreeMap<ResourceName, usize>,
    all: Arc<BTreeSet<ResourceName>>,
}

impl Managed {
    pub(super) fn new(watched: &Watched) -> Self {
        let named: BTreeSet<ResourceName> = watched.named().iter().cloned().collect();
        Self {
            all: Arc::new(named.clone()),
            named,
            published: BTreeMap::new(),
        }
    }

    /// The managed resources.
    pub(super) fn shared(&self) -> Arc<BTreeSet<ResourceName>> {
        Arc::clone(&self.all)
    }

    /// A node's inventory is now another. True if other resources are managed than before.
    pub(super) fn replace(&mut self, before: Option<&Inventory>, after: Option<&Inventory>) -> bool {
        for pool in before.into_iter().flat_map(|inventory| &inventory.pools) {
            if let Some(nodes) = self.published.get_mut(&pool.resource) {
                *nodes -= 1;
                if *nodes == 0 {
                    self.published.remove(&pool.resource);
                }
            }
        }
        for pool in after.into_iter().flat_map(|inventory| &inventory.pools) {
            *self.published.entry(pool.resource.clone()).or_default() += 1;
        }
        let same = self
            .all
            .iter()
            .filter(|resource| !self.named.contains(*resource))
            .eq(self
                .published
                .keys()
                .filter(|resource| !self.named.contains(*resource)));
        if !same {
            self.all = Arc::new(self.named.iter().chain(self.published.keys()).cloned().collect());
            tracing::info!(resources = ?self.all, "resources managed now");
        }
        !same
    }
}
