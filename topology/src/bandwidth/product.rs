//! GPU products with their NVLinks and PCIe generation: a table of names, and assumptions for an unknown product. Every
//! rate has its source.

use super::LinkRate;
use crate::machine::{Gpu, Machine, PathClass};

/// What the products of one generation have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Generation {
    /// NVLink version.
    version: u8,
    /// One NVLink; irrelevant where the GPU has none.
    pub(super) nvlink: LinkRate,
    /// PCIe generation that the products are made for, at 16 lanes.
    pub(super) pcie: u8,
}

/// A GPU product: its name, its links and its generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// The words that a name of the product contains, in capitals.
    words: &'static [&'static str],
    /// Its short name; empty for a family of products.
    name: &'static str,
    /// The most NVLinks of one GPU.
    links: u8,
    generation: Generation,
}

// Effective: NCCL's `SMxx_NVLINK_BW` (src/graph/topo.h), in MB/s per link. Raw: the architecture's white paper.
/// Pascal.
const NVLINK1: LinkRate = LinkRate::new(18_000, 20_000);
/// Volta, and Turing, which NCCL rates the same.
const NVLINK2: LinkRate = LinkRate::new(20_000, 25_000);
/// GA100: A100, A800, A30.
const NVLINK3: LinkRate = LinkRate::new(20_000, 25_000);
/// GA102: A40, RTX A6000, RTX 3090; raw as `nvidia-smi nvlink -s` prints it.
const NVLINK3_GA102: LinkRate = LinkRate::new(12_000, 14_062);
/// Hopper, NVL boards with bridges too. Raw by the data sheets of H100, H200 and H200 NVL (900 GB/s over 18 links, both
/// ways together); nvidia-smi prints 26.562 GB/s for a link of each.
const NVLINK4: LinkRate = LinkRate::new(20_600, 25_000);
/// Blackwell.
const NVLINK5: LinkRate = LinkRate::new(40_100, 50_000);

const fn generation(version: u8, nvlink: LinkRate, pcie: u8) -> Generation {
    Generation { version, nvlink, pcie }
}

/// Also what is older: irrelevant, because it has no NVLink.
const PASCAL: Generation = generation(1, NVLINK1, 3);
/// V100 and what else NCCL rates like it.
pub(super) const VOLTA: Generation = generation(2, NVLINK2, 3);
/// GA100, and the products without NVLink up to Ada.
const AMPERE: Generation = generation(3, NVLINK3, 4);
const GA102: Generation = generation(3, NVLINK3_GA102, 4);
const HOPPER: Generation = generation(4, NVLINK4, 5);
const BLACKWELL: Generation = generation(5, NVLINK5, 5);
const BLACKWELL_PCIE6: Generation = generation(5, NVLINK5, 6);

const fn product(
    words: &'static [&'static str],
    name: &'static str,
    links: u8,
    generation: Generation,
) -> Product {
    Product { words, name, links, generation }
}

/// The more specific names first: an RTX PRO 6000 is no RTX 6000.
const PRODUCTS: &[Product] = &[
    product(&["GB300"], "GB300", 18, BLACKWELL_PCIE6),
    product(&["GB200"], "GB200", 18, BLACKWELL),
    product(&["B300"], "B300", 18, BLACKWELL_PCIE6),
    product(&["B200"], "B200", 18, BLACKWELL),
    product(&["B100"], "B100", 18, BLACKWELL),
    product(&["GH200"], "GH200", 18, HOPPER),
    product(&["H200", "NVL"], "H200 NVL", 18, HOPPER),
    product(&["H200"], "H200", 18, HOPPER),
    product(&["H100"], "H100", 18, HOPPER),
    product(&["H800"], "H800", 8, HOPPER),
    product(&["H20"], "H20", 18, HOPPER),
    product(&["A100"], "A100", 12, AMPERE),
    product(&["A800"], "A800", 8, AMPERE),
    product(&["A30"], "A30", 4, AMPERE),
    product(&["GB10"], "GB10", 0, BLACKWELL),
    product(&["A40"], "A40", 4, GA102),
    product(&["A10"], "A10", 0, GA102),
    product(&["A10G"], "A10G", 0, GA102),
    product(&["A16"], "A16", 0, GA102),
    product(&["A2"], "A2", 0, GA102),
    product(&["A2000"], "RTX A2000", 0, GA102),
    product(&["A6000"], "RTX A6000", 4, GA102),
    product(&["A5500"], "RTX A5500", 4, GA102),
    product(&["A5000"], "RTX A5000", 4, GA102),
    product(&["A4500"], "RTX A4500", 4, GA102),
    product(&["A4000"], "RTX A4000", 0, GA102),
    product(&["3090"], "RTX 3090", 4, GA102),
    product(&["3080"], "RTX 3080", 0, GA102),
    product(&["3070"], "RTX 3070", 0, GA102),
    product(&["3060"], "RTX 3060", 0, GA102),
    product(&["L40S"], "L40S", 0, AMPERE),
    product(&["L40"], "L40", 0, AMPERE),
    product(&["L4"], "L4", 0, AMPERE),
    product(&["L20"], "L20", 0, AMPERE),
    product(&["L2"], "L2", 0, AMPERE),
    product(&["4090"], "RTX 4090", 0, AMPERE),
    product(&["4080"], "RTX 4080", 0, AMPERE),
    product(&["4070"], "RTX 4070", 0, AMPERE),
    product(&["4060"], "RTX 4060", 0, AMPERE),
    product(&["6000", "ADA"], "RTX 6000 Ada", 0, AMPERE),
    product(&["RTX", "ADA"], "", 0, AMPERE),
    product(&["RTX", "PRO", "6000"], "RTX PRO 6000", 0, BLACKWELL),
    product(&["RTX", "PRO"], "", 0, BLACKWELL),
    product(&["5090"], "RTX 5090", 0, BLACKWELL),
    product(&["5080"], "RTX 5080", 0, BLACKWELL),
    product(&["5070"], "RTX 5070", 0, BLACKWELL),
    product(&["5060"], "RTX 5060", 0, BLACKWELL),
    product(&["P100"], "P100", 4, PASCAL),
    product(&["P40"], "P40", 0, PASCAL),
    product(&["P4"], "P4", 0, PASCAL),
    product(&["V100"], "V100", 6, VOLTA),
    product(&["V100S"], "V100S", 0, VOLTA),
    product(&["GV100"], "GV100", 4, VOLTA),
    product(&["TITAN", "V"], "TITAN V", 0, VOLTA),
    product(&["TITAN", "RTX"], "TITAN RTX", 2, VOLTA),
    product(&["QUADRO", "RTX"], "", 0, VOLTA),
    product(&["T4"], "T4", 0, VOLTA),
    product(&["2080"], "RTX 2080", 2, VOLTA),
    product(&["2070"], "RTX 2070", 0, VOLTA),
    product(&["2060"], "RTX 2060", 0, VOLTA),
    product(&["1080"], "GTX 1080", 0, PASCAL),
    product(&["1070"], "GTX 1070", 0, PASCAL),
    product(&["P6000"], "Quadro P6000", 0, PASCAL),
    product(&["M60"], "M60", 0, PASCAL),
    product(&["M40"], "M40", 0, PASCAL),
    product(&["K80"], "K80", 0, PASCAL),
];

impl Product {
    /// The product that a model name such as `NVIDIA A100-SXM4-80GB` belongs to.
    pub fn by_name(name: &str) -> Option<Self> {
        let words = words(name);
        PRODUCTS.iter().copied().find(|product| product.is_named_in(&words))
    }

    /// The product in the description of a machine with `gpus` GPUs; `None` if it names none, several, or another
    /// number of GPUs (`2x 4090 and others`).
    pub fn described(description: &str, gpus: usize) -> Option<Self> {
        let words = words(description);
        let mut named = PRODUCTS
            .iter()
            .copied()
            .filter(|product| !product.name.is_empty() && product.is_named_in(&words));
        let product = named.next()?;
        let others = named.any(|other| {
            other.name != product.name && !other.words.iter().all(|word| product.words.contains(word))
        });
        // "8x Tesla V100": the count may stand one word further ahead.
        let counts = words.iter().enumerate().filter(|(_, word)| product.words.contains(&word.as_str()));
        let miscounted = counts
            .flat_map(|(index, _)| words.get(index.saturating_sub(2)..index).unwrap_or_default())
            .filter_map(|word| word.strip_suffix('X')?.parse::<usize>().ok())
            .any(|count| count != gpus);
        (!others && !miscounted).then_some(product)
    }

    /// Its short name, such as `A100`.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// NVLink version and the most links of one GPU; `None` for a GPU without NVLinks.
    pub fn nvlink(self) -> Option<(u8, u8)> {
        (self.links > 0).then_some((self.generation.version, self.links))
    }

    fn is_named_in(self, words: &[String]) -> bool {
        self.words.iter().all(|word| words.iter().any(|found| found == word))
    }
}

/// The generation of one GPU of `machine`, from the most certain fact that is known.
pub(super) fn generation_of(machine: &Machine, gpu: &Gpu) -> Generation {
    known(machine, gpu).unwrap_or_else(|| by_shape(machine, usize::from(gpu.index)))
}

/// The GPUs of unknown product. Their rates are guessed from the number of their links.
pub fn guessed(machine: &Machine) -> Vec<u8> {
    let gpus = machine.gpus().iter();
    gpus.filter(|gpu| known(machine, gpu).is_none()).map(|gpu| gpu.index).collect()
}

fn known(machine: &Machine, gpu: &Gpu) -> Option<Generation> {
    let named = |text: Option<&str>| text.and_then(Product::by_name).map(|product| product.generation);
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
    if Product::by_name(model).is_some() {
        return Ok(());
    }
    let model = model.to_ascii_uppercase();
    let names = PRODUCTS.iter().map(|product| product.words.join(" "));
    let nearest = names.map(|name| (strsim::damerau_levenshtein(&model, &name), name)).min();
    Err(nearest.filter(|(distance, name)| *distance <= 2.min(name.len() / 2)).map(|(_, name)| name))
}

/// Words in capitals; `8xA100` counts as `8X` and `A100`.
fn words(text: &str) -> Vec<String> {
    let upper = text.to_ascii_uppercase();
    let mut words = Vec::new();
    for word in upper.split(|ch: char| !ch.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
        match word.split_once('X') {
            Some((count, rest))
                if !rest.is_empty() && !count.is_empty() && count.chars().all(|ch| ch.is_ascii_digit()) =>
            {
                words.push(format!("{count}X"));
                words.push(rest.to_owned());
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

/// NCCL's own rule (`ncclTopoNVLinkBw`), and the PCIe generation of the first products of that capability.
fn by_compute_capability(text: &str) -> Option<Generation> {
    let (major, minor) = text.split_once('.')?;
    let version = major.parse::<u32>().ok()?.checked_mul(10)?.checked_add(minor.parse().ok()?)?;
    Some(match version {
        100.. => BLACKWELL,
        90..=99 => HOPPER,
        86 => GA102,
        80..=89 => AMPERE,
        70..=79 => VOLTA,
        _ => PASCAL,
    })
}

fn by_nvlink_version(version: u8) -> Option<Generation> {
    match version {
        1 => Some(PASCAL),
        2 => Some(VOLTA),
        3 => Some(AMPERE),
        4 => Some(HOPPER),
        5 => Some(BLACKWELL),
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
fn by_shape(machine: &Machine, index: usize) -> Generation {
    let everywhere = machine.nvlinks().iter().map(|bundle| bundle.links).max();
    let own: Vec<u8> = (0..machine.gpus().len())
        .map(|peer| machine.direct_nvlinks(index, peer))
        .filter(|links| *links > 0)
        .collect();
    let widest = own.iter().copied().max().unwrap_or(0);
    let switched = machine.switch_links(index);
    let all = own.iter().map(|links| u32::from(*links)).sum::<u32>() + u32::from(switched);
    if all > MOST_LINKS_OF_AN_A100 {
        return HOPPER;
    }
    match (switched, own.len(), widest) {
        (6, _, _) => VOLTA,
        (1.., _, _) => AMPERE,
        (0, 1, 4) => GA102,
        (0, 2.., 1) if everywhere == Some(1) => PASCAL,
        (0, 1.., 1..=3) => VOLTA,
        (0, 1.., _) => AMPERE,
        (0, 0, _) => without_links(machine),
    }
}

/// Links of an A100 in all, by its white paper.
const MOST_LINKS_OF_AN_A100: u32 = 12;

/// A GPU without NVLinks: as old as its linked neighbours, if there are any; otherwise as old as the driver's link
/// names.
fn without_links(machine: &Machine) -> Generation {
    let linked = machine.gpus().iter().map(|gpu| usize::from(gpu.index)).find(|index| {
        machine.switch_links(*index) > 0
            || machine.nvlinks().iter().any(|bundle| bundle.gpus.map(usize::from).contains(index))
    });
    if let Some(neighbour) = linked {
        return by_shape(machine, neighbour);
    }
    let devices = machine.paths().len();
    let old = (0..devices).any(|a| (0..a).any(|b| machine.paths().get(a, b) == PathClass::Soc));
    Generation { pcie: if old { 3 } else { 4 }, ..AMPERE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(description: &str, gpus: usize) -> Option<&'static str> {
        Product::described(description, gpus).map(Product::name)
    }

    #[test]
    fn description_with_one_model_names_it() {
        assert_eq!(name("NVIDIA DGX-1 with 8x Tesla P100, 4 HCAs", 8), Some("P100"));
        assert_eq!(name("AWS p4d instance, 8xA100 (NV12)", 8), Some("A100"));
        assert_eq!(name("GB200 compute tray: 4x GB200, 2 Grace CPUs", 4), Some("GB200"));
        assert_eq!(name("8x A40-class PCIe, four NV4 pairs", 8), Some("A40"));
        assert_eq!(name("2x RTX PRO 6000 Workstation on WRX90E", 2), Some("RTX PRO 6000"));
        assert_eq!(name("4x H200 NVL with a bridge", 4), Some("H200 NVL"));
    }

    #[test]
    fn description_of_several_models_names_none() {
        assert_eq!(name("5-GPU workstation (2x 4090 and others)", 5), None);
        assert_eq!(name("one A100, one V100", 2), None);
        assert_eq!(name("8x NV18 node with 76 NICs", 8), None);
    }
}
