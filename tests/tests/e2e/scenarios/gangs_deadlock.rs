//! Two bound gangs on a full cluster have each lost a member, and each holds what the other lacks: one goes as a whole,
//! and the other is whole.

use anyhow::{Result, ensure};
use gantry_api::GangPhase;
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::ListParams;

use super::churn::nothing_is_left;
use super::gangs::with_options;
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::pods;

pub(super) async fn deadlocked_gang_yields_to_the_other(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-stuck").await?;
    with_options(bed, &["--gang-hold=8"], async || {
        // Twenty GPUs in all.
        let (first, second) = (Crew::new("first", 2, 4), Crew::new("second", 2, 4));
        scene.create_all([pods::sleeper("filler", 4)?]).await?;
        pods::running(&scene.pods, "filler").await?;
        for crew in [&first, &second] {
            scene.create(crew).await?;
            scene.runs(crew).await?;
        }
        // Each loses a member. The reservation goes to others after the hold ends.
        for (crew, finder) in [(&first, "finder-a"), (&second, "finder-b")] {
            scene.delete(&crew.pod_name(1)).await?;
            scene.create_all([pods::sleeper(finder, 4)?]).await?;
            pods::running(&scene.pods, finder).await?;
        }
        for crew in [&first, &second] {
            scene.create_all([crew.pod(1)?]).await?;
            scene.phase(&crew.name, GangPhase::Degraded).await?;
        }
        let (whole, other) = until("one of them whole", GANG_LIMIT, async || {
            for (crew, other) in [(&first, &second), (&second, &first)] {
                let status = scene.status(&crew.name).await.map_err(|error| error.to_string())?;
                if status.phase == GangPhase::Bound {
                    return Ok((crew, other));
                }
            }
            Err("both lack a member".to_owned())
        })
        .await?;
        scene.run_on_grants(&whole.pod_names()).await?;
        scene.holds_nothing(other).await?;
        told(bed, &scene, &whole.name, &other.name).await?;
        // Pods without a controller are gone; recreated ones wait for GPUs as a whole gang.
        scene.disband(other).await?;
        scene.create(other).await?;
        scene.phase(&other.name, GangPhase::Queued).await?;
        scene.holds_nothing(other).await?;
        scene.disband(whole).await?;
        scene.phase(&other.name, GangPhase::Bound).await?;
        scene.disband(other).await?;
        for single in ["filler", "finder-a", "finder-b"] {
            scene.delete(single).await?;
        }
        Ok(())
    })
    .await?;
    nothing_is_left(bed).await
}

/// The evicted pod names the gang that it yields to.
async fn told(bed: &Bed, scene: &Scene<'_>, whole: &str, other: &str) -> Result<()> {
    let events: Api<Event> = Api::namespaced(bed.client(), &scene.namespace);
    let note = until("an Event of who gave way", GANG_LIMIT, async || {
        let all = events.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let given = all.items.into_iter().find(|event| {
            let is_pod = event.involved_object.name.as_deref() == Some(format!("{other}-0").as_str());
            is_pod && event.reason.as_deref() == Some("DeadlockResolved")
        });
        given.and_then(|event| event.message).ok_or_else(|| "none".to_owned())
    })
    .await?;
    ensure!(note.contains(&format!("gang {}/{whole}", scene.namespace)), "{note}");
    Ok(())
}
