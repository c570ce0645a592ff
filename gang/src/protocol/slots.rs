//! The slots of one gang: the reservations it was given, and which member has each. A slot has one holder at most, by its type.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DecidedReservation, DeviceId, NodeName, PodUid, ResourceName};

use super::reasons::Refusal;
use super::types::{Asks, Devices, Member, Placement, Reservation, ShapeId, SlotReservation};
use crate::key::GangKey;

/// A slot of the gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    node: NodeName,
    devices: Devices,
    /// `None` after a restart, until a member has it.
    shape: Option<ShapeId>,
    /// The shape that its member has since it was bound, if another: what was found for it there, such as a volume, is part of its needs.
    bound_shape: Option<ShapeId>,
    rank: Option<u32>,
    role: Arc<str>,
    /// See [`Reservation::ordinal`].
    ordinal: Option<u32>,
    /// See [`Reservation::follows`].
    follows: bool,
    /// It was planned as a spare one, and no member has been bound with it.
    spare: bool,
    holder: Holder,
    /// Since when the holder is what it is.
    since: Instant,
    /// Its node was lost while the decision was being written.
    stale: bool,
}

/// Which member has a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    /// None: it is kept for a member to come.
    Kept,
    /// None: it is kept for a member that may be lost, and its devices are lent meanwhile.
    Spare,
    /// A member that is not bound yet.
    Assigned(PodUid),
    /// A member that is seen to be bound: its pod holds the devices.
    Bound(PodUid),
    /// A bound member that is lost; its pod still exists.
    Leaving(PodUid),
}

impl Holder {
    pub(super) fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Kept | Self::Spare => None,
            Self::Assigned(uid) | Self::Bound(uid) | Self::Leaving(uid) => Some(uid),
        }
    }
}

impl Slot {
    pub(super) fn new(reservation: &Reservation, now: Instant) -> Self {
        Self {
            node: reservation.node.clone(),
            devices: reservation.devices.clone(),
            shape: Some(reservation.shape),
            bound_shape: None,
            rank: reservation.rank,
            role: reservation.role.clone(),
            ordinal: reservation.ordinal,
            follows: reservation.follows,
            spare: false,
            holder: Holder::Kept,
            since: now,
            stale: false,
        }
    }

    /// A spare slot.
    pub(super) fn spare(reservation: &Reservation, now: Instant) -> Self {
        Self { ordinal: None, spare: true, holder: Holder::Spare, ..Self::new(reservation, now) }
    }

    /// A slot of a decision that another process wrote.
    pub(super) fn decided(reservation: &DecidedReservation, now: Instant) -> Self {
        let devices = reservation.devices.iter();
        Self {
            node: reservation.node.clone(),
            devices: devices.map(|devices| (devices.resource.clone(), devices.ids.clone())).collect(),
            shape: None,
            bound_shape: None,
            rank: reservation.rank,
            role: reservation.role.as_str().into(),
            ordinal: reservation.ordinal,
            // It is decided: the barrier waits for no member any more.
            follows: false,
            spare: reservation.spare,
            holder: if reservation.spare && reservation.pod.is_none() { Holder::Spare } else { Holder::Kept },
            since: now,
            stale: false,
        }
    }

    pub(super) fn node(&self) -> &NodeName {
        &self.node
    }

    pub(super) fn devices(&self) -> &Devices {
        &self.devices
    }

    pub(super) fn shape(&self) -> Option<ShapeId> {
        self.shape
    }

    pub(super) fn rank(&self) -> Option<u32> {
        self.rank
    }

    pub(super) fn role(&self) -> &Arc<str> {
        &self.role
    }

    pub(super) fn ordinal(&self) -> Option<u32> {
        self.ordinal
    }

    pub(super) fn follows(&self) -> bool {
        self.follows
    }

    pub(super) fn is_spare(&self) -> bool {
        self.spare
    }

    pub(super) fn holder(&self) -> &Holder {
        &self.holder
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }

    pub(super) fn is_bound(&self) -> bool {
        matches!(self.holder, Holder::Bound(_))
    }

    /// Whether its devices are what a member asks for.
    pub(super) fn suits(&self, member: &Member) -> bool {
        match (self.shape, member.shape) {
            (_, None) => false,
            // A replacement takes over what was found for the member before it, or has it found again.
            (Some(own), Some(asked)) => own == asked || self.bound_shape == Some(asked),
            (None, Some(_)) => {
                same_amounts(&self.devices, &member.asks) && self.role == member.membership.role
            }
        }
    }

    /// Whether it is kept for such a member: a slot of a rank is for a member of that rank.
    pub(super) fn awaits(&self, member: &Member) -> bool {
        self.is_kept_for(member) && self.suits(member)
    }

    /// Whether it is spare, and such a member may have it.
    pub(super) fn replaces(&self, member: &Member) -> bool {
        self.holder == Holder::Spare && self.role == member.membership.role && self.suits(member)
    }

    /// The same for a member that asks for the same devices and may have other needs.
    pub(super) fn awaits_alike(&self, member: &Member) -> bool {
        self.is_kept_for(member) && member.shape.is_some() && same_amounts(&self.devices, &member.asks)
    }

    fn is_kept_for(&self, member: &Member) -> bool {
        let rank = match (self.rank, member.membership.rank) {
            (Some(own), Some(asked)) => own == asked,
            _ => true,
        };
        self.holder == Holder::Kept && rank && self.role == member.membership.role
    }

    pub(super) fn device_count(&self) -> u64 {
        let all = self.devices.iter().map(|(_, ids)| ids.len());
        all.fold(0, |sum, count| sum.saturating_add(count as u64))
    }

    /// Whether these, in whatever order, are its devices. No devices are never the same as a slot's.
    pub(super) fn has_exactly(&self, devices: &Devices) -> bool {
        !devices.is_empty() && (self.devices == *devices || sorted(&self.devices) == sorted(devices))
    }

    pub(super) fn has(&self, device: &DeviceId) -> bool {
        self.devices.iter().any(|(_, ids)| ids.contains(device))
    }

    fn reserved(&self) -> Option<SlotReservation> {
        let pod = match &self.holder {
            Holder::Bound(_) => return None,
            Holder::Assigned(uid) => Some(uid.clone()),
            Holder::Kept | Holder::Spare | Holder::Leaving(_) => None,
        };
        Some(SlotReservation {
            node: self.node.clone(),
            shape: self.shape,
            devices: self.devices.clone(),
            pod,
            spare: self.spare,
        })
    }
}

fn sorted(devices: &Devices) -> Vec<(&ResourceName, Vec<&DeviceId>)> {
    let mut sorted: Vec<_> = devices
        .iter()
        .map(|(resource, ids)| {
            let mut ids: Vec<_> = ids.iter().collect();
            ids.sort_unstable();
            (resource, ids)
        })
        .collect();
    sorted.sort_unstable();
    sorted
}

fn same_amounts(devices: &Devices, asks: &Asks) -> bool {
    let mut amounts: Vec<_> = devices.iter().map(|(resource, ids)| (resource, ids.len())).collect();
    amounts.sort_unstable();
    let mut asked: Vec<_> = asks.iter().map(|(resource, count)| (resource, *count as usize)).collect();
    asked.sort_unstable();
    amounts == asked
}

/// All slots of a gang.
#[derive(Debug, Clone, Default)]
pub(super) struct Slots {
    all: BTreeMap<u32, Slot>,
    next: u32,
    kept: BTreeSet<u32>,
    leaving: BTreeSet<u32>,
    spares: BTreeSet<u32>,
    /// Slots of bound pods that are gone, and of adopted decisions: their devices may be another's.
    doubtful: BTreeSet<u32>,
    devices: u64,
    /// Slots that changed since the last [`Slots::take_changes`].
    touched: BTreeSet<u32>,
    /// The slots that were last reported as reserved, with shape and pod.
    reported: BTreeMap<u32, (Option<ShapeId>, Option<PodUid>)>,
    /// Grows with every change.
    version: u64,
}

impl Slots {
    pub(super) fn get(&self, id: u32) -> Option<&Slot> {
        self.all.get(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Slot)> {
        self.all.iter().map(|(id, slot)| (*id, slot))
    }

    pub(super) fn ids(&self) -> Vec<u32> {
        self.all.keys().copied().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn kept(&self) -> &BTreeSet<u32> {
        &self.kept
    }

    /// The spare slots that no member has.
    pub(super) fn spares(&self) -> impl ExactSizeIterator<Item = (u32, &Slot)> {
        self.spares.iter().map(|id| (*id, &self.all[id]))
    }

    /// The spare slots are kept for the members to come, like the others.
    pub(super) fn keep_spares(&mut self, now: Instant) {
        for id in std::mem::take(&mut self.spares) {
            self.set_holder(id, &Holder::Kept, now);
        }
    }

    /// A kept slot for which `is` holds.
    pub(super) fn find_kept(&self, is: impl Fn(&Slot) -> bool) -> Option<u32> {
        let mut kept = self.kept.iter().copied();
        kept.find(|id| self.get(*id).is_some_and(&is))
    }

    /// Slots of lost members: kept, or not given up by the pod yet.
    pub(super) fn lost(&self) -> impl Iterator<Item = u32> {
        self.kept.iter().chain(&self.leaving).copied()
    }

    /// A pod that is lost still has one of them.
    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    pub(super) fn devices(&self) -> u64 {
        self.devices
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn insert(&mut self, slot: Slot) -> u32 {
        let id = self.next;
        self.next = self.next.saturating_add(1);
        self.devices = self.devices.saturating_add(slot.device_count());
        self.index(id, &slot.holder);
        self.touch(id);
        self.all.insert(id, slot);
        id
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Slot> {
        let slot = self.all.remove(&id)?;
        self.devices = self.devices.saturating_sub(slot.device_count());
        self.kept.remove(&id);
        self.leaving.remove(&id);
        self.spares.remove(&id);
        self.doubtful.remove(&id);
        self.touch(id);
        Some(slot)
    }

    pub(super) fn set_holder(&mut self, id: u32, holder: &Holder, now: Instant) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        if slot.holder == *holder {
            return;
        }
        let was_bound = slot.is_bound();
        slot.holder = holder.clone();
        slot.spare &= !slot.is_bound();
        slot.since = now;
        if was_bound && matches!(holder, Holder::Kept | Holder::Leaving(_)) {
            self.doubtful.insert(id);
        }
        self.index(id, holder);
        self.touch(id);
    }

    /// The bound member of a slot has other devices than it was to get. A pod that does not report its devices changes nothing.
    pub(super) fn set_devices(&mut self, id: u32, devices: &Devices) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        if devices.is_empty() || slot.has_exactly(devices) {
            return;
        }
        self.devices = self.devices.saturating_sub(slot.device_count());
        slot.devices.clone_from(devices);
        self.devices = self.devices.saturating_add(slot.device_count());
        self.touch(id);
    }

    /// Gives a slot the rank, role and shape of its member.
    pub(super) fn fit(&mut self, id: u32, member: &Member) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        slot.shape = member.shape;
        slot.bound_shape = None;
        if member.membership.rank.is_some() {
            slot.rank = member.membership.rank;
        }
        slot.role = member.membership.role.clone();
        self.touch(id);
    }

    /// The member of a slot is bound, and is of this shape from now on.
    pub(super) fn set_bound_shape(&mut self, id: u32, shape: Option<ShapeId>) {
        if let Some(slot) = self.all.get_mut(&id) {
            slot.bound_shape = shape.filter(|_| shape != slot.shape);
        }
    }

    /// The devices of a slot may be another's.
    pub(super) fn doubt(&mut self, id: u32) {
        self.doubtful.insert(id);
    }

    pub(super) fn take_doubtful(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.doubtful)
    }

    pub(super) fn mark_stale(&mut self, id: u32) {
        if let Some(slot) = self.all.get_mut(&id) {
            slot.stale = true;
        }
    }

    fn index(&mut self, id: u32, holder: &Holder) {
        self.kept.remove(&id);
        self.leaving.remove(&id);
        self.spares.remove(&id);
        match holder {
            Holder::Kept => self.kept.insert(id),
            Holder::Leaving(_) => self.leaving.insert(id),
            Holder::Spare => self.spares.insert(id),
            Holder::Assigned(_) | Holder::Bound(_) => true,
        };
    }

    fn touch(&mut self, id: u32) {
        self.touched.insert(id);
        self.version += 1;
    }

    /// The slots that are reserved now and were not, or no longer are.
    pub(super) fn take_changes(&mut self) -> Vec<(u32, Option<SlotReservation>)> {
        let mut changes = Vec::new();
        for id in std::mem::take(&mut self.touched) {
            let reserved = self.all.get(&id).and_then(Slot::reserved);
            let report = reserved.as_ref().map(|slot| (slot.shape, slot.pod.clone()));
            if self.reported.get(&id) == report.as_ref() {
                continue;
            }
            match report {
                Some(report) => self.reported.insert(id, report),
                None => self.reported.remove(&id),
            };
            changes.push((id, reserved));
        }
        changes
    }
}

// Which gang has a reservation with each device.

/// The devices of all reservations.
#[derive(Debug, Clone, Default)]
pub(super) struct ReservedDevices {
    by_node: HashMap<NodeName, HashMap<DeviceId, Arc<GangKey>>>,
    /// By slot, to find the devices again when it is released.
    by_slot: HashMap<(Arc<GangKey>, u32), (NodeName, Vec<DeviceId>)>,
}

impl ReservedDevices {
    /// The gang that has a reservation with a device.
    pub(super) fn holder(&self, node: &NodeName, device: &DeviceId) -> Option<&Arc<GangKey>> {
        self.by_node.get(node)?.get(device)
    }

    /// The gangs that have reservations on a node.
    pub(super) fn gangs_on(&self, node: &NodeName) -> BTreeSet<Arc<GangKey>> {
        let devices = self.by_node.get(node).into_iter();
        devices.flat_map(|devices| devices.values().cloned()).collect()
    }

    /// A slot keeps these devices from now on, or none.
    pub(super) fn set(&mut self, gang: &Arc<GangKey>, slot: u32, reserved: Option<&SlotReservation>) {
        let slot = (gang.clone(), slot);
        if let Some((node, ids)) = self.by_slot.remove(&slot)
            && let Some(devices) = self.by_node.get_mut(&node)
        {
            for id in ids {
                if devices.get(&id) == Some(gang) {
                    devices.remove(&id);
                }
            }
            if devices.is_empty() {
                self.by_node.remove(&node);
            }
        }
        let Some(reserved) = reserved else { return };
        let ids = reserved.devices.iter().flat_map(|(_, ids)| ids.clone());
        let ids: Vec<DeviceId> = ids.collect();
        let devices = self.by_node.entry(reserved.node.clone()).or_default();
        devices.extend(ids.iter().map(|id| (id.clone(), gang.clone())));
        self.by_slot.insert(slot, (reserved.node.clone(), ids));
    }

    /// Refuses a placement with a device that two reservations would have.
    pub(super) fn overlap(&self, placement: &Placement) -> Option<Refusal> {
        let mut seen = BTreeSet::new();
        placement.places.iter().chain(&placement.spares).find_map(|place| {
            place.devices.iter().flat_map(|(_, ids)| ids).find_map(|id| {
                let by = self.holder(&place.node, id).cloned();
                let overlaps = !seen.insert((&place.node, id)) || by.is_some();
                overlaps.then(|| Refusal::Overtaken { device: id.clone(), node: place.node.clone(), by })
            })
        })
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_node.is_empty() && self.by_slot.is_empty()
    }
}
