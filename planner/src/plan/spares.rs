//! Spare reservations of a gang. A gang without reservations gets them with its members, as if it had more of those,
//! if that spreads the members over no more nodes and domains. A gang with reservations gets them next to its members:
//! in the domain of the level that holds the members, in that of a slice if it has slices. Never does a member wait for
//! a spare one.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_gang::protocol::{Placement, PlanRequest, Refusal, Reservation, Sibling};
use gantry_gang::{DomainIx, TopologyRequest};

use super::plan_members;
use super::scope::{Bounds, Scope};
use super::slices::Slices;
use crate::input::PlanInput;
use crate::snapshot::NodeIx;

/// Plans a gang and its spare reservations.
///
/// # Errors
/// Why its members do not fit, or if it has only spare ones to plan, why those do not.
pub(super) fn plan(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    if wanted.members.is_empty() {
        return beside(input, wanted);
    }
    let own = plan_members(input, wanted);
    match (own, wanted.placed.is_empty()) {
        (Ok(own), true) => Ok(together(input, wanted, &own).unwrap_or(own)),
        (Err(refusal), false) => beside(input, wanted).map_err(|_| refusal),
        // The spare ones of a gang that has reservations have their turn once its members have theirs.
        (own, _) => own,
    }
}

/// Members and spare reservations in one plan.
fn together(input: &PlanInput<'_>, wanted: &PlanRequest, own: &Placement) -> Option<Placement> {
    if own.places.len() < wanted.members.len() || slices(input, wanted).is_some() {
        return None;
    }
    let members: Vec<_> = wanted.members.iter().chain(&wanted.spares).cloned().collect();
    let must = u32::try_from(members.len()).ok()?;
    let mut all = PlanRequest { members, must, ..wanted.clone() };
    let nodes = nodes(input, &own.places);
    keep_level(input, &mut all, &nodes);
    let placement = plan_members(input, &all).ok()?;
    let (own, found) = (spread(input, &nodes), spread(input, &self::nodes(input, &placement.places)));
    (found.0 <= own.0 && found.1 <= own.1).then_some(placement)
}

/// Spare reservations next to members that are placed.
fn beside(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    let mut request =
        PlanRequest { members: wanted.spares.clone(), must: 0, completes: false, ..wanted.clone() };
    Arc::make_mut(&mut request.terms).max = u32::MAX;
    if let Some(slices) = slices(input, wanted) {
        return beside_slices(input, request, slices);
    }
    let placed = request.placed.iter().filter_map(|sibling| node(input, sibling)).collect();
    keep_level(input, &mut request, &placed);
    plan_members(input, &request)
}

/// Spare reservations in the domains of slices, spread evenly over those that have room.
fn beside_slices(
    input: &PlanInput<'_>,
    mut request: PlanRequest,
    slices: Slices,
) -> Result<Placement, Refusal> {
    let level = |sibling: &Sibling| input.fabric.of_node_at(node(input, sibling)?.0, slices.level);
    let domains: BTreeSet<DomainIx> = request.placed.iter().filter_map(level).collect();
    let name = input.fabric.levels.0.get(slices.level).map(|level| Arc::clone(&level.name));
    let terms = Arc::make_mut(&mut request.terms);
    terms.slice = None;
    terms.level = name.map(|level| TopologyRequest { level, required: true });
    let (mut found, mut refusal) = (Placement::default(), Refusal::UnknownRequest);
    let mut left = request.members.clone();
    for (at, domain) in domains.iter().enumerate() {
        let share = left.len().div_ceil(domains.len() - at);
        let placed = request.placed.iter().filter(|sibling| level(sibling) == Some(*domain));
        let part = PlanRequest {
            members: left[..share].to_vec(),
            placed: placed.cloned().collect(),
            ..request.clone()
        };
        match plan_members(input, &part) {
            Ok(more) => {
                for spare in more.spares {
                    let own = left.iter().position(|own| own.shape == spare.shape && own.role == spare.role);
                    own.map(|own| left.remove(own));
                    found.spares.push(spare);
                }
            }
            Err(why) => refusal = why,
        }
        if left.is_empty() {
            break;
        }
    }
    if found.spares.is_empty() { Err(refusal) } else { Ok(found) }
}

/// A preferred level of which one domain holds the members is required of their spare ones.
fn keep_level(input: &PlanInput<'_>, request: &mut PlanRequest, nodes: &BTreeSet<NodeIx>) {
    let holds = match Bounds::of(&input.fabric.levels, request) {
        Bounds::Within(Scope::Level(level), false) => {
            let domains = nodes.iter().map(|node| input.fabric.of_node_at(node.0, level));
            let domains: BTreeSet<_> = domains.collect();
            domains.len() == 1 && !domains.contains(&None)
        }
        Bounds::Within(Scope::Node, false) => nodes.len() == 1,
        _ => false,
    };
    if let Some(level) = &mut Arc::make_mut(&mut request.terms).level {
        level.required |= holds;
    }
}

fn slices(input: &PlanInput<'_>, wanted: &PlanRequest) -> Option<Slices> {
    match Bounds::of(&input.fabric.levels, wanted) {
        Bounds::Sliced(slices, _) => Some(slices),
        _ => None,
    }
}

fn node(input: &PlanInput<'_>, sibling: &Sibling) -> Option<NodeIx> {
    input.snapshot.find(sibling.node.as_str())
}

fn nodes(input: &PlanInput<'_>, places: &[Reservation]) -> BTreeSet<NodeIx> {
    places.iter().filter_map(|place| input.snapshot.find(place.node.as_str())).collect()
}

/// How many nodes there are, and how many domains they are in.
fn spread(input: &PlanInput<'_>, nodes: &BTreeSet<NodeIx>) -> (usize, usize) {
    let smallest = nodes.iter().filter_map(|node| input.fabric.of_node.get(node.0 as usize));
    let domains: BTreeSet<DomainIx> = smallest.flat_map(|domain| input.fabric.path(*domain)).collect();
    (nodes.len(), domains.len())
}
