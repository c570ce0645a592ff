//! The cluster at one moment, for decisions: immutable, shared, a few bytes per node. Nodes that are equal for every
//! decision form one class, and decisions are made per class.

mod names;

use std::collections::{BTreeSet, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::GangKey;
use gantry_gang::protocol::WithheldReason;
use gantry_topology::Purpose;

use crate::decide::{Policy, Score};
use crate::devices::DeviceSet;
use crate::inventory::GpuFault;
use crate::kind::{Kind, Spot};
use crate::numa::Alignment;
use crate::request::{Ask, NumaDemand, Request};
use crate::shape::Shape;
use crate::site::Site;

pub use names::Names;

/// Number of a node: its place in the snapshot's arrays. Kept as long as the node is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIx(pub u32);

/// Number of a class within one snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassIx(pub u32);

/// The cluster at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Grows with every published change.
    pub generation: u64,
    /// Whether pods, nodes and GpuNodes have all been listed once. Before that nothing may be decided.
    pub synced: bool,
    /// The resources that are accounted and chosen: published by a plugin or named by the operator.
    pub managed: Arc<BTreeSet<ResourceName>>,
    /// The resources that any node has, Gantry's or not.
    pub offered: Arc<BTreeSet<ResourceName>>,
    /// Names of the nodes.
    pub names: Arc<Names>,
    /// The class of each node.
    pub nodes: Vec<ClassIx>,
    pub classes: Arc<Vec<Arc<NodeState>>>,
    /// Devices set aside for pods between prioritize and bind. They are out of [`Pool::open`].
    pub holds: Arc<HashMap<PodUid, Hold>>,
    /// The backfill reservation, if there is one.
    pub kept: Option<Arc<BackfillReservation>>,
    /// Pods for which kube-scheduler preempts others.
    pub promised: Option<Arc<NominatedRequests>>,
    /// The schedulers that use this extender, as in `spec.schedulerName`.
    pub schedulers: Arc<BTreeSet<Arc<str>>>,
}

/// Backfill reservation: nodes kept free for the first gang of the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackfillReservation {
    pub gang: Arc<GangKey>,
    /// Its priority. Pods of a higher one are not kept off.
    pub priority: i32,
    /// By number of node.
    nodes: Vec<bool>,
}

impl BackfillReservation {
    /// Keeps `nodes` for a gang.
    pub fn new(gang: Arc<GangKey>, priority: i32, nodes: impl IntoIterator<Item = NodeIx>) -> Self {
        let mut kept = Self { gang, priority, nodes: Vec::new() };
        for node in nodes {
            let number = node.0 as usize;
            if kept.nodes.len() <= number {
                kept.nodes.resize(number + 1, false);
            }
            kept.nodes[number] = true;
        }
        kept
    }

    /// The same after nodes were renumbered.
    #[must_use]
    pub fn renumbered(&self, renumbered: &HashMap<NodeIx, NodeIx>) -> Self {
        let nodes = self.nodes().filter_map(|node| renumbered.get(&node).copied());
        Self::new(Arc::clone(&self.gang), self.priority, nodes)
    }

    /// The nodes, ascending.
    pub fn nodes(&self) -> impl Iterator<Item = NodeIx> + '_ {
        let numbered = (0u32..).map(NodeIx).zip(&self.nodes);
        numbered.filter(|(_, kept)| **kept).map(|(node, _)| node)
    }

    /// Whether a node is among them.
    pub fn has(&self, node: NodeIx) -> bool {
        self.nodes.get(node.0 as usize) == Some(&true)
    }

    /// The text for a pod that is refused because of it.
    pub fn words(&self) -> String {
        format!("node(s) reserved for gang {}, which waits", self.gang)
    }
}

/// Devices that a pod will most likely get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    pub node: NodeIx,
    /// By pool of the node.
    pub devices: Vec<DeviceSet>,
}

/// The state of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// The node is gone; its number is not used again.
    Gone,
    /// It publishes no inventory: no Gantry plugin runs there.
    Foreign {
        /// What kubelet advertises of the managed resources.
        advertised: Vec<(ResourceName, u32)>,
    },
    /// A node with an inventory.
    Ours(Class),
}

/// Nodes with an inventory that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Class {
    /// The kind of machine.
    pub kind: Arc<Kind>,
    /// The managed resources it serves.
    pub pools: Vec<Pool>,
    /// Why new pods get no device, if they get none. Then nothing is free.
    pub withheld: Option<WithheldReason>,
    /// The models of its GPUs, by index.
    pub models: Arc<[Arc<str>]>,
    /// What such a node costs, for pods that ask for economy; less is cheaper.
    pub cost: u64,
    /// Scores worked out so far.
    pub scores: ScoreCache,
}

/// One resource of a class. Of alike devices only the number counts ([`Shape::canonical`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    pub resource: ResourceName,
    /// Where its devices are.
    pub shape: Shape,
    /// The most that one container may ask for.
    pub max_request: Option<u32>,
    /// How many devices there are.
    pub devices: usize,
    /// Devices that no pod has.
    pub free: DeviceSet,
    /// Free devices without those in a [`Hold`].
    pub open: DeviceSet,
    /// Number of unhealthy devices.
    pub unhealthy: usize,
    pub faults: Vec<GpuFault>,
    /// Devices of pods that are gone, whose processes may still run.
    pub leaving: usize,
    /// Number of healthy devices that no pod has and that are reserved for gangs or for pods that are being bound.
    pub reserved: usize,
    /// Number of devices that would be free if the plugin served.
    pub unserved: usize,
    /// How many kubelet advertises, if the node is known.
    pub advertised: Option<u32>,
    /// How kubelet aligns the devices, if it does.
    pub alignment: Option<Arc<Alignment>>,
}

impl Snapshot {
    /// The same cluster with some nodes, in ascending order, in other classes, given with each device by itself.
    #[must_use]
    pub fn with<'a>(&self, nodes: impl Iterator<Item = (NodeIx, &'a Class)>) -> Self {
        let mut snapshot = self.clone();
        let mut classes = snapshot.classes.to_vec();
        for (node, class) in nodes {
            let number = ClassIx(u32::try_from(classes.len()).unwrap_or(u32::MAX));
            classes.push(Arc::new(NodeState::Ours(class.canonical())));
            if let Some(place) = snapshot.nodes.get_mut(node.0 as usize) {
                *place = number;
            }
        }
        snapshot.classes = Arc::new(classes);
        snapshot
    }

    pub fn find(&self, name: &str) -> Option<NodeIx> {
        self.names.get(name).filter(|found| self.is_there(*found))
    }

    /// The nodes of many names.
    pub fn find_all<'n>(&self, names: impl Iterator<Item = &'n str>) -> Vec<Option<NodeIx>> {
        let mut expected = NodeIx(0);
        names
            .map(|name| {
                let found = self.names.get_expected(name, expected)?;
                expected = NodeIx(found.0 + 1);
                Some(found).filter(|found| self.is_there(*found))
            })
            .collect()
    }

    fn is_there(&self, node: NodeIx) -> bool {
        !matches!(self.node_state(node), NodeState::Gone)
    }

    pub fn class(&self, node: NodeIx) -> Option<ClassIx> {
        self.nodes.get(node.0 as usize).copied()
    }

    /// The state of a node.
    pub fn node_state(&self, node: NodeIx) -> &NodeState {
        self.class(node)
            .and_then(|class| self.classes.get(class.0 as usize))
            .map_or(&NodeState::Gone, |state| state)
    }

    /// The nodes with names and states, in the order in which they became known.
    pub fn iter(&self) -> impl Iterator<Item = (NodeIx, &NodeName, &NodeState)> {
        self.names.iter().map(|(node, name)| (node, name, self.node_state(node)))
    }
}

impl Pool {
    /// Devices held for a pod as devices of the class: of alike devices those after the open ones.
    pub fn own(&self, held: &DeviceSet) -> DeviceSet {
        let Shape::Parts(parts) = &self.shape else {
            return held.clone();
        };
        let count = |set, range| parts.count(set, range);
        parts
            .alike()
            .iter()
            .flat_map(|range| {
                let open = count(&self.open, range);
                let end = (open + count(held, range)).min(count(&self.free, range));
                range.start + open..range.start + end.max(open)
            })
            .collect()
    }
}

impl Class {
    /// A pool on its machine. `cut` is [`Class::cut_beside`] of the pool.
    pub fn site<'a>(&'a self, pool: &'a Pool, cut: &'a [Spot]) -> Site<'a> {
        Site {
            kind: &self.kind,
            shape: &pool.shape,
            cut,
            purpose: Purpose::Local,
            models: &self.models,
            alignment: pool.alignment.as_deref(),
        }
    }

    /// MIG devices in use of pools other than number `pool`.
    pub fn cut_beside(&self, pool: usize) -> Vec<Spot> {
        let sliced = |shape: &Shape| match shape {
            Shape::Parts(parts) if parts.are_slices() => Some(Arc::clone(parts)),
            _ => None,
        };
        if self.pools.get(pool).and_then(|pool| sliced(&pool.shape)).is_none() {
            return Vec::new();
        }
        let mut cut = Vec::new();
        for (_, other) in self.pools.iter().enumerate().filter(|(index, _)| *index != pool) {
            if let Some(parts) = sliced(&other.shape) {
                let spots = parts.spots().iter().enumerate();
                cut.extend(spots.filter(|(device, _)| !other.free.contains(*device)).map(|(_, spot)| *spot));
            }
        }
        cut
    }

    /// The same for the pool of an ask.
    pub fn cut_for(&self, ask: &Ask) -> Vec<Spot> {
        self.pool(ask.resource.as_str()).map_or_else(Vec::new, |(index, _)| self.cut_beside(index))
    }

    /// The class as a snapshot has it: of alike devices only the number counts.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let mut class = self.clone();
        for pool in &mut class.pools {
            pool.free = pool.shape.canonical(&pool.free);
            pool.open = pool.shape.canonical(&pool.open);
        }
        class
    }

    /// Counts what a pod has as free: devices, by pool, and CPUs and memory of the NUMA nodes of these devices. Those of
    /// containers without devices may be of any NUMA node.
    pub fn release(&mut self, devices: &[DeviceSet], numa: &[NumaDemand]) {
        for (pool, devices) in self.pools.iter_mut().zip(devices) {
            pool.free.add(devices);
            pool.open.add(devices);
        }
        if numa.iter().all(|container| container.needs.is_none()) {
            return;
        }
        let aligned = self.pools.iter().zip(devices);
        let aligned = aligned.filter_map(|(pool, devices)| Some((pool.alignment.as_ref()?, devices)));
        let nodes: BTreeSet<u32> =
            aligned.flat_map(|(alignment, devices)| alignment.nodes_of(devices)).collect();
        for pool in &mut self.pools {
            if let Some(alignment) = pool.alignment.as_ref().filter(|alignment| alignment.counts_numa()) {
                let counted = alignment.counted(numa);
                let is_anywhere = counted.iter().any(|container| !container.has_devices);
                let released = NumaDemand::of_pod(&counted);
                let alignment = alignment.with_free(|mut node| {
                    if is_anywhere || nodes.contains(&node.node) {
                        node.release(released);
                    }
                    node
                });
                pool.alignment = Some(Arc::new(alignment));
            }
        }
    }

    pub fn pool(&self, resource: &str) -> Option<(usize, &Pool)> {
        self.pools.iter().enumerate().find(|(_, pool)| pool.resource.as_str() == resource)
    }
}

// Devices that kube-scheduler frees for nominated pods. kube-scheduler keeps pods of lower priority off them until
// filter refuses the nominated pod; and filter does so until the last device is returned. Devices return one by one
// and must not go to other pods meanwhile.

/// The text for a pod that is refused because of it. It does not name the nominated pod, because that changes.
pub const NOMINATED: &str = "node(s) where pods are preempted for a pod of higher priority";

/// The request of one nominated pod.
#[derive(Debug, Clone)]
pub struct NominatedRequest {
    /// Where.
    pub node: NodeIx,
    /// The pod's priority. Pods of the same or a higher one are not kept off.
    pub priority: i32,
    /// What the pod asks for.
    pub request: Arc<Request>,
}

/// Requests of nominated pods by node: a call looks at each of its nodes.
#[derive(Debug, Clone)]
pub struct NominatedRequests(HashMap<NodeIx, Vec<NominatedRequest>>);

impl NominatedRequests {
    /// `None` without any.
    pub fn new(promises: Vec<NominatedRequest>) -> Option<Arc<Self>> {
        let mut by_node: HashMap<NodeIx, Vec<NominatedRequest>> = HashMap::new();
        for promise in promises {
            by_node.entry(promise.node).or_default().push(promise);
        }
        (!by_node.is_empty()).then(|| Arc::new(Self(by_node)))
    }

    /// Whether a node of this class holds a pod of a priority in addition to the nominated pods of higher priority.
    pub fn leaves(&self, node: NodeIx, class: &Class, priority: i32, request: &Request) -> bool {
        let Some(here) = self.0.get(&node) else {
            return true;
        };
        request.asks.iter().all(|ask| {
            let promised = to_higher(here, priority, &ask.resource);
            let pool = class.pool(ask.resource.as_str());
            promised == 0 || pool.is_none_or(|(_, pool)| pool.free.len() >= promised + ask.devices as usize)
        })
    }
}

fn to_higher(here: &[NominatedRequest], priority: i32, resource: &ResourceName) -> usize {
    let higher = here.iter().filter(|promise| promise.priority > priority);
    let asks = higher.flat_map(|promise| &promise.request.asks);
    asks.filter(|ask| ask.resource == *resource).map(|ask| ask.devices as usize).sum()
}

// A cache of the scores of one class. A class does not change, so its scores do not either.

/// Scores kept per class. Pods ask for few different numbers of devices.
const KEPT: usize = 8;

/// What a score depends on other than the class, for a pod with one container and one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreKey {
    /// Number of the pool.
    pub pool: usize,
    /// Devices asked for.
    pub devices: u32,
    /// Which of equally fast nodes to take.
    pub policy: Policy,
}

/// Scores of one class. Not part of the equality of classes.
#[derive(Debug, Default)]
pub struct ScoreCache(Mutex<Vec<(ScoreKey, Option<Score>)>>);

impl ScoreCache {
    /// The cached score of a question, worked out the first time.
    pub fn get_or(&self, question: ScoreKey, work_out: impl FnOnce() -> Option<Score>) -> Option<Score> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, score)) = known.iter().find(|(asked, _)| *asked == question) {
            return *score;
        }
        drop(known);
        let score = work_out();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < KEPT {
            known.push((question, score));
        }
        score
    }
}

impl Clone for ScoreCache {
    /// A clone may become another class, so it starts empty.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for ScoreCache {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ScoreCache {}

impl Hash for ScoreCache {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_worked_out_once_and_no_other_is_taken_for_it() {
        let remembered = ScoreCache::default();
        let question = ScoreKey { pool: 0, devices: 2, policy: Policy::Pack };
        assert_eq!(remembered.get_or(question, || None), None);
        assert_eq!(remembered.get_or(question, || unreachable!("it was asked before")), None);
        for other in [
            ScoreKey { pool: 1, ..question },
            ScoreKey { devices: 3, ..question },
            ScoreKey { policy: Policy::Spread, ..question },
        ] {
            let mut asked = false;
            remembered.get_or(other, || {
                asked = true;
                None
            });
            assert!(asked);
        }
    }
}
