//! Tells waiting pods why, where kube-scheduler cannot: its own count says "Insufficient nvidia.com/gpu" and it never asks us. One
//! Event per pod and reason, in words of GPUs, stable and bounded.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{PodUid, names};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use crate::decide;
use crate::index::Store;
use crate::metrics::{Metrics, Outcome};
use crate::pod::PodFacts;
use crate::snapshot::{Snapshot, Standing};
use crate::watch::chain;

/// Between two looks at the waiting pods.
const LOOK: Duration = Duration::from_secs(1);
/// Between two Events on one pod, however its reason changes.
const QUIET: Duration = Duration::from_secs(60);
/// Events written at one look.
const AT_ONCE: usize = 20;
/// Longest note the API server takes is 1,024 bytes.
const MAX_NOTE: usize = 1000;
/// Nodes named per reason.
const NAMED: usize = 3;
/// Time limit of one write.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Publishes Events until `shutdown`.
pub async fn run(client: Client, store: Arc<Store>, metrics: Arc<Metrics>, shutdown: CancellationToken) {
    let mut told: HashMap<PodUid, (Instant, String)> = HashMap::new();
    let work = async {
        loop {
            tokio::time::sleep(LOOK).await;
            for (pod, note) in due(&store, &mut told, Instant::now()) {
                let outcome = match tokio::time::timeout(TIMEOUT, publish(&client, &pod, note)).await {
                    Ok(Ok(())) => "published",
                    Ok(Err(error)) => {
                        tracing::warn!(pod = %pod.name, namespace = %pod.namespace, error = %chain(&error), "cannot publish event");
                        "failed"
                    }
                    Err(_) => "failed",
                };
                metrics.events.get_or_create(&Outcome { outcome }).inc();
            }
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// The pods to be told something new now, and what.
fn due(
    store: &Store,
    told: &mut HashMap<PodUid, (Instant, String)>,
    now: Instant,
) -> Vec<(Arc<PodFacts>, String)> {
    let snapshot = store.snapshot();
    let short: Vec<Arc<PodFacts>> = store.read(|index| {
        let pods = index.short();
        pods.iter()
            .filter_map(|short| index.pod(short.pod.as_str()).cloned())
            .collect()
    });
    told.retain(|uid, _| short.iter().any(|pod| pod.uid == *uid));
    if !snapshot.synced {
        return Vec::new();
    }
    let mut due = Vec::new();
    for pod in short {
        if due.len() >= AT_ONCE {
            break;
        }
        let quiet = told
            .get(&pod.uid)
            .is_some_and(|(at, _)| now.saturating_duration_since(*at) < QUIET);
        if quiet {
            continue;
        }
        let Some(note) = note(&snapshot, &pod) else {
            continue;
        };
        if told.get(&pod.uid).is_some_and(|(_, before)| *before == note) {
            continue;
        }
        told.insert(pod.uid.clone(), (now, note.clone()));
        due.push((pod, note));
    }
    due
}

/// Why no node can take a pod, by reason: `node-1, node-2: 0 of 8 GPUs free, 4 asked; node-3: 3 of 8 GPUs free, 4 asked`. The nearest
/// miss comes first.
pub fn note(snapshot: &Snapshot, pod: &PodFacts) -> Option<String> {
    let request = pod.request.as_ref().ok()?;
    let mut reasons: HashMap<String, (usize, Vec<&str>)> = HashMap::new();
    for (_, name, standing) in snapshot.iter() {
        let Standing::Ours(class) = standing else {
            continue;
        };
        for ask in &request.asks {
            let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
                continue;
            };
            let line = decide::node_line(class, pool, ask.devices);
            let (_, nodes) = reasons
                .entry(line)
                .or_insert_with(|| (pool.free.len(), Vec::new()));
            nodes.push(name.as_str());
        }
    }
    if reasons.is_empty() {
        return Some("no node has a Gantry plugin that serves what is asked for".to_owned());
    }
    let mut reasons: Vec<(String, (usize, Vec<&str>))> = reasons.into_iter().collect();
    reasons.sort_by(|(a, (a_free, _)), (b, (b_free, _))| b_free.cmp(a_free).then_with(|| a.cmp(b)));
    let mut note = String::new();
    for (position, (reason, (_, mut nodes))) in reasons.into_iter().enumerate() {
        nodes.sort_unstable();
        let more = nodes.len().saturating_sub(NAMED);
        let mut part = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        if more > 0 {
            part.push_str(&format!(" and {more} more"));
        }
        part.push_str(": ");
        part.push_str(&reason);
        if note.len() + part.len() + 10 > MAX_NOTE {
            note.push_str("; ...");
            break;
        }
        if position > 0 {
            note.push_str("; ");
        }
        note.push_str(&part);
    }
    Some(note)
}

async fn publish(client: &Client, pod: &PodFacts, note: String) -> Result<(), kube::Error> {
    let now = jiff::Timestamp::now();
    let event = Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{:x}", pod.name, now.as_nanosecond())),
            namespace: Some(pod.namespace.to_string()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        action: Some("Scheduling".to_owned()),
        reason: Some("GpusUnavailable".to_owned()),
        type_: Some("Warning".to_owned()),
        note: Some(note),
        regarding: Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.to_string()),
            name: Some(pod.name.to_string()),
            uid: Some(pod.uid.to_string()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(names::EXTENDER.to_owned()),
        reporting_instance: Some(names::EXTENDER.to_owned()),
        ..Event::default()
    };
    let events: Api<Event> = Api::namespaced(client.clone(), &pod.namespace);
    events.create(&PostParams::default(), &event).await?;
    Ok(())
}

#[cfg(test)]
mod tests;
