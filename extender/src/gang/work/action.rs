//! One thing that is done to a pod: the writes for it, and how it is called. When it is done, and how often it is tried, is not decided
//! here.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::{PodUid, Reason, names};
use gantry_gang::GangKey;
use gantry_gang::protocol::Blocker;
use gantry_runtime::chain;
use gantry_runtime::events::Message;
use http::{Method, Request};
use kube::Client;
use kube::core::Status;
use serde_json::{Value, json};

use tokio::time::error::Elapsed;

use crate::event;
use crate::eviction;
use crate::object_memory::{Kind, ObjectMemory};
use crate::pod::SlimPod;
use crate::watch::stream;

/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

const JSON: &str = "application/json";

/// What is done to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Action {
    /// Our scheduling gate is removed.
    Ungate,
    /// It is evicted for a gang.
    Evict(Arc<GangKey>),
    /// It is evicted, for the rest of this gang, its own, had to go.
    EvictRest {
        of: Arc<GangKey>,
        /// The gang that it is preempted by.
        to: Option<Arc<GangKey>>,
    },
    /// It is deleted, for this reason.
    Delete(Arc<str>),
}

impl Action {
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Ungate => "ungate",
            Self::Evict(_) | Self::EvictRest { .. } => "evict",
            Self::Delete(_) => "delete",
        }
    }

    pub(super) fn hindrance(&self) -> Blocker {
        match self {
            Self::Ungate => Blocker::Gates,
            Self::Evict(_) | Self::EvictRest { .. } | Self::Delete(_) => Blocker::Removal,
        }
    }

    /// The file with the right for it.
    pub(super) fn right(&self) -> &'static str {
        match self {
            Self::Ungate => "manifests/gates.yaml",
            Self::Evict(_) | Self::EvictRest { .. } => "manifests/extender-preempt.yaml",
            Self::Delete(_) => "manifests/extender-restart.yaml",
        }
    }
}

/// A pod as the write names it.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) uid: PodUid,
    pub(super) namespace: Arc<str>,
    pub(super) name: Arc<str>,
}

/// How a write ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    /// The pod is gone, or has not what was to be taken from it.
    Moot,
    /// A disruption budget does not allow it now.
    Budget(String),
    /// It may not be done.
    Forbidden(String),
    /// It is not known to be done.
    Failed(String),
    /// The pod could not be marked now, and was not deleted.
    Unmarked(String),
}

/// Does it to a pod.
pub(super) async fn perform(
    client: &Client,
    memory: &ObjectMemory,
    pod: &Pod,
    action: &Action,
    marks: u32,
) -> End {
    let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
    match action {
        Action::Ungate => ungate(client, memory, pod, &path).await,
        Action::Evict(_) | Action::EvictRest { .. } => {
            let eviction = json!(eviction::request(&pod.name, pod.uid.as_str(), false));
            let path = format!("{path}/eviction");
            match send(client, Method::POST, &path, JSON, &eviction).await {
                Err((429, why)) => End::Budget(why),
                ended => end(ended),
            }
        }
        Action::Delete(why) => {
            // Once is enough, however often it has to be tried.
            if marks > 0 {
                match mark_disrupted(client, pod, &path, why).await {
                    Err((404 | 409, _)) => return End::Moot,
                    Err((0 | 408 | 429 | 500.., why)) if marks > 1 => return End::Unmarked(why),
                    _ => {}
                }
            }
            let preconditions = json!({"uid": pod.uid.as_str()});
            let options =
                json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
            end(send(client, Method::DELETE, &path, JSON, &options).await)
        }
    }
}

/// Marks in the pod's status that it does not end by a fault of its own, as eviction does: by this a Job's `podFailurePolicy` can leave such
/// ends uncounted, which would else use up its `backoffLimit` and have its controller wait longer with each pod.
async fn mark_disrupted(client: &Client, pod: &Pod, path: &str, why: &str) -> Result<(), (u16, String)> {
    let patch = json!({
        "metadata": {"uid": pod.uid.as_str()},
        "status": {"conditions": [{
            "type": "DisruptionTarget",
            "status": "True",
            "reason": Reason::GangRestarting.as_str(),
            "message": why,
            "lastTransitionTime": jiff::Timestamp::now().to_string(),
        }]},
    });
    let path = format!("{path}/status");
    send(client, Method::PATCH, &path, "application/strategic-merge-patch+json", &patch).await
}

/// Most often ours is the only gate. Where it is not, the pod is read.
async fn ungate(client: &Client, memory: &ObjectMemory, pod: &Pod, path: &str) -> End {
    match remove_gate(client, pod, path, 0).await {
        Err((422, _)) => {}
        ended => return end(ended),
    }
    let read = stream::get::<SlimPod>(client, path, Kind::Pod, memory);
    let read = match answered(tokio::time::timeout(TIMEOUT, read).await) {
        Ok(Some(read)) => read.object,
        Ok(None) => return End::Moot,
        Err(failed) => return end(Err(failed)),
    };
    match read.gate() {
        Some(at) if read.metadata.uid.as_deref() == Some(pod.uid.as_str()) => {
            end(remove_gate(client, pod, path, at).await)
        }
        _ => End::Moot,
    }
}

/// Fails as a whole if it is another pod by now, or another gate.
async fn remove_gate(client: &Client, pod: &Pod, path: &str, at: usize) -> Result<(), (u16, String)> {
    let gate = format!("/spec/schedulingGates/{at}");
    let patch = json!([
        {"op": "test", "path": "/metadata/uid", "value": pod.uid.as_str()},
        {"op": "test", "path": format!("{gate}/name"), "value": names::GANG_GATE},
        {"op": "remove", "path": gate},
    ]);
    send(client, Method::PATCH, path, "application/json-patch+json", &patch).await
}

/// Sends a request; `Err` is the status and why, 0 where there was no response.
async fn send(
    client: &Client,
    method: Method,
    path: &str,
    form: &str,
    body: &Value,
) -> Result<(), (u16, String)> {
    let body = body.to_string().into_bytes();
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, form)
        .body(body)
        .map_err(|error| (0, error.to_string()))?;
    answered(tokio::time::timeout(TIMEOUT, stream::send(client, request)).await)
}

fn answered<T>(answer: Result<Result<T, kube::Error>, Elapsed>) -> Result<T, (u16, String)> {
    match answer {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => Err((status.code, in_full(&status))),
        Ok(Err(error)) => Err((0, chain(&error))),
        Err(_) => Err((0, "no answer in time".to_owned())),
    }
}

/// The message of the API server, with the causes: of an eviction only they name the budget.
fn in_full(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let causes = causes.filter(|cause| !cause.message.is_empty());
    causes.fold(status.message.clone(), |mut all, cause| {
        all.push(' ');
        all.push_str(&cause.message);
        all
    })
}

fn end(ended: Result<(), (u16, String)>) -> End {
    match ended {
        Ok(_) => End::Done,
        Err((404 | 409, _)) => End::Moot,
        Err((403, why)) => End::Forbidden(why),
        Err((_, why)) => End::Failed(why),
    }
}

/// What hinders a gang.
pub(super) fn hindrance(pod: &Pod, action: &Action, why: &str) -> Message {
    let what = match action {
        Action::Ungate => "its scheduling gate cannot be removed",
        Action::Evict(_) | Action::EvictRest { .. } => "it cannot be evicted yet",
        Action::Delete(_) => "it cannot be deleted",
    };
    event::message(Reason::Blocked, true, format!("pod {}: {what}: {why}", pod.name))
}

/// The pod's own Event once it is done.
pub(super) fn message_of(action: &Action) -> Option<Message> {
    let (reason, note) = match action {
        Action::Ungate => return None,
        Action::Evict(by) => {
            (Reason::Preempted, format!("evicted: gang {by}, of higher priority, needs what it has"))
        }
        Action::EvictRest { of, to: None } => {
            (Reason::Preempted, format!("evicted: its gang {of} is preempted as a whole"))
        }
        Action::EvictRest { of, to: Some(to) } => (
            Reason::DeadlockResolved,
            format!(
                "evicted: its gang {of} is preempted by gang {to} to end a deadlock: both had lost members, and each held what the other lacked"
            ),
        ),
        Action::Delete(why) => (Reason::GangRestarting, format!("deleted: {why}")),
    };
    Some(event::message(reason, true, note))
}
