//! The machine files of the project: all are complete, and NVML and sysfs agree on them.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops where something is not as it should be; unsafe is for what it shares with the others"
)]

use std::collections::BTreeSet;

use gantry_nvml_sim::companion::Tree;
use gantry_nvml_sim::facts::{Facts, Product};
use gantry_topology::{Link, Machine};

mod common;
use common::{MACHINES, machines_folder};

fn read(name: &str) -> Machine {
    let path = machines_folder().join(format!("{name}.yaml"));
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_list_of_machines_is_what_lies_in_the_folder() {
    let found: BTreeSet<String> = std::fs::read_dir(machines_folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let listed: BTreeSet<String> = MACHINES.iter().map(|name| format!("{name}.yaml")).collect();
    assert_eq!(found, listed);
}

#[test]
fn every_machine_file_describes_its_devices_completely() {
    for name in MACHINES {
        let machine = read(name);
        assert_eq!(machine.name(), name);
        assert!(machine.host().driver.is_some() && machine.host().cpu.is_some(), "{name}");
        for gpu in machine.gpus() {
            let told = gpu.uuid.is_some() && gpu.bus_id.is_some() && gpu.memory_mib.is_some();
            assert!(told && gpu.numa.is_some() && gpu.cpus.is_some() && gpu.pcie.is_some(), "{name}");
            let product = Product::find(gpu.model.as_deref(), None);
            assert_eq!(Some(product.name), gpu.model.as_deref(), "{name}");
            assert_eq!(Some(product.memory_mib), gpu.memory_mib, "{name}");
        }
        for nic in machine.nics() {
            assert!(nic.bus_id.is_some() && nic.numa.is_some(), "{name}");
        }
    }
}

#[test]
fn every_machine_file_has_paths_that_a_pci_tree_can_show() {
    for name in MACHINES {
        let facts = Facts::of(&read(name)).unwrap();
        assert_eq!(Tree::of(&facts).misfits, [], "{name}");
    }
}

#[test]
fn no_gpu_has_more_links_than_its_hardware() {
    for name in MACHINES {
        for gpu in Facts::of(&read(name)).unwrap().gpus {
            assert!(gpu.links.len() <= usize::from(gpu.product.nvlink.1), "{name}");
        }
    }
}

#[test]
fn the_machines_are_what_they_are_named_after() {
    let row = |name: &str, gpu: usize| -> Vec<String> {
        let machine = read(name);
        let gpus = machine.gpus().len();
        (0..gpus).map(|other| machine.link(gpu, other).to_string()).collect()
    };
    assert_eq!(row("dgx1-v100", 0), ["X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"]);
    assert_eq!(row("dgx1-v100", 6), ["SYS", "SYS", "NV1", "SYS", "NV1", "NV2", "X", "NV2"]);
    assert_eq!(row("a40-8x-bridged", 3), ["NODE", "NODE", "NV4", "X", "SYS", "SYS", "SYS", "SYS"]);
    assert_eq!(row("l4-4x-pcie", 2), ["SYS", "SYS", "X", "NODE"]);
    for (name, links) in [("dgx-a100", 12), ("hgx-h100", 18), ("dgx2-16x-v100", 6)] {
        let machine = read(name);
        for a in 0..machine.gpus().len() {
            for b in 0..a {
                assert_eq!(machine.link(a, b), Link::NvLink(links), "{name}");
            }
        }
    }
}

#[test]
fn every_cut_is_one_that_the_model_allows() {
    let catalogue = gantry_topology::mig::Catalogue::built_in();
    for name in MACHINES {
        let checked = gantry_topology::mig::check_machine(&catalogue, &read(name));
        assert_eq!(checked, Ok(()), "{name}");
    }
}
