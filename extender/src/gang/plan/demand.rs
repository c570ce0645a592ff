//! Which members of a gang are to be placed: of which shapes so many, which of them must be, and in which order they give way where not all
//! fit. Pure; knows nothing of nodes.

use std::sync::Arc;

use gantry_gang::protocol::{ShapeId, Wanted, WantedMember};

/// Members by shape: how many of the shape at that index of [`Demand::shapes`].
pub(super) type Counts = Vec<u32>;

/// Combinations of shapes that are tried for the least a gang can do with.
const MOST_MIXES: usize = 256;

/// What a gang asks to have placed.
#[derive(Debug)]
pub(super) struct Demand<'w> {
    pub(super) wanted: &'w Wanted,
    /// The distinct shapes, in the order of their first members.
    pub(super) shapes: Vec<ShapeId>,
    /// The members in the order in which they are preferred, each with the index of its shape: those that roles need first.
    members: Vec<Asked<'w>>,
    /// How many of the first members roles need.
    needed: usize,
    /// So many must be placed.
    pub(super) must: u32,
    /// So many may be.
    pub(super) most: u32,
}

/// A member.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'w> {
    /// Its place among all members, which come by rank.
    at: usize,
    pub(super) member: &'w WantedMember,
    /// Index of its shape.
    pub(super) slot: usize,
}

impl<'w> Demand<'w> {
    pub(super) fn of(wanted: &'w Wanted) -> Self {
        let mut shapes: Vec<ShapeId> = Vec::new();
        let mut members = Vec::with_capacity(wanted.members.len());
        for (at, member) in wanted.members.iter().enumerate() {
            let known = shapes.iter().position(|shape| *shape == member.shape);
            let slot = known.unwrap_or_else(|| {
                shapes.push(member.shape);
                shapes.len() - 1
            });
            members.push(Asked { at, member, slot });
        }
        // A gang that has places has its roles: what is asked for now are replacements and extras.
        let mut owed: Vec<(&Arc<str>, u32)> = if wanted.placed.is_empty() {
            wanted
                .terms
                .by_role
                .iter()
                .map(|(role, least)| (role, *least))
                .collect()
        } else {
            Vec::new()
        };
        let (first, rest): (Vec<_>, Vec<_>) = members.into_iter().partition(|asked: &Asked<'_>| {
            let owed = owed
                .iter_mut()
                .find(|(role, least)| **role == asked.member.role && *least > 0);
            owed.map(|(_, least)| *least -= 1).is_some()
        });
        let needed = first.len();
        let members: Vec<_> = first.into_iter().chain(rest).collect();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let must = wanted.must.max(count(needed));
        let room = wanted.terms.max.saturating_sub(count(wanted.placed.len()));
        Self {
            wanted,
            shapes,
            needed,
            must,
            most: room.max(must).min(count(members.len())),
            members,
        }
    }

    /// The same where nobody is looked at beyond those that must be placed.
    pub(super) fn least_of(wanted: &'w Wanted) -> Self {
        let demand = Self::of(wanted);
        Self {
            most: demand.must.min(demand.most),
            ..demand
        }
    }

    /// The first `count` members by shape.
    pub(super) fn first(&self, count: u32) -> Counts {
        self.sum(self.members.iter().take(count as usize))
    }

    fn sum<'m>(&self, members: impl Iterator<Item = &'m Asked<'w>>) -> Counts
    where
        'w: 'm,
    {
        let mut counts = vec![0; self.shapes.len()];
        for asked in members {
            counts[asked.slot] += 1;
        }
        counts
    }

    /// The least that the gang can do with, in every mix of shapes, the lowest ranks first. Empty if there are too few members.
    pub(super) fn least(&self) -> Vec<Counts> {
        if (self.members.len() as u64) < u64::from(self.must) {
            return Vec::new();
        }
        let first = self.first(self.must);
        if self.shapes.len() == 1 {
            return vec![first];
        }
        let base = self.sum(self.members.iter().take(self.needed));
        let all = self.sum(self.members.iter());
        let mut mixes = Vec::new();
        mix(
            &base,
            &all,
            self.must - base.iter().sum::<u32>(),
            &mut base.clone(),
            0,
            &mut mixes,
        );
        let away = |mix: &Counts| -> u32 { mix.iter().zip(&first).map(|(a, b)| a.abs_diff(*b)).sum() };
        mixes.sort_by(|a, b| away(a).cmp(&away(b)).then_with(|| b.cmp(a)));
        mixes
    }

    /// The members that are meant by so many of each shape, by rank.
    pub(super) fn pick(&self, counts: &Counts) -> Vec<Asked<'w>> {
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

/// Every way to add `more` members to the mix from shape `slot` on.
fn mix(base: &Counts, all: &Counts, more: u32, now: &mut Counts, slot: usize, mixes: &mut Vec<Counts>) {
    if mixes.len() >= MOST_MIXES {
        return;
    }
    let Some(spare) = all.get(slot).map(|all| all - base[slot]) else {
        if more == 0 {
            mixes.push(now.clone());
        }
        return;
    };
    for take in (0..=spare.min(more)).rev() {
        now[slot] = base[slot] + take;
        mix(base, all, more - take, now, slot + 1, mixes);
    }
    now[slot] = base[slot];
}
