//! Which members of a gang are slow. A member is as fast as its slowest GPU, and is compared with the median of the GPUs of the
//! same model that the other members hold. It is slow if its clock is
//!
//! - [`FAR`] percent of the highest clock or more below that median, or
//! - [`NEAR`] percent or more below it, and limited by something that less than half of those GPUs are limited by.
//!
//! So no member is slow if all are equally slow, and none if most of the others are as slow.

use std::fmt;

use gantry_api::NodeName;

use super::clocks::Clock;

/// How far below the median a clock without a cause must be, in percent of the highest clock. Clocks are reported in
/// steps of 10.
const FAR: u8 = 20;
/// The same for a clock with a cause that stands out.
const NEAR: u8 = 10;

/// A GPU of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuSpeed {
    /// Its node.
    pub(crate) node: NodeName,
    /// Its clock.
    pub(crate) clock: Clock,
}

/// Why a member is slow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slow<'g> {
    /// Its slowest GPU.
    pub(crate) gpu: &'g GpuSpeed,
    /// The median of the other members' GPUs, in percent.
    pub(crate) median: u8,
    /// What limits the GPU and less than half of the others.
    pub(crate) limits: Vec<&'g str>,
}

impl fmt::Display for Slow<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu: GpuSpeed { node, clock }, median, limits } = self;
        write!(
            f,
            "GPU {} of {node} runs at {} % of its highest clock, the other members at {median} %",
            clock.index, clock.percent
        )?;
        match limits[..] {
            [] => Ok(()),
            _ => write!(f, "; limited by {}", limits.join(", ")),
        }
    }
}

/// For each member, by the GPUs that it holds, why it is slow.
pub(crate) fn slow<'g>(members: &[&'g [GpuSpeed]]) -> Vec<Option<Slow<'g>>> {
    let judge = |(at, member): (usize, &&'g [GpuSpeed])| {
        let gpu = member.iter().min_by_key(|gpu| gpu.clock.percent)?;
        let others = members.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.flat_map(|(_, gpus)| gpus.iter().map(|gpu| &gpu.clock));
        let mut others: Vec<&Clock> = others.filter(|other| other.model == gpu.clock.model).collect();
        others.sort_by_key(|other| other.percent);
        // Of two medians the lower one: a member is named rather too seldom.
        let median = others.get(others.len().checked_sub(1)? / 2)?.percent;
        let limits = gpu.clock.limits.iter().map(String::as_str).filter(|limit| {
            let limited = others.iter().filter(|other| other.limits.iter().any(|known| known == limit));
            limited.count() * 2 < others.len()
        });
        let limits: Vec<&str> = limits.collect();
        let least = if limits.is_empty() { FAR } else { NEAR };
        let is_slow = median >= gpu.clock.percent.saturating_add(least);
        is_slow.then_some(Slow { gpu, median, limits })
    };
    members.iter().enumerate().map(judge).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: [usize; 0] = [];

    fn gpu(percent: u8, limits: &[&str]) -> GpuSpeed {
        let limits = limits.iter().map(|limit| (*limit).to_owned()).collect();
        GpuSpeed { node: "n".into(), clock: Clock { index: 3, model: "H100".to_owned(), percent, limits } }
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
        let member = || vec![gpu(90, &["hw-power-brake"])];
        assert_eq!(positions(&[member(), others(&[])]), [0]);
        assert_eq!(positions(&[member(), others(&["hw-power-brake"])]), NONE);
        assert_eq!(positions(&[vec![gpu(100, &["hw-power-brake"])], others(&[])]), NONE);
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
