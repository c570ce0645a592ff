//! The answers over plain HTTP, on an address of loopback. There is no authentication: users with the right to forward
//! ports to the extender's pod may ask. One answer is made at a time, and questions are limited in number.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use gantry_gang::GangKey;
use gantry_runtime::http::{Endpoints, serve, text, unavailable};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::ReportError;
use crate::http_guard::{Rate, host_of, is_known, json, too_many};
use crate::index::{GangReport, GangState, Index, PodReport, Store, UnavailableReason};
use crate::lease::Leadership;
use crate::metrics::{ExplainRequest, Metrics};

/// Questions a second, and at once, of all clients.
const QUESTIONS: (f64, f64) = (2.0, 20.0);

/// The text of a status 404 about a pod or gang that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownObject {
    /// What does not exist, with a suggestion.
    pub unknown: String,
}

/// The path of the report on a pod, a [`crate::index::PodReport`].
pub fn pod_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/explain/pods/{namespace}/{name}")
}

/// The path of the report on a gang, a [`crate::index::GangReport`].
pub fn gang_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/explain/gangs/{namespace}/{name}")
}

/// The path of the queue, a list of [`crate::index::GangState`].
pub const QUEUE_PATH: &str = "/api/v1/explain/queue";

/// What answers.
pub(crate) struct Answers {
    /// The cluster.
    pub(crate) store: Arc<Store>,
    /// The resources that are named where a pod asks for none.
    pub(crate) resources: Vec<String>,
    /// Whether this process decides.
    pub(crate) leadership: Arc<Leadership>,
    /// Counts questions.
    pub(crate) metrics: Arc<Metrics>,
}

/// Answers that are being served.
struct AnswersServer {
    answers: Answers,
    questions: Rate,
    /// Held while an answer is made.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Answers {
    /// Serves until `shutdown`.
    pub(crate) async fn run(self, listener: TcpListener, shutdown: CancellationToken) {
        serve(listener, AnswersServer::router(self), &shutdown).await;
    }

    fn pod(&self, (namespace, name): &(String, String)) -> Result<PodReport, ReportError> {
        super::pod(&self.store, &self.resources, namespace, name)
    }

    fn gang(&self, (namespace, name): &(String, String)) -> Result<GangReport, ReportError> {
        super::gang(&self.store, &self.queue_order(), namespace, name)
    }

    fn queue(&self) -> Vec<GangState> {
        super::queue(&self.store, &self.queue_order())
    }

    fn queue_order(&self) -> Vec<Arc<GangKey>> {
        self.store.read(Index::gangs_in_line)
    }
}

impl AnswersServer {
    fn router(answers: Answers) -> Router {
        let serving = Arc::new(Self { answers, questions: Rate::new(QUESTIONS), turn: Arc::default() });
        let share = || Arc::clone(&serving);
        let (pod, gang, queue, guarding) = (share(), share(), share(), share());
        let endpoints = Endpoints::default()
            .get(&pod_path("{namespace}", "{name}"), async move |Path(named): Path<(String, String)>| {
                pod.answer(move |answers| answers.pod(&named)).await
            })
            .get(&gang_path("{namespace}", "{name}"), async move |Path(named): Path<(String, String)>| {
                gang.answer(move |answers| answers.gang(&named)).await
            })
            .get(QUEUE_PATH, async move || queue.answer(|answers| Ok(answers.queue())).await);
        let guard = middleware::from_fn(move |request: Request, next: Next| {
            let serving = Arc::clone(&guarding);
            async move { serving.guard(request, next).await }
        });
        endpoints.into_router().layer(guard)
    }

    async fn guard(&self, request: Request, next: Next) -> Response {
        let response = match host_of(&request) {
            host if !is_known(host, &[]) => text(StatusCode::FORBIDDEN, "call localhost or an address"),
            _ if !self.questions.take() => too_many("too many questions; try again"),
            _ => next.run(request).await,
        };
        let code = response.status().as_u16();
        self.answers.metrics.explain_requests.get_or_create(&ExplainRequest { code }).inc();
        response
    }

    /// Makes an answer while no other is made.
    async fn answer<T: Serialize + Send + 'static>(
        self: &Arc<Self>,
        make: impl FnOnce(&Answers) -> Result<T, ReportError> + Send + 'static,
    ) -> Response {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if !self.answers.leadership.leads() {
            return unavailable(&self.answers.leadership.why_not());
        }
        if !self.answers.store.snapshot().synced {
            return unavailable(&UnavailableReason::Cold.to_string());
        }
        let serving = Arc::clone(self);
        let made = tokio::task::spawn_blocking(move || {
            // Held until the answer is made, even if its client is gone by then.
            let _turn = turn;
            make(&serving.answers)
        });
        match made.await {
            Ok(Ok(report)) => json(&report),
            Ok(Err(ReportError::Unknown(unknown))) => {
                (StatusCode::NOT_FOUND, json(&UnknownObject { unknown })).into_response()
            }
            Ok(Err(error @ ReportError::Unreadable(_))) => {
                text(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string())
            }
            // A panic there has ended the index as well; the probes report it.
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
