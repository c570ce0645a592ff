//! The input of gang plans: the published snapshot, the other resources of nodes, and what restricts one gang.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::input::{EFFORT, Exact, PlacementRules, PlanInput, Shape};

use crate::index::Index;
use gantry_planner::decide;
use gantry_planner::devices::DeviceSet;
use gantry_planner::request::Request;
use gantry_planner::snapshot::NodeIx;

/// Nodes that kube-scheduler offered for members whose planned node it did not offer, by gang and shape: what keeps one node from being
/// offered often keeps others too, so the gang is planned on those. Offers for one shape say nothing of another.
#[derive(Debug, Default)]
pub(super) struct Offers(HashMap<Arc<GangKey>, HashMap<Shape, BTreeSet<NodeIx>>>);

impl Offers {
    /// Records nodes offered for a member of a shape.
    pub(super) fn add(&mut self, gang: Arc<GangKey>, shape: Shape, nodes: impl Iterator<Item = NodeIx>) {
        let of_shape = self.0.entry(gang).or_default().entry(shape);
        of_shape.or_default().extend(nodes);
    }

    /// Restricts members of a shape to the nodes offered for one, if any were.
    pub(super) fn narrow(&self, gang: &GangKey, shape: &Shape, barred: &mut PlacementRules) {
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

    /// Forgets gangs that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&GangKey) -> bool) {
        self.0.retain(|gang, _| exists(gang));
    }

    /// Forgets all gangs, for example because nodes are renumbered.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Index {
    /// Calls `make` with the input of a plan for `gang`. Backfill reservations of other gangs are excluded for it, shapes are
    /// restricted to offered nodes, and devices of nominated pods of the same or a higher priority are not free.
    pub(super) fn on_terrain<R>(
        &self,
        gang: Option<&PlanRequest>,
        make: impl FnOnce(&PlanInput<'_>) -> R,
    ) -> R {
        let barred = |shape: &Shape, gone: &[&PodUid]| self.placement_rules(gang, shape, gone);
        let nominated = gang.map(|gang| self.beside_nominated(gang.priority)).unwrap_or_default();
        let classes = nominated.iter().map(|(node, exact)| (*node, &exact.class));
        let beside = (!nominated.is_empty()).then(|| self.published.with(classes));
        let exact = |node: NodeIx| nominated.get(&node).cloned().or_else(|| self.exact(node));
        make(&PlanInput {
            snapshot: beside.as_ref().unwrap_or(&self.published),
            rooms: self.resources.nodes(),
            fabric: self.fabric(),
            shapes: self.gangs.shapes.list(),
            barred: &barred,
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }

    /// The nodes that a member of a shape may go to, if some pods were `gone`.
    pub(super) fn placement_rules(
        &self,
        gang: Option<&PlanRequest>,
        shape: &Shape,
        gone: &[&PodUid],
    ) -> PlacementRules {
        let mut rules = self.resources.barred(&shape.needs, gone);
        if let Some(gang) = gang {
            self.gangs.offers.narrow(&gang.gang, shape, &mut rules);
        }
        if let Some(kept) = gang.and_then(|gang| self.kept_from(gang)) {
            rules.nodes.extend(kept.nodes());
            rules.nodes.sort_unstable();
            rules.nodes.dedup();
        }
        rules
    }

    /// A node with each device by itself.
    pub(super) fn exact(&self, node: NodeIx) -> Option<Exact<'_>> {
        let entry = self.nodes.get(node)?;
        let inventory = entry.inventory()?;
        Some(Exact {
            class: entry.exact(&self.reservations.holds().on(node))?,
            ids: inventory.pools.iter().map(gantry_planner::inventory::Pool::ids).collect(),
        })
    }

    /// The nodes of nominated pods of some priority or more, without what those pods will take: kube-scheduler counts a pod on
    /// its nominated node, against pods of no higher priority.
    pub(super) fn beside_nominated(&self, priority: i32) -> BTreeMap<NodeIx, Exact<'_>> {
        let mut pods: Vec<_> = self
            .unschedulable
            .nominated()
            .filter_map(|(uid, node)| Some((self.pods.get(uid)?, self.nodes.find(node.as_str())?)))
            .filter(|(pod, _)| pod.priority >= priority)
            .collect();
        pods.sort_unstable_by_key(|(pod, _)| (Reverse(pod.priority), &pod.uid));
        let mut nodes: BTreeMap<NodeIx, Exact<'_>> = BTreeMap::new();
        for (pod, node) in pods {
            let Some(exact) = nodes.remove(&node).or_else(|| self.exact(node)) else {
                continue;
            };
            let left = match &pod.request {
                Ok(request) => self.without(&exact, &request.of(&self.nodes.resources().managed())),
                Err(_) => exact,
            };
            nodes.insert(node, left);
        }
        nodes
    }

    /// A node without what a pod takes: its best layout where it fits, otherwise everything that it can use, up to what it asks
    /// for.
    fn without<'a>(&self, node: &Exact<'a>, request: &Request) -> Exact<'a> {
        let layouts = decide::judge(&node.class, request)
            .ok()
            .and_then(|()| decide::score(&node.class, request, &[], self.options.policy));
        let mut left = node.clone();
        for (number, ask) in request.asks.iter().enumerate() {
            let pools = &mut left.class.pools;
            let Some(pool) = pools.iter_mut().find(|pool| pool.resource == ask.resource) else {
                continue;
            };
            let taken: DeviceSet = match layouts.as_ref().and_then(|(_, layouts)| layouts.get(number)) {
                Some(layout) => layout.devices.clone(),
                None => pool.free.iter().take(ask.devices as usize).collect(),
            };
            pool.free.remove(&taken);
            pool.open.remove(&taken);
        }
        left
    }
}
