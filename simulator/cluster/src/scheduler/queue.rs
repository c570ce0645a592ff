//! The waiting pods, in kube-scheduler's three queues: active, unschedulable until an event, and backing off after an
//! error, with its rules for which event activates which pod.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Waiting pods by UID.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: BTreeMap<String, Entry>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    /// First in, first out.
    order: u64,
    errors: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// Taken out for an attempt; an activation meanwhile is kept.
    InAttempt {
        activated: bool,
    },
    Unschedulable,
    BackingOff(Instant),
}

impl Queue {
    /// Adds a pod that is new.
    pub(super) fn add(&mut self, uid: &str) {
        if !self.entries.contains_key(uid) {
            self.next += 1;
            let entry = Entry { order: self.next, errors: 0, state: State::Ready };
            self.entries.insert(uid.to_owned(), entry);
        }
    }

    /// Forgets a pod: bound elsewhere, deleted, gated.
    pub(super) fn remove(&mut self, uid: &str) {
        self.entries.remove(uid);
    }

    /// Something changed that may make this pod fit.
    pub(super) fn activate(&mut self, uid: &str) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.activate();
        }
    }

    /// Something changed that may make any pod fit.
    pub(super) fn activate_all(&mut self) {
        self.entries.values_mut().for_each(Entry::activate);
    }

    /// Whether there is a pod to try.
    pub(super) fn has_due(&self, now: Instant) -> bool {
        self.entries.values().any(|entry| entry.due(now))
    }

    /// The next pod to try.
    pub(super) fn pop(&mut self, now: Instant) -> Option<String> {
        let due = self.entries.iter_mut().filter(|(_, entry)| entry.due(now));
        let (uid, entry) = due.min_by_key(|(_, entry)| entry.order)?;
        entry.state = State::InAttempt { activated: false };
        Some(uid.clone())
    }

    /// The try found no node.
    pub(super) fn mark_unschedulable(&mut self, uid: &str) {
        if let Some(entry) = self.entries.get_mut(uid) {
            let activated = entry.state == State::InAttempt { activated: true };
            entry.state = if activated { State::Ready } else { State::Unschedulable };
        }
    }

    /// The try, or its bind, ended in an error: the pod is tried again later, whatever happens.
    pub(super) fn back_off(&mut self, uid: &str, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            let wait = FIRST_BACKOFF * 2_u32.saturating_pow(entry.errors.min(8));
            entry.errors += 1;
            entry.state = State::BackingOff(now + wait.min(LONGEST_BACKOFF));
        }
    }

    /// When the next back-off ends.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let ends = self.entries.values().filter_map(|entry| match entry.state {
            State::BackingOff(until) => Some(until),
            _ => None,
        });
        ends.min()
    }
}

impl Entry {
    fn due(&self, now: Instant) -> bool {
        match self.state {
            State::Ready => true,
            State::BackingOff(until) => until <= now,
            State::Unschedulable | State::InAttempt { .. } => false,
        }
    }

    fn activate(&mut self) {
        match &mut self.state {
            State::Unschedulable => self.state = State::Ready,
            State::InAttempt { activated } => *activated = true,
            // No event shortens a back-off.
            State::Ready | State::BackingOff(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unschedulable_pod_waits_for_event_backoff_for_time() {
        let mut queue = Queue::default();
        let now = Instant::now();
        queue.add("a");
        queue.add("b");
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
        assert_eq!(queue.pop(now).as_deref(), Some("b"));
        queue.mark_unschedulable("a");
        queue.back_off("b", now);
        assert_eq!(queue.pop(now), None);
        queue.activate_all();
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
        assert_eq!(queue.pop(now), None, "no event shortens a back-off");
        assert_eq!(queue.pop(now + FIRST_BACKOFF).as_deref(), Some("b"));
        queue.back_off("b", now);
        assert_eq!(queue.next_due(), Some(now + 2 * FIRST_BACKOFF));
    }

    #[test]
    fn activation_during_an_attempt_is_kept() {
        let mut queue = Queue::default();
        let now = Instant::now();
        queue.add("a");
        queue.pop(now);
        queue.activate("a");
        queue.mark_unschedulable("a");
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
    }
}
