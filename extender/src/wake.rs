//! Wakes pods that kube-scheduler has parked on our word. It retries a refused pod when something happens that it can see; a device that
//! comes free late, or by the plugin's word alone, is nothing it sees, and the pod would wait five minutes. A write to the pod's
//! own status wakes it in milliseconds.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::PodUid;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::index::{Parked, Store};
use crate::metrics::{Metrics, Outcome};
use crate::pod::SlimPod;
use crate::watch::chain;

/// Type of the condition that is written: who looks at a waiting pod sees when GPUs last came free for it.
const CONDITION: &str = "gantry.dev/GpusFreed";
/// Time for kube-scheduler to come by itself, as it does when the same event that freed the GPUs wakes it.
const SETTLE: Duration = Duration::from_millis(100);
/// Pods woken at once.
const AT_ONCE: usize = 64;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Wakes pods until `shutdown`.
pub async fn run(client: Client, store: Arc<Store>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    while shutdown.run_until_cancelled(store.gained()).await.is_some() {
        if shutdown
            .run_until_cancelled(tokio::time::sleep(SETTLE))
            .await
            .is_none()
        {
            return;
        }
        let pods = store.update(|index| index.take_wakeable(AT_ONCE));
        for (uid, parked) in pods {
            let woken = tokio::time::timeout(TIMEOUT, poke(&client, &uid, &parked)).await;
            let outcome = match woken {
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
            if outcome == "failed" {
                // The next GPU that comes free is the next chance; kube-scheduler's own flush the last.
                store.update(|index| index.park(uid, parked));
            }
        }
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
            "type": CONDITION,
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
