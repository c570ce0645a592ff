//! HTTP in front of the service: routes, limits, TLS, probes, metrics, orderly end. Plain HTTP/1.1, or HTTP/1.1 and HTTP/2 over TLS; and a
//! second listener for metrics and probes alone. A call ends when its client closes the connection: its future is dropped. No decisions.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use gantry_runtime::http::{
    self as endpoints, Connections, Endpoints, Listen, OpenConnection, text, unavailable,
};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::index::UnavailableReason;
use crate::lease::Leadership;
use crate::metrics::{Call, GaugeReading, Verb};
use crate::service::{Refusal, Service};
use crate::tls::{Tls, UntrustedClient};
use crate::watch::ApiHealth;

/// kube-scheduler's verbs, each at a path of its name.
const VERBS: [&str; 4] = ["filter", "prioritize", "bind", "preempt"];
/// Time a client may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time a client may take for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Bodies of the largest size that may be in memory at once. One more is refused; kube-scheduler tries again.
const BODIES: usize = 2;
/// Bytes of bodies that are accounted together.
const BODY_UNIT: usize = 1024;
/// Time that a body waits for others to be answered.
const BODY_WAIT: Duration = Duration::from_secs(3);
/// Most bytes that a connection of HTTP/1.1 buffers.
const HTTP1_BUFFER: usize = 64 * 1024;
/// Time a client may take for the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections whose client is not known yet. One more closes the oldest.
pub(crate) const HANDSHAKES: usize = 256;
/// Connections of clients that may not call the verbs: probes and unknown programs.
const STRANGERS: usize = 64;
/// How long such a connection may last; a probe takes a moment.
const STAY: Duration = Duration::from_secs(30);
/// Connections of kube-schedulers over TLS. Each uses one, or few.
const SCHEDULERS: usize = 32;
/// Connections of plain HTTP/1.1: each member of a gang waits in its own.
const PLAIN: usize = 4096;
/// Calls on one HTTP/2 connection at once. kube-scheduler uses one for all its binds, and each member of a gang waits in its own.
const STREAMS: u32 = 4096;
/// A request body of names fits without waiting for the window to open.
const STREAM_WINDOW: u32 = 1024 * 1024;
/// The same for all of a connection.
const CONNECTION_WINDOW: u32 = 2 * 1024 * 1024;
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
    /// TLS of the webhook; the expiry of its certificate is a metric.
    pub webhook_tls: Option<Arc<Tls>>,
    /// The bodies of requests.
    pub bodies: Bodies,
    /// Without a response of the API server for so long, the extender is not ready.
    pub stale_after: Duration,
    /// How long calls under way may take after shutdown has begun.
    pub drain: Duration,
}

/// Reads the bodies of requests: each up to a limit, and all together up to another.
pub struct Bodies {
    limit: usize,
    units: Arc<Semaphore>,
}

/// Why a body is not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("body of more than {0} bytes; set nodeCacheCapable: true, or raise --body-limit")]
    TooLarge(usize),
    #[error("body cannot be read: {0}")]
    Broken(axum::Error),
    #[error("body not received in time")]
    Slow,
    #[error("other requests take all memory for bodies; try again")]
    Crowded,
}

impl IntoResponse for BodyError {
    fn into_response(self) -> Response {
        let message = self.to_string();
        match self {
            Self::TooLarge(_) => text(StatusCode::PAYLOAD_TOO_LARGE, &message),
            Self::Broken(_) => text(StatusCode::BAD_REQUEST, &message),
            Self::Slow => text(StatusCode::REQUEST_TIMEOUT, &message),
            Self::Crowded => unavailable(&message),
        }
    }
}

impl Bodies {
    /// Each of at most so many bytes.
    pub fn new(limit: usize) -> Self {
        let units = (limit.saturating_mul(BODIES) / BODY_UNIT).clamp(1, Semaphore::MAX_PERMITS);
        Self { limit, units: Arc::new(Semaphore::new(units)) }
    }

    /// The body of a request, with the permit for its bytes.
    pub(crate) async fn read(
        &self,
        request: Request,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), BodyError> {
        let announced = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > self.limit) {
            return Err(BodyError::TooLarge(self.limit));
        }
        let collected = self.collect(request.into_body(), announced.unwrap_or_default());
        tokio::time::timeout(BODY_TIMEOUT, collected).await.map_err(|_| BodyError::Slow)?
    }

    async fn collect(
        &self,
        mut body: axum::body::Body,
        announced: usize,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), BodyError> {
        let (mut bytes, mut held): (Vec<u8>, Option<OwnedSemaphorePermit>) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let Ok(chunk) = frame.map_err(BodyError::Broken)?.into_data() else {
                continue;
            };
            let length = bytes.len() + chunk.len();
            if length > self.limit {
                return Err(BodyError::TooLarge(self.limit));
            }
            // Memory is taken as bytes arrive: an announced length costs a client nothing.
            let missing =
                length.div_ceil(BODY_UNIT) - held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let missing = u32::try_from(missing).map_err(|_| BodyError::Crowded)?;
            let more = Arc::clone(&self.units).acquire_many_owned(missing);
            let more = tokio::time::timeout(BODY_WAIT, more).await;
            let more = more.ok().and_then(Result::ok).ok_or(BodyError::Crowded)?;
            match &mut held {
                Some(held) => held.merge(more),
                None => held = Some(more),
            }
            if bytes.capacity() < length {
                bytes.reserve_exact(announced.min(2 * length).max(length) - bytes.len());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok((bytes, held))
    }
}

/// What the server listens on.
pub struct Listeners<L = TcpListener> {
    /// For kube-scheduler: verbs, probes and metrics.
    pub all: L,
    /// Plain HTTP for probes and metrics, without the verbs.
    pub metrics: Option<TcpListener>,
}

/// Why a connection was ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DisconnectReason {
    #[error("another connection takes its place")]
    Displaced,
    #[error("a client that may not call the verbs may stay no longer")]
    Overstayed,
    #[error("no TLS handshake in time")]
    Handshake(#[from] tokio::time::error::Elapsed),
    #[error("no TLS: {0}")]
    Tls(#[from] std::io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

/// What the clients of the listener for the verbs may call, and their connections.
#[derive(Clone)]
struct Clients {
    scheduler: Router,
    schedulers: Connections,
    strangers: Connections,
    handshakes: Connections,
}

impl Server {
    /// Serves until `shutdown`, then lets calls under way end.
    pub async fn run<L: Listen>(self, listeners: Listeners<L>, shutdown: CancellationToken) {
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
    async fn serve<L: Listen>(self: &Arc<Self>, listener: L, shutdown: &CancellationToken) {
        let clients = Clients {
            scheduler: self.router(None),
            schedulers: Connections::new(if self.tls.is_some() { SCHEDULERS } else { PLAIN }),
            strangers: Connections::new(STRANGERS),
            handshakes: Connections::new(HANDSHAKES),
        };
        let graceful = GracefulShutdown::new();
        while let Some(stream) = endpoints::accept(&listener, shutdown).await {
            let (server, clients, watcher) = (Arc::clone(self), clients.clone(), graceful.watcher());
            tokio::spawn(async move {
                if let Err(error) = server.connection(stream, clients, watcher).await {
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

    /// Serves a connection at the listener for the verbs.
    async fn connection(
        self: Arc<Self>,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        clients: Clients,
        watcher: Watcher,
    ) -> Result<(), DisconnectReason> {
        let Some(tls) = &self.tls else {
            let open = clients.schedulers.open();
            let service = TowerToHyperService::new(open.counting(clients.scheduler));
            let serving = watcher.watch(http1().serve_connection(TokioIo::new(stream), service));
            return until_displaced(&open, async { Ok(serving.await?) }).await;
        };
        let stream = handshake(tls, stream, &clients.handshakes).await?;
        let (_, session) = stream.get_ref();
        let is_http2 = session.alpn_protocol() == Some(b"h2");
        let certificate = session.peer_certificates().and_then(|chain| chain.first());
        let stranger = tls.check_client(certificate.map(|certificate| &**certificate)).err();
        let is_known = stranger.is_none();
        let open = if is_known { clients.schedulers.open() } else { clients.strangers.open() };
        let router = match stranger {
            None => clients.scheduler,
            Some(stranger) => self.router(Some(stranger)),
        };
        let (stream, service) = (TokioIo::new(stream), TowerToHyperService::new(open.counting(router)));
        let serving = async {
            match is_http2 {
                true => watcher.watch(http2(is_known).serve_connection(stream, service)).await?,
                false => watcher.watch(http1().serve_connection(stream, service)).await?,
            }
            Ok(())
        };
        let served = until_displaced(&open, serving);
        if is_known {
            return served.await;
        }
        tokio::time::timeout(STAY, served).await.map_err(|_| DisconnectReason::Overstayed)?
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

    /// Verbs, probes and metrics; to a `stranger` the verbs are forbidden, and its bodies are not read.
    fn router(self: &Arc<Self>, stranger: Option<UntrustedClient>) -> Router {
        let stranger = stranger.map(|stranger| Arc::from(stranger.to_string()));
        let mut verbs = Endpoints::default();
        for verb in VERBS {
            let (server, stranger) = (Arc::clone(self), stranger.clone());
            let call = move |request: Request| async move {
                match stranger {
                    Some(why) => forbidden(&why),
                    None => server.verb(verb, request).await,
                }
            };
            verbs = verbs.post(&format!("/{verb}"), call);
        }
        self.counted(verbs.and(self.endpoints()).into_router(), &VERBS)
    }

    /// Counts and times the calls of a router that has these verbs.
    fn counted(self: &Arc<Self>, router: Router, verbs: &'static [&'static str]) -> Router {
        let count = async move |State(server): State<Arc<Self>>, request: Request, next: Next| {
            let began = gantry_runtime::now();
            let path = request.uri().path().trim_start_matches('/');
            let verb = verbs.iter().find(|verb| **verb == path).copied();
            let response = next.run(request).await;
            let metrics = &server.service.metrics;
            let (label, code) = (verb.unwrap_or("other"), response.status().as_u16());
            metrics.calls.get_or_create(&Call { verb: label, code }).inc();
            if let Some(verb) = verb {
                let seconds = (gantry_runtime::now() - began).as_secs_f64();
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
        // Its bytes are accounted until the call ends.
        let (body, _bytes) = match self.bodies.read(request).await {
            Ok(read) => read,
            Err(error) => return error.into_response(),
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
            Err(refusal @ Refusal::Unavailable(_)) => unavailable(&refusal.to_string()),
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
            return Err(UnavailableReason::Cold.to_string());
        }
        match self.health.age() {
            Some(age) if age <= self.stale_after => Ok("ok".to_owned()),
            Some(age) => {
                let age = age.as_secs();
                Err(format!(
                    "no response from the API server for {age} s; deciding by the state of that time"
                ))
            }
            None => Err("no response from the API server yet".to_owned()),
        }
    }

    fn metrics(&self) -> String {
        let age = self.health.age();
        let Service { store, metrics, .. } = &self.service;
        for took in store.take_plan_times() {
            metrics.plans.observe(took.as_secs_f64());
        }
        for tls in [&self.tls, &self.webhook_tls].into_iter().flatten() {
            metrics.certificates(&tls.expiries());
        }
        let leads = self.leadership.leads();
        let reading = store.read(|index| GaugeReading::of(index, store.memory()));
        metrics.page_of(&reading, age, leads)
    }
}

fn forbidden(why: &str) -> Response {
    text(StatusCode::FORBIDDEN, why)
}

/// The TLS handshake of a connection, which is one of `handshakes` until it ends.
pub(crate) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    tls: &Tls,
    stream: S,
    handshakes: &Connections,
) -> Result<TlsStream<S>, DisconnectReason> {
    let open = handshakes.open();
    let accepted = TlsAcceptor::from(tls.config()).accept(stream);
    let accepted = async { Ok(tokio::time::timeout(HANDSHAKE, accepted).await??) };
    until_displaced(&open, accepted).await
}

/// Serves until another connection takes the place of this one.
pub(crate) async fn until_displaced<T>(
    open: &OpenConnection,
    serving: impl Future<Output = Result<T, DisconnectReason>>,
) -> Result<T, DisconnectReason> {
    tokio::select! {
        served = serving => served,
        () = open.closed() => Err(DisconnectReason::Displaced),
    }
}

pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    let form = headers.get(header::CONTENT_TYPE).and_then(|form| form.to_str().ok());
    let form = form.and_then(|form| form.split(';').next());
    form.is_some_and(|form| form.trim().eq_ignore_ascii_case("application/json"))
}

pub(crate) fn http1() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(HTTP1_BUFFER);
    http
}

/// A scheduler, which `is_known`, has as many calls open as a gang has members.
pub(crate) fn http2(is_known: bool) -> http2::Builder<TokioExecutor> {
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
pub(crate) mod tests;
