//! NVLink Xids: faults if links went down, or if the driver reports no recovery action.

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_api::Cordons;
use gantry_plugin::health::Proof;

use super::{EVENTS_ALONE, Eye, QUICK, unhealthy};
use crate::sim::Sim;

/// NVML_ERROR_NOT_SUPPORTED, as drivers before 560 return for the recovery action.
const NOT_SUPPORTED: u32 = 3;

/// A machine whose driver reports no recovery action.
async fn before_wishes(machine: &str) -> (Sim, Eye) {
    let sim = Sim::of(machine);
    sim.installed.controller.fail_call("nvmlDeviceGetFieldValues", NOT_SUPPORTED, None).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    (sim, eye)
}

#[tokio::test]
async fn link_xid_counts_without_recovery_action() {
    let (sim, mut eye) = before_wishes("hgx-h100").await;
    let controller = &sim.installed.controller;
    for (gpu, xid) in [(0, 74), (1, 145), (2, 149)] {
        controller.raise_xid(gpu, xid).unwrap();
    }
    let unhealthy = eye.until_sick(3).await;
    assert_eq!(unhealthy[sim.uuid(0)], "Xid 74: NVLINK Error");
    let now = eye.diagnosis("troubles", |now| now.troubles.len() == 3).await;
    assert!(now.troubles.iter().all(|one| one.cause.to_string() == "xid-link"));
    // Links that never went down prove nothing.
    eye.a_while(&sim).await;
    assert_eq!(self::unhealthy(&eye.snapshots.borrow()).len(), 3);

    controller.set_nvlink(0, 4, false).unwrap();
    eye.until("a link down", |now| {
        self::unhealthy(now).get(sim.uuid(0)).map(String::as_str)
            == Some("Xid 74: NVLINK Error; 1 of 18 NVLinks down")
    })
    .await;
    controller.set_nvlink(0, 4, true).unwrap();
    eye.until_sick(2).await;
    assert_eq!(eye.proofs().await, [Proof::LinksUp]);
}

#[tokio::test]
async fn link_xid_counts_if_links_went_down() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    // All links are up, and the driver would report a recovery action.
    controller.raise_xid(1, 145).unwrap();
    for link in [3, 4] {
        controller.set_nvlink(0, link, false).unwrap();
    }
    eye.a_while(&sim).await;
    assert_eq!(unhealthy(&eye.snapshots.borrow()), BTreeMap::new(), "no Xid yet");
    controller.raise_xid(0, 149).unwrap();
    let unhealthy = eye.until_sick(1).await;
    let reason = "Xid 149: NVLINK: NETIR Error; 2 of 18 NVLinks down";
    assert_eq!(unhealthy[sim.uuid(0)], reason);
    let stored = eye.stored().await;
    eye.nvml_thread.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.nvml_thread.diagnoses().adopt(stored, Cordons::default(), Vec::new());
    assert_eq!(eye.until_sick(1).await[sim.uuid(0)], reason);
    for link in [3, 4] {
        controller.set_nvlink(0, link, true).unwrap();
    }
    eye.healthy().await;
    assert_eq!(eye.proofs().await, [Proof::LinksUp]);
}

#[tokio::test]
async fn many_link_xids_cost_one_reading_and_delay_no_other() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    controller.slow_call("nvmlDeviceGetSerial", Duration::from_millis(20)).unwrap();
    let before = controller.calls();
    for _ in 0..100 {
        controller.raise_xid(0, 149).unwrap();
    }
    controller.raise_xid(3, 79).unwrap();
    let unhealthy = eye.until_sick(1).await;
    assert_eq!(unhealthy.keys().collect::<Vec<_>>(), [sim.uuid(3)]);
    let asked = controller.calls().since(&before).of("nvmlDeviceGetSerial");
    let readings = asked / sim.installed.facts.gpus.len() as u64;
    assert!(readings < 20, "{readings}");
}

#[tokio::test]
async fn links_of_lost_peer_recover_with_it() {
    let (sim, mut eye) = before_wishes("dgx1-v100").await;
    let controller = &sim.installed.controller;
    controller.lose_gpu(1).unwrap();
    controller.raise_xid(0, 74).unwrap();
    let unhealthy = eye.until_sick(2).await;
    // Whether the links were read already.
    let reason = unhealthy[sim.uuid(0)].split("; ").next();
    assert_eq!(reason, Some("Xid 74: NVLINK Error"), "{unhealthy:?}");
    eye.a_while(&sim).await;
    controller.restore_gpu(1).unwrap();
    eye.healthy().await;
    assert!(eye.proofs().await.contains(&Proof::LinksUp));
}

#[tokio::test]
async fn failed_link_call_is_not_a_link_change() {
    let calls = [
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
        // The GPU at the far end is identified by name.
        "nvmlDeviceGetUUID",
    ];
    for machine in ["hgx-h100", "dgx1-v100"] {
        let sim = Sim::of(machine);
        let controller = &sim.installed.controller;
        let mut eye = Eye::open(&sim, QUICK);
        let before = eye.ready().await;
        for gpu in 0..8 {
            controller.raise_xid(gpu, 155).unwrap();
        }
        let raised = eye.until_sick(8).await;
        for call in calls {
            controller.fail_call(call, 999, Some(1)).unwrap();
            eye.a_while(&sim).await;
            let reasons = unhealthy(&eye.snapshots.borrow());
            assert_eq!(reasons, raised, "{machine}, {call}");
        }
        assert_eq!(eye.snapshots.borrow().machine, before.machine, "{machine}");
    }
}
