//! Follows PodDisruptionBudgets, so that nobody is preempted whom one protects. Feeds the index; decides nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::index::{Disruptions, Store};
use crate::watch::{WATCH_SECONDS, chain};

/// Watches until `shutdown`. While the budgets cannot be listed nobody is preempted.
pub async fn run(client: Client, store: Arc<Store>, shutdown: CancellationToken) {
    store.update(|index| index.budgets_seen(None));
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let mut events = watch(Api::<PodDisruptionBudget>::all(client), config)
        .default_backoff()
        .boxed();
    let mut known: BTreeMap<(String, String), Disruptions> = BTreeMap::new();
    let mut listing = BTreeMap::new();
    let mut said = false;
    while let Some(Some(event)) = shutdown.run_until_cancelled(events.next()).await {
        let key = |budget: &PodDisruptionBudget| (budget.namespace().unwrap_or_default(), budget.name_any());
        match event {
            Ok(Event::Init) => {
                listing = BTreeMap::new();
                continue;
            }
            Ok(Event::InitApply(budget)) => {
                listing.insert(key(&budget), Disruptions::read(&budget));
                continue;
            }
            Ok(Event::InitDone) => {
                known = std::mem::take(&mut listing);
                said = false;
            }
            Ok(Event::Apply(budget)) => {
                known.insert(key(&budget), Disruptions::read(&budget));
            }
            Ok(Event::Delete(budget)) => {
                known.remove(&key(&budget));
            }
            Err(error) if is_forbidden(&error) => {
                if !said {
                    tracing::info!(
                        "disruption budgets may not be listed, so nobody is preempted; manifests/extender-preempt.yaml gives that right"
                    );
                }
                said = true;
                continue;
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), "disruption budgets cannot be followed, trying again");
                continue;
            }
        }
        let budgets = known.values().cloned().collect();
        store.update(|index| index.budgets_seen(Some(budgets)));
    }
}

/// Whether the right to list them is missing: that is an operator's choice, and no trouble.
fn is_forbidden(error: &watcher::Error) -> bool {
    let cause = match error {
        watcher::Error::InitialListFailed(cause) | watcher::Error::WatchStartFailed(cause) => cause,
        _ => return false,
    };
    matches!(cause, kube::Error::Api(status) if status.code == 403)
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower_test::mock;

    use super::*;
    use crate::decide::Options;
    use crate::fixtures::Cluster;

    #[tokio::test]
    async fn a_watch_that_has_nothing_to_say_ends_before_its_silence_is_taken_for_a_fault() {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let cluster = Cluster::new(Options::default());
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(run(
            Client::new(service, "default"),
            Arc::clone(&cluster.store),
            shutdown.clone(),
        ));
        let list = json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudgetList",
            "metadata": {"resourceVersion": "1"}, "items": [],
        });
        let watching = loop {
            let (request, send) = api.next_request().await.unwrap();
            let query = request.uri().query().unwrap_or_default().to_owned();
            if query.contains("watch=true") {
                break query;
            }
            send.send_response(Response::new(Body::from(list.to_string().into_bytes())));
        };
        assert!(
            watching.contains(&format!("timeoutSeconds={WATCH_SECONDS}")),
            "{watching}"
        );
        shutdown.cancel();
        running.await.unwrap();
    }
}
