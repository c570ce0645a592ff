//! The members of a gang and its slots, kept in step: the slot of a member and the holder of a slot always name one another, so that a slot
//! has one member at most and a member one slot at most.

use std::collections::BTreeMap;
use std::time::Instant;

use gantry_api::{NodeName, PodUid};

use super::members::{Class, Members, TrackedMember};
use super::slots::{Holder, Slot, Slots};
use super::types::{BindEnd, Member, MemberRequest, Reservation, Stage};

/// Members and slots.
#[derive(Debug, Clone, Default)]
pub(super) struct Roster {
    members: Members,
    slots: Slots,
}

/// What became of the slot of a lost member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// It had none, or it is kept.
    None,
    /// It is released: the member was a victim of another gang.
    Evicted,
}

impl Roster {
    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// The members, for changes that do not touch slots.
    pub(super) fn members_mut(&mut self) -> &mut Members {
        &mut self.members
    }

    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The slots, for changes that do not touch their holders.
    pub(super) fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// The slot of a member.
    pub(super) fn slot_of(&self, uid: &PodUid) -> Option<(u32, &Slot)> {
        let id = self.members.get(uid)?.slot()?;
        Some((id, self.slots.get(id)?))
    }

    /// Adds a slot for a member that has none.
    pub(super) fn add(&mut self, slot: Slot, uid: &PodUid, now: Instant) -> u32 {
        let id = self.slots.insert(slot);
        self.assign(uid, id, now);
        id
    }

    /// Adds a slot that no member has.
    pub(super) fn add_kept(&mut self, slot: Slot) -> u32 {
        self.slots.insert(slot)
    }

    /// Gives a slot to a member that has none.
    pub(super) fn assign(&mut self, uid: &PodUid, id: u32, now: Instant) {
        let Some(member) = self.members.get(uid) else {
            return;
        };
        self.slots.fit(id, member.pod());
        self.slots.set_holder(id, &Holder::Assigned(uid.clone()), now);
        let follows = self.slots.get(id).is_some_and(Slot::follows);
        self.members.change(uid, |member| member.assign(id, follows, now));
    }

    /// Takes the slot from a member; the slot is kept.
    pub(super) fn unassign(&mut self, uid: &PodUid, now: Instant) {
        let Some(id) = self.members.get(uid).and_then(TrackedMember::slot) else {
            return;
        };
        self.slots.set_holder(id, &Holder::Kept, now);
        self.members.change(uid, TrackedMember::unassign);
    }

    /// Releases a slot, and takes it from the member that has it.
    pub(super) fn release(&mut self, id: u32) {
        let Some(slot) = self.slots.remove(id) else { return };
        if let Some(uid) = slot.holder().pod() {
            self.members.change(uid, TrackedMember::unassign);
        }
    }

    pub(super) fn release_all(&mut self) {
        for id in self.slots.ids() {
            self.release(id);
        }
    }

    pub(super) fn release_kept(&mut self) {
        for id in self.slots.kept().clone() {
            self.release(id);
        }
    }

    /// The pod of a slot is bound to the slot's node.
    pub(super) fn set_bound(&mut self, id: u32, uid: &PodUid, now: Instant) {
        self.slots.set_holder(id, &Holder::Bound(uid.clone()), now);
    }

    /// Begins a new incarnation of the members. Pods of the one before that still have slots go on having them.
    pub(super) fn begin_incarnation(&mut self, continues: bool) {
        self.members.begin_incarnation(continues);
    }

    /// A member, as the watch shows it. Whether it is new.
    pub(super) fn observe(&mut self, pod: Member) -> bool {
        let uid = pod.uid.clone();
        let incarnation = self.members.incarnation();
        let new = self.members.get(&uid).is_none();
        if new {
            self.members.insert(TrackedMember::new(pod, incarnation));
        } else {
            self.members.change(&uid, |member| member.update(pod));
            self.members.carry_late(&uid);
        }
        new
    }

    /// Brings the slot of a member in step with what the member has become.
    pub(super) fn follow(&mut self, uid: &PodUid, now: Instant) -> Loss {
        let Some(member) = self.members.get(uid) else {
            return Loss::None;
        };
        let class = self.members.class(member);
        let Some(id) = member.slot() else {
            if class == Class::Bound {
                self.recognise_bound(uid, now);
            }
            return Loss::None;
        };
        let Some(slot) = self.slots.get(id) else {
            return Loss::None;
        };
        let pod = member.pod();
        match (&pod.stage, class) {
            // Its slot is kept for the next incarnation.
            (_, Class::Old) if !member.runs() => return self.lose(uid, &Holder::Kept, now),
            (_, Class::Old) => {}
            (_, Class::Completed) => self.release(id),
            (_, Class::Lost) if pod.stage != Stage::Failed && member.is_pinned() && !member.is_gone() => {
                return self.lose(uid, &Holder::Leaving(uid.clone()), now);
            }
            (_, Class::Lost) => return self.lose(uid, &Holder::Kept, now),
            (_, Class::Faulty | Class::Foreign | Class::Rejected | Class::Elsewhere)
                if !member.is_pinned() =>
            {
                self.unassign(uid, now);
            }
            (Stage::Bound(node), _) if node == slot.node() => {
                // A Binding of an earlier process may have come late: the pod has what it holds, not what it would have got.
                let (holds, shape) = (pod.holds.clone(), pod.shape);
                self.slots.set_devices(id, &holds);
                self.slots.set_bound_shape(id, shape);
                self.set_bound(id, uid, now);
            }
            // Bound elsewhere by another scheduler: its pod holds what it holds, and the slot is free.
            (Stage::Bound(_), _) => self.unassign(uid, now),
            _ => {}
        }
        Loss::None
    }

    /// The slot of a lost member: kept for its replacement, unless its devices are another gang's already, or to be another pod's.
    fn lose(&mut self, uid: &PodUid, holder: &Holder, now: Instant) -> Loss {
        let Some((member, id)) = self.members.get(uid).and_then(|it| Some((it, it.slot()?))) else {
            return Loss::None;
        };
        let evicted = member.is_evicted();
        if evicted || member.pod().preempted {
            self.release(id);
        } else if *holder == Holder::Kept {
            self.unassign(uid, now);
        } else {
            self.slots.set_holder(id, holder, now);
        }
        if evicted { Loss::Evicted } else { Loss::None }
    }

    /// Removes a member; its pod is gone.
    pub(super) fn remove(&mut self, uid: &PodUid, now: Instant) -> (Option<TrackedMember>, Loss) {
        let loss = self.lose(uid, &Holder::Kept, now);
        (self.members.remove(uid), loss)
    }

    /// A bound member without a slot may be the one that a kept slot was for: its devices show it.
    fn recognise_bound(&mut self, uid: &PodUid, now: Instant) {
        let Some(member) = self.members.get(uid) else {
            return;
        };
        let Some(node) = member.bound_node() else { return };
        let holds = &member.pod().holds;
        let found = self.slots.find_kept(|slot| slot.node() == node && slot.has_exactly(holds));
        if let Some(id) = found {
            self.assign(uid, id, now);
            self.set_bound(id, uid, now);
        }
    }

    /// The binding of a member has ended.
    pub(super) fn end_bind(&mut self, uid: &PodUid, outcome: BindEnd) {
        self.members.change(uid, |member| member.end_bind(outcome));
    }

    /// Gives kept slots to members that wait and that they suit. Returns those members.
    pub(super) fn fill(&mut self, now: Instant) -> Vec<PodUid> {
        self.fill_where(now, Slot::awaits)
    }

    /// Gives a spare slot to a member that waits, if one suits it.
    pub(super) fn take_spare(&mut self, uid: &PodUid, now: Instant) -> bool {
        let Some(member) = self.members.get(uid) else {
            return false;
        };
        let found = self.slots.spares().find(|(_, slot)| slot.replaces(member.pod())).map(|(id, _)| id);
        if let Some(id) = found {
            self.assign(uid, id, now);
        }
        found.is_some()
    }

    /// The same for members that ask for the same devices and may have other needs.
    pub(super) fn fill_alike(&mut self, now: Instant) -> Vec<PodUid> {
        self.fill_where(now, Slot::awaits_alike)
    }

    fn fill_where(&mut self, now: Instant, awaits: impl Fn(&Slot, &Member) -> bool) -> Vec<PodUid> {
        if self.slots.kept().is_empty() || self.members.unplaced().is_empty() {
            return Vec::new();
        }
        let mut filled = Vec::new();
        for uid in self.members.unplaced().clone() {
            let Some(member) = self.members.get(&uid) else {
                continue;
            };
            let found = self.slots.find_kept(|slot| awaits(slot, member.pod()));
            if let Some(id) = found {
                self.assign(&uid, id, now);
                filled.push(uid);
            }
        }
        filled
    }

    /// Gives a member another slot of its gang on a node that will do: a kept one, or in exchange that of a member that has not arrived yet.
    pub(super) fn move_to(&mut self, uid: &PodUid, suits: &dyn Fn(&NodeName) -> bool, now: Instant) -> bool {
        let (Some(member), Some((own, own_slot))) = (self.members.get(uid), self.slot_of(uid)) else {
            return false;
        };
        let free = self.slots.find_kept(|slot| slot.awaits(member.pod()) && suits(slot.node()));
        if let Some(id) = free {
            self.unassign(uid, now);
            self.assign(uid, id, now);
            return true;
        }
        let mut best: Option<(bool, u32, PodUid)> = None;
        for other in self.members.on_the_way() {
            let (Some(sibling), Some((id, slot))) = (self.members.get(other), self.slot_of(other)) else {
                continue;
            };
            let movable = other != uid && !sibling.has_arrived() && !sibling.is_pinned();
            let alike = slot.suits(member.pod())
                && own_slot.suits(sibling.pod())
                && sibling.pod().membership.role == member.pod().membership.role;
            if movable && alike && suits(slot.node()) {
                let candidate = (sibling.was_answered(), id, other.clone());
                if best.as_ref().is_none_or(|best| candidate < *best) {
                    best = Some(candidate);
                }
            }
        }
        let Some((_, id, other)) = best else {
            return false;
        };
        self.unassign(uid, now);
        self.unassign(&other, now);
        self.assign(uid, id, now);
        self.assign(&other, own, now);
        true
    }

    /// All living members with slots are victims of another gang.
    pub(super) fn are_all_evicted(&self) -> bool {
        let incarnation = self.members.incarnation();
        let held =
            |member: &&TrackedMember| member.lives() && member.is_of(incarnation) && member.slot().is_some();
        let mut held = self.members.iter().filter(held).peekable();
        held.peek().is_some() && held.all(TrackedMember::is_evicted)
    }
}

/// Which member gets which reservation: by rank where both have one, else in their order.
pub(super) fn pair(members: Vec<MemberRequest>, reservations: &[Reservation]) -> Vec<(PodUid, &Reservation)> {
    let mut left: Vec<Option<&Reservation>> = reservations.iter().map(Some).collect();
    let mut by_rank = BTreeMap::new();
    for (at, reservation) in reservations.iter().enumerate() {
        if let Some(rank) = reservation.rank {
            by_rank.entry((reservation.shape, reservation.role.clone(), rank)).or_insert(at);
        }
    }
    let mut pairs = Vec::new();
    let mut rest = Vec::new();
    for member in members {
        let role = member.role.clone();
        let at = member.rank.and_then(|rank| by_rank.remove(&(member.shape, role, rank)));
        match at.and_then(|at| left.get_mut(at)?.take()) {
            Some(reservation) => pairs.push((member.uid, reservation)),
            None => rest.push(member),
        }
    }
    let mut others: BTreeMap<_, Vec<&Reservation>> = BTreeMap::new();
    for reservation in left.into_iter().flatten().rev() {
        others.entry((reservation.shape, reservation.role.clone())).or_default().push(reservation);
    }
    for member in rest {
        let reservation = others.get_mut(&(member.shape, member.role.clone())).and_then(Vec::pop);
        if let Some(reservation) = reservation {
            pairs.push((member.uid, reservation));
        }
    }
    pairs
}
