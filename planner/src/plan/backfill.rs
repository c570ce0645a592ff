//! Backfill reservation: the nodes kept free for the first gang of the queue while it does not fit, so that backfill
//! does not delay it.

use std::cmp::Reverse;

use super::demand::{Counts, Demand};
use super::diagnosis::widest;
use super::fill::Anchors;
use super::pack::nodes_of;
use super::scope::{Bounds, FabricPart, places, scopes};
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// Nodes that would hold the minimum if nothing else were on them: in the domain with the fewest missing devices, the
/// nodes with the fewest missing ones. Empty if no domain could hold it.
pub(super) fn nodes(
    now: &Survey<'_>,
    empty: &Survey<'_>,
    anchors: &Anchors,
    demand: &Demand<'_>,
    bounds: Bounds,
) -> Vec<NodeIx> {
    let counts = demand.first(demand.must);
    let marked = candidates(now, empty, anchors, demand, bounds)
        .into_iter()
        .filter_map(|place| mark(now, empty, place, &counts));
    marked
        .min_by_key(|marked| (marked.missing, marked.nodes.len(), marked.first.clone()))
        .map(|marked| marked.nodes)
        .unwrap_or_default()
}

/// Places that would hold the minimum, each shape by itself, if nothing else were on them: those with the fewest
/// missing devices first.
pub(super) fn candidates(
    now: &Survey<'_>,
    empty: &Survey<'_>,
    anchors: &Anchors,
    demand: &Demand<'_>,
    bounds: Bounds,
) -> Vec<FabricPart> {
    let counts = demand.first(demand.must);
    let slots = counts.len();
    let tier = empty.lowest_tier();
    let sums = empty.sums(tier);
    let holds = |place: &FabricPart| match *place {
        FabricPart::Node(node) => (0..slots).all(|slot| empty.takes(node, slot, tier) >= counts[slot]),
        FabricPart::Domain(domain) => {
            let of = |slot: usize| sums.get(domain.0 as usize * slots + slot).copied().unwrap_or(0);
            (0..slots).all(|slot| of(slot) >= counts[slot])
        }
    };
    let asked = (0..slots).fold(0, |sum: u64, slot| sum.saturating_add(asked(now, slot, counts[slot])));
    let scope = scopes(now, widest(bounds)).pop();
    let mut candidates = scope.map_or_else(Vec::new, |scope| places(now, anchors, scope));
    candidates.retain(holds);
    candidates.sort_by_cached_key(|place| {
        let nodes = nodes_of(now, *place);
        let first = nodes.first().map(|node| now.name(*node));
        let serve = nodes.iter().filter(|node| (0..slots).any(|slot| empty.takes(**node, slot, tier) > 0));
        let free: u64 = serve.map(|node| u64::from(now.free_devices(*node))).sum();
        (asked.saturating_sub(free), first)
    });
    candidates
}

/// Nodes of one place.
struct PlaceNodes {
    /// Devices that are not free.
    missing: u64,
    /// Ties go to the first by name.
    first: String,
    nodes: Vec<NodeIx>,
}

fn mark(now: &Survey<'_>, empty: &Survey<'_>, place: FabricPart, counts: &Counts) -> Option<PlaceNodes> {
    let nodes = nodes_of(now, place);
    let mut marked = PlaceNodes {
        missing: 0,
        first: nodes.first().map(|node| now.name(*node).to_owned()).unwrap_or_default(),
        nodes: Vec::new(),
    };
    let mut used = vec![false; nodes.len()];
    for (slot, count) in counts.iter().enumerate() {
        // Missing devices per member in thousandths; then the emptiest node.
        let mut order: Vec<(u64, Reverse<u32>, usize, u32)> = Vec::new();
        for (index, node) in nodes.iter().enumerate().filter(|(index, _)| !used[*index]) {
            let holds = empty.takes(*node, slot, empty.lowest_tier());
            if holds > 0 {
                let lacks = missing(now, *node, slot, holds);
                order.push((lacks * 1000 / u64::from(holds), Reverse(now.free_devices(*node)), index, holds));
            }
        }
        order.sort_unstable();
        let mut left = *count;
        for (_, _, index, holds) in order {
            if left == 0 {
                break;
            }
            used[index] = true;
            marked.missing += missing(now, nodes[index], slot, holds.min(left));
            marked.nodes.push(nodes[index]);
            left -= holds.min(left);
        }
        if left > 0 {
            return None;
        }
    }
    marked.nodes.sort_unstable();
    Some(marked)
}

/// Devices that a node lacks for so many members.
fn missing(now: &Survey<'_>, node: NodeIx, slot: usize, members: u32) -> u64 {
    asked(now, slot, members).saturating_sub(u64::from(now.free_devices(node)))
}

/// Devices that so many members of a shape ask for.
fn asked(now: &Survey<'_>, slot: usize, members: u32) -> u64 {
    let asks = now.shapes.get(slot).map(|shape| shape.request.asks.iter());
    let asks = asks.into_iter().flatten();
    asks.map(|ask| u64::from(ask.devices) * u64::from(members)).sum()
}
