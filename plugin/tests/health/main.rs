//! Health against the simulated library, in cases that NVIDIA's plugin handles wrongly: units affected by an Xid,
//! evidence that clears a fault, state that survives a restart, and changes that need no restart.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "../support/log.rs"]
mod log;
#[path = "../sim/mod.rs"]
mod sim;

mod coming_and_going;
mod driver_facts;
mod facts;
mod links;
mod outages;
mod quarantine;
mod slices;
mod states;
mod xids;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::GpuFault;
use gantry_config::{Config, ReplicatedDevices, ReplicatedResource, TimeSlicing};
use gantry_plugin::health::{HealthChecks, Proof};
use gantry_plugin::inventory::{Diagnosis, Hardware, NvmlThread, Settings, State, Timing};
use gantry_plugin::offer;
use tokio::sync::watch;

use sim::Sim;

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
const EVENTS_ALONE: Timing =
    Timing { check: Duration::from_secs(3600), read: Duration::from_secs(3600), ..QUICK };

/// Only checks detect changes: no events, no periodic readings.
const LOOKS_ALONE: Timing = Timing { read: Duration::from_secs(3600), ..QUICK };

/// The plugin's view of one machine; a second view of the same machine is a restarted plugin.
struct Eye {
    nvml_thread: NvmlThread,
    snapshots: watch::Receiver<Arc<Hardware>>,
}

impl Eye {
    fn open(sim: &Sim, timing: Timing) -> Self {
        Self::open_with(sim, timing, HealthChecks::default())
    }

    fn open_with(sim: &Sim, timing: Timing, checks: HealthChecks) -> Self {
        Self::open_in_fabric_mode(sim, timing, checks, None)
    }

    fn open_in_fabric_mode(sim: &Sim, timing: Timing, checks: HealthChecks, fabric_mode: Option<u8>) -> Self {
        Self::start(sim, timing, checks, (sim.options().library, fabric_mode))
    }

    /// With another file as NVML's library.
    fn open_library(sim: &Sim, timing: Timing, library: PathBuf) -> Self {
        Self::start(sim, timing, HealthChecks::default(), (library, None))
    }

    fn start(
        sim: &Sim,
        timing: Timing,
        checks: HealthChecks,
        (nvml_library, fabric_mode): (PathBuf, Option<u8>),
    ) -> Self {
        let settings = Settings {
            nvml_library,
            config: watch::channel(Arc::default()).1,
            proc_root: sim.installed.layout.proc.clone(),
            sys_root: sim.installed.layout.sys.clone(),
            dev_root: sim.installed.layout.dev.clone(),
            fabric_mode,
        };
        let (publish, snapshots) = Hardware::channel();
        let nvml_thread = NvmlThread::start(&settings, checks, timing, publish).unwrap();
        Self { nvml_thread, snapshots }
    }

    async fn until(&mut self, what: &str, mut holds: impl FnMut(&Hardware) -> bool) -> Arc<Hardware> {
        let seen = self.snapshots.clone();
        let waited = tokio::time::timeout(PATIENCE, self.snapshots.wait_for(|now| holds(now))).await;
        let Ok(snapshot) = waited else {
            panic!("never came: {what}; last seen: {:#?}", unhealthy(&seen.borrow()));
        };
        Arc::clone(&snapshot.unwrap())
    }

    async fn ready(&mut self) -> Arc<Hardware> {
        self.until("ready", |now| now.state == State::Ready).await
    }

    async fn until_sick(&mut self, count: usize) -> BTreeMap<String, String> {
        let what = format!("{count} unhealthy units");
        unhealthy(&*self.until(&what, |now| unhealthy(now).len() == count).await)
    }

    async fn healthy(&mut self) -> Arc<Hardware> {
        self.until("all healthy", |now| now.state == State::Ready && unhealthy(now).is_empty()).await
    }

    async fn diagnosis(&self, what: &str, holds: impl FnMut(&Arc<Diagnosis>) -> bool) -> Arc<Diagnosis> {
        let mut diagnosis = self.nvml_thread.diagnoses().diagnosis();
        let waited = tokio::time::timeout(PATIENCE, diagnosis.wait_for(holds)).await;
        Arc::clone(&waited.unwrap_or_else(|_| panic!("never came: {what}")).unwrap())
    }

    /// The faults as stored in the cluster.
    async fn stored(&self) -> Vec<GpuFault> {
        let now = self.diagnosis("faults", |now| !now.faults.is_empty()).await;
        now.faults.iter().map(|fault| fault.0.clone()).collect()
    }

    async fn proofs(&self) -> Vec<Proof> {
        let now = self.diagnosis("an end", |now| !now.ended.is_empty()).await;
        now.ended.iter().map(|(_, ended)| ended.proof).collect()
    }

    /// After several checks and full readings.
    async fn a_while(&self, sim: &Sim) {
        self.a_while_of(sim, "nvmlDeviceGetSerial").await;
    }

    /// After several of these calls per GPU.
    async fn a_while_of(&self, sim: &Sim, call: &str) {
        let calls = || sim.installed.controller.calls();
        let before = calls();
        while calls().since(&before).of(call) < 4 * sim.installed.facts.gpus.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The units that are unhealthy, with their reasons.
fn unhealthy(hardware: &Hardware) -> BTreeMap<String, String> {
    let units = hardware.units.iter().filter(|unit| !unit.health.healthy);
    units.map(|unit| (unit.id.to_string(), unit.health.reason.clone().unwrap_or_default())).collect()
}

/// Four replicas of each GPU.
fn shared_by_four() -> Config {
    Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: false,
            fail_requests_greater_than_one: false,
            resources: vec![ReplicatedResource {
                name: "nvidia.com/gpu".into(),
                rename: None,
                devices: ReplicatedDevices::All,
                replicas: 4,
            }],
        }),
        ..Config::default()
    }
}

/// The list for kubelet: device IDs with their health.
fn reported(hardware: &Hardware, config: &Config) -> Vec<(String, bool)> {
    let inventory = offer::offer(hardware, config);
    let devices = inventory.devices.iter();
    devices.map(|device| (device.id.to_string(), device.health.healthy)).collect()
}
