//! What others may see of a gang: for `gantry explain`, metrics and the planner of preemption. Reads only.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{GangPhase, NodeName, PodUid};

use super::gang::{Gang, State};
use super::members::{Class, Count};
use super::slots::{Holder, Slot};
use super::types::{Blocker, Devices, PlanRequest, Refusal, ShapeId, Stage};
use crate::key::GangKey;
use crate::terms::Terms;

/// A gang, to look at.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub(super) gang: &'a Gang,
    pub(super) now: Instant,
}

/// A member, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView<'a> {
    /// Its UID.
    pub uid: &'a PodUid,
    /// Its name.
    pub name: &'a str,
    /// Its rank.
    pub rank: Option<u32>,
    /// Its role.
    pub role: &'a str,
    /// `spec.priority`.
    pub priority: i32,
    /// How far it is, as the watch shows it.
    pub stage: &'a Stage,
    /// It stands at the barrier.
    pub arrived: bool,
    /// It is being deleted, or is gone.
    pub leaving: bool,
    /// The node it is or will be on.
    pub node: Option<&'a NodeName>,
}

/// A place of a gang, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotView<'a> {
    /// Its number.
    pub slot: u32,
    /// The node.
    pub node: &'a NodeName,
    /// Its devices there.
    pub devices: &'a Devices,
    /// The member that has it; `None` while it is kept for one to come.
    pub pod: Option<&'a PodUid>,
    /// Its pod is seen to be bound, and holds the devices itself.
    pub bound: bool,
    /// What the member that it is for asks for; `None` if that is not known.
    pub shape: Option<ShapeId>,
}

impl<'a> View<'a> {
    /// Its name.
    pub fn key(&self) -> &'a Arc<GangKey> {
        &self.gang.key
    }

    /// How far it is.
    pub fn phase(&self) -> GangPhase {
        self.gang.phase(self.now)
    }

    /// What its parked pods are told.
    pub fn text(&self) -> &'a Arc<str> {
        &self.gang.text
    }

    /// Its terms, if they are known and valid.
    pub fn terms(&self) -> Option<&'a Arc<Terms>> {
        self.gang.terms()
    }

    /// Members that are useful only together; 0 while that is not known.
    pub fn min(&self) -> u32 {
        self.gang.min()
    }

    /// The highest priority of its members.
    pub fn priority(&self) -> i32 {
        self.gang.members.priority()
    }

    /// Whether others may be stopped for it: all its members that are there allow that, with and without devices.
    pub fn may_preempt(&self) -> bool {
        let mut members = self.gang.members.iter();
        members.all(|kept| kept.member.preempts || !kept.lives())
    }

    /// Since when it waits, in seconds since 1970.
    pub fn waiting_since(&self) -> i64 {
        self.gang.waiting_since
    }

    /// When its minimum was bound, in seconds since 1970.
    pub fn bound_at(&self) -> Option<i64> {
        self.gang.bound_at
    }

    /// Tries that have failed.
    pub fn failed_attempts(&self) -> u32 {
        self.gang.tries.failed_attempts
    }

    /// Why it had no place when it was last planned.
    pub fn refused(&self) -> Option<&'a Refusal> {
        self.gang.tries.refused.as_ref()
    }

    /// Whether a node where a member is planned was not offered for it, and is passed over or about to be.
    pub fn has_missed_nodes(&self) -> bool {
        !self.gang.tries.misses.is_empty() || !self.gang.tries.without.is_empty()
    }

    /// The node of the place that a member has.
    pub fn node_of(&self, pod: &PodUid) -> Option<&'a NodeName> {
        self.gang.slot_of(pod).map(|(_, slot)| &slot.node)
    }

    /// What a member asks for; `None` if that is no devices, or it is none of its members.
    pub fn shape_of(&self, pod: &PodUid) -> Option<ShapeId> {
        self.gang.members.get(pod).and_then(|kept| kept.member.shape)
    }

    /// Whether something may not be done to its pods.
    pub fn is_hindered(&self, what: Blocker) -> bool {
        self.gang.hindered.contains_key(&what)
    }

    /// The part of the fabric it was given; empty if it has no place.
    pub fn domain(&self) -> &'a Arc<str> {
        &self.gang.domain
    }

    /// Members that exist, or have ended well.
    pub fn exist(&self) -> u32 {
        self.gang.members.count().exist()
    }

    /// Members that are as good as bound: bound, ended well, or in need of no devices.
    pub fn settled(&self) -> u32 {
        self.gang.members.count().settled()
    }

    /// Members that nobody has to wait for at the barrier.
    pub fn ready(&self) -> u32 {
        self.gang.members.count().ready()
    }

    /// A number that grows whenever one of its places, or who has it, changes.
    pub fn places_version(&self) -> u64 {
        self.gang.slots.version()
    }

    /// Members that exist and have no place.
    pub fn unplaced(&self) -> usize {
        self.gang.members.unplaced().len()
    }

    /// It is decided: it is only ever completed.
    pub fn is_decided(&self) -> bool {
        matches!(self.gang.state, State::Decided(_))
    }

    /// Bindings of some of its members may be on their way, and are not seen yet: who is where shows in a moment.
    pub fn is_being_bound(&self) -> bool {
        let mut members = self.gang.members.iter();
        members.any(|kept| kept.lives() && kept.pinned() && !matches!(kept.member.stage, Stage::Bound(_)))
    }

    /// ID of the decision that stands or is being written.
    pub fn decision_id(&self) -> Option<&'a str> {
        self.gang.decision_id()
    }

    /// It has all that it needs, and members beyond that: so many could go without breaking it.
    pub fn beyond_min(&self) -> u32 {
        let count = self.gang.members.count();
        if self.gang.enough(Count::settled) {
            count.settled().saturating_sub(self.gang.min())
        } else {
            0
        }
    }

    /// Members that have ended well.
    pub fn completed(&self) -> u32 {
        self.gang.members.count().of(Class::Completed)
    }

    /// Pods that have to go for it.
    pub fn victims(&self) -> impl Iterator<Item = &'a PodUid> + use<'a> {
        let victims = match &self.gang.state {
            State::Planned(planned) => Some(planned.victims.keys()),
            _ => None,
        };
        victims.into_iter().flatten()
    }

    /// It is decided, and a member of its minimum has no place.
    pub fn is_short(&self) -> bool {
        self.gang.is_short()
    }

    /// Its members are on their way out, and it begins anew when the last is gone.
    pub fn is_leaving(&self) -> bool {
        matches!(self.gang.state, State::Restarting { .. })
    }

    /// Whether a pod is of its life before, and has to be gone before the next one begins.
    pub fn has_to_go(&self, uid: &PodUid) -> bool {
        let life = self.gang.members.life();
        matches!(self.gang.state, State::Restarting { .. })
            && self
                .gang
                .members
                .get(uid)
                .is_some_and(|kept| kept.class(life) == Class::Old && kept.lives())
    }

    /// Its members, by UID.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'a>> + use<'a> {
        let gang = self.gang;
        gang.members.iter().map(move |kept| {
            let slot = kept.slot.and_then(|id| gang.slots.get(id));
            let node = match &kept.member.stage {
                Stage::Bound(node) => Some(node),
                _ => slot.map(|slot| &slot.node),
            };
            MemberView {
                uid: &kept.member.uid,
                name: &kept.member.name,
                rank: kept.member.membership.rank,
                role: &kept.member.membership.role,
                priority: kept.member.priority,
                stage: &kept.member.stage,
                arrived: kept.arrived,
                leaving: kept.member.leaving || kept.gone,
                node,
            }
        })
    }

    /// Places that it can do without, and that nobody has come to for good: what is given back first where others need it more
    /// ([`super::Gangs::release_extras`]), in that order; each with the slice it is of, if any, which goes as a whole.
    pub fn spares(&self) -> impl Iterator<Item = (Option<u32>, SlotView<'a>)> + use<'a> {
        let gang = self.gang;
        let spares = gang.spares().into_iter();
        spares.filter_map(move |id| Some((gang.slice_of(id), slot_view(id, gang.slots.get(id)?))))
    }

    /// Places kept for members that it has lost, while no replacement is there: whoever is of higher priority may have them
    /// ([`super::Gangs::give_up_idle`]).
    pub fn idle(&self) -> impl Iterator<Item = SlotView<'a>> + use<'a> {
        let gang = self.gang;
        let idle = gang.idle_places().iter();
        idle.filter_map(move |id| Some(slot_view(*id, gang.slots.get(*id)?)))
    }

    /// Members of its minimum that have no place.
    pub fn lacks(&self) -> u32 {
        self.gang.missing(Count::placed)
    }

    /// What is wanted for it, so that it is whole then: not less than it lacks of its minimum.
    pub fn to_be_whole(&self, wanted: PlanRequest) -> PlanRequest {
        self.gang.to_be_whole(wanted)
    }

    /// Its slots, by number.
    pub fn slots(&self) -> impl Iterator<Item = SlotView<'a>> + use<'a> {
        self.gang.slots.iter().map(|(id, slot)| slot_view(id, slot))
    }
}

fn slot_view(id: u32, slot: &Slot) -> SlotView<'_> {
    SlotView {
        slot: id,
        node: &slot.node,
        devices: &slot.devices,
        pod: slot.holder.pod(),
        bound: matches!(slot.holder, Holder::Bound(_)),
        shape: slot.shape,
    }
}
