//! Which members of a gang are placed: how many of each shape, how many at least, and in which order they are dropped
//! where not all fit. Independent of nodes.

use std::sync::Arc;

use gantry_gang::protocol::{MemberRequest, PlanRequest, ShapeId};

/// Number of members by index into [`Demand::shapes`].
pub(super) type Counts = Vec<u32>;

/// Mixes of shapes tried for the minimum.
const MOST_MIXES: usize = 256;
/// Mixes times shapes: packing a mix takes longer the more shapes it has.
const MOST_MIXED: usize = 8 * MOST_MIXES;

/// The members that a gang wants placed.
#[derive(Debug)]
pub(super) struct Demand<'w> {
    pub(super) wanted: &'w PlanRequest,
    /// The distinct shapes, in the order of their first members.
    pub(super) shapes: Vec<ShapeId>,
    /// The members in order of preference, those that roles need first, each with the index of its shape.
    members: Vec<RankedMember<'w>>,
    /// Members at the front that roles need.
    needed: usize,
    /// The minimum.
    pub(super) must: u32,
    /// The maximum.
    pub(super) most: u32,
}

/// A member.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankedMember<'w> {
    /// Its position among all members, which are sorted by rank.
    at: usize,
    pub(super) member: &'w MemberRequest,
    /// Index of its shape.
    pub(super) slot: usize,
}

impl<'w> Demand<'w> {
    pub(super) fn of(wanted: &'w PlanRequest) -> Self {
        let mut shapes: Vec<ShapeId> = Vec::new();
        let mut members = Vec::with_capacity(wanted.members.len());
        for (at, member) in wanted.members.iter().enumerate() {
            let known = shapes.iter().position(|shape| *shape == member.shape);
            let slot = known.unwrap_or_else(|| {
                shapes.push(member.shape);
                shapes.len() - 1
            });
            members.push(RankedMember { at, member, slot });
        }
        // A gang with reservations has its roles: the rest are replacements and surplus.
        let mut owed: Vec<(&Arc<str>, u32)> = if wanted.placed.is_empty() {
            wanted.terms.by_role.iter().map(|(role, least)| (role, *least)).collect()
        } else {
            Vec::new()
        };
        let (first, rest): (Vec<_>, Vec<_>) = members.into_iter().partition(|asked: &RankedMember<'_>| {
            let owed = owed.iter_mut().find(|(role, least)| **role == asked.member.role && *least > 0);
            owed.map(|(_, least)| *least -= 1).is_some()
        });
        let needed = first.len();
        let members: Vec<_> = first.into_iter().chain(rest).collect();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let must = wanted.must.max(count(needed));
        let room = wanted.terms.max.saturating_sub(count(wanted.placed.len()));
        Self { wanted, shapes, needed, must, most: room.max(must).min(count(members.len())), members }
    }

    /// The same without members beyond the minimum.
    pub(super) fn least_of(wanted: &'w PlanRequest) -> Self {
        let demand = Self::of(wanted);
        Self { most: demand.must.min(demand.most), ..demand }
    }

    /// The first `count` members by shape.
    pub(super) fn first(&self, count: u32) -> Counts {
        self.sum(self.members.iter().take(count as usize))
    }

    fn sum<'m>(&self, members: impl Iterator<Item = &'m RankedMember<'w>>) -> Counts
    where
        'w: 'm,
    {
        let mut counts = vec![0; self.shapes.len()];
        for asked in members {
            counts[asked.slot] += 1;
        }
        counts
    }

    /// The minimum in every mix of shapes, the lowest ranks first. Empty if there are too few members.
    pub(super) fn least(&self) -> Vec<Counts> {
        if (self.members.len() as u64) < u64::from(self.must) {
            return Vec::new();
        }
        let first = self.first(self.must);
        if self.shapes.len() == 1 {
            return vec![first];
        }
        let base = self.sum(self.members.iter().take(self.needed));
        let more = self.must - base.iter().sum::<u32>();
        let spare: Counts = self.all().iter().zip(&base).map(|(all, base)| all - base).collect();
        let most = (MOST_MIXED / self.shapes.len()).clamp(1, MOST_MIXES);
        let mut mixes: Vec<Counts> = ways(&spare, more, most)
            .into_iter()
            .map(|way| way.iter().zip(&base).map(|(more, base)| base + more).collect())
            .collect();
        let away = |mix: &Counts| -> u32 { mix.iter().zip(&first).map(|(a, b)| a.abs_diff(*b)).sum() };
        mixes.sort_by(|a, b| away(a).cmp(&away(b)).then_with(|| b.cmp(a)));
        mixes
    }

    /// Whether [`Demand::least`] may have left mixes out.
    pub(super) fn has_more_mixes(&self, least: &[Counts]) -> bool {
        self.shapes.len() > 1 && least.len() >= (MOST_MIXED / self.shapes.len()).clamp(1, MOST_MIXES)
    }

    /// Mixes of `count` members that all count towards the minimum, the smallest members first; `most` at most.
    /// `size` orders the shapes.
    pub(super) fn towards<K: Ord>(&self, count: u32, most: usize, size: impl Fn(usize) -> K) -> Vec<Counts> {
        let base = self.sum(self.members.iter().take(self.needed));
        let more = self.must.saturating_sub(base.iter().sum());
        let mut order: Vec<usize> = (0..self.shapes.len()).collect();
        order.sort_by_key(|slot| size(*slot));
        let all = self.all();
        let there: Counts = order.iter().map(|slot| all[*slot].min(base[*slot] + more)).collect();
        let of_order = ways(&there, count, most).into_iter().map(|way| {
            let mut counts = vec![0; way.len()];
            order.iter().zip(way).for_each(|(slot, count)| counts[*slot] = count);
            counts
        });
        let counts = |mix: &Counts| -> bool {
            mix.iter().zip(&base).map(|(count, base)| count.saturating_sub(*base)).sum::<u32>() <= more
        };
        of_order.filter(counts).collect()
    }

    /// The same gang with exactly so many members of each shape, all of which must be placed.
    pub(super) fn part(&self, counts: &Counts) -> Self {
        let members = self.pick(counts);
        let all = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let shapes = self.shapes.clone();
        Self { wanted: self.wanted, shapes, needed: members.len(), must: all, most: all, members }
    }

    /// What must be placed in any case, each part by itself: the members that a role needs, or all of a shape where
    /// every member is needed. With the name of the role. Empty if that is all one part.
    pub(super) fn parts(&self) -> Vec<(Arc<str>, Counts)> {
        let mut parts: Vec<(Arc<str>, Counts)> = Vec::new();
        for asked in self.members.iter().take(self.needed) {
            let role = &asked.member.role;
            let known = parts.iter().position(|(of, _)| of == role);
            let at = known.unwrap_or_else(|| {
                parts.push((Arc::clone(role), vec![0; self.shapes.len()]));
                parts.len() - 1
            });
            parts[at].1[asked.slot] += 1;
        }
        let all = self.all();
        if parts.is_empty() && self.shapes.len() > 1 && self.must as usize == self.members.len() {
            parts = (0..all.len())
                .map(|slot| {
                    let mut counts = vec![0; all.len()];
                    counts[slot] = all[slot];
                    let first = self.members.iter().find(|asked| asked.slot == slot);
                    (first.map_or_else(Arc::default, |asked| Arc::clone(&asked.member.role)), counts)
                })
                .collect();
        }
        let is_all = |(_, counts): &(Arc<str>, Counts)| *counts == all;
        if parts.iter().any(is_all) { Vec::new() } else { parts }
    }

    /// The members that a count of each shape stands for, by rank.
    pub(super) fn pick(&self, counts: &Counts) -> Vec<RankedMember<'w>> {
        let mut left = counts.clone();
        let mut picked: Vec<_> = self
            .members
            .iter()
            .filter(|asked| {
                let more = left[asked.slot] > 0;
                left[asked.slot] -= u32::from(more);
                more
            })
            .copied()
            .collect();
        picked.sort_by_key(|asked| asked.at);
        picked
    }

    /// How many members of each shape there are.
    pub(super) fn all(&self) -> Counts {
        self.sum(self.members.iter())
    }
}

/// The first `most` ways to take `count` items of kinds with limited numbers, those with more of the first kinds first.
/// Empty if there are too few items. Each way follows directly from the one before, because kinds may be many.
fn ways(there: &[u32], count: u32, most: usize) -> Vec<Counts> {
    let mut way = vec![0; there.len()];
    if fill(there, &mut way, 0, count) > 0 {
        return Vec::new();
    }
    let mut ways = vec![way.clone()];
    while ways.len() < most {
        // The last kind of which one item can be replaced by later kinds.
        let (mut taken, mut room) = (0, 0);
        let step = (0..there.len()).rev().find(|&at| {
            let found = way[at] > 0 && room > 0;
            if !found {
                taken += way[at];
                room += there[at] - way[at];
            }
            found
        });
        let Some(step) = step else { break };
        way[step] -= 1;
        fill(there, &mut way, step + 1, taken + 1);
        ways.push(way.clone());
    }
    ways
}

/// Takes `count` items of the kinds from `from` on, each kind exhausted before the next. Returns the remainder.
fn fill(there: &[u32], way: &mut [u32], from: usize, count: u32) -> u32 {
    let kinds = way.iter_mut().zip(there).skip(from);
    kinds.fold(count, |left, (taken, there)| {
        *taken = left.min(*there);
        left - *taken
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Counts, ways};

    /// All ways, by trying everything.
    fn all(there: &[u32], count: u32) -> Vec<Counts> {
        let Some((first, rest)) = there.split_first() else {
            return if count == 0 { vec![Vec::new()] } else { Vec::new() };
        };
        let takes = (0..=count.min(*first)).rev();
        takes
            .flat_map(|take| {
                let behind = all(rest, count - take).into_iter();
                behind.map(move |way| [vec![take], way].concat())
            })
            .collect()
    }

    #[test]
    fn the_only_way_among_many_kinds_is_found_at_once() {
        let there = vec![1; 20_000];
        assert_eq!(ways(&there, 20_000, 256), [there]);
    }

    #[test]
    fn no_more_ways_are_looked_for_than_asked_for() {
        assert_eq!(ways(&[1; 64], 32, 256).len(), 256);
    }

    proptest! {
        #[test]
        fn ways_are_all_there_are_in_order(there in prop::collection::vec(0u32..4, 0..6), count in 0u32..12, most in 1usize..40) {
            let expected: Vec<Counts> = all(&there, count).into_iter().take(most).collect();
            prop_assert_eq!(ways(&there, count, most), expected);
        }
    }
}
