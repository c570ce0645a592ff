//! Recomputes derived state after each change: which grants are valid, and the set due of each open step. All of it
//! follows from pods, allocations and PodResources, so a restart gives the same result.

use std::collections::BTreeMap;

use gantry_api::{DeviceId, PodUid, ResourceName};

use super::pod::{GrantRefusal, Pod, Share};
use super::{Devices, Handover, Note};

pub(super) type ByDevice<'a> = BTreeMap<(&'a ResourceName, &'a DeviceId), PodUid>;

impl Handover {
    pub(super) fn settle(&mut self) {
        self.refuse();
        self.assign();
    }

    /// Decides which grants are valid. If two name the same device, a pod that kubelet has served wins, then the older
    /// one.
    fn refuse(&mut self) {
        let mut order: Vec<(bool, u64, PodUid)> =
            self.pods.values().map(|pod| (!pod.has_evidence(), pod.rank, pod.name.uid.clone())).collect();
        order.sort();
        let mut claims: BTreeMap<(ResourceName, DeviceId), PodUid> = BTreeMap::new();
        for (_, _, uid) in order {
            let Some(pod) = self.pods.get(&uid) else { continue };
            let refused = self.refusal(pod, &claims);
            if refused.is_none() {
                for (resource, device) in granted(pod) {
                    claims.insert((resource.clone(), device.clone()), uid.clone());
                }
            }
            if let Some(pod) = self.pods.get_mut(&uid) {
                pod.refused = refused;
                // A running pod has its granted devices, even if they are named differently now.
                let passed = pod.started && matches!(pod.refused, Some(GrantRefusal::UnknownDevice { .. }));
                if let Some(refusal) = pod.malformed.as_ref().or(pod.refused.as_ref())
                    && !pod.reported
                    && !passed
                {
                    self.notes.push(Note::Refused { pod: pod.name.clone(), refusal: refusal.clone() });
                    pod.reported = true;
                }
            }
        }
    }

    fn refusal(
        &self,
        pod: &Pod,
        claims: &BTreeMap<(ResourceName, DeviceId), PodUid>,
    ) -> Option<GrantRefusal> {
        for (resource, device) in granted(pod) {
            if let Some(other) = claims.get(&(resource.clone(), device.clone())) {
                return Some(GrantRefusal::Overlap { device: device.clone(), other: other.clone() });
            }
            let known = self.devices.get(resource).is_some_and(|devices| devices.contains(device));
            if self.inventory_known && !known {
                return Some(GrantRefusal::UnknownDevice {
                    device: device.clone(),
                    resource: resource.clone(),
                });
            }
        }
        None
    }

    /// Sets the set due of each step. A grant that another pod turned out to hold is replaced by an equal free set
    /// left by a pod that got another one. Without such a set, the step is handled as one without a grant.
    fn assign(&mut self) {
        let assigned = self.assignments();
        for (uid, sets) in assigned {
            if let Some(pod) = self.pods.get_mut(&uid) {
                for (step, set) in pod.steps.iter_mut().zip(sets) {
                    step.assigned = set;
                }
            }
        }
    }

    fn assignments(&self) -> Vec<(PodUid, Vec<Option<Devices>>)> {
        let pods = self.in_order();
        let holders = self.known_holders();
        let taken_by_other = |uid: &PodUid, resource: &ResourceName, set: &Devices| {
            set.iter().any(|device| holders.get(&(resource, device)).is_some_and(|holder| holder != uid))
        };
        // Free sets of pods that got other ones.
        let mut spare: Vec<(&ResourceName, &Devices)> = Vec::new();
        for pod in pods.iter().filter(|pod| pod.is_granted()) {
            let held =
                |resource, set: &Devices| set.iter().any(|device| holders.contains_key(&(resource, device)));
            for step in &pod.steps {
                if let (Some(Share::Exactly(granted)), Some(allocated)) = (&step.share, &step.allocated)
                    && granted != allocated
                    && !held(&step.resource, granted)
                    && !spare.contains(&(&step.resource, granted))
                {
                    spare.push((&step.resource, granted));
                }
            }
        }
        pods.iter()
            .map(|pod| {
                let sets = pod
                    .steps
                    .iter()
                    .map(|step| match &step.share {
                        Some(Share::Exactly(granted)) if pod.is_granted() => {
                            if !taken_by_other(&pod.name.uid, &step.resource, granted) {
                                return Some(granted.clone());
                            }
                            if step.allocated.is_some() {
                                return None;
                            }
                            let position = spare.iter().position(|(resource, set)| {
                                **resource == step.resource && set.len() == step.count
                            })?;
                            Some(spare.remove(position).1.clone())
                        }
                        _ => None,
                    })
                    .collect();
                (pod.name.uid.clone(), sets)
            })
            .collect()
    }

    /// The holder of each device by allocation or PodResources.
    pub(super) fn known_holders(&self) -> ByDevice<'_> {
        let mut holders = ByDevice::new();
        for pod in self.pods.values() {
            for step in &pod.steps {
                for device in step.allocated.iter().flatten() {
                    holders.insert((&step.resource, device), pod.name.uid.clone());
                }
            }
        }
        for (holding, devices) in self.truth.unknown_pods(&self.pods) {
            for device in devices {
                holders.entry((&holding.resource, device)).or_insert_with(|| PodUid::from(""));
            }
        }
        holders
    }
}

/// All devices in a pod's grant.
fn granted(pod: &Pod) -> impl Iterator<Item = (&ResourceName, &DeviceId)> {
    let mut seen = std::collections::BTreeSet::new();
    pod.steps
        .iter()
        .filter_map(|step| match &step.share {
            Some(Share::Exactly(devices)) => Some((&step.resource, devices)),
            _ => None,
        })
        .flat_map(|(resource, devices)| devices.iter().map(move |device| (resource, device)))
        .filter(move |pair| seen.insert(*pair))
}
