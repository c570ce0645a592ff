//! Gangs as values: who belongs together, what they need, where they may go, in which order, and how they get there. Pure: no I/O,
//! no async, no clock (time is an argument), no unsafe. The extender feeds it and does what it says.
//!
//! ```text
//! pod, owner ──dialect──> Claim, OwnerFacts ──terms──> Terms (minimum, level, policies)
//! pod ──needs──> Needs          node ──room──> NodeFacts, Resources          node labels ──fabric──> Fabric
//! Terms, members, slots ──protocol──> what filter and bind answer, what is to be written
//! waiting gangs ──queue──> who is next
//! ```
#![forbid(unsafe_code)]

pub mod claim;
pub mod counted;
pub mod dialect;
pub mod fabric;
pub mod key;
pub mod needs;
pub mod protocol;
pub mod queue;
pub mod room;
pub mod terms;

pub use claim::{Claim, Hint, Maker, OwnerFacts, OwnerKind, OwnerRef, Size, SubGroups, Wish};
pub use fabric::{DomainIx, Fabric, KnownBy, Level, Levels, Scope};
pub use key::{Dialect, GangKey};
pub use needs::{Misfit, Needs};
pub use room::{Lack, NodeFacts, Resources, Taint, TaintEffect};
pub use terms::{Fault, LevelWish, Repair, Terms};
