//! The members on each node while packing, and how many more each node takes by the members' rules about each other.

use std::collections::HashMap;
use std::sync::Arc;

use crate::plan::demand::Counts;
use crate::plan::rules::HOSTNAME;
use crate::plan::skew::Level;
use crate::plan::survey::{Survey, available};
use crate::snapshot::NodeIx;

/// The members on each node while packing.
#[derive(Debug, Clone)]
pub(in crate::plan) struct State {
    pub(super) on: HashMap<NodeIx, Counts>,
    /// By rule of spreading and label value: members of its two shapes.
    values: HashMap<(usize, Arc<str>), [u32; 2]>,
    /// By spread constraint: the counts of its domains.
    pub(super) levels: Vec<Level>,
    /// By affinity rule and label value: members that it selects.
    near: Vec<HashMap<Arc<str>, u32>>,
}

impl State {
    /// Empty.
    pub(in crate::plan) fn of(survey: &Survey<'_>) -> Self {
        Self {
            on: HashMap::new(),
            values: HashMap::new(),
            levels: survey.skews.iter().map(Level::of).collect(),
            near: vec![HashMap::new(); survey.rules.near.len()],
        }
    }

    /// Whether the members that a shape must be near are near a node now.
    pub(super) fn is_near(&self, survey: &Survey<'_>, node: NodeIx, slot: usize) -> bool {
        let rules = survey.rules.near.iter().zip(&self.near);
        let mut open = rules.filter(|(rule, _)| rule.slot == slot && !rule.settled);
        open.all(|(rule, here)| {
            let value = survey.label(node, &rule.key);
            rule.there.contains(&node)
                || value.is_some_and(|value| here.get(value).is_some_and(|members| *members > 0))
                || rule.starts && here.values().all(|members| *members == 0)
        })
    }

    /// Whether the rules that no other node can still satisfy hold in the end.
    pub(super) fn is_near_on(&self, survey: &Survey<'_>, node: NodeIx) -> bool {
        let rules = survey.rules.near.iter().zip(&self.near);
        let mut by_node = rules.filter(|(rule, _)| !rule.settled && *rule.key == *HOSTNAME);
        by_node.all(|(rule, here)| {
            let bound = self.on.get(&node).is_some_and(|on| on[rule.slot] > 0);
            let value = survey.label(node, &rule.key);
            !bound
                || rule.there.contains(&node)
                || value.is_some_and(|value| here.get(value).is_some_and(|members| *members > 0))
        })
    }

    /// Whether the packing is as even as it must be in the end.
    pub(super) fn is_even(&self, survey: &Survey<'_>) -> bool {
        survey.skews.iter().zip(&self.levels).all(|(skew, level)| {
            let mut given = self.on.iter().filter(|(_, on)| on[skew.slot] > 0);
            given.all(|(node, _)| level.holds(skew, *node))
        })
    }

    pub(in crate::plan) fn put(
        &mut self,
        survey: &Survey<'_>,
        node: NodeIx,
        slot: usize,
        count: u32,
        back: bool,
    ) {
        let change =
            |number: &mut u32| *number = if back { number.saturating_sub(count) } else { *number + count };
        let slots = survey.shapes.len();
        change(&mut self.on.entry(node).or_insert_with(|| vec![0; slots])[slot]);
        for (rule, (a, b, key)) in survey.rules.spread.iter().enumerate() {
            if let Some(value) = survey.label(node, key).filter(|_| *a == slot || *b == slot) {
                let of = self.values.entry((rule, Arc::clone(value))).or_default();
                if *a == slot {
                    change(&mut of[0]);
                }
                if *b == slot {
                    change(&mut of[1]);
                }
            }
        }
        for (rule, here) in survey.rules.near.iter().zip(&mut self.near) {
            if let Some(value) = survey.label(node, &rule.key).filter(|_| rule.to[slot]) {
                change(here.entry(Arc::clone(value)).or_default());
            }
        }
        for (skew, level) in survey.skews.iter().zip(&mut self.levels) {
            if let Some(domain) = skew.domain(node).filter(|_| skew.counts[slot]) {
                level.put(domain, count, back);
            }
        }
    }
}

/// How many more members of a shape a node takes.
pub(super) fn more(survey: &Survey<'_>, state: &State, node: NodeIx, slot: usize, tier: usize) -> u32 {
    if !state.is_near(survey, node, slot) {
        return 0;
    }
    let skews = survey.skews.iter().zip(&state.levels);
    let even = skews.filter(|(skew, _)| skew.slot == slot).map(|(skew, level)| level.more(skew, node)).min();
    match even {
        Some(0) => 0,
        Some(even) => even.min(room(survey, state, node, slot, tier)),
        None => room(survey, state, node, slot, tier),
    }
}

/// The same regardless of evenness.
pub(super) fn room(survey: &Survey<'_>, state: &State, node: NodeIx, slot: usize, tier: usize) -> u32 {
    let takes = survey.takes(node, slot, tier);
    let mut most = takes;
    for (rule, (a, b, key)) in survey.rules.spread.iter().enumerate() {
        let Some(value) = survey.label(node, key).filter(|_| *a == slot || *b == slot) else {
            continue;
        };
        let [of_a, of_b] = state.values.get(&(rule, Arc::clone(value))).copied().unwrap_or_default();
        most = match (*a == slot, *b == slot) {
            (true, true) => most.min(1u32.saturating_sub(of_a)),
            (true, false) if of_b > 0 => 0,
            (false, true) if of_a > 0 => 0,
            _ => most,
        };
    }
    let Some(on) = state.on.get(&node).filter(|_| most > 0) else {
        return most;
    };
    let present = |other: usize| on.get(other).copied().unwrap_or(0);
    if (0..on.len()).any(|other| other != slot && present(other) > 0 && survey.rules.clash(slot, other)) {
        return 0;
    }
    most = most.min(takes.saturating_sub(present(slot)));
    let (Some(shape), Some(class), Some(left)) =
        (survey.shapes.get(slot), survey.class(node), survey.left(node))
    else {
        return 0;
    };
    for ask in &shape.request.asks {
        let resource = ask.resource.as_str();
        let Some((_, pool)) = class.pool(resource) else {
            return 0;
        };
        let free = u32::try_from(available(pool, survey.counting)).unwrap_or(u32::MAX);
        let used = survey.shapes.iter().enumerate().fold(0u32, |used, (other, shape)| {
            used.saturating_add(shape.request.devices(resource).saturating_mul(present(other)))
        });
        most = most.min(free.saturating_sub(used) / ask.devices.max(1));
    }
    let mut left = left.clone();
    for (other, shape) in survey.shapes.iter().enumerate() {
        for _ in 0..present(other) {
            left.sub(&shape.needs.resources);
        }
    }
    most.min(left.times(&shape.needs.resources))
}
