//! The work that gangs produce, taken by those that do it: members to activate, decisions to write, statuses, evictions.

use std::sync::Arc;

use gantry_api::{GangPhase, GangStatus, NodeName, PodUid};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Blocker, CommitFailure, GangEvent, Work};

use crate::index::{Index, Target};

/// A member that kube-scheduler should try again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// The node of its reservation, as a hint, if the operator wants that.
    pub nominate: Option<NodeName>,
}

impl Index {
    /// Takes the commands of the state machine and sorts them by the part that carries them out.
    pub(in crate::index) fn collect_gangs(&mut self) {
        self.take_slots();
        for work in std::mem::take(&mut self.gangs.effects.work) {
            match work {
                Work::Activate(pods) => self.gangs.called.extend(pods),
                Work::Bind(pods) => self.gangs.deferred.extend(pods),
                other => {
                    if let Work::DeleteObject { .. } = &other {
                        let core = &self.gangs.core;
                        self.gangs.reclaim.retain(|gang| core.view(gang).is_some());
                        self.gangs.offers.retain(|gang| core.view(gang).is_some());
                    }
                    self.gangs.work.push(other);
                }
            }
        }
        for (gang, status) in self.gangs.core.take_statuses() {
            // A waiting bind checks again only for events that may end its wait: a thousand of them would check a thousand times.
            let known = match status.phase {
                GangPhase::Finished => self.gangs.announced.remove(&gang),
                phase => self.gangs.announced.insert(Arc::clone(&gang), phase),
            };
            if known != Some(status.phase) {
                self.gangs.moved.insert(Arc::clone(&gang));
            }
            self.gangs.statuses.insert(gang, status);
        }
    }

    /// Takes the work, without the pods to activate: [`Index::take_called`] takes those.
    pub fn take_work(&mut self) -> Vec<Work> {
        std::mem::take(&mut self.gangs.work)
    }

    /// Takes the statuses that changed, the newest of each gang.
    pub fn take_statuses(&mut self) -> Vec<(Arc<GangKey>, GangStatus)> {
        std::mem::take(&mut self.gangs.statuses).into_iter().collect()
    }

    /// Whether there is work, or a status to write.
    pub fn has_work(&self) -> bool {
        !self.gangs.work.is_empty() || !self.gangs.statuses.is_empty()
    }

    /// An action on pods of a gang is not allowed, and the remedy; `None`: it succeeded after all.
    pub fn hindered(&mut self, gang: &GangKey, what: Blocker, why: Option<Arc<str>>) {
        self.gangs.handle(self.now, GangEvent::Blocked { gang, blocker: what, why });
    }

    /// Members of a gang run slower than the rest; `None`: no member does.
    pub fn members_slow(&mut self, gang: &GangKey, members: Option<Arc<str>>) {
        self.gangs.handle(self.now, GangEvent::MembersSlow { gang, members });
    }

    /// Whether a blocked action of a gang is known already; true for a gang that has ended.
    pub fn is_hindered(&self, gang: &GangKey, what: Blocker) -> bool {
        self.gangs.core.view(gang).is_none_or(|view| view.is_blocked(what))
    }

    /// The write of a decision has ended.
    pub fn committed(&mut self, gang: &GangKey, decision: &str, result: Result<(), CommitFailure>) {
        self.gangs.handle(self.now, GangEvent::Committed { gang, decision, result });
    }

    /// Takes members to activate, at most `limit`, one gang after the other.
    pub fn take_called(&mut self, limit: usize) -> Vec<(PodUid, Called)> {
        let due = limit.min(self.gangs.called.len());
        let due: Vec<PodUid> = self.gangs.called.drain(..due).collect();
        let called = |uid: PodUid| self.called(&uid).map(|called| (uid, called));
        due.into_iter().filter_map(called).collect()
    }

    /// Takes members of decided gangs to bind although kube-scheduler does not call for them, with the nodes of their reservations.
    pub fn take_deferred(&mut self) -> Vec<Target> {
        let deferred = std::mem::take(&mut self.gangs.deferred);
        let target = |uid: PodUid| {
            let gang = self.gangs.core.gang_of(&uid)?;
            let node = self.place_of(gang, &uid)?;
            let called = self.called(&uid)?;
            Some(Target { namespace: called.namespace.to_string(), name: called.name.to_string(), uid, node })
        };
        deferred.into_iter().filter_map(target).collect()
    }

    /// kube-scheduler should try a member again that was to be bound without it, and is not.
    pub fn bring_again(&mut self, uid: &PodUid) {
        self.gangs.called.insert(uid.clone());
    }

    /// Whether there are such members.
    pub fn has_deferred(&self) -> bool {
        !self.gangs.deferred.is_empty()
    }

    /// Whether members are to be activated.
    pub fn has_called(&self) -> bool {
        !self.gangs.called.is_empty()
    }

    /// How to activate a member; `None` if it is deleted or bound, or belongs to no gang any more.
    pub fn called(&self, uid: &PodUid) -> Option<Called> {
        let gang = self.gangs.core.gang_of(uid)?;
        let pod = self.pods.get(uid).or_else(|| self.heard(uid.as_str()))?;
        if pod.node.is_some() {
            return None;
        }
        let nominate = self.options.nominate.then(|| self.place_of(gang, uid)).flatten();
        Some(Called { namespace: Arc::clone(&pod.namespace), name: Arc::clone(&pod.name), nominate })
    }

    /// Namespace and name of a pod that is known.
    pub fn pod_address(&self, uid: &PodUid) -> Option<(Arc<str>, Arc<str>)> {
        if let Some(pod) = self.pods.get(uid).or_else(|| self.heard(uid.as_str())) {
            return Some((Arc::clone(&pod.namespace), Arc::clone(&pod.name)));
        }
        match self.resources.member(uid) {
            Some(pod) => Some((Arc::clone(&pod.profile.namespace), Arc::clone(&pod.name))),
            None => {
                let preemptible = self.resources.preemptible(uid)?;
                Some((Arc::clone(&preemptible.profile.namespace), Arc::clone(&preemptible.pod.name)))
            }
        }
    }

    /// Whether a gang waits for the end of a pod.
    pub fn waits_for(&self, gang: &GangKey, uid: &PodUid) -> bool {
        let view = self.gangs.core.view(gang);
        view.is_some_and(|view| view.victims().any(|victim| victim == uid))
    }

    /// Whether a gang that restarts still waits for the end of this member.
    pub fn is_rest_of(&self, gang: &GangKey, uid: &PodUid) -> bool {
        let view = self.gangs.core.view(gang);
        view.is_some_and(|view| view.must_leave(uid))
    }

    /// Takes the gangs that changed: binds that wait for them check again.
    pub fn take_moved(&mut self) -> Vec<Arc<GangKey>> {
        std::mem::take(&mut self.gangs.moved).into_iter().collect()
    }
}
