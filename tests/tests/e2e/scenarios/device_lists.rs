//! How a container gets its devices on the real kubelet: every strategy, either kind of ID, and GPUs of which only some
//! are shared.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry;
use gantry_e2e::hardware::Hardware;
use kube::api::DeleteParams;

use super::modes::{offered, run_on, write_config};
use crate::bed::Bed;
use crate::pods;

/// One of the GPUs is shared under a name of its own.
const ONE_SHARED: &str = "
version: v1
sharing:
  timeSlicing:
    resources:
    - {name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, devices: [1], replicas: 3}
";

/// The folder in which the strategy `volume-mounts` names devices, and the variable's value in place of their list.
const MOUNTS: &str = "/var/run/nvidia-container-devices";

pub(super) async fn devices_reach_container_by_every_strategy(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-device-lists").await?;
    let node = &cluster.nodes()[2];
    let hardware = Hardware::install_in(node, &gantry::machine_file("l4-4x-pcie"), "device-lists")?;
    for strategy in ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "envvar,cdi-annotations"] {
        let args = [format!("--device-list-strategy={strategy}")];
        let offers = [("nvidia.com/gpu", 4)];
        gpus.serve(cluster, node.name(), Some(&hardware), &args, &offers).await?;
        let name = strategy.replace(',', "-");
        let pod = run_on(&api, &name, "nvidia.com/gpu", 2, node.name()).await?;
        let held = pods::held(cluster, &pod, "main").await?;
        ensure!(held.len() == 2, "{strategy}: holds {held:?}");
        // By CDI they are there already, and the specification keeps the runtime from adding them again.
        let by_cdi = strategy.contains("cdi");
        let variable = pods::seen(cluster, &pod, "main").await?;
        let expected = match strategy {
            _ if by_cdi => BTreeSet::from(["void".to_owned()]),
            "volume-mounts" => BTreeSet::from([MOUNTS.to_owned()]),
            _ => held.clone(),
        };
        ensure!(variable == expected, "{strategy}: the variable says {variable:?}, not {expected:?}");
        let mounted = pods::listed(cluster, &pod, MOUNTS).await?;
        let by_mounts = strategy == "volume-mounts";
        ensure!(
            mounted == held && by_mounts || mounted.is_empty() && !by_mounts,
            "{strategy}: holds {held:?}, mounts {mounted:?}"
        );
        let nodes = gpu_nodes(pods::listed(cluster, &pod, "/dev").await?);
        let theirs = nodes_of(&hardware, &held);
        ensure!(
            theirs.len() == 2 && (nodes == theirs && by_cdi || nodes.is_empty() && !by_cdi),
            "{strategy}: /dev has {nodes:?}, and what is held is {theirs:?}"
        );
        // Two of these fit at once: this one ends while the plugin restarts.
        api.delete(&name, &DeleteParams::default().grace_period(1)).await?;
    }
    Ok(())
}

/// An additional device kind: its setting, its device nodes in the container, and its variables.
struct Besides {
    flags: &'static [&'static str],
    nodes: &'static [&'static str],
    variables: &'static [&'static str],
}

const BESIDES: [Besides; 3] = [
    Besides { flags: &["--device-list-strategy=cdi-cri"], nodes: &[], variables: &[] },
    Besides {
        flags: &[
            "--device-list-strategy=envvar,cdi-cri",
            "--imex-channel-ids=0",
            "--gdrcopy-enabled=true",
            "--gds-enabled=true",
            "--mofed-enabled=true",
        ],
        nodes: &["gdrdrv", "infiniband/rdma_cm", "infiniband/uverbs0", CHANNEL, "nvidia-fs0", "nvidia-fs1"],
        variables: &["GDRCOPY=enabled", "GDS=enabled", "IMEX_CHANNELS=0", "MOFED=enabled"],
    },
    Besides {
        flags: &["--pass-device-specs=true", "--imex-channel-ids=0", "--gds-enabled=true"],
        nodes: &[CHANNEL],
        variables: &["GDS=enabled", "IMEX_CHANNELS=0"],
    },
];

const CHANNEL: &str = "nvidia-caps-imex-channels/channel0";

pub(super) async fn companion_devices_are_added_on_request(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-besides").await?;
    let node = &cluster.nodes()[2];
    let hardware = Hardware::install_in(node, &gantry::machine_file("l4-4x-pcie"), "besides")?;
    for name in ["gdrdrv", "infiniband/rdma_cm", "nvidia-fs0", "nvidia-fs1"] {
        hardware.add_device(name)?;
    }
    for (number, besides) in BESIDES.iter().enumerate() {
        let args: Vec<String> = besides.flags.iter().map(|flag| (*flag).to_owned()).collect();
        gpus.serve(cluster, node.name(), Some(&hardware), &args, &[("nvidia.com/gpu", 4)]).await?;
        let name = format!("pod-{number}");
        let pod = run_on(&api, &name, "nvidia.com/gpu", 1, node.name()).await?;
        let mut nodes = pods::listed(cluster, &pod, "/dev").await?;
        nodes.retain(|node| node == "gdrdrv" || node.starts_with("nvidia-fs"));
        for folder in ["infiniband", "nvidia-caps-imex-channels"] {
            let inside = pods::listed(cluster, &pod, &format!("/dev/{folder}")).await?;
            nodes.extend(inside.iter().map(|node| format!("{folder}/{node}")));
        }
        ensure!(nodes.iter().eq(besides.nodes), "{:?}: /dev has {nodes:?}", besides.flags);
        let said = cluster.kubectl(&["-n", "e2e-besides", "exec", &name, "--", "env"]).await?;
        let mut variables: Vec<&str> = said
            .lines()
            .filter_map(|line| line.strip_prefix("NVIDIA_"))
            .filter(|line| !line.starts_with("VISIBLE_DEVICES="))
            .collect();
        variables.sort_unstable();
        ensure!(variables == besides.variables, "{:?}: {variables:?}", besides.flags);
    }
    Ok(())
}

pub(super) async fn kubelet_uses_uuids_and_containers_indices(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-index").await?;
    let node = &cluster.nodes()[2];
    let hardware = Hardware::install_in(node, &gantry::machine_file("l4-4x-pcie"), "index")?;
    let args = ["--device-id-strategy=index".to_owned()];
    gpus.serve(cluster, node.name(), Some(&hardware), &args, &[("nvidia.com/gpu", 4)]).await?;
    let pod = run_on(&api, "pair", "nvidia.com/gpu", 2, node.name()).await?;
    let held = pods::held(cluster, &pod, "main").await?;
    let indices: BTreeSet<String> = hardware
        .machine()
        .gpus()
        .iter()
        .filter(|gpu| gpu.uuid.as_ref().is_some_and(|uuid| held.contains(uuid.as_str())))
        .map(|gpu| gpu.index.to_string())
        .collect();
    let seen = pods::seen(cluster, &pod, "main").await?;
    ensure!(indices.len() == 2 && seen == indices, "sees {seen:?}, holds {held:?}, which are {indices:?}");
    Ok(())
}

pub(super) async fn node_serves_whole_and_shared_gpus(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-some-shared").await?;
    let node = cluster.nodes()[2].name();
    let config = write_config(cluster, node, ONE_SHARED)?;
    let args = [format!("--config-file={}", config.display())];
    let offers = [("nvidia.com/gpu", 3), ("nvidia.com/gpu.shared", 3)];
    gpus.serve(cluster, node, None, &args, &offers).await?;
    let mut shared = BTreeSet::new();
    for turn in 0..3 {
        let pod = run_on(&api, &format!("part-{turn}"), "nvidia.com/gpu.shared", 1, node).await?;
        shared.extend(pods::seen(cluster, &pod, "main").await?);
    }
    ensure!(shared.len() == 1, "three parts of one GPU, not of {shared:?}");
    let whole = run_on(&api, "whole", "nvidia.com/gpu", 3, node).await?;
    let whole = pods::seen(cluster, &whole, "main").await?;
    ensure!(
        whole.len() == 3 && whole.is_disjoint(&shared),
        "whole ones are {whole:?}, the shared one {shared:?}"
    );
    Ok(())
}

pub(super) async fn mig_slices_can_be_shared(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-shared-slices").await?;
    let node = &cluster.nodes()[1];
    let hardware = Hardware::install_in(node, &gantry::machine_file("dgx-a100-mig"), "shared-slices")?;
    let counts = offered(&hardware);
    // Of those that there are several of the fewest: one pod more than there are slices.
    let several = counts.iter().filter(|(name, count)| name.contains("mig-") && *count > 1);
    let fewest = several.min_by_key(|(_, count)| *count).cloned();
    let (resource, count) = fewest.context("the machine has several slices of a profile")?;
    let config = format!(
        "version: v1\nsharing: {{timeSlicing: {{resources: [{{name: {resource}, replicas: 2}}]}}}}\n"
    );
    let config = write_config(cluster, node.name(), &config)?;
    let args = ["--mig-strategy=mixed".to_owned(), format!("--config-file={}", config.display())];
    let offers = [(resource.as_str(), 2 * count)];
    gpus.serve(cluster, node.name(), Some(&hardware), &args, &offers).await?;
    let mut slices = BTreeSet::new();
    for turn in 0..=count {
        let pod = run_on(&api, &format!("part-{turn}"), &resource, 1, node.name()).await?;
        let held = pods::held_of(cluster, &pod, "main", &resource).await?;
        ensure!(
            held.len() == 1 && held.iter().all(|device| device.starts_with("MIG-") && device.contains("::")),
            "kubelet counts replicas of slices, not {held:?}"
        );
        let seen = pods::seen(cluster, &pod, "main").await?;
        ensure!(
            seen.iter().all(|device| device.starts_with("MIG-") && !device.contains("::")),
            "sees {seen:?}"
        );
        slices.extend(seen);
    }
    ensure!(
        slices.len() == count,
        "{} pods on {} of {count} slices: none is shared while one is free",
        count + 1,
        slices.len()
    );
    Ok(())
}

/// The GPUs among the entries of `/dev`.
fn gpu_nodes(mut entries: BTreeSet<String>) -> BTreeSet<String> {
    let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    entries.retain(|entry| entry.strip_prefix("nvidia").is_some_and(is_number));
    entries
}

/// The names in `/dev` of GPUs by their UUIDs.
fn nodes_of(hardware: &Hardware, uuids: &BTreeSet<String>) -> BTreeSet<String> {
    let gpus = hardware.machine().gpus().iter();
    gpus.filter(|gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuids.contains(uuid.as_str())))
        .filter_map(|gpu| Some(format!("nvidia{}", gpu.minor?)))
        .collect()
}
