//! Whether an owner has finished, or is suspended: its lost pods are not recreated then, or not before it resumes. Only a final state
//! counts as finished, not a run that its controller restarts.

use serde_json::Value;

use crate::membership::OwnerKind;

/// What of an owner's status is read: all the rest need not be kept.
pub const STATUS: [&str; 3] = ["phase", "conditions", "completionTime"];

/// Conditions that say so while they are `True`.
fn conditions(kind: OwnerKind) -> &'static [&'static str] {
    match kind {
        // The last two come first: from then on its controller only removes pods.
        OwnerKind::Job => &["Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"],
        OwnerKind::JobSet => &["Completed", "Failed"],
        OwnerKind::PyTorchJob
        | OwnerKind::TfJob
        | OwnerKind::MpiJob
        | OwnerKind::XgBoostJob
        | OwnerKind::PaddleJob
        | OwnerKind::JaxJob => &["Succeeded", "Failed"],
        OwnerKind::PodGroup
        | OwnerKind::Workload
        | OwnerKind::CoschedulingPodGroup
        | OwnerKind::KoordinatorPodGroup
        | OwnerKind::VolcanoPodGroup
        | OwnerKind::KaiPodGroup
        | OwnerKind::LeaderWorkerSet
        | OwnerKind::RayCluster => &[],
    }
}

/// The phase that says so.
fn phase(kind: OwnerKind) -> Option<&'static str> {
    (kind == OwnerKind::VolcanoPodGroup).then_some("Completed")
}

/// Whether the object's status says so. What cannot be read says nothing.
pub(super) fn is_over(kind: OwnerKind, object: &Value) -> bool {
    let Some(status) = object.get("status") else {
        return false;
    };
    let now = status.get("phase").and_then(Value::as_str);
    if now.is_some() && now == phase(kind) {
        return true;
    }
    let all = status.get("conditions").and_then(Value::as_array);
    all.into_iter().flatten().any(|condition| {
        let field = |name: &str| condition.get(name).and_then(Value::as_str);
        let says = field("type").filter(|name| conditions(kind).contains(name));
        // An MPIJob that lost a worker by eviction reports `Failed` too, and goes on: it has ended once it has a completion time.
        let goes_on =
            kind == OwnerKind::MpiJob && says == Some("Failed") && status.get("completionTime").is_none();
        says.is_some() && !goes_on && field("status") == Some("True")
    })
}

/// Whether the object's spec says that it is to be suspended: its controller removes the pods, and recreates them once it is not. So Kueue
/// takes a job back that has to go for another.
pub(super) fn is_suspended(kind: OwnerKind, object: &Value) -> bool {
    let field = match kind {
        OwnerKind::Job | OwnerKind::JobSet | OwnerKind::RayCluster => "/spec/suspend",
        OwnerKind::PyTorchJob
        | OwnerKind::TfJob
        | OwnerKind::MpiJob
        | OwnerKind::XgBoostJob
        | OwnerKind::PaddleJob
        | OwnerKind::JaxJob => "/spec/runPolicy/suspend",
        OwnerKind::PodGroup
        | OwnerKind::Workload
        | OwnerKind::CoschedulingPodGroup
        | OwnerKind::KoordinatorPodGroup
        | OwnerKind::VolcanoPodGroup
        | OwnerKind::KaiPodGroup
        | OwnerKind::LeaderWorkerSet => return false,
    };
    object.pointer(field).and_then(Value::as_bool) == Some(true)
}
