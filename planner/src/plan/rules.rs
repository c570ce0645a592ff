//! Rules among the members of a gang about each other's nodes: host ports, affinity and anti-affinity terms that select
//! the gang's own pods. Rules about other pods are part of the input.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::needs::{PodTerm, ports_collide};

use crate::snapshot::NodeIx;

/// The label whose value is the node itself.
pub(super) const HOSTNAME: &str = "kubernetes.io/hostname";

/// Rules among the shapes of a gang, by their indices.
#[derive(Debug, Default, Clone)]
pub(super) struct Rules {
    /// Pairs of shapes (perhaps one with itself) that cannot share a node.
    alone: Vec<(usize, usize)>,
    /// Pairs of shapes that cannot share a value of a node label.
    pub(super) spread: Vec<(usize, usize, Arc<str>)>,
    /// Affinity: members that must share a label value with others.
    pub(super) near: Vec<NearRule>,
}

/// Members of a shape must share the value of a node label with another pod, of the gang or not.
#[derive(Debug, Clone)]
pub(super) struct NearRule {
    /// Index of the shape that it binds.
    pub(super) slot: usize,
    pub(super) key: Arc<str>,
    /// By shape: whether its members are selected.
    pub(super) to: Vec<bool>,
    /// The nodes that share a value with selected pods which exist already.
    pub(super) there: BTreeSet<NodeIx>,
    /// No selected pod exists, and members select themselves: the first may go to any node with the label.
    pub(super) starts: bool,
    /// All members concerned are confined to one value: nothing is left to check.
    pub(super) settled: bool,
}

impl NearRule {
    /// Whether members select only members of their own shape.
    pub(super) fn is_among_its_like(&self) -> bool {
        self.to.iter().enumerate().all(|(slot, to)| *to == (slot == self.slot))
    }
}

impl Rules {
    pub(super) fn of(shapes: &[&Needs]) -> Self {
        let mut rules = Self::default();
        for (a, first) in shapes.iter().enumerate() {
            for (b, second) in shapes.iter().enumerate().skip(a) {
                let apart = Separation::of(first, second);
                if apart.nodes {
                    rules.alone.push((a, b));
                }
                let keys = apart.keys.into_iter().cloned();
                rules.spread.extend(keys.map(|key| (a, b, key)));
            }
        }
        rules
    }

    pub(super) fn any(&self) -> bool {
        !(self.alone.is_empty() && self.spread.is_empty() && self.near.is_empty())
    }

    /// The next open rule: the one that leaves the least choice.
    pub(super) fn open(&self) -> Option<usize> {
        let open = || (0..self.near.len()).filter(|rule| !self.near[*rule].settled);
        open().find(|rule| self.near[*rule].is_among_its_like()).or_else(|| open().next())
    }

    /// The shapes confined to one value of a rule's label: its own where it selects only itself, otherwise also those
    /// bound by rules of the same label.
    pub(super) fn linked(&self, rule: usize) -> Vec<bool> {
        let Some(first) = self.near.get(rule) else {
            return Vec::new();
        };
        let mut linked = first.to.clone();
        linked[first.slot] = true;
        if first.is_among_its_like() {
            return linked;
        }
        let same = || self.near.iter().filter(|near| near.key == first.key);
        while let Some(next) = same().find(|near| {
            let any = linked[near.slot] || near.to.iter().zip(&linked).any(|(to, linked)| *to && *linked);
            let all = linked[near.slot] && near.to.iter().zip(&linked).all(|(to, linked)| !to || *linked);
            any && !all
        }) {
            linked[next.slot] = true;
            for (linked, to) in linked.iter_mut().zip(&next.to) {
                *linked |= to;
            }
        }
        linked
    }

    /// Members of some shapes share the value of a rule's label.
    pub(super) fn settle(&mut self, rule: usize, linked: &[bool]) {
        let Some(key) = self.near.get(rule).map(|near| Arc::clone(&near.key)) else {
            return;
        };
        let is_linked = |slot: usize| linked.get(slot).copied().unwrap_or(false);
        for near in self.near.iter_mut().filter(|near| near.key == key) {
            let to = near.to.iter().enumerate().filter(|(_, to)| **to);
            near.settled |= is_linked(near.slot) && to.into_iter().all(|(slot, _)| is_linked(slot));
        }
    }

    /// Whether two members of a shape cannot share a node.
    pub(super) fn one_a_node(&self, slot: usize) -> bool {
        self.alone.contains(&(slot, slot))
    }

    /// Whether members of two shapes cannot share a node.
    pub(super) fn clash(&self, a: usize, b: usize) -> bool {
        self.alone.contains(&(a.min(b), a.max(b)))
    }

    /// Whether some members cannot share a node, or the value of a label.
    pub(super) fn keeps_apart(&self) -> bool {
        !(self.alone.is_empty() && self.spread.is_empty())
    }

    /// Drops all that keeps members apart.
    pub(super) fn allow_sharing(&mut self) {
        self.alone.clear();
        self.spread.clear();
    }

    /// Whether shapes cannot share the value of a label beyond the node.
    pub(super) fn spreads(&self) -> bool {
        !self.spread.is_empty()
    }
}

/// What two pods cannot share.
pub(super) struct Separation<'n> {
    /// A node.
    pub(super) nodes: bool,
    /// The values of node labels beyond the node.
    pub(super) keys: BTreeSet<&'n Arc<str>>,
}

impl<'n> Separation<'n> {
    /// By anti-affinity of either, and by their host ports.
    pub(super) fn of(one: &'n Needs, other: &'n Needs) -> Self {
        let forth = one.apart_from.iter().filter(|term| selects(one, term, other));
        let back = other.apart_from.iter().filter(|term| selects(other, term, one));
        let keys = forth.chain(back).map(|term| &term.topology_key);
        let (by_node, keys): (Vec<_>, Vec<_>) = keys.partition(|key| ***key == *HOSTNAME);
        Self {
            nodes: !by_node.is_empty() || ports_collide(&one.host_ports, &other.host_ports),
            keys: keys.into_iter().collect(),
        }
    }
}

/// Whether a term of one pod selects another.
fn selects(of: &Needs, term: &PodTerm, other: &Needs) -> bool {
    term.finds(&of.namespace, &other.namespace, &other.labels)
}
