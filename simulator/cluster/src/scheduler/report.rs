//! A scheduler's reports: the PodScheduled condition and the Scheduled and FailedScheduling Events, with
//! kube-scheduler's texts. An unchanged text is not written again.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::api::meta::now;

/// `0/3 nodes are available: 1 Insufficient cpu, 2 ...`: equal reasons counted, sorted by text.
pub(super) fn message(nodes: usize, reasons: impl IntoIterator<Item = String>) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for reason in reasons {
        *counts.entry(reason).or_default() += 1;
    }
    let mut parts: Vec<String> =
        counts.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    parts.sort_unstable();
    let list = parts.join(", ");
    match nodes {
        0 => "no nodes available to schedule pods".into(),
        _ if list.is_empty() => format!("0/{nodes} nodes are available."),
        _ => format!("0/{nodes} nodes are available: {list}."),
    }
}

/// Writes to pods and events.
#[derive(Clone)]
pub(super) struct Reporter {
    client: Client,
}

impl Reporter {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The pod could not be scheduled: `reason` is `Unschedulable` or `SchedulerError`.
    pub(super) async fn failed(&self, pod: &Pod, reason: &str, message: &str) {
        if is_reported(pod, reason, message) {
            return;
        }
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let condition = json!({"status": {"conditions": [{
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": now(),
        }]}});
        let patch = Patch::Strategic(condition);
        if let Err(error) = pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await {
            // The pod is gone or another client bound it: the watch will report it.
            tracing::debug!(%error, pod = pod.name_any(), "condition not written");
        }
        self.event(pod, "Warning", "FailedScheduling", message).await;
    }

    /// The pod is bound to `node`.
    pub(super) async fn scheduled(&self, pod: &Pod, node: &str) {
        let namespace = pod.namespace().unwrap_or_default();
        let message = format!("Successfully assigned {namespace}/{} to {node}", pod.name_any());
        self.event(pod, "Normal", "Scheduled", &message).await;
    }

    async fn event(&self, pod: &Pod, kind: &str, reason: &str, message: &str) {
        let namespace = pod.namespace().unwrap_or_default();
        let event = serde_json::from_value::<Event>(json!({
            "metadata": {"generateName": format!("{}.", pod.name_any())},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod.name_any(), "uid": pod.uid()},
            "type": kind, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(),
            "source": {"component": "default-scheduler"}, "reportingComponent": "default-scheduler",
        }));
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let written = match event {
            Ok(event) => events.create(&PostParams::default(), &event).await.map(drop),
            Err(error) => Err(kube::Error::SerdeError(error)),
        };
        if let Err(error) = written {
            tracing::debug!(%error, reason, "event not written");
        }
    }
}

fn is_reported(pod: &Pod, reason: &str, message: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False").any(
        |condition| {
            condition.reason.as_deref() == Some(reason) && condition.message.as_deref() == Some(message)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_reasons_are_counted_and_sorted() {
        let reasons = [
            "Insufficient nvidia.com/gpu",
            "node-3: 3 of 8 GPUs free, 4 asked",
            "Insufficient nvidia.com/gpu",
        ];
        assert_eq!(
            message(3, reasons.map(str::to_owned)),
            "0/3 nodes are available: 1 node-3: 3 of 8 GPUs free, 4 asked, 2 Insufficient nvidia.com/gpu."
        );
        assert_eq!(message(0, []), "no nodes available to schedule pods");
    }
}
