use gantry_topology::{Gpu, MachineParts, PathClass, PathMatrix};
use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

#[path = "../../../tests/support/log.rs"]
mod log;

use log::Log;

use super::*;
use crate::handover::{Handover, SharedHandover};
use crate::inventory::Diagnoses;
use crate::observe::Observations;

/// Whether the GpuNode counts as lost if the Node, then it, are read as these.
async fn lost(node: (u16, Value), gpu_node: (u16, Value)) -> Result<bool, kube::Error> {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let answers = async move {
        while let Some((request, send)) = api.next_request().await {
            let uri = request.uri();
            assert_eq!(uri.query(), Some("&resourceVersion=0"), "from memory");
            let (code, answer) = match uri.path() {
                "/api/v1/nodes/node-1" => &node,
                "/apis/gantry.dev/v1alpha1/gpunodes/node-1" => &gpu_node,
                other => panic!("{other}"),
            };
            let body = Body::from(answer.to_string().into_bytes());
            send.send_response(Response::builder().status(*code).body(body).unwrap());
        }
    };
    tokio::spawn(answers);
    let client = Client::new(service, "default");
    is_lost(&Api::all(client.clone()), &Api::all(client), &"node-1".into()).await
}

fn node(uid: &str) -> (u16, Value) {
    let metadata = json!({"name": "node-1", "uid": uid});
    (200, json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata}))
}

fn owned_by(uid: Option<&str>) -> (u16, Value) {
    let (code, mut answer) = node("g");
    let owner = uid.map(|uid| json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": uid}));
    answer["metadata"]["ownerReferences"] = owner.into_iter().collect();
    (code, answer)
}

fn refused(code: u16, reason: &str) -> (u16, Value) {
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
    (code, status)
}

#[tokio::test]
async fn gpunode_missing_or_of_earlier_node_is_lost() {
    let gone = || refused(404, "NotFound");
    let forbidden = || refused(403, "Forbidden");
    for (node, gpu_node, expected) in [
        (node("second"), owned_by(Some("second")), false),
        (node("second"), gone(), true),
        (node("second"), owned_by(Some("first")), true),
        (node("second"), owned_by(None), true),
        // Without a Node no GpuNode is needed.
        (gone(), gone(), false),
        (gone(), owned_by(Some("first")), false),
        (forbidden(), owned_by(None), false),
        (forbidden(), gone(), true),
    ] {
        let case = format!("{node:?} {gpu_node:?}");
        assert_eq!(lost(node, gpu_node).await.unwrap(), expected, "{case}");
    }
    let away = || refused(503, "ServiceUnavailable");
    lost(away(), gone()).await.unwrap_err();
    lost(node("second"), away()).await.unwrap_err();
}

/// A publisher of a node without a driver.
fn publisher(client: Client) -> Publisher {
    let observed = Arc::new(Observations::default());
    let handover = Handover::new("node-1".into());
    let absent = Inventory::absent("no driver");
    let cluster = Cluster {
        node: "node-1".into(),
        kubeconfig: None,
        pod_kubeconfig: None,
        kubelet_config: None,
        sys_root: "/sys".into(),
        mig_layouts: None,
        inventory: tokio::sync::watch::channel(Arc::new(absent)).1,
        offered: Inventory::channel().1,
        handover: Arc::new(SharedHandover::new(handover, Arc::clone(&observed), None)),
        observed,
        diagnoses: Diagnoses::none(),
    };
    Publisher::new(client, cluster, tokio::sync::watch::channel(None).1)
}

/// Publishes a lost object to an API server that returns this for the Node, with a machine published by an earlier run.
/// Returns the requests that the server received.
async fn publish_lost(code: u16, answer: Value) -> (Result<(), kube::Error>, Vec<Value>) {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some((request, send)) = api.next_request().await {
            let (parts, body) = request.into_parts();
            let (code, body) = match (parts.method.as_str(), parts.uri.path()) {
                ("GET", "/api/v1/nodes/node-1") => (code, answer.clone()),
                ("GET", _) => (200, stored()),
                _ => {
                    let body = body.collect_bytes().await.unwrap();
                    let body: Value = serde_json::from_slice(&body).unwrap();
                    sent.send(body.clone()).unwrap();
                    (200, body)
                }
            };
            let body = Body::from(body.to_string().into_bytes());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let mut publisher = publisher(Client::new(service, "default"));
    publisher.forget();
    let published = publisher.publish().await;
    drop(publisher);
    let mut all = Vec::new();
    while let Ok(body) = received.try_recv() {
        all.push(body);
    }
    (published, all)
}

/// The object published by an earlier run.
fn stored() -> Value {
    let machine = Machine::new(MachineParts {
        gpus: vec![Gpu::default()],
        paths: PathMatrix::from_fn(1, |_, _| PathClass::Pix),
        ..MachineParts::default()
    })
    .unwrap();
    serde_json::to_value(GpuNode::new("node-1", GpuNodeSpec { machine, kubelet: None })).unwrap()
}

#[tokio::test]
async fn lost_gpunode_is_written_without_driver_keeping_machine() {
    let (code, answer) = node("second");
    let (published, sent) = publish_lost(code, answer).await;
    published.unwrap();
    assert_eq!(sent[0]["metadata"]["ownerReferences"][0]["uid"], "second");
    assert_eq!(sent[0]["spec"], stored()["spec"]);
}

#[tokio::test]
async fn unreadable_node_blocks_writes_unless_forbidden() {
    for (code, reason) in [(429, "TooManyRequests"), (503, "ServiceUnavailable"), (401, "Unauthorized")] {
        let (code, answer) = refused(code, reason);
        let (published, sent) = publish_lost(code, answer).await;
        published.unwrap_err();
        assert_eq!(sent, Vec::<Value>::new(), "{code}");
    }
    let (code, answer) = refused(403, "Forbidden");
    let (published, sent) = publish_lost(code, answer).await;
    published.unwrap();
    assert_eq!(sent[0]["metadata"].get("ownerReferences"), None);
}

#[tokio::test(start_paused = true)]
async fn unavailable_api_server_is_retried_and_logged_rarely() {
    const REFUSALS: usize = 50;
    let log = Log::default();
    let _here = log.listen();
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let shutdown = CancellationToken::new();
    let enough = shutdown.clone();
    tokio::spawn(async move {
        for _ in 0..REFUSALS {
            let (_, send) = api.next_request().await.unwrap();
            let (code, answer) = refused(503, "ServiceUnavailable");
            let body = Body::from(answer.to_string().into_bytes());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
        enough.cancel();
    });
    let mut publisher = publisher(Client::new(service, "default"));
    publisher.forget();
    publisher.run(shutdown).await;
    let logged = log.of("cannot publish the GpuNode");
    assert!((1..REFUSALS / 5).contains(&logged), "{logged} of {REFUSALS}");
}

/// An API server with the definition of an earlier release refuses the whole status because of one field.
#[tokio::test]
async fn status_is_published_without_fields_of_newer_definition() {
    let log = Log::default();
    let _here = log.listen();
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some((request, send)) = api.next_request().await {
            let body = request.into_body().collect_bytes().await.unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let (code, mut answer) = refused(500, "");
            answer["message"] =
                "failed to create typed patch object (/node-1; gantry.dev/v1alpha1, Kind=GpuNode): \
                errors:\n  .status.evidence: field not declared in schema"
                    .into();
            let is_known = body["status"].get("evidence").is_none();
            let (code, answer) = if is_known { (200, body.clone()) } else { (code, answer) };
            sent.send(is_known).unwrap();
            let body = Body::from(answer.to_string().into_bytes());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let mut publisher = publisher(Client::new(service, "default"));
    let entry = json!({"gpu": "GPU-a", "since": "2026-11-02T10:00:00Z"});
    let status: GpuNodeStatus = serde_json::from_value(json!({"evidence": [entry]})).unwrap();
    for _ in 0..2 {
        publisher.write_status(&status).await.unwrap();
        assert_eq!((received.recv().await, received.recv().await), (Some(false), Some(true)));
    }
    assert_eq!(log.of("apply manifests/crds.yaml"), 1);
}

#[test]
fn check_interval_differs_between_nodes() {
    let mut pauses: Vec<Duration> =
        (0..100).map(|number| between(&format!("node-{number}").as_str().into())).collect();
    pauses.sort_unstable();
    assert!(
        pauses[0] >= CHECK_INTERVAL - CHECK_SPREAD / 2 && pauses[99] <= CHECK_INTERVAL + CHECK_SPREAD / 2
    );
    assert!(pauses[90] - pauses[10] > CHECK_SPREAD / 2);
}
