//! An in-memory API server: the part of Kubernetes' HTTP API that the daemons' clients use, exactly as they expect it.
//! Bodies are bounded, and whatever is wrong is answered as a `Status`. No authentication, no admission beyond a few defaults, no persistence; loopback only.

mod kinds;
pub(crate) mod meta;
mod objects;
mod pods;
mod request;
mod selector;
mod store;
mod view;
mod watch;

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kinds::Kind;
use objects::{DeleteOptions, Objects, describe};
use request::{ApiError, Part, PatchKind, Query, Target, not_allowed};
use selector::Selector;
use store::Store;
use view::Form;
use watch::Watch;

/// The version of Kubernetes that this cluster behaves like.
pub const KUBERNETES_VERSION: &str = "v1.36.2";

/// A running API server. It ends when its token is cancelled.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    service: Arc<Service>,
}

/// What may be set.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Writes that are remembered for watches.
    pub history: usize,
    /// How often a watch that allows it gets a bookmark.
    pub bookmark_every: Duration,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self { history: 4096, bookmark_every: Duration::from_secs(15) }
    }
}

impl ApiServer {
    /// Starts a server on a free port of loopback, with the namespaces that every cluster has.
    ///
    /// # Errors
    /// No port can be had.
    pub async fn start(options: &ApiOptions, stop: CancellationToken) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let objects = Arc::new(Objects { store: Store::new(options.history) });
        seed(&objects);
        let service = Arc::new(Service {
            objects: Arc::clone(&objects),
            bookmark_every: options.bookmark_every,
            stop: stop.clone(),
        });
        tokio::spawn(serve(listener, Arc::clone(&service), stop));
        Ok(Self { address, service })
    }

    /// Serves one more connection, such as a pipe in memory, until it ends.
    pub async fn serve_connection(&self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        serve_connection(stream, Arc::clone(&self.service)).await;
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig for it, as text.
    pub fn kubeconfig(&self) -> String {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "gantry-demo", "cluster": {"server": self.url()}}],
            "users": [{"name": "anyone", "user": {}}],
            "contexts": [{"name": "gantry-demo", "context": {"cluster": "gantry-demo", "user": "anyone", "namespace": "default"}}],
            "current-context": "gantry-demo",
        });
        // JSON is YAML.
        format!("{config:#}\n")
    }

    /// A client of it.
    ///
    /// # Errors
    /// The client's constructor failed, which does not happen for a loopback address.
    pub fn client(&self) -> Result<kube::Client, ClientError> {
        let url = self.url().parse()?;
        let mut config = kube::Config::new(url);
        config.proxy_url = None;
        // Without retries, so that the caller sees every refusal.
        config.default_retry = false;
        Ok(kube::Client::try_from(config)?)
    }

    /// How many writes there were: a cheap sign of life or of rest.
    pub fn revision(&self) -> u64 {
        *self.service.objects.store.revisions().borrow()
    }
}

/// Why no client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is no URL.
    #[error("API server address")]
    Address(#[from] http::uri::InvalidUri),
    /// The client could not be set up.
    #[error("API client")]
    Client(#[from] kube::Error),
}

fn seed(objects: &Objects) {
    let Some(kind) = Kind::find("", "v1", "namespaces") else {
        return;
    };
    for name in ["default", "kube-system", "kube-node-lease", "gantry-system"] {
        let namespace = json!({"metadata": {"name": name}, "status": {"phase": "Active"}});
        if let Err(error) = objects.create(kind, "", namespace, false) {
            tracing::error!(%error, name, "namespace not created");
        }
    }
}

async fn serve(listener: TcpListener, service: Arc<Service>, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Small answers must not wait for more to send.
        let _ = stream.set_nodelay(true);
        connections.spawn(serve_connection(stream, Arc::clone(&service)));
    }
    connections.close();
    connections.wait().await;
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    service: Arc<Service>,
) {
    let stop = service.stop.clone();
    let answer = service_fn(move |request| {
        let service = Arc::clone(&service);
        async move { Ok::<_, Infallible>(service.answer(request).await) }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
    if let Some(Err(error)) = stop.run_until_cancelled(connection).await {
        tracing::trace!(%error, "connection ended");
    }
}

/// The body of every answer.
type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Largest request body, as Kubernetes has it.
const MAX_BODY: usize = 3 * 1024 * 1024;
/// Longest watch; the real server ends one at random between half an hour and an hour.
const MAX_WATCH: Duration = Duration::from_secs(1800);

/// What the handlers share.
#[derive(Debug)]
struct Service {
    objects: Arc<Objects>,
    /// How often a watch that allows it gets a bookmark.
    bookmark_every: Duration,
    /// Ends all watches.
    stop: CancellationToken,
}

impl Service {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let response = match self.handle(request).await {
            Ok(response) => response,
            Err(error) => json_response(error.code(), &error.status()),
        };
        tracing::trace!(%method, %uri, status = response.status().as_u16(), "request");
        response
    }

    async fn handle(&self, request: Request<Incoming>) -> Result<Response<Body>, ApiError> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        let form = Form::accepted(header_text(&parts.headers, &header::ACCEPT));
        match Target::parse(path)? {
            Target::Discovery(ask) if parts.method == Method::GET => {
                kinds::discover(&ask).map(|document| json_response(StatusCode::OK, &document))
            }
            Target::Discovery(_) => Err(not_allowed(&parts.method, path)),
            Target::Collection { kind, namespace } => match parts.method {
                Method::GET if query.flag("watch") => self.watch(kind, namespace, form, &query),
                Method::GET => self.list(kind, namespace.as_deref(), form, &query),
                Method::POST => {
                    let object = read_json(body).await?;
                    let namespace = namespace.unwrap_or_default();
                    let created = self.objects.create(kind, &namespace, object, query.dry_run())?;
                    Ok(json_response(StatusCode::CREATED, &Form::Whole.object(kind, &created)))
                }
                Method::DELETE => self.delete_all(kind, namespace.as_deref(), &query),
                _ => Err(not_allowed(&parts.method, path)),
            },
            Target::Object { kind, namespace, name, part } => {
                let ask = Ask { kind, namespace, name, part, form, query };
                self.one(&parts, body, ask).await
            }
        }
    }

    async fn one(
        &self,
        parts: &http::request::Parts,
        body: Incoming,
        ask: Ask,
    ) -> Result<Response<Body>, ApiError> {
        let Ask { kind, namespace, name, part, form, query } = ask;
        let key = self.objects.place(kind, &namespace, &name)?;
        let shown = |object: &Value| json_response(StatusCode::OK, &form.object(kind, object));
        match (&parts.method, part) {
            (&Method::GET, Part::Main | Part::Status) => {
                let object = self.objects.store.get(&key);
                object.map(|object| shown(&object)).ok_or_else(|| ApiError::NotFound(describe(kind, &name)))
            }
            (&Method::PUT, Part::Main | Part::Status) => {
                let object = read_json(body).await?;
                let stored = self.objects.replace(kind, &key, part, object, query.dry_run())?;
                Ok(shown(&stored))
            }
            (&Method::PATCH, Part::Main | Part::Status) => {
                let patch_kind = PatchKind::parse(header_text(&parts.headers, &header::CONTENT_TYPE))?;
                let patch = read_json(body).await?;
                let stored = self.objects.patch(kind, &key, part, (patch_kind, &patch), query.dry_run())?;
                Ok(shown(&stored))
            }
            (&Method::DELETE, Part::Main) => {
                let options = delete_options(&query, &read_body(body).await?)?;
                let last = self.objects.delete(kind, &key, &options, query.dry_run())?;
                Ok(shown(&last))
            }
            (&Method::POST, Part::Binding) => {
                let binding = read_json(body).await?;
                self.objects.bind(&key, &binding, query.dry_run())?;
                let done = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
                Ok(json_response(StatusCode::CREATED, &done))
            }
            _ => Err(not_allowed(&parts.method, parts.uri.path())),
        }
    }

    fn list(
        &self,
        kind: &'static Kind,
        namespace: Option<&str>,
        form: Form,
        query: &Query,
    ) -> Result<Response<Body>, ApiError> {
        let selector = Selector::parse(kind, query.get("fieldSelector"), query.get("labelSelector"))?;
        let (objects, revision) = self.objects.store.list(kind.storage, namespace);
        let selected = objects.iter().map(|(_, object)| &**object).filter(|object| selector.matches(object));
        Ok(json_response(StatusCode::OK, &form.list(kind, selected, revision)))
    }

    fn watch(
        &self,
        kind: &'static Kind,
        namespace: Option<String>,
        form: Form,
        query: &Query,
    ) -> Result<Response<Body>, ApiError> {
        let timeout = query.number("timeoutSeconds")?.map_or(MAX_WATCH, Duration::from_secs);
        let streaming_list = query.flag("sendInitialEvents");
        let ask = Watch {
            kind,
            namespace,
            selector: Selector::parse(kind, query.get("fieldSelector"), query.get("labelSelector"))?,
            form,
            from: query.number("resourceVersion")?.filter(|revision| *revision != 0 && !streaming_list),
            mark_initial: streaming_list,
            bookmarks: query.flag("allowWatchBookmarks").then_some(self.bookmark_every),
            timeout: timeout.min(MAX_WATCH),
        };
        let events = watch::stream(ask, Arc::clone(&self.objects), self.stop.clone());
        let body = StreamBody::new(events).boxed_unsync();
        Ok(response(StatusCode::OK, body))
    }

    fn delete_all(
        &self,
        kind: &'static Kind,
        namespace: Option<&str>,
        query: &Query,
    ) -> Result<Response<Body>, ApiError> {
        let selector = Selector::parse(kind, query.get("fieldSelector"), query.get("labelSelector"))?;
        let options = delete_options(query, &[])?;
        let (objects, revision) = self.objects.store.list(kind.storage, namespace);
        let mut deleted = Vec::new();
        for (key, object) in objects.iter().filter(|(_, object)| selector.matches(object)) {
            match self.objects.delete(kind, key, &options, query.dry_run()) {
                // Another client was faster.
                Err(ApiError::NotFound(_)) => {}
                result => {
                    result?;
                    deleted.push(&**object);
                }
            }
        }
        Ok(json_response(StatusCode::OK, &Form::Whole.list(kind, deleted.into_iter(), revision)))
    }
}

struct Ask {
    kind: &'static Kind,
    namespace: String,
    name: String,
    part: Part,
    form: Form,
    query: Query,
}

fn header_text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn delete_options(query: &Query, body: &[u8]) -> Result<DeleteOptions, ApiError> {
    let mut options = if body.is_empty() {
        DeleteOptions::default()
    } else {
        serde_json::from_slice(body)
            .map_err(|error| ApiError::BadRequest(format!("DeleteOptions: {error}")))?
    };
    if let Some(seconds) = query.number("gracePeriodSeconds")? {
        options.grace_period_seconds = Some(seconds);
    }
    Ok(options)
}

async fn read_body(body: Incoming) -> Result<Bytes, ApiError> {
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::TooLarge(MAX_BODY)),
        Err(error) => Err(ApiError::BadRequest(format!("the body broke off: {error}"))),
    }
}

async fn read_json(body: Incoming) -> Result<Value, ApiError> {
    let bytes = read_body(body).await?;
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::BadRequest(format!("the body is no JSON: {error}")))
}

fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    response(status, Full::new(Bytes::from(value.to_string())).boxed_unsync())
}

fn response(status: StatusCode, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
