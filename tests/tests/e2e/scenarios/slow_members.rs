//! A member of a running gang with GPUs that run slower than those of the rest.

use anyhow::{Context, Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_api::{GangStatus, GpuNode};
use gantry_e2e::gantry;
use gantry_e2e::hardware::Hardware;
use kube::Api;

use super::gangs::restart_extender;
use crate::bed::Bed;
use crate::gangs::{Crew, Scene};
use crate::views::{self, Metrics};

/// The clock of one of eight GPUs falls to half, as by a broken fan or power supply. All members of a training job wait for
/// that GPU. Gantry names the pod that has it and touches nothing.
pub(super) async fn slow_member_of_gang_is_named(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = cluster.nodes()[2].name();
    let mut hardware =
        Hardware::install_in(cluster.node(node)?, &gantry::machine_file("a40-8x-bridged"), "slow")?;
    let machine = hardware.machine().gpus().to_vec();
    gpus.serve(cluster, node, Some(&hardware), &[], &[(GPU_RESOURCE, machine.len())]).await?;
    restart_extender(bed, &["--slow-member-after=5".to_owned()]).await?;
    let outcome = async {
        let scene = Scene::set(bed, "e2e-slow").await?;
        let crew = Crew::new("crew", 4, 2);
        let mut members = crew.pods()?;
        for pod in &mut members {
            let selector = [("kubernetes.io/hostname".to_owned(), node.to_owned())];
            pod.spec.as_mut().context("a pod has a spec")?.node_selector = Some(selector.into());
        }
        scene.create_all(members).await?;
        let stays = scene.runs(&crew).await?;
        let before: Vec<_> = stays.iter().map(|stay| stay.devices.clone()).collect();
        let slow = &stays[1];
        let uuid = slow.devices.iter().next().context("a GPU")?;
        let is_slow = |gpu: &gantry_topology::Gpu| gpu.uuid.as_ref().is_some_and(|own| own.as_str() == uuid);
        let gpu = machine.iter().find(|gpu| is_slow(gpu)).context("its GPU")?.index;
        // An A40 reaches 1740 MHz.
        hardware.controller().update_gpu(gpu, |state| state.sm_clock = Some(870))?;

        let numbers = [&*format!("GPU {gpu} of {node} runs at 50 %"), "the other members at 100 %"];
        let about = ("Pod", &*slow.pod, None);
        views::event(bed, &scene.namespace, about, "MemberSlow", &numbers).await?;
        let about = ("Gang", &*crew.name, None);
        views::event(bed, &scene.namespace, about, "MemberSlow", &[&slow.pod, numbers[0]]).await?;
        let series = "gang_slow_members{namespace=\"e2e-slow\"}";
        Metrics::settled(bed, &[(series, 1.0)]).await?;
        let is_shown = |status: &GangStatus| status.conditions.iter().any(|one| one.type_ == "MembersSlow");
        scene.status_where(&crew.name, "has a slow member", is_shown).await?;
        let explained = views::explained(bed, &["gang", &crew.name, "-n", &scene.namespace]).await?;
        ensure!(explained.contains(&format!("slow: {}: {}", slow.pod, numbers[0])), "{explained}");
        let status = Api::<GpuNode>::all(bed.client()).get(node).await?.status.context("a status")?;
        let clocks: Vec<u8> = status.clocks.iter().map(|clock| clock.sm_percent).collect();
        ensure!(clocks.len() == 8 && clocks.iter().filter(|clock| **clock < 100).count() == 1, "{clocks:?}");

        hardware.controller().update_gpu(gpu, |state| state.sm_clock = None)?;
        Metrics::settled(bed, &[(series, 0.0)]).await?;
        scene.status_where(&crew.name, "has no slow member", |status| !is_shown(status)).await?;
        let after: Vec<_> = scene.runs(&crew).await?.into_iter().map(|stay| stay.devices).collect();
        ensure!(before == after, "a slow member was moved: {before:?}, {after:?}");
        scene.disband(&crew).await
    }
    .await;
    restart_extender(bed, &[]).await?;
    outcome
}
