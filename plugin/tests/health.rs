//! Health against the simulated library, where NVIDIA's plugin errs: which units an Xid touches, what ends a fault, what outlives
//! a restart, and what is seen without one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/log.rs"]
mod log;
mod sim;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{FaultEvidence, GpuFault};
use gantry_nvml_sim::control::Recovery;
use gantry_plugin::config::{Config, MigStrategy, Replicated, SharedOf, TimeSlicing};
use gantry_plugin::discover::look;
use gantry_plugin::health::{HealthChecks, OutageKind, Proof};
use gantry_plugin::inventory::{Diagnosis, Hardware, Lift, Owner, Settings, State, Timing};
use gantry_plugin::offer;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use log::Log;
use sim::Sim;
use tokio::sync::watch;

/// Far above anything that is waited for: only a failing test takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Quick to notice, so that tests are short; no test measures it.
const QUICK: Timing = Timing {
    wait: Duration::from_millis(20),
    look: Duration::from_millis(20),
    read: Duration::from_millis(100),
    retry_from: Duration::from_millis(10),
    retry_to: Duration::from_millis(50),
};

/// Nothing but events is noticed.
const EVENTS_ALONE: Timing = Timing {
    look: Duration::from_secs(3600),
    read: Duration::from_secs(3600),
    ..QUICK
};

/// Looks alone notice: no event and no reading by the clock.
const LOOKS_ALONE: Timing = Timing {
    read: Duration::from_secs(3600),
    ..QUICK
};

/// The plugin's eye on one machine; a new one on the same machine is a plugin that was restarted.
struct Eye {
    owner: Owner,
    snapshots: watch::Receiver<Arc<Hardware>>,
}

impl Eye {
    fn open(sim: &Sim, timing: Timing) -> Self {
        Self::open_with(sim, timing, HealthChecks::default())
    }

    fn open_with(sim: &Sim, timing: Timing, checks: HealthChecks) -> Self {
        let settings = Settings {
            nvml_library: sim.options().library,
            config: watch::channel(Arc::default()).1,
            proc_root: sim.installed.layout.proc.clone(),
            sys_root: sim.installed.layout.sys.clone(),
            dev_root: sim.installed.layout.dev.clone(),
        };
        let (publish, snapshots) = Hardware::channel();
        let owner = Owner::start(&settings, checks, timing, publish).unwrap();
        Self { owner, snapshots }
    }

    async fn until(&mut self, what: &str, mut holds: impl FnMut(&Hardware) -> bool) -> Arc<Hardware> {
        let seen = self.snapshots.clone();
        let waited = tokio::time::timeout(PATIENCE, self.snapshots.wait_for(|now| holds(now))).await;
        let Ok(snapshot) = waited else {
            panic!("never came: {what}; last seen: {:#?}", sick(&seen.borrow()));
        };
        Arc::clone(&snapshot.unwrap())
    }

    async fn ready(&mut self) -> Arc<Hardware> {
        self.until("ready", |now| now.state == State::Ready).await
    }

    async fn until_sick(&mut self, count: usize) -> BTreeMap<String, String> {
        let what = format!("{count} sick units");
        sick(&*self.until(&what, |now| sick(now).len() == count).await)
    }

    async fn healthy(&mut self) -> Arc<Hardware> {
        self.until("all healthy", |now| {
            now.state == State::Ready && sick(now).is_empty()
        })
        .await
    }

    async fn diagnosis(&self, what: &str, holds: impl FnMut(&Arc<Diagnosis>) -> bool) -> Arc<Diagnosis> {
        let mut diagnosis = self.owner.sickbay().diagnosis();
        let waited = tokio::time::timeout(PATIENCE, diagnosis.wait_for(holds)).await;
        Arc::clone(&waited.unwrap_or_else(|_| panic!("never came: {what}")).unwrap())
    }

    /// The faults as they are stored in the cluster.
    async fn stored(&self) -> Vec<GpuFault> {
        let now = self.diagnosis("faults", |now| !now.faults.is_empty()).await;
        now.faults.iter().map(|fault| fault.0.clone()).collect()
    }

    async fn proofs(&self) -> Vec<Proof> {
        let now = self.diagnosis("an end", |now| !now.ended.is_empty()).await;
        now.ended.iter().map(|(_, ended)| ended.proof).collect()
    }

    /// Several looks and full readings later.
    async fn a_while(&self, sim: &Sim) {
        let calls = || sim.installed.controller.calls();
        let before = calls();
        while calls().since(&before).of("nvmlDeviceGetSerial") < 4 * sim.installed.facts.gpus.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The units that are unhealthy, with their reasons.
fn sick(hardware: &Hardware) -> BTreeMap<String, String> {
    let units = hardware.units.iter().filter(|unit| !unit.health.healthy);
    units
        .map(|unit| {
            (
                unit.id.to_string(),
                unit.health.reason.clone().unwrap_or_default(),
            )
        })
        .collect()
}

/// Each unit with its profile, and its place if it is a slice.
fn cut(hardware: &Hardware, gpu: u8) -> Vec<(String, u8, u8)> {
    let units = hardware.units.iter().filter(|unit| unit.gpu == gpu);
    units
        .map(|unit| match &unit.slice {
            Some(slice) => (slice.profile.clone(), slice.start, slice.size),
            None => ("whole".to_owned(), 0, 0),
        })
        .collect()
}

fn boot(sim: &Sim, id: &str) {
    let folder = sim.installed.layout.proc.join("sys/kernel/random");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
}

/// What the kernel does when it binds a GPU to its driver anew, as at a reload.
fn bind_anew(sim: &Sim, gpu: usize) {
    let address = &sim.installed.facts.gpus[gpu].address.to_string();
    let device = sim.installed.layout.sys.join("bus/pci/devices").join(address);
    let target = fs::read_link(device.join("driver")).unwrap();
    symlink(target, device.join("driver.new")).unwrap();
    fs::rename(device.join("driver.new"), device.join("driver")).unwrap();
}

/// What kubelet is told: device IDs with their health.
fn told(hardware: &Hardware, config: &Config) -> Vec<(String, bool)> {
    let inventory = offer::offer(hardware, config);
    let devices = inventory.devices.iter();
    devices
        .map(|device| (device.id.to_string(), device.health.healthy))
        .collect()
}

#[tokio::test]
async fn every_replica_follows_its_gpu() {
    let sim = Sim::of("workstation-2x");
    let config = Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources: vec![Replicated {
                name: "nvidia.com/gpu".into(),
                rename: None,
                devices: SharedOf::All,
                replicas: 4,
            }],
        }),
        ..Config::default()
    };
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    assert_eq!(told(&*eye.ready().await, &config).len(), 8);
    sim.installed.controller.raise_xid(1, 79).unwrap();
    eye.until_sick(1).await;
    let replica = |gpu: usize, number: usize| (format!("{}::{number}", sim.uuid(gpu)), gpu == 0);
    let mut expected: Vec<_> = [0, 1]
        .into_iter()
        .flat_map(|gpu| (0..4).map(move |number| (gpu, number)))
        .map(|(gpu, number)| replica(gpu, number))
        .collect();
    let mut now = told(&eye.snapshots.borrow(), &config);
    expected.sort();
    now.sort();
    assert_eq!(now, expected);
}

#[tokio::test]
async fn of_mig_devices_under_one_name_just_those_hit_are_unhealthy() {
    let sim = Sim::of("a100-1x-mig");
    let config = Config {
        mig_strategy: MigStrategy::Single,
        ..Config::default()
    };
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid_in(0, 48, 9, 0).unwrap();
    eye.until_sick(1).await;
    let unhealthy = |eye: &Eye| {
        let devices = told(&eye.snapshots.borrow(), &config);
        (
            devices.len(),
            devices.iter().filter(|(_, healthy)| !healthy).count(),
        )
    };
    assert_eq!(unhealthy(&eye), (7, 1));
    sim.installed.controller.raise_xid(0, 48).unwrap();
    eye.until_sick(7).await;
    assert_eq!(unhealthy(&eye), (7, 7));
}

#[tokio::test]
async fn a_wait_that_fails_for_ever_neither_spins_nor_floods() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.fail_call("nvmlEventSetWait_v2", 999, None).unwrap();
    let sick = eye.until_sick(4).await;
    assert!(
        sick.values().all(|reason| reason.starts_with("NVML fails: ")),
        "{sick:?}"
    );
    // One snapshot told of it; however often it is tried again, nothing more is said.
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
async fn a_failure_that_lasts_is_told_and_not_told_again_with_every_attempt() {
    let log = Log::default();
    // For all threads, those of other tests among them, whose failures have other numbers.
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
    // Every second of them ended a life of NVML's.
    let told = log.of("997");
    assert!((1..10).contains(&told), "{told} of {waits}");
    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn a_library_of_another_version_for_a_while_proves_no_reset() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller.raise_xid(1, 95).unwrap();
    eye.until_sick(1).await;
    // NVML_ERROR_LIB_RM_VERSION_MISMATCH: the driver's files were updated, its module was not loaded anew.
    for call in ["nvmlDeviceGetCount_v2", "nvmlInit_v2"] {
        controller.fail_call(call, 18, None).unwrap();
    }
    eye.until_sick(4).await;
    for call in ["nvmlDeviceGetCount_v2", "nvmlInit_v2"] {
        controller.clear_rule(call).unwrap();
    }
    let sick = eye.until_sick(1).await;
    assert_eq!(sick[sim.uuid(1)], "Xid 95: Uncontained memory error");
}

#[tokio::test]
async fn a_library_that_is_missing_is_waited_for_and_its_coming_proves_no_reset() {
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
    eye.owner.sickbay().adopt(vec![fault]);
    let is_missing = |now: &Arc<Diagnosis>| {
        let kind = now.outage.as_ref().map(|outage| outage.kind);
        // Not `Failing`: that is worth a new process, which would find no library either.
        kind == Some(OutageKind::LibraryMissing)
    };
    eye.diagnosis("no library", is_missing).await;
    fs::rename(&away, &library).unwrap();
    let sick = eye.until_sick(1).await;
    assert_eq!(sick[sim.uuid(1)], "Xid 95: Uncontained memory error");
}

#[tokio::test]
async fn an_xid_of_a_cut_gpu_turns_all_its_mig_devices_unhealthy() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    assert_eq!(eye.ready().await.units.len(), 7);
    sim.installed.controller.raise_xid(0, 79).unwrap();
    let sick = eye.until_sick(7).await;
    assert!(
        sick.values()
            .all(|reason| reason == "Xid 79: GPU has fallen off the bus"),
        "{sick:#?}"
    );
}

#[tokio::test]
async fn an_xid_of_an_instance_turns_that_one_unhealthy_whichever_it_is() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let units = eye.ready().await.units.clone();
    let mut expected = BTreeMap::new();
    for unit in &units {
        let slice = unit.slice.as_ref().unwrap();
        let instance = slice.gpu_instance;
        sim.installed
            .controller
            .raise_xid_in(0, 48, instance, slice.compute_instance)
            .unwrap();
        expected.insert(
            unit.id.to_string(),
            format!("Xid 48: Double Bit ECC Error (GPU instance {instance})"),
        );
        assert_eq!(eye.until_sick(expected.len()).await, expected);
    }
}

#[tokio::test]
async fn an_xid_that_is_not_confined_touches_every_instance_though_it_names_one() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid_in(0, 119, 7, 0).unwrap();
    eye.until_sick(7).await;
}

#[tokio::test]
async fn a_compute_instance_shares_the_memory_of_its_gpu_instance_and_not_its_engines() {
    let sim = Sim::of("a100-1x-mig");
    sim.installed
        .controller
        .recut(0, &["3g.20gb@0=2c,1c", "3g.20gb@4"])
        .unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let units = eye.ready().await.units.clone();
    let (one, other) = (units[0].slice.as_ref().unwrap(), units[1].slice.as_ref().unwrap());
    assert_eq!(one.gpu_instance, other.gpu_instance);
    let controller = &sim.installed.controller;
    controller
        .raise_xid_in(0, 46, one.gpu_instance, one.compute_instance)
        .unwrap();
    let sick = eye.until_sick(1).await;
    assert!(sick.contains_key(units[0].id.as_str()), "{sick:?}");
    controller
        .raise_xid_in(0, 48, one.gpu_instance, one.compute_instance)
        .unwrap();
    let sick = eye.until_sick(2).await;
    assert!(!sick.contains_key(units[2].id.as_str()), "{sick:?}");
}

#[tokio::test]
async fn an_application_in_an_instance_harms_nobody() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    for xid in [13, 31, 94] {
        sim.installed.controller.raise_xid_in(0, xid, 7, 0).unwrap();
    }
    // Events come in order: once this one is seen, the others were.
    sim.installed.controller.raise_xid_in(0, 48, 8, 0).unwrap();
    eye.until_sick(1).await;
}

#[tokio::test]
async fn of_all_disabled_just_those_enabled_are_watched() {
    let sim = Sim::of("l4-4x-pcie");
    let checks = HealthChecks {
        disabled: "all".parse().unwrap(),
        enabled: "48,13".parse().unwrap(),
    };
    let mut eye = Eye::open_with(&sim, EVENTS_ALONE, checks);
    eye.ready().await;
    for (gpu, xid) in [(0, 79), (1, 95), (2, 13), (3, 48)] {
        sim.installed.controller.raise_xid(gpu, xid).unwrap();
    }
    let sick = eye.until_sick(2).await;
    assert_eq!(sick.keys().collect::<Vec<_>>(), {
        let mut both = vec![sim.uuid(2), sim.uuid(3)];
        both.sort_unstable();
        both
    });
}

#[tokio::test]
async fn a_gpu_cut_anew_shows_its_new_devices_without_a_restart() {
    let sim = Sim::of("dgx-a100-mig");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    let before = eye.ready().await;
    assert_eq!(cut(&before, 0), [("whole".to_owned(), 0, 0)]);
    let controller = &sim.installed.controller;
    controller
        .recut(0, &["3g.20gb@0", "2g.10gb@4", "1g.5gb@6"])
        .unwrap();
    let pieces = [
        ("3g.20gb".to_owned(), 0, 4),
        ("2g.10gb".to_owned(), 4, 2),
        ("1g.5gb".to_owned(), 6, 1),
    ];
    let after = eye.until("the new cut", |now| cut(now, 0) == pieces).await;
    assert_eq!(cut(&after, 1), cut(&before, 1), "other GPUs are as they were");
    controller.recut(0, &["7g.40gb"]).unwrap();
    eye.until("another cut", |now| cut(now, 0) == [("7g.40gb".to_owned(), 0, 8)])
        .await;
    controller.uncut(0).unwrap();
    eye.until("whole again", |now| cut(now, 0) == cut(&before, 0))
        .await;
}

#[tokio::test]
async fn mig_devices_have_their_capability_nodes() {
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
async fn where_instances_lie_is_worked_out_where_nvml_does_not_tell() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["3g.20gb@4", "1g.5gb@2"]).unwrap();
    // NVML_ERROR_NO_PERMISSION
    controller
        .fail_call("nvmlDeviceGetGpuInstanceById", 4, None)
        .unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let expected = [("1g.5gb".to_owned(), 2, 1), ("3g.20gb".to_owned(), 4, 4)];
    assert_eq!(cut(&*eye.ready().await, 0), expected);
}

#[tokio::test]
async fn a_gpu_that_nobody_may_ask_how_it_is_cut_is_left_out_without_a_word_of_making_or_ending_its_slices() {
    let sim = Sim::of("a100-1x-mig");
    // NVML_ERROR_NO_PERMISSION
    let controller = &sim.installed.controller;
    controller
        .fail_call("nvmlDeviceGetMigDeviceHandleByIndex", 4, None)
        .unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    let reason = |hardware: &Hardware| {
        let config = Config {
            mig_strategy: MigStrategy::Mixed,
            ..Config::default()
        };
        let left_out = offer::offer(hardware, &config).left_out;
        assert_eq!(left_out.len(), 1);
        left_out[0].reason.clone()
    };
    let told = reason(&*eye.ready().await);
    assert!(told.contains("label the node gantry.dev/mig=true"), "{told}");
    assert!(!told.contains("-cgi") && !told.contains("turn MIG off"), "{told}");
    eye.a_while(&sim).await;
    assert_eq!(reason(&eye.snapshots.borrow()), told);
}

#[tokio::test]
async fn a_gpu_that_cannot_be_asked_how_it_is_cut_is_cut_as_before() {
    let sim = Sim::of("a100-1x-mig");
    let mut eye = Eye::open(&sim, QUICK);
    let before = eye.ready().await;
    let controller = &sim.installed.controller;
    controller
        .fail_call("nvmlDeviceGetMaxMigDeviceCount", 999, None)
        .unwrap();
    eye.a_while(&sim).await;
    assert_eq!(eye.snapshots.borrow().units, before.units);
}

#[tokio::test]
async fn an_instance_made_anew_is_healthy_and_its_neighbour_stays_sick() {
    let sim = Sim::of("a100-1x-mig");
    let controller = &sim.installed.controller;
    controller.recut(0, &["3g.20gb@0", "3g.20gb@4"]).unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    for unit in &eye.ready().await.units {
        let slice = unit.slice.as_ref().unwrap();
        controller
            .raise_xid_in(0, 48, slice.gpu_instance, slice.compute_instance)
            .unwrap();
    }
    eye.until_sick(2).await;
    eye.a_while(&sim).await;
    assert_eq!(
        sick(&eye.snapshots.borrow()).len(),
        2,
        "it does not end by itself"
    );
    controller.recut(0, &["3g.20gb@4"]).unwrap();
    eye.until_sick(1).await;
    controller.recut(0, &["3g.20gb@0", "3g.20gb@4"]).unwrap();
    let after = eye.until("two units", |now| now.units.len() == 2).await;
    let health: Vec<bool> = after.units.iter().map(|unit| unit.health.healthy).collect();
    assert_eq!(health, [true, false]);
    assert_eq!(eye.proofs().await, [Proof::InstanceGone]);
}

#[tokio::test]
async fn memory_that_waits_for_repair_or_cannot_be_repaired_is_a_reason() {
    let sim = Sim::of("dgx-a100");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller
        .update_gpu(1, |gpu| gpu.remapped.pending = true)
        .unwrap();
    controller
        .update_gpu(2, |gpu| gpu.remapped.failed = true)
        .unwrap();
    // Contained, and nothing left to repair: the GPU goes on.
    controller
        .update_gpu(3, |gpu| gpu.ecc.volatile_uncorrected = 1)
        .unwrap();
    let sick = eye.until_sick(2).await;
    assert!(
        sick[sim.uuid(1)].starts_with("memory: rows wait to be remapped; drain"),
        "{sick:?}"
    );
    assert!(
        sick[sim.uuid(2)].starts_with("memory: remapping a row has failed"),
        "{sick:?}"
    );
    controller
        .update_gpu(1, |gpu| gpu.remapped.pending = false)
        .unwrap();
    eye.until_sick(1).await;
}

/// Of an Xid a plugin that starts knows from the cluster alone. What NVML shows as a state it needs nobody for, and no second look.
#[tokio::test]
async fn what_nvml_still_shows_of_a_fault_is_in_the_first_list_of_a_plugin_that_starts() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    controller
        .update_gpu(1, |gpu| gpu.remapped.pending = true)
        .unwrap();
    controller
        .update_gpu(2, |gpu| gpu.remapped.failed = true)
        .unwrap();
    let wishes = [Recovery::GpuReset, Recovery::NodeReboot, Recovery::DrainAndReset];
    for (gpu, wish) in (3..).zip(wishes) {
        controller.update_gpu(gpu, |gpu| gpu.recovery = wish).unwrap();
    }
    controller.lose_gpu(6).unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let first = eye.ready().await;
    let reasons = sick(&first);
    let begins = [
        (1, "memory: rows wait to be remapped"),
        (2, "memory: remapping a row has failed"),
        (3, "the driver asks for a reset of the GPU"),
        (4, "the driver asks for a reboot of the node"),
        (
            5,
            "the driver asks for a reset of the GPU once its work has ended",
        ),
    ];
    for (gpu, reason) in begins {
        let told = reasons.get(sim.uuid(gpu)).map(String::as_str).unwrap_or_default();
        assert!(told.starts_with(reason), "{gpu}: {reasons:?}");
    }
    // Nobody knows the name of a GPU that is off the bus: none is offered in its place.
    let well = told(&first, &Config::default());
    let well: Vec<&str> = well
        .iter()
        .filter(|(_, well)| *well)
        .map(|(id, _)| id.as_str())
        .collect();
    assert_eq!(well, [sim.uuid(0), sim.uuid(7)]);
}

#[tokio::test]
async fn pages_that_wait_to_be_retired_are_in_the_first_list_too() {
    let sim = Sim::of("dgx1-v100");
    let controller = &sim.installed.controller;
    controller
        .update_gpu(2, |gpu| gpu.retired.pending = true)
        .unwrap();
    controller
        .update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 2)
        .unwrap();
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    let reasons = sick(&*eye.ready().await);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(
        reasons[sim.uuid(2)].starts_with("memory: pages wait to be retired"),
        "{reasons:?}"
    );
    assert!(
        reasons[sim.uuid(6)].starts_with("memory: 2 uncorrected ECC errors"),
        "{reasons:?}"
    );
}

#[tokio::test]
async fn uncorrected_errors_are_a_reason_where_rows_cannot_be_remapped() {
    let sim = Sim::of("dgx1-v100");
    let mut eye = Eye::open(&sim, LOOKS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller
        .update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 2)
        .unwrap();
    let sick = eye.until_sick(1).await;
    assert!(
        sick[sim.uuid(6)].starts_with("memory: 2 uncorrected ECC errors"),
        "{sick:?}"
    );
    controller
        .update_gpu(6, |gpu| gpu.ecc.volatile_uncorrected = 0)
        .unwrap();
    eye.healthy().await;
}

#[tokio::test]
async fn a_reset_is_believed_by_its_traces_and_only_by_them() {
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
    assert_eq!(
        sick(&eye.snapshots.borrow()).len(),
        2,
        "both go on answering, which proves nothing"
    );
    // nvidia-smi --gpu-reset
    controller
        .update_gpu(1, |gpu| {
            gpu.ecc.volatile_uncorrected = 0;
            gpu.remapped.pending = false;
        })
        .unwrap();
    let sick = eye.until_sick(1).await;
    assert_eq!(sick[sim.uuid(0)], "Xid 95: Uncontained memory error");
    assert_eq!(eye.proofs().await, [Proof::Repaired]);
}

#[tokio::test]
async fn a_fault_right_after_a_reset_is_not_ended_by_that_reset() {
    let sim = Sim::of("dgx-a100");
    let controller = &sim.installed.controller;
    let errors = |gpu, count| {
        controller
            .update_gpu(gpu, move |gpu| gpu.ecc.volatile_uncorrected = count)
            .unwrap();
    };
    // Of GPU 1 the fault is the first, of GPU 2 one of that kind is known: what the GPUs said last is from before the reset.
    (1..3).for_each(|gpu| errors(gpu, 5));
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    controller.raise_xid(2, 95).unwrap();
    eye.until_sick(1).await;
    (1..3).for_each(|gpu| errors(gpu, 1));
    for gpu in 1..4 {
        controller.raise_xid(gpu, 95).unwrap();
    }
    let sick = eye.until_sick(3).await;
    assert!(
        (1..4).all(|gpu| sick[sim.uuid(gpu)] == "Xid 95: Uncontained memory error"),
        "{sick:?}"
    );
}

#[tokio::test]
async fn a_quarantine_survives_a_restart() {
    let sim = Sim::of("l4-4x-pcie");
    boot(&sim, "first");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    sim.installed.controller.raise_xid(1, 79).unwrap();
    sim.installed.controller.raise_xid(2, 46).unwrap();
    let before = eye.until_sick(2).await;
    let stored = eye.stored().await;
    eye.owner.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored.clone());
    assert_eq!(eye.until_sick(2).await, before);
    assert_eq!(eye.stored().await, stored, "and is stored again as it was");
    eye.a_while(&sim).await;
    assert_eq!(sick(&eye.snapshots.borrow()), before);
    eye.owner.stop();

    // The driver was reloaded for one of them while no plugin ran.
    bind_anew(&sim, 2);
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored.clone());
    let sick = eye.until_sick(1).await;
    assert!(sick.contains_key(sim.uuid(1)), "{sick:?}");
    assert_eq!(eye.proofs().await, [Proof::BoundAnew]);
    eye.owner.stop();

    boot(&sim, "second");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored);
    assert_eq!(eye.proofs().await, [Proof::Rebooted; 2]);
    eye.healthy().await;
}

#[tokio::test]
async fn an_xid_that_counted_because_it_was_enabled_counts_no_more_once_it_is_not() {
    let sim = Sim::of("l4-4x-pcie");
    let enabled = HealthChecks {
        enabled: "31".parse().unwrap(),
        ..HealthChecks::default()
    };
    let mut eye = Eye::open_with(&sim, EVENTS_ALONE, enabled.clone());
    eye.ready().await;
    sim.installed.controller.raise_xid(1, 31).unwrap();
    eye.until_sick(1).await;
    let stored = eye.stored().await;
    eye.owner.stop();

    let mut eye = Eye::open_with(&sim, QUICK, enabled);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored.clone());
    eye.until_sick(1).await;
    eye.owner.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored);
    assert_eq!(eye.proofs().await, [Proof::Lifted]);
    eye.healthy().await;
}

#[tokio::test]
async fn a_person_lifts_a_quarantine() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    for gpu in 0..3 {
        sim.installed.controller.raise_xid(gpu, 79).unwrap();
    }
    eye.until_sick(3).await;
    eye.owner.sickbay().lift(sim.uuid(1).parse::<Lift>().unwrap());
    let sick = eye.until_sick(2).await;
    assert!(!sick.contains_key(sim.uuid(1)), "{sick:?}");
    eye.owner.sickbay().lift(Lift::All);
    eye.healthy().await;
}

/// What the kernel shows of a GPU that it has bound to NVIDIA's driver, or takes away.
fn kernel_has(sim: &Sim, gpu: usize, there: bool) {
    let bound = sim.installed.layout.sys.join("bus/pci/drivers/nvidia");
    let entry = bound.join(sim.installed.facts.gpus[gpu].address.to_string());
    match there {
        true => fs::create_dir(entry).unwrap(),
        false => fs::remove_dir(entry).unwrap(),
    }
}

#[tokio::test]
async fn a_gpu_that_is_added_appears_and_one_that_is_taken_out_is_lost() {
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
    // NVML was loaded anew for it, which resets nothing.
    assert_eq!(sick(&after)[sim.uuid(3)], "Xid 95: Uncontained memory error");

    let loads = || controller.calls().of("nvmlInit_v2");
    let before = loads();
    controller.remove_gpu(0).unwrap();
    kernel_has(&sim, 0, false);
    while loads() == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    eye.a_while(&sim).await;
    let sick = eye.until_sick(2).await;
    assert!(sick[sim.uuid(0)].starts_with("GPU lost: "), "{sick:?}");
    // NVML counts the others from 0 now: an Xid is the right GPU's all the same.
    controller.raise_xid(2, 46).unwrap();
    let sick = eye.until_sick(3).await;
    assert_eq!(sick[sim.uuid(2)], "Xid 46: GPU stopped processing");
}

#[tokio::test]
async fn a_gpu_that_is_taken_out_leaves_the_others_the_index_that_nvml_has_for_them_now() {
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

    // Lost: ours counts it still. Whether one that is loaded now does, as a container's runtime does, nobody can tell.
    sim.installed.controller.remove_gpu(1).unwrap();
    let lost = eye.until("a GPU lost", |now| sick(now).len() == 1).await;
    assert_eq!(seen(&lost), [(0, Some(0)), (1, None), (2, None), (3, None)]);

    kernel_has(&sim, 1, false);
    let counted_anew = |now: &Hardware| seen(now)[2].1.is_some();
    let after = eye.until("NVML loaded anew", counted_anew).await;
    assert_eq!(
        seen(&after),
        [(0, Some(0)), (1, None), (2, Some(1)), (3, Some(2))]
    );
    let fresh = look(&sim.options()).unwrap().machine;
    for unit in after.units.iter().filter(|unit| unit.health.healthy) {
        let gpu = &fresh.gpus()[usize::from(unit.nvml_index.unwrap())];
        assert_eq!(gpu.uuid.as_ref().unwrap().as_str(), unit.id.as_str());
    }

    sim.installed.controller.add_gpu(1).unwrap();
    kernel_has(&sim, 1, true);
    eye.until("all as before", |now| sick(now).is_empty() && seen(now) == before)
        .await;
}

#[tokio::test]
async fn what_the_driver_asks_for_is_a_reason_and_its_end_proves_a_reset() {
    let sim = Sim::of("hgx-h100");
    let mut eye = Eye::open(&sim, EVENTS_ALONE);
    eye.ready().await;
    let controller = &sim.installed.controller;
    controller
        .update_gpu(4, |gpu| gpu.recovery = Recovery::GpuReset)
        .unwrap();
    // Xid 154 tells that the driver's wish has changed, and is no fault itself.
    controller.raise_xid(4, 154).unwrap();
    let sick = eye.until_sick(1).await;
    assert!(
        sick[sim.uuid(4)].starts_with("the driver asks for a reset of the GPU"),
        "{sick:?}"
    );
    controller.raise_xid(4, 119).unwrap();
    eye.until("the Xid", |now| {
        self::sick(now).get(sim.uuid(4)).map(String::as_str) == Some("Xid 119: GSP RPC Timeout")
    })
    .await;
    controller
        .update_gpu(4, |gpu| gpu.recovery = Recovery::None)
        .unwrap();
    controller.raise_xid(4, 154).unwrap();
    eye.healthy().await;
    assert_eq!(eye.proofs().await, [Proof::WishGranted]);
}

#[tokio::test]
async fn a_gpu_taken_out_while_the_driver_was_away_is_gone_and_a_lost_one_is_not() {
    let sim = Sim::of("l4-4x-pcie");
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    sim.installed.controller.lose_gpu(2).unwrap();
    eye.until_sick(1).await;
    sim.installed.controller.unload_driver().unwrap();
    eye.until_sick(4).await;
    sim.installed.controller.load_driver().unwrap();
    let sick = eye.until_sick(1).await;
    assert!(sick[sim.uuid(2)].starts_with("GPU lost: "), "{sick:?}");
    assert_eq!(eye.snapshots.borrow().units.len(), 4);
}

/// NVML_ERROR_NOT_SUPPORTED, as drivers before 560 answer what they ask for.
const NOT_SUPPORTED: u32 = 3;

#[tokio::test]
async fn an_xid_of_a_link_counts_where_the_driver_does_not_say_what_it_needs() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    controller
        .fail_call("nvmlDeviceGetFieldValues", NOT_SUPPORTED, None)
        .unwrap();
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    for (gpu, xid) in [(0, 74), (1, 145), (2, 149)] {
        controller.raise_xid(gpu, xid).unwrap();
    }
    let sick = eye.until_sick(3).await;
    assert_eq!(sick[sim.uuid(0)], "Xid 74: NVLINK Error");
    let now = eye.diagnosis("troubles", |now| now.troubles.len() == 3).await;
    assert!(now.troubles.iter().all(|one| one.cause.to_string() == "xid-link"));
    // Links that never went down prove nothing.
    eye.a_while(&sim).await;
    assert_eq!(self::sick(&eye.snapshots.borrow()).len(), 3);

    controller.set_nvlink(0, 4, false).unwrap();
    eye.until("a link down", |now| {
        self::sick(now).get(sim.uuid(0)).map(String::as_str)
            == Some("Xid 74: NVLINK Error; 1 of 18 NVLinks down")
    })
    .await;
    controller.set_nvlink(0, 4, true).unwrap();
    eye.until_sick(2).await;
    assert_eq!(eye.proofs().await, [Proof::LinksUp]);
}

#[tokio::test]
async fn an_xid_of_a_link_counts_where_links_went_down_with_it() {
    let sim = Sim::of("hgx-h100");
    let controller = &sim.installed.controller;
    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    // All links up, and the driver would say if it asked for a reset.
    controller.raise_xid(1, 145).unwrap();
    for link in [3, 4] {
        controller.set_nvlink(0, link, false).unwrap();
    }
    eye.a_while(&sim).await;
    assert_eq!(sick(&eye.snapshots.borrow()), BTreeMap::new(), "no Xid yet");
    controller.raise_xid(0, 149).unwrap();
    let sick = eye.until_sick(1).await;
    let reason = "Xid 149: NVLINK: NETIR Error; 2 of 18 NVLinks down";
    assert_eq!(sick[sim.uuid(0)], reason);
    let stored = eye.stored().await;
    eye.owner.stop();

    let mut eye = Eye::open(&sim, QUICK);
    eye.ready().await;
    eye.owner.sickbay().adopt(stored);
    assert_eq!(eye.until_sick(1).await[sim.uuid(0)], reason);
    for link in [3, 4] {
        controller.set_nvlink(0, link, true).unwrap();
    }
    eye.healthy().await;
    assert_eq!(eye.proofs().await, [Proof::LinksUp]);
}
