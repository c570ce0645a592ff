//! Definitions and policies that do not fit the daemons: of another namespace, missing, or older. GPU pods or gangs wait
//! until the right ones are applied, without a restart.

use anyhow::{Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{GangPhase, Reason};
use gantry_e2e::gantry::{EXTENDER, NAMESPACE, PLUGIN, manifests};
use gantry_e2e::until;
use serde_json::json;

use super::churn::nothing_is_left;
use super::gangs::restart_extender;
use super::modes::{chosen, refused, run_on};
use crate::bed::Bed;
use crate::daemon_logs::Log;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::pods;
use crate::views::{gpu_node, probe, ready_is};

const EXTENDER_PORT: u16 = 8011;

/// guard.yaml names another namespace than the extender's.
pub(super) async fn guard_of_other_namespace_refuses_grants(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-other-guard").await?;
    let crew = Crew::new("refused", 2, 1);
    let guard = std::fs::read_to_string(manifests().join("guard.yaml"))?;
    let other = guard.replace(&format!("serviceaccount:{NAMESPACE}:"), "serviceaccount:elsewhere:");
    let apply = ["apply", "-f", "-"];
    bed.cluster().kubectl_with_input(&apply, &other).await?;
    let outcome = refused_by_guard(&scene, &crew).await;
    bed.cluster().kubectl_with_input(&apply, &guard).await?;
    let single = outcome?;
    pods::running(&scene.pods, &single).await?;
    scene.runs(&crew).await?;
    scene.delete(&single).await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// Returns the pod that is not bound.
async fn refused_by_guard(scene: &Scene<'_>, crew: &Crew) -> Result<String> {
    let mut single = String::new();
    // A policy is in effect some time after it was applied: pods are bound until then.
    for number in 0.. {
        single = format!("single-{number}");
        scene.create_all([pods::sleeper(&single, 1)?]).await?;
        let is_bound = until(format!("{single} bound or refused"), GANG_LIMIT, async || {
            let args = ["-n", &scene.namespace, "describe", "pod", &single];
            let text = scene.bed.cluster().kubectl(&args).await.map_err(|error| error.to_string())?;
            let pod = scene.pods.get(&single).await.map_err(|error| error.to_string())?;
            let is_bound = !pods::node(&pod).is_empty();
            let is_refused = text.contains("are written by gantry-extender alone");
            if is_bound || is_refused { Ok(is_bound) } else { Err(text) }
        })
        .await?;
        if !is_bound {
            break;
        }
        scene.delete(&single).await?;
    }
    scene.create(crew).await?;
    // The status of the Gang is not written either.
    scene.pod_waits(&crew.pod_name(0), Reason::Backoff).await?;
    scene.holds_nothing(crew).await?;
    Ok(single)
}

/// The definition of Gangs has no decisions, as one of an earlier release.
pub(super) async fn older_definition_of_gangs_holds_gangs_back(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-old-gangs").await?;
    let crew = Crew::new("undecided", 2, 1);
    let decision = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/decision";
    let removal = json!([{ "op": "remove", "path": decision }]).to_string();
    let patch = ["patch", "crd", "gangs.gantry.dev", "--type=json", "-p", &removal];
    bed.cluster().kubectl(&patch).await?;
    let outcome = async {
        until("decisions are not defined", GANG_LIMIT, async || {
            match bed.cluster().kubectl(&["explain", "gangs.status.decision"]).await {
                Ok(text) => Err(text),
                Err(_) => Ok(()),
            }
        })
        .await?;
        scene.create(&crew).await?;
        let status = scene.phase(&crew.name, GangPhase::Backoff).await?;
        ensure!(
            status.message.contains("does not keep decisions; apply manifests/crds.yaml"),
            "{}",
            status.message
        );
        scene.holds_nothing(&crew).await?;
        scene.create_all([pods::sleeper("single", 1)?]).await?;
        pods::running(&scene.pods, "single").await?;
        anyhow::Ok(())
    }
    .await;
    apply_definitions(bed).await?;
    outcome?;
    scene.runs(&crew).await?;
    scene.delete("single").await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// Without the definition of GpuNodes nothing is known of any GPU.
pub(super) async fn missing_definition_of_gpu_nodes_is_awaited(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let (cluster, control) = (bed.cluster(), bed.cluster().control());
    let namespace = "e2e-no-gpunodes";
    let api = bed.namespace(namespace).await?;
    let node = &cluster.nodes()[2];
    let before = run_on(&api, "before", GPU_RESOURCE, 1, node.name()).await?;
    let log = Log::of(&node.program(PLUGIN)?);
    cluster.kubectl(&["delete", "crd", "gpunodes.gantry.dev"]).await?;
    let outcome = async {
        log.has("cannot publish the GpuNode").await?;
        let extender = Log::of(&control.daemon(EXTENDER)?);
        restart_extender(bed, &[]).await?;
        extender.has("watch failed, trying again").await?;
        probe(control, EXTENDER_PORT, "/readyz", 503, "not all listed yet").await?;
        refused(bed, &api, namespace, &chosen("waits", GPU_RESOURCE, 1, node.name())?, "503").await?;
        let still = pods::running(&api, "before").await?;
        ensure!(still.metadata.uid == before.metadata.uid, "it was disturbed");
        anyhow::Ok(())
    }
    .await;
    apply_definitions(bed).await?;
    for node in cluster.nodes() {
        gpu_node(bed, node.name(), "serves", ready_is(Reason::Serving)).await?;
    }
    outcome?;
    let waited = pods::running(&api, "waits").await?;
    ensure!(
        pods::seen(cluster, &waited, "main").await? == pods::granted(&waited)?,
        "other devices than granted"
    );
    Ok(())
}

async fn apply_definitions(bed: &Bed) -> Result<()> {
    let definitions = manifests().join("crds.yaml").display().to_string();
    bed.cluster().kubectl(&["apply", "-f", &definitions]).await?;
    Ok(())
}
