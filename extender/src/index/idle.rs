//! GPUs that compute nothing as far as the ledger shows, by cause; how many pods and which gangs still fit; devices that pods wait for. For metrics: owned
//! values, nothing is decided here.
//!
//! A device counts as its share of the node's GPUs, so that MIG devices and replicas add up to GPUs.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::Needs;
use gantry_gang::fabric::DomainIx;
use gantry_gang::needs::{Toleration, TolerationValue};
use gantry_planner::inventory::Inventory;
use gantry_planner::snapshot::NodeIx;

use super::GangViews;
use super::facts::Facts;
use super::node::Node;
use super::node_resources_table::NodeResourcesTable;

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

/// Disjoint sets of [`SET_SIZES`] devices, each set on one node.
type Sets = [usize; SET_SIZES.len()];

/// The level of a gang without a rule about the fabric.
const CLUSTER: &str = "cluster";

/// Idle GPUs and waiting pods at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct IdleTotals {
    /// Idle GPUs.
    pub gpus: BTreeMap<IdleKey, f64>,
    /// Free sets on nodes that take pods, by resource.
    pub free_sets: BTreeMap<ResourceName, Sets>,
    /// The most free sets within one domain of a level of the fabric, by resource and level: the members of the largest gang
    /// that fits there. The whole cluster is a level.
    pub largest_gangs: BTreeMap<(ResourceName, Arc<str>), Sets>,
    /// Devices that members of waiting gangs and refused pods ask for, by namespace.
    pub waiting: BTreeMap<Arc<str>, u64>,
}

impl IdleTotals {
    pub(super) fn of(facts: &Facts, gangs: GangViews<'_>, tolerations: Vec<Toleration>) -> Self {
        let mut totals = Self::default();
        let mut domains = DomainSets::new(&facts.resources, tolerations);
        for (number, node) in facts.nodes.iter() {
            if let Some(inventory) = node.inventory() {
                totals.add_node(node, inventory);
                totals.add_sets((number, node), &mut domains);
            }
        }
        totals.largest_gangs = domains.largest();
        for (namespace, devices) in gangs.awaited_devices() {
            totals.add_waiting(namespace, devices);
        }
        for (uid, pod) in facts.unschedulable.refused() {
            // A member's devices are counted with its gang.
            if gangs.of_pod(uid).is_none() {
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
        let mut reserved = 0;
        for (pool, ledger) in node.pools() {
            let free = ledger.free.len();
            add(if is_used { IdleCause::Fragment } else { IdleCause::Free }, &nobody, free);
            add(IdleCause::Leaving, &nobody, (&ledger.leaving - &ledger.held).len());
            add(IdleCause::Unhealthy, &nobody, (&(&pool.all - &pool.healthy) - &ledger.held).len());
            reserved += (&ledger.reserved - &ledger.held).len();
        }
        for reservation in node.occupancy().gang_reservations() {
            let devices = reservation.devices.iter().map(|(_, ids)| ids.len()).sum::<usize>().min(reserved);
            add(IdleCause::Reserved, &reservation.gang.namespace, devices);
            reserved -= devices;
        }
        // Binds under way.
        add(IdleCause::Reserved, &nobody, reserved);
    }

    /// Counts the free sets of a node, if it takes pods. A marked node, or one with a plugin that does not serve, has nothing
    /// free in its ledger.
    fn add_sets<'i>(&mut self, (number, node): (NodeIx, &'i Node), domains: &mut DomainSets<'i>) {
        let is_open = domains.takes_pods(number, node);
        for (pool, ledger) in node.pools() {
            let own = self.free_sets.entry(pool.resource.clone()).or_default();
            let free = if is_open { ledger.free.len() } else { 0 };
            let sets = SET_SIZES.map(|size| free / size);
            add(own, &sets);
            domains.add(number, &pool.resource, &sets);
        }
    }
}

fn add(own: &mut Sets, more: &Sets) {
    own.iter_mut().zip(more).for_each(|(own, more)| *own += more);
}

/// Free sets by domain of the fabric.
struct DomainSets<'i> {
    resources: &'i NodeResourcesTable,
    /// A pod that has only the tolerations of the members of known gangs.
    needs: Needs,
    /// By resource, level and domain.
    sets: BTreeMap<(&'i ResourceName, Option<usize>, DomainIx), Sets>,
}

impl<'i> DomainSets<'i> {
    fn new(resources: &'i NodeResourcesTable, tolerations: Vec<Toleration>) -> Self {
        let needs = Needs { tolerations, ..Needs::default() };
        Self { resources, needs, sets: BTreeMap::new() }
    }

    /// Whether a node takes a pod without a selector. GPU nodes often have a taint with the name of the resource, which pods
    /// of that resource tolerate.
    fn takes_pods(&self, number: NodeIx, node: &Node) -> bool {
        if self.resources.admits(number, &self.needs) {
            return true;
        }
        let of_resource = |resource: &ResourceName| Toleration {
            key: resource.as_str().into(),
            value: TolerationValue::Any,
            effect: None,
        };
        let own = node.pools().map(|(pool, _)| of_resource(&pool.resource));
        let mut needs = self.needs.clone();
        needs.tolerations.extend(own);
        self.resources.admits(number, &needs)
    }

    fn add(&mut self, number: NodeIx, resource: &'i ResourceName, sets: &Sets) {
        let fabric = self.resources.fabric();
        let levels = (0..fabric.levels.0.len()).filter(|level| fabric.in_use(*level));
        let within = levels.filter_map(|level| Some((Some(level), fabric.of_node_at(number.0, level)?)));
        for (level, domain) in within.chain([(None, DomainIx(0))]) {
            add(self.sets.entry((resource, level, domain)).or_default(), sets);
        }
    }

    fn largest(self) -> BTreeMap<(ResourceName, Arc<str>), Sets> {
        let levels = &self.resources.fabric().levels.0;
        let mut largest: BTreeMap<(ResourceName, Arc<str>), Sets> = BTreeMap::new();
        for ((resource, level, _), sets) in self.sets {
            let level = level.and_then(|level| levels.get(level));
            let level = level.map_or_else(|| CLUSTER.into(), |level| Arc::clone(&level.name));
            let most = largest.entry((resource.clone(), level)).or_default();
            most.iter_mut().zip(sets).for_each(|(most, sets)| *most = (*most).max(sets));
        }
        largest
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

#[cfg(test)]
mod tests;
