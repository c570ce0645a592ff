//! HTTP of both daemons: endpoints with plain-text responses, probes and metrics among them, and a server for the ones that monitoring
//! calls. Metrics are OpenMetrics text for any `Accept`: every Prometheus since 2.5 reads it, and chooses its parser by `Content-Type`.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The older text format, in which a counter may have any name.
const PROMETHEUS_TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
/// Seconds after which a client that received 503 may try again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");
/// Connections that [`serve`] holds. One more closes the oldest: a probe or a scrape is answered at once, and a client that only holds
/// connections must not use up the daemon's file descriptors.
const MAX_CONNECTIONS: usize = 64;
/// Time a client of [`serve`] may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time a client of [`serve`] may take to acknowledge a part of a response. A client that reads nothing is closed then.
const STALL: Duration = Duration::from_secs(20);
/// Time that responses under way have at shutdown.
const DRAIN: Duration = Duration::from_secs(1);
/// Pause after a connection could not be accepted, for instance for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The endpoints of a listener. Other paths get 404 with a list of these, other methods 405 with the one that is allowed.
#[derive(Debug, Default)]
pub struct Endpoints {
    router: Router,
    listed: Vec<String>,
}

impl Endpoints {
    /// `GET path`: 200 with the text of `Ok`, 503 with that of `Err`.
    #[must_use]
    pub fn probe(
        self,
        path: &str,
        probe: impl Fn() -> Result<String, String> + Send + Sync + 'static,
    ) -> Self {
        let probe = Arc::new(probe);
        let handler = move || {
            let response = match probe() {
                Ok(text) => self::text(StatusCode::OK, &text),
                Err(text) => unavailable(&text),
            };
            async move { response }
        };
        self.route("GET", path, get(handler))
    }

    /// `GET /metrics`, in the OpenMetrics text format.
    #[must_use]
    pub fn metrics(self, page: impl Fn() -> Result<String, fmt::Error> + Send + Sync + 'static) -> Self {
        let page = Arc::new(page);
        let handler = move || {
            let response = match page() {
                Ok(page) => ([(header::CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
            };
            async move { response }
        };
        self.route("GET", "/metrics", get(handler))
    }

    /// `GET path`, in the Prometheus text format.
    #[must_use]
    pub fn prometheus_text(self, path: &str, page: impl Fn() -> String + Send + Sync + 'static) -> Self {
        let page = Arc::new(page);
        let handler = move || {
            let response = ([(header::CONTENT_TYPE, PROMETHEUS_TEXT)], page()).into_response();
            async move { response }
        };
        self.route("GET", path, get(handler))
    }

    /// `GET path`.
    #[must_use]
    pub fn get<T: 'static>(self, path: &str, handler: impl Handler<T, ()>) -> Self {
        self.route("GET", path, get(handler))
    }

    /// `POST path`.
    #[must_use]
    pub fn post<T: 'static>(self, path: &str, handler: impl Handler<T, ()>) -> Self {
        self.route("POST", path, post(handler))
    }

    fn route(mut self, allowed: &'static str, path: &str, methods: MethodRouter) -> Self {
        let not_allowed = move |method: Method| async move {
            let message = format!("{method} is not allowed; use {allowed}");
            text(StatusCode::METHOD_NOT_ALLOWED, &message)
        };
        self.router = self.router.route(path, methods.fallback(not_allowed));
        self.listed.push(format!("{allowed} {path}"));
        self
    }

    /// All endpoints of both, the ones of `other` after these.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.router = self.router.merge(other.router);
        self.listed.extend(other.listed);
        self
    }

    /// Method and path of each endpoint.
    pub fn list(&self) -> String {
        self.listed.join(", ")
    }

    /// The service of these endpoints.
    pub fn into_router(self) -> Router {
        let listed: Arc<str> = self.list().into();
        self.router.fallback(move |request: Request| async move {
            let message = format!("no such path {:?}; served are {listed}", request.uri().path());
            text(StatusCode::NOT_FOUND, &message)
        })
    }
}

/// Plain text and a newline.
pub fn text(status: StatusCode, text: &str) -> Response {
    (status, format!("{text}\n")).into_response()
}

/// 503: the client is to try again, here or at another replica.
pub fn unavailable(message: &str) -> Response {
    let mut response = text(StatusCode::SERVICE_UNAVAILABLE, message);
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
    response
}

/// Where connections come from: a TCP address, or pipes in memory.
pub trait Listen: Send + Sync {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Waits for the next connection.
    ///
    /// # Errors
    /// This connection cannot be accepted; the next may be.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;

    /// Where clients connect to.
    ///
    /// # Errors
    /// The operating system does not report the address.
    fn address(&self) -> io::Result<SocketAddr>;
}

impl Listen for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = Self::accept(self).await?;
        // A response is one write; waiting to fill a packet only costs time.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }

    fn address(&self) -> io::Result<SocketAddr> {
        self.local_addr()
    }
}

/// The next connection; `None` at shutdown.
pub async fn accept<L: Listen>(listener: &L, shutdown: &CancellationToken) -> Option<L::Stream> {
    loop {
        match shutdown.run_until_cancelled(listener.accept()).await? {
            Ok(stream) => return Some(stream),
            // The client is gone already, or there are no file descriptors left: neither ends the server.
            Err(error) => {
                tracing::debug!(%error, "connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves endpoints for probes and monitoring over plain HTTP/1.1 until `shutdown`; then responses under way are finished.
pub async fn serve(listener: TcpListener, router: Router, shutdown: &CancellationToken) {
    let graceful = GracefulShutdown::new();
    let connections = Connections::new(MAX_CONNECTIONS);
    while let Some(stream) = accept(&listener, shutdown).await {
        // A kernel without the option keeps a stalled connection for longer.
        let _ = SockRef::from(&stream).set_tcp_user_timeout(Some(STALL));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        let open = connections.open();
        let service = TowerToHyperService::new(open.counting(router.clone()));
        let connection = http.serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watcher().watch(connection);
        tokio::spawn(async move {
            tokio::select! {
                ended = connection => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "connection ended");
                    }
                }
                () = open.closed() => {}
            }
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(DRAIN, graceful.shutdown()).await;
}

/// Open connections of one kind of client. One more than the limit closes the oldest that is idle, or else the oldest.
#[derive(Debug, Clone)]
pub struct Connections {
    limit: usize,
    /// Oldest first.
    open: Arc<Mutex<VecDeque<Arc<Connection>>>>,
}

#[derive(Debug, Default)]
struct Connection {
    closed: CancellationToken,
    /// Calls under way.
    calls: AtomicUsize,
}

impl Connections {
    /// None, of at most `limit`.
    pub fn new(limit: usize) -> Self {
        Self { limit, open: Arc::default() }
    }

    /// One more. If there are too many, another one is closed.
    pub fn open(&self) -> OpenConnection {
        let connection = Arc::new(Connection::default());
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= self.limit {
            let is_idle = |connection: &Arc<Connection>| connection.calls.load(Ordering::Relaxed) == 0;
            let oldest = open.iter().position(is_idle).unwrap_or_default();
            if let Some(oldest) = open.remove(oldest) {
                oldest.closed.cancel();
            }
        }
        open.push_back(Arc::clone(&connection));
        OpenConnection { connection, all: self.clone() }
    }
}

/// One of the [`Connections`], until it is dropped.
#[derive(Debug)]
pub struct OpenConnection {
    connection: Arc<Connection>,
    all: Connections,
}

impl OpenConnection {
    /// Waits until it has to be closed for another one.
    pub async fn closed(&self) {
        self.connection.closed.cancelled().await;
    }

    /// Counts the calls of a router as those of this connection.
    pub fn counting(&self, router: Router) -> Router {
        let count = async |State(connection): State<Arc<Connection>>, request: Request, next: Next| {
            connection.calls.fetch_add(1, Ordering::Relaxed);
            let _call = Call(connection);
            next.run(request).await
        };
        router.layer(middleware::from_fn_with_state(Arc::clone(&self.connection), count))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut open = self.all.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|known| !Arc::ptr_eq(known, &self.connection));
    }
}

/// A call under way; dropped also where the client gives up.
struct Call(Arc<Connection>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::AtomicBool;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    struct Running {
        address: SocketAddr,
        ready: Arc<AtomicBool>,
        shutdown: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    async fn start() -> Running {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ready = Arc::new(AtomicBool::new(true));
        let is_ready = Arc::clone(&ready);
        let router = Endpoints::default()
            .probe("/readyz", move || match is_ready.load(Ordering::Relaxed) {
                true => Ok("ready".to_owned()),
                false => Err("no devices".to_owned()),
            })
            .metrics(|| Ok("# TYPE a counter\na_total 1\n# EOF\n".to_owned()))
            .into_router();
        let shutdown = CancellationToken::new();
        let until = shutdown.clone();
        let task = tokio::spawn(async move { serve(listener, router, &until).await });
        Running { address, ready, shutdown, task }
    }

    impl Running {
        /// Sends a request and returns all of the response, in lower case.
        async fn send(&self, method_and_path: &str, headers: &str) -> String {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            let request =
                format!("{method_and_path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut response = String::new();
            stream.read_to_string(&mut response).await.unwrap();
            response.to_lowercase()
        }
    }

    /// The body of a response, in lower case.
    fn body(response: &str) -> &str {
        response.split_once("\r\n\r\n").map(|(_, body)| body).unwrap()
    }

    #[tokio::test]
    async fn probe_returns_200_or_503_with_its_text() {
        let server = start().await;
        let response = server.send("GET /readyz", "").await;
        assert!(response.starts_with("http/1.1 200 "), "{response}");
        assert_eq!(body(&response), "ready\n");
        let head = server.send("HEAD /readyz", "").await;
        assert!(head.starts_with("http/1.1 200 ") && head.ends_with("\r\n\r\n"), "{head}");
        server.ready.store(false, Ordering::Relaxed);
        let response = server.send("GET /readyz", "").await;
        assert!(response.starts_with("http/1.1 503 "), "{response}");
        assert_eq!(body(&response), "no devices\n");
        assert!(response.contains("retry-after: 1\r\n"), "{response}");
    }

    #[tokio::test]
    async fn metrics_are_openmetrics_whatever_is_accepted() {
        let server = start().await;
        for accept in ["", "accept: text/plain;version=0.0.4\r\n", "accept: */*\r\n"] {
            let response = server.send("GET /metrics", accept).await;
            let form = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
            assert!(response.starts_with("http/1.1 200 ") && response.contains(form), "{response}");
            assert!(response.ends_with("# eof\n"), "{response}");
        }
    }

    #[tokio::test]
    async fn other_paths_and_methods_are_refused_with_what_is_served() {
        let server = start().await;
        let response = server.send("GET /", "").await;
        assert!(response.starts_with("http/1.1 404 "), "{response}");
        assert_eq!(body(&response), "no such path \"/\"; served are get /readyz, get /metrics\n");
        let response = server.send("POST /metrics", "content-length: 0\r\n").await;
        assert!(
            response.starts_with("http/1.1 405 ") && response.contains("allow: get,head\r\n"),
            "{response}"
        );
        assert_eq!(body(&response), "post is not allowed; use get\n");
    }

    #[tokio::test]
    async fn excess_connections_close_the_oldest_idle_one() {
        let connections = Connections::new(3);
        let open: Vec<_> = (0..3).map(|_| connections.open()).collect();
        open[0].connection.calls.fetch_add(1, Ordering::Relaxed);
        let is_closed = |number: usize| open[number].connection.closed.is_cancelled();
        let _fourth = connections.open();
        assert_eq!([is_closed(0), is_closed(1), is_closed(2)], [false, true, false]);
        let fifth = connections.open();
        assert_eq!([is_closed(0), is_closed(2)], [false, true]);
        drop(fifth);
        let _sixth = connections.open();
        assert!(!is_closed(0), "there was room");
        let busy: Vec<_> = (0..2).map(|_| connections.open()).collect();
        for open in &busy {
            open.connection.calls.fetch_add(1, Ordering::Relaxed);
        }
        let _last = connections.open();
        assert!(is_closed(0), "all have calls under way");
    }

    #[tokio::test]
    async fn shutdown_ends_the_server_with_open_connections() {
        let server = start().await;
        let _silent = TcpStream::connect(server.address).await.unwrap();
        let mut begun = TcpStream::connect(server.address).await.unwrap();
        begun.write_all(b"GET /readyz HTTP/1.1\r\n").await.unwrap();
        server.send("GET /readyz", "").await;
        server.shutdown.cancel();
        server.task.await.unwrap();
    }
}
