//! Nodes that are lost under gangs that are decided and not bound, that wait for others to end, and that lack a member.
//! What was kept there is kept elsewhere, and all of the gang runs while the node is away. Those that plan and are
//! bound are in `gangs_failures`.

use anyhow::{Context, Result, ensure};
use gantry_api::{Decision, GangPhase, GangStatus};
use gantry_e2e::until;
use kube::api::DeleteParams;

use super::churn::nothing_is_left;
use super::gangs_deletion::binding;
use super::gangs_failures::{node_lost, node_returns};
use super::gangs_phases::{is_going, let_end, slow_to_end};
use super::gangs_preempt::{IMPORTANT, is_gone, make_class};
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief};
use crate::records::Stay;
use crate::{blocked_writes, pods, records};

pub(super) async fn node_lost_while_binding(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-node-binding").await?;
    // Two on one of the machines of eight GPUs and one elsewhere, by rank; what is left without that machine holds just
    // these three.
    let crew = Crew::new("half", 3, 4);
    let refused = crew.pod_name(1);
    blocked_writes::block_bindings(&scene, std::slice::from_ref(&refused)).await?;
    let outcome = lost_while_bound(&scene, &crew, &refused).await;
    // Whatever came of it: it holds for the whole cluster.
    blocked_writes::allow_bindings(&scene).await?;
    let outcome = match outcome {
        Ok((lost, left)) => run_elsewhere(&scene, &crew, &lost, &left).await,
        Err(error) => Err(error),
    };
    for node in bed.cluster().nodes() {
        if !node.program("kubelet")?.is_running() {
            node_returns(bed, node.name()).await?;
        }
    }
    outcome?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// The node of a member whose Binding is refused is lost, together with a bound member. Returns the node and the
/// remaining pods.
async fn lost_while_bound(scene: &Scene<'_>, crew: &Crew, refused: &str) -> Result<(String, Vec<Stay>)> {
    scene.create(crew).await?;
    let decided = binding(scene, &crew.name, 2).await?;
    let lost = place_of(&decided, refused)?;
    let bound: Vec<String> = crew.pod_names().into_iter().filter(|name| name != refused).collect();
    let stays = scene.run_on_grants(&bound).await?;
    let (gone, left): (Vec<Stay>, Vec<Stay>) = stays.into_iter().partition(|stay| stay.node == lost);
    ensure!(gone.len() == 1, "one of {gone:?} should be with {refused} on {lost}");
    node_lost(scene.bed, &lost).await?;
    for stay in &gone {
        let by_force = DeleteParams::default().grace_period(0);
        scene.pods.delete(&stay.pod, &by_force).await?;
        records::forget(scene.bed.cluster(), stay);
    }
    // It is decided all the same: one goes on running, and the other has a place where it can be bound.
    let moved = |status: &GangStatus| {
        let place = status.decision.as_ref().and_then(|decision| place_of(decision, refused).ok());
        status.bound == 1 && place.is_some_and(|node| node != lost)
    };
    let status = scene.status_where(&crew.name, &format!("with another place than {lost}"), moved).await?;
    ensure!(status.phase == GangPhase::Binding, "{}", brief(&status));
    for (number, name) in crew.pod_names().iter().enumerate() {
        if gone.iter().any(|stay| stay.pod == *name) {
            scene.create_all([crew.pod(number)?]).await?;
        }
    }
    binding(scene, &crew.name, 2).await?;
    Ok((lost, left))
}

/// All of it runs without the lost node, and those that were not there are undisturbed.
async fn run_elsewhere(scene: &Scene<'_>, crew: &Crew, lost: &str, left: &[Stay]) -> Result<()> {
    let stays = scene.runs(crew).await?;
    for stay in &stays {
        ensure!(stay.node != lost, "{stay:?} is on the node that is gone");
    }
    for stay in left {
        let still = |now: &Stay| now.pod == stay.pod && now.from.total_cmp(&stay.from).is_eq();
        ensure!(stays.iter().any(still), "{stay:?} was disturbed: {stays:?}");
    }
    records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)
}

/// The node that was decided for a member.
fn place_of(decision: &Decision, pod: &str) -> Result<String> {
    let mut slots = decision.reservations.iter();
    let slot = slots.find(|slot| slot.pod_name == pod);
    let slot = slot.with_context(|| format!("no place of {pod} in {decision:?}"))?;
    Ok(slot.node.to_string())
}

pub(super) async fn node_lost_while_preempting_or_degraded(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-node-states").await?;
    make_class(bed).await?;
    // Six and two GPUs of one machine, and all of the others.
    let torn = Crew::new("torn", 2, 3).of_class(IMPORTANT);
    let rest = Crew::new("rest", 3, 4);
    let urgent = Crew::new("urgent", 2, 1).of_class(IMPORTANT);
    let outcome = lost_while_others_go(&scene, &torn, &rest, &urgent).await;
    // Restores the node after success or failure and ends the slow pod, which would stay for minutes.
    for node in bed.cluster().nodes() {
        if !node.program("kubelet")?.is_running() {
            node_returns(bed, node.name()).await?;
        }
    }
    let ended = let_end(&scene, "slow").await;
    outcome.and(ended)?;
    is_gone(&scene, "slow").await?;
    for crew in [&torn, &urgent] {
        scene.disband(crew).await?;
    }
    nothing_is_left(bed).await
}

async fn lost_while_others_go(scene: &Scene<'_>, torn: &Crew, rest: &Crew, urgent: &Crew) -> Result<()> {
    scene.create(torn).await?;
    let stays = scene.runs(torn).await?;
    let lost = stays.first().context("the gang has members")?.node.clone();
    ensure!(stays.iter().all(|stay| stay.node == lost), "{stays:?} are not on one node");
    scene.create(rest).await?;
    scene.runs(rest).await?;
    scene.create_all([slow_to_end(records::recording(pods::sleeper("slow", 2)?, 100_000.0)?)?]).await?;
    let slow = scene.run_on_grants(&["slow".to_owned()]).await?;
    ensure!(slow.iter().all(|stay| stay.node == lost), "{slow:?} is not on {lost}");

    // The reservation of one is held, and the cheapest victims for the other are on the same node.
    scene.delete(&torn.pod_name(1)).await?;
    scene.phase(&torn.name, GangPhase::Degraded).await?;
    scene.create(urgent).await?;
    scene.phase(&urgent.name, GangPhase::Preempting).await?;
    until("slow is asked to end", GANG_LIMIT, async || match is_going(scene, "slow").await {
        Ok(true) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await?;
    for name in rest.pod_names() {
        ensure!(!is_going(scene, &name).await?, "more has to go than it takes");
    }

    node_lost(scene.bed, &lost).await?;
    let by_force = DeleteParams::default().grace_period(0);
    scene.pods.delete(&torn.pod_name(0), &by_force).await?;
    for stay in &stays {
        records::forget(scene.bed.cluster(), stay);
    }
    // What ends there is of no use any more, so others go instead.
    let runs = scene.runs(urgent).await?;
    for name in rest.pod_names() {
        is_gone(scene, &name).await?;
    }
    scene.create(torn).await?;
    for stay in scene.runs(torn).await?.iter().chain(&runs) {
        ensure!(stay.node != lost, "{stay:?} is on the node that is gone");
    }
    records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)
}
