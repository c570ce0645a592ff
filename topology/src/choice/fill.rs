//! What is computed for every set of up to 16 GPUs at once: R, the value of a set of free GPUs, which is the best bandwidth
//! of jobs of every size in it, relative to the empty machine; and the best set for every set of free GPUs and every
//! size, by trying every subset of every set: 3^n comparisons of one number each. The meaning of the key's terms is the
//! caller's; only their order matters here.

use std::ops::{Add, Shl};

use crate::set::GpuSet;

/// Fraction bits during the computation of R, and in its result: about one in a million, far below the effect of any
/// single set.
const FINE: u32 = 32;
const KEPT: u32 = 20;

/// The probability that an allocated GPU is free again when the remainder is used: one in `CHURN`.
const CHURN: u64 = 16;

/// `best[size][set]`: the highest B of any `size` GPUs of a set, from B of every set. Sizes 0 and 1 exchange nothing
/// and are 0.
pub(super) fn bandwidth_of_sizes(gpus: usize, ring: &[u32]) -> Vec<Vec<u32>> {
    (0..=gpus).map(|size| bandwidth_of_size(gpus, size, ring)).collect()
}

/// One size: the best of a larger set is the best that is left when one of its GPUs is dropped.
fn bandwidth_of_size(gpus: usize, size: usize, ring: &[u32]) -> Vec<u32> {
    let mut best = vec![0; ring.len()];
    for set in 0..ring.len() {
        let members = set.count_ones() as usize;
        best[set] = match members.cmp(&size) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => ring[set],
            std::cmp::Ordering::Greater => (0..gpus)
                .filter(|gpu| set & (1 << gpu) != 0)
                .map(|gpu| best[set & !(1 << gpu)])
                .max()
                .unwrap_or(0),
        };
    }
    best
}

/// R of every set after a little churn, with `KEPT` fraction bits.
///
/// R is the mean over the sizes 1 to n of `best[size][set] / best[size][all]`; one GPU is worth 1 if there is one. It
/// considers the free GPUs only, so it does not prefer a remainder that the next departure completes. Therefore every
/// allocated GPU counts as free with probability 1/16: this is R of the sets that may follow, weighted by their
/// probability.
pub(super) fn churned_remainder(gpus: usize, plain: &[u64]) -> Vec<u32> {
    let mut expected = plain.to_vec();
    for gpu in 0..gpus {
        for set in 0..expected.len() {
            if set & (1 << gpu) == 0 {
                expected[set] = (expected[set] * (CHURN - 1) + expected[set | (1 << gpu)]) / CHURN;
            }
        }
    }
    kept_remainder(&expected)
}

/// The fraction bits that are kept, rounded.
pub(super) fn kept_remainder(fine: &[u64]) -> Vec<u32> {
    let rounded =
        |r: &u64| u32::try_from((r + (1 << (FINE - KEPT - 1))) >> (FINE - KEPT)).unwrap_or(u32::MAX);
    fine.iter().map(rounded).collect()
}

/// R as kept, as a number from 0 to 1.
pub(super) fn remainder_as_number(kept: u32) -> f64 {
    f64::from(kept) / f64::from(1 << KEPT)
}

/// R of every set without churn, with [`FINE`] fraction bits.
pub(super) fn plain_remainder(gpus: usize, best: &[Vec<u32>]) -> Vec<u64> {
    let sets = best.first().map_or(0, Vec::len);
    let all = sets.saturating_sub(1);
    let mut sum = vec![0u64; sets];
    for (size, best) in best.iter().enumerate().skip(1) {
        let whole = u64::from(best.get(all).copied().unwrap_or(0));
        for (set, sum) in sum.iter_mut().enumerate() {
            *sum += if (set.count_ones() as usize) < size {
                0
            } else if size == 1 || whole == 0 {
                1 << FINE
            } else {
                (u64::from(best[set]) << FINE) / whole
            };
        }
    }
    let sizes = gpus.max(1) as u64;
    sum.into_iter().map(|sum| sum / sizes).collect()
}

/// The terms of a key that belong to a set alone and mean the same for every purpose, larger is better, by bit mask.
pub(super) struct KeyTerms {
    /// Islands that are whole in the set; those of a set and its remainder are added.
    pub(super) islands: Vec<u32>,
    /// R of the set when it is what remains.
    pub(super) remainder: Vec<u64>,
    /// Groups kept together by a set and its remainder; the two are added.
    pub(super) together: Vec<u32>,
}

/// The terms that differ between purposes, by bit mask. A term only decides among sets of one size.
pub(super) struct Terms {
    /// Decides before the remainder.
    pub(super) head: Vec<u128>,
    /// Decides after the remainder, before the groups kept together.
    pub(super) middle: Vec<u64>,
    /// Decides last, before the smaller bit mask.
    pub(super) tail: Vec<u64>,
}

/// The best subset of each size from 1 to one less than all, of every set of GPUs, as bit masks: one after the other,
/// sets ascending, then sizes. One such list for each purpose.
pub(super) fn best_subsets<const PURPOSES: usize>(
    gpus: usize,
    shared: &KeyTerms,
    terms: &[Terms; PURPOSES],
) -> [Vec<u16>; PURPOSES] {
    let by_size: Vec<Vec<u32>> =
        (0..=gpus).map(|size| GpuSet::first(gpus).subsets(size).map(GpuSet::bits).collect()).collect();
    let remainder = dense_ranks(&shared.remainder, &by_size);
    let ranked = terms.each_ref().map(|terms| TermRanks::new(terms, &by_size));
    let widest =
        |of: fn(&TermRanks) -> &[u32]| ranked.iter().map(|ranked| width(of(ranked))).max().unwrap_or(0);
    let together_at = widest(|ranked| &ranked.tail);
    let middle_at = together_at + width(&shared.together);
    let remainder_at = middle_at + widest(|ranked| &ranked.middle);
    let islands_at = remainder_at + width(&remainder);
    let head_at = islands_at + width(&shared.islands);
    let layout = Layout { together_at, middle_at, remainder_at, islands_at, head_at };
    if head_at + widest(|ranked| &ranked.head) < u64::BITS {
        fill::<u64, PURPOSES>(&layout, shared, &remainder, &ranked)
    } else {
        fill::<u128, PURPOSES>(&layout, shared, &remainder, &ranked)
    }
}

/// The first bit of each term in a key's number; the tail begins at 0.
struct Layout {
    together_at: u32,
    middle_at: u32,
    remainder_at: u32,
    islands_at: u32,
    head_at: u32,
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
struct TermRanks {
    head: Vec<u32>,
    middle: Vec<u32>,
    /// Ranks from 1, no two alike within a size.
    tail: Vec<u32>,
    /// The set of each size and tail rank.
    set_of_tail: Vec<Vec<u16>>,
}

impl TermRanks {
    fn new(terms: &Terms, by_size: &[Vec<u32>]) -> Self {
        let mut tail = vec![0; terms.tail.len()];
        let mut set_of_tail = Vec::with_capacity(by_size.len());
        for sets in by_size {
            // Worst first: the larger of two equal masks is the worse.
            let mut sets = sets.clone();
            sets.sort_unstable_by_key(|set| (terms.tail[*set as usize], std::cmp::Reverse(*set)));
            for (rank, set) in (1..).zip(&sets) {
                tail[*set as usize] = rank;
            }
            set_of_tail.push(sets.iter().map(|set| u16::try_from(*set).unwrap_or(0)).collect());
        }
        Self {
            head: dense_ranks(&terms.head, by_size),
            middle: dense_ranks(&terms.middle, by_size),
            tail,
            set_of_tail,
        }
    }
}

/// Each value's place among the distinct values of its size.
fn dense_ranks<T: Copy + Ord>(values: &[T], by_size: &[Vec<u32>]) -> Vec<u32> {
    let mut ranks = vec![0; values.len()];
    for sets in by_size {
        let mut distinct: Vec<T> = sets.iter().map(|set| values[*set as usize]).collect();
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

fn fill<K: Key, const PURPOSES: usize>(
    layout: &Layout,
    shared: &KeyTerms,
    remainder: &[u32],
    ranked: &[TermRanks; PURPOSES],
) -> [Vec<u16>; PURPOSES] {
    let at = |value: u32, place: u32| K::from(u64::from(value)) << place;
    let sets = remainder.len();
    let held = |set: usize| {
        at(shared.together[set], layout.together_at) + at(shared.islands[set], layout.islands_at)
    };
    // A set's own part of its key, all purposes side by side, and the part of what it leaves.
    let chosen: Vec<[K; PURPOSES]> = (0..sets)
        .map(|set| {
            ranked.each_ref().map(|ranked| {
                at(ranked.tail[set], 0)
                    + held(set)
                    + at(ranked.middle[set], layout.middle_at)
                    + at(ranked.head[set], layout.head_at)
            })
        })
        .collect();
    let left: Vec<K> = (0..sets).map(|set| held(set) + at(remainder[set], layout.remainder_at)).collect();

    // Counting bits takes a dozen instructions on the oldest x86-64; a read takes one.
    let size_of: Vec<u8> = (0..sets).map(|set| u8::try_from(set.count_ones()).unwrap_or(0)).collect();
    let tail_mask = (1u64 << layout.together_at) - 1;
    let mut answers = [const { Vec::new() }; PURPOSES];
    for answers in &mut answers {
        answers.reserve_exact(entries_before(sets));
    }
    for free in 1..sets {
        let mut best = [[K::default(); PURPOSES]; 32];
        let mut set = free;
        while set != 0 {
            let rest = left[free & !set];
            let best = &mut best[usize::from(size_of[set]) % 32];
            for (best, chosen) in best.iter_mut().zip(&chosen[set]) {
                *best = (*chosen + rest).max(*best);
            }
            set = (set - 1) & free;
        }
        for size in 1..free.count_ones() as usize {
            for purpose in 0..PURPOSES {
                let rank = usize::try_from(best[size][purpose].low() & tail_mask).unwrap_or(0);
                let set = ranked[purpose].set_of_tail[size].get(rank.saturating_sub(1));
                answers[purpose].push(set.copied().unwrap_or(0));
            }
        }
    }
    answers
}

/// The number of entries before those of set number `set`: every set below it has one for each size from 1 to one less
/// than its own.
pub(super) fn entries_before(set: usize) -> usize {
    // Members of the sets below: every bit of `set` counts the sets that agree above it and have any bits below it.
    let mut members = 0;
    let mut above = 0;
    let mut rest = set;
    while rest != 0 {
        let bit = rest.ilog2();
        let low = 1 << bit;
        members += bit as usize * low / 2 + above * low;
        above += 1;
        rest ^= low;
    }
    // One less than its size for every set but the empty one.
    members - set.saturating_sub(1)
}
