//! Rights that the daemons lack because the manifests are applied in part: what shows, what goes on, and that a right
//! that is granted later is used without a restart. docs/failures.md has the rows.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_api::names::{CORDON_ANNOTATION_PREFIX, GANG_GATE, GANG_REPAIR_ANNOTATION, GPU_RESOURCE};
use gantry_api::{GangPhase, GangStatus, GpuNode, Reason};
use gantry_e2e::gantry::{EXTENDER, NAMESPACE, PLUGIN, manifests};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{gantry, until};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::PodSchedulingGate;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::gangs::{restart_extender, with_options};
use super::gangs_integrations::{any_fields, apply};
use super::gangs_preempt::{IMPORTANT, are_gone, make_class, uids_of};
use super::modes::{chosen, refused, run_on};
use super::node_config::node_feature;
use super::operate::write_rules;
use crate::bed::Bed;
use crate::daemon_logs::Log;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::pods;
use crate::views::{self, Metrics, gpu_node, probe, ready_is, reports};

/// Where the daemons serve probes and metrics.
const PLUGIN_PORT: u16 = 9410;
const EXTENDER_PORT: u16 = 8011;
/// The GPU has fallen off the bus.
const OFF_THE_BUS: u64 = 79;

/// Verbs that a role gives an account on a resource.
#[derive(Debug, Clone, Copy)]
struct Right {
    account: &'static str,
    /// The role, as kubectl's arguments.
    role: &'static [&'static str],
    group: &'static str,
    /// The resource, with its subresource.
    resource: &'static str,
    verbs: &'static [&'static str],
}

/// A right of the plugin by plugin.yaml.
const fn of_plugin(group: &'static str, resource: &'static str, verbs: &'static [&'static str]) -> Right {
    Right { account: PLUGIN, role: &["clusterrole", "gantry-plugin"], group, resource, verbs }
}

/// A right of the extender by extender.yaml.
const fn of_extender(group: &'static str, resource: &'static str) -> Right {
    let role = &["clusterrole", "gantry-extender"];
    Right { account: EXTENDER, role, group, resource, verbs: &["list", "watch"] }
}

/// Plays a story while a right is missing, and grants it again.
async fn without(bed: &Bed, right: Right, story: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let get = [&["get"], right.role, &["-o", "json"]].concat();
    let role: Value = serde_json::from_str(&bed.cluster().kubectl(&get).await?)?;
    let all = role["rules"].as_array().context("the role has rules")?.clone();
    let mut left = all.clone();
    for rule in &mut left {
        let is_of =
            |field: &str, value: &str| rule[field].as_array().is_some_and(|all| all.contains(&json!(value)));
        if !(is_of("apiGroups", right.group) && is_of("resources", right.resource)) {
            continue;
        }
        if let Some(verbs) = rule["verbs"].as_array_mut() {
            verbs.retain(|verb| !right.verbs.iter().any(|gone| verb == gone));
        }
    }
    left.retain(|rule| rule["verbs"].as_array().is_some_and(|verbs| !verbs.is_empty()));
    ensure!(left != all, "{right:?} is not in {all:?}");
    set_rules(bed, right, &left, false).await?;
    let outcome = story().await;
    set_rules(bed, right, &all, true).await?;
    outcome.with_context(|| format!("{right:?}"))
}

/// Writes the rules of a role, and waits until the API server decides by them.
async fn set_rules(bed: &Bed, right: Right, rules: &[Value], granted: bool) -> Result<()> {
    let change = json!({ "rules": rules }).to_string();
    let patch = [&["patch"], right.role, &["--type=merge", "-p", &change]].concat();
    bed.cluster().kubectl(&patch).await?;
    let (resource, subresource) = right.resource.split_once('/').unwrap_or((right.resource, ""));
    let namespace = if right.role.contains(&"-n") { NAMESPACE } else { "" };
    let reviews: Api<SubjectAccessReview> = Api::all(bed.client());
    for verb in right.verbs {
        let review: SubjectAccessReview = serde_json::from_value(json!({
            "metadata": {},
            "spec": {
                "user": format!("system:serviceaccount:{NAMESPACE}:{}", right.account),
                "resourceAttributes": {
                    "group": right.group, "resource": resource, "subresource": subresource, "verb": verb,
                    "namespace": namespace,
                    "name": if resource == "leases" { EXTENDER } else { "" },
                },
            },
        }))?;
        until(format!("{verb} {}: {granted}", right.resource), GANG_LIMIT, async || {
            let review = reviews.create(&PostParams::default(), &review).await;
            let status = review.map_err(|error| error.to_string())?.status.unwrap_or_default();
            if status.allowed == granted { Ok(()) } else { Err(format!("{status:?}")) }
        })
        .await?;
    }
    Ok(())
}

/// Cordons a GPU, or ends that, by its annotation.
async fn cordon(bed: &Bed, node: &str, gpu: &str, reason: Option<&str>) -> Result<()> {
    let annotation = match reason {
        Some(reason) => format!("{CORDON_ANNOTATION_PREFIX}{gpu}={reason}"),
        None => format!("{CORDON_ANNOTATION_PREFIX}{gpu}-"),
    };
    bed.cluster().kubectl(&["annotate", "--overwrite", "gpunode", node, &annotation]).await?;
    Ok(())
}

/// Rights that the running plugin uses, and those that it needs for pods.
pub(super) async fn plugin_serves_without_each_right(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let node = &bed.cluster().nodes()[2];
    let name = node.name();
    let devices = gpus.all().remove(name).unwrap_or_default();
    let gpu = devices.first().context("a GPU")?;
    let outcome = async {
        without_node_status(bed, name, gpu).await?;
        without_events(bed, name, gpu, devices.len()).await
    }
    .await;
    cordon(bed, name, gpu, None).await?;
    outcome?;
    gpus.counts(bed.cluster(), name, &[(GPU_RESOURCE, devices.len())]).await?;
    without_writes_of_gpu_node(bed, name).await?;
    without_pods(bed, name).await
}

async fn without_node_status(bed: &Bed, name: &str, gpu: &str) -> Result<()> {
    let node = bed.cluster().node(name)?;
    let log = Log::of(&node.program(PLUGIN)?);
    without(bed, of_plugin("", "nodes/status", &["patch"]), async || {
        cordon(bed, name, gpu, Some("noisy")).await?;
        log.has("cannot write the condition GPUHealthy of the Node").await?;
        reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"node-status\"} 0").await
    })
    .await?;
    // Written with the next change.
    cordon(bed, name, gpu, Some("noisier")).await?;
    reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"node-status\"} 1").await
}

async fn without_events(bed: &Bed, name: &str, gpu: &str, all: usize) -> Result<()> {
    let node = bed.cluster().node(name)?;
    let log = Log::of(&node.program(PLUGIN)?);
    // Otherwise this Event is the one that is not written, and the next cordon ends before there is one about it.
    views::event(bed, "default", ("Node", name, None), "GpuCordoned", &[gpu, "noisier"]).await?;
    without(bed, of_plugin("events.k8s.io", "events", &["create", "patch"]), async || {
        cordon(bed, name, gpu, Some("unreported")).await?;
        log.has("Event not written").await?;
        reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"events\"} 0").await?;
        bed.gpus().await?.counts(bed.cluster(), name, &[(GPU_RESOURCE, all - 1)]).await
    })
    .await?;
    cordon(bed, name, gpu, None).await?;
    views::event(bed, "default", ("Node", name, None), "GpuUncordoned", &[gpu, "unreported"]).await?;
    reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"events\"} 1").await
}

/// Pods that are granted start as before, and the GpuNode keeps its old state.
async fn without_writes_of_gpu_node(bed: &Bed, name: &str) -> Result<()> {
    let node = bed.cluster().node(name)?;
    let api = bed.namespace("e2e-rights-gpunode").await?;
    let log = Log::of(&node.program(PLUGIN)?);
    let holders = |object: &GpuNode| object.status.as_ref().map_or(0, |status| status.holders.len());
    without(bed, of_plugin("gantry.dev", "gpunodes", &["create", "patch"]), async || {
        without(bed, of_plugin("gantry.dev", "gpunodes/status", &["patch"]), async || {
            let pod = run_on(&api, "unpublished", GPU_RESOURCE, 1, name).await?;
            let held = pods::held(bed.cluster(), &pod, "main").await?;
            ensure!(held == pods::granted(&pod)?, "kubelet gave {held:?}");
            log.has("cannot publish the GpuNode, trying again").await?;
            let object = gpu_node(bed, name, "any", |_| true).await?;
            ensure!(holders(&object) == 0, "it was written without the right");
            Ok(())
        })
        .await
    })
    .await?;
    gpu_node(bed, name, "has the holder", |object| holders(object) == 1).await?;
    api.delete("unpublished", &DeleteParams::default()).await?;
    Ok(())
}

/// A plugin that cannot read pods serves kubelet, by topology, and its node stays not ready for the extender.
async fn without_pods(bed: &Bed, name: &str) -> Result<()> {
    let gpus = bed.gpus().await?;
    let (cluster, node) = (bed.cluster(), bed.cluster().node(name)?);
    let api = bed.namespace("e2e-rights-pods-of-node").await?;
    let all = gpus.all().get(name).map_or(0, BTreeSet::len);
    let log = Log::of(&node.program(PLUGIN)?);
    let right = Right {
        account: PLUGIN,
        role: &["clusterrole", "gantry-plugin-pods"],
        group: "",
        resource: "pods",
        verbs: &["list", "watch"],
    };
    without(bed, right, async || {
        gpus.alter_plugin(cluster, name, &[]).await?;
        log.has("the watch of pods failed").await?;
        let degraded = "degraded: the pods of this node cannot be listed";
        probe(node.sandbox(), PLUGIN_PORT, "/readyz", 200, degraded).await?;
        gpus.counts(cluster, name, &[(GPU_RESOURCE, all)]).await?;
        let pod = pods::run(&api, &pods::pinned("by-topology", 2, name)?).await?;
        ensure!(pods::seen(cluster, &pod, "main").await?.len() == 2, "it got no GPUs");
        gpu_node(bed, name, "as the plugin before left it", ready_is(Reason::Stopped)).await?;
        Ok(())
    })
    .await?;
    gpu_node(bed, name, "serves", ready_is(Reason::Serving)).await?;
    gpu_node(bed, name, "has the holders", |object| {
        object.status.as_ref().is_some_and(|status| status.holders.iter().any(|held| held.devices.len() == 2))
    })
    .await?;
    Ok(())
}

/// Rights that a plugin needs at its start, or uses now and then.
pub(super) async fn plugin_starts_without_each_right(bed: &Bed) -> Result<()> {
    without_owner(bed).await?;
    without_stored_faults(bed).await?;
    let definition = node_feature().to_string();
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &definition).await?;
    let outcome = without_labels(bed).await;
    let delete = ["delete", "--ignore-not-found", "--wait=false", "-f", "-"];
    bed.cluster().kubectl_with_input(&delete, &definition).await?;
    outcome
}

/// A GpuNode without an owner outlives its Node.
async fn without_owner(bed: &Bed) -> Result<()> {
    let node = &bed.cluster().nodes()[2];
    let log = Log::of(&node.program(PLUGIN)?);
    let owners = |object: &GpuNode| object.metadata.owner_references.as_ref().map_or(0, Vec::len);
    without(bed, of_plugin("", "nodes", &["get"]), async || {
        bed.gpus().await?.restart_plugin(bed.cluster(), node.name(), &[]).await?;
        gpu_node(bed, node.name(), "has no owner", |object| owners(object) == 0).await?;
        let text = log.text()?;
        ensure!(!text.contains("WARN") && !text.contains("cannot read the Node"), "{text}");
        Ok(())
    })
    .await?;
    gpu_node(bed, node.name(), "has an owner", |object| owners(object) == 1).await?;
    Ok(())
}

/// The quarantine of a GPU ends with the plugin that found it, if the next one cannot read it.
async fn without_stored_faults(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let (cluster, node) = (bed.cluster(), &bed.cluster().nodes()[2]);
    let name = node.name();
    let machine = gantry::machine_file("a40-8x-bridged");
    let mut hardware = Hardware::install_in(node, &machine, "unreadable")?;
    gpus.serve(cluster, name, Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
    let quarantined =
        |object: &GpuNode| object.status.as_ref().is_some_and(|status| !status.faults.is_empty());
    hardware.controller().raise_xid(0, OFF_THE_BUS)?;
    gpu_node(bed, name, "has the fault", quarantined).await?;
    let log = Log::of(&node.program(PLUGIN)?);
    without(bed, of_plugin("gantry.dev", "gpunodes", &["get", "list", "watch"]), async || {
        gpus.serve(cluster, name, Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
        log.has("holders and faults of an earlier run are unknown").await?;
        log.has("cannot watch the GpuNode of this node").await?;
        gpu_node(bed, name, "has no fault", |object| !quarantined(object)).await?;
        Ok(())
    })
    .await?;
    hardware.controller().raise_xid(1, OFF_THE_BUS)?;
    gpu_node(bed, name, "has the next fault", quarantined).await?;
    gpus.serve(cluster, name, Some(&hardware), &[], &[(GPU_RESOURCE, 7)]).await?;
    cluster.kubectl(&["annotate", "--overwrite", "gpunode", name, "gantry.dev/lift-quarantine=all"]).await?;
    gpus.counts(cluster, name, &[(GPU_RESOURCE, 8)]).await?;
    gpus.restore(cluster).await
}

async fn without_labels(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let (cluster, node) = (bed.cluster(), &bed.cluster().nodes()[2]);
    let log = Log::of(&node.program(PLUGIN)?);
    let right = Right {
        account: PLUGIN,
        role: &["-n", NAMESPACE, "role", "gantry-plugin-labels"],
        group: "nfd.k8s-sigs.io",
        resource: "nodefeatures",
        verbs: &["get", "create", "update", "delete"],
    };
    without(bed, right, async || {
        gpus.restart_plugin(cluster, node.name(), &["--labels=node-feature"]).await?;
        log.has("apply manifests/labels.yaml").await?;
        probe(node.sandbox(), PLUGIN_PORT, "/readyz", 200, "degraded: the node labels cannot be written")
            .await?;
        reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"labels\"} 0").await
    })
    .await?;
    reports(node.sandbox(), PLUGIN_PORT, "gantry_plugin_reachable{peer=\"labels\"} 1").await?;
    // In place of the right of labels-node.yaml, which is not applied.
    gpus.restart_plugin(cluster, node.name(), &["--labels=node"]).await?;
    log.has("apply manifests/labels-node.yaml").await?;
    gpus.restore(cluster).await
}

/// Without the extender, or a right that it decides by, GPU pods wait, and run once it is back.
pub(super) async fn gpu_pod_waits_for_extender_and_its_rights(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let (cluster, control) = (bed.cluster(), bed.cluster().control());
    let namespace = "e2e-rights-extender";
    let api = bed.namespace(namespace).await?;
    let node = cluster.nodes()[2].name();
    let pod = |name: &str| chosen(name, GPU_RESOURCE, 1, node);
    let log = Log::of(&control.daemon(EXTENDER)?);
    control.daemon(EXTENDER)?.stop().await?;
    refused(bed, &api, namespace, &pod("refused")?, "connection refused").await?;

    for (group, resource) in [("", "pods"), ("", "nodes"), ("gantry.dev", "gpunodes")] {
        without(bed, of_extender(group, resource), async || {
            restart_extender(bed, &[]).await?;
            log.has("watch failed, trying again").await?;
            probe(control, EXTENDER_PORT, "/readyz", 503, "not all listed yet").await
        })
        .await?;
        probe(control, EXTENDER_PORT, "/readyz", 200, "").await?;
    }
    pods::running(&api, "refused").await?;

    let lease = Right {
        account: EXTENDER,
        role: &["-n", NAMESPACE, "role", "gantry-extender"],
        group: "coordination.k8s.io",
        resource: "leases",
        verbs: &["get", "update"],
    };
    without(bed, lease, async || {
        log.has("cannot read or write the lease").await?;
        probe(control, EXTENDER_PORT, "/readyz", 503, "cannot read or write Lease").await?;
        refused(bed, &api, namespace, &pod("unled")?, "503").await
    })
    .await?;
    pods::running(&api, "unled").await?;
    Ok(())
}

/// Files with rights of the extender, each for one feature.
const OWNERS: &str = "extender-owners.yaml";
const PREEMPT: &str = "extender-preempt.yaml";
const RESTART: &str = "extender-restart.yaml";

/// A rule that withholds a GPU for good.
const RULES: &str = "
version: v1
dryRun: false
rules:
- name: off-the-bus
  match: {xids: [79]}
  action: cordon
";

/// An extender with all its options, and no right that only an option needs: each is missed by its feature alone.
pub(super) async fn extender_uses_optional_right_when_granted(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-rights-optional").await?;
    let cluster = bed.cluster();
    let path = |file: &str| manifests().join(file).display().to_string();
    let (gates, remediation) = (gate_rights()?, path("extender-remediation.yaml"));
    let rules = write_rules(bed, RULES)?;
    for file in [OWNERS, PREEMPT, RESTART] {
        cluster.kubectl(&["delete", "-f", &path(file)]).await?;
    }
    let options = ["--gates", &format!("--remediation-rules={}", rules.display())];
    let outcome = with_options(bed, &options, async || {
        with_owner(&scene).await?;
        with_gates(&scene, &gates).await?;
        with_restart(&scene).await?;
        with_preemption(&scene).await?;
        with_remediation(bed, &remediation).await
    })
    .await;
    for file in [OWNERS, PREEMPT, RESTART] {
        cluster.kubectl(&["apply", "-f", &path(file)]).await?;
    }
    cluster.kubectl(&["delete", "--ignore-not-found", "-f", &remediation]).await?;
    cluster.kubectl_with_input(&["delete", "--ignore-not-found", "-f", "-"], &gates).await?;
    outcome
}

/// The role of gates.yaml and its binding, without the policy that adds gates.
fn gate_rights() -> Result<String> {
    let text = std::fs::read_to_string(manifests().join("gates.yaml"))?;
    let parts: Vec<&str> = text.split("\n---\n").filter(|part| part.contains("kind: ClusterRole")).collect();
    ensure!(parts.len() == 2, "{} of a role and its binding", parts.len());
    Ok(parts.join("\n---\n"))
}

async fn grant(bed: &Bed, file: &str) -> Result<()> {
    bed.cluster().kubectl(&["apply", "-f", &manifests().join(file).display().to_string()]).await?;
    Ok(())
}

/// A gang has its size from a PodGroup.
async fn with_owner(scene: &Scene<'_>) -> Result<()> {
    let bed = scene.bed;
    let definition = any_fields("scheduling.volcano.sh", "v1beta1", "PodGroup");
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &definition.to_string()).await?;
    let group = json!({
        "apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": { "name": "owned" },
        "spec": { "minMember": 2 },
    });
    apply(bed, scene, &group).await?;
    let crew = Crew::new("owned", 2, 1);
    let mut members = crew.pods()?;
    for pod in &mut members {
        pod.metadata.annotations =
            serde_json::from_value(json!({ "scheduling.k8s.io/group-name": "owned" }))?;
    }
    scene.create_all(members).await?;
    until("the owner is missed", GANG_LIMIT, async || {
        let gangs = scene.gangs.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let texts: Vec<String> =
            gangs.items.into_iter().filter_map(|gang| Some(gang.status?.message)).collect();
        match texts.iter().any(|text| text.contains("does not exist or may not be read")) {
            true => Ok(()),
            false => Err(format!("{texts:?}")),
        }
    })
    .await?;
    scene.holds_nothing(&crew).await?;
    grant(bed, OWNERS).await?;
    scene.run_on_grants(&crew.pod_names()).await?;
    scene.disband(&crew).await
}

async fn with_gates(scene: &Scene<'_>, rights: &str) -> Result<()> {
    let crew = Crew::new("gated", 2, 1);
    let mut members = crew.pods()?;
    for pod in &mut members {
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        spec.scheduling_gates = Some(vec![PodSchedulingGate { name: GANG_GATE.to_owned() }]);
    }
    scene.create_all(members).await?;
    is_blocked(scene, &crew, "its scheduling gate cannot be removed", "ungate", "gates.yaml").await?;
    scene.phase(&crew.name, GangPhase::Queued).await?;
    scene.bed.cluster().kubectl_with_input(&["apply", "-f", "-"], rights).await?;
    scene.runs(&crew).await?;
    is_unblocked(scene, &crew).await?;
    scene.disband(&crew).await
}

/// A member is lost, and the others are not deleted.
async fn with_restart(scene: &Scene<'_>) -> Result<()> {
    let crew = Crew::new("again", 2, 1).with(GANG_REPAIR_ANNOTATION, "restart");
    scene.create(&crew).await?;
    scene.runs(&crew).await?;
    scene.delete(&crew.pod_name(0)).await?;
    is_blocked(scene, &crew, "it cannot be deleted", "delete", RESTART).await?;
    scene.phase(&crew.name, GangPhase::Degraded).await?;
    let left = scene.pods.get(&crew.pod_name(1)).await?;
    ensure!(left.metadata.deletion_timestamp.is_none(), "deleted without the right");
    grant(scene.bed, RESTART).await?;
    are_gone(scene, &crew).await
}

/// A gang waits although pods of lower priority hold what it needs.
async fn with_preemption(scene: &Scene<'_>) -> Result<()> {
    let bed = scene.bed;
    make_class(bed).await?;
    let victims = Crew::new("victims", 5, 4);
    scene.create(&victims).await?;
    scene.runs(&victims).await?;
    // Read from the start of the extender: it lists budgets once, and then now and then.
    let log = std::fs::read_to_string(bed.cluster().control().daemon(EXTENDER)?.log())?;
    ensure!(log.contains("disruption budgets may not be listed"), "no word of disruption budgets");
    let urgent = Crew::new("urgent", 2, 4).of_class(IMPORTANT);
    scene.create(&urgent).await?;
    scene.phase(&urgent.name, GangPhase::Queued).await?;
    uids_of(scene, &victims).await?;
    grant(bed, PREEMPT).await?;
    scene.runs(&urgent).await?;
    are_gone(scene, &victims).await?;
    scene.disband(&urgent).await
}

/// A rule matches a GPU and cannot act.
async fn with_remediation(bed: &Bed, rights: &str) -> Result<()> {
    let (cluster, node) = (bed.cluster(), &bed.cluster().nodes()[2]);
    let name = node.name();
    let mut hardware = Hardware::install_in(node, &gantry::machine_file("a40-8x-bridged"), "unruled")?;
    let gpu = hardware.machine().gpus().first().and_then(|gpu| gpu.uuid.clone()).context("a GPU")?;
    bed.gpus().await?.serve(cluster, name, Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
    hardware.controller().raise_xid(0, OFF_THE_BUS)?;
    let outcome = async {
        let about = ("Node", name, None);
        let failed = ["off-the-bus", &gpu.to_string(), "forbidden"];
        views::event(bed, "default", about, "RemediationFailed", &failed).await?;
        cluster.kubectl(&["apply", "-f", rights]).await?;
        let applied = ["off-the-bus", &gpu.to_string(), "cordoned"];
        views::event(bed, "default", about, "RemediationApplied", &applied).await?;
        anyhow::Ok(())
    }
    .await;
    let ends = format!("{CORDON_ANNOTATION_PREFIX}{gpu}-");
    let marks = ["gantry.dev/lift-quarantine=all", "gantry.dev/remediation-", &ends];
    cluster.kubectl(&[&["annotate", "--overwrite", "gpunode", name], &marks[..]].concat()).await?;
    outcome
}

/// Waits until a gang reports that the extender may not do something with one of its pods.
async fn is_blocked(scene: &Scene<'_>, crew: &Crew, what: &str, verb: &str, file: &str) -> Result<()> {
    let about = ("Gang", crew.name.as_str(), None);
    views::event(scene.bed, &scene.namespace, about, "Blocked", &[what, file]).await?;
    scene.status_where(&crew.name, "is blocked", |status| blocked(status) == Some("True")).await?;
    let metrics = Metrics::read(scene.bed).await?;
    let forbidden = format!("gang_pod_writes_total{{verb=\"{verb}\",outcome=\"forbidden\"}}");
    ensure!(metrics.of(&forbidden) >= 1.0, "{forbidden} is {}", metrics.of(&forbidden));
    Ok(())
}

/// Waits until that is over.
async fn is_unblocked(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    scene.status_where(&crew.name, "is not blocked", |status| blocked(status) != Some("True")).await?;
    Ok(())
}

/// The status of the condition `Blocked` for lack of a right.
fn blocked(status: &GangStatus) -> Option<&str> {
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|condition| {
        condition.type_ == "Blocked" && condition.reason == Reason::MissingPermission.as_str()
    });
    condition.map(|condition| condition.status.as_str())
}
