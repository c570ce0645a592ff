//! The objects that declare how large gangs are. Some declare that each role is a gang of its own; then members move. Some declare in the
//! end that they have finished, or meanwhile that they are suspended; then no slot is kept for replacements.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::types::WatchedOwner;
use crate::integrations::settle;
use crate::key::GangKey;
use crate::membership::{Membership, OwnerFacts, OwnerRef};

/// What is known of an owner: `None` means not read yet, `Some(None)` that it does not exist.
pub(super) type OwnerKnown = Option<Option<Arc<OwnerFacts>>>;

/// An owner, and the gangs that follow it.
#[derive(Debug, Clone, Default)]
pub(super) struct Owner {
    known: OwnerKnown,
    /// It was read once, and does not exist any more.
    gone: bool,
    gangs: BTreeSet<Arc<GangKey>>,
}

impl Owner {
    pub(super) fn known(&self) -> &OwnerKnown {
        &self.known
    }

    /// Lost members are not recreated: it declares that it has ended, or it is gone.
    pub(super) fn is_finished(&self) -> bool {
        self.gone || matches!(&self.known, Some(Some(facts)) if facts.over)
    }

    /// What it states, if it was read and exists.
    pub(super) fn facts(&self) -> Option<&Arc<OwnerFacts>> {
        self.known.as_ref()?.as_ref()
    }

    /// Lost members are not recreated before it resumes.
    pub(super) fn is_suspended(&self) -> bool {
        matches!(&self.known, Some(Some(facts)) if facts.suspended)
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Owners {
    all: BTreeMap<OwnerRef, Owner>,
}

impl Owners {
    pub(super) fn get(&self, owner: &OwnerRef) -> Option<&Owner> {
        self.all.get(owner)
    }

    /// An owner, as it is now; no more than `limit` are kept. Returns the gangs that follow it, if anything has changed.
    pub(super) fn observe(
        &mut self,
        owner: &OwnerRef,
        facts: Option<Arc<OwnerFacts>>,
        limit: usize,
    ) -> Vec<Arc<GangKey>> {
        if self.all.len() >= limit && !self.all.contains_key(owner) {
            return Vec::new();
        }
        let entry = self.all.entry(owner.clone()).or_default();
        if entry.known.as_ref() == Some(&facts) {
            return Vec::new();
        }
        entry.gone = facts.is_none() && (entry.gone || matches!(entry.known, Some(Some(_))));
        entry.known = Some(facts);
        entry.gangs.iter().cloned().collect()
    }

    /// A gang follows an owner from now on.
    pub(super) fn follow(&mut self, owner: &OwnerRef, gang: &Arc<GangKey>) {
        let entry = self.all.entry(owner.clone()).or_default();
        entry.gangs.insert(gang.clone());
    }

    /// A gang does not follow an owner any more.
    pub(super) fn unfollow(&mut self, owner: &OwnerRef, gang: &Arc<GangKey>) {
        if let Some(entry) = self.all.get_mut(owner) {
            entry.gangs.remove(gang);
            // What was read of it is forgotten with the next tick: members that move from one of its gangs to another still need it.
            if entry.gangs.is_empty() && entry.known.is_none() {
                self.all.remove(owner);
            }
        }
    }

    /// Forgets owners that no gang follows. Nothing reports their changes, so what is known of them may be outdated when one does again.
    pub(super) fn forget_unused(&mut self) {
        self.all.retain(|_, owner| !owner.gangs.is_empty());
    }

    /// The owners that gangs wait for or follow.
    pub(super) fn watched(&self) -> Vec<WatchedOwner> {
        let watched = self.all.iter().filter(|(_, entry)| !entry.gangs.is_empty());
        watched
            .map(|(owner, entry)| WatchedOwner { owner: owner.clone(), unread: entry.known.is_none() })
            .collect()
    }

    /// The membership of a pod, if its owner is known to start roles apart: each is a gang of its own.
    pub(super) fn settle(&self, membership: &Membership) -> Option<Membership> {
        let owner = self.all.get(membership.owner.as_ref()?)?;
        settle(membership, owner.known.as_ref()?.as_ref()?)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}
