//! How large a decision is once it is written into the gang's object: etcd takes no larger one than 1.5 MiB. Counted before a place is
//! kept, for what cannot be written down is never bound.

use std::io;
use std::sync::Arc;

use gantry_api::DecidedReservation;

use super::gang::Gang;
use super::slots::Slot;
use super::types::Refusal;

/// Bytes that the slots of a decision may have. etcd takes 1,572,864 in one request (`--max-request-bytes`); the rest is for what else the
/// object says, and for members that come in place of others and have longer names.
pub(super) const MOST: usize = 1_400_000;

/// Counts what is written.
struct Scale(usize);

impl io::Write for Scale {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.saturating_add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of a slot in a list, as it is written. What cannot be written takes all there is.
fn bytes(slot: &DecidedReservation) -> usize {
    let mut scale = Scale(1);
    match serde_json::to_writer(&mut scale, slot) {
        Ok(()) => scale.0,
        Err(_) => MOST,
    }
}

impl Gang {
    /// Bytes of a slot in the decision.
    pub(super) fn bytes_of(&self, slot: &Slot) -> usize {
        bytes(&self.decided_slot(slot))
    }

    /// Bytes of all slots in the decision.
    pub(super) fn bytes(&self) -> usize {
        self.slots.iter().map(|(_, slot)| self.bytes_of(slot)).sum()
    }

    /// Why so many members as it needs have no place: `members` of them take `bytes`.
    pub(super) fn too_large(&self, members: usize, bytes: usize) -> Refusal {
        // Rounded, so that it stays the same wherever it is planned.
        let each = bytes.checked_div(members).unwrap_or(bytes).div_ceil(10).max(1) * 10;
        let most = MOST / each;
        let reason = format!(
            "its decision cannot be written: {} members take about {each} bytes each, and {MOST} bytes, {most} such members, are the most there may be",
            self.min().max(1)
        );
        let message = format!(
            "{reason}: every place is written into the Gang with its devices before the first member is bound, and etcd takes no object above 1.5 MiB; make it several gangs of {most} members or fewer, or give each pod more devices"
        );
        Refusal {
            reason: Arc::from(reason),
            message: Arc::from(message),
            hopeless: true,
        }
    }
}
