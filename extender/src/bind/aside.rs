//! Binds members of decided gangs that nobody calls for: kube-scheduler had brought them to their nodes, and they waited as long as they may, before the last
//! of their siblings came. Binds nothing else, and only while this process leads.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Binder, Failure};
use crate::gang::events::{Events, Tiding};
use crate::index::{Index, Target};
use crate::metrics::{Metrics, Outcome};

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
                            let result = binder.bind(&target).await;
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

/// kube-scheduler knows nothing of it, so that the Event that it writes for every pod is missing.
fn tell(events: &Events, metrics: &Metrics, target: &Target, result: &Result<(), Failure>) {
    let outcome = result
        .as_ref()
        .map_or_else(|failure| failure.label(), |()| "bound");
    metrics.binds.get_or_create(&Outcome { outcome }).inc();
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
            tracing::warn!(pod = %name, %namespace, %node, %error, "bind failed; kube-scheduler brings the pod again");
        }
    }
}
