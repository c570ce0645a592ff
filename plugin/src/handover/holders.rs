//! The published holders: which pod holds which devices, and the evidence for it.

use std::collections::BTreeMap;

use gantry_api::{Deviation, Holder, HolderState, Provenance, ResourceName};

use super::{Devices, Handover};

impl Handover {
    /// The holders by grant, allocation, PodResources or quarantine; sorted.
    pub fn holders(&self) -> Vec<Holder> {
        let mut holders = Vec::new();
        for pod in self.pods.values() {
            let mut known: BTreeMap<ResourceName, [Devices; 3]> = BTreeMap::new();
            for step in &pod.steps {
                let (level, devices) = match (&step.allocated, &step.assigned) {
                    (Some(devices), _) if step.listed => (0, devices),
                    (Some(devices), _) => (1, devices),
                    (None, Some(devices)) => (2, devices),
                    (None, None) => continue,
                };
                known.entry(step.resource.clone()).or_default()[level].extend(devices.iter().cloned());
            }
            for (resource, devices) in &pod.remembered {
                known.entry(resource.clone()).or_default()[1].extend(devices.iter().cloned());
            }
            for (resource, [listed, allocated, granted]) in known {
                let allocated = &allocated - &listed;
                let granted = &(&granted - &listed) - &allocated;
                for (devices, provenance) in [
                    (listed, Provenance::PodResources),
                    (allocated, Provenance::Allocated),
                    (granted, Provenance::Granted),
                ] {
                    if !devices.is_empty() {
                        holders.push(Holder {
                            namespace: pod.name.namespace.clone(),
                            pod: pod.name.name.clone(),
                            uid: Some(pod.name.uid.clone()),
                            resource: resource.clone(),
                            devices: devices.into_iter().collect(),
                            provenance,
                            state: HolderState::Live,
                        });
                    }
                }
            }
        }
        holders.extend(self.unknown_pods());
        for (uid, quarantined) in &self.quarantine {
            for (resource, devices) in &quarantined.sets {
                holders.push(Holder {
                    namespace: quarantined.namespace.clone(),
                    pod: quarantined.name.clone(),
                    uid: Some(uid.clone()),
                    resource: resource.clone(),
                    devices: devices.iter().cloned().collect(),
                    provenance: Provenance::Allocated,
                    state: HolderState::Quarantined,
                });
            }
        }
        holders.sort_by(|a, b| {
            (&a.namespace, &a.pod, &a.uid, &a.resource, &a.devices).cmp(&(
                &b.namespace,
                &b.pod,
                &b.uid,
                &b.resource,
                &b.devices,
            ))
        });
        holders
    }

    /// Pods that kubelet lists but the watch has not shown, and sets allocated for unknown pods (without a name).
    fn unknown_pods(&self) -> impl Iterator<Item = Holder> + '_ {
        let quarantined = |resource: &ResourceName, set: &Devices| {
            self.quarantine
                .values()
                .any(|known| known.sets.get(resource).is_some_and(|held| set.is_subset(held)))
        };
        let mut listed: BTreeMap<(&str, &str, &ResourceName), Devices> = BTreeMap::new();
        for (holding, devices) in self.truth.unknown_pods(&self.pods) {
            listed
                .entry((&holding.namespace, &holding.pod, &holding.resource))
                .or_default()
                .extend(devices.iter().cloned());
        }
        let listed = listed
            .into_iter()
            .filter(move |((_, _, resource), set)| !quarantined(resource, set))
            .map(|((namespace, pod, resource), devices)| {
                (namespace, pod, resource, devices, Provenance::PodResources)
            });
        let unattributed = self
            .unattributed
            .iter()
            .map(|known| ("", "", &known.resource, known.set.clone(), Provenance::Allocated));
        listed.chain(unattributed).map(|(namespace, pod, resource, devices, provenance)| Holder {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            uid: None,
            resource: resource.clone(),
            devices: devices.into_iter().collect(),
            provenance,
            state: HolderState::Live,
        })
    }

    /// The latest deviations, newest first.
    pub fn deviations(&self) -> Vec<Deviation> {
        self.deviations.iter().cloned().collect()
    }

    /// Number of deviations.
    pub fn deviations_total(&self) -> u64 {
        self.deviations_total
    }

    /// Number of devices in quarantine.
    pub fn quarantined_devices(&self) -> usize {
        self.quarantine
            .values()
            .flat_map(|known| known.sets.values())
            .map(std::collections::BTreeSet::len)
            .sum()
    }
}
