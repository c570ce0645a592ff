//! The terms of a gang, put together from all its declarations, and what can be wrong with them.

mod declared;
mod resolve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GangRails, GangRepair};

use crate::membership::OwnerRef;
use crate::quorum::{Quorum, Selection};
pub use declared::PodDeclarations;
pub(crate) use declared::work;
pub use resolve::{Defaults, OwnerState, TermsResolution, resolve};

/// The terms of a gang.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// Members that are useful only together.
    pub min: u32,
    /// It is no gang: each of its pods goes by itself.
    pub singles: bool,
    /// Members at most; those beyond wait.
    pub max: u32,
    /// Members there will be, if that is known: planning waits for them a moment, but not at any price.
    pub total: Option<u32>,
    /// How many are of each role at least. Of a tree of groups: of each group that was chosen; empty until then.
    pub by_role: Vec<(Arc<str>, u32)>,
    /// Which groups of a tree are needed.
    pub quorum: Option<Arc<Quorum>>,
    /// The level of the fabric that should hold it.
    pub level: Option<TopologyRequest>,
    /// Members that come in slices of this size, each in one domain of the level.
    pub slice: Option<u32>,
    /// Whether its members take the same rails on every node.
    pub rails: Rails,
    /// Spare reservations, of each role.
    pub spares: u32,
    /// What to do when a member is lost.
    pub repair: Repair,
    pub repair_by: Authority,
    /// How long its members may take to arrive once it has a place.
    pub arrival: Duration,
    /// How long its reservations are kept while its owner creates all members again.
    pub restart_hold: Duration,
    /// It can be stopped at little loss.
    pub checkpointed: bool,
    /// What was asked for above a ceiling of the operator, and is lowered to it.
    pub lowered: Vec<Fault>,
    /// The owner, if it does not exist or may not be read, and might state that its pods are not all made at once
    /// ([`crate::OwnerKind::may_start_apart`]).
    pub unread: Option<OwnerRef>,
    /// The authority for the minimum.
    pub authority: Authority,
    /// The source of the minimum, for people: `minMember of PodGroup train (coscheduling)`.
    pub decided_by: Arc<str>,
}

impl Terms {
    /// The terms of a gang of which these groups were chosen.
    #[must_use]
    pub fn of_groups(&self, chosen: &Selection) -> Self {
        let now = |role: &str| self.quorum.as_ref().and_then(|quorum| quorum.min_of(role));
        // A group whose pods are all gone is needed as before.
        let by_role = chosen.iter().map(|(role, min)| (Arc::clone(role), now(role).unwrap_or(*min)));
        let by_role: Vec<(Arc<str>, u32)> = by_role.collect();
        let min = by_role.iter().fold(0_u32, |sum, (_, min)| sum.saturating_add(*min));
        Self { min, by_role, ..self.clone() }
    }
}

/// The most that a gang may ask of others, as the operator sets it. A larger value is lowered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ceilings {
    /// How long members may take to arrive.
    pub arrival: Duration,
    /// How long reservations are kept while the owner creates all members again.
    pub restart_hold: Duration,
    /// Spare reservations, of each role.
    pub spares: u32,
    /// The levels that a gang may require, by name; `None`: all. Another level is preferred.
    pub required_levels: Option<Vec<Arc<str>>>,
}

impl Default for Ceilings {
    fn default() -> Self {
        Self {
            arrival: Duration::from_secs(300),
            restart_hold: Duration::from_secs(600),
            spares: 8,
            required_levels: None,
        }
    }
}

/// The authority for a declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authority {
    /// Pods: a user with write access to one of them can change it.
    Pods,
    /// An object: the owner, or the Gang.
    Object,
}

/// A level of the fabric that a gang wants to be within.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopologyRequest {
    /// Name of the level, or the node label that makes it.
    pub level: Arc<str>,
    /// Rather wait than go beyond it.
    pub required: bool,
}

impl fmt::Display for TopologyRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.required { "required" } else { "preferred" };
        write!(f, "{} ({how})", self.level)
    }
}

/// Whether members take the same rails, the indices of the NICs nearest to their GPUs, on every node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rails {
    /// No rails are preferred.
    Any,
    /// The same, where they are free.
    #[default]
    Same,
    /// Rather wait than take others.
    RequireSame,
}

impl Rails {
    /// As a user writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Same => "same",
            Self::RequireSame => "same (required)",
        }
    }
}

impl From<GangRails> for Rails {
    fn from(rails: GangRails) -> Self {
        match rails {
            GangRails::Any => Self::Any,
            GangRails::Same => Self::Same,
            GangRails::RequireSame => Self::RequireSame,
        }
    }
}

/// What to do when a member of a bound gang is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Repair {
    /// Keep its place for a replacement.
    #[default]
    Hold,
    /// Delete the gang's pods, so that their controller recreates all of them.
    Restart,
    /// Give its place up.
    Ignore,
}

impl Repair {
    /// All of them, as written.
    pub const ALL: [(&'static str, Self); 3] =
        [("hold", Self::Hold), ("restart", Self::Restart), ("ignore", Self::Ignore)];

    /// As written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Restart => "restart",
            Self::Ignore => "ignore",
        }
    }
}

impl From<GangRepair> for Repair {
    fn from(repair: GangRepair) -> Self {
        match repair {
            GangRepair::Hold => Self::Hold,
            GangRepair::Restart => Self::Restart,
            GangRepair::Ignore => Self::Ignore,
        }
    }
}

/// Something that is wrong with the declarations of a gang, for its condition and its pods' messages. Stable: no times, no counters that
/// move by themselves.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
#[error("{place}: {words}")]
pub struct Fault {
    /// Where it stands: `annotation gantry.dev/gang-min`, `spec.minMember of PodGroup train`. Never the name of
    /// one pod of many, for which that is would change as pods come and go.
    pub place: Arc<str>,
    /// What is wrong, what is allowed, what was perhaps meant.
    pub words: Arc<str>,
}
