//! One node in the index: what the watches report of it, what keeps its devices, and the ledger that follows from both.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, Grant, NodeName, PodUid, Provenance, ResourceName};

use super::occupancy::Occupancy;
use super::pod_store::PodStore;
use super::reservations::Target;
use crate::ledger::{Devices, Fault, Ledger, PoolLedger};
use crate::pod::PodFacts;
use gantry_gang::GangKey;
use gantry_gang::protocol::WithheldReason;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::{self, Inventory, ReportedHolder};
use gantry_planner::numa::{Alignment, NumaNode};
use gantry_planner::request::{ContainerKind, NumaDemand, NumaNeeds};
use gantry_planner::snapshot::{Class, NodeState, Pool, ScoreCache};

/// One node.
#[derive(Debug)]
pub(super) struct Node {
    name: NodeName,
    /// What kubelet advertises; `None` without a Node object.
    advertised: Option<Vec<(ResourceName, u32)>>,
    /// What the plugin publishes; `None` without a GpuNode object.
    inventory: Option<Arc<Inventory>>,
    /// Kubelet's Topology Manager refused a pod.
    refused_by_topology: bool,
    /// What another program does with the node, by its mark on the Node object.
    mark: Option<Arc<str>>,
    occupancy: Occupancy,
    ledger: Arc<Ledger>,
    /// Of the last change, in the count of the table.
    revision: u64,
    /// Devices of deleted pods that may still have processes, each with the time since when: one that is never released
    /// does not delay the others.
    lingering: HashMap<DeviceId, Instant>,
    /// CPUs and memory of pods that kubelet's list does not show yet.
    unlisted: Vec<UnlistedNeeds>,
    /// What is free of each NUMA node, in the order of the inventory.
    free_numa: Vec<NumaNode>,
}

/// The CPUs and the memory of a pod that was granted devices, and that kubelet's list does not show yet.
#[derive(Debug)]
struct UnlistedNeeds {
    pod: PodUid,
    needs: NumaNeeds,
    /// The NUMA nodes that they may be taken of. If these are several, they count in each.
    nodes: BTreeSet<u32>,
    /// One container has all of it.
    is_of_one: bool,
}

/// What a new computation of the ledger changed.
#[derive(Debug, Default)]
pub(super) struct LedgerChange {
    /// Faults that were not there before.
    pub(super) faults: Vec<Fault>,
    /// Devices came free.
    pub(super) gained: bool,
    /// Devices of deleted pods came free while a gang reservation here is assigned to no pod.
    pub(super) unassigned_gained: bool,
}

impl Node {
    pub(super) fn new(name: NodeName) -> Self {
        Self {
            name,
            advertised: None,
            inventory: None,
            refused_by_topology: false,
            mark: None,
            occupancy: Occupancy::default(),
            ledger: Arc::default(),
            revision: 0,
            lingering: HashMap::new(),
            unlisted: Vec::new(),
            free_numa: Vec::new(),
        }
    }

    pub(super) fn name(&self) -> &NodeName {
        &self.name
    }

    /// What kubelet advertises; `None` without a Node object.
    pub(super) fn advertised(&self) -> Option<&[(ResourceName, u32)]> {
        self.advertised.as_deref()
    }

    /// What kubelet advertises of a resource; `None` without a Node object.
    pub(super) fn advertises(&self, resource: &ResourceName) -> Option<u32> {
        let advertised = self.advertised.as_ref()?;
        let found = advertised.iter().find(|(known, _)| known == resource);
        Some(found.map_or(0, |(_, count)| *count))
    }

    /// Returns what was advertised before.
    pub(super) fn set_advertised(
        &mut self,
        advertised: Option<Vec<(ResourceName, u32)>>,
    ) -> Option<Vec<(ResourceName, u32)>> {
        std::mem::replace(&mut self.advertised, advertised)
    }

    /// What the plugin publishes; `None` without a GpuNode object.
    pub(super) fn inventory(&self) -> Option<&Inventory> {
        self.inventory.as_deref()
    }

    /// The same with the ledger, to be read without the index.
    pub(super) fn shared(&self) -> Option<(Arc<Inventory>, Arc<Ledger>)> {
        Some((Arc::clone(self.inventory.as_ref()?), Arc::clone(&self.ledger)))
    }

    /// Of the last change, in the count of the table.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn set_revision(&mut self, revision: u64) {
        self.revision = revision;
    }

    /// An inventory as it counts here. If kubelet refused a pod and its configuration is not known, the devices are aligned as
    /// strictly as a kubelet may.
    pub(super) fn assumed(&self, mut inventory: Inventory) -> Inventory {
        if self.refused_by_topology {
            inventory.assume_alignment();
        }
        inventory
    }

    /// Kubelet's Topology Manager refused a pod. True if that is new.
    pub(super) fn set_refused_by_topology(&mut self) -> bool {
        !std::mem::replace(&mut self.refused_by_topology, true)
    }

    /// Returns the inventory before.
    pub(super) fn set_inventory(&mut self, inventory: Option<Inventory>) -> Option<Arc<Inventory>> {
        std::mem::replace(&mut self.inventory, inventory.map(Arc::new))
    }

    /// What another program does with the node, by its mark on the Node object.
    pub(super) fn mark(&self) -> Option<&Arc<str>> {
        self.mark.as_ref()
    }

    pub(super) fn set_mark(&mut self, mark: Option<Arc<str>>) {
        self.mark = mark;
    }

    pub(super) fn occupancy(&self) -> &Occupancy {
        &self.occupancy
    }

    pub(super) fn occupancy_mut(&mut self) -> &mut Occupancy {
        &mut self.occupancy
    }

    /// The ledger of a resource, by number of its pool.
    pub(super) fn pool(&self, index: usize) -> Option<&PoolLedger> {
        self.ledger.pools.get(index)
    }

    /// The pools of the inventory, each with its ledger.
    pub(super) fn pools(&self) -> impl Iterator<Item = (&inventory::Pool, &PoolLedger)> {
        let pools = self.inventory.iter().flat_map(|inventory| &inventory.pools);
        pools.zip(&self.ledger.pools)
    }

    /// How many of some devices, of these resources, are healthy and no pod has or had them.
    pub(super) fn idle_among(&self, devices: &Devices, resources: &BTreeSet<&ResourceName>) -> usize {
        let asked = devices.iter().filter(|(resource, _)| resources.contains(resource));
        let idle = asked.map(|(resource, ids)| {
            let mut pools = self.pools().filter(|(pool, _)| pool.resource == *resource);
            pools.next().map_or(0, |(pool, ledger)| {
                let mut idle = &pool.find(ids).0 & &pool.healthy;
                idle.remove(&ledger.held);
                idle.remove(&ledger.leaving);
                idle.len()
            })
        });
        idle.sum()
    }

    /// What each live pod holds, by pool.
    pub(super) fn holders(&self) -> &[(PodUid, Vec<DeviceSet>)] {
        &self.ledger.pods
    }

    /// What a live pod holds, by pool.
    pub(super) fn held_by(&self, uid: &PodUid) -> Option<&[DeviceSet]> {
        let held = self.ledger.pods.iter().find(|(known, _)| known == uid);
        held.map(|(_, held)| held.as_slice())
    }

    /// The devices that the end of a pod returns, if the node has an inventory. Devices reserved for gangs other than `own` go to those.
    pub(super) fn released_by(&self, uid: &PodUid, own: Option<&Arc<GangKey>>) -> Option<Devices> {
        let held = self.held_by(uid).filter(|_| self.inventory().is_some())?;
        let others = || self.occupancy().gang_reservations().iter().filter(|place| own != Some(&place.gang));
        let devices = self.pools().zip(held).map(|((pool, _), held)| {
            let mut devices = held.clone();
            for (resource, ids) in others().flat_map(|place| &place.devices) {
                devices.remove(&pool.taken(resource, ids));
            }
            (pool, devices)
        });
        let devices = devices
            .filter(|(_, devices)| !devices.is_empty())
            .map(|(pool, devices)| (pool.resource.clone(), pool.ids_of(&devices)));
        Some(devices.collect())
    }

    /// Why the plugin does not serve, if it does not.
    pub(super) fn not_ready(&self) -> Option<&Arc<str>> {
        self.inventory.as_ref()?.not_ready.as_ref()
    }

    /// Why new pods get no device of it, if they get none.
    pub(super) fn withheld(&self) -> Option<WithheldReason> {
        let by_plugin = self.not_ready().cloned().map(WithheldReason::ByPlugin);
        by_plugin.or_else(|| self.mark.clone().map(WithheldReason::ByMark))
    }

    /// Whether nothing is known of the node any more.
    pub(super) fn is_gone(&self) -> bool {
        self.advertised.is_none() && self.inventory.is_none() && self.occupancy.is_empty()
    }

    /// Computes the ledger from the facts of now.
    pub(super) fn settle(&mut self, now: Instant, pods: &PodStore) -> LedgerChange {
        let mut change = LedgerChange::default();
        let ledger = match &self.inventory {
            Some(inventory) => {
                let live = self.occupancy.pods().iter().filter_map(|uid| pods.get(uid));
                let mut live: Vec<&PodFacts> = live.map(|pod| &**pod).collect();
                live.sort_by(|a, b| a.order(b));
                let reserved = self.occupancy.reserved();
                let leaving: Vec<&Devices> = self.occupancy.quarantined().collect();
                let mut ledger = Ledger::settle(&self.name, inventory, &live, &reserved, &leaving);
                if self.withheld().is_some() {
                    ledger.withhold();
                }
                ledger
            }
            None => Ledger::default(),
        };
        let before = std::mem::replace(&mut self.ledger, Arc::new(ledger));
        let faults = self.ledger.faults.iter();
        change.faults = faults.filter(|fault| !before.faults.contains(fault)).cloned().collect();
        let gained_numa = self.settle_numa(pods);
        let mut pools = self.ledger.pools.iter().enumerate();
        change.gained = pools.any(|(index, pool)| match before.pools.get(index) {
            Some(before) => !pool.free.is_subset(&before.free),
            None => !pool.free.is_empty(),
        });
        change.gained |= gained_numa;
        let lingered = match self.occupancy.has_unassigned() {
            true => self.lingering.len(),
            false => 0,
        };
        self.mark_lingering(now);
        change.unassigned_gained = lingered > self.lingering.len();
        change
    }

    /// Counts the CPUs and the memory that pods have or are about to get. True if some came free.
    fn settle_numa(&mut self, pods: &PodStore) -> bool {
        if !self.counts_numa() {
            self.unlisted.clear();
            self.free_numa.clear();
            return false;
        }
        self.unlisted = self.unlisted(pods);
        let nodes = self.inventory.iter().flat_map(|inventory| &inventory.numa);
        let free: Vec<NumaNode> = nodes.map(|node| self.free_of(node.node, None)).collect();
        let before = std::mem::replace(&mut self.free_numa, free);
        let mut both = self.free_numa.iter().zip(before.iter().map(Some).chain(std::iter::repeat(None)));
        both.any(|(now, before)| before.is_none_or(|before| now.gained_since(before)))
    }

    /// Whether kubelet refuses pods by their CPUs or memory.
    pub(super) fn counts_numa(&self) -> bool {
        self.alignments().any(Alignment::counts_numa)
    }

    /// Whether kubelet refuses pods with these demands by their CPUs or memory.
    pub(super) fn counts(&self, demands: &[NumaDemand]) -> bool {
        self.alignments().any(|alignment| alignment.counts(demands))
    }

    fn alignments(&self) -> impl Iterator<Item = &Alignment> {
        let pools = self.inventory.iter().flat_map(|inventory| &inventory.pools);
        pools.filter_map(|pool| pool.alignment.as_deref())
    }

    /// The CPUs and the memory of live pods, of binds and of members of gangs with a reservation that kubelet's list does not
    /// show.
    fn unlisted(&self, pods: &PodStore) -> Vec<UnlistedNeeds> {
        let Some(inventory) = &self.inventory else {
            return Vec::new();
        };
        let mut unlisted: Vec<UnlistedNeeds> = Vec::new();
        let Some(counting) = self.alignments().find(|alignment| alignment.counts_numa()) else {
            return Vec::new();
        };
        let mut add = |pod: &PodUid, demands: &[NumaDemand], devices: &dyn Fn(usize) -> DeviceSet| {
            let demands = counting.counted(demands);
            let (namespace, name) = pods.get(pod).map_or(("", ""), |pod| (&*pod.namespace, &*pod.name));
            // Kubelet's list has nothing of init containers.
            let mut with_devices = demands.iter().filter(|container| container.has_devices);
            let is_of_init = with_devices.all(|container| container.kind == ContainerKind::Init);
            let is_listed = || {
                let listed = |held: &ReportedHolder| match held.provenance {
                    _ if held.quarantined => false,
                    Provenance::PodResources => true,
                    Provenance::Allocated => is_of_init,
                    Provenance::Granted => false,
                };
                inventory.holders.iter().any(|held| listed(held) && held.is_of(pod, namespace, name))
            };
            if demands.is_empty() || unlisted.iter().any(|known| known.pod == *pod) || is_listed() {
                return;
            }
            // Kubelet takes what containers without devices need of any NUMA node.
            let nodes = match demands.iter().all(|container| container.has_devices) {
                true => {
                    let alignments = inventory.pools.iter().map(|pool| pool.alignment.as_ref()).enumerate();
                    let aligned = alignments.filter_map(|(index, alignment)| Some((index, alignment?)));
                    aligned
                        .flat_map(|(index, alignment)| {
                            alignment.nodes_of(&devices(index)).collect::<Vec<_>>()
                        })
                        .collect()
                }
                false => inventory.numa.iter().map(|node| node.node).collect(),
            };
            let (needs, is_of_one) = (NumaDemand::of_pod(&demands), demands.len() == 1);
            unlisted.push(UnlistedNeeds { pod: pod.clone(), needs, nodes, is_of_one });
        };
        let of_pod = |uid: &PodUid| pods.get(uid)?.request.as_ref().ok();
        for (uid, held) in self.holders() {
            if let Some(request) = of_pod(uid) {
                add(uid, request.numa(), &|index| held.get(index).cloned().unwrap_or_default());
            }
        }
        let named = |devices: &Devices, index: usize| {
            let pool = inventory.pools.get(index);
            pool.map_or(DeviceSet::EMPTY, |pool| {
                let own = devices.iter().filter(|(resource, _)| *resource == pool.resource);
                pool.find(own.flat_map(|(_, ids)| ids)).0
            })
        };
        for bind in self.occupancy.binds() {
            add(bind.uid(), bind.numa(), &|index| named(bind.devices(), index));
        }
        for reservation in self.occupancy.gang_reservations() {
            if let Some((uid, request)) = reservation.pod.as_ref().and_then(|uid| Some((uid, of_pod(uid)?))) {
                add(uid, request.numa(), &|index| named(&reservation.devices, index));
            }
        }
        unlisted
    }

    /// What is free of a NUMA node, with what the pod `except` has.
    fn free_of(&self, node: u32, except: Option<&str>) -> NumaNode {
        let mut nodes = self.inventory.iter().flat_map(|inventory| &inventory.numa);
        let known = nodes.find(|known| known.node == node).copied();
        let mut free = known.unwrap_or(NumaNode { node, ..NumaNode::default() });
        let unlisted = self.unlisted.iter().filter(|unlisted| unlisted.nodes.contains(&node));
        for unlisted in unlisted.filter(|unlisted| except != Some(unlisted.pod.as_str())) {
            let group = match unlisted.is_of_one {
                true => unlisted.nodes.iter().copied().collect(),
                false => std::iter::once(node).collect(),
            };
            free.take(unlisted.needs, group);
        }
        free
    }

    /// How kubelet aligns the devices of a pool now, for the pod `except` or for any.
    fn alignment(&self, pool: &inventory::Pool, except: Option<&str>) -> Option<Arc<Alignment>> {
        let alignment = pool.alignment.as_ref()?;
        if !alignment.counts_numa() {
            return Some(Arc::clone(alignment));
        }
        Some(Arc::new(alignment.with_free(|node| self.free_of(node.node, except))))
    }

    fn mark_lingering(&mut self, now: Instant) {
        let before = std::mem::take(&mut self.lingering);
        let mut lingering = HashMap::new();
        for (pool, ledger) in self.pools().filter(|(_, ledger)| !ledger.leaving.is_empty()) {
            for id in pool.ids_of(&(&ledger.leaving - &ledger.held)) {
                let since = before.get(&id).copied().unwrap_or(now);
                lingering.insert(id, since);
            }
        }
        self.lingering = lingering;
    }

    /// Since when a device of a deleted pod may still be in use.
    pub(super) fn lingers_since(&self, device: &DeviceId) -> Option<Instant> {
        self.lingering.get(device).copied()
    }

    /// Healthy devices by pool that deleted pods release soon and that are reserved for nothing else. `soon` decides by
    /// since when a device lingers.
    pub(super) fn returning(&self, mut soon: impl FnMut(Instant) -> bool) -> Vec<Vec<DeviceId>> {
        if self.lingering.is_empty() {
            return Vec::new();
        }
        let returning = self.pools().map(|(pool, ledger)| {
            let mut leaving = &ledger.leaving & &pool.healthy;
            leaving.remove(&ledger.held);
            leaving.remove(&ledger.reserved);
            let mut ids = pool.ids_of(&leaving);
            ids.retain(|id| self.lingering.get(id).is_some_and(|since| soon(*since)));
            ids
        });
        returning.collect()
    }

    /// What the node is to decisions about many nodes, without `held` devices (by pool) that pods are about to get.
    pub(super) fn node_state(&self, held: &[DeviceSet]) -> NodeState {
        match (&self.inventory, &self.advertised) {
            (Some(inventory), _) => {
                NodeState::Ours(self.class(inventory, held, |pool, set| pool.shape.canonical(&set)))
            }
            (None, Some(advertised)) => NodeState::Foreign { advertised: advertised.clone() },
            (None, None) => NodeState::Gone,
        }
    }

    /// The class of this one node, with every device distinguished; `None` without an inventory.
    pub(super) fn exact(&self, held: &[DeviceSet]) -> Option<Class> {
        let inventory = self.inventory.as_ref()?;
        Some(self.class(inventory, held, |_, set| set))
    }

    /// The same for a pod with a reservation: its own CPUs count as free.
    pub(super) fn exact_for(&self, pod: &str) -> Option<Class> {
        let mut class = self.exact(&[])?;
        for (pool, (known, _)) in class.pools.iter_mut().zip(self.pools()) {
            pool.alignment = self.alignment(known, Some(pod));
        }
        Some(class)
    }

    /// The same, with devices (by pool) of reservations that a pod may have all the same.
    pub(super) fn exact_with(&self, held: &[DeviceSet], lent: &[DeviceSet]) -> Option<Class> {
        let mut class = self.exact(held)?;
        for (index, (pool, lent)) in class.pools.iter_mut().zip(lent).enumerate() {
            pool.free.add(lent);
            pool.open.add(lent);
            if let Some(held) = held.get(index) {
                pool.open.remove(held);
            }
            pool.reserved = pool.reserved.saturating_sub(lent.len());
        }
        Some(class)
    }

    fn class(
        &self,
        inventory: &Inventory,
        held: &[DeviceSet],
        canonical: impl Fn(&inventory::Pool, DeviceSet) -> DeviceSet,
    ) -> Class {
        let withheld = self.withheld();
        let pools = self.pools().enumerate().map(|(index, (pool, ledger))| {
            let mut open = ledger.free.clone();
            if let Some(held) = held.get(index) {
                open.remove(held);
            }
            let unhealthy = &pool.all - &pool.healthy;
            let mut leaving = &ledger.leaving - &ledger.held;
            leaving.remove(&unhealthy);
            let mut idle = &pool.healthy - &ledger.held;
            idle.remove(&ledger.leaving);
            let reserved = &idle & &ledger.reserved;
            idle.remove(&reserved);
            Pool {
                resource: pool.resource.clone(),
                shape: pool.shape.clone(),
                max_request: pool.max_request,
                devices: pool.all.len(),
                free: canonical(pool, ledger.free.clone()),
                open: canonical(pool, open),
                unhealthy: unhealthy.len(),
                faults: pool.faults.clone(),
                leaving: leaving.len(),
                reserved: reserved.len(),
                unserved: if withheld.is_some() { idle.len() } else { 0 },
                advertised: self.advertises(&pool.resource),
                // Free CPUs differ on nearly every node that counts them, so each of these is a class by itself.
                alignment: self.alignment(pool, None),
            }
        });
        Class {
            kind: Arc::clone(&inventory.kind),
            pools: pools.collect(),
            withheld: withheld.clone(),
            models: Arc::clone(&inventory.models),
            cost: inventory.cost,
            scores: ScoreCache::default(),
        }
    }

    /// A pod was deleted. If its end was not observed, the devices that it held go into quarantine.
    pub(super) fn remove_pod(&mut self, now: Instant, pod: &PodFacts) {
        self.occupancy.set_pod(&pod.uid, false);
        if pod.stopped || pod.terminal {
            return;
        }
        let counted = self.pools().zip(self.held_by(&pod.uid).unwrap_or_default());
        let counted = counted.map(|((pool, _), held)| (pool.resource.clone(), pool.ids_of(held)));
        let mut devices: Devices = counted.collect();
        let grant = pod.grant.as_deref().and_then(|text| Grant::parse(text, &pod.uid, &self.name).ok());
        if let Some(grant) = grant {
            for resource in grant.resources() {
                // Of a device that the plugin does not list now, nothing is known but the grant.
                let pool = self.inventory().and_then(|known| known.pool(resource.as_str()));
                let mut ids = grant.held(resource.as_str());
                ids.retain(|id| pool.is_none_or(|(_, pool)| pool.find([id]).1 > 0));
                devices.push((resource, ids.into_iter().collect()));
            }
        }
        self.occupancy.quarantine(now, devices);
    }

    /// Whether a pod with a bind must not be bound yet. Kubelet's Topology Manager chooses NUMA nodes by what is free when it
    /// admits a pod, so the pods of a node that refuses any must be admitted in the order of their grants: this one comes after
    /// another that kubelet has not been seen to admit.
    pub(super) fn awaits_admission(&self, uid: &PodUid, pods: &PodStore) -> bool {
        let Some(inventory) = &self.inventory else {
            return false;
        };
        let refuses = |pool: &inventory::Pool| pool.alignment.as_ref().is_some_and(|known| known.refuses());
        if !inventory.pools.iter().any(refuses) {
            return false;
        }
        let is_admitted = |uid: &PodUid| {
            // A pod that no watch shows has no name.
            let (namespace, name) = pods.get(uid).map_or(("", ""), |pod| (&*pod.namespace, &*pod.name));
            inventory.holders.iter().any(|held| held.is_of(uid, namespace, name))
        };
        let of_refusing = |resource: &ResourceName| {
            inventory.pool(resource.as_str()).is_some_and(|(_, pool)| refuses(pool))
        };
        let mut binds = self.occupancy.binds_before(uid).filter(|(_, devices)| {
            devices.iter().any(|(resource, ids)| !ids.is_empty() && of_refusing(resource))
        });
        let mut bound = self.holders().iter().filter(|(known, held)| {
            let mut held = inventory.pools.iter().zip(held);
            known != uid && held.any(|(pool, held)| refuses(pool) && !held.is_empty())
        });
        binds.any(|(known, _)| !is_admitted(known)) || bound.any(|(known, _)| !is_admitted(known))
    }

    /// Whether the inventory lists each of these devices.
    pub(super) fn lists(&self, devices: &Devices) -> bool {
        let lists = |inventory: &Inventory| {
            devices.iter().all(|(resource, ids)| {
                inventory.pool(resource.as_str()).is_some_and(|(_, pool)| pool.find(ids).1 == 0)
            })
        };
        self.inventory.as_deref().is_some_and(lists)
    }

    /// Whether another pod than the target has any of these devices, or had them and may have processes that still use
    /// them.
    pub(super) fn has_given_away(&self, target: &Target, devices: &Devices) -> bool {
        let Some(inventory) = &self.inventory else {
            return false;
        };
        devices.iter().any(|(resource, ids)| {
            let Some((index, pool)) = inventory.pool(resource.as_str()) else {
                return false;
            };
            let mut others = DeviceSet::EMPTY;
            for (_, held) in self.holders().iter().filter(|(uid, _)| *uid != target.uid) {
                if let Some(held) = held.get(index) {
                    others.add(held);
                }
            }
            for (resource, ids) in self.occupancy.quarantined().flatten() {
                others.add(&pool.taken(resource, ids));
            }
            // The pod may be there already, with a plugin that is faster than the pod watch.
            let own = |held: &ReportedHolder| held.is_of(&target.uid, &target.namespace, &target.name);
            let holders = inventory.holders.iter();
            for held in holders.filter(|held| held.pool == index && !own(held)) {
                others.add(&held.devices);
            }
            !(&pool.find(ids).0 & &others).is_empty()
        })
    }
}
