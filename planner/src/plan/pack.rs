//! Packs members of several shapes, or with rules about each other's nodes, into one domain: first in a few good
//! orders, then, where none succeeds and the nodes are few, by exhaustive search.

mod evenly;
mod search;
mod state;

use gantry_gang::DomainIx;

use self::evenly::evenly;
use self::search::search;
pub(super) use self::state::State;
use self::state::more;
use super::demand::Counts;
use super::fill::{Anchors, Filler, Run};
use super::fill::{is_wider, unevenness};
use super::order;
use super::scope::Place;
use super::survey::Survey;
use crate::snapshot::NodeIx;

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
        order::comes_about(self.survey, &state.on)
    }
}

/// Packs so many members of each shape into a place; `None` if they do not fit or no packing was found.
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
        return None;
    }
    search(packing, &open, counts, &order)
}

/// The packing made as level over the smallest domains as it can be without getting wider.
pub(super) fn leveled(packing: Packing<'_, '_>, place: Place, counts: &Counts, packed: Vec<Run>) -> Vec<Run> {
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
    place: Place,
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
            Place::Node(node) => {
                let fits = more(survey, &state, node, slot, tier) >= members;
                vec![fits.then_some(Run { node, slot, count: members })?]
            }
            Place::Domain(domain) => {
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
