//! Watches PodDisruptionBudgets, so that preemption respects them. Updates the index; decides nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use super::listed::{Change, LogTexts, follow};
use crate::index::{Disruptions, PartialBudget, Store};
use crate::object_memory::Kind;

/// Watches until `shutdown`. While the budgets cannot be listed, no pod is preempted.
pub async fn run(client: Client, store: Arc<Store>, shutdown: CancellationToken) {
    store.update(|index| index.budgets_seen(None));
    let words = LogTexts {
        what: "disruption budgets",
        without: "no pod is preempted; manifests/extender-preempt.yaml gives that right",
    };
    let mut known = BTreeMap::new();
    let apply = |change| {
        match change {
            Change::All(budgets) => known = budgets.into_iter().collect(),
            Change::Is(key, budget) => drop(known.insert(key, budget)),
            Change::Gone(key) => drop(known.remove(&key)),
        }
        let budgets = known.values().cloned().collect();
        store.update(|index| index.budgets_seen(Some(budgets)));
    };
    let budgets = Api::<PartialBudget>::all(client);
    let read = |budget: &PartialBudget| Some(Disruptions::read(budget));
    // What one that is not kept protects is not known: every pod of its namespace.
    let refused = |namespace: &str| {
        let namespace: Arc<str> = namespace.into();
        let all = Disruptions {
            namespace: Arc::clone(&namespace),
            name: "".into(),
            selector: Some(Vec::new()),
            allowed: 0,
        };
        Some(((namespace, "".into()), all))
    };
    let memory = Arc::clone(store.memory());
    follow(budgets, (Kind::Budget, &memory), words, read, refused, apply, shutdown).await;
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower_test::mock;

    use super::*;
    use crate::fixtures::Cluster;
    use crate::watch::WATCH_SECONDS;
    use gantry_planner::decide::Options;

    #[tokio::test]
    async fn budget_watch_without_events_ends_before_client_read_timeout() {
        // A watch that sends nothing looks like a broken connection. The API server ends it before the client
        // takes the silence for a fault.
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let cluster = Cluster::new(Options::default());
        let shutdown = CancellationToken::new();
        let running =
            tokio::spawn(run(Client::new(service, "default"), Arc::clone(&cluster.store), shutdown.clone()));
        let list = json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudgetList",
            "metadata": {"resourceVersion": "1"},
            // Any client that may write a budget may write such times. The other budgets are still read.
            "items": [{
                "metadata": {
                    "namespace": "web", "name": "odd",
                    "managedFields": [{"manager": "m", "time": "9999-12-31T23:59:59Z"}],
                },
                "spec": {"selector": {"matchLabels": {"app": "odd"}}},
                "status": {"conditions": [{"lastTransitionTime": "9999-12-31T23:59:59Z"}]},
            }],
        });
        let watching = loop {
            let (request, send) = api.next_request().await.unwrap();
            let query = request.uri().query().unwrap_or_default().to_owned();
            if query.contains("watch=true") {
                break query;
            }
            send.send_response(Response::new(Body::from(list.to_string().into_bytes())));
        };
        assert!(watching.contains(&format!("timeoutSeconds={WATCH_SECONDS}")), "{watching}");
        assert!(cluster.store.read(|index| index.knows_budgets()));
        shutdown.cancel();
        running.await.unwrap();
    }
}
