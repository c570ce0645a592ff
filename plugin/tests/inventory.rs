//! Inventory and health against the simulated library: what happens to GPUs and driver, and what the snapshots then say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gantry_config::Config;
use gantry_plugin::health::HealthChecks;
use gantry_plugin::inventory::{Hardware, NvmlThread, Settings, State, Timing};
use sim::Sim;
use tokio::sync::watch;

/// Far above anything that is waited for: only a failing test takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Quick to notice, so that tests are short; no test measures it.
const QUICK: Timing = Timing {
    wait: Duration::from_millis(20),
    check: Duration::from_millis(20),
    read: Duration::from_millis(100),
    retry_from: Duration::from_millis(10),
    retry_to: Duration::from_millis(50),
};

/// Nothing but events is noticed.
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
        };
        let (publish, snapshots) = Hardware::channel();
        let nvml_thread = NvmlThread::start(&settings, checks, timing, publish).unwrap();
        Self {
            nvml_thread,
            snapshots,
        }
    }

    /// The first snapshot for which `holds`.
    async fn until(&mut self, what: &str, holds: impl FnMut(&Arc<Hardware>) -> bool) -> Arc<Hardware> {
        let seen = self.snapshots.clone();
        let waited = tokio::time::timeout(PATIENCE, self.snapshots.wait_for(holds)).await;
        let Ok(snapshot) = waited else {
            panic!("never came: {what}; last seen: {:#?}", sick(&seen.borrow()));
        };
        Arc::clone(&snapshot.unwrap())
    }

    async fn ready(&mut self) -> Arc<Hardware> {
        self.until("ready", |now| now.state == State::Ready).await
    }

    async fn until_sick(&mut self, gpu: u8) -> Arc<Hardware> {
        self.until("a sick GPU", |now| sick(now).contains_key(&gpu)).await
    }

    async fn all_healthy(&mut self) -> Arc<Hardware> {
        self.until("all healthy", |now| {
            now.state == State::Ready && sick(now).is_empty()
        })
        .await
    }
}

fn checks(disabled: &str, enabled: &str) -> HealthChecks {
    HealthChecks {
        disabled: disabled.parse().unwrap(),
        enabled: enabled.parse().unwrap(),
    }
}

/// Between two looks at the simulator's counters, which cannot be awaited.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// The GPUs that are unhealthy, with their reasons.
fn sick(hardware: &Hardware) -> BTreeMap<u8, String> {
    let units = hardware.units.iter().filter(|unit| !unit.health.healthy);
    units
        .map(|unit| (unit.gpu, unit.health.reason.clone().unwrap_or_default()))
        .collect()
}

fn only(gpu: u8, reason: &str) -> BTreeMap<u8, String> {
    BTreeMap::from([(gpu, reason.to_owned())])
}

#[tokio::test]
async fn every_gpu_is_a_unit_with_what_kubelet_needs() {
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
async fn nvml_is_looked_for_below_the_driver_root_in_effect_when_it_was_corrected() {
    let sim = Sim::of("workstation-2x");
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("usr/lib64");
    std::fs::create_dir_all(&folder).unwrap();
    // A name that no dynamic loader finds elsewhere.
    let name = "libgantry-test-ml.so.1";
    std::os::unix::fs::symlink(sim.options().library, folder.join(name)).unwrap();
    let wrong = Config {
        container_driver_root: root.path().join("wrong"),
        ..Config::default()
    };
    let (configure, config) = watch::channel(Arc::new(wrong));
    let mut node = Node::start_by(config, name.into(), &sim, QUICK, HealthChecks::default());
    node.until("no library", |now| matches!(now.state, State::Absent(_)))
        .await;
    let right = Config {
        container_driver_root: root.path().to_owned(),
        ..Config::default()
    };
    configure.send_replace(Arc::new(right));
    assert_eq!(node.ready().await.units.len(), 2);
}

#[tokio::test]
async fn a_raised_xid_turns_exactly_that_gpu_unhealthy_with_its_reason() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    let before = node.ready().await;
    sim.installed.controller.raise_xid(5, 79).unwrap();
    let after = node.until_sick(5).await;
    assert_eq!(sick(&after), only(5, "Xid 79: GPU has fallen off the bus"));
    assert!(
        Arc::ptr_eq(&before.machine, &after.machine),
        "the hardware is the same"
    );
}

#[tokio::test]
async fn an_applications_xid_changes_nothing_and_is_counted() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    for xid in [13, 31, 31, 43, 45, 94] {
        sim.installed.controller.raise_xid(1, xid).unwrap();
    }
    // Events come in order: once this one is seen, the others were.
    sim.installed.controller.raise_xid(2, 48).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(sick(&after), only(2, "Xid 48: Double Bit ECC Error"));
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
async fn the_worst_xid_gives_the_reason() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 46).unwrap();
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.raise_xid(0, 95).unwrap();
    let worst = only(0, "Xid 79: GPU has fallen off the bus");
    node.until("the worst reason", |now| sick(now) == worst).await;
}

#[tokio::test]
async fn disabled_xids_change_nothing() {
    let sim = Sim::of("l4-4x-pcie");
    let checks = checks("79,46", "");
    let mut node = Node::start_with(sim.options().library, &sim, EVENTS_ALONE, checks);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.raise_xid(1, 46).unwrap();
    sim.installed.controller.raise_xid(2, 95).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(sick(&after), only(2, "Xid 95: Uncontained memory error"));
}

#[tokio::test]
async fn without_health_checks_no_events_are_asked_for_and_a_lost_gpu_still_counts() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start_with(sim.options().library, &sim, QUICK, checks("all", ""));
    node.ready().await;
    sim.installed.controller.raise_xid(0, 79).unwrap();
    sim.installed.controller.lose_gpu(1).unwrap();
    let after = node.until_sick(1).await;
    assert_eq!(sick(&after).len(), 1);
    let calls = sim.installed.controller.calls();
    assert_eq!(
        calls.of("nvmlEventSetCreate") + calls.of("nvmlEventSetWait_v2"),
        0
    );
}

#[tokio::test]
async fn a_fault_lasts_while_the_gpu_goes_on_answering() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 119).unwrap();
    node.until_sick(0).await;
    // Several full readings later, as the loss and return of another GPU shows.
    sim.installed.controller.lose_gpu(1).unwrap();
    node.until_sick(1).await;
    sim.installed.controller.restore_gpu(1).unwrap();
    let after = node.until("GPU 1 back", |now| !sick(now).contains_key(&1)).await;
    assert_eq!(sick(&after), only(0, "Xid 119: GSP RPC Timeout"));
}

#[tokio::test]
async fn a_lost_gpu_is_sick_where_it_was_and_healthy_when_it_answers_again() {
    let sim = Sim::of("dgx1-v100");
    let mut node = Node::start(&sim, QUICK);
    let before = node.ready().await;
    sim.installed.controller.lose_gpu(2).unwrap();
    let after = node.until_sick(2).await;
    assert_eq!(after.units.len(), 8);
    assert_eq!(sick(&after).keys().collect::<Vec<_>>(), [&2]);
    // Other GPUs are listened to all the same.
    sim.installed.controller.raise_xid(4, 95).unwrap();
    let after = node.until_sick(4).await;
    assert_eq!(
        after.machine.gpus(),
        before.machine.gpus(),
        "who it was stays known"
    );
    assert_eq!(sick(&after)[&4], "Xid 95: Uncontained memory error");

    sim.installed.controller.restore_gpu(2).unwrap();
    let after = node.until("GPU 2 back", |now| !sick(now).contains_key(&2)).await;
    assert_eq!(after.machine.nvlinks(), before.machine.nvlinks());
    assert_eq!(sick(&after).keys().collect::<Vec<_>>(), [&4]);
}

#[tokio::test]
async fn a_gpu_that_is_only_lost_says_so() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.lose_gpu(3).unwrap();
    let reason = sick(node.until_sick(3).await.as_ref())[&3].clone();
    assert!(
        reason.starts_with("GPU lost: ") && reason.contains("fallen off the bus; look for Xid in dmesg"),
        "{reason}"
    );
}

#[tokio::test]
async fn a_driver_that_goes_makes_all_sick_and_its_return_makes_them_healthy() {
    let sim = Sim::of("dgx-a100");
    let mut node = Node::start(&sim, QUICK);
    let before = node.ready().await;
    // A reload of the driver resets the GPUs, so that this is over with it.
    sim.installed.controller.raise_xid(0, 46).unwrap();
    node.until_sick(0).await;

    sim.installed.controller.unload_driver().unwrap();
    let gone = node.until("all sick", |now| sick(now).len() == 8).await;
    assert_eq!(gone.state, State::Ready, "devices do not vanish with the driver");
    for reason in sick(&gone).values() {
        assert!(reason.starts_with("driver gone: "), "{reason}");
    }
    assert!(Arc::ptr_eq(&gone.machine, &before.machine));

    sim.installed.controller.load_driver().unwrap();
    let back = node.all_healthy().await;
    assert!(Arc::ptr_eq(&back.machine, &before.machine));
    sim.installed.controller.raise_xid(7, 79).unwrap();
    assert_eq!(
        sick(node.until_sick(7).await.as_ref()).len(),
        1,
        "and events are heard again"
    );
}

#[tokio::test]
async fn a_driver_that_went_and_came_between_two_looks_is_noticed() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.unload_driver().unwrap();
    sim.installed.controller.load_driver().unwrap();
    sim.installed.controller.raise_xid(1, 46).unwrap();
    // Either the old registration fails and is made anew, or the event comes through; in no case are the GPUs unwatched for ever.
    let loads = sim.installed.controller.calls().of("nvmlInit_v2");
    loop {
        sim.installed.controller.raise_xid(2, 79).unwrap();
        let seen = node.snapshots.wait_for(|now| sick(now).contains_key(&2));
        if tokio::time::timeout(Duration::from_millis(50), seen)
            .await
            .is_ok()
        {
            break;
        }
        assert!(sim.installed.controller.calls().of("nvmlInit_v2") - loads < 1000);
    }
}

#[tokio::test]
async fn a_driver_that_comes_late_is_waited_for() {
    let sim = Sim::of("workstation-2x");
    sim.installed.controller.unload_driver().unwrap();
    let mut node = Node::start(&sim, QUICK);
    let absent = node
        .until("a reason", |now| matches!(now.state, State::Absent(_)))
        .await;
    let State::Absent(reason) = &absent.state else {
        unreachable!()
    };
    let reason = reason.to_string();
    assert!(reason.contains("the NVIDIA driver is not loaded"), "{reason}");
    assert!(absent.units.is_empty());
    sim.installed.controller.load_driver().unwrap();
    assert_eq!(node.all_healthy().await.units.len(), 2);
}

#[tokio::test]
async fn a_library_that_comes_late_is_waited_for() {
    let sim = Sim::of("workstation-2x");
    let folder = sim.installed.library.parent().unwrap();
    let late = folder.join("late.so.1");
    let mut node = Node::start_with(late.clone(), &sim, QUICK, HealthChecks::default());
    let absent = node
        .until("a reason", |now| matches!(now.state, State::Absent(_)))
        .await;
    let State::Absent(reason) = &absent.state else {
        unreachable!()
    };
    let reason = reason.to_string();
    assert!(
        reason.contains("late.so.1 cannot be loaded") && reason.contains("--nvml-library"),
        "{reason}"
    );
    // Linked into place whole, as a driver's installer does.
    std::fs::hard_link(&sim.installed.library, late).unwrap();
    assert_eq!(node.all_healthy().await.units.len(), 2);
}

#[tokio::test]
async fn a_dead_nvlink_leaves_the_machine_at_the_next_reading() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, QUICK);
    assert_eq!(node.ready().await.machine.direct_nvlinks(0, 1), 4);
    for link in 0..4 {
        sim.installed.controller.set_nvlink(0, link, false).unwrap();
    }
    let after = node
        .until("no link", |now| now.machine.direct_nvlinks(0, 1) == 0)
        .await;
    assert!(sick(&after).is_empty(), "the GPUs go on without");
    for link in 0..4 {
        sim.installed.controller.set_nvlink(0, link, true).unwrap();
    }
    node.until("links again", |now| now.machine.direct_nvlinks(0, 1) == 4)
        .await;
}

#[tokio::test]
async fn an_xid_of_a_link_has_the_links_read_at_once() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::start(&sim, EVENTS_ALONE);
    node.ready().await;
    sim.installed.controller.set_nvlink(0, 1, false).unwrap();
    sim.installed.controller.raise_xid(0, 74).unwrap();
    let after = node
        .until("a link less", |now| now.machine.direct_nvlinks(0, 1) == 3)
        .await;
    // The GPU that raised it lost a link with it; the other one goes on with the links left.
    assert_eq!(sick(&after).len(), 1);
}

#[tokio::test]
async fn a_call_that_fails_now_and_then_makes_no_gpu_sick() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    let snapshots = node.snapshots.clone();
    for call in [
        "nvmlDeviceGetCount_v2",
        "nvmlEventSetWait_v2",
        "nvmlDeviceGetMemoryInfo",
    ] {
        let before = sim.installed.controller.calls();
        sim.installed.controller.fail_call(call, 999, Some(1)).unwrap();
        // It has failed, and it has been asked again.
        while sim.installed.controller.calls().since(&before).of(call) < 2 {
            a_moment().await;
        }
        assert!(sick(&snapshots.borrow()).is_empty(), "{call}");
    }
    sim.installed.controller.raise_xid(1, 79).unwrap();
    assert_eq!(
        sick(node.until_sick(1).await.as_ref()).len(),
        1,
        "and events are heard all the same"
    );
}

#[tokio::test]
async fn an_nvml_that_keeps_failing_makes_all_sick_until_it_works_again() {
    let sim = Sim::of("l4-4x-pcie");
    let mut node = Node::start(&sim, QUICK);
    node.ready().await;
    sim.installed.controller.raise_xid(0, 95).unwrap();
    node.until_sick(0).await;
    sim.installed
        .controller
        .fail_call("nvmlDeviceGetCount_v2", 999, None)
        .unwrap();
    let failing = node.until("all sick", |now| sick(now).len() == 4).await;
    let reason = &sick(&failing)[&1];
    assert_eq!(reason, "NVML fails: nvmlDeviceGetCount_v2 failed: NVML error 999");
    // The GPUs are listened to all the same; it shows once NVML works again. Nothing was reset.
    sim.installed.controller.raise_xid(2, 46).unwrap();
    sim.installed
        .controller
        .clear_rule("nvmlDeviceGetCount_v2")
        .unwrap();
    let mut expected = only(0, "Xid 95: Uncontained memory error");
    expected.extend(only(2, "Xid 46: GPU stopped processing"));
    node.until("two sick", |now| sick(now) == expected).await;
}

#[tokio::test]
async fn at_rest_nvml_is_asked_for_events_and_nothing_else() {
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
    // The first wait shows that the reading is over.
    waits(1).await;
    let at_rest = waits(5).await;
    assert_eq!(at_rest.keys().collect::<Vec<_>>(), [&"nvmlEventSetWait_v2"]);
}

#[tokio::test]
async fn a_look_round_asks_little() {
    let sim = Sim::of("dgx-a100");
    let looks = Timing {
        check: Duration::from_millis(20),
        ..EVENTS_ALONE
    };
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
            &"nvmlDeviceGetCount_v2",
            &"nvmlDeviceGetFieldValues",
            &"nvmlDeviceGetHandleByIndex_v2",
            &"nvmlDeviceGetMemoryInfo",
            &"nvmlDeviceGetMigMode",
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
async fn nothing_is_published_while_nothing_changes() {
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
