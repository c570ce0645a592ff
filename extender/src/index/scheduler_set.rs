//! The schedulers that call this extender. Pods of any other scheduler count only once they are bound: before, no call
//! asks where they can go.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::names;

use crate::pod::PodFacts;

/// Schedulers that count at most: a cluster has a handful.
const MAX_SCHEDULERS: usize = 64;

/// The names of the schedulers that call this extender, as in `spec.schedulerName`.
#[derive(Debug)]
pub(super) struct SchedulerSet(Arc<BTreeSet<Arc<str>>>);

impl Default for SchedulerSet {
    fn default() -> Self {
        Self(Arc::new([names::DEFAULT_SCHEDULER.into()].into()))
    }
}

impl FromIterator<Arc<str>> for SchedulerSet {
    fn from_iter<I: IntoIterator<Item = Arc<str>>>(names: I) -> Self {
        Self(Arc::new(names.into_iter().collect()))
    }
}

impl SchedulerSet {
    pub(super) fn shared(&self) -> Arc<BTreeSet<Arc<str>>> {
        Arc::clone(&self.0)
    }

    /// Records that a scheduler called for a pod of its own. True if it is new.
    pub(super) fn record(&mut self, name: &str) -> bool {
        let is_new = !self.0.contains(name) && self.0.len() < MAX_SCHEDULERS;
        if is_new {
            Arc::make_mut(&mut self.0).insert(name.into());
        }
        is_new
    }

    /// The scheduler of a pod that waits, if that scheduler does not call this extender.
    pub(super) fn other_scheduler_of(&self, pod: &PodFacts) -> Option<Arc<str>> {
        pod.node.is_none().then(|| self.unknown_scheduler_of(pod))?
    }

    /// The scheduler of a pod, if it does not call this extender.
    pub(super) fn unknown_scheduler_of(&self, pod: &PodFacts) -> Option<Arc<str>> {
        (!self.0.contains(&pod.scheduler)).then(|| Arc::clone(&pod.scheduler))
    }
}
