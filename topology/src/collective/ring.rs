//! The number of edge-disjoint Hamiltonian cycles in the direct NVLinks of a set: each is a ring for a collective, in
//! both directions. A bounded, deterministic search.

use super::Collective;
use crate::machine::MAX_GPUS;
use crate::set::GpuSet;

/// Steps of the search in one set; NCCL gives its own ring search as many (`NCCL_SEARCH_TIMEOUT`).
const STEPS: u32 = 1 << 14;
/// The same in sets of up to 8 on machines of more GPUs: no uneven mesh of so many was ever built, and 2^16 sets share
/// the time of one table.
const STEPS_AMONG_MORE: u32 = 1 << 10;
/// The same in sets of more than 8.
const STEPS_BEYOND_8: u32 = 1 << 7;

/// Machines too large for a table rate every set again, so the search stops at two cycles.
const TABULATED: usize = 16;

/// The edge-disjoint Hamiltonian cycles of a set of three or more GPUs, of which there are no more than `most`; 0 for
/// smaller sets.
pub(super) fn cycles(links: &Collective, set: GpuSet, most: u32) -> u32 {
    if set.len() < 3 || most == 0 || even_mesh(links, set) {
        // k GPUs, each with m links to every other, hold floor(m (k - 1) / 2) cycles (Walecki's construction).
        return most;
    }
    let most = if links.gpus > TABULATED { most.min(2) } else { most };
    let mut search = Search::new(links, set);
    search.pack(most);
    search.found
}

/// The step limit of the search in a set of `size`.
fn steps(links: &Collective, size: usize) -> u32 {
    match (size, links.gpus) {
        (..=8, ..=8) => STEPS,
        (..=8, _) => STEPS_AMONG_MORE,
        _ => STEPS_BEYOND_8,
    }
}

/// Whether each GPU of the set has as many links to each other one.
fn even_mesh(links: &Collective, set: GpuSet) -> bool {
    let mut counts =
        set.iter().flat_map(|a| set.iter().filter(move |b| *b > a).map(move |b| links.direct[a][b]));
    let first = counts.next();
    counts.all(|count| Some(count) == first)
}

/// A depth-first search for cycles, one after the other, over the links that the earlier ones left.
struct Search {
    size: usize,
    /// Links left of each pair, by position in the set.
    left: [[u8; MAX_GPUS]; MAX_GPUS],
    /// The positions to which each has a link left, as a bit mask.
    linked: [u32; MAX_GPUS],
    steps: u32,
    /// Cycles closed so far, and the most that ever were at once.
    closed: u32,
    found: u32,
}

impl Search {
    fn new(links: &Collective, set: GpuSet) -> Self {
        let mut left = [[0; MAX_GPUS]; MAX_GPUS];
        let mut linked = [0; MAX_GPUS];
        for ((row, linked), a) in left.iter_mut().zip(&mut linked).zip(set) {
            for ((position, cell), b) in row.iter_mut().enumerate().zip(set) {
                *cell = links.direct[a][b];
                *linked |= u32::from(*cell > 0) << position;
            }
        }
        Self { size: set.len(), left, linked, steps: steps(links, set.len()), closed: 0, found: 0 }
    }

    /// Whether `most` cycles were found, those closed so far counted.
    fn pack(&mut self, most: u32) -> bool {
        self.found = self.found.max(self.closed);
        self.closed == most || self.extend(0, 1, most)
    }

    /// Goes on from position `at` of a cycle that has visited the positions in the mask.
    fn extend(&mut self, at: usize, visited: u32, most: u32) -> bool {
        if self.steps == 0 {
            return false;
        }
        self.steps -= 1;
        if GpuSet::from_bits(visited).len() == self.size {
            if self.left[at][0] == 0 {
                return false;
            }
            self.closed += 1;
            let found = self.with_link(at, 0, |search| search.pack(most));
            self.closed -= 1;
            return found;
        }
        // The pair with most links left first: it is the least likely to be missed by a later cycle.
        let mut untried = GpuSet::from_bits(self.linked[at] & !visited);
        while let Some(next) = self.widest(at, untried) {
            untried = untried - GpuSet::single(next);
            if self.with_link(at, next, |search| search.extend(next, visited | 1 << next, most)) {
                return true;
            }
        }
        false
    }

    /// The position among `others` to which `at` has most links left; of several the lowest.
    fn widest(&self, at: usize, others: GpuSet) -> Option<usize> {
        let links = |position: &usize| self.left[at][*position];
        others.iter().max_by_key(|position| (links(position), std::cmp::Reverse(*position)))
    }

    /// Runs `then` with one link between two positions taken, and puts it back if nothing was found.
    fn with_link(&mut self, a: usize, b: usize, then: impl FnOnce(&mut Self) -> bool) -> bool {
        self.set_left(a, b, self.left[a][b] - 1);
        let found = then(self);
        if !found {
            self.set_left(a, b, self.left[a][b] + 1);
        }
        found
    }

    fn set_left(&mut self, a: usize, b: usize, links: u8) {
        for (from, to) in [(a, b), (b, a)] {
            self.left[from][to] = links;
            self.linked[from] = self.linked[from] & !(1 << to) | u32::from(links > 0) << to;
        }
    }
}
