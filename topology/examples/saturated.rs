//! Prints how near the jobs of a saturated node come to the best bandwidth, under three policies, for every recorded machine.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "an example")]

#[path = "../tests/support/mod.rs"]
mod support;

use gantry_topology::{Purpose, Table};
use support::saturated::{Model, Policy, replay_often};

const MACHINES: [(&str, [u32; 3], u64); 12] = [
    ("v100-sxm2-8gpu-cubemesh-1mlx5", [20, 12, 10], 5),
    ("v100-sxm2-8gpu-cubemesh-2mlx5-mixedtabs", [20, 12, 10], 5),
    ("dgx1-p100-8gpu-4ib-soc", [18, 12, 10], 5),
    ("a40-8gpu-4bridgepairs-2nic", [12, 24, 16], 5),
    ("pcie-6gpu-pix-node-sys", [12, 24, 20], 4),
    ("workstation-5gpu-uneven-numa", [20, 24, 16], 4),
    ("titanv-8gpu-pix-phb-sys", [20, 12, 10], 5),
    ("hgx-a100-8gpu-4nic-lopsided", [20, 24, 16], 5),
    ("4gpu-2bridgepairs-1nic-pix-pxb", [12, 24, 16], 4),
    ("a100-pcie-4gpu-2bridgepairs", [20, 24, 20], 4),
    ("ibm-ac922-4gpu-6mlx5", [20, 32, 32], 4),
    ("a6000-3gpu-1bridgepair", [12, 24, 16], 3),
];

fn main() {
    println!(
        "{:42} {:5}  {:>15}  {:>15}  {:>15}  {:>15}",
        "machine", "model", "lowest index", "NVIDIA", "ours", "ours, gang"
    );
    for (name, [nvlink, pcie, socket], largest) in MACHINES {
        let machine = support::machine(name);
        let rates = support::rates(&machine, nvlink, pcie, socket);
        let table = Table::with_rates(&machine, &rates);
        let policies = [
            Policy::lowest_index(&machine),
            Policy::nvidia(&machine),
            Policy::ours(&table, Purpose::Local),
            Policy::ours(&table, Purpose::GangMember),
        ];
        for model in [Model::Ring, Model::Cut] {
            let cells = policies.iter().map(|policy| {
                let reached = replay_often(&machine, &rates, policy, model, largest);
                format!("{:8.4} / {:4.2}", reached.mean, reached.lower_quartile)
            });
            let cells: Vec<String> = cells.collect();
            println!("{name:42} {:5}  {}", format!("{model:?}"), cells.join("  "));
        }
    }
}
