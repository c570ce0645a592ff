//! Evidence that clears a fault: proof of a reset, or the operator; not a restart of the plugin.

use std::fs;
use std::os::unix::fs::symlink;

use gantry_api::Cordons;
use gantry_plugin::health::{HealthChecks, Proof};
use gantry_plugin::inventory::{Lift, State};

use super::{EVENTS_ALONE, Eye, QUICK, unhealthy};
use crate::sim::Sim;

fn boot(sim: &Sim, id: &str) {
    let folder = sim.installed.layout.proc.join("sys/kernel/random");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
}

/// The kernel binds a GPU to its driver again, as after a reload.
fn bind_anew(sim: &Sim, gpu: usize) {
    let address = &sim.installed.facts.gpus[gpu].address.to_string();
    let device = sim.installed.layout.sys.join("bus/pci/devices").join(address);
    let target = fs::read_link(device.join("driver")).unwrap();
    symlink(target, device.join("driver.new")).unwrap();
    fs::rename(device.join("driver.new"), device.join("driver")).unwrap();
}

#[tokio::test]
async fn reset_needs_evidence() {
    let sim = Sim::of("dgx-a100");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller
        .update_gpu(1, |gpu| {
            gpu.ecc.volatile_uncorrected = 1;
            gpu.remapped.pending = true;
        })
        .unwrap();
    for gpu in [0, 1] {
        controller.raise_xid(gpu, 95).unwrap();
    }
    eye.until_sick(2).await;
    eye.a_while(&sim).await;
    assert_eq!(unhealthy(&eye.snapshots.borrow()).len(), 2, "both go on answering, which proves nothing");
    // nvidia-smi --gpu-reset
    controller
        .update_gpu(1, |gpu| {
            gpu.ecc.volatile_uncorrected = 0;
            gpu.remapped.pending = false;
        })
        .unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(0)], "Xid 95: Uncontained memory error");
    assert_eq!(eye.proofs().await, [Proof::Repaired]);
}

#[tokio::test]
async fn earlier_reset_does_not_clear_later_fault() {
    let sim = Sim::of("dgx-a100");
    let controller = &sim.installed.controller;
    let errors = |gpu, count| {
        controller.update_gpu(gpu, move |gpu| gpu.ecc.volatile_uncorrected = count).unwrap();
    };
    // For GPU 1 this is the first fault; GPU 2 has an equal one: the vitals read last are from before the reset.
    (1..3).for_each(|gpu| errors(gpu, 5));
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    controller.raise_xid(2, 95).unwrap();
    eye.until_sick(1).await;
    (1..3).for_each(|gpu| errors(gpu, 1));
    for gpu in 1..4 {
        controller.raise_xid(gpu, 95).unwrap();
    }
    let unhealthy = eye.until_sick(3).await;
    assert!(
        (1..4).all(|gpu| unhealthy[sim.uuid(gpu)] == "Xid 95: Uncontained memory error"),
        "{unhealthy:?}"
    );
}

#[tokio::test]
async fn quarantine_survives_restart() {
    let sim = Sim::of("l4-4x-pcie");
    boot(&sim, "first");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid(1, 79).unwrap();
    sim.installed.controller.raise_xid(2, 46).unwrap();
    let before = eye.until_sick(2).await;
    let stored = eye.stored().await;
    eye.nvml_thread.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored.clone(), Cordons::default(), Vec::new());
    assert_eq!(eye.until_sick(2).await, before);
    assert_eq!(eye.stored().await, stored, "and is stored again as it was");
    eye.a_while(&sim).await;
    assert_eq!(unhealthy(&eye.snapshots.borrow()), before);
    eye.nvml_thread.stop();

    // The driver was reloaded for one of them while no plugin ran.
    bind_anew(&sim, 2);
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored.clone(), Cordons::default(), Vec::new());
    let unhealthy = eye.until_sick(1).await;
    assert!(unhealthy.contains_key(sim.uuid(1)), "{unhealthy:?}");
    assert_eq!(eye.proofs().await, [Proof::Rebound]);
    eye.nvml_thread.stop();

    boot(&sim, "second");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored, Cordons::default(), Vec::new());
    assert_eq!(eye.proofs().await, [Proof::Rebooted; 2]);
    eye.healthy().await;
}

#[tokio::test]
async fn stored_xid_is_cleared_once_not_enabled() {
    let sim = Sim::of("l4-4x-pcie");
    let enabled = HealthChecks { enabled: "31".parse().unwrap(), ..HealthChecks::default() };
    let mut eye = Eye::open_with(&sim, EVENTS_ALONE, enabled.clone());
    eye.ready().await;
    sim.installed.controller.raise_xid(1, 31).unwrap();
    eye.until_sick(1).await;
    let stored = eye.stored().await;
    eye.nvml_thread.stop();

    let mut eye = Eye::open_with(&sim, QUICK, enabled);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored.clone(), Cordons::default(), Vec::new());
    eye.until_sick(1).await;
    eye.nvml_thread.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored, Cordons::default(), Vec::new());
    assert_eq!(eye.proofs().await, [Proof::Lifted]);
    eye.healthy().await;
}

#[tokio::test]
async fn operator_lifts_quarantine() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    for gpu in 0..3 {
        sim.installed.controller.raise_xid(gpu, 79).unwrap();
    }
    eye.until_sick(3).await;
    eye.nvml_thread.diagnoses().lift(sim.uuid(1).parse::<Lift>().unwrap());
    let unhealthy = eye.until_sick(2).await;
    assert!(!unhealthy.contains_key(sim.uuid(1)), "{unhealthy:?}");
    eye.nvml_thread.diagnoses().lift(Lift::All);
    eye.healthy().await;
}

#[tokio::test]
async fn unopenable_gpu_keeps_quarantine_after_restart() {
    let sim = Sim::of("dgx-a100");
    let controller = &sim.installed.controller;
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    controller.raise_xid(0, 119).unwrap();
    eye.until_sick(1).await;
    let stored = eye.stored().await;
    eye.nvml_thread.stop();

    // NVML_ERROR_UNKNOWN: the GPU did not necessarily fall off the bus.
    let open = "nvmlDeviceGetHandleByIndex_v2";
    controller.fail_call(open, 999, None).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    eye.until("GPUs without a name", |now| now.state == State::Ready).await;
    eye.nvml_thread.diagnoses().adopt(stored, Cordons::default(), Vec::new());
    eye.a_while_of(&sim, open).await;
    controller.fail_call(open, 999, Some(0)).unwrap();
    let unhealthy = eye.until("the GPUs again", |now| now.units.len() == 8).await;
    eye.a_while(&sim).await;
    assert_eq!(
        super::unhealthy(&unhealthy).keys().collect::<Vec<_>>(),
        [sim.uuid(0)],
        "that it answers proves nothing"
    );
    assert_eq!(super::unhealthy(&eye.snapshots.borrow()).len(), 1);
}
