//! Pods exactly as controllers and people leave them, and what is made of each.

mod controllers;
mod forged;
mod grouped;
mod own;
mod properties;

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Controller, PodView, WorkloadRef, membership, reads};
use crate::key::Integration;
use crate::membership::{Membership, OwnerKind, OwnerRef, Size};

/// What is made of a pod's JSON. Labels and annotations that [`reads`] does not let through are dropped before, as a reader of pods does.
pub(super) fn claimed(pod: &Value) -> Option<Membership> {
    let map = |pointer: &str| -> Option<BTreeMap<String, String>> {
        let object = pod.pointer(pointer)?.as_object()?;
        let kept = object.iter().filter(|(name, _)| reads(name));
        Some(kept.map(|(name, text)| (name.clone(), text.as_str().unwrap_or_default().to_owned())).collect())
    };
    let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
    let (labels, annotations) = (map("/metadata/labels"), map("/metadata/annotations"));
    let owners = pod.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    let controller = owners.into_iter().flatten().find(|owner| owner["controller"] == true);
    let of = |owner: &'_ Value, field: &str| owner[field].as_str().unwrap_or_default().to_owned();
    let controller =
        controller.map(|owner| ["apiVersion", "kind", "name", "uid"].map(|field| of(owner, field)));
    membership(&PodView {
        namespace: text("/metadata/namespace").unwrap_or("ml"),
        name: text("/metadata/name").unwrap_or_default(),
        uid: text("/metadata/uid").unwrap_or_default(),
        labels: labels.as_ref(),
        annotations: annotations.as_ref(),
        controller: controller.as_ref().map(|[api_version, kind, name, uid]| Controller {
            api_version,
            kind,
            name,
            uid,
        }),
        scheduling_group: text("/spec/schedulingGroup/podGroupName"),
        workload: text("/spec/workloadRef/name").map(|name| WorkloadRef {
            name,
            pod_group: text("/spec/workloadRef/podGroup").unwrap_or_default(),
            replica_key: text("/spec/workloadRef/podGroupReplicaKey"),
        }),
    })
}

/// Which gang, in one line: convention, name, incarnation.
pub(super) fn gang(membership: &Membership) -> (Integration, &str, &str) {
    (membership.key.integration, &membership.key.name, &membership.key.incarnation)
}

pub(super) fn owner(kind: OwnerKind, name: &str, part: &str) -> Option<OwnerRef> {
    Some(OwnerRef { kind, namespace: "ml".into(), name: name.into(), part: part.into() })
}

pub(super) fn stated(min: u32, total: Option<u32>) -> Size {
    Size::Stated { min, total }
}

/// The faults as people read them.
pub(super) fn faults(membership: &Membership) -> Vec<String> {
    membership.faults.iter().map(ToString::to_string).collect()
}
