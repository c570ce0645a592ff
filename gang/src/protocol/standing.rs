//! What follows from a change: whether a gang is complete enough to be planned, must give its place back, can be decided, is lost. Looks
//! at one gang and the time; says what is to be done as `Work`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;

use super::agreed::{Agreed, Words};
use super::gang::{Env, Gang, Planned, State, Tries};
use super::members::{Class, Count};
use super::types::{Blocker, Settings};
use crate::counted::members;

/// Steps that can follow from one change: more would be a circle.
const MAX_STEPS: usize = 8;
/// Why a gang is tried again: the nodes of its plan are never among those that a call brings.
pub(super) const NOT_OFFERED: &str = "kube-scheduler does not offer the planned nodes";

impl Gang {
    /// Draws all conclusions from what has changed.
    pub(super) fn settle(&mut self, env: &mut Env<'_>) {
        if env.synced {
            for _ in 0..MAX_STEPS {
                if !self.step(env) {
                    break;
                }
            }
            self.nudge_members(env);
            self.let_go(env);
        }
        self.follow_parked(env);
        self.retext(env);
    }

    /// One conclusion; whether there may be another.
    fn step(&mut self, env: &mut Env<'_>) -> bool {
        match &self.state {
            State::Over { .. } => {
                if self.members.count().alive() == 0 {
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
            _ if self.has_ended() => {
                self.end_life(env);
                true
            }
            State::Open | State::Decided(_) if self.is_next_run() => {
                self.begin_next_run(env);
                true
            }
            State::Open => {
                self.ungate(env);
                if self.is_bound_without_places() {
                    self.bound_at.get_or_insert(env.now.unix);
                }
                false
            }
            State::Planned(_) => {
                self.ungate(env);
                self.step_planned(env)
            }
            State::Committing(_) => {
                self.ungate(env);
                false
            }
            State::Decided(_) => {
                let more = self.step_decided(env);
                if !more {
                    // Whom it has given a place just now too.
                    self.ungate(env);
                }
                more
            }
        }
    }

    /// Nobody is left, and nobody has ended well whose pod is still there: the next who comes begins anew.
    fn has_ended(&self) -> bool {
        let nobody = self.members.count().alive() == 0;
        nobody && (self.members.count().of(Class::Completed) == 0 || self.members.has_left())
    }

    fn end_life(&mut self, env: &mut Env<'_>) {
        self.begin_life(false);
        self.state = State::Over {
            until: after(env.now.at, env.settings.linger),
        };
    }

    /// Gives everything up that belongs to this life of the gang. What it goes on with, if it does, is the work that is done.
    pub(super) fn begin_life(&mut self, goes_on: bool) {
        self.drop_all_slots();
        if let Some(id) = self.decision_id().map(str::to_owned) {
            self.remember_past(id);
        }
        self.members.begin_life(goes_on);
        self.words = Words::default();
        self.tries = Tries::default();
        self.evicted_whole = false;
        self.evicted_lost = false;
        self.bound_at = None;
        self.completed_before = 0;
        self.domain = "".into();
        let carried: Vec<PodUid> = self
            .members
            .iter()
            .filter(|kept| kept.class(self.members.life()) == Class::Completed)
            .map(|kept| kept.member.uid.clone())
            .collect();
        for uid in carried {
            self.follow_words(&uid);
        }
    }

    fn step_planned(&mut self, env: &mut Env<'_>) -> bool {
        if self.terms().is_none() || !self.enough(Count::exist) || self.is_kept_gated() {
            self.unplan();
            return true;
        }
        self.fill(env);
        for id in self.slots.kept().clone() {
            // Its member is gone, and no other needs it now.
            self.drop_slot(id);
        }
        if !self.enough(Count::placed) || self.slots.is_empty() {
            // Somebody went whose place suits nobody else.
            self.unplan();
            return true;
        }
        let (ready, arrival) = (self.members.count().ready(), self.arrival(env.settings));
        let State::Planned(planned) = &mut self.state else {
            return false;
        };
        if planned.victims.is_empty() && ready > planned.most {
            planned.most = ready;
            planned.until = planned.until.max(after(env.now.at, arrival).min(planned.end));
            planned.last = after(planned.until, env.settings.grace).min(planned.end);
        }
        if env.now.at >= planned.until && !planned.victims.is_empty() {
            planned.until = planned.until.max(ending(planned, env));
        }
        if env.now.at >= planned.until {
            let why = if planned.victims.is_empty() {
                let count = self.members.count();
                let came = format!("{} of {} came in time", count.ready(), members(self.min()));
                self.as_said(&came)
            } else {
                let stay = self.why_they_stay();
                format!("pods that have to go for it did not go in time{stay}").into()
            };
            self.strike(env, why);
            return true;
        }
        if planned.victims.is_empty()
            && self.members.count().of(Class::Arrived) > 0
            && self.enough(Count::ready)
        {
            self.begin_commit(env);
            return false;
        }
        false
    }

    /// Gives the place back. The gang is planned again at once.
    pub(super) fn unplan(&mut self) {
        self.hindered.remove(&Blocker::Budget);
        self.drop_all_slots();
        self.domain = "".into();
        self.tries.considered = None;
        self.tries.asked = false;
        self.tries.refused = None;
        self.state = State::Open;
    }

    /// Gives the place back, and waits before the next try.
    pub(super) fn strike(&mut self, env: &Env<'_>, why: Arc<str>) {
        self.unplan();
        self.pause(env, why);
    }

    /// Waits before the next try, which is made with all nodes again.
    pub(super) fn pause(&mut self, env: &Env<'_>, why: Arc<str>) {
        self.tries.failed_attempts = self.tries.failed_attempts.saturating_add(1);
        self.tries.replans = 0;
        self.tries.without.clear();
        self.tries.misses.clear();
        self.tries.considered = None;
        self.tries.pause = Some((
            after(env.now.at, backoff(env.settings, self.tries.failed_attempts)),
            why,
        ));
    }

    /// Why members do not come, with what kube-scheduler says of that.
    pub(super) fn as_said(&self, why: &str) -> Arc<str> {
        match &self.tries.said {
            Some(said) => format!("{why} (kube-scheduler says: {said})").into(),
            None => why.into(),
        }
    }

    fn step_decided(&mut self, env: &mut Env<'_>) -> bool {
        // Also for what was lowered while the decision was being written.
        self.lower_minimum();
        self.give_up_what_is_anothers(env);
        self.fill(env);
        if self.evicted_whole && self.evicted_lost {
            self.leave_evicted(env);
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
        let called = self.bind_those_aside(env);
        self.keep_or_release(env);
        self.follow_lack(env);
        let satisfied = self.enough(Count::settled);
        // Who is just being bound is not idle.
        if satisfied && !called {
            self.release_idle_extras(env);
        }
        let State::Decided(decided) = &mut self.state else {
            return false;
        };
        let short = decided.was_bound && !satisfied;
        if short && !decided.short {
            self.waiting_since = env.now.unix;
            // What is waited for until then, members beyond the minimum as a rule, is not what it lacks now.
            self.tries.pause = None;
        }
        decided.short = short;
        if satisfied && !decided.was_bound {
            decided.was_bound = true;
            self.bound_at.get_or_insert(env.now.unix);
            // Members beyond the minimum are looked at anew, also in the same room: nobody was told why they had no place beside the
            // others.
            self.tries = Tries::default();
        }
        false
    }

    /// Gives kept slots to members that wait and that they suit.
    pub(super) fn fill(&mut self, env: &mut Env<'_>) {
        if self.slots.kept().is_empty() || self.members.unplaced().is_empty() {
            return;
        }
        let mut woken = Vec::new();
        for uid in self.members.unplaced().clone() {
            let Some(kept) = self.members.get(&uid) else {
                continue;
            };
            let found = self
                .slots
                .kept()
                .iter()
                .copied()
                .find(|id| self.slots.get(*id).is_some_and(|slot| slot.awaits(&kept.member)));
            if let Some(id) = found {
                self.tie(&uid, id, env.now.at);
                woken.push(uid);
            }
        }
        self.wake(env, woken);
    }

    /// It is worth planning now, given room.
    pub(super) fn wants_plan(&self, now: Instant) -> bool {
        let paused = self.tries.pause.as_ref().is_some_and(|(until, _)| now < *until);
        if paused || self.members.unplaced().is_empty() || !self.any_may_come() {
            return false;
        }
        match &self.state {
            State::Open if self.goes_singly() => false,
            State::Open => {
                let complete = self.terms().is_some() && self.enough(Count::exist);
                complete && !self.waits_for_rest(now) && !self.is_kept_gated()
            }
            State::Decided(_) => self.working_terms().is_some() && self.may_grow() > 0,
            _ => false,
        }
    }

    /// It has its minimum, more are announced, and they may come any moment. So may more of several jobs: then they are two gangs of one
    /// name.
    pub(super) fn waits_for_rest(&self, now: Instant) -> bool {
        let Some(terms) = self.agreed.terms().filter(|_| now < self.settle_until) else {
            return false;
        };
        let announced = terms.total.map(|total| self.members.count().exist() < total);
        announced.unwrap_or_else(|| self.words.is_unsaid_mix(terms, self.spec.as_ref()))
    }

    /// How many more members may have a place. One that runs and is not valid any more is completed, and does not grow.
    pub(super) fn may_grow(&self) -> u32 {
        if self.is_invalid() {
            return self.missing(Count::placed);
        }
        let max = self.working_terms().map_or(u32::MAX, |terms| terms.max);
        max.max(self.min()).saturating_sub(self.members.count().placed())
    }

    /// When something has to be looked at again, if nothing happens before.
    pub(super) fn due(&self, settings: &Settings, now: Instant) -> Option<Instant> {
        let nudge = self.nudge.map(|(at, _)| at);
        let mut due = [nudge, None, None, None, None, self.parked.due(), None];
        match &self.state {
            State::Open => {
                due[1] = self.tries.pause.as_ref().map(|(until, _)| *until);
                due[2] = Some(self.settle_until);
            }
            State::Planned(planned) => due[1] = Some(planned.until),
            State::Committing(_) => {}
            State::Decided(decided) => {
                due[4] = decided.lost_since.map(|since| after(since, settings.settle));
                due[1] = self.tries.pause.as_ref().map(|(until, _)| *until);
                due[2] = self.hold_ends(settings);
                due[3] = self.extras_end();
                due[6] = self.lack_ends(settings);
            }
            State::Restarting { again, .. } => due[1] = Some(*again),
            State::Over { until } => due[1] = Some(*until),
        }
        let gated = self
            .members
            .first_asked()
            .map(|asked| after(asked, settings.nudge));
        due.into_iter()
            .flatten()
            .chain(gated)
            .filter(|due| *due > now)
            .min()
    }

    pub(super) fn is_invalid(&self) -> bool {
        self.object_fault.is_some() || matches!(self.agreed, Agreed::Invalid(_))
    }
}

/// Until when those that have to go for a gang are waited for, if all of them are on their way out: no others need go before they are late
/// themselves.
fn ending(planned: &Planned, env: &Env<'_>) -> Instant {
    let Some(by) = planned.all_gone_by() else {
        return env.now.at;
    };
    let left = by.saturating_sub(env.now.unix);
    // Those whose time is over, or cannot be read, are late by as much.
    let late = Duration::from_secs(left.unsigned_abs());
    let left = match left {
        ..=0 => env.settings.evict.saturating_sub(late),
        _ => env.settings.evict.saturating_add(late),
    };
    after(env.now.at, left).min(planned.end)
}

/// How long a gang waits after so many failed tries.
pub(super) fn backoff(settings: &Settings, failed_attempts: u32) -> Duration {
    let doublings = failed_attempts.saturating_sub(1).min(20);
    settings
        .backoff
        .saturating_mul(1 << doublings)
        .min(settings.backoff_max)
}

/// So long after a moment. More than a year is no time limit.
pub(super) fn after(at: Instant, time: Duration) -> Instant {
    let year = Duration::from_secs(366 * 24 * 3600);
    at.checked_add(time.min(year)).unwrap_or(at)
}
