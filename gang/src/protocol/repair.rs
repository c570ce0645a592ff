//! What becomes of a decided gang that loses members: a lost member's place is kept for its replacement, the gang is started anew as a
//! whole, or the place is given up. What the gang does not need for its minimum is never kept.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DeviceId, PodUid};

use super::gang::{Env, Gang, State, Tries};
use super::members::{Class, Count, Kept};
use super::slots::{Holder, Slot};
use super::standing::{after, backoff};
use super::types::{Blocker, Devices, Settings, Work};
use crate::key::GangKey;
use crate::terms::{Repair, work};

impl Gang {
    /// Fewer members than the minimum are left, even if all that exist get there.
    pub(super) fn lost_too_many(&self) -> bool {
        let existing = |count: &Count| count.exist() + count.kept_back();
        self.missing(existing) > 0
    }

    /// Whether what it loses is to be made good. Not once its owner is over, nor while that is suspended, whatever repair it wants.
    pub(super) fn is_repaired(&self) -> bool {
        self.is_replaced() && self.repair() != Repair::Ignore
    }

    /// Whether its owner makes members anew that are lost.
    fn is_replaced(&self) -> bool {
        !self.owner_over && !self.owner_suspended
    }

    /// Gives up places that bound members had and whose devices others have by now. Kubelet may have given a pod other devices than its
    /// grant says, and what it does not use has gone to somebody else: to keep it for a replacement too would grant it twice.
    pub(super) fn give_up_what_is_anothers(&mut self, env: &Env<'_>) {
        for id in self.slots.take_doubtful() {
            if self.is_anothers(env, id) {
                self.drop_slot(id);
            }
        }
    }

    /// Whether another place has devices of a slot.
    fn is_anothers(&self, env: &Env<'_>, id: u32) -> bool {
        let Some(slot) = self.slots.get(id) else {
            return false;
        };
        let has = |device: &DeviceId, devices: &Devices| devices.iter().any(|(_, ids)| ids.contains(device));
        let others = env.taken.get(&slot.node);
        let mut ids = slot.devices.iter().flat_map(|(_, ids)| ids);
        ids.any(|device| {
            let gang = others.and_then(|others| others.get(device));
            let own = |(other, known): (u32, &Slot)| {
                other != id && known.node == slot.node && has(device, &known.devices)
            };
            gang.is_some_and(|gang| *gang != self.key) || self.slots.iter().any(own)
        })
    }

    /// Keeps the slots of lost members as long as the minimum needs them and a replacement may come; releases the others.
    pub(super) fn keep_or_release(&mut self, env: &mut Env<'_>) {
        let lost: Vec<u32> = self.slots.lost().collect();
        if lost.is_empty() {
            return;
        }
        let mut missing = match self.repair() {
            _ if !self.is_replaced() => 0,
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
            .take_while(|(_, ends)| env.now.at >= *ends)
            .filter_map(|(uid, _)| Some(self.slot_of(uid)?.0))
            .collect();
        if late.is_empty() {
            return;
        }
        for id in late {
            self.drop_slot(id);
        }
        self.tries.failed_attempts = self.tries.failed_attempts.saturating_add(1);
        let until = after(env.now.at, backoff(env.settings, self.tries.failed_attempts));
        self.tries.pause = Some((until, "members beyond its minimum did not come in time".into()));
    }

    pub(super) fn extras_end(&self) -> Option<Instant> {
        if !self.enough(Count::settled) {
            return None;
        }
        self.idle_extras().next().map(|(_, ends)| ends)
    }

    /// Members that are waited for at their slots, and until when each is: the first first.
    fn idle_extras(&self) -> impl Iterator<Item = (&PodUid, Instant)> {
        let arrival = self.working_terms().map(|terms| terms.arrival);
        arrival.into_iter().flat_map(|arrival| {
            let idle = self.members.idle().inspect(|_| work::note());
            idle.map(move |(since, uid)| (uid, after(since, arrival)))
        })
    }

    /// Whether there may be any of [`Gang::spares`]; cheap.
    pub(super) fn may_spare(&self) -> bool {
        let begun = !matches!(
            self.state,
            State::Open | State::Committing(_) | State::Restarting { .. } | State::Over { .. }
        );
        let beyond = self.members.count().placed() > self.min() && self.min() > 0;
        begun && beyond && !self.preempts() && !self.members.on_the_way().is_empty()
    }

    /// Slots of members beyond the minimum that are not at the barrier nor on their way through a bind: who has not come goes before who
    /// has, then the last rank. None while pods have to go for the gang: what those hold is of no use to others. Nor such as stand in the
    /// decision: whoever takes over would keep them, and somebody else has them by then. A slice is given back as a whole or not at all.
    pub(super) fn spares(&self) -> Vec<u32> {
        if !self.may_spare() || !self.knows_roles() {
            return Vec::new();
        }
        let on_the_way = self.members.on_the_way().iter();
        let mut idle: Vec<&Kept> = on_the_way
            .filter_map(|uid| self.members.get(uid))
            .filter(|kept| !kept.here && !kept.pinned() && !self.is_in_decision(&kept.member.uid))
            .collect();
        idle.sort_by(|a, b| {
            let last = |kept: &Kept| {
                let rank = kept.member.membership.rank.map_or(u64::MAX, u64::from);
                (kept.arrived, Reverse((rank, kept.member.created)))
            };
            let order = last(a).cmp(&last(b));
            order.then_with(|| b.member.uid.cmp(&a.member.uid))
        });
        let mut beyond = self.members.count().placed().saturating_sub(self.min());
        let mut of_role: BTreeMap<&str, u32> = BTreeMap::new();
        let mut spares = Vec::new();
        for kept in idle {
            let role = &*kept.member.membership.role;
            let of_role = of_role.entry(role).or_insert_with(|| {
                let placed = self.members.count_of(role).placed();
                placed.saturating_sub(self.role_min(role))
            });
            if beyond > 0
                && *of_role > 0
                && let Some(id) = kept.slot
            {
                beyond -= 1;
                *of_role -= 1;
                spares.push(id);
            }
        }
        self.in_whole_slices(spares)
    }

    fn is_in_decision(&self, uid: &PodUid) -> bool {
        match &self.state {
            State::Decided(decided) => decided.written.names(uid),
            _ => false,
        }
    }

    /// Those of some slots whose slice is among them with all that have a place in it.
    fn in_whole_slices(&self, mut slots: Vec<u32>) -> Vec<u32> {
        if self.working_terms().is_none_or(|terms| terms.slice.is_none()) {
            return slots;
        }
        let among: BTreeSet<u32> = slots.iter().copied().collect();
        let broken: BTreeSet<Option<u32>> = self
            .slots
            .iter()
            .filter(|(id, _)| !among.contains(id))
            .map(|(id, _)| self.slice_of(id))
            .collect();
        slots.retain(|id| {
            let slice = self.slice_of(*id);
            slice.is_some() && !broken.contains(&slice)
        });
        slots
    }

    /// Which slice a slot is of, where the gang has any and its place in them is known.
    pub(super) fn slice_of(&self, slot: u32) -> Option<u32> {
        let size = self.working_terms()?.slice?;
        let slot = self.slots.get(slot)?;
        slot.ordinal.or(slot.rank)?.checked_div(size)
    }

    /// Gives back some of [`Gang::spares`]. How many.
    pub(super) fn release_extras(&mut self, slots: &BTreeSet<u32>) -> u32 {
        let mut released = 0;
        for id in self.spares().into_iter().filter(|id| slots.contains(id)) {
            self.drop_slot(id);
            released += 1;
        }
        released
    }

    /// Slots kept for members that it has lost, of which no replacement is there.
    pub(super) fn idle_places(&self) -> &BTreeSet<u32> {
        static NONE: BTreeSet<u32> = BTreeSet::new();
        match &self.state {
            State::Decided(_) => self.slots.kept(),
            _ => &NONE,
        }
    }

    /// Gives some of [`Gang::idle_places`] up for somebody who goes before it. How many.
    pub(super) fn give_up_idle(&mut self, slots: &BTreeSet<u32>, to: &Arc<str>) -> u32 {
        let given: Vec<u32> = self.idle_places().intersection(slots).copied().collect();
        for id in &given {
            self.drop_slot(*id);
        }
        if let State::Decided(decided) = &mut self.state
            && !given.is_empty()
        {
            decided.gave_to = Some(Arc::clone(to));
        }
        u32::try_from(given.len()).unwrap_or(u32::MAX)
    }

    /// Deletes all members, so that their controller makes all of them anew.
    pub(super) fn restart(&mut self, env: &mut Env<'_>) {
        let of = self.decision().map(Arc::new);
        self.begin_life(true);
        let again = env.now.at;
        self.state = State::Restarting { again, of, to: None };
        self.waiting_since = env.now.unix;
    }

    /// All of it has to go for another gang, and has begun to. Its next life begins when the last is gone; for members without devices the
    /// other gang does not ask.
    pub(super) fn leave_evicted(&mut self, env: &mut Env<'_>) {
        self.leave(env, None);
    }

    /// All of it goes so that another gang can be whole, which is as stuck as it is.
    pub(super) fn give_way(&mut self, env: &mut Env<'_>, to: Arc<GangKey>) {
        self.leave(env, Some(to));
    }

    fn leave(&mut self, env: &mut Env<'_>, to: Option<Arc<GangKey>>) {
        let of = self.decision().map(Arc::new);
        self.begin_life(true);
        self.waiting_since = env.now.unix;
        let pods: Vec<PodUid> = self
            .members
            .iter()
            .filter(|kept| kept.lives() && !kept.evicted)
            .map(|kept| kept.member.uid.clone())
            .collect();
        self.state = State::Restarting {
            again: after(env.now.at, env.settings.evict),
            of,
            to,
        };
        self.see_off(env, pods);
    }

    /// Nobody of it is bound, none of its places is kept, and it lacks members of its minimum: they were stopped for others, or their nodes
    /// are gone.
    pub(super) fn has_nothing_left(&self) -> bool {
        let nothing = self.slots.is_empty() && self.members.count().of(Class::Bound) == 0;
        nothing && !self.members.unplaced().is_empty() && self.missing(Count::settled) > 0
    }

    /// Those who come are planned as a whole, as they were the first time. Member by member, two such gangs could each get what the other
    /// lacks, and neither would ever run.
    pub(super) fn undecide(&mut self, env: &Env<'_>) {
        if let Some(id) = self.decision_id().map(str::to_owned) {
            self.remember_past(id);
        }
        if self.bound_at.take().is_some() {
            self.waiting_since = env.now.unix;
        }
        self.tries = Tries::default();
        self.evicted_whole = false;
        self.evicted_lost = false;
        self.unplan();
    }

    /// Members of the life before must be gone before those of the new one are looked at: they must not mix.
    pub(super) fn step_restarting(&mut self, env: &mut Env<'_>, again: Instant) -> bool {
        if self.members.old_present() == 0 {
            // Whoever removed them, it was done.
            self.hindered.remove(&Blocker::Removal);
            self.hindered.remove(&Blocker::Budget);
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

    /// Has members of the life before removed. They are deleted where the gang asked to be started anew when it loses a member; one that
    /// had to go for another gang did not ask, and its budgets hold to the last.
    fn see_off(&self, env: &mut Env<'_>, pods: Vec<PodUid>) {
        if pods.is_empty() {
            return;
        }
        let to = match &self.state {
            State::Restarting { to, .. } => to.clone(),
            _ => None,
        };
        env.work.push(match self.repair() {
            Repair::Restart => Work::Delete {
                pods,
                why: match to {
                    Some(to) => format!("gang {} gives way to gang {to} and is started anew", self.key),
                    None => format!("gang {} has lost a member and is started anew", self.key),
                }
                .into(),
            },
            Repair::Hold | Repair::Ignore => Work::EvictRest {
                pods,
                of: Arc::clone(&self.key),
                to,
            },
        });
    }
}
