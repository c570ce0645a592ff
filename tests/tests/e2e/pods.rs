//! Pods for scenarios, and reading what became of them.

use std::time::Duration;

use anyhow::Result;
use gantry_e2e::{BUSYBOX_IMAGE, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

/// How long a pod may take to run; far beyond what it takes, for machines under load.
const RUN_LIMIT: Duration = Duration::from_secs(60);

/// A pod of one busybox container that sleeps, asking for `gpus` whole GPUs.
pub(crate) fn sleeper(name: &str, gpus: usize) -> Result<Pod> {
    let resources = if gpus == 0 {
        json!({})
    } else {
        json!({ "limits": { "nvidia.com/gpu": gpus } })
    };
    Ok(serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 100000 & wait"],
                "resources": resources,
            }],
        },
    }))?)
}

/// The same, put on a node past the scheduler.
pub(crate) fn pinned(name: &str, gpus: usize, node: &str) -> Result<Pod> {
    let mut pod = sleeper(name, gpus)?;
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(node.to_owned());
    }
    Ok(pod)
}

/// Creates a pod and waits until it runs.
pub(crate) async fn run(api: &Api<Pod>, pod: &Pod) -> Result<Pod> {
    let created = api.create(&PostParams::default(), pod).await?;
    running(api, created.metadata.name.as_deref().unwrap_or_default()).await
}

/// Waits until a pod runs; fails at once if it failed.
pub(crate) async fn running(api: &Api<Pod>, name: &str) -> Result<Pod> {
    let found = until(format!("{name} running"), RUN_LIMIT, async || {
        let pod = api.get(name).await.map_err(|error| error.to_string())?;
        match phase(&pod) {
            "Running" => Ok(Ok(pod)),
            "Failed" => Ok(Err(said(&pod))),
            other => Err(format!("{other}: {}", said(&pod))),
        }
    })
    .await?;
    found.map_err(|why| anyhow::anyhow!("{name} failed: {why}"))
}

/// The node a pod was put on.
pub(crate) fn node(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}

/// A pod's phase.
pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// What the pod's status says in words: its own message, or that of its conditions.
pub(crate) fn said(pod: &Pod) -> String {
    let Some(status) = &pod.status else {
        return String::new();
    };
    let conditions = status
        .conditions
        .iter()
        .flatten()
        .filter_map(|condition| condition.message.clone());
    let own = status.reason.iter().chain(&status.message).cloned();
    own.chain(conditions).collect::<Vec<_>>().join("; ")
}
