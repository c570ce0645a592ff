//! What is done to pods for gangs, as the real shell does it: gates removed, pods evicted and deleted, each by a write that names the UID
//! and is tried again, later and later, up to a number of tries. Of another term nothing is known any more.

use super::*;

/// Time limit of one try.
pub(super) const TIMEOUT: u64 = 5_000;
/// After a first failed try; each further one waits twice as long.
const AGAIN: u64 = 500;
/// The longest wait between two tries.
const LONGEST: u64 = 10_000;
/// After so many tries it is given up.
const TRIES: u32 = 20;
/// Of a thousand tries so many are refused while things fail.
const REFUSED: u64 = 60;

/// What is done to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// Our scheduling gate is removed.
    Ungate,
    /// It is evicted for a gang.
    Evict(Arc<GangKey>),
    /// It is evicted, for the rest of this gang, its own, had to go.
    EvictRest(Arc<GangKey>),
    /// It is deleted: its gang is started anew.
    Delete,
}

/// One that is not done yet.
#[derive(Debug, Default)]
pub(super) struct Open {
    failed: u32,
    busy: bool,
}

impl World {
    /// The index wants something done to pods.
    pub(super) fn order(&mut self, run: u32, pods: &[PodUid], action: &Action) {
        for uid in pods {
            let uid = uid.to_string();
            if let Some(process) = self.extenders.running.get_mut(&run) {
                process.actions.entry((uid.clone(), action.clone())).or_default();
            }
            let action = action.clone();
            self.soon(0, 2, Event::Action { run, uid, action });
        }
    }

    pub(crate) fn try_deed(&mut self, run: u32, uid: &str, action: &Action) {
        let event = Event::Action { run, uid: uid.to_owned(), action: action.clone() };
        if self.is_paused(run, &event) {
            return;
        }
        let key = (uid.to_owned(), action.clone());
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let address = process.store.read(|index| match action {
            Action::Evict(by) if !index.gangs().waits_for(by, &uid.into()) => None,
            Action::EvictRest(of) if !index.gangs().is_rest_of(of, &uid.into()) => None,
            _ => index.pod_address(&uid.into()),
        });
        let Some(open) = process.actions.get_mut(&key).filter(|open| !open.busy) else {
            return;
        };
        let Some((_, name)) = address else {
            // It is gone, or need not go any more.
            process.actions.remove(&key);
            return;
        };
        open.busy = true;
        let (uid, action) = key;
        self.note(format_args!("{run} {action:?} {uid}"));
        let name = name.to_string();
        self.send(run, What::Action { name, uid, action });
    }

    /// It reaches the API server.
    pub(super) fn perform(&mut self, by: u32, name: &str, uid: &str, action: &Action) -> Status {
        let Some(pod) = self.api.pod(name, uid).cloned() else {
            return Status::Missing;
        };
        if self.is_restless() && self.dice.mille(REFUSED) {
            self.played(Played::DeedRefused);
            self.note(format_args!("{by}'s {action:?} {uid} is refused"));
            // Of a patch that met others too often the API server says that it conflicts.
            let conflicts = *action == Action::Ungate && self.dice.mille(300);
            return if conflicts { Status::Conflict } else { Status::Refused };
        }
        match action {
            Action::Ungate => {
                let status = self.api.remove_gate(name, uid, Gate::Ours);
                if status == Status::Done {
                    self.played(Played::GateLifted);
                    self.check_lifted(&pod);
                }
                status
            }
            Action::Evict(_) | Action::EvictRest(_) if self.is_spared(&pod) => {
                self.played(Played::DeedRefused);
                self.note(format_args!("{by}'s {action:?} {uid} is more than a budget allows"));
                Status::Refused
            }
            Action::Evict(_) | Action::EvictRest(_) => {
                self.note_evicted(&pod);
                self.delete_pod(name, uid, false);
                Status::Done
            }
            Action::Delete => {
                self.played(Played::Restarted);
                self.delete_pod(name, uid, false);
                Status::Done
            }
        }
    }

    pub(super) fn deed_ended(&mut self, run: u32, uid: &str, action: &Action, answer: Option<Answer>) {
        let key = (uid.to_owned(), action.clone());
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let Some(open) = process.actions.get_mut(&key) else {
            return;
        };
        let failed =
            !matches!(answer, Some(Answer::Status(Status::Done | Status::Missing | Status::Conflict)));
        open.failed += 1;
        if !failed || open.failed >= TRIES {
            process.actions.remove(&key);
            return;
        }
        open.busy = false;
        let wait = (AGAIN << (open.failed - 1).min(16)).min(LONGEST);
        let (uid, action) = key;
        self.after(wait, Event::Action { run, uid, action });
    }
}
