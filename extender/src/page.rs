//! The web page: the cluster map, nodes, gangs and decisions, for people, at a listener of its own. Read only; off unless
//! `--page-listen` names an address. docs/page.md describes the endpoints.
//!
//! Everything is computed from facts that are shared with the index, outside its lock, at most once a second, and only on
//! request. Requests, streams, the size of a response and the time that a client may take are bounded.

mod model;
mod node;
mod pod;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use gantry_runtime::http::{Endpoints, serve, text, unavailable};
use http::{HeaderValue, StatusCode, header};
use kube::Client;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::http_guard::{Rate, host_of, is_known, json, json_bytes, too_many};
use crate::index::Store;
use crate::lease::Leadership;
use crate::metrics::{Metrics, PageRequest};
use crate::watch::ApiHealth;
use gantry_gang::Levels;
use model::{Condition, Model, View};

/// The files of the page: path, type, content.
const FILES: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page/page.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page/page.js")),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
];

/// Headers of every response. The page loads its own files only, nothing frames it, and no other site reads it.
const HEADERS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-store"),
];

/// Shortest time between two computations, and between two messages of a stream.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a stream is silent before a comment shows that it lives.
const SILENCE: Duration = Duration::from_secs(15);
/// How long a stream lasts. The page opens another one, so that no page keeps others from a stream for ever.
const STREAM: Duration = Duration::from_secs(600);
/// Streams at once. A page without one fetches every 15 seconds.
const STREAMS: usize = 32;
/// Requests a second, and at once, of all clients.
const REQUESTS: (f64, f64) = (50.0, 200.0);
/// Reports about pods a second, and at once, of all clients: each reads a pod from the API server, or takes the lock of
/// the index for as long as it looks at every kind of node.
const LOOKUPS: (f64, f64) = (5.0, 10.0);
/// How long the model is kept after the last request.
const KEPT: Duration = Duration::from_secs(120);

/// What the page shows, and the names by which browsers may call it.
pub(crate) struct Page {
    /// The cluster.
    pub(crate) store: Arc<Store>,
    /// Reads the annotation of a pod that explains its placement.
    pub(crate) client: Client,
    /// When the API server last responded.
    pub(crate) health: Arc<ApiHealth>,
    /// Whether this process decides.
    pub(crate) leadership: Arc<Leadership>,
    /// Counts requests.
    pub(crate) metrics: Arc<Metrics>,
    /// The levels of the fabric, by which nodes are grouped.
    pub(crate) levels: Levels,
    /// Without a response of the API server for so long, the page states that it is not current.
    pub(crate) stale_after: Duration,
    /// Names by which browsers may call the page, in addition to addresses and `localhost`.
    pub(crate) hosts: Vec<String>,
    /// Distinguishes the versions of this process from those of another one.
    pub(crate) run: String,
}

/// A page that is being served.
struct PageServer {
    page: Page,
    model: Arc<tokio::sync::Mutex<Model>>,
    requests: Rate,
    lookups: Rate,
    streams: Arc<Semaphore>,
    /// When the model was last used.
    looked: Mutex<Option<Instant>>,
    shutdown: CancellationToken,
}

impl Page {
    /// Serves until `shutdown`.
    pub(crate) async fn run(self, listener: TcpListener, shutdown: CancellationToken) {
        let serving = PageServer::new(self, shutdown.clone());
        let router = serving.router();
        let forgetting = shutdown.run_until_cancelled(serving.forget());
        let (_, _): ((), Option<Infallible>) = tokio::join!(serve(listener, router, &shutdown), forgetting);
    }
}

impl PageServer {
    fn new(page: Page, shutdown: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            page,
            model: Arc::default(),
            requests: Rate::new(REQUESTS),
            lookups: Rate::new(LOOKUPS),
            streams: Arc::new(Semaphore::new(STREAMS)),
            looked: Mutex::default(),
            shutdown,
        })
    }

    fn router(self: &Arc<Self>) -> Router {
        let mut endpoints = Endpoints::default();
        for (path, kind, content) in FILES {
            let file = move || async move { ([(header::CONTENT_TYPE, kind)], content) };
            endpoints = endpoints.get(path, file);
        }
        let page = || Arc::clone(self);
        let (cluster, gangs, node, gang, pod, events) = (page(), page(), page(), page(), page(), page());
        let endpoints = endpoints
            .get("/api/v1/cluster", async move || json_bytes(cluster.view().await.cluster.clone()))
            .get("/api/v1/gangs", async move || json_bytes(gangs.view().await.gangs.clone()))
            .get("/api/v1/nodes/{name}", async move |Path(name): Path<String>| node.node(&name).await)
            .get(
                "/api/v1/gangs/{namespace}/{name}",
                async move |Path((namespace, name)): Path<(String, String)>| gang.gang(&namespace, &name),
            )
            .get(
                "/api/v1/pods/{namespace}/{name}",
                async move |Path((namespace, name)): Path<(String, String)>| pod.pod(&namespace, &name).await,
            )
            .get("/events", async move || events.events());
        endpoints.into_router().layer(middleware::from_fn_with_state(Arc::clone(self), guard))
    }

    /// The cluster as of at most a second ago.
    async fn view(self: &Arc<Self>) -> Arc<View> {
        *self.looked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let mut model = Arc::clone(&self.model).lock_owned().await;
        if !model.is_due(PERIOD) {
            return model.view();
        }
        let serving = Arc::clone(self);
        let refreshed = tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let page = &serving.page;
            model.refresh(&page.store, &page.levels, serving.condition(), &page.run);
            page.metrics.page_refreshes.observe(began.elapsed().as_secs_f64());
            model.view()
        });
        // A panic there has ended the process's index as well; the probes report it.
        refreshed.await.unwrap_or_default()
    }

    /// The condition of the facts as a whole.
    fn condition(&self) -> Condition {
        let Page { store, health, leadership, stale_after, .. } = &self.page;
        if !store.snapshot().synced {
            return Condition::Cold;
        }
        if health.age().is_none_or(|age| age > *stale_after) {
            return Condition::Stale;
        }
        match leadership.leads() {
            true => Condition::Ready,
            false => Condition::Standby(leadership.why_not()),
        }
    }

    /// Frees the model after a while without requests.
    async fn forget(&self) -> Infallible {
        loop {
            tokio::time::sleep(KEPT).await;
            let looked = *self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if looked.is_some_and(|looked| looked.elapsed() >= KEPT) {
                self.model.lock().await.clear();
            }
        }
    }

    async fn node(self: &Arc<Self>, name: &str) -> Response {
        let view = self.view().await;
        let node = self.model.lock().await.node(name);
        match node {
            Some(node) => json(&node::report(&view.version, &node)),
            None if view.condition == Condition::Cold => unavailable(&Condition::Cold.message()),
            None => text(StatusCode::NOT_FOUND, &format!("no node with GPUs is called {name:?}")),
        }
    }

    fn gang(&self, namespace: &str, name: &str) -> Response {
        match self.page.store.read(|index| index.gang_view(namespace, name)) {
            Some(gang) => json(&model::gang_report(gang)),
            None => {
                text(StatusCode::NOT_FOUND, &format!("no gang is called {name:?} in namespace {namespace:?}"))
            }
        }
    }

    async fn pod(&self, namespace: &str, name: &str) -> Response {
        if !self.lookups.take() {
            return too_many("pods are read too often; try again");
        }
        let Page { store, client, .. } = &self.page;
        let Some(found) = store.read(|index| index.observe_pod(namespace, name)) else {
            let text =
                format!("no pod {name:?} in namespace {namespace:?} asks for GPUs that Gantry manages");
            return self::text(StatusCode::NOT_FOUND, &text);
        };
        json(&pod::report(store, client, found).await)
    }

    /// A stream that names the version of the view whenever it changes, at most once a second.
    fn events(self: &Arc<Self>) -> Response {
        let Ok(permit) = Arc::clone(&self.streams).try_acquire_owned() else {
            return unavailable("too many pages are open; fetch from time to time");
        };
        let stream = Stream::open(Arc::clone(self), permit);
        let body = futures::stream::unfold(stream, async |mut stream| {
            let message = stream.next().await?;
            Some((Ok::<_, Infallible>(message), stream))
        });
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
    }
}

/// One open stream.
struct Stream {
    serving: Arc<PageServer>,
    began: Instant,
    last: Option<(Instant, String)>,
    _permit: OwnedSemaphorePermit,
}

#[derive(Serialize)]
struct Message<'a> {
    version: &'a str,
    state: &'static str,
}

impl Stream {
    fn open(serving: Arc<PageServer>, permit: OwnedSemaphorePermit) -> Self {
        serving.page.metrics.page_streams.inc();
        Self { serving, began: Instant::now(), last: None, _permit: permit }
    }

    /// The next message; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some((sent, version)) = &self.last {
                let (sent, version) = (*sent, version.clone());
                self.serving.shutdown.run_until_cancelled(tokio::time::sleep(PERIOD)).await?;
                if self.began.elapsed() >= STREAM {
                    return None;
                }
                if self.serving.view().await.version == version {
                    if sent.elapsed() < SILENCE {
                        continue;
                    }
                    self.last = Some((Instant::now(), version));
                    return Some(Bytes::from_static(b":\n\n"));
                }
            }
            let view = self.serving.view().await;
            self.last = Some((Instant::now(), view.version.clone()));
            let message = Message { version: &view.version, state: view.condition.name() };
            let data = serde_json::to_string(&message).unwrap_or_default();
            return Some(format!("data: {data}\n\n").into());
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.serving.page.metrics.page_streams.dec();
    }
}

/// What every request passes: the name by which the page is called, the rate, the headers.
async fn guard(State(serving): State<Arc<PageServer>>, request: Request, next: Next) -> Response {
    let mut response = match host_of(&request) {
        host if !is_known(host, &serving.page.hosts) => {
            let host = host.unwrap_or_default();
            text(
                StatusCode::FORBIDDEN,
                &format!("the page is not called {host:?}; --page-host permits a name"),
            )
        }
        _ if !serving.requests.take() => too_many("too many requests; try again"),
        _ => next.run(request).await,
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    let code = response.status().as_u16();
    serving.page.metrics.page_requests.get_or_create(&PageRequest { code }).inc();
    response
}

#[cfg(test)]
mod tests;
