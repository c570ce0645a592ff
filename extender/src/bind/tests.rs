use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock::{self, Handle};

use super::*;
use crate::fixtures::{Cluster, bound, bridged, gpu_node, holder, pod, target, watched};
use gantry_planner::decide::Options;

type Api = Handle<Request<Body>, Response<Body>>;

/// A cluster of one node, a pod that wants two GPUs, and an API server played by hand.
fn setup() -> (Cluster, Binder, Api) {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged()).pod(&pod("a", 2));
    let (service, api) = mock::pair();
    let client = Client::new(service, "default");
    let binder = Binder::new(client, Arc::clone(&cluster.store), watched(), Duration::from_millis(300));
    (cluster, binder, api)
}

/// What one request asked: method, path, body.
async fn asked(api: &mut Api) -> (String, Value, mock::SendResponse<Response<Body>>) {
    let (request, send) = api.next_request().await.unwrap();
    let line = format!("{} {}", request.method(), request.uri().path());
    let body = request.into_body().collect_bytes().await.unwrap();
    (line, serde_json::from_slice(&body).unwrap_or_default(), send)
}

fn answer(code: u16, body: &Value) -> Response<Body> {
    Response::builder()
        .status(StatusCode::from_u16(code).unwrap())
        .body(Body::from(serde_json::to_vec(body).unwrap()))
        .unwrap()
}

fn status(code: u16, message: &str) -> Response<Body> {
    let ok = code < 400;
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "code": code, "message": message,
        "status": if ok { "Success" } else { "Failure" }, "reason": if ok { "" } else { "Conflict" },
    });
    answer(code, &body)
}

/// Binds while `api` plays the API server; what came out and what it was sent first.
async fn play<F>(binder: &Binder, api: Api, script: impl FnOnce(Api) -> F) -> Result<(), String>
where
    F: Future<Output = ()> + Send + 'static,
{
    let server = tokio::spawn(script(api));
    let result = binder.bind(&target("a", "n")).await;
    server.await.unwrap();
    result.map_err(|failure| failure.to_string())
}

#[tokio::test]
async fn the_grant_goes_out_in_the_binding_with_the_uid() {
    let (cluster, binder, api) = setup();
    let result = play(&binder, api, |mut api| async move {
        let (line, body, send) = asked(&mut api).await;
        assert_eq!(line, "POST /api/v1/namespaces/default/pods/a/binding");
        assert_eq!(body["metadata"]["uid"], "a");
        assert_eq!(body["target"], json!({"apiVersion": "v1", "kind": "Node", "name": "n"}));
        let grant = body["metadata"]["annotations"]["gantry.dev/grant"].as_str().unwrap();
        let grant = Grant::parse(grant, &"a".into(), &"n".into()).unwrap();
        let held: Vec<_> = grant.held("nvidia.com/gpu").iter().map(ToString::to_string).collect();
        assert_eq!(held, ["GPU-n-0", "GPU-n-1"]);
        send.send_response(status(201, ""));
    });
    assert_eq!(result.await, Ok(()));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
}

/// Kubelet's Topology Manager chooses NUMA nodes by what is free: the second Binding is not sent before kubelet has
/// admitted the first pod.
#[tokio::test(start_paused = true)]
async fn bindings_of_a_refusing_kubelet_follow_admission() {
    for policy in ["single-numa-node", "none"] {
        let (cluster, binder, mut api) = setup();
        let mut parts = bridged().into_parts();
        for gpu in &mut parts.gpus {
            gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
        }
        let mut node = gpu_node("n", &gantry_topology::Machine::new(parts).unwrap());
        node["spec"]["kubelet"] = json!({"policy": policy});
        cluster.inventory(&node).pod(&pod("b", 1));
        let first = tokio::spawn({
            let binder = binder.clone();
            async move { binder.bind(&target("a", "n")).await.is_ok() }
        });
        asked(&mut api).await.2.send_response(status(201, ""));
        assert!(first.await.unwrap());
        let second = tokio::spawn(async move { binder.bind(&target("b", "n")).await.is_ok() });
        let sent = tokio::time::timeout(Duration::from_millis(150), asked(&mut api)).await;
        let send = match sent {
            Ok((_, _, send)) => {
                assert_eq!(policy, "none", "sent before the first pod was admitted");
                send
            }
            Err(_) => {
                assert_eq!(policy, "single-numa-node", "nothing to wait for");
                node["status"]["holders"] = json!([holder("n", "a", Some("a"), "0,1")]);
                cluster.inventory(&node);
                asked(&mut api).await.2
            }
        };
        send.send_response(status(201, ""));
        assert!(second.await.unwrap());
    }
}

#[tokio::test]
async fn placement_is_published_once_the_binding_exists() {
    let line = "GPUs 0,1: over NVLink, 48 GB/s, the most that 2 GPUs of this machine reach; leaves GPUs 2,3,4,5,6,7 free; splits socket 0,1,2,3";
    for (code, published) in [(201, true), (422, false)] {
        let (_cluster, binder, api) = setup();
        let (assignments, mut mailbox) = Assignments::new();
        let binder = binder.publishing(assignments);
        let result = play(&binder, api, move |mut api| async move {
            let (_, body, send) = asked(&mut api).await;
            let placement = body["metadata"]["annotations"]["gantry.dev/placement"].as_str().unwrap();
            let placement: Placement = serde_json::from_str(placement).unwrap();
            assert_eq!(placement.devices, [line]);
            send.send_response(status(code, "no"));
        });
        assert_eq!(result.await.is_ok(), published);
        let event = mailbox.next().map(|(target, placement)| placement.on(&target.node));
        assert_eq!(event, published.then(|| format!("n: {line}")));
    }
}

/// A bind that gets 409, and then the pod as it is.
async fn conflict(pod: impl FnOnce(&str) -> Response<Body> + Send + 'static) -> (Result<(), String>, String) {
    let (cluster, binder, api) = setup();
    let result = play(&binder, api, |mut api| async move {
        let (_, body, send) = asked(&mut api).await;
        send.send_response(status(409, "pod a is already assigned to node \"n\""));
        let (line, _, send) = asked(&mut api).await;
        assert_eq!(line, "GET /api/v1/namespaces/default/pods/a");
        let grant = body["metadata"]["annotations"]["gantry.dev/grant"].as_str().unwrap();
        send.send_response(pod(grant));
    });
    (result.await, cluster.free("n"))
}

#[tokio::test]
async fn a_conflict_with_our_own_grant_is_success() {
    let (result, free) = conflict(|grant| {
        let mut own = bound(pod("a", 2), "n", 1, None);
        own["metadata"]["annotations"] = json!({"gantry.dev/grant": grant});
        answer(200, &own)
    })
    .await;
    assert_eq!(result, Ok(()));
    assert_eq!(free, "2,3,4,5,6,7");
}

#[tokio::test]
async fn a_conflict_with_anyone_else_gives_the_devices_back() {
    type Case = (fn() -> Value, &'static str);
    let cases: [Case; 4] = [
        (|| bound(pod("a", 2), "n", 1, Some("4,5")), "pod is bound to node n by another"),
        (|| bound(pod("a", 2), "m", 1, None), "pod is bound to node m by another"),
        (|| pod("a", 2), "the API server refuses the binding: pod a is already assigned to node \"n\""),
        (
            || {
                let mut recreated = pod("a", 2);
                recreated["metadata"]["uid"] = "b".into();
                recreated
            },
            "pod default/a (a) is gone",
        ),
    ];
    for (pod, expected) in cases {
        let (result, free) = conflict(move |_| answer(200, &pod())).await;
        assert_eq!(result, Err(expected.to_owned()));
        assert_eq!(free, "0,1,2,3,4,5,6,7");
    }
}

#[tokio::test]
async fn a_pod_that_is_gone_gives_its_devices_back() {
    let (cluster, binder, api) = setup();
    let result = play(&binder, api, |mut api| async move {
        asked(&mut api).await.2.send_response(status(404, "pods \"a\" not found"));
    });
    assert_eq!(result.await, Err("pod default/a (a) is gone".to_owned()));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[tokio::test]
async fn a_refusal_gives_the_devices_back() {
    for (code, said) in [
        (403, "the API server refuses the binding: no"),
        (422, "the API server refuses the binding: no"),
        (408, "the API server refuses the binding for now: no"),
        (429, "the API server refuses the binding for now: no"),
    ] {
        let (cluster, binder, api) = setup();
        let result = play(&binder, api, move |mut api| async move {
            asked(&mut api).await.2.send_response(status(code, "no"));
        });
        assert_eq!(result.await, Err(said.to_owned()));
        assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
    }
}

#[tokio::test]
async fn a_server_error_is_success_if_the_pod_has_our_grant() {
    let (_, binder, api) = setup();
    let result = play(&binder, api, |mut api| async move {
        let (_, body, send) = asked(&mut api).await;
        send.send_response(status(500, "etcdserver: request timed out"));
        let mut own = bound(pod("a", 2), "n", 1, None);
        own["metadata"]["annotations"] = body["metadata"]["annotations"].clone();
        asked(&mut api).await.2.send_response(answer(200, &own));
    });
    assert_eq!(result.await, Ok(()));
}

#[tokio::test]
async fn server_error_with_unknown_outcome_keeps_the_devices() {
    let (cluster, binder, api) = setup();
    let result = play(&binder, api, |mut api| async move {
        asked(&mut api).await.2.send_response(status(500, "etcdserver: request timed out"));
        asked(&mut api).await.2.send_response(answer(200, &pod("a", 2)));
    });
    assert_eq!(result.await, Err("the API server does not answer: etcdserver: request timed out".to_owned()));
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    // The pod shows up bound elsewhere: now it is known.
    cluster.pod(&bound(pod("a", 2), "m", 1, None));
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[tokio::test]
async fn bind_timeout_is_an_error_and_the_retry_has_the_same_grant() {
    let (cluster, binder, api) = setup();
    let (sent, mut grants) = tokio::sync::mpsc::unbounded_channel();
    let server = tokio::spawn(async move {
        let mut api = api;
        let (_, body, unanswered) = asked(&mut api).await;
        sent.send(body["metadata"]["annotations"].clone()).unwrap();
        let (_, body, send) = asked(&mut api).await;
        sent.send(body["metadata"]["annotations"].clone()).unwrap();
        send.send_response(status(201, ""));
        drop(unanswered);
    });
    let failure = binder.bind(&target("a", "n")).await.unwrap_err();
    assert_eq!(failure.to_string(), "the API server does not answer: no answer in time");
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    binder.bind(&target("a", "n")).await.unwrap();
    assert_eq!(grants.recv().await, grants.recv().await);
    server.await.unwrap();
}

#[tokio::test]
async fn a_caller_that_hangs_up_leaves_the_devices_set_aside() {
    let (cluster, binder, mut api) = setup();
    let bind = tokio::spawn(async move { binder.bind(&target("a", "n")).await });
    let _unanswered = asked(&mut api).await;
    bind.abort();
    assert!(bind.await.unwrap_err().is_cancelled());
    assert_eq!(cluster.free("n"), "2,3,4,5,6,7");
    cluster.wait(70);
    assert_eq!(cluster.free("n"), "0,1,2,3,4,5,6,7");
}

#[tokio::test]
async fn a_pod_the_cache_does_not_have_yet_is_read() {
    let (cluster, binder, api) = setup();
    cluster.gone(&pod("a", 2));
    let result = play(&binder, api, |mut api| async move {
        let (line, _, send) = asked(&mut api).await;
        assert_eq!(line, "GET /api/v1/namespaces/default/pods/a");
        send.send_response(answer(200, &pod("a", 2)));
        let (line, body, send) = asked(&mut api).await;
        assert_eq!(line, "POST /api/v1/namespaces/default/pods/a/binding");
        assert!(body["metadata"]["annotations"]["gantry.dev/grant"].is_string());
        send.send_response(status(201, ""));
    });
    assert_eq!(result.await, Ok(()));
}

#[tokio::test]
async fn a_pod_already_on_the_node_needs_no_second_binding() {
    let (cluster, binder, api) = setup();
    cluster.pod(&bound(pod("a", 2), "n", 1, Some("0,1")));
    drop(api);
    binder.bind(&target("a", "n")).await.unwrap();
}

#[tokio::test]
async fn a_foreign_node_is_bound_without_a_grant() {
    let (cluster, binder, mut api) = setup();
    cluster.node("m", 8);
    let server = tokio::spawn(async move {
        let (_, body, send) = asked(&mut api).await;
        assert_eq!(body["metadata"].get("annotations"), None);
        send.send_response(status(201, ""));
    });
    binder.bind(&target("a", "m")).await.unwrap();
    server.await.unwrap();
}

#[tokio::test]
async fn a_binding_is_carried_out_in_the_time_in_office_or_not_at_all() {
    let (_cluster, binder, mut api) = setup();
    let leadership = Arc::new(Leadership::follower());
    leadership.win("me", tokio::time::Instant::now() + Duration::from_secs(5));
    let binder = binder.led(leadership);
    let server = tokio::spawn(async move {
        let (request, send) = api.next_request().await.unwrap();
        let query = request.uri().query().unwrap_or_default().to_owned();
        send.send_response(status(201, ""));
        query
    });
    binder.bind(&target("a", "n")).await.unwrap();
    let query = server.await.unwrap();
    let limit = query.strip_prefix("timeout=").and_then(|limit| limit.strip_suffix("ms"));
    let limit: u64 = limit.unwrap_or_else(|| panic!("{query:?}")).parse().unwrap();
    assert!((1..=5_000).contains(&limit), "{limit}");
}
