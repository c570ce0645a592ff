//! The life of gangs: members come, the whole gets a place, members arrive at a barrier, the decision is written, all are bound, losses are
//! repaired. A state machine: facts and time in, answers and work out. It neither plans nor touches devices: places are given to it.
//!
//! ```text
//! Pending -> Queued -> Reserved (-> Preempting before) -> Committing -> Binding -> Bound -> Finished
//!      ^          ^          |  not in time, a node lost                    |         |
//!      |          +- Backoff-+                                              +> Degraded (a member lost)
//!      +------- too few members left, before the decision                        | restart: all are deleted, a new life
//! ```
//!
//! What always holds, whatever is called in whatever order:
//! 1. A slot has one member at most, a member one slot at most; no device is in two slots.
//! 2. `Arrival::Go` is answered only once the decision is known to be written ([`Gangs::committed`] or the object shows it), and it is
//!    written only when as many members are ready as the minimum says, of every role. Ready is who has come to its place since it was
//!    planned, also if it could not wait there until the last came.
//! 3. Slots end with their gang, or with their time limit: before the decision that of the plan; after it, those that the minimum does not
//!    need with `arrival`, those of lost members with [`Settings::hold`]. A decided place of a living member that the minimum needs has no
//!    limit: there is only forward.
//! 4. What is decided is never taken back, except by the gang's end or a restart. A write of which nobody knows is made again until somebody
//!    does.
//! 5. Members of a life before a restart never count together with those after it, but for those that have ended well and whose pods are still
//!    there: they have done their part. Members of a run that is done never count with those of the next.
//! 6. Equal calls give equal answers, work and statuses. Texts change only when what they say does.
//! 7. A parked pod's answer is a look into maps; an event costs no walk over other gangs.

mod agreed;
mod barrier;
mod beyond;
mod books;
mod bulk;
mod coming;
mod commit;
mod facts;
mod gang;
mod gangs;
mod gated;
mod lower;
mod members;
mod objects;
mod order;
mod owners;
mod parked;
mod phase;
mod placing;
mod recovery;
mod repair;
mod rerun;
mod slots;
mod standing;
mod status;
mod stuck;
#[cfg(test)]
mod tests;
mod types;
mod unasked;
mod view;
mod waking;
mod wanted;
mod words;
mod written;

pub use gangs::Gangs;
pub use status::BLOCKED;
pub use stuck::DeadlockedGang;
pub use types::{
    Answer, Arrival, Asks, Assignment, BindEnd, Blocker, CommitFailure, Devices, Member, MemberRequest, Now,
    Object, Placement, PlanRequest, Refusal, Reservation, Settings, ShapeId, Sibling, SlotChange,
    SlotReservation, Stage, WatchedOwner, Work,
};
pub use unasked::WaitReason;
pub use view::{MemberView, SlotView, View};
