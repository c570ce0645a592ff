//! The cluster as it would be without some units: their devices and resources returned, their ports and affinity gone,
//! everything else unchanged.

use std::collections::{BTreeMap, HashMap};

use gantry_api::PodUid;

use super::{CandidatePod, VictimCandidate};
use crate::devices::DeviceSet;
use crate::input::{Exact, PlanInput};
use crate::shape::Shape;
use crate::snapshot::{NodeIx, Pool};

/// A plan's input, with the exact nodes of all units.
pub(super) struct WhatIf<'t, 'a> {
    input: &'t PlanInput<'a>,
    exact: HashMap<NodeIx, Exact<'a>>,
}

impl<'t, 'a> WhatIf<'t, 'a> {
    pub(super) fn new(input: &'t PlanInput<'a>, candidates: &[&VictimCandidate]) -> Self {
        let mut exact = HashMap::new();
        let pods = candidates.iter().flat_map(|candidate| &candidate.pods);
        for pod in pods.filter(|pod| !pod.devices.is_empty()) {
            if !exact.contains_key(&pod.node)
                && let Some(node) = (input.exact)(pod.node)
            {
                exact.insert(pod.node, node);
            }
        }
        Self { input, exact }
    }

    /// How many nodes there are.
    pub(super) fn nodes(&self) -> usize {
        self.input.snapshot.nodes.len()
    }

    /// The result of a search without some units.
    pub(super) fn without<T>(
        &self,
        victims: &[&VictimCandidate],
        then: impl FnOnce(&PlanInput<'_>) -> T,
    ) -> T {
        let mut rooms = self.input.rooms.to_vec();
        let mut changed: BTreeMap<NodeIx, Exact<'a>> = BTreeMap::new();
        for pod in victims.iter().flat_map(|victim| &victim.pods) {
            if let Some(room) = rooms.get_mut(pod.node.0 as usize) {
                room.left.add(&pod.resources);
            }
            if !pod.devices.is_empty()
                && let Some(exact) = self.exact.get(&pod.node)
            {
                give_back(changed.entry(pod.node).or_insert_with(|| exact.clone()), pod);
            }
        }
        let pods = victims.iter().flat_map(|victim| &victim.pods);
        let gone: Vec<&PodUid> = pods.map(|pod| &pod.uid).collect();
        let classes = changed.iter().map(|(node, exact)| (*node, &exact.class));
        let snapshot = self.input.snapshot.with(classes);
        let exact = |node: NodeIx| changed.get(&node).cloned().or_else(|| (self.input.exact)(node));
        then(&PlanInput {
            snapshot: &snapshot,
            rooms: &rooms,
            fabric: self.input.fabric,
            shapes: self.input.shapes,
            barred: self.input.barred,
            gone: &gone,
            exact: &exact,
            effort: self.input.effort,
        })
    }
}

/// Returns a pod's devices; those of an unhealthy GPU stay unavailable.
fn give_back(exact: &mut Exact<'_>, pod: &CandidatePod) {
    for (resource, ids) in &pod.devices {
        let Some(index) = exact.class.pools.iter().position(|pool| pool.resource == *resource) else {
            continue;
        };
        let known = exact.ids.get(index).copied().unwrap_or_default();
        let pool = &mut exact.class.pools[index];
        let back: DeviceSet = (0..known.len())
            .filter(|device| known[*device].as_ref().is_some_and(|id| ids.contains(id)))
            .filter(|device| !is_sick(pool, *device))
            .collect();
        pool.free.add(&back);
        pool.open.add(&back);
    }
}

fn is_sick(pool: &Pool, device: usize) -> bool {
    let gpu = match &pool.shape {
        Shape::Whole => u8::try_from(device).ok(),
        Shape::Parts(parts) => parts.spots().get(device).map(|spot| spot.gpu),
    };
    pool.faults.iter().any(|fault| Some(fault.gpu) == gpu)
}
