//! Kinds of machine: nodes whose machines are equal for every choice share one choice table. Most clusters have a
//! handful of kinds. The only caller of the topology crate's choice.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use gantry_topology::choice::TABLE_GPUS;
use gantry_topology::choice::devices::choose;
pub use gantry_topology::choice::devices::{Sharing, Spot, Units};
use gantry_topology::{Choice, GpuSet, LinkClass, Machine, MachineKind, NicSet, Purpose, Rates, Table};

use crate::devices::DeviceSet;
use crate::placement::SetTerms;
use crate::shape::Parts;

/// One kind of machine with its choice table. Equal only to itself.
#[derive(Debug)]
pub struct Kind {
    id: u32,
    machine: Arc<Machine>,
    table: Table,
    /// Choices on machines too large for a table, by free GPUs and size.
    searched: Mutex<HashMap<(GpuSet, usize, Purpose), Option<Choice>>>,
}

/// ScoreCache choices per kind.
const SEARCHED: usize = 4096;

impl Kind {
    fn new(id: u32, machine: &Machine) -> Self {
        Self {
            id,
            machine: Arc::new(machine.clone()),
            table: Table::build(machine),
            searched: Mutex::default(),
        }
    }

    /// The machine. Names and UUIDs in it are those of the first of its kind.
    pub fn machine(&self) -> &Arc<Machine> {
        &self.machine
    }

    /// How many GPUs such a machine has.
    pub fn gpus(&self) -> usize {
        self.machine.gpus().len()
    }

    /// The bandwidth of all pairs of GPUs together, MB/s: what the machine is worth to a job that needs little of it.
    pub fn total_megabytes(&self) -> u64 {
        let rates = Rates::of(&self.machine);
        let pairs = (0..self.gpus()).flat_map(|b| (0..b).map(move |a| (a, b)));
        pairs.map(|(a, b)| u64::from(rates.pair(&self.machine, a, b).effective)).sum()
    }

    /// The best set of `size` GPUs of `free` that meets terms of links; `None` if there is none.
    pub fn best_meeting(
        &self,
        free: GpuSet,
        size: usize,
        purpose: Purpose,
        terms: &SetTerms,
    ) -> Option<GpuSet> {
        if size < 2 || !terms.are_of_links() {
            return self.best_for(free, size, purpose);
        }
        let is_met = |gpus| terms.are_met(self.class(gpus), self.bandwidth(gpus));
        self.table.best_where(free, size, purpose, is_met)
    }

    /// The rails of a set: its nearest NICs.
    pub fn rails(&self, gpus: GpuSet) -> NicSet {
        self.table.rails(gpus)
    }

    /// The best `size` GPUs of `free` among the sets that `accepts` takes.
    pub fn best_where(
        &self,
        free: GpuSet,
        size: usize,
        purpose: Purpose,
        accepts: impl Fn(GpuSet) -> bool,
    ) -> Option<GpuSet> {
        self.table.best_where(free, size, purpose, accepts)
    }

    /// What carries a collective over a set.
    pub fn class(&self, gpus: GpuSet) -> LinkClass {
        self.table.class(gpus)
    }

    /// The farthest link between two GPUs of a set, as `nvidia-smi topo -m` prints it, unless NVLinks carry the set.
    pub fn link_name(&self, gpus: GpuSet) -> String {
        if self.class(gpus) == LinkClass::NvLink {
            return "NVLink".to_owned();
        }
        let pairs = gpus.iter().flat_map(|a| gpus.iter().take_while(move |b| *b < a).map(move |b| (a, b)));
        let farthest = pairs.map(|(a, b)| self.machine.paths().get(a, b)).max();
        farthest.map_or_else(String::new, |class| class.to_string())
    }

    /// The best `size` GPUs of `free`; `None` if there are fewer.
    pub fn best(&self, free: GpuSet, size: usize) -> Option<GpuSet> {
        self.best_for(free, size, Purpose::Local)
    }

    /// The same for a purpose.
    pub fn best_for(&self, free: GpuSet, size: usize, purpose: Purpose) -> Option<GpuSet> {
        self.choose(free, size, purpose).map(|choice| choice.gpus)
    }

    /// The best `size` devices of `free` where a GPU has several; `None` if there are fewer. `cut` are MIG devices of
    /// other resources in use on the same GPUs.
    pub fn best_parts(
        &self,
        parts: &Parts,
        cut: &[Spot],
        free: &DeviceSet,
        size: usize,
    ) -> Option<DeviceSet> {
        let offered: Vec<u16> = free.iter().filter_map(|device| u16::try_from(device).ok()).collect();
        if size == offered.len() {
            return Some(free.clone());
        }
        if size > offered.len() {
            return None;
        }
        let mut all;
        let spots = if cut.is_empty() {
            parts.spots()
        } else {
            all = parts.spots().to_vec();
            all.extend_from_slice(cut);
            &all
        };
        let chosen = choose(Some(&self.table), spots, &offered, &[], size, parts.sharing());
        (chosen.len() == size).then(|| chosen.into_iter().map(usize::from).collect())
    }

    /// Bandwidth in GB/s that a collective over a set reaches.
    pub fn bandwidth(&self, gpus: GpuSet) -> f64 {
        self.table.rate(gpus, gpus, Purpose::Local).bandwidth_gbs
    }

    /// How much of what `free` is good for is lost when `gpus` are taken, from 0 to 1.
    pub fn stranded(&self, free: GpuSet, gpus: GpuSet) -> f64 {
        self.table.remainder(free) - self.table.remainder(free - gpus)
    }

    /// Why `gpus` were chosen out of `free`, as one sentence.
    pub fn explain(&self, free: GpuSet, gpus: GpuSet, purpose: Purpose) -> String {
        self.table.rate(gpus, free, purpose).reason(&self.table)
    }

    fn choose(&self, free: GpuSet, size: usize, purpose: Purpose) -> Option<Choice> {
        if self.gpus() <= TABLE_GPUS {
            return self.table.best(free, size, purpose);
        }
        let mut searched = self.searched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = searched.get(&(free, size, purpose)) {
            return *known;
        }
        if searched.len() >= SEARCHED {
            searched.clear();
        }
        let found = self.table.best(free, size, purpose);
        searched.insert((free, size, purpose), found);
        found
    }
}

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Kind {}

impl Hash for Kind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

/// The kinds of a cluster's machines.
#[derive(Debug, Default)]
pub struct Kinds {
    known: HashMap<MachineKind, Arc<Kind>>,
    made: u32,
}

impl Kinds {
    /// The kind of a machine. Building the table of a new one takes up to 0.2 s for 16 GPUs.
    pub fn of(&mut self, machine: &Machine) -> Arc<Kind> {
        let made = &mut self.made;
        let kind = self.known.entry(MachineKind::of(machine)).or_insert_with(|| {
            *made += 1;
            Arc::new(Kind::new(*made, machine))
        });
        Arc::clone(kind)
    }

    /// Drops the kinds that no node has any more.
    pub fn forget_unused(&mut self) {
        self.known.retain(|_, kind| Arc::strong_count(kind) > 1);
    }
}
