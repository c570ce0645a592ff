//! Activates unschedulable pods. kube-scheduler retries a refused pod on events that it observes; a device that comes
//! free late, or that only the plugin reports, and a reservation of a gang are no such events, and the pod would wait
//! five minutes. A write to the status of the pod activates it in milliseconds; its annotation does on kube-scheduler
//! before 1.32, which overlooks other changes of a status.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_api::{NodeName, PodUid, Reason, names};
use gantry_runtime::{Backoff, chain};
use kube::Client;
use kube::api::{Patch, PatchParams};
use kube::core::Request;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::index::{ActivatedMember, Store, UnschedulablePod};
use crate::metrics::{Metrics, Outcome};
use crate::watch::stream;

/// Time for kube-scheduler to retry by itself, as it does if it observes the event that freed the GPUs.
const SETTLE: Duration = Duration::from_millis(100);
/// Pods activated at once because GPUs came free.
const AT_ONCE: usize = 64;
/// Members of gangs activated at once: all of them have a reservation.
const CALLED_AT_ONCE: usize = 1024;
/// Writes in flight at once.
const WRITES: usize = 16;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses after failed attempts.
const RETRY: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(8));
/// Attempts per pod. After that it waits for the next GPU that comes free, and at last for kube-scheduler's own flush.
const ATTEMPTS: u32 = 5;

/// A pod to activate.
struct Activation {
    uid: PodUid,
    cause: Cause,
    /// Attempts before this one.
    failed: u32,
}

/// Why a pod is activated.
enum Cause {
    /// GPUs came free.
    Freed(UnschedulablePod),
    /// Its gang has a reservation for it, or another reason to wait.
    Called(ActivatedMember),
}

/// A pod whose activation failed and is retried.
struct Retry {
    at: Instant,
    uid: PodUid,
    /// Its generation in the queue meanwhile; `None` for a member of a gang.
    generation: Option<u64>,
    failed: u32,
}

/// Activates pods until `shutdown`.
pub(crate) async fn run(
    client: Client,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut retries: Vec<Retry> = Vec::new();
    let work = async {
        loop {
            let batch = next(&store, &mut retries).await;
            let writes = batch.into_iter().map(|pod| activate(&client, &store, &metrics, pod));
            let failed: Vec<Option<Retry>> =
                futures::stream::iter(writes).buffer_unordered(WRITES).collect().await;
            retries.extend(failed.into_iter().flatten());
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Waits until there are pods to activate: GPUs came free, gangs changed, or a retry is due.
async fn next(store: &Store, retries: &mut Vec<Retry>) -> Vec<Activation> {
    let due = retries.iter().map(|retry| retry.at).min();
    let due = async {
        match due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    };
    let mut batch = Vec::new();
    tokio::select! {
        () = store.gained() => {
            tokio::time::sleep(SETTLE).await;
            let pods = store.update(|index| index.take_activatable(AT_ONCE));
            batch.extend(pods.into_iter().map(|(uid, pod)| Activation {
                uid,
                cause: Cause::Freed(pod),
                failed: 0,
            }));
        }
        () = store.called() => {
            let pods = store.update(|index| index.take_called(CALLED_AT_ONCE));
            batch.extend(pods.into_iter().map(|(uid, called)| Activation {
                uid,
                cause: Cause::Called(called),
                failed: 0,
            }));
        }
        () = due => {}
    }
    let now = Instant::now();
    for due in retries.extract_if(.., |retry| retry.at <= now) {
        let cause = match due.generation {
            Some(generation) => {
                store.update(|index| index.take_requeued(&due.uid, generation)).map(Cause::Freed)
            }
            None => store.read(|index| index.called(&due.uid)).map(Cause::Called),
        };
        batch.extend(cause.map(|cause| Activation { uid: due.uid, cause, failed: due.failed }));
    }
    batch
}

/// Activates one pod; if that fails, returns its retry.
async fn activate(client: &Client, store: &Store, metrics: &Metrics, pod: Activation) -> Option<Retry> {
    let Activation { uid, cause, failed } = pod;
    let (namespace, name) = match &cause {
        Cause::Freed(pod) => (&pod.namespace, &pod.name),
        Cause::Called(called) => (&called.namespace, &called.name),
    };
    let write = write_condition(client, &uid, namespace, name, &cause);
    let outcome = match tokio::time::timeout(TIMEOUT, write).await {
        Ok(Ok(())) => "activated",
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => "gone",
        Ok(Err(error)) => {
            tracing::warn!(pod = %name, %namespace, error = %chain(&error), "cannot activate pod");
            "failed"
        }
        Err(_) => {
            tracing::warn!(pod = %name, %namespace, "cannot activate pod: no answer in time");
            "failed"
        }
    };
    metrics.activations.get_or_create(&Outcome { outcome }).inc();
    if outcome != "failed" {
        return None;
    }
    let failed = failed + 1;
    let generation = match cause {
        Cause::Freed(pod) => Some(store.update(|index| index.requeue(uid.clone(), pod))?),
        Cause::Called(_) => None,
    };
    (failed < ATTEMPTS).then(|| Retry { at: Instant::now() + RETRY.after(failed), uid, generation, failed })
}

/// Writes a condition into the status of the pod. The UID makes it fail on another pod of that name.
async fn write_condition(
    client: &Client,
    uid: &PodUid,
    namespace: &str,
    name: &str,
    cause: &Cause,
) -> Result<(), kube::Error> {
    let patch = patch(uid, cause, &jiff::Timestamp::now().to_string());
    let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let patch = pods.patch_subresource("status", name, &PatchParams::default(), &Patch::Strategic(patch));
    stream::send(client, patch.map_err(kube::Error::BuildRequest)?).await
}

fn patch(uid: &PodUid, cause: &Cause, now: &str) -> Value {
    let (reason, message) = match cause {
        Cause::Freed(_) => {
            (Reason::GpusFreed, "GPUs came free after the pod was refused; it is tried again.")
        }
        Cause::Called(_) => (
            Reason::ReservationChanged,
            "The pod's gang has a reservation for it, or waits for another reason now; it is tried again.",
        ),
    };
    let mut patch = json!({
        "metadata": {"uid": uid.as_str(), "annotations": {names::ACTIVATED_ANNOTATION: now}},
        "status": {"conditions": [{
            "type": names::GPUS_FREED_CONDITION,
            "status": "True",
            "reason": reason,
            "message": message,
            "lastTransitionTime": now,
        }]},
    });
    if let Cause::Called(called) = cause
        && let Some(node) = &called.nominate
    {
        patch["status"]["nominatedNodeName"] = NodeName::as_str(node).into();
    }
    patch
}

#[cfg(test)]
mod tests;
