//! Nodes that are away and whose Node objects stay: the plugin is stopped, kubelet is down, or the network is cut. What
//! gangs have reserved there is reserved elsewhere, and members that run there are lost.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_api::{GangPhase, GangStatus, Reason};
use gantry_e2e::gantry::PLUGIN;
use gantry_e2e::{Node, until};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod, Toleration};
use kube::Api;

use super::churn::nothing_is_left;
use super::gangs_failures::Movable;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::views::{self, gpu_node, probe, ready_is, reports};
use crate::{pods, records};

/// Reservations stay for 30 s on a node whose plugin is away, less what passes before a scenario takes the time.
const KEPT: Duration = Duration::from_secs(28);

/// kube-scheduler offers no node whose plugin is stopped: a gang whose members come to it is planned elsewhere within
/// seconds. A reservation that is kept for the next member stays, as for a rollout of the plugin, and moves later.
pub(super) async fn reservations_leave_node_of_stopped_plugin(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-plugin-away").await?;
    let movable = Movable::reserve(&scene).await?;
    without_plugin(bed, &movable.from, async || {
        movable.moves().await?;
        movable.runs().await
    })
    .await?;
    scene.disband(&movable.crew).await?;

    let crew = Crew::new("kept", 2, 4);
    scene.create(&crew).await?;
    let stays = scene.runs(&crew).await?;
    let lost = stays.first().context("a member")?;
    let number = crew.pod_names().iter().position(|name| *name == lost.pod).context("a member")?;
    scene.delete(&lost.pod).await?;
    scene.phase(&crew.name, GangPhase::Degraded).await?;
    let left: Vec<&str> = stays[1..].iter().map(|stay| stay.node.as_str()).collect();
    let on_it = left.iter().filter(|node| **node == lost.node).count();
    without_plugin(bed, &lost.node, async || {
        let start = Instant::now();
        let moved = |status: &GangStatus| {
            let reserved = status.decision.iter().flat_map(|decision| &decision.reservations);
            reserved.filter(|slot| slot.node.to_string() == lost.node).count() == on_it
        };
        scene.status_where(&crew.name, "reserves nothing on the node", moved).await?;
        ensure!(start.elapsed() >= KEPT, "it moved after {:?}", start.elapsed());
        records::forget(bed.cluster(), lost);
        scene.create_all([crew.pod(number)?]).await?;
        for stay in scene.runs(&crew).await? {
            ensure!(
                stay.pod != lost.pod || stay.node != lost.node,
                "{stay:?} is on the node without a plugin"
            );
        }
        Ok(())
    })
    .await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// Plays a story while a node's plugin is stopped.
async fn without_plugin(bed: &Bed, node: &str, story: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let node = bed.cluster().node(node)?;
    node.program(PLUGIN)?.stop().await?;
    let outcome = async {
        gpu_node(bed, node.name(), "stopped", ready_is(Reason::Stopped)).await?;
        story().await
    }
    .await;
    node.sandbox().run_again(PLUGIN).await?;
    outcome?;
    gpu_node(bed, node.name(), "serves", ready_is(Reason::Serving)).await?;
    Ok(())
}

/// Containers run on without kubelet.
pub(super) async fn kubelet_away_moves_reservations_only(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-kubelet-away").await?;
    let movable = Movable::reserve(&scene).await?;
    let node = bed.cluster().node(&movable.from)?;
    scene.create_all([records::stubborn(pods::pinned("runs-on", 0, node.name())?)?]).await?;
    pods::running(&scene.pods, "runs-on").await?;
    let written = || records::written(bed.cluster(), node.name(), "runs-on");
    node.program("kubelet")?.kill().await?;
    let killed = Instant::now();
    let outcome = async {
        gpu_node(bed, node.name(), "not registered", ready_is(Reason::NotRegistered)).await?;
        movable.moves().await?;
        ensure!(killed.elapsed() >= KEPT, "they moved after {:?}", killed.elapsed());
        movable.runs().await?;
        ready(bed, node, false).await?;
        let before = written()?;
        until("the container runs on", GANG_LIMIT, async || match written() {
            Ok(now) if now > before => Ok(()),
            other => Err(format!("{other:?} bytes")),
        })
        .await?;
        anyhow::Ok(())
    }
    .await;
    node.sandbox().run_again("kubelet").await?;
    outcome?;
    ready(bed, node, true).await?;
    gpu_node(bed, node.name(), "serves", ready_is(Reason::Serving)).await?;
    scene.delete("runs-on").await?;
    scene.disband(&movable.crew).await?;
    nothing_is_left(bed).await
}

/// A node that is cut off: its member is lost once Kubernetes deletes the pod, and ends when the network is back.
pub(super) async fn node_cut_off_loses_its_member(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-cut-off").await?;
    let crew = Crew::new("cut", 2, 8);
    // 300 s by default.
    let impatient = |number| -> Result<Pod> {
        let mut pod = crew.pod(number)?;
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        let of = |key: &str| Toleration {
            key: Some(key.to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some("NoExecute".to_owned()),
            toleration_seconds: Some(2),
            ..Toleration::default()
        };
        let keys = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
        spec.tolerations.get_or_insert_default().extend(keys.map(of));
        Ok(pod)
    };
    scene.create_all([impatient(0)?, impatient(1)?]).await?;
    let stays = scene.runs(&crew).await?;
    let lost = stays.first().context("a member")?;
    let node = bed.cluster().node(&lost.node)?;
    let (place, reachable) = (node.sandbox(), "gantry_plugin_reachable{peer=\"apiserver\"}");
    link(bed, node, "down").await?;
    let cut = Instant::now();
    let outcome = async {
        let degraded = "degraded: the API server does not respond";
        probe(place, 9410, "/readyz", 200, degraded).await?;
        ensure!(cut.elapsed() < Duration::from_secs(60), "the plugin noticed after {:?}", cut.elapsed());
        reports(place, 9410, &format!("{reachable} 0")).await?;
        ready(bed, node, false).await?;
        scene.phase(&crew.name, GangPhase::Degraded).await?;
        let about = ("Gang", crew.name.as_str(), None);
        views::event(bed, &scene.namespace, about, "MemberLost", &["1 of 2 members is missing"]).await?;
        // Its node cannot confirm the end.
        let pod = scene.pods.get(&lost.pod).await?;
        ensure!(pod.metadata.deletion_timestamp.is_some(), "{}", pods::said(&pod));
        let other = stays.iter().find(|stay| stay.node != lost.node).context("a member on another node")?;
        ensure!(pods::phase(&scene.pods.get(&other.pod).await?) == "Running", "{} is disturbed", other.pod);
        anyhow::Ok(())
    }
    .await;
    link(bed, node, "up").await?;
    outcome?;
    reports(place, 9410, &format!("{reachable} 1")).await?;
    ready(bed, node, true).await?;
    super::gangs_preempt::is_gone(&scene, &lost.pod).await?;
    records::forget(bed.cluster(), lost);
    let number = crew.pod_names().iter().position(|name| *name == lost.pod).context("a member")?;
    scene.create_all([impatient(number)?]).await?;
    scene.runs(&crew).await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// Cuts a node off, or ends that.
async fn link(bed: &Bed, node: &Node, state: &str) -> Result<()> {
    bed.cluster().control().exec(&["ip", "link", "set", node.name(), state]).await?;
    Ok(())
}

/// Waits until Kubernetes calls a node ready, or not.
async fn ready(bed: &Bed, node: &Node, wanted: bool) -> Result<()> {
    let nodes: Api<NodeObject> = Api::all(bed.client());
    let found = until(format!("{} ready: {wanted}", node.name()), GANG_LIMIT, async || {
        let object = nodes.get(node.name()).await.map_err(|error| error.to_string())?;
        let conditions = object.status.and_then(|status| status.conditions).unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
        match ready.is_some_and(|condition| condition.status == "True") == wanted {
            true => Ok(()),
            false => Err(format!("{ready:?}")),
        }
    });
    Ok(found.await?)
}
