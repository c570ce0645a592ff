//! Members of a gang wait for one another in bind: kube-scheduler has assumed each of them by then and goes on with others. Until the gang
//! is decided a member can leave by hanging up; after that it is bound whether its caller still listens or not.

use std::sync::Arc;
use std::time::Duration;

use gantry_gang::GangKey;
use gantry_gang::protocol::BindEnd;
use tokio::time::Instant;

use super::{Binder, Failure, Undecided};
use crate::index::{Admitted, Awaited, Outcome, Reserved, Store, Target};

/// Bindings of members on their way at once: enough to hide the API server's latency, too few to be a flood.
pub(super) const POSTS: usize = 64;
/// What part of a bind's time limit is kept for the Binding itself, when a member has waited for the others.
const KEPT: u32 = 3;
/// A member that waits asks again after so long, whether its gang notified it or not.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Between the first try of a Binding that was not answered, or put off, and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_millis(200);

impl Binder {
    /// How long a member waits for the others.
    pub(super) fn patience(&self) -> Duration {
        self.timeout - self.timeout / KEPT
    }

    /// Waits for the rest of a gang; what a member is to do then.
    pub(super) async fn wait(
        &self,
        target: &Target,
        gang: &Arc<GangKey>,
        deadline: Instant,
    ) -> Result<Admitted, Failure> {
        // If kube-scheduler hangs up, this future is dropped: then the member is not there any more.
        let waiting = Waiting {
            store: &self.store,
            target,
            hangs_up: true,
        };
        let notifier = self.store.notifier(gang);
        let admitted = loop {
            let notified = notifier.notified();
            let mut notified = std::pin::pin!(notified);
            // Rung from here on it is heard, also before it is waited for.
            notified.as_mut().enable();
            let awaited = match self.store.update(|index| index.admit(target, None))? {
                Admitted::Wait(awaited) => awaited,
                admitted => break admitted,
            };
            let now = Instant::now();
            if now >= deadline {
                self.store.update(|index| index.gave_up(&target.uid));
                waiting.ends();
                return Err(self.alone(awaited));
            }
            let until = deadline.min(now + ASK_AGAIN);
            // Rung or not, it asks again.
            let _ = tokio::time::timeout_at(until, notified).await;
        };
        waiting.ends();
        Ok(admitted)
    }

    pub(super) fn alone(&self, awaited: Awaited) -> Failure {
        let Awaited { gang, why } = awaited;
        if let Some(why) = why {
            let gang = gang.to_string();
            return Failure::Kept { gang, why };
        }
        if let Some(text) = self.store.read(|index| index.deciding(&gang)) {
            return Failure::Undecided(text);
        }
        Failure::Alone {
            gang: gang.to_string(),
            // To the nearest.
            seconds: (self.patience() + Duration::from_millis(500)).as_secs(),
        }
    }

    /// Binds a member of a gang that is decided. The Binding is written by a task of its own: whoever hangs up now cannot stop it.
    /// It goes on after `deadline`, when the caller has to be told something.
    pub(super) async fn bind_member(
        &self,
        target: &Target,
        reserved: Reserved,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let (binder, own) = (self.clone(), target.clone());
        let task = tokio::spawn(async move { binder.carry_out(&own, reserved).await });
        match tokio::time::timeout_at(deadline, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(Failure::Unanswered(error.to_string())),
            Err(_) => Err(Failure::Unanswered("no answer in time".to_owned())),
        }
    }

    async fn carry_out(&self, target: &Target, reserved: Reserved) -> Result<(), Failure> {
        let Reserved::Grant { plan, annotation } = reserved else {
            // It is there already. A member has a place of devices, so nothing else is possible.
            return Ok(());
        };
        let deadline = Instant::now() + self.timeout;
        let mut undecided = Ended {
            undecided: Undecided {
                store: &self.store,
                target,
                granted: true,
                outcome: Outcome::Unsure,
            },
            end: BindEnd::Unsure,
        };
        let tries = async {
            let mut pause = AGAIN;
            let mut unanswered = false;
            loop {
                // The semaphore is never closed.
                let permit = self.posts.acquire().await;
                let result = self.write(target, Some(&plan), Some(&annotation), deadline).await;
                drop(permit);
                unanswered |= matches!(result, Err(Failure::Unanswered(_)));
                match result {
                    Err(Failure::Unanswered(_) | Failure::Busy(_)) if Instant::now() + pause < deadline => {
                        tokio::time::sleep(pause).await;
                        pause *= 2;
                        // What was sent cannot be called back; it is not sent again for devices that kubelet has given to another since.
                        if let Err(error) = self.store.update(|index| index.may_repeat(target)) {
                            let why = error.to_string();
                            break Err(if unanswered {
                                Failure::Unanswered(why)
                            } else {
                                Failure::Busy(why)
                            });
                        }
                    }
                    // What was sent before may still be done.
                    Err(Failure::Busy(why)) if unanswered => break Err(Failure::Unanswered(why)),
                    result => break result,
                }
            }
        };
        // Who leads next finishes what is decided, and may give this place to another if its node is lost: nothing is sent any more then.
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
        (undecided.undecided.outcome, undecided.end) = match &result {
            Ok(()) => (Outcome::Bound, BindEnd::Bound),
            Err(Failure::Unanswered(_)) => (Outcome::Unsure, BindEnd::Unsure),
            Err(Failure::Gone(_)) => (Outcome::Failed, BindEnd::Gone),
            // The pod itself will show where it is.
            Err(Failure::BoundByOther(_)) => (Outcome::Failed, BindEnd::Unsure),
            Err(_) => (Outcome::Failed, BindEnd::Failed),
        };
        result
    }
}

/// A member that waits. Dropped before it [ends](Self::ends), its caller has hung up: it is not there any more.
struct Waiting<'a> {
    store: &'a Store,
    target: &'a Target,
    hangs_up: bool,
}

impl Waiting<'_> {
    /// It waits no longer, and its gang knows why.
    fn ends(mut self) {
        self.hangs_up = false;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.hangs_up {
            self.store.update(|index| index.withdraw(&self.target.uid));
        }
    }
}

/// Tells the gang how a member's bind ended, also when the task is dropped midway.
struct Ended<'a> {
    undecided: Undecided<'a>,
    end: BindEnd,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let uid = &self.undecided.target.uid;
        self.undecided
            .store
            .update(|index| index.bind_ended(uid, self.end));
    }
}

#[cfg(test)]
mod tests;
