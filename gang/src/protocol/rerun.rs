//! The next run under a name that was used before: where the gang is told apart by nothing but its name or an object that stays, the pods
//! of a run that is done may still be there when those of the next come. They are a life of their own, and nothing of what is done counts
//! in it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{Decision, GangPhase, PodUid};

use super::gang::{Env, Gang, State};
use super::members::{Class, Count};
use super::recovery::Known;
use super::standing::after;
use super::types::{Member, Settings, Stage};

impl Gang {
    /// Those that have ended well are as many as are needed, and nobody else of it has a place or is on a node.
    fn is_done(&self) -> bool {
        let count = self.members.count();
        let idle = count.of(Class::Bound) == 0 && self.members.on_the_way().is_empty();
        let may = matches!(self.state, State::Open | State::Decided(_)) && self.key.incarnation.is_empty();
        may && idle
            && count.of(Class::Completed) > 0
            && self.enough(|count: &Count| count.of(Class::Completed))
    }

    /// Whether those that wait are another run than those that have ended well: others made them.
    pub(super) fn is_next_run(&self) -> bool {
        self.is_done()
            && self.waits_beside_light()
            && self.members.are_of_others()
            && self.members.came_after()
            // Where more may be than are needed, they may be some of those.
            && self.lacks_nobody(0)
    }

    /// Some that are alive are not of those that run without devices.
    fn waits_beside_light(&self) -> bool {
        let count = self.members.count();
        count.alive() > count.of(Class::Light) + count.of(Class::LightBound)
    }

    /// Whether a member that comes is the first of the next run, though nothing tells what made it: all of the run before are done.
    pub(super) fn begins_next_run(&self, member: &Member) -> bool {
        let waits = matches!(member.stage, Stage::Pending | Stage::Gated { .. }) && !member.leaving;
        let alone = self.members.count().alive() == 0 && member.membership.made_by.is_none();
        waits && alone && self.is_done() && self.lacks_nobody(self.members.most())
    }

    /// Nobody is missing of as many as may be, where that is said, or else of `most`: who comes is in nobody's place.
    fn lacks_nobody(&self, most: u32) -> bool {
        let terms = self.working_terms();
        let said = terms.and_then(|terms| (terms.max < u32::MAX).then_some(terms.max).or(terms.total));
        self.members.count().of(Class::Completed) >= said.unwrap_or(most)
    }

    /// Begins the next run with those that are alive.
    pub(super) fn begin_next_run(&mut self, env: &Env<'_>) {
        let life = self.members.life();
        let alive = self.members.iter().filter(|kept| kept.is_alive(life));
        let alive: Vec<PodUid> = alive.map(|kept| kept.member.uid.clone()).collect();
        self.begin_run(&alive, env.now.unix, env.now.at, env.settings);
    }

    /// Begins the next run with these members; the others are of the one before.
    pub(super) fn begin_run(&mut self, with: &[PodUid], unix: i64, now: Instant, settings: &Settings) {
        self.begin_life_with(with, false, now);
        self.state = State::Open;
        self.waiting_since = unix;
        self.settle_until = after(now, settings.settle);
    }

    /// Begins a new life with these members.
    pub(super) fn begin_life_with(&mut self, with: &[PodUid], goes_on: bool, now: Instant) {
        self.begin_life(goes_on);
        let life = self.members.life();
        for uid in with {
            self.members.change(uid, |kept| kept.life = life);
            self.follow(uid, now);
        }
    }

    /// Members that had ended well before the run began of which the object speaks: the process before did not count them, and what its
    /// decision does not name has not ended since. Without devices nothing of them stands in a decision: of those only the older ones are.
    pub(super) fn leave_behind(&mut self, env: &Env<'_>, known: &Known, decision: Option<&Decision>) {
        let fresh = matches!(self.state, State::Open) && !self.told.anything();
        let count = self.members.count();
        // Whom others have bound is nobody's decision: he may have ended since the last word.
        let past_us = decision.is_none() && count.of(Class::Bound) > 0;
        let none = past_us || count.of(Class::Completed) == 0;
        if !fresh || none || !self.key.incarnation.is_empty() {
            return;
        }
        let slots = decision.into_iter().flat_map(|decision| &decision.reservations);
        let named: BTreeSet<&PodUid> = slots.filter_map(|slot| slot.pod.as_ref()).collect();
        let life = self.members.life();
        let goes_on = |uid: &PodUid, alive: bool| alive || named.contains(uid);
        let makers: BTreeSet<&Arc<str>> = self
            .members
            .iter()
            .filter(|kept| goes_on(&kept.member.uid, kept.is_alive(life)))
            .filter_map(|kept| kept.member.membership.made_by.as_ref())
            .collect();
        let ended = self
            .members
            .iter()
            .filter(|kept| kept.class(life) == Class::Completed && !named.contains(&kept.member.uid));
        let (mut counted, mut others, mut light) = (0_u32, Vec::new(), Vec::new());
        for kept in ended {
            let at = (kept.member.created, kept.member.uid.clone());
            let of_this = kept
                .member
                .membership
                .made_by
                .as_ref()
                .is_some_and(|maker| makers.contains(maker));
            match kept.member.shape {
                None if of_this => {}
                None => light.push(at),
                Some(_) => {
                    counted = counted.saturating_add(1);
                    others.extend((!of_this).then_some(at));
                }
            }
        }
        others.sort_unstable();
        others.truncate(counted.saturating_sub(known.completed) as usize);
        let Some((newest, _)) = others.last() else { return };
        light.retain(|(created, _)| created <= newest);
        let before: BTreeSet<PodUid> = others.into_iter().chain(light).map(|(_, uid)| uid).collect();
        let all = self.members.iter().map(|kept| &kept.member.uid);
        let with: Vec<PodUid> = all.filter(|uid| !before.contains(*uid)).cloned().collect();
        self.begin_life_with(&with, false, env.now.at);
    }

    /// The process before saw all of a run done, and those that wait now came after: nothing more need tell them from it.
    pub(super) fn came_after_all(&mut self, env: &Env<'_>, known: &Known) {
        let came = self.is_done() && self.waits_beside_light() && self.members.are_of_nobody();
        if known.phase == GangPhase::Finished && came && self.lacks_nobody(known.members) {
            self.begin_next_run(env);
        }
    }
}
