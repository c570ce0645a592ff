//! The watched resources: those that the operator names, and all of NVIDIA's domain. Those of them that a `GpuNode`
//! publishes, or the operator names, are managed. Names only; no counts, no nodes.

use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_api::names::RESOURCE_DOMAIN;

/// The watched resources. Pods that ask for any of them are kept, so that a resource is managed completely as soon as a
/// plugin publishes it, with the pods that have it already.
#[derive(Debug, Clone)]
pub struct Watched {
    named: Arc<[ResourceName]>,
}

impl Watched {
    /// Watches `named`, which are managed also without a plugin, and NVIDIA's domain.
    pub fn new(named: impl Into<Arc<[ResourceName]>>) -> Self {
        Self { named: named.into() }
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
        let watched = Watched::new(["example.com/a100".into()]);
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
