//! What the nodes of a cluster take of a gang at most. An upper bound for searches over many clusters of which this is
//! the emptiest: members that do not fit here do not fit on fuller nodes either.

use gantry_gang::protocol::{PlanRequest, ShapeId};

use super::demand::{Counts, Demand};
use super::fill::Anchors;
use super::pack::nodes_of;
use super::scope::{Bounds, Scope, places, scopes};
use super::survey::{FreeRule, Survey};
use crate::input::PlanInput;
use crate::snapshot::NodeIx;

/// The most that nodes take, and what is needed.
#[derive(Debug)]
pub(crate) struct Capacity {
    /// The distinct shapes of members.
    pub(crate) shapes: Vec<ShapeId>,
    /// Numbers of members by shape, of which one must fit.
    pub(crate) mixes: Vec<Counts>,
    /// Sets of nodes, of which one must hold all members.
    pub(crate) grounds: Vec<Vec<NodeIx>>,
    takes: Vec<u32>,
}

impl Capacity {
    /// `None` if the gang cannot fit anywhere.
    pub(crate) fn of(input: &PlanInput<'_>, wanted: &PlanRequest) -> Option<Self> {
        let demand = Demand::least_of(wanted);
        let survey = Survey::new(*input, wanted, &demand.shapes, FreeRule::Free)?;
        let anchors = Anchors::of(&survey, wanted);
        let widest = match Bounds::of(&input.fabric.levels, wanted) {
            Bounds::Unknown => return None,
            Bounds::Within(scope, true) => scope,
            Bounds::Free | Bounds::Within(_, false) | Bounds::Sliced(..) => Scope::Cluster,
        };
        let tier = survey.lowest_tier();
        let slots = demand.shapes.len();
        let nodes = u32::try_from(input.snapshot.nodes.len()).unwrap_or(u32::MAX);
        let takes: Vec<u32> = (0..nodes)
            .flat_map(|node| (0..slots).map(move |slot| (NodeIx(node), slot)))
            .map(|(node, slot)| survey.takes(node, slot, tier))
            .collect();
        let grounds = match widest {
            Scope::Cluster => vec![(0..nodes).map(NodeIx).collect()],
            Scope::Node | Scope::Level(_) => {
                let scope = scopes(&survey, widest).pop()?;
                let places = places(&survey, &anchors, scope).into_iter();
                places.map(|place| nodes_of(&survey, place)).collect()
            }
        };
        Some(Self { mixes: demand.least(), grounds, takes, shapes: demand.shapes })
    }

    /// Members of a shape, by its position, that a node takes at most.
    pub(crate) fn takes(&self, node: NodeIx, slot: usize) -> u32 {
        self.takes.get(node.0 as usize * self.shapes.len() + slot).copied().unwrap_or(0)
    }
    /// Takes the larger of both for each node: a pod that goes may be one that members have to be near.
    pub(crate) fn raise_to(&mut self, other: &Self) {
        for (own, other) in self.takes.iter_mut().zip(&other.takes) {
            *own = (*own).max(*other);
        }
    }
}
