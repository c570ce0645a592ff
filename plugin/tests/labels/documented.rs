//! Every label that NVIDIA documents, and no other in its domain.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_config::{Config, MigStrategy};
use gantry_plugin::inventory::Hardware;
use gantry_plugin::labels::{Facts, Host, HostDriver, HostOptions, Vgpu, labels};
use gantry_plugin::offer::offer;
use gantry_topology::{Fabric, Machine};

use super::{cut, machine, strategy};
use crate::sim::Sim;

/// The labels of gpu-feature-discovery v0.20.0, from its documentation and behaviour, not from our code: each with its value on a node
/// with eight H100, MIG off and unshared, or none if such a node does not have it. All begin with `nvidia.com/`.
const NVIDIA: &[(&str, Option<&str>)] = &[
    ("gfd.timestamp", Some("1700000000")),
    ("cuda.driver-version.major", Some("570")),
    ("cuda.driver-version.minor", Some("124")),
    ("cuda.driver-version.revision", Some("06")),
    ("cuda.driver-version.full", Some("570.124.06")),
    ("cuda.runtime-version.major", Some("12")),
    ("cuda.runtime-version.minor", Some("8")),
    ("cuda.runtime-version.full", Some("12.8")),
    ("cuda.driver.major", Some("570")),
    ("cuda.driver.minor", Some("124")),
    ("cuda.driver.rev", Some("06")),
    ("cuda.runtime.major", Some("12")),
    ("cuda.runtime.minor", Some("8")),
    ("gpu.machine", Some("PowerEdge-XE9680")),
    ("gpu.product", Some("NVIDIA-H100-80GB-HBM3")),
    ("gpu.count", Some("8")),
    ("gpu.replicas", Some("1")),
    ("gpu.sharing-strategy", Some("none")),
    ("gpu.memory", Some("81559")),
    ("gpu.family", Some("hopper")),
    ("gpu.compute.major", Some("9")),
    ("gpu.compute.minor", Some("0")),
    ("gpu.mode", Some("compute")),
    ("gpu.clique", None),
    ("mig.capable", Some("true")),
    ("mps.capable", Some("false")),
    ("mig.strategy", None),
    ("gpu.multiprocessors", None),
    ("gpu.slices.gi", None),
    ("gpu.slices.ci", None),
    ("gpu.engines.copy", None),
    ("gpu.engines.decoder", None),
    ("gpu.engines.encoder", None),
    ("gpu.engines.jpeg", None),
    ("gpu.engines.ofa", None),
    ("mig-1g.5gb.product", None),
    ("mig-1g.5gb.count", None),
    ("mig-1g.5gb.replicas", None),
    ("mig-1g.5gb.sharing-strategy", None),
    ("mig-1g.5gb.multiprocessors", None),
    ("mig-1g.5gb.slices.gi", None),
    ("mig-1g.5gb.slices.ci", None),
    ("mig-1g.5gb.engines.copy", None),
    ("mig-1g.5gb.engines.decoder", None),
    ("mig-1g.5gb.engines.encoder", None),
    ("mig-1g.5gb.engines.jpeg", None),
    ("mig-1g.5gb.engines.ofa", None),
    ("mig-1g.5gb.memory", None),
    ("vgpu.present", None),
    ("vgpu.host-driver-version", None),
    ("vgpu.host-driver-branch", None),
];

/// NVIDIA's labels of a machine on this host, without their domain.
fn nvidias(machine: &Machine, config: &Config, host: &Host) -> BTreeMap<String, String> {
    let hardware = Hardware::of(Arc::new(machine.clone()));
    let made = labels(&Facts {
        inventory: &offer(&hardware, config),
        config,
        host,
        watched: true,
        timestamp: Some(1_700_000_000),
    });
    let own = made.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("nvidia.com/")?;
        Some((name.to_owned(), value.clone()))
    });
    own.collect()
}

#[test]
fn plain_node_has_exactly_the_documented_labels() {
    let sim = Sim::of("hgx-h100");
    let sys = sim.installed.layout.sys.clone();
    let machine_type_file = sys.join("product_name");
    std::fs::write(&machine_type_file, "PowerEdge XE9680\n").unwrap();
    let host = Host::read(&HostOptions { machine_type_file, sys_root: sys });
    let expected: BTreeMap<String, String> =
        NVIDIA.iter().filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?.to_owned()))).collect();
    let machine = cut(sim.installed.facts.machine().clone(), |_| None);
    assert_eq!(nvidias(&machine, &Config::default(), &host), expected);
}

#[test]
fn documented_labels_are_all_made_and_no_others() {
    let host = Host {
        vgpu: Some(Vgpu { driver: Some(HostDriver { version: "460.16".into(), branch: "r460_00".into() }) }),
        ..Host::default()
    };
    let mut machine = machine("dgx-a100").into_parts();
    for gpu in &mut machine.gpus {
        gpu.fabric = Some(Fabric { cluster_uuid: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31".into(), clique: 1 });
    }
    let machine = cut(Machine::new(machine).unwrap(), |_| Some(&["1g.5gb"; 7]));
    let made: BTreeSet<String> = [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed]
        .into_iter()
        .flat_map(|mig| nvidias(&machine, &strategy(mig), &host).into_keys())
        .collect();
    let documented: BTreeSet<String> = NVIDIA.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(made, documented);
}
