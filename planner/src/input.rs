//! The cluster at one moment as a plan for a gang needs it: devices by class, what else nodes have, the fabric, what members ask for.
//! Borrowed values only.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DeviceId, PodUid};
use gantry_gang::protocol::ShapeId;
use gantry_gang::{Fabric, Needs, NodeFacts, Resources};

use crate::request::Request;
use crate::snapshot::{Class, NodeIx, Snapshot};

/// What a plan is made from. Everything is by number of node ([`NodeIx`]).
#[derive(Clone, Copy)]
pub struct PlanInput<'a> {
    /// Devices. What other gangs have places on is not free in it.
    pub snapshot: &'a Snapshot,
    /// What else the nodes have.
    pub rooms: &'a [Room],
    /// The fabric.
    pub fabric: &'a Fabric,
    /// What members ask for.
    pub shapes: &'a [Shape],
    /// Which nodes members of a shape are kept from, by the pods that are there (anti-affinity of either side, host ports) and otherwise;
    /// where those are that they must be near; and among how many they are to be spread. As if some of those pods were gone.
    pub barred: &'a dyn Fn(&Shape, &[&PodUid]) -> Barred,
    /// The pods that are taken to be gone. What they have on their nodes is among what those have left.
    pub gone: &'a [&'a PodUid],
    /// One node with each device by itself, to choose the very devices from.
    pub exact: &'a dyn Fn(NodeIx) -> Option<Exact<'a>>,
    /// Steps that all plans made from it may still take where they try everything ([`EFFORT`] at first).
    pub effort: &'a Cell<u32>,
}

/// Steps of trying everything that one look for a gang's places may take, what-ifs and all: some tenths of a second.
pub const EFFORT: u32 = 1 << 21;

/// One node with each device by itself.
#[derive(Debug, Clone)]
pub struct Exact<'a> {
    /// Its pools: of devices that nothing tells apart those are free that really are.
    pub class: Class,
    /// IDs by pool, by device.
    pub ids: Vec<&'a [Option<DeviceId>]>,
}

/// What a node has besides devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Room {
    /// What it says of itself; `None` for a node that is gone.
    pub facts: Option<Arc<NodeFacts>>,
    /// What is left of its allocatable: not asked for by pods on it nor by places of gangs.
    pub left: Resources,
}

/// What members ask for. Numbered by [`ShapeId`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Devices.
    pub request: Arc<Request>,
    /// Everything else.
    pub needs: Arc<Needs>,
}

/// What the pods that are there mean for a new one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Barred {
    /// Nodes it must not go to, sorted.
    pub nodes: Vec<NodeIx>,
    /// If it cannot go to all others either: those that it can go to, sorted.
    pub only: Option<Vec<NodeIx>>,
    /// For each term by which it must be near others ([`Needs::together_with`]): the nodes that share a domain of the term with one that
    /// all its terms find, sorted.
    pub near: Vec<Vec<NodeIx>>,
    /// For each constraint by which it is spread ([`Needs::spread`]): on which nodes how many pods are that it counts.
    pub counted: Vec<BTreeMap<NodeIx, u32>>,
}

impl<'a> PlanInput<'a> {
    /// What the pods that are there mean for one of this shape.
    pub fn barred(&self, shape: &Shape) -> Barred {
        (self.barred)(shape, self.gone)
    }

    /// A shape by its number.
    pub fn shape(&self, shape: ShapeId) -> Option<&'a Shape> {
        self.shapes.get(shape.0 as usize)
    }
}
