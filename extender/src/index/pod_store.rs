//! The pods that ask for watched resources and have not ended.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use gantry_api::{PodUid, ResourceName};

use crate::pod::PodFacts;

/// The pods that ask for watched resources and have not ended, by UID.
#[derive(Debug, Default)]
pub(super) struct PodStore {
    pods: HashMap<PodUid, Arc<PodFacts>>,
}

impl PodStore {
    pub(super) fn get<Q>(&self, uid: &Q) -> Option<&Arc<PodFacts>>
    where
        PodUid: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.pods.get(uid)
    }

    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    pub(super) fn insert(&mut self, pod: PodFacts) {
        self.pods.insert(pod.uid.clone(), Arc::new(pod));
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
    }

    pub(super) fn len(&self) -> usize {
        self.pods.len()
    }

    /// All pods, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.pods.values()
    }

    /// All pods by UID: equal facts give equal decisions.
    pub(super) fn sorted(&self) -> Vec<Arc<PodFacts>> {
        let mut pods: Vec<Arc<PodFacts>> = self.iter().cloned().collect();
        pods.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
        pods
    }

    /// Sorted UIDs of the pods that a complete list does not name.
    pub(super) fn missing_from(&self, listed: &HashSet<Arc<str>>) -> Vec<PodUid> {
        let missing = self.pods.keys().filter(|uid| !listed.contains(uid.as_str()));
        let mut missing: Vec<PodUid> = missing.cloned().collect();
        missing.sort_unstable();
        missing
    }

    /// The priority of a pod; 0 if it is unknown.
    pub(super) fn priority(&self, uid: &PodUid) -> i32 {
        self.get(uid).map_or(0, |pod| pod.priority)
    }

    /// Whether a pod asks for a resource.
    pub(super) fn ask_for(&self, resource: &ResourceName) -> bool {
        self.iter().any(|pod| pod.devices(resource.as_str()) > 0)
    }

    /// The pod of a name.
    pub(super) fn find(&self, namespace: &str, name: &str) -> Option<&Arc<PodFacts>> {
        self.iter().find(|pod| *pod.namespace == *namespace && *pod.name == *name)
    }

    /// Sorted names of the pods of a namespace.
    pub(super) fn names(&self, namespace: &str) -> Vec<String> {
        let pods = self.iter().filter(|pod| *pod.namespace == *namespace);
        let mut names: Vec<String> = pods.map(|pod| pod.name.to_string()).collect();
        names.sort_unstable();
        names
    }

    /// The first namespace that has a pod of this name.
    pub(super) fn namespace_of(&self, name: &str) -> Option<&Arc<str>> {
        self.iter().filter(|pod| *pod.name == *name).map(|pod| &pod.namespace).min()
    }
}
