//! The narrowest NVLink cut of a set: the part with the least outgoing links for its size. Counts links, not GB/s.

use super::Collective;
use crate::set::GpuSet;

/// The factor of all ratios of links to GPUs. It is divisible by every size of a part of 16, so that they are whole
/// numbers.
pub(super) const SCALE: u64 = 720_720;

/// Sets up to this size have every cut tried; larger ones only the cuts that separate a single GPU.
const EVERY_CUT: usize = 16;
/// The same limit on machines too large for a table, which rate every set again.
const EVERY_CUT_OF_LARGE: usize = 10;

/// The least over the cuts of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MinimumCut {
    /// Least `SCALE x links out of A / |A|`, NVSwitches counted.
    pub(super) scaled: u64,
    /// The most Hamiltonian cycles of direct links that can be edge-disjoint in the set: each crosses every cut at
    /// least twice, and has at least `2 |A| - |set|` of its links within every part A, because the GPUs outside have
    /// two ends each. 0 if the links do not connect the set.
    pub(super) cycles: u32,
}

const NOTHING: MinimumCut = MinimumCut { scaled: 0, cycles: 0 };

/// The narrowest cut of one set of at least two GPUs.
pub(super) fn narrowest(links: &Collective, set: GpuSet) -> MinimumCut {
    if let Some(known) = without_enumeration(links, set) {
        return known;
    }
    if set.len() > EVERY_CUT || (links.gpus > EVERY_CUT && set.len() > EVERY_CUT_OF_LARGE) {
        return single_gpus(links, set);
    }
    let tables = Tables::of(links, set);
    tables.enumerate(GpuSet::first(set.len()))
}

/// Links inside of every subset of some GPUs, by bit mask over their positions: the number of links cut between A and
/// the rest of S is then `inside(S) - inside(A) - inside(S - A)`.
pub(super) struct Tables {
    inside: Vec<u16>,
    /// Links into NVSwitches of every subset, for each group of joined switches.
    switch: Vec<Vec<u16>>,
}

impl Tables {
    /// Over the machine's first 16 GPUs, where positions are GPU indices.
    pub(super) fn new(links: &Collective) -> Self {
        Self::of(links, GpuSet::first(links.gpus.min(EVERY_CUT)))
    }

    fn of(links: &Collective, set: GpuSet) -> Self {
        let members: Vec<usize> = set.iter().take(EVERY_CUT).collect();
        let sets = 1usize << members.len();
        let mut inside = vec![0u16; sets];
        let islands = islands(links, set);
        let mut switch = vec![vec![0u16; sets]; islands.len()];
        for (position, gpu) in members.iter().enumerate() {
            let low = 1usize << position;
            // Subsets whose highest member is at `position`: those of the lower members, and it.
            for below in 0..low {
                let to_lower: u16 = GpuSet::from_bits(u32::try_from(below).unwrap_or(0))
                    .iter()
                    .map(|other| u16::from(links.direct[*gpu][members[other]]))
                    .sum();
                inside[low | below] = inside[below] + to_lower;
                for (island, switch) in islands.iter().zip(&mut switch) {
                    let own = if links.island[*gpu] == *island {
                        u16::try_from(links.switch[*gpu]).unwrap_or(u16::MAX)
                    } else {
                        0
                    };
                    switch[low | below] = switch[below].saturating_add(own);
                }
            }
        }
        Self { inside, switch }
    }

    /// The number of subsets.
    pub(super) fn sets(&self) -> usize {
        self.inside.len()
    }

    /// As [`narrowest`], for a set of the GPUs the tables are over.
    pub(super) fn narrowest(&self, links: &Collective, set: GpuSet) -> MinimumCut {
        without_enumeration(links, set).unwrap_or_else(|| self.enumerate(set))
    }

    fn enumerate(&self, set: GpuSet) -> MinimumCut {
        let whole = set.bits() as usize;
        let size = set.len();
        let Some(lowest) = set.lowest() else {
            return NOTHING;
        };
        let anchor = 1usize << lowest;
        let rest = whole & !anchor;
        let inside = u32::from(self.inside[whole]);
        // A cut is counted once, from the side with the lowest GPU, and rated by the larger side: both send the same
        // out.
        let mut fewest = [u32::MAX; EVERY_CUT + 1];
        let mut direct = u32::MAX;
        // Links within the larger side, the fewest for each size of it.
        let mut within = [u32::MAX; EVERY_CUT + 1];
        let mut part = rest;
        while part != 0 {
            part = (part - 1) & rest;
            let (near, far) = (part | anchor, rest & !part);
            let (in_near, in_far) = (u32::from(self.inside[near]), u32::from(self.inside[far]));
            let mut out = inside - in_near - in_far;
            direct = direct.min(out);
            for switch in &self.switch {
                out += u32::from(switch[near].min(switch[far]));
            }
            let near_size = near.count_ones() as usize;
            let larger = near_size.max(size - near_size);
            fewest[larger] = fewest[larger].min(out);
            let in_larger = if near_size == larger { in_near } else { in_far };
            within[larger] = within[larger].min(in_larger);
        }
        let twice = |larger: usize| u32::try_from(2 * larger - size).unwrap_or(0);
        let of_parts = (size / 2 + 1..size).map(|larger| within[larger] / twice(larger));
        MinimumCut {
            scaled: (1u64..)
                .zip(&fewest[1..])
                .filter(|(_, out)| **out != u32::MAX)
                .map(|(larger, out)| u64::from(*out) * SCALE / larger)
                .min()
                .unwrap_or(0),
            cycles: of_parts.fold(direct / 2, u32::min),
        }
    }
}

/// The groups of joined NVSwitches that GPUs of a set have links into.
fn islands(links: &Collective, set: GpuSet) -> Vec<u8> {
    let switched = set.iter().filter(|gpu| links.switch[*gpu] > 0);
    let mut islands: Vec<u8> = switched.map(|gpu| links.island[gpu]).collect();
    islands.sort_unstable();
    islands.dedup();
    islands
}

/// The result for sets without direct links, or with too few to join them, which need no search.
fn without_enumeration(links: &Collective, set: GpuSet) -> Option<MinimumCut> {
    let has_direct = set.iter().any(|gpu| links.peers[gpu] & set.bits() != 0);
    let switch = links.lowest_switch_links(set);
    if !has_direct {
        // Through switches alone the narrowest cut separates the GPU with the fewest links.
        let larger = set.len().saturating_sub(1).max(1) as u64;
        return Some(MinimumCut { scaled: u64::from(switch) * SCALE / larger, cycles: 0 });
    }
    let unswitched = set.iter().all(|gpu| links.switch[gpu] == 0);
    (unswitched && !is_connected(links, set)).then_some(NOTHING)
}

/// Whether direct NVLinks connect the whole set.
fn is_connected(links: &Collective, set: GpuSet) -> bool {
    let mut reached = set.lowest().map_or(GpuSet::EMPTY, GpuSet::single);
    let mut frontier = reached;
    while let Some(gpu) = frontier.lowest() {
        let fresh = (GpuSet::from_bits(links.peers[gpu]) & set) - reached;
        reached = reached | fresh;
        frontier = (frontier - GpuSet::single(gpu)) | fresh;
    }
    reached == set
}

fn single_gpus(links: &Collective, set: GpuSet) -> MinimumCut {
    let larger = set.len().saturating_sub(1).max(1) as u64;
    let switch = |island: u8| -> u32 {
        let within = set.iter().filter(|gpu| links.island[*gpu] == island);
        within.map(|gpu| links.switch[gpu]).sum()
    };
    let direct = |gpu: usize| -> u32 { set.iter().map(|other| u32::from(links.direct[gpu][other])).sum() };
    let out = |gpu: usize| direct(gpu) + links.switch[gpu].min(switch(links.island[gpu]) - links.switch[gpu]);
    MinimumCut {
        scaled: u64::from(set.iter().map(out).min().unwrap_or(0)) * SCALE / larger,
        cycles: set.iter().map(direct).min().unwrap_or(0) / 2,
    }
}
