//! The cluster as the watches and binds show it: a state machine that publishes immutable [`Snapshot`]s. One writer at
//! a time; no I/O, no clock: time is an argument. [`Index`] only routes events to the types that own the state; each of
//! them stands in the file of its name.
//!
//! ```text
//! pods, nodes, GpuNodes, Gangs (watch.rs) ─┐                                     ┌─> Snapshot ─> filter, prioritize, explain
//! binds and their outcomes (bind.rs) ──────┴─> Index ─> NodeTable ─> Ledger ─────┤
//! ticks, API server health (watch.rs) ─────┘                                     └─> gains ─> unschedulable pods are activated
//! ```

mod activation;
mod affinity_index;
mod disruption_budgets;
mod gangs;
mod holds;
mod idle;
mod ignored_requests;
mod inspection;
mod least_set;
mod list_tracker;
mod managed_resources;
mod marks;
mod node;
mod node_classes;
mod node_resources_table;
mod node_table;
mod objects;
mod observation;
mod occupancy;
mod occupants;
mod pod_store;
mod reservations;
mod scheduler_set;
mod store;
mod term_labels;
mod unschedulable_queue;
mod verbs;
mod victim_search;
mod volume_table;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::protocol::{Now, Settings, Stage, Withheld};
use gantry_gang::{Fabric, Levels, NodeFacts};

pub use disruption_budgets::{Disruptions, PartialBudget};
pub use gangs::{
    Awaited, Belongs, Called, GangReport, GangReservations, GangStanding, GangTotals, GangView, MemberStage,
    MemberView, PlaceView, ReportedStatus, Trial,
};
pub use holds::HOLD;
pub use idle::{IdleCause, IdleKey, IdleTotals, SET_SIZES};
pub use inspection::{Bound, Lack, NodeReport, PodReport, UnhealthyGpu, XidReport};
pub use list_tracker::Source;
pub use marks::mark;
pub use node_table::Totals;
pub(crate) use objects::read_part;
pub use objects::{PartialGpuNode, SlimNode, advertised, described, inventory};
pub use observation::{MAX_GANGS, NodeObservation, ObservedNodes, PodObservation, Revisions};
pub use occupants::{Occupant, Occupants};
pub use reservations::{BindError, GrantedSet, Outcome, Reserved, Target};
pub use store::{Clock, Store, system_clock};
pub use unschedulable_queue::{InsufficientPod, UnschedulablePod};
pub use verbs::{BindStep, CalledPod, ReadPod, SchedulingCall, Undecided};

use crate::ledger::FaultKind;
use crate::pod::{OtherPod, PodFacts};
use crate::watched::Watched;
use disruption_budgets::DisruptionBudgets;
use gantry_planner::decide::{ForeignNodes, Options};
use gantry_planner::input::Room;
use gantry_planner::inventory::Inventory;
use gantry_planner::snapshot::{NodeIx, NominatedRequest, NominatedRequests, Snapshot};
pub use ignored_requests::IgnoredRequest;
use ignored_requests::IgnoredRequests;
use list_tracker::{List, ListTracker};
use node_resources_table::{NodeResourcesTable, PodRecord};
use node_table::NodeTable;
use pod_store::PodStore;
use reservations::Reservations;
use scheduler_set::SchedulerSet;
use unschedulable_queue::UnschedulableQueue;
use volume_table::{Claim, VolumeTable};
pub use volume_table::{Volume, VolumeClaim};

/// How long the devices of a pod that disappeared before its end was observed stay taken, at least. Kubelet hands them
/// out again at once, while the process may still run: up to 2.5 s in trials with an ignored SIGTERM. The report of the
/// plugin, which takes over from there, lags by up to 1 s.
pub const QUARANTINE: Duration = Duration::from_secs(5);
/// How long after the API server was unreachable for a while: a plugin retries after 5 s at the latest and writes
/// within 1 s, so that its report arrives 3 s later.
pub const QUARANTINE_AFTER_A_GAP: Duration = Duration::from_secs(10);
/// The API server is asked every second; a longer pause means that plugins may not have been able to write.
const GAP: Duration = Duration::from_secs(3);
/// How long at most, while the plugin does not know what is held. Such a node is rarely out of service that long.
pub const QUARANTINE_WITHOUT_TRUTH: Duration = Duration::from_secs(300);
/// How long a bind of unknown outcome, or of a pod that is gone, keeps its devices, unless the pod shows the outcome
/// before. The API server gives up on a request after 60 s.
pub const UNSURE: Duration = Duration::from_secs(65);

/// The state. See the head of this module.
#[derive(Debug)]
pub struct Index {
    options: Options,
    nodes: NodeTable,
    pods: PodStore,
    reservations: Reservations,
    ignored_requests: IgnoredRequests,
    unschedulable: UnschedulableQueue,
    lists: ListTracker,
    resources: NodeResourcesTable,
    volumes: VolumeTable,
    gangs: gangs::GangIndex,
    schedulers: SchedulerSet,
    budgets: DisruptionBudgets,
    /// Something changed that a snapshot shows.
    changed: bool,
    /// The current time, and the time when both clocks were last set together.
    now: Now,
    origin: Now,
    /// A moment of both clocks that stays the same while they advance equally: times in texts do not vary by a second.
    epoch: Now,
    /// When the API server last answered, and since when without a gap.
    contact: Option<(Instant, Instant)>,
    published: Arc<Snapshot>,
}

impl Index {
    /// An empty index. `run` distinguishes the plans of this process from those of an earlier one.
    pub fn new(options: Options, watched: &Watched, run: String) -> Self {
        let begin = Now { at: Instant::now(), unix: 0 };
        let settings = Settings { identity: run.as_str().into(), ..Settings::default() };
        Self {
            options,
            nodes: NodeTable::new(watched),
            pods: PodStore::default(),
            reservations: Reservations::new(run),
            ignored_requests: IgnoredRequests::default(),
            unschedulable: UnschedulableQueue::default(),
            lists: ListTracker::default(),
            resources: NodeResourcesTable::default(),
            volumes: VolumeTable::default(),
            gangs: gangs::GangIndex::new(settings),
            schedulers: SchedulerSet::default(),
            budgets: DisruptionBudgets::default(),
            changed: true,
            now: begin,
            origin: begin,
            epoch: begin,
            contact: None,
            published: Arc::default(),
        }
    }

    /// Sets the schedulers that call this extender. Before any event.
    pub fn set_schedulers(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.schedulers = names.into_iter().collect();
    }

    /// Sets the levels of the fabric. Before any event.
    pub fn set_fabric(&mut self, levels: Levels) {
        self.resources.set_levels(levels);
    }

    /// Sets the current time. The index never reads a clock: what happens at one moment happens between two calls of
    /// this.
    pub fn at(&mut self, now: Now) {
        // Before the first call neither clock is known.
        if now.at >= self.now.at || self.now.unix == 0 {
            self.now = now;
            self.origin = now;
            let passed = now.at.saturating_duration_since(self.epoch.at).as_secs();
            if self.epoch.unix.saturating_add_unsigned(passed).abs_diff(now.unix) > 1 {
                self.epoch = now;
            }
        }
    }

    /// The current time.
    pub fn now(&self) -> Now {
        self.now
    }

    /// Sets the current time by one clock only: the other is assumed to have advanced equally.
    fn moment(&mut self, now: Instant) {
        if now > self.now.at {
            let passed = now.saturating_duration_since(self.origin.at).as_secs();
            self.now = Now { at: now, unix: self.origin.unix.saturating_add_unsigned(passed) };
        }
    }

    /// The facts may be old: nothing is decided before every source is listed again.
    pub fn relist(&mut self) {
        self.lists.restart();
        self.unsync_gangs();
    }

    /// A list begins: what it does not name is gone.
    pub fn list_begins(&mut self, now: Instant, source: Source) {
        self.lists.begin(now, source);
    }

    /// A list is complete.
    pub fn list_ends(&mut self, now: Instant, source: Source) {
        self.moment(now);
        let Some(List { since, names, unread }) = self.lists.end(source) else {
            return;
        };
        match source {
            Source::Pods => {
                for uid in self.pods.missing_from(&names) {
                    self.pod_deleted(now, &uid, None);
                }
                for uid in self.resources.missing_from(&names) {
                    self.other_pod_gone(&uid);
                }
                self.members_listed(&names);
                let mut restored = self.reservations.pods_listed(now, &mut self.nodes, since, &names);
                restored.extend(self.gone_before(since));
                restored.retain(|uid| !unread.contains(uid.as_str()));
                self.renew(restored);
            }
            Source::Nodes | Source::GpuNodes => {
                let missing = self.nodes.iter().map(|(_, node)| node.name());
                let missing: Vec<NodeName> =
                    missing.filter(|name| !names.contains(name.as_str())).cloned().collect();
                for name in missing {
                    match source {
                        Source::Nodes => self.node_deleted(name.as_str()),
                        _ => self.inventory_deleted(name.as_str()),
                    }
                }
            }
            Source::Gangs => self.gangs_listed(&names),
        }
        self.lists.set_synced(source);
    }

    /// A list shows pods as they were before binds found them bound or gone: etcd was restored to a backup. From here on
    /// these are new pods, and what they may have held is in quarantine.
    fn renew(&mut self, pods: Vec<PodUid>) {
        for uid in pods {
            let pod = self.pods.get(&uid).filter(|pod| pod.node.is_none());
            if let Some(pod) = pod.map(|pod| PodFacts::clone(pod)) {
                self.pod_deleted(self.now.at, &uid, None);
                self.set_pod(pod);
            }
        }
    }

    fn is_synced(&self) -> bool {
        self.lists.is_synced()
    }

    /// A pod that asks for watched resources was observed.
    pub fn pod_applied(&mut self, pod: PodFacts) {
        self.lists.observe(Source::Pods, pod.uid.as_str());
        self.set_pod(pod);
    }

    /// Sets a pod as it is now. It need not exist any more: only what the API server sends counts as seen while pods
    /// are listed.
    fn set_pod(&mut self, mut pod: PodFacts) {
        let known = self.pods.get(&pod.uid);
        if known.is_some_and(|known| known.node.is_some() && known.node != pod.node) {
            // Only a restored etcd takes a Binding back. From here on this is a new pod, and what it held is in
            // quarantine.
            let uid = pod.uid.clone();
            self.pod_deleted(self.now.at, &uid, None);
        }
        if pod.grant.is_some() {
            self.observe_granted(&pod.scheduler);
        }
        self.note_ignored_request(&pod);
        self.keep_membership(&pod.uid, &mut pod.membership);
        self.complete_needs(&mut pod);
        let uid = pod.uid.clone();
        let node = pod.node.as_ref().map(|node| self.nodes.number(node));
        match pod.terminal {
            true => self.resources.remove(&uid),
            false => self.resources.insert(uid.clone(), PodRecord::of_pod(&pod, node)),
        }
        let before = self.pods.get(&uid).cloned();
        if before.as_deref() == Some(&pod) {
            return;
        }
        if let Some(node) = node {
            self.reservations.pod_bound(&mut self.nodes, &uid);
            self.reservations.drop_hold(&mut self.nodes, &uid);
            self.unschedulable.forget(&uid);
            if let Some(occupancy) = self.nodes.occupancy_mut(node) {
                occupancy.set_pod(&uid, !pod.terminal);
            }
            if before.as_ref().is_none_or(|before| before.node.is_none()) {
                self.pod_came(&pod);
            }
        }
        if let Some(node) = node.filter(|_| pod.refused_by_topology)
            && let Some(inventory) = self.nodes.refused_by_topology(node)
        {
            self.set_inventory(node, Some(inventory));
        }
        self.note_waiting(&pod);
        self.tell_pod(&pod);
        if pod.terminal {
            self.unschedulable.forget(&uid);
            self.reservations.drop_hold(&mut self.nodes, &uid);
            self.pods.remove(&uid);
            return;
        }
        self.observe_waiting(&pod);
        self.pods.insert(pod);
    }

    /// Records request annotations that were changed while the pod is bound, and those without effect on a member of a gang.
    fn note_ignored_request(&mut self, pod: &PodFacts) {
        let before = self.pods.get(&pod.uid).filter(|before| before.node.is_some() && !pod.terminal);
        let changed = before.and_then(|before| pod.written.changed_while_bound(&before.written));
        let is_waiting_member = pod.membership.is_some() && pod.node.is_none() && !pod.terminal;
        let of_member = || pod.written.of_gang_member().filter(|_| is_waiting_member);
        if let Some(text) = changed.or_else(of_member) {
            self.ignored_requests.add(IgnoredRequest {
                uid: pod.uid.clone(),
                namespace: Arc::clone(&pod.namespace),
                name: Arc::clone(&pod.name),
                text: text.into(),
            });
        }
    }

    /// Records request annotations of a pod that requests no devices.
    fn note_request_without_devices(&mut self, pod: &OtherPod) {
        let has_ended = matches!(pod.stage, Stage::Succeeded | Stage::Failed);
        match pod.written.without_devices().filter(|_| !has_ended && !pod.leaving) {
            Some(text) => self.ignored_requests.add(IgnoredRequest {
                uid: pod.uid.clone(),
                namespace: Arc::clone(&pod.profile.namespace),
                name: Arc::clone(&pod.name),
                text: text.into(),
            }),
            None => self.ignored_requests.forget(&pod.uid),
        }
    }

    /// Whether notices about ignored requests wait to be published.
    pub fn has_ignored_requests(&self) -> bool {
        !self.ignored_requests.is_empty()
    }

    /// Takes notices about ignored requests, to publish them.
    pub fn take_ignored_requests(&mut self, most: usize) -> Vec<IgnoredRequest> {
        self.ignored_requests.take(most)
    }

    /// Returns a notice that could not be published.
    pub fn retry_ignored_request(&mut self, notice: IgnoredRequest) {
        self.ignored_requests.retry(notice);
    }

    /// Adds to a pod's needs the reach of its volumes, and those of its labels that are in terms.
    fn complete_needs(&mut self, pod: &mut PodFacts) {
        let volumes = self.volumes.of(pod);
        pod.needs = self.resources.completed(&pod.needs, &pod.profile, volumes);
    }

    fn observe_waiting(&mut self, pod: &PodFacts) {
        if self.schedulers.other_scheduler_of(pod).is_some() {
            self.unschedulable.forget(&pod.uid);
        } else {
            let is_single = self.goes_by_itself(pod);
            self.unschedulable.observe(self.now.at, pod, is_single);
        }
    }

    /// A pod was deleted. `last` is its last state, if the watch sent it.
    pub fn pod_deleted(&mut self, now: Instant, uid: &PodUid, last: Option<PodFacts>) {
        self.moment(now);
        if let Some(last) = last.filter(|last| last.uid == *uid) {
            self.set_pod(last);
        }
        self.depart(uid);
        self.tell_gone(uid);
        self.ignored_requests.forget(uid);
        self.resources.remove(uid);
        self.unschedulable.forget(uid);
        self.reservations.drop_hold(&mut self.nodes, uid);
        self.reservations.pod_deleted(now, &mut self.nodes, uid);
        let Some(pod) = self.pods.get(uid).cloned() else {
            return;
        };
        if let Some(node) = pod.node.as_ref().and_then(|node| self.nodes.find(node.as_str())) {
            // What it held by the newest facts, while it is still in the store.
            self.settle_node(node);
            self.nodes.remove_pod(now, node, &pod);
        }
        self.pods.remove(uid);
    }

    /// A pod of which nothing can be read any more was observed: it stays as it is known.
    pub fn pod_unread(&mut self, uid: &PodUid) {
        self.lists.observe_unread(Source::Pods, uid.as_str());
    }

    /// Drops values that no object has any more.
    pub fn sweep(&mut self) {
        self.resources.sweep();
    }

    /// A pod that asks for no watched resource was observed.
    pub fn other_pod_applied(&mut self, mut pod: OtherPod) {
        self.note_request_without_devices(&pod);
        self.keep_membership(&pod.uid, &mut pod.membership);
        let node = match &pod.stage {
            Stage::Bound(node) => Some(self.nodes.number(node)),
            _ => None,
        };
        self.tell_other_pod(&pod);
        // A pod without a node matters to its gang only, and to that also after its end.
        let uid = pod.uid.clone();
        if node.is_none() && pod.membership.is_none() {
            self.resources.remove(&uid);
        } else {
            self.lists.observe(Source::Pods, uid.as_str());
            self.resources.insert(uid, PodRecord::of_other_pod(pod, node));
        }
    }

    /// A pod that asks for no watched resource was deleted.
    pub fn other_pod_gone(&mut self, uid: &PodUid) {
        self.ignored_requests.forget(uid);
        self.depart(uid);
        self.tell_gone(uid);
        self.resources.remove(uid);
    }

    /// A Node object was observed, with what kubelet advertises of the watched resources.
    pub fn node_applied(&mut self, name: &NodeName, advertised: Vec<(ResourceName, u32)>) {
        self.lists.observe(Source::Nodes, name.as_str());
        let node = self.nodes.number(name);
        if self.nodes.set_advertised(node, Some(advertised)) {
            self.forget_resources();
        }
    }

    /// The marks of other programs on a Node were observed: what the program does, if it marks the node.
    pub fn node_marked(&mut self, name: &NodeName, mark: Option<Arc<str>>) {
        let node = self.nodes.number(name);
        let text = mark.clone();
        if self.nodes.set_mark(node, mark) {
            match text {
                Some(mark) => tracing::info!(node = %name, "{}", Withheld::ByMark(mark)),
                None => tracing::info!(node = %name, "no other program marks the node any more"),
            }
            if self.nodes.has_inventory(node) {
                self.gangs.reshaped();
            }
        }
    }

    /// The labels, taints and capacity of a node were observed.
    pub fn node_described(&mut self, facts: Arc<NodeFacts>) {
        let node = self.nodes.number(&NodeName::from(&*facts.name));
        self.describe(node, Some(facts));
    }

    fn describe(&mut self, node: NodeIx, facts: Option<Arc<NodeFacts>>) {
        if self.resources.describe(node, facts) {
            self.nodes.touch(node);
            if self.nodes.has_inventory(node) {
                self.gangs.reshaped();
            }
        }
    }

    /// A Node object was deleted.
    pub fn node_deleted(&mut self, name: &str) {
        if let Some(node) = self.nodes.find(name) {
            self.nodes.set_advertised(node, None);
            self.nodes.set_mark(node, None);
            self.describe(node, None);
            self.forget_resources();
        }
    }

    /// A GpuNode was observed.
    pub fn inventory_applied(&mut self, name: &NodeName, inventory: Inventory) {
        self.lists.observe(Source::GpuNodes, name.as_str());
        let node = self.nodes.number(name);
        self.set_inventory(node, Some(inventory));
    }

    /// A GpuNode was deleted.
    pub fn inventory_deleted(&mut self, name: &str) {
        if let Some(node) = self.nodes.find(name) {
            self.set_inventory(node, None);
        }
    }

    /// The nodes that have a GpuNode.
    pub(crate) fn nodes_with_inventory(&self) -> HashSet<NodeName> {
        let with_inventory = self.nodes.iter().filter(|(_, node)| node.inventory().is_some());
        with_inventory.map(|(_, node)| node.name().clone()).collect()
    }

    fn set_inventory(&mut self, node: NodeIx, inventory: Option<Inventory>) {
        let Some(change) = self.nodes.set_inventory(node, inventory) else {
            return;
        };
        if change.totals {
            self.gangs.reshaped();
        }
        if change.numbers {
            // The ledger cannot show whether devices came free, and holds by number would be on other devices.
            self.unschedulable.gained(node);
            self.reservations.drop_holds_on(node);
        }
        self.forget_resources();
    }

    /// Resources that no node has any more are managed only as long as pods ask for them.
    fn forget_resources(&mut self) {
        let (pods, gangs) = (&self.pods, &self.gangs);
        self.nodes.forget_resources(|resource| pods.ask_for(resource) || gangs.ask_for(resource));
    }

    /// All claims of volumes.
    pub fn volume_claims_listed(&mut self, claims: Vec<(Claim, Option<VolumeClaim>)>) {
        self.volumes.set_claims(claims);
    }

    /// A claim of a volume is bound, waits, or is gone.
    pub fn volume_claim_seen(&mut self, claim: Claim, volume: Option<VolumeClaim>) {
        self.volumes.set_claim(claim, volume);
    }

    /// All volumes.
    pub fn volumes_listed(&mut self, volumes: impl Iterator<Item = (Arc<str>, Option<Volume>)>) {
        self.volumes.set_volumes(volumes);
    }

    /// A volume; `None`: it is gone.
    pub fn volume_seen(&mut self, name: Arc<str>, volume: Option<Volume>) {
        self.volumes.set_volume(name, volume);
    }

    /// The disruption budgets; `None` while they are unknown: then no pod is preempted.
    pub fn budgets_seen(&mut self, budgets: Option<Vec<Disruptions>>) {
        if self.budgets.set(budgets) {
            self.gangs.unprotected();
        }
    }

    /// Whether the disruption budgets are known.
    pub(crate) fn knows_budgets(&self) -> bool {
        self.budgets.are_known()
    }

    /// A scheduler called for a pod of its own: its pods count, whatever `--scheduler-name` says.
    pub fn record_scheduler(&mut self, name: &str) {
        if !self.schedulers.record(name) {
            return;
        }
        tracing::warn!(
            scheduler = name,
            "a scheduler calls that --scheduler-name does not name: its gangs wait for its next call after every restart; add its name"
        );
        self.scheduler_calls(name);
    }

    /// A pod of a scheduler has a grant, so that the scheduler calls an extender. A command that only looks is never called itself.
    fn observe_granted(&mut self, scheduler: &str) {
        if self.gangs.only_looks() && self.schedulers.record(scheduler) {
            self.scheduler_calls(scheduler);
        }
    }

    fn scheduler_calls(&mut self, name: &str) {
        self.changed = true;
        let mut pods = self.pods.sorted();
        pods.retain(|pod| *pod.scheduler == *name && pod.node.is_none());
        for pod in pods {
            self.tell_pod(&pod);
            self.observe_waiting(&pod);
        }
    }

    /// A call for a bind that has a grant ended.
    pub fn finish(&mut self, now: Instant, target: &Target, outcome: Outcome) {
        self.reservations.finish(now, &mut self.nodes, target, outcome);
    }

    /// Lets time pass. `contact` is when the API server last answered: devices of pods that disappeared are released
    /// only by facts newer than their quarantine.
    pub fn tick(&mut self, now: Instant, contact: Instant) {
        self.moment(now);
        self.tick_gangs();
        self.forget_resources();
        let steady = self.note_contact(contact);
        self.nodes.end_quarantines(now, contact, steady);
        let (nodes, pods) = (&mut self.nodes, &self.pods);
        for uid in self.reservations.expire(now, contact, nodes, pods) {
            self.may_move(&uid);
        }
        self.reservations.expire_holds(now, &mut self.nodes);
    }

    /// Since when the API server has answered without a gap.
    fn note_contact(&mut self, contact: Instant) -> Instant {
        let steady = match self.contact {
            Some((last, since)) if contact.saturating_duration_since(last) <= GAP => since,
            _ => contact,
        };
        self.contact = Some((contact, steady));
        steady
    }

    /// Computes what changed, and publishes a snapshot if it shows any of it. True if it does.
    pub fn publish(&mut self) -> bool {
        self.settle_resources();
        self.settle_gangs();
        self.settle_nodes();
        self.look_at_places();
        self.settle_nodes();
        self.keep_backfill();
        self.changed |= self.unschedulable.take_nominations_changed();
        self.changed |= self.lists.take_changed();
        self.changed |= self.nodes.take_changed();
        self.changed |= self.reservations.take_changed();
        if !std::mem::take(&mut self.changed) {
            return false;
        }
        self.compact();
        let generation = self.published.generation + 1;
        self.unschedulable.published(generation);
        let mut snapshot = Snapshot {
            generation,
            synced: self.is_synced(),
            holds: self.reservations.holds().shared(),
            kept: self.kept(),
            promised: self.promised(),
            schedulers: self.schedulers.shared(),
            ..Snapshot::default()
        };
        self.nodes.fill(&mut snapshot);
        self.published = Arc::new(snapshot);
        true
    }

    /// The snapshot that was published last.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.published
    }

    /// Brings node resources and fabric up to date, and the needs of pods for which labels in terms or volumes changed.
    /// Before anything is planned.
    fn settle_resources(&mut self) {
        self.resources.forget_labels(self.gangs.reported_needs());
        let (labels, volumes) = (self.resources.take_labels_changed(), self.volumes.take_changed());
        if labels || volumes {
            let waiting = self.pods.iter().filter(|pod| pod.node.is_none());
            let waiting = waiting.filter(|pod| labels || !pod.volume_claims.is_empty());
            let waiting: Vec<PodFacts> = waiting.map(|pod| PodFacts::clone(pod)).collect();
            for mut pod in waiting {
                let before = Arc::clone(&pod.needs);
                self.complete_needs(&mut pod);
                if pod.needs != before {
                    self.set_pod(pod);
                    // A gang that was refused for the needs before.
                    self.gangs.gained();
                }
            }
        }
        // While nodes are being listed, each batch has more of them.
        let listing = self.lists.is_listing(Source::Nodes);
        if self.resources.settle(self.nodes.len(), !listing) {
            // Nodes that came while they were listed were in no domain that a gang could be planned in.
            self.gangs.reshaped();
        }
    }

    fn settle_nodes(&mut self) {
        for node in self.nodes.take_marked() {
            self.settle_node(node);
        }
    }

    /// Computes the ledger and the class of one node.
    fn settle_node(&mut self, node: NodeIx) {
        let held = self.reservations.holds().on(node);
        let Some(change) = self.nodes.settle(node, self.now.at, &self.pods, &held) else {
            return;
        };
        let opened = change.became_foreign && self.options.foreign == ForeignNodes::Allow;
        if opened || change.gained {
            self.unschedulable.gained(node);
            self.gangs.gained();
        }
        if change.has_gang_reservations {
            self.gangs.suspect(node);
        }
        if change.unassigned_gained {
            self.reservation_orphaned(node);
        }
    }

    /// Gives up numbers of deleted nodes, so that a cluster with changing nodes does not grow without end.
    fn compact(&mut self) {
        let resources = &self.resources;
        let renumbering = self.nodes.compact(|node| resources.is_used(node));
        if let Some(renumbering) = renumbering {
            self.reservations.renumber(&renumbering);
            self.unschedulable.renumber(&renumbering);
            self.resources.renumber(&renumbering, self.nodes.len());
            self.gangs.renumber(&renumbering);
        }
    }

    /// Nodes that kube-scheduler nominated for single pods, for decisions about others.
    fn promised(&self) -> Option<Arc<NominatedRequests>> {
        let managed = self.nodes.resources().managed();
        let promise = |(uid, node): (&PodUid, &NodeName)| {
            let pod = self.pods.get(uid)?;
            let request = pod.request.as_ref().ok()?;
            Some(NominatedRequest {
                node: self.nodes.find(node.as_str())?,
                priority: pod.priority,
                request: request.of(&managed),
            })
        };
        NominatedRequests::new(self.unschedulable.nominated().filter_map(promise).collect())
    }

    /// Whether a nomination ended. Pods that were refused for it may fit now.
    fn end_nominations(&mut self) -> bool {
        let nodes = self.unschedulable.take_denominated(self.now.at);
        for node in nodes.iter().filter_map(|node| self.nodes.find(node.as_str())) {
            self.unschedulable.gained(node);
        }
        !nodes.is_empty()
    }

    /// Whether more fits on a node with devices than when this was last called.
    fn take_resources_gained(&mut self) -> bool {
        let gained = self.resources.take_gained();
        gained.into_iter().any(|node| self.nodes.has_inventory(node))
    }

    /// The resources of a node besides devices.
    pub fn node_resources(&self, node: NodeIx) -> Option<&Room> {
        self.resources.get(node)
    }

    /// The pod of a UID.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.pods.get(uid)
    }

    /// The pod of a name.
    pub fn find_pod(&self, namespace: &str, name: &str) -> Option<&Arc<PodFacts>> {
        self.pods.find(namespace, name)
    }

    /// The names of the pods of a namespace.
    pub fn pod_names(&self, namespace: &str) -> Vec<String> {
        self.pods.names(namespace)
    }

    /// A namespace that has a pod of this name.
    pub fn namespace_of_pod(&self, name: &str) -> Option<&Arc<str>> {
        self.pods.namespace_of(name)
    }

    /// The fabric as of the last publication.
    pub fn fabric(&self) -> &Fabric {
        self.resources.fabric()
    }

    /// Pods, and what became of all devices, for metrics.
    pub fn totals(&self) -> (usize, Totals) {
        (self.pods.len(), self.nodes.totals())
    }

    /// Idle GPUs and waiting pods, for metrics.
    pub fn idle_totals(&self) -> IdleTotals {
        IdleTotals::of(self)
    }

    /// How many intents could not be followed so far, by fault.
    pub fn faults(&self) -> &HashMap<FaultKind, u64> {
        self.nodes.faults()
    }

    /// How often this process granted devices, by what they reach.
    pub fn granted(&self) -> &BTreeMap<GrantedSet, u64> {
        self.reservations.granted()
    }
}

#[cfg(test)]
mod tests;
