//! Does to pods what gangs need: gates removed, pods evicted as budgets allow, pods deleted for a restart. Each write names the pod's UID, so
//! that it never meets another of the name. A pod that is gone is done; what fails is tried again, later and later.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use gantry_api::{PodUid, names};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Hindrance, Work};
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::events::{Events, Tiding};
use crate::index::Store;
use crate::metrics::{Metrics, Write};
use crate::watch::chain;

/// Writes on their way at once.
const AT_ONCE: usize = 32;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);
/// After a first failed try; each further one waits twice as long.
const AGAIN: Duration = Duration::from_millis(500);
/// The longest wait between two tries.
const LONGEST: Duration = Duration::from_secs(10);
/// After so many tries a write is given up: what it was for is asked for again, or is over.
const TRIES: u32 = 20;
/// So often it is tried to mark a pod before it is deleted; then it is deleted without.
const MARKS: u32 = 3;

const JSON: &str = "application/json";

/// What is done to a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Deed {
    /// Our scheduling gate is removed.
    Ungate,
    /// It is evicted for a gang.
    Evict(Arc<GangKey>),
    /// It is evicted, for the rest of this gang, its own, had to go.
    EvictRest {
        of: Arc<GangKey>,
        /// The gang that it gives way to.
        to: Option<Arc<GangKey>>,
    },
    /// It is deleted, for this reason.
    Delete(Arc<str>),
}

impl Deed {
    fn label(&self) -> &'static str {
        match self {
            Self::Ungate => "ungate",
            Self::Evict(_) | Self::EvictRest { .. } => "evict",
            Self::Delete(_) => "delete",
        }
    }

    fn hindrance(&self) -> Hindrance {
        match self {
            Self::Ungate => Hindrance::Gates,
            Self::Evict(_) | Self::EvictRest { .. } | Self::Delete(_) => Hindrance::Removal,
        }
    }

    /// The file with the right for it.
    fn right(&self) -> &'static str {
        match self {
            Self::Ungate => "manifests/gates.yaml",
            Self::Evict(_) | Self::EvictRest { .. } => "manifests/extender-preempt.yaml",
            Self::Delete(_) => "manifests/extender-restart.yaml",
        }
    }
}

/// A pod as the write names it.
#[derive(Debug, Clone)]
struct Pod {
    uid: PodUid,
    namespace: Arc<str>,
    name: Arc<str>,
}

/// How a write ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
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

/// What is to be done, and what of it may be.
#[derive(Debug)]
pub struct Orders {
    /// The work, as it comes.
    pub taken: UnboundedReceiver<Work>,
    /// Whether gates may be removed.
    pub gates: bool,
}

/// Works until `shutdown`.
pub async fn run(
    client: Client,
    store: Arc<Store>,
    events: Events,
    metrics: Arc<Metrics>,
    orders: Orders,
    shutdown: CancellationToken,
) {
    let mut worker = Worker {
        client,
        store,
        events,
        metrics,
        orders,
        open: BTreeMap::new(),
        forbidden: BTreeSet::new(),
        running: FuturesUnordered::new(),
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(worker.work()).await;
}

/// A deed that is not done yet.
struct Open {
    due: Instant,
    failed: u32,
    busy: bool,
    /// Tries to mark it that are left; 0 once it is marked, or cannot be.
    marks: u32,
}

struct Worker {
    client: Client,
    store: Arc<Store>,
    events: Events,
    metrics: Arc<Metrics>,
    orders: Orders,
    open: BTreeMap<(PodUid, Deed), Open>,
    /// What may not be done, and for whom: said once, until it is done after all.
    forbidden: BTreeSet<(Arc<GangKey>, &'static str)>,
    running: FuturesUnordered<BoxFuture<'static, (Pod, Deed, End)>>,
}

impl Worker {
    async fn work(&mut self) -> Infallible {
        loop {
            let due = self.start();
            tokio::select! {
                order = self.orders.taken.recv() => match order {
                    Some(order) => self.order(order),
                    // Whoever orders has ended, and so will this.
                    None => std::future::pending().await,
                },
                Some((pod, deed, end)) = self.running.next() => self.ended(&pod, deed, &end),
                () = sleep_until(due) => {}
            }
        }
    }

    fn order(&mut self, order: Work) {
        let (pods, deed) = match order {
            Work::Ungate(pods) if self.orders.gates => (pods, Deed::Ungate),
            Work::Ungate(pods) => {
                tracing::warn!(
                    pods = pods.len(),
                    "members have the scheduling gate {}, and --gates is not set",
                    names::GANG_GATE
                );
                return;
            }
            Work::Evict { pods, by } => (pods, Deed::Evict(by)),
            Work::EvictRest { pods, of, to } => (pods, Deed::EvictRest { of, to }),
            Work::Delete { pods, why } => (pods, Deed::Delete(why)),
            // Done elsewhere.
            Work::Commit { .. } | Work::Wake(_) | Work::Bind(_) | Work::Forget { .. } => return,
        };
        let due = Instant::now();
        for uid in pods {
            self.open.entry((uid, deed.clone())).or_insert(Open {
                due,
                failed: 0,
                busy: false,
                marks: MARKS,
            });
        }
    }

    /// Starts what is due. Returns when the next is.
    fn start(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        let mut moot = Vec::new();
        for ((uid, deed), open) in &mut self.open {
            if open.busy {
                continue;
            }
            if open.due > now {
                next = Some(next.map_or(open.due, |next| next.min(open.due)));
                continue;
            }
            if self.running.len() >= AT_ONCE {
                // The next that ends makes room.
                break;
            }
            let Some(pod) = find(&self.store, uid, deed) else {
                moot.push((uid.clone(), deed.clone()));
                continue;
            };
            open.busy = true;
            let (client, deed, marks) = (self.client.clone(), deed.clone(), open.marks);
            self.running.push(Box::pin(async move {
                let end = perform(&client, &pod, &deed, marks).await;
                (pod, deed, end)
            }));
        }
        for key in moot {
            self.open.remove(&key);
        }
        next
    }

    fn ended(&mut self, pod: &Pod, deed: Deed, end: &End) {
        let outcome = match end {
            End::Done => "done",
            End::Moot => "moot",
            End::Budget(_) => "budget",
            End::Forbidden(_) => "forbidden",
            End::Failed(_) | End::Unmarked(_) => "failed",
        };
        let write = Write {
            verb: deed.label(),
            outcome,
        };
        self.metrics.gang_writes.get_or_create(&write).inc();
        let key = (pod.uid.clone(), deed);
        let failed = self.open.get(&key).map_or(0, |open| open.failed);
        let deed = &key.1;
        match end {
            End::Done => {
                self.allowed(pod, deed);
                if let Some(tiding) = told(deed) {
                    self.events.pod(&pod.namespace, &pod.name, &pod.uid, tiding);
                }
            }
            End::Moot => {}
            End::Forbidden(why) => self.forbidden(pod, deed, why),
            End::Budget(why) | End::Failed(why) | End::Unmarked(why) if failed == 0 => {
                tracing::warn!(pod = %pod.name, namespace = %pod.namespace, what = deed.label(), %why, "cannot do it yet, trying again");
                if matches!(end, End::Budget(_)) {
                    self.hindered(pod, deed, why);
                }
            }
            End::Budget(why) | End::Failed(why) | End::Unmarked(why) => {
                tracing::debug!(pod = %pod.name, namespace = %pod.namespace, what = deed.label(), %why, failed, "cannot do it yet");
            }
        }
        let over = matches!(end, End::Done | End::Moot) || failed + 1 >= TRIES;
        if over {
            self.open.remove(&key);
        } else if let Some(open) = self.open.get_mut(&key) {
            open.busy = false;
            open.due = Instant::now() + (AGAIN * 2u32.pow(failed.min(16))).min(LONGEST);
            open.failed += 1;
            open.marks = match end {
                End::Unmarked(_) => open.marks.saturating_sub(1),
                _ => 0,
            };
        }
    }

    /// The gang that a deed is for.
    fn gang(&self, pod: &Pod, deed: &Deed) -> Option<Arc<GangKey>> {
        match deed {
            Deed::Evict(gang) | Deed::EvictRest { of: gang, .. } => Some(Arc::clone(gang)),
            Deed::Ungate | Deed::Delete(_) => self.store.read(|index| index.gang_of(&pod.uid).cloned()),
        }
    }

    /// Says why something cannot be done now.
    fn hindered(&self, pod: &Pod, deed: &Deed, why: &str) {
        if let Some(gang) = self.gang(pod, deed) {
            self.events.gang(&gang, hindrance(pod, deed, why));
        }
    }

    /// Says once for a gang that a right is missing, in its status as long as it is.
    fn forbidden(&mut self, pod: &Pod, deed: &Deed, why: &str) {
        let why = format!("{why}; {} gives that right", deed.right());
        let tiding = hindrance(pod, deed, &why);
        let known = self.gang(pod, deed).map(|gang| (gang, deed.label()));
        // Each time: a gang that was made again is not hindered yet.
        if let Some((gang, _)) = &known
            && !self.store.read(|index| index.is_hindered(gang, deed.hindrance()))
        {
            let note: Arc<str> = tiding.note.as_str().into();
            self.store
                .update(|index| index.hindered(gang, deed.hindrance(), Some(note)));
        }
        if known.as_ref().is_some_and(|known| self.forbidden.contains(known)) {
            tracing::debug!(pod = %pod.name, namespace = %pod.namespace, what = deed.label(), %why, "still forbidden");
            return;
        }
        tracing::warn!(pod = %pod.name, namespace = %pod.namespace, what = deed.label(), %why, "forbidden, trying again");
        let Some((gang, label)) = known else { return };
        self.events.gang(&gang, tiding);
        self.forbidden.insert((gang, label));
    }

    /// It was done: the right is there.
    fn allowed(&mut self, pod: &Pod, deed: &Deed) {
        if self.forbidden.is_empty() {
            return;
        }
        if let Some(gang) = self.gang(pod, deed)
            && self.forbidden.remove(&(Arc::clone(&gang), deed.label()))
        {
            self.store
                .update(|index| index.hindered(&gang, deed.hindrance(), None));
        }
        // Of gangs that are over.
        let store = &self.store;
        self.forbidden
            .retain(|(gang, _)| store.read(|index| index.knows_gang(gang)));
    }
}

/// What hinders a gang.
fn hindrance(pod: &Pod, deed: &Deed, why: &str) -> Tiding {
    let what = match deed {
        Deed::Ungate => "its scheduling gate cannot be removed",
        Deed::Evict(_) | Deed::EvictRest { .. } => "it cannot be evicted yet",
        Deed::Delete(_) => "it cannot be deleted",
    };
    Tiding {
        reason: "GangHindered",
        warning: true,
        note: format!("pod {}: {what}: {why}", pod.name),
    }
}

/// What the pod's own Event says once it is done.
fn told(deed: &Deed) -> Option<Tiding> {
    let (reason, note) = match deed {
        Deed::Ungate => return None,
        Deed::Evict(by) => (
            "Preempted",
            format!("evicted: gang {by}, of higher priority, needs what it has"),
        ),
        Deed::EvictRest { of, to: None } => (
            "Preempted",
            format!("evicted: the rest of its gang {of} had to go for another"),
        ),
        Deed::EvictRest { of, to: Some(to) } => (
            "GangGivesWay",
            format!(
                "evicted: its gang {of} gives way to gang {to}; both had lost members, and each held what the other lacked"
            ),
        ),
        Deed::Delete(why) => ("GangRestarts", format!("deleted: {why}")),
    };
    Some(Tiding {
        reason,
        warning: true,
        note,
    })
}

/// `None` if it is gone, or the gang for which it is to be evicted does not wait for that any more: it has given up, or is gone itself.
fn find(store: &Store, uid: &PodUid, deed: &Deed) -> Option<Pod> {
    store.read(|index| {
        let wanted = match deed {
            Deed::Evict(by) => index.waits_for(by, uid),
            Deed::EvictRest { of, .. } => index.is_rest_of(of, uid),
            Deed::Ungate | Deed::Delete(_) => true,
        };
        if !wanted {
            return None;
        }
        let (namespace, name) = index.pod_address(uid)?;
        Some(Pod {
            uid: uid.clone(),
            namespace,
            name,
        })
    })
}

async fn perform(client: &Client, pod: &Pod, deed: &Deed, marks: u32) -> End {
    let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
    let preconditions = json!({"uid": pod.uid.as_str()});
    match deed {
        Deed::Ungate => ungate(client, pod, &path).await,
        Deed::Evict(_) | Deed::EvictRest { .. } => {
            let eviction = json!({
                "apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": &*pod.name, "namespace": &*pod.namespace},
                "deleteOptions": {"preconditions": preconditions},
            });
            let path = format!("{path}/eviction");
            match send(client, Method::POST, &path, JSON, &eviction).await {
                Err((429, why)) => End::Budget(why),
                ended => end(ended),
            }
        }
        Deed::Delete(why) => {
            // Once is enough, however often it has to be tried.
            if marks > 0 {
                match mark_disrupted(client, pod, &path, why).await {
                    Err((404 | 409, _)) => return End::Moot,
                    Err((0 | 408 | 429 | 500.., why)) if marks > 1 => return End::Unmarked(why),
                    _ => {}
                }
            }
            let options =
                json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
            end(send(client, Method::DELETE, &path, JSON, &options).await)
        }
    }
}

/// Says in the pod's status that it does not go by a fault of its own, as eviction does: by this a Job's `podFailurePolicy` can leave such ends
/// uncounted, which would else use up its `backoffLimit` and have its controller wait longer with each pod.
async fn mark_disrupted(client: &Client, pod: &Pod, path: &str, why: &str) -> Result<Value, (u16, String)> {
    let patch = json!({
        "metadata": {"uid": pod.uid.as_str()},
        "status": {"conditions": [{
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "GangRestarts",
            "message": why,
            "lastTransitionTime": jiff::Timestamp::now().to_string(),
        }]},
    });
    let path = format!("{path}/status");
    send(
        client,
        Method::PATCH,
        &path,
        "application/strategic-merge-patch+json",
        &patch,
    )
    .await
}

/// Most often ours is the only gate. Where it is not, the pod is read.
async fn ungate(client: &Client, pod: &Pod, path: &str) -> End {
    match remove_gate(client, pod, path, 0).await {
        Err((422, _)) => {}
        ended => return end(ended),
    }
    let read = match send(client, Method::GET, path, JSON, &Value::Null).await {
        Ok(read) => read,
        failed => return end(failed),
    };
    let gates = read["spec"]["schedulingGates"].as_array();
    let at = gates.and_then(|gates| gates.iter().position(|gate| gate["name"] == names::GANG_GATE));
    match at {
        Some(at) if read["metadata"]["uid"] == pod.uid.as_str() => {
            end(remove_gate(client, pod, path, at).await)
        }
        _ => End::Moot,
    }
}

/// Fails as a whole if it is another pod by now, or another gate.
async fn remove_gate(client: &Client, pod: &Pod, path: &str, at: usize) -> Result<Value, (u16, String)> {
    let gate = format!("/spec/schedulingGates/{at}");
    let patch = json!([
        {"op": "test", "path": "/metadata/uid", "value": pod.uid.as_str()},
        {"op": "test", "path": format!("{gate}/name"), "value": names::GANG_GATE},
        {"op": "remove", "path": gate},
    ]);
    send(client, Method::PATCH, path, "application/json-patch+json", &patch).await
}

/// The answer, or its status and why; 0 where there was none.
async fn send(
    client: &Client,
    method: Method,
    path: &str,
    form: &str,
    body: &Value,
) -> Result<Value, (u16, String)> {
    let body = if body.is_null() {
        Vec::new()
    } else {
        body.to_string().into_bytes()
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, form)
        .body(body)
        .map_err(|error| (0, error.to_string()))?;
    match tokio::time::timeout(TIMEOUT, client.request::<Value>(request)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => Err((status.code, status.message.clone())),
        Ok(Err(error)) => Err((0, chain(&error))),
        Err(_) => Err((0, "no answer in time".to_owned())),
    }
}

fn end(ended: Result<Value, (u16, String)>) -> End {
    match ended {
        Ok(_) => End::Done,
        Err((404 | 409, _)) => End::Moot,
        Err((403, why)) => End::Forbidden(why),
        Err((_, why)) => End::Failed(why),
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
