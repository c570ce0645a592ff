//! Activates members that have a node to go to: those that kube-scheduler holds as unschedulable, and once more those that do not arrive.

use std::time::{Duration, Instant};

use gantry_api::PodUid;

use super::members::{Members, TrackedMember};
use super::types::{Settings, Work};
use super::{Env, after};

/// So long after a pod was refused kube-scheduler holds it as unschedulable for certain.
pub(super) const PARKING: Duration = Duration::from_secs(2);

/// The longest wait before members that do not arrive are activated again.
const MAX_INTERVAL: Duration = Duration::from_secs(300);

/// When members that do not arrive are activated once more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Activation {
    /// When, and how long after that again.
    next: Option<(Instant, Duration)>,
}

/// Activates members. Whether some of them may not be unschedulable yet: of a pod that is just being refused kube-scheduler drops the
/// event.
pub(super) fn activate(env: &mut Env<'_>, members: &mut Members, uids: Vec<PodUid>) -> bool {
    let now = env.now.at;
    let mut early = false;
    for uid in &uids {
        members.change(uid, |member| {
            let refused = member.refused_at().filter(|at| now < after(*at, PARKING));
            member.set_refused(refused);
            early |= refused.is_some();
        });
    }
    if !uids.is_empty() {
        env.work.push(Work::Activate(uids));
    }
    early
}

impl Activation {
    pub(super) fn due(&self) -> Option<Instant> {
        self.next.map(|(at, _)| at)
    }

    pub(super) fn clear(&mut self) {
        self.next = None;
    }

    /// Activates members that have a node to go to now, and once more later if they do not arrive. Members that kube-scheduler has not
    /// refused are in its queue: a write for each would only be a burden.
    pub(super) fn activate(&mut self, env: &mut Env<'_>, members: &mut Members, mut uids: Vec<PodUid>) {
        if uids.is_empty() {
            return;
        }
        let first = env.settings.requeue;
        self.next = Some((after(env.now.at, first), first));
        uids.retain(|uid| {
            let member = members.get(uid);
            member.is_some_and(|member| member.refused_at().is_some() || member.pod().refused)
        });
        if activate(env, members, uids) {
            self.next = Some((after(env.now.at, PARKING), first / 2));
        }
    }

    /// Activates members soon: the next call may offer other nodes.
    pub(super) fn hasten(&mut self, now: Instant, settings: &Settings) {
        let soon = after(now, settings.requeue / 10);
        if self.next.is_none_or(|(at, _)| at > soon) {
            self.next = Some((soon, settings.requeue));
        }
    }

    /// Activates members that have not arrived, if it is time.
    pub(super) fn repeat(&mut self, env: &mut Env<'_>, members: &mut Members) {
        let Some((at, interval)) = self.next else { return };
        if env.now.at < at {
            return;
        }
        let on_the_way = members.on_the_way().iter();
        let late: Vec<&TrackedMember> = on_the_way
            .filter_map(|uid| members.get(uid))
            .filter(|member| !member.has_arrived() && !member.is_pinned())
            .collect();
        if late.is_empty() {
            self.next = None;
            return;
        }
        // A member that was activated and not refused since is in the queue, unless the event was lost or a plugin refused it.
        let lost = interval >= env.settings.requeue;
        let refused: Vec<PodUid> = late
            .into_iter()
            .filter(|member| member.refused_at().is_some() || lost && member.pod().refused)
            .map(|member| member.pod().uid.clone())
            .collect();
        let next = interval.saturating_mul(2).min(MAX_INTERVAL);
        self.next = Some((after(env.now.at, next), next));
        activate(env, members, refused);
    }
}
