//! One GPU at a time, by the commands of an operator: cordon, drain and uncordon under the real kubelet. And nodes that
//! other programs mark.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GPU_RESOURCE, REMEDIATION_ANNOTATION, REMEDIATION_TAINT};
use gantry_api::{Cordon, Cordons, GpuNode};
use gantry_e2e::cluster::Node as NodeSandbox;
use gantry_e2e::gantry::{self, NAMESPACE, manifests};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{podresources, until};
use gantry_nvml_sim::control::GpuState;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};

use super::gangs::restart_extender;
use super::gangs_preempt::{are_gone, protect, uids_of};
use super::modes::{chosen, refused, run_on};
use crate::bed::Bed;
use crate::gangs::{Crew, Scene};
use crate::{pods, views};

/// What a command of `gantry` prints with the rights of an administrator; it must succeed.
pub(super) async fn succeeds(bed: &Bed, words: &[&str]) -> Result<String> {
    let binary = gantry::binary().context("no gantry beside this test")?.display().to_string();
    let kubeconfig = format!("--kubeconfig={}", bed.cluster().kubeconfig().display());
    let argv = [&[&*binary], words, &[&*kubeconfig]].concat();
    Ok(bed.cluster().control().exec(&argv).await?)
}

/// The error of a command that must fail.
async fn fails(bed: &Bed, words: &[&str]) -> Result<String> {
    match succeeds(bed, words).await {
        Ok(text) => anyhow::bail!("gantry {words:?} succeeds: {text}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// UUIDs of a node's GPUs, by index.
async fn uuids(bed: &Bed, node: &str) -> Result<BTreeMap<u8, String>> {
    let machine = Api::<GpuNode>::all(bed.client()).get(node).await?.spec.machine;
    let gpus = machine.gpus().iter();
    Ok(gpus.filter_map(|gpu| Some((gpu.index, gpu.uuid.as_ref()?.to_string()))).collect())
}

/// UUIDs of simulated GPUs, in the order of their indices.
pub(super) fn uuids_in(hardware: &Hardware) -> Vec<String> {
    hardware.machine().gpus().iter().filter_map(|gpu| Some(gpu.uuid.as_ref()?.to_string())).collect()
}

pub(super) async fn cordoned_gpu_is_withheld_until_uncordoned(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let namespace = "e2e-cordon";
    let api = bed.namespace(namespace).await?;
    let node = cluster.nodes()[2].name();
    let uuids = uuids(bed, node).await?;
    let all = uuids.len();
    // It holds the GPU that is cordoned, and goes on.
    let holder = run_on(&api, "holder", GPU_RESOURCE, 1, node).await?;
    let held = pods::seen(cluster, &holder, "main").await?;
    let gpu = held.iter().next().context("a GPU")?.clone();
    let text = succeeds(bed, &["cordon", "gpu", &gpu, "--reason", "the fan fails"]).await?;
    ensure!(text.contains("the fan fails; e2e-cordon/holder holds it and goes on"), "{text}");
    gpus.counts(cluster, node, &[(GPU_RESOURCE, all - 1)]).await?;
    views::event(bed, "default", ("Node", node, None), "GpuCordoned", &[&gpu, "the fan fails"]).await?;
    let map = succeeds(bed, &["map", "--node", node]).await?;
    ensure!(map.contains("/a]") && map.contains("the fan fails"), "{map}");

    // Both daemons forget nothing.
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    let binary = gantry::binary().context("no gantry beside this test")?;
    cluster.control().daemon(gantry::EXTENDER)?.stop().await?;
    cluster.start_extender(&binary).await?;
    gpus.counts(cluster, node, &[(GPU_RESOURCE, all - 1)]).await?;
    let holder = api.get("holder").await?;
    ensure!(pods::phase(&holder) == "Running" && pods::seen(cluster, &holder, "main").await? == held);
    api.delete("holder", &DeleteParams::default()).await?;
    refused(bed, &api, namespace, &chosen("all", GPU_RESOURCE, all, node)?, "the fan fails").await?;
    let rest = run_on(&api, "rest", GPU_RESOURCE, all - 1, node).await?;
    let seen = pods::seen(cluster, &rest, "main").await?;
    ensure!(seen.len() == all - 1 && !seen.contains(&gpu), "{gpu} is cordoned: {seen:?}");
    api.delete("rest", &DeleteParams::default()).await?;

    // With kubectl alone.
    let annotation = format!("gantry.dev/cordon-{gpu}-");
    cluster.kubectl(&["annotate", "gpunode", node, &annotation]).await?;
    gpus.counts(cluster, node, &[(GPU_RESOURCE, all)]).await?;
    let waited = pods::running(&api, "all").await?;
    ensure!(pods::seen(cluster, &waited, "main").await?.contains(&gpu));
    views::event(bed, "default", ("Node", node, None), "GpuUncordoned", &[&gpu]).await?;
    Ok(())
}

pub(super) async fn drain_evicts_holders_and_their_gangs_only(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let scene = Scene::set(bed, "e2e-drain").await?;
    // One on each node, so also beside the gang: no drain touches them.
    let mut others = Vec::new();
    for node in bed.cluster().nodes() {
        let name = format!("beside-{}", node.name());
        scene.pods.create(&Default::default(), &chosen(&name, GPU_RESOURCE, 1, node.name())?).await?;
        others.push(name);
    }
    let mut before = Vec::new();
    for name in &others {
        before.push(pods::running(&scene.pods, name).await?.metadata.uid);
    }
    let crew = Crew::new("crew", 2, 3).labelled("app", "crew");
    protect(&scene, &crew).await?;
    scene.create(&crew).await?;
    let stays = scene.runs(&crew).await?;
    let stay = stays.first().context("a member")?;
    let (node, gpu) = (stay.node.as_str(), stay.devices.iter().next().context("a GPU")?.as_str());
    let uids = uids_of(&scene, &crew).await?;

    let plan = succeeds(bed, &["drain", "gpu", gpu, "--dry-run", "--force"]).await?;
    ensure!(plan.contains("gang e2e-drain/crew (e2e-drain/crew-0, e2e-drain/crew-1)"), "{plan}");
    ensure!(
        plan.contains("the disruption budget e2e-drain/crew allows 0 of 2") && !plan.contains("beside"),
        "{plan}"
    );
    let text = fails(bed, &["drain", "gpu", gpu]).await?;
    ensure!(
        text.contains("no controller replaces e2e-drain/crew-0, e2e-drain/crew-1: add --force"),
        "{text}"
    );
    // The budget holds, and no member is evicted alone.
    let text = fails(bed, &["drain", "gpu", gpu, "--force", "--timeout=4"]).await?;
    ensure!(text.contains("is not drained after 4 s") && text.contains("nothing was evicted"), "{text}");
    ensure!(uids_of(&scene, &crew).await? == uids, "a budget did not protect its pods");

    let budgets: Api<PodDisruptionBudget> = Api::namespaced(bed.client(), &scene.namespace);
    budgets.delete(&crew.name, &DeleteParams::default()).await?;
    let plan = succeeds(bed, &["drain", "gpu", gpu, "--dry-run", "--force"]).await?;
    ensure!(!plan.contains("not yet") && uids_of(&scene, &crew).await? == uids, "a dry run evicted: {plan}");
    let text = succeeds(bed, &["drain", "gpu", gpu, "--force"]).await?;
    ensure!(text.contains("is drained: no pod holds it"), "{text}");
    are_gone(&scene, &crew).await?;
    for (name, uid) in others.iter().zip(&before) {
        let pod = scene.pods.get(name).await?;
        let untouched = pod.metadata.uid == *uid && pod.metadata.deletion_timestamp.is_none();
        ensure!(untouched && pods::phase(&pod) == "Running", "{name} was evicted");
    }
    // Empty, and still withheld.
    let map = succeeds(bed, &["map", "--node", node]).await?;
    ensure!(map.contains(" /]") && map.contains("to be drained"), "{map}");
    succeeds(bed, &["uncordon", "gpu", gpu]).await?;
    let all = uuids(bed, node).await?.len();
    gpus.counts(bed.cluster(), node, &[(GPU_RESOURCE, all)]).await
}

/// What NVIDIA's GPU operator does to a node: it marks it, empties it, replaces the driver, which stops the plugin, and
/// takes the mark away. Then what NVSentinel does.
pub(super) async fn node_in_driver_upgrade_gets_no_pods(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let namespace = "e2e-upgrade";
    let api = bed.namespace(namespace).await?;
    let node = cluster.nodes()[2].name();
    let all = uuids(bed, node).await?.len();
    let before = run_on(&api, "before", GPU_RESOURCE, 1, node).await?;
    let label = "nvidia.com/gpu-driver-upgrade-state";
    let state = async |state: &str| {
        cluster.kubectl(&["label", "node", node, "--overwrite", &format!("{label}={state}")]).await
    };
    state("wait-for-jobs-required").await?;
    let reason = "GPUs are withheld: the driver is upgraded";
    refused(bed, &api, namespace, &chosen("waits", GPU_RESOURCE, 1, node)?, reason).await?;
    let explained = views::explained(bed, &["pod", "waits", "-n", namespace]).await?;
    ensure!(explained.contains(label), "{explained}");
    // What runs there is the operator's to end.
    let now = api.get("before").await?;
    ensure!(now.metadata.uid == before.metadata.uid && pods::phase(&now) == "Running");

    state("pod-deletion-required").await?;
    cluster.kubectl(&["delete", "pod", "before", "-n", namespace, "--grace-period=1"]).await?;
    state("pod-restart-required").await?;
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    gpus.counts(cluster, node, &[(GPU_RESOURCE, all)]).await?;
    ensure!(pods::phase(&api.get("waits").await?) == "Pending", "bound during the upgrade");
    state("upgrade-done").await?;
    pods::running(&api, "waits").await?;
    cluster.kubectl(&["label", "node", node, &format!("{label}-")]).await?;
    let outcome = node_with_a_fault_of_nvsentinel_gets_no_pods(bed, &api, namespace, node).await;
    for sign in SIGNS_OF_NVSENTINEL {
        cluster.kubectl(&["label", "node", node, &format!("{sign}-")]).await?;
    }
    report_as_nvsentinel(bed, node, "False").await?;
    outcome
}

/// The labels of NVSentinel: the state of its repair, and those by which the operator excludes a node.
const SIGNS_OF_NVSENTINEL: [&str; 3] = [
    "dgxc.nvidia.com/nvsentinel-state",
    "k8saas.nvidia.com/ManagedByNVSentinel",
    "nvsentinel.dgxc.nvidia.com/managed",
];

/// Sets the status of the condition by which NVSentinel reports a fault of GPU memory.
async fn report_as_nvsentinel(bed: &Bed, node: &str, status: &str) -> Result<()> {
    let now = Timestamp::now();
    let condition = serde_json::json!({"status": {"conditions": [{
        "type": "GpuMemWatch", "status": status, "reason": "GpuMemWatchIsNotHealthy",
        "message": "ErrorCode:DCGM_FR_FAULTY_MEMORY GPU:0", "lastHeartbeatTime": now, "lastTransitionTime": now,
    }]}});
    let nodes = Api::<Node>::all(bed.client());
    nodes.patch_status(node, &PatchParams::default(), &Patch::Strategic(condition)).await?;
    Ok(())
}

/// NVSentinel reports a fault by a condition, drains the node under its label, and taints it. Each keeps new pods away, and
/// pods that run go on. A node that the operator excludes from NVSentinel is used whatever it reports.
async fn node_with_a_fault_of_nvsentinel_gets_no_pods(
    bed: &Bed,
    api: &Api<Pod>,
    namespace: &str,
    node: &str,
) -> Result<()> {
    let cluster = bed.cluster();
    let [state, excluded, excluded_too] = SIGNS_OF_NVSENTINEL;
    let label = async |text: String| cluster.kubectl(&["label", "node", node, "--overwrite", &text]).await;
    let refused_for = async |name: &str, reason: &str, mark: &str| {
        refused(bed, api, namespace, &chosen(name, GPU_RESOURCE, 1, node)?, reason).await?;
        let explained = views::explained(bed, &["pod", name, "-n", namespace]).await?;
        ensure!(explained.contains(mark), "{mark} is not in: {explained}");
        anyhow::Ok(())
    };
    report_as_nvsentinel(bed, node, "True").await?;
    refused_for("faulty", "GPUs are withheld: NVSentinel reports a fault", "condition GpuMemWatch").await?;
    let waits = api.get("waits").await?;
    ensure!(pods::phase(&waits) == "Running" && waits.metadata.deletion_timestamp.is_none());
    label(format!("{excluded}=false")).await?;
    pods::running(api, "faulty").await?;
    cluster.kubectl(&["label", "node", node, &format!("{excluded}-")]).await?;

    report_as_nvsentinel(bed, node, "False").await?;
    label(format!("{state}=draining")).await?;
    refused_for("drained", "GPUs are withheld: NVSentinel repairs the node", state).await?;
    label(format!("{excluded_too}=false")).await?;
    pods::running(api, "drained").await?;
    cluster.kubectl(&["label", "node", node, &format!("{state}-"), &format!("{excluded_too}-")]).await?;

    // The taint of the example in NVSentinel's values.
    let taint = "nvidia.com/gpu-error";
    cluster.kubectl(&["taint", "node", node, &format!("{taint}=fatal:NoSchedule")]).await?;
    let tainted =
        refused_for("tainted", "untolerated taint", &format!("does not tolerate taint {taint}")).await;
    cluster.kubectl(&["taint", "node", node, &format!("{taint}-")]).await?;
    tainted?;
    pods::running(api, "tainted").await?;
    Ok(())
}

/// Faults on one node: a rule drains the GPU of a running pod, another cordons a second GPU, a limit holds a third back, and
/// a rule only reports. Each is done once, also over another leader. Of two GPUs that lose their NVLinks the limit admits
/// one. A drain ends when its GPU leaves the node.
pub(super) async fn remediation_rule_acts_once_within_limits(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = cluster.nodes()[2].name();
    let mut hardware =
        Hardware::install_in(cluster.node(node)?, &gantry::machine_file("a40-8x-bridged"), "ruled")?;
    let uuids = uuids_in(&hardware);
    gpus.serve(cluster, node, Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
    let pods = bed.namespace("e2e-remediation").await?;
    let worker = replicated(bed, "e2e-remediation", &chosen("worker", GPU_RESOURCE, 1, node)?).await?;
    let held = pods::seen(cluster, &worker, "main").await?;
    let held = uuids.iter().position(|uuid| held.contains(uuid)).context("a GPU")?;
    let with_rules = apply_rules(bed, RULES).await?;
    let outcome = async {
        let about = ("Node", node, None);
        hardware.controller().raise_xid(u8::try_from(held)?, 48)?;
        let drained = ["double-bit", &uuids[held], "its pods are evicted"];
        views::event(bed, "default", about, "RemediationApplied", &drained).await?;
        views::event(bed, "default", about, "GpuDrained", &[&uuids[held], "no pod holds it"]).await?;
        let another = replica(&pods, worker.metadata.uid.as_deref()).await?;
        let next = pods::seen(cluster, &another, "main").await?;
        ensure!(!next.contains(&uuids[held]), "it has the GPU again");
        let is_free = |gpu: &usize| *gpu != held && !next.contains(&uuids[*gpu]);
        let mut pairs = (0..uuids.len()).step_by(2);
        let left = pairs.find(|left| is_free(left) && is_free(&(left + 1))).context("a free pair")?;
        let right = left + 1;
        let others: Vec<usize> =
            (0..uuids.len()).filter(|gpu| is_free(gpu) && ![left, right].contains(gpu)).collect();
        let (first, second) = (others[0], others[1]);
        hardware.controller().raise_xid(u8::try_from(first)?, 79)?;
        let applied = ["off-the-bus", &uuids[first], "cordoned"];
        views::event(bed, "default", about, "RemediationApplied", &applied).await?;
        views::event(bed, "default", about, "RemediationMatched", &["watched", "dry run of reboot"]).await?;
        let api = Api::<GpuNode>::all(bed.client());
        let cordoned = async || -> Result<Vec<String>> {
            let annotations = api.get(node).await?.metadata.annotations;
            let cordons = Cordons::of(annotations.as_ref());
            Ok(cordons.iter().map(|(gpu, cordon)| format!("{gpu} {cordon}")).collect())
        };
        let mut expected = [
            format!("{} cordoned by gantry-extender: rule double-bit: Xid 48", uuids[held]),
            format!("{} cordoned by gantry-extender: rule off-the-bus: Xid 79", uuids[first]),
        ];
        expected.sort();
        ensure!(cordoned().await? == expected, "{:?}", cordoned().await?);
        hardware.controller().raise_xid(u8::try_from(second)?, 79)?;
        views::event(bed, "default", about, "RemediationHeldBack", &[&uuids[second], "2 of 2 GPUs"]).await?;
        // A dry run leaves nothing on the Node.
        let object = Api::<Node>::all(bed.client()).get(node).await?;
        let conditions = object.status.and_then(|status| status.conditions).unwrap_or_default();
        ensure!(conditions.iter().all(|condition| condition.type_ != "GPURebootRequested"), "{conditions:?}");
        // The operator's decision stands over a restart: the fault is not acted on again.
        succeeds(bed, &["uncordon", "gpu", &uuids[first]]).await?;
        restart_extender(bed, &with_rules).await?;
        let applied = ["off-the-bus", &uuids[second], "cordoned"];
        views::event(bed, "default", about, "RemediationApplied", &applied).await?;
        ensure!(
            !cordoned().await?.iter().any(|text| text.starts_with(&uuids[first])),
            "{:?}",
            cordoned().await?
        );
        succeeds(bed, &["uncordon", "gpu", &uuids[second]]).await?;

        // The NVLink bridge of two other GPUs fails: the limit leaves room for one of them.
        hardware.controller().set_nvlink(u8::try_from(left)?, 0, false)?;
        let applied = ["bridge", "nvlinks-down", &uuids[left], "cordoned"];
        views::event(bed, "default", about, "RemediationApplied", &applied).await?;
        let held_back = ["nvlinks-down", &uuids[right], "2 of 2 GPUs"];
        views::event(bed, "default", about, "RemediationHeldBack", &held_back).await?;
        let mut expected = [
            format!("{} cordoned by gantry-extender: rule double-bit: Xid 48", uuids[held]),
            format!("{} cordoned by gantry-extender: rule bridge: nvlinks-down", uuids[left]),
        ];
        expected.sort();
        ensure!(cordoned().await? == expected, "{:?}", cordoned().await?);
        hardware.controller().set_nvlink(u8::try_from(left)?, 0, true)?;
        succeeds(bed, &["uncordon", "gpu", &uuids[left], &uuids[held]]).await?;
        drain_ends_without_its_gpu(bed, node, &mut hardware, &another).await
    }
    .await;
    withdraw_rules(bed, node).await?;
    let own = uuids.iter().map(|gpu| Ok(format!("{}-", Cordon::annotation(&gpu.parse()?))));
    let own = own.collect::<Result<Vec<String>>>()?;
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    let lift = "gantry.dev/lift-quarantine=all";
    cluster.kubectl(&[&["annotate", "gpunode", node, lift], &own[..]].concat()).await?;
    outcome
}

/// A rule drains the GPU of `worker`, and the pod's budget holds the drain back. The GPU leaves the node: the drain ends, and
/// the pod stays when the budget admits its eviction.
async fn drain_ends_without_its_gpu(
    bed: &Bed,
    node: &str,
    hardware: &mut Hardware,
    worker: &Pod,
) -> Result<()> {
    let cluster = bed.cluster();
    let namespace = worker.metadata.namespace.as_deref().context("a namespace")?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(bed.client(), namespace);
    let budget = serde_json::json!({
        "metadata": {"name": "worker"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "worker"}}},
    });
    budgets.create(&Default::default(), &serde_json::from_value(budget)?).await?;
    let held = pods::seen(cluster, worker, "main").await?;
    let uuids = uuids_in(hardware);
    let index = uuids.iter().position(|uuid| held.contains(uuid)).context("a GPU")?;
    let (gpu, index) = (&*uuids[index], u8::try_from(index)?);
    let about = ("Node", node, None);
    hardware.controller().raise_xid(index, 48)?;
    let stays = ["double-bit", gpu, "stays: the disruption budget"];
    views::event(bed, "default", about, "RemediationHeldBack", &stays).await?;
    hardware.controller().remove_gpu(index)?;
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    views::event(bed, "default", about, "RemediationWithdrawn", &["double-bit", gpu, "the drain ends"])
        .await?;
    budgets.delete("worker", &DeleteParams::default()).await?;
    // Two looks of the rules.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let now = Api::<Pod>::namespaced(bed.client(), namespace);
    let now = now.get(worker.metadata.name.as_deref().unwrap_or_default()).await?;
    let is_same = now.metadata.uid == worker.metadata.uid && now.metadata.deletion_timestamp.is_none();
    ensure!(is_same, "the pod was evicted without a GPU to drain");
    Ok(())
}

/// A rule resets the GPU of a running pod: without the manifest of the right nothing is done; then the GPU is drained, reset
/// by a Job that outlives a leader and a plugin, and returned. A reset that the driver refuses leaves the GPU cordoned, and
/// so does one that does not help. The operator's cordon stays after a reset. The driver's nvidia-smi is a script.
pub(super) async fn rule_resets_a_gpu_by_a_job(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = &cluster.nodes()[2];
    let mut hardware = Hardware::install_in(node, &gantry::machine_file("a40-8x-bridged"), "reset")?;
    gpus.serve(cluster, node.name(), Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
    cluster.import_gantry(&gantry::binary().context("no gantry beside this test")?).await?;
    node.exec(&["mount", "-t", "tmpfs", "tmpfs", SMI_FOLDER]).await?;
    let with_rules = apply_rules(bed, RESET_RULES).await?;
    let outcome = resets(bed, node, &mut hardware, &with_rules).await;
    // What the operator looks at first.
    let state = cluster.kubectl(&["-n", NAMESPACE, "get", "pods,jobs", "-o", "wide"]).await?;
    node.exec(&["umount", "--lazy", SMI_FOLDER]).await?;
    withdraw_rules(bed, node.name()).await?;
    cluster.kubectl(&["delete", "--ignore-not-found", "-f", &reset_right()]).await?;
    cluster.kubectl(&["-n", NAMESPACE, "delete", "jobs,pods", "--all", "--now"]).await?;
    for gpu in uuids_in(&hardware) {
        succeeds(bed, &["uncordon", "gpu", &gpu]).await?;
    }
    let lift = ["annotate", "gpunode", node.name(), "gantry.dev/lift-quarantine=all", "--overwrite"];
    cluster.kubectl(&lift).await?;
    outcome.context(state)
}

/// Where the driver's nvidia-smi is searched first.
const SMI_FOLDER: &str = "/usr/local/sbin";

/// Gives the node a driver whose nvidia-smi runs these lines.
async fn write_smi(node: &NodeSandbox, lines: &str) -> Result<()> {
    let path = format!("{SMI_FOLDER}/nvidia-smi");
    let script = format!("cat > {path} && chmod 755 {path}");
    node.sandbox().exec_with_input(&["sh", "-c", &script], &format!("#!/bin/sh\n{lines}\n")).await?;
    Ok(())
}

/// How often the plugin of this node has seen this GPU reset.
async fn resets_of(api: &Api<GpuNode>, node: &str, gpu: &str) -> Result<u64> {
    let status = api.get(node).await?.status.unwrap_or_default();
    let evidence = status.evidence.into_iter().find(|entry| entry.gpu == gpu);
    Ok(evidence.and_then(|entry| entry.resets).map_or(0, |resets| resets.count))
}

async fn resets(bed: &Bed, node: &NodeSandbox, hardware: &mut Hardware, with_rules: &[String]) -> Result<()> {
    let cluster = bed.cluster();
    let about = ("Node", node.name(), None);
    let uuids = uuids_in(hardware);
    // The daemons of the scenarios are processes; this pod has their image.
    let plugin = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "plugin", "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "gantry"}},
        "spec": {"nodeName": node.name(), "restartPolicy": "Never", "containers": [{
            "name": "plugin", "image": format!("gantry:{}", env!("CARGO_PKG_VERSION")), "args": ["--version"],
        }]},
    });
    cluster.kubectl_with_input(&["create", "-f", "-"], &plugin.to_string()).await?;
    let pods = bed.namespace("e2e-reset").await?;
    let worker = replicated(bed, "e2e-reset", &chosen("worker", GPU_RESOURCE, 1, node.name())?).await?;
    let held = pods::seen(cluster, &worker, "main").await?;
    let held = uuids.iter().position(|uuid| held.contains(uuid)).context("a GPU")?;
    let [refused, kept, broken] = [2, 4, 6].map(|step| (held + step) % uuids.len());
    let api = Api::<GpuNode>::all(bed.client());
    let cordoned = async |gpu: &str| -> Result<Option<String>> {
        let annotations = api.get(node.name()).await?.metadata.annotations;
        let cordons = Cordons::of(annotations.as_ref());
        Ok(cordons.iter().find(|(known, _)| known.as_str() == gpu).map(|(_, cordon)| cordon.to_string()))
    };
    let jobs = async || cluster.kubectl(&["-n", NAMESPACE, "get", "jobs", "-o", "name"]).await;

    hardware.controller().raise_xid(u8::try_from(held)?, 48)?;
    let lacks = [uuids[held].as_str(), "lacks the rights of remediation-reset.yaml"];
    views::event(bed, "default", about, "RemediationHeldBack", &lacks).await?;
    ensure!(cordoned(&uuids[held]).await?.is_none(), "something was done");
    // Other scenarios raise faults of the same GPUs, and each new machine counts as their reset.
    let resets_before = resets_of(&api, node.name(), &uuids[held]).await?;

    let waits = "echo \"$@\" >> /run/resets; until [ -e /run/reset-goes-on ]; do sleep 0.1; done";
    write_smi(node, &format!("{waits}; echo was successfully reset")).await?;
    cluster.kubectl(&["apply", "-f", &reset_right()]).await?;
    let resetting = [uuids[held].as_str(), "the Job", "resets it"];
    views::event(bed, "default", about, "RemediationApplied", &resetting).await?;
    let another = replica(&pods, worker.metadata.uid.as_deref()).await?;
    ensure!(!pods::seen(cluster, &another, "main").await?.contains(&uuids[held]), "it has the GPU again");
    runs(node, "/run/resets").await?;
    // The next plugin must not disturb the reset, nor offer the GPU.
    let before = hardware.controller().calls();
    node.restart(gantry::PLUGIN).await?;
    restart_extender(bed, with_rules).await?;
    let meanwhile = hardware.controller().calls().since(&before);
    ensure!(meanwhile.total() == 0, "NVML was used during a reset: {:?}", meanwhile.by_name());
    let offered = podresources::allocatable(node, GPU_RESOURCE).await?;
    ensure!(!offered.contains(&uuids[held]), "kubelet has {offered:?} during the reset");
    node.exec(&["touch", "/run/reset-goes-on"]).await?;
    let healthy = [uuids[held].as_str(), "healthy and uncordoned"];
    views::event(bed, "default", about, "RemediationReset", &healthy).await?;
    ensure!(cordoned(&uuids[held]).await?.is_none(), "the GPU is cordoned");
    let resets = node.exec(&["cat", "/run/resets"]).await?;
    ensure!(resets == format!("--gpu-reset -i {}\n", uuids[held]), "{resets}");
    ensure!(jobs().await?.lines().count() == 1, "{}", jobs().await?);
    let evidence = succeeds(bed, &["evidence", "gpu", &uuids[held]]).await?;
    let counted = resets_of(&api, node.name(), &uuids[held]).await?;
    ensure!(counted == resets_before + 1, "{resets_before} resets before: {evidence}");
    ensure!(evidence.contains("reset after a fault; "), "{evidence}");
    bed.gpus().await?.counts(cluster, node.name(), &[(GPU_RESOURCE, 8)]).await?;
    let returned = run_on(&pods, "returned", GPU_RESOURCE, 7, node.name()).await?;
    let seen = pods::seen(cluster, &returned, "main").await?;
    ensure!(seen.contains(&uuids[held]), "no pod gets the GPU again: {seen:?}");
    pods.delete("returned", &DeleteParams::default()).await?;

    write_smi(node, "echo GPU is in use by another process; exit 3").await?;
    hardware.controller().raise_xid(u8::try_from(refused)?, 48)?;
    let why = [uuids[refused].as_str(), "was not reset", "in use by another process"];
    views::event(bed, "default", about, "RemediationResetFailed", &why).await?;
    let cordon = cordoned(&uuids[refused]).await?;
    ensure!(cordon.as_deref() == Some("cordoned by gantry-extender: rule double-bit: Xid 48"), "{cordon:?}");

    write_smi(node, "echo was successfully reset").await?;
    succeeds(bed, &["cordon", "gpu", &uuids[kept], "--reason", "the fan fails"]).await?;
    hardware.controller().raise_xid(u8::try_from(kept)?, 48)?;
    let stays = [uuids[kept].as_str(), "it stays cordoned by", "the fan fails"];
    views::event(bed, "default", about, "RemediationReset", &stays).await?;

    fails_again_after_reset(bed, node, hardware, broken).await?;
    let cordon = cordoned(&uuids[broken]).await?;
    ensure!(cordon.is_some_and(|cordon| cordon.contains("to be drained")), "it is not cordoned any more");
    let offered = podresources::allocatable(node, GPU_RESOURCE).await?;
    ensure!(!offered.contains(&uuids[broken]), "{offered:?}");

    let left = ["-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=gantry-reset", "-o", "name"];
    let left = cluster.kubectl(&left).await?;
    ensure!(left.is_empty(), "{left}");
    let annotations = api.get(node.name()).await?.metadata.annotations.unwrap_or_default();
    ensure!(!annotations.contains_key("gantry.dev/nvml-closed-until"), "{annotations:?}");
    views::Metrics::settled(
        bed,
        &[("remediation_resets_total{rule=\"double-bit\",result=\"refused\"}", 1.0)],
    )
    .await?;
    Ok(())
}

/// Waits until a script on the node has made this file.
async fn runs(node: &NodeSandbox, file: &str) -> Result<()> {
    until(format!("{file} on {}", node.name()), pods::RUN_LIMIT, async || {
        node.exec(&["test", "-e", file]).await.map(drop)
    })
    .await?;
    Ok(())
}

/// The operator drains and resets a GPU that falls off the bus as soon as the plugin reads it again.
async fn fails_again_after_reset(
    bed: &Bed,
    node: &NodeSandbox,
    hardware: &mut Hardware,
    gpu: usize,
) -> Result<()> {
    /// A call of the reading, after the registration for Xids.
    const READING: &str = "nvmlDeviceGetName";
    let uuid = &*uuids_in(hardware)[gpu];
    let index = u8::try_from(gpu)?;
    let about = ("Node", node.name(), None);
    hardware.controller().raise_xid(index, 95)?;
    views::event(bed, "default", about, "GpuUnhealthy", &[uuid, "Xid 95"]).await?;
    succeeds(bed, &["drain", "gpu", uuid]).await?;
    write_smi(node, "touch /run/reset-of-broken; echo was successfully reset").await?;
    let breaks = async {
        runs(node, "/run/reset-of-broken").await?;
        let control = hardware.controller();
        let before = control.calls();
        // The Xid is there before the first reading ends.
        control.slow_call(READING, Duration::from_millis(300))?;
        until("a reading after the reset", pods::RUN_LIMIT, async || {
            let calls = control.calls().since(&before).of(READING);
            if calls > 0 { Ok(()) } else { Err("none") }
        })
        .await?;
        control.raise_xid(index, 79)?;
        control.clear_rule(READING)?;
        Ok(())
    };
    let reset = ["reset", "gpu", uuid, "--uncordon"];
    let (text, broken) = tokio::join!(fails(bed, &reset), breaks);
    let text = text?;
    broken.and_then(|()| {
        let is_named = text.contains(uuid) && text.contains("Xid 79");
        ensure!(is_named && text.contains("the GPU was reset, and stays cordoned"), "{text}");
        Ok(())
    })
}

/// Faults by Xid taint the Node and set its conditions, until the faults or the rules end. A hot GPU is cordoned, and so is
/// one with repeated memory errors.
pub(super) async fn rules_mark_the_node_while_faults_last(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = cluster.nodes()[2].name();
    // Uncorrected errors are a fault of GPUs that cannot remap rows.
    let mut hardware =
        Hardware::install_in(cluster.node(node)?, &gantry::machine_file("dgx1-v100"), "marked")?;
    let uuids = uuids_in(&hardware);
    hardware.controller().set_temperature(HOT, 90)?;
    gpus.serve(cluster, node, Some(&hardware), &[], &[(GPU_RESOURCE, 8)]).await?;
    let pods = bed.namespace("e2e-marked").await?;
    apply_rules(bed, MARKING_RULES).await?;
    let outcome = async {
        hardware.controller().update_gpu(FORGETFUL, |gpu| gpu.ecc.volatile_uncorrected = 1)?;
        for (gpu, xid) in [(0, 48), (1, 79), (2, 95)] {
            hardware.controller().raise_xid(gpu, xid)?;
        }
        let marked = "taint tainted:NoSchedule, GPUFault=True, GPURebootRequested=True";
        is_marked(bed, node, marked).await?;
        // Rules that are no rules change nothing; others are in effect without a restart.
        write_rules(bed, &MARKING_RULES.replace("action: taint", "action: tainted"))?;
        views::Metrics::settled(bed, &[("remediation_rules_invalid", 1.0)]).await?;
        is_marked(bed, node, marked).await?;
        write_rules(bed, &MARKING_RULES.replace("xids: [48]", "xids: [62]"))?;
        is_marked(bed, node, "GPUFault=True, GPURebootRequested=True").await?;
        views::Metrics::settled(bed, &[("remediation_rules_invalid", 0.0)]).await?;
        pods.create(&Default::default(), &chosen("whole", GPU_RESOURCE, 8, node)?).await?;
        let explained = views::explained(bed, &["pod", "whole", "-n", "e2e-marked"]).await?;
        let response = "response to Xid 79 of GPU 1: drain the node and reboot it";
        ensure!(explained.contains(response), "{explained}");
        pods.delete("whole", &DeleteParams::default()).await?;
        slowdowns_and_memory_errors_are_acted_on(bed, node, &mut hardware).await?;
        cluster.kubectl(&["annotate", "gpunode", node, "gantry.dev/lift-quarantine=all"]).await?;
        is_marked(bed, node, "GPUFault=False, GPURebootRequested=False").await?;
        for rule in ["tainted", "reported", "reboot"] {
            views::event(bed, "default", ("Node", node, None), "RemediationWithdrawn", &[rule]).await?;
        }
        Ok(())
    }
    .await;
    withdraw_rules(bed, node).await?;
    cluster.kubectl(&["annotate", "gpunode", node, "gantry.dev/lift-quarantine=all", "--overwrite"]).await?;
    for gpu in [HOT, FORGETFUL] {
        let own = format!("{}-", Cordon::annotation(&uuids[usize::from(gpu)].parse()?));
        cluster.kubectl(&["annotate", "gpunode", node, &own]).await?;
    }
    outcome
}

/// The GPU that is hot.
const HOT: u8 = 4;
/// The GPU with memory errors.
const FORGETFUL: u8 = 5;

/// The GPU that was hot from the start is cordoned. That with a memory error is not before a second error within the window of
/// its rule.
async fn slowdowns_and_memory_errors_are_acted_on(
    bed: &Bed,
    node: &str,
    hardware: &mut Hardware,
) -> Result<()> {
    let about = ("Node", node, None);
    let uuids = uuids_in(hardware);
    let (hot, forgetful) = (&*uuids[usize::from(HOT)], &*uuids[usize::from(FORGETFUL)]);
    let slowed = ["hot", hot, "throttled-thermal", "cordoned"];
    views::event(bed, "default", about, "RemediationApplied", &slowed).await?;
    let has_error = |object: &GpuNode| {
        let problems = object.status.iter().flat_map(|status| &status.problems);
        problems.clone().any(|problem| problem.cause == "ecc-uncorrected" && problem.gpu == forgetful)
    };
    let cordon = |object: &GpuNode| {
        let cordons = Cordons::of(object.metadata.annotations.as_ref());
        cordons.iter().find(|(gpu, _)| gpu.as_str() == forgetful).map(|(_, cordon)| cordon.to_string())
    };
    let is_counted = |object: &GpuNode| {
        let annotations = object.metadata.annotations.iter().flatten();
        let mut records = annotations.filter(|(name, _)| *name == REMEDIATION_ANNOTATION);
        records.any(|(_, record)| record.contains("ecc-repeats"))
    };
    let counted = |object: &GpuNode| has_error(object) && is_counted(object);
    let once = views::gpu_node(bed, node, "one memory error is counted", counted).await?;
    ensure!(cordon(&once).is_none(), "cordoned for one error: {:?}", cordon(&once));
    let errors = |count: u64| move |gpu: &mut GpuState| gpu.ecc.volatile_uncorrected = count;
    hardware.controller().update_gpu(FORGETFUL, errors(0))?;
    views::gpu_node(bed, node, "no memory error", |object| !has_error(object)).await?;
    hardware.controller().update_gpu(FORGETFUL, errors(1))?;
    let repeated = ["ecc-repeats", forgetful, "ecc-uncorrected", "cordoned"];
    views::event(bed, "default", about, "RemediationApplied", &repeated).await?;
    let object = Api::<GpuNode>::all(bed.client()).get(node).await?;
    let expected = "cordoned by gantry-extender: rule ecc-repeats: ecc-uncorrected";
    ensure!(cordon(&object).as_deref() == Some(expected), "{:?}", cordon(&object));
    Ok(())
}

/// Waits until a Node has these marks of rules, and no others.
async fn is_marked(bed: &Bed, node: &str, expected: &str) -> Result<()> {
    let nodes = Api::<Node>::all(bed.client());
    let marked = until(format!("marks {expected}"), pods::RUN_LIMIT, async || {
        let node = nodes.get(node).await.map_err(|error| error.to_string())?;
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let taints = taints.into_iter().filter(|taint| taint.key == REMEDIATION_TAINT);
        let taints =
            taints.map(|taint| format!("taint {}:{}", taint.value.unwrap_or_default(), taint.effect));
        let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
        let of_rules = |type_: &str| ["GPUFault", "GPURebootRequested"].contains(&type_);
        let mut conditions: Vec<String> = conditions
            .into_iter()
            .filter(|condition| of_rules(&condition.type_))
            .map(|condition| format!("{}={}", condition.type_, condition.status))
            .collect();
        conditions.sort();
        let marks = taints.chain(conditions).collect::<Vec<_>>().join(", ");
        if marks == expected { Ok(()) } else { Err(marks) }
    });
    Ok(marked.await?)
}

/// Starts the extender with rules of remediation and the rights that they need. Returns its arguments.
async fn apply_rules(bed: &Bed, rules: &str) -> Result<Vec<String>> {
    let file = write_rules(bed, rules)?;
    bed.cluster().kubectl(&["apply", "-f", &right()]).await?;
    let arguments = vec![format!("--remediation-rules={}", file.display())];
    restart_extender(bed, &arguments).await?;
    Ok(arguments)
}

/// Writes the file of rules.
pub(super) fn write_rules(bed: &Bed, rules: &str) -> Result<PathBuf> {
    let file = bed.cluster().folder().join("remediation.yaml");
    std::fs::write(&file, rules)?;
    Ok(file)
}

/// Starts the extender without rules of remediation, and forgets what they did on a node.
async fn withdraw_rules(bed: &Bed, node: &str) -> Result<()> {
    restart_extender(bed, &[]).await?;
    bed.cluster().kubectl(&["delete", "-f", &right()]).await?;
    bed.cluster().kubectl(&["annotate", "gpunode", node, "gantry.dev/remediation-"]).await?;
    Ok(())
}

/// The manifest of the rights for rules of remediation.
fn right() -> String {
    manifests().join("extender-remediation.yaml").display().to_string()
}

/// The manifest of the right to reset GPUs.
fn reset_right() -> String {
    manifests().join("remediation-reset.yaml").display().to_string()
}

/// A ReplicaSet with one pod, which runs.
pub(super) async fn replicated(bed: &Bed, namespace: &str, pod: &Pod) -> Result<Pod> {
    let labels = serde_json::json!({"app": "worker"});
    let set: ReplicaSet = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "worker"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod.spec},
        },
    }))?;
    Api::namespaced(bed.client(), namespace).create(&Default::default(), &set).await?;
    replica(&Api::namespaced(bed.client(), namespace), None).await
}

/// The running pod of that ReplicaSet, which is not the one of this UID.
async fn replica(pods: &Api<Pod>, other: Option<&str>) -> Result<Pod> {
    let pod = until("a replica", pods::RUN_LIMIT, async || {
        let found = pods.list(&Default::default()).await.map_err(|error| error.to_string())?;
        let runs = |pod: &&Pod| pods::phase(pod) == "Running" && pod.metadata.uid.as_deref() != other;
        found.items.iter().find(runs).cloned().ok_or_else(|| format!("{} pods", found.items.len()))
    });
    Ok(pod.await?)
}

/// Rules that act, and one that only reports.
const RULES: &str = "
version: v1
dryRun: false
limits: {gpus: 2}
rules:
- name: double-bit
  match: {xids: [48]}
  action: drain
- name: off-the-bus
  match: {xids: [79]}
  action: cordon
- name: bridge
  match: {causes: [nvlinks-down]}
  action: cordon
- name: watched
  match: {causes: [xid-fatal, xid-resettable, xid-mig-instance]}
  action: reboot
  dryRun: true
";

/// A rule that resets.
const RESET_RULES: &str = "
version: v1
dryRun: false
limits: {nodes: 100%, gpus: 100%}
rules:
- name: double-bit
  match: {xids: [48]}
  action: reset
";

/// Rules that mark the Node, and two that cordon GPUs.
const MARKING_RULES: &str = "
version: v1
dryRun: false
limits: {nodes: 100%, gpus: 100%}
rules:
- name: tainted
  match: {xids: [48]}
  action: taint
- name: reported
  match: {xids: [79]}
  action: condition
- name: reboot
  match: {xids: [95]}
  action: reboot
- name: hot
  match: {causes: [throttled-thermal]}
  action: cordon
- name: ecc-repeats
  match: {causes: [ecc-uncorrected]}
  rate: {count: 2, window: 1h}
  action: cordon
";
