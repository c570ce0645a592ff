//! The slots of one gang: the places it was given, and who has each. A slot has one holder at most, by its type.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, NodeName, PodUid, ResourceName};

use super::types::{Asks, Devices, Member, Reservation, ShapeId, SlotReservation};

/// A place of the gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) node: NodeName,
    pub(super) devices: Devices,
    /// `None` after a restart, until a member has it.
    pub(super) shape: Option<ShapeId>,
    /// Of which its member has come to be since it was bound: what was found for it there, like a volume, is part of what it needs by now.
    pub(super) came_to: Option<ShapeId>,
    pub(super) rank: Option<u32>,
    pub(super) role: Arc<str>,
    /// See [`Reservation::ordinal`]; whoever has the slot has it.
    pub(super) ordinal: Option<u32>,
    /// See [`Reservation::follows`].
    pub(super) follows: bool,
    pub(super) holder: Holder,
    /// Since when the holder is what it is.
    pub(super) since: Instant,
    /// Its node was lost while the decision was being written.
    pub(super) stale: bool,
}

/// Who has a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Holder {
    /// Nobody: it is kept for a member to come.
    Kept,
    /// A member that is not bound yet.
    Assigned(PodUid),
    /// A member that is seen to be bound: its pod holds the devices.
    Bound(PodUid),
    /// A bound member that is lost and whose pod is still there.
    Leaving(PodUid),
}

impl Holder {
    pub(super) fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Kept => None,
            Self::Assigned(uid) | Self::Bound(uid) | Self::Leaving(uid) => Some(uid),
        }
    }
}

impl Slot {
    pub(super) fn new(place: &Reservation, now: Instant) -> Self {
        Self {
            node: place.node.clone(),
            devices: place.devices.clone(),
            shape: Some(place.shape),
            came_to: None,
            rank: place.rank,
            role: place.role.clone(),
            ordinal: place.ordinal,
            follows: place.follows,
            holder: Holder::Kept,
            since: now,
            stale: false,
        }
    }

    /// Whether its devices are what a member asks for.
    pub(super) fn suits(&self, member: &Member) -> bool {
        match (self.shape, member.shape) {
            (_, None) => false,
            // Whoever comes in place of another takes over what was found for that one, or has it found anew.
            (Some(own), Some(asked)) => own == asked || self.came_to == Some(asked),
            (None, Some(_)) => {
                same_amounts(&self.devices, &member.asks) && self.role == member.membership.role
            }
        }
    }

    /// Whether it is kept for such a member: a place of a rank is for a member of that rank.
    pub(super) fn awaits(&self, member: &Member) -> bool {
        let rank = match (self.rank, member.membership.rank) {
            (Some(own), Some(asked)) => own == asked,
            _ => true,
        };
        self.holder == Holder::Kept && rank && self.role == member.membership.role && self.suits(member)
    }

    pub(super) fn device_count(&self) -> u64 {
        let all = self.devices.iter().map(|(_, ids)| ids.len());
        all.fold(0, |sum, count| sum.saturating_add(count as u64))
    }

    /// Whether these, in whatever order, are its devices. Nothing is never the same as a place.
    pub(super) fn has_just(&self, devices: &Devices) -> bool {
        !devices.is_empty() && (self.devices == *devices || sorted(&self.devices) == sorted(devices))
    }

    fn reserved(&self) -> Option<SlotReservation> {
        let pod = match &self.holder {
            Holder::Bound(_) => return None,
            Holder::Assigned(uid) => Some(uid.clone()),
            Holder::Kept | Holder::Leaving(_) => None,
        };
        Some(SlotReservation {
            node: self.node.clone(),
            shape: self.shape,
            devices: self.devices.clone(),
            pod,
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
    let mut amounts: Vec<_> = devices
        .iter()
        .map(|(resource, ids)| (resource, ids.len()))
        .collect();
    amounts.sort_unstable();
    let mut asked: Vec<_> = asks
        .iter()
        .map(|(resource, count)| (resource, *count as usize))
        .collect();
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
    /// Slots that a bound pod had and that are nobody's since: its devices may be another's.
    doubtful: BTreeSet<u32>,
    devices: u64,
    /// Slots that changed since they were last told of.
    touched: BTreeSet<u32>,
    /// What was told: the slots that are reserved, as which shape and for whom.
    told: BTreeMap<u32, (Option<ShapeId>, Option<PodUid>)>,
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

    /// Slots whose member is lost: kept, or not given up by its pod yet.
    pub(super) fn lost(&self) -> impl Iterator<Item = u32> {
        self.kept.iter().chain(&self.leaving).copied()
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
        self.doubtful.remove(&id);
        self.touch(id);
        Some(slot)
    }

    pub(super) fn set_holder(&mut self, id: u32, holder: &Holder, now: Instant) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        if slot.holder == *holder {
            return;
        }
        let was_bound = matches!(slot.holder, Holder::Bound(_));
        slot.holder = holder.clone();
        slot.since = now;
        if was_bound && matches!(holder, Holder::Kept | Holder::Leaving(_)) {
            self.doubtful.insert(id);
        }
        self.index(id, holder);
        self.touch(id);
    }

    /// A slot's member is bound and has other devices than it was to get. Pods that do not say what they have change nothing.
    pub(super) fn set_devices(&mut self, id: u32, devices: &Devices) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        if devices.is_empty() || slot.has_just(devices) {
            return;
        }
        self.devices = self.devices.saturating_sub(slot.device_count());
        slot.devices.clone_from(devices);
        self.devices = self.devices.saturating_add(slot.device_count());
        self.touch(id);
    }

    /// Makes a slot that of a member's rank and shape.
    pub(super) fn fit(&mut self, id: u32, member: &Member) {
        let Some(slot) = self.all.get_mut(&id) else { return };
        slot.shape = member.shape;
        slot.came_to = None;
        if member.membership.rank.is_some() {
            slot.rank = member.membership.rank;
        }
        slot.role = member.membership.role.clone();
        self.touch(id);
    }

    /// A slot's member is bound, and is of this shape by now.
    pub(super) fn note_shape(&mut self, id: u32, shape: Option<ShapeId>) {
        if let Some(slot) = self.all.get_mut(&id) {
            slot.came_to = shape.filter(|_| shape != slot.shape);
        }
    }

    /// A slot's devices may be another's.
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
        match holder {
            Holder::Kept => self.kept.insert(id),
            Holder::Leaving(_) => self.leaving.insert(id),
            Holder::Assigned(_) | Holder::Bound(_) => true,
        };
    }

    fn touch(&mut self, id: u32) {
        self.touched.insert(id);
        self.version += 1;
    }

    /// What is reserved now and was not, or the other way round.
    pub(super) fn take_changes(&mut self) -> Vec<(u32, Option<SlotReservation>)> {
        let mut changes = Vec::new();
        for id in std::mem::take(&mut self.touched) {
            let reserved = self.all.get(&id).and_then(Slot::reserved);
            let told = self.told.get(&id);
            let tell = reserved.as_ref().map(|place| (place.shape, place.pod.clone()));
            if told == tell.as_ref() {
                continue;
            }
            match tell {
                Some(tell) => self.told.insert(id, tell),
                None => self.told.remove(&id),
            };
            changes.push((id, reserved));
        }
        changes
    }
}
