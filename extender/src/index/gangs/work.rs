//! The work that gangs produce, taken by those that do it: members to activate, decisions to write, statuses, evictions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{GangPhase, GangStatus, PodUid};
use gantry_gang::GangKey;
use gantry_gang::protocol::Work;
use indexmap::IndexSet;

/// The work that gangs produce.
#[derive(Debug, Default)]
pub(in crate::index) struct WorkQueue {
    /// Members to be activated, in the order in which they are called: kube-scheduler tries them in that order, and those of one gang belong
    /// together.
    called: IndexSet<PodUid>,
    /// Members to be bound although kube-scheduler does not call for them.
    deferred: Vec<PodUid>,
    work: Vec<Work>,
    statuses: BTreeMap<Arc<GangKey>, GangStatus>,
    moved: BTreeSet<Arc<GangKey>>,
    /// The last phase of each gang that its waiting binds have received.
    announced: BTreeMap<Arc<GangKey>, GangPhase>,
}

impl WorkQueue {
    /// Adds the commands of the state machine, by the part that carries them out. True if Gang objects are to be deleted.
    pub(super) fn add(&mut self, commands: Vec<Work>) -> bool {
        let mut deletes = false;
        for work in commands {
            match work {
                Work::Activate(pods) => self.called.extend(pods),
                Work::Bind(pods) => self.deferred.extend(pods),
                other => {
                    deletes |= matches!(other, Work::DeleteObject { .. });
                    self.work.push(other);
                }
            }
        }
        deletes
    }

    /// Adds statuses that changed.
    pub(super) fn add_statuses(&mut self, statuses: Vec<(Arc<GangKey>, GangStatus)>) {
        for (gang, status) in statuses {
            // A waiting bind checks again only for events that may end its wait: a thousand of them would check a thousand times.
            let known = match status.phase {
                GangPhase::Finished => self.announced.remove(&gang),
                phase => self.announced.insert(Arc::clone(&gang), phase),
            };
            if known != Some(status.phase) {
                self.moved.insert(Arc::clone(&gang));
            }
            self.statuses.insert(gang, status);
        }
    }

    /// Binds that wait for a gang check again.
    pub(super) fn note_moved(&mut self, gangs: impl IntoIterator<Item = Arc<GangKey>>) {
        self.moved.extend(gangs);
    }

    /// A member is to be activated.
    pub(in crate::index) fn call(&mut self, uid: PodUid) {
        self.called.insert(uid);
    }

    /// A pod is gone.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.called.shift_remove(uid);
    }

    /// Forgets all work. It is produced again.
    pub(super) fn restart(&mut self) {
        self.called.clear();
        self.deferred.clear();
        self.work.clear();
        self.statuses.clear();
        self.announced.clear();
    }

    /// Whether there is work, or a status to write.
    pub(in crate::index) fn has_work(&self) -> bool {
        !self.work.is_empty() || !self.statuses.is_empty()
    }

    /// Whether members are to be activated.
    pub(in crate::index) fn has_called(&self) -> bool {
        !self.called.is_empty()
    }

    /// Whether members are to be bound although kube-scheduler does not call for them.
    pub(in crate::index) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Takes the work, without the pods to activate or to bind.
    pub(in crate::index) fn take(&mut self) -> Vec<Work> {
        std::mem::take(&mut self.work)
    }

    /// Takes the statuses that changed, the newest of each gang.
    pub(in crate::index) fn take_statuses(&mut self) -> Vec<(Arc<GangKey>, GangStatus)> {
        std::mem::take(&mut self.statuses).into_iter().collect()
    }

    /// Takes members to activate, at most `limit`, one gang after the other.
    pub(super) fn take_called(&mut self, limit: usize) -> Vec<PodUid> {
        let due = limit.min(self.called.len());
        self.called.drain(..due).collect()
    }

    /// Takes the members to bind although kube-scheduler does not call for them.
    pub(super) fn take_deferred(&mut self) -> Vec<PodUid> {
        std::mem::take(&mut self.deferred)
    }

    /// Takes the gangs that changed: binds that wait for them check again.
    pub(in crate::index) fn take_moved(&mut self) -> Vec<Arc<GangKey>> {
        std::mem::take(&mut self.moved).into_iter().collect()
    }
}
