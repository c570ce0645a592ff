//! All gangs: finds the one that a call is about, lets it draw its conclusions, and collects what is to be done. What a gang does is decided
//! in its own modules.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, GangStatus, NodeName, PodUid};

use super::agreed::OwnerKnown;
use super::gang::{Env, Gang, State};
use super::members::{Class, Kept};
use super::recovery::Known;
use super::status::beyond;
use super::types::{
    Answer, Arrival, BindEnd, CommitFailure, Member, Now, Object, Placement, Refused, Settings, SlotChange,
    Stage, Work,
};
use super::view::View;
use crate::claim::{OwnerFacts, OwnerRef};
use crate::key::GangKey;
use crate::terms::Fault;

/// The state machine of all gangs. Its head, [`super`], says what always holds.
#[derive(Debug, Clone)]
pub struct Gangs {
    pub(super) settings: Settings,
    pub(super) synced: bool,
    pub(super) gangs: BTreeMap<Arc<GangKey>, Gang>,
    of_pod: HashMap<PodUid, Belongs>,
    owners: BTreeMap<OwnerRef, Owner>,
    objects: BTreeMap<(Arc<str>, Arc<str>), Known>,
    /// The gangs whose object has that namespace and name: one, if names are not in each other's way.
    named: BTreeMap<(Arc<str>, Arc<str>), Vec<Arc<GangKey>>>,
    /// Gangs that want a plan, now or at some time.
    pub(super) planable: BTreeSet<Arc<GangKey>>,
    /// Devices that the gangs of each namespace hold.
    pub(super) held: BTreeMap<Arc<str>, u64>,
    /// Whose place each device is, where it is reserved for one.
    taken: HashMap<NodeName, HashMap<DeviceId, Arc<GangKey>>>,
    /// What is reserved, to find it again when it is released.
    reserved: HashMap<(Arc<GangKey>, u32), (NodeName, Vec<DeviceId>)>,
    preempting: BTreeSet<Arc<GangKey>>,
    timers: BTreeSet<(Instant, Arc<GangKey>)>,
    dirty: BTreeSet<Arc<GangKey>>,
    clock: Option<Now>,
    decisions: u64,
    work: Vec<Work>,
    slot_changes: Vec<SlotChange>,
}

/// Where a pod belongs.
#[derive(Debug, Clone)]
enum Belongs {
    To(Arc<GangKey>),
    /// To a gang that is one too many, or too large.
    Beyond(Arc<str>),
}

#[derive(Debug, Clone, Default)]
struct Owner {
    known: OwnerKnown,
    gangs: BTreeSet<Arc<GangKey>>,
}

impl Gangs {
    /// Nothing is known yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            synced: false,
            gangs: BTreeMap::new(),
            of_pod: HashMap::new(),
            owners: BTreeMap::new(),
            objects: BTreeMap::new(),
            named: BTreeMap::new(),
            planable: BTreeSet::new(),
            held: BTreeMap::new(),
            taken: HashMap::new(),
            reserved: HashMap::new(),
            preempting: BTreeSet::new(),
            timers: BTreeSet::new(),
            dirty: BTreeSet::new(),
            clock: None,
            decisions: 0,
            work: Vec::new(),
            slot_changes: Vec::new(),
        }
    }

    /// A pod that says it belongs to a gang, as it is now.
    pub fn member_seen(&mut self, now: Now, mut member: Member) {
        self.clock = Some(now);
        if let Some(Belongs::To(before)) = self.of_pod.get(&member.uid).cloned()
            && *before != member.claim.key
        {
            match self
                .gangs
                .get(&before)
                .and_then(|gang| gang.members.get(&member.uid))
            {
                // A pod that has a place stays what it was when it got it.
                Some(kept) if kept.slot.is_some() || kept.pinned() => {
                    member.claim = kept.member.claim.clone()
                }
                _ => self.member_gone(now, &member.uid),
            }
        }
        let Some(key) = self.gang_for(now, &member) else {
            return;
        };
        self.of_pod.insert(member.uid.clone(), Belongs::To(key.clone()));
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.member_seen(now, member, &self.settings);
        }
        self.finish(now, &key);
    }

    /// The gang of a member, made if need be. `None` if it is not to be kept.
    fn gang_for(&mut self, now: Now, member: &Member) -> Option<Arc<GangKey>> {
        let too_many = match self.gangs.get_key_value(&member.claim.key) {
            Some((key, gang)) => {
                let room = gang.members.len() < self.settings.max_members;
                if room || gang.members.get(&member.uid).is_some() {
                    return Some(key.clone());
                }
                self.settings.max_members
            }
            // It cannot begin a gang any more.
            None if member.stage == Stage::Failed => return None,
            None if self.gangs.len() < self.settings.max_gangs => {
                return Some(self.make(now, &member.claim.key));
            }
            None => self.settings.max_gangs,
        };
        self.of_pod
            .insert(member.uid.clone(), Belongs::Beyond(beyond(too_many)));
        None
    }

    fn make(&mut self, now: Now, key: &GangKey) -> Arc<GangKey> {
        let key = Arc::new(key.clone());
        let object: Arc<str> = key.object_name().into();
        let name = (key.namespace.clone(), object);
        self.named.entry(name.clone()).or_default().push(key.clone());
        self.gangs.insert(key.clone(), Gang::new(key.clone(), now));
        self.follow_object(now, &name);
        key
    }

    /// A pod is gone.
    pub fn member_gone(&mut self, now: Now, uid: &PodUid) {
        self.clock = Some(now);
        let Some(Belongs::To(key)) = self.of_pod.remove(uid) else {
            return;
        };
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.member_gone(now, uid);
        }
        self.finish(now, &key);
    }

    /// A pod that had to go for a gang ([`Work::Evict`]) is gone, and its devices are free. To be said of any pod; of others it means nothing.
    pub fn victim_gone(&mut self, now: Now, uid: &PodUid) {
        self.clock = Some(now);
        for key in self.preempting.clone() {
            self.with(now, &key, |gang, env| gang.victim_gone(env, uid));
        }
    }

    /// What an owner says of size and wishes; `None`: there is no such object.
    pub fn owner_seen(&mut self, now: Now, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        self.clock = Some(now);
        let spare = self.owners.len() < self.settings.max_gangs.saturating_mul(2);
        if !spare && !self.owners.contains_key(owner) {
            return;
        }
        let entry = self.owners.entry(owner.clone()).or_default();
        if entry.known.as_ref() == Some(&facts) {
            return;
        }
        entry.known = Some(facts);
        for key in entry.gangs.clone() {
            if let Some(gang) = self.gangs.get_mut(&key) {
                gang.reagree = true;
            }
            self.finish(now, &key);
        }
    }

    /// The owners that gangs wait for or go by.
    pub fn owners_wanted(&self) -> Vec<OwnerRef> {
        let wanted = self.owners.iter().filter(|(_, owner)| !owner.gangs.is_empty());
        wanted.map(|(owner, _)| owner.clone()).collect()
    }

    /// A `Gang` object, as it is now.
    pub fn object_seen(&mut self, now: Now, namespace: &str, name: &str, object: Object) {
        self.clock = Some(now);
        let name: (Arc<str>, Arc<str>) = (namespace.into(), name.into());
        self.objects.insert(name.clone(), Known::new(object));
        self.follow_object(now, &name);
    }

    /// There is no such object any more.
    pub fn object_gone(&mut self, now: Now, namespace: &str, name: &str) {
        self.clock = Some(now);
        let name: (Arc<str>, Arc<str>) = (namespace.into(), name.into());
        self.objects.remove(&name);
        for key in self.named.get(&name).cloned().unwrap_or_default() {
            self.with(now, &key, |gang, env| {
                gang.told.forget();
                gang.not_committed_if_asked(env);
            });
        }
        self.follow_object(now, &name);
    }

    /// Lets the gangs of one object name follow it: one of them has it, the others are told that they cannot.
    fn follow_object(&mut self, now: Now, name: &(Arc<str>, Arc<str>)) {
        let keys = self.named.get(name).cloned().unwrap_or_default();
        let known = self.objects.get(name).cloned();
        let of_status = known
            .as_ref()
            .and_then(|known| keys.iter().find(|key| known.is_about(key)).cloned());
        let has_it = of_status.or_else(|| keys.first().cloned());
        for key in keys {
            if Some(&key) != has_it.as_ref() {
                if let Some(gang) = self.gangs.get_mut(&key) {
                    gang.reagree = true;
                    gang.object_fault = has_it.as_ref().map(|other| Fault {
                        place: format!("Gang {}", name.1).into(),
                        words: format!(
                            "its name is that of gang {other} ({}); give one of them another name",
                            other.dialect
                        )
                        .into(),
                    });
                }
            } else {
                if let Some(gang) = self.gangs.get_mut(&key) {
                    gang.reagree = true;
                    gang.follow_spec(known.as_ref());
                }
                // What is to be agreed on comes first: a decision is taken up by its terms.
                self.agree_on(&key);
                if let Some(known) = &known {
                    self.follow_decision(now, &key, known);
                }
            }
            self.finish(now, &key);
        }
    }

    fn follow_decision(&mut self, now: Now, key: &Arc<GangKey>, known: &Known) {
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        let taken = &self.taken;
        let free = |node: &NodeName, device: &DeviceId| {
            let holder = taken.get(node).and_then(|devices| devices.get(device));
            holder.is_none_or(|holder| holder == key)
        };
        let mut env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            decisions: &mut self.decisions,
            work: &mut self.work,
        };
        gang.follow_decision(&mut env, known, &free);
    }

    /// Every list was complete once: from here on decisions may be made. Decisions of the process before are taken up.
    pub fn synced(&mut self, now: Now) {
        self.clock = Some(now);
        if self.synced {
            return;
        }
        self.synced = true;
        let names: Vec<_> = self.named.keys().cloned().collect();
        for name in names {
            self.follow_object(now, &name);
        }
        for (name, known) in &self.objects {
            if !self.named.contains_key(name)
                && known.ours
                && known.is_about_a_gang()
                && let Some(key) = known.key(&name.0)
            {
                self.work.push(Work::Forget(Arc::new(key)));
            }
        }
    }

    /// How the planning of a gang that [`Gangs::next`] named has ended. A plan for a gang that has changed since is dropped.
    pub fn placed(&mut self, now: Now, gang: &GangKey, result: Result<Placement, Refused>) {
        self.clock = Some(now);
        let Some((key, found)) = self.gangs.get_key_value(gang) else {
            return;
        };
        let key = key.clone();
        let wanted = match &found.state {
            State::Open => found.terms().is_some() && found.enough(super::members::Count::exist),
            State::Decided(_) => true,
            _ => false,
        };
        if !found.tries.asked || !wanted {
            return;
        }
        let result = result.and_then(|placement| match self.overlap(&placement) {
            Some(words) => Err(Refused {
                reason: "the plan was overtaken".into(),
                message: words,
                hopeless: false,
            }),
            None => Ok(placement),
        });
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.tries.asked = false;
        }
        if let Ok(placement) = &result
            && !placement.victims.is_empty()
        {
            self.preempting.insert(key.clone());
        }
        self.with(now, &key, |gang, env| match &result {
            Ok(placement) => gang.place(env, placement),
            Err(refused) => gang.refuse(refused.clone()),
        });
    }

    /// A device that two places would have.
    fn overlap(&self, placement: &Placement) -> Option<Arc<str>> {
        let mut seen = BTreeSet::new();
        for place in &placement.places {
            for id in place.devices.iter().flat_map(|(_, ids)| ids) {
                let other = self.taken.get(&place.node).and_then(|devices| devices.get(id));
                if let Some(other) = other {
                    let words = format!("device {id} of node {} is kept for gang {other}", place.node);
                    return Some(words.into());
                }
                if !seen.insert((&place.node, id)) {
                    let words = format!("device {id} of node {} is in two places of the plan", place.node);
                    return Some(words.into());
                }
            }
        }
        None
    }

    /// A node, or a device of it, is lost: places there that are not bound are of no use. `why` is for people.
    pub fn unfit(&mut self, now: Now, node: &NodeName, _why: &str) {
        self.clock = Some(now);
        let there: BTreeSet<Arc<GangKey>> = self
            .taken
            .get(node)
            .into_iter()
            .flat_map(|devices| devices.values().cloned())
            .collect();
        for key in there {
            self.with(now, &key, |gang, _| gang.unfit(node));
        }
    }

    /// Gives back the places of members of a gang beyond its minimum that are not on their way through a bind: others need them more. How
    /// many.
    pub fn release_extras(&mut self, now: Now, gang: &GangKey) -> u32 {
        self.clock = Some(now);
        let Some((key, _)) = self.gangs.get_key_value(gang) else {
            return 0;
        };
        let key = key.clone();
        let mut released = 0;
        self.with(now, &key, |gang, _| released = gang.release_extras());
        released
    }

    /// What filter answers for a pod. `offered` says which nodes kube-scheduler offers.
    pub fn answer(&mut self, now: Now, uid: &PodUid, offered: &dyn Fn(&NodeName) -> bool) -> Answer {
        self.clock = Some(now);
        let key = match self.of_pod.get(uid) {
            None => return Answer::Single,
            Some(Belongs::Beyond(text)) => return Answer::Wait(text.clone()),
            Some(Belongs::To(key)) => key.clone(),
        };
        let Some(gang) = self.gangs.get_mut(&key) else {
            return Answer::Single;
        };
        let mut env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            decisions: &mut self.decisions,
            work: &mut self.work,
        };
        let before = (gang.slots.version(), gang.nudge);
        let answer = gang.answer(&mut env, uid, offered);
        if before != (gang.slots.version(), gang.nudge) {
            self.finish(now, &key);
        }
        answer
    }

    /// A member comes to be bound to a node. To be asked again whenever something has changed, until the answer is not
    /// [`Arrival::Wait`].
    pub fn arrive(&mut self, now: Now, uid: &PodUid, node: &NodeName) -> Arrival {
        self.clock = Some(now);
        let key = match self.of_pod.get(uid) {
            None => return Arrival::Single,
            Some(Belongs::Beyond(text)) => return Arrival::Refuse(text.clone()),
            Some(Belongs::To(key)) => key.clone(),
        };
        let mut arrival = Arrival::Single;
        self.with(now, &key, |gang, env| arrival = gang.arrive(env, uid, node));
        arrival
    }

    /// Whoever asked for a member to be bound has hung up or run out of time, before [`Arrival::Go`].
    pub fn withdraw(&mut self, now: Now, uid: &PodUid) {
        self.of_member(now, uid, |gang, env| gang.withdraw(env, uid));
    }

    /// How the writing of a decision has ended.
    pub fn committed(&mut self, now: Now, gang: &GangKey, decision: &str, result: Result<(), CommitFailure>) {
        self.clock = Some(now);
        let Some((key, _)) = self.gangs.get_key_value(gang) else {
            return;
        };
        let key = key.clone();
        self.with(now, &key, |gang, _| gang.committed(decision, result));
    }

    /// How the binding of a member has ended.
    pub fn bind_ended(&mut self, now: Now, uid: &PodUid, outcome: BindEnd) {
        self.of_member(now, uid, |gang, env| gang.bind_ended(env, uid, outcome));
    }

    /// Time has passed. To be called at [`Gangs::next_due`], and may be called at any time.
    pub fn tick(&mut self, now: Now) {
        self.clock = Some(now);
        let due: Vec<Arc<GangKey>> = self
            .timers
            .iter()
            .take_while(|(at, _)| *at <= now.at)
            .map(|(_, key)| key.clone())
            .collect();
        for key in due {
            self.finish(now, &key);
        }
    }

    /// When [`Gangs::tick`] is to be called, if nothing else is before.
    pub fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// What is to be done. Each is said once.
    pub fn take_work(&mut self) -> Vec<Work> {
        std::mem::take(&mut self.work)
    }

    /// The statuses that have changed. Each is the whole truth: a decision that it does not have is to be removed.
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
            if !gang.may_tell() {
                later.insert(key);
            } else if let Some(status) = gang.take_status(now.at, now.unix) {
                statuses.push((key, status));
            }
        }
        self.dirty = later;
        statuses
    }

    /// What is reserved from now on, or no longer, in the order in which it happened.
    pub fn take_slot_changes(&mut self) -> Vec<SlotChange> {
        std::mem::take(&mut self.slot_changes)
    }

    /// The gang that a pod belongs to.
    pub fn gang_of(&self, uid: &PodUid) -> Option<&Arc<GangKey>> {
        match self.of_pod.get(uid)? {
            Belongs::To(key) => Some(key),
            Belongs::Beyond(_) => None,
        }
    }

    /// A gang, to look at.
    pub fn view(&self, key: &GangKey) -> Option<View<'_>> {
        let now = self.clock?.at;
        let gang = self.gangs.get(key)?;
        Some(View { gang, now })
    }

    /// All gangs, by name.
    pub fn views(&self) -> impl Iterator<Item = View<'_>> {
        let now = self.clock.map(|now| now.at);
        self.gangs
            .values()
            .filter_map(move |gang| Some(View { gang, now: now? }))
    }

    fn of_member(&mut self, now: Now, uid: &PodUid, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        self.clock = Some(now);
        let Some(Belongs::To(key)) = self.of_pod.get(uid).cloned() else {
            return;
        };
        self.with(now, &key, act);
    }

    fn with(&mut self, now: Now, key: &Arc<GangKey>, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        if let Some(gang) = self.gangs.get_mut(key) {
            let mut env = Env {
                now,
                settings: &self.settings,
                synced: self.synced,
                decisions: &mut self.decisions,
                work: &mut self.work,
            };
            act(gang, &mut env);
            self.finish(now, key);
        }
    }

    /// Puts together what is said of a gang, if that has changed.
    fn agree_on(&mut self, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        if !gang.words.take_changed() && !gang.reagree {
            return;
        }
        gang.reagree = false;
        let wanted = gang.words.owner();
        let before = std::mem::replace(&mut gang.owner, wanted.clone());
        if before != wanted
            && let Some(before) = &before
        {
            leave_owner(&mut self.owners, before, key);
        }
        let mut known = None;
        if let Some(owner) = wanted {
            let entry = self.owners.entry(owner).or_default();
            entry.gangs.insert(key.clone());
            known = entry.known.clone();
        }
        let Some(agreed) = gang.words.agree(&known, gang.spec.as_ref(), &self.settings) else {
            return;
        };
        gang.agree_to(agreed);
    }

    /// Lets a gang draw its conclusions, and collects them.
    pub(super) fn finish(&mut self, now: Now, key: &Arc<GangKey>) {
        self.agree_on(key);
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        let mut env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            decisions: &mut self.decisions,
            work: &mut self.work,
        };
        gang.settle(&mut env);
        let changes = gang.slots.take_changes();
        let wants_plan = gang.may_ever_want_plan();
        let preempts = matches!(&gang.state, State::Planned(planned) if !planned.victims.is_empty());
        let due = gang.due(&self.settings, now.at);
        let before = std::mem::replace(&mut gang.timer, due);
        let devices = gang.slots.devices();
        let counted = std::mem::replace(&mut gang.counted, devices);
        let over = matches!(gang.state, State::Over { until } if now.at >= until);
        for (slot, place) in changes {
            self.reserve(key, slot, place.as_ref());
            let gang = key.clone();
            self.slot_changes.push(SlotChange { gang, slot, place });
        }
        if wants_plan {
            self.planable.insert(key.clone());
        } else {
            self.planable.remove(key);
        }
        if !preempts {
            self.preempting.remove(key);
        }
        if before != due {
            if let Some(before) = before {
                self.timers.remove(&(before, key.clone()));
            }
            if let Some(due) = due {
                self.timers.insert((due, key.clone()));
            }
        }
        if counted != devices {
            let held = self.held.entry(key.namespace.clone()).or_default();
            *held = held.saturating_sub(counted).saturating_add(devices);
            if *held == 0 {
                self.held.remove(&key.namespace);
            }
        }
        self.dirty.insert(key.clone());
        if over {
            self.forget(now, key);
        }
    }

    fn reserve(&mut self, key: &Arc<GangKey>, slot: u32, place: Option<&super::types::Reserved>) {
        if let Some((node, ids)) = self.reserved.remove(&(key.clone(), slot))
            && let Some(devices) = self.taken.get_mut(&node)
        {
            for id in ids {
                if devices.get(&id) == Some(key) {
                    devices.remove(&id);
                }
            }
            if devices.is_empty() {
                self.taken.remove(&node);
            }
        }
        let Some(place) = place else { return };
        let ids: Vec<DeviceId> = place.devices.iter().flat_map(|(_, ids)| ids.clone()).collect();
        let devices = self.taken.entry(place.node.clone()).or_default();
        devices.extend(ids.iter().map(|id| (id.clone(), key.clone())));
        self.reserved
            .insert((key.clone(), slot), (place.node.clone(), ids));
    }

    /// A gang is over and nobody has come back.
    fn forget(&mut self, now: Now, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.remove(key) else {
            return;
        };
        for kept in gang.members.iter() {
            self.of_pod.remove(&kept.member.uid);
        }
        if let Some(due) = gang.timer {
            self.timers.remove(&(due, key.clone()));
        }
        self.planable.remove(key);
        self.preempting.remove(key);
        self.dirty.remove(key);
        if let Some(owner) = &gang.owner {
            leave_owner(&mut self.owners, owner, key);
        }
        let name = (key.namespace.clone(), Arc::from(key.object_name()));
        let known = self.objects.get(&name);
        let ours = known.is_none_or(|known| known.ours && (known.is_about(key) || !known.is_about_a_gang()));
        if ours && (gang.told.anything() || known.is_some()) {
            self.work.push(Work::Forget(key.clone()));
        }
        if let Some(keys) = self.named.get_mut(&name) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.named.remove(&name);
            } else {
                self.follow_object(now, &name);
            }
        }
    }
}

fn leave_owner(owners: &mut BTreeMap<OwnerRef, Owner>, owner: &OwnerRef, gang: &Arc<GangKey>) {
    if let Some(entry) = owners.get_mut(owner) {
        entry.gangs.remove(gang);
        if entry.gangs.is_empty() && entry.known.is_none() {
            owners.remove(owner);
        }
    }
}

impl Gang {
    /// A member, as it is now.
    fn member_seen(&mut self, now: Now, member: Member, settings: &Settings) {
        let uid = member.uid.clone();
        let life = self.members.life();
        let waited = |gang: &Self| gang.members.unplaced().contains(&uid);
        let before = waited(self);
        match self.members.get(&uid) {
            Some(_) => self.members.change(&uid, |kept| kept.member = member),
            None => {
                self.members.insert(Kept::new(member, life));
                self.settle_until = now.at + settings.settle;
            }
        }
        self.follow(&uid, now.at);
        if before != waited(self) {
            self.changed();
        }
    }

    fn member_gone(&mut self, now: Now, uid: &PodUid) {
        let waited = self.members.unplaced().contains(uid);
        self.remove_member(uid, now.at);
        if waited {
            self.changed();
        }
    }

    /// What the planner was asked, or has answered, no longer holds.
    fn changed(&mut self) {
        self.tries.considered = None;
        self.tries.asked = false;
    }

    fn agree_to(&mut self, agreed: super::agreed::Agreed) {
        if self.agreed == agreed {
            return;
        }
        if let Some(terms) = agreed.terms() {
            self.good = Some(terms.clone());
        }
        self.agreed = agreed;
        self.changed();
        if matches!(self.state, State::Planned(_)) {
            self.unplan();
        }
    }

    fn not_committed_if_asked(&mut self, env: &mut Env<'_>) {
        if self.expects() == Some(super::gang::Expects::Object) {
            self.not_committed(env);
        }
    }

    /// It wants a plan, if not now then when time has passed.
    fn may_ever_want_plan(&self) -> bool {
        let open = matches!(self.state, State::Open | State::Decided(_));
        open && self.members.count().of(Class::Waiting) > 0 && self.working_terms().is_some()
    }
}
