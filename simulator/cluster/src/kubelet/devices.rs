//! kubelet's device manager as data: advertised devices, their holders, and the allocation for a container. It follows
//! kubelet's rules, including the random order in which kubelet offers and fills up devices. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use rand::seq::SliceRandom;

/// What plugins advertise and pods hold.
#[derive(Debug, Default)]
pub(super) struct Devices {
    resources: BTreeMap<String, BTreeMap<String, bool>>,
    /// By pod UID.
    pods: BTreeMap<String, PodDevices>,
}

/// What the containers of a pod hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodDevices {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) containers: Vec<ContainerDevices>,
    /// Devices of finished init containers that the app containers may take, by resource.
    reusable: BTreeMap<String, BTreeSet<String>>,
}

/// What one container holds of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerDevices {
    pub(super) container: String,
    pub(super) role: Role,
    pub(super) resource: String,
    pub(super) ids: BTreeSet<String>,
}

/// What a container is to its pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Role {
    /// Runs to its end before the apps start.
    Init,
    /// An init container that stays.
    Sidecar,
    /// An app container.
    #[default]
    App,
}

/// A container that wants devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceDemand<'a> {
    pub(super) uid: &'a str,
    pub(super) container: &'a str,
    pub(super) role: Role,
    pub(super) resource: &'a str,
    pub(super) count: usize,
}

/// The device manager's answer before it calls the plugin.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Offer {
    /// Finished init containers left enough devices: they are reused without a call.
    Reuse(BTreeSet<String>),
    /// The plugin may choose `count` of `available`, `must` among them.
    Choose {
        /// All that may be given, in random order.
        available: Vec<String>,
        /// Those already taken.
        must: Vec<String>,
    },
}

/// Kubelet's words for too few devices.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Shortage {
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {asked}, Available: {available}"
    )]
    TooFew { resource: String, asked: usize, available: usize },
}

impl Devices {
    /// A plugin's list.
    pub(super) fn advertise(&mut self, resource: &str, devices: BTreeMap<String, bool>) {
        self.resources.insert(resource.to_owned(), devices);
    }

    /// The plugin is gone: its devices stay registered and count as unhealthy.
    pub(super) fn plugin_lost(&mut self, resource: &str) {
        for healthy in self.resources.entry(resource.to_owned()).or_default().values_mut() {
            *healthy = false;
        }
    }

    /// Whether a resource comes from a plugin.
    pub(super) fn serves(&self, resource: &str) -> bool {
        self.resources.contains_key(resource)
    }

    /// Devices and healthy devices of each resource.
    pub(super) fn counts(&self) -> BTreeMap<String, (usize, usize)> {
        let count = |devices: &BTreeMap<String, bool>| {
            (devices.len(), devices.values().filter(|healthy| **healthy).count())
        };
        self.resources.iter().map(|(name, devices)| (name.clone(), count(devices))).collect()
    }

    /// Whether a device is healthy.
    pub(super) fn is_healthy(&self, resource: &str, id: &str) -> bool {
        self.resources.get(resource).and_then(|devices| devices.get(id)).copied().unwrap_or(false)
    }

    /// Every device of every resource.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.resources
            .iter()
            .flat_map(|(resource, devices)| devices.keys().map(move |id| (resource.as_str(), id.as_str())))
    }

    /// A pod begins to be admitted.
    pub(super) fn begin(&mut self, uid: &str, namespace: &str, name: &str) {
        let pod = self.pods.entry(uid.to_owned()).or_default();
        pod.namespace = namespace.to_owned();
        pod.name = name.to_owned();
    }

    /// A pod has ended, was deleted or was refused: its devices are free.
    pub(super) fn release(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// The pods that hold devices or may come to.
    pub(super) fn pods(&self) -> &BTreeMap<String, PodDevices> {
        &self.pods
    }

    /// What may be given to a container.
    ///
    /// # Errors
    /// [`Shortage`] fails the pod.
    pub(super) fn offer(&self, want: DeviceDemand<'_>) -> Result<Offer, Shortage> {
        let none = BTreeSet::new();
        let reusable =
            self.pods.get(want.uid).and_then(|pod| pod.reusable.get(want.resource)).unwrap_or(&none);
        let mut must: Vec<String> = reusable.iter().cloned().collect();
        must.shuffle(&mut rand::rng());
        if must.len() >= want.count {
            must.truncate(want.count);
            return Ok(Offer::Reuse(must.into_iter().collect()));
        }
        let devices = self.resources.get(want.resource);
        let healthy: Vec<&String> =
            devices.into_iter().flatten().filter(|(_, healthy)| **healthy).map(|(id, _)| id).collect();
        if healthy.is_empty() {
            return Err(Shortage::NoneHealthy(want.resource.to_owned()));
        }
        let held = self.held(want.resource);
        let free = healthy.into_iter().filter(|id| !held.contains(id.as_str())).cloned();
        let mut available: Vec<String> = free.collect();
        if available.len() + must.len() < want.count {
            return Err(Shortage::TooFew {
                resource: want.resource.to_owned(),
                asked: want.count - must.len(),
                available: available.len(),
            });
        }
        available.extend(must.iter().cloned());
        available.shuffle(&mut rand::rng());
        Ok(Offer::Choose { available, must })
    }

    /// What is taken of `available`, given the plugin's answer: an invalid answer is cut or filled up at random, never
    /// refused.
    pub(super) fn settle(
        available: &[String],
        must: &[String],
        preferred: &[String],
        count: usize,
    ) -> BTreeSet<String> {
        let mut taken: BTreeSet<String> = must.iter().cloned().collect();
        let offered: BTreeSet<&String> = available.iter().collect();
        let mut preferred: Vec<&String> = preferred.iter().filter(|id| offered.contains(id)).collect();
        preferred.shuffle(&mut rand::rng());
        let mut rest: Vec<&String> = available.iter().collect();
        rest.shuffle(&mut rand::rng());
        for id in preferred.into_iter().chain(rest) {
            if taken.len() >= count {
                break;
            }
            taken.insert(id.clone());
        }
        taken
    }

    /// Notes that a container holds `ids`.
    pub(super) fn take(&mut self, want: DeviceDemand<'_>, ids: &BTreeSet<String>) {
        let pod = self.pods.entry(want.uid.to_owned()).or_default();
        let reusable = pod.reusable.entry(want.resource.to_owned()).or_default();
        match want.role {
            Role::Init => reusable.extend(ids.iter().cloned()),
            Role::Sidecar | Role::App => reusable.retain(|id| !ids.contains(id)),
        }
        pod.containers.push(ContainerDevices {
            container: want.container.to_owned(),
            role: want.role,
            resource: want.resource.to_owned(),
            ids: ids.clone(),
        });
    }

    fn held(&self, resource: &str) -> BTreeSet<&str> {
        self.pods
            .values()
            .flat_map(|pod| &pod.containers)
            .filter(|held| held.resource == resource)
            .flat_map(|held| held.ids.iter().map(String::as_str))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "nvidia.com/gpu";

    fn ids(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn four() -> Devices {
        let mut devices = Devices::default();
        devices.advertise(GPU, ["a", "b", "c", "d"].map(|id| (id.to_owned(), true)).into());
        devices
    }

    fn want(uid: &'static str, container: &'static str, role: Role, count: usize) -> DeviceDemand<'static> {
        DeviceDemand { uid, container, role, resource: GPU, count }
    }

    fn choice(offer: Offer) -> (BTreeSet<String>, BTreeSet<String>) {
        match offer {
            Offer::Choose { available, must } => {
                (available.into_iter().collect(), must.into_iter().collect())
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn held_and_unhealthy_devices_are_not_offered() {
        let mut devices = four();
        devices.take(want("p", "c", Role::App, 1), &ids(&["a"]));
        devices.advertise(
            GPU,
            [("a", true), ("b", false), ("c", true), ("d", true)].map(|(id, ok)| (id.to_owned(), ok)).into(),
        );
        let offer = devices.offer(want("q", "c", Role::App, 2)).unwrap();
        assert_eq!(choice(offer), (ids(&["c", "d"]), ids(&[])));
        let short = devices.offer(want("q", "c", Role::App, 3)).unwrap_err();
        assert_eq!(
            short.to_string(),
            "requested number of devices unavailable for nvidia.com/gpu. Requested: 3, Available: 2"
        );
        devices.release("p");
        assert!(devices.offer(want("q", "c", Role::App, 3)).is_ok());
    }

    #[test]
    fn app_reuses_init_container_devices_without_a_call() {
        let mut devices = four();
        devices.take(want("p", "init", Role::Init, 2), &ids(&["a", "b"]));
        let same = devices.offer(want("p", "app", Role::App, 2)).unwrap();
        assert_eq!(same, Offer::Reuse(ids(&["a", "b"])));
        let more = devices.offer(want("p", "app", Role::App, 3)).unwrap();
        assert_eq!(choice(more), (ids(&["a", "b", "c", "d"]), ids(&["a", "b"])));
    }

    #[test]
    fn valid_preference_is_used_invalid_is_corrected() {
        let available: Vec<String> = ["a", "b", "c"].map(str::to_owned).into();
        let answer = |preferred: &[&str], count| {
            let preferred: Vec<String> = preferred.iter().map(|id| (*id).to_owned()).collect();
            Devices::settle(&available, &[], &preferred, count)
        };
        assert_eq!(answer(&["c", "a"], 2), ids(&["a", "c"]));
        assert_eq!(answer(&[], 3), ids(&["a", "b", "c"]));
        assert!(answer(&["x", "b"], 2).contains("b"), "an unknown device is ignored");
        assert!(answer(&["a", "b"], 1).is_subset(&ids(&["a", "b"])), "too long an answer is cut");
    }

    #[test]
    fn lost_plugin_keeps_devices_unallocated() {
        let mut devices = four();
        devices.plugin_lost(GPU);
        assert_eq!(devices.counts()[GPU], (4, 0));
        let refused = devices.offer(want("p", "c", Role::App, 1)).unwrap_err();
        assert_eq!(refused, Shortage::NoneHealthy(GPU.into()));
    }
}
