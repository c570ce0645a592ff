//! The rate of a link: GB/s in one direction for every pair of GPUs of a machine, from a table with sources. Only rates
//! of single links and paths; the bandwidth of a collective over several GPUs is in [`crate::collective`].

mod product;

pub use product::{Product, guessed, known_model};

use crate::machine::{Gpu, Machine, PathClass};

/// The rate of one link in one direction, in MB/s (10^6 bytes per second): whole numbers, so that equal links compare
/// equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkRate {
    /// The rate that a collective library reaches, by NCCL's model (`src/graph/topo.h`) or a measurement. Every choice
    /// uses this one.
    pub effective: u32,
    /// The signalling rate of the data sheet, for display.
    pub raw: u32,
}

impl LinkRate {
    /// A rate from its effective and raw MB/s.
    pub const fn new(effective: u32, raw: u32) -> Self {
        Self { effective, raw }
    }

    /// The lesser of two rates, each field for itself: what two unlike ends of a link reach.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self::new(self.effective.min(other.effective), self.raw.min(other.raw))
    }

    fn max(self, other: Self) -> Self {
        Self::new(self.effective.max(other.effective), self.raw.max(other.raw))
    }

    /// `times` such links side by side.
    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self::new(self.effective.saturating_mul(times), self.raw.saturating_mul(times))
    }

    /// `numerator / denominator` of the rate, for links narrower or of another generation than the table's.
    fn scaled(self, numerator: u32, denominator: u32) -> Self {
        let scale = |rate: u32| {
            let scaled = u64::from(rate) * u64::from(numerator) / u64::from(denominator.max(1));
            u32::try_from(scaled).unwrap_or(u32::MAX)
        };
        Self::new(scale(self.effective), scale(self.raw))
    }
}

/// The rates of one machine's links. [`Rates::of`] looks them up; fill the fields by hand where they were measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rates {
    /// One NVLink of each GPU, by GPU index.
    pub nvlink: Vec<LinkRate>,
    /// The PCIe link of each GPU, by GPU index.
    pub pcie: Vec<LinkRate>,
    /// The link between sockets (QPI, UPI, Infinity Fabric, X bus) that `SYS` traffic crosses.
    pub socket: LinkRate,
}

impl Rates {
    /// The rates of a machine's links, from the most certain fact that is known:
    ///
    /// - NVLink: GPU model, else compute capability, else NVLink version, else the model named in the machine's own
    ///   name, else the number of links and peers (the table is in `product.rs`).
    /// - PCIe: generation and width of the GPU's link as it is trained, else of the best link of GPU and slot, else the
    ///   generation its model is made for.
    /// - Socket link: CPU model, else the CPU named in the machine's name, else 10 GB/s beside PCIe 3 and 16 GB/s
    ///   beside newer GPUs, the least of the servers of those years.
    pub fn of(machine: &Machine) -> Self {
        let generations: Vec<product::Generation> =
            machine.gpus().iter().map(|gpu| product::generation_of(machine, gpu)).collect();
        let processor = processor_of(machine);
        let pcie: Vec<LinkRate> = machine
            .gpus()
            .iter()
            .zip(&generations)
            .map(|(gpu, generation)| pcie_rate(gpu, *generation, processor))
            .collect();
        let newest = generations.iter().map(|generation| generation.pcie).max().unwrap_or(4);
        Self {
            nvlink: generations.iter().map(|generation| generation.nvlink).collect(),
            pcie,
            socket: processor.map_or_else(|| unknown_socket_link(newest), Processor::socket_link),
        }
    }

    /// The rate of the best single path between two GPUs of `machine`: all their NVLinks together, or PCIe where that
    /// is faster or the only way. Zero for a GPU with itself and for an index out of range.
    pub fn pair(&self, machine: &Machine, a: usize, b: usize) -> LinkRate {
        if a == b {
            return LinkRate::default();
        }
        let links = u32::from(machine.nvlinks_between(a, b));
        let nvlink = self.nvlink_of(a).min(self.nvlink_of(b)).times(links);
        nvlink.max(self.pcie_path(a, b, machine.paths().get(a, b)))
    }

    /// The rate of the PCIe path of class `class` between two GPUs. Classes within a socket run at the full rate of the
    /// slower slot: measured alike at 55 GB/s over PIX, PXB and NODE on one PCIe 5 machine. Only the socket link is
    /// narrower.
    pub fn pcie_path(&self, a: usize, b: usize, class: PathClass) -> LinkRate {
        let slots = self.pcie_of(a).min(self.pcie_of(b));
        if class.crosses_sockets() { slots.min(self.socket) } else { slots }
    }

    /// One NVLink of GPU `a`; zero if there is no such GPU.
    pub fn nvlink_of(&self, a: usize) -> LinkRate {
        self.nvlink.get(a).copied().unwrap_or_default()
    }

    /// The PCIe link of GPU `a`; zero if there is no such GPU.
    pub fn pcie_of(&self, a: usize) -> LinkRate {
        self.pcie.get(a).copied().unwrap_or_default()
    }
}

/// MB/s as GB/s.
pub(crate) fn gbs(mbs: u32) -> f64 {
    f64::from(mbs) / 1000.0
}

/// PCIe 3 x16. Effective: NCCL's `PCI_BW`; raw: PCI-SIG's 8 GT/s with 128b/130b. Each generation doubles both.
const PCIE3_X16: LinkRate = LinkRate::new(12_000, 15_750);

fn pcie_rate(gpu: &Gpu, own: product::Generation, processor: Option<Processor>) -> LinkRate {
    if processor == Some(Processor::Power9) && own == product::VOLTA {
        // An AC922's V100 reaches its CPU over three NVLinks; what NCCL's model allows between them is the X bus's
        // rate.
        return Processor::Power9.socket_link();
    }
    let link = gpu.pcie_trained.or(gpu.pcie);
    let (generation, width) = link.map_or((own.pcie, 16), |link| (link.generation, link.width));
    let lanes = PCIE3_X16.scaled(u32::from(width), 16);
    match generation {
        0..=3 => lanes.scaled(1, 1 << (3 - generation)),
        newer => lanes.scaled(1 << (newer.min(7) - 3), 1),
    }
}

/// CPUs as far as their socket links differ. The rates of the links are NCCL's (`src/graph/topo.h`): `BDW_QPI_BW` 6,
/// `SKL_QPI_BW` 10, `SRP_QPI_BW` 22, `ERP_QPI_BW` 40, `AMD_BW` 16, `P9_BW` 32, `ARM_BW` 6, `ZPI_BW` 6 GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Processor {
    /// Intel Xeon E5/E7 v3 and v4.
    Broadwell,
    /// Intel Xeon Scalable, first to third generation.
    Skylake,
    /// Intel Xeon Scalable, fourth generation.
    SapphireRapids,
    /// Intel Xeon Scalable, fifth generation, and Xeon 6.
    EmeraldRapids,
    /// AMD EPYC, Ryzen and Threadripper.
    Amd,
    /// IBM POWER9.
    Power9,
    /// Any 64-bit Arm, Grace included.
    Arm,
    /// Zhaoxin.
    Zhaoxin,
}

impl Processor {
    /// The link between two sockets. No data sheet's rate is kept: raw is the effective one.
    fn socket_link(self) -> LinkRate {
        let rate = match self {
            Self::Broadwell | Self::Arm | Self::Zhaoxin => 6_000,
            Self::Skylake => 10_000,
            Self::SapphireRapids => 22_000,
            Self::EmeraldRapids => 40_000,
            Self::Amd => 16_000,
            Self::Power9 => 32_000,
        };
        LinkRate::new(rate, rate)
    }
}

/// The socket link of a machine with unknown CPU, by the newest PCIe generation of its GPUs.
fn unknown_socket_link(pcie_generation: u8) -> LinkRate {
    if pcie_generation <= 3 { Processor::Skylake.socket_link() } else { Processor::Amd.socket_link() }
}

/// The machine's CPU, from the host's CPU model or else from the machine's name.
fn processor_of(machine: &Machine) -> Option<Processor> {
    let cpu = machine.host().cpu.as_deref();
    cpu.and_then(|cpu| by_name(cpu).or_else(|| by_maker(cpu))).or_else(|| by_name(machine.name()))
}

/// Ampere makes Arm CPUs; in the name of a machine it is an architecture of GPUs.
fn by_maker(cpu: &str) -> Option<Processor> {
    cpu.to_ascii_uppercase().contains("AMPERE").then_some(Processor::Arm)
}

fn by_name(text: &str) -> Option<Processor> {
    let upper = text.to_ascii_uppercase();
    let words: Vec<&str> = upper.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let has = |names: &[&str]| names.iter().any(|name| words.contains(name));
    if has(&["AMD", "EPYC", "RYZEN", "THREADRIPPER", "WRX90", "WRX90E"]) {
        Some(Processor::Amd)
    } else if has(&["POWER9", "AC922"]) {
        Some(Processor::Power9)
    } else if has(&[
        "ARM",
        "NEOVERSE",
        "GRACE",
        "KUNPENG",
        "ALTRA",
        "AMPEREONE",
        "EMAG",
        "GRAVITON",
        "GH200",
        "GB200",
        "GB300",
    ]) {
        Some(Processor::Arm)
    } else if has(&["ZHAOXIN", "KAISHENG"]) {
        Some(Processor::Zhaoxin)
    } else if has(&["XEON"]) {
        Some(xeon(&words))
    } else {
        None
    }
}

/// Xeon generations by their numbers: `E5-2698 v4`, `Platinum 8470` (second digit is the generation), `6787P`.
fn xeon(words: &[&str]) -> Processor {
    if words.iter().any(|word| ["V2", "V3", "V4", "E5", "E7"].contains(word)) {
        return Processor::Broadwell;
    }
    for word in words {
        let digits: Vec<u8> = word.bytes().take_while(u8::is_ascii_digit).collect();
        let &[_, generation, _, _] = digits.as_slice() else {
            continue;
        };
        return match generation {
            b'5'..=b'9' => Processor::EmeraldRapids,
            b'4' => Processor::SapphireRapids,
            _ => Processor::Skylake,
        };
    }
    Processor::Skylake
}

#[cfg(test)]
mod tests;
