//! The rate of the link between sockets, by the name of the CPU. Rates are NCCL's (`src/graph/topo.h`): `BDW_QPI_BW` 6,
//! `SKL_QPI_BW` 10, `SRP_QPI_BW` 22, `ERP_QPI_BW` 40, `AMD_BW` 16, `P9_BW` 32, `ARM_BW` 6, `ZPI_BW` 6 GB/s. Nothing
//! else.

use super::LinkRate;
use crate::machine::Machine;

/// CPUs as far as their socket links differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Processor {
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
    pub(super) fn socket_link(self) -> LinkRate {
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
pub(super) fn unknown_socket_link(pcie_generation: u8) -> LinkRate {
    if pcie_generation <= 3 { Processor::Skylake.socket_link() } else { Processor::Amd.socket_link() }
}

/// The machine's CPU, from the host's CPU model or else from the machine's name.
pub(super) fn of(machine: &Machine) -> Option<Processor> {
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
