//! Packs members of several shapes, or with rules about each other's nodes, into one domain: first in a few good
//! orders, then, where none succeeds and the nodes are few, by exhaustive search.

mod state;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use gantry_gang::DomainIx;

use self::state::{more, room};
use super::demand::Counts;
use super::fill::{Anchors, Filler, Run, is_wider, unevenness};
use super::scope::FabricPart;
use super::survey::Survey;
use crate::snapshot::NodeIx;

pub(super) use self::state::State;

/// Orders of shapes tried.
const MOST_ORDERS: usize = 6;
/// Nodes up to which the search is exhaustive.
const MOST_NODES: usize = 64;

/// What a packing works on.
#[derive(Clone, Copy)]
pub(super) struct Packing<'s, 'a> {
    pub(super) survey: &'s Survey<'a>,
    /// The step of bandwidth that members must reach.
    pub(super) tier: usize,
    pub(super) loose: &'s [u32],
    pub(super) anchors: &'s Anchors,
    /// The packing so far.
    pub(super) state: &'s State,
}

impl Packing<'_, '_> {
    /// Whether kube-scheduler admits all packed members in some order.
    fn lets_in(&self, runs: &[Run]) -> bool {
        if self.survey.rules.near.is_empty() {
            return true;
        }
        let mut state = self.state.clone();
        for run in runs {
            state.put(self.survey, run.node, run.slot, run.count, false);
        }
        comes_about(self.survey, &state.on)
    }
}

/// Packs so many members of each shape into a place; `None` if they do not fit or no packing was found.
pub(super) fn pack(packing: Packing<'_, '_>, place: FabricPart, counts: &Counts) -> Option<Vec<Run>> {
    let Packing { survey, tier, .. } = packing;
    let nodes = nodes_of(survey, place);
    let mut orders = orders(survey, counts);
    for order in &orders {
        let found = if !survey.skews.is_empty() {
            evenly(packing, place, &nodes, counts, order)
        } else if survey.rules.spreads() {
            in_row(packing, &nodes, counts, order)
        } else {
            by_tree(packing, place, counts, order, Filler::fill)
        };
        let lets_in = |runs: &Vec<Run>| packing.lets_in(runs);
        let found = found.filter(lets_in).or_else(|| {
            let open = survey.rules.open().is_some() && survey.skews.is_empty();
            open.then(|| in_row(packing, &nodes, counts, order))?.filter(lets_in)
        });
        if found.is_some() {
            return found;
        }
    }
    let order = orders.drain(..1).next()?;
    let open: Vec<NodeIx> = nodes
        .into_iter()
        .filter(|node| (0..counts.len()).any(|slot| survey.takes(*node, slot, tier) > 0))
        .collect();
    if open.len() > MOST_NODES {
        survey.give_up();
        return None;
    }
    search(packing, &open, counts, &order)
}

/// The packing made as level over the smallest domains as it can be without getting wider.
pub(super) fn leveled(
    packing: Packing<'_, '_>,
    place: FabricPart,
    counts: &Counts,
    packed: Vec<Run>,
) -> Vec<Run> {
    let survey = packing.survey;
    if survey.relates() || !packing.anchors.is_empty() || unevenness(survey, &packed) <= 1 {
        return packed;
    }
    let mut order: Vec<usize> = Vec::new();
    for run in &packed {
        if !order.contains(&run.slot) {
            order.push(run.slot);
        }
    }
    let back: Vec<usize> = order.iter().rev().copied().collect();
    let mut best = packed;
    for order in [order, back] {
        let level = by_tree(packing, place, counts, &order, Filler::fill_level);
        let level = level.filter(|level| packing.lets_in(level) && !is_wider(survey, level, &best));
        best = match level {
            Some(level) if unevenness(survey, &level) < unevenness(survey, &best) => level,
            _ => best,
        };
        if unevenness(survey, &best) <= 1 {
            break;
        }
    }
    best
}

/// One shape after the other, each along the tree.
fn by_tree<'s, 'a>(
    packing: Packing<'s, 'a>,
    place: FabricPart,
    counts: &Counts,
    order: &[usize],
    fill: impl Fn(&mut Filler<'s, 'a>, DomainIx, u32) -> Option<()>,
) -> Option<Vec<Run>> {
    let Packing { survey, tier, loose, anchors, .. } = packing;
    let mut state = packing.state.clone();
    let mut begun = Anchors::default();
    let mut runs = Vec::new();
    for &slot in order {
        let members = counts[slot];
        if members == 0 {
            continue;
        }
        let laid = match place {
            FabricPart::Node(node) => {
                let fits = more(survey, &state, node, slot, tier) >= members;
                vec![fits.then_some(Run { node, slot, count: members })?]
            }
            FabricPart::Domain(domain) => {
                let mut filler =
                    Filler::new(survey, slot, loose, anchors, |node| more(survey, &state, node, slot, tier));
                filler.begun = std::mem::take(&mut begun);
                fill(&mut filler, domain, members)?;
                begun = filler.begun;
                filler.runs
            }
        };
        for run in &laid {
            state.put(survey, run.node, slot, run.count, false);
        }
        runs.extend(laid);
    }
    Some(runs)
}

/// Node by node along the tree, as many of each shape as the node takes.
fn in_row(packing: Packing<'_, '_>, nodes: &[NodeIx], counts: &Counts, order: &[usize]) -> Option<Vec<Run>> {
    let Packing { survey, tier, .. } = packing;
    let mut state = packing.state.clone();
    let mut left = counts.clone();
    let mut runs = Vec::new();
    for &node in nodes {
        for &slot in order {
            let count = more(survey, &state, node, slot, tier).min(left[slot]);
            if count > 0 {
                state.put(survey, node, slot, count, false);
                left[slot] -= count;
                runs.push(Run { node, slot, count });
            }
        }
    }
    left.iter().all(|left| *left == 0).then_some(runs)
}

/// The nodes of a place, along the tree.
pub(super) fn nodes_of(survey: &Survey<'_>, place: FabricPart) -> Vec<NodeIx> {
    let domain = match place {
        FabricPart::Node(node) => return vec![node],
        FabricPart::Domain(domain) => domain,
    };
    let mut nodes = Vec::new();
    let mut open = vec![domain];
    while let Some(next) = open.pop() {
        if let Some(of) = survey.domain(next) {
            open.extend(of.children.iter().rev());
            let mut own: Vec<NodeIx> = of.nodes.iter().map(|node| NodeIx(*node)).collect();
            own.sort_by_key(|node| survey.name(*node));
            nodes.extend(own);
        }
    }
    nodes
}

/// By shape: how many shapes come before it in chains of affinity.
fn depths(survey: &Survey<'_>) -> Vec<usize> {
    let slots = survey.shapes.len();
    let mut depth = vec![0; slots];
    for _ in 1..slots {
        let mut changed = false;
        for rule in survey.rules.near.iter().filter(|rule| !rule.settled) {
            let others = (0..slots).filter(|slot| *slot != rule.slot && rule.to[*slot]);
            let after = others.map(|slot| depth[slot] + 1).min().unwrap_or(0).min(slots);
            changed |= depth[rule.slot] != after;
            depth[rule.slot] = after;
        }
        if !changed {
            break;
        }
    }
    depth
}

/// Orders of shapes: those with most devices first, but after those that they must be near to; then other orders.
fn orders(survey: &Survey<'_>, counts: &Counts) -> Vec<Vec<usize>> {
    let devices = |slot: &usize| -> u32 {
        let asks = survey.shapes.get(*slot).map(|shape| &shape.request.asks);
        asks.into_iter().flatten().fold(0, |sum, ask| sum.saturating_add(ask.devices))
    };
    let mut first: Vec<usize> = (0..counts.len()).collect();
    let depth = depths(survey);
    first.sort_by_key(|slot| {
        let size = std::cmp::Reverse(devices(slot));
        (depth[*slot], size, counts[*slot], *slot)
    });
    let mut orders = vec![first.clone()];
    // Each shape first once, the others in order; then reversed.
    for at in (1..first.len()).take(MOST_ORDERS) {
        let mut order = first.clone();
        let moved = order.remove(at);
        order.insert(0, moved);
        orders.push(order);
    }
    if first.len() > 2 {
        first.reverse();
        orders.push(first);
    }
    orders.truncate(MOST_ORDERS);
    orders
}

// Packs members as evenly over domains as their `topologySpreadConstraints` ask, and close together within each.

/// Round after round, on every node as many as the constraint allows at that moment: finds a packing where there is
/// one. Then along the tree with the same numbers in each domain, where that is possible.
fn evenly(
    packing: Packing<'_, '_>,
    place: FabricPart,
    nodes: &[NodeIx],
    counts: &Counts,
    order: &[usize],
) -> Option<Vec<Run>> {
    let Packing { survey, tier, .. } = packing;
    let slots = counts.len();
    let open: Vec<NodeIx> = nodes
        .iter()
        .copied()
        .filter(|node| (0..slots).any(|slot| survey.takes(*node, slot, tier) > 0))
        .collect();
    let mut state = packing.state.clone();
    let mut left = counts.clone();
    let mut laid = vec![vec![0u32; slots]; open.len()];
    while left.iter().any(|left| *left > 0) {
        let before = left.clone();
        for (node, laid) in open.iter().zip(&mut laid) {
            for &slot in order.iter().filter(|slot| before[**slot] > 0) {
                let count = more(survey, &state, *node, slot, tier).min(left[slot]);
                if count > 0 {
                    state.put(survey, *node, slot, count, false);
                    left[slot] -= count;
                    laid[slot] += count;
                }
            }
        }
        if left == before {
            return None;
        }
    }
    if !state.is_even(survey) {
        // Other members that count came later.
        return None;
    }
    let rounds = || {
        let runs = open.iter().zip(&laid).flat_map(|(node, laid)| {
            let counts = laid.iter().enumerate().filter(|(_, count)| **count > 0);
            counts.map(|(slot, count)| Run { node: *node, slot, count: *count })
        });
        runs.collect()
    };
    let rounds: Vec<Run> = rounds();
    match place {
        FabricPart::Node(_) => Some(rounds),
        FabricPart::Domain(domain) => {
            let smooth = along_tree(packing, domain, counts, order, &rounds, &state);
            Some(smooth.unwrap_or(rounds))
        }
    }
}

/// Members along the tree: of each shape as many in each domain of its coarsest constraint as `rounds` have there.
/// `end` is the final state of `rounds`.
fn along_tree(
    packing: Packing<'_, '_>,
    place: DomainIx,
    counts: &Counts,
    order: &[usize],
    rounds: &[Run],
    end: &State,
) -> Option<Vec<Run>> {
    let Packing { survey, tier, loose, anchors, .. } = packing;
    let mut state = packing.state.clone();
    let mut begun = Anchors::default();
    let mut runs = Vec::new();
    for &slot in order.iter().filter(|slot| counts[**slot] > 0) {
        let own = || survey.skews.iter().zip(&end.levels).filter(|(skew, _)| skew.slot == slot);
        let coarsest =
            own().map(|(skew, _)| skew).filter(|skew| !skew.is_by_node()).min_by_key(|skew| skew.width());
        let group = |node: NodeIx| coarsest.and_then(|skew| skew.domain(node));
        let mut groups: Vec<(Option<u32>, u32)> = Vec::new();
        for run in rounds.iter().filter(|run| run.slot == slot) {
            let of = group(run.node);
            match groups.iter_mut().find(|(known, _)| *known == of) {
                Some((_, count)) => *count += run.count,
                None => groups.push((of, run.count)),
            }
        }
        for (of, count) in groups {
            let mut filler = Filler::new(survey, slot, loose, anchors, |node| {
                if group(node) != of {
                    return 0;
                }
                let by_node = own().filter(|(skew, _)| skew.is_by_node());
                let most = by_node.map(|(skew, level)| level.most_in_the_end(skew, node)).min();
                room(survey, &state, node, slot, tier).min(most.unwrap_or(u32::MAX))
            });
            filler.begun = std::mem::take(&mut begun);
            filler.fill(place, count)?;
            begun = filler.begun;
            for run in &filler.runs {
                if room(survey, &state, run.node, slot, tier) < run.count {
                    return None;
                }
                state.put(survey, run.node, slot, run.count, false);
            }
            runs.extend(filler.runs);
        }
    }
    state.is_even(survey).then_some(runs)
}

// Exhaustive search for a packing, node by node, within a number of steps.

/// Steps of one exhaustive search.
const MOST_STEPS: u32 = 1 << 17;

/// A packing of so many members of each shape on some nodes; `None` if there is none or the steps run out.
fn search(packing: Packing<'_, '_>, nodes: &[NodeIx], counts: &Counts, order: &[usize]) -> Option<Vec<Run>> {
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
            return self.state.is_even(self.survey) && comes_about(self.survey, &self.state.on);
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
            self.survey.give_up();
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

// In which order kube-scheduler admits members with required affinity: the members that they must be near have to be
// bound first.

/// Members tried as the first of those that want to be near each other.
const MOST_TRIES: u32 = 64;

/// Whether some order admits every member on some nodes, by shape.
fn comes_about(survey: &Survey<'_>, on: &HashMap<NodeIx, Counts>) -> bool {
    if survey.rules.near.is_empty() {
        return true;
    }
    let each = on.iter().flat_map(|(node, counts)| {
        let there = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        there.map(|(slot, _)| (*node, slot))
    });
    let mut waiting: Vec<(NodeIx, usize)> = each.collect();
    waiting.sort_unstable();
    let let_in = AdmittedMembers { survey, near: vec![HashSet::new(); survey.rules.near.len()] };
    let_in.rest(&waiting, &mut 0)
}

/// Members admitted so far.
#[derive(Clone)]
struct AdmittedMembers<'s, 'a> {
    survey: &'s Survey<'a>,
    /// By affinity rule: the label values of admitted members that it selects.
    near: Vec<HashSet<&'a Arc<str>>>,
}

impl AdmittedMembers<'_, '_> {
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
