//! Binds members of decided gangs without a call of kube-scheduler: it had called for them, but their wait timed out
//! before the last member arrived. Binds nothing else, and only while this process leads.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::Reason;
use gantry_runtime::Backoff;
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Binder, Failure};
use crate::event;
use crate::gang::events::Events;
use crate::index::{Index, Target};
use crate::metrics::Metrics;

/// Pauses after binds that were not answered or were postponed.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(16));
/// Retries of one bind.
const RETRIES: u32 = 5;

/// Binds until `shutdown`. Binds in progress are then finished here or by the next leader.
pub(crate) async fn run(binder: Binder, events: Events, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut binds = Binds::default();
    let work = async {
        loop {
            tokio::select! {
                () = binder.store.deferred() => {
                    for target in binder.store.update(Index::take_deferred) {
                        let (binder, to_bind) = (binder.clone(), target.clone());
                        binds.spawn(target, async move { bind(&binder, &to_bind).await });
                    }
                }
                Some((target, result)) = binds.next() => {
                    if result.is_err() {
                        binder.store.update(|index| index.bring_again(&target.uid));
                    }
                    report(&events, &metrics, &target, &result);
                }
            }
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Binds in progress by task, so that the target is known also when a task panics.
#[derive(Default)]
struct Binds {
    tasks: JoinSet<Result<(), Failure>>,
    targets: HashMap<Id, Target>,
}

impl Binds {
    fn spawn(&mut self, target: Target, bind: impl Future<Output = Result<(), Failure>> + Send + 'static) {
        self.targets.insert(self.tasks.spawn(bind).id(), target);
    }

    /// The next one that ends, and how; `None` if there is none.
    async fn next(&mut self) -> Option<(Target, Result<(), Failure>)> {
        let (id, result) = match self.tasks.join_next_with_id().await? {
            Ok((id, result)) => (id, result),
            Err(error) => (error.id(), Err(Failure::Unanswered(error.to_string()))),
        };
        let target = self.targets.remove(&id)?;
        Some((target, result))
    }
}

/// Binds a member. Where the API server does not answer or postpones, it is tried again: kube-scheduler does not know
/// of this bind and would not retry it.
async fn bind(binder: &Binder, target: &Target) -> Result<(), Failure> {
    let mut backoff = RETRY;
    loop {
        match binder.bind(target).await {
            Err(Failure::Unanswered(_) | Failure::Busy(_)) if backoff.failures() < RETRIES => {
                tokio::time::sleep(backoff.fail()).await;
            }
            ended => return ended,
        }
    }
}

/// Counts a bind, and writes the Event that kube-scheduler would write for a bind of its own.
fn report(events: &Events, metrics: &Metrics, target: &Target, result: &Result<(), Failure>) {
    metrics.bind_ended(result);
    let Target { uid, namespace, name, node } = target;
    match result {
        Ok(()) => {
            let message = event::message(
                Reason::Scheduled,
                false,
                format!("Successfully assigned {namespace}/{name} to {node}, with its gang"),
            );
            events.pod(&namespace.as_str().into(), &name.as_str().into(), uid, message);
        }
        Err(error) => {
            tracing::warn!(pod = %name, %namespace, %node, %error, "bind failed; kube-scheduler will schedule the pod again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::target;

    #[tokio::test]
    async fn whom_a_bind_was_for_is_known_also_when_it_panics() {
        let mut binds = Binds::default();
        binds.spawn(target("a", "n"), async { panic!("a bug") });
        let (ended, result) = binds.next().await.unwrap();
        assert_eq!(ended, target("a", "n"));
        assert!(matches!(result, Err(Failure::Unanswered(_))));
        binds.spawn(target("b", "n"), async { Ok(()) });
        let (ended, result) = binds.next().await.unwrap();
        assert!(ended == target("b", "n") && result.is_ok());
        assert!(binds.next().await.is_none());
    }
}
