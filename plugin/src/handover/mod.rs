//! The hand-over from the scheduler's choice to kubelet's: which pod kubelet allocates for, which devices were granted
//! to it, and which pods hold devices. A pure, synchronous state machine; [`SharedHandover`] adds clocks, locks and
//! waiting.
//!
//! Kubelet never names the pod that it allocates for. The pod is identified by two rules:
//! - kubelet admits pods one by one in the order of their bindings, which is the order of the pod watch, and the
//!   containers of a pod in their own order: the oldest open step of that resource and size belongs to the pod;
//! - live grants are disjoint: a set identifies its pod even if the order was misleading.
//!
//! Sources of the state; nothing is stored on disk:
//! ```text
//! pods (watch)          -> steps: container by container, requested and granted devices
//! Allocate (kubelet)    -> a step's allocated set
//! PodResources (kubelet)-> the truth, which overrides attributions: allocated sets are exchanged to match
//! deletions (watch)     -> quarantine, until the processes are gone
//! ```

mod allocate;
mod choose;
mod holders;
mod pod;
mod settle;
mod shared;
mod steer;
mod truth;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use gantry_api::{Deviation, DeviceId, Holder, NodeName, PodUid, Provenance, ResourceName};
use gantry_topology::choice::Table;
use gantry_topology::choice::devices::Spot;
use jiff::Timestamp;

use crate::inventory::{Inventory, State};

pub use allocate::Served;
pub use pod::{Ask, GrantRefusal, ObservedPod};
pub use shared::SharedHandover;
pub use steer::{Basis, Preference, Request, WaitFor};
pub use truth::{Holding, Listing, Ticket};

use choose::Choosable;
use pod::Pod;

/// A set of device IDs.
pub type Devices = BTreeSet<DeviceId>;

/// The state machine. Inputs are methods; results are read ([`Handover::holders`]) or drained ([`Handover::notes`]).
#[derive(Debug)]
pub struct Handover {
    node: NodeName,
    /// The devices by resource.
    devices: BTreeMap<ResourceName, Choosable>,
    /// Positions of GPUs and MIG devices, by UUID.
    whereabouts: HashMap<String, Spot>,
    inventory_known: bool,
    table: Option<Arc<Table>>,
    pods: BTreeMap<PodUid, Pod>,
    /// The memory that the pods take.
    bytes: usize,
    /// Number of pods seen: the next pod's rank in kubelet's order.
    arrivals: u64,
    /// Number of kubelets seen: sets allocated before a restart may be allocated again.
    epoch: u64,
    /// Whether a new kubelet has started since the last pod list: it admits pods by creation time.
    fresh_kubelet: bool,
    /// Whether the pods were listed.
    synced: bool,
    /// Responses to GetPreferredAllocation without an Allocate so far.
    outstanding: Vec<steer::Outstanding>,
    truth: truth::Truth,
    /// Sets allocated for unknown pods.
    unattributed: Vec<truth::Unattributed>,
    quarantine: BTreeMap<PodUid, Quarantined>,
    deviations: VecDeque<Deviation>,
    deviations_total: u64,
    notes: Vec<Note>,
}

/// Devices of a deleted pod, until its processes are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Quarantined {
    namespace: String,
    name: String,
    sets: BTreeMap<ResourceName, Devices>,
}

/// An event for the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A grant annotation is invalid; the pod is served as if it had none.
    Refused {
        /// The pod.
        pod: PodName,
        /// Why it is invalid.
        refusal: GrantRefusal,
    },
    /// Kubelet chose another set than granted.
    Deviated {
        /// The pod to which the set was attributed, if any.
        pod: Option<PodName>,
        /// The deviation.
        deviation: Deviation,
    },
    /// Two pods held each other's sets; the ledger was corrected.
    Swapped {
        /// The pods.
        pods: [PodName; 2],
        /// The resource.
        resource: ResourceName,
    },
    /// A pod was deleted while it held devices.
    Quarantined {
        /// The pod.
        pod: PodName,
        /// Number of devices.
        devices: usize,
    },
    /// All processes of a deleted pod are gone.
    Released {
        /// The pod.
        pod: PodName,
    },
}

/// Identification of a pod in Events and log lines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: PodUid,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Handover {
    /// Most bytes of requests and grants that are kept of all pods: some ten thousand ordinary pods, or sixty of the
    /// largest ones. A pod that exceeds them is treated as one that the watch did not show.
    pub const MAX_BYTES: usize = 8 * 1024 * 1024;

    /// Without any state.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            devices: BTreeMap::new(),
            whereabouts: HashMap::new(),
            inventory_known: false,
            table: None,
            pods: BTreeMap::new(),
            bytes: 0,
            arrivals: 0,
            epoch: 0,
            fresh_kubelet: false,
            synced: false,
            outstanding: Vec::new(),
            truth: truth::Truth::default(),
            unattributed: Vec::new(),
            quarantine: BTreeMap::new(),
            deviations: VecDeque::new(),
            deviations_total: 0,
            notes: Vec::new(),
        }
    }

    /// Sets the devices. A new machine invalidates the choice table.
    pub fn inventory(&mut self, inventory: &Inventory) {
        self.devices = choose::choosable(inventory);
        self.whereabouts = choose::whereabouts(inventory);
        self.inventory_known = inventory.state == State::Ready;
        self.reapply_truth();
        self.settle();
    }

    /// Sets the choice table; `None` while the table of a new machine is built.
    pub fn table(&mut self, table: Option<Arc<Table>>) {
        self.table = table;
    }

    /// Sets all pods of the node from a list. Known pods that are missing were deleted unseen.
    pub fn sync(&mut self, mut pods: Vec<ObservedPod>) {
        if self.fresh_kubelet {
            pods.sort_by(|a, b| (a.created, a.revision, &a.uid).cmp(&(b.created, b.revision, &b.uid)));
        } else {
            // The last write to a pod that kubelet has not touched is its binding.
            pods.sort_by(|a, b| (a.revision, &a.uid).cmp(&(b.revision, &b.uid)));
        }
        self.fresh_kubelet = false;
        self.synced = true;
        let listed: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        let lost: Vec<PodUid> = self.pods.keys().filter(|uid| !listed.contains(uid)).cloned().collect();
        for uid in lost {
            self.remove(&uid, false);
        }
        for pod in pods {
            self.insert(pod);
        }
        self.reapply_truth();
        self.settle();
    }

    /// Records that a pod was bound to the node, or changed.
    pub fn seen(&mut self, pod: ObservedPod) {
        if self.insert(pod) {
            self.reapply_truth();
            self.settle();
        }
    }

    /// Records a pod that is not kept.
    pub fn refused(&mut self, pod: PodName, refusal: GrantRefusal) {
        self.notes.push(Note::Refused { pod, refusal });
    }

    /// Records that a pod left the watch: `finished` if its containers ended according to its phase; attribute_other it was
    /// deleted, and its devices stay in quarantine until [`Handover::processes_gone`].
    pub fn gone(&mut self, uid: &PodUid, finished: bool) {
        if self.remove(uid, finished) {
            self.settle();
        }
    }

    /// Records a new kubelet. It admits existing pods by creation time, and may allocate again for them.
    pub fn kubelet_restarted(&mut self) {
        self.epoch += 1;
        self.fresh_kubelet = true;
        self.outstanding.clear();
        let mut order: Vec<(i64, u64, PodUid)> =
            self.pods.iter().map(|(uid, pod)| (pod.created, pod.rank, uid.clone())).collect();
        order.sort();
        for (rank, (_, _, uid)) in (0..).zip(order) {
            if let Some(pod) = self.pods.get_mut(&uid) {
                pod.rank = rank;
            }
        }
        self.settle();
    }

    /// Adopts the holders that an earlier run of this plugin published. Devices of missing pods go to quarantine until
    /// their processes are gone; existing pods hold theirs until PodResources says otherwise. Called after the pods
    /// were listed.
    pub fn adopt(&mut self, holders: &[Holder]) {
        for holder in holders {
            let Some(uid) = &holder.uid else { continue };
            if holder.provenance == Provenance::Granted {
                continue;
            }
            if let Some(pod) = self.pods.get_mut(uid) {
                pod.remembered
                    .entry(holder.resource.clone())
                    .or_default()
                    .extend(holder.devices.iter().cloned());
                continue;
            }
            self.quarantine
                .entry(uid.clone())
                .or_insert_with(|| Quarantined {
                    namespace: holder.namespace.clone(),
                    name: holder.pod.clone(),
                    sets: BTreeMap::new(),
                })
                .sets
                .entry(holder.resource.clone())
                .or_default()
                .extend(holder.devices.iter().cloned());
        }
    }

    /// Records that no process of a deleted pod is left: its devices are free.
    pub fn processes_gone(&mut self, uid: &PodUid) {
        if let Some(quarantined) = self.quarantine.remove(uid) {
            self.notes.push(Note::Released {
                pod: PodName { namespace: quarantined.namespace, name: quarantined.name, uid: uid.clone() },
            });
        }
    }

    /// The deleted pods with processes to check.
    pub fn quarantined(&self) -> Vec<PodUid> {
        self.quarantine.keys().cloned().collect()
    }

    /// Whether the pods of the node were listed.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Whether the devices are known and PodResources was read.
    pub fn has_listing(&self) -> bool {
        self.inventory_known && self.truth.is_listed()
    }

    /// Events since the last call.
    pub fn notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Adds or updates a pod; false if nothing changed.
    fn insert(&mut self, seen: ObservedPod) -> bool {
        if let Some(known) = self.pods.get_mut(&seen.uid) {
            return known.update(&seen, self.epoch);
        }
        self.arrivals += 1;
        // Ranks are reassigned when kubelet restarts, but never exceed the number of arrivals.
        let pod = Pod::new(seen, &self.node, self.arrivals, self.epoch);
        if let Err(refusal) = pod::over_node_limit(pod.bytes(), Self::MAX_BYTES.saturating_sub(self.bytes)) {
            self.refused(pod.name, refusal);
            return false;
        }
        self.bytes += pod.bytes();
        self.truth.forget_earlier(&pod.name);
        self.pods.insert(pod.name.uid.clone(), pod);
        true
    }

    /// Removes a pod; false if it was unknown.
    fn remove(&mut self, uid: &PodUid, finished: bool) -> bool {
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
        self.bytes -= pod.bytes();
        self.truth.forget(&pod.name, &pod.steps);
        if !pod.started {
            // Kubelet was not seen to admit it: a set attributed to it may belong to another pod.
            for step in pod.steps.iter().filter(|step| !step.listed) {
                if let Some(set) = &step.allocated {
                    self.unattribute(&step.resource, set);
                }
            }
        }
        if finished {
            return true;
        }
        let mut sets = pod.held();
        // A pod that the watch showed too late may hold a set that was not attributed.
        for step in pod.steps.iter().filter(|step| step.allocated.is_none()) {
            for known in &self.unattributed {
                if known.resource == step.resource && known.set.len() == step.count {
                    sets.entry(step.resource.clone()).or_default().extend(known.set.iter().cloned());
                }
            }
        }
        let devices = sets.values().map(BTreeSet::len).sum();
        if devices > 0 {
            self.notes.push(Note::Quarantined { pod: pod.name.clone(), devices });
            self.quarantine.insert(
                uid.clone(),
                Quarantined { namespace: pod.name.namespace, name: pod.name.name, sets },
            );
        }
        true
    }

    /// The pods in kubelet's order of admission.
    fn in_order(&self) -> Vec<&Pod> {
        let mut pods: Vec<&Pod> = self.pods.values().collect();
        pods.sort_by_key(|pod| pod.rank);
        pods
    }

    fn deviate(&mut self, pod: Option<PodName>, deviation: Deviation) {
        self.deviations.push_front(deviation.clone());
        self.deviations.truncate(gantry_api::GpuNodeStatus::MAX_DEVIATIONS);
        self.deviations_total += 1;
        self.notes.push(Note::Deviated { pod, deviation });
    }

    fn deviation(
        &self,
        now: Timestamp,
        resource: &ResourceName,
        allocated: &Devices,
        granted: Option<&Devices>,
        pod: Option<&PodUid>,
    ) -> Deviation {
        Deviation {
            time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now),
            resource: resource.clone(),
            allocated: allocated.iter().cloned().collect(),
            granted: granted.into_iter().flatten().cloned().collect(),
            pod: pod.cloned(),
            node: Some(self.node.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
