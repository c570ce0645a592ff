//! The devices of a reservation, for the bind of its member.

use gantry_gang::protocol::Assignment;

use crate::index::node::Node;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Pool;
use gantry_planner::kind::Spot;
use gantry_planner::layout::{Layout, Offer};
use gantry_planner::request::Request;

/// The devices of a reservation by pool, if its pod can have them now: healthy, and held by no other pod.
pub(in crate::index) fn available(node: &Node, placed: &Assignment, pod: &str) -> Option<Vec<DeviceSet>> {
    let inventory = node.inventory()?;
    let mut sets = vec![DeviceSet::EMPTY; inventory.pools.len()];
    for (resource, ids) in &placed.devices {
        let (index, pool) = inventory.pool(resource.as_str())?;
        let (devices, unknown) = pool.find(ids);
        let ledger = node.pool(index)?;
        let mut taken = taken_by_others(node, pool, placed, pod);
        taken.add(&ledger.held);
        taken.add(&ledger.leaving);
        if unknown > 0 || !devices.is_subset(&(&pool.healthy - &taken)) {
            return None;
        }
        sets[index] = devices;
    }
    Some(sets)
}

/// How the containers of a pod share devices, by pool; `None` if kubelet would refuse the pod.
pub(in crate::index) fn layouts_within(
    node: &Node,
    sets: &[DeviceSet],
    request: &Request,
    pod: &str,
) -> Option<Vec<Layout>> {
    let class = node.exact_for(pod)?;
    let cuts: Vec<Vec<Spot>> = request.asks.iter().map(|ask| class.cut_for(ask)).collect();
    let offers = request.asks.iter().zip(&cuts).map(|(ask, cut)| {
        let (index, pool) = class.pool(ask.resource.as_str())?;
        let devices = sets.get(index).filter(|devices| devices.len() == ask.devices as usize)?;
        Some(Offer { site: class.site(pool, cut), free: devices, ask })
    });
    Layout::best_of_all(&offers.collect::<Option<Vec<_>>>()?)
}

/// The devices of a pool in binds and reservations of others.
fn taken_by_others(node: &Node, pool: &Pool, placed: &Assignment, pod: &str) -> DeviceSet {
    let binds = node.occupancy().devices_in_binds(Some(pod));
    let places = node.occupancy().gang_reservations().iter();
    let places = places
        .filter(|place| place.gang != placed.gang || place.devices != placed.devices)
        .map(|place| &place.devices);
    let mut taken = DeviceSet::EMPTY;
    for (resource, ids) in binds.chain(places).flatten() {
        taken.add(&pool.taken(resource, ids));
    }
    taken
}
