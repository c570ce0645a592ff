//! Which schedulers bring their pods here. Pods of any other hold what they hold once they are bound; before, they take part in nothing:
//! nobody would ever ask where they are to go.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::names;

use super::Index;
use crate::pod::PodFacts;

/// Schedulers that count as ours at most: a cluster has a handful.
const MOST: usize = 64;

/// The names of the schedulers that ask this extender, as `spec.schedulerName` has them.
#[derive(Debug)]
pub(super) struct Schedulers(Arc<BTreeSet<Arc<str>>>);

impl Default for Schedulers {
    fn default() -> Self {
        Self(Arc::new([names::DEFAULT_SCHEDULER.into()].into()))
    }
}

impl Schedulers {
    /// Whether a pod that waits will be brought here.
    pub(super) fn bring(&self, pod: &PodFacts) -> bool {
        self.0.contains(&pod.scheduler)
    }

    /// All of them.
    pub(super) fn all(&self) -> Arc<BTreeSet<Arc<str>>> {
        Arc::clone(&self.0)
    }
}

impl Index {
    /// Sets which schedulers ask this extender. Before anything is fed.
    pub fn set_schedulers(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.schedulers = Schedulers(Arc::new(names.into_iter().collect()));
    }

    /// A scheduler has asked about a pod of its own: whatever was said of it, its pods are brought here.
    pub fn scheduler_asks(&mut self, name: &str) {
        let known = &mut self.schedulers.0;
        if known.contains(name) || known.len() >= MOST {
            return;
        }
        Arc::make_mut(known).insert(name.into());
        tracing::warn!(
            scheduler = name,
            "a scheduler asks that --scheduler-name does not name: name it, or after a restart its gangs wait until it asks again"
        );
        self.changed = true;
        let mut pods: Vec<Arc<PodFacts>> = self.pods.values().cloned().collect();
        pods.retain(|pod| *pod.scheduler == *name && pod.node.is_none());
        // In an order of its own: equal facts give equal decisions.
        pods.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
        for pod in pods {
            self.tell_pod(&pod);
            let by_itself = self.goes_by_itself(&pod);
            self.waiting.observe(self.now.at, &pod, by_itself);
        }
    }

    /// The scheduler that is to place a pod, if it waits and that is none that asks this extender.
    pub(super) fn elsewhere(&self, pod: &PodFacts) -> Option<Arc<str>> {
        let waits = pod.node.is_none() && !self.schedulers.bring(pod);
        waits.then(|| Arc::clone(&pod.scheduler))
    }
}
