//! The members of one gang, kept so that no question needs a walk over all of them: what is asked is brought up to date with every change.

mod count;
mod kept;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;

use super::types::Stage;
pub(super) use count::Count;
use kept::is_alive;
pub(super) use kept::{Bind, Class, Kept};

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

/// What has become of the members that one job or the like has made, of this life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Made {
    alive: u32,
    completed: u32,
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
        let fault = kept.member.membership.faults.first()?;
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
            self.complete(&kept.member.membership.role);
            self.made(&kept.member.membership.made_by, Class::Completed, 1);
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
        self.made(&kept.member.membership.made_by, class, -1);
        if let Some(count) = self.by_role.get_mut(&kept.member.membership.role) {
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
        self.made(&kept.member.membership.made_by, class, 1);
        self.by_role
            .entry(kept.member.membership.role.clone())
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
