//! The phase that people see of a gang: it follows from its state and its members. Reads only.

use std::time::Instant;

use gantry_api::GangPhase;

use super::gang::{Decided, Gang, State};
use super::members::{Class, Count};

impl Gang {
    /// What people see of it.
    pub(super) fn phase(&self, now: Instant) -> GangPhase {
        let count = self.members.count();
        match &self.state {
            State::Over { .. } => GangPhase::Finished,
            State::Restarting { .. } => GangPhase::Degraded,
            State::Planned(planned) if !planned.victims.is_empty() => GangPhase::Preempting,
            State::Planned(_) => GangPhase::Reserved,
            State::Committing(_) => GangPhase::Committing,
            State::Decided(decided) => self.phase_decided(decided),
            State::Open if self.is_invalid() => GangPhase::Invalid,
            State::Open if count.alive() == 0 && count.of(Class::Completed) > 0 => GangPhase::Finished,
            State::Open if self.goes_singly() => match self.enough(Count::settled) {
                true => GangPhase::Bound,
                false => GangPhase::Pending,
            },
            State::Open if self.is_bound_without_places() => GangPhase::Bound,
            // It needs no place: its members ask for no devices, and are on their way by themselves.
            State::Open if self.enough(Count::settled) && self.members.unplaced().is_empty() => {
                GangPhase::Binding
            }
            State::Open if !self.enough(Count::exist) || self.waits_for_rest(now) => GangPhase::Pending,
            State::Open if self.tries.pause.as_ref().is_some_and(|(until, _)| now < *until) => {
                GangPhase::Backoff
            }
            State::Open => GangPhase::Queued,
        }
    }

    /// It has all that it needs, and nothing of it was decided: its members ask for no devices, or were bound before anybody decided.
    pub(super) fn is_bound_without_places(&self) -> bool {
        let open = matches!(self.state, State::Open) && !self.goes_singly();
        open && self.enough(Count::began) && self.members.unplaced().is_empty()
    }

    fn phase_decided(&self, decided: &Decided) -> GangPhase {
        let count = self.members.count();
        let satisfied = self.enough(Count::settled);
        let lost = self.slots.lost().next().is_some();
        if count.alive() == 0 && !lost {
            GangPhase::Finished
        } else if satisfied || decided.was_bound && !self.is_repaired() {
            GangPhase::Bound
        } else if decided.was_bound || lost {
            GangPhase::Degraded
        } else {
            GangPhase::Binding
        }
    }
}
