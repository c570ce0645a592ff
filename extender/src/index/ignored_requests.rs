//! Annotations that request something of a pod's devices and have no effect: on a pod without devices, on a member of a
//! gang, or changed while the pod is bound. One notice per pod and text waits here until it is published as an Event. Bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::protocol::Stage;

use crate::pod::{OtherPod, PodFacts};

/// Pods with notices that are known at most. Further pods get none until some of these are gone.
const MOST: usize = 1024;

/// A notice for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IgnoredRequest {
    /// UID of the pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// The annotation, its value, why it has no effect, and what to do.
    pub text: Arc<str>,
}

/// The notices.
#[derive(Debug, Default)]
pub(super) struct IgnoredRequests {
    /// The last text about each pod.
    texts: HashMap<PodUid, Arc<str>>,
    /// Those that are not published.
    due: VecDeque<IgnoredRequest>,
}

impl IgnoredRequests {
    /// Adds a notice about request annotations that were changed while the pod is bound, or without effect on a member of a gang.
    /// `before` is the pod as it was known.
    pub(super) fn note_pod(&mut self, pod: &PodFacts, before: Option<&PodFacts>) {
        let before = before.filter(|before| before.node.is_some() && !pod.terminal);
        let changed = before.and_then(|before| pod.written.changed_while_bound(&before.written));
        let is_waiting_member = pod.membership.is_some() && pod.node.is_none() && !pod.terminal;
        let of_member = || pod.written.of_gang_member().filter(|_| is_waiting_member);
        if let Some(text) = changed.or_else(of_member) {
            self.add(IgnoredRequest {
                uid: pod.uid.clone(),
                namespace: Arc::clone(&pod.namespace),
                name: Arc::clone(&pod.name),
                text: text.into(),
            });
        }
    }

    /// Adds a notice about request annotations of a pod that requests no devices.
    pub(super) fn note_other_pod(&mut self, pod: &OtherPod) {
        let has_ended = matches!(pod.stage, Stage::Succeeded | Stage::Failed);
        match pod.written.without_devices().filter(|_| !has_ended && !pod.leaving) {
            Some(text) => self.add(IgnoredRequest {
                uid: pod.uid.clone(),
                namespace: Arc::clone(&pod.profile.namespace),
                name: Arc::clone(&pod.name),
                text: text.into(),
            }),
            None => self.forget(&pod.uid),
        }
    }

    /// Adds a notice, unless it is the last one about the pod.
    fn add(&mut self, notice: IgnoredRequest) {
        let known = self.texts.get(&notice.uid);
        if known.is_some_and(|known| *known == notice.text) || (known.is_none() && self.texts.len() >= MOST) {
            return;
        }
        self.texts.insert(notice.uid.clone(), Arc::clone(&notice.text));
        self.due.retain(|due| due.uid != notice.uid);
        self.due.push_back(notice);
    }

    /// Adds a notice again that could not be published, if it still holds.
    pub(super) fn retry(&mut self, notice: IgnoredRequest) {
        if self.texts.get(&notice.uid) == Some(&notice.text) {
            self.due.push_back(notice);
        }
    }

    /// The pod is gone, or its annotations have an effect.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        if self.texts.remove(uid).is_some() {
            self.due.retain(|due| due.uid != *uid);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    /// Takes the first notices, in the order in which they came.
    pub(super) fn take(&mut self, most: usize) -> Vec<IgnoredRequest> {
        self.due.drain(..most.min(self.due.len())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(uid: &str, text: &str) -> IgnoredRequest {
        IgnoredRequest { uid: uid.into(), namespace: "ml".into(), name: uid.into(), text: text.into() }
    }

    #[test]
    fn notices_are_published_once_and_bounded() {
        let mut ignored = IgnoredRequests::default();
        ignored.add(notice("a", "one"));
        ignored.add(notice("a", "one"));
        assert_eq!(ignored.take(8), [notice("a", "one")]);
        ignored.add(notice("a", "one"));
        assert!(ignored.is_empty(), "it is published");
        ignored.add(notice("a", "two"));
        ignored.add(notice("a", "three"));
        assert_eq!(ignored.take(8), [notice("a", "three")]);
        ignored.retry(notice("a", "two"));
        assert!(ignored.is_empty(), "it does not hold any more");
        ignored.retry(notice("a", "three"));
        ignored.forget(&"a".into());
        assert!(ignored.is_empty());
        for number in 0..2 * MOST {
            ignored.add(notice(&number.to_string(), "x"));
        }
        assert_eq!(ignored.take(usize::MAX).len(), MOST);
    }
}
