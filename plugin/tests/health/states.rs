//! Faults that NVML shows as a state (memory errors, recovery actions): they need no event, and are in the first list.

use std::time::Duration;

use gantry_config::Config;
use gantry_nvml_sim::control::Recovery;
use gantry_plugin::health::Proof;

use super::{EVENTS_ALONE, Eye, LOOKS_ALONE, QUICK, reported, unhealthy};
use crate::sim::Sim;

#[tokio::test]
async fn pending_or_failed_memory_repair_is_unhealthy() {
    let sim = Sim::of("dgx-a100");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.update_gpu(1, |gpu| gpu.remapped.pending = true).unwrap();
    controller.update_gpu(2, |gpu| gpu.remapped.failed = true).unwrap();
    // Contained, with nothing left to repair: the GPU stays healthy.
    controller.update_gpu(3, |gpu| gpu.ecc.volatile_uncorrected = 1).unwrap();
    let unhealthy = eye.until_sick(2).await;
    insta::assert_snapshot!(unhealthy[sim.uuid(1)], @"memory: rows wait to be remapped; drain the GPU and run nvidia-smi --gpu-reset");
    insta::assert_snapshot!(unhealthy[sim.uuid(2)], @"memory: remapping a row failed; run NVIDIA's field diagnostics and replace the board");
    controller.update_gpu(1, |gpu| gpu.remapped.pending = false).unwrap();
    eye.until_sick(1).await;
}

/// A plugin that starts knows past Xids only from the cluster, but reads NVML's states itself, in its first check.
#[tokio::test]
async fn first_list_contains_states_of_nvml() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    controller.update_gpu(1, |gpu| gpu.remapped.pending = true).unwrap();
    controller.update_gpu(2, |gpu| gpu.remapped.failed = true).unwrap();
    let wishes = [Recovery::GpuReset, Recovery::NodeReboot, Recovery::DrainAndReset];
    for (gpu, wish) in (3..).zip(wishes) {
        controller.update_gpu(gpu, |gpu| gpu.recovery = wish).unwrap();
    }
    controller.lose_gpu(6).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let first = eye.ready().await;
    let reasons = unhealthy(&first);
    insta::assert_snapshot!([1, 2, 3, 4, 5].map(|gpu| &*reasons[sim.uuid(gpu)]).join("\n"), @r"
    memory: rows wait to be remapped; drain the GPU and run nvidia-smi --gpu-reset
    memory: remapping a row failed; run NVIDIA's field diagnostics and replace the board
    the driver requests a reset of the GPU; drain it and run nvidia-smi --gpu-reset
    the driver requests a reboot of the node
    the driver requests a reset of the GPU once its work has ended
    ");
    // A GPU that is off the bus has no known name: none is offered for it.
    let well = reported(&first, &Config::default());
    let well: Vec<&str> = well.iter().filter(|(_, well)| *well).map(|(id, _)| id.as_str()).collect();
    assert_eq!(well, [sim.uuid(0), sim.uuid(7)]);
}

#[tokio::test]
async fn first_list_contains_pending_page_retirement() {
    let sim = Sim::of("dgx1-v100");
    let controller = &sim.installed.controller;
    controller.update_gpu(2, |gpu| gpu.retired.pending = true).unwrap();
    controller.update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 2).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let reasons = unhealthy(&*eye.ready().await);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    insta::assert_snapshot!(reasons[sim.uuid(2)], @"memory: pages wait to be retired; drain the node and reload the driver");
    insta::assert_snapshot!(reasons[sim.uuid(6)], @"memory: 2 uncorrected ECC errors; drain the GPU and run nvidia-smi --gpu-reset");
}

#[tokio::test]
async fn uncorrected_errors_count_without_row_remapping() {
    let sim = Sim::of("dgx1-v100");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 2).unwrap();
    let unhealthy = eye.until_sick(1).await;
    insta::assert_snapshot!(unhealthy[sim.uuid(6)], @"memory: 2 uncorrected ECC errors; drain the GPU and run nvidia-smi --gpu-reset");
    controller.update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 0).unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn recovery_action_is_unhealthy_and_its_end_proves_reset() {
    let sim = Sim::of("hgx-h100");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.update_gpu(4, |gpu| gpu.recovery = Recovery::GpuReset).unwrap();
    // Xid 154 reports that the recovery action changed; it is not a fault.
    controller.raise_xid(4, 154).unwrap();
    let unhealthy = eye.until_sick(1).await;
    insta::assert_snapshot!(unhealthy[sim.uuid(4)], @"the driver requests a reset of the GPU; drain it and run nvidia-smi --gpu-reset");
    controller.raise_xid(4, 119).unwrap();
    eye.until("the Xid", |now| {
        self::unhealthy(now).get(sim.uuid(4)).map(String::as_str) == Some("Xid 119: GSP RPC Timeout")
    })
    .await;
    // Once the next Xid is counted, the vitals read after this one were recorded.
    controller.raise_xid(4, 13).unwrap();
    while !eye.nvml_thread.xids().all().iter().any(|(_, xid, _)| *xid == 13) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    controller.update_gpu(4, |gpu| gpu.recovery = Recovery::None).unwrap();
    controller.raise_xid(4, 154).unwrap();
    eye.healthy().await;
    assert_eq!(eye.proofs().await, [Proof::ActionCleared]);
}

#[tokio::test]
async fn vitals_stand_while_call_fails() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    controller.update_gpu(1, |gpu| gpu.remapped.pending = true).unwrap();
    controller.update_gpu(2, |gpu| gpu.recovery = Recovery::NodeReboot).unwrap();
    // Contained: not a reason, because this GPU can remap rows, even if that call fails later.
    controller.update_gpu(3, |gpu| gpu.ecc.volatile_uncorrected = 1).unwrap();
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    let before = eye.until_sick(2).await;
    let questions = ["nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"];
    for question in questions {
        controller.fail_call(question, 999, None).unwrap();
    }
    eye.a_while_of(&sim, questions[0]).await;
    assert_eq!(unhealthy(&eye.snapshots.borrow()), before);
    // Now the new value counts.
    controller.update_gpu(1, |gpu| gpu.remapped.pending = false).unwrap();
    controller.update_gpu(2, |gpu| gpu.recovery = Recovery::None).unwrap();
    for question in questions {
        controller.clear_rule(question).unwrap();
    }
    eye.healthy().await;
}

#[tokio::test]
async fn unresponsive_gpu_is_lost_after_several_checks() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    let question = "nvmlDeviceGetMemoryInfo";
    // A single failure is chance, and a refusal is an answer.
    controller.fail_call(question, 999, Some(4)).unwrap();
    eye.a_while(&sim).await;
    controller.fail_call(question, 4, None).unwrap();
    eye.a_while_of(&sim, question).await;
    eye.a_while_of(&sim, question).await;
    assert!(unhealthy(&eye.snapshots.borrow()).is_empty());

    controller.fail_call(question, 999, None).unwrap();
    let unhealthy = eye.until_sick(4).await;
    insta::assert_snapshot!(unhealthy[sim.uuid(1)], @"GPU cannot be queried: nvmlDeviceGetMemoryInfo on GPU 1 failed: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node");
    // Another reading gives nothing new.
    eye.snapshots.borrow_and_update();
    eye.a_while(&sim).await;
    assert!(!eye.snapshots.has_changed().unwrap());
    controller.raise_xid(2, 95).unwrap();
    controller.clear_rule(question).unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(2)], "Xid 95: Uncontained memory error");
}
