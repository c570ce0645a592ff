//! Members that our scheduling gate keeps back: the gate goes once enough of them exist, or, once the gang is decided, with their place.
//! While it may not be removed nobody can come to a place, so none is kept. Nothing is removed here, only asked for.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::gang::{Env, Gang, State};
use super::members::{Count, Kept};
use super::standing::after;
use super::types::{Blocker, Stage, Work};

impl Gang {
    /// Once the quorum exists, our gates go: kube-scheduler may see the members. What is decided is brought to its end: who has a place in
    /// it, or needs none, comes whoever else is missing, as without gates.
    pub(super) fn ungate(&mut self, env: &mut Env<'_>) {
        let all = self.terms().is_some() && self.enough(Count::exist);
        if !all && !matches!(self.state, State::Decided(_)) {
            return;
        }
        let in_vain = |asked| env.now.at >= after(asked, env.settings.nudge);
        let goes = |kept: &Kept| all || kept.slot.is_some() || kept.member.shape.is_none();
        let due = self.members.to_ungate(in_vain, goes);
        for uid in &due {
            self.members.change(uid, |kept| kept.ungated = Some(env.now.at));
        }
        if !due.is_empty() {
            env.work.push(Work::Ungate(due));
        }
    }

    fn gates_stay(&self) -> bool {
        self.hindered.contains_key(&Blocker::Gates)
    }

    /// Whether a member can come to a place: our gate does not keep it back, or nothing is known to be in the way of removing it.
    pub(super) fn may_come(&self, kept: &Kept) -> bool {
        let gated = kept.member.stage == (Stage::Gated { by_us_alone: true });
        !(gated && kept.ungated.is_some() && self.gates_stay())
    }

    /// Whether a member without a place can come to one.
    pub(super) fn any_may_come(&self) -> bool {
        let mut unplaced = self.members.unplaced().iter();
        !self.gates_stay()
            || unplaced.any(|uid| self.members.get(uid).is_some_and(|kept| self.may_come(kept)))
    }

    /// Too few can come to a place, because our gate may not be removed from the others.
    pub(super) fn is_kept_gated(&self) -> bool {
        if !self.gates_stay() {
            return false;
        }
        let mut by_role: BTreeMap<&Arc<str>, u32> = BTreeMap::new();
        for kept in self.members.asked() {
            *by_role.entry(&kept.member.membership.role).or_default() += 1;
        }
        let exist = self.members.count().exist();
        let gated = by_role
            .values()
            .fold(0, |sum: u32, count| sum.saturating_add(*count));
        gated > exist.saturating_sub(self.min())
            || by_role.iter().any(|(role, gated)| {
                let exist = self.members.count_of(role).exist();
                *gated > exist.saturating_sub(self.role_min(role))
            })
    }
}
