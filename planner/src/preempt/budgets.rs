//! Sets of units that disruption budgets allow to go together and that make room. A unit that helps is not left out for
//! one that does not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_gang::protocol::PlanRequest;

use super::{Budget, SpareBudget, VictimCandidate, WhatIf, spare};
use crate::plan::{fits, plan};

/// Most turns of one search. Each costs a few plans, which cost more the more nodes there are.
const MOST_TURNS: usize = 64;
/// Fewest turns, however large the cluster.
const FEWEST_TURNS: usize = 4;
/// Nodes looked at over all turns.
const LOOKS: usize = 16_384;

/// The search for such sets.
pub(super) struct Sets<'s, 't, 'a> {
    pub(super) cluster: &'s WhatIf<'t, 'a>,
    pub(super) wanted: &'s PlanRequest,
    pub(super) tries: SpareBudget,
}

impl Sets<'_, '_, '_> {
    /// Whether the gang fits without some units.
    pub(super) fn room(&self, victims: &[&VictimCandidate]) -> bool {
        self.cluster.without(victims, |input| fits(input, self.wanted))
    }

    /// Units on nodes where the gang would go without them.
    pub(super) fn near<'o>(&self, victims: &[&'o VictimCandidate]) -> Option<Vec<&'o VictimCandidate>> {
        let used: BTreeSet<_> = self.cluster.without(victims, |input| {
            let placement = plan(input, self.wanted).ok()?;
            let nodes = placement.places.iter().map(|place| place.node.as_str());
            Some(nodes.filter_map(|node| input.snapshot.find(node)).collect())
        })?;
        let touched = |unit: &&VictimCandidate| unit.pods.iter().any(|pod| used.contains(&pod.node));
        Some(victims.iter().copied().filter(touched).collect())
    }

    /// Sets that make room within the budgets, the most preferred first. One set of all units if the budgets allow
    /// that.
    pub(super) fn within<'o>(&self, units: &[&'o VictimCandidate]) -> Vec<Vec<&'o VictimCandidate>> {
        if !self.room(units) {
            return Vec::new();
        }
        if exceeded(units).is_none() {
            return vec![units.to_vec()];
        }
        let near = self.near(units).unwrap_or_default();
        let mut sets = vec![allowed(units, &[]), allowed(units, &near)];
        sets.dedup();
        sets.retain(|set| self.room(set));
        if sets.is_empty() {
            sets.extend(self.search(units).map(|found| allowed(units, &found)));
        }
        sets
    }

    /// Units that make room within the budgets. If the units of a plan exceed one, one of those that count against it
    /// has to stay; each is tried.
    fn search<'o>(&self, units: &[&'o VictimCandidate]) -> Option<Vec<&'o VictimCandidate>> {
        let mut open = vec![BTreeSet::new(), crowded(units)];
        let mut seen = BTreeSet::new();
        let turns = LOOKS / self.cluster.nodes().max(1);
        for _ in 0..turns.clamp(FEWEST_TURNS, MOST_TURNS) {
            let staying = open.pop()?;
            let numbered = units.iter().enumerate();
            let going: Vec<&VictimCandidate> =
                numbered.filter(|(number, _)| !staying.contains(number)).map(|(_, unit)| *unit).collect();
            if !self.room(&going) {
                continue;
            }
            let near = self.near(&going).filter(|near| self.room(near));
            let taken = self.spare_counted(&near.unwrap_or(going));
            let Some(budget) = exceeded(&taken) else {
                return Some(taken);
            };
            let counted = |unit: &&VictimCandidate| unit.budgets.iter().any(|of| of.name == budget);
            for (number, unit) in units.iter().enumerate() {
                let taken = taken.iter().any(|taken| std::ptr::eq(*taken, *unit));
                if taken && counted(unit) {
                    let mut more = staying.clone();
                    more.insert(number);
                    if seen.insert(more.clone()) {
                        open.push(more);
                    }
                }
            }
        }
        None
    }

    /// Without units that count against a budget and need not go.
    fn spare_counted<'o>(&self, units: &[&'o VictimCandidate]) -> Vec<&'o VictimCandidate> {
        let (mut counted, rest): (Vec<&VictimCandidate>, Vec<&VictimCandidate>) =
            units.iter().copied().partition(|unit| !unit.budgets.is_empty());
        counted.sort_by(|a, b| b.cost().cmp(&a.cost()).then_with(|| b.name().cmp(&a.name())));
        let kept = spare(&counted, &|kept| self.room(&[&rest, kept].concat()), &self.tries);
        [rest, kept].concat()
    }
}

/// As many units as the budgets allow together, those first that come `before` others.
fn allowed<'o>(units: &[&'o VictimCandidate], before: &[&VictimCandidate]) -> Vec<&'o VictimCandidate> {
    let goes_before = |unit: &VictimCandidate| before.iter().any(|one| std::ptr::eq(*one, unit));
    let numbered = units.iter().enumerate();
    let (mut order, rest): (Vec<_>, Vec<_>) = numbered.partition(|(_, unit)| goes_before(unit));
    order.extend(rest);
    let mut used: BTreeMap<&Arc<str>, u32> = BTreeMap::new();
    order.retain(|(_, unit)| {
        let after = |budget: &Budget| {
            let used = used.get(&budget.name).copied().unwrap_or(0);
            used.saturating_add(budget.pods)
        };
        let within = unit.budgets.iter().all(|budget| after(budget) <= budget.allowed);
        if within {
            for budget in &unit.budgets {
                *used.entry(&budget.name).or_default() += budget.pods;
            }
        }
        within
    });
    order.sort_unstable_by_key(|(number, _)| *number);
    order.into_iter().map(|(_, unit)| *unit).collect()
}

/// A budget that does not allow all of them together.
fn exceeded(units: &[&VictimCandidate]) -> Option<Arc<str>> {
    let mut used: BTreeMap<&Arc<str>, u32> = BTreeMap::new();
    let mut budgets = units.iter().flat_map(|unit| &unit.budgets);
    let beyond = budgets.find(|budget| {
        let used = used.entry(&budget.name).or_default();
        *used = used.saturating_add(budget.pods);
        *used > budget.allowed
    });
    beyond.map(|budget| Arc::clone(&budget.name))
}

/// Units that count against a budget on nodes where it does not allow all to go: such a node cannot be emptied.
fn crowded(units: &[&VictimCandidate]) -> BTreeSet<usize> {
    let mut there: BTreeMap<_, u32> = BTreeMap::new();
    let each = || {
        units.iter().enumerate().flat_map(|(number, unit)| {
            let budgets = unit.budgets.iter();
            budgets.flat_map(move |budget| {
                let nodes: BTreeSet<_> = unit.pods.iter().map(|pod| pod.node).collect();
                nodes.into_iter().map(move |node| (number, node, budget))
            })
        })
    };
    for (_, node, budget) in each() {
        let there = there.entry((node, &budget.name)).or_default();
        *there = there.saturating_add(budget.pods);
    }
    each()
        .filter(|(_, node, budget)| {
            there.get(&(*node, &budget.name)).is_some_and(|there| *there > budget.allowed)
        })
        .map(|(number, ..)| number)
        .collect()
}
