//! All nodes by number, the classes that they fall into, and the resources that they offer. A node whose facts change
//! is marked, and its ledger and class are computed again before the next snapshot.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{NodeName, ResourceName};

use super::managed_resources::ManagedResources;
use super::node::{LedgerChange, Node};
use super::node_classes::NodeClasses;
use super::occupancy::{ExpiredBind, Occupancy};
use super::pod_store::PodStore;
use crate::ledger::FaultKind;
use crate::pod::PodFacts;
use crate::watched::WatchedResources;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Inventory;
use gantry_planner::snapshot::{ClassIx, Names, NodeIx, NodeState, Snapshot};

/// Numbers of deleted nodes that are kept before they are given up.
const KEPT_NUMBERS: usize = 256;

/// New numbers of nodes by their old ones.
pub(super) type Renumbering = HashMap<NodeIx, NodeIx>;

/// All nodes by number.
#[derive(Debug)]
pub(super) struct NodeTable {
    names: Arc<Names>,
    nodes: Vec<Node>,
    /// By number of node.
    class_of: Vec<ClassIx>,
    classes: NodeClasses,
    resources: ManagedResources,
    /// Nodes with facts that the ledger does not contain yet.
    dirty: Vec<NodeIx>,
    /// Something changed that a snapshot shows.
    changed: bool,
    /// Grows with every change of a node.
    revision: u64,
    /// Grows when numbers of nodes change.
    renumbered: u64,
    faults: HashMap<FaultKind, u64>,
}

/// What a new computation of a node changed.
#[derive(Debug)]
pub(super) struct NodeChange {
    /// Devices came free.
    pub(super) gained: bool,
    /// Devices of deleted pods came free while a gang reservation is assigned to no pod.
    pub(super) unassigned_gained: bool,
    /// The node lost its inventory, so that kube-scheduler's own count applies to it.
    pub(super) became_foreign: bool,
    pub(super) has_gang_reservations: bool,
}

/// What a new inventory changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct InventoryChange {
    /// The totals of the node.
    pub(super) totals: bool,
    /// The numbers of its devices.
    pub(super) numbers: bool,
}

impl NodeTable {
    pub(super) fn new(watched: &WatchedResources) -> Self {
        Self {
            names: Arc::default(),
            nodes: Vec::new(),
            class_of: Vec::new(),
            classes: NodeClasses::new(),
            resources: ManagedResources::new(watched),
            dirty: Vec::new(),
            changed: true,
            revision: 0,
            renumbered: 0,
            faults: HashMap::new(),
        }
    }

    /// The number of a node.
    pub(super) fn find(&self, name: &str) -> Option<NodeIx> {
        self.names.get(name)
    }

    /// The number of a node, a new one if the name is new.
    pub(super) fn number(&mut self, name: &NodeName) -> NodeIx {
        if let Some(known) = self.find(name.as_str()) {
            return known;
        }
        let number = Arc::make_mut(&mut self.names).number(name);
        self.nodes.push(Node::new(name.clone()));
        self.class_of.push(NodeClasses::GONE);
        self.changed = true;
        number
    }

    pub(super) fn get(&self, node: NodeIx) -> Option<&Node> {
        self.nodes.get(node.0 as usize)
    }

    pub(super) fn by_name(&self, name: &str) -> Option<&Node> {
        self.get(self.find(name)?)
    }

    /// All nodes with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeIx, &Node)> {
        (0..).map(NodeIx).zip(&self.nodes)
    }

    /// What other programs do with nodes, by their marks.
    pub(super) fn marks(&self) -> BTreeMap<NodeName, Arc<str>> {
        let marked = self.iter().filter_map(|(_, node)| Some((node.name().clone(), node.mark()?.clone())));
        marked.collect()
    }

    /// The numbers of all nodes.
    pub(super) fn numbers(&self) -> impl Iterator<Item = NodeIx> + use<> {
        (0..).map(NodeIx).take(self.nodes.len())
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether a node has an inventory.
    pub(super) fn has_inventory(&self, node: NodeIx) -> bool {
        self.get(node).is_some_and(|node| node.inventory().is_some())
    }

    /// What keeps the devices of a node, to be changed: the ledger is computed again.
    pub(super) fn occupancy_mut(&mut self, node: NodeIx) -> Option<&mut Occupancy> {
        self.mark(node);
        self.nodes.get_mut(node.0 as usize).map(Node::occupancy_mut)
    }

    /// The ledger and class of a node are to be computed again.
    pub(super) fn mark(&mut self, node: NodeIx) {
        self.dirty.push(node);
    }

    /// Something about a node changed that its ledger does not show.
    pub(super) fn touch(&mut self, node: NodeIx) {
        if let Some(known) = self.nodes.get_mut(node.0 as usize) {
            self.revision += 1;
            known.set_revision(self.revision);
        }
    }

    /// Grows with every change of a node, and with every change of their numbers.
    pub(super) fn revisions(&self) -> (u64, u64) {
        (self.revision, self.renumbered)
    }

    /// The nodes to be computed again, ascending.
    pub(super) fn take_marked(&mut self) -> Vec<NodeIx> {
        let mut marked = std::mem::take(&mut self.dirty);
        marked.sort_unstable();
        marked.dedup();
        marked
    }

    /// A Node object shows what kubelet advertises; `None` if there is no Node object. False if nothing changed.
    pub(super) fn set_advertised(
        &mut self,
        node: NodeIx,
        advertised: Option<Vec<(ResourceName, u32)>>,
    ) -> bool {
        let Some(known) = self.nodes.get_mut(node.0 as usize) else {
            return false;
        };
        if known.advertised() == advertised.as_deref() {
            return false;
        }
        let before = known.set_advertised(advertised).unwrap_or_default();
        let after = known.advertised().unwrap_or_default();
        self.changed |= self.resources.advertised(&before, after);
        self.mark(node);
        true
    }

    /// Another program marks a node, or marks it no longer. False if nothing changed.
    pub(super) fn set_mark(&mut self, node: NodeIx, mark: Option<Arc<str>>) -> bool {
        let Some(known) = self.nodes.get_mut(node.0 as usize).filter(|known| known.mark() != mark.as_ref())
        else {
            return false;
        };
        known.set_mark(mark);
        self.mark(node);
        true
    }

    /// A GpuNode object shows an inventory; `None` if there is no GpuNode object. `None` if nothing changed.
    pub(super) fn set_inventory(
        &mut self,
        node: NodeIx,
        inventory: Option<Inventory>,
    ) -> Option<InventoryChange> {
        let known = self.nodes.get_mut(node.0 as usize)?;
        let inventory = inventory.map(|inventory| known.assumed(inventory));
        if known.inventory() == inventory.as_ref() {
            return None;
        }
        let before = known.set_inventory(inventory);
        let after = known.inventory();
        self.changed |= self.resources.published(before.as_deref(), after);
        let change = match (&before, after) {
            (Some(before), Some(after)) => InventoryChange {
                totals: after.counts_otherwise(before) || after.not_ready != before.not_ready,
                numbers: after.serves_otherwise(before),
            },
            (_, after) => InventoryChange { totals: true, numbers: after.is_some() },
        };
        self.changed |= change.numbers;
        self.mark(node);
        Some(change)
    }

    /// Kubelet's Topology Manager refused a pod: the inventory that counts from now on, if that changes it.
    pub(super) fn refused_by_topology(&mut self, node: NodeIx) -> Option<Inventory> {
        let known = self.nodes.get_mut(node.0 as usize)?;
        let inventory = known.inventory().filter(|inventory| inventory.unaligned.is_some()).cloned();
        known.set_refused_by_topology().then_some(inventory).flatten()
    }

    /// The resources that nodes offer.
    pub(super) fn resources(&self) -> &ManagedResources {
        &self.resources
    }

    /// Forgets resources that no node has and that are not `asked` for any more.
    pub(super) fn forget_resources(&mut self, asked: impl Fn(&ResourceName) -> bool) {
        if self.resources.is_outdated() {
            self.changed |= self.resources.forget(asked);
        }
    }

    /// Computes the ledger and the class of a node. `held` devices, by pool, are on hold for pods.
    pub(super) fn settle(
        &mut self,
        node: NodeIx,
        now: Instant,
        pods: &PodStore,
        held: &[DeviceSet],
    ) -> Option<NodeChange> {
        let entry = self.nodes.get_mut(node.0 as usize)?;
        self.revision += 1;
        entry.set_revision(self.revision);
        let LedgerChange { faults, gained, unassigned_gained } = entry.settle(now, pods);
        for fault in faults {
            *self.faults.entry(fault.kind).or_default() += 1;
            tracing::warn!(node = %entry.name(), fault = ?fault.kind, "{}", fault.words);
        }
        let state = entry.node_state(held);
        let class = self.class_of.get_mut(node.0 as usize)?;
        let is_foreign = matches!(state, NodeState::Foreign { .. });
        let became_foreign = is_foreign && !self.classes.is_foreign(*class);
        let now_of = self.classes.of(state);
        self.changed |= *class != now_of;
        *class = now_of;
        Some(NodeChange {
            gained,
            unassigned_gained,
            became_foreign,
            has_gang_reservations: !entry.occupancy().gang_reservations().is_empty(),
        })
    }

    /// A pod on a node was deleted.
    pub(super) fn remove_pod(&mut self, now: Instant, node: NodeIx, pod: &PodFacts) {
        if let Some(known) = self.nodes.get_mut(node.0 as usize) {
            known.remove_pod(now, pod);
        }
        self.mark(node);
    }

    /// Ends quarantines that are over: see [`Occupancy::end_quarantine`].
    pub(super) fn end_quarantines(&mut self, now: Instant, contact: Instant, steady: Instant) {
        for (number, node) in (0..).map(NodeIx).zip(&mut self.nodes) {
            let ready = node.not_ready().is_none();
            if node.occupancy_mut().end_quarantine(now, contact, steady, ready) {
                self.dirty.push(number);
            }
        }
    }

    /// Gives up binds that no pod shows: see [`Occupancy::expire_binds`].
    pub(super) fn expire_binds(
        &mut self,
        now: Instant,
        contact: Instant,
        pods: &PodStore,
    ) -> Vec<(NodeIx, ExpiredBind)> {
        let mut all = Vec::new();
        for (number, node) in (0..).map(NodeIx).zip(&mut self.nodes) {
            let occupancy = node.occupancy_mut();
            let expired = occupancy.expire_binds(now, contact, |uid| pods.contains(uid));
            for bind in expired {
                self.dirty.push(number);
                all.push((number, bind));
            }
        }
        all
    }

    /// Gives up the numbers of deleted nodes once they are the larger half, and classes without nodes likewise.
    /// `is_used`: whether pods are on a node. The new numbers, if there are any.
    pub(super) fn compact(&mut self, is_used: impl Fn(NodeIx) -> bool) -> Option<Renumbering> {
        let is_over = |(number, node): &(NodeIx, &Node)| node.is_gone() && !is_used(*number);
        let over = self.iter().filter(is_over).count();
        let renumbering = (over > KEPT_NUMBERS && over * 2 > self.nodes.len()).then(|| {
            let mut names = Names::default();
            let mut renumbering = Renumbering::new();
            let (nodes, classes) = (std::mem::take(&mut self.nodes), std::mem::take(&mut self.class_of));
            for ((number, node), class) in (0..).map(NodeIx).zip(nodes).zip(classes) {
                if !node.is_gone() || is_used(number) {
                    renumbering.insert(number, names.number(node.name()));
                    self.nodes.push(node);
                    self.class_of.push(class);
                }
            }
            self.names = Arc::new(names);
            self.renumbered += 1;
            renumbering
        });
        self.classes.compact(&mut self.class_of);
        renumbering
    }

    /// Whether a snapshot shows something else than when this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Puts the nodes into a snapshot.
    pub(super) fn fill(&self, snapshot: &mut Snapshot) {
        snapshot.managed = self.resources.managed();
        snapshot.offered = self.resources.offered();
        snapshot.names = Arc::clone(&self.names);
        snapshot.nodes = self.class_of.clone();
        snapshot.classes = self.classes.shared();
    }

    /// What became of all devices.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for node in &self.nodes {
            totals.add(node);
        }
        totals
    }

    /// How many intents could not be followed so far, by fault.
    pub(super) fn faults(&self) -> &HashMap<FaultKind, u64> {
        &self.faults
    }

    /// The name of a node.
    pub(super) fn name(&self, node: NodeIx) -> Option<&NodeName> {
        self.get(node).map(Node::name)
    }
}

/// What became of all devices of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Nodes with an inventory.
    pub nodes: usize,
    /// Those of them that other programs mark.
    pub marked: usize,
    /// Nodes without one.
    pub foreign: usize,
    /// Free and healthy devices.
    pub free: usize,
    /// Devices of live pods.
    pub held: usize,
    /// Devices reserved for binds in flight and for gangs.
    pub reserved: usize,
    /// Devices of deleted pods that may still have processes.
    pub leaving: usize,
    /// Unhealthy devices.
    pub unhealthy: usize,
}

impl Totals {
    fn add(&mut self, node: &Node) {
        if node.inventory().is_none() {
            self.foreign += usize::from(node.advertised().is_some());
            return;
        }
        self.nodes += 1;
        self.marked += usize::from(node.mark().is_some());
        for (pool, ledger) in node.pools() {
            self.free += ledger.free.len();
            self.held += ledger.held.len();
            self.reserved += (&ledger.reserved - &ledger.held).len();
            self.leaving += (&ledger.leaving - &ledger.held).len();
            self.unhealthy += (&pool.all - &pool.healthy).len();
        }
    }
}
