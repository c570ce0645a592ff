//! Exhaustive search for a packing, node by node, within a number of steps.

use std::collections::HashSet;

use super::Packing;
use super::state::{State, room};
use crate::plan::demand::Counts;
use crate::plan::fill::Run;
use crate::plan::order;
use crate::plan::survey::Survey;
use crate::snapshot::NodeIx;

/// Steps of one exhaustive search.
const MOST_STEPS: u32 = 1 << 17;

/// A packing of so many members of each shape on some nodes; `None` if there is none or the steps run out.
pub(super) fn search(
    packing: Packing<'_, '_>,
    nodes: &[NodeIx],
    counts: &Counts,
    order: &[usize],
) -> Option<Vec<Run>> {
    let Packing { survey, tier, .. } = packing;
    let mut search = Search {
        survey,
        order,
        tier,
        left: counts.clone(),
        after: suffix_sums(survey, nodes, tier),
        nodes,
        state: packing.state.clone(),
        steps: 0,
        failed: HashSet::new(),
        runs: Vec::new(),
    };
    search.at(0).then_some(search.runs)
}

/// The search, node by node.
struct Search<'s, 'a> {
    survey: &'s Survey<'a>,
    order: &'s [usize],
    tier: usize,
    nodes: &'s [NodeIx],
    /// Members still to be packed.
    left: Counts,
    /// By node: the most that it and all later nodes take of each shape.
    after: Vec<Counts>,
    state: State,
    steps: u32,
    /// Nodes and remaining members from which there is no solution. Not kept where earlier nodes matter too.
    failed: HashSet<(usize, Counts)>,
    runs: Vec<Run>,
}

impl Search<'_, '_> {
    fn at(&mut self, index: usize) -> bool {
        if self.left.iter().all(|left| *left == 0) {
            return self.state.is_even(self.survey) && order::comes_about(self.survey, &self.state.on);
        }
        let tired = self.is_tired();
        let short = self
            .after
            .get(index)
            .is_none_or(|after| after.iter().zip(&self.left).any(|(after, left)| after < left));
        if short || tired || self.failed.contains(&(index, self.left.clone())) {
            return false;
        }
        if self.on_node(index, 0) {
            return true;
        }
        if !self.survey.relates() {
            self.failed.insert((index, self.left.clone()));
        }
        false
    }

    /// Whether no step is left; otherwise counts one. A step may look at every shape, so more shapes cost more.
    fn is_tired(&mut self) -> bool {
        let effort = &self.survey.input.effort;
        let left = effort.get();
        if self.steps >= MOST_STEPS || left == 0 {
            return true;
        }
        self.steps += 1;
        effort.set(left - 1);
        false
    }

    /// Every number of the shape at `position` of the order, the most first.
    fn on_node(&mut self, index: usize, position: usize) -> bool {
        let (Some(&slot), Some(&node)) = (self.order.get(position), self.nodes.get(index)) else {
            let held = self.nodes.get(index).is_none_or(|node| self.state.is_near_on(self.survey, *node));
            return held && self.at(index + 1);
        };
        if self.is_tired() {
            return false;
        }
        // Evenness is checked at the end only.
        let most = room(self.survey, &self.state, node, slot, self.tier).min(self.left[slot]);
        for count in (0..=most).rev() {
            if count > 0 {
                self.state.put(self.survey, node, slot, count, false);
                self.left[slot] -= count;
                self.runs.push(Run { node, slot, count });
            }
            if self.on_node(index, position + 1) {
                return true;
            }
            if count > 0 {
                self.state.put(self.survey, node, slot, count, true);
                self.left[slot] += count;
                self.runs.pop();
            }
        }
        false
    }
}

fn suffix_sums(survey: &Survey<'_>, nodes: &[NodeIx], tier: usize) -> Vec<Counts> {
    let slots = survey.shapes.len();
    let mut after = vec![vec![0u32; slots]; nodes.len() + 1];
    for (index, node) in nodes.iter().enumerate().rev() {
        for slot in 0..slots {
            after[index][slot] = after[index + 1][slot].saturating_add(survey.takes(*node, slot, tier));
        }
    }
    after
}
