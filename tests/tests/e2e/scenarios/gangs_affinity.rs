//! Gangs with affinity among members: kube-scheduler admits a worker only after its leader is bound, and the leader
//! must not wait for the worker.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::churn::nothing_is_left;
use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::pods;

const ROLE: &str = "e2e.gantry.dev/role";

pub(super) async fn members_with_affinity_follow_siblings(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-near").await?;
    let crew = Crew::new("pair", 3, 2);
    let mut leader = crew.pod(0)?;
    let labels = leader.metadata.labels.get_or_insert_default();
    labels.insert(ROLE.to_owned(), "leader".to_owned());
    // The workers come first, and are asked for again and again while their leader is not there.
    scene.create_all([near_leader(crew.pod(1)?)?, near_leader(crew.pod(2)?)?, leader]).await?;
    scene.runs(&crew).await?;
    let leader = scene.pods.get("pair-0").await?;
    for name in ["pair-1", "pair-2"] {
        let worker = scene.pods.get(name).await?;
        let (there, wanted) = (pods::node(&worker), pods::node(&leader));
        ensure!(there == wanted, "{name} is on {there}, its leader on {wanted}");
    }
    let status = scene.status("pair").await?;
    ensure!(status.bound == 3, "{}", brief(&status));
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// The pod, on a node of a leader only.
fn near_leader(mut pod: Pod) -> Result<Pod> {
    let near = json!({
        "podAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [{
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": { "matchLabels": { ROLE: "leader" } },
        }] },
    });
    let spec = pod.spec.as_mut().context("a pod has a spec")?;
    spec.affinity = Some(serde_json::from_value(near)?);
    Ok(pod)
}
