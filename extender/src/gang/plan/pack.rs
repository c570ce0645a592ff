//! Lays members of several shapes, or of shapes that mind where each other are, on the nodes of one domain. First in a few good orders; where none of
//! those succeeds and the nodes are few, by trying everything.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use gantry_gang::DomainIx;

use super::demand::Counts;
use super::fill::{Anchors, Filler, Run};
use super::order;
use super::rules::HOSTNAME;
use super::scope::Place;
use super::skew::Level;
use super::survey::{Survey, available};
use crate::snapshot::NodeIx;

/// Orders of shapes that are tried.
const MOST_ORDERS: usize = 6;
/// Nodes up to which everything is tried.
const MOST_NODES: usize = 64;
/// Steps of trying everything.
const MOST_STEPS: u32 = 50_000;

/// What is on the nodes while members are laid.
#[derive(Debug, Clone)]
pub(super) struct State {
    on: HashMap<NodeIx, Counts>,
    /// By rule of spreading and label value: members of its two shapes.
    values: HashMap<(usize, Arc<str>), [u32; 2]>,
    /// By constraint on how evenly members lie: what counts in its domains.
    levels: Vec<Level>,
    /// By rule of nearness and label value: members that others can be near to.
    near: Vec<HashMap<Arc<str>, u32>>,
}

/// What members of several shapes are laid with.
#[derive(Clone, Copy)]
pub(super) struct Packing<'s, 'a> {
    pub(super) survey: &'s Survey<'a>,
    /// The step of bandwidth that members must reach.
    pub(super) tier: usize,
    pub(super) loose: &'s [u32],
    pub(super) anchors: &'s Anchors,
    /// What is laid already.
    pub(super) state: &'s State,
}

impl Packing<'_, '_> {
    /// Whether kube-scheduler lets all in that are laid, in some order.
    fn lets_in(&self, runs: &[Run]) -> bool {
        if self.survey.rules.near.is_empty() {
            return true;
        }
        let mut state = self.state.clone();
        for run in runs {
            state.put(self.survey, run.node, run.slot, run.count, false);
        }
        order::comes_about(self.survey, &state.on)
    }
}

/// Where so many members of each shape go within a place; `None` if they do not fit, or that they do was not found.
pub(super) fn pack(packing: Packing<'_, '_>, place: Place, counts: &Counts) -> Option<Vec<Run>> {
    let Packing { survey, tier, .. } = packing;
    let nodes = nodes_of(survey, place);
    let mut orders = orders(survey, counts);
    for order in &orders {
        let found = if !survey.skews.is_empty() {
            evenly(packing, place, &nodes, counts, order)
        } else if survey.rules.spreads() {
            in_row(packing, &nodes, counts, order)
        } else {
            by_tree(packing, place, counts, order)
        };
        let lets_in = |runs: &Vec<Run>| packing.lets_in(runs);
        let found = found.filter(lets_in).or_else(|| {
            let open = survey.rules.open().is_some() && survey.skews.is_empty();
            open.then(|| in_row(packing, &nodes, counts, order))?
                .filter(lets_in)
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
        return None;
    }
    let mut search = Search {
        survey,
        order: &order,
        tier,
        left: counts.clone(),
        after: suffix_sums(survey, &open, tier),
        nodes: &open,
        state: packing.state.clone(),
        steps: 0,
        failed: HashSet::new(),
        runs: Vec::new(),
    };
    search.at(0).then_some(search.runs)
}

/// How many more members of a shape a node takes with what is laid already.
fn more(survey: &Survey<'_>, state: &State, node: NodeIx, slot: usize, tier: usize) -> u32 {
    if !state.is_near(survey, node, slot) {
        return 0;
    }
    let skews = survey.skews.iter().zip(&state.levels);
    let even = skews
        .filter(|(skew, _)| skew.slot == slot)
        .map(|(skew, level)| level.more(skew, node))
        .min();
    match even {
        Some(0) => 0,
        Some(even) => even.min(room(survey, state, node, slot, tier)),
        None => room(survey, state, node, slot, tier),
    }
}

/// The same, however uneven that is.
fn room(survey: &Survey<'_>, state: &State, node: NodeIx, slot: usize, tier: usize) -> u32 {
    let takes = survey.takes(node, slot, tier);
    let mut most = takes;
    for (rule, (a, b, key)) in survey.rules.spread.iter().enumerate() {
        let Some(value) = survey.label(node, key).filter(|_| *a == slot || *b == slot) else {
            continue;
        };
        let [of_a, of_b] = state
            .values
            .get(&(rule, Arc::clone(value)))
            .copied()
            .unwrap_or_default();
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
        let used = survey
            .shapes
            .iter()
            .enumerate()
            .fold(0u32, |used, (other, shape)| {
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

impl State {
    /// Nothing is laid yet.
    pub(super) fn of(survey: &Survey<'_>) -> Self {
        Self {
            on: HashMap::new(),
            values: HashMap::new(),
            levels: survey.skews.iter().map(Level::of).collect(),
            near: vec![HashMap::new(); survey.rules.near.len()],
        }
    }

    /// Whether those are near a node now that a member of a shape must be near to.
    fn is_near(&self, survey: &Survey<'_>, node: NodeIx, slot: usize) -> bool {
        let rules = survey.rules.near.iter().zip(&self.near);
        let mut open = rules.filter(|(rule, _)| rule.slot == slot && !rule.settled);
        open.all(|(rule, here)| {
            let value = survey.label(node, &rule.key);
            rule.there.contains(&node)
                || value.is_some_and(|value| here.get(value).is_some_and(|members| *members > 0))
                || rule.starts && here.values().all(|members| *members == 0)
        })
    }

    /// Whether the rules hold in the end that no other node can do anything for.
    fn is_near_on(&self, survey: &Survey<'_>, node: NodeIx) -> bool {
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

    /// Whether what is laid lies as evenly as it must in the end.
    fn is_even(&self, survey: &Survey<'_>) -> bool {
        survey.skews.iter().zip(&self.levels).all(|(skew, level)| {
            let mut given = self.on.iter().filter(|(_, on)| on[skew.slot] > 0);
            given.all(|(node, _)| level.holds(skew, *node))
        })
    }

    pub(super) fn put(&mut self, survey: &Survey<'_>, node: NodeIx, slot: usize, count: u32, back: bool) {
        let change = |number: &mut u32| {
            *number = if back {
                number.saturating_sub(count)
            } else {
                *number + count
            }
        };
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

/// Round after round, in each on every node as many as lie evenly then, which finds room where there is any; and with the same numbers in each
/// domain along the tree, where that can be.
fn evenly(
    packing: Packing<'_, '_>,
    place: Place,
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
        // Others that count came after.
        return None;
    }
    let rounds = || {
        let runs = open.iter().zip(&laid).flat_map(|(node, laid)| {
            let counts = laid.iter().enumerate().filter(|(_, count)| **count > 0);
            counts.map(|(slot, count)| Run {
                node: *node,
                slot,
                count: *count,
            })
        });
        runs.collect()
    };
    let rounds: Vec<Run> = rounds();
    match place {
        Place::Node(_) => Some(rounds),
        Place::Domain(domain) => {
            let smooth = along_tree(packing, domain, counts, order, &rounds, &state);
            Some(smooth.unwrap_or(rounds))
        }
    }
}

/// Members along the tree, of each shape as many in each domain of its coarsest constraint as `rounds` have there; `end` is how those end.
fn along_tree(
    packing: Packing<'_, '_>,
    place: DomainIx,
    counts: &Counts,
    order: &[usize],
    rounds: &[Run],
    end: &State,
) -> Option<Vec<Run>> {
    let Packing {
        survey,
        tier,
        loose,
        anchors,
        ..
    } = packing;
    let mut state = packing.state.clone();
    let mut begun = Anchors::default();
    let mut runs = Vec::new();
    for &slot in order.iter().filter(|slot| counts[**slot] > 0) {
        let own = || {
            survey
                .skews
                .iter()
                .zip(&end.levels)
                .filter(|(skew, _)| skew.slot == slot)
        };
        let coarsest = own()
            .map(|(skew, _)| skew)
            .filter(|skew| !skew.is_by_node())
            .min_by_key(|skew| skew.width());
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
                let most = by_node
                    .map(|(skew, level)| level.most_in_the_end(skew, node))
                    .min();
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

/// One shape after the other, each along the tree.
fn by_tree(packing: Packing<'_, '_>, place: Place, counts: &Counts, order: &[usize]) -> Option<Vec<Run>> {
    let Packing {
        survey,
        tier,
        loose,
        anchors,
        ..
    } = packing;
    let mut state = packing.state.clone();
    let mut begun = Anchors::default();
    let mut runs = Vec::new();
    for &slot in order {
        let members = counts[slot];
        if members == 0 {
            continue;
        }
        let laid = match place {
            Place::Node(node) => {
                let fits = more(survey, &state, node, slot, tier) >= members;
                vec![fits.then_some(Run {
                    node,
                    slot,
                    count: members,
                })?]
            }
            Place::Domain(domain) => {
                let mut filler = Filler::new(survey, slot, loose, anchors, |node| {
                    more(survey, &state, node, slot, tier)
                });
                filler.begun = std::mem::take(&mut begun);
                filler.fill(domain, members)?;
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

/// Node by node along the tree, of each shape as many as it takes.
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

/// Tries everything, node by node.
struct Search<'s, 'a> {
    survey: &'s Survey<'a>,
    order: &'s [usize],
    tier: usize,
    nodes: &'s [NodeIx],
    /// Members still to be laid.
    left: Counts,
    /// By node: what it and the nodes after it take of each shape at most.
    after: Vec<Counts>,
    state: State,
    steps: u32,
    /// Node and members left from where there is no way; not kept where what is behind matters besides.
    failed: HashSet<(usize, Counts)>,
    runs: Vec<Run>,
}

impl Search<'_, '_> {
    fn at(&mut self, index: usize) -> bool {
        if self.left.iter().all(|left| *left == 0) {
            return self.state.is_even(self.survey) && order::comes_about(self.survey, &self.state.on);
        }
        self.steps += 1;
        let short = self
            .after
            .get(index)
            .is_none_or(|after| after.iter().zip(&self.left).any(|(after, left)| after < left));
        if short || self.steps > MOST_STEPS || self.failed.contains(&(index, self.left.clone())) {
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

    /// Every number of the shape at `position` of the order, the most first.
    fn on_node(&mut self, index: usize, position: usize) -> bool {
        let (Some(&slot), Some(&node)) = (self.order.get(position), self.nodes.get(index)) else {
            let held = self
                .nodes
                .get(index)
                .is_none_or(|node| self.state.is_near_on(self.survey, *node));
            return held && self.at(index + 1);
        };
        // How even it is shows only in the end.
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
            if self.steps > MOST_STEPS {
                return false;
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

/// The nodes of a place, along the tree.
pub(super) fn nodes_of(survey: &Survey<'_>, place: Place) -> Vec<NodeIx> {
    let domain = match place {
        Place::Node(node) => return vec![node],
        Place::Domain(domain) => domain,
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

/// By shape: how many others come before it, each near the next.
fn depths(survey: &Survey<'_>) -> Vec<usize> {
    let slots = survey.shapes.len();
    let mut depth = vec![0; slots];
    for _ in 1..slots {
        for rule in survey.rules.near.iter().filter(|rule| !rule.settled) {
            let others = (0..slots).filter(|slot| *slot != rule.slot && rule.to[*slot]);
            let after = others.map(|slot| depth[slot] + 1).min().unwrap_or(0);
            depth[rule.slot] = after.min(slots);
        }
    }
    depth
}

/// Orders of shapes: those with most devices each first, but after those that they must be near to; then others.
fn orders(survey: &Survey<'_>, counts: &Counts) -> Vec<Vec<usize>> {
    let devices = |slot: &usize| -> u32 {
        let asks = survey.shapes.get(*slot).map(|shape| &shape.request.asks);
        asks.into_iter()
            .flatten()
            .fold(0, |sum, ask| sum.saturating_add(ask.devices))
    };
    let mut first: Vec<usize> = (0..counts.len()).collect();
    let depth = depths(survey);
    first.sort_by_key(|slot| {
        let size = std::cmp::Reverse(devices(slot));
        (depth[*slot], size, counts[*slot], *slot)
    });
    let mut orders = vec![first.clone()];
    // Each shape first once, the others as they were; then the other way round.
    for at in 1..first.len() {
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
