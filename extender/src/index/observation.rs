//! What a picture of the cluster needs of the index: facts that are shared with it, taken a few nodes under one lock, and
//! turned into the model of `gantry-map` without the lock. Read only.

use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_gang::protocol::WaitReason;
use gantry_gang::{GangKey, Levels, NodeFacts};
use gantry_map::{Hold, NodeMap, PodOnGpu};
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::{Inventory, Pool};
use gantry_topology::machine::models;

use super::facts::Facts;
use super::inspection::PodNode;
use super::node::Node;
use super::{GangViews, NodeIx};
use crate::ledger::{Devices, Ledger};
use crate::pod::PodFacts;

/// Gangs that are listed at most.
pub const MAX_GANGS: usize = 500;

/// Up to which changes nodes were observed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Grows with every change of a node.
    pub nodes: u64,
    /// Grows when numbers of nodes change: then all nodes must be observed again.
    pub renumbered: u64,
}

/// Some nodes.
#[derive(Debug)]
pub struct ObservedNodes {
    /// The nodes.
    pub nodes: Vec<NodeObservation>,
    /// The number of the next node to be observed; `None` after the last one.
    pub next: Option<u32>,
    /// Up to which changes these are.
    pub revisions: Revisions,
}

/// One node.
#[derive(Debug)]
pub struct NodeObservation {
    /// Its name.
    pub name: NodeName,
    /// `None`: no Gantry plugin publishes it.
    published: Option<InventoryNode>,
}

/// What is known of a node with an inventory.
#[derive(Debug)]
struct InventoryNode {
    inventory: Arc<Inventory>,
    ledger: Arc<Ledger>,
    facts: Option<Arc<NodeFacts>>,
    /// In the order of [`Ledger::pods`].
    pods: Vec<Option<Holder>>,
    /// Pods with a Binding that is being written.
    binds: Vec<(Holder, Devices)>,
    reservations: Vec<(Arc<GangKey>, Devices)>,
}

#[derive(Debug)]
struct Holder {
    pod: Arc<PodFacts>,
    gang: Option<Arc<GangKey>>,
}

/// A pod that asks for managed resources.
#[derive(Debug)]
pub struct PodObservation {
    /// The pod.
    pub pod: Arc<PodFacts>,
    /// Its node and devices, if it is bound.
    pub bound: Option<PodNode>,
    /// Its gang.
    pub gang: Option<Arc<GangKey>>,
    /// Why it waits for its gang, if it does.
    pub waits: Option<WaitReason>,
    /// The node of its reservation.
    pub reserved_on: Option<NodeName>,
    /// Its scheduler, if that does not call Gantry.
    pub other_scheduler: Option<Arc<str>>,
}

impl ObservedNodes {
    /// The nodes that changed after revision `since`, from number `from` on, `most` at a time.
    pub(super) fn of(facts: &Facts, gangs: GangViews<'_>, from: u32, since: u64, most: usize) -> Self {
        let (nodes, renumbered) = facts.nodes.revisions();
        let mut observed = Self { nodes: Vec::new(), next: None, revisions: Revisions { nodes, renumbered } };
        for (number, node) in facts.nodes.iter().skip(from as usize) {
            if node.revision() <= since {
                continue;
            }
            if observed.nodes.len() >= most {
                observed.next = Some(number.0);
                break;
            }
            observed.nodes.push(NodeObservation::of(facts, gangs, number, node));
        }
        observed
    }
}

impl PodObservation {
    /// A pod by its name.
    pub(super) fn of(facts: &Facts, gangs: GangViews<'_>, namespace: &str, name: &str) -> Option<Self> {
        let pod = Arc::clone(facts.pods.find(namespace, name)?);
        Some(Self {
            bound: pod.node.as_ref().map(|node| PodNode::of(facts, &pod, node)),
            gang: gangs.of_pod(&pod.uid).cloned(),
            waits: gangs.why_waits(&pod.uid),
            reserved_on: gangs.node_kept_for(&pod.uid).cloned(),
            other_scheduler: facts.schedulers.other_scheduler_of(&pod),
            pod,
        })
    }
}

impl NodeObservation {
    fn of(facts: &Facts, gangs: GangViews<'_>, number: NodeIx, node: &Node) -> Self {
        let holder = |uid: &PodUid| {
            let gang = gangs.of_pod(uid).cloned();
            Some(Holder { pod: Arc::clone(facts.pods.get(uid)?), gang })
        };
        let published = node.shared().map(|(inventory, ledger)| {
            let occupancy = node.occupancy();
            let binds = occupancy.binds().iter().filter(|bind| node.held_by(bind.uid()).is_none());
            let reservations = occupancy.gang_reservations().iter();
            InventoryNode {
                pods: ledger.pods.iter().map(|(uid, _)| holder(uid)).collect(),
                binds: binds.filter_map(|bind| Some((holder(bind.uid())?, bind.devices().clone()))).collect(),
                reservations: reservations
                    .map(|kept| (Arc::clone(&kept.gang), kept.devices.clone()))
                    .collect(),
                facts: facts.resources.facts(number).cloned(),
                inventory,
                ledger,
            }
        });
        Self { name: node.name().clone(), published }
    }

    /// The node as a map shows it, with its part of the fabric by `levels`; `None` if no Gantry plugin publishes it.
    pub fn to_map(&self, levels: &Levels) -> Option<NodeMap> {
        let InventoryNode { inventory, ledger, facts, pods, binds, reservations } =
            self.published.as_ref()?;
        let mut map = NodeMap::new(self.name.to_string(), Arc::clone(inventory.kind.machine()));
        map.model = models(inventory.models.iter().map(|model| &**model));
        map.not_ready = inventory.not_ready.as_deref().map(str::to_owned);
        if let Some(facts) = facts {
            map.cordoned = facts.unschedulable;
            map.domain = levels.path_of(|label| facts.labels.get(label).map(|value| &**value));
        }
        inventory.cordons.iter().for_each(|cordon| map.cordon(cordon.gpu, &cordon.reason));
        for pool in &inventory.pools {
            for device in pool.all.iter() {
                if let Some(gpu) = pool.gpu_of(device) {
                    let is_healthy = pool.healthy.contains(device);
                    map.add_device(gpu, if is_healthy { None } else { fault_of(inventory, pool, gpu) });
                }
            }
        }
        for ((_, held), holder) in ledger.pods.iter().zip(pods) {
            let Some(holder) = holder else {
                continue;
            };
            let hold = if is_reported(inventory, &holder.pod) { Hold::Held } else { Hold::Granted };
            for (pool, devices) in inventory.pools.iter().zip(held) {
                add(&mut map, pool, devices, &holder.on_gpu(hold));
            }
        }
        for (holder, devices) in binds {
            for (resource, ids) in devices {
                for pool in inventory.pools.iter().filter(|pool| pool.resource == *resource) {
                    add(&mut map, pool, &pool.find(ids).0, &holder.on_gpu(Hold::Granted));
                }
            }
        }
        for (index, (pool, ledger)) in inventory.pools.iter().zip(&ledger.pools).enumerate() {
            let mut nameless = &ledger.leaving - &ledger.held;
            // Pods that are deleted, or that no watch shows.
            for held in inventory.holders.iter().filter(|held| held.pool == index) {
                let devices = &held.devices & &nameless;
                let pod = PodOnGpu {
                    namespace: held.namespace.clone(),
                    name: held.pod.clone(),
                    gang: None,
                    devices: 1,
                    hold: Hold::Leaving,
                };
                add(&mut map, pool, &devices, &pod);
                nameless.remove(&devices);
            }
            nameless.iter().filter_map(|device| pool.gpu_of(device)).for_each(|gpu| map.set_leaving(gpu));
        }
        for (gang, devices) in reservations {
            for (resource, ids) in devices {
                for pool in &inventory.pools {
                    let reserved = pool.taken(resource, ids);
                    let gpus = reserved.iter().filter_map(|device| pool.gpu_of(device));
                    gpus.for_each(|gpu| map.reserve(gpu, &gang.to_string()));
                }
            }
        }
        map.settle();
        Some(map)
    }
}

impl Holder {
    /// One device of the pod.
    fn on_gpu(&self, hold: Hold) -> PodOnGpu {
        PodOnGpu {
            namespace: self.pod.namespace.to_string(),
            name: self.pod.name.to_string(),
            gang: self.gang.as_ref().map(|gang| gang.name.to_string()),
            devices: 1,
            hold,
        }
    }
}

fn add(map: &mut NodeMap, pool: &Pool, devices: &DeviceSet, pod: &PodOnGpu) {
    devices.iter().filter_map(|device| pool.gpu_of(device)).for_each(|gpu| map.add_pod(gpu, pod.clone()));
}

/// Whether the plugin reports a pod as the holder of devices.
fn is_reported(inventory: &Inventory, pod: &PodFacts) -> bool {
    inventory.holders.iter().any(|held| held.is_of(&pod.uid, &pod.namespace, &pod.name))
}

/// The fault of a GPU with unhealthy devices; `None` if it is cordoned only.
fn fault_of<'i>(inventory: &'i Inventory, pool: &'i Pool, gpu: usize) -> Option<&'i str> {
    if let Some(cordon) = inventory.cordons.iter().find(|cordon| cordon.gpu == gpu) {
        return cordon.fault.as_deref();
    }
    let fault = pool.faults.iter().find(|fault| usize::from(fault.gpu) == gpu);
    Some(fault.map_or("unhealthy", |fault| &fault.reason))
}
