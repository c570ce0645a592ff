//! Follows the annotations of this node's `GpuNode` that cordon GPUs or have NVML closed. Only metadata is read: the object of a node with very
//! many devices takes several MiB.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::StreamExt;
use gantry_api::{Cordons, GpuNode, ObjectMessage, Reason, names};
use gantry_runtime::events::Message;
use gantry_runtime::{LogThrottle, chain};
use jiff::Timestamp;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::events::NodeEvents;
use super::{Cluster, RETRY};
use crate::inventory::State;

/// Seconds after which a watch is renewed, well before [`super::READ_TIMEOUT`].
const RENEW: u32 = 30;
/// Annotations without a GPU that are reported.
const MOST_REPORTED: usize = 8;
/// Longest time for which NVML is kept closed: Xids are not noticed meanwhile.
const MOST_CLOSED: Duration = Duration::from_secs(15 * 60);

/// Follows until `shutdown`.
pub(super) async fn follow(
    client: Client,
    cluster: Cluster,
    events: NodeEvents,
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run(client, &cluster, &events) => {}
    }
}

async fn run(client: Client, cluster: &Cluster, events: &NodeEvents) {
    let config = watcher::Config::default().fields(&format!("metadata.name={}", cluster.node)).timeout(RENEW);
    // The cordons of an earlier run are adopted with its faults, at once.
    let mut diagnosis = cluster.diagnoses.diagnosis();
    if diagnosis.wait_for(|now| now.adopted).await.is_err() {
        return;
    }
    let api = Api::<PartialObjectMeta<GpuNode>>::all(client);
    let mut stream = std::pin::pin!(watcher::watcher(api, config));
    let mut backoff = RETRY;
    let mut failures = LogThrottle::default();
    let mut known: Option<Cordons> = None;
    // The annotation, once it was read: it may have been removed since NVML was closed at the start.
    let mut closed: Option<Option<String>> = None;
    let mut reported = BTreeSet::new();
    while let Some(event) = stream.next().await {
        let node = match event {
            Ok(Event::InitApply(node) | Event::Apply(node)) => node,
            // A deleted object is written again by the publisher. Until then the cordons stay.
            Ok(Event::Init | Event::InitDone | Event::Delete(_)) => continue,
            Err(error) => {
                let error = chain(&error);
                if failures.should_log(&error, Instant::now().into_std()) {
                    warn!(
                        %error,
                        "cannot watch the GpuNode of this node; GPUs are cordoned and uncordoned only after a restart; manifests/plugin.yaml has the right"
                    );
                }
                tokio::time::sleep(backoff.fail()).await;
                continue;
            }
        };
        backoff.reset();
        failures.reset();
        let annotations = node.metadata.annotations.unwrap_or_default();
        let cordons = Cordons::of(Some(&annotations));
        if known.as_ref() != Some(&cordons) {
            if !cordons.is_empty() || known.is_some() {
                info!(gpus = cordons.iter().count(), "the cordoned GPUs changed");
            }
            cluster.diagnoses.cordon(cordons.clone());
            known = Some(cordons);
        }
        let until = annotations.get(names::NVML_CLOSED_ANNOTATION);
        if closed.as_ref().map(Option::as_ref) != Some(until) {
            closed = Some(until.cloned());
            cluster.diagnoses.keep_nvml_closed(until.and_then(|until| time_closed(until, Timestamp::now())));
        }
        let without_gpu = without_gpu(&annotations, cluster);
        for name in without_gpu.difference(&reported) {
            let note = format!(
                "the annotation {name} cordons nothing: its name ends in no UUID of this node's GPUs"
            );
            let (reason, action) = (Reason::CordonInvalid, "Cordon");
            events.report(Message { reason, action, warning: true, note: ObjectMessage::new(note) });
        }
        reported = without_gpu;
    }
}

/// How long NVML stays closed by this annotation. `None` if the time is past, or is none.
pub(super) fn time_closed(until: &str, now: Timestamp) -> Option<Duration> {
    let until: Timestamp = until
        .parse()
        .inspect_err(|error| {
            warn!(%error, until, "the annotation {} is no time; NVML stays open", names::NVML_CLOSED_ANNOTATION);
        })
        .ok()?;
    let time = Duration::try_from(until.duration_since(now)).ok().filter(|time| !time.is_zero());
    if time.is_none() {
        warn!(
            %until,
            %now,
            "the time of the annotation {} is past; NVML stays open: is the clock of this node right?",
            names::NVML_CLOSED_ANNOTATION
        );
    }
    Some(time?.min(MOST_CLOSED))
}

/// Annotations that cordon no GPU of this node. None before the GPUs are known.
fn without_gpu(annotations: &BTreeMap<String, String>, cluster: &Cluster) -> BTreeSet<String> {
    let inventory = cluster.inventory.borrow();
    if inventory.state != State::Ready {
        return BTreeSet::new();
    }
    let gpus = inventory.machine.gpus().iter();
    let of_gpus: BTreeSet<&str> = gpus.filter_map(|gpu| gpu.uuid.as_ref()).map(|gpu| gpu.as_str()).collect();
    let names = annotations.keys().filter(|name| {
        let gpu = name.strip_prefix(names::CORDON_ANNOTATION_PREFIX);
        gpu.is_some_and(|gpu| !of_gpus.contains(gpu))
    });
    names.take(MOST_REPORTED).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time that a person wrote by mistake leaves the node without Xids for minutes only.
    #[test]
    fn nvml_is_closed_for_a_limited_time() {
        let now: Timestamp = "2026-11-26T20:00:00Z".parse().unwrap();
        for (until, seconds) in [
            ("2026-11-26T20:01:30Z", Some(90)),
            ("2027-11-26T20:00:00Z", Some(15 * 60)),
            ("2026-11-26T20:00:00Z", None),
            ("2026-11-26T19:00:00Z", None),
            ("soon", None),
            ("", None),
        ] {
            assert_eq!(time_closed(until, now), seconds.map(Duration::from_secs), "{until}");
        }
    }
}
