//! Spare reservations: while no member of their gang has one, single pods of lower priority may have its devices where
//! too few are free otherwise. Once a member has it, those pods are evicted. Members of other gangs are lent nothing,
//! because the whole gang would have to go with one of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Gangs, SlotView};

use super::goes_by_itself;
use super::reservation_tracker::ReservationTracker;
use crate::index::facts::Facts;
use crate::index::node::Node;
use crate::index::occupancy::GangReservation;
use crate::ledger::Devices;
use gantry_planner::devices::DeviceSet;
use gantry_planner::snapshot::{Class, NodeIx, Snapshot};

/// Finds the devices of spare reservations that are lent, and the pods that they are lent to.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct Lending<'a> {
    gangs: &'a Gangs,
    facts: &'a Facts,
}

impl<'a> Lending<'a> {
    pub(super) fn new(gangs: &'a Gangs, facts: &'a Facts) -> Self {
        Self { gangs, facts }
    }

    /// The snapshot as it is for pods of a priority that are lent devices; `None` if none are.
    pub(in crate::index) fn snapshot_for(
        self,
        priority: i32,
        snapshot: &Snapshot,
        reservations: &ReservationTracker,
    ) -> Option<Snapshot> {
        let nodes: BTreeSet<NodeIx> = reservations.nodes_with_spares().collect();
        let class = |node: NodeIx| {
            let lent = self.lent(node, priority);
            let is_any = lent.iter().any(|devices| !devices.is_empty());
            self.facts
                .nodes
                .get(node)
                .filter(|_| is_any)?
                .exact_with(&self.facts.reservations.holds().on(node), &lent)
        };
        let classes = nodes.into_iter().filter_map(|node| Some((node, class(node)?)));
        let classes: Vec<(NodeIx, Class)> = classes.collect();
        (!classes.is_empty()).then(|| snapshot.with(classes.iter().map(|(node, class)| (*node, class))))
    }

    /// The devices of a node that are lent to a pod, by pool.
    pub(in crate::index) fn lent_to(self, node: NodeIx, uid: &PodUid) -> Vec<DeviceSet> {
        let pod = self.facts.pods.get(uid).filter(|pod| goes_by_itself(self.gangs, pod));
        pod.map(|pod| self.lent(node, pod.priority)).unwrap_or_default()
    }

    /// The devices of a node that are lent to single pods of a priority, by pool; empty if there are none.
    fn lent(self, node: NodeIx, priority: i32) -> Vec<DeviceSet> {
        let Some(entry) = self.facts.nodes.get(node).filter(|entry| entry.not_ready().is_none()) else {
            return Vec::new();
        };
        let lends = |place: &&GangReservation| {
            let is_spare = place.spare && place.pod.is_none();
            is_spare && self.lends_below(&place.gang).is_some_and(|below| priority < below)
        };
        let (lent, others): (Vec<_>, Vec<_>) = entry.occupancy().gang_reservations().iter().partition(lends);
        if lent.is_empty() {
            return Vec::new();
        }
        let pools = entry.pools().map(|(pool, ledger)| {
            let set = |devices: &mut dyn Iterator<Item = &Devices>| {
                let mut set = DeviceSet::EMPTY;
                for (resource, ids) in devices.flatten() {
                    set.add(&pool.taken(resource, ids));
                }
                set
            };
            let own = lent.iter().flat_map(|place| &place.devices).filter(|(of, _)| *of == pool.resource);
            let mut free = DeviceSet::EMPTY;
            for (resource, ids) in own {
                free.add(&pool.taken(resource, ids));
            }
            free.remove(&ledger.held);
            free.remove(&ledger.leaving);
            free.remove(&set(&mut others.iter().map(|place| &place.devices)));
            free.remove(&set(&mut entry.occupancy().devices_in_binds(None)));
            &free & &pool.healthy
        });
        pools.collect()
    }

    /// The priority below which single pods are lent the devices of a gang's spare reservations: it can evict those. `None`
    /// if it may evict none.
    fn lends_below(self, gang: &GangKey) -> Option<i32> {
        let view = self.gangs.view(gang)?;
        view.may_preempt().then(|| view.priority())
    }

    /// Whether a pod has devices of a spare reservation, or of one that was spare, because they were lent to it.
    pub(super) fn borrows(self, place: &GangReservation, uid: &PodUid) -> bool {
        place.spare
            && self.facts.pods.get(uid).is_some_and(|pod| {
                let below = self.lends_below(&place.gang);
                below.is_some_and(|below| pod.priority < below) && goes_by_itself(self.gangs, pod)
            })
    }

    /// The reservations of a node that were spare and that members have now, each with the pods that borrow its devices.
    pub(super) fn to_be_returned(self, node: &Node) -> Vec<(Arc<GangKey>, u32, BTreeSet<PodUid>)> {
        let taken = node.occupancy().gang_reservations().iter();
        let taken = taken.filter(|place| place.spare && place.pod.is_some());
        let taken = taken.map(|place| {
            let pods = users_of(node, &place.devices).filter(|uid| self.borrows(place, uid));
            (Arc::clone(&place.gang), place.slot, pods.cloned().collect())
        });
        taken.collect()
    }

    /// The pods, by namespace and name, that have devices of a spare slot.
    pub(super) fn borrowers_of(self, gang: &Arc<GangKey>, slot: &SlotView<'_>) -> Vec<Arc<str>> {
        let entry = self.facts.nodes.find(slot.node.as_str()).and_then(|node| self.facts.nodes.get(node));
        let Some(entry) = entry.filter(|_| slot.spare) else {
            return Vec::new();
        };
        let users = users_of(entry, slot.devices).filter(|uid| self.gangs.gang_of(uid) != Some(gang));
        let users = users.filter_map(|uid| self.facts.pods.get(uid));
        let mut names: Vec<Arc<str>> =
            users.map(|pod| format!("{}/{}", pod.namespace, pod.name).into()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// The pods that have some of these devices, or are being bound with them.
fn users_of<'a>(node: &'a Node, devices: &'a Devices) -> impl Iterator<Item = &'a PodUid> {
    let pools: Vec<DeviceSet> = node
        .pools()
        .map(|(pool, _)| {
            let mut set = DeviceSet::EMPTY;
            for (resource, ids) in devices {
                set.add(&pool.taken(resource, ids));
            }
            set
        })
        .collect();
    let own = pools.clone();
    let holds = move |held: &[DeviceSet]| held.iter().zip(&own).any(|(held, own)| !(held & own).is_empty());
    let holders = node.holders().iter().filter(move |(_, held)| holds(held)).map(|(uid, _)| uid);
    let binds = node.occupancy().binds().iter().filter(move |bind| {
        let mut sets = node.pools().zip(&pools);
        sets.any(|((pool, _), own)| {
            let mut ids = bind.devices().iter();
            ids.any(|(resource, ids)| !(&pool.taken(resource, ids) & own).is_empty())
        })
    });
    holders.chain(binds.map(|bind| bind.uid()))
}

/// Whether a pod has devices of a reservation.
pub(super) fn is_lent(node: &Node, place: &GangReservation) -> bool {
    users_of(node, &place.devices).next().is_some()
}
