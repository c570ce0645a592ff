//! Members come and go: finds or makes the gang of each. What a gang makes of it is its own affair.

use std::sync::Arc;

use gantry_api::PodUid;

use super::Gangs;
use super::gang::{Gang, State};
use super::gangs::Belongs;
use super::types::{Member, Now, Stage};
use crate::key::GangKey;
use crate::membership::Membership;

impl Gangs {
    /// A pod that says it belongs to a gang, as it is now.
    pub fn member_seen(&mut self, now: Now, mut member: Member) {
        self.clock = Some(now);
        if let Some(settled) = self.settled(&member.membership) {
            member.membership = Arc::new(settled);
        }
        if !self.settings.gates && matches!(member.stage, Stage::Gated { .. }) {
            member.stage = Stage::Gated { by_us_alone: false };
        }
        let mut left = None;
        if let Some(Belongs::To(before)) = self.of_pod.get(&member.uid).cloned()
            && *before != member.membership.key
        {
            match self
                .gangs
                .get(&before)
                .and_then(|gang| gang.members.get(&member.uid))
            {
                // A pod that has a place stays what it was when it got it.
                Some(kept) if kept.slot.is_some() || kept.pinned() => {
                    member.membership = kept.member.membership.clone();
                }
                _ => {
                    self.member_gone(now, &member.uid);
                    left = Some(before);
                }
            }
        }
        let Some(key) = self.gang_for(now, &member) else {
            return;
        };
        let uid = member.uid.clone();
        self.of_pod.insert(uid.clone(), Belongs::To(key.clone()));
        let was_beyond = self.beyond.remove(&uid);
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.member_seen(now, member, &self.settings, self.synced);
            if was_beyond {
                gang.note_was_beyond(&uid);
            }
        }
        self.finish(now, &key);
        if let Some(left) = left {
            self.forget_empty(now, &left);
        }
    }

    /// What a member said of its gang when it was let go to its node. Whatever is written on its pod since, it is one of that gang until it
    /// ends.
    pub fn bound_membership(&self, uid: &PodUid) -> Option<&Arc<Membership>> {
        let Some(Belongs::To(key)) = self.of_pod.get(uid) else {
            return None;
        };
        let kept = self.gangs.get(key)?.members.get(uid)?;
        kept.pinned().then_some(&kept.member.membership)
    }

    /// The gang of a member, made if need be. `None` if it is not to be kept.
    fn gang_for(&mut self, now: Now, member: &Member) -> Option<Arc<GangKey>> {
        match self.gangs.get_key_value(&member.membership.key) {
            Some((key, gang)) => {
                let room = gang.members.len() < self.settings.max_members;
                if room || gang.members.get(&member.uid).is_some() {
                    return Some(key.clone());
                }
            }
            // It cannot begin a gang any more.
            None if member.stage == Stage::Failed => {
                if self.beyond.remove(&member.uid) {
                    self.of_pod.remove(&member.uid);
                }
                return None;
            }
            None if self.may_begin(&member.membership.key) => {
                return Some(self.make(now, &member.membership.key));
            }
            None => {}
        }
        self.put_beyond(member);
        None
    }

    fn make(&mut self, now: Now, key: &GangKey) -> Arc<GangKey> {
        let key = Arc::new(key.clone());
        let object: Arc<str> = key.object_name().into();
        let name = (key.namespace.clone(), object);
        self.named.entry(name.clone()).or_default().push(key.clone());
        self.gangs.insert(key.clone(), Gang::new(key.clone(), now));
        self.beyond.made(&key);
        self.follow_object(now, &name);
        key
    }

    /// A gang whose last member was found to be of another has not ended: nothing is to be read of it any more, but for what a person
    /// wrote.
    fn forget_empty(&mut self, now: Now, key: &Arc<GangKey>) {
        let name = (key.namespace.clone(), Arc::from(key.object_name()));
        if self.objects.get(&name).is_some_and(|known| !known.ours) {
            return;
        }
        let Some(gang) = self.gangs.get_mut(key) else {
            return;
        };
        if matches!(gang.state, State::Over { .. }) {
            gang.state = State::Over { until: now.at };
            self.finish(now, key);
        }
    }

    /// A pod is gone.
    pub fn member_gone(&mut self, now: Now, uid: &PodUid) {
        self.clock = Some(now);
        self.beyond.remove(uid);
        let Some(Belongs::To(key)) = self.of_pod.remove(uid) else {
            return;
        };
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.member_gone(now, uid);
        }
        self.beyond.may_have_room(&key);
        self.finish(now, &key);
    }
}
