//! The watched resources: those that the operator names, and all of NVIDIA's domain. Those of them that a `GpuNode`
//! publishes, or the operator names, are managed. Names only; no counts, no nodes. With them goes what the operator
//! configured of requests for them.

use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_api::names::RESOURCE_DOMAIN;
use gantry_planner::kind::Kind;
use gantry_planner::placement::{PlacementDefaults, PlacementRequest, is_of_model};

/// The watched resources. Pods that ask for any of them are kept, so that a resource is managed completely as soon as a
/// plugin publishes it, with the pods that have it already.
#[derive(Debug, Clone)]
pub struct WatchedResources {
    named: Arc<[ResourceName]>,
    defaults: Arc<PlacementDefaults>,
    /// GPU models, the cheapest first.
    cheapest: Arc<[String]>,
}

impl WatchedResources {
    /// Watches `named`, which are managed also without a plugin, and NVIDIA's domain.
    pub fn new(named: impl Into<Arc<[ResourceName]>>) -> Self {
        Self { named: named.into(), defaults: Arc::default(), cheapest: Arc::default() }
    }

    /// The same with defaults for pods, and the GPU models in the order of their cost, the cheapest first.
    #[must_use]
    pub fn with_placement(self, defaults: PlacementDefaults, cheapest: Vec<String>) -> Self {
        Self { defaults: Arc::new(defaults), cheapest: cheapest.into(), ..self }
    }

    /// What the pods of a namespace ask for where they do not state it.
    pub fn placement(&self, namespace: &str) -> &PlacementRequest {
        self.defaults.of(namespace)
    }

    /// What a node with GPUs of these models costs: by the place of the dearest in the operator's order, models without
    /// one last, then by the total bandwidth of the node.
    pub fn cost<'a>(&self, models: impl Iterator<Item = &'a str>, kind: &Kind) -> u64 {
        const TOTALS: u64 = 1 << 48;
        let place = |model: &'a str| {
            self.cheapest.iter().position(|known| is_of_model(model, known)).unwrap_or(self.cheapest.len())
        };
        let dearest = models.map(place).max().unwrap_or(0) as u64;
        dearest * TOTALS + kind.total_megabytes().min(TOTALS - 1)
    }

    /// The resources that the operator named.
    pub fn named(&self) -> &[ResourceName] {
        &self.named
    }

    /// Whether a resource is watched.
    pub fn covers(&self, resource: &str) -> bool {
        let rest = resource.strip_prefix(RESOURCE_DOMAIN);
        rest.is_some_and(|rest| rest.starts_with('/'))
            || self.named.iter().any(|named| named.as_str() == resource)
    }

    /// Those of some names that are watched, sorted and without duplicates.
    pub fn among<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Vec<ResourceName> {
        let mut covered: Vec<&str> = names.into_iter().filter(|name| self.covers(name)).collect();
        covered.sort_unstable();
        covered.dedup();
        covered.into_iter().map(ResourceName::from).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvidias_domain_and_what_is_named_are_looked_at() {
        let watched = WatchedResources::new(["example.com/a100".into()]);
        assert_eq!(
            watched.among([
                "nvidia.com/mig-1g.10gb",
                "cpu",
                "example.com/a100",
                "example.com/other",
                "nvidia.community/gpu",
                "nvidia.com/gpu",
                "nvidia.com/gpu",
            ]),
            ["example.com/a100".into(), "nvidia.com/gpu".into(), "nvidia.com/mig-1g.10gb".into()]
        );
    }
}
