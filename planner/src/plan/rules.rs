//! What members of one gang ask of each other's places: host ports and affinity and anti-affinity terms that select the gang's own pods.
//! What other pods mean for them comes with the plan's input.

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
    /// Members that must share the value of a node label with others.
    pub(super) near: Vec<Near>,
}

/// Each member of a shape must share the value of a node label with another pod, of the gang or not.
#[derive(Debug, Clone)]
pub(super) struct Near {
    /// Index of the shape that it binds.
    pub(super) slot: usize,
    pub(super) key: Arc<str>,
    /// By shape: whether its members are such others.
    pub(super) to: Vec<bool>,
    /// The nodes that share a value with others that are there already.
    pub(super) there: BTreeSet<NodeIx>,
    /// No such pod is anywhere, and members are such pods themselves: the first may go to any node that has the label.
    pub(super) starts: bool,
    /// All whom it is about are kept to one value: nothing is left to look after.
    pub(super) settled: bool,
}

impl Near {
    /// Whether members are to be near each other and nobody else of the gang.
    pub(super) fn is_among_its_like(&self) -> bool {
        self.to
            .iter()
            .enumerate()
            .all(|(slot, to)| *to == (slot == self.slot))
    }
}

impl Rules {
    pub(super) fn of(shapes: &[&Needs]) -> Self {
        let mut rules = Self::default();
        for (a, first) in shapes.iter().enumerate() {
            for (b, second) in shapes.iter().enumerate().skip(a) {
                let apart = Apart::of(first, second);
                if apart.nodes {
                    rules.alone.push((a, b));
                }
                let keys = apart.keys.into_iter().cloned();
                rules.spread.extend(keys.map(|key| (a, b, key)));
            }
        }
        rules
    }

    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        !(self.alone.is_empty() && self.spread.is_empty() && self.near.is_empty())
    }

    /// The next rule of nearness that is open: those that leave the least choice first.
    pub(super) fn open(&self) -> Option<usize> {
        let open = || (0..self.near.len()).filter(|rule| !self.near[*rule].settled);
        open()
            .find(|rule| self.near[*rule].is_among_its_like())
            .or_else(|| open().next())
    }

    /// The shapes of which one value of a rule's label holds all members: where they are to be near each other those alone, else all that
    /// rules of the same label bind together, too.
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

    /// Whether shapes cannot share the value of a label beyond the node.
    pub(super) fn spreads(&self) -> bool {
        !self.spread.is_empty()
    }
}

/// What two pods cannot share.
pub(super) struct Apart<'n> {
    /// A node.
    pub(super) nodes: bool,
    /// The values of node labels beyond the node.
    pub(super) keys: BTreeSet<&'n Arc<str>>,
}

impl<'n> Apart<'n> {
    /// By anti-affinity of either and by their host ports.
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
