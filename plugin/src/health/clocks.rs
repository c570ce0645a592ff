//! How fast GPUs run: samples of their clocks and power, averaged over a minute and rounded, so that the GpuNode changes seldom. Pure.

use std::collections::BTreeMap;

use gantry_api::GpuClock;
use gantry_api::gpunode::CLOCK_LIMITS;
use gantry_topology::GpuUuid;

/// The rounding of a clock and of a power draw, in percent.
const STEP: u64 = 10;
/// How far a mean must be from the published value for another one to be published, in percent.
const HYSTERESIS: u64 = 8;

/// The clock of a GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockSample {
    /// Clock of the multiprocessors in percent of the highest one.
    pub sm_percent: u8,
    /// Power draw in percent of the enforced limit; `None` if NVML does not report it.
    pub power_percent: Option<u8>,
    /// Which of [`CLOCK_LIMITS`] hold it down.
    pub limits: [bool; CLOCK_LIMITS.len()],
}

/// The clocks of all GPUs.
#[derive(Debug, Clone, Default)]
pub struct ClockLog {
    windows: BTreeMap<GpuUuid, Window>,
    entries: BTreeMap<GpuUuid, GpuClock>,
}

/// The samples of one GPU since the last entry.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    idle: u64,
    busy: u64,
    percents: u64,
    /// Samples with a power draw, and their sum.
    metered: u64,
    powers: u64,
    limits: [u64; CLOCK_LIMITS.len()],
}

impl ClockLog {
    /// Records a sample; `None` for a GPU that computes nothing, with a clock that proves nothing.
    pub fn record(&mut self, gpu: &GpuUuid, sample: Option<ClockSample>) {
        let window = self.windows.entry(gpu.clone()).or_default();
        let Some(sample) = sample else {
            window.idle += 1;
            return;
        };
        window.busy += 1;
        window.percents += u64::from(sample.sm_percent);
        if let Some(percent) = sample.power_percent {
            window.metered += 1;
            window.powers += u64::from(percent);
        }
        for (count, holds) in window.limits.iter_mut().zip(sample.limits) {
            *count += u64::from(holds);
        }
    }

    /// Replaces the entries by those of the samples since the last call. A GPU without samples, or idle for most of the
    /// time, has none.
    pub fn renew(&mut self) {
        let before = std::mem::take(&mut self.entries);
        for (gpu, window) in std::mem::take(&mut self.windows) {
            if let Some(entry) = window.entry(&gpu, before.get(&gpu)) {
                self.entries.insert(gpu, entry);
            }
        }
    }

    /// The entries, by GPU.
    pub fn entries(&self) -> Vec<GpuClock> {
        self.entries.values().cloned().collect()
    }
}

impl Window {
    fn entry(self, gpu: &GpuUuid, before: Option<&GpuClock>) -> Option<GpuClock> {
        if self.busy <= self.idle {
            return None;
        }
        let limits = CLOCK_LIMITS.iter().zip(self.limits).filter(|(limit, count)| {
            let was_there = before.is_some_and(|before| before.limits.iter().any(|known| known == *limit));
            // One that comes and goes around the half does not change the entry each time.
            count * if was_there { 4 } else { 2 } > self.busy
        });
        Some(GpuClock {
            gpu: gpu.to_string(),
            sm_percent: step(self.percents / self.busy, before.map(|before| before.sm_percent)),
            power_percent: self
                .powers
                .checked_div(self.metered)
                .map(|mean| step(mean, before.and_then(|before| before.power_percent))),
            limits: limits.map(|(limit, _)| (*limit).to_owned()).collect(),
        })
    }
}

/// The published value for a mean: the known one, or the nearest step if that is too far away.
fn step(mean: u64, known: Option<u8>) -> u8 {
    let rounded = u8::try_from((mean + STEP / 2) / STEP * STEP).unwrap_or(100).min(100);
    known.filter(|known| mean.abs_diff(u64::from(*known)) < HYSTERESIS).unwrap_or(rounded)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: [bool; CLOCK_LIMITS.len()] = [false; CLOCK_LIMITS.len()];

    /// The entry of one GPU after a minute of these samples.
    fn after(log: &mut ClockLog, samples: &[Option<ClockSample>]) -> Option<(u8, Vec<String>)> {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        samples.iter().for_each(|sample| log.record(&gpu, *sample));
        log.renew();
        log.entries().pop().map(|entry| (entry.sm_percent, entry.limits))
    }

    fn at(sm_percent: u8) -> Option<ClockSample> {
        Some(ClockSample { sm_percent, power_percent: None, limits: NONE })
    }

    #[test]
    fn clock_is_mean_of_a_minute_in_steps() {
        let mut log = ClockLog::default();
        assert_eq!(after(&mut log, &[at(100), at(50)]), Some((80, vec![])));
        assert_eq!(after(&mut log, &[at(100)]), Some((100, vec![])));
    }

    /// Otherwise each node would be written each minute.
    #[test]
    fn clock_between_two_steps_changes_nothing() {
        let mut log = ClockLog::default();
        for percent in [80, 74, 86, 75, 85] {
            assert_eq!(after(&mut log, &[at(percent)]), Some((80, vec![])), "{percent}");
        }
        assert_eq!(after(&mut log, &[at(71)]), Some((70, vec![])));
    }

    #[test]
    fn idle_or_unread_gpu_has_no_clock() {
        let mut log = ClockLog::default();
        assert_eq!(after(&mut log, &[at(20), None]), None);
        assert_eq!(after(&mut log, &[at(100), at(100), None]), Some((100, vec![])));
        assert_eq!(after(&mut log, &[]), None);
    }

    /// A GPU without a meter has no power, and one that comes and goes changes the entry no more often than a clock.
    #[test]
    fn power_is_mean_of_its_samples_in_steps() {
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let mut log = ClockLog::default();
        let mut power = |samples: &[Option<u8>]| {
            for power_percent in samples {
                log.record(
                    &gpu,
                    Some(ClockSample { sm_percent: 100, power_percent: *power_percent, limits: NONE }),
                );
            }
            log.renew();
            log.entries().pop().and_then(|entry| entry.power_percent)
        };
        assert_eq!(power(&[None]), None);
        assert_eq!(power(&[Some(70), Some(90), None]), Some(80));
        assert_eq!(power(&[Some(87)]), Some(80));
        assert_eq!(power(&[Some(89)]), Some(90));
    }

    #[test]
    fn limit_is_named_if_it_held_most_of_the_time() {
        let mut log = ClockLog::default();
        let limits = [true, false, false, false, false];
        let capped = Some(ClockSample { sm_percent: 90, power_percent: None, limits });
        assert_eq!(after(&mut log, &[capped, at(90)]), Some((90, vec![])));
        let named = Some((90, vec!["power-cap".to_owned()]));
        assert_eq!(after(&mut log, &[capped, capped, at(90)]), named);
        assert_eq!(after(&mut log, &[capped, at(90), at(90)]), named);
        assert_eq!(after(&mut log, &[at(90)]), Some((90, vec![])));
    }

    proptest! {
        #[test]
        fn entry_is_a_step_near_the_mean(
            minutes in prop::collection::vec(prop::collection::vec(prop::option::of(0..=100u8), 1..9), 1..9),
        ) {
            let mut log = ClockLog::default();
            for minute in minutes {
                let samples: Vec<_> = minute.iter().map(|percent| percent.and_then(at)).collect();
                let busy: Vec<f64> = minute.iter().flatten().map(|percent| f64::from(*percent)).collect();
                match after(&mut log, &samples) {
                    None => prop_assert!(busy.len() * 2 <= minute.len()),
                    Some((percent, _)) => {
                        prop_assert!(percent % 10 == 0 && percent <= 100);
                        let mean = busy.iter().sum::<f64>() / busy.len() as f64;
                        prop_assert!((mean - f64::from(percent)).abs() < 9.0, "{mean} {percent}");
                    }
                }
            }
        }
    }
}
