//! HTTP in front of the service: routes, limits, clear refusals, probes, metrics, orderly end. Plain HTTP/1.1, or HTTP/1.1 and HTTP/2 over
//! TLS; and a second listener for metrics alone. A caller that hangs up ends what was done for it: its future is dropped. No decisions.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_runtime::exposition;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::lease::Leadership;
use crate::metrics::{Call, Reading, Verb};
use crate::service::{Refusal, Service};
use crate::tls::Tls;
use crate::watch::Contact;

/// kube-scheduler's verbs, each at a path of its name.
const VERBS: [&str; 4] = ["filter", "prioritize", "bind", "preempt"];
/// What is served, for those who ask for something else.
const PATHS: &str = "POST /filter, POST /prioritize, POST /bind, POST /preempt, GET /healthz, GET /readyz, GET /standbyz, GET /metrics";
/// What is served at the listener for metrics.
const WATCHERS_PATHS: &str = "GET /healthz, GET /readyz, GET /standbyz, GET /metrics";
/// Connections that the listener for metrics holds at once; who comes then waits. It is open to more than kube-scheduler.
const WATCHERS: usize = 64;
/// Time a client may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time a client may take for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Time a client may take for the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once; who comes then waits to be let in. A scheduler comes once and stays.
const HANDSHAKES: usize = 256;
/// Clients without a certificate that the listener for the verbs holds at once: probes, and whoever else reaches it. One more is sent away.
const MAX_UNAUTHENTICATED: usize = 64;
/// How long such a one may stay; a probe takes a moment.
const STAY: Duration = Duration::from_secs(30);
/// Calls on one HTTP/2 connection at once. kube-scheduler uses one for all its binds, and each member of a gang waits in its own.
const STREAMS: u32 = 4096;
/// A request body of names fits without waiting for the window to open.
const STREAM_WINDOW: u32 = 1024 * 1024;
/// The same for all of a connection.
const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// A client that is silently gone is noticed after two of these.
const PING: Duration = Duration::from_secs(5);
/// Seconds after which one that was refused because another leads, or nobody yet, may try again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// The HTTP server.
pub struct Server {
    /// What it serves.
    pub service: Service,
    /// How old the facts are.
    pub contact: Arc<Contact>,
    /// Whether this process decides.
    pub leadership: Arc<Leadership>,
    /// TLS; without, plain HTTP/1.1.
    pub tls: Option<Arc<Tls>>,
    /// Largest body in bytes.
    pub body_limit: usize,
    /// Without an answer of the API server for so long: not ready.
    pub stale_after: Duration,
    /// How long calls in flight may take after shutdown is asked for.
    pub drain: Duration,
}

type Answer = Response<Full<Bytes>>;

/// What the server listens on.
pub struct Listeners {
    /// For kube-scheduler: everything.
    pub all: TcpListener,
    /// Plain HTTP for metrics and probes, without the verbs.
    pub metrics: Option<TcpListener>,
}

/// Who is on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    /// May be given decisions.
    Scheduler,
    /// Has no certificate.
    Unknown,
    /// Came by the listener for metrics, which has no verbs.
    Watcher,
}

/// Why a connection ended that was not to end.
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

impl Server {
    /// Serves until `shutdown`, then lets calls in flight end.
    pub async fn run(self, listeners: Listeners, shutdown: CancellationToken) {
        let server = Arc::new(self);
        let graceful = GracefulShutdown::new();
        let Listeners { all, metrics } = listeners;
        let unauthenticated = Arc::new(Semaphore::new(MAX_UNAUTHENTICATED));
        let schedulers = server.admit(all, HANDSHAKES, &shutdown, |server, stream, place| {
            server.connection(stream, place, Arc::clone(&unauthenticated), graceful.watcher())
        });
        let watchers = async {
            let Some(metrics) = metrics else { return };
            let serve = |server: Arc<Self>, stream, place| {
                let serving = server.http1(stream, Client::Watcher, graceful.watcher());
                async move {
                    let _place = place;
                    serving.await
                }
            };
            server.admit(metrics, WATCHERS, &shutdown, serve).await;
        };
        tokio::join!(schedulers, watchers);
        // Whoever waits for others of its gang would wait in vain: it comes again, here or to who leads then.
        let store = &server.service.store;
        if !store.is_broken() {
            store.update(crate::index::Index::stand_down);
        }
        if tokio::time::timeout(server.drain, graceful.shutdown())
            .await
            .is_err()
        {
            tracing::warn!("calls still in flight at the end of the drain time");
        }
    }

    /// Accepts connections until `shutdown`, as long as there are fewer than `limit` that keep their place, and has each served.
    async fn admit<S>(
        self: &Arc<Self>,
        listener: TcpListener,
        limit: usize,
        shutdown: &CancellationToken,
        serve: impl Fn(Arc<Self>, TcpStream, OwnedSemaphorePermit) -> S,
    ) where
        S: Future<Output = Result<(), Ended>> + Send + 'static,
    {
        let room = Arc::new(Semaphore::new(limit));
        let next = async || {
            let place = Arc::clone(&room).acquire_owned().await;
            (place, listener.accept().await)
        };
        // Nobody closes the room.
        while let Some((Ok(place), accepted)) = shutdown.run_until_cancelled(next()).await {
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, or the client is gone already: neither ends the server.
                    tracing::warn!(%error, "connection not accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            // Answers are one write; waiting to fill a packet only costs time.
            let _ = stream.set_nodelay(true);
            let served = serve(Arc::clone(self), stream, place);
            tokio::spawn(async move {
                if let Err(error) = served.await {
                    tracing::debug!(%error, "connection ended");
                }
            });
        }
    }

    /// Serves a connection at the listener for the verbs. `place` is its place among those that are not known yet.
    async fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        place: OwnedSemaphorePermit,
        unauthenticated: Arc<Semaphore>,
        watcher: Watcher,
    ) -> Result<(), Ended> {
        let Some(tls) = &self.tls else {
            drop(place);
            return self.http1(stream, Client::Scheduler, watcher).await;
        };
        let handshake = TlsAcceptor::from(tls.config()).accept(stream);
        let stream = tokio::time::timeout(HANDSHAKE, handshake).await??;
        drop(place);
        let (_, session) = stream.get_ref();
        let is_http2 = session.alpn_protocol() == Some(b"h2");
        if !tls.wants_clients() || session.peer_certificates().is_some() {
            return match is_http2 {
                true => self.http2(stream, Client::Scheduler, watcher).await,
                false => self.http1(stream, Client::Scheduler, watcher).await,
            };
        }
        let _place = unauthenticated.try_acquire_owned().map_err(|_| Ended::Crowded)?;
        let serving = async {
            match is_http2 {
                true => self.http2(stream, Client::Unknown, watcher).await,
                false => self.http1(stream, Client::Unknown, watcher).await,
            }
        };
        let served = tokio::time::timeout(STAY, serving).await;
        served.unwrap_or(Err(Ended::Overstayed))
    }

    async fn http1<S>(self: Arc<Self>, stream: S, client: Client, watcher: Watcher) -> Result<(), Ended>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        let serve = service_fn(move |request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(request, client).await) }
        });
        watcher
            .watch(http.serve_connection(TokioIo::new(stream), serve))
            .await?;
        Ok(())
    }

    async fn http2<S>(self: Arc<Self>, stream: S, client: Client, watcher: Watcher) -> Result<(), Ended>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING);
        if client == Client::Scheduler {
            http.max_concurrent_streams(STREAMS)
                // All binds of a gang may be given up at once.
                .max_pending_accept_reset_streams(STREAMS as usize)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW);
        }
        let serve = service_fn(move |request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(request, client).await) }
        });
        watcher
            .watch(http.serve_connection(TokioIo::new(stream), serve))
            .await?;
        Ok(())
    }

    async fn answer(&self, request: Request<Incoming>, client: Client) -> Answer {
        let began = Instant::now();
        let path = request.uri().path();
        let verb = VERBS
            .into_iter()
            .find(|verb| client != Client::Watcher && path.strip_prefix('/') == Some(*verb));
        let answer = match verb {
            Some(verb) => self.verb(verb, request, client).await,
            None => self.look(&request, client),
        };
        let verb = verb.unwrap_or("other");
        let metrics = &self.service.metrics;
        let code = answer.status().as_u16();
        metrics.calls.get_or_create(&Call { verb, code }).inc();
        if verb != "other" {
            metrics
                .seconds
                .get_or_create(&Verb { verb })
                .observe(began.elapsed().as_secs_f64());
        }
        answer
    }

    /// Probes and metrics.
    fn look(&self, request: &Request<Incoming>, client: Client) -> Answer {
        match request.uri().path() {
            "/healthz" => get(request, || plain(StatusCode::OK, "ok")),
            "/readyz" => get(request, || self.ready()),
            "/standbyz" => get(request, || self.fresh()),
            "/metrics" => get(request, || self.metrics(request)),
            path => {
                let there_are = match client {
                    Client::Watcher => WATCHERS_PATHS,
                    _ => PATHS,
                };
                let text = format!("no {path:?} here; there are {there_are}");
                plain(StatusCode::NOT_FOUND, &text)
            }
        }
    }

    async fn verb(&self, verb: &'static str, request: Request<Incoming>, client: Client) -> Answer {
        if client != Client::Scheduler {
            return plain(
                StatusCode::FORBIDDEN,
                "decisions are for clients with a certificate of --client-ca",
            );
        }
        if request.method() != Method::POST {
            return not_allowed(request.method(), "POST");
        }
        if !is_json(&request) {
            return plain(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "Content-Type must be application/json",
            );
        }
        let body = match self.body(request).await {
            Ok(body) => body,
            Err(answer) => return answer,
        };
        let _call = self.leadership.called();
        let Some(term) = self.leadership.term().filter(|_| self.leadership.leads()) else {
            return later(&self.leadership.why_not());
        };
        let result = match verb {
            "filter" => self.service.filter(&body),
            "prioritize" => self.service.prioritize(&body),
            "preempt" => self.service.preempt(&body),
            _ => tokio::select! {
                answered = self.service.bind(&body) => answered,
                // What is under way is not waited for: nobody may write any more who does not lead.
                () = self.leadership.ended(term) => return later(&self.leadership.why_not()),
            },
        };
        match result {
            Ok(answer) => json(answer),
            Err(refusal @ Refusal::Malformed { .. }) => plain(StatusCode::BAD_REQUEST, &refusal.to_string()),
            Err(refusal @ Refusal::Cold) => later(&refusal.to_string()),
        }
    }

    async fn body(&self, request: Request<Incoming>) -> Result<Bytes, Answer> {
        let too_large = || {
            let limit = self.body_limit;
            plain(
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
            Ok(Err(error)) => Err(plain(
                StatusCode::BAD_REQUEST,
                &format!("body cannot be read: {error}"),
            )),
            Err(_) => Err(plain(StatusCode::REQUEST_TIMEOUT, "body did not come in time")),
        }
    }

    fn ready(&self) -> Answer {
        if !self.leadership.leads() {
            return later(&self.leadership.why_not());
        }
        self.fresh()
    }

    /// Whether it leads or not: could it, by what it knows?
    fn fresh(&self) -> Answer {
        if !self.service.store.snapshot().synced {
            return plain(StatusCode::SERVICE_UNAVAILABLE, &Refusal::Cold.to_string());
        }
        match self.contact.last() {
            Some(last) if last.elapsed() <= self.stale_after => plain(StatusCode::OK, "ok"),
            Some(last) => {
                let age = last.elapsed().as_secs();
                let text =
                    format!("no news from the API server for {age} s; answering from what was known then");
                plain(StatusCode::SERVICE_UNAVAILABLE, &text)
            }
            None => plain(
                StatusCode::SERVICE_UNAVAILABLE,
                "no answer from the API server yet",
            ),
        }
    }

    fn metrics(&self, request: &Request<Incoming>) -> Answer {
        let age = self.contact.last().map(|last| last.elapsed());
        let Service { store, metrics, .. } = &self.service;
        for took in store.take_plan_times() {
            metrics.plans.observe(took.as_secs_f64());
        }
        let leads = self.leadership.leads();
        let reading = store.read(Reading::of);
        let page = metrics.page_of(&reading, age, leads);
        let accept = request.headers().get(header::ACCEPT);
        let (form, page) = exposition::page(page, accept.and_then(|accept| accept.to_str().ok()));
        let mut answer = Response::new(Full::new(Bytes::from(page)));
        let form = HeaderValue::from_static(form);
        answer.headers_mut().insert(header::CONTENT_TYPE, form);
        answer
    }
}

fn is_json(request: &Request<Incoming>) -> bool {
    request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|form| form.to_str().ok())
        .and_then(|form| form.split(';').next())
        .is_some_and(|form| form.trim().eq_ignore_ascii_case("application/json"))
}

fn get(request: &Request<Incoming>, answer: impl FnOnce() -> Answer) -> Answer {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        answer()
    } else {
        not_allowed(request.method(), "GET")
    }
}

fn not_allowed(method: &Method, allowed: &'static str) -> Answer {
    let mut answer = plain(
        StatusCode::METHOD_NOT_ALLOWED,
        &format!("{method} is not allowed here, {allowed} is"),
    );
    answer
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static(allowed));
    answer
}

fn json(body: Vec<u8>) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// 503: to be asked again, here or elsewhere.
fn later(text: &str) -> Answer {
    let mut answer = plain(StatusCode::SERVICE_UNAVAILABLE, text);
    answer.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
    answer
}

fn plain(status: StatusCode, text: &str) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(format!("{text}\n"))));
    *answer.status_mut() = status;
    let form = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, form);
    answer
}

#[cfg(test)]
mod tests;
