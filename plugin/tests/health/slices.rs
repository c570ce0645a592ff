//! MIG layouts: detected without a restart, and derived if NVML does not return them.

use gantry_config::{Config, MigStrategy};
use gantry_plugin::health::Proof;
use gantry_plugin::inventory::Hardware;
use gantry_plugin::offer;

use super::{EVENTS_ALONE, Eye, LOOKS_ALONE, QUICK, unhealthy};
use crate::sim::Sim;

/// Each unit with its profile, and its location if it is a slice.
fn cut(hardware: &Hardware, gpu: u8) -> Vec<(String, u8, u8)> {
    let units = hardware.units.iter().filter(|unit| unit.gpu == gpu);
    units
        .map(|unit| match &unit.slice {
            Some(slice) => (slice.profile.clone(), slice.start, slice.size),
            None => ("whole".to_owned(), 0, 0),
        })
        .collect()
}

#[tokio::test]
async fn changed_mig_layout_is_detected_without_restart() {
    let sim = Sim::of("dgx-a100-mig");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    let before = eye.ready().await;
    assert_eq!(cut(&before, 0), [("whole".to_owned(), 0, 0)]);
    let controller = &sim.installed.controller;
    controller.recut(0, &["3g.20gb@0", "2g.10gb@4", "1g.5gb@6"]).unwrap();
    let pieces = [("3g.20gb".to_owned(), 0, 4), ("2g.10gb".to_owned(), 4, 2), ("1g.5gb".to_owned(), 6, 1)];
    let after = eye.until("the new cut", |now| cut(now, 0) == pieces).await;
    assert_eq!(cut(&after, 1), cut(&before, 1), "other GPUs are as they were");
    controller.recut(0, &["7g.40gb"]).unwrap();
    eye.until("another cut", |now| cut(now, 0) == [("7g.40gb".to_owned(), 0, 8)]).await;
    controller.uncut(0).unwrap();
    eye.until("whole again", |now| cut(now, 0) == cut(&before, 0)).await;
}

#[tokio::test]
async fn mig_devices_have_capability_nodes() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let ready = eye.ready().await;
    let caps = |hardware: &Hardware| -> Vec<Option<[u32; 2]>> {
        let slices = hardware.units.iter().filter_map(|unit| unit.slice.as_ref());
        slices.map(|slice| slice.caps).collect()
    };
    let found = caps(&ready);
    assert_eq!(found.len(), 7);
    let mut minors: Vec<u32> = found.into_iter().flat_map(|caps| caps.unwrap()).collect();
    minors.sort_unstable();
    minors.dedup();
    assert_eq!(minors.len(), 14, "each its own");
}

#[tokio::test]
async fn missing_placements_are_derived() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["3g.20gb@4", "1g.5gb@2"]).unwrap();
    // NVML_ERROR_NO_PERMISSION
    controller.fail_call("nvmlDeviceGetGpuInstanceById", 4, None).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let expected = [("1g.5gb".to_owned(), 2, 1), ("3g.20gb".to_owned(), 4, 4)];
    assert_eq!(cut(&*eye.ready().await, 0), expected);
}

#[tokio::test]
async fn unreadable_mig_layout_leaves_gpu_out_without_advice() {
    let sim = Sim::of("a100-1x-mig");
    // NVML_ERROR_NO_PERMISSION
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlDeviceGetMigDeviceHandleByIndex", 4, None).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    let reason = |hardware: &Hardware| {
        let config = Config { mig_strategy: MigStrategy::Mixed, ..Config::default() };
        let excluded = offer::offer(hardware, &config).excluded;
        assert_eq!(excluded.len(), 1);
        excluded[0].reason.clone()
    };
    let reported = reason(&*eye.ready().await);
    insta::assert_snapshot!(reported, @"MIG is on, and NVML does not report the MIG devices: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml) if this process lacks the right; the log has the error of NVML");
    eye.a_while(&sim).await;
    assert_eq!(reason(&eye.snapshots.borrow()), reported);
}

#[tokio::test]
async fn unreadable_mig_layout_keeps_known_one() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, QUICK);
    let before = eye.ready().await;
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlDeviceGetMaxMigDeviceCount", 999, None).unwrap();
    eye.a_while(&sim).await;
    assert_eq!(eye.snapshots.borrow().units, before.units);
}

#[tokio::test]
async fn replaced_instance_is_healthy_neighbour_stays_unhealthy() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["3g.20gb@0", "3g.20gb@4"]).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    for unit in &eye.ready().await.units {
        let slice = unit.slice.as_ref().unwrap();
        controller.raise_xid_in(0, 48, slice.gpu_instance, slice.compute_instance).unwrap();
    }
    eye.until_sick(2).await;
    eye.a_while(&sim).await;
    assert_eq!(unhealthy(&eye.snapshots.borrow()).len(), 2, "it does not end by itself");
    controller.recut(0, &["3g.20gb@4"]).unwrap();
    eye.until_sick(1).await;
    controller.recut(0, &["3g.20gb@0", "3g.20gb@4"]).unwrap();
    let after = eye.until("two units", |now| now.units.len() == 2).await;
    let health: Vec<bool> = after.units.iter().map(|unit| unit.health.healthy).collect();
    assert_eq!(health, [true, false]);
    assert_eq!(eye.proofs().await, [Proof::InstanceGone]);
}

#[tokio::test]
async fn gpu_with_mig_switched_on_is_not_whole_if_unreadable() {
    let sim = Sim::of("dgx-a100-mig");
    let mut eye = Eye::open(&sim, QUICK);
    let before = eye.ready().await;
    assert_eq!(cut(&before, 0), [("whole".to_owned(), 0, 0)]);
    let controller = &sim.installed.controller;
    // NVML_ERROR_NO_PERMISSION
    controller.fail_call("nvmlDeviceGetMigDeviceHandleByIndex", 4, None).unwrap();
    controller.recut(0, &["3g.20gb@0"]).unwrap();
    let after = eye.until("no whole GPU", |now| now.mig_unknown.contains(&0)).await;
    assert_eq!(cut(&after, 0), []);
    eye.a_while(&sim).await;
    let later = eye.snapshots.borrow().clone();
    assert!(later.mig_unknown.contains(&0));
    assert_eq!(cut(&later, 1), cut(&before, 1), "other GPUs are as they were");
}

#[tokio::test]
async fn xid_of_replaced_instance_belongs_to_new_one() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["1g.5gb@0"]).unwrap();
    // Only Xid events arrive, and no check comes before the Xid.
    controller.fail_call("nvmlDeviceRegisterEvents", 3, Some(1)).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let before = eye.ready().await.units[0].clone();
    let slice = before.slice.as_ref().unwrap();
    controller.recut(0, &["1g.5gb+me@0"]).unwrap();
    controller.raise_xid_in(0, 48, slice.gpu_instance, u32::MAX).unwrap();
    let after = eye.until("the new cut", |now| now.units[0].id != before.id).await;
    let unit = &after.units[0];
    assert_eq!(
        unit.slice.as_ref().unwrap().gpu_instance,
        slice.gpu_instance,
        "another instance of the same number"
    );
    assert_eq!(after.units.len(), 1);
    assert!(!unit.health.healthy);
}
