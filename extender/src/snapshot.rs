//! The cluster at one moment, for decisions: immutable, shared, a few bytes per node. Nodes that differ in nothing a decision looks
//! at are one class, and decisions are made per class. Built by the index; knows nothing of pods or of where facts come from.

mod names;

use std::collections::HashMap;
use std::sync::Arc;

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_topology::set::GpuSet;

pub use names::Names;

use crate::kind::Kind;
use crate::ledger::Sick;

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
    /// Names of the nodes.
    pub names: Arc<Names>,
    /// The class of each node.
    pub nodes: Vec<ClassIx>,
    /// The classes.
    pub classes: Arc<Vec<Arc<Standing>>>,
    /// GPUs set aside for pods between prioritize and bind. They are out of [`Pool::open`].
    pub holds: Arc<HashMap<PodUid, Hold>>,
}

/// GPUs that a pod will most likely be bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// The node.
    pub node: NodeIx,
    /// By pool of the node.
    pub gpus: Vec<GpuSet>,
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
    /// GPUs that must not be given out, with the reason.
    pub sick: Vec<Sick>,
    /// Why the plugin does not serve, if it does not; then nothing is free.
    pub not_ready: Option<Arc<str>>,
}

/// One resource of a class.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    /// The resource.
    pub resource: ResourceName,
    /// GPUs that have a device of it.
    pub gpus: GpuSet,
    /// GPUs that nobody has.
    pub free: GpuSet,
    /// Those of them that nobody is about to get either: [`Self::free`] without the [`Hold`]s.
    pub open: GpuSet,
    /// GPUs of pods that are gone, whose processes perhaps are not.
    pub leaving: GpuSet,
    /// How many kubelet advertises, if the node is known.
    pub advertised: Option<u32>,
}

impl Snapshot {
    /// The node of a name.
    pub fn find(&self, name: &str) -> Option<NodeIx> {
        let found = self.names.get(name)?;
        (!matches!(self.standing(found), Standing::Gone)).then_some(found)
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

impl Class {
    /// The pool of a resource.
    pub fn pool(&self, resource: &str) -> Option<(usize, &Pool)> {
        self.pools
            .iter()
            .enumerate()
            .find(|(_, pool)| pool.resource.as_str() == resource)
    }
}
