//! The cluster as the watches and binds show it: a state machine that publishes immutable [`Snapshot`]s. One writer at
//! a time; no I/O, no clock: time is an argument. [`Index`] only routes events to the types that own the state; each of
//! them stands in the file of its name. `Facts` are what watches and binds have shown; `GangIndex` is the state of gangs.
//! Reports and searches are views: they borrow the parts that they read.
//!
//! ```text
//! pods, nodes, GpuNodes, Gangs (watch.rs) ─┐                                     ┌─> Snapshot ─> filter, prioritize, explain
//! binds and their outcomes (bind.rs) ──────┴─> Index ─> NodeTable ─> Ledger ─────┤
//! ticks, API server health (watch.rs) ─────┘                                     └─> gains ─> unschedulable pods are activated
//! ```

mod activation;
mod affinity_index;
mod disruption_budgets;
mod event_clock;
mod facts;
mod gangs;
mod holders;
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
mod pod_store;
mod reservations;
mod scheduler_set;
mod store;
mod term_labels;
mod unschedulable_queue;
mod verbs;
mod victim_search;
mod volume_table;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{GangStatus, NodeName, PodUid, ResourceName};
use gantry_gang::protocol::{
    BindEnd, Blocker, CommitFailure, GangEvent, Holder, Moment, Object, Settings, Stage, WatchedOwner,
    WithheldReason, Work,
};
use gantry_gang::{Fabric, GangKey, Levels, Needs, NodeFacts, OwnerFacts, OwnerRef};

pub use disruption_budgets::{Disruptions, PartialBudget};
pub use gangs::{
    ActivatedMember, AwaitedGang, GangReport, GangReservations, GangState, GangTotals, GangView, GangViews,
    MemberStage, MemberView, MembershipState, PlaceView, ReportedStatus, Trial,
};
pub use holders::{HolderGroup, HolderPod};
pub use holds::HOLD;
pub use idle::{IdleCause, IdleKey, IdleTotals, SET_SIZES};
pub use inspection::{FitFailure, NodeReport, PodNode, PodReport, UnhealthyGpu, XidReport};
pub use list_tracker::Source;
pub use marks::mark;
pub use node_table::Totals;
pub(crate) use objects::read_part;
pub use objects::{PartialGpuNode, SlimNode, advertised, described, inventory};
pub use observation::{MAX_GANGS, NodeObservation, ObservedNodes, PodObservation, Revisions};
pub use reservations::{BindError, BindGrant, GrantedSet, Outcome, Target};
pub use store::{Clock, Store, system_clock};
pub use unschedulable_queue::{InsufficientPod, UnschedulablePod};
pub use verbs::{BindStep, CalledPod, ReadPod, SchedulingCall, UnavailableReason};

use crate::ledger::FaultKind;
use crate::pod::{OtherPod, PodFacts};
use crate::watched::WatchedResources;
use event_clock::ApiContact;
use facts::Facts;
use gangs::GangIndex;
use gantry_planner::decide::{ForeignNodes, Options};
use gantry_planner::input::NodeResources;
use gantry_planner::inventory::Inventory;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{NodeIx, Snapshot};
pub use ignored_requests::IgnoredRequest;
use ignored_requests::IgnoredRequests;
use inspection::InspectedNodes;
use list_tracker::List;
use node_resources_table::PodRecord;
use volume_table::ClaimKey;
pub use volume_table::{Volume, VolumeClaim};

/// How long the devices of a pod that disappeared before its end was observed stay taken, at least. Kubelet hands them
/// out again at once, while the process may still run: up to 2.5 s in trials with an ignored SIGTERM. The report of the
/// plugin, which takes over from there, lags by up to 1 s.
pub const QUARANTINE: Duration = Duration::from_secs(5);
/// How long after the API server was unreachable for a while: a plugin retries after 5 s at the latest and writes
/// within 1 s, so that its report arrives 3 s later.
pub const QUARANTINE_AFTER_A_GAP: Duration = Duration::from_secs(10);
/// How long at most, while the plugin does not know what is held. Such a node is rarely out of service that long.
pub const QUARANTINE_WITHOUT_TRUTH: Duration = Duration::from_secs(300);
/// How long a bind of unknown outcome, or of a pod that is gone, keeps its devices, unless the pod shows the outcome
/// before. The API server gives up on a request after 60 s.
pub const UNSURE: Duration = Duration::from_secs(65);

/// The state. See the head of this module.
#[derive(Debug)]
pub struct Index {
    facts: Facts,
    ignored_requests: IgnoredRequests,
    gangs: GangIndex,
    /// Something changed that a snapshot shows.
    changed: bool,
    contact: ApiContact,
}

impl Index {
    /// An empty index. `run` distinguishes the plans of this process from those of an earlier one.
    pub fn new(options: Options, watched: &WatchedResources, run: String) -> Self {
        let settings = Settings { identity: run.as_str().into(), ..Settings::default() };
        Self {
            facts: Facts::new(options, watched, run),
            ignored_requests: IgnoredRequests::default(),
            gangs: GangIndex::new(settings),
            changed: true,
            contact: ApiContact::default(),
        }
    }

    /// Sets the settings of gangs. Before any event.
    pub fn set_gangs(&mut self, settings: Settings) {
        self.gangs = GangIndex::new(settings);
    }

    /// Sets whether gangs are planned. A command that only looks may list the waiting gangs first.
    pub fn set_planning(&mut self, planning: bool) {
        self.gangs.set_planning(planning);
    }

    /// This process is a command that only looks.
    pub fn only_look(&mut self) {
        self.gangs.only_look();
    }

    /// Whether this process decides.
    pub fn is_leading(&self) -> bool {
        self.gangs.is_leading()
    }

    /// This process decides from now on: gangs are adopted from what the cluster shows, written decisions included.
    pub fn lead(&mut self) {
        self.gangs.lead(&mut self.facts);
    }

    /// This process no longer decides: reservations of undecided gangs are released, and no call is answered and no gang planned until
    /// [`Index::lead`].
    pub fn stand_down(&mut self) {
        self.gangs.stand_down(&mut self.facts);
    }

    /// Sets the schedulers that call this extender. Before any event.
    pub fn set_schedulers(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.facts.schedulers = names.into_iter().collect();
    }

    /// Sets the levels of the fabric. Before any event.
    pub fn set_fabric(&mut self, levels: Levels) {
        self.facts.resources.set_levels(levels);
    }

    /// Sets the current time. The index never reads a clock: what happens at one moment happens between two calls of
    /// this.
    pub fn at(&mut self, now: Moment) {
        self.facts.clock.set(now);
    }

    /// The current time.
    pub fn now(&self) -> Moment {
        self.facts.clock.now()
    }

    /// The facts may be old: nothing is decided before every source is listed again.
    pub fn relist(&mut self) {
        self.facts.lists.restart();
        self.gangs.unsync(&mut self.facts);
    }

    /// A list begins: what it does not name is gone.
    pub fn list_begins(&mut self, now: Instant, source: Source) {
        self.facts.lists.begin(now, source);
    }

    /// A list is complete.
    pub fn list_ends(&mut self, now: Instant, source: Source) {
        self.facts.clock.advance(now);
        let Some(List { since, names, unread }) = self.facts.lists.end(source) else {
            return;
        };
        match source {
            Source::Pods => {
                for uid in self.facts.pods.missing_from(&names) {
                    self.pod_deleted(now, &uid, None);
                }
                for uid in self.facts.resources.missing_from(&names) {
                    self.other_pod_gone(&uid);
                }
                self.gangs.pods_listed(&self.facts, &names);
                let mut restored =
                    self.facts.reservations.pods_listed(now, &mut self.facts.nodes, since, &names);
                restored.extend(self.gangs.gone_before(since));
                restored.retain(|uid| !unread.contains(uid.as_str()));
                self.renew(restored);
            }
            Source::Nodes | Source::GpuNodes => {
                let missing = self.facts.nodes.iter().map(|(_, node)| node.name());
                let missing: Vec<NodeName> =
                    missing.filter(|name| !names.contains(name.as_str())).cloned().collect();
                for name in missing {
                    match source {
                        Source::Nodes => self.node_deleted(name.as_str()),
                        _ => self.inventory_deleted(name.as_str()),
                    }
                }
            }
            Source::Gangs => self.gangs.objects_listed(self.facts.clock.now(), &names),
        }
        self.facts.lists.set_synced(source);
    }

    /// A list shows pods as they were before binds found them bound or gone: etcd was restored to a backup. From here on
    /// these are new pods, and what they may have held is in quarantine.
    fn renew(&mut self, pods: Vec<PodUid>) {
        for uid in pods {
            let pod = self.facts.pods.get(&uid).filter(|pod| pod.node.is_none());
            if let Some(pod) = pod.map(|pod| PodFacts::clone(pod)) {
                self.pod_deleted(self.facts.clock.now().at, &uid, None);
                self.set_pod(pod);
            }
        }
    }

    /// A pod that asks for watched resources was observed.
    pub fn pod_applied(&mut self, pod: PodFacts) {
        self.facts.lists.observe(Source::Pods, pod.uid.as_str());
        self.set_pod(pod);
    }

    /// Sets a pod as it is now. It need not exist any more: only what the API server sends counts as seen while pods
    /// are listed.
    fn set_pod(&mut self, mut pod: PodFacts) {
        let known = self.facts.pods.get(&pod.uid);
        if known.is_some_and(|known| known.node.is_some() && known.node != pod.node) {
            // Only a restored etcd takes a Binding back. From here on this is a new pod, and what it held is in
            // quarantine.
            let uid = pod.uid.clone();
            self.pod_deleted(self.facts.clock.now().at, &uid, None);
        }
        if pod.grant.is_some() {
            self.observe_granted(&pod.scheduler);
        }
        self.ignored_requests.note_pod(&pod, self.facts.pods.get(&pod.uid).map(|before| &**before));
        self.gangs.keep_membership(&pod.uid, &mut pod.membership);
        self.facts.complete_needs(&mut pod);
        let uid = pod.uid.clone();
        let node = pod.node.as_ref().map(|node| self.facts.nodes.number(node));
        match pod.terminal {
            true => self.facts.resources.remove(&uid),
            false => self.facts.resources.insert(uid.clone(), PodRecord::of_pod(&pod, node)),
        }
        let before = self.facts.pods.get(&uid).cloned();
        if before.as_deref() == Some(&pod) {
            return;
        }
        if let Some(node) = node {
            self.facts.reservations.pod_bound(&mut self.facts.nodes, &uid);
            self.facts.reservations.drop_hold(&mut self.facts.nodes, &uid);
            self.facts.unschedulable.forget(&uid);
            if let Some(occupancy) = self.facts.nodes.occupancy_mut(node) {
                occupancy.set_pod(&uid, !pod.terminal);
            }
            if before.as_ref().is_none_or(|before| before.node.is_none()) {
                self.gangs.pod_came(&pod);
            }
        }
        if let Some(node) = node.filter(|_| pod.refused_by_topology)
            && let Some(inventory) = self.facts.nodes.refused_by_topology(node)
        {
            self.set_inventory(node, Some(inventory));
        }
        self.gangs.pod_seen(&self.facts, &pod);
        if pod.terminal {
            self.facts.unschedulable.forget(&uid);
            self.facts.reservations.drop_hold(&mut self.facts.nodes, &uid);
            self.facts.pods.remove(&uid);
            return;
        }
        self.observe_waiting(&pod);
        self.facts.pods.insert(pod);
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

    fn observe_waiting(&mut self, pod: &PodFacts) {
        if self.facts.schedulers.other_scheduler_of(pod).is_some() {
            self.facts.unschedulable.forget(&pod.uid);
        } else {
            let is_single = gangs::goes_by_itself(self.gangs.gangs(), pod);
            self.facts.unschedulable.observe(self.facts.clock.now().at, pod, is_single);
        }
    }

    /// A pod was deleted. `last` is its last state, if the watch sent it.
    pub fn pod_deleted(&mut self, now: Instant, uid: &PodUid, last: Option<PodFacts>) {
        self.facts.clock.advance(now);
        if let Some(last) = last.filter(|last| last.uid == *uid) {
            self.set_pod(last);
        }
        self.gangs.pod_gone(&self.facts, uid);
        self.ignored_requests.forget(uid);
        self.facts.resources.remove(uid);
        self.facts.unschedulable.forget(uid);
        self.facts.reservations.drop_hold(&mut self.facts.nodes, uid);
        self.facts.reservations.pod_deleted(now, &mut self.facts.nodes, uid);
        let Some(pod) = self.facts.pods.get(uid).cloned() else {
            return;
        };
        if let Some(node) = self.facts.node_of(&pod) {
            // What it held by the newest facts, while it is still in the store.
            self.settle_node(node);
            self.facts.nodes.remove_pod(now, node, &pod);
        }
        self.facts.pods.remove(uid);
    }

    /// A pod of which nothing can be read any more was observed: it stays as it is known.
    pub fn pod_unread(&mut self, uid: &PodUid) {
        self.facts.lists.observe_unread(Source::Pods, uid.as_str());
    }

    /// Drops values that no object has any more.
    pub fn sweep(&mut self) {
        self.facts.resources.sweep();
    }

    /// A pod that asks for no watched resource was observed.
    pub fn other_pod_applied(&mut self, mut pod: OtherPod) {
        self.ignored_requests.note_other_pod(&pod);
        self.gangs.keep_membership(&pod.uid, &mut pod.membership);
        let node = match &pod.stage {
            Stage::Bound(node) => Some(self.facts.nodes.number(node)),
            _ => None,
        };
        self.gangs.other_pod_seen(&self.facts, &pod);
        // A pod without a node matters to its gang only, and to that also after its end.
        let uid = pod.uid.clone();
        if node.is_none() && pod.membership.is_none() {
            self.facts.resources.remove(&uid);
        } else {
            self.facts.lists.observe(Source::Pods, uid.as_str());
            self.facts.resources.insert(uid, PodRecord::of_other_pod(pod, node));
        }
    }

    /// A pod that asks for no watched resource was deleted.
    pub fn other_pod_gone(&mut self, uid: &PodUid) {
        self.ignored_requests.forget(uid);
        self.gangs.pod_gone(&self.facts, uid);
        self.facts.resources.remove(uid);
    }

    /// A Node object was observed, with what kubelet advertises of the watched resources.
    pub fn node_applied(&mut self, name: &NodeName, advertised: Vec<(ResourceName, u32)>) {
        self.facts.lists.observe(Source::Nodes, name.as_str());
        let node = self.facts.nodes.number(name);
        if self.facts.nodes.set_advertised(node, Some(advertised)) {
            self.forget_resources();
        }
    }

    /// The marks of other programs on a Node were observed: what the program does, if it marks the node.
    pub fn node_marked(&mut self, name: &NodeName, mark: Option<Arc<str>>) {
        let node = self.facts.nodes.number(name);
        let text = mark.clone();
        if self.facts.nodes.set_mark(node, mark) {
            match text {
                Some(mark) => tracing::info!(node = %name, "{}", WithheldReason::ByMark(mark)),
                None => tracing::info!(node = %name, "no other program marks the node any more"),
            }
            if self.facts.nodes.has_inventory(node) {
                self.gangs.reshaped();
            }
        }
    }

    /// The labels, taints and capacity of a node were observed.
    pub fn node_described(&mut self, facts: Arc<NodeFacts>) {
        let node = self.facts.nodes.number(&NodeName::from(&*facts.name));
        self.describe(node, Some(facts));
    }

    fn describe(&mut self, node: NodeIx, facts: Option<Arc<NodeFacts>>) {
        if self.facts.resources.describe(node, facts) {
            self.facts.nodes.touch(node);
            if self.facts.nodes.has_inventory(node) {
                self.gangs.reshaped();
            }
        }
    }

    /// A Node object was deleted.
    pub fn node_deleted(&mut self, name: &str) {
        if let Some(node) = self.facts.nodes.find(name) {
            self.facts.nodes.set_advertised(node, None);
            self.facts.nodes.set_mark(node, None);
            self.describe(node, None);
            self.forget_resources();
        }
    }

    /// A GpuNode was observed.
    pub fn inventory_applied(&mut self, name: &NodeName, inventory: Inventory) {
        self.facts.lists.observe(Source::GpuNodes, name.as_str());
        let node = self.facts.nodes.number(name);
        self.set_inventory(node, Some(inventory));
    }

    /// A GpuNode was deleted.
    pub fn inventory_deleted(&mut self, name: &str) {
        if let Some(node) = self.facts.nodes.find(name) {
            self.set_inventory(node, None);
        }
    }

    /// The nodes that have a GpuNode.
    pub(crate) fn nodes_with_inventory(&self) -> HashSet<NodeName> {
        let with_inventory = self.facts.nodes.iter().filter(|(_, node)| node.inventory().is_some());
        with_inventory.map(|(_, node)| node.name().clone()).collect()
    }

    fn set_inventory(&mut self, node: NodeIx, inventory: Option<Inventory>) {
        let Some(change) = self.facts.nodes.set_inventory(node, inventory) else {
            return;
        };
        if change.totals {
            self.gangs.reshaped();
        }
        if change.numbers {
            // The ledger cannot show whether devices came free, and holds by number would be on other devices.
            self.facts.unschedulable.gained(node);
            self.facts.reservations.drop_holds_on(node);
        }
        self.forget_resources();
    }

    /// Resources that no node has any more are managed only as long as pods ask for them.
    fn forget_resources(&mut self) {
        let (pods, gangs) = (&self.facts.pods, &self.gangs);
        self.facts.nodes.forget_resources(|resource| pods.ask_for(resource) || gangs.ask_for(resource));
    }

    /// All claims of volumes.
    pub fn volume_claims_listed(&mut self, claims: Vec<(ClaimKey, Option<VolumeClaim>)>) {
        self.facts.volumes.set_claims(claims);
    }

    /// A claim of a volume is bound, waits, or is gone.
    pub fn volume_claim_seen(&mut self, claim: ClaimKey, volume: Option<VolumeClaim>) {
        self.facts.volumes.set_claim(claim, volume);
    }

    /// All volumes.
    pub fn volumes_listed(&mut self, volumes: impl Iterator<Item = (Arc<str>, Option<Volume>)>) {
        self.facts.volumes.set_volumes(volumes);
    }

    /// A volume; `None`: it is gone.
    pub fn volume_seen(&mut self, name: Arc<str>, volume: Option<Volume>) {
        self.facts.volumes.set_volume(name, volume);
    }

    /// The disruption budgets; `None` while they are unknown: then no pod is preempted.
    pub fn budgets_seen(&mut self, budgets: Option<Vec<Disruptions>>) {
        if self.facts.budgets.set(budgets) {
            self.gangs.unprotected();
        }
    }

    /// Whether the disruption budgets are known.
    pub(crate) fn knows_budgets(&self) -> bool {
        self.facts.budgets.are_known()
    }

    /// An owner that defines the size of a gang; `None` if there is none of the name.
    pub fn owner_seen(&mut self, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        self.gangs.owner_seen(self.facts.clock.now(), owner, facts);
    }

    /// A Gang object was seen.
    pub fn gang_object_seen(&mut self, namespace: &str, name: &str, object: Object) {
        self.facts.lists.observe(Source::Gangs, &format!("{namespace}/{name}"));
        self.gangs.object_seen(self.facts.clock.now(), namespace, name, object);
    }

    /// A Gang object was deleted.
    pub fn gang_object_gone(&mut self, namespace: &str, name: &str) {
        self.gangs.object_gone(self.facts.clock.now(), namespace, name);
    }

    /// An action on pods of a gang is not allowed, and the remedy; `None`: it succeeded after all.
    pub fn hindered(&mut self, gang: &GangKey, what: Blocker, why: Option<Arc<str>>) {
        self.gangs.handle(self.facts.clock.now(), GangEvent::Blocked { gang, blocker: what, why });
    }

    /// Members of a gang run slower than the rest; `None`: no member does.
    pub fn members_slow(&mut self, gang: &GangKey, members: Option<Arc<str>>) {
        self.gangs.handle(self.facts.clock.now(), GangEvent::MembersSlow { gang, members });
    }

    /// The write of a decision has ended.
    pub fn committed(&mut self, gang: &GangKey, decision: &str, result: Result<(), CommitFailure>) {
        self.gangs.handle(self.facts.clock.now(), GangEvent::Committed { gang, decision, result });
    }

    /// A scheduler called for a pod of its own: its pods count, whatever `--scheduler-name` names.
    pub fn record_scheduler(&mut self, name: &str) {
        if !self.facts.schedulers.record(name) {
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
        if self.gangs.only_looks() && self.facts.schedulers.record(scheduler) {
            self.scheduler_calls(scheduler);
        }
    }

    fn scheduler_calls(&mut self, name: &str) {
        self.changed = true;
        let mut pods = self.facts.pods.sorted();
        pods.retain(|pod| *pod.scheduler == *name && pod.node.is_none());
        for pod in pods {
            self.gangs.report_pod(&self.facts, &pod);
            self.observe_waiting(&pod);
        }
    }

    /// A call for a bind that has a grant ended.
    pub fn finish(&mut self, now: Instant, target: &Target, outcome: Outcome) {
        self.facts.reservations.finish(now, &mut self.facts.nodes, target, outcome);
    }

    /// Lets time pass. `contact` is when the API server last answered: devices of pods that disappeared are released
    /// only by facts newer than their quarantine.
    pub fn tick(&mut self, now: Instant, contact: Instant) {
        self.facts.clock.advance(now);
        self.gangs.tick(&mut self.facts);
        self.forget_resources();
        let steady = self.contact.note(contact);
        self.facts.nodes.end_quarantines(now, contact, steady);
        let (nodes, pods) = (&mut self.facts.nodes, &self.facts.pods);
        for uid in self.facts.reservations.expire(now, contact, nodes, pods) {
            self.gangs.may_move(&self.facts, &uid, BindEnd::Failed);
        }
        self.facts.reservations.expire_holds(now, &mut self.facts.nodes);
    }

    /// Computes what changed, and publishes a snapshot if it shows any of it. True if it does.
    pub fn publish(&mut self) -> bool {
        self.settle_resources();
        self.gangs.settle(&mut self.facts);
        self.settle_nodes();
        self.gangs.check_reservations(&mut self.facts);
        self.settle_nodes();
        self.gangs.keep_backfill(&mut self.facts);
        self.changed |= self.gangs.take_changed();
        self.changed |= self.facts.unschedulable.take_nominations_changed();
        self.changed |= self.facts.lists.take_changed();
        self.changed |= self.facts.nodes.take_changed();
        self.changed |= self.facts.reservations.take_changed();
        if !std::mem::take(&mut self.changed) {
            return false;
        }
        self.compact();
        let generation = self.facts.published.generation + 1;
        self.facts.unschedulable.published(generation);
        let mut snapshot = Snapshot {
            generation,
            synced: self.facts.lists.is_synced(),
            holds: self.facts.reservations.holds().shared(),
            kept: self.gangs.backfill_reservation().cloned(),
            promised: self.facts.promised(),
            schedulers: self.facts.schedulers.shared(),
            ..Snapshot::default()
        };
        self.facts.nodes.fill(&mut snapshot);
        self.facts.published = Arc::new(snapshot);
        true
    }

    /// Whether [`Index::plan_next`] has something to do.
    pub fn has_unplanned(&self) -> bool {
        self.gangs.has_unplanned(&self.facts)
    }

    /// Plans the next gang; false if none is to be planned now.
    pub fn plan_next(&mut self) -> bool {
        self.gangs.plan_next(&self.facts)
    }

    /// Whether there is work of gangs, or a status to write.
    pub fn has_work(&self) -> bool {
        self.gangs.work().has_work()
    }

    /// Takes the work of gangs, without the pods to activate: [`Index::take_called`] takes those.
    pub fn take_work(&mut self) -> Vec<Work> {
        self.gangs.work_mut().take()
    }

    /// Takes the statuses of gangs that changed, the newest of each gang.
    pub fn take_statuses(&mut self) -> Vec<(Arc<GangKey>, GangStatus)> {
        self.gangs.work_mut().take_statuses()
    }

    /// Takes the gangs that changed: binds that wait for them check again.
    pub fn take_moved(&mut self) -> Vec<Arc<GangKey>> {
        self.gangs.work_mut().take_moved()
    }

    /// The snapshot that was published last.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.facts.published
    }

    /// Brings node resources and fabric up to date, and the needs of pods for which labels in terms or volumes changed.
    /// Before anything is planned.
    fn settle_resources(&mut self) {
        self.facts.resources.forget_labels(self.gangs.reported_needs());
        let (labels, volumes) =
            (self.facts.resources.take_labels_changed(), self.facts.volumes.take_changed());
        if labels || volumes {
            let waiting = self.facts.pods.iter().filter(|pod| pod.node.is_none());
            let waiting = waiting.filter(|pod| labels || !pod.volume_claims.is_empty());
            let waiting: Vec<PodFacts> = waiting.map(|pod| PodFacts::clone(pod)).collect();
            for mut pod in waiting {
                let before = Arc::clone(&pod.needs);
                self.facts.complete_needs(&mut pod);
                if pod.needs != before {
                    self.set_pod(pod);
                    // A gang that was refused for the needs before.
                    self.gangs.gained();
                }
            }
        }
        // While nodes are being listed, each batch has more of them.
        let listing = self.facts.lists.is_listing(Source::Nodes);
        if self.facts.resources.settle(self.facts.nodes.len(), !listing) {
            // Nodes that came while they were listed were in no domain that a gang could be planned in.
            self.gangs.reshaped();
        }
    }

    fn settle_nodes(&mut self) {
        for node in self.facts.nodes.take_marked() {
            self.settle_node(node);
        }
    }

    /// Computes the ledger and the class of one node.
    fn settle_node(&mut self, node: NodeIx) {
        let held = self.facts.reservations.holds().on(node);
        let Some(change) = self.facts.nodes.settle(node, self.facts.clock.now().at, &self.facts.pods, &held)
        else {
            return;
        };
        let opened = change.became_foreign && self.facts.options.foreign == ForeignNodes::Allow;
        if opened || change.gained {
            self.facts.unschedulable.gained(node);
            self.gangs.gained();
        }
        if change.has_gang_reservations {
            self.gangs.suspect(node);
        }
        if change.unassigned_gained
            && let Some(node) = self.facts.nodes.get(node)
        {
            self.gangs.reservation_orphaned(node);
        }
    }

    /// Gives up numbers of deleted nodes, so that a cluster with changing nodes does not grow without end.
    fn compact(&mut self) {
        let resources = &self.facts.resources;
        let renumbering = self.facts.nodes.compact(|node| resources.is_used(node));
        if let Some(renumbering) = renumbering {
            self.facts.reservations.renumber(&renumbering);
            self.facts.unschedulable.renumber(&renumbering);
            self.facts.resources.renumber(&renumbering, self.facts.nodes.len());
            self.gangs.renumber(&renumbering);
        }
    }

    /// The resources of a node besides devices.
    pub fn node_resources(&self, node: NodeIx) -> Option<&NodeResources> {
        self.facts.resources.get(node)
    }

    /// The pod of a UID.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.facts.pods.get(uid)
    }

    /// The pod of a name.
    pub fn find_pod(&self, namespace: &str, name: &str) -> Option<&Arc<PodFacts>> {
        self.facts.pods.find(namespace, name)
    }

    /// The names of the pods of a namespace.
    pub fn pod_names(&self, namespace: &str) -> Vec<String> {
        self.facts.pods.names(namespace)
    }

    /// A namespace that has a pod of this name.
    pub fn namespace_of_pod(&self, name: &str) -> Option<&Arc<str>> {
        self.facts.pods.namespace_of(name)
    }

    /// What is known of gangs.
    pub fn gangs(&self) -> GangViews<'_> {
        self.gangs.views(&self.facts)
    }

    /// The gangs that wait, in the order in which they are planned: see [`GangViews::in_line`].
    pub fn gangs_in_line(&self) -> Vec<Arc<GangKey>> {
        self.gangs().in_line()
    }

    /// The owners that define the sizes of gangs: those to watch.
    pub fn watched_owners(&self) -> Vec<WatchedOwner> {
        self.gangs().watched_owners()
    }

    /// Whether an object that states the size of a gang is still unread.
    pub fn owners_unread(&self) -> bool {
        self.gangs().owners_unread()
    }

    /// The newest gang of a name.
    pub fn gang_view(&self, namespace: &str, name: &str) -> Option<GangView> {
        self.gangs().newest(namespace, name)
    }

    /// Gangs in numbers.
    pub fn gang_totals(&self) -> GangTotals {
        self.gangs().totals()
    }

    /// The report about the newest gang of a name, or of the name of a Gang object. `queue` is the order of waiting
    /// gangs ([`GangViews::in_line`]).
    pub fn inspect_gang(&self, queue: &[Arc<GangKey>], namespace: &str, name: &str) -> Option<GangReport> {
        self.gangs.inspection(&self.facts).report(queue, namespace, name)
    }

    /// Gangs with reservations of idle devices that a pod asks for, on nodes that may take the pod, the most first.
    pub(crate) fn holders_for(&self, request: &Request, needs: &Needs) -> Vec<Holder> {
        self.gangs.holders(&self.facts).of_request(request, needs)
    }

    /// Namespace and name of a pod that is known.
    pub fn pod_address(&self, uid: &PodUid) -> Option<(Arc<str>, Arc<str>)> {
        self.gangs.address_of(&self.facts, uid)
    }

    /// Why the labels, the taints or the volumes of a node rule a pod out.
    pub(crate) fn misfit(&self, node: NodeIx, needs: &Needs) -> Option<FitFailure> {
        FitFailure::of_node(self.facts.resources.facts(node), needs)
    }

    /// Reports on a pod, at first without the nodes of one that waits ([`Index::inspect_nodes`]).
    ///
    /// # Errors
    /// What the pod asks for cannot be read: why.
    pub(crate) fn inspect(&self, pod: &PodFacts) -> Result<PodReport, String> {
        PodReport::new(&self.facts, self.gangs(), pod)
    }

    /// Looks at nodes for a pod that waits, from number `from` on, `most` at a time.
    pub(crate) fn inspect_nodes(&self, pod: &PodFacts, from: u32, most: usize) -> InspectedNodes {
        let holders = self.gangs.holders(&self.facts);
        InspectedNodes::of(&self.facts, self.gangs(), holders, pod, (from, most))
    }

    /// The nodes that changed after revision `since`, from number `from` on, `most` at a time.
    pub fn observe_nodes(&self, from: u32, since: u64, most: usize) -> ObservedNodes {
        ObservedNodes::of(&self.facts, self.gangs(), from, since, most)
    }

    /// A pod by its name.
    pub fn observe_pod(&self, namespace: &str, name: &str) -> Option<PodObservation> {
        PodObservation::of(&self.facts, self.gangs(), namespace, name)
    }

    /// The pods that hold devices of a GPU, by the ledger. A member of a gang stands for all bound members. `units`: what the
    /// IDs of the GPU's devices begin with ([`crate::eviction::units`]).
    pub fn holder_groups(&self, node: &str, units: &BTreeSet<&str>) -> Vec<HolderGroup> {
        HolderGroup::of(&self.facts, self.gangs(), node, units)
    }

    /// The members of gangs that hold devices of a node, each with a GPU of them, by the ledger.
    pub(crate) fn gang_gpus(&self, node: &str) -> Vec<(Arc<GangKey>, Arc<PodFacts>, usize)> {
        holders::gang_gpus(&self.facts, self.gangs(), node)
    }

    /// What other programs do with nodes, by their marks.
    pub(crate) fn marks(&self) -> BTreeMap<NodeName, Arc<str>> {
        self.facts.nodes.marks()
    }

    /// The fabric as of the last publication.
    pub fn fabric(&self) -> &Fabric {
        self.facts.resources.fabric()
    }

    /// Pods, and what became of all devices, for metrics.
    pub fn totals(&self) -> (usize, Totals) {
        (self.facts.pods.len(), self.facts.nodes.totals())
    }

    /// Idle GPUs and waiting pods, for metrics.
    pub fn idle_totals(&self) -> IdleTotals {
        IdleTotals::of(&self.facts, self.gangs(), self.gangs.tolerations())
    }

    /// How many intents could not be followed so far, by fault.
    pub fn faults(&self) -> &HashMap<FaultKind, u64> {
        self.facts.nodes.faults()
    }

    /// How often this process granted devices, by what they reach.
    pub fn granted(&self) -> &BTreeMap<GrantedSet, u64> {
        self.facts.reservations.granted()
    }
}

#[cfg(test)]
mod tests;
