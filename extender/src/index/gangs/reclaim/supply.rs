//! Upper bounds on the devices that a gang can get: free ones, those of pods of lower priority, those of releasable reservations. Counted
//! once for many gangs, so that a long queue costs no plan for each gang that cannot fit.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::input::Shape;
use gantry_planner::preempt::VictimCandidate;

use super::releasable::Source;

use crate::index::pod_store::PodStore;
use gantry_planner::snapshot::{NodeState, Snapshot};

/// Free devices by resource, counted once per snapshot.
#[derive(Debug, Default)]
pub(super) struct FreeDevices {
    generation: Option<u64>,
    devices: Arc<BTreeMap<ResourceName, u64>>,
}

impl FreeDevices {
    pub(super) fn of(&mut self, snapshot: &Snapshot) -> &Arc<BTreeMap<ResourceName, u64>> {
        if self.generation != Some(snapshot.generation) {
            self.generation = Some(snapshot.generation);
            let mut devices = BTreeMap::new();
            let mut nodes = vec![0u64; snapshot.classes.len()];
            for class in &snapshot.nodes {
                if let Some(count) = nodes.get_mut(class.0 as usize) {
                    *count += 1;
                }
            }
            for (state, count) in snapshot.classes.iter().zip(nodes) {
                let NodeState::Ours(class) = &**state else {
                    continue;
                };
                for pool in &class.pools {
                    *devices.entry(pool.resource.clone()).or_default() += count * pool.free.len() as u64;
                }
            }
            // Mostly they are the same.
            if *self.devices != devices {
                self.devices = Arc::new(devices);
            }
        }
        &self.devices
    }
}

/// Devices that bound pods ask for, by priority and resource; terminating pods included.
#[derive(Debug, Default)]
pub(super) struct HeldDevices {
    moves: Option<u64>,
    devices: BTreeMap<i32, BTreeMap<ResourceName, u64>>,
    /// The lowest priority of pods with an unreadable request, which may be for any number.
    unread: Option<i32>,
}

impl HeldDevices {
    /// Counts again if pods came or went.
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
                self.unread = Some(self.unread.map_or(pod.priority, |lowest| lowest.min(pod.priority)));
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

    /// Whether any pod has a lower priority.
    pub(super) fn has_below(&self, priority: i32) -> bool {
        self.devices.keys().next().is_some_and(|lowest| *lowest < priority)
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

/// Devices of releasable reservations, by priority of their gang and resource. Counting looks at every reservation of gangs that have some,
/// so it is done once per growth and version of the reservations.
#[derive(Debug, Default)]
pub(super) struct ReleasableDevices {
    growth: u64,
    /// The gangs, with the version of their reservations.
    gangs: Vec<(Arc<GangKey>, u64)>,
    surplus: Amounts,
    orphaned: Amounts,
}

/// Devices by priority and resource.
type Amounts = BTreeMap<i32, BTreeMap<ResourceName, u64>>;

impl ReleasableDevices {
    /// Starts counting; `None` if nothing has changed.
    pub(super) fn recount(growth: u64, gangs: Vec<(Arc<GangKey>, u64)>, last: &Self) -> Option<Self> {
        let changed = last.growth != growth || last.gangs != gangs;
        changed.then(|| Self { growth, gangs, ..Self::default() })
    }

    /// Counts a reservation.
    pub(super) fn add(&mut self, source: Source, reservation: VictimCandidate) {
        let devices = match source {
            Source::Surplus => &mut self.surplus,
            Source::Orphaned => &mut self.orphaned,
        };
        let devices = devices.entry(reservation.priority).or_default();
        for (resource, ids) in reservation.pods.into_iter().flat_map(|pod| pod.devices) {
            *devices.entry(resource).or_default() += ids.len() as u64;
        }
    }

    /// Whether anything is releasable for a gang. Surplus is not released for a decided gang.
    pub(super) fn has_any(&self, wanted: &PlanRequest) -> bool {
        let surplus = self.surplus.range(..=wanted.priority).next().is_some();
        surplus && !wanted.completes || self.orphaned.range(..wanted.priority).next().is_some()
    }

    /// Devices that are releasable for a gang.
    pub(super) fn of(&self, wanted: &PlanRequest, resource: &ResourceName) -> u64 {
        let surplus = self.surplus.range(..=wanted.priority);
        let surplus = surplus.filter(|_| !wanted.completes);
        let surplus: u64 = surplus.filter_map(|(_, devices)| devices.get(resource)).sum();
        surplus + self.orphaned(wanted, resource)
    }

    /// Devices of orphaned reservations that are releasable for a gang.
    pub(super) fn orphaned(&self, wanted: &PlanRequest, resource: &ResourceName) -> u64 {
        let lower = self.orphaned.range(..wanted.priority);
        lower.filter_map(|(_, devices)| devices.get(resource)).sum()
    }
}

/// Devices that the minimum of a gang asks for at least, by resource; `None` if a shape is not known.
pub(super) fn least(wanted: &PlanRequest, shapes: &[Shape]) -> Option<BTreeMap<ResourceName, u64>> {
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
        // The members that ask for least, after those that ask for none.
        let without = wanted.members.len().saturating_sub(devices.len());
        devices.sort_unstable();
        (resource.clone(), devices.iter().take(must.saturating_sub(without)).sum())
    });
    Some(least.collect())
}
