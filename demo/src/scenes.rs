//! The scenes of the demo, in order. Each announces its action, performs it and checks the result.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Context;
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{Gang, GangPhase, GangStatus};
use gantry_map::{GpuMap, NodeMap};
use gantry_topology::{GpuSet, Purpose};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams};
use kube::core::Request;
use kube::core::params::ListParams;
use serde_json::Value;

use crate::scene::{DemoPod, RunningPod, Scene};
use crate::screen::Style;
use crate::view::grant;

/// Plays all scenes.
pub(crate) async fn all(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    sizes(scene).await?;
    too_large(scene).await?;
    bypass(scene).await?;
    unhealthy_gpu(scene).await?;
    force_delete(scene).await?;
    gang_scene(scene).await
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
    let free = view.node(&name).map(NodeMap::free).unwrap_or_default();
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
    let rest = scene.cluster.view().await?.node(&node).map(NodeMap::free).unwrap_or_default();
    let quad = scene.cluster.pods().get("quad").await.context("reading pod quad")?;
    let at_once = DeleteParams::default().grace_period(0);
    scene.cluster.pods().delete("quad", &at_once).await.context("deleting pod quad")?;
    let cluster = scene.cluster;
    let quarantined = cluster.wait(async || {
        let view = cluster.view().await?;
        let kept = view.node(&node).map(|seen| seen.set(GpuMap::is_leaving));
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
        let kept = view.node(&node).map(|seen| seen.set(GpuMap::is_leaving));
        Ok((kept == Some(GpuSet::EMPTY)).then_some(view))
    });
    let before = freed.await?;
    scene.check(before.is_some(), "and its GPUs are free again");
    if let Some(before) = before {
        scene.follow(&patient, &before).await?;
    }
    scene.draw().await
}

/// Members of each gang; the minimum is the same.
const MEMBERS: usize = 4;

/// A gang of identical pods.
struct DemoGang {
    name: &'static str,
    /// GPUs of each member.
    gpus: usize,
}

impl DemoGang {
    fn pod_names(&self) -> impl Iterator<Item = String> + use<> {
        let name = self.name;
        (0..MEMBERS).map(move |number| format!("{name}-{number}"))
    }

    fn pods(&self) -> Vec<DemoPod> {
        self.pod_names()
            .map(|name| DemoPod {
                name,
                gpus: self.gpus,
                gang: Some((self.name.to_owned(), MEMBERS)),
                ..DemoPod::default()
            })
            .collect()
    }

    fn request(&self) -> String {
        format!("{MEMBERS} pods of {} GPUs", self.gpus)
    }
}

/// Plays the scene.
/// One gang is bound as a whole at once; a second one waits without holding GPUs, and is bound as a whole once they are
/// free. The members pass the scheduler one by one and wait for each other in the extender's bind.
async fn gang_scene(scene: &mut Scene<'_>) -> anyhow::Result<()> {
    scene.screen.heading("6. Gangs: all of a job, or none of it");
    let intro = "whole and patient end. Two jobs request their GPUs; each job is useful only as a whole (gantry.dev/gang, gantry.dev/gang-min). \
                 The extender binds the first job once all members have arrived. The second job holds no GPU while it waits.";
    scene.screen.paragraph("", Style::FAINT, intro);
    end(scene, ["whole", "patient"].map(str::to_owned)).await?;
    let (train, tune) = (DemoGang { name: "train", gpus: 2 }, DemoGang { name: "tune", gpus: 3 });

    for gang in [&train, &tune] {
        scene.screen.line(format!("  {}: {}, all or none", gang.name, gang.request()));
    }
    start(scene, &train).await?;
    together(scene, &train).await?;
    start(scene, &tune).await?;
    holds_nothing(scene, &tune).await?;
    table(scene).await?;
    scene.draw().await?;

    scene.screen.line("  train ends; tune is left alone");
    end(scene, train.pod_names()).await?;
    together(scene, &tune).await?;
    table(scene).await?;
    scene.draw().await
}

/// Submits all members at once.
async fn start(scene: &Scene<'_>, gang: &DemoGang) -> anyhow::Result<()> {
    let pods = gang.pods();
    let submitted = futures::future::join_all(pods.iter().map(|pod| scene.submit(pod))).await;
    submitted.into_iter().collect::<anyhow::Result<Vec<_>>>().map(drop)
}

/// Checks that all members run, each with exactly its grant, as one decision placed them.
async fn together(scene: &mut Scene<'_>, gang: &DemoGang) -> anyhow::Result<()> {
    let mut placed: Vec<RunningPod> = Vec::new();
    for name in gang.pod_names() {
        match scene.running(&name).await? {
            Some(member) => placed.push(member),
            None => return Ok(()),
        }
    }
    let mut taken = BTreeSet::new();
    let mut exact = true;
    for member in &placed {
        let seen = scene.visible(&member.pod, &member.node);
        let granted: BTreeSet<String> = grant(&member.pod)
            .map(|grant| grant.held(GPU_RESOURCE).iter().map(ToString::to_string).collect())
            .unwrap_or_default();
        exact &= seen == granted && seen.len() == gang.gpus;
        taken.extend(seen);
    }
    let nodes: BTreeSet<&str> = placed.iter().map(|member| member.node.as_str()).collect();
    let nodes: Vec<&str> = nodes.into_iter().collect();
    scene.check(
        exact && taken.len() == MEMBERS * gang.gpus,
        &format!(
            "all {MEMBERS} of {} run on {}; each sees exactly its grant, and no two see the same GPU",
            gang.name,
            nodes.join(" and ")
        ),
    );
    let status = status(scene, gang.name, |status| status.phase == GangPhase::Bound).await?;
    let decided = status.as_ref().and_then(|status| status.decision.as_ref());
    let as_decided = decided.is_some_and(|decision| {
        placed.iter().all(|member| {
            let mut slots = decision.reservations.iter();
            slots.any(|slot| slot.pod_name == member.name && slot.node.as_str() == member.node)
        })
    });
    scene.check(
        as_decided,
        &format!(
            "on the nodes in the status of Gang {}: the decision was written before the first was bound",
            gang.name
        ),
    );
    scene.placed.extend(placed);
    Ok(())
}

/// Checks that a gang waits as a whole, and that its user can read why.
async fn holds_nothing(scene: &mut Scene<'_>, gang: &DemoGang) -> anyhow::Result<()> {
    let waiting =
        status(scene, gang.name, |status| status.phase == GangPhase::Queued && !status.message.is_empty())
            .await?;
    let Some(waiting) = waiting else {
        scene.check(false, &format!("Gang {} reports that it waits for GPUs", gang.name));
        return Ok(());
    };
    let view = scene.cluster.view().await?;
    let pods: Vec<String> = gang.pod_names().collect();
    let holds =
        view.nodes.iter().flat_map(|node| &node.gpus).any(|gpu| pods.iter().any(|pod| gpu.is_held_by(pod)));
    let mut bound = false;
    for name in &pods {
        let pod = scene.cluster.pods().get(name).await;
        let pod = pod.with_context(|| format!("reading pod {name}"))?;
        bound |= pod.spec.is_some_and(|spec| spec.node_name.is_some());
    }
    let free: usize = view.nodes.iter().map(|node| node.free().len()).sum();
    scene.check(
        !holds && !bound,
        &format!("{} waits and holds nothing; {free} GPUs are free for others", gang.name),
    );
    let cluster = scene.cluster;
    let words = cluster.wait(async || {
        let words = scene.words(&pods[0]).await?;
        Ok((!words.is_empty()).then_some(()))
    });
    let words = words.await?;
    scene.check(words.is_some(), "the Gang and each pod report why:");
    scene.screen.paragraph("     ", Style::WARN, &waiting.message);
    Ok(())
}

/// The status of a gang once it satisfies a condition; `None` after the timeout.
async fn status(
    scene: &Scene<'_>,
    name: &str,
    matches: impl Fn(&GangStatus) -> bool,
) -> anyhow::Result<Option<GangStatus>> {
    let gangs: Api<Gang> = Api::namespaced(scene.cluster.client.clone(), "default");
    let cluster = scene.cluster;
    let found = cluster.wait(async || {
        let gang = gangs.get_opt(name).await;
        let gang = gang.with_context(|| format!("reading Gang {name}"))?;
        Ok(gang.and_then(|gang| gang.status).filter(|status| matches(status)))
    });
    found.await
}

/// Deletes finished pods, and waits until the pods are gone and their GPUs are free.
async fn end(scene: &Scene<'_>, names: impl IntoIterator<Item = String>) -> anyhow::Result<()> {
    let names: Vec<String> = names.into_iter().collect();
    let pods = scene.cluster.pods();
    for name in &names {
        let deleted = pods.delete(name, &DeleteParams::default()).await;
        deleted.with_context(|| format!("deleting pod {name}"))?;
    }
    let cluster = scene.cluster;
    let gone = cluster.wait(async || {
        let left = pods.list(&ListParams::default()).await.context("listing pods")?;
        let left = left.items.iter().any(|pod| names.contains(&pod.name_any()));
        let view = cluster.view().await?;
        let mut held = view.nodes.iter().flat_map(|node| &node.gpus).flat_map(|gpu| &gpu.pods);
        // kubelet's report of a deleted pod has no name.
        let holds = held.any(|pod| pod.name.is_empty() || names.contains(&pod.name));
        Ok((!left && !holds && cluster.extender_agrees(&view).await).then_some(()))
    });
    gone.await?.with_context(|| format!("{} do not end", names.join(", ")))
}

/// Prints the output of `kubectl get gangs`.
async fn table(scene: &Scene<'_>) -> anyhow::Result<()> {
    let path = "/apis/gantry.dev/v1alpha1/namespaces/default/gangs";
    let mut request = Request::new(path).list(&ListParams::default())?;
    let form = "application/json;as=Table;v=v1;g=meta.k8s.io".parse()?;
    request.headers_mut().insert("accept", form);
    let table: Value = scene.cluster.client.request(request).await.context("listing Gangs")?;
    scene.screen.line("  $ kubectl get gangs");
    for line in lines(&table) {
        let cut: String = line.chars().take(scene.screen.columns.saturating_sub(2)).collect();
        scene.screen.line(format!("  {}", scene.screen.styled(Style::STRONG, cut.trim_end())));
    }
    Ok(())
}

/// Lays out a server-side table as kubectl does.
fn lines(table: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let columns = list(&table["columnDefinitions"]);
    let shown: Vec<usize> = (0..columns.len()).filter(|at| columns[*at]["priority"] == 0).collect();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let head = shown.iter().map(|at| text(&columns[*at]["name"]).to_uppercase()).collect();
    let mut rows: Vec<Vec<String>> = vec![head];
    for row in list(&table["rows"]) {
        rows.push(shown.iter().map(|at| text(&row["cells"][*at])).collect());
    }
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..shown.len()).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("   ").trim_end().to_owned()
        })
        .collect()
}
#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn table_is_laid_out_as_by_kubectl() {
        let table = json!({
            "columnDefinitions": [
                {"name": "Name", "priority": 0}, {"name": "Min", "priority": 0}, {"name": "Decided by", "priority": 1},
                {"name": "Reason", "priority": 0},
            ],
            "rows": [{"cells": ["train", 4, "x", "is bound"]}, {"cells": ["a", 12, "y", ""]}],
        });
        insta::assert_snapshot!(lines(&table).join("\n"), @r"
        NAME    MIN   REASON
        train   4     is bound
        a       12
        ");
    }
}
