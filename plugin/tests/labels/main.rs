//! The labels of nodes with given GPUs, MIG layouts and sharing. NVIDIA's names and spellings are compared with a table of what its
//! gpu-feature-discovery writes; no test runs that program.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../sim/mod.rs"]
mod sim;

mod counted;
mod documented;
mod host;
mod lists;
mod machines;
mod properties;
mod strategies;

use std::fmt::Write as _;
use std::sync::Arc;

use gantry_api::{DeviceHealth, DeviceId, ResourceName};
use gantry_config::{Config, MigStrategy, ReplicatedDevices, ReplicatedResource, TimeSlicing};
use gantry_plugin::inventory::{Device, Hardware, Inventory, Slice};
use gantry_plugin::labels::{Facts, Host, Labels, labels};
use gantry_plugin::offer::offer;
use gantry_topology::{
    ComputeInstance, Fabric, Gpu, GpuInstance, Machine, MachineParts, Mig, MigAttributes, PathClass,
    PathMatrix,
};

use sim::machines;

/// A simulator's machine.
fn machine(name: &str) -> Machine {
    let text = std::fs::read_to_string(machines().join(format!("{name}.yaml"))).unwrap();
    gantry_topology::read(&text).unwrap()
}

/// GPUs of these models without links.
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

/// A GPU of a clique of a fabric.
fn in_clique(clique: u32) -> Gpu {
    Gpu {
        fabric: Some(Fabric { cluster_uuid: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".into(), clique }),
        ..Gpu::default()
    }
}

/// The machine with MIG on and these profiles in order on each GPU; an empty list leaves MIG off.
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
        gpu.mig = Some(Mig { enabled: profiles.is_some(), instances });
    }
    Machine::new(parts).unwrap()
}

/// An inventory of the machine: every device under this name, with this number of replicas.
fn offered(machine: &Machine, resource: &str, replicas: u16) -> Inventory {
    let device = |gpu: &Gpu, uuid: &str, slice: Option<Slice>, replica: Option<u16>| Device {
        id: DeviceId::from(replica.map_or(uuid.to_owned(), |replica| format!("{uuid}::{replica}"))),
        resource: ResourceName::from(resource),
        gpu: gpu.index,
        nvml_index: Some(gpu.index),
        uuid: uuid.to_owned(),
        health: DeviceHealth { healthy: true, reason: None },
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
    Config { mig_strategy, ..Config::default() }
}

/// `nvidia.com/gpu` with this number of replicas.
fn shared(replicas: u16) -> Config {
    Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources: vec![ReplicatedResource {
                name: "nvidia.com/gpu".into(),
                rename: None,
                devices: ReplicatedDevices::All,
                replicas,
            }],
        }),
        ..Config::default()
    }
}

fn labels_of(inventory: &Inventory, config: &Config) -> Labels {
    labels(&Facts { inventory, config, host: &Host::default(), watched: false, timestamp: None })
}

/// The labels of a machine offered by this configuration.
fn plain(machine: &Machine, config: &Config) -> Labels {
    let hardware = Hardware::of(Arc::new(machine.clone()));
    labels_of(&offer(&hardware, config), config)
}

fn get<'a>(labels: &'a Labels, key: &str) -> Option<&'a str> {
    let entry = labels.iter().find(|(name, _)| name.as_str() == key);
    entry.map(|(_, value)| value.as_str())
}

/// Labels as in a features file, without those that all these nodes have in common.
fn text(labels: &Labels, prefixes: &[&str]) -> String {
    let mut text = String::new();
    for (name, value) in labels {
        if prefixes.iter().any(|prefix| name.as_str().starts_with(prefix)) {
            writeln!(text, "{name}={value}").unwrap();
        }
    }
    text
}
