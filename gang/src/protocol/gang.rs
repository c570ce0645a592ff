//! One gang as a state machine: its members arrive, the whole gets a reservation, members meet at a barrier, the decision is written, all
//! are bound, losses are repaired. What follows from a change is decided in [`Gang::settle`]; what is to be done is pushed as
//! [`Work`].

mod decided_groups;
mod incarnation;
mod minimum;
mod planning;
mod status;
mod succession;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, DeviceId, GangStatus, NodeName, PodUid};

use self::minimum::Minimum;
pub use self::status::{BLOCKED, GROUP_SCHEDULED, MEMBERS_SLOW};
pub use self::succession::Continuations;
pub(super) use self::succession::End;
use self::succession::Succession;
pub use self::view::{MemberView, SlotView, View};
use super::agreement::{Agreement, Declaration, Resolution};
use super::attempts::Attempts;
use super::barrier::Barrier;
use super::blockers::Blockers;
use super::decision::{BoundChange, Commit, CommitEnd, PastDecisions, StandingDecision};
use super::idle_time::IdleDevices;
use super::members::{Class, Count, Members, TrackedMember};
use super::objects::GangSite;
use super::plan_queue::{Shortfall, Turn, Urgency};
use super::reasons::{Cause, Failure, Refusal, WaitReason, restart_note};
use super::report::{Activation, LastReported, ShownReasons, activate};
use super::roster::{Loss, Roster, pair};
use super::slot_list::{MAX_DECISION_BYTES, SlotList};
use super::slots::{Holder, Slot, Slots};
use super::types::{
    Answer, Arrival, Assignment, BindEnd, Blocker, CommitFailure, Member, Moment, Placement, PlanRequest,
    Settings, SlotReservation, Stage, Work,
};
use super::{Env, after};
use crate::key::{GangKey, Integration};
use crate::membership::OwnerRef;
use crate::quorum::Selection;
use crate::terms::{Authority, Fault, Repair, Terms, work};

/// Conclusions that can follow from one change: more would be a circle.
const MAX_STEPS: usize = 8;
#[derive(Debug, Clone)]
pub(super) struct Gang {
    key: Arc<GangKey>,
    roster: Roster,
    agreement: Agreement,
    attempts: Attempts,
    idle: IdleDevices,
    state: State,
    activation: Activation,
    reported: LastReported,
    reasons: ShownReasons,
    transitions: status::Transitions,
    /// Why its pods wait.
    waits: WaitReason,
    /// Until then a gang that has its minimum waits for the rest.
    settle_until: Instant,
    /// Since when it waits, in seconds since 1970.
    waiting_since: i64,
    /// When its minimum was bound, in seconds since 1970.
    bound_at: Option<i64>,
    /// Where its slots are.
    site: GangSite,
    past: PastDecisions,
    /// All its members with devices are victims of another gang.
    all_evicted: bool,
    /// One of its members has gone for another gang.
    lost_to_eviction: bool,
    /// The highest priority of its members when it was decided, or later.
    bound_priority: i32,
    /// While it is reserved: the incarnation before, from which it has its slots.
    continues: Option<Box<Succession>>,
    blockers: Blockers,
    /// Members that run slower than the rest. Nothing depends on it.
    slow_members: Option<Arc<str>>,
}

/// How far a gang is. The phase that people see ([`gantry_api::GangPhase`]) follows from this and the members.
#[derive(Debug, Clone)]
enum State {
    /// It has no reservation.
    Open,
    /// It has a reservation that can still be released.
    Reserved(Barrier),
    /// The decision is being written.
    Committing(Commit),
    /// It is decided: from here on only forward.
    Decided(Box<StandingDecision>),
    /// No member of its incarnation is left, and its owner creates all of them again: the slots are kept for the next incarnation.
    Awaiting(Box<Succession>),
    /// Its members of the incarnation before are being deleted.
    Restarting {
        /// When they are deleted again.
        again: Instant,
        /// The decision of that incarnation. It stays in the object until they are gone, for it names them.
        of: Option<Arc<Decision>>,
        /// The gang that it yields to, where both were in a deadlock.
        to: Option<Arc<GangKey>>,
        /// Its slots are kept for the next incarnation.
        keeps: Option<Box<Succession>>,
    },
    /// It has no members.
    Over {
        /// Until when it is remembered.
        until: Instant,
    },
}

/// What the extender has to know of a gang after every change.
pub(super) struct GangSnapshot {
    pub(super) changes: Vec<(u32, Option<SlotReservation>, bool)>,
    pub(super) wants_plan: bool,
    pub(super) turn: Option<Turn>,
    pub(super) considered: Option<u64>,
    pub(super) preempts: bool,
    pub(super) may_give_back: bool,
    pub(super) due: Option<Instant>,
    pub(super) devices: u64,
    pub(super) is_over: bool,
}

/// What is asked of the gang's terms and members.
impl Gang {
    pub(super) fn new(key: Arc<GangKey>, now: Moment) -> Self {
        Self {
            waits: Cause::New.of_pods(&key, None),
            key,
            roster: Roster::default(),
            agreement: Agreement::new(),
            attempts: Attempts::default(),
            idle: IdleDevices::default(),
            state: State::Open,
            activation: Activation::default(),
            reported: LastReported::default(),
            reasons: ShownReasons::new(),
            transitions: status::Transitions::default(),
            settle_until: now.at,
            waiting_since: now.unix,
            bound_at: None,
            site: GangSite::default(),
            past: PastDecisions::default(),
            all_evicted: false,
            lost_to_eviction: false,
            bound_priority: 0,
            continues: None,
            blockers: Blockers::default(),
            slow_members: None,
        }
    }

    /// Why its pods wait.
    pub(super) fn waits(&self) -> &WaitReason {
        &self.waits
    }

    pub(super) fn members(&self) -> &Members {
        self.roster.members()
    }

    fn slots(&self) -> &Slots {
        self.roster.slots()
    }

    fn count(&self) -> &Count {
        self.members().count()
    }

    pub(super) fn has_slots(&self) -> bool {
        !self.slots().is_empty()
    }

    /// The slot of a member.
    pub(super) fn slot_of(&self, uid: &PodUid) -> Option<(u32, &Slot)> {
        self.roster.slot_of(uid)
    }

    pub(super) fn agreement(&mut self) -> &mut Agreement {
        &mut self.agreement
    }

    pub(super) fn owners(&self) -> impl Iterator<Item = &OwnerRef> {
        self.agreement.owners()
    }

    pub(super) fn has_reported(&self) -> bool {
        self.reported.is_anything()
    }

    /// The number of the last change of its slots, and when members are activated next: if either changes, others have to know.
    pub(super) fn version(&self) -> (u64, Activation) {
        (self.slots().version(), self.activation.clone())
    }

    /// kube-scheduler may place its members in a PodGroup cycle.
    fn is_native(&self) -> bool {
        matches!(self.key.integration, Integration::PodGroup | Integration::Workload)
    }

    /// Its pods are independent: each is placed by itself. A group that was decided as a gang stays one.
    pub(super) fn are_independent(&self) -> bool {
        let singles = self.agreement.working_terms().is_some_and(|terms| terms.singles);
        singles && matches!(self.state, State::Open) && !self.agreement.is_invalid()
    }

    /// A pod of it is placed by itself, and its declaration is valid.
    pub(super) fn is_independent(&self, uid: &PodUid) -> bool {
        let is_valid = |member: &TrackedMember| member.pod().membership.faults.is_empty();
        self.are_independent() && self.members().get(uid).is_none_or(is_valid)
    }

    fn arrival(&self, settings: &Settings) -> Duration {
        let terms = self.agreement.working_terms();
        terms.map_or(settings.arrival, |terms| terms.arrival)
    }

    fn repair(&self) -> Repair {
        let Some(terms) = self.agreement.working_terms() else {
            return Repair::default();
        };
        match (&self.state, terms.repair_by) {
            (State::Decided(decided), Authority::Pods) => decided.repair().unwrap_or(terms.repair),
            _ => terms.repair,
        }
    }

    /// The minimum that holds: after the decision the one that was decided, or to which an object has lowered it since.
    fn minimum(&self) -> Minimum<'_> {
        let resolved = self.agreement.resolved();
        let agreed = resolved.map_or(&[][..], |terms| &terms.by_role);
        let (total, by_role) = match &self.state {
            State::Decided(decided) => (decided.min(), decided.by_role()),
            State::Committing(commit) => (commit.decision().min, Some(agreed)),
            _ => (resolved.map_or(0, |terms| terms.min), Some(agreed)),
        };
        Minimum {
            total,
            by_role,
            groups: resolved.and_then(|terms| terms.quorum.as_deref()),
            groups_are_open: agreed.is_empty() && self.decided().is_none(),
            members: self.members(),
        }
    }

    /// The ID of the decision that stands or is being written.
    fn decision_id(&self) -> Option<&str> {
        match &self.state {
            State::Decided(decided) => Some(decided.id()),
            State::Committing(commit) => Some(&commit.decision().id),
            _ => None,
        }
    }

    /// It was decided, or has ended.
    fn has_begun(&self) -> bool {
        matches!(self.state, State::Decided(_) | State::Over { .. })
    }

    /// It has no reservation.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    /// Whether it is a tree of groups.
    pub(super) fn has_tree(&self) -> bool {
        self.agreement.has_tree()
    }

    fn barrier(&self) -> Option<&Barrier> {
        match &self.state {
            State::Reserved(barrier) => Some(barrier),
            _ => None,
        }
    }

    fn decided(&self) -> Option<&StandingDecision> {
        match &self.state {
            State::Decided(decided) => Some(decided),
            _ => None,
        }
    }

    /// Victims have to go before its members may arrive.
    pub(super) fn preempts(&self) -> bool {
        self.barrier().is_some_and(Barrier::has_victims)
    }

    /// It is decided, and a member of its minimum has no slot.
    fn is_short(&self) -> bool {
        self.decided().is_some() && self.minimum().missing(Count::placed) > 0
    }

    /// Whether losses are repaired. Not once its owner has ended, nor while that is suspended, whatever the policy.
    fn is_repaired(&self) -> bool {
        self.is_recreated() && self.repair() != Repair::Ignore
    }

    /// It has its minimum, more are declared, and they may come any moment. So may more of several jobs: then they are two gangs of one
    /// name.
    fn waits_for_rest(&self, now: Instant) -> bool {
        let Some(terms) = self.agreement.resolved().filter(|_| now < self.settle_until) else {
            return false;
        };
        let declared = terms.total.map(|total| self.count().exist() < total);
        declared.unwrap_or_else(|| self.agreement.is_undeclared_mix(terms))
    }

    /// How many more members may get a slot. A decided gang that is not valid any more is completed, and does not grow.
    fn may_grow(&self) -> u32 {
        if self.agreement.is_invalid() {
            return self.minimum().missing(Count::placed);
        }
        let max = self.agreement.working_terms().map_or(u32::MAX, |terms| terms.max);
        max.max(self.minimum().total).saturating_sub(self.count().placed())
    }

    /// It is worth planning now, given capacity.
    pub(super) fn wants_plan(&self, now: Instant) -> bool {
        if self.attempts.is_paused(now) {
            return false;
        }
        if self.lacks_spares() {
            return true;
        }
        if self.members().unplaced().is_empty() || !self.any_may_arrive() {
            return false;
        }
        match &self.state {
            State::Open if self.are_independent() => false,
            State::Open => self.is_complete(now),
            State::Decided(_) => {
                self.agreement.working_terms().is_some() && self.may_grow() > 0 && !self.awaits_rollout(now)
            }
            _ => false,
        }
    }

    /// A rollout has just begun: more pods of its revision may come, of other Deployments too.
    fn awaits_rollout(&self, now: Instant) -> bool {
        now < self.settle_until
            && self.urgency() == Urgency::Surplus
            && !planning::next_revision(self).is_empty()
    }

    /// It wants a plan, if not now then when time has passed.
    fn may_ever_want_plan(&self) -> bool {
        let open = matches!(self.state, State::Open | State::Decided(_));
        open && !self.are_independent()
            && (self.count().of(Class::Waiting) > 0 || self.lacks_spares())
            && self.agreement.working_terms().is_some()
    }

    pub(super) fn urgency(&self) -> Urgency {
        match &self.state {
            State::Decided(_) if self.is_short() => Urgency::Incomplete,
            State::Decided(_) => Urgency::Surplus,
            _ => Urgency::Open,
        }
    }

    pub(super) fn turn(&self) -> Turn {
        let members = self.members();
        let urgency = self.urgency();
        let (exist, devices) = (members.unplaced().len(), members.unplaced_devices());
        let shortfall = match urgency {
            Urgency::Incomplete => Shortfall::new(self.minimum().missing(Count::placed), exist, devices),
            Urgency::Open | Urgency::Surplus => Shortfall::default(),
        };
        Turn::new(urgency, members.priority(), self.waiting_since, devices, shortfall)
    }

    /// Its terms are known, and as many members exist as its minimum requires.
    fn has_minimum(&self) -> bool {
        self.agreement.terms().is_some() && self.minimum().is_met(Count::exist)
    }

    /// It waits for a reservation: whether it is complete, and would fit on an empty cluster as far as is known.
    pub(super) fn is_queued(&self) -> bool {
        self.urgency() == Urgency::Open && self.minimum().is_met(Count::exist)
    }

    pub(super) fn is_hopeless(&self) -> bool {
        self.attempts.refusal().is_some_and(Refusal::is_hopeless)
    }

    pub(super) fn waiting_since(&self) -> i64 {
        self.waiting_since
    }
}

/// What happens to the gang.
impl Gang {
    /// A member, as the watch shows it.
    pub(super) fn observe(&mut self, now: Moment, pod: Member, settings: &Settings, synced: bool) {
        let uid = pod.uid.clone();
        if synced && self.members().get(&uid).is_none() && self.begins_next_incarnation(&pod) {
            self.begin_next_incarnation(&[], now, settings);
        }
        let waited = self.members().unplaced().contains(&uid);
        if self.roster.observe(pod) {
            self.settle_until = after(now.at, settings.settle);
        }
        self.follow(&uid, now.at);
        if waited != self.members().unplaced().contains(&uid) {
            self.attempts.invalidate();
        }
        self.check_size(settings);
    }

    /// The pod of a member is gone.
    pub(super) fn remove(&mut self, now: Moment, uid: &PodUid, settings: &Settings) {
        let waited = self.members().unplaced().contains(uid);
        let (member, loss) = self.roster.remove(uid, now.at);
        self.lost_to_eviction |= self.all_evicted && loss == Loss::Evicted;
        let declared = member.as_ref().and_then(TrackedMember::declared);
        self.agreement.replace(declared, None);
        if waited {
            self.attempts.invalidate();
        }
        self.check_size(settings);
    }

    /// Whether it has more members than are supported.
    fn check_size(&mut self, settings: &Settings) {
        let too_many = self.members().len() > settings.max_members;
        let fault = too_many.then(|| Fault {
            place: "size".into(),
            words: format!("more than {} pods exist, the most that a gang may have", settings.max_members)
                .into(),
        });
        self.agreement.set_size_fault(fault);
    }

    /// Brings the declarations of the gang and the slot of a member in step with what the member has become.
    fn follow(&mut self, uid: &PodUid, now: Instant) {
        self.count_declaration(uid);
        let loss = self.roster.follow(uid, now);
        self.lost_to_eviction |= self.all_evicted && loss == Loss::Evicted;
    }

    /// Counts the declaration of a member: only of those that exist and belong to this incarnation.
    fn count_declaration(&mut self, uid: &PodUid) {
        let Some(member) = self.members().get(uid) else {
            return;
        };
        let class = self.members().class(member);
        let now = (!matches!(class, Class::Old | Class::Lost)).then(|| Declaration {
            membership: member.pod().membership.clone(),
            ended: class == Class::Completed,
            light: member.pod().shape.is_none(),
        });
        if now.as_ref() == member.declared() {
            return;
        }
        let before = member.declared().cloned();
        self.agreement.replace(before.as_ref(), now.as_ref());
        self.roster.members_mut().change(uid, |member| member.set_declared(now));
    }

    /// These terms were resolved.
    pub(super) fn agree(&mut self, resolution: Resolution) {
        if !self.agreement.set(resolution) {
            return;
        }
        self.lower_minimum();
        if let State::Decided(decided) = &mut self.state {
            decided.complete(self.agreement.resolved().map(|terms| &**terms));
        }
        self.attempts.invalidate();
        if self.barrier().is_some() {
            self.unplan();
        }
    }

    /// The terms, if an object declares the minimum in them. What pods declare is not followed after the decision: a user with write
    /// access to one pod must not undo what the others rely on.
    fn terms_of_object(&self) -> Option<&Arc<Terms>> {
        let terms = self.agreement.terms();
        terms.filter(|terms| terms.authority == Authority::Object)
    }

    /// Lowers the minimum that was decided: a job that was made smaller is complete as it is. One that is raised waits for the next start.
    fn lower_minimum(&mut self) {
        let Some(terms) = self.terms_of_object().cloned() else {
            return;
        };
        if let State::Decided(decided) = &mut self.state {
            decided.lower(&terms);
        }
    }

    /// Something may not be done to its pods; `None`: it was done after all.
    pub(super) fn set_blocked(&mut self, blocker: Blocker, why: Option<Arc<str>>) {
        self.blockers.set(blocker, why);
    }

    /// Members that run slower than the rest.
    pub(super) fn set_slow_members(&mut self, members: Option<Arc<str>>) {
        self.slow_members = members;
    }

    pub(super) fn set_scheduler_message(&mut self, message: &Arc<str>) {
        self.attempts.set_scheduler_message(message);
    }

    /// Some of its members are victims of another gang from now on, or no longer.
    pub(super) fn set_evicted(&mut self, victims: &[PodUid], evicted: bool) {
        for uid in victims {
            self.roster.members_mut().change(uid, |member| member.set_evicted(evicted));
        }
        self.all_evicted = self.roster.are_all_evicted();
    }

    /// A victim of it is terminating, and is to be gone by then. Whether that is new.
    pub(super) fn victim_terminates(&mut self, pod: &PodUid, by: i64) -> bool {
        match &mut self.state {
            State::Reserved(barrier) => barrier.victim_terminates(pod, by),
            _ => false,
        }
    }

    /// A victim of it is gone, and its devices are free.
    pub(super) fn victim_gone(&mut self, env: &mut Env<'_>, pod: &PodUid) {
        let arrival = self.arrival(env.settings);
        let State::Reserved(barrier) = &mut self.state else {
            return;
        };
        if barrier.victim_gone(env.now.at, pod, arrival, env.settings) {
            self.blockers.evicted();
            let coming = self.members().on_the_way().iter().cloned().collect();
            self.activate(env, coming);
        }
    }

    /// kube-scheduler calls for a member, so that it does not reject it any more.
    pub(super) fn accept(&mut self, uid: &PodUid) {
        self.roster.members_mut().change(uid, TrackedMember::accept);
        self.attempts.invalidate();
    }

    /// Whether kube-scheduler rejects a member, as far as its pod shows.
    pub(super) fn rejects(&self, uid: &PodUid) -> bool {
        self.members().get(uid).is_some_and(|member| member.pod().rejected.is_some())
    }

    /// The node that filter may return for a member.
    pub(super) fn answer(
        &mut self,
        env: &mut Env<'_>,
        uid: &PodUid,
        offered: &dyn Fn(&NodeName) -> bool,
    ) -> Answer {
        let Some(member) = self.members().get(uid) else {
            return Answer::Single;
        };
        if member.pod().shape.is_none() {
            return Answer::Single;
        }
        if let Some(node) = member.bound_node() {
            return Answer::Node(node.clone());
        }
        if let Some(why) = self.why_not(member) {
            return Answer::Wait(why);
        }
        let Some((_, slot)) = self.slot_of(uid) else {
            return Answer::Wait(self.waits.clone());
        };
        let planned = slot.node().clone();
        let movable = !member.is_at_barrier() && !member.is_pinned();
        let aside = member.is_aside();
        if offered(&planned) {
            if self.is_native() {
                self.attempts.hit(&planned);
            }
            // It has arrived before. If it came again and again, kube-scheduler would try all others again each time that it leaves.
            // In a PodGroup cycle kube-scheduler tries all of them anyway, and the group fails if one has no node.
            if aside && !self.agreement.is_scheduled_whole() {
                return Answer::Wait(self.waits.clone());
            }
            self.set_answered(uid);
            return Answer::Node(planned);
        }
        if aside {
            // It could not go there now: that it has arrived does not hold any more.
            self.roster.members_mut().change(uid, TrackedMember::leave);
        }
        if movable && self.roster.move_to(uid, offered, env.now.at) {
            self.set_answered(uid);
            if let Some((_, slot)) = self.slot_of(uid) {
                return Answer::Node(slot.node().clone());
            }
        }
        self.miss(env, uid, &planned);
        if self.slot_of(uid).is_some() {
            Answer::Wait(WaitReason::node_not_offered(&self.key, &planned))
        } else {
            Answer::Wait(self.waits.clone())
        }
    }

    fn set_answered(&mut self, uid: &PodUid) {
        let is_new = |member: &TrackedMember| !member.was_answered() || member.refused_at().is_some();
        if self.members().get(uid).is_some_and(is_new) {
            self.roster.members_mut().change(uid, TrackedMember::set_answered);
        }
    }

    /// Filter has refused a member for this reason.
    pub(super) fn refused_with(&mut self, uid: &PodUid, why: &WaitReason, now: Instant) {
        let current = Arc::ptr_eq(&why.message, &self.waits.message);
        self.reasons.refused(self.roster.members_mut(), uid, now, current);
    }

    /// Why a member itself cannot go anywhere, whatever its gang does.
    fn why_not(&self, member: &TrackedMember) -> Option<WaitReason> {
        if member.pod().leaving || member.is_gone() {
            return Some(WaitReason::terminating(&self.key));
        }
        if self.members().class(member) == Class::Old {
            return Some(self.waits.clone());
        }
        if let Some(fault) = member.pod().membership.faults.first() {
            return Some(WaitReason::invalid_member(&self.key, fault));
        }
        self.preempts().then(|| self.waits.clone())
    }

    /// Why a member waits, in the words that filter would return; `None` where it does not.
    pub(super) fn wait_reason(&self, uid: &PodUid) -> Option<WaitReason> {
        let member = self.members().get(uid)?;
        let waits = matches!(member.pod().stage, Stage::Pending | Stage::Gated { .. });
        let ours = member.lives() && member.pod().elsewhere.is_none();
        if !waits || !ours || member.slot().is_some() && !self.preempts() {
            return None;
        }
        Some(self.why_not(member).unwrap_or_else(|| self.waits.clone()))
    }

    /// A planned node was not offered, and no other slot would do. After a few times the gang is planned without it.
    fn miss(&mut self, env: &mut Env<'_>, uid: &PodUid, node: &NodeName) {
        self.activation.hasten(env.now.at, env.settings);
        // Its siblings may be missing there: kube-scheduler counts them where pods must be spread, or kept together.
        self.call_back(env, |_| true);
        // A PodGroup cycle calls filter for each placement, with the nodes of that placement only.
        let cycle = if self.is_native() { env.settings.cycle } else { Duration::ZERO };
        if !self.attempts.miss(node, env.now.at, cycle, env.settings) {
            return;
        }
        let pinned = self.members().get(uid).is_some_and(TrackedMember::is_pinned);
        match &self.state {
            State::Reserved(_) => {
                self.attempts.exclude(node);
                if self.attempts.count_replan(env.settings) {
                    self.give_up(env, self.not_offered());
                } else {
                    self.unplan();
                }
            }
            State::Decided(_) if !pinned => {
                self.attempts.exclude(node);
                self.replan_slot(uid);
            }
            _ => {}
        }
    }

    /// Releases one slot of a decided gang; its member is planned again by itself.
    fn replan_slot(&mut self, uid: &PodUid) {
        if let Some((id, _)) = self.slot_of(uid) {
            self.roster.release(id);
            self.attempts.reconsider();
        }
    }

    /// A bind call has come for a member.
    pub(super) fn arrive(&mut self, env: &mut Env<'_>, uid: &PodUid, node: &NodeName) -> Arrival {
        let Some(member) = self.members().get(uid) else {
            return Arrival::Single;
        };
        if member.pod().shape.is_none() {
            return Arrival::Single;
        }
        if let Some(at) = member.bound_node() {
            return match self.slot_of(uid) {
                Some((_, slot)) if slot.node() == node => self.go(uid),
                _ if at == node => Arrival::Single,
                _ => Arrival::Refuse(WaitReason::bound_elsewhere(&self.key, at)),
            };
        }
        if let Some(why) = self.why_not(member) {
            return Arrival::Refuse(why);
        }
        let Some((_, slot)) = self.slot_of(uid) else {
            return Arrival::Refuse(self.waits.clone());
        };
        if slot.node() != node {
            let planned = slot.node().clone();
            let movable = !member.is_at_barrier() && !member.is_pinned();
            if !movable || !self.roster.move_to(uid, &|other| other == node, env.now.at) {
                return Arrival::Refuse(WaitReason::reserved_elsewhere(&self.key, &planned));
            }
        }
        match &self.state {
            // A slot that it got after the decision is written down first, so that the next process knows of it.
            State::Decided(_) if !self.is_written(uid) => {
                self.roster.members_mut().change(uid, TrackedMember::arrive);
                Arrival::Wait
            }
            State::Decided(_) => {
                self.roster.members_mut().change(uid, TrackedMember::begin_bind);
                self.go(uid)
            }
            State::Reserved(_) | State::Committing(_) => {
                // Nodes may not have been offered because siblings had not arrived: misses are counted again from here on.
                self.attempts.forget_misses();
                self.roster.members_mut().change(uid, TrackedMember::arrive);
                Arrival::Wait
            }
            State::Open | State::Awaiting(_) | State::Restarting { .. } | State::Over { .. } => {
                Arrival::Refuse(self.waits.clone())
            }
        }
    }

    fn go(&self, uid: &PodUid) -> Arrival {
        match self.slot_of(uid) {
            Some((_, slot)) => Arrival::Go(Assignment {
                gang: self.key.clone(),
                node: slot.node().clone(),
                devices: slot.devices().clone(),
            }),
            None => Arrival::Refuse(self.waits.clone()),
        }
    }

    /// The bind call of a member was disconnected. Before the decision it no longer counts as arrived; its slot is kept a while for its next
    /// attempt.
    pub(super) fn disconnect(&mut self, env: &Env<'_>, uid: &PodUid) {
        let waits = |member: &TrackedMember| member.is_at_barrier() && !member.is_pinned();
        if !self.members().get(uid).is_some_and(waits) {
            return;
        }
        self.roster.members_mut().change(uid, TrackedMember::leave);
        if let State::Reserved(barrier) = &mut self.state {
            barrier.put_off(env.now.at, env.settings);
        }
    }

    /// A member has waited at the barrier as long as a bind call may take. Until the decision it counts as arrived all the same:
    /// kube-scheduler has found its node good, and brings members in an order and at a pace of its own. It is bound with the others then,
    /// without another call.
    pub(super) fn time_out(&mut self, env: &Env<'_>, uid: &PodUid) {
        match &self.state {
            State::Reserved(_) | State::Committing(_) => {
                self.roster.members_mut().change(uid, TrackedMember::leave_barrier);
            }
            _ => self.disconnect(env, uid),
        }
    }

    /// Nodes of some slots have less capacity than before: members that have arrived there and left have to arrive again.
    pub(super) fn doubt_arrivals(&mut self, env: &mut Env<'_>, slots: &BTreeSet<u32>) {
        self.call_back(env, |slot| slots.contains(&slot));
    }

    /// Members that have arrived and left are not bound without arriving again.
    fn call_back(&mut self, env: &mut Env<'_>, of: impl Fn(u32) -> bool) {
        let aside = self.roster.members_mut().call_back(of);
        self.activate(env, aside);
    }

    /// The binding of a member has ended.
    pub(super) fn end_bind(&mut self, env: &mut Env<'_>, uid: &PodUid, outcome: BindEnd) {
        self.roster.end_bind(uid, outcome);
        let was_refused = |member: &TrackedMember| member.refused_at().is_some();
        if outcome == BindEnd::Failed && self.members().get(uid).is_some_and(was_refused) {
            // If there was no bind call, kube-scheduler does not bring it again by itself.
            self.activate(env, vec![uid.clone()]);
        }
        self.follow(uid, env.now.at);
    }

    /// Slots for which `lost` holds are of no use any more, because of their node or a device: what is planned there and not bound is
    /// planned again.
    pub(super) fn lose_slots(&mut self, env: &Env<'_>, lost: &dyn Fn(u32, &Slot) -> bool) {
        let there = self.slots().iter().filter(|(id, slot)| lost(*id, slot));
        let there: Vec<(u32, Holder)> = there.map(|(id, slot)| (id, slot.holder().clone())).collect();
        if there.iter().all(|(_, holder)| matches!(holder, Holder::Bound(_))) {
            return;
        }
        let (spare, there): (Vec<_>, Vec<_>) =
            there.into_iter().partition(|(_, holder)| *holder == Holder::Spare);
        for (id, _) in spare {
            self.roster.release(id);
        }
        if there.is_empty() {
            return;
        }
        match &self.state {
            // Where others take the devices each time, evictions at once would go on for ever.
            State::Reserved(_) if self.attempts.has_evicted() => {
                self.give_up(env, Failure::EvictedInVain);
            }
            State::Reserved(_) => self.unplan(),
            State::Committing(_) => {
                for (id, _) in there {
                    self.roster.slots_mut().mark_stale(id);
                }
            }
            State::Decided(_) => {
                for (id, holder) in there {
                    self.give_up_slot(id, &holder);
                }
            }
            State::Awaiting(_) => {
                for (id, _) in there {
                    self.roster.release(id);
                }
            }
            State::Open | State::Restarting { .. } | State::Over { .. } => {}
        }
    }

    /// Releases a slot that is of no use, unless a Binding may exist for it.
    fn give_up_slot(&mut self, id: u32, holder: &Holder) {
        match holder {
            Holder::Bound(_) => {}
            Holder::Kept | Holder::Spare | Holder::Leaving(_) => self.roster.release(id),
            Holder::Assigned(uid) => {
                if !self.members().get(uid).is_some_and(TrackedMember::is_pinned) {
                    self.replan_slot(uid);
                }
            }
        }
    }

    /// Releases some of the surplus slots ([`View::surplus`]). Returns how many.
    pub(super) fn release_surplus(&mut self, slots: &BTreeSet<u32>) -> u32 {
        let mut released = 0;
        for id in planning::surplus(self).into_iter().filter(|id| slots.contains(id)) {
            self.roster.release(id);
            released += 1;
        }
        released
    }

    /// Slots kept for members that it has lost, while no replacement exists.
    fn orphaned(&self) -> &BTreeSet<u32> {
        static NONE: BTreeSet<u32> = BTreeSet::new();
        match &self.state {
            State::Decided(_) | State::Awaiting(_) => self.slots().kept(),
            _ => &NONE,
        }
    }

    /// The same, and spare ones: both go to gangs of higher priority.
    fn for_higher_priority(&self) -> BTreeSet<u32> {
        let decided = self.decided().is_some();
        let spares = self.slots().spares().filter(|_| decided).map(|(id, _)| id);
        self.orphaned().iter().copied().chain(spares).collect()
    }

    /// Releases some of those slots for a gang of higher priority. Returns how many.
    pub(super) fn release_orphaned(&mut self, slots: &BTreeSet<u32>, to: &Arc<str>) -> u32 {
        let released: Vec<u32> = self.for_higher_priority().intersection(slots).copied().collect();
        for id in &released {
            self.roster.release(*id);
        }
        if let State::Decided(decided) = &mut self.state
            && !released.is_empty()
        {
            decided.set_gave_to(to);
        }
        u32::try_from(released.len()).unwrap_or(u32::MAX)
    }

    /// What the planner is asked for, in this capacity.
    pub(super) fn request_plan(&mut self, capacity: u64) -> Option<PlanRequest> {
        self.attempts.request(capacity);
        self.plan_request()
    }

    /// What the planner would be asked for; `None` if the terms are not known.
    pub(super) fn plan_request(&self) -> Option<PlanRequest> {
        planning::plan_request(self)
    }

    /// Whether it still waits for the plan that was requested.
    pub(super) fn awaits_plan(&self) -> bool {
        let wanted = match &self.state {
            State::Open => self.has_minimum(),
            State::Decided(_) => true,
            _ => false,
        };
        wanted && self.attempts.is_requested()
    }

    pub(super) fn plan_answered(&mut self) {
        self.attempts.answered();
    }

    /// Takes a placement: gives its reservations to members.
    pub(super) fn place(&mut self, env: &mut Env<'_>, placement: &Placement) {
        let decided = self.decided().is_some();
        let request = self.plan_request().map(|request| request.into_choice(placement));
        let must = request.as_ref().map_or(0, |request| request.must).max(1);
        let chosen = request.as_ref().map(|request| request.terms.by_role.iter().cloned().collect());
        let members = request.map(|request| request.members);
        let pairs = pair(members.unwrap_or_default(), &placement.places);
        let preempts = decided && placement.waits();
        let only_spares = decided && pairs.is_empty() && !placement.spares.is_empty();
        if pairs.len() < must as usize && !only_spares || preempts {
            let refusal = if preempts { Refusal::PlanEvicts } else { Refusal::PlanTooSmall };
            self.attempts.refuse(refusal);
            return;
        }
        let mut placed = Vec::with_capacity(pairs.len());
        let mut bytes = self.slot_list().bytes();
        let mut too_large = None;
        for (uid, place) in pairs {
            let id = self.roster.add(Slot::new(place, env.now.at), &uid, env.now.at);
            bytes += self.slots().get(id).map_or(0, |slot| self.slot_list().bytes_of(slot));
            if bytes > MAX_DECISION_BYTES {
                too_large = Some(status::too_large(self.minimum().total, self.slots().len(), bytes));
                self.roster.release(id);
                break;
            }
            placed.push(uid);
        }
        let incomplete = !decided && !self.minimum().is_met(Count::placed);
        let refusal = match too_large.filter(|_| placed.is_empty() || incomplete) {
            Some(refusal) => Some(refusal),
            // Enough of them, but not of every role.
            None => incomplete.then_some(Refusal::PlanTooSmall),
        };
        if let Some(refusal) = refusal {
            if !decided {
                self.release_all();
            }
            self.attempts.refuse(refusal);
            return;
        }
        self.attempts.succeed(placement.waits());
        self.add_spares(env, placement);
        if !only_spares {
            // The domain of all members that have a slot, also of those that had one before.
            self.site.domain = placement.domain.clone();
            self.site.rails = placement.rails.clone();
        }
        if decided {
            // Members that were left out have their turn now.
            self.attempts.reconsider();
            self.activate(env, placed);
            return;
        }
        // Why the gang as a whole is there. Members that come later change nothing of that.
        self.site.compared = placement.compared.clone();
        let arrival = self.arrival(env.settings);
        let ready = self.count().ready();
        let barrier = Barrier::new(env.now.at, placement, ready, arrival, env.settings);
        self.state = State::Reserved(barrier);
        self.choose_groups(chosen);
        if !placement.waits() {
            self.activate(env, placed);
        } else if !placement.victims.is_empty() {
            env.work.push(Work::Evict { pods: placement.victims.clone(), by: self.key.clone() });
        }
    }

    /// Keeps the spare reservations of a placement, as far as the decision can hold them.
    fn add_spares(&mut self, env: &Env<'_>, placement: &Placement) {
        let mut bytes = self.slot_list().bytes();
        for place in &placement.spares {
            let slot = Slot::spare(place, env.now.at);
            bytes += self.slot_list().bytes_of(&slot);
            if bytes > MAX_DECISION_BYTES {
                break;
            }
            self.roster.add_kept(slot);
        }
    }

    /// Which groups of a tree of groups its reservation is for.
    fn choose_groups(&mut self, chosen: Option<Selection>) {
        let has_tree = self.agreement.resolved().is_some_and(|terms| terms.quorum.is_some());
        self.agreement.choose(chosen.filter(|chosen| has_tree && !chosen.is_empty()));
    }

    /// A tree of groups has what it needs, too, once as many other groups are bound as were chosen: those are chosen from then on.
    fn choose_bound_groups(&mut self) {
        if !self.has_tree() || self.minimum().is_met(Count::settled) {
            return;
        }
        let terms = self.agreement.resolved().map(Arc::clone);
        let Some(quorum) = terms.and_then(|terms| terms.quorum.clone()) else {
            return;
        };
        let is_bound = |role: &str| {
            let settled = self.members().count_of(role).settled();
            quorum.min_of(role).is_some_and(|min| min <= settled)
        };
        let Some(bound) = quorum.selections(&is_bound, &str::to_owned).into_iter().next() else {
            return;
        };
        self.choose_groups(Some(bound));
        let terms = self.agreement.resolved().map(Arc::clone);
        if let (State::Decided(decided), Some(terms)) = (&mut self.state, terms) {
            decided.take_groups(&terms);
        }
    }

    /// There is no placement for it. If nodes were excluded because kube-scheduler does not offer them, it is tried with them again: they
    /// are the placement that it has, and are offered another time.
    pub(super) fn refuse(&mut self, env: &Env<'_>, refusal: Refusal) {
        if self.attempts.excluded().is_empty() {
            self.attempts.refuse(refusal);
        } else if self.decided().is_some() {
            let why = self.not_offered();
            self.attempts.fail(env.now.at, env.settings, why);
        } else {
            self.give_up(env, self.not_offered());
        }
    }

    fn not_offered(&self) -> Failure {
        Failure::NodesNotOffered(self.attempts.scheduler_message())
    }

    /// The write of a decision has ended.
    pub(super) fn committed(&mut self, env: &mut Env<'_>, id: &str, result: Result<(), CommitFailure>) {
        if self.decision_id() != Some(id) {
            // What was reported since then was to be written after it, and was dropped because it is older.
            self.reported.forget();
        }
        let State::Committing(commit) = &mut self.state else {
            return;
        };
        if commit.decision().id != id {
            return;
        }
        match commit.end(result) {
            CommitEnd::Written => self.decide(),
            // The decision does not stand and is not on its way: its devices are of use to others until the next attempt.
            CommitEnd::Refused(why) => {
                self.give_up(env, Failure::DecisionRejected(why));
            }
            CommitEnd::Again => self.commit_again(env),
            CommitEnd::Read => {}
        }
    }

    /// The object was read, and shows no decision.
    pub(super) fn object_shows_no_decision(&mut self, env: &mut Env<'_>) {
        let arrived = self.count().of(Class::Arrived) > 0;
        let complete = arrived && self.agreement.terms().is_some() && self.minimum().is_met(Count::ready);
        let State::Committing(commit) = &self.state else {
            return;
        };
        if !commit.awaits_object() {
            return;
        }
        if complete || commit.is_in_doubt() {
            // The first write may still succeed: so the same decision is written again, never another.
            self.commit_again(env);
        } else {
            // It certainly does not stand, and members have left meanwhile.
            self.state = State::Reserved(Barrier::after_commit(after(env.now.at, env.settings.grace)));
        }
    }

    /// The object is gone: what was reported has to be reported again, and no member is bound by a decision that is written nowhere.
    pub(super) fn object_gone(&mut self, env: &mut Env<'_>) {
        self.reported.forget();
        if let State::Decided(decided) = &mut self.state {
            decided.written_mut().lose();
        }
        self.object_shows_no_decision(env);
    }

    /// A gang in a deadlock goes as a whole, so that another can be whole. Its next incarnation begins when the last member is gone.
    pub(super) fn yield_to(&mut self, env: &mut Env<'_>, to: Arc<GangKey>) {
        if planning::deadlock(self).is_some() {
            self.leave(env, Some(to));
        }
    }

    /// A gang without members is forgotten at once.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        if let State::Over { until } = &mut self.state {
            *until = now;
            return true;
        }
        false
    }
}

/// What follows from a change.
impl Gang {
    /// Draws all conclusions.
    pub(super) fn settle(&mut self, env: &mut Env<'_>) {
        if env.synced {
            for _ in 0..MAX_STEPS {
                if !self.step(env) {
                    break;
                }
            }
            self.repeat_activation(env);
            self.activate_independent(env);
        }
        self.follow_idle_time(env);
        self.activate_outdated(env);
        let waits = status::wait_reason(self, env.now.at);
        if self.waits != waits {
            self.waits = waits;
        }
    }

    /// Follows whether devices are idle for the gang. One that has kept them idle for long and in vain waits as long.
    fn follow_idle_time(&mut self, env: &Env<'_>) {
        let awaits = match &self.state {
            State::Reserved(barrier) => !barrier.has_victims(),
            State::Decided(_) => self.surplus_ends().is_some(),
            _ => false,
        };
        if self.idle.follow_arriving(env.now.at, awaits) && matches!(self.state, State::Open) {
            self.rest(env);
        }
        self.idle.follow_kept(env.now.at, !self.orphaned().is_empty());
    }

    /// Waits for as long as devices were idle, if that was long.
    fn rest(&mut self, env: &Env<'_>) {
        if let Some(until) = self.idle.pause_after_arriving(env.now.at, env.settings) {
            self.attempts.extend_pause(until);
        }
    }

    /// What others have to know after [`Self::settle`].
    pub(super) fn snapshot(&mut self, settings: &Settings, now: Instant) -> GangSnapshot {
        let changes = self.roster.slots_mut().take_changes().into_iter();
        // A slot that keeps nothing and still exists is its pod's.
        let changes = changes.map(|(slot, reserved)| {
            let bound = reserved.is_none() && self.slots().get(slot).is_some();
            (slot, reserved, bound)
        });
        let changes = changes.collect();
        let wants_plan = self.may_ever_want_plan();
        // A gang that only waits for time to pass is updated again when it has.
        let ready = wants_plan && self.wants_plan(now);
        GangSnapshot {
            changes,
            wants_plan,
            turn: ready.then(|| self.turn()),
            considered: self.attempts.considered(),
            preempts: self.preempts(),
            may_give_back: planning::may_have_surplus(self)
                || !self.orphaned().is_empty()
                || self.slots().spares().len() > 0,
            due: self.due(settings, now),
            devices: self.slots().devices(),
            is_over: matches!(self.state, State::Over { until } if now >= until),
        }
    }

    /// One conclusion; whether there may be another.
    fn step(&mut self, env: &mut Env<'_>) -> bool {
        match &self.state {
            State::Over { .. } => {
                if self.count().alive() == 0 {
                    return false;
                }
                self.waiting_since = env.now.unix;
                self.state = State::Open;
                true
            }
            State::Restarting { again, .. } => {
                let again = *again;
                self.step_restarting(env, again)
            }
            State::Awaiting(_) => self.step_awaiting(env),
            _ if self.has_ended() => {
                self.end_incarnation(env);
                true
            }
            State::Open | State::Decided(_) if self.is_next_incarnation() => {
                self.begin_next_with_living(env);
                true
            }
            State::Open => {
                self.ungate(env);
                if self.is_bound_without_slots() {
                    self.bound_at.get_or_insert(env.now.unix);
                }
                false
            }
            State::Reserved(_) => {
                self.ungate(env);
                self.step_reserved(env)
            }
            State::Committing(_) => {
                self.ungate(env);
                false
            }
            State::Decided(_) => {
                let more = self.step_decided(env);
                if !more {
                    // Members that have just got a slot are ungated too.
                    self.ungate(env);
                }
                more
            }
        }
    }

    fn step_reserved(&mut self, env: &mut Env<'_>) -> bool {
        let valid = self.has_minimum();
        if !valid || self.is_kept_gated() {
            self.unplan();
            return true;
        }
        self.fill(env);
        // Their members are gone, and no other needs them now.
        self.roster.release_kept();
        if !self.minimum().is_met(Count::placed) || self.slots().is_empty() {
            // A member went, and its slot suits no other.
            self.unplan();
            return true;
        }
        let (ready, arrival) = (self.count().ready(), self.arrival(env.settings));
        let State::Reserved(barrier) = &mut self.state else {
            return false;
        };
        barrier.progress(env.now.at, ready, arrival, env.settings);
        if barrier.is_over(env.now, env.settings) {
            let why = match barrier.has_victims() {
                true => Failure::VictimsStayed(self.blockers.of_removal()),
                false => Failure::NotArrived {
                    arrived: ready,
                    min: self.minimum().total,
                    scheduler: self.attempts.scheduler_message(),
                },
            };
            self.give_up(env, why);
            return true;
        }
        let may_commit = !barrier.has_victims() && self.count().of(Class::Arrived) > 0;
        if may_commit && self.minimum().is_met(Count::ready) {
            self.begin_commit(env);
        }
        false
    }

    fn step_decided(&mut self, env: &mut Env<'_>) -> bool {
        // Also what was lowered while the decision was being written.
        self.lower_minimum();
        self.choose_bound_groups();
        self.release_foreign(env);
        self.fill(env);
        if self.all_evicted && self.lost_to_eviction {
            self.leave(env, None);
            return true;
        }
        if self.is_to_restart(env) {
            self.restart(env);
            return true;
        }
        if self.has_nothing_left() {
            self.undecide(env);
            return true;
        }
        self.follow_evictions(env);
        self.take_spares(env);
        self.release_extra_spares();
        let called = self.bind_aside(env);
        self.keep_or_release_lost(env);
        let short = self.is_short();
        if let State::Decided(decided) = &mut self.state
            && decided.follow_shortage(env.now.at, short, env.settings)
        {
            self.attempts.reconsider();
        }
        let satisfied = self.minimum().is_met(Count::settled);
        // Members that are just being bound are not late.
        if satisfied && !called {
            self.release_late_surplus(env);
        }
        let State::Decided(decided) = &mut self.state else {
            return false;
        };
        match decided.follow_bound(satisfied) {
            BoundChange::None => {}
            BoundChange::Bound => {
                self.bound_at.get_or_insert(env.now.unix);
                // Members beyond the minimum are planned again, in the same capacity too: the refusal was about all of them.
                self.attempts = Attempts::default();
            }
            BoundChange::Lost => {
                self.waiting_since = env.now.unix;
                // The pause until now was for members beyond the minimum as a rule, not for what is missing now.
                self.attempts.end_pause();
            }
        }
        false
    }

    /// Members of the incarnation before must be gone before those of the new one are planned: they must not mix.
    fn step_restarting(&mut self, env: &mut Env<'_>, again: Instant) -> bool {
        if self.members().old_present() == 0 {
            self.blockers.removed();
            let restarting = std::mem::replace(&mut self.state, State::Open);
            if let State::Restarting { keeps: Some(succession), .. } = restarting {
                self.begin_awaiting(env, succession);
            }
            self.settle_until = after(env.now.at, env.settings.settle);
            return true;
        }
        if env.now.at >= again {
            let old = |member: &TrackedMember| self.members().class(member) == Class::Old && member.lives();
            self.remove_pods(env, self.members().uids(old));
            let next = after(env.now.at, env.settings.requeue.saturating_mul(3));
            if let State::Restarting { again, .. } = &mut self.state {
                *again = next;
            }
        }
        false
    }

    /// When it has to be settled again, if nothing happens before.
    fn due(&self, settings: &Settings, now: Instant) -> Option<Instant> {
        let pause = self.attempts.pause().map(|(until, _)| *until);
        let mut due = vec![self.activation.due(), self.reasons.due()];
        match &self.state {
            State::Open => due.extend([pause, Some(self.settle_until)]),
            State::Reserved(barrier) => due.push(Some(barrier.until())),
            State::Committing(_) => {}
            State::Decided(decided) => due.extend([
                decided.restart_due(settings),
                pause,
                self.hold_ends(settings),
                self.surplus_ends(),
                decided.shortage_due(settings),
                decided.evictions().map(|(_, until)| until).min(),
                Some(self.settle_until),
            ]),
            State::Awaiting(_) => due.extend([self.succession_ends(settings), Some(self.settle_until)]),
            State::Restarting { again, .. } => due.push(Some(*again)),
            State::Over { until } => due.push(Some(*until)),
        }
        let ungating = self.members().first_ungating();
        due.push(ungating.map(|requested| after(requested, settings.requeue)));
        due.into_iter().flatten().filter(|due| *due > now).min()
    }

    fn release_all(&mut self) {
        self.roster.release_all();
        self.activation.clear();
    }

    /// Releases the reservation. The gang is planned again at once.
    fn unplan(&mut self) {
        self.blockers.evicted();
        self.release_all();
        self.site = GangSite::default();
        self.attempts.restart();
        self.continues = None;
        self.agreement.retain_owners(false, None);
        self.agreement.choose(None);
        self.state = State::Open;
    }

    /// Releases the reservation, and waits before the next attempt.
    fn give_up(&mut self, env: &Env<'_>, why: Failure) {
        self.unplan();
        self.attempts.fail(env.now.at, env.settings, why);
    }

    /// Gives kept slots to members that wait.
    fn fill(&mut self, env: &mut Env<'_>) {
        let filled = self.roster.fill(env.now.at);
        self.activate(env, filled);
    }

    /// Activates members that have a node to go to.
    fn activate(&mut self, env: &mut Env<'_>, uids: Vec<PodUid>) {
        self.activation.activate(env, self.roster.members_mut(), uids);
    }

    fn repeat_activation(&mut self, env: &mut Env<'_>) {
        let moves = match &self.state {
            State::Reserved(barrier) => !barrier.has_victims(),
            State::Decided(_) => true,
            _ => false,
        };
        if moves {
            self.activation.repeat(env, self.roster.members_mut());
        }
    }

    /// Activates pods that were refused as members of a gang when it turns out that they are independent.
    fn activate_independent(&mut self, env: &mut Env<'_>) {
        let are_independent = self.are_independent();
        let (members, now) = (self.roster.members_mut(), env.now.at);
        if let Some(pods) = self.reasons.independent_due(members, now, are_independent) {
            let early = activate(env, members, pods);
            self.reasons.independent_activated(now, early);
        }
    }

    /// Activates refused members that show another reason than holds, if it is time.
    fn activate_outdated(&mut self, env: &mut Env<'_>) {
        let current = status::reason_kind(self, env.now.at);
        let preempts = self.preempts();
        let members = self.roster.members_mut();
        let outdated = self.reasons.follow(members, env.now.at, current, env.synced, preempts);
        if !outdated.is_empty() {
            activate(env, members, outdated);
        }
    }

    /// Members that have arrived and left are bound without another bind call. Whether there are any.
    fn bind_aside(&mut self, env: &mut Env<'_>) -> bool {
        let aside = self.roster.members_mut().call_back(|_| true);
        let any = !aside.is_empty();
        if any {
            env.work.push(Work::Bind(aside));
        }
        any
    }

    /// Requests the removal of our scheduling gates. Once the quorum exists they all go. Once the gang is decided, members that have a slot
    /// in it, or need none, come whatever else is missing, as without gates.
    fn ungate(&mut self, env: &mut Env<'_>) {
        let all = self.has_minimum();
        if !all && self.decided().is_none() {
            return;
        }
        let in_vain = |requested| env.now.at >= after(requested, env.settings.requeue);
        let goes = |member: &TrackedMember| all || member.slot().is_some() || member.pod().shape.is_none();
        let due = self.members().to_ungate(in_vain, goes);
        for uid in &due {
            self.roster.members_mut().change(uid, |member| member.set_gate_removal(env.now.at));
        }
        if !due.is_empty() {
            env.work.push(Work::Ungate(due));
        }
    }

    /// Whether a member can arrive at a node: our gate does not keep it back, or nothing is known to keep it from being removed.
    fn may_arrive(&self, member: &TrackedMember) -> bool {
        !(member.is_gated_by_us() && member.is_gate_removal_requested() && self.blockers.keep_gates())
    }

    /// Whether a member without a slot can arrive at a node.
    fn any_may_arrive(&self) -> bool {
        let mut unplaced = self.members().unplaced().iter();
        let may_arrive = |uid: &PodUid| self.members().get(uid).is_some_and(|member| self.may_arrive(member));
        !self.blockers.keep_gates() || unplaced.any(may_arrive)
    }

    /// Too few members can arrive at a node, because our gate cannot be removed from the others. Then no slot is kept.
    fn is_kept_gated(&self) -> bool {
        if !self.blockers.keep_gates() {
            return false;
        }
        let mut by_role: BTreeMap<&Arc<str>, u32> = BTreeMap::new();
        for member in self.members().ungating() {
            *by_role.entry(&member.pod().membership.role).or_default() += 1;
        }
        self.minimum().needs_gated(&by_role)
    }

    /// Its minimum is bound and was not decided: its members need no devices, or were bound before any decision.
    fn is_bound_without_slots(&self) -> bool {
        let open = matches!(self.state, State::Open) && !self.are_independent();
        open && self.minimum().is_met(Count::began) && self.members().unplaced().is_empty()
    }
}

/// The decision.
impl Gang {
    /// Requests that the decision is written.
    fn begin_commit(&mut self, env: &mut Env<'_>) {
        *env.decisions += 1;
        let decision = Decision {
            id: format!("{}-{}-{}", env.settings.identity, env.now.unix, env.decisions),
            revision: 0,
            min: self.minimum().total,
            domain: self.site.domain.to_string(),
            reservations: self.slot_list().reservations(),
        };
        env.work.push(Work::Commit { gang: self.key.clone(), decision: decision.clone() });
        self.state = State::Committing(Commit::new(decision));
    }

    /// Requests that the same decision is written once more.
    fn commit_again(&mut self, env: &mut Env<'_>) {
        if let State::Committing(commit) = &mut self.state {
            env.work.push(Work::Commit { gang: self.key.clone(), decision: commit.repeat() });
        }
    }

    /// The decision stands.
    fn decide(&mut self) {
        let State::Committing(commit) = &self.state else {
            return;
        };
        let terms = self.agreement.working_terms().map(|terms| &**terms);
        self.state = State::Decided(Box::new(StandingDecision::new(commit.decision(), terms)));
        self.continues = None;
        self.agreement.retain_owners(true, None);
        self.bound_priority = self.members().priority();
        self.attempts.end_pause();
        let stale = self.slots().iter().filter(|(_, slot)| slot.is_stale());
        let stale: Vec<(u32, Holder)> = stale.map(|(id, slot)| (id, slot.holder().clone())).collect();
        for (id, holder) in stale {
            self.give_up_slot(id, &holder);
        }
    }

    /// The decision that stands, or that the members being deleted belong to.
    fn decision(&self) -> Option<Decision> {
        let (id, revision, min) = match &self.state {
            State::Decided(decided) => (decided.id().to_owned(), decided.written().revision(), decided.min()),
            State::Restarting { of, .. } => return of.as_deref().cloned(),
            // The next process keeps the slots by it.
            _ => {
                let of = self.succession()?.of();
                (of.id.clone(), of.revision, of.min)
            }
        };
        let (domain, mut reservations) = (self.site.domain.to_string(), self.slot_list().reservations());
        if self.succession().is_some() {
            // It is not decided which member gets which.
            for reservation in &mut reservations {
                (reservation.pod, reservation.pod_name) = (None, String::new());
            }
        }
        Some(Decision { id, revision, min, domain, reservations })
    }

    /// Whether the object shows that a member has the slot that it has.
    fn is_written(&self, uid: &PodUid) -> bool {
        let (Some(decided), Some((_, slot))) = (self.decided(), self.slot_of(uid)) else {
            return false;
        };
        decided.written().has(uid, &self.slot_list().reservation(slot))
    }

    /// The slots as they are written.
    fn slot_list(&self) -> SlotList<'_> {
        let terms = self.agreement.working_terms();
        let sliced = terms.is_some_and(|terms| terms.slice.is_some());
        SlotList { slots: self.slots(), members: self.members(), sliced }
    }

    /// Whether its status may be written now: not while the decision is, for the two would overtake one another.
    pub(super) fn may_report(&self) -> bool {
        !matches!(self.state, State::Committing(_))
    }

    /// Its status, if it differs from what was last reported.
    pub(super) fn take_status(&mut self, now: Moment, settings: &Settings) -> Option<GangStatus> {
        let mut status = status::status(self, now, settings);
        let decision = match &self.state {
            State::Decided(decided) => Some(decided.id().to_owned()),
            State::Restarting { of, .. } => of.as_ref().map(|of| of.id.clone()),
            _ => self.succession().map(|succession| succession.decision_id().to_owned()),
        };
        let version = (decision, self.slots().version());
        let same_decision = self.reported.replace(&status, version)?;
        status.decision = self.decision();
        if let (State::Decided(decided), Some(decision), false) =
            (&mut self.state, &mut status.decision, same_decision)
        {
            decided.written_mut().report(decision);
        }
        Some(status)
    }
}

/// Repair of a decided gang that loses members: the slot of a lost member is kept for its replacement, the whole gang is restarted, or the
/// slot is released. What the gang does not need for its minimum is never kept.
impl Gang {
    /// Releases slots of former bound members if others have the devices by now. Kubelet may have given a pod other devices than its
    /// grant names, and the unused ones have gone to another pod: to keep them for a replacement would grant them twice.
    fn release_foreign(&mut self, env: &Env<'_>) {
        for id in self.roster.slots_mut().take_doubtful() {
            if self.is_foreign(env, id) {
                self.roster.release(id);
            }
        }
    }

    /// Whether another slot has devices of a slot.
    fn is_foreign(&self, env: &Env<'_>, id: u32) -> bool {
        let Some(slot) = self.slots().get(id) else {
            return false;
        };
        let mut devices = slot.devices().iter().flat_map(|(_, ids)| ids);
        devices.any(|device: &DeviceId| {
            let gang = env.devices.holder(slot.node(), device);
            let mut own = self.slots().iter();
            gang.is_some_and(|gang| *gang != self.key)
                || own.any(|(other, known)| other != id && known.node() == slot.node() && known.has(device))
        })
    }

    /// Keeps the slots of lost members as long as the minimum needs them and a replacement may come; releases the others.
    fn keep_or_release_lost(&mut self, env: &mut Env<'_>) {
        let lost: Vec<u32> = self.slots().lost().collect();
        if lost.is_empty() {
            return;
        }
        self.idle.follow_kept(env.now.at, !self.orphaned().is_empty());
        let mut missing = match self.repair() {
            _ if !self.is_recreated() => 0,
            // The policy, and whether a member of a role is missing, is known with the terms.
            _ if !self.minimum().knows_roles() => u32::MAX,
            Repair::Ignore => 0,
            Repair::Hold | Repair::Restart => self.minimum().missing(Count::placed),
        };
        let facts = self.agreement.creator_facts().cloned();
        if let Some(wanted) = facts.as_ref().and_then(|facts| facts.wanted) {
            // Its controller creates no more than it wants.
            missing = missing.min(wanted.saturating_sub(self.count().alive()));
        }
        let has_failed = |rank: u32| facts.as_ref().is_some_and(|facts| facts.failed_ranks.contains(rank));
        for id in lost {
            let Some(slot) = self.slots().get(id) else {
                continue;
            };
            if slot.rank().is_some_and(has_failed) {
                self.roster.release(id);
                continue;
            }
            let expired =
                *slot.holder() == Holder::Kept && env.now.at >= self.hold_end(slot.since(), env.settings);
            if missing > 0 && !expired && !slot.is_stale() {
                missing -= 1;
            } else {
                self.roster.release(id);
            }
        }
    }

    /// Until when its reservations last if no more members arrive.
    pub(super) fn reserved_until(&self, settings: &Settings) -> Option<Instant> {
        match &self.state {
            State::Reserved(barrier) => Some(barrier.until()),
            State::Decided(_) => self.hold_ends(settings),
            State::Awaiting(_) => self.succession_ends(settings),
            _ => None,
        }
    }

    fn hold_ends(&self, settings: &Settings) -> Option<Instant> {
        let kept = self.slots().kept().iter().filter_map(|id| self.slots().get(*id));
        kept.map(|slot| self.hold_end(slot.since(), settings)).min()
    }

    /// Until when the slot of a member that was lost at `since` is kept.
    fn hold_end(&self, since: Instant, settings: &Settings) -> Instant {
        self.idle.kept_until(after(since, settings.hold), settings)
    }

    /// Members beyond the minimum that do not arrive in time lose their slots.
    fn release_late_surplus(&mut self, env: &mut Env<'_>) {
        let late: Vec<u32> = self
            .awaited()
            .take_while(|(_, ends)| env.now.at >= *ends)
            .filter_map(|(uid, _)| Some(self.slot_of(uid)?.0))
            .collect();
        if late.is_empty() {
            return;
        }
        for id in late {
            self.roster.release(id);
        }
        self.attempts.back_off(env.now.at, env.settings, Failure::LateSurplus);
        self.rest(env);
    }

    fn surplus_ends(&self) -> Option<Instant> {
        if !self.minimum().is_met(Count::settled) {
            return None;
        }
        self.awaited().next().map(|(_, ends)| ends)
    }

    /// Members that their slots wait for, and until when: the first first.
    fn awaited(&self) -> impl Iterator<Item = (&PodUid, Instant)> {
        let arrival = self.agreement.working_terms().map(|terms| terms.arrival);
        arrival.into_iter().flat_map(|arrival| {
            let awaited = self.members().awaited().inspect(|_| work::note());
            awaited.map(move |(since, uid)| (uid, after(since, arrival)))
        })
    }

    /// Whether it restarts because too few members are left. Where an object declares the minimum that may just have been lowered: the pods
    /// that went for that are seen in one watch, and the object in another.
    fn is_to_restart(&mut self, env: &Env<'_>) -> bool {
        let restarts = self.repair() == Repair::Restart && self.is_repaired();
        let lost = restarts && self.minimum().is_out_of_reach();
        let delay = self.terms_of_object().map(|_| env.settings.settle);
        match &mut self.state {
            State::Decided(decided) => decided.follow_loss(env.now.at, restarts, lost, delay),
            _ => false,
        }
    }

    /// Deletes all members, so that their controller recreates all of them.
    fn restart(&mut self, env: &mut Env<'_>) {
        let of = self.decision().map(Arc::new);
        let keeps = self.begin_succession();
        match &keeps {
            Some(_) => {
                let kept = self.site.clone();
                self.begin_incarnation_keeping_slots(true, env.now.at);
                self.site = kept;
            }
            None => self.begin_incarnation(true),
        }
        self.state = State::Restarting { again: env.now.at, of, to: None, keeps };
        self.waiting_since = env.now.unix;
    }

    /// All of it goes for another gang: as its victim, or because both are in a deadlock (`to`). Its next incarnation begins when the last
    /// member is gone; a preempting gang does not evict members without devices.
    fn leave(&mut self, env: &mut Env<'_>, to: Option<Arc<GangKey>>) {
        let of = self.decision().map(Arc::new);
        self.begin_incarnation(true);
        self.waiting_since = env.now.unix;
        let pods = self.members().uids(|member| member.lives() && !member.is_evicted());
        self.state = State::Restarting { again: after(env.now.at, env.settings.evict), of, to, keeps: None };
        self.remove_pods(env, pods);
    }

    /// No member is bound, no slot is kept, and members of its minimum are missing: they were evicted, or their nodes are gone.
    fn has_nothing_left(&self) -> bool {
        let nothing = !self.has_member_slots() && self.count().of(Class::Bound) == 0;
        nothing && !self.members().unplaced().is_empty() && self.minimum().missing(Count::settled) > 0
    }

    /// It has slots that are not spare ones.
    fn has_member_slots(&self) -> bool {
        self.slots().len() > self.slots().spares().len()
    }

    /// The members that come are planned as a whole, as they were the first time. Member by member, two such gangs could each get what the
    /// other lacks, and neither would ever run.
    fn undecide(&mut self, env: &Env<'_>) {
        if let Some(id) = self.decision_id().map(str::to_owned) {
            self.past.add(id);
        }
        let was_bound = self.bound_at.take().is_some();
        if was_bound {
            self.waiting_since = env.now.unix;
        }
        self.all_evicted = false;
        self.lost_to_eviction = false;
        self.unplan();
        self.attempts.undecide(env.now.at, env.settings, !was_bound);
    }

    /// Removes members of the incarnation before. They are deleted where the gang asked to be restarted when it loses a member. A gang that
    /// goes for another did not ask, and its budgets hold to the last.
    fn remove_pods(&self, env: &mut Env<'_>, pods: Vec<PodUid>) {
        if pods.is_empty() {
            return;
        }
        let to = match &self.state {
            State::Restarting { to, .. } => to.clone(),
            _ => None,
        };
        env.work.push(match self.repair() {
            Repair::Restart => Work::Delete { why: restart_note(&self.key, to.as_deref()), pods },
            Repair::Hold | Repair::Ignore => Work::EvictRest { pods, of: Arc::clone(&self.key), to },
        });
    }
}

/// Spare slots: reservations beyond the members, for replacements. A gang never waits for them: it is decided without those that do not fit,
/// and they are planned again once it is bound.
impl Gang {
    /// How many spare slots of each role it asks for. `None` while its terms are not known.
    fn spares_wanted(&self) -> Option<usize> {
        let terms = self.agreement.working_terms()?;
        let may_lose = self.is_repaired() && self.count().alive() > 0;
        Some(if may_lose { terms.spares as usize } else { 0 })
    }

    /// How many spare slots of a role it has.
    fn spares_of(&self, role: &str) -> usize {
        self.slots().spares().filter(|(_, slot)| **slot.role() == *role).count()
    }

    /// It is bound, and has fewer spare slots than it asks for.
    fn lacks_spares(&self) -> bool {
        let wanted = self.spares_wanted().unwrap_or_default();
        wanted > 0
            && self.decided().is_some_and(StandingDecision::was_bound)
            && !self.agreement.is_invalid()
            && self.minimum().is_met(Count::settled)
            && self.members().roles_with_slots().any(|role| self.spares_of(role) < wanted)
    }

    /// Members that the minimum lacks take spare slots, or a group of a tree of groups that is placed in part.
    fn take_spares(&mut self, env: &mut Env<'_>) {
        if self.slots().spares().len() == 0 || !self.is_short() && !self.has_tree() {
            return;
        }
        let mut taken = Vec::new();
        for uid in self.members().unplaced().clone() {
            let Some(role) = self.members().get(&uid).map(|member| member.pod().membership.role.clone())
            else {
                continue;
            };
            let minimum = self.minimum();
            let of_any = minimum.missing(Count::placed) > minimum.missing_of_roles(Count::placed);
            let of_role = minimum.missing_of(&role, Count::placed) > 0;
            let needed = of_any || of_role || minimum.is_group_in_part(&role);
            if needed && self.roster.take_spare(&uid, env.now.at) {
                taken.push(uid);
            }
        }
        self.activate(env, taken);
    }

    /// Releases spare slots that it does not ask for any more, the last ones first.
    fn release_extra_spares(&mut self) {
        let Some(wanted) = self.spares_wanted() else {
            return;
        };
        let mut counts: BTreeMap<&Arc<str>, usize> = BTreeMap::new();
        let mut extra = Vec::new();
        let minimum = self.minimum();
        for (id, slot) in self.slots().spares() {
            let count = counts.entry(slot.role()).or_default();
            *count += 1;
            let role = slot.role();
            if *count > wanted || minimum.is_role_over(role) || minimum.is_role_unneeded(role) {
                extra.push(id);
            }
        }
        for id in extra {
            self.roster.release(id);
        }
    }

    /// Pods that were lent the devices of a slot hold them, or not any more.
    pub(super) fn slot_held(
        &mut self,
        env: &mut Env<'_>,
        id: u32,
        pods: &BTreeSet<PodUid>,
        ends: Option<i64>,
    ) {
        let slot = self.slots().get(id).filter(|slot| slot.is_spare());
        let member = match slot.map(Slot::holder) {
            Some(Holder::Assigned(uid)) => uid.clone(),
            _ => return,
        };
        let State::Decided(decided) = &mut self.state else {
            return;
        };
        if pods.is_empty() {
            if decided.end_eviction(id) {
                self.blockers.evicted();
                self.activate(env, vec![member]);
            }
            return;
        }
        let new = decided.evict_from(env.now, env.settings, id, pods, ends);
        if !new.is_empty() {
            env.work.push(Work::Evict { pods: new, by: self.key.clone() });
        }
    }

    /// Gives up slots whose devices the pods that were lent them do not return in time: their members are planned again.
    fn follow_evictions(&mut self, env: &Env<'_>) {
        let State::Decided(decided) = &self.state else {
            return;
        };
        let evictions: Vec<(u32, Instant)> = decided.evictions().collect();
        for (id, until) in evictions {
            let slot = self.slots().get(id).filter(|slot| slot.is_spare());
            let holder = slot.map(|slot| slot.holder().clone());
            let waits = matches!(holder, Some(Holder::Assigned(_)));
            if waits && env.now.at < until {
                continue;
            }
            if let State::Decided(decided) = &mut self.state {
                decided.end_eviction(id);
            }
            if let Some(holder) = holder.filter(|_| waits) {
                self.give_up_slot(id, &holder);
            }
        }
    }
}
