//! What the driver reports of itself: counts, codes, the NVLink fabric, compute modes. Cases of public bug reports.

use std::collections::BTreeSet;

use gantry_config::Config;
use gantry_nvml_sim::control::{ComputeMode, FabricState, FabricStep};
use gantry_plugin::health::{Cause, HealthChecks};
use gantry_plugin::inventory::{Hardware, State};
use gantry_plugin::offer;

use super::{Eye, LOOKS_ALONE, QUICK, shared_by_four, unhealthy};
use crate::sim::Sim;

fn fabric(step: FabricStep) -> Option<FabricState> {
    Some(FabricState { state: step, status: 0, health_mask: None, summary: None })
}

/// HGX after a boot: the fabric manager is not started, works, fails, and CUDA answers 802 meanwhile.
#[tokio::test]
async fn gpus_are_unhealthy_until_the_fabric_serves_them() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    for gpu in 0..8 {
        controller.set_fabric(gpu, fabric(FabricStep::NotStarted)).unwrap();
    }
    let mut eye = Eye::open(&sim, QUICK);
    let waiting = eye.until_sick(8).await;
    insta::assert_snapshot!(waiting[sim.uuid(5)], @"NVLink fabric: the fabric manager has not registered the GPU, and CUDA fails with error 802; start nvidia-fabricmanager in the driver's version");
    for gpu in 0..8 {
        let step = if gpu == 3 { FabricStep::InProgress } else { FabricStep::Completed };
        controller.set_fabric(gpu, fabric(step)).unwrap();
    }
    let waiting = eye.until_sick(1).await;
    insta::assert_snapshot!(waiting[sim.uuid(3)], @"NVLink fabric: the registration of the GPU is in progress, and CUDA fails with error 802 until it ends; if this lasts, see the log of nvidia-fabricmanager");
    let failed = FabricState { status: 999, ..fabric(FabricStep::Completed).unwrap() };
    controller.set_fabric(3, Some(failed)).unwrap();
    let failed =
        |now: &Hardware| unhealthy(now).get(sim.uuid(3)).filter(|now| **now != waiting[sim.uuid(3)]).cloned();
    let now = eye.until("its failure", |now| failed(now).is_some()).await;
    insta::assert_snapshot!(failed(&now).unwrap(), @"NVLink fabric: the registration of the GPU failed (the driver reports an internal error (NVML error 999)), and CUDA fails with error 802; see the log of nvidia-fabricmanager and restart it");
    controller.set_fabric(3, None).unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn shared_fabric_in_progress_is_healthy() {
    let sim = Sim::of("hgx-h100");
    sim.installed.controller.set_fabric(2, fabric(FabricStep::InProgress)).unwrap();
    let mut eye = Eye::open_in_fabric_mode(&sim, QUICK, HealthChecks::default(), Some(1));
    eye.healthy().await;
    eye.a_while(&sim).await;
    assert!(unhealthy(&eye.snapshots.borrow()).is_empty());
}

/// One GPU answers an internal error or an interrupt problem; the others are served.
#[tokio::test]
async fn failing_gpu_has_words_and_is_not_called_lost() {
    let mut reasons = Vec::new();
    for code in [999, 11, 27, 14] {
        let sim = Sim::of("hgx-h100");
        let controller = &sim.installed.controller;
        controller.fail_call_on(5, "nvmlDeviceGetHandleByIndex_v2", code).unwrap();
        let mut eye = Eye::open(&sim, QUICK);
        let hardware = eye.ready().await;
        assert_eq!(hardware.units.len(), 7, "{code}");
        let diagnosis = eye.diagnosis("a trouble", |now| !now.troubles.is_empty()).await;
        assert_eq!(diagnosis.troubles[0].cause, Cause::QueryFailed);
        reasons.push(diagnosis.troubles[0].reason.to_string());
        controller.clear_rule("nvmlDeviceGetHandleByIndex_v2").unwrap();
        eye.until("all eight", |now| now.units.len() == 8).await;
    }
    insta::assert_snapshot!(reasons.join("\n"), @r"
    GPU cannot be queried: nvmlDeviceGetHandleByIndex_v2 on GPU 5 failed: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node
    GPU cannot be queried: nvmlDeviceGetHandleByIndex_v2 on GPU 5 failed: the kernel has a problem with the GPU's interrupts (NVML error 11); see dmesg for NVRM and interrupts, check MSI and the IOMMU in the BIOS and kernel settings, then reboot the node
    GPU cannot be queried: nvmlDeviceGetHandleByIndex_v2 on GPU 5 failed: the GPU is not ready; wait until the driver and its daemons (nvidia-persistenced, nvidia-fabricmanager) have started; see systemctl status and dmesg
    GPU cannot be queried: nvmlDeviceGetHandleByIndex_v2 on GPU 5 failed: the configuration stored on the board is corrupted; drain the GPU and run nvidia-smi --gpu-reset; if it stays, replace the board
    ");
}

/// The count is a number of the driver: no loop may trust it.
#[tokio::test]
async fn absurd_count_is_refused_before_any_gpu_query() {
    let sim = Sim::of("l4-4x-pcie");
    let controller = &sim.installed.controller;
    let mut reasons = Vec::new();
    for count in [u32::MAX, 33, 1 << 20] {
        controller.set_count(Some(count)).unwrap();
        let before = controller.calls();
        let mut eye = Eye::open(&sim, QUICK);
        let absent = eye.until("a refusal", |now| matches!(now.state, State::Absent(_))).await;
        let State::Absent(reason) = &absent.state else { unreachable!() };
        reasons.push(reason.to_string());
        assert_eq!(controller.calls().since(&before).of("nvmlDeviceGetHandleByIndex_v2"), 0, "{count}");
        controller.set_count(None).unwrap();
        eye.healthy().await;
    }
    insta::assert_snapshot!(reasons.join("\n"), @r#"
    nvmlDeviceGetCount_v2 returned "4294967295", expected at most 32 GPUs
    nvmlDeviceGetCount_v2 returned "33", expected at most 32 GPUs
    nvmlDeviceGetCount_v2 returned "1048576", expected at most 32 GPUs
    "#);
}

/// A GPU with all its NVLinks down raises no Xid; sets are chosen by links.
#[tokio::test]
async fn links_down_without_an_xid_are_seen_at_the_next_look() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    let links = |hardware: &gantry_plugin::inventory::Hardware| {
        hardware.machine.gpus()[2].nvlink.map_or(0, |ports| ports.switch_links)
    };
    assert_eq!(links(&*eye.ready().await), 18);
    for link in 0..18 {
        controller.set_nvlink(2, link, false).unwrap();
    }
    let hardware = eye.until("the machine without these links", |now| links(now) == 0).await;
    assert!(unhealthy(&hardware).is_empty(), "the GPU computes");
    let down = eye.diagnosis("a notice", |now| !now.notices.is_empty()).await;
    assert_eq!(down.notices[0].cause, Cause::LinksDown);
    insta::assert_snapshot!(down.notices[0].reason, @"18 of 18 NVLinks down; see nvidia-smi nvlink -s, dmesg and the log of nvidia-fabricmanager, then reset the GPUs");
    // A plugin that starts now has never seen the links up, and compares the GPU with its equals.
    let later = Eye::open(&sim, LOOKS_ALONE);
    later.diagnosis("the same notice", |now| now.notices == down.notices).await;
    let scan = gantry_plugin::discover::scan(&sim.options()).unwrap();
    assert_eq!(scan.complaints, [(2, "18 of 18 NVLinks down".to_owned())]);
    for link in 0..18 {
        controller.set_nvlink(2, link, true).unwrap();
    }
    eye.diagnosis("the end", |now| now.notices.is_empty()).await;
}

/// No plugin saw the links up: of a GPU with direct links (DGX-1), and of all GPUs of a board with switches.
#[tokio::test]
async fn links_down_before_the_start_are_noticed() {
    for (machine, gpus, links) in [("dgx1-v100", 3..4, 6), ("hgx-h100", 0..8, 18)] {
        let sim = Sim::of(machine);
        for gpu in gpus.clone() {
            for link in 0..links {
                sim.installed.controller.set_nvlink(gpu, link, false).unwrap();
            }
        }
        let eye = Eye::open(&sim, LOOKS_ALONE);
        let down = eye.diagnosis("notices", |now| !now.notices.is_empty()).await;
        assert_eq!(down.notices.len(), gpus.len(), "{machine}: {:?}", down.notices);
        let lack = format!("{links} of {links} NVLinks down");
        assert!(down.notices.iter().all(|notice| notice.reason.starts_with(&lack)), "{:?}", down.notices);
        let scan = gantry_plugin::discover::scan(&sim.options()).unwrap();
        let complaints: Vec<(u8, String)> = gpus.map(|gpu| (gpu, lack.clone())).collect();
        assert_eq!(scan.complaints, complaints, "{machine}");
        assert!(scan.unhealthy.is_empty(), "the GPUs compute");
    }
}

/// NVIDIA's MPS leaves GPUs in exclusive mode; shared by time, the second pod fails.
#[tokio::test]
async fn replicas_of_an_exclusive_gpu_are_unhealthy() {
    let sim = Sim::of("l4-4x-pcie");
    let controller = &sim.installed.controller;
    controller.set_compute_mode(1, ComputeMode::ExclusiveProcess).unwrap();
    let shared = shared_by_four();
    let mut eye = Eye::open(&sim, QUICK);
    let hardware = eye.ready().await;
    let inventory = offer::offer(&hardware, &shared);
    let reasons = inventory.devices.iter().filter_map(|device| device.health.reason.clone());
    let reasons: Vec<String> = reasons.collect();
    assert_eq!(reasons.len(), 4, "{reasons:?}");
    insta::assert_snapshot!(reasons[0], @"compute mode EXCLUSIVE_PROCESS: a second container could not use CUDA on the shared GPU; run nvidia-smi -c DEFAULT");
    let whole = offer::offer(&hardware, &Config::default());
    assert!(whole.devices.iter().all(|device| device.health.healthy), "one container may have it");
    controller.set_compute_mode(1, ComputeMode::Default).unwrap();
    eye.until("the default mode", |now| now.units.iter().all(|unit| !unit.exclusive)).await;
    controller.set_compute_mode(2, ComputeMode::Prohibited).unwrap();
    let prohibited = eye.until_sick(1).await;
    insta::assert_snapshot!(prohibited[sim.uuid(2)], @"compute mode PROHIBITED: no process may use CUDA on the GPU; run nvidia-smi -c DEFAULT");
}

/// The driver is being installed while the plugin starts.
#[tokio::test]
async fn half_copied_library_is_waited_for() {
    let sim = Sim::of("workstation-2x");
    let whole = std::fs::read(&sim.installed.library).unwrap();
    let copied = sim.installed.library.with_file_name("copied.so");
    let mut hollow = whole.clone();
    let half = hollow.len() / 2;
    hollow[half..].fill(0);
    std::fs::write(&copied, &whole[..3000]).unwrap();
    let mut eye = Eye::open_library(&sim, QUICK, copied.clone());
    let mut reasons = BTreeSet::new();
    for content in [&whole[..half], &whole[..whole.len() - 1], &hollow[..]] {
        let absent = eye.until("a refusal", |now| matches!(now.state, State::Absent(_))).await;
        let State::Absent(reason) = &absent.state else { unreachable!() };
        // Without the folder and the sizes.
        let reason = reason.to_string().replace(copied.parent().unwrap().to_str().unwrap(), "");
        reasons.insert(reason.replace(|ch: char| ch.is_ascii_digit(), ""));
        std::fs::write(&copied, content).unwrap();
    }
    insta::assert_snapshot!(reasons.into_iter().collect::<Vec<_>>().join("\n"), @"NVML library /copied.so cannot be loaded (the file is incomplete: it has  bytes of at least ; it may be being installed, and is tried again); install NVIDIA's driver on this node, or set its path with --nvml-library");
    std::fs::write(copied.with_extension("new"), &whole).unwrap();
    std::fs::rename(copied.with_extension("new"), &copied).unwrap();
    assert_eq!(eye.healthy().await.units.len(), 2);
}
