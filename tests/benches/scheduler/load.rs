//! The load: nodes that exist as objects only, and pods for them. Makes, counts and removes; measures nothing but the
//! time from the first Binding to the last.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use gantry_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION};
use gantry_api::{DeviceHealth, DeviceStatus, GpuNode, GpuNodeSpec, GpuNodeStatus};
use gantry_e2e::{Cluster, until};
use gantry_topology::Machine;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;

/// Far longer than any step takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Far longer than a pod takes that is one of many.
const EACH: Duration = Duration::from_millis(20);
/// Requests under way at once while making objects.
const PARALLEL: usize = 32;
const GPUS: u8 = 8;
/// Tolerations of a pod of about 1 MB.
const FAT_TOLERATIONS: u32 = 30_000;

/// The project's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Waits for what every pod of the default namespace needs.
pub(crate) async fn default_account(cluster: &Cluster) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), "default");
    until("default service account", LIMIT, async || accounts.get("default").await).await?;
    Ok(())
}

/// Makes nodes of 8 GPUs, each with its `GpuNode` as a plugin would publish it.
pub(crate) async fn create_nodes(cluster: &Cluster, count: u32) -> Result<()> {
    let path = root().join("simulator/machines/dgx-a100.yaml");
    let machine: Machine = serde_saphyr::from_str(&std::fs::read_to_string(&path)?)?;
    let nodes: Api<Node> = Api::all(cluster.client());
    let gpu_nodes: Api<GpuNode> = Api::all(cluster.client());
    stream::iter(0..count)
        .map(Ok::<_, anyhow::Error>)
        .try_for_each_concurrent(PARALLEL, |number| {
            let (nodes, gpu_nodes, machine) = (nodes.clone(), gpu_nodes.clone(), machine.clone());
            async move {
                let name = format!("fake-{number}");
                nodes.create(&PostParams::default(), &node(&name)?).await.context("node")?;
                let status = json!({ "status": resources() });
                nodes
                    .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
                    .await
                    .context("node status")?;
                let gpu_node = GpuNode::new(&name, GpuNodeSpec { machine, kubelet: None });
                gpu_nodes.create(&PostParams::default(), &gpu_node).await.context("GpuNode")?;
                let status = json!({ "status": gpu_status(number) });
                gpu_nodes
                    .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
                    .await
                    .context("GpuNode status")?;
                Ok(())
            }
        })
        .await
}

/// Makes pods of one GPU; `members` of them at a time are a gang, if that is given.
pub(crate) async fn create_pods(cluster: &Cluster, count: u32, members: Option<u32>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    stream::iter(0..count)
        .map(Ok::<_, anyhow::Error>)
        .try_for_each_concurrent(PARALLEL, |number| {
            let pods = pods.clone();
            async move {
                pods.create(&PostParams::default(), &pod(number, members)?).await.context("pod")?;
                Ok(())
            }
        })
        .await
}

/// Makes pods of one GPU, each on one of `nodes` nodes already, with these numbers.
pub(crate) async fn create_bound_pods(cluster: &Cluster, numbers: Range<u32>, nodes: u32) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    stream::iter(numbers)
        .map(Ok::<_, anyhow::Error>)
        .try_for_each_concurrent(PARALLEL, |number| {
            let pods = pods.clone();
            async move {
                let mut pod = pod(number, None)?;
                let spec = pod.spec.as_mut().context("a pod without a spec")?;
                spec.node_name = Some(format!("fake-{}", number % nodes));
                pods.create(&PostParams::default(), &pod).await.context("bound pod")?;
                Ok(())
            }
        })
        .await
}

/// Makes pods of about 1 MB that wait at a gate.
pub(crate) async fn create_fat_pods(cluster: &Cluster, count: u32) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    let tolerations: Vec<_> =
        (0..FAT_TOLERATIONS).map(|key| json!({ "key": format!("k{key}"), "operator": "Exists" })).collect();
    for number in 0..count {
        let mut fat = pod_of(&format!("fat-{number}"), 1, &json!({}))?;
        let spec = fat.spec.as_mut().context("a pod without a spec")?;
        spec.tolerations = Some(serde_json::from_value(json!(tolerations))?);
        spec.scheduling_gates = Some(serde_json::from_value(json!([{ "name": "example.com/never" }]))?);
        pods.create(&PostParams::default(), &fat).await.context("fat pod")?;
    }
    Ok(())
}

/// Makes a pod of more GPUs than a node has. Its name.
pub(crate) async fn create_large_pod(cluster: &Cluster) -> Result<String> {
    let name = "large".to_owned();
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    pods.create(&PostParams::default(), &pod_of(&name, GPUS + 1, &json!({}))?).await.context("large pod")?;
    Ok(name)
}

/// Waits until `count` pods are bound. Returns the time from the first Binding seen to the last.
pub(crate) async fn all_bound(cluster: &Cluster, count: u32) -> Result<Duration> {
    let pods: Api<PartialObjectMeta<Pod>> = Api::namespaced(cluster.client(), "default");
    let bound = watcher::Config::default().fields("spec.nodeName!=");
    let mut events = watcher(pods, bound).applied_objects().boxed();
    let mut seen = std::collections::HashSet::new();
    let mut first = None;
    let counting = async {
        while let Some(pod) = events.try_next().await? {
            let first = *first.get_or_insert_with(Instant::now);
            seen.insert(pod.metadata.name.unwrap_or_default());
            if seen.len() >= count as usize {
                return Ok(first.elapsed());
            }
        }
        anyhow::bail!("the watch ended")
    };
    tokio::time::timeout(LIMIT + EACH * count, counting).await.context("not all pods were bound in time")?
}

/// Removes all pods at once.
pub(crate) async fn delete_pods(cluster: &Cluster) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
    pods.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await?;
    until("pods gone", LIMIT, async || match pods.list(&ListParams::default().limit(1)).await {
        Ok(left) if left.items.is_empty() => Ok(()),
        Ok(_) => Err("some are left".to_owned()),
        Err(error) => Err(error.to_string()),
    })
    .await?;
    Ok(())
}

fn node(name: &str) -> Result<Node> {
    Ok(serde_json::from_value(json!({ "metadata": { "name": name }, "status": resources() }))?)
}

fn resources() -> serde_json::Value {
    let amounts = json!({ "cpu": "128", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": GPUS.to_string() });
    let ready = json!([{ "type": "Ready", "status": "True", "reason": "Benchmark", "message": "",
        "lastHeartbeatTime": "2030-01-01T00:00:00Z", "lastTransitionTime": "2020-01-01T00:00:00Z" }]);
    json!({ "capacity": amounts, "allocatable": amounts, "conditions": ready })
}

fn gpu_status(node: u32) -> GpuNodeStatus {
    let device = |gpu: u8| DeviceStatus {
        id: format!("GPU-{node:08x}-0000-0000-0000-{gpu:012x}").into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        slice: None,
        replica: None,
        health: DeviceHealth { healthy: true, reason: None },
    };
    GpuNodeStatus { devices: (0..GPUS).map(device).collect(), ..GpuNodeStatus::default() }
}

fn pod(number: u32, members: Option<u32>) -> Result<Pod> {
    let annotations = match members {
        Some(members) => json!({
            GANG_ANNOTATION: format!("gang-{}", number / members),
            GANG_MIN_ANNOTATION: members.to_string(),
        }),
        None => json!({}),
    };
    pod_of(&pod_name(number), 1, &annotations)
}

/// The name of a pod of [`create_pods`].
pub(crate) fn pod_name(number: u32) -> String {
    format!("load-{number}")
}

fn pod_of(name: &str, gpus: u8, annotations: &serde_json::Value) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": name, "annotations": annotations },
        "spec": {
            // Nodes without a kubelet keep whatever taints the start gave them.
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "main",
                "image": "none",
                "resources": { "limits": { "cpu": "1", "memory": "1Gi", "nvidia.com/gpu": gpus } },
            }],
        },
    }))?)
}
