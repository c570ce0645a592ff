//! The mutating admission webhook: `POST /mutate` over TLS, on a listener of its own. Off unless `--webhook-listen` names an
//! address. It sets `schedulerName` of new pods that ask for watched resources, for clusters without
//! MutatingAdmissionPolicy. [`review`] decides.
//!
//! Every replica answers, also one that does not lead or does not know the cluster yet: the decision needs the pod alone.
//! Clients are not authenticated, because the API server has no certificate by default; they learn nothing, and change
//! nothing. Connections, requests, bodies and the time of each are bounded.

pub mod review;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use gantry_runtime::http::{self as endpoints, Connections, Endpoints, text};
use http::StatusCode;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::http_guard::{json_bytes, too_many};
use crate::metrics::{Metrics, Outcome};
use crate::server::{self, Bodies, BodyError, DisconnectReason, HANDSHAKES, is_json, until_displaced};
use crate::tls::Tls;
pub(crate) use review::Assignment;

/// Largest request body in bytes. etcd takes objects of 1.5 MiB.
const BODY: usize = 4 * 1024 * 1024;
/// Requests at once.
const REQUESTS: usize = 64;
/// Time for a whole request. The chart's `timeoutSeconds` is shorter.
const LIMIT: Duration = Duration::from_secs(5);
/// Connections. Each API server uses one.
const CONNECTIONS: usize = 64;
/// How long new connections are accepted after shutdown has begun: the Service still directs some here.
const LINGER: Duration = Duration::from_secs(3);
/// How long requests under way may take then.
const DRAIN: Duration = Duration::from_secs(1);

/// The webhook.
pub(crate) struct Webhook {
    /// What it decides.
    pub(crate) assignment: Assignment,
    /// Its certificate.
    pub(crate) tls: Arc<Tls>,
    /// Counts reviews.
    pub(crate) metrics: Arc<Metrics>,
}

/// A webhook that is being served.
struct WebhookServer {
    assignment: Assignment,
    metrics: Arc<Metrics>,
    bodies: Bodies,
    requests: Semaphore,
    limit: Duration,
}

/// Why a request has no review.
#[derive(Debug, thiserror::Error)]
enum RefusedReview {
    #[error("Content-Type must be application/json")]
    NoJson,
    #[error("body of more than {BODY} bytes")]
    TooLarge,
    #[error("not received within {} s", LIMIT.as_secs())]
    Slow,
    #[error("more than {REQUESTS} requests at once; try again")]
    Crowded,
    #[error(transparent)]
    Body(BodyError),
    #[error(transparent)]
    Malformed(review::ReviewError),
}

impl From<BodyError> for RefusedReview {
    fn from(error: BodyError) -> Self {
        match error {
            // The advice in its text is for kube-scheduler.
            BodyError::TooLarge(_) => Self::TooLarge,
            error => Self::Body(error),
        }
    }
}

impl RefusedReview {
    /// The label of its metric.
    fn label(&self) -> &'static str {
        match self {
            Self::NoJson | Self::Malformed(_) => "malformed",
            Self::TooLarge | Self::Slow | Self::Crowded | Self::Body(_) => "refused",
        }
    }

    fn into_response(self) -> Response {
        let message = self.to_string();
        match self {
            Self::NoJson => text(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message),
            Self::TooLarge => text(StatusCode::PAYLOAD_TOO_LARGE, &message),
            Self::Slow => text(StatusCode::REQUEST_TIMEOUT, &message),
            Self::Crowded => too_many(&message),
            Self::Body(error) => error.into_response(),
            Self::Malformed(_) => text(StatusCode::BAD_REQUEST, &message),
        }
    }
}

/// The connections of the listener.
#[derive(Clone)]
struct Clients {
    router: Router,
    handshakes: Connections,
    open: Connections,
}

impl Webhook {
    /// Serves until a moment after `shutdown`.
    pub(crate) async fn run(self, listener: TcpListener, shutdown: CancellationToken) {
        let Self { assignment, tls, metrics } = self;
        let clients = Clients {
            router: WebhookServer::new(assignment, metrics).router(),
            handshakes: Connections::new(HANDSHAKES),
            open: Connections::new(CONNECTIONS),
        };
        let closing = CancellationToken::new();
        let lingering = async {
            shutdown.cancelled().await;
            tokio::time::sleep(LINGER).await;
            closing.cancel();
        };
        tokio::join!(serve(listener, tls, clients, &closing), lingering);
    }
}

async fn serve(listener: TcpListener, tls: Arc<Tls>, clients: Clients, closing: &CancellationToken) {
    let graceful = GracefulShutdown::new();
    while let Some(stream) = endpoints::accept(&listener, closing).await {
        let (tls, clients, watcher) = (Arc::clone(&tls), clients.clone(), graceful.watcher());
        tokio::spawn(async move {
            if let Err(error) = connection(stream, &tls, clients, watcher).await {
                tracing::debug!(%error, "connection of the webhook ended");
            }
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(DRAIN, graceful.shutdown()).await;
}

async fn connection(
    stream: TcpStream,
    tls: &Tls,
    clients: Clients,
    watcher: Watcher,
) -> Result<(), DisconnectReason> {
    let stream = server::handshake(tls, stream, &clients.handshakes).await?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let open = clients.open.open();
    let service = TowerToHyperService::new(open.counting(clients.router));
    let stream = TokioIo::new(stream);
    let serving = async {
        match is_http2 {
            true => watcher.watch(server::http2(false).serve_connection(stream, service)).await?,
            false => watcher.watch(server::http1().serve_connection(stream, service)).await?,
        }
        Ok(())
    };
    until_displaced(&open, serving).await
}

impl WebhookServer {
    fn new(assignment: Assignment, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            assignment,
            metrics,
            bodies: Bodies::new(BODY),
            requests: Semaphore::new(REQUESTS),
            limit: LIMIT,
        })
    }

    fn router(self: Arc<Self>) -> Router {
        let mutate = async move |request: Request| self.mutate(request).await;
        Endpoints::default().post("/mutate", mutate).into_router()
    }

    async fn mutate(&self, request: Request) -> Response {
        let reviewed = tokio::time::timeout(self.limit, self.review(request)).await;
        let (outcome, response) = match reviewed.unwrap_or(Err(RefusedReview::Slow)) {
            Ok((outcome, response)) => (outcome, json_bytes(response.into())),
            Err(refused) => {
                // The API server reports it only where the failure policy is Fail.
                tracing::warn!(error = %refused, "a request of the webhook is not answered");
                (refused.label(), refused.into_response())
            }
        };
        self.metrics.webhook_reviews.get_or_create(&Outcome { outcome }).inc();
        response
    }

    /// The outcome, and the AdmissionReview that answers the request.
    async fn review(&self, request: Request) -> Result<(&'static str, Vec<u8>), RefusedReview> {
        if !is_json(request.headers()) {
            return Err(RefusedReview::NoJson);
        }
        let _request = self.requests.try_acquire().map_err(|_| RefusedReview::Crowded)?;
        // Its bytes are accounted until the request ends.
        let (body, _bytes) = self.bodies.read(request).await?;
        let review = self.assignment.review(&body).map_err(RefusedReview::Malformed)?;
        Ok((review.outcome.label(), review.response))
    }
}

#[cfg(test)]
mod tests;
