//! What members of one gang ask of each other's places: host ports and affinity and anti-affinity terms that select the gang's own pods. What other
//! pods mean for them comes with the terrain.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::needs::PodTerm;

/// The label whose value is the node itself.
pub(super) const HOSTNAME: &str = "kubernetes.io/hostname";

/// Rules among the shapes of a gang, by their indices.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// Pairs of shapes (perhaps one with itself) that cannot share a node.
    alone: Vec<(usize, usize)>,
    /// Pairs of shapes that cannot share a value of a node label.
    pub(super) spread: Vec<(usize, usize, Arc<str>)>,
    /// Node labels of which all members need the same value.
    pub(super) together: Vec<Arc<str>>,
}

impl Rules {
    pub(super) fn of(shapes: &[&Needs]) -> Self {
        let mut rules = Self::default();
        for (a, first) in shapes.iter().enumerate() {
            for (b, second) in shapes.iter().enumerate().skip(a) {
                let terms = first
                    .apart_from
                    .iter()
                    .filter(|term| selects(first, term, second));
                let back = second
                    .apart_from
                    .iter()
                    .filter(|term| selects(second, term, first));
                for term in terms.chain(back) {
                    let pair = (a, b, Arc::clone(&term.topology_key));
                    if *term.topology_key == *HOSTNAME {
                        rules.alone.push((a, b));
                    } else if !rules.spread.contains(&pair) {
                        rules.spread.push(pair);
                    }
                }
                if ports_clash(first, second) {
                    rules.alone.push((a, b));
                }
            }
            for term in &first.together_with {
                let own = shapes.iter().any(|second| selects(first, term, second));
                if own && !rules.together.contains(&term.topology_key) {
                    rules.together.push(Arc::clone(&term.topology_key));
                }
            }
        }
        rules
    }

    /// Whether two members of a shape cannot share a node.
    pub(super) fn one_a_node(&self, slot: usize) -> bool {
        self.alone.contains(&(slot, slot))
    }

    /// Whether members of two shapes cannot share a node.
    pub(super) fn clash(&self, a: usize, b: usize) -> bool {
        self.alone.contains(&(a.min(b), a.max(b)))
    }

    /// Whether shapes cannot share the value of a label beyond the node.
    pub(super) fn spreads(&self) -> bool {
        !self.spread.is_empty()
    }
}

/// Whether a term of one pod selects another.
fn selects(of: &Needs, term: &PodTerm, other: &Needs) -> bool {
    let namespace = match &term.namespaces {
        None => true,
        Some(names) if names.is_empty() => of.namespace == other.namespace,
        Some(names) => names.contains(&other.namespace),
    };
    namespace && labels_match(term, &other.labels)
}

fn labels_match(term: &PodTerm, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
    term.selector
        .iter()
        .all(|required| required.holds(labels.get(&required.key)))
}

fn ports_clash(a: &Needs, b: &Needs) -> bool {
    let any = |address: &str| address.is_empty() || address == "0.0.0.0" || address == "::";
    a.host_ports.iter().any(|(protocol, address, port)| {
        b.host_ports.iter().any(|(other, there, number)| {
            protocol == other && port == number && (address == there || any(address) || any(there))
        })
    })
}
