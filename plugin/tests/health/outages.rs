//! NVML that fails or is missing: reported once, retried, and no proof of a reset.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Cordons, FaultEvidence, GpuFault};
use gantry_plugin::health::{OutageKind, Proof};
use gantry_plugin::inventory::Diagnosis;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Eye, LOOKS_ALONE, QUICK};
use crate::log::Log;
use crate::sim::Sim;

#[tokio::test]
async fn endless_wait_failure_neither_spins_nor_floods() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlEventSetWait_v2", 999, None).unwrap();
    let unhealthy = eye.until_sick(4).await;
    let reasons: BTreeSet<&str> = unhealthy.values().map(String::as_str).collect();
    insta::assert_snapshot!(reasons.into_iter().collect::<Vec<_>>().join("\n"), @"NVML fails: nvmlEventSetWait_v2 failed: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node");
    // One snapshot reported it; further attempts publish nothing.
    eye.snapshots.borrow_and_update();
    let calls = || controller.calls();
    let before = calls();
    while calls().since(&before).of("nvmlEventSetWait_v2") < 20 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!eye.snapshots.has_changed().unwrap());
    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn successive_gpu_losses_leave_no_gap_in_events() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    let before = controller.calls();
    // NVML_ERROR_GPU_IS_LOST: each falls off the bus just after registration.
    controller.fail_call("nvmlEventSetWait_v2", 15, Some(3)).unwrap();
    while controller.calls().since(&before).of("nvmlEventSetWait_v2") < 4 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    controller.raise_xid(0, 79).unwrap();
    eye.until_sick(1).await;
    assert_eq!(controller.calls().since(&before).of("nvmlInit_v2"), 0);
}

#[tokio::test]
async fn lasting_failure_is_published_once() {
    let log = Log::default();
    // For all threads, including those of other tests, whose failures have other numbers.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlEventSetWait_v2", 997, None).unwrap();
    eye.until_sick(4).await;
    let waits = 40;
    let before = controller.calls();
    while controller.calls().since(&before).of("nvmlEventSetWait_v2") < waits {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Every second of them ended an NVML session.
    let reported = log.of("997");
    assert!((1..10).contains(&reported), "{reported} of {waits}");
    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn temporary_library_mismatch_proves_no_reset() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.raise_xid(1, 95).unwrap();
    eye.until_sick(1).await;
    // NVML_ERROR_LIB_RM_VERSION_MISMATCH: the driver's files were updated, but its module was not reloaded.
    for call in ["nvmlDeviceGetCount_v2", "nvmlInit_v2"] {
        controller.fail_call(call, 18, None).unwrap();
    }
    eye.until_sick(4).await;
    for call in ["nvmlDeviceGetCount_v2", "nvmlInit_v2"] {
        controller.clear_rule(call).unwrap();
    }
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(1)], "Xid 95: Uncontained memory error");
}

#[tokio::test]
async fn missing_library_appearing_proves_no_reset() {
    let sim = Sim::of("l4-4x-pcie");
    let library = sim.options().library;
    let away = library.with_extension("away");
    fs::rename(&library, &away).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    let fault = GpuFault {
        gpu: sim.uuid(1).to_owned(),
        gpu_instance: None,
        compute_instance: None,
        mig_device: None,
        xid: 95,
        class: "resettable".to_owned(),
        reason: "Xid 95: Uncontained memory error".to_owned(),
        since: Time(jiff::Timestamp::UNIX_EPOCH),
        boot_id: String::new(),
        driver: None,
        evidence: FaultEvidence::default(),
    };
    eye.nvml_thread.diagnoses().adopt(vec![fault], Cordons::default(), Vec::new());
    let is_missing = |now: &Arc<Diagnosis>| {
        let kind = now.outage.as_ref().map(|outage| outage.kind);
        // Not `Failing`: that would restart the process, which would find no library either.
        kind == Some(OutageKind::LibraryMissing)
    };
    eye.diagnosis("no library", is_missing).await;
    fs::rename(&away, &library).unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(1)], "Xid 95: Uncontained memory error");
}

#[tokio::test]
async fn xid_of_gpu_without_uuid_counts_once_known() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlDeviceGetUUID", 999, None).unwrap();
    eye.until_sick(4).await;
    controller.raise_xid(1, 119).unwrap();
    eye.a_while_of(&sim, "nvmlDeviceGetUUID").await;
    controller.clear_rule("nvmlDeviceGetUUID").unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(1)], "Xid 119: GSP RPC Timeout");
    eye.a_while(&sim).await;
    assert_eq!(super::unhealthy(&eye.snapshots.borrow()).len(), 1);
}

#[tokio::test]
async fn gpu_without_uuid_is_not_read_at_every_check() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    let controller = &sim.installed.controller;
    controller.lose_gpu(3).unwrap();
    controller.fail_call("nvmlDeviceGetUUID", 999, None).unwrap();
    eye.ready().await;
    let before = controller.calls();
    let since = |call: &str| controller.calls().since(&before).of(call);
    // Called once per check and once per reading.
    while since("nvmlSystemGetDriverVersion") < 20 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(since("nvmlEventSetCreate") < 4, "{}", since("nvmlEventSetCreate"));
    controller.clear_rule("nvmlDeviceGetUUID").unwrap();
    eye.until("those that answer", |now| now.units.len() == 3).await;
}

fn outage(kind: OutageKind) -> impl Fn(&Arc<Diagnosis>) -> bool {
    move |now| now.outage.as_ref().map(|outage| outage.kind) == Some(kind)
}

#[tokio::test]
async fn failing_nvml_with_driver_back_is_not_driver_gone() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.raise_xid(1, 95).unwrap();
    eye.until_sick(1).await;
    controller.unload_driver().unwrap();
    eye.diagnosis("no driver", outage(OutageKind::DriverGone)).await;
    controller.fail_call("nvmlInit_v2", 999, None).unwrap();
    controller.load_driver().unwrap();
    // Only this restarts the process.
    let now = eye.diagnosis("a failing NVML", outage(OutageKind::Failing)).await;
    insta::assert_snapshot!(now.outage.as_ref().unwrap().reason, @"NVML fails: nvmlInit_v2 failed: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node");
    // The driver was gone meanwhile, which has reset the GPUs.
    controller.clear_rule("nvmlInit_v2").unwrap();
    eye.healthy().await;
    assert_eq!(eye.proofs().await, [Proof::DriverReloaded]);
}

#[tokio::test]
async fn nvml_failing_from_start_is_reported() {
    let sim = Sim::of("l4-4x-pcie");
    sim.installed.controller.fail_call("nvmlInit_v2", 999, None).unwrap();
    let eye = Eye::open(&sim, QUICK);
    let now = eye.diagnosis("a failing NVML", outage(OutageKind::Failing)).await;
    assert!(!now.known);
}

#[tokio::test]
async fn gpu_without_event_registration_is_unhealthy() {
    let sim = Sim::of("l4-4x-pcie");
    let controller = &sim.installed.controller;
    for call in ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"] {
        controller.fail_call(call, 999, None).unwrap();
        let mut eye = Eye::open(&sim, LOOKS_ALONE);
        let unhealthy = eye.until_sick(4).await;
        let reason = &unhealthy[sim.uuid(1)];
        assert!(
            reason.starts_with(&format!("cannot register for its Xid events: {call} on GPU 1 failed")),
            "{reason}"
        );
        controller.clear_rule(call).unwrap();
        eye.healthy().await;
        controller.raise_xid(0, 95).unwrap();
        assert!(eye.until_sick(1).await.contains_key(sim.uuid(0)));
        eye.nvml_thread.stop();
    }
}
