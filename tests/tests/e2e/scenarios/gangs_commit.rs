//! A gang whose decision is sent to an API server that does not respond. Meanwhile every other participant fails, and
//! nothing is bound before the decision is stored. `gangs_deletion` covers members, and extenders and kube-schedulers
//! that are killed.

use anyhow::{Context, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::gantry::EXTENDER;

use super::churn::nothing_is_left;
use super::gangs_failures::{kill_kubelets, leader, node_lost, node_returns, with_two_extenders};
use super::gangs_phases::is_at_work_again;
use super::modes::chosen;
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::views::Metrics;
use crate::{blocked_writes, pods, records};

pub(super) async fn kubelet_extender_and_node_fail_before_commit(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-undecided").await?;
    let [full, lost, _] = bed.cluster().nodes() else {
        anyhow::bail!("the cluster has three nodes");
    };
    // One of the machines of eight GPUs is taken, so two go to the other and one to that of four: there is no other
    // way.
    let holder = chosen("holder", GPU_RESOURCE, 8, full.name())?;
    pods::run(&scene.pods, &holder).await?;
    let crew = Crew::new("undecided", 3, 4);
    with_two_extenders(bed, async || play(&scene, &crew, lost.name()).await).await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

async fn play(scene: &Scene<'_>, crew: &Crew, lost: &str) -> Result<()> {
    blocked_writes::delay_decisions(scene).await?;
    let outlived = outlive(scene, crew, lost).await;
    // Whatever came of it: it holds for the whole cluster.
    blocked_writes::allow_decisions(scene).await?;
    let outcome = match outlived {
        Ok(()) => runs_without(scene, crew, lost).await,
        Err(error) => Err(error),
    };
    // Back, whatever came of it.
    node_returns(scene.bed, lost).await?;
    outcome
}

/// Kubelets are killed, one extender follows the other, and the node goes that most of the gang was to go to.
async fn outlive(scene: &Scene<'_>, crew: &Crew, lost: &str) -> Result<()> {
    scene.create(crew).await?;
    is_being_decided(scene, crew).await?;
    kill_kubelets(scene).await?;
    is_being_decided(scene, crew).await?;

    // The first extender's decision is lost with it; the next extender makes another.
    let control = scene.bed.cluster().control();
    let name = leader(scene).await?;
    control.daemon(name)?.stop().await?;
    let next = leader(scene).await?;
    ensure!(next != name, "{name} answers after its end");
    control.run_again(name).await?;
    is_being_decided(scene, crew).await?;

    // There would be another way now, and what was decided may stand already: it is not decided otherwise meanwhile.
    scene.delete("holder").await?;
    node_lost(scene.bed, lost).await?;
    is_at_work_again(scene, EXTENDER).await?;
    is_being_decided(scene, crew).await
}

/// Waits until the decision is sent. The Gang cannot show that, because the decision is the next write to it. No member
/// is bound.
async fn is_being_decided(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    Metrics::settled_with_leader(scene.bed, &[(r#"gangs{phase="committing"}"#, 1.0)]).await?;
    // The gang may have reached this phase before its status was written.
    let gang = scene.gangs.get_opt(&crew.name).await?;
    if let Some(status) = gang.and_then(|gang| gang.status) {
        ensure!(status.decision.is_none() && status.bound == 0, "{}", brief(&status));
    }
    scene.holds_nothing(crew).await
}

/// All of it runs, and nothing of it where the lost node was.
async fn runs_without(scene: &Scene<'_>, crew: &Crew, lost: &str) -> Result<()> {
    for stay in scene.runs(crew).await? {
        ensure!(stay.node != lost, "{stay:?} is on the node that is gone");
    }
    let decision = scene.status(&crew.name).await?.decision;
    let decision = decision.context("it is decided")?;
    let there = decision.reservations.iter().find(|slot| slot.node.to_string() == lost);
    ensure!(there.is_none(), "{there:?} is kept on the node that is gone");
    records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)
}
