//! What the tests on real machines share: the recorded matrices, the choices of NVIDIA's plugin, and a saturated node
//! replayed. Stands beside the library, not in it: nothing here decides anything in production.
#![allow(dead_code, reason = "each test takes its part")]

pub(crate) mod peer;
pub(crate) mod saturated;

use gantry_topology::bandwidth::LinkRate;
use gantry_topology::{Machine, Rates};

/// A recorded `nvidia-smi topo -m` text.
pub(crate) fn recorded(name: &str) -> String {
    let path = format!("{}/fixtures/topologies/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names of the complete recorded texts, in order.
pub(crate) fn names() -> Vec<String> {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/topologies")).unwrap();
    let names = files.map(|file| file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned());
    let mut names: Vec<String> =
        names.filter(|name| !name.starts_with("truncated") && name != "README").collect();
    names.sort();
    assert!(names.len() > 30, "{names:?}");
    names
}

/// The machine of a recorded text.
pub(crate) fn machine(name: &str) -> Machine {
    gantry_smi::read_machine(&recorded(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Rates alike for all GPUs, GB/s: one NVLink, PCIe, the socket link.
pub(crate) fn rates(machine: &Machine, nvlink: u32, pcie: u32, socket: u32) -> Rates {
    let gpus = machine.gpus().len();
    let rate = |gbs: u32| LinkRate::new(gbs * 1000, gbs * 1000);
    Rates { nvlink: vec![rate(nvlink); gpus], pcie: vec![rate(pcie); gpus], socket: rate(socket) }
}
