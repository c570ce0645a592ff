//! Which nodes the pods that are there keep a new one from or draw it to, as kube-scheduler's InterPodAffinity and NodePorts plugins see
//! it, and among how many PodTopologySpread would spread it. Pods alike are looked at once.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::Needs;
use gantry_gang::needs::{PodTerm, Spread, ports_collide};
use gantry_planner::input::Barred;

use super::{ProfileRef, Rooms};
use crate::pod::PodProfile;
use crate::snapshot::NodeIx;

/// Where pods of a kind are, and how many.
type Here = BTreeMap<NodeIx, u32>;

/// Pods that are taken to be gone. They are sorted by kind once somebody asks for one.
struct Gone<'g> {
    rooms: &'g Rooms,
    pods: &'g [&'g PodUid],
    by_kind: OnceCell<HashMap<*const PodProfile, Here>>,
}

impl Gone<'_> {
    /// Where those of a kind are who are left.
    fn left<'h>(&self, profile: &ProfileRef, here: &'h Here) -> Cow<'h, Here> {
        if self.pods.is_empty() {
            return Cow::Borrowed(here);
        }
        let by_kind = self.by_kind.get_or_init(|| self.sort());
        let Some(gone) = by_kind.get(&Arc::as_ptr(&profile.0)) else {
            return Cow::Borrowed(here);
        };
        let left = here.iter().map(|(node, pods)| {
            let gone = gone.get(node).copied().unwrap_or_default();
            (*node, pods.saturating_sub(gone))
        });
        Cow::Owned(left.filter(|(_, pods)| *pods > 0).collect())
    }

    fn sort(&self) -> HashMap<*const PodProfile, Here> {
        let mut by_kind: HashMap<*const PodProfile, Here> = HashMap::new();
        for there in self.pods.iter().filter_map(|uid| self.rooms.pods.get(*uid)) {
            if let Some(node) = there.node {
                let kind = by_kind.entry(Arc::as_ptr(&there.profile)).or_default();
                *kind.entry(node).or_default() += 1;
            }
        }
        by_kind
    }
}

/// Values of one node label: the domains of a term.
type Domains = HashMap<Arc<str>, HashSet<Arc<str>>>;

/// Whether a pod of a kind may keep one with these needs off a node.
pub(in crate::index) fn concerns(needs: &Needs, profile: &PodProfile) -> bool {
    let mut own = needs.apart_from.iter();
    let mut its = profile.apart_from.iter();
    let mut spread = needs.spread.iter();
    own.any(|term| term.finds(&needs.namespace, &profile.namespace, &profile.labels))
        || its.any(|term| term.finds(&profile.namespace, &needs.namespace, &needs.labels))
        || spread.any(|spread| spread.counts(&needs.namespace, &profile.namespace, &profile.labels))
        || ports_collide(&needs.host_ports, &profile.host_ports)
}

impl Rooms {
    /// Which nodes the pods that are there, but for some that are taken to be gone, keep a pod with these needs from. Places kept for pods
    /// that are not bound yet do not count.
    pub(super) fn barred(&self, needs: &Needs, gone: &[&PodUid]) -> Barred {
        let gone = Gone {
            rooms: self,
            pods: gone,
            by_kind: OnceCell::new(),
        };
        let mut closed = Domains::new();
        let mut nodes = BTreeSet::new();
        // Those that do not want it near.
        let repelling = self.with_anti_affinity.iter();
        for (profile, here) in repelling.filter_map(|profile| self.by_profile.get_key_value(profile)) {
            let of = &profile.0;
            for term in &of.apart_from {
                if term.finds(&of.namespace, &needs.namespace, &needs.labels) {
                    self.close(&mut closed, term, &gone.left(profile, here));
                }
            }
        }
        // Those that it does not want near, and those that have its ports.
        let shy = !needs.apart_from.is_empty() || !needs.host_ports.is_empty();
        for (profile, here) in self.by_profile.iter().filter(|_| shy) {
            let of = &profile.0;
            for term in &needs.apart_from {
                if term.finds(&needs.namespace, &of.namespace, &of.labels) {
                    self.close(&mut closed, term, &gone.left(profile, here));
                }
            }
            if ports_collide(&needs.host_ports, &of.host_ports) {
                nodes.extend(gone.left(profile, here).keys().copied());
            }
        }
        for (key, values) in &closed {
            nodes.extend(self.of_domains(key, values));
        }
        Barred {
            nodes: nodes.into_iter().collect(),
            only: None,
            near: self.near(needs, &gone),
            counted: needs
                .spread
                .iter()
                .map(|spread| self.counted(needs, spread, &gone))
                .collect(),
        }
    }

    /// How many of the pods that a constraint counts are on each node.
    fn counted(&self, needs: &Needs, spread: &Spread, gone: &Gone<'_>) -> Here {
        let mut counted = Here::new();
        for (profile, here) in &self.by_profile {
            if spread.counts(&needs.namespace, &profile.0.namespace, &profile.0.labels) {
                for (node, pods) in gone.left(profile, here).iter() {
                    *counted.entry(*node).or_default() += pods;
                }
            }
        }
        counted
    }

    /// For each term by which it must be with others: the nodes that are in a domain with one of those.
    fn near(&self, needs: &Needs, gone: &Gone<'_>) -> Vec<Vec<NodeIx>> {
        let terms = &needs.together_with;
        let mut open = Domains::new();
        for (profile, here) in self.by_profile.iter().filter(|_| !terms.is_empty()) {
            if needs.is_drawn_to(&profile.0.namespace, &profile.0.labels) {
                for term in terms {
                    self.close(&mut open, term, &gone.left(profile, here));
                }
            }
        }
        let of = |term: &PodTerm| match open.get(&term.topology_key) {
            Some(values) => self.of_domains(&term.topology_key, values).collect(),
            None => Vec::new(),
        };
        terms.iter().map(of).collect()
    }

    /// Adds the domains that a term makes of some nodes.
    fn close(&self, domains: &mut Domains, term: &PodTerm, nodes: &Here) {
        let values = domains.entry(Arc::clone(&term.topology_key)).or_default();
        for node in nodes.keys() {
            let facts = self
                .rooms
                .get(node.0 as usize)
                .and_then(|room| room.facts.as_ref());
            // A node without the label is in no domain of the term.
            if let Some(value) = facts.and_then(|facts| facts.labels.get(&term.topology_key)) {
                values.insert(Arc::clone(value));
            }
        }
    }

    /// The nodes whose label has one of some values.
    fn of_domains(&self, key: &str, values: &HashSet<Arc<str>>) -> impl Iterator<Item = NodeIx> {
        let numbered = (0..).map(NodeIx).zip(&self.rooms);
        numbered
            .filter(move |(_, room)| {
                let facts = room.facts.as_ref();
                let value = facts.and_then(|facts| facts.labels.get(key));
                value.is_some_and(|value| values.contains(value))
            })
            .map(|(node, _)| node)
    }
}
