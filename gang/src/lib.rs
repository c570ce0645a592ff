//! Gangs as values: which pods belong together, what they need, in which order they are planned, and their state machine.
//! Pure: no I/O, no async, no clock (time is an argument), no unsafe. The extender gives it events and carries out its commands.
//!
//! ```text
//! pod, owner ──integrations──> Membership, OwnerFacts ──terms──> Terms (minimum, level, policies)
//! pod ──needs──> Needs          node ──resources──> NodeFacts, Resources     node labels ──fabric──> Fabric
//! Terms, members, slots ──protocol──> what filter and bind answer, what is to be written
//! ```
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a doc comment says what the name does not")]

pub mod fabric;
pub mod integrations;
pub mod key;
pub mod membership;
pub mod needs;
pub mod protocol;
pub mod quorum;
pub mod resources;
pub mod terms;

pub use fabric::{DomainIdentity, DomainIx, Fabric, Level, Levels, Scope};
pub use key::{GangKey, Integration};
pub use membership::{
    ArrivalTime, Disruption, GangOptions, JobRef, Membership, OwnerFacts, OwnerKind, OwnerRef, Size,
    SubGroups, TopologyHint,
};
pub use needs::{Misfit, Needs};
pub use resources::{InsufficientResource, NodeFacts, Resources, Taint, TaintEffect};
pub use terms::{Ceilings, Fault, Rails, Repair, Terms, TopologyRequest};

/// Numbers with their nouns and verbs, as people read them.
pub mod counted {
    /// `1 member`, `2 members`.
    pub fn members(count: u32) -> String {
        match count {
            1 => "1 member".to_owned(),
            _ => format!("{count} members"),
        }
    }

    /// `is` of one, `are` of several.
    pub fn are(count: u32) -> &'static str {
        if count == 1 { "is" } else { "are" }
    }

    /// `exists` of one, `exist` of several.
    pub(crate) fn exist(count: u32) -> &'static str {
        if count == 1 { "exists" } else { "exist" }
    }
}
