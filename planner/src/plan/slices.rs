//! Members in slices: so many together in one domain of a level, whole slices over as few domains as can be. One shape
//! is split exactly; several shapes, or a gang with reservations, slice by slice.

use std::collections::{BTreeMap, BTreeSet};

use gantry_gang::DomainIx;
use gantry_gang::protocol::PlanRequest;

use super::demand::RankedMember;
use super::fill::is_wider;
use super::fill::{Filler, Run};
use super::pack::{Packing, pack};
use super::scope::FabricPart;
use super::split::{Part, level, split};
use super::survey::Survey;

/// Slices of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slices {
    /// Members of a slice.
    pub(super) size: u32,
    /// The level of which one domain holds a slice.
    pub(super) level: usize,
}

impl Filler<'_, '_> {
    /// The most members that fit in a domain above the slices' level without breaking a slice: whole slices, and
    /// perhaps a last smaller one.
    pub(super) fn takes_sliced(&self, domain: DomainIx, slices: Slices, members: u32) -> u32 {
        let blocks = self.rooms_of(domain, slices.level);
        if let [(_, room)] = blocks[..] {
            return room.min(members);
        }
        let whole: u32 = blocks.iter().fold(0, |sum, (_, room)| sum.saturating_add(room / slices.size));
        let wanted = members / slices.size;
        if whole > wanted {
            return members;
        }
        let rest = blocks.iter().map(|(_, room)| room % slices.size).max().unwrap_or(0);
        let last = if whole == wanted { members % slices.size } else { 0 };
        whole * slices.size + if rest >= last { last } else { 0 }
    }

    /// Places members in slices on the nodes of a domain, level over the level's domains if that makes it no wider;
    /// `None` if they do not fit.
    pub(super) fn fill_sliced(&mut self, domain: DomainIx, slices: Slices, members: u32) -> Option<()> {
        let blocks = self.rooms_of(domain, slices.level);
        if let [(block, _)] = blocks[..] {
            return self.fill_level(block, members);
        }
        let mut even = self.clone();
        let mut shares = Vec::new();
        self.share_slices(domain, slices, members / slices.size, &mut shares)?;
        self.fill_shares(domain, slices, &shares, members % slices.size)?;
        let parts = shares.iter().map(|(block, _)| {
            let part = even.part(*block);
            Part { room: part.room / slices.size, ..part }
        });
        let parts: Vec<Part> = parts.collect();
        let level = level(&parts, members / slices.size).unwrap_or_default();
        for ((_, count), level) in shares.iter_mut().zip(level) {
            *count = level;
        }
        let laid = even.fill_shares(domain, slices, &shares, members % slices.size);
        if laid.is_some() && !even.begun.is_wider_than(&self.begun) {
            *self = even;
        }
        Some(())
    }

    /// So many slices in each of some domains of the level, and `rest` members more.
    fn fill_shares(
        &mut self,
        domain: DomainIx,
        slices: Slices,
        shares: &[(DomainIx, u32)],
        rest: u32,
    ) -> Option<()> {
        for (block, count) in shares {
            self.fill_level(*block, count * slices.size)?;
        }
        if rest == 0 {
            return Some(());
        }
        // The rest goes where the gang is, otherwise where it leaves least.
        let blocks = self.rooms_of(domain, slices.level);
        let fitting = blocks.into_iter().filter(|(_, room)| *room >= rest);
        let (block, _) = fitting.min_by_key(|(block, room)| (!self.begun.are_in(*block), *room, *block))?;
        self.fill(block, rest)
    }

    /// Slices by domain of the level, in as few domains as can be.
    fn share_slices(
        &self,
        domain: DomainIx,
        slices: Slices,
        count: u32,
        shares: &mut Vec<(DomainIx, u32)>,
    ) -> Option<()> {
        if count == 0 {
            return Some(());
        }
        let of = self.survey.domain(domain)?;
        if of.level.is_some_and(|level| level >= slices.level) || of.children.is_empty() {
            shares.push((domain, count));
            return Some(());
        }
        let parts: Vec<Part> = of
            .children
            .iter()
            .map(|child| {
                let blocks = self.rooms_of(*child, slices.level);
                let room =
                    blocks.iter().fold(0, |sum: u32, (_, room)| sum.saturating_add(room / slices.size));
                Part { room, fresh: false }
            })
            .collect();
        for (child, count) in of.children.iter().zip(split(&parts, count)?) {
            self.share_slices(*child, slices, count, shares)?;
        }
        Some(())
    }

    fn rooms_of(&self, domain: DomainIx, level: usize) -> Vec<(DomainIx, u32)> {
        let room = |block: DomainIx| self.sums.get(block.0 as usize).copied().unwrap_or(0);
        let blocks = blocks(self.survey, domain, level).into_iter();
        blocks.map(|block| (block, room(block))).collect()
    }
}

/// The domains of a level within a domain. A domain that ends above the level, for lack of labels, counts as one.
fn blocks(survey: &Survey<'_>, domain: DomainIx, level: usize) -> Vec<DomainIx> {
    let mut blocks = Vec::new();
    let mut open = vec![domain];
    while let Some(next) = open.pop() {
        match survey.domain(next) {
            Some(of) if of.level.is_none_or(|own| own < level) && !of.children.is_empty() => {
                open.extend(of.children.iter().rev());
            }
            Some(_) => blocks.push(next),
            None => {}
        }
    }
    blocks
}

/// Ordinals of members that have reservations. Unknown ones are the ranks if those have no gaps; otherwise positions in
/// the order of ranks.
pub(super) fn placed_ordinals(wanted: &PlanRequest) -> Vec<u32> {
    let all = &wanted.placed;
    let known = all.iter().any(|sibling| sibling.ordinal.is_some());
    let ordinals = all.iter().filter_map(|sibling| sibling.ordinal.or(sibling.rank));
    let ordinals: Vec<u32> = ordinals.collect();
    let distinct: BTreeSet<&u32> = ordinals.iter().collect();
    let total = wanted.terms.max.max(count(all.len() + wanted.members.len()));
    let dense = distinct.last().is_none_or(|last| **last < total);
    if distinct.len() == all.len() && (known || dense) {
        return ordinals;
    }
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|at| (all[*at].rank.is_none(), all[*at].rank));
    let mut ordinals = vec![0; all.len()];
    for (ordinal, at) in (0u32..).zip(order) {
        ordinals[at] = ordinal;
    }
    ordinals
}

/// Members with their ordinals, sorted by those: positions in the order of ranks. If others have reservations, each
/// member gets the first ordinal that is unused and agrees with its rank.
pub(super) fn ordinals<'w>(
    wanted: &PlanRequest,
    members: Vec<RankedMember<'w>>,
) -> Vec<(u32, RankedMember<'w>)> {
    let ranks = wanted.placed.iter().map(|sibling| sibling.rank);
    let taken: BTreeMap<u32, Option<u32>> = placed_ordinals(wanted).into_iter().zip(ranks).collect();
    let end = taken.keys().last().map_or(0, |last| last.saturating_add(1));
    let new = (0..end.saturating_add(count(members.len()))).filter(|ordinal| !taken.contains_key(ordinal));
    let mut new: BTreeSet<u32> = new.collect();
    let mut ordered: Vec<(u32, RankedMember<'w>)> = Vec::with_capacity(members.len());
    for asked in members {
        let may_have = |ordinal: &&u32| {
            let before = taken.range(..**ordinal).rev().find_map(|(_, rank)| *rank);
            let after = taken.range(**ordinal..).find_map(|(_, rank)| *rank);
            asked.member.rank.is_none_or(|rank| {
                before.is_none_or(|before| before <= rank) && after.is_none_or(|after| rank <= after)
            })
        };
        let found = new.iter().find(may_have).or_else(|| new.first()).copied();
        if let Some(ordinal) = found {
            new.remove(&ordinal);
            ordered.push((ordinal, asked));
        }
    }
    ordered.sort_by_key(|(ordinal, _)| *ordinal);
    ordered
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Places members, sorted by ordinal, slice by slice: next to the slice's other members, otherwise where the gang is,
/// otherwise where it leaves least. `None` if a slice does not fit. `sums` are the members of each shape that the
/// domains take.
pub(super) fn by_slices(
    packing: Packing<'_, '_>,
    sums: &[u32],
    slices: Slices,
    members: &[(u32, RankedMember<'_>)],
) -> Option<Vec<Run>> {
    let survey = packing.survey;
    let slots = survey.shapes.len();
    let all = blocks(survey, gantry_gang::Fabric::ROOT, slices.level);
    let mut groups: Vec<(u32, Vec<u32>)> = Vec::new();
    for (ordinal, asked) in members {
        let slice = ordinal / slices.size;
        if groups.last().is_none_or(|(last, _)| *last != slice) {
            groups.push((slice, vec![0; slots]));
        }
        if let Some((_, counts)) = groups.last_mut() {
            counts[asked.slot] += 1;
        }
    }
    let tight = one_by_one(packing, sums, slices, (&all, &groups), |_, _| true)?;
    // Near the gang's other members, if it has reservations.
    if !packing.anchors.is_empty() {
        return Some(tight.runs);
    }
    // As many slices in one domain as in another, as far as the domains' sums show.
    let total = |slot: usize| groups.iter().map(|(_, counts)| u64::from(counts[slot])).sum::<u64>();
    let parts = tight.laid.iter().map(|(block, laid)| {
        let takes = |slot: usize| u64::from(sums.get(block.0 as usize * slots + slot).copied().unwrap_or(0));
        let asked = (0..slots).filter(|slot| total(*slot) > 0);
        let most = asked.map(|slot| takes(slot) * groups.len() as u64 / total(slot)).min();
        let room = u32::try_from(most.unwrap_or(0)).unwrap_or(u32::MAX).max(*laid);
        Part { room, fresh: false }
    });
    let parts: Vec<Part> = parts.collect();
    let quotas: BTreeMap<DomainIx, u32> = level(&parts, count(groups.len()))
        .into_iter()
        .flat_map(|level| tight.laid.keys().copied().zip(level))
        .collect();
    let even = one_by_one(packing, sums, slices, (&all, &groups), |block, laid| {
        quotas.get(&block).is_some_and(|quota| laid < *quota)
    });
    let even = even.filter(|even| !is_wider(survey, &even.runs, &tight.runs));
    Some(even.unwrap_or(tight).runs)
}

/// Slices placed so far.
struct PlacedSlices {
    runs: Vec<Run>,
    /// Number of slices by domain.
    laid: BTreeMap<DomainIx, u32>,
}

/// Places slices, one after the other, in domains that have fewer than a limit.
fn one_by_one(
    packing: Packing<'_, '_>,
    sums: &[u32],
    slices: Slices,
    (all, groups): (&[DomainIx], &[(u32, Vec<u32>)]),
    may_take: impl Fn(DomainIx, u32) -> bool,
) -> Option<PlacedSlices> {
    let survey = packing.survey;
    let slots = survey.shapes.len();
    let mut laid_in: BTreeMap<DomainIx, u32> = BTreeMap::new();
    let mut state = packing.state.clone();
    let mut anchors = packing.anchors.clone();
    let mut runs = Vec::new();
    for (slice, counts) in groups {
        let slice = *slice;
        let mates = packing.anchors.ordinals.iter().find(|(ordinal, _)| ordinal / slices.size == slice);
        let own = mates.and_then(|(_, node)| all.iter().find(|block| survey.lies_in(*node, **block)));
        let mut candidates: Vec<(bool, u64, DomainIx)> = Vec::new();
        for block in all {
            let laid = laid_in.get(block).copied().unwrap_or(0);
            let takes = |slot: usize| sums.get(block.0 as usize * slots + slot).copied().unwrap_or(0);
            if may_take(*block, laid)
                && own.is_none_or(|own| own == block)
                && (0..slots).all(|slot| takes(slot) >= counts[slot])
            {
                let over = (0..slots).map(|slot| u64::from(takes(slot) - counts[slot])).sum();
                candidates.push((!anchors.are_in(*block), over, *block));
            }
        }
        candidates.sort_unstable();
        let laid = candidates.iter().find_map(|(_, _, block)| {
            let packing = Packing { anchors: &anchors, state: &state, ..packing };
            Some((*block, pack(packing, FabricPart::Domain(*block), counts)?))
        });
        let (block, laid) = laid?;
        *laid_in.entry(block).or_default() += 1;
        for run in &laid {
            state.put(survey, run.node, run.slot, run.count, false);
            anchors.add(survey, run.node);
        }
        runs.extend(laid);
    }
    Some(PlacedSlices { runs, laid: laid_in })
}
