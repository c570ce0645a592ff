//! The barrier: members come to their places one by one, and none goes through before the whole is decided. Answers what filter and bind
//! ask; a pod that has nowhere to go costs a look into a map.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};

use super::gang::{Env, Expects, Gang, State};
use super::members::{Bind, Class, Kept};
use super::slots::{Holder, Slot};
use super::standing::{NOT_OFFERED, after};
use super::types::{Answer, Arrival, Assignment, BindEnd, Stage};

impl Gang {
    /// The node that filter may answer for a member.
    pub(super) fn answer(
        &mut self,
        env: &mut Env<'_>,
        uid: &PodUid,
        offered: &dyn Fn(&NodeName) -> bool,
    ) -> Answer {
        let Some(kept) = self.members.get(uid) else {
            return Answer::Single;
        };
        if kept.member.shape.is_none() {
            return Answer::Single;
        }
        if let Stage::Bound(node) = &kept.member.stage {
            return Answer::Node(node.clone());
        }
        if let Some(why) = self.not_going(kept) {
            return Answer::Wait(why);
        }
        let Some((_, slot)) = self.slot_of(uid) else {
            return Answer::Wait(self.text.clone());
        };
        let planned = slot.node.clone();
        let (here, pinned, aside) = (kept.here, kept.pinned(), kept.is_aside());
        if offered(&planned) {
            if aside {
                // It has been there. To come again and again would only have kube-scheduler try all others again each time that it leaves.
                return Answer::Wait(self.text.clone());
            }
            self.note_answer(uid);
            return Answer::Node(planned);
        }
        if aside {
            // It could not go there now: what it has shown does not hold any more.
            self.members.change(uid, Kept::leave);
        }
        if !here && !pinned && self.move_to(env, uid, offered) {
            self.note_answer(uid);
            if let Some((_, slot)) = self.slot_of(uid) {
                return Answer::Node(slot.node.clone());
            }
        }
        self.missed(env, uid, &planned);
        if self.slot_of(uid).is_some() {
            let text = format!(
                "gang {}: node {planned}, where it is to go, is not offered",
                self.key
            );
            Answer::Wait(text.into())
        } else {
            Answer::Wait(self.text.clone())
        }
    }

    fn note_answer(&mut self, uid: &PodUid) {
        let new = |kept: &Kept| !kept.answered || kept.parked.is_some();
        if self.members.get(uid).is_some_and(new) {
            self.members.change(uid, |kept| {
                kept.answered = true;
                kept.parked = None;
            });
        }
    }

    /// Why a member itself cannot go anywhere, whatever its gang does.
    pub(super) fn not_going(&self, kept: &Kept) -> Option<Arc<str>> {
        if kept.member.leaving || kept.gone {
            return Some("pod is being deleted".into());
        }
        if kept.class(self.members.life()) == Class::Old {
            return Some(self.text.clone());
        }
        if let Some(fault) = kept.member.membership.faults.first() {
            return Some(format!("gang {}: {fault}", self.key).into());
        }
        match &self.state {
            State::Planned(_) if self.preempts() => Some(self.text.clone()),
            _ => None,
        }
    }

    /// Gives a member another slot of its gang on a node that will do: one kept for nobody else, or that of a member that has not come
    /// yet, in exchange.
    fn move_to(&mut self, env: &Env<'_>, uid: &PodUid, suits: &dyn Fn(&NodeName) -> bool) -> bool {
        let Some((own, own_slot)) = self.slot_of(uid) else {
            return false;
        };
        let Some(kept) = self.members.get(uid) else {
            return false;
        };
        let free = self.slots.kept().iter().copied().find(|id| {
            self.slots
                .get(*id)
                .is_some_and(|slot| slot.awaits(&kept.member) && suits(&slot.node))
        });
        if let Some(id) = free {
            self.untie(uid, env.now.at);
            self.tie(uid, id, env.now.at);
            return true;
        }
        let mut best: Option<(bool, u32, PodUid)> = None;
        for other in self.members.on_the_way() {
            let Some(sibling) = self.members.get(other) else {
                continue;
            };
            let Some((id, slot)) = self.slot_of(other) else {
                continue;
            };
            let movable = other != uid && !sibling.arrived && !sibling.pinned();
            let alike = slot.suits(&kept.member)
                && own_slot.suits(&sibling.member)
                && sibling.member.membership.role == kept.member.membership.role;
            if movable && alike && suits(&slot.node) {
                let candidate = (sibling.answered, id, other.clone());
                if best.as_ref().is_none_or(|best| candidate < *best) {
                    best = Some(candidate);
                }
            }
        }
        let Some((_, id, other)) = best else {
            return false;
        };
        self.untie(uid, env.now.at);
        self.untie(&other, env.now.at);
        self.tie(uid, id, env.now.at);
        self.tie(&other, own, env.now.at);
        true
    }

    /// A planned node was not among those offered, and no other slot would do. After a few times it is planned without it.
    fn missed(&mut self, env: &mut Env<'_>, uid: &PodUid, node: &NodeName) {
        // The next offer may be another part of the cluster: ask for it soon.
        let soon = after(env.now.at, env.settings.nudge / 10);
        if self.nudge.is_none_or(|(at, _)| at > soon) {
            self.nudge = Some((soon, env.settings.nudge));
        }
        // It may be that its siblings are not there: kube-scheduler counts them where pods must be spread, or kept together.
        self.bring_back(env, |_| true);
        let misses = self.tries.misses.entry(node.clone()).or_default();
        *misses = misses.saturating_add(1);
        if *misses < env.settings.misses {
            return;
        }
        self.tries.misses.remove(node);
        let pinned = self.members.get(uid).is_some_and(Kept::pinned);
        match &self.state {
            State::Planned(_) => {
                self.tries.without.insert(node.clone());
                self.tries.replans = self.tries.replans.saturating_add(1);
                if self.tries.replans > env.settings.replans {
                    self.strike(env, self.as_said(NOT_OFFERED));
                } else {
                    self.unplan();
                }
            }
            State::Decided(_) if !pinned => {
                self.tries.without.insert(node.clone());
                self.replan_slot(uid);
            }
            _ => {}
        }
    }

    /// Gives up one slot of a decided gang; its member is planned anew by itself.
    pub(super) fn replan_slot(&mut self, uid: &PodUid) {
        if let Some((id, _)) = self.slot_of(uid) {
            self.drop_slot(id);
            self.tries.considered = None;
        }
    }

    /// A member has come to be bound.
    pub(super) fn arrive(&mut self, env: &mut Env<'_>, uid: &PodUid, node: &NodeName) -> Arrival {
        let Some(kept) = self.members.get(uid) else {
            return Arrival::Single;
        };
        if kept.member.shape.is_none() {
            return Arrival::Single;
        }
        if let Stage::Bound(at) = &kept.member.stage {
            return match self.slot_of(uid) {
                Some((_, slot)) if slot.node == *node => self.go(uid),
                _ if at == node => Arrival::Single,
                _ => Arrival::Refuse(format!("pod is bound to node {at}").into()),
            };
        }
        if let Some(why) = self.not_going(kept) {
            return Arrival::Refuse(why);
        }
        let Some((_, slot)) = self.slot_of(uid) else {
            return Arrival::Refuse(self.text.clone());
        };
        let planned = slot.node.clone();
        if planned != *node {
            let movable = !kept.here && !kept.pinned();
            if !movable || !self.move_to(env, uid, &|other| other == node) {
                let why = format!("gang {}: the pod's place is on node {planned} now", self.key);
                return Arrival::Refuse(why.into());
            }
        }
        match &self.state {
            // Its place was given to it after the decision: that is written down first, so that whoever takes over knows.
            State::Decided(_)
                if !self.members.get(uid).is_some_and(Kept::pinned) && !self.is_written_down(uid) =>
            {
                self.members.change(uid, Kept::come);
                Arrival::Wait
            }
            State::Decided(_) => {
                self.members.change(uid, |kept| {
                    kept.come();
                    if kept.bind == Bind::No || kept.bind == Bind::Unsure {
                        kept.bind = Bind::Going;
                    }
                });
                self.go(uid)
            }
            State::Planned(_) | State::Committing(_) => {
                // What kept nodes from being offered may have been that others had not come: it is counted from here on anew.
                self.tries.misses.clear();
                self.members.change(uid, Kept::come);
                Arrival::Wait
            }
            State::Open | State::Restarting { .. } | State::Over { .. } => Arrival::Refuse(self.text.clone()),
        }
    }

    fn go(&self, uid: &PodUid) -> Arrival {
        match self.slot_of(uid) {
            Some((_, slot)) => Arrival::Go(Assignment {
                gang: self.key.clone(),
                node: slot.node.clone(),
                devices: slot.devices.clone(),
            }),
            None => Arrival::Refuse(self.text.clone()),
        }
    }

    /// A member's caller has hung up or given up. Before the decision it no longer counts; its place is kept a while for its next try.
    pub(super) fn withdraw(&mut self, env: &Env<'_>, uid: &PodUid) {
        if !self
            .members
            .get(uid)
            .is_some_and(|kept| kept.here && !kept.pinned())
        {
            return;
        }
        self.members.change(uid, Kept::leave);
        if let State::Planned(planned) = &mut self.state {
            let grace = after(env.now.at, env.settings.grace).min(planned.last);
            planned.until = planned.until.max(grace);
        }
    }

    /// A member has stood at the barrier as long as it may, and leaves. Until the decision it has come all the same: kube-scheduler has
    /// found its node good, and brings members in an order and at a pace of its own. It is bound with the others though nobody calls for it
    /// then.
    pub(super) fn gave_up(&mut self, env: &Env<'_>, uid: &PodUid) {
        match &self.state {
            State::Planned(_) | State::Committing(_) => {
                self.members.change(uid, |kept| kept.here = false);
            }
            _ => self.withdraw(env, uid),
        }
    }

    /// Nodes of some slots offer less than before: members that have come to them and left have to come anew.
    pub(super) fn doubt(&mut self, env: &mut Env<'_>, slots: &BTreeSet<u32>) {
        self.bring_back(env, |slot| slots.contains(&slot));
    }

    /// Members that have come and left, and are bound no more without coming anew.
    fn bring_back(&mut self, env: &mut Env<'_>, of: impl Fn(u32) -> bool) {
        let aside = self.members.call_back(of);
        self.wake(env, aside);
    }

    /// The binding of a member has ended.
    pub(super) fn bind_ended(&mut self, env: &mut Env<'_>, uid: &PodUid, outcome: BindEnd) {
        self.members.change(uid, |kept| match outcome {
            BindEnd::Bound => kept.bind = Bind::Done,
            BindEnd::Unsure => kept.bind = Bind::Unsure,
            BindEnd::Failed => {
                kept.bind = Bind::No;
                kept.leave();
            }
            BindEnd::Gone => {
                kept.bind = Bind::No;
                kept.gone = true;
            }
        });
        if outcome == BindEnd::Failed && self.members.get(uid).is_some_and(|kept| kept.parked.is_some()) {
            // If nobody had called for it, nobody brings it again.
            self.wake(env, vec![uid.clone()]);
        }
        self.follow(uid, env.now.at);
    }

    /// A node, or a device of it, is of no use any more: what is planned there and not bound is planned anew.
    pub(super) fn unfit(&mut self, lost: &dyn Fn(u32, &Slot) -> bool) {
        let there: Vec<(u32, Holder)> = self
            .slots
            .iter()
            .filter(|(id, slot)| lost(*id, slot))
            .map(|(id, slot)| (id, slot.holder.clone()))
            .collect();
        let unbound = there
            .iter()
            .any(|(_, holder)| !matches!(holder, Holder::Bound(_)));
        if !unbound {
            return;
        }
        match &self.state {
            State::Planned(_) => self.unplan(),
            State::Committing(_) => {
                for (id, _) in there {
                    self.slots.mark_stale(id);
                }
            }
            State::Decided(_) => {
                for (id, holder) in there {
                    self.give_up_place(id, &holder);
                }
            }
            State::Open | State::Restarting { .. } | State::Over { .. } => {}
        }
    }

    /// Gives up a slot that is of no use, unless a Binding may exist for it.
    pub(super) fn give_up_place(&mut self, id: u32, holder: &Holder) {
        match holder {
            Holder::Bound(_) => {}
            Holder::Kept | Holder::Leaving(_) => self.drop_slot(id),
            Holder::Assigned(uid) => {
                if !self.members.get(uid).is_some_and(Kept::pinned) {
                    self.replan_slot(&uid.clone());
                }
            }
        }
    }

    /// Whether the outcome of a commit is awaited.
    pub(super) fn expects(&self) -> Option<Expects> {
        match &self.state {
            State::Committing(committing) => Some(committing.expects),
            _ => None,
        }
    }
}
