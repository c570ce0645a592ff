//! Kubernetes' own groups: a PodGroup of scheduling.k8s.io (1.36 and later), a Workload (1.35). Both are named in the pod's spec; sizes stand in
//! the object.

use super::own::Own;
use super::{Found, PodView};
use crate::claim::{OwnerKind, OwnerRef};
use crate::key::Dialect;

/// `spec.schedulingGroup.podGroupName`.
pub(super) fn pod_group<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.scheduling_group.filter(|name| !name.is_empty())?;
    let mut found = Found::new(Dialect::PodGroup, name);
    found.owner = Some(pod.beside(OwnerKind::PodGroup, name));
    Some(found)
}

/// `spec.workloadRef`: each group of a Workload is a gang, and each replica of a group.
pub(super) fn workload<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let workload = pod.workload.filter(|workload| !workload.name.is_empty())?;
    let mut name = format!("{}/{}", workload.name, workload.pod_group);
    if let Some(replica) = workload.replica_key.filter(|key| !key.is_empty()) {
        name = format!("{name}/{replica}");
    }
    let mut found = Found::new(Dialect::Workload, &name);
    found.owner = Some(OwnerRef {
        part: workload.pod_group.into(),
        ..pod.beside(OwnerKind::Workload, workload.name)
    });
    Some(found)
}
