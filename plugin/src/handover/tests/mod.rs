//! The hand-over without any server.

mod properties;
mod restarts;
mod shapes;
mod steering;
mod truths;
mod waiting;

use std::sync::Arc;

use gantry_api::{ContainerGrant, ContainerShare, DeviceHealth, Grant};
use gantry_topology::{Gpu, Machine, MachineParts, NvLinkBundle, PathClass, PathMatrix};

use super::*;
use crate::inventory::Device;

const GPU: &str = "nvidia.com/gpu";
const NODE: &str = "node-1";
const NOW: Timestamp = Timestamp::UNIX_EPOCH;

/// A hand-over of eight GPUs in NVLink pairs, after an empty pod list.
fn node() -> Handover {
    let mut handover = Handover::new(NODE.into());
    let inventory = inventory(8);
    handover.inventory(&inventory);
    handover.table(Some(Arc::new(Table::build(&inventory.machine))));
    handover.sync(Vec::new());
    handover
}

fn inventory(gpus: u8) -> Inventory {
    let machine = Machine::new(MachineParts {
        gpus: (0..gpus).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        nvlinks: (0..gpus / 2)
            .map(|pair| NvLinkBundle { gpus: [2 * pair, 2 * pair + 1], links: 4 })
            .collect(),
        paths: PathMatrix::from_fn(gpus.into(), |_, _| PathClass::Sys),
        ..MachineParts::default()
    });
    let device = |gpu: u8| Device {
        id: id(gpu),
        resource: GPU.into(),
        gpu,
        nvml_index: Some(gpu),
        uuid: id(gpu).to_string(),
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(gpu.into()),
        numa: None,
        slice: None,
        replica: None,
    };
    Inventory::ready(Arc::new(machine.unwrap()), (0..gpus).map(device).collect())
}

fn id(gpu: u8) -> DeviceId {
    DeviceId::from(format!("GPU-{gpu}"))
}

fn set(gpus: impl IntoIterator<Item = u8>) -> Devices {
    gpus.into_iter().map(id).collect()
}

/// Request and grant of one container of a test pod.
#[derive(Debug, Clone)]
struct Container {
    name: String,
    count: usize,
    share: Option<ContainerShare>,
}

fn granted(name: &str, gpus: impl IntoIterator<Item = u8>) -> Container {
    let devices = set(gpus);
    Container {
        name: name.into(),
        count: devices.len(),
        share: Some(ContainerShare::Devices(devices.into_iter().collect())),
    }
}

fn of_held(name: &str, count: u32) -> Container {
    Container { name: name.into(), count: count as usize, share: Some(ContainerShare::AnyOfHeld(count)) }
}

fn asking(name: &str, count: usize) -> Container {
    Container { name: name.into(), count, share: None }
}

/// A newly bound pod with name and UID `name`.
fn pod(name: &str, containers: &[Container]) -> ObservedPod {
    let shares: Vec<ContainerGrant> = containers
        .iter()
        .filter_map(|container| {
            Some(ContainerGrant {
                name: container.name.clone(),
                resource: GPU.into(),
                share: container.share.clone()?,
            })
        })
        .collect();
    let grant = Grant {
        version: Grant::VERSION,
        plan: format!("plan-of-{name}"),
        pod: name.into(),
        node: NODE.into(),
        containers: shares,
    };
    ObservedPod {
        uid: name.into(),
        namespace: "default".into(),
        name: name.into(),
        created: 0,
        revision: 0,
        grant: (!grant.containers.is_empty()).then(|| serde_json::to_string(&grant).unwrap()),
        requests: containers
            .iter()
            .map(|container| ContainerRequest {
                container: container.name.clone(),
                resource: GPU.into(),
                count: container.count,
            })
            .collect(),
        started: false,
    }
}

/// A pod with one container and this grant.
fn simple(name: &str, gpus: impl IntoIterator<Item = u8>) -> ObservedPod {
    pod(name, &[granted("app", gpus)])
}

/// The same pod after kubelet admitted it.
fn started(mut pod: ObservedPod) -> ObservedPod {
    pod.started = true;
    pod
}

/// A pod with one container that bypassed the scheduler.
fn stray(name: &str, count: usize) -> ObservedPod {
    pod(name, &[asking("app", count)])
}

fn request(offered: &Devices, must: &Devices, size: usize) -> Request {
    Request { resource: GPU.into(), offered: offered.clone(), must: must.clone(), size }
}

impl Handover {
    /// Kubelet's request, without a wait.
    fn ask(&mut self, offered: impl IntoIterator<Item = u8>, size: usize) -> Preference {
        self.ask_with(offered, [], size)
    }

    fn ask_with(
        &mut self,
        offered: impl IntoIterator<Item = u8>,
        must: impl IntoIterator<Item = u8>,
        size: usize,
    ) -> Preference {
        let request = request(&set(offered), &set(must), size);
        let mut answers = self.prefer(&[request], WaitFor::default()).unwrap();
        assert_eq!(answers.len(), 1);
        answers.remove(0)
    }

    fn serve(&mut self, gpus: impl IntoIterator<Item = u8>) -> PlanMatch {
        self.allocate(&GPU.into(), &set(gpus), NOW)
    }

    /// Kubelet admits the next pod of one container: requests a preference, follows it, allocates.
    fn admit(&mut self, offered: impl IntoIterator<Item = u8>, size: usize) -> Devices {
        let answer = self.ask(offered, size).devices;
        self.allocate(&GPU.into(), &answer, NOW);
        answer
    }

    fn list(&mut self, holdings: &[(&str, &str, Devices)]) {
        let ticket = self.listing_begins();
        let listing = holdings
            .iter()
            .map(|(pod, container, devices)| {
                let holding = Holding {
                    namespace: "default".into(),
                    pod: (*pod).into(),
                    container: (*container).into(),
                    resource: GPU.into(),
                };
                (holding, devices.clone())
            })
            .collect();
        self.listed(ticket, Listing(listing), Timestamp::from_second(1).unwrap());
    }

    /// The devices of each pod in the status, without provenance.
    fn held_by(&self, pod: &str) -> Devices {
        self.holders()
            .iter()
            .filter(|holder| holder.pod == pod)
            .flat_map(|holder| holder.devices.iter().cloned())
            .collect()
    }
}
