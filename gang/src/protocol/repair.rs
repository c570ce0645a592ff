//! What becomes of a decided gang that loses members: a lost member's place is kept for its replacement, the gang is started anew as a
//! whole, or the place is given up. What the gang does not need for its minimum is never kept.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;

use super::gang::{Env, Gang, State};
use super::members::{Class, Count};
use super::slots::Holder;
use super::standing::{after, backoff};
use super::types::{Settings, Work};
use crate::terms::Repair;

impl Gang {
    /// Fewer members than the minimum are left, even if all that exist get there.
    pub(super) fn lost_too_many(&self) -> bool {
        let existing = |count: &Count| count.exist() + count.of(Class::Faulty) + count.of(Class::Foreign);
        self.missing(existing) > 0
    }

    /// Keeps the slots of lost members as long as the minimum needs them and a replacement may come; releases the others.
    pub(super) fn keep_or_release(&mut self, env: &mut Env<'_>) {
        let lost: Vec<u32> = self.slots.lost().collect();
        if lost.is_empty() {
            return;
        }
        let mut missing = match self.repair() {
            // What repair it wants, and whether one of a role is missing, is known with its terms.
            _ if !self.knows_roles() => u32::MAX,
            Repair::Ignore => 0,
            Repair::Hold | Repair::Restart => self.missing(Count::placed),
        };
        for id in lost {
            let Some(slot) = self.slots.get(id) else { continue };
            let expired = slot.holder == Holder::Kept && env.now.at >= after(slot.since, env.settings.hold);
            if missing > 0 && !expired && !slot.stale {
                missing -= 1;
            } else {
                self.drop_slot(id);
            }
        }
    }

    pub(super) fn hold_ends(&self, settings: &Settings) -> Option<Instant> {
        let kept = self.slots.kept().iter().filter_map(|id| self.slots.get(*id));
        kept.map(|slot| after(slot.since, settings.hold)).min()
    }

    /// Members beyond the minimum that do not come to their places give them back.
    pub(super) fn release_idle_extras(&mut self, env: &mut Env<'_>) {
        let late: Vec<u32> = self
            .idle_extras()
            .filter(|(_, ends)| env.now.at >= *ends)
            .map(|(id, _)| id)
            .collect();
        if late.is_empty() {
            return;
        }
        for id in late {
            self.drop_slot(id);
        }
        self.tries.strikes = self.tries.strikes.saturating_add(1);
        let until = after(env.now.at, backoff(env.settings, self.tries.strikes));
        self.tries.pause = Some((until, "members beyond its minimum did not come in time".into()));
    }

    pub(super) fn extras_end(&self) -> Option<Instant> {
        if !self.enough(Count::settled) {
            return None;
        }
        self.idle_extras().map(|(_, ends)| ends).min()
    }

    /// Slots that only wait for their member, and until when each does.
    fn idle_extras(&self) -> impl Iterator<Item = (u32, Instant)> {
        let arrival = self.working_terms().map(|terms| terms.arrival);
        self.members.on_the_way().iter().filter_map(move |uid| {
            let kept = self.members.get(uid)?;
            let (id, slot) = self.slot_of(uid)?;
            let idle = !kept.arrived && !kept.pinned();
            idle.then_some((id, after(slot.since, arrival?)))
        })
    }

    /// Gives back the places of members beyond the minimum that are not on their way through a bind. How many.
    pub(super) fn release_extras(&mut self) -> u32 {
        let mut released = 0;
        for uid in self.members.on_the_way().clone() {
            let idle = self
                .members
                .get(&uid)
                .is_some_and(|kept| !kept.here && !kept.pinned());
            let role = self.members.get(&uid).map(|kept| kept.member.claim.role.clone());
            let spare = role.is_some_and(|role| self.spares(&role));
            if idle
                && spare
                && let Some((id, _)) = self.slot_of(&uid)
            {
                self.drop_slot(id);
                released += 1;
            }
        }
        released
    }

    /// Whether the gang has its minimum without one member of a role that is on its way.
    fn spares(&self, role: &str) -> bool {
        let total = self.members.count().placed() > self.min();
        let of_role = self.members.count_of(role).placed();
        let needed = self.role_min(role);
        total && of_role > needed && self.knows_roles()
    }

    /// Deletes all members, so that their controller makes all of them anew.
    pub(super) fn restart(&mut self, env: &mut Env<'_>) {
        let of = self.decision().map(Arc::new);
        self.begin_life(true);
        let again = env.now.at;
        self.state = State::Restarting { again, of };
        self.waiting_since = env.now.unix;
    }

    /// All of it has to go for another gang, and has begun to. Its next life begins when the last is gone; for members without devices the other
    /// gang does not ask.
    pub(super) fn leave_evicted(&mut self, env: &mut Env<'_>) {
        let of = self.decision().map(Arc::new);
        self.begin_life(true);
        self.waiting_since = env.now.unix;
        let pods: Vec<PodUid> = self
            .members
            .iter()
            .filter(|kept| kept.lives() && !kept.evicted)
            .map(|kept| kept.member.uid.clone())
            .collect();
        self.see_off(env, pods);
        self.state = State::Restarting {
            again: after(env.now.at, env.settings.evict),
            of,
        };
    }

    /// Members of the life before must be gone before those of the new one are looked at: they must not mix.
    pub(super) fn step_restarting(&mut self, env: &mut Env<'_>, again: Instant) -> bool {
        if self.members.old_present() == 0 {
            // Whoever removed them, it was done.
            self.hindered = None;
            self.state = State::Open;
            self.settle_until = after(env.now.at, env.settings.settle);
            return true;
        }
        if env.now.at >= again {
            let life = self.members.life();
            let pods: Vec<PodUid> = self
                .members
                .iter()
                .filter(|kept| kept.class(life) == Class::Old && kept.lives())
                .map(|kept| kept.member.uid.clone())
                .collect();
            self.see_off(env, pods);
            let next = after(env.now.at, env.settings.nudge.saturating_mul(3));
            if let State::Restarting { again, .. } = &mut self.state {
                *again = next;
            }
        }
        false
    }

    /// Has members of the life before removed. They are deleted where the gang asked to be started anew when it loses a member; one that had
    /// to go for another gang did not ask, and its budgets hold to the last.
    fn see_off(&self, env: &mut Env<'_>, pods: Vec<PodUid>) {
        if pods.is_empty() {
            return;
        }
        env.work.push(match self.repair() {
            Repair::Restart => Work::Delete {
                pods,
                why: format!("gang {} has lost a member and is started anew", self.key).into(),
            },
            Repair::Hold | Repair::Ignore => Work::EvictRest {
                pods,
                of: Arc::clone(&self.key),
            },
        });
    }
}
