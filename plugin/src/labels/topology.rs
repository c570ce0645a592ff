//! Labels of ours, about what NVIDIA's do not cover: links, NUMA nodes, health, nodes with several products. A fixed few, and two for
//! each product.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::names::labels as key;
use gantry_topology::{Gpu, GpuSet, Machine, Rates};

use super::products::Product;
use super::{Facts, Set, value_with};

/// Most products with labels of their own, the leading ones.
const MOST_PRODUCTS: usize = 8;

pub(super) fn label(set: &mut Set, facts: &Facts<'_>, gpus: &[&Gpu], products: &[Product<'_>]) {
    nvlink(set, &facts.inventory.machine, gpus);
    fabric(set, gpus);
    let numa: BTreeSet<u32> = gpus.iter().filter_map(|gpu| gpu.numa.as_ref()?.iter().next()).collect();
    if !numa.is_empty() {
        set.ours(key::NUMA_NODES, numa.len());
    }
    if facts.watched {
        set.ours(key::HEALTHY, healthy(facts));
    }
    for product in products.iter().take(MOST_PRODUCTS) {
        let Some(model) = product.model else { continue };
        let name = |prefix: &str| {
            // The prefix stays whole.
            let room = super::LONGEST - prefix.len();
            let mut model = value_with(model, "");
            model.truncate(room);
            format!("{prefix}{model}")
        };
        set.ours(&name(key::COUNT_OF), product.count());
        let memory = product.example().and_then(|gpu| gpu.memory_mib);
        if let Some(memory) = memory.filter(|memory| *memory > 0) {
            set.ours(&name(key::MEMORY_OF), memory);
        }
    }
}

/// The NVLinks among these GPUs that are up, also with MIG on.
fn nvlink(set: &mut Set, machine: &Machine, gpus: &[&Gpu]) {
    let islands = islands(machine, gpus.iter().map(|gpu| usize::from(gpu.index)).collect());
    let joined = islands.iter().filter(|island| island.len() > 1).count();
    set.ours(key::NVLINK_ISLANDS, joined);
    let largest = islands.iter().fold(GpuSet::EMPTY, |largest, island| match island.len() > largest.len() {
        true => *island,
        false => largest,
    });
    set.ours(key::NVLINK_SIZE, largest.len());
    if largest.len() < 2 {
        return;
    }
    let versions = largest.iter().filter_map(|gpu| machine.gpus().get(gpu)?.nvlink?.version);
    if let Some(version) = versions.min() {
        set.ours(key::NVLINK_GENERATION, version);
    }
    let rates = Rates::of(machine);
    let bandwidth = |gpu: usize| {
        let direct = largest.iter().map(|peer| u32::from(machine.direct_nvlinks(gpu, peer)));
        let links = direct.sum::<u32>() + u32::from(machine.switch_links(gpu));
        rates.nvlink_of(gpu).times(links).raw
    };
    if let Some(least) = largest.iter().map(bandwidth).min() {
        set.ours(key::NVLINK_BANDWIDTH, least / 1000);
    }
}

/// The sets of GPUs that reach one another over NVLinks, by lowest GPU.
fn islands(machine: &Machine, gpus: GpuSet) -> Vec<GpuSet> {
    let mut left = gpus;
    let mut islands = Vec::new();
    while let Some(first) = left.lowest() {
        let mut island: GpuSet = [first].into_iter().collect();
        let mut grown = true;
        while grown {
            let joined = |gpu: usize| island.iter().any(|of| machine.nvlinks_between(of, gpu) > 0);
            let more: GpuSet = gpus.iter().filter(|gpu| !island.contains(*gpu) && joined(*gpu)).collect();
            grown = !more.is_empty();
            island = island | more;
        }
        left = left - island;
        islands.push(island);
    }
    islands
}

/// The multi-node domain and clique with most GPUs; at equal counts the first by name.
fn fabric(set: &mut Set, gpus: &[&Gpu]) {
    let mut members: BTreeMap<(&str, u32), usize> = BTreeMap::new();
    for fabric in gpus.iter().filter_map(|gpu| gpu.fabric.as_ref()) {
        *members.entry((&fabric.cluster_uuid, fabric.clique)).or_default() += 1;
    }
    let most = members.values().copied().max();
    if let Some(((domain, clique), _)) = members.iter().find(|(_, count)| Some(**count) == most) {
        set.ours(key::FABRIC_DOMAIN, domain);
        set.ours(key::FABRIC_CLIQUE, clique);
    }
}

/// The number of served GPUs without an unhealthy device.
fn healthy(facts: &Facts<'_>) -> usize {
    let devices = &facts.inventory.devices;
    let served: BTreeSet<u8> = devices.iter().map(|device| device.gpu).collect();
    let unhealthy: BTreeSet<u8> =
        devices.iter().filter(|device| !device.health.healthy).map(|device| device.gpu).collect();
    served.difference(&unhealthy).count()
}
