//! The input of a gang plan: one moment of the cluster as borrowed values, by number of node ([`NodeIx`]).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DeviceId, PodUid};
use gantry_gang::protocol::ShapeId;
use gantry_gang::{Fabric, Needs, NodeFacts, Resources};

use crate::request::Request;
use crate::snapshot::{Class, NodeIx, Snapshot};

/// The input of a gang plan.
#[derive(Clone, Copy)]
pub struct PlanInput<'a> {
    /// Devices. Those reserved for other gangs are not free in it.
    pub snapshot: &'a Snapshot,
    /// Resources of the nodes other than devices.
    pub rooms: &'a [NodeResources],
    pub fabric: &'a Fabric,
    /// Shapes of members, by [`ShapeId`].
    pub shapes: &'a [Shape],
    /// What the pods on the nodes mean for members of a shape, as if some of those pods were gone.
    pub barred: &'a dyn Fn(&Shape, &[&PodUid]) -> PlacementRules,
    /// Pods taken to be gone. Their resources are already added to what their nodes have left.
    pub gone: &'a [&'a PodUid],
    /// One node with each device by itself, from which exact devices are chosen.
    pub exact: &'a dyn Fn(NodeIx) -> Option<ExactNode<'a>>,
    /// Steps that exhaustive searches of all plans from this input may still take; [`EFFORT`] at first.
    pub effort: &'a Cell<u32>,
}

/// Steps of exhaustive search for one gang, what-if plans included: some tenths of a second.
pub const EFFORT: u32 = 1 << 21;

/// One node with each device by itself.
#[derive(Debug, Clone)]
pub struct ExactNode<'a> {
    /// Its pools, with exactly the devices that are free.
    pub class: Class,
    /// IDs by pool, by device.
    pub ids: Vec<&'a [Option<DeviceId>]>,
}

/// Resources of a node other than devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeResources {
    /// Its labels, taints and totals; `None` for a node that is gone.
    pub facts: Option<Arc<NodeFacts>>,
    /// Allocatable minus the requests of pods and reservations on it.
    pub left: Resources,
}

/// What a member asks for. Numbered by [`ShapeId`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Devices.
    pub request: Arc<Request>,
    /// Everything else.
    pub needs: Arc<Needs>,
}

/// What the pods on the nodes mean for a new pod of a shape: anti-affinity of either side, host ports, affinity,
/// spreading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementRules {
    /// Nodes that it must not go to, sorted.
    pub nodes: Vec<NodeIx>,
    /// The only nodes that it can go to, sorted, if not all others.
    pub only: Option<Vec<NodeIx>>,
    /// For each required affinity term ([`Needs::together_with`]): nodes in a domain of the term with a pod that all
    /// its terms select, sorted.
    pub near: Vec<Vec<NodeIx>>,
    /// For each spread constraint ([`Needs::spread`]): how many pods that it counts are on which node.
    pub counted: Vec<BTreeMap<NodeIx, u32>>,
}

impl<'a> PlanInput<'a> {
    /// What the pods on the nodes mean for a member of this shape.
    pub fn barred(&self, shape: &Shape) -> PlacementRules {
        (self.barred)(shape, self.gone)
    }

    /// A shape by its number.
    pub fn shape(&self, shape: ShapeId) -> Option<&'a Shape> {
        self.shapes.get(shape.0 as usize)
    }
}
