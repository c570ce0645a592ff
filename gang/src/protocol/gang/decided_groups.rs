//! The groups of a tree of groups that a decision was about.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gantry_api::Decision;

use crate::quorum::{Quorum, Selection};

/// Those with as many reservations, or members that have ended well (`completed`, by role), as they need, or else those with the most.
pub(super) fn decided_groups(
    quorum: Option<&Quorum>,
    decision: &Decision,
    completed: &BTreeMap<String, u32>,
) -> Selection {
    let mut reserved: BTreeMap<&str, u32> = BTreeMap::new();
    for reservation in &decision.reservations {
        *reserved.entry(reservation.role.as_str()).or_default() += 1;
    }
    for (role, completed) in completed {
        let count = reserved.entry(role).or_default();
        *count = count.saturating_add(*completed);
    }
    let min_of = |role: &str| quorum.and_then(|quorum| quorum.min_of(role));
    let is_whole = |role: &str| min_of(role) <= reserved.get(role).copied();
    let is_of_decision = |selection: &Selection| {
        selection.values().fold(0, |sum: u32, min| sum.saturating_add(*min)) == decision.min
    };
    let selections = |of: &dyn Fn(&str) -> bool| -> Vec<Selection> {
        let all = quorum.map(|quorum| quorum.selections(&of, &|role| role.to_owned()));
        all.into_iter().flatten().filter(is_of_decision).collect()
    };
    let covered = |selection: &Selection| {
        let counts =
            selection.iter().map(|(role, min)| reserved.get(&**role).map_or(0, |count| *count.min(min)));
        counts.fold(0, u32::saturating_add)
    };
    let placed = |selection: &Selection| {
        decision.reservations.iter().filter(|reservation| selection.contains_key(&*reservation.role)).count()
    };
    // A lost member may have no reservation. Where counts are equal, a group that is placed was decided later than one that has ended.
    let with_most = || {
        let all = selections(&|_| true).into_iter();
        all.min_by_key(|selection| Reverse((covered(selection), placed(selection))))
    };
    // Too few groups have pods now, a minimum may have changed since, or pods of other groups are seen later. A member may have ended well
    // and its reservation still be written.
    let of_reserved = || {
        let counts = reserved.iter().map(|(role, count)| {
            let count = min_of(role).map_or(*count, |min| min.min(*count));
            ((*role).into(), count)
        });
        counts.collect()
    };
    selections(&is_whole).into_iter().next().or_else(with_most).unwrap_or_else(of_reserved)
}
