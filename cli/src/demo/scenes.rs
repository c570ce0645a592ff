//! The scenes of the demo, in order. Each tells what is about to happen, lets it happen, and checks it.

use std::time::Instant;

use anyhow::Context;
use gantry_topology::{GpuSet, Purpose};
use kube::ResourceExt;
use kube::api::DeleteParams;

use super::gangs;
use super::play::{Actor, Placed, Play};
use super::screen::Look;
use super::sight::{Hold, NodeSight};

/// Plays all scenes.
pub(super) async fn all(play: &mut Play<'_>) -> anyhow::Result<()> {
    sizes(play).await?;
    too_large(play).await?;
    bypass(play).await?;
    sick_gpu(play).await?;
    force_delete(play).await?;
    gangs::play(play).await
}

fn actor(name: &str, gpus: usize) -> Actor {
    Actor {
        name: name.to_owned(),
        gpus,
        ..Actor::default()
    }
}

async fn sizes(play: &mut Play<'_>) -> anyhow::Result<()> {
    play.screen.heading("1. Pods of 8, 4, 2 and 1 GPUs");
    let intro =
        "Each lands where it finds the best-connected GPUs of the cluster, and breaks as little as can be.";
    play.screen.paragraph("", Look::FAINT, intro);
    for actor in [actor("whole", 8), quad(), actor("pair", 2), actor("single", 1)] {
        play.place(&actor).await?;
    }
    play.draw().await
}

/// Four GPUs for processes that do not die until told; see the last scene.
fn quad() -> Actor {
    Actor {
        outlive: Some("3600s".to_owned()),
        ..actor("quad", 4)
    }
}

async fn too_large(play: &mut Play<'_>) -> anyhow::Result<()> {
    play.screen.heading("2. A pod of 16 GPUs, which no node has");
    play.submit(&actor("giant", 16)).await?;
    play.waits("giant").await?;
    let deleted = play.stage.pods().delete("giant", &DeleteParams::default()).await;
    deleted.context("deleting pod giant").map(drop)
}

async fn bypass(play: &mut Play<'_>) -> anyhow::Result<()> {
    let node = play.roomiest().await?;
    play.screen.heading(&format!(
        "3. A pod that bypasses the scheduler (nodeName: {node})"
    ));
    let intro = "Nobody granted it anything. Kubelet takes devices at random unless told otherwise; the plugin keeps it off the GPUs \
                 of others and publishes what it got, so that the extender counts it.";
    play.screen.paragraph("", Look::FAINT, intro);
    let actor = Actor {
        bypass: Some(node),
        ..actor("bypass", 2)
    };
    play.place(&actor).await?;
    play.draw().await
}

async fn sick_gpu(play: &mut Play<'_>) -> anyhow::Result<()> {
    play.screen
        .heading("4. A GPU falls off the bus (Xid 79) just before it would be given out");
    let name = play.roomiest().await?;
    let Some(node) = play.stage.nodes.get(&name) else {
        return Ok(());
    };
    let sight = play.stage.sight().await?;
    let free = sight.node(&name).map(NodeSight::free).unwrap_or_default();
    let next = node
        .table
        .best(free, 2, Purpose::Local)
        .map(|choice| choice.gpus)
        .unwrap_or_default();
    let Some(sick) = next.lowest() else {
        play.check(false, &format!("{name} has two free GPUs for this scene"));
        return Ok(());
    };
    play.screen.line(format!(
        "  a pod of 2 would now get GPUs {next} of {name}; Xid 79 on GPU {sick}"
    ));
    let start = Instant::now();
    let index = u8::try_from(sick).context("GPU index")?;
    node.control.raise_xid(index, 79).context("raising an Xid")?;
    let stage = play.stage;
    let reason = stage.wait(async || {
        let sight = stage.sight().await?;
        let gpu = sight.node(&name).and_then(|seen| seen.gpus.get(sick).cloned());
        Ok(gpu.and_then(|gpu| gpu.sick))
    });
    let reason = reason.await?;
    let millis = start.elapsed().as_millis();
    let told = reason.as_deref().unwrap_or("it does not");
    play.check(
        reason.is_some(),
        &format!("GpuNode {name} calls GPU {sick} unhealthy ({millis} ms later): {told}"),
    );
    let actor = Actor {
        only_on: Some(name),
        ..actor("careful", 2)
    };
    if let Some(Placed { gpus, .. }) = play.place(&actor).await? {
        play.check(
            !gpus.contains(sick),
            &format!("careful got GPUs {gpus}, without GPU {sick}"),
        );
    }
    play.draw().await
}

async fn force_delete(play: &mut Play<'_>) -> anyhow::Result<()> {
    play.screen
        .heading("5. A pod is force-deleted while its processes live on");
    let intro = "Kubelet frees such a pod's devices at once, and would give them to the next pod. Gantry keeps them back until the \
                 processes are gone.";
    play.screen.paragraph("", Look::FAINT, intro);
    let Some((node, gpus)) = play
        .placed
        .iter()
        .find(|placed| placed.name == "quad")
        .map(|placed| (placed.node.clone(), placed.gpus))
    else {
        play.check(false, "quad runs");
        return Ok(());
    };
    let rest = play
        .stage
        .sight()
        .await?
        .node(&node)
        .map(NodeSight::free)
        .unwrap_or_default();
    let quad = play.stage.pods().get("quad").await.context("reading pod quad")?;
    let at_once = DeleteParams::default().grace_period(0);
    play.stage
        .pods()
        .delete("quad", &at_once)
        .await
        .context("deleting pod quad")?;
    let stage = play.stage;
    let quarantined = stage.wait(async || {
        let sight = stage.sight().await?;
        let kept = sight
            .node(&node)
            .map(|seen| seen.set(|gpu| gpu.hold == Hold::Quarantined));
        Ok((kept == Some(gpus)).then_some(()))
    });
    let quarantined = quarantined.await?.is_some();
    play.check(quarantined, &format!("GpuNode {node} keeps GPUs {gpus} back"));
    play.draw().await?;

    let patient = Actor {
        only_on: Some(node.clone()),
        ..actor("patient", rest.len() + gpus.len())
    };
    play.screen.line(format!(
        "  patient asks for {} GPUs of {node}, {gpus} among them",
        patient.gpus
    ));
    play.submit(&patient).await?;
    play.waits("patient").await?;
    play.screen.line("  quad's processes end now");
    if let Some(host) = stage.nodes.get(&node) {
        host.kubelet.kill(&quad.uid().unwrap_or_default());
    }
    let freed = stage.wait(async || {
        let sight = stage.sight().await?;
        let kept = sight
            .node(&node)
            .map(|seen| seen.set(|gpu| gpu.hold == Hold::Quarantined));
        Ok((kept == Some(GpuSet::EMPTY)).then_some(sight))
    });
    let before = freed.await?;
    play.check(before.is_some(), "and its GPUs are free again");
    if let Some(before) = before {
        play.follow(&patient, &before).await?;
    }
    play.draw().await
}
