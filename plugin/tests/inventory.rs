//! Inventory and health against the simulated library: snapshots after events of GPUs and driver.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gantry_config::Config;
use gantry_plugin::health::HealthChecks;
use gantry_plugin::inventory::{Diagnosis, Hardware, NvmlThread, Settings, State, Timing};
use sim::Sim;
use tokio::sync::watch;

/// Far above all waits, so only a failing test takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Short intervals, so that tests are short; no test measures them.
const QUICK: Timing = Timing {
    wait: Duration::from_millis(20),
    check: Duration::from_millis(20),
    read: Duration::from_millis(100),
    retry_from: Duration::from_millis(10),
    retry_to: Duration::from_millis(50),
};

/// Only events are detected.
const EVENTS_ALONE: Timing = Timing {
    wait: Duration::from_millis(20),
    check: Duration::from_secs(3600),
    read: Duration::from_secs(3600),
    ..QUICK
};

struct Node {
    nvml_thread: NvmlThread,
    snapshots: watch::Receiver<Arc<Hardware>>,
}

impl Node {
    fn start(sim: &Sim, timing: Timing) -> Self {
        Self::start_with(sim.options().library, sim, timing, HealthChecks::default())
    }

    fn start_with(library: PathBuf, sim: &Sim, timing: Timing, checks: HealthChecks) -> Self {
        let (_, config) = watch::channel(Arc::default());
        Self::start_by(config, library, sim, timing, checks)
    }

    fn start_by(
        config: watch::Receiver<Arc<Config>>,
        library: PathBuf,
        sim: &Sim,
        timing: Timing,
        checks: HealthChecks,
    ) -> Self {
        let settings = Settings {
            nvml_library: library,
            config,
            proc_root: sim.installed.layout.proc.clone(),
            sys_root: sim.installed.layout.sys.clone(),
            dev_root: sim.installed.layout.dev.clone(),
            fabric_mode: None,
        };
        let (publish, snapshots) = Hardware::channel();
        let nvml_thread = NvmlThread::start(&settings, checks, timing, publish).unwrap();
        Self { nvml_thread, snapshots }
    }

    /// The first snapshot for which `holds`.
    async fn until(&mut self, what: &str, holds: impl FnMut(&Arc<Hardware>) -> bool) -> Arc<Hardware> {
        let seen = self.snapshots.clone();
        let waited = tokio::time::timeout(PATIENCE, self.snapshots.wait_for(holds)).await;
        let Ok(snapshot) = waited else {
            panic!("never came: {what}; last seen: {:#?}", unhealthy(&seen.borrow()));
        };
        Arc::clone(&snapshot.unwrap())
    }

    async fn ready(&mut self) -> Arc<Hardware> {
        self.until("ready", |now| now.state == State::Ready).await
    }

    async fn until_sick(&mut self, gpu: u8) -> Arc<Hardware> {
        self.until("a unhealthy GPU", |now| unhealthy(now).contains_key(&gpu)).await
    }

    async fn all_healthy(&mut self) -> Arc<Hardware> {
        self.until("all healthy", |now| now.state == State::Ready && unhealthy(now).is_empty()).await
    }
}

/// One GPU is slow without a known cause, another one is hot, and one draws little power.
#[tokio::test(flavor = "multi_thread")]
async fn clocks_are_published_with_their_limits() {
    let sim = Sim::of("hgx-h100");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.update_gpu(3, |state| state.sm_clock = Some(990)).unwrap();
    sim.installed.controller.set_temperature(5, 90).unwrap();
    sim.installed.controller.update_gpu(6, |state| state.utilization = Some(50)).unwrap();
    let hot = (5, 100, vec!["hw-thermal".to_owned(), "hw-slowdown".to_owned()]);
    let mut expected: Vec<(usize, u8, Vec<String>)> = [0, 1, 2, 4, 6, 7].map(|gpu| (gpu, 100, vec![])).into();
    expected.extend([(3, 50, vec![]), hot]);
    expected.sort();
    let is_expected = |now: &Arc<Diagnosis>| {
        let index = |gpu: &str| (0..8).find(|index| sim.uuid(*index) == gpu).unwrap();
        let clocks =
            now.clocks.iter().map(|clock| (index(&clock.gpu), clock.sm_percent, clock.limits.clone()));
        let mut clocks: Vec<_> = clocks.collect();
        clocks.sort();
        // The simulated GPU draws a tenth of its limit at rest, and the whole of it at full load.
        let powers = now.clocks.iter().map(|clock| (index(&clock.gpu), clock.power_percent));
        let powers: BTreeMap<usize, Option<u8>> = powers.collect();
        clocks == expected && powers.get(&6) == Some(&Some(60)) && powers.get(&0) == Some(&Some(10))
    };
    let mut diagnoses = node.nvml_thread.diagnoses().diagnosis();
    tokio::time::timeout(PATIENCE, diagnoses.wait_for(is_expected)).await.unwrap().unwrap();
}

fn checks(disabled: &str, enabled: &str) -> HealthChecks {
    HealthChecks {
        disabled: disabled.parse().unwrap(),
        enabled: enabled.parse().unwrap(),
        ..HealthChecks::default()
    }
}

/// Interval of reads of the simulator's counters, which cannot be awaited.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// The GPUs that are unhealthy, with their reasons.
fn unhealthy(hardware: &Hardware) -> BTreeMap<u8, String> {
    let units = hardware.units.iter().filter(|unit| !unit.health.healthy);
    units.map(|unit| (unit.gpu, unit.health.reason.clone().unwrap_or_default())).collect()
}

fn only(gpu: u8, reason: &str) -> BTreeMap<u8, String> {
    BTreeMap::from([(gpu, reason.to_owned())])
}

#[tokio::test]
async fn gpus_are_units_with_facts_for_kubelet() {
    let sim = Sim::of("dgx1-v100");
    let mut node = Node::start(&sim, QUICK);
    let now = node.ready().await;
    assert_eq!(now.units.len(), 8);
    for (position, (unit, gpu)) in now.units.iter().zip(&sim.installed.facts.gpus).enumerate() {
        assert_eq!(usize::from(unit.gpu), position);
        assert_eq!(unit.id.as_str(), gpu.uuid);
        assert_eq!(unit.slice, None);
        assert_eq!(unit.minor, Some(gpu.minor));
        assert_eq!(unit.numa, gpu.numa);
        assert!(unit.health.healthy && unit.health.reason.is_none());
    }
}

#[tokio::test]
async fn corrected_driver_root_is_used_for_nvml() {
    let sim = Sim::of("workstation-2x");
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("usr/lib64");
    std::fs::create_dir_all(&folder).unwrap();
    // A name that the dynamic loader does not find elsewhere.
    let name = "libgantry-test-ml.so.1";
    std::os::unix::fs::symlink(sim.options().library, folder.join(name)).unwrap();
    let wrong = Config { container_driver_root: root.path().join("wrong"), ..Config::default() };
    let (configure, config) = watch::channel(Arc::new(wrong));
    let mut node = Node::start_by(config, name.into(), &sim, QUICK, HealthChecks::default());
    node.until("no library", |now| matches!(now.state, State::Absent(_))).await;
    let right = Config { container_driver_root: root.path().to_owned(), ..Config::default() };
    configure.send_replace(Arc::new(right));
    assert_eq!(node.ready().await.units.len(), 2);
}

#[tokio::test]
async fn xid_marks_exactly_its_gpu_with_reason() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    let before = node.ready().await;
    sim.installed.controller.raise_xid(5, 79).unwrap();
    let after = node.until_sick(5).await;
    assert_eq!(unhealthy(&after), only(5, "Xid 79: GPU has fallen off the bus"));
    assert!(Arc::ptr_eq(&before.machine, &after.machine), "the hardware is the same");
}

#[tokio::test]
async fn application_xid_is_only_counted() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    for xid in [13, 31, 31, 43, 45, 94] {
        sim.installed.controller.raise_xid(1, xid).unwrap();
    }
    // Events arrive in order: with this one, the others have arrived.
    sim.installed.controller.raise_xid(2, 48).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(unhealthy(&after), only(2, "Xid 48: Double Bit ECC Error"));
    let counts: Vec<(u64, u64)> = node
        .nvml_thread
        .xids()
        .all()
        .into_iter()
        .filter(|(gpu, _, _)| gpu.as_str() == sim.uuid(1))
        .map(|(_, xid, count)| (xid, count))
        .collect();
    assert_eq!(counts, [(13, 1), (31, 2), (43, 1), (45, 1), (94, 1)]);
}

#[tokio::test]
async fn worst_xid_gives_reason() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 46).unwrap();
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.raise_xid(0, 95).unwrap();
    let worst = only(0, "Xid 79: GPU has fallen off the bus");
    node.until("the worst reason", |now| unhealthy(now) == worst).await;
}

#[tokio::test]
async fn disabled_xids_are_ignored() {
    let sim = Sim::of("l4-4x-pcie");
    let checks = checks("79,46", "");
    let mut node = Node::start_with(sim.options().library, &sim, EVENTS_ALONE, checks);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.raise_xid(1, 46).unwrap();
    sim.installed.controller.raise_xid(2, 95).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(unhealthy(&after), only(2, "Xid 95: Uncontained memory error"));
}

#[tokio::test]
async fn no_health_checks_registers_nothing_lost_gpu_counts() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start_with(sim.options().library, &sim, QUICK, checks("all", ""));
    node.ready().await;
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.lose_gpu(1).unwrap();
    let after = node.until_sick(1).await;
    assert_eq!(unhealthy(&after).len(), 1);
    let calls = sim.installed.controller.calls();
    assert_eq!(calls.of("nvmlEventSetCreate") + calls.of("nvmlEventSetWait_v2"), 0);
}

#[tokio::test]
async fn fault_lasts_while_gpu_responds() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 119).unwrap();
    node.until_sick(0).await;
    // After several full readings, as the loss and return of another GPU shows.
    sim.installed.controller.lose_gpu(1).unwrap();
    node.until_sick(1).await;
    sim.installed.controller.restore_gpu(1).unwrap();
    let after = node.until("GPU 1 back", |now| !unhealthy(now).contains_key(&1)).await;
    assert_eq!(unhealthy(&after), only(0, "Xid 119: GSP RPC Timeout"));
}

#[tokio::test]
async fn lost_gpu_is_unhealthy_until_it_responds() {
    let sim = Sim::of("dgx1-v100");
    let mut node = Node::start(&sim, QUICK);
    let before = node.ready().await;
    sim.installed.controller.lose_gpu(2).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(after.units.len(), 8);
    assert_eq!(unhealthy(&after).keys().collect::<Vec<_>>(), [&2]);
    // Other GPUs are registered nevertheless.
    sim.installed.controller.raise_xid(4, 95).unwrap();
    let after = node.until_sick(4).await;
    assert_eq!(after.machine.gpus(), before.machine.gpus(), "who it was stays known");
    assert_eq!(unhealthy(&after)[&4], "Xid 95: Uncontained memory error");

    sim.installed.controller.restore_gpu(2).unwrap();
    let after = node.until("GPU 2 back", |now| !unhealthy(now).contains_key(&2)).await;
    assert_eq!(after.machine.nvlinks(), before.machine.nvlinks());
    assert_eq!(unhealthy(&after).keys().collect::<Vec<_>>(), [&4]);
}

#[tokio::test]
async fn lost_gpu_gives_reason() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.lose_gpu(3).unwrap();
    let reason = unhealthy(node.until_sick(3).await.as_ref())[&3].clone();
    // Without the call that failed first.
    let (call, cause) = reason.split_once(" failed: ").unwrap();
    assert_eq!(call.split(": ").next(), Some("GPU lost"));
    insta::assert_snapshot!(cause, @"the GPU has fallen off the bus; look for an Xid in dmesg, then reboot the node or check the board's power and seating");
}

#[tokio::test]
async fn missing_driver_marks_all_gpus_until_it_returns() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, QUICK);
    let before = node.ready().await;
    // A driver reload resets the GPUs, which clears the fault.
    sim.installed.controller.raise_xid(0, 46).unwrap();
    node.until_sick(0).await;

    sim.installed.controller.unload_driver().unwrap();
    let gone = node.until("all unhealthy", |now| unhealthy(now).len() == 8).await;
    assert_eq!(gone.state, State::Ready, "devices do not vanish with the driver");
    for reason in unhealthy(&gone).values() {
        assert_eq!(reason.split(": ").next(), Some("driver gone"), "{reason}");
    }
    assert!(Arc::ptr_eq(&gone.machine, &before.machine));

    sim.installed.controller.load_driver().unwrap();
    let back = node.all_healthy().await;
    assert!(Arc::ptr_eq(&back.machine, &before.machine));
    sim.installed.controller.raise_xid(7, 79).unwrap();
    assert_eq!(unhealthy(node.until_sick(7).await.as_ref()).len(), 1, "and events are heard again");
}

#[tokio::test]
async fn driver_reload_between_checks_is_detected() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.unload_driver().unwrap();
    sim.installed.controller.load_driver().unwrap();
    sim.installed.controller.raise_xid(1, 46).unwrap();
    // The old registration fails and is repeated, or the event arrives; in both cases the GPUs stay monitored.
    let loads = sim.installed.controller.calls().of("nvmlInit_v2");
    loop {
        sim.installed.controller.raise_xid(2, 79).unwrap();
        let seen = node.snapshots.wait_for(|now| unhealthy(now).contains_key(&2));
        if tokio::time::timeout(Duration::from_millis(50), seen).await.is_ok() {
            break;
        }
        assert!(sim.installed.controller.calls().of("nvmlInit_v2") - loads < 1000);
    }
}

#[tokio::test]
async fn late_driver_is_used() {
    let sim = Sim::of("workstation-2x");
    sim.installed.controller.unload_driver().unwrap();
    let mut node = Node::start(&sim, QUICK);
    let absent = node.until("a reason", |now| matches!(now.state, State::Absent(_))).await;
    let State::Absent(reason) = &absent.state else { unreachable!() };
    insta::assert_snapshot!(reason, @"nvmlInit_v2 failed: the NVIDIA driver is not loaded; load the kernel module (modprobe nvidia); if it does not stay loaded, see dmesg");
    assert!(absent.units.is_empty());
    sim.installed.controller.load_driver().unwrap();
    assert_eq!(node.all_healthy().await.units.len(), 2);
}

#[tokio::test]
async fn late_library_is_used() {
    let sim = Sim::of("workstation-2x");
    let folder = sim.installed.library.parent().unwrap();
    let late = folder.join("late.so.1");
    let mut node = Node::start_with(late.clone(), &sim, QUICK, HealthChecks::default());
    let absent = node.until("a reason", |now| matches!(now.state, State::Absent(_))).await;
    let State::Absent(reason) = &absent.state else { unreachable!() };
    insta::assert_snapshot!(reason.to_string().replace(folder.to_str().unwrap(), ""), @"NVML library /late.so.1 cannot be loaded (/late.so.1: cannot open shared object file: No such file or directory); install NVIDIA's driver on this node, or set its path with --nvml-library");
    // Linked into place as a whole, like a driver installer.
    std::fs::hard_link(&sim.installed.library, late).unwrap();
    assert_eq!(node.all_healthy().await.units.len(), 2);
}

#[tokio::test]
async fn inactive_nvlink_is_removed_at_next_reading() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, QUICK);
    assert_eq!(node.ready().await.machine.direct_nvlinks(0, 1), 4);
    for link in 0..4 {
        sim.installed.controller.set_nvlink(0, link, false).unwrap();
    }
    let after = node.until("no link", |now| now.machine.direct_nvlinks(0, 1) == 0).await;
    assert!(unhealthy(&after).is_empty(), "the GPUs go on without");
    for link in 0..4 {
        sim.installed.controller.set_nvlink(0, link, true).unwrap();
    }
    node.until("links again", |now| now.machine.direct_nvlinks(0, 1) == 4).await;
}

#[tokio::test]
async fn link_xid_triggers_reading() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.set_nvlink(0, 1, false).unwrap();
    sim.installed.controller.raise_xid(0, 74).unwrap();
    let after = node.until("a link less", |now| now.machine.direct_nvlinks(0, 1) == 3).await;
    // The GPU with the Xid lost a link; the other one continues with its remaining links.
    assert_eq!(unhealthy(&after).len(), 1);
}

#[tokio::test]
async fn occasional_call_failures_keep_gpus_healthy() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    let snapshots = node.snapshots.clone();
    for call in ["nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2", "nvmlDeviceGetMemoryInfo"] {
        let before = sim.installed.controller.calls();
        sim.installed.controller.fail_call(call, 999, Some(1)).unwrap();
        // The call failed and was repeated.
        while sim.installed.controller.calls().since(&before).of(call) < 2 {
            a_moment().await;
        }
        assert!(unhealthy(&snapshots.borrow()).is_empty(), "{call}");
    }
    sim.installed.controller.raise_xid(1, 79).unwrap();
    assert_eq!(unhealthy(node.until_sick(1).await.as_ref()).len(), 1, "and events are heard all the same");
}

#[tokio::test]
async fn failing_nvml_marks_all_gpus_until_it_works() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 95).unwrap();
    node.until_sick(0).await;
    sim.installed.controller.fail_call("nvmlDeviceGetCount_v2", 999, None).unwrap();
    let failing = node.until("all unhealthy", |now| unhealthy(now).len() == 4).await;
    insta::assert_snapshot!(unhealthy(&failing)[&1], @"NVML fails: nvmlDeviceGetCount_v2 failed: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node");
    // The GPUs are registered nevertheless, which shows once NVML works again. Nothing was reset.
    sim.installed.controller.raise_xid(2, 46).unwrap();
    sim.installed.controller.clear_rule("nvmlDeviceGetCount_v2").unwrap();
    let mut expected = only(0, "Xid 95: Uncontained memory error");
    expected.extend(only(2, "Xid 46: GPU stopped processing"));
    node.until("two unhealthy", |now| unhealthy(now) == expected).await;
}

#[tokio::test]
async fn idle_thread_only_waits_for_events() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    let calls = || sim.installed.controller.calls();
    let waits = |enough: u64| async move {
        let before = calls();
        while calls().since(&before).of("nvmlEventSetWait_v2") < enough {
            a_moment().await;
        }
        calls().since(&before).by_name()
    };
    // The first wait shows that the reading is finished.
    waits(1).await;
    let at_rest = waits(5).await;
    assert_eq!(at_rest.keys().collect::<Vec<_>>(), [&"nvmlEventSetWait_v2"]);
}

#[tokio::test]
async fn check_makes_few_calls() {
    let sim = Sim::of("dgx-a100");
    let looks = Timing { check: Duration::from_millis(20), ..EVENTS_ALONE };
    let mut node = Node::start(&sim, looks);
    node.ready().await;
    let calls = || sim.installed.controller.calls();
    let start = calls();
    while calls().since(&start).of("nvmlEventSetWait_v2") < 1 {
        a_moment().await;
    }
    let before = calls();
    while calls().since(&before).of("nvmlDeviceGetCount_v2") < 5 {
        a_moment().await;
    }
    let asked = calls().since(&before).by_name();
    assert_eq!(
        asked.keys().collect::<Vec<_>>(),
        [
            &"nvmlDeviceGetClockInfo",
            &"nvmlDeviceGetComputeMode",
            &"nvmlDeviceGetCount_v2",
            &"nvmlDeviceGetCurrentClocksThrottleReasons",
            &"nvmlDeviceGetEnforcedPowerLimit",
            &"nvmlDeviceGetFieldValues",
            &"nvmlDeviceGetGpuFabricInfoV",
            &"nvmlDeviceGetHandleByIndex_v2",
            &"nvmlDeviceGetMaxClockInfo",
            &"nvmlDeviceGetMemoryInfo",
            &"nvmlDeviceGetMigMode",
            &"nvmlDeviceGetNvLinkState",
            &"nvmlDeviceGetPowerUsage",
            &"nvmlDeviceGetRemappedRows",
            &"nvmlDeviceGetTotalEccErrors",
            &"nvmlEventSetWait_v2",
            &"nvmlSystemGetDriverVersion",
        ]
    );
    let looks = asked["nvmlDeviceGetCount_v2"];
    assert!(asked["nvmlDeviceGetMemoryInfo"] <= 8 * looks, "{asked:?}");
}

#[tokio::test]
async fn unchanged_hardware_is_not_published() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, QUICK);
    node.all_healthy().await;
    node.snapshots.borrow_and_update();
    let calls = || sim.installed.controller.calls();
    let before = calls();
    // Five more full readings.
    while calls().since(&before).of("nvmlDeviceGetUUID") < 10 {
        a_moment().await;
    }
    assert!(!node.snapshots.has_changed().unwrap());
}

#[tokio::test]
async fn stopping_shuts_nvml_down() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    node.nvml_thread.stop();
    let calls = sim.installed.controller.calls();
    assert_eq!(calls.of("nvmlShutdown"), calls.of("nvmlInit_v2"));
    assert!(node.snapshots.has_changed().is_err(), "nobody publishes any more");
}
