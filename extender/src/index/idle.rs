//! GPUs that compute nothing as far as the ledger shows, by cause; room for more; devices that pods wait for. For metrics: owned
//! values, nothing is decided here.
//!
//! A device counts as its share of the node's GPUs, so that MIG devices and replicas add up to GPUs.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_planner::inventory::Inventory;

use super::Index;
use super::node::Node;

/// Why a GPU is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum IdleCause {
    /// Free, on a node where nothing else is in use.
    Free,
    /// Free, beside devices of the same node that are in use: of use to small pods only.
    Fragment,
    /// Reserved for a gang or a bind.
    Reserved,
    /// Kept while processes of a deleted pod may still run.
    Leaving,
    /// Unhealthy or cordoned.
    Unhealthy,
}

impl IdleCause {
    /// The label's value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Fragment => "fragment",
            Self::Reserved => "reserved",
            Self::Leaving => "leaving",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// What an idle GPU is counted under.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdleKey {
    /// Why it is idle.
    pub cause: IdleCause,
    /// Namespace of the gang with the reservation; empty for other causes.
    pub namespace: Arc<str>,
    /// GPU model of the node; `mixed` for several.
    pub model: Arc<str>,
}

/// Numbers of devices on one node for which free sets are counted.
pub const SET_SIZES: [usize; 5] = [1, 2, 4, 8, 16];

/// Idle GPUs and waiting pods at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct IdleTotals {
    /// Idle GPUs.
    pub gpus: BTreeMap<IdleKey, f64>,
    /// Disjoint free sets of [`SET_SIZES`] devices, each on one node, by resource.
    pub free_sets: BTreeMap<ResourceName, [usize; SET_SIZES.len()]>,
    /// Devices that members of waiting gangs and refused pods ask for, by namespace.
    pub waiting: BTreeMap<Arc<str>, u64>,
}

impl IdleTotals {
    pub(super) fn of(index: &Index) -> Self {
        let mut totals = Self::default();
        for (_, node) in index.nodes.iter() {
            if let Some(inventory) = node.inventory() {
                totals.add_node(node, inventory);
            }
        }
        for (namespace, devices) in index.devices_awaited_by_gangs() {
            totals.add_waiting(namespace, devices);
        }
        for (uid, pod) in index.unschedulable.refused() {
            // A member's devices are counted with its gang.
            if index.gang_of(uid).is_none() {
                let devices = pod.request.asks.iter().map(|ask| u64::from(ask.devices)).sum();
                totals.add_waiting(&pod.namespace, devices);
            }
        }
        totals
    }

    fn add_waiting(&mut self, namespace: &Arc<str>, devices: u64) {
        if devices > 0 {
            *self.waiting.entry(Arc::clone(namespace)).or_default() += devices;
        }
    }

    fn add_node(&mut self, node: &Node, inventory: &Inventory) {
        let devices: usize = inventory.pools.iter().map(|pool| pool.all.len()).sum();
        if devices == 0 {
            return;
        }
        let share = inventory.kind.gpus() as f64 / devices as f64;
        let model = model(inventory);
        let mut add = |cause, namespace: &Arc<str>, devices: usize| {
            if devices > 0 {
                let key = IdleKey { cause, namespace: Arc::clone(namespace), model: Arc::clone(&model) };
                *self.gpus.entry(key).or_default() += devices as f64 * share;
            }
        };
        let nobody: Arc<str> = "".into();
        let used = |held: usize, reserved: usize, leaving: usize| held + reserved + leaving > 0;
        let is_used = node
            .pools()
            .any(|(_, ledger)| used(ledger.held.len(), ledger.reserved.len(), ledger.leaving.len()));
        let (mut reserved, mut free_sets) = (0, Vec::new());
        for (pool, ledger) in node.pools() {
            let free = ledger.free.len();
            add(if is_used { IdleCause::Fragment } else { IdleCause::Free }, &nobody, free);
            add(IdleCause::Leaving, &nobody, (&ledger.leaving - &ledger.held).len());
            add(IdleCause::Unhealthy, &nobody, (&(&pool.all - &pool.healthy) - &ledger.held).len());
            reserved += (&ledger.reserved - &ledger.held).len();
            free_sets.push((&pool.resource, free));
        }
        for reservation in node.occupancy().gang_reservations() {
            let devices = reservation.devices.iter().map(|(_, ids)| ids.len()).sum::<usize>().min(reserved);
            add(IdleCause::Reserved, &reservation.gang.namespace, devices);
            reserved -= devices;
        }
        // Binds under way.
        add(IdleCause::Reserved, &nobody, reserved);
        for (resource, free) in free_sets {
            let sets = self.free_sets.entry(resource.clone()).or_default();
            for (sets, size) in sets.iter_mut().zip(SET_SIZES) {
                *sets += free / size;
            }
        }
    }
}

/// The GPU model of a node.
fn model(inventory: &Inventory) -> Arc<str> {
    match &*inventory.models {
        [] => "".into(),
        [first, others @ ..] if others.iter().all(|other| other == first) => Arc::clone(first),
        _ => "mixed".into(),
    }
}
