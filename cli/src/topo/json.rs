//! The output of `gantry topo --json`. Scripts rely on the names and types of these fields: add, never rename. Unknown
//! values are null, never omitted.

use std::collections::BTreeSet;

use gantry_topology::bandwidth::LinkRate;
use gantry_topology::machine::ComputeInstance;
use gantry_topology::{IdList, Link, Machine, Rates};
use serde::Serialize;

use super::source::{Complaint, SourceData, warnings};

/// The whole document.
#[derive(Debug, Serialize)]
struct Document<'a> {
    name: Option<&'a str>,
    gpus: Vec<Gpu<'a>>,
    nics: Vec<Nic<'a>>,
    /// GPU x GPU: `X`, `NV#` or a path class.
    matrix: Vec<Vec<String>>,
    /// GPU x GPU: effective GB/s in one direction, 0 with itself.
    bandwidth_gbs: Vec<Vec<f64>>,
    /// GPU x NIC: path classes.
    nic_matrix: Vec<Vec<String>>,
    /// GPU x GPU: path classes, also where an NVLink joins the pair; `X` on the diagonal.
    pcie_matrix: Vec<Vec<String>>,
    nvlinks: Vec<Bundle>,
    /// Pairs of GPUs without peer-to-peer access.
    no_peer_access: Vec<[u8; 2]>,
    nvswitch: Option<Switch>,
    numa: Vec<Node<'a>>,
    /// Faults of GPUs.
    health: Option<&'a BTreeSet<Complaint>>,
    /// Contradictions in the machine, and guesses in this document.
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Gpu<'a> {
    index: usize,
    uuid: Option<&'a str>,
    bus_id: Option<&'a str>,
    model: Option<&'a str>,
    memory_mib: Option<u64>,
    compute_capability: Option<&'a str>,
    numa: Option<&'a str>,
    memory_numa: Option<u16>,
    cpus: Option<&'a str>,
    nvlink_version: Option<u8>,
    nvlinks: u32,
    /// What the GPU lacks at the moment, as text.
    degraded: Vec<String>,
    /// The MIG layout; null if the GPU does not support MIG.
    mig: Option<Mig<'a>>,
}

#[derive(Debug, Serialize)]
struct Mig<'a> {
    enabled: bool,
    instances: Vec<Instance<'a>>,
}

/// A GPU instance and its MIG devices.
#[derive(Debug, Serialize)]
struct Instance<'a> {
    id: u32,
    profile: &'a str,
    /// Memory units: the first, and how many.
    start: u8,
    size: u8,
    devices: Vec<MigDevice<'a>>,
}

#[derive(Debug, Serialize)]
struct MigDevice<'a> {
    id: u32,
    profile: &'a str,
    uuid: &'a str,
}

#[derive(Debug, Serialize)]
struct Nic<'a> {
    index: usize,
    name: &'a str,
    device: Option<&'a str>,
    bus_id: Option<&'a str>,
    numa: Option<u16>,
}

/// NVLinks that join two GPUs directly.
#[derive(Debug, Serialize)]
struct Bundle {
    gpus: [u8; 2],
    links: u8,
    /// Effective, in one direction.
    bandwidth_gbs: f64,
    /// By the data sheet, in one direction.
    raw_gbs: f64,
}

/// GPUs that NVSwitches join.
#[derive(Debug, Serialize)]
struct Switch {
    gpus: Vec<usize>,
    /// Links of each of `gpus`.
    links: Vec<u8>,
    /// The group of joined NVSwitches of each of `gpus`; GPUs reach each other only within one.
    islands: Vec<u8>,
    /// Effective, of the GPU with the most links, in one direction.
    bandwidth_gbs: f64,
    raw_gbs: f64,
}

/// GPUs that name the same NUMA nodes.
#[derive(Debug, Serialize)]
struct Node<'a> {
    nodes: &'a str,
    gpus: Vec<usize>,
}

/// The document of a machine.
pub(super) fn document(seen: &SourceData) -> anyhow::Result<String> {
    let mut text = serde_json::to_string_pretty(&of(seen))?;
    text.push('\n');
    Ok(text)
}

fn of(seen: &SourceData) -> Document<'_> {
    let machine = &seen.machine;
    let gpus = machine.gpus().len();
    let nics = machine.nics().len();
    let rates = Rates::of(machine);
    let square = |cell: &dyn Fn(usize, usize) -> String| -> Vec<Vec<String>> {
        (0..gpus).map(|a| (0..gpus).map(|b| cell(a, b)).collect()).collect()
    };
    Document {
        health: seen.complaints.as_ref(),
        warnings: warnings(machine),
        name: Some(machine.name()).filter(|name| *name != "machine"),
        gpus: (0..gpus).filter_map(|index| gpu(machine, index)).collect(),
        nics: machine
            .nics()
            .iter()
            .enumerate()
            .map(|(index, nic)| Nic {
                index,
                name: &nic.name,
                device: nic.device.as_deref(),
                bus_id: nic.bus_id.as_ref().map(|id| id.as_str()),
                numa: nic.numa,
            })
            .collect(),
        matrix: square(&|a, b| machine.link(a, b).to_string()),
        bandwidth_gbs: (0..gpus)
            .map(|a| (0..gpus).map(|b| gbs(rates.pair(machine, a, b).effective)).collect())
            .collect(),
        nic_matrix: (0..gpus)
            .map(|gpu| (0..nics).map(|nic| machine.link(gpu, gpus + nic).to_string()).collect())
            .collect(),
        pcie_matrix: square(&|a, b| match a == b {
            true => Link::Itself.to_string(),
            false => machine.paths().get(a, b).to_string(),
        }),
        nvlinks: machine
            .nvlinks()
            .iter()
            .map(|bundle| {
                let [a, b] = bundle.gpus.map(usize::from);
                let rate = rates.nvlink_of(a).min(rates.nvlink_of(b)).times(u32::from(bundle.links));
                Bundle {
                    gpus: bundle.gpus,
                    links: bundle.links,
                    bandwidth_gbs: gbs(rate.effective),
                    raw_gbs: gbs(rate.raw),
                }
            })
            .collect(),
        no_peer_access: machine.no_peer_access().iter().map(|refusal| refusal.gpus).collect(),
        nvswitch: switch(machine, &rates),
        numa: machine
            .numa_nodes()
            .into_iter()
            .filter_map(|(nodes, gpus)| Some(Node { nodes: nodes?.as_str(), gpus: gpus.iter().collect() }))
            .collect(),
    }
}

fn gpu(machine: &Machine, index: usize) -> Option<Gpu<'_>> {
    let gpu = machine.gpus().get(index)?;
    let direct: u32 =
        (0..machine.gpus().len()).map(|peer| u32::from(machine.direct_nvlinks(index, peer))).sum();
    Some(Gpu {
        index,
        uuid: gpu.uuid.as_ref().map(|uuid| uuid.as_str()),
        bus_id: gpu.bus_id.as_ref().map(|id| id.as_str()),
        model: gpu.model.as_deref(),
        memory_mib: gpu.memory_mib,
        compute_capability: gpu.compute_capability.as_deref(),
        numa: gpu.numa.as_ref().map(IdList::as_str),
        memory_numa: gpu.memory_numa,
        cpus: gpu.cpus.as_ref().map(IdList::as_str),
        nvlink_version: gpu.nvlink.and_then(|ports| ports.version),
        nvlinks: direct + u32::from(machine.switch_links(index)),
        degraded: machine.degradations(index).iter().map(ToString::to_string).collect(),
        mig: gpu.mig.as_ref().map(mig),
    })
}

fn mig_device(compute: &ComputeInstance) -> MigDevice<'_> {
    MigDevice { id: compute.id, profile: &compute.profile, uuid: compute.uuid.as_str() }
}

fn mig(mig: &gantry_topology::Mig) -> Mig<'_> {
    let instances = mig.instances.iter().map(|instance| Instance {
        id: instance.id,
        profile: &instance.profile,
        start: instance.start,
        size: instance.size,
        devices: instance.compute.iter().map(mig_device).collect(),
    });
    Mig { enabled: mig.enabled, instances: instances.collect() }
}

fn switch(machine: &Machine, rates: &Rates) -> Option<Switch> {
    let gpus: Vec<usize> = (0..machine.gpus().len()).filter(|gpu| machine.switch_links(*gpu) > 0).collect();
    let rate = |gpu: &usize| rates.nvlink_of(*gpu).times(u32::from(machine.switch_links(*gpu)));
    let most: LinkRate = gpus.iter().map(rate).max()?;
    Some(Switch {
        links: gpus.iter().map(|gpu| machine.switch_links(*gpu)).collect(),
        islands: gpus.iter().map(|gpu| machine.switch_island(*gpu)).collect(),
        gpus,
        bandwidth_gbs: gbs(most.effective),
        raw_gbs: gbs(most.raw),
    })
}

/// MB/s as GB/s.
fn gbs(mbs: u32) -> f64 {
    f64::from(mbs) / 1000.0
}
