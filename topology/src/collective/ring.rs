//! How many edge-disjoint Hamiltonian cycles the direct NVLinks of a set hold: each is a ring for a collective, in both
//! directions. A bounded, deterministic search; no bandwidths here.

use super::{Collective, cut};
use crate::machine::MAX_GPUS;
use crate::set::GpuSet;

/// Steps of the search for one number of cycles; NCCL gives its own ring search as many (`NCCL_SEARCH_TIMEOUT`).
const STEPS: u32 = 1 << 14;
/// The same for sets of more than 8 GPUs: no such mesh was ever built, and 2^16 sets share the time of one table.
const STEPS_BEYOND_8: u32 = 1 << 7;

/// On machines too large for a table, where every set is rated anew, no more than two cycles are looked for.
const TABULATED: usize = 16;

/// The edge-disjoint Hamiltonian cycles of a set of three or more GPUs, given its narrowest cut; 0 for smaller sets.
///
/// Every cycle crosses every cut at least twice, so half the narrowest cut is tried first, then one less.
pub(super) fn cycles(links: &Collective, set: GpuSet, narrowest: cut::Narrowest) -> u32 {
    let most = narrowest.links / 2;
    if set.len() < 3 || most == 0 || even_mesh(links, set) {
        // k GPUs, each with m links to every other, hold floor(m (k - 1) / 2) cycles (Walecki's construction).
        return most;
    }
    let most = if links.gpus > TABULATED { most.min(2) } else { most };
    (1..=most)
        .rev()
        .find(|wanted| Search::new(links, set).pack(*wanted))
        .unwrap_or(0)
}

/// Whether each GPU of the set has as many links to each other one.
fn even_mesh(links: &Collective, set: GpuSet) -> bool {
    let mut counts = set.iter().flat_map(|a| {
        set.iter()
            .filter(move |b| *b > a)
            .map(move |b| links.direct[a][b])
    });
    let first = counts.next();
    counts.all(|count| Some(count) == first)
}

/// A depth-first search for cycles, one after the other, over the links that the earlier ones left.
struct Search {
    size: usize,
    /// Links left of each pair, by position in the set.
    left: [[u8; MAX_GPUS]; MAX_GPUS],
    steps: u32,
}

impl Search {
    fn new(links: &Collective, set: GpuSet) -> Self {
        let mut left = [[0; MAX_GPUS]; MAX_GPUS];
        for (row, a) in left.iter_mut().zip(set) {
            for (cell, b) in row.iter_mut().zip(set) {
                *cell = links.direct[a][b];
            }
        }
        Self {
            size: set.len(),
            left,
            steps: if set.len() > 8 { STEPS_BEYOND_8 } else { STEPS },
        }
    }

    /// Whether `wanted` more cycles were found.
    fn pack(&mut self, wanted: u32) -> bool {
        wanted == 0 || self.extend(0, 1, wanted)
    }

    /// Goes on from position `at` of a cycle that has visited the positions in the mask.
    fn extend(&mut self, at: usize, visited: u32, wanted: u32) -> bool {
        if self.steps == 0 {
            return false;
        }
        self.steps -= 1;
        if GpuSet::from_bits(visited).len() == self.size {
            return self.left[at][0] > 0 && self.with_link(at, 0, |search| search.pack(wanted - 1));
        }
        // The pair with most links left first: it is the least likely to be missed by a later cycle.
        let mut tried = visited;
        loop {
            let next = (0..self.size)
                .filter(|next| tried & (1 << next) == 0 && self.left[at][*next] > 0)
                .max_by_key(|next| (self.left[at][*next], std::cmp::Reverse(*next)));
            let Some(next) = next else {
                return false;
            };
            tried |= 1 << next;
            if self.with_link(at, next, |search| {
                search.extend(next, visited | 1 << next, wanted)
            }) {
                return true;
            }
        }
    }

    /// Runs `then` with one link between two positions taken, and puts it back if nothing was found.
    fn with_link(&mut self, a: usize, b: usize, then: impl FnOnce(&mut Self) -> bool) -> bool {
        self.left[a][b] -= 1;
        self.left[b][a] -= 1;
        let found = then(self);
        if !found {
            self.left[a][b] += 1;
            self.left[b][a] += 1;
        }
        found
    }
}
