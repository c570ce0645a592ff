//! Wakes pods that kube-scheduler has parked on our word. It retries a refused pod when something happens that it can see; a device that
//! comes free late, or by the plugin's word alone, is nothing it sees, and the pod would wait five minutes. A write to the pod's
//! own status wakes it in milliseconds.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{PodUid, names};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::index::{Parked, Store};
use crate::metrics::{Metrics, Outcome};
use crate::pod::SlimPod;
use crate::watch::chain;

/// Time for kube-scheduler to come by itself, as it does when the same event that freed the GPUs wakes it.
const SETTLE: Duration = Duration::from_millis(100);
/// Pods woken at once.
const AT_ONCE: usize = 64;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Between the first failed try and the second; each further one waits twice as long.
const AGAIN: Duration = Duration::from_millis(500);
/// Tries per pod. After that it waits for the next GPU that comes free; kube-scheduler's own flush is the last chance.
const TRIES: u32 = 5;

/// A pod that is to be woken.
struct Try {
    uid: PodUid,
    parked: Parked,
    /// Tries before this one.
    failed: u32,
}

/// A pod whose wake failed and that is tried again.
struct Again {
    at: Instant,
    uid: PodUid,
    /// As which it is parked meanwhile.
    generation: u64,
    failed: u32,
}

/// Wakes pods until `shutdown`.
pub async fn run(client: Client, store: Arc<Store>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut again = Vec::new();
    let work = async {
        loop {
            let batch = next(&store, &mut again).await;
            for pod in batch {
                wake(&client, &store, &metrics, pod, &mut again).await;
            }
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Waits until there are pods to wake: GPUs came free, or one that failed is due again.
async fn next(store: &Store, again: &mut Vec<Again>) -> Vec<Try> {
    let gained = match again.iter().map(|again| again.at).min() {
        Some(due) => tokio::time::timeout_at(due, store.gained()).await.is_ok(),
        None => {
            store.gained().await;
            true
        }
    };
    let mut batch = Vec::new();
    if gained {
        tokio::time::sleep(SETTLE).await;
        let pods = store.update(|index| index.take_wakeable(AT_ONCE));
        batch.extend(pods.into_iter().map(|(uid, parked)| Try {
            uid,
            parked,
            failed: 0,
        }));
    }
    let now = Instant::now();
    for due in again.extract_if(.., |again| again.at <= now) {
        if let Some(parked) = store.update(|index| index.retake(&due.uid, due.generation)) {
            batch.push(Try {
                uid: due.uid,
                parked,
                failed: due.failed,
            });
        }
    }
    batch
}

/// Wakes one pod, or sees to it that it is tried again.
async fn wake(client: &Client, store: &Store, metrics: &Metrics, pod: Try, again: &mut Vec<Again>) {
    let Try { uid, parked, failed } = pod;
    let outcome = match tokio::time::timeout(TIMEOUT, poke(client, &uid, &parked)).await {
        Ok(Ok(())) => "woken",
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => "gone",
        Ok(Err(error)) => {
            tracing::warn!(pod = %parked.name, namespace = %parked.namespace, error = %chain(&error), "cannot wake pod");
            "failed"
        }
        Err(_) => {
            tracing::warn!(pod = %parked.name, namespace = %parked.namespace, "cannot wake pod: no answer in time");
            "failed"
        }
    };
    metrics.wakes.get_or_create(&Outcome { outcome }).inc();
    if outcome != "failed" {
        return;
    }
    let failed = failed + 1;
    if let Some(generation) = store.update(|index| index.repark(uid.clone(), parked))
        && failed < TRIES
    {
        again.push(Again {
            at: Instant::now() + AGAIN * 2u32.pow(failed - 1),
            uid,
            generation,
            failed,
        });
    }
}

/// Writes a condition of ours into the pod's status. The UID makes it fail on a pod that only has the name.
async fn poke(client: &Client, uid: &PodUid, parked: &Parked) -> Result<(), kube::Error> {
    // Of the answer nothing is read that could be malformed: the pod is woken whatever else is in it.
    let pods: Api<SlimPod> = Api::namespaced(client.clone(), &parked.namespace);
    let now = jiff::Timestamp::now().to_string();
    let patch = json!({
        "metadata": {"uid": uid.as_str()},
        "status": {"conditions": [{
            "type": names::GPUS_FREED_CONDITION,
            "status": "True",
            "reason": "GpusFreed",
            "message": "GPUs came free after the pod was refused; it is tried again.",
            "lastTransitionTime": now,
        }]},
    });
    pods.patch_status(&parked.name, &PatchParams::default(), &Patch::Strategic(patch))
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests;
