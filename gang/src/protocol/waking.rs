//! Has members that have somewhere to go come: wakes those that kube-scheduler has parked, and once more those that do not come. Which
//! place a member has is decided elsewhere.

use std::time::Duration;

use gantry_api::PodUid;

use super::gang::{Env, Gang, State};
use super::members::Kept;
use super::standing::after;
use super::types::Work;

/// So long after a pod was told to wait kube-scheduler has parked it for certain.
pub(super) const BEING_TOLD: Duration = Duration::from_secs(2);

impl Gang {
    /// Wakes members that have somewhere to go now, and once more later if they do not come. Those that kube-scheduler has not refused are
    /// in its queue: a write for each would only be a burden.
    pub(super) fn wake(&mut self, env: &mut Env<'_>, mut uids: Vec<PodUid>) {
        if uids.is_empty() {
            return;
        }
        let first = env.settings.nudge;
        self.nudge = Some((after(env.now.at, first), first));
        uids.retain(|uid| {
            let kept = self.members.get(uid);
            kept.is_some_and(|kept| kept.parked.is_some() || kept.member.refused)
        });
        if self.call(env, uids) {
            self.nudge = Some((after(env.now.at, BEING_TOLD), first / 2));
        }
    }

    /// Has members woken. Whether some of them may not have been parked yet: of a pod that kube-scheduler is just being told to park it
    /// overhears the wake.
    pub(super) fn call(&mut self, env: &mut Env<'_>, uids: Vec<PodUid>) -> bool {
        let mut early = false;
        for uid in &uids {
            self.members.change(uid, |kept| {
                kept.parked = kept.parked.filter(|told| env.now.at < after(*told, BEING_TOLD));
                early |= kept.parked.is_some();
            });
        }
        if !uids.is_empty() {
            env.work.push(Work::Activate(uids));
        }
        early
    }

    pub(super) fn nudge_members(&mut self, env: &mut Env<'_>) {
        let moves = match &self.state {
            State::Planned(planned) => planned.victims.is_empty(),
            State::Decided(_) => true,
            _ => false,
        };
        let Some((at, interval)) = self.nudge else { return };
        if !moves || env.now.at < at {
            return;
        }
        let on_the_way = self
            .members
            .on_the_way()
            .iter()
            .filter_map(|uid| self.members.get(uid));
        let late: Vec<&Kept> = on_the_way
            .filter(|kept| !kept.arrived && !kept.pinned())
            .collect();
        if late.is_empty() {
            self.nudge = None;
            return;
        }
        // One that was woken and not told to wait since is in the queue, unless the wake was lost or somebody else refused it.
        let lost = interval >= env.settings.nudge;
        let parked: Vec<PodUid> = late
            .into_iter()
            .filter(|kept| kept.parked.is_some() || lost && kept.member.refused)
            .map(|kept| kept.member.uid.clone())
            .collect();
        let next = interval.saturating_mul(2).min(Duration::from_secs(300));
        self.nudge = Some((after(env.now.at, next), next));
        self.call(env, parked);
    }

    /// Members that have come and left are bound without being brought again.
    pub(super) fn bind_those_aside(&mut self, env: &mut Env<'_>) -> bool {
        let aside = self.members.call_back(|_| true);
        let any = !aside.is_empty();
        if any {
            env.work.push(Work::Bind(aside));
        }
        any
    }
}
