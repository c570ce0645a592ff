//! Event sets: what each set listens to, how far it has read, and the wait that blocks until something it listens to happens.
//! An event reaches every set that listens, in every process, once.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{Library, Session, held};
use crate::control::{Event, EventKind, GpuState, State};

/// The event sets of a session.
#[derive(Default)]
pub(crate) struct Events(Mutex<Sets>);

#[derive(Default)]
struct Sets {
    made: u64,
    sets: BTreeMap<u64, Set>,
}

#[derive(Default)]
struct Set {
    filters: Vec<Filter>,
    /// The first event not yet looked at.
    next: u64,
}

/// What a set listens to on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Filter {
    /// Index of the GPU.
    pub(crate) gpu: u8,
    /// NVML's mask of event types.
    pub(crate) types: u64,
    /// Events before this number happened before the set listened.
    pub(crate) since: u64,
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waited {
    /// Something happened.
    Event(Event),
    /// Nothing happened in time.
    TimedOut,
    /// No such set, or it was freed meanwhile.
    NoSuchSet,
    /// A GPU that the set listens to has fallen off the bus.
    GpuLost,
    /// The driver has gone.
    DriverGone,
    /// The library was shut down.
    ShutDown,
}

impl Events {
    /// Makes a set; returns its number, which is never 0 and never used again.
    pub(crate) fn create(&self, state: &State) -> u64 {
        let mut sets = held(&self.0);
        sets.made += 1;
        let number = sets.made;
        sets.sets.insert(number, Set { filters: Vec::new(), next: state.next_event });
        number
    }

    /// Ends a set; `false` if there is none of this number.
    pub(crate) fn free(&self, set: u64) -> bool {
        held(&self.0).sets.remove(&set).is_some()
    }

    /// Makes a set listen to more; `false` if there is none of this number.
    pub(crate) fn listen(&self, set: u64, filter: Filter) -> bool {
        let mut sets = held(&self.0);
        let Some(set) = sets.sets.get_mut(&set) else {
            return false;
        };
        set.filters.push(filter);
        true
    }

    /// The set's next event, if one is there; else why there can be none, if so.
    fn next(&self, set: u64, state: &State) -> Option<Waited> {
        let mut sets = held(&self.0);
        let Some(set) = sets.sets.get_mut(&set) else {
            return Some(Waited::NoSuchSet);
        };
        let heard = |event: &&Event| set.filters.iter().any(|filter| filter.hears(event));
        let fresh = state.events.iter().filter(|event| event.number >= set.next);
        if let Some(event) = fresh.clone().find(heard) {
            set.next = event.number + 1;
            return Some(Waited::Event(*event));
        }
        set.next = set.next.max(state.next_event);
        let lost = |filter: &Filter| state.gpus.get(&filter.gpu).is_some_and(GpuState::unreachable);
        set.filters.iter().any(lost).then_some(Waited::GpuLost)
    }
}

impl Filter {
    fn hears(&self, event: &Event) -> bool {
        self.gpu == event.gpu && event.number >= self.since && self.types & event.kind.nvml_type() != 0
    }
}

impl EventKind {
    /// NVML's bit for this kind.
    pub(crate) fn nvml_type(self) -> u64 {
        use nvml_wrapper_sys::bindings as sys;
        u64::from(match self {
            Self::SingleBitEcc => sys::nvmlEventTypeSingleBitEccError,
            Self::DoubleBitEcc => sys::nvmlEventTypeDoubleBitEccError,
            Self::PState => sys::nvmlEventTypePState,
            Self::Xid => sys::nvmlEventTypeXidCriticalError,
            Self::Clock => sys::nvmlEventTypeClock,
            Self::MigConfig => sys::nvmlEventMigConfigChange,
        })
    }
}

impl Library {
    /// Blocks until the set receives an event, for `timeout` at most.
    pub(crate) fn wait(&self, session: &Session, set: u64, timeout: Duration) -> Waited {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            // Read before looking, so that a change between the look and the sleep ends the sleep at once.
            let seen = self.block.changes();
            let state = self.state();
            if session.closed() {
                return Waited::ShutDown;
            }
            if session.cut_off(&state) {
                return Waited::DriverGone;
            }
            if let Some(outcome) = session.events.next(set, &state) {
                return outcome;
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Waited::TimedOut;
            }
            self.block.wait_for_change(seen, left);
        }
    }
}
