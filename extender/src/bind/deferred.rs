//! Binds members of decided gangs that nobody calls for: kube-scheduler had brought them to their nodes, and they waited as long as they
//! may, before the last of their siblings came. Binds nothing else, and only while this process leads.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Binder, Failure};
use crate::event::Message;
use crate::gang::events::Events;
use crate::index::{Index, Target};
use crate::metrics::Metrics;

/// Between the first bind that was not answered, or put off, and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_secs(1);
/// After this wait there is no further one.
const LONGEST: Duration = Duration::from_secs(16);

/// Binds until `shutdown`. What is under way then is finished, or by whoever leads next.
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
                    tell(&events, &metrics, &target, &result);
                }
            }
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Binds under way, and whom each is for: that is known also of one that panics.
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

/// Binds a member. An API server that does not answer, or not now, is asked again: kube-scheduler would come back by itself, and it does
/// not know of this bind.
async fn bind(binder: &Binder, target: &Target) -> Result<(), Failure> {
    let mut pause = AGAIN;
    loop {
        match binder.bind(target).await {
            Err(Failure::Unanswered(_) | Failure::Busy(_)) if pause <= LONGEST => {
                tokio::time::sleep(pause).await;
            }
            ended => return ended,
        }
        pause *= 2;
    }
}

/// kube-scheduler knows nothing of it, so that the Event that it writes for every pod is missing.
fn tell(events: &Events, metrics: &Metrics, target: &Target, result: &Result<(), Failure>) {
    metrics.bind_ended(result);
    let Target {
        uid,
        namespace,
        name,
        node,
    } = target;
    match result {
        Ok(()) => {
            let message = Message {
                reason: "Scheduled",
                warning: false,
                note: format!("Successfully assigned {namespace}/{name} to {node}, with its gang"),
            };
            events.pod(&namespace.as_str().into(), &name.as_str().into(), uid, message);
        }
        Err(error) => {
            tracing::warn!(pod = %name, %namespace, %node, %error, "bind failed; kube-scheduler is to bring the pod again");
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
        let (whom, result) = binds.next().await.unwrap();
        assert_eq!(whom, target("a", "n"));
        assert!(matches!(result, Err(Failure::Unanswered(_))));
        binds.spawn(target("b", "n"), async { Ok(()) });
        let (whom, result) = binds.next().await.unwrap();
        assert!(whom == target("b", "n") && result.is_ok());
        assert!(binds.next().await.is_none());
    }
}
