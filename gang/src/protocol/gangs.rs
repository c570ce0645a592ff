//! All gangs: finds the gang that an event is about, lets it draw its conclusions, and collects what comes of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{GangStatus, PodUid, names};

use super::event::{Effects, GangEvent, OfferedNodes, Reply};
use super::gang::{Continuations, End, Gang, View};
use super::members::TrackedMember;
use super::objects::{KnownObject, ObjectName, Objects, object_name};
use super::owners::Owners;
use super::plan_queue::{PlanQueue, Turn};
use super::reasons::{Refusal, WaitReason};
use super::slots::ReservedDevices;
use super::types::{
    Answer, Arrival, Member, Moment, Object, Placement, PlanRequest, Settings, SlotChange, Stage,
    WatchedOwner, Work,
};
use super::{Env, after};
use crate::key::GangKey;
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef};
use crate::terms::Fault;

/// The state machine of all gangs. Its head, [`super`], lists what always holds.
#[derive(Debug, Clone)]
pub struct Gangs {
    settings: Settings,
    synced: bool,
    gangs: BTreeMap<Arc<GangKey>, Gang>,
    of_pod: HashMap<PodUid, Arc<GangKey>>,
    owners: Owners,
    objects: Objects,
    queue: PlanQueue,
    devices: ReservedDevices,
    victims: Victims,
    timers: Timers,
    /// Gangs over the limit, in the order of their names: they are not valid until others are over.
    over_limit: BTreeSet<Arc<GangKey>>,
    /// Gangs within the limit, by namespace.
    planned_of: BTreeMap<Arc<str>, usize>,
    /// Gangs that may have surplus or orphaned slots to give back.
    may_give_back: BTreeSet<Arc<GangKey>>,
    /// Gangs with a decision of an earlier process that is about no member yet.
    deferred: BTreeSet<Arc<GangKey>>,
    /// Gangs with a status that may have changed.
    dirty: BTreeSet<Arc<GangKey>>,
    clock: Option<Moment>,
    decisions: u64,
    continuations: Continuations,
    /// Gangs with slots that are kept for their next incarnation, and gangs that are over and kept some for long.
    awaiting: BTreeSet<Arc<GangKey>>,
    work: Vec<Work>,
    slot_changes: Vec<SlotChange>,
}

/// A gang in a deadlock, to look at: decided, and short of its minimum for long though all its members exist. Each such gang may hold what
/// another lacks. One that goes as a whole lets another be whole.
#[derive(Clone)]
pub struct DeadlockedGang<'a> {
    pub gang: View<'a>,
    /// What would make it whole: all that it lacks, or the deadlock stays.
    pub wanted: PlanRequest,
    /// It would not be whole on an empty cluster.
    pub hopeless: bool,
}

/// A member that was put into its gang.
struct JoinedMember {
    gang: Arc<GangKey>,
    /// The name of the gang's object, if the gang is new.
    new: Option<ObjectName>,
    /// The gang that it was in before.
    left: Option<Arc<GangKey>>,
}

/// The victims of gangs that preempt.
#[derive(Debug, Clone, Default)]
struct Victims {
    by_gang: BTreeMap<Arc<GangKey>, Vec<PodUid>>,
}

impl Victims {
    /// The gangs that a pod is a victim of.
    fn preemptors(&self, uid: &PodUid) -> Vec<Arc<GangKey>> {
        let gangs = self.by_gang.iter().filter(|(_, victims)| victims.contains(uid));
        gangs.map(|(key, _)| Arc::clone(key)).collect()
    }
}

/// When each gang is settled again, and the devices that it held when it was settled last.
#[derive(Debug, Clone, Default)]
struct Timers {
    queue: BTreeSet<(Instant, Arc<GangKey>)>,
    of_gang: HashMap<Arc<GangKey>, (Option<Instant>, u64)>,
}

impl Timers {
    /// Sets the timer of a gang, and the devices that it holds. Returns those that it held before.
    fn set(&mut self, key: &Arc<GangKey>, due: Option<Instant>, devices: u64) -> u64 {
        let before = self.of_gang.insert(key.clone(), (due, devices));
        let (was_due, held) = before.unwrap_or_default();
        if was_due != due {
            if let Some(was_due) = was_due {
                self.queue.remove(&(was_due, key.clone()));
            }
            if let Some(due) = due {
                self.queue.insert((due, key.clone()));
            }
        }
        held
    }

    fn remove(&mut self, key: &Arc<GangKey>) {
        if let Some((Some(due), _)) = self.of_gang.remove(key) {
            self.queue.remove(&(due, key.clone()));
        }
    }

    fn due(&self, now: Instant) -> Vec<Arc<GangKey>> {
        let due = self.queue.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, key)| key.clone()).collect()
    }
}

impl Gangs {
    /// No gangs.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            synced: false,
            gangs: BTreeMap::new(),
            of_pod: HashMap::new(),
            owners: Owners::default(),
            objects: Objects::default(),
            queue: PlanQueue::default(),
            devices: ReservedDevices::default(),
            victims: Victims::default(),
            timers: Timers::default(),
            over_limit: BTreeSet::new(),
            planned_of: BTreeMap::new(),
            may_give_back: BTreeSet::new(),
            deferred: BTreeSet::new(),
            dirty: BTreeSet::new(),
            clock: None,
            decisions: 0,
            continuations: Continuations::default(),
            awaiting: BTreeSet::new(),
            work: Vec::new(),
            slot_changes: Vec::new(),
        }
    }

    /// The same, with counts of an earlier state machine of this process.
    #[must_use]
    pub fn counting_from(mut self, continuations: Continuations) -> Self {
        self.continuations = continuations;
        self
    }

    /// Something has happened.
    pub fn handle(&mut self, now: Moment, event: GangEvent<'_>) -> Effects {
        self.clock = Some(now);
        #[cfg(feature = "observer")]
        super::observer::handled(&event);
        let reply = self.dispatch(now, event);
        Effects {
            reply,
            slot_changes: std::mem::take(&mut self.slot_changes),
            work: std::mem::take(&mut self.work),
        }
    }

    fn dispatch(&mut self, now: Moment, event: GangEvent<'_>) -> Reply {
        match event {
            GangEvent::Synced => self.sync(now),
            GangEvent::Tick => self.tick(now),
            GangEvent::MemberSeen(member) => self.member_seen(now, member),
            GangEvent::MemberGone { pod } => {
                self.member_gone(now, pod);
                self.follow_deferred(now);
            }
            GangEvent::OwnerSeen { owner, facts } => self.owner_seen(now, owner, facts),
            GangEvent::ObjectSeen { namespace, name, object } => {
                self.object_seen(now, &(namespace.into(), name.into()), *object);
            }
            GangEvent::ObjectGone { namespace, name } => {
                self.object_gone(now, &(namespace.into(), name.into()));
            }
            GangEvent::Planned { gang, result } => self.planned(now, gang, result),
            GangEvent::Filter { pod, offered } => return Reply::Answer(self.filter(now, pod, offered)),
            GangEvent::Arrive { pod, node } => {
                let mut arrival = Arrival::Single;
                self.of_member(now, pod, |gang, env| {
                    if !gang.is_independent(pod) {
                        arrival = gang.arrive(env, pod, node);
                    }
                });
                return Reply::Arrival(arrival);
            }
            GangEvent::BarrierTimeout { pod } => {
                self.of_member(now, pod, |gang, env| gang.time_out(env, pod));
            }
            GangEvent::Disconnected { pod } => {
                self.of_member(now, pod, |gang, env| gang.disconnect(env, pod));
            }
            GangEvent::Committed { gang, decision, result } => {
                self.of_gang(now, gang, |gang, env| gang.committed(env, decision, result));
            }
            GangEvent::BindEnded { pod, outcome } => {
                self.of_member(now, pod, |gang, env| gang.end_bind(env, pod, outcome));
            }
            GangEvent::NodeLost { node } => {
                for key in self.devices.gangs_on(node) {
                    self.with(now, &key, |gang, env| {
                        gang.lose_slots(env, &|_, slot| slot.node() == node);
                    });
                }
            }
            GangEvent::SlotsLost { gang, slots } => {
                self.of_gang(now, gang, |gang, env| gang.lose_slots(env, &|id, _| slots.contains(&id)));
            }
            GangEvent::CapacityShrunk { gang, slots } => {
                self.of_gang(now, gang, |gang, env| gang.doubt_arrivals(env, slots));
            }
            GangEvent::VictimGone { pod } => {
                for key in self.victims.preemptors(pod) {
                    self.with(now, &key, |gang, env| gang.victim_gone(env, pod));
                }
            }
            GangEvent::VictimTerminating { pod, by } => {
                for key in self.victims.preemptors(pod) {
                    let gang = self.gangs.get_mut(&key);
                    if gang.is_some_and(|gang| gang.victim_terminates(pod, by)) {
                        self.settle(now, &key);
                    }
                }
            }
            GangEvent::SlotHeld { gang, slot, pods, ends } => {
                self.of_gang(now, gang, |gang, env| gang.slot_held(env, slot, pods, ends));
            }
            GangEvent::ReleaseSurplus { gang, slots } => {
                let mut released = 0;
                self.of_gang(now, gang, |gang, _| released = gang.release_surplus(slots));
                return Reply::Released(released);
            }
            GangEvent::ReleaseOrphaned { gang, slots, to } => {
                let mut released = 0;
                self.of_gang(now, gang, |gang, _| released = gang.release_orphaned(slots, to));
                return Reply::Released(released);
            }
            GangEvent::YieldTo { gang, to } => {
                self.of_gang(now, gang, |gang, env| gang.yield_to(env, Arc::new(to.clone())));
            }
            GangEvent::MembersSlow { gang, members } => {
                self.of_gang(now, gang, |gang, _| gang.set_slow_members(members));
            }
            GangEvent::Blocked { gang, blocker, why } => {
                self.of_gang(now, gang, |gang, _| gang.set_blocked(blocker, why));
            }
            GangEvent::SchedulerMessage { pod, message } => {
                if let Some(gang) = self.of_pod.get(pod).and_then(|key| self.gangs.get_mut(key)) {
                    gang.set_scheduler_message(message);
                }
            }
        }
        Reply::None
    }

    /// Lets the gang of a member act.
    fn of_member(&mut self, now: Moment, uid: &PodUid, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        if let Some(key) = self.of_pod.get(uid).cloned() {
            self.with(now, &key, act);
        }
    }

    /// Lets a gang act.
    fn of_gang(&mut self, now: Moment, gang: &GangKey, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        if let Some((key, _)) = self.gangs.get_key_value(gang) {
            let key = Arc::clone(key);
            self.with(now, &key, act);
        }
    }

    fn with(&mut self, now: Moment, key: &Arc<GangKey>, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        if let Some((gang, mut env)) = self.with_env(now, key) {
            act(gang, &mut env);
            self.settle(now, key);
        }
    }

    /// A gang and its environment.
    fn with_env(&mut self, now: Moment, key: &GangKey) -> Option<(&mut Gang, Env<'_>)> {
        let gang = self.gangs.get_mut(key)?;
        let env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            devices: &self.devices,
            decisions: &mut self.decisions,
            work: &mut self.work,
            continuations: &mut self.continuations,
        };
        Some((gang, env))
    }

    fn sync(&mut self, now: Moment) {
        if std::mem::replace(&mut self.synced, true) {
            return;
        }
        for key in self.objects.continued() {
            self.add_gang(now, &key);
        }
        for name in self.objects.names_by_age() {
            self.follow_object(now, &name);
        }
        self.objects.note_strays(now.at);
        self.delete_strays(now);
    }

    fn tick(&mut self, now: Moment) {
        for key in self.timers.due(now.at) {
            self.settle(now, &key);
        }
        self.owners.forget_unused();
        // The last pod that a decision waited for may be gone.
        self.follow_deferred(now);
        self.delete_strays(now);
    }

    /// When [`GangEvent::Tick`] is due, if nothing else happens before.
    pub fn next_due(&self) -> Option<Instant> {
        let timers = self.timers.queue.first().map(|(at, _)| *at);
        timers.into_iter().chain(self.objects.strays_due()).min()
    }

    fn filter(&mut self, now: Moment, uid: &PodUid, offered: OfferedNodes<'_>) -> Answer {
        let Some(key) = self.of_pod.get(uid).cloned() else {
            return Answer::Single;
        };
        // kube-scheduler calls only for pods that it has not rejected.
        if self.gangs.get(&key).is_some_and(|gang| gang.rejects(uid)) {
            self.of_member(now, uid, |gang, _| gang.accept(uid));
        }
        let found = self.with_env(now, &key);
        let Some((gang, mut env)) = found.filter(|(gang, _)| !gang.is_independent(uid)) else {
            return Answer::Single;
        };
        let before = gang.version();
        let mut answer = gang.answer(&mut env, uid, offered.0);
        if before != gang.version() {
            self.settle(now, &key);
            let gang = self.gangs.get(&key);
            let placeless =
                gang.filter(|gang| matches!(answer, Answer::Wait(_)) && gang.slot_of(uid).is_none());
            answer = placeless.map_or(answer, |gang| Answer::Wait(gang.waits().clone()));
        }
        if let Answer::Wait(why) = &answer
            && let Some(gang) = self.gangs.get_mut(&key)
        {
            gang.refused_with(uid, why, now.at);
        }
        answer
    }

    fn member_seen(&mut self, now: Moment, member: Member) {
        if let Some(joined) = self.join(now, member) {
            self.joined(now, joined);
        }
    }

    /// Puts a member, as it is now, into its gang. `None` if it has none.
    fn join(&mut self, now: Moment, mut member: Member) -> Option<JoinedMember> {
        if let Some(settled) = self.owners.settle(&member.membership) {
            member.membership = Arc::new(settled);
        }
        if let Stage::Gated { by: by @ None } = &mut member.stage
            && !self.settings.gates
        {
            *by = Some(names::GANG_GATE.into());
        }
        let mut left = None;
        if let Some(before) = self.of_pod.get(&member.uid).cloned()
            && *before != member.membership.key
        {
            match self.tracked(&member.uid) {
                // A pod that has a slot stays what it was when it got it. One that an earlier process bound goes into the gang that its
                // owner gives it once that is read.
                Some(known)
                    if known.slot().is_some()
                        || known.is_pinned()
                            && !(self.is_settled_to(known, &member) && self.is_open(&before)) =>
                {
                    member.membership = known.pod().membership.clone();
                }
                _ => {
                    self.member_gone(now, &member.uid);
                    left = Some(before);
                }
            }
        }
        let (gang, new) = self.gang_for(now, &member)?;
        self.of_pod.insert(member.uid.clone(), gang.clone());
        if let Some(gang) = self.gangs.get_mut(&gang) {
            gang.observe(now, member, &self.settings, self.synced);
        }
        Some(JoinedMember { gang, new, left })
    }

    /// Lets the gang of a member draw its conclusions.
    fn joined(&mut self, now: Moment, joined: JoinedMember) {
        // A decision is taken over only with a member that it names.
        match joined.new {
            Some(name) => self.follow_object(now, &name),
            None => self.settle(now, &joined.gang),
        }
        if let Some(left) = joined.left {
            self.forget_empty(now, &left);
        }
    }

    /// Whether a pod has another gang because its owner was read since.
    fn is_settled_to(&self, known: &TrackedMember, member: &Member) -> bool {
        let settled = self.owners.settle(&known.pod().membership);
        settled.is_some_and(|settled| settled.key == member.membership.key)
    }

    /// Whether a gang was not decided.
    fn is_open(&self, key: &GangKey) -> bool {
        self.gangs.get(key).is_some_and(Gang::is_open)
    }

    /// What is kept of a member.
    fn tracked(&self, uid: &PodUid) -> Option<&TrackedMember> {
        let key = self.of_pod.get(uid)?;
        self.gangs.get(key)?.members().get(uid)
    }

    /// The gang of a member, created if need be: then with the name of its object, which is to be followed. `None` if the pod cannot begin a
    /// gang any more.
    fn gang_for(&mut self, now: Moment, member: &Member) -> Option<(Arc<GangKey>, Option<ObjectName>)> {
        let wanted = &member.membership.key;
        if let Some((key, _)) = self.gangs.get_key_value(wanted) {
            return Some((key.clone(), None));
        }
        if member.stage == Stage::Failed {
            return None;
        }
        let key = Arc::new(wanted.clone());
        let name = self.add_gang(now, &key);
        Some((key, Some(name)))
    }

    /// Adds a gang, unless it is known. Returns the name of its object.
    fn add_gang(&mut self, now: Moment, key: &Arc<GangKey>) -> ObjectName {
        if self.gangs.contains_key(key) {
            return object_name(key);
        }
        let name = self.objects.add_gang(key);
        let has_room = self.has_room_for(key);
        self.gangs.insert(key.clone(), Gang::new(key.clone(), now));
        *self.planned_of.entry(key.namespace.clone()).or_default() += 1;
        if !has_room && !self.objects.has_decided(key) {
            self.set_over_limit(key, true);
        }
        name
    }

    /// Whether one more gang is planned: neither all nor those of its namespace are at their limit.
    fn has_room_for(&self, key: &GangKey) -> bool {
        let of_namespace = self.planned_of.get(&key.namespace).copied().unwrap_or_default();
        let all = self.gangs.len() - self.over_limit.len();
        all < self.settings.max_gangs && of_namespace < self.settings.max_gangs_of_namespace
    }

    /// One gang of a namespace fewer is planned.
    fn uncount(&mut self, key: &GangKey) {
        if let Some(count) = self.planned_of.get_mut(&key.namespace) {
            *count -= 1;
            if *count == 0 {
                self.planned_of.remove(&key.namespace);
            }
        }
    }

    /// A gang is one more than the limit, or no longer. A gang that is decided never is: it is brought to its end.
    fn set_over_limit(&mut self, key: &Arc<GangKey>, over: bool) {
        let changed = match over {
            true => self.over_limit.insert(key.clone()),
            false => self.over_limit.remove(key),
        };
        match (changed, over) {
            (false, _) => {}
            (true, true) => self.uncount(key),
            (true, false) => *self.planned_of.entry(key.namespace.clone()).or_default() += 1,
        }
        if let Some(gang) = self.gangs.get_mut(key).filter(|_| changed) {
            let fault = over.then(|| Fault {
                place: "gangs".into(),
                words: format!(
                    "at most {} gangs are planned, and {} of one namespace; this one is planned once others have ended",
                    self.settings.max_gangs, self.settings.max_gangs_of_namespace
                )
                .into(),
            });
            gang.agreement().set_count_fault(fault);
        }
    }

    /// A gang whose last member moved to another gang has not ended: nothing is to be read of it any more, except what the user wrote.
    fn forget_empty(&mut self, now: Moment, key: &Arc<GangKey>) {
        if self.objects.is_written_by_user(key) {
            return;
        }
        if self.gangs.get_mut(key).is_some_and(|gang| gang.expire(now.at)) {
            self.settle(now, key);
        }
    }

    fn member_gone(&mut self, now: Moment, uid: &PodUid) {
        let Some(key) = self.of_pod.remove(uid) else {
            return;
        };
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.remove(now, uid, &self.settings);
        }
        self.settle(now, &key);
    }

    fn owner_seen(&mut self, now: Moment, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        let in_tree = owner.kind == OwnerKind::CompositePodGroup;
        let moves = facts.as_ref().is_some_and(|facts| facts.apart || facts.parent.is_some() || in_tree);
        let limit = self.settings.max_gangs.saturating_mul(2);
        let following = self.owners.observe(owner, facts, limit);
        let mut moved: Vec<Member> = Vec::new();
        for key in &following {
            if let Some(gang) = self.gangs.get_mut(key) {
                gang.agreement().invalidate();
                let members = gang.members().iter().filter(|_| moves);
                moved.extend(members.map(|member| member.pod().clone()));
            }
        }
        moved.retain(|pod| self.owners.settle(&pod.membership).is_some());
        // A decision of an earlier process is taken over with all of them.
        let joined: Vec<JoinedMember> = moved.into_iter().filter_map(|pod| self.join(now, pod)).collect();
        for joined in joined {
            self.joined(now, joined);
        }
        for key in &following {
            self.settle(now, key);
        }
        self.follow_deferred(now);
    }

    /// Whether a decision of an earlier process may be about pods that are members once their owners are read: taken over without them, it
    /// would find its devices held by others, or nothing left to do.
    fn is_early(&self, key: &GangKey, known: &KnownObject) -> bool {
        let gang = self.gangs.get(key).filter(|gang| known.is_about(key) && gang.is_open());
        let Some((gang, decision)) = gang.zip(known.decision()) else {
            return false;
        };
        let is_member = |uid: &PodUid| self.of_pod.get(uid).is_some_and(|of| **of == *key);
        // The decision does not name those that replace lost members.
        let named = u32::try_from(decision.reservations.len()).unwrap_or(u32::MAX);
        let short = gang.has_tree() && named.saturating_add(known.completed()) < decision.min;
        decision.pods().any(|uid| !is_member(uid) && self.has_early_owner(uid))
            || short && self.owners.any_early_group(&key.namespace)
    }

    /// Whether a pod may be found to belong to another gang: its owner was not read yet.
    fn has_early_owner(&self, uid: &PodUid) -> bool {
        let owner = self.tracked(uid).and_then(|member| member.pod().membership.owner.as_ref());
        owner.is_some_and(|owner| self.owners.is_early(owner))
    }

    /// Keeps a gang from being planned, and its object from being written, until its members are seen.
    fn defer(&mut self, key: &Arc<GangKey>) {
        self.deferred.insert(Arc::clone(key));
        if let Some(gang) = self.gangs.get_mut(key) {
            let words = "its decision is about pods whose owners were not read yet";
            let place = format!("Gang {}", object_name(key).1);
            gang.agreement().set_object_fault(Some(Fault { place: place.into(), words: words.into() }));
        }
    }

    /// Looks again at decisions that were about no member yet.
    fn follow_deferred(&mut self, now: Moment) {
        for key in std::mem::take(&mut self.deferred) {
            if self.gangs.contains_key(&key) {
                self.follow_object(now, &object_name(&key));
            }
        }
    }

    fn object_seen(&mut self, now: Moment, name: &ObjectName, object: Object) {
        let known = KnownObject::new(&name.0, object);
        for key in self.objects.gangs_of(name) {
            if known.has_decided(&key) {
                self.set_over_limit(&key, false);
            }
        }
        self.objects.insert(name.clone(), known);
        self.follow_object(now, name);
        self.objects.note_stray(name, after(now.at, self.settings.linger));
    }

    fn object_gone(&mut self, now: Moment, name: &ObjectName) {
        self.objects.remove(name);
        for key in self.objects.gangs_of(name) {
            self.with(now, &key, Gang::object_gone);
        }
        self.follow_object(now, name);
    }

    /// Lets the gangs of one object name follow it: one of them has it, the others are not valid.
    fn follow_object(&mut self, now: Moment, name: &ObjectName) {
        let owner = self.objects.owner_of(name);
        for key in self.objects.gangs_of(name) {
            if Some(&key) == owner.as_ref() {
                let spec = self.objects.get(name).map(KnownObject::spec);
                if let Some(gang) = self.gangs.get_mut(&key) {
                    gang.agreement().set_spec(spec);
                }
                // The terms come first: a decision is taken over by them.
                self.resolve_terms(&key);
                let known = self.objects.get(name).cloned();
                if known.as_ref().is_some_and(|known| self.is_early(&key, known)) {
                    self.defer(&key);
                } else if let Some(known) = known
                    && let Some((gang, mut env)) = self.with_env(now, &key)
                {
                    gang.follow_decision(&mut env, &known);
                }
            } else if let Some(gang) = self.gangs.get_mut(&key) {
                gang.agreement().set_object_fault(owner.as_ref().map(|other| {
                    Fault {
                        place: format!("Gang {}", name.1).into(),
                        words: format!(
                            "its name is that of gang {other} ({}); give one of them another name",
                            other.integration
                        )
                        .into(),
                    }
                }));
            }
            self.settle(now, &key);
        }
    }

    /// Deletes objects of ours that belong to no gang.
    fn delete_strays(&mut self, now: Moment) {
        if !self.synced {
            return;
        }
        let again = self.settings.linger.saturating_mul(6);
        let mut strays = self.objects.take_strays(now.at, again);
        // Only it records members that have ended, and pods that it does not name may be of its tree.
        let is_early = |name: &ObjectName| {
            let decision = self.objects.get(name).and_then(KnownObject::decision);
            decision.is_some_and(|decision| {
                decision.pods().any(|uid| self.has_early_owner(uid)) || self.owners.any_early_group(&name.0)
            })
        };
        strays.retain(|name| !is_early(name));
        let deletions = strays.into_iter().map(|(namespace, name)| Work::DeleteObject { namespace, name });
        self.work.extend(deletions);
    }

    /// Resolves the terms of a gang, if its declarations have changed.
    fn resolve_terms(&mut self, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        if !gang.agreement().take_stale() {
            return;
        }
        let unfollowed = gang.agreement().follow_owners(|owner| self.owners.get(owner));
        for before in unfollowed {
            self.owners.unfollow(&before, key);
        }
        for owner in gang.owners() {
            self.owners.follow(owner, key);
        }
        let owners = &self.owners;
        if let Some(resolution) = gang.agreement().resolve(|owner| owners.get(owner), &self.settings) {
            gang.agree(resolution);
        }
    }

    /// Lets a gang draw its conclusions, and collects them.
    fn settle(&mut self, now: Moment, key: &Arc<GangKey>) {
        self.resolve_terms(key);
        let Some((gang, mut env)) = self.with_env(now, key) else {
            return;
        };
        gang.settle(&mut env);
        let snapshot = gang.snapshot(env.settings, now.at);
        for (slot, reserved, bound) in snapshot.changes {
            self.devices.set(key, slot, reserved.as_ref());
            self.slot_changes.push(SlotChange { gang: key.clone(), slot, place: reserved, bound });
        }
        if snapshot.may_give_back {
            self.may_give_back.insert(key.clone());
        } else {
            self.may_give_back.remove(key);
        }
        self.queue.update(key, snapshot.wants_plan, snapshot.turn, snapshot.considered);
        if !snapshot.preempts {
            self.spare_victims(key);
        }
        let held = self.timers.set(key, snapshot.due, snapshot.devices);
        self.queue.update_held(key, held, snapshot.devices);
        self.dirty.insert(key.clone());
        if snapshot.is_over {
            self.forget(now, key);
        } else {
            self.follow_succession(now, key);
        }
    }

    /// Lets a gang that is the next incarnation of another take the slots that are kept for it.
    fn follow_succession(&mut self, now: Moment, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.get(key) else {
            return;
        };
        let was_idle = gang.was_idle(now.at);
        if gang.is_awaiting() || was_idle {
            self.awaiting.insert(key.clone());
        } else {
            self.awaiting.remove(key);
        }
        if self.awaiting.is_empty() || !key.has_successors() {
            return;
        }
        if !was_idle {
            self.take_idle_time(now, key);
        }
        let incarnations = self.incarnations_of(key);
        let of = |is: &dyn Fn(&Gang) -> bool| {
            let mut keys = incarnations.iter().rev();
            keys.find(|key| self.gangs.get(*key).is_some_and(is)).cloned()
        };
        let Some(before) = of(&Gang::may_hand_over) else {
            return;
        };
        if let Some(next) = of(&|gang| gang.may_continue(now.at)) {
            let left = self.with_env(now, &before).and_then(|(gang, env)| gang.hand_over(&env));
            // What it kept is free before it is the other's.
            self.settle(now, &before);
            if let Some((inheritance, gang)) = left.zip(self.gangs.get_mut(&next)) {
                gang.continue_from(inheritance);
                self.settle(now, &next);
            }
        } else if of(&|gang| gang.has_slots() && !gang.is_awaiting()).is_some() {
            // It found other devices.
            self.with(now, &before, |gang, env| gang.end_succession(env, End::Unsuitable));
        }
    }

    /// That an earlier incarnation kept devices idle counts against a gang.
    fn take_idle_time(&mut self, now: Moment, key: &Arc<GangKey>) {
        let mut earlier = self.incarnations_of(key).into_iter();
        let idle = |key: &Arc<GangKey>| self.gangs.get(key).is_some_and(|gang| gang.was_idle(now.at));
        let Some(before) = earlier.find(idle) else {
            return;
        };
        let held = self.gangs.get_mut(&before).map(Gang::take_idle_time);
        if let Some((held, gang)) = held.zip(self.gangs.get_mut(key)) {
            gang.set_idle_time(held);
        }
        self.awaiting.remove(&before);
    }

    /// The incarnations of the gang that a key names.
    fn incarnations_of(&self, key: &GangKey) -> Vec<Arc<GangKey>> {
        let first = GangKey { incarnation: "".into(), ..key.clone() };
        let from = self.gangs.range(Arc::new(first)..).map(|(other, _)| other);
        let named = from.take_while(|other| other.is_named_like(key));
        named.filter(|other| other.is_incarnation_of(key)).cloned().collect()
    }

    /// How reservations that were kept for a next incarnation ended.
    pub fn continuations(&self) -> (Continuations, usize) {
        let awaiting = self.awaiting.iter().filter_map(|key| self.gangs.get(key));
        (self.continuations, awaiting.filter(|gang| gang.is_awaiting()).count())
    }

    /// Marks members of other gangs as victims of this one: their devices are reserved for it.
    fn mark_victims(&mut self, key: &Arc<GangKey>, victims: Vec<PodUid>) {
        if self.gangs.get(key).is_some_and(Gang::preempts) {
            self.set_evicted(&victims, true);
            self.victims.by_gang.insert(key.clone(), victims);
        }
    }

    fn spare_victims(&mut self, key: &Arc<GangKey>) {
        if let Some(victims) = self.victims.by_gang.remove(key) {
            self.set_evicted(&victims, false);
        }
    }

    fn set_evicted(&mut self, victims: &[PodUid], evicted: bool) {
        let gangs: BTreeSet<Arc<GangKey>> =
            victims.iter().filter_map(|uid| self.of_pod.get(uid).cloned()).collect();
        for key in gangs {
            if let Some(gang) = self.gangs.get_mut(&key) {
                gang.set_evicted(victims, evicted);
            }
        }
    }

    /// A gang is over, and no member has come back.
    fn forget(&mut self, now: Moment, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.remove(key) else {
            return;
        };
        for member in gang.members().iter() {
            self.of_pod.remove(&member.pod().uid);
        }
        self.awaiting.remove(key);
        self.timers.remove(key);
        self.queue.remove(key);
        self.may_give_back.remove(key);
        self.spare_victims(key);
        self.dirty.remove(key);
        self.deferred.remove(key);
        for owner in gang.owners() {
            self.owners.unfollow(owner, key);
        }
        let name = object_name(key);
        if self.objects.is_to_delete(key, gang.has_reported()) {
            let (namespace, name) = name.clone();
            self.work.push(Work::DeleteObject { namespace, name });
        }
        if self.objects.remove_gang(key, &name) {
            self.follow_object(now, &name);
        } else {
            let again = self.settings.linger.saturating_mul(6);
            self.objects.note_stray(&name, after(now.at, again));
        }
        // The next gang over the limit takes its turn, if this was not one.
        if self.over_limit.remove(key) {
            return;
        }
        self.uncount(key);
        let next = self.over_limit.iter().find(|next| self.has_room_for(next)).cloned();
        if let Some(next) = next {
            self.set_over_limit(&next, false);
            self.settle(now, &next);
        }
    }

    /// Whether [`Gangs::next`] would look at any gang now.
    pub fn has_next(&self, capacity: u64) -> bool {
        self.synced && self.queue.has_next(capacity)
    }

    /// The request for the next gang to plan, if there is one: it was not planned since `capacity` grew, or it has changed. `capacity` is a
    /// number that grows when devices or other resources of nodes came free, or nodes changed. The result comes back as
    /// [`GangEvent::Planned`].
    pub fn next(&mut self, now: Moment, capacity: u64) -> Option<PlanRequest> {
        if !self.synced {
            return None;
        }
        while let Some(key) = self.queue.next(now, capacity) {
            if let Some(gang) = self.gangs.get_mut(&key)
                && gang.wants_plan(now.at)
            {
                return gang.request_plan(capacity);
            }
        }
        None
    }

    fn planned(&mut self, now: Moment, gang: &GangKey, result: Result<Placement, Refusal>) {
        let Some((key, _)) = self.gangs.get_key_value(gang).filter(|(_, gang)| gang.awaits_plan()) else {
            return;
        };
        let key = key.clone();
        let result = result.and_then(|placement| match self.devices.overlap(&placement) {
            Some(refusal) => Err(refusal),
            None => Ok(placement),
        });
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.plan_answered();
        }
        let (order, turn) = (self.queue.take_order(), self.queue.turn(&key));
        self.with(now, &key, |gang, env| match &result {
            Ok(placement) => gang.place(env, placement),
            Err(refusal) => gang.refuse(env, refusal.clone()),
        });
        let has_slots = self.gangs.get(&key).is_some_and(Gang::has_slots);
        self.queue.restore_order(order, &key, turn, has_slots);
        if let Ok(placement) = result {
            let victims = placement.victims.into_iter();
            self.mark_victims(&key, victims.chain(placement.leaving.into_keys()).collect());
        }
    }

    /// What the planner would be asked for a gang now; `None` if its terms are not known.
    pub fn plan_request(&self, key: &GangKey) -> Option<PlanRequest> {
        self.gangs.get(key)?.plan_request()
    }

    /// The gang that is first in the queue and waits for capacity, with the time since when it waits, in seconds since 1970. Backfill
    /// reservations are made for this one.
    pub fn head(&self, now: Moment) -> Option<(Arc<GangKey>, i64)> {
        let waits = |gang: &Gang| gang.is_queued() && gang.wants_plan(now.at) && !gang.is_hopeless();
        let first = self.queue.order(&self.turns(waits), now).into_iter().next()?;
        let since = self.gangs.get(&first)?.waiting_since();
        Some((first, since))
    }

    /// The gangs that are complete and wait for a reservation, in the order in which they are planned.
    pub fn queue(&self, now: Moment) -> Vec<Arc<GangKey>> {
        self.queue.order(&self.turns(Gang::is_queued), now)
    }

    fn turns(&self, waits: impl Fn(&Gang) -> bool) -> Vec<(&Arc<GangKey>, Turn)> {
        let planable = self.queue.planable().filter_map(|key| self.gangs.get_key_value(key));
        let waiting = planable.filter(|(_, gang)| waits(gang));
        waiting.map(|(key, gang)| (key, gang.turn())).collect()
    }

    /// The gangs in a deadlock, in the order in which they are completed.
    pub fn deadlocked(&self) -> Vec<DeadlockedGang<'_>> {
        let now = self.clock.map(|now| now.at);
        let waiting = self.queue.planable().filter_map(|key| self.gangs.get(key));
        let deadlocked = waiting.filter_map(|gang| {
            let gang = View::new(gang, now?);
            let (wanted, hopeless) = gang.deadlock()?;
            Some(DeadlockedGang { gang, wanted, hopeless })
        });
        let mut deadlocked: Vec<DeadlockedGang<'_>> = deadlocked.collect();
        deadlocked.sort_by_cached_key(|found| (found.gang.turn().in_need(), Arc::clone(found.gang.key())));
        deadlocked
    }

    /// The owners that gangs wait for or follow.
    pub fn watched_owners(&self) -> Vec<WatchedOwner> {
        self.owners.watched()
    }

    /// The statuses that have changed. Each replaces the former as a whole: a decision that it does not have is to be removed.
    pub fn take_statuses(&mut self) -> Vec<(Arc<GangKey>, GangStatus)> {
        let (Some(now), true) = (self.clock, self.synced) else {
            return Vec::new();
        };
        let mut statuses = Vec::new();
        let mut later = BTreeSet::new();
        for key in std::mem::take(&mut self.dirty) {
            let Some(gang) = self.gangs.get_mut(&key) else {
                continue;
            };
            if !gang.may_report() || self.deferred.contains(&key) {
                later.insert(key);
            } else if let Some(status) = gang.take_status(now, &self.settings) {
                statuses.push((key, status));
            }
        }
        self.dirty = later;
        statuses
    }

    /// The gang that a pod belongs to.
    pub fn gang_of(&self, uid: &PodUid) -> Option<&Arc<GangKey>> {
        self.of_pod.get(uid)
    }

    /// The gang that a pod is scheduled with as a whole; `None` also for one of a group of independent pods.
    pub fn goes_with(&self, uid: &PodUid) -> Option<&Arc<GangKey>> {
        let key = self.gang_of(uid)?;
        let whole = self.gangs.get(key).is_some_and(|gang| !gang.are_independent());
        whole.then_some(key)
    }

    /// Whether an object that states how large a gang is, or to which tree of groups it belongs, was not read yet.
    pub fn awaits_owner(&self, key: &GangKey) -> bool {
        let is_unread = |owner: &OwnerRef| self.owners.get(owner).is_none_or(|owner| owner.known().is_none());
        self.gangs.get(key).is_some_and(|gang| gang.owners().any(is_unread))
    }

    /// What a member declared when it was let go to its node. Whatever is written on its pod since, it belongs to that gang until it ends.
    pub fn bound_membership(&self, uid: &PodUid) -> Option<&Arc<Membership>> {
        let member = self.tracked(uid)?;
        member.is_pinned().then_some(&member.pod().membership)
    }

    /// Why a pod waits for its gang; `None` where it does not: it has a slot whose devices are free, is bound, ends or has ended, is
    /// independent, or another scheduler places it.
    pub fn wait_reason(&self, uid: &PodUid) -> Option<WaitReason> {
        let gang = self.gangs.get(self.of_pod.get(uid)?)?;
        gang.wait_reason(uid).filter(|_| !gang.is_independent(uid))
    }

    /// A gang, to look at.
    pub fn view(&self, key: &GangKey) -> Option<View<'_>> {
        let now = self.clock?.at;
        Some(View::new(self.gangs.get(key)?, now))
    }

    /// Until when reservations of a gang last if its members do not arrive, in seconds since 1970.
    pub fn reserved_until(&self, key: &GangKey, now: Moment) -> Option<i64> {
        let until = self.gangs.get(key)?.reserved_until(&self.settings)?;
        let left = until.saturating_duration_since(now.at).as_secs();
        Some(now.unix.saturating_add_unsigned(left))
    }

    /// All gangs, by name.
    pub fn views(&self) -> impl Iterator<Item = View<'_>> {
        let now = self.clock.map(|now| now.at);
        let gangs = self.gangs.values();
        gangs.filter_map(move |gang| Some(View::new(gang, now?)))
    }

    /// Gangs that may have slots to give back ([`View::surplus`], [`View::orphaned`]), by name.
    pub fn may_give_back(&self) -> impl Iterator<Item = View<'_>> {
        let now = self.clock.map(|now| now.at);
        let gangs = self.may_give_back.iter().filter_map(|key| self.gangs.get(key));
        gangs.filter_map(move |gang| Some(View::new(gang, now?)))
    }

    /// What a member declares, as it is tracked.
    #[cfg(test)]
    pub(crate) fn membership_of(&self, uid: &PodUid) -> Membership {
        let tracked = self.tracked(uid).expect("a member");
        Membership::clone(&tracked.pod().membership)
    }

    /// Gangs that were not planned since capacity last grew.
    #[cfg(test)]
    pub(crate) fn untried(&self) -> &BTreeSet<Arc<GangKey>> {
        self.queue.untried()
    }

    /// Whether the status of any gang may have changed.
    #[cfg(test)]
    pub(crate) fn has_changed(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Nothing is left of any gang, but for objects that were not seen to be gone.
    #[cfg(test)]
    pub(crate) fn assert_empty_but_objects(&self) {
        assert_eq!((self.gangs.len(), self.owners.len(), self.awaiting.len()), (0, 0, 0));
        assert!(self.queue.is_empty() && self.devices.is_empty() && self.timers.queue.is_empty());
    }

    /// Nothing is left of any gang.
    #[cfg(test)]
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.gangs.len(), 0, "{:?}", self.gangs.keys().collect::<Vec<_>>());
        assert_eq!(self.of_pod.len(), 0);
        assert_eq!(self.owners.len(), 0);
        assert_eq!(self.objects.named(), 0);
        assert!(self.queue.is_empty() && self.devices.is_empty());
        assert_eq!((self.victims.by_gang.len(), self.timers.queue.len()), (0, 0));
        assert_eq!((self.timers.of_gang.len(), self.over_limit.len(), self.planned_of.len()), (0, 0, 0));
    }
}
