//! Where pods of each profile are, and which nodes they keep a new pod from or attract it to: as kube-scheduler's
//! InterPodAffinity and NodePorts plugins decide, and as its PodTopologySpread plugin counts. Pods of one profile are
//! looked at once.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::Needs;
use gantry_gang::needs::{PodTerm, Spread, ports_collide};

use super::node_table::Renumbering;
use crate::pod::PodProfile;
use gantry_planner::input::{NodeResources, PlacementRules};
use gantry_planner::snapshot::NodeIx;

/// How many pods of a profile are on which nodes.
type Counts = BTreeMap<NodeIx, u32>;

/// Values of node labels by key: the domains of a term.
type Domains = HashMap<Arc<str>, HashSet<Arc<str>>>;

/// Finds the profile and the node of a pod.
type FindPod<'p> = dyn Fn(&PodUid) -> Option<(&'p Arc<PodProfile>, NodeIx)> + 'p;

/// Where pods of each profile are.
#[derive(Debug, Default)]
pub(super) struct AffinityIndex {
    by_profile: HashMap<ProfileRef, Counts>,
    with_anti_affinity: HashSet<ProfileRef>,
}

/// A profile by identity: equal profiles are mostly shared already, and two that are not do no harm.
#[derive(Debug, Clone)]
struct ProfileRef(Arc<PodProfile>);

impl PartialEq for ProfileRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ProfileRef {}

impl Hash for ProfileRef {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

/// Pods that are assumed to be gone. They are counted by profile when first needed.
struct RemovedPods<'g> {
    pods: &'g [&'g PodUid],
    find: &'g FindPod<'g>,
    by_profile: OnceCell<HashMap<*const PodProfile, Counts>>,
}

impl RemovedPods<'_> {
    /// The pods of a profile without those that are assumed to be gone.
    fn remaining<'c>(&self, profile: &ProfileRef, counts: &'c Counts) -> Cow<'c, Counts> {
        if self.pods.is_empty() {
            return Cow::Borrowed(counts);
        }
        let by_profile = self.by_profile.get_or_init(|| self.count());
        let Some(gone) = by_profile.get(&Arc::as_ptr(&profile.0)) else {
            return Cow::Borrowed(counts);
        };
        let remaining = counts.iter().map(|(node, pods)| {
            let gone = gone.get(node).copied().unwrap_or_default();
            (*node, pods.saturating_sub(gone))
        });
        Cow::Owned(remaining.filter(|(_, pods)| *pods > 0).collect())
    }

    fn count(&self) -> HashMap<*const PodProfile, Counts> {
        let mut by_profile: HashMap<*const PodProfile, Counts> = HashMap::new();
        for (profile, node) in self.pods.iter().filter_map(|uid| (self.find)(uid)) {
            let counts = by_profile.entry(Arc::as_ptr(profile)).or_default();
            *counts.entry(node).or_default() += 1;
        }
        by_profile
    }
}

/// Whether a pod of a profile may keep one with these needs off a node.
pub(super) fn concerns(needs: &Needs, profile: &PodProfile) -> bool {
    let mut own = needs.apart_from.iter();
    let mut its = profile.apart_from.iter();
    let mut spread = needs.spread.iter();
    own.any(|term| term.finds(&needs.namespace, &profile.namespace, &profile.labels))
        || its.any(|term| term.finds(&profile.namespace, &needs.namespace, &needs.labels))
        || spread.any(|spread| spread.counts(&needs.namespace, &profile.namespace, &profile.labels))
        || ports_collide(&needs.host_ports, &profile.host_ports)
}

impl AffinityIndex {
    /// A pod is on a node.
    pub(super) fn add(&mut self, profile: &Arc<PodProfile>, node: NodeIx) {
        let profile = ProfileRef(Arc::clone(profile));
        if !profile.0.apart_from.is_empty() {
            self.with_anti_affinity.insert(profile.clone());
        }
        let counts = self.by_profile.entry(profile).or_default();
        *counts.entry(node).or_default() += 1;
    }

    /// A pod left a node.
    pub(super) fn remove(&mut self, profile: Arc<PodProfile>, node: NodeIx) {
        let profile = ProfileRef(profile);
        let Some(counts) = self.by_profile.get_mut(&profile) else {
            return;
        };
        if let Some(count) = counts.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&node);
            }
        }
        if counts.is_empty() {
            self.by_profile.remove(&profile);
            self.with_anti_affinity.remove(&profile);
        }
    }

    /// Nodes have new numbers.
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        for counts in self.by_profile.values_mut() {
            let old = std::mem::take(counts).into_iter();
            *counts = old.filter_map(|(node, count)| Some((*renumbering.get(&node)?, count))).collect();
        }
    }

    /// How many profiles there are.
    #[cfg(test)]
    pub(super) fn profiles(&self) -> usize {
        self.by_profile.len()
    }

    /// Which nodes the pods keep one with these needs from, if some of them were `gone`. `nodes` have the labels;
    /// `find` has the profile and the node of a pod. Reservations for pods that are not bound yet do not count.
    pub(super) fn barred<'g>(
        &self,
        nodes: &[NodeResources],
        needs: &Needs,
        gone: &'g [&'g PodUid],
        find: &'g FindPod<'g>,
    ) -> PlacementRules {
        let gone = RemovedPods { pods: gone, find, by_profile: OnceCell::new() };
        let mut closed = Domains::new();
        let mut barred = BTreeSet::new();
        // Anti-affinity of other pods against this one.
        let repelling = self.with_anti_affinity.iter();
        for (profile, counts) in repelling.filter_map(|profile| self.by_profile.get_key_value(profile)) {
            let other = &profile.0;
            for term in &other.apart_from {
                if term.finds(&other.namespace, &needs.namespace, &needs.labels) {
                    add_domains(nodes, &mut closed, term, &gone.remaining(profile, counts));
                }
            }
        }
        // Its own anti-affinity, and its host ports.
        let repels = !needs.apart_from.is_empty() || !needs.host_ports.is_empty();
        for (profile, counts) in self.by_profile.iter().filter(|_| repels) {
            let other = &profile.0;
            for term in &needs.apart_from {
                if term.finds(&needs.namespace, &other.namespace, &other.labels) {
                    add_domains(nodes, &mut closed, term, &gone.remaining(profile, counts));
                }
            }
            if ports_collide(&needs.host_ports, &other.host_ports) {
                barred.extend(gone.remaining(profile, counts).keys().copied());
            }
        }
        for (key, values) in &closed {
            barred.extend(in_domains(nodes, key, values));
        }
        let spread = needs.spread.iter();
        PlacementRules {
            nodes: barred.into_iter().collect(),
            only: None,
            near: self.near(nodes, needs, &gone),
            counted: spread.map(|spread| self.counted(needs, spread, &gone)).collect(),
        }
    }

    /// How many of the pods that a spread constraint counts are on each node.
    fn counted(&self, needs: &Needs, spread: &Spread, gone: &RemovedPods<'_>) -> Counts {
        let mut counted = Counts::new();
        for (profile, counts) in &self.by_profile {
            if spread.counts(&needs.namespace, &profile.0.namespace, &profile.0.labels) {
                for (node, pods) in gone.remaining(profile, counts).iter() {
                    *counted.entry(*node).or_default() += pods;
                }
            }
        }
        counted
    }

    /// For each affinity term: the nodes in a domain with a pod that it finds.
    fn near(&self, nodes: &[NodeResources], needs: &Needs, gone: &RemovedPods<'_>) -> Vec<Vec<NodeIx>> {
        let terms = &needs.together_with;
        let mut open = Domains::new();
        for (profile, counts) in self.by_profile.iter().filter(|_| !terms.is_empty()) {
            if needs.is_drawn_to(&profile.0.namespace, &profile.0.labels) {
                for term in terms {
                    add_domains(nodes, &mut open, term, &gone.remaining(profile, counts));
                }
            }
        }
        let of = |term: &PodTerm| match open.get(&term.topology_key) {
            Some(values) => in_domains(nodes, &term.topology_key, values).collect(),
            None => Vec::new(),
        };
        terms.iter().map(of).collect()
    }
}

/// Adds the domains of a term that have pods.
fn add_domains(nodes: &[NodeResources], domains: &mut Domains, term: &PodTerm, pods: &Counts) {
    let values = domains.entry(Arc::clone(&term.topology_key)).or_default();
    for node in pods.keys() {
        let facts = nodes.get(node.0 as usize).and_then(|node| node.facts.as_ref());
        // A node without the label is in no domain of the term.
        if let Some(value) = facts.and_then(|facts| facts.labels.get(&term.topology_key)) {
            values.insert(Arc::clone(value));
        }
    }
}

/// The nodes with one of some values of a label.
fn in_domains(
    nodes: &[NodeResources],
    key: &str,
    values: &HashSet<Arc<str>>,
) -> impl Iterator<Item = NodeIx> {
    let numbered = (0..).map(NodeIx).zip(nodes);
    numbered
        .filter(move |(_, node)| {
            let facts = node.facts.as_ref();
            let value = facts.and_then(|facts| facts.labels.get(key));
            value.is_some_and(|value| values.contains(value))
        })
        .map(|(node, _)| node)
}
