//! Offers of given hardware by a given configuration: one file per subject, and common helpers.

mod lists;
mod patterns;
mod properties;
mod sharing;
mod strategies;

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::DeviceHealth;
use gantry_topology::{ComputeInstance, Gpu, GpuInstance, Machine, MachineParts, Mig, PathClass, PathMatrix};

use super::*;
use crate::inventory::units;
use gantry_config::{MigStrategy, ReplicatedDevices, ReplicatedResource, TimeSlicing};

/// A GPU of a test: its model and MIG devices.
#[derive(Debug, Clone)]
struct Board {
    model: &'static str,
    mig: Option<Vec<&'static str>>,
}

fn whole() -> Board {
    Board { model: "NVIDIA A100-SXM4-40GB", mig: None }
}

fn model(model: &'static str) -> Board {
    Board { model, mig: None }
}

/// A GPU with MIG on and these MIG devices, each in a GPU instance of its own unless it is a part (`1c.`) of the one before.
fn cut(profiles: &[&'static str]) -> Board {
    Board { mig: Some(profiles.to_vec()), ..whole() }
}

fn mig(gpu: usize, profiles: &[&str]) -> Mig {
    let mut instances: Vec<GpuInstance> = Vec::new();
    for (at, profile) in profiles.iter().enumerate() {
        let parent = profile.split_once("c.").map_or(*profile, |(_, parent)| parent);
        let compute = ComputeInstance {
            id: 0,
            uuid: format!("MIG-{gpu}{at}").parse().unwrap(),
            profile: (*profile).to_owned(),
            attributes: None,
        };
        match instances.last_mut() {
            Some(last) if parent != *profile && last.profile == parent => {
                let id = last.compute.len() as u32;
                last.compute.push(ComputeInstance { id, ..compute });
            }
            _ => instances.push(GpuInstance {
                id: at as u32 + 1,
                profile: parent.to_owned(),
                start: at as u8,
                size: 1,
                compute: vec![compute],
            }),
        }
    }
    Mig { enabled: true, instances }
}

fn hardware(boards: &[Board]) -> Hardware {
    let gpus: Vec<Gpu> = boards
        .iter()
        .enumerate()
        .map(|(index, board)| Gpu {
            index: index as u8,
            uuid: Some(format!("GPU-{index}").parse().unwrap()),
            bus_id: Some(format!("0000:{index:02x}:00.0").parse().unwrap()),
            model: Some(board.model.to_owned()),
            mig: board.mig.as_ref().map(|profiles| mig(index, profiles)),
            ..Gpu::default()
        })
        .collect();
    let machine = Machine::new(MachineParts {
        paths: PathMatrix::from_fn(gpus.len(), |_, _| PathClass::Sys),
        gpus,
        ..MachineParts::default()
    })
    .unwrap();
    let healthy = DeviceHealth { healthy: true, reason: None };
    let units = units(&machine, |gpu| Some(gpu.index), |_, _| healthy.clone(), |_| false, |_, _, _| None);
    Hardware::ready(Arc::new(machine), units)
}

fn with(strategy: MigStrategy) -> Config {
    Config { mig_strategy: strategy, ..Config::default() }
}

fn sharing(resources: Vec<ReplicatedResource>) -> Config {
    Config {
        mig_strategy: MigStrategy::Mixed,
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources,
        }),
        ..Config::default()
    }
}

fn share(name: &str, devices: ReplicatedDevices, replicas: u16, rename: Option<&str>) -> ReplicatedResource {
    ReplicatedResource { name: name.into(), rename: rename.map(Into::into), devices, replicas }
}

/// Resources with their device IDs.
fn offered(boards: &[Board], config: &Config) -> BTreeMap<String, Vec<String>> {
    let mut resources: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in offer(&hardware(boards), config).devices {
        let ids = resources.entry(device.resource.to_string()).or_default();
        ids.push(device.id.to_string());
    }
    resources
}

fn expect(resources: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
    let owned = |ids: &&[&str]| ids.iter().map(ToString::to_string).collect();
    resources.iter().map(|(name, ids)| ((*name).to_owned(), owned(ids))).collect()
}

fn excluded(boards: &[Board], config: &Config) -> Vec<(u8, String)> {
    let inventory = offer(&hardware(boards), config);
    inventory.excluded.into_iter().map(|excluded| (excluded.gpu, excluded.reason)).collect()
}

fn problems(boards: &[Board], config: &Config) -> Vec<String> {
    offer(&hardware(boards), config).problems
}
