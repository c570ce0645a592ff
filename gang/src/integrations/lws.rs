//! LeaderWorkerSet: each group, a leader and its workers, is a gang. The groups of one set are replicas of each other and not one gang.

use super::own::Own;
use super::value::{self, MOST_MEMBERS, number};
use super::{Found, PodView, rank};
use crate::key::Integration;
use crate::membership::{OwnerKind, Size};

const NAME: &str = "leaderworkerset.sigs.k8s.io/name";
const GROUP: &str = "leaderworkerset.sigs.k8s.io/group-index";
const WORKER: &str = "leaderworkerset.sigs.k8s.io/worker-index";
const SIZE: &str = "leaderworkerset.sigs.k8s.io/size";
const REVISION: &str = "leaderworkerset.sigs.k8s.io/template-revision-hash";
const EXCLUSIVE: &str = "leaderworkerset.sigs.k8s.io/exclusive-topology";
const SUBGROUP_EXCLUSIVE: &str = "leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology";
const SUBGROUP_SIZE: &str = "leaderworkerset.sigs.k8s.io/subgroup-size";

/// The two roles, as messages and [`crate::OwnerFacts::by_role`] name them.
pub(super) const LEADER: &str = "leader";
pub(super) const WORKERS: &str = "worker";

/// The gang of a LeaderWorkerSet's pod.
pub(super) fn gang<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.label(NAME).filter(|name| !name.is_empty())?;
    // The leader's stateful set has the first label and no group; it is no pod. A pod always has both.
    let group = pod.label(GROUP)?;
    let kind = OwnerKind::LeaderWorkerSet;
    let mut found = Found::of_object(pod, Integration::LeaderWorkerSet, kind, &format!("label {NAME}"), name);
    let group = found.word(&format!("label {GROUP}"), Some(group));
    found.name = format!("{}-{group}", found.name).into();
    // A group that is recreated from another template is another gang, though it has the same name.
    found.incarnation = found.word(&format!("label {REVISION}"), pod.label(REVISION)).into();
    found.rank = rank::index(pod.label(WORKER));
    found.role = if found.rank == Some(0) { LEADER } else { WORKERS };
    let size =
        match pod.annotation(SIZE).map(|size| number(format!("annotation {SIZE}"), size, 1..=MOST_MEMBERS)) {
            Some(Ok(size)) => size,
            Some(Err(wrong)) => {
                found.faults.push(wrong);
                return Some(found);
            }
            None => return Some(found),
        };
    let mut min = size;
    if let Some(label) = pod.annotation(EXCLUSIVE).filter(|label| !label.is_empty()) {
        // The workers are made only when the leader has a node, and are pinned to its domain: the leader is a gang of its own, and so are
        // they.
        found.name = format!("{}/{}", found.name, found.role).into();
        found.owner = None;
        min = if found.role == LEADER { 1 } else { size.saturating_sub(1).max(1) };
        found.options.hint = value::hint(label, None);
    } else if let Some(label) = pod.annotation(SUBGROUP_EXCLUSIVE).filter(|label| !label.is_empty()) {
        // Its leader may be one more than the sub-groups have. Where it asks for no devices it is in no slice anyway: that they make up the
        // members is seen when those are known.
        let slice = rank::index(pod.annotation(SUBGROUP_SIZE)).filter(|sub| *sub > 0);
        found.options.hint = value::hint(label, slice);
    }
    found.size = Size::Stated { min, total: Some(min) };
    found.size_said = "annotation leaderworkerset.sigs.k8s.io/size";
    Some(found)
}

/// The place of a pod among all groups of its set, which may be one gang where something else names it.
pub(super) fn rank_in_set(pod: &PodView<'_>) -> Option<u32> {
    let worker = rank::index(pod.label(WORKER))?;
    rank::within(rank::index(pod.label(GROUP)).unwrap_or(0), worker)
}
