//! Keeps the quarantine of GPUs over restarts: hands the owner of NVML what an earlier run stored, and ends it where a person says
//! so by an annotation on the `GpuNode`. Storing it is the publisher's part; judging it is the health module's.

use std::time::Duration;

use gantry_api::{GpuFault, GpuNode, names};
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::events::Teller;
use super::{Cluster, earlier};
use crate::inventory::Lift;

/// Between two looks for the annotation. Looked for only while there is a quarantine, so that a healthy cluster asks nothing.
const LOOK: Duration = Duration::from_secs(5);

/// Adopts, then waits for people, until `shutdown`.
pub(super) async fn keep(client: Client, cluster: Cluster, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, &cluster) => {}
    }
}

async fn follow(client: Client, cluster: &Cluster) {
    let api = Api::<GpuNode>::all(client.clone());
    // That it does not answer is told by those who follow the pods.
    let account = earlier::account(&client, &cluster.node, |_| {}).await;
    let stored: Vec<GpuFault> = account.map(|account| account.faults).unwrap_or_default();
    if !stored.is_empty() {
        info!(
            faults = stored.len(),
            "faults of an earlier run are held against the GPUs"
        );
    }
    cluster.diagnoses.adopt(stored);
    let mut diagnosis = cluster.diagnoses.diagnosis();
    if diagnosis.wait_for(|now| now.adopted).await.is_err() {
        return;
    }
    let mut lifter = Lifter {
        api,
        cluster,
        teller: Teller::new(client, &cluster.node),
        outdated: false,
        done: None,
    };
    loop {
        if lifter.done.is_none() {
            // What is found at the first look after a fault was there before it, and is not about it.
            lifter.outdated |= diagnosis.borrow().faults.is_empty();
            if diagnosis.wait_for(|now| !now.faults.is_empty()).await.is_err() {
                return;
            }
        }
        if let Err(error) = lifter.look().await {
            debug!(%error, "cannot look for a lifted quarantine");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Does what people say by the annotation.
struct Lifter<'a> {
    api: Api<GpuNode>,
    cluster: &'a Cluster,
    teller: Teller,
    /// Whether what is found at the next look is older than every fault.
    outdated: bool,
    /// What was done already and could not be taken away yet.
    done: Option<String>,
}

impl Lifter<'_> {
    /// Does what the annotation says, if there is one, takes it away, and tells: who reads the Event may set it again, and what they
    /// set is not taken away unread.
    async fn look(&mut self) -> Result<(), kube::Error> {
        let found = self.annotation().await?;
        let outdated = std::mem::take(&mut self.outdated);
        let Some((text, version)) = found else {
            self.done = None;
            return Ok(());
        };
        let mut event = None;
        if self.done.as_ref() != Some(&text) {
            let (type_, reason, note) = if outdated {
                self.ignore(&text)
            } else {
                self.lift(&text).await
            };
            info!(annotation = text, reason, "{note}");
            self.done = Some(text.clone());
            event = Some(Event {
                type_,
                reason: reason.to_owned(),
                note: Some(note),
                action: "LiftQuarantine".to_owned(),
                secondary: None,
            });
        }
        let taken = self.take_away(&text, version).await;
        if taken.is_ok() {
            self.done = None;
        }
        // Told even if it is still there, as where the plugin may not write it: it was done.
        if let Some(event) = event {
            self.teller.tell(event).await;
        }
        taken
    }

    /// The annotation, and the version of the object that has it.
    async fn annotation(&self) -> Result<Option<(String, Option<String>)>, kube::Error> {
        let node = self.api.get_metadata_opt(self.cluster.node.as_str()).await?;
        let metadata = node.map(|node| node.metadata).unwrap_or_default();
        let text = metadata
            .annotations
            .and_then(|mut annotations| annotations.remove(names::LIFT_QUARANTINE_ANNOTATION));
        Ok(text.map(|text| (text, metadata.resource_version)))
    }

    async fn lift(&self, text: &str) -> (EventType, &'static str, String) {
        let lift = match text.parse::<Lift>() {
            Ok(lift) => lift,
            Err(error) => {
                let key = names::LIFT_QUARANTINE_ANNOTATION;
                let note = format!("the annotation {key} is not understood: {error}");
                return (EventType::Warning, "QuarantineLiftInvalid", note);
            }
        };
        let mut diagnosis = self.cluster.diagnoses.diagnosis();
        let (lifts, meant) = {
            let now = diagnosis.borrow();
            let mut gpus = now.faults.iter().filter_map(|fault| fault.0.gpu.parse().ok());
            (now.lifts, gpus.any(|gpu| lift.means(&gpu)))
        };
        if !meant {
            let note = format!("none of {text} is in quarantine: nothing was lifted");
            return (EventType::Warning, "QuarantineLiftInvalid", note);
        }
        self.cluster.diagnoses.lift(lift);
        // The owner is at work within a fraction of a second. If it has stopped, so does this.
        let _ = diagnosis.wait_for(|now| now.lifts > lifts).await;
        let note = format!("the quarantine of {text} was lifted by annotation");
        (EventType::Normal, "GpuQuarantineLifted", note)
    }

    fn ignore(&self, text: &str) -> (EventType, &'static str, String) {
        let key = names::LIFT_QUARANTINE_ANNOTATION;
        let note = format!(
            "the annotation {key}={text:?} was there before the fault and lifts nothing; set it again to lift the quarantine"
        );
        (EventType::Warning, "QuarantineLiftOutdated", note)
    }

    /// Takes away the annotation that was read: another that was set meanwhile is found at the next look. The account is written into
    /// the same object all the while, which makes `version` an old one.
    async fn take_away(&self, text: &str, mut version: Option<String>) -> Result<(), kube::Error> {
        loop {
            let patch = json!({"metadata": {
                "resourceVersion": version,
                "annotations": {names::LIFT_QUARANTINE_ANNOTATION: null},
            }});
            let name = self.cluster.node.as_str();
            let patched = self
                .api
                .patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch))
                .await;
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
