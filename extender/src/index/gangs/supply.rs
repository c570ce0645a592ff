//! How many devices there are to be had, at most: free ones, and those of pods that may be stopped. Counted once for many gangs, so that a
//! long queue costs no plan for each of those that cannot fit anyway. Decides nothing.

use std::collections::BTreeMap;

use gantry_api::ResourceName;
use gantry_gang::protocol::Wanted;
use gantry_planner::input::Shape;

use crate::index::pod_store::PodStore;
use crate::snapshot::{Snapshot, Standing};

/// How many devices of each resource are free in a snapshot, counted once for each.
#[derive(Debug, Default)]
pub(super) struct Free {
    generation: Option<u64>,
    devices: BTreeMap<ResourceName, u64>,
}

impl Free {
    pub(super) fn of(&mut self, snapshot: &Snapshot) -> &BTreeMap<ResourceName, u64> {
        if self.generation != Some(snapshot.generation) {
            self.generation = Some(snapshot.generation);
            self.devices.clear();
            let mut nodes = vec![0u64; snapshot.classes.len()];
            for class in &snapshot.nodes {
                if let Some(count) = nodes.get_mut(class.0 as usize) {
                    *count += 1;
                }
            }
            for (standing, count) in snapshot.classes.iter().zip(nodes) {
                let Standing::Ours(class) = &**standing else {
                    continue;
                };
                for pool in &class.pools {
                    *self.devices.entry(pool.resource.clone()).or_default() += count * pool.free.len() as u64;
                }
            }
        }
        &self.devices
    }
}

/// How many devices of each resource the pods of each priority ask for that are on nodes, those on their way out included.
#[derive(Debug, Default)]
pub(super) struct Held {
    moves: Option<u64>,
    devices: BTreeMap<i32, BTreeMap<ResourceName, u64>>,
    /// The lowest priority of those that ask for what cannot be read: it may be anything.
    unread: Option<i32>,
}

impl Held {
    /// Brings it up to date, if pods have come or gone since.
    pub(super) fn count(&mut self, moves: u64, pods: &PodStore) {
        if self.moves == Some(moves) {
            return;
        }
        self.moves = Some(moves);
        self.devices.clear();
        self.unread = None;
        for pod in pods.iter().filter(|pod| pod.is_live()) {
            let devices = self.devices.entry(pod.priority).or_default();
            let Ok(request) = &pod.request else {
                self.unread = Some(
                    self.unread
                        .map_or(pod.priority, |lowest| lowest.min(pod.priority)),
                );
                continue;
            };
            for ask in &request.asks {
                match devices.get_mut(&ask.resource) {
                    Some(count) => *count += u64::from(ask.devices),
                    None => drop(devices.insert(ask.resource.clone(), u64::from(ask.devices))),
                }
            }
        }
    }

    /// Whether anybody is of lower priority.
    pub(super) fn has_below(&self, priority: i32) -> bool {
        self.devices
            .keys()
            .next()
            .is_some_and(|lowest| *lowest < priority)
    }

    /// Devices of pods of lower priority.
    pub(super) fn below(&self, priority: i32, resource: &ResourceName) -> u64 {
        if self.unread.is_some_and(|lowest| lowest < priority) {
            return u64::MAX;
        }
        let lower = self.devices.range(..priority);
        lower.filter_map(|(_, devices)| devices.get(resource)).sum()
    }
}

/// The fewest devices that a gang can do with, by resource; `None` if a shape is not known.
pub(super) fn least(wanted: &Wanted, shapes: &[Shape]) -> Option<BTreeMap<ResourceName, u64>> {
    let must = usize::try_from(wanted.must).unwrap_or(usize::MAX);
    let mut asked: BTreeMap<&ResourceName, Vec<u64>> = BTreeMap::new();
    for member in &wanted.members {
        let shape = shapes.get(member.shape.0 as usize)?;
        for ask in &shape.request.asks {
            let devices = u64::from(ask.devices);
            asked.entry(&ask.resource).or_default().push(devices);
        }
    }
    let least = asked.into_iter().map(|(resource, mut devices)| {
        // Those of its members that ask for least; members that ask for none of it may be among those that must be placed.
        let without = wanted.members.len().saturating_sub(devices.len());
        devices.sort_unstable();
        (
            resource.clone(),
            devices.iter().take(must.saturating_sub(without)).sum(),
        )
    });
    Some(least.collect())
}
