use std::sync::Arc;

use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tower_test::mock;

use super::*;
use crate::handover::{Handover, SharedHandover};
use crate::inventory::{Diagnoses, Inventory};
use crate::observe::Observations;

fn cluster() -> Cluster {
    let observed = Arc::new(Observations::default());
    let (notes, _) = mpsc::channel(1);
    let handover = Handover::new("node-1".into());
    Cluster {
        node: "node-1".into(),
        kubeconfig: None,
        pod_kubeconfig: None,
        kubelet_config: None,
        sys_root: "/sys".into(),
        mig_layouts: None,
        inventory: Inventory::channel().1,
        offered: Inventory::channel().1,
        handover: Arc::new(SharedHandover::new(handover, Arc::clone(&observed), Some(notes))),
        observed,
        diagnoses: Diagnoses::none(),
    }
}

fn answer(code: u16, body: &Value) -> Response<Body> {
    let body = Body::from(body.to_string().into_bytes());
    Response::builder().status(code).body(body).unwrap()
}

fn version() -> Value {
    json!({
        "major": "1", "minor": "1", "gitVersion": "", "gitCommit": "", "gitTreeState": "", "buildDate": "",
        "goVersion": "", "compiler": "", "platform": "",
    })
}

/// kubelet replaces its certificate. When the API server does not know the old one any more, the file is read again.
#[tokio::test]
async fn outdated_credential_is_read_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubelet.conf");
    let write = |token: &str| {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "c", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
    };
    write("old");
    let status = |code: u16, reason: &str| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        while let Some((_, send)) = api.next_request().await {
            send.send_response(answer(404, &status(404, "NotFound")));
        }
    });
    let cluster = Cluster { pod_kubeconfig: Some(path.clone()), ..cluster() };
    let task = tokio::spawn(run(Client::new(service, "default"), cluster));
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            assert!(stream.read_buf(&mut request).await.unwrap() > 0);
        }
        let request = String::from_utf8(request).unwrap();
        assert!(request.starts_with("GET /api/v1/pods?"), "{request}");
        if request.contains("Bearer new") {
            break;
        }
        assert!(request.contains("Bearer old"), "{request}");
        write("new");
        let body = status(401, "Unauthorized").to_string();
        let length = body.len();
        let head = format!("HTTP/1.1 401 Unauthorized\r\nconnection: close\r\ncontent-length: {length}");
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    }
    task.abort();
}

#[tokio::test]
async fn failing_lists_are_retried_rarely_and_show_no_api_server() {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let cluster = cluster();
    let observed = Arc::clone(&cluster.observed);
    let task = tokio::spawn(run(Client::new(service, "default"), cluster));
    let failure =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": 500});
    let mut lists = Vec::new();
    while lists.len() < 5 {
        let (request, send) = api.next_request().await.unwrap();
        send.send_response(match request.uri().path() {
            "/api/v1/pods" => {
                let reachable = observed.readiness().cluster;
                assert_eq!(reachable, (!lists.is_empty()).then_some(false));
                lists.push(Instant::now());
                answer(500, &failure)
            }
            "/version" => answer(200, &version()),
            _ => answer(
                404,
                &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}),
            ),
        });
    }
    for (lists, pause) in lists.windows(2).zip([100, 200, 400, 800]) {
        assert!(lists[1] - lists[0] >= Duration::from_millis(pause));
    }
    // A list shows that the API server is reachable.
    let mut readiness = observed.changes();
    let answers = async {
        loop {
            let (request, send) = api.next_request().await.unwrap();
            let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []});
            let lists = request.uri().path() == "/api/v1/pods";
            send.send_response(answer(200, &if lists { list } else { version() }));
        }
    };
    tokio::select! {
        () = answers => {}
        reported = readiness.wait_for(|now| now.cluster == Some(true)) => drop(reported.unwrap()),
    }
    task.abort();
}

#[tokio::test]
async fn missing_right_to_list_pods_is_reported_as_such() {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let cluster = cluster();
    let mut readiness = cluster.observed.changes();
    let task = tokio::spawn(run(Client::new(service, "default"), cluster));
    let why = "pods is forbidden: User \"p\" cannot list resource \"pods\"";
    let answers = async {
        loop {
            let (request, send) = api.next_request().await.unwrap();
            let (code, reason) = match request.uri().path() {
                "/api/v1/pods" => (403, "Forbidden"),
                _ => (404, "NotFound"),
            };
            let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": why, "reason": reason, "code": code});
            send.send_response(answer(code, &body));
        }
    };
    tokio::select! {
        () = answers => {}
        reported = readiness.wait_for(|now| now.cluster.is_some()) => {
            assert_eq!(reported.unwrap().pods_refused.as_deref(), Some(why));
        }
    }
    task.abort();
}

#[tokio::test]
async fn api_server_that_forbids_its_version_is_reachable() {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    let task = tokio::spawn(run(Client::new(service, "default"), cluster()));
    let status = |code: u16, reason: &str| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
    let mut lists = 0;
    while lists < 2 {
        let (request, send) = api.next_request().await.unwrap();
        send.send_response(match request.uri().path() {
            "/api/v1/pods" => {
                lists += 1;
                answer(500, &status(500, "InternalError"))
            }
            "/version" => answer(403, &status(403, "Forbidden")),
            _ => answer(404, &status(404, "NotFound")),
        });
    }
    task.abort();
}

fn read(pod: &str) -> Option<ObservedPod> {
    observed_pod(serde_json::from_str(pod).unwrap(), &"node-1".into())
}

#[test]
fn requests_are_in_kubelets_order() {
    let pod = read(
        r#"{"apiVersion": "v1", "kind": "Pod",
            "metadata": {"uid": "u", "name": "n", "namespace": "d", "resourceVersion": "77",
                         "creationTimestamp": "2026-01-01T00:00:10Z", "annotations": {"gantry.dev/grant": "g"}},
            "spec": {"containers": [{"name": "app", "resources": {"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}}],
                     "initContainers": [{"name": "init", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                                        {"name": "plain"}]},
            "status": {"phase": "Pending"}}"#,
    )
    .unwrap();
    let requests: Vec<(&str, usize)> =
        pod.requests.iter().map(|ask| (ask.container.as_str(), ask.count)).collect();
    assert_eq!(requests, [("init", 1), ("app", 2)]);
    assert_eq!((pod.revision, pod.created, pod.started), (77, 1_767_225_610, false));
    assert_eq!(pod.grant.as_deref(), Some("g"));
}

/// The API server normalises what users write, and still sends a large count with a suffix.
#[test]
fn limit_with_suffix_is_read_as_a_count() {
    for (limit, count) in [("2k", 2000), ("1Ki", 1024), ("2000m", 2), ("3", 3)] {
        let pod = json!({
            "metadata": {"uid": "u"},
            "spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": limit}}}]},
        });
        let counts: Vec<usize> =
            read(&pod.to_string()).unwrap().requests.iter().map(|ask| ask.count).collect();
        assert_eq!(counts, [count], "{limit}");
    }
}

#[test]
fn time_after_the_year_9999_is_accepted() {
    let late = "9999-12-31T23:59:59Z";
    assert!(late.parse::<jiff::Timestamp>().is_err());
    let pod: NodePod = serde_json::from_value(serde_json::json!({
        "metadata": {
            "uid": "u",
            "resourceVersion": "77",
            "creationTimestamp": late,
            "deletionTimestamp": late,
            "managedFields": [{"manager": "somebody", "operation": "Update", "time": late}],
        },
        "spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
    }))
    .unwrap();
    assert!(pod.metadata.deletion_timestamp.is_some());
    let seen = observed_pod(pod, &"node-1".into()).unwrap();
    assert_eq!((seen.revision, seen.created), (77, 0));
}

#[test]
fn pod_without_requests_is_not_kept() {
    assert!(read(r#"{"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "a"}]}}"#).is_none());
}

#[test]
fn start_time_means_admitted() {
    let pod = read(
        r#"{"metadata": {"uid": "u"},
            "spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
            "status": {"startTime": "2026-01-01T00:00:10Z"}}"#,
    );
    assert!(pod.unwrap().started);
}
