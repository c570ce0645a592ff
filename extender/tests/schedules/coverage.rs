//! What was played, counted: a schedule in which nothing happens finds nothing.

use std::fmt;

/// The list of what is counted, once: as kinds, and in the order in which they are printed.
macro_rules! played {
    ($($kind:ident),* $(,)?) => {
        /// Something that happened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Played {
            $($kind),*
        }

        const ALL: &[Played] = &[$(Played::$kind),*];
    };
}

played! {
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
}

/// How often each happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coverage([u64; ALL.len()]);

impl Default for Coverage {
    fn default() -> Self {
        Self([0; ALL.len()])
    }
}

impl Coverage {
    pub(crate) fn add(&mut self, played: Played) {
        self.0[played as usize] += 1;
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        for (all, more) in self.0.iter_mut().zip(&other.0) {
            *all += more;
        }
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for played in ALL {
            writeln!(f, "{:>12} {played:?}", self.0[*played as usize])?;
        }
        Ok(())
    }
}
