//! The content of a specification: a function of devices, configuration and host.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gantry_config::{Config, DeviceIdStrategy, Imex};
use gantry_plugin::cdi::{Class, Host, Kind, Names, Spec, specs};
use gantry_plugin::inventory::{Device, Inventory};
use proptest::prelude::{ProptestConfig, any, prop, prop_assert, proptest};
use proptest::strategy::Strategy as Generator;
use serde_json::Value;

use super::rules::check;
use super::{VERSION, cdi, gpu, machine, slice, touch};

/// The root of a Debian host with the driver, with or without NVIDIA's toolkit.
fn driver_root(toolkit: bool) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let library = "usr/lib/x86_64-linux-gnu";
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        touch(root.path(), &format!("{library}/{name}.{VERSION}"));
        let link = root.path().join(library).join(format!("{name}.1"));
        std::os::unix::fs::symlink(format!("{name}.{VERSION}"), link).unwrap();
    }
    let files = [
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-cuda-mps-control",
        "run/nvidia-persistenced/socket",
        &format!("lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    ];
    for file in files {
        touch(root.path(), file);
    }
    if toolkit {
        touch(root.path(), "usr/bin/nvidia-ctk");
    }
    root
}

/// The specifications of a fresh start.
fn specs_of(config: &Config, inventory: &Inventory, host: &Host) -> BTreeMap<Class, Spec> {
    let mut names = Names::default();
    names.learn(inventory, config.device_id_strategy);
    specs(&Kind::default(), config, inventory, host, &names)
}

fn text(config: &Config, dev: &Path, sys: &Path, inventory: &Inventory) -> String {
    let host = Host::read(config, &inventory.machine, dev, sys);
    let specs = specs_of(config, inventory, &host);
    assert_eq!(specs.keys().collect::<Vec<_>>(), [&Class::Gpu]);
    specs[&Class::Gpu].text()
}

#[test]
fn spec_of_node_with_driver_and_toolkit() {
    let (root, dev, sys) = (driver_root(true), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in ["nvidiactl", "nvidia-uvm", "nvidia0", "dri/card1", "dri/renderD128"] {
        touch(dev.path(), name);
    }
    for name in ["card1", "renderD128", "card7"] {
        touch(sys.path(), &format!("bus/pci/devices/0000:00:00.0/drm/{name}/dev"));
    }
    let config = Config { container_driver_root: root.path().into(), ..cdi() };
    let inventory = Inventory::ready(machine(2), vec![gpu(0), slice(1, 0)]);
    insta::assert_snapshot!(text(&config, dev.path(), sys.path(), &inventory));
}

#[test]
fn other_driver_root_without_toolkit_mounts_link_names() {
    let (root, dev) = (driver_root(false), tempfile::tempdir().unwrap());
    touch(dev.path(), "nvidiactl");
    touch(root.path(), "toolkit/nvidia-ctk");
    let config = Config {
        container_driver_root: root.path().into(),
        driver_root: "/run/nvidia/driver".into(),
        dev_root: "/run/nvidia/driver".into(),
        // The folder is visible, and the program is not in it.
        cdi_hook_path: "/run/nvidia/driver/toolkit/nvidia-cdi-hook".into(),
        device_id_strategy: DeviceIdStrategy::Index,
        ..cdi()
    };
    let inventory = Inventory::ready(machine(1), vec![gpu(0)]);
    insta::assert_snapshot!(text(&config, dev.path(), Path::new("/nowhere"), &inventory));
}

/// Names that graphics need and the loader's cache does not have: links, if NVIDIA's toolkit can create them.
#[test]
fn graphics_links_are_made_beside_their_libraries() {
    let root = driver_root(true);
    let library = "usr/lib/x86_64-linux-gnu";
    for name in ["libnvidia-vulkan-producer.so", "libnvidia-allocator.so"] {
        touch(root.path(), &format!("{library}/{name}.{VERSION}"));
    }
    touch(root.path(), "usr/share/vulkan/icd.d/nvidia_icd.json");
    let config = Config { container_driver_root: root.path().into(), ..cdi() };
    let inventory = Inventory::ready(machine(1), vec![gpu(0)]);
    let text = text(&config, Path::new("/nowhere"), Path::new("/nowhere"), &inventory);
    for link in [
        &format!("libnvidia-vulkan-producer.so.{VERSION}::/{library}/libnvidia-vulkan-producer.so"),
        &format!("../libnvidia-allocator.so.1::/{library}/gbm/nvidia-drm_gbm.so"),
    ] {
        assert!(text.contains(&format!("\"{link}\"")), "{link}: {text}");
    }
    let spec: Value = serde_json::from_str(&text).unwrap();
    let mounts = spec["containerEdits"]["mounts"].as_array().unwrap();
    let vulkan =
        mounts.iter().find(|mount| mount["containerPath"] == "/etc/vulkan/icd.d/nvidia_icd.json").unwrap();
    assert_eq!(vulkan["hostPath"], "/usr/share/vulkan/icd.d/nvidia_icd.json");
}

#[test]
fn device_node_has_numbers_and_group_if_restricted() {
    use gantry_config::CdiFeature;
    use gantry_plugin::allocate::{Facts, Nodes};
    let facts = |minor, mode, gid| Facts { numbers: Some((195, minor)), mode, gid };
    let nodes: Nodes =
        [("nvidia0".to_owned(), facts(0, 0o666, 7)), ("nvidia1".to_owned(), facts(1, 0o660, 44))]
            .into_iter()
            .collect();
    let host = Host { nodes, ..Host::default() };
    let inventory = Inventory::ready(machine(3), vec![gpu(0), gpu(1), gpu(2)]);
    let written = |flags: &[CdiFeature]| -> Value {
        let config = Config { cdi_feature_flags: flags.to_vec(), ..cdi() };
        let text = specs_of(&config, &inventory, &host)[&Class::Gpu].text();
        check(&text);
        serde_json::from_str(&text).unwrap()
    };
    let spec = written(&[]);
    let edits = |device: usize| spec["devices"][device]["containerEdits"].clone();
    let node = |minor, mode, gid| {
        serde_json::json!({
            "path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor,
            "fileMode": mode, "permissions": "rwm", "gid": gid
        })
    };
    assert_eq!(edits(0)["deviceNodes"][0], node(0, 0o666, 7));
    assert!(edits(0)["additionalGids"].is_null());
    assert_eq!(edits(1)["deviceNodes"][0], node(1, 0o660, 44));
    assert_eq!(edits(1)["additionalGids"], serde_json::json!([44]));
    let unseen = serde_json::json!({"path": "/dev/nvidia2", "permissions": "rwm"});
    assert_eq!(edits(2)["deviceNodes"][0], unseen);
    let without = written(&[CdiFeature::NoAdditionalGidsForDeviceNodes]);
    assert_eq!(without["cdiVersion"], "0.3.0");
}

#[test]
fn disabled_hooks_and_sockets_are_left_out() {
    use gantry_config::{CdiFeature, CdiHook};
    let root = driver_root(true);
    let config = |hooks: &[CdiHook]| Config {
        container_driver_root: root.path().into(),
        cdi_disabled_hooks: hooks.to_vec(),
        cdi_feature_flags: vec![CdiFeature::DisableIpcDiscoverer],
        ..cdi()
    };
    let inventory = Inventory::ready(machine(1), vec![gpu(0)]);
    let written =
        |hooks: &[CdiHook]| text(&config(hooks), Path::new("/nowhere"), Path::new("/nowhere"), &inventory);
    let some = written(&[CdiHook::EnableCudaCompat]);
    assert!(some.contains("update-ldcache") && !some.contains("enable-cuda-compat"));
    assert!(!some.contains("persistenced/socket"));
    assert!(!written(&[CdiHook::All]).contains("hooks"));
}

fn any_device() -> impl Generator<Value = Device> {
    let any_uuid = prop::option::of("MIG-GPU-[0-9a-f]{4}/[0-9]/[0-9]|[ -~]{1,12}");
    (0..4_u8, prop::option::of(0..3_u8), any_uuid, any::<bool>(), any::<bool>()).prop_map(
        |(index, part, uuid, known, caps)| {
            let mut device = part.map_or_else(|| gpu(index), |part| slice(index, part));
            if let Some(uuid) = uuid {
                device.uuid = uuid;
            }
            if !known {
                device.minor = None;
            }
            if let Some(slice) = device.slice.as_mut().filter(|_| !caps) {
                Arc::make_mut(slice).caps = None;
            }
            device
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn specs_keep_the_rules_of_cdi(
        devices in prop::collection::vec(any_device(), 0..8),
        there in prop::sample::subsequence(vec!["nvidiactl", "nvidia-uvm", "gdrdrv", "nvidia-fs0", "infiniband/uverbs0", "nvidia-caps-imex-channels/channel0"], 0..=6),
        [index, elsewhere, toolkit, driver] in any::<[bool; 4]>(),
    ) {
        let (root, dev) = (driver_root(toolkit), tempfile::tempdir().unwrap());
        for name in there {
            touch(dev.path(), name);
        }
        let moved = if elsewhere { "/run/nvidia/driver" } else { "/" };
        let config = Config {
            device_id_strategy: if index { DeviceIdStrategy::Index } else { DeviceIdStrategy::Uuid },
            container_driver_root: if driver { root.path().into() } else { "/nowhere".into() },
            driver_root: moved.into(),
            dev_root: moved.into(),
            gdrcopy: true,
            gds: true,
            mofed: true,
            imex: Imex { channel: true, required: false },
            ..cdi()
        };
        let inventory = Inventory::ready(machine(4), devices);
        let host = Host::read(&config, &inventory.machine, dev.path(), Path::new("/nowhere"));
        let written: BTreeMap<Class, _> = specs_of(&config, &inventory, &host);
        for spec in written.values() {
            check(&spec.text());
        }
        let given = inventory.devices.iter().any(|device| device.minor.is_some());
        prop_assert!(written.contains_key(&Class::Gpu) == given);
    }
}
