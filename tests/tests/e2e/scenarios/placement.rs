//! Which node and which GPUs a request lands on, and that the container really got them.

use anyhow::{Context as _, Result, ensure};
use gantry_api::{Placement, names};

use crate::bed::Bed;
use crate::{pods, views};

pub(super) async fn requests_get_best_node_and_set(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-placement").await?;
    let mut free = gpus.all();
    for (turn, size) in [8, 4, 2, 1, 2, 1, 1].into_iter().enumerate() {
        let best = gpus.best_bandwidth(&free, size);
        let pod = pods::run(&api, &pods::sleeper(&format!("{turn}-asks-{size}"), size)?).await?;
        let node = pods::node(&pod);
        let seen = pods::seen(bed.cluster(), &pod, "main").await?;
        let held = pods::held(bed.cluster(), &pod, "main").await?;
        ensure!(seen.len() == size, "asked {size}, the container sees {seen:?}");
        ensure!(seen == pods::granted(&pod)?, "sees {seen:?}, was granted {:?}", pods::granted(&pod)?);
        ensure!(seen == held, "sees {seen:?}, kubelet says {held:?}");
        let reached = gpus.bandwidth(node, &seen)?;
        ensure!(reached == best, "{size} GPUs on {node} reach {reached} MB/s where {best} could be had");
        let chosen = gpus.chosen(&free, node, size)?;
        ensure!(seen == chosen, "{size} GPUs of {node}: {seen:?} instead of {chosen:?}");
        if let Some(left) = free.get_mut(node) {
            left.retain(|device| !seen.contains(device));
        }
    }
    Ok(())
}

/// The Event, the annotation and `gantry explain` of one pod agree, and name a node that lost.
pub(super) async fn bound_pod_shows_why_it_is_there(bed: &Bed) -> Result<()> {
    bed.gpus().await?;
    let api = bed.namespace("e2e-why").await?;
    let pod = pods::run(&api, &pods::sleeper("why", 2)?).await?;
    let node = pods::node(&pod).to_owned();
    let annotations = pod.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get(names::PLACEMENT_ANNOTATION)).context("no placement")?;
    let placement: Placement = serde_json::from_str(text)?;
    let compared = placement.compared.as_ref().context("no other node was compared")?;
    ensure!(compared.nodes == 3, "{placement:?}");
    ensure!(compared.others.iter().all(|other| other.node.as_str() != node), "{placement:?}");
    ensure!(placement.devices.len() == 1 && placement.devices[0].contains("GB/s"), "{placement:?}");
    let sentence = format!("{node}: {}", placement.devices[0]);
    let uid = pod.metadata.uid.as_deref();
    views::event(bed, "e2e-why", ("Pod", "why", uid), "GpusAssigned", &[&sentence]).await?;
    let explained = views::explained(bed, &["pod", "why", "-n", "e2e-why"]).await?;
    ensure!(explained.contains(&placement.devices[0]), "{explained}");
    ensure!(explained.contains(&compared.others[0].to_string()), "{explained}");
    Ok(())
}

pub(super) async fn unschedulable_request_reports_gpu_reason(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-nowhere").await?;
    // One GPU taken on every machine: then no machine has all of its GPUs, though each has most.
    for node in gpus.all().keys() {
        pods::run(&api, &pods::pinned(&format!("takes-{node}"), 1, node)?).await?;
    }
    api.create(&kube::api::PostParams::default(), &pods::sleeper("asks-8", 8)?).await?;
    let said = gantry_e2e::until("a reason for waiting", pods::RUN_LIMIT, async || {
        let pod = api.get("asks-8").await.map_err(|error| error.to_string())?;
        let events = bed.cluster().kubectl(&["-n", "e2e-nowhere", "describe", "pod", "asks-8"]).await;
        let text = events.map_err(|error| error.to_string())?;
        let scheduled = !pods::node(&pod).is_empty();
        if text.contains("GPUs free") || scheduled { Ok((text, scheduled)) } else { Err(text) }
    });
    let (text, scheduled) = said.await?;
    ensure!(!scheduled, "8 GPUs were found where no machine has 8 free");
    ensure!(text.contains("7 of 8 GPUs free, 8 asked"), "{text}");
    Ok(())
}

pub(super) async fn device_nodes_reach_container_by_spec_and_cdi(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let api = bed.namespace("e2e-devices").await?;
    let node = bed.cluster().nodes()[1].name();
    for (strategy, flag) in
        [("device-nodes", "--pass-device-specs"), ("cdi-cri", "--device-list-strategy=cdi-cri")]
    {
        gpus.restart_plugin(bed.cluster(), node, &[flag]).await?;
        let name = format!("by-{strategy}");
        pods::run(&api, &pods::pinned(&name, 2, node)?).await?;
        let listing =
            bed.cluster().kubectl(&["-n", "e2e-devices", "exec", &name, "--", "ls", "/dev"]).await?;
        let numbered = |entry: &&str| {
            entry
                .strip_prefix("nvidia")
                .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()) && !rest.is_empty())
        };
        let found = listing.split_whitespace().filter(numbered).count();
        ensure!(found == 2, "{strategy}: asked 2 GPUs, /dev shows {listing}");
    }
    Ok(())
}
