//! Machines, device sets and requests for tests and benchmarks.
#![allow(missing_docs, clippy::unwrap_used, clippy::missing_panics_doc, reason = "for tests and benchmarks")]

use std::sync::Arc;

use gantry_api::names;
use gantry_topology::{Gpu, GpuSet, Machine, MachineParts, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix};

use crate::kind::{Kind, Kinds, Sharing, Spot, Units};
use crate::request::{Ask, Request};
use crate::shape::{Parts, Shape};

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
    machine(8, |parts| {
        for gpu in &mut parts.gpus {
            gpu.nvlink = Some(NvLinkPorts { version: Some(4), switch_links: 18, ..NvLinkPorts::default() });
        }
    })
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
