use http::request::Builder;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::fixtures::{Cluster, bridged, member, pod};
use crate::service::tests::service;
use gantry_planner::decide::Options;

const PATHS: &str = "POST /filter, POST /prioritize, POST /bind, POST /preempt, GET /healthz, GET /readyz, GET /standbyz, GET /metrics";
const MONITORING_PATHS: &str = "GET /healthz, GET /readyz, GET /standbyz, GET /metrics";

/// Without an election, as after the first lists.
fn leading() -> Leadership {
    let leadership = Leadership::always();
    leadership.enter(leadership.term().unwrap());
    leadership
}

struct Running {
    address: std::net::SocketAddr,
    /// Address of the listener for metrics.
    monitoring_at: std::net::SocketAddr,
    health: Arc<ApiHealth>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn start(cluster: &Cluster) -> Running {
    start_as(cluster, leading(), None).await
}

async fn start_as(cluster: &Cluster, leadership: Leadership, tls: Option<Tls>) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let health = ApiHealth::new();
    let shutdown = CancellationToken::new();
    let metrics = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let monitoring_at = metrics.local_addr().unwrap();
    let server = Server {
        service: service(cluster),
        health: Arc::clone(&health),
        leadership: Arc::new(leadership),
        tls: tls.map(Arc::new),
        webhook_tls: None,
        bodies: Bodies::new(4096),
        stale_after: Duration::from_secs(15),
        drain: Duration::from_secs(5),
    };
    let listeners = Listeners { all: listener, metrics: Some(metrics) };
    let task = tokio::spawn(server.run(listeners, shutdown.clone()));
    Running { address, monitoring_at, health, shutdown, task }
}

impl Running {
    async fn send(&self, request: Builder, body: impl Into<Bytes>) -> (u16, String) {
        Self::send_to(self.address, request, body).await
    }

    async fn send_to(
        address: std::net::SocketAddr,
        request: Builder,
        body: impl Into<Bytes>,
    ) -> (u16, String) {
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = request.header("host", "extender").body(Full::new(body.into())).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn post(&self, path: &str, body: impl Into<Bytes>) -> (u16, String) {
        let request = http::Request::post(path).header("content-type", "application/json");
        self.send(request, body).await
    }

    async fn get(&self, path: &str) -> (u16, String) {
        self.send(http::Request::get(path), "").await
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged()).add("b", &bridged());
    cluster
}

#[tokio::test]
async fn filter_and_prioritize_return_decisions() {
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
async fn bad_request_is_refused_with_its_fault() {
    let server = start(&cluster()).await;
    let (status, text) = server.post("/filter", "{").await;
    assert_eq!((status, text.as_str()), (400, "filter: EOF while parsing an object at line 1 column 1\n"));
    let (status, text) =
        server.send(http::Request::post("/filter").header("content-type", "text/plain"), "{}").await;
    assert_eq!((status, text.as_str()), (415, "Content-Type must be application/json\n"));
    let (status, text) = server.get("/filter").await;
    assert_eq!((status, text.as_str()), (405, "GET is not allowed; use POST\n"));
    let (status, text) = server.post("/metrics", "").await;
    assert_eq!((status, text.as_str()), (405, "POST is not allowed; use GET\n"));
    let (status, text) = server.post("/score", "{}").await;
    assert_eq!(status, 404);
    assert_eq!(text, format!("no such path \"/score\"; served are {PATHS}\n"));
    let (status, text) = server.post("/filter", " ".repeat(4097)).await;
    assert_eq!(status, 413);
    insta::assert_snapshot!(text, @"body of more than 4096 bytes; set nodeCacheCapable: true, or raise --body-limit");
}

#[tokio::test]
async fn every_listed_path_is_served() {
    let server = start(&cluster()).await;
    for named in PATHS.split(", ") {
        let (method, path) = named.split_once(' ').unwrap();
        let (status, text) = match method {
            "POST" => server.post(path, "{").await,
            _ => server.get(path).await,
        };
        assert!(![404, 405].contains(&status), "{named}: {status} {text}");
    }
}

#[tokio::test]
async fn body_without_content_length_is_limited() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = start(&cluster()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = "POST /filter HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = format!("{:x}\r\n{}\r\n", 5000, " ".repeat(5000));
    stream.write_all(format!("{head}{chunk}0\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn readiness_follows_lists_and_api_server() {
    let cold = Cluster::cold(Options::default());
    let server = start(&cold).await;
    assert_eq!(server.get("/healthz").await.0, 200);
    assert_eq!(server.get("/readyz").await.0, 503);
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a"]}).to_string();
    assert_eq!(server.post("/filter", body).await.0, 503);

    let server = start(&cluster()).await;
    assert_eq!(server.get("/readyz").await, (503, "no response from the API server yet\n".to_owned()));
    server.health.answered(gantry_runtime::now());
    assert_eq!(server.get("/readyz").await.0, 200);
    if let Some(long_ago) = gantry_runtime::now().checked_sub(Duration::from_secs(20)) {
        server.health.answered(long_ago);
        let (status, text) = server.get("/readyz").await;
        assert_eq!(status, 503);
        // Without the time since then.
        insta::assert_snapshot!(text.replace(|ch: char| ch.is_ascii_digit(), "N"), @"no response from the API server for NN s; deciding by the state of that time");
    }
}

#[tokio::test]
async fn metrics_count_calls_and_free_devices() {
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
        r#"gantry_extender_nodes{state="gantry"} 2"#,
        "gantry_extender_api_last_response_age_seconds -1.0",
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
}

#[tokio::test]
async fn gang_plan_is_timed_once() {
    let cluster = cluster();
    let server = start(&cluster).await;
    let count = async || {
        let (_, page) = server.get("/metrics").await;
        let mut lines = page.lines();
        let count = lines.find_map(|line| line.strip_prefix("gantry_extender_gang_plan_seconds_count "));
        count.map(str::to_owned)
    };
    assert_eq!(count().await.as_deref(), Some("0"));
    for number in 0..2 {
        cluster.pod(&member(&format!("p-{number}"), 8, "p", 2));
    }
    cluster.wait(2);
    assert_eq!(count().await.as_deref(), Some("1"));
    assert_eq!(count().await.as_deref(), Some("1"));
}

#[tokio::test]
async fn metrics_listener_has_no_verbs() {
    let server = start(&cluster()).await;
    let there = server.monitoring_at;
    let (status, page) = Running::send_to(there, http::Request::get("/metrics"), "").await;
    assert_eq!(status, 200);
    assert!(page.contains("gantry_extender_nodes"), "{page}");
    server.health.answered(gantry_runtime::now());
    for probe in ["/healthz", "/readyz", "/standbyz"] {
        let (status, text) = Running::send_to(there, http::Request::get(probe), "").await;
        assert_eq!((status, text.as_str()), (200, "ok\n"), "{probe}");
    }
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    for verb in VERBS {
        let path = format!("/{verb}");
        let request = http::Request::post(&path).header("content-type", "application/json");
        let (status, text) = Running::send_to(there, request, body.clone()).await;
        assert_eq!(status, 404, "{verb}");
        assert_eq!(text, format!("no such path {path:?}; served are {MONITORING_PATHS}\n"));
    }
    let (_, page) = server.get("/metrics").await;
    assert!(!page.contains(r#"verb="filter""#), "{page}");
}

#[tokio::test]
async fn crowded_metrics_listener_does_not_block_the_verbs() {
    let server = start(&cluster()).await;
    let mut crowd = Vec::new();
    for _ in 0..128 {
        crowd.push(TcpStream::connect(server.monitoring_at).await.unwrap());
    }
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    assert_eq!(server.post("/filter", body).await.0, 200);
    drop(crowd);
    let (status, _) = Running::send_to(server.monitoring_at, http::Request::get("/metrics"), "").await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn shutdown_ends_the_server_with_open_connections() {
    let server = start(&cluster()).await;
    let _silent = TcpStream::connect(server.address).await.unwrap();
    let _watcher = TcpStream::connect(server.monitoring_at).await.unwrap();
    assert_eq!(server.get("/healthz").await.0, 200);
    server.shutdown.cancel();
    server.task.await.unwrap();
}

#[tokio::test]
async fn standby_refuses_verbs_with_503() {
    let server = start_as(&cluster(), Leadership::follower(), None).await;
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a"]}).to_string();
    for path in ["/filter", "/prioritize", "/bind"] {
        let (status, text) = server.post(path, body.clone()).await;
        assert_eq!((status, text.as_str()), (503, "no extender leads yet; try again\n"));
    }
    server.health.answered(gantry_runtime::now());
    assert_eq!(server.get("/readyz").await.0, 503);
    assert_eq!(server.get("/standbyz").await.0, 200);
    assert_eq!(server.get("/healthz").await.0, 200);
    let (_, page) = server.get("/metrics").await;
    assert!(page.contains("gantry_extender_leader 0"), "{page}");
}

/// Sends a message when it is dropped.
struct OnDrop(Option<tokio::sync::oneshot::Sender<()>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.take().unwrap().send(());
    }
}

/// A router whose `/bind` waits for ever. Each call sends a receiver, which gets a message when the call is given up.
fn waiting(
    calls: tokio::sync::mpsc::UnboundedSender<tokio::sync::oneshot::Receiver<()>>,
) -> TowerToHyperService<Router> {
    let wait = async move || {
        let (dropped, given_up) = tokio::sync::oneshot::channel();
        calls.send(given_up).unwrap();
        let _guard = OnDrop(Some(dropped));
        std::future::pending::<()>().await;
    };
    TowerToHyperService::new(Endpoints::default().post("/bind", wait).into_router())
}

const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test]
async fn http1_call_ends_when_its_connection_closes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (calls, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), waiting(calls)).await;
    });
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = http::Request::post("/bind").body(Full::new(Bytes::new())).unwrap();
    let _call = tokio::spawn(async move { sender.send_request(request).await });
    let mut given_up = received.recv().await.unwrap();
    assert!(given_up.try_recv().is_err(), "the caller is there");
    connection.abort();
    tokio::time::timeout(PATIENCE, given_up).await.expect("the call goes on").unwrap();
}

#[tokio::test]
async fn http2_calls_end_one_by_one_or_with_the_connection() {
    let authority = crate::tls::tests::Authority::new();
    authority.issue("a");
    let tls = Tls::load(authority.files("a")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (calls, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let stream = TlsAcceptor::from(tls.config()).accept(stream).await.unwrap();
        let _ = http2::Builder::new(TokioExecutor::new())
            .max_concurrent_streams(STREAMS)
            .serve_connection(TokioIo::new(stream), waiting(calls))
            .await;
    });
    // A wire that can be cut: the client's own parts keep its socket open.
    let wire = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let end = wire.local_addr().unwrap();
    let wire = tokio::spawn(async move {
        let (mut client, _) = wire.accept().await.unwrap();
        let mut server = TcpStream::connect(address).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
    });
    let stream = connect_tls(end, &authority, None).await;
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut open = Vec::new();
    for _ in 0..2500 {
        let mut sender = sender.clone();
        let request = http::Request::post("https://localhost/bind").body(Full::new(Bytes::new())).unwrap();
        open.push(tokio::spawn(async move { sender.send_request(request).await }));
    }
    let mut waiting = Vec::new();
    for _ in 0..open.len() {
        let call = tokio::time::timeout(PATIENCE, received.recv()).await;
        waiting.push(call.expect("2,500 calls wait at once on one connection").unwrap());
    }
    // One caller gives up: its call ends, and no other.
    open.pop().unwrap().abort();
    let ended = async {
        loop {
            let before = waiting.len();
            waiting.retain_mut(|call| call.try_recv().is_err());
            if waiting.len() < before {
                return before - waiting.len();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, ended).await.unwrap(), 1);
    wire.abort();
    for call in waiting {
        let ended = tokio::time::timeout(PATIENCE, call).await;
        ended.expect("a call goes on").unwrap();
    }
}

pub(crate) async fn connect_tls(
    address: std::net::SocketAddr,
    authority: &crate::tls::tests::Authority,
    client: Option<&str>,
) -> tokio_rustls::client::TlsStream<TcpStream> {
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};
    let mut roots = RootCertStore::empty();
    let pem = |file: &str| CertificateDer::from_pem_file(authority.path(file)).unwrap();
    roots.add(pem("ca.crt")).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match client {
        Some(name) => {
            let key = PrivateKeyDer::from_pem_file(authority.path(&format!("{name}.key"))).unwrap();
            let chain = vec![pem(&format!("{name}.crt"))];
            builder.with_client_auth_cert(chain, key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(ServerName::try_from("localhost").unwrap(), stream)
        .await
        .unwrap()
}

#[tokio::test]
async fn verbs_need_a_client_certificate_and_probes_do_not() {
    let authority = crate::tls::tests::Authority::new();
    authority.issue("server");
    authority.issue("scheduler");
    let tls = Tls::load(authority.files("server")).unwrap();
    let server = start_as(&cluster(), leading(), Some(tls)).await;
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    for (client, wanted) in [(None, 403), (Some("scheduler"), 200)] {
        let stream = connect_tls(server.address, &authority, client).await;
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::post("https://localhost/filter")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.clone())))
            .unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), wanted);
        let request = http::Request::get("https://localhost/healthz").body(Full::new(Bytes::new())).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
    }
}

/// A server that wants client certificates, and an authority that has issued one for a scheduler.
async fn start_with_tls() -> (Running, crate::tls::tests::Authority) {
    let authority = crate::tls::tests::Authority::new();
    authority.issue("server");
    authority.issue("scheduler");
    let tls = Tls::load(authority.files("server")).unwrap();
    (start_as(&cluster(), leading(), Some(tls)).await, authority)
}

/// Calls `/healthz` over a new connection, which is returned; `None` if the server closes it.
async fn probe(
    server: &Running,
    authority: &crate::tls::tests::Authority,
    client: Option<&str>,
) -> Option<hyper::client::conn::http2::SendRequest<Full<Bytes>>> {
    let stream = connect_tls(server.address, authority, client).await;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    let request = http::Request::get("https://localhost/healthz").body(Full::new(Bytes::new())).unwrap();
    let answer = sender.send_request(request).await.ok()?;
    assert_eq!(answer.status(), 200);
    Some(sender)
}

#[tokio::test]
async fn certificate_of_another_name_may_not_call_verbs() {
    let (server, authority) = start_with_tls().await;
    authority.issue_to("kubelet", "system:node:n0");
    let mut sender = probe(&server, &authority, Some("kubelet")).await.unwrap();
    let request = http::Request::post("https://localhost/filter")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from("{}")))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert_eq!(answer.status(), 403);
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let expected = "decisions are for the client \"system:kube-scheduler\" (--client-name); the name of this certificate is \"system:node:n0\"\n";
    assert_eq!(String::from_utf8_lossy(&body), expected);
}

#[tokio::test]
async fn strangers_displace_one_another_and_no_scheduler() {
    let (server, authority) = start_with_tls().await;
    let mut scheduler = probe(&server, &authority, Some("scheduler")).await.unwrap();
    let mut crowd = Vec::new();
    for _ in 0..STRANGERS + 8 {
        crowd.push(probe(&server, &authority, None).await.expect("a new one is served"));
    }
    let displaced = async {
        while !crowd[..8].iter().all(hyper::client::conn::http2::SendRequest::is_closed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, displaced).await.expect("the oldest are closed");
    assert!(!crowd[STRANGERS].is_closed());
    let request = http::Request::get("https://localhost/healthz").body(Full::new(Bytes::new())).unwrap();
    assert_eq!(scheduler.send_request(request).await.unwrap().status(), 200);
    assert!(probe(&server, &authority, Some("scheduler")).await.is_some());
}

#[tokio::test]
async fn silent_handshakes_keep_nobody_from_being_served() {
    let (server, authority) = start_with_tls().await;
    let mut silent = Vec::new();
    for _ in 0..HANDSHAKES + 8 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    for client in [Some("scheduler"), None] {
        let served = tokio::time::timeout(PATIENCE, probe(&server, &authority, client));
        assert!(served.await.unwrap().is_some());
    }
}

#[tokio::test]
async fn slow_bodies_share_a_bounded_memory() {
    let server = start(&cluster()).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let head = "POST /filter HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 4096\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&[b' '; 4000]).await.unwrap();
        slow.push(stream);
    }
    // Two of them have all there is; the others are refused while those are slow.
    let mut refused = 0;
    for stream in &mut slow {
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        refused += usize::from(answer.ends_with(b"503"));
    }
    assert_eq!(refused, 2);
    let body = json!({"Pod": pod("p", 2), "NodeNames": ["a", "b"]}).to_string();
    assert_eq!(server.post("/filter", body).await.0, 200, "the slow ones have ended");
}
