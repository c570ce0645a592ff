//! Keeps the quarantine of GPUs across restarts: hands the stored faults and cordons to the NVML thread, and
//! lifts a quarantine that the operator ends by an annotation on the `GpuNode`. The publisher stores faults; the health
//! module judges them.

use std::collections::BTreeSet;
use std::time::Duration;

use gantry_api::{GpuNode, ObjectMessage, Reason, names};
use gantry_runtime::chain;
use gantry_runtime::events::Message;
use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Cluster;
use super::cordons::time_closed;
use super::events::NodeEvents;
use super::previous_status::{self, PreviousStatus};
use crate::inventory::Lift;

/// Interval of checks for the annotation, only during a quarantine, so that a healthy cluster causes no requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Adopts stored faults, then watches the annotation, until `shutdown`.
pub(super) async fn keep(client: Client, cluster: Cluster, events: NodeEvents, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, &cluster, &events) => {}
    }
}

async fn follow(client: Client, cluster: &Cluster, events: &NodeEvents) {
    let api = Api::<GpuNode>::all(client.clone());
    // The pod watch reports failures of the API server.
    let previous = previous_status::read(&client, &cluster.node, |_| {}).await;
    let PreviousStatus { faults: stored, cordons, evidence, nvml_closed, .. } = previous.unwrap_or_default();
    if !stored.is_empty() {
        info!(faults = stored.len(), "adopted GPU faults of an earlier run");
    }
    // Before the rest, so that NVML is not opened in the middle of a reset. The task of the cordons follows the annotation.
    if let Some(time) = nvml_closed.and_then(|until| time_closed(&until, Timestamp::now())) {
        cluster.diagnoses.keep_nvml_closed(Some(time));
    }
    cluster.diagnoses.adopt(stored, cordons, evidence);
    let mut diagnosis = cluster.diagnoses.diagnosis();
    if diagnosis.wait_for(|now| now.adopted).await.is_err() {
        return;
    }
    let mut lifter = QuarantineLifter { api, cluster, events, outdated: false, done: None };
    loop {
        if lifter.done.is_none() {
            // An annotation found at the first check after a fault was set before the fault, so it is not about it.
            lifter.outdated |= diagnosis.borrow().faults.is_empty();
            if diagnosis.wait_for(|now| !now.faults.is_empty()).await.is_err() {
                return;
            }
        }
        if let Err(error) = lifter.check().await {
            debug!(error = %chain(&error), "cannot check for a lifted quarantine");
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Acts on the annotation.
struct QuarantineLifter<'a> {
    api: Api<GpuNode>,
    cluster: &'a Cluster,
    events: &'a NodeEvents,
    /// Whether an annotation found at the next check is older than every fault.
    outdated: bool,
    /// The annotation that was applied and could not be removed yet.
    done: Option<String>,
}

impl QuarantineLifter<'_> {
    /// Acts on the annotation if it is set, removes it, and writes an Event. A client that reads the Event may set
    /// the annotation again; that one is not removed unread.
    async fn check(&mut self) -> Result<(), kube::Error> {
        let found = self.annotation().await?;
        let outdated = std::mem::take(&mut self.outdated);
        let Some((text, version)) = found else {
            self.done = None;
            return Ok(());
        };
        let mut event = None;
        if self.done.as_ref() != Some(&text) {
            let (warning, reason, note) = if outdated { self.ignore(&text) } else { self.lift(&text).await };
            info!(annotation = text, %reason, "{note}");
            self.done = Some(text.clone());
            event =
                Some(Message { reason, action: "LiftQuarantine", warning, note: ObjectMessage::new(note) });
        }
        let taken = self.remove_annotation(&text, version).await;
        if taken.is_ok() {
            self.done = None;
        }
        // Reported even if the annotation could not be removed, e.g. without permission: it was applied.
        if let Some(event) = event {
            self.events.report(event);
        }
        taken
    }

    /// The annotation, and the resource version of its object.
    async fn annotation(&self) -> Result<Option<(String, Option<String>)>, kube::Error> {
        let node = self.api.get_metadata_opt(self.cluster.node.as_str()).await?;
        let metadata = node.map(|node| node.metadata).unwrap_or_default();
        let text = metadata
            .annotations
            .and_then(|mut annotations| annotations.remove(names::LIFT_QUARANTINE_ANNOTATION));
        Ok(text.map(|text| (text, metadata.resource_version)))
    }

    async fn lift(&self, text: &str) -> (bool, Reason, String) {
        let lift = match text.parse::<Lift>() {
            Ok(lift) => lift,
            Err(error) => {
                let key = names::LIFT_QUARANTINE_ANNOTATION;
                let note = format!("invalid annotation {key}: {error}");
                return (true, Reason::QuarantineLiftInvalid, note);
            }
        };
        let mut diagnosis = self.cluster.diagnoses.diagnosis();
        let (lifts, meant) = {
            let now = diagnosis.borrow();
            let mut gpus = now.faults.iter().filter_map(|fault| fault.0.gpu.parse().ok());
            (now.lifts, gpus.any(|gpu| lift.includes(&gpu)))
        };
        if !meant {
            let note = format!("none of {text} is in quarantine: nothing was lifted");
            return (true, Reason::QuarantineLiftInvalid, note);
        }
        self.cluster.diagnoses.lift(lift.clone());
        // The NVML thread responds within a fraction of a second. If it has ended, so does this task.
        let _ = diagnosis.wait_for(|now| now.lifts > lifts).await;
        let now = diagnosis.borrow();
        let faulty = now.faults.iter().map(|fault| fault.0.gpu.as_str());
        let stays: BTreeSet<&str> =
            faulty.filter(|gpu| gpu.parse().is_ok_and(|gpu| lift.includes(&gpu))).collect();
        if !stays.is_empty() {
            let gpus = stays.into_iter().collect::<Vec<_>>().join(", ");
            let note = format!(
                "the quarantine of {gpus} stays: since NVML was opened after the reset, the GPU failed again, or its NVLinks are still down"
            );
            return (true, Reason::QuarantineLiftOutdated, note);
        }
        let note = format!("the quarantine of {text} was lifted by annotation");
        (false, Reason::GpuQuarantineLifted, note)
    }

    fn ignore(&self, text: &str) -> (bool, Reason, String) {
        let key = names::LIFT_QUARANTINE_ANNOTATION;
        let note = format!(
            "the annotation {key}={text:?} was set before the fault and lifts nothing; set it again to lift the quarantine"
        );
        (true, Reason::QuarantineLiftOutdated, note)
    }

    /// Removes the annotation that was read; one that was set meanwhile is found at the next check. Status writes to
    /// the same object make `version` outdated.
    async fn remove_annotation(&self, text: &str, mut version: Option<String>) -> Result<(), kube::Error> {
        loop {
            let patch = json!({"metadata": {
                "resourceVersion": version,
                "annotations": {names::LIFT_QUARANTINE_ANNOTATION: null},
            }});
            let name = self.cluster.node.as_str();
            let patched = self.api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await;
            match patched {
                Err(kube::Error::Api(answer)) if answer.code == 409 => {}
                patched => return patched.map(drop),
            }
            match self.annotation().await? {
                Some((now, newer)) if now == text => version = newer,
                _ => return Ok(()),
            }
        }
    }
}
