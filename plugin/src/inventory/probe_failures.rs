//! Counts failures of probes on GPUs that NVML lists: queries and event registration. A single failure may be
//! chance; after several in a row the GPU counts as lost. Pure.

use std::collections::BTreeMap;

use gantry_topology::GpuUuid;

use crate::health::Loss;

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
