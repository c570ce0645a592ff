//! The scenes of the demo, in order. Each announces its action, performs it and checks the result.

use std::time::Instant;

use anyhow::Context;
use gantry_topology::{GpuSet, Purpose};
use kube::ResourceExt;
use kube::api::DeleteParams;

use crate::gangs;
use crate::scene::{DemoPod, RunningPod, Scene};
use crate::screen::Style;
use crate::view::{Hold, NodeView};

/// Plays all scenes.
pub(crate) async fn all(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    sizes(scene).await?;
    too_large(scene).await?;
    bypass(scene).await?;
    unhealthy_gpu(scene).await?;
    force_delete(scene).await?;
    gangs::play(scene).await
}

fn pod(name: &str, gpus: usize) -> DemoPod {
    DemoPod { name: name.to_owned(), gpus, ..DemoPod::default() }
}

async fn sizes(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.screen.heading("1. Pods of 8, 4, 2 and 1 GPUs");
    let intro = "Each is placed on the best-connected free GPUs of the cluster, and splits as few large groups of GPUs as possible.";
    scene.screen.paragraph("", Style::FAINT, intro);
    for pod in [pod("whole", 8), quad(), pod("pair", 2), pod("single", 1)] {
        scene.place(&pod).await?;
    }
    scene.draw().await
}

/// Four GPUs for processes that outlive their pod; see the last scene but one.
fn quad() -> DemoPod {
    DemoPod { outlive: Some("3600s".to_owned()), ..pod("quad", 4) }
}

async fn too_large(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.screen.heading("2. A pod of 16 GPUs, which no node has");
    scene.submit(&pod("giant", 16)).await?;
    scene.waits("giant").await?;
    let deleted = scene.cluster.pods().delete("giant", &DeleteParams::default()).await;
    deleted.context("deleting pod giant").map(drop)
}

async fn bypass(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    let node = scene.freest_node().await?;
    scene.screen.heading(&format!("3. A pod that bypasses the scheduler (nodeName: {node})"));
    let intro = "It has no grant. kubelet picks its devices; the plugin steers kubelet away from granted GPUs and publishes what the pod got, \
                 so that the extender counts it.";
    scene.screen.paragraph("", Style::FAINT, intro);
    let pod = DemoPod { bypass: Some(node), ..pod("bypass", 2) };
    scene.place(&pod).await?;
    scene.draw().await
}

async fn unhealthy_gpu(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.screen.heading("4. A GPU falls off the bus (Xid 79) just before it would be allocated");
    let name = scene.freest_node().await?;
    let Some(node) = scene.cluster.nodes.get(&name) else {
        return Ok(());
    };
    let view = scene.cluster.view().await?;
    let free = view.node(&name).map(NodeView::free).unwrap_or_default();
    let next = node.table.best(free, 2, Purpose::Local).map(|choice| choice.gpus).unwrap_or_default();
    let Some(unhealthy) = next.lowest() else {
        scene.check(false, &format!("{name} has two free GPUs for this scene"));
        return Ok(());
    };
    scene.screen.line(format!("  a pod of 2 would now get GPUs {next} of {name}; Xid 79 on GPU {unhealthy}"));
    let start = Instant::now();
    let index = u8::try_from(unhealthy).context("GPU index")?;
    node.control.raise_xid(index, 79).context("raising an Xid")?;
    let cluster = scene.cluster;
    let reason = cluster.wait(async || {
        let view = cluster.view().await?;
        let gpu = view.node(&name).and_then(|seen| seen.gpus.get(unhealthy).cloned());
        Ok(gpu.and_then(|gpu| gpu.unhealthy))
    });
    let reason = reason.await?;
    let millis = start.elapsed().as_millis();
    let text = reason.as_deref().unwrap_or("it does not");
    scene.check(
        reason.is_some(),
        &format!("GpuNode {name} calls GPU {unhealthy} unhealthy ({millis} ms later): {text}"),
    );
    let pod = DemoPod { only_on: Some(name), ..pod("careful", 2) };
    if let Some(RunningPod { gpus, .. }) = scene.place(&pod).await? {
        scene.check(!gpus.contains(unhealthy), &format!("careful got GPUs {gpus}, without GPU {unhealthy}"));
    }
    scene.draw().await
}

async fn force_delete(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.screen.heading("5. A pod is force-deleted while its processes live on");
    let intro = "kubelet frees the devices of such a pod at once, and would give them to the next pod. Gantry withholds them until the \
                 processes are gone.";
    scene.screen.paragraph("", Style::FAINT, intro);
    let Some((node, gpus)) = scene
        .placed
        .iter()
        .find(|placed| placed.name == "quad")
        .map(|placed| (placed.node.clone(), placed.gpus))
    else {
        scene.check(false, "quad runs");
        return Ok(());
    };
    let rest = scene.cluster.view().await?.node(&node).map(NodeView::free).unwrap_or_default();
    let quad = scene.cluster.pods().get("quad").await.context("reading pod quad")?;
    let at_once = DeleteParams::default().grace_period(0);
    scene.cluster.pods().delete("quad", &at_once).await.context("deleting pod quad")?;
    let cluster = scene.cluster;
    let quarantined = cluster.wait(async || {
        let view = cluster.view().await?;
        let kept = view.node(&node).map(|seen| seen.set(|gpu| gpu.hold == Hold::Quarantined));
        Ok((kept == Some(gpus)).then_some(()))
    });
    let quarantined = quarantined.await?.is_some();
    scene.check(quarantined, &format!("GpuNode {node} withholds GPUs {gpus}"));
    scene.draw().await?;

    let patient = DemoPod { only_on: Some(node.clone()), ..pod("patient", rest.len() + gpus.len()) };
    scene.screen.line(format!("  patient asks for {} GPUs of {node}, {gpus} among them", patient.gpus));
    scene.submit(&patient).await?;
    scene.waits("patient").await?;
    scene.screen.line("  quad's processes end now");
    if let Some(host) = cluster.nodes.get(&node) {
        host.kubelet.kill(&quad.uid().unwrap_or_default());
    }
    let freed = cluster.wait(async || {
        let view = cluster.view().await?;
        let kept = view.node(&node).map(|seen| seen.set(|gpu| gpu.hold == Hold::Quarantined));
        Ok((kept == Some(GpuSet::EMPTY)).then_some(view))
    });
    let before = freed.await?;
    scene.check(before.is_some(), "and its GPUs are free again");
    if let Some(before) = before {
        scene.follow(&patient, &before).await?;
    }
    scene.draw().await
}
