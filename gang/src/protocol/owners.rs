//! Owners come in: the objects that say how large gangs are. Some say that each role is a gang of its own; then members move. Some say in
//! the end that they are over, or meanwhile that they are suspended; then no place is kept for replacements.

use std::sync::Arc;

use super::Gangs;
use super::gangs::Owner;
use super::types::{Now, WatchedOwner};
use crate::integrations::settle;
use crate::membership::{Membership, OwnerFacts, OwnerRef};

impl Gangs {
    /// What an owner says of size and wishes; `None`: there is no such object, or none that may be read.
    pub fn owner_seen(&mut self, now: Now, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        self.clock = Some(now);
        let spare = self.owners.len() < self.settings.max_gangs.saturating_mul(2);
        if !spare && !self.owners.contains_key(owner) {
            return;
        }
        let entry = self.owners.entry(owner.clone()).or_default();
        if entry.known.as_ref() == Some(&facts) {
            return;
        }
        entry.gone = facts.is_none() && (entry.gone || matches!(entry.known, Some(Some(_))));
        let starts_apart = facts.as_ref().is_some_and(|facts| facts.apart);
        entry.known = Some(facts);
        for key in entry.gangs.clone() {
            let mut apart = Vec::new();
            if let Some(gang) = self.gangs.get_mut(&key) {
                gang.reagree = true;
                let members = gang.members.iter().filter(|_| starts_apart);
                apart.extend(members.map(|kept| kept.member.clone()));
            }
            apart.retain(|member| self.settled(&member.membership).is_some());
            for member in apart {
                self.member_seen(now, member);
            }
            self.finish(now, &key);
        }
    }

    /// The owners that gangs wait for or go by.
    pub fn watched_owners(&self) -> Vec<WatchedOwner> {
        let wanted = self.owners.iter().filter(|(_, entry)| !entry.gangs.is_empty());
        wanted
            .map(|(owner, entry)| WatchedOwner {
                owner: owner.clone(),
                unread: entry.known.is_none(),
            })
            .collect()
    }

    /// The claim of a member whose owner is known to start its roles apart: each is a gang of its own.
    pub(super) fn settled(&self, membership: &Membership) -> Option<Membership> {
        let owner = self.owners.get(membership.owner.as_ref()?)?;
        settle(membership, owner.known.as_ref()?.as_ref()?)
    }
}

impl Owner {
    /// Nobody makes members anew: it says that it has ended, or it is gone.
    pub(super) fn is_over(&self) -> bool {
        self.gone || matches!(&self.known, Some(Some(facts)) if facts.over)
    }

    /// Nobody makes members anew before it goes on.
    pub(super) fn is_suspended(&self) -> bool {
        matches!(&self.known, Some(Some(facts)) if facts.suspended)
    }
}
