//! Binds members of decided gangs that nobody calls for: kube-scheduler had brought them to their nodes, and they waited as long as they may, before the last
//! of their siblings came. Binds nothing else, and only while this process leads.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Binder, Failure};
use crate::gang::events::{Events, Tiding};
use crate::index::{Index, Target};
use crate::metrics::Metrics;

/// Between the first bind that was not answered, or put off, and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_secs(1);
/// After this wait there is no further one.
const LONGEST: Duration = Duration::from_secs(16);

/// Binds until `shutdown`. What is under way then is finished, or by whoever leads next.
pub(crate) async fn run(binder: Binder, events: Events, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut binds = JoinSet::new();
    let work = async {
        loop {
            tokio::select! {
                () = binder.store.aside() => {
                    for target in binder.store.update(Index::take_aside) {
                        let binder = binder.clone();
                        binds.spawn(async move {
                            let result = bind(&binder, &target).await;
                            if result.is_err() {
                                binder.store.update(|index| index.bring_again(&target.uid));
                            }
                            (target, result)
                        });
                    }
                }
                Some(ended) = binds.join_next() => {
                    if let Ok((target, result)) = ended {
                        tell(&events, &metrics, &target, &result);
                    }
                }
            }
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Binds a member. An API server that does not answer, or not now, is asked again: kube-scheduler would come back by itself, and it does not know of this bind.
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
            let tiding = Tiding {
                reason: "Scheduled",
                warning: false,
                note: format!("Successfully assigned {namespace}/{name} to {node}, with its gang"),
            };
            events.pod(&namespace.as_str().into(), &name.as_str().into(), uid, tiding);
        }
        Err(error) => {
            tracing::warn!(pod = %name, %namespace, %node, %error, "bind failed; kube-scheduler is to bring the pod again");
        }
    }
}
