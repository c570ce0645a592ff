//! What may happen to gangs, and what comes of it: the alphabet of the state machine, of its random schedules and of the model.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};

use super::reasons::Refusal;
use super::types::{
    Answer, Arrival, BindEnd, Blocker, CommitFailure, Member, Object, Placement, SlotChange, Work,
};
use crate::key::GangKey;
use crate::membership::{OwnerFacts, OwnerRef};

/// An event. Those about pods and gangs that are not tracked change nothing.
#[derive(Debug, Clone)]
pub enum GangEvent<'a> {
    /// Every list was complete once: from here on decisions may be made, and decisions of the process before are taken over.
    Synced,
    /// Time has passed. Due at [`super::Gangs::next_due`], and may come at any time.
    Tick,
    /// A pod that declares to belong to a gang, as it is now.
    MemberSeen(Member),
    /// A pod is gone.
    MemberGone { pod: &'a PodUid },
    /// An owner, as it is now; without `facts`: it does not exist, or may not be read.
    OwnerSeen {
        owner: &'a OwnerRef,
        /// What it declares.
        facts: Option<Arc<OwnerFacts>>,
    },
    /// A `Gang` object, as it is now.
    ObjectSeen { namespace: &'a str, name: &'a str, object: Box<Object> },
    /// A `Gang` object is gone.
    ObjectGone { namespace: &'a str, name: &'a str },
    /// The planner has answered the request for a gang ([`super::Gangs::next`]). The answer for a gang that has changed since is dropped.
    Planned {
        gang: &'a GangKey,
        /// Where it goes, or why nowhere.
        result: Result<Placement, Refusal>,
    },
    /// Filter is called for a pod. Replies with an [`Answer`].
    Filter {
        pod: &'a PodUid,
        /// The nodes that kube-scheduler offers.
        offered: OfferedNodes<'a>,
    },
    /// Bind is called for a pod. Replies with an [`Arrival`]. While that is [`Arrival::Wait`] the event is repeated whenever the gang has
    /// changed.
    Arrive { pod: &'a PodUid, node: &'a NodeName },
    /// A member has waited at the barrier as long as a bind call may take, and the call has failed. It counts as arrived all the same.
    BarrierTimeout {
        /// The member.
        pod: &'a PodUid,
    },
    /// The bind call of a member was disconnected before [`Arrival::Go`].
    Disconnected {
        /// The member.
        pod: &'a PodUid,
    },
    /// The write of a decision has ended.
    Committed {
        gang: &'a GangKey,
        /// The ID of the decision.
        decision: &'a str,
        /// How it ended.
        result: Result<(), CommitFailure>,
    },
    /// The binding of a member has ended.
    BindEnded {
        /// The member.
        pod: &'a PodUid,
        /// How it ended.
        outcome: BindEnd,
    },
    /// A node is lost: slots there that are not bound are of no use.
    NodeLost { node: &'a NodeName },
    /// The devices of some slots are lost, and other slots on their nodes are not.
    SlotsLost { gang: &'a GangKey, slots: &'a BTreeSet<u32> },
    /// The nodes of some slots have less capacity than before, apart from devices: members that do not stand at the barrier have to arrive
    /// again.
    CapacityShrunk { gang: &'a GangKey, slots: &'a BTreeSet<u32> },
    /// A victim ([`Work::Evict`]) is gone, and its devices are free. May be reported of any pod.
    VictimGone { pod: &'a PodUid },
    /// A victim is terminating. May be reported of any pod.
    VictimTerminating {
        pod: &'a PodUid,
        /// By when it is to be gone, in seconds since 1970.
        by: i64,
    },
    /// Pods that were lent the devices of a spare slot hold them, now that a member has it; none: they are gone.
    SlotHeld {
        gang: &'a GangKey,
        slot: u32,
        pods: &'a BTreeSet<PodUid>,
        /// When the last of them is to be gone, in seconds since 1970, if all of them are terminating.
        ends: Option<i64>,
    },
    /// Other gangs need surplus slots more ([`super::View::surplus`]). Replies how many were released.
    ReleaseSurplus { gang: &'a GangKey, slots: &'a BTreeSet<u32> },
    /// A gang of higher priority needs orphaned slots ([`super::View::orphaned`]). Replies how many were released.
    ReleaseOrphaned {
        gang: &'a GangKey,
        slots: &'a BTreeSet<u32>,
        /// The gang or pod that gets the devices, for messages.
        to: &'a Arc<str>,
    },
    /// A gang in a deadlock goes as a whole, so that another can be whole.
    YieldTo {
        /// The gang that goes.
        gang: &'a GangKey,
        /// The other.
        to: &'a GangKey,
    },
    /// Something keeps an action from the pods of a gang; without `why`: it was done after all.
    Blocked {
        gang: &'a GangKey,
        /// What is kept from them.
        blocker: Blocker,
        /// Why, and what would help.
        why: Option<Arc<str>>,
    },
    /// Members with GPUs that run slower than those of the rest, as a text for people; `None`: no member is slow.
    MembersSlow { gang: &'a GangKey, members: Option<Arc<str>> },
    /// kube-scheduler reports why it does not offer nodes for a member. The text is the same while the reasons are.
    SchedulerMessage {
        /// The member.
        pod: &'a PodUid,
        /// The report.
        message: &'a Arc<str>,
    },
}

/// Which nodes kube-scheduler offers.
#[derive(Clone, Copy)]
pub struct OfferedNodes<'a>(pub &'a dyn Fn(&NodeName) -> bool);

impl fmt::Debug for OfferedNodes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Offered")
    }
}

/// What comes of an event. Everything has to be carried out, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effects {
    /// The reply to the event.
    pub reply: Reply,
    /// What is reserved from now on, or no longer, in the order in which it happened.
    pub slot_changes: Vec<SlotChange>,
    /// What is to be done. Each is requested once.
    pub work: Vec<Work>,
}

/// The reply to an event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reply {
    #[default]
    None,
    /// To [`GangEvent::Filter`].
    Answer(Answer),
    /// To [`GangEvent::Arrive`].
    Arrival(Arrival),
    /// How many slots were released.
    Released(u32),
}

impl Effects {
    /// Adds what comes of another event; its reply is returned.
    pub fn extend(&mut self, more: Self) -> Reply {
        self.slot_changes.extend(more.slot_changes);
        self.work.extend(more.work);
        more.reply
    }
}
