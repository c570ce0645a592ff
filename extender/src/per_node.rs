//! What GpuNodes report beside the inventory, for readers outside the index: one value for each node, kept as the watch of
//! GpuNodes shows it.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gantry_api::NodeName;
use gantry_topology::GpuUuid;
use serde::Deserialize;

use crate::index::{PartialGpuNode, read_part};

/// A value that is read from a GpuNode.
pub(crate) trait FromGpuNode: Sized {
    /// Reads it; `None` if there is nothing to keep of the node.
    fn read(node: &PartialGpuNode) -> Option<Self>;
}

/// The values of all nodes.
#[derive(Debug)]
pub(crate) struct PerNode<T>(Mutex<BTreeMap<NodeName, Arc<T>>>);

impl<T> Default for PerNode<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: FromGpuNode> PerNode<T> {
    fn nodes(&self) -> MutexGuard<'_, BTreeMap<NodeName, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A GpuNode was observed.
    pub(crate) fn observe(&self, name: &NodeName, node: &PartialGpuNode) {
        let value = T::read(node);
        let mut nodes = self.nodes();
        match value {
            Some(value) => nodes.insert(name.clone(), Arc::new(value)),
            None => nodes.remove(name),
        };
    }

    /// A GpuNode is gone.
    pub(crate) fn forget(&self, name: &NodeName) {
        self.nodes().remove(name);
    }

    /// Forgets nodes that a complete list does not name.
    pub(crate) fn retain(&self, names: &HashSet<NodeName>) {
        self.nodes().retain(|known, _| names.contains(known));
    }

    /// All nodes.
    pub(crate) fn all(&self) -> BTreeMap<NodeName, Arc<T>> {
        self.nodes().clone()
    }
}

#[derive(Deserialize)]
struct Spec {
    machine: MachineSpec,
}

#[derive(Deserialize)]
struct MachineSpec {
    #[serde(default)]
    gpus: Vec<GpuSpec>,
}

/// A GPU of a GpuNode's machine.
#[derive(Deserialize)]
pub(crate) struct GpuSpec {
    /// Its index on the node.
    #[serde(default)]
    pub(crate) index: u8,
    /// Its UUID, if it is known.
    #[serde(default)]
    pub(crate) uuid: Option<GpuUuid>,
    /// Its model, if it is known.
    #[serde(default)]
    pub(crate) model: Option<String>,
}

/// The GPUs of a GpuNode; `None` if its `spec` cannot be read.
pub(crate) fn gpus(node: &PartialGpuNode) -> Option<Vec<GpuSpec>> {
    Some(read_part::<Spec>(&node.spec).ok()?.machine.gpus)
}
