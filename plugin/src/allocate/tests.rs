use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use gantry_api::DeviceHealth;
use gantry_proto::deviceplugin::ContainerAllocateResponse;
use gantry_topology::{Machine, MachineParts};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
use proptest::strategy::Strategy as Generator;

use super::*;
use crate::cdi::{Class, Host, Kind, Names, Spec};
use crate::inventory::{Inventory, Slice};
use gantry_config::{DeviceIdStrategy, Imex, Strategy};

/// A whole GPU, or one of its seven slices.
fn device(gpu: u8, slice: Option<u8>, replica: Option<u16>) -> Device {
    let uuid = match slice {
        None => format!("GPU-{gpu}"),
        Some(slice) => format!("MIG-{gpu}-{slice}"),
    };
    Device {
        id: replica.map_or_else(|| uuid.clone(), |replica| format!("{uuid}::{replica}")).into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        nvml_index: Some(gpu),
        uuid,
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(u32::from(gpu)),
        numa: None,
        slice: slice.map(|index| {
            let instance = u32::from(index) + 7;
            let cap = 135 * u32::from(gpu) + 9 * instance;
            Arc::new(Slice {
                index,
                gpu_instance: instance,
                compute_instance: 0,
                profile: "1g.10gb".into(),
                start: index,
                size: 1,
                caps: Some([cap, cap + 1]),
            })
        }),
        replica,
    }
}

/// Nodes by name, with the properties of plain files.
fn nodes(names: &[&str]) -> Nodes {
    let dev = tempfile::tempdir().unwrap();
    for name in names {
        let path = dev.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }
    Nodes::read(&[dev.path()])
}

const CONTROL: [&str; 3] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"];

/// The specifications of a first start for these devices, and their names.
fn written(config: &Config, nodes: &Nodes, devices: &[Device]) -> (BTreeMap<Class, Spec>, Names) {
    let machine = Arc::new(Machine::new(MachineParts::default()).unwrap());
    let inventory = Inventory::ready(machine, devices.to_vec());
    let host = Host { nodes: nodes.clone(), ..Host::default() };
    let mut names = Names::default();
    names.learn(&inventory, config.device_id_strategy);
    let specs = crate::cdi::specs(&Kind::default(), config, &inventory, &host, &names);
    (specs, names)
}

/// The snapshot once the specifications of these devices are written.
fn access(config: Config, nodes: Nodes, devices: &[Device]) -> Access {
    let (specs, names) = written(&config, &nodes, devices);
    let entries = Entries::of(&Kind::default(), &specs, &names, config.device_id_strategy);
    Access { config: Arc::new(config), nodes: Arc::new(nodes), entries: Arc::new(entries), topology: None }
}

fn respond(config: Config, names: &[&str], devices: &[Device]) -> ContainerAllocateResponse {
    let access = access(config, nodes(names), devices);
    answer(&access, &devices.iter().collect::<Vec<_>>())
}

/// The response as readable text.
fn text(response: &ContainerAllocateResponse) -> String {
    let mut text = String::new();
    for (name, value) in &response.envs {
        writeln!(text, "env {name}={value}").unwrap();
    }
    for mount in &response.mounts {
        assert!(!mount.read_only);
        writeln!(text, "mount {} -> {}", mount.host_path, mount.container_path).unwrap();
    }
    for (key, value) in &response.annotations {
        let (prefix, _unique) = key.rsplit_once('_').unwrap();
        writeln!(text, "annotation {prefix}_...={value}").unwrap();
    }
    for device in &response.cdi_devices {
        writeln!(text, "cdi {}", device.name).unwrap();
    }
    for spec in &response.devices {
        writeln!(text, "node {} -> {} {}", spec.host_path, spec.container_path, spec.permissions).unwrap();
    }
    text
}

fn strategies(ways: &[Strategy]) -> Config {
    Config { device_list_strategy: ways.to_vec(), ..Config::default() }
}

#[test]
fn strategies_combine_except_visible_devices_and_mounts() {
    let mut all = String::new();
    for mask in 1..1_usize << Strategy::ALL.len() {
        let ways: Vec<Strategy> = (0..Strategy::ALL.len())
            .filter(|way| mask & 1 << way != 0)
            .map(|way| Strategy::ALL[way])
            .collect();
        let config = Config {
            pass_device_specs: true,
            imex: Imex { channel: true, required: false },
            ..strategies(&ways)
        };
        let response = respond(
            config,
            &["nvidiactl", "nvidia-caps-imex-channels/channel0"],
            &[device(3, None, None), device(5, None, None)],
        );
        writeln!(all, "{ways:?}\n{}", text(&response)).unwrap();
    }
    insta::assert_snapshot!(all);
}

#[test]
fn default_response_has_visible_devices_only() {
    let response = respond(Config::default(), &CONTROL, &[device(3, None, None), device(5, None, None)]);
    assert_eq!(text(&response), "env NVIDIA_VISIBLE_DEVICES=GPU-3,GPU-5\n");
}

#[test]
fn slices_get_gpu_node_once_and_capability_nodes() {
    let config =
        Config { pass_device_specs: true, dev_root: "/run/nvidia/driver".into(), ..Config::default() };
    let devices = [device(1, Some(0), None), device(1, Some(1), None), device(0, Some(2), None)];
    insta::assert_snapshot!(text(&respond(config, &CONTROL, &devices)), @"
    env NVIDIA_VISIBLE_DEVICES=MIG-1-0,MIG-1-1,MIG-0-2
    node /run/nvidia/driver/dev/nvidiactl -> /dev/nvidiactl rw
    node /run/nvidia/driver/dev/nvidia-uvm -> /dev/nvidia-uvm rw
    node /run/nvidia/driver/dev/nvidia-uvm-tools -> /dev/nvidia-uvm-tools rw
    node /run/nvidia/driver/dev/nvidia0 -> /dev/nvidia0 rw
    node /run/nvidia/driver/dev/nvidia1 -> /dev/nvidia1 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap81 -> /dev/nvidia-caps/nvidia-cap81 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap82 -> /dev/nvidia-caps/nvidia-cap82 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap198 -> /dev/nvidia-caps/nvidia-cap198 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap199 -> /dev/nvidia-caps/nvidia-cap199 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap207 -> /dev/nvidia-caps/nvidia-cap207 rw
    node /run/nvidia/driver/dev/nvidia-caps/nvidia-cap208 -> /dev/nvidia-caps/nvidia-cap208 rw
    ");
}

#[test]
fn index_strategy_gives_indices() {
    let config = Config {
        device_id_strategy: DeviceIdStrategy::Index,
        ..strategies(&[Strategy::Envvar, Strategy::CdiCri])
    };
    let devices = [device(0, None, None), device(10, None, None), device(2, Some(1), None)];
    insta::assert_snapshot!(text(&respond(config, &[], &devices)), @"
    env NVIDIA_VISIBLE_DEVICES=0,10,2:1
    cdi k8s.device-plugin.nvidia.com/gpu=0
    cdi k8s.device-plugin.nvidia.com/gpu=10
    cdi k8s.device-plugin.nvidia.com/gpu=2:1
    ");
}

#[test]
fn runtime_id_is_current_nvml_index_or_uuid() {
    // GPU 1 was removed: NVML counts the next one as 1.
    let devices = [
        device(0, None, None),
        Device { nvml_index: None, ..device(1, None, None) },
        Device { nvml_index: Some(1), ..device(2, Some(3), None) },
    ];
    let config =
        |ways: &[Strategy]| Config { device_id_strategy: DeviceIdStrategy::Index, ..strategies(ways) };
    // Names in our own specification are places, which stay.
    let both = config(&[Strategy::Envvar, Strategy::CdiCri]);
    insta::assert_snapshot!(text(&respond(both, &[], &devices)), @"
    env NVIDIA_VISIBLE_DEVICES=0,GPU-1,1:3
    cdi k8s.device-plugin.nvidia.com/gpu=0
    cdi k8s.device-plugin.nvidia.com/gpu=1
    cdi k8s.device-plugin.nvidia.com/gpu=2:3
    ");
    let mounts = respond(config(&[Strategy::VolumeMounts]), &[], &devices).mounts;
    let paths: Vec<&str> = mounts.iter().map(|mount| mount.container_path.as_str()).collect();
    let folder = "/var/run/nvidia-container-devices";
    assert_eq!(paths, ["0", "GPU-1", "1:3"].map(|id| format!("{folder}/{id}")));
}

#[test]
fn replicas_of_a_device_count_once() {
    let config = Config { pass_device_specs: true, ..strategies(&Strategy::ALL) };
    let devices = [
        device(4, None, Some(0)),
        device(4, None, Some(3)),
        device(5, Some(0), Some(0)),
        device(5, Some(0), Some(1)),
    ];
    insta::assert_snapshot!(text(&respond(config, &[], &devices)), @"
    env NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices
    mount /dev/null -> /var/run/nvidia-container-devices/GPU-4
    mount /dev/null -> /var/run/nvidia-container-devices/MIG-5-0
    annotation cdi.k8s.io/nvidia-device-plugin_...=k8s.device-plugin.nvidia.com/gpu=GPU-4,k8s.device-plugin.nvidia.com/gpu=MIG-5-0
    cdi k8s.device-plugin.nvidia.com/gpu=GPU-4
    cdi k8s.device-plugin.nvidia.com/gpu=MIG-5-0
    node /dev/nvidia4 -> /dev/nvidia4 rw
    node /dev/nvidia5 -> /dev/nvidia5 rw
    node /dev/nvidia-caps/nvidia-cap738 -> /dev/nvidia-caps/nvidia-cap738 rw
    node /dev/nvidia-caps/nvidia-cap739 -> /dev/nvidia-caps/nvidia-cap739 rw
    ");
}

#[test]
fn other_classes_are_named_only_if_they_exist() {
    let config = || Config {
        gdrcopy: true,
        gds: true,
        mofed: true,
        imex: Imex { channel: true, required: false },
        ..strategies(&[Strategy::CdiCri])
    };
    let there = ["gdrdrv", "nvidia-fs0", "infiniband/uverbs0", "nvidia-caps-imex-channels/channel0"];
    insta::assert_snapshot!(text(&respond(config(), &there, &[device(0, None, None)])), @"
    env NVIDIA_GDRCOPY=enabled
    env NVIDIA_GDS=enabled
    env NVIDIA_MOFED=enabled
    cdi k8s.device-plugin.nvidia.com/gpu=GPU-0
    cdi k8s.device-plugin.nvidia.com/imex-channel=0
    cdi k8s.device-plugin.nvidia.com/gdrcopy=all
    cdi k8s.device-plugin.nvidia.com/gds=all
    cdi k8s.device-plugin.nvidia.com/mofed=all
    ");
    insta::assert_snapshot!(text(&respond(config(), &["gdrdrv"], &[device(0, None, None)])), @"
    env NVIDIA_GDRCOPY=enabled
    env NVIDIA_GDS=enabled
    env NVIDIA_MOFED=enabled
    cdi k8s.device-plugin.nvidia.com/gpu=GPU-0
    cdi k8s.device-plugin.nvidia.com/gdrcopy=all
    ");
}

#[test]
fn device_without_spec_entry_is_not_named() {
    let missing = Device { minor: None, ..device(1, None, None) };
    let response = respond(strategies(&[Strategy::CdiCri]), &[], &[device(0, None, None), missing]);
    assert_eq!(text(&response), "cdi k8s.device-plugin.nvidia.com/gpu=GPU-0\n");
}

#[test]
fn annotation_keys_of_resources_differ() {
    let config =
        Config { cdi_annotation_prefix: "example.com/".into(), ..strategies(&[Strategy::CdiAnnotations]) };
    let devices = [device(0, None, None), device(1, Some(0), None)];
    let access = access(config, Nodes::default(), &devices);
    let [one, other] = [0, 1].map(|at| answer(&access, &[&devices[at]]).annotations);
    let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    assert_eq!(keys.len(), 2);
    for key in keys {
        let unique = key.strip_prefix("example.com/nvidia-device-plugin_").unwrap();
        let lengths: Vec<usize> = unique.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12], "{key}");
    }
}

#[test]
fn missing_required_imex_channel_is_an_error() {
    let config = |required| Config { imex: Imex { channel: true, required }, ..Config::default() };
    let channel = nodes(&["nvidia-caps-imex-channels/channel0"]);
    assert_eq!(check(&config(true), &channel), Ok(()));
    assert_eq!(check(&config(false), &Nodes::default()), Ok(()));
    let error = check(&config(true), &Nodes::default()).unwrap_err().to_string();
    assert!(error.contains("nvidia-caps-imex-channels/channel0"), "{error}");
    let nowhere = Config { container_driver_root: "/nowhere".into(), ..config(true) };
    let at_start = Access::at_start(&Arc::new(nowhere), Path::new("/nowhere/dev"));
    assert_eq!(at_start, Err(NoImexChannel));
    let response = respond(config(false), &[], &[device(0, None, None)]);
    assert_eq!(text(&response), "env NVIDIA_VISIBLE_DEVICES=GPU-0\n");
}

#[test]
fn responder_uses_the_latest_snapshot() {
    let (change, snapshots) = watch::channel(Arc::new(access(Config::default(), Nodes::default(), &[])));
    let responder = Responder::new(snapshots, TopologyFiles::at(Path::new("/nonexistent")));
    let gpu = device(6, None, None);
    assert!(responder.respond(&[&gpu]).mounts.is_empty());
    let config = strategies(&[Strategy::VolumeMounts]);
    change.send_replace(Arc::new(access(config, Nodes::default(), &[])));
    assert_eq!(responder.respond(&[&gpu]).mounts.len(), 1);
}

/// Any device of a machine with any MIG layout.
fn any_device() -> impl Generator<Value = Device> {
    (0..4_u8, prop::option::of(0..3_u8), prop::option::of(0..3_u16), any::<bool>()).prop_map(
        |(gpu, slice, replica, known)| Device {
            minor: known.then_some(u32::from(gpu)),
            ..device(gpu, slice, replica)
        },
    )
}

fn any_config() -> impl Generator<Value = Config> {
    let ways = prop::sample::subsequence(Strategy::ALL.to_vec(), 1..=4);
    (ways, any::<[bool; 6]>()).prop_map(|(ways, [nodes, index, gdrcopy, gds, mofed, channel])| Config {
        pass_device_specs: nodes,
        device_id_strategy: if index { DeviceIdStrategy::Index } else { DeviceIdStrategy::Uuid },
        gdrcopy,
        gds,
        mofed,
        imex: Imex { channel, required: false },
        ..strategies(&ways)
    })
}

fn any_nodes() -> impl Generator<Value = Nodes> {
    let all = vec![
        "nvidiactl",
        "nvidia-uvm",
        "gdrdrv",
        "nvidia-fs0",
        "infiniband/uverbs0",
        "nvidia-caps-imex-channels/channel0",
    ];
    prop::sample::subsequence(all, 0..=6).prop_map(|names| nodes(&names))
}

proptest! {
    #[test]
    fn nodes_mounts_and_names_are_unique(config in any_config(), nodes in any_nodes(), devices in prop::collection::vec(any_device(), 1..8)) {
        let response = answer(&access(config, nodes, &devices), &devices.iter().collect::<Vec<_>>());
        let once = |names: Vec<&String>| names.len() == names.iter().collect::<BTreeSet<_>>().len();
        prop_assert!(once(response.devices.iter().map(|node| &node.container_path).collect()));
        prop_assert!(once(response.mounts.iter().map(|mount| &mount.container_path).collect()));
        prop_assert!(once(response.cdi_devices.iter().map(|device| &device.name).collect()));
    }

    #[test]
    fn names_are_those_of_the_specs(config in any_config(), nodes in any_nodes(), devices in prop::collection::vec(any_device(), 1..8), known in 0..8_usize) {
        // Not all allocated devices are written, as after a failed write.
        let known = &devices[..known.min(devices.len())];
        let (specs, _) = written(&config, &nodes, known);
        let there: BTreeSet<String> = specs
            .iter()
            .flat_map(|(class, spec)| spec.names().map(|name| Kind::default().qualified(*class, name)))
            .collect();
        let response = answer(&access(config, nodes, known), &devices.iter().collect::<Vec<_>>());
        let annotated = response.annotations.values().flat_map(|names| names.split(',').map(str::to_owned));
        for name in response.cdi_devices.iter().map(|device| device.name.clone()).chain(annotated) {
            prop_assert!(there.contains(&name), "{} of {:?}", name, there);
        }
    }

    #[test]
    fn response_depends_on_the_set_alone(config in any_config(), nodes in any_nodes(), devices in prop::collection::vec(any_device(), 1..8)) {
        // Independent of earlier requests and of the order of the devices.
        let access = access(config, nodes, &devices);
        let first = answer(&access, &devices.iter().collect::<Vec<_>>());
        let _ = answer(&access, &[&devices[0]]);
        prop_assert_eq!(&answer(&access, &devices.iter().collect::<Vec<_>>()), &first);
        let reversed = answer(&access, &devices.iter().rev().collect::<Vec<_>>());
        prop_assert_eq!(parts(&reversed), parts(&first));
    }
}

/// A response without the order of parts that a runtime accepts in any order.
fn parts(response: &ContainerAllocateResponse) -> BTreeMap<&'static str, BTreeSet<String>> {
    let split =
        |texts: Vec<&String>| texts.iter().flat_map(|text| text.split(',')).map(str::to_owned).collect();
    BTreeMap::from([
        ("env", split(response.envs.values().collect())),
        ("annotation", split(response.annotations.values().collect())),
        ("mount", split(response.mounts.iter().map(|mount| &mount.container_path).collect())),
        ("cdi", split(response.cdi_devices.iter().map(|device| &device.name).collect())),
        ("node", split(response.devices.iter().map(|node| &node.container_path).collect())),
    ])
}
