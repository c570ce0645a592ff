//! Looks after the thread that owns NVML: a driver that does not answer, or fails at every call, must show on the devices and in the
//! probes. It asks NVML nothing and does nothing to the thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::DeviceHealth;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::health::{Outage, OutageKind};
use crate::inventory::{Diagnoses, Hardware, Heartbeat, Marker};
use crate::observe::Observed;

/// When what is concluded of an NVML that hangs or fails.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Between two looks.
    pub look: Duration,
    /// NVML may be silent for so long. A driver without persistence takes seconds for each GPU when it is first asked.
    pub silent: Duration,
    /// NVML may be silent, or fail though the driver is there, for so long before a new process is worth a try: what a container may
    /// open can be taken from it while it runs, and only a new one gets it back.
    pub dead: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(5),
            silent: Duration::from_secs(60),
            dead: Duration::from_secs(300),
        }
    }
}

/// The thread looked after, and who hears of it.
#[derive(Debug)]
pub(crate) struct Watchdog {
    /// Its beats.
    pub(crate) heartbeat: Heartbeat,
    /// What it says is wrong.
    pub(crate) diagnoses: Diagnoses,
    /// Where else that is told of which the thread says nothing.
    pub(crate) marker: Marker,
    /// Where devices are published.
    pub(crate) publish: watch::Sender<Arc<Hardware>>,
    /// The probes.
    pub(crate) observed: Arc<Observed>,
    /// When what is concluded.
    pub(crate) patience: Patience,
}

/// How NVML stands.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    Well,
    /// The thread says itself what is wrong, on the devices too.
    Told(Outage),
    /// The thread says nothing.
    Silent(String),
}

impl Watchdog {
    /// Looks until `shutdown`.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let mut diagnosis = self.diagnoses.diagnosis();
        let mut failing: Option<Instant> = None;
        loop {
            let outage = diagnosis.borrow_and_update().outage.clone();
            failing = failing_since(failing, outage.as_ref(), Instant::now());
            let silence = self.heartbeat.silence();
            let finding = self.finding(silence, outage);
            let lasts = silence.max(failing.map_or(Duration::ZERO, |since| since.elapsed()));
            let dead = self.heartbeat.has_panicked() || lasts >= self.patience.dead;
            if let Finding::Silent(reason) = &finding {
                self.publish.send_if_modified(|hardware| mark(hardware, reason));
                let machine = Arc::clone(&self.publish.borrow().machine);
                self.marker.mark(machine.gpus().iter(), reason);
                // After that: whoever beats from now on sets it right.
                self.heartbeat.give_up();
            }
            let (problem, driverless) = match finding {
                Finding::Well => (None, false),
                Finding::Told(outage) => (Some(outage.reason), outage.kind != OutageKind::Failing),
                Finding::Silent(reason) => (Some(reason), false),
            };
            self.observed.nvml(problem, driverless, dead);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(self.patience.look) => {}
                // The owner's end may be gone; the clock goes on.
                Ok(()) = diagnosis.changed() => {}
            }
        }
    }

    fn finding(&self, silence: Duration, outage: Option<Outage>) -> Finding {
        if self.heartbeat.has_panicked() {
            return Finding::Silent(
                "the thread that asks NVML has ended by an error of this program".to_owned(),
            );
        }
        if silence >= self.patience.silent {
            let seconds = self.patience.silent.as_secs();
            return Finding::Silent(format!("NVML hangs: no answer for more than {seconds} s"));
        }
        outage.map_or(Finding::Well, Finding::Told)
    }
}

/// Since when NVML fails though the driver is there. One that is gone comes back by itself, to this process as to a new one, and so
/// does a library that is not installed.
fn failing_since(before: Option<Instant>, outage: Option<&Outage>, now: Instant) -> Option<Instant> {
    outage.filter(|outage| outage.kind == OutageKind::Failing)?;
    before.or(Some(now))
}

/// Marks every unit as out of reach. True: something changed.
fn mark(hardware: &mut Arc<Hardware>, reason: &str) -> bool {
    let health = DeviceHealth {
        healthy: false,
        reason: Some(reason.to_owned()),
    };
    if hardware.units.iter().all(|unit| unit.health == health) {
        return false;
    }
    tracing::error!("every device is unhealthy: {reason}");
    for unit in &mut Arc::make_mut(hardware).units {
        unit.health = health.clone();
    }
    true
}

#[cfg(test)]
mod tests {
    use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

    use super::*;

    fn patience(silent: Duration, dead: Duration) -> Patience {
        Patience {
            look: Duration::from_millis(5),
            silent,
            dead,
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    /// A node with two GPUs, a watchdog over it, and what it has told.
    struct Node {
        heartbeat: Heartbeat,
        hardware: watch::Receiver<Arc<Hardware>>,
        observed: Arc<Observed>,
        shutdown: CancellationToken,
    }

    impl Node {
        fn new(patience: Patience, diagnoses: Diagnoses) -> Self {
            let gpu = |index| Gpu {
                index,
                uuid: format!("GPU-{index}").parse().ok(),
                ..Gpu::default()
            };
            let parts = MachineParts {
                gpus: vec![gpu(0), gpu(1)],
                paths: PathMatrix::from_fn(2, |_, _| PathClass::Sys),
                ..MachineParts::default()
            };
            let (publish, hardware) = Hardware::channel();
            publish.send_replace(Arc::new(Hardware::of(Arc::new(Machine::new(parts).unwrap()))));
            let (heartbeat, observed, shutdown) = (
                Heartbeat::new(),
                Arc::<Observed>::default(),
                CancellationToken::new(),
            );
            let (diagnoses, marker) = diagnoses.with_marker();
            let watchdog = Watchdog {
                heartbeat: heartbeat.clone(),
                diagnoses,
                marker,
                publish,
                observed: Arc::clone(&observed),
                patience,
            };
            tokio::spawn(watchdog.run(shutdown.clone()));
            Self {
                heartbeat,
                hardware,
                observed,
                shutdown,
            }
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
    async fn a_driver_that_hangs_shows_on_every_device_and_in_the_probes() {
        let mut node = Node::new(patience(Duration::from_millis(20), LONG), Diagnoses::of_nobody());
        node.until(|now| now.nvml.is_some()).await;
        let reason = "NVML hangs: no answer for more than 0 s".to_owned();
        assert_eq!(node.observed.readiness().missing()[0], reason);
        assert!(!node.observed.readiness().dead, "it may come back");
        assert_eq!(node.reasons(), vec![Some(reason); 2]);
        assert!(node.heartbeat.beat(), "the thread has to publish what it knows");
        // Told once, not at every look.
        node.hardware.mark_unchanged();
        node.until(|now| now.nvml.is_none()).await;
        assert!(!node.hardware.has_changed().unwrap());
        node.shutdown.cancel();
    }

    #[tokio::test]
    async fn one_that_hangs_for_minutes_is_worth_a_new_process() {
        let silent = Duration::from_millis(10);
        let node = Node::new(patience(silent, 2 * silent), Diagnoses::of_nobody());
        node.until(|now| now.dead).await;
        assert!(node.observed.readiness().nvml.is_some());
    }

    #[tokio::test]
    async fn nvml_that_fails_for_minutes_too_but_a_driver_that_is_gone_is_waited_for() {
        let failing = outage(OutageKind::Failing);
        let node = Node::new(
            patience(LONG, Duration::from_millis(20)),
            Diagnoses::with_outage(failing),
        );
        node.until(|now| now.dead).await;
        assert_eq!(
            node.observed.readiness().missing()[0],
            "NVML fails: no permission"
        );
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
    async fn without_a_driver_no_process_could_do_more() {
        for kind in [OutageKind::DriverGone, OutageKind::LibraryMissing] {
            let node = Node::new(patience(LONG, LONG), Diagnoses::with_outage(outage(kind)));
            node.until(|now| now.nvml.is_some()).await;
            let readiness = node.observed.readiness();
            assert!(
                !readiness.missing().is_empty() && readiness.is_settled(),
                "{kind:?}"
            );
        }
    }

    fn outage(kind: OutageKind) -> Outage {
        Outage {
            reason: "NVML fails: no permission".into(),
            kind,
        }
    }

    #[tokio::test]
    async fn a_thread_that_has_panicked_is_no_life() {
        let node = Node::new(patience(LONG, LONG), Diagnoses::of_nobody());
        node.heartbeat.panics();
        node.until(|now| now.dead).await;
        assert!(
            node.reasons()[0]
                .as_ref()
                .unwrap()
                .contains("error of this program")
        );
    }
}
