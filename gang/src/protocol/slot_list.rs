//! The slots of a gang as its decision lists them, and the bytes that this takes.

use gantry_api::{DecidedReservation, ReservedDevices};

use super::members::Members;
use super::slots::{Holder, Slot, Slots};

/// Bytes that the slots of a decision may have. etcd takes 1,572,864 in one request (`--max-request-bytes`); the rest is for what else the
/// object holds, and for replacements with longer names.
pub(super) const MAX_DECISION_BYTES: usize = 1_400_000;

/// The slots of a gang, to be written.
#[derive(Clone, Copy)]
pub(super) struct SlotList<'a> {
    pub(super) slots: &'a Slots,
    pub(super) members: &'a Members,
    /// The members are placed by slices.
    pub(super) sliced: bool,
}

impl SlotList<'_> {
    /// All of them.
    pub(super) fn reservations(&self) -> Vec<DecidedReservation> {
        self.slots.iter().map(|(_, slot)| self.reservation(slot)).collect()
    }

    /// One slot.
    pub(super) fn reservation(&self, slot: &Slot) -> DecidedReservation {
        let pod = match slot.holder() {
            Holder::Kept | Holder::Spare | Holder::Leaving(_) => None,
            Holder::Assigned(uid) | Holder::Bound(uid) => Some(uid.clone()),
        };
        let member = pod.as_ref().and_then(|uid| self.members.get(uid));
        DecidedReservation {
            node: slot.node().clone(),
            devices: slot
                .devices()
                .iter()
                .map(|(resource, ids)| {
                    let mut ids = ids.clone();
                    ids.sort_unstable();
                    ReservedDevices { resource: resource.clone(), ids }
                })
                .collect(),
            rank: slot.rank(),
            role: slot.role().to_string(),
            // Where slices are counted by it and the rank is another number.
            ordinal: slot.ordinal().filter(|ordinal| self.sliced && slot.rank() != Some(*ordinal)),
            spare: slot.is_spare(),
            pod_name: member.map(|member| member.pod().name.to_string()).unwrap_or_default(),
            pod,
        }
    }

    /// Bytes of all slots. Counted before a slot is kept: without a written slot a member is never bound.
    pub(super) fn bytes(&self) -> usize {
        self.slots.iter().map(|(_, slot)| self.bytes_of(slot)).sum()
    }

    /// Bytes of one slot in the list. One that cannot be written takes all there is.
    pub(super) fn bytes_of(&self, slot: &Slot) -> usize {
        let mut counter = Counter(1);
        match serde_json::to_writer(&mut counter, &self.reservation(slot)) {
            Ok(()) => counter.0,
            Err(_) => MAX_DECISION_BYTES,
        }
    }
}

/// Counts what is written.
struct Counter(usize);

impl std::io::Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.saturating_add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
