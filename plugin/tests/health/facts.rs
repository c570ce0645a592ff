//! Known facts of a GPU: a failed call keeps the last value.

use super::{Eye, QUICK};
use crate::sim::Sim;

#[tokio::test]
async fn known_facts_survive_failing_calls() {
    let sim = Sim::of("hgx-h100");
    let mut eye = Eye::open(&sim, QUICK);
    let before = eye.ready().await;
    let questions = [
        "nvmlDeviceGetName",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryAffinity",
    ];
    for question in questions {
        sim.installed.controller.fail_call(question, 999, None).unwrap();
    }
    eye.a_while(&sim).await;
    let now = eye.snapshots.borrow();
    assert_eq!(now.machine.gpus()[1], before.machine.gpus()[1]);
    assert_eq!(now.units, before.units);
}

#[tokio::test]
async fn profile_keeps_suffix_while_calls_fail() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["1g.5gb+me@6", "3g.20gb@0"]).unwrap();
    for question in
        ["nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo", "nvmlDeviceGetGpuInstanceProfileInfo"]
    {
        let mut eye = Eye::open(&sim, QUICK);
        let before = eye.ready().await;
        assert_eq!(before.units.len(), 2);
        controller.fail_call(question, 999, None).unwrap();
        eye.a_while(&sim).await;
        assert_eq!(eye.snapshots.borrow().units, before.units, "{question}");
        controller.clear_rule(question).unwrap();
    }
}

#[tokio::test]
async fn gpu_with_unknown_mig_mode_is_not_offered() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlDeviceGetMigMode", 999, None).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    assert_eq!(eye.ready().await.units, []);
    eye.a_while(&sim).await;
    assert_eq!(eye.snapshots.borrow().units, []);
    controller.clear_rule("nvmlDeviceGetMigMode").unwrap();
    eye.until("its slices", |now| now.units.len() == 7).await;
}
