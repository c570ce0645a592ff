//! The NVLink rate and PCIe generation of GPU products: a table of names, and assumptions for an unknown product. Every
//! rate has its source.

use super::LinkRate;
use crate::machine::{Gpu, Machine, PathClass};

/// The facts about a product that the choice of GPUs needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Product {
    /// One NVLink; irrelevant where the GPU has none.
    pub(super) nvlink: LinkRate,
    /// PCIe generation the product is made for, at 16 lanes.
    pub(super) pcie: u8,
}

// Effective: NCCL's `SMxx_NVLINK_BW` (src/graph/topo.h), in MB/s per link. Raw: the architecture's white paper.
/// Pascal.
pub(super) const NVLINK1: LinkRate = LinkRate::new(18_000, 20_000);
/// Volta, and Turing, which NCCL rates the same.
pub(super) const NVLINK2: LinkRate = LinkRate::new(20_000, 25_000);
/// GA100: A100, A800, A30.
pub(super) const NVLINK3: LinkRate = LinkRate::new(20_000, 25_000);
/// GA102: A40, RTX A6000, RTX 3090; raw as `nvidia-smi nvlink -s` prints it.
pub(super) const NVLINK3_GA102: LinkRate = LinkRate::new(12_000, 14_062);
/// Hopper, NVL boards with bridges too. Raw by the data sheets of H100, H200 and H200 NVL (900 GB/s over 18 links, both
/// ways together); nvidia-smi prints 26.562 GB/s for a link of each.
pub(super) const NVLINK4: LinkRate = LinkRate::new(20_600, 25_000);
/// Blackwell.
pub(super) const NVLINK5: LinkRate = LinkRate::new(40_100, 50_000);

const fn product(nvlink: LinkRate, pcie: u8) -> Product {
    Product { nvlink, pcie }
}

/// V100 and what else NCCL rates like it.
pub(super) const VOLTA: Product = product(NVLINK2, 3);

/// Products by the words that the name must contain, the more specific first.
const PRODUCTS: &[(&[&str], Product)] = &[
    (&["GB300"], product(NVLINK5, 6)),
    (&["GB200"], product(NVLINK5, 5)),
    (&["B300"], product(NVLINK5, 6)),
    (&["B200"], product(NVLINK5, 5)),
    (&["B100"], product(NVLINK5, 5)),
    (&["GH200"], product(NVLINK4, 5)),
    (&["H200"], product(NVLINK4, 5)),
    (&["H100"], product(NVLINK4, 5)),
    (&["H800"], product(NVLINK4, 5)),
    (&["H20"], product(NVLINK4, 5)),
    (&["A100"], product(NVLINK3, 4)),
    (&["A800"], product(NVLINK3, 4)),
    (&["A30"], product(NVLINK3, 4)),
    (&["GB10"], product(NVLINK5, 5)),
    (&["A40"], product(NVLINK3_GA102, 4)),
    (&["A10"], product(NVLINK3_GA102, 4)),
    (&["A10G"], product(NVLINK3_GA102, 4)),
    (&["A16"], product(NVLINK3_GA102, 4)),
    (&["A2"], product(NVLINK3_GA102, 4)),
    (&["A2000"], product(NVLINK3_GA102, 4)),
    (&["A6000"], product(NVLINK3_GA102, 4)),
    (&["A5500"], product(NVLINK3_GA102, 4)),
    (&["A5000"], product(NVLINK3_GA102, 4)),
    (&["A4500"], product(NVLINK3_GA102, 4)),
    (&["A4000"], product(NVLINK3_GA102, 4)),
    (&["3090"], product(NVLINK3_GA102, 4)),
    (&["3080"], product(NVLINK3_GA102, 4)),
    (&["3070"], product(NVLINK3_GA102, 4)),
    (&["3060"], product(NVLINK3_GA102, 4)),
    (&["L40S"], product(NVLINK3, 4)),
    (&["L40"], product(NVLINK3, 4)),
    (&["L4"], product(NVLINK3, 4)),
    (&["L20"], product(NVLINK3, 4)),
    (&["L2"], product(NVLINK3, 4)),
    (&["4090"], product(NVLINK3, 4)),
    (&["4080"], product(NVLINK3, 4)),
    (&["4070"], product(NVLINK3, 4)),
    (&["4060"], product(NVLINK3, 4)),
    (&["RTX", "ADA"], product(NVLINK3, 4)),
    (&["6000", "ADA"], product(NVLINK3, 4)),
    (&["RTX", "PRO"], product(NVLINK5, 5)),
    (&["5090"], product(NVLINK5, 5)),
    (&["5080"], product(NVLINK5, 5)),
    (&["5070"], product(NVLINK5, 5)),
    (&["5060"], product(NVLINK5, 5)),
    (&["P100"], product(NVLINK1, 3)),
    (&["P40"], product(NVLINK1, 3)),
    (&["P4"], product(NVLINK1, 3)),
    (&["V100"], VOLTA),
    (&["V100S"], VOLTA),
    (&["GV100"], VOLTA),
    (&["TITAN", "V"], VOLTA),
    (&["TITAN", "RTX"], VOLTA),
    (&["QUADRO", "RTX"], VOLTA),
    (&["T4"], VOLTA),
    (&["2080"], VOLTA),
    (&["2070"], VOLTA),
    (&["2060"], VOLTA),
    (&["1080"], product(NVLINK1, 3)),
    (&["1070"], product(NVLINK1, 3)),
    (&["P6000"], product(NVLINK1, 3)),
    (&["M60"], product(NVLINK1, 3)),
    (&["M40"], product(NVLINK1, 3)),
    (&["K80"], product(NVLINK1, 3)),
];

/// The product of one GPU of `machine`, from the most certain fact that is known.
pub(super) fn of(machine: &Machine, gpu: &Gpu) -> Product {
    known(machine, gpu).unwrap_or_else(|| by_shape(machine, usize::from(gpu.index)))
}

/// The GPUs of unknown product. Their rates are guessed from the number of their links.
pub fn guessed(machine: &Machine) -> Vec<u8> {
    let gpus = machine.gpus().iter();
    gpus.filter(|gpu| known(machine, gpu).is_none()).map(|gpu| gpu.index).collect()
}

fn known(machine: &Machine, gpu: &Gpu) -> Option<Product> {
    let named = |text: Option<&str>| text.and_then(by_name);
    named(gpu.model.as_deref())
        .or_else(|| gpu.compute_capability.as_deref().and_then(by_compute_capability))
        .or_else(|| gpu.nvlink.and_then(|ports| ports.version).and_then(by_nvlink_version))
        .or_else(|| named(Some(machine.name())))
}

/// Whether the rates of a model are known.
///
/// # Errors
/// They are unknown: the known name with the nearest spelling, if any is close.
pub fn known_model(model: &str) -> Result<(), Option<String>> {
    if by_name(model).is_some() {
        return Ok(());
    }
    let model = model.to_ascii_uppercase();
    let names = PRODUCTS.iter().map(|(words, _)| words.join(" "));
    let nearest = names.map(|name| (strsim::damerau_levenshtein(&model, &name), name)).min();
    Err(nearest.filter(|(distance, name)| *distance <= 2.min(name.len() / 2)).map(|(_, name)| name))
}

fn by_name(text: &str) -> Option<Product> {
    let upper = text.to_ascii_uppercase();
    // "8xA100" and "8x A100" name the same GPU.
    let words: Vec<&str> = upper
        .split(|c: char| !c.is_ascii_alphanumeric())
        .map(|word| {
            word.trim_start_matches(|c: char| c.is_ascii_digit())
                .strip_prefix('X')
                .filter(|rest| !rest.is_empty())
                .unwrap_or(word)
        })
        .collect();
    PRODUCTS
        .iter()
        .find(|(needed, _)| needed.iter().all(|word| words.contains(word)))
        .map(|(_, product)| *product)
}

/// NCCL's own rule (`ncclTopoNVLinkBw`), and the PCIe generation of the first products of that capability.
fn by_compute_capability(text: &str) -> Option<Product> {
    let (major, minor) = text.split_once('.')?;
    let version = major.parse::<u32>().ok()?.checked_mul(10)?.checked_add(minor.parse().ok()?)?;
    Some(match version {
        100.. => product(NVLINK5, 5),
        90..=99 => product(NVLINK4, 5),
        86 => product(NVLINK3_GA102, 4),
        80..=89 => product(NVLINK3, 4),
        70..=79 => VOLTA,
        _ => product(NVLINK1, 3),
    })
}

fn by_nvlink_version(version: u8) -> Option<Product> {
    match version {
        1 => Some(product(NVLINK1, 3)),
        2 => Some(VOLTA),
        3 => Some(product(NVLINK3, 4)),
        4 => Some(product(NVLINK4, 5)),
        5 => Some(product(NVLINK5, 5)),
        _ => None,
    }
}

/// The product by the number of its links, which is nearly a fingerprint. If two products share it, the slower one is
/// assumed.
///
/// | links of the GPU | taken for |
/// |---|---|
/// | more than 12 in all | H100, H200, GH200 (Blackwell looks the same and is faster) |
/// | other counts into a switch | A100, A800, V100: 20 GB/s each |
/// | 4 to one peer alone | A40, RTX A6000, RTX 3090 (an A30 looks the same and is faster) |
/// | 1 to each of 4 peers, nowhere a double link | P100 cube mesh |
/// | 1 or 2 to several peers, or 3 to one | V100 |
/// | 2 to one peer alone | a Turing pair |
/// | everything else with links | A100 |
/// | none, and a driver old enough to print `SOC` | PCIe 3 |
/// | none | PCIe 4 |
fn by_shape(machine: &Machine, index: usize) -> Product {
    let everywhere = machine.nvlinks().iter().map(|bundle| bundle.links).max();
    let own: Vec<u8> = (0..machine.gpus().len())
        .map(|peer| machine.direct_nvlinks(index, peer))
        .filter(|links| *links > 0)
        .collect();
    let widest = own.iter().copied().max().unwrap_or(0);
    let switched = machine.switch_links(index);
    let all = own.iter().map(|links| u32::from(*links)).sum::<u32>() + u32::from(switched);
    if all > MOST_LINKS_OF_AN_A100 {
        return product(NVLINK4, 5);
    }
    match (switched, own.len(), widest) {
        (6, _, _) => VOLTA,
        (1.., _, _) => product(NVLINK3, 4),
        (0, 1, 4) => product(NVLINK3_GA102, 4),
        (0, 2.., 1) if everywhere == Some(1) => product(NVLINK1, 3),
        (0, 1.., 1..=3) => VOLTA,
        (0, 1.., _) => product(NVLINK3, 4),
        (0, 0, _) => without_links(machine),
    }
}

/// Links of an A100 in all, by its white paper.
const MOST_LINKS_OF_AN_A100: u32 = 12;

/// A GPU without NVLinks: as old as its linked neighbours, if there are any; otherwise as old as the driver's link
/// names.
fn without_links(machine: &Machine) -> Product {
    let linked = machine.gpus().iter().map(|gpu| usize::from(gpu.index)).find(|index| {
        machine.switch_links(*index) > 0
            || machine.nvlinks().iter().any(|bundle| bundle.gpus.map(usize::from).contains(index))
    });
    if let Some(neighbour) = linked {
        return by_shape(machine, neighbour);
    }
    let devices = machine.paths().len();
    let old = (0..devices).any(|a| (0..a).any(|b| machine.paths().get(a, b) == PathClass::Soc));
    product(NVLINK3, if old { 3 } else { 4 })
}
