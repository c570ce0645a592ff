//! Counts what happened: kinds of events of the schedule, events of the gang state machine, and transitions between phases of gangs.
//! A schedule in which nothing happens finds nothing, so `unreached` lists what never happened.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use gantry_api::GangPhase;
use gantry_gang::protocol::{self, GangEvent};

/// An enum of what is counted, and the list of its kinds in the order in which they are printed.
macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident $all:ident: $($kind:ident),* $(,)?) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name {
            $($kind),*
        }

        const $all: &[$name] = &[$($name::$kind),*];
    };
}

kinds! {
    /// Something that happened.
    Played PLAYED:
    ExtenderKilled,
    ExtenderPaused,
    TookOver,
    LostLead,
    SchedulerKilled,
    RequestLost,
    AnswerLost,
    RequestLate,
    Stall,
    WatchBroken,
    GangTouched,
    PodDeleted,
    PodForced,
    JobDeleted,
    JobEndedEarly,
    OwnerRestarts,
    OwnerSlow,
    VolumeMissing,
    Continued,
    NodeLost,
    GpuSick,
    PodMade,
    PodGated,
    GateLifted,
    DeedRefused,
    Decided,
    DecisionWritten,
    DecisionRefused,
    SingleBound,
    MemberBound,
    BindingRefused,
    BindingTooLate,
    CallTimedOut,
    Restarted,
    GangPreempts,
    Evicted,
    EvictedInGang,
    GaveWay,
    PodPreempts,
    PreemptRefused,
    Preempted,
    PreemptedInGang,
    NominatedBound,
    Admitted,
    Rejected,
    OtherDevices,
    JobDone,
    RivalBound,
    RivalBoundInGang,
    Brought,
    MixedGang,
    SurplusEvicted,
    DeviceHidden,
    InventoryGone,
    WatchBehind,
    Restored,
    Orphaned,
    TreeDecided,
    PlacementTried,
}

macro_rules! machine_events {
    ($($kind:ident),* $(,)?) => {
        kinds! {
            /// The kind of a [`GangEvent`].
            MachineEvent MACHINE_EVENTS: $($kind),*
        }

        impl From<&GangEvent<'_>> for MachineEvent {
            fn from(event: &GangEvent<'_>) -> Self {
                match event {
                    $(GangEvent::$kind { .. } => Self::$kind),*
                }
            }
        }
    };
}

machine_events! {
    Synced,
    Tick,
    MemberSeen,
    MemberGone,
    OwnerSeen,
    ObjectSeen,
    ObjectGone,
    Planned,
    Filter,
    Arrive,
    BarrierTimeout,
    Disconnected,
    Committed,
    BindEnded,
    NodeLost,
    SlotsLost,
    CapacityShrunk,
    VictimGone,
    VictimTerminating,
    SlotHeld,
    ReleaseSurplus,
    ReleaseOrphaned,
    YieldTo,
    Blocked,
    MembersSlow,
    SchedulerMessage,
}

/// Transitions between phases that must be reached, in addition to those that were seen.
const TRANSITIONS: &[(GangPhase, GangPhase)] = {
    use GangPhase::*;
    &[
        (Pending, Queued),
        (Pending, Preempting),
        (Pending, Reserved),
        (Pending, Finished),
        (Queued, Pending),
        (Queued, Preempting),
        (Queued, Reserved),
        (Queued, Finished),
        (Preempting, Queued),
        (Preempting, Reserved),
        (Reserved, Pending),
        (Reserved, Queued),
        (Reserved, Backoff),
        (Reserved, Binding),
        (Backoff, Reserved),
        (Binding, Queued),
        (Binding, Bound),
        (Bound, Pending),
        (Bound, Degraded),
        (Bound, Finished),
        (Degraded, Pending),
        (Degraded, Queued),
        (Degraded, Bound),
        (Degraded, Finished),
    ]
};

/// So many schedules from seed 0 reach all but what is [`RARE`].
pub(crate) const COMMON_WITHIN: u64 = 60;
/// So many reach everything.
pub(crate) const ALL_WITHIN: u64 = 10_000;
/// What takes more schedules than [`COMMON_WITHIN`].
const RARE: &[&str] = &[
    "BindingRefused",
    "BindingTooLate",
    "CallTimedOut",
    "DecisionRefused",
    "DeedRefused",
    "Evicted",
    "GaveWay",
    "NominatedBound",
    "Orphaned",
    "OwnerSlow",
    "Preempted",
    "Restarted",
    "Restored",
    "SurplusEvicted",
    "VolumeMissing",
    "GangEvent::CapacityShrunk",
    "GangEvent::ReleaseOrphaned",
    "GangEvent::ReleaseSurplus",
    "GangEvent::SlotHeld",
    "GangEvent::YieldTo",
    "Pending -> Preempting",
    "Queued -> Preempting",
    "Backoff -> Reserved",
    "Preempting -> Queued",
    "Reserved -> Pending",
    "Reserved -> Queued",
    "Reserved -> Backoff",
    "Binding -> Queued",
    "Bound -> Pending",
    "Degraded -> Queued",
    "Degraded -> Bound",
];
/// What needs something that is not simulated (README.md): permissions that are missing, and clocks of GPUs.
const NEVER: &[&str] = &["GangEvent::Blocked", "GangEvent::MembersSlow"];

thread_local! {
    static HANDLED: Cell<[u64; MACHINE_EVENTS.len()]> = const { Cell::new([0; MACHINE_EVENTS.len()]) };
}

/// From here on the events of the state machines of this thread are counted, from zero.
pub(crate) fn count_machine_events() {
    HANDLED.set([0; MACHINE_EVENTS.len()]);
    protocol::observe(|event| {
        let mut handled = HANDLED.get();
        handled[MachineEvent::from(event) as usize] += 1;
        HANDLED.set(handled);
    });
}

/// How often each happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coverage {
    played: [u64; PLAYED.len()],
    handled: [u64; MACHINE_EVENTS.len()],
    transitions: BTreeMap<(GangPhase, GangPhase), u64>,
}

impl Default for Coverage {
    fn default() -> Self {
        Self { played: [0; PLAYED.len()], handled: [0; MACHINE_EVENTS.len()], transitions: BTreeMap::new() }
    }
}

impl Coverage {
    pub(crate) fn add(&mut self, played: Played) {
        self.played[played as usize] += 1;
    }

    /// A gang has another phase than in its last status.
    pub(crate) fn add_transition(&mut self, from: GangPhase, to: GangPhase) {
        *self.transitions.entry((from, to)).or_default() += 1;
    }

    /// The events that were counted in this thread.
    pub(crate) fn add_machine_events(&mut self) {
        for (all, more) in self.handled.iter_mut().zip(HANDLED.get()) {
            *all += more;
        }
    }

    /// A gang was to yield to another, and none did.
    pub(crate) fn has_deadlock_unresolved(&self) -> bool {
        self.handled[MachineEvent::YieldTo as usize] > 0 && self.played[Played::GaveWay as usize] == 0
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        for (all, more) in self.played.iter_mut().zip(&other.played) {
            *all += more;
        }
        for (all, more) in self.handled.iter_mut().zip(&other.handled) {
            *all += more;
        }
        for (transition, count) in &other.transitions {
            *self.transitions.entry(*transition).or_default() += count;
        }
    }

    /// Everything that is counted, with its name.
    fn counts(&self) -> impl Iterator<Item = (String, u64)> {
        let played = PLAYED.iter().map(|played| (format!("{played:?}"), self.played[*played as usize]));
        let handled = MACHINE_EVENTS.iter();
        let handled = handled.map(|event| (format!("GangEvent::{event:?}"), self.handled[*event as usize]));
        let mut transitions: BTreeMap<_, _> = TRANSITIONS.iter().map(|transition| (*transition, 0)).collect();
        transitions.extend(&self.transitions);
        let transitions =
            transitions.into_iter().map(|((from, to), count)| (format!("{from:?} -> {to:?}"), count));
        played.chain(handled).chain(transitions)
    }

    /// What so many schedules should have reached and have not, and what they have though it is not simulated.
    pub(crate) fn unreached(&self, schedules: u64) -> Vec<String> {
        let names: Vec<String> = self.counts().map(|(name, _)| name).collect();
        for name in RARE.iter().chain(NEVER) {
            assert!(names.iter().any(|known| known == name), "nothing of the name {name} is counted");
        }
        let is_due = |name: &str| {
            let within = if RARE.contains(&name) { ALL_WITHIN } else { COMMON_WITHIN };
            schedules >= within
        };
        let wrong = self.counts().filter(|(name, count)| match NEVER.contains(&name.as_str()) {
            true => *count > 0,
            false => *count == 0 && is_due(name),
        });
        wrong.map(|(name, _)| name).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in self.counts() {
            writeln!(f, "{count:>12} {name}")?;
        }
        Ok(())
    }
}
