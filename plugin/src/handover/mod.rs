//! From the scheduler's choice to kubelet's: who is asking, which devices are meant for it, who holds what. A pure, synchronous
//! state machine; [`SharedHandover`] puts clocks, locks and waiting around it.
//!
//! Kubelet never says which pod it allocates for. What identifies the pod:
//! - kubelet admits pods one by one in the order of their bindings, which is the order of the pod watch, and a pod's containers
//!   in their own order: so the oldest open step of that resource and size is the asking one;
//! - grants that are live at once are disjoint: so a set names its pod even where the order misled.
//!
//! What is known, and from where; nothing is kept on disk:
//! ```text
//! pods (watch)          -> steps: container by container, what is asked and what is granted
//! Allocate (kubelet)    -> a step's allocated set
//! PodResources (kubelet)-> the truth, which overrules every guess: allocated sets are exchanged to match it
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
pub use pod::{Ask, PodSeen, Refusal};
pub use shared::SharedHandover;
pub use steer::{Basis, Patience, Preference, Request};
pub use truth::{Holding, Listing, Ticket};

use choose::Choosable;
use pod::Pod;

/// A set of device IDs.
pub type Devices = BTreeSet<DeviceId>;

/// The state machine. Inputs are methods; what they bring about is asked for ([`Handover::holders`]) or drained
/// ([`Handover::notes`]).
#[derive(Debug)]
pub struct Handover {
    node: NodeName,
    /// The devices there are, by resource.
    devices: BTreeMap<ResourceName, Choosable>,
    /// Where GPUs and MIG devices lie, by UUID.
    whereabouts: HashMap<String, Spot>,
    inventory_known: bool,
    table: Option<Arc<Table>>,
    pods: BTreeMap<PodUid, Pod>,
    /// Counts arrivals: a pod's place in kubelet's order.
    arrivals: u64,
    /// Counts kubelets: what is known from before a restart may be asked for again.
    epoch: u64,
    /// Whether a kubelet came up since the pods were last listed: such a kubelet admits by creation time.
    fresh_kubelet: bool,
    /// Whether the pods have been listed at all.
    synced: bool,
    /// Answers to GetPreferredAllocation that no Allocate has followed yet.
    outstanding: Vec<steer::Outstanding>,
    truth: truth::Truth,
    /// Sets allocated for a pod that is not known.
    unattributed: Vec<truth::Unattributed>,
    quarantine: BTreeMap<PodUid, Quarantined>,
    deviations: VecDeque<Deviation>,
    deviations_total: u64,
    notes: Vec<Note>,
}

/// What a deleted pod held, until its processes are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Quarantined {
    namespace: String,
    name: String,
    sets: BTreeMap<ResourceName, Devices>,
}

/// Something worth telling an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A grant annotation cannot be believed; the pod is served as if it had none.
    Refused {
        /// The pod.
        pod: PodName,
        /// Why.
        refusal: Refusal,
    },
    /// Kubelet chose otherwise than granted.
    Deviated {
        /// The pod it was taken for, if any.
        pod: Option<PodName>,
        /// What happened.
        deviation: Deviation,
    },
    /// Two pods held each other's sets; the ledger now says so.
    Swapped {
        /// The pods.
        pods: [PodName; 2],
        /// The resource.
        resource: ResourceName,
    },
    /// A pod was removed while it held devices.
    Quarantined {
        /// The pod.
        pod: PodName,
        /// How many devices.
        devices: usize,
    },
    /// Nothing of a removed pod runs any more.
    Released {
        /// The pod.
        pod: PodName,
    },
}

/// What Events and log lines call a pod.
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
    /// Knows nothing yet.
    pub fn new(node: NodeName) -> Self {
        Self {
            node,
            devices: BTreeMap::new(),
            whereabouts: HashMap::new(),
            inventory_known: false,
            table: None,
            pods: BTreeMap::new(),
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

    /// The devices there are. A changed machine makes the old choice table void.
    pub fn inventory(&mut self, inventory: &Inventory) {
        self.devices = choose::choosable(inventory);
        self.whereabouts = choose::whereabouts(inventory);
        self.inventory_known = inventory.state == State::Ready;
        self.retell_truth();
        self.settle();
    }

    /// How sets are chosen where no grant says it; `None` while the table of a new machine is being made.
    pub fn table(&mut self, table: Option<Arc<Table>>) {
        self.table = table;
    }

    /// All pods of the node, as a list has them. Pods known before and not in it were deleted unseen.
    pub fn sync(&mut self, mut pods: Vec<PodSeen>) {
        if self.fresh_kubelet {
            pods.sort_by(|a, b| (a.created, a.revision, &a.uid).cmp(&(b.created, b.revision, &b.uid)));
        } else {
            // The last write to a pod that kubelet has not touched is its binding.
            pods.sort_by(|a, b| (a.revision, &a.uid).cmp(&(b.revision, &b.uid)));
        }
        self.fresh_kubelet = false;
        self.synced = true;
        let listed: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        let lost: Vec<PodUid> = self
            .pods
            .keys()
            .filter(|uid| !listed.contains(uid))
            .cloned()
            .collect();
        for uid in lost {
            self.remove(&uid, false);
        }
        for pod in pods {
            self.insert(pod);
        }
        self.retell_truth();
        self.settle();
    }

    /// A pod was bound to the node, or changed.
    pub fn seen(&mut self, pod: PodSeen) {
        if self.insert(pod) {
            self.retell_truth();
            self.settle();
        }
    }

    /// A pod left the watch: `finished` if its containers have ended (its phase says so), otherwise it was deleted, and what it
    /// held stays in quarantine until [`Handover::processes_gone`].
    pub fn gone(&mut self, uid: &PodUid, finished: bool) {
        if self.remove(uid, finished) {
            self.settle();
        }
    }

    /// A new kubelet is there. It admits what it finds by creation time, and may ask again for what its predecessor gave.
    pub fn kubelet_restarted(&mut self) {
        self.epoch += 1;
        self.fresh_kubelet = true;
        self.outstanding.clear();
        let mut order: Vec<(i64, u64, PodUid)> = self
            .pods
            .iter()
            .map(|(uid, pod)| (pod.created, pod.rank, uid.clone()))
            .collect();
        order.sort();
        for (rank, (_, _, uid)) in (0..).zip(order) {
            if let Some(pod) = self.pods.get_mut(&uid) {
                pod.rank = rank;
            }
        }
        self.settle();
    }

    /// Takes over what an earlier run of this plugin published: devices of pods that are no longer there go to quarantine,
    /// until their processes are seen to be gone; pods that are there hold them until the truth gives them to others. To be
    /// called once the pods are listed.
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

    /// Nothing of this deleted pod runs any more: its devices are free.
    pub fn processes_gone(&mut self, uid: &PodUid) {
        if let Some(quarantined) = self.quarantine.remove(uid) {
            self.notes.push(Note::Released {
                pod: PodName {
                    namespace: quarantined.namespace,
                    name: quarantined.name,
                    uid: uid.clone(),
                },
            });
        }
    }

    /// The deleted pods whose processes must be looked for.
    pub fn quarantined(&self) -> Vec<PodUid> {
        self.quarantine.keys().cloned().collect()
    }

    /// Whether the pods of the node have been listed.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Whether the devices are known and kubelet has said who holds them.
    pub fn is_told(&self) -> bool {
        self.inventory_known && self.truth.was_heard()
    }

    /// What happened since the last call.
    pub fn notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Adds or updates a pod; false if nothing changed.
    fn insert(&mut self, seen: PodSeen) -> bool {
        if let Some(known) = self.pods.get_mut(&seen.uid) {
            return known.update(&seen, self.epoch);
        }
        self.arrivals += 1;
        // Ranks are set anew when kubelet restarts, but never beyond the count of arrivals.
        let pod = Pod::new(seen, &self.node, self.arrivals, self.epoch);
        self.truth.tell_apart(&pod.name);
        self.pods.insert(pod.name.uid.clone(), pod);
        true
    }

    /// Takes a pod out; false if it was not known.
    fn remove(&mut self, uid: &PodUid, finished: bool) -> bool {
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
        self.truth.forget(&pod.name, &pod.steps);
        if !pod.started {
            // Kubelet never admitted it, as far as was seen: what it was taken to have got may be another pod's.
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
        // A pod that the watch showed too late may have got a set that nobody was known to ask for.
        for step in pod.steps.iter().filter(|step| step.allocated.is_none()) {
            for known in &self.unattributed {
                if known.resource == step.resource && known.set.len() == step.count {
                    sets.entry(step.resource.clone())
                        .or_default()
                        .extend(known.set.iter().cloned());
                }
            }
        }
        let devices = sets.values().map(BTreeSet::len).sum();
        if devices > 0 {
            self.notes.push(Note::Quarantined {
                pod: pod.name.clone(),
                devices,
            });
            self.quarantine.insert(
                uid.clone(),
                Quarantined {
                    namespace: pod.name.namespace,
                    name: pod.name.name,
                    sets,
                },
            );
        }
        true
    }

    /// The pods in the order kubelet admits them.
    fn in_order(&self) -> Vec<&Pod> {
        let mut pods: Vec<&Pod> = self.pods.values().collect();
        pods.sort_by_key(|pod| pod.rank);
        pods
    }

    fn deviate(&mut self, pod: Option<PodName>, deviation: Deviation) {
        self.deviations.push_front(deviation.clone());
        self.deviations
            .truncate(gantry_api::GpuNodeStatus::MAX_DEVIATIONS);
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
