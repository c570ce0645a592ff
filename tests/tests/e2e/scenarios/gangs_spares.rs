//! Spare reservations: planned once there is room, lent to a pod of lower priority, and taken by the replacement of a
//! member whose GPU has failed.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_api::GangPhase;
use gantry_api::names::GANG_SPARES_ANNOTATION;
use gantry_e2e::gantry;
use gantry_e2e::hardware::Hardware;

use super::churn::nothing_is_left;
use super::gangs_preempt::{IMPORTANT, is_gone, make_class, of_class};
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::views::{self, Metrics};
use crate::{pods, records};

/// The Xid of a GPU that fell off the bus.
const OFF_THE_BUS: u64 = 79;

pub(super) async fn replacement_takes_lent_spare(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-spares").await?;
    make_class(bed).await?;
    let (gpus, cluster) = (bed.gpus().await?, bed.cluster());
    let smallest = &cluster.nodes()[2];
    // Not the node's own GPUs, so that nothing of this is left on them, however it ends.
    let mut hardware = Hardware::install_in(smallest, &gantry::machine_file("l4-4x-pcie"), "spares")?;
    gpus.serve(cluster, smallest.name(), Some(&hardware), &[], &[("nvidia.com/gpu", 4)]).await?;
    let important = |name: &str, gpus| {
        let pod = records::recording(pods::sleeper(name, gpus)?, 100_000.0)?;
        of_class(pod, IMPORTANT)
    };
    let holders = ["holder-0".to_owned(), "holder-1".to_owned()];
    scene.create_all([important(&holders[0], 8)?, important(&holders[1], 8)?]).await?;
    scene.run_on_grants(&holders).await?;

    // The gang is bound without its spare one, and gets it when GPUs come free.
    let train = Crew::new("train", 2, 2).of_class(IMPORTANT).with(GANG_SPARES_ANNOTATION, "1");
    scene.create(&train).await?;
    scene.runs(&train).await?;
    spares(&scene, "SparesMissing").await?;
    scene.delete(&holders[1]).await?;
    let status = spares(&scene, "SparesReserved").await?;
    let decision = status.decision.context("it is decided")?;
    let spare = decision.reservations.iter().find(|slot| slot.spare).context("no spare one is decided")?;
    let ids = spare.devices.iter().flat_map(|devices| &devices.ids);
    let devices: BTreeSet<String> = ids.map(ToString::to_string).collect();
    ensure!(devices.len() == 2 && spare.pod.is_none(), "{spare:?}");

    // A pod of its own priority gets what else is free, and none gets the spare one. One of lower priority is lent it.
    scene.create_all([important("filler", 6)?]).await?;
    scene.run_on_grants(&["filler".to_owned()]).await?;
    scene.create_all([important("vulture", 2)?]).await?;
    scene.pod_is_refused("vulture").await?;
    scene.create_all([records::recording(pods::sleeper("borrower", 2)?, 100_000.0)?]).await?;
    let lent = scene.run_on_grants(&["borrower".to_owned()]).await?;
    ensure!(lent[0].node == spare.node.as_str() && lent[0].devices == devices, "{lent:?} is not {spare:?}");
    ensure!(scene.phase("train", GangPhase::Bound).await?.bound == 2, "the gang was touched");
    Metrics::settled(bed, &[(r#"gang_spares{state="idle"}"#, 0.0), (r#"gang_spares{state="lent"}"#, 1.0)])
        .await?;
    let explained = views::explained(bed, &["gang", "train", "-n", &scene.namespace]).await?;
    ensure!(explained.contains(&format!("lent to {}/borrower", scene.namespace)), "{explained}");

    // A GPU of the member fails, and another pod comes for it.
    let sick = hardware.machine().gpus().get(1).and_then(|gpu| gpu.uuid.as_ref()).map(ToString::to_string);
    let sick = sick.context("it has four GPUs")?;
    hardware.controller().raise_xid(1, OFF_THE_BUS)?;
    gpus.counts(cluster, smallest.name(), &[("nvidia.com/gpu", 3)]).await?;
    let lost = usize::from(!pods::granted(&scene.pods.get("train-0").await?)?.contains(&sick));
    let name = train.pod_name(lost);
    scene.delete(&name).await?;
    scene.create_all([train.pod(lost)?]).await?;
    scene.phase("train", GangPhase::Bound).await?;
    let back = pods::running(&scene.pods, &name).await?;
    let seen = pods::seen(cluster, &back, "main").await?;
    ensure!(
        pods::node(&back) == spare.node.as_str() && pods::granted(&back)? == devices && seen == devices,
        "{name} sees {seen:?} on {}: not {spare:?}",
        pods::node(&back)
    );
    is_gone(&scene, "borrower").await?;
    views::event(bed, &scene.namespace, ("Pod", "borrower", None), "Preempted", &["train"]).await?;
    ensure!(pods::node(&scene.pods.get("vulture").await?).is_empty(), "it got GPUs");
    records::ensure_no_device_twice(&records::read(cluster)?)?;
    for name in ["vulture", "filler", &holders[0]] {
        scene.delete(name).await?;
    }
    scene.disband(&train).await?;
    let lift = ["annotate", "gpunode", smallest.name(), "gantry.dev/lift-quarantine=all"];
    cluster.kubectl(&lift).await?;
    gpus.counts(cluster, smallest.name(), &[("nvidia.com/gpu", 4)]).await?;
    nothing_is_left(bed).await
}

/// Waits until the gang's condition about spare reservations has this reason.
async fn spares(scene: &Scene<'_>, reason: &str) -> Result<gantry_api::GangStatus> {
    let status = scene.status_where("train", reason, |status| {
        let found = status.conditions.iter().find(|condition| condition.type_ == "Spares");
        found.is_some_and(|condition| condition.reason == reason)
    });
    let status = status.await?;
    ensure!(status.phase == GangPhase::Bound, "{}", brief(&status));
    Ok(status)
}
