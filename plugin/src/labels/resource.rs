//! The labels of a resource: product, count, replicas, memory, MIG attributes. Whole GPUs are under `gpu.`; MIG devices are under the
//! same name with the strategy `single` and under `mig-<profile>.` with `mixed`, as in NVIDIA's gpu-feature-discovery.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use gantry_config::MigStrategy;
use gantry_topology::{ComputeInstance, Gpu, MigAttributes};

use super::{Facts, Set, value_with};
use crate::inventory::Inventory;

/// Prefix of the labels of whole GPUs, and of MIG devices with the strategy `single`.
const GPU: &str = "gpu";

/// Sets the labels of all resources.
pub(super) fn label(set: &mut Set, facts: &Facts<'_>, products: &[Product<'_>]) {
    match facts.config.mig_strategy {
        MigStrategy::None => leading(set, facts, products),
        MigStrategy::Single => {
            set.nvidia("mig.strategy", "single");
            single(set, facts, products);
        }
        MigStrategy::Mixed => {
            leading(set, facts, products);
            set.nvidia("mig.strategy", "mixed");
            mixed(set, facts, products);
        }
    }
}

fn leading(set: &mut Set, facts: &Facts<'_>, products: &[Product<'_>]) {
    if let Some(first) = products.first() {
        whole(set, facts, first);
    }
}

/// The labels of the leading product.
fn whole(set: &mut Set, facts: &Facts<'_>, product: &Product<'_>) {
    // A GPU with MIG on is used through its instances only, and not shared.
    let shared = match product.whole.is_empty() {
        true => SharingLabel::Not(0),
        false => {
            SharingLabel::of(facts, product.whole.iter().filter_map(|gpu| gpu.uuid.as_ref()?.as_str().into()))
        }
    };
    base(set, GPU, product.model, "", product.count(), shared);
    let Some(gpu) = product.example() else { return };
    if let Some(memory) = gpu.memory_mib.filter(|memory| *memory > 0) {
        set.nvidia("gpu.memory", memory);
    }
    if let Some((major, minor)) = gpu.compute_capability.as_deref().and_then(parts) {
        set.nvidia("gpu.family", family(major, minor));
        set.nvidia("gpu.compute.major", major);
        set.nvidia("gpu.compute.minor", minor);
    }
}

/// All devices are one resource of one kind. GPUs that break this are not offered: the labels are those of the others, or mark the
/// strategy as invalid if there are none.
fn single(set: &mut Set, facts: &Facts<'_>, products: &[Product<'_>]) {
    let Some(first) = cut_gpus(products).next() else {
        return leading(set, facts, products);
    };
    let served = offered(products, facts.inventory);
    if served.is_empty() {
        leading(set, facts, products);
        set.nvidia("gpu.product", value_with(first.model.as_deref().unwrap_or_default(), "-MIG-INVALID"));
        for name in ["count", "replicas", "memory"] {
            set.nvidia(&format!("{GPU}.{name}"), 0);
        }
        return;
    }
    leading(set, facts, &served);
    for (profile, devices) in profiles(facts, &served) {
        mig(set, facts, GPU, &profile, &devices);
    }
}

/// Each profile is a resource.
fn mixed(set: &mut Set, facts: &Facts<'_>, products: &[Product<'_>]) {
    for (profile, devices) in profiles(facts, products) {
        mig(set, facts, &format!("mig-{profile}"), &profile, &devices);
    }
}

/// The labels of MIG devices of one profile.
fn mig(set: &mut Set, facts: &Facts<'_>, prefix: &str, profile: &str, devices: &[MigDevice<'_>]) {
    let Some((gpu, compute)) = devices.first() else {
        return;
    };
    let shared = SharingLabel::of(facts, devices.iter().map(|(_, compute)| compute.uuid.as_str()));
    base(set, prefix, gpu.model.as_deref(), &format!("-MIG-{profile}"), devices.len(), shared);
    // The memory of the whole GPU is not that of a MIG device.
    set.without_nvidia(&format!("{prefix}.memory"));
    if let Some(attributes) = &compute.attributes {
        for (name, number) in numbers(attributes) {
            set.nvidia(&format!("{prefix}.{name}"), number);
        }
    }
}

fn numbers(attributes: &MigAttributes) -> [(&'static str, u64); 9] {
    [
        ("memory", attributes.memory_mib),
        ("multiprocessors", attributes.multiprocessors.into()),
        ("slices.gi", attributes.gpu_slices.into()),
        ("slices.ci", attributes.compute_slices.into()),
        ("engines.copy", attributes.copy_engines.into()),
        ("engines.decoder", attributes.decoders.into()),
        ("engines.encoder", attributes.encoders.into()),
        ("engines.jpeg", attributes.jpeg.into()),
        ("engines.ofa", attributes.ofa.into()),
    ]
}

fn base(set: &mut Set, prefix: &str, model: Option<&str>, cut: &str, count: usize, shared: SharingLabel) {
    if let Some(model) = model {
        let suffix = match shared {
            SharingLabel::SameName(_) => format!("{cut}-SHARED"),
            SharingLabel::Renamed(_) | SharingLabel::Not(_) => cut.to_owned(),
        };
        set.nvidia(&format!("{prefix}.product"), value_with(model, &suffix));
    }
    set.nvidia(&format!("{prefix}.count"), count);
    set.nvidia(&format!("{prefix}.replicas"), shared.replicas());
    let strategy = match shared {
        SharingLabel::Not(_) => "none",
        SharingLabel::SameName(_) | SharingLabel::Renamed(_) => "time-slicing",
    };
    set.nvidia(&format!("{prefix}.sharing-strategy"), strategy);
}

/// How devices are shared, as kubelet is offered them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SharingLabel {
    /// Not shared, with the value of the label: 1, or 0 if the devices are not offered as such.
    Not(u16),
    /// The replicas under the name of whole devices: the label must show that a pod gets a share only.
    SameName(u16),
    /// The replicas under a name of their own.
    Renamed(u16),
}

impl SharingLabel {
    /// The sharing of the devices with these UUIDs; if they differ, of the most shared one.
    fn of<'a>(facts: &Facts<'_>, uuids: impl Iterator<Item = &'a str>) -> Self {
        let uuids: Vec<&str> = uuids.collect();
        let mut replicas: BTreeMap<&str, u16> = BTreeMap::new();
        let mut same_name = false;
        let entries = facts.config.time_slicing.iter().flat_map(|sharing| &sharing.resources);
        let names: Vec<_> = entries.map(|entry| &entry.name).collect();
        for device in &facts.inventory.devices {
            if device.replica.is_some() && uuids.contains(&device.uuid.as_str()) {
                *replicas.entry(&device.uuid).or_default() += 1;
                same_name |= names.contains(&&device.resource);
            }
        }
        match replicas.into_values().max() {
            Some(replicas) if replicas > 1 && same_name => Self::SameName(replicas),
            Some(replicas) if replicas > 1 => Self::Renamed(replicas),
            _ => Self::Not(1),
        }
    }

    fn replicas(self) -> u16 {
        match self {
            Self::Not(replicas) | Self::SameName(replicas) | Self::Renamed(replicas) => replicas,
        }
    }
}

/// A MIG device and its GPU.
type MigDevice<'a> = (&'a Gpu, &'a ComputeInstance);

/// GPUs with MIG on, by index.
fn cut_gpus<'a>(products: &[Product<'a>]) -> impl Iterator<Item = &'a Gpu> {
    let mut gpus: Vec<&Gpu> = products.iter().flat_map(|product| product.cut.iter().copied()).collect();
    gpus.sort_by_key(|gpu| gpu.index);
    gpus.into_iter()
}

/// The MIG devices of a GPU, in the order NVML counts them.
fn mig_devices(gpu: &Gpu) -> impl Iterator<Item = MigDevice<'_>> {
    let mig = gpu.mig.as_ref().filter(|_| is_cut(gpu));
    let mut devices: Vec<_> = mig
        .iter()
        .flat_map(|mig| &mig.instances)
        .flat_map(|instance| instance.compute.iter().map(move |compute| (instance.id, compute)))
        .collect();
    devices.sort_by_key(|(instance, compute)| (*instance, compute.id));
    devices.into_iter().map(move |(_, compute)| (gpu, compute))
}

/// The offered MIG devices by profile, spelled as in a resource name: `1g.10gb.me` for `1g.10gb+me`.
fn profiles<'a>(facts: &Facts<'_>, products: &[Product<'a>]) -> BTreeMap<String, Vec<MigDevice<'a>>> {
    let offered: BTreeSet<&str> = facts.inventory.devices.iter().map(|device| device.uuid.as_str()).collect();
    let mut profiles: BTreeMap<String, Vec<MigDevice<'a>>> = BTreeMap::new();
    for device in cut_gpus(products).flat_map(mig_devices) {
        if offered.contains(device.1.uuid.as_str()) {
            let profile = device.1.profile.replace('+', ".");
            profiles.entry(profile).or_default().push(device);
        }
    }
    profiles
}

/// The family of GPUs of compute capability `major.minor`; `undefined` for one not in the table.
///
/// Source: "CUDA GPU Compute Capability" on developer.nvidia.com and the appendix on compute capabilities of the CUDA programming
/// guide; 13, of which no board is out, as other discovery programs have it.
const fn family(major: u32, minor: u32) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, 0..5) => "volta",
        (7, _) => "turing",
        (8, 0..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10..=12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}

/// Major and minor number of a compute capability as a machine file writes it.
fn parts(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// GPUs of one product, by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Product<'a> {
    /// Name as NVML prints it; `None` for GPUs without a known name.
    pub(super) model: Option<&'a str>,
    /// GPUs with MIG off.
    pub(super) whole: Vec<&'a Gpu>,
    /// GPUs with MIG on, also those with no instance yet.
    pub(super) cut: Vec<&'a Gpu>,
}

impl<'a> Product<'a> {
    /// The number of its GPUs.
    pub(super) fn count(&self) -> usize {
        self.whole.len() + self.cut.len()
    }

    /// The GPU with the values of all: the first whole one, otherwise the first.
    pub(super) fn example(&self) -> Option<&'a Gpu> {
        self.whole.first().or(self.cut.first()).copied()
    }

    fn lowest(&self) -> u8 {
        let gpus = self.whole.iter().chain(&self.cut);
        gpus.map(|gpu| gpu.index).min().unwrap_or(u8::MAX)
    }
}

/// Every product among these GPUs, the leading one first: products with a name, then with a whole GPU, then by most GPUs, then by
/// lowest index.
pub(super) fn all<'a>(gpus: &[&'a Gpu]) -> Vec<Product<'a>> {
    let mut products: Vec<Product<'a>> = Vec::new();
    for gpu in gpus.iter().copied() {
        let model = gpu.model.as_deref();
        let known = products.iter().position(|product| product.model == model);
        let position = known.unwrap_or_else(|| {
            products.push(Product { model, whole: Vec::new(), cut: Vec::new() });
            products.len() - 1
        });
        match is_cut(gpu) {
            true => products[position].cut.push(gpu),
            false => products[position].whole.push(gpu),
        }
    }
    in_order(products)
}

/// `products` with only those GPUs that have an offered device.
pub(super) fn offered<'a>(products: &[Product<'a>], inventory: &Inventory) -> Vec<Product<'a>> {
    let gpus: BTreeSet<u8> = inventory.devices.iter().map(|device| device.gpu).collect();
    let of = |all: &[&'a Gpu]| -> Vec<&'a Gpu> {
        let served = all.iter().filter(|gpu| gpus.contains(&gpu.index));
        served.copied().collect()
    };
    let rest = products.iter().map(|product| Product {
        model: product.model,
        whole: of(&product.whole),
        cut: of(&product.cut),
    });
    in_order(rest.filter(|product| product.count() > 0).collect())
}

fn in_order(mut products: Vec<Product<'_>>) -> Vec<Product<'_>> {
    products.sort_by_key(|product| {
        (product.model.is_none(), product.whole.is_empty(), Reverse(product.count()), product.lowest())
    });
    products
}

/// Whether MIG is on.
pub(super) fn is_cut(gpu: &Gpu) -> bool {
    gpu.mig.as_ref().is_some_and(|mig| mig.enabled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boards_have_their_architecture() {
        for (board, capability, name) in [
            ("Tesla K80", "3.7", "kepler"),
            ("Tesla M40", "5.2", "maxwell"),
            ("Tesla P100", "6.0", "pascal"),
            ("Tesla V100", "7.0", "volta"),
            ("Jetson AGX Xavier", "7.2", "volta"),
            ("Tesla T4", "7.5", "turing"),
            ("A100", "8.0", "ampere"),
            ("A40", "8.6", "ampere"),
            ("Jetson AGX Orin", "8.7", "ampere"),
            ("L4", "8.9", "ada-lovelace"),
            ("H100", "9.0", "hopper"),
            ("B200", "10.0", "blackwell"),
            ("B300", "10.3", "blackwell"),
            ("Jetson T5000", "11.0", "blackwell"),
            ("RTX PRO 6000", "12.0", "blackwell"),
            ("GB10", "12.1", "blackwell"),
            ("none", "4.0", "undefined"),
        ] {
            let (major, minor) = parts(capability).unwrap();
            assert_eq!(family(major, minor), name, "{board}");
        }
        assert_eq!(parts("9"), None);
    }
}
