//! Many pods that come and go: whatever the order, no device is in two containers at once and nothing is left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, ensure};
use gantry_api::{Deviation, GpuNode};
use gantry_e2e::until;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::bed::Bed;
use crate::records::Stay;
use crate::{pods, records};

/// Pods in all, unless `GANTRY_PODS` says otherwise.
const PODS: usize = 100;
/// As many as the machines can hold twice over, so that some always wait.
const AT_ONCE: usize = 40;
const ALL_LIMIT: Duration = Duration::from_secs(600);

pub(super) async fn many_pods_start_and_end(bed: &Bed) -> Result<()> {
    let count = pods::count(PODS)?;
    bed.gpus().await?;
    let api = bed.namespace("e2e-churn").await?;
    let mut random = StdRng::seed_from_u64(2);
    let mut made = 0;
    let mut gone = BTreeSet::new();
    while made < count {
        // In bursts of one size, so that equal requests are admitted side by side.
        let size = [1, 1, 2, 2, 4][random.random_range(0..5)];
        for _ in 0..random.random_range(1..=8_usize).min(count - made) {
            let name = format!("p{made}");
            let seconds = f64::from(random.random_range(1..10_u32)) / 10.0;
            let pod = records::recording(pods::sleeper(&name, size)?, seconds)?;
            api.create(&PostParams::default(), &pod).await?;
            if random.random_ratio(1, 6) {
                gone.insert(name);
            }
            made += 1;
        }
        for name in gone.iter().filter(|_| random.random_ratio(1, 3)) {
            let deleted = api.delete(name, &DeleteParams::default()).await;
            ensure!(deleted.is_ok() || api.get_opt(name).await?.is_none(), "{name} cannot be deleted");
        }
        until("fewer pods at once", ALL_LIMIT, async || {
            let alive = alive(&api).await.map_err(|error| error.to_string())?;
            if alive < AT_ONCE { Ok(()) } else { Err(format!("{alive} are there")) }
        })
        .await?;
    }
    until("all pods over", ALL_LIMIT, async || {
        match alive(&api).await.map_err(|error| error.to_string())? {
            0 => Ok(()),
            some => Err(format!("{some} are there")),
        }
    })
    .await?;

    for pod in api.list(&ListParams::default()).await? {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        ensure!(pods::phase(&pod) == "Succeeded", "{name}: {} ({})", pods::phase(&pod), pods::said(&pod));
        ensure!(pods::granted(&pod).is_ok(), "{name} ran without a grant");
    }
    let stays = records::read(bed.cluster())?;
    ensure!(stays.len() > count - gone.len(), "only {} containers wrote what they got", stays.len());
    records::ensure_no_device_twice(&stays)?;
    deviations_are_accounted_for(bed, &api).await?;
    nothing_is_left(bed).await
}

/// Every pod's container got the grant of its annotation, or swapped it with a pod of the same size (kubelet does not
/// say which pod it allocates for), or the node's plugin has published that it got another set.
pub(super) async fn deviations_are_accounted_for(bed: &Bed, api: &Api<Pod>) -> Result<()> {
    let stays = records::read(bed.cluster())?;
    let published: Api<GpuNode> = Api::all(bed.client());
    let mut other = BTreeMap::new();
    for pod in api.list(&ListParams::default()).await? {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let Some(stay) = stays.get(&name) else { continue };
        let granted = pods::granted(&pod)?;
        if stay.devices != granted {
            other.insert(name, (stay, granted));
        }
    }
    for (name, (stay, granted)) in &other {
        let traded =
            |(with, theirs): &(&Stay, BTreeSet<String>)| with.node == stay.node && *theirs == stay.devices;
        if other.values().any(traded) {
            continue;
        }
        until(format!("the deviation of {name}"), pods::RUN_LIMIT, async || {
            let node = published.get(&stay.node).await.map_err(|error| error.to_string())?;
            let known = node.status.unwrap_or_default().deviations;
            let same = |deviation: &Deviation| {
                let allocated = deviation.allocated.iter().map(ToString::to_string);
                allocated.collect::<BTreeSet<_>>() == stay.devices
            };
            let seen = format!("got {:?}, granted {granted:?}, published {known:?}", stay.devices);
            if known.iter().any(same) { Ok(()) } else { Err(format!("{seen}; all that differ: {other:?}")) }
        })
        .await?;
    }
    Ok(())
}

/// Every device is free again in every account: kubelet's, the plugin's and, shown by a pod that needs a whole machine,
/// the extender's.
pub(super) async fn nothing_is_left(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let published: Api<GpuNode> = Api::all(bed.client());
    for node in bed.cluster().nodes() {
        until(format!("nothing held on {}", node.name()), pods::RUN_LIMIT, async || {
            let held = gantry_e2e::podresources::held(node, "nvidia.com/gpu").await;
            let held = held.map_err(|error| error.to_string())?;
            let object = published.get(node.name()).await.map_err(|error| error.to_string())?;
            let holders = object.status.map(|status| status.holders).unwrap_or_default();
            if held.is_empty() && holders.is_empty() { Ok(()) } else { Err(format!("{held:?}, {holders:?}")) }
        })
        .await?;
    }
    let api = bed.another_namespace("e2e-left").await?;
    // Each on its own machine: one that comes a moment too early would else leave its place to a smaller one.
    for (node, devices) in gpus.all() {
        let mut pod = pods::sleeper(&format!("whole-{node}"), devices.len())?;
        if let Some(spec) = pod.spec.as_mut() {
            spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), node)].into());
        }
        api.create(&PostParams::default(), &pod).await?;
    }
    for node in gpus.all().keys() {
        pods::running(&api, &format!("whole-{node}")).await?;
    }
    Ok(())
}

async fn alive(api: &Api<Pod>) -> Result<usize, kube::Error> {
    let all = api.list(&ListParams::default()).await?;
    Ok(all.iter().filter(|pod| !matches!(pods::phase(pod), "Succeeded" | "Failed")).count())
}
