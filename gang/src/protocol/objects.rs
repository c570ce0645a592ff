//! `Gang` objects: what the user wants of a gang, and what another process decided. Names are shared: the gang that has an object's name is
//! found here.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::placement::ComparedFabric;
use gantry_api::{Continuation, Decision, GangPhase, GangSpec, GangStatus, PodUid};

use super::after;
use super::decision::made_at;
use super::types::Object;
use crate::key::GangKey;
use crate::terms::Fault;

/// Where the slots of a gang are.
#[derive(Debug, Clone)]
pub(super) struct GangSite {
    /// The part of the fabric ([`super::types::Placement::domain`]).
    pub(super) domain: Arc<str>,
    /// The rails that they use ([`super::types::Placement::rails`]).
    pub(super) rails: Arc<str>,
    /// Why there ([`super::types::Placement::compared`]).
    pub(super) compared: Option<Arc<ComparedFabric>>,
}

impl Default for GangSite {
    fn default() -> Self {
        Self { domain: "".into(), rails: "".into(), compared: None }
    }
}

/// Namespace and name of an object.
pub(super) type ObjectName = (Arc<str>, Arc<str>);

/// The name of a gang's object.
pub(super) fn object_name(key: &GangKey) -> ObjectName {
    (key.namespace.clone(), key.object_name().into())
}

/// What is kept of an object.
#[derive(Debug, Clone)]
pub(super) struct KnownObject {
    ours: bool,
    spec: Result<GangSpec, Fault>,
    /// The gang that its status is about; `None` if it has no status yet.
    of: Option<GangKey>,
    decision: Option<Arc<Decision>>,
    phase: GangPhase,
    restarting: bool,
    completed: u32,
    completed_by_role: BTreeMap<String, u32>,
    /// Members that were alive or had ended well.
    members: u32,
    failed_attempts: u32,
    unreserved: Vec<PodUid>,
    continuation: Option<Continuation>,
    domain: Arc<str>,
    rails: Arc<str>,
    compared: Option<Arc<ComparedFabric>>,
    waiting_since: Option<i64>,
    bound_at: Option<i64>,
}

impl KnownObject {
    pub(super) fn new(namespace: &Arc<str>, object: Object) -> Self {
        let status = object.status;
        let of = GangKey::of_status(namespace, &status);
        Self {
            ours: object.ours,
            spec: object.spec,
            of,
            decision: status.decision.map(Arc::new),
            phase: status.phase,
            restarting: status.restarting,
            completed: status.completed,
            completed_by_role: status.completed_by_role,
            members: status.members,
            failed_attempts: status.failed_attempts,
            unreserved: status.unreserved,
            continuation: status.continuation,
            domain: status.domain.into(),
            rails: status.rails.into(),
            compared: status.compared,
            waiting_since: status.waiting_since.map(|time| time.0.as_second()),
            bound_at: status.bound_at.map(|time| time.0.as_second()),
        }
    }

    pub(super) fn spec(&self) -> &Result<GangSpec, Fault> {
        &self.spec
    }

    pub(super) fn decision(&self) -> Option<&Arc<Decision>> {
        self.decision.as_ref()
    }

    pub(super) fn phase(&self) -> GangPhase {
        self.phase
    }

    pub(super) fn is_restarting(&self) -> bool {
        self.restarting
    }

    pub(super) fn completed(&self) -> u32 {
        self.completed
    }

    /// Of the members that have ended well, how many of each role.
    pub(super) fn completed_by_role(&self) -> &BTreeMap<String, u32> {
        &self.completed_by_role
    }

    pub(super) fn members(&self) -> u32 {
        self.members
    }

    pub(super) fn failed_attempts(&self) -> u32 {
        self.failed_attempts
    }

    /// Members that were bound without a reservation.
    pub(super) fn unreserved(&self) -> &[PodUid] {
        &self.unreserved
    }

    /// The reservations of the decision are kept for the next incarnation.
    pub(super) fn continuation(&self) -> Option<&Continuation> {
        self.continuation.as_ref()
    }

    /// Where its slots are.
    pub(super) fn site(&self) -> GangSite {
        GangSite {
            domain: Arc::clone(&self.domain),
            rails: Arc::clone(&self.rails),
            compared: self.compared.clone(),
        }
    }

    pub(super) fn waiting_since(&self) -> Option<i64> {
        self.waiting_since
    }

    pub(super) fn bound_at(&self) -> Option<i64> {
        self.bound_at
    }

    /// Whether its status is about this gang.
    pub(super) fn is_about(&self, key: &GangKey) -> bool {
        self.of.as_ref() == Some(key)
    }

    /// Whether it shows, apart from the decision, what the next process continues from, as `status` has it.
    pub(super) fn shows(&self, status: &GangStatus) -> bool {
        let bound_at = status.bound_at.as_ref().map(|time| time.0.as_second());
        let shown = (status.phase, status.restarting, status.completed, &status.completed_by_role, bound_at);
        (self.phase, self.restarting, self.completed, &self.completed_by_role, self.bound_at) == shown
    }

    /// Whether it shows a decision of this gang.
    pub(super) fn has_decided(&self, key: &GangKey) -> bool {
        self.is_about(key) && self.decision.is_some()
    }

    /// Whether it was created by the extender for this gang, or for one that has no status yet.
    fn is_ours_for(&self, key: &GangKey) -> bool {
        self.ours && (self.is_about(key) || self.of.is_none())
    }
}

/// All objects, and the gangs by the names of their objects.
#[derive(Debug, Clone, Default)]
pub(super) struct Objects {
    all: BTreeMap<ObjectName, KnownObject>,
    /// Objects of ours that belong to no gang, and when they are deleted.
    strays: BTreeMap<ObjectName, Instant>,
    /// The gangs by the name of their object: one, unless names collide.
    named: BTreeMap<ObjectName, Vec<Arc<GangKey>>>,
}

impl Objects {
    pub(super) fn get(&self, name: &ObjectName) -> Option<&KnownObject> {
        self.all.get(name)
    }

    pub(super) fn insert(&mut self, name: ObjectName, known: KnownObject) {
        self.all.insert(name, known);
    }

    pub(super) fn remove(&mut self, name: &ObjectName) {
        self.all.remove(name);
        self.strays.remove(name);
    }

    /// A gang is tracked from now on. Returns the name of its object.
    pub(super) fn add_gang(&mut self, key: &Arc<GangKey>) -> ObjectName {
        let name = object_name(key);
        self.named.entry(name.clone()).or_default().push(key.clone());
        name
    }

    /// A gang is not tracked any more. Whether other gangs have its name.
    pub(super) fn remove_gang(&mut self, key: &GangKey, name: &ObjectName) -> bool {
        let Some(keys) = self.named.get_mut(name) else {
            return false;
        };
        keys.retain(|other| **other != *key);
        let others = !keys.is_empty();
        if !others {
            self.named.remove(name);
        }
        others
    }

    pub(super) fn gangs_of(&self, name: &ObjectName) -> Vec<Arc<GangKey>> {
        self.named.get(name).cloned().unwrap_or_default()
    }

    /// The gang that has the object of that name: the one that its status is about, else the first.
    pub(super) fn owner_of(&self, name: &ObjectName) -> Option<Arc<GangKey>> {
        let keys = self.named.get(name)?;
        let known = self.all.get(name);
        let of_status = known.and_then(|known| keys.iter().find(|key| known.is_about(key)));
        of_status.or_else(|| keys.first()).cloned()
    }

    /// Whether the object of a gang shows that it is decided.
    pub(super) fn has_decided(&self, key: &GangKey) -> bool {
        let known = self.all.get(&object_name(key));
        known.is_some_and(|known| known.has_decided(key))
    }

    /// Whether the object of a gang was written by the user, so that the gang is to be found by it.
    pub(super) fn is_written_by_user(&self, key: &GangKey) -> bool {
        let known = self.all.get(&object_name(key));
        known.is_some_and(|known| !known.ours)
    }

    /// Whether the object of a gang that is over is to be deleted; `reported`: a status was reported for it.
    pub(super) fn is_to_delete(&self, key: &GangKey, reported: bool) -> bool {
        match self.all.get(&object_name(key)) {
            None => reported,
            Some(known) => known.is_ours_for(key),
        }
    }

    /// The gangs with objects that show that their reservations are kept for the next incarnation.
    pub(super) fn continued(&self) -> Vec<Arc<GangKey>> {
        let kept = self.all.iter().filter(|(_, known)| known.continuation.is_some());
        let keys = kept.filter_map(|(name, known)| {
            let key =
                known.of.as_ref().filter(|key| known.decision.is_some() && object_name(key) == *name)?;
            Some(Arc::new(key.clone()))
        });
        keys.collect()
    }

    /// The names of gangs' objects, the youngest decision first: of a reservation that two decisions name the older gang had released it,
    /// or the younger decision had not been written, and the object could not show it any more.
    pub(super) fn names_by_age(&self) -> Vec<ObjectName> {
        let mut names: Vec<_> = self.named.keys().cloned().collect();
        let made = |name: &ObjectName| self.all.get(name)?.decision.as_deref().and_then(made_at);
        names.sort_by_key(|name| Reverse(made(name)));
        names
    }

    /// An object of ours that is no gang's is deleted at that time: its gang was over before its status was written, or its deletion was
    /// lost.
    pub(super) fn note_stray(&mut self, name: &ObjectName, due: Instant) {
        let ours = self.all.get(name).is_some_and(|known| known.ours);
        if ours && !self.named.contains_key(name) {
            let stray = self.strays.entry(name.clone()).or_insert(due);
            *stray = due.min(*stray);
        } else {
            self.strays.remove(name);
        }
    }

    /// The same for every object.
    pub(super) fn note_strays(&mut self, due: Instant) {
        for name in self.all.keys().cloned().collect::<Vec<_>>() {
            self.note_stray(&name, due);
        }
    }

    pub(super) fn strays_due(&self) -> Option<Instant> {
        self.strays.values().copied().min()
    }

    /// The objects that are no gang's and are to be deleted now. One that still exists after `again` is deleted again.
    pub(super) fn take_strays(&mut self, now: Instant, again: Duration) -> Vec<ObjectName> {
        let due = self.strays.iter().filter(|(_, due)| **due <= now);
        let mut due: Vec<ObjectName> = due.map(|(name, _)| name.clone()).collect();
        for name in &due {
            self.strays.remove(name);
            self.note_stray(name, after(now, again));
        }
        due.retain(|name| self.strays.contains_key(name));
        due
    }

    #[cfg(test)]
    pub(super) fn named(&self) -> usize {
        self.named.len()
    }
}
