//! What pods request of their devices: rails of a gang on two nodes, the topology file of exactly a container's GPUs,
//! and a request of a pod that has no devices.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_api::names::{GANG_REQUIRED_RAILS_ANNOTATION, REQUIRED_LINK_ANNOTATION};
use gantry_api::{GangStatus, GpuNode, Reason};
use gantry_e2e::gantry;
use gantry_e2e::hardware::Hardware;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;

use crate::bed::Bed;
use crate::gangs::{Crew, Scene, brief};
use crate::{pods, views};

/// GPUs of a node that has eight, and whose NICs are known.
const MACHINE: &str = "dgx-a100";

pub(super) async fn members_share_rails_and_get_their_topology(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-rails").await?;
    let (gpus, cluster) = (bed.gpus().await?, bed.cluster());
    let nodes = [cluster.nodes()[0].name(), cluster.nodes()[1].name()];
    let topology = ["--nccl-topology".to_owned()];
    let hardware = Hardware::install_in(&cluster.nodes()[0], &gantry::machine_file(MACHINE), "rails")?;
    gpus.serve(cluster, nodes[0], Some(&hardware), &topology, &[("nvidia.com/gpu", 8)]).await?;
    gpus.serve(cluster, nodes[1], None, &topology, &[("nvidia.com/gpu", 8)]).await?;

    // The first GPUs of one node are taken, so the members have to take others than the first on the other node too.
    hold(&scene, "holder", 2, nodes[1]).await?;
    let crew = Crew::new("rails", 2, 6).with(GANG_REQUIRED_RAILS_ANNOTATION, "same");
    scene.create(&crew).await?;
    scene.runs(&crew).await?;
    let status = scene.status("rails").await?;
    ensure!(!status.rails.is_empty(), "{}", brief(&status));

    let mut rails = BTreeSet::new();
    for name in crew.pod_names() {
        let pod = scene.pods.get(&name).await?;
        let own = addresses(bed, &pod).await?;
        let text = output(bed, &pod, "cat $NCCL_TOPO_FILE").await?;
        let listed: BTreeSet<&String> = own.0.iter().filter(|address| text.contains(*address)).collect();
        let foreign: Vec<&String> = own.1.iter().filter(|address| text.contains(*address)).collect();
        ensure!(
            listed.len() == 6 && foreign.is_empty(),
            "{name}: {listed:?}, not its own {foreign:?}: {text}"
        );
        rails.insert(output(bed, &pod, "echo $GANTRY_RAILS").await?);
    }
    ensure!(rails.len() == 1, "members have the rails {rails:?}");
    scene.disband(&crew).await?;
    scene.delete("holder").await?;

    // Half of the GPUs is free on each node, and no two halves have the same rails.
    hold(&scene, "first", 4, nodes[0]).await?;
    hold(&scene, "left", 4, nodes[1]).await?;
    hold(&scene, "second", 4, nodes[1]).await?;
    scene.delete("left").await?;
    let crew = Crew::new("waits", 2, 4).with(GANG_REQUIRED_RAILS_ANNOTATION, "same");
    scene.create(&crew).await?;
    let waits = |status: &GangStatus| status.reason == Some(Reason::InsufficientResources);
    let status = scene.status_where("waits", "waits for rails", waits).await?;
    ensure!(status.bound == 0, "{}", brief(&status));
    // On other rails it would fit.
    let other = Crew::new("fits", 2, 4);
    scene.disband(&crew).await?;
    scene.create(&other).await?;
    scene.runs(&other).await?;
    let crew = other;
    scene.disband(&crew).await
}

pub(super) async fn request_without_devices_is_reported(bed: &Bed) -> Result<()> {
    let scene = Scene::set(bed, "e2e-request-ignored").await?;
    let mut pod = pods::sleeper("plain", 0)?;
    pod.metadata.annotations = Some([(REQUIRED_LINK_ANNOTATION.to_owned(), "nvlink".to_owned())].into());
    scene.pods.create(&PostParams::default(), &pod).await?;
    // It runs all the same.
    pods::running(&scene.pods, "plain").await?;
    let words = [REQUIRED_LINK_ANNOTATION, "nvlink", "nvidia.com/gpu"];
    views::event(bed, &scene.namespace, ("Pod", "plain", None), "RequestIgnored", &words).await?;
    scene.delete("plain").await
}

/// Runs a pod with so many GPUs on a node.
async fn hold(scene: &Scene<'_>, name: &str, gpus: usize, node: &str) -> Result<()> {
    let mut pod = pods::sleeper(name, gpus)?;
    if let Some(spec) = pod.spec.as_mut() {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
    }
    scene.create_all([pod]).await?;
    pods::running(&scene.pods, name).await?;
    Ok(())
}

/// The PCI addresses of the GPUs that a pod was granted, and those of the node's other GPUs.
async fn addresses(bed: &Bed, pod: &Pod) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let granted = pods::granted(pod)?;
    let published: Api<GpuNode> = Api::all(bed.client());
    let machine = published.get(pods::node(pod)).await?.spec.machine;
    let (mut own, mut others) = (BTreeSet::new(), BTreeSet::new());
    for gpu in machine.gpus() {
        let uuid = gpu.uuid.as_ref().context("it has a UUID")?.to_string();
        let address = gpu.bus_id.as_ref().context("it has a PCI address")?.to_string();
        let of = if granted.contains(&uuid) { &mut own } else { &mut others };
        of.insert(address);
    }
    Ok((own, others))
}

/// What a command prints in a pod's container.
async fn output(bed: &Bed, pod: &Pod, command: &str) -> Result<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let argv = ["-n", namespace, "exec", name, "-c", "main", "--", "sh", "-c", command];
    Ok(bed.cluster().kubectl(&argv).await?.trim().to_owned())
}
