//! What a gang makes of the facts that come in about its members and its terms.

use std::time::Instant;

use gantry_api::PodUid;

use super::agreed::{Agreed, Says};
use super::gang::{Gang, State};
use super::members::{Class, Kept};
use super::slots::Holder;
use super::standing::after;
use super::types::{Member, Now, Settings, Stage};

impl Gang {
    /// A member, as it is now.
    pub(super) fn member_seen(&mut self, now: Now, member: Member, settings: &Settings, synced: bool) {
        let uid = member.uid.clone();
        if synced && self.members.get(&uid).is_none() && self.begins_next_run(&member) {
            self.begin_run(&[], now.unix, now.at, settings);
        }
        let life = self.members.life();
        let waited = |gang: &Self| gang.members.unplaced().contains(&uid);
        let before = waited(self);
        match self.members.get(&uid) {
            Some(_) => {
                self.members.change(&uid, |kept| kept.update(member));
                self.members.carry_late(&uid);
            }
            None => {
                self.members.insert(Kept::new(member, life));
                self.settle_until = after(now.at, settings.settle);
            }
        }
        self.follow(&uid, now.at);
        if before != waited(self) {
            self.changed();
        }
    }

    pub(super) fn member_gone(&mut self, now: Now, uid: &PodUid) {
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

    pub(super) fn agree_to(&mut self, agreed: Agreed) {
        if self.agreed == agreed {
            return;
        }
        if let Some(terms) = agreed.terms() {
            self.good = Some(terms.clone());
        }
        self.agreed = agreed;
        self.lower_minimum();
        self.learn_of_decision();
        self.changed();
        if matches!(self.state, State::Planned(_)) {
            self.unplan();
        }
    }

    /// What a decision of a process before went by, and does not say, is known once the terms are.
    fn learn_of_decision(&mut self) {
        let State::Decided(decided) = &self.state else {
            return;
        };
        let roles = decided.by_role.is_none().then(|| self.roles_of(decided.min));
        let repair = self.agreed.terms().map(|terms| terms.repair);
        if let State::Decided(decided) = &mut self.state {
            decided.repair = decided.repair.or(repair);
            if let Some(roles) = roles {
                decided.by_role = roles;
            }
        }
    }

    /// It wants a plan, if not now then when time has passed.
    pub(super) fn may_ever_want_plan(&self) -> bool {
        let open = matches!(self.state, State::Open | State::Decided(_));
        open && !self.goes_singly()
            && self.members.count().of(Class::Waiting) > 0
            && self.working_terms().is_some()
    }

    /// The slot of a lost member: kept for its replacement, unless its devices are another gang's already, or to be another pod's.
    fn lose(&mut self, uid: &PodUid, id: u32, holder: &Holder, now: Instant) {
        let kept = self.members.get(uid);
        let evicted = kept.is_some_and(|kept| kept.evicted);
        if evicted || kept.is_some_and(|kept| kept.member.preempted) {
            self.evicted_lost |= evicted;
            self.drop_slot(id);
        } else if *holder == Holder::Kept {
            self.untie(uid, now);
        } else {
            self.slots.set_holder(id, holder, now);
        }
    }

    /// Brings the gang's words and the slot of a member in step with what the member has become.
    pub(super) fn follow(&mut self, uid: &PodUid, now: Instant) {
        self.follow_words(uid);
        let Some(kept) = self.members.get(uid) else { return };
        let class = kept.class(self.members.life());
        let Some(id) = kept.slot else {
            if class == Class::Bound {
                self.recognise_bound(uid, now);
            }
            return;
        };
        let Some(slot) = self.slots.get(id) else { return };
        match (&kept.member.stage, class) {
            (_, Class::Completed) => self.drop_slot(id),
            (_, Class::Lost) if kept.member.stage != Stage::Failed && kept.pinned() && !kept.gone => {
                self.lose(uid, id, &Holder::Leaving(uid.clone()), now);
            }
            (_, Class::Lost) => self.lose(uid, id, &Holder::Kept, now),
            (_, Class::Faulty | Class::Foreign | Class::Elsewhere) if !kept.pinned() => self.untie(uid, now),
            (Stage::Bound(node), _) if *node == slot.node => {
                // A Binding of before may have come late: what the pod has is its place, not what it would have got.
                self.slots.set_devices(id, &kept.member.holds);
                self.slots.note_shape(id, kept.member.shape);
                self.slots.set_holder(id, &Holder::Bound(uid.clone()), now);
            }
            // Bound elsewhere, past us: its pod holds what it holds, and the slot is nobody's.
            (Stage::Bound(_), _) => self.untie(uid, now),
            _ => {}
        }
    }

    /// Only what members say that are there counts, of this life.
    pub(super) fn follow_words(&mut self, uid: &PodUid) {
        let Some(kept) = self.members.get(uid) else { return };
        let class = kept.class(self.members.life());
        let says = (!matches!(class, Class::Old | Class::Lost)).then(|| Says {
            membership: kept.member.membership.clone(),
            ended: class == Class::Completed,
            light: kept.member.shape.is_none(),
        });
        let said = kept.worded.clone();
        if says == said {
            return;
        }
        if let Some(says) = &says {
            self.words.add(says);
        }
        if let Some(said) = &said {
            self.words.remove(said);
        }
        self.members.change(uid, |kept| kept.worded = says);
    }

    /// A bound member without a slot may be the one that a kept slot was for: its devices tell.
    fn recognise_bound(&mut self, uid: &PodUid, now: Instant) {
        let Some(kept) = self.members.get(uid) else { return };
        let Stage::Bound(node) = &kept.member.stage else {
            return;
        };
        let found = self.slots.kept().iter().copied().find(|id| {
            self.slots
                .get(*id)
                .is_some_and(|slot| slot.node == *node && slot.has_just(&kept.member.holds))
        });
        if let Some(id) = found {
            self.tie(uid, id, now);
            self.slots.set_holder(id, &Holder::Bound(uid.clone()), now);
        }
    }

    /// A member is no longer there.
    pub(super) fn remove_member(&mut self, uid: &PodUid, now: Instant) -> Option<Kept> {
        if let Some(id) = self.members.get(uid).and_then(|kept| kept.slot) {
            self.lose(uid, id, &Holder::Kept, now);
        }
        let kept = self.members.remove(uid)?;

        if let Some(said) = &kept.worded {
            self.words.remove(said);
        }
        Some(kept)
    }
}
