//! The MIG layout of a node by its label, under the real kubelet: slices are offered and run pods, a GPU that a pod holds
//! waits or is drained, and what cannot be made is reported.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{GpuNode, names};
use gantry_e2e::gantry::{self, manifests};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Cluster, until};
use gantry_topology::{Gpu, GpuInstance};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::DeleteParams;

use super::modes::{chosen, run_on, write_config};
use super::operate::replicated;
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::{pods, views};

const SMALL: &str = "nvidia.com/mig-1g.5gb";
const MEDIUM: &str = "nvidia.com/mig-2g.10gb";
const LARGE: &str = "nvidia.com/mig-3g.20gb";
/// The namespace of pods that are drained.
const DRAINED: &str = "e2e-mig-drain";
/// The call that makes a GPU instance.
const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
/// NVML_ERROR_INSUFFICIENT_RESOURCES.
const INSUFFICIENT_RESOURCES: u32 = 23;
/// The file that NVIDIA ships with mig-parted.
const SHIPPED: &str = include_str!("../../../../config/tests/data/mig-layouts.yaml");

const LAYOUTS: &str = r#"
version: v1
mig-configs:
  all-1g.5gb: [{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": 7}}]
  all-3g.20gb: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 2}}]
  three-3g.20gb: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 3}}]
"#;

/// The manifests that the option needs.
const RIGHTS: [&str; 2] = ["labels-node.yaml", "mig-layouts.yaml"];
/// The manifest of the right to drain.
const DRAIN_RIGHT: &str = "extender-mig-drain.yaml";

pub(super) async fn layout_follows_label_and_spares_held_gpus(bed: &Bed) -> Result<()> {
    let node = bed.cluster().nodes()[1].name();
    let outcome = followed(bed, node).await;
    restored(bed, node).await?;
    outcome
}

/// Layouts of NVIDIA's file, by index and by product: the plugin is killed while it applies one, pods that hold GPUs are
/// drained within their budget, and a layout that the driver refuses in the middle is rolled back.
pub(super) async fn shipped_layout_drains_and_rolls_back(bed: &Bed) -> Result<()> {
    let node = bed.cluster().nodes()[1].name();
    let outcome = drained(bed, node).await;
    restored(bed, node).await?;
    outcome
}

/// The node as it was, whatever came of the scenario. The plugin ends first.
async fn restored(bed: &Bed, node: &str) -> Result<()> {
    let cluster = bed.cluster();
    bed.gpus().await?.restart_plugin(cluster, node, &[]).await?;
    for label in [names::MIG_LAYOUT_LABEL, names::MIG_LAYOUT_STATE_LABEL, names::MIG_DRAIN_LABEL] {
        cluster.kubectl(&["label", "node", node, &format!("{label}-")]).await?;
    }
    for right in RIGHTS.iter().chain(&[DRAIN_RIGHT]) {
        let path = manifests().join(right).display().to_string();
        cluster.kubectl(&["delete", "-f", &path, "--ignore-not-found"]).await?;
    }
    Ok(())
}

async fn followed(bed: &Bed, node: &str) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-mig-layout").await?;
    for right in RIGHTS {
        let path = manifests().join(right).display().to_string();
        cluster.kubectl(&["apply", "-f", &path]).await?;
    }
    let hardware = Hardware::install_in(cluster.node(node)?, &gantry::machine_file("dgx-a100"), "layout")?;
    let layouts = write_config(cluster, node, LAYOUTS)?;
    let args = ["--mig-strategy=mixed".to_owned(), format!("--mig-layouts={}", layouts.display())];
    gpus.serve(cluster, node, Some(&hardware), &args, &[("nvidia.com/gpu", 8)]).await?;

    choose(cluster, node, "all-1g.5gb").await?;
    gpus.counts(cluster, node, &[(SMALL, 56), ("nvidia.com/gpu", 0)]).await?;
    state(bed, node, "success").await?;
    let about = ("Node", node, None);
    views::event(bed, "default", about, "MigLayoutApplied", &["all-1g.5gb", "in place on 8 GPUs"]).await?;
    let pod = run_on(&api, "small", SMALL, 1, node).await?;
    let held = pods::seen(cluster, &pod, "main").await?;
    ensure!(held.len() == 1 && held == pods::held_of(cluster, &pod, "main", SMALL).await?, "{held:?}");
    let slice = held.iter().next().context("a MIG device")?;
    let index = gpu_of(bed, node, slice).await?;

    // The GPU of the pod waits, and the pod goes on; the others change.
    choose(cluster, node, "all-3g.20gb").await?;
    gpus.counts(cluster, node, &[(LARGE, 14), (SMALL, 0)]).await?;
    state(bed, node, "pending").await?;
    let waits = format!("GPU {index}: held by e2e-mig-layout/small");
    views::event(bed, "default", about, "MigLayoutWaits", &["all-3g.20gb", &waits]).await?;
    let pod = pods::running(&api, "small").await?;
    ensure!(pods::seen(cluster, &pod, "main").await? == held, "the slice of the pod was touched");
    let large = run_on(&api, "large", LARGE, 1, node).await?;
    ensure!(pods::seen(cluster, &large, "main").await?.len() == 1);
    // A plugin that is killed meanwhile goes on where it was.
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    api.delete("small", &DeleteParams::default()).await?;
    gpus.counts(cluster, node, &[(LARGE, 16), (SMALL, 0)]).await?;
    state(bed, node, "success").await?;

    choose(cluster, node, "three-3g.20gb").await?;
    state(bed, node, "failed").await?;
    let why = ["three-3g.20gb", "cannot hold 3x 3g.20gb", "no placement is left for 3g.20gb"];
    views::event(bed, "default", about, "MigLayoutFailed", &why).await?;
    gpus.counts(cluster, node, &[(LARGE, 16)]).await?;
    Ok(())
}

async fn drained(bed: &Bed, node: &str) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace(DRAINED).await?;
    for right in RIGHTS.iter().chain(&[DRAIN_RIGHT]) {
        let path = manifests().join(right).display().to_string();
        cluster.kubectl(&["apply", "-f", &path]).await?;
    }
    let machine = gantry::machine_file("dgx-a100");
    let mut hardware = Hardware::install_in(cluster.node(node)?, &machine, "shipped-layouts")?;
    let layouts = write_config(cluster, node, SHIPPED)?;
    let args = ["--mig-strategy=mixed".to_owned(), format!("--mig-layouts={}", layouts.display())];
    gpus.serve(cluster, node, Some(&hardware), &args, &[(GPU_RESOURCE, 8)]).await?;
    let counts = async |small, medium, large, whole| {
        let all = [(SMALL, small), (MEDIUM, medium), (LARGE, large), (GPU_RESOURCE, whole)];
        gpus.counts(cluster, node, &all).await
    };
    choose(cluster, node, "custom-config").await?;
    counts(9, 4, 3, 4).await?;
    state(bed, node, "success").await?;

    // Two whole GPUs are held: by a pod with a controller and a budget, and by one that nothing replaces.
    let worker = replicated(bed, DRAINED, &chosen("worker", GPU_RESOURCE, 1, node)?).await?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(bed.client(), DRAINED);
    let budget = serde_json::json!({
        "metadata": {"name": "worker"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "worker"}}},
    });
    budgets.create(&Default::default(), &serde_json::from_value(budget)?).await?;
    let beside = run_on(&api, "beside", GPU_RESOURCE, 1, node).await?;
    // And a MIG device of a GPU that gets another layout.
    let slice = run_on(&api, "slice", SMALL, 1, node).await?;
    let device = pods::seen(cluster, &slice, "main").await?;
    let device = device.iter().next().context("a MIG device")?;
    let cut = instances_of(bed, node, device).await?;
    cluster.kubectl(&["label", "node", node, &format!("{}=true", names::MIG_DRAIN_LABEL)]).await?;

    // The plugin is killed after some instances were made.
    let made = hardware.controller().calls().of(CREATE);
    hardware.controller().slow_call(CREATE, Duration::from_secs(1))?;
    choose(cluster, node, "all-balanced").await?;
    until("MIG devices that are being made", GANG_LIMIT, async || {
        let now = hardware.controller().calls().of(CREATE);
        if now >= made + 2 { Ok(()) } else { Err(format!("{} calls", now - made)) }
    })
    .await?;
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    hardware.controller().clear_rule(CREATE)?;
    counts(10, 5, 5, 0).await?;
    state(bed, node, "pending").await?;
    let kept = instances_of(bed, node, device).await?;
    ensure!(kept == cut, "{cut:?} became {kept:?} under a pod");
    let now = pods::running(&api, "slice").await?;
    ensure!(now.metadata.uid == slice.metadata.uid, "the pod of the MIG device was replaced");
    api.delete("slice", &DeleteParams::default()).await?;
    counts(12, 6, 6, 0).await?;
    state(bed, node, "pending").await?;

    let about = ("Node", node, None);
    let held_back = async |why: &str| {
        views::event(bed, "default", about, "MigDrainHeldBack", &["all-balanced", why]).await
    };
    held_back("the disruption budget e2e-mig-drain/worker allows 0 of 1 disruptions").await?;
    held_back("no controller replaces e2e-mig-drain/beside").await?;
    ensure!(requested(bed, node).await? == 2, "GPUs that no pod holds are drained, or held ones are not");
    let name = worker.metadata.name.as_deref().context("a name")?;
    ensure!(api.get(name).await?.metadata.uid == worker.metadata.uid, "the budget did not protect its pod");

    budgets.delete("worker", &DeleteParams::default()).await?;
    let evicted = format!("pod {DRAINED}/{name} is evicted");
    views::event(bed, "default", about, "GpuDrained", &["all-balanced", &evicted]).await?;
    // Its next replica would hold a whole GPU as soon as there is one.
    let sets: Api<ReplicaSet> = Api::namespaced(bed.client(), DRAINED);
    sets.delete("worker", &DeleteParams::background()).await?;
    counts(14, 7, 7, 0).await?;
    let stays = pods::running(&api, "beside").await?;
    ensure!(stays.metadata.uid == beside.metadata.uid, "a pod that nothing replaces was evicted");
    cluster.kubectl(&["label", "node", node, &format!("{}-", names::MIG_DRAIN_LABEL)]).await?;
    until("no drain is requested", GANG_LIMIT, async || match requested(bed, node).await {
        Ok(0) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await?;
    api.delete("beside", &DeleteParams::default()).await?;
    counts(16, 8, 8, 0).await?;
    state(bed, node, "success").await?;

    // The driver refuses the second instance of GPU 4, which gets back what it had; the other GPUs change.
    let made = hardware.controller().calls().of(CREATE);
    hardware.controller().update(|state| {
        let rule = state.calls.entry(CREATE.to_owned()).or_default();
        rule.fail = Some(INSUFFICIENT_RESOURCES);
        (rule.from_call, rule.until_call) = (made + 1, Some(made + 2));
    })?;
    choose(cluster, node, "custom-config").await?;
    state(bed, node, "failed").await?;
    let why = ["custom-config", "GPU 4", "the former MIG instances are in place again"];
    views::event(bed, "default", about, "MigLayoutFailed", &why).await?;
    counts(4, 5, 4, 4).await?;
    let machine = Api::<GpuNode>::all(bed.client()).get(node).await?.spec.machine;
    let restored = machine.gpus().iter().find(|gpu| gpu.index == 4).context("GPU 4")?;
    let instances = restored.mig.iter().flat_map(|mig| &mig.instances).count();
    ensure!(instances == 4, "{restored:?}");
    // It is tried again when the label changes.
    hardware.controller().clear_rule(CREATE)?;
    choose(cluster, node, "all-balanced").await?;
    counts(16, 8, 8, 0).await?;
    choose(cluster, node, "custom-config").await?;
    counts(9, 4, 3, 4).await?;
    state(bed, node, "success").await
}

/// How many GPUs of a node are to be drained for its layout.
async fn requested(bed: &Bed, node: &str) -> Result<usize> {
    let status = Api::<GpuNode>::all(bed.client()).get(node).await?.status;
    Ok(status.and_then(|status| status.mig_drain).map_or(0, |drain| drain.gpus.len()))
}

/// Names the layout of a node.
async fn choose(cluster: &Cluster, node: &str, layout: &str) -> Result<()> {
    let label = format!("{}={layout}", names::MIG_LAYOUT_LABEL);
    cluster.kubectl(&["label", "--overwrite", "node", node, &label]).await?;
    Ok(())
}

/// Waits until the node's label has this state.
async fn state(bed: &Bed, node: &str, wanted: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(bed.client());
    until(format!("the MIG layout of {node} is {wanted}"), GANG_LIMIT, async || {
        let node = nodes.get_metadata(node).await.map_err(|error| error.to_string())?;
        let labels = node.metadata.labels.unwrap_or_default();
        match labels.get(names::MIG_LAYOUT_STATE_LABEL) {
            Some(state) if state == wanted => Ok(()),
            state => Err(format!("it is {state:?}")),
        }
    })
    .await?;
    Ok(())
}

/// The index of the GPU that has a MIG device.
async fn gpu_of(bed: &Bed, node: &str, device: &str) -> Result<u8> {
    Ok(gpu_with(bed, node, device).await?.index)
}

/// The MIG instances of the GPU that has a MIG device.
async fn instances_of(bed: &Bed, node: &str, device: &str) -> Result<Vec<GpuInstance>> {
    Ok(gpu_with(bed, node, device).await?.mig.context("MIG is on")?.instances)
}

/// The GPU that has a MIG device.
async fn gpu_with(bed: &Bed, node: &str, device: &str) -> Result<Gpu> {
    let machine = Api::<GpuNode>::all(bed.client()).get(node).await?.spec.machine;
    let gpu = machine.gpus().iter().find(|gpu| {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        instances.flat_map(|instance| &instance.compute).any(|compute| compute.uuid.as_str() == device)
    });
    Ok(gpu.with_context(|| format!("{device} is on no GPU of {node}"))?.clone())
}
