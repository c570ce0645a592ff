//! The sets that NVIDIA's best-effort policy chooses: the partition of all free GPUs into groups of the size asked with
//! the highest sum of pair scores, then its best full group. Written after its behaviour, for comparison.

use gantry_smi::TopoText;
use gantry_topology::{GpuSet, Link, Machine, PathClass, PathMatrix};

/// Pair scores of one machine: 100 for each NVLink, 10 to 50 by the PCIe path.
pub(crate) struct BestEffort {
    score_of_set: Vec<u32>,
}

impl BestEffort {
    pub(crate) fn new(machine: &Machine) -> Self {
        Self::with_paths(machine, machine.paths())
    }

    /// With other PCIe paths than the machine's.
    pub(crate) fn with_paths(machine: &Machine, paths: &PathMatrix) -> Self {
        let gpus = machine.gpus().len();
        let pair = |a: usize, b: usize| {
            let path = match paths.get(a, b) {
                PathClass::Pix => 50,
                PathClass::Pxb => 40,
                PathClass::Phb => 30,
                PathClass::Node => 20,
                PathClass::Sys | PathClass::Soc => 10,
            };
            match machine.link(a, b) {
                Link::NvLink(links) => path + 100 * u32::from(links),
                _ => path,
            }
        };
        let score = |set: GpuSet| -> u32 {
            set.iter()
                .flat_map(|a| set.iter().filter(move |b| *b > a).map(move |b| (a, b)))
                .map(|(a, b)| pair(a, b))
                .sum()
        };
        Self { score_of_set: (0..1 << gpus).map(|bits| score(GpuSet::from_bits(bits))).collect() }
    }

    pub(crate) fn score(&self, set: GpuSet) -> u32 {
        self.score_of_set[set.bits() as usize]
    }

    /// The set it takes of `free`, which has at least `size` GPUs. Of equal partitions the first in the order of
    /// indices wins.
    pub(crate) fn choose(&self, free: GpuSet, size: usize) -> GpuSet {
        let padding = (size - free.len() % size) % size;
        let mut best: (Option<u32>, Vec<GpuSet>) = (None, Vec::new());
        self.partitions(free, size, padding, &mut Vec::new(), &mut best);
        let full = best.1.iter().filter(|group| group.len() == size);
        // The first of the best groups.
        full.fold(GpuSet::EMPTY, |found, group| {
            if found.is_empty() || self.score(*group) > self.score(found) { *group } else { found }
        })
    }

    /// Groups are formed around the lowest GPU left; one group may lack `padding` GPUs.
    fn partitions(
        &self,
        left: GpuSet,
        size: usize,
        padding: usize,
        groups: &mut Vec<GpuSet>,
        best: &mut (Option<u32>, Vec<GpuSet>),
    ) {
        let Some(first) = left.lowest() else {
            let sum = groups.iter().map(|group| self.score(*group)).sum();
            if best.0.is_none_or(|highest| sum > highest) {
                *best = (Some(sum), groups.clone());
            }
            return;
        };
        let others = left - GpuSet::single(first);
        let full = others.subsets(size - 1).map(|more| (more, padding));
        let padded = others.subsets(size - 1 - padding).map(|more| (more, 0)).take(if padding > 0 {
            usize::MAX
        } else {
            0
        });
        // In the order of indices, the padding behind every GPU.
        let mut next: Vec<(GpuSet, usize)> = full.chain(padded).collect();
        let order = |(more, _): &(GpuSet, usize)| -> Vec<usize> {
            more.iter().chain(std::iter::repeat(usize::MAX)).take(size - 1).collect()
        };
        next.sort_by_key(order);
        for (more, padding) in next {
            groups.push(more.with(first));
            self.partitions(others - more, size, padding, groups, best);
            groups.pop();
        }
    }
}

/// The PCIe paths of a printed matrix, those behind NVLinks taken from the other cells alone: the least that the
/// longest step of a way over other devices allows. (The library's reader also looks at CPU and NUMA columns.)
pub(crate) fn paths_of(text: &TopoText) -> PathMatrix {
    let devices = text.links().len();
    let printed = |a: usize, b: usize| match text.links()[a][b] {
        Link::Pcie(class) => class,
        _ => PathClass::Soc,
    };
    let mut least = vec![vec![PathClass::Pix; devices]; devices];
    for (a, row) in least.iter_mut().enumerate() {
        for (b, cell) in row.iter_mut().enumerate().filter(|(b, _)| *b != a) {
            *cell = printed(a, b);
        }
    }
    for over in 0..devices {
        for a in 0..devices {
            for b in 0..devices {
                least[a][b] = least[a][b].min(least[a][over].max(least[over][b]));
            }
        }
    }
    PathMatrix::from_fn(devices, |a, b| match text.links()[a][b] {
        Link::Pcie(class) => class,
        _ => least[a][b],
    })
}
