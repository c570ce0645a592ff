//! The MIG layout of a node by its label, under the real kubelet: slices are offered and run pods, a GPU that a pod holds
//! waits, and what cannot be made is reported.

use anyhow::{Context, Result, ensure};
use gantry_api::{GpuNode, names};
use gantry_e2e::gantry::{self, manifests};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Cluster, until};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::DeleteParams;

use super::modes::{run_on, write_config};
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::{pods, views};

const SMALL: &str = "nvidia.com/mig-1g.5gb";
const LARGE: &str = "nvidia.com/mig-3g.20gb";

const LAYOUTS: &str = r#"
version: v1
mig-configs:
  all-1g.5gb: [{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": 7}}]
  all-3g.20gb: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 2}}]
  three-3g.20gb: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 3}}]
"#;

/// The manifests that the option needs.
const RIGHTS: [&str; 2] = ["labels-node.yaml", "mig-layouts.yaml"];

pub(super) async fn layout_follows_label_and_spares_held_gpus(bed: &Bed) -> Result<()> {
    let cluster = bed.cluster();
    let node = cluster.nodes()[1].name();
    let outcome = followed(bed, node).await;
    // Whatever came of it: the plugin ends first, and the node is as it was.
    bed.gpus().await?.restart_plugin(cluster, node, &[]).await?;
    let gone = [names::MIG_LAYOUT_LABEL, names::MIG_LAYOUT_STATE_LABEL].map(|label| format!("{label}-"));
    cluster.kubectl(&["label", "node", node, &gone[0], &gone[1]]).await?;
    for right in RIGHTS {
        let path = manifests().join(right).display().to_string();
        cluster.kubectl(&["delete", "-f", &path, "--ignore-not-found"]).await?;
    }
    outcome
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
    let machine = Api::<GpuNode>::all(bed.client()).get(node).await?.spec.machine;
    let gpu = machine.gpus().iter().find(|gpu| {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        instances.flat_map(|instance| &instance.compute).any(|compute| compute.uuid.as_str() == device)
    });
    Ok(gpu.with_context(|| format!("{device} is on no GPU of {node}"))?.index)
}
