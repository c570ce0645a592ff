//! A saturated node: jobs wait in one line, each starts as soon as enough GPUs are free, and runs for an exponential
//! time. Measures how near the sets given come to the best of the empty machine.

use gantry_topology::{Collective, GpuSet, Machine, Purpose, Rates, Table};

use super::peer::BestEffort;

/// Jobs of one replay.
pub(crate) const JOBS: usize = 60_000;

/// For every set of free GPUs, and every size, the set a policy takes.
pub(crate) struct Policy(Vec<Vec<GpuSet>>);

impl Policy {
    fn new(gpus: usize, choose: impl Fn(GpuSet, usize) -> GpuSet) -> Self {
        let free = (0..1u32 << gpus).map(GpuSet::from_bits);
        Self(
            free.map(|free| {
                let sizes = 1..=free.len();
                std::iter::once(GpuSet::EMPTY).chain(sizes.map(|size| choose(free, size))).collect()
            })
            .collect(),
        )
    }

    pub(crate) fn ours(table: &Table, purpose: Purpose) -> Self {
        Self::new(table.all().len(), |free, size| table.best(free, size, purpose).unwrap().gpus)
    }

    pub(crate) fn nvidia(machine: &Machine) -> Self {
        let peer = BestEffort::new(machine);
        Self::new(machine.gpus().len(), |free, size| peer.choose(free, size))
    }

    pub(crate) fn lowest_index(machine: &Machine) -> Self {
        Self::new(machine.gpus().len(), |free, size| free.iter().take(size).collect())
    }
}

/// B over the best B of that size on the empty machine, over all jobs of two or more GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Efficiency {
    pub(crate) mean: f64,
    pub(crate) lower_quartile: f64,
}

/// In which model B is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Model {
    Ring,
    Cut,
}

/// Replays [`JOBS`] jobs of 1 to `largest` GPUs, all sizes alike.
pub(crate) fn replay(
    machine: &Machine,
    rates: &Rates,
    policy: &Policy,
    model: Model,
    largest: u64,
    seed: u64,
) -> Efficiency {
    let links = Collective::new(machine, rates);
    let all = GpuSet::all(machine);
    let value: Vec<f64> = (0..=all.bits())
        .map(GpuSet::from_bits)
        .map(|set| f64::from(if model == Model::Ring { links.ring(set) } else { links.cut(set) }))
        .collect();
    let best = |size: usize| all.subsets(size).map(|set| value[set.bits() as usize]).fold(0.0, f64::max);
    let best: Vec<f64> = (0..=all.len()).map(best).collect();

    let mut random = SplitMix(seed);
    let mut free = all;
    let mut now = 0.0f64;
    let mut running: Vec<(f64, GpuSet)> = Vec::new();
    let mut reached = Vec::with_capacity(JOBS);
    for _ in 0..JOBS {
        let size = 1 + usize::try_from(random.next() % largest).unwrap();
        let life = -(1.0 - random.unit()).ln();
        while free.len() < size {
            let ends = |job: &usize| running[*job].0;
            let first = (0..running.len()).min_by(|a, b| ends(a).total_cmp(&ends(b))).unwrap();
            let (end, gpus) = running.swap_remove(first);
            now = now.max(end);
            free = free | gpus;
        }
        let set = policy.0[free.bits() as usize][size];
        assert!(set.is_subset(free) && set.len() == size);
        free = free - set;
        running.push((now + life, set));
        if size > 1 {
            reached.push(value[set.bits() as usize] / best[size]);
        }
    }
    reached.sort_by(f64::total_cmp);
    Efficiency {
        mean: reached.iter().sum::<f64>() / reached.len() as f64,
        lower_quartile: reached[reached.len() / 4],
    }
}

/// The mean over several seeds, for differences of a tenth of a point.
pub(crate) fn replay_often(
    machine: &Machine,
    rates: &Rates,
    policy: &Policy,
    model: Model,
    largest: u64,
) -> Efficiency {
    const TIMES: u64 = 8;
    let runs: Vec<Efficiency> =
        (0..TIMES).map(|run| replay(machine, rates, policy, model, largest, run * 7919 + 1)).collect();
    let mean = |of: fn(&Efficiency) -> f64| runs.iter().map(of).sum::<f64>() / TIMES as f64;
    Efficiency { mean: mean(|run| run.mean), lower_quartile: mean(|run| run.lower_quartile) }
}

/// Steele, Lea and Flood's SplitMix64: small, seeded, the same everywhere.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}
