//! How many members of each shape a node takes by everything but devices: resources left, labels and taints, existing
//! pods, and the gang's own rules.

use std::collections::{BTreeMap, BTreeSet};

use gantry_gang::protocol::{PlanRequest, ShapeId};

use super::{Counting, Survey};
use crate::input::PlacementRules;
use crate::plan::rules::Apart;
use crate::plan::skew::Skew;
use crate::snapshot::{NodeIx, Standing};

impl Survey<'_> {
    /// By node and shape: members by everything but devices.
    pub(super) fn limit(&mut self, wanted: &PlanRequest) {
        let without = wanted.without.iter();
        let without: BTreeSet<NodeIx> =
            without.filter_map(|node| self.input.snapshot.find(node.as_str())).collect();
        let slots = self.shapes.len();
        let mut limits = std::mem::take(&mut self.limits);
        let mut counted = Vec::with_capacity(slots);
        let mut near = Vec::with_capacity(slots);
        for (slot, shape) in self.shapes.iter().enumerate() {
            let mut barred = match self.counting {
                Counting::Empty if shape.needs.together_with.is_empty() => PlacementRules::default(),
                Counting::Empty => {
                    PlacementRules { near: self.input.barred(shape).near, ..PlacementRules::default() }
                }
                Counting::Open | Counting::Free => self.input.barred(shape),
            };
            counted.push(std::mem::take(&mut barred.counted));
            near.push(std::mem::take(&mut barred.near));
            for (number, standing) in (0u32..).zip(&self.input.snapshot.nodes) {
                let node = NodeIx(number);
                let class = self.input.snapshot.classes.get(standing.0 as usize);
                let Some(Standing::Ours(_)) = class.map(|class| &**class) else {
                    continue;
                };
                let Some(left) = self.left(node) else { continue };
                let facts = self.input.rooms.get(number as usize).and_then(|room| room.facts.as_ref());
                let kept_off = without.contains(&node)
                    || barred.nodes.binary_search(&node).is_ok()
                    || barred.only.as_ref().is_some_and(|only| only.binary_search(&node).is_err())
                    || facts.is_none_or(|facts| shape.needs.admits(facts).is_err());
                if kept_off {
                    continue;
                }
                let mut limit = left.times(&shape.needs.resources);
                if self.rules.one_a_node(slot) {
                    limit = limit.min(1);
                }
                limits[number as usize * slots + slot] = limit;
            }
        }
        self.limits = limits;
        let needs: Vec<_> = self.shapes.iter().map(|shape| &*shape.needs).collect();
        self.skews = Skew::all(&needs, &counted, self.input.rooms).into();
        self.part(wanted);
        self.draw(wanted, near);
    }

    /// Excludes what members cannot share with members that have a reservation, bound or not.
    fn part(&mut self, wanted: &PlanRequest) {
        let mut siblings: BTreeMap<Option<ShapeId>, BTreeSet<NodeIx>> = BTreeMap::new();
        for sibling in &wanted.placed {
            let node = self.input.snapshot.find(sibling.node.as_str());
            siblings.entry(sibling.shape).or_default().extend(node);
        }
        for (slot, shape) in self.shapes.clone().into_iter().enumerate() {
            for (other, nodes) in &siblings {
                // A member without a known shape is taken to be alike.
                let known = other.and_then(|other| self.input.shape(other));
                let apart = Apart::of(&shape.needs, &known.unwrap_or(shape).needs);
                if apart.nodes {
                    self.keep(slot, |_, node| !nodes.contains(&node));
                }
                for key in apart.keys {
                    let taken: BTreeSet<_> = nodes.iter().filter_map(|node| self.label(*node, key)).collect();
                    self.keep(slot, |survey, node| {
                        survey.label(node, key).is_none_or(|value| !taken.contains(value))
                    });
                }
            }
        }
    }

    /// Excludes a shape from nodes that do not pass.
    pub(super) fn keep(&mut self, slot: usize, passes: impl Fn(&Self, NodeIx) -> bool) {
        let mut limits = std::mem::take(&mut self.limits);
        let slots = self.shapes.len();
        for number in 0..limits.len() / slots.max(1) {
            let node = NodeIx(u32::try_from(number).unwrap_or(u32::MAX));
            if limits[number * slots + slot] > 0 && !passes(self, node) {
                limits[number * slots + slot] = 0;
            }
        }
        self.limits = limits;
    }
}
