use std::net::SocketAddr;

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tower::ServiceExt as _;

use super::*;
use crate::server::tests::connect_tls;
use crate::tls::tests::Authority;
use crate::tls::{FileOptions, Files};
use crate::watched::WatchedResources;

fn assignment() -> Assignment {
    Assignment { watched: WatchedResources::new([]), scheduler: "gantry".to_owned() }
}

fn creation(resource: &str) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "object": {"spec": {"containers": [{"resources": {"limits": {resource: "1"}}}]}},
        },
    })
}

fn reviews(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics.webhook_reviews.get_or_create(&Outcome { outcome }).get()
}

struct Running {
    address: SocketAddr,
    authority: Authority,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

async fn start() -> Running {
    let authority = Authority::new();
    authority.issue("webhook");
    let files = Files { options: FileOptions::WEBHOOK, client_ca: None, ..authority.files("webhook") };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (metrics, shutdown) = (Arc::new(Metrics::new()), CancellationToken::new());
    let webhook = Webhook {
        assignment: assignment(),
        tls: Arc::new(Tls::load(files).unwrap()),
        metrics: Arc::clone(&metrics),
    };
    let task = tokio::spawn(webhook.run(listener, shutdown.clone()));
    Running { address, authority, metrics, shutdown, task }
}

impl Running {
    /// Posts over HTTP/2, as the API server does, on a new connection without a client certificate.
    async fn post(&self, body: &Value) -> (u16, String) {
        let stream = connect_tls(self.address, &self.authority, None).await;
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::post("https://localhost/mutate?timeout=3s")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }
}

#[tokio::test]
async fn reviews_are_answered_over_tls_and_counted() {
    let server = start().await;
    for (resource, has_patch, outcome) in [("nvidia.com/gpu", true, "assigned"), ("cpu", false, "unchanged")]
    {
        let (status, text) = server.post(&creation(resource)).await;
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["response"]["uid"], "u");
        assert_eq!(answer["response"]["patch"].is_string(), has_patch, "{answer}");
        assert_eq!(reviews(&server.metrics, outcome), 1, "{outcome}");
    }
    let (status, text) = server.post(&json!({"kind": "Pod"})).await;
    assert_eq!(status, 400);
    insta::assert_snapshot!(text, @r#"body is "Pod" of "", expected "AdmissionReview" of "admission.k8s.io/v1": set admissionReviewVersions: [v1]"#);
    assert_eq!(reviews(&server.metrics, "malformed"), 1);
}

/// The Service still directs connections to a replica that ends: without an answer their pods would go to the cluster's
/// own scheduler.
#[tokio::test]
async fn new_connections_are_served_while_it_ends() {
    let server = start().await;
    server.shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (status, text) = server.post(&creation("nvidia.com/gpu")).await;
    assert_eq!(status, 200, "{text}");
    let Running { address, task, .. } = server;
    tokio::time::timeout(LINGER + DRAIN + Duration::from_secs(5), task).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

/// Sends a request without a connection.
async fn send(
    serving: &Arc<WebhookServer>,
    method: &str,
    path: &str,
    form: &str,
    body: Vec<u8>,
) -> (u16, String) {
    let request = http::Request::builder().method(method).uri(path).header("content-type", form);
    let request = request.body(axum::body::Body::from(body)).unwrap();
    let response = Arc::clone(serving).router().oneshot(request).await.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

const JSON: &str = "application/json";

#[tokio::test]
async fn requests_out_of_form_are_refused_with_a_reason() {
    let metrics = Arc::new(Metrics::new());
    let serving = WebhookServer::new(assignment(), Arc::clone(&metrics));
    let cases = [
        ("GET", "/mutate", JSON, Vec::new(), 405),
        ("POST", "/validate", JSON, Vec::new(), 404),
        ("POST", "/mutate", "text/plain", Vec::new(), 415),
        ("POST", "/mutate", JSON, b"{".to_vec(), 400),
        ("POST", "/mutate", JSON, vec![0xff; 100], 400),
        ("POST", "/mutate", JSON, vec![b' '; BODY + 1], 413),
    ];
    let mut texts = String::new();
    for (method, path, form, body, code) in cases {
        let (status, text) = send(&serving, method, path, form, body).await;
        assert_eq!(status, code, "{method} {path}: {text}");
        texts.push_str(&text);
    }
    insta::assert_snapshot!(texts, @r#"
    GET is not allowed; use POST
    no such path "/validate"; served are POST /mutate
    Content-Type must be application/json
    body is not an AdmissionReview: EOF while parsing an object at line 1 column 1
    body is not an AdmissionReview: expected value at line 1 column 1
    body of more than 4194304 bytes
    "#);
    assert_eq!((reviews(&metrics, "malformed"), reviews(&metrics, "refused")), (3, 1));
}

#[tokio::test]
async fn slow_and_excess_requests_are_refused() {
    let metrics = Arc::new(Metrics::new());
    let serving = Arc::new(WebhookServer {
        assignment: assignment(),
        metrics: Arc::clone(&metrics),
        bodies: Bodies::new(BODY),
        requests: Semaphore::new(1),
        limit: Duration::from_millis(200),
    });
    // A body that does not end.
    let body = axum::body::Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    let request = http::Request::post("/mutate").header("content-type", JSON).body(body).unwrap();
    let slow = tokio::spawn(Arc::clone(&serving).router().oneshot(request));
    while serving.requests.available_permits() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let pod = || creation("nvidia.com/gpu").to_string().into_bytes();
    let (status, text) = send(&serving, "POST", "/mutate", JSON, pod()).await;
    assert_eq!(status, 429);
    insta::assert_snapshot!(text, @"more than 64 requests at once; try again");
    assert_eq!(slow.await.unwrap().unwrap().status().as_u16(), 408);
    assert_eq!(reviews(&metrics, "refused"), 2);
    assert_eq!(send(&serving, "POST", "/mutate", JSON, pod()).await.0, 200, "the slow one has ended");
}
