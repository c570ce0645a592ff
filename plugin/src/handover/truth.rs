//! PodResources, the truth about holders. It overrides every attribution: allocated sets are exchanged between pods
//! until they match. It does not show ordinary init containers, so an unlisted device is not necessarily free.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::{DeviceId, PodUid, ResourceName};
use jiff::Timestamp;

use super::pod::{Pod, Share, Step};
use super::{Devices, Handover, Note, PodName};

/// One container's devices of one resource, as kubelet lists them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holding {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod; kubelet does not return the UID.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The resource.
    pub resource: ResourceName,
}

impl Holding {
    /// Namespace and name of the pod.
    fn name(&self) -> (String, String) {
        (self.namespace.clone(), self.pod.clone())
    }
}

/// Kubelet's whole list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing(pub BTreeMap<Holding, Devices>);

/// A point in the order of events: changes after it are not in a list that began at it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The last list, with the changes it cannot contain.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// As kubelet returned it, with other plugins' devices, because it may come before the inventory. `None` before the
    /// first.
    raw: Option<Listing>,
    /// The part about this node's GPUs.
    listing: Listing,
    clock: u64,
    /// The kubelet at the start of each list call.
    began_in: u64,
    /// Names of recently deleted pods. A list that began before the deletion shows them, and so may one that began soon
    /// after, until kubelet has processed it.
    pub(super) deleted: BTreeMap<(String, String), Deleted>,
}

/// A deleted pod.
#[derive(Debug)]
pub(super) struct Deleted {
    /// When it was deleted.
    at: Ticket,
    /// The devices of its containers, by resource.
    held: BTreeMap<(String, ResourceName), Devices>,
}

impl Deleted {
    /// Whether its container had this set.
    fn had(&self, holding: &Holding, set: &Devices) -> bool {
        let part = (holding.container.clone(), holding.resource.clone());
        self.held.get(&part) == Some(set)
    }
}

/// A set that was allocated for an unknown pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unattributed {
    pub(super) resource: ResourceName,
    pub(super) set: Devices,
    /// When. After two lists the pod is listed, or has no app container with devices, or failed.
    pub(super) ticket: Ticket,
}

impl Unattributed {
    /// Limit: more than any machine has devices.
    pub(super) const MOST: usize = 256;
}

impl Truth {
    pub(super) fn is_listed(&self) -> bool {
        self.raw.is_some()
    }

    pub(super) fn now(&self) -> Ticket {
        Ticket(self.clock)
    }

    /// Forgets a deleted pod: a new pod may have its name with other devices.
    pub(super) fn forget(&mut self, pod: &PodName, steps: &[Step]) {
        for listing in self.raw.iter_mut().chain([&mut self.listing]) {
            listing.0.retain(|holding, _| holding.namespace != pod.namespace || holding.pod != pod.name);
        }
        let had = steps.iter().filter_map(|step| {
            let set = step.allocated.clone()?;
            Some(((step.container.clone(), step.resource.clone()), set))
        });
        let deleted = Deleted { at: self.now(), held: had.collect() };
        self.deleted.insert((pod.namespace.clone(), pod.name.clone()), deleted);
    }

    /// Records a new pod: list entries under its name belong to an earlier pod, if one was deleted shortly before.
    pub(super) fn forget_earlier(&mut self, pod: &PodName) {
        let name = (pod.namespace.clone(), pod.name.clone());
        let Some(deleted) = self.deleted.get(&name) else {
            return;
        };
        for listing in self.raw.iter_mut().chain([&mut self.listing]) {
            listing.0.retain(|holding, set| holding.name() != name || !deleted.had(holding, set));
        }
    }

    /// Entries of pods that the watch does not show.
    pub(super) fn unknown_pods<'t>(
        &'t self,
        pods: &BTreeMap<PodUid, Pod>,
    ) -> impl Iterator<Item = (&'t Holding, &'t Devices)> {
        let known: BTreeSet<(&str, &str)> =
            pods.values().map(|pod| (pod.name.namespace.as_str(), pod.name.name.as_str())).collect();
        let known: Vec<bool> = self
            .listing
            .0
            .keys()
            .map(|holding| known.contains(&(holding.namespace.as_str(), holding.pod.as_str())))
            .collect();
        self.listing.0.iter().zip(known).filter_map(|(entry, known)| (!known).then_some(entry))
    }
}

impl Handover {
    /// Records the start of a list call. Results of earlier calls will not arrive any more.
    pub fn listing_begins(&mut self) -> Ticket {
        self.truth.clock += 1;
        let now = self.truth.now();
        self.truth.deleted.retain(|_, deleted| deleted.at.0 + 2 >= now.0);
        self.truth.began_in = self.epoch;
        self.truth.now()
    }

    /// Records the list of the call that began at `ticket`.
    pub fn listed(&mut self, ticket: Ticket, mut listing: Listing, now: Timestamp) {
        let has = |name: &(String, String)| {
            let mut pods = self.pods.values().map(|pod| &pod.name);
            pods.any(|pod| pod.namespace == name.0 && pod.name == name.1)
        };
        listing.0.retain(|holding, set| {
            let name = holding.name();
            self.truth.deleted.get(&name).is_none_or(|deleted| {
                let shortly_before = deleted.at.0 + 1 == ticket.0;
                deleted.at < ticket && !(shortly_before && deleted.had(holding, set) && has(&name))
            })
        });
        self.truth.raw = Some(listing);
        self.truth.deleted.retain(|_, deleted| deleted.at.0 + 1 >= ticket.0);
        self.unattributed.retain(|known| known.ticket.0 + 2 > ticket.0);
        let current = self.truth.began_in == self.epoch;
        self.apply_truth(current, now);
        self.settle();
    }

    /// Applies the last list again after a change of pods or devices.
    pub(super) fn reapply_truth(&mut self) {
        self.apply_truth(false, Timestamp::UNIX_EPOCH);
    }

    /// Sets the pods' allocated sets from the list. `current`: it comes from the present kubelet.
    fn apply_truth(&mut self, current: bool, now: Timestamp) {
        self.truth.listing = Listing(
            self.truth
                .raw
                .iter()
                .flat_map(|raw| &raw.0)
                .filter(|(holding, set)| self.is_ours(&holding.resource, set))
                .map(|(holding, set)| (holding.clone(), set.clone()))
                .collect(),
        );
        let by_name: BTreeMap<(String, String), PodUid> = self
            .in_order()
            .into_iter()
            .map(|pod| ((pod.name.namespace.clone(), pod.name.name.clone()), pod.name.uid.clone()))
            .collect();
        let mut listed: Vec<(PodUid, usize, Devices)> = Vec::new();
        for (holding, set) in &self.truth.listing.0 {
            let place = by_name
                .get(&(holding.namespace.clone(), holding.pod.clone()))
                .and_then(|uid| self.pods.get(uid))
                .and_then(|pod| {
                    let position = pod.steps.iter().position(|step| {
                        step.container == holding.container && step.resource == holding.resource
                    })?;
                    Some((pod.name.uid.clone(), position))
                });
            if let Some((uid, position)) = place {
                listed.push((uid, position, set.clone()));
            }
        }
        for pod in self.pods.values_mut() {
            for step in &mut pod.steps {
                step.listed = false;
            }
        }
        for (uid, position, set) in &listed {
            self.correct(uid, *position, set, current);
        }
        self.drop_contradicted_adoptions(&listed);
        for (uid, position, set) in &listed {
            self.imply_earlier(&(uid.clone(), *position), set);
        }
        if now != Timestamp::UNIX_EPOCH {
            self.report_differences(&listed, now);
        }
    }

    /// Whether a set consists of this node's GPUs, by a current name or one from before a configuration change.
    fn is_ours(&self, resource: &ResourceName, set: &Devices) -> bool {
        let known = |device: &DeviceId| self.whereabouts.contains_key(device.unit());
        self.devices.contains_key(resource) || set.iter().any(known)
    }

    /// Sets the allocated set of a step, overriding its attribution.
    fn correct(&mut self, uid: &PodUid, position: usize, set: &Devices, current: bool) {
        let epoch = self.epoch;
        let place = (uid.clone(), position);
        let Some(step) = self.step_mut(&place) else { return };
        step.listed = true;
        if current {
            step.epoch = epoch;
        }
        if step.allocated.as_ref() == Some(set) {
            return;
        }
        let believed = step.allocated.replace(set.clone());
        let resource = step.resource.clone();
        // The pod to which this set was attributed has the other set, if there was one.
        let mistaken = self.in_order().into_iter().find_map(|pod| {
            let at = pod.steps.iter().position(|step| {
                step.resource == resource && !step.listed && step.allocated.as_ref() == Some(set)
            })?;
            (pod.name.uid != *uid).then(|| (pod.name.uid.clone(), at))
        });
        match (mistaken, believed) {
            (Some(other), believed) => {
                if let Some(step) = self.step_mut(&other) {
                    step.allocated = believed;
                }
            }
            (None, Some(believed)) => {
                // An init container of the same pod may have had it; otherwise it belongs to a pod that the next list
                // will name.
                let kept = self.pods.get(uid).is_some_and(|pod| {
                    pod.steps.iter().any(|step| step.allocated.as_ref() == Some(&believed))
                });
                if !kept {
                    self.unattribute(&resource, &believed);
                }
            }
            (None, None) => {}
        }
        self.attribute(&place, &resource, set);
    }

    /// Removes unattributed sets that overlap the step's devices: they belong to this pod, to the step itself or to an
    /// init container with devices that the app container reuses.
    pub(super) fn attribute(
        &mut self,
        (uid, position): &(PodUid, usize),
        resource: &ResourceName,
        set: &Devices,
    ) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        self.unattributed.retain(|known| {
            if known.resource != *resource || known.set.is_disjoint(set) {
                return true;
            }
            let earlier = pod.steps.iter_mut().take(*position).find(|step| {
                step.resource == *resource && step.count == known.set.len() && step.allocated.is_none()
            });
            if let Some(step) = earlier {
                step.allocated = Some(known.set.clone());
            }
            false
        });
    }

    /// Devices adopted from an earlier run are dropped if the list shows them at another pod.
    fn drop_contradicted_adoptions(&mut self, listed: &[(PodUid, usize, Devices)]) {
        for pod in self.pods.values_mut() {
            for devices in pod.remembered.values_mut() {
                for (_, _, set) in listed.iter().filter(|(uid, _, _)| *uid != pod.name.uid) {
                    devices.retain(|device| !set.contains(device));
                }
            }
            pod.remembered.retain(|_, devices| !devices.is_empty());
        }
    }

    /// Marks earlier containers of a listed pod as served, because kubelet serves them in order: by the grant if this
    /// one was.
    fn imply_earlier(&mut self, (uid, position): &(PodUid, usize), set: &Devices) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let Some(listed) = pod.steps.get(*position) else {
            return;
        };
        let resource = listed.resource.clone();
        let earlier = || pod.steps.iter().take(*position).filter(|step| step.resource == resource);
        let as_granted = match &listed.share {
            Some(Share::Exactly(granted)) => granted == set,
            Some(Share::OfHeld) => set.iter().all(|device| {
                earlier().any(|step| step.assigned.as_ref().is_some_and(|set| set.contains(device)))
            }),
            None => false,
        };
        if !as_granted {
            return;
        }
        let others: Devices = self
            .pods
            .values()
            .filter(|pod| pod.name.uid != *uid)
            .flat_map(|pod| &pod.steps)
            .filter(|step| step.resource == resource)
            .filter_map(|step| step.allocated.as_ref())
            .flatten()
            .cloned()
            .collect();
        let Some(pod) = self.pods.get_mut(uid) else { return };
        for step in pod.steps.iter_mut().take(*position) {
            if step.resource == resource && step.allocated.is_none() {
                step.allocated = step.assigned.clone().filter(|set| set.is_disjoint(&others));
            }
        }
    }

    /// Reports pods with another set than granted: exchanged with another pod, or outside all grants.
    fn report_differences(&mut self, listed: &[(PodUid, usize, Devices)], now: Timestamp) {
        for (uid, position, set) in listed {
            let Some(pod) = self.pods.get(uid) else { continue };
            let Some(step) = pod.steps.get(*position) else {
                continue;
            };
            let Some(Share::Exactly(granted)) = &step.share else {
                continue;
            };
            if granted == set || step.reported || !pod.is_granted() {
                continue;
            }
            let resource = step.resource.clone();
            let owner = self.pods.values().find(|other| {
                other.name.uid != *uid
                    && other.is_granted()
                    && other.steps.iter().any(|step| {
                        step.resource == resource && step.share.as_ref() == Some(&Share::Exactly(set.clone()))
                    })
            });
            if let Some(owner) = owner {
                self.notes.push(Note::Swapped { pods: [pod.name.clone(), owner.name.clone()], resource });
            } else {
                let name = pod.name.clone();
                let deviation = self.deviation(now, &resource, set, Some(granted), Some(uid));
                self.deviate(Some(name), deviation);
            }
            if let Some(step) = self.step_mut(&(uid.clone(), *position)) {
                step.reported = true;
            }
        }
    }
}
