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
    use std::collections::BTreeSet;

    use gantry_topology::mig::legal_compute;

    use super::*;

    /// Profiles of RTX PRO 4500, by the supported profiles of NVIDIA's MIG user guide. The table of profiles has none
    /// of them, for where their instances may lie is not told.
    const WITHOUT_PLACES: [(&str, u8); 6] = [
        ("1g.16gb", 1),
        ("1g.16gb+gfx", 1),
        ("1g.16gb+me.all", 1),
        ("1g.16gb-me", 1),
        ("2g.32gb", 2),
        ("2g.32gb+gfx", 2),
    ];

    #[test]
    fn scheduler_configuration_names_every_mig_profile() {
        let manifest = include_str!("../../manifests/kube-scheduler-config.yaml");
        let mut known: BTreeSet<String> =
            ["nvidia.com/gpu", "nvidia.com/gpu.shared"].map(str::to_owned).into();
        let catalogue = gantry_topology::mig::Catalogue::built_in();
        let profiles = catalogue.products().iter().flat_map(|product| &product.profiles);
        let placed = profiles.map(|profile| (profile.name.as_str(), profile.compute));
        for (name, compute) in placed.chain(WITHOUT_PLACES) {
            let name = name.replace('+', ".");
            for slices in legal_compute(compute).filter(|slices| *slices < compute) {
                known.insert(format!("{RESOURCE_DOMAIN}/mig-{slices}c.{name}"));
            }
            known.insert(format!("{RESOURCE_DOMAIN}/mig-{name}"));
        }
        let named: BTreeSet<String> = manifest
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- {name: "))
            .map(|line| line.strip_suffix(", ignoredByScheduler: false}").unwrap().to_owned())
            .collect();
        let missing: Vec<_> = known.difference(&named).collect();
        let odd: Vec<_> = named.difference(&known).collect();
        assert!(missing.is_empty() && odd.is_empty(), "missing {missing:?}, odd {odd:?}");
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
            ["example.com/a100".into(), "nvidia.com/gpu".into(), "nvidia.com/mig-1g.10gb".into()]
        );
    }
}
