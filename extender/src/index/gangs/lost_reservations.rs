//! Reservations that a node can no longer honour, and why.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{GangPhase, PodUid, ResourceName};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Gangs, Stage};

use super::shapes::Shapes;
use super::spares::Lending;
use crate::index::facts::Facts;
use crate::index::node::Node;
use crate::index::occupancy::GangReservation;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Pool;
use gantry_planner::request::{Ask, Request};

/// Why no reservation on a node can be kept.
pub(super) fn cause(node: &Node) -> Option<&'static str> {
    match (node.advertised(), node.inventory()) {
        (None, _) => Some("the node is gone"),
        (_, None) => Some("the node has no Gantry plugin any more"),
        _ => None,
    }
}

/// The lost reservations on a node, by gang.
pub(super) fn find(
    node: &Node,
    gangs: &Gangs,
    facts: &Facts,
    shapes: &Shapes,
) -> BTreeMap<Arc<GangKey>, BTreeSet<u32>> {
    let mut lost: BTreeMap<Arc<GangKey>, BTreeSet<u32>> = BTreeMap::new();
    for place in node.occupancy().gang_reservations() {
        let misfit = shapes.request_of(place).and_then(|asked| misfit(place, asked));
        let is_excused = |uid: &PodUid| may_hold(gangs, facts, place, uid);
        if let Some(why) = misfit.or_else(|| loss(node, place, is_excused)) {
            tracing::info!(node = %node.name(), gang = %place.gang, %why, "a reservation of the gang is lost");
            lost.entry(Arc::clone(&place.gang)).or_default().insert(place.slot);
        }
    }
    lost
}

/// Why a reservation is lost. `excused` pods may hold its devices.
fn loss(node: &Node, place: &GangReservation, excused: impl Fn(&PodUid) -> bool) -> Option<String> {
    let inventory = node.inventory()?;
    for (resource, ids) in &place.devices {
        let Some((index, pool)) = inventory.pool(resource.as_str()) else {
            return Some(format!("the node does not serve {resource} any more"));
        };
        let (devices, unknown) = pool.find(ids);
        if unknown > 0 {
            return Some(format!("the node does not have a device of {resource} any more"));
        }
        let sick = &devices - &pool.healthy;
        if !sick.is_empty() {
            return Some(format!("{} unhealthy", pool.describe(&sick)));
        }
        let mut others = DeviceSet::EMPTY;
        for (uid, held) in node.holders() {
            if let Some(held) = held.get(index).filter(|_| !excused(uid)) {
                others.add(held);
            }
        }
        let taken = &devices & &others;
        if !taken.is_empty() {
            let words = pool.describe(&taken);
            return Some(format!("{words} held by another pod"));
        }
        let twice = &devices & &reserved_before(node, place, pool);
        if !twice.is_empty() {
            return Some(format!("{} in another reservation, too", pool.describe(&twice)));
        }
    }
    None
}

/// The devices of a pool in reservations that precede others. The reservation of a lost member is its grant. Where kubelet allocated
/// other devices, the grant may be a sibling's reservation by now: neither could get its devices before the other releases them.
fn reserved_before(node: &Node, place: &GangReservation, pool: &Pool) -> DeviceSet {
    let mut kept = DeviceSet::EMPTY;
    for other in node.occupancy().gang_reservations() {
        if (&other.gang, other.slot) < (&place.gang, place.slot) {
            for (resource, ids) in &other.devices {
                kept.add(&pool.taken(resource, ids));
            }
        }
    }
    kept
}

/// Why a member could never get the reservation: a decision may have been edited, or written when fewer resources were managed.
fn misfit(place: &GangReservation, asked: &Request) -> Option<String> {
    let count = |resource: &ResourceName| {
        let own = place.devices.iter().filter(|(name, _)| name == resource);
        own.map(|(_, ids)| ids.len()).sum::<usize>()
    };
    let wrong = |ask: &&Ask| count(&ask.resource) != ask.devices as usize;
    asked.asks.iter().find(wrong).map(|ask| {
        let (own, resource) = (count(&ask.resource), &ask.resource);
        format!("it has {own} of {resource}, {} are requested", ask.devices)
    })
}

/// Whether a pod may hold devices of a reservation: it is its pod, or a member of the gang that is being deleted, or a victim of the
/// gang.
fn may_hold(gangs: &Gangs, facts: &Facts, place: &GangReservation, uid: &PodUid) -> bool {
    let preempting = |gang: &GangKey| {
        let view = gangs.view(gang);
        view.is_some_and(|view| view.phase() == GangPhase::Preempting)
    };
    let on_its_way_out = || {
        let pod = facts.pods.get(uid);
        pod.is_none_or(|pod| pod.leaving || matches!(pod.stage, Stage::Succeeded | Stage::Failed))
    };
    place.pod.as_ref() == Some(uid)
        || Lending::new(gangs, facts).borrows(place, uid)
        || gangs.gang_of(uid).is_some_and(|gang| gang.is_incarnation_of(&place.gang)) && on_its_way_out()
        || preempting(&place.gang)
}
