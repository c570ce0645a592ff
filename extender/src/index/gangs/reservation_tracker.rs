//! Reservations of gangs on nodes: withheld from other pods from the plan until a pod shows that it has the devices. Reports when a
//! reservation is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Assignment, GangEvent, SlotChange};

use super::lost_reservations;
use super::machine::Machine;
use super::member_grant::{available, layouts_within};
use super::shapes::Shapes;
use super::spares::Lending;
use crate::index::facts::Facts;
use crate::index::node::Node;
use crate::index::node_table::Renumbering;
use crate::index::occupancy::GangReservation;
use gantry_planner::snapshot::NodeIx;

/// Time for which a plugin may not serve before the reservations on its node are lost: longer than its replacement takes. Also
/// the time for which a slot may lack CPUs or memory: longer than kubelet and the plugin take to report those of deleted pods.
const RESTART: Duration = Duration::from_secs(30);

/// Where the reservations of gangs are, and which of them are in doubt.
#[derive(Debug, Default)]
pub(in crate::index) struct ReservationTracker {
    /// The node of each reservation, by gang and slot.
    nodes: HashMap<Slot, NodeIx>,
    /// Spare reservations without a member.
    spares: BTreeSet<Slot>,
    /// Nodes that changed: their reservations must be checked.
    suspects: BTreeSet<NodeIx>,
    /// The time since which plugins of nodes with reservations do not serve.
    troubled: HashMap<NodeIx, Instant>,
    /// The time since which slots lack CPUs or memory of their NUMA nodes.
    without_numa: HashMap<Slot, Instant>,
}

/// A slot by gang and number.
type Slot = (Arc<GangKey>, u32);

/// What a change of a slot leads to.
#[derive(Debug, Default)]
pub(super) struct ReservationChange {
    /// Something came free.
    pub(super) has_released: bool,
    /// The node with a new reservation.
    pub(super) node: Option<NodeIx>,
}

impl ReservationTracker {
    /// The nodes of reservations, each with the gang.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<GangKey>, NodeIx)> {
        self.nodes.iter().map(|((gang, _), node)| (gang, *node))
    }

    /// The nodes of spare reservations without a member.
    pub(super) fn nodes_with_spares(&self) -> impl Iterator<Item = NodeIx> {
        self.spares.iter().filter_map(|spare| self.nodes.get(spare)).copied()
    }

    /// The reservations on a node must be checked: something about it changed.
    pub(super) fn suspect(&mut self, node: NodeIx) {
        self.suspects.insert(node);
    }

    /// Lets time pass: reservations in doubt are checked again.
    pub(super) fn tick(&mut self) {
        self.suspects.extend(self.troubled.keys());
        let slots = self.without_numa.keys();
        self.suspects.extend(slots.filter_map(|slot| self.nodes.get(slot)));
    }

    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        // A node with reservations is in the table, so each has a number.
        self.nodes.retain(|_, node| match renumbering.get(node) {
            Some(new) => {
                *node = *new;
                true
            }
            None => false,
        });
        self.suspects = self.suspects.iter().filter_map(|node| renumbering.get(node).copied()).collect();
        let troubled = self.troubled.iter();
        self.troubled =
            troubled.filter_map(|(node, since)| Some((*renumbering.get(node)?, *since))).collect();
    }

    /// Adds or releases a reservation as the state machine commands.
    pub(super) fn change(
        &mut self,
        change: SlotChange,
        facts: &mut Facts,
        shapes: &Shapes,
    ) -> ReservationChange {
        let SlotChange { gang, slot, place, bound } = change;
        let has_released = self.release(&(Arc::clone(&gang), slot), bound, facts, shapes);
        let Some(place) = place else {
            return ReservationChange { has_released, node: None };
        };
        let node = facts.nodes.number(&place.node);
        if let Some(occupancy) = facts.nodes.occupancy_mut(node) {
            occupancy.add_gang_reservation(GangReservation {
                gang: Arc::clone(&gang),
                slot,
                shape: place.shape,
                devices: place.devices,
                pod: place.pod.clone(),
                spare: place.spare,
            });
        }
        if let Some(shape) = place.shape.and_then(|shape| shapes.get(shape)) {
            facts.resources.reserve(node, &shape.needs);
        }
        if place.spare && place.pod.is_none() {
            self.spares.insert((Arc::clone(&gang), slot));
        }
        self.nodes.insert((gang, slot), node);
        ReservationChange { has_released, node: Some(node) }
    }

    /// Releases a reservation. If its pod is `bound`, the pod has its devices, and no other gang needs a new plan for it: false then.
    fn release(&mut self, slot: &Slot, bound: bool, facts: &mut Facts, shapes: &Shapes) -> bool {
        self.spares.remove(slot);
        self.without_numa.remove(slot);
        let Some(node) = self.nodes.remove(slot) else {
            return false;
        };
        let Some(occupancy) = facts.nodes.occupancy_mut(node) else {
            return false;
        };
        let dropped = occupancy.remove_gang_reservation(&slot.0, slot.1);
        let shape = dropped.and_then(|place| place.shape);
        if let Some(shape) = shape.and_then(|shape| shapes.get(shape)) {
            match bound {
                true => facts.resources.hand_over(node, &shape.needs),
                false => facts.resources.release(node, &shape.needs),
            }
        }
        // The ledger shows that the devices are free, but not what else the reservation had.
        !bound
    }

    /// Releases every reservation. True if there was one.
    pub(super) fn release_all(&mut self, facts: &mut Facts, shapes: &Shapes) -> bool {
        let all: Vec<Slot> = self.nodes.keys().cloned().collect();
        let mut has_released = false;
        for slot in all {
            has_released |= self.release(&slot, false, facts, shapes);
        }
        has_released
    }

    /// Reports lost reservations to the state machine. Only on complete facts: before that a node may be missing because it
    /// was not listed yet.
    pub(super) fn check(&mut self, machine: &mut Machine, facts: &mut Facts, shapes: &Shapes) {
        for node in std::mem::take(&mut self.suspects) {
            self.check_node(node, machine, facts, shapes);
        }
        self.give_up_troubled(machine, facts);
        report_narrowed(machine, facts, shapes);
    }

    fn check_node(&mut self, node: NodeIx, machine: &mut Machine, facts: &Facts, shapes: &Shapes) {
        let now = facts.clock.now();
        let Some(entry) = facts.nodes.get(node) else {
            return;
        };
        if entry.occupancy().gang_reservations().is_empty() {
            self.troubled.remove(&node);
            return;
        }
        let gone = lost_reservations::cause(entry);
        let mut lost = match gone {
            Some(_) => BTreeMap::new(),
            None => lost_reservations::find(entry, machine.gangs(), facts, shapes),
        };
        let without_numa = match entry.counts_numa() || !self.without_numa.is_empty() {
            true => slots_without_numa(entry, shapes),
            false => Vec::new(),
        };
        let name = entry.name();
        if entry.withheld().is_none() {
            self.troubled.remove(&node);
        } else {
            self.troubled.entry(node).or_insert(now.at);
        }
        for (gang, slot) in self.without_numa_too_long(now.at, without_numa) {
            tracing::info!(node = %name, %gang, slot, "other pods have the CPUs or the memory of the slot");
            lost.entry(gang).or_default().insert(slot);
        }
        if let Some(why) = gone {
            tracing::info!(node = %name, %why, "reservations of gangs on the node are lost");
            machine.handle(now, GangEvent::NodeLost { node: name });
        }
        // A reservation of a gang that is being decided stays in any case: otherwise other gangs on the node would be planned
        // again and again.
        for (gang, slots) in lost {
            machine.handle(now, GangEvent::SlotsLost { gang: &gang, slots: &slots });
        }
        // Pods are evicted from the reservations that were spare and that members have now.
        for (gang, slot, pods) in Lending::new(machine.gangs(), facts).to_be_returned(entry) {
            let ends = pods.iter().map(|uid| facts.pods.get(uid).and_then(|pod| pod.ends));
            let ends = ends.collect::<Option<Vec<i64>>>().and_then(|ends| ends.into_iter().max());
            machine.handle(now, GangEvent::SlotHeld { gang: &gang, slot, pods: &pods, ends });
        }
    }

    /// The slots that have lacked CPUs or memory for too long: they would wait as long as the other pods run.
    fn without_numa_too_long(&mut self, now: Instant, slots: Vec<(Slot, bool)>) -> Vec<Slot> {
        let since = &mut self.without_numa;
        let mut over = Vec::new();
        for (slot, lacks) in slots {
            if !lacks {
                since.remove(&slot);
            } else if now.saturating_duration_since(*since.entry(slot.clone()).or_insert(now)) >= RESTART {
                since.remove(&slot);
                over.push(slot);
            }
        }
        over
    }

    fn give_up_troubled(&mut self, machine: &mut Machine, facts: &Facts) {
        let now = facts.clock.now();
        let over: BTreeSet<NodeIx> = self
            .troubled
            .iter()
            .filter(|(_, since)| now.at.saturating_duration_since(**since) >= RESTART)
            .map(|(node, _)| *node)
            .collect();
        for node in over {
            self.troubled.remove(&node);
            if let Some(entry) = facts.nodes.get(node) {
                let name = entry.name();
                tracing::info!(node = %name, "reservations of gangs on the node are lost: its GPU plugin does not serve");
                machine.handle(now, GangEvent::NodeLost { node: name });
            }
        }
    }
}

/// Reports reservations on nodes that lack resources other than devices. kube-scheduler checks these resources for members
/// that it schedules. A member that is bound again without kube-scheduler must be created again.
fn report_narrowed(machine: &mut Machine, facts: &mut Facts, shapes: &Shapes) {
    let mut doubtful: BTreeMap<Arc<GangKey>, BTreeSet<u32>> = BTreeMap::new();
    for (node, changed) in facts.resources.take_narrowed() {
        let Some(entry) = facts.nodes.get(node) else {
            continue;
        };
        for place in entry.occupancy().gang_reservations() {
            if changed || is_crowded(facts, shapes, node, place) {
                doubtful.entry(Arc::clone(&place.gang)).or_default().insert(place.slot);
            }
        }
    }
    for (gang, slots) in doubtful {
        machine.handle(facts.clock.now(), GangEvent::CapacityShrunk { gang: &gang, slots: &slots });
    }
}

/// Whether a node has a negative rest of a resource that a reservation there needs.
fn is_crowded(facts: &Facts, shapes: &Shapes, node: NodeIx, place: &GangReservation) -> bool {
    let shape = place.shape.and_then(|shape| shapes.get(shape));
    let (Some(shape), Some(room)) = (shape, facts.resources.get(node)) else {
        return false;
    };
    let needed = &shape.needs.resources;
    // The reservation itself is not part of the rest.
    let mut left = room.left.clone();
    left.add(needed);
    left.fits(needed).is_err()
}

/// The slots on a node, each with whether only CPUs or memory are missing for a bind of its member.
fn slots_without_numa(entry: &Node, shapes: &Shapes) -> Vec<(Slot, bool)> {
    let lacks_numa = |place: &GangReservation| {
        let request = shapes.request_of(place).filter(|request| entry.counts(request.numa()))?;
        let pod = place.pod.as_ref().map_or("", PodUid::as_str);
        let gang = Arc::clone(&place.gang);
        let placed = Assignment { gang, node: entry.name().clone(), devices: place.devices.clone() };
        let sets = available(entry, &placed, pod)?;
        Some(layouts_within(entry, &sets, request, pod).is_none())
    };
    let slots = entry.occupancy().gang_reservations().iter();
    let slots = slots.map(|place| {
        let lacks = lacks_numa(place).unwrap_or(false);
        ((Arc::clone(&place.gang), place.slot), lacks)
    });
    slots.collect()
}
