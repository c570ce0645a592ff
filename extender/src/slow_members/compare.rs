//! Which members of a gang are slow. Each GPU of a member is compared with the medians of the GPUs of the same model that the
//! other members hold. A member is slow if a GPU of it stands out:
//!
//! - its clock is [`FAR`] percent of the highest clock or more below the median, or
//! - its clock is [`NEAR`] percent or more below it, and its power is [`POWER_NEAR`] percent of the limit below the median, or
//!   something limits the clock, or
//! - its power is [`POWER_FAR`] percent of the limit or more below the median, or
//! - the hardware slows it down, whatever the clock: a clock is a mean of a minute.
//!
//! A limit counts if less than half of those GPUs have it. So no member is slow if all are equally slow, and none if most of
//! the others are as slow.

use std::collections::BTreeSet;
use std::fmt;

use gantry_api::NodeName;

use super::clocks::Clock;

/// How far below the median a clock without a cause must be, in percent of the highest clock. Clocks are reported in
/// steps of 10.
const FAR: u8 = 20;
/// The same for a clock with a cause that stands out.
const NEAR: u8 = 10;
/// How far below the median a power draw must be without a low clock, in percent of the limit. Members with different work
/// draw different power.
const POWER_FAR: u8 = 40;
/// The same for a power draw that explains a low clock.
const POWER_NEAR: u8 = 20;
/// The limits that are a slowdown by the hardware. Software reaches the others in normal use.
const HARDWARE: [&str; 3] = ["hw-thermal", "hw-power-brake", "hw-slowdown"];

/// A GPU of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuSpeed {
    /// Its node.
    pub(crate) node: NodeName,
    /// Its clock.
    pub(crate) clock: Clock,
}

/// What stands out of a slow member. The worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sign {
    Clock,
    Throttle,
    Power,
}

impl Sign {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Clock, Self::Throttle, Self::Power];

    /// The label's value.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Clock => "clock",
            Self::Throttle => "throttle",
            Self::Power => "power",
        }
    }
}

/// Why a member is slow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlowFinding<'g> {
    /// The GPU that stands out most.
    pub(crate) gpu: &'g GpuSpeed,
    /// What stands out.
    pub(crate) sign: Sign,
    /// The median clock of the other members' GPUs, in percent.
    pub(crate) median: u8,
    /// The power of the GPU and the median of the others, if the power stands out.
    pub(crate) power: Option<(u8, u8)>,
    /// What limits the GPU and less than half of the others.
    pub(crate) limits: Vec<&'g str>,
}

impl fmt::Display for SlowFinding<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu: GpuSpeed { node, clock }, median, power, limits, .. } = self;
        write!(
            f,
            "GPU {} of {node} runs at {} % of its highest clock, the other members at {median} %",
            clock.index, clock.percent
        )?;
        if let Some((own, others)) = power {
            write!(f, "; it draws {own} % of its power limit, they {others} %")?;
        }
        match limits[..] {
            [] => Ok(()),
            _ => write!(f, "; limited by {}", limits.join(", ")),
        }
    }
}

/// For each member, by the GPUs that it holds, why it is slow.
pub(crate) fn slow<'g>(members: &[&'g [GpuSpeed]]) -> Vec<Option<SlowFinding<'g>>> {
    let judge = |(at, member): (usize, &&'g [GpuSpeed])| {
        let models: BTreeSet<&str> = member.iter().map(|gpu| &*gpu.clock.model).collect();
        let of_models = models.into_iter().filter_map(|model| {
            let others = members.iter().enumerate().filter(|(other, _)| *other != at);
            let others = others.flat_map(|(_, gpus)| gpus.iter().map(|gpu| &gpu.clock));
            let others = PeerGpus::of(others.filter(|other| other.model == model).collect())?;
            let own = member.iter().filter(|gpu| gpu.clock.model == model);
            let slow: Vec<SlowFinding<'g>> = own.filter_map(|gpu| others.judge(gpu)).collect();
            slow.into_iter().min_by_key(SlowFinding::rank)
        });
        of_models.min_by_key(SlowFinding::rank)
    };
    members.iter().enumerate().map(judge).collect()
}

impl SlowFinding<'_> {
    /// Smaller for a GPU that stands out more.
    fn rank(&self) -> (Sign, u8, u8) {
        (self.sign, self.gpu.clock.percent, self.power.map_or(u8::MAX, |(own, _)| own))
    }
}

/// The GPUs of one model that the other members hold.
struct PeerGpus<'g> {
    clocks: Vec<&'g Clock>,
    median: u8,
    /// The median of those with a meter.
    power: Option<u8>,
}

impl<'g> PeerGpus<'g> {
    /// `None` without a GPU.
    fn of(clocks: Vec<&'g Clock>) -> Option<Self> {
        let power = median(clocks.iter().filter_map(|clock| clock.power).collect());
        let median = median(clocks.iter().map(|clock| clock.percent).collect())?;
        Some(Self { clocks, median, power })
    }

    /// Why a GPU is slow; `None` if it does not stand out.
    fn judge<'m>(&self, gpu: &'m GpuSpeed) -> Option<SlowFinding<'m>> {
        let limits = gpu.clock.limits.iter().map(String::as_str).filter(|limit| {
            let limited = self.clocks.iter().filter(|other| other.limits.iter().any(|known| known == limit));
            limited.count() * 2 < self.clocks.len()
        });
        let limits: Vec<&str> = limits.collect();
        let is_clock_below = |least: u8| self.median >= gpu.clock.percent.saturating_add(least);
        let power = |least: u8| {
            let (own, others) = gpu.clock.power.zip(self.power)?;
            (others >= own.saturating_add(least)).then_some((own, others))
        };
        let has_cause = !limits.is_empty() || power(POWER_NEAR).is_some();
        let sign = if is_clock_below(if has_cause { NEAR } else { FAR }) {
            Sign::Clock
        } else if limits.iter().any(|limit| HARDWARE.contains(limit)) {
            Sign::Throttle
        } else {
            power(POWER_FAR).map(|_| Sign::Power)?
        };
        Some(SlowFinding { gpu, sign, median: self.median, power: power(POWER_NEAR), limits })
    }
}

/// The median; of two the lower one: a member is named rather too seldom.
fn median(mut values: Vec<u8>) -> Option<u8> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: [usize; 0] = [];

    fn gpu(percent: u8, limits: &[&str]) -> GpuSpeed {
        let limits = limits.iter().map(|limit| (*limit).to_owned()).collect();
        let clock = Clock { index: 3, model: "H100".to_owned(), percent, power: None, limits };
        GpuSpeed { node: "n".into(), clock }
    }

    fn drawing(percent: u8, power: u8) -> GpuSpeed {
        let mut gpu = gpu(percent, &[]);
        gpu.clock.power = Some(power);
        gpu
    }

    /// Positions of the slow members.
    fn positions(members: &[Vec<GpuSpeed>]) -> Vec<usize> {
        let members: Vec<&[GpuSpeed]> = members.iter().map(Vec::as_slice).collect();
        let found = slow(&members);
        found.iter().enumerate().filter_map(|(at, slow)| slow.is_some().then_some(at)).collect()
    }

    /// Members of one GPU each.
    fn singles(percents: &[u8]) -> Vec<usize> {
        positions(&percents.iter().map(|percent| vec![gpu(*percent, &[])]).collect::<Vec<_>>())
    }

    #[test]
    fn member_far_below_the_others_is_slow() {
        assert_eq!(singles(&[100, 50]), [1]);
        assert_eq!(singles(&[80, 100, 100, 90]), [0]);
        assert_eq!(singles(&[100, 60, 100, 50, 100]), [1, 3]);
    }

    #[test]
    fn none_is_slow_alone_or_among_equals() {
        assert_eq!(singles(&[]), NONE);
        assert_eq!(singles(&[10]), NONE);
        assert_eq!(singles(&[50, 50, 50]), NONE);
        assert_eq!(singles(&[90, 100, 100]), NONE);
        // Half of the gang is slow: which half is wrong is not known.
        assert_eq!(singles(&[50, 50, 100]), NONE);
    }

    /// The other seven GPUs of the member wait for it too.
    #[test]
    fn member_is_as_slow_as_its_slowest_gpu() {
        let fast = || vec![gpu(100, &[]), gpu(100, &[])];
        let members = [fast(), vec![gpu(100, &[]), gpu(30, &[])], fast()];
        assert_eq!(positions(&members), [1]);
    }

    #[test]
    fn limit_that_stands_out_needs_less_difference() {
        let others = |limits: &[&str]| vec![gpu(100, limits), gpu(100, limits)];
        let member = || vec![gpu(90, &["power-cap"])];
        assert_eq!(positions(&[member(), others(&[])]), [0]);
        assert_eq!(positions(&[member(), others(&["power-cap"])]), NONE);
        assert_eq!(positions(&[vec![gpu(100, &["power-cap"])], others(&[])]), NONE);
    }

    /// The hardware halves the clock, or worse, for the part of a minute that the rounded mean does not show.
    #[test]
    fn slowdown_by_hardware_stands_out_alone() {
        for limit in HARDWARE {
            let members = [vec![gpu(100, &[limit])], vec![gpu(100, &[])], vec![gpu(100, &[])]];
            assert_eq!(positions(&members), [0], "{limit}");
            let members: Vec<&[GpuSpeed]> = members.iter().map(Vec::as_slice).collect();
            assert_eq!(slow(&members)[0].as_ref().unwrap().sign, Sign::Throttle);
            let all = [vec![gpu(100, &[limit])], vec![gpu(100, &[limit])], vec![gpu(100, &[])]];
            assert_eq!(positions(&all), NONE, "{limit}");
        }
    }

    #[test]
    fn power_far_below_the_others_stands_out() {
        let of = |own: GpuSpeed| positions(&[vec![own], vec![drawing(100, 90)], vec![drawing(100, 80)]]);
        assert_eq!(of(drawing(100, 40)), [0]);
        assert_eq!(of(drawing(100, 50)), NONE);
        // With a low clock less is enough.
        assert_eq!(of(drawing(90, 60)), [0]);
        assert_eq!(of(drawing(90, 70)), NONE);
        assert_eq!(of(gpu(100, &[])), NONE, "a GPU without a meter");
        let unmetered = [vec![drawing(100, 0)], vec![gpu(100, &[])], vec![gpu(100, &[])]];
        assert_eq!(positions(&unmetered), NONE);
    }

    #[test]
    fn text_names_power_that_stands_out() {
        let members = [vec![drawing(100, 30), drawing(100, 90)], vec![drawing(100, 90)]];
        let members: Vec<&[GpuSpeed]> = members.iter().map(Vec::as_slice).collect();
        let found = slow(&members)[0].clone().unwrap();
        assert_eq!(found.sign, Sign::Power);
        assert_eq!(
            found.to_string(),
            "GPU 3 of n runs at 100 % of its highest clock, the other members at 100 %; it draws 30 % of its power limit, they 90 %"
        );
    }

    #[test]
    fn other_models_are_not_compared() {
        let mut slow = gpu(40, &[]);
        slow.clock.model = "L4".to_owned();
        assert_eq!(positions(&[vec![slow], vec![gpu(100, &[])], vec![gpu(100, &[])]]), NONE);
    }

    #[test]
    fn text_names_gpu_numbers_and_limits() {
        let members = [vec![gpu(50, &["hw-power-brake", "hw-slowdown"])], vec![gpu(100, &[])]];
        let members: Vec<&[GpuSpeed]> = members.iter().map(Vec::as_slice).collect();
        assert_eq!(
            slow(&members)[0].as_ref().unwrap().to_string(),
            "GPU 3 of n runs at 50 % of its highest clock, the other members at 100 %; limited by hw-power-brake, hw-slowdown"
        );
    }

    proptest! {
        /// Without limits a member is slow if and only if more than half of the others' GPUs are 20 percent faster than its
        /// slowest one.
        #[test]
        fn slow_member_is_far_below_most_other_gpus(
            members in prop::collection::vec(prop::collection::vec(0..=10u8, 0..4), 0..6),
        ) {
            let speeds: Vec<Vec<GpuSpeed>> = members
                .iter()
                .map(|gpus| gpus.iter().map(|tenths| gpu(tenths * 10, &[])).collect())
                .collect();
            let found = positions(&speeds);
            for (at, gpus) in members.iter().enumerate() {
                let others: Vec<u8> =
                    members.iter().enumerate().filter(|(other, _)| *other != at).flat_map(|(_, gpus)| gpus.clone()).collect();
                let expected = gpus.iter().min().is_some_and(|slowest| {
                    let faster = others.iter().filter(|other| **other >= slowest + 2).count();
                    faster * 2 > others.len()
                });
                prop_assert_eq!(found.contains(&at), expected, "{:?} {}", members, at);
            }
        }
    }
}
