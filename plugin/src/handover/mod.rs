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

mod pod;
mod shared;
mod steer;
mod truth;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use gantry_api::{Deviation, DeviceId, Holder, HolderState, NodeName, PodUid, Provenance, ResourceName};
use gantry_topology::choice::Table;
use gantry_topology::choice::devices::Spot;
use jiff::Timestamp;

use crate::inventory::{Inventory, State};
use pod::{Pod, Share, Step};
use steer::ChoiceInput;
use truth::UnattributedSet;

pub use pod::{ContainerRequest, GrantRefusal, ObservedPod};
pub use shared::SharedHandover;
pub use steer::{Basis, Preference, Request, WaitFor};
pub use truth::{Allocatable, Holding, Listing, NumaListing, Ticket};

/// A set of device IDs.
pub type Devices = BTreeSet<DeviceId>;

/// The state machine. Inputs are methods; results are read ([`Handover::holders`]) or drained ([`Handover::notes`]).
#[derive(Debug)]
pub struct Handover {
    node: NodeName,
    /// The devices by resource.
    devices: BTreeMap<ResourceName, ChoiceInput>,
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
    outstanding: Vec<steer::PendingResponse>,
    truth: truth::Truth,
    /// Sets allocated for unknown pods.
    unattributed: Vec<truth::UnattributedSet>,
    quarantine: BTreeMap<PodUid, QuarantinedPod>,
    deviations: VecDeque<Deviation>,
    deviations_total: u64,
    notes: Vec<Note>,
}

/// Devices of a deleted pod, until its processes are gone.
#[derive(Debug, Clone, PartialEq, Eq)]
struct QuarantinedPod {
    namespace: String,
    name: String,
    sets: BTreeMap<ResourceName, Devices>,
}

/// An event for the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A grant annotation is invalid; the pod is served as if it had none.
    Refused {
        pod: PodName,
        /// Why it is invalid.
        refusal: GrantRefusal,
    },
    /// Kubelet chose another set than granted.
    Deviated {
        /// The pod to which the set was attributed, if any.
        pod: Option<PodName>,
        deviation: Deviation,
    },
    /// Two pods held each other's sets; the ledger was corrected.
    Swapped { pods: [PodName; 2], resource: ResourceName },
    /// A pod was deleted while it held devices.
    Quarantined { pod: PodName, devices: usize },
    /// All processes of a deleted pod are gone.
    Released { pod: PodName },
}

/// How an allocated set relates to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanMatch {
    /// It is a pod's grant.
    Granted,
    /// For a pod without a grant: the set that was preferred, or one that kubelet reuses without a question.
    Unplanned,
    /// Kubelet chose another set than granted or preferred.
    Deviation,
}

/// Pod and position of a step.
type StepRef = (PodUid, usize);

/// Holders by resource and device.
type ByDevice<'a> = BTreeMap<(&'a ResourceName, &'a DeviceId), PodUid>;

/// Identification of a pod in Events and log lines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
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
        self.devices = steer::choosable(inventory);
        self.whereabouts = steer::whereabouts(inventory);
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
    pub fn observe(&mut self, pod: ObservedPod) {
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
    pub fn remove_pod(&mut self, uid: &PodUid, finished: bool) {
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
    /// their processes are gone; existing pods hold theirs until PodResources reports otherwise. Called after the pods
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
                .or_insert_with(|| QuarantinedPod {
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
                QuarantinedPod { namespace: pod.name.namespace, name: pod.name.name, sets },
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

    fn settle(&mut self) {
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
    fn known_holders(&self) -> ByDevice<'_> {
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

    /// Records that kubelet allocates exactly `set`.
    pub fn allocate(&mut self, resource: &ResourceName, set: &Devices, now: Timestamp) -> PlanMatch {
        // An empty set belongs to no pod.
        if set.is_empty() {
            return PlanMatch::Unplanned;
        }
        let advised = self
            .outstanding
            .iter()
            .position(|answer| answer.resource == *resource && answer.set == *set)
            .map(|position| self.outstanding.remove(position));
        self.end_unattributed(resource, set, advised.is_some());
        let served = match advised {
            Some(answer) => self.record_preferred(answer.step, resource, set),
            None => {
                let departed = self.outstanding.iter().any(|answer| answer.resource == *resource);
                self.outstanding.retain(|answer| answer.resource != *resource);
                self.attribute_other(resource, set, departed, now)
            }
        };
        self.settle();
        served
    }

    fn record_preferred(
        &mut self,
        step: Option<StepRef>,
        resource: &ResourceName,
        set: &Devices,
    ) -> PlanMatch {
        let Some(place) = step.filter(|place| self.step(place).is_some()) else {
            self.unattribute(resource, set);
            return PlanMatch::Unplanned;
        };
        let granted =
            self.step(&place).is_some_and(|(pod, step)| pod.is_granted() && granted_as(pod, step, set));
        self.consume(&place, set);
        if granted { PlanMatch::Granted } else { PlanMatch::Unplanned }
    }

    /// Attributes a set that does not match the last preference, or that had none.
    fn attribute_other(
        &mut self,
        resource: &ResourceName,
        set: &Devices,
        departed: bool,
        now: Timestamp,
    ) -> PlanMatch {
        let epoch = self.epoch;
        // Grants are disjoint: an equal set identifies its pod, in any order.
        if let Some(place) = self.find(resource, |pod, step| {
            pod.is_open(step, epoch) && pod.due(step).is_some_and(|due| due == set)
        }) {
            self.consume(&place, set);
            return PlanMatch::Granted;
        }
        // Kubelet lost the devices of a container and allocates again.
        if let Some(place) = self.find(resource, |_, step| step.allocated.as_ref() == Some(set)) {
            let granted = self.step(&place).is_some_and(|(_, step)| step.share.is_some());
            self.consume(&place, set);
            return if granted { PlanMatch::Granted } else { PlanMatch::Unplanned };
        }
        // Kubelet reuses a pod's init devices without a question: the set is then part of what one pod holds.
        if let Some(place) = self.find(resource, |pod, step| {
            pod.is_open(step, epoch) && step.count == set.len() && set.is_subset(&pod.held_of(resource))
        }) {
            let planned = self
                .step(&place)
                .is_some_and(|(pod, step)| pod.is_granted() && matches!(step.share, Some(Share::OfHeld)));
            let exact =
                self.step(&place).is_some_and(|(_, step)| matches!(step.share, Some(Share::Exactly(_))));
            if exact {
                return self.deviates(Some(place), resource, set, now);
            }
            self.consume(&place, set);
            return if planned { PlanMatch::Granted } else { PlanMatch::Unplanned };
        }
        // Only a kubelet that lost its state allocates again for a running pod; that is no basis for a guess.
        let presumed = self
            .find(resource, |pod, step| !pod.started && pod.is_open(step, epoch) && step.count == set.len());
        let granted = presumed
            .as_ref()
            .and_then(|place| self.step(place))
            .is_some_and(|(pod, step)| pod.is_granted() && step.share.is_some());
        if granted || departed {
            return self.deviates(presumed, resource, set, now);
        }
        match presumed {
            Some(place) => self.consume(&place, set),
            None => self.unattribute(resource, set),
        }
        PlanMatch::Unplanned
    }

    fn deviates(
        &mut self,
        place: Option<StepRef>,
        resource: &ResourceName,
        set: &Devices,
        now: Timestamp,
    ) -> PlanMatch {
        let step = place.as_ref().and_then(|place| self.step(place));
        let granted = step.and_then(|(pod, step)| pod.due(step)).cloned();
        let pod = step.map(|(pod, _)| pod.name.clone());
        let deviation =
            self.deviation(now, resource, set, granted.as_ref(), pod.as_ref().map(|pod| &pod.uid));
        self.deviate(pod, deviation);
        match place {
            Some(place) => {
                self.consume(&place, set);
                if let Some(step) = self.step_mut(&place) {
                    step.reported = true;
                }
            }
            None => self.unattribute(resource, set),
        }
        PlanMatch::Deviation
    }

    /// Records that a step got `set`. Kubelet serves the containers of a pod in order, so earlier open steps will not
    /// be served any more.
    fn consume(&mut self, (uid, position): &StepRef, set: &Devices) {
        let epoch = self.epoch;
        let Some(resource) =
            self.pods.get(uid).and_then(|pod| pod.steps.get(*position)).map(|step| step.resource.clone())
        else {
            return;
        };
        self.attribute(&(uid.clone(), *position), &resource, set);
        let Some(pod) = self.pods.get_mut(uid) else { return };
        for (at, step) in pod.steps.iter_mut().enumerate() {
            if at == *position {
                step.allocated = Some(set.clone());
                step.epoch = epoch;
            } else if at < *position && step.resource == resource && step.allocated.is_none() {
                step.allocated = step.assigned.clone();
                step.epoch = epoch;
            }
        }
    }

    /// Ends unattributed sets that overlap `set`: kubelet never allocates a held device, so their pods have ended. Init
    /// containers' devices are reused only within a pod, without a question.
    fn end_unattributed(&mut self, resource: &ResourceName, set: &Devices, asked: bool) {
        self.unattributed.retain(|known| {
            let handed_on = !asked && known.set != *set && set.is_subset(&known.set);
            known.resource != *resource || known.set.is_disjoint(set) || handed_on
        });
    }

    /// Records `set` as held by an unknown pod. Without PodResources only this limit ends such sets: the oldest are
    /// dropped.
    fn unattribute(&mut self, resource: &ResourceName, set: &Devices) {
        let ticket = self.truth.now();
        self.unattributed.retain(|known| known.resource != *resource || known.set != *set);
        if self.unattributed.len() >= UnattributedSet::MOST {
            self.unattributed.remove(0);
        }
        self.unattributed.push(UnattributedSet { resource: resource.clone(), set: set.clone(), ticket });
    }

    fn find(&self, resource: &ResourceName, wanted: impl Fn(&Pod, &Step) -> bool) -> Option<StepRef> {
        self.in_order().into_iter().find_map(|pod| {
            pod.steps
                .iter()
                .position(|step| step.resource == *resource && wanted(pod, step))
                .map(|position| (pod.name.uid.clone(), position))
        })
    }

    fn step(&self, (uid, position): &StepRef) -> Option<(&Pod, &Step)> {
        let pod = self.pods.get(uid)?;
        Some((pod, pod.steps.get(*position)?))
    }

    fn step_mut(&mut self, (uid, position): &StepRef) -> Option<&mut Step> {
        self.pods.get_mut(uid)?.steps.get_mut(*position)
    }

    /// Records the start of a list call. Results of earlier calls will not arrive any more.
    pub fn listing_begins(&mut self) -> Ticket {
        self.truth.begin(self.epoch)
    }

    /// Records the list of the call that began at `ticket`.
    pub fn listed(&mut self, ticket: Ticket, listing: Listing, now: Timestamp) {
        let pods = &self.pods;
        let has = |name: &(String, String)| {
            let mut pods = pods.values().map(|pod| &pod.name);
            pods.any(|pod| pod.namespace == name.0 && pod.name == name.1)
        };
        let current = self.truth.replace(ticket, listing, has) == self.epoch;
        self.unattributed.retain(|known| known.outlasts(ticket));
        self.apply_truth(current, now);
        self.settle();
    }

    /// Applies the last list again after a change of pods or devices.
    fn reapply_truth(&mut self) {
        self.apply_truth(false, Timestamp::UNIX_EPOCH);
    }

    /// Sets the pods' allocated sets from the list. `current`: it comes from the present kubelet.
    fn apply_truth(&mut self, current: bool, now: Timestamp) {
        // By a current name, or by one from before a configuration change.
        self.truth.select(|resource, set| {
            let known = |device: &DeviceId| self.whereabouts.contains_key(device.unit());
            self.devices.contains_key(resource) || set.iter().any(known)
        });
        let by_name: BTreeMap<(String, String), PodUid> = self
            .in_order()
            .into_iter()
            .map(|pod| ((pod.name.namespace.clone(), pod.name.name.clone()), pod.name.uid.clone()))
            .collect();
        let mut listed: Vec<(PodUid, usize, Devices)> = Vec::new();
        for (holding, set) in self.truth.listing() {
            let place = by_name.get(&holding.name()).and_then(|uid| self.pods.get(uid)).and_then(|pod| {
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
                let has_other = self.pods.get(uid).is_some_and(|pod| {
                    pod.steps.iter().any(|step| step.allocated.as_ref() == Some(&believed))
                });
                if !has_other {
                    self.unattribute(&resource, &believed);
                }
            }
            (None, None) => {}
        }
        self.attribute(&place, &resource, set);
    }

    /// Removes unattributed sets that overlap the step's devices: they belong to this pod, to the step itself or to an
    /// init container with devices that the app container reuses.
    fn attribute(&mut self, (uid, position): &(PodUid, usize), resource: &ResourceName, set: &Devices) {
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

fn granted_as(pod: &Pod, step: &Step, set: &Devices) -> bool {
    match &step.share {
        Some(Share::Exactly(_)) => pod.due(step) == Some(set),
        Some(Share::OfHeld) => true,
        None => false,
    }
}

#[cfg(test)]
mod tests;
