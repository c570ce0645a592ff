//! The state machine of gangs, as the index drives it: events in, commands out.

use std::sync::Arc;

use gantry_api::GangStatus;
use gantry_gang::GangKey;
use gantry_gang::protocol::{
    Effects, GangEvent, Gangs, Moment, PlanRequest, Reply, Settings, SlotChange, Work,
};

/// The state machine, with the results of events that are not carried out yet.
#[derive(Debug)]
pub(super) struct Machine {
    gangs: Gangs,
    effects: Effects,
    settings: Settings,
    /// Whether this process decides. A standby replica gets all events too, but keeps no reservations and publishes nothing.
    leading: bool,
}

impl Machine {
    pub(super) fn new(settings: Settings) -> Self {
        Self { gangs: Gangs::new(settings.clone()), effects: Effects::default(), settings, leading: true }
    }

    /// The gangs.
    pub(super) fn gangs(&self) -> &Gangs {
        &self.gangs
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether this process decides.
    pub(super) fn is_leading(&self) -> bool {
        self.leading
    }

    /// Sets whether this process decides. False if that is known.
    pub(super) fn set_leading(&mut self, leading: bool) -> bool {
        std::mem::replace(&mut self.leading, leading) != leading
    }

    /// Handles an event.
    pub(super) fn handle(&mut self, now: Moment, event: GangEvent<'_>) -> Reply {
        let effects = self.gangs.handle(now, event);
        self.effects.extend(effects)
    }

    /// Handles an event if this process decides.
    pub(super) fn observe(&mut self, now: Moment, event: GangEvent<'_>) {
        if self.leading {
            self.handle(now, event);
        }
    }

    /// The gang to be planned next; `growth` shows whether refused ones are worth another plan.
    pub(super) fn next(&mut self, now: Moment, growth: u64) -> Option<PlanRequest> {
        self.gangs.next(now, growth)
    }

    /// Forgets all gangs, but not what was counted.
    pub(super) fn restart(&mut self) {
        let (counts, _) = self.gangs.continuations();
        self.gangs = Gangs::new(self.settings.clone()).counting_from(counts);
        self.effects = Effects::default();
    }

    pub(super) fn take_slot_changes(&mut self) -> Vec<SlotChange> {
        std::mem::take(&mut self.effects.slot_changes)
    }

    pub(super) fn take_work(&mut self) -> Vec<Work> {
        std::mem::take(&mut self.effects.work)
    }

    /// The statuses that changed.
    pub(super) fn take_statuses(&mut self) -> Vec<(Arc<GangKey>, GangStatus)> {
        self.gangs.take_statuses()
    }
}
