//! GPUs that are added or removed.

use std::fs;
use std::time::Duration;

use gantry_api::Cordons;
use gantry_plugin::discover::scan;
use gantry_plugin::inventory::{Hardware, Timing};

use super::{Eye, LOOKS_ALONE, QUICK, unhealthy};
use crate::sim::Sim;

/// The kernel binds a GPU to NVIDIA's driver, or removes it.
fn kernel_has(sim: &Sim, gpu: usize, there: bool) {
    let bound = sim.installed.layout.sys.join("bus/pci/drivers/nvidia");
    let entry = bound.join(sim.installed.facts.gpus[gpu].address.to_string());
    match there {
        true => fs::create_dir(entry).unwrap(),
        false => fs::remove_dir(entry).unwrap(),
    }
}

#[tokio::test]
async fn added_gpu_appears_removed_gpu_is_lost() {
    let sim = Sim::of("l4-4x-pcie");
    let controller = &sim.installed.controller;
    controller.remove_gpu(1).unwrap();
    for gpu in [0, 2, 3] {
        kernel_has(&sim, gpu, true);
    }
    let mut eye = Eye::open(&sim, QUICK);
    assert_eq!(eye.ready().await.units.len(), 3);
    controller.raise_xid(3, 95).unwrap();
    eye.until_sick(1).await;

    controller.add_gpu(1).unwrap();
    kernel_has(&sim, 1, true);
    let after = eye.until("four units", |now| now.units.len() == 4).await;
    // NVML was loaded again, which resets nothing.
    assert_eq!(unhealthy(&after)[sim.uuid(3)], "Xid 95: Uncontained memory error");

    let loads = || controller.calls().of("nvmlInit_v2");
    let before = loads();
    controller.remove_gpu(0).unwrap();
    kernel_has(&sim, 0, false);
    while loads() == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    eye.a_while(&sim).await;
    let unhealthy = eye.until_sick(2).await;
    assert_eq!(unhealthy[sim.uuid(0)].split(": ").next(), Some("GPU lost"), "{unhealthy:?}");
    // NVML now numbers the others from 0; an Xid still marks the right GPU.
    controller.raise_xid(2, 46).unwrap();
    let unhealthy = eye.until_sick(3).await;
    assert_eq!(unhealthy[sim.uuid(2)], "Xid 46: GPU stopped processing");
}

#[tokio::test]
async fn removed_gpu_renumbers_others_like_nvml() {
    let sim = Sim::of("l4-4x-pcie");
    for gpu in 0..4 {
        kernel_has(&sim, gpu, true);
    }
    let seen = |hardware: &Hardware| -> Vec<(u8, Option<u8>)> {
        let units = hardware.units.iter();
        units.map(|unit| (unit.gpu, unit.nvml_index)).collect()
    };
    let mut eye = Eye::open(&sim, QUICK);
    let before = seen(&*eye.ready().await);
    assert_eq!(before, [0, 1, 2, 3].map(|gpu| (gpu, Some(gpu))));

    // Lost: the loaded NVML still counts it. An NVML loaded now, such as a container runtime's, may or may not.
    sim.installed.controller.remove_gpu(1).unwrap();
    let lost = eye.until("a GPU lost", |now| unhealthy(now).len() == 1).await;
    assert_eq!(seen(&lost), [(0, Some(0)), (1, None), (2, None), (3, None)]);

    kernel_has(&sim, 1, false);
    let counted_anew = |now: &Hardware| seen(now)[2].1.is_some();
    let after = eye.until("NVML loaded anew", counted_anew).await;
    assert_eq!(seen(&after), [(0, Some(0)), (1, None), (2, Some(1)), (3, Some(2))]);
    let fresh = scan(&sim.options()).unwrap().machine;
    for unit in after.units.iter().filter(|unit| unit.health.healthy) {
        let gpu = &fresh.gpus()[usize::from(unit.nvml_index.unwrap())];
        assert_eq!(gpu.uuid.as_ref().unwrap().as_str(), unit.id.as_str());
    }

    sim.installed.controller.add_gpu(1).unwrap();
    kernel_has(&sim, 1, true);
    eye.until("all as before", |now| unhealthy(now).is_empty() && seen(now) == before).await;
}

#[tokio::test]
async fn gpu_removed_without_driver_is_gone_lost_one_stays() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    sim.installed.controller.lose_gpu(2).unwrap();
    eye.until_sick(1).await;
    sim.installed.controller.unload_driver().unwrap();
    eye.until_sick(4).await;
    sim.installed.controller.load_driver().unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy[sim.uuid(2)].split(": ").next(), Some("GPU lost"), "{unhealthy:?}");
    assert_eq!(eye.snapshots.borrow().units.len(), 4);
}

#[tokio::test]
async fn xid_before_nvml_reload_is_handled() {
    let sim = Sim::of("l4-4x-pcie");
    let controller = &sim.installed.controller;
    controller.remove_gpu(1).unwrap();
    for gpu in [0, 2, 3] {
        kernel_has(&sim, gpu, true);
    }
    let wait = Duration::from_millis(500);
    let timing = Timing { wait, ..LOOKS_ALONE };
    let mut eye = Eye::open(&sim, timing);
    eye.nvml_thread.diagnoses().adopt(Vec::new(), Cordons::default(), Vec::new());
    eye.diagnosis("no faults", |now| now.adopted).await;
    eye.ready().await;
    // NVML_ERROR_TIMEOUT at once: the plugin sleeps for the rest of the wait, and then checks.
    controller.fail_call("nvmlEventSetWait_v2", 10, None).unwrap();
    let waits = || controller.calls().of("nvmlEventSetWait_v2");
    let before = waits();
    while waits() < before + 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    controller.raise_xid(3, 95).unwrap();
    controller.add_gpu(1).unwrap();
    kernel_has(&sim, 1, true);
    let after = eye.until("four units", |now| now.units.len() == 4).await;
    assert_eq!(
        unhealthy(&after).get(sim.uuid(3)).map(String::as_str),
        Some("Xid 95: Uncontained memory error")
    );
}
