//! Which labels a node gets: given these GPUs, cut and shared so, then those labels. NVIDIA's own names and spellings are held against
//! a table of what its gpu-feature-discovery writes; that program itself is run by no test.

#![allow(clippy::unwrap_used, clippy::panic)]

mod sim;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use gantry_api::{DeviceHealth, DeviceId, ResourceName};
use gantry_plugin::config::{Config, MigStrategy, Replicated, Selector, SharedOf, TimeSlicing};
use gantry_plugin::inventory::{Device, Hardware, Inventory, Slice};
use gantry_plugin::labels::{Facts, Host, HostDriver, HostOptions, Labels, Vgpu, labels};
use gantry_plugin::offer::offer;
use gantry_topology::{
    ComputeInstance, Fabric, Gpu, GpuInstance, Machine, MachineParts, Mig, MigAttributes, PathClass,
    PathMatrix,
};
use proptest::prelude::*;
use sim::{Sim, machines};

/// A simulator's machine.
fn machine(name: &str) -> Machine {
    let text = std::fs::read_to_string(machines().join(format!("{name}.yaml"))).unwrap();
    gantry_topology::read(&text).unwrap()
}

/// GPUs of these models, nothing joining them.
fn models(models: &[&str]) -> Machine {
    let gpus = models.iter().map(|model| Gpu {
        model: Some((*model).to_owned()),
        memory_mib: Some(1000 + model.len() as u64),
        compute_capability: Some("8.0".to_owned()),
        ..Gpu::default()
    });
    of(gpus)
}

fn of(gpus: impl IntoIterator<Item = Gpu>) -> Machine {
    let gpus: Vec<Gpu> = gpus
        .into_iter()
        .enumerate()
        .map(|(index, gpu)| Gpu {
            index: index as u8,
            uuid: Some(format!("GPU-{index:08x}").parse().unwrap()),
            ..gpu
        })
        .collect();
    Machine::new(MachineParts {
        paths: PathMatrix::from_fn(gpus.len(), |_, _| PathClass::Sys),
        gpus,
        ..MachineParts::default()
    })
    .unwrap()
}

/// The machine with MIG on, on each GPU these profiles one behind the other; an empty list leaves MIG off.
fn cut(machine: Machine, profiles: impl Fn(u8) -> Option<&'static [&'static str]>) -> Machine {
    let mut parts = machine.into_parts();
    for gpu in &mut parts.gpus {
        let profiles = profiles(gpu.index);
        let instances = profiles.unwrap_or_default().iter().enumerate();
        let instances = instances
            .map(|(number, profile)| {
                let slices = u32::from(profile.as_bytes()[0] - b'0');
                GpuInstance {
                    id: 7 + number as u32,
                    profile: (*profile).to_owned(),
                    start: number as u8,
                    size: 1,
                    compute: vec![ComputeInstance {
                        id: 0,
                        uuid: format!("MIG-{:04x}{number:04x}", gpu.index).parse().unwrap(),
                        profile: (*profile).to_owned(),
                        attributes: Some(MigAttributes {
                            multiprocessors: 14 * slices,
                            gpu_slices: slices,
                            compute_slices: slices,
                            copy_engines: slices,
                            memory_mib: 4864 * u64::from(slices),
                            ..MigAttributes::default()
                        }),
                    }],
                }
            })
            .collect();
        gpu.mig = Some(Mig {
            enabled: profiles.is_some(),
            instances,
        });
    }
    Machine::new(parts).unwrap()
}

/// What kubelet is told of the machine: every device under this name, so many times.
fn offered(machine: &Machine, resource: &str, replicas: u16) -> Inventory {
    let device = |gpu: &Gpu, uuid: &str, slice: Option<Slice>, replica: Option<u16>| Device {
        id: DeviceId::from(replica.map_or(uuid.to_owned(), |replica| format!("{uuid}::{replica}"))),
        resource: ResourceName::from(resource),
        gpu: gpu.index,
        nvml_index: Some(gpu.index),
        uuid: uuid.to_owned(),
        health: DeviceHealth {
            healthy: true,
            reason: None,
        },
        minor: None,
        numa: None,
        slice: slice.map(Arc::new),
        replica,
    };
    let mut devices = Vec::new();
    for gpu in machine.gpus() {
        for replica in 0..replicas {
            let replica = (replicas > 1).then_some(replica);
            match gpu.mig.as_ref().filter(|mig| mig.enabled) {
                None => {
                    let uuid = gpu.uuid.as_ref().map_or("", |uuid| uuid.as_str());
                    devices.push(device(gpu, uuid, None, replica));
                }
                Some(mig) => devices.extend(mig.instances.iter().map(|instance| {
                    let slice = Slice {
                        index: 0,
                        gpu_instance: instance.id,
                        compute_instance: 0,
                        profile: instance.profile.clone(),
                        start: instance.start,
                        size: instance.size,
                        caps: None,
                    };
                    device(gpu, instance.compute[0].uuid.as_str(), Some(slice), replica)
                })),
            }
        }
    }
    Inventory::ready(Arc::new(machine.clone()), devices)
}

fn strategy(mig_strategy: MigStrategy) -> Config {
    Config {
        mig_strategy,
        ..Config::default()
    }
}

/// `nvidia.com/gpu` shared so many ways.
fn shared(replicas: u16) -> Config {
    Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources: vec![Replicated {
                name: "nvidia.com/gpu".into(),
                rename: None,
                devices: SharedOf::All,
                replicas,
            }],
        }),
        ..Config::default()
    }
}

fn labels_of(inventory: &Inventory, config: &Config) -> Labels {
    labels(&Facts {
        inventory,
        config,
        host: &Host::default(),
        watched: false,
        timestamp: None,
    })
}

/// The labels of a machine of which is offered what this configuration offers.
fn plain(machine: &Machine, config: &Config) -> Labels {
    let hardware = Hardware::of(Arc::new(machine.clone()));
    labels_of(&offer(&hardware, config), config)
}

fn get<'a>(labels: &'a Labels, key: &str) -> Option<&'a str> {
    let entry = labels.iter().find(|(name, _)| name.as_str() == key);
    entry.map(|(_, value)| value.as_str())
}

/// Labels as a features file has them, without those that every one of these nodes has alike.
fn text(labels: &Labels, prefixes: &[&str]) -> String {
    let mut text = String::new();
    for (name, value) in labels {
        if prefixes.iter().any(|prefix| name.as_str().starts_with(prefix)) {
            writeln!(text, "{name}={value}").unwrap();
        }
    }
    text
}

/// The simulator's machines whose labels are written down: one of each kind.
const MACHINES: [&str; 7] = [
    "a40-8x-bridged",
    "dgx-a100",
    "dgx1-v100",
    "dgx2-16x-v100",
    "hgx-h100",
    "l4-4x-pcie",
    "workstation-2x",
];
/// Those that are cut.
const CUT: [&str; 6] = [
    "a100-1x-mig",
    "a30-4x-mig",
    "dgx-a100-mig",
    "h200-8x-mig",
    "hgx-h100-mig",
    "rtx-pro-6000-4x-mig",
];

#[test]
fn the_simulated_machines_have_the_labels_written_down() {
    let mut all = String::new();
    for name in MACHINES {
        let labels = plain(&machine(name), &Config::default());
        writeln!(all, "# {name}\n{}", text(&labels, &[""])).unwrap();
    }
    insta::assert_snapshot!(all);
}

#[test]
fn the_simulated_machines_that_are_cut_have_the_labels_of_each_strategy_written_down() {
    let mut all = String::new();
    for name in CUT {
        for strategy in [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed] {
            let config = Config {
                mig_strategy: strategy,
                ..Config::default()
            };
            let labels = plain(&machine(name), &config);
            let own = text(&labels, &["nvidia.com/gpu.", "nvidia.com/mig"]);
            writeln!(all, "# {name}, {strategy:?}\n{own}").unwrap();
        }
    }
    insta::assert_snapshot!(all);
}

#[test]
fn a_shared_gpu_says_so_unless_its_resource_has_another_name() {
    let machine = machine("l4-4x-pcie");
    let same = labels_of(&offered(&machine, "nvidia.com/gpu", 4), &shared(4));
    assert_eq!(get(&same, "nvidia.com/gpu.product"), Some("NVIDIA-L4-SHARED"));
    let renamed = labels_of(&offered(&machine, "nvidia.com/gpu.shared", 4), &shared(4));
    assert_eq!(get(&renamed, "nvidia.com/gpu.product"), Some("NVIDIA-L4"));
    for labels in [same, renamed] {
        assert_eq!(get(&labels, "nvidia.com/gpu.replicas"), Some("4"));
        assert_eq!(
            get(&labels, "nvidia.com/gpu.count"),
            Some("4"),
            "GPUs, not replicas"
        );
        assert_eq!(
            get(&labels, "nvidia.com/gpu.sharing-strategy"),
            Some("time-slicing")
        );
    }
    let whole = plain(&machine, &Config::default());
    assert_eq!(get(&whole, "nvidia.com/gpu.replicas"), Some("1"));
    assert_eq!(get(&whole, "nvidia.com/gpu.sharing-strategy"), Some("none"));
}

#[test]
fn a_machine_type_of_which_a_label_can_say_nothing_is_unknown() {
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
            host: &Host {
                machine_type: said.map(str::to_owned),
                ..Host::default()
            },
            watched: true,
            timestamp: None,
        });
        assert_eq!(get(&labels, "nvidia.com/gpu.machine"), Some(label), "{said:?}");
    }
}

#[test]
fn mig_devices_that_are_all_alike_are_the_gpus_by_the_single_strategy() {
    let machine = cut(machine("dgx-a100"), |_| Some(&["1g.5gb"; 7]));
    let config = strategy(MigStrategy::Single);
    let whole = plain(&machine, &config);
    let mixed = Config {
        mig_strategy: MigStrategy::Single,
        ..shared(2)
    };
    let shared = labels_of(&offered(&machine, "nvidia.com/gpu", 2), &mixed);
    insta::assert_snapshot!(format!(
        "{}\n# two replicas of each\n{}",
        text(&whole, &["nvidia.com/gpu", "nvidia.com/mig"]),
        text(
            &shared,
            &[
                "nvidia.com/gpu.product",
                "nvidia.com/gpu.replicas",
                "nvidia.com/gpu.sharing"
            ]
        ),
    ));
}

#[test]
fn each_profile_has_labels_of_its_own_by_the_mixed_strategy() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 => Some(&["1g.5gb", "1g.5gb", "2g.10gb", "1g.5gb+me"]),
        1 => Some(&["3g.20gb", "3g.20gb"]),
        2 => Some(&[]),
        _ => None,
    });
    let labels = plain(&machine, &strategy(MigStrategy::Mixed));
    insta::assert_snapshot!(text(&labels, &["nvidia.com/gpu", "nvidia.com/mig"]));
}

/// The profiles that a GPU is cut into; `None`: MIG is off.
type CutOf = fn(u8) -> Option<&'static [&'static str]>;

/// Product, count, replicas and memory by the single strategy, of a DGX A100 that is cut like this.
fn single(profiles: CutOf) -> [String; 4] {
    let machine = cut(machine("dgx-a100"), profiles);
    let labels = plain(&machine, &strategy(MigStrategy::Single));
    assert_eq!(get(&labels, "nvidia.com/mig.strategy"), Some("single"));
    assert_eq!(get(&labels, "nvidia.com/gpu.family"), Some("ampere"));
    ["product", "count", "replicas", "memory"].map(|key| {
        get(&labels, &format!("nvidia.com/gpu.{key}"))
            .unwrap_or("")
            .to_owned()
    })
}

#[test]
fn the_single_strategy_has_the_labels_of_what_it_offers() {
    let slices = "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb";
    let cases: [(&str, CutOf, [&str; 3]); 4] = [
        (
            "a GPU with MIG on and no instance is left out",
            |gpu| match gpu {
                3 => Some(&[]),
                _ => Some(&["1g.5gb", "1g.5gb"]),
            },
            [slices, "14", "1"],
        ),
        (
            "so is one with MIG off",
            |gpu| (gpu != 0).then_some(&["1g.5gb"]),
            [slices, "7", "1"],
        ),
        (
            "and one of two profiles",
            |gpu| match gpu {
                0 => Some(&["1g.5gb", "2g.10gb"]),
                _ => Some(&["1g.5gb"]),
            },
            [slices, "7", "1"],
        ),
        (
            "and those that are cut where most are whole",
            |gpu| (gpu > 4).then_some(&["1g.5gb"]),
            ["NVIDIA-A100-SXM4-40GB", "5", "1"],
        ),
    ];
    for (what, profiles, expected) in cases {
        let [product, count, replicas, memory] = single(profiles);
        assert_eq!([product, count, replicas], expected, "{what}");
        assert_ne!(memory, "0", "{what}");
    }
}

#[test]
fn the_single_strategy_is_called_invalid_where_it_offers_nothing() {
    let cases: [(&str, CutOf); 2] = [
        ("no instance anywhere", |_| Some(&[])),
        ("each GPU of two profiles", |_| Some(&["1g.5gb", "2g.10gb"])),
    ];
    for (what, profiles) in cases {
        assert_eq!(
            single(profiles),
            ["NVIDIA-A100-SXM4-40GB-MIG-INVALID", "0", "0", "0"],
            "{what}"
        );
    }
}

#[test]
fn by_the_mixed_strategy_what_is_not_offered_is_not_counted() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 | 1 => Some(&["1g.5gb", "1g.5gb"]),
        2 => Some(&["3g.20gb"]),
        _ => None,
    });
    let config = Config {
        deny: vec![Selector::Index(0), Selector::Index(2)],
        ..strategy(MigStrategy::Mixed)
    };
    let labels = plain(&machine, &config);
    assert_eq!(get(&labels, "nvidia.com/mig-1g.5gb.count"), Some("2"));
    assert_eq!(get(&labels, "nvidia.com/mig-3g.20gb.count"), None);
    assert_eq!(get(&labels, "nvidia.com/mig-3g.20gb.product"), None);
}

/// Labels of a machine of which a configuration's lists leave out something.
fn listed(machine: &Machine, allow: &[Selector], deny: &[Selector]) -> Labels {
    let config = Config {
        allow: allow.to_vec(),
        deny: deny.to_vec(),
        ..strategy(MigStrategy::Mixed)
    };
    plain(machine, &config)
}

#[test]
fn gpus_that_the_lists_exclude_are_in_no_label() {
    let mixed = models(&["NVIDIA L4", "NVIDIA L4", "NVIDIA L4", "NVIDIA A100"]);
    let model = |model: &str| Selector::Model(model.to_owned());
    let denied = listed(&mixed, &[], &[model("NVIDIA L4")]);
    for (key, value) in [
        ("nvidia.com/gpu.product", Some("NVIDIA-A100")),
        ("nvidia.com/gpu.count", Some("1")),
        ("nvidia.com/gpu.memory", Some("1011")),
        ("nvidia.com/gpu.replicas", Some("1")),
        ("gantry.dev/gpu-count.NVIDIA-A100", Some("1")),
        ("gantry.dev/gpu-count.NVIDIA-L4", None),
        ("gantry.dev/gpu-memory.NVIDIA-L4", None),
    ] {
        assert_eq!(get(&denied, key), value, "{key}");
    }
    assert_eq!(listed(&mixed, &[Selector::Index(3)], &[]), denied);
    assert_eq!(
        listed(&mixed, &[], &[model("*")]),
        plain(&of([]), &Config::default()),
        "as on a node without GPUs"
    );
}

#[test]
fn what_links_and_cliques_are_told_is_of_gpus_that_the_lists_leave() {
    let dgx = machine("dgx-a100");
    let seven = listed(&dgx, &[], &[Selector::Index(0)]);
    assert_eq!(get(&seven, "gantry.dev/nvlink.size"), Some("7"));
    let one = listed(&dgx, &[Selector::Index(5)], &[]);
    assert_eq!(get(&one, "gantry.dev/nvlink.size"), Some("1"));
    assert_eq!(get(&one, "gantry.dev/nvlink.islands"), Some("0"));
    assert_eq!(get(&one, "gantry.dev/gpu.numa-nodes"), Some("1"));
    let gpu = |clique| Gpu {
        fabric: Some(Fabric {
            cluster_uuid: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".into(),
            clique,
        }),
        ..Gpu::default()
    };
    let cliques = of([gpu(1), gpu(1), gpu(2)]);
    let rest = listed(&cliques, &[Selector::Index(2)], &[]);
    assert_eq!(
        get(&rest, "nvidia.com/gpu.clique"),
        Some("7b968a6d-c8aa-45e1-9e07-e1e51be99c31.2")
    );
    assert_eq!(get(&rest, "gantry.dev/fabric.clique"), Some("2"));
}

#[test]
fn a_gpu_of_which_the_lists_leave_a_mig_device_counts_and_one_of_which_they_leave_none_does_not() {
    let machine = cut(machine("dgx-a100"), |gpu| match gpu {
        0 | 1 => Some(&["1g.5gb", "1g.5gb"]),
        2 => Some(&[]),
        _ => None,
    });
    let uuid = |uuid: &str| Selector::Uuid(uuid.to_owned());
    let count = |allow: &[Selector], deny: &[Selector]| {
        let labels = listed(&machine, allow, deny);
        get(&labels, "nvidia.com/gpu.count").map(str::to_owned)
    };
    let (first, second) = (uuid("MIG-00000000"), uuid("mig-00000001"));
    assert_eq!(count(&[], std::slice::from_ref(&first)).as_deref(), Some("8"));
    assert_eq!(count(&[], &[first.clone(), second]).as_deref(), Some("7"));
    assert_eq!(count(std::slice::from_ref(&first), &[]).as_deref(), Some("1"));
    assert_eq!(
        count(&[first, Selector::Index(2)], &[]).as_deref(),
        Some("2"),
        "one that is not cut yet is named by its index"
    );
}

#[test]
fn a_gpu_with_mig_on_is_counted_and_not_shared_without_a_strategy() {
    let machine = cut(machine("dgx-a100"), |_| Some(&["1g.5gb"]));
    let labels = plain(&machine, &shared(4));
    assert_eq!(
        get(&labels, "nvidia.com/gpu.product"),
        Some("NVIDIA-A100-SXM4-40GB")
    );
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("8"));
    assert_eq!(get(&labels, "nvidia.com/gpu.replicas"), Some("0"));
    assert_eq!(get(&labels, "nvidia.com/mig.capable"), Some("true"));
    assert_eq!(get(&labels, "nvidia.com/mig.strategy"), None);
}

#[test]
fn of_several_products_the_most_frequent_one_leads_and_each_is_counted() {
    let labels = plain(
        &models(&["T4", "NVIDIA A40", "NVIDIA A40", "T4", "NVIDIA A40"]),
        &Config::default(),
    );
    assert_eq!(get(&labels, "nvidia.com/gpu.product"), Some("NVIDIA-A40"));
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("3"));
    assert_eq!(get(&labels, "nvidia.com/gpu.memory"), Some("1010"));
    assert_eq!(get(&labels, "gantry.dev/gpu-count.NVIDIA-A40"), Some("3"));
    assert_eq!(get(&labels, "gantry.dev/gpu-count.T4"), Some("2"));
    assert_eq!(get(&labels, "gantry.dev/gpu-memory.T4"), Some("1002"));
    let tied = plain(&models(&["T4", "NVIDIA A40"]), &Config::default());
    assert_eq!(
        get(&tied, "nvidia.com/gpu.product"),
        Some("T4"),
        "the one of the lowest index"
    );
}

#[test]
fn the_board_that_drives_a_screen_is_not_counted() {
    let labels = plain(
        &models(&["NVIDIA DGX Display", "NVIDIA A100-SXM4-80GB"]),
        &Config::default(),
    );
    assert_eq!(get(&labels, "nvidia.com/gpu.count"), Some("1"));
    assert_eq!(
        get(&labels, "nvidia.com/gpu.product"),
        Some("NVIDIA-A100-SXM4-80GB")
    );
}

#[test]
fn a_clique_is_named_where_all_gpus_agree_and_ours_names_the_larger_one() {
    let gpu = |clique| Gpu {
        fabric: Some(Fabric {
            cluster_uuid: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".into(),
            clique,
        }),
        ..Gpu::default()
    };
    let one = plain(&of([gpu(1), gpu(1), Gpu::default()]), &Config::default());
    assert_eq!(
        get(&one, "nvidia.com/gpu.clique"),
        Some("7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1")
    );
    let two = plain(&of([gpu(1), gpu(2), gpu(2)]), &Config::default());
    assert_eq!(get(&two, "nvidia.com/gpu.clique"), None);
    assert_eq!(get(&two, "gantry.dev/fabric.clique"), Some("2"));
}

#[test]
fn health_is_counted_by_gpu_where_it_is_watched() {
    let machine = cut(machine("dgx-a100"), |gpu| (gpu == 0).then_some(&["1g.5gb"; 7]));
    let mut inventory = offered(&machine, "nvidia.com/gpu", 2);
    for device in inventory
        .devices
        .iter_mut()
        .filter(|device| device.gpu == 0)
        .take(1)
    {
        device.health = DeviceHealth {
            healthy: false,
            reason: Some("Xid 79".into()),
        };
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
    assert_eq!(
        get(&labels_of(&inventory, &config), "gantry.dev/gpu.healthy"),
        None
    );
}

#[test]
fn the_host_is_read_where_the_options_say() {
    let sim = Sim::of("workstation-2x");
    let sys = sim.installed.layout.sys.clone();
    std::fs::create_dir_all(sys.join("class/dmi/id")).unwrap();
    std::fs::write(
        sys.join("class/dmi/id/product_name"),
        "Standard PC (Q35 + ICH9, 2009)\n",
    )
    .unwrap();
    let options = HostOptions {
        machine_type_file: sys.join("class/dmi/id/product_name"),
        sys_root: sys,
    };
    let inventory = offered(sim.installed.facts.machine(), "nvidia.com/gpu", 1);
    let config = Config::default();
    let labels_on = |host: &Host| {
        labels(&Facts {
            inventory: &inventory,
            config: &config,
            host,
            watched: false,
            timestamp: None,
        })
    };
    let found = labels_on(&Host::read(&options));
    assert_eq!(
        get(&found, "nvidia.com/gpu.machine"),
        Some("Standard-PC-Q35-ICH9-2009")
    );
    assert_eq!(get(&found, "nvidia.com/gpu.mode"), Some("graphics"));
    assert_eq!(get(&found, "nvidia.com/vgpu.present"), None);
    let nowhere = Host::read(&HostOptions {
        machine_type_file: "".into(),
        sys_root: Path::new("/nowhere").into(),
    });
    let unknown = labels_on(&nowhere);
    assert_eq!(get(&unknown, "nvidia.com/gpu.machine"), Some("unknown"));
    assert_eq!(get(&unknown, "nvidia.com/gpu.mode"), Some("unknown"));
    let virtual_gpu = labels_on(&Host {
        vgpu: Some(Vgpu {
            driver: Some(HostDriver {
                version: "460.16".into(),
                branch: "r460_00".into(),
            }),
        }),
        ..nowhere
    });
    assert_eq!(get(&virtual_gpu, "nvidia.com/vgpu.present"), Some("true"));
    assert_eq!(
        get(&virtual_gpu, "nvidia.com/vgpu.host-driver-version"),
        Some("460.16")
    );
    assert_eq!(
        get(&virtual_gpu, "nvidia.com/vgpu.host-driver-branch"),
        Some("r460_00")
    );
}

/// The labels of gpu-feature-discovery v0.20.0, written down from what it documents and does, not from our code: each with its value
/// on a node of eight H100, MIG off and not shared, or none where such a node does not have it. All begin with `nvidia.com/`.
const NVIDIA: &[(&str, Option<&str>)] = &[
    ("gfd.timestamp", Some("1700000000")),
    ("cuda.driver-version.major", Some("570")),
    ("cuda.driver-version.minor", Some("124")),
    ("cuda.driver-version.revision", Some("06")),
    ("cuda.driver-version.full", Some("570.124.06")),
    ("cuda.runtime-version.major", Some("12")),
    ("cuda.runtime-version.minor", Some("8")),
    ("cuda.runtime-version.full", Some("12.8")),
    ("cuda.driver.major", Some("570")),
    ("cuda.driver.minor", Some("124")),
    ("cuda.driver.rev", Some("06")),
    ("cuda.runtime.major", Some("12")),
    ("cuda.runtime.minor", Some("8")),
    ("gpu.machine", Some("PowerEdge-XE9680")),
    ("gpu.product", Some("NVIDIA-H100-80GB-HBM3")),
    ("gpu.count", Some("8")),
    ("gpu.replicas", Some("1")),
    ("gpu.sharing-strategy", Some("none")),
    ("gpu.memory", Some("81559")),
    ("gpu.family", Some("hopper")),
    ("gpu.compute.major", Some("9")),
    ("gpu.compute.minor", Some("0")),
    ("gpu.mode", Some("compute")),
    ("gpu.clique", None),
    ("mig.capable", Some("true")),
    ("mps.capable", Some("false")),
    ("mig.strategy", None),
    ("gpu.multiprocessors", None),
    ("gpu.slices.gi", None),
    ("gpu.slices.ci", None),
    ("gpu.engines.copy", None),
    ("gpu.engines.decoder", None),
    ("gpu.engines.encoder", None),
    ("gpu.engines.jpeg", None),
    ("gpu.engines.ofa", None),
    ("mig-1g.5gb.product", None),
    ("mig-1g.5gb.count", None),
    ("mig-1g.5gb.replicas", None),
    ("mig-1g.5gb.sharing-strategy", None),
    ("mig-1g.5gb.multiprocessors", None),
    ("mig-1g.5gb.slices.gi", None),
    ("mig-1g.5gb.slices.ci", None),
    ("mig-1g.5gb.engines.copy", None),
    ("mig-1g.5gb.engines.decoder", None),
    ("mig-1g.5gb.engines.encoder", None),
    ("mig-1g.5gb.engines.jpeg", None),
    ("mig-1g.5gb.engines.ofa", None),
    ("mig-1g.5gb.memory", None),
    ("vgpu.present", None),
    ("vgpu.host-driver-version", None),
    ("vgpu.host-driver-branch", None),
];

/// Those of NVIDIA's, without their domain, of a machine on this host.
fn nvidias(machine: &Machine, config: &Config, host: &Host) -> BTreeMap<String, String> {
    let hardware = Hardware::of(Arc::new(machine.clone()));
    let made = labels(&Facts {
        inventory: &offer(&hardware, config),
        config,
        host,
        watched: true,
        timestamp: Some(1_700_000_000),
    });
    let own = made.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("nvidia.com/")?;
        Some((name.to_owned(), value.clone()))
    });
    own.collect()
}

#[test]
fn a_plain_node_has_the_labels_that_nvidia_documents_and_no_other_under_its_name() {
    let sim = Sim::of("hgx-h100");
    let sys = sim.installed.layout.sys.clone();
    let machine_type_file = sys.join("product_name");
    std::fs::write(&machine_type_file, "PowerEdge XE9680\n").unwrap();
    let host = Host::read(&HostOptions {
        machine_type_file,
        sys_root: sys,
    });
    let expected: BTreeMap<String, String> = NVIDIA
        .iter()
        .filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?.to_owned())))
        .collect();
    let machine = cut(sim.installed.facts.machine().clone(), |_| None);
    assert_eq!(nvidias(&machine, &Config::default(), &host), expected);
}

#[test]
fn every_label_that_nvidia_documents_is_made_somewhere_and_no_other_under_its_name() {
    let host = Host {
        vgpu: Some(Vgpu {
            driver: Some(HostDriver {
                version: "460.16".into(),
                branch: "r460_00".into(),
            }),
        }),
        ..Host::default()
    };
    let mut machine = machine("dgx-a100").into_parts();
    for gpu in &mut machine.gpus {
        gpu.fabric = Some(Fabric {
            cluster_uuid: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".into(),
            clique: 1,
        });
    }
    let machine = cut(Machine::new(machine).unwrap(), |_| Some(&["1g.5gb"; 7]));
    let made: BTreeSet<String> = [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed]
        .into_iter()
        .flat_map(|mig| nvidias(&machine, &strategy(mig), &host).into_keys())
        .collect();
    let documented: BTreeSet<String> = NVIDIA.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(made, documented);
}

/// What `kube-apiserver` asks of a label's value, and of its name behind the domain.
fn accepted(text: &str) -> bool {
    let ends = text.chars().next().zip(text.chars().last());
    text.len() <= 63
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && ends.is_none_or(|(first, last)| first.is_ascii_alphanumeric() && last.is_ascii_alphanumeric())
}

proptest! {
    #[test]
    fn labels_do_not_depend_on_the_order_of_gpus_where_one_product_leads(
        order in Just([0usize, 0, 0, 1, 1, 2, 2, 2, 2]).prop_shuffle(),
        devices in any::<prop::sample::Index>(),
    ) {
        let names = ["NVIDIA A40", "Tesla T4", "NVIDIA A100-PCIE-40GB"];
        let machine = models(&order.map(|model| names[model]));
        let expected = plain(&models(&[0, 0, 0, 1, 1, 2, 2, 2, 2].map(|model| names[model])), &Config::default());
        let mut inventory = offered(&machine, "nvidia.com/gpu", 1);
        prop_assert_eq!(&labels_of(&inventory, &Config::default()), &expected);
        let turn = devices.index(inventory.devices.len());
        inventory.devices.rotate_left(turn);
        prop_assert_eq!(&labels_of(&inventory, &Config::default()), &expected);
    }

    #[test]
    fn every_label_is_one_that_kubernetes_accepts_and_there_are_few(
        models in prop::collection::vec("\\PC{0,80}", 1..20),
        machine_type in "\\PC{0,80}",
        replicas in 1u16..3,
        single in any::<bool>(),
    ) {
        let gpus = models.iter().map(|model| Gpu { model: Some(model.clone()), ..Gpu::default() });
        let machine = match single {
            true => cut(of(gpus), |_| Some(&["1g.10gb+me"])),
            false => of(gpus),
        };
        let inventory = offered(&machine, "nvidia.com/gpu", replicas);
        let config = Config { mig_strategy: MigStrategy::Single, ..shared(2) };
        let host = Host { machine_type: Some(machine_type), ..Host::default() };
        let made = labels(&Facts { inventory: &inventory, config: &config, host: &host, watched: true, timestamp: Some(1) });
        for (name, value) in &made {
            let (domain, name) = name.as_str().split_once('/').unwrap();
            prop_assert!(["nvidia.com", "gantry.dev"].contains(&domain));
            prop_assert!(!name.is_empty() && accepted(name), "{name:?}");
            prop_assert!(accepted(value), "{name}={value:?}");
        }
        prop_assert!(made.keys().filter(|name| name.as_str().starts_with("gantry.dev/")).count() <= 26);
    }
}
