//! More faults of NVIDIA's k8s-device-plugin 0.20.0 as stories: those of shared and cut GPUs, and of its config file.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::peer::{Kubelet, Mig, Node, Plugin, Process, Served, Setting, Sharing};

use crate::faults::{OFF_THE_BUS, Story, healthy, running_on, stories};

/// A double-bit error of memory: of one MIG device's, where the event names it.
const MEMORY: u64 = 48;

/// Every story of shared and partitioned GPUs, and of the config file.
pub(crate) fn all() -> Vec<Story> {
    stories![
        every_replica_of_a_gpu_with_an_xid_is_unhealthy: Fails,
        two_replicas_are_of_two_gpus: Passes,
        a_gpus_xid_reaches_every_mig_device_on_it: Fails,
        an_xid_of_one_mig_device_is_its_own: Fails,
        mig_devices_are_taken_where_others_are_in_use: Fails,
        a_gpu_that_fits_no_single_strategy_costs_itself_alone: Fails,
        a_new_cut_is_served_without_a_restart: Fails,
        a_mistyped_key_is_named: Fails,
        a_bad_config_leaves_the_last_good_one: Fails,
    ]
}

fn shared() -> Setting {
    Setting { sharing: Some(Sharing { replicas: 4, rename: false, one_only: false }), ..Setting::default() }
}

fn told(mig: Mig) -> Setting {
    Setting { mig: Some(mig), ..Setting::default() }
}

/// Eight A100, these of them cut in seven.
fn cut(gpus: std::ops::Range<u8>) -> Result<Node> {
    let node = Node::of("dgx-a100")?;
    for gpu in gpus {
        node.controller().recut(gpu, &["1g.5gb"; 7])?;
    }
    Ok(node)
}

/// The MIG devices of a GPU.
fn slices(node: &Node, gpu: usize) -> Result<Vec<String>> {
    let state = node.controller().state()?;
    let cut = state.layout(&node.hardware().gpus[gpu]).context("not cut")?;
    let compute = cut.instances.iter().flat_map(|instance| &instance.compute);
    Ok(compute.map(|compute| compute.uuid.to_string()).collect())
}

/// NVIDIA's remembers one replica of each GPU; three of four stay healthy.
async fn every_replica_of_a_gpu_with_an_xid_is_unhealthy(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, Node::of("l4-4x-pcie")?, &shared()).await?;
    let mut stream = run.served.watch().await?;
    Served::list_until(&mut stream, |list| healthy(list) == 16).await?;
    run.node.controller().raise_xid(1, OFF_THE_BUS)?;
    let list = Served::list_until(&mut stream, |list| healthy(list) == 12).await?;
    let uuid = run.uuid(1);
    ensure!(list.iter().all(|(id, (healthy, _))| *healthy != id.starts_with(uuid)), "{list:?}");
    Ok(())
}

/// NVIDIA's does so too where as many GPUs are free.
async fn two_replicas_are_of_two_gpus(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, Node::of("l4-4x-pcie")?, &shared()).await?;
    let offered: Vec<String> = run.served.list().await?.into_keys().collect();
    for size in 2..=4 {
        let chosen = run.served.prefer(&offered, &[], size).await?;
        let gpus: BTreeSet<&str> = chosen.iter().filter_map(|id| id.split("::").next()).collect();
        ensure!(gpus.len() == size, "{chosen:?}");
    }
    Ok(())
}

/// NVIDIA's marks one of the seven.
async fn a_gpus_xid_reaches_every_mig_device_on_it(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, cut(0..8)?, &told(Mig::Single)).await?;
    let mut stream = run.served.watch().await?;
    Served::list_until(&mut stream, |list| healthy(list) == 56).await?;
    run.node.controller().raise_xid(2, OFF_THE_BUS)?;
    let list = Served::list_until(&mut stream, |list| healthy(list) == 49).await?;
    ensure!(slices(&run.node, 2)?.iter().all(|uuid| !list[uuid].0), "{list:?}");
    Ok(())
}

/// NVIDIA's drops it for six of the seven.
async fn an_xid_of_one_mig_device_is_its_own(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, cut(0..8)?, &told(Mig::Single)).await?;
    let mut stream = run.served.watch().await?;
    let state = run.node.controller().state()?;
    let cut = state.layout(&run.node.hardware().gpus[3]).context("not cut")?;
    for (number, instance) in (1..).zip(&cut.instances) {
        let compute = instance.compute.first().context("no compute instance")?;
        run.node.controller().raise_xid_in(3, MEMORY, instance.id, compute.id)?;
        let uuid = compute.uuid.to_string();
        let list = Served::list_until(&mut stream, |list| !list[&uuid].0).await?;
        ensure!(healthy(&list) == 56 - number, "{list:?}");
    }
    Ok(())
}

/// To NVIDIA's each MIG device is a bucket of its own, so it breaks whole GPUs at random: it is asked once for each GPU.
async fn mig_devices_are_taken_where_others_are_in_use(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, cut(0..8)?, &told(Mig::Single)).await?;
    for gpu in 0..8 {
        let begun = slices(&run.node, gpu)?;
        let mut offered: Vec<String> = run.served.list().await?.into_keys().collect();
        offered.retain(|id| *id != begun[0]);
        let chosen = run.served.prefer(&offered, &[], 1).await?;
        ensure!(begun.contains(&chosen[0]), "{chosen:?} is not of {begun:?}");
    }
    Ok(())
}

/// NVIDIA's exits, and no GPU of the node is served.
async fn a_gpu_that_fits_no_single_strategy_costs_itself_alone(subject: Plugin) -> Result<()> {
    let run = running_on(&subject, cut(0..7)?, &told(Mig::Single)).await?;
    let list = run.served.list().await?;
    ensure!(healthy(&list) == 49 && !list.contains_key(run.uuid(7)), "{list:?}");
    Ok(())
}

/// NVIDIA's plugin needs a restart after every change.
async fn a_new_cut_is_served_without_a_restart(subject: Plugin) -> Result<()> {
    let node = Node::of("dgx-a100")?;
    node.controller().recut(0, &["3g.20gb", "3g.20gb"])?;
    let mut kubelet = Kubelet::start(&node.plugins())?;
    let process = node.start(&subject, &told(Mig::Mixed))?;
    let mut names = BTreeSet::new();
    while names.len() < 2 {
        names.insert(kubelet.served().await.with_context(|| process.log())?.resource);
    }
    ensure!(names == ["nvidia.com/gpu", "nvidia.com/mig-3g.20gb"].map(str::to_owned).into(), "{names:?}");
    node.controller().recut(0, &["1g.5gb"; 7])?;
    let fresh = kubelet.served().await.with_context(|| process.log())?;
    ensure!(fresh.resource == "nvidia.com/mig-1g.5gb", "{}", fresh.resource);
    let mut stream = fresh.watch().await?;
    Served::list_until(&mut stream, |list| healthy(list) == 7).await?;
    Ok(())
}

/// Waits until the plugin has written something.
async fn said(process: &Process, what: &str) -> Result<()> {
    let reading = async {
        while !process.log().contains(what) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reading)
        .await
        .with_context(|| format!("it never said {what:?}: {}", process.log()))
}

/// NVIDIA's plugin silently ignores an unknown key.
async fn a_mistyped_key_is_named(subject: Plugin) -> Result<()> {
    let node = Node::of("l4-4x-pcie")?;
    let setting = Setting { extra: "flags:\n  migStratgy: mixed\n", ..Setting::default() };
    let mut process = node.start(&subject, &setting)?;
    said(&process, "migStratgy").await?;
    said(&process, "did you mean").await?;
    ensure!(!process.wait()?.success());
    Ok(())
}

/// NVIDIA's stops everything first, finds the mistake then, and exits: the node loses its GPUs.
async fn a_bad_config_leaves_the_last_good_one(subject: Plugin) -> Result<()> {
    let mut run = running_on(&subject, Node::of("l4-4x-pcie")?, &shared()).await?;
    run.node.write_config("version: v1\nsharing: {timeSlicing: {}}\n")?;
    said(&run.process, "resources is missing").await?;
    let list = run.served.list().await?;
    let ids: Vec<String> = list.keys().cloned().collect();
    ensure!(ids.len() == 16, "{list:?}");
    run.served.allocate(&ids[..1]).await?;
    ensure!(run.process.lives()?);
    Ok(())
}
