//! What is kept about all gangs together: whose each device is, who wants a plan, when each is looked at again, which owner each goes by.
//! Brought up to date after every change of a gang.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{DeviceId, PodUid};

use super::Gangs;
use super::gang::{Env, Gang, State};
use super::gangs::{Belongs, Owner};
use super::standing::after;
use super::types::{Now, SlotChange, SlotReservation, Work};
use crate::key::GangKey;
use crate::membership::OwnerRef;

impl Gangs {
    pub(super) fn of_member(&mut self, now: Now, uid: &PodUid, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        self.clock = Some(now);
        let Some(Belongs::To(key)) = self.of_pod.get(uid).cloned() else {
            return;
        };
        self.with(now, &key, act);
    }

    pub(super) fn of_gang(&mut self, now: Now, gang: &GangKey, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        self.clock = Some(now);
        if let Some((key, _)) = self.gangs.get_key_value(gang) {
            let key = Arc::clone(key);
            self.with(now, &key, act);
        }
    }

    pub(super) fn with(&mut self, now: Now, key: &Arc<GangKey>, act: impl FnOnce(&mut Gang, &mut Env<'_>)) {
        if let Some((gang, mut env)) = self.with_env(now, key) {
            act(gang, &mut env);
            self.finish(now, key);
        }
    }

    /// A gang, and what it looks at and fills besides itself.
    pub(super) fn with_env(&mut self, now: Now, key: &GangKey) -> Option<(&mut Gang, Env<'_>)> {
        let gang = self.gangs.get_mut(key)?;
        let env = Env {
            now,
            settings: &self.settings,
            synced: self.synced,
            taken: &self.taken,
            decisions: &mut self.decisions,
            work: &mut self.work,
        };
        Some((gang, env))
    }

    /// Puts together what is said of a gang, if that has changed.
    pub(super) fn agree_on(&mut self, key: &Arc<GangKey>) {
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        if !gang.words.take_changed() && !gang.reagree {
            return;
        }
        gang.reagree = false;
        let wanted = gang.words.owner().cloned();
        let before = std::mem::replace(&mut gang.owner, wanted.clone());
        if before != wanted
            && let Some(before) = &before
        {
            leave_owner(&mut self.owners, before, key);
        }
        let mut known = None;
        gang.owner_over = false;
        gang.owner_suspended = false;
        if let Some(owner) = wanted {
            let entry = self.owners.entry(owner).or_default();
            entry.gangs.insert(key.clone());
            known = entry.known.clone();
            gang.owner_over = entry.is_over();
            gang.owner_suspended = entry.is_suspended();
        }
        let Some(agreed) = gang.words.agree(&known, gang.spec.as_ref(), &self.settings) else {
            return;
        };
        gang.agree_to(agreed);
    }

    /// Lets a gang draw its conclusions, and collects them.
    pub(super) fn finish(&mut self, now: Now, key: &Arc<GangKey>) {
        self.agree_on(key);
        let Some((gang, mut env)) = self.with_env(now, key) else {
            return;
        };
        gang.settle(&mut env);
        let changes = gang.slots.take_changes().into_iter();
        // One that keeps nothing and is still there is its pod's.
        let changes: Vec<_> = changes
            .map(|(slot, place)| (slot, place.is_none() && gang.slots.get(slot).is_some(), place))
            .collect();
        let wants_plan = gang.may_ever_want_plan();
        // One that only waits for time to pass comes by here again when it has.
        let ready = wants_plan && gang.wants_plan(now.at);
        let turn = ready.then(|| gang.turn());
        let considered = gang.tries.considered;
        let preempts = gang.preempts();
        let may_spare = gang.may_spare() || !gang.idle_places().is_empty();
        let due = gang.due(env.settings, now.at);
        let before = std::mem::replace(&mut gang.timer, due);
        let devices = gang.slots.devices();
        let counted = std::mem::replace(&mut gang.counted, devices);
        let over = matches!(gang.state, State::Over { until } if now.at >= until);
        for (slot, bound, place) in changes {
            self.reserve(key, slot, place.as_ref());
            self.slot_changes.push(SlotChange {
                gang: key.clone(),
                slot,
                place,
                bound,
            });
        }
        set(&mut self.planable, key, wants_plan);
        set(&mut self.stocked, key, may_spare);
        if self.ready.get(key) != turn.as_ref() {
            match turn {
                Some(turn) => self.ready.insert(key.clone(), turn),
                None => self.ready.remove(key),
            };
            self.line = None;
        }
        if ready && considered.is_none_or(|considered| considered < self.room) {
            if self.untried.insert(key.clone()) {
                self.line = None;
            }
        } else {
            self.untried.remove(key);
        }
        if !preempts && let Some(victims) = self.preempting.remove(key) {
            self.mark(&victims, false);
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
            self.line = None;
        }
        self.dirty.insert(key.clone());
        if over {
            self.forget(now, key);
        }
    }

    /// Members of other gangs that have to go for this one: their devices are spoken for.
    pub(super) fn mark_victims(&mut self, key: &Arc<GangKey>, victims: Vec<PodUid>) {
        let preempts = self.gangs.get(key).is_some_and(Gang::preempts);
        if preempts {
            self.mark(&victims, true);
            self.preempting.insert(key.clone(), victims);
        }
    }

    fn mark(&mut self, victims: &[PodUid], evicted: bool) {
        let mut gangs = BTreeSet::new();
        for uid in victims {
            if let Some(Belongs::To(key)) = self.of_pod.get(uid)
                && let Some(gang) = self.gangs.get_mut(key)
            {
                gang.members.change(uid, |kept| kept.evicted = evicted);
                gangs.insert(key.clone());
            }
        }
        for key in gangs {
            if let Some(gang) = self.gangs.get_mut(&key) {
                gang.note_evicted();
            }
        }
    }

    fn reserve(&mut self, key: &Arc<GangKey>, slot: u32, place: Option<&SlotReservation>) {
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
        self.beyond.ended(key);
        for kept in gang.members.iter() {
            self.of_pod.remove(&kept.member.uid);
        }
        if let Some(due) = gang.timer {
            self.timers.remove(&(due, key.clone()));
        }
        self.planable.remove(key);
        self.untried.remove(key);
        self.ready.remove(key);
        self.stocked.remove(key);
        if let Some(victims) = self.preempting.remove(key) {
            self.mark(&victims, false);
        }
        self.dirty.remove(key);
        if let Some(owner) = &gang.owner {
            leave_owner(&mut self.owners, owner, key);
        }
        let name = (key.namespace.clone(), Arc::from(key.object_name()));
        let known = self.objects.get(&name);
        let ours = known.is_none_or(|known| known.ours && (known.is_about(key) || known.of.is_none()));
        if ours && (gang.told.anything() || known.is_some()) {
            let (namespace, name) = name.clone();
            self.work.push(Work::DeleteObject { namespace, name });
        }
        if let Some(keys) = self.named.get_mut(&name) {
            keys.retain(|other| other != key);
            if keys.is_empty() {
                self.named.remove(&name);
                self.note_stray(&name, after(now.at, self.settings.linger.saturating_mul(6)));
            } else {
                self.follow_object(now, &name);
            }
        }
    }
}

fn set(gangs: &mut BTreeSet<Arc<GangKey>>, key: &Arc<GangKey>, is_in: bool) {
    if is_in {
        gangs.insert(key.clone());
    } else {
        gangs.remove(key);
    }
}

fn leave_owner(owners: &mut BTreeMap<OwnerRef, Owner>, owner: &OwnerRef, gang: &Arc<GangKey>) {
    if let Some(entry) = owners.get_mut(owner) {
        entry.gangs.remove(gang);
        // What was read of it is forgotten with the next tick: members that move from one of its gangs to another need it still.
        if entry.gangs.is_empty() && entry.known.is_none() {
            owners.remove(owner);
        }
    }
}
