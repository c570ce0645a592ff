//! Members that go: while their gang waits, when they have come to their places, after it was bound, and all of them
//! with their namespace. Never is a gang bound below its minimum for it, and a bound one is repaired as it was asked.

use anyhow::{Context, Result, ensure};
use gantry_api::GangPhase;
use gantry_api::names::{GANG_ARRIVAL_ANNOTATION, GANG_MIN_ANNOTATION, GANG_REPAIR_ANNOTATION};
use gantry_e2e::until;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Api;
use kube::api::{DeleteParams, EvictParams, ListParams, PostParams};
use serde_json::json;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{self, Crew, GANG_LIMIT, Scene, brief, name_of};
use crate::views::Metrics;
use crate::{pods, records};

pub(super) async fn member_lost_in_queue_or_at_barrier(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-leave").await?;
    // Queued: one goes, and the rest is below the minimum again.
    let holder = Crew::new("holder", 5, 4);
    scene.create(&holder).await?;
    scene.runs(&holder).await?;
    let queued = Crew::new("queued", 3, 4);
    scene.create(&queued).await?;
    scene.phase("queued", GangPhase::Queued).await?;
    scene.delete(&queued.pod_name(0)).await?;
    scene.phase("queued", GangPhase::Pending).await?;
    scene.create_all([queued.pod(0)?]).await?;
    scene.phase("queued", GangPhase::Queued).await?;
    scene.holds_nothing(&queued).await?;
    scene.disband(&holder).await?;
    scene.runs(&queued).await?;
    scene.disband(&queued).await?;

    // At the barrier: three have come, the fourth is kept out. One that has come goes, and another comes in its stead.
    let gathered = Crew::new("gathered", 4, 4);
    scene.create_all((0..3).map(|n| gathered.pod(n)).collect::<Result<Vec<_>>>()?).await?;
    scene.create_all([gathered.pod_kept_out(3)?]).await?;
    scene.phase("gathered", GangPhase::Reserved).await?;
    scene.delete(&gathered.pod_name(1)).await?;
    scene.phase("gathered", GangPhase::Pending).await?;
    scene.holds_nothing(&gathered).await?;
    scene.create_all([gathered.pod(1)?]).await?;
    scene.phase("gathered", GangPhase::Reserved).await?;
    // The one that was never there goes too, and one comes that is not kept out.
    scene.delete(&gathered.pod_name(3)).await?;
    scene.create_all([gathered.pod(3)?]).await?;
    scene.runs(&gathered).await?;
    scene.disband(&gathered).await?;
    nothing_is_left(bed).await
}

pub(super) async fn gang_deleted_with_its_namespace(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-doomed").await?;
    let heirs = Scene::set(bed, "e2e-gangs-heirs").await?;
    // Eight GPUs are held, eight are reserved for a member that never arrives, and four are left: too few for the third
    // gang and for the pod that requests all.
    let bound = Crew::new("bound", 2, 4);
    scene.create(&bound).await?;
    scene.runs(&bound).await?;
    let planned = Crew::new("planned", 2, 4).with(GANG_ARRIVAL_ANNOTATION, "300");
    scene.create_all([planned.pod(0)?, planned.pod_kept_out(1)?]).await?;
    scene.phase("planned", GangPhase::Reserved).await?;
    scene.create(&Crew::new("queued", 2, 4)).await?;
    scene.phase("queued", GangPhase::Queued).await?;
    let heir = Crew::new("heir", 5, 4);
    heirs.create(&heir).await?;
    heirs.phase("heir", GangPhase::Queued).await?;

    let namespaces: Api<Namespace> = Api::all(bed.client());
    namespaces.delete(&scene.namespace, &DeleteParams::default()).await?;
    heirs.runs(&heir).await?;
    records::ensure_no_device_twice(&records::read(bed.cluster())?)?;
    let mut nothing_else = vec![("gang_reservations", 0.0), ("gang_reserved_devices", 0.0)];
    nothing_else.extend([
        (r#"gangs{phase="bound"}"#, 1.0),
        (r#"gangs{phase="reserved"}"#, 0.0),
        (r#"gangs{phase="queued"}"#, 0.0),
    ]);
    Metrics::settled(bed, &nothing_else).await?;
    // No controller recreates anything in the namespace, and no reservation is left.
    until("the namespace is gone", GANG_LIMIT, async || match namespaces.get_opt(&scene.namespace).await {
        Ok(None) => Ok(()),
        Ok(Some(namespace)) => Err(format!("{:?}", namespace.status)),
        Err(error) => Err(error.to_string()),
    })
    .await?;
    heirs.disband(&heir).await?;
    nothing_is_left(bed).await
}

pub(super) async fn bound_gang_holds_or_releases_reservation(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-repair").await?;
    // Sixteen and four GPUs: the cluster is full.
    let kept = Crew::new("kept", 4, 4);
    let loose = Crew::new("loose", 2, 2).with(GANG_REPAIR_ANNOTATION, "ignore");
    scene.create(&kept).await?;
    scene.runs(&kept).await?;
    scene.create(&loose).await?;
    scene.runs(&loose).await?;
    let lost = scene.pods.get(&kept.pod_name(2)).await?;
    let (node, devices) = (pods::node(&lost).to_owned(), pods::granted(&lost)?);

    // A single pod that has waited longer than the replacement will does not get the place.
    scene.create_all([pods::sleeper("vulture", 4)?]).await?;
    scene.delete(&kept.pod_name(2)).await?;
    let status = scene.phase("kept", GangPhase::Degraded).await?;
    ensure!(status.bound == 3, "{}", brief(&status));
    // It is refused once more after the reservation ended: whatever its message, it has no node.
    scene.pod_is_refused("vulture").await?;
    ensure!(pods::node(&scene.pods.get("vulture").await?).is_empty(), "it got the place");
    scene.create_all([kept.pod(2)?]).await?;
    scene.phase("kept", GangPhase::Bound).await?;
    let back = pods::running(&scene.pods, &kept.pod_name(2)).await?;
    ensure!(
        pods::node(&back) == node && pods::granted(&back)? == devices,
        "it had {devices:?} of {node}, its replacement {:?} of {}",
        pods::granted(&back)?,
        pods::node(&back)
    );
    scene.run_on_grants(&kept.pod_names()).await?;

    // Of the gang that does not mind, a member's place is anybody's.
    scene.delete(&loose.pod_name(0)).await?;
    scene.create_all([pods::sleeper("finder", 2)?]).await?;
    pods::running(&scene.pods, "finder").await?;
    let still = scene.pods.get(&loose.pod_name(1)).await?;
    ensure!(pods::phase(&still) == "Running", "the other member is disturbed");
    Ok(())
}

pub(super) async fn bound_gang_restarts_as_a_whole(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-restart").await?;
    // A batch Job is a gang only by the annotation of its pods; its controller recreates the pods. Without a limit per
    // index the controller waits longer after each lost pod, 80 s after the fourth. Deleted or evicted pods must not
    // count as failed, because this Job allows no failure; and they must not exit with 0, because the index would then
    // be complete.
    let mut template =
        gangs::template(2, &json!({ GANG_MIN_ANNOTATION: "all", GANG_REPAIR_ANNOTATION: "restart" }))?;
    template["spec"]["restartPolicy"] = json!("Never");
    if let Some(env) = template["spec"]["containers"][0]["env"].as_array_mut() {
        env.push(json!({ "name": "TOLD_TO_END", "value": "143" }));
    }
    let job: Job = serde_json::from_value(json!({
        "metadata": { "name": "epochs" },
        "spec": {
            "parallelism": 4,
            "completions": 4,
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "podFailurePolicy": {
                "rules": [{
                    "action": "Ignore",
                    "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }],
                }],
            },
            "template": template,
        },
    }))?;
    let jobs: Api<Job> = Api::namespaced(bed.client(), &scene.namespace);
    jobs.create(&PostParams::default(), &job).await?;
    let first = four_running(&scene, &[]).await?;
    scene.run_on_grants(&first.iter().map(|pod| name_of(pod).to_owned()).collect::<Vec<_>>()).await?;
    let gone = first.iter().map(uid).collect::<Vec<_>>();
    let one = first.first().map(name_of).context("four pods run")?;
    scene.pods.evict(one, &EvictParams::default()).await?;
    let second = four_running(&scene, &gone).await?;
    scene.run_on_grants(&second.iter().map(|pod| name_of(pod).to_owned()).collect::<Vec<_>>()).await?;
    jobs.delete("epochs", &kube::api::DeleteParams::background()).await?;
    until("the job's pods gone", GANG_LIMIT, async || match scene.pods.list(&ListParams::default()).await {
        Ok(all) if all.items.is_empty() => Ok(()),
        Ok(all) => Err(format!("{} are left", all.items.len())),
        Err(error) => Err(error.to_string()),
    })
    .await?;
    nothing_is_left(bed).await
}

/// Waits until four pods run, none of them one of those named.
async fn four_running(scene: &Scene<'_>, not: &[String]) -> Result<Vec<Pod>> {
    let found = until("four pods running", GANG_LIMIT, async || {
        let all = scene.pods.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let running: Vec<Pod> = all
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter(|pod| pods::phase(pod) == "Running" && !not.contains(&uid(pod)))
            .collect();
        match running.len() {
            4 => Ok(running),
            other => Err(format!("{other} do")),
        }
    });
    Ok(found.await?)
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}
