//! The best set for every set of free GPUs and every size, by trying every subset of every set: 3^n comparisons of one number
//! each. Knows the order of the key's terms and nothing of what they mean.

use std::ops::{Add, Shl};

use crate::set::GpuSet;

/// The terms of a key that belong to a set alone, larger is better, by bit mask. A term only decides among sets of one size.
pub(super) struct Terms {
    /// What decides before the remainder.
    pub(super) head: Vec<u64>,
    /// R of the set when it is what remains.
    pub(super) remainder: Vec<u64>,
    /// What decides after the remainder.
    pub(super) middle: Vec<u64>,
    /// What a set and its remainder hold together; the two are added.
    pub(super) together: Vec<u32>,
    /// What decides last, before the smaller bit mask.
    pub(super) tail: Vec<u64>,
}

/// The best subset of each size from 1 to one less than all, of every set of GPUs, as bit masks: one after the other, sets
/// ascending, then sizes.
pub(super) fn best_subsets(gpus: usize, terms: &Terms) -> Vec<u16> {
    let ranked = Ranked::new(gpus, terms);
    if ranked.bits() < 64 {
        fill::<u64>(gpus, &ranked)
    } else {
        fill::<u128>(gpus, &ranked)
    }
}

/// A number that holds a whole key.
trait Key: Copy + Ord + Default + From<u64> + Add<Output = Self> + Shl<u32, Output = Self> {
    /// Its lowest 64 bits.
    fn low(self) -> u64;
}

impl Key for u64 {
    fn low(self) -> u64 {
        self
    }
}

impl Key for u128 {
    fn low(self) -> u64 {
        u64::try_from(self & Self::from(u64::MAX)).unwrap_or(0)
    }
}

/// Terms replaced by their rank among the sets of the same size, so that a key fits one number.
struct Ranked<'a> {
    head: Vec<u32>,
    remainder: Vec<u32>,
    middle: Vec<u32>,
    together: &'a [u32],
    /// Ranks from 1, no two alike within a size.
    tail: Vec<u32>,
    /// The set of each size and tail rank.
    set_of_tail: Vec<Vec<u16>>,
}

impl<'a> Ranked<'a> {
    fn new(gpus: usize, terms: &'a Terms) -> Self {
        let by_size: Vec<Vec<u32>> = (0..=gpus)
            .map(|size| GpuSet::first(gpus).subsets(size).map(GpuSet::bits).collect())
            .collect();
        let mut tail = vec![0; terms.tail.len()];
        let mut set_of_tail = Vec::with_capacity(by_size.len());
        for sets in &by_size {
            // Worst first: the larger of two equal masks is the worse.
            let mut sets = sets.clone();
            sets.sort_unstable_by_key(|set| (terms.tail[*set as usize], std::cmp::Reverse(*set)));
            for (rank, set) in (1..).zip(&sets) {
                tail[*set as usize] = rank;
            }
            set_of_tail.push(sets.iter().map(|set| u16::try_from(*set).unwrap_or(0)).collect());
        }
        Self {
            head: dense_ranks(&terms.head, &by_size),
            remainder: dense_ranks(&terms.remainder, &by_size),
            middle: dense_ranks(&terms.middle, &by_size),
            together: &terms.together,
            tail,
            set_of_tail,
        }
    }

    fn bits(&self) -> u32 {
        [&self.head, &self.remainder, &self.middle, &self.tail]
            .map(|ranks| width(ranks))
            .iter()
            .sum::<u32>()
            + width(self.together)
    }
}

/// Each value's place among the distinct values of its size.
fn dense_ranks(values: &[u64], by_size: &[Vec<u32>]) -> Vec<u32> {
    let mut ranks = vec![0; values.len()];
    for sets in by_size {
        let mut distinct: Vec<u64> = sets.iter().map(|set| values[*set as usize]).collect();
        distinct.sort_unstable();
        distinct.dedup();
        for set in sets {
            let rank = distinct.partition_point(|value| *value < values[*set as usize]);
            ranks[*set as usize] = u32::try_from(rank).unwrap_or(u32::MAX);
        }
    }
    ranks
}

/// Bits that hold every one of some numbers.
fn width(ranks: &[u32]) -> u32 {
    u32::BITS - ranks.iter().max().map_or(0, |most| *most).leading_zeros()
}

fn fill<K: Key>(gpus: usize, ranked: &Ranked<'_>) -> Vec<u16> {
    let together_at = width(&ranked.tail);
    let middle_at = together_at + width(ranked.together);
    let remainder_at = middle_at + width(&ranked.middle);
    let head_at = remainder_at + width(&ranked.remainder);
    let at = |value: u32, place: u32| K::from(u64::from(value)) << place;
    let sets = ranked.tail.len();
    let chosen: Vec<K> = (0..sets)
        .map(|set| {
            at(ranked.tail[set], 0)
                + at(ranked.together[set], together_at)
                + at(ranked.middle[set], middle_at)
                + at(ranked.head[set], head_at)
        })
        .collect();
    let left: Vec<K> = (0..sets)
        .map(|set| at(ranked.together[set], together_at) + at(ranked.remainder[set], remainder_at))
        .collect();

    let tail_mask = (1u64 << together_at) - 1;
    let mut answers = Vec::with_capacity(entries_before(sets));
    for free in 1..sets {
        let mut best = [K::default(); 17];
        let mut set = free;
        while set != 0 {
            let key = chosen[set] + left[free & !set];
            let best = &mut best[set.count_ones() as usize];
            *best = key.max(*best);
            set = (set - 1) & free;
        }
        for size in 1..free.count_ones() as usize {
            let rank = usize::try_from(best[size].low() & tail_mask).unwrap_or(0);
            let set = ranked.set_of_tail[size].get(rank.saturating_sub(1));
            answers.push(set.copied().unwrap_or(0));
        }
    }
    debug_assert!(gpus <= 16 && answers.len() == entries_before(sets));
    answers
}

/// How many answers stand before those of set number `set`: all sets below it have one for each size from 1 to one less than
/// their own.
pub(super) fn entries_before(set: usize) -> usize {
    // Members of the sets below: every bit of `set` counts the sets that agree above it and have any bits below it.
    let mut members = 0;
    let mut above = 0;
    for bit in (0..usize::BITS).rev() {
        if set & (1 << bit) != 0 {
            let free_below = if bit == 0 {
                0
            } else {
                bit as usize * (1 << (bit - 1))
            };
            members += free_below + above * (1 << bit);
            above += 1;
        }
    }
    // One less than its size for every set but the empty one.
    members - set.saturating_sub(1)
}
