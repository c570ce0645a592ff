//! How evenly members must be over the domains of a node label (`topologySpreadConstraints`). Counts as
//! kube-scheduler's PodTopologySpread plugin does: with existing pods, over all nodes, with or without devices.
//!
//! A plan holds if in the end no domain with a member of the constraint's shape exceeds the fewest by more than `max`.
//! Then kube-scheduler can admit the members, always the next where the fewest are, and alike members change places as
//! they arrive.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::needs::Spread;

use super::rules::HOSTNAME;
use crate::input::NodeResources;
use crate::snapshot::NodeIx;

/// One constraint of one shape.
#[derive(Debug, Clone)]
pub(super) struct Skew {
    /// Index of the shape that it binds.
    pub(super) slot: usize,
    pub(super) key: Arc<str>,
    pub(super) max: u32,
    /// By shape: whether its members are counted.
    pub(super) counts: Vec<bool>,
    /// By node: its domain.
    domains: Vec<Option<u32>>,
    /// Whether any node has the label.
    has_label: bool,
    /// By domain: pods that count already.
    there: Vec<u32>,
    /// The domains, those with the fewest pods first.
    by_least: Vec<u32>,
    /// The fewest domains that the constraint wants.
    min_domains: u32,
    /// There are fewer: the fewest count as none.
    few: bool,
}

impl Skew {
    /// All constraints of some shapes. `counted`: by shape and constraint, the number of counted pods by node.
    pub(super) fn all(
        shapes: &[&Needs],
        counted: &[Vec<BTreeMap<NodeIx, u32>>],
        rooms: &[NodeResources],
    ) -> Vec<Self> {
        let mut all = Vec::new();
        for (slot, needs) in shapes.iter().enumerate() {
            for (number, spread) in needs.spread.iter().enumerate() {
                let counted = counted.get(slot).and_then(|counted| counted.get(number));
                all.push(Self::of(slot, spread, shapes, counted, rooms));
            }
        }
        all
    }

    fn of(
        slot: usize,
        spread: &Spread,
        shapes: &[&Needs],
        counted: Option<&BTreeMap<NodeIx, u32>>,
        rooms: &[NodeResources],
    ) -> Self {
        let own = shapes[slot];
        let mut numbers: HashMap<&Arc<str>, u32> = HashMap::new();
        let mut domains = vec![None; rooms.len()];
        let (mut there, mut has_label) = (Vec::new(), false);
        for ((number, room), domain) in (0u32..).zip(rooms).zip(&mut domains) {
            let facts = room.facts.as_ref();
            has_label |= facts.is_some_and(|facts| facts.labels.contains_key(&spread.topology_key));
            let Some(facts) = facts.filter(|facts| own.spreads_over(spread, facts)) else {
                continue;
            };
            let Some(value) = facts.labels.get(&spread.topology_key) else {
                continue;
            };
            let of_value = *numbers.entry(value).or_insert_with(|| {
                there.push(0);
                u32::try_from(there.len() - 1).unwrap_or(u32::MAX)
            });
            *domain = Some(of_value);
            there[of_value as usize] +=
                counted.and_then(|counted| counted.get(&NodeIx(number))).copied().unwrap_or(0);
        }
        let mut by_least: Vec<u32> = (0u32..).take(there.len()).collect();
        by_least.sort_by_key(|domain| there[*domain as usize]);
        Self {
            slot,
            key: Arc::clone(&spread.topology_key),
            max: spread.max_skew,
            counts: shapes
                .iter()
                .map(|other| spread.counts(&own.namespace, &other.namespace, &other.labels))
                .collect(),
            min_domains: spread.min_domains,
            few: (there.len() as u64) < u64::from(spread.min_domains),
            domains,
            has_label,
            there,
            by_least,
        }
    }

    /// The domain of a node, if a member may go there at all.
    pub(super) fn domain(&self, node: NodeIx) -> Option<u32> {
        self.domains.get(node.0 as usize).copied().flatten()
    }

    /// Whether each node is a domain.
    pub(super) fn is_by_node(&self) -> bool {
        *self.key == *HOSTNAME
    }

    /// The fewest domains that the constraint wants, if there are fewer.
    pub(super) fn too_few_domains(&self) -> Option<u32> {
        self.few.then_some(self.min_domains)
    }

    /// The same without a minimum of domains.
    pub(super) fn with_any_domains(&self) -> Self {
        Self { few: false, ..self.clone() }
    }

    /// Whether any node has the label. A node without one of the labels of a pod's constraints is in no domain of the others either.
    pub(super) fn has_label(&self) -> bool {
        self.has_label
    }

    /// How many domains there are.
    pub(super) fn width(&self) -> usize {
        self.there.len()
    }

    /// Whether it may allow so many members of its shape on some nodes, each of which takes `takes` members of a shape.
    /// `false` is always right.
    pub(super) fn may_hold(
        &self,
        members: u32,
        nodes: impl Iterator<Item = NodeIx>,
        takes: impl Fn(NodeIx, usize) -> u32,
    ) -> bool {
        // By domain: members of the shape, and members that count.
        let mut here: HashMap<u32, (u32, u32)> = HashMap::new();
        for node in nodes {
            let Some(domain) = self.domain(node) else { continue };
            let (own, all) = here.entry(domain).or_default();
            *own = own.saturating_add(takes(node, self.slot));
            for slot in (0..self.counts.len()).filter(|slot| self.counts[*slot]) {
                *all = all.saturating_add(takes(node, slot));
            }
        }
        let there = |domain: &u32| self.there[*domain as usize];
        let elsewhere = self.by_least.iter().find(|domain| !here.contains_key(domain));
        let filled = here.iter().map(|(domain, (_, all))| there(domain).saturating_add(*all));
        let least =
            if self.few { 0 } else { elsewhere.map(there).into_iter().chain(filled).min().unwrap_or(0) };
        let most = here.iter().fold(0u32, |most, (domain, (own, _))| {
            let room = least.saturating_add(self.max).saturating_sub(there(domain));
            // Its own members do not count: one more makes no difference.
            let room = if self.counts[self.slot] { room } else { u32::MAX };
            most.saturating_add(room.min(*own))
        });
        most >= members
    }
}

/// Counts by domain of a constraint while packing.
#[derive(Debug, Clone)]
pub(super) struct Level {
    count: Vec<u32>,
    /// The fewest.
    least: u32,
    /// Domains that have the fewest.
    lowest: usize,
}

impl Level {
    pub(super) fn of(skew: &Skew) -> Self {
        let mut level = Self { count: skew.there.clone(), least: 0, lowest: 0 };
        level.find_least();
        level
    }

    fn find_least(&mut self) {
        self.least = self.count.iter().copied().min().unwrap_or(0);
        self.lowest = self.count.iter().filter(|count| **count == self.least).count();
    }

    /// Members that count enter a domain, or leave it (`back`).
    pub(super) fn put(&mut self, domain: u32, members: u32, back: bool) {
        let Some(count) = self.count.get_mut(domain as usize) else {
            return;
        };
        let before = *count;
        if back {
            *count = before.saturating_sub(members);
            self.find_least();
            return;
        }
        *count = before.saturating_add(members);
        if before == self.least && members > 0 {
            self.lowest -= 1;
            if self.lowest == 0 {
                self.find_least();
            }
        }
    }

    fn least(&self, skew: &Skew) -> u32 {
        if skew.few { 0 } else { self.least }
    }

    /// How many more members of the constraint's shape a node's domain takes now.
    pub(super) fn more(&self, skew: &Skew, node: NodeIx) -> u32 {
        let Some(domain) = skew.domain(node) else { return 0 };
        let count = self.count.get(domain as usize).copied().unwrap_or(0);
        let most = self.least(skew).saturating_add(skew.max);
        match (skew.counts[skew.slot], count <= most) {
            (true, _) => most.saturating_sub(count),
            (false, true) => u32::MAX,
            (false, false) => 0,
        }
    }

    /// How many members a node may have in the end, if the counts are final.
    pub(super) fn most_in_the_end(&self, skew: &Skew, node: NodeIx) -> u32 {
        let Some(domain) = skew.domain(node) else { return 0 };
        let most = self.least(skew).saturating_add(skew.max);
        most.saturating_sub(skew.there[domain as usize])
    }

    /// Whether it holds in the end for a node that has a member of its shape.
    pub(super) fn holds(&self, skew: &Skew, node: NodeIx) -> bool {
        let count = skew.domain(node).and_then(|domain| self.count.get(domain as usize));
        count.is_some_and(|count| *count <= self.least(skew).saturating_add(skew.max))
    }
}
