//! Choosing on machines too large for a table: bounded greedy growth and exchange. Compares by the same key as the
//! tables, without R. Guarantees a valid set in bounded time, not the best one.

use super::{Purpose, Table};
use crate::machine::MAX_GPUS;
use crate::set::GpuSet;

/// Exchanges tried at most to improve the best grown set.
const EXCHANGES: usize = 256;

/// A good set of `size` GPUs of `free` that contains `must`. The caller has checked that there is one; otherwise the
/// result is the nearest.
pub(super) fn best(table: &Table, free: GpuSet, must: GpuSet, size: usize, purpose: Purpose) -> GpuSet {
    best_by(table, free, must, size, |set| table.key(set, free, purpose))
}

/// The same by any key.
pub(super) fn best_by<K: Ord>(
    table: &Table,
    free: GpuSet,
    must: GpuSet,
    size: usize,
    key: impl Fn(GpuSet) -> K,
) -> GpuSet {
    if size >= free.len() {
        return free;
    }
    if size <= must.len() {
        return must;
    }
    let seeds: Vec<GpuSet> =
        if must.is_empty() { free.iter().map(GpuSet::single).collect() } else { vec![must] };
    let mut grown: Vec<GpuSet> = seeds.into_iter().map(|seed| grow(table, free, seed, size)).collect();
    grown.sort_unstable();
    grown.dedup();
    let Some(start) = grown.into_iter().max_by_key(|set| key(*set)) else {
        return must;
    };
    exchange(start, free, must, key)
}

/// The highest B found for each size from 0 to all of `free`, MB/s: over what growing from every GPU passes through.
pub(super) fn best_of_sizes(table: &Table, free: GpuSet) -> Vec<u32> {
    let mut best = vec![0; free.len() + 1];
    for seed in free {
        grow_through(table, free, GpuSet::single(seed), free.len(), |set| {
            if let Some(best) = best.get_mut(set.len()) {
                *best = table.links.ring(set).max(*best);
            }
        });
    }
    best
}

fn grow(table: &Table, free: GpuSet, seed: GpuSet, size: usize) -> GpuSet {
    let mut last = seed;
    grow_through(table, free, seed, size, |set| last = set);
    last
}

/// Adds, one by one, the GPU best joined to those already in: by the sum of its pairs' rates, then by what it keeps
/// together. Every set on the way is passed to `visit`.
fn grow_through(table: &Table, free: GpuSet, seed: GpuSet, size: usize, mut visit: impl FnMut(GpuSet)) {
    let mut set = seed;
    let mut newest = seed;
    let mut joined = [0u64; MAX_GPUS];
    while set.len() < size {
        let rest = free - set;
        for gpu in rest {
            joined[gpu] += newest.iter().map(|member| u64::from(table.links.pair(gpu, member))).sum::<u64>();
        }
        let together = |gpu: &usize| {
            let grown = set.with(*gpu);
            table.surroundings.together(grown) + table.surroundings.together(free - grown)
        };
        let most = rest.iter().map(|gpu| joined[gpu]).max();
        let tied: GpuSet = rest.iter().filter(|gpu| Some(joined[*gpu]) == most).collect();
        let next = if tied.len() > 1 {
            tied.iter().max_by_key(|gpu| (together(gpu), std::cmp::Reverse(*gpu)))
        } else {
            tied.lowest()
        };
        let Some(next) = next else {
            return;
        };
        newest = GpuSet::single(next);
        set = set.with(next);
        visit(set);
    }
}

/// Exchanges one GPU for another as long as that improves the key.
fn exchange<K: Ord>(start: GpuSet, free: GpuSet, must: GpuSet, key: impl Fn(GpuSet) -> K) -> GpuSet {
    let mut best = start;
    let mut best_key = key(best);
    let mut left = EXCHANGES;
    loop {
        let before = best;
        for out in before - must {
            for new in free - before {
                if left == 0 {
                    return best;
                }
                left -= 1;
                let candidate = (before - GpuSet::single(out)).with(new);
                let candidate_key = key(candidate);
                if candidate_key > best_key {
                    best = candidate;
                    best_key = candidate_key;
                }
            }
        }
        if best == before {
            return best;
        }
    }
}
