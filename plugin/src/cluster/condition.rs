//! Problems of the node's GPUs on the Node object: a condition like node-problem-detector's, and Events when a GPU
//! becomes unhealthy or recovers. Reports the diagnosis at a bounded rate.

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_api::{ConditionType, MAX_MESSAGE, ObjectMessage, Reason};
use gantry_runtime::events::Message;
use gantry_runtime::{LogThrottle, chain};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::events::NodeEvents;
use super::{Cluster, RETRY};
use crate::health::{Extent, GpuName, Table, Trouble};
use crate::inventory::Diagnosis;

/// Shortest interval of two reports; changes that revert in between are not reported.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest interval of two Events of one GPU, for a flapping GPU.
const EVENT_INTERVAL_PER_GPU: Duration = Duration::from_secs(30);
/// The same for its cordon: the operator is to see each.
const CORDON_INTERVAL_PER_GPU: Duration = Duration::from_secs(2);
/// Interval at which the condition is written again, so that its heartbeat shows that this daemon works.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);

/// The part of a GPU with a problem, and which.
type GpuPart = (GpuName, Extent, Problem);

/// What an Event reports of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Problem {
    /// It, or a part of it, is unhealthy.
    Fault,
    /// The operator cordoned it.
    Cordon,
}

impl Problem {
    /// Shortest interval of two Events about it.
    fn interval(self) -> Duration {
        match self {
            Self::Fault => EVENT_INTERVAL_PER_GPU,
            Self::Cordon => CORDON_INTERVAL_PER_GPU,
        }
    }
}

/// Publishes until `shutdown`; pending calls are dropped then.
pub(super) async fn publish(
    client: Client,
    cluster: Cluster,
    events: NodeEvents,
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, &cluster, &events) => {}
    }
}

async fn follow(client: Client, cluster: &Cluster, events: &NodeEvents) {
    let nodes = Api::<Node>::all(client);
    let mut diagnosis = cluster.diagnoses.diagnosis();
    let mut readiness = cluster.observed.changes();
    let mut serving = ServingReport::default();
    let mut reported = LastReported::default();
    let mut backoff = RETRY;
    let mut written: Option<(NodeCondition, Instant)> = None;
    let mut failures = LogThrottle::default();
    loop {
        let now = diagnosis.borrow_and_update().clone();
        let ready = readiness.borrow_and_update().clone();
        let mut wait = REFRESH_INTERVAL;
        if let Some(message) = serving.event(ready.summary(), Instant::now()) {
            events.report(message);
        }
        if let Some(later) = serving.later(Instant::now()) {
            wait = wait.min(later);
        }
        // Faults of an earlier run that are not known yet would be reported as recoveries.
        if now.known && now.adopted {
            reported.events(&now, Instant::now()).into_iter().for_each(|message| events.report(message));
            if let Some(later) = reported.later(&now, Instant::now()) {
                wait = wait.min(later);
            }
            let before = written.as_ref().map(|(condition, _)| condition);
            let condition = condition(&now, &ready.missing(), before, Timestamp::now());
            let is_old = |at: &Instant| at.elapsed() >= REFRESH_INTERVAL;
            if written.as_ref().is_none_or(|(known, at)| differs(known, &condition) || is_old(at)) {
                match write(&nodes, cluster.node.as_str(), &condition).await {
                    Ok(()) => {
                        backoff.reset();
                        failures.reset();
                        cluster.observed.node_status(true);
                        written = Some((condition, Instant::now()));
                    }
                    Err(error) => {
                        if !is_lasting(&error) {
                            wait = wait.min(backoff.fail());
                        }
                        cluster.observed.node_status(false);
                        let error = chain(&error);
                        if failures.should_log(&error, Instant::now().into_std()) {
                            warn!(%error, "cannot write the condition GPUHealthy of the Node; manifests/plugin.yaml has the right");
                        }
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
            // Its sender lives as long as the daemon.
            Ok(()) = readiness.changed() => tokio::time::sleep(MIN_INTERVAL.min(wait)).await,
        }
    }
}

/// Reports in Events that the plugin does not serve, or only in part, once that has lasted.
#[derive(Debug, Default)]
struct ServingReport {
    /// The present reason and message, and since when.
    now: Option<(Reason, String, Instant)>,
    /// What was reported last.
    reported: Option<(Reason, String)>,
    /// When.
    at: Option<Instant>,
}

/// A start, or a restart of kubelet, is over after this.
const LASTING: Duration = Duration::from_secs(10);

impl ServingReport {
    /// The Event that is due for the present reason and message.
    fn event(&mut self, (reason, text): (Reason, String), now: Instant) -> Option<Message> {
        if self.now.as_ref().is_none_or(|(known, known_text, _)| (*known, known_text) != (reason, &text)) {
            self.now = Some((reason, text, now));
        }
        if self.due()? > now {
            return None;
        }
        let (reason, text, _) = self.now.clone()?;
        self.reported = Some((reason, text.clone()));
        self.at = Some(now);
        let warning = reason != Reason::Serving;
        Some(Message { reason, action: "Serve", warning, note: ObjectMessage::new(text) })
    }

    /// When the present state is to be reported; `None` if it is already, or if there was never a problem.
    fn due(&self) -> Option<Instant> {
        let (reason, text, since) = self.now.as_ref()?;
        let is_reported = match &self.reported {
            Some((known, known_text)) => (known, known_text) == (reason, text),
            None => *reason == Reason::Serving,
        };
        let spaced = self.at.map(|at| at + EVENT_INTERVAL_PER_GPU);
        (!is_reported).then(|| spaced.map_or(*since + LASTING, |spaced| spaced.max(*since + LASTING)))
    }

    /// The time until the next Event is due.
    fn later(&self, now: Instant) -> Option<Duration> {
        Some(self.due()?.saturating_duration_since(now))
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

/// The worst fault of each part, the first one of equals.
fn worst(diagnosis: &Diagnosis) -> BTreeMap<GpuPart, &Trouble> {
    let mut worst: BTreeMap<GpuPart, &Trouble> = BTreeMap::new();
    for trouble in &diagnosis.troubles {
        let entry = worst.entry((trouble.gpu.clone(), trouble.extent, Problem::Fault)).or_insert(trouble);
        if entry.cause < trouble.cause {
            *entry = trouble;
        }
    }
    worst
}

/// The text of an Event about a fault: with what to do about its Xid, where that fits.
fn with_response(text: String, xid: Option<u64>) -> String {
    match xid.and_then(|xid| Table::built_in().response(xid)) {
        Some(response) => {
            let whole = format!("{text}. Response: {response}");
            if whole.len() <= MAX_MESSAGE { whole } else { text }
        }
        None => text,
    }
}

/// The reason of the worst fault of each part, and the reason of each cordon.
fn reasons(diagnosis: &Diagnosis) -> BTreeMap<GpuPart, String> {
    let faults = worst(diagnosis).into_iter().map(|(part, trouble)| (part, trouble.reason.clone()));
    let cordoned = diagnosis.cordoned.iter();
    let cordons =
        cordoned.map(|(gpu, reason)| ((gpu.clone().into(), Extent::Gpu, Problem::Cordon), reason.clone()));
    faults.chain(cordons).collect()
}

/// The Node's condition for a diagnosis. Its transition time changes only with its status. `missing`: why no GPU is
/// offered to kubelet.
fn condition(
    diagnosis: &Diagnosis,
    missing: &[String],
    before: Option<&NodeCondition>,
    now: Timestamp,
) -> NodeCondition {
    let reasons = reasons(diagnosis);
    let words = |wanted: Problem| {
        let reasons = reasons.iter().filter(|((.., problem), _)| *problem == wanted);
        let texts: Vec<String> = reasons.map(|((gpu, ..), reason)| format!("{gpu}: {reason}")).collect();
        texts.join("; ")
    };
    let (faults, cordons) = (words(Problem::Fault), words(Problem::Cordon));
    let (status, reason, message) = match faults.is_empty() {
        // A GPU that the operator withholds is not unhealthy.
        true if !cordons.is_empty() => ("True", Reason::GpuCordoned, ObjectMessage::new(cordons)),
        true if !missing.is_empty() => {
            let text = format!(
                "{}, and the plugin does not serve them: {}",
                Reason::GpusHealthy.text(),
                missing.join("; ")
            );
            ("True", Reason::GpusHealthy, ObjectMessage::new(text))
        }
        true if !diagnosis.notices.is_empty() => {
            let texts = diagnosis.notices.iter().map(|notice| format!("{}: {}", notice.gpu, notice.reason));
            let texts: Vec<String> = texts.collect();
            ("True", Reason::GpuDegraded, ObjectMessage::new(texts.join("; ")))
        }
        true => ("True", Reason::GpusHealthy, ObjectMessage::new(Reason::GpusHealthy.text())),
        false => ("False", Reason::GpuUnhealthy, ObjectMessage::new(faults)),
    };
    let since = before
        .filter(|before| before.status == status)
        .and_then(|before| before.last_transition_time.clone());
    NodeCondition {
        type_: ConditionType::GpuHealthy.to_string(),
        status: status.to_owned(),
        reason: Some(reason.to_string()),
        message: Some(message.into()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: Some(since.unwrap_or(Time(now))),
    }
}

/// Whether two conditions differ in more than their times.
fn differs(a: &NodeCondition, b: &NodeCondition) -> bool {
    (&a.status, &a.reason, &a.message) != (&b.status, &b.reason, &b.message)
}

/// The problems last reported in Events.
#[derive(Debug, Default)]
struct LastReported {
    reasons: BTreeMap<GpuPart, String>,
    /// When an Event of a GPU was last written.
    at: BTreeMap<(GpuName, Problem), Instant>,
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
        let (reasons, worst) = (reasons(diagnosis), worst(diagnosis));
        let mut events = Vec::new();
        let mut spots: Vec<&GpuPart> = reasons.keys().chain(self.reasons.keys()).collect();
        spots.sort();
        spots.dedup();
        let ready: Vec<GpuPart> = spots
            .into_iter()
            .filter(|part| reasons.get(*part) != self.reasons.get(*part))
            .filter(|(gpu, _, problem)| {
                let at = self.at.get(&(gpu.clone(), *problem));
                at.is_none_or(|at| now.duration_since(*at) >= problem.interval())
            })
            .cloned()
            .collect();
        for part in ready {
            let (warning, reason, note) = match (reasons.get(&part), part.2) {
                (Some(text), problem) => {
                    self.reasons.insert(part.clone(), text.clone());
                    let reason = match problem {
                        Problem::Fault => Reason::GpuUnhealthy,
                        Problem::Cordon => Reason::GpuCordoned,
                    };
                    let xid = worst.get(&part).and_then(|trouble| trouble.xid);
                    let text = with_response(format!("{}: {text}", part.0), xid);
                    (problem == Problem::Fault, reason, text)
                }
                (None, Problem::Cordon) => {
                    let was = self.reasons.remove(&part).unwrap_or_default();
                    (false, Reason::GpuUncordoned, format!("{}: no longer {was:?}", part.0))
                }
                (None, Problem::Fault) => {
                    let was = self.reasons.remove(&part).unwrap_or_default();
                    let proof = self.proofs.remove(&part.0);
                    let why = proof.map(|proof| format!("; {proof}")).unwrap_or_default();
                    let text = format!("{}: no longer {was:?}{why}", part.0);
                    (false, Reason::GpuRecovered, text)
                }
            };
            self.at.insert((part.0, part.2), now);
            events.push(Message { reason, action: "CheckHealth", warning, note: ObjectMessage::new(note) });
        }
        events
    }

    /// The time until the next delayed Event is due.
    fn later(&self, diagnosis: &Diagnosis, now: Instant) -> Option<Duration> {
        let reasons = reasons(diagnosis);
        let spots = reasons.keys().chain(self.reasons.keys());
        let waiting = spots.filter(|part| reasons.get(*part) != self.reasons.get(*part));
        waiting
            .filter_map(|(gpu, _, problem)| {
                let at = self.at.get(&(gpu.clone(), *problem))?;
                Some(problem.interval().saturating_sub(now.duration_since(*at)))
            })
            .min()
    }
}

#[cfg(test)]
mod tests;
