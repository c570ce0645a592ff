//! The input of gang plans: the published snapshot, the other resources of nodes, and what restricts one gang.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::input::{EFFORT, ExactNode, PlacementRules, PlanInput, Shape};

use super::backfill::BackfillReservations;
use super::shapes::Shapes;
use crate::index::facts::Facts;
use gantry_planner::decide;
use gantry_planner::devices::DeviceSet;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{BackfillReservation, NodeIx};

/// Nodes that kube-scheduler offered for members whose planned node it did not offer, by gang and shape: what keeps one node from being
/// offered often keeps others too, so the gang is planned on those. Offers for one shape do not count for another.
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

/// What plans of gangs are made on.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlanSource<'a> {
    facts: &'a Facts,
    shapes: &'a Shapes,
    offers: &'a Offers,
    /// Nodes that are reserved for other gangs.
    backfill: BackfillReservations<'a>,
}

impl<'a> PlanSource<'a> {
    pub(super) fn new(
        facts: &'a Facts,
        shapes: &'a Shapes,
        offers: &'a Offers,
        backfill: BackfillReservations<'a>,
    ) -> Self {
        Self { facts, shapes, offers, backfill }
    }

    pub(super) fn facts(self) -> &'a Facts {
        self.facts
    }

    pub(super) fn shapes(self) -> &'a Shapes {
        self.shapes
    }

    /// The backfill reservation that excludes a gang.
    pub(super) fn reservation_against(self, wanted: &PlanRequest) -> Option<&'a BackfillReservation> {
        self.backfill.against(wanted)
    }

    /// Calls `make` with the input of a plan for `gang`. Backfill reservations of other gangs are excluded for it, shapes are
    /// restricted to offered nodes, and devices of nominated pods of the same or a higher priority are not free.
    pub(super) fn with_input<R>(
        self,
        gang: Option<&PlanRequest>,
        make: impl FnOnce(&PlanInput<'_>) -> R,
    ) -> R {
        let barred = |shape: &Shape, gone: &[&PodUid]| self.rules(gang, shape, gone);
        let nominated = gang.map(|gang| self.beside_nominated(gang.priority)).unwrap_or_default();
        let classes = nominated.iter().map(|(node, exact)| (*node, &exact.class));
        let beside = (!nominated.is_empty()).then(|| self.facts.published.with(classes));
        let exact = |node: NodeIx| nominated.get(&node).cloned().or_else(|| self.exact(node));
        make(&PlanInput {
            snapshot: beside.as_ref().unwrap_or(&self.facts.published),
            rooms: self.facts.resources.nodes(),
            fabric: self.facts.resources.fabric(),
            shapes: self.shapes.list(),
            barred: &barred,
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }

    /// The nodes that a member of a shape may go to, if some pods were `gone`.
    pub(super) fn rules(self, gang: Option<&PlanRequest>, shape: &Shape, gone: &[&PodUid]) -> PlacementRules {
        let mut rules = self.facts.resources.barred(&shape.needs, gone);
        if let Some(gang) = gang {
            self.offers.narrow(&gang.gang, shape, &mut rules);
        }
        if let Some(kept) = gang.and_then(|gang| self.reservation_against(gang)) {
            rules.nodes.extend(kept.nodes());
            rules.nodes.sort_unstable();
            rules.nodes.dedup();
        }
        rules
    }

    /// A node with each device by itself.
    fn exact(self, node: NodeIx) -> Option<ExactNode<'a>> {
        let entry = self.facts.nodes.get(node)?;
        let inventory = entry.inventory()?;
        Some(ExactNode {
            class: entry.exact(&self.facts.reservations.holds().on(node))?,
            ids: inventory.pools.iter().map(gantry_planner::inventory::Pool::ids).collect(),
        })
    }

    /// The nodes of nominated pods of some priority or more, without what those pods will take: kube-scheduler counts a pod on
    /// its nominated node, against pods of no higher priority.
    fn beside_nominated(self, priority: i32) -> BTreeMap<NodeIx, ExactNode<'a>> {
        let mut pods: Vec<_> = self
            .facts
            .unschedulable
            .nominated()
            .filter_map(|(uid, node)| {
                Some((self.facts.pods.get(uid)?, self.facts.nodes.find(node.as_str())?))
            })
            .filter(|(pod, _)| pod.priority >= priority)
            .collect();
        pods.sort_unstable_by_key(|(pod, _)| (Reverse(pod.priority), &pod.uid));
        let mut nodes: BTreeMap<NodeIx, ExactNode<'a>> = BTreeMap::new();
        for (pod, node) in pods {
            let Some(exact) = nodes.remove(&node).or_else(|| self.exact(node)) else {
                continue;
            };
            let left = match &pod.request {
                Ok(request) => self.without(&exact, &request.of(&self.facts.nodes.resources().managed())),
                Err(_) => exact,
            };
            nodes.insert(node, left);
        }
        nodes
    }

    /// A node without what a pod takes: its best layout where it fits, otherwise everything that it can use, up to what it asks
    /// for.
    fn without(self, node: &ExactNode<'a>, request: &Request) -> ExactNode<'a> {
        let layouts = decide::judge(&node.class, request)
            .ok()
            .and_then(|()| decide::score(&node.class, request, &[], self.facts.options.policy));
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
