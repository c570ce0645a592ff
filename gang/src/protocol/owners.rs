//! The objects that declare how large gangs are. Some declare that each role is a gang of its own; then members move. Some declare in the
//! end that they have finished, or meanwhile that they are suspended; then no slot is kept for replacements.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::types::WatchedOwner;
use crate::integrations::{in_tree, settle};
use crate::key::GangKey;
use crate::membership::{Membership, OwnerFacts, OwnerKind, OwnerRef};

/// Groups from a root down to a PodGroup at most, as in Kubernetes (`WorkloadMaxTreeDepth`).
pub(super) const MAX_DEPTH: usize = 4;

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

/// The groups above a PodGroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ancestry {
    /// The PodGroup, its parent and so on, as far as they are known. The last may not exist or not be read yet.
    pub(super) groups: Vec<OwnerRef>,
    pub(super) end: AncestryEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AncestryEnd {
    /// The last group has no parent.
    Root,
    /// The last group was not read yet.
    Unread,
    /// The last group does not exist or may not be read.
    Missing,
    /// The last group has itself among its ancestors.
    Cycle,
    /// There are more than [`MAX_DEPTH`] groups.
    TooDeep,
}

impl Ancestry {
    /// The ancestry of a PodGroup, as its owners state it.
    pub(super) fn of<'a>(group: &OwnerRef, find: &impl Fn(&OwnerRef) -> Option<&'a Owner>) -> Self {
        let mut groups = vec![group.clone()];
        loop {
            let last = groups.last().unwrap_or(group);
            let known = find(last).map(Owner::known);
            let end = match known {
                None | Some(None) => AncestryEnd::Unread,
                Some(Some(None)) => AncestryEnd::Missing,
                Some(Some(Some(facts))) => match &facts.parent {
                    None => AncestryEnd::Root,
                    Some(name) => {
                        let kind = OwnerKind::CompositePodGroup;
                        let parent = OwnerRef { kind, name: Arc::clone(name), ..group.clone() };
                        if groups.contains(&parent) {
                            AncestryEnd::Cycle
                        } else if groups.len() >= MAX_DEPTH {
                            AncestryEnd::TooDeep
                        } else {
                            groups.push(parent);
                            continue;
                        }
                    }
                },
            };
            return Self { groups, end };
        }
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

    /// The membership of a pod, if its owner is known to start roles apart: each is a gang of its own; or if its PodGroup belongs to a tree
    /// of groups: that is one gang.
    pub(super) fn settle(&self, membership: &Membership) -> Option<Membership> {
        let owner = self.all.get(membership.owner.as_ref()?)?;
        if owner.facts().is_some_and(|facts| facts.parent.is_some()) {
            let mut ancestry = Ancestry::of(membership.owner.as_ref()?, &|owner| self.get(owner));
            if ancestry.end != AncestryEnd::Root {
                return None;
            }
            ancestry.groups.reverse();
            return in_tree(membership, ancestry.groups);
        }
        settle(membership, owner.known.as_ref()?.as_ref()?)
    }

    /// Whether it is not known yet to which gang the pods of an owner belong: to which tree of groups, or whether roles start apart.
    pub(super) fn is_early(&self, owner: &OwnerRef) -> bool {
        match owner.kind {
            OwnerKind::PodGroup => Ancestry::of(owner, &|of| self.get(of)).end == AncestryEnd::Unread,
            _ => self.get(owner).is_none_or(|owner| owner.known().is_none()),
        }
    }

    /// Whether it is not known yet to which tree of groups some PodGroup of a namespace belongs.
    pub(super) fn any_early_group(&self, namespace: &str) -> bool {
        let groups = self
            .all
            .keys()
            .filter(|owner| owner.kind == OwnerKind::PodGroup && &*owner.namespace == namespace);
        groups.into_iter().any(|owner| self.is_early(owner))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}
