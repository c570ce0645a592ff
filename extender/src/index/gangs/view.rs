//! Gangs for people and metrics: what each is, where its members are or will be, why it waits. Owned values; nothing is decided here.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

use gantry_api::placement::ComparedFabric;
use gantry_api::{DeviceId, GangPhase, NodeName, PodUid, Reason};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Continuations, Refusal, Stage, View, WaitReason};
use serde::{Deserialize, Serialize};

use crate::index::Index;

/// A gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GangView {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// What its pods call it.
    pub name: Arc<str>,
    /// Name of its Gang object.
    pub object: String,
    /// By which convention its pods say that they are a gang.
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

impl Index {
    /// The gangs of a name, or of the name of a Gang object, the newest first: there may be several of different conventions or lives.
    pub fn gang_views(&self, namespace: &str, name: &str) -> Vec<GangView> {
        let queue = self.gangs.core.queue(self.now);
        let found = self.gangs_named(namespace, name);
        let position = |view: &View<'_>| queue.iter().position(|key| key == view.key()).map(|at| at + 1);
        found.into_iter().map(|view| (position(&view), view)).map(|(at, view)| self.show(view, at)).collect()
    }

    /// The same, to look at.
    pub(super) fn gangs_named(&self, namespace: &str, name: &str) -> Vec<View<'_>> {
        let mut found: Vec<View<'_>> = self
            .gangs
            .core
            .views()
            .filter(|view| *view.key().namespace == *namespace)
            .filter(|view| *view.key().name == *name || view.key().object_name() == name)
            .collect();
        found.sort_by_key(|view| (std::cmp::Reverse(view.waiting_since()), view.key()));
        found
    }

    /// The newest gang of a name.
    pub fn gang_view(&self, namespace: &str, name: &str) -> Option<GangView> {
        self.gang_views(namespace, name).into_iter().next()
    }

    /// The gang of a pod.
    pub fn gang_of(&self, pod: &PodUid) -> Option<&Arc<GangKey>> {
        self.gangs.core.gang_of(pod)
    }

    /// The gang that a pod goes with as a whole, if any.
    pub(in crate::index) fn goes_with(&self, pod: &PodUid) -> Option<&Arc<GangKey>> {
        self.gangs.core.goes_with(pod)
    }

    /// What the members of a gang are told whose decision is being written.
    pub fn deciding(&self, gang: &GangKey) -> Option<Arc<str>> {
        let view = self.gangs.core.view(gang)?;
        (view.phase() == GangPhase::Committing).then(|| Arc::clone(&view.waits().message))
    }

    /// Why a pod waits for its gang, if it does, in the words that filter answers. Nobody is told while this process does not decide.
    pub fn why_waits(&self, uid: &PodUid) -> Option<WaitReason> {
        let knows = self.gangs.leading && self.gangs.synced;
        knows.then(|| self.gangs.core.wait_reason(uid)).flatten()
    }

    /// The node of the place that a pod's gang has for it.
    pub fn node_kept_for(&self, uid: &PodUid) -> Option<&NodeName> {
        self.gangs.core.view(self.gang_of(uid)?)?.node_of(uid)
    }

    /// Whether there is such a gang.
    pub fn knows_gang(&self, gang: &GangKey) -> bool {
        self.gangs.core.view(gang).is_some()
    }

    /// Devices that the members of each waiting gang ask for, with its namespace.
    pub(in crate::index) fn devices_awaited_by_gangs(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        let views = self.gangs.core.views().filter(|view| is_waiting(view.phase()));
        views.map(|view| (&view.key().namespace, view.unplaced_devices()))
    }

    /// Gangs in numbers.
    pub fn gang_totals(&self) -> GangTotals {
        let mut totals = GangTotals::default();
        for view in self.gangs.core.views() {
            *totals.phases.entry(view.phase()).or_default() += 1;
            if is_waiting(view.phase())
                && let Some(reason) = self.reason_of(view.key())
            {
                *totals.waiting.entry(reason).or_default() += 1;
            }
        }
        let nodes = self.nodes.iter();
        let places = nodes.flat_map(|(_, node)| {
            node.occupancy().gang_reservations().iter().map(move |place| (node, place))
        });
        for (node, place) in places {
            let is_spare = place.spare && place.pod.is_none();
            let is_lent = is_spare && node.is_lent(place);
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
        (totals.continuations, totals.awaiting_restart) = self.gangs.core.continuations();
        totals.kept_nodes = self.kept().map_or(0, |kept| kept.nodes().count());
        totals
    }

    /// Gangs without their members and reservations: waiting ones in the order of the queue, then the others by name. At
    /// most `most`, and how many more there are. On a standby, phase and reason are those of the Gang objects.
    pub fn gang_summaries(&self, most: usize) -> (Vec<GangView>, usize) {
        let queue = self.gangs.core.queue(self.now);
        let queued: HashSet<&Arc<GangKey>> = queue.iter().collect();
        let mut others: Vec<View<'_>> =
            self.gangs.core.views().filter(|view| !queued.contains(view.key())).collect();
        others.sort_by(|a, b| a.key().cmp(b.key()));
        let waiting = queue.iter().filter_map(|key| self.gangs.core.view(key)).zip(1..);
        let waiting = waiting.map(|(view, position)| (view, Some(position)));
        let all = waiting.chain(others.iter().map(|view| (*view, None)));
        let summaries: Vec<GangView> =
            all.take(most).map(|(view, position)| self.summary(view, position)).collect();
        let more = (queue.len() + others.len()).saturating_sub(summaries.len());
        (summaries, more)
    }

    pub(super) fn show(&self, view: View<'_>, position: Option<usize>) -> GangView {
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
        let status = self.status_of(key);
        let decision = status.and_then(|status| status.decision.as_ref());
        let slots = decision.iter().flat_map(|decision| &decision.reservations);
        let decided: HashSet<_> = slots.map(|slot| (&slot.node, slot.pod.as_ref())).collect();
        let places = view.slots().map(|slot| PlaceView {
            node: slot.node.clone(),
            devices: slot.devices.iter().flat_map(|(_, ids)| ids).cloned().collect(),
            words: self.in_words(slot.node, slot.devices),
            pod: slot.pod.cloned(),
            decided: decided.contains(&(slot.node, slot.pod)),
            bound: slot.bound,
            spare: slot.spare && slot.pod.is_none(),
            lent_to: self.borrowers_of(key, &slot),
        });
        GangView { members, places: places.collect(), ..self.summary(view, position) }
    }

    fn summary(&self, view: View<'_>, position: Option<usize>) -> GangView {
        let key = view.key();
        let written = self.status_of(key).filter(|_| !self.gangs.leading);
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
            has_nodes_kept: self.kept().is_some_and(|kept| kept.gang == *key),
            domain: Arc::clone(view.domain()),
            rails: Arc::clone(view.rails()),
            compared: view.compared().cloned(),
            members: Vec::new(),
            places: Vec::new(),
        }
    }

    fn in_words(&self, node: &NodeName, devices: &crate::ledger::Devices) -> String {
        let node = self.nodes.find(node.as_str());
        let entry = node.and_then(|node| self.nodes.get(node));
        let Some(inventory) = entry.and_then(|entry| entry.inventory()) else {
            return String::new();
        };
        let words = devices.iter().filter_map(|(resource, ids)| {
            let (_, pool) = inventory.pool(resource.as_str())?;
            Some(pool.describe(&pool.find(ids).0))
        });
        words.collect::<Vec<_>>().join(", ")
    }
}
