//! Fills the nodes of a domain with members of one shape, down the tree: at each step the fewest parts, so that
//! neighbours in rank are neighbours in the fabric and unused parts stay whole. The survey counts how many each node
//! takes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use gantry_gang::DomainIx;
use gantry_gang::protocol::PlanRequest;

use super::demand::Counts;
use super::slices::placed_ordinals;
use super::split::{Part, level, split};
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// Members of one shape on one node. A plan is a sequence of runs along the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) node: NodeIx,
    /// Index of the shape.
    pub(super) slot: usize,
    pub(super) count: u32,
}

/// Where other members of the gang are: domains and nodes that are used first.
#[derive(Debug, Clone, Default)]
pub(super) struct Anchors {
    pub(super) nodes: BTreeSet<NodeIx>,
    /// Number of those nodes by domain.
    domains: BTreeMap<DomainIx, usize>,
    /// The ordinals of the members there ([`super::slices::ordinals`]).
    pub(super) ordinals: Vec<(u32, NodeIx)>,
}

impl Anchors {
    pub(super) fn of(survey: &Survey<'_>, wanted: &PlanRequest) -> Self {
        let mut anchors = Self::default();
        for (sibling, ordinal) in wanted.placed.iter().zip(placed_ordinals(wanted)) {
            if let Some(node) = survey.input.snapshot.find(sibling.node.as_str()) {
                anchors.add(survey, node);
                anchors.ordinals.push((ordinal, node));
            }
        }
        anchors
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Whether none is outside a domain.
    pub(super) fn all_in(&self, domain: DomainIx) -> bool {
        self.domains.get(&domain).copied().unwrap_or(0) == self.nodes.len()
    }

    /// Whether the gang has members in a domain.
    pub(super) fn are_in(&self, domain: DomainIx) -> bool {
        self.domains.contains_key(&domain)
    }

    /// Whether its members are in more domains, or on more nodes, than those of another.
    pub(super) fn is_wider_than(&self, other: &Self) -> bool {
        self.domains.len() > other.domains.len() || self.nodes.len() > other.nodes.len()
    }

    pub(super) fn add(&mut self, survey: &Survey<'_>, node: NodeIx) {
        if !self.nodes.insert(node) {
            return;
        }
        let mut at = survey.fabric.of_node.get(node.0 as usize).copied();
        while let Some(domain) = at {
            *self.domains.entry(domain).or_default() += 1;
            at = survey.domain(domain).and_then(|domain| domain.parent);
        }
    }
}

/// What each node still takes of one shape.
#[derive(Clone)]
pub(super) struct Filler<'s, 'a> {
    pub(super) survey: &'s Survey<'a>,
    pub(super) slot: usize,
    /// By node.
    pub(super) rooms: Vec<u32>,
    /// By domain.
    pub(super) sums: Vec<u32>,
    pub(super) loose: &'s [u32],
    pub(super) anchors: &'s Anchors,
    /// Nodes and domains that have members of this plan.
    pub(super) begun: Anchors,
    pub(super) runs: Vec<Run>,
}

impl<'s, 'a> Filler<'s, 'a> {
    /// Starts with the number of members that each node takes.
    pub(super) fn new(
        survey: &'s Survey<'a>,
        slot: usize,
        loose: &'s [u32],
        anchors: &'s Anchors,
        takes: impl Fn(NodeIx) -> u32,
    ) -> Self {
        let nodes = survey.input.snapshot.nodes.len();
        let rooms = (0..nodes).map(|node| takes(NodeIx(u32::try_from(node).unwrap_or(u32::MAX))));
        let rooms: Vec<u32> = rooms.collect();
        let mut sums = vec![0u32; survey.fabric.domains.len()];
        for (index, domain) in survey.fabric.domains.iter().enumerate().rev() {
            for node in &domain.nodes {
                sums[index] = sums[index].saturating_add(rooms.get(*node as usize).copied().unwrap_or(0));
            }
            if let Some(parent) = domain.parent {
                sums[parent.0 as usize] = sums[parent.0 as usize].saturating_add(sums[index]);
            }
        }
        Self { survey, slot, rooms, sums, loose, anchors, begun: Anchors::default(), runs: Vec::new() }
    }

    /// Fills the nodes of a domain; `None` if it takes fewer members.
    pub(super) fn fill(&mut self, domain: DomainIx, members: u32) -> Option<()> {
        if members == 0 {
            return Some(());
        }
        let of = self.survey.domain(domain)?;
        let mut parts: Vec<Piece> = of.children.iter().map(|child| self.domain_piece(*child)).collect();
        parts.extend(of.nodes.iter().map(|node| self.node_piece(NodeIx(*node))));
        parts.retain(|piece| piece.part.room > 0);
        let survey = self.survey;
        parts.sort_by(|a, b| {
            let names = || match (a.what, b.what) {
                (FillUnit::Node(a), FillUnit::Node(b)) => survey.name(a).cmp(survey.name(b)),
                (FillUnit::Domain(a), FillUnit::Domain(b)) => a.cmp(&b),
                (FillUnit::Domain(_), FillUnit::Node(_)) => std::cmp::Ordering::Less,
                (FillUnit::Node(_), FillUnit::Domain(_)) => std::cmp::Ordering::Greater,
            };
            a.key.cmp(&b.key).then_with(names)
        });
        let mut given = self.share(&parts, members)?;
        // In the order of domains and nodes along the tree, not of fit.
        let mut order: Vec<usize> = (0..parts.len()).filter(|at| given[*at] > 0).collect();
        order.sort_by(|a, b| match (parts[*a].what, parts[*b].what) {
            (FillUnit::Node(a), FillUnit::Node(b)) => survey.name(a).cmp(survey.name(b)),
            (FillUnit::Domain(a), FillUnit::Domain(b)) => a.cmp(&b),
            (FillUnit::Domain(_), FillUnit::Node(_)) => std::cmp::Ordering::Less,
            (FillUnit::Node(_), FillUnit::Domain(_)) => std::cmp::Ordering::Greater,
        });
        for at in order {
            let count = std::mem::take(&mut given[at]);
            match parts[at].what {
                FillUnit::Node(node) => self.put(node, count),
                FillUnit::Domain(domain) => self.fill(domain, count)?,
            }
        }
        Some(())
    }

    /// Parts with members of the gang are filled first; the rest is split exactly.
    fn share(&self, parts: &[Piece], members: u32) -> Option<Vec<u32>> {
        let near: Vec<Part> = parts
            .iter()
            .map(|piece| Part { room: if piece.near { piece.part.room } else { 0 }, ..piece.part })
            .collect();
        let there: u32 = near.iter().fold(0, |sum, part| sum.saturating_add(part.room));
        if there == 0 {
            let parts: Vec<Part> = parts.iter().map(|piece| piece.part).collect();
            return split(&parts, members);
        }
        if there >= members {
            return split(&near, members);
        }
        let far: Vec<Part> = parts
            .iter()
            .map(|piece| Part { room: if piece.near { 0 } else { piece.part.room }, ..piece.part })
            .collect();
        let more = split(&far, members - there)?;
        Some(near.iter().zip(more).map(|(near, far)| near.room + far).collect())
    }

    pub(super) fn put(&mut self, node: NodeIx, count: u32) {
        if let Some(room) = self.rooms.get_mut(node.0 as usize) {
            *room = room.saturating_sub(count);
        }
        let mut at = self.survey.fabric.of_node.get(node.0 as usize).copied();
        while let Some(domain) = at {
            if let Some(sum) = self.sums.get_mut(domain.0 as usize) {
                *sum = sum.saturating_sub(count);
            }
            at = self.survey.domain(domain).and_then(|domain| domain.parent);
        }
        self.begun.add(self.survey, node);
        self.runs.push(Run { node, slot: self.slot, count });
    }

    fn domain_piece(&self, domain: DomainIx) -> Piece {
        let room = self.sums.get(domain.0 as usize).copied().unwrap_or(0);
        Piece {
            what: FillUnit::Domain(domain),
            part: Part { room, fresh: room > 0 && self.is_fresh(domain) },
            near: self.anchors.are_in(domain) || self.begun.are_in(domain),
            key: (Reverse(0), self.loose.get(domain.0 as usize).copied().unwrap_or(0)),
        }
    }

    fn node_piece(&self, node: NodeIx) -> Piece {
        let room = self.rooms.get(node.0 as usize).copied().unwrap_or(0);
        let liked = if room == 0 { 0 } else { self.survey.likes(node, self.slot) };
        Piece {
            what: FillUnit::Node(node),
            part: Part { room, fresh: room > 0 && self.survey.is_fresh(node) },
            near: self.anchors.nodes.contains(&node) || self.begun.nodes.contains(&node),
            key: (Reverse(liked), if room == 0 { 0 } else { self.survey.free_devices(node) }),
        }
    }

    pub(super) fn is_fresh(&self, domain: DomainIx) -> bool {
        self.survey.domain(domain).is_some_and(|of| {
            of.children.iter().all(|child| self.is_fresh(*child))
                && of.nodes.iter().all(|node| self.survey.is_fresh(NodeIx(*node)))
        })
    }
}

/// A part of a domain.
struct Piece {
    what: FillUnit,
    part: Part,
    /// The gang has members there.
    near: bool,
    /// Of parts with equal room the lower goes first: preference of the pods, then fewest free devices.
    key: (Reverse<i64>, u32),
}

#[derive(Clone, Copy)]
enum FillUnit {
    Domain(DomainIx),
    Node(NodeIx),
}

/// Number of members by shape in some runs.
pub(super) fn counts(runs: &[Run], slots: usize) -> Counts {
    let mut counts = vec![0; slots];
    for run in runs {
        counts[run.slot] += run.count;
    }
    counts
}

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
    let whole: Vec<Part> = parts.iter().map(|part| Part { room: part.room / unit, ..*part }).collect();
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
