//! The host: driver and CUDA versions, and the CPU model, which determines the bandwidth between sockets.

use std::fs;
use std::path::Path;

use gantry_topology::Host;

use super::Warnings;
use crate::nvml::Nvml;

pub(super) fn read(nvml: &Nvml, proc_root: &Path, warnings: &mut Warnings) -> Host {
    let cpuinfo = fs::read_to_string(proc_root.join("cpuinfo"));
    Host {
        driver: warnings.known(nvml.driver_version()),
        cuda: warnings.known(nvml.cuda_version()).map(|(major, minor)| format!("{major}.{minor}")),
        cpu: cpuinfo.ok().and_then(|text| cpu_model(&text)),
    }
}

/// The model of the first CPU. x86 has `model name`, POWER `cpu`, 64-bit Arm only numbers: `CPU implementer`
/// and `CPU part`.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        cpuinfo
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    };
    let arm = || {
        let implementer = value("CPU implementer")?;
        let part = value("CPU part")?;
        Some(match (implementer.as_str(), part.as_str()) {
            ("0x41", "0xd4f") => "Arm Neoverse-V2".to_owned(),
            ("0x41", "0xd40") => "Arm Neoverse-V1".to_owned(),
            ("0x41", "0xd0c") => "Arm Neoverse-N1".to_owned(),
            ("0x41", "0xd49") => "Arm Neoverse-N2".to_owned(),
            _ => format!("Arm CPU implementer {implementer} part {part}"),
        })
    };
    value("model name").or_else(|| value("cpu")).or_else(arm)
}

#[cfg(test)]
mod tests {
    use super::cpu_model;

    #[test]
    fn cpu_model_is_read_on_each_architecture() {
        let x86 = "processor\t: 0\nmodel\t\t: 49\nmodel name\t: AMD EPYC 7742 64-Core Processor\n\nprocessor\t: 1\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("AMD EPYC 7742 64-Core Processor"));
        let power = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n";
        assert_eq!(cpu_model(power).as_deref(), Some("POWER9, altivec supported"));
        let grace = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(cpu_model(grace).as_deref(), Some("Arm Neoverse-V2"));
        assert_eq!(cpu_model("processor : 0\n"), None);
    }
}
