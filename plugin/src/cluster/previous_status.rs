//! Reads the status that an earlier run of this plugin published: its holders and faults must survive a restart. Other
//! modules judge it.

use gantry_api::{Cordons, GpuEvidence, GpuFault, GpuNode, GpuProblem, Holder, NodeName, names};
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Duration, Instant};
use tracing::warn;

use super::RETRY;

/// How long a refusal may come from an API server that has just started and does not know the permissions yet.
const STARTUP: Duration = Duration::from_secs(15);

/// State that survives a restart of the plugin.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PreviousStatus {
    pub(super) holders: Vec<Holder>,
    pub(super) faults: Vec<GpuFault>,
    pub(super) problems: Vec<GpuProblem>,
    pub(super) evidence: Vec<GpuEvidence>,
    /// The GPUs that are cordoned by annotation.
    pub(super) cordons: Cordons,
    /// The annotation that has NVML closed, because a GPU is being reset.
    pub(super) nvml_closed: Option<String>,
}

impl PreviousStatus {
    /// Reads the entries that this version understands: an unknown entry, written by a later version or by hand, must
    /// not hide the others.
    pub(super) fn of(node: &DynamicObject) -> Self {
        let annotations = node.metadata.annotations.as_ref();
        Self {
            holders: entries(&node.data["status"]["holders"], "holder"),
            faults: entries(&node.data["status"]["faults"], "fault"),
            problems: entries(&node.data["status"]["problems"], "problem"),
            evidence: entries(&node.data["status"]["evidence"], "record of evidence"),
            cordons: Cordons::of(annotations),
            nvml_closed: annotations.and_then(|all| all.get(names::NVML_CLOSED_ANNOTATION).cloned()),
        }
    }
}

fn entries<T: DeserializeOwned>(list: &Value, what: &str) -> Vec<T> {
    let entries = list.as_array().into_iter().flatten();
    entries
        .filter_map(|entry| {
            T::deserialize(entry)
                .inspect_err(
                    |error| warn!(%error, %entry, "cannot parse a {what} published by an earlier run; skipping it"),
                )
                .ok()
        })
        .collect()
}

/// `GpuNode`s as untyped objects, so that one written by another version can be read.
pub(super) fn objects(client: Client) -> Api<DynamicObject> {
    Api::all_with(client, &ApiResource::erase::<GpuNode>(&()))
}

/// The last status of this node. Retried until the API server responds; `failed` is called after each failure.
pub(super) async fn read(
    client: &Client,
    node: &NodeName,
    mut failed: impl FnMut(&kube::Error),
) -> Option<PreviousStatus> {
    let api = objects(client.clone());
    let mut backoff = RETRY;
    let mut forbidden_since = None;
    loop {
        match api.get_opt(node.as_str()).await {
            Ok(node) => return node.map(|node| PreviousStatus::of(&node)),
            // A refusal that lasts longer than a start is permanent. Any other failure (too many requests, an unknown
            // token) may pass: to continue without the old status would overwrite it.
            Err(kube::Error::Api(status))
                if status.code == 403
                    && forbidden_since.get_or_insert_with(Instant::now).elapsed() >= STARTUP =>
            {
                warn!(
                    status = status.code,
                    message = status.message,
                    "cannot read the GpuNode of this node; holders and faults of an earlier run are unknown"
                );
                return None;
            }
            Err(error) => {
                failed(&error);
                tokio::time::sleep(backoff.fail()).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;
