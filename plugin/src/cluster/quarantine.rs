//! Keeps the quarantine of GPUs over restarts: hands the owner of NVML what an earlier run stored, and ends it where a person says
//! so by an annotation on the `GpuNode`. Storing it is the publisher's part; judging it is the health module's.

use std::time::Duration;

use gantry_api::{GpuFault, GpuNode, names};
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::events::Teller;
use super::{Cluster, Pauses};
use crate::inventory::Lift;

/// Between two looks for the annotation. Looked for only while there is a quarantine, so that a healthy cluster asks nothing.
const LOOK: Duration = Duration::from_secs(5);

/// Adopts, then waits for people, until `shutdown`.
pub(super) async fn keep(client: Client, cluster: Cluster, shutdown: CancellationToken) {
    let api = Api::<GpuNode>::all(client.clone());
    let mut teller = Teller::new(client, &cluster.node);
    tokio::select! {
        () = shutdown.cancelled() => return,
        stored = stored(&api, &cluster) => {
            if !stored.is_empty() {
                info!(faults = stored.len(), "faults of an earlier run are held against the GPUs");
            }
            cluster.sickbay.adopt(stored);
        }
    }
    let mut diagnosis = cluster.sickbay.diagnosis();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            waited = diagnosis.wait_for(|now| !now.faults.is_empty()) => if waited.is_err() { return },
        }
        if let Err(error) = lift(&api, &cluster, &mut teller).await {
            debug!(%error, "cannot look for a lifted quarantine");
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// The faults that an earlier run stored. Asked for until the API server answers.
async fn stored(api: &Api<GpuNode>, cluster: &Cluster) -> Vec<GpuFault> {
    let mut pauses = Pauses::default();
    loop {
        match api.get_opt(cluster.node.as_str()).await {
            Ok(node) => {
                let status = node.and_then(|node| node.status);
                return status.map(|status| status.faults).unwrap_or_default();
            }
            Err(kube::Error::Api(status)) if status.code < 500 => {
                warn!(
                    status = status.code,
                    message = status.message,
                    "cannot read the own GpuNode; faults that an earlier run saw are not known"
                );
                return Vec::new();
            }
            Err(_) => tokio::time::sleep(pauses.next()).await,
        }
    }
}

/// Does what the annotation says, if there is one, and takes it away.
async fn lift(api: &Api<GpuNode>, cluster: &Cluster, teller: &mut Teller) -> Result<(), kube::Error> {
    let Some(node) = api.get_metadata_opt(cluster.node.as_str()).await? else {
        return Ok(());
    };
    let annotations = node.metadata.annotations.unwrap_or_default();
    let Some(text) = annotations.get(names::LIFT_QUARANTINE_ANNOTATION) else {
        return Ok(());
    };
    let (type_, reason, note) = match text.parse::<Lift>() {
        Ok(lift) => {
            let lifts = cluster.sickbay.now().lifts;
            cluster.sickbay.lift(lift);
            // The owner is at work within a fraction of a second; the annotation goes when it is done.
            let mut diagnosis = cluster.sickbay.diagnosis();
            if diagnosis.wait_for(|now| now.lifts > lifts).await.is_err() {
                return Ok(());
            }
            info!(gpus = text, "quarantine lifted by annotation");
            let note = format!("the quarantine of {text} was lifted by annotation");
            (EventType::Normal, "GpuQuarantineLifted", note)
        }
        Err(error) => (
            EventType::Warning,
            "LiftNotUnderstood",
            format!(
                "the annotation {} is not understood: {error}",
                names::LIFT_QUARANTINE_ANNOTATION
            ),
        ),
    };
    // Only the one that was read: another that was set meanwhile is found at the next look.
    let take_away = json!({"metadata": {
        "resourceVersion": node.metadata.resource_version,
        "annotations": {names::LIFT_QUARANTINE_ANNOTATION: null},
    }});
    api.patch_metadata(
        cluster.node.as_str(),
        &PatchParams::default(),
        &Patch::Merge(take_away),
    )
    .await?;
    teller
        .tell(Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "LiftQuarantine".to_owned(),
            secondary: None,
        })
        .await;
    Ok(())
}
