//! Kinds of machines. Machines with the same links, paths, NUMA nodes, rates and MIG placements share a table.

use std::collections::HashMap;
use std::sync::Arc;

use super::Table;
use crate::bandwidth::Rates;
use crate::machine::{Machine, PathClass};
use crate::mig::placements_of;
use crate::set::GpuSet;

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
            numa: machine.numa_nodes(),
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
