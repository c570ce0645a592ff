//! Members are deleted while their gang is in a short phase (preempting, backing off, binding, degraded) or invalid.
//! Whatever it had reserved or preempted, the gang is never bound below its minimum, and it runs once replacements
//! arrive.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use gantry_api::names::{GANG_ARRIVAL_ANNOTATION, GANG_MIN_ANNOTATION};
use gantry_api::{Decision, GangPhase, Reason};
use gantry_e2e::gantry::EXTENDER;

use super::churn::nothing_is_left;
use super::gangs_phases::{is_at_work_again, is_going, let_end, slow_to_end};
use super::gangs_preempt::{IMPORTANT, is_gone, make_class};
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::views::Metrics;
use crate::{blocked_writes, pods, records};

pub(super) async fn member_deleted_while_preempting_or_degraded(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-leave-busy").await?;
    make_class(bed).await?;
    let slow = Crew::new("slow", 2, 8);
    let urgent = Crew::new("urgent", 4, 4).of_class(IMPORTANT);
    let outcome = leave_preempting(&scene, &slow, &urgent).await;
    // Whatever came of it: they would stay for minutes.
    let mut ended = Ok(());
    for name in slow.pod_names() {
        ended = ended.and(let_end(&scene, &name).await);
    }
    outcome.and(ended)?;
    leave_repairing(&scene, &urgent).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.disband(&urgent).await?;
    nothing_is_left(bed).await
}

/// The victims take time to end; meanwhile a member of the gang is deleted.
async fn leave_preempting(scene: &Scene<'_>, slow: &Crew, urgent: &Crew) -> Result<()> {
    let victims = slow.pods()?.into_iter().map(slow_to_end);
    scene.create_all(victims.collect::<Result<Vec<_>>>()?).await?;
    scene.runs(slow).await?;
    scene.create(urgent).await?;
    scene.phase("urgent", GangPhase::Preempting).await?;
    scene.delete(&urgent.pod_name(2)).await?;
    let status = scene.phase("urgent", GangPhase::Pending).await?;
    ensure!(status.members == 3 && status.bound == 0, "{}", brief(&status));
    // Half of the victims end. That is not enough for the gang, whose members do not go there one by one.
    let first = slow.pod_name(0);
    let_end(scene, &first).await?;
    is_gone(scene, &first).await?;
    scene.holds_nothing(urgent).await?;
    scene.create_all([urgent.pod(2)?]).await?;
    // The gang fits once the other victim has ended, so that no further pod is evicted.
    scene
        .status_where("urgent", "waiting for who is on the way out", |status| {
            status.reason == Some(Reason::WaitingForTerminatingPods)
        })
        .await?;
    scene.holds_nothing(urgent).await?;
    let second = slow.pod_name(1);
    ensure!(is_going(scene, &second).await?, "{second} is not asked to end");
    let_end(scene, &second).await?;
    scene.runs(urgent).await?;
    Ok(())
}

/// One is lost, and then another before it is replaced.
async fn leave_repairing(scene: &Scene<'_>, urgent: &Crew) -> Result<()> {
    // This waits from before the loss, and fits in either of the places that are kept.
    scene.create_all([pods::sleeper("vulture", 8)?]).await?;
    let mut kept = BTreeSet::new();
    for (number, left) in [(1, 3), (3, 2)] {
        let name = urgent.pod_name(number);
        let pod = scene.pods.get(&name).await?;
        kept.insert((pods::node(&pod).to_owned(), pods::granted(&pod)?));
        scene.delete(&name).await?;
        scene
            .status_where("urgent", &format!("{left} left"), |status| {
                status.phase == GangPhase::Degraded && status.bound == left
            })
            .await?;
    }
    scene.create_all([urgent.pod(3)?]).await?;
    scene
        .status_where("urgent", "one back", |status| status.phase == GangPhase::Degraded && status.bound == 3)
        .await?;
    scene.create_all([urgent.pod(1)?]).await?;
    scene.runs(urgent).await?;
    let mut places = BTreeSet::new();
    for number in [1, 3] {
        let pod = scene.pods.get(&urgent.pod_name(number)).await?;
        places.insert((pods::node(&pod).to_owned(), pods::granted(&pod)?));
    }
    ensure!(places == kept, "{places:?} instead of {kept:?}");
    let vulture = scene.pods.get("vulture").await?;
    ensure!(pods::node(&vulture).is_empty(), "it got a place");
    scene.delete("vulture").await
}

pub(super) async fn member_deleted_in_backoff_or_invalid(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-leave-idle").await?;
    // One never comes to its place, and the others have a second to wait for it.
    let late = Crew::new("late", 3, 4).with(GANG_ARRIVAL_ANNOTATION, "1");
    scene.create_all([late.pod(0)?, late.pod(1)?, late.pod_kept_out(2)?]).await?;
    // Not the first time, after which it is tried again so soon that a member could go too late.
    let status = scene
        .status_where("late", "backing off again", |status| {
            status.phase == GangPhase::Backoff && status.failed_attempts > 1
        })
        .await?;
    ensure!(status.bound == 0, "{}", brief(&status));
    scene.delete(&late.pod_name(1)).await?;
    let status = scene.phase("late", GangPhase::Pending).await?;
    ensure!(status.members == 2 && status.bound == 0, "{}", brief(&status));
    scene.holds_nothing(&late).await?;
    // Nothing is kept for it either.
    let all = Crew::new("all", 5, 4);
    scene.create(&all).await?;
    scene.runs(&all).await?;
    scene.disband(&all).await?;
    scene.create_all([late.pod(1)?]).await?;
    scene.delete(&late.pod_name(2)).await?;
    scene.create_all([late.pod(2)?]).await?;
    scene.runs(&late).await?;
    scene.disband(&late).await?;

    // Of three members with a minimum of three, one declares four. It is deleted, and the others wait for a
    // replacement.
    let odd = Crew::new("odd", 3, 4);
    let mut other = odd.pod(2)?;
    let annotations = other.metadata.annotations.get_or_insert_default();
    annotations.insert(GANG_MIN_ANNOTATION.to_owned(), "4".to_owned());
    scene.create_all([odd.pod(0)?, odd.pod(1)?, other]).await?;
    scene.phase("odd", GangPhase::Invalid).await?;
    scene.delete(&odd.pod_name(0)).await?;
    scene
        .status_where("odd", "invalid without the first", |status| {
            status.phase == GangPhase::Invalid && status.members == 2
        })
        .await?;
    scene.delete(&odd.pod_name(2)).await?;
    let status = scene.phase("odd", GangPhase::Pending).await?;
    ensure!(status.members == 1 && status.min == 3, "{}", brief(&status));
    scene.holds_nothing(&odd).await?;
    scene.create_all([odd.pod(0)?, odd.pod(2)?]).await?;
    scene.runs(&odd).await?;
    scene.disband(&odd).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

pub(super) async fn member_deleted_and_binder_killed(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-leave-binding").await?;
    let crew = Crew::new("half", 4, 4);
    let refused = [crew.pod_name(2), crew.pod_name(3)];
    blocked_writes::block_bindings(&scene, &refused).await?;
    let outcome = leave_binding(&scene, &crew).await;
    // Whatever came of it: it holds for the whole cluster.
    blocked_writes::allow_bindings(&scene).await?;
    outcome?;
    scene.runs(&crew).await?;
    let vulture = scene.pods.get("vulture").await?;
    ensure!(pods::node(&vulture).is_empty(), "it got a place");
    scene.delete("vulture").await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// It is decided, and the API server does not take two of its Bindings.
async fn leave_binding(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    scene.create(crew).await?;
    let decided = binding(scene, "half", 2).await?;
    // Four GPUs are free, and as many as this wants are only where the others will be.
    scene.create_all([pods::sleeper("vulture", 8)?]).await?;
    let control = scene.bed.cluster().control();
    for program in ["kube-scheduler", EXTENDER] {
        control.daemon(program)?.kill().await?;
        control.run_again(program).await?;
        is_at_work_again(scene, program).await?;
        let still = binding(scene, "half", 2).await?;
        ensure!(still == decided, "{still:?} instead of {decided:?}");
    }
    // A member that is not bound is deleted, then one that is. Their reservations wait for replacements.
    let places = |decision: &Decision| -> BTreeSet<String> {
        let slots = decision.reservations.iter();
        slots.map(|slot| format!("{} {:?}", slot.node, slot.devices)).collect()
    };
    for (number, bound) in [(3, 2), (0, 1)] {
        scene.delete(&crew.pod_name(number)).await?;
        scene
            .status_where("half", "without one more", |status| {
                status.bound == bound && status.decision.is_some()
            })
            .await?;
    }
    scene.create_all([crew.pod(0)?, crew.pod(3)?]).await?;
    scene.status_where("half", "two of them bound again", |status| status.bound == 2).await?;
    let status = scene.status("half").await?;
    let now = status.decision.as_ref().map(places).unwrap_or_default();
    ensure!(now == places(&decided), "{now:?} instead of {:?}", places(&decided));
    Ok(())
}

/// Waits until so many members of the gang are bound, as was decided, and gives the decision.
pub(super) async fn binding(scene: &Scene<'_>, gang: &str, bound: u32) -> Result<Decision> {
    let status = scene
        .status_where(gang, "decided and not yet bound", |status| {
            status.phase == GangPhase::Binding && status.bound == bound
        })
        .await?;
    status.decision.ok_or_else(|| anyhow::anyhow!("a gang that is being bound has a decision"))
}

pub(super) async fn member_deleted_while_committing(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-leave-commit").await?;
    let crew = Crew::new("undecided", 3, 4);
    let outcome = leave_committing(&scene, &crew).await;
    // Whatever came of it: it holds for the whole cluster.
    blocked_writes::allow_decisions(&scene).await?;
    outcome?;
    // It was unknown whether the decision was stored when the member was lost, so the decision holds now, and the
    // others did not wait for the member.
    scene.create_all([crew.pod(1)?]).await?;
    scene.runs(&crew).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// The API server does not answer when its decision is written.
async fn leave_committing(scene: &Scene<'_>, crew: &Crew) -> Result<()> {
    blocked_writes::delay_decisions(scene).await?;
    scene.create(crew).await?;
    // The Gang cannot show that: the decision is the next write to it.
    let committing = [(r#"gangs{phase="committing"}"#, 1.0)];
    Metrics::settled(scene.bed, &committing).await?;
    let control = scene.bed.cluster().control();
    // The first extender's decision is lost with it; the next makes another, which gets no response either.
    for program in [EXTENDER, "kube-scheduler"] {
        control.daemon(program)?.kill().await?;
        control.run_again(program).await?;
        is_at_work_again(scene, program).await?;
        Metrics::settled(scene.bed, &committing).await?;
    }
    scene.delete(&crew.pod_name(1)).await?;
    Metrics::settled(scene.bed, &committing).await?;
    let status = scene.status(&crew.name).await?;
    ensure!(status.decision.is_none() && status.bound == 0, "{}", brief(&status));
    scene.holds_nothing(crew).await
}
