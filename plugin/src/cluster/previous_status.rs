//! Reads the status that an earlier run of this plugin published: its holders and faults must survive a restart. Other
//! modules judge it.

use gantry_api::{GpuFault, GpuNode, Holder, NodeName};
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Duration, Instant};
use tracing::warn;

use super::RETRY;

/// How long a refusal may come from an API server that has just started and does not know the permissions yet.
const STARTUP: Duration = Duration::from_secs(15);

/// State that survives a restart of the plugin.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PreviousStatus {
    pub(super) holders: Vec<Holder>,
    pub(super) faults: Vec<GpuFault>,
}

impl PreviousStatus {
    /// Reads the entries that this version understands: an unknown entry, written by a later version or by hand, must
    /// not hide the others.
    fn of(node: &DynamicObject) -> Self {
        Self {
            holders: entries(&node.data["status"]["holders"], "holder"),
            faults: entries(&node.data["status"]["faults"], "fault"),
        }
    }
}

fn entries<T: DeserializeOwned>(list: &Value, what: &str) -> Vec<T> {
    let entries = list.as_array().into_iter().flatten();
    entries
        .filter_map(|entry| {
            T::deserialize(entry)
                .inspect_err(
                    |error| warn!(%error, %entry, "cannot parse a {what} published by an earlier run; skipping it"),
                )
                .ok()
        })
        .collect()
}

/// `GpuNode`s as untyped objects, so that one written by another version can be read.
pub(super) fn objects(client: Client) -> Api<DynamicObject> {
    Api::all_with(client, &ApiResource::erase::<GpuNode>(&()))
}

/// The last status of this node. Retried until the API server responds; `failed` is called after each failure.
pub(super) async fn read(
    client: &Client,
    node: &NodeName,
    mut failed: impl FnMut(&kube::Error),
) -> Option<PreviousStatus> {
    let api = objects(client.clone());
    let mut backoff = RETRY;
    let mut forbidden_since = None;
    loop {
        match api.get_opt(node.as_str()).await {
            Ok(node) => return node.map(|node| PreviousStatus::of(&node)),
            // A refusal that lasts longer than a start is permanent. Any other failure (too many requests, an unknown
            // token) may pass: to continue without the old status would overwrite it.
            Err(kube::Error::Api(status))
                if status.code == 403
                    && forbidden_since.get_or_insert_with(Instant::now).elapsed() >= STARTUP =>
            {
                warn!(
                    status = status.code,
                    message = status.message,
                    "cannot read the GpuNode of this node; holders and faults of an earlier run are unknown"
                );
                return None;
            }
            Err(error) => {
                failed(&error);
                tokio::time::sleep(backoff.fail()).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gantry_api::{GpuNodeSpec, GpuNodeStatus};
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower_test::mock;

    use super::*;
    use crate::inventory::Inventory;

    /// The result with an API server that responds with these in order, and the number of failures.
    async fn read_from(answers: Vec<(u16, Value)>) -> (Option<PreviousStatus>, usize) {
        let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
        tokio::spawn(async move {
            for (code, answer) in answers {
                let (_, send) = handle.next_request().await.unwrap();
                let body = Body::from(serde_json::to_vec(&answer).unwrap());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
        });
        let mut failures = 0;
        let client = Client::new(service, "default");
        let read = read(&client, &"node-1".into(), |_| failures += 1).await;
        (read, failures)
    }

    fn refusal(code: u16, reason: &str) -> (u16, Value) {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code});
        (code, status)
    }

    #[tokio::test]
    async fn busy_server_is_retried() {
        let machine = (*Inventory::starting().machine).clone();
        let mut found = GpuNode::new("node-1", GpuNodeSpec { machine });
        found.status = Some(GpuNodeStatus::default());
        let found = serde_json::to_value(found).unwrap();
        let (read, failures) = read_from(vec![
            refusal(429, "TooManyRequests"),
            refusal(401, "Unauthorized"),
            refusal(503, "ServiceUnavailable"),
            (200, found),
        ])
        .await;
        assert_eq!((read, failures), (Some(PreviousStatus::default()), 3));
    }

    #[tokio::test(start_paused = true)]
    async fn starting_server_without_permissions_is_retried() {
        let machine = (*Inventory::starting().machine).clone();
        let mut found = GpuNode::new("node-1", GpuNodeSpec { machine });
        found.status = Some(GpuNodeStatus::default());
        let found = serde_json::to_value(found).unwrap();
        let forbidden = refusal(403, "Forbidden");
        let (read, failures) = read_from(vec![forbidden.clone(), forbidden, (200, found)]).await;
        assert_eq!((read, failures), (Some(PreviousStatus::default()), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn lasting_refusal_ends_retries() {
        let begin = Instant::now();
        let (read, failures) = read_from(vec![refusal(403, "Forbidden"); 20]).await;
        assert!(read.is_none() && failures > 1);
        assert!(begin.elapsed() >= STARTUP && begin.elapsed() < 2 * STARTUP);
    }

    #[tokio::test]
    async fn missing_object_is_not_retried() {
        assert_eq!(read_from(vec![refusal(404, "NotFound")]).await, (None, 0));
    }

    #[tokio::test]
    async fn unknown_entries_hide_no_others() {
        let fault = |gpu: &str, xid: Value| json!({"gpu": gpu, "xid": xid, "class": "fatal", "reason": "Xid 79", "since": "2026-01-01T00:00:00Z"});
        let holder = |pod: &str, provenance: &str| json!({"namespace": "ml", "pod": pod, "resource": "nvidia.com/gpu", "devices": ["GPU-a"], "provenance": provenance});
        let node = json!({
            "apiVersion": "gantry.dev/v9",
            "kind": "GpuNode",
            "metadata": {"name": "node-1"},
            "spec": {"machine": "a shape of tomorrow"},
            "status": {
                "summary": 7,
                "faults": [fault("GPU-a", json!("seventy-nine")), fault("GPU-b", json!(79))],
                "holders": [holder("a", "Guessed"), holder("b", "Granted")],
            },
        });
        let (read, failures) = read_from(vec![(200, node)]).await;
        let read = read.unwrap();
        let gpus: Vec<&str> = read.faults.iter().map(|fault| fault.gpu.as_str()).collect();
        let pods: Vec<&str> = read.holders.iter().map(|holder| holder.pod.as_str()).collect();
        assert_eq!((gpus, pods, failures), (vec!["GPU-b"], vec!["b"], 0));
    }
}
