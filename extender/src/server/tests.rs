use http::request::Builder;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;

use super::*;
use crate::decide::Options;
use crate::fixtures::{Cluster, bridged, pod};
use crate::service::tests::service;

struct Running {
    address: std::net::SocketAddr,
    contact: Arc<Contact>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(cluster: &Cluster) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let contact = Contact::new();
    let shutdown = CancellationToken::new();
    let server = Server {
        service: service(cluster),
        contact: Arc::clone(&contact),
        body_limit: 4096,
        stale_after: Duration::from_secs(15),
        drain: Duration::from_secs(5),
    };
    let task = tokio::spawn(server.run(listener, shutdown.clone()));
    Running {
        address,
        contact,
        shutdown,
        task,
    }
}

impl Running {
    async fn send(&self, request: Builder, body: impl Into<Bytes>) -> (u16, String) {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        let request = request
            .header("host", "extender")
            .body(Full::new(body.into()))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn post(&self, path: &str, body: impl Into<Bytes>) -> (u16, String) {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request, body).await
    }

    async fn get(&self, path: &str) -> (u16, String) {
        self.send(Request::get(path), "").await
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged()).add("b", &bridged());
    cluster
}

#[tokio::test]
async fn a_request_is_answered() {
    let server = start(&cluster()).await;
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    let (status, answer) = server.post("/filter", body.clone()).await;
    assert_eq!(status, 200);
    assert_eq!(
        answer,
        r#"{"Nodes":null,"NodeNames":["a","b"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#
    );
    let (status, answer) = server.post("/prioritize", body).await;
    assert_eq!(status, 200);
    assert_eq!(answer, r#"[{"Host":"a","Score":10},{"Host":"b","Score":0}]"#);
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_said() {
    let server = start(&cluster()).await;
    let (status, text) = server.post("/filter", "{").await;
    assert_eq!(
        (status, text.as_str()),
        (400, "filter: EOF while parsing an object at line 1 column 1\n")
    );
    let (status, text) = server
        .send(
            Request::post("/filter").header("content-type", "text/plain"),
            "{}",
        )
        .await;
    assert_eq!(
        (status, text.as_str()),
        (415, "Content-Type must be application/json\n")
    );
    let (status, text) = server.get("/filter").await;
    assert_eq!(
        (status, text.as_str()),
        (405, "GET is not allowed here, POST is\n")
    );
    let (status, text) = server.post("/metrics", "").await;
    assert_eq!(
        (status, text.as_str()),
        (405, "POST is not allowed here, GET is\n")
    );
    let (status, text) = server.post("/preempt", "{}").await;
    assert_eq!(status, 404);
    assert_eq!(text, format!("no \"/preempt\" here; there are {PATHS}\n"));
    let (status, text) = server.post("/filter", " ".repeat(4097)).await;
    assert_eq!(status, 413);
    assert!(text.starts_with("body of more than 4096 bytes"), "{text}");
}

#[tokio::test]
async fn a_body_without_announced_length_is_limited_too() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = start(&cluster()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = "POST /filter HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("{:x}\r\n{}\r\n", 5000, " ".repeat(5000));
    stream
        .write_all(format!("{head}{chunk}0\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn readiness_follows_the_lists_and_the_api_server() {
    let cold = Cluster::cold(Options::default());
    let server = start(&cold).await;
    assert_eq!(server.get("/healthz").await.0, 200);
    assert_eq!(server.get("/readyz").await.0, 503);
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a"]}).to_string();
    assert_eq!(server.post("/filter", body).await.0, 503);

    let server = start(&cluster()).await;
    assert_eq!(
        server.get("/readyz").await,
        (503, "no answer from the API server yet\n".to_owned())
    );
    server.contact.made(Instant::now());
    assert_eq!(server.get("/readyz").await.0, 200);
    if let Some(long_ago) = Instant::now().checked_sub(Duration::from_secs(20)) {
        server.contact.made(long_ago);
        let (status, text) = server.get("/readyz").await;
        assert_eq!(status, 503);
        assert!(text.contains("answering from what was known then"), "{text}");
    }
}

#[tokio::test]
async fn metrics_tell_what_was_asked_and_what_is_left() {
    let server = start(&cluster()).await;
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    server.post("/filter", body).await;
    let (status, page) = server.get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        r#"gantry_extender_requests_total{verb="filter",code="200"} 1"#,
        r#"gantry_extender_decisions_total{verb="filter",outcome="some"} 1"#,
        r#"gantry_extender_request_duration_seconds_count{verb="filter"} 1"#,
        r#"gantry_extender_devices{state="free"} 16"#,
        r#"gantry_extender_nodes{state="ours"} 2"#,
        "gantry_extender_api_contact_age_seconds -1.0",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn shutdown_ends_the_server_though_a_connection_is_open() {
    let server = start(&cluster()).await;
    let _silent = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(server.get("/healthz").await.0, 200);
    server.shutdown.cancel();
    server.task.await.unwrap();
}
