//! Access of containers to devices, end to end except NVML: specifications on disk keep the rules of CDI on any node, and Allocate names
//! only their devices, also while the configuration changes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod gate;
mod names;
mod rules;
mod spec;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use gantry_api::DeviceHealth;
use gantry_config::{Config, Strategy};
use gantry_plugin::inventory::{Device, Slice};
use gantry_topology::{
    ComputeInstance, Gpu, GpuInstance, Host as MachineHost, Machine, MachineParts, Mig, PathClass, PathMatrix,
};

const VERSION: &str = "570.86.15";

fn gpu(index: u8) -> Device {
    Device {
        id: format!("GPU-{index}").into(),
        resource: "nvidia.com/gpu".into(),
        gpu: index,
        nvml_index: Some(index),
        uuid: format!("GPU-{index}"),
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(index.into()),
        numa: None,
        slice: None,
        replica: None,
    }
}

fn slice(gpu_index: u8, index: u8) -> Device {
    let cap = 100 * u32::from(gpu_index) + 10 * u32::from(index);
    let uuid = format!("MIG-{gpu_index}-{index}");
    Device {
        id: uuid.as_str().into(),
        resource: "nvidia.com/mig-1g.10gb".into(),
        uuid,
        slice: Some(Arc::new(Slice {
            index,
            gpu_instance: index.into(),
            compute_instance: 0,
            profile: "1g.10gb".into(),
            start: index,
            size: 1,
            caps: Some([cap, cap + 1]),
        })),
        ..gpu(gpu_index)
    }
}

fn machine(gpus: u8) -> Arc<Machine> {
    let gpus: Vec<Device> = (0..gpus).map(gpu).collect();
    machine_of(&gpus, &[])
}

/// The machine with these whole GPUs and MIG devices.
fn machine_of(gpus: &[Device], slices: &[Device]) -> Arc<Machine> {
    let instance = |device: &Device| {
        let slice = device.slice.as_ref()?;
        Some(GpuInstance {
            id: slice.gpu_instance,
            profile: slice.profile.clone(),
            start: slice.start,
            size: slice.size,
            compute: vec![ComputeInstance {
                id: slice.compute_instance,
                uuid: device.uuid.parse().unwrap(),
                profile: slice.profile.clone(),
                attributes: None,
            }],
        })
    };
    let cut = |gpu: &Device| {
        let on = slices.iter().filter(|slice| slice.gpu == gpu.gpu);
        let instances: Vec<GpuInstance> = on.filter_map(instance).collect();
        (!instances.is_empty()).then_some(Mig { enabled: true, instances })
    };
    let parts = MachineParts {
        host: MachineHost { driver: Some(VERSION.into()), ..MachineHost::default() },
        gpus: gpus
            .iter()
            .map(|device| Gpu {
                index: device.gpu,
                uuid: Some(device.uuid.parse().unwrap()),
                minor: device.minor,
                bus_id: Some(format!("0000:{:02x}:00.0", device.gpu).parse().unwrap()),
                mig: cut(device),
                ..Gpu::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(gpus.len(), |_, _| PathClass::Sys),
        ..MachineParts::default()
    };
    Arc::new(Machine::new(parts).unwrap())
}

fn touch(root: &Path, name: &str) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
}

fn cdi() -> Config {
    Config { device_list_strategy: vec![Strategy::CdiCri], ..Config::default() }
}
