//! The rails of GPUs on recorded machines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use gantry_topology::{NicSet, PathClass};
use support::{machine, names};

/// The rails of each GPU as text; empty without any.
fn rails(name: &str) -> Vec<String> {
    let machine = machine(name);
    (0..machine.gpus().len()).map(|gpu| NicSet::nearest(&machine, gpu).to_string()).collect()
}

#[test]
fn rails_of_recorded_machines() {
    let pairs = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"];
    assert_eq!(rails("dgx-a100-8gpu-10nic"), pairs, "the storage NICs are no rails");
    // The header has mlx5_0, mlx5_2, mlx5_1, mlx5_3.
    assert_eq!(rails("dgx1-p100-8gpu-4ib-soc"), ["0", "0", "2", "2", "1", "1", "3", "3"]);
    let lopsided = ["0-1", "0-1", "2-3", "2-3", "", "", "", ""];
    assert_eq!(rails("hgx-a100-8gpu-4nic-lopsided"), lopsided, "the other socket has no NIC");
    assert_eq!(rails("polaris-4xa100-nv4-2mlx5"), ["", "1", "", "0"]);
    assert_eq!(rails("a40-8gpu-4bridgepairs-2nic"), ["", "", "", "", "0-1", "0-1", "0-1", "0-1"]);
    assert_eq!(rails("hgx-h100-8gpu-nonic"), [""; 8]);
}

/// By definition: no NIC of the machine is nearer than a rail, none as near is left out, and none is beyond the socket.
#[test]
fn rails_are_the_nearest_nics_of_the_socket() {
    for name in names() {
        let machine = machine(&name);
        let gpus = machine.gpus().len();
        for gpu in 0..gpus {
            let to = |nic: usize| machine.paths().get(gpu, gpus + nic);
            let rails: Vec<usize> = NicSet::nearest(&machine, gpu).iter().collect();
            for nic in 0..machine.nics().len() {
                let is_nearest = (0..machine.nics().len()).all(|other| to(other) >= to(nic));
                let is_rail = is_nearest && to(nic) < PathClass::Sys;
                assert_eq!(rails.contains(&nic), is_rail, "{name}: GPU {gpu}, NIC {nic}");
            }
        }
    }
}
