//! Which resources are looked at: those the operator names, and all of NVIDIA's domain. Which of these are managed, that is accounted and
//! chosen, is learned: what any `GpuNode` publishes. Names only; no counts, no nodes.

use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_api::names::RESOURCE_DOMAIN;

/// The resources looked at. Pods that ask for any of them are kept, so that a resource that a plugin begins to publish is accounted
/// at once, with the pods that have it already.
#[derive(Debug, Clone)]
pub struct Watched {
    named: Arc<[ResourceName]>,
}

impl Watched {
    /// Looks at `named` (managed whether anybody publishes them or not) besides NVIDIA's domain.
    pub fn new(named: impl Into<Arc<[ResourceName]>>) -> Self {
        Self { named: named.into() }
    }

    /// The resources that the operator named.
    pub fn named(&self) -> &[ResourceName] {
        &self.named
    }

    /// Whether a resource is looked at.
    pub fn covers(&self, resource: &str) -> bool {
        let rest = resource.strip_prefix(RESOURCE_DOMAIN);
        rest.is_some_and(|rest| rest.starts_with('/'))
            || self.named.iter().any(|named| named.as_str() == resource)
    }

    /// Those of some names that are looked at, sorted, each once.
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
    fn kube_schedulers_configuration_names_every_mig_profile() {
        let manifest = include_str!("../../manifests/kube-scheduler-config.yaml");
        let catalogue = gantry_topology::mig::Catalogue::built_in();
        let profiles = catalogue.products().iter().flat_map(|product| &product.profiles);
        let names =
            profiles.map(|profile| format!("{RESOURCE_DOMAIN}/mig-{}", profile.name.replace('+', ".")));
        for name in names.chain(["nvidia.com/gpu".to_owned(), "nvidia.com/gpu.shared".to_owned()]) {
            let line = format!("- {{name: {name}, ignoredByScheduler: false}}\n");
            assert!(manifest.contains(&line), "{name} is missing");
        }
    }

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
            [
                "example.com/a100".into(),
                "nvidia.com/gpu".into(),
                "nvidia.com/mig-1g.10gb".into()
            ]
        );
    }
}
