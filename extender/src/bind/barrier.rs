//! Members of a gang wait for one another in bind: kube-scheduler has assumed each of them and schedules other pods
//! meanwhile. Until the gang is decided, a closed connection withdraws the member; after that it is bound whether the
//! connection is open or not.

use std::sync::Arc;
use std::time::Duration;

use gantry_gang::GangKey;
use gantry_gang::protocol::BindEnd;
use gantry_runtime::Backoff;
use tokio::time::Instant;

use super::{BindGuard, Binder, Failure, GrantAnnotations};
use crate::index::{AwaitedGang, BindGrant, BindStep, Outcome, Store, Target};

/// Bindings of members in flight at once: enough to hide the latency of the API server, too few to overload it.
pub(super) const POSTS: usize = 64;
/// One part in so many of a bind's time limit is left for the Binding itself after a member has waited.
pub(super) const KEPT: u32 = 3;
/// A member that waits checks again after so long, also without a notification.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Pauses after Bindings that were not answered or were postponed.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(60));

impl Binder {
    /// How long a member waits for the remaining members.
    pub(super) fn patience(&self) -> Duration {
        self.timeout - self.timeout / KEPT
    }

    /// Waits for the remaining members of a gang; the next step of the member.
    pub(super) async fn wait(
        &self,
        target: &Target,
        gang: &Arc<GangKey>,
        deadline: Instant,
    ) -> Result<BindStep, Failure> {
        // If kube-scheduler closes the connection, this future is dropped and the member withdrawn.
        let waiting = WaitGuard { store: &self.store, target, withdraws: true };
        let notifier = self.store.notifier(gang);
        let step = loop {
            let notified = notifier.notified();
            let mut notified = std::pin::pin!(notified);
            // From here on a notification counts, also before the await.
            notified.as_mut().enable();
            let awaited = match self.store.bind(target, None)? {
                BindStep::Wait(awaited) => awaited,
                step => break step,
            };
            let now = Instant::now();
            if now >= deadline {
                self.store.update(|index| index.gave_up(&target.uid));
                waiting.ends();
                return Err(self.timed_out(awaited));
            }
            let until = deadline.min(now + ASK_AGAIN);
            // It checks again with or without a notification.
            let _ = tokio::time::timeout_at(until, notified).await;
        };
        waiting.ends();
        Ok(step)
    }

    pub(super) fn timed_out(&self, awaited: AwaitedGang) -> Failure {
        let AwaitedGang { gang, why } = awaited;
        if let Some(why) = why {
            let gang = gang.to_string();
            return Failure::ReservationUnavailable { gang, why };
        }
        if let Some(text) = self.store.read(|index| index.gangs().deciding(&gang)) {
            return Failure::DecisionUnwritten(text);
        }
        Failure::BarrierTimeout {
            gang: gang.to_string(),
            // Rounded.
            seconds: (self.patience() + Duration::from_millis(500)).as_secs(),
        }
    }

    /// Binds a member of a decided gang. A separate task writes the Binding, so that a closed connection does not stop
    /// it. The task goes on after `deadline`, when the caller must get an answer.
    pub(super) async fn bind_member(
        &self,
        target: &Target,
        reserved: BindGrant,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (binder, own) = (self.clone(), target.clone());
        let task = tokio::spawn(async move { binder.write_until_done(&own, reserved).await });
        match tokio::time::timeout_at(deadline, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(Failure::Unanswered(error.to_string())),
            Err(_) => Err(Failure::Unanswered("no answer in time".to_owned())),
        }
    }

    async fn write_until_done(&self, target: &Target, reserved: BindGrant) -> Result<(), Failure> {
        let BindGrant::Grant { plan, annotation, placement } = &reserved else {
            // The pod is on its node already: a member always has a grant otherwise.
            return Ok(());
        };
        let granted = GrantAnnotations { plan, annotation, placement };
        let deadline = Instant::now() + self.timeout;
        let mut guard = BindGuard {
            store: &self.store,
            target,
            granted: true,
            outcome: Outcome::Unsure,
            member: Some(BindEnd::Unsure),
        };
        let tries = async {
            self.wait_for_admissions(target, deadline).await;
            let mut backoff = RETRY;
            let mut unanswered = false;
            loop {
                // The semaphore is never closed.
                let permit = self.posts.acquire().await;
                let result = self.write(target, Some(granted), deadline).await;
                drop(permit);
                let pause = backoff.fail();
                unanswered |= matches!(result, Err(Failure::Unanswered(_)));
                match result {
                    Err(Failure::Unanswered(_) | Failure::Busy(_)) if Instant::now() + pause < deadline => {
                        tokio::time::sleep(pause).await;
                        // A Binding that was sent cannot be recalled. It is not sent again if kubelet gave its devices
                        // to another pod.
                        if let Err(error) = self.store.update(|index| index.may_repeat(target)) {
                            let why = error.to_string();
                            break Err(if unanswered {
                                Failure::Unanswered(why)
                            } else {
                                Failure::Busy(why)
                            });
                        }
                    }
                    // An earlier attempt may still be carried out.
                    Err(Failure::Busy(why)) if unanswered => break Err(Failure::Unanswered(why)),
                    result => break result,
                }
            }
        };
        // The next leader finishes decided gangs, and may assign this reservation to another pod if the node is lost:
        // nothing is sent then.
        let led = match self.leadership.term() {
            Some(term) => tokio::select! {
                result = tries => Some(result),
                () = self.leadership.ended(term) => None,
            },
            None => None,
        };
        let result = led.unwrap_or_else(|| {
            Err(Failure::Unanswered(
                "this extender is no longer the leader; the next one binds the pod".to_owned(),
            ))
        });
        let (outcome, end) = match &result {
            Ok(()) => (Outcome::Bound, BindEnd::Bound),
            Err(Failure::Unanswered(_)) => (Outcome::Unsure, BindEnd::Unsure),
            Err(Failure::Gone(_)) => (Outcome::Failed, BindEnd::Gone),
            // The pod will show its node.
            Err(Failure::BoundByOther(_)) => (Outcome::Failed, BindEnd::Unsure),
            Err(_) => (Outcome::Failed, BindEnd::Failed),
        };
        (guard.outcome, guard.member) = (outcome, Some(end));
        result
    }
}

/// A member that waits. If this is dropped before it [ends](Self::ends), the caller closed the connection and the
/// member is withdrawn.
struct WaitGuard<'a> {
    store: &'a Store,
    target: &'a Target,
    withdraws: bool,
}

impl WaitGuard<'_> {
    /// The wait ended in order.
    fn ends(mut self) {
        self.withdraws = false;
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        if self.withdraws {
            self.store.update(|index| index.withdraw(&self.target.uid));
        }
    }
}

#[cfg(test)]
mod tests;
