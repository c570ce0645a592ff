//! GPUs that NVML lists and that do not do what they must: answer, and have their Xids heard. One failure may be chance; several in a
//! row, and nobody could tell whether the GPU works. Pure.

use std::collections::BTreeMap;

use gantry_topology::GpuUuid;

use crate::health::Loss;

/// Failures in a row, one at each look, after which a GPU is given out no more.
const PATIENCE: u32 = 3;

/// What a GPU must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Duty {
    /// Answer a question that every GPU can answer.
    Answer,
    /// Have its Xids heard.
    BeHeard,
}

/// The GPUs that have failed at a duty, how often in a row, and why the first time.
#[derive(Debug, Default)]
pub(super) struct Doubts(BTreeMap<GpuUuid, BTreeMap<Duty, (u32, String)>>);

impl Doubts {
    /// Takes in how a GPU did at one look: `failure` says why it did not do its duty.
    pub(super) fn look(&mut self, gpu: &GpuUuid, duty: Duty, failure: Option<String>) {
        match failure {
            Some(reason) => {
                let duties = self.0.entry(gpu.clone()).or_default();
                let (times, _) = duties.entry(duty).or_insert((0, reason));
                *times = times.saturating_add(1);
            }
            None => {
                if let Some(duties) = self.0.get_mut(gpu) {
                    duties.remove(&duty);
                }
            }
        }
    }

    /// A GPU is gone, or is another now: how it did before says nothing.
    pub(super) fn forget(&mut self, gpu: &GpuUuid) {
        self.0.remove(gpu);
    }

    /// The driver was loaded anew.
    pub(super) fn forget_all(&mut self) {
        self.0.clear();
    }

    /// Why a GPU may not be given out.
    pub(super) fn loss(&self, gpu: &GpuUuid) -> Option<Loss> {
        let mut duties = self.0.get(gpu)?.values();
        let (_, reason) = duties.find(|(times, _)| *times >= PATIENCE)?;
        Some(Loss {
            reason: reason.clone(),
            off_bus: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_of_one_kind_are_no_chance() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut doubts = Doubts::default();
        let mut look = |duty, failure: Option<&str>| {
            doubts.look(&gpu, duty, failure.map(str::to_owned));
            doubts.loss(&gpu).map(|loss| loss.reason)
        };
        for _ in 0..2 {
            assert_eq!(look(Duty::Answer, Some("silent")), None);
            assert_eq!(look(Duty::BeHeard, Some("deaf")), None);
        }
        assert_eq!(look(Duty::Answer, None), None);
        assert_eq!(
            look(Duty::BeHeard, Some("still deaf")),
            Some("deaf".to_owned()),
            "as it was first said"
        );
        assert_eq!(look(Duty::BeHeard, None), None);
    }
}
