//! The members of one gang and what each counts as. Counts and lists follow every change, so that no question walks over all members.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;

use super::agreement::Declaration;
use super::report::ReasonKind;
use super::types::{BindEnd, Member, Stage};

/// What is kept of a member.
#[derive(Debug, Clone)]
pub(super) struct TrackedMember {
    pod: Member,
    /// The incarnation of the gang in which it came: after a restart members of earlier ones do not count.
    incarnation: u32,
    /// It ended well in an earlier incarnation. It counts as long as its pod exists: a controller that recreates all pods removes it.
    carried: bool,
    /// Its slot. [`super::roster::Roster`] keeps the slot's holder in step.
    slot: Option<u32>,
    /// When it got the slot.
    assigned_at: Option<Instant>,
    /// Its slot is for a member that arrives after its siblings are bound.
    follows: bool,
    /// It has arrived at the node of its slot: the barrier does not wait for it.
    arrived: bool,
    /// It stands at the barrier. One that has arrived and left waited for its siblings as long as a bind call may take.
    at_barrier: bool,
    bind: BindState,
    /// A bind has found the pod gone before the watch has.
    gone: bool,
    /// When the removal of our scheduling gate was last requested.
    gate_removal: Option<Instant>,
    /// Filter has returned the node of its slot.
    answered: bool,
    /// When filter last refused it, if it was not activated since.
    refused_at: Option<Instant>,
    /// The kind of the reason that filter returned for the last refusal.
    reported: Option<ReasonKind>,
    /// It is a victim of another gang, which has its devices from then on.
    evicted: bool,
    /// What of it is counted among the declarations of the gang.
    declared: Option<Declaration>,
    /// A rejection by kube-scheduler that its pod still shows and that does not hold any more.
    disproved: Option<Arc<str>>,
}

/// How far the binding of a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BindState {
    /// Not begun, or failed.
    None,
    InProgress,
    /// The outcome is not known.
    Unknown,
    /// The Binding exists, as the binder reports.
    Done,
}

/// What a member counts as. Each is of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Class {
    /// Of an earlier incarnation.
    Old,
    /// It is being deleted, or has failed.
    Lost,
    /// Its declaration is not valid.
    Faulty,
    /// Kept back by scheduling gates of others.
    Foreign,
    /// kube-scheduler rejects it before it calls the extender.
    Rejected,
    /// Another scheduler places it.
    Elsewhere,
    /// Bound, and no scheduler that calls the extender has brought it.
    Stray,
    /// It exists, and has no slot.
    Waiting,
    /// It has a slot, and has not arrived.
    Coming,
    /// The same, and it cannot arrive before siblings are bound.
    Following,
    /// It exists and needs no devices.
    Light,
    /// It has arrived at the node of its slot.
    Arrived,
    /// Bound, and without devices.
    LightBound,
    Bound,
    /// Ended well.
    Completed,
}

const CLASSES: usize = 15;

impl Class {
    fn is_alive(self) -> bool {
        !matches!(self, Self::Old | Self::Lost | Self::Completed)
    }
}

impl TrackedMember {
    pub(super) fn new(pod: Member, incarnation: u32) -> Self {
        Self {
            pod,
            incarnation,
            carried: false,
            slot: None,
            assigned_at: None,
            follows: false,
            arrived: false,
            at_barrier: false,
            bind: BindState::None,
            gone: false,
            gate_removal: None,
            answered: false,
            refused_at: None,
            reported: None,
            evicted: false,
            declared: None,
            disproved: None,
        }
    }

    /// The pod, as the watch shows it.
    pub(super) fn pod(&self) -> &Member {
        &self.pod
    }

    pub(super) fn slot(&self) -> Option<u32> {
        self.slot
    }

    pub(super) fn has_arrived(&self) -> bool {
        self.arrived
    }

    pub(super) fn is_at_barrier(&self) -> bool {
        self.at_barrier
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone
    }

    pub(super) fn is_evicted(&self) -> bool {
        self.evicted
    }

    pub(super) fn was_answered(&self) -> bool {
        self.answered
    }

    pub(super) fn refused_at(&self) -> Option<Instant> {
        self.refused_at
    }

    pub(super) fn reported(&self) -> Option<&ReasonKind> {
        self.reported.as_ref()
    }

    pub(super) fn declared(&self) -> Option<&Declaration> {
        self.declared.as_ref()
    }

    /// The removal of our scheduling gate was requested.
    pub(super) fn is_gate_removal_requested(&self) -> bool {
        self.gate_removal.is_some()
    }

    /// No scheduling gate but ours keeps it back.
    pub(super) fn is_gated_by_us(&self) -> bool {
        self.pod.stage == (Stage::Gated { by: None })
    }

    /// Takes over what the watch shows. A pod that was deleted and then ended well, as programs do that handle TERM, has not done its part:
    /// it is lost like any other that is deleted.
    pub(super) fn update(&mut self, pod: Member) {
        let was_deleted = self.pod.leaving && self.pod.stage != Stage::Succeeded;
        let was_brought = self.pod.elsewhere.is_none();
        self.pod = pod;
        match self.pod.rejected == self.disproved {
            true => self.pod.rejected = None,
            false => self.disproved = None,
        }
        if was_brought && !matches!(self.pod.stage, Stage::Pending | Stage::Gated { .. }) {
            // Its scheduler calls the extender, whichever of several has bound it.
            self.pod.elsewhere = None;
        }
        if was_deleted && self.pod.stage == Stage::Succeeded {
            self.pod.stage = Stage::Failed;
        }
    }

    pub(super) fn is_of(&self, incarnation: u32) -> bool {
        self.incarnation == incarnation
    }

    pub(super) fn class(&self, incarnation: u32) -> Class {
        let light = self.pod.shape.is_none();
        let leaving = self.pod.leaving || self.gone;
        match &self.pod.stage {
            _ if self.incarnation != incarnation => Class::Old,
            Stage::Succeeded if self.pod.elsewhere.is_some() => Class::Lost,
            Stage::Succeeded => Class::Completed,
            Stage::Failed => Class::Lost,
            _ if leaving => Class::Lost,
            Stage::Bound(_) if light => Class::LightBound,
            Stage::Bound(_) if self.pod.elsewhere.is_some() => Class::Stray,
            Stage::Bound(_) => Class::Bound,
            _ if self.bind == BindState::Done => Class::Bound,
            _ if !self.pod.membership.faults.is_empty() => Class::Faulty,
            _ if self.pod.elsewhere.is_some() => Class::Elsewhere,
            Stage::Gated { by: Some(_) } => Class::Foreign,
            _ if self.pod.rejected.is_some() && !light && !self.arrived && !self.answered => Class::Rejected,
            _ if light => Class::Light,
            _ if self.slot.is_none() => Class::Waiting,
            _ if self.arrived => Class::Arrived,
            _ if self.follows => Class::Following,
            _ => Class::Coming,
        }
    }

    /// It is of this incarnation, has not ended and is not being deleted.
    pub(super) fn is_alive(&self, incarnation: u32) -> bool {
        self.class(incarnation).is_alive()
    }

    /// Its pod has not ended and is not being deleted.
    pub(super) fn lives(&self) -> bool {
        !self.pod.leaving && self.runs()
    }

    /// Its pod has not ended, though it may be terminating.
    pub(super) fn runs(&self) -> bool {
        !self.gone && !matches!(self.pod.stage, Stage::Succeeded | Stage::Failed)
    }

    /// Its Binding may exist or come to exist: its slot cannot be given to another.
    pub(super) fn is_pinned(&self) -> bool {
        self.bind != BindState::None || matches!(self.pod.stage, Stage::Bound(_))
    }

    /// It has arrived and left the barrier: it waits for its siblings in kube-scheduler.
    pub(super) fn is_aside(&self) -> bool {
        self.arrived && !self.at_barrier && !self.is_pinned()
    }

    /// The node where its pod is bound.
    pub(super) fn bound_node(&self) -> Option<&gantry_api::NodeName> {
        match &self.pod.stage {
            Stage::Bound(node) => Some(node),
            _ => None,
        }
    }

    /// What places it, if it does not count because that is no scheduler that calls the extender.
    fn other_scheduler(&self, class: Class) -> Option<&Arc<str>> {
        let by = self.pod.elsewhere.as_ref();
        by.filter(|_| matches!(class, Class::Elsewhere | Class::Stray))
    }

    /// It takes devices, and counts.
    fn sets_priority(&self, class: Class) -> bool {
        self.pod.shape.is_some() && !matches!(class, Class::Elsewhere | Class::Stray)
    }

    /// Since when its slot waits for it, if it does.
    fn awaited_since(&self, class: Class) -> Option<Instant> {
        let awaited = matches!(class, Class::Coming | Class::Following) && !self.is_pinned();
        self.assigned_at.filter(|_| awaited)
    }

    fn devices(&self) -> u64 {
        self.pod.asks.iter().map(|(_, count)| u64::from(*count)).sum()
    }

    pub(super) fn assign(&mut self, slot: u32, follows: bool, now: Instant) {
        self.slot = Some(slot);
        self.assigned_at = Some(now);
        self.follows = follows;
        self.leave();
        self.answered = false;
    }

    pub(super) fn unassign(&mut self) {
        self.slot = None;
        self.leave();
        self.answered = false;
    }

    pub(super) fn arrive(&mut self) {
        self.arrived = true;
        self.at_barrier = true;
    }

    /// It has waited at the barrier as long as a bind call may take. It counts as arrived all the same.
    pub(super) fn leave_barrier(&mut self) {
        self.at_barrier = false;
    }

    /// It has to arrive again.
    pub(super) fn leave(&mut self) {
        self.arrived = false;
        self.at_barrier = false;
    }

    /// It arrives and is bound from here on.
    pub(super) fn begin_bind(&mut self) {
        self.arrive();
        if matches!(self.bind, BindState::None | BindState::Unknown) {
            self.bind = BindState::InProgress;
        }
    }

    pub(super) fn end_bind(&mut self, outcome: BindEnd) {
        match outcome {
            BindEnd::Bound => self.bind = BindState::Done,
            BindEnd::Unsure => self.bind = BindState::Unknown,
            BindEnd::Failed | BindEnd::NotSent => {
                self.bind = BindState::None;
                self.leave();
            }
            BindEnd::Gone => {
                self.bind = BindState::None;
                self.gone = true;
            }
        }
    }

    /// kube-scheduler does not reject it any more.
    pub(super) fn accept(&mut self) {
        self.disproved = self.pod.rejected.take();
    }

    pub(super) fn set_answered(&mut self) {
        self.answered = true;
        self.refused_at = None;
    }

    pub(super) fn set_refused(&mut self, at: Option<Instant>) {
        self.refused_at = at;
    }

    pub(super) fn set_reported(&mut self, kind: Option<ReasonKind>) {
        self.reported = kind;
    }

    pub(super) fn set_gate_removal(&mut self, at: Instant) {
        self.gate_removal = Some(at);
    }

    pub(super) fn set_evicted(&mut self, evicted: bool) {
        self.evicted = evicted;
    }

    pub(super) fn set_declared(&mut self, declared: Option<Declaration>) {
        self.declared = declared;
    }

    /// Its gang begins this incarnation with it.
    pub(super) fn set_incarnation(&mut self, incarnation: u32) {
        self.incarnation = incarnation;
    }
}

/// How many members there are of each class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Count([u32; CLASSES]);

impl Count {
    fn add(&mut self, class: Class) {
        self.0[class as usize] += 1;
    }

    fn remove(&mut self, class: Class) {
        let count = &mut self.0[class as usize];
        *count = count.saturating_sub(1);
    }

    pub(super) fn of(&self, class: Class) -> u32 {
        self.0[class as usize]
    }

    /// Members that exist and do not count, for a reason that may pass.
    pub(super) fn kept_back(&self) -> u32 {
        self.of(Class::Faulty) + self.of(Class::Elsewhere) + self.withheld()
    }

    /// Members that exist and that a scheduling gate or kube-scheduler keeps from arriving.
    pub(super) fn withheld(&self) -> u32 {
        self.of(Class::Foreign) + self.of(Class::Rejected)
    }

    /// Members that count towards the quorum because they exist.
    pub(super) fn exist(&self) -> u32 {
        self.of(Class::Waiting) + self.placed()
    }

    /// Members that have a slot or need none.
    pub(super) fn placed(&self) -> u32 {
        self.of(Class::Coming) + self.ready()
    }

    /// Members with a slot, those that are bound among them.
    pub(super) fn with_slots(&self) -> u32 {
        [Class::Coming, Class::Following, Class::Arrived, Class::Bound]
            .map(|class| self.of(class))
            .iter()
            .sum()
    }

    /// Members for which the barrier does not wait.
    pub(super) fn ready(&self) -> u32 {
        self.of(Class::Arrived) + self.of(Class::Following) + self.settled()
    }

    /// Members that are as good as bound.
    pub(super) fn settled(&self) -> u32 {
        self.of(Class::Light) + self.began()
    }

    /// Members that are bound, or have ended well.
    pub(super) fn began(&self) -> u32 {
        self.bound() + self.of(Class::Completed)
    }

    pub(super) fn bound(&self) -> u32 {
        self.of(Class::LightBound) + self.of(Class::Bound)
    }

    /// Members of this incarnation that have not ended and are not being deleted.
    pub(super) fn alive(&self) -> u32 {
        self.0.iter().sum::<u32>() - self.of(Class::Old) - self.of(Class::Lost) - self.of(Class::Completed)
    }
}

/// All members of a gang.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    all: BTreeMap<PodUid, TrackedMember>,
    /// The incarnation that the gang is in.
    incarnation: u32,
    /// Whether it continues the work of the incarnation before.
    continues: bool,
    total: Count,
    by_role: BTreeMap<Arc<str>, Count>,
    /// By the UID of the controller.
    by_controller: BTreeMap<Option<Arc<str>>, ControllerPods>,
    /// The most that were alive or had ended well at a time, in this incarnation.
    most: u32,
    /// Priorities of members that take devices, and how many have each. Others cannot raise the priority of the gang: a pod without
    /// devices costs nothing, and its devices would be those of others.
    priorities: BTreeMap<i32, u32>,
    /// Members that are placed by other means, by what places them.
    elsewhere: BTreeMap<Arc<str>, u32>,
    /// Members that exist, need devices, and have no slot.
    unplaced: BTreeSet<PodUid>,
    /// Devices that unplaced members ask for.
    unplaced_devices: u64,
    /// Members of earlier incarnations with pods that exist and have not ended.
    old_present: u32,
    /// Members with a slot that are neither bound nor lost.
    on_the_way: BTreeSet<PodUid>,
    /// Those of them that have arrived and left ([`TrackedMember::is_aside`]).
    aside: BTreeSet<PodUid>,
    /// Those of them that their slots wait for, and since when.
    awaited: BTreeSet<(Instant, PodUid)>,
    /// Members that only our gate keeps back; its removal was not requested.
    gated: BTreeSet<PodUid>,
    /// Members with a requested removal of the gate, and when.
    ungating: BTreeSet<(Instant, PodUid)>,
}

/// What has become of the members of one controller, in this incarnation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ControllerPods {
    alive: u32,
    completed: u32,
}

impl Members {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&TrackedMember> {
        self.all.get(uid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &TrackedMember> {
        self.all.values()
    }

    /// The UIDs of the members for which `is` holds.
    pub(super) fn uids(&self, mut is: impl FnMut(&TrackedMember) -> bool) -> Vec<PodUid> {
        let found = self.all.values().filter(|member| is(member));
        found.map(|member| member.pod.uid.clone()).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn incarnation(&self) -> u32 {
        self.incarnation
    }

    pub(super) fn class(&self, member: &TrackedMember) -> Class {
        member.class(self.incarnation)
    }

    /// No pod of this incarnation is left.
    pub(super) fn is_abandoned(&self) -> bool {
        self.all.values().all(|member| !member.is_of(self.incarnation))
    }

    pub(super) fn count(&self) -> &Count {
        &self.total
    }

    pub(super) fn count_of(&self, role: &str) -> Count {
        self.by_role.get(role).copied().unwrap_or_default()
    }

    /// How many of each role have ended well; members without a role are left out.
    pub(super) fn completed_by_role(&self) -> BTreeMap<String, u32> {
        let roles = self.by_role.iter().map(|(role, count)| (role.to_string(), count.of(Class::Completed)));
        roles.filter(|(role, completed)| !role.is_empty() && *completed > 0).collect()
    }

    /// The roles of members that have slots.
    pub(super) fn roles_with_slots(&self) -> impl Iterator<Item = &Arc<str>> {
        let roles = self.by_role.iter().filter(|(_, count)| count.with_slots() > 0);
        roles.map(|(role, _)| role)
    }

    /// The most that were alive or had ended well at a time.
    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// There were at least so many.
    pub(super) fn raise_most(&mut self, count: u32) {
        self.most = self.most.max(count);
    }

    /// The controllers of living members are known, and differ from those of members that have ended well.
    pub(super) fn have_new_controllers(&self) -> bool {
        let mut controllers = self.by_controller.iter();
        controllers.all(|(uid, made)| made.alive == 0 || uid.is_some() && made.completed == 0)
    }

    /// No controller of a living member is known.
    pub(super) fn have_no_controllers(&self) -> bool {
        let mut controllers = self.by_controller.iter();
        controllers.all(|(uid, made)| made.alive == 0 || uid.is_none())
    }

    /// Living members were created after all that have ended well and still exist.
    pub(super) fn came_after_completed(&self) -> bool {
        let completed = |member: &&TrackedMember| self.class(member) == Class::Completed;
        let last = self.all.values().filter(completed).map(|member| member.pod.created).max();
        let mut alive = self.all.values().filter(|member| member.is_alive(self.incarnation));
        alive.all(|member| Some(member.pod.created) >= last)
    }

    /// The highest priority of members that take devices; 0 if none does.
    pub(super) fn priority(&self) -> i32 {
        self.priorities.keys().next_back().copied().unwrap_or_default()
    }

    /// The first fault of a member's declaration.
    pub(super) fn first_fault(&self) -> Option<String> {
        let mut faulty = self.all.values().filter(|member| self.class(member) == Class::Faulty);
        let member = faulty.next()?;
        let fault = member.pod.membership.faults.first()?;
        Some(format!("pod {}: {fault}", member.pod.name))
    }

    /// The first scheduling gate that keeps a member back.
    pub(super) fn first_gate(&self) -> Option<&Arc<str>> {
        self.all.values().find_map(|member| match &member.pod.stage {
            Stage::Gated { by: Some(gate) } if self.class(member) == Class::Foreign => Some(gate),
            _ => None,
        })
    }

    /// The first member that kube-scheduler rejects, with the reason it gives.
    pub(super) fn first_rejected(&self) -> Option<(&Arc<str>, &Arc<str>)> {
        let mut rejected = self.all.values().filter(|member| self.class(member) == Class::Rejected);
        rejected.find_map(|member| Some((&member.pod.name, member.pod.rejected.as_ref()?)))
    }

    /// The schedulers that place members and do not call the extender, and how many each.
    pub(super) fn elsewhere(&self) -> impl Iterator<Item = (&str, u32)> {
        self.elsewhere.iter().map(|(by, count)| (&**by, *count))
    }

    pub(super) fn unplaced(&self) -> &BTreeSet<PodUid> {
        &self.unplaced
    }

    pub(super) fn unplaced_devices(&self) -> u64 {
        self.unplaced_devices
    }

    pub(super) fn on_the_way(&self) -> &BTreeSet<PodUid> {
        &self.on_the_way
    }

    /// Members that their slots wait for, and since when: the longest wait first.
    pub(super) fn awaited(&self) -> impl Iterator<Item = (Instant, &PodUid)> {
        self.awaited.iter().map(|(since, uid)| (*since, uid))
    }

    /// Makes members that have arrived and left arrive again, those with slots for which `of` holds. Returns them.
    pub(super) fn call_back(&mut self, of: impl Fn(u32) -> bool) -> Vec<PodUid> {
        let slot = |uid: &PodUid| self.all.get(uid).and_then(|member| member.slot);
        let aside = self.aside.iter().filter(|uid| slot(uid).is_some_and(&of));
        let aside: Vec<PodUid> = aside.cloned().collect();
        for uid in &aside {
            self.change(uid, TrackedMember::leave);
        }
        aside
    }

    /// Members with a gate of ours that has to go, if `goes`: its removal was not requested, or `in_vain`.
    pub(super) fn to_ungate(
        &self,
        in_vain: impl Fn(Instant) -> bool,
        goes: impl Fn(&TrackedMember) -> bool,
    ) -> Vec<PodUid> {
        let requested = self.ungating.iter().take_while(|(at, _)| in_vain(*at));
        let due = self.gated.iter().chain(requested.map(|(_, uid)| uid));
        let due = due.filter(|uid| self.all.get(*uid).is_some_and(&goes));
        due.cloned().collect()
    }

    /// Members that still have the gate after its removal was requested.
    pub(super) fn ungating(&self) -> impl Iterator<Item = &TrackedMember> {
        self.ungating.iter().filter_map(|(_, uid)| self.all.get(uid))
    }

    /// When the removal of a gate that is still there was first requested.
    pub(super) fn first_ungating(&self) -> Option<Instant> {
        self.ungating.first().map(|(at, _)| *at)
    }

    pub(super) fn old_present(&self) -> u32 {
        self.old_present
    }

    /// Adds a member; one with the same UID is replaced.
    pub(super) fn insert(&mut self, member: TrackedMember) {
        self.take(&member.pod.uid.clone());
        self.enter(&member);
        self.all.insert(member.pod.uid.clone(), member);
    }

    /// Changes a member.
    pub(super) fn change(&mut self, uid: &PodUid, change: impl FnOnce(&mut TrackedMember)) {
        if let Some(mut member) = self.take(uid) {
            change(&mut member);
            self.enter(&member);
            self.all.insert(uid.clone(), member);
        }
    }

    /// Removes a member. One that has ended well goes on counting: it has done its part.
    pub(super) fn remove(&mut self, uid: &PodUid) -> Option<TrackedMember> {
        let member = self.take(uid)?;
        if self.class(&member) == Class::Completed && !member.carried {
            self.complete(&member.pod.membership.role);
            self.count_made(&member.pod.membership.made_by, Class::Completed, 1);
        }
        Some(member)
    }

    /// Counts a member that has ended well; its pod no longer exists.
    pub(super) fn complete(&mut self, role: &Arc<str>) {
        self.total.add(Class::Completed);
        self.by_role.entry(role.clone()).or_default().add(Class::Completed);
    }

    /// Counts the members that had ended well when an earlier process wrote the status: `completed` in all, and of each role as many as
    /// `by_role` states. Of those some have pods and are counted already, but none that has ended `since`: it had a reservation then. The
    /// total is limited to `most`, so that a forged number costs little time.
    pub(super) fn complete_before(
        &mut self,
        completed: u32,
        by_role: &BTreeMap<String, u32>,
        since: &BTreeSet<&PodUid>,
        most: u32,
    ) {
        let mut counted: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        for (uid, member) in &self.all {
            if self.class(member) == Class::Completed && !since.contains(uid) {
                *counted.entry(Arc::clone(&member.pod.membership.role)).or_default() += 1;
            }
        }
        let sum =
            |counts: &mut dyn Iterator<Item = &u32>| counts.fold(0, |sum: u32, of| sum.saturating_add(*of));
        let without = ("", completed.saturating_sub(sum(&mut by_role.values())));
        let mut left = completed.min(most).saturating_sub(sum(&mut counted.values()));
        for (role, count) in by_role.iter().map(|(role, count)| (role.as_str(), *count)).chain([without]) {
            let missing = count.saturating_sub(counted.get(role).copied().unwrap_or_default()).min(left);
            left -= missing;
            let role: Arc<str> = role.into();
            for _ in 0..missing {
                self.complete(&role);
            }
        }
    }

    /// Begins a new incarnation: of the present members none counts any more, except, if the gang `continues`, those that have ended well.
    pub(super) fn begin_incarnation(&mut self, continues: bool) {
        let before = self.incarnation;
        let all = std::mem::take(&mut self.all);
        *self = Self { incarnation: before + 1, continues, ..Self::default() };
        for (uid, mut member) in all {
            if continues && member.class(before) == Class::Completed {
                member.incarnation = self.incarnation;
                member.carried = true;
            }
            member.leave();
            member.declared = None;
            self.enter(&member);
            self.all.insert(uid, member);
        }
    }

    /// Carries over a member of the incarnation before that turns out to have ended well before it was deleted, as those are carried over
    /// of which that was known in time.
    pub(super) fn carry_late(&mut self, uid: &PodUid) {
        let incarnation = self.incarnation;
        let is_late = |member: &TrackedMember| {
            let ended = member.pod.stage == Stage::Succeeded && !member.pod.leaving && !member.gone;
            ended && member.incarnation.saturating_add(1) == incarnation
        };
        if self.continues && self.get(uid).is_some_and(is_late) {
            self.change(uid, |member| {
                member.incarnation = incarnation;
                member.carried = true;
            });
        }
    }

    /// One more, or one less, of the members of one controller.
    fn count_made(&mut self, controller: &Option<Arc<str>>, class: Class, change: i32) {
        if !class.is_alive() && class != Class::Completed {
            return;
        }
        let made = match self.by_controller.get_mut(controller) {
            Some(made) => made,
            None => self.by_controller.entry(controller.clone()).or_default(),
        };
        let count = match class {
            Class::Completed => &mut made.completed,
            _ => &mut made.alive,
        };
        *count = count.saturating_add_signed(change);
        if *made == ControllerPods::default() {
            self.by_controller.remove(controller);
        }
    }

    fn take(&mut self, uid: &PodUid) -> Option<TrackedMember> {
        let member = self.all.remove(uid)?;
        let class = self.class(&member);
        self.total.remove(class);
        self.count_made(&member.pod.membership.made_by, class, -1);
        if let Some(count) = self.by_role.get_mut(&member.pod.membership.role) {
            count.remove(class);
        }
        if member.sets_priority(class) {
            remove_one(&mut self.priorities, &member.pod.priority);
        }
        if let Some(by) = member.other_scheduler(class) {
            remove_one(&mut self.elsewhere, by);
        }
        if self.unplaced.remove(uid) {
            self.unplaced_devices = self.unplaced_devices.saturating_sub(member.devices());
        }
        self.on_the_way.remove(uid);
        self.aside.remove(uid);
        if let Some(since) = member.awaited_since(class) {
            self.awaited.remove(&(since, uid.clone()));
        }
        self.gated.remove(uid);
        if let Some(requested) = member.gate_removal {
            self.ungating.remove(&(requested, uid.clone()));
        }
        if class == Class::Old && member.runs() {
            self.old_present = self.old_present.saturating_sub(1);
        }
        Some(member)
    }

    fn enter(&mut self, member: &TrackedMember) {
        let class = self.class(member);
        let uid = &member.pod.uid;
        self.total.add(class);
        self.raise_most(self.total.alive() + self.total.of(Class::Completed));
        self.count_made(&member.pod.membership.made_by, class, 1);
        self.by_role.entry(member.pod.membership.role.clone()).or_default().add(class);
        if member.sets_priority(class) {
            *self.priorities.entry(member.pod.priority).or_default() += 1;
        }
        if let Some(by) = member.other_scheduler(class) {
            *self.elsewhere.entry(by.clone()).or_default() += 1;
        }
        match class {
            Class::Waiting => {
                self.unplaced.insert(uid.clone());
                self.unplaced_devices = self.unplaced_devices.saturating_add(member.devices());
            }
            Class::Coming | Class::Following | Class::Arrived => {
                self.on_the_way.insert(uid.clone());
                if member.is_aside() {
                    self.aside.insert(uid.clone());
                }
                if let Some(since) = member.awaited_since(class) {
                    self.awaited.insert((since, uid.clone()));
                }
            }
            _ => {}
        }
        let counts = matches!(
            class,
            Class::Waiting | Class::Coming | Class::Following | Class::Arrived | Class::Light
        );
        if counts && member.is_gated_by_us() {
            match member.gate_removal {
                None => self.gated.insert(uid.clone()),
                Some(at) => self.ungating.insert((at, uid.clone())),
            };
        }
        if class == Class::Old && member.runs() {
            self.old_present += 1;
        }
    }
}

/// Counts one less; what is not counted any more is removed.
fn remove_one<K: Ord>(counts: &mut BTreeMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(key);
        }
    }
}
