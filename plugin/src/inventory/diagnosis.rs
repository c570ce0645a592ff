//! Problems of the node's GPUs, which the NVML thread publishes beside the hardware, and the commands that it
//! accepts. Values and channels only; the health module judges.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use gantry_api::{Cordons, GpuClock, GpuEvidence, GpuFault};
use gantry_topology::{Gpu, GpuUuid};
use tokio::sync::watch;

use super::LayoutRequest;
use crate::health::{Cause, ClearedFault, Extent, GpuName, Loss, Outage, Trouble};

/// All problems at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// Whether the machine was read at least once. Before that, "no problem" means "unknown".
    pub known: bool,
    /// Why no GPU can be queried; `None` while they can.
    pub outage: Option<Outage>,
    /// Problems, by GPU and part of it.
    pub troubles: Vec<Trouble>,
    /// What is wrong with GPUs without making them unhealthy.
    pub notices: Vec<Trouble>,
    /// The GPUs that the operator cordoned, each with the reason.
    pub cordoned: BTreeMap<GpuUuid, String>,
    /// The faults in quarantine, in stored form.
    pub faults: Vec<StoredFault>,
    /// Evidence for the replacement of boards, in stored form. Repeated Xids are added with a delay.
    pub evidence: Vec<GpuEvidence>,
    /// The clocks of the GPUs that compute.
    pub clocks: Vec<GpuClock>,
    /// The latest cleared faults, oldest first, numbered from 1: at most [`Diagnosis::MAX_ENDED`].
    pub ended: Vec<(u64, ClearedFault)>,
    /// Whether the faults of an earlier run were adopted or are unavailable. Before that, `faults` is
    /// incomplete.
    pub adopted: bool,
    /// How many times a quarantine was lifted.
    pub lifts: u64,
    /// Whether NVML is closed on request, or the GPUs were not read since.
    pub nvml_closed: bool,
}

impl Diagnosis {
    /// Limit of kept ended faults.
    pub const MAX_ENDED: usize = 32;
}

/// A [`GpuFault`] with `Eq`.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredFault(pub GpuFault);

// It contains no floating-point number.
impl Eq for StoredFault {}

/// A command to the NVML thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Adopt the faults of an earlier run, the cordons that were set before this one, and the evidence.
    Adopt(Vec<GpuFault>, Cordons, Vec<GpuEvidence>),
    /// These GPUs are cordoned now.
    Cordon(Cordons),
    /// End the quarantine of these GPUs, as the operator requested.
    Lift(Lift),
    /// No pod may get these GPUs, for the reason given.
    Close(BTreeMap<GpuUuid, String>),
    /// Bring the GPUs to a MIG layout.
    Layout(LayoutRequest),
    /// Keep NVML closed for this time; `None`: open it again.
    KeepClosed(Option<Duration>),
}

/// The GPUs of a lifted quarantine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lift {
    All,
    Gpus(BTreeSet<GpuUuid>),
}

/// A word that is not a GPU UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is not a GPU UUID; write all, or UUIDs such as GPU-5ab8..., separated by commas")]
pub struct LiftError {
    pub word: String,
}

impl Lift {
    /// Whether `gpu` is included.
    pub fn includes(&self, gpu: &GpuUuid) -> bool {
        match self {
            Self::All => true,
            Self::Gpus(gpus) => gpus.contains(gpu),
        }
    }
}

impl std::str::FromStr for Lift {
    type Err = LiftError;

    fn from_str(text: &str) -> Result<Self, LiftError> {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        if words.clone().any(|word| word.eq_ignore_ascii_case("all")) {
            return Ok(Self::All);
        }
        let gpu = |word: &str| word.parse().map_err(|_| LiftError { word: word.to_owned() });
        let gpus: BTreeSet<GpuUuid> = words.map(gpu).collect::<Result<_, _>>()?;
        if gpus.is_empty() {
            return Err(LiftError { word: String::new() });
        }
        Ok(Self::Gpus(gpus))
    }
}

/// Reads the diagnosis and sends commands to the NVML thread. Clones share both.
#[derive(Debug, Clone)]
pub struct Diagnoses {
    diagnosis: watch::Receiver<Arc<Diagnosis>>,
    commands: Sender<Command>,
}

/// Overrides the diagnosis while the NVML thread is silent; the thread's next update replaces it. Clones are
/// equivalent.
#[derive(Debug, Clone)]
pub struct Marker(watch::Sender<Arc<Diagnosis>>);

impl Marker {
    /// Reports for all these GPUs that NVML fails. Other problems are unknown meanwhile; faults stay.
    pub fn mark<'a>(&self, gpus: impl Iterator<Item = &'a Gpu>, reason: &str) {
        let troubles: Vec<Trouble> = gpus
            .map(|gpu| Trouble {
                gpu: gpu.uuid.clone().map_or(GpuName::Index(gpu.index), GpuName::Uuid),
                extent: Extent::Gpu,
                cause: Cause::Nvml,
                xid: None,
                reason: reason.to_owned(),
            })
            .collect();
        self.0.send_if_modified(|diagnosis| {
            let changed = diagnosis.troubles != troubles;
            if changed {
                Arc::make_mut(diagnosis).troubles = troubles;
            }
            changed
        });
    }
}

/// The NVML thread's end.
#[derive(Debug)]
pub(super) struct DiagnosesEnd {
    pub(super) diagnosis: watch::Sender<Arc<Diagnosis>>,
    pub(super) commands: Receiver<Command>,
}

impl DiagnosesEnd {
    pub(super) fn marker(&self) -> Marker {
        Marker(self.diagnosis.clone())
    }
}

impl Diagnoses {
    pub(super) fn pair() -> (Self, DiagnosesEnd) {
        let (publish, diagnosis) = watch::channel(Arc::<Diagnosis>::default());
        let (commands, received) = channel();
        let end = DiagnosesEnd { diagnosis: publish, commands: received };
        (Self { diagnosis, commands }, end)
    }

    /// Diagnoses without a thread, and the marker that changes them.
    #[cfg(test)]
    pub(crate) fn with_marker(self) -> (Self, Marker) {
        let marker = Marker(watch::channel(self.now()).0);
        let diagnosis = marker.0.subscribe();
        (Self { diagnosis, ..self }, marker)
    }

    /// Diagnoses of an inventory supplied by the caller: without a thread and always healthy.
    pub fn none() -> Self {
        let (diagnoses, end) = Self::pair();
        end.diagnosis.send_replace(Arc::new(Diagnosis {
            known: true,
            adopted: true,
            ..Diagnosis::default()
        }));
        diagnoses
    }

    /// Diagnoses of a thread that cannot query any GPU.
    #[cfg(test)]
    pub(crate) fn with_outage(outage: Outage) -> Self {
        let (diagnoses, end) = Self::pair();
        end.diagnosis.send_replace(Arc::new(Diagnosis {
            known: true,
            outage: Some(outage),
            ..Diagnosis::default()
        }));
        diagnoses
    }

    /// The diagnosis as a watch channel.
    pub fn diagnosis(&self) -> watch::Receiver<Arc<Diagnosis>> {
        self.diagnosis.clone()
    }

    /// The current diagnosis.
    pub fn now(&self) -> Arc<Diagnosis> {
        Arc::clone(&self.diagnosis.borrow())
    }

    /// Waits until the faults of an earlier run were adopted, at most `timeout`.
    pub async fn adopted(&self, timeout: Duration) {
        let mut diagnosis = self.diagnosis();
        let adopted = diagnosis.wait_for(|now| now.adopted);
        if !matches!(tokio::time::timeout(timeout, adopted).await, Ok(Ok(_))) {
            tracing::debug!("the faults of an earlier run are not known yet");
        }
    }

    /// Hands over the faults and the evidence of an earlier run and the cordons, possibly none.
    pub fn adopt(&self, faults: Vec<GpuFault>, cordons: Cordons, evidence: Vec<GpuEvidence>) {
        self.send(Command::Adopt(faults, cordons, evidence));
    }

    /// Sets the cordoned GPUs.
    pub fn cordon(&self, cordons: Cordons) {
        self.send(Command::Cordon(cordons));
    }

    /// Ends the quarantine of these GPUs.
    pub fn lift(&self, lift: Lift) {
        self.send(Command::Lift(lift));
    }

    /// Sets the GPUs that no pod may get while their MIG layout is about to change, each with the reason. Pods that hold
    /// one keep it.
    pub fn close(&self, gpus: BTreeMap<GpuUuid, String>) {
        self.send(Command::Close(gpus));
    }

    /// Requests a MIG layout. A later request replaces one that NVML has not served yet.
    pub fn request_layout(&self, request: LayoutRequest) {
        self.send(Command::Layout(request));
    }

    /// Keeps NVML closed for this time, so that a GPU can be reset. `None` opens it again.
    pub fn keep_nvml_closed(&self, time: Option<Duration>) {
        self.send(Command::KeepClosed(time));
    }

    fn send(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::debug!("the NVML thread has stopped");
        }
    }
}

/// Consecutive failures, one per check, after which a GPU counts as lost.
const MAX_FAILURES: u32 = 3;

/// A check that every usable GPU passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Probe {
    /// A query that every GPU supports.
    Query,
    /// Registration for Xid events.
    EventRegistration,
}

/// Consecutive failures by GPU and probe, with the reason of the first one.
#[derive(Debug, Default)]
pub(super) struct ProbeFailures(BTreeMap<GpuUuid, BTreeMap<Probe, (u32, String)>>);

impl ProbeFailures {
    /// Records the result of a probe; `failure` is the reason if it failed.
    pub(super) fn record(&mut self, gpu: &GpuUuid, probe: Probe, failure: Option<String>) {
        match failure {
            Some(reason) => {
                let probes = self.0.entry(gpu.clone()).or_default();
                let (times, _) = probes.entry(probe).or_insert((0, reason));
                *times = times.saturating_add(1);
            }
            None => {
                if let Some(probes) = self.0.get_mut(gpu) {
                    probes.remove(&probe);
                }
            }
        }
    }

    /// Forgets a GPU that is gone or was replaced.
    pub(super) fn clear(&mut self, gpu: &GpuUuid) {
        self.0.remove(gpu);
    }

    /// Forgets all GPUs, after a driver reload.
    pub(super) fn clear_all(&mut self) {
        self.0.clear();
    }

    /// Why the GPU counts as lost, if it does.
    pub(super) fn loss(&self, gpu: &GpuUuid) -> Option<Loss> {
        let mut probes = self.0.get(gpu)?.values();
        let (_, reason) = probes.find(|(times, _)| *times >= MAX_FAILURES)?;
        Some(Loss { reason: reason.clone(), off_bus: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lift_names_gpus_or_all() {
        assert_eq!("all".parse(), Ok(Lift::All));
        assert_eq!("GPU-a, ALL".parse(), Ok(Lift::All));
        let two: Lift = "GPU-a, GPU-b".parse().unwrap();
        assert!(two.includes(&"GPU-a".parse().unwrap()) && !two.includes(&"GPU-c".parse().unwrap()));
        let error = "GPU-a,3".parse::<Lift>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"3\" is not a GPU UUID; write all, or UUIDs such as GPU-5ab8..., separated by commas"
        );
        assert!("".parse::<Lift>().is_err());
    }

    #[test]
    fn consecutive_probe_failures_mark_gpu_lost() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut probe_failures = ProbeFailures::default();
        let mut check = |probe, failure: Option<&str>| {
            probe_failures.record(&gpu, probe, failure.map(str::to_owned));
            probe_failures.loss(&gpu).map(|loss| loss.reason)
        };
        for _ in 0..2 {
            assert_eq!(check(Probe::Query, Some("silent")), None);
            assert_eq!(check(Probe::EventRegistration, Some("unregistered")), None);
        }
        assert_eq!(check(Probe::Query, None), None);
        assert_eq!(
            check(Probe::EventRegistration, Some("still unregistered")),
            Some("unregistered".to_owned()),
            "the first reason stands"
        );
        assert_eq!(check(Probe::EventRegistration, None), None);
    }
}
