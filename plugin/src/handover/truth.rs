//! PodResources, the truth about holders. It overrides every attribution: allocated sets are exchanged between pods
//! until they match. It does not show ordinary init containers, so an unlisted device is not necessarily free.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::{PodUid, ResourceName};

use super::pod::{Pod, Step};
use super::{Devices, PodName};

/// One container's devices of one resource, as kubelet lists them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holding {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod; kubelet does not return the UID.
    pub pod: String,
    pub container: String,
    pub resource: ResourceName,
}

impl Holding {
    /// Namespace and name of the pod.
    pub(super) fn name(&self) -> (String, String) {
        (self.namespace.clone(), self.pod.clone())
    }
}

/// Kubelet's whole list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing(pub BTreeMap<Holding, Devices>);

/// The CPUs and the memory in kubelet's list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NumaListing {
    /// What kubelet may give to containers.
    pub allocatable: Allocatable,
    /// CPUs that a container has alone.
    pub held_cpus: BTreeSet<u32>,
    /// Memory that a container has, in bytes, with the NUMA nodes that it is of.
    pub held_memory: Vec<(BTreeSet<u32>, u64)>,
}

/// What kubelet may give to containers of certain NUMA nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// CPUs that one container may have alone; none without the static CPU manager.
    pub cpus: BTreeSet<u32>,
    /// Bytes of memory by NUMA node; none without the static memory manager.
    pub memory: BTreeMap<u32, u64>,
}

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
    deleted: BTreeMap<(String, String), DeletedPod>,
}

#[derive(Debug)]
struct DeletedPod {
    /// When it was deleted.
    at: Ticket,
    /// The devices of its containers, by resource.
    held: BTreeMap<(String, ResourceName), Devices>,
}

impl DeletedPod {
    /// Whether its container had this set.
    fn had(&self, holding: &Holding, set: &Devices) -> bool {
        let part = (holding.container.clone(), holding.resource.clone());
        self.held.get(&part) == Some(set)
    }
}

/// A set that was allocated for an unknown pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UnattributedSet {
    pub(super) resource: ResourceName,
    pub(super) set: Devices,
    /// When. After two lists the pod is listed, or has no app container with devices, or failed.
    pub(super) ticket: Ticket,
}

impl UnattributedSet {
    /// Limit: more than any machine has devices.
    pub(super) const MOST: usize = 256;
}

impl UnattributedSet {
    /// Whether a list call that began at `ticket` does not cover it yet.
    pub(super) fn outlasts(&self, ticket: Ticket) -> bool {
        self.ticket.0 + 2 > ticket.0
    }
}

impl Truth {
    /// Records the start of a list call of the kubelet `epoch`.
    pub(super) fn begin(&mut self, epoch: u64) -> Ticket {
        self.clock += 1;
        self.deleted.retain(|_, deleted| deleted.at.0 + 2 >= self.clock);
        self.began_in = epoch;
        self.now()
    }

    /// Records the list of the call that began at `ticket`, without the pods that were deleted meanwhile. `has` returns
    /// whether the watch shows a pod with this namespace and name. Returns the kubelet that was asked.
    pub(super) fn replace(
        &mut self,
        ticket: Ticket,
        mut listing: Listing,
        has: impl Fn(&(String, String)) -> bool,
    ) -> u64 {
        listing.0.retain(|holding, set| {
            let name = holding.name();
            self.deleted.get(&name).is_none_or(|deleted| {
                let shortly_before = deleted.at.0 + 1 == ticket.0;
                deleted.at < ticket && !(shortly_before && deleted.had(holding, set) && has(&name))
            })
        });
        self.raw = Some(listing);
        self.deleted.retain(|_, deleted| deleted.at.0 + 1 >= ticket.0);
        self.began_in
    }

    /// Selects the part of the list that is about this node's GPUs.
    pub(super) fn select(&mut self, is_ours: impl Fn(&ResourceName, &Devices) -> bool) {
        let raw = self.raw.iter().flat_map(|raw| &raw.0);
        let ours = raw.filter(|(holding, set)| is_ours(&holding.resource, set));
        self.listing = Listing(ours.map(|(holding, set)| (holding.clone(), set.clone())).collect());
    }

    /// The part of the list that is about this node's GPUs.
    pub(super) fn listing(&self) -> &BTreeMap<Holding, Devices> {
        &self.listing.0
    }

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
        let deleted = DeletedPod { at: self.now(), held: had.collect() };
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

    #[cfg(test)]
    pub(super) fn remembered_deletions(&self) -> usize {
        self.deleted.len()
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
