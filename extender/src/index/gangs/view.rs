//! Gangs for people and metrics: what each is, where its members are or will be, why it waits. Owned values; nothing is decided here.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

use gantry_api::placement::ComparedFabric;
use gantry_api::{DeviceId, GangPhase, NodeName, PodUid, Reason};
use gantry_gang::protocol::{
    self, Blocker, Continuations, Gangs, Refusal, Stage, View, WaitReason, WatchedOwner,
};
use gantry_gang::{GangKey, Repair};
use gantry_planner::snapshot::{BackfillReservation, NodeIx};
use serde::{Deserialize, Serialize};

use super::GangIndex;
use super::objects::GangObjects;
use super::spares::{Lending, is_lent};
use super::state::{GangState, has_place};
use crate::index::facts::Facts;

/// A gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GangView {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// What its pods call it.
    pub name: Arc<str>,
    /// Name of its Gang object.
    pub object: String,
    /// The convention by which its pods declare that they are a gang.
    pub integration: &'static str,
    /// Who decided its size, if that is known.
    pub decided_by: Option<Arc<str>>,
    /// How far it is.
    pub phase: GangPhase,
    /// Why it is in this phase.
    pub reason: Reason,
    /// The reason with its facts.
    pub message: String,
    /// Why it had no reservation when it was last planned.
    pub refused: Option<String>,
    /// Members that are useful only together; 0 while that is not known.
    pub min: u32,
    /// Members that exist, or have ended well.
    pub exist: u32,
    /// The highest priority of its members that take devices.
    pub priority: i32,
    /// Since when it waits, in seconds since 1970.
    pub waiting_since: i64,
    /// When its minimum was bound, in seconds since 1970.
    pub bound_at: Option<i64>,
    /// Its place in the queue of gangs that wait, from 1.
    pub position: Option<usize>,
    /// Nodes are kept for it.
    pub has_nodes_kept: bool,
    /// The part of the fabric that holds it; empty if it has no place.
    pub domain: Arc<str>,
    /// The rails that it uses.
    pub rails: Arc<str>,
    /// Why there: the domains that were compared, if any were.
    pub compared: Option<Arc<ComparedFabric>>,
    /// Its members, by rank, then name.
    pub members: Vec<MemberView>,
    /// Its places.
    pub places: Vec<PlaceView>,
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberView {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: Arc<str>,
    /// Its rank.
    pub rank: Option<u32>,
    /// Its role; empty where there is only one.
    pub role: Arc<str>,
    /// How far it is.
    pub stage: MemberStage,
    /// The node it is or will be on.
    pub node: Option<NodeName>,
}

/// How far a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemberStage {
    /// A scheduling gate keeps it from every scheduler.
    Gated,
    /// It waits, and kube-scheduler has not offered it yet.
    Pending,
    /// It waits for its binding.
    Arrived,
    /// It is on a node.
    Bound,
    /// It is on a node, and is being deleted.
    Leaving,
    /// It has ended well.
    Succeeded,
    /// It has failed.
    Failed,
}

impl fmt::Display for MemberStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceView {
    /// The node.
    pub node: NodeName,
    /// Its devices there.
    pub devices: Vec<DeviceId>,
    /// The same in words: `GPU 0-3`.
    pub words: String,
    /// The member that has it; absent while it is kept for one to come.
    pub pod: Option<PodUid>,
    /// It stands in the decision that the Gang object shows.
    pub decided: bool,
    /// Its member is bound.
    pub bound: bool,
    /// It is a spare one that no member has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spare: bool,
    /// The pods that have its devices, if it is lent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lent_to: Vec<Arc<str>>,
}

/// Gangs in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GangTotals {
    /// By phase.
    pub phases: BTreeMap<GangPhase, usize>,
    /// Those that wait for devices or members, by reason.
    pub waiting: BTreeMap<Reason, usize>,
    /// Places kept for members that are not bound.
    pub places: usize,
    /// Devices of those, and of spare ones that are not lent.
    pub devices: usize,
    /// The same by namespace.
    pub devices_of: BTreeMap<Arc<str>, usize>,
    /// Spare reservations whose devices no pod has, and those whose devices are lent.
    pub spares: [usize; 2],
    /// Nodes kept for the gang that is next.
    pub kept_nodes: usize,
    /// Gangs with reservations that are kept while their owners create all members again.
    pub awaiting_restart: usize,
    /// How such reservations ended.
    pub continuations: Continuations,
}

/// Whether a gang of this phase waits for members or devices.
const fn is_waiting(phase: GangPhase) -> bool {
    matches!(phase, GangPhase::Pending | GangPhase::Queued | GangPhase::Backoff | GangPhase::Preempting)
}

/// What is known of gangs. Nothing is changed here.
#[derive(Debug, Clone, Copy)]
pub struct GangViews<'a> {
    gangs: &'a Gangs,
    objects: &'a GangObjects,
    facts: &'a Facts,
    /// The backfill reservation in force.
    kept: Option<&'a Arc<BackfillReservation>>,
    /// Whether this process decides.
    leading: bool,
    /// Whether the state machine has received that all lists are complete.
    synced: bool,
}

impl<'a> GangViews<'a> {
    pub(super) fn new(index: &'a GangIndex, facts: &'a Facts) -> Self {
        Self {
            gangs: index.machine.gangs(),
            objects: &index.objects,
            facts,
            kept: index.backfill_reservations().for_singles(),
            leading: index.machine.is_leading(),
            synced: index.synced,
        }
    }

    /// The gangs of a name, or of the name of a Gang object, the newest first: there may be several of different conventions or lives.
    pub fn of_name(&self, namespace: &str, name: &str) -> Vec<GangView> {
        let queue = self.gangs.queue(self.facts.clock.now());
        let found = self.named(namespace, name);
        let position = |view: &View<'_>| queue.iter().position(|key| key == view.key()).map(|at| at + 1);
        found.into_iter().map(|view| (position(&view), view)).map(|(at, view)| self.show(view, at)).collect()
    }

    /// The same, to look at.
    pub(super) fn named(&self, namespace: &str, name: &str) -> Vec<View<'a>> {
        let mut found: Vec<View<'a>> = self
            .gangs
            .views()
            .filter(|view| *view.key().namespace == *namespace)
            .filter(|view| *view.key().name == *name || view.key().object_name() == name)
            .collect();
        found.sort_by_key(|view| (std::cmp::Reverse(view.waiting_since()), view.key()));
        found
    }

    /// The newest gang of a name.
    pub fn newest(&self, namespace: &str, name: &str) -> Option<GangView> {
        self.of_name(namespace, name).into_iter().next()
    }

    /// The gang of a pod.
    pub fn of_pod(&self, pod: &PodUid) -> Option<&'a Arc<GangKey>> {
        self.gangs.gang_of(pod)
    }

    /// The gang that a pod goes with as a whole, if any.
    pub(in crate::index) fn goes_with(&self, pod: &PodUid) -> Option<&'a Arc<GangKey>> {
        self.gangs.goes_with(pod)
    }

    /// The message for the members of a gang while its decision is being written.
    pub fn deciding(&self, gang: &GangKey) -> Option<Arc<str>> {
        let view = self.gangs.view(gang)?;
        (view.phase() == GangPhase::Committing).then(|| Arc::clone(&view.waits().message))
    }

    /// Why a pod waits for its gang, if it does, in the words that filter returns. `None` while this process does not decide.
    pub fn why_waits(&self, uid: &PodUid) -> Option<WaitReason> {
        let knows = self.leading && self.synced;
        knows.then(|| self.gangs.wait_reason(uid)).flatten()
    }

    /// The node of the place that a pod's gang has for it.
    pub fn node_kept_for(&self, uid: &PodUid) -> Option<&'a NodeName> {
        self.gangs.view(self.gangs.gang_of(uid)?)?.node_of(uid)
    }

    /// Whether there is such a gang.
    pub fn knows(&self, gang: &GangKey) -> bool {
        self.gangs.view(gang).is_some()
    }

    /// Devices that the members of each waiting gang ask for, with its namespace.
    pub(in crate::index) fn awaited_devices(&self) -> impl Iterator<Item = (&'a Arc<str>, u64)> + use<'a> {
        let views = self.gangs.views().filter(|view| is_waiting(view.phase()));
        views.map(|view| (&view.key().namespace, view.unplaced_devices()))
    }

    /// Gangs in numbers.
    pub fn totals(&self) -> GangTotals {
        let mut totals = GangTotals::default();
        for view in self.gangs.views() {
            *totals.phases.entry(view.phase()).or_default() += 1;
            if is_waiting(view.phase())
                && let Some(reason) = self.reason_of(view.key())
            {
                *totals.waiting.entry(reason).or_default() += 1;
            }
        }
        let nodes = self.facts.nodes.iter();
        let places = nodes.flat_map(|(_, node)| {
            node.occupancy().gang_reservations().iter().map(move |place| (node, place))
        });
        for (node, place) in places {
            let is_spare = place.spare && place.pod.is_none();
            let is_lent = is_spare && is_lent(node, place);
            if is_spare {
                totals.spares[usize::from(is_lent)] += 1;
            } else {
                totals.places += 1;
            }
            if is_lent {
                continue;
            }
            let devices = place.devices.iter();
            let devices = devices.map(|(_, ids)| ids.len()).sum::<usize>();
            totals.devices += devices;
            *totals.devices_of.entry(Arc::clone(&place.gang.namespace)).or_default() += devices;
        }
        (totals.continuations, totals.awaiting_restart) = self.gangs.continuations();
        totals.kept_nodes = self.kept.map_or(0, |kept| kept.nodes().count());
        totals
    }

    /// Gangs without their members and reservations: waiting ones in the order of the queue, then the others by name. At
    /// most `most`, and how many more there are. On a standby, phase and reason are those of the Gang objects.
    pub fn summaries(&self, most: usize) -> (Vec<GangView>, usize) {
        let queue = self.gangs.queue(self.facts.clock.now());
        let queued: HashSet<&Arc<GangKey>> = queue.iter().collect();
        let mut others: Vec<View<'a>> =
            self.gangs.views().filter(|view| !queued.contains(view.key())).collect();
        others.sort_by(|a, b| a.key().cmp(b.key()));
        let waiting = queue.iter().filter_map(|key| self.gangs.view(key)).zip(1..);
        let waiting = waiting.map(|(view, position)| (view, Some(position)));
        let all = waiting.chain(others.iter().map(|view| (*view, None)));
        let summaries: Vec<GangView> =
            all.take(most).map(|(view, position)| self.summary(view, position)).collect();
        let more = (queue.len() + others.len()).saturating_sub(summaries.len());
        (summaries, more)
    }

    fn show(&self, view: View<'_>, position: Option<usize>) -> GangView {
        let key = view.key();
        let mut members: Vec<MemberView> = view
            .members()
            .map(|member| MemberView {
                uid: member.uid.clone(),
                name: member.name.into(),
                rank: member.rank,
                role: member.role.into(),
                stage: match member.stage {
                    Stage::Bound(_) if member.leaving => MemberStage::Leaving,
                    Stage::Gated { .. } => MemberStage::Gated,
                    Stage::Pending if member.arrived => MemberStage::Arrived,
                    Stage::Pending => MemberStage::Pending,
                    Stage::Bound(_) => MemberStage::Bound,
                    Stage::Succeeded => MemberStage::Succeeded,
                    Stage::Failed => MemberStage::Failed,
                },
                node: member.node.cloned(),
            })
            .collect();
        members.sort_by(|a, b| {
            (a.rank.is_none(), a.rank, &a.name, &a.uid).cmp(&(b.rank.is_none(), b.rank, &b.name, &b.uid))
        });
        let status = self.objects.status_of(key);
        let decision = status.and_then(|status| status.decision.as_ref());
        let slots = decision.iter().flat_map(|decision| &decision.reservations);
        let decided: HashSet<_> = slots.map(|slot| (&slot.node, slot.pod.as_ref())).collect();
        let lending = Lending::new(self.gangs, self.facts);
        let places = view.slots().map(|slot| PlaceView {
            node: slot.node.clone(),
            devices: slot.devices.iter().flat_map(|(_, ids)| ids).cloned().collect(),
            words: self.in_words(slot.node, slot.devices),
            pod: slot.pod.cloned(),
            decided: decided.contains(&(slot.node, slot.pod)),
            bound: slot.bound,
            spare: slot.spare && slot.pod.is_none(),
            lent_to: lending.borrowers_of(key, &slot),
        });
        GangView { members, places: places.collect(), ..self.summary(view, position) }
    }

    fn summary(&self, view: View<'_>, position: Option<usize>) -> GangView {
        let key = view.key();
        let written = self.objects.status_of(key).filter(|_| !self.leading);
        let (phase, (reason, message)) = match written.and_then(|status| Some((status, status.reason?))) {
            Some((status, reason)) => (status.phase, (reason, status.message.clone())),
            None => (view.phase(), view.reason()),
        };
        GangView {
            namespace: Arc::clone(&key.namespace),
            name: Arc::clone(&key.name),
            object: key.object_name(),
            integration: key.integration.as_str(),
            decided_by: view.terms().map(|terms| Arc::clone(&terms.decided_by)),
            phase,
            reason,
            message,
            refused: view.refusal().map(Refusal::message),
            min: view.min(),
            exist: view.exist(),
            priority: view.priority(),
            waiting_since: view.waiting_since(),
            bound_at: view.bound_at(),
            position,
            has_nodes_kept: self.kept.is_some_and(|kept| kept.gang == *key),
            domain: Arc::clone(view.domain()),
            rails: Arc::clone(view.rails()),
            compared: view.compared().cloned(),
            members: Vec::new(),
            places: Vec::new(),
        }
    }

    fn in_words(&self, node: &NodeName, devices: &crate::ledger::Devices) -> String {
        let node = self.facts.nodes.find(node.as_str());
        let entry = node.and_then(|node| self.facts.nodes.get(node));
        let Some(inventory) = entry.and_then(|entry| entry.inventory()) else {
            return String::new();
        };
        let words = devices.iter().filter_map(|(resource, ids)| {
            let (_, pool) = inventory.pool(resource.as_str())?;
            Some(pool.describe(&pool.find(ids).0))
        });
        words.collect::<Vec<_>>().join(", ")
    }

    /// The gangs that wait, in the order in which they are planned, without those that have a reservation by the
    /// extender's status. Called before any gang is planned here.
    pub fn in_line(&self) -> Vec<Arc<GangKey>> {
        let mut queue = self.gangs.queue(self.facts.clock.now());
        queue.retain(|key| self.objects.status_of(key).is_none_or(|status| !has_place(status.phase)));
        queue
    }

    /// Gangs that wait by the extender's status for a reason unknown here: they are not in `queue`.
    pub(crate) fn waiting_outside(&self, queue: &[Arc<GangKey>]) -> Vec<Arc<GangKey>> {
        let queued: HashSet<&Arc<GangKey>> = queue.iter().collect();
        let waits = |view: &View<'_>| {
            let reported = self.objects.status_of(view.key()).map(|status| status.phase);
            matches!(reported, Some(GangPhase::Queued | GangPhase::Backoff)) && !queued.contains(view.key())
        };
        self.gangs.views().filter(waits).map(|view| Arc::clone(view.key())).collect()
    }

    /// The state of a gang with this position in the queue.
    pub(crate) fn state(&self, key: &GangKey, position: Option<usize>) -> Option<GangState> {
        let view = self.gangs.view(key)?;
        let settled = view.is_decided() || view.phase() >= GangPhase::Bound;
        let status = self.objects.status_of(view.key());
        Some(GangState::new(self.show(view, position), status, settled))
    }

    /// The gangs other than `but` that have an undecided reservation by the extender's status.
    pub(in crate::index) fn with_places(&self, but: Option<&GangKey>) -> Vec<String> {
        let keys = self.gangs.views().map(|view| view.key());
        let others = keys.filter(|key| Some(&***key) != but);
        let placed =
            others.filter(|key| self.objects.status_of(key).is_some_and(|status| has_place(status.phase)));
        placed.map(ToString::to_string).collect()
    }

    /// The state of a gang in a few words.
    pub(in crate::index) fn in_few_words(&self, key: &GangKey) -> Option<Arc<str>> {
        let words = match self.objects.status_of(key) {
            Some(status) => format!("gang {key}: {:?}: {}", status.phase, status.message),
            None => {
                let view = self.gangs.view(key)?;
                format!("the extender has not reported it yet; if planned now: {}", view.waits().message)
            }
        };
        Some(words.into())
    }

    /// Why a gang is in its phase: as the extender reports it, or as it would be if planned now.
    pub(in crate::index) fn reason_of(&self, key: &GangKey) -> Option<Reason> {
        let reported = self.objects.status_of(key).and_then(|status| status.reason);
        reported.or_else(|| Some(self.gangs.view(key)?.reason().0))
    }

    /// The domains that were compared when a gang was planned, as the extender has written them.
    pub(in crate::index) fn compared_for(&self, key: &GangKey) -> Option<Arc<ComparedFabric>> {
        self.objects.status_of(key)?.compared.clone()
    }

    /// The backfill reservation that keeps single pods of a priority off a node.
    pub(in crate::index) fn reservation_against(
        &self,
        node: NodeIx,
        priority: i32,
    ) -> Option<&'a BackfillReservation> {
        let kept = self.kept.filter(|kept| priority <= kept.priority && kept.has(node));
        kept.map(|kept| &**kept)
    }

    /// Whether a gang waits for the end of a pod.
    pub fn waits_for(&self, gang: &GangKey, uid: &PodUid) -> bool {
        let view = self.gangs.view(gang);
        view.is_some_and(|view| view.victims().any(|victim| victim == uid))
    }

    /// Whether a gang that restarts still waits for the end of this member.
    pub fn is_rest_of(&self, gang: &GangKey, uid: &PodUid) -> bool {
        let view = self.gangs.view(gang);
        view.is_some_and(|view| view.must_leave(uid))
    }

    /// Whether a blocked action of a gang is known already; true for a gang that has ended.
    pub fn is_blocked(&self, gang: &GangKey, what: Blocker) -> bool {
        self.gangs.view(gang).is_none_or(|view| view.is_blocked(what))
    }

    /// The owners that define the sizes of gangs: those to watch.
    pub fn watched_owners(&self) -> Vec<WatchedOwner> {
        self.gangs.watched_owners()
    }

    /// Whether an object that states the size of a gang is still unread.
    pub fn owners_unread(&self) -> bool {
        self.gangs.watched_owners().iter().any(|wanted| wanted.unread)
    }

    /// A namespace that has a gang of this name.
    pub fn namespace_of(&self, name: &str) -> Option<&'a Arc<str>> {
        let keys = self.gangs.views().map(|view| view.key());
        keys.filter(|key| *key.name == *name).map(|key| &key.namespace).min()
    }

    /// The names of the gangs of a namespace.
    pub fn names(&self, namespace: &str) -> Vec<String> {
        let keys = self.gangs.views().map(|view| view.key());
        let mut names: Vec<String> =
            keys.filter(|key| *key.namespace == *namespace).map(|key| key.name.to_string()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether the devices of so many members come free when these end. Otherwise they stay reserved for replacements.
    pub(in crate::index) fn may_lose(&self, gang: &GangKey, members: usize) -> bool {
        let Some(view) = self.gangs.view(gang) else {
            return true;
        };
        let surplus = view.settled().saturating_sub(view.min()) as usize;
        view.terms().is_some_and(|terms| {
            terms.repair == Repair::Ignore || terms.by_role.is_empty() && members <= surplus
        })
    }

    /// Whether a gang keeps its minimum, and those of its roles, without some members; or its owner allows that it does not.
    pub(in crate::index) fn goes_on_without(&self, gang: &GangKey, pods: &[PodUid]) -> bool {
        let Some(view) = self.gangs.view(gang) else {
            return true;
        };
        let mut by_role: BTreeMap<&str, u32> = BTreeMap::new();
        let goes = |member: &protocol::MemberView<'_>| {
            pods.contains(member.uid) || member.evicted && !member.leaving
        };
        for member in view.members().filter(goes) {
            *by_role.entry(member.role).or_default() += 1;
        }
        by_role.values().sum::<u32>() <= view.surplus_members()
            && by_role.iter().all(|(role, count)| *count <= view.surplus_of(role))
    }

    /// The priority of a gang that is tracked.
    pub(in crate::index) fn priority_of(&self, gang: &GangKey) -> Option<i32> {
        Some(self.gangs.view(gang)?.priority())
    }

    /// The members of a gang that are on nodes: `namespace/name`, sorted.
    pub(in crate::index) fn bound_members(&self, gang: &GangKey) -> Vec<String> {
        let members = self.gangs.view(gang).into_iter().flat_map(|view| view.members());
        let bound = members.filter(|member| matches!(member.stage, Stage::Bound(_)));
        let mut names: Vec<String> =
            bound.map(|member| format!("{}/{}", gang.namespace, member.name)).collect();
        names.sort_unstable();
        names
    }
}
