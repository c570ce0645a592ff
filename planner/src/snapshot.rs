//! The cluster at one moment, for decisions: immutable, shared, a few bytes per node. Nodes that differ in nothing a decision looks
//! at are one class, and decisions are made per class. Built by the index; knows nothing of pods or of where facts come from.

mod names;
mod promised;
mod remembered;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::GangKey;
use gantry_topology::Purpose;

pub use names::Names;
pub use promised::{PROMISED, Promise, Promised};
pub use remembered::{Question, Remembered};

use crate::devices::DeviceSet;
use crate::inventory::Sick;
use crate::kind::{Kind, Spot};
use crate::shape::Shape;
use crate::site::Site;

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
    /// Whether pods, nodes and GPU nodes have all been listed once. Before that nothing may be decided.
    pub synced: bool,
    /// The resources that are accounted and chosen: what a plugin publishes, and what the operator named.
    pub managed: Arc<BTreeSet<ResourceName>>,
    /// The resources that any node has, Gantry's or not.
    pub offered: Arc<BTreeSet<ResourceName>>,
    /// Names of the nodes.
    pub names: Arc<Names>,
    /// The class of each node.
    pub nodes: Vec<ClassIx>,
    /// The classes.
    pub classes: Arc<Vec<Arc<Standing>>>,
    /// Devices set aside for pods between prioritize and bind. They are out of [`Pool::open`].
    pub holds: Arc<HashMap<PodUid, Hold>>,
    /// Nodes kept for a gang that waits.
    pub kept: Option<Arc<KeptNodes>>,
    /// Room that is being made for pods by themselves.
    pub promised: Option<Arc<Promised>>,
    /// The schedulers whose pods are brought here, as `spec.schedulerName` has them.
    pub schedulers: Arc<BTreeSet<Arc<str>>>,
}

/// Nodes kept for a gang that waits: what comes free there is for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptNodes {
    /// The gang.
    pub gang: Arc<GangKey>,
    /// Its priority. Pods of a higher one go where they like.
    pub priority: i32,
    /// By number of node.
    nodes: Vec<bool>,
}

impl KeptNodes {
    /// Keeps `nodes` for a gang.
    pub fn new(gang: Arc<GangKey>, priority: i32, nodes: impl IntoIterator<Item = NodeIx>) -> Self {
        let mut kept = Self {
            gang,
            priority,
            nodes: Vec::new(),
        };
        for node in nodes {
            let number = node.0 as usize;
            if kept.nodes.len() <= number {
                kept.nodes.resize(number + 1, false);
            }
            kept.nodes[number] = true;
        }
        kept
    }

    /// The same once nodes have other numbers.
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

    /// What a pod that is refused for it is told.
    pub fn words(&self) -> String {
        format!("node(s) kept for gang {}, which waits", self.gang)
    }
}

/// Devices that a pod will most likely be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// The node.
    pub node: NodeIx,
    /// By pool of the node.
    pub devices: Vec<DeviceSet>,
}

/// What a node is to us.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Standing {
    /// The node is gone; its number is not used again.
    Gone,
    /// It publishes no inventory: no plugin of ours runs there.
    Foreign {
        /// What kubelet advertises of the managed resources.
        advertised: Vec<(ResourceName, u32)>,
    },
    /// A node of ours.
    Ours(Class),
}

/// Nodes of ours that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Class {
    /// The kind of machine.
    pub kind: Arc<Kind>,
    /// The managed resources it serves.
    pub pools: Vec<Pool>,
    /// Why the plugin does not serve, if it does not; then nothing is free.
    pub not_ready: Option<Arc<str>>,
    /// Scores that were worked out.
    pub scores: Remembered,
}

/// One resource of a class. Of devices that nothing tells apart only the number counts ([`Shape::canonical`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    /// The resource.
    pub resource: ResourceName,
    /// Where its devices lie.
    pub shape: Shape,
    /// The most that one container may ask for.
    pub max_request: Option<u32>,
    /// How many devices there are.
    pub devices: usize,
    /// Those that nobody has.
    pub free: DeviceSet,
    /// Those of them that nobody is about to get either: [`Self::free`] without the [`Hold`]s.
    pub open: DeviceSet,
    /// How many must not be given out.
    pub unhealthy: usize,
    /// What is wrong with them, by GPU.
    pub sick: Vec<Sick>,
    /// How many are of pods that are gone, whose processes perhaps are not.
    pub leaving: usize,
    /// How many kubelet advertises, if the node is known.
    pub advertised: Option<u32>,
}

impl Snapshot {
    /// The same cluster if some nodes, in ascending order, were of other classes, with each device by itself.
    #[must_use]
    pub fn with<'a>(&self, nodes: impl Iterator<Item = (NodeIx, &'a Class)>) -> Self {
        let mut snapshot = self.clone();
        let mut classes = snapshot.classes.to_vec();
        for (node, class) in nodes {
            let number = ClassIx(u32::try_from(classes.len()).unwrap_or(u32::MAX));
            classes.push(Arc::new(Standing::Ours(class.canonical())));
            if let Some(place) = snapshot.nodes.get_mut(node.0 as usize) {
                *place = number;
            }
        }
        snapshot.classes = Arc::new(classes);
        snapshot
    }

    /// The node of a name.
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
        !matches!(self.standing(node), Standing::Gone)
    }

    /// The class of a node.
    pub fn class(&self, node: NodeIx) -> Option<ClassIx> {
        self.nodes.get(node.0 as usize).copied()
    }

    /// What a node is to us.
    pub fn standing(&self, node: NodeIx) -> &Standing {
        self.class(node)
            .and_then(|class| self.classes.get(class.0 as usize))
            .map_or(&Standing::Gone, |standing| standing)
    }

    /// The nodes with names and standing, in the order they became known.
    pub fn iter(&self) -> impl Iterator<Item = (NodeIx, &NodeName, &Standing)> {
        self.names
            .iter()
            .map(|(node, name)| (node, name, self.standing(node)))
    }
}

impl Pool {
    /// Devices held for a pod as devices of the class: of those that nothing tells apart, the ones after the open ones.
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
        }
    }

    /// MIG devices of other pools than number `pool` that are not free.
    pub fn cut_beside(&self, pool: usize) -> Vec<Spot> {
        let sliced = |shape: &Shape| match shape {
            Shape::Parts(parts) if parts.are_slices() => Some(Arc::clone(parts)),
            _ => None,
        };
        if self
            .pools
            .get(pool)
            .and_then(|pool| sliced(&pool.shape))
            .is_none()
        {
            return Vec::new();
        }
        let mut cut = Vec::new();
        for (_, other) in self.pools.iter().enumerate().filter(|(index, _)| *index != pool) {
            if let Some(parts) = sliced(&other.shape) {
                let spots = parts.spots().iter().enumerate();
                cut.extend(
                    spots
                        .filter(|(device, _)| !other.free.contains(*device))
                        .map(|(_, spot)| *spot),
                );
            }
        }
        cut
    }

    /// The class as a snapshot has it: of devices that nothing tells apart only the number counts.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let mut class = self.clone();
        for pool in &mut class.pools {
            pool.free = pool.shape.canonical(&pool.free);
            pool.open = pool.shape.canonical(&pool.open);
        }
        class
    }

    /// The pool of a resource.
    pub fn pool(&self, resource: &str) -> Option<(usize, &Pool)> {
        self.pools
            .iter()
            .enumerate()
            .find(|(_, pool)| pool.resource.as_str() == resource)
    }
}
