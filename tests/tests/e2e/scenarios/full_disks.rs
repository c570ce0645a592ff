//! Full disks of a node: for the CDI specification, for the plugin's socket, and for kubelet's checkpoint. Running pods
//! go on, and new ones start once there is space. The disk is a small tmpfs over the folder.

use anyhow::{Result, ensure};
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::gantry::PLUGIN;
use gantry_e2e::{Node, until};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};

use super::modes::{chosen, run_on};
use crate::bed::Bed;
use crate::daemon_logs::Log;
use crate::pods;
use crate::views::probe;

const PLUGIN_PORT: u16 = 9410;
const CDI: &str = "/run/cdi";
const DEVICE_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
/// Files that fill a disk.
const BALLAST: &str = "ballast";

/// Mounts a small disk over a folder.
async fn mount(node: &Node, folder: &str) -> Result<()> {
    node.exec(&["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "full", folder]).await?;
    Ok(())
}

async fn unmount(node: &Node, folder: &str) -> Result<()> {
    node.exec(&["umount", "--lazy", folder]).await?;
    Ok(())
}

/// Leaves no byte on a disk.
async fn fill(node: &Node, folder: &str) -> Result<()> {
    // Blocks of which none is left over.
    let fill = format!("! dd if=/dev/zero of={folder}/{BALLAST} bs=4k 2>/dev/null");
    node.exec(&["sh", "-c", &fill]).await?;
    Ok(())
}

/// Leaves no file on a disk that could be made.
async fn fill_with_files(node: &Node, folder: &str) -> Result<()> {
    let fill = format!("n=0; while : 2>/dev/null > {folder}/{BALLAST}-$n; do n=$((n + 1)); done");
    node.exec(&["bash", "-c", &fill]).await?;
    Ok(())
}

/// Makes space again.
async fn clear(node: &Node, folder: &str) -> Result<()> {
    node.exec(&["sh", "-c", &format!("rm -f {folder}/{BALLAST}*")]).await?;
    Ok(())
}

pub(super) async fn full_disk_delays_cdi_specification(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let node = &bed.cluster().nodes()[2];
    mount(node, CDI).await?;
    // It watches the folder below the mount until it starts again.
    node.restart("containerd").await?;
    let outcome = without_space_for_cdi(bed, node).await;
    unmount(node, CDI).await?;
    node.restart("containerd").await?;
    bed.cluster().wait_until_ready().await?;
    gpus.restore(bed.cluster()).await?;
    outcome
}

async fn without_space_for_cdi(bed: &Bed, node: &Node) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-full-cdi").await?;
    let all = gpus.all().get(node.name()).map_or(0, |devices| devices.len());
    let log = Log::of(&node.program(PLUGIN)?);
    fill(node, CDI).await?;
    gpus.alter_plugin(cluster, node.name(), &["--device-list-strategy=cdi-cri"]).await?;
    log.has("the CDI specification").await?;
    log.has("cannot be written").await?;
    probe(node.sandbox(), PLUGIN_PORT, "/readyz", 503, "the CDI specification").await?;
    clear(node, CDI).await?;
    gpus.counts(cluster, node.name(), &[(GPU_RESOURCE, all)]).await?;
    // Its devices are in the last specification.
    fill(node, CDI).await?;
    let pod = run_on(&api, "of-last", GPU_RESOURCE, all, node.name()).await?;
    let devices = pods::listed(cluster, &pod, "/dev").await?;
    ensure!(devices.contains("nvidia0"), "{devices:?}");
    api.delete("of-last", &DeleteParams::default()).await?;
    Ok(())
}

/// kubelet and the plugin have their sockets, and kubelet its checkpoint, in one folder.
pub(super) async fn full_disk_delays_registration_and_fails_pods(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let node = &bed.cluster().nodes()[2];
    restart_on(node, mount(node, DEVICE_PLUGINS)).await?;
    let outcome = without_space_for_kubelet(bed, node).await;
    clear(node, DEVICE_PLUGINS).await?;
    // kubelet forgets what it gave out on that disk.
    bed.clear_namespaces().await?;
    restart_on(node, unmount(node, DEVICE_PLUGINS)).await?;
    node.sandbox().run_again(PLUGIN).await?;
    bed.cluster().wait_until_ready().await?;
    gpus.restore(bed.cluster()).await?;
    outcome
}

/// Exchanges the disk below kubelet. The plugin is left stopped.
async fn restart_on(node: &Node, change: impl Future<Output = Result<()>>) -> Result<()> {
    for program in [PLUGIN, "kubelet"] {
        node.program(program)?.stop().await?;
    }
    change.await?;
    node.sandbox().run_again("kubelet").await?;
    until("kubelet's socket", pods::RUN_LIMIT, async || {
        node.exec(&["test", "-S", &format!("{DEVICE_PLUGINS}/kubelet.sock")]).await
    })
    .await?;
    Ok(())
}

async fn without_space_for_kubelet(bed: &Bed, node: &Node) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-full-kubelet").await?;
    let all = gpus.all().get(node.name()).map_or(0, |devices| devices.len());
    let log = Log::of(&node.program(PLUGIN)?);
    fill_with_files(node, DEVICE_PLUGINS).await?;
    node.sandbox().run_again(PLUGIN).await?;
    log.has("cannot serve on the socket, trying again").await?;
    log.has("No space left on device").await?;
    clear(node, DEVICE_PLUGINS).await?;
    gpus.counts(cluster, node.name(), &[(GPU_RESOURCE, all)]).await?;

    let before = run_on(&api, "before", GPU_RESOURCE, 1, node.name()).await?;
    let seen = pods::seen(cluster, &before, "main").await?;
    fill(node, DEVICE_PLUGINS).await?;
    api.create(&PostParams::default(), &chosen("fails", GPU_RESOURCE, 1, node.name())?).await?;
    ensure!(pods::ended(&api, "fails").await? == "Failed", "it runs");
    let why = pods::said(&api.get("fails").await?);
    ensure!(why.contains("UnexpectedAdmissionError") && why.contains("no space left"), "{why}");
    is_running(bed, &api, &seen).await?;
    clear(node, DEVICE_PLUGINS).await?;
    let after = run_on(&api, "after", GPU_RESOURCE, all - 1, node.name()).await?;
    ensure!(
        pods::held(cluster, &after, "main").await? == pods::granted(&after)?,
        "other devices than granted"
    );
    is_running(bed, &api, &seen).await
}

/// The pod that ran before still does, with its devices.
async fn is_running(bed: &Bed, api: &Api<Pod>, seen: &std::collections::BTreeSet<String>) -> Result<()> {
    let before = pods::running(api, "before").await?;
    ensure!(pods::seen(bed.cluster(), &before, "main").await? == *seen, "it has other devices");
    Ok(())
}
