//! What is wrong with the node's GPUs, where people and tools look for it on the Node: a condition like node-problem-detector's,
//! and Events when a GPU turns unhealthy or recovers. Says what the diagnosis says, at a pace that an API server bears.

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_api::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::events::Teller;
use super::{Cluster, Pauses};
use crate::health::{Extent, GpuName};
use crate::inventory::Diagnosis;

/// Shortest time between two rounds of telling; what comes and goes in between is not told.
const SHORTEST: Duration = Duration::from_secs(1);
/// Shortest time between two Events of one GPU, for one that comes and goes.
const PER_GPU: Duration = Duration::from_secs(30);
/// The condition is written again after this time, so that its heartbeat shows that somebody still looks.
const REPEAT: Duration = Duration::from_secs(300);
/// Longest text of a condition's message.
const MOST_TEXT: usize = 1024;

/// Where something is wrong: a GPU, or a part of it.
type Spot = (GpuName, Extent);

/// Publishes until `shutdown`, and does not wait then for what the API server has not answered.
pub(super) async fn publish(client: Client, cluster: Cluster, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, cluster) => {}
    }
}

async fn follow(client: Client, cluster: Cluster) {
    let nodes = Api::<Node>::all(client.clone());
    let mut teller = Teller::new(client, &cluster.node);
    let mut diagnosis = cluster.diagnoses.diagnosis();
    let mut told = Told::default();
    let mut pauses = Pauses::default();
    let mut written: Option<(NodeCondition, Instant)> = None;
    loop {
        let now = diagnosis.borrow_and_update().clone();
        let mut wait = REPEAT;
        // Faults of an earlier run that are not known yet would be told as recoveries.
        if now.known && now.adopted {
            for event in told.events(&now, Instant::now()) {
                teller.tell(event).await;
            }
            if let Some(later) = told.later(&now, Instant::now()) {
                wait = wait.min(later);
            }
            let before = written.as_ref().map(|(condition, _)| condition);
            let condition = condition(&now, before, Timestamp::now());
            let is_old = |at: &Instant| at.elapsed() >= REPEAT;
            if written
                .as_ref()
                .is_none_or(|(known, at)| differs(known, &condition) || is_old(at))
            {
                match write(&nodes, cluster.node.as_str(), &condition).await {
                    Ok(()) => {
                        pauses.reset();
                        written = Some((condition, Instant::now()));
                    }
                    Err(error) => {
                        if !is_lasting(&error) {
                            wait = wait.min(pauses.next());
                        }
                        debug!(%error, "the Node's condition is not written");
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
                tokio::time::sleep(SHORTEST.min(wait)).await;
            }
        }
    }
}

/// Whether an error will be the same in a moment: the Node may not be written, or is not there. An API server that has too much to
/// do, or does not know the token yet, is asked again.
fn is_lasting(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if matches!(answer.code, 403 | 404 | 422))
}

async fn write(nodes: &Api<Node>, node: &str, condition: &NodeCondition) -> Result<(), kube::Error> {
    // A strategic merge replaces the one condition of this type and leaves kubelet's alone; the Node must exist.
    let patch = json!({"status": {"conditions": [condition]}});
    nodes
        .patch_status(node, &PatchParams::default(), &Patch::Strategic(patch))
        .await
        .map(drop)
}

/// The reason of the worst thing wrong with each spot; of things equally bad the first.
fn reasons(diagnosis: &Diagnosis) -> BTreeMap<Spot, String> {
    let mut worst = BTreeMap::new();
    for trouble in &diagnosis.troubles {
        let spot = (trouble.gpu.clone(), trouble.extent);
        let entry = worst
            .entry(spot)
            .or_insert_with(|| (trouble.cause, trouble.reason.clone()));
        if entry.0 < trouble.cause {
            *entry = (trouble.cause, trouble.reason.clone());
        }
    }
    worst
        .into_iter()
        .map(|(spot, (_, reason))| (spot, reason))
        .collect()
}

/// The Node's condition for a diagnosis. Its time stays while its status does.
fn condition(diagnosis: &Diagnosis, before: Option<&NodeCondition>, now: Timestamp) -> NodeCondition {
    let reasons = reasons(diagnosis);
    let (status, reason, message) = match reasons.is_empty() {
        true => ("True", "GpusHealthy", "every GPU is healthy".to_owned()),
        false => {
            let texts: Vec<String> = reasons
                .iter()
                .map(|((gpu, _), reason)| format!("{gpu}: {reason}"))
                .collect();
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
    match text.char_indices().nth(MOST_TEXT) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text.to_owned(),
    }
}

/// What was told of each spot in Events.
#[derive(Debug, Default)]
struct Told {
    reasons: BTreeMap<Spot, String>,
    /// When something was last told of a GPU.
    at: BTreeMap<GpuName, Instant>,
    /// The last ended fault that was looked at.
    ended: u64,
    /// What proved the end of faults that is not told yet.
    proofs: BTreeMap<GpuName, String>,
}

impl Told {
    /// The Events that make up the difference to `diagnosis`, but for GPUs of which something was told a moment ago.
    fn events(&mut self, diagnosis: &Diagnosis, now: Instant) -> Vec<Event> {
        let known = self.ended;
        for (number, ended) in diagnosis.ended.iter().filter(|(number, _)| *number > known) {
            self.proofs
                .insert(ended.gpu.clone().into(), ended.proof.to_string());
            self.ended = *number;
        }
        let reasons = reasons(diagnosis);
        let mut events = Vec::new();
        let mut spots: Vec<&Spot> = reasons.keys().chain(self.reasons.keys()).collect();
        spots.sort();
        spots.dedup();
        let ready: Vec<Spot> = spots
            .into_iter()
            .filter(|spot| reasons.get(*spot) != self.reasons.get(*spot))
            .filter(|(gpu, _)| {
                self.at
                    .get(gpu)
                    .is_none_or(|at| now.duration_since(*at) >= PER_GPU)
            })
            .cloned()
            .collect();
        for spot in ready {
            let event = match reasons.get(&spot) {
                Some(reason) => {
                    self.reasons.insert(spot.clone(), reason.clone());
                    (
                        EventType::Warning,
                        "GpuUnhealthy",
                        format!("{}: {reason}", spot.0),
                    )
                }
                None => {
                    let was = self.reasons.remove(&spot).unwrap_or_default();
                    let proof = self.proofs.remove(&spot.0);
                    let why = proof.map(|proof| format!("; {proof}")).unwrap_or_default();
                    let text = format!("{}: no longer {was:?}{why}", spot.0);
                    (EventType::Normal, "GpuRecovered", text)
                }
            };
            self.at.insert(spot.0, now);
            let (type_, reason, note) = event;
            events.push(Event {
                type_,
                reason: reason.to_owned(),
                note: Some(shorten(&note)),
                action: "CheckHealth".to_owned(),
                secondary: None,
            });
        }
        events
    }

    /// In how long something is to be told that was too early to tell.
    fn later(&self, diagnosis: &Diagnosis, now: Instant) -> Option<Duration> {
        let reasons = reasons(diagnosis);
        let spots = reasons.keys().chain(self.reasons.keys());
        let waiting = spots.filter(|spot| reasons.get(*spot) != self.reasons.get(*spot));
        waiting
            .filter_map(|(gpu, _)| Some(PER_GPU.saturating_sub(now.duration_since(*self.at.get(gpu)?))))
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

    fn texts(events: &[Event]) -> Vec<String> {
        let text = |event: &Event| format!("{} {}", event.reason, event.note.as_deref().unwrap_or_default());
        events.iter().map(text).collect()
    }

    #[test]
    fn an_api_server_that_is_busy_is_asked_again() {
        let answer = |code| {
            let status = kube::core::Status::failure("no", "reason").with_code(code);
            is_lasting(&kube::Error::Api(Box::new(status)))
        };
        assert!([403, 404, 422].into_iter().all(answer));
        assert!(![401, 409, 429, 500, 503].into_iter().any(answer));
    }

    #[test]
    fn the_condition_names_every_unhealthy_gpu_with_its_worst_reason() {
        let (early, late) = (
            Timestamp::from_second(1).unwrap(),
            Timestamp::from_second(2).unwrap(),
        );
        let healthy = condition(&diagnosis(&[]), None, early);
        assert_eq!(
            (healthy.type_.as_str(), healthy.status.as_str()),
            ("GPUHealthy", "True")
        );
        let sick = diagnosis(&[
            ("a", Cause::Lost, "GPU lost"),
            ("a", XID, "Xid 79"),
            ("b", Cause::Uncorrected, "memory"),
        ]);
        let unhealthy = condition(&sick, Some(&healthy), late);
        assert_eq!(unhealthy.status, "False");
        assert_eq!(unhealthy.message.as_deref(), Some("GPU-a: Xid 79; GPU-b: memory"));
        assert_eq!(unhealthy.last_transition_time, Some(Time(late)));
        let same = condition(&sick, Some(&unhealthy), Timestamp::from_second(9).unwrap());
        assert_eq!(same.last_transition_time, Some(Time(late)), "its status stayed");
        assert!(!differs(&unhealthy, &same) && differs(&healthy, &same));
    }

    #[test]
    fn each_change_is_told_once_with_its_reason_and_what_proved_its_end() {
        let mut told = Told::default();
        let start = Instant::now();
        let sick = diagnosis(&[("a", XID, "Xid 79")]);
        assert_eq!(texts(&told.events(&sick, start)), ["GpuUnhealthy GPU-a: Xid 79"]);
        assert_eq!(texts(&told.events(&sick, start)), [""; 0]);
        let mut well = diagnosis(&[]);
        well.ended = vec![(
            1,
            Ended {
                gpu: uuid("a"),
                reason: "Xid 79".to_owned(),
                proof: Proof::Answers,
            },
        )];
        assert_eq!(
            texts(&told.events(&well, start + PER_GPU)),
            ["GpuRecovered GPU-a: no longer \"Xid 79\"; it was off the bus and answers again"]
        );
    }

    #[test]
    fn a_gpu_that_comes_and_goes_is_told_of_now_and_then() {
        let mut told = Told::default();
        let start = Instant::now();
        let (sick, well) = (diagnosis(&[("a", Cause::Lost, "GPU lost")]), diagnosis(&[]));
        let mut events = 0;
        for second in 0..120 {
            let now = if second % 2 == 0 { &sick } else { &well };
            events += told.events(now, start + Duration::from_secs(second)).len();
        }
        assert!((4..=5).contains(&events), "{events}");
        // Another GPU is told of at once, and what was held back is told later.
        let end = start + Duration::from_secs(120);
        let both = diagnosis(&[("a", XID, "Xid 79"), ("b", XID, "Xid 79")]);
        told.at.insert(gpu("a"), end);
        assert_eq!(texts(&told.events(&both, end)), ["GpuUnhealthy GPU-b: Xid 79"]);
        assert_eq!(told.later(&both, end), Some(PER_GPU));
    }
}
