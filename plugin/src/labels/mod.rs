//! The node's labels: those of NVIDIA's gpu-feature-discovery under `nvidia.com/`, and ours under `gantry.dev/`. [`labels`]
//! computes them, purely; [`Labeller`] keeps them written. A label that cannot be written stops nothing else.
//!
//! ```text
//! inventory, config, host facts -> labels() -> NodeFeature object | features.d file | the Node itself
//! ```
//!
//! Equal facts give equal labels: nothing depends on the order in which anything was found. `docs/labels.md` lists every key.

mod host;
mod resource;
mod run;
pub mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use gantry_api::names::labels as key;
use gantry_config::Config;
use gantry_topology::{Gpu, GpuSet, Host as Software, Machine, Rates};
use resource::Product;

use crate::inventory::Inventory;
use crate::offer::{drives_a_screen, leaves};

pub use host::{Host, HostDriver, HostOptions, PciClass, Vgpu};
pub use run::{Access, Identity, Labeller, LabelsArgs, Place, Settings, Target};

/// Domain of the labels that NVIDIA's gpu-feature-discovery writes.
const NVIDIA: &str = "nvidia.com";

/// The input of [`labels`].
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// GPUs and links, and the devices that kubelet is offered.
    pub inventory: &'a Inventory,
    /// How MIG devices are advertised and devices shared.
    pub config: &'a Config,
    /// What NVML does not report.
    pub host: &'a Host,
    /// Whether the devices' health is watched; otherwise no label is about health.
    pub watched: bool,
    /// Unix time of `nvidia.com/gfd.timestamp`; `None` for no such label.
    pub timestamp: Option<i64>,
}

/// The labels of a node. A node without GPUs that its lists allow has only the timestamp and the labels about the host of virtual GPUs;
/// gpu-feature-discovery does not label the machine type of such a node either.
pub fn labels(facts: &Facts<'_>) -> Labels {
    let mut set = Set::default();
    if let Some(timestamp) = facts.timestamp {
        set.nvidia("gfd.timestamp", timestamp);
    }
    label_vgpu(&mut set, facts.host);
    let machine = &facts.inventory.machine;
    // A GPU that the lists exclude is ignored: a pod that a label attracts would not get it.
    let gpus = machine.gpus().iter();
    let gpus = gpus.filter(|gpu| leaves(facts.config, gpu) && !drives_a_screen(gpu));
    let gpus: Vec<&Gpu> = gpus.collect();
    if gpus.is_empty() {
        return set.0;
    }
    label_machine_type(&mut set, facts.host);
    label_versions(&mut set, machine.host());
    label_gpus(&mut set, &gpus, facts.host);
    let products = resource::all(&gpus);
    resource::label(&mut set, facts, &products);
    label_topology(&mut set, facts, &gpus, &products);
    set.0
}

/// The labels so far.
#[derive(Debug, Default)]
struct Set(Labels);

impl Set {
    /// Sets a label of NVIDIA's.
    fn nvidia(&mut self, name: &str, text: impl ToString) {
        self.put(NVIDIA, name, text);
    }

    /// Removes a label of NVIDIA's, if there is one.
    fn without_nvidia(&mut self, name: &str) {
        self.0.remove(&LabelName::new(NVIDIA, name));
    }

    /// Sets a label of ours.
    fn ours(&mut self, name: &str, text: impl ToString) {
        self.put(gantry_api::names::GROUP, name, text);
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "numbers and texts alike, without a sign at every call"
    )]
    fn put(&mut self, domain: &str, name: &str, text: impl ToString) {
        self.0.insert(LabelName::new(domain, name), value(&text.to_string()));
    }
}

fn label_machine_type(set: &mut Set, host: &Host) {
    // Firmware may use characters that no label may have, or a dash alone.
    let name = host.machine_type.as_deref().unwrap_or_default();
    let machine = match value(name) {
        label if label.is_empty() => "unknown".to_owned(),
        label => label,
    };
    set.nvidia("gpu.machine", machine);
}

/// That GPUs are virtual, and the driver of their host.
fn label_vgpu(set: &mut Set, host: &Host) {
    let Some(vgpu) = &host.vgpu else { return };
    set.nvidia("vgpu.present", true);
    if let Some(driver) = &vgpu.driver {
        set.nvidia("vgpu.host-driver-version", &driver.version);
        set.nvidia("vgpu.host-driver-branch", &driver.branch);
    }
}

/// Driver and CUDA version, each also under the older name. A version without two or three parts gets only the full label; NVIDIA's
/// program exits on one.
fn label_versions(set: &mut Set, software: &Software) {
    if let Some(driver) = &software.driver {
        let parts: Vec<&str> = driver.split('.').collect();
        if let [major, minor, rest @ ..] = parts.as_slice()
            && rest.len() <= 1
        {
            let revision = rest.first().copied().unwrap_or_default();
            for (name, older, text) in
                [("major", "major", *major), ("minor", "minor", *minor), ("revision", "rev", revision)]
            {
                set.nvidia(&format!("cuda.driver-version.{name}"), text);
                set.nvidia(&format!("cuda.driver.{older}"), text);
            }
        }
        set.nvidia("cuda.driver-version.full", driver);
    }
    if let Some((cuda, (major, minor))) =
        software.cuda.as_ref().and_then(|cuda| Some((cuda, cuda.split_once('.')?)))
    {
        for (name, text) in [("major", major), ("minor", minor)] {
            set.nvidia(&format!("cuda.runtime-version.{name}"), text);
            set.nvidia(&format!("cuda.runtime.{name}"), text);
        }
        set.nvidia("cuda.runtime-version.full", cuda);
    }
}

/// The labels of all these GPUs together.
fn label_gpus(set: &mut Set, gpus: &[&Gpu], host: &Host) {
    let capable = gpus.iter().any(|gpu| gpu.mig.is_some());
    set.nvidia("mig.capable", capable);
    // NVIDIA's MPS daemon selects its nodes by it; this plugin does not serve MPS.
    set.nvidia("mps.capable", false);
    set.nvidia("gpu.mode", mode(gpus, host));
    if let Some(clique) = clique(gpus) {
        set.nvidia("gpu.clique", clique);
    }
}

/// Compute or graphics, if it is the same for all GPUs.
fn mode(gpus: &[&Gpu], host: &Host) -> &'static str {
    let classes: BTreeSet<Option<PciClass>> =
        gpus.iter().map(|gpu| host.classes.get(gpu.bus_id.as_ref()?).copied()).collect();
    match classes.into_iter().collect::<Vec<_>>().as_slice() {
        [Some(PciClass::Display)] => "graphics",
        [Some(PciClass::Compute)] => "compute",
        _ => "unknown",
    }
}

/// The multi-node NVLink domain and clique that all GPUs in any agree on.
fn clique(gpus: &[&Gpu]) -> Option<String> {
    let fabrics: BTreeSet<(&str, u32)> = gpus
        .iter()
        .filter_map(|gpu| gpu.fabric.as_ref())
        .map(|fabric| (fabric.cluster_uuid.as_str(), fabric.clique))
        .collect();
    match fabrics.into_iter().collect::<Vec<_>>().as_slice() {
        [(domain, clique)] => Some(format!("{domain}.{clique}")),
        _ => None,
    }
}

/// Longest value, and longest name without its domain (Kubernetes' API conventions).
pub const LONGEST: usize = 63;

/// A label's key, `domain/name`; valid by construction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelName(Arc<str>);

impl LabelName {
    /// The key of `name` in `domain`, which must be a DNS name. Characters that a name may not have are left out.
    pub fn new(domain: &str, name: &str) -> Self {
        Self(format!("{domain}/{}", value(name)).into())
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LabelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Labels by key, each value one that Kubernetes accepts.
pub type Labels = BTreeMap<LabelName, String>;

/// `text` as a label value: letters, digits, `-`, `_` and `.` stay, blanks become one `-`, anything else is dropped, as in NVIDIA's
/// gpu-feature-discovery. In addition it begins and ends with a letter or digit and is no longer than [`LONGEST`].
pub fn value(text: &str) -> String {
    value_with(text, "")
}

/// [`value`] of `text` and `suffix` together. `text` is truncated if necessary; `suffix` must be valid and short.
pub fn value_with(text: &str, suffix: &str) -> String {
    let kept: String =
        text.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ')).collect();
    let words: Vec<&str> = kept.split_whitespace().collect();
    let mut joined = words.join("-");
    // Only ASCII is left, so a byte is a character.
    joined.truncate(LONGEST.saturating_sub(suffix.len()));
    format!("{}{suffix}", joined.trim_end_matches(is_edge)).trim_matches(is_edge).to_owned()
}

/// Whether a character may be inside a name or value, but not at its ends.
fn is_edge(c: char) -> bool {
    !c.is_ascii_alphanumeric()
}

/// Most products with labels of their own, the leading ones.
const MOST_PRODUCTS: usize = 8;

/// Labels of ours, about what NVIDIA's do not cover: links, NUMA nodes, health, nodes with several products. A fixed
/// number, and two for each product.
fn label_topology(set: &mut Set, facts: &Facts<'_>, gpus: &[&Gpu], products: &[Product<'_>]) {
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
            let room = LONGEST - prefix.len();
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn product_names_are_spelled_as_in_nvidias_labels() {
        assert_eq!(value("NVIDIA A100-SXM4-40GB"), "NVIDIA-A100-SXM4-40GB");
        assert_eq!(value("NVIDIA  H100   80GB HBM3 "), "NVIDIA-H100-80GB-HBM3");
        assert_eq!(value("NVIDIA GeForce RTX™ 4090 (24 GB)"), "NVIDIA-GeForce-RTX-4090-24-GB");
    }

    #[test]
    fn long_product_is_truncated_before_its_suffix() {
        let product = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition";
        let label = value_with(product, "-MIG-1g.24gb-SHARED");
        assert_eq!(label, "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstat-MIG-1g.24gb-SHARED");
        assert_eq!(label.len(), LONGEST);
    }

    #[test]
    fn truncated_value_ends_with_letter_or_digit() {
        let label = value(&format!("{} b", "a".repeat(62)));
        assert_eq!(label, "a".repeat(62));
        assert_eq!(value("-._x_.-"), "x");
        assert_eq!(value("(™)"), "");
    }

    /// The check of `kube-apiserver`.
    fn accepted(text: &str) -> bool {
        let ends = text.chars().next().zip(text.chars().last());
        text.len() <= 63
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
            && ends.is_none_or(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
    }

    proptest! {
        #[test]
        fn value_of_any_text_is_accepted(text in "\\PC{0,90}", shared in any::<bool>()) {
            let made = value_with(&text, if shared { "-SHARED" } else { "" });
            prop_assert!(accepted(&made), "{made:?}");
            prop_assert!(!shared || made.ends_with("SHARED"), "{made:?}");
            let again = value(&made);
            prop_assert_eq!(again, made);
        }
    }
}
