//! Required pod affinity: which nodes are near pods that exist, and which label values a gang can share with itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_gang::protocol::PlanRequest;

use super::{Counting, Survey};
use crate::input::Shape;
use crate::plan::demand::Demand;
use crate::plan::rules::Near;
use crate::snapshot::NodeIx;

impl Survey<'_> {
    /// The affinity rules of the shapes. `outside`: by shape and term, the nodes near pods outside the gang.
    pub(super) fn draw(&mut self, wanted: &PlanRequest, outside: Vec<Vec<Vec<NodeIx>>>) {
        let shapes = self.shapes.clone();
        for ((slot, shape), outside) in shapes.iter().enumerate().zip(outside) {
            let needs = &shape.needs;
            let draws = |other: &Shape| needs.is_drawn_to(&other.needs.namespace, &other.needs.labels);
            let to: Vec<bool> = shapes.iter().map(|other| draws(other)).collect();
            // Members count from the moment they have a reservation.
            let siblings = wanted.placed.iter().filter(|sibling| {
                let shape = sibling.shape.and_then(|shape| self.input.shape(shape));
                shape.is_some_and(draws)
            });
            let siblings: Vec<NodeIx> =
                siblings.filter_map(|sibling| self.input.snapshot.find(sibling.node.as_str())).collect();
            let mut rules: Vec<Near> = Vec::new();
            for (number, term) in needs.together_with.iter().enumerate() {
                let key = &term.topology_key;
                self.keep(slot, |survey, node| survey.label(node, key).is_some());
                let mut there: BTreeSet<NodeIx> =
                    outside.get(number).into_iter().flatten().copied().collect();
                let values: BTreeSet<&Arc<str>> =
                    siblings.iter().filter_map(|node| self.label(*node, key)).collect();
                if !values.is_empty() {
                    let near =
                        |node: &NodeIx| self.label(*node, key).is_some_and(|value| values.contains(value));
                    there.extend(self.nodes().filter(near));
                }
                if rules.iter().all(|rule| rule.key != *key) {
                    rules.push(Near {
                        slot,
                        key: Arc::clone(key),
                        to: to.clone(),
                        there,
                        starts: false,
                        settled: false,
                    });
                }
            }
            let starts = to[slot] && rules.iter().all(|rule| rule.there.is_empty());
            for rule in rules {
                let others = rule.to.iter().any(|to| *to);
                match self.counting {
                    // The pods that it must be near may be anywhere then.
                    Counting::Empty if !others || !rule.there.is_empty() => {}
                    // Pods outside the gang match, so no member can be the first.
                    Counting::Open | Counting::Free if !others || rule.is_among_its_like() && !starts => {
                        self.keep(slot, |_, node| rule.there.contains(&node));
                    }
                    _ => self.rules.near.push(Near { starts, ..rule }),
                }
            }
        }
    }

    /// The nodes by value of a rule's label, where enough members fit that would share it.
    pub(in crate::plan) fn values(&self, rule: usize, demand: &Demand<'_>) -> Vec<Vec<NodeIx>> {
        let (slots, linked, all) = (self.shapes.len(), self.rules.linked(rule), demand.all());
        let Some(near) = self.rules.near.get(rule) else {
            return Vec::new();
        };
        let mut values: BTreeMap<&Arc<str>, Vec<NodeIx>> = BTreeMap::new();
        for node in self.nodes() {
            let limits = &self.limits[node.0 as usize * slots..][..slots];
            let takes = limits.iter().zip(&linked).any(|(limit, linked)| *linked && *limit > 0);
            if let Some(value) = self.label(node, &near.key).filter(|_| takes) {
                values.entry(value).or_default().push(node);
            }
        }
        let tier = self.lowest_tier();
        let enough = |nodes: &Vec<NodeIx>| {
            let of = |slot: usize| match linked[slot] {
                true => nodes
                    .iter()
                    .fold(0u32, |sum, node| sum.saturating_add(self.takes(*node, slot, tier)))
                    .min(all[slot]),
                false => all[slot],
            };
            (0..slots).map(of).sum::<u32>() >= demand.must
        };
        // Of alike nodes one is enough, if no member is elsewhere.
        let mut known = BTreeSet::new();
        let mut differs = |nodes: &Vec<NodeIx>| match nodes[..] {
            [node] if linked.iter().all(|linked| *linked) => {
                let limits = &self.limits[node.0 as usize * slots..][..slots];
                known.insert((self.input.snapshot.class(node).map(|class| class.0), limits))
            }
            _ => true,
        };
        values.into_values().filter(|nodes| differs(nodes) && enough(nodes)).collect()
    }

    /// The survey with all members that would share a rule's label value confined to some nodes.
    pub(in crate::plan) fn kept_to(&self, rule: usize, nodes: &[NodeIx]) -> Self {
        let mut kept = self.with_skews(Arc::clone(&self.skews));
        let (slots, linked) = (self.shapes.len(), self.rules.linked(rule));
        for slot in (0..slots).filter(|slot| linked[*slot]) {
            for limit in kept.limits.iter_mut().skip(slot).step_by(slots) {
                *limit = 0;
            }
            for node in nodes {
                let at = node.0 as usize * slots + slot;
                kept.limits[at] = self.limits[at];
            }
        }
        kept.rules.settle(rule, &linked);
        kept
    }

    /// Whether kube-scheduler admits members of a shape on a node only once members that they must be near are bound.
    /// Shapes that select themselves need not wait, unless a member without rules matches: once it is bound, no member
    /// can be the first.
    pub(in crate::plan) fn follows(&self, node: NodeIx, slot: usize) -> bool {
        let near = &self.rules.near;
        let anchors = |rule: &Near| {
            let mut to = rule.to.iter().enumerate().filter(|(_, to)| **to);
            to.any(|(other, _)| near.iter().all(|near| near.slot != other))
        };
        let mut own = near.iter().filter(|rule| rule.slot == slot);
        own.any(|rule| !rule.there.contains(&node) && (!rule.starts || anchors(rule)))
    }
}
