//! Pods for scenarios, and reading what became of them.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gantry_api::Grant;
use gantry_api::names::{GPU_RESOURCE, GRANT_ANNOTATION};
use gantry_e2e::{BUSYBOX_IMAGE, Cluster, podresources, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

/// How long a pod may take to run; far beyond what it takes, for machines under load.
pub(crate) const RUN_LIMIT: Duration = Duration::from_secs(180);

/// A pod of one busybox container that sleeps, asking for `gpus` whole GPUs.
pub(crate) fn sleeper(name: &str, gpus: usize) -> Result<Pod> {
    sleeper_of(name, GPU_RESOURCE, gpus)
}

/// The same, asking for so many of a resource.
pub(crate) fn sleeper_of(name: &str, resource: &str, count: usize) -> Result<Pod> {
    let resources = if count == 0 { json!({}) } else { json!({ "limits": { resource: count } }) };
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

/// How many pods come and go in a scenario about many: a number for every commit, unless `GANTRY_PODS` has another.
pub(crate) fn count(usual: usize) -> Result<usize> {
    Ok(number("GANTRY_PODS")?.unwrap_or(usual))
}

/// The number in an environment variable, if it is set.
pub(crate) fn number<T: FromStr>(variable: &str) -> Result<Option<T>> {
    let Ok(text) = std::env::var(variable) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => bail!("{variable}={text} is not a number"),
    }
}

/// The node a pod was put on.
pub(crate) fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// A pod's phase.
pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// The message of the pod's status, or the messages of its conditions.
pub(crate) fn said(pod: &Pod) -> String {
    let Some(status) = &pod.status else {
        return String::new();
    };
    let conditions = status.conditions.iter().flatten().filter_map(|condition| condition.message.clone());
    let own = status.reason.iter().chain(&status.message).cloned();
    own.chain(conditions).collect::<Vec<_>>().join("; ")
}

/// The grant that the extender wrote for a pod.
pub(crate) fn grant(pod: &Pod) -> Result<Grant> {
    let annotations = pod.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get(GRANT_ANNOTATION)).context("the pod carries no grant")?;
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    Ok(Grant::parse(text, &uid.into(), &node(pod).into())?)
}

/// The devices that a pod's grant gives it in all.
pub(crate) fn granted(pod: &Pod) -> Result<BTreeSet<String>> {
    granted_of(pod, GPU_RESOURCE)
}

/// The devices of a resource that a pod's grant gives it in all.
pub(crate) fn granted_of(pod: &Pod, resource: &str) -> Result<BTreeSet<String>> {
    Ok(grant(pod)?.held(resource).iter().map(ToString::to_string).collect())
}

/// The devices that a running container sees in its environment.
pub(crate) async fn seen(cluster: &Cluster, pod: &Pod, container: &str) -> Result<BTreeSet<String>> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let argv =
        ["-n", namespace, "exec", name, "-c", container, "--", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"];
    let text = cluster.kubectl(&argv).await?;
    Ok(text.trim().split(',').filter(|device| !device.is_empty()).map(str::to_owned).collect())
}

/// What a folder of a pod's container holds; nothing where there is no such folder.
pub(crate) async fn listed(cluster: &Cluster, pod: &Pod, folder: &str) -> Result<BTreeSet<String>> {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let (namespace, name) = (part(&pod.metadata.namespace), part(&pod.metadata.name));
    let look = format!("ls {folder} 2>/dev/null || true");
    let text = cluster.kubectl(&["-n", &namespace, "exec", &name, "--", "sh", "-c", &look]).await?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

/// The GPUs of a container, as kubelet reports them.
pub(crate) async fn held(cluster: &Cluster, pod: &Pod, container: &str) -> Result<BTreeSet<String>> {
    held_of(cluster, pod, container, GPU_RESOURCE).await
}

/// The devices of a resource in a container, as kubelet reports them.
pub(crate) async fn held_of(
    cluster: &Cluster,
    pod: &Pod,
    container: &str,
    resource: &str,
) -> Result<BTreeSet<String>> {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let name = (part(&pod.metadata.namespace), part(&pod.metadata.name), container.to_owned());
    let all = podresources::held(cluster.node(node(pod))?, resource).await?;
    Ok(all.get(&name).cloned().unwrap_or_default())
}

/// Waits until a pod has succeeded or failed, and returns the phase.
pub(crate) async fn ended(api: &Api<Pod>, name: &str) -> Result<String> {
    let phase = until(format!("{name} ended"), RUN_LIMIT, async || {
        let pod = api.get(name).await.map_err(|error| error.to_string())?;
        match phase(&pod) {
            ended @ ("Succeeded" | "Failed") => Ok(ended.to_owned()),
            other => Err(format!("{other}: {}", said(&pod))),
        }
    });
    Ok(phase.await?)
}
