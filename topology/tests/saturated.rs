//! Given a node whose GPUs are never enough, then its jobs run nearer to the best bandwidth than under any other policy
//! known. The figures to reach stand beside each machine; `cargo run --release -p gantry-topology --example saturated`
//! prints them all.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use gantry_topology::{Purpose, Table};
use support::saturated::{Model, Policy, replay_often};

/// Machine, rates (NVLink, PCIe, socket link, GB/s), largest job, and the mean efficiency to reach: the best known
/// before, by the ring model, for jobs of 1 to 5 GPUs.
const REACH: [(&str, [u32; 3], u64, f64); 6] = [
    ("v100-sxm2-8gpu-cubemesh-1mlx5", [20, 12, 10], 5, 0.856),
    ("v100-sxm2-8gpu-cubemesh-2mlx5-mixedtabs", [20, 12, 10], 5, 0.856),
    ("dgx1-p100-8gpu-4ib-soc", [18, 12, 10], 5, 0.892),
    ("a40-8gpu-4bridgepairs-2nic", [12, 24, 16], 5, 0.964),
    ("pcie-6gpu-pix-node-sys", [12, 24, 20], 4, 0.962),
    ("workstation-5gpu-uneven-numa", [20, 24, 16], 4, 0.934),
];

#[test]
fn mean_job_reaches_the_recorded_efficiency() {
    for (name, [nvlink, pcie, socket], largest, reach) in REACH {
        let machine = support::machine(name);
        let rates = support::rates(&machine, nvlink, pcie, socket);
        let ours = Policy::ours(&Table::with_rates(&machine, &rates), Purpose::Local);
        let reached = replay_often(&machine, &rates, &ours, Model::Ring, largest);
        assert!(reached.mean >= reach, "{name}: {reached:?}, {reach} to reach");
        assert!(reached.lower_quartile >= 1.0, "{name}: {reached:?}");
    }
}

#[test]
fn no_machine_loses_a_point_against_nvidias_policy() {
    for name in support::names() {
        let machine = support::machine(&name);
        let rates = gantry_topology::Rates::of(&machine);
        let largest = u64::min(5, machine.gpus().len() as u64);
        let ours = Policy::ours(&Table::build(&machine), Purpose::Local);
        let nvidia = Policy::nvidia(&machine);
        for model in [Model::Ring, Model::Cut] {
            let ours = replay_often(&machine, &rates, &ours, model, largest);
            let theirs = replay_often(&machine, &rates, &nvidia, model, largest);
            assert!(ours.mean >= theirs.mean - 0.01, "{name}, {model:?}: {ours:?}, NVIDIA {theirs:?}");
        }
    }
}
