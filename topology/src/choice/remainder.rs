//! R, the value of a set of free GPUs: the best bandwidth of jobs of every size in it, relative to the empty machine.
//! Computed for every set of up to 16 GPUs at once.

/// Fraction bits during the computation of R, and in its result: about one in a million, far below the effect of any
/// single set.
const FINE: u32 = 32;
const KEPT: u32 = 20;

/// The probability that an allocated GPU is free again when the remainder is used: one in `CHURN`.
const CHURN: u64 = 16;

/// `best[size][set]`: the highest B of any `size` GPUs of a set, from B of every set. Sizes 0 and 1 exchange nothing
/// and are 0.
pub(super) fn best_of_sizes(gpus: usize, ring: &[u32]) -> Vec<Vec<u32>> {
    (0..=gpus).map(|size| best_of_size(gpus, size, ring)).collect()
}

/// One size: the best of a larger set is the best that is left when one of its GPUs is dropped.
fn best_of_size(gpus: usize, size: usize, ring: &[u32]) -> Vec<u32> {
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
pub(super) fn churned(gpus: usize, plain: &[u64]) -> Vec<u32> {
    let mut expected = plain.to_vec();
    for gpu in 0..gpus {
        for set in 0..expected.len() {
            if set & (1 << gpu) == 0 {
                expected[set] = (expected[set] * (CHURN - 1) + expected[set | (1 << gpu)]) / CHURN;
            }
        }
    }
    kept(&expected)
}

/// The fraction bits that are kept, rounded.
pub(super) fn kept(fine: &[u64]) -> Vec<u32> {
    let rounded =
        |r: &u64| u32::try_from((r + (1 << (FINE - KEPT - 1))) >> (FINE - KEPT)).unwrap_or(u32::MAX);
    fine.iter().map(rounded).collect()
}

/// R as kept, as a number from 0 to 1.
pub(super) fn as_number(kept: u32) -> f64 {
    f64::from(kept) / f64::from(1 << KEPT)
}

/// R of every set without churn, with [`FINE`] fraction bits.
pub(super) fn plain(gpus: usize, best: &[Vec<u32>]) -> Vec<u64> {
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
