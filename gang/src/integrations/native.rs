//! Kubernetes' own groups: a PodGroup of scheduling.k8s.io (1.36 and later), a Workload (1.35). Both are named in the pod's spec; sizes
//! stand in the object.

use super::own::Own;
use super::{Found, PodView};
use crate::key::Integration;
use crate::membership::OwnerKind;

/// `spec.schedulingGroup.podGroupName`.
pub(super) fn pod_group<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.scheduling_group.filter(|name| !name.is_empty())?;
    let place = "spec.schedulingGroup.podGroupName";
    Some(Found::of_object(pod, Integration::PodGroup, OwnerKind::PodGroup, place, name))
}

/// `spec.workloadRef`: each group of a Workload is a gang, and each replica of a group.
pub(super) fn workload<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let workload = pod.workload.filter(|workload| !workload.name.is_empty())?;
    let place = "spec.workloadRef.name";
    let mut found = Found::of_object(pod, Integration::Workload, OwnerKind::Workload, place, workload.name);
    let group = found.word("spec.workloadRef.podGroup", Some(workload.pod_group));
    let replica = found.word("spec.workloadRef.podGroupReplicaKey", workload.replica_key);
    found.name = match replica {
        "" => format!("{}/{group}", found.name),
        _ => format!("{}/{group}/{replica}", found.name),
    }
    .into();
    if let Some(owner) = &mut found.owner {
        owner.part = group.into();
    }
    Some(found)
}
