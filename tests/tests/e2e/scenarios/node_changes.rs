//! GPUs that change under the real kubelet: another MIG layout while the plugin runs, and an Xid. kubelet's resources,
//! the Node and the pods' devices follow.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_api::GpuNode;
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{gantry, podresources, until};
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use kube::Api;
use kube::api::{DeleteParams, PostParams};

use super::modes::{chosen, refused, run_on};
use crate::bed::Bed;
use crate::{pods, views};

/// An error of memory, which an event confines to the instance that it names: only a reset ends it, or the end of the
/// instance.
pub(super) const DOUBLE_BIT: u64 = 48;
/// The GPU has fallen off the bus.
const OFF_THE_BUS: u64 = 79;
/// All compute instances of a GPU instance.
pub(super) const ALL: u32 = u32::MAX;

pub(super) async fn changed_mig_layout_changes_resources(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-recut").await?;
    let node = cluster.nodes()[1].name();
    let machine = gantry::machine_file("a100-1x-mig");
    let mut hardware = Hardware::install_in(cluster.node(node)?, &machine, "recut")?;
    let mixed = ["--mig-strategy=mixed".to_owned()];
    let small = "nvidia.com/mig-1g.5gb";
    gpus.serve(cluster, node, Some(&hardware), &mixed, &[(small, 7)]).await?;
    let pod = run_on(&api, "before", small, 1, node).await?;
    let before = pods::seen(cluster, &pod, "main").await?;
    api.delete("before", &DeleteParams::default()).await?;

    // An Xid of one instance takes that one away, and no other.
    let instances = hardware.machine().gpus().first().and_then(|gpu| gpu.mig.clone());
    let instances = instances.context("the machine is cut")?.instances;
    let sick = instances.first().context("into instances")?;
    hardware.controller().raise_xid_in(0, DOUBLE_BIT, sick.id, ALL)?;
    gpus.counts(cluster, node, &[(small, 6)]).await?;
    // It is gone with the instance.
    hardware.controller().recut(0, &["3g.20gb", "2g.10gb", "1g.5gb"])?;
    let cut =
        [("nvidia.com/mig-3g.20gb", 1), ("nvidia.com/mig-2g.10gb", 1), (small, 1), ("nvidia.com/gpu", 0)];
    gpus.counts(cluster, node, &cut).await?;
    let mut all = BTreeSet::new();
    for (resource, _) in &cut[..3] {
        let name = resource.replace(['/', '.'], "-");
        let pod = run_on(&api, &name, resource, 1, node).await?;
        let seen = pods::seen(cluster, &pod, "main").await?;
        let held = pods::held_of(cluster, &pod, "main", resource).await?;
        ensure!(
            seen.len() == 1 && seen == held && held == pods::granted_of(&pod, resource)?,
            "{resource}: sees {seen:?}, kubelet says {held:?}"
        );
        all.extend(seen);
        api.delete(&name, &DeleteParams::default()).await?;
    }
    ensure!(all.len() == 3, "three slices are {all:?}; before there was {before:?}");

    // And whole again.
    hardware.controller().uncut(0)?;
    let whole = [("nvidia.com/gpu", 1), ("nvidia.com/mig-3g.20gb", 0), (small, 0)];
    gpus.counts(cluster, node, &whole).await?;
    let pod = run_on(&api, "whole", "nvidia.com/gpu", 1, node).await?;
    let seen = pods::seen(cluster, &pod, "main").await?;
    ensure!(seen.len() == 1 && seen.iter().all(|device| device.starts_with("GPU-")), "{seen:?}");
    Ok(())
}

pub(super) async fn xid_is_reported_everywhere_until_lifted(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let namespace = "e2e-xid";
    let api = bed.namespace(namespace).await?;
    let node = cluster.nodes()[2].name();
    // Not the node's own GPUs, so that nothing of this is left on them, however it ends.
    let machine = gantry::machine_file("a40-8x-bridged");
    let mut hardware = Hardware::install_in(cluster.node(node)?, &machine, "sick")?;
    let uuid = |gpu: usize| {
        let gpu = hardware.machine().gpus().get(gpu);
        gpu.and_then(|gpu| gpu.uuid.as_ref()).map(ToString::to_string)
    };
    let sick = uuid(3).context("it has eight GPUs")?;
    let well = uuid(2).context("it has eight GPUs")?;
    gpus.serve(cluster, node, Some(&hardware), &[], &[("nvidia.com/gpu", 8)]).await?;
    condition(bed, node, "True", "GpusHealthy").await?;
    // An application's Xid changes nothing; the one after it does, so that the first has been seen by then.
    hardware.controller().raise_xid(2, 31)?;
    hardware.controller().raise_xid(3, OFF_THE_BUS)?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 7)]).await?;
    condition(bed, node, "False", "GpuUnhealthy").await?;
    let about = ("Node", node, None);
    views::event(bed, "default", about, "GpuUnhealthy", &[&sick, "Xid 79"]).await?;
    // Not by its plugin's memory alone.
    cluster.node(node)?.restart(gantry::PLUGIN).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 7)]).await?;
    refused(bed, &api, namespace, &chosen("eight", "nvidia.com/gpu", 8, node)?, "7 of 8").await?;
    let seven = run_on(&api, "seven", "nvidia.com/gpu", 7, node).await?;
    let seen = pods::seen(cluster, &seven, "main").await?;
    ensure!(seen.len() == 7 && !seen.contains(&sick), "{sick} is sick: {seen:?}");
    api.delete("seven", &DeleteParams::default()).await?;

    let lift = format!("gantry.dev/lift-quarantine={sick}");
    cluster.kubectl(&["annotate", "gpunode", node, &lift]).await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 8)]).await?;
    condition(bed, node, "True", "GpusHealthy").await?;
    views::event(bed, "default", about, "GpuQuarantineLifted", &[&sick]).await?;
    // The pod that waited for all eight GPUs has them now.
    let eight = pods::running(&api, "eight").await?;
    let seen = pods::seen(cluster, &eight, "main").await?;
    ensure!(seen.len() == 8 && seen.contains(&sick), "{seen:?}");
    // What is known of the boards outlives the plugin and the fault.
    let status = Api::<GpuNode>::all(bed.client()).get(node).await?.status.unwrap_or_default();
    for (gpu, xid) in [(well, 31), (sick, OFF_THE_BUS)] {
        let entry = status.evidence.iter().find(|entry| entry.gpu == gpu);
        let xids = entry.with_context(|| format!("no evidence about GPU {gpu}"))?.xids.as_slice();
        ensure!(matches!(xids, [one] if one.xid == xid && one.count == 1), "{xids:?}");
    }
    Ok(())
}

pub(super) async fn quarantine_survives_plugin_without_api_server(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-xid-away").await?;
    let node = &cluster.nodes()[2];
    let machine = gantry::machine_file("a40-8x-bridged");
    let mut hardware = Hardware::install_in(node, &machine, "sick-away")?;
    let uuids: Vec<String> =
        hardware.machine().gpus().iter().filter_map(|gpu| Some(gpu.uuid.as_ref()?.to_string())).collect();
    gpus.serve(cluster, node.name(), Some(&hardware), &[], &[("nvidia.com/gpu", 8)]).await?;
    hardware.controller().raise_xid(3, OFF_THE_BUS)?;
    gpus.counts(cluster, node.name(), &[("nvidia.com/gpu", 7)]).await?;
    stored(bed, node.name(), &uuids[3..=3]).await?;

    cluster.program("kube-apiserver")?.kill().await?;
    node.restart(gantry::PLUGIN).await?;
    // No better information exists for now, and no pod is scheduled here.
    offers_without_api(node, 8).await?;
    // Only the plugin has recorded this fault.
    hardware.controller().raise_xid(5, OFF_THE_BUS)?;
    offers_without_api(node, 7).await?;

    cluster.start_again("kube-apiserver").await?;
    bed.revive().await?;
    // kubelet asks before the plugin has published anything.
    let eight = chosen("eight", "nvidia.com/gpu", 8, node.name())?;
    api.create(&PostParams::default(), &eight).await?;
    gpus.counts(cluster, node.name(), &[("nvidia.com/gpu", 6)]).await?;
    stored(bed, node.name(), &[uuids[3].clone(), uuids[5].clone()]).await?;
    condition(bed, node.name(), "False", "GpuUnhealthy").await?;
    let six = run_on(&api, "six", "nvidia.com/gpu", 6, node.name()).await?;
    let seen = pods::seen(cluster, &six, "main").await?;
    let is_sick = |gpu: &String| *gpu == uuids[3] || *gpu == uuids[5];
    ensure!(seen.len() == 6 && !seen.iter().any(is_sick), "{seen:?}");
    api.delete("six", &DeleteParams::default()).await?;
    ensure!(pods::node(&api.get("eight").await?).is_empty(), "it got GPUs that are sick");

    let args = ["annotate", "gpunode", node.name(), "gantry.dev/lift-quarantine=all"];
    cluster.kubectl(&args).await?;
    pods::running(&api, "eight").await?;
    stored(bed, node.name(), &[]).await
}

/// Waits until the `GpuNode` reports faults of exactly these GPUs: the next plugin reads them from there.
async fn stored(bed: &Bed, node: &str, gpus: &[String]) -> Result<()> {
    let published: Api<GpuNode> = Api::all(bed.client());
    let wanted: BTreeSet<&String> = gpus.iter().collect();
    until(format!("faults of {wanted:?}"), pods::RUN_LIMIT, async || {
        let object = published.get(node).await.map_err(|error| error.to_string())?;
        let faults = object.status.map(|status| status.faults).unwrap_or_default();
        let of: BTreeSet<&String> = faults.iter().map(|fault| &fault.gpu).collect();
        match of == wanted {
            true => Ok(()),
            false => Err(format!("{of:?}")),
        }
    })
    .await?;
    Ok(())
}

/// Waits until kubelet has so many GPUs to give out.
async fn offers_without_api(node: &gantry_e2e::cluster::Node, count: usize) -> Result<()> {
    let what = format!("{count} GPUs with kubelet");
    until(what, pods::RUN_LIMIT, async || {
        let all = podresources::allocatable(node, GPU_RESOURCE).await;
        match all.map_err(|error| error.to_string())?.len() {
            found if found == count => Ok(()),
            found => Err(format!("{found}")),
        }
    })
    .await?;
    Ok(())
}

/// Waits until the Node's condition `GPUHealthy` is so, with these words.
async fn condition(bed: &Bed, node: &str, status: &str, reason: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(bed.client());
    let is_so =
        |condition: &NodeCondition| condition.status == status && condition.reason.as_deref() == Some(reason);
    until(format!("GPUHealthy {status} of {node} with {reason}"), pods::RUN_LIMIT, async || {
        let object = nodes.get(node).await.map_err(|error| error.to_string())?;
        let all = object.status.and_then(|status| status.conditions);
        let found = all.into_iter().flatten().find(|one| one.type_ == "GPUHealthy");
        match found {
            Some(condition) if is_so(&condition) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    Ok(())
}
