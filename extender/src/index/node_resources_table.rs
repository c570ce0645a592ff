//! The CPU, memory and other resources of nodes, the pods that use them, and the fabric that the labels of nodes make.
//! Kept up to date event by event: a hundred thousand pods are not counted again for every plan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::needs::NodeTerm;
use gantry_gang::protocol::Stage;
use gantry_gang::{Fabric, Levels, Needs, NodeFacts, Resources};

use super::affinity_index::AffinityIndex;
use super::node_table::Renumbering;
use super::term_labels::TermLabels;
use crate::pod::{Interner, OtherPod, PodFacts, PodProfile};
use gantry_planner::input::{NodeResources, PlacementRules};
use gantry_planner::snapshot::NodeIx;

/// The resources of nodes besides devices, and the pods that use them.
#[derive(Debug, Default)]
pub(super) struct NodeResourcesTable {
    /// By number of node.
    nodes: Vec<NodeResources>,
    /// How many pods are on each node, by its number.
    counts: Vec<u32>,
    fabric: Fabric,
    /// The labels of nodes changed since the fabric was built.
    fabric_is_stale: bool,
    pods: HashMap<PodUid, PodRecord>,
    affinity: AffinityIndex,
    term_labels: TermLabels,
    needs: Interner<Needs>,
    /// Nodes on which more fits now.
    gained: BTreeSet<NodeIx>,
    /// Grows whenever a pod with watched resources comes or goes.
    moves: u64,
    /// How many preemptible pods without devices there are of each priority.
    by_priority: BTreeMap<i32, u32>,
    /// Nodes on which less may fit now, and whether the node itself changed.
    narrowed: BTreeMap<NodeIx, bool>,
}

/// A pod and its node.
#[derive(Debug)]
pub(super) struct PodRecord {
    /// `None` before it is bound.
    node: Option<NodeIx>,
    load: Load,
    profile: Arc<PodProfile>,
    /// It asks for watched resources, and is in the pod store as well.
    watched: bool,
    /// The pod, if it asks for no watched resource and is a member of a gang.
    member: Option<Arc<OtherPod>>,
    /// Set for a pod without watched resources that can be preempted by itself.
    preemptible: Option<Box<Preemptible>>,
}

impl PodRecord {
    /// A pod that asks for watched resources.
    pub(super) fn of_pod(pod: &PodFacts, node: Option<NodeIx>) -> Self {
        Self {
            node,
            load: Load::Needs(Arc::clone(&pod.needs)),
            profile: Arc::clone(&pod.profile),
            watched: true,
            member: None,
            preemptible: None,
        }
    }

    /// A pod that asks for no watched resource.
    pub(super) fn of_other_pod(pod: OtherPod, node: Option<NodeIx>) -> Self {
        Self {
            node,
            load: Load::Resources(Arc::clone(&pod.load)),
            profile: Arc::clone(&pod.profile),
            watched: false,
            preemptible: Preemptible::of(&pod),
            member: pod.membership.is_some().then(|| Arc::new(pod)),
        }
    }
}

/// What is kept of a pod without devices in case it has to be preempted. Most such pods belong to DaemonSets, of which
/// nothing is kept.
#[derive(Debug)]
pub(super) struct Preemptible {
    /// Its name.
    pub(super) name: Arc<str>,
    /// `spec.priority`.
    pub(super) priority: i32,
    /// When it was created, in seconds since 1970.
    pub(super) created: i64,
    /// When it has to be gone, in seconds since 1970, if it is being deleted.
    pub(super) ends: Option<i64>,
}

impl Preemptible {
    fn of(pod: &OtherPod) -> Option<Box<Self>> {
        let preemptible = !pod.stays && pod.membership.is_none() && matches!(pod.stage, Stage::Bound(_));
        preemptible.then(|| {
            Box::new(Self {
                name: Arc::clone(&pod.name),
                priority: pod.priority,
                created: pod.created,
                ends: pod.ends,
            })
        })
    }
}

/// A preemptible pod without devices, with its node, its resources and its profile.
pub(super) struct PreemptiblePod<'r> {
    pub(super) uid: &'r PodUid,
    pub(super) node: NodeIx,
    pub(super) load: &'r Resources,
    pub(super) profile: &'r Arc<PodProfile>,
    pub(super) pod: &'r Preemptible,
}

/// The resources that a pod uses.
#[derive(Debug, Clone, PartialEq)]
enum Load {
    Resources(Arc<Resources>),
    Needs(Arc<Needs>),
}

impl Load {
    fn resources(&self) -> &Resources {
        match self {
            Self::Resources(resources) => resources,
            Self::Needs(needs) => &needs.resources,
        }
    }
}

impl<'r> PreemptiblePod<'r> {
    fn of(uid: &'r PodUid, record: &'r PodRecord) -> Option<Self> {
        Some(Self {
            uid,
            node: record.node?,
            load: record.load.resources(),
            profile: &record.profile,
            pod: record.preemptible.as_deref()?,
        })
    }
}

impl NodeResourcesTable {
    /// Sets the levels of the fabric.
    pub(super) fn set_levels(&mut self, levels: Levels) {
        self.fabric.levels = levels;
        self.fabric_is_stale = true;
    }

    fn node(&mut self, node: NodeIx) -> &mut NodeResources {
        let index = node.0 as usize;
        if self.nodes.len() <= index {
            self.nodes.resize_with(index + 1, NodeResources::default);
            self.counts.resize(index + 1, 0);
        }
        &mut self.nodes[index]
    }

    /// The resources of nodes by number, as of the last publication but for reservations since.
    pub(super) fn nodes(&self) -> &[NodeResources] {
        &self.nodes
    }

    /// The resources of a node.
    pub(super) fn get(&self, node: NodeIx) -> Option<&NodeResources> {
        self.nodes.get(node.0 as usize)
    }

    /// The labels, taints and capacity of a node.
    pub(super) fn facts(&self, node: NodeIx) -> Option<&Arc<NodeFacts>> {
        self.get(node).and_then(|room| room.facts.as_ref())
    }

    /// Whether the labels, taints and volumes of a node admit a pod.
    pub(super) fn admits(&self, node: NodeIx, needs: &Needs) -> bool {
        self.facts(node).is_some_and(|facts| needs.admits(facts).is_ok())
    }

    /// The fabric as of the last publication.
    pub(super) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// The profile of a pod that is on a node or asks for watched resources.
    pub(super) fn profile(&self, uid: &PodUid) -> Option<&PodProfile> {
        self.pods.get(uid).map(|pod| &*pod.profile)
    }

    /// A member of a gang that asks for no watched resource.
    pub(super) fn member(&self, uid: &PodUid) -> Option<&Arc<OtherPod>> {
        self.pods.get(uid)?.member.as_ref()
    }

    /// All such members by UID.
    pub(super) fn members(&self) -> Vec<Arc<OtherPod>> {
        let members = self.pods.values().filter_map(|pod| pod.member.clone());
        let mut members: Vec<Arc<OtherPod>> = members.collect();
        members.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
        members
    }

    /// A preemptible pod without devices.
    pub(super) fn preemptible(&self, uid: &PodUid) -> Option<PreemptiblePod<'_>> {
        let (uid, record) = self.pods.get_key_value(uid)?;
        PreemptiblePod::of(uid, record)
    }

    /// Pods without watched resources that a complete list does not name.
    pub(super) fn missing_from(&self, listed: &HashSet<Arc<str>>) -> Vec<PodUid> {
        let missing = self.pods.iter().filter(|(uid, pod)| !pod.watched && !listed.contains(uid.as_str()));
        missing.map(|(uid, _)| uid.clone()).collect()
    }

    /// Records a pod as it is now.
    pub(super) fn insert(&mut self, uid: PodUid, pod: PodRecord) {
        self.term_labels.add_terms(&pod.profile.apart_from);
        let before = self.pods.get(&uid);
        let same = before.is_some_and(|before| {
            before.node == pod.node && before.load == pod.load && before.profile == pod.profile
        });
        if same {
            let priority = pod.preemptible.as_ref().map(|pod| pod.priority);
            let before = self.pods.get_mut(&uid).and_then(|known| {
                known.member = pod.member;
                std::mem::replace(&mut known.preemptible, pod.preemptible)
            });
            self.uncount(before.map(|pod| pod.priority));
            self.count(priority);
            return;
        }
        self.remove(&uid);
        self.moves += u64::from(pod.watched);
        self.count(pod.preemptible.as_ref().map(|pod| pod.priority));
        if let Some(node) = pod.node {
            self.node(node).left.sub(pod.load.resources());
            self.narrowed.entry(node).or_default();
            self.counts[node.0 as usize] += 1;
            self.affinity.add(&pod.profile, node);
        }
        self.pods.insert(uid, pod);
    }

    /// One preemptible pod more.
    fn count(&mut self, priority: Option<i32>) {
        if let Some(priority) = priority {
            *self.by_priority.entry(priority).or_default() += 1;
        }
    }

    /// One preemptible pod fewer.
    fn uncount(&mut self, priority: Option<i32>) {
        if let Some(priority) = priority
            && let Some(count) = self.by_priority.get_mut(&priority)
        {
            *count -= 1;
            if *count == 0 {
                self.by_priority.remove(&priority);
            }
        }
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        self.moves += u64::from(pod.watched);
        self.uncount(pod.preemptible.as_ref().map(|pod| pod.priority));
        let Some(node) = pod.node else {
            return;
        };
        self.node(node).left.add(pod.load.resources());
        self.counts[node.0 as usize] -= 1;
        self.gained.insert(node);
        self.affinity.remove(pod.profile, node);
    }

    /// Sets the labels, taints and capacity of a node; `None` if it is gone. True if they changed.
    pub(super) fn describe(&mut self, node: NodeIx, facts: Option<Arc<NodeFacts>>) -> bool {
        let before = self.node(node).facts.clone();
        if before == facts {
            return false;
        }
        let agree = self.fabric.levels.agree(before.as_deref(), facts.as_deref());
        self.fabric_is_stale |= !agree;
        let room = self.node(node);
        if let Some(before) = &before {
            room.left.sub(&before.allocatable);
        }
        if let Some(now) = &facts {
            room.left.add(&now.allocatable);
        }
        room.facts = facts;
        self.gained.insert(node);
        self.narrowed.insert(node, true);
        true
    }

    /// Forgets labels that are in no term any more, once they may be many. `reported` are the needs of pods that the
    /// watch has not shown yet.
    pub(super) fn forget_labels<'n>(&mut self, reported: impl Iterator<Item = &'n Needs>) {
        if !self.term_labels.may_be_unused() {
            return;
        }
        let mut current = TermLabels::default();
        reported.for_each(|needs| current.add_needs(needs));
        for pod in self.pods.values() {
            current.add_terms(&pod.profile.apart_from);
            if let Load::Needs(needs) = &pod.load {
                current.add_needs(needs);
            }
        }
        self.term_labels.replace(current);
    }

    /// The needs of a pod with the reach of its volumes and those of its labels that are in terms. Other labels would
    /// only make equal pods differ: many controllers number their pods by a label.
    pub(super) fn completed(
        &mut self,
        needs: &Arc<Needs>,
        profile: &PodProfile,
        volumes: Vec<Arc<Vec<NodeTerm>>>,
    ) -> Arc<Needs> {
        self.term_labels.add_needs(needs);
        let labels = profile.labels.iter().filter(|(key, _)| self.term_labels.contains(key));
        let labels: BTreeMap<_, _> =
            labels.map(|(key, value)| (Arc::clone(key), Arc::clone(value))).collect();
        if *needs.labels == labels && needs.volumes == volumes {
            return Arc::clone(needs);
        }
        self.needs.one(Needs { labels: Arc::new(labels), volumes, ..Needs::clone(needs) })
    }

    /// Drops needs that no pod has any more.
    pub(super) fn sweep(&mut self) {
        self.needs.sweep();
    }

    /// A number that grows whenever a pod with watched resources comes or goes.
    pub(super) fn moves(&self) -> u64 {
        self.moves
    }

    /// Whether a preemptible pod without devices is of lower priority.
    pub(super) fn has_below(&self, priority: i32) -> bool {
        let mut lowest = self.by_priority.keys();
        lowest.next().is_some_and(|lowest| *lowest < priority)
    }

    /// The preemptible pods without devices that are of lower priority and are not being deleted.
    pub(super) fn below(&self, priority: i32) -> impl Iterator<Item = PreemptiblePod<'_>> {
        let any = self.has_below(priority).then(|| self.preemptible_pods());
        let lower = move |pod: &PreemptiblePod<'_>| pod.pod.priority < priority && pod.pod.ends.is_none();
        any.into_iter().flatten().filter(lower)
    }

    /// The pods without devices that are preemptible or being deleted.
    pub(super) fn preemptible_pods(&self) -> impl Iterator<Item = PreemptiblePod<'_>> {
        self.pods.iter().filter_map(|(uid, record)| PreemptiblePod::of(uid, record))
    }

    /// Which nodes the pods on nodes keep a pod with these needs from, if some of them were `gone`.
    pub(super) fn barred(&self, needs: &Needs, gone: &[&PodUid]) -> PlacementRules {
        let find = |uid: &PodUid| {
            let pod = self.pods.get(uid)?;
            Some((&pod.profile, pod.node?))
        };
        self.affinity.barred(&self.nodes, needs, gone, &find)
    }

    /// A pod with these needs gets a reservation on a node.
    pub(super) fn reserve(&mut self, node: NodeIx, needs: &Needs) {
        self.node(node).left.sub(&needs.resources);
    }

    /// A reservation is released.
    pub(super) fn release(&mut self, node: NodeIx, needs: &Needs) {
        self.hand_over(node, needs);
        self.gained.insert(node);
    }

    /// A reservation ends because its pod is on the node and uses as much.
    pub(super) fn hand_over(&mut self, node: NodeIx, needs: &Needs) {
        self.node(node).left.add(&needs.resources);
    }

    /// Whether the labels in terms changed since this was last called.
    pub(super) fn take_labels_changed(&mut self) -> bool {
        self.term_labels.take_changed()
    }

    /// Nodes on which more fits than when this was last called.
    pub(super) fn take_gained(&mut self) -> BTreeSet<NodeIx> {
        std::mem::take(&mut self.gained)
    }

    /// Nodes on which less may fit than when this was last called, and whether the node itself changed.
    pub(super) fn take_narrowed(&mut self) -> BTreeMap<NodeIx, bool> {
        std::mem::take(&mut self.narrowed)
    }

    /// Whether any pod is on a node.
    pub(super) fn is_used(&self, node: NodeIx) -> bool {
        self.counts.get(node.0 as usize).is_some_and(|count| *count > 0)
    }

    /// Nodes have new numbers, `nodes` in total. All nodes with pods have one.
    pub(super) fn renumber(&mut self, renumbering: &Renumbering, nodes: usize) {
        let (rooms, counts) = (std::mem::take(&mut self.nodes), std::mem::take(&mut self.counts));
        for ((number, room), count) in (0..).map(NodeIx).zip(rooms).zip(counts) {
            if let Some(new) = renumbering.get(&number) {
                *self.node(*new) = room;
                self.counts[new.0 as usize] = count;
            }
        }
        for pod in self.pods.values_mut() {
            pod.node = pod.node.and_then(|node| renumbering.get(&node).copied());
        }
        let renumbered = |node: &NodeIx| renumbering.get(node).copied();
        self.affinity.renumber(renumbering);
        self.gained = self.gained.iter().filter_map(renumbered).collect();
        let narrowed = std::mem::take(&mut self.narrowed).into_iter();
        self.narrowed = narrowed.filter_map(|(node, itself)| Some((renumbered(&node)?, itself))).collect();
        self.fabric_is_stale = true;
        self.settle(nodes, true);
    }

    /// Covers so many nodes, and builds the fabric again if it is stale and `build`. True if it was built.
    pub(super) fn settle(&mut self, nodes: usize, build: bool) -> bool {
        if let Some(last) = nodes.checked_sub(1).and_then(|last| u32::try_from(last).ok()) {
            self.node(NodeIx(last));
        }
        let stale = build && std::mem::take(&mut self.fabric_is_stale);
        if stale {
            let levels = std::mem::take(&mut self.fabric.levels);
            self.fabric = Fabric::build(levels, self.nodes.iter().map(|room| room.facts.as_deref()));
        }
        // Nodes of which nothing is known are not in the fabric, so it stays the same.
        self.fabric.of_node.resize(self.nodes.len(), Fabric::ROOT);
        stale
    }
}

#[cfg(test)]
mod tests;
