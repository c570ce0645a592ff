//! The bandwidth of a collective over a set of GPUs: B by the ring model and by the cut bound. Functions of the links
//! only; the choice among free GPUs is in [`crate::choice`].

mod cut;
mod ring;

use std::fmt;
use std::str::FromStr;

use crate::bandwidth::Rates;
use crate::graph::MachineGraph;
use crate::machine::{MAX_GPUS, Machine, PathClass};
use crate::set::GpuSet;

/// What carries a collective over a set of GPUs, the worst first. Collective libraries use peer-to-peer over PCIe
/// switches, but not across a host bridge unless configured to: the data then goes through the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkClass {
    /// PCIe, two of the GPUs on different NUMA nodes (`SYS`).
    Any,
    /// PCIe within a NUMA node, across a host bridge (`PHB`, `NODE`).
    Numa,
    /// PCIe below one host bridge (`PIX`, `PXB`).
    PcieSwitch,
    /// NVLinks or NVSwitches.
    NvLink,
}

impl LinkClass {
    /// Every class, the best first.
    pub const ALL: [Self; 4] = [Self::NvLink, Self::PcieSwitch, Self::Numa, Self::Any];

    /// The name of the class in a request.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NvLink => "nvlink",
            Self::PcieSwitch => "pcie-switch",
            Self::Numa => "numa",
            Self::Any => "any",
        }
    }
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for LinkClass {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|class| class.as_str() == word).ok_or(())
    }
}

/// The links of one machine, laid out for rating sets of GPUs. Bandwidths are in MB/s, so that they compare exactly.
///
/// - The *ring model* is what NCCL's rings reach today: `2 x edge-disjoint Hamiltonian cycles x rate of a link` over
///   direct NVLinks, plus the lesser injection rate over NVSwitches, if those of the whole set are joined; or, where
///   that is faster, one ring over PCIe, at the rate of the slowest slot, or of the socket link if it is crossed.
/// - The *cut bound* is the upper bound for any algorithm: every part A of a set of k must send its data out, so
///   `(k - 1) x min over A of out(A) / |A|`, over NVLinks alone or over the PCIe tree alone, whichever is faster (NCCL
///   does not mix the two at one level).
///
/// One GPU exchanges nothing: both are 0 for fewer than two GPUs. The ring model never exceeds the cut bound.
#[derive(Debug, Clone)]
pub struct Collective {
    gpus: usize,
    /// Direct NVLinks of each pair.
    direct: Box<[[u8; MAX_GPUS]; MAX_GPUS]>,
    /// Peers by direct NVLink.
    peers: [u32; MAX_GPUS],
    /// Links into NVSwitches.
    switch: [u32; MAX_GPUS],
    /// The group of joined NVSwitches that they end in.
    island: [u8; MAX_GPUS],
    /// One NVLink, MB/s.
    link_rate: [u32; MAX_GPUS],
    /// PCIe slot, MB/s.
    slot_rate: [u32; MAX_GPUS],
    /// Link between sockets, MB/s.
    socket_rate: u32,
    /// Peers reached only across sockets.
    far: [u32; MAX_GPUS],
    /// Peers reached only across a host bridge, those across sockets included.
    bridged: [u32; MAX_GPUS],
    /// Peers without peer-to-peer access. NVLinks to them carry nothing.
    refused: [u32; MAX_GPUS],
    /// The GPUs of each socket: reachable from one another without crossing.
    sockets: Vec<GpuSet>,
}

impl Collective {
    /// Lays out the links of `machine` at `rates`.
    pub fn new(machine: &Machine, rates: &Rates) -> Self {
        Self::of_graph(machine, rates, &MachineGraph::of(machine))
    }

    /// The same with the machine's graph at hand.
    pub(crate) fn of_graph(machine: &Machine, rates: &Rates, graph: &MachineGraph) -> Self {
        let gpus = machine.gpus().len().min(MAX_GPUS);
        let mut links = Self {
            gpus,
            direct: Box::new([[0; MAX_GPUS]; MAX_GPUS]),
            peers: [0; MAX_GPUS],
            switch: [0; MAX_GPUS],
            island: [0; MAX_GPUS],
            link_rate: [0; MAX_GPUS],
            slot_rate: [0; MAX_GPUS],
            socket_rate: rates.socket.effective,
            far: [0; MAX_GPUS],
            bridged: [0; MAX_GPUS],
            refused: [0; MAX_GPUS],
            sockets: graph.gpu_groups(PathClass::Node),
        };
        for refusal in machine.no_peer_access() {
            let [a, b] = refusal.gpus.map(usize::from);
            links.refused[a] |= 1 << b;
            links.refused[b] |= 1 << a;
        }
        for a in 0..gpus {
            links.switch[a] = u32::from(machine.switch_links(a));
            links.island[a] = machine.switch_island(a);
            links.link_rate[a] = rates.nvlink_of(a).effective;
            links.slot_rate[a] = rates.pcie_of(a).effective;
            for b in (0..gpus).filter(|b| *b != a) {
                let works = links.refused[a] & 1 << b == 0;
                let direct = if works { machine.direct_nvlinks(a, b) } else { 0 };
                links.direct[a][b] = direct;
                if direct > 0 {
                    links.peers[a] |= 1 << b;
                }
                let class = machine.paths().get(a, b);
                links.far[a] |= u32::from(class.crosses_sockets()) << b;
                links.bridged[a] |= u32::from(class > PathClass::Pxb) << b;
            }
        }
        links
    }

    /// B by the ring model, MB/s. The count of edge-disjoint cycles is found by a bounded search, exact on every NVLink
    /// mesh of up to 8 GPUs that is built; on others it may be below the best packing, but never above.
    pub fn ring(&self, set: GpuSet) -> u32 {
        if set.len() < 2 {
            return 0;
        }
        let cycles = ring::cycles(self, set, cut::narrowest(self, set).cycles);
        self.nvlink_ring(set, cycles).max(self.pcie_ring(set))
    }

    /// The cut bound, MB/s, rounded down. Tries every cut of a set that direct NVLinks join, `2^(k-1)` steps; beyond 16
    /// such GPUs only the cuts that separate one.
    pub fn cut(&self, set: GpuSet) -> u32 {
        if set.len() < 2 {
            return 0;
        }
        self.nvlink_cut(set, cut::narrowest(self, set)).max(self.pcie_cut(set))
    }

    /// B of every set of the machine's first 16 GPUs, both models, indexed by bit mask.
    pub(crate) fn of_all_sets(&self) -> AllSets {
        let tables = cut::Tables::new(self);
        let mut ring = vec![0; tables.sets()];
        let mut cut = vec![0; tables.sets()];
        for (bits, (ring, cut)) in (0u32..).zip(ring.iter_mut().zip(&mut cut)) {
            let set = GpuSet::from_bits(bits);
            if set.len() < 2 {
                continue;
            }
            let narrowest = tables.narrowest(self, set);
            let cycles = ring::cycles(self, set, narrowest.cycles);
            *ring = self.nvlink_ring(set, cycles).max(self.pcie_ring(set));
            *cut = self.nvlink_cut(set, narrowest).max(self.pcie_cut(set));
        }
        AllSets { ring, cut }
    }

    fn nvlink_ring(&self, set: GpuSet, cycles: u32) -> u32 {
        let direct = match (set.len(), set.lowest()) {
            // Two GPUs: every link carries one ring, there and back.
            (2, Some(a)) => set.iter().last().map_or(0, |b| u32::from(self.direct[a][b])),
            _ => 2 * cycles,
        };
        (direct + self.lowest_switch_links(set)).saturating_mul(self.link_rate(set))
    }

    fn nvlink_cut(&self, set: GpuSet, narrowest: cut::MinimumCut) -> u32 {
        if set.iter().any(|gpu| self.switch[gpu] > 0) && !self.is_peer_to_peer(set) {
            return 0;
        }
        let rate = u64::from(self.link_rate(set));
        let others = set.len().saturating_sub(1) as u64;
        let bound = others * narrowest.scaled * rate / cut::SCALE;
        u32::try_from(bound).unwrap_or(u32::MAX)
    }

    /// The slowest NVLink in the set.
    fn link_rate(&self, set: GpuSet) -> u32 {
        set.iter().map(|gpu| self.link_rate[gpu]).min().unwrap_or(0)
    }

    fn slot_rate(&self, set: GpuSet) -> u32 {
        set.iter().map(|gpu| self.slot_rate[gpu]).min().unwrap_or(0)
    }

    /// One ring over PCIe: the slowest slot, or the socket link if it is crossed.
    pub(crate) fn pcie_ring(&self, set: GpuSet) -> u32 {
        let slots = self.slot_rate(set);
        if self.crosses_sockets(set) { slots.min(self.socket_rate) } else { slots }
    }

    /// What carries a collective over the set; [`LinkClass::NvLink`] for a single GPU, which exchanges nothing.
    pub fn class(&self, set: GpuSet) -> LinkClass {
        self.class_at(set, self.ring(set))
    }

    /// The same where the ring model is known.
    pub(crate) fn class_at(&self, set: GpuSet, ring: u32) -> LinkClass {
        if set.len() < 2 || ring > self.pcie_ring(set) {
            LinkClass::NvLink
        } else if self.crosses_sockets(set) {
            LinkClass::Any
        } else if Self::has_pair(&self.bridged, set) {
            LinkClass::Numa
        } else {
            LinkClass::PcieSwitch
        }
    }

    /// Whether two GPUs of the set reach each other only across sockets.
    pub(crate) fn crosses_sockets(&self, set: GpuSet) -> bool {
        Self::has_pair(&self.far, set)
    }

    /// Whether every two GPUs of the set have peer-to-peer access, as far as is known.
    pub(crate) fn is_peer_to_peer(&self, set: GpuSet) -> bool {
        !Self::has_pair(&self.refused, set)
    }

    /// Whether two GPUs of the set are peers of each other in `peers`.
    fn has_pair(peers: &[u32; MAX_GPUS], set: GpuSet) -> bool {
        set.iter().any(|gpu| peers[gpu] & set.bits() != 0)
    }

    /// NVLinks within the set: direct ones, and those into switches that join all of it.
    pub(crate) fn nvlinks(&self, set: GpuSet) -> u32 {
        let direct = |gpu: usize| -> u32 {
            let peers = GpuSet::from_bits(self.peers[gpu]) & set;
            peers.iter().map(|peer| u32::from(self.direct[gpu][peer])).sum()
        };
        let size = u32::try_from(set.len()).unwrap_or(u32::MAX);
        let switched = if size < 2 { 0 } else { size * self.lowest_switch_links(set) };
        set.iter().map(direct).sum::<u32>() / 2 + switched
    }

    /// The fewest links that a GPU of the set has into the NVSwitches that join it; 0 where its switches are not
    /// joined, or two of its GPUs have no peer-to-peer access.
    pub(crate) fn lowest_switch_links(&self, set: GpuSet) -> u32 {
        let mut islands = set.iter().map(|gpu| self.island[gpu]);
        let first = islands.next();
        if islands.any(|island| Some(island) != first) || !self.is_peer_to_peer(set) {
            return 0;
        }
        set.iter().map(|gpu| self.switch[gpu]).min().unwrap_or(0)
    }

    /// The best single path between two GPUs, MB/s.
    pub(crate) fn pair(&self, a: usize, b: usize) -> u32 {
        let switched = self.lowest_switch_links(GpuSet::single(a).with(b));
        let links = u32::from(self.direct[a][b]) + switched;
        let nvlink = links.saturating_mul(self.link_rate[a].min(self.link_rate[b]));
        nvlink.max(self.pcie_ring(GpuSet::single(a).with(b)))
    }

    /// In a tree the narrowest cut is one edge: any other cut divides the set into pieces, each behind an edge of its
    /// own. The edges are the slots, with one GPU on one side, and the socket links. Uplinks of PCIe switches are as
    /// wide as a slot and have more GPUs on each side, so a slot is never wider.
    fn pcie_cut(&self, set: GpuSet) -> u32 {
        let size = set.len() as u64;
        let sockets = self.sockets.iter().map(|socket| (*socket & set).len() as u64);
        let links = sockets
            .filter(|near| *near > 0 && *near < size)
            .map(|near| (size - 1) * u64::from(self.socket_rate) / near.max(size - near));
        let narrowest = links.min().unwrap_or(u64::MAX).min(u64::from(self.slot_rate(set)));
        u32::try_from(narrowest).unwrap_or(u32::MAX)
    }
}

/// B of every set, by bit mask.
pub(crate) struct AllSets {
    /// Ring model, MB/s.
    pub(crate) ring: Vec<u32>,
    /// Cut bound, MB/s.
    pub(crate) cut: Vec<u32>,
}

#[cfg(test)]
mod tests;
