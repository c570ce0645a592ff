//! Which nodes the pods that are there keep a new one from or draw it to, as kube-scheduler's InterPodAffinity and NodePorts plugins see it, and
//! among how many PodTopologySpread would spread it. Pods alike are looked at once.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::needs::{PodTerm, Spread, ports_collide};

use super::Rooms;
use crate::gang::terrain::Barred;
use crate::snapshot::NodeIx;

/// Values of one node label: the domains of a term.
type Domains = HashMap<Arc<str>, HashSet<Arc<str>>>;

impl Rooms {
    /// Which nodes the pods that are there keep a pod with these needs from. Places kept for pods that are not bound yet do not count.
    pub(super) fn barred(&self, needs: &Needs) -> Barred {
        let mut closed = Domains::new();
        let mut nodes = BTreeSet::new();
        // Those that do not want it near.
        for (kin, here) in self.wary.iter().filter_map(|kin| self.kin.get_key_value(kin)) {
            let of = &kin.0;
            for term in &of.apart_from {
                if term.finds(&of.namespace, &needs.namespace, &needs.labels) {
                    self.close(&mut closed, term, here);
                }
            }
        }
        // Those that it does not want near, and those that have its ports.
        let shy = !needs.apart_from.is_empty() || !needs.host_ports.is_empty();
        for (kin, here) in self.kin.iter().filter(|_| shy) {
            let kin = &kin.0;
            for term in &needs.apart_from {
                if term.finds(&needs.namespace, &kin.namespace, &kin.labels) {
                    self.close(&mut closed, term, here);
                }
            }
            if ports_collide(&needs.host_ports, &kin.host_ports) {
                nodes.extend(here.keys().copied());
            }
        }
        for (key, values) in &closed {
            nodes.extend(self.of_domains(key, values));
        }
        Barred {
            nodes: nodes.into_iter().collect(),
            only: None,
            near: self.near(needs),
            counted: needs
                .spread
                .iter()
                .map(|spread| self.counted(needs, spread))
                .collect(),
        }
    }

    /// How many of the pods that a constraint counts are on each node.
    fn counted(&self, needs: &Needs, spread: &Spread) -> BTreeMap<NodeIx, u32> {
        let mut counted = BTreeMap::new();
        for (kin, here) in &self.kin {
            if spread.counts(&needs.namespace, &kin.0.namespace, &kin.0.labels) {
                for (node, pods) in here {
                    *counted.entry(*node).or_default() += pods;
                }
            }
        }
        counted
    }

    /// For each term by which it must be with others: the nodes that are in a domain with one of those.
    fn near(&self, needs: &Needs) -> Vec<Vec<NodeIx>> {
        let terms = &needs.together_with;
        let mut open = Domains::new();
        for (kin, here) in self.kin.iter().filter(|_| !terms.is_empty()) {
            if needs.is_drawn_to(&kin.0.namespace, &kin.0.labels) {
                for term in terms {
                    self.close(&mut open, term, here);
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
    fn close(&self, domains: &mut Domains, term: &PodTerm, nodes: &BTreeMap<NodeIx, u32>) {
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
