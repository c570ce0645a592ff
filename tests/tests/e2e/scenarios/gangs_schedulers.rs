//! Gangs whose pods name another scheduler or another profile of kube-scheduler. They reserve nothing and block nothing
//! until the extender gets a request for them; from the first request of that profile on they are ordinary gangs.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use gantry_api::{GangStatus, Reason};
use gantry_e2e::Program;
use serde_json::{Value, json};

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene, name_of};
use crate::{pods, records};

const SCHEDULER: &str = "kube-scheduler";
const EXTENDER: &str = "gantry-extender";
/// The name of the other profile.
const PROFILE: &str = "gpu-profile";

pub(super) async fn foreign_gang_reserves_on_first_request(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-profile").await?;
    let control = bed.cluster().control();
    // Twenty GPUs, of which each gang needs more than half. Theirs is there first.
    let theirs = Crew::new("theirs", 3, 4).placed_by(PROFILE);
    let ours = Crew::new("ours", 3, 4);
    scene.create(&theirs).await?;
    let waits = |status: &GangStatus| status.reason == Some(Reason::WaitingForMembers) && status.min == 3;
    scene.status_where("theirs", "waits for members that another scheduler places", waits).await?;
    scene.create(&ours).await?;
    scene.runs(&ours).await?;
    scene.holds_nothing(&theirs).await?;
    scene.disband(&ours).await?;

    let as_it_comes = control.program(SCHEDULER)?;
    let mut with_profile: Program = as_it_comes.clone();
    let config = with_second_profile(&as_it_comes)?;
    with_profile.args[0] = format!("--config={}", config.display());
    control.daemon(SCHEDULER)?.kill().await?;
    control.run(with_profile).await?;
    let outcome = the_profile_asks(&scene, &theirs).await;
    control.daemon(SCHEDULER)?.kill().await?;
    control.run(as_it_comes).await?;
    outcome?;
    scene.disband(&theirs).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    nothing_is_left(bed).await
}

/// The gang runs once the profile requests it. So does another gang after a restart of the extender, which loses the
/// record of requesting schedulers.
async fn the_profile_asks(scene: &Scene<'_>, theirs: &Crew) -> Result<()> {
    let control = scene.bed.cluster().control();
    scene.runs(theirs).await?;
    let later = Crew::new("later", 2, 4).placed_by(PROFILE);
    scene.create_all([later.pod(0)?]).await?;
    scene
        .status_where("later", "of one member", |status| {
            status.reason == Some(Reason::WaitingForMembers) && (status.members, status.min) == (1, 2)
        })
        .await?;
    control.daemon(EXTENDER)?.kill().await?;
    control.run_again(EXTENDER).await?;
    scene.create_all([later.pod(1)?]).await?;
    scene.runs(&later).await?;
    // What ran when the extender was killed is accounted as before.
    scene.runs(theirs).await?;
    scene.disband(&later).await
}

/// kube-scheduler's default configuration with a second profile.
fn with_second_profile(program: &Program) -> Result<PathBuf> {
    let config = program.args[0].strip_prefix("--config=");
    let config = fs::read_to_string(config.context("kube-scheduler is given its configuration first")?)?;
    let path = std::env::temp_dir().join("gantry-e2e-profiles.yaml");
    let profiles =
        format!("\nprofiles: [{{schedulerName: default-scheduler}}, {{schedulerName: {PROFILE}}}]\n");
    fs::write(&path, config + &profiles)?;
    Ok(path)
}

pub(super) async fn basic_group_pods_are_scheduled_singly(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-basic").await?;
    let group = json!({
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": { "name": "loose" },
        "spec": { "schedulingPolicy": { "basic": {} } },
    });
    super::gangs_integrations::apply(bed, &scene, &group).await?;
    // Nodes of eight, eight and four GPUs: two of three have room.
    for number in 0..3 {
        super::gangs_integrations::apply(bed, &scene, &loose(number)?).await?;
    }
    let two = gantry_e2e::until("two of three have a node", GANG_LIMIT, async || {
        let bound = scene.bound("loose-").await.map_err(|error| error.to_string())?;
        (bound == 2).then_some(()).ok_or_else(|| format!("{bound} have one"))
    });
    two.await?;
    let all = scene.pods.list(&kube::api::ListParams::default()).await?;
    let waiting = all.iter().find(|pod| pods::node(pod).is_empty());
    let waiting = name_of(waiting.context("one waits")?).to_owned();
    scene.pod_is_refused(&waiting).await?;
    let runs = all.iter().find(|pod| !pods::node(pod).is_empty());
    let runs = name_of(runs.context("two run")?).to_owned();
    pods::running(&scene.pods, &runs).await?;
    scene.delete(&runs).await?;
    scene.run_on_grants(&[waiting]).await?;
    ensure!(scene.bound("loose-").await? == 2, "the two that are left have a node");
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    Ok(())
}

fn loose(number: usize) -> Result<Value> {
    let pod = records::recording(pods::sleeper(&format!("loose-{number}"), 8)?, 100_000.0)?;
    let mut pod = serde_json::to_value(&pod)?;
    pod["spec"]["schedulingGroup"] = json!({ "podGroupName": "loose" });
    Ok(pod)
}
