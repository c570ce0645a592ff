//! The Node object: made at start, its capacity kept equal to what the plugins advertise.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Map, Value, json};

use super::plugins::Plugins;
use crate::api::KUBERNETES_VERSION;

/// A node's resources other than devices.
const CPUS: u32 = 64;
const MEMORY: &str = "512Gi";
const PODS: u32 = 110;

/// Creates the node.
///
/// # Errors
/// The API server refuses, or is not there.
pub(super) async fn create(
    client: &Client,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> kube::Result<()> {
    let amounts = json!({"cpu": CPUS.to_string(), "memory": MEMORY, "pods": PODS.to_string()});
    let mut all_labels = labels.clone();
    all_labels.insert("kubernetes.io/hostname".into(), name.to_owned());
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": all_labels},
        "status": {
            "capacity": amounts, "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {
                "kubeletVersion": KUBERNETES_VERSION, "operatingSystem": "linux", "architecture": std::env::consts::ARCH,
                "bootID": "", "containerRuntimeVersion": "sim://1", "kernelVersion": "", "kubeProxyVersion": "",
                "machineID": "", "osImage": "", "systemUUID": "",
            },
        },
    }))
    .map_err(kube::Error::SerdeError)?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.map(drop)
}

/// Writes device counts to the node whenever they change.
pub(super) async fn publish(client: Client, name: String, plugins: Arc<Plugins>) {
    let nodes: Api<Node> = Api::all(client);
    let mut changes = plugins.changes();
    while changes.changed().await.is_ok() {
        let counts = plugins.with_devices(|devices| devices.counts());
        let amounts = |pick: fn(&(usize, usize)) -> usize| -> Map<String, Value> {
            let amounts =
                counts.iter().map(|(resource, count)| (resource.clone(), pick(count).to_string().into()));
            amounts.collect()
        };
        let patch = json!({"status": {"capacity": amounts(|count| count.0), "allocatable": amounts(|count| count.1)}});
        if let Err(error) = nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            tracing::warn!(%error, node = name, "node status not written");
        }
    }
}
