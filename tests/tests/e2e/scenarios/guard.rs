//! The admission policies: only the extender can write a grant, by any way into a pod's annotations; a plugin can
//! change only its own fields of its Node.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::GRANT_ANNOTATION;
use gantry_e2e::gantry::{NAMESPACE, PLUGIN, manifests};
use gantry_e2e::{Cluster, Feature, Kubernetes, until};
use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Request;
use serde_json::{Value, json};

use crate::bed::Bed;
use crate::pods;

/// Far beyond what a new policy takes to be followed.
const POLICY_LIMIT: Duration = Duration::from_secs(60);

pub(super) async fn only_extender_may_write_grants(bed: &Bed) -> Result<()> {
    let pods = bed.namespace("e2e-guard").await?;
    forge(&pods, bed.cluster().nodes()[0].name()).await
}

/// Tries every way there is, with all rights.
async fn forge(pods: &Api<Pod>, node: &str) -> Result<()> {
    let mut born = pods::sleeper("born", 0)?;
    born.metadata.annotations = Some([(GRANT_ANNOTATION.to_owned(), "{}".to_owned())].into());
    refused("a new pod", pods.create(&PostParams::default(), &born).await)?;

    let mut pod = pods::sleeper("target", 0)?;
    if let Some(spec) = pod.spec.as_mut() {
        // Only this scenario binds it.
        spec.scheduler_name = Some("nobody".to_owned());
    }
    pods.create(&PostParams::default(), &pod).await?;
    let (to, how) = ("target", PatchParams::default());
    let patch = json!({ "metadata": { "annotations": { GRANT_ANNOTATION: "{}" } } });
    let patch = Patch::Merge(&patch);
    refused("a pod", pods.patch(to, &how, &patch).await)?;
    refused("a pod's status", pods.patch_status(to, &how, &patch).await)?;
    // In these cases Kubernetes itself keeps the annotations. With or without an error, nothing may change.
    for subresource in ["ephemeralcontainers", "resize"] {
        let _ = pods.patch_subresource(subresource, to, &how, &patch).await;
        ensure!(granted(pods).await?.is_none(), "forged through {subresource}");
    }

    let binding = |annotations: Value| -> Result<Binding> {
        Ok(serde_json::from_value(json!({
            "metadata": { "name": to, "annotations": annotations },
            "target": { "kind": "Node", "name": node },
        }))?)
    };
    let forged = binding(json!({ GRANT_ANNOTATION: "{}" }))?;
    refused("a Binding", bind(pods, to, &forged).await)?;
    let namespace = pods.namespace().unwrap_or_default();
    let legacy: Api<Binding> = Api::namespaced(pods.clone().into_client(), namespace);
    refused("a Binding by the older way", legacy.create(&PostParams::default(), &forged).await)?;

    // A binding without a grant and a status write without one are allowed.
    bind(pods, to, &binding(json!({ "example.com/by": "somebody" }))?).await?;
    let patch = json!({ "status": { "message": "bound by hand" } });
    pods.patch_status(to, &how, &Patch::Merge(&patch)).await?;
    ensure!(granted(pods).await?.is_none(), "a pod bound by hand has a grant");
    Ok(())
}

async fn bind(pods: &Api<Pod>, to: &str, binding: &Binding) -> Result<()> {
    let answer: kube::Result<Value> =
        pods.create_subresource("binding", to, &PostParams::default(), binding).await;
    answer?;
    Ok(())
}

async fn granted(pods: &Api<Pod>) -> Result<Option<String>> {
    let annotations = pods.get("target").await?.metadata.annotations;
    Ok(annotations.and_then(|mut all| all.remove(GRANT_ANNOTATION)))
}

fn refused<T>(what: &str, answer: Result<T, impl ToString>) -> Result<()> {
    match answer {
        Ok(_) => anyhow::bail!("{what} with a forged grant was let in"),
        Err(error) => {
            let error = error.to_string();
            ensure!(error.contains(GRANT_ANNOTATION), "{what}: {error}");
            Ok(())
        }
    }
}

pub(super) async fn plugin_may_change_only_its_own_fields(bed: &Bed) -> Result<()> {
    let plugin = Plugin { cluster: bed.cluster(), node: bed.cluster().nodes()[0].name() };
    let why = "may not write its Node's metadata";
    plugin.is_held_to(why, async |change| plugin.patch_status(change).await).await?;
    let own = json!({ "status": { "conditions": [condition("GPUHealthy")] } });
    plugin.patch_status(&own).await.context("its own condition")?;
    let nodes: Api<Node> = Api::all(bed.client());
    let features = nodes.get(plugin.node).await?.status.and_then(|status| status.features);
    let group_policy = features.and_then(|features| features.supplemental_groups_policy);
    let kubernetes = Kubernetes::selected()?;
    let unknown = [("features", Feature::NodeFeatures), ("declaredFeatures", Feature::DeclaredFeatures)];
    for (change, why) in status_changes(group_policy.unwrap_or_default()) {
        // The API server drops what it does not know, before a policy sees it.
        if unknown.iter().any(|(field, since)| change.get(field).is_some() && !kubernetes.has(*since)) {
            continue;
        }
        let change = json!({ "status": change });
        refused_for(why, &change, plugin.patch_status(&change).await)?;
    }
    for change in metadata_changes() {
        let change = json!({ "metadata": change });
        refused_for(why, &change, plugin.patch_status(&change).await)?;
    }
    let none = json!({ "status": { "conditions": [{ "type": "GPUHealthy", "$patch": "delete" }] } });
    plugin.patch_status(&none).await.context("its own condition")?;

    let labels = manifests().join("labels-node.yaml").display().to_string();
    plugin.cluster.kubectl(&["apply", "-f", &labels]).await?;
    let outcome = labels_only(&plugin).await;
    plugin.cluster.kubectl(&["delete", "-f", &labels]).await?;
    outcome
}

async fn labels_only(plugin: &Plugin<'_>) -> Result<()> {
    let why = "only the labels of docs/labels.md";
    plugin.is_held_to(why, async |change| plugin.patch(change).await).await?;
    let label = |key: &str, value: Value| json!({ "metadata": { "labels": { key: value } } });
    for value in [json!("x"), Value::Null] {
        plugin.patch(&label("nvidia.com/gpu.mode", value)).await.context("a label of its own")?;
    }
    // The first gives a plugin CAP_SYS_ADMIN there, the GPU operator acts on the second.
    for key in ["gantry.dev/mig", "nvidia.com/mig.config"] {
        let change = label(key, json!("true"));
        refused_for(why, &change, plugin.patch(&change).await)?;
    }
    let others = metadata_changes().into_iter().filter(|change| change["labels"].is_null());
    let others = others.map(|change| json!({ "metadata": change }));
    for change in others.chain([json!({ "spec": { "unschedulable": true } })]) {
        refused_for("labels of a Node, and nothing else", &change, plugin.patch(&change).await)?;
    }
    Ok(())
}

/// The plugin of a node: its service account, on its node. It may patch what it may not read, which kubectl would do
/// first.
struct Plugin<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl Plugin<'_> {
    async fn patch_status(&self, change: &Value) -> Result<()> {
        self.send(Some("status"), &Patch::Strategic(change)).await
    }

    async fn patch(&self, change: &Value) -> Result<()> {
        self.send(None, &Patch::Merge(change)).await
    }

    /// Waits until a policy that was just applied is followed, by what it refuses.
    async fn is_held_to(&self, why: &str, patch: impl AsyncFn(&Value) -> Result<()>) -> Result<()> {
        let mut tried = 0;
        until("the policy is followed", POLICY_LIMIT, async || {
            // Another one each time: what is there already is no change.
            tried += 1;
            let change = json!({ "metadata": { "labels": { "example.com/guard": format!("x{tried}") } } });
            refused_for(why, &change, patch(&change).await)
        })
        .await?;
        let clear = ["label", "node", self.node, "example.com/guard-"];
        self.cluster.kubectl(&clear).await?;
        Ok(())
    }

    async fn send(&self, subresource: Option<&str>, patch: &Patch<&Value>) -> Result<()> {
        let (nodes, how) = (Request::new("/api/v1/nodes"), PatchParams::default());
        let mut request = match subresource {
            Some(part) => nodes.patch_subresource(part, self.node, &how, patch)?,
            None => nodes.patch(self.node, &how, patch)?,
        };
        let account = format!("system:serviceaccount:{NAMESPACE}:{PLUGIN}");
        let headers = request.headers_mut();
        headers.insert("impersonate-user", account.parse()?);
        headers.insert("impersonate-extra-authentication.kubernetes.io%2fnode-name", self.node.parse()?);
        self.cluster.client().request::<Value>(request).await?;
        Ok(())
    }
}

/// Another value for each part of a Node's status except `config`, which the API server does not store, and the
/// expected error. `group_policy` is the value in the node's features.
fn status_changes(group_policy: bool) -> Vec<(Value, &'static str)> {
    let nothing_else = "conditions of its Node's status, and nothing else";
    vec![
        (json!({ "capacity": { "example.com/guard": "1" } }), "kubelet's"),
        (json!({ "allocatable": { "example.com/guard": "1" } }), "kubelet's"),
        (json!({ "conditions": [condition("ExampleGuard")] }), "condition GPUHealthy only"),
        (json!({ "addresses": [{ "type": "ExternalIP", "address": "192.0.2.1" }] }), nothing_else),
        (json!({ "daemonEndpoints": { "kubeletEndpoint": { "Port": 1 } } }), nothing_else),
        (json!({ "nodeInfo": { "kernelVersion": "guard" } }), nothing_else),
        (json!({ "images": [{ "names": ["example.com/guard"], "sizeBytes": 1 }] }), nothing_else),
        (json!({ "volumesInUse": ["example.com/guard"] }), nothing_else),
        (
            json!({ "volumesAttached": [{ "name": "example.com/guard", "devicePath": "/guard" }] }),
            nothing_else,
        ),
        (json!({ "phase": "Pending" }), nothing_else),
        (json!({ "runtimeHandlers": [{ "name": "guard" }] }), nothing_else),
        (json!({ "features": { "supplementalGroupsPolicy": !group_policy } }), nothing_else),
        (json!({ "declaredFeatures": ["Guard"] }), nothing_else),
    ]
}

fn metadata_changes() -> [Value; 4] {
    let owner = json!({ "apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "guard" });
    [
        json!({ "labels": { "nvidia.com/guard": "x" } }),
        json!({ "annotations": { "example.com/guard": "x" } }),
        json!({ "finalizers": ["example.com/guard"] }),
        json!({ "ownerReferences": [owner] }),
    ]
}

fn condition(of_type: &str) -> Value {
    json!({ "type": of_type, "status": "True", "reason": "Guard", "message": "by the scenario" })
}

fn refused_for(why: &str, change: &Value, answer: Result<()>) -> Result<()> {
    match answer {
        Ok(()) => anyhow::bail!("{change} was let in"),
        Err(error) => {
            let error = format!("{error:#}");
            ensure!(error.contains(why), "{change}: {error}");
            Ok(())
        }
    }
}
