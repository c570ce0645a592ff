//! Units affected by an Xid: every replica, the named instance or all, and none if it is ignored.

use std::collections::BTreeMap;

use gantry_config::{Config, MigStrategy};
use gantry_plugin::health::HealthChecks;

use super::{EVENTS_ALONE, Eye, reported, shared_by_four};
use crate::sim::Sim;

#[tokio::test]
async fn replicas_follow_their_gpu() {
    let sim = Sim::of("workstation-2x");
    let config = shared_by_four();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    assert_eq!(reported(&*eye.ready().await, &config).len(), 8);
    sim.installed.controller.raise_xid(1, 79).unwrap();
    eye.until_sick(1).await;
    let replica = |gpu: usize, number: usize| (format!("{}::{number}", sim.uuid(gpu)), gpu == 0);
    let mut expected: Vec<_> = [0, 1]
        .into_iter()
        .flat_map(|gpu| (0..4).map(move |number| (gpu, number)))
        .map(|(gpu, number)| replica(gpu, number))
        .collect();
    let mut now = reported(&eye.snapshots.borrow(), &config);
    expected.sort();
    now.sort();
    assert_eq!(now, expected);
}

#[tokio::test]
async fn only_affected_mig_devices_of_a_resource_are_unhealthy() {
    let sim = Sim::of("a100-1x-mig");
    let config = Config { mig_strategy: MigStrategy::Single, ..Config::default() };
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid_in(0, 48, 9, 0).unwrap();
    eye.until_sick(1).await;
    let unhealthy = |eye: &Eye| {
        let devices = reported(&eye.snapshots.borrow(), &config);
        (devices.len(), devices.iter().filter(|(_, healthy)| !healthy).count())
    };
    assert_eq!(unhealthy(&eye), (7, 1));
    sim.installed.controller.raise_xid(0, 48).unwrap();
    eye.until_sick(7).await;
    assert_eq!(unhealthy(&eye), (7, 7));
}

#[tokio::test]
async fn gpu_xid_marks_all_mig_devices() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    assert_eq!(eye.ready().await.units.len(), 7);
    sim.installed.controller.raise_xid(0, 79).unwrap();
    let unhealthy = eye.until_sick(7).await;
    assert!(
        unhealthy.values().all(|reason| reason == "Xid 79: GPU has fallen off the bus"),
        "{unhealthy:#?}"
    );
}

#[tokio::test]
async fn instance_xid_marks_that_instance() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let units = eye.ready().await.units.clone();
    let mut expected = BTreeMap::new();
    for unit in &units {
        let slice = unit.slice.as_ref().unwrap();
        let instance = slice.gpu_instance;
        sim.installed.controller.raise_xid_in(0, 48, instance, slice.compute_instance).unwrap();
        expected
            .insert(unit.id.to_string(), format!("Xid 48: Double Bit ECC Error (GPU instance {instance})"));
        assert_eq!(eye.until_sick(expected.len()).await, expected);
    }
}

#[tokio::test]
async fn unconfined_xid_marks_every_instance() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid_in(0, 119, 7, 0).unwrap();
    eye.until_sick(7).await;
}

#[tokio::test]
async fn memory_xid_marks_all_compute_instances_engine_xid_one() {
    let sim = Sim::of("a100-1x-mig");
    sim.installed.controller.recut(0, &["3g.20gb@0=2c,1c", "3g.20gb@4"]).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let units = eye.ready().await.units.clone();
    let (one, other) = (units[0].slice.as_ref().unwrap(), units[1].slice.as_ref().unwrap());
    assert_eq!(one.gpu_instance, other.gpu_instance);
    let controller = &sim.installed.controller;
    controller.raise_xid_in(0, 46, one.gpu_instance, one.compute_instance).unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert!(unhealthy.contains_key(units[0].id.as_str()), "{unhealthy:?}");
    controller.raise_xid_in(0, 48, one.gpu_instance, one.compute_instance).unwrap();
    let unhealthy = eye.until_sick(2).await;
    assert!(!unhealthy.contains_key(units[2].id.as_str()), "{unhealthy:?}");
}

#[tokio::test]
async fn application_xid_in_instance_is_ignored() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    for xid in [13, 31, 94] {
        sim.installed.controller.raise_xid_in(0, xid, 7, 0).unwrap();
    }
    // Events arrive in order: with this one, the others have arrived.
    sim.installed.controller.raise_xid_in(0, 48, 8, 0).unwrap();
    eye.until_sick(1).await;
}

#[tokio::test]
async fn all_disabled_watches_only_enabled_xids() {
    let sim = Sim::of("l4-4x-pcie");
    let checks = HealthChecks {
        disabled: "all".parse().unwrap(),
        enabled: "48,13".parse().unwrap(),
        ..HealthChecks::default()
    };
    let mut eye = Eye::open_with(&sim, EVENTS_ALONE, checks);
    eye.ready().await;
    for (gpu, xid) in [(0, 79), (1, 95), (2, 13), (3, 48)] {
        sim.installed.controller.raise_xid(gpu, xid).unwrap();
    }
    let unhealthy = eye.until_sick(2).await;
    assert_eq!(unhealthy.keys().collect::<Vec<_>>(), {
        let mut both = vec![sim.uuid(2), sim.uuid(3)];
        both.sort_unstable();
        both
    });
}
