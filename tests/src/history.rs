//! What happened on a cluster while parts of it failed, and the checker that judges it afterwards. The history is what
//! containers, the API server and the tests saw; nothing in it comes from Gantry's daemons.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

/// Seconds that a gang may have too few members bound while others of it wait: a member that was lost is made again by its
/// controller, and its place may have gone to others meanwhile.
const SHORT_LIMIT: f64 = 120.0;

/// Everything that was seen. Times are seconds of the machine's uptime.
#[derive(Debug, Clone, Default, Serialize)]
pub struct History {
    /// The seed of the choices.
    pub seed: u64,
    /// What failed, in order.
    pub faults: Vec<Fault>,
    /// The jobs, as they were seen from time to time.
    pub looks: Vec<Look>,
    /// The containers, as they wrote down themselves.
    pub stays: Vec<Stay>,
    /// Jobs that had not ended when there had long been no fault any more, and why.
    pub unfinished: BTreeMap<String, String>,
}

/// Something that was made to fail.
#[derive(Debug, Clone, Serialize)]
pub struct Fault {
    /// When.
    pub at: f64,
    /// What.
    pub what: String,
}

/// The jobs at one time, by name.
#[derive(Debug, Clone, Serialize)]
pub struct Look {
    /// When.
    pub at: f64,
    /// What was seen of each.
    pub jobs: BTreeMap<String, Members>,
}

/// The members of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Members {
    /// How many are useful only together.
    pub min: usize,
    /// Pods with a node, which have not ended.
    pub bound: usize,
    /// Members that have ended well.
    pub done: usize,
    /// Pods without a node.
    pub waiting: usize,
}

impl Members {
    /// Some have devices, and others that are needed beside them wait for theirs.
    fn is_short(&self) -> bool {
        self.bound > 0 && self.waiting > 0 && self.bound + self.done < self.min
    }
}

/// One container's stay on its devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stay {
    /// Its pod.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// The devices it was given.
    pub devices: BTreeSet<String>,
    /// When it began, in seconds of the machine's uptime.
    pub from: f64,
    /// When it ended, or was last seen to live; none if it has not written that yet.
    pub to: Option<f64>,
}

/// What is wrong in a history; empty if it is as it must be: no device was in two containers at once, no gang was left with
/// too few members bound, and every job has ended.
#[must_use]
pub fn judge(history: &History) -> Vec<String> {
    let mut wrong: Vec<String> = device_twice(&history.stays).into_iter().collect();
    wrong.extend(left_short(&history.looks));
    let unfinished = history.unfinished.iter();
    wrong.extend(unfinished.map(|(job, why)| format!("job {job} has not ended: {why}")));
    wrong
}

/// Two containers that had one device at the same time, if there are any. A stay without an end lasts for ever.
#[must_use]
pub fn device_twice<'a>(stays: impl IntoIterator<Item = &'a Stay>) -> Option<String> {
    let mut by_device: BTreeMap<(&str, &str), Vec<&Stay>> = BTreeMap::new();
    for stay in stays {
        for device in &stay.devices {
            by_device.entry((&stay.node, device)).or_default().push(stay);
        }
    }
    by_device.into_iter().find_map(|((node, device), mut holders)| {
        holders.sort_by(|a, b| a.from.total_cmp(&b.from));
        // One that ends last is compared with all that begin before that.
        let mut last: Option<&Stay> = None;
        holders.into_iter().find_map(|stay| {
            let ended = last.map_or(f64::NEG_INFINITY, |last| last.to.unwrap_or(f64::INFINITY));
            let both = last.filter(|_| ended > stay.from).map(|last| {
                let (earlier, later, from) = (&last.pod, &stay.pod, stay.from);
                format!("{device} of {node} was in {earlier} until {ended} and in {later} from {from}")
            });
            if stay.to.unwrap_or(f64::INFINITY) > ended {
                last = Some(stay);
            }
            both
        })
    })
}

/// Gangs that had too few members bound for too long.
fn left_short(looks: &[Look]) -> Vec<String> {
    let mut since: BTreeMap<&str, f64> = BTreeMap::new();
    let mut wrong = BTreeMap::new();
    for look in looks {
        since.retain(|job, _| look.jobs.get(*job).is_some_and(Members::is_short));
        for (job, members) in look.jobs.iter().filter(|(_, members)| members.is_short()) {
            let short_for = look.at - *since.entry(job).or_insert(look.at);
            if short_for > SHORT_LIMIT {
                wrong.insert(
                    job,
                    format!("gang {job} has been short of members for {short_for:.0} s: {members:?}"),
                );
            }
        }
    }
    wrong.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stay(pod: &str, device: &str, from: f64, to: Option<f64>) -> Stay {
        Stay { pod: pod.into(), node: "n".into(), devices: [device.to_owned()].into(), from, to }
    }

    fn of_stays(stays: Vec<Stay>) -> Vec<String> {
        judge(&History { stays, ..History::default() })
    }

    #[test]
    fn device_is_in_one_container_at_a_time() {
        assert_eq!(of_stays(vec![stay("b", "g", 2.0, None), stay("a", "g", 1.0, Some(2.0))]), [""; 0]);
        let both = of_stays(vec![stay("a", "g", 1.0, Some(2.5)), stay("b", "g", 2.0, Some(3.0))]);
        assert_eq!(both, ["g of n was in a until 2.5 and in b from 2"]);
        assert_eq!(of_stays(vec![stay("a", "g", 1.0, None), stay("b", "h", 2.0, None)]), [""; 0]);
    }

    #[test]
    fn container_without_an_end_lasts_for_ever() {
        assert_eq!(of_stays(vec![stay("a", "g", 1.0, None), stay("b", "g", 9.0, Some(9.5))]).len(), 1);
    }

    #[test]
    fn long_stay_is_compared_with_all_that_begin_within_it() {
        let within = vec![
            stay("long", "g", 1.0, Some(9.0)),
            stay("short", "h", 2.0, Some(3.0)),
            stay("other", "g", 8.0, Some(8.5)),
        ];
        assert_eq!(of_stays(within), ["g of n was in long until 9 and in other from 8"]);
    }

    fn look(at: f64, bound: usize, done: usize, waiting: usize) -> Look {
        Look { at, jobs: [("job".to_owned(), Members { min: 3, bound, done, waiting })].into() }
    }

    fn of_looks(looks: Vec<Look>) -> Vec<String> {
        judge(&History { looks, ..History::default() })
    }

    #[test]
    fn gang_may_not_stay_short_of_members() {
        let short = of_looks(vec![look(0.0, 1, 0, 2), look(100.0, 1, 1, 1), look(200.0, 1, 1, 1)]);
        assert_eq!(short.len(), 1);
        insta::assert_snapshot!(short[0], @"gang job has been short of members for 200 s: Members { min: 3, bound: 1, done: 1, waiting: 1 }");
    }

    #[test]
    fn gang_may_be_short_for_a_while() {
        assert_eq!(of_looks(vec![look(0.0, 1, 0, 2), look(100.0, 3, 0, 0), look(200.0, 2, 0, 1)]), [""; 0]);
        // All wait, all that are needed have ended or run, or the missing one does not exist.
        for (bound, done, waiting) in [(0, 1, 2), (1, 2, 1), (2, 0, 0)] {
            let same = [0.0, 200.0].map(|at| look(at, bound, done, waiting)).to_vec();
            assert_eq!(of_looks(same), [""; 0], "{bound} {done} {waiting}");
        }
    }

    #[test]
    fn job_that_has_not_ended_is_wrong() {
        let unfinished = [("job".to_owned(), "1 pod is Pending".to_owned())].into();
        let wrong = judge(&History { unfinished, ..History::default() });
        assert_eq!(wrong, ["job job has not ended: 1 pod is Pending"]);
    }
}
