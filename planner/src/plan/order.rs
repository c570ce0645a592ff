//! In which order kube-scheduler admits members with required affinity: the members that they must be near have to be
//! bound first.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::demand::Counts;
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// Members tried as the first of those that want to be near each other.
const MOST_TRIES: u32 = 64;

/// Whether some order admits every member on some nodes, by shape.
pub(super) fn comes_about(survey: &Survey<'_>, on: &HashMap<NodeIx, Counts>) -> bool {
    if survey.rules.near.is_empty() {
        return true;
    }
    let each = on.iter().flat_map(|(node, counts)| {
        let there = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        there.map(|(slot, _)| (*node, slot))
    });
    let mut waiting: Vec<(NodeIx, usize)> = each.collect();
    waiting.sort_unstable();
    let let_in = LetIn { survey, near: vec![HashSet::new(); survey.rules.near.len()] };
    let_in.rest(&waiting, &mut 0)
}

/// Members admitted so far.
#[derive(Clone)]
struct LetIn<'s, 'a> {
    survey: &'s Survey<'a>,
    /// By affinity rule: the label values of admitted members that it selects.
    near: Vec<HashSet<&'a Arc<str>>>,
}

impl LetIn<'_, '_> {
    /// Whether all others can follow.
    fn rest(&self, waiting: &[(NodeIx, usize)], tries: &mut u32) -> bool {
        if self.clone().follow(waiting.to_vec()) {
            return true;
        }
        // Or else after a member that selects itself and has nothing to be near: kube-scheduler admits it only before
        // others like it exist.
        let mut known = BTreeSet::new();
        let firsts = waiting
            .iter()
            .filter(|(node, slot)| self.may_start(*slot) && known.insert((*slot, self.values(*node, *slot))));
        let firsts: Vec<_> = firsts.copied().collect();
        firsts.into_iter().any(|first| {
            *tries += 1;
            let mut then = self.clone();
            then.put(first.0, first.1);
            let left: Vec<_> = waiting.iter().copied().filter(|other| *other != first).collect();
            *tries <= MOST_TRIES && then.rest(&left, tries)
        })
    }

    /// Admits every member that has its neighbours. Returns whether all are admitted.
    fn follow(mut self, mut waiting: Vec<(NodeIx, usize)>) -> bool {
        loop {
            let before = waiting.len();
            waiting.retain(|(node, slot)| {
                let near = self.is_near(*node, *slot);
                if near {
                    self.put(*node, *slot);
                }
                !near
            });
            if waiting.is_empty() || waiting.len() == before {
                return waiting.is_empty();
            }
        }
    }

    fn is_near(&self, node: NodeIx, slot: usize) -> bool {
        let rules = self.survey.rules.near.iter().zip(&self.near);
        let mut own = rules.filter(|(rule, _)| rule.slot == slot);
        own.all(|(rule, near)| {
            let value = self.survey.label(node, &rule.key);
            rule.there.contains(&node) || value.is_some_and(|value| near.contains(value))
        })
    }

    fn may_start(&self, slot: usize) -> bool {
        let rules = self.survey.rules.near.iter().zip(&self.near);
        let mut own = rules.filter(|(rule, _)| rule.slot == slot);
        own.all(|(rule, near)| rule.starts && near.is_empty())
    }

    fn values(&self, node: NodeIx, slot: usize) -> Vec<Option<&Arc<str>>> {
        let own = self.survey.rules.near.iter().filter(|rule| rule.slot == slot);
        own.map(|rule| self.survey.label(node, &rule.key)).collect()
    }

    fn put(&mut self, node: NodeIx, slot: usize) {
        let survey = self.survey;
        for (rule, near) in survey.rules.near.iter().zip(&mut self.near) {
            near.extend(survey.label(node, &rule.key).filter(|_| rule.to[slot]));
        }
    }
}
