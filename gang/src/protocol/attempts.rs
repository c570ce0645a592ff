//! The attempts of a gang to get a reservation: what the planner was asked, why it was refused, and when it is asked again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::NodeName;

use super::after;
use super::reasons::{Failure, Refusal};
use super::types::Settings;

/// Attempts since the gang was bound last, or began.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempts {
    /// The capacity in which it was last planned; it is not planned again before that grows.
    considered: Option<u64>,
    /// A plan is requested, and nothing has changed since.
    requested: bool,
    refusal: Option<Refusal>,
    /// No attempt is made before this moment, and why.
    pause: Option<(Instant, Failure)>,
    failed: u32,
    /// Pods were evicted for the reservation that it has, or had last.
    evicted: bool,
    replans: u32,
    /// Nodes without which it is planned.
    excluded: BTreeSet<NodeName>,
    /// How often a planned node was not offered since it was offered last, and when that was counted last.
    misses: BTreeMap<NodeName, (u32, Instant)>,
    /// What kube-scheduler last reported about nodes that it does not offer.
    scheduler_message: Option<Arc<str>>,
    /// Victims of the gang were terminating when the process before ended, which kept their devices for it.
    resumes: bool,
}

impl Attempts {
    pub(super) fn considered(&self) -> Option<u64> {
        self.considered
    }

    pub(super) fn is_requested(&self) -> bool {
        self.requested
    }

    pub(super) fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// Pods were evicted for the reservation that it has, or had last.
    pub(super) fn has_evicted(&self) -> bool {
        self.evicted
    }

    pub(super) fn failed(&self) -> u32 {
        self.failed
    }

    pub(super) fn excluded(&self) -> &BTreeSet<NodeName> {
        &self.excluded
    }

    pub(super) fn resumes(&self) -> bool {
        self.resumes
    }

    /// A planned node was not offered, and is excluded or about to be.
    pub(super) fn has_missed_nodes(&self) -> bool {
        !self.misses.is_empty() || !self.excluded.is_empty()
    }

    pub(super) fn is_paused(&self, now: Instant) -> bool {
        self.pause.as_ref().is_some_and(|(until, _)| now < *until)
    }

    pub(super) fn pause(&self) -> Option<&(Instant, Failure)> {
        self.pause.as_ref()
    }

    /// A plan is requested in this capacity.
    pub(super) fn request(&mut self, capacity: u64) {
        self.considered = Some(capacity);
        self.requested = true;
    }

    /// The planner has answered.
    pub(super) fn answered(&mut self) {
        self.requested = false;
    }

    /// What the planner was asked, or has answered, no longer holds.
    pub(super) fn invalidate(&mut self) {
        self.considered = None;
        self.requested = false;
    }

    /// It is worth another plan, in the same capacity too.
    pub(super) fn reconsider(&mut self) {
        self.considered = None;
    }

    /// The reservation was released: the gang is planned again at once.
    pub(super) fn restart(&mut self) {
        self.invalidate();
        self.refusal = None;
    }

    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.refusal = Some(refusal);
    }

    /// The gang has got a reservation, for which pods were `evicted` or not.
    pub(super) fn succeed(&mut self, evicted: bool) {
        self.evicted = evicted;
        self.refusal = None;
        self.pause = None;
        self.misses.clear();
        self.resumes = false;
    }

    /// Waits before the next attempt, which is made with all nodes again.
    pub(super) fn fail(&mut self, now: Instant, settings: &Settings, why: Failure) {
        self.replans = 0;
        self.excluded.clear();
        self.misses.clear();
        self.considered = None;
        self.back_off(now, settings, why);
    }

    /// The decision is over. Attempts since the gang was bound count on if it `never_bound`.
    pub(super) fn undecide(&mut self, now: Instant, settings: &Settings, never_bound: bool) {
        let before = std::mem::take(self);
        if never_bound {
            self.failed = before.failed;
            if before.evicted {
                self.fail(now, settings, Failure::EvictedInVain);
            }
        }
    }

    /// Waits before the next attempt.
    pub(super) fn back_off(&mut self, now: Instant, settings: &Settings, why: Failure) {
        self.failed = self.failed.saturating_add(1);
        self.pause = Some((after(now, back_off(settings, self.failed)), why));
    }

    /// The next attempt is not made before `until`.
    pub(super) fn extend_pause(&mut self, until: Instant) {
        let (end, _) = self.pause.get_or_insert((until, Failure::Unused));
        *end = until.max(*end);
    }

    pub(super) fn end_pause(&mut self) {
        self.pause = None;
    }

    /// A planned node was not offered, and counts again only after `cycle`. Whether that happened as often as is allowed.
    pub(super) fn miss(
        &mut self,
        node: &NodeName,
        now: Instant,
        cycle: Duration,
        settings: &Settings,
    ) -> bool {
        let (misses, counted) = self.misses.entry(node.clone()).or_insert((0, now));
        if *misses > 0 && now < after(*counted, cycle) {
            return false;
        }
        *misses = misses.saturating_add(1);
        *counted = now;
        let given_up = *misses >= settings.misses;
        if given_up {
            self.misses.remove(node);
        }
        given_up
    }

    /// A planned node was offered.
    pub(super) fn hit(&mut self, node: &NodeName) {
        self.misses.remove(node);
    }

    pub(super) fn forget_misses(&mut self) {
        self.misses.clear();
    }

    pub(super) fn exclude(&mut self, node: &NodeName) {
        self.excluded.insert(node.clone());
    }

    /// One more plan was given up because a node is not offered. Whether those were too many.
    pub(super) fn count_replan(&mut self, settings: &Settings) -> bool {
        self.replans = self.replans.saturating_add(1);
        self.replans > settings.replans
    }

    pub(super) fn set_scheduler_message(&mut self, message: &Arc<str>) {
        if self.scheduler_message.as_ref() != Some(message) {
            self.scheduler_message = Some(Arc::clone(message));
        }
    }

    /// What kube-scheduler last reported about nodes that it does not offer.
    pub(super) fn scheduler_message(&self) -> Option<Arc<str>> {
        self.scheduler_message.clone()
    }

    /// Continues the attempts of a process before that had not decided the gang.
    pub(super) fn resume(&mut self, failed: u32, preempting: bool) {
        self.failed = self.failed.max(failed);
        self.resumes = preempting;
    }

    /// Continues the attempts of a process before that had decided the gang.
    pub(super) fn resume_decided(&mut self, failed: u32) {
        self.pause = None;
        self.failed = failed;
    }
}

/// How long a gang waits after so many failed attempts.
fn back_off(settings: &Settings, failed: u32) -> Duration {
    let doublings = failed.saturating_sub(1).min(20);
    settings.backoff.saturating_mul(1 << doublings).min(settings.backoff_max)
}
