//! Snapshots of the labels of the simulated machines.

use std::fmt::Write as _;

use gantry_config::{Config, MigStrategy};

use super::{machine, plain, text};

/// The simulator's machines with snapshots: one of each kind.
const MACHINES: [&str; 7] =
    ["a40-8x-bridged", "dgx-a100", "dgx1-v100", "dgx2-16x-v100", "hgx-h100", "l4-4x-pcie", "workstation-2x"];

/// The machines with MIG devices.
const CUT: [&str; 6] =
    ["a100-1x-mig", "a30-4x-mig", "dgx-a100-mig", "h200-8x-mig", "hgx-h100-mig", "rtx-pro-6000-4x-mig"];

#[test]
fn simulated_machines_have_labels() {
    let mut all = String::new();
    for name in MACHINES {
        let labels = plain(&machine(name), &Config::default());
        writeln!(all, "# {name}\n{}", text(&labels, &[""])).unwrap();
    }
    insta::assert_snapshot!(all);
}

#[test]
fn simulated_mig_machines_have_labels_of_each_strategy() {
    let mut all = String::new();
    for name in CUT {
        for strategy in [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed] {
            let config = Config { mig_strategy: strategy, ..Config::default() };
            let labels = plain(&machine(name), &config);
            let own = text(&labels, &["nvidia.com/gpu.", "nvidia.com/mig"]);
            writeln!(all, "# {name}, {strategy:?}\n{own}").unwrap();
        }
    }
    insta::assert_snapshot!(all);
}
