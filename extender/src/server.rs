//! HTTP in front of the service: routes, limits, TLS, probes, metrics, orderly end. Plain HTTP/1.1, or HTTP/1.1 and HTTP/2 over TLS; and a
//! second listener for metrics and probes alone. A call ends when its client closes the connection: its future is dropped. No decisions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use gantry_runtime::http::{self as endpoints, Endpoints, text, unavailable};
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::index::Undecided;
use crate::lease::Leadership;
use crate::metrics::{Call, Reading, Verb};
use crate::service::{Refusal, Service};
use crate::tls::Tls;
use crate::watch::ApiHealth;

/// kube-scheduler's verbs, each at a path of its name.
const VERBS: [&str; 4] = ["filter", "prioritize", "bind", "preempt"];
/// Time a client may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time a client may take for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time a client may take for the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once; further connections wait to be accepted. A scheduler connects once and stays.
const HANDSHAKES: usize = 256;
/// Clients without a certificate at once at the listener for the verbs: probes and unknown programs. One more is disconnected.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long a connection without a certificate may last; a probe takes a moment.
const STAY: Duration = Duration::from_secs(30);
/// Calls on one HTTP/2 connection at once. kube-scheduler uses one for all its binds, and each member of a gang waits in its own.
const STREAMS: u32 = 4096;
/// A request body of names fits without waiting for the window to open.
const STREAM_WINDOW: u32 = 1024 * 1024;
/// The same for all of a connection.
const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// A client that is silently gone is detected after two of these.
const PING: Duration = Duration::from_secs(5);

/// The HTTP server.
pub struct Server {
    /// The verbs.
    pub service: Service,
    /// When the API server last responded.
    pub health: Arc<ApiHealth>,
    /// Whether this process decides.
    pub leadership: Arc<Leadership>,
    /// TLS; without it, plain HTTP/1.1.
    pub tls: Option<Arc<Tls>>,
    /// Largest body in bytes.
    pub body_limit: usize,
    /// Without a response of the API server for so long, the extender is not ready.
    pub stale_after: Duration,
    /// How long calls under way may take after shutdown has begun.
    pub drain: Duration,
}

/// What the server listens on.
pub struct Listeners {
    /// For kube-scheduler: verbs, probes and metrics.
    pub all: TcpListener,
    /// Plain HTTP for probes and metrics, without the verbs.
    pub metrics: Option<TcpListener>,
}

/// Why a connection was ended early.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("there are {MAX_UNAUTHENTICATED} clients without a certificate already")]
    Crowded,
    #[error("a client without a certificate may stay no longer")]
    Overstayed,
    #[error("no TLS handshake in time")]
    Handshake(#[from] tokio::time::error::Elapsed),
    #[error("no TLS: {0}")]
    Tls(#[from] std::io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

/// What a client of the listener for the verbs may call.
#[derive(Clone)]
struct Routers {
    /// For kube-scheduler.
    scheduler: Router,
    /// For a client without the certificate that is needed: the verbs are forbidden.
    unauthenticated: Router,
}

impl Server {
    /// Serves until `shutdown`, then lets calls under way end.
    pub async fn run(self, listeners: Listeners, shutdown: CancellationToken) {
        let server = Arc::new(self);
        let monitoring = async {
            if let Some(listener) = listeners.metrics {
                let router = server.counted(server.endpoints().into_router(), &[]);
                endpoints::serve(listener, router, &shutdown).await;
            }
        };
        tokio::join!(server.serve(listeners.all, &shutdown), monitoring);
    }

    /// Serves the verbs.
    async fn serve(self: &Arc<Self>, listener: TcpListener, shutdown: &CancellationToken) {
        let routers = self.routers();
        let graceful = GracefulShutdown::new();
        let unauthenticated = Arc::new(Semaphore::new(MAX_UNAUTHENTICATED));
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        // The semaphore is never closed.
        while let Some(Ok(handshake)) =
            shutdown.run_until_cancelled(Arc::clone(&handshakes).acquire_owned()).await
            && let Some(stream) = endpoints::accept(&listener, shutdown).await
        {
            let (server, routers) = (Arc::clone(self), routers.clone());
            let (unauthenticated, watcher) = (Arc::clone(&unauthenticated), graceful.watcher());
            tokio::spawn(async move {
                let served = server.connection(stream, routers, handshake, unauthenticated, watcher);
                if let Err(error) = served.await {
                    tracing::debug!(%error, "connection ended");
                }
            });
        }
        drop(listener);
        // A bind that waits for its gang is brought again, here or to the next leader.
        let store = &self.service.store;
        if !store.is_broken() {
            store.update(crate::index::Index::stand_down);
        }
        if tokio::time::timeout(self.drain, graceful.shutdown()).await.is_err() {
            tracing::warn!("calls still under way at the end of the drain time");
        }
    }

    /// Serves a connection at the listener for the verbs. `handshake` is held until the client is known.
    async fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        routers: Routers,
        handshake: OwnedSemaphorePermit,
        unauthenticated: Arc<Semaphore>,
        watcher: Watcher,
    ) -> Result<(), Ended> {
        let Some(tls) = &self.tls else {
            drop(handshake);
            let connection =
                http1().serve_connection(TokioIo::new(stream), TowerToHyperService::new(routers.scheduler));
            return Ok(watcher.watch(connection).await?);
        };
        let accepted = TlsAcceptor::from(tls.config()).accept(stream);
        let stream = tokio::time::timeout(HANDSHAKE, accepted).await??;
        drop(handshake);
        let (_, session) = stream.get_ref();
        let is_http2 = session.alpn_protocol() == Some(b"h2");
        let is_known = !tls.wants_clients() || session.peer_certificates().is_some();
        let router = if is_known { routers.scheduler } else { routers.unauthenticated };
        let (stream, service) = (TokioIo::new(stream), TowerToHyperService::new(router));
        let serving = async {
            match is_http2 {
                true => watcher.watch(http2(is_known).serve_connection(stream, service)).await,
                false => watcher.watch(http1().serve_connection(stream, service)).await,
            }
        };
        if is_known {
            return Ok(serving.await?);
        }
        let _permit = unauthenticated.try_acquire_owned().map_err(|_| Ended::Crowded)?;
        let served = tokio::time::timeout(STAY, serving).await;
        Ok(served.map_err(|_| Ended::Overstayed)??)
    }

    /// Probes and metrics.
    fn endpoints(self: &Arc<Self>) -> Endpoints {
        let probe = |probe: fn(&Self) -> Result<String, String>| {
            let server = Arc::clone(self);
            move || probe(&server)
        };
        let server = Arc::clone(self);
        Endpoints::default()
            .probe("/healthz", || Ok("ok".to_owned()))
            .probe("/readyz", probe(Self::ready))
            .probe("/standbyz", probe(Self::fresh))
            .metrics(move || Ok(server.metrics()))
    }

    fn routers(self: &Arc<Self>) -> Routers {
        let (mut scheduler, mut unauthenticated) = (Endpoints::default(), Endpoints::default());
        for verb in VERBS {
            let server = Arc::clone(self);
            let call = move |request: Request| async move { server.verb(verb, request).await };
            let path = format!("/{verb}");
            scheduler = scheduler.post(&path, call);
            unauthenticated = unauthenticated.post(&path, forbidden);
        }
        let router = |verbs: Endpoints| self.counted(verbs.and(self.endpoints()).into_router(), &VERBS);
        Routers { scheduler: router(scheduler), unauthenticated: router(unauthenticated) }
    }

    /// Counts and times the calls of a router that has these verbs.
    fn counted(self: &Arc<Self>, router: Router, verbs: &'static [&'static str]) -> Router {
        let count = async move |State(server): State<Arc<Self>>, request: Request, next: Next| {
            let began = Instant::now();
            let path = request.uri().path().trim_start_matches('/');
            let verb = verbs.iter().find(|verb| **verb == path).copied();
            let response = next.run(request).await;
            let metrics = &server.service.metrics;
            let (label, code) = (verb.unwrap_or("other"), response.status().as_u16());
            metrics.calls.get_or_create(&Call { verb: label, code }).inc();
            if let Some(verb) = verb {
                let seconds = began.elapsed().as_secs_f64();
                metrics.seconds.get_or_create(&Verb { verb }).observe(seconds);
            }
            response
        };
        router.layer(middleware::from_fn_with_state(Arc::clone(self), count))
    }

    async fn verb(&self, verb: &'static str, request: Request) -> Response {
        if !is_json(request.headers()) {
            return text(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json");
        }
        let body = match self.body(request).await {
            Ok(body) => body,
            Err(response) => return response,
        };
        let _call = self.leadership.called();
        let Some(term) = self.leadership.term().filter(|_| self.leadership.leads()) else {
            return unavailable(&self.leadership.why_not());
        };
        let result = match verb {
            "filter" => self.service.filter(&body),
            "prioritize" => self.service.prioritize(&body),
            "preempt" => self.service.preempt(&body),
            _ => tokio::select! {
                bound = self.service.bind(&body) => bound,
                // A bind under way is given up: only the leader writes.
                () = self.leadership.ended(term) => return unavailable(&self.leadership.why_not()),
            },
        };
        match result {
            Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
            Err(refusal @ Refusal::Malformed { .. }) => text(StatusCode::BAD_REQUEST, &refusal.to_string()),
            Err(refusal @ Refusal::Undecided(_)) => unavailable(&refusal.to_string()),
        }
    }

    async fn body(&self, request: Request) -> Result<Bytes, Response> {
        let too_large = || {
            let limit = self.body_limit;
            text(
                StatusCode::PAYLOAD_TOO_LARGE,
                &format!(
                    "body of more than {limit} bytes; set nodeCacheCapable: true, or raise --body-limit"
                ),
            )
        };
        let announced = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > self.body_limit) {
            return Err(too_large());
        }
        let collect = Limited::new(request.into_body(), self.body_limit).collect();
        match tokio::time::timeout(BODY_TIMEOUT, collect).await {
            Ok(Ok(body)) => Ok(body.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Ok(Err(error)) => Err(text(StatusCode::BAD_REQUEST, &format!("body cannot be read: {error}"))),
            Err(_) => Err(text(StatusCode::REQUEST_TIMEOUT, "body not received in time")),
        }
    }

    fn ready(&self) -> Result<String, String> {
        if !self.leadership.leads() {
            return Err(self.leadership.why_not());
        }
        self.fresh()
    }

    /// Whether this process could decide by what it knows, be it the leader or not.
    fn fresh(&self) -> Result<String, String> {
        if !self.service.store.snapshot().synced {
            return Err(Undecided::Cold.to_string());
        }
        match self.health.last() {
            Some(last) if last.elapsed() <= self.stale_after => Ok("ok".to_owned()),
            Some(last) => {
                let age = last.elapsed().as_secs();
                Err(format!(
                    "no response from the API server for {age} s; deciding by the state of that time"
                ))
            }
            None => Err("no response from the API server yet".to_owned()),
        }
    }

    fn metrics(&self) -> String {
        let age = self.health.last().map(|last| last.elapsed());
        let Service { store, metrics, .. } = &self.service;
        for took in store.take_plan_times() {
            metrics.plans.observe(took.as_secs_f64());
        }
        let leads = self.leadership.leads();
        let reading = store.read(Reading::of);
        metrics.page_of(&reading, age, leads)
    }
}

async fn forbidden() -> Response {
    text(StatusCode::FORBIDDEN, "decisions are for clients with a certificate of --client-ca")
}

fn is_json(headers: &HeaderMap) -> bool {
    let form = headers.get(header::CONTENT_TYPE).and_then(|form| form.to_str().ok());
    let form = form.and_then(|form| form.split(';').next());
    form.is_some_and(|form| form.trim().eq_ignore_ascii_case("application/json"))
}

fn http1() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    http
}

/// A scheduler, which `is_known`, has as many calls open as a gang has members.
fn http2(is_known: bool) -> http2::Builder<TokioExecutor> {
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
    if is_known {
        http.max_concurrent_streams(STREAMS)
            // All binds of a gang may be given up at once.
            .max_pending_accept_reset_streams(STREAMS as usize)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
    }
    http
}

#[cfg(test)]
mod tests;
