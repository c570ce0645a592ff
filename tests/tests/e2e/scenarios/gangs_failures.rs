//! What dies under gangs: the extender, kube-scheduler, kubelet, a node. Gangs are in every state meanwhile, and
//! afterwards none is bound in part, none is bound twice, and all that can run do.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_api::GangPhase;
use gantry_api::names::GANG_ARRIVAL_ANNOTATION;
use gantry_e2e::gantry::{EXTENDER, PLUGIN};
use gantry_e2e::service::{self, SERVICE};
use gantry_e2e::{gantry, until};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::DeleteParams;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief};
use crate::records::Stay;
use crate::{pods, records};

/// kubelet's checkpoint of devices and their holders.
const NOTES: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

/// One gang in each state that lasts: bound, on its way with one member kept out, without room, without a member.
struct Gangs {
    bound: Crew,
    gathered: Crew,
    queued: Crew,
    incomplete: Crew,
}

impl Gangs {
    async fn form(scene: &Scene<'_>) -> Result<Self> {
        // Long enough to arrive that nothing but what is tested ends the wait.
        let patient = |crew: Crew| crew.with(GANG_ARRIVAL_ANNOTATION, "300");
        let gangs = Self {
            bound: Crew::new("bound", 3, 2),
            gathered: patient(Crew::new("gathered", 3, 2)),
            queued: Crew::new("queued", 6, 2),
            incomplete: Crew::new("incomplete", 3, 1),
        };
        scene.create(&gangs.bound).await?;
        scene.runs(&gangs.bound).await?;
        let gathered = &gangs.gathered;
        scene.create_all([gathered.pod(0)?, gathered.pod(1)?, gathered.pod_kept_out(2)?]).await?;
        scene.phase("gathered", GangPhase::Reserved).await?;
        scene.create(&gangs.queued).await?;
        scene.phase("queued", GangPhase::Queued).await?;
        let incomplete = &gangs.incomplete;
        scene.create_all([incomplete.pod(0)?, incomplete.pod(1)?]).await?;
        scene.phase("incomplete", GangPhase::Pending).await?;
        Ok(gangs)
    }

    /// All are again, or still, what they were.
    async fn stand(&self, scene: &Scene<'_>) -> Result<()> {
        scene.runs(&self.bound).await?;
        scene
            .status_where("gathered", "on its way, not bound", |status| {
                status.phase == GangPhase::Reserved && status.bound == 0
            })
            .await?;
        scene.phase("queued", GangPhase::Queued).await?;
        scene.phase("incomplete", GangPhase::Pending).await?;
        for crew in [&self.gathered, &self.queued, &self.incomplete] {
            scene.holds_nothing(crew).await?;
        }
        Ok(())
    }

    /// Lets all of them run, one after the other, and go.
    async fn end(&self, scene: &Scene<'_>) -> Result<()> {
        scene.let_in().await?;
        let ran = scene.runs(&self.gathered).await;
        scene.close().await?;
        ran?;
        scene.create_all([self.incomplete.pod(2)?]).await?;
        scene.disband(&self.bound).await?;
        scene.disband(&self.gathered).await?;
        scene.runs(&self.queued).await?;
        scene.runs(&self.incomplete).await?;
        for (crew, min) in [(&self.queued, 6), (&self.incomplete, 3)] {
            scene.is_whole(crew, min).await?;
            scene.disband(crew).await?;
        }
        records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)?;
        nothing_is_left(scene.bed).await
    }
}

pub(super) async fn extender_and_scheduler_killed_in_all_phases(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-kill").await?;
    let gangs = Gangs::form(&scene).await?;
    let control = bed.cluster().control();
    control.daemon(EXTENDER)?.kill().await?;
    control.run_again(EXTENDER).await?;
    gangs.stand(&scene).await?;
    control.daemon("kube-scheduler")?.kill().await?;
    control.run_again("kube-scheduler").await?;
    gangs.stand(&scene).await?;
    gangs.end(&scene).await
}

pub(super) async fn kubelets_killed_in_all_phases(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-kubelets").await?;
    let gangs = Gangs::form(&scene).await?;
    kill_kubelets(&scene).await?;
    gangs.stand(&scene).await?;
    gangs.end(&scene).await
}

/// Kills every kubelet, and waits until each has taken up the pods that it had: it admits those before any that come.
pub(super) async fn kill_kubelets(scene: &Scene<'_>) -> Result<()> {
    let cluster = scene.bed.cluster();
    for node in cluster.nodes() {
        node.program("kubelet")?.kill().await?;
        node.sandbox().run_again("kubelet").await?;
    }
    cluster.wait_until_ready().await?;
    scene.bed.gpus().await?.wait_until_ready(cluster).await?;
    let names: Vec<&str> = cluster.nodes().iter().map(|node| node.name()).collect();
    let comes = |node: &&str| pods::pinned(&format!("comes-{node}"), 0, node);
    scene.create_all(names.iter().map(comes).collect::<Result<Vec<_>>>()?).await?;
    for node in names {
        pods::running(&scene.pods, &format!("comes-{node}")).await?;
    }
    Ok(())
}

pub(super) async fn extender_killed_while_binding(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-commit").await?;
    let control = bed.cluster().control();
    // At once, and later: before the plan, at the barrier, between the decision and the last Binding, as it comes.
    for (round, after) in [0, 30, 60, 100, 180].into_iter().enumerate() {
        let crew = Crew::new(&format!("round{round}"), 5, 4).lasting(0.2);
        scene.create(&crew).await?;
        tokio::time::sleep(Duration::from_millis(after)).await;
        control.daemon(EXTENDER)?.kill().await?;
        control.run_again(EXTENDER).await?;
        for name in crew.pod_names() {
            let ended = pods::ended(&scene.pods, &name).await?;
            ensure!(ended == "Succeeded", "{name}: {ended}");
        }
        scene.is_whole(&crew, 5).await?;
    }
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

pub(super) async fn node_lost_between_plan_and_decision(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-node").await?;
    let movable = Movable::reserve(&scene).await?;
    let outcome = async {
        node_lost(bed, &movable.from).await?;
        movable.moves().await?;
        movable.runs().await
    }
    .await;
    // Back, whatever came of it.
    node_returns(bed, &movable.from).await?;
    outcome?;
    scene.disband(&movable.crew).await?;
    nothing_is_left(bed).await
}

/// A gang with reservations for all of one machine, that another machine can hold as well.
pub(super) struct Movable<'a> {
    scene: &'a Scene<'a>,
    pub(super) crew: Crew,
    /// The node that it is planned on.
    pub(super) from: String,
    to: String,
}

impl<'a> Movable<'a> {
    /// Makes the gang. One of its members is kept out.
    pub(super) async fn reserve(scene: &'a Scene<'a>) -> Result<Self> {
        // Eight GPUs in all, and two machines have them.
        let crew = Crew::new("movable", 4, 2).with(GANG_ARRIVAL_ANNOTATION, "300");
        scene.create_all((0..3).map(|n| crew.pod(n)).collect::<Result<Vec<_>>>()?).await?;
        scene.create_all([crew.pod_kept_out(3)?]).await?;
        let status = scene.phase(&crew.name, GangPhase::Reserved).await?;
        let from = status.domain.strip_prefix("node ");
        let from = from.with_context(|| format!("planned on {}, not on one node", status.domain))?.to_owned();
        let all = scene.bed.gpus().await?.all();
        let to = all.iter().find(|(node, gpus)| **node != from && gpus.len() == 8);
        let (to, _) = to.context("no other machine of eight GPUs")?;
        Ok(Self { scene, crew, from, to: to.clone() })
    }

    /// Waits until all of it has reservations on the other machine.
    pub(super) async fn moves(&self) -> Result<()> {
        let to = format!("node {}", self.to);
        self.scene
            .status_where(&self.crew.name, &format!("on its way to {to}"), |status| {
                status.phase == GangPhase::Reserved && status.domain == to && status.bound == 0
            })
            .await?;
        Ok(())
    }

    /// Lets the last member in: all of it runs there, at the first attempt.
    pub(super) async fn runs(&self) -> Result<()> {
        self.scene.let_in().await?;
        let ran = self.scene.runs(&self.crew).await;
        self.scene.close().await?;
        for stay in ran? {
            ensure!(stay.node == self.to, "{stay:?} is not on {}", self.to);
        }
        let status = self.scene.status(&self.crew.name).await?;
        let is_first = status.domain == format!("node {}", self.to) && status.failed_attempts == 0;
        ensure!(is_first, "{} in {}", brief(&status), status.domain);
        Ok(())
    }
}

/// All that is on the node is away, and its Node object is removed.
pub(super) async fn node_lost(bed: &Bed, lost: &str) -> Result<()> {
    let node = bed.cluster().node(lost)?;
    for program in ["kubelet", PLUGIN] {
        node.program(program)?.kill().await?;
    }
    Api::<Node>::all(bed.client()).delete(lost, &DeleteParams::default()).await?;
    Ok(())
}

/// Undoes [`node_lost`]: the node is back with another Node object. The plugin's token was for the one that is gone.
pub(super) async fn node_returns(bed: &Bed, lost: &str) -> Result<()> {
    let node = bed.cluster().node(lost)?;
    if !node.program("kubelet")?.is_running() {
        node.sandbox().run_again("kubelet").await?;
    }
    let nodes: Api<Node> = Api::all(bed.client());
    until(format!("{lost} registered"), GANG_LIMIT, async || nodes.get(lost).await.map(drop)).await?;
    let gpus = bed.gpus().await?;
    gpus.restart_plugin(bed.cluster(), lost, &[]).await?;
    Ok(bed.cluster().wait_until_ready().await?)
}

pub(super) async fn kubelet_down_while_gang_binds_to_its_node(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-kubelet").await?;
    let crew = Crew::new("whole", 5, 4);
    let node = bed.cluster().nodes().first().context("there are nodes")?;
    // A pod that ended before: kubelet writes its checkpoint only when devices are advertised, and would start from an
    // old one.
    let before = pods::pinned("before", 8, node.name())?;
    pods::run(&scene.pods, &before).await?;
    scene.delete("before").await?;
    until("kubelet's notes up to date", pods::RUN_LIMIT, async || {
        let notes = std::fs::read_to_string(node.sandbox().file(NOTES));
        match notes.map_err(|error| error.to_string())? {
            notes if notes.contains("PodUID") => Err(notes),
            _ => Ok(()),
        }
    })
    .await?;
    node.program("kubelet")?.kill().await?;
    scene.create(&crew).await?;
    scene.status_where("whole", "bound", |status| status.bound == 5).await?;
    // Kubelet admits what waits for it a second after it has begun to listen for plugins; a pod that finds no devices
    // then has failed for good.
    node.sandbox().run_again("kubelet").await?;
    scene.runs(&crew).await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

pub(super) async fn node_deleted_under_bound_gang(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-deleted").await?;
    let crew = Crew::new("sturdy", 3, 4);
    scene.create(&crew).await?;
    let stays = scene.runs(&crew).await?;
    let lost = stays.first().context("the gang has members")?.node.clone();
    let outcome = node_deleted(&scene, &crew, &stays, &lost).await;
    // Back, whatever came of it.
    node_returns(bed, &lost).await?;
    outcome?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// The members that were on the lost node are replaced elsewhere, and the others stay.
async fn node_deleted(scene: &Scene<'_>, crew: &Crew, stays: &[Stay], lost: &str) -> Result<()> {
    node_lost(scene.bed, lost).await?;
    // As kube-controller-manager does a minute later: pods of a node that is not there go by force.
    let (gone, left): (Vec<&Stay>, Vec<&Stay>) = stays.iter().partition(|stay| stay.node == lost);
    for stay in &gone {
        let by_force = DeleteParams::default().grace_period(0);
        scene.pods.delete(&stay.pod, &by_force).await?;
        records::forget(scene.bed.cluster(), stay);
    }
    // Those that are gone are seen one after the other.
    scene
        .status_where(&crew.name, "has just those left", |status| {
            status.phase == GangPhase::Degraded && status.bound as usize == left.len()
        })
        .await?;
    for (number, name) in crew.pod_names().iter().enumerate() {
        if gone.iter().any(|stay| stay.pod == *name) {
            scene.create_all([crew.pod(number)?]).await?;
        }
    }
    let again = scene.runs(crew).await?;
    for stay in &again {
        ensure!(stay.node != lost, "{stay:?} is on the node that is gone");
    }
    for stay in left {
        ensure!(
            again.iter().any(|still| still.pod == stay.pod && still.from == stay.from),
            "{stay:?} was disturbed: {again:?}"
        );
    }
    Ok(())
}

const REPLICAS: [(&str, &str); 2] =
    [("gantry-extender-a", "127.0.0.1:8021"), ("gantry-extender-b", "127.0.0.1:8022")];

pub(super) async fn two_extenders_fail_over(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-pair").await?;
    with_two_extenders(bed, async || rolling_update(&scene).await).await
}

/// Runs a scenario with two extenders, one of them the leader, behind a Service.
pub(super) async fn with_two_extenders(bed: &Bed, story: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
    let control = bed.cluster().control();
    let binary = gantry::binary().context("no gantry beside this test")?;
    let programs = REPLICAS.map(|(name, _)| name).into_iter().chain([SERVICE]);
    with_other_extenders(bed, programs, async || {
        for (name, listen) in REPLICAS {
            bed.cluster().start_replica(&binary, name, Some(listen), &[]).await?;
        }
        let tool = env!("CARGO_BIN_EXE_gantry-cluster");
        let backends = REPLICAS.map(|(_, listen)| listen);
        service::start(control, tool, "127.0.0.1:8010", &backends).await?;
        story().await
    })
    .await
}

/// Runs a scenario without the usual extender. Whatever comes of it, the programs that it starts are killed then, and the
/// usual extender runs again.
pub(super) async fn with_other_extenders(
    bed: &Bed,
    programs: impl IntoIterator<Item = &str>,
    story: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let control = bed.cluster().control();
    control.daemon(EXTENDER)?.stop().await?;
    let outcome = story().await;
    for name in programs {
        if let Ok(daemon) = control.daemon(name) {
            daemon.kill().await?;
            control.forget(name)?;
        }
    }
    control.run_again(EXTENDER).await?;
    outcome?;
    bed.gpus().await?.wait_until_ready(bed.cluster()).await
}

/// Each replica is replaced in turn, the leader first by force and then as an update does, with gangs in every state.
async fn rolling_update(scene: &Scene<'_>) -> Result<()> {
    let control = scene.bed.cluster().control();
    leader(scene).await?;
    let gangs = Gangs::form(scene).await?;
    for by_force in [true, false, false] {
        let name = leader(scene).await?;
        let daemon = control.daemon(name)?;
        if by_force {
            daemon.kill().await?;
        } else {
            daemon.stop().await?;
        }
        let next = leader(scene).await?;
        ensure!(next != name, "{name} answers after its end");
        control.run_again(name).await?;
        gangs.stand(scene).await?;
    }
    gangs.end(scene).await
}

/// Waits until exactly one replica is ready, and returns it.
pub(super) async fn leader(scene: &Scene<'_>) -> Result<&'static str> {
    let control = scene.bed.cluster().control();
    let found = until("one extender that leads", GANG_LIMIT, async || {
        let mut ready = Vec::new();
        for (name, listen) in REPLICAS {
            let url = format!("http://{listen}/readyz");
            let probe = ["busybox", "wget", "-q", "-O", "-", &url];
            if control.exec(&probe).await.is_ok() {
                ready.push(name);
            }
        }
        match ready[..] {
            [one] => Ok(one),
            _ => Err(format!("ready: {ready:?}")),
        }
    });
    Ok(found.await?)
}
