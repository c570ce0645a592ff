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

/// A GpuNode without holders and faults.
fn stored() -> Value {
    let machine = (*Inventory::starting().machine).clone();
    let mut found = GpuNode::new("node-1", GpuNodeSpec { machine, kubelet: None });
    found.status = Some(GpuNodeStatus::default());
    serde_json::to_value(found).unwrap()
}

#[tokio::test]
async fn busy_server_is_retried() {
    let (read, failures) = read_from(vec![
        refusal(429, "TooManyRequests"),
        refusal(401, "Unauthorized"),
        refusal(503, "ServiceUnavailable"),
        (200, stored()),
    ])
    .await;
    assert_eq!((read, failures), (Some(PreviousStatus::default()), 3));
}

#[tokio::test(start_paused = true)]
async fn starting_server_without_permissions_is_retried() {
    let forbidden = refusal(403, "Forbidden");
    let (read, failures) = read_from(vec![forbidden.clone(), forbidden, (200, stored())]).await;
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
