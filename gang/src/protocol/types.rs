//! What goes into the state machine of gangs and what comes out of it.

use std::sync::Arc;

use gantry_api::{Decision, DeviceId, NodeName, PodUid, ResourceName};

use crate::claim::Claim;
use crate::key::GangKey;
use crate::terms::Terms;

/// Devices by resource, by their IDs.
pub type Devices = Vec<(ResourceName, Vec<DeviceId>)>;

/// Number of a shape: members that ask for the same devices and have the same needs are of one shape. The caller numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShapeId(pub u32);

/// A pod that says it belongs to a gang, as the watch shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: Arc<str>,
    /// What it says.
    pub claim: Arc<Claim>,
    /// What it asks for; `None` if it asks for no devices. Such a member counts as soon as it exists and needs no place from us.
    pub shape: Option<ShapeId>,
    /// `spec.priority`.
    pub priority: i32,
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// How far it is.
    pub stage: Stage,
    /// It is being deleted.
    pub leaving: bool,
}

/// How far a pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// kube-scheduler must not look at it yet.
    Gated {
        /// No gate but ours.
        by_us_alone: bool,
    },
    /// It waits to be scheduled.
    Pending,
    /// It is bound to a node and has not ended.
    Bound(NodeName),
    /// It has ended well.
    Succeeded,
    /// It has failed.
    Failed,
}

/// A place for one member, as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// For members of this shape.
    pub shape: ShapeId,
    /// The node.
    pub node: NodeName,
    /// Its devices there.
    pub devices: Devices,
    /// The rank it was laid for, if members have ranks.
    pub rank: Option<u32>,
    /// The role it was laid for.
    pub role: Arc<str>,
}

/// What the planner is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The gang.
    pub gang: Arc<GangKey>,
    /// Its terms.
    pub terms: Arc<Terms>,
    /// Members without a place, by rank, then creation, then UID.
    pub members: Vec<WantedMember>,
    /// So many of them must get one, or none does.
    pub must: u32,
    /// Where other members of the gang are: new ones belong into the same domain.
    pub placed: Vec<(NodeName, Option<u32>)>,
    /// Nodes that kube-scheduler did not offer when they were planned.
    pub without: Vec<NodeName>,
    /// The highest priority of its members, by which it may preempt.
    pub priority: i32,
}

/// A member that wants a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedMember {
    /// Its UID.
    pub uid: PodUid,
    /// Its shape.
    pub shape: ShapeId,
    /// Its rank.
    pub rank: Option<u32>,
    /// Its role.
    pub role: Arc<str>,
}

/// Where all of a gang goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// The places: at least as many as must be.
    pub places: Vec<Place>,
    /// The smallest domain that holds them, for people: `rack r7`, `3 racks of zone a`, `cluster`.
    pub domain: Arc<str>,
    /// Pods that have to go before the devices are free.
    pub victims: Vec<PodUid>,
}

/// Why a gang gets no place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// In a few stable words, for the pods' conditions: no counters that move by themselves.
    pub reason: Arc<str>,
    /// At length, for the Gang: what was tried at each level and what is missing.
    pub message: Arc<str>,
    /// It would not fit on the cluster if nothing else were there.
    pub hopeless: bool,
}

/// What filter answers for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It belongs to no gang: it is a pod like any other.
    Single,
    /// This node and no other.
    Node(NodeName),
    /// No node now, and why. The text stays the same while the reason does.
    Wait(Arc<str>),
}

/// What becomes of a member that comes to be bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// It belongs to no gang.
    Single,
    /// The gang is decided: bind it with the devices of its place.
    Go(Placed),
    /// It waits with the others: ask again when the gang's standing changes, until the caller's own time limit.
    Wait,
    /// Not there, or not now.
    Refuse(Arc<str>),
}

/// A place that a member has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The gang.
    pub gang: Arc<GangKey>,
    /// The node.
    pub node: NodeName,
    /// Its devices.
    pub devices: Devices,
}

/// What the caller has to do. Each is said once; what was not done is said again after a restart, because it is still true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Write the decision into the gang's object, then say how that ended. Nothing is bound before.
    Commit {
        /// The gang.
        gang: Arc<GangKey>,
        /// What to write.
        decision: Decision,
    },
    /// Make kube-scheduler try these pods again.
    Wake(Vec<PodUid>),
    /// Remove our scheduling gate from these pods.
    Ungate(Vec<PodUid>),
    /// Evict these pods, as budgets allow, for the sake of a gang.
    Evict {
        /// The pods.
        pods: Vec<PodUid>,
        /// For whom.
        by: Arc<GangKey>,
    },
    /// Delete these pods: their gang is started anew as a whole.
    Delete {
        /// The pods.
        pods: Vec<PodUid>,
        /// Why, for their Event.
        why: Arc<str>,
    },
    /// The gang is over: its object may go.
    Forget(Arc<GangKey>),
}
