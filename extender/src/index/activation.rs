//! Which unschedulable pods have a node to go to now.

use std::collections::HashMap;
use std::sync::Arc;

use gantry_api::PodUid;

use super::facts::Facts;
use super::unschedulable_queue::Gains;
use gantry_planner::decide::{self, ForeignNodes};
use gantry_planner::request::Request;
use gantry_planner::snapshot::{NodeIx, NodeState, NominatedRequests};

/// Finds unschedulable pods that fit where devices came free. Thousands of pods with the same priority ask for the
/// same: each such pair is checked once.
pub(super) struct Activation<'i> {
    facts: &'i Facts,
    nodes: Vec<NodeIx>,
    fits: HashMap<(i32, &'i Request), bool>,
}

impl<'i> Activation<'i> {
    pub(super) fn new(facts: &'i Facts, gains: &Gains) -> Self {
        let nodes: Vec<NodeIx> = match gains.nodes() {
            Some(nodes) => nodes.iter().copied().collect(),
            None => facts.nodes.numbers().collect(),
        };
        Self { facts, nodes, fits: HashMap::new() }
    }

    /// Whether a pod fits on any of the nodes.
    pub(super) fn fits(&mut self, uid: &PodUid, request: &'i Request) -> bool {
        let (facts, nodes) = (self.facts, &self.nodes);
        let priority = facts.pods.priority(uid);
        *self.fits.entry((priority, request)).or_insert_with(|| {
            let mut nodes = nodes.iter();
            nodes.any(|node| fits(facts, *node, priority, request))
        })
    }
}

/// Whether a request fits on a node beside what is promised to pods of higher priority there.
pub(super) fn fits(facts: &Facts, node: NodeIx, priority: i32, request: &Request) -> bool {
    let leaves = |promised: &Arc<NominatedRequests>| match facts.published.node_state(node) {
        NodeState::Ours(class) => promised.leaves(node, class, priority, request),
        NodeState::Foreign { .. } | NodeState::Gone => true,
    };
    is_free(facts, node, request) && facts.published.promised.as_ref().is_none_or(leaves)
}

fn is_free(facts: &Facts, node: NodeIx, request: &Request) -> bool {
    let Some(node) = facts.nodes.get(node) else {
        return false;
    };
    let Some(inventory) = node.inventory() else {
        // Its devices are counted by kube-scheduler, not by Gantry.
        let mut asks = request.asks.iter();
        return facts.options.foreign == ForeignNodes::Allow
            && asks.all(|ask| node.advertises(&ask.resource).unwrap_or(0) >= ask.devices);
    };
    request.asks.iter().all(|ask| {
        let Some((number, pool)) = inventory.pool(ask.resource.as_str()) else {
            return false;
        };
        let ledger = node.pool(number);
        ledger.is_some_and(|ledger| ledger.free.len() >= ask.devices as usize)
            && decide::too_many(pool.max_request, ask).is_none()
    })
}
