//! Gangs as values: which pods belong together, what they need, where they may go, in which order, and how they get there. Pure: no I/O,
//! no async, no clock (time is an argument), no unsafe. The extender feeds it and does what it says.
//!
//! ```text
//! pod, owner ──integrations──> Membership, OwnerFacts ──terms──> Terms (minimum, level, policies)
//! pod ──needs──> Needs          node ──resources──> NodeFacts, Resources     node labels ──fabric──> Fabric
//! Terms, members, slots ──protocol──> what filter and bind answer, what is to be written
//! waiting gangs ──queue──> the next gang
//! ```
#![forbid(unsafe_code)]

pub mod counted;
pub mod fabric;
pub mod integrations;
pub mod key;
pub mod membership;
pub mod needs;
pub mod protocol;
pub mod queue;
pub mod resources;
pub mod terms;

pub use fabric::{DomainIx, Fabric, KnownBy, Level, Levels, Scope};
pub use key::{GangKey, Integration};
pub use membership::{
    GangOptions, JobRef, Membership, OwnerFacts, OwnerKind, OwnerRef, Size, SubGroups, TopologyHint,
};
pub use needs::{Misfit, Needs};
pub use resources::{InsufficientResource, NodeFacts, Resources, Taint, TaintEffect};
pub use terms::{Fault, Repair, Terms, TopologyRequest};
