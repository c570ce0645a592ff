//! The members of one gang, and how many there are of each standing, kept up to date with every change so that no question needs a walk
//! over all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;

use super::agreed::Says;
use super::parked::Kind;
use super::types::{Member, Stage};

/// What is kept of a member.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    pub(super) member: Member,
    /// In which life of the gang it came: after a restart those of before do not count.
    pub(super) life: u32,
    /// It ended well in a life before. It counts as long as its pod is there: a controller that makes all of them anew removes it.
    carried: bool,
    /// Its slot. [`super::gang::Gang`] sees to it that the slot knows it too.
    pub(super) slot: Option<u32>,
    /// Since when it has it.
    pub(super) tied: Option<Instant>,
    /// Its slot is one whose member comes after its siblings are bound.
    pub(super) follows: bool,
    /// It has come to its place: nobody has to wait for it.
    pub(super) arrived: bool,
    /// It stands at the barrier. One that has come and is not there any more waited for its siblings as long as it may.
    pub(super) here: bool,
    /// How far its binding is.
    pub(super) bind: Bind,
    /// A bind has found it gone before the watch has.
    pub(super) gone: bool,
    /// When the removal of our gate was last asked for.
    pub(super) ungated: Option<Instant>,
    /// Filter has answered it with the node of its slot.
    pub(super) answered: bool,
    /// When it was told to wait, if it was not woken since.
    pub(super) parked: Option<Instant>,
    /// Of what kind the reason is that it was told when it was refused last.
    pub(super) told: Option<Kind>,
    /// It has to go for another gang, which has its devices from then on.
    pub(super) evicted: bool,
    /// What it says counts among the gang's words.
    pub(super) worded: Option<Says>,
}

/// How far the binding of a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bind {
    /// Not begun, or failed.
    No,
    /// On its way.
    Going,
    /// Nobody knows how it ended.
    Unsure,
    /// Done, by the word of the binder.
    Done,
}

/// What a member counts as. Each is of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Class {
    /// Of a life before.
    Old,
    /// It is being deleted, or has failed.
    Lost,
    /// What it says is wrong.
    Faulty,
    /// Kept back by gates that are not ours.
    Foreign,
    /// Another scheduler is to place it.
    Elsewhere,
    /// It exists, and has no slot.
    Waiting,
    /// It has a slot, and has not arrived.
    Coming,
    /// The same, and it cannot arrive before siblings are bound.
    Following,
    /// It exists and needs no devices.
    Light,
    /// It has come to its place.
    Arrived,
    /// Bound, and without devices.
    LightBound,
    /// Bound.
    Bound,
    /// Ended well.
    Completed,
}

const CLASSES: usize = 13;

impl Kept {
    pub(super) fn new(member: Member, life: u32) -> Self {
        Self {
            member,
            life,
            carried: false,
            slot: None,
            tied: None,
            follows: false,
            arrived: false,
            here: false,
            bind: Bind::No,
            gone: false,
            ungated: None,
            answered: false,
            parked: None,
            told: None,
            evicted: false,
            worded: None,
        }
    }

    /// Takes what the watch shows of it now. One that was asked to go and then ended well, as programs do that handle TERM, has not done its
    /// part: it is lost like any other that is deleted.
    pub(super) fn update(&mut self, member: Member) {
        let was_asked = self.member.leaving && self.member.stage != Stage::Succeeded;
        self.member = member;
        if was_asked && self.member.stage == Stage::Succeeded {
            self.member.stage = Stage::Failed;
        }
    }

    pub(super) fn class(&self, life: u32) -> Class {
        let light = self.member.shape.is_none();
        let leaving = self.member.leaving || self.gone;
        match &self.member.stage {
            _ if self.life != life => Class::Old,
            Stage::Succeeded => Class::Completed,
            Stage::Failed => Class::Lost,
            _ if leaving => Class::Lost,
            Stage::Bound(_) if light => Class::LightBound,
            Stage::Bound(_) => Class::Bound,
            _ if self.bind == Bind::Done => Class::Bound,
            _ if !self.member.claim.faults.is_empty() => Class::Faulty,
            _ if self.member.elsewhere.is_some() => Class::Elsewhere,
            Stage::Gated { by_us_alone: false } => Class::Foreign,
            _ if light => Class::Light,
            _ if self.slot.is_none() => Class::Waiting,
            _ if self.arrived => Class::Arrived,
            _ if self.follows => Class::Following,
            _ => Class::Coming,
        }
    }

    /// It is of this life, has not ended and is not being deleted.
    pub(super) fn is_alive(&self, life: u32) -> bool {
        is_alive(self.class(life))
    }

    /// It is a pod that has not ended and is not being deleted.
    pub(super) fn lives(&self) -> bool {
        !self.member.leaving && !self.gone && !matches!(self.member.stage, Stage::Succeeded | Stage::Failed)
    }

    /// It is a pod that has not ended, though it may be on its way to.
    pub(super) fn runs(&self) -> bool {
        !self.gone && !matches!(self.member.stage, Stage::Succeeded | Stage::Failed)
    }

    /// Its Binding may exist or come to exist: its slot cannot be given to another.
    pub(super) fn pinned(&self) -> bool {
        self.bind != Bind::No || matches!(self.member.stage, Stage::Bound(_))
    }

    /// The scheduler that is to place it, if it counts as one that does not ask us.
    fn placed_by_another(&self, class: Class) -> Option<&Arc<str>> {
        let by = self.member.elsewhere.as_ref();
        by.filter(|_| class == Class::Elsewhere)
    }

    /// It has come, and waits for its siblings elsewhere: in kube-scheduler.
    pub(super) fn is_aside(&self) -> bool {
        self.arrived && !self.here && !self.pinned()
    }

    /// Since when it is waited for at its slot, if it is.
    fn idle_since(&self, class: Class) -> Option<Instant> {
        let idle = matches!(class, Class::Coming | Class::Following) && !self.pinned();
        self.tied.filter(|_| idle)
    }

    pub(super) fn come(&mut self) {
        self.arrived = true;
        self.here = true;
    }

    /// It has to come anew.
    pub(super) fn leave(&mut self) {
        self.arrived = false;
        self.here = false;
    }

    fn devices(&self) -> u64 {
        self.member.asks.iter().map(|(_, count)| u64::from(*count)).sum()
    }
}

fn is_alive(class: Class) -> bool {
    !matches!(class, Class::Old | Class::Lost | Class::Completed)
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
        self.of(Class::Faulty) + self.of(Class::Foreign) + self.of(Class::Elsewhere)
    }

    /// Members that count towards the quorum by their existence.
    pub(super) fn exist(&self) -> u32 {
        self.of(Class::Waiting) + self.placed()
    }

    /// Members that have a place or need none.
    pub(super) fn placed(&self) -> u32 {
        self.of(Class::Coming) + self.ready()
    }

    /// Members that nobody has to wait for at the barrier.
    pub(super) fn ready(&self) -> u32 {
        self.of(Class::Arrived) + self.of(Class::Following) + self.settled()
    }

    /// Members that are as good as bound.
    pub(super) fn settled(&self) -> u32 {
        self.of(Class::Light) + self.of(Class::LightBound) + self.of(Class::Bound) + self.of(Class::Completed)
    }

    /// Members that are bound.
    pub(super) fn bound(&self) -> u32 {
        self.of(Class::LightBound) + self.of(Class::Bound)
    }

    /// Members of this life that have not ended and are not being deleted.
    pub(super) fn alive(&self) -> u32 {
        self.0.iter().sum::<u32>() - self.of(Class::Old) - self.of(Class::Lost) - self.of(Class::Completed)
    }
}

/// What has become of the members that one job or the like has made, of this life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Made {
    alive: u32,
    completed: u32,
}

/// All members of a gang.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    all: BTreeMap<PodUid, Kept>,
    /// The life the gang is in.
    life: u32,
    /// Whether it goes on with what was done in the life before.
    goes_on: bool,
    total: Count,
    by_role: BTreeMap<Arc<str>, Count>,
    /// By the UID of what made them.
    by_maker: BTreeMap<Option<Arc<str>>, Made>,
    /// So many were alive or had ended well at a time, in this life.
    most: u32,
    priorities: BTreeMap<i32, u32>,
    /// Members that another scheduler is to place, by its name.
    elsewhere: BTreeMap<Arc<str>, u32>,
    /// Members that exist, want devices, and have no slot.
    unplaced: BTreeSet<PodUid>,
    /// Devices that unplaced members ask for.
    unplaced_devices: u64,
    /// Members of lives before whose pods are there and have not ended.
    old_present: u32,
    /// Members with a slot that are neither bound nor lost.
    on_the_way: BTreeSet<PodUid>,
    /// Those of them that have come and left ([`Kept::is_aside`]).
    aside: BTreeSet<PodUid>,
    /// Those of them that are waited for, and since when.
    idle: BTreeSet<(Instant, PodUid)>,
    /// Members that no gate but ours keeps back, and whose gate nobody was asked to remove.
    gated: BTreeSet<PodUid>,
    /// Those that somebody was asked to remove it from, and when.
    asked: BTreeSet<(Instant, PodUid)>,
}

impl Members {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&Kept> {
        self.all.get(uid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Kept> {
        self.all.values()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// No pod of this life is there any more.
    pub(super) fn has_left(&self) -> bool {
        self.all.values().all(|kept| kept.life != self.life)
    }

    pub(super) fn life(&self) -> u32 {
        self.life
    }

    pub(super) fn count(&self) -> &Count {
        &self.total
    }

    pub(super) fn count_of(&self, role: &str) -> Count {
        self.by_role.get(role).copied().unwrap_or_default()
    }

    /// The most that were alive or had ended well at a time.
    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// There were at least so many.
    pub(super) fn were(&mut self, count: u32) {
        self.most = self.most.max(count);
    }

    /// What made those that are alive is known, and is other than what made those that have ended well.
    pub(super) fn are_of_others(&self) -> bool {
        let mut makers = self.by_maker.iter();
        makers.all(|(maker, made)| made.alive == 0 || maker.is_some() && made.completed == 0)
    }

    /// Of those that are alive it is not known what made them.
    pub(super) fn are_of_nobody(&self) -> bool {
        let mut makers = self.by_maker.iter();
        makers.all(|(maker, made)| made.alive == 0 || maker.is_none())
    }

    /// Those that are alive were made after all that have ended well and are still there.
    pub(super) fn came_after(&self) -> bool {
        let of = |kept: &&Kept| kept.class(self.life) == Class::Completed;
        let last = self.all.values().filter(of).map(|kept| kept.member.created).max();
        let mut alive = self.all.values().filter(|kept| kept.is_alive(self.life));
        alive.all(|kept| Some(kept.member.created) >= last)
    }

    pub(super) fn priority(&self) -> i32 {
        self.priorities.keys().next_back().copied().unwrap_or_default()
    }

    /// What is wrong with what one of them says.
    pub(super) fn first_fault(&self) -> Option<String> {
        let mut faulty = self
            .all
            .values()
            .filter(|kept| kept.class(self.life) == Class::Faulty);
        let kept = faulty.next()?;
        let fault = kept.member.claim.faults.first()?;
        Some(format!("pod {}: {fault}", kept.member.name))
    }

    /// The schedulers that are to place members and do not ask us, and how many each.
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

    /// Members that are waited for at their slots, and since when: the first the longest.
    pub(super) fn idle(&self) -> impl Iterator<Item = (Instant, &PodUid)> {
        self.idle.iter().map(|(since, uid)| (*since, uid))
    }

    /// Has those that have come and left, with slots `of` which this is said, come anew. Who they are.
    pub(super) fn call_back(&mut self, of: impl Fn(u32) -> bool) -> Vec<PodUid> {
        let slot = |uid: &PodUid| self.all.get(uid).and_then(|kept| kept.slot);
        let aside = self.aside.iter().filter(|uid| slot(uid).is_some_and(&of));
        let aside: Vec<PodUid> = aside.cloned().collect();
        for uid in &aside {
            self.change(uid, Kept::leave);
        }
        aside
    }

    /// Members whose gate is ours and has to go if it `goes`: nobody was asked to remove it, or it was in vain.
    pub(super) fn to_ungate(
        &self,
        in_vain: impl Fn(Instant) -> bool,
        goes: impl Fn(&Kept) -> bool,
    ) -> Vec<PodUid> {
        let asked = self.asked.iter().take_while(|(at, _)| in_vain(*at));
        let due = self.gated.iter().chain(asked.map(|(_, uid)| uid));
        let due = due.filter(|uid| self.all.get(*uid).is_some_and(&goes));
        due.cloned().collect()
    }

    /// Members whose gate somebody was asked to remove, and is still there.
    pub(super) fn asked(&self) -> impl Iterator<Item = &Kept> {
        self.asked.iter().filter_map(|(_, uid)| self.all.get(uid))
    }

    /// When somebody was first asked to remove a gate that is still there.
    pub(super) fn first_asked(&self) -> Option<Instant> {
        self.asked.first().map(|(at, _)| *at)
    }

    pub(super) fn old_present(&self) -> u32 {
        self.old_present
    }

    /// Adds a member; one with the same UID is replaced.
    pub(super) fn insert(&mut self, kept: Kept) {
        self.take(&kept.member.uid.clone());
        self.enter(&kept);
        self.all.insert(kept.member.uid.clone(), kept);
    }

    /// Changes a member.
    pub(super) fn change(&mut self, uid: &PodUid, change: impl FnOnce(&mut Kept)) {
        if let Some(mut kept) = self.take(uid) {
            change(&mut kept);
            self.enter(&kept);
            self.all.insert(uid.clone(), kept);
        }
    }

    /// Removes a member. One that has ended well goes on counting: it has done its part.
    pub(super) fn remove(&mut self, uid: &PodUid) -> Option<Kept> {
        let kept = self.take(uid)?;
        if kept.class(self.life) == Class::Completed && !kept.carried {
            self.complete(&kept.member.claim.role);
            self.made(&kept.member.claim.made_by, Class::Completed, 1);
        }
        Some(kept)
    }

    /// Counts a member that has ended well and whose pod is no longer there.
    pub(super) fn complete(&mut self, role: &Arc<str>) {
        self.total.add(Class::Completed);
        self.by_role
            .entry(role.clone())
            .or_default()
            .add(Class::Completed);
    }

    /// Begins a new life: of the members that there are, none counts any more but, if the gang goes on, those that have ended well.
    pub(super) fn begin_life(&mut self, goes_on: bool) {
        let before = self.life;
        self.life += 1;
        let all = std::mem::take(&mut self.all);
        *self = Self {
            life: self.life,
            goes_on,
            ..Self::default()
        };
        for (uid, mut kept) in all {
            if goes_on && kept.class(before) == Class::Completed {
                kept.life = self.life;
                kept.carried = true;
            }
            kept.slot = None;
            kept.leave();
            kept.worded = None;
            self.enter(&kept);
            self.all.insert(uid, kept);
        }
    }

    /// One of the life before that turns out to have ended well before anybody asked it to go: it counts on, as those do of whom that was
    /// known when that life ended.
    pub(super) fn carry_late(&mut self, uid: &PodUid) {
        let life = self.life;
        let is_late = |kept: &Kept| {
            let ended = kept.member.stage == Stage::Succeeded && !kept.member.leaving && !kept.gone;
            ended && kept.life.saturating_add(1) == life
        };
        if self.goes_on && self.get(uid).is_some_and(is_late) {
            self.change(uid, |kept| {
                kept.life = life;
                kept.carried = true;
            });
        }
    }

    /// One more, or one less, that the same job has made.
    fn made(&mut self, maker: &Option<Arc<str>>, class: Class, change: i32) {
        if !is_alive(class) && class != Class::Completed {
            return;
        }
        let made = match self.by_maker.get_mut(maker) {
            Some(made) => made,
            None => self.by_maker.entry(maker.clone()).or_default(),
        };
        let count = match class {
            Class::Completed => &mut made.completed,
            _ => &mut made.alive,
        };
        *count = count.saturating_add_signed(change);
        if *made == Made::default() {
            self.by_maker.remove(maker);
        }
    }

    fn take(&mut self, uid: &PodUid) -> Option<Kept> {
        let kept = self.all.remove(uid)?;
        let class = kept.class(self.life);
        self.total.remove(class);
        self.made(&kept.member.claim.made_by, class, -1);
        if let Some(count) = self.by_role.get_mut(&kept.member.claim.role) {
            count.remove(class);
        }
        if let Some(count) = self.priorities.get_mut(&kept.member.priority) {
            *count -= 1;
            if *count == 0 {
                self.priorities.remove(&kept.member.priority);
            }
        }
        if let Some(by) = kept.placed_by_another(class)
            && let Some(count) = self.elsewhere.get_mut(by)
        {
            *count -= 1;
            if *count == 0 {
                self.elsewhere.remove(by);
            }
        }
        if self.unplaced.remove(uid) {
            self.unplaced_devices = self.unplaced_devices.saturating_sub(kept.devices());
        }
        self.on_the_way.remove(uid);
        self.aside.remove(uid);
        if let Some(since) = kept.idle_since(class) {
            self.idle.remove(&(since, uid.clone()));
        }
        self.gated.remove(uid);
        if let Some(asked) = kept.ungated {
            self.asked.remove(&(asked, uid.clone()));
        }
        if class == Class::Old && kept.runs() {
            self.old_present = self.old_present.saturating_sub(1);
        }
        Some(kept)
    }

    fn enter(&mut self, kept: &Kept) {
        let class = kept.class(self.life);
        self.total.add(class);
        self.were(self.total.alive() + self.total.of(Class::Completed));
        self.made(&kept.member.claim.made_by, class, 1);
        self.by_role
            .entry(kept.member.claim.role.clone())
            .or_default()
            .add(class);
        *self.priorities.entry(kept.member.priority).or_default() += 1;
        if let Some(by) = kept.placed_by_another(class) {
            *self.elsewhere.entry(by.clone()).or_default() += 1;
        }
        match class {
            Class::Waiting => {
                self.unplaced.insert(kept.member.uid.clone());
                self.unplaced_devices = self.unplaced_devices.saturating_add(kept.devices());
            }
            Class::Coming | Class::Following | Class::Arrived => {
                self.on_the_way.insert(kept.member.uid.clone());
                if kept.is_aside() {
                    self.aside.insert(kept.member.uid.clone());
                }
                if let Some(since) = kept.idle_since(class) {
                    self.idle.insert((since, kept.member.uid.clone()));
                }
            }
            _ => {}
        }
        let counts = matches!(
            class,
            Class::Waiting | Class::Coming | Class::Following | Class::Arrived | Class::Light
        );
        if counts && kept.member.stage == (Stage::Gated { by_us_alone: true }) {
            let uid = kept.member.uid.clone();
            match kept.ungated {
                None => self.gated.insert(uid),
                Some(at) => self.asked.insert((at, uid)),
            };
        }
        if class == Class::Old && kept.runs() {
            self.old_present += 1;
        }
    }
}
