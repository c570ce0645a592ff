//! Counts and the leading one: products, replicas, cliques, healthy GPUs.

use std::sync::Arc;

use gantry_api::DeviceHealth;
use gantry_config::Config;
use gantry_plugin::inventory::Hardware;
use gantry_plugin::labels::{Facts, Host, PciClass, labels};
use gantry_plugin::offer::offer;
use gantry_topology::Gpu;

use super::{cut, get, in_clique, labels_of, machine, models, of, offered, plain, shared};

#[test]
fn shared_product_has_suffix_unless_renamed() {
    let machine = machine("l4-4x-pcie");
    let same = labels_of(&offered(&machine, "nvidia.com/gpu", 4), &shared(4));
    assert_eq!(get(&same, "nvidia.com/gpu.product"), Some("NVIDIA-L4-SHARED"));
    let renamed = labels_of(&offered(&machine, "nvidia.com/gpu.shared", 4), &shared(4));
    assert_eq!(get(&renamed, "nvidia.com/gpu.product"), Some("NVIDIA-L4"));
    for labels in [same, renamed] {
        assert_eq!(get(&labels, "nvidia.com/gpu.replicas"), Some("4"));
        assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("4"), "GPUs, not replicas");
        assert_eq!(get(&labels, "nvidia.com/gpu.sharing-strategy"), Some("time-slicing"));
    }
    let whole = plain(&machine, &Config::default());
    assert_eq!(get(&whole, "nvidia.com/gpu.replicas"), Some("1"));
    assert_eq!(get(&whole, "nvidia.com/gpu.sharing-strategy"), Some("none"));
}

#[test]
fn most_frequent_product_leads_and_each_is_counted() {
    let labels = plain(&models(&["T4", "NVIDIA A40", "NVIDIA A40", "T4", "NVIDIA A40"]), &Config::default());
    assert_eq!(get(&labels, "nvidia.com/gpu.product"), Some("NVIDIA-A40"));
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("3"));
    assert_eq!(get(&labels, "nvidia.com/gpu.memory"), Some("1010"));
    assert_eq!(get(&labels, "gantry.dev/gpu-count.NVIDIA-A40"), Some("3"));
    assert_eq!(get(&labels, "gantry.dev/gpu-count.T4"), Some("2"));
    assert_eq!(get(&labels, "gantry.dev/gpu-memory.T4"), Some("1002"));
    let tied = plain(&models(&["T4", "NVIDIA A40"]), &Config::default());
    assert_eq!(get(&tied, "nvidia.com/gpu.product"), Some("T4"), "the one of the lowest index");
}

#[test]
fn display_gpu_is_not_counted() {
    let labels = plain(&models(&["NVIDIA DGX Display", "NVIDIA A100-SXM4-80GB"]), &Config::default());
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("1"));
    assert_eq!(get(&labels, "nvidia.com/gpu.product"), Some("NVIDIA-A100-SXM4-80GB"));
}

/// A DGX Station: four GPUs for computing, and one for the screen with another PCI class, NUMA node and NVLink domain.
#[test]
fn display_gpu_is_in_no_label() {
    let station = |boards: &[(&str, u8)]| {
        let gpus = boards.iter().map(|(model, number)| Gpu {
            model: Some((*model).to_owned()),
            bus_id: Some(format!("0000:0{number}:00.0").parse().unwrap()),
            numa: Some(u32::from(*number > 3).to_string().parse().unwrap()),
            ..Gpu::default()
        });
        let machine = of(gpus);
        let class = |gpu: &Gpu| match gpu.model.as_deref() {
            Some("NVIDIA DGX Display") => PciClass::Display,
            _ => PciClass::Compute,
        };
        let classes = machine.gpus().iter();
        let host = Host {
            classes: classes.map(|gpu| (gpu.bus_id.clone().unwrap(), class(gpu))).collect(),
            machine_type: Some("DGX Station".to_owned()),
            ..Host::default()
        };
        labels(&Facts {
            inventory: &offer(&Hardware::of(Arc::new(machine)), &Config::default()),
            config: &Config::default(),
            host: &host,
            watched: true,
            timestamp: None,
        })
    };
    let board = "NVIDIA A100-SXM4-80GB";
    let without = station(&[(board, 1), (board, 2), (board, 3)]);
    assert_eq!(get(&without, "nvidia.com/gpu.mode"), Some("compute"));
    assert_eq!(station(&[(board, 1), (board, 2), (board, 3), ("NVIDIA DGX Display", 4)]), without);
    assert_eq!(station(&[("NVIDIA DGX Display", 4)]), station(&[]), "a machine without GPUs");
}

#[test]
fn nvidia_clique_needs_agreement_ours_is_the_largest() {
    let one = plain(&of([in_clique(1), in_clique(1), Gpu::default()]), &Config::default());
    assert_eq!(get(&one, "nvidia.com/gpu.clique"), Some("7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"));
    let two = plain(&of([in_clique(1), in_clique(2), in_clique(2)]), &Config::default());
    assert_eq!(get(&two, "nvidia.com/gpu.clique"), None);
    assert_eq!(get(&two, "gantry.dev/fabric.clique"), Some("2"));
}

#[test]
fn healthy_label_counts_gpus_if_watched() {
    let machine = cut(machine("dgx-a100"), |gpu| (gpu == 0).then_some(&["1g.5gb"; 7]));
    let mut inventory = offered(&machine, "nvidia.com/gpu", 2);
    for device in inventory.devices.iter_mut().filter(|device| device.gpu == 0).take(1) {
        device.health = DeviceHealth { healthy: false, reason: Some("Xid 79".into()) };
    }
    let config = Config::default();
    let facts = Facts {
        inventory: &inventory,
        config: &config,
        host: &Host::default(),
        watched: true,
        timestamp: Some(1_700_000_000),
    };
    let labels = labels(&facts);
    assert_eq!(get(&labels, "gantry.dev/gpu.healthy"), Some("7"));
    assert_eq!(get(&labels, "nvidia.com/gfd.timestamp"), Some("1700000000"));
    assert_eq!(get(&labels_of(&inventory, &config), "gantry.dev/gpu.healthy"), None);
}
