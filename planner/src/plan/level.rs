//! Levels a gang over its domains: 16 and 16 rather than 18 and 14. In the same domains and on no more nodes than the
//! tight filling, which is kept otherwise.

use std::collections::BTreeMap;

use gantry_gang::DomainIx;

use super::fill::{Anchors, Filler, Run};
use super::split::{Part, level};
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// Members in one of the smallest domains, or on a node outside all of them.
enum Share {
    Leaf(DomainIx, u32),
    Node(NodeIx, u32),
}

impl Filler<'_, '_> {
    /// Fills the nodes of a domain, as level over its smallest domains as can be; `None` if it takes fewer members.
    pub(super) fn fill_level(&mut self, domain: DomainIx, members: u32) -> Option<()> {
        let start = self.clone();
        self.fill(domain, members)?;
        let runs = self.runs.get(start.runs.len()..).unwrap_or_default();
        let shares = shares(self.survey, runs);
        let leaves = shares.iter().filter_map(|share| match share {
            Share::Leaf(leaf, count) => Some((*leaf, *count)),
            Share::Node(..) => None,
        });
        let (leaves, counts): (Vec<DomainIx>, Vec<u32>) = leaves.unzip();
        // Near the gang's other members, if it has reservations.
        if leaves.len() < 2 || !self.anchors.is_empty() {
            return Some(());
        }
        let parts: Vec<Part> = leaves.iter().map(|leaf| start.part(*leaf)).collect();
        let most = counts.iter().copied().max().unwrap_or(0);
        let least = counts.iter().copied().min().unwrap_or(0);
        // In whole nodes first, so that fewer nodes are broken.
        let node = runs.iter().map(|run| run.count).max().unwrap_or(1);
        for unit in [node, 1] {
            if most - least <= unit {
                break;
            }
            let Some(given) = in_units(&parts, counts.iter().sum(), unit) else {
                continue;
            };
            let mut given = given.into_iter();
            let mut even = start.clone();
            let laid = shares.iter().all(|share| match *share {
                Share::Leaf(leaf, _) => given.next().and_then(|count| even.fill(leaf, count)).is_some(),
                Share::Node(node, count) => {
                    even.put(node, count);
                    true
                }
            });
            if laid && !even.begun.is_wider_than(&self.begun) {
                *self = even;
                break;
            }
        }
        Some(())
    }

    /// One of the smallest domains as a part; less for one that has members of the gang.
    pub(super) fn part(&self, leaf: DomainIx) -> Part {
        Part {
            room: self.sums.get(leaf.0 as usize).copied().unwrap_or(0),
            fresh: self.is_fresh(leaf) && !self.begun.are_in(leaf),
        }
    }
}

/// Runs of one shape along the tree, by smallest domain.
fn shares(survey: &Survey<'_>, runs: &[Run]) -> Vec<Share> {
    let mut shares: Vec<Share> = Vec::new();
    for run in runs {
        let of = survey.fabric.of_node.get(run.node.0 as usize).copied();
        let leaf = of.filter(|of| survey.domain(*of).is_some_and(|of| of.children.is_empty()));
        match (leaf, shares.last_mut()) {
            (Some(leaf), Some(Share::Leaf(last, count))) if *last == leaf => *count += run.count,
            (Some(leaf), _) => shares.push(Share::Leaf(leaf, run.count)),
            (None, _) => shares.push(Share::Node(run.node, run.count)),
        }
    }
    shares
}

/// So many members over all of some parts, level in units of `unit`; the remainder goes where least is.
fn in_units(parts: &[Part], members: u32, unit: u32) -> Option<Vec<u32>> {
    let (units, rest) = (members / unit, members % unit);
    let whole: Vec<Part> = parts
        .iter()
        .map(|part| Part {
            room: part.room / unit,
            ..*part
        })
        .collect();
    let mut given = level(&whole, units)?;
    given.iter_mut().for_each(|given| *given *= unit);
    if rest > 0 {
        let fitting = (0..parts.len()).filter(|at| parts[*at].room - given[*at] >= rest);
        let least = fitting.min_by_key(|at| (given[*at], std::cmp::Reverse(*at)))?;
        given[least] += rest;
    }
    // Otherwise another part would do.
    given.iter().all(|given| *given > 0).then_some(given)
}

/// Whether some runs are wider than others: in more domains or on more nodes.
pub(super) fn is_wider(survey: &Survey<'_>, runs: &[Run], than: &[Run]) -> bool {
    let extent = |runs: &[Run]| {
        let mut all = Anchors::default();
        for run in runs {
            all.add(survey, run.node);
        }
        all
    };
    extent(runs).is_wider_than(&extent(than))
}

/// The largest difference in members between the smallest domains of some runs.
pub(super) fn unevenness(survey: &Survey<'_>, runs: &[Run]) -> u32 {
    let mut leaves: BTreeMap<DomainIx, u32> = BTreeMap::new();
    for run in runs {
        if let Some(of) = survey.fabric.of_node.get(run.node.0 as usize) {
            *leaves.entry(*of).or_default() += run.count;
        }
    }
    let (most, least) = (leaves.values().max(), leaves.values().min());
    most.zip(least).map_or(0, |(most, least)| most - least)
}
