//! The choice of GPUs: the best set for every set of free GPUs and every size, from a table built once per kind of
//! machine. The choice is by topology alone; the caller passes the free and healthy GPUs.
//!
//! # The order of the key
//!
//! For a local job, most important first:
//!
//! 1. **B**, the bandwidth of a collective over the set in the ring model ([`Collective::ring`]). Never the sum of
//!    pairs: a single weak GPU or a thin waist decides. Links count as they are: a PCIe link trained below its width and
//!    NVLinks that are down lower B. Equal for all single GPUs.
//! 2. **Peer-to-peer**: sets in which all GPUs have it, as far as NVML reports, before sets with a pair without it.
//! 3. the **class** of what carries the set ([`Collective::class`]): NVLinks, then PCIe switches, then a host bridge, then
//!    the link between sockets. The wire may be as fast, but collective libraries do not use peer-to-peer across a host
//!    bridge unless configured to.
//! 4. the fewest **degraded** GPUs: throttled, or with PCIe or NVLinks below what they should have. B shows neither in
//!    a single GPU.
//! 5. the most **NVLinks** within the set: of two equal numbers of rings, the better wired.
//! 6. the fewest **NVLink islands** (bridged pairs) split: a single GPU never splits a pair while an unpaired one is
//!    free.
//! 7. **R**, the value of the remaining GPUs: the mean, over jobs of every size, of the best B in them relative to the
//!    best on the empty machine. Every allocated GPU counts as free with probability 1/16.
//! 8. the **cut bound**, if NVLinks carry the set.
//! 9. few **NUMA** nodes: the job's processes and buffers fit near all of its GPUs.
//! 10. **groups kept together**: the fewest NVLink islands, PCIe switches, sockets and NUMA nodes split.
//! 11. **NICs** left to jobs that need them.
//! 12. the smallest bit mask: equal input gives equal output.
//!
//! A gang member communicates through NICs: for two and more GPUs, its NICs and NUMA nodes come between 5 and 6. On a
//! machine without known NICs, it is chosen like a local job.
//!
//! R precedes NICs for local jobs, and the cut bound follows R and counts NVLinks only, for reasons measured on a
//! saturated node (`tests/saturated.rs`). NICs before R cost an 8-GPU V100 node 0.7 to 1.2 points of mean efficiency.
//! The cut bound of PCIe favours sets in two halves, which splits two sockets instead of one: it cost 8 bridged A40s
//! 1.9 points. NVLinks before R gain 0.4 points on the V100 node by the ring model and 2.8 by the cut bound. If all sets
//! have equal links, as behind NVSwitches, R is equal too, and NUMA nodes decide first.

pub mod devices;
mod explain;
mod fill;
mod search;
mod surroundings;

use std::collections::HashMap;
use std::sync::Arc;

use crate::bandwidth::{Rates, gbs};
use crate::collective::{Collective, LinkClass};
use crate::graph::MachineGraph;
use crate::machine::{Degradation, Machine, PathClass};
use crate::mig::placements_of;
use crate::nics::NicSet;
use crate::set::GpuSet;
use surroundings::{Surroundings, known_numa_nodes};

/// The most GPUs that every set of is tabulated; machines with more are searched.
pub const TABLE_GPUS: usize = 16;

/// The purpose of a request for GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// A job within one node: leaves the GPUs next to NICs to other jobs if that costs nothing.
    #[default]
    Local,
    /// One member of a job over several nodes: wants a NIC for each GPU.
    GangMember,
}

/// A chosen set of GPUs and its rating. Returned by [`Table::best`]; [`Table::rate`] rates any other set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The GPUs.
    pub gpus: GpuSet,
    /// The GPUs that were free before the choice.
    pub free: GpuSet,
    /// The purpose of the choice.
    pub purpose: Purpose,
    /// B by the ring model, GB/s. 0 for a single GPU, which exchanges nothing.
    pub bandwidth_gbs: f64,
    /// B by the cut bound, GB/s: the upper bound for any algorithm.
    pub cut_gbs: f64,
    /// R of the remaining GPUs: the mean, over jobs of 1 to n GPUs, of the best B in them relative to the best on the
    /// empty machine. From 0 (none left) to 1 (the whole machine).
    pub remainder: f64,
}

impl Choice {
    /// B relative to the best set of the same size on the empty machine, from 0 to 1. On a machine too large for a
    /// table, relative to the best set found. 1 for a single GPU.
    pub fn quality(&self, table: &Table) -> f64 {
        let best = gbs(table.best_bandwidth(self.gpus.len()));
        if best > 0.0 {
            // A search of the empty machine may miss what one among fewer GPUs finds.
            (self.bandwidth_gbs / best).min(1.0)
        } else {
            1.0
        }
    }

    /// The loss of R by this choice: R before minus R after.
    pub fn stranded(&self, table: &Table) -> f64 {
        table.remainder(self.free) - self.remainder
    }
}

/// The best set for every set of free GPUs and every size, of one kind of machine. Up to [`TABLE_GPUS`] GPUs, a choice
/// is one read from memory (at most 3 MB for 16 GPUs). Larger machines are searched, see [`Table::best`].
#[derive(Debug, Clone)]
pub struct Table {
    gpus: usize,
    links: Collective,
    surroundings: Surroundings,
    sets: Option<Sets>,
    /// The highest B of each size on the empty machine, MB/s.
    best: Vec<u32>,
    /// By GPU: the placements of MIG instances, if it supports MIG and its product is known.
    placements: Vec<Option<Vec<u16>>>,
    /// By GPU: what it lacks.
    degradations: Vec<Vec<Degradation>>,
}

/// The ratings of every set, by bit mask.
#[derive(Debug, Clone)]
struct Sets {
    /// B, ring model, MB/s.
    ring: Vec<u32>,
    /// Cut bound, MB/s.
    cut: Vec<u32>,
    /// R after churn, as [`fill::churned_remainder`] returns it.
    churned: Vec<u32>,
    /// R without churn, as [`fill::kept_remainder`] returns it.
    remainder: Vec<u32>,
    /// Choices for local jobs: for each set of free GPUs, the best of size 1, 2, ... one less than all.
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
        let graph = MachineGraph::of(machine);
        let mut table = Self {
            gpus: machine.gpus().len(),
            links: Collective::of_graph(machine, rates, &graph),
            surroundings: Surroundings::new(machine, &graph),
            sets: None,
            best: Vec::new(),
            placements: placements_of(machine.gpus()),
            degradations: (0..machine.gpus().len()).map(|gpu| machine.degradations(gpu)).collect(),
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
        let best = fill::bandwidth_of_sizes(self.gpus, &rated.ring);
        let plain = fill::plain_remainder(self.gpus, &best);
        let mut sets = Sets {
            churned: fill::churned_remainder(self.gpus, &plain),
            remainder: fill::kept_remainder(&plain),
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
        let shared = fill::KeyTerms {
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
        // 4 bits, 8 bits, 16 bits and 32 bits for what follows each.
        let of_links = [
            u32::from(self.links.is_peer_to_peer(set)) * 4 + self.links.class_at(set, ring) as u32,
            u32::from(u8::MAX) - self.surroundings.degraded(set),
            self.links.nvlinks(set),
        ];
        let [class, sound, nvlinks] = of_links.map(u128::from);
        let ring_first = u128::from(ring) << 64 | class << 60 | sound << 52 | nvlinks << 36;
        let (head, tail) = match purpose {
            Purpose::GangMember if set.len() > 1 && self.surroundings.has_nics() => {
                (ring_first | u128::from(around), 0)
            }
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

    /// The best `size` GPUs of `free`, or `None` if there are fewer. GPUs beyond the machine's are no GPUs; size 0
    /// gives the empty set.
    ///
    /// Machines of more than [`TABLE_GPUS`] GPUs use a bounded search, in well under 10 ms. It grows a set from every
    /// free GPU, each time by the GPU with the best links to it, improves the best set by exchanges, and compares by
    /// the same key without R. It finds free whole islands, but does not prove that no better set exists.
    pub fn best(&self, free: GpuSet, size: usize, purpose: Purpose) -> Option<Choice> {
        let free = free & self.all();
        let set = self.best_set(free, size, purpose)?;
        Some(self.rate(set, free, purpose))
    }

    /// The best `size` GPUs of `free` that hold all of `must`, as kubelet asks with `MustIncludeDeviceIDs`.
    ///
    /// `None` if kubelet's own rules allow no result: fewer than `size` free, more than `size` required, or a required
    /// one not offered. Kubelet takes an empty response as no preference.
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

    /// The best `size` GPUs of `free` among the sets that `accepts` takes; `None` if there is none. On machines of more than
    /// [`TABLE_GPUS`] GPUs `None` if the search finds none.
    pub fn best_where(
        &self,
        free: GpuSet,
        size: usize,
        purpose: Purpose,
        accepts: impl Fn(GpuSet) -> bool,
    ) -> Option<GpuSet> {
        let free = free & self.all();
        let best = self.best_set(free, size, purpose)?;
        if accepts(best) {
            return Some(best);
        }
        if self.sets.is_some() {
            let accepted = free.subsets(size).filter(|set| accepts(*set));
            return accepted.max_by_key(|set| self.key(*set, free, purpose));
        }
        let found = search::best_by(self, free, GpuSet::EMPTY, size, |set| {
            (accepts(set), self.key(set, free, purpose))
        });
        Some(found).filter(|set| accepts(*set))
    }

    /// What carries a collective over a set of GPUs. Without peer-to-peer access data pass through host memory, below
    /// whatever switch the GPUs are.
    pub fn class(&self, gpus: GpuSet) -> LinkClass {
        let class = self.links.class_at(gpus, self.ring(gpus));
        if self.links.is_peer_to_peer(gpus) { class } else { class.min(LinkClass::Numa) }
    }

    /// Rates any set of GPUs taken from `free`.
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

    /// R of a set of free GPUs: the mean, over jobs of 1 to n GPUs, of the best B in it relative to the best on the
    /// empty machine. 1 for the whole machine, 0 for none. Beyond [`TABLE_GPUS`] GPUs by the same search as the
    /// choices.
    pub fn remainder(&self, free: GpuSet) -> f64 {
        let free = free & self.all();
        if let Some(sets) = &self.sets {
            let known = sets.remainder.get(free.bits() as usize);
            return known.map_or(0.0, |kept| fill::remainder_as_number(*kept));
        }
        let found = search::best_of_sizes(self, free);
        let worth = |(size, found): (usize, &u32)| match self.best_bandwidth(size) {
            0 => 1.0,
            whole => f64::from(*found).min(f64::from(whole)) / f64::from(whole),
        };
        let sum: f64 = found.iter().enumerate().skip(1).map(worth).sum();
        sum / self.gpus as f64
    }

    /// Whether every set is tabulated, so that the best set is certain.
    fn is_exhaustive(&self) -> bool {
        self.sets.is_some()
    }

    /// The highest B that `size` GPUs reach on the empty machine, MB/s; 0 for none and one, and for more than there
    /// are.
    fn best_bandwidth(&self, size: usize) -> u32 {
        self.best.get(size).copied().unwrap_or(0)
    }

    /// As [`Table::best`], without the rating: one read for up to [`TABLE_GPUS`] GPUs.
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
        let known = self.sets.as_ref().and_then(|sets| sets.ring.get(set.bits() as usize));
        known.copied().unwrap_or_else(|| self.links.ring(set))
    }

    fn cut(&self, set: GpuSet) -> u32 {
        let known = self.sets.as_ref().and_then(|sets| sets.cut.get(set.bits() as usize));
        known.copied().unwrap_or_else(|| self.links.cut(set))
    }

    /// R after churn; not known, and so equal, beyond [`TABLE_GPUS`] GPUs.
    fn churned(&self, set: GpuSet) -> u32 {
        let known = self.sets.as_ref().and_then(|sets| sets.churned.get(set.bits() as usize));
        known.copied().unwrap_or(0)
    }

    /// The NICs behind the same PCIe switches as GPUs of a set (`PIX` or `PXB`), by position in the machine, ascending.
    pub fn near_nics(&self, gpus: GpuSet) -> Vec<usize> {
        self.surroundings.near_nics(gpus & self.all())
    }

    /// The rails of a set of GPUs: the NICs to which its GPUs are nearest. Empty if no GPU of it has a NIC on its side of
    /// the link between sockets.
    pub fn rails(&self, gpus: GpuSet) -> NicSet {
        self.surroundings.nearest_nics(gpus & self.all())
    }

    /// The placements of MIG instances on a GPU, as masks of memory units, if its product is known.
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
    head: u128,
    middle: u64,
    tail: u64,
}

/// A whole key; its fields are compared in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    head: u128,
    islands: u32,
    remainder: u32,
    middle: u64,
    together: u32,
    tail: u64,
    mask: std::cmp::Reverse<u32>,
}

/// The facts of a machine that choices depend on: no UUID, address, name or driver. Machines of equal kinds get equal
/// choices. GPUs are in NVML's order; machines that differ in that order only are of different kinds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MachineKind {
    gpus: usize,
    /// Direct NVLinks: the GPUs and how many.
    bundles: Vec<([u8; 2], u8)>,
    /// By GPU: links into NVSwitches, and the group of joined NVSwitches.
    switch_links: Vec<(u8, u8)>,
    rates: Rates,
    /// By GPU: the placements of MIG instances, if it supports MIG and its product is known.
    placements: Vec<Option<Vec<u16>>>,
    /// Path classes among GPUs and from NICs to GPUs, row by row.
    paths: Vec<PathClass>,
    numa: Vec<GpuSet>,
    no_peer_access: Vec<[u8; 2]>,
    /// By GPU: what it lacks.
    degradations: Vec<Vec<Degradation>>,
}

impl MachineKind {
    /// The kind of a machine.
    pub fn of(machine: &Machine) -> Self {
        let gpus = machine.gpus();
        let rows = 0..gpus.len() + machine.nics().len();
        Self {
            gpus: gpus.len(),
            bundles: machine.nvlinks().iter().map(|bundle| (bundle.gpus, bundle.links)).collect(),
            switch_links: (0..gpus.len())
                .map(|gpu| (machine.switch_links(gpu), machine.switch_island(gpu)))
                .collect(),
            rates: Rates::of(machine),
            placements: placements_of(gpus),
            paths: rows
                .flat_map(|row| (0..row.min(gpus.len())).map(move |column| machine.paths().get(row, column)))
                .collect(),
            numa: known_numa_nodes(machine),
            no_peer_access: machine.no_peer_access().iter().map(|refusal| refusal.gpus).collect(),
            degradations: (0..gpus.len()).map(|gpu| machine.degradations(gpu)).collect(),
        }
    }
}

/// The tables of a cluster's machines, one per kind. A cluster has few kinds.
#[derive(Debug, Default)]
pub struct Tables {
    known: HashMap<MachineKind, Arc<Table>>,
}

impl Tables {
    /// The table of a machine, built if its kind is new: up to 0.2 s for 16 GPUs.
    pub fn of(&mut self, machine: &Machine) -> Arc<Table> {
        let built =
            self.known.entry(MachineKind::of(machine)).or_insert_with(|| Arc::new(Table::build(machine)));
        Arc::clone(built)
    }

    /// Drops the tables without other owners.
    pub fn forget_unused(&mut self) {
        self.known.retain(|_, table| Arc::strong_count(table) > 1);
    }

    /// The number of kinds.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there is no kind.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

#[cfg(test)]
mod tests;
