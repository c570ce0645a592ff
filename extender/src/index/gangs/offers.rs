//! Where members of gangs could go of which a node was planned and not offered: their gang is planned there, for what kept one node from
//! being offered most often keeps others too. By shape, for what is offered for one says nothing of another. Only bookkeeping.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use gantry_gang::GangKey;
use gantry_planner::input::{Barred, Shape};

use crate::snapshot::NodeIx;

/// Nodes that were offered, by gang and shape.
#[derive(Debug, Default)]
pub(super) struct Offers(HashMap<Arc<GangKey>, HashMap<Shape, BTreeSet<NodeIx>>>);

impl Offers {
    /// Nodes were offered for a member of a shape.
    pub(super) fn add(&mut self, gang: Arc<GangKey>, shape: Shape, nodes: impl Iterator<Item = NodeIx>) {
        let of_shape = self.0.entry(gang).or_default().entry(shape);
        of_shape.or_default().extend(nodes);
    }

    /// Keeps members of a shape from all nodes that were not offered for one, if any were.
    pub(super) fn narrow(&self, gang: &GangKey, shape: &Shape, barred: &mut Barred) {
        let Some(offered) = self.0.get(gang).and_then(|shapes| shapes.get(shape)) else {
            return;
        };
        match &mut barred.only {
            Some(only) => only.retain(|node| offered.contains(node)),
            None => barred.only = Some(offered.iter().copied().collect()),
        }
    }

    /// A gang may go to all nodes again.
    pub(super) fn forget(&mut self, gang: &GangKey) {
        self.0.remove(gang);
    }

    /// Forgets gangs that are no more.
    pub(super) fn retain(&mut self, exists: impl Fn(&GangKey) -> bool) {
        self.0.retain(|gang, _| exists(gang));
    }

    /// Forgets all. The numbers of nodes may be others then.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
