//! Machines, device sets and requests for tests and benchmarks.
#![allow(missing_docs, clippy::unwrap_used, clippy::missing_panics_doc, reason = "for tests and benchmarks")]

use std::sync::Arc;

use gantry_api::names;
use gantry_topology::{
    Gpu, GpuSet, Machine, MachineParts, Nic, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix,
};

use crate::devices::DeviceSet;
use crate::kind::{Kind, Kinds, Sharing, Spot, Units};
use crate::request::{Ask, Container, ContainerKind, Request};
use crate::shape::{Parts, Shape};
use crate::snapshot::{Class, Pool, ScoreCache};

pub const GPU: &str = names::GPU_RESOURCE;

pub fn set(text: &str) -> GpuSet {
    text.parse().unwrap()
}

/// Eight GPUs in four bridged pairs (0-1, 2-3, 4-5, 6-7), four to a socket.
pub fn bridged() -> Machine {
    machine(8, |parts| {
        parts.nvlinks =
            (0..4).map(|pair| NvLinkBundle { gpus: [2 * pair, 2 * pair + 1], links: 4 }).collect();
    })
}

/// Eight GPUs behind NVSwitches: all pairs alike.
pub fn switched() -> Machine {
    switched_of(8)
}

fn switched_of(gpus: usize) -> Machine {
    machine(gpus, |parts| {
        for gpu in &mut parts.gpus {
            gpu.nvlink = Some(NvLinkPorts { version: Some(4), switch_links: 18, ..NvLinkPorts::default() });
        }
    })
}

/// Eight GPUs in a hybrid cube mesh of NVLinks, four to a socket: pairs with two links, one link or none.
pub fn cube_mesh() -> Machine {
    const DOUBLE: [[u8; 2]; 8] = [[0, 3], [0, 4], [1, 2], [1, 5], [2, 3], [4, 7], [5, 6], [6, 7]];
    const SINGLE: [[u8; 2]; 8] = [[0, 1], [0, 2], [1, 3], [2, 6], [3, 7], [4, 5], [4, 6], [5, 7]];
    machine(8, |parts| {
        let of = |pairs: [[u8; 2]; 8], links| pairs.map(|gpus| NvLinkBundle { gpus, links });
        parts.nvlinks = [of(DOUBLE, 2), of(SINGLE, 1)].concat();
    })
}

/// GPUs behind NVSwitches, and NICs below the PCIe switch of the same number of GPUs each.
pub fn railed(gpus: usize, nics: usize) -> Machine {
    let parts = switched_of(gpus).into_parts();
    let nic_of = |gpu: usize| gpu * nics / gpus;
    let paths = PathMatrix::from_fn(gpus + nics, |a, b| match (a.min(b), a.max(b)) {
        (gpu, nic) if nic >= gpus && gpu < gpus => {
            if nic_of(gpu) == nic - gpus {
                PathClass::Pix
            } else {
                PathClass::Sys
            }
        }
        (a, b) if b < gpus && nic_of(a) == nic_of(b) => PathClass::Pix,
        _ => PathClass::Sys,
    });
    let nics = (0..nics).map(|nic| Nic { name: format!("mlx5_{nic}"), ..Nic::default() }).collect();
    Machine::new(MachineParts { paths, nics, ..parts }).unwrap()
}

/// GPUs joined by nothing but PCIe.
pub fn plain(gpus: usize) -> Machine {
    machine(gpus, |_| {})
}

fn machine(gpus: usize, shape: impl FnOnce(&mut MachineParts)) -> Machine {
    let mut parts = MachineParts {
        gpus: (0..gpus).map(|index| Gpu { index: u8::try_from(index).unwrap(), ..Gpu::default() }).collect(),
        paths: PathMatrix::from_fn(
            gpus,
            |a, b| {
                if a / 4 == b / 4 { PathClass::Node } else { PathClass::Sys }
            },
        ),
        ..MachineParts::default()
    };
    shape(&mut parts);
    Machine::new(parts).unwrap()
}

pub fn kind(machine: &Machine) -> Arc<Kind> {
    Kinds::default().of(machine)
}

/// `replicas` of each of `gpus` GPUs, distributed.
pub fn replicas(gpus: u8, replicas: usize) -> Shape {
    let spots = (0..gpus).flat_map(|gpu| std::iter::repeat_n(Spot { gpu, slice: None }, replicas));
    Shape::Parts(Arc::new(Parts::new(spots.collect(), Sharing::Distributed)))
}

/// MIG devices by GPU, first memory unit and size, packed.
pub fn slices(slices: &[(u8, u8, u8)]) -> Shape {
    let spot = |&(gpu, start, size): &(u8, u8, u8)| Spot { gpu, slice: Some(Units { start, size }) };
    let spots = slices.iter().map(spot).collect();
    Shape::Parts(Arc::new(Parts::new(spots, Sharing::Packed)))
}

/// A pool of so many devices, of which some are free.
pub fn pool_of(resource: &str, shape: Shape, devices: usize, free: DeviceSet) -> Pool {
    Pool {
        resource: resource.into(),
        devices,
        shape,
        max_request: None,
        open: free.clone(),
        free,
        unhealthy: 0,
        faults: Vec::new(),
        leaving: 0,
        reserved: 0,
        unserved: 0,
        advertised: None,
        alignment: None,
    }
}

/// Nodes of a kind with one pool.
pub fn class_of(kind: &Arc<Kind>, pool: Pool) -> Class {
    Class {
        kind: Arc::clone(kind),
        pools: vec![pool],
        withheld: None,
        models: Arc::default(),
        cost: 0,
        scores: ScoreCache::default(),
    }
}

pub fn request(devices: u32) -> Arc<Request> {
    request_of(GPU, devices)
}

pub fn request_of(resource: &str, devices: u32) -> Arc<Request> {
    Arc::new(Request {
        asks: vec![Ask::single(resource.into(), devices)],
        order: Vec::new(),
        ..Request::default()
    })
}

/// Containers that ask for so many devices of each of two resources.
pub fn request_of_two(resources: [&str; 2], containers: &[[u32; 2]]) -> Arc<Request> {
    let texts: Vec<[String; 2]> =
        containers.iter().map(|counts| counts.map(|count| count.to_string())).collect();
    let names: Vec<String> = (0..containers.len()).map(|number| format!("c{number}")).collect();
    let named = resources.map(Into::into);
    let request = Request::read(&named, |resource| {
        let at = usize::from(resource != resources[0]);
        let each = names.iter().zip(&texts);
        each.map(move |(name, counts)| Container {
            name,
            kind: ContainerKind::App,
            quantity: Some(counts[at].as_str()),
        })
    });
    Arc::new(request.unwrap())
}
