//! A node for `/api/v1/nodes/{name}`: its GPUs with their holders, and the links between them.

use gantry_map::{GpuMap, NodeMap};
use gantry_topology::Rates;
use gantry_topology::machine::IdList;
use serde::Serialize;

/// Pods that are named of one GPU at most.
const MAX_PODS: usize = 32;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeReport<'m> {
    version: &'m str,
    #[serde(flatten)]
    node: NodeMap,
    /// NUMA nodes with their GPUs, where they are known.
    numa: Vec<Numa<'m>>,
    /// Each pair of GPUs once, the lower index first.
    pairs: Vec<Pair>,
    nics: Vec<Nic<'m>>,
    /// Pods beyond the most that are named of one GPU.
    omitted_pods: usize,
}

#[derive(Serialize)]
struct Numa<'m> {
    name: &'m IdList,
    gpus: Vec<usize>,
}

#[derive(Serialize)]
struct Pair {
    a: usize,
    b: usize,
    /// As `nvidia-smi topo -m` prints it: `NV18`, `PIX`, `SYS`.
    link: String,
    /// GB/s in one direction that a collective library reaches on it.
    gbs: f64,
}

#[derive(Serialize)]
struct Nic<'m> {
    name: &'m str,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa: Option<u16>,
}

/// The report about a node of a version of the view.
pub(super) fn report<'m>(version: &'m str, node: &'m NodeMap) -> NodeReport<'m> {
    let machine = &node.machine;
    let rates = Rates::of(machine);
    let gpus = machine.gpus().len();
    let pairs = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| (a, b)));
    let pairs = pairs.map(|(a, b)| {
        let gbs = f64::from(rates.pair(machine, a, b).effective) / 1e3;
        Pair { a, b, link: machine.link(a, b).to_string(), gbs }
    });
    let numa = machine.numa_nodes().into_iter();
    let numa = numa.filter_map(|(name, gpus)| Some(Numa { name: name?, gpus: gpus.iter().collect() }));
    let omitted = |gpu: &GpuMap| gpu.pods.len().saturating_sub(MAX_PODS);
    let omitted_pods = node.gpus.iter().map(omitted).sum();
    let mut shown = node.clone();
    shown.gpus.iter_mut().for_each(|gpu| gpu.pods.truncate(MAX_PODS));
    NodeReport {
        version,
        node: shown,
        numa: numa.collect(),
        pairs: pairs.collect(),
        nics: machine.nics().iter().map(|nic| Nic { name: &nic.name, numa: nic.numa }).collect(),
        omitted_pods,
    }
}
