//! Gangs on a fabric with levels: one with a required rack, one with slices and ranks, one that grows. Two racks have
//! the same name: one is in a zone, the nodes of the other have no zone.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use gantry_api::names::{
    GANG_MAX_ANNOTATION, GANG_MIN_ANNOTATION, GANG_RANK_ANNOTATION, GANG_REQUIRED_LEVEL_ANNOTATION,
    GANG_SLICE_ANNOTATION, PLACEMENT_ANNOTATION,
};
use gantry_api::placement::DomainLoss;
use gantry_api::{GangPhase, Placement, Reason};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::churn::nothing_is_left;
use super::gangs::{restart_extender, with_options};
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, brief};
use crate::{pods, records, views};

const ZONE: &str = "topology.kubernetes.io/zone";
const RACK: &str = "topology.kubernetes.io/rack";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// The nodes by the rack they are in.
struct Racks<'b> {
    /// Eight GPUs, rack r1 of zone a.
    alone: &'b str,
    /// Eight GPUs, rack r1 without a zone.
    large: &'b str,
    /// Four, in the same.
    small: &'b str,
}

pub(super) async fn gang_follows_level_slices_and_ranks(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-levels").await?;
    let [alone, large, small] = bed.cluster().nodes() else {
        anyhow::bail!("not three nodes");
    };
    let racks = Racks { alone: alone.name(), large: large.name(), small: small.name() };
    for node in [racks.alone, racks.large, racks.small] {
        label(bed, node, RACK, Some("r1")).await?;
    }
    label(bed, racks.alone, ZONE, Some("a")).await?;
    let outcome = with_options(bed, &["--fabric=zone-rack"], async || {
        within_one_rack(&scene, &racks).await?;
        in_slices_by_rank(&scene, &racks).await?;
        grows(&scene, &racks).await
    })
    .await;
    for node in [racks.alone, racks.large, racks.small] {
        for key in [ZONE, RACK] {
            label(bed, node, key, None).await?;
        }
    }
    outcome?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

/// The rack that holds it has the slowest node in it, and kube-scheduler would rather have gone elsewhere. One member
/// more, and none holds it.
async fn within_one_rack(scene: &Scene<'_>, racks: &Racks<'_>) -> Result<()> {
    let within = Crew::new("within", 3, 4).with(GANG_REQUIRED_LEVEL_ANNOTATION, "rack");
    for pod in within.pods()? {
        scene.create_all([preferring(pod, racks.alone)?]).await?;
    }
    let stays = scene.runs(&within).await?;
    let mut nodes: Vec<&str> = stays.iter().map(|stay| &*stay.node).collect();
    nodes.sort_unstable();
    ensure!(nodes == [racks.large, racks.large, racks.small], "in two racks: {nodes:?}");
    let status = scene.status("within").await?;
    ensure!(status.domain == "rack r1", "{:?}", status.domain);
    shows_why_there(scene, &within).await?;
    scene.disband(&within).await?;

    let wide = Crew::new("wide", 4, 4).with(GANG_REQUIRED_LEVEL_ANNOTATION, "rack");
    scene.create(&wide).await?;
    let status = scene
        .status_where("wide", "refused for good", |status| status.reason == Some(Reason::CannotFit))
        .await?;
    ensure!(status.phase == GangPhase::Queued && status.bound == 0, "{}", brief(&status));
    let pod = wide.pod_name(3);
    let describe = ["-n", &*scene.namespace, "describe", "pod", &*pod];
    until("kubectl describe pod tells why", GANG_LIMIT, async || {
        let told = scene.bed.cluster().kubectl(&describe).await;
        let told = told.map_err(|error| error.to_string())?;
        match told.contains(Reason::CannotFit.as_str()) {
            true => Ok(()),
            false => Err(told),
        }
    })
    .await?;
    scene.holds_nothing(&wide).await?;
    scene.disband(&wide).await
}

/// Where the gang went, level by level, is known after the extender has restarted: from the Gang, and in short from the
/// annotation of each member.
async fn shows_why_there(scene: &Scene<'_>, within: &Crew) -> Result<()> {
    let before = scene.status("within").await?.compared.context("no comparison in the status")?;
    let levels: Vec<&str> = before.levels.iter().map(|level| level.level.as_str()).collect();
    ensure!(levels == ["node", "rack"], "{levels:?}");
    let other = before.levels[1].others.first().context("no other rack")?;
    let lost = (other.reason, other.value, other.chosen_value);
    ensure!(lost == (DomainLoss::Members, Some(2), Some(3)), "{lost:?}");
    restart_extender(scene.bed, &["--fabric=zone-rack".to_owned()]).await?;
    let after = scene.status("within").await?.compared;
    ensure!(after.as_ref() == Some(&before), "{after:?}");
    let explained = views::explained(scene.bed, &["gang", "within", "-n", &*scene.namespace]).await?;
    for words in ["none of 3 nodes holds the gang", "rack r1: the only one of 2 racks", "2 of 3 members fit"]
    {
        ensure!(explained.contains(words), "{words:?} is not in\n{explained}");
    }
    let pod = scene.pods.get(&within.pod_name(0)).await?;
    let placement = pod.metadata.annotations.unwrap_or_default().remove(PLACEMENT_ANNOTATION);
    let placement: Placement = serde_json::from_str(&placement.context("no annotation")?)?;
    let gang = placement.gang.context("no gang in the annotation")?;
    ensure!(gang.domain == "rack r1" && gang.level.is_some(), "{gang:?}");
    Ok(())
}

/// Nine of ten possible members: three in one rack and six in the other, with neighbouring ranks side by side.
async fn in_slices_by_rank(scene: &Scene<'_>, racks: &Racks<'_>) -> Result<()> {
    let sliced =
        Crew::new("sliced", 9, 2).with(GANG_REQUIRED_LEVEL_ANNOTATION, RACK).with(GANG_SLICE_ANNOTATION, "3");
    // Neither the order of their names nor that in which they are made.
    let rank = |number: usize| number * 2 % 9;
    for number in 0..9 {
        let mut pod = sliced.pod(number)?;
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(GANG_RANK_ANNOTATION.to_owned(), rank(number).to_string());
        scene.create_all([pod]).await?;
    }
    let stays = scene.runs(&sliced).await?;
    let by_rank: BTreeMap<usize, &str> =
        stays.iter().enumerate().map(|(number, stay)| (rank(number), &*stay.node)).collect();
    let nodes: Vec<&str> = by_rank.values().copied().collect();
    let is_alone: Vec<bool> = nodes.iter().map(|node| *node == racks.alone).collect();
    ensure!(
        is_alone.chunks(3).all(|slice| slice.iter().all(|is| *is == slice[0])),
        "a slice lies in two racks: {nodes:?}"
    );
    ensure!(
        is_alone.iter().filter(|is| **is).count() == 3,
        "the racks do not have one and two slices: {nodes:?}"
    );
    let mut runs = nodes.clone();
    runs.dedup();
    ensure!(
        runs.len() == runs.iter().collect::<BTreeSet<_>>().len(),
        "neighbours by rank lie apart: {nodes:?}"
    );
    let decision = scene.status("sliced").await?.decision.context("no decision")?;
    for slot in &decision.reservations {
        let number = (0..9).find(|number| sliced.pod_name(*number) == slot.pod_name);
        let wanted = number.and_then(|number| u32::try_from(rank(number)).ok());
        ensure!(
            slot.rank == wanted && wanted.is_some(),
            "{:?} was given a place as rank {:?}",
            slot.pod_name,
            slot.rank
        );
    }
    scene.disband(&sliced).await
}

/// Two of at most three run at once; the third comes when there is room in their rack, and not for room in another.
async fn grows(scene: &Scene<'_>, racks: &Racks<'_>) -> Result<()> {
    pods::run(&scene.pods, &only_on(pods::sleeper("eight", 8)?, racks.alone)).await?;
    pods::run(&scene.pods, &only_on(pods::sleeper("four", 4)?, racks.small)).await?;
    let elastic = Crew::new("elastic", 3, 4)
        .with(GANG_MIN_ANNOTATION, "2")
        .with(GANG_MAX_ANNOTATION, "3")
        .with(GANG_REQUIRED_LEVEL_ANNOTATION, "rack");
    scene.create(&elastic).await?;
    let status = scene
        .status_where("elastic", "bound with two, one waiting", |status| {
            status.reason == Some(Reason::WaitingForSurplus) && status.bound == 2
        })
        .await?;
    ensure!(status.members == 3 && status.min == 2, "{}", brief(&status));

    // Room in the other rack: a pod that comes now takes some of it, the third member does not.
    scene.delete("eight").await?;
    pods::run(&scene.pods, &only_on(pods::sleeper("probe", 4)?, racks.alone)).await?;
    let status = scene.status("elastic").await?;
    ensure!(status.bound == 2, "{}", brief(&status));

    scene.delete("four").await?;
    scene.status_where("elastic", "grown", |status| status.bound == 3).await?;
    let stays = scene.runs(&elastic).await?;
    let mut nodes: Vec<&str> = stays.iter().map(|stay| &*stay.node).collect();
    nodes.sort_unstable();
    ensure!(nodes == [racks.large, racks.large, racks.small], "it grew into another rack: {nodes:?}");
    let status = scene.status("elastic").await?;
    ensure!(status.reason == Some(Reason::Bound), "{}", brief(&status));
    scene.delete("probe").await?;
    scene.disband(&elastic).await
}

/// Gives a node a label, or takes it away.
async fn label(bed: &Bed, node: &str, key: &str, value: Option<&str>) -> Result<()> {
    let patch = json!({ "metadata": { "labels": { key: value } } });
    Api::<Node>::all(bed.client()).patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// The pod, rather on this node than on others.
fn preferring(mut pod: Pod, node: &str) -> Result<Pod> {
    let there = json!({
        "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "preference": { "matchExpressions": [{ "key": HOSTNAME, "operator": "In", "values": [node] }] },
        }] },
    });
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.affinity = Some(serde_json::from_value(there)?);
    Ok(pod)
}

/// The pod, on this node only.
fn only_on(mut pod: Pod, node: &str) -> Pod {
    if let Some(spec) = &mut pod.spec {
        spec.node_selector = Some([(HOSTNAME.to_owned(), node.to_owned())].into());
    }
    pod
}
