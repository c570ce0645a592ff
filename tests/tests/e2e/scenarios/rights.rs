//! What a stolen token of a daemon can do: the admission policies refuse what the daemon does not do, and admit what it
//! does. Each request impersonates a service account.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::RESET;
use gantry_e2e::gantry::{EXTENDER, NAMESPACE, PLUGIN, manifests};
use gantry_e2e::{Cluster, until};
use http::{Method, Request};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::modes::run_on;
use super::node_config::node_feature;
use crate::bed::Bed;
use crate::pods;
use crate::views::reports;

/// Far more than a new policy takes to be followed.
const POLICY_LIMIT: Duration = Duration::from_secs(60);

const GPU_NODES: &str = "/apis/gantry.dev/v1alpha1/gpunodes";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const JSON: &str = "application/json";

/// A client that impersonates an account, on a node if it is a plugin.
struct Account<'a> {
    cluster: &'a Cluster,
    user: String,
    groups: &'static [&'static str],
    node: Option<&'a str>,
}

impl<'a> Account<'a> {
    fn plugin(cluster: &'a Cluster, node: &'a str) -> Self {
        let user = format!("system:serviceaccount:{NAMESPACE}:{PLUGIN}");
        Self { cluster, user, groups: &[], node: Some(node) }
    }

    fn extender(cluster: &'a Cluster) -> Self {
        let user = format!("system:serviceaccount:{NAMESPACE}:{EXTENDER}");
        Self { cluster, user, groups: &[], node: None }
    }

    /// The account of the Jobs that reset GPUs.
    fn reset(cluster: &'a Cluster) -> Self {
        let user = format!("system:serviceaccount:{NAMESPACE}:{RESET}");
        Self { cluster, user, groups: &[], node: None }
    }

    fn kubelet(cluster: &'a Cluster, node: &str) -> Self {
        Self { cluster, user: format!("system:node:{node}"), groups: &["system:nodes"], node: None }
    }

    async fn send(&self, method: Method, path: &str, media: &str, body: &Value) -> Result<Value> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let mut request = Request::builder().method(method).uri(path).header("content-type", media);
        request = request.header("impersonate-user", &self.user);
        for group in self.groups {
            request = request.header("impersonate-group", *group);
        }
        if let Some(node) = self.node {
            request = request.header("impersonate-extra-authentication.kubernetes.io%2fnode-name", node);
        }
        Ok(self.cluster.client().request::<Value>(request.body(body)?).await?)
    }

    async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.send(Method::POST, path, JSON, object).await
    }

    async fn patch(&self, path: &str, change: &Value) -> Result<Value> {
        self.send(Method::PATCH, path, MERGE, change).await
    }

    async fn delete(&self, path: &str) -> Result<Value> {
        self.send(Method::DELETE, path, JSON, &Value::Null).await
    }
}

/// Checks that a request was refused with these words.
fn refused<T>(why: &str, what: impl std::fmt::Display, answer: Result<T>) -> Result<()> {
    match answer {
        Ok(_) => anyhow::bail!("{what} was let in"),
        Err(error) => {
            let error = format!("{error:#}");
            ensure!(error.contains(why), "{what}: {error}, not {why:?}");
            Ok(())
        }
    }
}

/// `base` with another value at a JSON pointer.
fn changed(base: &Value, pointer: &str, value: Value) -> Result<Value> {
    let mut object = base.clone();
    let (parent, field) = pointer.rsplit_once('/').context("a pointer")?;
    let parent = object.pointer_mut(parent).context("no parent")?;
    parent[field.replace("~1", "/").as_str()] = value;
    Ok(object)
}

pub(super) async fn plugin_writes_only_its_own_gpu_node(bed: &Bed) -> Result<()> {
    let (cluster, node) = (bed.cluster(), bed.cluster().nodes()[0].name());
    let plugin = Account::plugin(cluster, node);
    let own = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": node },
        "spec": { "machine": { "gpus": [], "paths": [] } },
    });
    let owner = json!([{ "apiVersion": "v1", "kind": "Namespace", "name": node, "uid": "guard" }]);
    let gpus: Vec<Value> = (0..33).map(|index| json!({ "index": index })).collect();
    for (pointer, value, why) in [
        ("/metadata/name", json!("another"), "the GpuNode of its own node only"),
        ("/metadata/labels", json!({ "a": "b" }), "may not set annotations or labels"),
        ("/metadata/annotations", json!({ "a": "b" }), "may not set annotations or labels"),
        ("/metadata/finalizers", json!(["example.com/guard"]), "has no finalizer"),
        ("/metadata/ownerReferences", owner, "belongs to the Node of its name"),
        ("/spec/machine/gpus", json!(gpus), "must have at most 32 items"),
        ("/spec/machine/name", json!("x".repeat(4097)), "Too long"),
    ] {
        refused(why, pointer, plugin.create(GPU_NODES, &changed(&own, pointer, value)?).await)?;
    }
    plugin.create(GPU_NODES, &own).await.context("its own GpuNode")?;
    let path = format!("{GPU_NODES}/{node}");
    let outcome = changes_of_gpu_node(&plugin, &path, node).await;
    cluster.kubectl(&["delete", "gpunode", node]).await?;
    outcome
}

async fn changes_of_gpu_node(plugin: &Account<'_>, path: &str, node: &str) -> Result<()> {
    let device = json!({ "id": "GPU-0", "resource": "nvidia.com/gpu", "gpu": 0, "healthy": true });
    let status = |devices: usize| json!({ "status": { "devices": vec![device.clone(); devices] } });
    let status_path = format!("{path}/status");
    refused("must have at most 8192 items", "status", plugin.patch(&status_path, &status(8193)).await)?;
    plugin.patch(&status_path, &status(1)).await.context("its own status")?;
    let lift = "gantry.dev/lift-quarantine";
    plugin.cluster.kubectl(&["annotate", "gpunode", node, &format!("{lift}=all")]).await?;
    let annotation = |value: Value| json!({ "metadata": { "annotations": { lift: value } } });
    let why = "may not set annotations";
    refused(why, "an annotation", plugin.patch(path, &annotation(json!("GPU-1"))).await)?;
    plugin.patch(path, &annotation(Value::Null)).await.context("the removal of an annotation")?;
    let cordon = "gantry.dev/cordon-GPU-0";
    plugin.cluster.kubectl(&["annotate", "gpunode", node, &format!("{cordon}=fan")]).await?;
    for value in [json!("another reason"), Value::Null] {
        let change = json!({ "metadata": { "annotations": { cordon: value } } });
        let why =
            if value.is_null() { "gantry.dev/lift-quarantine of its GpuNode, and no other" } else { why };
        refused(why, "a cordon", plugin.patch(path, &change).await)?;
    }
    plugin.patch(&status_path, &status(2)).await.context("its status beside a cordon")?;
    let other = Account::plugin(plugin.cluster, "another");
    let why = "the GpuNode of its own node only";
    refused(why, "another plugin's status", other.patch(&status_path, &status(0)).await)
}

/// An Event in the namespace of `namespace`.
fn event(name: &str, namespace: &str, by: (&str, &str), about: (&str, &str), reason: &str) -> Value {
    let (controller, instance) = by;
    let (kind, regarding) = about;
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": { "name": name, "namespace": namespace },
        "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Guard", "reason": reason, "type": "Normal",
        "note": "by the scenario",
        "reportingController": controller, "reportingInstance": instance,
        "regarding": {
            "apiVersion": "v1", "kind": kind, "name": regarding,
            "namespace": if kind == "Node" { Value::Null } else { json!(namespace) },
        },
    })
}

fn events_of(namespace: &str) -> String {
    format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events")
}

pub(super) async fn daemons_write_only_their_own_events(bed: &Bed) -> Result<()> {
    let (cluster, node) = (bed.cluster(), bed.cluster().nodes()[0].name());
    bed.namespace("e2e-rights-events").await?;
    let space = "e2e-rights-events";
    let path = events_of(space);
    let admin: Value = event("admins", space, ("kubelet", node), ("Pod", "p"), "Killing");
    cluster.kubectl_with_input(&["apply", "-f", "-"], &admin.to_string()).await?;
    let foreign = format!("{path}/admins");
    let series = json!({ "series": { "count": 7, "lastObservedTime": "2026-01-01T00:00:01.000000Z" } });

    let (plugin, extender) = (Account::plugin(cluster, node), Account::extender(cluster));
    // Where this is the first scenario, the policies may still be unknown to the API server.
    let tried = format!("{path}?dryRun=All");
    for account in [&plugin, &extender] {
        let forged = event("forged", space, ("kubelet", "another"), ("Pod", "p"), "Killing");
        is_followed(" only", async || account.create(&tried, &forged).await).await?;
    }

    let own = (PLUGIN, node);
    let about_node = event("node", "default", own, ("Node", node), "GpuUnhealthy");
    plugin.create(&events_of("default"), &about_node).await.context("about its Node")?;
    let about_pod = event("pod", space, own, ("Pod", "p"), "GrantRefused");
    plugin.create(&path, &about_pod).await.context("about a pod")?;
    plugin.patch(&format!("{path}/pod"), &series).await.context("its own series")?;
    cluster.kubectl(&["-n", "default", "delete", "events.events.k8s.io", "node"]).await?;
    for (by, about, reason, why) in [
        (("kubelet", node), ("Pod", "p"), "GrantRefused", "as gantry-plugin of its own node only"),
        ((PLUGIN, "another"), ("Pod", "p"), "GrantRefused", "as gantry-plugin of its own node only"),
        (own, ("Secret", "p"), "GrantRefused", "about its own Node and about pods only"),
        (own, ("Pod", "p"), "Killing", "with this reason"),
    ] {
        let forged = event("forged", space, by, about, reason);
        refused(why, &forged, plugin.create(&path, &forged).await)?;
    }
    let other_node = event("forged", "default", own, ("Node", "another"), "GpuUnhealthy");
    let why = "about its own Node and about pods only";
    refused(why, &other_node, plugin.create(&events_of("default"), &other_node).await)?;
    refused("only", "another's Event", plugin.patch(&foreign, &series).await)?;
    let other = Account::plugin(cluster, "another");
    refused("only", "an Event of another node", other.patch(&format!("{path}/pod"), &series).await)?;

    let own = (EXTENDER, EXTENDER);
    for (name, kind) in [("extenders-pod", "Pod"), ("extenders-gang", "Gang")] {
        let good = event(name, space, own, (kind, "p"), "GangWaiting");
        extender.create(&path, &good).await.with_context(|| format!("about a {kind}"))?;
        extender.patch(&format!("{path}/{name}"), &series).await.context("its own series")?;
    }
    let refusal = event("extenders-claim", space, own, ("PersistentVolumeClaim", "p"), "ObjectTooLarge");
    extender.create(&path, &refusal).await.context("about an object that is not read")?;
    for (by, kind, why) in [
        (("default-scheduler", EXTENDER), "Pod", "as gantry-extender only"),
        (own, "Secret", "about pods and Gangs only"),
    ] {
        let forged = event("forged", space, by, (kind, "p"), "GangWaiting");
        refused(why, &forged, extender.create(&path, &forged).await)?;
    }
    refused("only", "another's Event", extender.patch(&foreign, &series).await)
}

pub(super) async fn plugin_writes_only_its_own_node_feature(bed: &Bed) -> Result<()> {
    let definition = node_feature().to_string();
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &definition).await?;
    let outcome = node_features(bed).await;
    let args = ["delete", "--ignore-not-found", "--wait=false", "-f", "-"];
    bed.cluster().kubectl_with_input(&args, &definition).await?;
    outcome
}

async fn node_features(bed: &Bed) -> Result<()> {
    let (cluster, node) = (bed.cluster(), bed.cluster().nodes()[0].name());
    let plugin = Account::plugin(cluster, node);
    let path = format!("/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/{NAMESPACE}/nodefeatures");
    let name = format!("nvidia-features-for-{node}");
    let own = json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature",
        "metadata": { "name": name, "labels": { "nfd.node.kubernetes.io/node-name": node } },
        "spec": {
            "features": { "attributes": {}, "flags": {}, "instances": {} },
            "labels": { "nvidia.com/gpu.count": "4", "gantry.dev/gpu.healthy": "4" },
        },
    });
    until("the kind is served", POLICY_LIMIT, async || {
        let foreign = changed(&own, "/metadata/name", json!("another"))?;
        refused("the NodeFeature of its own node only", "a name", plugin.create(&path, &foreign).await)
    })
    .await?;
    let node_label = |name: &str| json!({ "nfd.node.kubernetes.io/node-name": name });
    let flags = json!({ "kernel": { "elements": { "a": {} } } });
    for (pointer, value, why) in [
        ("/metadata/labels", node_label("another"), "the NodeFeature of its own node only"),
        ("/metadata/labels", Value::Null, "the NodeFeature of its own node only"),
        ("/spec/labels", json!({ "gantry.dev/mig": "true" }), "only the labels of docs/labels.md"),
        ("/spec/labels", json!({ "nvidia.com/mig.config": "all-1g.5gb" }), "only the labels of"),
        ("/spec/labels", json!({ "nvidia.com/gpu.deploy.driver": "false" }), "only the labels of"),
        ("/spec/labels", json!({ "node-role.kubernetes.io/control-plane": "" }), "only the labels of"),
        ("/spec/features/flags", flags, "and no features"),
    ] {
        refused(why, pointer, plugin.create(&path, &changed(&own, pointer, value)?).await)?;
    }
    plugin.create(&path, &own).await.context("its own NodeFeature")?;
    let own_path = format!("{path}/{name}");
    let mut stored = stored(cluster, &name).await?;
    stored["spec"]["labels"]["gantry.dev/mig"] = json!("true");
    refused("only the labels of", "mig", plugin.send(Method::PUT, &own_path, JSON, &stored).await)?;
    stored["spec"]["labels"] = json!({ "nvidia.com/gpu.replicas": "1" });
    plugin.send(Method::PUT, &own_path, JSON, &stored).await.context("its own labels")?;
    let other = Account::plugin(cluster, "another");
    refused("of its own node only", "a deletion", other.delete(&own_path).await)?;
    plugin.delete(&own_path).await.context("its own NodeFeature")?;
    Ok(())
}

async fn stored(cluster: &Cluster, name: &str) -> Result<Value> {
    let text = cluster.kubectl(&["-n", NAMESPACE, "get", "nodefeature", name, "-o", "json"]).await?;
    Ok(serde_json::from_str(&text)?)
}

/// A pod that no scheduler binds.
fn unscheduled(name: &str, gpus: usize, annotation: Option<(&str, &str)>) -> Result<Pod> {
    let mut pod = pods::sleeper(name, gpus)?;
    pod.metadata.annotations = annotation.map(|(key, value)| [(key.to_owned(), value.to_owned())].into());
    if let Some(spec) = pod.spec.as_mut() {
        spec.scheduler_name = Some("nobody".to_owned());
    }
    Ok(pod)
}

pub(super) async fn extender_writes_only_what_it_needs_of_pods(bed: &Bed) -> Result<()> {
    let api = bed.namespace("e2e-rights-pods").await?;
    let extender = Account::extender(bed.cluster());
    let path = |pod: &str| format!("/api/v1/namespaces/e2e-rights-pods/pods/{pod}");
    let member = Some(("gantry.dev/gang", "g"));
    for pod in
        [unscheduled("plain", 0, None)?, unscheduled("gpu", 1, None)?, unscheduled("member", 0, member)?]
    {
        api.create(&PostParams::default(), &pod).await?;
    }
    statuses(&extender, path).await?;
    let node = bed.cluster().nodes()[0].name();
    bindings(&extender, &api, path, node).await?;
    removals(&extender, &api, path).await
}

async fn statuses(extender: &Account<'_>, path: impl Fn(&str) -> String) -> Result<()> {
    let condition = |of: &str, reason: &str| {
        let condition =
            json!({ "type": of, "status": "True", "reason": reason, "message": "by the scenario" });
        json!({ "status": { "conditions": [condition] } })
    };
    let write = async |pod: &str, change: &Value| {
        let path = format!("{}/status", path(pod));
        extender.send(Method::PATCH, &path, STRATEGIC, change).await
    };
    let freed = condition("gantry.dev/GpusFreed", "GpusFreed");
    refused("of pods that ask for managed resources", "a plain pod", write("plain", &freed).await)?;
    let activated = json!({ "metadata": { "annotations": { "gantry.dev/activated-at": "now" } } });
    let nominated = json!({ "status": { "nominatedNodeName": "another" } });
    let marked = condition("DisruptionTarget", "GangRestarting");
    for pod in ["gpu", "member"] {
        for change in [&freed, &activated, &nominated, &marked] {
            write(pod, change).await.with_context(|| format!("{change} on {pod}"))?;
        }
    }
    let nothing_else = "and nothing else of it";
    for (change, why) in [
        (condition("Ready", "x"), "the conditions gantry.dev/GpusFreed and DisruptionTarget only"),
        (condition("DisruptionTarget", "PreemptionByScheduler"), "with the reason GangRestarting only"),
        (json!({ "status": { "phase": "Failed" } }), nothing_else),
        (json!({ "status": { "message": "x" } }), nothing_else),
        (json!({ "status": { "reason": "x" } }), nothing_else),
        (json!({ "status": { "startTime": "2026-01-01T00:00:00Z" } }), nothing_else),
        (json!({ "status": { "podIP": "192.0.2.1", "podIPs": [{ "ip": "192.0.2.1" }] } }), nothing_else),
        (json!({ "metadata": { "labels": { "a": "b" } } }), "nothing else of its metadata"),
        (json!({ "metadata": { "annotations": { "a": "b" } } }), "nothing else of its metadata"),
    ] {
        refused(why, &change, write("gpu", &change).await)?;
    }
    let removal = json!({ "metadata": { "annotations": { "gantry.dev/gang": null } } });
    refused("nothing else of its metadata", &removal, write("member", &removal).await)
}

async fn bindings(
    extender: &Account<'_>,
    api: &Api<Pod>,
    path: impl Fn(&str) -> String,
    node: &str,
) -> Result<()> {
    let uid = api.get("gpu").await?.metadata.uid;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": { "name": "gpu", "namespace": "e2e-rights-pods", "uid": uid },
        "target": { "apiVersion": "v1", "kind": "Node", "name": node },
    });
    let path = format!("{}/binding", path("gpu"));
    for (pointer, value, why) in [
        (
            "/metadata/annotations",
            json!({ "a": "b" }),
            "the annotations gantry.dev/grant and gantry.dev/placement only",
        ),
        (
            "/metadata/labels",
            json!({ "a": "b" }),
            "the annotations gantry.dev/grant and gantry.dev/placement only",
        ),
        ("/metadata/uid", Value::Null, "must name the UID of the pod"),
    ] {
        refused(why, pointer, extender.create(&path, &changed(&binding, pointer, value)?).await)?;
    }
    // The API server copies these labels from the node into each Binding.
    let zone = json!({ "topology.kubernetes.io/zone": "a", "topology.kubernetes.io/region": "b" });
    extender.create(&path, &changed(&binding, "/metadata/labels", zone)?).await.context("a Binding")?;
    Ok(())
}

/// The rights of extender-preempt.yaml and extender-restart.yaml.
async fn removals(extender: &Account<'_>, api: &Api<Pod>, path: impl Fn(&str) -> String) -> Result<()> {
    let uid = api.get("member").await?.metadata.uid;
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": { "name": "member", "namespace": "e2e-rights-pods" },
        "deleteOptions": { "preconditions": { "uid": uid } },
    });
    let evict = format!("{}/eviction", path("member"));
    let why = "must name the UID of the pod and leave the pod its grace period";
    for (pointer, value) in
        [("/deleteOptions/preconditions", Value::Null), ("/deleteOptions/gracePeriodSeconds", json!(0))]
    {
        refused(why, pointer, extender.create(&evict, &changed(&eviction, pointer, value)?).await)?;
    }
    extender.create(&evict, &eviction).await.context("an eviction")?;
    let why = "may delete pods that ask for managed resources";
    refused(why, "plain", extender.delete(&path("plain")).await)?;
    extender.delete(&path("gpu")).await.context("a pod with GPUs")?;
    Ok(())
}

/// kubelet's credential ends at its node, and the plugin works with it in place of the right to read all pods.
pub(super) async fn plugin_reads_pods_with_kubelets_credential(bed: &Bed) -> Result<()> {
    let right = manifests().join("plugin-pods.yaml").display().to_string();
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    cluster.kubectl(&["delete", "-f", &right]).await?;
    let outcome = async {
        let node = &cluster.nodes()[0];
        let plugin = Account::plugin(cluster, node.name());
        until("the right is gone", POLICY_LIMIT, async || {
            refused(
                "forbidden",
                "all pods",
                plugin.send(Method::GET, "/api/v1/pods", JSON, &Value::Null).await,
            )
        })
        .await?;
        let kubelet = Account::kubelet(cluster, node.name());
        let list = async |query: &str| {
            kubelet.send(Method::GET, &format!("/api/v1/pods{query}"), JSON, &Value::Null).await
        };
        refused("forbidden", "all pods", list("").await)?;
        let other = format!("?fieldSelector=spec.nodeName%3D{}", cluster.nodes()[1].name());
        refused("forbidden", "pods of another node", list(&other).await)?;
        list(&format!("?fieldSelector=spec.nodeName%3D{}", node.name())).await.context("its own pods")?;

        let credential =
            format!("--pod-kubeconfig={}", node.sandbox().folder().join("kubelet.conf").display());
        gpus.restart_plugin(cluster, node.name(), &[&credential]).await?;
        let api = bed.namespace("e2e-rights-kubelet").await?;
        let pod = run_on(&api, "one", "nvidia.com/gpu", 1, node.name()).await?;
        let (granted, held) = (pods::granted(&pod)?, pods::held(cluster, &pod, "main").await?);
        ensure!(granted == held && granted.len() == 1, "granted {granted:?}, held {held:?}");
        Ok(())
    }
    .await;
    cluster.kubectl(&["apply", "-f", &right]).await?;
    outcome
}

/// At its start a daemon reports a policy that is missing, and later that it exists.
pub(super) async fn daemons_report_missing_policies(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = &cluster.nodes()[0];
    let restart = async || -> Result<()> {
        gpus.restart_plugin(cluster, node.name(), &[]).await?;
        cluster.control().daemon(EXTENDER)?.kill().await?;
        cluster.control().run_again(EXTENDER).await?;
        Ok(())
    };
    for name in ["gantry-plugin-events", "gantry-extender-status"] {
        cluster.kubectl(&["delete", "validatingadmissionpolicybinding", name]).await?;
    }
    let outcome = async {
        restart().await?;
        reports(node.sandbox(), 9410, "gantry_plugin_missing_policies 1").await?;
        reports(cluster.control(), 8011, "gantry_extender_missing_policies 1").await
    }
    .await;
    let guard = manifests().join("guard.yaml").display().to_string();
    cluster.kubectl(&["apply", "-f", &guard]).await?;
    outcome?;
    restart().await?;
    reports(node.sandbox(), 9410, "gantry_plugin_missing_policies 0").await?;
    reports(cluster.control(), 8011, "gantry_extender_missing_policies 0").await
}

/// The extender creates Jobs of the template and no others, and such a Job only the pod that resets and the changes of a
/// GpuNode that it needs.
pub(super) async fn resets_are_narrowed_to_the_template(bed: &Bed) -> Result<()> {
    let cluster = bed.cluster();
    let manifest = manifests().join("remediation-reset.yaml").display().to_string();
    let template = cluster.kubectl(&["apply", "-f", &manifest, "-o", "json"]).await?;
    let outcome = async {
        let applied: Value = serde_json::from_str(&template)?;
        let applied = applied["items"].as_array().context("objects")?.iter();
        let template =
            applied.clone().find(|object| object["kind"] == "PodTemplate").context("a template")?;
        let driver_root = "/";
        reset_jobs(&Account::extender(cluster), &template["template"]).await?;
        let image = template["template"]["spec"]["containers"][0]["image"].clone();
        let node = cluster.nodes()[0].name();
        reset_pods(&Account::reset(cluster), &image, (node, driver_root)).await?;
        reset_gpu_nodes(&Account::reset(cluster), node).await
    }
    .await;
    cluster.kubectl(&["-n", NAMESPACE, "delete", "jobs,pods", "--all", "--now"]).await?;
    cluster.kubectl(&["delete", "-f", &manifest]).await?;
    outcome
}

/// Waits until a new policy is followed: the request is refused with these words.
async fn is_followed(why: &str, request: impl AsyncFn() -> Result<Value>) -> Result<()> {
    let followed = until(format!("a refusal: {why}"), POLICY_LIMIT, async || {
        refused(why, "the request", request().await).map_err(|error| format!("{error:#}"))
    });
    Ok(followed.await?)
}

async fn reset_jobs(extender: &Account<'_>, template: &Value) -> Result<()> {
    let path = format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs?dryRun=All");
    let labels = &template["metadata"]["labels"];
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": { "name": "gantry-reset-0-1", "labels": labels },
        "spec": {
            "backoffLimit": 0, "activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 86400,
            "template": {
                "metadata": { "labels": labels, "annotations": {
                    "gantry.dev/reset-gpu": "node-1/GPU-00112233-4455-6677-8899-aabbccddeeff",
                    "gantry.dev/reset-rule": "off-the-bus",
                } },
                "spec": template["spec"],
            },
        },
    });
    let (of_template, pod) = ("Jobs of the PodTemplate gantry-reset only", "/spec/template/spec");
    let forged = changed(&job, &format!("{pod}/serviceAccountName"), json!("gantry-extender"))?;
    is_followed(of_template, async || extender.create(&path, &forged).await).await?;
    let mut more = template["spec"]["containers"].clone();
    more.as_array_mut().context("containers")?.push(json!({ "name": "x", "image": "x" }));
    let (container, annotations) = (format!("{pod}/containers/0"), "/spec/template/metadata/annotations");
    let two_annotations = "must have the annotations gantry.dev/reset-gpu and gantry.dev/reset-rule";
    let once = "must run one pod once";
    for (pointer, value, why) in [
        (format!("{container}/image"), json!("busybox"), of_template),
        (format!("{container}/args"), json!(["reset-device", "GPU-a"]), of_template),
        (format!("{container}/command"), json!(["sh"]), of_template),
        (format!("{container}/env"), json!([]), of_template),
        (format!("{container}/securityContext"), json!({ "privileged": true }), of_template),
        (format!("{pod}/containers"), more, of_template),
        (format!("{pod}/hostPID"), json!(true), of_template),
        (format!("{pod}/nodeName"), json!("node-1"), of_template),
        (format!("{pod}/volumes"), json!([{ "name": "x", "hostPath": { "path": "/" } }]), of_template),
        ("/spec/template/metadata/labels/a".to_owned(), json!("b"), "the labels of the PodTemplate"),
        (format!("{annotations}/a"), json!("b"), two_annotations),
        (format!("{annotations}/gantry.dev~1reset-gpu"), json!("--kubeconfig=/x"), two_annotations),
        (format!("{annotations}/gantry.dev~1reset-gpu"), json!("node-1/GPU-0 x"), two_annotations),
        (format!("{annotations}/gantry.dev~1reset-rule"), json!("-a"), two_annotations),
        (format!("{annotations}/gantry.dev~1reset-rule"), Value::Null, two_annotations),
        ("/metadata/name".to_owned(), json!("another"), "a name that begins with gantry-reset-"),
        ("/spec/parallelism".to_owned(), json!(2), once),
        ("/spec/backoffLimit".to_owned(), json!(6), once),
        ("/spec/activeDeadlineSeconds".to_owned(), json!(601), once),
        ("/spec/ttlSecondsAfterFinished".to_owned(), Value::Null, once),
    ] {
        let forged = changed(&job, &pointer, value)?;
        refused(why, &pointer, extender.create(&path, &forged).await)?;
    }
    extender.create(&path, &job).await.context("a Job of the template")?;
    let other = "/apis/batch/v1/namespaces/default/jobs?dryRun=All";
    refused("cannot create resource", "another namespace", extender.create(other, &job).await)?;
    let pods = format!("/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All");
    let pod =
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "x" }, "spec": template["spec"] });
    refused("cannot create resource", "a pod", extender.create(&pods, &pod).await)
}

async fn reset_pods(reset: &Account<'_>, image: &Value, (node, root): (&str, &str)) -> Result<()> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All");
    // As `gantry reset gpu` makes it.
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "gantry-reset-0",
            "labels": { "app.kubernetes.io/name": "gantry-reset", "app.kubernetes.io/part-of": "gantry" },
        },
        "spec": {
            "nodeName": node, "restartPolicy": "Never", "activeDeadlineSeconds": 120,
            "automountServiceAccountToken": false, "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "reset", "image": image, "args": ["reset-device", "--driver-root", "/driver-root", "GPU-0"],
                "securityContext": { "privileged": true, "runAsUser": 0 },
                "volumeMounts": [{ "name": "driver-root", "mountPath": "/driver-root" }],
            }],
            "volumes": [{ "name": "driver-root", "hostPath": { "path": root } }],
        },
    });
    let (image, args) = ("one container with the image", "must run reset-device");
    let forged = changed(&pod, "/spec/containers/0/image", json!("busybox"))?;
    is_followed(image, async || reset.create(&path, &forged).await).await?;
    let two = json!([pod["spec"]["containers"][0], { "name": "x", "image": "x" }]);
    let (plain, labels) =
        ("no command, environment, probe or hook", "with the labels of a pod that resets only");
    let (volume, node) = ("must mount the driver's root, and nothing else", "must name its node, run once");
    for (pointer, value, why) in [
        ("/metadata/name", json!("another"), labels),
        ("/metadata/labels", json!({ "app.kubernetes.io/name": "gantry-extender" }), labels),
        ("/spec/containers", two.clone(), image),
        ("/spec/initContainers", json!([two[1]]), image),
        ("/spec/containers/0/args", json!(["reset-device", "--driver-root", "/driver-root"]), args),
        ("/spec/containers/0/args", json!(["reset-device", "--driver-root", "/driver-root", "--help"]), args),
        ("/spec/containers/0/args", json!(["plugin", "--driver-root", "/driver-root", "GPU-0"]), args),
        ("/spec/containers/0/command", json!(["sh"]), plain),
        ("/spec/containers/0/env", json!([{ "name": "LD_PRELOAD", "value": "x" }]), plain),
        ("/spec/containers/0/lifecycle", json!({ "preStop": { "exec": { "command": ["sh"] } } }), plain),
        ("/spec/volumes/0/hostPath/path", json!("/var/lib/kubelet/pods"), volume),
        ("/spec/containers/0/volumeMounts/0/subPath", json!("tmp"), volume),
        ("/spec/hostPID", json!(true), node),
        ("/spec/hostNetwork", json!(true), node),
        // The API server adds the volume of the token.
        ("/spec/automountServiceAccountToken", json!(true), volume),
        ("/spec/nodeName", Value::Null, node),
        ("/spec/restartPolicy", json!("Always"), node),
        ("/spec/activeDeadlineSeconds", json!(601), node),
    ] {
        refused(why, pointer, reset.create(&path, &changed(&pod, pointer, value)?).await)?;
    }
    reset.create(&path, &pod).await.context("the pod that resets")?;
    let other = "/api/v1/namespaces/default/pods?dryRun=All";
    refused("cannot create resource", "another namespace", reset.create(other, &pod).await)?;
    let mut plain = pods::sleeper("plain", 0)?;
    plain.metadata.namespace = Some(NAMESPACE.to_owned());
    let api = Api::<Pod>::namespaced(reset.cluster.client(), NAMESPACE);
    api.create(&PostParams::default(), &plain).await?;
    let plain = format!("/api/v1/namespaces/{NAMESPACE}/pods/plain");
    is_followed("may delete pods that reset only", async || reset.delete(&plain).await).await
}

async fn reset_gpu_nodes(reset: &Account<'_>, node: &str) -> Result<()> {
    let cluster = reset.cluster;
    let object = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": "e2e-reset" },
        "spec": { "machine": { "gpus": [], "paths": [] } },
    });
    cluster.kubectl_with_input(&["create", "-f", "-"], &object.to_string()).await?;
    let outcome = async {
        let path = format!("{GPU_NODES}/e2e-reset");
        let of_rule = r#"{"reason":"rule r: Xid 48","by":"gantry-extender"}"#;
        let of_alice = r#"{"reason":"\"by\":\"gantry-extender\"","by":"alice"}"#;
        for (gpu, value) in
            [("a", of_rule), ("b", of_alice), ("c", "the fan fails"), ("d", r#"x "by":"gantry-extender""#)]
        {
            let cordon = format!("gantry.dev/cordon-GPU-{gpu}={value}");
            cluster.kubectl(&["annotate", "gpunode", "e2e-reset", &cordon]).await?;
        }
        let set = |name: &str, value: Value| json!({ "metadata": { "annotations": { name: value } } });
        let forged = set("gantry.dev/remediation", json!("x"));
        let two = "gantry.dev/nvml-closed-until and gantry.dev/lift-quarantine of a GpuNode only";
        is_followed(two, async || reset.patch(&path, &forged).await).await?;
        let removed = "may remove cordons of rules of remediation";
        for (change, why) in [
            (set("gantry.dev/cordon-GPU-e", json!("x")), two),
            (set("gantry.dev/cordon-GPU-a", json!("x")), two),
            (set("gantry.dev/cordon-GPU-b", Value::Null), removed),
            (set("gantry.dev/cordon-GPU-c", Value::Null), removed),
            (set("gantry.dev/cordon-GPU-d", Value::Null), removed),
            (json!({ "metadata": { "labels": { "a": "b" } } }), "annotations of a GpuNode, and nothing else"),
            (json!({ "spec": { "machine": { "name": "x" } } }), "annotations of a GpuNode, and nothing else"),
        ] {
            refused(why, &change, reset.patch(&path, &change).await)?;
        }
        for change in [
            set("gantry.dev/nvml-closed-until", json!("2026-01-01T00:00:00Z")),
            set("gantry.dev/nvml-closed-until", Value::Null),
            set("gantry.dev/lift-quarantine", json!("GPU-a")),
            set("gantry.dev/cordon-GPU-a", Value::Null),
        ] {
            reset.patch(&path, &change).await.with_context(|| change.to_string())?;
        }
        let status = json!({ "status": { "devices": [] } });
        let denied = reset.patch(&format!("{path}/status"), &status).await;
        refused("cannot patch resource", "its status", denied)?;
        let node_path = format!("/api/v1/nodes/{node}");
        refused("cannot patch resource", "a Node", reset.patch(&node_path, &set("a", json!("b"))).await)
    }
    .await;
    cluster.kubectl(&["delete", "gpunode", "e2e-reset"]).await?;
    outcome
}

/// What the kustomization leaves to the operator is valid, too.
pub(super) async fn optional_manifests_are_accepted(bed: &Bed) -> Result<()> {
    let cluster = bed.cluster();
    let dry_run = ["apply", "--dry-run=server", "-f", "-"];
    let policy = std::fs::read_to_string(manifests().join("extender-service-network.yaml"))?;
    let unfilled = cluster.kubectl_with_input(&dry_run, &policy).await.map_err(anyhow::Error::from);
    refused("CONTROL-PLANE-CIDR", "the placeholder", unfilled)?;
    let filled = policy.replace("CONTROL-PLANE-CIDR", "192.0.2.0/24");
    cluster.kubectl_with_input(&dry_run, &filled).await.context("extender-service-network.yaml")?;

    let folder = tempfile::tempdir()?;
    // kustomize takes relative paths only.
    let here = folder.path().canonicalize()?;
    let up = "../".repeat(here.components().count() - 1);
    let manifests = manifests().canonicalize()?.display().to_string();
    let base = format!("{up}{}", manifests.trim_start_matches('/'));
    let overlay = json!({ "resources": [&base], "components": [format!("{base}/kubelet-credential")] });
    std::fs::write(here.join("kustomization.yaml"), overlay.to_string())?;
    let made = cluster.kubectl(&["kustomize", &here.display().to_string()]).await?;
    ensure!(!made.contains("gantry-plugin-pods"), "the right to read all pods is left");
    ensure!(made.matches("GANTRY_POD_KUBECONFIG").count() == 2, "both DaemonSets get the option");
    cluster.kubectl_with_input(&dry_run, &made).await.context("kubelet-credential")?;
    Ok(())
}
