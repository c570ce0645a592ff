//! Problems of the node's GPUs on the Node object: a condition like node-problem-detector's, and Events when a GPU
//! becomes unhealthy or recovers. Reports the diagnosis at a bounded rate.

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_api::{Reason, names};
use gantry_runtime::chain;
use gantry_runtime::events::Message;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::events::NodeEventRecorder;
use super::{Cluster, RETRY};
use crate::health::{Extent, GpuName};
use crate::inventory::Diagnosis;

/// Shortest interval of two reports; changes that revert in between are not reported.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest interval of two Events of one GPU, for a flapping GPU.
const EVENT_INTERVAL_PER_GPU: Duration = Duration::from_secs(30);
/// Interval at which the condition is written again, so that its heartbeat shows that this daemon works.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);
/// Longest message of the condition.
const MAX_MESSAGE: usize = 1024;

/// The part of a GPU with a problem.
type GpuPart = (GpuName, Extent);

/// Publishes until `shutdown`; pending calls are dropped then.
pub(super) async fn publish(client: Client, cluster: Cluster, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, cluster) => {}
    }
}

async fn follow(client: Client, cluster: Cluster) {
    let nodes = Api::<Node>::all(client.clone());
    let mut recorder = NodeEventRecorder::new(client, &cluster.node);
    let mut diagnosis = cluster.diagnoses.diagnosis();
    let mut reported = LastReported::default();
    let mut backoff = RETRY;
    let mut written: Option<(NodeCondition, Instant)> = None;
    loop {
        let now = diagnosis.borrow_and_update().clone();
        let mut wait = REFRESH_INTERVAL;
        // Faults of an earlier run that are not known yet would be reported as recoveries.
        if now.known && now.adopted {
            for message in reported.events(&now, Instant::now()) {
                recorder.record(message).await;
            }
            if let Some(later) = reported.later(&now, Instant::now()) {
                wait = wait.min(later);
            }
            let before = written.as_ref().map(|(condition, _)| condition);
            let condition = condition(&now, before, Timestamp::now());
            let is_old = |at: &Instant| at.elapsed() >= REFRESH_INTERVAL;
            if written.as_ref().is_none_or(|(known, at)| differs(known, &condition) || is_old(at)) {
                match write(&nodes, cluster.node.as_str(), &condition).await {
                    Ok(()) => {
                        backoff.reset();
                        written = Some((condition, Instant::now()));
                    }
                    Err(error) => {
                        if !is_lasting(&error) {
                            wait = wait.min(backoff.fail());
                        }
                        debug!(error = %chain(&error), "cannot write the condition of the Node");
                    }
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            changed = diagnosis.changed() => {
                if changed.is_err() {
                    return;
                }
                tokio::time::sleep(MIN_INTERVAL.min(wait)).await;
            }
        }
    }
}

/// Whether an error will persist: the Node may not be written, or does not exist. A busy API server, or one that does
/// not know the token yet, is tried again.
fn is_lasting(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if matches!(answer.code, 403 | 404 | 422))
}

async fn write(nodes: &Api<Node>, node: &str, condition: &NodeCondition) -> Result<(), kube::Error> {
    // A strategic merge replaces only the condition of this type; the Node must exist.
    let patch = json!({"status": {"conditions": [condition]}});
    nodes.patch_status(node, &PatchParams::default(), &Patch::Strategic(patch)).await.map(drop)
}

/// The reason of the worst problem of each part; the first one of equals.
fn reasons(diagnosis: &Diagnosis) -> BTreeMap<GpuPart, String> {
    let mut worst = BTreeMap::new();
    for trouble in &diagnosis.troubles {
        let part = (trouble.gpu.clone(), trouble.extent);
        let entry = worst.entry(part).or_insert_with(|| (trouble.cause, trouble.reason.clone()));
        if entry.0 < trouble.cause {
            *entry = (trouble.cause, trouble.reason.clone());
        }
    }
    worst.into_iter().map(|(part, (_, reason))| (part, reason)).collect()
}

/// The Node's condition for a diagnosis. Its transition time changes only with its status.
fn condition(diagnosis: &Diagnosis, before: Option<&NodeCondition>, now: Timestamp) -> NodeCondition {
    let reasons = reasons(diagnosis);
    let (status, reason, message) = match reasons.is_empty() {
        true => ("True", "GpusHealthy", "every GPU is healthy".to_owned()),
        false => {
            let texts: Vec<String> =
                reasons.iter().map(|((gpu, _), reason)| format!("{gpu}: {reason}")).collect();
            ("False", "GpuUnhealthy", shorten(&texts.join("; ")))
        }
    };
    let since = before
        .filter(|before| before.status == status)
        .and_then(|before| before.last_transition_time.clone());
    NodeCondition {
        type_: names::GPU_HEALTHY_CONDITION.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(since.unwrap_or(Time(now))),
    }
}

/// Whether two conditions differ in more than their times.
fn differs(a: &NodeCondition, b: &NodeCondition) -> bool {
    (&a.status, &a.reason, &a.message) != (&b.status, &b.reason, &b.message)
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_MESSAGE) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text.to_owned(),
    }
}

/// The problems last reported in Events.
#[derive(Debug, Default)]
struct LastReported {
    reasons: BTreeMap<GpuPart, String>,
    /// When an Event of a GPU was last written.
    at: BTreeMap<GpuName, Instant>,
    /// Number of the last cleared fault that was processed.
    ended: u64,
    /// Proofs of cleared faults that are not reported yet.
    proofs: BTreeMap<GpuName, String>,
}

impl LastReported {
    /// The Events for the changes to `diagnosis`, except for GPUs with a recent Event.
    fn events(&mut self, diagnosis: &Diagnosis, now: Instant) -> Vec<Message> {
        let known = self.ended;
        for (number, ended) in diagnosis.ended.iter().filter(|(number, _)| *number > known) {
            self.proofs.insert(ended.gpu.clone().into(), ended.proof.to_string());
            self.ended = *number;
        }
        let reasons = reasons(diagnosis);
        let mut events = Vec::new();
        let mut spots: Vec<&GpuPart> = reasons.keys().chain(self.reasons.keys()).collect();
        spots.sort();
        spots.dedup();
        let ready: Vec<GpuPart> = spots
            .into_iter()
            .filter(|part| reasons.get(*part) != self.reasons.get(*part))
            .filter(|(gpu, _)| {
                self.at.get(gpu).is_none_or(|at| now.duration_since(*at) >= EVENT_INTERVAL_PER_GPU)
            })
            .cloned()
            .collect();
        for part in ready {
            let (warning, reason, note) = match reasons.get(&part) {
                Some(reason) => {
                    self.reasons.insert(part.clone(), reason.clone());
                    (true, Reason::GpuUnhealthy, format!("{}: {reason}", part.0))
                }
                None => {
                    let was = self.reasons.remove(&part).unwrap_or_default();
                    let proof = self.proofs.remove(&part.0);
                    let why = proof.map(|proof| format!("; {proof}")).unwrap_or_default();
                    let text = format!("{}: no longer {was:?}{why}", part.0);
                    (false, Reason::GpuRecovered, text)
                }
            };
            self.at.insert(part.0, now);
            events.push(Message { reason, action: "CheckHealth", warning, note });
        }
        events
    }

    /// The time until the next delayed Event is due.
    fn later(&self, diagnosis: &Diagnosis, now: Instant) -> Option<Duration> {
        let reasons = reasons(diagnosis);
        let spots = reasons.keys().chain(self.reasons.keys());
        let waiting = spots.filter(|part| reasons.get(*part) != self.reasons.get(*part));
        waiting
            .filter_map(|(gpu, _)| {
                Some(EVENT_INTERVAL_PER_GPU.saturating_sub(now.duration_since(*self.at.get(gpu)?)))
            })
            .min()
    }
}

#[cfg(test)]
mod tests {
    use gantry_topology::GpuUuid;

    use super::*;
    use crate::health::{Cause, Class, Ended, Proof, Trouble};

    fn uuid(name: &str) -> GpuUuid {
        format!("GPU-{name}").parse().unwrap()
    }

    fn gpu(name: &str) -> GpuName {
        uuid(name).into()
    }

    fn diagnosis(troubles: &[(&str, Cause, &str)]) -> Diagnosis {
        Diagnosis {
            known: true,
            adopted: true,
            troubles: troubles
                .iter()
                .map(|(name, cause, reason)| Trouble {
                    gpu: gpu(name),
                    extent: Extent::Gpu,
                    cause: *cause,
                    reason: (*reason).to_owned(),
                })
                .collect(),
            ..Diagnosis::default()
        }
    }

    const XID: Cause = Cause::Xid(Class::Fatal);

    fn texts(events: &[Message]) -> Vec<String> {
        let text = |event: &Message| format!("{} {}", event.reason, event.note);
        events.iter().map(text).collect()
    }

    #[test]
    fn busy_api_server_is_retried() {
        let answer = |code| {
            let status = kube::core::Status::failure("no", "reason").with_code(code);
            is_lasting(&kube::Error::Api(Box::new(status)))
        };
        assert!([403, 404, 422].into_iter().all(answer));
        assert!(![401, 409, 429, 500, 503].into_iter().any(answer));
    }

    #[test]
    fn condition_names_unhealthy_gpus_with_worst_reason() {
        let (early, late) = (Timestamp::from_second(1).unwrap(), Timestamp::from_second(2).unwrap());
        let healthy = condition(&diagnosis(&[]), None, early);
        assert_eq!((healthy.type_.as_str(), healthy.status.as_str()), ("GPUHealthy", "True"));
        let unhealthy_gpus = diagnosis(&[
            ("a", Cause::Lost, "GPU lost"),
            ("a", XID, "Xid 79"),
            ("b", Cause::Uncorrected, "memory"),
        ]);
        let unhealthy = condition(&unhealthy_gpus, Some(&healthy), late);
        assert_eq!(unhealthy.status, "False");
        assert_eq!(unhealthy.message.as_deref(), Some("GPU-a: Xid 79; GPU-b: memory"));
        assert_eq!(unhealthy.last_transition_time, Some(Time(late)));
        let same = condition(&unhealthy_gpus, Some(&unhealthy), Timestamp::from_second(9).unwrap());
        assert_eq!(same.last_transition_time, Some(Time(late)), "its status stayed");
        assert!(!differs(&unhealthy, &same) && differs(&healthy, &same));
    }

    #[test]
    fn change_is_reported_once_with_reason_and_proof() {
        let mut reported = LastReported::default();
        let start = Instant::now();
        let unhealthy_gpus = diagnosis(&[("a", XID, "Xid 79")]);
        assert_eq!(texts(&reported.events(&unhealthy_gpus, start)), ["GpuUnhealthy GPU-a: Xid 79"]);
        assert_eq!(texts(&reported.events(&unhealthy_gpus, start)), [""; 0]);
        let mut well = diagnosis(&[]);
        well.ended = vec![(1, Ended { gpu: uuid("a"), reason: "Xid 79".to_owned(), proof: Proof::Responds })];
        assert_eq!(
            texts(&reported.events(&well, start + EVENT_INTERVAL_PER_GPU)),
            ["GpuRecovered GPU-a: no longer \"Xid 79\"; it was off the bus and responds again"]
        );
    }

    #[test]
    fn flapping_gpu_is_reported_rarely() {
        let mut reported = LastReported::default();
        let start = Instant::now();
        let (unhealthy_gpus, well) = (diagnosis(&[("a", Cause::Lost, "GPU lost")]), diagnosis(&[]));
        let mut events = 0;
        for second in 0..120 {
            let now = if second % 2 == 0 { &unhealthy_gpus } else { &well };
            events += reported.events(now, start + Duration::from_secs(second)).len();
        }
        assert!((4..=5).contains(&events), "{events}");
        // Another GPU is reported at once, and the delayed Event later.
        let end = start + Duration::from_secs(120);
        let both = diagnosis(&[("a", XID, "Xid 79"), ("b", XID, "Xid 79")]);
        reported.at.insert(gpu("a"), end);
        assert_eq!(texts(&reported.events(&both, end)), ["GpuUnhealthy GPU-b: Xid 79"]);
        assert_eq!(reported.later(&both, end), Some(EVENT_INTERVAL_PER_GPU));
    }
}
