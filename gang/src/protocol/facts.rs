//! What a gang makes of the facts that come in about its members and its terms.

use gantry_api::PodUid;

use super::agreed::Agreed;
use super::gang::{Gang, State};
use super::members::{Class, Kept};
use super::standing::after;
use super::types::{Member, Now, Settings};

impl Gang {
    /// A member, as it is now.
    pub(super) fn member_seen(&mut self, now: Now, member: Member, settings: &Settings) {
        let uid = member.uid.clone();
        let life = self.members.life();
        let waited = |gang: &Self| gang.members.unplaced().contains(&uid);
        let before = waited(self);
        match self.members.get(&uid) {
            Some(_) => self.members.change(&uid, |kept| kept.member = member),
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
        self.changed();
        if matches!(self.state, State::Planned(_)) {
            self.unplan();
        }
    }

    /// It wants a plan, if not now then when time has passed.
    pub(super) fn may_ever_want_plan(&self) -> bool {
        let open = matches!(self.state, State::Open | State::Decided(_));
        open && self.members.count().of(Class::Waiting) > 0 && self.working_terms().is_some()
    }
}
