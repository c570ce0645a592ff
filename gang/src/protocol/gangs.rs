//! All gangs: finds the one that a call is about, lets it draw its conclusions, and collects what is to be done. What a gang does is
//! decided in its own modules.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, GangStatus, NodeName, PodUid};

use super::agreed::OwnerKnown;
use super::beyond::Line;
use super::gang::Gang;
use super::objects::ObjectName;
use super::order::Turn;
use super::recovery::Known;
use super::types::{Answer, Arrival, BindEnd, Blocker, CommitFailure, Now, Settings, SlotChange, Work};
use super::view::View;
use crate::key::GangKey;
use crate::membership::OwnerRef;

/// By node and device, the gang that has a place with it.
pub(super) type Taken = HashMap<NodeName, HashMap<DeviceId, Arc<GangKey>>>;

/// The state machine of all gangs. Its head, [`super`], says what always holds.
#[derive(Debug, Clone)]
pub struct Gangs {
    pub(super) settings: Settings,
    pub(super) synced: bool,
    pub(super) gangs: BTreeMap<Arc<GangKey>, Gang>,
    pub(super) of_pod: HashMap<PodUid, Belongs>,
    pub(super) owners: BTreeMap<OwnerRef, Owner>,
    pub(super) objects: BTreeMap<ObjectName, Known>,
    /// Objects of ours that are no gang's, and when they go.
    pub(super) strays: BTreeMap<ObjectName, Instant>,
    /// The gangs whose object has that namespace and name: one, if names are not in each other's way.
    pub(super) named: BTreeMap<ObjectName, Vec<Arc<GangKey>>>,
    /// Gangs that want a plan, now or at some time.
    pub(super) planable: BTreeSet<Arc<GangKey>>,
    /// Those of them that could be planned now, and what their order goes by.
    pub(super) ready: BTreeMap<Arc<GangKey>, Turn>,
    /// Those of them that were not planned since room last grew: none of the others need be looked at.
    pub(super) untried: BTreeSet<Arc<GangKey>>,
    /// Gangs that may have places to give back, of members beyond their minimum or of lost ones.
    pub(super) stocked: BTreeSet<Arc<GangKey>>,
    /// Pods that are one too many.
    pub(super) beyond: Line,
    /// Some of them can come in now.
    pub(super) more_wait: bool,
    /// In which order those are planned, the first last, until anything changes that the order goes by: to find it anew for each of ten
    /// thousand would take longer than to plan them.
    pub(super) line: Option<Vec<Arc<GangKey>>>,
    /// The room that was last planned in.
    pub(super) room: u64,
    /// Devices that the gangs of each namespace hold.
    pub(super) held: BTreeMap<Arc<str>, u64>,
    /// Whose place each device is, where it is reserved for one.
    pub(super) taken: Taken,
    /// What is reserved, to find it again when it is released.
    pub(super) reserved: HashMap<(Arc<GangKey>, u32), (NodeName, Vec<DeviceId>)>,
    /// The pods that have to go for each gang that preempts.
    pub(super) preempting: BTreeMap<Arc<GangKey>, Vec<PodUid>>,
    pub(super) timers: BTreeSet<(Instant, Arc<GangKey>)>,
    pub(super) dirty: BTreeSet<Arc<GangKey>>,
    pub(super) clock: Option<Now>,
    pub(super) decisions: u64,
    pub(super) work: Vec<Work>,
    pub(super) slot_changes: Vec<SlotChange>,
}

/// Where a pod belongs.
#[derive(Debug, Clone)]
pub(super) enum Belongs {
    To(Arc<GangKey>),
    /// To a gang that is one too many, or too large.
    Beyond(Arc<str>),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Owner {
    pub(super) known: OwnerKnown,
    /// It was read, and is not there any more.
    pub(super) gone: bool,
    pub(super) gangs: BTreeSet<Arc<GangKey>>,
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
            strays: BTreeMap::new(),
            named: BTreeMap::new(),
            planable: BTreeSet::new(),
            ready: BTreeMap::new(),
            untried: BTreeSet::new(),
            stocked: BTreeSet::new(),
            beyond: Line::default(),
            more_wait: false,
            line: None,
            room: 0,
            held: BTreeMap::new(),
            taken: HashMap::new(),
            reserved: HashMap::new(),
            preempting: BTreeMap::new(),
            timers: BTreeSet::new(),
            dirty: BTreeSet::new(),
            clock: None,
            decisions: 0,
            work: Vec::new(),
            slot_changes: Vec::new(),
        }
    }

    /// A pod that had to go for a gang ([`Work::Evict`]) is gone, and its devices are free. To be said of any pod; of others it means
    /// nothing.
    pub fn victim_gone(&mut self, now: Now, uid: &PodUid) {
        self.clock = Some(now);
        for key in self.wait_for(uid) {
            self.with(now, &key, |gang, env| gang.victim_gone(env, uid));
        }
    }

    /// The gangs that a pod has to go for.
    fn wait_for(&self, uid: &PodUid) -> Vec<Arc<GangKey>> {
        let waiting = self
            .preempting
            .iter()
            .filter(|(_, victims)| victims.contains(uid));
        waiting.map(|(key, _)| Arc::clone(key)).collect()
    }

    /// A pod is on its way out, and is to be gone by `by`, in seconds since 1970. To be said of any pod; it means something where it has to
    /// go for a gang: that waits for it then.
    pub fn victim_ends(&mut self, now: Now, uid: &PodUid, by: i64) {
        self.clock = Some(now);
        for key in self.wait_for(uid) {
            let gang = self.gangs.get_mut(&key);
            if gang.is_some_and(|gang| gang.victim_ends(uid, by)) {
                self.finish(now, &key);
            }
        }
    }

    /// A node, or a device of it, is lost: places there that are not bound are of no use.
    pub fn unfit(&mut self, now: Now, node: &NodeName) {
        self.clock = Some(now);
        let there: BTreeSet<Arc<GangKey>> = self
            .taken
            .get(node)
            .into_iter()
            .flat_map(|devices| devices.values().cloned())
            .collect();
        for key in there {
            self.with(now, &key, |gang, _| gang.unfit(&|_, slot| slot.node == *node));
        }
    }

    /// The same for some slots of one gang: their devices cannot be had, and its other places on the node are as good as before.
    pub fn unfit_slots(&mut self, now: Now, gang: &GangKey, slots: &BTreeSet<u32>) {
        self.of_gang(now, gang, |gang, _| gang.unfit(&|id, _| slots.contains(&id)));
    }

    /// Gives back places of members of a gang beyond its minimum: others need them more. Only such as [`View::spares`] names. How many.
    pub fn release_extras(&mut self, now: Now, gang: &GangKey, slots: &BTreeSet<u32>) -> u32 {
        let mut released = 0;
        self.of_gang(now, gang, |gang, _| released = gang.release_extras(slots));
        released
    }

    /// Gives up places kept for members that a gang has lost: somebody of higher priority, whom `to` names for people, has them. Only such
    /// as [`View::idle`] names. How many.
    pub fn give_up_idle(&mut self, now: Now, gang: &GangKey, slots: &BTreeSet<u32>, to: &Arc<str>) -> u32 {
        let mut given = 0;
        self.of_gang(now, gang, |gang, _| given = gang.give_up_idle(slots, to));
        given
    }

    /// Gangs that may have places to give back ([`View::spares`], [`View::idle`]), by name.
    pub fn stocked(&self) -> impl Iterator<Item = View<'_>> {
        let now = self.clock.map(|now| now.at);
        let gangs = self.stocked.iter().filter_map(|key| self.gangs.get(key));
        gangs.filter_map(move |gang| Some(View { gang, now: now? }))
    }

    /// What filter answers for a pod. `offered` says which nodes kube-scheduler offers.
    pub fn answer(&mut self, now: Now, uid: &PodUid, offered: &dyn Fn(&NodeName) -> bool) -> Answer {
        self.clock = Some(now);
        let key = match self.of_pod.get(uid) {
            None => return Answer::Single,
            Some(Belongs::Beyond(text)) => return Answer::Wait(text.clone()),
            Some(Belongs::To(key)) => key.clone(),
        };
        let found = self.with_env(now, &key);
        let Some((gang, mut env)) = found.filter(|(gang, _)| !gang.lets_go(uid)) else {
            return Answer::Single;
        };
        let before = (gang.slots.version(), gang.nudge);
        let answer = gang.answer(&mut env, uid, offered);
        let mut answer = answer;
        if before != (gang.slots.version(), gang.nudge) {
            self.finish(now, &key);
            let placeless = self
                .gangs
                .get(&key)
                .filter(|gang| matches!(answer, Answer::Wait(_)) && gang.slot_of(uid).is_none());
            answer = placeless.map_or(answer, |gang| Answer::Wait(gang.text.clone()));
        }
        if let Answer::Wait(text) = &answer
            && let Some(gang) = self.gangs.get_mut(&key)
        {
            let told = Arc::ptr_eq(text, &gang.text);
            gang.note_parked(uid, now.at, told);
        }
        answer
    }

    /// What has to be done to pods for a gang may not be done, and why; `None`: it was done after all. What was said first stays until
    /// then: of many pods each says it of itself.
    pub fn hindered(&mut self, now: Now, gang: &GangKey, what: Blocker, why: Option<Arc<str>>) {
        self.of_gang(now, gang, |gang, _| {
            if let Some(why) = why {
                gang.hindered.entry(what).or_insert(why);
            } else {
                gang.hindered.remove(&what);
            }
        });
    }

    /// What kube-scheduler says of nodes that it does not offer for a member, in words that stay the same while that does: by this a gang
    /// that cannot be bound where it is planned tells why.
    pub fn scheduler_says(&mut self, uid: &PodUid, words: &Arc<str>) {
        let Some(Belongs::To(key)) = self.of_pod.get(uid) else {
            return;
        };
        if let Some(gang) = self.gangs.get_mut(key)
            && gang.tries.said.as_ref() != Some(words)
        {
            gang.tries.said = Some(Arc::clone(words));
        }
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
        self.with(now, &key, |gang, env| {
            if !gang.lets_go(uid) {
                arrival = gang.arrive(env, uid, node);
            }
        });
        arrival
    }

    /// A member has waited at its barrier as long as it may, and whoever asked for it to be bound was told so. It counts as there all the
    /// same.
    pub fn gave_up(&mut self, now: Now, uid: &PodUid) {
        self.of_member(now, uid, |gang, env| gang.gave_up(env, uid));
    }

    /// Nodes of these slots of a gang offer less than before, besides devices: whoever is not there just now has to come anew.
    pub fn doubt(&mut self, now: Now, gang: &GangKey, slots: &BTreeSet<u32>) {
        self.of_gang(now, gang, |gang, env| gang.doubt(env, slots));
    }

    /// Whoever asked for a member to be bound has hung up, before [`Arrival::Go`].
    pub fn withdraw(&mut self, now: Now, uid: &PodUid) {
        self.of_member(now, uid, |gang, env| gang.withdraw(env, uid));
    }

    /// How the writing of a decision has ended.
    pub fn committed(&mut self, now: Now, gang: &GangKey, decision: &str, result: Result<(), CommitFailure>) {
        self.of_gang(now, gang, |gang, env| gang.committed(env, decision, result));
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
        // Nobody tells of what no gang goes by: by the time that one comes again it may say something else.
        self.owners.retain(|_, owner| !owner.gangs.is_empty());
        self.drop_strays(now);
        self.more_wait = self.let_in(now);
    }

    /// When [`Gangs::tick`] is to be called, if nothing else is before.
    pub fn next_due(&self) -> Option<Instant> {
        let timers = self.timers.first().map(|(at, _)| *at);
        let at_once = self.clock.filter(|_| self.more_wait).map(|now| now.at);
        let due = timers.into_iter().chain(at_once);
        due.chain(self.strays.values().copied()).min()
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

    /// The gang that a pod goes with as a whole; `None` also for one of a group of which each goes by itself.
    pub fn goes_with(&self, uid: &PodUid) -> Option<&Arc<GangKey>> {
        let key = self.gang_of(uid)?;
        let whole = self.gangs.get(key).is_some_and(|gang| !gang.goes_singly());
        whole.then_some(key)
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
}
