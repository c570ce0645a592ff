//! The state machine of gangs: members appear, the whole gang gets a reservation, members meet at a barrier, the decision is written, all are
//! bound, losses are repaired. Facts and time come in as [`GangEvent`]s, and [`Effects`] go out. It neither plans nor touches devices:
//! the planner and the extender do.
//!
//! ```text
//! Pending -> Queued -> Reserved (-> Preempting before) -> Committing -> Binding -> Bound -> Finished
//!    ^         ^          |  members late, a node lost                     |         |
//!    |         +- Backoff-+                                                +> Degraded (a member lost)
//!    +------ too few members left, before the decision                         | restart: all are deleted, a new incarnation
//! ```
//!
//! What always holds, in whatever order events come:
//! 1. A slot has one member at most, a member one slot at most; no device is in two slots.
//! 2. The reply [`Arrival::Go`] is given only once the decision is known to be written ([`GangEvent::Committed`], or the object shows it).
//!    It is written only when as many members are ready as the minimum requires, of every role. A member is ready once it has arrived at
//!    the node of its slot, also if its call timed out before the last sibling arrived.
//! 3. Slots end with their gang, or with their time limit: before the decision that of the reservation; after it, `arrival` for slots that
//!    the minimum does not need, and [`Settings::hold`] for slots of lost members. A decided slot of a living member that the minimum
//!    needs has no limit.
//! 4. A decision is never taken back, except by the end of the gang or a restart. A write of unknown outcome is repeated until the outcome
//!    is known.
//! 5. Members of different incarnations never count together, except for members that have ended well before a restart and whose pods still
//!    exist: they have done their part.
//! 6. Equal events give equal effects and statuses. Messages change only when what they state does.
//! 7. Filter for a pod that waits costs a look into maps; an event about one gang costs no walk over other gangs.

mod agreement;
mod attempts;
mod barrier;
mod blockers;
mod decision;
mod event;
mod gang;
mod gangs;
mod idle_time;
mod members;
mod objects;
#[cfg(feature = "observer")]
mod observer;
mod owners;
mod plan_queue;
mod reasons;
mod report;
mod roster;
mod slot_list;
mod slots;
#[cfg(test)]
mod tests;
mod types;

use std::time::{Duration, Instant};

pub use event::{Effects, GangEvent, OfferedNodes, Reply};
pub use gang::{BLOCKED, Continuations, GROUP_SCHEDULED, MEMBERS_SLOW, MemberView, SlotView, View};
pub use gangs::{DeadlockedGang, Gangs};
#[cfg(feature = "observer")]
pub use observer::observe;
pub use reasons::{
    DeviceShortage, Holder, IdleReservations, LargestNode, MemberGroup, MemberRule, Obstacle, Obstacles,
    RailShortage, ReasonScope, Refusal, Shortage, SkewFailure, SkewLimit, WaitReason, WithheldNodes,
    WithheldReason,
};
pub use types::{
    Answer, Arrival, Asks, Assignment, BindEnd, Blocker, CommitFailure, Devices, Member, MemberRequest,
    Moment, Object, Placement, PlanRequest, Reservation, Settings, ShapeId, Sibling, SlotChange,
    SlotReservation, Stage, WatchedOwner, Work,
};

/// The environment of a gang: what it reads, and where it puts what is to be done.
struct Env<'a> {
    now: Moment,
    settings: &'a Settings,
    synced: bool,
    devices: &'a slots::ReservedDevices,
    /// Decisions made so far by this process.
    decisions: &'a mut u64,
    work: &'a mut Vec<Work>,
    continuations: &'a mut Continuations,
}

/// So long after a moment. More than a year is no time limit.
fn after(at: Instant, time: Duration) -> Instant {
    let year = Duration::from_secs(366 * 24 * 3600);
    at.checked_add(time.min(year)).unwrap_or(at)
}
