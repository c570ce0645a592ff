//! What the plugin reads from and writes to the API server about its own node, with the manifests' rights only: the
//! configuration that a label selects, and its labels.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use gantry_e2e::gantry::{NAMESPACE, manifests};
use gantry_e2e::{gantry, until};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use serde_json::{Value, json};

use super::modes::run_on;
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::gpus::Gpus;
use crate::{pods, views};

/// The ConfigMap that the manifests give a right to, and the label that chooses of it.
const CONFIGS: &str = "gantry-plugin-config";
const LABEL: &str = "nvidia.com/device-plugin.config";

const PLAIN: &str = "version: v1\n";

/// Another name for L4s, and the third is not served.
const RENAMED: &str = "
version: v1
devices: {deny: [2]}
resources:
  gpus:
  - {pattern: '*L4*', name: inference}
";

fn shared(replicas: u32) -> String {
    format!(
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {{name: nvidia.com/gpu, replicas: {replicas}}}\n"
    )
}

pub(super) async fn node_label_selects_config_from_config_map(bed: &Bed) -> Result<()> {
    let right = manifests().join("plugin-config.yaml").display().to_string();
    bed.cluster().kubectl(&["apply", "-f", &right]).await?;
    let outcome = chosen_by_label(bed).await;
    bed.cluster().kubectl(&["delete", "-f", &right]).await?;
    // Restores the state for other scenarios, after success or failure.
    let node = bed.cluster().nodes()[2].name();
    label(bed, node, None).await?;
    let args = ["-n", NAMESPACE, "delete", "configmap", CONFIGS, "--ignore-not-found"];
    bed.cluster().kubectl(&args).await?;
    outcome
}

async fn chosen_by_label(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-config-map").await?;
    let node = cluster.nodes()[2].name();
    let mut configs =
        BTreeMap::from([("plain", PLAIN.to_owned()), ("twice", shared(2)), ("renamed", RENAMED.to_owned())]);
    write(bed, &configs).await?;
    let args = [format!("--config-map={NAMESPACE}/{CONFIGS}"), "--default-config=plain".to_owned()];
    gpus.serve(cluster, node, None, &args, &[("nvidia.com/gpu", 4)]).await?;
    label(bed, node, Some("twice")).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 8)]).await?;
    configs.insert("twice", shared(3));
    write(bed, &configs).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 12)]).await?;
    // An invalid configuration changes nothing, and the Node reports the error.
    configs.insert("twice", shared(4).replace("replicas", "replicars"));
    write(bed, &configs).await?;
    let about = ("Node", node, None);
    views::event(bed, "default", about, "ConfigInvalid", &["replicars", "replicas"]).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 12)]).await?;

    label(bed, node, Some("renamed")).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 0), ("nvidia.com/inference", 3)]).await?;
    gets_all_but_the_denied(bed, gpus, &api, node).await?;
    label(bed, node, None).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 4), ("nvidia.com/inference", 0)]).await?;
    only_that_one(bed).await
}

/// A pod of all that is served has the three that are not denied.
async fn gets_all_but_the_denied(bed: &Bed, gpus: &Gpus, api: &Api<Pod>, node: &str) -> Result<()> {
    let cluster = bed.cluster();
    let denied = gantry_e2e::hardware::Hardware::install_in(
        cluster.node(node)?,
        &gantry::machine_file("l4-4x-pcie"),
        "known",
    )?;
    let denied = denied.machine().gpus().get(2).and_then(|gpu| gpu.uuid.clone());
    let mut rest = gpus.all().remove(node).unwrap_or_default();
    let there = denied.is_some_and(|gpu| rest.remove(&gpu.to_string()));
    ensure!(there && rest.len() == 3, "{rest:?}");
    let pod = run_on(api, "all", "nvidia.com/inference", 3, node).await?;
    let seen = pods::seen(cluster, &pod, "main").await?;
    ensure!(seen == rest, "sees {seen:?} of {rest:?}");
    let held = pods::held_of(cluster, &pod, "main", "nvidia.com/inference").await?;
    ensure!(held == rest, "kubelet says {held:?}");
    Ok(())
}

/// The manifests let it see no other ConfigMap, and none of other namespaces.
async fn only_that_one(bed: &Bed) -> Result<()> {
    let user = format!("--as=system:serviceaccount:{NAMESPACE}:gantry-plugin");
    for (what, namespace, may) in [
        (format!("configmaps/{CONFIGS}"), NAMESPACE, true),
        ("configmaps/other".to_owned(), NAMESPACE, false),
        ("configmaps".to_owned(), NAMESPACE, false),
        (format!("configmaps/{CONFIGS}"), "default", false),
    ] {
        let args = ["auth", "can-i", "watch", &what, "-n", namespace, &user];
        let answer = bed.cluster().kubectl(&args).await;
        // kubectl fails where the answer is no.
        ensure!(answer.is_ok() == may, "watch {what} in {namespace}: {answer:?}");
    }
    Ok(())
}

pub(super) async fn labels_are_written_to_node_or_node_feature(bed: &Bed) -> Result<()> {
    let outcome = labels_written(bed).await;
    let node = bed.cluster().nodes()[2].name();
    // Whatever came of it: the plugin ends and its labels stay.
    let gpus = bed.gpus().await?;
    gpus.restart_plugin(bed.cluster(), node, &[]).await?;
    let own: Vec<String> = labels(bed, node)
        .await?
        .into_keys()
        .filter(|key| is_ours(key))
        .map(|key| format!("{key}-"))
        .collect();
    let mut args = vec!["label", "node", node];
    args.extend(own.iter().map(String::as_str));
    if !own.is_empty() {
        bed.cluster().kubectl(&args).await?;
    }
    let right = manifests().join("labels-node.yaml").display().to_string();
    let args = ["delete", "-f", &right, "--ignore-not-found"];
    bed.cluster().kubectl(&args).await?;
    let definition = node_feature().to_string();
    let args = ["delete", "--ignore-not-found", "--wait=false", "-f", "-"];
    bed.cluster().kubectl_with_input(&args, &definition).await?;
    outcome
}

async fn labels_written(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = cluster.nodes()[2].name();
    let others: BTreeMap<String, String> = labels(bed, node).await?;
    ensure!(!others.keys().any(|key| is_ours(key)), "{others:?}");
    let right = manifests().join("labels-node.yaml").display().to_string();
    cluster.kubectl(&["apply", "-f", &right]).await?;
    let four = [("nvidia.com/gpu", 4)];
    gpus.serve(cluster, node, None, &["--labels=node".to_owned()], &four).await?;
    let written = until("labels of the Node", GANG_LIMIT, async || {
        let all = labels(bed, node).await.map_err(|error| format!("{error:#}"))?;
        tell_of_four_l4(&all).map(|()| all)
    })
    .await?;
    for (key, value) in &others {
        ensure!(written.get(key) == Some(value), "{key} is {:?}", written.get(key));
    }

    // Where node-feature-discovery is installed, its object has them instead.
    let definition = node_feature().to_string();
    cluster.kubectl_with_input(&["apply", "-f", "-"], &definition).await?;
    gpus.serve(cluster, node, None, &["--labels=node-feature".to_owned()], &four).await?;
    let name = format!("nvidia-features-for-{node}");
    let args = ["-n", NAMESPACE, "get", "nodefeature", &name, "-o", "json"];
    until("labels of the NodeFeature", GANG_LIMIT, async || {
        let text = cluster.kubectl(&args).await.map_err(|error| error.to_string())?;
        let object: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        let of = &object["metadata"]["labels"]["nfd.node.kubernetes.io/node-name"];
        if of != node {
            return Err(format!("it is of the node {of}"));
        }
        let all = serde_json::from_value(object["spec"]["labels"].clone());
        tell_of_four_l4(&all.map_err(|error| error.to_string())?)
    })
    .await?;
    Ok(())
}

/// NVIDIA's labels and ours of four L4s without NVLink.
fn tell_of_four_l4(labels: &BTreeMap<String, String>) -> std::result::Result<(), String> {
    for (key, value) in [
        ("nvidia.com/gpu.product", "NVIDIA-L4"),
        ("nvidia.com/gpu.count", "4"),
        ("nvidia.com/gpu.memory", "23034"),
        ("gantry.dev/gpu.healthy", "4"),
        ("gantry.dev/nvlink.size", "1"),
    ] {
        let found = labels.get(key).map(String::as_str);
        if found != Some(value) {
            return Err(format!("{key} is {found:?}, not {value:?}"));
        }
    }
    Ok(())
}

fn is_ours(key: &str) -> bool {
    key.starts_with("nvidia.com/") || key.starts_with("gantry.dev/")
}

async fn labels(bed: &Bed, node: &str) -> Result<BTreeMap<String, String>> {
    let nodes: Api<Node> = Api::all(bed.client());
    Ok(nodes.get(node).await?.metadata.labels.unwrap_or_default())
}

/// Labels a node with the configuration that it is to have, or takes the label away.
async fn label(bed: &Bed, node: &str, config: Option<&str>) -> Result<()> {
    let word = match config {
        Some(config) => format!("{LABEL}={config}"),
        None => format!("{LABEL}-"),
    };
    let args = ["label", "--overwrite", "node", node, &word];
    bed.cluster().kubectl(&args).await?;
    Ok(())
}

async fn write(bed: &Bed, configs: &BTreeMap<&str, String>) -> Result<()> {
    let object = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": CONFIGS, "namespace": NAMESPACE },
        "data": configs,
    });
    let args = ["apply", "-f", "-"];
    bed.cluster().kubectl_with_input(&args, &object.to_string()).await?;
    Ok(())
}

/// The kind of node-feature-discovery, as far as labels go.
pub(super) fn node_feature() -> Value {
    let any = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let texts = json!({ "type": "object", "additionalProperties": { "type": "string" } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": "nodefeatures.nfd.k8s-sigs.io" },
        "spec": {
            "group": "nfd.k8s-sigs.io",
            "scope": "Namespaced",
            "names": { "kind": "NodeFeature", "plural": "nodefeatures", "singular": "nodefeature" },
            "versions": [{
                "name": "v1alpha1",
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": {
                    "type": "object",
                    "required": ["spec"],
                    "properties": { "spec": {
                        "type": "object",
                        "properties": { "features": any, "labels": texts },
                    } },
                } },
            }],
        },
    })
}
