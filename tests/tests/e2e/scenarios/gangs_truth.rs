//! What gangs are refused for is true, and the first cause comes first: a role that no node can hold, a spread
//! constraint that wants more domains than there are, and plugins that are not registered with kubelet.

use anyhow::{Context, Result, ensure};
use gantry_api::{Gang, GangStatus, Reason};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::churn::nothing_is_left;
use super::gangs_integrations::{any_fields, apply};
use crate::bed::Bed;
use crate::gangs::{Crew, GANG_LIMIT, Scene};
use crate::views::{self, Table, ready_is};
use crate::{pods, records};

/// A folder in which no kubelet listens.
const NO_KUBELET: &str = "--device-plugin-dir=/run/no-kubelet";

/// Task `big` needs one pod of nine GPUs, and no node has nine.
pub(super) async fn role_that_never_fits_is_named(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-never").await?;
    let volcano = any_fields("scheduling.volcano.sh", "v1beta1", "PodGroup");
    bed.cluster().kubectl_with_input(&["apply", "-f", "-"], &volcano.to_string()).await?;
    until("PodGroups of Volcano", GANG_LIMIT, async || {
        bed.cluster().kubectl(&["get", "podgroups.scheduling.volcano.sh", "-A"]).await
    })
    .await?;
    let group = json!({
        "apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": { "name": "rc" },
        "spec": { "minMember": 2, "minTaskMember": { "small": 1, "big": 1 } },
    });
    apply(bed, &scene, &group).await?;
    let pod = |role: &str, number: usize, gpus: usize| -> Result<Pod> {
        let mut pod = records::recording(pods::sleeper(&format!("{role}-{number}"), gpus)?, 100_000.0)?;
        let marks = json!({ "scheduling.k8s.io/group-name": "rc", "volcano.sh/task-spec": role });
        pod.metadata.annotations = serde_json::from_value(marks)?;
        Ok(pod)
    };
    for number in 0..3 {
        scene.create_all([pod("small", number, 1)?, pod("big", number, 9)?]).await?;
    }
    let status = refused(&scene, Reason::CannotFit).await?;
    ensure!(status.message == "role big needs 1 member of 9 GPUs; no node has 9 GPUs", "{}", status.message);
    let report = report(&scene, &status.name).await?;
    let widest = widest(&report)?;
    ensure!(widest["fits"] == 1 && widest["must"] == 2 && widest["empty"] == 1, "{report}");
    // Of the other role kube-scheduler itself says that no node has nine.
    scene.pod_waits("small-0", Reason::CannotFit).await?;
    for pod in scene.pods.list(&ListParams::default()).await? {
        scene.delete(crate::gangs::name_of(&pod)).await?;
    }
    nothing_is_left(bed).await
}

/// Three nodes are three domains: `minDomains` is what fails, not `maxSkew`, which 2+1+1 would keep.
pub(super) async fn min_domains_is_named_as_the_constraint(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-domains").await?;
    let crew = Crew::new("md", 4, 1).labelled("g", "md");
    let spread = json!([{
        "maxSkew": 1, "minDomains": 4, "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule", "labelSelector": { "matchLabels": { "g": "md" } },
    }]);
    let mut members = crew.pods()?;
    for pod in &mut members {
        let spec = pod.spec.as_mut().context("a pod has a spec")?;
        spec.topology_spread_constraints = serde_json::from_value(spread.clone())?;
    }
    scene.create_all(members).await?;
    let status = refused(&scene, Reason::CannotFit).await?;
    ensure!(status.message.contains("minDomains 4"), "{}", status.message);
    let report = report(&scene, "md").await?;
    let widest = widest(&report)?;
    ensure!(widest["fits"] == 3 && widest["must"] == 4, "{report}");
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// All GPUs are idle, and two of three plugins are not registered with kubelet.
pub(super) async fn unregistered_plugins_are_the_first_cause(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-gangs-unready").await?;
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let nodes = [cluster.nodes()[0].name(), cluster.nodes()[1].name()];
    for node in nodes {
        gpus.alter_plugin(cluster, node, &[NO_KUBELET]).await?;
    }
    for node in nodes {
        views::gpu_node(bed, node, "is not registered", ready_is(Reason::NotRegistered)).await?;
        let table = Table::get(bed, "default", "gpunodes").await?;
        ensure!(table.cell(node, "READY")? == "False", "{table:?}");
        ensure!(table.cell(node, "REASON")? == Reason::NotRegistered.as_str(), "{table:?}");
    }
    let crew = Crew::new("idle", 2, 8);
    scene.create(&crew).await?;
    let status = refused(&scene, Reason::PluginNotReady).await?;
    ensure!(status.message.contains(Reason::NotRegistered.as_str()), "{}", status.message);
    gpus.restore(cluster).await?;
    scene.runs(&crew).await?;
    scene.disband(&crew).await?;
    nothing_is_left(bed).await
}

/// Waits until the only gang of a namespace has this reason.
async fn refused(scene: &Scene<'_>, reason: Reason) -> Result<GangStatus> {
    let gangs: &Api<Gang> = &scene.gangs;
    let refused = until(format!("a gang of {} shows {reason}", scene.namespace), GANG_LIMIT, async || {
        let gangs = gangs.list(&ListParams::default()).await.map_err(|error| error.to_string())?;
        let statuses: Vec<GangStatus> = gangs.items.into_iter().filter_map(|gang| gang.status).collect();
        match &statuses[..] {
            [status] if status.reason == Some(reason) => Ok(status.clone()),
            other => Err(format!("{other:?}")),
        }
    });
    Ok(refused.await?)
}

async fn report(scene: &Scene<'_>, gang: &str) -> Result<Value> {
    let text = views::explained(scene.bed, &["gang", gang, "-n", &scene.namespace, "--json"]).await?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// What `gantry explain gang` tried in the whole cluster.
fn widest(report: &Value) -> Result<&Value> {
    let levels = report["tried"]["levels"].as_array();
    levels.and_then(|levels| levels.last()).with_context(|| format!("no level in {report}"))
}
