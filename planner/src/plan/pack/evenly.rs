//! Packs members as evenly over domains as their `topologySpreadConstraints` ask, and close together within each.

use gantry_gang::DomainIx;

use super::Packing;
use super::state::{State, more, room};
use crate::plan::demand::Counts;
use crate::plan::fill::{Anchors, Filler, Run};
use crate::plan::scope::Place;
use crate::snapshot::NodeIx;

/// Round after round, on every node as many as the constraint allows at that moment: finds a packing where there is
/// one. Then along the tree with the same numbers in each domain, where that is possible.
pub(super) fn evenly(
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
        Place::Node(_) => Some(rounds),
        Place::Domain(domain) => {
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
