//! The API objects that gangs are judged by: the owners that state their sizes, and what Gang objects show of them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use gantry_api::{Decision, GangStatus, PodUid};
use gantry_gang::protocol::Object;
use gantry_gang::{GangKey, OwnerFacts, OwnerRef};

/// Owners and Gang objects as the watches have shown them.
#[derive(Debug, Default)]
pub(super) struct GangObjects {
    owners: HashMap<OwnerRef, Option<Arc<OwnerFacts>>>,
    /// By namespace and name.
    objects: BTreeMap<(Arc<str>, Arc<str>), Object>,
}

impl GangObjects {
    /// Sets an owner; `None`: there is none of the name. True if it was not known.
    pub(super) fn set_owner(&mut self, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) -> bool {
        self.owners.insert(owner.clone(), facts).is_none()
    }

    /// The owners.
    pub(super) fn owners(&self) -> impl Iterator<Item = (&OwnerRef, &Option<Arc<OwnerFacts>>)> {
        self.owners.iter()
    }

    /// Forgets the owners that are not `read`.
    pub(super) fn retain_owners(&mut self, read: &HashSet<OwnerRef>) {
        self.owners.retain(|owner, _| read.contains(owner));
    }

    /// Sets a Gang object. Returns the gang of its decision, if that changed.
    pub(super) fn set(&mut self, namespace: &str, name: &str, object: Object) -> Option<GangKey> {
        let at: (Arc<str>, Arc<str>) = (namespace.into(), name.into());
        let before = self.objects.get(&at).and_then(|before| before.status.decision.as_ref());
        let is_new = object.status.decision.as_ref() != before;
        let decided = is_new.then(|| GangKey::of_status(&at.0, &object.status)).flatten();
        self.objects.insert(at, object);
        decided
    }

    /// Forgets a Gang object.
    pub(super) fn remove(&mut self, namespace: &str, name: &str) {
        self.objects.remove(&(Arc::from(namespace), Arc::from(name)));
    }

    /// The Gang objects, by namespace and name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&(Arc<str>, Arc<str>), &Object)> {
        self.objects.iter()
    }

    /// The namespaces and names of the Gang objects that a list does not name.
    pub(super) fn missing_from(&self, listed: &HashSet<Arc<str>>) -> Vec<(Arc<str>, Arc<str>)> {
        let objects = self.objects.keys();
        let missing = objects.filter(|(namespace, name)| !listed.contains(&*format!("{namespace}/{name}")));
        missing.cloned().collect()
    }

    /// The state of a gang that the extender has written.
    pub(super) fn status_of(&self, key: &GangKey) -> Option<&GangStatus> {
        let status = self.status_of_name(key)?;
        (GangKey::of_status(&key.namespace, status).as_ref() == Some(key)).then_some(status)
    }

    /// Whether the object of a gang names a pod as a member that is bound: in its decision, or as one without a reservation.
    pub(super) fn names_member(&self, key: &GangKey, uid: &PodUid) -> bool {
        let Some(status) = self.status_of_name(key) else {
            return false;
        };
        let mut named = status.decision.iter().flat_map(Decision::pods).chain(&status.unreserved);
        named.any(|named| named == uid)
    }

    /// The status of the object with the name of a gang's.
    fn status_of_name(&self, key: &GangKey) -> Option<&GangStatus> {
        let name = (Arc::clone(&key.namespace), Arc::from(key.object_name()));
        self.objects.get(&name).map(|object| &object.status)
    }
}
