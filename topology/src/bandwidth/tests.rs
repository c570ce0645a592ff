use super::*;
use crate::machine::{Host, MachineParts, NvLinkBundle, NvLinkPorts, PathMatrix, PcieLink};

/// A machine of `count` unknown GPUs, all pairs of one class.
fn unknown(count: u8, class: PathClass) -> MachineParts {
    MachineParts {
        gpus: (0..count).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        paths: PathMatrix::from_fn(usize::from(count), |_, _| class),
        ..MachineParts::default()
    }
}

fn link(parts: &mut MachineParts, a: u8, b: u8, links: u8) {
    parts.nvlinks.push(NvLinkBundle { gpus: [a, b], links });
}

fn pair_gbs(machine: &Machine, a: usize, b: usize) -> f64 {
    gbs(Rates::of(machine).pair(machine, a, b).effective)
}

fn pair(parts: MachineParts) -> (f64, f64) {
    let machine = Machine::new(parts).unwrap();
    (pair_gbs(&machine, 0, 1), gbs(Rates::of(&machine).pair(&machine, 0, 1).raw))
}

#[test]
fn named_model_has_its_generation() {
    let cases = [
        ("Tesla V100-SXM2-16GB", 2, 40.0, 50.0),
        ("Tesla P100-SXM2-16GB", 1, 18.0, 20.0),
        ("NVIDIA A100-SXM4-80GB", 12, 240.0, 300.0),
        ("NVIDIA A40", 4, 48.0, 56.248),
        ("NVIDIA H100 80GB HBM3", 18, 370.8, 450.0),
        ("NVIDIA H200", 18, 370.8, 450.0),
        // Three peers of 6 links each come to the data sheet's 900 GB/s, both ways together.
        ("NVIDIA H200 NVL", 6, 123.6, 150.0),
        ("NVIDIA B200", 18, 721.8, 900.0),
    ];
    for (model, links, effective, raw) in cases {
        let mut parts = unknown(2, PathClass::Sys);
        for gpu in &mut parts.gpus {
            gpu.model = Some(model.to_owned());
        }
        link(&mut parts, 0, 1, links);
        assert_eq!(pair(parts), (effective, raw), "{model}");
    }
}

#[test]
fn pcie_rate_is_that_of_the_slower_slot() {
    let mut parts = unknown(2, PathClass::Node);
    parts.gpus[0].pcie = Some(PcieLink { generation: 5, width: 16 });
    parts.gpus[1].pcie = Some(PcieLink { generation: 4, width: 8 });
    assert_eq!(pair(parts), (12.0, 15.75));
}

#[test]
fn socket_traffic_has_the_rate_of_the_cpu_link() {
    for (cpu, rate) in [
        ("Intel(R) Xeon(R) CPU E5-2698 v4 @ 2.20GHz", 6.0),
        ("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", 10.0),
        ("Intel(R) Xeon(R) Platinum 8358 CPU @ 2.60GHz", 10.0),
        ("Intel(R) Xeon(R) Platinum 8480+", 22.0),
        ("INTEL(R) XEON(R) PLATINUM 8570", 24.0),
        ("Intel(R) Xeon(R) 6787P", 24.0),
        ("AMD EPYC 7742 64-Core Processor", 16.0),
        ("POWER9, altivec supported", 24.0),
        ("Neoverse-V2", 6.0),
    ] {
        let mut parts = unknown(2, PathClass::Sys);
        parts.host = Host { cpu: Some(cpu.to_owned()), ..Host::default() };
        assert_eq!(pair(parts).0, rate, "{cpu}: the lesser of the socket link and PCIe 4 x16, 24 GB/s");
    }
}

#[test]
fn unknown_models_are_rated_by_their_links() {
    // 4 links to one peer: a GA102 bridge over PCIe 4.
    let mut parts = unknown(4, PathClass::Sys);
    link(&mut parts, 0, 1, 4);
    link(&mut parts, 2, 3, 4);
    let machine = Machine::new(parts).unwrap();
    assert_eq!([pair_gbs(&machine, 0, 1), pair_gbs(&machine, 0, 2)], [48.0, 16.0]);

    // A mesh of single links: Pascal. One double link among them: Volta.
    for (links, rate) in [(1, 18.0), (2, 40.0)] {
        let mut parts = unknown(4, PathClass::Sys);
        for (a, b) in [(0, 2), (1, 3), (2, 3)] {
            link(&mut parts, a, b, 1);
        }
        link(&mut parts, 0, 1, links);
        let machine = Machine::new(parts).unwrap();
        assert_eq!(pair_gbs(&machine, 0, 1), rate);
        assert_eq!(pair_gbs(&machine, 0, 3), 10.0, "PCIe 3 machines are of Skylake's years");
    }

    // 18 links to one peer, as a virtual machine of two shows them, or to each of three: Hopper, for an A100 has 12.
    let mut parts = unknown(2, PathClass::Phb);
    link(&mut parts, 0, 1, 18);
    assert_eq!(pair(parts), (370.8, 450.0));
    let mut parts = unknown(4, PathClass::Sys);
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        link(&mut parts, a, b, 6);
    }
    assert_eq!(pair(parts), (123.6, 150.0));
    let mut parts = unknown(4, PathClass::Sys);
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        link(&mut parts, a, b, 4);
    }
    assert_eq!(pair(parts), (80.0, 100.0), "an A100 has 12");

    // 16 and 18 links into a switch: Hopper.
    for links in [16, 18] {
        let mut parts = unknown(2, PathClass::Sys);
        for gpu in &mut parts.gpus {
            gpu.nvlink = Some(NvLinkPorts { version: None, switch_links: links, ..NvLinkPorts::default() });
        }
        assert_eq!(pair(parts).0, 20.6 * f64::from(links));
    }

    // 18 links into a switch: Hopper.
    let mut parts = unknown(2, PathClass::Sys);
    for gpu in &mut parts.gpus {
        gpu.nvlink = Some(NvLinkPorts { version: None, switch_links: 18, ..NvLinkPorts::default() });
    }
    assert_eq!(pair(parts).0, 370.8);
}

#[test]
fn unknown_gpus_are_reported_as_guessed() {
    let mut parts = unknown(5, PathClass::Sys);
    parts.gpus[1].model = Some("NVIDIA H100 80GB HBM3".to_owned());
    parts.gpus[2].compute_capability = Some("9.0".to_owned());
    parts.gpus[3].nvlink = Some(NvLinkPorts { version: Some(4), ..NvLinkPorts::default() });
    parts.gpus[4].model = Some("NVIDIA Unheard-of".to_owned());
    assert_eq!(guessed(&Machine::new(parts.clone()).unwrap()), [0, 4]);
    parts.name = Some("AWS p4d instance, 8xA100".to_owned());
    assert_eq!(guessed(&Machine::new(parts).unwrap()), [0_u8; 0]);
}

#[test]
fn machine_name_is_the_last_hint() {
    let mut parts = unknown(2, PathClass::Sys);
    parts.name = Some("IBM AC922 (POWER9): 4x V100, NV3 pairs per socket".to_owned());
    assert_eq!(pair(parts.clone()).0, 32.0);
    link(&mut parts, 0, 1, 3);
    assert_eq!(pair(parts).0, 60.0);

    let mut parts = unknown(2, PathClass::Sys);
    parts.name = Some("8x TITAN V, pairs on PIX".to_owned());
    assert_eq!(pair(parts).0, 10.0);
    let mut parts = unknown(2, PathClass::Node);
    parts.name = Some("AWS p4d instance, 8xA100".to_owned());
    assert_eq!(pair(parts).0, 24.0);
}

#[test]
fn missing_pair_has_no_rate() {
    let machine = Machine::new(unknown(2, PathClass::Pix)).unwrap();
    assert_eq!(pair_gbs(&machine, 1, 1), 0.0);
    assert_eq!(pair_gbs(&machine, 0, 7), 0.0);
}

/// Ampere is a maker of CPUs and an architecture of GPUs.
#[test]
fn ampere_in_machine_name_is_no_cpu() {
    let socket = |cpu: Option<&str>, name: &str| {
        let mut parts = unknown(2, PathClass::Sys);
        parts.name = Some(name.to_owned());
        parts.host.cpu = cpu.map(str::to_owned);
        processor_of(&Machine::new(parts).unwrap())
    };
    use Processor::{Amd, Arm, Skylake};
    let xeon = "8x A40 (Ampere), Intel Xeon Gold 6330";
    for (cpu, name, expected) in [
        (None, xeon, Some(Skylake)),
        (None, "8x A40 (Ampere), EPYC 7543", Some(Amd)),
        (None, "8x A40 (Ampere)", None),
        (None, "2x A100, Ampere Altra Max", Some(Arm)),
        (None, "2x A100, Ampere(R) AmpereOne(R) A192", Some(Arm)),
        (None, "2x A100, Ampere eMAG", Some(Arm)),
        (Some("Ampere(R) Processor"), "8x A40", Some(Arm)),
        (Some("Ampere(R) Processor"), xeon, Some(Arm)),
        (Some("Intel(R) Xeon(R) Gold 6330"), "8x A40 (Ampere)", Some(Skylake)),
    ] {
        assert_eq!(socket(cpu, name), expected, "{cpu:?}, {name:?}");
    }
}
