//! What goes into the state machine of gangs and what comes out of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::placement::ComparedFabric;
use gantry_api::{Decision, DeviceId, GangSpec, GangStatus, NodeName, PodUid, ResourceName};

use super::reasons::WaitReason;
use crate::fabric::Levels;
use crate::integrations::value::MOST_MEMBERS;
use crate::key::GangKey;
use crate::membership::{Membership, OwnerRef};
use crate::terms::{Ceilings, Fault, Repair, Terms};

/// Devices by resource, by their IDs.
pub type Devices = Vec<(ResourceName, Vec<DeviceId>)>;

/// How many devices of each resource, sorted by resource.
pub type Asks = Arc<[(ResourceName, u32)]>;

/// Number of a shape: members that ask for the same devices and have the same needs are of one shape. The caller numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShapeId(pub u32);

/// A pod that declares that it belongs to a gang, as the watch shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub uid: PodUid,
    pub name: Arc<str>,
    /// What it declares.
    pub membership: Arc<Membership>,
    /// What it asks for; `None` if it asks for no devices. Such a member counts as soon as it exists and needs no place from us.
    pub shape: Option<ShapeId>,
    /// How many devices a place for it has. By this a place decided before a restart is known as one for it.
    pub asks: Asks,
    /// Its devices, once it is bound with a grant; empty before, and where that is not known.
    pub holds: Devices,
    /// `spec.priority`.
    pub priority: i32,
    /// Whether others may be stopped for it: its `preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// How far it is.
    pub stage: Stage,
    /// It is being deleted.
    pub leaving: bool,
    /// kube-scheduler preempts it for another pod, which gets its devices.
    pub preempted: bool,
    /// kube-scheduler has tried it in vain: it may be parked there.
    pub refused: bool,
    /// kube-scheduler rejects it on every node before it calls the extender, for instance because of a claim that does not exist: the
    /// reason it gives.
    pub rejected: Option<Arc<str>>,
    /// What places it, if that is no scheduler that calls the extender: another scheduler's name, or a field of its spec. Such a pod does
    /// not count as a member.
    pub elsewhere: Option<Arc<str>>,
}

/// How far a pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// kube-scheduler must not look at it yet.
    Gated {
        /// The first gate that Gantry does not remove; `None` if there is none.
        by: Option<Arc<str>>,
    },
    /// It waits to be scheduled.
    Pending,
    /// It is bound to a node and has not ended.
    Bound(NodeName),
    /// It has ended well.
    Succeeded,
    Failed,
}

/// A place for one member, as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// For members of this shape.
    pub shape: ShapeId,
    pub node: NodeName,
    pub devices: Devices,
    /// The rank it was laid for, if members have ranks.
    pub rank: Option<u32>,
    /// The role it was laid for.
    pub role: Arc<str>,
    /// Its position among all places of the gang, in the order of ranks: slices are counted by it, for ranks may have gaps and be had
    /// twice.
    pub ordinal: Option<u32>,
    /// kube-scheduler lets its member in only once siblings are bound that it must be near to: the barrier does not wait for it.
    pub follows: bool,
}

/// What the planner is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRequest {
    pub gang: Arc<GangKey>,
    pub terms: Arc<Terms>,
    /// Members without a place, by rank, then creation, then UID.
    pub members: Vec<MemberRequest>,
    /// So many of them must get one, or none does.
    pub must: u32,
    /// The gang is decided and lacks them: all of it idles meanwhile, so they go before gangs that wait.
    pub completes: bool,
    /// Where other members of the gang are: new ones belong into the same domain.
    pub placed: Vec<Sibling>,
    /// Spare reservations that are to be planned beside the members; their UIDs are empty.
    pub spares: Vec<MemberRequest>,
    /// Nodes that kube-scheduler did not offer when they were planned.
    pub without: Vec<NodeName>,
    /// The highest priority of its members that take devices, by which it may preempt.
    pub priority: i32,
    /// The process before had others stopped for it: what those leave is for it ([`Placement::leaving`]).
    pub resumes: bool,
    /// The same of other groups of a tree of groups: the first that fits is placed. They have none themselves.
    pub others: Vec<PlanRequest>,
}

impl PlanRequest {
    /// Of this request and [`Self::others`] the one that a placement is for.
    #[must_use]
    pub fn into_choice(mut self, placement: &Placement) -> Self {
        let placed: BTreeSet<&str> = placement.places.iter().map(|place| &*place.role).collect();
        let is_for = |request: &Self| {
            let roles: BTreeSet<&str> = request.members.iter().map(|member| &*member.role).collect();
            placed.is_subset(&roles) && placement.places.len() >= request.must as usize
        };
        let others = std::mem::take(&mut self.others);
        if is_for(&self) { self } else { others.into_iter().find(is_for).unwrap_or(self) }
    }
}

/// A member of the gang that has a place, or a place that is kept for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sibling {
    /// Where it is.
    pub node: NodeName,
    /// Its shape, as far as that is known.
    pub shape: Option<ShapeId>,
    pub rank: Option<u32>,
    /// The ordinal of its place, as far as that is known ([`Reservation::ordinal`]).
    pub ordinal: Option<u32>,
    /// Its devices, as far as they are known and matter for the rails of new members.
    pub devices: Devices,
}

/// A member that wants a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberRequest {
    pub uid: PodUid,
    pub shape: ShapeId,
    pub rank: Option<u32>,
    pub role: Arc<str>,
}

/// Where all of a gang goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// The places: at least as many as must be.
    pub places: Vec<Reservation>,
    /// The spare places that were found: as many as were asked for, or fewer.
    pub spares: Vec<Reservation>,
    /// The smallest domain that holds them, for people: `rack r7`, `3 racks of zone a`, `cluster`.
    pub domain: Arc<str>,
    /// The rails that it uses, for people: `NICs 0-3 on all 4 nodes`; empty if none were chosen.
    pub rails: Arc<str>,
    /// Why there: the domains that were compared, if any were.
    pub compared: Option<Arc<ComparedFabric>>,
    /// Pods that have to go before the devices are free.
    pub victims: Vec<PodUid>,
    /// Other pods that leave it their devices once they are gone: they are on their way out already, and are to be gone by then, in seconds since
    /// 1970.
    pub leaving: BTreeMap<PodUid, i64>,
}

impl Placement {
    /// Whether any pod has to be gone before the devices are free.
    #[must_use]
    pub fn waits(&self) -> bool {
        !self.victims.is_empty() || !self.leaving.is_empty()
    }
}

/// What filter answers for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It belongs to no gang: it is a pod like any other.
    Single,
    /// This node and no other.
    Node(NodeName),
    /// No node now, and why.
    Wait(WaitReason),
}

/// What becomes of a member that comes to be bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// It belongs to no gang.
    Single,
    /// The gang is decided: bind it with the devices of its place.
    Go(Assignment),
    /// It waits with the others: ask again when the gang's state changes, until the caller's own time limit.
    Wait,
    /// Not there, or not now.
    Refuse(WaitReason),
}

/// A place that a member has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    pub gang: Arc<GangKey>,
    pub node: NodeName,
    pub devices: Devices,
}

/// What may not be done to pods for a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Blocker {
    /// Their scheduling gates may not be removed.
    Gates,
    /// They may not be evicted or deleted.
    Removal,
    /// A disruption budget does not let them be evicted now.
    Budget,
}

/// An object that states how large a gang is, and that is to be followed as long as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchedOwner {
    /// Which object.
    pub owner: OwnerRef,
    /// Nothing is known of it: what was reported before it was wanted this time does not count.
    pub unread: bool,
}

/// What the caller has to do. Each is issued once; what was not done is issued again after a restart, because it is still due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Write the decision into the gang's object, then report the result. Nothing is bound before.
    Commit {
        gang: Arc<GangKey>,
        /// What to write.
        decision: Decision,
    },
    /// Make kube-scheduler try these pods again.
    Activate(Vec<PodUid>),
    /// Bind these members of a gang that is decided, as if kube-scheduler had brought them to the nodes of their places: it had, and they
    /// left before the last of their siblings came.
    Bind(Vec<PodUid>),
    /// Remove our scheduling gate from these pods.
    Ungate(Vec<PodUid>),
    /// Evict these pods, as budgets allow, for the sake of a gang.
    Evict {
        pods: Vec<PodUid>,
        /// The gang that preempts.
        by: Arc<GangKey>,
    },
    /// Evict these pods: their gang goes as a whole for another, and without the rest of it they are no use.
    EvictRest {
        pods: Vec<PodUid>,
        of: Arc<GangKey>,
        /// the gang that it is preempted by, where both were stuck; else another that needed some of them.
        to: Option<Arc<GangKey>>,
    },
    /// Delete these pods: their gang is restarted as a whole.
    Delete {
        pods: Vec<PodUid>,
        /// Why, for their Event.
        why: Arc<str>,
    },
    /// The gang is over: its object may go.
    DeleteObject {
        /// Of the object.
        namespace: Arc<str>,
        /// Of the object.
        name: Arc<str>,
    },
}

/// A moment, on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// By a clock that only goes forward: time limits are held against it.
    pub at: Instant,
    /// In seconds since 1970: for what people read.
    pub unix: i64,
}

/// How patient the state machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// What distinguishes this process from every other that may decide: part of every decision's ID.
    pub identity: Arc<str>,
    /// Whether our scheduling gate is removed at all; where it is not, it keeps pods back like that of anybody else.
    pub gates: bool,
    /// How long members may take to arrive where the gang's terms do not state it.
    pub arrival: Duration,
    /// How long the slots of a gang are kept while its owner creates all members again, where its terms do not state it. Zero: never.
    pub restart_hold: Duration,
    /// The most that a gang may ask of others.
    pub ceilings: Ceilings,
    /// What to do when a member is lost where the terms do not state it.
    pub repair: Repair,
    /// The levels of the fabric that terms may name.
    pub levels: Levels,
    /// How long a gang with enough members waits for the rest, since the last one appeared, before it is planned with fewer.
    pub settle: Duration,
    /// How much longer a place is kept when a member's bind was given up, so that its next try finds it.
    pub grace: Duration,
    /// How long those that must go for a gang may take until they begin to, and how much longer than by their own word until they are gone.
    pub evict: Duration,
    /// How long they are waited for at most once all of them are on their way out, whatever time they state themselves.
    pub ending: Duration,
    /// How long a lost member's place is kept for its replacement, and how long a gang may be short until it gives way or another does.
    pub hold: Duration,
    /// After the first failed try; each further one waits twice as long.
    pub backoff: Duration,
    /// The longest wait between tries.
    pub backoff_max: Duration,
    /// After so long a member that was woken and did not come is woken once more; then after twice as long.
    pub requeue: Duration,
    /// After so many times that a planned node was not offered it is given up.
    pub misses: u32,
    /// How long kube-scheduler may take until a PodGroup cycle has called filter with the nodes of every placement. In that time a node that
    /// is not offered to a native group counts once.
    pub cycle: Duration,
    /// After so many plans given up for that reason the gang has to wait.
    pub replans: u32,
    /// How long a gang without members is remembered, so that recreated pods find it.
    pub linger: Duration,
    /// Gangs that are planned at most, in addition to those that are decided already.
    pub max_gangs: usize,
    /// The same of one namespace: what it leaves is for others.
    pub max_gangs_of_namespace: usize,
    /// Members of one gang kept at most.
    pub max_members: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            identity: "gantry".into(),
            gates: true,
            arrival: Duration::from_secs(60),
            restart_hold: Duration::from_secs(120),
            ceilings: Ceilings::default(),
            repair: Repair::default(),
            levels: Levels::default(),
            settle: Duration::from_secs(1),
            grace: Duration::from_secs(15),
            evict: Duration::from_secs(120),
            ending: Duration::from_secs(3600),
            hold: Duration::from_secs(600),
            backoff: Duration::from_secs(2),
            backoff_max: Duration::from_secs(120),
            requeue: Duration::from_secs(10),
            misses: 3,
            cycle: Duration::from_secs(5),
            replans: 3,
            linger: Duration::from_secs(10),
            max_gangs: 10_000,
            max_gangs_of_namespace: 2_500,
            max_members: usize::try_from(MOST_MEMBERS).unwrap_or(usize::MAX),
        }
    }
}

/// A `Gang` object, as the watch shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    pub uid: Arc<str>,
    pub resource_version: Arc<str>,
    /// The extender has created it, and its spec is empty: it may be deleted with its gang.
    pub ours: bool,
    /// What a person has set.
    pub spec: Result<GangSpec, Fault>,
    /// What became of the gang, and the decision.
    pub status: GangStatus,
}

/// Why a decision was not written, as far as that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommitFailure {
    /// It may not be written, or cannot be as it is: nothing was done. In the API server's words.
    Refused(Arc<str>),
    /// Another client has written the object meanwhile; our write was refused. Read it and report what it shows
    /// ([`super::GangEvent::ObjectSeen`]).
    Conflict,
    /// The outcome is not known. Read the object and report what it shows.
    Unknown,
}

/// How the binding of a member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindEnd {
    /// The Binding exists.
    Bound,
    /// It does not, and will not: the member comes again.
    Failed,
    /// None was sent: its bind call waits for its devices, or has failed, and kube-scheduler brings the member again by itself.
    NotSent,
    /// The outcome is not known: the pod will show it.
    Unsure,
    /// The pod is gone.
    Gone,
}

/// What a slot keeps from others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotReservation {
    pub node: NodeName,
    /// The shape of the member it is for; `None` while that is not known, after a restart.
    pub shape: Option<ShapeId>,
    pub devices: Devices,
    /// The member it is for, if one has it.
    pub pod: Option<PodUid>,
    /// It was planned as a spare one: its devices are lent while no member has it.
    pub spare: bool,
}

/// A slot that is reserved from now on, or no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotChange {
    pub gang: Arc<GangKey>,
    /// The slot; never used again for another place.
    pub slot: u32,
    /// What it keeps; `None`: nothing any more. The slot of a bound pod keeps nothing, because the pod does.
    pub place: Option<SlotReservation>,
    /// It keeps nothing because its pod is seen to be bound: that has what it kept, and others have no more room than before.
    pub bound: bool,
}
