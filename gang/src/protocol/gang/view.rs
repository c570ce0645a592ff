//! What others may see of a gang: for `gantry explain`, metrics and the planner of preemption. Reads only.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::placement::ComparedFabric;
use gantry_api::{GangPhase, NodeName, PodUid, Reason};

use super::super::barrier::Barrier;
use super::super::decision::StandingDecision;
use super::super::members::{Class, Count};
use super::super::plan_queue::Turn;
use super::super::reasons::{Refusal, WaitReason};
use super::super::slots::Slot;
use super::super::types::{Blocker, Devices, PlanRequest, ShapeId, Stage};
use super::{Gang, State, planning, status};
use crate::key::GangKey;
use crate::membership::Disruption;
use crate::terms::Terms;

/// A gang, to look at.
#[derive(Clone, Copy)]
pub struct View<'a> {
    gang: &'a Gang,
    now: Instant,
}

/// A member, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView<'a> {
    pub uid: &'a PodUid,
    pub name: &'a str,
    pub rank: Option<u32>,
    pub role: &'a str,
    /// `spec.priority`.
    pub priority: i32,
    /// How far it is, as the watch shows it.
    pub stage: &'a Stage,
    /// It has arrived at its node.
    pub arrived: bool,
    /// It is being deleted, or is gone.
    pub leaving: bool,
    /// It is a victim of another gang.
    pub evicted: bool,
    /// The node it is or will be on.
    pub node: Option<&'a NodeName>,
}

/// A slot of a gang, to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotView<'a> {
    /// Its number.
    pub slot: u32,
    pub node: &'a NodeName,
    pub devices: &'a Devices,
    /// The member that has it; `None` while it is kept for one to come.
    pub pod: Option<&'a PodUid>,
    /// Its pod is seen to be bound, and holds the devices itself.
    pub bound: bool,
    /// It was planned as a spare one.
    pub spare: bool,
    /// What its member asks for; `None` if that is not known.
    pub shape: Option<ShapeId>,
}

impl<'a> View<'a> {
    pub(in super::super) fn new(gang: &'a Gang, now: Instant) -> Self {
        Self { gang, now }
    }

    pub(in super::super) fn deadlock(&self) -> Option<(PlanRequest, bool)> {
        planning::deadlock(self.gang)
    }

    pub(in super::super) fn turn(&self) -> Turn {
        self.gang.turn()
    }

    /// Its name.
    pub fn key(&self) -> &'a Arc<GangKey> {
        &self.gang.key
    }

    /// Devices that its members without a slot ask for.
    pub fn unplaced_devices(&self) -> u64 {
        self.gang.members().unplaced_devices()
    }

    /// How far it is.
    pub fn phase(&self) -> GangPhase {
        status::phase(self.gang, self.now)
    }

    /// Why its pods wait.
    pub fn waits(&self) -> &'a WaitReason {
        &self.gang.waits
    }

    /// Why it is in its phase, as its status states it.
    pub fn reason(&self) -> (Reason, String) {
        status::cause(self.gang, self.now).of_gang()
    }

    /// Its terms, if they are known and valid.
    pub fn terms(&self) -> Option<&'a Arc<Terms>> {
        self.gang.agreement.terms()
    }

    /// Members that are useful only together; 0 while that is not known.
    pub fn min(&self) -> u32 {
        self.gang.minimum().total
    }

    /// The highest priority of its members that take devices.
    pub fn priority(&self) -> i32 {
        self.gang.priority()
    }

    /// Whether it may preempt: all its members allow that, with and without devices, and so does its owner.
    pub fn may_preempt(&self) -> bool {
        if self.gang.agreement.never_preempts() {
            return false;
        }
        let mut members = self.gang.members().iter();
        members.all(|member| member.pod().preempts || !member.lives())
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
        self.gang.attempts.failed()
    }

    /// Why it had no placement when it was last planned.
    pub fn refusal(&self) -> Option<&'a Refusal> {
        self.gang.attempts.refusal()
    }

    /// Whether a planned node was not offered for a member, and is excluded or about to be.
    pub fn has_missed_nodes(&self) -> bool {
        self.gang.attempts.has_missed_nodes()
    }

    /// The node of a member's slot.
    pub fn node_of(&self, pod: &PodUid) -> Option<&'a NodeName> {
        self.gang.slot_of(pod).map(|(_, slot)| slot.node())
    }

    /// Whether the object shows the reservation that a member of a decided gang has.
    pub fn is_written(&self, pod: &PodUid) -> bool {
        let is_reserved = self.gang.decided().is_some() && self.gang.slot_of(pod).is_some();
        !is_reserved || self.gang.is_written(pod)
    }

    /// What a member asks for; `None` if it asks for no devices, or is no member.
    pub fn shape_of(&self, pod: &PodUid) -> Option<ShapeId> {
        self.gang.members().get(pod).and_then(|member| member.pod().shape)
    }

    /// Whether something keeps an action from its pods.
    pub fn is_blocked(&self, what: Blocker) -> bool {
        self.gang.blockers.why(what).is_some()
    }

    /// The part of the fabric where its slots are; empty if it has none.
    pub fn domain(&self) -> &'a Arc<str> {
        &self.gang.site.domain
    }

    /// The rails that its slots use; empty if none were chosen.
    pub fn rails(&self) -> &'a Arc<str> {
        &self.gang.site.rails
    }

    /// Why its slots are there: the domains that were compared, if any were.
    pub fn compared(&self) -> Option<&'a Arc<ComparedFabric>> {
        self.gang.site.compared.as_ref()
    }

    /// Members that exist, or have ended well; those that a scheduling gate or kube-scheduler keeps back are among them.
    pub fn exist(&self) -> u32 {
        let count = self.gang.members().count();
        count.exist() + count.withheld()
    }

    /// Members that are as good as bound: bound, ended well, or in need of no devices.
    pub fn settled(&self) -> u32 {
        self.gang.members().count().settled()
    }

    /// Members for which the barrier does not wait.
    pub fn ready(&self) -> u32 {
        self.gang.members().count().ready()
    }

    /// A number that grows whenever one of its slots, or its holder, changes.
    pub fn slots_version(&self) -> u64 {
        self.gang.slots().version()
    }

    /// Members that exist and have no slot.
    pub fn unplaced(&self) -> usize {
        self.gang.members().unplaced().len()
    }

    /// It is decided: it is only ever completed.
    pub fn is_decided(&self) -> bool {
        self.gang.decided().is_some()
    }

    /// No member of it is left, and its reservations are kept for those that its owner creates.
    pub fn is_awaiting(&self) -> bool {
        self.gang.is_awaiting()
    }

    /// Bindings of some of its members may be on their way, and the watch has not shown them yet.
    pub fn is_being_bound(&self) -> bool {
        let mut members = self.gang.members().iter();
        members.any(|member| member.lives() && member.is_pinned() && member.bound_node().is_none())
    }

    /// ID of the decision that stands or is being written.
    pub fn decision_id(&self) -> Option<&'a str> {
        self.gang.decision_id()
    }

    /// How its members may be evicted for others, where its owner states that.
    fn disruption(&self) -> Option<Disruption> {
        self.gang.agreement.disruption()
    }

    /// Whether members may be evicted while others stay: those beyond the minimum, or any where the owner allows that.
    pub fn may_lose_members(&self) -> bool {
        let in_slices = self.terms().is_none_or(|terms| terms.slice.is_some());
        match self.disruption() {
            Some(Disruption::Single) => true,
            Some(Disruption::All) => false,
            None => !in_slices,
        }
    }

    /// Bound members beyond the minimum, or all where the owner allows to evict each by itself: so many may be evicted while the others
    /// stay.
    pub fn surplus_members(&self) -> u32 {
        let count = self.gang.members().count();
        match self.disruption() {
            Some(Disruption::Single) => return count.bound(),
            Some(Disruption::All) => return 0,
            None => {}
        }
        let minimum = self.gang.minimum();
        if minimum.is_met(Count::settled) { count.settled().saturating_sub(minimum.total) } else { 0 }
    }

    /// The same of a role: members beyond its minimum, and beyond none if it has no minimum.
    pub fn surplus_of(&self, role: &str) -> u32 {
        let count = self.gang.members().count_of(role);
        if self.disruption().is_some() {
            return count.bound();
        }
        let settled = count.settled();
        settled.saturating_sub(self.gang.minimum().of_role(role))
    }

    /// Members that have ended well.
    pub fn completed(&self) -> u32 {
        self.gang.members().count().of(Class::Completed)
    }

    /// Its victims: pods that have to go for it.
    pub fn victims(&self) -> impl Iterator<Item = &'a PodUid> + use<'a> {
        let barrier = self.gang.barrier().into_iter();
        let evicted = self.gang.decided().into_iter().flat_map(StandingDecision::evicted);
        barrier.flat_map(Barrier::victims).chain(evicted)
    }

    /// It is decided, and a member of its minimum has no slot.
    pub fn is_short(&self) -> bool {
        self.gang.is_short()
    }

    /// Its members are being removed, and it restarts when the last is gone.
    pub fn is_leaving(&self) -> bool {
        matches!(self.gang.state, State::Restarting { .. })
    }

    /// Whether a pod is of the incarnation before, and has to be gone before the next one begins.
    pub fn must_leave(&self, uid: &PodUid) -> bool {
        matches!(self.gang.state, State::Restarting { .. })
            && self
                .gang
                .members()
                .get(uid)
                .is_some_and(|member| self.gang.members().class(member) == Class::Old && member.lives())
    }

    /// Its members, by UID.
    pub fn members(&self) -> impl Iterator<Item = MemberView<'a>> + use<'a> {
        let gang = self.gang;
        gang.members().iter().map(move |member| {
            let pod = member.pod();
            let slot = member.slot().and_then(|id| gang.slots().get(id));
            let node = member.bound_node().or(slot.map(Slot::node));
            MemberView {
                uid: &pod.uid,
                name: &pod.name,
                rank: pod.membership.rank,
                role: &pod.membership.role,
                priority: pod.priority,
                stage: &pod.stage,
                arrived: member.has_arrived(),
                leaving: pod.leaving || member.is_gone(),
                evicted: member.is_evicted(),
                node,
            }
        })
    }

    /// Slots that it can do without: given back where other gangs need them more ([`super::super::GangEvent::ReleaseSurplus`]), in that
    /// order; each with its slice, if any, which goes as a whole.
    pub fn surplus(&self) -> impl Iterator<Item = (Option<u32>, SlotView<'a>)> + use<'a> {
        let gang = self.gang;
        let surplus = planning::surplus(gang).into_iter();
        surplus
            .filter_map(move |id| Some((planning::slice_of(gang, id), slot_view(id, gang.slots().get(id)?))))
    }

    /// Slots kept for members that it has lost, while no replacement exists, and spare ones: a gang of higher priority may have their devices
    /// ([`super::super::GangEvent::ReleaseOrphaned`]).
    pub fn orphaned(&self) -> impl Iterator<Item = SlotView<'a>> + use<'a> {
        let gang = self.gang;
        let orphaned = gang.for_higher_priority().into_iter();
        orphaned.filter_map(move |id| Some(slot_view(id, gang.slots().get(id)?)))
    }

    /// Members of its minimum that have no slot.
    pub fn missing(&self) -> u32 {
        self.gang.minimum().missing(Count::placed)
    }

    /// The same request so that the gang is whole then: no fewer members than are missing of its minimum.
    pub fn to_be_whole(&self, request: PlanRequest) -> PlanRequest {
        planning::to_be_whole(self.gang, request)
    }

    /// Its slots, by number.
    pub fn slots(&self) -> impl Iterator<Item = SlotView<'a>> + use<'a> {
        self.gang.slots().iter().map(|(id, slot)| slot_view(id, slot))
    }
}

fn slot_view(id: u32, slot: &Slot) -> SlotView<'_> {
    SlotView {
        slot: id,
        node: slot.node(),
        devices: slot.devices(),
        pod: slot.holder().pod(),
        bound: slot.is_bound(),
        spare: slot.is_spare(),
        shape: slot.shape(),
    }
}
