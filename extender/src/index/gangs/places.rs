//! Reservations of gangs on nodes: withheld from other pods from the plan until a pod shows that it has the devices. Reports when a
//! reservation is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{GangPhase, PodUid, ResourceName};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Assignment, GangEvent, Gangs, SlotChange, Stage};

use super::machine::Machine;
use super::shapes::Shapes;
use super::spares::Lending;
use crate::index::facts::Facts;
use crate::index::node::Node;
use crate::index::node_table::Renumbering;
use crate::index::occupancy::GangReservation;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Pool;
use gantry_planner::kind::Spot;
use gantry_planner::layout::{Layout, Offer};
use gantry_planner::request::{Ask, Request};
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
        let has_released = self.release((Arc::clone(&gang), slot), bound, facts, shapes);
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
    fn release(&mut self, slot: Slot, bound: bool, facts: &mut Facts, shapes: &Shapes) -> bool {
        self.spares.remove(&slot);
        self.without_numa.remove(&slot);
        let Some(node) = self.nodes.remove(&slot) else {
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
            has_released |= self.release(slot, false, facts, shapes);
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
        let gone = entry.lost();
        let mut lost = match gone {
            Some(_) => BTreeMap::new(),
            None => entry.lost_places(
                |place| asked_of(shapes, place),
                |place, uid| may_hold(machine.gangs(), facts, place, uid),
            ),
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
    for (node, told) in facts.resources.take_narrowed() {
        let Some(entry) = facts.nodes.get(node) else {
            continue;
        };
        for place in entry.occupancy().gang_reservations() {
            if told || is_crowded(facts, shapes, node, place) {
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
        let request = asked_of(shapes, place).filter(|request| entry.counts(request.numa()))?;
        let pod = place.pod.as_ref().map_or("", PodUid::as_str);
        let gang = Arc::clone(&place.gang);
        let placed = Assignment { gang, node: entry.name().clone(), devices: place.devices.clone() };
        let sets = entry.available(&placed, pod)?;
        Some(entry.layouts_within(&sets, request, pod).is_none())
    };
    let slots = entry.occupancy().gang_reservations().iter();
    let slots = slots.map(|place| {
        let lacks = lacks_numa(place).unwrap_or(false);
        ((Arc::clone(&place.gang), place.slot), lacks)
    });
    slots.collect()
}

/// The requests of the members of a reservation, if known.
fn asked_of<'s>(shapes: &'s Shapes, place: &GangReservation) -> Option<&'s Request> {
    let shape = shapes.get(place.shape?)?;
    Some(&shape.request)
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

impl GangReservation {
    /// Why a member could never get the reservation: a decision may have been edited, or written when fewer resources were managed.
    fn misfit(&self, asked: &Request) -> Option<String> {
        let count = |resource: &ResourceName| {
            let own = self.devices.iter().filter(|(name, _)| name == resource);
            own.map(|(_, ids)| ids.len()).sum::<usize>()
        };
        let wrong = |ask: &&Ask| count(&ask.resource) != ask.devices as usize;
        asked.asks.iter().find(wrong).map(|ask| {
            let (own, resource) = (count(&ask.resource), &ask.resource);
            format!("it has {own} of {resource}, {} are requested", ask.devices)
        })
    }
}

impl Node {
    /// Why no reservation on this node can be kept.
    fn lost(&self) -> Option<&'static str> {
        match (self.advertised(), self.inventory()) {
            (None, _) => Some("the node is gone"),
            (_, None) => Some("the node has no Gantry plugin any more"),
            _ => None,
        }
    }

    /// The lost reservations on this node, by gang. `asked` is the request of a reservation; `excused` pods may hold its devices.
    fn lost_places<'a>(
        &self,
        asked: impl Fn(&GangReservation) -> Option<&'a Request>,
        excused: impl Fn(&GangReservation, &PodUid) -> bool,
    ) -> BTreeMap<Arc<GangKey>, BTreeSet<u32>> {
        let mut lost: BTreeMap<Arc<GangKey>, BTreeSet<u32>> = BTreeMap::new();
        for place in self.occupancy().gang_reservations() {
            let misfit = asked(place).and_then(|asked| place.misfit(asked));
            if let Some(why) = misfit.or_else(|| self.lost_place(place, &excused)) {
                tracing::info!(node = %self.name(), gang = %place.gang, %why, "a reservation of the gang is lost");
                lost.entry(Arc::clone(&place.gang)).or_default().insert(place.slot);
            }
        }
        lost
    }

    fn lost_place(
        &self,
        place: &GangReservation,
        excused: impl Fn(&GangReservation, &PodUid) -> bool,
    ) -> Option<String> {
        let inventory = self.inventory()?;
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
            for (uid, held) in self.holders() {
                if let Some(held) = held.get(index).filter(|_| !excused(place, uid)) {
                    others.add(held);
                }
            }
            let taken = &devices & &others;
            if !taken.is_empty() {
                let words = pool.describe(&taken);
                return Some(format!("{words} held by another pod"));
            }
            let twice = &devices & &self.kept_before(place, pool);
            if !twice.is_empty() {
                return Some(format!("{} in another reservation, too", pool.describe(&twice)));
            }
        }
        None
    }

    /// The devices of a pool in reservations that precede others. The reservation of a lost member is its grant. Where kubelet allocated
    /// other devices, the grant may be a sibling's reservation by now: neither could get its devices before the other releases them.
    fn kept_before(&self, place: &GangReservation, pool: &Pool) -> DeviceSet {
        let mut kept = DeviceSet::EMPTY;
        for other in self.occupancy().gang_reservations() {
            if (&other.gang, other.slot) < (&place.gang, place.slot) {
                for (resource, ids) in &other.devices {
                    kept.add(&pool.taken(resource, ids));
                }
            }
        }
        kept
    }

    /// The devices of a reservation by pool, if its pod can have them now: healthy, and held by no other pod.
    pub(in crate::index) fn available(&self, placed: &Assignment, pod: &str) -> Option<Vec<DeviceSet>> {
        let inventory = self.inventory()?;
        let mut sets = vec![DeviceSet::EMPTY; inventory.pools.len()];
        for (resource, ids) in &placed.devices {
            let (index, pool) = inventory.pool(resource.as_str())?;
            let (devices, unknown) = pool.find(ids);
            let ledger = self.pool(index)?;
            let mut taken = self.taken_by_others(pool, placed, pod);
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
        &self,
        sets: &[DeviceSet],
        request: &Request,
        pod: &str,
    ) -> Option<Vec<Layout>> {
        let class = self.exact_for(pod)?;
        let cuts: Vec<Vec<Spot>> = request.asks.iter().map(|ask| class.cut_for(ask)).collect();
        let offers = request.asks.iter().zip(&cuts).map(|(ask, cut)| {
            let (index, pool) = class.pool(ask.resource.as_str())?;
            let devices = sets.get(index).filter(|devices| devices.len() == ask.devices as usize)?;
            Some(Offer { site: class.site(pool, cut), free: devices, ask })
        });
        Layout::best_of_all(&offers.collect::<Option<Vec<_>>>()?)
    }

    /// The devices of a pool in binds and reservations of others.
    fn taken_by_others(&self, pool: &Pool, placed: &Assignment, pod: &str) -> DeviceSet {
        let binds = self.occupancy().devices_in_binds(Some(pod));
        let places = self.occupancy().gang_reservations().iter();
        let places = places
            .filter(|place| place.gang != placed.gang || place.devices != placed.devices)
            .map(|place| &place.devices);
        let mut taken = DeviceSet::EMPTY;
        for (resource, ids) in binds.chain(places).flatten() {
            taken.add(&pool.taken(resource, ids));
        }
        taken
    }
}
