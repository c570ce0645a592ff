//! Gangs that wait: for room, for their turn, for members. None of them is ever bound in part, and what waits keeps
//! nothing from others.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_ARRIVAL_ANNOTATION, GANG_GATE};
use gantry_api::{GangPhase, GangStatus, Reason};
use gantry_e2e::gantry::{EXTENDER, manifests};
use gantry_e2e::{Kubernetes, gantry, until};
use k8s_openapi::api::core::v1::PodSchedulingGate;
use kube::api::PostParams;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief};
use crate::{pods, records};

/// The machines have 8, 8 and 4 GPUs.
const ALL_GPUS: usize = 20;

pub(super) async fn second_large_gang_waits_for_the_first(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-two").await?;
    // 12 of 20 GPUs each, made in turns, so that a greedy scheduler would bind half of each.
    let crews = [Crew::new("red", 6, 2), Crew::new("blue", 6, 2)];
    for number in 0..6 {
        for crew in &crews {
            scene.create_all([crew.pod(number)?]).await?;
        }
    }
    let first = until("one of them bound", GANG_LIMIT, async || {
        for (place, crew) in crews.iter().enumerate() {
            let status = scene.status(&crew.name).await.map_err(|error| error.to_string())?;
            if status.phase == GangPhase::Bound {
                return Ok(place);
            }
        }
        Err("neither is".to_owned())
    })
    .await?;
    let (first, second) = (&crews[first], &crews[1 - first]);
    scene.runs(first).await?;
    // While the first was being bound, the second may have waited for another reason, such as for its turn.
    let waits = |status: &GangStatus| {
        status.phase == GangPhase::Queued && status.reason == Some(Reason::InsufficientResources)
    };
    let waiting = scene.status_where(&second.name, "queued for want of GPUs", waits).await?;
    ensure!(waiting.waiting_since.is_some() && waiting.bound == 0, "{}", brief(&waiting));
    scene.holds_nothing(second).await?;
    // It keeps nothing from a pod that cannot delay it: 8 GPUs are free, and it waits for 12.
    pods::run(&scene.pods, &pods::sleeper("single", 1)?).await?;
    scene.holds_nothing(second).await?;

    scene.disband(first).await?;
    scene.runs(second).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    scene.disband(second).await?;
    scene.delete("single").await?;
    nothing_is_left(bed).await
}

pub(super) async fn gang_larger_than_cluster_reports_numbers(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-large").await?;
    let crew = Crew::new("whale", 6, 4);
    scene.create(&crew).await?;
    // Five sets of four GPUs are on the three machines: 2, 2 and 1.
    let status = scene
        .status_where("whale", "refused for good", |status| status.reason == Some(Reason::CannotFit))
        .await?;
    ensure!(status.phase == GangPhase::Queued && status.bound == 0, "{}", brief(&status));
    // The last member to arrive: earlier ones may have another reason, and pods that can never run are not woken.
    scene.pod_waits(&crew.pod_name(5), Reason::CannotFit).await?;
    scene.holds_nothing(&crew).await?;
    // A gang that can never run delays no other.
    let small = Crew::new("shrimp", 5, 4);
    scene.create(&small).await?;
    scene.runs(&small).await?;
    scene.holds_nothing(&crew).await
}

pub(super) async fn single_pods_do_not_starve_a_gang(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-stream").await?;
    // Singles go past it until it has lost its patience; a minute of that would show no more than some seconds.
    with_options(bed, &["--gang-patience=5"], async || streamed(&scene).await).await
}

async fn streamed(scene: &Scene<'_>) -> Result<()> {
    let crew = Crew::new("patient", 4, 4);
    let mut made = 0;
    let mut is_there = false;
    let start = Instant::now();
    // Always more singles than there is room for: without a turn of its own the gang would never see 16 GPUs free at
    // once.
    loop {
        let all = scene.pods.list(&kube::api::ListParams::default()).await?;
        let alive = all
            .iter()
            .filter(|pod| !matches!(pods::phase(pod), "Succeeded" | "Failed"))
            .filter(|pod| crate::gangs::name_of(pod).starts_with("single"))
            .count();
        for _ in alive..ALL_GPUS / 2 + 4 {
            let pod = records::recording(pods::sleeper(&format!("single-{made}"), 2)?, 1.0)?;
            scene.pods.create(&PostParams::default(), &pod).await?;
            made += 1;
        }
        if !is_there {
            until("the cluster full of singles", GANG_LIMIT, async || match scene.bound("single-").await {
                Ok(bound) if bound >= ALL_GPUS / 2 => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await?;
            scene.create(&crew).await?;
            is_there = true;
        }
        if scene.bound("patient-").await? == 4 {
            break;
        }
        ensure!(start.elapsed() < GANG_LIMIT, "it starves: {}", brief(&scene.status("patient").await?));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    scene.runs(&crew).await?;
    records::ensure_no_device_twice(&records::read(scene.bed.cluster())?)
}

pub(super) async fn gang_waits_for_missing_members(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-collect").await?;
    let crew = Crew::new("late", 4, 2);
    scene.create_all((0..3).map(|n| crew.pod(n)).collect::<Result<Vec<_>>>()?).await?;
    let status = scene.status_where("late", "counts three", |status| status.members == 3).await?;
    ensure!(status.phase == GangPhase::Pending, "{}", brief(&status));
    // How many there were when kube-scheduler asked for it: counts alone wake no pod.
    for number in 0..3 {
        scene.pod_waits(&crew.pod_name(number), Reason::WaitingForMembers).await?;
    }
    // One goes again, and comes back with the last.
    scene.delete(&crew.pod_name(1)).await?;
    // An unschedulable pod keeps its last message; the Gang is up to date.
    scene
        .status_where("late", "counts two", |status| {
            status.members == 2 && status.min == 4 && status.reason == Some(Reason::WaitingForMembers)
        })
        .await?;
    scene.holds_nothing(&crew).await?;
    scene.create_all([crew.pod(1)?, crew.pod(3)?]).await?;
    scene.runs(&crew).await?;
    Ok(())
}

pub(super) async fn gated_gang_is_released_when_complete(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-gates").await?;
    // To remove gates is a right of its own, and an option.
    let rights = std::fs::read_to_string(manifests().join("gates.yaml"))?;
    let version = Kubernetes::selected()?.mutating_policies().context("no MutatingAdmissionPolicies")?;
    let mutating = |version: &str| format!("apiVersion: {version}\nkind: MutatingAdmissionPolicy");
    let rights = rights.replace(&mutating("admissionregistration.k8s.io/v1"), &mutating(version));
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &rights).await?;
    let outcome = with_options(bed, &["--gates"], async || gated(&scene).await).await;
    // Without the option the gates that this adds would stay for ever.
    bed.cluster().kubectl_with_input(&["delete", "-f", "-"], &rights).await?;
    outcome
}

/// Runs a scenario with an extender that has additional options.
pub(super) async fn with_options(
    bed: &Bed,
    options: &[&str],
    story: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    restart_extender(bed, &options).await?;
    let outcome = story().await;
    restart_extender(bed, &[]).await?;
    outcome
}

/// Starts the extender again, with these additional options.
pub(super) async fn restart_extender(bed: &Bed, options: &[String]) -> Result<()> {
    let binary = gantry::binary().context("no gantry beside this test")?;
    bed.cluster().control().daemon(EXTENDER)?.stop().await?;
    bed.cluster().start_replica(&binary, EXTENDER, None, options).await?;
    Ok(())
}

async fn gated(scene: &Scene<'_>) -> Result<()> {
    let gated = Crew::new("gated", 3, 2);
    let mut members = gated.pods()?;
    for pod in &mut members {
        if let Some(spec) = pod.spec.as_mut() {
            let name = GANG_GATE.to_owned();
            spec.scheduling_gates = Some(vec![PodSchedulingGate { name }]);
        }
    }
    let last = members.pop();
    scene.create_all(members).await?;
    scene.status_where("gated", "counts two", |status| status.members == 2).await?;
    for number in 0..2 {
        let pod = scene.pods.get(&gated.pod_name(number)).await?;
        let gates = pod.spec.and_then(|spec| spec.scheduling_gates);
        ensure!(gates.is_some_and(|gates| gates.len() == 1), "ungated below the minimum");
    }
    scene.create_all(last).await?;
    scene.runs(&gated).await?;
    Ok(())
}

pub(super) async fn missing_member_does_not_hold_reservations(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-absent").await?;
    // A selector that fits no node is detected before planning.
    let choosy = Crew::new("choosy", 3, 2);
    let mut members = choosy.pods()?;
    if let Some(spec) = members.last_mut().and_then(|pod| pod.spec.as_mut()) {
        spec.node_selector = Some([("no-node".to_owned(), "has-this".to_owned())].into());
    }
    scene.create_all(members).await?;
    let status = scene.status_where("choosy", "refused", |status| !status.message.is_empty()).await?;
    ensure!(
        !matches!(status.phase, GangPhase::Reserved | GangPhase::Binding | GangPhase::Bound),
        "{}",
        brief(&status)
    );

    // A constraint that only kube-scheduler evaluates keeps this member out: it has a reservation and does not arrive.
    let absent = Crew::new("absent", 4, 4).with(GANG_ARRIVAL_ANNOTATION, "3");
    scene.create_all((0..3).map(|n| absent.pod(n)).collect::<Result<Vec<_>>>()?).await?;
    scene.create_all([absent.pod_kept_out(3)?]).await?;
    let status = scene.status_where("absent", "given up once", |status| status.failed_attempts >= 1).await?;
    ensure!(status.bound == 0 && status.decision.is_none(), "{}", brief(&status));
    scene.holds_nothing(&absent).await?;
    scene.holds_nothing(&choosy).await?;
    // What was kept for it is there for others while it pauses.
    let other = Crew::new("other", 5, 4);
    scene.create(&other).await?;
    scene.runs(&other).await?;
    scene.holds_nothing(&absent).await?;
    scene.disband(&other).await?;

    // The way is free at last.
    scene.let_in().await?;
    let ran = scene.runs(&absent).await;
    scene.close().await?;
    ran?;
    scene.disband(&absent).await?;
    scene.disband(&choosy).await?;
    nothing_is_left(bed).await
}
