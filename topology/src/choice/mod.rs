//! Which GPUs to take: for every set of free GPUs and every number asked, the best set, from a table made once per kind of
//! machine. Decides by topology alone; who holds what and what is healthy is the caller's, given as the set offered.
//!
//! # The order of the key
//!
//! For a local job, most important first:
//!
//! 1. **B**, what a collective over the set reaches in the ring model ([`Collective::ring`]). Never the sum of pairs: a single
//!    weak GPU or a thin waist decides. Equal for all single GPUs.
//! 2. **NVLink islands** (bridged pairs) split, as few as can be: a single GPU never breaks a pair while a loose one is free.
//! 3. **R**, what the rest is still good for: the mean, over jobs of every size, of the best B they would find in it against the
//!    best on the empty machine, with every held GPU taken to come free with probability 1/16 meanwhile.
//! 4. the **cut bound**, where NVLinks carry the set: of two equal numbers of rings, the better wired.
//! 5. few **NUMA** nodes: the job's processes and buffers have a place near all of its GPUs.
//! 6. **groups kept together**: NVLink islands, PCIe switches, sockets and NUMA nodes, broken as little as can be.
//! 7. **NICs** spared for jobs that need them.
//! 8. the smallest bit mask: equal input gives equal output.
//!
//! A gang member talks through NICs, so for two and more GPUs its NICs and NUMA nodes stand between 1 and 2; where no NIC is
//! known it is chosen like a local job.
//!
//! Why R stands before NICs for local jobs, and the cut bound behind R and of NVLinks alone: replayed against a saturated node
//! (`tests/saturated.rs`), NICs before R cost an 8-GPU V100 node 0.7 to 1.2 points of mean efficiency, and the cut bound of
//! PCIe, which favours sets in two halves and so breaks two sockets where one would do, cost 8 bridged A40s 1.9 points. Where
//! all sets have equal links, as behind NVSwitches, R is equal too, and NUMA nodes decide first.

pub mod devices;
mod explain;
mod fill;
mod kind;
mod remainder;
mod search;
mod surroundings;

use crate::bandwidth::{Rates, gbs};
use crate::collective::Collective;
use crate::machine::Machine;
use crate::mig::placements;
use crate::set::GpuSet;
use surroundings::Surroundings;

pub use kind::{MachineKind, Tables};

/// The most GPUs that every set of is tabulated; machines with more are searched.
pub const TABLE_GPUS: usize = 16;

/// What the GPUs are wanted for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// A job within one node: leaves the GPUs next to NICs to others where it loses nothing.
    #[default]
    Local,
    /// One member of a job over several nodes: wants a NIC for each GPU.
    GangMember,
}

/// A set of GPUs chosen, and what it is worth. Made by [`Table::best`]; [`Table::rate`] rates a set chosen elsewhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The GPUs.
    pub gpus: GpuSet,
    /// What was free when they were chosen.
    pub free: GpuSet,
    /// What they were chosen for.
    pub purpose: Purpose,
    /// B by the ring model, GB/s. 0 for a single GPU, which exchanges nothing.
    pub bandwidth_gbs: f64,
    /// B by the cut bound, GB/s: what no algorithm can exceed.
    pub cut_gbs: f64,
    /// R of what is left: the mean, over jobs of 1 to n GPUs, of the best B they find in it against the best on the empty machine.
    /// From 0, nothing left, to 1, the whole machine.
    pub remainder: f64,
}

impl Choice {
    /// B against the best that as many GPUs reach on the empty machine: 1 is the best possible, or where sets are searched the best that is
    /// found. 1 for a single GPU.
    pub fn quality(&self, table: &Table) -> f64 {
        let best = gbs(table.best_bandwidth(self.gpus.len()));
        if best > 0.0 {
            // A search of the empty machine may miss what one among fewer GPUs finds.
            (self.bandwidth_gbs / best).min(1.0)
        } else {
            1.0
        }
    }

    /// How much of R the choice takes from what was free: R before minus R after.
    pub fn stranded(&self, table: &Table) -> f64 {
        table.remainder(self.free) - self.remainder
    }

    /// Why this set, for people: how it is joined, what it reaches, what it leaves.
    pub fn reason(&self, table: &Table) -> String {
        explain::reason(self, table)
    }
}

/// The best set for every set of free GPUs and every number asked, of one kind of machine. Up to [`TABLE_GPUS`] GPUs an answer is
/// read from memory (at most 3 MB for 16 GPUs); larger machines are searched, see [`Table::best`].
#[derive(Debug, Clone)]
pub struct Table {
    gpus: usize,
    links: Collective,
    surroundings: Surroundings,
    sets: Option<Sets>,
    /// The highest B of each size on the empty machine, MB/s.
    best: Vec<u32>,
    /// By GPU: where MIG instances may lie, if it can be cut and its product is known.
    placements: Vec<Option<Vec<u16>>>,
}

/// What is known of every set, by bit mask.
#[derive(Debug, Clone)]
struct Sets {
    /// B, ring model, MB/s.
    ring: Vec<u32>,
    /// Cut bound, MB/s.
    cut: Vec<u32>,
    /// R after churn, as [`remainder::churned`] gives it.
    churned: Vec<u32>,
    /// R as it stands, as [`remainder::kept`] gives it.
    remainder: Vec<u32>,
    /// Answers for local jobs: for each set of free GPUs, the best of size 1, 2, ... one less than all.
    local: Vec<u16>,
    /// The same for gang members; empty where it is the same.
    gang: Vec<u16>,
}

impl Table {
    /// Tabulates a machine at the rates of its links ([`Rates::of`]).
    pub fn build(machine: &Machine) -> Self {
        Self::with_rates(machine, &Rates::of(machine))
    }

    /// Tabulates a machine at given rates, such as measured ones.
    pub fn with_rates(machine: &Machine, rates: &Rates) -> Self {
        let mut table = Self {
            gpus: machine.gpus().len(),
            links: Collective::new(machine, rates),
            surroundings: Surroundings::new(machine),
            sets: None,
            best: Vec::new(),
            placements: placements::of_gpus(machine.gpus()),
        };
        if table.gpus <= TABLE_GPUS {
            table.tabulate();
        } else {
            table.best = search::best_of_sizes(&table, table.all());
        }
        table
    }

    fn tabulate(&mut self) {
        let rated = self.links.of_all_sets();
        let best = remainder::best_of_sizes(self.gpus, &rated.ring);
        let plain = remainder::plain(self.gpus, &best);
        let mut sets = Sets {
            churned: remainder::churned(self.gpus, &plain),
            remainder: remainder::kept(&plain),
            ring: rated.ring,
            cut: rated.cut,
            local: Vec::new(),
            gang: Vec::new(),
        };
        self.best = best.iter().filter_map(|best| best.last().copied()).collect();
        let of_every_set = |term: &dyn Fn(GpuSet) -> u32| -> Vec<u32> {
            let sets = (0u32..).zip(&sets.ring);
            sets.map(|(bits, _)| term(GpuSet::from_bits(bits))).collect()
        };
        let shared = fill::Shared {
            islands: of_every_set(&|set| self.surroundings.islands(set)),
            remainder: sets.churned.iter().map(|r| u64::from(*r)).collect(),
            together: of_every_set(&|set| self.surroundings.together(set)),
        };
        let local = self.terms(&sets, Purpose::Local);
        if self.surroundings.has_nics() {
            let terms = [local, self.terms(&sets, Purpose::GangMember)];
            [sets.local, sets.gang] = fill::best_subsets(self.gpus, &shared, &terms);
        } else {
            [sets.local] = fill::best_subsets(self.gpus, &shared, &[local]);
        }
        self.sets = Some(sets);
    }

    /// The terms of every set's key, packed for [`fill`].
    fn terms(&self, sets: &Sets, purpose: Purpose) -> fill::Terms {
        let mut terms = fill::Terms {
            head: Vec::with_capacity(sets.ring.len()),
            middle: Vec::with_capacity(sets.ring.len()),
            tail: Vec::with_capacity(sets.ring.len()),
        };
        for (bits, (ring, cut)) in (0u32..).zip(sets.ring.iter().zip(&sets.cut)) {
            let key = self.key_of_set(GpuSet::from_bits(bits), *ring, *cut, purpose);
            terms.head.push(key.head);
            terms.middle.push(key.middle);
            terms.tail.push(key.tail);
        }
        terms
    }

    fn key_of_set(&self, set: GpuSet, ring: u32, cut: u32, purpose: Purpose) -> KeyOfSet {
        let nodes = self.surroundings.numa_nodes(set);
        let few_nodes = u64::from(u8::MAX - u8::try_from(nodes).unwrap_or(u8::MAX));
        let around = u64::from(self.surroundings.nics(set, purpose)) << 8 | few_nodes;
        let ring_first = u64::from(ring) << 24;
        let (head, tail) = match purpose {
            Purpose::GangMember if set.len() > 1 && self.surroundings.has_nics() => (ring_first | around, 0),
            _ => (ring_first, around),
        };
        let by_nvlink = ring > self.links.pcie_ring(set);
        let cut = if by_nvlink { u64::from(cut) } else { 0 };
        KeyOfSet {
            head,
            // A single GPU has one node, known or not.
            middle: if set.len() > 1 { cut << 8 | few_nodes } else { cut },
            tail,
        }
    }

    /// The whole key of taking `set` from `free`; of two sets of one size the larger key is the better.
    fn key(&self, set: GpuSet, free: GpuSet, purpose: Purpose) -> Key {
        let rest = free - set;
        let own = self.key_of_set(set, self.ring(set), self.cut(set), purpose);
        Key {
            head: own.head,
            islands: self.surroundings.islands(set) + self.surroundings.islands(rest),
            remainder: self.churned(rest),
            middle: own.middle,
            together: self.surroundings.together(set) + self.surroundings.together(rest),
            tail: own.tail,
            mask: std::cmp::Reverse(set.bits()),
        }
    }

    /// Every GPU of the machine.
    pub fn all(&self) -> GpuSet {
        GpuSet::first(self.gpus)
    }

    /// The best `size` GPUs of `free`, or `None` if there are fewer. GPUs beyond the machine's are no GPUs; size 0 gives the empty
    /// set.
    ///
    /// On machines of more than [`TABLE_GPUS`] GPUs a bounded search answers, in well under 10 ms: it grows a set from every free
    /// GPU, always by the one best joined to it, improves the best of them by exchanges, and compares by the same key without
    /// R. It finds whole islands where they are free; it does not prove that there is nothing better.
    pub fn best(&self, free: GpuSet, size: usize, purpose: Purpose) -> Option<Choice> {
        let free = free & self.all();
        let set = self.best_set(free, size, purpose)?;
        Some(self.rate(set, free, purpose))
    }

    /// The best `size` GPUs of `free` that hold all of `must`, as kubelet asks with `MustIncludeDeviceIDs`.
    ///
    /// `None` where kubelet's own rules allow no answer: fewer than `size` free, more than `size` required, or a required one not
    /// offered. Kubelet takes an empty answer as no preference.
    pub fn best_with(&self, free: GpuSet, must: GpuSet, size: usize, purpose: Purpose) -> Option<Choice> {
        let offered = free & self.all();
        if must.is_empty() {
            return self.best(offered, size, purpose);
        }
        if !must.is_subset(offered) || must.len() > size || size > offered.len() {
            return None;
        }
        let set = if self.sets.is_some() {
            (offered - must)
                .subsets(size - must.len())
                .map(|more| more | must)
                .max_by_key(|set| self.key(*set, offered, purpose))?
        } else {
            search::best(self, offered, must, size, purpose)
        };
        Some(self.rate(set, offered, purpose))
    }

    /// What a set of GPUs taken from `free` is worth, however it was chosen.
    pub fn rate(&self, gpus: GpuSet, free: GpuSet, purpose: Purpose) -> Choice {
        Choice {
            gpus,
            free,
            purpose,
            bandwidth_gbs: gbs(self.ring(gpus)),
            cut_gbs: gbs(self.cut(gpus)),
            remainder: self.remainder(free - gpus),
        }
    }

    /// R of a set of free GPUs as it stands: the mean, over jobs of 1 to n GPUs, of the best B they find in it against the best on
    /// the empty machine. 1 for the whole machine, 0 for none. Beyond [`TABLE_GPUS`] GPUs by the same search as the choices.
    pub fn remainder(&self, free: GpuSet) -> f64 {
        let free = free & self.all();
        if let Some(sets) = &self.sets {
            let known = sets.remainder.get(free.bits() as usize);
            return known.map_or(0.0, |kept| remainder::as_number(*kept));
        }
        let found = search::best_of_sizes(self, free);
        let worth = |(size, found): (usize, &u32)| match self.best_bandwidth(size) {
            0 => 1.0,
            whole => f64::from(*found).min(f64::from(whole)) / f64::from(whole),
        };
        let sum: f64 = found.iter().enumerate().skip(1).map(worth).sum();
        sum / self.gpus as f64
    }

    /// Whether every set is tabulated, so that the best is known to be the best.
    fn is_exhaustive(&self) -> bool {
        self.sets.is_some()
    }

    /// The highest B that `size` GPUs reach on the empty machine, MB/s; 0 for none and one, and for more than there are.
    fn best_bandwidth(&self, size: usize) -> u32 {
        self.best.get(size).copied().unwrap_or(0)
    }

    /// As [`Table::best`], without what the set is worth: one read for up to [`TABLE_GPUS`] GPUs.
    pub fn best_set(&self, free: GpuSet, size: usize, purpose: Purpose) -> Option<GpuSet> {
        let free = free & self.all();
        if size > free.len() {
            return None;
        }
        if size == 0 || size == free.len() {
            return Some(if size == 0 { GpuSet::EMPTY } else { free });
        }
        let Some(sets) = &self.sets else {
            return Some(search::best(self, free, GpuSet::EMPTY, size, purpose));
        };
        let answers = match purpose {
            Purpose::GangMember if !sets.gang.is_empty() => &sets.gang,
            _ => &sets.local,
        };
        let begin = fill::entries_before(free.bits() as usize);
        let set = answers.get(begin + size - 1)?;
        Some(GpuSet::from_bits(u32::from(*set)))
    }

    fn ring(&self, set: GpuSet) -> u32 {
        let known = self
            .sets
            .as_ref()
            .and_then(|sets| sets.ring.get(set.bits() as usize));
        known.copied().unwrap_or_else(|| self.links.ring(set))
    }

    fn cut(&self, set: GpuSet) -> u32 {
        let known = self
            .sets
            .as_ref()
            .and_then(|sets| sets.cut.get(set.bits() as usize));
        known.copied().unwrap_or_else(|| self.links.cut(set))
    }

    /// R after churn; not known, and so equal, beyond [`TABLE_GPUS`] GPUs.
    fn churned(&self, set: GpuSet) -> u32 {
        let known = self
            .sets
            .as_ref()
            .and_then(|sets| sets.churned.get(set.bits() as usize));
        known.copied().unwrap_or(0)
    }

    /// The NICs behind the same PCIe switches as GPUs of a set (`PIX` or `PXB`), by position in the machine, ascending.
    pub fn near_nics(&self, gpus: GpuSet) -> Vec<usize> {
        self.surroundings.near_nics(gpus & self.all())
    }

    /// Where MIG instances may lie on a GPU, as masks of memory units, if its product is known.
    fn placements(&self, gpu: usize) -> Option<&[u16]> {
        self.placements.get(gpu)?.as_deref()
    }

    /// Bytes of memory the tables take.
    pub fn bytes(&self) -> usize {
        self.sets.as_ref().map_or(0, |sets| {
            4 * (sets.ring.len() + sets.cut.len() + sets.churned.len() + sets.remainder.len())
                + 2 * (sets.local.len() + sets.gang.len())
        })
    }
}

/// The terms of a key that belong to the set alone.
struct KeyOfSet {
    head: u64,
    middle: u64,
    tail: u64,
}

/// A whole key; its fields are compared in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    head: u64,
    islands: u32,
    remainder: u32,
    middle: u64,
    together: u32,
    tail: u64,
    mask: std::cmp::Reverse<u32>,
}

#[cfg(test)]
mod tests;
