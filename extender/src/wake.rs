//! Wakes pods that kube-scheduler has pod on our word. It retries a refused pod when something happens that it can see; a device that
//! comes free late, or by the plugin's word alone, and a gang that has its place now are nothing it sees, and the pod would wait five
//! minutes. A write to the pod's own status wakes it in milliseconds.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_api::{NodeName, PodUid, names};
use gantry_runtime::chain;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::index::{Called, Store, UnschedulablePod};
use crate::metrics::{Metrics, Outcome};
use crate::pod::SlimPod;

/// Time for kube-scheduler to come by itself, as it does when the same event that freed the GPUs wakes it.
const SETTLE: Duration = Duration::from_millis(100);
/// Pods woken at once because GPUs came free.
const AT_ONCE: usize = 64;
/// Members of gangs woken at once: all of them have a place to go to.
const CALLED_AT_ONCE: usize = 1024;
/// Writes on their way at once.
const WRITES: usize = 16;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Between the first failed try and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_millis(500);
/// Tries per pod. After that it waits for the next GPU that comes free; kube-scheduler's own flush is the last chance.
const TRIES: u32 = 5;

/// A pod that is to be woken.
struct Try {
    uid: PodUid,
    cause: Cause,
    /// Tries before this one.
    failed: u32,
}

/// Why a pod is woken.
enum Cause {
    /// GPUs came free.
    Freed(UnschedulablePod),
    /// Its gang can go on.
    Called(Called),
}

/// A pod whose wake failed and that is tried again.
struct Again {
    at: Instant,
    uid: PodUid,
    /// As which it is pod meanwhile; `None` for a member of a gang.
    generation: Option<u64>,
    failed: u32,
}

/// Wakes pods until `shutdown`.
pub(crate) async fn run(
    client: Client,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut again: Vec<Again> = Vec::new();
    let work = async {
        loop {
            let batch = next(&store, &mut again).await;
            let writes = batch.into_iter().map(|pod| wake(&client, &store, &metrics, pod));
            let failed: Vec<Option<Again>> = futures::stream::iter(writes)
                .buffer_unordered(WRITES)
                .collect()
                .await;
            again.extend(failed.into_iter().flatten());
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Waits until there are pods to wake: GPUs came free, gangs go on, or one that failed is due again.
async fn next(store: &Store, again: &mut Vec<Again>) -> Vec<Try> {
    let due = again.iter().map(|again| again.at).min();
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
            batch.extend(pods.into_iter().map(|(uid, pod)| Try {
                uid,
                cause: Cause::Freed(pod),
                failed: 0,
            }));
        }
        () = store.called() => {
            let pods = store.update(|index| index.take_called(CALLED_AT_ONCE));
            batch.extend(pods.into_iter().map(|(uid, called)| Try {
                uid,
                cause: Cause::Called(called),
                failed: 0,
            }));
        }
        () = due => {}
    }
    let now = Instant::now();
    for due in again.extract_if(.., |again| again.at <= now) {
        let cause = match due.generation {
            Some(generation) => store
                .update(|index| index.take_requeued(&due.uid, generation))
                .map(Cause::Freed),
            None => store.read(|index| index.called(&due.uid)).map(Cause::Called),
        };
        batch.extend(cause.map(|cause| Try {
            uid: due.uid,
            cause,
            failed: due.failed,
        }));
    }
    batch
}

/// Wakes one pod, or says when it is to be tried again.
async fn wake(client: &Client, store: &Store, metrics: &Metrics, pod: Try) -> Option<Again> {
    let Try { uid, cause, failed } = pod;
    let (namespace, name) = match &cause {
        Cause::Freed(pod) => (&pod.namespace, &pod.name),
        Cause::Called(called) => (&called.namespace, &called.name),
    };
    let write = poke(client, &uid, namespace, name, &cause);
    let outcome = match tokio::time::timeout(TIMEOUT, write).await {
        Ok(Ok(())) => "activated",
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => "gone",
        Ok(Err(error)) => {
            tracing::warn!(pod = %name, %namespace, error = %chain(&error), "cannot wake pod");
            "failed"
        }
        Err(_) => {
            tracing::warn!(pod = %name, %namespace, "cannot wake pod: no answer in time");
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
    (failed < TRIES).then(|| Again {
        at: Instant::now() + AGAIN * 2u32.pow(failed - 1),
        uid,
        generation,
        failed,
    })
}

/// Writes a condition of ours into the pod's status. The UID makes it fail on a pod that only has the name.
async fn poke(
    client: &Client,
    uid: &PodUid,
    namespace: &str,
    name: &str,
    cause: &Cause,
) -> Result<(), kube::Error> {
    // Of the answer nothing is read that could be malformed: the pod is woken whatever else is in it.
    let pods: Api<SlimPod> = Api::namespaced(client.clone(), namespace);
    let patch = patch(uid, cause, &jiff::Timestamp::now().to_string());
    pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
        .await?;
    Ok(())
}

fn patch(uid: &PodUid, cause: &Cause, now: &str) -> Value {
    let (reason, message) = match cause {
        Cause::Freed(_) => (
            "GpusFreed",
            "GPUs came free after the pod was refused; it is tried again.",
        ),
        Cause::Called(_) => (
            "ReservationChanged",
            "The pod's gang has a place for it, or waits for another reason now; it is tried again.",
        ),
    };
    let mut patch = json!({
        "metadata": {"uid": uid.as_str()},
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
