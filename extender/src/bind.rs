//! Bind: devices are reserved, one Binding with the grant is written, the outcome is recorded. kube-scheduler trusts
//! the answer, and a success without a Binding leaves the pod assumed forever: every answer but an error follows a
//! Binding that was observed. Members of gangs wait for one another in `barrier`; `deferred` binds those that could not
//! wait that long.

mod barrier;
pub(crate) mod deferred;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Grant, Placement, names};
use gantry_gang::protocol::BindEnd;
use gantry_runtime::chain;
use http::{Method, Request};
use kube::Client;
use kube::core::response::Status;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::assigned::Assignments;
use crate::index::{BindError, BindGrant, BindStep, Outcome, ReadPod, Store, Target};
use crate::lease::Leadership;
use crate::object_memory::Kind;
use crate::pod::{PodFacts, SlimPod};
use crate::watch::stream;
use crate::watched::WatchedResources;

/// The longest time that a Binding waits for kubelet to admit earlier pods of the node, and the interval of checks.
const ADMISSION_LIMIT: Duration = Duration::from_secs(10);
const ADMISSION_INTERVAL: Duration = Duration::from_millis(50);

/// Writes Bindings.
#[derive(Clone)]
pub struct Binder {
    client: Client,
    store: Arc<Store>,
    watched: WatchedResources,
    timeout: Duration,
    /// Bindings of members in flight at once.
    posts: Arc<Semaphore>,
    leadership: Arc<Leadership>,
    /// Where placements are published.
    assignments: Option<Assignments>,
}

/// What a Binding adds to the pod.
#[derive(Clone, Copy)]
struct GrantAnnotations<'a> {
    plan: &'a str,
    annotation: &'a str,
    placement: &'a Arc<Placement>,
}

/// Why a pod was not bound, for kube-scheduler and the condition of the pod.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The decision is no longer valid.
    #[error("{0}")]
    Refused(#[from] BindError),
    /// The remaining members of its gang did not arrive in time.
    #[error(
        "gang {gang}: timed out after {seconds} s waiting for the remaining members; the reservation is kept and this pod is bound once they arrive"
    )]
    BarrierTimeout {
        /// The gang.
        gang: String,
        /// The time limit.
        seconds: u64,
    },
    /// All members arrived, but the decision could not be written.
    #[error("{0}; the reservation is kept and this pod is bound after that")]
    DecisionUnwritten(Arc<str>),
    /// Its gang is decided, but its own reservation was not available in time.
    #[error("gang {gang} is decided, but the devices reserved for this pod are not available: {why}")]
    ReservationUnavailable {
        /// The gang.
        gang: String,
        /// Why it is not available.
        why: Arc<str>,
    },
    /// The pod is gone, or another pod has its name.
    #[error("pod {0} is gone")]
    Gone(String),
    /// Another client bound the pod first.
    #[error("pod is bound to node {0} by another")]
    BoundByOther(String),
    /// The API server refuses the Binding.
    #[error("the API server refuses the binding: {0}")]
    Rejected(String),
    /// The API server is overloaded and did nothing.
    #[error("the API server refuses the binding for now: {0}")]
    Busy(String),
    /// The API server did not answer in time. The Binding may or may not exist.
    #[error("the API server does not answer: {0}")]
    Unanswered(String),
}

impl Failure {
    /// Its name in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Refused(_) | Self::ReservationUnavailable { .. } => "refused",
            Self::BarrierTimeout { .. } => "barrier_timeout",
            Self::DecisionUnwritten(_) => "status_write_failed",
            Self::Gone(_) => "gone",
            Self::BoundByOther(_) => "bound_by_other",
            Self::Rejected(_) | Self::Busy(_) => "rejected",
            Self::Unanswered(_) => "unanswered",
        }
    }
}

/// The body of `POST pods/{name}/binding`. The API server merges its annotations into the pod in the write that binds
/// it, and refuses it if the UID is not the pod's.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Binding<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: BindingMeta<'a>,
    target: BindingTarget<'a>,
}

#[derive(Debug, Serialize)]
struct BindingMeta<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, Cow<'a, str>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct BindingTarget<'a> {
    api_version: &'static str,
    kind: &'static str,
    name: &'a str,
}

/// How an attempt to write the Binding ended, by the answer of the API server.
enum WriteOutcome {
    Yes,
    /// This Binding or another one exists: the pod shows which.
    Conflict(String),
    Missing,
    Never(String),
    /// Refused for now; nothing was done.
    Later(String),
    Perhaps(String),
}

impl Binder {
    /// Writes Bindings with `client` for decisions of `store`, each within `timeout`.
    pub fn new(client: Client, store: Arc<Store>, watched: WatchedResources, timeout: Duration) -> Self {
        Self {
            client,
            store,
            watched,
            timeout,
            posts: Arc::new(Semaphore::new(barrier::POSTS)),
            leadership: Arc::new(Leadership::always()),
            assignments: None,
        }
    }

    /// Publishes the placement of each pod that it binds.
    #[must_use]
    pub(crate) fn publishing(self, assignments: Assignments) -> Self {
        Self { assignments: Some(assignments), ..self }
    }

    /// Writes only while this process leads.
    #[must_use]
    pub fn led(self, leadership: Arc<Leadership>) -> Self {
        Self { leadership, ..self }
    }

    /// Binds a pod. `Ok` means that the Binding exists. It returns within the time limit in every case: kube-scheduler
    /// must get an answer before it gives up.
    ///
    /// # Errors
    /// See [`Failure`]. Devices are released, unless the outcome is unknown: then they stay reserved until the pod
    /// shows it.
    pub async fn bind(&self, target: &Target) -> Result<(), Failure> {
        let began = Instant::now();
        let deadline = began + self.timeout;
        let mut step = match self.store.bind(target, None) {
            Err(BindError::UnknownPod(_)) => {
                // The cache of kube-scheduler was faster than the pod watch, or this process has just started.
                let read = self.read_pod(target, deadline).await?;
                self.store.bind(target, Some(read))?
            }
            step => step?,
        };
        if let BindStep::Wait(awaited) = step {
            step = self.wait(target, &awaited.gang, began + self.patience()).await?;
        }
        match step {
            BindStep::Single(reserved) => self.bind_single(target, &reserved, deadline).await,
            BindStep::Member(reserved) => self.bind_member(target, reserved, deadline).await,
            BindStep::Wait(awaited) => Err(self.timed_out(awaited)),
        }
    }

    async fn bind_single(
        &self,
        target: &Target,
        reserved: &BindGrant,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let granted = match reserved {
            BindGrant::AlreadyBound => return Ok(()),
            BindGrant::Plain => None,
            BindGrant::Grant { plan, annotation, placement } => {
                Some(GrantAnnotations { plan, annotation, placement })
            }
        };
        // If kube-scheduler closes the connection, this future is dropped at any point: then the outcome is unknown, once
        // the Binding may have been sent.
        let mut guard = BindGuard {
            store: &self.store,
            target,
            granted: granted.is_some(),
            outcome: Outcome::Failed,
            member: None,
        };
        if granted.is_some() {
            self.wait_for_admissions(target, deadline).await;
        }
        guard.outcome = Outcome::Unsure;
        let result = self.write(target, granted, deadline).await;
        guard.outcome = match &result {
            Ok(()) => Outcome::Bound,
            Err(Failure::Unanswered(_)) => Outcome::Unsure,
            Err(_) => Outcome::Failed,
        };
        result
    }

    /// Waits until kubelet has admitted the pods that were granted devices of the node before this one, where another
    /// order could make it refuse one. If that takes too long, the pod is bound nevertheless.
    async fn wait_for_admissions(&self, target: &Target, deadline: Instant) {
        let until = (deadline - self.timeout / barrier::KEPT).min(Instant::now() + ADMISSION_LIMIT);
        while self.store.read(|index| index.awaits_admission(target)) && Instant::now() < until {
            tokio::time::sleep(ADMISSION_INTERVAL).await;
        }
    }

    /// Writes the Binding and publishes why the pod is there.
    async fn write(
        &self,
        target: &Target,
        granted: Option<GrantAnnotations<'_>>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let result = self.write_binding(target, granted, deadline).await;
        if let (Ok(()), Some(granted), Some(assignments)) = (&result, granted, &self.assignments) {
            assignments.publish(target, granted.placement);
        }
        result
    }

    async fn write_binding(
        &self,
        target: &Target,
        granted: Option<GrantAnnotations<'_>>,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let plan = granted.map(|granted| granted.plan);
        let written = match tokio::time::timeout_at(deadline, self.post(target, granted)).await {
            Ok(written) => written,
            Err(_) => return Err(Failure::Unanswered("no answer in time".to_owned())),
        };
        match written {
            WriteOutcome::Yes => Ok(()),
            WriteOutcome::Missing => Err(Failure::Gone(full_name(target))),
            WriteOutcome::Never(message) => Err(Failure::Rejected(message)),
            WriteOutcome::Later(message) => Err(Failure::Busy(message)),
            WriteOutcome::Conflict(message) => match self.look(target, plan, deadline).await {
                PodBinding::Ours => Ok(()),
                PodBinding::Other(node) => Err(Failure::BoundByOther(node)),
                PodBinding::Unbound => Err(Failure::Rejected(message)),
                PodBinding::Gone => Err(Failure::Gone(full_name(target))),
                PodBinding::Nothing(why) => Err(Failure::Unanswered(why)),
            },
            WriteOutcome::Perhaps(message) => match self.look(target, plan, deadline).await {
                PodBinding::Ours => Ok(()),
                PodBinding::Other(node) => Err(Failure::BoundByOther(node)),
                PodBinding::Gone => Err(Failure::Gone(full_name(target))),
                // An unbound pod proves nothing: the request may still be in flight.
                PodBinding::Unbound | PodBinding::Nothing(_) => Err(Failure::Unanswered(message)),
            },
        }
    }

    async fn post(&self, target: &Target, granted: Option<GrantAnnotations<'_>>) -> WriteOutcome {
        let mut annotations = BTreeMap::new();
        if let Some(granted) = granted {
            annotations.insert(names::GRANT_ANNOTATION, Cow::Borrowed(granted.annotation));
            // The explanation must not keep a pod from being bound.
            if let Ok(placement) = serde_json::to_string(&**granted.placement) {
                annotations.insert(names::PLACEMENT_ANNOTATION, Cow::Owned(placement));
            }
        }
        let binding = Binding {
            api_version: "v1",
            kind: "Binding",
            metadata: BindingMeta {
                name: &target.name,
                namespace: &target.namespace,
                uid: target.uid.as_str(),
                annotations,
            },
            target: BindingTarget { api_version: "v1", kind: "Node", name: target.node.as_str() },
        };
        // The API server drops requests that it has not carried out when the term of leadership ends: the next leader
        // has listed all others.
        let limit = self
            .leadership
            .lasts()
            .map_or_else(String::new, |lasts| format!("?timeout={}ms", lasts.as_millis().max(1)));
        let path = format!("/api/v1/namespaces/{}/pods/{}/binding{limit}", target.namespace, target.name);
        let request = serde_json::to_vec(&binding).map_err(|error| error.to_string()).and_then(|body| {
            Request::builder()
                .method(Method::POST)
                .uri(path)
                .header(http::header::CONTENT_TYPE, "application/json")
                .body(body)
                .map_err(|error| error.to_string())
        });
        let request = match request {
            Ok(request) => request,
            Err(error) => return WriteOutcome::Never(error),
        };
        match self.client.request::<Status>(request).await {
            Ok(_) => WriteOutcome::Yes,
            Err(kube::Error::Api(status)) => match status.code {
                409 => WriteOutcome::Conflict(status.message.clone()),
                404 => WriteOutcome::Missing,
                408 | 429 => WriteOutcome::Later(status.message.clone()),
                // Refused before anything was done.
                400..=499 => WriteOutcome::Never(status.message.clone()),
                _ => WriteOutcome::Perhaps(status.message.clone()),
            },
            // The answer is no Status, but the Binding may be written: read the pod.
            Err(error) => WriteOutcome::Perhaps(chain(&error)),
        }
    }

    /// Reads the pod to see whether it has this Binding.
    async fn look(&self, target: &Target, plan: Option<&str>, deadline: Instant) -> PodBinding {
        let pod = match self.get(target, deadline).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return PodBinding::Gone,
            Err(why) => return PodBinding::Nothing(why),
        };
        if pod.metadata.uid.as_deref() != Some(target.uid.as_str()) {
            return PodBinding::Gone;
        }
        let annotation = pod.metadata.annotations.as_ref().and_then(|all| all.get(names::GRANT_ANNOTATION));
        let grant = annotation.and_then(|text| Grant::parse(text, &target.uid, &target.node).ok());
        match pod.node() {
            None => PodBinding::Unbound,
            Some(node) if node != target.node.as_str() => PodBinding::Other(node.to_owned()),
            Some(node) => match plan {
                Some(plan) if grant.is_none_or(|grant| grant.plan != plan) => {
                    PodBinding::Other(node.to_owned())
                }
                _ => PodBinding::Ours,
            },
        }
    }

    /// Reads the pod from the API server.
    async fn read_pod(&self, target: &Target, deadline: Instant) -> Result<ReadPod, Failure> {
        let pod = match self.get(target, deadline).await {
            Ok(Some(pod)) if pod.metadata.uid.as_deref() == Some(target.uid.as_str()) => pod,
            Ok(_) => return Err(Failure::Gone(full_name(target))),
            Err(why) => return Err(Failure::Unanswered(why)),
        };
        let request = pod.request(&self.watched);
        let request = request.map_err(|error| BindError::Request(error.to_string()))?;
        Ok(ReadPod { request: Arc::new(request), facts: PodFacts::read(&self.watched, pod) })
    }

    async fn get(&self, target: &Target, deadline: Instant) -> Result<Option<SlimPod>, String> {
        let path = format!("/api/v1/namespaces/{}/pods/{}", target.namespace, target.name);
        let pod = stream::get::<SlimPod>(&self.client, &path, Kind::Pod, self.store.memory());
        match tokio::time::timeout_at(deadline, pod).await {
            // Of one that is too large its node and its grant are known.
            Ok(Ok(pod)) => Ok(pod.map(|pod| pod.object)),
            Ok(Err(error)) => Err(chain(&error)),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }
}

/// The Binding that a pod shows.
enum PodBinding {
    Ours,
    Other(String),
    Unbound,
    Gone,
    Nothing(String),
}

/// Records in the index how a bind ended, also when it is dropped midway.
struct BindGuard<'a> {
    store: &'a Store,
    target: &'a Target,
    granted: bool,
    outcome: Outcome,
    /// How it ended for the gang, if the pod is a member.
    member: Option<BindEnd>,
}

impl Drop for BindGuard<'_> {
    fn drop(&mut self) {
        if !self.granted {
            return;
        }
        let now = gantry_runtime::now();
        self.store.update(|index| {
            if let Some(end) = self.member {
                index.bind_ended(&self.target.uid, end);
            }
            index.finish(now, self.target, self.outcome);
        });
    }
}

fn full_name(target: &Target) -> String {
    format!("{}/{} ({})", target.namespace, target.name, target.uid)
}

#[cfg(test)]
mod tests;
