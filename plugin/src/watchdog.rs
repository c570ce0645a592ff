//! Monitors the NVML thread: a driver that hangs or fails at every call must show on the devices and in the
//! probes. Makes no NVML call and does not touch the thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::DeviceHealth;
use gantry_runtime::LogThrottle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::health::{Outage, OutageKind};
use crate::inventory::{Diagnoses, Hardware, Heartbeat, Marker};
use crate::observe::Observations;

/// Time limits after which NVML counts as hanging or failing.
#[derive(Debug, Clone, Copy)]
pub struct WatchdogTiming {
    /// Interval of checks.
    pub check: Duration,
    /// How long an NVML call may take. A driver without persistence needs seconds per GPU at the first call.
    pub silent_after: Duration,
    /// How long NVML may hang, or fail with the driver present, before liveness fails. A container can lose
    /// access to its devices while it runs, and only a new process gets it back.
    pub restart_after: Duration,
}

impl Default for WatchdogTiming {
    fn default() -> Self {
        Self {
            check: Duration::from_secs(5),
            silent_after: Duration::from_secs(60),
            restart_after: Duration::from_secs(300),
        }
    }
}

/// The monitored thread, and the outputs of the watchdog.
#[derive(Debug)]
pub(crate) struct Watchdog {
    /// Heartbeats of the thread.
    pub(crate) heartbeat: Heartbeat,
    /// Problems that the thread itself reports.
    pub(crate) diagnoses: Diagnoses,
    /// Overrides the reported problems while the thread is silent.
    pub(crate) marker: Marker,
    /// Where devices are published.
    pub(crate) publish: watch::Sender<Arc<Hardware>>,
    /// Probes and readiness.
    pub(crate) observed: Arc<Observations>,
    pub(crate) timing: WatchdogTiming,
}

/// State of NVML.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    Working,
    /// The thread reports the problem itself, on the devices too.
    Reported(Outage),
    /// The thread is silent.
    Silent(String),
}

impl Watchdog {
    /// Checks until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let mut diagnosis = self.diagnoses.diagnosis();
        let mut failing: Option<Instant> = None;
        let mut log = LogThrottle::default();
        loop {
            let outage = diagnosis.borrow_and_update().outage.clone();
            failing = failing_since(failing, outage.as_ref(), Instant::now());
            let silence = self.heartbeat.silence();
            let finding = self.finding(silence, outage);
            let lasts = silence.max(failing.map_or(Duration::ZERO, |since| since.elapsed()));
            let restart_after = self.heartbeat.has_panicked() || lasts >= self.timing.restart_after;
            if let Finding::Silent(reason) = &finding {
                if log.should_log(reason, Instant::now()) {
                    tracing::error!("{reason}");
                }
                self.publish.send_if_modified(|hardware| mark(hardware, reason));
                let machine = Arc::clone(&self.publish.borrow().machine);
                self.marker.mark(machine.gpus().iter(), reason);
                // Set after marking: the next heartbeat makes the thread publish again.
                self.heartbeat.mark_silent();
            }
            let (problem, driverless) = match finding {
                Finding::Working => (None, false),
                Finding::Reported(outage) => (Some(outage.reason), outage.kind != OutageKind::Failing),
                Finding::Silent(reason) => (Some(reason), false),
            };
            self.observed.nvml(problem, driverless, restart_after);
            let notices = diagnosis
                .borrow()
                .notices
                .iter()
                .map(|notice| format!("{}: {}", notice.gpu, notice.reason))
                .collect();
            self.observed.notices(notices);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(self.timing.check) => {}
                // The sender of the diagnosis may be gone; checks go on.
                Ok(()) = diagnosis.changed() => {}
            }
        }
    }

    fn finding(&self, silence: Duration, outage: Option<Outage>) -> Finding {
        if self.heartbeat.has_panicked() {
            return Finding::Silent("the NVML thread ended with a panic".to_owned());
        }
        if silence >= self.timing.silent_after {
            return Finding::Silent(hang(&self.heartbeat, self.timing.silent_after.as_secs()));
        }
        outage.map_or(Finding::Working, Finding::Reported)
    }
}

/// What hangs. Without persistence mode the driver initialises every GPU at the first call, which takes seconds for each.
fn hang(heartbeat: &Heartbeat, seconds: u64) -> String {
    let call = heartbeat.call();
    let name = call.map_or("a call".to_owned(), |call| call.to_string());
    if heartbeat.has_read() {
        return format!(
            "NVML hangs: {name} has not returned for more than {seconds} s; see dmesg for NVRM and Xid, and reboot the node if this lasts"
        );
    }
    let begins = if call.is_none_or(|call| call.is_initialisation()) {
        "the first initialisation"
    } else {
        "the first reading"
    };
    format!(
        "{begins} of NVML takes long: {name} has not returned for more than {seconds} s; the driver initialises each GPU now: turn \
         on persistence mode (nvidia-persistenced or nvidia-smi -pm 1); if this lasts, see dmesg"
    )
}

/// Since when NVML fails with the driver present. A missing driver or library can appear at any time for this
/// process as well as for a new one, so it does not count.
fn failing_since(before: Option<Instant>, outage: Option<&Outage>, now: Instant) -> Option<Instant> {
    outage.filter(|outage| outage.kind == OutageKind::Failing)?;
    before.or(Some(now))
}

/// Marks every unit as unreachable. True if something changed.
fn mark(hardware: &mut Arc<Hardware>, reason: &str) -> bool {
    let health = DeviceHealth { healthy: false, reason: Some(reason.to_owned()) };
    if hardware.units.iter().all(|unit| unit.health == health) {
        return false;
    }
    for unit in &mut Arc::make_mut(hardware).units {
        unit.health = health.clone();
    }
    true
}

#[cfg(test)]
mod tests {
    use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

    use super::*;

    fn timing(silent_after: Duration, restart_after: Duration) -> WatchdogTiming {
        WatchdogTiming { check: Duration::from_millis(5), silent_after, restart_after }
    }

    const LONG: Duration = Duration::from_secs(3600);

    /// A node with two GPUs, a watchdog over it, and what it published.
    struct Node {
        heartbeat: Heartbeat,
        hardware: watch::Receiver<Arc<Hardware>>,
        observed: Arc<Observations>,
        shutdown: CancellationToken,
    }

    impl Node {
        fn new(timing: WatchdogTiming, diagnoses: Diagnoses) -> Self {
            let gpu = |index| Gpu { index, uuid: format!("GPU-{index}").parse().ok(), ..Gpu::default() };
            let parts = MachineParts {
                gpus: vec![gpu(0), gpu(1)],
                paths: PathMatrix::from_fn(2, |_, _| PathClass::Sys),
                ..MachineParts::default()
            };
            let (publish, hardware) = Hardware::channel();
            publish.send_replace(Arc::new(Hardware::of(Arc::new(Machine::new(parts).unwrap()))));
            let (heartbeat, observed, shutdown) =
                (Heartbeat::new(), Arc::<Observations>::default(), CancellationToken::new());
            heartbeat.mark_read();
            let (diagnoses, marker) = diagnoses.with_marker();
            let watchdog = Watchdog {
                heartbeat: heartbeat.clone(),
                diagnoses,
                marker,
                publish,
                observed: Arc::clone(&observed),
                timing,
            };
            tokio::spawn(watchdog.run(shutdown.clone()));
            Self { heartbeat, hardware, observed, shutdown }
        }

        async fn until(&self, readiness: impl FnMut(&crate::observe::Readiness) -> bool) {
            self.observed.changes().wait_for(readiness).await.unwrap();
        }

        fn reasons(&self) -> Vec<Option<String>> {
            let units = &self.hardware.borrow().units;
            units.iter().map(|unit| unit.health.reason.clone()).collect()
        }
    }

    #[tokio::test]
    async fn hanging_driver_marks_all_devices_and_readiness() {
        let mut node = Node::new(timing(Duration::from_millis(20), LONG), Diagnoses::none());
        node.until(|now| now.nvml.is_some()).await;
        let reason = node.observed.readiness().missing()[0].clone();
        insta::assert_snapshot!(reason, @"NVML hangs: a call has not returned for more than 0 s; see dmesg for NVRM and Xid, and reboot the node if this lasts");
        assert!(!node.observed.readiness().dead, "it may come back");
        assert_eq!(node.reasons(), vec![Some(reason); 2]);
        assert!(node.heartbeat.beat(), "the thread has to publish again");
        // Published once, not at every check.
        node.hardware.mark_unchanged();
        // One heartbeat is not enough: on a busy machine the next check may come after `silent_after`.
        let beating = async {
            loop {
                node.heartbeat.beat();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            () = node.until(|now| now.nvml.is_none()) => {}
            () = beating => {}
        }
        assert!(!node.hardware.has_changed().unwrap());
        node.shutdown.cancel();
    }

    /// Without persistence mode the first initialisation takes seconds per GPU.
    #[test]
    fn slow_start_is_named_with_the_remedy() {
        insta::assert_snapshot!(hang(&Heartbeat::new(), 60), @"the first initialisation of NVML takes long: a call has not returned for more than 60 s; the driver initialises each GPU now: turn on persistence mode (nvidia-persistenced or nvidia-smi -pm 1); if this lasts, see dmesg");
    }

    #[tokio::test]
    async fn long_hang_fails_liveness() {
        let silent_after = Duration::from_millis(10);
        let node = Node::new(timing(silent_after, 2 * silent_after), Diagnoses::none());
        node.until(|now| now.dead).await;
        assert!(node.observed.readiness().nvml.is_some());
    }

    #[tokio::test]
    async fn long_nvml_failure_fails_liveness_unless_driver_is_gone() {
        let failing = outage(OutageKind::Failing);
        let node = Node::new(timing(LONG, Duration::from_millis(20)), Diagnoses::with_outage(failing));
        node.until(|now| now.dead).await;
        assert_eq!(node.observed.readiness().missing()[0], "NVML fails: no permission");
        assert_eq!(node.reasons(), [None, None], "the owner marks the devices itself");
        assert!(!node.observed.readiness().is_settled());

        let (before, now) = (Instant::now(), Instant::now());
        let failing = outage(OutageKind::Failing);
        assert_eq!(failing_since(None, Some(&failing), now), Some(now));
        assert_eq!(failing_since(Some(before), Some(&failing), now), Some(before));
        for waited_for in [OutageKind::DriverGone, OutageKind::LibraryMissing] {
            assert_eq!(failing_since(Some(before), Some(&outage(waited_for)), now), None);
        }
        assert_eq!(failing_since(Some(before), None, now), None);
    }

    #[tokio::test]
    async fn missing_driver_keeps_liveness() {
        for kind in [OutageKind::DriverGone, OutageKind::LibraryMissing] {
            let node = Node::new(timing(LONG, LONG), Diagnoses::with_outage(outage(kind)));
            node.until(|now| now.nvml.is_some()).await;
            let readiness = node.observed.readiness();
            assert!(!readiness.missing().is_empty() && readiness.is_settled(), "{kind:?}");
        }
    }

    fn outage(kind: OutageKind) -> Outage {
        Outage { reason: "NVML fails: no permission".into(), kind }
    }

    #[tokio::test]
    async fn panicked_nvml_thread_fails_liveness() {
        let node = Node::new(timing(LONG, LONG), Diagnoses::none());
        node.heartbeat.panics();
        node.until(|now| now.dead).await;
        insta::assert_snapshot!(node.reasons()[0].as_ref().unwrap(), @"the NVML thread ended with a panic");
    }
}
