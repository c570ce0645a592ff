//! Labels about the host: its machine type, and whether its GPUs are virtual.

use std::path::Path;

use gantry_config::Config;
use gantry_plugin::inventory::Inventory;
use gantry_plugin::labels::{Facts, Host, HostDriver, HostOptions, LabelName, Vgpu, labels};

use super::{get, machine, offered};
use crate::sim::Sim;

#[test]
fn machine_type_without_valid_characters_is_unknown() {
    for (said, label) in [
        (Some("-"), "unknown"),
        (Some("\u{e9}\u{4e2d}\u{6587}"), "unknown"),
        (Some(""), "unknown"),
        (None, "unknown"),
        (Some("\u{4e2d} R740"), "R740"),
    ] {
        let inventory = offered(&machine("l4-4x-pcie"), "nvidia.com/gpu", 1);
        let labels = labels(&Facts {
            inventory: &inventory,
            config: &Config::default(),
            host: &Host { machine_type: said.map(str::to_owned), ..Host::default() },
            watched: true,
            timestamp: None,
        });
        assert_eq!(get(&labels, "nvidia.com/gpu.machine"), Some(label), "{said:?}");
    }
}

#[test]
fn node_without_gpus_has_timestamp_and_vgpu_labels_only() {
    let labels = labels(&Facts {
        inventory: &Inventory::absent("no GPU"),
        config: &Config::default(),
        host: &Host {
            machine_type: Some("PowerEdge R740".to_owned()),
            vgpu: Some(Vgpu { driver: None }),
            ..Host::default()
        },
        watched: true,
        timestamp: Some(1_700_000_000),
    });
    let names: Vec<&str> = labels.keys().map(LabelName::as_str).collect();
    assert_eq!(names, ["nvidia.com/gfd.timestamp", "nvidia.com/vgpu.present"]);
}

#[test]
fn host_is_read_at_the_configured_paths() {
    let sim = Sim::of("workstation-2x");
    let sys = sim.installed.layout.sys.clone();
    std::fs::create_dir_all(sys.join("class/dmi/id")).unwrap();
    std::fs::write(sys.join("class/dmi/id/product_name"), "Standard PC (Q35 + ICH9, 2009)\n").unwrap();
    let options = HostOptions { machine_type_file: sys.join("class/dmi/id/product_name"), sys_root: sys };
    let inventory = offered(sim.installed.facts.machine(), "nvidia.com/gpu", 1);
    let config = Config::default();
    let labels_on = |host: &Host| {
        labels(&Facts { inventory: &inventory, config: &config, host, watched: false, timestamp: None })
    };
    let found = labels_on(&Host::read(&options));
    assert_eq!(get(&found, "nvidia.com/gpu.machine"), Some("Standard-PC-Q35-ICH9-2009"));
    assert_eq!(get(&found, "nvidia.com/gpu.mode"), Some("graphics"));
    assert_eq!(get(&found, "nvidia.com/vgpu.present"), None);
    // A trademark's sign as Windows writes it.
    std::fs::write(&options.machine_type_file, b"ProLiant\xae DL380 Gen10\n").unwrap();
    let marked = labels_on(&Host::read(&options));
    assert_eq!(get(&marked, "nvidia.com/gpu.machine"), Some("ProLiant-DL380-Gen10"));
    let nowhere =
        Host::read(&HostOptions { machine_type_file: "".into(), sys_root: Path::new("/nowhere").into() });
    let unknown = labels_on(&nowhere);
    assert_eq!(get(&unknown, "nvidia.com/gpu.machine"), Some("unknown"));
    assert_eq!(get(&unknown, "nvidia.com/gpu.mode"), Some("unknown"));
    let virtual_gpu = labels_on(&Host {
        vgpu: Some(Vgpu { driver: Some(HostDriver { version: "460.16".into(), branch: "r460_00".into() }) }),
        ..nowhere
    });
    assert_eq!(get(&virtual_gpu, "nvidia.com/vgpu.present"), Some("true"));
    assert_eq!(get(&virtual_gpu, "nvidia.com/vgpu.host-driver-version"), Some("460.16"));
    assert_eq!(get(&virtual_gpu, "nvidia.com/vgpu.host-driver-branch"), Some("r460_00"));
}
