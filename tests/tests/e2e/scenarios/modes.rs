//! What a node offers in addition to whole GPUs: replicas and MIG devices, on the real kubelet, as a pod sees them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Cluster, gantry, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;

use super::node_changes::{ALL, DOUBLE_BIT};
use crate::bed::Bed;
use crate::pods;
use crate::views::Metrics;

/// Two replicas of every GPU, in the config format of NVIDIA's plugin.
const TWICE: &str = "
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 2
";

pub(super) async fn replicas_of_one_gpu_serve_several_pods(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-replicas").await?;
    let node = cluster.nodes()[2].name();
    let config = write_config(cluster, node, TWICE)?;
    let args = [format!("--config-file={}", config.display())];
    gpus.serve(cluster, node, None, &args, &[("nvidia.com/gpu", 8)]).await?;
    // A pod that asks for two replicas wants two GPUs.
    let pair = run_on(&api, "pair", "nvidia.com/gpu", 2, node).await?;
    let seen = pods::seen(cluster, &pair, "main").await?;
    ensure!(seen.len() == 2, "two replicas on {} GPUs: {seen:?}", seen.len());
    ensure!(seen.iter().all(|device| !device.contains("::")), "the container sees replicas: {seen:?}");
    let held = pods::held(cluster, &pair, "main").await?;
    ensure!(held.iter().all(|device| device.contains("::")), "kubelet counts replicas, not {held:?}");
    let mut all = held;
    let mut gpus_seen = seen;
    for turn in 0..6 {
        let pod = run_on(&api, &format!("one-{turn}"), "nvidia.com/gpu", 1, node).await?;
        let held = pods::held(cluster, &pod, "main").await?;
        ensure!(held.is_disjoint(&all), "{held:?} was given out before");
        ensure!(pods::granted(&pod)? == held, "granted {:?}, held {held:?}", pods::granted(&pod)?);
        all.extend(held);
        gpus_seen.extend(pods::seen(cluster, &pod, "main").await?);
    }
    ensure!(all.len() == 8, "8 replicas, {} given out", all.len());
    ensure!(gpus_seen.len() == 4, "replicas of {gpus_seen:?} only");
    refused(bed, &api, "e2e-replicas", &chosen("late", "nvidia.com/gpu", 1, node)?, "0 of 8").await
}

pub(super) async fn mig_mixed_profiles_are_separate_resources(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-mixed").await?;
    let node = &cluster.nodes()[1];
    let hardware = Hardware::install_in(node, &gantry::machine_file("dgx-a100-mig"), "mixed")?;
    let offered = offered(&hardware);
    let slices: Vec<(&str, usize)> = offered.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    ensure!(slices.len() > 2, "the machine has several profiles: {slices:?}");
    let args = ["--mig-strategy=mixed", "--pass-device-specs=true"].map(str::to_owned);
    gpus.serve(cluster, node.name(), Some(&hardware), &args, &slices).await?;
    for (resource, count) in slices {
        let name = resource.replace(['/', '.'], "-").to_lowercase();
        let pod = run_on(&api, &name, resource, 1, node.name()).await?;
        let seen = pods::seen(cluster, &pod, "main").await?;
        let held = pods::held_of(cluster, &pod, "main", resource).await?;
        ensure!(seen == held, "{resource}: sees {seen:?}, kubelet says {held:?}");
        let is_slice = resource.contains("mig-");
        let prefix = if is_slice { "MIG-" } else { "GPU-" };
        ensure!(
            seen.len() == 1 && seen.iter().all(|device| device.starts_with(prefix)),
            "{resource} ({count}): {seen:?}"
        );
        let devices = cluster.kubectl(&["-n", "e2e-mixed", "exec", &name, "--", "ls", "-R", "/dev"]).await?;
        let capabilities = devices
            .split_whitespace()
            .filter(|entry| entry.starts_with("nvidia-cap") && !entry.contains("caps"))
            .count();
        ensure!(
            capabilities == if is_slice { 2 } else { 0 },
            "{resource}: {capabilities} capability devices in {devices}"
        );
    }
    Ok(())
}

pub(super) async fn mig_single_slices_are_gpus(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-single").await?;
    let node = &cluster.nodes()[1];
    let hardware = Hardware::install_in(node, &gantry::machine_file("hgx-h100-mig"), "single")?;
    let args = ["--mig-strategy=single", "--device-list-strategy=cdi-cri"].map(str::to_owned);
    gpus.serve(cluster, node.name(), Some(&hardware), &args, &[("nvidia.com/gpu", 56)]).await?;
    let pod = run_on(&api, "three", "nvidia.com/gpu", 3, node.name()).await?;
    let held = pods::held(cluster, &pod, "main").await?;
    ensure!(held == pods::granted(&pod)?, "held {held:?}");
    ensure!(held.len() == 3 && held.iter().all(|device| device.starts_with("MIG-")), "{held:?}");
    let devices = cluster.kubectl(&["-n", "e2e-single", "exec", "three", "--", "ls", "-R", "/dev"]).await?;
    let capabilities: BTreeSet<&str> = devices
        .split_whitespace()
        .filter(|entry| entry.starts_with("nvidia-cap") && !entry.contains("caps"))
        .collect();
    ensure!(capabilities.len() == 6, "three slices have six capabilities: {capabilities:?}");
    Ok(())
}

pub(super) async fn compute_slices_are_separate_resources(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-parts").await?;
    let node = &cluster.nodes()[1];
    // Of two GPUs a slice of three is parted: one into three parts, one into a part of one and a part of two.
    let mut hardware = Hardware::install_in(node, &gantry::machine_file("h200-8x-mig"), "parts")?;
    let [one, two, whole] =
        ["1c.3g.71gb", "2c.3g.71gb", "3g.71gb"].map(|part| format!("nvidia.com/mig-{part}"));
    let offers = [(one.as_str(), 4), (two.as_str(), 1), (whole.as_str(), 2)];
    let mixed = ["--mig-strategy=mixed", "--pass-device-specs=true"].map(str::to_owned);
    gpus.serve(cluster, node.name(), Some(&hardware), &mixed, &offers).await?;
    are_known(bed, &offers[..2]).await?;
    let mut capabilities = Vec::new();
    for (resource, count) in &offers[..2] {
        let name = resource.replace(['/', '.'], "-");
        let pod = run_on(&api, &name, resource, *count, node.name()).await?;
        let seen = pods::seen(cluster, &pod, "main").await?;
        let held = pods::held_of(cluster, &pod, "main", resource).await?;
        ensure!(
            seen.len() == *count && seen == held && held == pods::granted_of(&pod, resource)?,
            "{resource}: sees {seen:?}, kubelet says {held:?}"
        );
        capabilities.push(pods::listed(cluster, &pod, "/dev/nvidia-caps").await?);
    }
    // Each part has a capability of its own, and all parts of a slice have that of the slice.
    let [ones, twos] = &capabilities[..] else {
        anyhow::bail!("two pods have {capabilities:?}");
    };
    let shared = ones.intersection(twos).count();
    ensure!(ones.len() == 4 + 2 && twos.len() == 1 + 1 && shared == 1, "{ones:?} and {twos:?}");

    // An error of a slice is one of all its parts, and of no other.
    let gpu = hardware.machine().gpus().get(1).and_then(|gpu| gpu.mig.clone());
    let sick = gpu.and_then(|mig| mig.instances.into_iter().find(|slice| slice.compute.len() == 2));
    let sick = sick.context("the second GPU has the slice of two parts")?;
    hardware.controller().raise_xid_in(1, DOUBLE_BIT, sick.id, ALL)?;
    let left = [(one.as_str(), 3), (two.as_str(), 0), (whole.as_str(), 2)];
    gpus.counts(cluster, node.name(), &left).await
}

pub(super) async fn changed_config_applies_and_bad_config_does_not(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let node = cluster.nodes()[2].name();
    let config = write_config(cluster, node, "version: v1\n")?;
    let args = [format!("--config-file={}", config.display())];
    gpus.serve(cluster, node, None, &args, &[("nvidia.com/gpu", 4)]).await?;
    write_config(cluster, node, TWICE)?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 8)]).await?;
    // A misspelled key changes nothing and is reported.
    write_config(cluster, node, &TWICE.replace("timeSlicing", "timeSlycing"))?;
    until("the mistake told", pods::RUN_LIMIT, async || {
        let log = cluster.node(node).map_err(|error| error.to_string())?;
        let log = log.sandbox().folder().join("log/gantry-plugin.log");
        let text = std::fs::read_to_string(&log).map_err(|error| error.to_string())?;
        if text.contains("timeSlycing") && text.contains("timeSlicing") {
            Ok(())
        } else {
            Err("not yet".to_owned())
        }
    })
    .await?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 8)]).await?;
    write_config(cluster, node, &TWICE.replace("replicas: 2", "replicas: 3"))?;
    gpus.counts(cluster, node, &[("nvidia.com/gpu", 12)]).await
}

/// Waits until the extender has so many free devices of these resources. It applies the changes of a GpuNode once a
/// second, and a pod that is bound before has no grant.
async fn are_known(bed: &Bed, offers: &[(&str, usize)]) -> Result<()> {
    for (resource, count) in offers {
        let series = format!("free_sets{{resource=\"{resource}\",devices=\"1\"}}");
        Metrics::settled(bed, &[(&series, f64::from(u32::try_from(*count)?))]).await?;
    }
    Ok(())
}

/// What the strategy "mixed" makes of a machine: counted from the machine file.
pub(super) fn offered(hardware: &Hardware) -> Vec<(String, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for gpu in hardware.machine().gpus() {
        match gpu.mig.as_ref().filter(|mig| mig.enabled) {
            None => *counts.entry("nvidia.com/gpu".to_owned()).or_insert(0) += 1,
            Some(mig) => {
                for compute in mig.instances.iter().flat_map(|instance| &instance.compute) {
                    let name = format!("nvidia.com/mig-{}", compute.profile.replace('+', "."));
                    *counts.entry(name).or_insert(0) += 1;
                }
            }
        }
    }
    counts.into_iter().collect()
}

pub(super) fn write_config(cluster: &Cluster, node: &str, text: &str) -> Result<PathBuf> {
    let folder = cluster.node(node)?.sandbox().folder().join("config");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("config.yaml");
    // Written whole: a reader must not see half of it.
    let beside = folder.join(".new");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, &path)?;
    Ok(path)
}

/// A pod that may go to one node only, by the scheduler's way.
pub(super) fn chosen(name: &str, resource: &str, count: usize, node: &str) -> Result<Pod> {
    let mut pod = pods::sleeper_of(name, resource, count)?;
    if let Some(spec) = &mut pod.spec {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node.to_owned())].into());
    }
    Ok(pod)
}

/// Runs a pod of so many of a resource on a node, by the scheduler's way.
pub(super) async fn run_on(
    api: &Api<Pod>,
    name: &str,
    resource: &str,
    count: usize,
    node: &str,
) -> Result<Pod> {
    pods::run(api, &chosen(name, resource, count, node)?).await
}

/// Makes a pod and waits until `kubectl describe` shows this reason for its waiting. Before that the reason can be
/// another: devices of a pod that was deleted a moment ago are not given back yet.
pub(super) async fn refused(
    bed: &Bed,
    api: &Api<Pod>,
    namespace: &str,
    pod: &Pod,
    reason: &str,
) -> Result<()> {
    let name = pod.metadata.name.clone().unwrap_or_default();
    api.create(&PostParams::default(), pod).await?;
    let placed = until(format!("{name} refused with: {reason}"), pods::RUN_LIMIT, async || {
        let text = bed
            .cluster()
            .kubectl(&["-n", namespace, "describe", "pod", &name])
            .await
            .map_err(|error| error.to_string())?;
        let pod = api.get(&name).await.map_err(|error| error.to_string())?;
        match pods::node(&pod) {
            "" if text.contains(reason) => Ok(None),
            "" => Err(text),
            node => Ok(Some(node.to_owned())),
        }
    })
    .await?;
    ensure!(placed.is_none(), "{name} was placed on {placed:?}");
    Ok(())
}
