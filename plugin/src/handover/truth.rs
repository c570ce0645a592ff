//! What kubelet says of who holds what. It overrules every guess about who asked: allocated sets are exchanged between pods
//! until they match. Blind to ordinary init containers, so what it does not list is not thereby free.

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
    /// Name of the pod; kubelet gives no UID.
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

/// A point in the order of events: what a list that began here cannot know came later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The last listing, and what it cannot know.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// As kubelet gave it, other plugins' devices and all: it may come before the inventory does. `None` before the first.
    heard: Option<Listing>,
    /// What of it is of this node's GPUs.
    listing: Listing,
    clock: u64,
    /// The kubelet at the time each listing began.
    began_in: u64,
    /// The names of pods deleted of late. A listing that began before shows them; one that began soon after does, where kubelet had not heard
    /// of it yet.
    pub(super) deleted: BTreeMap<(String, String), Deleted>,
}

/// A deleted pod.
#[derive(Debug)]
pub(super) struct Deleted {
    /// When.
    at: Ticket,
    /// What its containers had, each of each resource.
    held: BTreeMap<(String, ResourceName), Devices>,
}

impl Deleted {
    /// Whether its container had this set.
    fn had(&self, holding: &Holding, set: &Devices) -> bool {
        let part = (holding.container.clone(), holding.resource.clone());
        self.held.get(&part) == Some(set)
    }
}

/// A set that was allocated for a pod nobody knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unattributed {
    pub(super) resource: ResourceName,
    pub(super) set: Devices,
    /// When. Two listings later the pod is listed, or has no app container that holds devices, or failed.
    pub(super) ticket: Ticket,
}

impl Unattributed {
    /// Most that are kept: more than any machine has devices.
    pub(super) const MOST: usize = 256;
}

impl Truth {
    pub(super) fn was_heard(&self) -> bool {
        self.heard.is_some()
    }

    pub(super) fn now(&self) -> Ticket {
        Ticket(self.clock)
    }

    /// The pod is gone: its name may come again with other devices.
    pub(super) fn forget(&mut self, pod: &PodName, steps: &[Step]) {
        for listing in self.heard.iter_mut().chain([&mut self.listing]) {
            listing
                .0
                .retain(|holding, _| holding.namespace != pod.namespace || holding.pod != pod.name);
        }
        let had = steps.iter().filter_map(|step| {
            let set = step.allocated.clone()?;
            Some(((step.container.clone(), step.resource.clone()), set))
        });
        let deleted = Deleted {
            at: self.now(),
            held: had.collect(),
        };
        self.deleted
            .insert((pod.namespace.clone(), pod.name.clone()), deleted);
    }

    /// A pod is there that was not before: what the last listing says of its name, and would say of a pod that was deleted shortly before,
    /// is not of this one.
    pub(super) fn tell_apart(&mut self, pod: &PodName) {
        let name = (pod.namespace.clone(), pod.name.clone());
        let Some(deleted) = self.deleted.get(&name) else {
            return;
        };
        for listing in self.heard.iter_mut().chain([&mut self.listing]) {
            listing
                .0
                .retain(|holding, set| holding.name() != name || !deleted.had(holding, set));
        }
    }

    /// Holdings of pods that the watch does not show.
    pub(super) fn strangers<'t>(
        &'t self,
        pods: &BTreeMap<PodUid, Pod>,
    ) -> impl Iterator<Item = (&'t Holding, &'t Devices)> {
        let known: BTreeSet<(&str, &str)> = pods
            .values()
            .map(|pod| (pod.name.namespace.as_str(), pod.name.name.as_str()))
            .collect();
        let known: Vec<bool> = self
            .listing
            .0
            .keys()
            .map(|holding| known.contains(&(holding.namespace.as_str(), holding.pod.as_str())))
            .collect();
        self.listing
            .0
            .iter()
            .zip(known)
            .filter_map(|(entry, known)| (!known).then_some(entry))
    }
}

impl Handover {
    /// A listing is about to be asked for. One that began earlier will not come any more.
    pub fn listing_begins(&mut self) -> Ticket {
        self.truth.clock += 1;
        let now = self.truth.now();
        self.truth.deleted.retain(|_, deleted| deleted.at.0 + 2 >= now.0);
        self.truth.began_in = self.epoch;
        self.truth.now()
    }

    /// The listing that began at `ticket` has come.
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
        self.truth.heard = Some(listing);
        self.truth
            .deleted
            .retain(|_, deleted| deleted.at.0 + 1 >= ticket.0);
        self.unattributed.retain(|known| known.ticket.0 + 2 > ticket.0);
        let current = self.truth.began_in == self.epoch;
        self.apply_truth(current, now);
        self.settle();
    }

    /// The pods or the devices changed: what the last listing says of them holds as before.
    pub(super) fn retell_truth(&mut self) {
        self.apply_truth(false, Timestamp::UNIX_EPOCH);
    }

    /// Makes the pods' allocated sets what the listing says. `current`: it comes from the kubelet that is there now.
    fn apply_truth(&mut self, current: bool, now: Timestamp) {
        self.truth.listing = Listing(
            self.truth
                .heard
                .iter()
                .flat_map(|heard| &heard.0)
                .filter(|(holding, set)| self.is_ours(&holding.resource, set))
                .map(|(holding, set)| (holding.clone(), set.clone()))
                .collect(),
        );
        let by_name: BTreeMap<(String, String), PodUid> = self
            .in_order()
            .into_iter()
            .map(|pod| {
                (
                    (pod.name.namespace.clone(), pod.name.name.clone()),
                    pod.name.uid.clone(),
                )
            })
            .collect();
        let mut told: Vec<(PodUid, usize, Devices)> = Vec::new();
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
                told.push((uid, position, set.clone()));
            }
        }
        for pod in self.pods.values_mut() {
            for step in &mut pod.steps {
                step.listed = false;
            }
        }
        for (uid, position, set) in &told {
            self.correct(uid, *position, set, current);
        }
        self.forget_what_others_hold(&told);
        for (uid, position, set) in &told {
            self.imply_earlier(&(uid.clone(), *position), set);
        }
        if now != Timestamp::UNIX_EPOCH {
            self.report_differences(&told, now);
        }
    }

    /// Whether a set is of this node's GPUs, by a name of now or by one that a changed configuration took from them.
    fn is_ours(&self, resource: &ResourceName, set: &Devices) -> bool {
        let known = |device: &DeviceId| self.whereabouts.contains_key(device.unit());
        self.devices.contains_key(resource) || set.iter().any(known)
    }

    /// This step holds `set`, whatever was believed.
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
        // Whoever was taken for the holder of this set has the other one, if there was another.
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
                // The same pod's init container may have had it; else it is somebody's whom the next listing will name.
                let kept = self.pods.get(uid).is_some_and(|pod| {
                    pod.steps
                        .iter()
                        .any(|step| step.allocated.as_ref() == Some(&believed))
                });
                if !kept {
                    self.unattribute(&resource, &believed);
                }
            }
            (None, None) => {}
        }
        self.attribute(&place, &resource, set);
    }

    /// A set that nobody was known for, and part of which this step has, is this pod's: the step's own or that of an init container,
    /// whose devices the app took over.
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

    /// What an earlier run believed of a pod does not stand against the truth of another.
    fn forget_what_others_hold(&mut self, told: &[(PodUid, usize, Devices)]) {
        for pod in self.pods.values_mut() {
            for devices in pod.remembered.values_mut() {
                for (_, _, set) in told.iter().filter(|(uid, _, _)| *uid != pod.name.uid) {
                    devices.retain(|device| !set.contains(device));
                }
            }
            pod.remembered.retain(|_, devices| !devices.is_empty());
        }
    }

    /// Kubelet serves a pod's containers in order: those before a listed one have been served too, by the grant if this one was.
    fn imply_earlier(&mut self, (uid, position): &(PodUid, usize), set: &Devices) {
        let Some(pod) = self.pods.get_mut(uid) else { return };
        let Some(listed) = pod.steps.get(*position) else {
            return;
        };
        let resource = listed.resource.clone();
        let earlier = || {
            pod.steps
                .iter()
                .take(*position)
                .filter(|step| step.resource == resource)
        };
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

    /// Tells of pods that hold another set than granted: exchanged with another pod, or foreign to all grants.
    fn report_differences(&mut self, told: &[(PodUid, usize, Devices)], now: Timestamp) {
        for (uid, position, set) in told {
            let Some(pod) = self.pods.get(uid) else { continue };
            let Some(step) = pod.steps.get(*position) else {
                continue;
            };
            let Some(Share::Exactly(granted)) = &step.share else {
                continue;
            };
            if granted == set || step.told || !pod.is_granted() {
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
                self.notes.push(Note::Swapped {
                    pods: [pod.name.clone(), owner.name.clone()],
                    resource,
                });
            } else {
                let name = pod.name.clone();
                let deviation = self.deviation(now, &resource, set, Some(granted), Some(uid));
                self.deviate(Some(name), deviation);
            }
            if let Some(step) = self.step_mut(&(uid.clone(), *position)) {
                step.told = true;
            }
        }
    }
}
